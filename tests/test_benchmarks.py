"""The scripts in `benchmarks/` that need no GPU, and that the one which needs a GPU says so.

Failure modes this file exists to catch: a script for GPUs that ends well where it measured nothing; one whose checks cannot fail; a printed
table of tolerances that is not the table; an error of the kernel above eager code's that nobody looks at.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_for_one_says_so():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("benchmarks/gpu.py needs a GPU: torch sees none")


def test_its_checks_pass_on_a_kernel_that_is_right(benchmark, monkeypatch):
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    assert gpu.correctness([torch.bfloat16]) == 12


@pytest.mark.parametrize("what", ["k", "v"])
def test_its_checks_fail_on_one_that_is_not(what, benchmark, monkeypatch):
    gpu, fused_kv = benchmark("gpu"), importlib.import_module("pytest_specdecode.fused_kv")
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    real, calls = fused_kv.fused_norm_rope, []

    def wrong_at_first(*inputs, **options):
        k, v = real(*inputs, **options)
        calls.append(1)
        if len(calls) == 1:
            (k if what == "k" else v)[1, 2] *= 1.05
        return k, v

    monkeypatch.setattr(fused_kv, "fused_norm_rope", wrong_at_first)
    with pytest.raises(SystemExit, match="wrong on cpu"):
        gpu.correctness([torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernels_error_is_not_above_eagers(dtype, benchmark):
    found = benchmark("errors").errors(dtype, 1, None)
    assert set(found) == {"ours", "eager", "rounded at-the-store", "rounded after-the-norm", "rounded after-each-step"}
    assert all(ours <= eager for ours, eager in zip(found["ours"], found["eager"], strict=True))
    assert found["ours"] == pytest.approx(found["rounded at-the-store"], rel=1e-2)


def test_every_tolerance_has_its_reason():
    from pytest_specdecode.numerics import TOLERANCE_REASONS, TOLERANCES

    assert set(TOLERANCES) == set(TOLERANCE_REASONS)
