"""`FusedLatentKV`: the cache rows of every latent-attention layer from one GEMM and one kernel launch.

The counterpart of `FusedKV` for drafts whose layers keep one row per token instead of K/V heads, be it a latent normed alone with a
`k_pe` behind it or DeepSeek-V4's row normed whole, with the same habits: it refuses
what the stack cannot serve (`latent_stack.py`), checks positions against the table, notices changed weights, refuses a rope table that
grew wrongly, and hands out fresh tensors.

Where the numbers are rounded: the projection, bias included, once to the weight's dtype by the GEMM; every lane once more at the store,
after norm or rotation in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_specdecode.fused_kv.inputs import check_attributes, check_epsilons, checked_tokens
from pytest_specdecode.fused_kv.latent_kernel import fused_latent_norm_rope, normed_width
from pytest_specdecode.fused_kv.latent_stack import (
    PROJECTION,
    ROW_PROJECTIONS,
    LatentFacts,
    down_projection_of,
    latent_facts_of,
    latent_widths_of,
    norm_name,
    projection_name_of,
    row_norm_of,
    validate_latent,
)
from pytest_specdecode.fused_kv.stack import rope_facts
from pytest_specdecode.fused_kv.stacked import StackedPath

WriteLayerLatent = Callable[[int, Tensor], object]

_ATTRIBUTES = ("kv_lora_rank", "qk_rope_head_dim", "rotary_emb")
#: Of a DeepSeek-V4 layer; its rotated lanes go by two names.
_ROW_ATTRIBUTES = ("head_dim", "rotary_emb")


class FusedLatentKV(StackedPath):
    """The stacked latent path of a draft.

    Args:
        layers: `layer.self_attn.{kv_a_proj_with_mqa, kv_a_layernorm, kv_lora_rank, qk_rope_head_dim, rotary_emb}` is read, or
            `fused_qkv_a_proj_with_mqa` and `q_lora_rank` where the down projections are joined; of DeepSeek-V4's layers `wkv` or
            `fused_wqa_wkv`, `kv_norm` and `head_dim` in their place; see `latent_facts_of`.
        rotary_emb: the rotary object that serves all layers.
        kv_lora_rank, qk_rope_head_dim: what every layer must have; of DeepSeek-V4's row the lanes before the rotated ones, and those.
        device: where the stacked weights live and the work is done.
        max_position_hint: positions below this must be in the rope table from the start; it is grown if it can grow.
        backend: `triton`, `eager` (plain torch, same roundings), or `auto`: triton where it is installed.

    Attributes:
        num_layers, hidden_size, dtype, is_neox_style: of the stack.
        latent_norm: `latent` or `whole`, what every layer's norm goes over.
        backend: `triton` or `eager`, as chosen.
        facts: one LatentFacts per layer.

    Raises:
        StackMismatchError, StackUnsupportedError: the first reason why these layers are no stack; carries axis, expected, got, layer.
        StackRangeError: the rope table is shorter than the hint and does not grow.
    """

    _path = "latent"
    facts: tuple[LatentFacts, ...]

    def __init__(
        self,
        layers: Sequence[Any],
        rotary_emb: Any,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        device: torch.device | str,
        max_position_hint: int | None = None,
        *,
        backend: Literal["auto", "triton", "eager"] = "auto",
    ) -> None:
        self.kv_lora_rank = int(kv_lora_rank)
        self.qk_rope_head_dim = int(qk_rope_head_dim)
        self.is_neox_style = bool(getattr(rotary_emb, "is_neox_style", True))
        super().__init__(layers, rotary_emb, device, max_position_hint, backend)

    def materialize(self, ctx_hidden: Tensor, positions: Tensor, write_layer_latent: WriteLayerLatent) -> None:
        """The cache rows of the context, handed over layer by layer.

        Args:
            ctx_hidden: `[T, hidden_size]`; cast to the weights' dtype.
            positions: T integers of any shape and stride, each >= 0 and in the rope table (which is grown if it can grow).
            write_layer_latent: called with (layer index, rows) for layer 0, 1, …; rows are `[T, kv_lora_rank + qk_rope_head_dim]` in the
                weights' dtype, the normed latent and then the rotated k_pe (normed as well, where the norm goes over the whole row), fresh
                for each call of `materialize`. Not called where T is 0.

        Raises:
            InputError: ctx_hidden or positions do not fit.
            StackRangeError: the rope table is too short for the positions.
            StackUnsupportedError: the table grew, and the new rows do not continue the old ones.
        """
        rows = self.compute(ctx_hidden, positions)
        if rows.shape[1] == 0:
            return
        for layer, layer_rows in enumerate(rows):
            write_layer_latent(layer, layer_rows)

    @torch.no_grad()
    def compute(self, ctx_hidden: Tensor, positions: Tensor) -> Tensor:
        """As `materialize`, but returned: `[L, T, kv_lora_rank + qk_rope_head_dim]`."""
        if checked_tokens(ctx_hidden, self._path) == 0:
            width = self.kv_lora_rank + self.qk_rope_head_dim
            return torch.empty((self.num_layers, 0, width), dtype=self.dtype, device=self.device)
        positions = self._ready(ctx_hidden, positions)
        run = fused_latent_norm_rope if self.backend == "triton" else _eager_latent_norm_rope
        return run(
            self.project(ctx_hidden.to(self.device, self.dtype)),
            positions.to(self.device),
            self._norm_weight,
            self._eps,
            self._table.to(self.device),
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            is_neox_style=self.is_neox_style,
            latent_norm=self.latent_norm,
        )

    @property
    def latent_norm(self) -> Literal["latent", "whole"]:
        """What every layer's norm goes over."""
        return "whole" if self.facts[0].latent_norm == "whole" else "latent"

    def project(self, ctx_hidden: Tensor) -> Tensor:
        """The stacked projection alone, bias included: `[T, hidden_size]` in the stack's dtype and device to
        `[T, L, kv_lora_rank + qk_rope_head_dim]`, per layer the latent before its norm, then k_pe before its rotation."""
        return self._projected(ctx_hidden)

    # --- what StackedPath asks for ---

    def _validated(self, layers: Sequence[Any]) -> tuple[LatentFacts, ...]:
        for index, layer in enumerate(layers):
            _check_layer(layer, index, self._path)
        facts = tuple(latent_facts_of(layer) for layer in layers)
        validate_latent(
            facts,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            is_neox_style=self.is_neox_style,
            shared_rope=rope_facts(self.rotary_emb, self.qk_rope_head_dim),
        )
        check_epsilons([fact.norm_eps for fact in facts], norm_name(facts[0]), self._path)
        return facts

    def _source(self, attn: Any) -> tuple[Any, slice, Any]:
        projection, is_joined = down_projection_of(attn)
        return projection, slice(int(attn.q_lora_rank) if is_joined else 0, None), row_norm_of(attn)


def _check_layer(layer: Any, index: int, path: str) -> None:
    """StackUnsupportedError where the layer lacks what the path reads."""
    attn = check_attributes(layer, index, ("rotary_emb",), path)
    name = projection_name_of(attn)
    if name is None:
        check_attributes(layer, index, (PROJECTION,), path)
    check_attributes(layer, index, _ROW_ATTRIBUTES if name in ROW_PROJECTIONS else _ATTRIBUTES, path)
    if latent_widths_of(attn)[1] is None:
        check_attributes(layer, index, ("qk_rope_head_dim",), path)
    if down_projection_of(attn)[1]:
        check_attributes(layer, index, ("q_lora_rank",), path)


# --- the same without triton ------------------------------------------------------------------------------------------------------------


def _eager_latent_norm_rope(
    kv_a: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    is_neox_style: bool,
    latent_norm: Literal["latent", "whole"],
) -> Tensor:
    """`fused_latent_norm_rope` in plain torch: float32 between the load and the one rounding at the end."""
    rows, lanes = kv_a.transpose(0, 1).float(), normed_width(latent_norm, kv_lora_rank, kv_a.shape[-1])
    to_norm, rest = rows[..., :lanes], rows[..., lanes:]
    inverse = torch.rsqrt(to_norm.square().sum(dim=-1, keepdim=True) / lanes + eps[:, None, None])
    rows = torch.cat([to_norm * inverse * norm_weight[:, None, :].float(), rest], dim=-1)
    latent, k_pe = torch.split(rows, [kv_lora_rank, qk_rope_head_dim], dim=-1)
    cos, sin = cos_sin_cache[positions.long()].float()[None].chunk(2, dim=-1)
    first, second = k_pe.chunk(2, dim=-1) if is_neox_style else (k_pe[..., 0::2], k_pe[..., 1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, dim=-1) if is_neox_style else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat([latent, joined], dim=-1).to(kv_a.dtype)
