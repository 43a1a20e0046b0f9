"""Inputs of a fused latent kernel: what `kernels.py` is for K/V heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hypothesis.strategies import SearchStrategy

from pytest_specdecode.fused_kv.latent_stack import row_norm_of
from pytest_specdecode.strategies.arguments import ValueOr, argument, check_bounds, instance
from pytest_specdecode.strategies.kernels import StackInput, drawn_inputs, token_counts
from pytest_specdecode.strategies.latent_stack import LatentStack, homogeneous_latent_stacks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LatentInput(StackInput):
    """A latent stack and what one call is to compute with it.

    Tensors are made when first asked for, once, on the CPU.

    Attributes:
        stack: the layers.
        tokens: T.
        positions_kind, positions_dtype: one of `POSITION_KINDS`; `int64` or `int32`.
        values: kind of the numbers of `ctx_hidden` and `kv_a`, one of `KINDS`.
        layout: of `ctx_hidden` and `kv_a`, one of `LAYOUTS`.
        block_rows: for the launcher, None for its default.
        seed: of all numbers, apart from the stack's.
    """

    stack: LatentStack

    @cached_property
    def kv_a(self) -> Tensor:
        """Projected rows `[T, L, kv_lora_rank + qk_rope_head_dim]` in the stack's dtype, for the launcher.

        Not `ctx_hidden`'s projection: its numbers are of kind `values` themselves.
        """
        return self._drawn((self.tokens, self.stack.num_layers, self.stack.configs[0].row_width), stream=2)

    @cached_property
    def norm_weight(self) -> Tensor:
        """What each layer's latent is multiplied by, float32 `[L, kv_lora_rank]`, or its whole row, as wide as that: w, or 1 + w for a
        Gemma norm."""
        return self._norm_weights(row_norm_of)

    @property
    def launch_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `fused_latent_norm_rope`, the output left out."""
        config = self.stack.configs[0]
        return {
            "kv_a": self.kv_a,
            "positions": self.positions,
            "norm_weight": self.norm_weight,
            "eps": self.eps,
            "cos_sin_cache": self.cos_sin_cache,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "is_neox_style": config.is_neox_style,
            "latent_norm": config.latent_norm,
            "block_rows": self.block_rows,
        }


def latent_kernel_inputs(
    *,
    stack: ValueOr[LatentStack] | None = None,
    min_tokens: int = 0,
    max_tokens: int = 17,
    positions: ValueOr[str] | None = None,
    positions_dtype: ValueOr[str] | None = None,
    values: ValueOr[str] | None = None,
    layout: ValueOr[str] | None = None,
    block_rows: ValueOr[int | None] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[LatentInput]:
    """Inputs of `fused_latent_norm_rope` (`launch_arguments`) and of `FusedLatentKV.materialize` and `.compute`
    (`materialize_arguments`).

    An example, as printed:

        LatentInput(stack=LatentStack(configs=[LatentConfig(kv_lora_rank=5, qk_rope_head_dim=4, hidden_size=3)], seed=7,
        weights='normal', norms='integers'), tokens=9, positions_kind='unsorted', positions_dtype='int64', values='tiny',
        layout='padded', block_rows=8, seed=3)

    Guarantee: shapes fit the stack; positions are at least 0 and below `max_position_embeddings`; all numbers are finite, in the stack's
    dtype, and so is what is computed of them.

    Requirement: a `stack` of the caller's must be one that `homogeneous_latent_stacks` could draw.

    Shrinks as its stack does; then towards zeros, the fewest tokens, positions 0, contiguous tensors, the launcher's own block, seed 0.

    Args:
        stack: drawn: any of `homogeneous_latent_stacks`.
        min_tokens, max_tokens: bounds of T.
        positions: kind of positions, one of `POSITION_KINDS`.
        positions_dtype: `int64` or `int32`.
        values: kind of numbers, one of `KINDS`; drawn: any, but not `tiny` for tiny weights in float16, whose products have no digits left.
        layout: one of `LAYOUTS`.
        block_rows: rows per program, a power of two; drawn: None (the launcher's default, which on a CPU is one block for all rows), or 8,
            which leaves most inputs with a ragged last block.
        seed: of all numbers, apart from the stack's.

    Raises:
        InvalidArgument: an argument is no such value, or the bounds cross; from a draw where an argument is a strategy.

    See also: `homogeneous_latent_stacks`.
    """
    check_bounds("min_tokens", min_tokens, "max_tokens", max_tokens, least=0)
    return drawn_inputs(
        LatentInput,
        stack=argument("stack", stack, homogeneous_latent_stacks(), instance(LatentStack)),
        tokens=token_counts(min_tokens, max_tokens),
        positions=positions,
        positions_dtype=positions_dtype,
        values=values,
        layout=layout,
        block_rows=block_rows,
        seed=seed,
    )
