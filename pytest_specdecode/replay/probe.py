"""The probe: which reading of a checkpoint predicts its target best?

A checkpoint that is read otherwise than it was trained loads, runs, and is accepted less. So the trace is replayed as declared and in every
other reading (`readings`), from the same starts. The comparison is paired: where both readings give a token that the target keeps, or
neither does, nothing is learnt; of the other starts, b for the declared reading alone and c for the other alone, each would be either with
probability 1/2 were they equally good:

    p = min(1, 2 * sum over i <= min(b, c) of C(b + c, i) / 2^(b + c))                            (McNemar's exact test)

One drafted token is compared per start, the first in which the readings can differ, so that every token of the target is one trial. The
values of p are corrected for the number of readings (Holm 1979). A reading that is not told apart is said to be so, with how many tokens
would do; it is neither a pass nor a failure.

Only one convention is changed at a time: two that are wrong together show as two better readings, or, where one alone helps nothing, not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2, sqrt
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, NoReferenceError
from pytest_specdecode.replay.readings import OtherReading
from pytest_specdecode.replay.run import Progress, Replayer, operations
from pytest_specdecode.replay.traces import Trace, TraceError
from pytest_specdecode.replay.truth import Truth
from pytest_specdecode.spec import DraftSpec

#: Chance that any reading is called better or worse where all are equally good.
ALPHA = 0.01
#: Chance that a number of tokens said to settle it does.
POWER = 0.8
#: Operations that all readings together may take before starts are left out: about two minutes on two cores.
MOST_OPERATIONS = 2.0e13
#: Difference in rate that is worth settling.
LEAST_DIFFERENCE = 0.01

Verdict = Literal["better", "worse", "open"]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What one reading was accepted at.

    Attributes:
        first: rate of the first drafted token, over every start.
        accepted_length: mean tokens a round with the target's own, or None where no whole round was drafted.
        rounds: that it is the mean of.
    """

    first: float
    accepted_length: float | None
    rounds: int

    def __str__(self) -> str:
        return f"{self.first:.2f} of first tokens" if self.accepted_length is None else f"{self.accepted_length:.2f}"

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {"first": self.first, "accepted_length": self.accepted_length, "rounds": self.rounds}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Another reading against the declared one.

    Attributes:
        reading: the other.
        rate: what it was accepted at.
        compared: starts of which the token is known in which they can differ.
        only_declared, only_other: starts at which the target keeps that token of one of them alone.
        p: exact, two-sided. corrected: for the number of readings.
        verdict: whether the other is better, worse, or not told apart.
        difference: in rate, that `tokens` more or less would settle; None where it is settled.
        tokens: of the target that would settle it, or None.
    """

    reading: OtherReading
    rate: Rate
    compared: int
    only_declared: int
    only_other: int
    p: float
    corrected: float
    verdict: Verdict
    difference: float | None = None
    tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "convention": self.reading.key,
            "reading": self.reading.name,
            "declared": self.reading.declared,
            "verdict": self.verdict,
            **self.rate.to_dict(),
            "draft_position": self.reading.place,
            "compared": self.compared,
            "only_declared": self.only_declared,
            "only_other": self.only_other,
            "p": self.p,
            "p_corrected": self.corrected,
            "settled_by_tokens": self.tokens,
            "settled_difference": self.difference,
        }


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        declared: the declared reading's rate.
        comparisons: the others, in the order of the readings.
        served: rates of further readings that were asked for, by name; None where one cannot be replayed.
        refused: readings that the weights or the trace do not allow, with why.
        tokens: of the trace; starts: drafted from.
        draft_tokens: drafted a round.
        sampled: whether only some of the possible starts were drafted from; lengths are then means over these, not over served rounds.
        label: what the rates are: of acceptance, or of agreement with a recorded text.
    """

    declared: Rate
    comparisons: tuple[Comparison, ...]
    served: Mapping[str, Rate | None]
    refused: Mapping[str, str]
    tokens: int
    starts: int
    draft_tokens: int
    sampled: bool
    label: str

    @property
    def better(self) -> list[Comparison]:
        """Readings that predict the target better than the declared one, the best first."""
        found = [item for item in self.comparisons if item.verdict == "better"]
        return sorted(found, key=lambda item: -(item.rate.accepted_length or item.rate.first))

    @property
    def open(self) -> list[Comparison]:
        """Readings that the trace cannot tell from the declared one."""
        return [item for item in self.comparisons if item.verdict == "open"]

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it."""
        return {
            "label": self.label,
            "draft_tokens": self.draft_tokens,
            "trace": {"tokens": self.tokens, "starts": self.starts, "sampled": self.sampled},
            "alpha": ALPHA,
            "declared": self.declared.to_dict(),
            "readings": [item.to_dict() for item in self.comparisons],
            "refused": dict(self.refused),
        }


@torch.no_grad()
def probe(
    replayer: Replayer,
    trace: Trace,
    others: Sequence[OtherReading],
    *,
    also: Mapping[str, DraftSpec] | None = None,
    draft_tokens: int | None = None,
    most_operations: float = MOST_OPERATIONS,
    progress: Progress | None = None,
) -> ProbeResult:
    """Replay `trace` as declared and in every one of `others`, and compare them.

    Args:
        replayer: of the draft; its weights are read once for all readings.
        trace: recorded from its target.
        others: the readings to be compared with the declared one.
        also: further readings whose rate is wanted and that are not compared, by name.
        draft_tokens: drafted a round; see `Replayer.tokens`.
        most_operations: work beyond which starts are left out, the same ones for all readings.
        progress: told now and then how far it is.

    Raises:
        TraceError: a recording does not fit the draft, or there is nothing to be compared in it.
        TargetMissingError: the draft shares a tensor with a target that was not given.
        LayerBuildError: the draft does not build as declared; NoReferenceError where there is no replay of its family.
    """
    count = replayer.tokens(draft_tokens)
    specs: list[DraftSpec] = []
    names: list[str] = []
    for name, spec in [
        ("declared", replayer.spec),
        *((item.name, item.spec) for item in others),
        *(also or {}).items(),
    ]:
        if spec not in specs:
            specs.append(spec)
            names.append(name)
    most = most_operations / len(trace.files) / len(specs) / operations(replayer, count)
    tallies = [_Tally(count) for _ in specs]
    failed: dict[int, str] = {}
    tokens, starts, sampled, own = 0, 0, False, True
    for file in trace.files:
        recording = trace.read(file, replayer.spec)
        tokens += len(recording.tokens)
        truth = replayer.truth(recording)
        own = own and truth.basis != "recorded text"
        places = _starts(truth, most)
        starts += len(places.chosen)
        sampled = sampled or places.sampled
        if not len(places.chosen):
            continue
        for index, spec in enumerate(specs):
            if index in failed:
                continue
            if progress is not None:
                progress(f"{file.name}: {names[index]}, reading {index + 1} of {len(specs)}")
            try:
                model = replayer.model(spec)
                kept = replayer.accepted(model, recording, places.chosen, count, truth)
            except (DraftError, NoReferenceError, IndexError) as error:
                if index == 0:
                    raise
                # An id that is read otherwise may be none of the embedding's.
                failed[index] = error.brief if isinstance(error, DraftError) else str(error)
                continue
            tallies[index].add(kept, truth, places)
    if not starts:
        raise TraceError("no token of it is the target's own; there is nothing to compare", path=trace.path)
    rates = [None if index in failed else tally.rate(sampled) for index, tally in enumerate(tallies)]
    assert rates[0] is not None
    at = [specs.index(item.spec) for item in others]
    found = [
        (item, rate, tallies[0].against(tallies[index], item.place))
        for item, index in zip(others, at, strict=True)
        if (rate := rates[index]) is not None
    ]
    return ProbeResult(
        declared=rates[0],
        comparisons=_compared(found),
        served={name: rates[specs.index(spec)] for name, spec in (also or {}).items()},
        refused={item.name: failed[index] for item, index in zip(others, at, strict=True) if index in failed},
        tokens=tokens,
        starts=starts,
        draft_tokens=count,
        sampled=sampled,
        label="acceptance" if own else "agreement with the recorded text",
    )


def mcnemar(only_one: int, only_other: int) -> float:
    """McNemar's exact two-sided p of so many pairs that speak for one side alone and for the other alone; 1 without any."""
    pairs = only_one + only_other
    term = total = 1
    for index in range(min(only_one, only_other)):
        term = term * (pairs - index) // (index + 1)
        total += term
    # Whole numbers, divided once: exact however many pairs there are.
    return float(min(1.0, 2 * total / 2**pairs)) if pairs else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """`values` of p, corrected for their number so that the chance of any false one stays what it is for one (Holm 1979)."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    corrected = [1.0] * len(values)
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - place) * values[index]))
        corrected[index] = highest
    return corrected


def settled_by(compared: int, only_one: int, only_other: int, tests: int = 1) -> tuple[int, float]:
    """How many tokens would tell two readings apart, and the difference in rate that they would show.

    With a share d of pairs in which the two differ and a difference e between their rates, McNemar's test at level a has power 1 - b at

        n = (z(1 - a/2) * sqrt(d) + z(1 - b) * sqrt(d - e^2))^2 / e^2           (Connor 1987)

    and never with fewer pairs than all of them on one side need. d is what was observed; so is e, unless it is under `LEAST_DIFFERENCE`,
    which then stands for it. Where the trace is as long as that already, half the difference is asked for, and so on.
    """
    level = ALPHA / max(1, tests)
    normal = NormalDist()
    high, power = normal.inv_cdf(1 - level / 2), normal.inv_cdf(POWER)
    observed = max(1, compared)
    difference = max(abs(only_one - only_other) / observed, LEAST_DIFFERENCE)
    while True:
        share = max((only_one + only_other) / observed, difference)
        due = (high * sqrt(share) + power * sqrt(max(0.0, share - difference**2))) ** 2 / difference**2
        due = max(due, ceil(1 - log2(level)) / share)
        if due > compared:
            return ceil(due), difference
        difference /= 2


def _compared(found: Sequence[tuple[OtherReading, Rate, tuple[int, int, int]]]) -> tuple[Comparison, ...]:
    values = [mcnemar(ours, theirs) for _, _, (_, ours, theirs) in found]
    comparisons = []
    for (reading, rate, (compared, ours, theirs)), p, corrected in zip(found, values, holm(values), strict=True):
        verdict: Verdict = "open" if corrected > ALPHA else "better" if theirs > ours else "worse"
        tokens, difference = settled_by(compared, ours, theirs, len(found)) if verdict == "open" else (None, None)
        comparisons.append(
            Comparison(
                reading=reading,
                rate=rate,
                compared=compared,
                only_declared=ours,
                only_other=theirs,
                p=p,
                corrected=corrected,
                verdict=verdict,
                difference=difference,
                tokens=tokens,
            )
        )
    return tuple(comparisons)


@dataclass(frozen=True)
class _Starts:
    """Where one recording is drafted from.

    Attributes:
        chosen: int64 [S]. limits: int64 [S], of each. sampled: whether some are left out.
    """

    chosen: Tensor
    limits: Tensor
    sampled: bool


class _Tally:
    """What one reading gave, start by start."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.kept: list[Tensor] = []
        self.limits: list[Tensor] = []
        self.served: list[int] = []

    def add(self, kept: Tensor, truth: Truth, places: _Starts) -> None:
        """One recording's accepted tokens."""
        self.kept.append(kept)
        self.limits.append(places.limits)
        if not places.sampled:
            self.served += _served(dict(zip(places.chosen.tolist(), kept.tolist(), strict=True)), truth, self.count)

    def rate(self, sampled: bool) -> Rate:
        """Over all recordings."""
        kept, limits = torch.cat(self.kept), torch.cat(self.limits)
        rounds = kept[limits >= self.count].tolist() if sampled else self.served
        return Rate(
            first=float((kept >= 1).double().mean()),
            accepted_length=1 + sum(rounds) / len(rounds) if rounds else None,
            rounds=len(rounds),
        )

    def against(self, other: _Tally, place: int) -> tuple[int, int, int]:
        """Starts compared in their token `place`, and those of them where it is kept of this one alone, of `other` alone."""
        known = torch.cat(self.limits) >= place
        if place > self.count:
            return 0, 0, 0
        ours, theirs = torch.cat(self.kept)[known] >= place, torch.cat(other.kept)[known] >= place
        return int(known.sum()), int((ours & ~theirs).sum()), int((theirs & ~ours).sum())


def _starts(truth: Truth, most: float) -> _Starts:
    """Every position that can be drafted from, or as many, evenly spread, as `most` allows."""
    limits = truth.limits
    places = limits.nonzero().flatten()
    places = places[places > 0]
    step = max(1, ceil(len(places) / max(1.0, most)))
    chosen = places[::step]
    return _Starts(chosen, limits[chosen], step > 1)


def _served(kept: Mapping[int, int], truth: Truth, count: int) -> list[int]:
    """Accepted tokens of the whole rounds that serving would have drafted, of those of every start."""
    limits = truth.limits.tolist()
    found = []
    for start, end in truth.spans():
        place = max(1, start)
        while place < end and limits[place]:
            if limits[place] >= count:
                found.append(kept[place])
            place += kept[place] + 1
    return found
