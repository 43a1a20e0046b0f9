"""Checks for speculative-decoding draft models: a pytest plugin, fixtures, strategies and a small script interface.

The names below are loaded when first used, so that importing the package, which every pytest run in an environment does, costs
nothing: neither torch nor numpy nor triton nor hypothesis is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_specdecode.api import RejectedDraftError, check_draft, gate, open_draft
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.findings import Finding
    from pytest_specdecode.fused_kv import AXES, FusedKV, fused_kv_reference
    from pytest_specdecode.report import Report

__version__ = "0.1.0"

__all__ = [
    "AXES",
    "DraftError",
    "Finding",
    "FusedKV",
    "RejectedDraftError",
    "Report",
    "check_draft",
    "fused_kv_reference",
    "gate",
    "open_draft",
]

_HOME = {
    "AXES": "pytest_specdecode.fused_kv",
    "DraftError": "pytest_specdecode.errors",
    "Finding": "pytest_specdecode.findings",
    "FusedKV": "pytest_specdecode.fused_kv",
    "RejectedDraftError": "pytest_specdecode.api",
    "Report": "pytest_specdecode.report",
    "check_draft": "pytest_specdecode.api",
    "fused_kv_reference": "pytest_specdecode.fused_kv",
    "gate": "pytest_specdecode.api",
    "open_draft": "pytest_specdecode.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
