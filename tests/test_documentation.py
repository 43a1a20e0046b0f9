"""What the README and the pages say is what happens: their commands, their output, their tables and their Python.

What goes wrong without this file: a document that shows an output nobody has seen for months; a command in it that no longer runs; a block
that is not run and does not say why.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_specdecode import check_draft, families, testing
from pytest_specdecode.fused_kv import AXES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


TOOL = _tool("readme")


def test_quick_start_is_two_commands_of_one_line() -> None:
    """The gate runs exactly these."""
    first, second = _tool("quick_start").commands(ROOT / "README.md")
    assert "--draft-model=examples/checkpoints/dflash-tiny" in first
    assert "[test]" in second
    for command in (first, second):
        assert "-c constraints.txt" in command


@pytest.mark.parametrize("path", TOOL.documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_shows_is_what_happens(path: Path) -> None:
    """Its tables are made and its commands run again, durations apart; its code runs, or says why it does not."""
    assert TOOL.check(path) == []


def test_the_documents_have_commands_in_them() -> None:
    """Else the test above would hold for any."""
    kinds = [block.kind for path in TOOL.documents() for block in TOOL.blocks(path.read_text(encoding="utf-8"))]
    assert kinds.count("console") >= 9
    assert kinds.count("python") >= 15
    assert kinds.count("sh") >= 9


def _fenced(kind: str, text: str, note: str = "") -> str:
    return f"{note and f'<!-- {note} -->' + chr(10)}```{kind}\n{text}\n```\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_fenced("python", "1 / 0"), "ends with 1: ZeroDivisionError"),
        (_fenced("python", "def test_it():\n    assert False"), "ends with 1: 1 failed"),
        (_fenced("sh", "true\nfalse\ntrue"), "ends with 1"),
        (_fenced("sh", "false", "not run"), "gives no reason"),
        (_fenced("sh", "false", "not run: no"), "gives no reason"),
        (_fenced("sh", "false", "run by: tests/nobody.py"), "no such file"),
        (_fenced("sh", "of-no-test --at-all", "run by: tests/test_api.py"), "names neither"),
        (_fenced("console", "of no command"), "starts with `$ `"),
        (_fenced("text", "1", "output"), "no python block"),
        ("    pytest --draft-model=DIR\n", "not in a block"),
    ],
)
def test_what_is_wrong_in_a_document_is_said(text: str, says: str) -> None:
    """A block that fails, one that is not run without a word, and one whose word is not so."""
    made = TOOL.make("docs/drawn-up-for-this-test.md", text)
    (fault,) = made.faults
    assert says in fault
    assert made.text == text or says == "starts with `$ `"


def test_outputs_and_tables_are_made_anew() -> None:
    """What stood there before is replaced, and nothing else."""
    old = _fenced("console", "$ python -c 'print(6 * 7)'\n41") + _fenced("python", "print(1)\nprint(2)")
    made = TOOL.make("docs/drawn-up-for-this-test.md", f"{old}\n{_fenced('text', 'old', 'output')}End.\n")
    assert made.faults == ()
    assert made.text == (f"{old.replace('41', '42')}\n{_fenced('text', '1' + chr(10) + '2', 'output')}End.\n")
    assert TOOL.same("1 passed in 0.10s", "1 passed in 2.30s")
    assert not TOOL.same("1 passed in 0.10s", "2 passed in 0.10s")


def test_a_document_without_its_table_is_refused() -> None:
    """So that a table does not vanish with its marker."""
    with pytest.raises(ValueError, match=r"docs/fixtures\.md: 0 places for the table fixtures"):
        TOOL.make("docs/fixtures.md", "# Fixtures\n")


def test_the_page_of_checks_is_current() -> None:
    """Made from the registry, so that a check's words stand in one place."""
    page = _tool("checks_page")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python tools/checks_page.py"


def test_the_page_of_public_failures_is_current() -> None:
    """Made from the table that is run as a test."""
    page = _tool("failures_page")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python tools/failures_page.py"


def test_the_family_in_contributing_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is run as it stands: it opens as itself, passes, and a dropped tensor is named."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    family = names["ResidualHeads"]()
    for module in (families, testing):
        monkeypatch.setattr(module, "FAMILIES", (*families.FAMILIES, family))
    report = check_draft(testing.write_tiny(tmp_path / "whole", family.name))
    assert report.drafts[0].family == "residual-heads"
    assert {result.status for result in report if not result.want} == {"passed", "skipped"}, str(report)
    broken = testing.write_tiny(tmp_path / "broken", family.name, edit=lambda found: found.pop("layers.1.block.weight"))
    assert "layers.1.block.weight" in check_draft(broken)["weights.missing"].message


def test_every_relative_path_that_documents_name_exists() -> None:
    """`docs/…`, `examples/…`, `tests/…`, `tools/…`, `benchmarks/…` in README, CONTRIBUTING and docs."""
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:docs|examples|tests|tools|benchmarks)/[\w./-]*)`", text):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_options_in_the_readme_are_the_options_there_are() -> None:
    """And each has its ini twin where the table says so."""
    from pytest_specdecode.plugin import options

    rows = re.findall(r"^\| `(--draft-[\w-]+)[^`]*` \| (?:`(\w+)`)? ?\|", README, re.MULTILINE)
    declared = {value for name, value in vars(options).items() if name.isupper() and str(value).startswith("--draft-")}
    assert {option for option, _ in rows} == declared
    assert {ini for _, ini in rows if ini} == set(options._INI_NAMES)


def test_the_page_on_the_stack_has_every_axis() -> None:
    """One line per axis."""
    text = (ROOT / "docs" / "fused-kv.md").read_text(encoding="utf-8")
    for axis in AXES:
        assert f"`{axis}`" in text
