"""That the kernel's tests can fail: each plausible slip in the kernel, made on purpose, is caught by the comparison the tests use.

A tolerance that forgives a wrong kernel is worse than none. Each slip of the table edits the kernel's own source, runs the edited kernel
through the same harness, and must be caught by one of a few small launches; the text it edits must still be there, so a slip cannot go
stale unseen. The same slips against the contract are `benchmarks/mutation.py --module kernel`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from harness import check, draw, load_source, run_watched, truth
from slips import FAR, KERNEL, edited, slipped

from pytest_specdecode.fused_kv import kernel
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.numerics import NumericsError

SOURCE = Path(kernel.__file__)


@pytest.mark.parametrize("slip", KERNEL)
def test_a_slip_in_the_kernel_is_caught(slip, tmp_path):
    wrong = load_source(slipped(SOURCE, KERNEL[slip], tmp_path), "slipped_kernel").fused_norm_rope
    with pytest.raises((NumericsError, KernelMemoryError, AssertionError)):
        check_all(wrong)


@pytest.mark.parametrize("slip", FAR)
def test_a_slip_that_only_far_offsets_show_still_has_its_text(slip):
    # `test_offsets_do_not_wrap_at_two_to_the_31` is what catches these.
    assert edited(SOURCE.read_text(), FAR[slip]) != SOURCE.read_text()


def check_all(fused_norm_rope):
    # No two extents are equal, and the lanes that rotate are not the lanes that rest.
    shape = {"tokens": 3, "layers": 2, "heads": 3, "head_dim": 40, "rotary_dim": 18}
    tiny = {"scale": 1e-3, "eps": torch.tensor([1e-6, 1e-5])}
    positions = torch.tensor([3, 60, 17])
    check(draw(**shape, positions=positions), fused_norm_rope)
    check(draw(**shape, **tiny, value_scale=0.612), fused_norm_rope, block_rows=16)
    check(draw(**shape, scale=1e-4, eps=torch.tensor([1e-10, 1e-9]), dtype=torch.float16), fused_norm_rope)
    check_rounding(draw(**{**shape, "tokens": 9}, dtype=torch.bfloat16), fused_norm_rope)


def check_rounding(case, fused_norm_rope):
    """K is the truth rounded once, but for the few elements where float32 and float64 round to either side."""
    k, _ = run_watched(case, fused_norm_rope)
    assert (k != truth(case)[0].to(k.dtype)).double().mean() < 0.02


def test_the_unchanged_source_passes(tmp_path):
    path = tmp_path / "unchanged_kernel.py"
    shutil.copy(SOURCE, path)
    check_all(load_source(path, "unchanged_kernel").fused_norm_rope)
