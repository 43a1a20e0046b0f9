"""The report as Markdown for the summary of a pull request: worst first, and short whatever was found.

Text from a checkpoint stays text: what has a meaning in GitHub's Markdown is escaped, and a link, an image, a mention or a tag in the
name of a tensor does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_specdecode.findings import STATUS_ORDER
from pytest_specdecode.report.groups import Item, items, unanswered
from pytest_specdecode.report.text import overview, shown

if TYPE_CHECKING:
    from pytest_specdecode.report.compare import Comparison
    from pytest_specdecode.report.model import Report

#: A summary has fewer lines than this.
LINE_LIMIT = 60
_MOST_DRAFTS = 10
_MOST_CHANGES = 12
_MOST_REASONS = 5

# GitHub makes a mention of an `@` and a link of `www.` and `http:` wherever they stand; a backslash does not keep it from that.
_AS_ENTITIES = "&<>@:."
_SPECIAL = re.compile(
    r"[\\`*_{}\[\]#!|~$^&<>@]|(?<=www)\.|(?<=http):|(?<=https):|(?<=mailto):|(?<=xmpp):|(?<=ftp):", re.IGNORECASE
)


def text(report: Report) -> str:
    """The report as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def escape(value: object, limit: int = 160) -> str:
    """`value` as Markdown that shows it and does nothing else, in a table or out of it."""
    return _SPECIAL.sub(_neutral, shown(value, limit))


def _neutral(match: re.Match[str]) -> str:
    sign = match[0]
    return f"&#{ord(sign)};" if sign in _AS_ENTITIES else f"\\{sign}"


def _lines(report: Report) -> Iterator[str]:
    found, reasons = items(report.drafts), unanswered(report.drafts)
    drafts = list(report.drafts)
    if len(drafts) > _MOST_DRAFTS:
        drafts.sort(key=lambda draft: -STATUS_ORDER.index(draft.status))
    head = [
        f"## {_title(report)}",
        "",
        *_table(overview(drafts[:_MOST_DRAFTS], 40)),
        *_more(len(drafts) - _MOST_DRAFTS, "draft"),
        "",
        *([] if report.comparison is None else _comparison(report.comparison)),
    ]
    tail = [
        f"- inconclusive {', '.join(ids[:3])}{f' and {len(ids) - 3} more' if len(ids) > 3 else ''}: {escape(reason, 300)}"
        for reason, ids in list(reasons.items())[:_MOST_REASONS]
    ]
    tail += _more(len(reasons) - _MOST_REASONS, "reason")
    yield from head
    # A heading of the table, its rule, what is left out, an empty line.
    room = LINE_LIMIT - 1 - len(head) - len(tail) - 5
    if found:
        yield from _findings(found[:room], several=len(report.drafts) > 1)
        yield from _more(len(found) - room, "finding")
        yield ""
    yield from tail


def _title(report: Report) -> str:
    number = len(report.drafts)
    failed = sum(draft.status == "failed" for draft in report.drafts)
    if number == 1:
        return f"Draft model {escape(report.drafts[0].name, 80)}: {report.drafts[0].status}"
    return f"{number} draft models: {f'{failed} failed' if failed else 'none failed'}"


def _findings(found: Sequence[Item], several: bool) -> Iterator[str]:
    head = ["", *(["draft"] if several else []), "check", "finding", "where", "fix"]
    rows = [head]
    for item in found:
        one = item.finding
        draft = [escape(item.draft.name, 40)] if several else []
        rows.append(
            [item.group, *draft, item.result.id, escape(one.message, 300), escape(one.where, 100), escape(one.fix, 200)]
        )
    yield from _table(rows, is_escaped=True)


def _table(rows: Sequence[Sequence[str]], is_escaped: bool = False) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(cell if is_escaped else escape(cell) for cell in row)} |"
        if not number:
            yield "|" + " --- |" * len(row)


def _comparison(comparison: Comparison) -> list[str]:
    lines = [f"Against {escape(comparison.path, 120)}:", ""]
    changes = [(draft, change) for draft in comparison.drafts for change in draft.changes]
    changes.sort(key=lambda pair: ("worse", "new", "better", "gone").index(pair[1].kind))
    several = len(comparison.drafts) > 1
    for draft, change in changes[:_MOST_CHANGES]:
        name = f"{escape(draft.name, 40)}, " if several else ""
        said = f": {escape(change.message, 200)}" if change.message else ""
        lines.append(f"- **{change.kind}**: {name}{escape(change.id, 60)}, {escape(change.steps, 80)}{said}")
    lines += _more(len(changes) - _MOST_CHANGES, "change")
    if comparison.drafts and not changes:
        lines.append("- nothing changed")
    for title, names in (
        ("not in the older report", comparison.only_new),
        ("only in the older report", comparison.only_old),
    ):
        if names:
            lines.append(f"- {title}: {escape(', '.join(names), 200)}")
    return [*lines, ""]


def _more(number: int, what: str) -> list[str]:
    return ["", f"and {number} more {what if number == 1 else what + 's'}"] if number > 0 else []
