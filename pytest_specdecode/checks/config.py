"""Does the configuration name one draft, and do its numbers fit together?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_specdecode import engines
from pytest_specdecode.checks.config_values import STOCK, impossible_values
from pytest_specdecode.checks.keys import layer_key
from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check, require_layers
from pytest_specdecode.engines.hf_config import MODEL_TYPES
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.families.base import open_view
from pytest_specdecode.families.recognise import Recognition
from pytest_specdecode.findings import Finding, Outcome
from pytest_specdecode.spec import GQASpec, MLASpec


@check(
    "config.family",
    title="one family: architecture, types, key names and tensors agree",
    why="An engine picks the algorithm by label; another label over the same weights is served with accepted length 1.0.",
    needs=("config", "headers"),
    anywhere=True,
    faults=("family-disagrees", "family-eagle-label"),
    cost="accepted length 1.00 for an EAGLE3 draft that was served as EAGLE (sgl-project/sglang PR 21272)",
    example={"architectures": ["DFlashDraftModel"]},
    fix="set architectures and projector_type to what the weights are",
)
def family(context: Context) -> Iterator[Finding]:
    """The evidence for each family, shown where it does not agree."""
    draft = context.draft
    if not draft.checkpoint.config and draft.checkpoint.faults:
        raise Inconclusive(f"the configuration cannot be read: {draft.checkpoint.faults[0]}")
    found = draft.recognition
    if found.is_template:
        yield context.fail(
            "every size is null: a template, not a configuration",
            where="config.json: hidden_size",
            got=None,
            due="the sizes of a draft",
            fix="export the draft; the exporter fills the template in from the model",
        )
    elif found.disagreement:
        yield context.fail(
            f"signals name more than one family: {', '.join(found.disagreement)}",
            where="config.json",
            got=found.evidence(),
            due="one family",
            fix="set architectures and projector_type to what the weights are",
            fault="family-eagle-label" if _is_eagle3_as_eagle(found) else "family-disagrees",
        )
    elif draft.spec is None:
        read = ", ".join(item.name for item in FAMILIES)
        named = found.family or next(iter(found.evidence()), None)
        yield context.fail(
            "no draft family is recognised" if named is None else f"a {named} draft, which this version does not read",
            where="config.json: architectures",
            got=found.evidence() or draft.checkpoint.config.get("architectures"),
            due=f"one of {read}",
            fix="state the draft's architecture; is this the draft's directory and not the target's?",
        )
    elif draft.spec.packaging == "speculators":
        config = draft.checkpoint.config
        nested = config.get("speculators_config")
        algorithm = nested.get("algorithm") if isinstance(nested, dict) else None
        named = config.get("speculators_model_type")
        if algorithm is not None and named is None:
            yield context.fail(
                "speculators_model_type is null, by which the packaging's readers choose the class",
                where="config.json: speculators_model_type",
                got=None,
                due=draft.spec.family,
                fix=f"state {draft.spec.family}",
            )
        elif algorithm is not None and algorithm != named:
            yield context.fail(
                "speculators_config.algorithm and speculators_model_type name different families",
                where="config.json: speculators_config.algorithm",
                got=algorithm,
                due=named,
                fix="state in both what the weights are",
            )


def _declared(layers: int) -> str:
    return f"{layers} {'layer is' if layers == 1 else 'layers are'} declared"


def _is_eagle3_as_eagle(found: Recognition) -> bool:
    """Whether the label says EAGLE-1 or 2, and the tensors EAGLE-3."""
    said = {kind: {signal.family for signal in found.signals if signal.kind == kind} for kind in ("label", "tensors")}
    return said == {"label": {"eagle1"}, "tensors": {"eagle3"}}


@check(
    "config.types",
    title="every value that is read is there where its family cannot do without it, and has the type its readers expect",
    why="A string where a number is due is read as absent by one engine and stops another; for an absent one a class default steps in.",
    anywhere=True,
    faults=("activation",),
    example={"rms_norm_eps": "small"},
    fix="state a value of the type that the finding names",
)
def types(context: Context) -> Iterator[Finding]:
    """Values of the wrong type or beyond what any draft has, and options of the family that are not stated or cannot be."""
    if (unread := context.draft.unread_config) is not None:
        raise Inconclusive(f"the configuration cannot be read: {unread}")
    draft = context.draft
    faults = list(draft.config_faults)
    read_wrong = {(fault.key or "").rpartition(".")[2] for fault in faults}
    if draft.family is not None and draft.spec is not None:
        # A value of the wrong type is read as absent; one finding is enough.
        faults += [
            fault for fault in draft.family.faults(draft.spec) if (fault.key or "").rpartition(".")[2] not in read_wrong
        ]
    for fault in faults:
        key, got = (fault.key, fault.got) if fault.got is not None else _stated(context, fault.key)
        yield context.fail(fault.message, where=f"config.json: {key}", got=got, due=fault.due)
    yield from impossible_values(context, {(fault.key or "").rpartition(".")[2] for fault in faults})


def _stated(context: Context, key: str | None) -> tuple[str | None, object]:
    """The place in the file that states an option of the family, and its value; the key as it is where none does."""
    layer = open_view(context.draft.checkpoint).layer
    for place in (f"dflash_config.{key}", layer.path(key or ""), key or ""):
        if (value := engines.at(context.draft.checkpoint.config, place)) is not None:
            return place, value
    return key, None


@check(
    "config.architectures",
    title="architectures is a list of strings that engines know, and model_type one that configuration classes go by",
    why="Engines choose the class by the first entry; a label that one has a class for is refused by another.",
    faults=("architecture-plain-llama", "architecture-unknown", "model-type-unknown"),
    example={"architectures": ["LlamaForCausalLM"]},
    fix="state a label that every engine in use has a class for; the weights need not change",
)
def architectures(context: Context) -> Iterator[Finding]:
    """`model_type`, the list's form, and a label under which an engine does not serve such a draft."""
    yield from _model_type(context)
    stated = context.draft.checkpoint.config.get("architectures")
    where = "config.json: architectures"
    if stated is None:
        yield context.warn(
            "architectures is absent, so an engine has nothing to choose a class by",
            where=where,
            got=None,
            due="a list with the draft's class",
        )
        return
    if not isinstance(stated, list) or not stated or not all(isinstance(item, str) and item for item in stated):
        yield context.fail(
            "architectures is not a list of class names", where=where, got=stated, due="a list of strings"
        )
        return
    if context.spec.packaging != "plain":
        return
    labels = {name: known for name, known in context.labels().items() if known is not None}
    if not any(stated[0] not in known for known in labels.values()):
        return
    named = any(signal.kind == "label" for signal in context.draft.recognition.signals)
    fault = "architecture-unknown" if named else "architecture-plain-llama"
    outcomes = engines.outcomes(fault, context.spec, context.engines)
    for name in context.engines:
        if name not in labels:
            outcomes[name] = Outcome(outcome="unknown")
        elif stated[0] in labels[name]:
            outcomes[name] = (
                outcomes[name] if outcomes[name].outcome == "fine" else engines.fine("has a class for the label")
            )
    common = [label for label in next(iter(labels.values())) if all(label in known for known in labels.values())]
    due = common or sorted({label for known in labels.values() for label in known})
    yield context.warn(
        f"not every engine serves {context.spec.family} drafts under the label {stated[0]}"
        if named
        else f"the label {stated[0]} is that of a plain model; only the rest of the file says {context.spec.family}",
        where=where,
        got=stated,
        due=due[:4],
        fix=f'set architectures to ["{due[0]}"]' if common else "choose the label by the engine in use",
        fault=fault,
        outcomes=outcomes,
    )


def _model_type(context: Context) -> Iterator[Finding]:
    """A plain draft of stock layers is read through the configuration class of its model type, unless it brings code of its own."""
    config = context.draft.checkpoint.config
    stated = config.get("model_type")
    if context.spec.packaging != "plain" or context.spec.family not in STOCK or config.get("auto_map"):
        return
    if isinstance(stated, str) and stated in MODEL_TYPES:
        return
    yield context.warn(
        "model_type is absent, so AutoConfig cannot tell the class that reads this file"
        if stated is None
        else "model_type is none for which AutoConfig is known to have a class",
        where="config.json: model_type",
        got=stated,
        due=["llama", "qwen3"],
        fix="state the model type of the draft's own layers",
        fault="model-type-unknown",
    )


@check(
    "config.num-hidden-layers",
    title="num_hidden_layers is the number of layers in the file, and one where an engine takes one",
    why="Layers that the file lacks stay uninitialised, and layers that the configuration does not count are dropped.",
    needs=("config", "headers"),
    faults=("layer-count",),
    example={"family": "dflash", "num_hidden_layers": 3},
    fix="state the number of layers that the file holds; a number copied from the target is the usual cause",
)
def num_hidden_layers(context: Context) -> Iterator[Finding]:
    """Stated against stored layers, and against the number that each engine takes."""
    spec = context.spec
    where = f"config.json: {spec.layer_key}"
    stated = spec.num_hidden_layers
    held = sorted(_stored_layers(context))
    if stated is None:
        raise Inconclusive(f"{spec.layer_key} is not stated")
    if stated == 0:
        yield context.fail(
            "a draft has at least one layer", where=where, got=0, due=max(1, len(held)), fault="layer-count"
        )
    elif held and held != list(range(stated)) and held != _layers_with_tensors(context):
        yield context.fail(
            f"{_declared(stated)}, the weights hold {len(held)}: {_ranges(context, held)}",
            where=where,
            got=stated,
            due=len(held)
            if held == list(range(len(held)))
            else f"layers numbered from {context.draft.stored_layer(0)}, not {_ranges(context, held)}",
            fix="state the number of layers that the file holds",
            fault="layer-count",
        )
    elif bounds := {
        name: reading.value
        for name, reading in context.readings("layers").items()
        if reading is not None and isinstance(reading.value, int) and stated > reading.value
    }:
        yield context.fail(
            f"{_declared(stated)}, and not every engine takes more than {min(bounds.values())}",
            where=where,
            got=stated,
            due=min(bounds.values()),
            fault="layer-count",
            outcomes=_taken(context, bounds),
        )
    elif (most := _most_layers(context)) is not None and stated > most:
        yield context.fail(
            f"{_declared(stated)}; the most that {spec.family} drafts have is {most}",
            where=where,
            got=stated,
            due=most,
            fault="layer-count",
        )
    elif spec.family == "eagle3" and stated > 1:
        yield context.warn(
            f"{stated} layers; trainers of EAGLE3 build one, and engines differ in the norms of layers from 1 on",
            where=where,
            got=stated,
            due=1,
            fix="state 1 where the file holds one layer; a number copied from the target is the usual cause",
        )


@check(
    "config.head-arithmetic",
    title="heads divide, head_dim is stated or derivable, the projections' rows agree",
    why="A head width derived from the wrong numbers loads without an error where the product happens to fit.",
    needs=("config", "headers"),
    faults=("tensor-shape",),
    example={"num_key_value_heads": 3},
    fix="state heads, KV heads and head_dim as the rows of the projections have them",
)
def head_arithmetic(context: Context) -> Iterator[Finding]:
    """Counts and widths of the first layer's heads, and rows of q against columns of o, k against v."""
    spec = context.spec
    require_layers(context)
    attention = spec.layers[0].attention
    if attention is None:
        raise Skip("this draft's heads have no attention")
    if attention.num_heads is None:
        raise Inconclusive("num_attention_heads is not stated")
    if attention.num_heads < 1:
        yield context.fail(
            "no attention heads",
            where=f"config.json: {layer_key(context, 'num_attention_heads')}",
            got=attention.num_heads,
            due=_heads_held(context, attention) or "the number of query heads that q_proj holds",
        )
        return
    if isinstance(attention, GQASpec):
        yield from _gqa_arithmetic(context, attention)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}.self_attn"
        rows = {name: _extent(context, f"{prefix}.{name}_proj.weight", 0) for name in ("q", "k", "v")}
        columns = _extent(context, f"{prefix}.o_proj.weight", 1)
        due = None if columns is None else columns * (2 if getattr(attention, "q_gate", False) else 1)
        if getattr(attention, "v_head_dim", None) not in (None, getattr(attention, "head_dim", None)):
            continue
        if isinstance(attention, GQASpec) and None not in (rows["q"], due) and rows["q"] != due:
            yield context.fail(
                "q_proj's rows are not o_proj's columns" + (", twice" if attention.q_gate else ""),
                where=context.draft.stored_name(f"{prefix}.q_proj.weight"),
                got=rows["q"],
                due=due,
                fault="tensor-shape",
            )
        if None not in (rows["k"], rows["v"]) and rows["k"] != rows["v"]:
            yield context.fail(
                "k_proj and v_proj have different numbers of rows",
                where=context.draft.stored_name(f"{prefix}.v_proj.weight"),
                got=rows["v"],
                due=rows["k"],
                fault="tensor-shape",
            )


@check(
    "config.q-lora-rank",
    title="q_lora_rank is there and not null",
    why="A null stops the server; an absent key is filled with a class default of 1536 that need not be the draft's.",
    families=("eagle3-mla", "dspark"),
    faults=(
        "q-lora-rank-absent",
        "q-lora-rank-null",
    ),
    example={"family": "eagle3-mla", "q_lora_rank": None},
    fix="state the rank that q_a_proj's rows have",
)
def q_lora_rank(context: Context) -> Iterator[Finding]:
    """Null, absent and not positive are three findings."""
    _require_latent(context)
    needs = (
        "Eagle3 MLA layer requires q_lora_rank in the draft config"
        if context.spec.family == "eagle3-mla"
        else "a latent DSpark layer needs q_lora_rank"
    )
    section = _layer_config(context)
    where = f"config.json: {layer_key(context, 'q_lora_rank')}"
    fix = "state the rank that q_a_proj's rows have"
    rows = _extent(context, "layers.0.self_attn.q_a_proj.weight", 0) or "a positive number"
    if "q_lora_rank" not in section:
        yield context.fail(
            f"{needs}: the key is absent",
            where=where,
            got="absent",
            due=rows,
            fix=fix,
            fault="q-lora-rank-absent",
        )
    elif section["q_lora_rank"] is None:
        yield context.fail(
            f"{needs}: it is null",
            where=where,
            got=None,
            due=rows,
            fix=fix,
            fault="q-lora-rank-null",
        )
    elif context.spec.layers and getattr(context.spec.layers[0].attention, "q_lora_rank", None) in (0, None):
        yield context.fail(
            "q_lora_rank is not a positive number", where=where, got=section["q_lora_rank"], due=rows, fix=fix
        )


@check(
    "config.mla-fields",
    title="kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim are there and positive",
    why="A configuration class fills in DeepSeek-V3's numbers for what is absent.",
    families=("eagle3-mla", "dspark"),
    faults=("mla-field-missing",),
    example={"family": "eagle3-mla", "v_head_dim": ...},
    fix="state the widths of the latent attention that was trained",
)
def mla_fields(context: Context) -> Iterator[Finding]:
    """All missing fields in one finding."""
    _require_latent(context)
    attention = context.spec.layers[0].attention if context.spec.layers else None
    assert attention is None or isinstance(attention, MLASpec)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    wrong = {name: getattr(attention, name, None) for name in names if not getattr(attention, name, None)}
    if wrong:
        section = _layer_config(context)
        yield context.fail(
            f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} absent, null or zero",
            where=f"config.json: {layer_key(context, next(iter(wrong)))}",
            got={name: section.get(name, "absent") for name in wrong},
            due="positive numbers",
            fault="mla-field-missing",
        )


def _most_layers(context: Context) -> int | None:
    return None if context.draft.family is None else context.draft.family.most_layers


def _taken(context: Context, bounds: Mapping[str, int]) -> dict[str, Outcome]:
    """Per engine: what it does about more layers than it takes, where that is so; fine where it takes any number."""
    found = {}
    for name, reading in context.readings("layers").items():
        if name in bounds:
            refused = (
                engines.stops(reading.refused, reading.source) if reading is not None and reading.refused else None
            )
            found[name] = refused or engines.ENGINES[name].outcome("layer-count", context.spec)
        else:
            found[name] = Outcome(outcome="unknown") if reading is None else engines.fine("takes any number of layers")
    return found


def _require_latent(context: Context) -> None:
    layers = context.spec.layers
    if layers and not isinstance(layers[0].attention, MLASpec):
        raise Skip("no layer of this draft has latent attention")


def _heads_held(context: Context, attention: GQASpec | MLASpec) -> int | None:
    """Query heads that the rows of q_proj make, or None where rows or width are not known or do not fit."""
    rows = _extent(context, "layers.0.self_attn.q_proj.weight", 0)
    width: int | None = getattr(attention, "head_dim", None)
    if not rows or not width or rows % width:
        return None
    return rows // width


def _gqa_arithmetic(context: Context, attention: GQASpec) -> Iterator[Finding]:
    heads, kv_heads, hidden = attention.num_heads, attention.num_kv_heads, context.spec.hidden_size
    assert heads is not None
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        yield context.fail(
            f"{heads} query heads do not divide among {kv_heads} KV heads",
            where=f"config.json: {layer_key(context, 'num_key_value_heads')}",
            got=kv_heads,
            due=f"a divisor of {heads}",
        )
    stated = _layer_config(context).get("head_dim")
    if attention.head_dim is None and hidden is not None:
        yield context.fail(
            f"head_dim is not stated and hidden_size {hidden} does not divide by {heads} heads",
            where=f"config.json: {layer_key(context, 'head_dim')}",
            got=None,
            due="the width of a head",
            fix="state head_dim",
        )
    elif attention.head_dim == 0:
        yield context.fail(
            "head_dim is zero", where=f"config.json: {layer_key(context, 'head_dim')}", got=0, due="a positive number"
        )
    elif stated is not None and hidden is not None and hidden % heads and heads * int(attention.head_dim or 0) < hidden:
        yield context.warn(
            f"{heads} heads do not divide hidden_size {hidden}, and {heads} x {attention.head_dim} is less than it: "
            "the head counts look copied from a model of another size",
            where=f"config.json: {layer_key(context, 'num_attention_heads')}",
            got=heads,
            due=f"a number that divides {hidden}, as a rule",
            fix="compare heads, KV heads and intermediate_size with the weights",
        )


def _layer_config(context: Context) -> Mapping[str, object]:
    """The section that holds the transformer's own keys."""
    return open_view(context.draft.checkpoint).layer.values


def _extent(context: Context, name: str, axis: int) -> int | None:
    """An extent of a matrix, where it is stored in a form that tells it."""
    shape = context.draft.shape(name)
    return None if shape is None or axis >= len(shape) else shape[axis]


def _layers_with_tensors(context: Context) -> list[int] | None:
    """Layers that need tensors of their own, where the draft builds as many as it states; tied stages need none."""
    spec, binding = context.spec, context.draft.binding
    if binding is None or len(spec.layers) != spec.num_hidden_layers:
        return None
    needed = (tensor.layer for tensor in binding.expected.values() if tensor.need == "required")
    return sorted({layer for layer in needed if layer is not None})


def _stored_layers(context: Context) -> set[int]:
    binding, family = context.draft.binding, context.draft.family
    if binding is None or family is None:
        return set()
    return {index for name in binding.stored if (index := family.layer_index(name)) is not None}


def _ranges(context: Context, layers: list[int]) -> str:
    """The layers by the numbers that they go by in the file."""
    numbers = [context.draft.stored_layer(layer) for layer in layers]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
