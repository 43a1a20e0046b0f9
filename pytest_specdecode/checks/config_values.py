"""Values that have the right type and cannot be, or that an engine's classes have no part for: the rules behind `config.types`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_specdecode.checks.registry import Context
from pytest_specdecode.engines.hf_config import EPS_DEFAULTS
from pytest_specdecode.families.base import open_view
from pytest_specdecode.findings import Finding, Outcome

#: Families whose layers engines build with the classes of stock decoders, which know one activation.
STOCK = ("eagle1", "eagle3", "eagle3-mla", "peagle", "dflash", "dflash2", "domino", "dflare", "dspark")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps")
#: Keys that transformers' configuration classes have as true or false, and that no family's parser asks for.
_FLAGS = (
    "use_cache",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
    "output_router_logits",
)
_SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")


def impossible_values(context: Context, reported: set[str]) -> Iterator[Finding]:
    """Findings about single values; keys in `reported` (without their section) have one already."""
    layer = open_view(context.draft.checkpoint).layer
    for key in _FLAGS:
        value = layer.raw(key)
        if key not in reported and value is not None and not isinstance(value, bool):
            yield context.fail(
                f"{_shown(value)} where true or false was due",
                where=f"config.json: {layer.path(key)}",
                got=value,
                due="true or false",
                fix="state true or false; configuration classes check the type",
            )
    if context.draft.spec is None:
        return
    yield from _activation(context)
    yield from _epsilon(context)
    yield from _base(context)
    yield from _positions(context)
    yield from _experts(context)


def _activation(context: Context) -> Iterator[Finding]:
    layer = open_view(context.draft.checkpoint).layer
    stated = layer.raw("hidden_act")
    built = ("silu", "swigluoai") if context.spec.block is not None else ("silu",)
    if context.spec.family in STOCK and isinstance(stated, str) and stated not in built:
        yield context.fail(
            f"hidden_act is {_shown(stated)}; the classes that engines build such layers of have silu alone",
            where=f"config.json: {layer.path('hidden_act')}",
            got=stated,
            due="silu",
            fix="state silu where the draft was trained with it; else no engine has its layers",
            fault="activation",
        )


def _epsilon(context: Context) -> Iterator[Finding]:
    layer = open_view(context.draft.checkpoint).layer
    if context.spec.family not in STOCK or any(key in layer for key in _EPSILONS):
        return
    model_type = layer.raw("model_type")
    filled = EPS_DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    yield context.warn(
        "no epsilon of the norms is stated"
        + ("" if filled is None else f": the class of {model_type} fills in {filled:g}"),
        where=f"config.json: {layer.path('rms_norm_eps')}",
        got=None,
        due="the epsilon that the draft was trained with: classes fill in 1e-06 or 1e-05",
        fix="state rms_norm_eps",
        outcomes={name: Outcome(outcome="unknown") for name in context.engines},
    )


def _base(context: Context) -> Iterator[Finding]:
    told = set()
    for each in context.spec.layers:
        for stated in () if each.attention is None else each.attention.rope.theta_stated:
            if stated.key in told or not stated.value < 1:
                continue
            told.add(stated.key)
            impossible = stated.value <= 0
            make = context.fail if impossible else context.warn
            yield make(
                f"rope_theta is {stated.value:g}: "
                + ("no base of a rotation" if impossible else "lanes turn faster the further on they are"),
                where=f"config.json: {stated.key}",
                got=stated.value,
                due="a number above 0" if impossible else "a number above 1, as a rule 10000 or more",
                fix="state the base that the draft was trained with",
            )


def _positions(context: Context) -> Iterator[Finding]:
    layer = open_view(context.draft.checkpoint).layer
    length = layer.raw("max_position_embeddings")
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        return
    rows = context.spec.block.block_size if context.spec.block is not None else None
    if length == 0:
        yield context.fail(
            "no position can be served",
            where=f"config.json: {layer.path('max_position_embeddings')}",
            got=0,
            due="a positive whole number",
            fix="state the length that the draft was trained for",
        )
    elif rows is not None and rows > length:
        stated = context.spec.block.block_size_stated if context.spec.block is not None else ()
        yield context.fail(
            f"a block has {rows} rows, and there are {length} positions",
            where=f"config.json: {stated[0].key if stated else 'block_size'}, {layer.path('max_position_embeddings')}",
            got={"block_size": rows, "max_position_embeddings": length},
            due="a block that the positions hold, with its context",
            fix="state both as trained",
        )


def _experts(context: Context) -> Iterator[Finding]:
    layer = open_view(context.draft.checkpoint).layer
    moe = next((each.moe for each in context.spec.layers if each.moe is not None), None)
    if moe is None:
        return
    where = "config.json: " + layer.path("")
    scoring = layer.raw("scoring_func")
    if isinstance(scoring, str) and scoring not in _SCORINGS:
        yield context.fail(
            f"scoring_func is {_shown(scoring)}, which no router has",
            where=f"{where}scoring_func",
            got=scoring,
            due=list(_SCORINGS),
            fix="state the function that the router was trained with",
        )
    count, chosen = moe.num_experts, moe.top_k
    if count is None:
        return
    if chosen is not None and not 1 <= chosen <= count:
        yield context.fail(
            f"a token goes to {chosen} experts, and there are {count}",
            where=f"{where}num_experts_per_tok",
            got=chosen,
            due=f"from 1 to {count}",
            fix="state the number as trained",
        )
    groups = layer.raw("n_group")
    if isinstance(groups, bool) or not isinstance(groups, int):
        return
    if groups > 0 and count % groups:
        yield context.fail(
            f"{count} experts do not divide into {groups} groups",
            where=f"{where}n_group",
            got=groups,
            due=f"a divisor of {count}",
            fix="state the groups as trained",
        )
        return
    best = layer.raw("topk_group")
    if isinstance(best, int) and groups > 0 and not 1 <= best <= groups:
        yield context.fail(
            f"experts are chosen from the best {best} groups, and there are {groups}",
            where=f"{where}topk_group",
            got=best,
            due=f"from 1 to {groups}",
            fix="state the groups as trained",
        )


def _shown(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= 60 else type(value).__name__
