"""Results in plain lines, for a terminal; and how any text from a checkpoint is made fit to be shown.

Names, values and messages come from files that somebody else wrote: they may hold line ends, terminal codes or a megabyte.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import printable
from pytest_specdecode.findings import CheckResult, Finding

if TYPE_CHECKING:
    from pytest_specdecode.report.compare import Comparison
    from pytest_specdecode.report.model import DraftReport

#: Letters of a message; the longest of ours has some 600.
MESSAGE_LIMIT = 2000
VALUE_LIMIT = 160

#: Letters of a word that is kept whole however narrow the terminal is.
LONGEST_WORD = 200

#: What a field of a finding starts with; its further lines stand under its value.
_LABEL = re.compile(r"(?:where|got|due|fix): {1,3}")
#: Checks whose figures are there for a picture.
_DRAWN = ("fused-kv.matches-reference", "weights.finite", "target.rope")


def shown(value: object, limit: int = VALUE_LIMIT) -> str:
    """`value` on one printable line of at most `limit` letters; what is no text, as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    # What is cut away is never looked at, however long it is.
    line = printable(text[: limit + 1])
    return line if len(line) <= limit else line[: limit - 1] + "…"


def message(text: str) -> str:
    """A message on one printable line, cut where it is no longer one."""
    return shown(text, MESSAGE_LIMIT)


def fitted(line: str, width: int) -> Iterator[str]:
    """`line` in lines of at most `width` letters, those after the first indented further.

    Words are kept whole, longer ones than `width` too, so that a path or a value can be copied; the words of a text that holds one of more
    than `LONGEST_WORD` letters are not.
    """
    if len(line) <= width:
        yield line
        return
    text = line.lstrip(" ")
    indent = line[: len(line) - len(text)]
    label = _LABEL.match(text)
    head = "" if label is None else label[0]
    yield from textwrap.wrap(
        text[len(head) :],
        max(width, len(indent) + 24),
        initial_indent=indent + head,
        subsequent_indent=indent + " " * (len(head) or 2),
        break_long_words=max(map(len, text.split())) > LONGEST_WORD,
        break_on_hyphens=False,
    )


def acceptance_lines(
    figures: Mapping[str, Any], indent: str = "    ", width: int = 80, limit: int = 12
) -> Iterator[str]:
    """Rates by drafted token with their intervals, then the accepted length of each recording; `figures` as `acceptance.length` has them.

    Of more recordings than `limit`, the lowest are shown.
    """
    places = figures["served"]["positions"]
    rates = [f"{at['rate']:.2f} ({at['low']:.2f} to {at['high']:.2f})" for at in places]
    if rates:
        yield from fitted(f"{indent}by position {', '.join(rates)}", width)
    files = [file for file in figures.get("files", ()) if file["served"]["rounds"]]
    if len(files) < 2:
        return
    chosen = sorted(files, key=lambda file: file["served"]["accepted_length"])[:limit] if len(files) > limit else files
    for file in chosen:
        served = file["served"]
        span = f"({served['accepted_length_low']:.2f} to {served['accepted_length_high']:.2f})"
        name = shown(file["file"], 40)
        yield from fitted(
            f"{indent}{name}: {served['accepted_length']:.2f} {span} over {served['rounds']} rounds", width
        )
    if len(files) > limit:
        yield f"{indent}and {len(files) - limit} files that were accepted further"


def is_measurement(result: CheckResult) -> bool:
    """Whether what a check measured is worth a line of a terminal even where it passes."""
    return bool(result.figures) and result.id not in _DRAWN


def finding_lines(id: str, finding: Finding, indent: str = "  ") -> Iterator[str]:
    """A finding for a terminal, in the order: what, where, got and due, what each engine does, how to mend it."""
    yield f"{indent}{finding.severity} {id}: {message(finding.message)}"
    yield from field_lines(finding, f"{indent}  ")


def field_lines(finding: Finding, indent: str, fields: bool = True, outcomes: bool = True) -> Iterator[str]:
    """What a finding holds besides its message: its fields, and what each engine does where that is known."""
    rows: list[tuple[str, object]] = [("where", finding.where or None), ("got", finding.got), ("due", finding.due)]
    for label, value in rows if fields else ():
        if value is not None:
            yield f"{indent}{label + ':':<7}{shown(value)}"
    for name, outcome in finding.outcomes.items() if outcomes else ():
        if outcome.outcome != "unknown":
            yield f"{indent}{name}: {outcome.outcome}{': ' + message(outcome.message) if outcome.message else ''}"
    if fields and finding.fix:
        yield f"{indent}fix:   {message(finding.fix)}"


def overview(drafts: Sequence[DraftReport], name_limit: int = 24) -> list[list[str]]:
    """A table of drafts, one a row under a row of headings; for any writer, as plain printable text."""
    rows = [["draft", "family", "status", "failed", "warned", "inconclusive", "passed", "accepted"]]
    for draft in drafts:
        counts = draft.counts()
        length = draft.figures("acceptance.length").get("accepted_length")
        rows.append(
            [
                shown(draft.name, name_limit),
                shown(draft.family or "not known", name_limit),
                draft.status,
                *(str(counts.get(status, 0)) for status in ("failed", "warned", "inconclusive", "passed")),
                f"{length:.2f}" if isinstance(length, (int, float)) else "",
            ]
        )
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return rows


def overview_lines(drafts: Sequence[DraftReport], width: int = 80) -> Iterator[str]:
    """The table of drafts for a terminal: where it is too wide, without the status, which the counts say, and then with shorter names."""
    rows = overview(drafts, 20)
    if _table_width(rows) > width:
        status = rows[0].index("status")
        rows = [row[:status] + row[status + 1 :] for row in rows]
    if (excess := _table_width(rows) - width) > 0:
        limit = max(max(len(row[0]) for row in rows) - excess, 8)
        rows = [[shown(row[0], limit), *row[1:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _table_width(rows: Sequence[Sequence[str]]) -> int:
    """Letters of a line of a table whose columns are two apart."""
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2


def comparison_lines(comparison: Comparison, limit: int = 40) -> Iterator[str]:
    """What changed against an older report, for a terminal."""
    yield f"against {message(comparison.path)}:"
    for draft in comparison.drafts:
        counts = ", ".join(f"{len(changes)} {kind}" for kind, changes in draft.by_kind().items() if changes)
        was = "" if draft.old_name == draft.name else f" (was {shown(draft.old_name, 40)})"
        yield f"  {shown(draft.name, 40)}{was}: {counts or 'nothing changed'}"
        for number, change in enumerate(draft.changes):
            if number == limit:
                yield f"    and {len(draft.changes) - limit} more"
                break
            yield f"    {change.kind:<6} {change.id}: {change.steps}{': ' + message(change.message) if change.message else ''}"
    for title, names in (
        ("not in the older report", comparison.only_new),
        ("only in the older report", comparison.only_old),
    ):
        if names:
            yield f"  {title}: {', '.join(shown(name, 40) for name in names[:limit])}"


def shortened(value: Any, limit: int) -> Any:
    """`value`, plain JSON, with every text and key of more than `limit` letters cut, and the number of its letters said."""
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}… ({len(value)} letters)"
    if isinstance(value, Mapping):
        return {shortened(key, limit): shortened(item, limit) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item, limit) for item in value]
    return value
