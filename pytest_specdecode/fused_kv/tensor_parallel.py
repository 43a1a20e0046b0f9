"""How the K/V projections of a stack are divided among tensor-parallel ranks.

As engines' fused projections do it: query heads in equal runs; KV heads in equal runs while there are enough, else each head on as many
neighbouring ranks as share it. What a rank holds is again a stack, only with fewer heads, and its K and V are those heads of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_specdecode.fused_kv.stack import value_scale_of

if TYPE_CHECKING:
    import torch


def why_not_divided(num_heads: int, num_kv_heads: int, ranks: int) -> str | None:
    """Why `ranks` ranks cannot share these heads, or None where they can. All three are positive."""
    if num_heads % ranks:
        return f"{num_heads} query heads do not divide among {ranks} ranks"
    if num_kv_heads >= ranks and num_kv_heads % ranks:
        return f"{num_kv_heads} KV heads do not divide among {ranks} ranks"
    if num_kv_heads < ranks and ranks % num_kv_heads:
        return f"{num_kv_heads} KV heads cannot be replicated over {ranks} ranks, which they do not divide"
    return None


def rank_kv_heads(num_kv_heads: int, ranks: int, rank: int) -> range:
    """The KV heads of the whole that `rank` (from 0) of `ranks` holds."""
    if num_kv_heads >= ranks:
        count = num_kv_heads // ranks
        return range(rank * count, (rank + 1) * count)
    head = rank // (ranks // num_kv_heads)
    return range(head, head + 1)


def rank_layers(layers: Sequence[Any], ranks: int, rank: int) -> list[Any]:
    """The layers as `rank` (from 0) of `ranks` holds them, in the form that FusedKV takes.

    Args:
        layers: duck-typed as for FusedKV, with heads that divide (`why_not_divided`).
        ranks, rank: how many there are, and which one.
    """
    return [_rank_layer(layer, ranks, rank) for layer in layers]


def _rank_layer(layer: Any, ranks: int, rank: int) -> Any:
    import torch

    attn = layer.self_attn
    heads = rank_kv_heads(attn.num_kv_heads, ranks, rank)
    queries = attn.q_size // ranks
    k = slice(attn.q_size + heads.start * attn.head_dim, attn.q_size + heads.stop * attn.head_dim)
    v = slice(k.start + attn.kv_size, k.stop + attn.kv_size)
    parts = (slice(rank * queries, (rank + 1) * queries), k, v)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.detach()[part] for part in parts])

    bias = getattr(attn.qkv_proj, "bias", None)
    mine = SimpleNamespace(
        qkv_proj=SimpleNamespace(weight=rows(attn.qkv_proj.weight), bias=None if bias is None else rows(bias)),
        q_size=queries,
        kv_size=len(heads) * attn.head_dim,
        num_kv_heads=len(heads),
        head_dim=attn.head_dim,
        rotary_emb=attn.rotary_emb,
        k_norm=attn.k_norm,
        value_scale=value_scale_of(attn),
    )
    return SimpleNamespace(self_attn=mine, context_norm=getattr(layer, "context_norm", None))
