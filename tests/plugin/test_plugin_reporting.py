"""What is said and written. Caught here: findings that are lost, said without their fields, or buried in a traceback of ours; a warning
that fails a run under -W error or is not shown; an inconclusive check that reads as a pass or that --draft-require lets through; a
report file that is not written, not whole, or not valid JSON; lines that the terminal breaks; a summary that depends on who ran the checks;
colours where pytest has none; a command to run a check again that runs another one, or none; progress in a log.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pytest_specdecode import checks as rules
from pytest_specdecode import engines, testing
from pytest_specdecode.checks import REGISTRY, Context, Inconclusive
from pytest_specdecode.checks.registry import check
from pytest_specdecode.findings import CheckResult, Finding, Outcome

Run = Callable[..., pytest.RunResult]


ROPE = ("rope.theta-stated", "rope.theta-agrees")


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks `made.up-...` with each kind of result, so that these tests hold whatever the real ones say."""
    before = dict(REGISTRY)
    everywhere = {"vllm": Outcome(outcome="serves wrong", message="takes 10000"), "sglang": Outcome(outcome="unknown")}

    def finding(severity: str, number: int) -> Finding:
        return Finding(
            message=f"{severity} number {number}",
            severity="error" if severity == "error" else "warning",
            where="config.json: key",
            got=[1, 2],
            due="three",
            fix="write three",
            outcomes=everywhere,
        )

    @check("made.up-fails", title="fails", why="", anywhere=True)
    def fails(context: Context) -> Iterator[Finding]:
        yield finding("warning", 2)
        yield finding("error", 1)

    @check("made.up-warns", title="warns", why="", anywhere=True)
    def warns(context: Context) -> Iterator[Finding]:
        yield finding("warning", 3)

    @check("made.up-breaks", title="breaks", why="", anywhere=True)
    def breaks(context: Context) -> Iterator[Finding]:
        raise ZeroDivisionError("oh")

    @check("made.up-wants-target", title="wants", why="", needs=("target",))
    def wants_target(context: Context) -> Iterator[Finding]:
        yield from ()

    @check("made.up-wants-gpu", title="wants", why="", needs=("tensors", "gpu"))
    def wants_gpu(context: Context) -> Iterator[Finding]:
        yield from ()

    @check("made.up-cannot-say", title="cannot say", why="")
    def cannot_say(context: Context) -> Iterator[Finding]:
        raise Inconclusive("the evidence is thin")
        yield

    @check("made.up-ages", title="ages", why="", anywhere=True)
    def ages(context: Context) -> Iterator[Finding]:
        warnings.warn("a library's own affair", DeprecationWarning, stacklevel=1)
        yield from ()

    @check("made.up-at-length", title="talks", why="", anywhere=True)
    def at_length(context: Context) -> Iterator[Finding]:
        yield Finding(message=("a long story " * 9).strip(), severity="warning")

    @check("made.up-fails-at-length", title="complains", why="", anywhere=True)
    def fails_at_length(context: Context) -> Iterator[Finding]:
        outcome = Outcome(outcome="stops", message=("a long word " * 9).strip())
        yield Finding(
            message=("a long error " * 9).strip(), fix=("a long way " * 9).strip(), outcomes={"vllm": outcome}
        )

    @check("made.up-notes", title="notes", why="", anywhere=True)
    def notes(context: Context) -> Iterator[Finding]:
        context.notes["made.up-notes"] = "5 of 5"
        yield from ()

    @check("made.up-elsewhere", title="elsewhere", why="", families=("eagle3",))
    def elsewhere(context: Context) -> Iterator[Finding]:
        yield from ()

    yield
    for id in set(REGISTRY) - set(before):
        del REGISTRY[id]


pytestmark = pytest.mark.usefixtures("invented")


def test_a_failure_is_its_findings_without_a_traceback(run: Run) -> None:
    result = run("--draft-checks=made.up-fails")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*FAILURES*",
            "*test_draft[[]dflash-tiny-made.up-fails]*",
            "error number 1",
            "  where: config.json: key",
            "  got:   [[]1, 2]",
            "  due:   three",
            "  vllm: serves wrong: takes 10000",
            "  fix:   write three",
            "warning made.up-fails: warning number 2",
            "*= draft model =*",
            "dflash-tiny: dflash (plain), 2 layers, * parameters, bfloat16",
            "  1 failed",
            "  Served wrong, in silence:",
            "    made.up-fails (vllm): error number 1",
            "  Warnings:",
            "    made.up-fails (vllm serves wrong): warning number 2",
            "FAILED draft-model::test_draft[[]dflash-tiny-made.up-fails] - *",
        ],
        consecutive=False,
    )
    text = str(result.stdout)
    assert "suite.py" not in text
    assert "sglang:" not in text
    assert text.count("  fix:   write three") == 2


def test_findings_stand_in_full_in_the_summary_where_tracebacks_are_off(run: Run) -> None:
    result = run("--draft-checks=made.up-fails", "--tb=no")
    result.stdout.fnmatch_lines(["    made.up-fails (vllm): error number 1", "      where: config.json: key"])


def test_a_warning_passes_and_is_shown_in_full(run: Run) -> None:
    result = run("--draft-checks=made.up-warns", "-v", "-W", "error")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "draft-model::test_draft[[]dflash-tiny-made.up-warns] WARNED*",
            "  1 warned",
            "  Warnings:",
            "    made.up-warns (vllm serves wrong): warning number 3",
            "      where: config.json: key",
            "      vllm: serves wrong: takes 10000",
            "      fix:   write three",
        ]
    )


def test_a_deprecation_in_a_library_is_no_fault_of_the_draft(run: Run) -> None:
    run("--draft-checks=made.up-ages", "-W", "error").assert_outcomes(passed=1)


def test_a_defect_of_a_check_is_one_failure_and_says_so(run: Run) -> None:
    result = run("--draft-checks=made.up-breaks,rope.theta-stated,rope.theta-agrees")
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(
        ["the check itself broke, which is a defect of pytest-specdecode: ZeroDivisionError: oh"]
    )
    assert "Traceback" not in str(result.stdout)


def test_inconclusive_is_a_skip_that_the_summary_explains(run: Run) -> None:
    result = run("--draft-checks=made.up-wants-target,made.up-cannot-say,made.up-elsewhere", "-v", "-rs")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(
        [
            "draft-model::*made.up-wants-target] SKIPPED (*",
            "draft-model::*made.up-elsewhere] SKIPPED (*",
            "  2 inconclusive, 1 skipped",
            "  Inconclusive:",
            "    made.up-wants-target: needs the target's config.json: --draft-target=DIR",
            "    made.up-cannot-say: the evidence is thin",
            "SKIPPED *: inconclusive: the evidence is thin",
        ]
    )


@pytest.mark.parametrize(
    ("want", "failed"),
    [
        ("target", {"wants-target"}),
        ("gpu", {"wants-gpu"}),
        ("model,tensors,triton,trace", set()),
        ("all", {"wants-target", "wants-gpu", "cannot-say"}),
    ],
)
def test_require_turns_what_it_names_into_failures(
    run: Run, pytester: pytest.Pytester, want: str, failed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_specdecode.plugin.options._gpu_possible", lambda: False)
    names = ("wants-target", "wants-gpu", "cannot-say", "elsewhere")
    result = run(f"--draft-require={want}", "-v", f"--draft-checks={','.join(f'made.up-{name}' for name in names)}")
    found = {name for name in names if f"made.up-{name}] FAILED" in str(result.stdout)}
    assert found == failed
    assert result.ret == bool(failed)
    if failed:
        result.stdout.fnmatch_lines([f"inconclusive, and --draft-require={want} asks for an answer: *"])


def test_missing_tensors_are_a_want(run: Run, copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    args = ("--draft-checks=made.up-wants-gpu,weights.shapes", "--draft-require=tensors", "-v")
    run(*args, model=copied).assert_outcomes(failed=2)


# --- how it reads --------------------------------------------------------------------------------------------------------

READ = "--draft-checks=made.up-fails,made.up-warns,made.up-wants-target,made.up-at-length,made.up-notes"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _summary(result: pytest.RunResult) -> list[str]:
    """The section on drafts."""
    lines = [ANSI.sub("", line) for line in result.outlines]
    start = next(index for index, line in enumerate(lines) if re.fullmatch("=+ draft models? =+", line))
    return lines[
        start + 1 : next(
            at for at in range(start + 1, len(lines)) if lines[at].startswith("===") or at == len(lines) - 1
        )
    ]


@pytest.mark.parametrize("colour", ["yes", "no"])
@pytest.mark.parametrize("verbosity", ["-q", "-v", "--tb=no", "-s"])
def test_lines_fit_a_terminal_of_80_columns(
    run: Run, colour: str, verbosity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours; pytest's own list of skips is as long as it is."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run(f"{READ},made.up-fails-at-length", f"--color={colour}", verbosity)
    lines = [ANSI.sub("", line) for line in result.outlines]
    first = next(index for index, line in enumerate(lines) if "FAILURES" in line or "= draft model =" in line)
    last = next(index for index, line in enumerate(lines) if "short test summary" in line)
    assert max(map(len, lines[first:last])) <= 80
    assert any("\x1b[" in line for line in result.outlines) == (colour == "yes")


def test_colours_say_how_bad_it_is_and_change_no_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    coloured, plain = run(READ, "--color=yes"), run(READ, "--color=no")
    assert _summary(coloured) == _summary(plain)
    for code, text in (
        ("1", "dflash-tiny: dflash (plain), *"),
        ("31m*1", "  Served wrong, in silence:"),
        ("33", "  Warnings:"),
        ("36", "  Inconclusive:"),
    ):
        coloured.stdout.fnmatch_lines([f"\x1b[[]{code.replace('m*', 'm*[[]')}m{text}\x1b[[]0m"])


def test_how_much_is_said(run: Run) -> None:
    brief, usual, full = (_summary(run(READ, *args)) for args in (["-q"], [], ["-v"]))
    assert brief[1:] == [
        "  1 failed, 2 warned, 1 inconclusive, 1 passed",
        "  Served wrong, in silence:",
        "    made.up-fails (vllm): error number 1",
        "  Warnings:",
        "    made.up-fails (vllm serves wrong): warning number 2",
        "    made.up-warns (vllm serves wrong): warning number 3",
        f"    made.up-at-length: {'a long story ' * 9}".rstrip(),
        "  Inconclusive:",
        "    made.up-wants-target: needs the target's config.json: --draft-target=DIR",
    ]
    field, engine, note = (
        "      where: config.json: key",
        "      vllm: serves wrong: takes 10000",
        "    made.up-notes: 5 of 5",
    )
    assert [usual.count(line) for line in (field, engine, note)] == [1, 0, 0]
    assert [full.count(line) for line in (field, engine, note)] == [1, 3, 1]
    assert [line for line in usual if line not in full] == []


@pytest.mark.parametrize("verbosity", [(), ("-q",), ("-v",)], ids=["usual", "q", "v"])
def test_workers_and_one_process_say_the_same(
    pytester: pytest.Pytester, dflash: Path, verbosity: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The width, too, is that of the process that shows it."""
    monkeypatch.setenv("COLUMNS", "80")
    broken = pytester.path / "broken"
    testing.write_tiny(broken, "eagle3", rope_theta=None)
    args = (f"--draft-model={dflash}", f"--draft-model={broken}", "--draft-checks=config,rope,target", *verbosity)
    alone, shared = (pytester.runpytest_subprocess(*args, *more) for more in ((), ("-n", "2")))
    assert _summary(alone) == _summary(shared)
    assert len(_summary(alone)) > 8


def test_a_failure_of_numbers_names_the_element_and_runs_again(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every option that it takes to find it again, from the folder of this run."""
    from pytest_specdecode.fused_kv import path as fused_path

    real = fused_path.fused_norm_rope

    def wrong(kv: Any, positions: Any, weight: Any, eps: Any, table: Any, **options: Any) -> Any:
        k, v = real(kv, positions, weight, eps, table, **options)
        k[1, 2, 1, 5] += 1.0
        return k, v

    monkeypatch.setattr(fused_path, "fused_norm_rope", wrong)
    model = pytester.path / "my drafts" / "it's one"
    testing.write_tiny(model, "dflash")
    target = testing.write_tiny(pytester.path / "target", "dflash")
    given = (f"--draft-target={target}", "--draft-device=cpu", "--draft-engine=vllm", "--draft-fused-kv=ours")
    result = run("--draft-checks=fused-kv.matches-reference,weights.shapes", *given, model=model)
    result.stdout.re_match_lines(
        [
            r"K: 1 of \d+ elements are too far off, worst at layer=1 token=2 head=1 dim=5: got \S+, due \S+, error \S+, eager's there \S+ "
            r"and at most \S+, bound \S+$",
            r"  where: fused K: layer=1 token=2 head=1 dim=5$",
        ]
    )
    (line,) = [line for line in result.outlines if line.startswith("      run again: ")]
    command = shlex.split(line.partition(": ")[2])
    assert command[0] == "pytest"
    assert command[1] == f"--draft-model={model}"
    assert set(given) < set(command)
    assert command[-1] == "draft-model::test_draft[it_s one-fused-kv.matches-reference]".replace(" ", "_")
    again = pytester.runpytest_inprocess(*command[1:])
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["K: 1 of *layer=1 token=2 head=1 dim=5*"])


def test_drafts_of_one_name_are_run_again_by_that_of_this_run(run: Run, pytester: pytest.Pytester) -> None:
    for place in ("a", "b"):
        testing.write_tiny(pytester.path / place / "draft", "eagle3", edit=_with_a_nan)
    result = run("--draft-model=b/draft", "--draft-checks=weights.finite", model=Path("a/draft"))
    commands = [line.partition(": ")[2] for line in result.outlines if line.startswith("      run again: ")]
    assert [shlex.split(command)[-1] for command in commands] == [
        f"draft-model::test_draft[{place}/draft-weights.finite]" for place in "ab"
    ]
    again = pytester.runpytest_inprocess(*shlex.split(commands[1])[1:])
    again.assert_outcomes(failed=1)


def _with_a_nan(tensors: dict[str, Any]) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_progress_on_a_terminal_of_its_own(pytester: pytest.Pytester, dflash: Path, workers: tuple[str, ...]) -> None:
    import pty

    pytester.makeconftest(
        "from pytest_specdecode.plugin import fixtures\n"
        "real = fixtures._progress\n"
        "fixtures._progress = lambda config: real(config, seconds=0.0)\n"
    )
    seen = bytearray()

    def read(fd: int) -> bytes:
        got = os.read(fd, 65536)
        seen.extend(got)
        return b"" if not got else b" "

    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--draft-model={dflash}", *workers]
    status = pty.spawn([*command, "--draft-checks=weights.finite", "draft-model"], read)
    assert status == 0
    said = seen.decode(errors="replace")
    assert ("[gw0] " in said) == bool(workers)
    assert "dflash-tiny: values of fc.weight (tensor " in said
    done = pytester.run(*command, "--draft-checks=weights.finite", "draft-model")
    assert "tensor 1 of" not in str(done.stdout) + str(done.stderr)


def test_the_header_has_a_line_per_draft(run: Run, eagle3: Path) -> None:
    result = run(f"--draft-model={eagle3}", "--draft-checks=rope.theta-stated,rope.theta-agrees", "--draft-device=cpu")
    result.stdout.fnmatch_lines(
        [
            "draft: dflash-tiny: dflash (plain), 2 layers, * parameters, bfloat16; on cpu",
            "draft: eagle3-tiny: eagle3 (plain), 1 layer, * parameters, bfloat16; on cpu",
            "*= draft models =*",
            "dflash-tiny: *",
            "eagle3-tiny: *",
        ]
    )


def test_the_header_says_which_engines_were_read(run: Run) -> None:
    args = ("--draft-checks=rope.theta-stated", "--draft-engine=vllm")
    run(*args).stdout.fnmatch_lines([f"engines, as read: vllm {engines.ENGINES['vllm'].version}"])
    run(*args[:1]).stdout.fnmatch_lines(["engines, as read: sglang *, vllm *, tensorrt-llm *"])


def test_the_report_file_holds_the_checks_that_ran(run: Run, pytester: pytest.Pytester, eagle3: Path) -> None:
    file = pytester.path / "r.json"
    result = run(
        f"--draft-model={eagle3}",
        "--draft-checks=made,rope.theta-stated,rope.theta-agrees",
        "-k",
        "not agrees",
        "--draft-report=r.json",
    )
    result.stdout.fnmatch_lines([f"report: {file}"])
    report = json.loads(file.read_text())
    assert report["schema"] == 1
    assert report["tool"]["pytest"] == pytest.__version__
    assert [draft["family"] for draft in report["drafts"]] == ["dflash", "eagle3"]
    found = {item["id"]: item for item in report["drafts"][0]["checks"]}
    assert list(found) == [item.id for item in rules.select(["made", *ROPE]) if "agrees" not in item.id]
    statuses = {id: item["status"] for id, item in found.items()}
    assert statuses["made.up-fails"] == "failed"
    assert statuses["made.up-warns"] == "warned"
    assert statuses["made.up-cannot-say"] == "inconclusive"
    assert statuses["made.up-elsewhere"] == "skipped"
    assert statuses["rope.theta-stated"] == "passed"
    failure = found["made.up-fails"]
    assert failure["message"] == "error number 1"
    assert (failure["got"], failure["due"], failure["fix"]) == ([1, 2], "three", "write three")
    found = failure["outcomes"]["vllm"]
    assert (found["outcome"], found["message"]) == ("serves wrong", "takes 10000")
    assert [item["severity"] for item in failure["findings"]] == ["error", "warning"]
    assert not list(pytester.path.glob(".r.json*"))


def test_collecting_alone_writes_and_summarises_nothing(run: Run, pytester: pytest.Pytester) -> None:
    result = run("--collect-only", "--draft-report=r.json", "--draft-checks=rope.theta-stated,rope.theta-agrees")
    assert not (pytester.path / "r.json").exists()
    result.stdout.no_fnmatch_line("*= draft model =*")


def test_a_report_that_cannot_be_written_fails_the_run(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        def pytest_runtest_teardown(item):
            import pathlib
            pathlib.Path("r.json").mkdir(exist_ok=True)
        """
    )
    result = run("--draft-checks=rope.theta-stated,rope.theta-agrees", "--draft-report=r.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["ERROR: the report was not written: *r.json: cannot be written: *"])


def test_junit_has_a_case_per_check_with_its_result(run: Run, pytester: pytest.Pytester) -> None:
    run("--draft-checks=made.up-fails,made.up-warns,rope.theta-stated,rope.theta-agrees", "--junitxml=j.xml")
    cases = list(ElementTree.parse(pytester.path / "j.xml").iter("testcase"))
    assert [case.get("name") for case in cases] == [
        f"test_draft[dflash-tiny-{id}]"
        for id in ("rope.theta-stated", "rope.theta-agrees", "made.up-fails", "made.up-warns")
    ]
    assert {case.get("classname") for case in cases} == {"draft-model"}
    failure = cases[2].find("failure")
    assert failure is not None
    assert "error number 1" in str(failure.text)
    found = cases[3].find("properties/property")
    assert found is not None
    assert json.loads(str(found.get("value")))["status"] == "warned"


def test_expected_failures_from_a_conftest_are_pytests_own(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                if item.get_closest_marker("draft_check").kwargs["id"] in ("made.up-fails", "made.up-warns"):
                    item.add_marker(pytest.mark.xfail(reason="known", strict=False))
        """
    )
    run("--draft-checks=made.up-fails,made.up-warns", "-v").assert_outcomes(xfailed=1, xpassed=1)


def test_a_result_crosses_processes_whole() -> None:
    outcome = Outcome(outcome="stops", message="with this")
    finding = Finding(
        message="m", severity="warning", where="w", got={"a": (1, None)}, due=2, fix="f", outcomes={"vllm": outcome}
    )
    result = CheckResult(id="a.b", status="warned", message="m", findings=(finding, Finding(message="n")))
    there = CheckResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert there.to_dict() == result.to_dict()
    assert there.findings[0].outcomes["vllm"] == outcome
