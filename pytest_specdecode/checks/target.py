"""Is the target that was given the one that this draft proposes for?

Everything is read from the target's `config.json`; its tokenizer and the header of its embedding are used where they lie beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_specdecode.checks.figures import rope_curves
from pytest_specdecode.checks.keys import DEPTH_KEYS
from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check, require_layers
from pytest_specdecode.engines.base import at
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import RopeSpec
from pytest_specdecode.target import Target

#: Where a draft states the width of the states that it is fed, first the keys that say nothing else.
_WIDTH_KEYS = (
    "target_hidden_size",
    "backbone_hidden_size",
    "emb_dim",
    "hidden_size",
    "text_config.hidden_size",
    "transformer_layer_config.hidden_size",
)
_VOCAB_KEYS = ("vocab_size", "text_config.vocab_size", "transformer_layer_config.vocab_size")

#: Where a draft names its target.
_NAME_KEYS = (
    "speculators_config.verifier.name_or_path",
    "base_model_name_or_path",
    "target_model_name_or_path",
    "target_model_path",
)

#: What a target says whose hidden states were turned before it was quantised.
_ROTATED = re.compile(r"quarot|spinquant|flatquant|hadamard|rotat(?!e_half)", re.IGNORECASE)

_SAME_TYPE = {"deepseek_yarn": "yarn", "mrope": "default", "su": "longrope"}
#: Fields of a scaling whose absence is a value of its own; others are compared where both sides state them.
_DEFINING = ("factor", "original_max_position_embeddings")
_NOT_SCALING = ("rope_theta", "rope_type", "type", "mrope_section", "mrope_interleaved", "partial_rotary_factor")


@check(
    "target.widths",
    title="hidden size, vocabulary, embedding rows and depth are the target's",
    why="A draft of another width does not run; one of another vocabulary or depth runs on the wrong rows and layers.",
    needs=("config", "target"),
    faults=("target-hidden-size", "target-vocab-size", "target-depth"),
    example="a draft with hidden_size 4096 beside a target with hidden_size 5120",
    fix="give the target that the draft was trained for, or state target_hidden_size, vocab_size and num_target_layers as they are",
)
def widths(context: Context) -> Iterator[Finding]:
    """The numbers that both configurations state, then the rows of the embeddings where they are stored."""
    target, spec = _target(context), context.spec
    config = context.draft.checkpoint.config
    compared = False
    if target.hidden_size is not None and spec.target_hidden_size is not None:
        compared = True
        if spec.target_hidden_size != target.hidden_size:
            yield context.fail(
                f"the draft is fed states of width {spec.target_hidden_size}, the target's have {target.hidden_size}",
                where=f"config.json: {_key(config, _WIDTH_KEYS, spec.target_hidden_size)}",
                got=spec.target_hidden_size,
                due=target.hidden_size,
                fault="target-hidden-size",
            )
    rows = target.embedding_rows
    vocab = spec.vocabulary.vocab_size
    header = context.draft.header("embed_tokens.weight")
    own = header.shape[0] if header is not None and len(header.shape) == 2 else None
    due = [size for size in (target.vocab_size, rows) if size is not None]
    if vocab is not None and due:
        compared = True
        if vocab not in due:
            yield context.fail(
                f"the draft's vocabulary has {vocab} ids, the target's has {' or '.join(map(str, dict.fromkeys(due)))}",
                where=f"config.json: {_key(config, _VOCAB_KEYS, vocab)}",
                got=vocab,
                due=due[0],
                fix="state the target's padded vocab_size",
                fault="target-vocab-size",
            )
        elif own not in (None, *due):
            yield context.fail(
                f"the draft's embedding has {own} rows, the target's has {due[-1]}",
                where=context.draft.stored_name("embed_tokens.weight"),
                got=own,
                due=due[-1],
                fault="target-vocab-size",
            )
    depth = spec.taps.num_target_layers
    # Some packagings write the number of taps there.
    if depth is not None and target.num_hidden_layers is not None and depth != spec.taps.count:
        compared = True
        if depth != target.num_hidden_layers:
            yield context.warn(
                f"the draft was trained on a target of {depth} layers, this one has {target.num_hidden_layers}",
                where=f"config.json: {_key(config, DEPTH_KEYS, depth)}",
                got=depth,
                due=target.num_hidden_layers,
                fault="target-depth",
            )
    unread = _unread(target)
    if not compared:
        raise Inconclusive(
            "draft and target state no width, vocabulary or depth that could be compared"
            + (f": the target's {' and '.join(unread)} cannot be read as numbers" if unread else "")
        )
    for key, stated in unread.items():
        yield context.warn(
            f"the target's {key} is no whole number, so it was not compared",
            where=f"the target's config.json: {key}",
            got=stated,
            due="a whole number",
            fix="give the target's own config.json; configuration classes refuse this one",
        )


def _unread(target: Target) -> dict[str, Any]:
    """What the target states where a whole number is due, by key; a float that is whole is nobody's fault."""
    found: dict[str, Any] = {}
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        stated = next((place[key] for place in (target.text, target.config) if place.get(key) is not None), None)
        if stated is not None and target.number(key) is None and not (isinstance(stated, float) and stated % 1 == 0):
            found[key] = stated
    return found


@check(
    "target.identity",
    title="the target is the one that the draft names, with hidden states as the draft was trained on",
    why="A sibling of the target has the same shapes and other states; a rotated or quantised one too.",
    severity="warning",
    needs=("config", "target"),
    faults=("target-rotated", "target-quantised"),
    example="speculators_config.verifier.architectures ['LlamaForCausalLM'] beside a target that is Qwen3ForCausalLM",
    fix="give the target that the draft was trained for; where that is this one, name it in the draft",
)
def identity(context: Context) -> Iterator[Finding]:
    """Architectures, then the name, then what was done to the target's weights."""
    findings = [*_named(context), *_treated(context)]
    yield from findings
    if not findings and (reason := _unnamed(context)) is not None:
        raise Inconclusive(reason)


def _named(context: Context) -> Iterator[Finding]:
    target = _target(context)
    config = context.draft.checkpoint.config
    where = "speculators_config.verifier.architectures"
    found = at(config, where)
    named = [item for item in found if isinstance(item, str)] if isinstance(found, list) else []
    if named and target.architectures and not set(named) & set(target.architectures):
        yield context.warn(
            f"the draft was trained for a {named[0]}, the target is a {target.architectures[0]}",
            where=f"config.json: {where}",
            got=named,
            due=list(target.architectures),
        )
    key, name = _name(config)
    if name and target.names and not _is_called(target, name):
        yield context.warn(
            f"the draft names {name}, the target calls itself {target.names[0]}",
            where=f"config.json: {key}",
            got=name,
            due=target.names[0],
        )


def _treated(context: Context) -> Iterator[Finding]:
    target = _target(context)
    if context.spec.packaging == "embedded" or context.spec.family == "mtp":
        return
    mark = _rotation(target.config)
    if mark is not None:
        yield context.warn(
            f"the target says that its states are rotated ({mark}); a draft that was trained on plain ones reads them wrong",
            where=f"the target's config.json: {mark}",
            got=mark,
            due="a target without a rotation, or a draft that was trained on this one",
            fix="train the draft on this target, or fold the rotation into its fc and its embedding",
            fault="target-rotated",
        )
    elif target.quantization:
        method = (
            target.quantization.get("quant_method") or target.quantization.get("quant_algo") or "a method not named"
        )
        yield context.warn(
            f"the target is quantised ({method}); its states are not quite those of the plain model",
            where="the target's config.json: quantization_config",
            got=method,
            due="the target that the draft was trained on",
            fix="right where the draft was trained on this target; else measure the accepted length on both",
            fault="target-quantised",
        )


def _unnamed(context: Context) -> str | None:
    """Why it stays open whether this is the target that the draft names, or None where it does not."""
    target, config = _target(context), context.draft.checkpoint.config
    if context.spec.packaging == "embedded":
        return None
    _, name = _name(config)
    if name:
        is_known = bool(target.names) or _is_called(target, name)
        return None if is_known else f"the draft names {name}; the target's files do not say what it is called"
    stated = at(config, "speculators_config.verifier.architectures")
    return None if isinstance(stated, list) and stated else "the draft does not name its target"


def _name(config: Mapping[str, Any]) -> tuple[str, str]:
    """The target's name as the draft states it, with its key; both empty where it does not."""
    stated = ((key, at(config, key)) for key in _NAME_KEYS)
    return next(((key, value) for key, value in stated if isinstance(value, str) and value), ("", ""))


def _is_called(target: Target, name: str) -> bool:
    return _last(name) in map(_last, (*target.names, str(target.path.absolute())))


@check(
    "target.rope",
    title="theta, type and scaling of the rotary embedding are the target's",
    why="A draft trained beside its target nearly always has its base; another one is often a default that was filled in.",
    severity="warning",
    needs=("config", "target"),
    cost="accepted length 2.37 served with a base of 1000000, 2.56 with the trained 10000 (sfllm PR 32)",
    example="rope_theta 10000 beside a target with rope_theta 1000000",
    fix="right where the draft was trained so; else state the base and the scaling that it was trained with",
)
def rope(context: Context) -> Iterator[Finding]:
    """Each kind of layer of the draft against the kinds that the target has."""
    if context.spec.packaging == "embedded":
        raise Skip("the draft's layers lie inside the target, and have what its own code gives them")
    require_layers(context)
    attentions = [layer.attention for layer in context.spec.layers]
    ropes = [item.rope for item in attentions if item is not None and getattr(item, "rotates", True)]
    if not ropes:
        raise Skip("no layer of this draft rotates its queries and keys")
    theirs = [item for item in _target(context).ropes if _number(item.get("rope_theta")) is not None]
    if not theirs:
        raise Inconclusive("the target's config.json states no rope_theta")
    if context.pictures:
        turning = [item for item in attentions if item is not None and getattr(item, "rotates", True)]
        context.figures["target.rope"] = rope_curves(turning, _target(context), theirs)
    findings: list[Finding] = []
    for mine in _different([item for item in ropes if item.theta is not None]):
        alike = [item for item in theirs if item["rope_theta"] == mine.theta]
        if not alike:
            findings.append(
                context.warn(
                    f"rope_theta is {mine.theta:g}, the target's is {theirs[0]['rope_theta']:g}",
                    where=f"config.json: {mine.theta_stated[0].key if mine.theta_stated else 'rope_theta'}",
                    got=mine.theta,
                    due=[item["rope_theta"] for item in theirs],
                )
            )
        findings += _scaling(context, mine, alike or theirs)
    yield from findings
    if not findings and any(item.theta is None for item in ropes):
        raise Inconclusive("rope_theta is not stated; see rope.theta-stated")


def _scaling(context: Context, mine: RopeSpec, theirs: list[Mapping[str, Any]]) -> Iterator[Finding]:
    kind = _SAME_TYPE.get(mine.rope_type, mine.rope_type)
    alike = [item for item in theirs if _type(item) == kind]
    if not alike:
        yield context.warn(
            f"the rotary embedding is of type {kind}, the target's is {_type(theirs[0])}",
            where="config.json: rope_scaling",
            got=mine.rope_type,
            due=_type(theirs[0]),
        )
        return
    apart = [_apart(mine.scaling, item) for item in alike]
    if all(apart):
        keys = apart[0]
        yield context.warn(
            f"the rotary scaling differs from the target's in {', '.join(keys)}",
            where="config.json: rope_scaling",
            got={key: mine.scaling.get(key) for key in keys},
            due={key: alike[0].get(key) for key in keys},
        )


def _apart(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    keys = [key for key in {**mine, **theirs} if key not in _NOT_SCALING]
    return [
        key
        for key in keys
        if mine.get(key) != theirs.get(key) and (key in _DEFINING or None not in (mine.get(key), theirs.get(key)))
    ]


def _type(rope: Mapping[str, Any]) -> str:
    stated = rope.get("rope_type") or rope.get("type") or "default"
    return _SAME_TYPE.get(stated, stated) if isinstance(stated, str) else repr(stated)


def _different(ropes: list[RopeSpec]) -> list[RopeSpec]:
    """One of each kind, in order."""
    kinds: dict[str, RopeSpec] = {}
    for item in ropes:
        kinds.setdefault(repr((item.theta, item.rope_type, dict(item.scaling))), item)
    return list(kinds.values())


def _rotation(config: Mapping[str, Any]) -> str | None:
    """Where the configuration speaks of rotated states, as a dotted key; None where nowhere."""
    for section in ("quantization_config", "compression_config", "text_config"):
        found = config.get(section)
        if isinstance(found, dict) and (mark := _marked(found)) is not None:
            return f"{section}.{mark}"
    return next((key for key, value in config.items() if _ROTATED.search(key) and value not in (None, False)), None)


def _marked(section: Mapping[str, Any]) -> str | None:
    for key, value in section.items():
        if value in (None, False, "", 0) or "rotary" in key or "rope" in key:
            continue
        if _ROTATED.search(key) or (isinstance(value, str) and _ROTATED.search(value)):
            return key
        inner = value if isinstance(value, dict) else None
        if inner is not None and (mark := _marked(inner)) is not None:
            return f"{key}.{mark}"
    return None


def _target(context: Context) -> Target:
    assert context.target is not None, "the check needs a target"
    return context.target


def _key(config: Mapping[str, Any], keys: tuple[str, ...], value: int) -> str:
    return next((key for key in keys if at(config, key) == value), keys[0])


def _last(name: str) -> str:
    """The last part of a path or a repository's name, without regard to case."""
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
