"""How a result goes from the process that ran the check to the one that reports, and how it reads when it fails a test."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import PurePath

import pytest

from pytest_specdecode.errors import printable
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.plugin import options
from pytest_specdecode.report import finding_lines
from pytest_specdecode.report.github import inert
from pytest_specdecode.report.text import fitted

#: Name of the user property that holds a result as JSON; junitxml shows it too.
PROPERTY = "draft_check"


def failure_text(result: CheckResult) -> str:
    """The findings of a failed check, or its message where it has none.

    The first line is what pytest's short summary shows beside the test's id, so the check's id is not said again there.
    """
    lines = [line for finding in result.findings for line in finding_lines(result.id, finding, indent="")]
    return "\n".join(lines).removeprefix(f"error {result.id}: ") or printable(result.message)


def result_of(report: pytest.TestReport) -> tuple[str, CheckResult] | None:
    """The draft's path and the result that the test of `report` recorded, or None where it is no test of the suite."""
    for name, value in report.user_properties:
        if name == PROPERTY:
            found = json.loads(str(value))
            return found["path"], CheckResult.from_dict(found)
    return None


def fit_failure(report: pytest.TestReport, width: int) -> None:
    """Break the lines of the text of a failure that `failure_text` wrote, as they are shown; other places keep them whole."""
    traceback = getattr(report.longrepr, "reprtraceback", None)
    for entry in getattr(traceback, "reprentries", ()):
        if isinstance(getattr(entry, "lines", None), list):
            lines = [line for text in entry.lines for line in text.splitlines()]
            entry.lines = [inert(part) for line in lines for part in fitted(line, width)]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = inert(crash.message)


#: Options that change what a check finds, for a command that runs it again.
_MATTER = (
    *(options.TARGET, options.ENGINE, options.SERVE, options.DEVICE, options.TRACE, options.TOKENS),
    *(options.BASELINE, options.FUSED_KV),
)


def command_of(config: pytest.Config, settings: options.Settings, path: str, id: str) -> str:
    """The command that runs the test `id` of the draft in `path` again, for a shell, in the directory where this run was started.

    What the ini file states holds for that run, too, and is left out.
    """
    given = [item for item in settings.drafts if item.path == path]
    alone = bool(given) and given[0].label == PurePath(path).name
    drafts = given if alone else settings.drafts
    words = [f"{options.MODEL}={item.path}" for item in drafts if settings.on_command_line]
    for option in _MATTER:
        value = config.getoption(option)
        texts = value if isinstance(value, list) else [] if value is None else [value]
        words += [f"{option}={text}" for text in texts]
    file, colons, rest = id.partition("::")
    if file != "draft-model":
        file = os.path.relpath(config.rootpath / file, config.invocation_params.dir)
    inifile = config.getoption("inifilename", None)
    if inifile:
        words += ["-c", str(inifile)]
    return printable(shlex.join(["pytest", *words, f"{file}{colons}{rest}"]))
