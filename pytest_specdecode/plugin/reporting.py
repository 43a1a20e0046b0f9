"""What the controller says: header, words for results, summary, report file, and the table of checks.

Results come in with the test reports, so it makes no difference whether this process ran the tests or xdist's workers did.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from pytest_specdecode import api, engines
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.checks import REGISTRY, Check, Context
from pytest_specdecode.errors import DraftError, printable
from pytest_specdecode.families import Draft, load
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.plugin.expected import strangers
from pytest_specdecode.plugin.options import EXPECTED, Settings, names_of, without_draft
from pytest_specdecode.plugin.results import command_of, fit_failure, result_of
from pytest_specdecode.report import DraftReport, Report, compare, github
from pytest_specdecode.report.github import inert
from pytest_specdecode.report.terminal import block
from pytest_specdecode.report.text import comparison_lines, fitted, overview_lines

TestStatus = tuple[str, str, tuple[str, dict[str, bool]]]

#: How a line of each style looks where the terminal has colours.
MARKUP: dict[str, dict[str, bool]] = {
    "draft": {"bold": True},
    "serves wrong": {"red": True, "bold": True},
    "stops": {"red": True},
    "falls back": {"yellow": True},
    "error": {"red": True},
    "warning": {"yellow": True},
    "expected": {"yellow": True},
    "inconclusive": {"cyan": True},
    "measured": {"green": True},
}


class Reporter:
    """Gathers results and shows them; lives on the controller only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._drafts: dict[str, Draft] = {given.path: given.draft for given in settings.drafts}
        self._results: dict[str, dict[str, CheckResult]] = {path: {} for path in self._drafts}
        self._ids: dict[tuple[str, str], str] = {}
        self._unwritten: dict[Path, DraftError] = {}
        self._no_summary: DraftError | None = None
        self._no_baseline: DraftError | None = None

    def pytest_report_header(self) -> list[str]:
        """One line per draft, with the device; the engines with their versions; what was passed over of the server's options."""
        lines = [f"draft: {printable(draft.describe())}; on {self._settings.device}" for draft in self._drafts.values()]
        if lines:
            read = engines.versions(engines.select(self._settings.engines))
            lines.append(f"engines, as read: {', '.join(f'{name} {version}' for name, version in read.items())}")
        if lines and self._settings.fused_kv is not None:
            lines.append(f"draft-fused-kv: {printable(self._settings.fused_kv.name)}")
        serve = self._settings.serve
        if serve is not None and serve.ignored:
            lines.append(printable(f"draft-serve: no check looks at {', '.join(serve.ignored)}"))
        return [inert(line) for line in lines]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the result of one check; a later run of the same check replaces it."""
        if (found := result_of(report)) is None:
            return
        path, result = found
        self._results.setdefault(path, {})[result.id] = result
        self._ids[path, result.id] = report.nodeid
        # Before pytest's own reporter shows a reason under -v, or keeps one for its summary.
        if isinstance(report.longrepr, tuple):
            file, line, reason = report.longrepr
            report.longrepr = (file, line, inert(reason))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.CollectReport | pytest.TestReport) -> TestStatus | None:
        """Say WARNED under -v; the counts stay pytest's.

        Inconclusive ones get no word of their own: pytest would head its whole list of skips with it.
        """
        if report.when != "call" or not report.passed or not isinstance(report, pytest.TestReport):
            return None
        if hasattr(report, "wasxfail") or (found := result_of(report)) is None or found[1].status != "warned":
            return None
        return "passed", ".", ("WARNED", {"yellow": True})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the reports and the baseline; what was asked for and could not be written is a failure. GitHub's summary is no such."""
        if session.config.option.collectonly:
            return
        self._fit_failures(session.config)
        for file in self._settings.reports:
            try:
                self._report().write(file)
            except DraftError as error:
                self._unwritten[file] = error
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary and any(self._results.values()):
            try:
                github.append_summary(self._report(), summary)
            except DraftError as error:
                self._no_summary = error
        try:
            if self._settings.baseline is not None and self._settings.updates_baseline:
                api.update_baseline(self._settings.baseline, self._report())
        except DraftError as error:
            self._no_baseline = error
        if (self._unwritten or self._no_baseline) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Per draft: what it is, counts, findings, and what could not be judged."""
        if config.option.collectonly:
            return
        width, verbosity = config.get_terminal_writer().fullwidth, config.get_verbosity()
        has_failures = config.getoption("tbstyle", "auto") != "no"
        reports = [report for report in self._reports() if report.results]
        if reports:
            terminalreporter.section("draft model" if len(reports) == 1 else "draft models")
        elif not self._drafts and (lacking := without_draft(config)) is not None:
            terminalreporter.line(f"WARNING: {lacking}", yellow=True)
        if reports and (named := strangers(self._settings.expected, map(names_of, self._judged()))):
            terminalreporter.line(
                f"WARNING: {EXPECTED} names no draft of this run: {printable(', '.join(named))}", yellow=True
            )
        for index, report in enumerate(reports):
            if index:
                terminalreporter.line("")
            for line in block(
                report,
                width=width,
                brief=verbosity < 0,
                outcomes=verbosity > 0,
                notes=verbosity > 0,
                is_told=lambda result: has_failures and result.status == "failed",
                again=partial(self._again, config, report.path),
            ):
                terminalreporter.line(inert(line.text), **MARKUP.get(line.style, {}))
        for lines in self._tables(reports, width):
            terminalreporter.line("")
            for text in lines:
                for part in fitted(text, width):
                    terminalreporter.line(inert(part))
        for file in self._settings.reports:
            if file in self._unwritten:
                terminalreporter.line(f"ERROR: the report was not written: {self._unwritten[file]}", red=True)
            else:
                terminalreporter.line(f"report: {printable(str(file))}")
        if self._no_summary is not None:
            terminalreporter.line(f"WARNING: the step summary was not written: {self._no_summary}", yellow=True)
        if reports and github.is_workflow():
            for command in github.lines(Report(drafts=tuple(reports))):
                terminalreporter.line(command)
        if self._no_baseline is not None:
            terminalreporter.line(f"ERROR: the baseline was not written: {self._no_baseline}", red=True)
        elif self._settings.updates_baseline:
            terminalreporter.line(f"baseline: {printable(str(self._settings.baseline))}")

    def _fit_failures(self, config: pytest.Config) -> None:
        """Have the texts of our failures, which pytest shows before the summary, as wide as this terminal, which workers do not know."""
        terminal = config.pluginmanager.getplugin("terminalreporter")
        for report in () if terminal is None else terminal.stats.get("failed", ()):
            if isinstance(report, pytest.TestReport) and result_of(report) is not None:
                fit_failure(report, config.get_terminal_writer().fullwidth)

    def _again(self, config: pytest.Config, path: str, result: CheckResult) -> str | None:
        """The command that runs a failed check of numbers again; what others look at can be read in the files."""
        item = REGISTRY.get(result.id)
        id = self._ids.get((path, result.id))
        if result.status != "failed" or item is None or "tensors" not in item.needs or id is None:
            return None
        return command_of(config, self._settings, path, id)

    def _tables(self, reports: Sequence[DraftReport], width: int) -> Iterator[Iterator[str]]:
        """Several drafts beside one another; what changed against an older report."""
        if len(reports) > 1:
            yield overview_lines(reports, width)
        if reports and self._settings.compare is not None:
            yield comparison_lines(compare(self._settings.compare, reports))

    def _report(self) -> Report:
        """What was found, as the files hold it."""
        drafts = tuple(self._reports())
        return Report(
            drafts=drafts,
            about=api.about(result for draft in drafts for result in draft.results),
            comparison=None if self._settings.compare is None else compare(self._settings.compare, drafts),
        )

    def _reports(self) -> Iterator[DraftReport]:
        """What was found, draft by draft, checks in the order of the registry."""
        order = {id: index for index, id in enumerate(REGISTRY)}
        for path, results in self._results.items():
            draft = self._drafts.get(path) or self._opened(path)
            if draft is not None:
                ordered = sorted(results.values(), key=lambda result: order.get(result.id, len(order)))
                yield api.draft_report(path, self._context(draft), ordered)

    def _context(self, draft: Draft) -> Context:
        return api.context_of(draft, engines=self._settings.engines, fused_kv=self._settings.fused_kv)

    def _judged(self) -> Iterator[Draft]:
        """The drafts that have results."""
        for path, results in self._results.items():
            draft = self._drafts.get(path) or self._opened(path)
            if results and draft is not None:
                yield draft

    def _opened(self, path: str) -> Draft | None:
        """The draft of a `draft` fixture that a conftest overrides, where its directory is still there."""
        try:
            return load(Checkpoint.open(path))
        except DraftError:
            return None


def table_of_checks(checks: Iterable[Check]) -> str:
    """One line per check: id, severity, needs, families, title."""
    rows = [("id", "severity", "needs", "families", "what must hold")]
    for item in checks:
        families = item.applies or ("all" if item.families is None else ",".join(item.families))
        rows.append((item.id, item.severity, ",".join(item.needs), families, item.title))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]).rstrip()
        for row in rows
    )
