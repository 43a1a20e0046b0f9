"""Whether SGLang fills the context's K/V of a draft by its fused path, and if not, what it logs.

DFlash goes through the gate of `dflash_worker_v2.py`, DSpark through `_build_fused_kv_write_bundle` of `dspark.py`, which says nothing
where it declines.
"""

from __future__ import annotations

from pytest_specdecode.engines.base import Declined, at
from pytest_specdecode.engines.hf_config import stores_quantised_k
from pytest_specdecode.families import Draft
from pytest_specdecode.spec import DraftSpec, Extent, GQASpec

_CLASSES = ("dflash", "dflash2", "domino")
_DISABLED = "DFLASH fused KV materialization disabled"


def why_not_fused(draft: Draft) -> str | None:
    """The reason for the layer-by-layer path, in SGLang's words where it has some; None where the fused path is used.

    It counts layers from 0 and stops at the first reason, as the gate does.
    """
    spec = draft.spec
    if spec is None:
        return "the draft's family is not known"
    if spec.family not in (*_CLASSES, "dspark"):
        return Declined(f"has no fused path for a {spec.family} draft", "absent")
    if spec.packaging != "plain":
        return Declined(f"has no fused path for a {spec.packaging} draft", "absent")
    if not spec.layers:
        return f"{_DISABLED}: no layers found"
    if spec.family != "dspark":
        return _dflash(draft, spec)
    reason = _dspark(draft, spec)
    return None if reason is None else Declined(reason, "silent")


def _dflash(draft: Draft, spec: DraftSpec) -> str | None:
    config = draft.checkpoint.config
    if (spec.block is not None and spec.block.variant == "laguna") or config.get("use_gemma_norm"):
        return f"{_DISABLED}: draft model does not support fused context KV"
    first = spec.layers[0].attention
    for layer in spec.layers:
        attention, stem = layer.attention, f"layers.{layer.index}.self_attn"
        if not isinstance(attention, GQASpec):
            return f"{_DISABLED}: qkv weight tensor is missing: layer={layer.index}"
        if stores_quantised_k(draft, layer.index):
            return f"{_DISABLED}: quantized qkv_proj is not supported for this path: layer={layer.index}"
        if attention.qkv_bias:
            return f"{_DISABLED}: qkv bias is not supported for fused KV path: layer={layer.index}"
        for scale in _cache_scales(draft, stem):
            return f"{_DISABLED}: non-unit {scale} is not supported for fused KV path: layer={layer.index}"
        if not attention.rope.is_neox_style:
            return (
                f"{_DISABLED}: non-neox RoPE is not supported for fused KV path: layer={layer.index}, "
                "rope_is_neox_style=False"
            )
    for layer in spec.layers:
        attention = layer.attention
        assert isinstance(attention, GQASpec)
        assert isinstance(first, GQASpec)
        for name in ("num_kv_heads", "head_dim"):
            expected, got = getattr(first, name), getattr(attention, name)
            if got != expected:
                return (
                    "DFLASH fused KV initialization failed, falling back to sequential path: "
                    f"{name} mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer.index}."
                )
    if first is not None and isinstance(first, GQASpec) and (reason := _rotary(first.rope.rotary_dim, first.head_dim)):
        return f"DFLASH fused KV append-by-loc failed; falling back to sequential path: {reason}"
    return None


def _dspark(draft: Draft, spec: DraftSpec) -> str | None:
    first = spec.layers[0]
    for layer in spec.layers:
        attention = layer.attention
        if not isinstance(attention, GQASpec):
            return "DSpark's fused write needs grouped-query attention"
        if stores_quantised_k(draft, layer.index):
            return f"DSpark's fused write needs an unquantised qkv_proj: layer {layer.index}"
        if attention.qkv_bias:
            return f"DSpark's fused write takes no qkv bias: layer {layer.index}"
        header = draft.header(f"layers.{layer.index}.self_attn.k_proj.weight")
        dtype = spec.dtype if header is None else header.dtype
        if dtype not in (None, "bfloat16"):
            return f"DSpark's fused write needs bfloat16, not {dtype}: layer {layer.index}"
        assert isinstance(first.attention, GQASpec)
        if (attention.num_kv_heads, attention.head_dim) != (first.attention.num_kv_heads, first.attention.head_dim):
            return f"DSpark's fused write needs equal heads: layer {layer.index}"
        if layer.norm_eps != first.norm_eps:
            return f"DSpark's fused write takes one eps for all layers: layer {layer.index}"
        rope = attention.rope
        if (rope.theta, rope.rotary_dim, rope.is_neox_style) != (
            first.attention.rope.theta,
            first.attention.rope.rotary_dim,
            first.attention.rope.is_neox_style,
        ):
            return f"DSpark's fused write needs equal cos and sin tables: layer {layer.index}"
    rope, head_dim = first.attention.rope, first.attention.head_dim  # type: ignore[union-attr]
    if rope.rope_type != "default":
        return f"DSpark's fused write takes plain RoPE only, not {rope.rope_type}"
    if head_dim is not None and rope.rotary_dim is not None:
        extents = (head_dim, rope.rotary_dim, head_dim - rope.rotary_dim)
        if any(extent and extent & (extent - 1) for extent in extents):
            return f"DSpark's fused write needs powers of two: head_dim {head_dim}, rotary_dim {rope.rotary_dim}"
    return None


def _rotary(rotary_dim: Extent, head_dim: Extent) -> str | None:
    if rotary_dim is None or head_dim is None or (0 < rotary_dim <= head_dim and rotary_dim % 2 == 0):
        return None
    return f"Invalid fused KV rotary/head dim pair: rotary_dim={rotary_dim}, head_dim={head_dim}."


def _cache_scales(draft: Draft, stem: str) -> list[str]:
    """KV-cache scales that the weights hold for a layer and a quantised cache makes the loader take; values are not looked at."""
    config = draft.checkpoint.config
    places = ("quantization_config.kv_cache_scheme", "quantization_config.kv_cache_quant_algo")
    if all(at(config, place) is None for place in places):
        return []
    names = [name for name in draft.checkpoint.tensors if f"{stem}." in name]
    return [scale for scale in ("k_scale", "v_scale") if any(name.endswith(f".{scale}") for name in names)]
