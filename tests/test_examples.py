"""The shipped examples do what they are shipped for.

What goes wrong without this file: a good example that no longer passes, a broken one that no longer fails for its reason, an example of
a user's tests that nobody runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_specdecode import check_draft

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GOOD = sorted(path.name for path in (EXAMPLES / "checkpoints").iterdir())
BROKEN = {
    "kimi-no-q-lora-rank": ("config.q-lora-rank", "Eagle3 MLA layer requires q_lora_rank in the draft config"),
    "dflash-uneven-kv-heads": (
        "fused-kv.num-kv-heads",
        "num_kv_heads mismatch across layers for fused KV path: expected 2, got 1 at layer 1.",
    ),
    "eagle3-no-lm-head": ("vocabulary.lm-head", "lm_head.weight is not in the weights"),
}


def test_three_good_checkpoints_are_shipped() -> None:
    """One per family, each under 300 KB."""
    assert GOOD == ["dflash-tiny", "eagle3-tiny", "kimi-eagle3-mla-tiny"]
    for path in (*EXAMPLES.glob("checkpoints/*"), *EXAMPLES.glob("broken/*")):
        assert sum(file.stat().st_size for file in path.iterdir()) < 300_000


@pytest.mark.parametrize("name", GOOD)
def test_a_good_checkpoint_passes(name: str) -> None:
    """Nothing fails, warns or stays open."""
    report = check_draft(EXAMPLES / "checkpoints" / name)
    assert {result.status for result in report if not result.want} == {"passed", "skipped"}, str(report)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_copy_fails_for_its_reason(name: str) -> None:
    """The finding that the README shows."""
    id, text = BROKEN[name]
    result = check_draft(EXAMPLES / "broken" / name)[id]
    assert result.status == "failed"
    assert text in result.message


def test_every_broken_copy_is_tested() -> None:
    """None is shipped without its reason here."""
    assert {path.name for path in (EXAMPLES / "broken").iterdir()} == set(BROKEN)


def test_a_users_test_file_passes_on_the_draft(pytester: pytest.Pytester) -> None:
    """The file is run as a user would, the suite beside it."""
    pytester.copy_example(str(EXAMPLES / "test_my_draft.py"))
    model = EXAMPLES / "checkpoints" / "dflash-tiny"
    result = pytester.runpytest_subprocess(
        f"--draft-model={model}", "test_my_draft.py", "--draft-checks=taps,config.family"
    )
    result.assert_outcomes(passed=6 + 7)


def test_a_users_test_file_skips_without_a_draft(pytester: pytest.Pytester) -> None:
    """Only what asks for a draft; the engine's test needs none."""
    pytester.copy_example(str(EXAMPLES / "test_my_draft.py"))
    result = pytester.runpytest_subprocess("test_my_draft.py", "-rs")
    result.assert_outcomes(passed=2, skipped=4)
    result.stdout.fnmatch_lines(["*no draft model: give one with --draft-model=DIR*"])
