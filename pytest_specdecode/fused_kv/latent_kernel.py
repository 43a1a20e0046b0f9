"""The cache row of every latent-attention layer, normed and rotated, in one Triton kernel, with its launcher.

For layer l and token t, with x the row that the stacked projection gave (bias already added), R = kv_lora_rank, P = qk_rope_head_dim, and
(c, s) the halves of row positions[t] of the rope table:

    N               = R, or R + P where the norm goes over the whole row (DeepSeek-V4)
    y[i]            = x[i] * rsqrt(sum(x[:N]^2) / N + eps[l]) * w[l][i]      for i < N
    out[i]          = y[i]                                                  for i < R: the latent, normed
    p               = x[R:] where N = R: k_pe, which no norm touches;  y[R:] where N = R + P
    out[R + a_j]    = p[a_j] * c[j] - p[b_j] * s[j]                          for j < P / 2
    out[R + b_j]    = p[b_j] * c[j] + p[a_j] * s[j]

    interleaved (DeepSeek): (a_j, b_j) = (2j, 2j + 1);    neox: (a_j, b_j) = (j, j + P / 2)

Rows of a tile are a flat index over layers and tokens. Arithmetic is float32 from the load to the one rounding at the store.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pytest_specdecode.errors import InputError, StackMismatchError
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
from pytest_specdecode.fused_kv.latent_stack import valid_rope_width
from pytest_specdecode.launch import jit, launch

try:
    import triton.language as tl
except ImportError:  # launch() says so when a kernel is run
    tl = None

#: Lanes of a program's latent tile: 16 for each of a GPU program's 128 threads; on a CPU so many that an interpreted operation is not all
#: overhead.
_GPU_TILE, _CPU_TILE = 1 << 11, 1 << 18


def fused_latent_norm_rope(
    kv_a: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    is_neox_style: bool = False,
    latent_norm: Literal["latent", "whole"] = "latent",
    out: Tensor | None = None,
    block_rows: int | None = None,
) -> Tensor:
    """The latent normed and k_pe rotated, or the whole row normed and then its k_pe rotated, for every layer at once.

    Args:
        kv_a: `[T, L, kv_lora_rank + qk_rope_head_dim]`, float32, float16 or bfloat16: per layer the latent, then k_pe.
        positions: `[T]` integers, each a row of `cos_sin_cache`. Their range is the caller's to check.
        norm_weight: `[L, kv_lora_rank]`, or `[L, kv_lora_rank + qk_rope_head_dim]` for a norm over the whole row; any floating dtype;
            for a Gemma norm, 1 + w.
        eps: `[L]`, floating.
        cos_sin_cache: `[rows, qk_rope_head_dim]`, floating: cosines, then sines, whatever the style.
        is_neox_style: whether k_pe rotates in halves rather than in interleaved pairs.
        latent_norm: what the norm goes over: the `latent` alone, or the `whole` row, k_pe included, before the rotation.
        out: `[L, T, kv_lora_rank + qk_rope_head_dim]` to write into, in kv_a's dtype; a new tensor where None.
        block_rows: rows per program, a power of two; None for as many as fill a tile.

    Returns:
        `[L, T, kv_lora_rank + qk_rope_head_dim]`: per layer and token the row that the cache keeps.

    Raises:
        StackMismatchError, InputError: an argument does not fit.
        MissingDependencyError: triton is not installed.
    """
    tokens, layers = _check_kv_a(kv_a, kv_lora_rank, qk_rope_head_dim)
    width = kv_lora_rank + qk_rope_head_dim
    shape, normed = (layers, tokens, width), normed_width(latent_norm, kv_lora_rank, width)
    if tokens == 0:
        return kv_a.new_empty(shape)
    check_stacked("norm_weight", norm_weight, (layers, normed), "latent-norm", "latent")
    check_stacked("eps", eps, (layers,), "norm-eps", "latent")
    out = kv_a.new_empty(shape) if out is None else check_out("out", out, kv_a, shape, "latent")
    check_positions_and_table(kv_a, positions, cos_sin_cache, qk_rope_head_dim, "qk-rope-head-dim", "latent")
    check_dtypes({"kv_a": kv_a, "norm_weight": norm_weight, "eps": eps, "cos_sin_cache": cos_sin_cache}, "latent")
    kv_a, norm_weight, cos_sin_cache = (unit_last_stride(each) for each in (kv_a, norm_weight, cos_sin_cache))

    rows, lanes = layers * tokens, next_power_of_two(kv_lora_rank)
    if block_rows is None:
        tile = _CPU_TILE if kv_a.device.type == "cpu" else _GPU_TILE
        block_rows = min(next_power_of_two(rows), max(1, tile // lanes), 512)
    check_block(block_rows)
    check_rows(rows, block_rows, f"{layers} layers x {tokens} tokens", "kv_a")
    launch(
        _latent_norm_rope_kernel,
        (-(-rows // block_rows),),
        kv_a,
        positions.contiguous(),
        norm_weight,
        eps.contiguous(),
        cos_sin_cache,
        out,
        rows,
        tokens,
        kv_a.stride(0),
        kv_a.stride(1),
        norm_weight.stride(0),
        cos_sin_cache.stride(0),
        *out.stride()[:2],
        RANK=kv_lora_rank,
        HALF=qk_rope_head_dim // 2,
        BLOCK_ROWS=block_rows,
        BLOCK_RANK=lanes,
        BLOCK_HALF=next_power_of_two(qk_rope_head_dim // 2),
        IS_NEOX=is_neox_style,
        WHOLE=normed == width,
        num_warps=4,
        # Stated because Triton's default is changing; fused multiply-adds would differ from the interpreter's rounding.
        enable_fp_fusion=False,
    )
    return out


def normed_width(latent_norm: str, kv_lora_rank: int, width: int) -> int:
    """Lanes that a norm of this kind goes over, of rows `width` wide; InputError for a kind that is not served."""
    if latent_norm not in ("latent", "whole"):
        raise InputError(
            f"latent_norm must be latent or whole; got {latent_norm!r}",
            axis="latent-norm",
            expected=("latent", "whole"),
            got=latent_norm,
        )
    return width if latent_norm == "whole" else kv_lora_rank


def _check_kv_a(kv_a: Tensor, kv_lora_rank: int, qk_rope_head_dim: int) -> tuple[int, int]:
    if kv_lora_rank < 1 or not valid_rope_width(qk_rope_head_dim):
        raise StackMismatchError(
            f"Invalid fused latent widths: kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}.",
            axis="kv-lora-rank" if kv_lora_rank < 1 else "qk-rope-head-dim",
            expected="above 0" if kv_lora_rank < 1 else "even, above 0",
            got=kv_lora_rank if kv_lora_rank < 1 else qk_rope_head_dim,
        )
    due = kv_lora_rank + qk_rope_head_dim
    if kv_a.ndim != 3 or kv_a.shape[2] != due:
        raise StackMismatchError(
            f"Invalid stacked fused latent projection shape: got {tuple(kv_a.shape)}, expected 3D [total_ctx, n_layers, {due}].",
            axis="kv_a",
            expected=f"[total_ctx, n_layers, {due}]",
            got=tuple(kv_a.shape),
        )
    return kv_a.shape[0], kv_a.shape[1]


@jit
def _latent_norm_rope_kernel(  # type: ignore[no-untyped-def]
    kv_a,
    positions,
    norm_weight,
    eps,
    table,
    out,
    num_rows,
    num_tokens,
    kv_token_stride,
    kv_layer_stride,
    norm_stride,
    table_stride,
    out_layer_stride,
    out_token_stride,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # The launcher sees to it that rows fit int32; whatever is multiplied by a stride is int64 first.
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < num_rows
    token = (row % num_tokens).to(tl.int64)
    layer = (row // num_tokens).to(tl.int64)
    source = (token * kv_token_stride + layer * kv_layer_stride)[:, None]
    target = (layer * out_layer_stride + token * out_token_stride)[:, None]
    norm_row = (layer * norm_stride)[:, None]
    element = out.dtype.element_ty

    lane = tl.arange(0, BLOCK_RANK)[None, :]
    mask = row_mask[:, None] & (lane < RANK)
    latent = tl.load(kv_a + (source + lane), mask=mask, other=0.0).to(tl.float32)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    pair_mask = row_mask[:, None] & (pair < HALF)
    first_lane = RANK + (pair if IS_NEOX else 2 * pair)
    second_lane = RANK + (pair + HALF if IS_NEOX else 2 * pair + 1)
    first = tl.load(kv_a + (source + first_lane), mask=pair_mask, other=0.0).to(tl.float32)
    second = tl.load(kv_a + (source + second_lane), mask=pair_mask, other=0.0).to(tl.float32)

    layer_eps = tl.load(eps + layer, mask=row_mask, other=1.0).to(tl.float32)
    squares = tl.sum(latent * latent, axis=1)
    if WHOLE:
        squares += tl.sum(first * first + second * second, axis=1)
        inverse = tl.rsqrt(squares / (RANK + 2 * HALF) + layer_eps)[:, None]
        first_weight = tl.load(norm_weight + (norm_row + first_lane), mask=pair_mask, other=0.0).to(tl.float32)
        second_weight = tl.load(norm_weight + (norm_row + second_lane), mask=pair_mask, other=0.0).to(tl.float32)
        first = first * inverse * first_weight
        second = second * inverse * second_weight
    else:
        inverse = tl.rsqrt(squares / RANK + layer_eps)[:, None]
    weight = tl.load(norm_weight + (norm_row + lane), mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (target + lane), (latent * inverse * weight).to(element), mask=mask)

    position = tl.load(positions + token, mask=row_mask, other=0).to(tl.int64)
    angle = (position * table_stride)[:, None] + pair
    cos = tl.load(table + angle, mask=pair_mask, other=0.0).to(tl.float32)
    sin = tl.load(table + HALF + angle, mask=pair_mask, other=0.0).to(tl.float32)
    tl.store(out + (target + first_lane), (first * cos - second * sin).to(element), mask=pair_mask)
    tl.store(out + (target + second_lane), (second * cos + first * sin).to(element), mask=pair_mask)
