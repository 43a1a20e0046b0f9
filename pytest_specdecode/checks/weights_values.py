"""What do the tensors hold: trained values, finite ones, and factors that every path applies?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_specdecode import engines
from pytest_specdecode.checks.figures import weight_spreads
from pytest_specdecode.checks.registry import Context, check
from pytest_specdecode.checks.scan import TensorStats, is_cache_scale, scan
from pytest_specdecode.findings import Finding, Outcome


@check(
    "weights.finite",
    title="no NaN and no infinity in any tensor that is read",
    why="One NaN spreads through every head that reads it; libraries initialise what they did not copy with NaN.",
    needs=("headers", "tensors"),
    faults=("nan",),
    example="a matrix with one NaN in it",
    fix="export again from a checkpoint that was trained; NaN is what a forgotten copy leaves",
)
def finite(context: Context) -> Iterator[Finding]:
    """All tensors with non-finite values in one finding."""
    if context.pictures:
        context.figures["weights.finite"] = {"tensors": weight_spreads(context.draft)}
    bad = {
        stats.header.name: stats.nonfinite
        for stats in scan(context.draft, context.progress).values()
        if stats.nonfinite
    }
    if bad:
        first = next(iter(bad))
        yield context.fail(
            f"{first} holds {bad[first]} values that are NaN or infinite"
            + (f"; {len(bad) - 1} more tensors do" if len(bad) > 1 else ""),
            where=first,
            got=bad,
            due="finite numbers",
            fix="export again from a checkpoint that was trained; NaN is what a forgotten copy leaves",
            fault="nan",
        )


@check(
    "weights.degenerate",
    title="no tensor is all zero or constant, and nothing looks untrained",
    why="A head or a projection that training never filled loads like any other.",
    needs=("headers", "tensors"),
    faults=("degenerate",),
    example="a projection of zeros",
    fix="export the tensor; zeros are what a missing copy leaves",
)
def degenerate(context: Context) -> Iterator[Finding]:
    """Constant matrices, norms that are all zero, norms all one beside fresh matrices, heads that look random."""
    stats = scan(context.draft, context.progress)
    matrices = {name: item for name, item in stats.items() if len(item.header.shape) >= 2 and item.header.numel > 1}
    vectors = {name: item for name, item in stats.items() if name not in matrices}
    flat = [name for name, item in matrices.items() if item.is_constant]
    # A norm that multiplies by 1 + w is dead at -1 and fresh at 0.
    dead = -1 if any(layer.norm_kind == "gemma" for layer in context.spec.layers) else 0
    flat += [name for name, item in vectors.items() if item.is_constant and item.minimum == dead and _is_norm(name)]
    if flat:
        yield context.fail(
            f"{stats[flat[0]].header.name} is {_constant(stats[flat[0]])}"
            + (f"; {len(flat) - 1} more are constant" if len(flat) > 1 else ""),
            where=stats[flat[0]].header.name,
            got={stats[name].header.name: stats[name].minimum for name in flat[:12]},
            due="trained values",
            fix="export the tensor; zeros are what a missing copy leaves",
            fault="degenerate",
        )
    fresh = context.draft.checkpoint.config.get("initializer_range")
    init = float(fresh) if isinstance(fresh, (int, float)) and fresh else 0.02
    norms = [item for name, item in vectors.items() if _is_norm(name)]
    at_init = [name for name, item in matrices.items() if math.isclose(item.std, init, rel_tol=0.05)]
    if (
        norms
        and all(item.is_constant and item.minimum == dead + 1 for item in norms)
        and len(at_init) > len(matrices) / 2
    ):
        yield context.warn(
            f"every norm is exactly {'one' if dead == 0 else 'zero'} and most matrices have their initial deviation: "
            "the draft looks untrained",
            where=stats[at_init[0]].header.name,
            got={"norms": dead + 1.0, "deviation": round(matrices[at_init[0]].std, 5)},
            due="trained values",
            fault="degenerate",
        )
    for name in ("lm_head.weight", "embed_tokens.weight"):
        item = stats.get(name)
        if item is None or item.row_norm_spread is None or name not in at_init:
            continue
        # Rows of n independent normal entries have norms that spread by 1 / sqrt(2 n); trained rows spread far more.
        if item.row_norm_spread < 2 / math.sqrt(2 * item.header.shape[1]):
            yield context.warn(
                f"{item.header.name} looks random: its rows are all of one length, at the initial deviation",
                where=item.header.name,
                got={"deviation": round(item.std, 5), "spread of row norms": round(item.row_norm_spread, 5)},
                due="rows of a trained table",
                fault="degenerate",
            )


@check(
    "weights.scales",
    title="no factor on keys, values or the softmax is left out by the path that serves the draft",
    why="A path that fills the cache for all layers at once knows projections and norms; a factor beside them is lost without a word.",
    severity="warning",
    needs=("config", "headers"),
    faults=("cache-scale", "sinks"),
    example={"family": "dflash", "attention_value_scale": 0.5},
    fix="fold the factor into v_proj's rows before export, or serve by a path that applies it",
)
def scales(context: Context) -> Iterator[Finding]:
    """Scales of the cache that are not one, factors on V, and sinks."""
    yield from _cache_scales(context)
    yield from _value_scale(context)
    yield from _sinks(context)


def _cache_scales(context: Context) -> Iterator[Finding]:
    """k_scale and v_scale beside the projections: one is what no scale is."""
    checkpoint = context.draft.checkpoint
    named = [name for name in checkpoint.tensors if is_cache_scale(name)]
    single = {name for name in named if checkpoint.tensors[name].numel == 1}
    values = {name: value for name in single if (value := checkpoint.number(name)) is not None}
    other = {
        name: values.get(
            name, f"{checkpoint.tensors[name].dtype} and no plain number" if name in single else "not one number"
        )
        for name in named
        if values.get(name) != 1.0
    }
    if other:
        first = next(iter(other))
        yield context.warn(
            f"{first} is {other[first]}, and not every path scales the cache"
            + (f"; {len(other) - 1} more scales are not 1" if len(other) > 1 else ""),
            where=first,
            got=dict(list(other.items())[:12]),
            due=1.0,
            fix="store the draft's K and V unscaled, or serve with a KV cache in the weights' dtype",
            fault="cache-scale",
        )


def _value_scale(context: Context) -> Iterator[Finding]:
    """A factor on V, against what each engine takes and which path it leaves out."""
    stated = {
        layer.index: scale
        for layer in context.spec.layers
        if (scale := getattr(layer.attention, "value_scale", 1.0)) not in (None, 1.0)
    }
    if not stated:
        return
    factor = next(iter(stated.values()))
    outcomes = _passed_over(context, "attention_value_scale", context.read_as("value-scale", factor))
    if any(outcome.outcome in engines.UNFIT for outcome in outcomes.values()):
        yield context.warn(
            f"V is multiplied by {factor:g}, and not every engine does so everywhere",
            where=f"config.json: {_place(context, 'attention_value_scale')}",
            got=factor,
            due=1.0,
            outcomes=outcomes,
        )


def _sinks(context: Context) -> Iterator[Finding]:
    """Learned logits in the softmax, which change no K and no V."""
    draft = context.draft
    stored = [
        draft.stored_name(name)
        for layer in context.spec.layers
        if draft.header(name := f"layers.{layer.index}.self_attn.attention_sink_bias") is not None
    ]
    declared = any(getattr(layer.attention, "sink", None) for layer in context.spec.layers)
    if context.spec.block is None or not (stored or declared):
        return
    # A reader that is not told of them builds none, and comes upon tensors that it does not know.
    stated = engines.outcomes("sinks" if declared else "tensor-unexpected", context.spec, context.engines)
    outcomes = _passed_over(context, "attention_sink_bias", stated)
    if any(outcome.outcome in engines.UNFIT for outcome in outcomes.values()):
        yield context.warn(
            "attention has learned sinks, and not every engine or attention backend has a place for them",
            where=stored[0] if stored else f"config.json: {_place(context, 'attention_sink_bias')}",
            got=len(stored) or True,
            due="no sinks, or an engine that takes them",
            fix="serve with an attention backend that takes sinks",
            fault="sinks",
            outcomes=outcomes,
        )


def _place(context: Context, key: str) -> str:
    """Where the configuration states `key`: in `dflash_config`, else at top level."""
    nested = f"dflash_config.{key}"
    return nested if engines.at(context.draft.checkpoint.config, nested) is not None else key


def _passed_over(context: Context, key: str, otherwise: dict[str, Outcome]) -> dict[str, Outcome]:
    """What each engine does, where it passes the key over in the place that states it; else `otherwise`."""
    for name, outcome in context.ignored().get(_place(context, key), {}).items():
        if outcome.outcome == "serves wrong":
            otherwise[name] = outcome
    return otherwise


def _is_norm(name: str) -> bool:
    return "norm" in name.removesuffix(".weight").rpartition(".")[2]


def _constant(stats: TensorStats) -> str:
    return "all zero" if stats.minimum == 0 else f"{stats.minimum:g} everywhere"
