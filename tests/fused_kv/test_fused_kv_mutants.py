"""That the kernel's tests can fail: each plausible slip in the kernel, made on purpose, is caught by the comparison the tests use.

A tolerance that forgives a wrong kernel is worse than none. Each case below edits the kernel's own source in one place, runs the edited
kernel through the same harness, and must be caught; the text it edits must still be there, so a case cannot go stale unseen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import check, draw, load_source

from pytest_specdecode.fused_kv import kernel
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.numerics import NumericsError

SOURCE = Path(kernel.__file__).read_text()

SLIPS = {
    "halves swapped": ("first * cos - second * sin", "second * cos - first * sin"),
    "sign of the rotation": ("first * cos - second * sin", "first * cos + second * sin"),
    "sine and cosine swapped": ("cos = tl.load(table + angle", "cos = tl.load(table + HALF + angle"),
    "position off by one": (
        "mask=active, other=0).to(tl.int64)\n        angle",
        "mask=active, other=0).to(tl.int64) - 1\n        angle",
    ),
    "table row of the tile's first token": (
        "(position * table_stride)[:, None, None]",
        "tl.min(position * table_stride, axis=0)",
    ),
    "epsilon of layer 0": ("tl.load(eps + layer,", "tl.load(eps + layer * 0,"),
    "epsilon left out": ("squares / HEAD_DIM + layer_eps", "squares / HEAD_DIM"),
    "norm weight of layer 0": ("norm_row = (layer * norm_stride)", "norm_row = (layer * 0)"),
    "K of another layer": ("+ layer * kv_layer_stride", "+ (1 - layer) * kv_layer_stride"),
    "layers and tokens swapped": (
        "token * kv_token_stride + layer * kv_layer_stride",
        "token * kv_layer_stride + layer * kv_token_stride",
    ),
    "heads swapped": ("[:, None, None] + head * HEAD_DIM", "[:, None, None] + (NUM_HEADS - 1 - head) * HEAD_DIM"),
    "norm over the rotating lanes only": ("squares += tl.sum(rest * rest, axis=2)", "squares += 0.0"),
    "mean over the rotating lanes": ("squares / HEAD_DIM", "squares / (2 * HALF)"),
    "rest not normed": ("rest = rest * inverse * rest_weight", "rest = rest * rest_weight"),
    "norm weight left out": ("first = first * inverse * first_weight", "first = first * inverse"),
    "one per cent too long": ("inverse = tl.rsqrt(", "inverse = 1.01 * tl.rsqrt("),
    "V taken from K": ("kv + NUM_HEADS * HEAD_DIM + (row", "kv + (row"),
    "V of the next head": (
        "value = tl.load(kv + NUM_HEADS * HEAD_DIM",
        "value = tl.load(kv + (NUM_HEADS - 1) * HEAD_DIM",
    ),
    "V rounded": ("if SCALE_VALUES:", "value = value.to(tl.float8e5).to(value.dtype)\n        if SCALE_VALUES:"),
    "last item left out": ("active = item < num_layers * num_tokens", "active = item < num_layers * num_tokens - 1"),
    "items past the last": ("active = item < num_layers * num_tokens", "active = item < num_layers * num_tokens + 1"),
    "lanes past the head": ("else row_mask & (v_lane < HEAD_DIM)", "else row_mask"),
    "lanes of the other half": ("mask = row_mask if BLOCK_HALF == HALF else row_mask & pair_mask", "mask = row_mask"),
    "heads past the last": ("if BLOCK_HEADS != NUM_HEADS:", "if False:"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_the_kernel_is_caught(slip, dtype, tmp_path):
    right, wrong = SLIPS[slip]
    assert right in SOURCE
    path = tmp_path / "mutated_kernel.py"
    path.write_text(SOURCE.replace(right, wrong))
    with pytest.raises((NumericsError, KernelMemoryError)):
        check_all(load_source(path).fused_norm_rope, dtype)


CASES = [
    lambda dtype: draw(heads=3, head_dim=40, rotary_dim=20, dtype=dtype, positions=torch.tensor([3, 60, 17])),
    lambda dtype: draw(head_dim=40, rotary_dim=20, dtype=dtype, scale=1e-3, eps=torch.tensor([1e-6, 1e-5])),
]


def check_all(fused_norm_rope, dtype):
    for case in CASES:
        check(case(dtype), fused_norm_rope)


def test_the_unchanged_source_passes(tmp_path):
    path = tmp_path / "unchanged_kernel.py"
    path.write_text(SOURCE)
    check_all(load_source(path, "unchanged_kernel").fused_norm_rope, torch.float32)
