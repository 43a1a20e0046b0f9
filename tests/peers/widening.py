"""The peers' code in float64: they norm, rotate and route in float32 whatever the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


@contextmanager
def widened(dtype: torch.dtype) -> Iterator[None]:
    """Inside, and where `dtype` is float64, code that asks for float32 gets float64."""
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch, "float32", dtype)
            patch.setattr(torch, "float", dtype)
            patch.setattr(Tensor, "float", Tensor.double)
        yield
