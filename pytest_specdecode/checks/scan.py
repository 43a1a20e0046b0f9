"""One pass over the values of every tensor, in bounded memory, shared by the checks that need it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_specdecode.checkpoint import TensorHeader
from pytest_specdecode.families import Draft

if TYPE_CHECKING:
    import torch


#: `k_scale`, `self_attn.attn.v_scale`, `k_proj.k_scale`.
_CACHE_SCALE = re.compile(r"(?:^|\.)[kv]_scale$")


def is_cache_scale(name: str) -> bool:
    """Whether a tensor stored as `name` scales keys or values of a quantised cache."""
    return _CACHE_SCALE.search(name) is not None


@dataclass(frozen=True, kw_only=True)
class TensorStats:
    """What one pass saw of one floating-point tensor.

    Attributes:
        header: the tensor.
        nonfinite: elements that are NaN or infinite.
        minimum, maximum: of the finite elements; 0 where there are none.
        mean, std: of the finite elements, in float64.
        row_norm_spread: deviation of the rows' norms over their mean, for matrices of at least 16 rows; else None.
    """

    header: TensorHeader
    nonfinite: int
    minimum: float
    maximum: float
    mean: float
    std: float
    row_norm_spread: float | None

    @property
    def is_constant(self) -> bool:
        """Whether every element is the same finite number."""
        return self.nonfinite == 0 and self.minimum == self.maximum


def scan(draft: Draft, progress: Callable[[str], None] | None = None) -> Mapping[str, TensorStats]:
    """Statistics of every floating-point tensor that the family reads, by canonical name; made once per draft.

    Args:
        draft: the draft.
        progress: told which tensor comes next.
    """
    cached: dict[str, TensorStats] | None = draft.memo.get("scan")
    if cached is None:
        binding = draft.binding
        expected = {} if binding is None else binding.expected
        stored = {} if binding is None else binding.stored
        read = {
            canonical: draft.checkpoint.tensors[name]
            for canonical, name in stored.items()
            if canonical in expected and draft.checkpoint.tensors[name].is_float
        }
        cached = {}
        for number, (canonical, header) in enumerate(read.items(), start=1):
            if progress is not None:
                progress(f"{draft.name}: values of {header.name} (tensor {number} of {len(read)})")
            cached[canonical] = _stats(draft, header)
        draft.memo["scan"] = cached
    return cached


def _stats(draft: Draft, header: TensorHeader) -> TensorStats:
    import torch

    nonfinite = count = 0
    minimum, maximum, total, squares = math.inf, -math.inf, 0.0, 0.0
    norms: list[torch.Tensor] = []
    for chunk in draft.checkpoint.chunks(header.name):
        values = chunk.to(torch.float32)
        finite = torch.isfinite(values)
        bad = int(values.numel() - finite.sum())
        nonfinite += bad
        good = values if not bad else values[finite]
        if good.numel():
            minimum = min(minimum, float(good.min()))
            maximum = max(maximum, float(good.max()))
            total += float(good.sum(dtype=torch.float64))
            squares += float(good.norm(dtype=torch.float64)) ** 2
            count += good.numel()
        if values.ndim == 2 and not bad:
            norms.append(values.norm(dim=1))
    mean = total / count if count else 0.0
    return TensorStats(
        header=header,
        nonfinite=nonfinite,
        minimum=minimum + 0.0 if count else 0.0,
        maximum=maximum if count else 0.0,
        mean=mean,
        std=math.sqrt(max(0.0, squares / count - mean * mean)) if count else 0.0,
        row_norm_spread=_spread(torch.cat(norms)) if norms and header.shape[0] >= 16 and not nonfinite else None,
    )


def _spread(norms: torch.Tensor) -> float:
    mean = float(norms.mean())
    return float(norms.std()) / mean if mean else 0.0
