"""Draft layers as an engine's code would show them to the fused path, without any of an engine's code."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class FakeRope:
    """A rotary object: a table, what it was made of, and no way to grow."""

    def __init__(
        self,
        rotary_dim: int,
        *,
        theta: float = 1e4,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        rows: int = 64,
        factor: float = 1.0,
        mscale: float = 1.0,
    ) -> None:
        self.rotary_dim = rotary_dim
        self.base = theta
        self.is_neox_style = is_neox_style
        self.rope_scaling = rope_scaling
        self.inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim) / factor
        self.mscale = mscale
        self.cos_sin_cache = self.rows_at(torch.arange(rows))

    def rows_at(self, positions: Tensor) -> Tensor:
        angles = positions.double()[:, None] * self.inv_freq
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * self.mscale).float()


class GrowingRope(FakeRope):
    """One that grows as it should."""

    def _ensure_cos_sin_cache_length(self, needed_max_pos: int) -> None:
        if needed_max_pos >= self.cos_sin_cache.shape[0]:
            self.cos_sin_cache = self.rows_at(torch.arange(needed_max_pos + 8))


class ForgetfulRope(FakeRope):
    """One that, like SGLang's scaled classes, appends rows without its scaling."""

    def _ensure_cos_sin_cache_length(self, needed_max_pos: int) -> None:
        old = self.cos_sin_cache.shape[0]
        plain = FakeRope(self.rotary_dim, theta=self.base, rows=needed_max_pos + 8).cos_sin_cache
        self.cos_sin_cache = torch.cat([self.cos_sin_cache, plain[old:]])


def fake_layers(
    num_layers: int = 2,
    *,
    overrides: Mapping[int, Mapping[str, Any]] | None = None,
    seed: int = 0,
    **shape: Any,
) -> list[Any]:
    """`num_layers` layers of one shape, with distinct random weights; `overrides[i]` changes arguments of layer i alone.

    Arguments are those of `fake_layer`. Layers whose RoPE arguments agree share one rotary object.
    """
    generator = torch.Generator().manual_seed(seed)
    ropes: dict[str, Any] = {}
    layers = []
    for index in range(num_layers):
        arguments = {**shape, **(overrides or {}).get(index, {})}
        layer = fake_layer(generator=generator, **arguments)
        key = repr(sorted((name, repr(value)) for name, value in arguments.items() if name in _ROPE_ARGUMENTS)) + str(
            arguments.get("head_dim")
        )
        if "rotary_emb" not in arguments:
            layer.self_attn.rotary_emb = ropes.setdefault(key, layer.self_attn.rotary_emb)
        layers.append(layer)
    return layers


_ROPE_ARGUMENTS = ("rotary_dim", "theta", "is_neox_style", "rope_scaling", "table_rows", "table_factor")


def fake_layer(
    *,
    generator: torch.Generator,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    rotary_dim: int | None = None,
    is_neox_style: bool = True,
    theta: float = 1e4,
    rope_scaling: dict[str, Any] | None = None,
    table_rows: int = 64,
    table_factor: float = 1.0,
    rotary_emb: Any = None,
    hidden_size: int = 24,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    k_norm: str = "per-head",
    norm_kind: str = "rms",
    eps: float = 1e-6,
    eps_name: str = "variance_epsilon",
    v_head_dim: int | None = None,
    value_scale: float | None = None,
    q_size: int | None = None,
    kv_size: int | None = None,
    quant_method: Any = None,
    weight_scale: float = 1.0,
) -> Any:
    """One layer: `self_attn` with everything that the fused path reads, and nothing else."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    true_q, true_kv = num_heads * head_dim, num_kv_heads * head_dim
    v_rows = true_kv if v_head_dim is None else num_kv_heads * v_head_dim
    rows = true_q + true_kv + v_rows
    weight = torch.randn(rows, hidden_size, generator=generator) * weight_scale / hidden_size**0.5
    width = {"per-head": head_dim, "whole": true_kv, "none": 0}[k_norm]
    norm_weight = torch.rand(width, generator=generator) + (0.5 if norm_kind == "rms" else -0.5)
    norm = None
    if k_norm != "none":
        norm = SimpleNamespace(weight=norm_weight.to(dtype), norm_kind=norm_kind, **{eps_name: eps})
    qkv_bias = torch.randn(rows, generator=generator).to(dtype) if bias else None
    attn = SimpleNamespace(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_size=true_q if q_size is None else q_size,
        kv_size=true_kv if kv_size is None else kv_size,
        qkv_proj=SimpleNamespace(weight=weight.to(dtype), bias=qkv_bias, quant_method=quant_method),
        k_norm=norm,
        rotary_emb=rotary_emb
        or FakeRope(
            rotary_dim,
            theta=theta,
            is_neox_style=is_neox_style,
            rope_scaling=rope_scaling,
            rows=table_rows,
            factor=table_factor,
        ),
    )
    if v_head_dim is not None:
        attn.v_head_dim = v_head_dim
    if value_scale is not None:
        attn.value_scale = value_scale
    return SimpleNamespace(self_attn=attn)
