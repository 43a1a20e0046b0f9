"""The results of one or more drafts, and the files they are written to, one writer a file.

Nothing here judges: what a check found, what it measured and what it is about is passed in.
"""

from __future__ import annotations

from pytest_specdecode.report.compare import SCHEMA, Comparison, OldReport, compare, read_report
from pytest_specdecode.report.files import SUFFIXES, require_suffix
from pytest_specdecode.report.model import CheckText, DraftReport, Report, tool_versions
from pytest_specdecode.report.terminal import draft_lines
from pytest_specdecode.report.text import finding_lines

__all__ = [
    "SCHEMA",
    "SUFFIXES",
    "CheckText",
    "Comparison",
    "DraftReport",
    "OldReport",
    "Report",
    "compare",
    "draft_lines",
    "finding_lines",
    "read_report",
    "require_suffix",
    "tool_versions",
]
