"""Where engines round a K on its way from the projection to the cache.

They do not agree, and none of them is wrong; but each is one of these, exactly. Measured over unit-normal K in bfloat16: against one
rounding at the store, 29 % of the elements differ where the normed K is rounded too, 45 % where every step is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from pytest_specdecode.fused_kv import fused_kv_reference
from pytest_specdecode.fused_kv.stack import norm_eps_of, norm_kind_of, value_scale_of
from pytest_specdecode.numerics import TOLERANCES, assert_close

#: After the projection, which always is rounded: K once, at the store (SGLang's stacked kernel, FusedKV); after norm and weight as well
#: (vLLM's and DSpark's); or after every operation, with a table in the weights' dtype (layer-by-layer code of Hugging Face's kind).
Rounding = Literal["at-the-store", "after-the-norm", "after-each-step"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

#: For numbers of few kinds: a whole tensor may be one row repeated, and then all its errors may be the same half ulp. So twice the slack
#: for the mean.
FEW_NUMBERS = {
    dtype: dataclasses.replace(tolerance, mean_ulps=2 * tolerance.mean_ulps) for dtype, tolerance in TOLERANCES.items()
}


def assert_kv(
    got: tuple[Tensor, Tensor],
    layers: Sequence[Any],
    ctx_hidden: Tensor,
    positions: Tensor,
    rounding: Rounding,
    *,
    few_numbers: bool = False,
) -> None:
    """K and V, each `[L, T, num_kv_heads, head_dim]`, are as near to the float64 reference as rounding where `rounding` says gets them.

    Args:
        got: what was handed over. layers, ctx_hidden, positions, rounding: as for `rounded_kv`.
        few_numbers: the numbers may be of few kinds; see `FEW_NUMBERS`.

    Raises:
        NumericsError: they are not.
    """
    truth = fused_kv_reference(layers, ctx_hidden.to(layers[0].self_attn.qkv_proj.weight.dtype), positions)
    base = rounded_kv(layers, ctx_hidden, positions, rounding)
    attn = layers[0].self_attn
    for name, tensor, due, eager in zip("KV", got, truth, base, strict=True):
        assert_close(
            tensor,
            due,
            eager,
            what=name,
            reduction_sizes=(ctx_hidden.shape[-1], attn.head_dim),
            tolerance=FEW_NUMBERS[eager.dtype] if few_numbers else None,
        )


def rounded_kv(
    layers: Sequence[Any], ctx_hidden: Tensor, positions: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """K and V of every layer, each `[L, T, num_kv_heads, head_dim]`, in the weights' dtype, rounded where `rounding` says.

    Between two roundings the arithmetic is float64, so the result is what a kernel of that order should give, up to its own float32.

    Args:
        layers: duck-typed as for FusedKV; each with its own weight, norm and table.
        ctx_hidden: `[T, hidden_size]`. positions: `[T]`, each in the tables.
        rounding: one of `ROUNDINGS`.
    """
    pairs = [_one_layer(layer.self_attn, ctx_hidden, positions, rounding) for layer in layers]
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def _one_layer(attn: Any, ctx_hidden: Tensor, positions: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    weight = attn.qkv_proj.weight.detach()
    dtype = weight.dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    def stepped(x: Tensor) -> Tensor:
        return rounded(x) if rounding == "after-each-step" else x

    rows = slice(attn.q_size, attn.q_size + 2 * attn.kv_size)
    bias = getattr(attn.qkv_proj, "bias", None)
    projected = F.linear(ctx_hidden.to(dtype), weight[rows], None if bias is None else bias.detach()[rows])
    k, v = projected.view(-1, 2, attn.num_kv_heads, attn.head_dim).unbind(1)

    exact, norm = k.double(), attn.k_norm
    inverse = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + (norm_eps_of(norm) or 0.0))
    factor = norm.weight.detach().double() + (norm_kind_of(norm) == "gemma")
    normed = stepped(exact * inverse) * factor
    normed = normed if rounding == "at-the-store" else rounded(normed)

    table = stepped(attn.rotary_emb.cos_sin_cache.detach()[positions.long()].double())
    cos, sin = table[:, None, :].chunk(2, dim=-1)
    rotary_dim = table.shape[-1]
    turning, rest = normed[..., :rotary_dim], normed[..., rotary_dim:]
    halves = bool(getattr(attn.rotary_emb, "is_neox_style", True))
    first, second = turning.chunk(2, dim=-1) if halves else (turning[..., 0::2], turning[..., 1::2])
    both = stepped(first * cos) - stepped(second * sin), stepped(second * cos) + stepped(first * sin)
    turned = torch.cat([torch.cat(both, dim=-1) if halves else torch.stack(both, dim=-1).flatten(-2), rest], dim=-1)
    scale = value_scale_of(attn)
    return turned.to(dtype), v if scale == 1.0 else (v.double() * scale).to(dtype)
