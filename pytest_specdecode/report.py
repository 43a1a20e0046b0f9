"""`Report`: the results of one or more drafts, and the files they are written to.

The JSON form is a contract (`schema` 1): keys are added, none is renamed or dropped.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_specdecode.errors import DraftError, printable
from pytest_specdecode.findings import STATUS_ORDER, CheckResult, Finding, Status
from pytest_specdecode.spec import DraftSpec

SCHEMA = 1

#: Suffixes that `Report.write` knows.
SUFFIXES: tuple[str, ...] = (".json",)

_PACKAGES = ("pytest-specdecode", "pytest", "hypothesis", "torch", "triton", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class DraftReport:
    """The results of one draft.

    Attributes:
        path: the checkpoint's directory, as given.
        name: for people.
        description: one line: family, packaging, layers, parameters, dtype.
        family, packaging, spec: None where the family is not known.
        results: one per check, in the order of the registry.
        engines: the engines whose outcomes are shown, with the version that each one's statements were read from.
    """

    path: str
    name: str
    description: str
    family: str | None
    packaging: str | None
    spec: DraftSpec | None
    results: tuple[CheckResult, ...]
    engines: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The worst status of all checks, a failure that is expected taken for a warning."""
        found: list[Status] = ["warned" if result.is_expected else result.status for result in self.results]
        return max(found, key=STATUS_ORDER.index, default="passed")

    def counts(self) -> dict[str, int]:
        """How many checks have each status, worst status first; those with none are left out, failures that are expected apart."""
        found: dict[str, int] = {}
        for status in reversed(STATUS_ORDER):
            for text, expected in ((status, False), (f"{status} as expected", True)):
                number = sum(1 for item in self.results if (item.status, item.is_expected) == (status, expected))
                if number:
                    found[text] = number
        return found

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "path": self.path,
            "name": self.name,
            "family": self.family,
            "packaging": self.packaging,
            "status": self.status,
            "spec": None if self.spec is None else self.spec.to_dict(),
            "engines": dict(self.engines),
            "checks": [result.to_dict() for result in self.results],
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all drafts of one run.

    Attributes:
        drafts: one entry per draft.
    """

    drafts: tuple[DraftReport, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed. A warning, a skip and an inconclusive check do not fail a draft, and none of them is a pass."""
        return all(draft.status != "failed" for draft in self.drafts)

    def __iter__(self) -> Iterator[CheckResult]:
        """Every result of every draft."""
        return (result for draft in self.drafts for result in draft.results)

    def __getitem__(self, id: str) -> CheckResult:
        """The result of the check `id` on the first draft that has one."""
        for result in self:
            if result.id == id:
                return result
        raise KeyError(id)

    def findings(self) -> list[tuple[str, Finding]]:
        """Every finding with the id of its check, errors first."""
        found = [(result.id, finding) for result in self for finding in result.findings]
        return sorted(found, key=lambda pair: pair[1].severity != "error")

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it; `json.dumps` takes it as it is."""
        return {
            "schema": SCHEMA,
            "tool": tool_versions(),
            "drafts": [draft.to_dict() for draft in self.drafts],
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the report to `path`, by its suffix; whole or not at all.

        Raises:
            DraftError: an unknown suffix, or the file cannot be written.
        """
        file = Path(path)
        require_suffix(file)
        _write_whole(file, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")

    def __str__(self) -> str:
        return "\n".join(line for draft in self.drafts for line in draft_lines(draft))


def require_suffix(file: Path) -> None:
    """Raise DraftError where no report is written under `file`'s suffix."""
    if file.suffix not in SUFFIXES:
        raise DraftError(
            f"reports are written as {', '.join(SUFFIXES)}, not {file.suffix or 'without a suffix'}", path=file
        )


def tool_versions() -> dict[str, str | None]:
    """Versions of this library and of what it stands on, without importing any of it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def draft_lines(draft: DraftReport) -> Iterator[str]:
    """A draft's results for a terminal: the description, the counts, then every finding and every inconclusive check."""
    yield printable(draft.description)
    yield "  " + ", ".join(f"{number} {status}" for status, number in draft.counts().items())
    for result in sorted(draft.results, key=lambda item: -STATUS_ORDER.index(item.status)):
        if result.findings:
            yield ""
            for finding in result.findings:
                yield from finding_lines(result.id, finding)
        elif result.status == "inconclusive":
            yield f"  inconclusive {result.id}: {printable(result.message)}"
        elif result.figures:
            yield f"  {result.id}: {printable(result.message)}"


def finding_lines(id: str, finding: Finding, indent: str = "  ") -> Iterator[str]:
    """A finding for a terminal, in the order: what, where, got and due, what each engine does, how to mend it."""
    yield f"{indent}{finding.severity} {id}: {printable(finding.message)}"
    fields: list[tuple[str, object]] = [("where", finding.where or None), ("got", finding.got), ("due", finding.due)]
    for label, value in fields:
        if value is not None:
            yield f"{indent}  {label + ':':<7}{_short(value)}"
    for name, outcome in finding.outcomes.items():
        if outcome.outcome != "unknown":
            yield f"{indent}  {name}: {outcome.outcome}{': ' + printable(outcome.message) if outcome.message else ''}"
    if finding.fix:
        yield f"{indent}  fix:   {printable(finding.fix)}"


def _short(value: object, limit: int = 160) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _write_whole(file: Path, text: str) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
        try:
            # Names of files that are not UTF-8 come as lone surrogates, and stay readable JSON as escapes.
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise DraftError(f"cannot be written: {error.strerror or error}", path=file) from None
