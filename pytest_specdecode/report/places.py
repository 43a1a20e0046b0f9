"""Where in the repository a finding is: the draft's `config.json`, and the line of the key concerned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pytest_specdecode.report.config_lines import line_of, lines_of
from pytest_specdecode.report.model import DraftReport


class Places:
    """The files of a report's drafts, relative to the root that a reader has checked out.

    `GITHUB_WORKSPACE` names that root where it is set; else it is the working directory.
    """

    def __init__(self) -> None:
        self._root = Path(os.path.realpath(os.environ.get("GITHUB_WORKSPACE") or os.getcwd()))
        self._lines: dict[str, Mapping[str, int]] = {}

    def file(self, draft: DraftReport) -> str:
        """The draft's `config.json`: from the root on where it lies under that, else its full path; with forward slashes."""
        file = Path(os.path.realpath(draft.config_file or os.path.join(draft.path, "config.json")))
        return (file.relative_to(self._root) if file.is_relative_to(self._root) else file).as_posix()

    def line(self, draft: DraftReport, where: str) -> int:
        """The line of the key that `where` names; 1 for what is not in the configuration."""
        file = draft.config_file or os.path.join(draft.path, "config.json")
        if file not in self._lines:
            self._lines[file] = lines_of(file)
        return line_of(where, self._lines[file]) or 1
