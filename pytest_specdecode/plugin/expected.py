"""Failures that a project knows of and lives with for now, as the ini file lists them.

A line is `check-id[draft-name]: reason`, or `check-id: reason` for every draft. What it names may fail; once it passes, the line is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^(?P<id>[^\[\]:\s]+)(?:\[(?P<draft>.+?)\])?\s*:\s*(?P<reason>\S.*)$")

FORM = "check-id[draft-name]: reason"


@dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """One line of the list.

    Attributes:
        id: of the check.
        draft: the draft's label, as test ids show it, or its directory's name, as it is or as ids write it; None for every draft.
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


def reason_for(listed: Iterable[ExpectedFailure], id: str, names: Sequence[str]) -> str | None:
    """Why the check `id` may fail on the draft that goes by `names`, or None where it may not.

    A line that names the draft comes before one for every draft, and an earlier name before a later one.
    """
    reasons = {item.draft: item.reason for item in listed if item.id == id}
    return next((reasons[name] for name in (*names, None) if name in reasons), None)


def strangers(listed: Iterable[ExpectedFailure], drafts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The drafts that are listed, each once, where none of them is one of `drafts`, each given by its names; else nothing.

    A list that is shared by several runs names drafts that one run has not; one of which no name fits is likely misspelled.
    """
    here = {name for names in drafts for name in names}
    named = tuple(dict.fromkeys(item.draft for item in listed if item.draft is not None))
    return () if here.intersection(named) or not here else named
