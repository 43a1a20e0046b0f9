"""Norm and rotation of every draft layer's K, and the copy of its V, in one Triton kernel, with its launchers.

For layer l, token t and KV head h, with k and v the rows that the stacked projection gave (bias already added), R = rotary_dim,
D = head_dim, and (c, s) the halves of row positions[t] of the rope table:

    n = k * rsqrt(sum(k^2) / D + eps[l]) * w[l]
    K[a] = n[a] * c[i] - n[b] * s[i]     for i < R/2, where lane a turns with lane b:
    K[b] = n[b] * c[i] + n[a] * s[i]     (a, b) = (i, i + R/2) in neox style, (2i, 2i + 1) interleaved
    K[i] = n[i]                          for R <= i < D
    V    = v, or v * value_scale

`fused_norm_rope` hands K and V out; `fused_norm_rope_into` writes them where the layers' paged caches have their slots, as fp8 where the
caches are fp8: then K and V are multiplied by the reciprocal of the layer's scale and rounded to the nearest, ties to even, what is too
large to the largest finite number.

A program does a few tokens of one layer, all heads of a token together, because they share a row of the rope table: that row is loaded
once per token, the norm's weights once per program, and every element of K and V once. On a CPU, where a program costs and traffic does
not, one program does tokens of all layers. `docs/kernel.md` counts the bytes.

Arithmetic is float32 from the load to the store, where K is rounded once. V is copied bit for bit, or rounded once when scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_specdecode.errors import StackMismatchError
from pytest_specdecode.fused_kv.caches import CacheSet, checked_caches, checked_slots, scale_factors
from pytest_specdecode.fused_kv.inputs import (
    check_block,
    check_dtypes,
    check_out,
    check_positions_and_table,
    check_rows,
    check_stacked,
    unit_last_stride,
)
from pytest_specdecode.fused_kv.stack import valid_rotary
from pytest_specdecode.fused_kv.tiles import meta_of, tile_of
from pytest_specdecode.launch import jit, launch

try:
    import triton.language as tl
except ImportError:  # launch() says so when a kernel is run
    tl = None


def fused_norm_rope(
    kv: Tensor,
    positions: Tensor,
    k_norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    is_neox_style: bool = True,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
    value_scale: float = 1.0,
    block_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """K normed and rotated, V copied, for every layer at once.

    Args:
        kv: `[T, L, 2 * num_kv_heads * head_dim]`, float32, float16 or bfloat16: per layer the K heads, then the V heads.
        positions: `[T]` integers, each a row of `cos_sin_cache`. Their range is the caller's to check.
        k_norm_weight: `[L, head_dim]`, any floating dtype; for a Gemma norm, 1 + w.
        eps: `[L]`, floating.
        cos_sin_cache: `[rows, rotary_dim]`, floating: cosines, then sines, whatever the style.
        is_neox_style: whether lane i turns with lane i + rotary_dim / 2 rather than 2i with 2i + 1.
        k_out, v_out: `[L, T, num_kv_heads, head_dim]` to write into, in kv's dtype; new tensors where None.
        value_scale: factor on V; at 1.0 V is copied bit for bit.
        block_rows: rows (a token's head each) per program, a power of two, of which at least one token's are taken; None for a number
            that suits the device and the heads: on a CPU all rows up to 512.

    Returns:
        K and V, `[L, T, num_kv_heads, head_dim]`, never the same tensor.

    Raises:
        StackMismatchError, InputError: an argument does not fit; the first eight checks have SGLang's texts and order.
        MissingDependencyError: triton is not installed.
    """
    tokens, layers = _check_kv(kv, num_kv_heads, head_dim)
    shape = (layers, tokens, num_kv_heads, head_dim)
    if tokens == 0:
        return kv.new_empty(shape), kv.new_empty(shape)
    _check_parameters(k_norm_weight, eps, layers, head_dim, rotary_dim)
    k_out = kv.new_empty(shape) if k_out is None else check_out("k_out", k_out, kv, shape, "KV")
    v_out = kv.new_empty(shape) if v_out is None else check_out("v_out", v_out, kv, shape, "KV")
    _launch(
        kv,
        positions,
        k_norm_weight,
        eps,
        cos_sin_cache,
        (k_out, v_out, None, None, None),
        (*k_out.stride()[:3], *v_out.stride()[:3]),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
        value_scale=value_scale,
        block_rows=block_rows,
    )
    return k_out, v_out


def fused_norm_rope_into(
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
    is_neox_style: bool = True,
    value_scale: float = 1.0,
    k_scale: Tensor | Sequence[float] | float | None = None,
    v_scale: Tensor | Sequence[float] | float | None = None,
    cache_dtype: torch.dtype | None = None,
    block_rows: int | None = None,
) -> None:
    """As `fused_norm_rope`, written into every layer's cache by slot, in the same launch. What no slot names is left as it was.

    Args:
        kv, positions, k_norm_weight, eps, cos_sin_cache, num_kv_heads, head_dim, rotary_dim, is_neox_style, value_scale, block_rows: as for
            `fused_norm_rope`.
        slot_mapping: `[T]` integers: where token t goes, in every layer; -1 for nowhere. No slot twice.
        k_caches, v_caches: one tensor per layer, `[num_slots, num_kv_heads, head_dim]` (SGLang's pools) or
            `[num_blocks, block_size, num_kv_heads, head_dim]` (vLLM's blocks), where slot s is row s % block_size of block
            s // block_size. All layers' of one shape, one dtype and one set of strides, of which the last is 1; so a view
            `cache[:, 0]` or a permuted one is fine. In kv's dtype, `float8_e4m3fn` or `float8_e5m2`.
        k_scale, v_scale: for fp8 caches, per layer `[L]` or one number: what is stored is K / k_scale and V / v_scale; 1 where None.
        cache_dtype: which fp8 the caches hold where they are uint8.

    Raises:
        StackMismatchError, InputError: an argument does not fit, a slot is outside the caches or named twice.
        MissingDependencyError: triton is not installed.
    """
    tokens, layers = _check_kv(kv, num_kv_heads, head_dim)
    if tokens == 0:
        return
    _check_parameters(k_norm_weight, eps, layers, head_dim, rotary_dim)
    k_set, v_set = checked_caches(k_caches, v_caches, kv, layers, (num_kv_heads, head_dim), cache_dtype)
    slots = checked_slots(slot_mapping, tokens, k_set.num_slots).to(kv.device)
    factors = [
        scale_factors(name, scale, layers, k_set, kv.device)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    _launch(
        kv,
        positions,
        k_norm_weight,
        eps,
        cos_sin_cache,
        (k_set.addresses, v_set.addresses, slots, *factors),
        (*k_set.strides, *v_set.strides),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
        value_scale=value_scale,
        block_rows=block_rows,
        caches=(k_set, v_set),
    )


def _launch(
    kv: Tensor,
    positions: Tensor,
    k_norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    targets: Sequence[Tensor | None],
    target_strides: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    is_neox_style: bool,
    value_scale: float,
    block_rows: int | None,
    caches: tuple[CacheSet, CacheSet] | None = None,
) -> None:
    check_positions_and_table(kv, positions, cos_sin_cache, rotary_dim, "rotary-dim", "KV")
    check_dtypes({"kv": kv, "k_norm_weight": k_norm_weight, "eps": eps, "cos_sin_cache": cos_sin_cache}, "KV")
    if block_rows is not None:
        check_block(block_rows)
    kv, k_norm_weight, cos_sin_cache = (unit_last_stride(each) for each in (kv, k_norm_weight, cos_sin_cache))
    tokens, layers = kv.shape[:2]
    tile = tile_of(kv.device.type, layers * tokens, num_kv_heads, head_dim, block_rows)
    check_rows(layers * tokens, tile.items, f"{layers} layers x {tokens} tokens", "kv")
    tensors, plan = {}, {"PAGE_SIZE": -1, "ALIGNED": False, "FP8": 0}
    if caches is not None:
        plan = {"PAGE_SIZE": caches[0].page_size, "ALIGNED": all(each.aligned for each in caches), "FP8": caches[0].fp8}
        tensors = {name: tensor for each in caches for name, tensor in each.named.items()}
    launch(
        _norm_rope_kernel,
        (-(-layers * tokens // tile.items),) if tile.flat else (-(-tokens // (tile.items * tile.steps)), layers),
        kv,
        positions.contiguous(),
        k_norm_weight,
        eps.contiguous(),
        cos_sin_cache,
        *targets,
        layers,
        tokens,
        kv.stride(0),
        kv.stride(1),
        k_norm_weight.stride(0),
        cos_sin_cache.stride(0),
        *target_strides,
        float(value_scale),
        **meta_of(num_kv_heads, head_dim, rotary_dim),
        BLOCK_ITEMS=tile.items,
        STEPS=tile.steps,
        FLAT=tile.flat,
        IS_NEOX=is_neox_style,
        SCALE_VALUES=value_scale != 1.0,
        **plan,
        num_warps=tile.warps,
        # Stated because Triton's default is changing; fused multiply-adds would differ from the interpreter's rounding.
        enable_fp_fusion=False,
        reached=tensors,
    )


def _check_kv(kv: Tensor, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    if kv.ndim != 3:
        raise StackMismatchError(
            f"Invalid stacked fused KV projection shape: got {tuple(kv.shape)}, expected 3D [total_ctx, n_layers, kv_size*2].",
            axis="kv",
            expected="[total_ctx, n_layers, kv_size*2]",
            got=tuple(kv.shape),
        )
    tokens, layers, width = kv.shape
    due = 2 * num_kv_heads * head_dim
    if tokens > 0 and width != due:
        raise StackMismatchError(
            f"Invalid fused KV projection shape: got {tuple(kv.shape)}, expected trailing dim {due}.",
            axis="kv",
            expected=due,
            got=width,
        )
    return tokens, layers


def _check_parameters(k_norm_weight: Tensor, eps: Tensor, layers: int, head_dim: int, rotary_dim: int) -> None:
    if not valid_rotary(rotary_dim, head_dim):
        raise StackMismatchError(
            f"Invalid fused KV rotary/head dim pair: rotary_dim={rotary_dim}, head_dim={head_dim}.",
            axis="rotary-dim",
            expected=f"even, 0 < rotary_dim <= {head_dim}",
            got=rotary_dim,
        )
    check_stacked("k_norm_weight", k_norm_weight, (layers, head_dim), "k-norm", "KV")
    check_stacked("eps", eps, (layers,), "norm-eps", "KV")


@jit
def _norm_rope_kernel(  # type: ignore[no-untyped-def]
    kv,
    positions,
    norm_weight,
    eps,
    table,
    k_out,
    v_out,
    slots,
    k_factor,
    v_factor,
    num_layers,
    num_tokens,
    kv_token_stride,
    kv_layer_stride,
    norm_stride,
    table_stride,
    k_outer_stride,
    k_inner_stride,
    k_head_stride,
    v_outer_stride,
    v_inner_stride,
    v_head_stride,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    STEPS: tl.constexpr,
    FLAT: tl.constexpr,
    IS_NEOX: tl.constexpr,
    SCALE_VALUES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FP8: tl.constexpr,
):
    # A tile is [items, heads, lanes]. An item is a token of the program's layer, or, where FLAT, one of all layers' tokens.
    # The launcher sees to it that items fit int32; whatever is multiplied by a stride is int64 first.
    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    pair_mask = pair < HALF
    if FLAT:
        item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
        active = item < num_layers * num_tokens
        token = (item % num_tokens).to(tl.int64)
        layer = (item // num_tokens).to(tl.int64)
        layer_active = active
        norm_row = (layer * norm_stride)[:, None, None]
        norm_mask = active[:, None, None] if BLOCK_HALF == HALF else active[:, None, None] & pair_mask
    else:
        layer = tl.program_id(1).to(tl.int64)
        layer_active = layer < num_layers
        norm_row = layer * norm_stride
        norm_mask = pair_mask

    # What a layer's rows share: the norm's weights and epsilon, and the base of a cache.
    # Neox: lane i turns with lane i + HALF. Interleaved: lane 2i turns with lane 2i + 1.
    first_lane = norm_row + (pair if IS_NEOX else 2 * pair)
    partner = HALF if IS_NEOX else 1
    first_weight = tl.load(norm_weight + first_lane, mask=norm_mask, other=0.0).to(tl.float32)
    second_weight = tl.load(norm_weight + partner + first_lane, mask=norm_mask, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        rest_lane = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
        rest_norm_mask = active[:, None, None] & (rest_lane < HEAD_DIM) if FLAT else rest_lane < HEAD_DIM
        rest_weight = tl.load(norm_weight + (norm_row + rest_lane), mask=rest_norm_mask, other=0.0).to(tl.float32)
    layer_eps = tl.load(eps + layer, mask=layer_active, other=1.0).to(tl.float32)
    if FLAT:
        layer_eps = layer_eps[:, None]
    element = tl.uint8 if FP8 > 0 else kv.dtype.element_ty
    if PAGE_SIZE < 0:
        k_base, v_base = k_out, v_out
    else:
        k_base = tl.load(k_out + layer, mask=layer_active, other=0).to(tl.pointer_type(element))
        v_base = tl.load(v_out + layer, mask=layer_active, other=0).to(tl.pointer_type(element))
        if ALIGNED:
            k_base = tl.multiple_of(k_base, 16)
            v_base = tl.multiple_of(v_base, 16)
        if FLAT:
            k_base, v_base = k_base[:, None, None], v_base[:, None, None]
    if FP8 > 0:
        k_by = tl.load(k_factor + layer, mask=layer_active, other=1.0)
        v_by = tl.load(v_factor + layer, mask=layer_active, other=1.0)
        if FLAT:
            k_by, v_by = k_by[:, None, None], v_by[:, None, None]

    head = tl.arange(0, BLOCK_HEADS)[None, :, None].to(tl.int64)
    for step in tl.static_range(STEPS):
        if not FLAT:
            token = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
            active = token < num_tokens
        if PAGE_SIZE >= 0:
            slot = tl.load(slots + token, mask=active, other=-1).to(tl.int64)
            active = active & (slot >= 0)
        # One row of the table per token, broadcast over its heads.
        position = tl.load(positions + token, mask=active, other=0).to(tl.int64)
        angle = (position * table_stride)[:, None, None] + pair
        row_mask = active[:, None, None]
        angle_mask = row_mask if BLOCK_HALF == HALF else row_mask & pair_mask
        cos = tl.load(table + angle, mask=angle_mask, other=0.0).to(tl.float32)
        sin = tl.load(table + HALF + angle, mask=angle_mask, other=0.0).to(tl.float32)
        if BLOCK_HEADS != NUM_HEADS:
            row_mask = row_mask & (head < NUM_HEADS)

        row = (token * kv_token_stride + layer * kv_layer_stride)[:, None, None] + head * HEAD_DIM
        if IS_NEOX:
            lane = pair
            mask = row_mask if BLOCK_HALF == HALF else row_mask & pair_mask
            source = row + pair
            first = tl.load(kv + source, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(kv + HALF + source, mask=mask, other=0.0).to(tl.float32)
        else:
            lane = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
            mask = row_mask if BLOCK_HALF == HALF else row_mask & (lane < 2 * HALF)
            both = tl.load(kv + (row + lane), mask=mask, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(both, [BLOCK_ITEMS, BLOCK_HEADS, BLOCK_HALF, 2]))
        squares = tl.sum(first * first + second * second, axis=2)
        if BLOCK_REST > 0:
            rest_mask = row_mask & (rest_lane < HEAD_DIM)
            rest = tl.load(kv + (row + rest_lane), mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=2)
        inverse = tl.rsqrt(squares / HEAD_DIM + layer_eps)[:, :, None]
        first = first * inverse * first_weight
        second = second * inverse * second_weight
        turned = first * cos - second * sin
        turned_partner = second * cos + first * sin

        # Where K and V go: to rows of [L, T, heads, lanes], or to the token's slot.
        if PAGE_SIZE < 0:
            k_item = layer * k_outer_stride + token * k_inner_stride
            v_item = layer * v_outer_stride + token * v_inner_stride
        elif PAGE_SIZE == 0:
            k_item, v_item = slot * k_inner_stride, slot * v_inner_stride
        else:
            k_item = slot // PAGE_SIZE * k_outer_stride + slot % PAGE_SIZE * k_inner_stride
            v_item = slot // PAGE_SIZE * v_outer_stride + slot % PAGE_SIZE * v_inner_stride
        k_target = k_item[:, None, None] + head * k_head_stride
        if FP8 > 0:
            turned = fp8_bits(turned * k_by, FP8)
            turned_partner = fp8_bits(turned_partner * k_by, FP8)
        if IS_NEOX:
            tl.store(k_base + (k_target + lane), turned.to(element), mask=mask)
            tl.store(k_base + HALF + (k_target + lane), turned_partner.to(element), mask=mask)
        else:
            turned = tl.reshape(tl.join(turned, turned_partner), [BLOCK_ITEMS, BLOCK_HEADS, 2 * BLOCK_HALF])
            tl.store(k_base + (k_target + lane), turned.to(element), mask=mask)
        if BLOCK_REST > 0:
            rest = rest * inverse * rest_weight
            if FP8 > 0:
                rest = fp8_bits(rest * k_by, FP8)
            tl.store(k_base + (k_target + rest_lane), rest.to(element), mask=rest_mask)

        v_lane = tl.arange(0, BLOCK_HEAD)[None, None, :]
        v_mask = row_mask if BLOCK_HEAD == HEAD_DIM else row_mask & (v_lane < HEAD_DIM)
        value = tl.load(kv + NUM_HEADS * HEAD_DIM + (row + v_lane), mask=v_mask, other=0.0)
        if SCALE_VALUES:
            value = value.to(tl.float32) * value_scale
        if FP8 > 0:
            value = fp8_bits(value.to(tl.float32) * v_by, FP8)
        tl.store(v_base + (v_item[:, None, None] + head * v_head_stride + v_lane), value.to(element), mask=v_mask)


@jit
def fp8_bits(x, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of the fp8 nearest to each float32, ties to even, what is too large the largest finite; FORMAT 4 is e4m3fn, 5 e5m2.

    Done on the bits, because the conversion of the hardware is missing before sm_89, and the interpreter's loses carries.
    """
    LARGEST: tl.constexpr = 448.0 if FORMAT == 4 else 57344.0
    LEAST_NORMAL: tl.constexpr = 0.015625 if FORMAT == 4 else 0.00006103515625
    DROPPED: tl.constexpr = 20 if FORMAT == 4 else 21
    REBIAS: tl.constexpr = 960 if FORMAT == 4 else 448
    MAGIC: tl.constexpr = 16384.0 if FORMAT == 4 else 128.0
    MAGIC_BITS: tl.constexpr = 0x46800000 if FORMAT == 4 else 0x43000000
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    size = tl.minimum(tl.where(x == x, tl.abs(x), 0.0), LARGEST)
    size_bits = size.to(tl.int32, bitcast=True)
    odd = (size_bits >> DROPPED) & 1
    normal = ((size_bits + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED) - REBIAS
    # Adding a float whose ulp is the least subnormal rounds to a multiple of it.
    subnormal = (size + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    result = tl.where(size < LEAST_NORMAL, subnormal, normal)
    return (tl.where(x == x, result, 127) | sign).to(tl.uint8)
