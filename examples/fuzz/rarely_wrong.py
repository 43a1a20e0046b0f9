"""A path with two faults that few examples show, to see a fuzzer at work. Run it by name: `pytest examples/fuzz/rarely_wrong.py`."""

import torch

import pytest_specdecode
from pytest_specdecode.contracts import FusedKVContract


class RarelyWrong(pytest_specdecode.FusedKV):
    """K is wrong in stacks of seven layers with heads of five, and where 13 tokens come in float16 to a stack of that dtype."""

    def __init__(self, *args):
        super().__init__(*args, backend="eager")

    def compute(self, ctx_hidden, positions):
        k, v = super().compute(ctx_hidden, positions)
        seven_of_five = (self.num_layers, self.head_dim) == (7, 5)
        thirteen = (len(positions), ctx_hidden.dtype, self.dtype) == (13, torch.float16, torch.float16)
        return (k * 1.5 if seven_of_five or thirteen else k), v


class TestRarelyWrong(FusedKVContract):
    build = staticmethod(RarelyWrong)
