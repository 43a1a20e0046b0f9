"""What one call of a stacked path must bring, and the rope table that it reads: the same for the K/V stack and the latent stack.

`path` is the word by which a message names the path: `KV` or `latent`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_specdecode.errors import InputError, StackMismatchError, StackRangeError, StackUnsupportedError
from pytest_specdecode.fused_kv.stack import first_differing_row
from pytest_specdecode.launch import triton_available

#: What the kernels read and write as numbers, and as positions.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16)


def chosen_backend(backend: str) -> Literal["triton", "eager"]:
    """`backend`, with `auto` resolved: triton where it is installed. InputError for another word."""
    if backend == "auto":
        return "triton" if triton_available() else "eager"
    if backend not in ("triton", "eager"):
        raise InputError(
            f"backend must be auto, triton or eager; got {backend!r}",
            axis="backend",
            expected=("auto", "triton", "eager"),
            got=backend,
        )
    return "triton" if backend == "triton" else "eager"


def checked_tokens(ctx_hidden: Tensor, path: str) -> int:
    """T of a context `[T, hidden_size]`; InputError where it has another number of dimensions."""
    if ctx_hidden.ndim != 2:
        raise InputError(
            f"ctx_hidden must be 2D [total_ctx, hidden_size] for fused {path} materialization: got {tuple(ctx_hidden.shape)}.",
            axis="ctx_hidden",
            expected="[total_ctx, hidden_size]",
            got=tuple(ctx_hidden.shape),
        )
    return ctx_hidden.shape[0]


def checked_positions(ctx_hidden: Tensor, positions: Tensor, hidden_size: int, path: str) -> Tensor:
    """The positions as one row; InputError where they or the context do not fit each other and the stack."""
    tokens, width = ctx_hidden.shape
    positions = positions.reshape(-1)
    if positions.shape[0] != tokens:
        raise InputError(
            f"positions must match ctx_hidden token count for fused {path} materialization: "
            f"positions={positions.shape[0]}, total_ctx={tokens}.",
            axis="positions",
            expected=tokens,
            got=positions.shape[0],
        )
    if width != hidden_size or not ctx_hidden.is_floating_point():
        raise InputError(
            f"ctx_hidden must be floating and {hidden_size} wide for fused {path} materialization: "
            f"got {ctx_hidden.dtype}, {width} wide.",
            axis="ctx_hidden",
            expected=hidden_size,
            got=width,
        )
    if positions.dtype not in INTEGERS:
        raise InputError(
            f"positions must be integers for fused {path} materialization: got {positions.dtype}.",
            axis="positions",
            expected="int64",
            got=positions.dtype,
        )
    return positions


def check_attributes(layer: Any, index: int, names: Sequence[str], path: str) -> Any:
    """StackUnsupportedError where `layer.self_attn` lacks one of `names`; returns `self_attn`."""
    attn = getattr(layer, "self_attn", None)
    for name in names:
        if getattr(attn, name, None) is None:
            raise StackUnsupportedError(
                f"a layer without self_attn.{name} is not supported for fused {path} path: layer {index} is {type(layer).__name__}.",
                axis="layers",
                expected=f"self_attn.{name}",
                layer=index,
            )
    return attn


def check_epsilons(epsilons: Sequence[float | None], norm: str, path: str) -> None:
    """StackUnsupportedError for the first layer whose `norm` states no epsilon."""
    for index, eps in enumerate(epsilons):
        if eps is None:
            raise StackUnsupportedError(
                f"{norm} without an epsilon is not supported for fused {path} path: "
                f"neither variance_epsilon nor eps at layer {index}.",
                axis="norm-eps",
                layer=index,
            )


def weight_versions(tensors: Sequence[Tensor | None]) -> list[tuple[int, int, int]]:
    """What changes when one of these tensors is replaced or written to, except through `.data`."""
    return [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors if t is not None]


#: A position from here on is a fault of the caller, not a long context: the table for it would fill the machine.
MAX_TABLE_ROWS = 1 << 22


class RopeTable:
    """The table of the rotary object that serves all layers, over time.

    The object may grow it, or anybody else may. Rows that were handed out stay as they were, and new rows must continue them; a table
    that does neither is refused, and the old one put back where that can be done.

    Args:
        rotary_emb: has `cos_sin_cache`, and where it can grow `_ensure_cos_sin_cache_length`.
        path: the word for messages.
    """

    def __init__(self, rotary_emb: Any, path: str) -> None:
        self._rotary_emb = rotary_emb
        self._path = path
        self._table: Tensor = rotary_emb.cos_sin_cache

    def to(self, device: torch.device) -> Tensor:
        """The table on `device`, in a dtype that the kernels read."""
        table = self._table.to(device)
        return table if table.dtype in FLOATS else table.float()

    def serve(self, positions: Tensor) -> None:
        """See to it that there is a row for each of `positions`.

        Raises:
            InputError: a position is negative.
            StackRangeError, StackUnsupportedError: as for `reach`.
        """
        lowest, highest = (int(bound) for bound in torch.aminmax(positions))
        if lowest < 0:
            raise InputError(
                f"positions must not be negative for fused {self._path} materialization: got {lowest}.",
                axis="positions",
                expected=">= 0",
                got=lowest,
            )
        self.reach(highest, served=True)

    def reach(self, position: int, *, served: bool) -> None:
        """See to it that row `position` exists, growing the table if it can and checking what it grew.

        Args:
            position: from 0.
            served: whether rows may have been used already, so that none of them may change.

        Raises:
            StackRangeError: the table is too short and does not grow.
            StackUnsupportedError: it grew, and the new rows do not continue the old ones.
        """
        self._accept(self._rotary_emb.cos_sin_cache, served)
        grow = getattr(self._rotary_emb, "_ensure_cos_sin_cache_length", None)
        if self._table.shape[0] <= position < MAX_TABLE_ROWS and grow is not None:
            grow(position)
            self._accept(self._rotary_emb.cos_sin_cache, served)
        rows = self._table.shape[0]
        if position >= rows:
            raise StackRangeError(
                f"RoPE cos/sin cache is too short for fused {self._path} materialization: "
                f"max_position={position}, cache_len={rows}.",
                axis="positions",
                expected=rows - 1,
                got=position,
            )

    def _accept(self, table: Tensor, served: bool) -> None:
        """Take over the rotary object's table where it is another than before, whoever made it grow, or refuse it and put the old back."""
        known = self._table
        if table is known or (table.data_ptr() == known.data_ptr() and table.shape == known.shape):
            return
        problem = _growth_problem(known, table, served)
        if problem is None:
            self._table = table
            return
        with contextlib.suppress(AttributeError):  # a table that is made on demand has no setter
            self._rotary_emb.cos_sin_cache = known
        raise StackUnsupportedError(
            f"RoPE cos/sin cache growth is not supported for fused {self._path} path: {problem}.",
            axis="rope-scaling",
            expected="rows that continue the table",
            got=problem,
        )


def _growth_problem(before: Tensor, after: Tensor, served: bool) -> str | None:
    """What is wrong with a grown table, or None.

    Turning by a + b is turning by a, then by b, whatever the frequencies; so old rows prove new ones without knowing the formula.
    With m the magnitude of a pair (YaRN's mscale): row[a + b] = row[a] * row[b] / m as complex numbers.
    """
    old, new = before.shape[0], after.shape[0]
    if after.shape[1:] != before.shape[1:]:
        return f"its width changed from {before.shape[1]} to {after.shape[1]}"
    if served and first_differing_row(before, after) is not None:
        return f"it changed row {first_differing_row(before, after)}, which may have been used already"
    known = new if first_differing_row(before, after) is not None else old
    if known < 2:
        return "its one old row does not tell the frequencies" if new > old == 1 else None
    table = torch.complex(*(part.contiguous() for part in after.detach().cpu().double().chunk(2, dim=-1)))
    magnitude = table[0].abs().clamp_min(torch.finfo(torch.float64).tiny)
    eps = torch.finfo(after.dtype).eps
    while known < new:
        # Rows [known, top) from rows [0, known): the last known one turned further by 1, 2, …
        top = min(new, 2 * known - 1)
        due = table[known - 1] * table[1 : top - known + 1] / magnitude
        distance = ((table[known:top] - due).abs() / magnitude).amax(dim=-1)
        positions = torch.arange(known, top, dtype=torch.float64)
        wrong = (distance > 6 * eps + 8 * torch.finfo(torch.float32).eps * (positions + 1)).nonzero()
        if len(wrong):
            row = known + int(wrong[0])
            return f"row {row} does not continue rows 0 to {old - 1} (a scaled table extended without its scaling?)"
        known = top
    return None


# --- what the kernels' launchers check ------------------------------------------------------------------------------------------------


def next_power_of_two(count: int) -> int:
    """The least power of two that is at least `count`, and at least 1."""
    return 1 << max(0, count - 1).bit_length()


def unit_last_stride(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not the one with stride 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_block(block_rows: int) -> None:
    """InputError where the rows per program are no power of two."""
    if block_rows < 1 or block_rows != next_power_of_two(block_rows):
        raise InputError(
            f"Invalid block_rows: got {block_rows}, expected a power of two.", axis="block_rows", got=block_rows
        )


def check_rows(rows: int, block_rows: int, factors: str, axis: str) -> None:
    """InputError where the flat index over `rows`, which are `factors` multiplied, would not fit int32."""
    if rows + block_rows > 2**31:
        raise InputError(
            f"Too many rows for one launch: {factors}; split the tokens.",
            axis=axis,
            expected=2**31 - block_rows,
            got=rows,
        )


def check_stacked(name: str, tensor: Tensor, due: tuple[int, ...], axis: str, path: str) -> None:
    """StackMismatchError where a tensor with one entry per layer is not of shape `due`."""
    if tuple(tensor.shape) != due:
        raise StackMismatchError(
            f"Invalid stacked {name} shape for fused {path} materialization: got {tuple(tensor.shape)}, expected {due}.",
            axis=axis,
            expected=due,
            got=tuple(tensor.shape),
        )


def check_positions_and_table(
    projected: Tensor, positions: Tensor, cos_sin_cache: Tensor, rotary_dim: int, width_axis: str, path: str
) -> None:
    """InputError or StackMismatchError where positions are no integers `[T]` or the table is not `[rows, rotary_dim]`."""
    tokens = projected.shape[0]
    if tuple(positions.shape) != (tokens,) or positions.dtype not in INTEGERS:
        raise InputError(
            f"Invalid positions for fused {path} materialization: got {positions.dtype} {tuple(positions.shape)}, expected integers "
            f"({tokens},).",
            axis="positions",
            expected=(tokens,),
            got=tuple(positions.shape),
        )
    if cos_sin_cache.ndim != 2 or cos_sin_cache.shape[1] != rotary_dim:
        raise StackMismatchError(
            f"Invalid cos_sin_cache shape for fused {path} materialization: got {tuple(cos_sin_cache.shape)}, "
            f"expected (rows, {rotary_dim}).",
            axis=width_axis,
            expected=rotary_dim,
            got=tuple(cos_sin_cache.shape),
        )


def check_dtypes(tensors: Mapping[str, Tensor], path: str) -> None:
    """InputError where one of these is in a dtype that no kernel reads, or on another device than the first."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise InputError(
                f"Invalid {name} dtype for fused {path} materialization: got {tensor.dtype}, expected one of {FLOATS}.",
                axis=name,
                expected=FLOATS,
                got=tensor.dtype,
            )
        if tensor.device != device:
            raise InputError(
                f"Invalid {name} device for fused {path} materialization: got {tensor.device}, expected {device}.",
                axis=name,
                expected=device,
                got=tensor.device,
            )


def check_out(name: str, out: Tensor, projected: Tensor, shape: tuple[int, ...], path: str) -> Tensor:
    """`out`; StackMismatchError where it is not a tensor of `shape` like `projected` whose last stride is 1."""
    if tuple(out.shape) != shape:
        raise StackMismatchError(
            f"Invalid {name} shape for fused {path} materialization: got {tuple(out.shape)}, expected {shape}.",
            axis=name,
            expected=shape,
            got=tuple(out.shape),
        )
    if out.device != projected.device or out.dtype != projected.dtype:
        raise StackMismatchError(
            f"Invalid {name} device/dtype for fused {path} materialization: got device={out.device}, dtype={out.dtype}, "
            f"expected device={projected.device}, dtype={projected.dtype}.",
            axis=name,
            expected=(projected.device, projected.dtype),
            got=(out.device, out.dtype),
        )
    if out.stride(-1) != 1:
        raise StackMismatchError(
            f"Invalid {name} strides for fused {path} materialization: got {out.stride()}, expected a last stride of 1.",
            axis=name,
            expected=1,
            got=out.stride(),
        )
    return out
