"""Is the rotary embedding stated, everywhere the same, whole, long enough, and the draft's own?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from pytest_specdecode import engines
from pytest_specdecode.checks.keys import layer_key
from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check, require_layers
from pytest_specdecode.engines.base import at
from pytest_specdecode.families.base import open_view
from pytest_specdecode.findings import Finding, Outcome
from pytest_specdecode.spec import GQASpec, MLASpec, RopeSpec

#: Fields that each type of scaling cannot do without; a tuple: any one of them.
_FIELDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "default": (),
    "linear": (("factor",),),
    "dynamic": (("factor", "alpha"),),
    "ntk": (("factor",),),
    "yarn": (("factor",), ("original_max_position_embeddings",)),
    "deepseek_yarn": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (
        ("factor",),
        ("low_freq_factor",),
        ("high_freq_factor",),
        ("original_max_position_embeddings",),
    ),
    "longrope": (("short_factor",), ("long_factor",), ("original_max_position_embeddings",)),
    "su": (("short_factor",), ("long_factor",), ("original_max_position_embeddings",)),
    "mrope": (("mrope_section",),),
    "proportional": (),
}
_NUMBERS = ("factor", "alpha", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LISTS = ("short_factor", "long_factor")
#: Other names of one type.
_SAME_TYPE = {"su": "longrope", "deepseek_yarn": "yarn"}

#: Keys of targets that stock layers have no part for, by what they speak of.
_INHERITED: Mapping[str, tuple[str, ...]] = {
    "a partial rotation": ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
    "positions in three parts": (
        "rope_parameters.mrope_section",
        "rope_parameters.mrope_interleaved",
        "rope_scaling.mrope_section",
        "rope_scaling.mrope_interleaved",
        "mrope_section",
        "mrope_interleaved",
    ),
    "gates and linear attention": (
        "attn_output_gate",
        "output_gate_type",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "full_attention_interval",
    ),
}


@check(
    "rope.theta-stated",
    title="rope_theta is stated somewhere",
    why="Each engine fills in a base of its own; the wrong one costs little on short prompts and everything on long ones.",
    faults=("theta-missing",),
    example={"family": "eagle3", "rope_theta": None},
    fix="state rope_theta, flat or in rope_parameters",
)
def theta_stated(context: Context) -> Iterator[Finding]:
    """The layers for which no place states a base."""
    ropes = _ropes(context)
    silent = [context.draft.stored_layer(index) for index, rope in ropes.items() if rope.theta is None]
    if silent:
        whole = len(silent) == len(ropes)
        yield context.fail(
            "rope_theta is not stated" + ("" if whole else f" for layers {', '.join(map(str, silent))}"),
            where=f"config.json: {layer_key(context, 'rope_theta')}",
            got=None,
            due="the base that the draft was trained with",
            fix="state rope_theta, flat or in rope_parameters",
            fault="theta-missing",
        )


@check(
    "rope.theta-agrees",
    title="all places that state rope_theta agree",
    why="Readers look in different places first, so two values are two drafts. Whether the base is the target's, target.rope says.",
    needs=("config",),
    faults=("theta-disagrees",),
    cost="accepted length 2.37 against 2.56 with a base of 1000000 beside weights trained at 10000 (wejoncy/sfllm PR 32)",
    example={"family": "eagle3", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    fix="leave the trained base, or write it to every place",
)
def theta_agrees(context: Context) -> Iterator[Finding]:
    """Disagreement inside the file, with the base that each engine takes; one that is not the target's is `target.rope`'s warning."""
    ropes = _ropes(context).values()
    stated = {item.key: item.value for rope in ropes for item in rope.theta_stated}
    if not stated:
        raise Inconclusive("rope_theta is not stated; see rope.theta-stated")
    yield from _theta_beside(context, stated)
    for rope in ropes:
        if len({item.value for item in rope.theta_stated}) > 1:
            outcomes = engines.outcomes("theta-disagrees", context.spec, context.engines)
            for name, reading in context.readings("rope-theta").items():
                if reading is not None:
                    outcomes[name] = replace(
                        outcomes[name], message=f"{reading}; {outcomes[name].message}".rstrip("; ")
                    )
            yield context.fail(
                "rope_theta is stated with different values",
                where=f"config.json: {', '.join(item.key for item in rope.theta_stated)}",
                got={item.key: item.value for item in rope.theta_stated},
                due="one value",
                fix="leave the trained one, or write it to every place",
                fault="theta-disagrees",
                outcomes=outcomes,
            )
            break


def _theta_beside(context: Context, stated: Mapping[str, Any]) -> Iterator[Finding]:
    """A base at the top of a file whose layers have a section of their own, and another one in there."""
    view = open_view(context.draft.checkpoint)
    if not view.layer.prefix:
        return
    places = ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta")
    top = {place: value for place in places if _is_number(value := at(view.root.values, place))}
    apart = {place: value for place, value in top.items() if float(value) not in stated.values()}
    if apart:
        yield context.fail(
            "rope_theta is stated at top level and in the section of the layers with different values",
            where=f"config.json: {', '.join((*apart, *stated))}",
            got={**apart, **stated},
            due="one value",
            fix="leave the trained one, in the section of the layers",
            outcomes=_as_read(context, "rope-theta"),
        )


@check(
    "rope.scaling-complete",
    title="a scaling has every field of its type, and `type` and `rope_type` are the same",
    why="A field that is absent is filled in or stops the server, and readers differ in which of the two names they look at.",
    faults=("rope-type-unknown",),
    example={"family": "eagle3", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    fix="state the type once, or twice the same, with the fields that it needs",
)
def scaling_complete(context: Context) -> Iterator[Finding]:
    """Each dictionary that states a scaling: its type, its fields and their values."""
    ropes = _ropes(context)
    attention = _attention(context, next(iter(ropes)))
    yield from _two_scalings(context)
    for place, fields in _dictionaries(context):
        where = f"config.json: {place}"
        names = {key: fields[key] for key in ("type", "rope_type") if isinstance(fields.get(key), str)}
        if len({_SAME_TYPE.get(name, name) for name in names.values()}) > 1:
            yield context.fail(
                f"type says {names['type']!r}, rope_type says {names['rope_type']!r}",
                where=where,
                got=names,
                due="one type",
                fix="leave the trained one",
            )
            continue
        kind = names.get("rope_type", names.get("type", "default"))
        if kind not in _FIELDS:
            yield context.fail(
                f"{_shown(kind)} is no type of scaling that is known",
                where=where,
                got=kind,
                due=sorted(_FIELDS),
                fix="name the type as the engines know it",
                fault="rope-type-unknown",
            )
            continue
        if not names and (left := sorted(set(fields) & {"factor", *_LISTS})):
            yield context.warn(
                f"{' and '.join(left)} stand{'s' if len(left) == 1 else ''} there without a type, and the positions stay unscaled",
                where=where,
                got=left,
                due="rope_type",
                fix="state rope_type as trained, or drop the fields",
            )
        beside = open_view(context.draft.checkpoint).layer.raw("original_max_position_embeddings")
        whole = dict(fields)
        if beside is not None:
            whole.setdefault("original_max_position_embeddings", beside)
        missing = [" or ".join(group) for group in _FIELDS[kind] if all(whole.get(key) is None for key in group)]
        if missing:
            yield context.fail(
                f"{kind} scaling without {' and '.join(missing)}",
                where=where,
                got=sorted(fields),
                due=missing,
                fix=f"state {' and '.join(missing)} as trained",
            )
        yield from _wrong_values(context, where, kind, whole, attention)


def _two_scalings(context: Context) -> Iterator[Finding]:
    """`rope_scaling` and `rope_parameters` that each state a scaling, and not the same one: readers differ in which counts."""
    first = layer_key(context, "rope_scaling")
    stated = {place: fields for place, fields in _dictionaries(context) if _type(fields) is not None}
    one = stated.pop(first, None)
    others = {place: fields for place, fields in stated.items() if not place.startswith(f"{first}.")}
    if one is None or not others:
        return
    apart = {place: _apart(one, fields) for place, fields in others.items()}
    # A dictionary per type of layer may have the scaling for one type alone.
    if not all(apart.values()):
        return
    place, keys = next(iter(apart.items()))
    yield context.fail(
        f"{first} and {place} state different scalings: {', '.join(keys)}",
        where=f"config.json: {first}, {place}",
        got={first: {key: one.get(key) for key in keys}, place: {key: others[place].get(key) for key in keys}},
        due="one scaling",
        fix="leave the trained one",
        outcomes=_as_read(context, "rope-scaling"),
    )


def _type(fields: Mapping[str, Any]) -> str | None:
    """The type of scaling that `fields` name, by one of its names; `mrope` scales nothing."""
    found = fields.get("rope_type", fields.get("type"))
    return {**_SAME_TYPE, "mrope": "default"}.get(found, found) if isinstance(found, str) else None


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two scalings differ in that both state."""
    if _type(one) != _type(other):
        return ["rope_type" if "rope_type" in one else "type"]
    if _type(one) == "default":
        return []
    both = [key for key in _NUMBERS if one.get(key) is not None and other.get(key) is not None]
    return [key for key in both if one[key] != other[key]]


def _wrong_values(
    context: Context, where: str, kind: str, fields: Mapping[str, Any], attention: GQASpec | MLASpec | None
) -> Iterator[Finding]:
    """Fields that cannot be what they say."""
    pairs = _pairs(context, attention)
    for key in _NUMBERS:
        value = fields.get(key)
        if value is None or kind == "default":
            continue
        if not _is_number(value) or value <= 0:
            yield context.fail(
                f"{key} is {_shown(value)}",
                where=f"{where}.{key}",
                got=value,
                due="a number above 0",
                fix="state it as trained",
            )
        elif key == "factor" and value < 1:
            yield context.warn(
                f"factor is {value}, which makes the context shorter",
                where=f"{where}.{key}",
                got=value,
                due="at least 1",
                fix="some trainers write the inverse; state how many times longer the context is",
            )
    low, high = fields.get("low_freq_factor"), fields.get("high_freq_factor")
    if kind == "llama3" and _is_number(low) and _is_number(high) and low >= high:
        yield context.fail(
            f"low_freq_factor {low} is not below high_freq_factor {high}",
            where=where,
            got=[low, high],
            due="the lower one first",
            fix="state them as trained; Llama 3 has 1 and 4",
        )
    for key in _LISTS if kind in ("longrope", "su") else ():
        value = fields.get(key)
        if value is None:
            continue
        sound = isinstance(value, list) and all(_is_number(item) and item > 0 for item in value)
        if not sound or (pairs and len(value) not in pairs):
            yield context.fail(
                f"{key} is not a list of one positive number for each pair of lanes that rotates",
                where=f"{where}.{key}",
                got=len(value) if isinstance(value, list) else value,
                due=sorted(pairs) or "a list",
                fix="state it as trained",
            )
    section = fields.get("mrope_section")
    if section is None:
        return
    sound = isinstance(section, list) and all(_is_whole(item) and item >= 0 for item in section)
    if not sound or (pairs and sum(section) not in pairs):
        # Text has the same position in all parts; without the type they are not looked at.
        make = context.fail if kind == "mrope" else context.warn
        yield make(
            "mrope_section does not add up to the pairs of lanes that rotate",
            where=f"{where}.mrope_section",
            got=section,
            due=sorted(pairs) or "a list of whole numbers",
            fix="state the sections as trained; together they are half the width that rotates",
        )


@check(
    "rope.max-position",
    title="the draft has a position for every one that is served",
    why="The rotary table is as long as max_position_embeddings: past it a server stops, or reads what is not there.",
    needs=("config", "target", "serving"),
    cost="failures, or a collapse of acceptance, beyond 2048 tokens with max_position_embeddings 2048 (vllm-project/vllm issue 48894)",
    example="max_position_embeddings 2048 beside a target with 40960, or --draft-serve='context-length=131072'",
    fix="state the length that the draft was trained for, or serve a shorter context",
)
def max_position(context: Context) -> Iterator[Finding]:
    """The draft's positions against the context that is served, else the target's."""
    ropes = _ropes(context)
    served = context.serve["context-length"]
    if served is None and context.target is not None:
        served = context.target.max_position_embeddings
    if served is None:
        raise Inconclusive(
            "the length that is served is not known: give --draft-target=DIR with max_position_embeddings, or "
            "--draft-serve='context-length=N'",
            "target",
        )
    lengths = [rope.max_position_embeddings for rope in ropes.values() if rope.max_position_embeddings is not None]
    if not lengths:
        raise Inconclusive("the draft states no max_position_embeddings, and what engines take instead is not known")
    refused = engines.refusals("context-length", context.draft, context.target, context.serve, context.engines)
    outcomes = {name: Outcome(outcome="unknown") for name in context.engines}
    for _, found in refused:
        outcomes |= {
            name: outcome for name, outcome in found.items() if outcome.outcome != "unknown" or outcome.message
        }
    length = min(lengths)
    if served <= length and not refused:
        context.notes["rope.max-position"] = f"{length} positions, {served} are served"
        return
    # No engine counts it as too short: a scaling stretches it.
    if not refused and served <= length * _stretch(next(iter(ropes.values()))):
        return
    wrong = {outcome.outcome for outcome in outcomes.values()} & set(engines.UNFIT)
    make = context.fail if wrong else context.warn
    yield make(
        f"{served} positions are served, the draft has {length}",
        where=f"config.json: {layer_key(context, 'max_position_embeddings')}",
        got=length,
        due=f"at least {served}",
        fix="state the length that the draft was trained for, or serve a shorter context",
        outcomes=outcomes,
    )


@check(
    "rope.scaled-growth",
    title="no engine makes a scaled rotary table longer than the scaling is for",
    why="Rows that are added to a YaRN or linear table come without the scaling: keys past it are wrong, and nothing says so.",
    severity="warning",
    needs=("config", "target", "serving"),
    unless=lambda context: (
        None if _is_scaled(context) else "no layer has a scaled rotary table that engines add rows to"
    ),
    applies="drafts with a scaled rotary table",
    cost="40 of 64 frequencies of an added row are wrong with YaRN, factor 4, base 1000000, 128 lanes (arithmetic)",
    example="a DFlash draft with YaRN, original_max_position_embeddings 4096 and factor 16, served at context-length=65536",
    fix="serve a context that leaves room for a block in the scaled table",
)
def scaled_growth(context: Context) -> Iterator[Finding]:
    """What engines say to the served length of a scaled table."""
    if context.serve["context-length"] is None and (
        context.target is None or context.target.max_position_embeddings is None
    ):
        raise Inconclusive("the length that is served is not known: give --draft-serve='context-length=N'", "serving")
    refused = engines.refusals("table-growth", context.draft, context.target, context.serve, context.engines)
    for refusal, outcomes in refused:
        yield context.warn(
            refusal.message,
            where=f"config.json: {layer_key(context, 'rope_scaling')}",
            got=refusal.got,
            due=refusal.due,
            fix=refusal.fix,
            outcomes=outcomes,
        )


@check(
    "rope.style",
    title="halves or interleaved pairs: stated where engines read it, and what the layers are",
    why="Rotating the other lanes leaves short contexts plausible and the draft useless; each engine reads another key, or none.",
    severity="warning",
    cost="accepted length about 1.03 instead of 2.0 with the target's interleaved pairs (vllm-project/vllm issue 53063, PR 54373)",
    example={"family": "dflash", "rope_is_neox_style": False},
    fix="state is_neox_style and rope_is_neox_style, both the same",
)
def style(context: Context) -> Iterator[Finding]:
    """Two keys that contradict each other; an engine that takes another style than the layers have."""
    ropes = _ropes(context)
    section = open_view(context.draft.checkpoint).layer
    stated = {
        section.path(key): section.raw(key)
        for key in ("is_neox_style", "rope_is_neox_style")
        if isinstance(section.raw(key), bool)
    }
    if len(set(stated.values())) > 1:
        yield context.warn(
            "two keys state the rotary style differently",
            where=f"config.json: {', '.join(stated)}",
            got=stated,
            due="one style",
            fix="leave the trained one, in both keys",
            outcomes=_as_read(context, "is-neox-style"),
        )
        return
    first = next(iter(ropes))
    attention, label = _attention(context, first), "".join(context.spec.architectures)
    meant = ropes[first].is_neox_style
    key = section.path("rope_is_neox_style")
    if label.startswith("Lfm2") and not stated:
        yield context.warn(
            "a draft of this label rotates interleaved pairs, and the file does not say so",
            where=f"config.json: {key}",
            got=None,
            due=False,
            fix="state is_neox_style and rope_is_neox_style: false",
            outcomes=context.read_as("is-neox-style", False),
        )
        return
    if isinstance(attention, MLASpec) and True in stated.values() and not meant:
        yield context.warn(
            "latent attention rotates interleaved pairs, and the file says halves",
            where=f"config.json: {', '.join(stated)}",
            got=stated,
            due=False,
            fix="drop the key, or state what was trained",
            outcomes=context.read_as("is-neox-style", False),
        )
        return
    outcomes = context.read_as("is-neox-style", meant)
    if any(outcome.outcome == "serves wrong" for outcome in outcomes.values()):
        yield context.warn(
            f"the layers rotate {'halves' if meant else 'interleaved pairs'}, and not every engine reads that",
            where=f"config.json: {', '.join(stated) or key}",
            got=stated or None,
            due={section.path(name): meant for name in ("is_neox_style", "rope_is_neox_style")},
            fix="state both keys; where an engine reads neither, serve with another",
            outcomes=outcomes,
        )


@check(
    "rope.inherited",
    title="no rotary, gate or linear-attention keys of the target in a draft of stock layers",
    why="A configuration copied from the target describes the target: an engine that believes it rotates a quarter of each head.",
    severity="warning",
    families=("dflash", "dflash2", "domino", "dspark", "dflare"),
    cost=(
        "accepted length 2.53 as trained, about 1.4 with partial_rotary_factor 0.25 believed, 2.59 with 1.0 (deepseek-ai/DeepSpec "
        "issue 71, PR 72)"
    ),
    example={"family": "dspark", "partial_rotary_factor": 0.25},
    fix="drop the keys that the draft's own layers do not have",
)
def inherited(context: Context) -> Iterator[Finding]:
    """Keys that speak of what the layers have no part for."""
    _ropes(context)
    attentions = [layer.attention for layer in context.spec.layers]
    if context.spec.model_type not in (None, "qwen3", "llama") or any(
        not isinstance(layer.attention, GQASpec) or layer.attention.q_gate or layer.norm_kind != "rms"
        for layer in context.spec.layers
    ):
        raise Skip(f"layers of {context.spec.model_type or 'another kind'} may have such parts of their own")
    prefix = open_view(context.draft.checkpoint).layer.path("")
    config = context.draft.checkpoint.config
    for subject, keys in _INHERITED.items():
        found = {prefix + key: value for key in keys if _says(key, value := at(config, prefix + key))}
        if not found:
            continue
        partial = subject == "a partial rotation"
        # Where the family knows the value for the target's, whole heads rotate; where it does not, either may be right.
        whole = all(isinstance(item, GQASpec) and item.rope.rotary_dim == item.head_dim for item in attentions)
        yield context.warn(
            f"the configuration speaks of {subject}, which layers of this kind have no part for"
            + (": it is likely the target's" if partial else ""),
            where=f"config.json: {', '.join(found)}",
            got=found,
            due="no such key" + (", or 1.0" if partial else ""),
            fix="drop the keys, unless the draft was trained with them",
            outcomes=(
                {name: Outcome(outcome="unknown") for name in context.engines}
                if not partial
                else context.read_as("partial-rotary-factor", 1.0)
                if whole
                else _as_read(context, "partial-rotary-factor")
            ),
        )


def _says(key: str, value: Any) -> bool:
    return value not in (None, False) and not (key.endswith("partial_rotary_factor") and value in (1, 1.0))


def _as_read(context: Context, setting: str) -> dict[str, Outcome]:
    """What each engine takes `setting` to be, where it is open which value is right."""
    return {
        name: Outcome(outcome="unknown")
        if reading is None
        else Outcome(outcome="unknown", message=str(reading), source=reading.source)
        for name, reading in context.readings(setting).items()
    }


def _dictionaries(context: Context) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every dictionary of the layers that may state a scaling, with its dotted key: flat, and per type of layer."""
    layer = open_view(context.draft.checkpoint).layer
    for key in ("rope_scaling", "rope_parameters"):
        found = layer.raw(key)
        if not isinstance(found, Mapping):
            continue
        nested = {name: value for name, value in found.items() if isinstance(value, Mapping)}
        own = {name: value for name, value in found.items() if name not in nested}
        if own:
            yield layer.path(key), own
        for name, value in nested.items():
            yield f"{layer.path(key)}.{name}", value


def _attention(context: Context, index: int) -> GQASpec | MLASpec | None:
    return next((layer.attention for layer in context.spec.layers if layer.index == index), None)


def _pairs(context: Context, attention: GQASpec | MLASpec | None) -> set[int]:
    """The numbers of pairs of lanes that may rotate: of the whole head, or of the part that the file states."""
    if attention is None:
        return set()
    head = attention.qk_rope_head_dim if isinstance(attention, MLASpec) else attention.head_dim
    layer = open_view(context.draft.checkpoint).layer
    stated = [
        layer.raw("partial_rotary_factor"),
        *(fields.get("partial_rotary_factor") for _, fields in _dictionaries(context)),
    ]
    shares = [1.0, *(item for item in stated if _is_number(item) and 0 < item <= 1)]
    widths = {attention.rope.rotary_dim, *(None if head is None else int(head * share) for share in shares)}
    return {width // 2 for width in widths if width}


def _stretch(rope: RopeSpec) -> float:
    """How many times longer a scaling makes the stated length, where it starts from that."""
    factor = rope.scaling.get("factor")
    starts = rope.rope_type in ("linear", "dynamic", "yarn", "deepseek_yarn", "ntk")
    if not starts or "original_max_position_embeddings" in rope.scaling or not _is_number(factor):
        return 1.0
    return float(max(1.0, factor))


def _is_scaled(context: Context) -> bool:
    attentions = [layer.attention for layer in context.spec.layers]
    return any(
        item is not None
        and getattr(item, "rotates", True)
        and item.rope.rope_type in ("linear", "yarn", "deepseek_yarn")
        for item in attentions
    )


def _is_number(value: Any) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) and len(repr(value)) < 40 else type(value).__name__


def _ropes(context: Context) -> dict[int, RopeSpec]:
    """The rotary embedding of each layer that has one."""
    require_layers(context)
    attentions = {layer.index: layer.attention for layer in context.spec.layers}
    ropes = {
        index: each.rope for index, each in attentions.items() if each is not None and getattr(each, "rotates", True)
    }
    if not ropes:
        raise Skip("no layer of this draft rotates its queries and keys, so there is no base")
    return ropes
