"""In which form a weight is stored: plain, packed into integers, or narrow with factors beside it.

A quantising exporter changes what a file holds in three ways: a weight goes by another name (`weight_packed`, `qweight`), its columns
shrink because several numbers share a word, and tensors that no architecture knows lie beside it. Every check that asks whether a tensor
is there, may be there or has its shape would otherwise take a right file for a broken one, so the forms are told apart here, once, from
headers and configuration alone. Nothing is dequantised.

    scheme                     the weight                         beside it
    compressed-tensors         weight_packed int32 [O, I b / 32]  weight_scale, weight_shape (weight_zero_point, weight_g_idx)
    compressed-tensors NVFP4   weight_packed uint8 [O, I / 2]     weight_scale, weight_global_scale (input_global_scale)
    compressed-tensors, fp8    weight float8 or int8 [O, I]       weight_scale, weight_scale_inv or scale (input_scale)
    ModelOpt NVFP4             weight uint8 [O, I / 2]            weight_scale, weight_scale_2 (input_scale)
    GPTQ                       qweight int32 [I b / 32, O]        qzeros, scales (g_idx)
    AWQ                        qweight int32 [I, O b / 32]        qzeros, scales
    MLX                        weight uint32 [O, I b / 32]        scales, biases (no biases in its mx and nv modes)
    bitsandbytes, 4 bits       weight uint8 [O I / 2, 1]          weight.absmax, weight.quant_map, weight.quant_state.*
    bitsandbytes, 8 bits       weight int8 [O, I]                 SCB (weight_format)
    MXFP4 experts              NAME_blocks uint8                  NAME_scales

for a matrix of O rows and I columns in b bits. Names and shapes are those of the exporters' files:
https://github.com/vllm-project/compressed-tensors, https://github.com/NVIDIA/Model-Optimizer, https://github.com/AutoGPTQ/AutoGPTQ,
https://github.com/casper-hansen/AutoAWQ, https://github.com/ml-explore/mlx, https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_specdecode.checkpoint import Checkpoint, TensorHeader, read_json_object
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.spec import Extent

__all__ = ["HOLDERS", "PLAIN_FLOATS", "Scheme", "Storage", "StoredForm", "read_scheme", "read_storage"]

#: Dtypes whose elements are numbers by themselves.
PLAIN_FLOATS = ("bfloat16", "float16", "float32", "float64")

Kind = Literal["plain", "packed", "scaled", "unscaled"]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a configuration says of quantised weights.

    Attributes:
        method: `compressed-tensors`, `fp8`, `modelopt`, `gptq`, `awq`, `mlx`, `bitsandbytes` or another name; None where nothing is said.
        bits: of one number where all weights agree, else None.
        symmetric: False where zero points are said to be stored.
        grouped_offsets: whether MLX stores an offset per group, as its affine mode does.
    """

    method: str | None = None
    bits: int | None = None
    symmetric: bool = True
    grouped_offsets: bool = True


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    """How one weight is stored.

    Attributes:
        kind: `plain`; `packed` (several numbers to an element); `scaled` (a narrow dtype with factors beside it); `unscaled` (a narrow or
            integer dtype without any).
        holder: canonical name of the tensor that holds the numbers; the weight's own unless it is packed under another.
        companions: canonical names of what lies beside it.
        lacking: canonical names of what the form calls for and the file does not hold.
        shape: extents of the weight as a plain matrix, None for one that the stored form does not tell; None where it tells none.
    """

    kind: Kind
    holder: str
    companions: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    shape: tuple[Extent, ...] | None


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The stored forms of a draft's weights.

    Attributes:
        scheme: what the configuration says.
        forms: by canonical name, of every weight that is stored in whatever form.
        orphans: companions of weights that are not stored in any form, by the weight's canonical name.
        companions: canonical names of everything that lies beside a weight, stored or not.
    """

    scheme: Scheme = Scheme()
    forms: Mapping[str, StoredForm]
    orphans: Mapping[str, tuple[str, ...]]
    companions: frozenset[str]


def read_scheme(checkpoint: Checkpoint) -> Scheme:
    """What `config.json`, at its root or in a nested model's part, says; ModelOpt's `hf_quant_config.json` where that says nothing."""
    config = checkpoint.config
    for place in (config, *(config.get(key) for key in _NESTED)):
        if not isinstance(place, Mapping):
            continue
        stated = place.get("quantization_config") or place.get("compression_config")
        # MLX writes its settings under both keys, without a method.
        if isinstance(stated, Mapping) and stated.get("quant_method") not in (None, "mlx"):
            return _scheme(stated)
        settings = place.get("quantization")
        if isinstance(settings, Mapping) and settings:
            return _mlx_scheme(settings)
        if isinstance(stated, Mapping) and stated:
            return _mlx_scheme(stated) if {"bits", "group_size"} <= set(stated) else _scheme(stated)
    return Scheme(method="modelopt") if _has_modelopt_file(checkpoint.path) else Scheme()


def read_storage(scheme: Scheme, headers: Mapping[str, TensorHeader], weights: Collection[str]) -> Storage:
    """The form of every one of `weights` that is stored.

    Args:
        scheme: what the configuration says.
        headers: stored tensors, by canonical name.
        weights: canonical names of the floating-point tensors that the draft calls for, their companions left out or not.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in headers:
        for owner, role in _owners(name):
            if owner in weights and owner != name:
                parts.setdefault(owner, {})[role] = name
                break
    packed_under = {names[role] for names in parts.values() for role in _HOLDERS if role in names}
    beside = frozenset(name for names in parts.values() for name in names.values()) - packed_under
    forms: dict[str, StoredForm] = {}
    orphans: dict[str, tuple[str, ...]] = {}
    for weight in weights:
        if weight in beside:
            continue
        found = parts.get(weight, {})
        form = _form(scheme, weight, headers, found)
        if form is not None:
            forms[weight] = form
        elif found:
            orphans[weight] = tuple(found.values())
    return Storage(scheme=scheme, forms=forms, orphans=orphans, companions=beside)


_NESTED = ("text_config", "transformer_layer_config", "model", "language_config")
#: Roles under which a weight itself is stored.
_HOLDERS = ("_packed", ".qweight", "_blocks")
#: Ends of the names under which the numbers of a projection may be stored.
HOLDERS = (".weight", ".weight_packed", ".qweight", ".weight_blocks")
#: Roles that hold the factors of a narrow dtype.
_SCALES = ("_scale", "_scale_inv", ".scale", ".SCB")

#: `weight_scale`: the weight's whole name goes on.
_APPENDED = re.compile(
    r"(.+?)(_(?:scale|scale_inv|scale_2|packed|shape|zero_point|g_idx|global_scale|blocks|scales|format))"
)
#: `weight.absmax`: something below the weight's whole name.
_BELOW = re.compile(r"(.+?)(\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))")
#: `input_scale`: in the place of `weight`.
_INSTEAD = re.compile(
    r"(.+)(\.(?:qweight|qzeros|scales|biases|g_idx|scale|SCB|input_scale|input_global_scale|input_zero_point|output_scale"
    r"|[qkv]_scale|pre_quant_scale|weight_format))"
)
#: `attn.k_scale`: factors of a quantised cache, which belong to the attention and not to one projection.
_CACHE = re.compile(r"(.+?)(?:\.attn)?(\.[qkv]_scale)")


def _owners(name: str) -> Iterator[tuple[str, str]]:
    """Weights that a tensor called `name` may lie beside, with its role there."""
    for pattern in (_APPENDED, _BELOW):
        if match := pattern.fullmatch(name):
            yield match[1], match[2]
    if match := _INSTEAD.fullmatch(name):
        yield f"{match[1]}.weight", match[2]
    if match := _CACHE.fullmatch(name):
        for projection in ("k_proj", "qkv_proj", "kv_a_proj_with_mqa"):
            yield f"{match[1]}.{projection}.weight", f"{match[2]} of the cache"


def _form(
    scheme: Scheme, weight: str, headers: Mapping[str, TensorHeader], found: Mapping[str, str]
) -> StoredForm | None:
    """The form of `weight`, whose other parts are `found` by role; None where nothing holds its numbers."""
    role = next((role for role in _HOLDERS if role in found), None)
    if weight in headers:
        role = None
    elif role is None:
        return None
    holder = weight if role is None else found[role]
    header = headers[holder]
    companions = tuple(name for part, name in found.items() if part != role)
    stem = weight.removesuffix(".weight")

    def form(kind: Kind, due: tuple[str, ...] = (), shape: tuple[Extent, ...] | None = header.shape) -> StoredForm:
        lacking = [part for part in due if part not in found]
        return StoredForm(
            kind=kind,
            holder=holder,
            companions=companions,
            lacking=tuple(f"{weight if part[0] == '_' or part in _BELOW_ROLES else stem}{part}" for part in lacking),
            shape=shape,
        )

    per_word = _per_word(scheme.bits)
    if role == ".qweight":
        return form("packed", (".scales", ".qzeros"), _qweight_shape(scheme, header.shape, per_word))
    if role == "_blocks":
        return form("packed", ("_scales",), None)
    if role == "_packed":
        nibbles = header.dtype in ("uint8", "int8")
        due = _float4_parts("_global_scale", headers, found) if nibbles else ("_scale", "_shape")
        due += () if nibbles or scheme.symmetric else ("_zero_point",)
        return form("packed", due, _widened(header.shape, 2 if nibbles else per_word))
    if header.dtype in PLAIN_FLOATS:
        return form("plain")
    if header.dtype in ("uint32", "int32") and (".scales" in found or ".biases" in found):
        due = (".scales", ".biases") if scheme.grouped_offsets else (".scales",)
        return form("packed", due, _widened(header.shape, per_word))
    if header.dtype == "uint8" and any(part in _BELOW_ROLES for part in found):
        return form("packed", (".absmax", ".quant_map"), None)
    if header.dtype == "uint8" and ("_scale" in found or "_scale_2" in found):
        due = _float4_parts("_scale_2", headers, found)
        four_bits = "_scale" in found and headers[found["_scale"]].dtype not in PLAIN_FLOATS
        return form("packed", due, _widened(header.shape, 2) if four_bits else None)
    if any(part in found for part in _SCALES):
        return form("scaled")
    # Bytes may hold a number each; longer integers hold several, and nothing says how many.
    return form("unscaled", (), header.shape if header.is_float or header.dtype == "int8" else None)


_BELOW_ROLES = frozenset((".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"))


def _float4_parts(second: str, headers: Mapping[str, TensorHeader], found: Mapping[str, str]) -> tuple[str, ...]:
    """Factors of four-bit floats: one per group, and in NVFP4, whose groups have float8 factors, one for the whole tensor."""
    group = headers.get(found.get("_scale", ""))
    return ("_scale", second) if group is not None and group.dtype == "float8_e4m3fn" else ("_scale",)


def _per_word(bits: int | None) -> int | None:
    """Numbers in a word of 32 bits, where they fill it."""
    return 32 // bits if bits and 32 % bits == 0 else None


def _widened(shape: tuple[int, ...], factor: int | None) -> tuple[Extent, ...]:
    """`shape` with `factor` numbers to an element of its last axis."""
    return (*shape[:-1], None if factor is None else shape[-1] * factor) if shape else ()


def _qweight_shape(scheme: Scheme, shape: tuple[int, ...], per_word: int | None) -> tuple[Extent, ...]:
    """`[O, I]` of a `qweight`, which lies transposed: GPTQ packs its rows, AWQ its columns."""
    if len(shape) != 2 or scheme.method not in ("gptq", "awq"):
        return (None, None)
    columns, rows = shape
    factor = per_word or 0
    if scheme.method == "gptq":
        return (rows, columns * factor or None)
    return (rows * factor or None, columns)


def _scheme(stated: Mapping[str, Any]) -> Scheme:
    method = stated.get("quant_method")
    nested = stated.get("quantization")
    if method is None and ("quant_algo" in stated or (isinstance(nested, Mapping) and "quant_algo" in nested)):
        method = "modelopt"
    name = str(method).lower().replace("_", "-") if method is not None else "unnamed"
    groups = stated.get("config_groups")
    weights = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    told = {_bits(part.get("num_bits")) for part in weights} or {_bits(stated.get("bits", stated.get("w_bit")))}
    return Scheme(
        method={"gptq-marlin": "gptq", "awq-marlin": "awq"}.get(name, name),
        bits=told.pop() if len(told) == 1 else None,
        symmetric=not (weights and all(part.get("symmetric") is False for part in weights)),
    )


def _mlx_scheme(stated: Mapping[str, Any]) -> Scheme:
    """MLX's settings; a layer's own stand under its name."""
    own = [value for value in stated.values() if isinstance(value, Mapping)]
    told = {_bits(part.get("bits")) for part in (stated, *own) if "bits" in part}
    return Scheme(
        method="mlx",
        bits=told.pop() if len(told) == 1 else None,
        grouped_offsets=all(part.get("mode") in (None, "affine") for part in (stated, *own)),
    )


def _bits(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 32 else None


def _has_modelopt_file(directory: Path) -> bool:
    path = directory / "hf_quant_config.json"
    try:
        return path.is_file() and bool(read_json_object(path).get("quantization"))
    except CheckpointError:
        return False
