"""What the whole test-suite needs from pytest."""

from __future__ import annotations

import os
import sys

import pytest

# Workers share the cores, and so do the processes that tests start: one thread each, unless the user says otherwise. Read by torch when it
# is imported, which nothing has done yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]

#: Packages that cannot be imported a second time in one process.
_ONCE = ("torch", "triton", "numpy", "hypothesis")


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> None:
    """A run inside this process drops the modules that it imported, torch's own among them, some of which register themselves for good
    when they are imported; those stay."""
    from _pytest.pytester import SysModulesSnapshot

    restore = SysModulesSnapshot.restore

    def keeping(self: SysModulesSnapshot) -> None:
        kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _ONCE}
        restore(self)
        sys.modules.update(kept)

    SysModulesSnapshot.restore = keeping  # type: ignore[method-assign]
