"""Drafts that go token by token: EAGLE-1, EAGLE3 over heads or a latent, one prediction layer, and P-EAGLE's one pass.

Row i of the context is made of the state at position i and the embedding of token i + 1, and stands at position i. Behind the last accepted
token p the rows 0 … p - 1 are known, and row p - 1 drafts token p + 1. From there on

    a chain     takes the embedding of what it drafted and its own last state, one row a step
    P-EAGLE     takes its mask's embedding and state, all rows in one pass
    several prediction layers in turn: row i of layer k takes the output of row i of layer k - 1 and the embedding of token i + k + 1

So one causal pass over a recording gives the context of every start and the first token of each; only the rows behind it are each start's
own. The layers are the families' reference layers, their attention replaced by one that knows many starts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_specdecode.errors import LayerBuildError, NoReferenceError
from pytest_specdecode.families import Draft
from pytest_specdecode.replay.attention import ChainAttention, ContextKV, OwnKV
from pytest_specdecode.replay.drafting import Drafter, Drafting, last_of, mask_token, taps_of
from pytest_specdecode.replay.traces import Recording, boundaries
from pytest_specdecode.replay.truth import best
from pytest_specdecode.replay.weights import Weights
from pytest_specdecode.spec import DraftSpec

#: Rows of the context that go through the layers together.
_ROWS = 2048


class ChainModel(ABC):
    """A chain draft, apart from any recording.

    Attributes:
        spec: how it is read.
        weights: what it computes with.
        layers: reference layers with `ChainAttention` in them.
        images: the target id of each draft id, or None.
    """

    def __init__(self, draft: Draft, spec: DraftSpec, weights: Weights) -> None:
        self.spec, self.weights = spec, weights
        self.images = weights.images(spec)
        self.layers = tuple(self._layer(draft, index) for index in range(len(spec.layers)))
        if not self.layers:
            raise LayerBuildError("states no usable number of layers", path=draft.path, key=spec.layer_key)

    def read(self, recording: Recording) -> Drafter:
        """The draft over one recording."""
        return ChainDrafter(self, recording)

    @abstractmethod
    def states(self, recording: Recording) -> Tensor:
        """What stands in for the hidden state in each row of the context, [T, H]."""

    def run(self, embeds: Tensor, hidden: Tensor, positions: Tensor, caches: Sequence[ContextKV | OwnKV]) -> Tensor:
        """The last layer's output; shapes as for `ChainAttention`."""
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer.forward(embeds, hidden, positions, cache)
        return hidden

    @abstractmethod
    def recycled(self, out: Tensor) -> Tensor:
        """What the next step takes as its hidden state, of the last layer's output."""

    @abstractmethod
    def read_by_head(self, out: Tensor) -> Tensor:
        """What the head reads, of the last layer's output."""

    def tokens(self, out: Tensor) -> Tensor:
        """The greedy target ids [n] behind the last layer's outputs [n, H]."""
        head = self.weights.head
        found = best(lambda rows: torch.nn.functional.linear(self.read_by_head(rows), head), out, len(head))
        return found if self.images is None else self.images[found]

    def _layer(self, draft: Draft, index: int) -> Any:
        assert draft.family is not None
        with draft.naming(index):
            layer: Any = draft.family.build_layer(self.spec, self.spec.layers[index], self.weights)
        layer.self_attn = ChainAttention(layer.self_attn)
        return layer


class Eagle3Model(ChainModel):
    """EAGLE3, over heads or a latent, and what P-EAGLE shares with it."""

    def __init__(self, draft: Draft, spec: DraftSpec, weights: Weights) -> None:
        super().__init__(draft, spec, weights)
        assert draft.family is not None
        with draft.naming():
            self.head = draft.family.build_head(spec, weights)

    def states(self, recording: Recording) -> Tensor:
        """The fused taps; without `fc`, the state that the target's head reads."""
        flags = self.spec.eagle3
        norms = None if flags is None else (flags.norm_before_fc, flags.fc_norm)
        key = ("fused taps", boundaries(self.spec.taps), norms, self.weights.dtype)
        return recording.once(key, lambda: self._states(recording))

    def recycled(self, out: Tensor) -> Tensor:
        """As the family's head has it."""
        found: Tensor = self.head.recycled(out)
        return found

    def read_by_head(self, out: Tensor) -> Tensor:
        """The normed output."""
        found: Tensor = self.head.norm(out)
        return found

    def _states(self, recording: Recording) -> Tensor:
        if self.head.fc is None:
            return last_of(recording, self.weights)
        found: Tensor = self.head.fuse(taps_of(recording, self.spec, self.weights).flatten(1))
        return found


class PEagleModel(Eagle3Model):
    """P-EAGLE: rows behind the first are masked ones, all of them drafted in one pass."""

    def __init__(self, draft: Draft, spec: DraftSpec, weights: Weights) -> None:
        super().__init__(draft, spec, weights)
        self.masked = self.head.fuse(self.head.mask_hidden)
        self.mask_token = torch.tensor(mask_token(spec))

    def read(self, recording: Recording) -> Drafter:
        """The draft over one recording."""
        return ParallelDrafter(self, recording)


class Eagle1Model(ChainModel):
    """EAGLE-1 and -2: the target's own last state is fused with the embedding in front of plain layers."""

    def __init__(self, draft: Draft, spec: DraftSpec, weights: Weights) -> None:
        super().__init__(draft, spec, weights)
        assert draft.family is not None
        with draft.naming():
            self.head = draft.family.build_head(spec, weights)

    def states(self, recording: Recording) -> Tensor:
        """The state that the target's head reads."""
        return recording.once(("last", self.weights.dtype), lambda: last_of(recording, self.weights))

    def run(self, embeds: Tensor, hidden: Tensor, positions: Tensor, caches: Sequence[ContextKV | OwnKV]) -> Tensor:
        """The output that is recycled."""
        hidden = self.head.fuse(embeds, hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer.forward(hidden, positions, cache)
        found: Tensor = self.head.output(hidden)
        return found

    def recycled(self, out: Tensor) -> Tensor:
        """As it is."""
        return out

    def read_by_head(self, out: Tensor) -> Tensor:
        """As it is."""
        return out


class MTPModel(ChainModel):
    """One prediction layer, run again and again on its own output; or several, each for the token that it was trained for.

    An engine that runs the first of several again and again serves another draft than this one.
    """

    def __init__(self, draft: Draft, spec: DraftSpec, weights: Weights) -> None:
        if spec.layers and getattr(spec.options, "stage", None) is not None:
            raise NoReferenceError("a replay of a DeepSeek-V4 stage, whose states are parallel streams, is not written")
        super().__init__(draft, spec, weights)

    def read(self, recording: Recording) -> Drafter:
        """The draft over one recording."""
        return super().read(recording) if len(self.layers) == 1 else InTurnDrafter(self, recording)

    def states(self, recording: Recording) -> Tensor:
        """The state that the target's head reads, as engines hand it on."""
        return recording.once(("last", self.weights.dtype), lambda: last_of(recording, self.weights))

    def recycled(self, out: Tensor) -> Tensor:
        """As it is: the layer's own norm has closed it, where it has one."""
        return out

    def read_by_head(self, out: Tensor) -> Tensor:
        """As it is, or after the target's norm where the layer has none of its own (ERNIE)."""
        return self.weights.normed(out) if self.layers[0].norm is None else out


class ChainDrafter(Drafter):
    """A chain over one recording.

    Attributes:
        model: the draft.
        contexts: K and V of the recording's rows, layer by layer.
        out: the last layer's output of each row, [T - 1, H].
    """

    def __init__(self, model: ChainModel, recording: Recording) -> None:
        self.model = model
        self.contexts = tuple(ContextKV() for _ in model.layers)
        states = model.states(recording)
        embeds = model.weights.embed(recording.tokens[1:])
        parts = []
        for rows in torch.split(torch.arange(len(recording.tokens) - 1, device=states.device), _ROWS):
            parts.append(model.run(embeds[rows], states[rows], rows, self.contexts))
        self.out = torch.cat(parts)

    def begin(self, starts: Tensor, count: int) -> Drafting:
        """Drafts that recycle their own states."""
        return Chain(self, starts.to(self.out.device))


class Chain(Drafting):
    """Chains under way."""

    def __init__(self, drafter: ChainDrafter, starts: Tensor) -> None:
        self.model, self.at = drafter.model, starts - 1
        self.out = drafter.out[self.at]
        self.caches = [OwnKV(context, starts) for context in drafter.contexts]
        self.last: Tensor | None = None

    def next(self) -> Tensor:
        """The token behind what was drafted before."""
        if self.last is not None:
            self.at = self.at + 1
            embeds, hidden = self.model.weights.embed(self.last), self.model.recycled(self.out)
            out = self.model.run(embeds.unsqueeze(1), hidden.unsqueeze(1), self.at.unsqueeze(1), self.caches)
            self.out = out.squeeze(1)
        self.last = self.model.tokens(self.out)
        return self.last

    def keep(self, live: Tensor) -> None:
        """Drop the others' rows."""
        live = live.to(self.out.device)
        self.at, self.out = self.at[live], self.out[live]
        self.last = None if self.last is None else self.last[live]
        for cache in self.caches:
            cache.keep(live)


class InTurnDrafter(Drafter):
    """Several prediction layers over one recording.

    A draft goes on only where the target keeps its tokens, and then they are those of the recording. So what a layer sees of the tokens
    before it is the recording's own, and one pass of each layer over it holds every draft.

    Attributes:
        model: the draft.
        outs: the output of layer k for rows 0 to T - 2 - k, [T - 1 - k, H] each.
    """

    def __init__(self, model: MTPModel, recording: Recording) -> None:
        self.model = model
        self.outs: list[Tensor] = []
        hidden, tokens = model.states(recording), recording.tokens
        for index, layer in enumerate(model.layers):
            embeds, context = model.weights.embed(tokens[index + 1 :]), ContextKV()
            at = torch.arange(len(embeds), device=hidden.device)
            parts = [layer.forward(embeds[rows], hidden[rows], rows, context) for rows in torch.split(at, _ROWS)]
            hidden = model.recycled(torch.cat(parts)) if parts else hidden[:0]
            self.outs.append(hidden)

    def begin(self, starts: Tensor, count: int) -> Drafting:
        """Drafts that are followed as far as the target keeps them.

        Raises:
            NoReferenceError: there are fewer layers than tokens.
        """
        if count > len(self.outs):
            raise NoReferenceError(
                f"{len(self.outs)} prediction layers draft as many tokens in turn; give --draft-tokens={len(self.outs)} or fewer"
            )
        return InTurn(self, starts.to(self.outs[0].device))

    def draft(self, starts: Tensor, count: int) -> Tensor:
        """Not known: what a layer proposes behind a token that the recording does not hold is not computed."""
        raise NoReferenceError("what several prediction layers propose behind tokens that are not kept is not computed")


class InTurn(Drafting):
    """Drafts of several prediction layers under way."""

    def __init__(self, drafter: InTurnDrafter, starts: Tensor) -> None:
        self.model, self.outs, self.starts, self.place = drafter.model, drafter.outs, starts, 0

    def next(self) -> Tensor:
        """The token that the next layer drafts."""
        out, self.place = self.outs[self.place][self.starts - 1], self.place + 1
        return self.model.tokens(out)

    def keep(self, live: Tensor) -> None:
        """Drop the others."""
        self.starts = self.starts[live.to(self.starts.device)]


class ParallelDrafter(ChainDrafter):
    """P-EAGLE over one recording."""

    model: PEagleModel
    together = 256

    def begin(self, starts: Tensor, count: int) -> Drafting:
        """Drafts whose masked rows go through the layers when the first of them is asked for."""
        return Parallel(self, starts.to(self.out.device), count)


class Parallel(Drafting):
    """P-EAGLE's drafts under way."""

    def __init__(self, drafter: ParallelDrafter, starts: Tensor, count: int) -> None:
        self.drafter, self.model, self.starts, self.count = drafter, drafter.model, starts, count
        self.place = 0
        self.rows: Tensor | None = None

    def next(self) -> Tensor:
        """The first token from the row that knows its state, the others from the masked rows."""
        place, self.place = self.place, self.place + 1
        if place == 0:
            return self.model.tokens(self.drafter.out[self.starts - 1])
        if self.rows is None:
            self.rows = self._masked()
        return self.model.tokens(self.rows[:, place - 1])

    def keep(self, live: Tensor) -> None:
        """Drop the others' rows."""
        live = live.to(self.starts.device)
        self.starts = self.starts[live]
        self.rows = None if self.rows is None else self.rows[live]

    def _masked(self) -> Tensor:
        model, rows = self.model, self.count - 1
        shape = (len(self.starts), rows, -1)
        embeds = model.weights.embed(model.mask_token).expand(shape)
        positions = self.starts.unsqueeze(1) + torch.arange(rows, device=self.starts.device)
        caches = [OwnKV(context, self.starts) for context in self.drafter.contexts]
        return model.run(embeds, model.masked.expand(shape), positions, caches)
