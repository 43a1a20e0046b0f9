"""K and V of every draft layer from one GEMM and one kernel launch: validators, kernel, path and float64 reference.

`AXES` and the validators need no torch, so that a checkpoint's headers can be judged without it; the rest is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_specdecode.fused_kv.stack import AXES, SOFT_AXES, LayerFacts, facts_of, mismatches, validate

if TYPE_CHECKING:
    from pytest_specdecode.fused_kv.kernel import fused_norm_rope
    from pytest_specdecode.fused_kv.path import FusedKV
    from pytest_specdecode.fused_kv.reference import eager_kv, fused_kv_reference

__all__ = [
    "AXES",
    "SOFT_AXES",
    "FusedKV",
    "LayerFacts",
    "eager_kv",
    "facts_of",
    "fused_kv_reference",
    "fused_norm_rope",
    "mismatches",
    "validate",
]

_HOME = {
    "FusedKV": "pytest_specdecode.fused_kv.path",
    "eager_kv": "pytest_specdecode.fused_kv.reference",
    "fused_kv_reference": "pytest_specdecode.fused_kv.reference",
    "fused_norm_rope": "pytest_specdecode.fused_kv.kernel",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
