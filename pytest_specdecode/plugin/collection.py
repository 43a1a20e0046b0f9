"""How the built-in suite enters a run: as a module `draft-model` of the session.

The module has no file under the rootdir. It is added to what the session collects, so it is counted, selected, deselected and re-run as any
other module is, and arguments that name it are taken out before pytest looks for such a file.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator, Iterable
from types import ModuleType

import pytest

from pytest_specdecode.plugin.options import Settings

SUITE = "pytest_specdecode.plugin.suite"
NAME = "draft-model"


class SuiteModule(pytest.Module):
    """The suite's module object at a node id of our own.

    Attributes:
        wanted: node ids given as arguments; None for all.
    """

    wanted: tuple[str, ...] | None = None

    @classmethod
    def of(cls, session: pytest.Session, wanted: tuple[str, ...] | None) -> SuiteModule:
        """The module, as a child of `session`."""
        module: SuiteModule = cls.from_parent(session, path=session.config.rootpath / NAME)
        # From here on the path serves look-ups only, and one that exists is due: --nf asks for its time, --lf whether it holds failures,
        # and per-item hooks of the rootdir's conftest are found by it.
        module.path = session.config.rootpath
        module.wanted = wanted
        return module

    def _getobj(self) -> ModuleType:
        return importlib.import_module(SUITE)

    def funcnamefilter(self, name: str) -> bool:
        """The suite's own naming, whatever python_functions says."""
        return name.startswith("test_")

    def classnamefilter(self, name: str) -> bool:
        """The suite's own naming, whatever python_classes says."""
        return name.startswith("Test")

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """The suite's tests, or those that the arguments name."""
        return [node for node in super().collect() if self.wanted is None or _named(node.nodeid, self.wanted)]


class SuiteCollection:
    """Adds the suite to the session; registered where there is a draft, in every process that collects."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._runs = True
        self._wanted: tuple[str, ...] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Take the arguments that name the suite out of pytest's, which would look for a file."""
        config = session.config
        ours = {arg: id for arg in config.args if (id := _suite_id(arg, config)) is not None}
        explicit = config.args_source is config.ArgsSource.ARGS
        config.args = [arg for arg in config.args if arg not in ours]
        # A draft that the project commits does not join a run of one file; one that the user names does.
        self._runs = bool(ours) or self._settings.on_command_line or not explicit
        self._wanted = None if not ours or NAME in ours.values() else tuple(dict.fromkeys(ours.values()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Put the suite before what the session collected."""
        report = yield
        if self._runs and isinstance(collector, pytest.Session):
            report.result = [SuiteModule.of(collector, self._wanted), *(report.result or [])]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Refuse an argument that names none of the suite's tests, as pytest does for other files."""
        for id in self._wanted or ():
            if not any(_named(item.nodeid, (id,)) for item in items):
                raise pytest.UsageError(f"not found: {id} (pytest --collect-only -q {NAME} prints the ids)")


def _suite_id(arg: str, config: pytest.Config) -> str | None:
    """The node id that `arg` means, or None where it means something else."""
    path, colons, rest = arg.partition("::")
    if path != NAME and os.path.abspath(config.invocation_params.dir / path) != str(config.rootpath / NAME):
        return None
    return f"{NAME}{colons}{rest}"


def _named(id: str, wanted: tuple[str, ...]) -> bool:
    return any(id == name or id.startswith((f"{name}[", f"{name}::")) for name in wanted)
