"""How else a checkpoint may be read: one convention changed at a time, each a change of the spec and of nothing else.

Files leave much unsaid that decides what a draft computes, and every reader fills it in: the base of the rotary embedding, which lanes form
a pair, which state is the residual. What is stated here of a convention is where a spec holds it, what else it could be, and what people
call that. Values have the form of `engines.SETTINGS`, so that what an engine takes a setting to be is one of the readings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_specdecode import engines
from pytest_specdecode.engines import Reading, at
from pytest_specdecode.families import Draft
from pytest_specdecode.fused_kv.stack import normal_scaling
from pytest_specdecode.spec import DraftSpec, GQASpec, LayerSpec, RopeSpec
from pytest_specdecode.target import Target

#: Bases that a reader takes where it finds none.
THETAS = (10000.0, 1e6)
#: The share of a head that rotates where a reader takes it for partial.
PARTIAL = 0.5

_EAGLE3S = ("eagle3", "eagle3-mla", "peagle")
_RECYCLING = ("eagle3", "eagle3-mla")
_BLOCKS = ("dflash", "dflash2", "dflare", "domino", "dspark")
#: Places that may state a window which no layer has.
_WINDOWS = ("sliding_window", "dflash_config.swa_window_size", "transformer_layer_config.sliding_window")


@dataclass(frozen=True, kw_only=True)
class OtherReading:
    """A draft, read otherwise in one convention.

    Attributes:
        key: the convention.
        name: this reading, for people: `interleaved`, `theta 1e6`.
        declared: the declared one, in the same words.
        spec: the draft so read.
        setting: the engines' word for the convention, or empty where they have none.
        value: what an engine that reads so takes it to be.
        place: the drafted token in which it shows first, from 1.
    """

    key: str
    name: str
    declared: str
    spec: DraftSpec
    setting: str = ""
    value: Any = None
    place: int = 1


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One thing that readers may take differently.

    Attributes:
        key: its name here.
        setting: the engines' word for it, or empty.
        declared: its value in a spec; None where the spec has no such thing, or not one for all layers.
        change: the spec with another value.
        say: what people call a value, given the declared one.
        others: further values worth trying, whatever engines do.
        place: the drafted token in which it shows first.
        judged: whether engines' values mean the same here, for a spec.
    """

    key: str
    declared: Callable[[DraftSpec], Any]
    change: Callable[[DraftSpec, Any], DraftSpec]
    say: Callable[[Any, Any], str]
    others: Callable[[Draft, Target | None, Any], Iterable[Any]]
    setting: str = ""
    place: int = 1
    judged: Callable[[DraftSpec], bool] = lambda spec: True


def other_readings(
    draft: Draft, target: Target | None = None, values: Mapping[str, Sequence[Any]] | None = None
) -> list[OtherReading]:
    """Every reading of `draft` that differs from the declared one in one convention, each once, in the order of `CONVENTIONS`.

    Args:
        draft: an opened draft of a known family.
        target: its target, whose base is one of the readings.
        values: by setting, what engines take it to be.
    """
    spec = draft.spec
    assert spec is not None
    found = []
    for item in CONVENTIONS:
        declared = item.declared(spec)
        if declared is None:
            continue
        worth = [*item.others(draft, target, declared)]
        if item.setting and item.judged(spec):
            worth += [plain(value) for value in (values or {}).get(item.setting, ())]
        for value in dict.fromkeys(value for value in worth if is_other(value, declared)):
            found.append(
                OtherReading(
                    key=item.key,
                    name=item.say(value, declared),
                    declared=item.say(declared, declared),
                    spec=item.change(spec, value),
                    setting=item.setting,
                    value=list(value) if item.key == "taps" else value,
                    place=item.place,
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class EngineReading:
    """What is known of how an engine reads a draft.

    Attributes:
        spec: the draft so read, in all that is known.
        names: where that differs from the declared reading.
        refused: what the engine says where it stops at a value, or empty.
        settings: how many are known.
    """

    spec: DraftSpec
    names: tuple[str, ...] = ()
    refused: str = ""
    settings: int = 0


def taken(draft: Draft, target: Target | None, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
    """What each of the engines `names` takes the settings of `CONVENTIONS` to be, by engine and setting; what is not known is left out."""
    found: dict[str, dict[str, Reading]] = {name: {} for name in names}
    for item in CONVENTIONS:
        if not item.setting:
            continue
        asked = engines.captures(draft, target, found) if item.setting == "taps" else None
        for name, reading in (asked or engines.readings(item.setting, draft, found)).items():
            if reading is not None:
                found[name][item.setting] = reading
    return found


def engine_reading(spec: DraftSpec, readings: Mapping[str, Reading]) -> EngineReading:
    """The draft that is `spec`, as an engine reads it that takes its settings so."""
    read, names, known = spec, [], 0
    for item in CONVENTIONS:
        declared, reading = item.declared(spec), readings.get(item.setting)
        if declared is None or reading is None or not item.judged(spec):
            continue
        known += 1
        if reading.refused:
            return EngineReading(spec=spec, refused=reading.refused, settings=known)
        value = plain(reading.value)
        if is_other(value, declared):
            read = item.change(read, value)
            names.append(item.say(value, declared))
    return EngineReading(spec=read, names=tuple(names), settings=known)


def is_other(value: Any, declared: Any) -> bool:
    """Whether `value` is one that could stand where `declared` stands, and another."""
    numbers = (int, float)
    alike = isinstance(value, type(declared)) or (isinstance(value, numbers) and isinstance(declared, numbers))
    if not alike or isinstance(value, bool) != isinstance(declared, bool):
        return False
    if isinstance(declared, tuple) and len(value) != len(declared):
        return False
    return bool(value != declared)


def plain(value: Any) -> Any:
    """A list as a tuple, so that it can be compared and told apart."""
    return tuple(value) if isinstance(value, list) else value


def with_attention(spec: DraftSpec, **changes: Any) -> DraftSpec:
    """`spec` with changes of every layer's attention that has such fields."""

    def changed(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        if attention is None or not all(hasattr(attention, name) for name in changes):
            return layer
        return replace(layer, attention=replace(attention, **changes))

    return replace(spec, layers=tuple(changed(layer) for layer in spec.layers))


def with_rope(spec: DraftSpec, **changes: Any) -> DraftSpec:
    """`spec` with changes of every layer's rotary embedding."""
    layers = [
        layer
        if layer.attention is None
        else replace(layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, **changes)))
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def number(value: float) -> str:
    """10000, 500000, 1e6."""
    return f"{value:g}".replace("e+0", "e").replace("e+", "e")


def _one(values: Iterable[Any]) -> Any:
    """The value that all share, or None."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else None


def _ropes(spec: DraftSpec) -> list[RopeSpec]:
    return [
        layer.attention.rope
        for layer in spec.layers
        if layer.attention is not None and getattr(layer.attention, "rotates", True)
    ]


def _heads(spec: DraftSpec) -> list[GQASpec]:
    return [layer.attention for layer in spec.layers if isinstance(layer.attention, GQASpec)]


def _thetas(draft: Draft, target: Target | None, declared: float) -> list[float]:
    """What the file states anywhere, what readers take where they find nothing, and the target's."""
    assert draft.spec is not None
    stated = [place.value for rope in _ropes(draft.spec) for place in rope.theta_stated]
    theirs = [] if target is None or target.rope_theta is None else [target.rope_theta]
    return [*stated, *THETAS, *theirs]


def _share(spec: DraftSpec) -> float | None:
    """The share of a head that rotates, where the scaling leaves that to `rotary_dim`."""
    shares = []
    for attention in _heads(spec):
        width, turning = attention.head_dim, attention.rope.rotary_dim
        if not width or not turning or attention.rope.rope_type == "proportional" or not attention.rotates:
            return None
        shares.append(turning / width)
    found: float | None = _one(shares)
    return found


def _with_share(spec: DraftSpec, share: float) -> DraftSpec:
    width = _one(attention.head_dim for attention in _heads(spec)) or 0
    return with_rope(spec, rotary_dim=int(width * share))


def _taps(spec: DraftSpec) -> tuple[int, ...] | None:
    """The layers that the tapped states enter."""
    if spec.taps.ids is None or not spec.taps.required:
        return None
    return tuple(id + 1 for id in spec.taps.ids) if spec.taps.convention == "output" else spec.taps.ids


def _other_taps(draft: Draft, target: Target | None, declared: tuple[int, ...]) -> list[tuple[int, ...]]:
    shifted = [tuple(id + step for id in declared) for step in (1, -1)]
    return [declared[::-1], tuple(sorted(declared)), *shifted]


def _say_taps(value: tuple[int, ...], declared: tuple[int, ...]) -> str:
    if value == declared:
        return f"taps {list(declared)}"
    if value == declared[::-1]:
        return "taps reversed"
    if value == tuple(sorted(declared)):
        return "taps sorted"
    step = value[0] - declared[0]
    if value == tuple(id + step for id in declared):
        return f"taps {step:+d}"
    return f"taps {list(value)}"


def _scaled(spec: DraftSpec) -> bool | None:
    """Whether positions are scaled; None where layers differ, or where the type says which lanes rotate at all."""
    ropes = _ropes(spec)
    return None if any(rope.rope_type == "proportional" for rope in ropes) else _one(_scales(rope) for rope in ropes)


def _scales(rope: RopeSpec) -> bool:
    return bool(normal_scaling({**rope.scaling, "rope_type": rope.rope_type}))


def _unscaled(spec: DraftSpec, value: bool) -> DraftSpec:
    """There is one way to leave a scaling out, and none to make one up: `value` is False."""
    return with_rope(spec, rope_type="default", scaling={})


def _qk_norm(spec: DraftSpec) -> bool | None:
    """Whether heads are normed; None where they differ, or where there are none."""
    heads = _heads(spec)
    return _one(attention.qk_norm for attention in heads) if len(heads) == len(spec.layers) else None


def _other_qk_norm(draft: Draft, target: Target | None, declared: bool) -> list[bool]:
    """On only where there are weights for it."""
    stored = {} if draft.binding is None else draft.binding.stored
    return [not declared] if declared or any(name.endswith(".q_norm.weight") for name in stored) else []


def _flag(name: str, families: tuple[str, ...]) -> Callable[[DraftSpec], bool | None]:
    def declared(spec: DraftSpec) -> bool | None:
        flags = spec.eagle3
        return None if flags is None or spec.family not in families else bool(getattr(flags, name))

    return declared


def _with_flag(name: str) -> Callable[[DraftSpec, Any], DraftSpec]:
    def change(spec: DraftSpec, value: Any) -> DraftSpec:
        assert spec.eagle3 is not None
        return replace(spec, eagle3=replace(spec.eagle3, **{name: value}))

    return change


def _fc_norm(spec: DraftSpec) -> bool | None:
    if not spec.taps.required:
        return None
    if spec.eagle3 is not None:
        return _flag("fc_norm", _EAGLE3S)(spec)
    found: bool | None = getattr(spec.options, "fc_norm", None)
    return found


def _with_fc_norm(spec: DraftSpec, value: bool) -> DraftSpec:
    if spec.eagle3 is not None:
        return _with_flag("fc_norm")(spec, value)
    return replace(spec, options=replace(spec.options, fc_norm=value))


def _combine(spec: DraftSpec) -> str | None:
    if spec.family == "mtp":
        found: str = getattr(spec.options, "combine", "sum")
        return None if found == "sum" else found
    flags = spec.options if spec.family == "eagle1" else spec.eagle3 if spec.family in _EAGLE3S else None
    first: bool | None = getattr(flags, "hidden_first", None)
    return None if first is None else "hidden-first" if first else "embed-first"


def _with_combine(spec: DraftSpec, value: str) -> DraftSpec:
    if spec.family == "mtp":
        return replace(spec, options=replace(spec.options, combine=value))
    if spec.family == "eagle1":
        return replace(spec, options=replace(spec.options, hidden_first=value == "hidden-first"))
    return _with_flag("hidden_first")(spec, value == "hidden-first")


def _from_anchor(spec: DraftSpec) -> bool | None:
    if spec.family not in _BLOCKS or spec.block is None:
        return None
    stated = spec.block.sample_from_anchor
    return stated is not False if spec.family == "dspark" else bool(stated)


def _with_from_anchor(spec: DraftSpec, value: bool) -> DraftSpec:
    assert spec.block is not None
    options = spec.options
    if hasattr(options, "shift_label"):
        options = replace(options, shift_label=value)
    return replace(spec, block=replace(spec.block, sample_from_anchor=value), options=options)


def _causal(spec: DraftSpec) -> tuple[bool, ...] | None:
    return tuple(bool(layer.is_causal) for layer in spec.layers) if spec.family in _BLOCKS else None


def _with_causal(spec: DraftSpec, value: tuple[bool, ...]) -> DraftSpec:
    pairs = zip(spec.layers, value, strict=True)
    return replace(spec, layers=tuple(replace(layer, is_causal=causal) for layer, causal in pairs))


def _say_causal(value: tuple[bool, ...], declared: Any) -> str:
    return "causal" if all(value) else "not causal" if not any(value) else "causal in some layers"


def _windows(spec: DraftSpec) -> tuple[int | None, ...] | None:
    """The window of each layer; None where a layer's attention has no such field."""
    heads = _heads(spec)
    return tuple(attention.sliding_window for attention in heads) if heads and len(heads) == len(spec.layers) else None


def _other_windows(
    draft: Draft, target: Target | None, declared: tuple[int | None, ...]
) -> list[tuple[int | None, ...]]:
    if any(size is not None for size in declared):
        return [(None,) * len(declared)]
    stated = (at(draft.checkpoint.config, place) for place in _WINDOWS)
    sizes = [size for size in stated if isinstance(size, int) and not isinstance(size, bool) and size > 0]
    return [(size,) * len(declared) for size in sizes]


def _with_windows(spec: DraftSpec, value: tuple[int | None, ...]) -> DraftSpec:
    layers = []
    for layer, size in zip(spec.layers, value, strict=True):
        assert isinstance(layer.attention, GQASpec)
        layers.append(replace(layer, attention=replace(layer.attention, sliding_window=size)))
    return replace(spec, layers=tuple(layers))


def _say_windows(value: tuple[int | None, ...], declared: Any) -> str:
    sizes = sorted({size for size in value if size is not None})
    if not sizes:
        return "no window"
    where = "" if None not in value else " in some layers"
    return f"window {' and '.join(map(str, sizes))}{where}"


def _rows_see_as_engines_do(spec: DraftSpec) -> bool:
    return all(layer.window_reading in (None, "row") for layer in spec.layers)


def _d2t(draft: Draft, target: Target | None, declared: bool) -> list[bool]:
    """Only where there is a map, and only where a token is never embedded before the target has kept it."""
    stored = {} if draft.binding is None else draft.binding.stored
    return [not declared] if "d2t" in stored and "token_map" not in stored else []


def _nothing(draft: Draft, target: Target | None, declared: Any) -> list[Any]:
    """What engines take it to be, and no more."""
    return []


def _flipped(draft: Draft, target: Target | None, declared: bool) -> list[bool]:
    return [not declared]


def _called(on: str, off: str) -> Callable[[Any, Any], str]:
    return lambda value, declared: on if value else off


CONVENTIONS: tuple[Convention, ...] = (
    Convention(
        key="theta",
        setting="rope-theta",
        declared=lambda spec: _one(rope.theta for rope in _ropes(spec)),
        change=lambda spec, value: with_rope(spec, theta=float(value)),
        say=lambda value, declared: f"theta {number(value)}",
        others=_thetas,
    ),
    Convention(
        key="rope style",
        setting="is-neox-style",
        declared=lambda spec: _one(rope.is_neox_style for rope in _ropes(spec)),
        change=lambda spec, value: with_rope(spec, is_neox_style=value),
        say=_called("neox", "interleaved"),
        others=_flipped,
    ),
    Convention(
        key="partial rotary",
        setting="partial-rotary-factor",
        declared=_share,
        change=_with_share,
        say=lambda value, declared: f"partial rotary {number(value)}" if value != 1 else "partial rotary off",
        others=lambda draft, target, declared: [PARTIAL if declared == 1 else 1.0],
    ),
    Convention(
        key="rope scaling",
        declared=_scaled,
        change=_unscaled,
        say=_called("rope scaling on", "rope scaling off"),
        others=lambda draft, target, declared: [False] if declared else [],
    ),
    Convention(
        key="norm per head",
        setting="qk-norm",
        declared=_qk_norm,
        change=lambda spec, value: with_attention(spec, qk_norm=value),
        say=_called("qk_norm on", "qk_norm off"),
        others=_other_qk_norm,
    ),
    Convention(
        key="taps",
        setting="taps",
        declared=_taps,
        change=lambda spec, value: replace(
            spec, taps=replace(spec.taps, ids=value, convention="boundary", count=len(value))
        ),
        say=_say_taps,
        others=_other_taps,
    ),
    Convention(
        key="residual",
        setting="norm-before-residual",
        declared=_flag("norm_before_residual", _EAGLE3S),
        change=_with_flag("norm_before_residual"),
        say=_called("normed residual", "raw residual"),
        others=_flipped,
    ),
    Convention(
        key="recycled state",
        setting="norm-output",
        declared=_flag("norm_output", _RECYCLING),
        change=_with_flag("norm_output"),
        say=_called("recycled state normed", "recycled state raw"),
        others=_flipped,
        place=2,
    ),
    Convention(
        key="order of halves",
        setting="combine",
        declared=_combine,
        change=_with_combine,
        say=lambda value, declared: str(value),
        others=lambda draft, target, declared: ["embed-first" if declared == "hidden-first" else "hidden-first"],
    ),
    Convention(
        key="norm per tap",
        setting="fc-norm",
        declared=_fc_norm,
        change=_with_fc_norm,
        say=_called("fc_norm on", "fc_norm off"),
        others=_flipped,
    ),
    Convention(
        key="norm before fc",
        setting="norm-before-fc",
        declared=lambda spec: _flag("norm_before_fc", _EAGLE3S)(spec) if spec.taps.required else None,
        change=_with_flag("norm_before_fc"),
        say=_called("norm_before_fc on", "norm_before_fc off"),
        others=_flipped,
    ),
    Convention(
        key="anchor row",
        setting="sample-from-anchor",
        declared=_from_anchor,
        change=_with_from_anchor,
        say=_called("anchor row drafts", "first mask row drafts"),
        others=_flipped,
    ),
    Convention(
        key="causality",
        setting="is-causal",
        declared=_causal,
        change=_with_causal,
        say=_say_causal,
        others=lambda draft, target, declared: [
            (not all(declared),) * len(declared),
            (not any(declared),) * len(declared),
        ],
    ),
    Convention(
        key="window",
        setting="sliding-window",
        declared=_windows,
        change=_with_windows,
        say=_say_windows,
        others=_other_windows,
        judged=_rows_see_as_engines_do,
    ),
    Convention(
        key="d2t",
        declared=lambda spec: None if spec.family == "domino" else spec.vocabulary.absolute_map,
        change=lambda spec, value: replace(spec, vocabulary=replace(spec.vocabulary, absolute_map=value)),
        say=_called("d2t as ids", "d2t as offsets"),
        others=_d2t,
    ),
    Convention(
        key="value scale",
        setting="value-scale",
        declared=lambda spec: _one(attention.value_scale for attention in _heads(spec)),
        change=lambda spec, value: with_attention(spec, value_scale=float(value)),
        say=lambda value, declared: f"value scale {number(value)}",
        others=_nothing,
    ),
    Convention(
        key="mask token",
        setting="mask-token-id",
        declared=lambda spec: None if spec.block is None else spec.block.mask_token_id,
        change=lambda spec, value: replace(
            spec, block=None if spec.block is None else replace(spec.block, mask_token_id=value)
        ),
        say=lambda value, declared: f"mask token {value}",
        others=_nothing,
    ),
)
