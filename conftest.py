"""What the whole test-suite needs from pytest."""

from __future__ import annotations

import os

# Workers share the cores, and so do the processes that tests start: one thread each, unless the user says otherwise. Read by torch when it
# is imported, which nothing has done yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]
