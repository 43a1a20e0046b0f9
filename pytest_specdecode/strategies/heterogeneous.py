"""Stacks in which one layer differs from the others in one thing, and what a path must say of them.

What the other layers have is drawn first, then one field of one layer's configuration is changed. What is due follows from how an engine
builds its path: heads, widths and the rotary object are layer 0's. So where layer 0 is the odd one, layer 1 is the one reported, and
what is expected is the odd value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.fused_kv.stack import AXES, DTYPES, SOFT_AXES, normal_scaling
from pytest_specdecode.strategies.arguments import (
    ValueOr,
    argument,
    check_bounds,
    choice,
    fixed,
    instance,
)
from pytest_specdecode.strategies.configs import (
    HEAD_DIMS,
    HIDDEN_SIZES,
    KV_HEADS,
    NORM_EPSILONS,
    NORM_KINDS,
    QUERY_GROUPS,
    ROPE_THETAS,
    VALUE_SCALES,
    Configuration,
    LayerConfig,
    layer_configs,
    rope_scalings,
)
from pytest_specdecode.strategies.stacks import LayerStack, Stack, numbers_of_stacks

Broken = TypeVar("Broken")

#: Fields of a configuration to be changed, one mapping per way to be odd.
Changes = Iterator[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class BrokenStack:
    """A stack with one odd layer.

    Attributes:
        axis: in what the layer is odd: one of `AXES`, or of `SOFT_AXES`, where nothing is to be refused.
        odd_layer: which layer it is.
        layer: which layer is to be reported: the odd one, but layer 1 where that is layer 0, which the others are held against. None
            where what is odd in layer 0 is refused before any layer is looked at (rope style). Layer 0 itself where it contradicts
            itself (a stated q_size that does not fit its rows).
        expected, got: the two values to be reported, as FusedKV's error carries them.
        stack: the layers.
    """

    axis: str
    odd_layer: int
    layer: int | None
    expected: Any
    got: Any
    stack: Stack

    @property
    def is_soft(self) -> bool:
        """Whether the stack can be served all the same."""
        return self.axis in SOFT_AXES


def heterogeneous_stacks(
    *,
    axis: ValueOr[str] | None = None,
    min_layers: int = 2,
    max_layers: int = 3,
    config: ValueOr[LayerConfig] | None = None,
    weights: ValueOr[str] | None = None,
    norms: ValueOr[str] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[BrokenStack]:
    """Stacks in which exactly one layer differs from the others in exactly one axis (and in what follows from it: a layer with wider heads
    has more rows).

    An example, as printed:

        BrokenStack(axis='head-dim', odd_layer=1, layer=1, expected=2, got=3, stack=Stack(configs=[LayerConfig(num_heads=1,
        num_kv_heads=1, head_dim=2, hidden_size=1)] + [LayerConfig(num_heads=1, num_kv_heads=1, head_dim=3, hidden_size=1,
        rotary_dim=2)], seed=0, weights='zeros', norms='zeros'))

    Guarantee: `broken.stack.build(FusedKV)` raises a FusedKVError with this `axis`, `layer`, `expected` and `got`; for a soft axis it
    succeeds. Any layer may be the odd one, layer 0 included. Each of the layers alone could be served, except where the axis says that it
    cannot: no K norm, quantised weights, a V of another width.

    Requirement: a `config` of the caller's must be one that `layer_configs` could draw, and leave room to differ: with 2 or 3 lanes in a
    head no other `rotary_dim` is possible.

    Shrinks towards the first axis of `AXES`, then two layers of which layer 1 is odd, then the plainest configuration.

    Args:
        axis: one of `AXES` or `SOFT_AXES`; drawn: one of `AXES`, with a `config` given as a value one in which that leaves room.
        min_layers, max_layers: bounds of the number of layers, at least 2.
        config: what the layers share; drawn: any of `layer_configs` that leaves room to differ.
        weights, norms: kinds of numbers, see `KINDS` and `Stack`; they have no say in whether a stack is refused.
        seed: of all numbers.

    Raises:
        InvalidArgument: an argument is no such value, the bounds cross, or `config` leaves no room; from a draw where an argument is a
            strategy.

    See also: `homogeneous_stacks` for those that must be served.
    """
    return stacks_with_an_odd_layer(
        _ODD_LAYERS,
        axis=axis,
        min_layers=min_layers,
        max_layers=max_layers,
        config=config,
        weights=weights,
        norms=norms,
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True)
class OddLayers(Generic[Broken]):
    """What has to be known of a kind of layers to make one of them odd.

    Attributes:
        axes, soft_axes: in what a layer can be odd.
        config: class of the layers' configurations.
        configs: by axis, the configurations that leave room for another value of it, or most of which do.
        changes: by axis, the changes to a configuration that make it odd.
        due: from the axis, the usual and the odd configuration and the odd layer: the layer to be reported, the values expected and got.
        stack, broken: classes of the stacks, and of what is drawn, made of the fields of `BrokenStack`.
    """

    axes: tuple[str, ...]
    soft_axes: tuple[str, ...]
    config: type[Configuration]
    configs: Callable[[str], SearchStrategy[Any]]
    changes: Mapping[str, Callable[[Any], Changes]]
    due: Callable[[str, Any, Any, int], tuple[int | None, Any, Any]]
    stack: type[LayerStack]
    broken: Callable[..., Broken]


def stacks_with_an_odd_layer(
    kind: OddLayers[Broken],
    *,
    axis: ValueOr[str] | None,
    min_layers: int,
    max_layers: int,
    config: ValueOr[Any] | None,
    weights: ValueOr[str] | None,
    norms: ValueOr[str] | None,
    seed: ValueOr[int] | None,
) -> SearchStrategy[Broken]:
    """Stacks of a kind; the other arguments as `heterogeneous_stacks` says."""
    check_bounds("min_layers", min_layers, "max_layers", max_layers, least=2)
    shared = None if config is None else argument("config", config, st.nothing(), instance(kind.config))
    given = fixed(config)
    roomy = kind.axes if given is None else tuple(each for each in kind.axes if any(kind.changes[each](given)))
    choices = argument("axis", axis, st.sampled_from(roomy), choice((*kind.axes, *kind.soft_axes)))
    if given is not None and fixed(axis) in kind.axes and fixed(axis) not in roomy:
        raise InvalidArgument(f"config={given!r} leaves no room for another value of axis={axis!r}")
    return _broken(
        kind,
        axis=choices,
        num_layers=st.integers(min_layers, max_layers),
        config=shared,
        **numbers_of_stacks(weights, norms, seed),
    )


@st.composite
def _broken(
    draw: DrawFn,
    kind: OddLayers[Broken],
    /,
    *,
    axis: SearchStrategy[str],
    num_layers: SearchStrategy[int],
    config: SearchStrategy[Any] | None,
    **numbers: SearchStrategy[Any],
) -> Broken:
    name, count = draw(axis), draw(num_layers)
    odd_layer = draw(st.sampled_from([*range(1, count), 0]))
    shared = draw(kind.configs(name) if config is None else config)
    changes = list(kind.changes[name](shared))
    if not changes:
        reject()
    odd = shared.changed(**draw(st.sampled_from(changes)))
    configs = [odd if layer == odd_layer else shared for layer in range(count)]
    stack = kind.stack(configs=configs, **{name: draw(strategy) for name, strategy in numbers.items()})
    layer, expected, got = kind.due(name, shared, odd, odd_layer)
    return kind.broken(axis=name, odd_layer=odd_layer, layer=layer, expected=expected, got=got, stack=stack)


def _due(axis: str, shared: LayerConfig, odd: LayerConfig, odd_layer: int) -> tuple[int | None, Any, Any]:
    """The layer to be reported, and the values expected and got."""
    if axis == "rope-scaling" and odd.table_breaks_at is not None:
        return odd_layer or 1, "the shared cos_sin_cache", f"another row at position {odd.table_breaks_at}"
    usual, other = _VALUES[axis](shared), _VALUES[axis](odd)
    if odd_layer > 0:
        return odd_layer, usual, other
    if axis == "q-size" and odd.num_heads == shared.num_heads:
        return 0, usual, other
    return 1, other, usual


# --- what an axis is, and how a layer can be odd in it ------------------------------------------------------------------------------------

#: The value of an axis that a configuration of any kind of layer has, as an error names it.
COMMON_VALUES: dict[str, Callable[[Any], Any]] = {
    "rope-style": lambda config: config.is_neox_style,
    "rope-theta": lambda config: config.rope_theta,
    "rope-scaling": lambda config: normal_scaling(config.rope_scaling),
    "hidden-size": lambda config: config.hidden_size,
    "dtype": lambda config: config.dtype,
    "bias": lambda config: config.bias,
    "norm-kind": lambda config: config.norm_kind,
    "quantization": lambda config: config.quantization or "none",
    "norm-eps": lambda config: config.norm_eps,
}

_VALUES: dict[str, Callable[[LayerConfig], Any]] = {
    **COMMON_VALUES,
    "num-kv-heads": lambda config: config.num_kv_heads,
    "head-dim": lambda config: config.head_dim,
    "rotary-dim": lambda config: config.rotary_dim,
    "k-norm": lambda config: config.k_norm,
    "v-head-dim": lambda config: config.v_head_dim,
    "value-scale": lambda config: config.value_scale,
    "q-size": lambda config: config.q_size,
}

#: Heads in which another even number of lanes can rotate.
_ROOMY = [width for width in HEAD_DIMS if width >= 4]


def others(field: str, values: Sequence[Any]) -> Callable[[Any], Changes]:
    """The changes of one field to each other one of `values`."""

    def changes(config: Any) -> Changes:
        yield from ({field: value} for value in values if value != getattr(config, field))

    return changes


def _other_kv_heads(config: LayerConfig) -> Changes:
    """Counts that divide the query heads first, so that Q stays as it is; for the rest the query heads become as many."""
    counts = [count for count in KV_HEADS if count != config.num_kv_heads]
    fitting = [count for count in counts if config.num_heads % count == 0]
    yield from ({"num_kv_heads": count} for count in fitting)
    yield from ({"num_kv_heads": count, "num_heads": count} for count in counts if count not in fitting)


def _other_head_dims(config: LayerConfig) -> Changes:
    wide_enough = [width for width in HEAD_DIMS if width >= config.rotary_dim and width != config.head_dim]
    for width in wide_enough or [2 * config.head_dim]:
        yield {"head_dim": width, "rotary_dim": config.rotary_dim}


def _other_rotary_dims(config: LayerConfig) -> Changes:
    least = 4 if config.rope_scaling.get("rope_type") == "dynamic" else 2
    for lanes in dict.fromkeys((least, config.head_dim // 4 * 2, config.head_dim // 2 * 2)):
        if least <= lanes and lanes != config.rotary_dim:
            yield {"rotary_dim": lanes}


def _other_scalings(config: Configuration) -> Changes:
    """Another scaling stated; or the same one stated and a table that does not follow it."""
    usual, scalings = normal_scaling(config.rope_scaling), rope_scalings(config.rotating_lanes)
    yield from ({"rope_scaling": each} for each in scalings if normal_scaling(each) != usual)
    for row in (1, 8):
        if row < min(config.max_position_embeddings, 256):
            yield {"table_breaks_at": row}


def _other_k_norms(config: LayerConfig) -> Changes:
    yield {"k_norm": "none"}
    if config.num_kv_heads > 1:  # with one KV head the two are the same
        yield {"k_norm": "whole"}


def _other_v_head_dims(config: LayerConfig) -> Changes:
    yield {"v_head_dim": 2 * config.head_dim}
    if config.head_dim > 2:
        yield {"v_head_dim": config.head_dim // 2}


def _other_q_sizes(config: LayerConfig) -> Changes:
    """Another number of query heads; or a stated q_size that the rows of the weight contradict, as if a gate were stored beside Q."""
    for group in QUERY_GROUPS:
        if group * config.num_kv_heads != config.num_heads:
            yield {"num_heads": group * config.num_kv_heads}
    yield {"q_size": 2 * config.q_size}
    yield {"q_size": config.q_size - config.head_dim}


_QUANTIZATIONS = ("int8", "float8_e4m3fn", "qweight", "weight_packed", "fp8", "Fp8LinearMethod")

#: For the axes of any kind of layer, but rope-style, of which grouped-query layers can have only one.
COMMON_CHANGES: dict[str, Callable[[Any], Changes]] = {
    "rope-theta": others("rope_theta", ROPE_THETAS),
    "rope-scaling": _other_scalings,
    "hidden-size": others("hidden_size", HIDDEN_SIZES),
    "dtype": others("dtype", DTYPES),
    "bias": others("bias", (False, True)),
    "norm-kind": others("norm_kind", NORM_KINDS),
    "quantization": others("quantization", _QUANTIZATIONS),
    "norm-eps": others("norm_eps", NORM_EPSILONS),
}

_CHANGES: dict[str, Callable[[LayerConfig], Changes]] = {
    **COMMON_CHANGES,
    "num-kv-heads": _other_kv_heads,
    "head-dim": _other_head_dims,
    "rotary-dim": _other_rotary_dims,
    "rope-style": others("is_neox_style", (True, False)),
    "k-norm": _other_k_norms,
    "v-head-dim": _other_v_head_dims,
    "value-scale": others("value_scale", VALUE_SCALES),
    "q-size": _other_q_sizes,
}


def _configs(axis: str) -> SearchStrategy[LayerConfig]:
    return layer_configs(head_dim=st.sampled_from(_ROOMY)) if axis == "rotary-dim" else layer_configs()


_ODD_LAYERS = OddLayers(
    axes=AXES,
    soft_axes=SOFT_AXES,
    config=LayerConfig,
    configs=_configs,
    changes=_CHANGES,
    due=_due,
    stack=Stack,
    broken=BrokenStack,
)
