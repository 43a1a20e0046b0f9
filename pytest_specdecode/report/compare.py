"""Two runs of the checks, the older one from its JSON report: what got worse, what better, what is new and what is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pytest_specdecode.errors import DraftError
from pytest_specdecode.findings import STATUS_ORDER, CheckResult, Finding

if TYPE_CHECKING:
    from pytest_specdecode.report.model import DraftReport

#: Of the JSON report.
SCHEMA = 1

Kind = Literal["worse", "better", "new", "gone"]
KINDS: tuple[Kind, ...] = ("worse", "new", "better", "gone")

#: A report of a hundred drafts has some ten megabytes.
_MOST_BYTES = 256 << 20
_LENGTH = "acceptance.length"


@dataclass(frozen=True, kw_only=True)
class OldDraft:
    """One draft of an older report."""

    name: str
    results: tuple[CheckResult, ...]


@dataclass(frozen=True, kw_only=True)
class OldReport:
    """An older report, as far as a comparison needs it.

    Attributes:
        path: the file, as given.
        drafts: in its order.
    """

    path: str
    drafts: tuple[OldDraft, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that is not as it was.

    Attributes:
        id: of the check.
        kind: `worse` and `better`: a check's status, or an accepted length beyond chance; `new` and `gone`: a finding that one of the two
            reports has, of a check whose status did not change or that only one of them ran.
        was, now: the status, or the figure; empty where there was none.
        message: the finding, or what the check says.
    """

    id: str
    kind: Kind
    was: str
    now: str
    message: str

    @property
    def steps(self) -> str:
        """`passed, now failed`."""
        if self.was == self.now:
            return self.now
        if not self.was:
            return f"{self.now}, not judged before"
        return f"{self.was}, now {self.now or 'not judged'}"

    def to_dict(self) -> dict[str, str]:
        """As the JSON report holds it."""
        return {"id": self.id, "kind": self.kind, "was": self.was, "now": self.now, "message": self.message}


@dataclass(frozen=True, kw_only=True)
class DraftComparison:
    """One draft against its older self.

    Attributes:
        name, old_name: what it is called in each report.
        changes: worse ones first.
    """

    name: str
    old_name: str
    changes: tuple[Change, ...]

    def by_kind(self) -> dict[Kind, tuple[Change, ...]]:
        """The changes of each kind, worse ones first."""
        return {kind: tuple(change for change in self.changes if change.kind == kind) for kind in KINDS}

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        kinds: dict[str, Any] = {
            kind: [change.to_dict() for change in changes] for kind, changes in self.by_kind().items()
        }
        return {"name": self.name, "old_name": self.old_name, **kinds}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run against an older report.

    Attributes:
        path: of the older report.
        drafts: those that both have.
        only_new, only_old: names of those that one has.
    """

    path: str
    drafts: tuple[DraftComparison, ...]
    only_new: tuple[str, ...] = ()
    only_old: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "against": self.path,
            "drafts": [draft.to_dict() for draft in self.drafts],
            "only_new": list(self.only_new),
            "only_old": list(self.only_old),
        }


def compare(old: OldReport, drafts: Sequence[DraftReport]) -> Comparison:
    """`drafts` against `old`: by name, or one against one whatever their names."""
    before = {draft.name: draft for draft in old.drafts}
    if len(drafts) == len(old.drafts) == 1:
        pairs = [(drafts[0], old.drafts[0])]
    else:
        pairs = [(draft, before[draft.name]) for draft in drafts if draft.name in before]
    matched, matched_old = {new.name for new, _ in pairs}, {was.name for _, was in pairs}
    return Comparison(
        path=old.path,
        drafts=tuple(
            DraftComparison(
                name=new.name,
                old_name=was.name,
                changes=tuple(sorted(_changes(was.results, new.results), key=lambda change: KINDS.index(change.kind))),
            )
            for new, was in pairs
        ),
        only_new=tuple(draft.name for draft in drafts if draft.name not in matched),
        only_old=tuple(draft.name for draft in old.drafts if draft.name not in matched_old),
    )


def _changes(old: Sequence[CheckResult], new: Sequence[CheckResult]) -> Iterator[Change]:
    before, after = {item.id: item for item in old}, {item.id: item for item in new}
    for id, now in after.items():
        was = before.get(id)
        if was is None:
            for finding in now.findings:
                yield Change(id=id, kind="new", was="", now=now.status, message=finding.message)
            continue
        if _rank(was) != _rank(now):
            is_worse = _rank(now) > _rank(was)
            yield Change(
                id=id,
                kind="worse" if is_worse else "better",
                was=was.status,
                now=now.status,
                message=now.message if is_worse else was.message,
            )
        else:
            held, holds = {_key(item) for item in was.findings}, {_key(item) for item in now.findings}
            for finding in now.findings:
                if _key(finding) not in held:
                    yield Change(id=id, kind="new", was=was.status, now=now.status, message=finding.message)
            for finding in was.findings:
                if _key(finding) not in holds:
                    yield Change(id=id, kind="gone", was=was.status, now=now.status, message=finding.message)
        if id == _LENGTH:
            yield from _length(was.figures, now.figures)
    for id, was in before.items():
        for finding in was.findings if id not in after else ():
            yield Change(id=id, kind="gone", was=was.status, now="", message=finding.message)


def _rank(result: CheckResult) -> int:
    """How bad a status is; that a check does not apply is as good as a pass."""
    return max(0, STATUS_ORDER.index(result.status) - STATUS_ORDER.index("skipped"))


def _key(finding: Finding) -> tuple[str, str, str]:
    return finding.severity, finding.where, finding.message


def _length(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """The accepted length, where both runs replayed the same trace in the same way and their intervals lie apart."""
    if any(was.get(key) != now.get(key) for key in ("label", "draft_tokens", "trace")):
        return
    one, other = was.get("served"), now.get("served")
    keys = ("accepted_length", "accepted_length_low", "accepted_length_high")
    if not all(isinstance(item, Mapping) and all(_is_number(item.get(key)) for key in keys) for item in (one, other)):
        return
    assert isinstance(one, Mapping)
    assert isinstance(other, Mapping)
    kind: Kind
    if other["accepted_length_high"] < one["accepted_length_low"]:
        kind = "worse"
    elif other["accepted_length_low"] > one["accepted_length_high"]:
        kind = "better"
    else:
        return
    yield Change(
        id=_LENGTH,
        kind=kind,
        was=f"{one['accepted_length']:.2f}",
        now=f"{other['accepted_length']:.2f}",
        message="accepted length, beyond chance",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- an older report -----------------------------------------------------------------------------------------------------


def read_report(path: str | os.PathLike[str]) -> OldReport:
    """The JSON report in the file `path`.

    Raises:
        DraftError: the file cannot be read, is no report of this library, or has another schema.
    """
    file = Path(path)

    def refuse(why: str) -> NoReturn:
        raise DraftError(why, path=file)

    try:
        if file.is_dir():
            refuse("is a directory")
        if file.stat().st_size > _MOST_BYTES:
            refuse(f"has more than {_MOST_BYTES >> 20} MiB, which no report has")
        # A report may hold names that are no text, as escapes.
        found = json.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        refuse(f"cannot be read: {error.strerror or error}")
    except RecursionError:
        refuse("is nested too deeply for a report")
    except ValueError as error:
        refuse(f"is not JSON: {error}")
    if not isinstance(found, dict) or "schema" not in found or not isinstance(found.get("drafts"), list):
        refuse("is no report of pytest-specdecode; --draft-report=FILE.json writes one")
    if found["schema"] != SCHEMA or isinstance(found["schema"], bool):
        stated = json.dumps(found["schema"])[:40]
        refuse(f"has schema {stated}, and this version reads {SCHEMA}; write it again with this version")
    try:
        drafts = tuple(_old_draft(item) for item in found["drafts"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        refuse(f"is no whole report of pytest-specdecode ({type(error).__name__}: {error})")
    return OldReport(path=os.fspath(path), drafts=drafts)


def _old_draft(found: Mapping[str, Any]) -> OldDraft:
    results = []
    for item in found["checks"]:
        result = CheckResult.from_dict(item)
        texts = [result.id, result.message, *(text for one in result.findings for text in (one.message, one.where))]
        if result.status not in STATUS_ORDER or not all(isinstance(text, str) for text in texts):
            raise ValueError("a check without a status or a text")
        if not isinstance(result.figures, Mapping):
            raise ValueError("figures that are no object")
        results.append(result)
    if not isinstance(found["name"], str):
        raise ValueError("a draft without a name")
    return OldDraft(name=found["name"], results=tuple(results))
