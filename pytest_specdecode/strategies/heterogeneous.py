"""Stacks in which one layer differs from the others in one thing, and what a path must say of them.

What the other layers have is drawn first, then one field of one layer's configuration is changed. What is due follows from how an engine
builds its path: heads, widths and the rotary object are layer 0's. So where layer 0 is the odd one, layer 1 is the one reported, and
what is expected is the odd value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    integer,
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
    LayerConfig,
    layer_configs,
    rope_scalings,
)
from pytest_specdecode.strategies.stacks import Stack
from pytest_specdecode.strategies.tensors import KINDS, SEEDS


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
    cannot: interleaved RoPE, no K norm, quantised weights, a V of another width.

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
    check_bounds("min_layers", min_layers, "max_layers", max_layers, least=2)
    shared = None if config is None else argument("config", config, layer_configs(), instance(LayerConfig))
    given = fixed(config)
    roomy: tuple[str, ...] = AXES
    if given is not None:
        roomy = tuple(each for each in AXES if any(_CHANGES[each](given)))
    choices = argument("axis", axis, st.sampled_from(roomy), choice((*AXES, *SOFT_AXES)))
    if given is not None and fixed(axis) in AXES and fixed(axis) not in roomy:
        raise InvalidArgument(f"config={given!r} leaves no room for another value of axis={axis!r}")
    return _heterogeneous_stacks(
        axis=choices,
        num_layers=st.integers(min_layers, max_layers),
        config=shared,
        weights=argument("weights", weights, st.sampled_from(KINDS), choice(KINDS)),
        norms=argument("norms", norms, st.sampled_from(KINDS), choice(KINDS)),
        seed=argument("seed", seed, SEEDS, integer(0)),
    )


@st.composite
def _heterogeneous_stacks(
    draw: DrawFn,
    /,
    *,
    axis: SearchStrategy[str],
    num_layers: SearchStrategy[int],
    config: SearchStrategy[LayerConfig] | None,
    weights: SearchStrategy[str],
    norms: SearchStrategy[str],
    seed: SearchStrategy[int],
) -> BrokenStack:
    name, count = draw(axis), draw(num_layers)
    odd_layer = draw(st.sampled_from([*range(1, count), 0]))
    if config is None:
        room: dict[str, Any] = {"head_dim": st.sampled_from(_ROOMY)} if name == "rotary-dim" else {}
        shared = draw(layer_configs(**room))
    else:
        shared = draw(config)
    changes = list(_CHANGES[name](shared))
    if not changes:
        reject()
    odd = shared.changed(**draw(st.sampled_from(changes)))
    configs = [odd if layer == odd_layer else shared for layer in range(count)]
    stack = Stack(configs=configs, weights=draw(weights), norms=draw(norms), seed=draw(seed))
    layer, expected, got = _due(name, shared, odd, odd_layer)
    return BrokenStack(axis=name, odd_layer=odd_layer, layer=layer, expected=expected, got=got, stack=stack)


def _due(axis: str, shared: LayerConfig, odd: LayerConfig, odd_layer: int) -> tuple[int | None, Any, Any]:
    """The layer to be reported, and the values expected and got."""
    if axis == "rope-scaling" and odd.table_breaks_at is not None:
        return odd_layer or 1, "the shared cos_sin_cache", f"another row at position {odd.table_breaks_at}"
    usual, other = _VALUES[axis](shared), _VALUES[axis](odd)
    if odd_layer > 0:
        return odd_layer, usual, other
    if axis == "rope-style":
        return None, True, False
    if axis == "q-size" and odd.num_heads == shared.num_heads:
        return 0, usual, other
    return 1, other, usual


# --- what an axis is, and how a layer can be odd in it ------------------------------------------------------------------------------------

#: The value of an axis that a configuration has, as an error names it.
_VALUES: dict[str, Callable[[LayerConfig], Any]] = {
    "num-kv-heads": lambda config: config.num_kv_heads,
    "head-dim": lambda config: config.head_dim,
    "rotary-dim": lambda config: config.rotary_dim,
    "rope-style": lambda config: config.is_neox_style,
    "rope-theta": lambda config: config.rope_theta,
    "rope-scaling": lambda config: normal_scaling(config.rope_scaling),
    "hidden-size": lambda config: config.hidden_size,
    "dtype": lambda config: config.dtype,
    "bias": lambda config: config.bias,
    "k-norm": lambda config: config.k_norm,
    "norm-kind": lambda config: config.norm_kind,
    "v-head-dim": lambda config: config.v_head_dim,
    "value-scale": lambda config: config.value_scale,
    "q-size": lambda config: config.q_size,
    "quantization": lambda config: config.quantization or "none",
    "norm-eps": lambda config: config.norm_eps,
}

#: Heads in which another even number of lanes can rotate.
_ROOMY = [width for width in HEAD_DIMS if width >= 4]

Changes = Iterator[Mapping[str, Any]]


def _others(field: str, values: Sequence[Any]) -> Callable[[LayerConfig], Changes]:
    def changes(config: LayerConfig) -> Changes:
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


def _other_scalings(config: LayerConfig) -> Changes:
    """Another scaling stated; or the same one stated and a table that does not follow it."""
    usual = normal_scaling(config.rope_scaling)
    yield from ({"rope_scaling": each} for each in rope_scalings(config.rotary_dim) if normal_scaling(each) != usual)
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

_CHANGES: dict[str, Callable[[LayerConfig], Changes]] = {
    "num-kv-heads": _other_kv_heads,
    "head-dim": _other_head_dims,
    "rotary-dim": _other_rotary_dims,
    "rope-style": _others("is_neox_style", (False,)),
    "rope-theta": _others("rope_theta", ROPE_THETAS),
    "rope-scaling": _other_scalings,
    "hidden-size": _others("hidden_size", HIDDEN_SIZES),
    "dtype": _others("dtype", DTYPES),
    "bias": _others("bias", (False, True)),
    "k-norm": _other_k_norms,
    "norm-kind": _others("norm_kind", NORM_KINDS),
    "v-head-dim": _other_v_head_dims,
    "value-scale": _others("value_scale", VALUE_SCALES),
    "q-size": _other_q_sizes,
    "quantization": _others("quantization", _QUANTIZATIONS),
    "norm-eps": _others("norm_eps", NORM_EPSILONS),
}
