"""A replay: a draft, read as a spec says, over a trace.

With the recorded states at hand, the draft's context is the served one at every position, whatever was drafted before: only tokens that the
target would have chosen itself are ever kept. So the positions are independent, are drafted in batches, and the served accepted length is
a walk over what they gave.

The same reading of a checkpoint gives the same figures; another reading is another `DraftSpec`, made by `dataclasses.replace`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, NoReferenceError
from pytest_specdecode.families import Draft
from pytest_specdecode.replay.blocks import BlockModel, block_tokens
from pytest_specdecode.replay.chains import Eagle1Model, Eagle3Model, MTPModel, PEagleModel
from pytest_specdecode.replay.drafting import Drafter
from pytest_specdecode.replay.score import FileScore, ReplayResult, Round, score
from pytest_specdecode.replay.target_weights import TargetMissingError, TargetWeights
from pytest_specdecode.replay.traces import NothingCountedError, Recording, Trace
from pytest_specdecode.replay.truth import Truth, known
from pytest_specdecode.replay.weights import Weights
from pytest_specdecode.spec import DraftSpec

Progress = Callable[[str], None]

#: Tokens that a chain drafts where nothing is stated.
CHAIN_TOKENS = 4
#: Operations that a replay may take before it leaves positions out: two to three minutes on two cores, and every served round of a draft
#: of five layers for an 8 B target over 4,096 tokens that is accepted at 3.5 or more.
MOST_OPERATIONS = 4.0e13
#: Parameters above which the arithmetic is the stored dtype's, as it is served, and not float32.
_SINGLE_LIMIT = 300_000_000
#: Walks that run side by side where not every position is drafted from.
_LANES = 64


class Model(Protocol):
    """A draft, read as a spec says, apart from any recording."""

    def read(self, recording: Recording) -> Drafter:
        """The draft over one recording."""


_CHAINS: dict[str, Callable[[Draft, DraftSpec, Weights], Model]] = {
    "eagle1": Eagle1Model,
    "eagle3": Eagle3Model,
    "eagle3-mla": Eagle3Model,
    "peagle": PEagleModel,
    "mtp": MTPModel,
}
_BLOCKS = ("dflash", "dflash2", "dflare", "domino", "dspark")


class Replayer:
    """Replays one draft, in any reading of it.

    Attributes:
        draft: the draft.
        weights: what it computes with, shared by all readings.
        target: its target's weights, or None.

    Args:
        draft: an opened draft.
        target: its target's weights, for what it shares with it.
        dtype: of the arithmetic; float32 where None, or for a large draft the stored one.
        device: where it runs.

    Raises:
        NoReferenceError: there is no replay of such a draft here.
    """

    def __init__(
        self,
        draft: Draft,
        target: TargetWeights | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        spec = draft.spec
        if spec is None or draft.binding is None:
            raise DraftError("the draft's family is not known", path=draft.path)
        if spec.family not in (*_CHAINS, *_BLOCKS):
            raise NoReferenceError(f"a replay of {spec.family} drafts is not written")
        if draft.binding.storage.scheme.method is not None and getattr(spec.options, "fp8_block", None) is None:
            raise NoReferenceError("the weights are quantised, and a replay needs plain ones")
        if target is None and spec.packaging == "embedded":
            # What such a draft shares lies in the same directory.
            target = TargetWeights(draft.path)
        self.draft, self.target = draft, target
        self.weights = Weights(draft, target, dtype=dtype or _dtype(draft), device=device)

    @property
    def spec(self) -> DraftSpec:
        """The declared reading."""
        assert self.draft.spec is not None
        return self.draft.spec

    @torch.no_grad()
    def model(self, spec: DraftSpec | None = None) -> Model:
        """The draft as `spec` reads it, as declared where None; the tensors are not read again.

        Raises:
            LayerBuildError: the tensors do not allow that reading.
        """
        spec = spec or self.spec
        kind = _CHAINS.get(spec.family)
        return BlockModel(self.draft, spec, self.weights) if kind is None else kind(self.draft, spec, self.weights)

    def tokens(self, draft_tokens: int | None = None) -> int:
        """N: as asked for, else what the file states, else what a block of its size drafts, or `CHAIN_TOKENS`."""
        if draft_tokens is not None:
            return draft_tokens
        spec = self.spec
        if spec.family in _BLOCKS:
            return block_tokens(spec, self._from_anchor)
        # Prediction layers in turn draft a token each.
        in_turn = len(spec.layers) if spec.family == "mtp" and len(spec.layers) > 1 else None
        return _proposed(self.draft) or in_turn or CHAIN_TOKENS

    def most_tokens(self) -> int | None:
        """The most tokens that the draft was trained to propose in a round; None where nothing bounds it, or it is not stated."""
        size = None if self.spec.block is None else self.spec.block.block_size
        if size is None or self.spec.family not in _BLOCKS:
            return None
        return (size if self._from_anchor else size - 1) or None

    @property
    def _from_anchor(self) -> bool:
        stated = None if self.spec.block is None else self.spec.block.sample_from_anchor
        return stated is not False if self.spec.family == "dspark" else bool(stated)

    @torch.no_grad()
    def truth(self, recording: Recording) -> Truth:
        """Which tokens of `recording` are the target's, and what it chooses."""
        head = None
        if self.target is not None:
            normed = recording.last_is_normed

            def head(last: Tensor) -> Tensor:
                return self.weights.greedy(last, is_normed=normed)

        try:
            return known(recording, head)
        except TargetMissingError:
            if recording.own is None:
                raise
            return known(recording, None)

    @torch.no_grad()
    def accepted(
        self, model: Model, recording: Recording, starts: Sequence[int] | Tensor, count: int, truth: Truth
    ) -> Tensor:
        """How many of `count` tokens drafted behind each of `starts` the target keeps, int64 [S]."""
        places = torch.as_tensor(starts, dtype=torch.int64)
        return model.read(recording).accepted(places, count, truth.due, truth.limits)


@torch.no_grad()
def replay(
    draft: Draft,
    trace: Trace,
    *,
    target: TargetWeights | None = None,
    spec: DraftSpec | None = None,
    draft_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    most_operations: float = MOST_OPERATIONS,
    progress: Progress | None = None,
) -> ReplayResult:
    """The accepted length of `draft` over `trace`.

    Args:
        draft: an opened draft.
        trace: recorded from its target.
        target: the target's weights, for what the draft shares with it and for telling which recorded tokens are its own.
        spec: another reading of the draft; the declared one where None.
        draft_tokens: drafted a round; see `Replayer.tokens`.
        dtype, device: see `Replayer`.
        most_operations: work beyond which positions are left out: first those that no served round starts from, then part of the text.
        progress: told now and then how far it is.

    Raises:
        TraceError: a recording does not fit the draft; NothingCountedError where no recording has a round that can be counted.
        TargetMissingError: the draft shares a tensor with a target that was not given.
        LayerBuildError: the draft, read so, cannot be built; NoReferenceError where there is no replay of its family.
    """
    replayer = Replayer(draft, target, dtype=dtype, device=device)
    count = replayer.tokens(draft_tokens)
    model = replayer.model(spec)
    digest, files = hashlib.sha256(), []
    every: list[int] | None = []
    share = most_operations / len(trace.files)
    for place, file in enumerate(trace.files):
        recording = trace.read(file, replayer.spec)
        digest.update(recording.tokens.numpy().tobytes())
        truth = replayer.truth(recording)
        note = None if progress is None else _within(progress, f"{file.name} ({place + 1} of {len(trace.files)})")
        found = _Walk(model.read(recording), truth, count, share / operations(replayer, count), note)
        score_of, counts = found.result(recording)
        files.append(score_of)
        every = None if every is None or counts is None else every + counts
    rounds = [item.accepted for file in files for item in file.rounds if item.whole]
    if not rounds:
        raise NothingCountedError(
            f"no stretch of {count + 1} tokens that are the target's own; nothing can be counted in rounds of {count}",
            path=trace.path,
        )
    return ReplayResult(
        draft=draft.name,
        family=replayer.spec.family,
        draft_tokens=count,
        dtype=str(replayer.weights.dtype).removeprefix("torch."),
        files=tuple(files),
        served=score(rounds, count),
        every=None if every is None else score(every, count),
        fingerprint=digest.hexdigest()[:16],
    )


class _Walk:
    """The rounds of one recording, and the positions that they were drafted from."""

    def __init__(self, drafter: Drafter, truth: Truth, count: int, most: float, progress: Progress | None) -> None:
        self.drafter, self.truth, self.count, self.progress = drafter, truth, count, progress
        self.limits = truth.limits.tolist()
        self.anchors = [place for place, limit in enumerate(self.limits) if limit and place]
        self.most = most
        self.accepted: dict[int, int] = {}

    def result(self, recording: Recording) -> tuple[FileScore, list[int] | None]:
        """The recording's score, and the accepted tokens of every whole start where every one was drafted from."""
        count = self.count
        whole = len(self.anchors) <= self.most
        sampled = False
        if whole:
            self._fill(self.anchors)
            rounds = list(self._rounds())
        else:
            sampled = not self._side_by_side()
            rounds = self._kept_rounds() if sampled else list(self._rounds())
        every = [self.accepted[place] for place in self.anchors if self.limits[place] >= count] if whole else None
        return (
            FileScore(
                file=recording.name,
                tokens=len(recording.tokens),
                counted=int(self.truth.follows.sum()),
                basis=self.truth.basis,
                confirmed=self.truth.confirmed,
                rounds=tuple(rounds),
                served=score([item.accepted for item in rounds if item.whole], count),
                every=None if every is None else score(every, count),
                sampled=sampled,
            ),
            every,
        )

    def _rounds(self) -> Iterator[Round]:
        """The served rounds of each run of tokens: the next starts behind the token that the target added."""
        for start, end in self.truth.spans():
            place = max(1, start)
            while place < end and self.limits[place]:
                self._fill([place])
                yield self._round(place)
                place += self.accepted[place] + 1

    def _side_by_side(self) -> bool:
        """Walk many pieces of the text at once, until all are done or the work is spent; whether all are done.

        A walk that comes out of its piece goes on until it meets where another has been: from there they are one.
        """
        at = list(self._pieces())
        while at:
            if len(self.accepted) + len(set(at)) > self.most and self.accepted:
                return False
            self._fill(at)
            following = [(place, place + self.accepted[place] + 1) for place in at]
            at = [
                after
                for place, after in following
                if after not in self.accepted
                and after < len(self.limits)
                and self.limits[after]
                and self._same_run(place, after)
            ]
        return True

    def _pieces(self) -> Iterator[int]:
        """Where each walk starts."""
        size = max(4 * self.count, -(-len(self.anchors) // _LANES))
        for start, end in self.truth.spans():
            yield from (place for place in range(max(1, start), end, size) if self.limits[place])

    def _same_run(self, place: int, other: int) -> bool:
        return bool(self.truth.follows[place : other + 1].all())

    def _kept_rounds(self) -> list[Round]:
        return [self._round(place) for place in sorted(self.accepted)]

    def _round(self, place: int) -> Round:
        return Round(start=place, accepted=self.accepted[place], whole=self.limits[place] >= self.count)

    def _fill(self, places: Sequence[int]) -> None:
        """Draft from those of `places` that were not drafted from yet."""
        missing = sorted({place for place in places if place not in self.accepted})
        step = self.drafter.together
        for begin in range(0, len(missing), step):
            part = missing[begin : begin + step]
            starts = torch.tensor(part)
            kept = self.drafter.accepted(starts, self.count, self.truth.due, self.truth.limits)
            self.accepted.update(zip(part, kept.tolist(), strict=True))
            if self.progress is not None:
                self.progress(f"{len(self.accepted)} positions of at most {len(self.anchors)}")


def _within(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")


def operations(replayer: Replayer, count: int) -> float:
    """About how many operations one start takes: two for each weight of the layers that a row passes."""
    binding = replayer.draft.binding
    stored = {} if binding is None else binding.stored
    headers = [
        replayer.draft.checkpoint.tensors[name] for canonical, name in stored.items() if canonical.startswith("layers.")
    ]
    weights = sum(header.numel for header in headers if header.is_float)
    # A chain's rows go on only while the target keeps them; a block's all pass the layers.
    rows = 2 if replayer.spec.family in _CHAINS and replayer.spec.family != "peagle" else count + 1
    return 2.0 * max(1, weights) * rows


def _dtype(draft: Draft) -> torch.dtype:
    """float32, or for a large draft the dtype that most of its weights are stored in."""
    sizes: dict[str, int] = {}
    for header in draft.checkpoint.tensors.values():
        sizes[header.dtype] = sizes.get(header.dtype, 0) + header.numel
    stored = [name for name in ("bfloat16", "float16", "float32") if name in sizes]
    most = max(stored, key=lambda name: sizes[name], default="float32")
    dtype: torch.dtype = getattr(torch, most) if draft.checkpoint.num_parameters > _SINGLE_LIMIT else torch.float32
    return dtype


def _proposed(draft: Draft) -> int | None:
    """Tokens a round as speculators' files state them."""
    stated: Any = draft.checkpoint.config.get("speculators_config")
    methods = stated.get("proposal_methods") if isinstance(stated, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else None
