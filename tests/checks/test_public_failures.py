"""Every failure that was reported in public is caught on a checkpoint with its cause, or the list says why none can show it.

What goes wrong without this file: a known failure that the checks pass over; a check that fires for another reason than the failure's
cause; a failure that is called invisible and has a check; a repaired draft that is still reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from public_failures import FAILURES, Case

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.findings import CheckResult

CASES = [
    pytest.param(case, id=f"{failure.number}-{case.check}-{place}")
    for failure in FAILURES
    for place, case in enumerate(failure.cases)
]
TWINS = [param for param in CASES if param.values[0].twin]


def test_the_list_is_whole() -> None:
    """Each number once; each caught by a check that there is, or with a reason, never both."""
    assert [failure.number for failure in FAILURES] == list(range(1, 79))
    for failure in FAILURES:
        assert all(re.fullmatch(r"[\w./-]+#\d+", reference) for reference in failure.references), failure.number
        assert bool(failure.cases) != bool(failure.reason), failure.number
        assert set(failure.checks) <= set(REGISTRY), failure.number


def test_at_least_60_are_caught() -> None:
    assert sum(bool(failure.cases) for failure in FAILURES) >= 60


@pytest.mark.parametrize("case", CASES)
def test_the_failure_is_caught(case: Case, tmp_path: Path) -> None:
    """The check ends as the case says, and names the cause."""
    result = _result(case, tmp_path, broken=True)
    assert result.status == case.status, result
    assert case.text in _said(result)


@pytest.mark.parametrize("case", TWINS)
def test_without_its_cause_it_is_not(case: Case, tmp_path: Path) -> None:
    """The same draft, repaired."""
    result = _result(case, tmp_path, broken=False)
    assert result.status == case.twin, result


def _result(case: Case, path: Path, *, broken: bool) -> CheckResult:
    base = dict(testing.tiny_config(case.family) if case.base is None else case.base)
    whole = _changed(base, case.shape_config)
    tensors = testing.random_tensors(whole, case.family)
    if broken and case.tensors is not None:
        case.tensors(tensors)
    draft = testing.write_checkpoint(
        path / "draft",
        _changed(whole, case.config) if broken else whole,
        tensors,
        rename=testing.stored_names(whole, case.family),
    )
    if broken and case.files is not None:
        case.files(draft)
    files = case.target if broken or case.twin_target is None else case.twin_target
    serve = case.serve if broken or case.twin_serve is None else case.twin_serve
    target = None if files is None else _write_target(path / "target", files)
    return check_draft(draft, target=target, checks=[case.check], serve=serve)[case.check]


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def _write_target(path: Path, files: Mapping[str, Any]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def _said(result: CheckResult) -> str:
    """The findings' messages, with what was found and was due."""
    return "\n".join(f"{item.message} | {item.where} | {item.got} | {item.due}" for item in result.findings)
