"""Report files, comparisons and what GitHub is told, from the command line. Caught here: a file of several that is left out, or whose
failure takes the others with it; a comparison with something else than a report that is no usage error; commands and summaries where
nobody asked for them; figures that only pictures need and that every run pays for; results that xdist's workers keep to themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib.backends.backend_svg  # noqa: F401 - it cannot be imported a second time, and inner runs drop what they import
import pytest
import torch
from safetensors.torch import save_file

import pytest_specdecode.report.plots  # noqa: F401
from pytest_specdecode.testing import write_tiny

Run = Callable[..., pytest.RunResult]
CHECKS = "--draft-checks=rope.theta-stated,rope.theta-agrees"


@pytest.fixture
def wrong(pytester: pytest.Pytester) -> Path:
    """A draft whose configuration states two bases, on the lines 2 and 4."""
    path = pytester.path / "wrong"
    write_tiny(path, "eagle3")
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_theta", None)
    rest = json.dumps(config, indent=1).removeprefix("{\n")
    text = f'{{\n "rope_theta": 1000000.0,\n "rope_parameters": {{\n  "rope_theta": 10000.0, "rope_type": "default"}},\n{rest}'
    (path / "config.json").write_text(text)
    return path


def test_each_file_is_written_once_and_named(run: Run, pytester: pytest.Pytester) -> None:
    names = ("r.json", "r.md", "r.html", "r.sarif")
    result = run(CHECKS, *(f"--draft-report={name}" for name in (*names, "r.md")))
    assert result.ret == 0
    reports = [line for line in result.outlines if line.startswith("report: ")]
    assert reports == [f"report: {pytester.path / name}" for name in names]
    assert json.loads((pytester.path / "r.json").read_text())["comparison"] is None
    assert (pytester.path / "r.md").read_text().startswith("## Draft model dflash-tiny: passed\n")
    assert (pytester.path / "r.html").read_text().startswith("<!DOCTYPE html>")
    sarif = json.loads((pytester.path / "r.sarif").read_text())
    rules = sarif["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["rope.theta-stated", "rope.theta-agrees"]
    assert all(rule["shortDescription"]["text"] for rule in rules)
    assert not [file for file in pytester.path.iterdir() if file.name.endswith(".part")]


def test_one_bad_file_does_not_lose_the_others(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        def pytest_runtest_teardown(item):
            import pathlib
            pathlib.Path("a.json").mkdir(exist_ok=True)
        """
    )
    result = run(CHECKS, "--draft-report=a.json", "--draft-report=b.md")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["ERROR: the report was not written: *a.json: cannot be written: *", "report: *b.md"])
    assert (pytester.path / "b.md").is_file()


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_pictures_are_measured_where_a_page_asks(
    run: Run, pytester: pytest.Pytester, dflash: Path, workers: tuple[str, ...]
) -> None:
    target = pytester.path / "target"
    target.mkdir()
    fields = {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16, "hidden_size": 64, "num_hidden_layers": 8}
    (target / "config.json").write_text(json.dumps(fields))
    checks = "--draft-checks=weights.finite,target.rope"
    args = (checks, f"--draft-target={target}", "--draft-report=r.json")
    if workers:
        # Workers are processes of their own.
        pytester.runpytest_subprocess(f"--draft-model={dflash}", *args, "--draft-report=r.html", *workers)
    else:
        run(*args, "--draft-report=r.html")
    figures = {
        item["id"]: item["figures"]
        for item in json.loads((pytester.path / "r.json").read_text())["drafts"][0]["checks"]
    }
    assert set(figures["weights.finite"]["tensors"]) >= {"fc.weight", "norm.weight"}
    assert figures["target.rope"]["target"][0]["frequencies"][0] == 1.0
    page = (pytester.path / "r.html").read_text()
    assert "Weights per tensor" in page
    assert "RoPE frequencies" in page
    if not workers:
        result = run(*args)
        assert [
            item["figures"] for item in json.loads((pytester.path / "r.json").read_text())["drafts"][0]["checks"]
        ] == [{}, {}]
        assert not any("weights.finite:" in line for line in result.outlines)


# --- comparisons ---------------------------------------------------------------------------------------------------------


def test_several_drafts_are_one_table(run: Run, wrong: Path) -> None:
    result = run(f"--draft-model={wrong}", CHECKS)
    result.stdout.fnmatch_lines(
        [
            "draft        family  status  failed  warned  inconclusive  passed",
            "dflash-tiny  dflash  passed  0       0       0             2",
            "wrong        eagle3  failed  1       0       0             1",
        ],
        consecutive=True,
    )
    assert not any(line.startswith("draft   ") for line in run(CHECKS).outlines)


def test_a_run_against_an_older_one(run: Run, wrong: Path, pytester: pytest.Pytester, eagle3: Path) -> None:
    run(CHECKS, "--draft-report=old.json", model=eagle3)
    args = ("--draft-compare=old.json", "--draft-report=new.json", "--draft-report=new.md", "--draft-report=new.html")
    result = run(CHECKS, *args, model=wrong)
    result.stdout.fnmatch_lines(
        [
            "against old.json:",
            "  wrong (was eagle3-tiny): 1 worse",
            "    worse  rope.theta-agrees: passed, now failed: rope_theta is stated with different values",
        ],
        consecutive=True,
    )
    found = json.loads((pytester.path / "new.json").read_text())["comparison"]
    assert found["against"] == "old.json"
    assert [change["id"] for change in found["drafts"][0]["worse"]] == ["rope.theta-agrees"]
    assert "- **worse**: rope.theta-agrees, passed, now failed" in (pytester.path / "new.md").read_text()
    assert "passed, now failed" in (pytester.path / "new.html").read_text()
    # The same file may be read and written.
    assert run(CHECKS, "--draft-compare=new.json", "--draft-report=new.json", model=wrong).ret == 1
    found = json.loads((pytester.path / "new.json").read_text())["comparison"]
    assert found["drafts"][0] == {
        "name": "wrong",
        "old_name": "wrong",
        "worse": [],
        "new": [],
        "better": [],
        "gone": [],
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file"),
        ("", "is not JSON"),
        ('{"created": 1.0, "tests": []}', "is no report of pytest-specdecode"),
        ('{"schema": 0, "drafts": []}', "has schema 0, and this version reads 1"),
        ('{"schema": 1, "drafts": [{}]}', "is no whole report"),
    ],
)
def test_what_is_no_report_is_one_line_and_status_4(
    run: Run, pytester: pytest.Pytester, content: str | None, text: str
) -> None:
    if content is not None:
        (pytester.path / "old.json").write_text(content)
    result = run(CHECKS, "--draft-compare=old.json")
    assert result.ret == 4
    (line,) = [line for line in (*result.outlines, *result.errlines) if line]
    assert line.startswith("ERROR: --draft-compare=old.json: ")
    assert text in line


# --- GitHub --------------------------------------------------------------------------------------------------------------


def test_github_is_told_where_it_asks(
    run: Run, wrong: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = pytester.path / "summary.md"
    summary.write_text("before\n")
    assert not any(line.startswith("::") for line in run(CHECKS, model=wrong).outlines)
    assert summary.read_text() == "before\n"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = run(CHECKS, model=wrong)
    commands = [line for line in result.outlines if line.startswith("::")]
    assert len(commands) == 1
    assert re.match(
        r"::error file=wrong/config\.json,line=[24],title=rope\.theta-agrees::wrong: rope_theta is stated with different values%0Afix: ",
        commands[0],
    )
    assert summary.read_text().startswith("before\n## Draft model wrong: failed\n")
    assert "| serves wrong | rope.theta-agrees |" in summary.read_text()


@pytest.mark.parametrize(
    "options", [["-q"], ["-v", "-rA"], ["-vv", "--draft-target=absent ##[add-mask]e"]], ids=" ".join
)
def test_names_from_a_checkpoint_command_no_runner(
    run: Run, wrong: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    names = [f"{'x' * length} ::set-output name=a::b ##[add-mask]e" for length in range(1, 80)]
    save_file({name: torch.zeros(2) for name in names}, wrong / "more.safetensors")
    config = json.loads((wrong / "config.json").read_text())
    config |= {"model_type": "::add-mask::e ##[add-mask]e", "rope_theta": "##[add-mask]e ::stop-commands::x"}
    (wrong / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = run("--draft-checks=config,files,weights,layers", *options, model=wrong)
    told = [line for line in (*result.outlines, *result.errlines) if "##[" in line or line.lstrip().startswith("::")]
    assert all(line.startswith(("::error file=", "::warning file=", "::notice ")) for line in told)
    assert any("#\\x23[add-mask]e" in line for line in (*result.outlines, *result.errlines))


def test_nor_does_what_a_fixture_says_of_them(
    run: Run, wrong: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((wrong / "config.json").read_text())
    config.pop("rope_parameters", None)
    (wrong / "config.json").write_text(json.dumps(config | {"hidden_act": "##[add-mask]e"}))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    file = pytester.makepyfile("def test_layers(draft_layers): pass")
    result = run(file, "--draft-checks=rope.theta-stated", model=wrong)
    assert result.ret == 1
    assert "#\\x23[add-mask]e" in result.stdout.str()
    assert "##[" not in result.stdout.str()
    assert "direct cause" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()


def test_a_run_of_no_draft_tells_github_nothing(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    pytester.makepyfile("def test_one(): pass")
    result = run("--draft-max-examples=3", model=None)
    result.assert_outcomes(passed=1)
    assert not any(line.startswith("::") for line in result.outlines)
    assert not (pytester.path / "summary.md").exists()


def test_a_summary_that_cannot_be_written_is_one_line(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "absent" / "summary.md"))
    result = run(CHECKS)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["WARNING: the step summary was not written: *summary.md: cannot be written: No such file*"]
    )
