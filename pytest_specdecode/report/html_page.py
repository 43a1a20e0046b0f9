"""The report as one HTML file: no script, nothing from a network, findings that unfold, pictures where matplotlib is installed.

Every text goes through `escape`, so that a tensor's name is a name and no markup. The page states a content security policy that would
refuse whatever slipped through.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_specdecode.report.groups import TITLES, Item, items, unanswered
from pytest_specdecode.report.model import CheckText, tool_versions
from pytest_specdecode.report.text import MESSAGE_LIMIT, overview, shown

if TYPE_CHECKING:
    from pytest_specdecode.report.compare import Comparison
    from pytest_specdecode.report.model import DraftReport, Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_VALUE_LIMIT = 1000
NO_PICTURES = "There are no pictures, for want of matplotlib: pip install 'pytest-specdecode[report]'"

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --faint: #59636e; --line: #c9d1d9; --panel: #f4f6f8;
  --accent: #0b62c4; --second: #b35900; --bad: #b3261e; --warn: #8a5a00; --good: #1a7a3c; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #e4e9ee; --faint: #9aa5b1; --line: #3b444e; --panel: #1e242b;
  --accent: #6cb0ff; --second: #ffa657; --bad: #ff8a80; --warn: #e8b34a; --good: #6fd08c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; border-top: 1px solid var(--line); padding-top: 1rem; } h3 { font-size: 1.05rem; }
code, .value { font-family: ui-monospace, monospace; font-size: 0.9em; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; } th, td { text-align: left; vertical-align: top; padding: 0.2rem 0.7rem 0.2rem 0;
  border-bottom: 1px solid var(--line); } .scroll th, .scroll td { overflow-wrap: normal; }
details { background: var(--panel); border: 1px solid var(--line); border-radius: 0.4rem; margin: 0.4rem 0; padding: 0.4rem 0.7rem; }
summary { cursor: pointer; min-height: 1.5rem; } dl { margin: 0.5rem 0; } dt { color: var(--faint); } dd { margin: 0 0 0.4rem 1rem; }
figure { margin: 1rem 0; max-width: 36rem; } figure svg { width: 100%; height: auto; display: block; } figcaption { color: var(--faint); }
.faint { color: var(--faint); } .failed, .error, .worse, .new { color: var(--bad); } .warned, .warning { color: var(--warn); }
.passed, .better, .gone { color: var(--good); } .tag { font-weight: 600; }
"""


def text(report: Report) -> str:
    """The report as a page."""
    return "\n".join(_page(report)) + "\n"


def escape(value: object, limit: int = MESSAGE_LIMIT) -> str:
    """`value` as text of the page or of a quoted attribute."""
    return html.escape(shown(value, limit), quote=True)


def _page(report: Report) -> Iterator[str]:
    title = escape(", ".join(draft.name for draft in report.drafts[:3]) or "no draft", 120)
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
    yield f"<title>Draft models: {title}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>Draft models: {title}</h1>"
    if len(report.drafts) > 1:
        yield from _overview(report)
    if report.comparison is not None:
        yield from _comparison(report.comparison)
    for draft in report.drafts:
        yield from _draft(draft, report.about)
    versions = ", ".join(f"{name} {version}" for name, version in tool_versions().items() if version)
    yield f'<p class="faint">Written by {escape(versions)}.</p></body></html>'


def _overview(report: Report) -> Iterator[str]:
    """The table of drafts, and the checks on which they differ."""
    head, *rows = overview(report.drafts, 60)
    yield from _table(head, [[escape(cell) for cell in row] for row in rows])
    statuses = [{result.id: result.status for result in draft.results} for draft in report.drafts]
    ids = dict.fromkeys(result.id for result in report)
    differing = [id for id in ids if len({found.get(id) for found in statuses}) > 1]
    if differing:
        yield "<details><summary>Checks on which they differ</summary>"
        names = [draft.name for draft in report.drafts]
        yield from _table(
            ["check", *names],
            [[f"<code>{escape(id)}</code>", *(_status(found.get(id, "")) for found in statuses)] for id in differing],
        )
        yield "</details>"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield '<div class="scroll"><table><tr>' + "".join(f"<th>{escape(cell, 60)}</th>" for cell in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def _status(status: str) -> str:
    return f'<span class="{escape(status)}">{escape(status)}</span>'


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield f"<h2>Against <code>{escape(comparison.path, 200)}</code></h2>"
    for draft in comparison.drafts:
        was = "" if draft.old_name == draft.name else f' <span class="faint">(was {escape(draft.old_name, 200)})</span>'
        yield f"<h3>{escape(draft.name, 200)}{was}</h3>"
        if not draft.changes:
            yield "<p>Nothing changed.</p>"
            continue
        yield "<ul>"
        for change in draft.changes:
            said = f": {escape(change.message)}" if change.message else ""
            yield (
                f'<li><span class="tag {change.kind}">{change.kind}</span> <code>{escape(change.id)}</code>, '
                f"{escape(change.steps)}{said}</li>"
            )
        yield "</ul>"
    for title, names in (
        ("Not in the older report", comparison.only_new),
        ("Only in the older report", comparison.only_old),
    ):
        if names:
            yield f"<p>{title}: {escape(', '.join(names))}</p>"


def _draft(draft: DraftReport, about: Mapping[str, CheckText]) -> Iterator[str]:
    yield f"<h2>{escape(draft.name, 200)}</h2>"
    yield f"<p>{escape(draft.description)}<br>{_status(draft.status)}: "
    yield escape(", ".join(f"{number} {status}" for status, number in draft.counts().items())) + "</p>"
    group = ""
    for item in items([draft]):
        if item.group != group:
            group = item.group
            yield f"<h3>{TITLES[group]}</h3>"
        yield from _finding(item, about.get(item.result.id))
    reasons = unanswered([draft])
    if reasons:
        yield "<h3>Inconclusive</h3><ul>"
        for reason, ids in reasons.items():
            yield f"<li>{escape(reason)} <span class='faint'>({escape(', '.join(ids))})</span></li>"
        yield "</ul>"
    measured = [item for item in draft.results if item.figures and item.message and item.status == "passed"]
    if measured:
        yield "<h3>Measured</h3><ul>"
        for result in measured:
            yield f"<li><code>{escape(result.id)}</code>: {escape(result.message)}</li>"
        yield "</ul>"
    yield from _pictures(draft)
    yield "<details><summary>All checks</summary>"
    yield from _table(
        ["check", "status", "says"],
        [
            [f"<code>{escape(item.id)}</code>", _status(item.status), escape(item.message, _VALUE_LIMIT)]
            for item in draft.results
        ],
    )
    yield "</details>"


def _finding(item: Item, about: CheckText | None) -> Iterator[str]:
    one = item.finding
    yield (
        f'<details class="finding"><summary><span class="tag {one.severity}">{one.severity}</span> '
        f"<code>{escape(item.result.id)}</code>: {escape(one.message)}</summary><dl>"
    )
    rows: list[tuple[str, object]] = [
        ("where", one.where or None),
        ("got", one.got),
        ("due", one.due),
        ("fix", one.fix or None),
        ("expected, since", item.result.expected or None),
    ]
    if about is not None:
        rows += [("what must hold", about.title or None), ("why", about.why or None)]
    for label, value in rows:
        if value is not None:
            yield f'<dt>{label}</dt><dd class="value">{escape(value, _VALUE_LIMIT)}</dd>'
    for name, outcome in one.outcomes.items():
        if outcome.outcome == "unknown":
            continue
        said = f": {escape(outcome.message)}" if outcome.message else ""
        source = f' <span class="faint">({escape(outcome.source)})</span>' if outcome.source else ""
        yield f"<dt>{escape(name)}</dt><dd>{escape(outcome.outcome)}{said}{source}</dd>"
    yield "</dl></details>"


def _pictures(draft: DraftReport) -> Iterator[str]:
    try:
        from pytest_specdecode.report import plots
    except ImportError as error:
        yield f'<p class="faint">{escape(NO_PICTURES)} ({escape(str(error))})</p>'
        return
    for picture in plots.pictures(draft):
        yield f'<figure><div role="img" aria-label="{escape(picture.title)}">{picture.svg}</div>'
        yield f"<figcaption>{escape(picture.title)}. {escape(picture.caption)}</figcaption></figure>"
