"""The truth that the fused path is measured against, and the honest baseline beside it.

`fused_kv_reference` and `fused_latent_reference` are float64 and written for reading: one layer at a time, each with its own weight, bias,
norm and rotary object, nothing stacked and nothing shared. `eager_kv` and `eager_latent` are the same maths as an engine's layer-by-layer
code does it in the storage dtype, with a rounding after every step; a kernel should be no worse than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pytest_specdecode.errors import FusedKVError, InputError, StackRangeError
from pytest_specdecode.fused_kv.latent_stack import down_projection_of, latent_widths_of, row_norm_of
from pytest_specdecode.fused_kv.stack import norm_eps_of, norm_kind_of, norm_width_of, value_scale_of


def fused_kv_reference(
    layers: Sequence[Any], ctx_hidden: Tensor, positions: Tensor, *, rotary_emb: Any = None
) -> tuple[Tensor, Tensor]:
    """K and V of every layer for the context, in float64.

    For each layer: `k, v = ctx @ W[q_size:].T + b[q_size:]` (ctx through the layer's `context_norm` first, where it has one), K normed per
    head with the layer's own weight and epsilon, its leading `rotary_dim` lanes rotated by the rows `positions` of the layer's own table, V
    times the layer's value scale.

    Args:
        layers: duck-typed as for FusedKV; `self_attn` is read.
        ctx_hidden: `[T, hidden_size]`, any floating dtype; its values are taken as exact.
        positions: `[T]` integers.
        rotary_emb: one rotary object for all layers, instead of each layer's own.

    Returns:
        K and V, each `[L, T, num_kv_heads, head_dim]`, float64, on ctx_hidden's device.

    Raises:
        InputError: shapes do not fit, or a position is negative.
        StackRangeError: a table is too short for the positions and cannot grow.
    """
    return _each_layer(layers, ctx_hidden, positions, rotary_emb, torch.float64)


def eager_kv(
    layers: Sequence[Any],
    ctx_hidden: Tensor,
    positions: Tensor,
    *,
    rotary_emb: Any = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `fused_kv_reference`, in `dtype` (default: each layer's weight dtype), rounded after projection, norm, rotation and scale."""
    return _each_layer(layers, ctx_hidden, positions, rotary_emb, dtype)


def fused_latent_reference(
    layers: Sequence[Any], ctx_hidden: Tensor, positions: Tensor, *, rotary_emb: Any = None
) -> Tensor:
    """The cache rows of every latent-attention layer for the context, in float64.

    For each layer: `latent, k_pe = ctx @ W.T + b` (of a joined down projection the rows after Q's), the latent normed with the layer's
    own weight and epsilon, k_pe, which is not normed, rotated by the rows `positions` of the layer's own table in the table's style. Where
    the norm's weight is as wide as the row (DeepSeek-V4), the whole row is normed first, and k_pe rotated as it then is.

    Args:
        layers: duck-typed as for FusedLatentKV; `self_attn` is read.
        ctx_hidden: `[T, hidden_size]`, any floating dtype; its values are taken as exact.
        positions: `[T]` integers.
        rotary_emb: one rotary object for all layers, instead of each layer's own.

    Returns:
        `[L, T, kv_lora_rank + qk_rope_head_dim]`, float64, on ctx_hidden's device.

    Raises:
        InputError: shapes do not fit, or a position is negative.
        StackRangeError: a table is too short for the positions and cannot grow.
    """
    return _each_latent(layers, ctx_hidden, positions, rotary_emb, torch.float64)


def eager_latent(
    layers: Sequence[Any],
    ctx_hidden: Tensor,
    positions: Tensor,
    *,
    rotary_emb: Any = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As `fused_latent_reference`, in `dtype` (default: each layer's weight dtype), rounded after projection, norm and rotation."""
    return _each_latent(layers, ctx_hidden, positions, rotary_emb, dtype)


def _each_latent(
    layers: Sequence[Any], ctx_hidden: Tensor, positions: Tensor, rotary_emb: Any, dtype: torch.dtype | None
) -> Tensor:
    _check_call(layers, ctx_hidden, positions)
    return torch.stack(
        [_one_latent(layer.self_attn, ctx_hidden, positions, rotary_emb, dtype, at) for at, layer in enumerate(layers)]
    )


def _one_latent(
    attn: Any, ctx_hidden: Tensor, positions: Tensor, rotary_emb: Any, dtype: torch.dtype | None, index: int
) -> Tensor:
    projection, is_joined = down_projection_of(attn)
    rows = slice(attn.q_lora_rank if is_joined else 0, None)
    projected = _project(projection, rows, ctx_hidden, dtype)
    rank, rope_dim = latent_widths_of(attn)
    if rank is None or rope_dim is None:
        raise FusedKVError(f"layer {index} does not say how wide its latent and its k_pe are", axis="kv-lora-rank")
    norm = row_norm_of(attn)
    is_whole = norm_width_of(norm) == rank + rope_dim
    if is_whole:
        projected = _norm(projected, norm, "kv_norm")
    latent, k_pe = torch.split(projected, [rank, rope_dim], dim=-1)
    if not is_whole:
        latent = _norm(latent, norm, "kv_a_layernorm")
    rotary = attn.rotary_emb if rotary_emb is None else rotary_emb
    table = _table_rows(rotary, positions, index).to(ctx_hidden.device)
    turned = _rotate(k_pe.unsqueeze(1), table, bool(getattr(rotary, "is_neox_style", True))).squeeze(1)
    return torch.cat([latent, turned], dim=-1)


def _each_layer(
    layers: Sequence[Any], ctx_hidden: Tensor, positions: Tensor, rotary_emb: Any, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    _check_call(layers, ctx_hidden, positions)
    pairs = [_one_layer(layer, ctx_hidden, positions, rotary_emb, dtype, at) for at, layer in enumerate(layers)]
    keys, values = zip(*pairs, strict=True)
    return torch.stack(keys), torch.stack(values)


def _check_call(layers: Sequence[Any], ctx_hidden: Tensor, positions: Tensor) -> None:
    if ctx_hidden.ndim != 2 or positions.ndim != 1 or positions.shape[0] != ctx_hidden.shape[0]:
        raise InputError(
            f"ctx_hidden [T, hidden_size] and positions [T] are due; got {tuple(ctx_hidden.shape)} and {tuple(positions.shape)}",
            axis="positions",
            expected=("[T, hidden_size]", "[T]"),
            got=(tuple(ctx_hidden.shape), tuple(positions.shape)),
        )
    if not layers:
        raise InputError("at least one layer is due", axis="layers", expected=1, got=0)


def _one_layer(
    layer: Any, ctx_hidden: Tensor, positions: Tensor, rotary_emb: Any, dtype: torch.dtype | None, index: int
) -> tuple[Tensor, Tensor]:
    attn, context_norm = layer.self_attn, getattr(layer, "context_norm", None)
    rows = slice(attn.q_size, attn.q_size + 2 * attn.kv_size)
    if context_norm is not None:
        ctx_hidden = _norm(
            ctx_hidden.to(attn.qkv_proj.weight.dtype if dtype is None else dtype), context_norm, "context_norm"
        )
    projected = _project(attn.qkv_proj, rows, ctx_hidden, dtype)
    k, v = projected.reshape(-1, 2, attn.num_kv_heads, attn.head_dim).unbind(1)
    k = _norm(k, attn.k_norm, "k_norm")
    rotary = attn.rotary_emb if rotary_emb is None else rotary_emb
    table = _table_rows(rotary, positions, index).to(ctx_hidden.device)
    k = _rotate(k, table, bool(getattr(rotary, "is_neox_style", True)))
    scale = value_scale_of(attn)
    return k, v if scale == 1.0 else (v.to(_wide(v)) * scale).to(v.dtype)


def _project(projection: Any, rows: slice, ctx_hidden: Tensor, dtype: torch.dtype | None) -> Tensor:
    weight, bias = projection.weight, getattr(projection, "bias", None)
    dtype, device = weight.dtype if dtype is None else dtype, ctx_hidden.device
    return F.linear(
        ctx_hidden.to(dtype),
        weight[rows].detach().to(device, dtype),
        None if bias is None else bias[rows].detach().to(device, dtype),
    )


def _norm(k: Tensor, norm: Any, name: str) -> Tensor:
    eps = norm_eps_of(norm)
    if eps is None:
        raise FusedKVError(f"{name} has no epsilon (variance_epsilon or eps)", axis="norm-eps")
    wide = _wide(k)
    weight: Tensor = norm.weight.detach().to(k.device, wide)
    if norm_kind_of(norm) == "gemma":
        weight = 1.0 + weight
    exact = k.to(wide)
    mean_square = exact.square().mean(dim=-1, keepdim=True)
    if wide == torch.float64:
        return exact / torch.sqrt(mean_square + eps) * weight
    # The baseline rounds as eager layers do, which multiply by the inverse root (transformers' and SGLang's RMSNorm).
    return (exact * torch.rsqrt(mean_square + eps) * weight).to(k.dtype)


def _rotate(k: Tensor, rows: Tensor, is_neox_style: bool) -> Tensor:
    rotary_dim = rows.shape[-1]
    cos, sin = rows.to(_wide(k)).unsqueeze(1).chunk(2, dim=-1)
    turning, rest = k[..., :rotary_dim].to(_wide(k)), k[..., rotary_dim:]
    if is_neox_style:
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(k.dtype), rest], dim=-1)


def _table_rows(rotary_emb: Any, positions: Tensor, index: int) -> Tensor:
    highest = int(positions.max()) if positions.numel() else -1
    if positions.numel() and int(positions.min()) < 0:
        raise InputError(
            f"positions must not be negative: got {int(positions.min())}",
            axis="positions",
            expected=">= 0",
            got=int(positions.min()),
        )
    grow = getattr(rotary_emb, "_ensure_cos_sin_cache_length", None)
    if highest >= rotary_emb.cos_sin_cache.shape[0] and grow is not None:
        grow(highest)
    table: Tensor = rotary_emb.cos_sin_cache
    if highest >= table.shape[0]:
        raise StackRangeError(
            f"RoPE cos/sin cache of layer {index} is too short: max_position={highest}, cache_len={table.shape[0]}.",
            axis="positions",
            expected=table.shape[0] - 1,
            got=highest,
            layer=index,
        )
    return table[positions.to(table.device).long()]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
