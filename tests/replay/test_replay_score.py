"""Means, rates, intervals, the baseline, and the walks that leave positions out.

What goes wrong without this file: an interval that is too narrow to be believed, a mean that counts the bonus token twice or a round that
was cut short, a baseline of another trace that judges this one, a sampled walk that is taken for the whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pytest_specdecode.errors import DraftError
from pytest_specdecode.replay import baseline, score, wilson
from pytest_specdecode.replay.baseline import Entry
from pytest_specdecode.replay.drafting import Drafter, Drafting
from pytest_specdecode.replay.run import _Walk
from pytest_specdecode.replay.traces import Recording
from pytest_specdecode.replay.truth import Truth, known


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe 1998, table I, method 3 (Wilson's score without correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # By symmetry.
        (20, 20, 0.8389, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_a_score_by_hand() -> None:
    """Rounds of 3 tokens, of which 0, 1, 3 and 0 were kept: mean 1, deviation sqrt(6 / 3)."""
    found = score([0, 1, 3, 0], 3)
    assert (found.rounds, found.mean_accepted, found.accepted_length) == (4, 1.0, 2.0)
    assert [(item.position, item.accepted, item.rate) for item in found.positions] == [
        (1, 2, 0.5),
        (2, 1, 0.25),
        (3, 1, 0.25),
    ]
    assert found.high == pytest.approx(1 + 1.96 * 2**0.5 / 2, abs=1e-3)
    assert found.low == 0.0
    assert json.loads(json.dumps(found.to_dict()))["accepted_length"] == 2.0


def test_no_rounds_say_nothing() -> None:
    assert (score([], 4).low, score([], 4).high) == (0.0, 4.0)


def test_the_baseline_keeps_other_drafts(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    one = Entry(accepted_length=2.75, rounds=10, draft_tokens=4, trace="a")
    baseline.update(file, {"one": one})
    baseline.update(file, {"two": Entry(accepted_length=1.5, rounds=3, draft_tokens=7, trace="b")})
    found = baseline.read(file)
    assert sorted(found) == ["one", "two"]
    assert found["one"] == one


@pytest.mark.parametrize(
    "text", ["{}", '{"schema": 1}', '{"schema": 1, "drafts": {"x": {"accepted_length": "2"}}}', "[]", ""]
)
def test_what_is_no_baseline_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(DraftError, match=r"baseline\.json"):
        baseline.read(file)


class Scripted(Drafter):
    """Proposes what makes the target keep `kept[p]` tokens behind position p, and counts what it is asked."""

    def __init__(self, kept: list[int], due: torch.Tensor) -> None:
        self.kept, self.due, self.asked = torch.tensor(kept), due, 0

    def begin(self, starts: torch.Tensor, count: int) -> Drafting:
        self.asked += len(starts)
        return _ScriptedDrafting(self, starts)


class _ScriptedDrafting(Drafting):
    def __init__(self, drafter: Scripted, starts: torch.Tensor) -> None:
        self.drafter, self.starts, self.place = drafter, starts, 0

    def next(self) -> torch.Tensor:
        self.place += 1
        right = self.drafter.due[(self.starts + self.place).clamp(max=len(self.drafter.due) - 1)]
        return torch.where(self.place <= self.drafter.kept[self.starts], right, -1)

    def keep(self, live: torch.Tensor) -> None:
        self.starts = self.starts[live]


def text(length: int, mask: list[int] | None = None) -> tuple[Recording, Truth]:
    own = torch.ones(length).bool() if mask is None else torch.tensor(mask).bool()
    found = Recording(
        name="x",
        tokens=torch.arange(length),
        states=torch.zeros(length, 0, 1),
        boundaries=(),
        last=None,
        last_is_normed=False,
        own=own,
        own_by="loss mask",
    )
    return found, known(found, None)


def test_the_next_round_starts_behind_the_bonus_token() -> None:
    recording, truth = text(12)
    walk = _Walk(Scripted([0, 2, 9, 9, 0, 3, 9, 9, 9, 9, 9, 9], truth.due), truth, 3, 1e9, None)
    file, every = walk.result(recording)
    assert [(item.start, item.accepted, item.whole) for item in file.rounds] == [
        (1, 2, True),
        (4, 0, True),
        (5, 3, True),
        (9, 2, False),
    ]
    assert file.served.mean_accepted == pytest.approx(5 / 3)
    assert every == [2, 3, 3, 0, 3, 3, 3, 3]


def test_each_run_of_own_tokens_is_walked_by_itself() -> None:
    recording, truth = text(10, [0, 0, 1, 1, 1, 0, 1, 1, 1, 1])
    file, _ = _Walk(Scripted([9] * 10, truth.due), truth, 1, 1e9, None).result(recording)
    assert [(item.start, item.accepted) for item in file.rounds] == [(2, 1), (6, 1), (8, 1)]


@pytest.mark.parametrize("seed", range(6))
def test_walking_side_by_side_gives_the_served_rounds_for_less_work(seed: int) -> None:
    """The walks out of all pieces meet; the one from the beginning is the served one."""
    chance = torch.Generator().manual_seed(seed)
    length = 3000
    kept = torch.randint(0, 6, (length,), generator=chance).tolist()
    mask = (torch.rand(length, generator=chance) > 0.002).int().tolist()
    recording, truth = text(length, mask)
    whole, _ = _Walk(Scripted(kept, truth.due), truth, 5, 1e9, None).result(recording)
    drafter = Scripted(kept, truth.due)
    file, every = _Walk(drafter, truth, 5, length - 1000, None).result(recording)
    assert file.rounds == whole.rounds
    assert not file.sampled
    assert every is None
    assert drafter.asked < 1.25 * len(whole.rounds)


def test_too_long_a_text_is_sampled_and_says_so() -> None:
    chance = torch.Generator().manual_seed(0)
    length = 4000
    kept = torch.randint(0, 6, (length,), generator=chance).tolist()
    recording, truth = text(length)
    whole, _ = _Walk(Scripted(kept, truth.due), truth, 5, 1e9, None).result(recording)
    drafter = Scripted(kept, truth.due)
    file, every = _Walk(drafter, truth, 5, 400, None).result(recording)
    assert file.sampled
    assert every is None
    assert 300 < drafter.asked <= 400
    assert file.served.low <= whole.served.mean_accepted <= file.served.high
    # All over the text, and not its beginning alone.
    assert file.rounds[0].start < 50
    assert file.rounds[-1].start > 3800
