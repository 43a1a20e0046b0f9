"""From accepted tokens to figures: means with and without the target's own token, rates per draft position, and how sure they are.

A *round* is one draft and its verification: n of the N drafted tokens are kept, and the target adds one of its own. Engines report the mean
of n + 1 as accepted length; papers and other engines the mean of n. Both are here.

Rounds are counted in two ways. *Served* ones follow each other as in serving: the next starts behind the token that the target added.
*Every* position as a start gives many more of them from the same text, for comparing drafts and readings. A round so near to the end of
what is known that fewer than N tokens can be compared is left out of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Two-sided 95 %.
Z = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class PositionScore:
    """How often the k-th drafted token is kept, which takes all before it to be kept as well.

    Attributes:
        position: k, from 1.
        accepted, rounds: counts.
        low, high: Wilson's 95 % interval of the rate.
    """

    position: int
    accepted: int
    rounds: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """Accepted of all rounds."""
        return self.accepted / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "position": self.position,
            "accepted": self.accepted,
            "rounds": self.rounds,
            "rate": self.rate,
            "low": self.low,
            "high": self.high,
        }


@dataclass(frozen=True, kw_only=True)
class Score:
    """Rounds taken together.

    Attributes:
        rounds: how many.
        mean_accepted: drafted tokens kept a round.
        low, high: 95 % interval of that mean, from the rounds' spread.
        positions: one entry per draft position.
    """

    rounds: int
    mean_accepted: float
    low: float
    high: float
    positions: tuple[PositionScore, ...]

    @property
    def accepted_length(self) -> float:
        """Tokens a round with the target's own among them."""
        return self.mean_accepted + 1.0

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "rounds": self.rounds,
            "accepted_length": self.accepted_length,
            "accepted_length_low": self.low + 1.0,
            "accepted_length_high": self.high + 1.0,
            "mean_accepted": self.mean_accepted,
            "positions": [position.to_dict() for position in self.positions],
        }


@dataclass(frozen=True, kw_only=True)
class Round:
    """One served draft.

    Attributes:
        start: position of the last accepted token before it.
        accepted: drafted tokens that were kept.
        whole: whether all of the drafted tokens could be compared.
    """

    start: int
    accepted: int
    whole: bool


@dataclass(frozen=True, kw_only=True)
class FileScore:
    """One recording.

    Attributes:
        file: its name.
        tokens: in it.
        counted: of them, those that are the target's own.
        basis: how that is known.
        rounds: the served rounds, in order.
        served: their score.
        every: the score with every position as a start, or None where that was too much work.
        sampled: whether the served rounds are windows of the text rather than all of it.
        confirmed: see `Truth`.
    """

    file: str
    tokens: int
    counted: int
    basis: str
    rounds: tuple[Round, ...]
    served: Score
    every: Score | None
    sampled: bool
    confirmed: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "file": self.file,
            "tokens": self.tokens,
            "counted": self.counted,
            "basis": self.basis,
            "sampled": self.sampled,
            "confirmed": self.confirmed,
            "served": self.served.to_dict(),
            "every": None if self.every is None else self.every.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What a draft would have been served at, on a trace.

    Attributes:
        draft: the draft's name.
        family: its family.
        draft_tokens: N, tokens drafted a round.
        dtype: of the arithmetic.
        files: one score per recording.
        served, every: over all of them.
        fingerprint: of the recorded tokens, to tell one trace from another.
    """

    draft: str
    family: str
    draft_tokens: int
    dtype: str
    files: tuple[FileScore, ...]
    served: Score
    every: Score | None
    fingerprint: str

    @property
    def accepted_length(self) -> float:
        """Served tokens a round, the target's own among them."""
        return self.served.accepted_length

    @property
    def is_served_figure(self) -> bool:
        """Whether every recording says, or showed, which tokens are the target's own; else it is agreement with a text."""
        return all(file.basis != "recorded text" for file in self.files)

    @property
    def label(self) -> str:
        """What the figures are."""
        return "accepted length" if self.is_served_figure else "agreement with the recorded text"

    @property
    def tokens(self) -> int:
        """Tokens of the trace."""
        return sum(file.tokens for file in self.files)

    def __str__(self) -> str:
        served, files = self.served, len(self.files)
        sampled = ", sampled" if any(file.sampled for file in self.files) else ""
        return (
            f"{self.label} {served.accepted_length:.2f} ({served.low + 1:.2f} to {served.high + 1:.2f}), {served.mean_accepted:.2f} "
            f"without the target's own token, over {served.rounds} rounds of {self.draft_tokens} tokens{sampled}; {self.tokens} tokens "
            f"in {files} file{'s' * (files != 1)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "label": self.label,
            "draft_tokens": self.draft_tokens,
            "dtype": self.dtype,
            "accepted_length": self.accepted_length,
            "served": self.served.to_dict(),
            "every": None if self.every is None else self.every.to_dict(),
            "trace": {"fingerprint": self.fingerprint, "tokens": self.tokens, "files": len(self.files)},
            "files": [file.to_dict() for file in self.files],
        }


def score(accepted: Sequence[int], count: int) -> Score:
    """The score of rounds of `count` tokens each, of which `accepted` were kept; all zeros where there are none."""
    rounds = len(accepted)
    if not rounds:
        return Score(rounds=0, mean_accepted=0.0, low=0.0, high=float(count), positions=())
    mean = sum(accepted) / rounds
    spread = math.sqrt(sum((value - mean) ** 2 for value in accepted) / (rounds - 1)) if rounds > 1 else float(count)
    reach = Z * spread / math.sqrt(rounds)
    kept = [sum(value >= place for value in accepted) for place in range(1, count + 1)]
    positions = []
    for place, number in enumerate(kept, start=1):
        low, high = wilson(number, rounds)
        positions.append(PositionScore(position=place, accepted=number, rounds=rounds, low=low, high=high))
    return Score(
        rounds=rounds,
        mean_accepted=mean,
        low=max(0.0, mean - reach),
        high=min(float(count), mean + reach),
        positions=tuple(positions),
    )


def wilson(successes: int, trials: int, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a rate (Wilson 1927); 0 to 1 where nothing was tried."""
    if not trials:
        return 0.0, 1.0
    rate, weight = successes / trials, z * z / trials
    middle = (rate + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(rate * (1 - rate) / trials + weight / (4 * trials))
    # At 0 and at 1 the interval ends there; rounding must not keep it from doing so.
    return (0.0 if successes == 0 else middle - reach), (1.0 if successes == trials else middle + reach)
