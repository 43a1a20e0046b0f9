"""The rules, one module per place a reader would look, and their registry.

Importing this package registers every check; none of the modules imports torch at their top.
"""

from __future__ import annotations

from pytest_specdecode.checks import files
from pytest_specdecode.checks.registry import (
    REGISTRY,
    Check,
    Context,
    Inconclusive,
    Skip,
    UnknownCheckError,
    run,
    select,
)

__all__ = [
    "REGISTRY",
    "Check",
    "Context",
    "Inconclusive",
    "Skip",
    "UnknownCheckError",
    "files",
    "run",
    "select",
]
