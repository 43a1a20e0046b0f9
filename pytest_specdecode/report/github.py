"""Findings as commands of GitHub's workflows, which show them beside the lines of `config.json` in a pull request.

GitHub keeps ten errors and ten warnings of a step, so no more are written; the rest stand in the summary and the report.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_specdecode.errors import DraftError, printable
from pytest_specdecode.report.groups import items
from pytest_specdecode.report.places import Places
from pytest_specdecode.report.text import message, shown

if TYPE_CHECKING:
    from pytest_specdecode.report.model import Report

#: Of each level, as GitHub takes them from one step.
LIMIT = 10


def is_workflow() -> bool:
    """Whether GitHub's runner reads what this process prints."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def inert(line: str) -> str:
    """`line`, in a workflow, as one that the runner shows and does not obey.

    It takes for a command what begins with `::` behind spaces, as a line that was broken within a name of a tensor may, and `##[`
    wherever it stands.
    """
    if not is_workflow():
        return line
    line = line.replace("##[", r"#\x23[")
    text = line.lstrip(" ")
    return line if not text.startswith("::") else rf"{line[: len(line) - len(text)]}\x3a{text[1:]}"


def lines(report: Report) -> Iterator[str]:
    """One command a finding, worst first: `::error file=…,line=…,title=…::message`."""
    places, counts, left = Places(), {"error": 0, "warning": 0, "notice": 0}, 0
    for item in items(report.drafts):
        level = "notice" if item.result.is_expected else item.finding.severity
        if counts[level] == LIMIT:
            left += 1
            continue
        counts[level] += 1
        text = f"{shown(item.draft.name, 80)}: {message(item.finding.message)}"
        if item.finding.fix:
            text += f"\nfix: {message(item.finding.fix)}"
        properties = {
            "file": printable(places.file(item.draft)),
            "line": str(places.line(item.draft, item.finding.where)),
            "title": shown(item.result.id),
        }
        given = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        yield f"::{level} {given}::{_data(text)}"
    if left and counts["notice"] < LIMIT:
        yield f"::notice title=pytest-specdecode::{left} more findings stand in the summary of this run"


def append_summary(report: Report, file: str | os.PathLike[str]) -> None:
    """Append the Markdown summary to `file`, the step summary, in one write.

    Raises:
        DraftError: it cannot be written.
    """
    from pytest_specdecode.report import markdown

    data = f"{markdown.text(report)}\n".encode("utf-8", errors="backslashreplace")
    try:
        with open(file, "ab", buffering=0) as stream:
            if stream.write(data) != len(data):
                raise DraftError("cannot be written: there is no room", path=file)
    except OSError as error:
        raise DraftError(f"cannot be written: {error.strerror or error}", path=file) from None


def _data(text: str) -> str:
    """The message of a command; a line end in it would begin another command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
