"""Drafts of whole blocks: DFlash and its relatives, and DSpark.

The block behind the last accepted token p holds that token and masks, at positions p, p + 1, …; the context is the fused taps of positions
0 … p - 1, whose K and V are computed once for the whole recording, by the stacked path where the draft has one. A block's rows look at one
another, so that its length matters: it is `block_size`, or, where another number of tokens is asked for, as long as that number needs.
What turns rows into tokens goes row by row, for it may read what was drafted before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, FusedKVError, LayerBuildError, NoReferenceError
from pytest_specdecode.families import Draft
from pytest_specdecode.layers import MLAAttention
from pytest_specdecode.replay.attention import BlockAttention, ContextKV, expand
from pytest_specdecode.replay.drafting import Drafter, Drafting, mask_token, taps_of
from pytest_specdecode.replay.traces import Recording, boundaries
from pytest_specdecode.replay.truth import best
from pytest_specdecode.replay.weights import Weights
from pytest_specdecode.spec import DraftSpec

#: Rows of blocks that go through the layers together.
_ROWS = 2048


class BlockModel:
    """A block draft, apart from any recording.

    Attributes:
        spec: how it is read.
        weights: what it computes with.
        model: the family's backbone; its layers' attention knows many starts.
        from_anchor: whether the anchor's row drafts already.
        images: the target id of each draft id, or None.
    """

    def __init__(self, draft: Draft, spec: DraftSpec, weights: Weights) -> None:
        family: Any = draft.family
        if getattr(spec.options, "stage", None) is not None:
            raise NoReferenceError("a replay of DeepSeek-V4 stages, whose states are parallel streams, is not written")
        if spec.family == "xpress":
            raise NoReferenceError("a replay of XPress, which refines a block in rounds, is not written")
        if not spec.layers:
            raise LayerBuildError("states no usable number of layers", path=draft.path, key=spec.layer_key)
        self.spec, self.weights = spec, weights
        self.mask_token = mask_token(spec)
        self.images = weights.images(spec)
        with draft.naming():
            self.model = family.build_model(spec, weights)
            self.head: Any = family.build_head(spec, weights) if spec.family in _HEADS else None
        self.stacked = self._stack(family.fused_kv_reason(spec))
        for layer in self.model.layers:
            layer.attention = BlockAttention(layer)
        stated = None if spec.block is None else spec.block.sample_from_anchor
        self.from_anchor = stated is not False if spec.family == "dspark" else bool(stated)

    def read(self, recording: Recording) -> Drafter:
        """The draft over one recording."""
        return BlockDrafter(self, recording)

    def context(self, recording: Recording) -> Tensor:
        """The fused taps of every position, [T, H] (or per layer, [T, L, H])."""
        variant = None if self.spec.block is None else self.spec.block.variant
        fc_norm = getattr(self.spec.options, "fc_norm", False)
        key = ("fused taps", boundaries(self.spec.taps), variant, fc_norm, self.weights.dtype)
        fused: Tensor = recording.once(key, lambda: self.model.context(taps_of(recording, self.spec, self.weights)))
        return fused

    def context_kv(self, context: Tensor) -> list[ContextKV]:
        """K and V of the context, layer by layer."""
        positions = torch.arange(len(context), device=context.device)
        if self.stacked is not None:
            return [ContextKV(k, v) for k, v in zip(*self.stacked.compute(context, positions), strict=True)]
        found = []
        for index, layer in enumerate(self.model.layers):
            rows = self.model.layer_context(context, index)
            if isinstance(layer.self_attn, MLAAttention):
                found.append(ContextKV(*expand(layer.self_attn, layer.self_attn.latent(rows, positions))))
            else:
                found.append(ContextKV(*layer.context_kv(rows, positions)))
        return found

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of a block's tokens, scaled as the target scales them."""
        scale = 1.0 if self.spec.block is None else self.spec.block.input_embedding_scale
        rows = self.weights.embed(tokens)
        scaled: Tensor = rows if scale == 1.0 else rows * scale
        return scaled

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, Vd] of rows [n, H] behind the final norm, before what was drafted corrects them."""
        if self.spec.family == "dspark":
            found: Tensor = self.head.base_logits(hidden, self.weights.head)
        else:
            found = self.model.logits(hidden, self.weights.head)
        return found

    def image(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return tokens if self.images is None else self.images[tokens]

    def _stack(self, reason: str | None) -> Any:
        """The stacked K/V path as engines build it, in plain torch; None where the layers are no stack."""
        if reason is not None:
            return None
        from pytest_specdecode.fused_kv.path import FusedKV

        first = self.model.layers[0].self_attn
        try:
            return FusedKV(
                self.model.layers,
                first.rotary_emb,
                num_kv_heads=first.num_kv_heads,
                head_dim=first.head_dim,
                device=self.weights.device,
                backend="eager",
            )
        except FusedKVError:
            return None


class BlockDrafter(Drafter):
    """Blocks over one recording.

    Attributes:
        model: the draft.
        contexts: K and V of the recording's rows, layer by layer.
    """

    def __init__(self, model: BlockModel, recording: Recording) -> None:
        self.model = model
        self.tokens = recording.tokens.to(model.weights.device)
        self.contexts = model.context_kv(model.context(recording))
        block = 16 if model.spec.block is None else model.spec.block.block_size or 16
        self.together = max(1, _ROWS // block)

    def begin(self, starts: Tensor, count: int) -> Drafting:
        """One block behind each start."""
        starts = starts.to(self.tokens.device)
        model = self.model
        rows = count + (0 if model.from_anchor else 1)
        positions = starts.unsqueeze(1) + torch.arange(rows, device=starts.device)
        tokens = torch.full_like(positions, model.mask_token)
        anchors = tokens[:, 0] = self.tokens[starts]
        hidden = model.embed(tokens)
        for layer, context in zip(model.model.layers, self.contexts, strict=True):
            hidden = layer.forward(hidden, positions, cache=context)
        hidden = model.model.norm(hidden)
        return _HEADS.get(model.spec.family, Block)(model, hidden, anchors)


class Block(Drafting):
    """Blocks whose rows stand for themselves (DFlash)."""

    def __init__(self, model: BlockModel, hidden: Tensor, anchors: Tensor) -> None:
        self.model, self.hidden, self.last = model, hidden, anchors
        self.row = 0 if model.from_anchor else 1

    def next(self) -> Tensor:
        """The token that the next row drafts."""
        self.last = self.model.image(self.choice(self.hidden[:, self.row]))
        self.row += 1
        return self.last

    def choice(self, hidden: Tensor) -> Tensor:
        """The draft ids [n] that rows [n, H] give."""
        return self.best(hidden)

    def keep(self, live: Tensor) -> None:
        """Drop the others' rows."""
        live = live.to(self.hidden.device)
        self.hidden, self.last = self.hidden[live], self.last[live]

    def best(self, hidden: Tensor, correct: Callable[[Tensor, slice], Tensor] | None = None) -> Tensor:
        """The draft ids with the best logits, each part of them passed through `correct` with the rows that it is about."""
        width, begun = len(self.model.weights.head), 0

        def logits(rows: Tensor) -> Tensor:
            nonlocal begun
            part = slice(begun, begun + len(rows))
            begun += len(rows)
            found = self.model.logits(rows)
            return found if correct is None else correct(found, part)

        return best(logits, hidden, width)


class SelectedBlock(Block):
    """Blocks whose rows choose among their best candidates by the token before (DFlash2)."""

    def choice(self, hidden: Tensor) -> Tensor:
        """The candidate that goes best with the token before."""
        parts = []
        for rows, before in zip(torch.split(hidden, 64), torch.split(self.last, 64), strict=True):
            logits = self.model.logits(rows)
            parts.append(self.model.head(logits.unsqueeze(1), rows.unsqueeze(1), before).squeeze(1))
        return torch.cat(parts)


class MarkovBlock(Block):
    """Blocks whose rows are corrected by the token before (DSpark)."""

    def __init__(self, model: BlockModel, hidden: Tensor, anchors: Tensor) -> None:
        super().__init__(model, hidden, anchors)
        self.state: Tensor | None = None
        markov = model.head.markov
        if markov is not None and not model.from_anchor:
            # A recurrent head has read the anchor's row before the first that drafts.
            _, self.state = markov.step(anchors, hidden[:, 0], None)

    def choice(self, hidden: Tensor) -> Tensor:
        """The best of the corrected logits."""
        markov = self.model.head.markov
        if markov is None:
            return self.best(hidden)
        before, state = self.last, self.state
        states: list[Tensor] = []

        def correct(logits: Tensor, part: slice) -> Tensor:
            bias, new = markov.step(before[part], hidden[part], None if state is None else state[part])
            if new is not None:
                states.append(new)
            corrected: Tensor = logits + bias
            return corrected

        found = self.best(hidden, correct)
        self.state = torch.cat(states) if states else None
        return found

    def keep(self, live: Tensor) -> None:
        """Drop the others' rows and states."""
        super().keep(live)
        self.state = None if self.state is None else self.state[live.to(self.state.device)]


class RecurrentBlock(Block):
    """Blocks whose rows are corrected by a recurrent state over the tokens before (Domino)."""

    def __init__(self, model: BlockModel, hidden: Tensor, anchors: Tensor) -> None:
        super().__init__(model, hidden, anchors)
        gru = model.head.prefix_gru
        self.state = gru.step(model.embed(anchors), hidden.new_zeros(len(anchors), gru.hidden))

    def next(self) -> Tensor:
        """The token that the next row drafts; the state reads it."""
        found = super().next()
        self.state = self.model.head.prefix_gru.step(self.model.embed(found), self.state)
        return found

    def choice(self, hidden: Tensor) -> Tensor:
        """The best of the corrected logits."""
        head, state = self.model.head, self.state
        if self.row < head.suffix_start:
            return self.best(hidden)

        def correct(logits: Tensor, part: slice) -> Tensor:
            both = torch.cat([hidden[part], state[part]], dim=-1)
            corrected: Tensor = logits + head.up(torch.nn.functional.silu(head.down(both)))
            return corrected

        return self.best(hidden, correct)

    def keep(self, live: Tensor) -> None:
        """Drop the others' rows and states."""
        super().keep(live)
        self.state = self.state[live.to(self.state.device)]


#: How rows become tokens, where they do not stand for themselves.
_HEADS: dict[str, type[Block]] = {"dflash2": SelectedBlock, "dspark": MarkovBlock, "domino": RecurrentBlock}


def block_tokens(spec: DraftSpec, from_anchor: bool) -> int:
    """Tokens that a block of the stated size drafts.

    Raises:
        DraftError: no size is stated.
    """
    size = None if spec.block is None else spec.block.block_size
    if size is None or size < (1 if from_anchor else 2):
        raise DraftError(f"is {size}; say how many tokens are drafted: --draft-tokens=N", key="block_size", got=size)
    return size if from_anchor else size - 1
