"""Bad option values are one line and exit status 4; good ones do what the help says. Caught here: tracebacks and usage pages where one
line is due; an ini value that is not read, is relative to the wrong folder, or beats the command line; hooks that act in runs that ask
for nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_specdecode.checks import REGISTRY

Run = Callable[..., pytest.RunResult]


def assert_refused(result: pytest.RunResult, *texts: str) -> None:
    """Exit status 4 and one ERROR line that holds `texts`; nothing was run."""
    assert result.ret == 4
    lines = [line for line in (*result.outlines, *result.errlines) if line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("ERROR: ")
    for text in texts:
        assert text in lines[0]


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["--draft-checks=rpoe"], ["--draft-checks", "'rpoe'", "did you mean rope"]),
        (["--draft-checks=rope.theta-statd"], ["did you mean rope.theta-stated"]),
        (["--draft-checks=zzzzzz"], ["groups are", "--draft-list-checks"]),
        (["--draft-checks="], ["--draft-checks", "names nothing"]),
        (["--draft-skip=weigths"], ["--draft-skip", "weights"]),
        (["--draft-checks=rope", "--draft-skip=rope"], ["no check is left"]),
        (["--draft-engine=vlm"], ["--draft-engine", "did you mean vllm"]),
        (["--draft-device=tpu"], ["--draft-device=tpu", "auto, cpu, cuda"]),
        (["--draft-require=modle"], ["--draft-require", "did you mean model"]),
        (["--draft-max-examples=0"], ["--draft-max-examples=0"]),
        (["--draft-max-examples=many"], ["--draft-max-examples=many", "whole number"]),
        (["--draft-report=r.xls"], ["--draft-report=r.xls", ".json"]),
        (["--draft-report=r"], ["--draft-report=r", ".json"]),
        (["--draft-report=nowhere/r.json"], ["--draft-report=nowhere/r.json", "no directory"]),
        (["--draft-target=nowhere"], ["--draft-target=nowhere"]),
        (["--draft-target=."], ["--draft-target=.", "config.json"]),
        (
            ["--draft-model=https://huggingface.co/org/name"],
            ["and it is the address of a page", "hf://org/name@revision"],
        ),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_a_bad_value_is_one_line_and_status_4(run: Run, args: list[str], texts: list[str]) -> None:
    assert_refused(run(*args), *texts)


def test_a_bad_model_is_one_line_and_status_4(run: Run, pytester: pytest.Pytester, dflash: Path) -> None:
    (pytester.path / "empty").mkdir()
    assert_refused(run(model=Path("nowhere")), "--draft-model=nowhere", "No such file")
    assert_refused(run(model=dflash / "config.json"), "config.json", "is a file; give the directory")
    assert_refused(run(model=Path("empty")), "--draft-model=empty", "holds no config.json")
    # One good draft does not excuse a bad one.
    assert_refused(run("--draft-model=nowhere"), "--draft-model=nowhere")


def test_a_broken_target_is_one_line_and_status_4(run: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "target").mkdir()
    (pytester.path / "target" / "config.json").write_text("[1, 2]")
    assert_refused(run("--draft-target=target"), "--draft-target=target", "a JSON list")


def test_a_report_over_a_directory_is_refused(run: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "r.json").mkdir()
    assert_refused(run("--draft-report=r.json"), "is a directory")


def test_no_gpu_is_refused_where_one_is_demanded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(run("--draft-device=cuda"), "--draft-device=cuda", "no CUDA device")
    result = run("--draft-device=auto", "--draft-checks=rope.theta-stated,rope.theta-agrees")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["draft: *; on cpu"])


def test_ini_twins_are_read_and_relative_to_the_rootdir(
    run: Run, pytester: pytest.Pytester, dflash: Path, eagle3: Path
) -> None:
    shutil.copytree(dflash, pytester.path / "drafts" / "a")
    shutil.copytree(eagle3, pytester.path / "drafts" / "b")
    pytester.makeini(
        """
        [pytest]
        draft_model =
            drafts/a
            drafts/b
        draft_target = drafts/a
        draft_engine = vllm
        draft_checks = rope.theta-stated, rope.theta-agrees, config
        draft_skip = config
        draft_device = cpu
        draft_require = target triton
        """
    )
    below = pytester.mkdir("below")
    pytester.makepyfile(
        **{
            "below/test_it": """
            def test_it(draft_target, draft_device, draft_context):
                assert draft_target["model_type"] == "qwen3"
                assert draft_device == "cpu"
                assert draft_context.engines == ("vllm",)
                assert draft_context.target.config == draft_target
            """
        }
    )
    result = pytester.runpytest_inprocess("-v", "--rootdir", str(pytester.path), "-c", "tox.ini")
    result.assert_outcomes(passed=6)
    pytester.chdir()
    import os

    os.chdir(below)
    run(model=None).assert_outcomes(passed=6)


def test_ini_twins_work_in_pyproject(run: Run, pytester: pytest.Pytester, dflash: Path) -> None:
    pytester.makepyprojecttoml(
        f"""
        [tool.pytest.ini_options]
        draft_model = [{str(dflash)!r}]
        draft_checks = ["rope.theta-stated", "rope.theta-agrees"]
        draft_device = "cpu"
        """
    )
    run(model=None).assert_outcomes(passed=2)


def test_the_command_line_goes_before_the_ini_file(run: Run, pytester: pytest.Pytester, eagle3: Path) -> None:
    pytester.makeini(f"[pytest]\ndraft_model = {eagle3}\ndraft_checks = weights\ndraft_device = tpu\ndraft_target = no")
    result = run("--draft-checks=rope.theta-stated,rope.theta-agrees", "--draft-device=cpu", f"--draft-target={eagle3}")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["draft: dflash-tiny: *"])
    result.stdout.no_fnmatch_line("draft: eagle3*")


def test_a_bad_ini_value_is_one_line_and_status_4(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ndraft_model = nowhere")
    assert_refused(run(model=None), str(pytester.path / "nowhere"))


def test_list_checks_prints_every_check_and_runs_nothing(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("raise AssertionError('was collected')")
    result = run("--draft-list-checks", model=None)
    assert result.ret == 0
    assert [line.split()[0] for line in result.outlines] == ["id", *REGISTRY]
    result = run("--draft-list-checks", "--draft-checks=rope.theta-stated,rope.theta-agrees", model=None)
    assert [line.split()[0] for line in result.outlines] == ["id", "rope.theta-stated", "rope.theta-agrees"]
    assert_refused(run("--draft-list-checks", "--draft-checks=nope", model=None), "nope")


def test_max_examples_and_device_reach_tests(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(draft_max_examples, draft_device):
            assert (draft_max_examples, draft_device) == (7, "cpu")
        """
    )
    run("--draft-max-examples=7", "--draft-device=cpu", model=None).assert_outcomes(passed=1)


def test_the_same_draft_twice_is_one_draft(run: Run, dflash: Path) -> None:
    run(
        f"--draft-model={dflash}/../{dflash.name}", "--draft-checks=rope.theta-stated,rope.theta-agrees"
    ).assert_outcomes(passed=2)


def test_without_options_nothing_is_registered_or_shown(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        def pytest_sessionstart(session):
            names = [name for name, _ in session.config.pluginmanager.list_name_plugin() if name.startswith("specdecode")]
            assert names == ["specdecode"], names
        """
    )
    pytester.makepyfile("def test_it(): pass")
    result = run(model=None)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*draft*")


def test_help_and_fixtures_and_markers_describe_the_door(run: Run) -> None:
    helped = run("--help", model=None).stdout
    for option in (
        "model",
        "target",
        "engine",
        "checks",
        "skip",
        "device",
        "require",
        "max-examples",
        "report",
        "list-checks",
    ):
        helped.fnmatch_lines_random([f"  --draft-{option}*"])
    for name in ("model", "target", "engine", "checks", "skip", "device", "require"):
        helped.fnmatch_lines_random([f"  draft_{name} *"])
    run("--markers", model=None).stdout.fnmatch_lines(["@pytest.mark.draft_check(id, group): *"])
    # Other plugins' fixtures, which may have no docstring, are none of ours.
    shown = str(run("--fixtures", "-p", "no:anyio", model=None).stdout)
    for name in (
        "draft",
        "draft_spec",
        "draft_layers",
        "fused_kv",
        "fused_kv_reference",
        "draft_target",
        "draft_device",
    ):
        assert f"\n{name} [session scope]" in shown
    for name in ("make_draft_layers", "make_fused_kv", "draft_context", "draft_max_examples"):
        assert f"\n{name} [session scope]" in shown
    assert "no docstring" not in shown
