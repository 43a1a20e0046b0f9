"""The JSON report and its schema.

What these catch: a report that its own schema refuses; a schema that takes anything; a schema in the documentation that is not the one
that is shipped; a text of a megabyte that is carried from report to report.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_samples import DRAWN, HOSTILE, draft, hostile, measured, report, written

from pytest_specdecode.api import check_draft
from pytest_specdecode.checks.registry import Need
from pytest_specdecode.report import Report, compare, read_report
from pytest_specdecode.report.json_file import schema
from pytest_specdecode.testing import write_tiny

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(schema())


def test_the_schema_is_one_and_stands_in_the_documentation() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert json.loads((ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8")) == schema()


def test_the_schema_knows_every_want() -> None:
    wants = schema()["$defs"]["check"]["properties"]["want"]["enum"]
    assert set(wants) == {"", *Need.__args__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        lambda: report(),
        lambda: Report(drafts=()),
        lambda: report(*DRAWN),
        lambda: hostile(),
        lambda: Report(drafts=(draft(family="dflash"), draft(spec=None, packaging=None))),
    ],
    ids=["every-status", "no-draft", "figures", "hostile", "unknown-family"],
)
def test_what_is_written_keeps_the_schema(make: Callable[[], Report], tmp_path: Path) -> None:
    VALIDATOR.validate(json.loads(written(make(), ".json", tmp_path)))


def test_what_checks_write_keeps_the_schema(tmp_path: Path) -> None:
    write_tiny(tmp_path / "x", "dflash")
    found = check_draft(tmp_path / "x")
    VALIDATOR.validate(json.loads(written(found, ".json", tmp_path)))
    assert set(found.about) == {result.id for result in found}


def test_a_comparison_keeps_the_schema(tmp_path: Path) -> None:
    older = tmp_path / "old.json"
    Report(drafts=(draft(measured([0.9, 0.9])), draft(name="left"))).write(older)
    drafts = (draft(*DRAWN, measured([0.1, 0.1])), draft(name="new"))
    found = Report(drafts=drafts, comparison=compare(read_report(older), drafts))
    whole = json.loads(written(found, ".json", tmp_path))
    VALIDATOR.validate(whole)
    assert (whole["comparison"]["only_old"], whole["comparison"]["only_new"]) == (["left"], ["new"])
    assert [change["was"] for change in whole["comparison"]["drafts"][0]["worse"]] == ["2.80"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.update(schema=2),
        lambda found: found.pop("tool"),
        lambda found: found.pop("comparison"),
        lambda found: found["drafts"][0].pop("fused_kv"),
        lambda found: found["drafts"][0].update(status="fine"),
        lambda found: found["drafts"][0]["checks"][1].pop("fault"),
        lambda found: found["drafts"][0]["checks"][1].update(severity="grave"),
        lambda found: found["drafts"][0]["checks"][1]["findings"][0].pop("fix"),
        lambda found: found["drafts"][0]["checks"][1]["findings"][0]["outcomes"]["sglang"].update(outcome="oh"),
        lambda found: found["drafts"][0]["checks"][0].update(id="no-group"),
        lambda found: found["drafts"][0]["checks"][0].update(figures=[]),
        lambda found: found["drafts"][0]["checks"][0].update(want="luck"),
        lambda found: found.update(comparison={}),
    ],
)
def test_the_schema_refuses_what_is_no_report(spoil: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(json.dumps(report().to_dict()))
    VALIDATOR.validate(found)
    spoiled = copy.deepcopy(found)
    spoil(spoiled)
    assert not VALIDATOR.is_valid(spoiled)


def test_the_schema_takes_keys_that_are_added() -> None:
    found = json.loads(json.dumps(report().to_dict()))
    found["later"] = found["drafts"][0]["later"] = found["drafts"][0]["checks"][0]["later"] = 1
    VALIDATOR.validate(found)


def test_long_texts_are_cut_and_hostile_ones_survive(tmp_path: Path) -> None:
    text = written(hostile("<b>" + "x" * (1 << 20)), ".json", tmp_path)
    assert len(text) < 300_000
    finding = json.loads(text)["drafts"][0]["checks"][0]["findings"][0]
    assert finding["message"] == f"<b>{'x' * 4093}… ({(1 << 20) + 3} letters)"
    back = json.loads(written(hostile(), ".json", tmp_path))
    assert back["drafts"][0]["checks"][0]["message"] == HOSTILE
