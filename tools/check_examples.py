"""Fail where the shipped checkpoints are not what `examples/make_checkpoints.py` writes."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Write the examples anew in a copy and compare."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "examples"
        copy.mkdir()
        shutil.copy(ROOT / "examples" / "make_checkpoints.py", copy)
        subprocess.run([sys.executable, str(copy / "make_checkpoints.py")], check=True, cwd=directory)
        stale = [
            str(path.relative_to(copy))
            for path in sorted(copy.rglob("*"))
            if path.is_file() and path.suffix != ".py" and not _same(path, ROOT / "examples" / path.relative_to(copy))
        ]
    for path in stale:
        print(f"examples/{path} is not what examples/make_checkpoints.py writes; run it")
    return bool(stale)


def _same(one: Path, other: Path) -> bool:
    return other.exists() and filecmp.cmp(one, other, shallow=False)


if __name__ == "__main__":
    sys.exit(main())
