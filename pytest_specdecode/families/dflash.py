"""DFlash: a block of masked positions drafted in one pass over the target's tapped states.

    c = hidden_norm(fc([taps]))                       context [C, H], one for all layers
    x = embeddings of [last accepted token, mask, …]  block [B, H]
    per layer: n = input_layernorm(x)
               q = q_norm(W_q n);  k = k_norm(W_k [c; n]);  v = W_v [c; n], context rows before block rows
               q and k rotated by their absolute positions; x += W_o attention; x += mlp(post_attention_layernorm(x))
    logits = the target's head (norm(x)), from rows 1 on (row 0 is the anchor)

No input norm is applied to c, so the K/V of all layers for one context come from one vector a token: that is what the stacked
fused-KV path exploits. Inside a block, `is_causal` decides for all layers; else `dflash_config.causal`; else sliding layers look back
only and full layers look both ways. In the speculators packaging full layers look both ways and `sliding_window_non_causal` decides for
the sliding ones.

A sliding window means three things in the code that trained the files (`LayerSpec.window_reading`): z-lab's counts row by row, the one in
transformers (`muse_glimmer_assistant`) row by row and one token wider, the one in speculators from the anchor back and never inside the
block. What an engine makes of the same key is in `engines/`.

A head may have a learned sink (`attention_sink_bias`, MiMo): a logit that enters each of its softmaxes as a key whose value is zero. It
and the window decide who is looked at, not what K and V are, so that the stacked path serves such drafts as it does others.

Laguna is DFlash with a norm per tap, c = hidden_norm(fc([norm_i(tap_i)])), a softplus gate on the heads, fused `qkv_proj`, and an
input_layernorm of the context in every layer, so one stack over all layers does not serve it.

Sources: z-lab/dflash `dflash/model`, speculators 0.9.0 `models/dflash`, transformers 5.15 `muse_glimmer_assistant`, vLLM
`qwen3_dflash.py` and `laguna_dflash.py`, SGLang `srt/models/dflash.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pytest_specdecode.families.base import (
    ConfigView,
    ExpectedTensor,
    Family,
    ReferenceLayer,
    Signal,
    TensorSource,
)
from pytest_specdecode.families.common import read_dtype, read_eps, read_head_dim, read_vocabulary, stores_fused_qkv
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.tensors import embedding, gqa_tensors, mlp_tensors, norm, vocabulary_tensors
from pytest_specdecode.spec import (
    BlockSpec,
    DraftSpec,
    GQASpec,
    LayerSpec,
    Stated,
    TapsConvention,
    TapsSpec,
    WindowReading,
    times,
)

if TYPE_CHECKING:
    import torch

_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
#: Names that only a relative of DFlash stores: the backbone's tensors beside one of these do not speak for DFlash.
_NOT_PLAIN = (
    "markov_head.",
    "markov_w1.",
    "markov_w2.",
    "confidence_head.",
    "confidence_proj.",
    "candidate_selector.",
    "prefix_gru.",
    "layer_fusion_weights",
    "refiner_head.",
)
#: Keys in `dflash_config` that only a relative's file states.
_NOT_PLAIN_KEYS = ("conv_kernel_size", "selector_rank", "gru_hidden_dim", "markov_rank")
_MUSE = "muse_glimmer_assistant"


class DFlash(Family):
    """DFlash, its Laguna variant included. Its relatives are subclasses, each in a module of its own.

    Attributes:
        label: pattern of the architecture names that speak for the family.
        own_tensors: beginnings of names that only this family stores; empty for DFlash itself, which is told by its backbone.
        own_keys: keys in `dflash_config` that only this family's files state.
        sliding_non_causal: what the speculators packaging means where it does not state `sliding_window_non_causal`.
    """

    name = "dflash"
    title = "DFlash"
    packagings: tuple[str, ...] = ("plain", "speculators")
    label: ClassVar[str] = r"DFlash(?!2)|MuseGlimmerAssistant"
    own_tensors: ClassVar[tuple[str, ...]] = ()
    own_keys: ClassVar[tuple[str, ...]] = ()
    sliding_non_causal: ClassVar[bool] = False
    tiny: Mapping[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "is_causal": False,
        "layer_types": ["full_attention", "full_attention"],
        "dtype": "bfloat16",
        "block_size": 8,
        "num_target_layers": 20,
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 9, 17], "block_size": 8},
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """Labels, then tensors (a top-level `hidden_norm` beside an `fc` with H-wide layers, or a relative's own), then keys."""

        def label(where: str, value: object) -> Signal:
            return Signal(family=self.name, kind="label", where=where, value=value)

        found = [
            label(f"architectures[{position}]", architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if re.search(self.label, architecture)
        ]
        nested = view.root.section("dflash_config")
        if view.root.text("speculators_model_type") == self.name:
            found.append(label("speculators_model_type", self.name))
        if nested.text("projector_type") == self.name:
            found.append(label(nested.path("projector_type"), self.name))
        if self.name == "dflash" and view.root.text("model_type") == _MUSE:
            found.append(label("model_type", _MUSE))
        return found + self._tensor_signals(view) + self._key_signals(view)

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec, from the flat layout, the nested one (`dflash_config`), both, or the speculators packaging."""
        nested, packaged = view.root.section("dflash_config"), view.packaging == "speculators"
        stated = view.layer.layers()
        hidden = view.layer.extent("hidden_size")
        # speculators accepts target_hidden_size and builds fc for H all the same.
        target_hidden = None if packaged else view.root.extent("target_hidden_size")
        return DraftSpec(
            family=self.name,
            packaging=view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=hidden,
            target_hidden_size=target_hidden or hidden,
            num_hidden_layers=stated,
            layer_key=view.layer.path("num_hidden_layers"),
            layers=tuple(self._layer(view, index) for index in range(stated or 0)),
            vocabulary=read_vocabulary(view),
            taps=_taps(view),
            dtype=read_dtype(view),
            norm_eps=read_eps(view),
            block=BlockSpec(
                block_size=_first(nested.extent("block_size"), view.root.extent("block_size")),
                block_size_stated=nested.stated("block_size") + view.root.stated("block_size"),
                mask_token_id=_first(nested.extent("mask_token_id"), view.root.extent("mask_token_id")),
                mask_token_stated=nested.stated("mask_token_id") + view.root.stated("mask_token_id"),
                is_causal=_causal(view),
                sample_from_anchor=view.root.flag("sample_from_anchor"),
                variant=self._variant(view),
                input_embedding_scale=_number(view, "input_embedding_scale", 1.0),
                output_multiplier=_number(view, "output_multiplier", 1.0),
                final_logit_softcapping=_number(view, "final_logit_softcapping", 0.0) or None,
            ),
            options=self._options(view),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """What fuses the taps, the norms, the layers, a head only for a reduced vocabulary, and what a relative adds."""
        return tuple(self._tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer."""
        return DFlashLayer(spec, layer, source)

    def build_model(self, spec: DraftSpec, source: TensorSource) -> DFlashModel:
        """The whole backbone: taps to context, a block to states after the final norm.

        Raises:
            LayerBuildError: a tensor is missing or of the wrong shape.
        """
        layers = [self.build_layer(spec, layer, source) for layer in spec.layers]
        return DFlashModel(spec, layers, source)

    def canonical(self, name: str, root: Section | None = None) -> str:
        """Muse's `encoder.` names and a leading `model.`."""
        name = name.removeprefix("model.")
        for old, new in _ALIASES.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    # --- what a relative changes ---

    def _variant(self, view: ConfigView) -> str:
        return "laguna" if _is_laguna(view) else self.name

    def _options(self, view: ConfigView) -> Any:
        return None

    def _fusion_tensors(self, spec: DraftSpec) -> Iterator[ExpectedTensor]:
        """What makes the context of the taps, up to `hidden_norm`."""
        width = times(spec.taps.count, spec.target_hidden_size)
        yield ExpectedTensor(name="fc.weight", shape=(spec.hidden_size, width), fault="fc-missing")
        if spec.block is not None and spec.block.variant == "laguna":
            for index in range(spec.taps.count or 0):
                yield norm(f"aux_hidden_norms.{index}", spec.target_hidden_size)

    def _layer_tensors(self, spec: DraftSpec, layer: LayerSpec) -> Iterator[ExpectedTensor]:
        """What a layer has beside attention, MLP and norms."""
        yield from ()

    def _head_tensors(self, spec: DraftSpec) -> Iterator[ExpectedTensor]:
        """What stands behind the last layer beside `norm` and `lm_head`."""
        yield from ()

    def _tensor_signals(self, view: ConfigView) -> list[Signal]:
        tensors = view.tensors
        if self.own_tensors:
            named = next((name for name in tensors if name.startswith(self.own_tensors)), None)
            if named is None:
                return []
            return [Signal(family=self.name, kind="tensors", where=named, value=list(tensors[named].shape))]
        fc, first = tensors.get("fc.weight"), tensors.get("layers.0.self_attn.q_proj.weight")
        if first is None:
            first = tensors.get("layers.0.self_attn.qkv_proj.weight")
        if fc is None or first is None or "hidden_norm.weight" not in tensors or len(fc.shape) != 2:
            return []
        if any(name.startswith(_NOT_PLAIN) for name in tensors) or first.shape[1:] != fc.shape[:1]:
            return []
        return [Signal(family=self.name, kind="tensors", where="hidden_norm.weight", value=list(fc.shape))]

    def _key_signals(self, view: ConfigView) -> list[Signal]:
        if not isinstance(view.root.raw("dflash_config"), Mapping):
            return []
        keys = sorted(view.root.section("dflash_config").values)
        speaks = set(self.own_keys) & set(keys) if self.name != "dflash" else not set(_NOT_PLAIN_KEYS) & set(keys)
        return [Signal(family=self.name, kind="keys", where="dflash_config", value=keys)] if speaks else []

    # --- building blocks ---

    def _tensors(self, spec: DraftSpec) -> Iterator[ExpectedTensor]:
        hidden = spec.hidden_size
        yield from self._fusion_tensors(spec)
        yield norm("hidden_norm", hidden)
        for layer in spec.layers:
            prefix = f"layers.{layer.index}"
            assert isinstance(layer.attention, GQASpec)
            yield norm(f"{prefix}.input_layernorm", hidden, layer.index)
            yield from gqa_tensors(layer, layer.attention)
            yield sink(layer, layer.attention)
            yield norm(f"{prefix}.post_attention_layernorm", hidden, layer.index)
            yield from mlp_tensors(layer, hidden)
            yield from self._layer_tensors(spec, layer)
        yield norm("norm", hidden)
        yield from self._head_tensors(spec)
        yield from vocabulary_tensors(spec, own_head=spec.vocabulary.is_reduced)
        yield embedding(spec)

    def _layer(self, view: ConfigView, index: int) -> LayerSpec:
        layer_type, window = _window(view, index)
        causal = _causal(view)
        if view.packaging == "speculators":
            two_sided = view.root.flag("sliding_window_non_causal")
            causal = window is not None and not (self.sliding_non_causal if two_sided is None else two_sided)
        elif causal is None:
            causal = layer_type == "sliding_attention"
        head_dim = read_head_dim(view)
        hidden = view.layer.extent("hidden_size")
        has_bias = bool(view.layer.flag("attention_bias"))
        laguna = _is_laguna(view)
        return LayerSpec(
            index=index,
            attention=GQASpec(
                num_heads=view.layer.extent("num_attention_heads"),
                num_kv_heads=view.layer.extent("num_key_value_heads", "num_attention_heads"),
                head_dim=head_dim,
                in_features=hidden,
                out_features=hidden,
                rope=read_rope(
                    view.layer,
                    head_dim=head_dim,
                    is_neox_style=view.layer.flag("is_neox_style", "rope_is_neox_style") is not False,
                    layer_type=_rope_layer_type(view, layer_type),
                ),
                qk_norm=True,
                qkv_bias=has_bias,
                o_bias=has_bias,
                sliding_window=window,
                value_scale=_number(view, "attention_value_scale", 1.0),
                fused_qkv=stores_fused_qkv(view, index, default=laguna),
                output_gate=_output_gate(view, index) if laguna else None,
                sink=_flag(view, "attention_sink_bias"),
            ),
            intermediate_size=view.layer.extent("intermediate_size"),
            hidden_act=view.layer.text("hidden_act") or "silu",
            mlp_bias=bool(view.layer.flag("mlp_bias")),
            norm_eps=read_eps(view),
            layer_type=layer_type,
            is_causal=causal,
            window_reading=_window_reading(view),
        )


def sink(layer: LayerSpec, attention: GQASpec) -> ExpectedTensor:
    """A logit per head (MiMo): in every layer exactly where the flag says so, and allowed where there is no flag."""
    name = "attention_sink_bias"
    unstated = attention.sink is None
    return ExpectedTensor(
        name=f"layers.{layer.index}.self_attn.{name}",
        shape=(attention.num_heads,),
        need="optional" if unstated else "required" if attention.sink else "never",
        reason=f"`{name}` is not stated" if unstated else "" if attention.sink else f"`{name}` is false",
        layer=layer.index,
    )


class DFlashLayer(ReferenceLayer):
    """One DFlash layer; see the module's formula.

    Attributes:
        supports_fused_context_kv: whether one context for all layers gives this layer's K and V, as SGLang's classes say it.
        context_norm: the norm that the context goes through before this layer's projections (Laguna), or None.
    """

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_attention, build_mlp, build_norm

        prefix = f"layers.{layer.index}"
        self.is_causal = bool(layer.is_causal)
        self.window_reading = layer.window_reading or "row"
        self.norms_context = spec.block is not None and spec.block.variant == "laguna"
        # Read by the stacked path, which gives every layer the same context through `qkv_proj`.
        self.supports_fused_context_kv = not self.norms_context and not getattr(layer.attention, "target_kv", False)
        self.self_attn = build_attention(layer, source)
        self.mlp = build_mlp(layer, source)
        self.input_layernorm = build_norm(layer, source, f"{prefix}.input_layernorm")
        self.post_attention_layernorm = build_norm(layer, source, f"{prefix}.post_attention_layernorm")
        self.context_norm = self.input_layernorm if self.norms_context else None

    def forward(
        self,
        block: torch.Tensor,
        positions: torch.Tensor,
        context: torch.Tensor | None = None,
        context_positions: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """The block's new states.

        Args:
            block: [B, H] or [N, B, H]: states of the anchor and the masked rows.
            positions: their absolute positions, [B] or [N, B].
            context: [C, H] or [N, C, H]: fused taps after `hidden_norm`; None where `cache` holds all of it.
            context_positions: [C] or [N, C].
            cache: context K/V of earlier calls; the block's own K/V are never kept, since it is only drafted.
        """
        attended = block + self.attention(self.input_layernorm(block), positions, context, context_positions, cache)
        out: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out

    def attention(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        context: torch.Tensor | None,
        context_positions: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor:
        """The attention's output for normed `states`; the rest as for `forward`."""
        both = None
        if context is not None and context_positions is not None:
            both = (self.context_states(context), context_positions)
        known = [] if cache is None or cache.positions is None else [cache.positions]
        if both is not None:
            known.append(both[1])
        out: torch.Tensor = self.self_attn(
            states,
            positions,
            cache=cache,
            update_cache=False,
            context=both,
            causal=self.is_causal,
            window=self.window_reading == "row",
            mask=self._window_mask(positions.expand(states.shape[:-1]), known),
        )
        return out

    def context_states(self, context: torch.Tensor) -> torch.Tensor:
        """The context as K and V read it: as it is, or normed by this layer (Laguna)."""
        normed: torch.Tensor = self.input_layernorm(context) if self.norms_context else context
        return normed

    def context_kv(self, context: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a context, as a cache is filled with them; shapes as for `forward`."""
        k, v = self.self_attn.context_kv(self.context_states(context), positions)
        return k, v

    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, torch.Tensor]:
        """A context of `tokens` positions and a block of four rows behind it."""
        from pytest_specdecode.families.building import positions_like, random_states

        (context,) = random_states(self.input_layernorm.weight, 1, tokens, seed, scale, batch)
        (block,) = random_states(self.input_layernorm.weight, 1, 4, seed + 1, scale, batch)
        return {
            "block": block,
            "positions": positions_like(block) + tokens,
            "context": context,
            "context_positions": positions_like(context),
        }

    def prefill(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The block over the whole context in one call."""
        return self.forward(**inputs)

    def incremental(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The block over a context that came in two pieces, as committed tokens do."""
        from pytest_specdecode.layers import KVCache

        cache = KVCache()
        context, positions = inputs["context"], inputs["context_positions"]
        middle = max(1, context.shape[-2] // 2)
        for part in (slice(0, middle), slice(middle, None)):
            if context[..., part, :].shape[-2]:
                k, v = self.context_kv(context[..., part, :], positions[..., part])
                cache.append(k, v, positions[..., part])
        return self.forward(inputs["block"], inputs["positions"], cache=cache)

    def _window_mask(self, positions: torch.Tensor, context: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Who sees whom under a window that is not read row by row: bool [..., B, C + B], or None where nothing is hidden."""
        import torch

        window = self.self_attn.sliding_window
        if window is None or self.window_reading == "row":
            return None
        ahead = [part.expand(*positions.shape[:-1], part.shape[-1]) for part in context]
        keys = torch.cat([*ahead, positions], dim=-1).unsqueeze(-2)
        if self.window_reading == "row-inclusive":
            mask: torch.Tensor = (positions.unsqueeze(-1) - keys).abs() <= window
        else:
            mask = (keys >= positions[..., :1].unsqueeze(-1) - window).expand(*positions.shape, -1)
        return mask


class DFlashModel:
    """The backbone of a draft, from the target's taps to the states that a head reads.

    Attributes:
        layers: the reference layers.
        spec: the draft.
    """

    def __init__(self, spec: DraftSpec, layers: Sequence[Any], source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_projection, build_vector_norm

        self.spec, self.layers = spec, tuple(layers)
        self.norm = build_vector_norm(spec, source, "norm", spec.hidden_size)
        self.hidden_norm = build_vector_norm(spec, source, "hidden_norm", spec.hidden_size)
        laguna = spec.block is not None and spec.block.variant == "laguna"
        self.tap_norms = tuple(
            build_vector_norm(spec, source, f"aux_hidden_norms.{index}", spec.target_hidden_size)
            for index in range(spec.taps.count or 0)
            if laguna
        )
        self.fc = self._fc(build_projection, spec, source)

    def _fc(self, build: Any, spec: DraftSpec, source: TensorSource) -> Any:
        return build(source, "fc", spec.hidden_size, times(spec.taps.count, spec.target_hidden_size))

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """The context `[..., C, H]` of `taps` `[..., C, K, Ht]`, the tapped states in the order of the ids."""
        import torch

        if self.tap_norms:
            taps = torch.stack([norm(taps[..., index, :]) for index, norm in enumerate(self.tap_norms)], dim=-2)
        out: torch.Tensor = self.hidden_norm(self.fc(taps.flatten(-2)))
        return out

    def layer_context(self, context: torch.Tensor, layer: int) -> torch.Tensor:
        """What layer `layer` reads of `context`: all of it."""
        return context

    def forward(
        self, block: torch.Tensor, positions: torch.Tensor, taps: torch.Tensor, context_positions: torch.Tensor
    ) -> torch.Tensor:
        """The block's states after the final norm, `[..., B, H]`.

        Args:
            block: `[..., B, H]`: the target's embeddings of the anchor and the masks, times `input_embedding_scale`.
            positions: `[B]` or `[..., B]`.
            taps: `[..., C, K, Ht]`: the tapped states of the C tokens before the anchor.
            context_positions: `[C]` or `[..., C]`.
        """
        context = self.context(taps)
        for index, layer in enumerate(self.layers):
            block = layer.forward(block, positions, self.layer_context(context, index), context_positions)
        out: torch.Tensor = self.norm(block)
        return out

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The logits of states `[..., H]` under the head `[V, H]`: times `output_multiplier`, then soft-capped."""
        import torch

        block = self.spec.block or BlockSpec()
        logits = torch.nn.functional.linear(hidden, head) * block.output_multiplier
        cap = block.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _taps(view: ConfigView) -> TapsSpec:
    nested = view.root.section("dflash_config")
    packaged = view.packaging == "speculators"
    sources: list[tuple[Section, str, TapsConvention | None]] = [
        (nested, "target_layer_ids", "output"),
        # z-lab's key counts outputs, the speculators library's option of that name counts boundaries.
        (view.root, "target_layer_ids", None if packaged else "output"),
    ]
    if packaged:
        sources.insert(0, (view.root, "aux_hidden_state_layer_ids", "boundary"))
    found = [
        (Stated(key=section.path(key), value=list(ids)), ids, convention)
        for section, key, convention in sources
        if (ids := section.ids(key))
    ]
    ids = found[0][1] if found else None
    usual: TapsConvention = "boundary" if packaged else "output"
    return TapsSpec(
        ids=ids,
        convention=found[0][2] if found else usual,
        count=len(ids) if ids else None,
        stated=tuple(stated for stated, *_ in found),
        num_target_layers=_first(nested.extent("num_target_layers"), view.root.extent("num_target_layers")),
    )


def _causal(view: ConfigView) -> bool | None:
    """What the file says for all layers."""
    if _is_muse(view):
        return False
    if view.packaging == "speculators":
        return None
    causal = view.root.flag("is_causal")
    return view.root.section("dflash_config").flag("causal") if causal is None else causal


def _window(view: ConfigView, index: int) -> tuple[str, int | None]:
    """Type and window of layer `index`."""
    nested = view.root.section("dflash_config")
    if nested.flag("use_swa"):
        return "sliding_attention", nested.extent("swa_window_size")
    types = view.layer.texts("layer_types")
    default = "sliding_attention" if _is_muse(view) and not types else "full_attention"
    layer_type = types[index] if index < len(types) else default
    # The speculators library reads the layer's configuration through its class, and Qwen's drops the window unless it is switched on.
    dropped = (
        view.packaging == "speculators"
        and (view.layer.text("model_type") or "qwen3") in ("qwen2", "qwen3")
        and not view.layer.flag("use_sliding_window")
    )
    if layer_type != "sliding_attention" or dropped:
        return layer_type, None
    return layer_type, view.layer.extent("sliding_window")


def _window_reading(view: ConfigView) -> WindowReading:
    if view.packaging == "speculators":
        return "anchor"
    return "row-inclusive" if _is_muse(view) else "row"


def _rope_layer_type(view: ConfigView, layer_type: str) -> str:
    """speculators takes the sliding layers' RoPE for all layers where each type states its own."""
    nested = view.layer.section("rope_parameters")
    flattened = view.packaging == "speculators" and isinstance(nested.raw("sliding_attention"), Mapping)
    return "sliding_attention" if flattened else layer_type


def _output_gate(view: ConfigView, index: int) -> Literal["per-head", "per-element"] | None:
    """Laguna's gate: from the weights, else from `gating`, else as the published heads have it."""
    header = view.tensors.get(f"layers.{index}.self_attn.g_proj.weight")
    heads = view.layer.extent("num_attention_heads")
    if header is not None and heads is not None and header.shape:
        return "per-head" if header.shape[0] == heads else "per-element"
    stated = view.layer.raw("gating")
    if stated is False or stated == "disabled":
        return None
    return "per-element" if stated == "per-element" else "per-head"


def _number(view: ConfigView, key: str, default: float) -> float:
    """`key` from `dflash_config`, else from where the layers' fields stand."""
    for section in (view.root.section("dflash_config"), view.layer):
        value = section.number(key)
        if value is not None:
            return value
    return default


def _flag(view: ConfigView, key: str) -> bool | None:
    """`key` from `dflash_config`, else from where the layers' fields stand."""
    stated = view.root.section("dflash_config").flag(key)
    return view.layer.flag(key) if stated is None else stated


def _is_laguna(view: ConfigView) -> bool:
    return any("Laguna" in architecture for architecture in view.root.texts("architectures"))


def _is_muse(view: ConfigView) -> bool:
    labels = view.root.texts("architectures")
    return view.root.text("model_type") == _MUSE or any("MuseGlimmerAssistant" in label for label in labels)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
