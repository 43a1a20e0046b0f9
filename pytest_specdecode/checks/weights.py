"""Is every tensor there, of the right shape, and does it hold what a trained tensor holds?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from pytest_specdecode.checks.keys import layer_key
from pytest_specdecode.checks.registry import Context, check, is_quantised
from pytest_specdecode.checks.scan import TensorStats, scan
from pytest_specdecode.families import Binding, ExpectedTensor
from pytest_specdecode.families.quantised import PLAIN_FLOATS, Storage, StoredForm
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import Extent

#: Buffers that every reader drops and that hold nothing a draft needs.
_HARMLESS = re.compile(r"(^|\.)(rotary_emb\.\w+|inv_freq|cos_cached|sin_cached|position_ids)$")


@check(
    "weights.missing",
    title="every tensor that the configuration calls for is in the file",
    why="Engines do not notice a missing tensor: the parameter keeps what memory held.",
    needs=("headers",),
    faults=(
        "tensor-missing",
        "bias-missing",
        "confidence-missing",
        "embedding-missing",
        "fc-missing",
        "lm-head-missing",
        "markov-missing",
        "mask-hidden-missing",
    ),
)
def missing(context: Context) -> Iterator[Finding]:
    """Required tensors that no check of their own answers for, one finding per kind of outcome."""
    binding = _binding(context)
    draft = context.draft
    by_fault: dict[str, list[ExpectedTensor]] = {}
    for tensor in binding.missing:
        if tensor.check == "weights.missing" and tensor.name != "embed_tokens.weight":
            by_fault.setdefault(tensor.fault, []).append(tensor)
    for fault, tensors in by_fault.items():
        shown = {draft.stored_name(tensor.name): list(tensor.shape) for tensor in tensors[:12]}
        first = next(iter(shown))
        beside = [binding.stored[name] for tensor in tensors for name in binding.storage.orphans.get(tensor.name, ())]
        # Inside a target a layer's number says less than a name.
        embedded = context.spec.packaging == "embedded"
        layers = sorted({draft.stored_layer(tensor.layer) for tensor in tensors if tensor.layer is not None})
        yield context.fail(
            f"{first} is not in the weights"
            if len(tensors) == 1
            else f"{len(tensors)} tensors are not in the weights, first {first}",
            where=f"layers {', '.join(map(str, layers))}" if layers and not embedded else first,
            got="absent" if not beside else f"absent; stored beside it: {', '.join(beside[:6])}",
            due=shown,
            fix="export the whole draft; if the tensor goes by another name, rename it",
            fault=fault,
        )
    reported = {tensor.name for tensor in binding.missing}
    halved = {
        binding.stored[weight]: lacking
        for weight, form in binding.storage.forms.items()
        if (lacking := [context.draft.stored_name(name) for name in form.lacking if name not in reported])
    }
    if halved:
        first = next(iter(halved))
        yield context.fail(
            f"{halved[first][0]} is not in the weights, and {first} is packed so that nothing can be read without it"
            + (f"; {len(halved) - 1} more weights lack such" if len(halved) > 1 else ""),
            where=halved[first][0],
            got="absent",
            due=[name for names in halved.values() for name in names][:12],
            fix="export what the quantiser made in whole",
            fault="tensor-missing",
        )


@check(
    "weights.unexpected",
    title="no tensor is in the file that engines drop in silence",
    why="A tensor that nothing reads is a trained part of the draft that is not served.",
    needs=("headers",),
    faults=("tensor-unexpected",),
)
def unexpected(context: Context) -> Iterator[Finding]:
    """Tensors no expected name accounts for; leftovers of training are a warning."""
    binding = _binding(context)
    strange = [name for name in binding.unexpected if not _HARMLESS.search(name)]
    leftovers = [name for name in strange if name.startswith("verifier_")]
    foreign = [name for name in strange if name not in leftovers]
    barred = [
        tensor
        for tensor in binding.expected.values()
        if tensor.need == "never" and tensor.check != "weights.biases" and tensor.name in binding.stored
    ]
    if barred:
        yield context.fail(
            f"{binding.stored[barred[0].name]} has no place in this draft: {barred[0].reason}"
            + (f"; {len(barred) - 1} more have none" if len(barred) > 1 else ""),
            where=binding.stored[barred[0].name],
            got=[binding.stored[tensor.name] for tensor in barred],
            due="absent",
            fix="correct the configuration, or leave the tensor out",
            fault="tensor-unexpected",
        )
    if foreign:
        yield context.fail(
            f"{foreign[0]} is no tensor of this draft"
            if len(foreign) == 1
            else f"{len(foreign)} tensors are not this draft's, first {foreign[0]}",
            where=foreign[0],
            got=sorted(foreign)[:12],
            due="only tensors that the configuration calls for",
            fix="set the flag that the tensor belongs to, or leave the tensor out",
            fault="tensor-unexpected",
        )
    apart = [tensor for tensor in binding.expected.values() if _differs(context, tensor)]
    if apart:
        first, other = binding.stored[apart[0].name], binding.stored[apart[0].same_as or ""]
        yield context.fail(
            f"{first} and {other} are one tensor by the configuration, and the file holds two different ones"
            + (f"; {len(apart) - 1} more are stored so" if len(apart) > 1 else ""),
            where=first,
            got=[binding.stored[tensor.name] for tensor in apart],
            due="absent, or a copy",
            fix="clear the flag that ties them, or export the tensor that is served",
            fault="tensor-unexpected",
        )
    for name, canonical in binding.twice:
        yield context.fail(
            f"{name} and {binding.stored[canonical]} stand for the same tensor",
            where=name,
            got=[binding.stored[canonical], name],
            due="one of them",
            fault="tensor-unexpected",
        )
    if leftovers:
        yield context.warn(
            "tensors of the verifier lie in the draft and are read by no engine",
            where=leftovers[0],
            got=leftovers,
            fix="drop them on export",
        )


@check(
    "weights.shapes",
    title="every shape is what the configuration says",
    why="A shape that differs stops one engine and is cut or padded by another.",
    needs=("headers",),
    faults=("tensor-shape",),
)
def shapes(context: Context) -> Iterator[Finding]:
    """All wrong shapes in one finding; the vocabulary's tensors and fc's width have checks of their own.

    A packed weight is compared by the plain matrix that it stands for, in the extents that its form keeps.
    """
    binding = _binding(context)
    wrong: dict[str, tuple[tuple[Extent, ...], tuple[Extent, ...]]] = {}
    for name, tensor in binding.expected.items():
        header = context.draft.header(name)
        if header is None or tensor.check.startswith("vocabulary.") or name == "embed_tokens.weight":
            continue
        # The width of an fc over taps is taps.fc-width's to judge.
        due = (tensor.shape[0], None) if name == "fc.weight" and context.spec.taps.required else tensor.shape
        # Where a family's own sheet states the packed shape, that is what the header is held against.
        shape = header.shape if tensor.kind == "int" else context.draft.shape(name)
        if tensor.need != "never" and shape is not None and not _fits(shape, due):
            wrong[header.name] = (shape, due)
    if wrong:
        first = next(iter(wrong))
        got, due = wrong[first]
        yield context.fail(
            f"{first} is {_shape(got)}, {_shape(due)} was due" + (f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            where=", ".join(list(wrong)[:6]) + (", …" if len(wrong) > 6 else ""),
            got={name: list(pair[0]) for name, pair in list(wrong.items())[:12]},
            due={name: list(pair[1]) for name, pair in list(wrong.items())[:12]},
            fix="correct the sizes in config.json, or export the tensors of this draft",
            fault="tensor-shape",
        )


@check(
    "weights.biases",
    title="bias tensors are there exactly where a flag says",
    why="A bias that the configuration does not announce is dropped; one that it announces and the file lacks is not zero.",
    needs=("config", "headers"),
    faults=(
        "bias-dropped",
        "bias-missing",
    ),
)
def biases(context: Context) -> Iterator[Finding]:
    """Biases against their flags, and a flag that an engine does not read."""
    binding = _binding(context)
    owned = [tensor for tensor in binding.expected.values() if tensor.check == "weights.biases"]
    extra = [
        binding.stored[tensor.name] for tensor in owned if tensor.need == "never" and tensor.name in binding.stored
    ]
    absent = [tensor.name for tensor in owned if tensor.need == "required" and tensor.name not in binding.stored]
    lacking = [context.draft.stored_name(name) for name in absent[:12]]
    if extra:
        yield context.fail(
            f"{len(extra)} bias{'' if len(extra) == 1 else 'es'} without a flag, first {extra[0]}",
            where=extra[0],
            got=extra[:12],
            due="no bias, or the flag that announces it (attention_bias; bias for fc)",
            fix="set the flag, or fold the bias away before export",
            fault="bias-dropped",
        )
    if lacking and context.draft.checkpoint.has_weights:
        yield context.fail(
            f"{len(absent)} announced bias{' is' if len(absent) == 1 else 'es are'} not in the weights, "
            f"first {lacking[0]}",
            where=lacking[0],
            got="absent",
            due=lacking,
            fix="clear the flag, or export the biases",
            fault="bias-missing",
        )
    if context.spec.family == "eagle3-mla" and context.draft.checkpoint.config.get("attention_bias"):
        yield context.warn(
            "attention_bias is true; a latent EAGLE3 layer has no biases in any engine",
            where=f"config.json: {layer_key(context, 'attention_bias')}",
            got=True,
            due=False,
            fault="bias-dropped",
        )
    if context.spec.family == "eagle3" and any(
        getattr(layer.attention, "qkv_bias", False) for layer in context.spec.layers
    ):
        yield context.warn(
            "attention_bias is true; SGLang's EAGLE3 layer has no q, k and v bias and drops theirs",
            where=f"config.json: {layer_key(context, 'attention_bias')}",
            got=True,
            due=False,
            fault="bias-dropped",
        )


@check(
    "weights.names",
    title="tensors go by names that every loader of the family follows",
    why="SGLang's latent EAGLE3 loader holds both down projections back until their names fit, and drops them in silence.",
    needs=("headers",),
    families=("eagle3", "eagle3-mla"),
    faults=(
        "name-prefixed",
        "name-joined",
        "tensor-unexpected",
    ),
)
def names(context: Context) -> Iterator[Finding]:
    """A `model.` prefix, down projections stored joined, legacy names of the tap norms."""
    stored = [name for name, header in context.draft.checkpoint.tensors.items() if header.is_float]
    latent = context.spec.family == "eagle3-mla"
    prefixed = [name for name in stored if name.startswith("model.")]
    joined = [name for name in stored if "fused_qkv_a_proj_with_mqa" in name]
    legacy = [name for name in stored if name.startswith(("aux_norm_low", "aux_norm_mid", "aux_norm_high"))]
    if latent and prefixed:
        yield context.fail(
            f"{len(prefixed)} names start with `model.`, which SGLang's latent EAGLE3 loader puts in front itself",
            where=prefixed[0],
            got=sorted(prefixed)[:12],
            due=[name.removeprefix("model.") for name in sorted(prefixed)[:12]],
            fix="export without the prefix",
            fault="name-prefixed",
        )
    if latent and joined:
        yield context.fail(
            "the down projections are stored joined, and SGLang waits for them one by one",
            where=joined[0],
            got=joined,
            due=["q_a_proj.weight", "kv_a_proj_with_mqa.weight"],
            fix="store q_a_proj (first q_lora_rank rows) and kv_a_proj_with_mqa (the rest) apart",
            fault="name-joined",
        )
    if latent and legacy:
        yield context.warn(
            "the tap norms go by their legacy names, which SGLang's latent EAGLE3 loader skips",
            where=legacy[0],
            got=legacy,
            due=["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"],
            fault="tensor-unexpected",
        )


@check(
    "weights.dtypes",
    title="floating-point tensors have one plain dtype",
    why="Mixed dtypes are promoted in a stack, doubling its memory; narrow ones without a scale are not numbers.",
    needs=("headers",),
)
def dtypes(context: Context) -> Iterator[Finding]:
    """The float dtypes in use, and tensors whose kind is wrong."""
    binding = _binding(context)
    found: dict[str, list[str]] = {}
    wrong: list[str] = []
    floats: list[str] = []
    for name, tensor in binding.expected.items():
        header = context.draft.header(name)
        if (
            header is not None
            and tensor.kind == "int"
            and header.is_float
            and not tensor.check.startswith("vocabulary.")
        ):
            floats.append(header.name)
        if header is None or tensor.kind != "float" or tensor.dtype == header.dtype:
            continue
        form = binding.storage.forms.get(name)
        if form is not None and form.kind != "plain":
            continue
        if header.is_float:
            found.setdefault(header.dtype, []).append(header.name)
        else:
            wrong.append(header.name)
    yield from _quantised_dtypes(context, binding.storage)
    quantised = is_quantised(context)
    if wrong and not quantised:
        yield context.fail(
            f"{wrong[0]} is stored as integers",
            where=wrong[0],
            got={name: context.draft.checkpoint.tensors[name].dtype for name in wrong[:12]},
            due="a floating-point dtype",
        )
    plain = {dtype: names for dtype, names in found.items() if dtype in PLAIN_FLOATS or not quantised}
    if floats:
        yield context.fail(
            f"{floats[0]} holds token ids or packed weights and is stored as floats",
            where=floats[0],
            got={name: context.draft.checkpoint.tensors[name].dtype for name in floats[:12]},
            due="an integer dtype",
        )
    if len(plain) > 1:
        found = plain
        rare = min(found, key=lambda dtype: len(found[dtype]))
        yield context.warn(
            f"floating-point tensors have {len(found)} dtypes: {', '.join(sorted(found))}",
            where=found[rare][0],
            got={dtype: len(names) for dtype, names in found.items()},
            due="one dtype",
            fix="convert on export",
        )
    narrow = [dtype for dtype in found if dtype not in PLAIN_FLOATS]
    if narrow and not quantised:
        yield context.warn(
            f"{narrow[0]} weights without a quantization_config that says how to read them",
            where=found[narrow[0]][0],
            got=narrow,
            due="bfloat16 or float16",
        )


@check(
    "weights.finite",
    title="no NaN and no infinity in any tensor that is read",
    why="One NaN spreads through every head that reads it; libraries initialise what they did not copy with NaN.",
    needs=("headers", "tensors"),
    faults=("nan",),
)
def finite(context: Context) -> Iterator[Finding]:
    """All tensors with non-finite values in one finding."""
    bad = {stats.header.name: stats.nonfinite for stats in scan(context.draft).values() if stats.nonfinite}
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
)
def degenerate(context: Context) -> Iterator[Finding]:
    """Constant matrices, norms that are all zero, norms all one beside fresh matrices, heads that look random."""
    stats = scan(context.draft)
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


def _binding(context: Context) -> Binding:
    binding = context.draft.binding
    assert binding is not None, "the registry runs these checks only where the family is known"
    return binding


def _differs(context: Context, tensor: ExpectedTensor) -> bool:
    """Whether `tensor` is stored and is not the tensor that it is tied to."""
    draft = context.draft
    if tensor.same_as is None:
        return False
    own, other = draft.header(tensor.name), draft.header(tensor.same_as)
    if own is None or other is None:
        return False
    if own.shape != other.shape:
        return True
    import torch

    return not torch.equal(draft.tensor(tensor.name), draft.tensor(tensor.same_as).to(draft.tensor(tensor.name).dtype))


def _quantised_dtypes(context: Context, storage: Storage) -> Iterator[Finding]:
    """Weights that are no numbers by themselves: without the factors that make them so, or without a word on how they are stored."""
    binding = _binding(context)
    headers = {name: context.draft.checkpoint.tensors[binding.stored[name]] for name in storage.forms}
    absent = {tensor.name for tensor in binding.missing}

    def known(name: str, form: StoredForm) -> bool:
        """Whether the family's own sheet calls for the form, or another check answers for the scales that are absent beside it."""
        tensor = binding.expected[name]
        if form.kind == "scaled" and tensor.kind == "int":
            return True
        return tensor.dtype == headers[name].dtype or f"{name.removesuffix('weight')}scale" in absent

    odd = {
        headers[name].name: (form, headers[name])
        for name, form in storage.forms.items()
        if form.kind != "plain" and not known(name, form)
    }
    bare = {name: header for name, (form, header) in odd.items() if form.kind == "unscaled"}
    if bare:
        first, header = next(iter(bare.items()))
        yield context.fail(
            f"{first} is stored as {header.dtype if header.is_float else 'integers'} without a scale"
            + (f"; {len(bare) - 1} more weights are" if len(bare) > 1 else ""),
            where=first,
            got={name: header.dtype for name, header in list(bare.items())[:12]},
            due=f"{first}_scale or {first}_scale_inv beside it, or bfloat16 or float16",
            fix="export the scales with the weights; without its scale a narrow weight is off by that factor",
        )
    told = {name: header.dtype for name, (_, header) in odd.items() if name not in bare}
    if told and storage.scheme.method is None:
        first = next(iter(told))
        yield context.fail(
            f"{first} is stored quantised and config.json has no quantization_config"
            + (f"; {len(told) - 1} more weights are" if len(told) > 1 else ""),
            where=first,
            got=dict(list(told.items())[:12]),
            due="a quantization_config that says how to read them",
            fix="copy the quantiser's section into config.json",
        )


def _fits(got: tuple[Extent, ...], due: tuple[Extent, ...]) -> bool:
    return len(got) == len(due) and all(
        None in (have, want) or want == have for have, want in zip(got, due, strict=True)
    )


def _shape(shape: tuple[Extent, ...]) -> str:
    return f"[{', '.join('?' if extent is None else str(extent) for extent in shape)}]"


def _is_norm(name: str) -> bool:
    return "norm" in name.removesuffix(".weight").rpartition(".")[2]


def _constant(stats: TensorStats) -> str:
    return "all zero" if stats.minimum == 0 else f"{stats.minimum:g} everywhere"
