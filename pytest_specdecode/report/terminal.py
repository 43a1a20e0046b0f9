"""A draft's block of a terminal: what it is, counts, and what was found, by what engines do with it, worst first.

It is written once, for pytest's summary and for `str(report)`. Lines are plain text; what colour a line has is its style's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_specdecode.findings import CheckResult, Finding
from pytest_specdecode.report.groups import GROUPS, TITLES, Item, items, unanswered
from pytest_specdecode.report.text import acceptance_lines, field_lines, fitted, is_measurement, message

if TYPE_CHECKING:
    from pytest_specdecode.report.model import DraftReport

WIDTH = 80

#: Findings of one check that a group shows in a line each, where they stand in full elsewhere.
_MOST_OF_ONE = 10
_LENGTH = "acceptance.length"
_CONVENTIONS = "acceptance.conventions"

#: What to give where a check wants it, and whether a reason says so already.
_GIVE: dict[str, tuple[str, str]] = {
    "target": ("--draft-target", "--draft-target=DIR"),
    "serving": ("--draft-serve", '--draft-serve="NAME=VALUE ..."'),
    "trace": ("--draft-trace", "--draft-trace=DIR"),
    "gpu": ("--draft-device", "--draft-device=cuda"),
    "tensors": ("director", "the whole checkpoint directory"),
}


class Line(NamedTuple):
    """A line, and its style: a group of findings, `draft`, `inconclusive`, `measured`, or nothing."""

    text: str
    style: str = ""


def draft_lines(draft: DraftReport, width: int = WIDTH) -> Iterator[str]:
    """A draft's block without colour, every finding with its fields and what each engine does."""
    return (line.text for line in block(draft, width=width))


def block(
    draft: DraftReport,
    *,
    width: int = WIDTH,
    brief: bool = False,
    outcomes: bool = True,
    notes: bool = False,
    is_told: Callable[[CheckResult], bool] = lambda result: False,
    again: Callable[[CheckResult], str | None] = lambda result: None,
) -> Iterator[Line]:
    """A draft's block, line by line.

    Args:
        draft: the results.
        width: letters of a line; commands, and words that are longer, are kept whole.
        brief: counts and a line per finding, per reason and per measurement only.
        outcomes: whether what each engine does has a line of its own; the engines of a group are named in any case.
        notes: whether checks that passed say what they have to say.
        is_told: whether the fields of a result's findings stand elsewhere, so that they are left out here.
        again: the command that runs a check again, or None where there is no need of one.
    """

    def fit(lines: Iterable[str], style: str = "") -> Iterator[Line]:
        return (Line(part, style) for line in lines for part in fitted(line, width))

    yield from fit([message(draft.description)], "draft")
    yield from fit(["  " + ", ".join(f"{number} {status}" for status, number in draft.counts().items())])
    found, offered = items([draft]), set[str]()
    for group in GROUPS:
        members = [item for item in found if item.group == group]
        if members:
            yield Line(f"  {TITLES[group]}:", group)
        for result, findings in _by_check(members):
            short = brief or is_told(result)
            for finding in findings[: _MOST_OF_ONE if short else None]:
                yield from fit([f"    {_one_line(Item(draft=draft, result=result, finding=finding))}"], group)
                if not brief and not result.is_expected:
                    yield from fit(field_lines(finding, " " * 6, fields=not short, outcomes=outcomes))
            if short and len(findings) > _MOST_OF_ONE:
                yield from fit([f"    {result.id}: and {len(findings) - _MOST_OF_ONE} more"], group)
            if brief or result.is_expected or result.id in offered:
                continue
            offered.add(result.id)
            if (command := again(result)) is not None:
                yield Line(f"      run again: {command}")
    yield from _unanswered(draft, fit)
    yield from _stale(draft, fit)
    yield from _measured(draft, fit, brief, width)
    if notes:
        said = [item for item in draft.results if item.status == "passed" and item.message and not is_measurement(item)]
        if said:
            yield Line("  Passed:", "measured")
            yield from fit(f"    {item.id}: {message(item.message)}" for item in said)


_Fit = Callable[..., Iterator[Line]]


def _by_check(members: Sequence[Item]) -> Iterator[tuple[CheckResult, list[Finding]]]:
    """The findings of one group, check by check."""
    found: dict[str, tuple[CheckResult, list[Finding]]] = {}
    for item in members:
        found.setdefault(item.result.id, (item.result, []))[1].append(item.finding)
    yield from found.values()


def _one_line(item: Item) -> str:
    """`weights.missing (vllm): fc.weight is missing`."""
    kinds = {name: one.outcome for name, one in item.finding.outcomes.items() if one.outcome not in ("unknown", "fine")}
    if item.group in kinds.values():
        who = [name for name, kind in kinds.items() if kind == item.group]
    else:
        who = [f"{name} {kind}" for name, kind in kinds.items()]
    expected = f" ({message(item.result.expected)})" if item.result.is_expected else ""
    named = f" ({', '.join(who)})" if who else ""
    return f"{item.result.id}{named}: {message(item.finding.message)}{expected}"


def _unanswered(draft: DraftReport, fit: _Fit) -> Iterator[Line]:
    """The checks that could not judge, by reason, with what to give."""
    wants = {item.message: item.want for item in draft.results if item.status == "inconclusive"}
    reasons = unanswered([draft])
    if reasons:
        yield Line("  Inconclusive:", "inconclusive")
    for reason, ids in reasons.items():
        sign, option = _GIVE.get(wants[reason], ("", ""))
        give = f"; give {option}" if option and sign not in reason else ""
        yield from fit([f"    {_counted(ids)}: {message(reason)}{give}"], "inconclusive")


def _stale(draft: DraftReport, fit: _Fit) -> Iterator[Line]:
    stale = [item for item in draft.results if item.is_stale]
    if stale:
        yield Line("  Expected to fail, and no longer do:", "warning")
    for item in stale:
        yield from fit([f"    {item.id}: take its line out ({message(item.expected)})"], "warning")


def _measured(draft: DraftReport, fit: _Fit, brief: bool, width: int) -> Iterator[Line]:
    """What checks measured; of a replay by position, recording and engine, whether or not it passed."""
    shown_ones = [
        item
        for item in draft.results
        if is_measurement(item) and (item.status == "passed" or item.id in (_LENGTH, _CONVENTIONS))
    ]
    lines: list[Line] = []
    for item in shown_ones:
        said = _sentences(item) if item.id == _CONVENTIONS else []
        text = item.message.removesuffix("; " + "; ".join(said)) if item.status == "passed" else _figure(item)
        # Of a replay of readings that did not pass there is only a heading for the sentences, which are left out of brief blocks.
        is_heading = item.id == _CONVENTIONS and item.status != "passed"
        if text and not (brief and is_heading):
            lines += fit([f"    {item.id}: {message(text)}"], "measured")
        if brief:
            continue
        if item.id == _LENGTH and "served" in item.figures:
            lines += fit(acceptance_lines(item.figures, " " * 6, width))
        lines += fit(f"      {message(sentence)}" for sentence in said)
    if lines:
        yield Line("  Measured:", "measured")
    yield from lines


def _figure(item: CheckResult) -> str:
    """The figure of a replay that did not pass, whose message is another one."""
    served = item.figures.get("served")
    if item.id != _LENGTH or not served:
        return "" if item.id != _CONVENTIONS or not _sentences(item) else "what engines will read"
    span = f"({served['accepted_length_low']:.2f} to {served['accepted_length_high']:.2f})"
    tokens = f"{served['rounds']} rounds of {item.figures['draft_tokens']} tokens"
    return f"{item.figures['label']} {served['accepted_length']:.2f} {span} over {tokens}"


def _sentences(item: CheckResult) -> list[str]:
    """What each engine will read, a sentence each."""
    return [one["says"] for one in item.figures.get("engines", {}).values() if one.get("says")]


def _counted(ids: Sequence[str], most: int = 3) -> str:
    """The ids, or the first of them and how many more there are."""
    return ", ".join(ids) if len(ids) <= most else f"{', '.join(ids[:most])} and {len(ids) - most} more"
