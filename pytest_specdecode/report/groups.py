"""Findings in the order in which somebody has to act on them: what an engine serves wrong before what it stops at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_specdecode.findings import CheckResult, Finding

if TYPE_CHECKING:
    from pytest_specdecode.report.model import DraftReport

#: Names of the groups, worst first.
GROUPS: tuple[str, ...] = ("serves wrong", "stops", "falls back", "error", "warning", "expected")

#: What each group is, for headings.
TITLES: dict[str, str] = {
    "serves wrong": "Served wrong, in silence",
    "stops": "Stops the server",
    "falls back": "Falls back to something slower",
    "error": "Errors that no engine is known to answer",
    "warning": "Warnings",
    "expected": "Failures that are expected",
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One finding with the draft and the check that it is of."""

    draft: DraftReport
    result: CheckResult
    finding: Finding

    @property
    def group(self) -> str:
        """The group it belongs to: by the worst that an engine does with it, a warning by its severity alone."""
        if self.result.is_expected:
            return "expected"
        if self.finding.severity == "warning":
            return "warning"
        kinds = {outcome.outcome for outcome in self.finding.outcomes.values()}
        return next((group for group in GROUPS[:3] if group in kinds), "error")


def items(drafts: Sequence[DraftReport]) -> list[Item]:
    """Every finding of every draft, worst group first; a failure without a finding counts as one with its message."""
    found = []
    for draft in drafts:
        for result in draft.results:
            bare = (Finding(message=result.message),) if result.status == "failed" and not result.findings else ()
            found += [Item(draft=draft, result=result, finding=finding) for finding in (*result.findings, *bare)]
    return sorted(found, key=lambda item: GROUPS.index(item.group))


def unanswered(drafts: Sequence[DraftReport]) -> dict[str, list[str]]:
    """The checks that could not judge, by the reason; the reason says what to give."""
    found: dict[str, list[str]] = {}
    for draft in drafts:
        for result in draft.results:
            if result.status == "inconclusive" and result.id not in found.setdefault(result.message, []):
                found[result.message].append(result.id)
    return found
