"""A draft's block in a terminal, and the texts that are broken to its width.

What these catch: lines that a terminal of 80 columns breaks by itself, in the middle of a word; a path, a value or a command that is broken
and cannot be copied; an error that an engine serves in silence below one that it stops at, or a warning above either; an inconclusive check
that does not say what to give; figures of a replay that are lost where it failed; codes of a terminal, or a megabyte, from a checkpoint.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import DOUBTFUL, HOSTILE, WRONG, draft, hostile, measured, report, score

from pytest_specdecode.findings import CheckResult, Finding, Outcome
from pytest_specdecode.report import Report
from pytest_specdecode.report.groups import GROUPS, TITLES
from pytest_specdecode.report.terminal import block, draft_lines
from pytest_specdecode.report.text import fitted, overview_lines

LONG = Finding(
    message="the tensor was trained with a base that the configuration does not state, and every engine takes another one for it",
    where="/models/drafts/the-one-that-was-exported-last-week-and-is-served-today/config.json: rope_parameters.rope_theta",
    got={f"layers.{at}.self_attn.rotary_emb.inv_freq": [0.1 * at] for at in range(4)},
    due="the one that the draft was trained with, stated once and nowhere else in another place",
    fix="state the base that the draft was trained with, in rope_parameters or flat, and leave out the other places where it stands",
    outcomes={"vllm": Outcome(outcome="serves wrong", message="takes the default, which is 10000, without a line in any log that says so")},
)  # fmt: skip
LONGER = CheckResult(id="rope.theta-agrees", status="failed", message=LONG.message, findings=(LONG,))


def styled(*results: CheckResult, **options: Any) -> list[tuple[str, str]]:
    return [tuple(line) for line in block(draft(*results), **options)]


def texts(*results: CheckResult, **options: Any) -> list[str]:
    return [line.text for line in block(draft(*results), **options)]


def test_the_whole_block_by_hand() -> None:
    assert str(report()).splitlines() == [
        "x: eagle3",
        "  2 failed, 1 failed as expected, 1 warned, 1 inconclusive, 1 skipped, 1 passed",
        "  Served wrong, in silence:",
        "    rope.theta-agrees (sglang): rope_theta is stated with different values",
        "      where: config.json: rope_parameters.rope_theta, rope_theta",
        '      got:   {"rope_theta": 10000.0}',
        "      due:   one value",
        "      sglang: serves wrong: takes 10000",
        "      fix:   leave the trained one",
        "  Stops the server:",
        "    weights.missing (vllm): fc.weight is missing",
        "      where: fc.weight",
        "      vllm: stops: KeyError",
        "  Falls back to something slower:",
        "    weights.missing (sglang): layers differ",
        "      where: layer 1",
        "      sglang: falls back",
        "  Errors that no engine is known to answer:",
        "    weights.missing: a layer does not build",
        "      where: layers.0",
        "  Warnings:",
        "    files.pickle: pickles lie beside the weights",
        "  Failures that are expected:",
        "    taps.range (sglang serves wrong): rope_theta is stated with different values",
        "      (it is being retrained)",
        "  Inconclusive:",
        "    target.widths: needs the target's config.json; give --draft-target=DIR",
    ]


def test_groups_stand_worst_first_and_have_their_style() -> None:
    lines = list(block(report().drafts[0]))
    headings = [(line.text.strip().removesuffix(":"), line.style) for line in lines if line.text.rstrip().endswith(":")]
    assert headings == [*((TITLES[group], group) for group in GROUPS), ("Inconclusive", "inconclusive")]
    styles = list(dict.fromkeys(line.style for line in lines))
    assert styles == ["draft", "", *GROUPS, "inconclusive"]


@pytest.mark.parametrize("width", [60, 80, 100, 240])
def test_lines_are_no_longer_than_the_terminal(width: int) -> None:
    unsure = CheckResult(id="a.b", status="inconclusive", message="the evidence is thin " * 12)
    lines = texts(LONGER, unsure, width=width)
    place = LONG.where.split(": ")[0] + ":"
    assert [line for line in lines if len(line) > width and place not in line] == []
    assert len(lines) > 12 or width == 240
    # Whatever the width, the words are all there, in their order, and whole.
    assert " ".join(lines).split() == " ".join(texts(LONGER, unsure, width=100_000)).split()


def test_further_lines_stand_under_the_value() -> None:
    lines = texts(LONGER)
    at = next(index for index, line in enumerate(lines) if line.startswith("      fix:   state the base"))
    assert len(lines[at + 1]) - len(lines[at + 1].lstrip()) == 13
    at = next(index for index, line in enumerate(lines) if line.startswith("      vllm: serves wrong: "))
    assert len(lines[at + 1]) - len(lines[at + 1].lstrip()) == 8


def test_a_long_path_is_kept_whole_behind_its_label() -> None:
    path = f"/models/{'a-long-name/' * 9}model.safetensors"
    finding = Finding(message="is stored twice", where=path, got=f"--draft-target=/{'x' * 90}")
    lines = texts(CheckResult(id="a.b", status="failed", message="m", findings=(finding,)))
    assert f"      where: {path}" in lines
    assert f"      got:   --draft-target=/{'x' * 90}" in lines


@settings(deadline=None, max_examples=80, derandomize=True)
@given(text=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=300), width=st.integers(1, 120))
def test_breaking_a_line_loses_nothing(text: str, width: int) -> None:
    if text.isprintable():
        assert "".join("".join(fitted(text, width)).split()) == "".join(text.split())


# --- how much is said -----------------------------------------------------------------------------------------------------


def test_briefly_a_finding_is_one_line() -> None:
    assert [text for text, _ in styled(*report().drafts[0].results, brief=True)][2:5] == [
        "  Served wrong, in silence:",
        "    rope.theta-agrees (sglang): rope_theta is stated with different values",
        "  Stops the server:",
    ]
    assert not any(line.startswith("      ") for line in texts(replace(LONGER, findings=(DOUBTFUL,)), brief=True))


def test_what_is_told_above_is_not_told_again() -> None:
    lines = texts(replace(LONGER, findings=(WRONG,)), is_told=lambda result: True, outcomes=False)
    assert lines[2:] == [
        "  Served wrong, in silence:",
        "    rope.theta-agrees (sglang): rope_theta is stated with different values",
    ]
    lines = texts(replace(LONGER, findings=(WRONG,)), is_told=lambda result: True)
    assert lines[-1] == "      sglang: serves wrong: takes 10000"


def test_of_many_findings_that_stand_above_the_first_are_named() -> None:
    many = tuple(Finding(message=f"tensor {at}") for at in range(37))
    result = CheckResult(id="weights.unexpected", status="failed", message="m", findings=many)
    lines = texts(result, is_told=lambda result: True)
    assert lines[-2:] == ["    weights.unexpected: tensor 9", "    weights.unexpected: and 27 more"]
    assert len(texts(result)) == 3 + 37


def test_an_engine_behind_a_warning_is_named() -> None:
    warned = CheckResult(id="a.b", status="warned", message="m", findings=(replace(WRONG, severity="warning"),))
    assert texts(warned, brief=True)[2:4] == [
        "  Warnings:",
        "    a.b (sglang serves wrong): rope_theta is stated with different values",
    ]


def test_notes_of_checks_that_passed_where_they_are_asked_for() -> None:
    passed = CheckResult(id="files.readable", status="passed", message="12 tensors")
    assert texts(passed)[2:] == []
    assert texts(passed, notes=True)[2:] == ["  Passed:", "    files.readable: 12 tensors"]


def test_a_command_stands_once_and_whole() -> None:
    command = shlex.join(["pytest", f"--draft-model=/{'long name/' * 12}", "draft-model::test_draft[x-a.b]"])
    findings = (replace(WRONG, message="one"), replace(WRONG, message="two"), Finding(message="three"))
    result = CheckResult(id="a.b", status="failed", message="one", findings=findings)
    for options in ({}, {"is_told": lambda result: True}):
        lines = texts(result, again=lambda result: command, **options)
        assert [line for line in lines if "pytest" in line] == [f"      run again: {command}"]
    assert not any("pytest" in line for line in texts(result, again=lambda result: command, brief=True))
    assert not any("pytest" in line for line in texts(replace(result, expected="known"), again=lambda result: command))


@pytest.mark.parametrize(
    ("want", "option"),
    [
        ("target", "--draft-target=DIR"),
        ("serving", '--draft-serve="NAME=VALUE ..."'),
        ("trace", "--draft-trace=DIR"),
        ("gpu", "--draft-device=cuda"),
        ("tensors", "the whole checkpoint directory"),
    ],
)
def test_what_is_open_says_what_to_give(want: str, option: str) -> None:
    unsure = CheckResult(id="a.b", status="inconclusive", message="is not known", want=want)
    assert texts(unsure)[-1] == f"    a.b: is not known; give {option}"
    said = f"needs more: {option}"
    assert texts(replace(unsure, message=said))[-1] == f"    a.b: {said}"
    assert texts(replace(unsure, want=""))[-1] == "    a.b: is not known"


def test_checks_that_are_open_for_one_reason_share_a_line() -> None:
    unsure = [CheckResult(id=f"a.{at}", status="inconclusive", message="is thin") for at in range(5)]
    assert texts(*unsure)[2:] == ["  Inconclusive:", "    a.0, a.1, a.2 and 2 more: is thin"]


# --- what was measured ----------------------------------------------------------------------------------------------------


def test_a_replay_is_shown_by_position_and_file() -> None:
    result = measured([0.8, 0.6])
    files = [{"file": f"hs_{at}.safetensors", "served": score([0.8, 0.5 + at / 10], 50)} for at in range(2)]
    result = replace(result, message="accepted length 2.40", figures={**result.figures, "files": files})
    assert texts(result)[2:] == [
        "  Measured:",
        "    acceptance.length: accepted length 2.40",
        "      by position 0.80 (0.70 to 0.90), 0.60 (0.50 to 0.70)",
        "      hs_0.safetensors: 2.30 (2.10 to 2.50) over 50 rounds",
        "      hs_1.safetensors: 2.40 (2.20 to 2.60) over 50 rounds",
    ]
    assert texts(result, brief=True)[2:] == ["  Measured:", "    acceptance.length: accepted length 2.40"]


@pytest.mark.parametrize("status", ["failed", "warned", "inconclusive"])
def test_a_replay_that_is_no_pass_keeps_its_figures(status: Any) -> None:
    findings = (Finding(message="fell", severity="error" if status == "failed" else "warning"),)
    result = replace(
        measured([0.8, 0.6]), status=status, message="fell", findings=() if status == "inconclusive" else findings
    )
    assert texts(result, is_told=lambda result: True, width=100)[-3:] == [
        "  Measured:",
        "    acceptance.length: accepted length 2.40 (2.20 to 2.60) over 100 rounds of 2 tokens",
        "      by position 0.80 (0.70 to 0.90), 0.60 (0.50 to 0.70)",
    ]


def test_what_engines_will_read_is_a_line_each() -> None:
    said = ["SGLang will read theta 10000: about 1.06", "vLLM will read as declared: about 2.10"]
    figures = {"engines": {"sglang": {"says": said[0]}, "vllm": {"says": said[1]}, "tensorrt-llm": {"says": ""}}}
    result = CheckResult(
        id="acceptance.conventions", status="passed", message="; ".join(["2.10 as declared", *said]), figures=figures
    )
    assert texts(result)[2:] == [
        "  Measured:",
        "    acceptance.conventions: 2.10 as declared",
        f"      {said[0]}",
        f"      {said[1]}",
    ]
    failed = replace(result, status="failed", message="no", findings=(Finding(message="no"),))
    assert texts(failed)[-3:] == [
        "    acceptance.conventions: what engines will read",
        f"      {said[0]}",
        f"      {said[1]}",
    ]
    assert not any("what engines will read" in line or line == "  Measured:" for line in texts(failed, brief=True))


# --- text from a checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [HOSTILE, "\x1b[2J\x1b]0;title\x07" * 3, "x" * 1_000_000, "a b\r\n" * 200_000])
@pytest.mark.parametrize("width", [80, 10])
def test_a_hostile_text_is_short_and_printable(text: str, width: int) -> None:
    for found in hostile(text).drafts:
        for options in ({}, {"brief": True}, {"notes": True}):
            lines = [line.text for line in block(found, width=width, **options)]
            assert all(line.isprintable() for line in lines)
            assert sum(map(len, lines)) < 100_000
            assert max(map(len, lines)) <= 400


def test_a_report_is_its_drafts_blocks() -> None:
    found = Report(drafts=(draft(LONGER), draft(name="y", description="y: eagle3")))
    assert str(found).splitlines() == [line for one in found.drafts for line in draft_lines(one)]


def test_a_table_of_drafts_keeps_to_the_width() -> None:
    drafts = (
        draft(measured([0.5]), name="a-draft-with-a-long-name-of-its-own", family="mlp-speculator"),
        draft(name="b", family="eagle3"),
    )
    wide, narrow = list(overview_lines(drafts, 200)), list(overview_lines(drafts, 80))
    assert "status" in wide[0].split()
    assert narrow[0].split() == ["draft", "family", "failed", "warned", "inconclusive", "passed", "accepted"]
    assert len(narrow) == 3
    assert all(len(line) <= 80 for line in narrow)
    assert narrow[1].startswith("a-draft-with-a-")
