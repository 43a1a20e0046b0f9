"""That the latent kernel's tests can fail: each plausible slip in the kernel, made on purpose, is caught by the comparison the tests use.

Each case below edits the kernel's own source in one place, runs the edited kernel through the same harness, and must be caught; the text
it edits must still be there, so a case cannot go stale unseen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import load_source
from latent_harness import check, draw

from pytest_specdecode.fused_kv import latent_kernel
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.numerics import NumericsError

SOURCE = Path(latent_kernel.__file__).read_text()

SLIPS = {
    "k_pe normed as well": (
        "tl.store(out + (target + first_lane), (first",
        "first *= inverse; tl.store(out + (target + first_lane), (first",
    ),
    "norm over the whole row": (
        "mask = row_mask[:, None] & (lane < RANK)",
        "mask = row_mask[:, None] & (lane < RANK + 2 * HALF)",
    ),
    "mean over the whole row": ("squares / RANK +", "squares / (RANK + 2 * HALF) +"),
    "neox instead of interleaved": ("IS_NEOX=is_neox_style", "IS_NEOX=not is_neox_style"),
    "loaded interleaved, stored in halves": (
        "tl.store(out + (target + first_lane)",
        "tl.store(out + (target + RANK + pair)",
    ),
    "pairs swapped": ("(first * cos - second * sin)", "(second * cos - first * sin)"),
    "sign of the rotation": ("first * cos - second * sin", "first * cos + second * sin"),
    "sine and cosine swapped": ("cos = tl.load(table + angle", "cos = tl.load(table + HALF + angle"),
    "position off by one": ("mask=row_mask, other=0).to(tl.int64)", "mask=row_mask, other=0).to(tl.int64) - 1"),
    "table indexed by token": ("(position * table_stride)", "(token * table_stride)"),
    "epsilon of layer 0": ("tl.load(eps + layer,", "tl.load(eps + layer * 0,"),
    "epsilon left out": ("squares / RANK + layer_eps", "squares / RANK"),
    "norm weight of layer 0": ("(layer * norm_stride)", "(layer * 0)"),
    "norm weight left out": ("latent * inverse * weight", "latent * inverse"),
    "rows of another layer": ("+ layer * kv_layer_stride", "+ (1 - layer) * kv_layer_stride"),
    "written to another layer": ("(layer * out_layer_stride", "((1 - layer) * out_layer_stride"),
    "layers and tokens swapped": (
        "token * kv_token_stride + layer * kv_layer_stride",
        "token * kv_layer_stride + layer * kv_token_stride",
    ),
    "one per cent too long": ("inverse = tl.rsqrt(", "inverse = 1.01 * tl.rsqrt("),
    "k_pe taken from the latent": ("first_lane = RANK + (", "first_lane = RANK - 2 * HALF + ("),
    # Of a norm over the whole row.
    "whole row normed over the latent alone": ("if WHOLE:", "if False:"),
    "k_pe left out of the sum": ("squares += ", "squares += 0 * "),
    "half of k_pe left out of the sum": ("(first * first + second * second, axis=1)", "(first * first, axis=1)"),
    "mean over the latent": ("squares / (RANK + 2 * HALF) +", "squares / RANK +"),
    "epsilon left out of the whole row's": ("(RANK + 2 * HALF) + layer_eps", "(RANK + 2 * HALF)"),
    "k_pe not normed": ("first = first * inverse * first_weight", "first = first * first_weight"),
    "k_pe not weighted": ("second = second * inverse * second_weight", "second = second * inverse"),
    "weights of the latent for k_pe": ("norm_row + first_lane", "norm_row + pair"),
    "weights of k_pe in the other style": ("norm_row + second_lane", "norm_row + (RANK + HALF + pair)"),
    "k_pe's weights of layer 0": ("norm_row + second_lane", "second_lane"),
    "weighted after the turn": (
        "(first * cos - second * sin)",
        "(first_weight * (first / first_weight * cos - second / second_weight * sin) if WHOLE else first * cos - second * sin)",
    ),
    "the first lanes turned": ("first_lane = RANK + (pair if IS_NEOX else 2 * pair)", "first_lane = 2 * pair"),
    "last row left out": ("row_mask = row < num_rows", "row_mask = row < num_rows - 1"),
    "rows past the last": ("row_mask = row < num_rows", "row_mask = row < num_rows + 1"),
    "lanes past the latent": ("mask = row_mask[:, None] & (lane < RANK)", "mask = row_mask[:, None]"),
    "pairs past k_pe": ("pair_mask = row_mask[:, None] & (pair < HALF)", "pair_mask = row_mask[:, None]"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_the_kernel_is_caught(slip, dtype, tmp_path):
    right, wrong = SLIPS[slip]
    assert right in SOURCE
    path = tmp_path / "mutated_latent_kernel.py"
    path.write_text(SOURCE.replace(right, wrong))
    with pytest.raises((NumericsError, KernelMemoryError)):
        check_all(load_source(path, "mutated_latent_kernel").fused_latent_norm_rope, dtype)


CASES = [
    lambda dtype: draw(rank=40, rope_dim=12, dtype=dtype, positions=torch.tensor([3, 60, 17])),
    lambda dtype: draw(rank=40, rope_dim=12, dtype=dtype, scale=1e-3, eps=torch.tensor([1e-6, 1e-5])),
    lambda dtype: draw(
        rank=40,
        rope_dim=12,
        dtype=dtype,
        positions=torch.tensor([3, 60, 17]),
        scale=1e-2,
        latent_norm="whole",
        eps=torch.tensor([1e-4, 1e-6]),
    ),
]


def check_all(fused_latent_norm_rope, dtype):
    for case in CASES:
        check(case(dtype), fused_latent_norm_rope)


def test_the_unchanged_source_passes(tmp_path):
    path = tmp_path / "unchanged_latent_kernel.py"
    path.write_text(SOURCE)
    check_all(load_source(path, "unchanged_latent_kernel").fused_latent_norm_rope, torch.float32)
