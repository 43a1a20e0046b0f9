"""What the parsers of several families read in the same way."""

from __future__ import annotations

import re
from dataclasses import replace

from pytest_specdecode.families.base import ConfigView
from pytest_specdecode.families.config import MAX_LAYERS, Section
from pytest_specdecode.families.quantised import HOLDERS
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.spec import Extent, MLASpec, VocabularySpec


def read_vocabulary(view: ConfigView) -> VocabularySpec:
    """Token spaces; the draft's size under `draft_vocab_size` or nebius's older `truncated_vocab_size`."""
    key = next(
        (name for name in ("draft_vocab_size", "truncated_vocab_size") if view.root.raw(name) is not None),
        None,
    )
    tied = view.root.flag("tie_word_embeddings")
    if tied is None:
        tied = view.layer.flag("tie_word_embeddings")
    return VocabularySpec(
        vocab_size=view.layer.extent("vocab_size"),
        draft_vocab_size=None if key is None else view.root.extent(key),
        draft_vocab_key=key,
        tie_word_embeddings=bool(tied),
    )


def read_head_dim(view: ConfigView) -> Extent:
    """`head_dim` as stated, else H / heads where that is whole, else None."""
    stated = view.layer.extent("head_dim")
    if stated is not None:
        return stated
    hidden, heads = view.layer.extent("hidden_size"), view.layer.extent("num_attention_heads")
    if not hidden or not heads or hidden % heads:
        return None
    return hidden // heads


def read_dtype(view: ConfigView) -> str | None:
    """The declared dtype without the `torch.` prefix, from `dtype`, `torch_dtype` or the layer configuration."""
    for section in (view.root, view.layer):
        name = section.text("dtype", "torch_dtype")
        if name:
            return name.removeprefix("torch.")
    return None


def read_eps(view: ConfigView, section: Section | None = None) -> float:
    """`rms_norm_eps` of `section`, the layer configuration where None; 1e-6, the Llama and Qwen classes' default, where absent."""
    eps = (view.layer if section is None else section).number("rms_norm_eps")
    return 1e-6 if eps is None else eps


def read_mla(view: ConfigView, *, in_features: Extent, is_neox_style: bool = False) -> MLASpec:
    """Latent attention, its down projections `in_features` wide; a yarn scaling is DeepSeek's kind."""
    rope_dim = view.layer.extent("qk_rope_head_dim")
    rope = read_rope(view.layer, head_dim=rope_dim, is_neox_style=is_neox_style)
    if rope.rope_type == "yarn":
        rope = replace(rope, rope_type="deepseek_yarn")
    return MLASpec(
        num_heads=view.layer.extent("num_attention_heads"),
        q_lora_rank=view.layer.extent("q_lora_rank"),
        kv_lora_rank=view.layer.extent("kv_lora_rank"),
        qk_nope_head_dim=view.layer.extent("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=view.layer.extent("v_head_dim"),
        in_features=in_features,
        out_features=view.layer.extent("hidden_size"),
        rope=rope,
    )


def held_layers(view: ConfigView) -> int:
    """Layers that the weights show, by the highest number among `layers.{i}.*`; 0 where they show none."""
    matches = (re.match(r"layers\.(\d{1,4})\.", name) for name in view.tensors)
    held = {index for match in matches if match and (index := int(match[1])) < MAX_LAYERS}
    return max(held) + 1 if held else 0


def stores_fused_qkv(view: ConfigView, layer: int, *, default: bool = False, stem: str = "layers") -> bool:
    """Whether q, k and v of `layer` are stored as one `qkv_proj`; `default` where the weights say neither, or are not there.

    `stem` is what stands before the layer's number.
    """
    prefix = f"{stem}.{layer}.self_attn"

    def stored(name: str) -> bool:
        return any(f"{prefix}.{name}{end}" in view.tensors for end in HOLDERS)

    return stored("qkv_proj") or (default and not stored("q_proj"))
