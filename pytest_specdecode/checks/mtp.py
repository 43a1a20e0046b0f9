"""Are a target's prediction layers there, and are they read as they were trained: their norms, and the order of what they combine?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode import engines
from pytest_specdecode.checks.keys import layer_key
from pytest_specdecode.checks.registry import Context, Inconclusive, check
from pytest_specdecode.families.base import open_view
from pytest_specdecode.families.mtp import MTPOptions, stated_counts
from pytest_specdecode.findings import Finding

#: What a prediction layer has in front of its block; a plain layer of the target has none of it.
_STEM = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
_SUMMED = ("enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight")
#: Norms over the whole width of the states. Those of single heads are left out: trained ones lie near 1 in either convention.
_WIDE_NORMS = (
    "enorm",
    "hnorm",
    "input_layernorm",
    "post_attention_layernorm",
    "attn_norm",
    "ffn_norm",
    "shared_head.norm",
    "norm",
)
#: A weight w that starts at 1 keeps its sign as a rule; one that starts at 0 has both signs. A fifth of the entries is far from either.
_MIXED_SIGNS = 0.2
#: How far from 1 the mean of a norm may lie that was certainly started there.
_NEAR_ONE = 0.15
#: Norms that must agree before anything is said of a convention.
_SEVERAL = 2
#: Names that MiMo's layers (hidden state first) and the speculators library's (embedding first) share.
_SHARED_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj")
_HALVES = {
    "embed-first": "the embedding before the hidden state",
    "hidden-first": "the hidden state before the embedding",
    "sum": "the two through projections of their own",
}


@check(
    "mtp.layers",
    title="the declared prediction layers are in the file, no more and no fewer",
    why="Quantisers and exporters leave prediction layers out; a server that does not notice drafts with accepted length 1.0.",
    needs=("config", "headers"),
    families=("mtp",),
    faults=("mtp-layers-missing", "mtp-layers-beyond", "mtp-count-missing"),
    cost="accepted length 1.000 where a quantised export lost them (vLLM issue 37667, SGLang issue 35797)",
    example={"family": "mtp", "num_nextn_predict_layers": 2},
    fix="export the prediction layers with their target, and state their number",
)
def layers(context: Context) -> Iterator[Finding]:
    """Counts that differ, layers that are lost, beyond the count or not prediction layers at all."""
    draft, stated = context.draft, context.spec.num_hidden_layers
    where = f"config.json: {context.spec.layer_key}"
    counts = [item for item in stated_counts(open_view(draft.checkpoint)) if type(item.value) is int]
    if len({item.value for item in counts}) > 1:
        yield context.warn(
            "the number of prediction layers is stated with different values",
            where=f"config.json: {', '.join(item.key for item in counts)}",
            got={item.key: item.value for item in counts},
            due="one value",
            fix="state the number of layers that the file holds, in every place",
        )
    if context.spec.packaging == "speculators" and (stated or 0) > 1:
        yield context.warn(
            f"{stated} prediction layers in the speculators packaging, which is written and read with one",
            where=where,
            got=stated,
            due=1,
            fix="leave the others in the target's own packaging",
        )
    if not draft.checkpoint.has_weights:
        return
    held = _held(context)
    if not stated:
        yield from _uncounted(context, held)
        return
    missing = [index for index in range(stated) if index not in held]
    beyond = [index for index in held if index >= stated]
    if missing:
        yield context.fail(
            _missing_message(context, stated, held, missing),
            where=draft.stored_name(_stem(context, missing[0])[0]),
            got=f"layers {_numbers(context, held)}" if held else "none",
            due=f"layers {_numbers(context, list(range(stated)))}",
            fix="state 1 where one layer serves every step"
            if held == [0]
            else "export the layers too; ignore lists of quantisers and `save_pretrained` of the target's class leave them out",
            fault="mtp-layers-missing",
        )
    if beyond:
        yield context.fail(
            f"{'layers' if len(beyond) > 1 else 'layer'} {_numbers(context, beyond)} beyond the {stated} that {_last(where)} counts",
            where=_first_stored(context, beyond[0]),
            got=f"layers {_numbers(context, held)}",
            due=f"layers {_numbers(context, list(range(stated)))}",
            fix="state the number of prediction layers in the file, and the target's depth without them",
            fault="mtp-layers-beyond",
        )
    plain = _without_stem(context, [index for index in held if index < stated])
    if plain:
        names = [draft.stored_name(name) for name in _stem(context, plain[0])]
        yield context.fail(
            f"layer {_numbers(context, plain)} has none of {', '.join(names)}: it is no prediction layer",
            where=names[0],
            got="a plain decoder layer",
            due=names,
            fix="compare num_hidden_layers with the target's depth, from which prediction layers are counted",
            fault="mtp-layers-missing",
        )
    context.notes["mtp.layers"] = f"prediction {'layer' if stated == 1 else 'layers'} {_numbers(context, held)}"


@check(
    "mtp.norms",
    title="the norms are all of one convention, w or 1 + w, and it is the target family's",
    why="A norm that is read in the other convention is off by one in every lane, and nothing stops.",
    severity="warning",
    needs=("config", "tensors"),
    families=("mtp",),
    faults=("mtp-norm-convention",),
    example="norms of a target that multiplies by w, stored with mean 0 and both signs as for 1 + w",
    fix="export the norms in the convention of the target's own class",
)
def norms(context: Context) -> Iterator[Finding]:
    """What several norms show together: signs show weights that started at 0, a mean of 1 weights that started there."""
    draft = context.draft
    if not draft.checkpoint.has_weights:
        return
    kinds = {layer.norm_kind for layer in context.spec.layers}
    zero, one, seen = _conventions(context)
    if not seen:
        raise Inconclusive("no norm of a prediction layer is stored in a float dtype")
    shown = {draft.stored_name(name): "1 + w" if name in zero else "w" if name in one else "either" for name in seen}
    context.notes["mtp.norms"] = (
        f"{len(zero)} of {len(seen)} norms show 1 + w, {len(one)} show w, the others fit either"
    )
    if len(zero) >= _SEVERAL and len(one) >= _SEVERAL:
        yield context.warn(
            f"{len(zero)} norms look like 1 + w and {len(one)} like w: the head mixes two conventions",
            where=f"{draft.stored_name(zero[0])}, {draft.stored_name(one[0])}",
            got=shown,
            due="one convention for all norms",
            fix="export all norms in the convention of the target's own class",
            fault="mtp-norm-convention",
        )
    elif kinds == {"rms"} and len(zero) >= _SEVERAL:
        yield context.warn(
            f"{len(zero)} of {len(seen)} norms have entries of both signs, as for 1 + w; a {context.spec.model_type} target "
            "multiplies by w",
            where=draft.stored_name(zero[0]),
            got=shown,
            due="w, around a positive mean",
            fix="add 1 to the norms, or state the model_type of the class that they were trained in",
            fault="mtp-norm-convention",
        )
    elif kinds == {"gemma"} and len(one) > _SEVERAL and len(one) == len(seen):
        yield context.warn(
            f"all {len(seen)} norms lie around 1, as for w; a {context.spec.model_type} target multiplies by 1 + w",
            where=draft.stored_name(one[0]),
            got=shown,
            due="1 + w, so weights around 0",
            fix="subtract 1 from the norms, or state the model_type of the class that they were trained in",
            fault="mtp-norm-convention",
        )


@check(
    "mtp.combine",
    title="embedding and hidden state enter the combining projection in the order that engines give them",
    why="The same tensor names stand for both orders; with the halves exchanged every shape fits and nothing is accepted.",
    severity="warning",
    needs=("config", "headers"),
    families=("mtp",),
    example={"family": "mtp", "architectures": ["MiMoForCausalLM"]},
    fix="write the layer under the names and the model_type of the class that it was trained in",
)
def combine(context: Context) -> Iterator[Finding]:
    """The order that packaging and names give, against each other and against what each engine reads."""
    options, draft = _options(context), context.draft
    meant = options.combine
    context.notes["mtp.combine"] = f"reads {_HALVES[meant]}"
    outcomes = context.read_as("combine", meant)
    name = draft.stored_name(f"layers.0.{'e_proj' if meant == 'sum' else 'eh_proj'}.weight")
    names = _shared_names(context)
    if options.style not in ("mimo", "speculators") and names:
        yield context.warn(
            f"{names[0]} is a name that MiMo's layers have, hidden state first, and the speculators library's, embedding first; "
            f"the file is neither's, and {_HALVES[meant]} is guessed",
            where=names[0],
            got=names,
            due="the names of the target's own class",
            fix="state which it is: model_type mimo, or speculators_model_type mtp",
            outcomes=outcomes,
        )
    elif options.style == "mimo" and draft.checkpoint.has_weights and not names and _is_stored(context):
        yield context.warn(
            f"{name} has a name of DeepSeek's layers, embedding first; the configuration says MiMo, hidden state first",
            where=name,
            got=name,
            due="mtp_layers.{i}.input_proj, or another model_type",
            fix="state the model_type of the class that the layer was trained in",
            outcomes=outcomes,
        )
    elif options.style == "speculators" and (context.spec.model_type or "").lower().startswith("mimo"):
        yield context.warn(
            f"a {context.spec.model_type} layer reads the hidden state first, and this packaging the embedding",
            where=f"config.json: {layer_key(context, 'model_type')}",
            got=context.spec.model_type,
            due="the halves of input_proj exchanged, which the converter does not do",
            fix="exchange the two halves of input_proj's columns, where that was not done",
            outcomes=outcomes,
        )
    elif any(outcome.outcome in engines.UNFIT for outcome in outcomes.values()):
        yield context.warn(
            f"the layer reads {_HALVES[meant]}, and not every engine gives it so",
            where=f"config.json: architectures, {layer_key(context, 'model_type')}",
            got={found: str(reading) for found, reading in context.readings("combine").items() if reading is not None},
            due=meant,
            fix="state the architecture and model_type of the class that the layer was trained in",
            outcomes=outcomes,
        )


def _uncounted(context: Context, held: list[int]) -> Iterator[Finding]:
    """Layers in the file whose number is not stated, or stated as 0."""
    where = f"config.json: {context.spec.layer_key}"
    if context.spec.num_hidden_layers == 0:
        yield context.fail(
            "no prediction layer is declared"
            + (
                f", the weights hold {len(held)}: {_numbers(context, held)}" if held else ", and none is in the weights"
            ),
            where=where,
            got=0,
            due=len(held) or "the number of prediction layers",
            fix="state the number of prediction layers that the file holds",
        )
    elif held != list(range(len(held))):
        yield context.fail(
            f"prediction layers {_numbers(context, held)} leave a gap",
            where=_first_stored(context, held[0]),
            got=f"layers {_numbers(context, held)}",
            due=f"layers {_numbers(context, list(range(len(held))))}",
            fault="mtp-layers-missing",
        )
    elif held:
        yield context.fail(
            f"{len(held)} prediction layer{'s are' if len(held) > 1 else ' is'} in the weights and no key states their number",
            where=where,
            got=None,
            due=len(held),
            fix="state it: an engine that finds no number stops, or builds one layer",
            fault="mtp-count-missing",
        )


def _missing_message(context: Context, stated: int, held: list[int], missing: list[int]) -> str:
    if not held:
        return (
            f"none of the {stated} declared prediction layers is in the weights"
            if stated > 1
            else ("the declared prediction layer is not in the weights")
        )
    if held == [0]:
        return f"{stated} prediction layers are declared and the weights hold one: a layer that is run for several steps is counted once"
    return f"{len(missing)} of {stated} declared prediction layers are not in the weights: {_numbers(context, missing)}"


def _conventions(context: Context) -> tuple[list[str], list[str], list[str]]:
    """The norms that show 1 + w, those that show w, and all that were looked at, by canonical name."""
    draft = context.draft
    zero: list[str] = []
    one: list[str] = []
    seen: list[str] = []
    for layer in context.spec.layers:
        for part in _WIDE_NORMS:
            name = f"layers.{layer.index}.{part}.weight"
            header = draft.header(name)
            if header is None or not header.is_float or len(header.shape) != 1 or header.shape[0] < 16:
                continue
            values = draft.tensor(name).double()
            if not bool(values.isfinite().all()):
                continue
            seen.append(name)
            mean, low = float(values.mean()), float(values.min())
            if float((values < 0).double().mean()) >= _MIXED_SIGNS and low > -1.5 and abs(mean) < 0.5:
                zero.append(name)
            elif low > 0 and abs(mean - 1) <= _NEAR_ONE:
                one.append(name)
    return zero, one, seen


def _stem(context: Context, index: int) -> list[str]:
    return [f"layers.{index}.{part}" for part in (_SUMMED if _options(context).combine == "sum" else _STEM)]


def _without_stem(context: Context, held: list[int]) -> list[int]:
    """Layers of which nothing in front of the block is stored; where it is stored once, the first layer speaks for all."""
    due = held[:1] if _options(context).shared_stem else held
    return [index for index in due if all(context.draft.header(name) is None for name in _stem(context, index))]


def _held(context: Context) -> list[int]:
    binding, family = context.draft.binding, context.draft.family
    if binding is None or family is None:
        return []
    return sorted({index for name in binding.stored if (index := family.layer_index(name)) is not None})


def _first_stored(context: Context, index: int) -> str:
    """The first tensor of layer `index` by its name on disk."""
    binding = context.draft.binding
    assert binding is not None
    return next(stored for name, stored in binding.stored.items() if name.startswith(f"layers.{index}."))


def _shared_names(context: Context) -> list[str]:
    binding = context.draft.binding
    if binding is None:
        return []
    return [stored for stored in binding.stored.values() if any(part in stored.split(".") for part in _SHARED_NAMES)]


def _is_stored(context: Context) -> bool:
    return context.draft.header("layers.0.eh_proj.weight") is not None


def _numbers(context: Context, indices: list[int]) -> str:
    """The layers by the numbers that they go by in the file."""
    shown = [context.draft.stored_layer(index) for index in indices]
    if len(shown) > 2 and shown == list(range(shown[0], shown[0] + len(shown))):
        return f"{shown[0]} to {shown[-1]}"
    return ", ".join(map(str, shown[:8])) + (", …" if len(shown) > 8 else "")


def _last(where: str) -> str:
    return where.rpartition(".")[2].rpartition(" ")[2]


def _options(context: Context) -> MTPOptions:
    options = context.spec.options
    assert isinstance(options, MTPOptions), "a spec of prediction layers has their options"
    return options
