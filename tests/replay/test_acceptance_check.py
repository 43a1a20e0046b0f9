"""`acceptance.length`, from scripts and from the command line.

What goes wrong without this file: a fall that passes, a chance dip that fails, figures that the report lacks, an option that is not read, a
baseline that a run without a trace overwrites.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hypothesis  # noqa: F401 - its plugin imports it at the end of every inner run
import pytest
import torch
from decoding import Target

from pytest_specdecode import api, testing
from pytest_specdecode.errors import DraftError
from pytest_specdecode.replay import baseline
from pytest_specdecode.replay.baseline import Entry

VOCAB = 4
Runs = Callable[..., pytest.RunResult]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`draft`, `target` and `trace` of two files beside each other; accepted at about 1.5 by chance."""
    found = tmp_path_factory.mktemp("place")
    testing.write_tiny(found / "draft", "eagle3", vocab_size=VOCAB, draft_vocab_size=3, dtype="float32", seed=3)
    target = Target(3, VOCAB, seed=11)
    target.write(found / "target")
    (found / "trace").mkdir()
    for index, prompt in enumerate(([1, 2, 3], [3, 0, 1])):
        target.record(found / "trace" / f"hs_{index}.safetensors", target.continued(prompt, 100), prompt=3)
    return found


def measured(place: Path) -> Entry:
    return Entry.of(api.replay(place / "draft", place / "trace", place / "target").to_dict())


def judged(place: Path, file: Path, entry: Entry) -> tuple[str, str]:
    baseline.update(file, {"draft": entry})
    report = api.check_draft(
        place / "draft", place / "target", checks="acceptance.length", trace=place / "trace", baseline=file
    )
    result = report["acceptance.length"]
    assert result.figures["accepted_length"] == pytest.approx(measured(place).accepted_length)
    return result.status, result.message


def test_without_a_trace_it_stays_open(place: Path) -> None:
    result = api.check_draft(place / "draft", checks="acceptance.length")["acceptance.length"]
    assert (result.status, result.want) == ("inconclusive", "trace")
    assert result.message == "needs recorded hidden states of the target: --draft-trace=DIR"


def test_without_a_baseline_it_reports(place: Path) -> None:
    report = api.check_draft(place / "draft", place / "target", checks="acceptance.length", trace=place / "trace")
    result = report["acceptance.length"]
    assert result.status == "passed"
    assert result.message.startswith("accepted length 1.")
    shown = " ".join(str(report).split())
    assert f"acceptance.length: {result.message} by position " in shown
    (check,) = report.to_dict()["drafts"][0]["checks"]
    assert check["figures"]["trace"]["files"] == 2
    assert len(check["figures"]["served"]["positions"]) == 4
    assert json.loads(json.dumps(check)) == check


def test_a_fall_beyond_chance_fails_and_one_within_it_warns(place: Path, tmp_path: Path) -> None:
    entry = measured(place)
    file = tmp_path / "baseline.json"
    served, rounds = entry.accepted_length, entry.rounds
    result = api.replay(place / "draft", place / "trace", place / "target").served
    within, beyond = (served + result.high + 1) / 2 / 0.95, (result.high + 1.01) / 0.95
    same = {"rounds": rounds, "draft_tokens": 4, "trace": entry.trace}
    assert judged(place, file, entry)[0] == "passed"
    assert judged(place, file, Entry(accepted_length=served / 0.951, **same))[0] == "passed"
    status, message = judged(place, file, Entry(accepted_length=within, **same))
    assert (status, message.endswith("rounds do not rule out")) == ("warned", True)
    status, message = judged(place, file, Entry(accepted_length=beyond, **same))
    assert status == "failed"
    assert message == f"accepted length is {served:.2f}; 95% of the baseline's {beyond:.2f} is {0.95 * beyond:.2f}"


def test_a_baseline_of_something_else_judges_nothing(place: Path, tmp_path: Path) -> None:
    entry = measured(place)
    file = tmp_path / "baseline.json"
    other = Entry(accepted_length=9.0, rounds=1, draft_tokens=4, trace="another")
    status, message = judged(place, file, other)
    assert (status, "on another trace (another, this one is" in message) == ("inconclusive", True)
    status, message = judged(place, file, Entry(accepted_length=9.0, rounds=1, draft_tokens=3, trace=entry.trace))
    assert (status, "with 3 drafted tokens a round, not 4" in message) == ("inconclusive", True)
    baseline.update(tmp_path / "empty.json", {"somebody": entry})
    report = api.check_draft(
        place / "draft",
        place / "target",
        checks="acceptance.length",
        trace=place / "trace",
        baseline=tmp_path / "empty.json",
    )
    assert "the baseline has no entry of draft" in report["acceptance.length"].message


def test_agreement_with_a_text_is_not_judged(place: Path, tmp_path: Path) -> None:
    """No mask and no target: the draft has an embedding of its own here, so that it runs all the same."""

    def embed(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(0))

    path = testing.write_tiny(
        tmp_path / "draft", "eagle3", vocab_size=VOCAB, draft_vocab_size=3, dtype="float32", edit=embed
    )
    target = Target(3, VOCAB, seed=11)
    (tmp_path / "trace").mkdir()
    target.record(tmp_path / "trace" / "hs_0.safetensors", target.continued([1], 60), prompt=None, last=False)
    baseline.update(tmp_path / "b.json", {"draft": Entry(accepted_length=5.0, rounds=1, draft_tokens=4, trace="x")})
    report = api.check_draft(path, checks="acceptance.length", trace=tmp_path / "trace", baseline=tmp_path / "b.json")
    result = report["acceptance.length"]
    assert (result.status, result.want) == ("inconclusive", "trace")
    assert "nothing is held against the baseline" in result.message
    assert "; agreement with the recorded text " in result.message
    result = api.check_draft(path, checks="acceptance.length", trace=tmp_path / "trace")["acceptance.length"]
    assert result.status == "passed"
    assert result.message.startswith("agreement with the recorded text ")


def test_a_mask_over_a_text_that_the_target_did_not_write_is_warned_of(place: Path, tmp_path: Path) -> None:
    """A trainer's mask says which tokens are an answer's, not that this target would give it."""
    (tmp_path / "trace").mkdir()
    target = Target(3, VOCAB, seed=11)
    written = target.continued([1, 2, 3], 100)
    other = [(token + 1) % VOCAB if at % 3 == 0 else token for at, token in enumerate(written)]
    for name, text in (("own", written), ("other", other)):
        target.record(tmp_path / "trace" / f"{name}.safetensors", text, prompt=3)
    report = api.check_draft(place / "draft", place / "target", checks="acceptance.length", trace=tmp_path / "trace")
    (finding,) = report["acceptance.length"].findings
    assert (finding.severity, finding.where) == ("warning", "other.safetensors")
    assert finding.message.startswith("the trace calls tokens the target's own of which the target chooses ")
    assert 0.05 < finding.got < 0.7


@pytest.mark.parametrize("prompt", [60, 58])
def test_a_trace_with_nothing_to_count_is_no_fault_of_the_draft(prompt: int, place: Path, tmp_path: Path) -> None:
    """All of it prompt, or shorter than a round behind the prompt."""
    target = Target(3, VOCAB, seed=11)
    (tmp_path / "trace").mkdir()
    target.record(tmp_path / "trace" / "hs_0.safetensors", target.continued([1], 60), prompt=prompt)
    report = api.check_draft(place / "draft", place / "target", checks="acceptance", trace=tmp_path / "trace")
    result = report["acceptance.length"]
    assert (result.status, result.want) == ("inconclusive", "trace")
    assert result.message.endswith(
        "no stretch of 5 tokens that are the target's own; nothing can be counted in rounds of 4"
    )
    assert report["acceptance.conventions"].status == "inconclusive"


def test_more_tokens_than_a_block_was_trained_for_is_said(tmp_path: Path) -> None:
    """Rows behind the block's end look at each other as none did in training, so that no reading is judged by them."""
    vocab, config = 6, {"mask_token_id": 5, "target_layer_ids": [1, 9, 17], "block_size": 4}
    path = testing.write_tiny(tmp_path / "draft", "dflash", vocab_size=vocab, dtype="float32", dflash_config=config)
    target = Target(3, vocab, seed=2)
    target.write(tmp_path / "target")
    (tmp_path / "trace").mkdir()
    target.record(tmp_path / "trace" / "hs_0.safetensors", target.continued([1], 60), prompt=1)

    def judged(tokens: int) -> api.Report:
        return api.check_draft(
            path, tmp_path / "target", checks="acceptance", trace=tmp_path / "trace", draft_tokens=tokens
        )

    report = judged(4)
    said = "4 tokens are drafted a round; a block of the size that the draft was trained for gives 3"
    assert (report["acceptance.length"].status, report["acceptance.length"].message) == ("warned", said)
    assert report["acceptance.conventions"].status == "inconclusive"
    assert "give --draft-tokens=3 or fewer" in report["acceptance.conventions"].message
    report = judged(3)
    assert report["acceptance.length"].status == "passed"
    assert "--draft-tokens" not in report["acceptance.conventions"].message


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("accepted_length", "0.5", "is 0.5; a number from 1 on is due"),
        ("rounds", "0", "is 0; a number from 1 on is due"),
        ("draft_tokens", "-4", "is -4; a number from 1 on is due"),
    ],
)
def test_a_baseline_with_a_senseless_figure_is_refused(key: str, text: str, said: str, tmp_path: Path) -> None:
    fields = {"accepted_length": "2.5", "rounds": "10", "draft_tokens": "4", "trace": '"x"', key: text}
    inner = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    file = tmp_path / "baseline.json"
    file.write_text(f'{{"schema": 1, "drafts": {{"draft": {{{inner}}}}}}}')
    with pytest.raises(DraftError) as caught:
        baseline.read(file)
    assert str(caught.value) == f"{file}: drafts.draft.{key}: {said}"


# --- the command line ---


@pytest.fixture
def run(pytester: pytest.Pytester, place: Path) -> Runs:
    def run(*args: str, model: Path = place / "draft", trace: Path | None = place / "trace") -> pytest.RunResult:
        given = [f"--draft-model={model}", f"--draft-target={place / 'target'}", "--draft-checks=acceptance.length"]
        given += [] if trace is None else [f"--draft-trace={trace}"]
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *given, *args)

    return run


def test_a_run_shows_the_figure_and_writes_it(run: Runs, pytester: pytest.Pytester, place: Path) -> None:
    result = run("--draft-report=report.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*acceptance.length: accepted length 1.*", "      by position *(* to *), *"])
    (check,) = json.loads((pytester.path / "report.json").read_text())["drafts"][0]["checks"]
    assert check["figures"]["accepted_length"] == pytest.approx(measured(place).accepted_length)


def test_the_baseline_is_written_and_then_judges(run: Runs, pytester: pytest.Pytester, place: Path) -> None:
    result = run("--draft-baseline=baseline.json", "--draft-update-baseline")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["baseline: *baseline.json"])
    file = pytester.path / "baseline.json"
    assert baseline.read(file)["draft"].accepted_length == pytest.approx(measured(place).accepted_length, abs=1e-4)
    run("--draft-baseline=baseline.json").assert_outcomes(passed=1)
    entry = measured(place)
    baseline.update(file, {"draft": Entry(**{**vars(entry), "accepted_length": 3.0})})
    result = run("--draft-baseline=baseline.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*accepted length is 1.*; 95% of the baseline's 3.00 is 2.85"])


def test_ini_twins_are_read(run: Runs, pytester: pytest.Pytester, place: Path) -> None:
    pytester.makeini(f"[pytest]\ndraft_trace = {place / 'trace'}\ndraft_tokens = 2\ndraft_baseline = kept.json")
    baseline.update(
        pytester.path / "kept.json", {"draft": Entry(accepted_length=9.0, rounds=1, draft_tokens=2, trace="x")}
    )
    result = run("-rs", trace=None)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*inconclusive*on another trace*rounds of 2 tokens*"])


def test_a_trace_that_is_required_and_absent_fails(run: Runs) -> None:
    run("--draft-require=trace", trace=None).assert_outcomes(failed=1)
    run("--draft-require=trace").assert_outcomes(passed=1)


def test_a_baseline_without_a_figure_is_an_error_and_is_left_alone(run: Runs, pytester: pytest.Pytester) -> None:
    result = run("--draft-baseline=baseline.json", "--draft-update-baseline", trace=None)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR: the baseline was not written: *no accepted length was measured*"])
    assert not (pytester.path / "baseline.json").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--draft-trace=nowhere"], "ERROR: --draft-trace=nowhere: is no file and no directory; give the directory *"),
        (["--draft-tokens=0"], "ERROR: --draft-tokens=0: is not a whole number from 1 to 1024"),
        (["--draft-tokens=many"], "ERROR: --draft-tokens=many: is not a whole number from 1 to 1024"),
        (["--draft-update-baseline"], "ERROR: --draft-update-baseline: says nothing of the file; *"),
        (["--draft-baseline=no.json"], "ERROR: --draft-baseline=no.json: there is no such file; *"),
    ],
)
def test_a_bad_value_is_one_line_and_status_4(run: Runs, options: list[str], line: str) -> None:
    result = run(*options, trace=None)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([line])


def test_two_workers_write_one_baseline(run: Runs, pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    run("-n", "2", "--draft-baseline=baseline.json", "--draft-update-baseline").assert_outcomes(passed=1)
    assert list(baseline.read(pytester.path / "baseline.json")) == ["draft"]
