"""Is an implementation of the stacked K/V path, ours or an engine's, right on this draft's own layers?

These checks run against what --draft-fused-kv names. Ours is held to all of it by this library's tests, so where nothing is named it is
only held to the numbers, by `fused-kv.matches-reference`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_specdecode.checks.fused_kv import MEANING, _faults, _layer_facts, no_stack
from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check, require_layers
from pytest_specdecode.checks.subject import Subject
from pytest_specdecode.errors import DraftError, StackUnsupportedError
from pytest_specdecode.findings import Finding
from pytest_specdecode.fused_kv.stack import AXES
from pytest_specdecode.spec import GQASpec

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_specdecode.numerics import NumericsError
    from pytest_specdecode.trials import Trial

_MATCHES = "fused-kv.matches-reference"
_APPLIES = "block drafts with K/V heads, with --draft-fused-kv"
_NO_SUBJECT = "for an implementation that is named: --draft-fused-kv=MODULE:CLASS"


def no_subject(context: Context) -> str | None:
    """Why nothing is held to account here."""
    return no_stack(context) or (_NO_SUBJECT if context.fused_kv is None else None)


# --- the draft's layers as they are -------------------------------------------------------------------------------------------------------


def own_layers(context: Context) -> Iterator[Finding]:
    """What the subject makes of the draft's own layers: K and V of each, or the error by which it refuses them."""
    subject, layers = _subject(context), built_layers(context)
    differing = [fault for fault in _faults(context) if not isinstance(fault, StackUnsupportedError)]
    axes = list(dict.fromkeys(str(fault.axis) for fault in differing))
    where = f"layer {differing[0].layer}" if differing and differing[0].layer is not None else "all layers"
    which = f"this draft's layers, which differ in {' and '.join(axes)}" if axes else "this draft's layers"
    trial = tried(context, subject, layers)
    context.figures[_MATCHES] = {"subject": subject.name, **_errors(layers, trial, *inputs(context, layers))}
    if trial.kind == "refused":
        yield context.warn(
            f"{subject.name} refuses {which}: {trial.text}",
            where=where if trial.layer is None else f"layer {trial.layer}",
            got=trial.text,
            due="K and V of every layer",
            fix="nothing, where its caller then serves layer by layer; else give every layer the same"
            if axes
            else "nothing, where its caller then serves layer by layer",
        )
    elif trial.kind == "broke":
        yield context.fail(
            f"{subject.name} breaks on {which}: {trial.text}",
            where=where,
            got=trial.text,
            due="K and V of every layer, or a ValueError that says why not",
            fix="refuse at construction what cannot be served",
        )
    elif trial.kind == "wrong":
        element = _element(layers, trial.kv, *inputs(context, layers))
        yield context.fail(
            f"{subject.name} serves {which} wrong: {trial.text}{'' if element is None else f'; {element}'}",
            where=trial.text.partition(":")[0],
            got=trial.text if element is None else element.got,
            due="each layer's own K and V" if element is None else element.due,
            fix="refuse such layers at construction, or compute each with its own" if axes else "",
        )
    else:
        context.notes[_MATCHES] = f"{subject.name}: {_closeness(layers, trial, *inputs(context, layers))}"


def tried(context: Context, subject: Subject, layers: Sequence[Any]) -> Trial:
    """The subject's trial on the draft's layers as they are; done once."""
    from pytest_specdecode.trials import try_layers

    key = "fused-kv.trial"
    if key not in context.memo:
        context.memo[key] = try_layers(subject.build, layers, *inputs(context, layers))
    found: Trial = context.memo[key]
    return found


def built_layers(context: Context) -> tuple[Any, ...]:
    """The draft's layers, each as its tensors say where they contradict the configuration, with tables as long as an engine makes them.

    Raises:
        Inconclusive: a layer does not build.
    """
    require_layers(context)
    layers = tuple(_built_layer(context, index) for index in range(len(context.spec.layers)))
    for layer in layers:
        # Not every path can grow a table that it was given.
        if (grow := getattr(layer.self_attn.rotary_emb, "_ensure_cos_sin_cache_length", None)) is not None:
            grow(_last(layers))
    return layers


def _built_layer(context: Context, index: int) -> Any:
    draft, spec = context.draft, context.spec
    try:
        return draft.layer(index, device=context.device)
    except DraftError as error:
        first = error
    layer = spec.layers[index]
    facts, attention = _layer_facts(context, spec, layer), layer.attention
    assert isinstance(attention, GQASpec)
    assert draft.family is not None
    seen = dataclasses.replace(
        attention, num_kv_heads=facts.num_kv_heads, head_dim=facts.head_dim, qkv_bias=bool(facts.bias)
    )
    try:
        source = draft.source(device=context.device)
        return draft.family.build_layer(spec, dataclasses.replace(layer, attention=seen), source)
    except DraftError:
        raise Inconclusive(f"a layer does not build: {first}; see layers.build") from None


def inputs(context: Context, layers: Sequence[Any], seed: int = 20240607) -> tuple[Tensor, Tensor]:
    """Nine hidden states, one of them small enough for the norm's epsilon to count, and positions near and far."""
    last = _last(layers)
    ctx = _hidden(context, layers, 9, seed).clone()
    ctx[3] *= 1e-3
    return ctx, _at(context, [0, 1, 2, 7, 7, 5, 64, last // 3, last], last)


def _errors(layers: Sequence[Any], trial: Trial, ctx: Tensor, positions: Tensor) -> dict[str, Any]:
    """The errors of K and V per layer and head and those of eager code, for the report; nothing where layers are of several shapes."""
    import torch

    from pytest_specdecode.checks.figures import error_by_head
    from pytest_specdecode.fused_kv.reference import eager_kv, fused_kv_reference

    shapes = {(k.shape, v.shape) for k, v in trial.kv.values()}
    if sorted(trial.kv) != list(range(len(layers))) or len(shapes) != 1:
        return {}
    found: dict[str, Any] = {}
    for part, name in enumerate("kv"):
        got = torch.stack([trial.kv[index][part] for index in range(len(layers))])
        try:
            truth, eager = (run(layers, ctx, positions)[part] for run in (fused_kv_reference, eager_kv))
        except Exception:
            return {}
        if got.shape != truth.shape:
            return {}
        found |= {f"{name}_error": error_by_head(got, truth), f"{name}_eager": error_by_head(eager, truth)}
    return found


def _element(
    layers: Sequence[Any], kv: Mapping[int, tuple[Tensor, Tensor]], ctx: Tensor, positions: Tensor
) -> NumericsError | None:
    """The worst element of the first layer that is wrong, with eager's error and the bound; None where it is not the numbers."""
    from pytest_specdecode.fused_kv.reference import eager_kv, fused_kv_reference
    from pytest_specdecode.numerics import NumericsError, assert_close

    for index, layer in enumerate(layers):
        if index not in kv:
            continue
        try:
            truth, eager = fused_kv_reference([layer], ctx, positions), eager_kv([layer], ctx, positions)
            for name, got, due, base in zip("KV", kv[index], truth, eager, strict=True):
                sizes = (ctx.shape[1], layer.self_attn.head_dim)
                assert_close(got.to(base.dtype), due[0], base[0], what=f"layer {index}'s {name}", reduction_sizes=sizes)
        except NumericsError as error:
            return error
        except Exception:
            return None
    return None


def _closeness(layers: Sequence[Any], trial: Trial, ctx: Tensor, positions: Tensor) -> str:
    import torch

    from pytest_specdecode.fused_kv.reference import eager_kv, fused_kv_reference
    from pytest_specdecode.numerics import assert_close

    ratios = []
    for index, layer in enumerate(layers):
        sizes = (ctx.shape[1], layer.self_attn.head_dim)
        truth, eager = fused_kv_reference([layer], ctx, positions), eager_kv([layer], ctx, positions)
        ratios.append(
            [
                assert_close(trial.kv[index][part][None], truth[part], eager[part], reduction_sizes=sizes).rms_ratio
                for part in (0, 1)
            ]
        )
    k, v = torch.tensor(ratios).amax(0).tolist()
    return f"K's error is {k:.2f} of eager's, V's {v:.2f}, in the worst layer"


# --- layers of which one is odd -----------------------------------------------------------------------------------------------------------


@check(
    "fused-kv.odd-layers",
    title="the implementation refuses this draft's layers where one of them is made odd, on each axis",
    why="What it does not refuse, the next export that has it is served by, and nothing says so.",
    needs=("config", "headers", "tensors"),
    unless=no_subject,
    applies=_APPLIES,
    example="an implementation that rotates every layer's K by layer 0's table",
    fix="compare the layers at construction and refuse those that differ, or compute each with its own",
)
def odd_layers(context: Context) -> Iterator[Finding]:
    """The last layer, or a copy of the only one, made odd in one axis after another; what is served is compared layer by layer."""
    from pytest_specdecode.fused_kv.odd_layers import NoOddLayerError, odd_layer
    from pytest_specdecode.trials import try_layers

    subject, layers = _subject(context), list(built_layers(context))
    if faults := _faults(context):
        raise Skip(
            f"its layers are no stack as they are ({faults[0].axis}); fused-kv.matches-reference says what {subject.name} makes of them"
        )
    if (plain := tried(context, subject, layers)).kind != "right":
        raise Inconclusive(
            f"{subject.name} does not serve this draft's own layers; see fused-kv.matches-reference: {plain.text}"
        )
    if len(layers) == 1:
        layers = layers * 2
    odd, rope = len(layers) - 1, context.spec.layers[-1].attention.rope  # type: ignore[union-attr]
    ctx, positions = inputs(context, layers)
    figures: dict[str, dict[str, str]] = {}
    for axis in AXES:
        try:
            stack = [*layers[:-1], odd_layer(layers[-1], axis, rope)]
        except NoOddLayerError as error:
            figures[axis] = {"outcome": "left out", "detail": error.message}
            continue
        trial = try_layers(subject.build, stack, ctx[:2], positions[-2:])
        figures[axis] = {"outcome": trial.kind, "detail": trial.text}
        what = f"layers that differ in {axis} ({MEANING[axis]})"
        if trial.kind == "wrong":
            yield context.fail(
                f"{subject.name} serves {what} wrong: {trial.text}",
                where=f"layer {odd}, made odd",
                got=trial.text,
                due=f"an error that names layer {odd}",
            )
        elif trial.kind == "broke":
            yield context.warn(
                f"{subject.name} does not refuse {what}, it breaks: {trial.text}",
                where=f"layer {odd}, made odd",
                got=trial.text,
                due=f"a ValueError that names layer {odd}",
            )
        elif trial.kind == "refused" and trial.layer != odd:
            figures[axis]["detail"] += f" (layer {odd} is not named)"
    context.figures["fused-kv.odd-layers"] = {"subject": subject.name, "axes": figures}
    context.notes["fused-kv.odd-layers"] = f"{subject.name}: {_counted(figures)}"


def _counted(figures: dict[str, dict[str, str]]) -> str:
    """How many axes are refused; and which are not, with what is made of them."""
    by_outcome: dict[str, list[str]] = {}
    for axis, figure in figures.items():
        by_outcome.setdefault(figure["outcome"], []).append(axis)
    refused = by_outcome.pop("refused", [])
    said = {"right": "served right", "left out": "left out"}
    rest = [f"{said.get(outcome, outcome)} {', '.join(axes)}" for outcome, axes in by_outcome.items()]
    return "; ".join([f"refuses {len(refused)} of {len(figures)} axes", *rest])


# --- one call and several -----------------------------------------------------------------------------------------------------------------


@check(
    "fused-kv.calls",
    title="the implementation computes calls of any size and any positions, and touches nothing else",
    why="A verified block is rarely the one that a test tried: short, long, at the end of the table, or a view of another tensor.",
    needs=("config", "headers", "tensors"),
    unless=no_subject,
    applies=_APPLIES,
    example="an implementation that reads positions as if they were contiguous",
    fix="compute what is named for any call, or refuse it",
)
def calls(context: Context) -> Iterator[Finding]:
    """Each property of a call on the draft's own layers, one finding for each that does not hold."""
    subject, layers = _subject(context), built_layers(context)
    if (plain := tried(context, subject, layers)).kind != "right":
        raise Inconclusive(
            f"{subject.name} does not serve this draft's own layers; see fused-kv.matches-reference: {plain.text}"
        )
    from pytest_specdecode.trials import error_text

    trial = _Calls(context, subject, layers)
    for name, (hold, say) in PROPERTIES.items():
        try:
            hold(trial)
        except _NotHeldError as error:
            reason = str(error)
        except Exception as error:
            reason = error_text(error)
        else:
            continue
        make = context.fail if say == "error" else context.warn
        yield make(f"{subject.name}, {name}: {reason}", where=name, got=reason, due=_DUE[name])
    context.notes["fused-kv.calls"] = f"{subject.name}: {len(PROPERTIES)} properties"


class _NotHeldError(Exception):
    """A property of a call does not hold; says what was seen."""


class _Calls:
    """The subject on the draft's layers, and the draft's layers as the truth."""

    def __init__(self, context: Context, subject: Subject, layers: Sequence[Any]) -> None:
        self.context, self.subject, self.layers = context, subject, layers
        self.last = _last(layers)

    def build(self, layers: Sequence[Any] | None = None) -> Any:
        from pytest_specdecode.trials import built, contained
        from pytest_specdecode.watching import watched

        with watched(), contained():
            return built(self.subject.build, self.layers if layers is None else layers, self.context.device)

    def hidden(self, tokens: int, seed: int = 9) -> Tensor:
        return _hidden(self.context, self.layers, tokens, seed)

    def at(self, positions: Sequence[int]) -> Tensor:
        return _at(self.context, positions, self.last)

    def check(
        self, made: Any, ctx: Tensor, positions: Tensor, layers: Sequence[Any] | None = None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """K and V of one call, held against the truth."""
        from pytest_specdecode.trials import Received, wrong_layers

        received, truth = Received(ctx.device), self.layers if layers is None else layers
        # What is held against are copies, since the subject might write to its inputs; itself it gets them as they lie in memory.
        values, places = ctx.to(truth[0].self_attn.qkv_proj.weight.dtype, copy=True), positions.clone()
        self.call(made, ctx, positions, received)
        if wrong := [*received.faults(len(truth)), *wrong_layers(truth, received.kv, values, places)]:
            element = _element(truth, received.kv, values, places)
            raise _NotHeldError("; ".join([*wrong[:3], *([] if element is None else [str(element)])]))
        return received.kv

    @staticmethod
    def call(
        made: Any, ctx: Tensor, positions: Tensor, write_layer_kv: Callable[[int, Tensor, Tensor], object]
    ) -> None:
        """One call, watched."""
        from pytest_specdecode.trials import contained
        from pytest_specdecode.watching import watched

        with watched(), contained():
            made.materialize(ctx, positions, write_layer_kv)


def _empty(trial: _Calls) -> None:
    handed: list[int] = []
    trial.call(trial.build(), trial.hidden(0), trial.at([]), lambda at, k, v: handed.append(at))
    if handed:
        raise _NotHeldError(f"layer {handed[0]} was handed over where there is no token")


def _tokens(count: int) -> Callable[[_Calls], None]:
    def hold(trial: _Calls) -> None:
        trial.check(trial.build(), trial.hidden(count), trial.at([trial.last, *range(1, count)]))

    return hold


def _positions(choose: Callable[[int], Sequence[int]]) -> Callable[[_Calls], None]:
    def hold(trial: _Calls) -> None:
        chosen = trial.at(choose(trial.last))
        trial.check(trial.build(), trial.hidden(len(chosen)), chosen)

    return hold


def _strided(trial: _Calls) -> None:
    import torch

    due = trial.at([5, 3, trial.last, 0, 9])
    # What lies between them is another position, so that reading past the stride shows.
    view = torch.stack([due, trial.at([1, 2, 4, 6, 8])], dim=1)[:, 0]
    trial.check(trial.build(), trial.hidden(5), view)


def _order(trial: _Calls) -> None:
    seen: list[int] = []
    made, ctx = trial.build(), trial.hidden(3)

    def collect(at: int, k: Tensor, v: Tensor) -> None:
        seen.append(at)
        for name, tensor in (("K", k), ("V", v)):
            if tensor.dtype != ctx.dtype:
                raise _NotHeldError(f"layer {at}'s {name} is {tensor.dtype}; due is {ctx.dtype}")

    trial.call(made, ctx, trial.at([0, 1, 2]), collect)
    if seen != list(range(len(trial.layers))):
        raise _NotHeldError(
            f"layers were handed over in the order {seen}; due is 0 to {len(trial.layers) - 1}, each once"
        )


def _bounds(trial: _Calls) -> None:
    import torch

    from pytest_specdecode.memory import banded_copy
    from pytest_specdecode.trials import changed, digests

    values = {"ctx_hidden": trial.hidden(3), "positions": trial.at([0, trial.last, 5])}
    inputs = {name: banded_copy(tensor, name=name) for name, tensor in values.items()}
    before = digests(trial.layers)
    made = trial.build()
    trial.call(made, inputs["ctx_hidden"].tensor, inputs["positions"].tensor, lambda at, k, v: None)
    for name, band in inputs.items():
        band.assert_intact()
        if not torch.equal(band.tensor, values[name]):
            raise _NotHeldError(f"{name} was written to")
    if names := changed(trial.layers, before):
        raise _NotHeldError(f"{' and '.join(names[:3])} was written to")


def _unwritten(trial: _Calls) -> None:
    from pytest_specdecode.memory import still_poison

    found: list[str] = []

    def collect(at: int, k: Tensor, v: Tensor) -> None:
        for name, tensor in (("K", k), ("V", v)):
            if missing := int(still_poison(tensor.contiguous()).sum()):
                found.append(f"{missing} of {tensor.numel()} elements of layer {at}'s {name} were never written")

    made, ctx = trial.build(), trial.hidden(3)
    trial.call(made, ctx, trial.at([0, trial.last, 5]), collect)
    if found:
        raise _NotHeldError("; ".join(found[:3]))


def _sizes(counts: Sequence[int]) -> Callable[[_Calls], None]:
    def hold(trial: _Calls) -> None:
        import torch

        made = trial.build()
        before: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        for count in counts:
            # Numbers of its own for each size: rows that another call left behind are then wrong.
            seen = trial.check(made, trial.hidden(count, seed=count), trial.at([trial.last - count, *range(1, count)]))
            once = before.setdefault(count, seen)
            for layer, pair in seen.items():
                for name, one, two in zip("KV", pair, once[layer], strict=True):
                    if not torch.equal(one, two):
                        raise _NotHeldError(
                            f"the same call of {count} tokens again gives other bits in layer {layer}'s {name}"
                        )

    return hold


def _context_dtype(trial: _Calls) -> None:
    import torch

    made, positions = trial.build(), trial.at([1, 40, 7])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        trial.check(made, trial.hidden(3).to(dtype), positions)


def _updated(which: str) -> Callable[[_Calls], None]:
    def hold(trial: _Calls) -> None:
        import torch

        layers = built_layers(trial.context)
        made = trial.build(layers)
        with torch.no_grad():
            for layer in layers:
                weight = getattr(layer.self_attn, which).weight
                weight.copy_(weight.flip(0) * 1.5)
        if callable(refresh := getattr(made, "refresh_weights", None)):
            refresh(layers)
        trial.check(made, trial.hidden(2), trial.at([0, trial.last]), layers)

    return hold


def _refused(position: int) -> Callable[[_Calls], None]:
    def hold(trial: _Calls) -> None:
        from pytest_specdecode.fused_kv.odd_layers import with_short_table
        from pytest_specdecode.memory import KernelMemoryError
        from pytest_specdecode.trials import error_text

        layers = with_short_table(trial.layers, 8)
        try:
            made = trial.build(layers)
            trial.check(made, trial.hidden(3), trial.at([0, 1, 7]), layers)
        except Exception as error:
            # Else an error of any kind would pass for a refusal.
            said = str(error) if isinstance(error, _NotHeldError) else error_text(error)
            raise _NotHeldError(
                f"with a table of 8 rows that cannot grow, positions 0, 1 and 7 are not served: {said}"
            ) from None
        positions = trial.at([0, 0, 7])
        positions[1] = position
        try:
            trial.call(made, trial.hidden(3), positions, lambda at, k, v: None)
        except KernelMemoryError as error:
            raise _NotHeldError(f"position {position} of a table of 8 rows is not refused: {error}") from None
        except Exception:
            return
        raise _NotHeldError(f"position {position} of a table of 8 rows was served")

    return hold


#: By name, what is held and how grave it is that it does not hold: a warning where no caller should ask for it, or has another way.
PROPERTIES: dict[str, tuple[Callable[[_Calls], None], str]] = {
    "empty-input": (_empty, "error"),
    "one-token": (_tokens(1), "error"),
    "many-tokens": (_tokens(17), "error"),
    "first-position": (_positions(lambda last: [0] * 3), "error"),
    "last-position": (_positions(lambda last: [last] * 3), "error"),
    "repeated-positions": (_positions(lambda last: [7, 7, 2, 7, 2]), "error"),
    "unsorted-positions": (_positions(lambda last: [last, 0, 6, 3, last // 2]), "error"),
    "strided-positions": (_strided, "error"),
    "callback-order": (_order, "error"),
    "bounds": (_bounds, "error"),
    "no-element-unwritten": (_unwritten, "error"),
    "workspace-growth": (_sizes((1, 3, 7)), "error"),
    "workspace-reuse": (_sizes((7, 2, 5, 7)), "error"),
    "context-dtype": (_context_dtype, "warning"),
    "weights-updated": (_updated("qkv_proj"), "warning"),
    "norms-updated": (_updated("k_norm"), "warning"),
    "negative-position": (_refused(-1), "warning"),
    "position-past-the-table": (_refused(8), "warning"),
}

_RIGHT = "K and V within the dtype's own error of float64"

#: What is due, by name.
_DUE = {
    **dict.fromkeys(PROPERTIES, _RIGHT),
    "empty-input": "nothing handed over",
    "callback-order": "layer 0 first, each layer once, in the weights' dtype",
    "bounds": "nothing touched outside the tensors, and inputs and layers as they were",
    "no-element-unwritten": "every element written",
    "context-dtype": "what the values in the weights' dtype give",
    "weights-updated": "K and V of the weights as they are now",
    "norms-updated": "K and V of the norms as they are now",
    "negative-position": "an error, where other positions are served",
    "position-past-the-table": "an error, where other positions are served",
}


# --- building blocks ----------------------------------------------------------------------------------------------------------------------


def _subject(context: Context) -> Subject:
    # `no_subject` has skipped the check where there is none.
    assert context.fused_kv is not None
    return context.fused_kv


def _last(layers: Sequence[Any]) -> int:
    """The last position that is tried; far enough for any table to matter, and no further than a table costs little."""
    stated = [getattr(layer.self_attn.rotary_emb, "max_position_embeddings", None) or 2048 for layer in layers]
    return max(1, min(*stated, 32768) - 1)


def _hidden(context: Context, layers: Sequence[Any], tokens: int, seed: int) -> Tensor:
    import torch

    weight = layers[0].self_attn.qkv_proj.weight
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tokens, weight.shape[1], generator=generator, dtype=torch.float32)
    return drawn.to(device=context.device, dtype=weight.dtype)


def _at(context: Context, positions: Sequence[int], last: int) -> Tensor:
    """The positions, none below 0 or past `last`."""
    import torch

    return torch.tensor([max(0, min(at, last)) for at in positions], dtype=torch.int64, device=context.device)
