"""K and V of every draft layer from one GEMM and one kernel launch: validators, kernel, path and float64 reference.

The same for layers of latent attention, which keep one row per token: the latent stack.

`AXES`, `LATENT_AXES` and the validators need no torch, so that a checkpoint's headers can be judged without it; the rest is loaded when
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_specdecode.fused_kv.latent_stack import (
    LATENT_AXES,
    LATENT_SOFT_AXES,
    LatentFacts,
    latent_facts_of,
    latent_mismatches,
    validate_latent,
)
from pytest_specdecode.fused_kv.stack import AXES, SOFT_AXES, LayerFacts, facts_of, mismatches, validate

if TYPE_CHECKING:
    from pytest_specdecode.fused_kv.kernel import fused_norm_rope, fused_norm_rope_into
    from pytest_specdecode.fused_kv.latent_kernel import fused_latent_norm_rope
    from pytest_specdecode.fused_kv.latent_path import FusedLatentKV
    from pytest_specdecode.fused_kv.path import FusedKV
    from pytest_specdecode.fused_kv.reference import (
        eager_kv,
        eager_latent,
        fused_kv_reference,
        fused_latent_reference,
    )

__all__ = [
    "AXES",
    "LATENT_AXES",
    "LATENT_SOFT_AXES",
    "SOFT_AXES",
    "FusedKV",
    "FusedLatentKV",
    "LatentFacts",
    "LayerFacts",
    "eager_kv",
    "eager_latent",
    "facts_of",
    "fused_kv_reference",
    "fused_latent_norm_rope",
    "fused_latent_reference",
    "fused_norm_rope",
    "fused_norm_rope_into",
    "latent_facts_of",
    "latent_mismatches",
    "mismatches",
    "validate",
    "validate_latent",
]

_HOME = {
    "FusedKV": "pytest_specdecode.fused_kv.path",
    "FusedLatentKV": "pytest_specdecode.fused_kv.latent_path",
    "eager_kv": "pytest_specdecode.fused_kv.reference",
    "eager_latent": "pytest_specdecode.fused_kv.reference",
    "fused_kv_reference": "pytest_specdecode.fused_kv.reference",
    "fused_latent_norm_rope": "pytest_specdecode.fused_kv.latent_kernel",
    "fused_latent_reference": "pytest_specdecode.fused_kv.reference",
    "fused_norm_rope": "pytest_specdecode.fused_kv.kernel",
    "fused_norm_rope_into": "pytest_specdecode.fused_kv.kernel",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
