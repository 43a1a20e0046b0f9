"""A run against an older report.

What these catch: a change that is called better where it is worse; one that is lost because a finding takes another's place under the same
status; drafts that are taken for one another; an accepted length that changed by chance; a file that is no report, or one of another
schema, that ends in a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_samples import (
    BARE,
    DOUBTFUL,
    FAILED,
    HOSTILE,
    MISSING,
    PASSED,
    SKIPPED,
    STOPS,
    UNSURE,
    WARNED,
    draft,
    hostile,
    measured,
    report,
)

from pytest_specdecode.errors import DraftError
from pytest_specdecode.findings import CheckResult, Status
from pytest_specdecode.report import Comparison, Report, compare, read_report
from pytest_specdecode.report.html_page import text as page
from pytest_specdecode.report.markdown import text as markdown
from pytest_specdecode.report.text import comparison_lines


@pytest.fixture
def against(tmp_path: Path) -> Callable[..., Comparison]:
    """What changed from the first list of results to the second, of one draft."""

    def against(old: list[CheckResult], new: list[CheckResult]) -> Comparison:
        file = tmp_path / "old.json"
        Report(drafts=(draft(*old),)).write(file)
        return compare(read_report(file), [draft(*new)])

    return against


def changes(found: Comparison) -> list[tuple[str, str, str]]:
    return [(change.kind, change.id, change.steps) for one in found.drafts for change in one.changes]


RANKED: list[Status] = ["passed", "inconclusive", "warned", "failed"]


@pytest.mark.parametrize("was", RANKED)
@pytest.mark.parametrize("now", RANKED)
def test_a_status_gets_worse_or_better(against: Callable[..., Comparison], was: Status, now: Status) -> None:
    one = CheckResult(id="a.b", status=was, message="old")
    found = against([one], [replace(one, status=now, message="new")])
    if was == now:
        assert changes(found) == []
        return
    kind = "worse" if RANKED.index(now) > RANKED.index(was) else "better"
    assert changes(found) == [(kind, "a.b", f"{was}, now {now}")]
    assert found.drafts[0].changes[0].message == ("new" if kind == "worse" else "old")


def test_a_check_that_no_longer_applies_is_no_change(against: Callable[..., Comparison]) -> None:
    assert (
        changes(against([PASSED, SKIPPED], [replace(PASSED, status="skipped"), replace(SKIPPED, status="passed")]))
        == []
    )


def test_findings_of_the_same_status_are_new_and_gone(against: Callable[..., Comparison]) -> None:
    found = against([replace(MISSING, findings=(STOPS, BARE))], [replace(MISSING, findings=(STOPS, DOUBTFUL))])
    assert changes(found) == [("new", "weights.missing", "failed"), ("gone", "weights.missing", "failed")]
    assert [change.message for change in found.drafts[0].changes] == [DOUBTFUL.message, BARE.message]


def test_checks_that_one_run_did_not_make(against: Callable[..., Comparison]) -> None:
    found = against([WARNED, PASSED], [FAILED, UNSURE])
    assert changes(found) == [
        ("new", "rope.theta-agrees", "failed, not judged before"),
        ("gone", "files.pickle", "warned, now not judged"),
    ]


@pytest.mark.parametrize(
    ("was", "now", "due"),
    [
        ([0.9, 0.8], [0.7, 0.5], [("worse", "acceptance.length", "2.70, now 2.20")]),
        ([0.7, 0.5], [0.9, 0.8], [("better", "acceptance.length", "2.20, now 2.70")]),
        ([0.9, 0.8], [0.8, 0.7], []),
        ([0.9, 0.8], [0.5], []),
    ],
    ids=["worse", "better", "chance", "other-measurement"],
)
def test_accepted_lengths(
    against: Callable[..., Comparison], was: list[float], now: list[float], due: list[tuple[str, str, str]]
) -> None:
    assert changes(against([measured(was)], [measured(now)])) == due


def test_another_trace_is_not_compared(against: Callable[..., Comparison]) -> None:
    low = measured([0.1, 0.1])
    other = replace(low, figures={**low.figures, "trace": {"fingerprint": "other"}})
    assert changes(against([measured([0.9, 0.8])], [other])) == []
    assert changes(against([measured([0.9, 0.8])], [replace(low, figures={**low.figures, "served": "none"})])) == []


def test_worse_comes_first(against: Callable[..., Comparison]) -> None:
    old = [replace(PASSED, id="a.better", status="failed"), WARNED, replace(PASSED, id="z.worse")]
    new = [replace(PASSED, id="a.better"), FAILED, replace(PASSED, id="z.worse", status="failed")]
    assert [kind for kind, _, _ in changes(against(old, new))] == ["worse", "new", "better", "gone"]


def test_drafts_are_matched_by_name_or_one_to_one(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    Report(drafts=(draft(FAILED, name="v1"),)).write(file)
    one = compare(read_report(file), [draft(replace(FAILED, status="passed", findings=()), name="v2")])
    assert [(item.name, item.old_name) for item in one.drafts] == [("v2", "v1")]
    assert [change.kind for change in one.drafts[0].changes] == ["better"]
    Report(drafts=(draft(PASSED, name="a"), draft(FAILED, name="b"))).write(file)
    two = compare(read_report(file), [draft(FAILED, name="b"), draft(FAILED, name="c")])
    assert [(item.name, item.changes) for item in two.drafts] == [("b", ())]
    assert (two.only_new, two.only_old) == (("c",), ("a",))


def test_it_is_shown_in_every_form(against: Callable[..., Comparison]) -> None:
    found = against([PASSED, WARNED], [replace(PASSED, status="failed", message="12 tensors are broken")])
    assert list(comparison_lines(found)) == [
        f"against {found.path}:",
        "  x: 1 worse, 1 gone",
        "    worse  files.readable: passed, now failed: 12 tensors are broken",
        "    gone   files.pickle: warned, now not judged: pickles lie beside the weights",
    ]
    whole = report(comparison=found)
    assert "- **worse**: files.readable, passed, now failed: 12 tensors are broken" in markdown(whole)
    assert '<span class="tag worse">worse</span> <code>files.readable</code>, passed, now failed' in page(whole)
    assert whole.to_dict()["comparison"]["drafts"][0]["worse"][0]["message"] == "12 tensors are broken"


def test_hostile_reports_are_shown_as_text(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    hostile().write(file)
    old = read_report(file)
    assert old.drafts[0].name == HOSTILE
    found = compare(replace(old, path=HOSTILE), [draft(FAILED, name="new"), draft(name=HOSTILE)])
    assert all(line.isprintable() for line in comparison_lines(found))
    whole = report(comparison=found)
    assert "<script>" not in page(whole)
    assert "<script>" not in markdown(whole)
    hostile("x" * (1 << 20)).write(file)
    found = compare(read_report(file), [draft(name="new"), draft(name="newer")])
    assert sum(map(len, comparison_lines(found))) < 5000


def spoiled(change: Callable[[dict[str, Any]], object]) -> str:
    found = json.loads(json.dumps(report().to_dict()))
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\xff\xfe", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("[]", "is no report of pytest-specdecode"),
        ("{}", "is no report of pytest-specdecode"),
        ('{"schema": 1}', "is no report of pytest-specdecode"),
        ('{"created": 1, "tests": []}', "--draft-report=FILE.json writes one"),
        ('{"schema": 0, "drafts": []}', "has schema 0, and this version reads 1"),
        ('{"schema": 2, "drafts": []}', "has schema 2, and this version reads 1"),
        ('{"schema": true, "drafts": []}', "has schema true"),
        (spoiled(lambda found: found["drafts"].append(None)), "is no whole report"),
        (spoiled(lambda found: found["drafts"][0].pop("name")), "is no whole report"),
        (spoiled(lambda found: found["drafts"][0].update(name=3)), "a draft without a name"),
        (spoiled(lambda found: found["drafts"][0].pop("checks")), "is no whole report"),
        (spoiled(lambda found: found["drafts"][0]["checks"][1].update(status="oh")), "is no whole report"),
        (spoiled(lambda found: found["drafts"][0]["checks"][1].update(message=None)), "is no whole report"),
        (spoiled(lambda found: found["drafts"][0]["checks"][1].update(figures=[])), "figures that are no object"),
        (spoiled(lambda found: found["drafts"][0]["checks"][1]["findings"][0].update(where=[])), "is no whole report"),
        (spoiled(lambda found: found["drafts"][0]["checks"][1].update(findings=7)), "is no whole report"),
    ],
)
def test_what_is_no_report_is_one_line(content: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(DraftError) as caught:
        read_report(file)
    assert text in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_places_that_hold_no_report(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="cannot be read: No such file"):
        read_report(tmp_path / "absent.json")
    with pytest.raises(DraftError, match="is a directory"):
        read_report(tmp_path)


def test_a_report_that_an_editor_marked_is_read(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text("\ufeff" + json.dumps(report().to_dict()), encoding="utf-8")
    assert [item.name for item in read_report(file).drafts] == ["x"]
