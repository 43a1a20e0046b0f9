"""The peer is optional: without it every test here is skipped with a reason that says how to get it."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest

REASON = "transformers 5.15 or later is not installed: pip install -c constraints.txt -r tests/peers/requirements.txt"


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The transformers package, imported with its own warnings let pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", minversion="5.15", reason=REASON)
