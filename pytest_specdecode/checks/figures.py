"""What checks measure for the pictures of a report, in numbers that JSON holds; nothing here judges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_specdecode.checkpoint import TensorHeader
from pytest_specdecode.checks.scan import scan
from pytest_specdecode.errors import DraftError
from pytest_specdecode.families import Draft
from pytest_specdecode.spec import GQASpec, MLASpec, RopeSpec
from pytest_specdecode.target import Target

if TYPE_CHECKING:
    import torch

#: Elements of a tensor that its quantiles are taken of; blocks of rows, evenly spaced.
_MOST_ELEMENTS = 65_536
_BLOCKS = 16
_QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p999": 0.999}


def weight_spreads(draft: Draft) -> dict[str, dict[str, float]]:
    """Per stored name, the quantiles of the magnitudes of up to 65,536 elements, and the largest magnitude of all.

    The largest ones are those of the one pass over all values; of a tensor that holds NaN or infinities, those of its finite elements.
    """
    import torch

    found = {}
    for stats in scan(draft).values():
        magnitudes = torch.cat([block.flatten() for block in _blocks(draft, stats.header)]).abs()
        magnitudes = magnitudes[torch.isfinite(magnitudes)]
        if not magnitudes.numel():
            continue
        levels = torch.tensor(list(_QUANTILES.values()), dtype=torch.float32)
        values = torch.quantile(magnitudes, levels).tolist()
        found[stats.header.name] = {
            **{name: _rounded(value) for name, value in zip(_QUANTILES, values, strict=True)},
            "largest": _rounded(max(abs(stats.minimum), abs(stats.maximum))),
            "std": _rounded(stats.std),
        }
    return found


def _blocks(draft: Draft, header: TensorHeader) -> Iterator[torch.Tensor]:
    """Up to `_MOST_ELEMENTS` elements in float32; only the rows that are taken are read."""
    import torch

    if not header.shape or header.numel <= _MOST_ELEMENTS:
        yield draft.checkpoint.tensor(header.name).to(torch.float32)
        return
    rows, width = header.shape[0], max(1, header.numel // header.shape[0])
    count = max(1, _MOST_ELEMENTS // (width * _BLOCKS))
    starts = dict.fromkeys(int(step * max(0, rows - count) / (_BLOCKS - 1)) for step in range(_BLOCKS))
    left = _MOST_ELEMENTS
    for start in starts:
        block = draft.checkpoint.tensor(header.name, slice(start, min(rows, start + count))).to(torch.float32).flatten()
        yield block[:left]
        left -= block.numel()
        if left <= 0:
            return


def error_by_head(got: torch.Tensor, truth: torch.Tensor) -> list[list[float]]:
    """The relative error of each layer and KV head: root mean square of the error over that of the truth.

    Args:
        got: `[L, T, num_kv_heads, head_dim]`.
        truth: the same in float64.
    """
    error = (got.double() - truth.to(got.device)).square().mean(dim=(1, 3))
    size = truth.to(got.device).double().square().mean(dim=(1, 3)).clamp_min(1e-300)
    found: list[list[float]] = (error / size).sqrt().tolist()
    return [[_rounded(value) for value in row] for row in found]


def rope_curves(
    attentions: Iterable[GQASpec | MLASpec], target: Target, ropes: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The rotary frequencies of the draft's kinds of layers and of the target's, in radians per position.

    A kind whose frequencies do not follow from its configuration is left out.
    """
    mine = {}
    for attention in attentions:
        width = attention.qk_rope_head_dim if isinstance(attention, MLASpec) else attention.head_dim
        if (values := _frequencies(attention.rope, width)) is not None:
            mine[_label(attention.rope)] = values
    head_dim = target.number("qk_rope_head_dim") or target.number("head_dim")
    heads = target.number("num_attention_heads")
    if head_dim is None and target.hidden_size and heads:
        head_dim = target.hidden_size // heads
    theirs = {}
    for fields in ropes:
        theta, kind, part = (
            fields.get("rope_theta"),
            fields.get("rope_type", fields.get("type")),
            fields.get("partial_rotary_factor"),
        )
        if not isinstance(theta, (int, float)) or head_dim is None:
            continue
        rope = RopeSpec(
            theta=float(theta),
            rope_type=kind if isinstance(kind, str) else "default",
            rotary_dim=int(head_dim * part) if isinstance(part, float) else head_dim,
            scaling={key: value for key, value in fields.items() if key not in ("rope_theta", "rope_type", "type")},
            max_position_embeddings=target.max_position_embeddings,
        )
        if (values := _frequencies(rope, head_dim)) is not None:
            theirs[_label(rope)] = values
    return {
        side: [{"label": label, "frequencies": values} for label, values in curves.items()]
        for side, curves in (("draft", mine), ("target", theirs))
    }


def _frequencies(rope: RopeSpec, head_dim: int | None) -> list[float] | None:
    from pytest_specdecode.layers.rope import inv_freq_and_scale

    try:
        values, _ = inv_freq_and_scale(replace(rope, rotary_dim=rope.rotary_dim or head_dim), head_dim=head_dim)
    except (DraftError, ValueError, TypeError, OverflowError):
        return None
    found: list[float] = values.tolist()
    return [_rounded(value) for value in found] if all(map(math.isfinite, found)) else None


def _label(rope: RopeSpec) -> str:
    return f"{rope.rope_type}, theta {rope.theta:g}" if rope.theta is not None else rope.rope_type


def _rounded(value: float) -> float:
    """Five digits: more than a picture shows, and a report that is no longer than it must be."""
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0
