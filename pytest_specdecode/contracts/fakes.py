"""Layers as an engine would hand them over, in the forms that the strategies do not draw."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def placed(layers: Sequence[Any], device: torch.device) -> list[Any]:
    """The layers on `device`: themselves on the CPU, else copies."""
    if device.type == "cpu":
        return list(layers)
    return [_moved(layer, device) for layer in layers]


def with_rows(layers: Sequence[Any], rows: int) -> list[Any]:
    """The layers with one rope table of `rows` rows, which cannot grow."""
    whole = layers[0].self_attn.rotary_emb
    fixed = SimpleNamespace(
        rotary_dim=whole.rotary_dim,
        is_neox_style=whole.is_neox_style,
        base=whole.base,
        rope_scaling=whole.rope_scaling,
        cos_sin_cache=whole.cos_sin_cache[:rows].clone(),
    )
    return [as_namespace(layer, rotary_emb=fixed) for layer in layers]


#: What a stacked path reads of a layer's attention.
_READ = ("qkv_proj", "q_size", "kv_size", "num_kv_heads", "head_dim", "rotary_emb", "k_norm", "value_scale")


def as_namespace(layer: Any, **changes: Any) -> Any:
    """The layer as a plain namespace of what is read of it, with changes to its attention."""
    attn = layer.self_attn
    read = {name: getattr(attn, name) for name in _READ if hasattr(attn, name)}
    return SimpleNamespace(self_attn=SimpleNamespace(**{**read, **changes}))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: _moved(item, device) for name, item in vars(value).items()})
    return value
