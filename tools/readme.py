"""Hold the README and the pages of `docs/` to the code: their tables, the output of their commands, and that their code runs.

python tools/readme.py                 write tables and outputs anew
python tools/readme.py --check         fail where one is not current, or a block does not run
python tools/readme.py [--check] FILE  this document alone

What a fenced block is decides what is done with it:

console   each line that starts with `$ pytest` or `$ python` is run in the project's directory, and what is below it is its output
python    run as a script in a scratch directory, or by pytest where it defines tests
sh        run by bash in a scratch directory
text      below `<!-- output -->`: what the python block above it printed

A comment in the line above a block says otherwise, with a reason:

<!-- not run: REASON -->       for what cannot be run
<!-- run by: tests/… -->       for what a test runs, which has to name the document
<!-- run with: ARGUMENTS -->   what pytest is given for a python block that defines tests

`<!-- all python run by: tests/… -->` says so of every python block of a document. The scratch directory has the project's folders in it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import checks_page  # noqa: E402

from pytest_specdecode.checks import REGISTRY, Check  # noqa: E402
from pytest_specdecode.engines import ENGINES, OPTIONS, SETTINGS  # noqa: E402
from pytest_specdecode.families import FAMILIES  # noqa: E402
from pytest_specdecode.fused_kv import AXES  # noqa: E402
from pytest_specdecode.strategies.namings import JOINED, NAMINGS  # noqa: E402

README = ROOT / "README.md"


def documents() -> list[Path]:
    """Every document that is held to the code."""
    return [
        README,
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(ROOT.glob("examples/*/README.md")),
    ]


# --- tables -------------------------------------------------------------------------------------------------------------------------------


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


def fixtures() -> str:
    """One line per fixture of the plugin that tests may ask for: its name and the first line of its docstring."""
    module = ast.parse((ROOT / "pytest_specdecode" / "plugin" / "fixtures.py").read_text(encoding="utf-8"))
    lines = ["| fixture | is |", "|---|---|"]
    for node in module.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if any("pytest.fixture" in ast.unparse(decorator) for decorator in node.decorator_list):
            first, _, _ = (ast.get_docstring(node) or "").partition("\n")
            lines.append(f"| `{node.name}` | {first.replace('|', '&#124;')} |")
    return "\n".join(lines)


def faults() -> str:
    """One line per fault: the checks that find it, and what each engine does, by family where that differs."""
    specs = checks_page.tiny_specs()
    finders: dict[str, list[Check]] = {}
    for item in REGISTRY.values():
        for fault in item.faults:
            finders.setdefault(fault, []).append(item)
    titles = [f"{engine.title} {engine.version}" for engine in ENGINES.values()]
    lines = [f"| fault | found by | {' | '.join(titles)} |", f"|---|---|{'---|' * len(titles)}"]
    for fault, items in finders.items():
        whose = [name for name in specs if any(item.families is None or name in item.families for item in items)]
        cells = []
        for engine in ENGINES.values():
            kinds: dict[str, list[str]] = {}
            for name in whose:
                kinds.setdefault(engine.outcome(fault, specs[name]).outcome, []).append(name)
            cells.append(_cell(kinds))
        links = ", ".join(f"[{item.id}](checks.md#{item.id.replace('.', '')})" for item in items)
        lines.append(f"| `{fault}` | {links} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(kinds: dict[str, list[str]]) -> str:
    """The commonest outcome, and which families have another."""
    if list(kinds) == ["unknown"]:
        return "-"
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    if "unknown" in kinds:
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in ordered if kind != "unknown")
    parts = [kind if place == 0 else f"{kind}: {', '.join(names)}" for place, (kind, names) in enumerate(ordered)]
    return "; ".join(parts)


def readings() -> str:
    """One line per setting, engine and group of families: the keys in the order in which they are looked at, and what stands in."""
    lines = ["| setting | engine | drafts | looks in, the first that is there | else |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        for engine in ENGINES.values():
            for rule in (rule for rule in engine.reads if rule.setting == setting):
                whose = "all" if rule.families is None else ", ".join(rule.families)
                places = ", ".join(f"`{place}`" for place in rule.places) or "nothing"
                default = "depends on the draft" if callable(rule.default) else f"`{rule.default}`"
                when = " (some)" if rule.when else ""
                lines.append(f"| `{setting}` | {engine.title} | {whose}{when} | {places} | {default} |")
    return "\n".join(lines)


#: Each table, and the document that has it, once.
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "checks": ("README.md", checks),
    "families": ("README.md", families),
    "serve": ("README.md", serve),
    "fixtures": ("docs/fixtures.md", fixtures),
    "faults": ("docs/faults.md", faults),
    "readings": ("docs/faults.md", readings),
}


# --- a document ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Made:
    """A document made anew, and what is wrong with it apart from what has been made anew."""

    text: str
    faults: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: the word behind its fence, its text, the comment above it, and where it starts."""

    kind: str
    text: str
    note: str
    line: int


_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^    (?:python|pytest|pip) .*$", re.MULTILINE)
_TESTS = re.compile(r"^\s*def test_|^class Test", re.MULTILINE)

#: What has to be run, or has to say why it is not.
RUN = ("console", "python", "sh")


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a document that have a word behind their fence."""
    for match in _BLOCK.finditer(text):
        yield _block(text, match)


def _block(text: str, match: re.Match[str]) -> Block:
    return Block(kind=match[2], text=match[3], note=match[1] or "", line=text.count("\n", 0, match.start(2)) + 1)


def make(name: str, text: str) -> Made:
    """The document `name` (its path from the project's directory) with its tables and outputs made anew, and its code run."""
    for table, (document, content) in TABLES.items():
        pattern = rf"(<!-- table: {table} -->\n).*?(<!-- end -->)"
        if document == name:
            text, found = re.subn(
                pattern, lambda it, content=content: f"{it[1]}{content()}\n{it[2]}", text, flags=re.DOTALL
            )
            if found != 1:
                raise ValueError(f"{name}: {found} places for the table {table}, one was due")
    elsewhere = re.search(r"^<!-- all python (run by: \S+) -->$", text, re.MULTILINE)
    stray = [] if name.startswith("examples/") else _INDENTED.findall(text)
    wrong = [f"{name}: `{line.strip()}`: a command that is not in a block is not run" for line in stray]
    ran: dict[int, Future[tuple[int, str]]] = {}
    together: dict[str, list[Block]] = {}
    with ThreadPoolExecutor(2) as pool:
        for block in blocks(text):
            note = block.note or (elsewhere[1] if elsewhere and block.kind == "python" else "")
            if block.kind not in RUN or block.note == "output":
                continue
            if note.startswith(("not run", "run by")):
                wrong.extend(f"{name}:{block.line}: {fault}" for fault in _unsound(name, note, block))
            elif block.kind == "console":
                ran[block.line] = pool.submit(_console, block)
            elif block.kind == "python" and _TESTS.search(block.text):
                together.setdefault(note, []).append(block)
            else:
                ran[block.line] = pool.submit(execute, block)
        for some in together.values():
            ran[some[0].line] = pool.submit(execute, *some)
    printed: str | None = None

    def anew(match: re.Match[str]) -> str:
        nonlocal printed
        block = _block(text, match)
        above, printed = printed, None
        start, where = match[0][: match.start(3) - match.start()], f"{name}:{block.line}"
        if block.note == "output" and above is not None:
            return f"{start}{above}```"
        if block.note == "output":
            wrong.append(f"{where}: an output, and no python block that was run above it")
        if block.line not in ran:
            return match[0]
        status, found = ran[block.line].result()
        if status:
            wrong.append(f"{where}: ends with {status}: {(found.strip().splitlines() or ['nothing printed'])[-1]}")
        if block.kind == "console":
            return f"{start}{found}```"
        printed = found
        return match[0]

    made = _BLOCK.sub(anew, text)
    return Made(text=made, faults=tuple(wrong))


def _unsound(name: str, note: str, block: Block) -> Iterator[str]:
    """What is wrong with a comment that says that a block is not run here."""
    if note.startswith("not run"):
        if len(note.partition("not run: ")[2].split()) < 3:
            yield "`not run` gives no reason"
        return
    test = ROOT / note.removeprefix("run by: ")
    if not test.is_file():
        yield f"{note}: there is no such file"
        return
    found = test.read_text(encoding="utf-8")
    commands = [line.partition(" #")[0].strip() for line in block.text.splitlines()]
    if Path(name).stem not in found and not all(command in found for command in commands):
        yield f"{note}: it names neither {name} nor the command"


def _console(block: Block) -> tuple[int, str]:
    """The commands of a block, each with its output. What they end with is for the reader to see."""
    if not block.text.startswith("$ "):
        return 1, block.text + "a console block starts with `$ ` and a command"
    commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    return 0, "".join(f"$ {command}\n{output(command)}" for command in commands)


# --- running ------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def output(command: str) -> str:
    """What `command`, of `pytest` or `python`, prints in the project's directory, 100 columns wide and without colour."""
    program, *arguments = shlex.split(command)
    if program not in ("pytest", "python"):
        raise ValueError(f"only pytest and python are run for their output, not {program}")
    start = ["-m", "pytest", "-p", "no:cacheprovider"] if program == "pytest" else []
    return _run([sys.executable, *start, *arguments], ROOT)[1]


def execute(*blocks: Block) -> tuple[int, str]:
    """Run a python or sh block, or several python blocks of tests, in a scratch directory; the exit status, and what was printed."""
    first = blocks[0]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name in ("examples", "docs", "tools", "tests", "benchmarks", "constraints.txt"):
            (folder / name).symlink_to(ROOT / name)
        if first.kind == "sh":
            return _run(["bash", "-euo", "pipefail", "-c", first.text], folder)
        files = [f"test_line_{block.line}.py" for block in blocks]
        for file, block in zip(files, blocks, strict=True):
            (folder / file).write_text(block.text, encoding="utf-8")
        if not _TESTS.search(first.text):
            return _run([sys.executable, *files], folder)
        given = shlex.split(first.note.removeprefix("run with: "))
        plain = ["-c", "/dev/null", "--rootdir", directory, "-p", "no:cacheprovider", "-q", "-W", "error"]
        plain.append("--deselect=draft-model")  # the block's tests alone
        return _run([sys.executable, "-m", "pytest", *plain, *files, *given], folder)


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    # Pytest shortens its summary lines on a terminal but not where it believes to be in CI.
    hidden = ("CI", "BUILD_NUMBER", "FORCE_COLOR", "PYTEST_ADDOPTS", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")
    env = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("PYTEST_XDIST")}
    env |= {
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}",
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    env.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def same(one: str, other: str) -> bool:
    """Whether two texts differ in durations only."""
    return _timeless(one) == _timeless(other)


def _timeless(text: str) -> str:
    return re.sub(r" in \d+\.\d+s", " in a moment", text)


def check(path: Path) -> list[str]:
    """What is wrong with a document."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    made = make(name, text)
    lines = difflib.unified_diff(*(_timeless(it).splitlines() for it in (text, made.text)), lineterm="", n=0)
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    stale = (
        [f"{name}: a table or an output is not current; run python tools/readme.py", *changed[:10]] if changed else []
    )
    return [*stale, *made.faults]


def write(path: Path) -> list[str]:
    """Write a document's tables and outputs anew; what is wrong with the rest."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    made = make(name, text)
    if not same(made.text, text):
        path.write_text(made.text, encoding="utf-8")
    return list(made.faults)


def main(arguments: list[str]) -> int:
    """Rewrite or check."""
    chosen = [Path(argument).resolve() for argument in arguments if not argument.startswith("-")] or documents()
    with ThreadPoolExecutor(2) as pool:
        found = [fault for faults in pool.map(check if "--check" in arguments else write, chosen) for fault in faults]
    for fault in found:
        print(fault)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
