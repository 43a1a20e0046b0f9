"""`heterogeneous_stacks` promises stacks that must be refused, and says why. Held against `FusedKV`, this is also the validators' test.

Either side can be wrong:

- the validator passes a stack that it would serve wrong (the failure that costs weeks: nothing but the accepted length shows it);
- it refuses for another reason, at another layer, or with a text that cannot be looked up;
- the strategy breaks more than it says, so that a stack is refused for something else, or always breaks the same layer, so that a
  validator which looks at one layer only passes.

The texts here are written out once more, from SGLang's where SGLang has the check.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, find, given, settings

from pytest_specdecode import AXES, FusedKV, fused_kv_reference
from pytest_specdecode.errors import FusedKVError, StackMismatchError, StackUnsupportedError
from pytest_specdecode.fused_kv import SOFT_AXES, eager_kv
from pytest_specdecode.numerics import assert_close
from pytest_specdecode.strategies import LayerConfig, Stack, heterogeneous_stacks, layer_configs

FINDING = settings(database=None, deadline=None, derandomize=True, max_examples=500)
LOOKING = settings(FINDING, phases=[Phase.generate])

#: What is said of a layer that is odd in an axis. SGLang's texts: the first four.
TEXTS = {
    "num-kv-heads": "num_kv_heads mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "head-dim": "head_dim mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "rotary-dim": "RoPE config mismatch across layers for fused KV path: expected (rotary_dim={expected}, neox=True), "
    "got (rotary_dim={got}, neox=True) at layer {layer}.",
    "rope-style": "RoPE config mismatch across layers for fused KV path: expected (rotary_dim={rotary_dim}, neox={expected}), "
    "got (rotary_dim={rotary_dim}, neox={got}) at layer {layer}.",
    "rope-theta": "rope_theta mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "rope-scaling": "rope_scaling mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "hidden-size": "hidden_size mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "dtype": "qkv weight dtype mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "bias": "qkv bias mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "k-norm": "k_norm mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "norm-kind": "norm kind mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "v-head-dim": "v_head_dim mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "value-scale": "value scale mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "q-size": "q_size mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
    "quantization": "quantization mismatch across layers for fused KV path: expected {expected}, got {got} at layer {layer}.",
}

#: The same where layer 0 alone shows it, or where a table is not what is stated.
OWN_ROWS = (
    "q_size mismatch for fused KV path: expected {expected} (qkv_proj.weight has {rows} rows, of which K and V take 2 x {kv_size}), "
    "got {got} at layer 0."
)
TABLE = (
    "RoPE table mismatch across layers for fused KV path: expected the rows of the shared cos_sin_cache, "
    "got other values from position {row} on at layer {layer}."
)


def due_text(broken):
    """The error's text, from what the strategy says it broke."""
    odd = broken.stack.configs[broken.odd_layer]
    if broken.axis == "q-size" and broken.layer == 0:
        return OWN_ROWS.format(expected=broken.expected, got=broken.got, rows=odd.qkv_rows, kv_size=odd.kv_size)
    if odd.table_breaks_at is not None:
        return TABLE.format(row=odd.table_breaks_at, layer=broken.layer)
    values = {"expected": broken.expected, "got": broken.got}
    if broken.axis == "rope-scaling":
        values = {name: scaling_text(value) for name, value in values.items()}
    return TEXTS[broken.axis].format(**values, layer=broken.layer, rotary_dim=odd.rotary_dim)


def scaling_text(pairs):
    return "{" + ", ".join(f"{name}={value}" for name, value in pairs) + "}" if pairs else "none"


def assert_refused(broken):
    """FusedKV refuses it, for this reason and in these words."""
    with pytest.raises(FusedKVError) as caught:
        broken.stack.build(FusedKV)
    error = caught.value
    assert error.axis == broken.axis
    assert error.layer == broken.layer
    assert error.expected == broken.expected
    assert error.got == broken.got
    assert str(error) == due_text(broken)
    assert isinstance(error, StackUnsupportedError if broken.layer is None else StackMismatchError)


# --- refused ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
def test_one_odd_layer_is_refused_with_its_text_axis_and_layer(axis):
    @settings(deadline=None, max_examples=25, derandomize=True)
    @given(heterogeneous_stacks(axis=axis))
    def check(broken):
        assert broken.axis == axis
        assert_refused(broken)

    check()


@settings(deadline=None, max_examples=150, derandomize=True)
@given(heterogeneous_stacks(max_layers=5))
def test_whatever_is_odd_in_whichever_layer_is_refused(broken):
    assert_refused(broken)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("odd_layer", [0, 1, 3])
def test_every_layer_can_be_the_odd_one(axis, odd_layer):
    broken = find(
        heterogeneous_stacks(axis=axis, min_layers=4, max_layers=4),
        lambda b: b.odd_layer == odd_layer,
        settings=LOOKING,
    )
    assert_refused(broken)


WAYS = {
    "no K norm": ("k-norm", lambda odd: odd.k_norm == "none"),
    "a K norm over all heads": ("k-norm", lambda odd: odd.k_norm == "whole"),
    "more or fewer query heads": ("q-size", lambda odd: odd.q_size == odd.num_heads * odd.head_dim),
    "a q_size that the rows contradict": ("q-size", lambda odd: odd.q_size != odd.num_heads * odd.head_dim),
    "a table that leaves its scaling": ("rope-scaling", lambda odd: odd.table_breaks_at is not None),
    "V wider than K": ("v-head-dim", lambda odd: odd.v_head_dim > odd.head_dim),
    "V narrower than K": ("v-head-dim", lambda odd: odd.v_head_dim < odd.head_dim),
    "8-bit integers": ("quantization", lambda odd: odd.quantization == "int8"),
    "8-bit floats": ("quantization", lambda odd: odd.quantization == "float8_e4m3fn"),
    "packed integers": ("quantization", lambda odd: odd.quantization in ("qweight", "weight_packed")),
    "a method's name": ("quantization", lambda odd: odd.quantization == "fp8"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_be_odd_is_drawn(way):
    axis, holds = WAYS[way]
    broken = find(heterogeneous_stacks(axis=axis), lambda b: holds(b.stack.configs[b.odd_layer]), settings=LOOKING)
    assert_refused(broken)


# --- and for nothing else -----------------------------------------------------------------------------------------------------------------

#: Fields that follow from the one that is changed.
FOLLOW = {
    "num-kv-heads": {"num_heads", "q_size"},
    "head-dim": {"v_head_dim", "q_size"},
    "rope-style": {"is_neox_style"},
    "rope-scaling": {"table_breaks_at"},
    "q-size": {"num_heads"},
}


@pytest.mark.parametrize("axis", [*AXES, *SOFT_AXES])
def test_one_layer_differs_in_one_axis(axis):
    @settings(deadline=None, max_examples=20, derandomize=True)
    @given(heterogeneous_stacks(axis=axis, max_layers=4))
    def check(broken):
        configs = list(broken.stack.configs)
        odd = configs.pop(broken.odd_layer)
        assert all(config == configs[0] for config in configs)
        differing = {
            field.name
            for field in dataclasses.fields(LayerConfig)
            if getattr(odd, field.name) != getattr(configs[0], field.name)
        }
        assert differing
        assert differing <= {axis.replace("-", "_")} | FOLLOW.get(axis, set())

    check()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(heterogeneous_stacks())
def test_without_the_odd_layer_the_stack_is_accepted(broken):
    configs = [config for layer, config in enumerate(broken.stack.configs) if layer != broken.odd_layer]
    Stack(configs=configs, seed=broken.stack.seed).build(FusedKV)


ALONE = (
    "num-kv-heads",
    "head-dim",
    "rotary-dim",
    "rope-theta",
    "hidden-size",
    "dtype",
    "bias",
    "norm-kind",
    "value-scale",
)


@pytest.mark.parametrize("axis", ALONE)
def test_the_odd_layer_alone_is_accepted(axis):
    @settings(deadline=None, max_examples=10, derandomize=True)
    @given(heterogeneous_stacks(axis=axis))
    def check(broken):
        Stack(configs=[broken.stack.configs[broken.odd_layer]] * 2).build(FusedKV)

    check()


# --- soft -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", SOFT_AXES)
def test_a_soft_axis_is_served_right(axis):
    @settings(deadline=None, max_examples=30, derandomize=True)
    @given(heterogeneous_stacks(axis=axis, weights="tiny", norms="normal", config=layer_configs(dtype="float32")))
    def check(broken):
        assert broken.is_soft
        layers = broken.stack.layers
        generator = torch.Generator().manual_seed(broken.stack.seed)
        hidden = torch.randn(3, broken.stack.hidden_size, generator=generator)
        positions = torch.tensor([5, 0, 3])
        k, _ = broken.stack.build(FusedKV).compute(hidden, positions)
        eager, _ = eager_kv(layers, hidden, positions)
        assert_close(k, fused_kv_reference(layers, hidden, positions)[0], eager, what="K", reduction_sizes=(33, 128))

    check()


def test_a_soft_axis_is_not_drawn_unasked():
    @settings(deadline=None, max_examples=100, derandomize=True)
    @given(heterogeneous_stacks())
    def check(broken):
        assert not broken.is_soft

    check()


# --- arguments and printing ---------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    heterogeneous_stacks(
        config=LayerConfig(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1), weights="large", seed=3
    )
)
def test_a_configuration_without_room_in_an_axis_is_not_broken_there(broken):
    assert broken.axis != "rotary-dim"
    assert (broken.stack.weights, broken.stack.seed) == ("large", 3)
    assert_refused(broken)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(heterogeneous_stacks(config=layer_configs(head_dim=80, rotary_dim=40, dtype="bfloat16"), axis="head-dim"))
def test_the_configuration_may_be_a_strategy(broken):
    assert 80 in (broken.expected, broken.got)
    assert_refused(broken)


def test_the_smallest_broken_stack_can_be_read():
    """Pinned: what a reader sees when a validator misses an odd head width."""
    found = find(heterogeneous_stacks(), lambda b: b.axis == "head-dim", settings=FINDING)
    assert repr(found) == (
        "BrokenStack(axis='head-dim', odd_layer=1, layer=1, expected=2, got=3, stack=Stack(configs="
        "[LayerConfig(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1)] + "
        "[LayerConfig(num_heads=1, num_kv_heads=1, head_dim=3, hidden_size=1, rotary_dim=2)], "
        "seed=0, weights='zeros', norms='zeros'))"
    )


@settings(deadline=None, max_examples=50, derandomize=True)
@given(heterogeneous_stacks())
def test_what_is_printed_makes_the_same_stack(broken):
    again = eval(repr(broken.stack))
    assert list(again.configs) == list(broken.stack.configs)
    assert again.facts == broken.stack.facts
