"""That the latent kernel's tests can fail: each plausible slip in the kernel, made on purpose, is caught by the comparison the tests use.

Each slip of the table edits the kernel's own source, runs the edited kernel through the same harness, and must be caught by one of a few
small launches; the text it edits must still be there, so a slip cannot go stale unseen.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from harness import load_source
from latent_harness import check, draw, run_watched, truth
from slips import LATENT, slipped

from pytest_specdecode.fused_kv import latent_kernel
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.numerics import NumericsError

SOURCE = Path(latent_kernel.__file__)


@pytest.mark.parametrize("slip", LATENT)
def test_a_slip_in_the_kernel_is_caught(slip, tmp_path):
    wrong = load_source(slipped(SOURCE, LATENT[slip], tmp_path), "slipped_kernel").fused_latent_norm_rope
    with pytest.raises((NumericsError, KernelMemoryError, AssertionError)):
        check_all(wrong)


def check_all(fused_latent_norm_rope):
    shape = {"tokens": 3, "layers": 2, "rank": 40, "rope_dim": 12}
    positions = torch.tensor([3, 60, 17])
    tiny = {"scale": 1e-3, "eps": torch.tensor([1e-6, 1e-5])}
    whole = {"latent_norm": "whole", "scale": 1e-2, "eps": torch.tensor([1e-4, 1e-6])}
    check(draw(**shape, positions=positions), fused_latent_norm_rope)
    check(draw(**shape, positions=positions, **whole), fused_latent_norm_rope)
    check(draw(**shape, **tiny, dtype=torch.bfloat16), fused_latent_norm_rope)
    check(draw(**shape, positions=positions, **whole, dtype=torch.bfloat16), fused_latent_norm_rope)
    check_rounding(draw(**{**shape, "tokens": 9}, dtype=torch.bfloat16), fused_latent_norm_rope)


def check_rounding(case, fused_latent_norm_rope):
    """The rows are the truth rounded once, but for the few elements where float32 and float64 round to either side."""
    rows = run_watched(case, fused_latent_norm_rope)
    assert (rows != truth(case).to(rows.dtype)).double().mean() < 0.02


def test_the_unchanged_source_passes(tmp_path):
    path = tmp_path / "unchanged_latent_kernel.py"
    shutil.copy(SOURCE, path)
    check_all(load_source(path, "unchanged_latent_kernel").fused_latent_norm_rope)
