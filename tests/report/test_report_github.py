"""Commands of GitHub's workflows and the step summary.

What these catch: a command that a message's line end breaks off, or that a message begins; a line that is not the key's; more commands
than GitHub takes; a summary that replaces what other steps wrote.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import BARE, DOUBTFUL, FAILED, WARNED, draft, hostile, report

from pytest_specdecode.errors import DraftError, printable
from pytest_specdecode.findings import CheckResult, Finding
from pytest_specdecode.report import Report
from pytest_specdecode.report.github import append_summary, inert, lines
from pytest_specdecode.report.markdown import text

COMMAND = re.compile(r"::(error|warning|notice) (?:file=([^,:\r\n]*),line=(\d+),)?title=([^,:\r\n]*)::([^\r\n]*)")


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafts" / "x").mkdir(parents=True)
    (tmp_path / "drafts" / "x" / "config.json").write_text('{\n  "rope_parameters": {\n    "rope_theta": 1.0\n  }\n}\n')
    return tmp_path


def test_commands_by_hand(placed: Path) -> None:
    assert list(lines(report())) == [
        "::error file=drafts/x/config.json,line=3,title=rope.theta-agrees::x: rope_theta is stated with different values%0Afix: leave the "
        "trained one",
        "::error file=drafts/x/config.json,line=1,title=weights.missing::x: fc.weight is missing",
        "::error file=drafts/x/config.json,line=1,title=weights.missing::x: layers differ",
        "::error file=drafts/x/config.json,line=1,title=weights.missing::x: a layer does not build",
        "::warning file=drafts/x/config.json,line=1,title=files.pickle::x: pickles lie beside the weights",
        "::notice file=drafts/x/config.json,line=3,title=taps.range::x: rope_theta is stated with different values%0Afix: leave the "
        "trained one",
    ]


def test_no_more_than_github_takes(placed: Path) -> None:
    many = replace(FAILED, findings=(BARE,) * 25)
    warned = replace(WARNED, findings=(DOUBTFUL,) * 11)
    found = list(lines(Report(drafts=(draft(many, warned),))))
    assert [sum(line.startswith(f"::{level} ") for line in found) for level in ("error", "warning", "notice")] == [
        10,
        10,
        1,
    ]
    assert found[-1] == "::notice title=pytest-specdecode::16 more findings stand in the summary of this run"


def test_hostile_texts_stay_in_their_command(placed: Path) -> None:
    found = list(lines(hostile()))
    assert len(found) == 3
    assert all(COMMAND.fullmatch(line) and line.isprintable() for line in found)
    assert all(len(line) < 6000 for line in lines(hostile("x" * (1 << 20))))


def test_a_line_is_no_command_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert inert("  ::add-mask::e ##[group]") == "  ::add-mask::e ##[group]"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert inert("  ::add-mask::e ##[group]") == r"  \x3a:add-mask::e #\x23[group]"
    assert inert("a::b: ##x") == "a::b: ##x"
    for line in ("::", " :::", "##[##[", "###[", " ::##["):
        assert not inert(line).lstrip().startswith("::")
        assert "##[" not in inert(line)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(message=st.text(max_size=40), name=st.text(st.sampled_from("%0AD:,\r\n x"), max_size=12))
def test_what_github_reads_is_what_was_said(message: str, name: str) -> None:
    result = CheckResult(id="a.b", status="failed", findings=(Finding(message=message, fix=name),))
    (line,) = lines(Report(drafts=(draft(result, name=name, path=f"/nowhere/{name}"),)))
    match = COMMAND.fullmatch(line)
    assert match is not None
    # As the runner decodes them: the signs of a message, and two more of a property.
    data = match[5].replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")
    assert data == f"{printable(name)}: {printable(message)}" + (f"\nfix: {printable(name)}" if name else "")
    assert match[4] == "a.b"


def test_the_summary_is_appended_whole(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_text("before\n", encoding="utf-8")
    append_summary(report(), file)
    append_summary(hostile(), file)
    assert file.read_text(encoding="utf-8") == f"before\n{text(report())}\n{text(hostile())}\n"


def test_a_summary_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="cannot be written"):
        append_summary(report(), tmp_path / "absent" / "summary.md")
    with pytest.raises(DraftError, match="cannot be written"):
        append_summary(report(), tmp_path)
