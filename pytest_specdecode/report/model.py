"""`Report`: the results of one or more drafts.

The JSON form is a contract (`schema` 1): keys are added, none is renamed or dropped.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_specdecode.findings import STATUS_ORDER, CheckResult, Finding, Status
from pytest_specdecode.report.compare import SCHEMA, Comparison
from pytest_specdecode.report.files import write
from pytest_specdecode.report.terminal import draft_lines
from pytest_specdecode.spec import DraftSpec

_PACKAGES = ("pytest-specdecode", "pytest", "hypothesis", "torch", "triton", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class CheckText:
    """What a check is about, in words.

    Attributes:
        title: what must hold.
        why: what goes wrong otherwise.
        fix: how to mend what it finds, in general.
    """

    title: str
    why: str = ""
    fix: str = ""


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
        fused_kv: name of the implementation of the stacked K/V path that the checks ran.
        config_file: the configuration by its full path, for writers that point at its lines; or empty.
    """

    path: str
    name: str
    description: str
    family: str | None
    packaging: str | None
    spec: DraftSpec | None
    results: tuple[CheckResult, ...]
    engines: Mapping[str, str] = field(default_factory=dict)
    fused_kv: str = "ours"
    config_file: str = ""

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

    def figures(self, id: str) -> Mapping[str, Any]:
        """What the check `id` measured; empty where it did not run or measures nothing."""
        return next((result.figures for result in self.results if result.id == id), {})

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
            "fused_kv": self.fused_kv,
            "checks": [result.to_dict() for result in self.results],
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all drafts of one run.

    Attributes:
        drafts: one entry per draft.
        about: what each check is about, by id; the HTML and SARIF files show it.
        comparison: what changed against an older report, where one was given.
    """

    drafts: tuple[DraftReport, ...]
    about: Mapping[str, CheckText] = field(default_factory=dict)
    comparison: Comparison | None = None

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
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the report to `path`, by its suffix (`.json`, `.md`, `.html`, `.sarif`); whole or not at all.

        Raises:
            DraftError: an unknown suffix, or the file cannot be written.
        """
        write(self, path)

    def __str__(self) -> str:
        return "\n".join(line for draft in self.drafts for line in draft_lines(draft))


def tool_versions() -> dict[str, str | None]:
    """Versions of this library and of what it stands on, without importing any of it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
