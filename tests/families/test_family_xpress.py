"""XPress: DFlash's logits refined in rounds over the whole block.

What these catch: a mixer that looks forward or mixes lanes; a summary that is not the block's mean; a first row conditioned on the anchor;
draft ids used as target ids between rounds. The refiner is written out in NumPy here; `tests/peers/test_peer_dflash.py` holds the same
against speculators' own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_family_forward import Array, Weights, close, numbers, silu, tensor, written

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.families.xpress import XPress, XPressOptions
from pytest_specdecode.testing import expected_tensors, tiny_config

B, RANK = 8, 16


def bias(w: Weights, hidden: Array, previous: NDArray[np.int64]) -> Array:
    name = "refiner_head."
    summary = hidden.mean(axis=0)
    x = np.stack(
        [
            w[name + "in_proj.weight"]
            @ np.concatenate(
                [
                    w[name + "down_h.weight"] @ hidden[row],
                    w[name + "down_g.weight"] @ summary,
                    w[name + "token_embed.weight"][previous[row]],
                ]
            )
            for row in range(B)
        ]
    )
    mixed = x.copy()
    for row in range(B):
        for lane in range(RANK):
            mixed[row, lane] += w[name + "mix_l"][lane, row, : row + 1] @ x[: row + 1, lane]
    inner = silu(mixed @ w[name + "mlp_gate.weight"].T) * (mixed @ w[name + "mlp_up.weight"].T)
    out: Array = (mixed + inner @ w[name + "mlp_down.weight"].T) @ w[name + "readout.weight"].T
    return out


def test_the_bias(tmp_path: Path) -> None:
    draft, w = written(tmp_path, "xpress")
    hidden, previous = numbers(1, B, 64), np.arange(B) * 7 + 3
    head = XPress().build_head(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[arg-type]
    due = bias(w, hidden, previous)
    close(head(tensor(hidden), torch.from_numpy(previous)), due)
    both = head(torch.stack([tensor(hidden), -tensor(hidden)]), torch.from_numpy(previous).expand(2, -1))
    close(both[0], due)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_rounds(tmp_path: Path, from_anchor: bool) -> None:
    draft, w = written(tmp_path, "xpress", sample_from_anchor=from_anchor)
    hidden, base, d2t = numbers(1, B, 64), numbers(2, B, 256), draft.tensor("d2t").numpy()
    anchor, before = 40, 41
    logits = base
    for _ in range(3):
        best = logits.argmax(axis=-1)
        best = best + d2t[best]
        previous = [anchor, *best[:-1]] if from_anchor else [before, anchor, *best[1:-1]]
        logits = base + bias(w, hidden, np.array(previous))
    head = XPress().build_head(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[arg-type]
    found = head.draft(
        tensor(base),
        tensor(hidden),
        torch.tensor(anchor),
        torch.tensor(before),
        rounds=3,
        sample_from_anchor=from_anchor,
        d2t=torch.from_numpy(d2t),
    )
    close(found, logits)


def test_keys_and_tensors() -> None:
    spec, tensors = expected_tensors(tiny_config("xpress"), "xpress")
    assert (spec.family, spec.packaging) == ("xpress", "speculators")
    assert spec.options == XPressOptions(rank=16, mlp_ratio=2, num_jacobi_passes=3)
    assert {item.name: item.shape for item in tensors if item.name.startswith("refiner_head.")} == {
        "refiner_head.token_embed.weight": (512, 16),
        "refiner_head.down_h.weight": (16, 64),
        "refiner_head.down_g.weight": (16, 64),
        "refiner_head.in_proj.weight": (16, 48),
        "refiner_head.mix_l": (16, 8, 8),
        "refiner_head.mlp_gate.weight": (32, 16),
        "refiner_head.mlp_up.weight": (32, 16),
        "refiner_head.mlp_down.weight": (16, 32),
        "refiner_head.readout.weight": (256, 16),
    }


def test_a_head_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    spec, _ = expected_tensors(tiny_config("xpress", xpress_rank=...), "xpress")
    with pytest.raises(LayerBuildError, match="xpress_rank"):
        XPress().build_head(spec, None)  # type: ignore[arg-type]
    draft, _ = written(tmp_path, "xpress")
    del draft.binding.stored["refiner_head.mix_l"]  # type: ignore[union-attr, attr-defined]
    with pytest.raises(LayerBuildError, match=r"refiner_head\.mix_l"):
        XPress().build_head(draft.spec, draft.source())  # type: ignore[arg-type]
