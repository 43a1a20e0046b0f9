"""Tensors from a seed and a kind.

Drawing numbers one by one is slow and shrinks badly. A seed is one small integer, replays exactly, and leaves the shrinker what a reader
cares about: fewer rows, and the plainest kind of number that still fails. torch is imported when a tensor is made, not before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Kinds of numbers, plainest first, which is the order in which they shrink:
#:
#: - `zeros`;
#: - `integers`: -3 to 3, so that sums are exact in every dtype;
#: - `one-hot`: one 1 in each row, a column further in each next row, so that a row's place shows in its value;
#: - `repeated`: one normal row again and again, so that only an index can make rows differ;
#: - `normal`: standard normal;
#: - `tiny`: normal, times 1e-3: the mean square is then about the size of a norm's epsilon, and a wrong epsilon shows;
#: - `large`: normal, times 16: big, but sums of products stay inside float16.
KINDS = ("zeros", "integers", "one-hot", "repeated", "normal", "tiny", "large")

_SCALES = {"tiny": 1e-3, "large": 16.0}

#: Seeds that are short to read.
SEEDS = st.integers(min_value=0, max_value=9999)


def filled(kind: str, shape: Sequence[int], dtype: torch.dtype, *, seed: int, stream: int = 0) -> Tensor:
    """A tensor of `kind`, drawn in float32 and rounded to `dtype`; equal arguments give equal tensors.

    Rows are those of the last dimension. Streams of one seed are independent, and no tensor depends on another's shape.
    """
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream)
    rows, width = math.prod(shape[:-1]), shape[-1]
    if kind == "zeros":
        values = torch.zeros(rows, width)
    elif kind == "integers":
        values = torch.randint(-3, 4, (rows, width), generator=generator).float()
    elif kind == "one-hot":
        start = int(torch.randint(width, (), generator=generator))
        values = torch.zeros(rows, width)
        values[torch.arange(rows), (torch.arange(rows) + start) % width] = 1.0
    elif kind == "repeated":
        values = torch.randn(1, width, generator=generator).repeat(rows, 1)
    else:
        values = torch.randn(rows, width, generator=generator) * _SCALES.get(kind, 1.0)
    return values.reshape(tuple(shape)).to(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """`torch.NAME`."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
