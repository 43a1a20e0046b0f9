"""Is every tensor there, under its name, of the right shape and in a dtype that is read?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_specdecode.checks.registry import Context, check, is_quantised
from pytest_specdecode.checks.scan import is_cache_scale
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
    example="a draft that is stored without layers.0.hidden_norm.weight",
    fix="export the whole draft; a tensor that goes by another name is to be renamed",
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
    example="a draft that holds a norm which its configuration does not call for",
    fix="set the flag that the tensor belongs to, or leave the tensor out",
)
def unexpected(context: Context) -> Iterator[Finding]:
    """Tensors no expected name accounts for; leftovers of training are a warning."""
    binding = _binding(context)
    strange = [name for name in binding.unexpected if not _HARMLESS.search(name) and not is_cache_scale(name)]
    leftovers = [name for name in strange if name.startswith("verifier_")]
    foreign = [name for name in strange if name not in leftovers]
    barred = [
        tensor
        for tensor in binding.expected.values()
        if tensor.need == "never" and tensor.check == "weights.missing" and tensor.name in binding.stored
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
    example={"intermediate_size": 96},
    fix="correct the sizes in config.json, or export the tensors of this draft",
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
    "weights.names",
    title="tensors go by names that every loader of the family follows",
    why="A loader that waits for another name drops the tensor, and most say nothing: the parameter keeps what memory held.",
    needs=("headers",),
    families=("eagle3", "eagle3-mla"),
    faults=("name-prefixed", "name-joined", "name-legacy-norm"),
    example="a latent EAGLE3 draft whose names start with `model.`",
    fix="export under the names that the message gives",
)
def names(context: Context) -> Iterator[Finding]:
    """Names that some engine's loader does not follow, each fault once; most loaders read others for a family, too."""
    stored = sorted(name for name, header in context.draft.checkpoint.tensors.items() if header.is_float)
    for rule in context.misnames():
        found = [name for name in stored if re.search(rule.pattern, name)]
        if not found:
            continue
        due = [re.sub(rule.pattern, rule.due, name) for name in found[:12]] if isinstance(rule.due, str) else rule.due
        yield context.fail(
            rule.message if len(found) == 1 else f"{len(found)} tensors: {rule.message}",
            severity=rule.severity,
            where=found[0],
            got=found[:12],
            due=list(due),
            fix=rule.fix,
            fault=rule.fault,
        )


@check(
    "weights.dtypes",
    title="floating-point tensors have one plain dtype",
    why="Mixed dtypes are promoted in a stack, doubling its memory; narrow ones without a scale are not numbers.",
    needs=("headers",),
    example="a float32 norm among bfloat16 tensors",
    fix="convert on export; store the scales of what is quantised",
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
    return not draft.checkpoint.same(own.name, other.name)


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
