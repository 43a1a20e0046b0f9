"""Test classes by which anybody holds an implementation of their own to account.

    from pytest_specdecode.contracts import FusedKVContract

    class TestMine(FusedKVContract):
        build = staticmethod(MyFusedKV)

Every test's id carries the property that it holds, and what an implementation is known not to hold is declared with a reason; see
`docs/contracts.md`. This package imports pytest, Hypothesis and torch, and nothing imports it but tests.
"""

from __future__ import annotations

from pytest_specdecode.contracts.base import Contract, ContractError, cases, examples
from pytest_specdecode.contracts.checkpoint_reader import CheckpointReaderContract
from pytest_specdecode.contracts.draft_layer import DraftLayerContract
from pytest_specdecode.contracts.fused_kv import AxisOutcome, FusedKVContract, try_axis
from pytest_specdecode.contracts.machine import FusedKVMachine, fused_kv_machine
from pytest_specdecode.contracts.rounding import ROUNDINGS, rounded_kv
from pytest_specdecode.watching import last_part, watched

__all__ = [
    "ROUNDINGS",
    "AxisOutcome",
    "CheckpointReaderContract",
    "Contract",
    "ContractError",
    "DraftLayerContract",
    "FusedKVContract",
    "FusedKVMachine",
    "cases",
    "examples",
    "fused_kv_machine",
    "last_part",
    "rounded_kv",
    "try_axis",
    "watched",
]
