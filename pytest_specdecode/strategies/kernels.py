"""Inputs of a fused-KV kernel: of its launcher, which starts from projected K and V, and of the whole path, which starts from
hidden states.

The shapes are the ones that catch bugs: no token, one, a block and one more or less; positions that repeat, go backwards, do not start at
0, reach the table's last row; tensors whose rows do not follow one another in memory. What lies between the elements of a strided tensor
is NaN, or for positions a number no table has, so that reading it cannot pass unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.strategies.arguments import ValueOr, argument, check_bounds, choice, instance, integer
from pytest_specdecode.strategies.stacks import LayerStack, Stack, homogeneous_stacks
from pytest_specdecode.strategies.tensors import KINDS, SEEDS, filled, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AnyInput = TypeVar("AnyInput", bound="StackInput")

#: Kinds of positions, plainest first:
#:
#: - `zero`: all 0, where nothing turns;
#: - `arange`: 0, 1, 2, …;
#: - `repeated`: one position again and again, not 0;
#: - `last`: all the last position served;
#: - `unsorted`: any, in any order;
#: - `strided`: the same, as every second element of a tensor.
POSITION_KINDS = ("zero", "arange", "repeated", "last", "unsorted", "strided")

#: How tensors lie in memory, plainest first: `contiguous`; `padded`: rows further apart than they are wide, and not from the storage's
#: start; `transposed`: the last dimension is not the one with stride 1.
LAYOUTS = ("contiguous", "padded", "transposed")

POSITION_DTYPES = ("int64", "int32")


@dataclass(frozen=True, kw_only=True)
class StackInput:
    """What inputs have in common, whatever the layers' attention: tensors that are made when first asked for, once, on the CPU.

    Attributes: as in `KernelInput`.
    """

    stack: LayerStack
    tokens: int
    positions_kind: str = "arange"
    positions_dtype: str = "int64"
    values: str = "normal"
    layout: str = "contiguous"
    block_rows: int | None = None
    seed: int = 0

    @cached_property
    def ctx_hidden(self) -> Tensor:
        """Hidden states `[T, hidden_size]` in the stack's dtype, for the whole path."""
        return self._drawn((self.tokens, self.stack.hidden_size), stream=1)

    @cached_property
    def positions(self) -> Tensor:
        """Integers `[T]`, each below the stack's `max_position_embeddings`."""
        last = self.stack.configs[0].max_position_embeddings - 1
        return drawn_positions(
            self.positions_kind, self.tokens, last=last, dtype=torch_dtype(self.positions_dtype), seed=self.seed
        )

    @cached_property
    def eps(self) -> Tensor:
        """Each layer's epsilon, float32 `[L]`."""
        import torch

        return torch.tensor([config.norm_eps for config in self.stack.configs], dtype=torch.float32)

    @property
    def cos_sin_cache(self) -> Tensor:
        """Layer 0's rope table, float32 `[rows, rotating lanes]`, with a row for each of `positions`."""
        rotary_emb = self.stack.rotary_emb
        if self.tokens:
            rotary_emb._ensure_cos_sin_cache_length(int(self.positions.max()))
        table: Tensor = rotary_emb.cos_sin_cache
        return table

    @property
    def materialize_arguments(self) -> dict[str, Tensor]:
        """The keyword arguments of the path's `compute`, and with the argument that takes what is made of `materialize`."""
        return {"ctx_hidden": self.ctx_hidden, "positions": self.positions}

    def _drawn(self, shape: tuple[int, ...], *, stream: int) -> Tensor:
        values = filled(self.values, shape, torch_dtype(self.stack.dtype), seed=self.seed, stream=stream)
        return laid_out(values, self.layout)

    def _norm_weights(self, norm_of: Callable[[Any], Any]) -> Tensor:
        """What each layer's norm, found in its attention by `norm_of`, multiplies by, float32 `[L, …]`: w, or 1 + w for a Gemma norm."""
        import torch

        norms = [norm_of(layer.self_attn) for layer in self.stack.layers]
        return torch.stack([norm.weight.detach().float() + (norm.norm_kind == "gemma") for norm in norms])


@dataclass(frozen=True, kw_only=True)
class KernelInput(StackInput):
    """A stack and what one call is to compute with it.

    Tensors are made when first asked for, once, on the CPU.

    Attributes:
        stack: the layers.
        tokens: T.
        positions_kind, positions_dtype: one of `POSITION_KINDS`; `int64` or `int32`.
        values: kind of the numbers of `ctx_hidden` and `kv`, one of `KINDS`.
        layout: of `ctx_hidden` and `kv`, one of `LAYOUTS`.
        block_rows: for the launcher, None for its default.
        seed: of all numbers, apart from the stack's.
    """

    stack: Stack

    @cached_property
    def kv(self) -> Tensor:
        """Projected K and V `[T, L, 2 * num_kv_heads * head_dim]` in the stack's dtype, for the launcher.

        Not `ctx_hidden`'s projection: its numbers are of kind `values` themselves.
        """
        width = 2 * self.stack.num_kv_heads * self.stack.head_dim
        return self._drawn((self.tokens, self.stack.num_layers, width), stream=2)

    @cached_property
    def k_norm_weight(self) -> Tensor:
        """What each layer's K is multiplied by, float32 `[L, head_dim]`: w, or 1 + w for a Gemma norm."""
        return self._norm_weights(attrgetter("k_norm"))

    @property
    def launch_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `fused_norm_rope`, outputs left out."""
        config = self.stack.configs[0]
        return {
            "kv": self.kv,
            "positions": self.positions,
            "k_norm_weight": self.k_norm_weight,
            "eps": self.eps,
            "cos_sin_cache": self.cos_sin_cache,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rotary_dim": config.rotary_dim,
            "is_neox_style": config.is_neox_style,
            "value_scale": config.value_scale,
            "block_rows": self.block_rows,
        }


def kernel_inputs(
    *,
    stack: ValueOr[Stack] | None = None,
    min_tokens: int = 0,
    max_tokens: int = 17,
    positions: ValueOr[str] | None = None,
    positions_dtype: ValueOr[str] | None = None,
    values: ValueOr[str] | None = None,
    layout: ValueOr[str] | None = None,
    block_rows: ValueOr[int | None] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[KernelInput]:
    """Inputs of `fused_norm_rope` (`launch_arguments`) and of `FusedKV.materialize` and `.compute` (`materialize_arguments`).

    An example, as printed:

        KernelInput(stack=Stack(configs=[LayerConfig(num_heads=2, num_kv_heads=1, head_dim=5, hidden_size=3, rotary_dim=4)], seed=7,
        weights='normal', norms='integers'), tokens=9, positions_kind='unsorted', positions_dtype='int64', values='tiny',
        layout='padded', block_rows=8, seed=3)

    Guarantee: shapes fit the stack; positions are at least 0 and below `max_position_embeddings`; all numbers are finite, in the stack's
    dtype, and so is what is computed of them.

    Requirement: a `stack` of the caller's must be one that `homogeneous_stacks` could draw.

    Shrinks as its stack does; then towards zeros, the fewest tokens, positions 0, contiguous tensors, the launcher's own block, seed 0.

    Args:
        stack: drawn: any of `homogeneous_stacks`, which says how interleaved pairs are had.
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

    See also: `homogeneous_stacks`.
    """
    check_bounds("min_tokens", min_tokens, "max_tokens", max_tokens, least=0)
    return drawn_inputs(
        KernelInput,
        stack=argument("stack", stack, homogeneous_stacks(), instance(Stack)),
        tokens=token_counts(min_tokens, max_tokens),
        positions=positions,
        positions_dtype=positions_dtype,
        values=values,
        layout=layout,
        block_rows=block_rows,
        seed=seed,
    )


def drawn_inputs(
    kind: type[AnyInput],
    *,
    stack: SearchStrategy[Any],
    tokens: SearchStrategy[int],
    positions: ValueOr[str] | None,
    positions_dtype: ValueOr[str] | None,
    values: ValueOr[str] | None,
    layout: ValueOr[str] | None,
    block_rows: ValueOr[int | None] | None,
    seed: ValueOr[int] | None,
) -> SearchStrategy[AnyInput]:
    """Inputs of class `kind` for stacks of the kind that it takes; the other arguments as `kernel_inputs` says."""
    blocks: SearchStrategy[int | None] = st.sampled_from((None, 8))
    return _inputs(
        kind,
        stack=stack,
        tokens=tokens,
        positions_kind=argument("positions", positions, st.sampled_from(POSITION_KINDS), choice(POSITION_KINDS)),
        positions_dtype=argument(
            "positions_dtype", positions_dtype, st.sampled_from(POSITION_DTYPES), choice(POSITION_DTYPES)
        ),
        values=None if values is None else argument("values", values, st.nothing(), choice(KINDS)),
        layout=argument("layout", layout, st.sampled_from(LAYOUTS), choice(LAYOUTS)),
        block_rows=argument("block_rows", block_rows, blocks, check_block),
        seed=argument("seed", seed, SEEDS, integer(0)),
    )


@st.composite
def _inputs(
    draw: DrawFn,
    kind: type[AnyInput],
    /,
    *,
    stack: SearchStrategy[LayerStack],
    values: SearchStrategy[str] | None,
    **rest: SearchStrategy[Any],
) -> AnyInput:
    layers = draw(stack)
    if values is None:
        values = st.sampled_from(usable_kinds(layers.dtype, layers.weights))
    return kind(stack=layers, values=draw(values), **{name: draw(strategy) for name, strategy in rest.items()})


def drawn_positions(kind: str, tokens: int, *, last: int, dtype: torch.dtype, seed: int) -> Tensor:
    """`tokens` positions of a kind, from 0 to `last`."""
    import torch

    if kind == "zero":
        return torch.zeros(tokens, dtype=dtype)
    if kind == "arange":
        return (torch.arange(tokens) % (last + 1)).to(dtype)
    if kind == "last":
        return torch.full((tokens,), last, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    if kind == "repeated":
        return torch.randint(min(1, last), last + 1, (1,), generator=generator).repeat(tokens).to(dtype)
    values = torch.randint(last + 1, (tokens,), generator=generator).to(dtype)
    if kind == "unsorted":
        return values
    between = torch.full((2 * tokens,), 1_000_000_000, dtype=dtype)
    between[::2] = values
    return between[::2]


def usable_kinds(dtype: str, weights: str) -> Sequence[str]:
    """Kinds of inputs for weights of a dtype and kind. Products of tiny numbers are subnormal in float16: a few steps from 0, where one
    rounding is a tenth of the number."""
    if dtype == "float16" and weights == "tiny":
        return [kind for kind in KINDS if kind != "tiny"]
    return KINDS


def token_counts(minimum: int, maximum: int) -> SearchStrategy[int]:
    """Any count between the bounds, those at the edges of a block of 8 or 16 more often."""
    edges: Sequence[int] = [count for count in (0, 1, 7, 8, 9, 15, 16, 17) if minimum <= count <= maximum]
    anywhere = st.integers(minimum, maximum)
    return anywhere | st.sampled_from(edges) if edges else anywhere


def check_block(name: str, value: Any) -> None:
    """None, or a power of two."""
    if value is None:
        return
    integer(1)(name, value)
    if value & (value - 1):
        raise InvalidArgument(f"{name}={value!r}: a power of two is due")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in another layout."""
    import torch

    if layout == "contiguous" or values.numel() == 0:
        return values
    nan = float("nan")
    if layout == "transposed":
        outer = torch.full((values.shape[-1], *values.shape[:-1]), nan, dtype=values.dtype)
        moved = outer.movedim(0, -1)
        return moved.copy_(values)
    wider = torch.full((*values.shape[:-1], values.shape[-1] + 5), nan, dtype=values.dtype)
    return wider[..., 3:-2].copy_(values)
