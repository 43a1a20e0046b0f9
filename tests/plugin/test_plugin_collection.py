"""The suite as part of a run. Caught here: a suite that does not start in an empty folder; wrong counts; printed ids that cannot be run
again; selection (-k, -m, --lf, --nf, --sw, --deselect, import modes, ini naming rules) that passes the suite by or loses it; a conftest
whose fixtures or hooks do not reach it; user tests that the suite pushes out; labels that collide or change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.plugin.options import _labels

ROPE = [
    "draft-model::test_draft[dflash-tiny-rope.theta-stated]",
    "draft-model::test_draft[dflash-tiny-rope.theta-agrees]",
]

#: The first of them as a pattern for fnmatch_lines.
STATED = ROPE[0].replace("[", "[[]")

Run = Callable[..., pytest.RunResult]
Ids = Callable[..., list[str]]


def test_the_option_alone_runs_every_check_in_an_empty_folder(run: Run) -> None:
    result = run("-v")
    assert result.ret == 0
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] + outcomes["skipped"] == len(REGISTRY)
    result.stdout.fnmatch_lines([f"*collected {len(REGISTRY)} items", f"{STATED} PASSED*"])


def test_ids_are_one_per_check_in_the_order_of_the_registry(ids: Ids) -> None:
    assert ids() == [f"draft-model::test_draft[dflash-tiny-{id}]" for id in REGISTRY]


@pytest.mark.parametrize(
    ("argument", "count"),
    [("draft-model", len(REGISTRY)), ("draft-model::test_draft", len(REGISTRY)), (ROPE[0], 1)],
    ids=["module", "function", "one check"],
)
def test_each_part_of_a_printed_id_can_be_run(run: Run, pytester: pytest.Pytester, argument: str, count: int) -> None:
    pytester.makepyfile("def test_of_the_user(): raise AssertionError")
    result = run("--collect-only", argument)
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*collected {count} item*", f"*{count} test* collected*"])
    result.stdout.no_fnmatch_line("*test_of_the_user*")


def test_several_printed_ids_run_and_an_unknown_one_is_refused(run: Run) -> None:
    run(*ROPE).assert_outcomes(passed=2)
    result = run(ROPE[0], "draft-model::test_draft[dflash-tiny-nope]")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: not found: draft-model::test_draft[[]dflash-tiny-nope]*"])


def test_a_printed_id_can_be_run_from_a_folder_below_the_rootdir(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")
    below = pytester.mkdir("below")
    os.chdir(below)
    result = run("-v", "--draft-checks=rope.theta-stated,rope.theta-agrees")
    result.stdout.fnmatch_lines([f"../{STATED} PASSED*"])
    run(f"../{ROPE[0]}").assert_outcomes(passed=1)
    run(ROPE[0]).assert_outcomes(passed=1)


def test_user_tests_run_beside_the_suite_and_the_suite_comes_first(ids: Ids, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(): pass")
    found = ids("--draft-checks=rope.theta-stated,rope.theta-agrees")
    assert found[:2] == ROPE
    assert found[2].endswith("::test_mine")
    assert len(found) == 3


def test_explicit_paths_keep_the_suite_where_the_draft_is_on_the_command_line(
    ids: Ids, pytester: pytest.Pytester
) -> None:
    file = pytester.makepyfile("def test_mine(): pass")
    assert len(ids(file, "--draft-checks=rope.theta-stated,rope.theta-agrees")) == 3
    assert len(ids(f"{file}::test_mine", "draft-model", "--draft-checks=rope.theta-stated,rope.theta-agrees")) == 3


def test_explicit_paths_leave_out_a_suite_that_the_ini_file_brings(
    run: Run, pytester: pytest.Pytester, dflash: Path
) -> None:
    pytester.makeini(f"[pytest]\ndraft_model = {dflash}\ndraft_checks = rope.theta-stated rope.theta-agrees")
    file = pytester.makepyfile("def test_mine(draft): assert draft.spec.family == 'dflash'")
    run(model=None).assert_outcomes(passed=3)
    run(file, model=None).assert_outcomes(passed=1)
    run(file, "draft-model", model=None).assert_outcomes(passed=3)
    run("draft-model", model=None).assert_outcomes(passed=2)


def test_keywords_and_markers_select(ids: Ids, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\naddopts = --strict-markers --strict-config")
    pytester.makepyfile("def test_mine(): pass")
    assert ids("-k", "theta-stated") == ROPE[:1]
    assert ids("-m", "draft_check", "--draft-checks=rope.theta-stated,rope.theta-agrees") == ROPE
    assert [id.endswith("::test_mine") for id in ids("-m", "not draft_check")] == [True]
    if pytest.version_tuple >= (8, 3):  # from there on -m reads a marker's arguments
        assert ids("-m", "draft_check(group='rope')")[: len(ROPE)] == ROPE


def test_deselect_takes_one_check_or_the_whole_suite(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(): pass")
    result = run("--draft-checks=rope.theta-stated,rope.theta-agrees", f"--deselect={ROPE[0]}")
    result.stdout.fnmatch_lines(["collected 3 items / 1 deselected / 2 selected"])
    run("--draft-checks=rope.theta-stated,rope.theta-agrees", "--deselect=draft-model").assert_outcomes(
        passed=1, deselected=2
    )


def test_last_failed_runs_failures_of_the_suite_and_of_the_user(
    run: Run, pytester: pytest.Pytester, copied: Path
) -> None:
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"rope_theta"', '"theta"'))
    pytester.makepyfile(test_a="def test_red(): assert 0\ndef test_green(): pass", test_b="def test_green(): pass")
    assert (
        run(
            "--draft-checks=rope.theta-stated,rope.theta-agrees,dflash.mask-token,dflash.block-size", model=copied
        ).parseoutcomes()["failed"]
        == 2
    )
    result = run(
        "--draft-checks=rope.theta-stated,rope.theta-agrees,dflash.mask-token,dflash.block-size",
        "--lf",
        "-v",
        model=copied,
    )
    result.stdout.fnmatch_lines(
        ["draft-model::test_draft[[]copied-rope.theta-stated] FAILED*", "test_a.py::test_red FAILED*"]
    )
    assert result.parseoutcomes()["failed"] == 2
    assert "passed" not in result.parseoutcomes()
    # The same with failures of one kind only.
    (pytester.path / "test_a.py").write_text("def test_red(): pass\ndef test_green(): pass")
    outcomes = run(
        "--draft-checks=rope.theta-stated,rope.theta-agrees,dflash.mask-token,dflash.block-size", "--lf", model=copied
    ).parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (1, 1)
    outcomes = run(
        "--draft-checks=rope.theta-stated,rope.theta-agrees,dflash.mask-token,dflash.block-size", "--lf", model=copied
    ).parseoutcomes()
    assert (outcomes.get("passed"), outcomes["failed"]) == (None, 1)


def test_new_first_stepwise_and_no_cache(run: Run, pytester: pytest.Pytester, copied: Path) -> None:
    pytester.makepyfile("def test_mine(): pass")
    run("--draft-checks=rope.theta-stated,rope.theta-agrees", "--nf").assert_outcomes(passed=3)
    run("--draft-checks=rope.theta-stated,rope.theta-agrees", "-p", "no:cacheprovider").assert_outcomes(passed=3)
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"rope_theta"', '"theta"'))
    assert run(
        "--sw", "--draft-checks=config.family,rope.theta-stated,rope.theta-agrees", model=copied
    ).parseoutcomes() == {"passed": 1, "failed": 1}
    again = run(
        "--sw", "--draft-checks=config.family,rope.theta-stated,rope.theta-agrees", model=copied
    ).parseoutcomes()
    assert again == {"failed": 1, "deselected": 1}


@pytest.mark.parametrize(
    "args",
    [
        ("--import-mode=importlib", "--draft-checks=rope.theta-stated,rope.theta-agrees"),
        (
            "-o",
            "python_functions=check_*",
            "-o",
            "python_files=check_*.py",
            "--draft-checks=rope.theta-stated,rope.theta-agrees",
        ),
        ("-W", "error"),
        ("-p", "no:terminal", "--draft-checks=rope.theta-stated,rope.theta-agrees"),
        ("--setup-show", "--draft-checks=rope.theta-stated,rope.theta-agrees"),
    ],
    ids=["importlib", "naming rules", "warnings as errors", "no terminal", "setup-show"],
)
def test_the_suite_runs_under_other_settings_of_pytest(run: Run, args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.ret == 0
    assert "Traceback" not in str(result.stderr)


def test_a_rootdir_conftest_overrides_fixtures_and_its_hooks_see_the_suite(
    run: Run, pytester: pytest.Pytester, dflash: Path, eagle3: Path
) -> None:
    pytester.makeconftest(
        f"""
        import pytest
        from pytest_specdecode import open_draft

        @pytest.fixture(scope="session")
        def draft():
            return open_draft({str(eagle3)!r})

        def pytest_collection_modifyitems(items):
            print("modifyitems", len(items))

        def pytest_runtest_setup(item):
            print("setup", item.name)
        """
    )
    result = run("-s", "--draft-checks=dflash.mask-token,dflash.block-size,config.family", "-rs", model=dflash)
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["modifyitems 3", "*setup test_draft[[]config.family]", "*drafts; this one is eagle3*"])


def test_the_suite_can_be_imported_into_a_file_where_that_folders_conftest_applies(
    run: Run, pytester: pytest.Pytester, eagle3: Path
) -> None:
    folder = pytester.mkpydir("mine")
    (folder / "conftest.py").write_text(
        f"""
import pytest
from pytest_specdecode import open_draft

@pytest.fixture(scope="session")
def draft():
    return open_draft({str(eagle3)!r})
"""
    )
    (folder / "test_it.py").write_text("from pytest_specdecode.plugin.suite import test_draft\n")
    # An overriding fixture needs no option; all checks run.
    outcomes = run("-v", model=None)
    assert outcomes.ret == 0
    outcomes.stdout.fnmatch_lines(["mine/test_it.py::test_draft[[]rope.theta-stated] PASSED*"])
    # With options, results are reported as those of the other draft are.
    result = run("--draft-checks=rope.theta-stated,rope.theta-agrees", "--deselect=draft-model", "-v")
    result.stdout.fnmatch_lines(
        ["mine/test_it.py::*rope.theta-stated] PASSED*", "eagle3-tiny: eagle3 (plain)*", "  2 passed"]
    )


def test_an_imported_suite_without_a_draft_is_one_skip(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from pytest_specdecode.plugin.suite import test_draft")
    run(model=None).assert_outcomes(skipped=1)


def test_several_drafts_have_an_id_each(ids: Ids, run: Run, dflash: Path, eagle3: Path, tmp_path: Path) -> None:
    found = ids(f"--draft-model={eagle3}", f"--draft-model={dflash}/", "--draft-checks=rope.theta-stated")
    assert found == [ROPE[0], "draft-model::test_draft[eagle3-tiny-rope.theta-stated]"]
    copy = shutil.copytree(dflash, tmp_path / "run2" / "dflash-tiny")
    found = ids(f"--draft-model={copy}", "--draft-checks=rope.theta-stated")
    assert found == [
        f"draft-model::test_draft[{dflash.parent.name}/dflash-tiny-rope.theta-stated]",
        "draft-model::test_draft[run2/dflash-tiny-rope.theta-stated]",
    ]
    run(f"--draft-model={copy}", *found).assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/a/b"], ["b"]),
        (["/a/b", "/a/c"], ["b", "c"]),
        (["/x/b", "/y/b"], ["x/b", "y/b"]),
        (["/1/x/b", "/2/x/b", "/c"], ["1/x/b", "2/x/b", "c"]),
        (["/b", "/a/b"], ["b", "a/b"]),
        (["/a/my draft[1]::x"], ["my_draft_1___x"]),
        (["/a/b c", "/a/b_c"], ["a/b_c.1", "a/b_c.2"]),
        (["/"], ["root"]),
        (["/a/модель"], ["модель"]),
    ],
)
def test_labels_are_as_short_as_tells_them_apart(paths: list[str], labels: list[str]) -> None:
    assert _labels(paths) == labels


def test_a_draft_in_a_folder_called_draft_model_is_not_taken_for_an_argument(
    run: Run, pytester: pytest.Pytester, dflash: Path
) -> None:
    shutil.copytree(dflash, pytester.path / "draft-model")
    result = run("--draft-model=draft-model", "--draft-checks=rope.theta-stated,rope.theta-agrees", "-v", model=None)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["draft-model::test_draft[[]draft-model-rope.theta-stated] PASSED*"])
