"""Norm and rotation of every draft layer's K, and the copy of its V, in one Triton kernel, with its launcher.

For layer l, token t and KV head h, with k and v the rows that the stacked projection gave (bias already added), R = rotary_dim,
D = head_dim, and (c, s) the halves of row positions[t] of the rope table:

    n = k * rsqrt(sum(k^2) / D + eps[l]) * w[l]
    K[i]        = n[i] * c[i]       - n[i + R/2] * s[i]     for i < R/2
    K[i + R/2]  = n[i + R/2] * c[i] + n[i] * s[i]           for i < R/2
    K[i]        = n[i]                                      for R <= i < D
    V           = v, or v * value_scale

The rotated lanes are held as two tiles, one per half of the rotation, so that every element of K is loaded once and its partner in the
rotation is already at hand. Rows of a tile are a flat index over layers, tokens and heads.

Arithmetic is float32 from the load to the store, where K is rounded once. V is copied bit for bit, or rounded once when scaled.
"""

from __future__ import annotations

from torch import Tensor

from pytest_specdecode.errors import StackMismatchError
from pytest_specdecode.fused_kv.inputs import (
    check_block,
    check_dtypes,
    check_out,
    check_positions_and_table,
    check_rows,
    check_stacked,
    next_power_of_two,
    unit_last_stride,
)
from pytest_specdecode.fused_kv.stack import valid_rotary
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
        cos_sin_cache: `[rows, rotary_dim]`, floating: cosines, then sines.
        k_out, v_out: `[L, T, num_kv_heads, head_dim]` to write into, in kv's dtype; new tensors where None.
        value_scale: factor on V; at 1.0 V is copied bit for bit.
        block_rows: rows per program, a power of two; None for 16 on a GPU, and on a CPU for all rows up to 512.

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
    check_positions_and_table(kv, positions, cos_sin_cache, rotary_dim, "rotary-dim", "KV")
    check_dtypes({"kv": kv, "k_norm_weight": k_norm_weight, "eps": eps, "cos_sin_cache": cos_sin_cache}, "KV")
    kv, k_norm_weight, cos_sin_cache = (unit_last_stride(each) for each in (kv, k_norm_weight, cos_sin_cache))

    rows = layers * tokens * num_kv_heads
    if block_rows is None:
        block_rows = min(512, next_power_of_two(rows)) if kv.device.type == "cpu" else 16
    check_block(block_rows)
    check_rows(rows, block_rows, f"{layers} layers x {tokens} tokens x {num_kv_heads} heads", "kv")
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    launch(
        _norm_rope_kernel,
        (-(-rows // block_rows),),
        kv,
        positions.contiguous(),
        k_norm_weight,
        eps.contiguous(),
        cos_sin_cache,
        k_out,
        v_out,
        rows,
        tokens,
        kv.stride(0),
        kv.stride(1),
        k_norm_weight.stride(0),
        cos_sin_cache.stride(0),
        *k_out.stride()[:3],
        *v_out.stride()[:3],
        float(value_scale),
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_ROWS=block_rows,
        BLOCK_HALF=next_power_of_two(half),
        BLOCK_REST=next_power_of_two(rest) if rest else 0,
        BLOCK_HEAD=next_power_of_two(head_dim),
        SCALE_VALUES=value_scale != 1.0,
        num_warps=4,
        # Stated because Triton's default is changing; fused multiply-adds would differ from the interpreter's rounding.
        enable_fp_fusion=False,
    )
    return k_out, v_out


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
    num_rows,
    num_tokens,
    kv_token_stride,
    kv_layer_stride,
    norm_stride,
    table_stride,
    k_layer_stride,
    k_token_stride,
    k_head_stride,
    v_layer_stride,
    v_token_stride,
    v_head_stride,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    SCALE_VALUES: tl.constexpr,
):
    # The launcher sees to it that rows fit int32; whatever is multiplied by a stride is int64 first.
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < num_rows
    head = row % NUM_HEADS
    item = row // NUM_HEADS
    token = (item % num_tokens).to(tl.int64)
    layer = (item // num_tokens).to(tl.int64)
    head = head.to(tl.int64)

    k_row = token * kv_token_stride + layer * kv_layer_stride + head * HEAD_DIM
    k_out_row = layer * k_layer_stride + token * k_token_stride + head * k_head_stride
    position = tl.load(positions + token, mask=row_mask, other=0).to(tl.int64)
    layer_eps = tl.load(eps + layer, mask=row_mask, other=1.0).to(tl.float32)

    lane = tl.arange(0, BLOCK_HALF)[None, :]
    mask = row_mask[:, None] & (lane < HALF)
    source = k_row[:, None] + lane
    first = tl.load(kv + source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(kv + HALF + source, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)
    if BLOCK_REST > 0:
        rest_lane = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = row_mask[:, None] & (rest_lane < HEAD_DIM)
        rest = tl.load(kv + (k_row[:, None] + rest_lane), mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    inverse = tl.rsqrt(squares / HEAD_DIM + layer_eps)[:, None]

    weight_source = (layer * norm_stride)[:, None] + lane
    first = first * inverse * tl.load(norm_weight + weight_source, mask=mask, other=0.0).to(tl.float32)
    second = second * inverse * tl.load(norm_weight + HALF + weight_source, mask=mask, other=0.0).to(tl.float32)
    table_source = (position * table_stride)[:, None] + lane
    cos = tl.load(table + table_source, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table + HALF + table_source, mask=mask, other=0.0).to(tl.float32)

    target = k_out_row[:, None] + lane
    element = k_out.dtype.element_ty
    tl.store(k_out + target, (first * cos - second * sin).to(element), mask=mask)
    tl.store(k_out + HALF + target, (second * cos + first * sin).to(element), mask=mask)
    if BLOCK_REST > 0:
        rest_weight = tl.load(norm_weight + ((layer * norm_stride)[:, None] + rest_lane), mask=rest_mask, other=0.0)
        rest = rest * inverse * rest_weight.to(tl.float32)
        tl.store(k_out + (k_out_row[:, None] + rest_lane), rest.to(element), mask=rest_mask)

    v_lane = tl.arange(0, BLOCK_HEAD)[None, :]
    v_mask = row_mask[:, None] & (v_lane < HEAD_DIM)
    value = tl.load(kv + NUM_HEADS * HEAD_DIM + (k_row[:, None] + v_lane), mask=v_mask, other=0.0)
    if SCALE_VALUES:
        value = (value.to(tl.float32) * value_scale).to(v_out.dtype.element_ty)
    v_out_row = layer * v_layer_stride + token * v_token_stride + head * v_head_stride
    tl.store(v_out + (v_out_row[:, None] + v_lane), value, mask=v_mask)
