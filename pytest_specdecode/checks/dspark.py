"""What DSpark's Markov and confidence heads must be, and where their keys must stand."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode import engines
from pytest_specdecode.checks.registry import Context, check
from pytest_specdecode.families.dspark import HEAD_KEYS, DSparkOptions
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import Extent, plus

_HEADS = ("markov_head.", "confidence_head.")
#: By type, the projection that a Markov head has beside its two matrices.
_PROJECTIONS = {"gated": "gate_proj", "rnn": "joint_proj"}


@check(
    "dspark.keys",
    title="the heads' keys stand where engines read them, once, under a label that engines know",
    why="A head whose rank is not found is left out or stops the server; the six packagings put the keys in different places.",
    families=("dspark",),
    faults=("dspark-keys-nested", "dspark-label", "dspark-speculators", "k3-fields"),
    example={"family": "dspark", "markov_rank": ..., "dflash_config": {"markov_rank": 16}},
    fix="state the heads' keys at top level, and the architecture of the packaging",
)
def keys(context: Context) -> Iterator[Finding]:
    """Keys in one of two places, two values for one key, a label and a packaging that an engine does not take."""
    spec, config = context.spec, context.draft.checkpoint.config
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    only_nested = [key for key in HEAD_KEYS if nested.get(key) is not None and config.get(key) is None]
    if only_nested and spec.packaging == "plain":
        yield context.warn(
            f"{', '.join(only_nested)} {'stands' if len(only_nested) == 1 else 'stand'} in dflash_config only, "
            "where not every engine looks",
            where=f"config.json: dflash_config.{only_nested[0]}",
            got={f"dflash_config.{key}": nested[key] for key in only_nested},
            due="both places",
            fix="copy them to the top level beside mask_token_id and target_layer_ids, as releases do",
            fault="dspark-keys-nested",
        )
    for key in HEAD_KEYS:
        if None not in (nested.get(key), config.get(key)) and nested[key] != config[key]:
            yield context.fail(
                f"{key} is stated with different values",
                where=f"config.json: dflash_config.{key}, {key}",
                got={f"dflash_config.{key}": nested[key], key: config[key]},
                due="one value",
                fix="leave the trained one, in both places",
            )
    if _options(context).backbone == "mla":
        yield from _latent_keys(context)
    labelled = spec.packaging == "plain" and bool(spec.architectures)
    if labelled and _is_unfit(context, "dspark-label") and (context.judged or not _is_known(context, "dspark-label")):
        yield context.warn(
            f"{spec.architectures[0]} is a label that not every engine knows",
            where="config.json: architectures",
            got=list(spec.architectures),
            due="the label of a class that the engine registers",
            fix="state the label of the packaging, such as Qwen3DSparkModel or DSparkDraftModel",
            fault="dspark-label",
        )
    # The packaging is no fault of the file; it counts only for an engine that somebody means to serve it with.
    if spec.packaging == "speculators" and context.judged and _is_unfit(context, "dspark-speculators"):
        yield context.warn(
            "the speculators packaging of DSpark is not taken by every engine",
            where="config.json: speculators_model_type",
            got="dspark",
            due="a packaging that the engine reads",
            fix="serve it with another engine, or export DeepSpec's packaging",
            fault="dspark-speculators",
        )


@check(
    "dspark.heads",
    title="Markov and confidence head are whole: type, rank, shapes, names",
    why="A head whose tensors are not found is left out in silence, and one of another form shifts every correction.",
    needs=("config", "headers"),
    families=("dspark",),
    faults=("markov-rank-zero", "markov-missing", "markov-prefix", "confidence-missing", "tensor-shape"),
    example="markov_head_type gated beside a head without gate_proj",
    fix="export the heads with their prefixes, and state rank, type and flags as the tensors have them",
)
def heads(context: Context) -> Iterator[Finding]:
    """A rank of zero, names without their prefix, tensors that the type or a flag does not call for, and shapes."""
    options = _options(context)
    if options.markov_rank == 0:
        yield context.warn(
            "markov_rank is 0: a draft without a Markov head, which the trainer knows and not every engine",
            where="config.json: markov_rank",
            got=0,
            due="a positive rank, or an engine that drafts without the head",
            fix="serve it as DFlash where the engine refuses it",
            fault="markov-rank-zero",
        )
    if not context.draft.checkpoint.has_weights:
        return
    yield from _prefixes(context)
    yield from _markov(context)
    yield from _confidence(context)


def _latent_keys(context: Context) -> Iterator[Finding]:
    """What Kimi K3's configuration class demands beside q_lora_rank, which has a check of its own."""
    spec, config = context.spec, context.draft.checkpoint.config
    rows, vocabulary = spec.vocabulary.draft_vocab_size, spec.vocabulary.vocab_size
    if None not in (rows, vocabulary) and rows != vocabulary:
        yield context.fail(
            f"draft_vocab_size {rows} is not vocab_size {vocabulary}, and a latent draft has no reduced vocabulary",
            where="config.json: draft_vocab_size",
            got=rows,
            due=vocabulary,
            fault="k3-fields",
        )
    stated = config.get("num_target_layers")
    if stated is not None and spec.taps.count is not None and stated != spec.taps.count:
        yield context.fail(
            f"num_target_layers is {stated}; a latent draft counts its {spec.taps.count} taps by it",
            where="config.json: num_target_layers",
            got=stated,
            due=spec.taps.count,
            fix="state the number of taps there, and the target's depth as target_num_hidden_layers",
            fault="k3-fields",
        )


def _prefixes(context: Context) -> Iterator[Finding]:
    bare = [
        stored
        for name, stored in _stored(context).items()
        for prefix in _HEADS
        if name.startswith(prefix) and prefix not in stored
    ]
    if bare:
        yield context.fail(
            f"{', '.join(bare[:4])}{', …' if len(bare) > 4 else ''}: names without the prefix of their head",
            where=bare[0],
            got=bare,
            due=list(_HEADS),
            fix="write them as markov_head.* and confidence_head.proj.*",
            fault="markov-prefix",
        )


def _markov(context: Context) -> Iterator[Finding]:
    options, stored, vocabulary = _options(context), _stored(context), context.spec.vocabulary
    if options.markov_rank == 0:
        present = [stored[name] for name in stored if name.startswith("markov_head.")]
        if present:
            yield context.fail(
                "markov_rank is 0, and the weights hold a Markov head",
                where=present[0],
                got=present,
                due="a positive markov_rank",
                fix="state the rank that markov_w1's columns have",
            )
        return
    kind = options.markov_head_type
    for part in _PROJECTIONS.values():
        name = f"markov_head.{part}.weight"
        if kind is not None and name in stored and part != _PROJECTIONS.get(kind):
            yield context.fail(
                f"markov_head_type is {kind}, and the weights hold {part} of another type",
                where=stored[name],
                got=kind,
                due=next(other for other, own in _PROJECTIONS.items() if own == part),
                fix="state the type that the head was trained as",
            )
    due = ["markov_w1", "markov_w2", *([_PROJECTIONS[kind]] if kind in _PROJECTIONS else [])]
    missing = [part for part in due if f"markov_head.{part}.weight" not in stored]
    if missing:
        names = [context.draft.stored_name(f"markov_head.{part}.weight") for part in missing]
        yield context.fail(
            f"a {kind or 'Markov'} head of rank {options.markov_rank} without {', '.join(names)}",
            where=names[0],
            got=None,
            due=names,
            fix="export the whole head, or state markov_rank 0 where there is none",
            fault="markov-missing",
        )
    yield from _matrix(context, "markov_w1", vocabulary.vocab_size, "target id")
    yield from _matrix(context, "markov_w2", vocabulary.head_rows, "draft id")


def _matrix(context: Context, part: str, rows: Extent, each: str) -> Iterator[Finding]:
    name, rank = f"markov_head.{part}.weight", _options(context).markov_rank
    shape = _plain_shape(context, name)
    if shape is None or len(shape) != 2:
        return
    where = context.draft.stored_name(name)
    if None not in (shape[1], rank) and shape[1] != rank:
        yield context.fail(
            f"{part} has rank {shape[1]}, markov_rank is {rank}",
            where=where,
            got=list(shape),
            due=[rows, rank],
            fix="state the rank that was trained",
            fault="tensor-shape",
        )
    if None not in (shape[0], rows) and shape[0] != rows:
        yield context.fail(
            f"{part} has {shape[0]} rows; it has one for each {each}, {rows}",
            where=where,
            got=list(shape),
            due=[rows, rank],
            fix="export the whole matrix; accepted tokens are target ids, drafted ones draft ids",
            fault="tensor-shape",
        )


def _confidence(context: Context) -> Iterator[Finding]:
    options, stored, hidden = _options(context), _stored(context), context.spec.hidden_size
    name = "confidence_head.proj.weight"
    where = context.draft.stored_name(name)
    if name not in stored:
        if options.confidence_head:
            yield context.fail(
                f"enable_confidence_head is true, and {where} is not in the weights",
                where=where,
                got=None,
                due="the head's projection",
                fix="export it, or state enable_confidence_head: false",
                fault="confidence-missing",
            )
        return
    if options.confidence_head is False:
        yield context.fail(
            "enable_confidence_head is false, and the weights hold the head",
            where=where,
            got=False,
            due=True,
            fix="state enable_confidence_head: true, or leave the head out",
        )
        return
    shape, with_markov = _plain_shape(context, name), options.confidence_with_markov
    width = plus(hidden, options.markov_rank) if with_markov else hidden
    if shape is None or len(shape) != 2 or None in (shape[1], width) or shape[1] == width:
        return
    # Without a Markov head there is nothing beside the hidden state, whatever the flag says.
    bare = options.markov_rank == 0
    given = "markov_rank 0" if bare else f"confidence_head_with_markov {'true' if with_markov else 'false'}"
    yield context.fail(
        f"the confidence head reads {shape[1]} features; {given} gives {width}",
        where=where,
        got=list(shape),
        due=[1, width],
        fix="state the markov_rank that was trained, or export a confidence head of the hidden state alone"
        if bare
        else "state confidence_head_with_markov as the head was trained",
        fault="tensor-shape",
    )


def _plain_shape(context: Context, name: str) -> tuple[Extent, ...] | None:
    """The shape, except of a matrix that is stored packed."""
    packed = name.removesuffix(".weight") in _options(context).packed
    return None if packed else context.draft.shape(name)


def _stored(context: Context) -> dict[str, str]:
    binding = context.draft.binding
    return (
        {} if binding is None else {name: stored for name, stored in binding.stored.items() if name.startswith(_HEADS)}
    )


def _is_unfit(context: Context, fault: str) -> bool:
    found = engines.outcomes(fault, context.spec, context.engines)
    return any(outcome.outcome in engines.UNFIT for outcome in found.values())


def _is_known(context: Context, fault: str) -> bool:
    """Whether some engine is known to serve it right."""
    found = engines.outcomes(fault, context.spec, context.engines)
    return any(outcome.outcome == "fine" for outcome in found.values())


def _options(context: Context) -> DSparkOptions:
    options = context.spec.options
    assert isinstance(options, DSparkOptions), "a DSpark spec has DSpark options"
    return options
