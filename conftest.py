"""What the whole test-suite needs from pytest."""

from __future__ import annotations

pytest_plugins = ["pytester"]
