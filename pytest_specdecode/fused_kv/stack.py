"""What the layers of one stack must share, and the error for each thing that they do not.

Stacking the K/V projections of all draft layers is right only while the layers agree in everything that the one GEMM, the one kernel
launch and the one rope table take from a single place. SGLang checks head counts, head widths and two facts about RoPE; those checks
run first here, in its order and with its texts, so that a message can be looked up. Everything else that would be served wrong in
silence, or would crash far from its cause, has a check of ours after them. Nothing here imports torch: a checkpoint's headers give the
same `LayerFacts` as built layers do.

What happens to each condition that SGLang's helper does not check:

    qkv bias on every layer              supported: added by the GEMM, before the norm
    qkv bias on some layers              axis bias
    theta differs                        axis rope-theta
    scaling, its class or table differ   axis rope-scaling
    no cos_sin_cache, or not 2-D         axis rope-scaling, unsupported
    table wider or narrower              axis rotary-dim
    scaled table grown without scaling   refused by FusedKV when it happens, axis rope-scaling
    k_norm missing or over all heads     axis k-norm
    k_norm's epsilon called `eps`        read
    k_norm's epsilon differs             served right (one per layer); soft axis norm-eps
    Gemma norm on every layer            supported: multiplied by 1 + w
    Gemma norm on some layers            axis norm-kind
    quantised qkv, any packing           axis quantization
    hidden size or dtype differs         axes hidden-size, dtype
    kv_size against the heads            axis num-kv-heads
    V heads of another width             axis v-head-dim
    q_size that does not fit the rows    axis q-size
    rotary_dim odd                       axis rotary-dim, at construction
    interleaved RoPE on every layer      supported (SGLang's helper refuses it)
    zero layers                          an error at construction
    value scale on every layer           supported
    value scale differs                  axis value-scale
    input norm on the context            supported where every layer gives it, by one batched GEMM; else unsupported
    weights changed after construction   noticed by FusedKV, or `refresh_weights`
    positions, ctx_hidden                FusedKV.materialize
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_specdecode.errors import StackMismatchError, StackUnsupportedError

#: What all layers of a stack must agree in. Each has a validator here, a strategy, a check and a line in the documentation.
AXES = (
    "num-kv-heads",
    "head-dim",
    "rotary-dim",
    "rope-style",
    "rope-theta",
    "rope-scaling",
    "hidden-size",
    "dtype",
    "bias",
    "k-norm",
    "norm-kind",
    "v-head-dim",
    "value-scale",
    "q-size",
    "quantization",
)

#: What layers may differ in here, though an engine takes it from layer 0 (vLLM does, for the norm's epsilon).
SOFT_AXES = ("norm-eps",)

#: Dtypes that the kernel reads and writes.
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What one layer says of itself, as far as the stack is concerned. None means unknown, and an unknown is compared with nothing.

    Attributes:
        num_kv_heads, head_dim, rotary_dim, is_neox_style, hidden_size: as the words of the field.
        rope_theta: base of the frequencies.
        rope_scaling: sorted (name, value) pairs as `normal_scaling` makes them; empty for unscaled.
        dtype: of the qkv weight, such as `bfloat16`; None where it is quantised.
        bias: whether the qkv projection has one.
        k_norm: `per-head` (over head_dim), `none`, or `whole` (over another width, all KV heads as a rule).
        norm_kind: `rms` (times w) or `gemma` (times 1 + w).
        v_head_dim: width of a V head.
        value_scale: factor on V.
        q_size: rows of Q in the qkv weight, so the row where K starts.
        quantization: the method's name, or None where the weight is plain.
        norm_eps: epsilon of k_norm.
        kv_size: rows of K, and of V, as the layer states them.
        qkv_rows: rows of the qkv weight.
        k_norm_width: entries of k_norm's weight.
        rope_problem: why the rope table cannot be used, or None.
        rope_table: the table itself, where there is one.
        context_norm: `none`; `given`, where the layer norms the context before projecting it and has that norm as `context_norm`
            (Laguna); `hidden`, where it only says that it does.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    rotary_dim: int | None = None
    is_neox_style: bool | None = None
    rope_theta: float | None = None
    rope_scaling: tuple[tuple[str, Any], ...] | None = None
    hidden_size: int | None = None
    dtype: str | None = None
    bias: bool | None = None
    k_norm: str | None = None
    norm_kind: str | None = None
    v_head_dim: int | None = None
    value_scale: float | None = None
    q_size: int | None = None
    quantization: str | None = None
    norm_eps: float | None = None
    kv_size: int | None = None
    qkv_rows: int | None = None
    k_norm_width: int | None = None
    rope_problem: str | None = None
    rope_table: Any = field(default=None, compare=False, repr=False)
    context_norm: str | None = None


def validate(
    facts: Sequence[LayerFacts],
    *,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_dim: int | None,
    is_neox_style: bool | None,
    shared_rope: LayerFacts | None = None,
    interleaved: bool = True,
) -> None:
    """Raise the first of `mismatches`; arguments as there."""
    for fault in mismatches(
        facts,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
        shared_rope=shared_rope,
        interleaved=interleaved,
    ):
        raise fault


def mismatches(
    facts: Sequence[LayerFacts],
    *,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_dim: int | None,
    is_neox_style: bool | None,
    shared_rope: LayerFacts | None = None,
    interleaved: bool = True,
) -> Iterator[StackMismatchError | StackUnsupportedError]:
    """Every reason why these layers cannot be served as one stack, in the order in which they are to be reported.

    SGLang's checks come first: the shared RoPE's style and width, then per layer heads, head width and RoPE. Then ours: per layer the
    remaining axes, and last what all layers agree in but the path cannot do.

    Args:
        facts: one record per layer, in order.
        num_kv_heads, head_dim, rotary_dim, is_neox_style: what the path is to be built with (an engine takes them from layer 0);
            None where unknown.
        shared_rope: `rope_facts` of the rotary object that serves all layers, where there is one.
        interleaved: whether the path rotates interleaved pairs, as FusedKV does and SGLang's does not.
    """
    if is_neox_style is False and not interleaved:
        yield StackUnsupportedError("Only neox-style RoPE is supported.", axis="rope-style", expected=True, got=False)
    if rotary_dim is not None and head_dim is not None and not valid_rotary(rotary_dim, head_dim):
        yield StackMismatchError(
            f"Invalid fused KV rotary/head dim pair: rotary_dim={rotary_dim}, head_dim={head_dim}.",
            axis="rotary-dim",
            expected=f"even, 0 < rotary_dim <= {head_dim}",
            got=rotary_dim,
        )
    if not facts:
        yield StackUnsupportedError("No layers to stack for fused KV path: expected at least one.", expected=1, got=0)
        return
    for layer, fact in enumerate(facts):
        yield from _sglang_checks(layer, fact, num_kv_heads, head_dim, rotary_dim, is_neox_style)
    yield from _remaining_axes(facts, shared_rope, num_kv_heads, head_dim, rotary_dim)
    yield from unsupported(facts, shared_rope, _LIMITS, head_dim)


def facts_of(layer: Any) -> LayerFacts:
    """The facts of one built layer, ours or an engine's: `layer.self_attn` is read, nothing is run.

    Read are `qkv_proj` (`weight`, `bias`, `quant_method`), `q_size`, `kv_size`, `num_kv_heads`, `head_dim`, `rotary_emb`, `k_norm`, and
    where present `v_head_dim` and `value_scale` (or `attention_value_scale`, `v_scale`). An attribute that is absent is unknown, but an
    absent `k_norm` is `none`.
    """
    attn = layer.self_attn
    head_dim, num_kv_heads = int_attribute(attn, "head_dim"), int_attribute(attn, "num_kv_heads")
    rope = rope_facts(getattr(attn, "rotary_emb", None), head_dim)
    qkv, norm = getattr(attn, "qkv_proj", None), getattr(attn, "k_norm", None)
    width = norm_width_of(norm)
    return LayerFacts(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        k_norm="none" if width is None else "per-head" if width == head_dim else "whole",
        v_head_dim=_v_head_dim(attn, head_dim, num_kv_heads),
        value_scale=value_scale_of(attn),
        q_size=int_attribute(attn, "q_size"),
        kv_size=int_attribute(attn, "kv_size"),
        qkv_rows=plain_shape(qkv)[0],
        k_norm_width=width,
        context_norm=context_norm_of(layer),
        **common_facts(qkv, norm, rope),
    )


def common_facts(projection: Any, norm: Any, rope: LayerFacts) -> dict[str, Any]:
    """The facts that every kind of layer has: of the projection that is stacked, the norm of what it gives, and the rotary object."""
    weight, quantization = getattr(projection, "weight", None), quantization_of(projection)
    return {
        "rotary_dim": rope.rotary_dim,
        "is_neox_style": rope.is_neox_style,
        "rope_theta": rope.rope_theta,
        "rope_scaling": rope.rope_scaling,
        "rope_problem": rope.rope_problem,
        "rope_table": rope.rope_table,
        "hidden_size": plain_shape(projection)[1],
        "dtype": None if quantization is not None or weight is None else dtype_name(weight.dtype),
        "bias": None if projection is None else getattr(projection, "bias", None) is not None,
        "norm_kind": None if norm is None else norm_kind_of(norm),
        "norm_eps": None if norm is None else norm_eps_of(norm),
        "quantization": quantization,
    }


def context_norm_of(layer: Any) -> str:
    """Whether the layer norms the context, in the words of `LayerFacts.context_norm`."""
    if getattr(layer, "context_norm", None) is not None:
        return "given"
    refuses = any(getattr(part, "supports_fused_context_kv", True) is False for part in (layer, layer.self_attn))
    return "hidden" if refuses else "none"


def rope_facts(rotary_emb: Any, head_dim: int | None = None) -> LayerFacts:
    """The RoPE fields of LayerFacts, read from a rotary object; `rotary_dim` is head_dim and the style neox where it does not say."""
    if rotary_emb is None:
        return LayerFacts(rope_problem="the layer has no rotary_emb")
    table, problem = getattr(rotary_emb, "cos_sin_cache", None), None
    rotary_dim = int(getattr(rotary_emb, "rotary_dim", head_dim or 0)) or None
    if table is None:
        problem = f"{type(rotary_emb).__name__} has no cos_sin_cache"
    elif len(table.shape) != 2:
        problem = (
            f"cos_sin_cache of {type(rotary_emb).__name__} has shape {tuple(table.shape)}, not [positions, rotary_dim]"
        )
        table = None
    theta = next(
        (getattr(rotary_emb, name) for name in ("base", "theta", "rope_theta") if _number(rotary_emb, name)), None
    )
    return LayerFacts(
        rotary_dim=rotary_dim,
        is_neox_style=bool(getattr(rotary_emb, "is_neox_style", True)),
        rope_theta=None if theta is None else float(theta),
        rope_scaling=_scaling_of(rotary_emb),
        rope_problem=problem,
        rope_table=table,
    )


def normal_scaling(scaling: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """A scaling dictionary in a form that can be compared: `type` read as `rope_type`, theta left out, unscaled = empty."""
    if not scaling:
        return ()
    fields = {
        str(name): _hashable(value) for name, value in scaling.items() if name != "rope_theta" and value is not None
    }
    kind = fields.pop("type", None)
    kind = fields.pop("rope_type", kind) or "default"
    if kind == "default" and not set(fields) - {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}:
        return ()
    return tuple(sorted({**fields, "rope_type": kind}.items()))


def valid_rotary(rotary_dim: int, head_dim: int) -> bool:
    """Whether `rotary_dim` leading lanes can rotate in a head of `head_dim`."""
    return 0 < rotary_dim <= head_dim and rotary_dim % 2 == 0


def norm_eps_of(norm: Any) -> float | None:
    """A norm's epsilon under either of its names, or None."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if value is not None:
            return float(value)
    return None


def norm_kind_of(norm: Any) -> str:
    """`gemma` where the norm says so or its class is named so, else `rms`."""
    stated = getattr(norm, "norm_kind", None)
    if stated is not None:
        return str(stated)
    return "gemma" if "gemma" in type(norm).__name__.lower() else "rms"


def value_scale_of(attn: Any) -> float:
    """The factor on V, 1.0 where none is stated."""
    for name in ("value_scale", "attention_value_scale", "v_scale"):
        value = getattr(attn, name, None)
        if value is not None:
            return float(value)
    return 1.0


def quantization_of(qkv: Any) -> str | None:
    """How a projection is quantised: the method it names, or what its tensors show; None where it is plain."""
    if qkv is None:
        return None
    method = getattr(qkv, "quant_method", None)
    if method is not None:
        name = method if isinstance(method, str) else type(method).__name__
        if not name.lower().startswith("unquantized"):
            return name
    weight = getattr(qkv, "weight", None)
    if weight is None:
        packed = [name for name in ("qweight", "weight_packed") if getattr(qkv, name, None) is not None]
        return packed[0] if packed else None
    name = dtype_name(weight.dtype)
    return name if name.startswith("float8") or name in ("int8", "uint8", "int32") else None


# --- the checks ------------------------------------------------------------------------------------------------------------------------


def _sglang_checks(
    layer: int,
    fact: LayerFacts,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_dim: int | None,
    is_neox_style: bool | None,
) -> Iterator[StackMismatchError]:
    if differ(num_kv_heads, fact.num_kv_heads):
        yield mismatch("num_kv_heads", "num-kv-heads", num_kv_heads, fact.num_kv_heads, layer)
    if differ(head_dim, fact.head_dim):
        yield mismatch("head_dim", "head-dim", head_dim, fact.head_dim, layer)
    width, style = differ(rotary_dim, fact.rotary_dim), differ(is_neox_style, fact.is_neox_style)
    if not width and not style:
        return
    # SGLang reads a style that is not stated as neox, so the text has a value for it either way.
    got_dim = rotary_dim if fact.rotary_dim is None else fact.rotary_dim
    due_style = True if is_neox_style is None else is_neox_style
    got_style = due_style if fact.is_neox_style is None else fact.is_neox_style
    yield StackMismatchError(
        "RoPE config mismatch across layers for fused KV path: "
        f"expected (rotary_dim={rotary_dim}, neox={due_style}), got (rotary_dim={got_dim}, neox={got_style}) at layer {layer}.",
        axis="rotary-dim" if width else "rope-style",
        expected=rotary_dim if width else due_style,
        got=got_dim if width else got_style,
        layer=layer,
    )


def _remaining_axes(
    facts: Sequence[LayerFacts],
    shared_rope: LayerFacts | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_dim: int | None,
) -> Iterator[StackMismatchError | StackUnsupportedError]:
    ropes = facts if shared_rope is None else (shared_rope, *facts)
    due = due_values(_PLAIN_AXES, facts, ropes)
    table = first_known(ropes, "rope_table")
    kv_size = None if num_kv_heads is None or head_dim is None else num_kv_heads * head_dim
    for layer, fact in enumerate(facts):
        if differ(kv_size, fact.kv_size):
            yield mismatch("kv_size", "num-kv-heads", kv_size, fact.kv_size, layer)
        for axis, name, what in _PLAIN_AXES:
            if (fault := axis_mismatch(axis, what, due[name], getattr(fact, name), layer)) is not None:
                yield fault
            elif axis == "rope-scaling" and not differ(due["rope_theta"], fact.rope_theta):
                yield from table_mismatches(layer, fact, table, rotary_dim)
            elif axis == "q-size":
                yield from _row_check(layer, fact, kv_size)


#: Axis, attribute of LayerFacts, and the word for it in a message, in the order of AXES, for the axes that are compared as they stand.
_PLAIN_AXES = (
    ("rope-theta", "rope_theta", "rope_theta"),
    ("rope-scaling", "rope_scaling", "rope_scaling"),
    ("hidden-size", "hidden_size", "hidden_size"),
    ("dtype", "dtype", "qkv weight dtype"),
    ("bias", "bias", "qkv bias"),
    ("k-norm", "k_norm", "k_norm"),
    ("norm-kind", "norm_kind", "norm kind"),
    ("v-head-dim", "v_head_dim", "v_head_dim"),
    ("value-scale", "value_scale", "value scale"),
    ("q-size", "q_size", "q_size"),
    ("quantization", "quantization", "quantization"),
    # Not an axis: a layer either brings the norm or is no layer of this kind of stack.
    ("context-norm", "context_norm", "norm of the context"),
)


def _row_check(layer: int, fact: LayerFacts, kv_size: int | None) -> Iterator[StackMismatchError]:
    if fact.qkv_rows is None or fact.q_size is None or kv_size is None or fact.v_head_dim != fact.head_dim:
        return
    if fact.q_size + 2 * kv_size == fact.qkv_rows:
        return
    due = fact.qkv_rows - 2 * kv_size
    yield StackMismatchError(
        f"q_size mismatch for fused KV path: expected {due} (qkv_proj.weight has {fact.qkv_rows} rows, of which K and V take "
        f"2 x {kv_size}), got {fact.q_size} at layer {layer}.",
        axis="q-size",
        expected=due,
        got=fact.q_size,
        layer=layer,
    )


def table_limit(fact: Any, head_dim: int | None) -> Any:
    """Why the layer's rope table cannot be used."""
    return fact.rope_problem


def dtype_limit(fact: Any, head_dim: int | None) -> Any:
    """A dtype that the kernels do not read."""
    return fact.dtype if fact.dtype is not None and fact.dtype not in DTYPES else None


def norm_kind_limit(fact: Any, head_dim: int | None) -> Any:
    """A kind of norm that is not known."""
    return fact.norm_kind if fact.norm_kind not in (None, "rms", "gemma") else None


def quantization_limit(fact: Any, head_dim: int | None) -> Any:
    """How the projection is quantised."""
    return fact.quantization


def _no_norm_limit(fact: LayerFacts, head_dim: int | None) -> Any:
    return "k_norm=none" if fact.k_norm == "none" else None


def _whole_norm_limit(fact: LayerFacts, head_dim: int | None) -> Any:
    if fact.k_norm != "whole":
        return None
    return "k_norm over another width" if fact.k_norm_width is None else f"k_norm over {fact.k_norm_width} features"


def _v_limit(fact: LayerFacts, head_dim: int | None) -> Any:
    due = head_dim if head_dim is not None else fact.head_dim
    return fact.v_head_dim if differ(due, fact.v_head_dim) else None


def _context_norm_limit(fact: LayerFacts, head_dim: int | None) -> Any:
    return "supports_fused_context_kv=False" if fact.context_norm == "hidden" else None


#: What a path cannot do: axis, what is due, the thing, and what a layer has of it, given its facts and the width of a head.
Limits = Sequence[tuple[str, Any, str, Callable[[Any, int | None], Any]]]

_LIMITS: Limits = (
    ("rope-scaling", "cos_sin_cache [positions, rotary_dim]", "RoPE without a usable table", table_limit),
    ("dtype", DTYPES, "a qkv weight of this dtype", dtype_limit),
    ("k-norm", "per-head", "attention without k_norm", _no_norm_limit),
    ("k-norm", "per-head", "k_norm over anything but one head", _whole_norm_limit),
    ("norm-kind", ("rms", "gemma"), "this kind of k_norm", norm_kind_limit),
    ("v-head-dim", "head_dim", "v_head_dim other than head_dim", _v_limit),
    ("quantization", None, "quantized qkv_proj", quantization_limit),
    ("context-norm", False, "a norm of the context inside each layer", _context_norm_limit),
)


# --- building blocks -------------------------------------------------------------------------------------------------------------------


def first_differing_row(due: Any, got: Any) -> int | None:
    """The first position at which two rope tables differ by more than the rounding of their making, or None.

    Angles are made in float32 as a rule, so a row may be off by a few float32 eps times its position; the tables' own dtype adds its eps.
    """
    if due is None or got is None or due is got:
        return None
    import torch

    rows = min(due.shape[0], got.shape[0])
    if rows == 0:
        return None
    first, second = due[:rows].detach().to("cpu"), got[:rows].detach().to("cpu")
    if first.dtype == second.dtype and torch.equal(first, second):
        return None
    distance = (first.double() - second.double()).abs().amax(dim=1)
    eps = max(torch.finfo(first.dtype).eps, torch.finfo(second.dtype).eps)
    positions = torch.arange(rows, dtype=torch.float64)
    scale = max(1.0, float(first.double().abs().max()))
    allowed = scale * (2 * eps + 4 * torch.finfo(torch.float32).eps * (positions + 1))
    wrong = (distance > allowed).nonzero()
    return int(wrong[0]) if len(wrong) else None


def axis_mismatch(
    axis: str, what: str, expected: Any, got: Any, layer: int, *, path: str = "KV"
) -> StackMismatchError | None:
    """The error where a layer's value of a plain axis is not the one expected. An unknown value differs from nothing; but a weight that is
    not said to be quantised is plain."""
    if axis == "quantization":
        expected, got = expected or "none", got or "none"
    return mismatch(what, axis, expected, got, layer, path=path) if differ(expected, got) else None


def mismatch(what: str, axis: str, expected: Any, got: Any, layer: int, *, path: str = "KV") -> StackMismatchError:
    """The error for a layer that is not as the others; `path` is `KV` or `latent`."""
    return StackMismatchError(
        f"{what} mismatch across layers for fused {path} path: expected {_shown(expected)}, got {_shown(got)} at layer {layer}.",
        axis=axis,
        expected=expected,
        got=got,
        layer=layer,
    )


def table_mismatches(
    layer: int, fact: Any, table: Any, rotary_dim: int | None, *, width_axis: str = "rotary-dim", path: str = "KV"
) -> Iterator[StackMismatchError]:
    """What a layer's own rope table says against the shared one: another width, else other rows."""
    if fact.rope_table is None or differ(rotary_dim, fact.rotary_dim):
        return
    width = int(fact.rope_table.shape[1])
    if differ(rotary_dim, width):
        yield mismatch("cos_sin_cache width", width_axis, rotary_dim, width, layer, path=path)
        return
    row = first_differing_row(table, fact.rope_table)
    if row is not None:
        yield StackMismatchError(
            f"RoPE table mismatch across layers for fused {path} path: expected the rows of the shared cos_sin_cache, "
            f"got other values from position {row} on at layer {layer}.",
            axis="rope-scaling",
            expected="the shared cos_sin_cache",
            got=f"another row at position {row}",
            layer=layer,
        )


def unsupported(
    facts: Sequence[Any], shared_rope: LayerFacts | None, limits: Limits, head_dim: int | None, *, path: str = "KV"
) -> Iterator[StackUnsupportedError]:
    """What all layers may agree in but the path cannot do; each of `limits` once, for the first layer that is beyond it."""
    if shared_rope is not None and shared_rope.rope_problem is not None:
        yield StackUnsupportedError(
            f"RoPE without a usable table is not supported for fused {path} path: {shared_rope.rope_problem}.",
            axis="rope-scaling",
            expected="cos_sin_cache [positions, rotary_dim]",
            got=shared_rope.rope_problem,
        )
    for axis, due, text, offends in limits:
        found = [offends(fact, head_dim) for fact in facts]
        layer = next((index for index, got in enumerate(found) if got is not None), None)
        if layer is not None:
            yield StackUnsupportedError(
                f"{text} is not supported for fused {path} path: {found[layer]} at layer {layer}.",
                axis=axis,
                expected=due,
                got=found[layer],
                layer=layer,
            )


def due_values(axes: Sequence[tuple[str, str, str]], facts: Sequence[Any], ropes: Sequence[Any]) -> dict[str, Any]:
    """By attribute, what the layers are held against: the first known value, of RoPE in `ropes`; of the quantisation the first value."""
    due = {name: first_known(ropes if name.startswith("rope") else facts, name) for _, name, _ in axes}
    return {**due, "quantization": facts[0].quantization}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{name}={item}" for name, item in value) + "}" if value else "none"
    return str(value)


def differ(expected: Any, got: Any) -> bool:
    """Whether both are known and not the same."""
    return expected is not None and got is not None and expected != got


def first_known(facts: Sequence[Any], name: str) -> Any:
    """The first value of attribute `name` that is known, or None."""
    return next((getattr(fact, name) for fact in facts if getattr(fact, name) is not None), None)


def int_attribute(owner: Any, name: str) -> int | None:
    """An attribute as an int, or None where it is absent."""
    value = getattr(owner, name, None)
    return None if value is None else int(value)


def _number(owner: Any, name: str) -> bool:
    return isinstance(getattr(owner, name, None), (int, float))


def dtype_name(dtype: Any) -> str:
    """A torch dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def plain_shape(projection: Any) -> tuple[int | None, int | None]:
    """Rows and columns of a projection's weight, unknown where it is quantised or no matrix."""
    weight = getattr(projection, "weight", None)
    if weight is None or len(weight.shape) != 2 or quantization_of(projection) is not None:
        return None, None
    return int(weight.shape[0]), int(weight.shape[1])


def norm_width_of(norm: Any) -> int | None:
    """Entries of a norm's weight, or None without one."""
    weight = getattr(norm, "weight", None)
    return None if weight is None else int(weight.shape[-1])


def _v_head_dim(attn: Any, head_dim: int | None, num_kv_heads: int | None) -> int | None:
    stated = int_attribute(attn, "v_head_dim")
    return head_dim if stated is None else stated


#: Attributes in which rotary classes keep their scaling when they keep no dictionary.
_SCALING_ATTRIBUTES = (
    "scaling_factor",
    "factor",
    "scaling_type",
    "low_freq_factor",
    "high_freq_factor",
    "orig_max_position",
    "original_max_position_embeddings",
    "extrapolation_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
    "scaling_alpha",
    "ntk_alpha",
)

_SCALING_CLASS = re.compile(r"scal|yarn|longrope|dynamic|ntk|llama3|mrotary|fourier|dual", re.IGNORECASE)


def _scaling_of(rotary_emb: Any) -> tuple[tuple[str, Any], ...] | None:
    if hasattr(rotary_emb, "rope_scaling"):
        return normal_scaling(rotary_emb.rope_scaling)
    found = {name: _hashable(getattr(rotary_emb, name)) for name in _SCALING_ATTRIBUTES if hasattr(rotary_emb, name)}
    kind = type(rotary_emb).__name__
    if not found and not _SCALING_CLASS.search(kind):
        return ()
    return tuple(sorted({**found, "rope_type": kind}.items()))


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _hashable(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, bool):
        return value
    # A factor written 4 or 4.0 is the same factor.
    return float(value) if isinstance(value, int) else value
