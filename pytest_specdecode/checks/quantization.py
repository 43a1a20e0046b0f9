"""Are the weights stored as the configuration says: in which dtype, and quantised exactly where it says so?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pytest_specdecode import engines
from pytest_specdecode.checkpoint import read_json_object
from pytest_specdecode.checks.registry import Context, check
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.families.base import open_view
from pytest_specdecode.families.quantised import PLAIN_FLOATS, StoredForm
from pytest_specdecode.findings import Finding

#: Methods that quantise every projection of a layer that their list does not leave out.
_WHOLE = ("compressed-tensors", "fp8", "modelopt", "gptq", "awq", "quark")

#: Keys of the lists that leave modules out.
_LISTS = (
    *("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "exclude_layers"),
    "llm_int8_skip_modules",
)

#: The projections of a layer. Routers, norms and combining projections stay plain in every exporter's files, and in some the joined
#: latent projection, whose rows do not divide into blocks.
_PROJECTION = re.compile(r"(?:^|\.)(?:self_attn|attn|mlp|experts?(?:\.\d{1,5})?|shared_experts?)\.\w+_proj\.weight$")
#: What a loader joins into one module, which a list may name.
_JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
}
#: Longer or more involved patterns are not tried: a file could make them run for ever.
_LONGEST_PATTERN, _MOST_REPEATS = 200, 4

#: The layer number that a loader of prediction layers was written for.
_USUAL_LAYER = 61

#: What torch calls its floating-point dtypes beside the plain ones, and what means the stored one.
_DTYPES = (
    "auto",
    "half",
    "float",
    "double",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
_HALF = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


#: By the names of `quant_method`, in small letters with hyphens.
_METHODS = frozenset(
    (
        *("aqlm", "auto-round", "awq", "awq-marlin", "bitblas", "bitsandbytes", "blockwise-int8", "compressed-tensors"),
        *(
            "cpu-awq",
            "deepspeedfp",
            "eetq",
            "experts-int8",
            "fbgemm-fp8",
            "fp-quant",
            "fp8",
            "gguf",
            "gptq",
            "gptq-bitblas",
        ),
        *("gptq-marlin", "gptq-marlin-24", "hqq", "inc", "intel/auto-round", "ipex", "marlin", "mlx", "modelopt"),
        *(
            "modelopt-fp4",
            "modelopt-fp8",
            "modelopt-mixed",
            "modelopt-mxfp8",
            "modelslim",
            "moe-wna16",
            "mxfp4",
            "mxfp8",
        ),
        *("neuron-quant", "petit-nvfp4", "ptpc-fp8", "qoq", "quanto", "quark", "rtn", "tpu-int8", "torchao", "w4afp8"),
        *("w8a8-fp8", "w8a8-int8", "w4a8-fp8", "nvfp4", "nvfp4-awq"),
    )
)


@check(
    "config.quantization",
    title="weights are quantised exactly where quantization_config says so",
    why="A module is built quantised or plain by the configuration; the other kind of weight stops the loader or is not loaded at all.",
    needs=("config", "headers"),
    faults=("quantization-disagrees", "quantization-layer-index", "head-quantised", "packed-draft"),
    cost="accepted length 1.10 for packed weights that were not loaded, 1.85 once they were (sglang issue 39087)",
    example="a quantization_config of fp8 without an ignore list, over layers that are stored in bfloat16",
    fix="list what is stored plain (ignore, modules_to_not_convert, exclude_modules), under the layer numbers of the file",
)
def quantization(context: Context) -> Iterator[Finding]:
    """The stored form of each projection against the method and its list; then what loaders do with a right file."""
    yield from _misstated(context)
    binding = context.draft.binding
    if binding is None or binding.storage.scheme.method is None:
        # Weights that are quantised all the same are for weights.dtypes to report.
        return
    forms = {name: form for name, form in binding.storage.forms.items() if _PROJECTION.search(name)}
    if not forms:
        return
    method, stated = binding.storage.scheme.method, _stated(context)
    patterns = _exclusions(context, stated)
    stored = {name: binding.stored[name] for name in forms}
    plain = {name: stored[name] for name, form in forms.items() if form.kind == "plain"}
    packed = {name: stored[name] for name in forms if name not in plain}
    judged = {name: _is_excluded(_module(on_disk), patterns) for name, on_disk in stored.items()}
    nothing = all(form.kind == "plain" for form in binding.storage.forms.values())
    if nothing and not any(judged.values()) and method in (*_WHOLE, "mlx"):
        yield _plain_all(context, method, plain, patterns)
    elif method in _WHOLE and _covers_all(stated):
        yield from _plain_some(
            context, {name: on_disk for name, on_disk in plain.items() if judged[name] is False}, patterns
        )
    yield from _excluded(context, {name: on_disk for name, on_disk in packed.items() if judged[name]})
    yield from _wrong_dtypes(context, method, stated, {name: forms[name] for name in packed})
    yield from _loaders(context, packed, [name for name in plain if judged[name]])


@check(
    "config.dtype",
    title="the declared dtype is the stored one, and a bfloat16 draft is not run in float16",
    why="States of a draft pass 65504 in the fusion of its taps and behind its projections: in float16 they are infinite.",
    needs=("config", "headers"),
    faults=("dtype-overflow",),
    cost="0.06 of 15 drafts accepted for a bfloat16 draft run in float16 (InternLM/lmdeploy PR 4991)",
    example={"dtype": "float16"},
    fix="declare the dtype that is stored, and serve bfloat16 drafts in bfloat16",
)
def dtype(context: Context) -> Iterator[Finding]:
    """Names that torch has, declared against stored, then what the draft would be run in."""
    layer = open_view(context.draft.checkpoint).layer
    unknown = [
        (place, name)
        for place in dict.fromkeys(("dtype", "torch_dtype", layer.path("dtype"), layer.path("torch_dtype")))
        if isinstance(name := engines.at(context.draft.checkpoint.config, place), str)
        and name.removeprefix("torch.") not in (*_DTYPES, *PLAIN_FLOATS)
    ]
    for place, name in unknown:
        yield context.fail(
            f"torch has no dtype of the name that {place} states",
            where=f"config.json: {place}",
            got=name,
            due=_stored_dtype(context) or "bfloat16",
            fix="state the stored dtype by torch's name; configuration classes look it up and stop",
        )
    if unknown:
        return
    declared = _named(context.spec.dtype)
    stored = _stored_dtype(context)
    served = _named(context.serve["dtype"])
    where = f"config.json: {'dtype' if 'dtype' in context.draft.checkpoint.config else 'torch_dtype'}"
    if stored is not None and declared is not None and stored != declared:
        yield context.warn(
            f"weights are declared {declared} and stored as {stored}"
            + (": what passes 65504 overflows" if (stored, declared) == ("bfloat16", "float16") else ""),
            where=where,
            got=declared,
            due=stored,
            fix=f"declare {stored}",
            fault="dtype-overflow" if declared == "float16" else "",
            outcomes=context.read_as("dtype", stored),
        )
    elif declared is None and stored == "bfloat16" and served is None:
        outcomes = context.read_as("dtype", stored)
        if any(outcome.outcome in engines.UNFIT for outcome in outcomes.values()):
            yield context.warn(
                "weights are stored as bfloat16 and no dtype is declared; not every engine takes bfloat16 then",
                where=where,
                got="absent",
                due="bfloat16",
                fix="declare bfloat16",
                fault="dtype-overflow",
                outcomes=outcomes,
            )
    whole = stored or declared
    if served == "float16" and whole == "bfloat16":
        yield context.warn(
            "a bfloat16 draft is to be served in float16: what passes 65504 overflows",
            where="--draft-serve: dtype",
            got=context.serve["dtype"],
            due="bfloat16",
            fix="start with dtype=bfloat16",
            fault="dtype-overflow",
        )


def _named(dtype: str | None) -> str | None:
    """The dtype by torch's name; None for none and for `auto`."""
    if dtype is None or dtype == "auto":
        return None
    name = dtype.removeprefix("torch.").lower()
    return _HALF.get(name, name)


def _stored_dtype(context: Context) -> str | None:
    """The plain dtype of most floating-point tensors, scales and packed weights left out."""
    binding = context.draft.binding
    if binding is None:
        return None
    counted: dict[str, int] = {}
    for name, tensor in binding.expected.items():
        header = context.draft.header(name)
        if header is not None and tensor.kind == "float" and tensor.dtype is None and header.dtype in PLAIN_FLOATS:
            counted[header.dtype] = counted.get(header.dtype, 0) + header.numel
    return max(counted, key=lambda name: counted[name], default=None)


def _stated(context: Context) -> Mapping[str, Any]:
    """The configuration's own section on quantisation, else that of ModelOpt's file beside it; empty where there is none."""
    checkpoint = context.draft.checkpoint
    config = checkpoint.config
    for place in (config, *(config.get(key) for key in ("text_config", "transformer_layer_config", "model"))):
        if not isinstance(place, Mapping):
            continue
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(found := place.get(key), Mapping) and found:
                nested = found.get("quantization")
                # ModelOpt's file, taken into config.json as it is.
                return nested if isinstance(nested, Mapping) and "quant_method" not in found else found
    try:
        found = read_json_object(checkpoint.path / "hf_quant_config.json").get("quantization")
    except (CheckpointError, OSError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _misstated(context: Context) -> Iterator[Finding]:
    """A section that is no object, or whose method no engine is known to have."""
    config = context.draft.checkpoint.config
    layer = open_view(context.draft.checkpoint).layer
    for key in ("quantization_config", "compression_config"):
        for place in dict.fromkeys((key, layer.path(key))):
            value = engines.at(config, place)
            if value is not None and not isinstance(value, Mapping):
                yield context.fail(
                    f"{place} is a {type(value).__name__}, and readers look into an object",
                    where=f"config.json: {place}",
                    got=value,
                    due='an object, as {"quant_method": "fp8"}',
                    fix="write the section as the quantiser does, or leave it out where the weights are plain",
                )
    binding = context.draft.binding
    method = None if binding is None else binding.storage.scheme.method
    if method not in (None, "unnamed", *_METHODS):
        yield context.fail(
            "quant_method is none that an engine is known to have",
            where="config.json: quantization_config.quant_method",
            got=_stated(context).get("quant_method"),
            due="the method of the quantiser, such as compressed-tensors, fp8, modelopt, gptq or awq",
            fix="state the method that the weights were quantised by, or leave the section out where they are plain",
        )
    elif method == "unnamed":
        yield context.warn(
            "the section on quantisation names no method",
            where="config.json: quantization_config.quant_method",
            got=sorted(map(str, _stated(context)))[:6],
            due="quant_method",
            fix="state the method that the weights were quantised by, or leave the section out where they are plain",
        )


def _exclusions(context: Context, stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Names and patterns of the modules that the method leaves out."""
    found: list[str] = []
    for section in (stated, stated.get("quantization")):
        if isinstance(section, Mapping):
            for key in _LISTS:
                value = section.get(key)
                found += [item for item in value if isinstance(item, str) and item] if isinstance(value, list) else []
    return tuple(dict.fromkeys(found))


def _covers_all(stated: Mapping[str, Any]) -> bool:
    """Whether the method means all projections, and not only modules that it names."""
    if str(stated.get("quant_algo", "")).upper() == "MIXED_PRECISION" or isinstance(
        stated.get("quantized_layers"), Mapping
    ):
        return False
    if stated.get("dynamic") or stated.get("layer_quant_config") or stated.get("modules_in_block_to_quantize"):
        return False
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping):
        return True
    targets = [group.get("targets") for group in groups.values() if isinstance(group, Mapping)]
    return any(isinstance(names, list) and "Linear" in names for names in targets)


def _module(stored: str) -> str:
    """The module that holds the tensor stored under this name."""
    return re.sub(r"\.(?:weight|weight_packed|qweight|weight_blocks)$", "", stored)


def _is_excluded(module: str, patterns: tuple[str, ...]) -> bool | None:
    """Whether one of `patterns` means the module; None where one is too involved to be tried and no other does."""
    parent, _, last = module.rpartition(".")
    names = {module, f"{parent}.{_JOINED[last]}"} if last in _JOINED else {module}
    for prefix in ("model.", "language_model.", "model.language_model."):
        names |= {name.removeprefix(prefix) for name in names} | {f"{prefix}{name}" for name in names}
    found = [_means(pattern, names) for pattern in patterns]
    return True if True in found else None if None in found else False


def _means(pattern: str, names: set[str]) -> bool | None:
    if pattern.startswith("re:"):
        expression = pattern.removeprefix("re:")
        if not _is_simple(expression):
            return None
        try:
            compiled = re.compile(expression)
        except (re.error, OverflowError, RecursionError):
            return None
        return any(compiled.match(name) for name in names)
    if "*" in pattern or "?" in pattern:
        return any(fnmatchcase(name, pattern) for name in names) if len(pattern) <= _LONGEST_PATTERN else None
    return any(f".{pattern}." in f".{name}." for name in names)


def _is_simple(expression: str) -> bool:
    """Whether a regular expression is sure to end soon: short, few repeats, none of them of a group."""
    repeats = len(re.findall(r"[*+{]", expression))
    return (
        len(expression) <= _LONGEST_PATTERN
        and repeats <= _MOST_REPEATS
        and re.search(r"\)[*+?{]|\\\d", expression) is None
    )


def _plain_all(context: Context, method: str, plain: Mapping[str, str], patterns: tuple[str, ...]) -> Finding:
    first = next(iter(plain.values()))
    return context.fail(
        f"quantization_config says {method}, and every projection of the draft is stored plain",
        where=first,
        got=_dtypes(context, plain),
        due="quantised weights, or a list that leaves the draft out",
        fix="drop the section, or list the draft's modules" + _near(first, patterns),
        fault="quantization-disagrees",
    )


def _plain_some(context: Context, plain: Mapping[str, str], patterns: tuple[str, ...]) -> Iterator[Finding]:
    if not plain:
        return
    first = next(iter(plain.values()))
    yield context.fail(
        f"{first} is stored plain, and no list of quantization_config leaves it out"
        + (f"; {len(plain) - 1} more projections are so" if len(plain) > 1 else ""),
        where=first,
        got=_dtypes(context, plain),
        due=[_module(name) for name in list(plain.values())[:6]],
        fix="add the modules to the list" + _near(first, patterns),
        fault="quantization-disagrees",
    )


def _excluded(context: Context, packed: Mapping[str, str]) -> Iterator[Finding]:
    if not packed:
        return
    first = next(iter(packed.values()))
    yield context.fail(
        f"{first} is stored quantised, and quantization_config leaves it out"
        + (f"; {len(packed) - 1} more projections are so" if len(packed) > 1 else ""),
        where=first,
        got=_dtypes(context, packed),
        due="a plain dtype",
        fix="take the modules off the list, or export them plain",
        fault="quantization-disagrees",
    )


def _wrong_dtypes(
    context: Context, method: str, stated: Mapping[str, Any], packed: Mapping[str, StoredForm]
) -> Iterator[Finding]:
    """Quantised weights in a dtype that the method does not store."""
    due = _due_dtypes(method, stated)
    tensors = context.draft.checkpoint.tensors
    binding = context.draft.binding
    assert binding is not None
    wrong = {binding.stored[name]: tensors[binding.stored[name]].dtype for name in packed}
    wrong = {name: stored for name, stored in wrong.items() if due and stored not in due}
    if wrong:
        first = next(iter(wrong))
        yield context.fail(
            f"{first} is stored as {wrong[first]}; {_kind(method, stated)} weights are {' or '.join(due)}"
            + (f"; {len(wrong) - 1} more are stored so" if len(wrong) > 1 else ""),
            where=first,
            got=dict(list(wrong.items())[:6]),
            due=list(due),
            fix="state the method that the weights were quantised by",
            fault="quantization-disagrees",
        )


def _kind(method: str, stated: Mapping[str, Any]) -> str:
    form = stated.get("format")
    return str(form) if method == "compressed-tensors" and isinstance(form, str) else method


def _due_dtypes(method: str, stated: Mapping[str, Any]) -> tuple[str, ...]:
    """The dtypes that the method's files hold weights in; empty where that is not known."""
    float8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
    formats = {
        "pack-quantized": ("int32", "uint32"),
        "float-quantized": float8,
        "int-quantized": ("int8",),
        "nvfp4-pack-quantized": ("uint8",),
        "mxfp4-pack-quantized": ("uint8",),
    }
    if method == "compressed-tensors":
        return formats.get(str(stated.get("format")), ())
    return {"fp8": (*float8, "int8", "uint8"), "gptq": ("int32", "uint32"), "awq": ("int32", "uint32")}.get(method, ())


def _loaders(context: Context, packed: Mapping[str, str], left_out: list[str]) -> Iterator[Finding]:
    """What an engine's loader makes of a file that is right."""
    binding = context.draft.binding
    assert binding is not None
    head = binding.storage.forms.get("lm_head.weight")
    if head is not None and head.kind != "plain":
        yield from _if_unfit(
            context, "the head is stored quantised", binding.stored["lm_head.weight"], "head-quantised"
        )
    joined = [name for name in packed if binding.storage.forms[name].kind == "packed"]
    if joined:
        yield from _if_unfit(
            context, "weights are packed under names that a dense layer has not", packed[joined[0]], "packed-draft"
        )
    if context.spec.packaging == "embedded" and left_out:
        first = binding.stored[left_out[0]]
        number = re.search(r"(?:^|\.)layers\.(\d{1,6})\.", first)
        if number and first.startswith("model.layers.") and int(number[1]) != _USUAL_LAYER:
            yield from _if_unfit(
                context,
                f"the list names the draft's layer as {number[1]}, and not every loader maps that number to its own",
                first,
                "quantization-layer-index",
            )


def _if_unfit(context: Context, message: str, where: str, fault: str) -> Iterator[Finding]:
    finding = context.warn(message, where=where, fault=fault)
    if any(outcome.outcome in engines.UNFIT for outcome in finding.outcomes.values()):
        yield finding


def _dtypes(context: Context, names: Mapping[str, str]) -> dict[str, str]:
    tensors = context.draft.checkpoint.tensors
    return {name: tensors[name].dtype for name in list(names.values())[:6]}


def _near(stored: str, patterns: tuple[str, ...]) -> str:
    """A hint where the list would fit if its layer had the number of the one that is stored."""
    number = re.search(r"(?:^|\.)layers\.(\d{1,6})\.", stored)
    for pattern in patterns if number else ():
        other = re.search(r"layers\.(\d{1,6})(?!\d)", pattern)
        if other and number and other[1] != number[1]:
            moved = pattern.replace(f"layers.{other[1]}", f"layers.{number[1]}", 1)
            if _is_excluded(_module(stored), (moved,)):
                return f"; {pattern!r} names layer {other[1]}, the draft's is stored as layer {number[1]}"
    return ""
