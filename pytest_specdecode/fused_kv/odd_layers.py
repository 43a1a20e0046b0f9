"""A real layer made odd in one axis: what a stacked path must not take for one of its own.

The strategies draw odd layers of their own making; here a checkpoint's layer is changed, so that an implementation can be shown what it
would meet if the next export of this draft went wrong. All that is not changed is the layer's own, down to the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.fused_kv.stack import norm_eps_of, norm_kind_of, quantization_of, value_scale_of
from pytest_specdecode.layers import RMSNorm, RotaryEmbedding
from pytest_specdecode.spec import RopeSpec


class NoOddLayerError(DraftError):
    """The layer leaves no room to be odd in this axis, such as a head of two lanes for another `rotary_dim`."""


def odd_layer(layer: Any, axis: str, rope: RopeSpec) -> Any:
    """A layer that differs from `layer` in `axis`, and in what follows from it: wider heads have more rows.

    Args:
        layer: duck-typed as for FusedKV, of the form that FusedKV serves.
        axis: one of `AXES`.
        rope: the rotary embedding of the layer.

    Returns:
        A namespace of what a stacked path reads. The layer and its tensors stay as they are; tensors that are not changed are shared.

    Raises:
        NoOddLayerError: there is no other value of the axis for such a layer.
    """
    attn = layer.self_attn
    changes = _CHANGES[axis](attn, rope)
    read = {name: getattr(attn, name) for name in _READ if hasattr(attn, name)}
    parts = {"context_norm": norm} if (norm := getattr(layer, "context_norm", None)) is not None else {}
    return SimpleNamespace(self_attn=SimpleNamespace(**{**read, **changes}), **parts)


def with_short_table(layers: Sequence[Any], rows: int) -> list[Any]:
    """The layers with one rope table of `rows` rows, layer 0's, which cannot grow."""
    whole = layers[0].self_attn.rotary_emb
    fixed = SimpleNamespace(
        rotary_dim=whole.rotary_dim,
        is_neox_style=whole.is_neox_style,
        base=whole.base,
        rope_scaling=whole.rope_scaling,
        cos_sin_cache=whole.cos_sin_cache[:rows].clone(),
    )
    found = []
    for layer in layers:
        read = {name: getattr(layer.self_attn, name) for name in _READ if hasattr(layer.self_attn, name)}
        parts = {"context_norm": norm} if (norm := getattr(layer, "context_norm", None)) is not None else {}
        found.append(SimpleNamespace(self_attn=SimpleNamespace(**{**read, "rotary_emb": fixed}), **parts))
    return found


#: What a stacked path reads of a layer's attention.
_READ = (
    *("qkv_proj", "q_size", "kv_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    *("rotary_emb", "k_norm", "value_scale"),
)

Changes = Mapping[str, Any]


def _parts(attn: Any, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of Q, K and V."""
    q, k, v = torch.split(tensor.detach(), [attn.q_size, attn.kv_size, tensor.shape[0] - attn.q_size - attn.kv_size])
    return q, k, v


def _projection(attn: Any, change: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]) -> SimpleNamespace:
    """The projection with other rows, of its bias too."""
    bias = getattr(attn.qkv_proj, "bias", None)
    return SimpleNamespace(
        weight=torch.cat(list(change(*_parts(attn, attn.qkv_proj.weight)))),
        bias=None if bias is None else torch.cat(list(change(*_parts(attn, bias)))),
    )


def _num_kv_heads(attn: Any, rope: RopeSpec) -> Changes:
    heads = attn.num_kv_heads
    fewer = heads // 2 if heads > 1 else 2
    rows = fewer * attn.head_dim

    def resized(part: Tensor) -> Tensor:
        return torch.cat([part, part])[:rows]

    return {
        "num_kv_heads": fewer,
        "kv_size": rows,
        "qkv_proj": _projection(attn, lambda q, k, v: (q, resized(k), resized(v))),
    }


def _head_dim(attn: Any, rope: RopeSpec) -> Changes:
    wide = 2 * attn.head_dim

    def doubled(part: Tensor) -> Tensor:
        heads = part.reshape(-1, attn.head_dim, *part.shape[1:])
        return torch.cat([heads, heads], dim=1).flatten(0, 1)

    norm = attn.k_norm
    return {
        "head_dim": wide,
        "v_head_dim": wide,
        "kv_size": attn.num_kv_heads * wide,
        "q_size": 2 * attn.q_size,
        "qkv_proj": _projection(attn, lambda q, k, v: (doubled(q), doubled(k), doubled(v))),
        "k_norm": _norm(norm, norm.weight.detach().repeat(2)),
    }


def _rotary_dim(attn: Any, rope: RopeSpec) -> Changes:
    width = int(attn.rotary_emb.rotary_dim)
    other = next(
        (lanes for lanes in (width // 4 * 2, width + 2) if 0 < lanes <= attn.head_dim and lanes != width), None
    )
    if other is None or rope.rope_type == "proportional":
        raise NoOddLayerError(f"a head of {attn.head_dim} lanes has no other number of lanes that could rotate")
    return _rotary(attn, rope, rotary_dim=other)


def _rope_style(attn: Any, rope: RopeSpec) -> Changes:
    return _rotary(attn, rope, is_neox_style=not attn.rotary_emb.is_neox_style)


def _rope_theta(attn: Any, rope: RopeSpec) -> Changes:
    if attn.rotary_emb.rotary_dim == 2:
        raise NoOddLayerError("of two lanes the only frequency is 1, whatever the base")
    return _rotary(attn, rope, theta=100.0 * float(attn.rotary_emb.base))


def _rope_scaling(attn: Any, rope: RopeSpec) -> Changes:
    if rope.rope_type != "default":
        return _rotary(attn, rope, rope_type="default", scaling={})
    return _rotary(attn, rope, rope_type="linear", scaling={"rope_type": "linear", "factor": 4.0})


def _rotary(attn: Any, rope: RopeSpec, **changes: Any) -> Changes:
    table = attn.rotary_emb.cos_sin_cache
    try:
        other = RotaryEmbedding(dataclasses.replace(rope, **changes), attn.head_dim).to(table.device)
        other._ensure_cos_sin_cache_length(table.shape[0] - 1)
    except LayerBuildError as error:
        raise NoOddLayerError(f"its RoPE cannot be had with another: {error.brief}") from None
    return {"rotary_emb": other}


def _hidden_size(attn: Any, rope: RopeSpec) -> Changes:
    weight = attn.qkv_proj.weight.detach()
    return {"qkv_proj": _plain(torch.cat([weight, weight[:, : max(1, weight.shape[1] // 2)]], dim=1), attn)}


def _dtype(attn: Any, rope: RopeSpec) -> Changes:
    weight, bias, norm = attn.qkv_proj.weight.detach(), getattr(attn.qkv_proj, "bias", None), attn.k_norm
    other = torch.float16 if weight.dtype == torch.bfloat16 else torch.bfloat16
    return {
        "qkv_proj": SimpleNamespace(weight=weight.to(other), bias=None if bias is None else bias.detach().to(other)),
        "k_norm": _norm(norm, norm.weight.detach().to(other)),
    }


def _bias(attn: Any, rope: RopeSpec) -> Changes:
    weight = attn.qkv_proj.weight.detach()
    if getattr(attn.qkv_proj, "bias", None) is not None:
        return {"qkv_proj": SimpleNamespace(weight=weight, bias=None)}
    bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(7))
    return {"qkv_proj": SimpleNamespace(weight=weight, bias=bias.to(weight.device, weight.dtype))}


def _k_norm(attn: Any, rope: RopeSpec) -> Changes:
    if attn.num_kv_heads == 1:
        return {"k_norm": None}
    return {"k_norm": _norm(attn.k_norm, attn.k_norm.weight.detach().repeat(attn.num_kv_heads))}


def _norm_kind(attn: Any, rope: RopeSpec) -> Changes:
    other = "gemma" if norm_kind_of(attn.k_norm) == "rms" else "rms"
    return {"k_norm": _norm(attn.k_norm, attn.k_norm.weight.detach(), other)}


def _v_head_dim(attn: Any, rope: RopeSpec) -> Changes:
    return {
        "v_head_dim": 2 * attn.head_dim,
        "qkv_proj": _projection(attn, lambda q, k, v: (q, k, v, v)),
    }


def _value_scale(attn: Any, rope: RopeSpec) -> Changes:
    return {"value_scale": 0.5 * value_scale_of(attn)}


def _q_size(attn: Any, rope: RopeSpec) -> Changes:
    if attn.q_size < 2:
        raise NoOddLayerError("Q has one row")
    return {"q_size": attn.q_size // 2}


def _quantization(attn: Any, rope: RopeSpec) -> Changes:
    assert quantization_of(attn.qkv_proj) is None
    return {"qkv_proj": _plain(attn.qkv_proj.weight.detach().clamp(-100, 100).to(torch.float8_e4m3fn), attn)}


def _plain(weight: Tensor, attn: Any) -> SimpleNamespace:
    return SimpleNamespace(weight=weight, bias=getattr(attn.qkv_proj, "bias", None))


def _norm(norm: Any, weight: Tensor, kind: Any = None) -> RMSNorm:
    eps = norm_eps_of(norm)
    assert eps is not None
    return RMSNorm(weight, eps, norm_kind_of(norm) if kind is None else kind)  # type: ignore[arg-type]


_CHANGES: Mapping[str, Callable[[Any, RopeSpec], Changes]] = {
    "num-kv-heads": _num_kv_heads,
    "head-dim": _head_dim,
    "rotary-dim": _rotary_dim,
    "rope-style": _rope_style,
    "rope-theta": _rope_theta,
    "rope-scaling": _rope_scaling,
    "hidden-size": _hidden_size,
    "dtype": _dtype,
    "bias": _bias,
    "k-norm": _k_norm,
    "norm-kind": _norm_kind,
    "v-head-dim": _v_head_dim,
    "value-scale": _value_scale,
    "q-size": _q_size,
    "quantization": _quantization,
}
