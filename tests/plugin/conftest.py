"""Small checkpoints, and pytest inside pytest.

Inner runs are in this process wherever they can be. pytester drops the modules that such a run imports, and torch cannot be imported a
second time, so everything that a check may import is imported here first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis  # noqa: F401 - its plugin imports it at the end of every run
import pytest

from pytest_specdecode.api import check_draft
from pytest_specdecode.testing import write_tiny

Run = Callable[..., pytest.RunResult]


@pytest.fixture(autouse=True)
def _on_a_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest writes longer summaries where it believes to be in CI, and these tests count lines; what breaks them has tests of its own."""
    monkeypatch.setenv("COLUMNS", "240")
    for name in (
        "CI",
        "BUILD_NUMBER",
        "FORCE_COLOR",
        "PYTEST_ADDOPTS",
        "GITHUB_ACTIONS",
        "GITHUB_STEP_SUMMARY",
        "GITHUB_WORKSPACE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right DFlash draft in a directory `dflash-tiny`; not to be changed."""
    path = tmp_path_factory.mktemp("drafts") / "dflash-tiny"
    write_tiny(path, "dflash")
    assert check_draft(path).ok
    return path


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right EAGLE3 draft in a directory `eagle3-tiny`; not to be changed."""
    path = tmp_path_factory.mktemp("drafts") / "eagle3-tiny"
    write_tiny(path, "eagle3")
    return path


@pytest.fixture
def copied(dflash: Path, tmp_path: Path) -> Path:
    """A copy of the DFlash draft, to be broken."""
    return Path(shutil.copytree(dflash, tmp_path / "copied"))


@pytest.fixture
def run(pytester: pytest.Pytester, dflash: Path) -> Run:
    """Run pytest in this process, in pytester's folder, on the DFlash draft unless another is given."""

    def run(*args: object, model: Path | None = dflash) -> pytest.RunResult:
        given = [] if model is None else [f"--draft-model={model}"]
        return pytester.runpytest_inprocess(*given, *map(str, args))

    return run


@pytest.fixture
def ids(run: Run) -> Callable[..., list[str]]:
    """The node ids that a run would run, in order."""

    def ids(*args: object, model: Path | None = None) -> list[str]:
        extra = {} if model is None else {"model": model}
        return [line for line in run("--collect-only", "-q", *args, **extra).outlines if "::" in line]

    return ids
