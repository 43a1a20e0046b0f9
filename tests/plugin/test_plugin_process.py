"""Whole processes: the entry point, xdist, and switching the plugin off. Caught here: an entry point that is not found or has another
name; workers that collect differently, or whose results do not reach the controller's summary and report; usage errors that workers
bury; options that remain when the plugin does not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("xdist", reason="needs pytest-xdist, which the test extra brings")


def test_two_workers_run_report_and_summarise_as_one(pytester: pytest.Pytester, dflash: Path, copied: Path) -> None:
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"rope_theta"', '"theta"'))
    pytester.makepyfile("def test_mine(draft, worker_id): assert worker_id != 'master'")
    result = pytester.runpytest_subprocess(
        "-n2",
        f"--draft-model={dflash}",
        f"--draft-model={copied}",
        "--draft-checks=rope.theta-stated,rope.theta-agrees,config.family,dflash.mask-token,dflash.block-size",
        "--draft-report=r.json",
        "-v",
    )
    assert result.ret == 1
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(
        [
            "draft: copied: *",
            "rope_theta is not stated",
            "*= draft models =*",
            "copied: dflash (plain), *",
            "  1 failed, 1 inconclusive, * passed",
            "  Served wrong, in silence:",
            "    rope.theta-stated (sglang, vllm): rope_theta is not stated",
        ]
    )
    result.stdout.fnmatch_lines_random(["*SKIPPED*copied-rope.theta-agrees*"])
    drafts = json.loads((pytester.path / "r.json").read_text())["drafts"]
    ids = ["config.family", "rope.theta-stated", "rope.theta-agrees", "dflash.mask-token", "dflash.block-size"]
    assert [[check["id"] for check in draft["checks"]] for draft in drafts] == [ids, ids]


def test_workers_run_one_printed_id(pytester: pytest.Pytester, dflash: Path) -> None:
    pytester.makepyfile("def test_mine(): pass")
    result = pytester.runpytest_subprocess(
        "-n2", f"--draft-model={dflash}", "draft-model::test_draft[dflash-tiny-rope.theta-stated]"
    )
    result.assert_outcomes(passed=1)


def test_usage_errors_with_workers_are_one_line_and_status_4(pytester: pytest.Pytester, dflash: Path) -> None:
    for args in (["--draft-model=nowhere"], [f"--draft-model={dflash}", "--draft-checks=rpoe"]):
        result = pytester.runpytest_subprocess("-n2", *args)
        assert result.ret == 4
        assert [line[:6] for line in (*result.outlines, *result.errlines) if line] == ["ERROR:"]


def test_without_the_plugin_its_options_are_unknown(pytester: pytest.Pytester, dflash: Path) -> None:
    result = pytester.runpytest_subprocess("-p", "no:specdecode", f"--draft-model={dflash}")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*unrecognized arguments: --draft-model=*"])
