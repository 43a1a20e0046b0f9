"""What a check says of itself holds.

What goes wrong without this file: a check that lists and pages call a warning fails a build; one that cannot fail is called an error; an
engine that was chosen cannot make an error of a warning any more; a file that cannot be read passes for a defect of the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import checks, testing
from pytest_specdecode.api import open_context
from pytest_specdecode.checks import REGISTRY, Check, Context
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.findings import CheckResult, Finding, Outcome


def _run(tmp_path: Path, find: Callable[[Context], Iterator[Finding]], **given: Any) -> CheckResult:
    """The result of a check that is registered with warnings as its worst, and finds what `find` does."""
    item: Check = replace(REGISTRY["taps.order"], run=find)
    assert item.severity == "warning"
    return checks.run(item, open_context(testing.write_tiny(tmp_path / "draft", "eagle3"), **given))


def test_a_check_of_warnings_reports_no_error(tmp_path: Path) -> None:
    def find(context: Context) -> Iterator[Finding]:
        yield context.warn("mild", where="here")
        yield context.fail("grave", where="here")

    with pytest.raises(ValueError, match=r"taps\.order reports an error, and is registered with warnings .*: grave"):
        _run(tmp_path, find)
    with pytest.raises(ValueError, match="registered with warnings"):
        _run(tmp_path / "judged", find, engines=["sglang"])


def test_a_chosen_engine_makes_an_error_of_a_warning(tmp_path: Path) -> None:
    def find(context: Context) -> Iterator[Finding]:
        yield context.warn("mild", where="here", outcomes={"sglang": Outcome(outcome="serves wrong")})

    assert _run(tmp_path / "all", find).status == "warned"
    assert _run(tmp_path / "judged", find, engines=["sglang"]).status == "failed"


def test_data_that_cannot_be_read_is_an_error_of_any_check(tmp_path: Path) -> None:
    def find(context: Context) -> Iterator[Finding]:
        raise CheckpointError("data ends early", path="model.safetensors", key="d2t")
        yield

    assert _run(tmp_path, find).status == "failed"


@pytest.mark.parametrize("id", ["taps.places", "config.unread-keys"])
def test_checks_with_an_error_among_their_warnings_are_listed_as_errors(id: str) -> None:
    assert REGISTRY[id].severity == "error"
