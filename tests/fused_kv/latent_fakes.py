"""Latent-attention layers as an engine's code would show them to the latent stack, without any of an engine's code."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from fakes import FakeRope


def latent_layers(
    num_layers: int = 2, *, overrides: Mapping[int, Mapping[str, Any]] | None = None, seed: int = 0, **shape: Any
) -> list[Any]:
    """`num_layers` layers of one shape, with distinct random weights; `overrides[i]` changes arguments of layer i alone.

    Arguments are those of `latent_layer`. Layers whose RoPE arguments agree share one rotary object.
    """
    generator = torch.Generator().manual_seed(seed)
    ropes: dict[str, Any] = {}
    layers = []
    for index in range(num_layers):
        arguments = {**shape, **(overrides or {}).get(index, {})}
        layer = latent_layer(generator=generator, **arguments)
        key = repr(sorted((name, repr(value)) for name, value in arguments.items() if name in _ROPE_ARGUMENTS))
        if "rotary_emb" not in arguments:
            layer.self_attn.rotary_emb = ropes.setdefault(key, layer.self_attn.rotary_emb)
        layers.append(layer)
    return layers


_ROPE_ARGUMENTS = ("rope_dim", "theta", "is_neox_style", "rope_scaling", "table_rows", "table_factor", "rotary_dim")


def latent_layer(
    *,
    generator: torch.Generator,
    rank: int = 24,
    rope_dim: int = 8,
    rotary_dim: int | None = None,
    is_neox_style: bool = False,
    theta: float = 1e4,
    rope_scaling: dict[str, Any] | None = None,
    table_rows: int = 64,
    table_factor: float = 1.0,
    rotary_emb: Any = None,
    hidden_size: int = 20,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    norm: str = "latent",
    norm_kind: str = "rms",
    is_row: bool = False,
    compressor: Any = None,
    eps: float = 1e-6,
    eps_name: str = "variance_epsilon",
    q_lora_rank: int | None = None,
    q_rows: int | None = None,
    extra_rows: int = 0,
    quant_method: Any = None,
    weight_scale: float = 1.0,
) -> Any:
    """One layer: `self_attn` with everything that the latent stack reads, and nothing else; joined where it has a q_lora_rank.

    With `is_row` under DeepSeek-V4's names. `norm` is `latent`, `whole`, `none`, or `other` for a width that no norm has.
    """
    joined = q_lora_rank is not None
    first = (q_rows if q_rows is not None else q_lora_rank) if joined else 0
    rows = first + rank + rope_dim + extra_rows
    weight = torch.randn(rows, hidden_size, generator=generator) * weight_scale / hidden_size**0.5
    width = {"latent": rank, "whole": rank + rope_dim, "other": rank + rope_dim + 1, "none": 0}[norm]
    norm_weight = torch.rand(width, generator=generator) + (0.5 if norm_kind == "rms" else -0.5)
    bias_rows = torch.randn(rows, generator=generator).to(dtype) if bias else None
    projection = SimpleNamespace(weight=weight.to(dtype), bias=bias_rows, quant_method=quant_method)
    widths = {"head_dim": rank + rope_dim} if is_row else {"kv_lora_rank": rank}
    row_norm = SimpleNamespace(weight=norm_weight.to(dtype), norm_kind=norm_kind, **{eps_name: eps})
    attn = SimpleNamespace(
        **widths,
        **{"kv_norm" if is_row else "kv_a_layernorm": None if norm == "none" else row_norm},
        compressor=compressor,
        qk_rope_head_dim=rope_dim,
        rotary_emb=rotary_emb
        or FakeRope(
            rope_dim if rotary_dim is None else rotary_dim,
            theta=theta,
            is_neox_style=is_neox_style,
            rope_scaling=rope_scaling,
            rows=table_rows,
            factor=table_factor,
        ),
    )
    if joined:
        attn.q_lora_rank = q_lora_rank
    names = ("wkv", "fused_wqa_wkv") if is_row else ("kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa")
    setattr(attn, names[joined], projection)
    return SimpleNamespace(self_attn=attn)
