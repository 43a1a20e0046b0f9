"""Known failures in the ini file.

What goes wrong without this file: a listed failure that still fails the run, a listed failure of one draft that hides another's, a line
nobody needs any more and nobody hears of, and a misspelled line that is read as nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pytest_specdecode.plugin.expected import ExpectedFailure, ExpectedFailureError, parse, reason_for
from pytest_specdecode.testing import tiny_config

WRONG = {**tiny_config("eagle3"), "tie_word_embeddings": True}
ID = "vocabulary.tied-embeddings"


@pytest.fixture
def wrong(tmp_path: Path, eagle3: Path) -> Path:
    """A copy of the EAGLE3 draft in a directory `wrong` that fails one check."""
    path = Path(shutil.copytree(eagle3, tmp_path / "wrong"))
    (path / "config.json").write_text(json.dumps(WRONG))
    return path


def ini(pytester: pytest.Pytester, *lines: str, more: str = "") -> None:
    listed = "\n".join(f"    {line}" for line in lines)
    pytester.makeini(f"[pytest]\n{more}\ndraft_expected_failures =\n{listed}\n")


def run(pytester: pytest.Pytester, *paths: Path, checks: str = ID) -> pytest.RunResult:
    models = [f"--draft-model={path}" for path in paths]
    return pytester.runpytest_inprocess(*models, f"--draft-checks={checks}", "--draft-report=report.json")


def test_a_listed_failure_does_not_fail_the_run(pytester: pytest.Pytester, wrong: Path) -> None:
    ini(pytester, f"{ID}[wrong]: the next export unties it")
    result = run(pytester, wrong)
    result.assert_outcomes(xfailed=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["  Failures that are expected:", f"    {ID}*: *tie*(the next export unties it)"])
    (found,) = json.loads((pytester.path / "report.json").read_text())["drafts"]
    assert (found["status"], found["checks"][0]["status"]) == ("warned", "failed")
    assert found["checks"][0]["expected_failure"] == "the next export unties it"


def test_a_line_of_another_draft_changes_nothing(pytester: pytest.Pytester, wrong: Path) -> None:
    ini(pytester, f"{ID}[right]: is not this one")
    run(pytester, wrong).assert_outcomes(failed=1)


def test_a_line_without_a_draft_counts_for_each(pytester: pytest.Pytester, wrong: Path) -> None:
    ini(pytester, f"{ID}: all of ours are tied")
    run(pytester, wrong).assert_outcomes(xfailed=1)


def test_a_listed_check_that_passes_is_reported_as_stale(pytester: pytest.Pytester, eagle3: Path) -> None:
    ini(pytester, f"{ID}[eagle3-tiny]: was so once")
    result = run(pytester, eagle3)
    result.assert_outcomes(xpassed=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["  Expected to fail, and no longer do:", f"    {ID}: take its line out (was so once)"])


def test_a_stale_line_fails_where_the_project_is_strict(pytester: pytest.Pytester, eagle3: Path) -> None:
    ini(pytester, f"{ID}[eagle3-tiny]: was so once", more="xfail_strict = true")
    run(pytester, eagle3).assert_outcomes(failed=1)


def test_a_check_that_does_not_apply_is_skipped_as_ever(pytester: pytest.Pytester, eagle3: Path) -> None:
    ini(pytester, "dflash.block-size[eagle3-tiny]: is no DFlash draft")
    run(pytester, eagle3, checks="dflash.block-size").assert_outcomes(skipped=1)


def test_runxfail_shows_the_failure(pytester: pytest.Pytester, wrong: Path) -> None:
    ini(pytester, f"{ID}[wrong]: known")
    pytester.runpytest_inprocess(f"--draft-model={wrong}", f"--draft-checks={ID}", "--runxfail").assert_outcomes(
        failed=1
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("vocabulary.tied-embeddings", "is not of the form 'check-id[draft-name]: reason'"),
        ("vocabulary.tied-embeddings[x]:", "is not of the form"),
        ("vocabulary.tied-embedding[x]: y", "did you mean vocabulary.tied-embeddings"),
        ("vocabulary: y", "is a group"),
    ],
)
def test_a_line_that_cannot_be_read_is_a_usage_error(
    pytester: pytest.Pytester, eagle3: Path, line: str, text: str
) -> None:
    ini(pytester, line)
    result = run(pytester, eagle3)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (error,) = [line for line in result.stderr.lines if line]
    assert error.startswith("ERROR: draft_expected_failures: ")
    assert text in error


def test_a_line_twice_is_refused() -> None:
    with pytest.raises(ExpectedFailureError, match=r"taps.order\[a\] is listed twice"):
        parse(["taps.order[a]: one", "taps.order[a]: two"])


def test_the_line_that_names_the_draft_comes_first() -> None:
    listed = [
        ExpectedFailure(id="taps.order", draft=None, reason="all"),
        ExpectedFailure(id="taps.order", draft="a", reason="one"),
    ]
    assert reason_for(listed, "taps.order", ["a"]) == "one"
    assert reason_for(listed, "taps.order", ["b", "a"]) == "one"
    assert reason_for(listed, "taps.order", ["b"]) == "all"
    assert reason_for(listed, "taps.range", ["a"]) is None


@pytest.mark.parametrize("name", ["my draft[1]", "my_draft_1_"])
def test_a_directorys_own_name_is_the_draft(pytester: pytest.Pytester, wrong: Path, name: str) -> None:
    path = wrong.rename(wrong.parent / "my draft[1]")
    ini(pytester, f"{ID}[{name}]: the next export unties it")
    result = run(pytester, path)
    result.assert_outcomes(xfailed=1)
    result.stdout.no_fnmatch_line("*names no draft*")


def test_the_last_part_of_a_longer_label_is_the_draft(pytester: pytest.Pytester, wrong: Path) -> None:
    paths = [Path(shutil.copytree(wrong, wrong.parent / folder / "wrong")) for folder in ("a", "b")]
    ini(pytester, f"{ID}[wrong]: all of ours are tied")
    run(pytester, *paths).assert_outcomes(xfailed=2)
    ini(pytester, f"{ID}[a/wrong]: this one is")
    run(pytester, *paths).assert_outcomes(xfailed=1, failed=1)


def test_a_name_that_no_draft_of_the_run_has_is_mentioned(pytester: pytest.Pytester, wrong: Path) -> None:
    ini(pytester, f"{ID}[worng]: known", "taps.order[worng]: known")
    result = run(pytester, wrong)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["WARNING: draft_expected_failures names no draft of this run: worng"])
    ini(pytester, f"{ID}[worng]: known", f"{ID}[wrong]: known")
    run(pytester, wrong).stdout.no_fnmatch_line("*names no draft*")
    ini(pytester, f"{ID}: known")
    run(pytester, wrong).stdout.no_fnmatch_line("*names no draft*")
