"""DSpark's forward: the block layer of each backbone, and the heads that turn its rows into drafted tokens.

Kept apart from the family's data sheet because only this half needs torch. `DSparkHead.draft` is the greedy loop that engines run;
`DSparkHead.block_logits` is the same arithmetic with the tokens before the rows given, as trainers run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, LayerBuildError, NoReferenceError
from pytest_specdecode.families.base import TensorSource
from pytest_specdecode.families.building import (
    build_norm,
    build_projection,
    build_vector_norm,
    prefixed,
    take_named,
)
from pytest_specdecode.families.dflash import DFlashLayer, DFlashModel
from pytest_specdecode.families.dspark import DSparkOptions
from pytest_specdecode.layers import LatentCache, Linear, RMSNorm
from pytest_specdecode.layers.linear import frozen, known, take, take_bias
from pytest_specdecode.spec import DraftSpec, LayerSpec, times


class DSparkLayer(DFlashLayer):
    """One block layer over grouped-query attention, Qwen's or Gemma's; see the formulas in `dspark`.

    Attributes:
        pre_feedforward_layernorm, post_feedforward_layernorm: of a Gemma layer, else None.
        layer_scalar: [1], factor on a Gemma layer's output, or None.
    """

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        options = options_of(spec)
        prefix = f"layers.{layer.index}"
        if options.packed:
            raise NoReferenceError(
                "the weights are packed by MLX, which nothing here unpacks; check the draft before packing it"
            )
        super().__init__(spec, layer, source)
        self.pre_feedforward_layernorm: RMSNorm | None = None
        self.post_feedforward_layernorm: RMSNorm | None = None
        self.layer_scalar: Tensor | None = None
        if options.backbone == "gemma4":
            self.pre_feedforward_layernorm = build_norm(layer, source, f"{prefix}.pre_feedforward_layernorm")
            self.post_feedforward_layernorm = build_norm(layer, source, f"{prefix}.post_feedforward_layernorm")
            self.layer_scalar = frozen(take_named(source, f"{prefix}.layer_scalar", (1,)))

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """The block's new states; arguments as for DFlash's layer."""
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            return super().forward(block, positions, context, context_positions, cache)
        attended = self.attention(self.input_layernorm(block), positions, context, context_positions, cache)
        states: Tensor = block + self.post_attention_layernorm(attended)
        fed: Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
        out = states + fed
        return out if self.layer_scalar is None else out * self.layer_scalar


class LatentBlockLayer(DSparkLayer):
    """The same over latent attention (Kimi K3): the context's latents stand before the block's own."""

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        if source.under(f"layers.{layer.index}.self_attn.attention_sink_bias"):
            raise NoReferenceError("there is no reference forward for latent attention with a learned sink")
        super().__init__(spec, layer, source)

    def attention(
        self,
        states: Tensor,
        positions: Tensor,
        context: Tensor | None,
        context_positions: Tensor | None,
        cache: Any,
    ) -> Tensor:
        """The attention's output for normed `states`; `cache` is a LatentCache and is left as it is."""
        seen = LatentCache()
        if cache is not None and cache.rows is not None:
            seen.append(cache.rows, cache.positions)
        if context is not None and context_positions is not None:
            seen.append(self.self_attn.latent(context, context_positions), context_positions)
        out: Tensor = self.self_attn(states, positions, cache=seen, update_cache=False, causal=self.is_causal)
        return out

    def incremental(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The block over a context that came in two pieces, as committed tokens do."""
        cache = LatentCache()
        context, positions = inputs["context"], inputs["context_positions"]
        middle = max(1, context.shape[-2] // 2)
        for part in (slice(0, middle), slice(middle, None)):
            if context[..., part, :].shape[-2]:
                cache.append(self.self_attn.latent(context[..., part, :], positions[..., part]), positions[..., part])
        return self.forward(inputs["block"], inputs["positions"], cache=cache)


class DSparkModel(DFlashModel):
    """The backbone, from the target's taps to the states that the heads read; see `DFlashModel`.

    Attributes:
        tap_norms: one norm per tap before `fc`, where the draft has them.
    """

    def __init__(self, spec: DraftSpec, layers: Sequence[Any], source: TensorSource) -> None:
        options = options_of(spec)

        def norm(name: str, width: int | None) -> RMSNorm:
            weight = take_named(source, f"{name}.weight", (known(width, "hidden_size"),))
            return RMSNorm(weight, spec.norm_eps, options.norm_kind)

        self.spec, self.layers = spec, tuple(layers)
        self.norm, self.hidden_norm = norm("norm", spec.hidden_size), norm("hidden_norm", spec.hidden_size)
        taps = (spec.taps.count or 0) if options.fc_norm else 0
        self.tap_norms = tuple(norm(f"fc_norm.{index}", spec.target_hidden_size) for index in range(taps))
        self.fc = build_projection(source, "fc", spec.hidden_size, times(spec.taps.count, spec.target_hidden_size))


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """What a block drafted.

    Attributes:
        tokens: int64 [n], target ids, in the order in which the target will check them.
        logits: [n, Vd], the Markov bias included.
        confidence: [n], logits of being accepted, or None without the head.
    """

    tokens: Tensor
    logits: Tensor
    confidence: Tensor | None


class MarkovHead:
    """A bias on a row's logits by the token before it: `markov_w2(s)`, s of rank r.

    Args:
        kind: `vanilla`, `gated` or `rnn`.
        tensors: by local name: `markov_w1.weight` [V, r], `markov_w2.weight` [Vd, r]; `gate_proj` [r, H + r] for gated,
            `joint_proj` [3 r, 2 r + H] for rnn, each with `.bias`.

    Raises:
        LayerBuildError: an unknown kind, or a tensor is missing or of another shape.
    """

    def __init__(
        self,
        kind: str | None,
        tensors: Mapping[str, Tensor],
        *,
        vocab_size: int,
        head_rows: int,
        rank: int,
        hidden: int,
    ) -> None:
        if kind not in ("vanilla", "gated", "rnn"):
            raise LayerBuildError("is not one of vanilla, gated and rnn", key="markov_head_type", got=kind)
        self.kind, self.rank = kind, rank
        with prefixed("markov_head"):
            self.w1 = frozen(take(tensors, "markov_w1.weight", (vocab_size, rank)))
            self.w2 = Linear(take(tensors, "markov_w2.weight", (head_rows, rank)), name="markov_w2.weight")
            self.gate_proj = _biased(tensors, "gate_proj", rank, hidden + rank) if kind == "gated" else None
            self.joint_proj = _biased(tensors, "joint_proj", 3 * rank, 2 * rank + hidden) if kind == "rnn" else None

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of `markov_w1`, `[..., r]`, for target ids `[...]`."""
        return self.w1[tokens]

    def step(self, tokens: Tensor, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The bias of one row, `[..., Vd]`, and the state for the next (rnn only, zero at a block's first row).

        Args:
            tokens: target ids before the row, `[...]`.
            hidden: the row after the final norm, `[..., H]`.
            state: `[..., r]`, what the step before gave.
        """
        previous = self.embed(tokens)
        if self.gate_proj is not None:
            gate = self.gate_proj(torch.cat([hidden, previous], dim=-1)).sigmoid()
            return self.w2(gate * previous), None
        if self.joint_proj is None:
            return self.w2(previous), None
        state = torch.zeros_like(previous) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat([state, previous, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self.w2(out.tanh()), gate * state + (1 - gate) * candidate.tanh()


class ConfidenceHead:
    """The logit that a row is accepted, from the row and, where it reads it, the Markov embedding of the token before.

    Args:
        tensors: `weight` [1, H (+ r)] and `bias` [1], which may be absent.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, in_features: int) -> None:
        with prefixed("confidence_head.proj"):
            bias = take_bias(tensors, "bias", 1, due="bias" in tensors)
            self.proj = Linear(take(tensors, "weight", (1, in_features)), bias, name="weight")

    def __call__(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """`[...]` from rows `[..., H]` and embeddings `[..., r]`."""
        features = hidden if previous is None else torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)
        out: Tensor = self.proj(features)
        return out.squeeze(-1)


class DSparkHead:
    """What turns a block's rows into drafted tokens.

    Attributes:
        embed_tokens: [V, H], or None where the target's serves.
        lm_head: Vd rows, or None where the target's serves.
        markov, confidence: the heads, or None.
        images: int64 [Vd], the target id of each draft id, or None where they are the same.
        norm: the final norm, where rows come before it and only the logits are read behind it (DeepSeek-V4); else None.
        softcap: cap on the logits before the Markov bias, or None.
        sample_from_anchor: whether row 0 drafts; True where the file does not say, as DeepSpec trains.
    """

    def __init__(self, spec: DraftSpec, source: TensorSource) -> None:
        options = options_of(spec)
        if options.packed:
            raise NoReferenceError("the weights are packed by MLX, which nothing here unpacks")
        self.options = options
        hidden = known(spec.hidden_size, "hidden_size")
        vocab_size = known(spec.vocabulary.vocab_size, "vocab_size")
        head_rows = known(spec.vocabulary.head_rows, "draft_vocab_size")
        embed, head = source.under("embed_tokens"), source.under("lm_head")
        with prefixed("embed_tokens"):
            self.embed_tokens = frozen(take(embed, "weight", (vocab_size, hidden))) if embed else None
        with prefixed("lm_head"):
            self.lm_head = Linear(take(head, "weight", (head_rows, hidden)), name="lm_head.weight") if head else None
        self.norm = build_vector_norm(spec, source, "norm", hidden) if options.backbone == "deepseek-v4" else None
        self.markov: MarkovHead | None = None
        rank = 0
        if options.markov_rank != 0:
            rank = known(options.markov_rank, "markov_rank")
            self.markov = MarkovHead(
                options.markov_head_type,
                source.under("markov_head"),
                vocab_size=vocab_size,
                head_rows=head_rows,
                rank=rank,
                hidden=hidden,
            )
        self.confidence: ConfidenceHead | None = None
        tensors = source.under("confidence_head.proj")
        if options.confidence_head or (options.confidence_head is None and tensors):
            in_features = hidden + (rank if options.confidence_with_markov else 0)
            self.confidence = ConfidenceHead(tensors, in_features=in_features)
        self.images: Tensor | None = None
        if spec.vocabulary.is_reduced:
            offsets = take_named(source, "d2t", (head_rows,)).long()
            self.images = offsets + torch.arange(head_rows, device=offsets.device)
        self.softcap = None if spec.block is None else spec.block.final_logit_softcapping
        self.sample_from_anchor = spec.block is None or spec.block.sample_from_anchor is not False

    def base_logits(self, hidden: Tensor, lm_head: Tensor | None = None) -> Tensor:
        """Logits [..., Vd] without the Markov bias; `lm_head` [Vd, H] is the target's, for a draft without one.

        Raises:
            DraftError: neither the draft nor the caller has a head.
        """
        hidden = hidden if self.norm is None else self.norm(hidden)
        if lm_head is not None:
            logits = torch.nn.functional.linear(hidden, lm_head)
        elif self.lm_head is not None:
            logits = self.lm_head(hidden)
        else:
            raise DraftError("the draft has no head; give the target's", key="lm_head.weight")
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def block_logits(
        self, hidden: Tensor, previous: Tensor, lm_head: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, Vd] and confidences [B] of a block's rows whose tokens before are known.

        Args:
            hidden: [B, H] after the final norm, or before it where the head has `norm`.
            previous: target ids before each row, [B].
            lm_head: as for `base_logits`.
        """
        logits, state, biases = self.base_logits(hidden, lm_head), None, []
        if self.markov is not None:
            for row in range(hidden.shape[-2]):
                bias, state = self.markov.step(previous[..., row], hidden[..., row, :], state)
                biases.append(bias)
            logits = logits + torch.stack(biases, dim=-2)
        return logits, self._confidence(hidden, previous)

    def draft(self, hidden: Tensor, anchor: int, lm_head: Tensor | None = None) -> Drafted:
        """The block drafted greedily, row by row: each row's bias comes from the token that the row before drafted.

        Where row 0 does not draft, it still passes through a recurrent Markov head with the anchor, as row 1 then does again: so
        speculators trains it.

        Args:
            hidden: [B, H] after the final norm, or before it where the head has `norm`.
            anchor: the last accepted token, a target id.
            lm_head: as for `base_logits`.
        """
        base = self.base_logits(hidden, lm_head)
        previous = torch.tensor(anchor, device=hidden.device)
        tokens, logits, before, state = [], [], [], None
        for row in range(hidden.shape[0]):
            biased = base[row]
            if self.markov is not None:
                bias, state = self.markov.step(previous, hidden[row], state)
                biased = biased + bias
            if row == 0 and not self.sample_from_anchor:
                continue
            before.append(previous)
            logits.append(biased)
            previous = self._image(biased.argmax(dim=-1))
            tokens.append(previous)
        start = 0 if self.sample_from_anchor else 1
        return Drafted(
            tokens=torch.stack(tokens),
            logits=torch.stack(logits),
            confidence=self._confidence(hidden[start:], torch.stack(before)),
        )

    def _confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        if self.confidence is None:
            return None
        reads = self.options.confidence_with_markov and self.markov is not None
        return self.confidence(hidden, self.markov.embed(previous) if reads and self.markov is not None else None)

    def _image(self, token: Tensor) -> Tensor:
        return token if self.images is None else self.images[token]


def options_of(spec: DraftSpec) -> DSparkOptions:
    """The family's own options; LayerBuildError where the spec is not a DSpark draft's."""
    if not isinstance(spec.options, DSparkOptions):
        raise LayerBuildError(f"a {spec.family} spec has no DSpark options", got=type(spec.options).__name__)
    return spec.options


def _biased(tensors: Mapping[str, Tensor], name: str, rows: int, columns: int) -> Linear:
    return Linear(
        take(tensors, f"{name}.weight", (rows, columns)),
        take_bias(tensors, f"{name}.bias", rows, due=True),
        name=f"{name}.weight",
    )
