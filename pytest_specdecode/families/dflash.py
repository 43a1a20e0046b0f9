"""DFlash: a block of masked positions drafted in one pass over the target's tapped states.

    c = hidden_norm(fc([taps]))                       context [C, H], one for all layers
    x = embeddings of [last accepted token, mask, …]  block [B, H]
    per layer: n = input_layernorm(x)
               q = q_norm(q_proj(n));  k, v from [c, n] by the same projections, k_norm on both parts
               RoPE on absolute positions; x += o_proj(attention); x += mlp(post_attention_layernorm(x))
    logits = the target's head (norm(x)), from rows 1 on (row 0 is the anchor)

No input norm is applied to c, so the K/V of all layers for one context come from one vector a token: that is what the stacked
fused-KV path exploits. Inside a block, `is_causal` decides for all layers; else `dflash_config.causal`; else sliding layers look back
only and full layers look both ways.

Laguna is DFlash with a norm per tap, a softplus gate on the heads and fused `qkv_proj`; each layer norms the context first, so it has
no stacked path.

Sources: z-lab/dflash `dflash/model`, vLLM `qwen3_dflash.py` and `laguna_dflash.py`, SGLang `srt/models/dflash.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.families.base import (
    ConfigView,
    ExpectedTensor,
    Family,
    ReferenceLayer,
    Signal,
    TensorSource,
)
from pytest_specdecode.families.common import read_dtype, read_eps, read_head_dim, read_vocabulary
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.tensors import embedding, gqa_tensors, mlp_tensors, norm, vocabulary_tensors
from pytest_specdecode.spec import BlockSpec, DraftSpec, GQASpec, LayerSpec, Stated, TapsSpec, times

if TYPE_CHECKING:
    import torch

_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_NOT_PLAIN = ("markov_head.", "confidence_head.", "candidate_selector.", "prefix_gru.", "layer_fusion_weights")


class DFlash(Family):
    """DFlash, its Laguna variant included."""

    name = "dflash"
    title = "DFlash"
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
        """Label, a top-level `hidden_norm` beside an `fc` with H-wide normed layers, or `dflash_config`."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if re.search(r"DFlash(?!2)", architecture)
        ]
        if view.root.text("speculators_model_type") == "dflash":
            found.append(Signal(family=self.name, kind="label", where="speculators_model_type", value="dflash"))
        projector = view.root.section("dflash_config").text("projector_type")
        if projector == "dflash":
            where = "dflash_config.projector_type"
            found.append(Signal(family=self.name, kind="label", where=where, value=projector))
        if isinstance(view.root.raw("dflash_config"), Mapping):
            keys = sorted(view.root.section("dflash_config").values)
            found.append(Signal(family=self.name, kind="keys", where="dflash_config", value=keys))
        return found + self._tensor_signals(view)

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec, from the flat layout, the nested one (`dflash_config`) or both."""
        nested = view.root.section("dflash_config")
        stated = view.layer.layers()
        hidden = view.layer.extent("hidden_size")
        causal = view.root.flag("is_causal")
        if causal is None:
            causal = nested.flag("causal")
        return DraftSpec(
            family=self.name,
            packaging=view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=hidden,
            target_hidden_size=view.root.extent("target_hidden_size") or hidden,
            num_hidden_layers=stated,
            layers=tuple(self._layer(view, index, causal) for index in range(stated or 0)),
            vocabulary=read_vocabulary(view),
            taps=_taps(view),
            dtype=read_dtype(view),
            norm_eps=read_eps(view),
            block=BlockSpec(
                block_size=_first(nested.extent("block_size"), view.root.extent("block_size")),
                block_size_stated=nested.stated("block_size") + view.root.stated("block_size"),
                mask_token_id=_first(nested.extent("mask_token_id"), view.root.extent("mask_token_id")),
                mask_token_stated=nested.stated("mask_token_id") + view.root.stated("mask_token_id"),
                is_causal=causal,
                sample_from_anchor=view.root.flag("sample_from_anchor"),
                variant="laguna" if _is_laguna(view) else "dflash",
            ),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """`fc`, the norms, the layers, and a head only for a reduced vocabulary."""
        return tuple(_tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer."""
        return DFlashLayer(spec, layer, source)

    def fused_kv_reason(self, spec: DraftSpec) -> str | None:
        """None but for Laguna."""
        if spec.block is not None and spec.block.variant == "laguna":
            return "Laguna norms the context anew in every layer, so one stack over all layers does not serve it"
        return None

    def canonical(self, name: str, root: Section | None = None) -> str:
        """Muse's `encoder.` names and a leading `model.`."""
        name = name.removeprefix("model.")
        for old, new in _ALIASES.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def _tensor_signals(self, view: ConfigView) -> list[Signal]:
        tensors = view.tensors
        fc, first = tensors.get("fc.weight"), tensors.get("layers.0.self_attn.q_proj.weight")
        if fc is None or first is None or "hidden_norm.weight" not in tensors or len(fc.shape) != 2:
            return []
        if any(name.startswith(_NOT_PLAIN) for name in tensors) or first.shape[1:] != fc.shape[:1]:
            return []
        return [Signal(family=self.name, kind="tensors", where="hidden_norm.weight", value=list(fc.shape))]

    def _layer(self, view: ConfigView, index: int, causal: bool | None) -> LayerSpec:
        types = view.layer.texts("layer_types")
        layer_type = types[index] if index < len(types) else "full_attention"
        nested = view.root.section("dflash_config")
        window = view.layer.extent("sliding_window") if layer_type == "sliding_attention" else None
        if nested.flag("use_swa"):
            layer_type, window = "sliding_attention", nested.extent("swa_window_size")
        head_dim = read_head_dim(view)
        hidden = view.layer.extent("hidden_size")
        has_bias = bool(view.layer.flag("attention_bias"))
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
                    layer_type=layer_type,
                ),
                qk_norm=True,
                qkv_bias=has_bias,
                o_bias=has_bias,
                sliding_window=window,
                value_scale=_value_scale(view),
            ),
            intermediate_size=view.layer.extent("intermediate_size"),
            hidden_act=view.layer.text("hidden_act") or "silu",
            mlp_bias=bool(view.layer.flag("mlp_bias")),
            norm_eps=read_eps(view),
            layer_type=layer_type,
            is_causal=layer_type == "sliding_attention" if causal is None else causal,
        )


class DFlashLayer(ReferenceLayer):
    """One DFlash layer; see the module's formula."""

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_attention, build_mlp, build_norm

        if spec.block is not None and spec.block.variant != "dflash":
            raise LayerBuildError(f"the reference forward of the {spec.block.variant} variant is not written yet")
        prefix = f"layers.{layer.index}"
        self.is_causal = bool(layer.is_causal)
        self.self_attn = build_attention(layer, source)
        self.mlp = build_mlp(layer, source)
        self.input_layernorm = build_norm(layer, source, f"{prefix}.input_layernorm")
        self.post_attention_layernorm = build_norm(layer, source, f"{prefix}.post_attention_layernorm")

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
        both = None if context is None or context_positions is None else (context, context_positions)
        attended = block + self.self_attn(
            self.input_layernorm(block),
            positions,
            cache=cache,
            update_cache=False,
            context=both,
            causal=self.is_causal,
        )
        out: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out

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
                k, v = self.self_attn.kv(context[..., part, :], positions[..., part])
                cache.append(k, v, positions[..., part])
        return self.forward(inputs["block"], inputs["positions"], cache=cache)


def _taps(view: ConfigView) -> TapsSpec:
    nested = view.root.section("dflash_config")
    packaged = view.packaging == "speculators"
    sources = [(view.root, "aux_hidden_state_layer_ids")] if packaged else []
    sources += [(nested, "target_layer_ids"), (view.root, "target_layer_ids")]
    found = [
        (Stated(key=section.path(key), value=list(ids)), ids) for section, key in sources if (ids := section.ids(key))
    ]
    ids = found[0][1] if found else None
    return TapsSpec(
        ids=ids,
        convention="boundary" if packaged else "output",
        count=len(ids) if ids else None,
        stated=tuple(stated for stated, _ in found),
        num_target_layers=_first(nested.extent("num_target_layers"), view.root.extent("num_target_layers")),
    )


def _tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    hidden, target_hidden, count = spec.hidden_size, spec.target_hidden_size, spec.taps.count
    laguna = spec.block is not None and spec.block.variant == "laguna"
    yield ExpectedTensor(name="fc.weight", shape=(hidden, times(count, target_hidden)), fault="fc-missing")
    if laguna:
        for index in range(count or 0):
            yield norm(f"aux_hidden_norms.{index}", target_hidden)
    yield norm("hidden_norm", hidden)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        assert isinstance(layer.attention, GQASpec)
        yield norm(f"{prefix}.input_layernorm", hidden, layer.index)
        yield from gqa_tensors(layer, layer.attention, fused_qkv=laguna)
        if laguna:
            yield ExpectedTensor(
                name=f"{prefix}.self_attn.g_proj.weight", shape=(layer.attention.num_heads, hidden), layer=layer.index
            )
        yield norm(f"{prefix}.post_attention_layernorm", hidden, layer.index)
        yield from mlp_tensors(layer, hidden)
    yield norm("norm", hidden)
    yield from vocabulary_tensors(spec, own_head=spec.vocabulary.is_reduced)
    yield embedding(spec)


def _value_scale(view: ConfigView) -> float:
    for section in (view.root.section("dflash_config"), view.layer):
        scale = section.number("attention_value_scale")
        if scale is not None:
            return scale
    return 1.0


def _is_laguna(view: ConfigView) -> bool:
    return any("Laguna" in architecture for architecture in view.root.texts("architectures"))


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
