"""`--draft-serve` from the command line to a finding. Caught here: an unknown option that is passed over or becomes a traceback; options of
the ini file that are not read, or beat the command line; a verdict that does not follow the chosen engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]
SERVING = "--draft-checks=serving"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("algoritm=EAGLE3", "*no serving option is called 'algoritm'; did you mean algorithm?"),
        ("kv-cache=fp8", "*no serving option is called 'kv-cache'; did you mean kv-cache-dtype?"),
        ("tp=eight", "*tp=eight is not a whole number"),
        ("algorithm", "*algorithm has no value; write algorithm=VALUE"),
        ("tp=1 tp=2", "*tp is given twice"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_status_4(run: Run, text: str, says: str) -> None:
    result = run(f"--draft-serve={text}")
    assert result.ret == 4
    lines = [line for line in (*result.outlines, *result.errlines) if line]
    assert len(lines) == 1, lines
    result.stderr.fnmatch_lines([f"ERROR: --draft-serve: {says}"])


def test_the_options_are_judged(run: Run, eagle3: Path) -> None:
    serve = "--draft-serve=algorithm=EAGLE num-steps=3 eagle-topk=1 num-draft-tokens=4 attention-backend=tokenspeed_mla"
    result = run(SERVING, serve, model=eagle3)
    result.assert_outcomes(failed=2, passed=1)
    text = str(result.stdout)
    assert "EAGLE is not the algorithm of eagle3 drafts" in text
    assert "tokenspeed_mla backend requires kv-cache-dtype=fp8_e4m3, got auto." in text
    assert "--draft-serve: kv-cache-dtype" in text


def test_another_engine_has_nothing_against_them(run: Run, eagle3: Path) -> None:
    serve = "--draft-serve=algorithm=EAGLE num-steps=3 attention-backend=tokenspeed_mla"
    run(SERVING, serve, "--draft-engine=vllm", model=eagle3).assert_outcomes(passed=3)


def test_without_them_the_checks_stay_open(run: Run, eagle3: Path) -> None:
    run(SERVING, model=eagle3).assert_outcomes(skipped=3)
    result = run(SERVING, "--draft-require=serving", model=eagle3)
    result.assert_outcomes(failed=3)


def test_the_ini_twin_and_the_command_line(run: Run, pytester: pytest.Pytester, eagle3: Path) -> None:
    pytester.makeini("[pytest]\ndraft_serve = algorithm=EAGLE num-steps=3 kv-cache-dtype=auto\n")
    run(SERVING, model=eagle3).assert_outcomes(failed=1, passed=2)
    run(SERVING, "--draft-serve=algorithm=EAGLE3 num-steps=3 kv-cache-dtype=auto", model=eagle3).assert_outcomes(
        passed=3
    )
    pytester.makeini("[pytest]\ndraft_serve = algoritm=EAGLE\n")
    result = run(SERVING, model=eagle3)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --draft-serve: *did you mean algorithm?"])


def test_what_was_passed_over_is_named(run: Run, eagle3: Path) -> None:
    serve = "--draft-serve=python -m sglang.launch_server --model-path X --speculative-algorithm EAGLE --port 30000"
    result = run(SERVING, serve, model=eagle3)
    result.assert_outcomes(failed=1, skipped=2)
    result.stdout.fnmatch_lines(["draft-serve: no check looks at --model-path, --port"])


@pytest.mark.parametrize("option", ["--draft-engine=sglang", "--draft-serve=tp=2", "--draft-checks=rope"])
def test_without_a_draft_one_line_says_so(run: Run, option: str) -> None:
    result = run(option, model=None)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    name = option.partition("=")[0]
    lines = [line for line in result.outlines if line.startswith("WARNING")]
    assert lines == [f"WARNING: {name}: no draft was judged, since --draft-model=DIR is missing"]


def test_with_a_draft_or_from_the_ini_file_nothing_is_said(run: Run, pytester: pytest.Pytester, eagle3: Path) -> None:
    run(SERVING, "--draft-engine=sglang", model=eagle3).stdout.no_fnmatch_line("*is missing")
    pytester.makeini("[pytest]\ndraft_engine = sglang\n")
    run(model=None).stdout.no_fnmatch_line("*is missing")
