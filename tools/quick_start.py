"""Print the commands of the README's `## Quick start`, one a line: the single lines of its fenced `sh` blocks."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def commands(readme: Path) -> list[str]:
    """The commands, in order; ValueError where a block holds more than one line."""
    text = readme.read_text(encoding="utf-8")
    section = re.search(r"^## Quick start\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ValueError(f"{readme}: no section `## Quick start`")
    blocks = re.findall(r"^```sh\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    lines = [block.strip().splitlines() for block in blocks]
    if any(len(block) != 1 for block in lines):
        raise ValueError(f"{readme}: a quick-start block holds more than one line")
    return [block[0] for block in lines]


if __name__ == "__main__":
    print("\n".join(commands(Path(sys.argv[1]))))
