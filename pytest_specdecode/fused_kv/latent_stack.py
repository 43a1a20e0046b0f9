"""What the layers of one latent stack must share, and the error for each thing that they do not.

A draft with multi-head latent attention keeps one row per token and layer: the normed latent and a rotated `k_pe` that all heads share.
Where every layer projects that row from the same context (DSpark over Kimi K3's layers), the `kv_a_proj_with_mqa` of all layers join into
one matrix as the K and V rows of grouped-query layers do, and the layers must agree in what the one GEMM, the one kernel and the one rope
table take from a single place.

DeepSeek-V4's layers keep such a row too, which is K and V at once: `wkv` projects it, `kv_norm` goes over all of it, and then its last
`qk_rope_head_dim` lanes rotate. The lanes before those are called the latent here, though no second matrix reads them, and their number
kv_lora_rank. A window or a sink is applied when a query looks back and changes no row; a compressor makes further rows, of several tokens
each, which no row of the stack is.

No engine's texts are to be had for this path; these are in the style of the K/V stack's (`stack.py`).
Nothing here imports torch.

What becomes of each condition:

    bias on every layer                  supported: added by the GEMM, before the norm
    bias on some layers                  axis bias
    interleaved or neox RoPE             supported, one style for all layers; another style is axis rope-style
    theta differs                        axis rope-theta
    scaling or its table differ          axis rope-scaling
    no cos_sin_cache, or not 2-D         axis rope-scaling, unsupported (a draft without RoPE has no table)
    rotary object or table of another    axis qk-rope-head-dim
    width than k_pe
    norm missing                         axis latent-norm
    norm over latent and k_pe together   supported where every layer has it (DeepSeek-V4); on some layers axis latent-norm
    norm over any other width            axis latent-norm
    norm's epsilon differs               served right (one per layer); soft axis norm-eps
    Gemma norm on every layer            supported: multiplied by 1 + w
    Gemma norm on some layers            axis norm-kind
    down projection joined with q_a      read from row q_lora_rank on; axis q-lora-rank
    rows that do not add up              axis q-lora-rank where joined, else kv-lora-rank
    quantised projection, any packing    axis quantization
    input norm on the context            unsupported, where a layer says so
    a compressor beside the row          unsupported
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_specdecode.errors import StackMismatchError, StackUnsupportedError
from pytest_specdecode.fused_kv.stack import (
    DTYPES,
    LayerFacts,
    Limits,
    axis_mismatch,
    common_facts,
    differ,
    dtype_limit,
    due_values,
    first_known,
    int_attribute,
    mismatch,
    norm_kind_limit,
    norm_width_of,
    plain_shape,
    quantization_limit,
    rope_facts,
    table_limit,
    table_mismatches,
    unsupported,
)

#: What all layers of a latent stack must agree in. Each has a validator here, a strategy and a line in the documentation.
LATENT_AXES = (
    "kv-lora-rank",
    "qk-rope-head-dim",
    "rope-style",
    "rope-theta",
    "rope-scaling",
    "hidden-size",
    "dtype",
    "bias",
    "latent-norm",
    "norm-kind",
    "q-lora-rank",
    "quantization",
)

#: What layers may differ in here, though an engine may take it from layer 0.
LATENT_SOFT_AXES = ("norm-eps",)

#: The down projection, and the same with Q's rows before it.
PROJECTION, JOINED_PROJECTION = "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa"
#: What DeepSeek-V4's engines call the two.
ROW_PROJECTIONS = ("wkv", "fused_wqa_wkv")

#: Each by its name, and whether Q's rows are in it.
_PROJECTIONS = {PROJECTION: False, JOINED_PROJECTION: True, **dict(zip(ROW_PROJECTIONS, (False, True), strict=True))}


@dataclass(frozen=True, kw_only=True)
class LatentFacts:
    """What one layer says of itself, as far as the latent stack is concerned. None means unknown, and an unknown is compared with nothing.

    Attributes:
        kv_lora_rank, qk_rope_head_dim, hidden_size: as the words of the field; hidden_size is what the down projection reads.
        is_neox_style: whether k_pe rotates in halves (i, i + half) rather than in pairs (2i, 2i + 1).
        rope_theta: base of the frequencies.
        rope_scaling: sorted (name, value) pairs as `normal_scaling` makes them; empty for unscaled.
        dtype: of the down projection's weight, such as `bfloat16`; None where it is quantised.
        bias: whether the down projection has one.
        latent_norm: `latent` (over kv_lora_rank), `whole` (over kv_lora_rank + qk_rope_head_dim), `other` (over another width), or `none`.
        norm_kind: `rms` (times w) or `gemma` (times 1 + w).
        q_lora_rank: rows of Q in a joined down projection, so the row where the latent starts; None where the projection is not joined.
        quantization: the method's name, or None where the weight is plain.
        norm_eps: epsilon of the latent's norm.
        rows: rows of the projection that holds the latent's.
        projection: name of the module that projects the row.
        norm_width: entries of the norm's weight.
        rotary_dim: lanes that the rotary object turns.
        rope_problem: why the rope table cannot be used, or None.
        rope_table: the table itself, where there is one.
        context_norm: whether the layer norms the context before projecting it.
        compressor: whether the layer keeps rows made of several tokens beside those of one.
    """

    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    is_neox_style: bool | None = None
    rope_theta: float | None = None
    rope_scaling: tuple[tuple[str, Any], ...] | None = None
    hidden_size: int | None = None
    dtype: str | None = None
    bias: bool | None = None
    latent_norm: str | None = None
    norm_kind: str | None = None
    q_lora_rank: int | None = None
    quantization: str | None = None
    norm_eps: float | None = None
    rows: int | None = None
    projection: str | None = None
    norm_width: int | None = None
    rotary_dim: int | None = None
    rope_problem: str | None = None
    rope_table: Any = field(default=None, compare=False, repr=False)
    context_norm: bool | None = None
    compressor: bool | None = None


def validate_latent(
    facts: Sequence[LatentFacts],
    *,
    kv_lora_rank: int | None,
    qk_rope_head_dim: int | None,
    is_neox_style: bool | None,
    shared_rope: LayerFacts | None = None,
) -> None:
    """Raise the first of `latent_mismatches`; arguments as there."""
    for fault in latent_mismatches(
        facts,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        is_neox_style=is_neox_style,
        shared_rope=shared_rope,
    ):
        raise fault


def latent_mismatches(
    facts: Sequence[LatentFacts],
    *,
    kv_lora_rank: int | None,
    qk_rope_head_dim: int | None,
    is_neox_style: bool | None,
    shared_rope: LayerFacts | None = None,
) -> Iterator[StackMismatchError | StackUnsupportedError]:
    """Every reason why these layers cannot be served as one latent stack, in the order in which they are to be reported.

    First the widths that the path is built with and the shared rotary object; then layer by layer, and for one layer in the order of
    `LATENT_AXES`; last what all layers agree in but the path cannot do.

    Args:
        facts: one record per layer, in order.
        kv_lora_rank, qk_rope_head_dim, is_neox_style: what the path is to be built with; None where unknown.
        shared_rope: `rope_facts` of the rotary object that serves all layers, where there is one.
    """
    yield from _widths(kv_lora_rank, qk_rope_head_dim, shared_rope)
    if not facts:
        yield StackUnsupportedError(
            "No layers to stack for fused latent path: expected at least one.", expected=1, got=0
        )
        return
    built_with = {
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "is_neox_style": is_neox_style,
    }
    ropes: Sequence[Any] = facts if shared_rope is None else (shared_rope, *facts)
    due = due_values(_PLAIN_AXES, facts, ropes) | {
        name: value for name, value in built_with.items() if value is not None
    }
    table = first_known(ropes, "rope_table")
    for layer, fact in enumerate(facts):
        yield from _layer_checks(layer, fact, due, table)
    yield from unsupported(facts, shared_rope, _LIMITS, qk_rope_head_dim, path="latent")


def latent_facts_of(layer: Any) -> LatentFacts:
    """The facts of one built layer, ours or an engine's: `layer.self_attn` is read, nothing is run.

    Read are `kv_a_proj_with_mqa`, or where it is absent `fused_qkv_a_proj_with_mqa` and `q_lora_rank` (of the projection `weight`, `bias`,
    `quant_method`), `kv_a_layernorm`, `kv_lora_rank`, `qk_rope_head_dim` and `rotary_emb`; of a DeepSeek-V4 layer `wkv` or `fused_wqa_wkv`,
    `kv_norm` and `head_dim` in the same places (see `latent_widths_of`), and `compressor`. An attribute that is absent is unknown, but an
    absent norm is `none`.
    """
    attn = layer.self_attn
    kv_lora_rank, rope_dim = latent_widths_of(attn)
    rope = rope_facts(getattr(attn, "rotary_emb", None), rope_dim)
    projection, is_joined = down_projection_of(attn)
    norm = row_norm_of(attn)
    width = norm_width_of(norm)
    return LatentFacts(
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=rope_dim,
        latent_norm=_norm_place(width, kv_lora_rank, rope_dim),
        q_lora_rank=int_attribute(attn, "q_lora_rank") if is_joined else None,
        rows=plain_shape(projection)[0],
        projection=projection_name_of(attn),
        norm_width=width,
        context_norm=any(getattr(part, "supports_fused_context_kv", True) is False for part in (layer, attn)),
        compressor=getattr(attn, "compressor", None) is not None,
        **common_facts(projection, norm, rope),
    )


def projection_name_of(attn: Any) -> str | None:
    """Under which name the module lies whose weight has the latent's rows; None where there is none."""
    return next((name for name in _PROJECTIONS if getattr(attn, name, None) is not None), None)


def down_projection_of(attn: Any) -> tuple[Any, bool]:
    """The module whose weight has the latent's rows, or None, and whether Q's rows stand before them."""
    name = projection_name_of(attn)
    return (None, False) if name is None else (getattr(attn, name), _PROJECTIONS[name])


def row_norm_of(attn: Any) -> Any:
    """The norm of the latent or of the whole row, or None."""
    norm = getattr(attn, "kv_a_layernorm", None)
    return getattr(attn, "kv_norm", None) if norm is None else norm


def norm_name(fact: LatentFacts) -> str:
    """What the layer's norm is called, for messages."""
    return "kv_norm" if fact.projection in ROW_PROJECTIONS else "kv_a_layernorm"


def latent_widths_of(attn: Any) -> tuple[int | None, int | None]:
    """kv_lora_rank and qk_rope_head_dim of a layer's attention, each None where it is not said.

    DeepSeek-V4's layers, told by their projection, say `head_dim`, the width of the whole row: their kv_lora_rank is what does not rotate.
    """
    rope_dim = int_attribute(attn, "qk_rope_head_dim")
    if projection_name_of(attn) not in ROW_PROJECTIONS:
        return int_attribute(attn, "kv_lora_rank"), rope_dim
    if rope_dim is None:
        rope_dim = int_attribute(attn, "rope_head_dim")
    row = int_attribute(attn, "head_dim")
    return None if row is None or rope_dim is None else row - rope_dim, rope_dim


def _norm_place(width: int | None, rank: int | None, rope_dim: int | None) -> str | None:
    """What a norm of `width` goes over; None where the row's widths do not tell."""
    if width is None:
        return "none"
    if width == rank:
        return "latent"
    if rank is None or rope_dim is None:
        return None
    return "whole" if width == rank + rope_dim else "other"


def valid_rope_width(qk_rope_head_dim: int) -> bool:
    """Whether so many lanes can rotate."""
    return qk_rope_head_dim > 0 and qk_rope_head_dim % 2 == 0


# --- the checks ------------------------------------------------------------------------------------------------------------------------


def _widths(
    kv_lora_rank: int | None, qk_rope_head_dim: int | None, shared_rope: LayerFacts | None
) -> Iterator[StackMismatchError]:
    rank_fits = kv_lora_rank is None or kv_lora_rank > 0
    rope_fits = qk_rope_head_dim is None or valid_rope_width(qk_rope_head_dim)
    if not rank_fits or not rope_fits:
        yield StackMismatchError(
            f"Invalid fused latent widths: kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}.",
            axis="qk-rope-head-dim" if rank_fits else "kv-lora-rank",
            expected="even, above 0" if rank_fits else "above 0",
            got=qk_rope_head_dim if rank_fits else kv_lora_rank,
        )
    if shared_rope is not None and differ(qk_rope_head_dim, shared_rope.rotary_dim):
        yield StackMismatchError(
            f"Invalid fused latent rotary/rope dim pair: rotary_dim={shared_rope.rotary_dim}, qk_rope_head_dim={qk_rope_head_dim}.",
            axis="qk-rope-head-dim",
            expected=qk_rope_head_dim,
            got=shared_rope.rotary_dim,
        )


#: Axis, attribute of LatentFacts, and the word for it in a message, in the order of LATENT_AXES.
_PLAIN_AXES = (
    ("kv-lora-rank", "kv_lora_rank", "kv_lora_rank"),
    ("qk-rope-head-dim", "qk_rope_head_dim", "qk_rope_head_dim"),
    ("rope-style", "is_neox_style", "is_neox_style"),
    ("rope-theta", "rope_theta", "rope_theta"),
    ("rope-scaling", "rope_scaling", "rope_scaling"),
    ("hidden-size", "hidden_size", "hidden_size"),
    ("dtype", "dtype", "kv_a weight dtype"),
    ("bias", "bias", "kv_a bias"),
    ("latent-norm", "latent_norm", "latent norm"),
    ("norm-kind", "norm_kind", "norm kind"),
    ("q-lora-rank", "q_lora_rank", "q_lora_rank"),
    ("quantization", "quantization", "quantization"),
)


def _layer_checks(
    layer: int, fact: LatentFacts, due: dict[str, Any], table: Any
) -> Iterator[StackMismatchError | StackUnsupportedError]:
    rank, rope_dim = due["kv_lora_rank"], due["qk_rope_head_dim"]
    for axis, name, what in _PLAIN_AXES:
        fault = axis_mismatch(axis, what, due[name], getattr(fact, name), layer, path="latent")
        if fault is not None:
            yield fault
        elif axis == "qk-rope-head-dim" and differ(rope_dim, fact.rotary_dim):
            yield mismatch("rotary_dim", axis, rope_dim, fact.rotary_dim, layer, path="latent")
        elif axis == "rope-scaling" and not differ(due["rope_theta"], fact.rope_theta):
            yield from table_mismatches(layer, fact, table, rope_dim, width_axis="qk-rope-head-dim", path="latent")
        elif axis == "q-lora-rank":
            yield from _row_check(layer, fact, rank, rope_dim)


def _row_check(layer: int, fact: LatentFacts, rank: int | None, rope_dim: int | None) -> Iterator[StackMismatchError]:
    if fact.rows is None or rank is None or rope_dim is None:
        return
    if differ(rank, fact.kv_lora_rank) or differ(rope_dim, fact.qk_rope_head_dim):
        return
    before = fact.rows - rank - rope_dim
    if before == (fact.q_lora_rank or 0):
        return
    is_joined = fact.q_lora_rank is not None
    name = fact.projection or (JOINED_PROJECTION if is_joined else PROJECTION)
    what, due, got = ("q_lora_rank", before, fact.q_lora_rank) if is_joined else ("kv_lora_rank", rank + before, rank)
    yield StackMismatchError(
        f"{what} mismatch for fused latent path: expected {due} ({name}.weight has {fact.rows} rows, of which latent and k_pe take "
        f"{rank} + {rope_dim}), got {got} at layer {layer}.",
        axis=what.replace("_", "-"),
        expected=due,
        got=got,
        layer=layer,
    )


_NORMS = ("latent", "whole")


def _no_norm_limit(fact: LatentFacts, head_dim: int | None) -> Any:
    return f"{norm_name(fact)}=none" if fact.latent_norm == "none" else None


def _other_norm_limit(fact: LatentFacts, head_dim: int | None) -> Any:
    if fact.latent_norm in (None, "none", "latent", "whole"):
        return None
    width = "another width" if fact.norm_width is None else f"{fact.norm_width} features"
    return f"{norm_name(fact)} over {width}"


def _context_norm_limit(fact: LatentFacts, head_dim: int | None) -> Any:
    return "supports_fused_context_kv=False" if fact.context_norm else None


def _compressor_limit(fact: LatentFacts, head_dim: int | None) -> Any:
    return "a compressor" if fact.compressor else None


_LIMITS: Limits = (
    ("rope-scaling", "cos_sin_cache [positions, qk_rope_head_dim]", "RoPE without a usable table", table_limit),
    ("dtype", DTYPES, "a kv_a weight of this dtype", dtype_limit),
    ("latent-norm", _NORMS, "attention without a norm of the latent", _no_norm_limit),
    ("latent-norm", _NORMS, "a norm over anything but the latent or the whole row", _other_norm_limit),
    ("norm-kind", ("rms", "gemma"), "this kind of kv_a_layernorm", norm_kind_limit),
    ("quantization", None, "a quantized down projection", quantization_limit),
    ("context-norm", False, "a norm of the context inside each layer", _context_norm_limit),
    ("compressor", False, "a cache with further rows that are made of several tokens each", _compressor_limit),
)
