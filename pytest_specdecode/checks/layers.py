"""Do the draft's layers build from its own tensors, and do they compute what a layer must?

One layer is built at a time, so that the memory needed is one layer's. Where exactness is the point the arithmetic is float64, or float32
for layers too large for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check, is_quantised, require_layers
from pytest_specdecode.errors import DraftError, LayerBuildError, NoReferenceError
from pytest_specdecode.families import Family
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import MLASpec

if TYPE_CHECKING:
    import torch

    from pytest_specdecode.families import ReferenceLayer

#: Positions that a probe holds: odd, more than a window of eight, few enough for a large layer.
TOKENS = 11
SEED = 20240607
#: Entries of a large input, far above what a trained state shows and far below what float16 holds.
LARGE = 64.0
#: Parameters of a layer above which float64 would cost more memory than the finding is worth.
_DOUBLE_LIMIT = 150_000_000
#: Bytes of a parameter in the dtype that drafts are stored in.
_STORED = 2
#: How many times one row's rounding error (of `numerics.TOLERANCES`, several roundings already) a whole layer may show: a dozen
#: operations in a row, whose errors add up as a walk does, and a residual that may halve the result.
_ROUNDINGS = 8.0


@check(
    "layers.build",
    title="every layer and the head behind them build from the checkpoint and run",
    why="What cannot be built here is what a serving engine would have to guess.",
    needs=("headers", "tensors"),
    example="a projection that is missing, of another shape, or packed by a quantiser",
    fix="mend what the named tensor lacks; weights.missing and weights.shapes list all",
)
def build(context: Context) -> Iterator[Finding]:
    """The first reason per layer, and the head's, all in one finding."""
    require_layers(context)
    reasons: dict[str, LayerBuildError] = {}
    _require_memory(context, _STORED)
    for layer in context.spec.layers:
        place = f"layer {context.draft.stored_layer(layer.index)}"
        with _collected(context, reasons, place), context.draft.naming(layer.index):
            built = context.draft.layer(layer.index, device=context.device)
            built.prefill(built.probe(2, SEED))
    with _collected(context, reasons, "the head"):
        _build_head(context)
    if reasons:
        place, first = next(iter(reasons.items()))
        layers = sum(name != "the head" for name in reasons)
        more = f"; {layers} layers fail" if layers > 1 else ""
        more += "; the head fails, too" if layers and len(reasons) > layers else ""
        yield context.fail(
            f"{first}{more}",
            where=first.key or place,
            got=first.got if len(reasons) == 1 else {name: str(error) for name, error in reasons.items()},
            due=first.due,
        )


@contextlib.contextmanager
def _collected(context: Context, reasons: dict[str, LayerBuildError], place: str) -> Iterator[None]:
    """Keep the LayerBuildError that arises inside as the reason of `place`, where it is the draft's fault."""
    try:
        yield
    except NoReferenceError as error:
        if not reasons:
            raise Inconclusive(str(error)) from None
    except LayerBuildError as error:
        if is_quantised(context):
            raise Inconclusive(f"the weights are quantised, and reference layers need plain ones: {error}") from None
        reasons[place] = error


def _build_head(context: Context) -> None:
    """Build what the family has behind its last layer, and run it on a block's worth of states where all of it has one dtype."""
    import torch

    draft, spec = context.draft, context.spec
    family = draft.family
    # A family without a head of its own inherits the base's, which only says so.
    if family is None or type(family).build_head is Family.build_head:
        return
    stored = {} if draft.binding is None else draft.binding.stored
    headers = [draft.header(name) for name in stored if family.layer_index(name) is None]
    outside = [header for header in headers if header is not None]
    _require_free(sum(header.numel for header in outside), _STORED, "a head")
    with draft.naming():
        head = family.build_head(spec, draft.source(device=context.device))
    dtypes = {header.dtype for header in outside if header.is_float}
    if len(dtypes) != 1 or spec.hidden_size is None:
        return
    rows = (None if spec.block is None else spec.block.block_size) or 4
    states = torch.randn(rows, spec.hidden_size, generator=torch.Generator().manual_seed(SEED))
    family.run_head(spec, head, states.to(device=context.device, dtype=getattr(torch, dtypes.pop())))


@check(
    "layers.finite",
    title="outputs are finite on plain and on large inputs",
    why="A layer that overflows on a large state drafts NaN for the rest of the request.",
    needs=("headers", "tensors"),
    faults=("nan",),
    example="down projections so large that a plain input overflows in the stored dtype",
    fix="export the trained weights again; where only float16 overflows, serve in bfloat16",
)
def finite(context: Context) -> Iterator[Finding]:
    """In the stored dtype; a layer that overflows in float16 only is a warning."""
    import torch

    broken: dict[str, list[int]] = {}
    overflowing: list[int] = []
    for index, layer in _layers(context):
        for name, scale in (("plain", 1.0), ("large", LARGE)):
            if not _runs_finite(context, index, layer, scale):
                broken.setdefault(name, []).append(index)
        if _dtype_of(context, index) == "bfloat16" and index not in {i for ids in broken.values() for i in ids}:
            half = context.draft.layer(index, dtype=torch.float16, device=context.device)
            if not _runs_finite(context, index, half, LARGE):
                overflowing.append(index)
    for name, indices in broken.items():
        layers = [context.draft.stored_layer(index) for index in indices]
        yield context.fail(
            f"layer {layers[0]} gives NaN or infinity on {name} inputs",
            where=f"layers {', '.join(map(str, layers))}",
            got="not finite",
            due="finite",
            fix="see weights.finite and weights.degenerate",
            fault="nan",
        )
    if overflowing:
        yield context.warn(
            "layers that are finite in bfloat16 overflow in float16",
            where=f"layers {', '.join(str(context.draft.stored_layer(index)) for index in overflowing)}",
            got="not finite in float16",
            due="served in bfloat16",
            fix="serve the draft in bfloat16 beside a float16 target, too",
        )


@check(
    "layers.incremental",
    title="decoding with a cache equals one prefill",
    why="A draft decodes step by step on what a prefill left; the two must be one function.",
    needs=("headers", "tensors"),
    example="none from a checkpoint that passes the others: it guards the reference layers themselves",
    fix="report it, with the checkpoint, as a defect of this library",
)
def incremental(context: Context) -> Iterator[Finding]:
    """Largest difference over the layers, in float64 where that fits."""
    worst = _Difference()
    for index, layer in _exact_layers(context):
        inputs = layer.probe(TOKENS, SEED)
        with _build_reports(context, index):
            difference = _difference(index, layer.incremental(inputs), layer.prefill(inputs))
        if not difference.relative <= worst.relative:
            worst = difference
    yield from _exactness(context, "layers.incremental", worst, "step by step differs from one prefill")


@check(
    "layers.mla-absorbed",
    title="absorbed and naive latent attention agree",
    why="Engines run the absorbed form, trainers the naive one; they agree only while kv_b_proj is laid out as both read it.",
    needs=("headers", "tensors"),
    families=("eagle3-mla", "mtp", "dspark"),
    example="a kv_b_proj whose rows are not heads of nope and value lanes",
    fix="export kv_b_proj with its heads one after the other, keys before values in each",
)
def mla_absorbed(context: Context) -> Iterator[Finding]:
    """Largest difference of the two forms, in float64 where that fits."""
    import torch

    if not any(isinstance(layer.attention, MLASpec) for layer in context.spec.layers):
        raise Skip("no layer of this draft has latent attention")
    worst = _Difference()
    for index, layer in _exact_layers(context):
        inputs = layer.probe(TOKENS, SEED)
        states = inputs["block"] if "block" in inputs else torch.cat([inputs["embeds"], inputs["hidden"]], dim=-1)
        states = states[..., : layer.self_attn.kv_a_proj_with_mqa.weight.shape[1]]
        with _build_reports(context, index):
            naive = layer.self_attn.forward_naive(states, inputs["positions"])
            absorbed = layer.self_attn.forward_absorbed(states, inputs["positions"])
        difference = _difference(index, absorbed, naive)
        if not difference.relative <= worst.relative:
            worst = difference
    yield from _exactness(context, "layers.mla-absorbed", worst, "the absorbed form differs from the naive one")


@check(
    "layers.batch",
    title="a row's result does not depend on its neighbours",
    why="A layer that mixes the rows of a batch drafts well alone and badly under load.",
    needs=("headers", "tensors"),
    example="a layer that takes every row's positions from the first row",
    fix="report it, with the checkpoint, as a defect of this library",
)
def batch(context: Context) -> Iterator[Finding]:
    """Three rows of different size in one batch against each row alone, in float64 where that fits."""
    import torch

    from pytest_specdecode.numerics import NumericsError, assert_close

    rows = (1.0, LARGE, 1e-3)
    worst = 0.0
    for index, layer in _exact_layers(context):
        inputs = _rows_of_scale(layer.probe(TOKENS, SEED, batch=len(rows)), rows)
        with _build_reports(context, index):
            together = layer.prefill(inputs)
            alone = torch.stack([layer.prefill(_row(inputs, row)) for row in range(len(rows))])
        place = f"layer {context.draft.stored_layer(index)}"
        if together.shape != alone.shape:
            yield context.fail(
                "a batch gives another shape than its rows",
                where=place,
                got=list(together.shape),
                due=list(alone.shape),
            )
            continue
        try:
            # Each row by itself, so that the large one's size is not the small one's tolerance.
            for row in range(len(rows)):
                measured = assert_close(
                    together[row],
                    alone[row].double(),
                    alone[row],
                    axes=("token", "lane"),
                    reduction_sizes=_sums(context, index),
                )
                largest = float(alone[row].abs().max())
                worst = max(worst, measured.max_error / largest if largest else measured.max_error)
        except NumericsError as error:
            yield context.fail(
                f"row {row} of a batch is not what it is alone: {error}",
                where=place,
                got=error.got if error.error is None else error.error,
                due=error.due if error.bound is None else f"at most {error.bound:.1e}",
                fix="look for positions, masks or statistics that are shared between rows",
            )
    context.notes["layers.batch"] = f"largest difference {worst:.1e} of a row's largest value"


@check(
    "layers.precision",
    title="the storage dtype costs no more than rounding does",
    why="A layer whose sums cancel or overflow in its dtype drafts noise, and nothing stops.",
    severity="warning",
    needs=("headers", "tensors"),
    faults=("nan",),
    example="a float16 draft whose intermediate values pass 65504",
    fix="store the draft in bfloat16 or float32, as it was trained",
)
def precision(context: Context) -> Iterator[Finding]:
    """The median row's relative error in the stored dtype against float64, float32 for large layers, in the note."""
    import torch

    from pytest_specdecode.numerics import TOLERANCES

    exact = _exact_dtype(context)
    figures: dict[int, float] = {}
    overflowing: list[int] = []
    coarse: dict[int, tuple[float, float]] = {}
    dtypes: set[str] = set()
    for index, layer in _layers(context):
        name = _dtype_of(context, index) or ""
        dtype = getattr(torch, name, None)
        if dtype not in TOLERANCES or dtype.itemsize >= exact.itemsize:
            continue
        dtypes.add(name)
        inputs = layer.probe(TOKENS, SEED)
        with _build_reports(context, index):
            got = layer.prefill(inputs)
            truth = context.draft.layer(index, dtype=exact, device=context.device).prefill(
                {key: value.to(exact) if value.is_floating_point() else value for key, value in inputs.items()}
            )
        if not bool(got.isfinite().all()):
            if bool(truth.isfinite().all()):
                overflowing.append(index)
            continue
        error, size = (got.to(exact) - truth).norm(dim=-1), truth.norm(dim=-1)
        # The middle row: an expert chosen otherwise by a hair is no matter of precision, and would fill one row.
        figures[index] = float((error / size.clamp_min(torch.finfo(exact).tiny)).median())
        bound = _ROUNDINGS * TOLERANCES[dtype].row_l2
        if not figures[index] <= bound:
            coarse[index] = (figures[index], bound)
    if figures:
        index = max(figures, key=figures.__getitem__)
        context.notes["layers.precision"] = (
            f"relative error {figures[index]:.1e} in {' and '.join(sorted(dtypes))}, largest in layer "
            f"{context.draft.stored_layer(index)}"
        )
    elif not overflowing:
        raise Skip("no layer is stored in a dtype that is coarser than the one it would be compared in")
    if overflowing:
        yield context.warn(
            f"a layer overflows in {' and '.join(sorted(dtypes))} where float64 does not",
            where=f"layers {', '.join(str(context.draft.stored_layer(index)) for index in overflowing)}",
            got="not finite",
            due="finite",
            fault="nan",
        )
    if coarse:
        index = max(coarse, key=lambda index: coarse[index][0])
        figure, bound = coarse[index]
        yield context.warn(
            f"the error of the stored dtype is {figure:.1e} of the result, more than its roundings make up",
            where=f"layers {', '.join(str(context.draft.stored_layer(index)) for index in sorted(coarse))}",
            got=figure,
            due=f"at most {bound:.1e}",
            fix="look for weights that nearly cancel or are far larger than the rest",
        )


def _require_memory(context: Context, width: int) -> None:
    """Raise where one layer, at `width` bytes a parameter, is larger than what is free: a layer of experts can be."""
    _require_free(context.draft.checkpoint.num_parameters / max(1, len(context.spec.layers)), width, "a layer")


def _require_free(parameters: float, width: int, what: str) -> None:
    # The tensors as read, the module's own copy, and one more of the largest part while it is made.
    needed, free = int(2.5 * width * parameters), _free_memory()
    if free is not None and needed > free:
        raise Inconclusive(
            f"{what} of {parameters / 1e9:.1f} billion parameters takes about {needed / 2**30:.0f} GiB, "
            f"{free / 2**30:.0f} GiB are free"
        )


def _free_memory() -> int | None:
    """Bytes that this machine can still give, as Linux says; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _dtype_of(context: Context, layer: int) -> str | None:
    """The dtype of the first matrix of `layer`, or None."""
    binding = context.draft.binding
    expected = () if binding is None else binding.expected.values()
    headers = (context.draft.header(tensor.name) for tensor in expected if tensor.layer == layer)
    return next((header.dtype for header in headers if header is not None and len(header.shape) == 2), None)


def _layers(context: Context, dtype: torch.dtype | None = None) -> Iterator[tuple[int, ReferenceLayer]]:
    """Every layer with its index; a layer that does not build is `layers.build`'s to report."""
    require_layers(context)
    _require_memory(context, _STORED if dtype is None else dtype.itemsize)
    for layer in context.spec.layers:
        with _build_reports(context, layer.index):
            built = context.draft.layer(layer.index, dtype=dtype, device=context.device)
        yield layer.index, built


@contextlib.contextmanager
def _build_reports(context: Context, index: int) -> Iterator[None]:
    """A layer that does not build or run is one finding, of `layers.build`; the checks after it cannot tell."""
    try:
        with context.draft.naming(index):
            yield
    except DraftError as error:
        layer = context.draft.stored_layer(index)
        raise Inconclusive(f"layer {layer} does not build: {error}; see layers.build") from None


def _exact_layers(context: Context) -> Iterator[tuple[int, ReferenceLayer]]:
    return _layers(context, _exact_dtype(context))


def _exact_dtype(context: Context) -> torch.dtype:
    """The dtype in which a layer counts as exact: float64, or float32 for layers that would be too large in it."""
    import torch

    per_layer = context.draft.checkpoint.num_parameters / max(1, len(context.spec.layers))
    return torch.float64 if per_layer < _DOUBLE_LIMIT else torch.float32


def _row(inputs: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row of a batch as inputs of its own."""
    return {name: value[row] for name, value in inputs.items()}


def _rows_of_scale(inputs: Mapping[str, torch.Tensor], scales: Sequence[float]) -> dict[str, torch.Tensor]:
    """The batch with row i times `scales[i]`, and its positions moved on by i, so that no two rows are alike; ids stay."""
    import torch

    found = {}
    for name, value in inputs.items():
        shape = (-1, *(1,) * (value.ndim - 1))
        if value.is_floating_point():
            value = value * torch.tensor(scales, dtype=value.dtype, device=value.device).view(shape)
        elif "positions" in name:
            value = value + torch.arange(len(scales), device=value.device).view(shape)
        found[name] = value
    return found


def _sums(context: Context, index: int) -> tuple[int, ...]:
    """Lengths of the longest sums of layer `index`, for a tolerance."""
    layer = context.spec.layers[index]
    known = (context.spec.hidden_size, context.spec.hidden_size, layer.intermediate_size, TOKENS)
    return tuple(extent for extent in known if extent)


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """Where two results of one layer differ most.

    Attributes:
        layer: its index.
        relative: the difference over the largest value that is due; NaN where either is not finite.
        place: in named axes.
        got, due: the two values there.
    """

    layer: int = 0
    relative: float = 0.0
    place: str = ""
    got: float = 0.0
    due: float = 0.0


def _exactness(context: Context, id: str, worst: _Difference, message: str) -> Iterator[Finding]:
    import torch

    double = context.draft.checkpoint.num_parameters / max(1, len(context.spec.layers)) < _DOUBLE_LIMIT
    # Sums of a few thousand terms in another order: far under a millionth of an exact result, and a wrong layer is off by order one.
    bound = 1e6 * torch.finfo(torch.float64).eps if double else 1e3 * torch.finfo(torch.float32).eps
    context.notes[id] = f"largest difference {worst.relative:.1e} of the output's largest value"
    if not worst.relative <= bound:
        yield context.fail(
            f"{message}: at {worst.place} got {worst.got:.9g}, due {worst.due:.9g}, {worst.relative:.1e} of the largest value apart",
            where=f"layer {context.draft.stored_layer(worst.layer)}",
            got=worst.relative,
            due=f"at most {bound:.1e} of the largest value",
        )


def _runs_finite(context: Context, index: int, layer: ReferenceLayer, scale: float) -> bool:
    with _build_reports(context, index):
        output = layer.prefill(layer.probe(TOKENS, SEED, scale))
    return bool(output.isfinite().all())


def _difference(layer: int, got: Any, due: Any) -> _Difference:
    apart = (got - due).abs()
    # A NaN is the largest of all.
    flat = int(apart.argmax())
    largest, difference = float(due.abs().max()), float(apart.flatten()[flat])
    index: list[int] = []
    rest = flat
    for extent in reversed(apart.shape):
        rest, at = divmod(rest, extent)
        index.insert(0, at)
    names = ("batch", "token", "lane")[-apart.ndim :]
    return _Difference(
        layer=layer,
        relative=difference / largest if largest else difference,
        place=" ".join(f"{name}={at}" for name, at in zip(names, index, strict=False)),
        got=float(got.flatten()[flat]),
        due=float(due.flatten()[flat]),
    )
