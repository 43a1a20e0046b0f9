"""How a result goes from the process that ran the check to the one that reports, and how it reads when it fails a test."""

from __future__ import annotations

import json

import pytest

from pytest_specdecode.errors import printable
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.report import finding_lines

#: Name of the user property that holds a result as JSON; junitxml shows it too.
PROPERTY = "draft_check"


def failure_text(result: CheckResult) -> str:
    """The findings of a failed check, or its message where it has none.

    The first line is what pytest's short summary shows beside the test's id, so the check's id is not said again there.
    """
    lines = [line for finding in result.findings for line in finding_lines(result.id, finding, indent="")]
    return "\n".join(lines).removeprefix(f"error {result.id}: ") or printable(result.message)


def result_of(report: pytest.TestReport) -> tuple[str, CheckResult] | None:
    """The draft's path and the result that the test of `report` recorded, or None where it is no test of the suite."""
    for name, value in report.user_properties:
        if name == PROPERTY:
            found = json.loads(str(value))
            return found["path"], CheckResult.from_dict(found)
    return None
