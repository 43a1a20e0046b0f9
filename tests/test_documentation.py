"""What the README says is what happens: its commands, their output, its tables and its Python.

What goes wrong without this file: a README that shows an output nobody has seen for months.
"""

from __future__ import annotations

import importlib.util
import re
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
    spec.loader.exec_module(module)
    return module


def test_quick_start_is_two_commands_of_one_line() -> None:
    """The gate runs exactly these."""
    first, second = _tool("quick_start").commands(ROOT / "README.md")
    assert "--draft-model=examples/checkpoints/dflash-tiny" in first
    assert "[test]" in second
    for command in (first, second):
        assert "-c constraints.txt" in command


def test_tables_and_outputs_are_current() -> None:
    """Every `console` block is run again; durations may differ, nothing else."""
    readme = _tool("readme")
    assert "```console" in README
    assert readme.same(readme.current(README), README), "run python tools/readme.py"


def test_the_page_of_checks_is_current() -> None:
    """Made from the registry, so that a check's words stand in one place."""
    page = _tool("checks_page")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python tools/checks_page.py"


def test_the_page_of_public_failures_is_current() -> None:
    """Made from the table that is run as a test."""
    page = _tool("failures_page")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python tools/failures_page.py"


def test_the_script_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The block that imports from the package root, in the project's directory."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (script,) = [block for block in blocks if block.startswith("from pytest_specdecode import")]
    exec(compile(script, "README.md", "exec"), {})
    assert capsys.readouterr().out == "True passed\n"


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
