"""How close is close: one table of tolerances, one comparison.

A kernel is held against two things: the truth in float64, and plain eager code in the kernel's own dtype, which is the honest baseline:
its error is what the dtype costs. The kernel may be as wrong as that and a slack that follows from how numbers are rounded; there is no
tolerance here that somebody found to pass. Inputs are drawn in the storage dtype and promoted for the truth, so their own rounding is
common to all three.

Three errors are compared, because each hides what another shows: the largest (one bad element), the mean (a small bias everywhere) and
the worst row's relative L2 (one bad row among larger ones).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far beyond the eager baseline a result in one dtype may lie.

    Attributes:
        max_ulps: slack of the largest error, in ulps at the largest magnitude that occurs.
        mean_ulps: slack of the mean error, in ulps at the mean magnitude.
        row_l2: relative L2 error that any one row may have beyond the baseline's.
    """

    max_ulps: float
    mean_ulps: float
    row_l2: float


#: An ulp at magnitude m is `eps * m` at most. The kernel and the baseline each end on a rounding of half an ulp, and the two can fall on
#: different sides: hence one ulp for the largest error. Rounding errors are spread evenly over half an ulp, so their mean is a quarter:
#: hence a quarter for the mean.
#: Row L2: measured in the interpreter, worst over the rounding orders that engines use (once at the store; after the norm; after every
#: step), with the next digit as room.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    # One rounding gives 2.0e-3, an engine's every-step order 4.4e-3.
    torch.bfloat16: Tolerance(max_ulps=1.0, mean_ulps=0.25, row_l2=5e-3),
    # One rounding gives 2.5e-4, every-step 5.7e-4.
    torch.float16: Tolerance(max_ulps=1.0, mean_ulps=0.25, row_l2=7e-4),
    # Here the arithmetic rounds as coarsely as the store: norm (2 roundings), weight, and a rotation of three. A GPU's approximate rsqrt
    # adds an ulp. 1.8e-7 was measured on a CPU.
    torch.float32: Tolerance(max_ulps=4.0, mean_ulps=1.0, row_l2=2e-6),
    # For code that is itself run in float64, where truth and result differ by the order of sums only.
    torch.float64: Tolerance(max_ulps=8.0, mean_ulps=2.0, row_l2=1e-14),
}

#: Why each line of the table is as it is, for those who print it.
TOLERANCE_REASONS: dict[torch.dtype, str] = {
    torch.bfloat16: "one rounding on either side of a tie; engines' rounding orders reach 4.4e-3 a row",
    torch.float16: "one rounding on either side of a tie; engines' rounding orders reach 5.7e-4 a row",
    torch.float32: "arithmetic rounds as coarsely as the store: norm, weight and a rotation of three; a GPU's rsqrt adds an ulp",
    torch.float64: "truth and result differ in the order of sums only",
}


class NumericsError(AssertionError):
    """A result is not as close as it must be.

    Attributes:
        what: the thing compared.
        kind: `shape`, `dtype`, `finiteness`, `max`, `mean`, `row` or `exact`.
        index: of the worst (or first) wrong element, or row, or None.
        axes: names of the axes of `index`.
        got, due: the two values there; of a row, at its worst element.
        error, bound: the measured error and what it may be.
        eager_error: the baseline's error, same measure, or None.
        count: elements wrong (exact, finiteness) or beyond the bound (max).
    """

    def __init__(
        self,
        message: str,
        *,
        what: str,
        kind: str,
        index: tuple[int, ...] | None = None,
        axes: tuple[str, ...] = (),
        got: Any = None,
        due: Any = None,
        error: float | None = None,
        bound: float | None = None,
        eager_error: float | None = None,
        count: int | None = None,
    ) -> None:
        super().__init__(message)
        self.what = what
        self.kind = kind
        self.index = index
        self.axes = axes
        self.got = got
        self.due = due
        self.error = error
        self.bound = bound
        self.eager_error = eager_error
        self.count = count

    @property
    def place(self) -> str:
        """`layer=1 token=2 head=0 dim=5`, or empty where it is of no one element or row."""
        return "" if self.index is None else _place(self.axes, self.index)


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """What `assert_close` measured: errors against the truth, the baseline's, and the bounds.

    Attributes:
        max_error, mean_error, row_error: of the result.
        eager_max, eager_mean, eager_row: of the baseline.
        max_bound, mean_bound, row_bound: what the result's may be.
        rms_ratio: root-mean-square error over the baseline's, the number for people (1.0: as good as eager).
    """

    max_error: float = 0.0
    mean_error: float = 0.0
    row_error: float = 0.0
    eager_max: float = 0.0
    eager_mean: float = 0.0
    eager_row: float = 0.0
    max_bound: float = 0.0
    mean_bound: float = 0.0
    row_bound: float = 0.0
    rms_ratio: float = 0.0


def assert_close(
    got: Tensor,
    truth: Tensor,
    eager: Tensor | None = None,
    *,
    axes: Sequence[str] = ("layer", "token", "head", "dim"),
    what: str = "result",
    reduction_sizes: Sequence[int] = (),
    tolerance: Tolerance | None = None,
) -> Closeness:
    """Hold `got` against the truth, with eager code in the same dtype as the baseline.

    Checked in this order: shape; dtype; NaN and infinities by position; largest, mean and row-wise error. The bound of the first two is
    the baseline's error plus `(ulps * eps + sqrt(sum(reduction_sizes)) * eps32) * magnitude`, of the third the baseline's plus the
    table's.

    Args:
        got: the result, in a dtype of TOLERANCES.
        truth: float64, same shape.
        eager: the baseline, in got's dtype, same shape; None for the truth rounded once.
        axes: names of the axes, for messages; unnamed leading ones are counted.
        what: what the tensor is.
        reduction_sizes: lengths of the float32 sums on the way (hidden size of the projection, head_dim of the norm), whose order
            differs between kernel and baseline.
        tolerance: instead of the table's.

    Returns:
        What was measured.

    Raises:
        NumericsError: with the worst element's place, got, due, the baseline's error there, bound and counts.
    """
    names = _axis_names(axes, got.ndim)
    _check_shape(got, truth, what)
    if got.dtype not in TOLERANCES and tolerance is None:
        raise NumericsError(f"{what}: no tolerance for {got.dtype}", what=what, kind="dtype", got=got.dtype)
    truth = truth.detach().to(got.device, torch.float64)
    eager = truth.to(got.dtype) if eager is None else eager.detach().to(got.device)
    _check_shape(eager, truth, f"{what} (eager)")
    if eager.dtype != got.dtype:
        raise NumericsError(
            f"{what}: got {got.dtype}, due {eager.dtype}", what=what, kind="dtype", got=got.dtype, due=eager.dtype
        )
    if got.numel() == 0:
        return Closeness()
    got = got.detach()
    finite = _check_finiteness(got, truth, eager, names, what)

    rule = TOLERANCES[got.dtype] if tolerance is None else tolerance
    error = torch.where(finite, (got.double() - truth).abs(), 0.0)
    eager_error = torch.where(finite, (eager.double() - truth).abs(), 0.0)
    size = torch.where(finite, truth.abs(), 0.0)
    eps = torch.finfo(got.dtype).eps
    summing = math.sqrt(sum(reduction_sizes)) * torch.finfo(torch.float32).eps
    tiny = torch.finfo(got.dtype).smallest_normal * eps  # the distance between subnormals
    max_bound = float(eager_error.max()) + (rule.max_ulps * eps + summing) * float(size.max()) + tiny
    # The mean of n roundings spreads by 0.14 / sqrt(n) of an ulp; repeated numbers count once. Four deviations, for few numbers.
    mean_ulps = rule.mean_ulps + 0.6 / math.sqrt(_distinct(truth))
    mean_bound = float(eager_error.mean()) + (mean_ulps * eps + summing) * float(size.mean()) + tiny
    rows, eager_rows = _row_errors(error, size, tiny), _row_errors(eager_error, size, tiny)
    row_bound = float(eager_rows.max()) + rule.row_l2 + summing
    squares, eager_squares = float(error.square().mean()), float(eager_error.square().mean())
    measured = Closeness(
        max_error=float(error.max()),
        mean_error=float(error.mean()),
        row_error=float(rows.max()),
        eager_max=float(eager_error.max()),
        eager_mean=float(eager_error.mean()),
        eager_row=float(eager_rows.max()),
        max_bound=max_bound,
        mean_bound=mean_bound,
        row_bound=row_bound,
        rms_ratio=math.sqrt(squares / eager_squares) if eager_squares else 0.0 if squares == 0 else math.inf,
    )

    worst = _index(error.argmax(), error.shape)
    place = f"worst at {_place(names, worst)}: got {_shown(got, worst)}, due {_shown(truth, worst)}"
    if measured.max_error > max_bound:
        beyond = int((error > max_bound).sum())
        raise NumericsError(
            f"{what}: {beyond} of {error.numel()} elements are too far off, {place}, error {measured.max_error:.3g}, "
            f"eager's there {float(eager_error[worst]):.3g} and at most {measured.eager_max:.3g}, bound {max_bound:.3g}",
            what=what,
            kind="max",
            index=worst,
            axes=names,
            got=_value(got, worst),
            due=_value(truth, worst),
            error=measured.max_error,
            bound=max_bound,
            eager_error=measured.eager_max,
            count=beyond,
        )
    if measured.mean_error > mean_bound:
        raise NumericsError(
            f"{what}: the mean error {measured.mean_error:.3g} of {error.numel()} elements is above its bound {mean_bound:.3g} "
            f"(eager's is {measured.eager_mean:.3g}); {place}, error {measured.max_error:.3g}",
            what=what,
            kind="mean",
            index=worst,
            axes=names,
            got=_value(got, worst),
            due=_value(truth, worst),
            error=measured.mean_error,
            bound=mean_bound,
            eager_error=measured.eager_mean,
        )
    if measured.row_error > row_bound:
        row = _index(rows.argmax(), rows.shape)
        beyond = int((rows > row_bound).sum())
        most = error[row] if got.ndim else error
        element = (*row, *_index(most.argmax(), most.shape)) if got.ndim else ()
        raise NumericsError(
            f"{what}: {beyond} of {rows.numel()} rows are too far off, worst at {_place(names[: len(row)], row)}: relative L2 error "
            f"{measured.row_error:.3g}, eager's at most {measured.eager_row:.3g}, bound {row_bound:.3g}; its worst element is at "
            f"{_place(names, element)}: got {_shown(got, element)}, due {_shown(truth, element)}",
            what=what,
            kind="row",
            index=row,
            axes=names[: len(row)],
            got=_value(got, element),
            due=_value(truth, element),
            error=measured.row_error,
            bound=row_bound,
            eager_error=measured.eager_row,
            count=beyond,
        )
    return measured


def assert_exact(
    got: Tensor,
    due: Tensor,
    *,
    axes: Sequence[str] = ("layer", "token", "head", "dim"),
    what: str = "result",
    bits: bool = False,
) -> None:
    """Hold `got` against `due` with tolerance zero.

    Args:
        got, due: same shape and dtype.
        axes, what: as for `assert_close`.
        bits: compare bit patterns (a copy); else values, where a NaN equals a NaN and the two zeros are equal.

    Raises:
        NumericsError: with the first wrong element's place and the count.
    """
    names = _axis_names(axes, got.ndim)
    _check_shape(got, due, what)
    if got.dtype != due.dtype:
        raise NumericsError(
            f"{what}: got {got.dtype}, due {due.dtype}", what=what, kind="dtype", got=got.dtype, due=due.dtype
        )
    got, due = got.detach(), due.detach().to(got.device)
    if bits:
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        wrong = got.contiguous().view(integer) != due.contiguous().view(integer)
    else:
        wrong = (got != due) & ~(got.isnan() & due.isnan())
    count = int(wrong.sum())
    if count == 0:
        return
    first = _index(wrong.flatten().to(torch.uint8).argmax(), wrong.shape)
    raise NumericsError(
        f"{what}: {count} of {got.numel()} elements differ, the first at {_place(names, first)}: got {_value(got, first)}, "
        f"due {_value(due, first)}",
        what=what,
        kind="exact",
        index=first,
        axes=names,
        got=_value(got, first),
        due=_value(due, first),
        error=None,
        bound=0.0,
        count=count,
    )


def _check_shape(got: Tensor, due: Tensor, what: str) -> None:
    if got.shape != due.shape:
        raise NumericsError(
            f"{what}: got shape {tuple(got.shape)}, due {tuple(due.shape)}",
            what=what,
            kind="shape",
            got=tuple(got.shape),
            due=tuple(due.shape),
        )


def _check_finiteness(got: Tensor, truth: Tensor, eager: Tensor, names: tuple[str, ...], what: str) -> Tensor:
    """Which elements are finite everywhere; raises where `got` is NaN or infinite, or is not, unlike truth and baseline."""
    kind = _kind(got)
    # A value near the largest of the dtype may overflow in one rounding order and not in another: the baseline's word counts too.
    wrong = (kind != _kind(truth.to(got.dtype))) & (kind != _kind(eager))
    if bool(wrong.any()):
        first = _index(wrong.flatten().to(torch.uint8).argmax(), wrong.shape)
        count = int(wrong.sum())
        raise NumericsError(
            f"{what}: {count} of {got.numel()} elements are NaN or infinite where they must not be, or the reverse, the first at "
            f"{_place(names, first)}: got {_value(got, first)}, due {_value(truth, first)}",
            what=what,
            kind="finiteness",
            index=first,
            axes=names,
            got=_value(got, first),
            due=_value(truth, first),
            count=count,
        )
    return torch.isfinite(got) & torch.isfinite(truth) & torch.isfinite(eager)


def _kind(x: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    return x.isnan() * 1 + (x == math.inf) * 2 + (x == -math.inf) * 3


def _row_errors(error: Tensor, size: Tensor, tiny: float) -> Tensor:
    """Relative L2 error of each row of the last dimension, less what one subnormal step per element makes up; a row of zeros counts
    its error absolutely."""
    if error.ndim == 0:
        error, size = error.reshape(1), size.reshape(1)
    length = size.square().sum(dim=-1).sqrt()
    distance = (error.square().sum(dim=-1).sqrt() - tiny * math.sqrt(error.shape[-1])).clamp_min(0.0)
    return torch.where(length > 0, distance / length.clamp_min(1e-300), distance)


def _distinct(truth: Tensor) -> int:
    """How many different numbers there are, as far as a quick look tells."""
    numbers: Tensor = torch.unique(truth.flatten()[: 1 << 14])
    return numbers.numel()


def _axis_names(axes: Sequence[str], ndim: int) -> tuple[str, ...]:
    names = tuple(axes)[-ndim:] if ndim else ()
    return tuple(f"axis{at}" for at in range(ndim - len(names))) + names


def _index(flat: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    position, index = int(flat), []
    for extent in reversed(shape):
        position, at = divmod(position, extent)
        index.append(at)
    return tuple(reversed(index))


def _place(names: Sequence[str], index: Sequence[int]) -> str:
    return " ".join(f"{name}={at}" for name, at in zip(names, index, strict=True)) or "the only element"


def _value(x: Tensor, index: tuple[int, ...]) -> Any:
    return x[index].item()


def _shown(x: Tensor, index: tuple[int, ...]) -> str:
    """A value in as many digits as float32 tells apart; where more of them count, the error is what to read."""
    return f"{_value(x, index):.9g}"
