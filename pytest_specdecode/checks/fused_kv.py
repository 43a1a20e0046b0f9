"""Can the K/V projections of all layers be served as one stack, and is the stack's kernel right on these weights?

One check per homogeneity axis, from the configuration and the headers alone: the same validators that a built stack runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pytest_specdecode import engines
from pytest_specdecode.checks.keys import layer_key
from pytest_specdecode.checks.registry import Context, Inconclusive, check, require_layers
from pytest_specdecode.engines.base import Declined, falls_back, serves_wrong, stops
from pytest_specdecode.errors import DraftError, FusedKVError, StackUnsupportedError
from pytest_specdecode.families.quantised import PLAIN_FLOATS
from pytest_specdecode.findings import Finding, Outcome
from pytest_specdecode.fused_kv.stack import AXES, LayerFacts, mismatches, normal_scaling
from pytest_specdecode.fused_kv.tensor_parallel import rank_layers, why_not_divided
from pytest_specdecode.spec import DraftSpec, GQASpec, LayerSpec

#: Numbers of tensor-parallel ranks that drafts are served with.
_RANKS = (1, 2, 4, 8)
_VALUE_SCALE = "attention_value_scale"
#: The families that `no_stack` leaves, in words.
_APPLIES = "block drafts with K/V heads"

#: What each axis means, for titles and documentation.
MEANING: dict[str, str] = {
    "num-kv-heads": "number of KV heads",
    "head-dim": "width of a K head",
    "rotary-dim": "leading lanes of a head that rotate, an even number within the head",
    "rope-style": "rotation of halves (neox) or of interleaved pairs",
    "rope-theta": "base of the rotary frequencies",
    "rope-scaling": "type and fields of the RoPE scaling",
    "hidden-size": "width that the projections read",
    "dtype": "dtype of the projections",
    "bias": "bias on the K and V projections",
    "k-norm": "a norm over each K head",
    "norm-kind": "norm that multiplies by w or by 1 + w",
    "v-head-dim": "width of a V head",
    "value-scale": "factor on V",
    "q-size": "row of the fused weight at which K starts",
    "quantization": "quantisation of the projections",
}


def no_stack(context: Context) -> str | None:
    """Why the draft has no stacked path; the configuration settles it, whatever of the weights is missing."""
    return context.draft.fused_kv_reason


def _outcome(context: Context, name: str, fault: FusedKVError) -> Outcome:
    """What an engine does about a difference; where it comes of a missing norm, what it does about the missing tensor."""
    engine, binding = engines.ENGINES[name], context.draft.binding
    own = engine.outcome(f"fused-kv-{fault.axis}", context.spec)
    absent = set() if binding is None else {tensor.name for tensor in binding.missing}
    if fault.axis != "k-norm" or not any(name.endswith("self_attn.k_norm.weight") for name in absent):
        return own
    missing = engine.outcome("tensor-missing", context.spec)
    return own if missing.outcome == "unknown" else missing


def axis_check(axis: str) -> Callable[[Context], Iterator[Finding]]:
    """The check of one axis: every layer that breaks it, in one finding."""

    def run(context: Context) -> Iterator[Finding]:
        faults = [fault for fault in _faults(context) if fault.axis == axis]
        if not faults:
            return
        # What all layers share and the stack does not do costs speed; only a difference can be served wrong.
        differing = [fault for fault in faults if not isinstance(fault, StackUnsupportedError)]
        first = (differing or faults)[0]
        say = context.fail if differing else context.warn
        yield say(
            first.message,
            where=_places(faults),
            got=first.got,
            due=first.expected,
            fix="give every layer the same, or serve the draft layer by layer"
            if differing
            else "nothing, where serving layer by layer is fast enough",
            fault=f"fused-kv-{axis}",
            outcomes={name: _outcome(context, name, first) for name in context.engines},
        )

    return run


for _axis in AXES:
    check(
        f"fused-kv.{_axis}",
        title=f"all layers agree in the {MEANING[_axis]}",
        why="The stacked path takes it from one place for all layers.",
        needs=("config", "headers"),
        unless=no_stack,
        applies=_APPLIES,
        faults=(f"fused-kv-{_axis}",),
        example=f"a layer after the first whose {MEANING[_axis]} is not layer 0's",
        fix="export every layer alike, or serve the draft layer by layer",
    )(axis_check(_axis))


@check(
    "fused-kv.norm-eps",
    title="all layers agree in the epsilon of k_norm",
    why="A path that takes one epsilon for all layers norms small keys wrong.",
    severity="warning",
    needs=("config", "headers"),
    unless=no_stack,
    applies=_APPLIES,
    faults=("fused-kv-norm-eps",),
    example="rms_norm_eps that one layer states otherwise",
    fix="state one epsilon for all layers",
)
def norm_eps(context: Context) -> Iterator[Finding]:
    """Layers whose epsilon is not layer 0's."""
    facts = _facts(context)
    other = [index for index, fact in enumerate(facts) if fact.norm_eps != facts[0].norm_eps]
    if other:
        yield context.warn(
            "k_norm's epsilon differs between layers",
            where=f"layers {', '.join(map(str, other))}",
            got=facts[other[0]].norm_eps,
            due=facts[0].norm_eps,
            fault="fused-kv-norm-eps",
        )


@check(
    "fused-kv.matches-reference",
    title="the stacked kernel equals the float64 reference on this checkpoint's weights",
    why="Acceptance is the only other thing that a wrong context K/V changes, and it falls without an error.",
    needs=("headers", "tensors", "triton"),
    unless=no_stack,
    applies=_APPLIES,
    example="none from a checkpoint whose layers build: it guards the kernel on these weights",
    fix="report it, with the checkpoint, as a defect of this library",
)
def matches_reference(context: Context) -> Iterator[Finding]:
    """K within eager's own error of the truth, V bit for bit, at positions near and far."""
    require_layers(context)
    if context.fused_kv is not None and not context.fused_kv.is_ours:
        from pytest_specdecode.checks.fused_kv_subject import own_layers

        yield from own_layers(context)
        return
    from pytest_specdecode.launch import triton_missing

    if (reason := triton_missing()) is not None:
        raise Inconclusive(f"the kernel cannot run: {reason}")
    import torch

    from pytest_specdecode.checks.figures import error_by_head
    from pytest_specdecode.fused_kv.reference import eager_kv, fused_kv_reference
    from pytest_specdecode.memory import guarded
    from pytest_specdecode.numerics import NumericsError, assert_close, assert_exact

    try:
        layers = context.draft.layers(device=context.device)
        stack = context.draft.fused_kv(layers=layers, device=context.device)
    except FusedKVError as error:
        raise Inconclusive(f"the layers are no stack: {error}; see fused-kv.{error.axis}") from None
    except DraftError as error:
        raise Inconclusive(f"a layer does not build: {error}; see layers.build") from None
    generator = torch.Generator().manual_seed(20240607)
    last = min(layers[0].self_attn.rotary_emb.max_position_embeddings or 2048, 32768) - 1
    positions = torch.tensor([0, 1, 2, 7, 7, 5, 64, last // 3, last], device=context.device)
    hidden = torch.randn(len(positions), stack.hidden_size, generator=generator, dtype=torch.float32)
    # One row small enough for the norm's epsilon to count.
    hidden[3] *= 1e-3
    hidden = hidden.to(device=context.device, dtype=stack.dtype)
    with guarded():
        k, v = stack.compute(hidden, positions)
    truth_k, truth_v = fused_kv_reference(layers, hidden, positions)
    eager_k, eager_v = eager_kv(layers, hidden, positions)
    context.figures["fused-kv.matches-reference"] = {
        "k_error": error_by_head(k, truth_k),
        "k_eager": error_by_head(eager_k, truth_k),
        "v_error": error_by_head(v, truth_v),
        "v_eager": error_by_head(eager_v, truth_v),
    }
    try:
        measured = assert_close(k, truth_k, eager_k, what="K", reduction_sizes=(stack.hidden_size, stack.head_dim))
        assert_close(v, truth_v, eager_v, what="V", reduction_sizes=(stack.hidden_size,))
        if stack.value_scale == 1.0:
            # A GEMM over all layers may sum in another order than one per layer, so V is held bit for bit against the stack's own.
            heads = stack.project(hidden).view(*k.shape[1::-1], 2, stack.num_kv_heads, stack.head_dim)
            assert_exact(v, heads[:, :, 1].transpose(0, 1), what="V")
    except NumericsError as error:
        yield context.fail(
            str(error),
            where=f"fused {error.what}: {error.place}".removesuffix(": "),
            got=error.got,
            due=error.due,
        )
        return
    context.notes["fused-kv.matches-reference"] = (
        f"K's error is {measured.rms_ratio:.2f} of eager's, V is the projection's bit for bit ({stack.backend})"
        if stack.value_scale == 1.0
        else f"K's error is {measured.rms_ratio:.2f} of eager's ({stack.backend})"
    )


@check(
    "fused-kv.tensor-parallel",
    title="stacks sliced for tensor-parallel ranks rebuild the whole; heads divide among the ranks or are replicated",
    why="A rank that holds other rows than it believes fills its part of the cache with another head's keys.",
    needs=("config", "headers", "tensors"),
    unless=no_stack,
    applies=_APPLIES,
    faults=("tensor-parallel-heads",),
    example="10 query heads and 2 KV heads, served with tp=4",
    fix="serve the draft with a number of ranks that its heads allow",
)
def tensor_parallel(context: Context) -> Iterator[Finding]:
    """The counts of heads for each number of ranks, an error only where that number is asked for; then K and V of every rank's stack."""
    facts, asked = _facts(context), context.serve["tp"]
    counts = sorted({*_RANKS, *([asked] if asked is not None and asked > 0 else [])})
    refused = {ranks: reason for ranks in counts if (reason := _undivided(context, facts, ranks)) is not None}
    if asked in refused:
        first = context.spec.layers[0].attention
        yield context.fail(
            refused[asked],
            where=f"config.json: {layer_key(context, 'num_attention_heads')}, {layer_key(context, 'num_key_value_heads')}",
            got={"tp": asked, "heads": getattr(first, "num_heads", None), "KV heads": facts[0].num_kv_heads},
            due=f"tp of {', '.join(str(ranks) for ranks in counts if ranks not in refused)}",
            fix="start the server with one of those, or leave the draft on one rank where the engine can",
            fault="tensor-parallel-heads",
        )
    if not context.draft.checkpoint.has_weights:
        return
    shared = [ranks for ranks in counts if ranks not in refused]
    yield from _sliced(context, [ranks for ranks in shared if ranks > 1])
    context.notes["fused-kv.tensor-parallel"] = f"{', '.join(map(str, shared))} ranks rebuild the whole" + "".join(
        f"; not {ranks}: {reason}" for ranks, reason in refused.items()
    )


@check(
    "fused-kv.engine-path",
    title="engines that have a fused path use it for this draft, and fill the cache right",
    why="Without the path every committed token costs a pass per layer, and where it is used on what it does not read, K or V is wrong.",
    severity="warning",
    needs=("config", "headers"),
    unless=no_stack,
    applies=_APPLIES,
    example={"family": "dspark", "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
    fix="nothing, where serving layer by layer is fast enough; else give the layers the form that the engine's path takes",
)
def engine_path(context: Context) -> Iterator[Finding]:
    """For each engine whether it takes the path, else its reason; a warning where it says nothing of it, or takes it and is wrong."""
    faults = [fault for fault in _faults(context) if not isinstance(fault, StackUnsupportedError)]
    said: list[str] = []
    for name in context.engines:
        engine = engines.ENGINES[name]
        if engine.fused_path is None:
            continue
        reason = engine.fused_path(context.draft)
        how = reason.how if isinstance(reason, Declined) else "logged"
        if reason is None:
            said.append(f"{engine.title} uses its fused path")
            wrong: dict[str, tuple[FusedKVError, Outcome]] = {}
            for fault in faults:
                if (found := _outcome(context, name, fault)).outcome == "serves wrong":
                    wrong.setdefault(str(fault.axis).replace("-", "_"), (fault, found))
            ignored = [item for item in engine.ignored(context.draft) if item.key.rpartition(".")[2] == _VALUE_SCALE]
            if wrong or ignored:
                texts = [outcome.message for _, outcome in wrong.values()] + [item.instead for item in ignored]
                yield context.warn(
                    f"{engine.title} uses its fused path and fills the cache wrong: {'; '.join(dict.fromkeys(texts))}",
                    where=_places([fault for fault, _ in wrong.values()]) or f"config.json: {ignored[0].key}",
                    got={axis: fault.got for axis, (fault, _) in wrong.items()}
                    or {item.key: engines.at(context.draft.checkpoint.config, item.key) for item in ignored},
                    due={axis: fault.expected for axis, (fault, _) in wrong.items()} or "what the path reads",
                    fix="see the checks of the fused K/V's axes" if wrong else "serve with an engine that reads it",
                    outcomes={
                        name: next(
                            (found for _, found in wrong.values()),
                            serves_wrong(texts[0], ignored[0].source if ignored else ""),
                        )
                    },
                )
            continue
        said.append(f"{engine.title} {'' if how == 'absent' else 'does not: '}{reason}")
        # What an engine logs, the checks of the axes show; it counts here where the engine was chosen.
        if how in ("silent", "stops") or (how == "logged" and context.judged):
            make = stops if how == "stops" else falls_back
            yield context.warn(
                f"{engine.title} does not use its fused path: {reason}",
                where="config.json",
                got=str(reason),
                due="the fused path",
                fix="give the layers the form that the path takes, where serving layer by layer is too slow",
                outcomes={name: make(str(reason))},
            )
    context.notes["fused-kv.engine-path"] = "; ".join(said)


def _places(faults: Sequence[FusedKVError]) -> str:
    """The layers that the faults are in; empty where none is one layer's."""
    layers = sorted({fault.layer for fault in faults if fault.layer is not None})
    if not layers:
        return ""
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"


def _undivided(context: Context, facts: list[LayerFacts], ranks: int) -> str | None:
    """Why `ranks` ranks cannot share the heads of some layer, or None where they can or the counts are not known."""
    for layer, fact in zip(context.spec.layers, facts, strict=True):
        heads, kv_heads = getattr(layer.attention, "num_heads", None), fact.num_kv_heads
        if heads and kv_heads and (reason := why_not_divided(heads, kv_heads, ranks)) is not None:
            return reason
    return None


def _sliced(context: Context, counts: list[int]) -> Iterator[Finding]:
    """K and V of the ranks' stacks, put together, against the whole stack's; ranks that share a head agree bit for bit."""
    import torch

    from pytest_specdecode.fused_kv.reference import fused_kv_reference
    from pytest_specdecode.numerics import NumericsError, assert_close, assert_exact

    try:
        layers = context.draft.layers(device=context.device)
        context.draft.fused_kv(layers=layers, device=context.device)
    except FusedKVError as error:
        raise Inconclusive(f"the layers are no stack: {error}; see fused-kv.{error.axis}") from None
    except DraftError as error:
        raise Inconclusive(f"a layer does not build: {error}; see layers.build") from None
    whole = _path(context, layers)
    last = min(layers[0].self_attn.rotary_emb.max_position_embeddings or 2048, 32768) - 1
    positions = torch.tensor([0, 3, 1, last], device=context.device)
    generator = torch.Generator().manual_seed(20240607)
    hidden = torch.randn(len(positions), whole.hidden_size, generator=generator).to(context.device, whole.dtype)
    due, base = fused_kv_reference(layers, hidden, positions), _computed(context, whole, hidden, positions)
    for ranks in counts:
        pieces = []
        for rank in range(ranks):
            piece = _path(context, rank_layers(layers, ranks, rank))
            pieces.append(_computed(context, piece, hidden, positions))
        copies = max(1, ranks // whole.num_kv_heads)
        try:
            for part, name in enumerate("KV"):
                joined = torch.cat([piece[part] for piece in pieces[::copies]], dim=2)
                assert_close(
                    joined, due[part], base[part], what=f"{name} of {ranks} ranks", reduction_sizes=(whole.hidden_size,)
                )
                for rank, pair in enumerate(pieces):
                    twin = pieces[rank - rank % copies][part]
                    assert_exact(pair[part], twin, what=f"{name} of rank {rank} of {ranks}")
        except NumericsError as error:
            yield context.fail(
                str(error),
                where=", ".join(
                    context.draft.stored_name(f"layers.{context.spec.layers[0].index}.self_attn.{part}.weight")
                    for part in ("k_proj", "v_proj")
                ),
                got=error.got,
                due=error.due,
                fix="look at the order of the rows of K and V: all heads of K, then all heads of V",
            )


def _path(context: Context, layers: Sequence[Any]) -> Any:
    """The stacked path over `layers`: ours, or that of the implementation which is held to account.

    Raises:
        Inconclusive: that implementation does not serve them.
    """
    from pytest_specdecode.fused_kv.path import FusedKV
    from pytest_specdecode.trials import Served, error_text

    subject = context.fused_kv
    try:
        return Served(FusedKV if subject is None else subject.build, layers, context.device)
    except Exception as error:
        if subject is None or subject.is_ours:
            raise
        raise Inconclusive(f"{subject.name} does not serve these layers: {error_text(error)}") from None


def _computed(context: Context, path: Any, hidden: Any, positions: Any) -> Any:
    """K and V of every layer.

    Raises:
        Inconclusive: the implementation that is held to account breaks, or hands over none.
    """
    from pytest_specdecode.trials import error_text

    subject = context.fused_kv
    try:
        return path.compute(hidden, positions)
    except Exception as error:
        if subject is None or subject.is_ours:
            raise
        raise Inconclusive(f"{subject.name} does not compute these layers: {error_text(error)}") from None


def _faults(context: Context) -> list[FusedKVError]:
    facts = _facts(context)
    first = facts[0]
    return list(
        mismatches(
            facts,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            rotary_dim=first.rotary_dim,
            is_neox_style=first.is_neox_style,
            # Our own stack rotates pairs; that engines' stacks do not is what is to be reported.
            interleaved=False,
        )
    )


def _facts(context: Context) -> list[LayerFacts]:
    require_layers(context)
    return [_layer_facts(context, context.spec, layer) for layer in context.spec.layers]


def _layer_facts(context: Context, spec: DraftSpec, layer: LayerSpec) -> LayerFacts:
    """The facts of one layer: from its tensors where they say, else from the spec."""
    attention = layer.attention
    assert isinstance(attention, GQASpec)
    prefix = f"layers.{layer.index}.self_attn"

    def shape(name: str) -> tuple[int, ...] | None:
        shape = context.draft.shape(f"{prefix}.{name}") or ()
        known = tuple(extent for extent in shape if extent is not None)
        return known if known and len(known) == len(shape) else None

    q, k, v, norm = (shape(f"{name}.weight") for name in ("q_proj", "k_proj", "v_proj", "k_norm"))
    joined = shape("qkv_proj.weight") if attention.fused_qkv else None
    stem = "k_proj" if joined is None else "qkv_proj"
    head_dim = attention.head_dim
    if norm is not None and len(norm) == 1 and (joined is not None or (k is not None and norm != (k[0],))):
        head_dim = norm[0]
    kv_heads = attention.num_kv_heads
    if k is not None and head_dim:
        kv_heads = k[0] // head_dim
    weight = context.draft.header(f"{prefix}.{stem}.weight")
    stored = context.draft.checkpoint.has_weights
    # A layer whose projection is not in the weights says nothing of its own; weights.missing reports it.
    held = weight is not None
    return LayerFacts(
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=attention.rope.rotary_dim,
        is_neox_style=attention.rope.is_neox_style,
        rope_theta=attention.rope.theta,
        rope_scaling=normal_scaling({**attention.rope.scaling, "rope_type": attention.rope.rope_type}),
        hidden_size=next(
            (found[1] for found in (k, joined) if found is not None and len(found) == 2), attention.in_features
        ),
        dtype=weight.dtype if weight is not None and weight.dtype in PLAIN_FLOATS else None,
        bias=(shape(f"{stem}.bias") is not None if held else None) if stored else attention.qkv_bias,
        k_norm=(_norm_place(norm, head_dim) if held else None) if stored else _NORM_PLACE[attention.qk_norm],
        norm_kind=layer.norm_kind,
        v_head_dim=None if v is None or not kv_heads else v[0] // kv_heads,
        value_scale=attention.value_scale,
        q_size=q[0] if q is not None else _product(attention.num_heads, head_dim),
        quantization=_quantization(context, f"{prefix}.{stem}"),
        norm_eps=layer.norm_eps,
        k_norm_width=None if norm is None else norm[0],
        qkv_rows=None if joined is None else joined[0],
    )


_NORM_PLACE = {True: "per-head", False: "none"}


def _norm_place(norm: tuple[int, ...] | None, head_dim: int | None) -> str:
    if norm is None:
        return "none"
    return "per-head" if head_dim is None or norm == (head_dim,) else "whole"


def _quantization(context: Context, stem: str) -> str | None:
    """The method, where the projection `stem` that holds this layer's K is stored in a form that is not plain."""
    binding, name = context.draft.binding, f"{stem}.weight"
    header, form = context.draft.header(name), None if binding is None else binding.storage.forms.get(name)
    if binding is None or header is None or form is None or form.kind == "plain":
        return None
    under = form.holder.rpartition(".")[2]
    return binding.storage.scheme.method or (header.dtype if form.holder == name else under)


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other
