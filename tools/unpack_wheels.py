"""Unpack the Python files and the metadata of wheels, and nothing else of them.

python tools/unpack_wheels.py DIRECTORY WHEEL...

For packages of which one file is wanted, and whose compiled libraries are hundreds of megabytes.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def unpack(wheel: Path, directory: Path) -> int:
    """How many files were unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
        archive.extractall(directory, names)
    return len(names)


if __name__ == "__main__":
    for wheel in sys.argv[2:]:
        print(f"{Path(wheel).name}: {unpack(Path(wheel), Path(sys.argv[1]))} files")
