"""The forward of DeepSeek-V4's stages: the block that both drafts share, and what each puts around it.

Kept apart from the data sheets because only this half needs torch. A prediction layer (`mtp`) joins a token's embedding e with the
target's n streams x_1 … x_n before its last norm, and hands streams on:

    streams = block(e_proj(enorm(e)) + h_proj(hnorm(x_j)), j = 1 … n)
    h = norm(hc_head(streams))

A stage of DSpark reads its context as rows of its attention, all of them projected by every stage. Every row of the block sees the whole
block, and the context from the anchor's window on:

    streams = block(streams; context = hidden_norm(fc(taps)))

where a tap is the mean over the streams that leave a target's layer, a block's embeddings enter as n equal streams, and hc_head joins those
of the last stage into the rows that the confidence head reads; the final norm stands between those and `lm_head` alone.

Sources: DeepSeek-V4-Flash `inference/model.py`; transformers `deepseek_v4`, whose layers these are held against; vLLM
`models/deepseek_v4` (the embedding of position 0 is zero); SGLang `deepseek_v4_nextn.py` (it is not).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_specdecode.errors import LayerBuildError, NoReferenceError
from pytest_specdecode.families.base import ReferenceLayer, TensorSource
from pytest_specdecode.families.building import build_norm, in_module, positions_like, random_states
from pytest_specdecode.families.deepseek_v4 import StageSpec
from pytest_specdecode.families.dspark_heads import DSparkModel, options_of
from pytest_specdecode.families.heads import head_linear
from pytest_specdecode.families.mtp import MTPOptions
from pytest_specdecode.families.stepping import SteppingLayer
from pytest_specdecode.layers import HyperConnection, LatentCache, MoE, SharedRowAttention, StreamHead
from pytest_specdecode.layers.linear import known, take
from pytest_specdecode.spec import DraftSpec, GQASpec, LayerSpec

#: The last parts of the experts' names, by what `layers.MoE` calls them.
_EXPERT_NAMES = {
    "gate.e_score_correction_bias": "gate.bias",
    "gate_proj.": "w1.",
    "down_proj.": "w2.",
    "up_proj.": "w3.",
}
#: Far above the 20 that the files state; each is two passes over a small matrix per token.
_MAX_ITERATIONS = 1000


class StageBlock:
    """Attention and experts over n streams; see the formulas in `deepseek_v4`.

    Attributes:
        streams: n.
        hidden: H.
        self_attn, ffn, attn_norm, ffn_norm, hc_attn, hc_ffn: the parts.

    Raises:
        NoReferenceError: the matrices are stored in eight or four bits, with scales beside them.
        LayerBuildError: an extent is not known, or a tensor is missing or of the wrong shape.
    """

    def __init__(self, layer: LayerSpec, stage: StageSpec, source: TensorSource) -> None:
        prefix = f"layers.{layer.index}"
        attention = layer.attention
        assert isinstance(attention, GQASpec)
        self.streams, self.hidden = known(stage.hc_mult, "hc_mult"), known(attention.out_features, "hidden_size")
        if layer.moe is None:
            raise LayerBuildError("is not stated; a stage has routed experts", key="n_routed_experts")
        if not 0 < stage.sinkhorn_iters <= _MAX_ITERATIONS:
            raise LayerBuildError(
                f"is {stage.sinkhorn_iters}; due is 1 to {_MAX_ITERATIONS}",
                key="hc_sinkhorn_iters",
                got=stage.sinkhorn_iters,
                due=f"1 to {_MAX_ITERATIONS}",
            )
        self.attn_norm = build_norm(layer, source, f"{prefix}.attn_norm")
        self.ffn_norm = build_norm(layer, source, f"{prefix}.ffn_norm")
        tensors = plain_under(source, f"{prefix}.attn")
        with in_module(f"{prefix}.attn"):
            self.self_attn = SharedRowAttention(
                attention,
                tensors,
                q_lora_rank=stage.q_lora_rank,
                o_lora_rank=stage.o_lora_rank,
                o_groups=stage.o_groups,
                norm_eps=layer.norm_eps,
            )
        self.ffn = _experts(layer, plain_under(source, f"{prefix}.ffn"), self.hidden, f"{prefix}.ffn")
        self.hc_attn = self._connection(layer, stage, source, f"{prefix}.hc_attn")
        self.hc_ffn = self._connection(layer, stage, source, f"{prefix}.hc_ffn")

    def forward(self, streams: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """The new streams `[..., T, n, H]`; `attention` gives `[..., T, H]` for the normed states that it reads."""
        states, post, mix = self.hc_attn(streams)
        streams = self.hc_attn.spread(streams, attention(self.attn_norm(states)), post, mix)
        states, post, mix = self.hc_ffn(streams)
        out: Tensor = self.hc_ffn.spread(streams, self.ffn(self.ffn_norm(states)), post, mix)
        return out

    def probe(self, tokens: int, seed: int, scale: float, batch: int) -> Tensor:
        """Random streams `[tokens, n, H]`, or `[batch, tokens, n, H]`, in the dtype of the matrices."""
        like = self.self_attn.wkv.weight.new_empty(self.streams * self.hidden)
        (lanes,) = random_states(like, 1, tokens, seed, scale, batch)
        return torch.unflatten(lanes, -1, (self.streams, self.hidden))

    def _connection(self, layer: LayerSpec, stage: StageSpec, source: TensorSource, name: str) -> HyperConnection:
        n = self.streams
        rows = n * (n + 2)
        return HyperConnection(
            named_tensor(source, f"{name}_fn", (rows, n * self.hidden)),
            named_tensor(source, f"{name}_base", (rows,)),
            named_tensor(source, f"{name}_scale", (3,)),
            streams=n,
            iterations=stage.sinkhorn_iters,
            eps=stage.hc_eps,
            norm_eps=layer.norm_eps,
        )


class PredictionStage(SteppingLayer):
    """A prediction layer; see the module's formula.

    Attributes:
        self_attn: the block's attention.
    """

    def __init__(self, options: MTPOptions, layer: LayerSpec, source: TensorSource) -> None:
        stage = options.stage
        assert stage is not None
        prefix = f"layers.{layer.index}"
        self.options = options
        self.enorm = build_norm(layer, source, f"{prefix}.enorm")
        self.hnorm = build_norm(layer, source, f"{prefix}.hnorm")
        self.block = StageBlock(layer, stage, source)
        self.self_attn = self.block.self_attn
        hidden = self.block.hidden
        for name in ("e_proj", "h_proj"):
            plain_under(source, f"{prefix}.{name}")
        self.e_proj = head_linear(source, f"{prefix}.e_proj", hidden, hidden)
        self.h_proj = head_linear(source, f"{prefix}.h_proj", hidden, hidden)
        self.hc_head = build_stream_head(source, f"{prefix}.hc_head_", stage, hidden, layer.norm_eps)
        self.norm = build_norm(layer, source, f"{prefix}.norm")

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: LatentCache | None = None) -> Tensor:
        """The state that the target's head reads, `[..., T, H]`, after the layer's own last norm.

        Args:
            embeds: [T, H] or [B, T, H], of the tokens after those whose states are in `hidden`.
            hidden: [T, n H] or [B, T, n H]: the streams, one after another, as the target's last layer or `streams` gave them.
            positions: [T] or [B, T], absolute.
            cache: what `new_cache` gave, to continue a sequence.
        """
        out: Tensor = self.norm(self.hc_head(self._streams(embeds, hidden, positions, cache)))
        return out

    def streams(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: LatentCache | None = None) -> Tensor:
        """What the next prediction step reads as `hidden`, `[..., T, n H]`; arguments as for `forward`."""
        return self._streams(embeds, hidden, positions, cache).flatten(-2)

    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, Tensor]:
        """Random embeddings and streams, and positions 0, 1, …"""
        hidden = self.block.probe(tokens, seed + 1, scale, batch).flatten(-2)
        (embeds,) = random_states(self.e_proj.weight[0], 1, tokens, seed, scale, batch)
        return {"embeds": embeds, "hidden": hidden, "positions": positions_like(embeds)}

    def _streams(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: LatentCache | None) -> Tensor:
        if self.options.zero_first_embedding:
            embeds = embeds.masked_fill((positions == 0).unsqueeze(-1), 0.0)
        streams = self.h_proj(self.hnorm(torch.unflatten(hidden, -1, (self.block.streams, -1))))
        streams = self.e_proj(self.enorm(embeds)).unsqueeze(-2) + streams
        return self.block.forward(streams, lambda states: self.self_attn(states, positions, cache=cache))


class DraftStage(ReferenceLayer):
    """A stage of DSpark; see the module's formula.

    Attributes:
        self_attn: the block's attention.
    """

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        stage = options_of(spec).stage
        assert stage is not None
        self.block = StageBlock(layer, stage, source)
        self.self_attn = self.block.self_attn
        self.is_causal = bool(layer.is_causal)

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: LatentCache | None = None,
    ) -> Tensor:
        """The block's new streams.

        Args:
            block: [B, n, H] or [N, B, n, H].
            positions: their absolute positions, [B] or [N, B].
            context: [C, H] or [N, C, H]: fused taps after `hidden_norm`; None where `cache` holds all of it.
            context_positions: [C] or [N, C].
            cache: context rows of earlier calls; the block's own are never kept, since it is only drafted.
        """
        both = None if context is None or context_positions is None else (context, context_positions)
        known_positions = [] if cache is None or cache.positions is None else [cache.positions]
        if both is not None:
            known_positions.append(both[1])
        mask = self._window_mask(positions.expand(block.shape[:-2]), known_positions)

        def attention(states: Tensor) -> Tensor:
            out: Tensor = self.self_attn(
                states,
                positions,
                cache=cache,
                update_cache=False,
                context=both,
                causal=self.is_causal,
                window=False,
                mask=mask,
            )
            return out

        return self.block.forward(block, attention)

    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, Tensor]:
        """A context of `tokens` positions and a block of four rows behind it."""
        block = self.block.probe(4, seed + 1, scale, batch)
        (context,) = random_states(self.self_attn.wkv.weight[0], 1, tokens, seed, scale, batch)
        return {
            "block": block,
            "positions": positions_like(block[..., 0, :]) + tokens,
            "context": context,
            "context_positions": positions_like(context),
        }

    def prefill(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The block over the whole context in one call."""
        return self.forward(inputs["block"], inputs["positions"], inputs["context"], inputs["context_positions"])

    def incremental(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The block over a context that came in two pieces, as committed tokens do."""
        cache = LatentCache()
        context, positions = inputs["context"], inputs["context_positions"]
        middle = max(1, context.shape[-2] // 2)
        for part in (slice(0, middle), slice(middle, None)):
            if context[..., part, :].shape[-2]:
                rows = self.self_attn.row(context[..., part, :], positions[..., part])
                cache.append(rows, positions[..., part])
        return self.forward(inputs["block"], inputs["positions"], cache=cache)

    def _window_mask(self, positions: Tensor, context: Sequence[Tensor]) -> Tensor | None:
        """Who sees whom, bool [..., B, C + B]: the window counts from the anchor, as the ring that DeepSeek keeps has it."""
        window = self.self_attn.sliding_window
        if window is None:
            return None
        ahead = [part.expand(*positions.shape[:-1], part.shape[-1]) for part in context]
        keys = torch.cat([*ahead, positions], dim=-1)
        mask: Tensor = (keys >= positions[..., :1] - window).unsqueeze(-2).expand(*positions.shape, -1)
        return mask


class DraftStages(DSparkModel):
    """The backbone, from the target's taps to the rows that the heads read; see `DFlashModel`.

    Attributes:
        hc_head: joins the streams of the last stage.
    """

    def __init__(self, spec: DraftSpec, layers: Sequence[Any], source: TensorSource) -> None:
        stage = options_of(spec).stage
        assert stage is not None
        plain_under(source, "fc")
        super().__init__(spec, layers, source)
        self.streams = known(stage.hc_mult, "hc_mult")
        self.hc_head = build_stream_head(
            source, "hc_head.", stage, known(spec.hidden_size, "hidden_size"), spec.norm_eps
        )

    def forward(self, block: Tensor, positions: Tensor, taps: Tensor, context_positions: Tensor) -> Tensor:
        """The block's rows before the final norm, `[..., B, H]`, which `DSparkHead` norms for `lm_head`.

        Arguments as for `DFlashModel`; a tap is the mean over the streams that leave the target's layer.
        """
        context = self.context(taps)
        streams = block.unsqueeze(-2).expand(*block.shape[:-1], self.streams, block.shape[-1])
        for index, layer in enumerate(self.layers):
            streams = layer.forward(streams, positions, self.layer_context(context, index), context_positions)
        out: Tensor = self.hc_head(streams)
        return out


def build_stream_head(source: TensorSource, prefix: str, stage: StageSpec, hidden: int, norm_eps: float) -> StreamHead:
    """What joins the streams, from `{prefix}fn`, `{prefix}base` and `{prefix}scale`."""
    n = known(stage.hc_mult, "hc_mult")
    return StreamHead(
        named_tensor(source, f"{prefix}fn", (n, n * hidden)),
        named_tensor(source, f"{prefix}base", (n,)),
        named_tensor(source, f"{prefix}scale", (1,)),
        eps=stage.hc_eps,
        norm_eps=norm_eps,
    )


def plain_under(source: TensorSource, prefix: str) -> dict[str, Tensor]:
    """The tensors of a module by local name; NoReferenceError where scales lie beside its matrices."""
    tensors = source.under(prefix)
    for name in sorted(tensors):
        if name.rpartition(".")[2] == "scale":
            raise NoReferenceError(
                "is the scale of a matrix in eight or four bits, which nothing here multiplies out",
                key=f"{prefix}.{name}",
            )
    return tensors


def named_tensor(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor with the whole name `name`, without a look at what lies beside it."""
    found = source.under(name)
    return take({name: found[""]} if "" in found else {}, name, shape)


def _experts(layer: LayerSpec, tensors: Mapping[str, Tensor], hidden: int, prefix: str) -> MoE:
    assert layer.moe is not None
    parts = {_renamed(name, {old: new for new, old in _EXPERT_NAMES.items()}): value for name, value in tensors.items()}
    try:
        with in_module(prefix):
            return MoE(layer.moe, parts, hidden_size=hidden, hidden_act=layer.hidden_act)
    except LayerBuildError as error:
        key = None if error.key is None else _renamed(error.key, _EXPERT_NAMES)
        raise LayerBuildError(error.message, path=error.path, key=key, got=error.got, due=error.due) from error


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """`name` with the part that `names` knows put in its place."""
    for old, new in names.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}", new, name)
    return name
