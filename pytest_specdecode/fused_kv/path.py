"""`FusedKV`: the K and V of every draft layer from one GEMM and one kernel launch.

It has the call shape of SGLang's `FusedKVMaterializeHelper`, so that one contract can test both, and differs from it on purpose where
that one goes wrong in silence: it refuses what the stack cannot serve (`stack.py`), checks positions against the table, reads strided
positions by their stride, adds a projection bias, notices changed weights, refuses a rope table that grew wrongly, and hands out fresh
tensors.

Where the numbers are rounded: the projection, bias included, once to the weight's dtype by the GEMM (as `nn.Linear` does it); K once more
at the store, after norm and rotation in float32; V not again, or once where it is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_specdecode.fused_kv.caches import FP8_FORMATS, checked_caches, checked_slots, scale_factors
from pytest_specdecode.fused_kv.inputs import check_attributes, check_epsilons, checked_tokens
from pytest_specdecode.fused_kv.kernel import fused_norm_rope, fused_norm_rope_into
from pytest_specdecode.fused_kv.stack import LayerFacts, facts_of, rope_facts, validate, value_scale_of
from pytest_specdecode.fused_kv.stacked import StackedPath

WriteLayerKV = Callable[[int, Tensor, Tensor], object]

_ATTRIBUTES = ("qkv_proj", "q_size", "kv_size", "num_kv_heads", "head_dim", "rotary_emb")


class FusedKV(StackedPath):
    """The stacked K/V path of a draft.

    Args:
        layers: `layer.self_attn.{qkv_proj, q_size, kv_size, num_kv_heads, head_dim, rotary_emb, k_norm}` is read; see `facts_of`.
            Where every layer has a `context_norm`, the context goes through it before that layer's rows (Laguna): then the GEMM is one
            batched one over the normed contexts.
        rotary_emb: the rotary object that serves all layers.
        num_kv_heads, head_dim: what every layer must have.
        device: where the stacked weights live and the work is done.
        max_position_hint: positions below this must be in the rope table from the start; it is grown if it can grow.
        backend: `triton`, `eager` (plain torch, same roundings), or `auto`: triton where it is installed.

    Attributes:
        num_layers, rotary_dim, is_neox_style, hidden_size, dtype: of the stack.
        backend: `triton` or `eager`, as chosen.
        facts: one LayerFacts per layer.

    Raises:
        StackMismatchError, StackUnsupportedError: the first reason why these layers are no stack; carries axis, expected, got, layer.
        StackRangeError: the rope table is shorter than the hint and does not grow.
    """

    _path = "KV"
    facts: tuple[LayerFacts, ...]

    def __init__(
        self,
        layers: Sequence[Any],
        rotary_emb: Any,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        max_position_hint: int | None = None,
        *,
        backend: Literal["auto", "triton", "eager"] = "auto",
    ) -> None:
        self.num_kv_heads = int(num_kv_heads)
        self.head_dim = int(head_dim)
        self.rotary_dim = int(getattr(rotary_emb, "rotary_dim", self.head_dim))
        self.is_neox_style = bool(getattr(rotary_emb, "is_neox_style", True))
        super().__init__(layers, rotary_emb, device, max_position_hint, backend)

    def materialize(self, ctx_hidden: Tensor, positions: Tensor, write_layer_kv: WriteLayerKV) -> None:
        """K and V of the context, handed over layer by layer.

        Args:
            ctx_hidden: `[T, hidden_size]`; cast to the weights' dtype.
            positions: T integers of any shape and stride, each >= 0 and in the rope table (which is grown if it can grow).
            write_layer_kv: called with (layer index, K, V) for layer 0, 1, …; K and V are `[T, num_kv_heads, head_dim]` in the
                weights' dtype, fresh for each call of `materialize`. Not called where T is 0. K- and V-cache scales are the callback's.

        Raises:
            InputError: ctx_hidden or positions do not fit.
            StackRangeError: the rope table is too short for the positions.
            StackUnsupportedError: the table grew, and the new rows do not continue the old ones.
        """
        pair = self.compute(ctx_hidden, positions)
        if pair[0].shape[1] == 0:
            return
        for layer, (k, v) in enumerate(zip(*pair, strict=True)):
            write_layer_kv(layer, k, v)

    @torch.no_grad()
    def compute(self, ctx_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `materialize`, but returned: K and V, each `[L, T, num_kv_heads, head_dim]`."""
        if checked_tokens(ctx_hidden, self._path) == 0:
            shape = (self.num_layers, 0, self.num_kv_heads, self.head_dim)
            return torch.empty(shape, dtype=self.dtype, device=self.device), torch.empty(
                shape, dtype=self.dtype, device=self.device
            )
        run = fused_norm_rope if self.backend == "triton" else _eager_norm_rope
        return run(*self._inputs(ctx_hidden, positions), **self._widths())

    @torch.no_grad()
    def materialize_into(
        self,
        ctx_hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        *,
        k_scale: Tensor | Sequence[float] | float | None = None,
        v_scale: Tensor | Sequence[float] | float | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """K and V of the context, written into every layer's paged cache by slot in the same launch; nothing else is touched.

        Args:
            ctx_hidden, positions: as for `materialize`; a token that is skipped needs a position all the same.
            slot_mapping: `[T]` integers; -1 skips the token, any other slot may occur once.
            k_caches, v_caches, k_scale, v_scale, cache_dtype: as for `fused_norm_rope_into`: one cache per layer,
                `[num_slots, num_kv_heads, head_dim]` or `[num_blocks, block_size, num_kv_heads, head_dim]` of any strides but the last,
                in the weights' dtype or fp8, which is scaled per layer.

        Raises:
            InputError, StackRangeError, StackUnsupportedError: as for `materialize`.
            StackMismatchError, InputError: the caches do not fit the stack or each other, a slot is outside them or occurs twice.
        """
        if checked_tokens(ctx_hidden, self._path) == 0:
            return
        run = fused_norm_rope_into if self.backend == "triton" else _eager_norm_rope_into
        run(
            *self._inputs(ctx_hidden, positions),
            slot_mapping,
            k_caches,
            v_caches,
            **self._widths(),
            k_scale=k_scale,
            v_scale=v_scale,
            cache_dtype=cache_dtype,
        )

    def _inputs(self, ctx_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the kernel reads, of a call's context and positions."""
        positions = self._ready(ctx_hidden, positions)
        kv = self.project(ctx_hidden.to(self.device, self.dtype))
        return kv, positions.to(self.device), self._norm_weight, self._eps, self._table.to(self.device)

    def _widths(self) -> dict[str, Any]:
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "is_neox_style": self.is_neox_style,
            "value_scale": self.value_scale,
        }

    def project(self, ctx_hidden: Tensor) -> Tensor:
        """The stacked projection alone, bias included: `[T, hidden_size]` in the stack's dtype and device to
        `[T, L, 2 * num_kv_heads * head_dim]`, per layer the K heads, then the V heads. What V must equal bit for bit."""
        if self._context_norms:
            return self._project_normed(ctx_hidden)
        return self._projected(ctx_hidden)

    def _project_normed(self, ctx_hidden: Tensor) -> Tensor:
        """As `project`, layer l reading the context through its own norm."""
        contexts = torch.stack([norm(ctx_hidden) for norm in self._context_norms])
        weights = self._weight.view(self.hidden_size, self.num_layers, -1).permute(1, 0, 2)
        rows = torch.bmm(contexts, weights)
        if self._bias is not None:
            rows = rows + self._bias.view(self.num_layers, 1, -1)
        return rows.transpose(0, 1).contiguous()

    # --- what StackedPath asks for ---

    def _validated(self, layers: Sequence[Any]) -> tuple[LayerFacts, ...]:
        for index, layer in enumerate(layers):
            check_attributes(layer, index, _ATTRIBUTES, self._path)
        facts = tuple(facts_of(layer) for layer in layers)
        validate(
            facts,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            is_neox_style=self.is_neox_style,
            shared_rope=rope_facts(self.rotary_emb, self.head_dim),
        )
        check_epsilons([fact.norm_eps for fact in facts], "k_norm", self._path)
        return facts

    def _source(self, attn: Any) -> tuple[Any, slice, Any]:
        rows = slice(attn.q_size, attn.q_size + 2 * self.num_kv_heads * self.head_dim)
        return attn.qkv_proj, rows, attn.k_norm

    def _stack(self) -> None:
        super()._stack()
        self.value_scale = value_scale_of(self._layers[0].self_attn)
        self._context_norms = [
            norm for layer in self._layers if (norm := getattr(layer, "context_norm", None)) is not None
        ]


# --- the same without triton ------------------------------------------------------------------------------------------------------------


def _eager_norm_rope(
    kv: Tensor,
    positions: Tensor,
    k_norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    is_neox_style: bool,
    value_scale: float,
) -> tuple[Tensor, Tensor]:
    """`fused_norm_rope` in plain torch: float32 between the load and the one rounding at the end."""
    k, v = _eager_exact(
        kv,
        positions,
        k_norm_weight,
        eps,
        cos_sin_cache,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
    )
    values = v.contiguous() if value_scale == 1.0 else (v.float() * value_scale).to(v.dtype)
    return k.to(kv.dtype), values


def _eager_norm_rope_into(
    kv: Tensor,
    positions: Tensor,
    k_norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    *,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    is_neox_style: bool,
    value_scale: float,
    k_scale: Any,
    v_scale: Any,
    cache_dtype: torch.dtype | None,
) -> None:
    """`fused_norm_rope_into` in plain torch, with the same roundings."""
    tokens, layers = kv.shape[:2]
    k_set, v_set = checked_caches(k_caches, v_caches, kv, layers, (num_kv_heads, head_dim), cache_dtype)
    slots = checked_slots(slot_mapping, tokens, k_set.num_slots).to(kv.device).long()
    exact = _eager_exact(
        kv,
        positions,
        k_norm_weight,
        eps,
        cos_sin_cache,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
    )
    written = slots >= 0
    for name, rows, scale, caches in (
        ("k_scale", exact[0], k_scale, k_set),
        ("v_scale", exact[1] if value_scale == 1.0 else exact[1].float() * value_scale, v_scale, v_set),
    ):
        factors = scale_factors(name, scale, layers, caches, kv.device)
        for layer, cache in enumerate(caches.named.values()):
            found = rows[layer][written]
            if factors is None:
                found = found.to(kv.dtype)
            else:
                kind = next(dtype for dtype, code in FP8_FORMATS.items() if code == caches.fp8)
                largest = torch.finfo(kind).max
                found = (found.float() * factors[layer]).clamp(-largest, largest).to(kind).view(cache.dtype)
            at = slots[written]
            if cache.ndim == 3:
                cache[at] = found
            else:
                cache[at // cache.shape[1], at % cache.shape[1]] = found


def _eager_exact(
    kv: Tensor,
    positions: Tensor,
    k_norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor]:
    """K in float32, before its one rounding, and V as it is."""
    tokens, layers = kv.shape[:2]
    k, v = kv.view(tokens, layers, 2, num_kv_heads, head_dim).permute(2, 1, 0, 3, 4).unbind(0)
    exact = k.float()
    inverse = torch.rsqrt(exact.square().sum(dim=-1, keepdim=True) / head_dim + eps[:, None, None, None])
    normed = exact * inverse * k_norm_weight[:, None, None, :].float()
    cos, sin = cos_sin_cache[positions.long()].float()[None, :, None, :].chunk(2, dim=-1)
    turning, rest = normed[..., :rotary_dim], normed[..., rotary_dim:]
    if is_neox_style:
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1), v
