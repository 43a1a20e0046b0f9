"""What a run does about models on the Hub: it shows downloads, names commits, and lets workers ask the Hub nothing a second time.

Registered where an option names such a model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_specdecode import hub
from pytest_specdecode.errors import printable
from pytest_specdecode.plugin.options import ON_THE_HUB, WORKER_INPUT


class HubFetching:
    """Lives in the controller and in every worker."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        hub.show_with(self._shown)

    def pytest_report_header(self) -> list[str]:
        """Which commit each name stands for in this run."""
        found = self._config.stash[ON_THE_HUB]
        return [f"on the Hub: {printable(text)} is commit {hub.commit_of(place)[:12]}" for text, place in found.items()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand a worker of xdist the directories."""
        node.workerinput[WORKER_INPUT] = self._config.stash[ON_THE_HUB]

    def pytest_unconfigure(self) -> None:
        """Show nothing any more."""
        hub.show_with(None)

    @contextlib.contextmanager
    def _shown(self, text: str) -> Iterator[None]:
        """Say what is fetched; at a terminal, the download's own bar is seen as well. Workers have nobody to tell."""
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if terminal is None or capture is None or hasattr(self._config, "workerinput"):
            yield
            return
        with capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(printable(text))
            if sys.stderr.isatty():
                yield
                return
        yield
