"""GPUs to compile for where there is none, and what the machine code shows: `benchmarks/gpu_code.py`, for the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_code import TARGETS, NoDevice, disassembled

__all__ = ["TARGETS", "NoDevice", "inspect"]


def inspect(compiled, folder):
    """What cuobjdump says of registers, and the machine code."""
    try:
        return disassembled(compiled)
    except FileNotFoundError as error:
        pytest.skip(str(error))
