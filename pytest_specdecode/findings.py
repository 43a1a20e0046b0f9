"""What a check says: outcomes per engine, findings, and the result of one check.

Plain data with no behaviour beyond turning itself into what JSON can hold, so that any part may make one and any writer show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OutcomeKind = Literal["stops", "falls back", "serves wrong", "fine", "unknown"]
Status = Literal["passed", "failed", "warned", "skipped", "inconclusive"]
Severity = Literal["error", "warning"]

#: The statuses from best to worst, for choosing the one that speaks for several.
STATUS_ORDER: tuple[Status, ...] = ("passed", "skipped", "inconclusive", "warned", "failed")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one serving engine does with a fault.

    Attributes:
        outcome: `stops` with an error, `falls back` with a log line, `serves wrong` in silence, `fine`, or `unknown`.
        message: the engine's own text where it has one, else what happens, in a few words.
        source: where that is known from (engine version and file, or an issue).
    """

    outcome: OutcomeKind
    message: str = ""
    source: str = ""

    def to_dict(self) -> dict[str, str]:
        """As the JSON report holds it."""
        return {"outcome": self.outcome, "message": self.message, "source": self.source}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Outcome:
        """What `to_dict` gave."""
        return cls(outcome=found["outcome"], message=found["message"], source=found.get("source", ""))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or doubtful, in a draft.

    Attributes:
        message: what it is, in one line.
        severity: `error` or `warning`.
        where: the place: file and key or tensor, and the layer where one is meant.
        got, due: what was found and what was expected, in values JSON can hold.
        fix: how to mend it.
        outcomes: per engine name, what it does with this.
        fault: slug by which the engine models know it, or empty.
    """

    message: str
    severity: Severity = "error"
    where: str = ""
    got: Any = None
    due: Any = None
    fix: str = ""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    fault: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "severity": self.severity,
            "message": self.message,
            "where": self.where,
            "got": jsonable(self.got),
            "due": jsonable(self.due),
            "outcomes": {name: outcome.to_dict() for name, outcome in self.outcomes.items()},
            "fix": self.fix,
            "fault": self.fault,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Finding:
        """What `to_dict` gave; `got` and `due` stay what JSON holds."""
        outcomes = {name: Outcome.from_dict(outcome) for name, outcome in found["outcomes"].items()}
        fields = ("severity", "message", "where", "got", "due", "fix", "fault")
        return cls(**{name: found[name] for name in fields}, outcomes=outcomes)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check on one draft.

    Attributes:
        id: the check's stable id.
        status: passed, failed, warned, skipped, or inconclusive (the evidence is missing; never a pass).
        message: the first finding's message, or the reason of a skip, or a measured figure worth showing.
        findings: every finding, worst first.
        seconds: how long the check ran.
        want: what would settle an inconclusive check, where the caller can give it: `target`, `serving`, `trace`, `tensors`, `gpu`.
        expected: why a failure of this check is known and lived with, or empty.
        figures: what the check measured, in values JSON can hold.
    """

    id: str
    status: Status
    message: str = ""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    want: str = ""
    expected: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_expected(self) -> bool:
        """Whether it failed as the project knows it to."""
        return self.status == "failed" and bool(self.expected)

    @property
    def is_stale(self) -> bool:
        """Whether it was listed as a known failure and did not fail."""
        return self.status in ("passed", "warned") and bool(self.expected)

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it: the worst finding's fields at the top, all of them under `findings`."""
        worst = self.findings[0].to_dict() if self.findings else Finding(message=self.message).to_dict()
        return {
            "id": self.id,
            "status": self.status,
            **worst,
            "severity": worst["severity"] if self.findings else None,
            "message": self.message,
            "findings": [finding.to_dict() for finding in self.findings],
            "want": self.want,
            "expected_failure": self.expected,
            "figures": jsonable(self.figures),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> CheckResult:
        """What `to_dict` gave, so that a result can cross from one process to another; the time does not."""
        findings = tuple(Finding.from_dict(finding) for finding in found["findings"])
        return cls(
            id=found["id"],
            status=found["status"],
            message=found["message"],
            findings=findings,
            want=found.get("want", ""),
            expected=found.get("expected_failure", ""),
            figures=found.get("figures", {}),
        )


def jsonable(value: Any) -> Any:
    """`value` in what JSON holds: tuples and sets become lists, other objects their text, non-finite floats their name."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(item) for item in value), key=repr)
    return str(value)
