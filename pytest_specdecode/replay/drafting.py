"""What every way of drafting has in common: many starts at once, one more token of each at a time.

A start is a position p of a recording: its token is the last that was accepted, the states before it are known, and the draft proposes the
tokens behind it. Those whose proposal the target keeps go on; the rest are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError
from pytest_specdecode.replay.traces import Recording, TraceError, boundaries
from pytest_specdecode.replay.weights import Weights
from pytest_specdecode.spec import DraftSpec


class Drafting(ABC):
    """Drafts under way."""

    @abstractmethod
    def next(self) -> Tensor:
        """The next token of every draft that goes on, a target id each: int64 [live]."""

    @abstractmethod
    def keep(self, live: Tensor) -> None:
        """Go on with the drafts that `live` (bool [live]) names; each of them is continued with the token that it proposed."""


class Drafter(ABC):
    """A draft over one recording.

    Attributes:
        together: starts that are drafted in one call, so that what is held stays bounded.
    """

    together: int = 1024

    @abstractmethod
    def begin(self, starts: Tensor, count: int) -> Drafting:
        """Drafts of `count` tokens behind each of `starts`, int64 [S], each at least 1."""

    def draft(self, starts: Tensor, count: int) -> Tensor:
        """The tokens that are proposed whatever becomes of them, int64 [S, count]."""
        found = []
        for part in torch.split(starts, self.together):
            drafting = self.begin(part, count)
            found.append(torch.stack([drafting.next() for _ in range(count)], dim=1))
        return torch.cat(found)

    def accepted(self, starts: Tensor, count: int, due: Tensor, limits: Tensor) -> Tensor:
        """How many of `count` tokens drafted behind each of `starts` the target keeps, int64 [S].

        Args:
            starts: int64 [S].
            count: tokens drafted.
            due: int64 [T], the target's choice at each position.
            limits: int64 [T], how far behind each position that is known.
        """
        return torch.cat([self._accepted(part, count, due, limits) for part in torch.split(starts, self.together)])

    def _accepted(self, starts: Tensor, count: int, due: Tensor, limits: Tensor) -> Tensor:
        found = torch.zeros_like(starts)
        live = torch.arange(len(starts))
        drafting = self.begin(starts, count)
        for place in range(1, count + 1):
            tokens = drafting.next().cpu()
            at = starts[live]
            going = limits[at] >= place
            going &= due[(at + place).clamp(max=len(due) - 1)] == tokens
            live = live[going]
            found[live] = place
            if not len(live) or place == count:
                break
            drafting.keep(going)
        return found


def taps_of(recording: Recording, spec: DraftSpec, weights: Weights) -> Tensor:
    """The states [T, K, Ht] that the draft taps as `spec` reads its ids, in the arithmetic's dtype.

    Beside what the recording holds, the target's embedding stands for the state that enters layer 0, and the last state for the one that
    enters no layer any more.

    Raises:
        TraceError: a state that `spec` taps is not there.
    """
    wanted = boundaries(spec.taps)
    if wanted is None or recording.boundaries is None:
        states = recording.states
        if states.shape[1] != spec.taps.count:
            message = f"holds {states.shape[1]} states a token; {spec.taps.count} are tapped"
            raise TraceError(message, path=recording.name, key="hidden_states")
        return states.to(weights.device, weights.dtype)
    if wanted == recording.boundaries:
        return recording.states.to(weights.device, weights.dtype)
    return torch.stack([_state(recording, id, spec, weights) for id in wanted], dim=1)


def last_of(recording: Recording, weights: Weights) -> Tensor:
    """The states [T, Ht] that the target's head reads, in the arithmetic's dtype.

    Raises:
        TraceError: the recording has no last state. TargetMissingError: it is not normed, and the target's norm is not at hand.
    """
    if recording.last is None:
        raise TraceError(
            "holds no last state, which this draft reads",
            path=recording.name,
            key="hidden_states",
            due="[T, K + 1, Ht]",
        )
    last = recording.last.to(weights.device, weights.dtype)
    return last if recording.last_is_normed else weights.normed(last)


def mask_token(spec: DraftSpec) -> int:
    """The id that stands for tokens to be drafted."""
    token = None if spec.block is None else spec.block.mask_token_id
    if token is None:
        raise DraftError("is not stated; nothing can be drafted without it", key="mask_token_id")
    return token


def _state(recording: Recording, id: int, spec: DraftSpec, weights: Weights) -> Tensor:
    assert recording.boundaries is not None
    if id in recording.boundaries:
        return recording.states[:, recording.boundaries.index(id)].to(weights.device, weights.dtype)
    if id == 0 and (rows := weights.entering_first_layer(recording.tokens)) is not None:
        return rows
    if id == spec.taps.num_target_layers and recording.last is not None:
        return recording.last.to(weights.device, weights.dtype)
    raise TraceError(
        f"the state that enters layer {id} is not recorded; those of {list(recording.boundaries)} are",
        path=recording.name,
        key="hidden_states",
        got=list(recording.boundaries),
        due=id,
    )
