"""Failures that a project knows of and lives with for now, as the ini file lists them.

A line is `check-id[draft-name]: reason`, or `check-id: reason` for every draft. What it names may fail; once it passes, the line is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"^(?P<id>[^\[\]:\s]+)(?:\[(?P<draft>[^\]]+)\])?\s*:\s*(?P<reason>\S.*)$")

FORM = "check-id[draft-name]: reason"


@dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """One line of the list.

    Attributes:
        id: of the check.
        draft: label of the draft, as test ids show it; None for every draft.
        reason: why it is lived with.
    """

    id: str
    draft: str | None
    reason: str

    def __str__(self) -> str:
        return self.id if self.draft is None else f"{self.id}[{self.draft}]"


class ExpectedFailureError(ValueError):
    """A line that cannot be read, that names no check, or that is there twice."""


def parse(lines: Iterable[str]) -> tuple[ExpectedFailure, ...]:
    """The listed failures.

    Raises:
        ExpectedFailureError: the first line that will not do, in one line.
    """
    from pytest_specdecode import checks as rules

    found: dict[str, ExpectedFailure] = {}
    for line in lines:
        match = _LINE.match(line.strip())
        if match is None:
            raise ExpectedFailureError(f"{line.strip()!r} is not of the form {FORM!r}")
        item = ExpectedFailure(id=match["id"], draft=match["draft"], reason=match["reason"])
        if item.id not in rules.REGISTRY:
            try:
                rules.select([item.id])
            except rules.UnknownCheckError as error:
                raise ExpectedFailureError(error.message) from None
            raise ExpectedFailureError(f"{item.id} is a group; list each check by its id")
        if str(item) in found:
            raise ExpectedFailureError(f"{item} is listed twice")
        found[str(item)] = item
    return tuple(found.values())


def reason_for(listed: Iterable[ExpectedFailure], id: str, draft: str) -> str | None:
    """Why the check `id` may fail on the draft labelled `draft`, or None where it may not; a line that names the draft comes first."""
    reasons = {item.draft: item.reason for item in listed if item.id == id and item.draft in (draft, None)}
    return reasons.get(draft, reasons.get(None))
