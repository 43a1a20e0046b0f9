"""`Report` and its files.

What these catch: a JSON report that lacks a field of its contract, or holds what JSON has not; a report that is half written, or left
beside a temporary file; names from a checkpoint that reach the terminal with their control codes; a status that is better than its worst
check.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_specdecode.errors import CheckpointError, DraftError, printable
from pytest_specdecode.findings import CheckResult, Finding, Outcome, jsonable
from pytest_specdecode.report import DraftReport, Report, draft_lines, require_suffix
from pytest_specdecode.testing import expected_tensors, tiny_config

CHECK_KEYS = {"id", "status", "severity", "message", "where", "got", "due", "outcomes", "fix"}
ENGINES = {
    "sglang": Outcome(outcome="serves wrong", message="weights are dropped", source="SGLang 0.5.6, llama_eagle3.py"),
    "vllm": Outcome(outcome="stops", message="There is no module or parameter named 'x'"),
    "tensorrt-llm": Outcome(outcome="unknown"),
}
FINDING = Finding(
    message="x is no tensor of this draft",
    where="x",
    got=["x"],
    due="only tensors that the configuration calls for",
    fix="leave it out",
    outcomes=ENGINES,
)
WARNING = Finding(message="pickles lie beside the weights", severity="warning")


def draft(*results: CheckResult, **fields: Any) -> DraftReport:
    spec, _ = expected_tensors(tiny_config("eagle3"), "eagle3")
    values = {"path": "drafts/x", "name": "x", "description": "x: eagle3", "family": "eagle3", "packaging": "plain"}
    return DraftReport(**{**values, "spec": spec, **fields}, results=results)


PASSED = CheckResult(id="files.readable", status="passed", message="12 tensors", seconds=0.25)
FAILED = CheckResult(id="weights.unexpected", status="failed", message=FINDING.message, findings=(FINDING, WARNING))
WARNED = CheckResult(id="files.pickle", status="warned", message=WARNING.message, findings=(WARNING,))
SKIPPED = CheckResult(id="dflash.block-size", status="skipped", message="for dflash drafts; this one is eagle3")
INCONCLUSIVE = CheckResult(id="weights.finite", status="inconclusive", message="no weights lie beside config.json")


def test_the_json_form_is_the_contract() -> None:
    report = Report(drafts=(draft(PASSED, FAILED, WARNED, SKIPPED, INCONCLUSIVE),)).to_dict()
    assert report["schema"] == 1
    assert {"pytest-specdecode", "torch", "pytest", "python"} <= set(report["tool"])
    assert all(version is None or isinstance(version, str) for version in report["tool"].values())
    (found,) = report["drafts"]
    assert {"path", "family", "packaging", "spec", "checks"} <= set(found)
    assert (found["path"], found["family"], found["packaging"]) == ("drafts/x", "eagle3", "plain")
    assert found["spec"]["hidden_size"] == 64
    assert all(set(check) >= CHECK_KEYS for check in found["checks"])
    assert [check["status"] for check in found["checks"]] == ["passed", "failed", "warned", "skipped", "inconclusive"]
    failed = {key: found["checks"][1][key] for key in CHECK_KEYS}
    assert failed == {
        "id": "weights.unexpected",
        "status": "failed",
        "severity": "error",
        "message": "x is no tensor of this draft",
        "where": "x",
        "got": ["x"],
        "due": "only tensors that the configuration calls for",
        "outcomes": {
            "sglang": {
                "outcome": "serves wrong",
                "message": "weights are dropped",
                "source": "SGLang 0.5.6, llama_eagle3.py",
            },
            "vllm": {"outcome": "stops", "message": "There is no module or parameter named 'x'", "source": ""},
            "tensorrt-llm": {"outcome": "unknown", "message": "", "source": ""},
        },
        "fix": "leave it out",
    }
    passed = {key: found["checks"][0][key] for key in CHECK_KEYS}
    assert passed == {
        "id": "files.readable",
        "status": "passed",
        "severity": None,
        "message": "12 tensors",
        "where": "",
        "got": None,
        "due": None,
        "outcomes": {},
        "fix": "",
    }


def test_a_draft_of_no_known_family_has_nulls() -> None:
    found = draft(FAILED, family=None, packaging=None, spec=None).to_dict()
    assert (found["family"], found["packaging"], found["spec"]) == (None, None, None)


@pytest.mark.parametrize("result", [PASSED, FAILED, WARNED, SKIPPED, INCONCLUSIVE], ids=lambda result: result.status)
def test_a_result_survives_its_json_form(result: CheckResult) -> None:
    back = CheckResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert back.to_dict() == result.to_dict()
    assert (back.id, back.status, back.message, len(back.findings)) == (
        result.id,
        result.status,
        result.message,
        len(result.findings),
    )


@pytest.mark.parametrize(
    ("results", "status", "ok"),
    [
        ([], "passed", True),
        ([PASSED, SKIPPED], "skipped", True),
        ([PASSED, INCONCLUSIVE, SKIPPED], "inconclusive", True),
        ([WARNED, INCONCLUSIVE], "warned", True),
        ([PASSED, FAILED, WARNED], "failed", False),
    ],
)
def test_the_worst_status_speaks_for_all(results: list[CheckResult], status: str, ok: bool) -> None:
    found = draft(*results)
    assert found.status == status
    assert Report(drafts=(draft(PASSED), found)).ok is ok
    assert sum(found.counts().values()) == len(results)


def test_results_are_found_by_id_and_findings_errors_first() -> None:
    report = Report(drafts=(draft(WARNED), draft(FAILED)))
    assert report["weights.unexpected"] is FAILED
    with pytest.raises(KeyError):
        report["weights.missing"]
    assert list(report) == [WARNED, FAILED]
    assert [finding.severity for _, finding in report.findings()] == ["error", "warning", "warning"]


# --- terminal ------------------------------------------------------------------------------------------------------------


EVIL = "\x1b[31mred\x07\r\nline two\u202e\udc80"


def test_control_codes_in_names_are_shown_as_escapes() -> None:
    everywhere = Finding(
        message=EVIL, where=EVIL, got={EVIL: [EVIL]}, due=EVIL, fix=EVIL, outcomes={"vllm": Outcome(outcome="stops", message=EVIL)}
    )  # fmt: skip
    failed = CheckResult(id="weights.unexpected", status="failed", message=EVIL, findings=(everywhere,))
    unsure = CheckResult(id="weights.finite", status="inconclusive", message=EVIL)
    lines = list(draft_lines(draft(failed, unsure, description=f"{EVIL}: eagle3")))
    assert all(line.isprintable() for line in lines)
    assert sum("\\x1b[31mred\\x07\\r\\nline two\\u202e\\udc80" in line for line in lines) == 7


def test_an_error_is_one_printable_line() -> None:
    error = CheckpointError("is stored twice", path=f"/drafts/{EVIL}", key=EVIL)
    assert str(error).isprintable()
    assert str(error).startswith("/drafts/\\x1b[31mred")
    assert (error.key, error.path) == (EVIL, f"/drafts/{EVIL}"), "the fields keep what was found"


@settings(deadline=None, max_examples=100, derandomize=True)
@given(text=st.text())
def test_printable_is_printable_and_leaves_the_rest(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text


def test_long_values_are_cut() -> None:
    long = CheckResult(id="a.b", status="failed", findings=(Finding(message="m", got=["x" * 100] * 100),))
    assert max(map(len, draft_lines(draft(long)))) < 200


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    report = Report(drafts=(draft(PASSED, FAILED),))
    file = tmp_path / "report.json"
    file.write_text("an older one")
    report.write(file)
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(report.to_dict()))
    assert file.read_bytes().endswith(b"}\n")
    assert os.listdir(tmp_path) == ["report.json"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_names_that_are_no_utf8_stay_readable_json(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    Report(drafts=(draft(path="caf\u00e9/\udcff", name="\udcff"),)).write(file)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["drafts"][0]["path"] == "caf\u00e9/\udcff"


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    file.write_text("an older one")

    def full(source: str, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DraftError) as caught:
        Report(drafts=()).write(file)
    assert str(caught.value) == f"{file}: cannot be written: No space left on device"
    assert file.read_text() == "an older one"
    assert os.listdir(tmp_path) == ["report.json"]


def test_places_that_take_no_report(tmp_path: Path) -> None:
    report = Report(drafts=())
    (tmp_path / "folder.json").mkdir()
    for name in ("absent/report.json", "folder.json"):
        with pytest.raises(DraftError, match="cannot be written"):
            report.write(tmp_path / name)
    for name in ("report.txt", "report", "report.JSON"):
        for call in (report.write, require_suffix):
            with pytest.raises(DraftError, match=r"reports are written as \.json"):
                call(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder.json"]


# --- values --------------------------------------------------------------------------------------------------------------


def test_jsonable_by_hand() -> None:
    value = {"a": (1, 2.5), 3: {True}, "nan": float("nan"), "inf": [float("-inf")], "path": Path("x"), "none": None}
    assert jsonable(value) == {
        "a": [1, 2.5],
        "3": [True],
        "nan": "nan",
        "inf": ["-inf"],
        "path": "x",
        "none": None,
    }


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
        max_leaves=6,
    )
)
def test_jsonable_is_what_json_holds(value: object) -> None:
    plain = jsonable(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
