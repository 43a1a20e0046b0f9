"""From a layer's spec and its tensors to the modules that a family's forward is made of.

The one place where families meet torch: everything else in the package stays importable without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.families.base import TensorSource
from pytest_specdecode.layers import (
    GatedMLP,
    GQAAttention,
    KVCache,
    LatentCache,
    MLAAttention,
    MoE,
    RMSNorm,
    SharedRowAttention,
)
from pytest_specdecode.layers.linear import Linear, known, take
from pytest_specdecode.spec import DraftSpec, Extent, LayerSpec, MLASpec

Attention = GQAAttention | MLAAttention

#: Last parts of a tensor's name; a key that ends otherwise is the configuration's.
_TENSOR_ENDS = (
    "weight",
    "bias",
    "e_score_correction_bias",
    "gate_up_proj",
    "down_proj",
    "attention_sink_bias",
    "attn_sink",
)


def build_attention(layer: LayerSpec, source: TensorSource) -> Attention:
    """The attention of `layer`; LayerBuildError names what is missing or of the wrong shape."""
    prefix = f"layers.{layer.index}.self_attn"
    tensors = source.under(prefix)
    spec = layer.attention
    if spec is None:
        raise LayerBuildError(f"layer {layer.index} has no attention")
    try:
        if isinstance(spec, MLASpec):
            return MLAAttention(spec, tensors, norm_eps=layer.norm_eps, norm_kind=layer.norm_kind)
        return GQAAttention(spec, tensors, norm_eps=layer.norm_eps, norm_kind=layer.norm_kind)
    except LayerBuildError as error:
        raise _in_layer(error, prefix) from error


def build_mlp(layer: LayerSpec, source: TensorSource) -> GatedMLP:
    """The gated MLP of `layer`."""
    prefix = f"layers.{layer.index}.mlp"
    if layer.intermediate_size is None:
        raise LayerBuildError("is not stated; the MLP's width is unknown", key="intermediate_size")
    width = _hidden_size(layer)
    try:
        return GatedMLP.from_tensors(
            source.under(prefix),
            in_features=width,
            intermediate_size=layer.intermediate_size,
            hidden_act=layer.hidden_act,
            bias=layer.mlp_bias,
        )
    except LayerBuildError as error:
        raise _in_layer(error, prefix) from error


def build_moe(layer: LayerSpec, source: TensorSource) -> MoE:
    """The mixture of experts of `layer`."""
    prefix = f"layers.{layer.index}.mlp"
    if layer.moe is None:
        raise LayerBuildError(f"layer {layer.index} has no experts")
    width = _hidden_size(layer)
    try:
        return MoE(layer.moe, source.under(prefix), hidden_size=width, hidden_act=layer.hidden_act)
    except LayerBuildError as error:
        raise _in_layer(error, prefix) from error


def build_norm(layer: LayerSpec, source: TensorSource, name: str) -> RMSNorm:
    """The norm `name` of `layer`, over its H."""
    width = _hidden_size(layer)
    try:
        weight = take(source.under(name), "weight", (width,))
    except LayerBuildError as error:
        raise _in_layer(error, name) from error
    return RMSNorm(weight, layer.norm_eps, layer.norm_kind)


def take_named(source: TensorSource, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor `name` [shape], which is no layer's; LayerBuildError names it where it is missing or of another shape."""
    module, _, last = name.rpartition(".")
    found = source.under(module or name)
    try:
        return take(found, last if module else "", shape)
    except LayerBuildError as error:
        raise LayerBuildError(error.message, path=error.path, key=name, got=error.got, due=error.due) from error


def build_vector_norm(spec: DraftSpec, source: TensorSource, name: str, width: Extent) -> RMSNorm:
    """A norm of `width` outside the layers, with the draft's epsilon."""
    try:
        weight = take(source.under(name), "weight", (known(width, "hidden_size"),))
    except LayerBuildError as error:
        raise _in_layer(error, name) from error
    return RMSNorm(weight, spec.norm_eps)


def build_projection(source: TensorSource, name: str, rows: Extent, columns: Extent) -> Linear:
    """A projection without bias outside the layers, `[rows, columns]`."""
    try:
        weight = take(source.under(name), "weight", (known(rows, name), known(columns, name)))
    except LayerBuildError as error:
        raise _in_layer(error, name) from error
    return Linear(weight, name=f"{name}.weight")


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Inside, a LayerBuildError about a tensor gets `prefix` before the tensor's local name; a name that has it stays."""
    try:
        yield
    except LayerBuildError as error:
        local = error.key is not None and not error.key.startswith(f"{prefix}.")
        key = f"{prefix}.{error.key}" if local else error.key
        raise LayerBuildError(error.message, path=error.path, key=key, got=error.got, due=error.due) from error


@contextmanager
def in_module(prefix: str) -> Iterator[None]:
    """As `prefixed`, for a module that also reads values of the configuration: their keys stay as they are."""
    try:
        yield
    except LayerBuildError as error:
        raise _in_layer(error, prefix) from error


def new_cache(attention: Attention | SharedRowAttention) -> KVCache | LatentCache:
    """An empty cache of the kind that `attention` keeps."""
    return KVCache() if isinstance(attention, GQAAttention) else LatentCache()


def random_states(
    like: torch.Tensor, count: int, tokens: int, seed: int, scale: float, batch: int
) -> list[torch.Tensor]:
    """`count` normal tensors of deviation `scale`, `[tokens, H]` or `[batch, tokens, H]`, with dtype, device and H of `like` [H]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, like.shape[0]) if batch == 1 else (batch, tokens, like.shape[0])
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device=like.device, dtype=like.dtype)
        for _ in range(count)
    ]


def positions_like(states: torch.Tensor) -> torch.Tensor:
    """Positions 0, 1, … for states `[T, H]` or `[B, T, H]`."""
    positions = torch.arange(states.shape[-2], device=states.device)
    return positions if states.ndim == 2 else positions.expand(states.shape[0], -1)


def _hidden_size(layer: LayerSpec) -> int:
    if layer.attention is None or layer.attention.out_features is None:
        raise LayerBuildError("is not stated; the layer's width is unknown", key="hidden_size")
    return layer.attention.out_features


def _in_layer(error: LayerBuildError, prefix: str) -> LayerBuildError:
    """The same error with the tensor's whole name; a message about the configuration keeps its key."""
    key = error.key
    if key is not None and key.rpartition(".")[2] in _TENSOR_ENDS:
        key = f"{prefix}.{key}"
    return LayerBuildError(error.message, path=error.path, key=key, got=error.got, due=error.due)
