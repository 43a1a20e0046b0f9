"""Write anew what the README takes from the code: its tables, and the output of the commands it shows.

python tools/readme.py            rewrite README.md
python tools/readme.py --check    fail where it is not current
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.engines import OPTIONS
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.fused_kv import AXES
from pytest_specdecode.strategies.namings import JOINED, NAMINGS

README = Path(__file__).resolve().parent.parent / "README.md"


def checks() -> str:
    """One line per check; the axes of a stack share one."""
    lines = ["| check | what must hold | needs |", "|---|---|---|"]
    axes = {f"fused-kv.{axis}" for axis in AXES}
    for id, item in REGISTRY.items():
        if id == f"fused-kv.{AXES[0]}":
            names = ", ".join(AXES)
            lines.append(f"| `fused-kv.AXIS` | all layers agree; one check per axis: {names} | config, headers |")
        elif id not in axes:
            lines.append(f"| `{id}` | {item.title} | {', '.join(item.needs)} |")
    return "\n".join(lines)


def families() -> str:
    """One line per family: its packagings, other names that its tensors go by, and the checks that not every family has."""
    lines = ["| family | is | packagings | other tensor names | checked beside what all are |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        own = [f"`{id}`" for id, item in REGISTRY.items() if item.families is not None and family.name in item.families]
        if family.fused_kv is None:
            own.append("`fused-kv`")
        lines.append(
            f"| `{family.name}` | {family.title} | {', '.join(family.packagings)} | {_names(family.name)} | {', '.join(own) or 'nothing'} |"
        )
    return "\n".join(lines)


def _names(family: str) -> str:
    """The exporters' names that are read beside the family's own, and whether q, k and v may be one tensor."""
    found = [name for form, names in NAMINGS.items() if form.rpartition("-")[0] == family for name in names]
    return ", ".join([*found, *(["joined qkv"] if family in JOINED else [])]) or "none"


def serve() -> str:
    """One sentence that names the options of --draft-serve."""
    return f"The names that are read: {', '.join(f'`{name}`' for name in OPTIONS)}."


TABLES: dict[str, Callable[[], str]] = {"checks": checks, "families": families, "serve": serve}


def current(text: str) -> str:
    """`text` with every table between its markers, and the output of every command of a `console` block, made anew."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(
            pattern, lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text, flags=re.DOTALL
        )
        if found != 1:
            raise ValueError(f"{README.name}: {found} places for the table {name}, one was due")
    return re.sub(
        r"^```console\n\$ ([^\n]*)\n.*?^```$",
        lambda match: f"```console\n$ {match[1]}\n{output(match[1])}```",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )


def output(command: str) -> str:
    """What `command`, which starts with `pytest`, prints in the project's directory, 100 columns wide and without colour."""
    program, *arguments = command.split()
    if program != "pytest":
        raise ValueError(f"{README.name}: only pytest is run for its output, not {program}")
    # Pytest shortens its summary lines on a terminal but not where it believes to be in CI.
    hidden = ("CI", "BUILD_NUMBER", "FORCE_COLOR", "PYTEST_ADDOPTS")
    env = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("PYTEST_XDIST")}
    env |= {"COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=README.parent,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def same(one: str, other: str) -> bool:
    """Whether two texts differ in durations only."""
    first, second = (re.sub(r" in \d+\.\d+s", " in a moment", text) for text in (one, other))
    return first == second


def main() -> int:
    """Rewrite or check."""
    text = README.read_text(encoding="utf-8")
    made = current(text)
    if "--check" in sys.argv[1:]:
        if not same(made, text):
            print("README.md: a table or an output is not current; run python tools/readme.py")
        return not same(made, text)
    README.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
