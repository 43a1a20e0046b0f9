"""`layer_configs` promises layers that any number of make a stack. It would break that promise by

- heads that do not divide, lanes that cannot rotate, a scaling that the lanes do not allow;
- an argument that is not heeded, or heeded only where it is a value and not where it is a strategy;
- a record whose print-out makes another record, so that an example copied out of a failure is another example.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pytest_specdecode.layers import RotaryEmbedding
from pytest_specdecode.strategies import LayerConfig, layer_configs

FINDING = settings(database=None, deadline=None, derandomize=True, max_examples=500)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(layer_configs())
def test_every_configuration_lies_in_the_promised_domain(config):
    assert config.num_heads % config.num_kv_heads == 0
    assert 0 < config.rotary_dim <= config.head_dim
    assert config.rotary_dim % 2 == 0
    assert config.is_neox_style
    assert config.k_norm == "per-head"
    assert config.v_head_dim == config.head_dim
    assert config.q_size == config.num_heads * config.head_dim
    assert config.quantization is None
    assert config.table_breaks_at is None
    assert config.dtype in ("float32", "float16", "bfloat16")
    assert config.norm_kind in ("rms", "gemma")
    assert config.norm_eps > 0
    assert config.value_scale > 0
    assert config.qkv_rows == (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


@settings(deadline=None, max_examples=60, derandomize=True)
@given(layer_configs())
def test_its_rope_can_be_made_and_reaches_every_position(config):
    rotary = RotaryEmbedding(config.spec.rope, config.head_dim)
    rotary._ensure_cos_sin_cache_length(config.max_position_embeddings - 1)
    assert rotary.cos_sin_cache.shape[0] >= config.max_position_embeddings
    assert rotary.cos_sin_cache.shape[1] == config.rotary_dim
    assert rotary.cos_sin_cache.isfinite().all()


@settings(deadline=None, max_examples=100, derandomize=True)
@given(layer_configs())
def test_what_is_printed_makes_the_same_configuration(config):
    assert eval(repr(config)) == config


def test_only_what_is_not_plain_is_printed():
    plain = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=3)
    assert repr(plain) == "LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=3)"
    odd = plain.changed(rotary_dim=4, bias=True)
    assert repr(odd) == "LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=3, rotary_dim=4, bias=True)"


def test_what_followed_from_the_old_width_follows_from_the_new_one():
    config = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=3, rotary_dim=4)
    wider = config.changed(head_dim=16)
    assert (wider.v_head_dim, wider.q_size) == (16, 64)
    assert wider.rotary_dim == 4  # said, so kept


@pytest.mark.parametrize(
    "wanted",
    [
        {"head_dim": 80},
        {"head_dim": 96, "rotary_dim": 2},
        {"head_dim": 128, "rotary_dim": 64},
        {"head_dim": 5, "rotary_dim": 4},
        {"num_kv_heads": 1},
        {"num_heads": 3, "num_kv_heads": 3},
        {"dtype": "bfloat16", "bias": True},
        {"dtype": "float16", "norm_kind": "gemma"},
        {"max_position_embeddings": 300, "value_scale": 0.612},
    ],
    ids=str,
)
def test_the_shapes_that_catch_bugs_are_drawn(wanted):
    found = find(
        layer_configs(),
        lambda config: all(getattr(config, name) == value for name, value in wanted.items()),
        settings=settings(FINDING, max_examples=20_000, phases=[Phase.generate]),
    )
    assert wanted.items() <= dataclasses.asdict(found).items()


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn", "dynamic"])
def test_every_scaling_is_drawn(rope_type):
    find(layer_configs(), lambda config: config.rope_scaling.get("rope_type") == rope_type, settings=FINDING)


ARGUMENTS = {
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rotary_dim": 12,
    "hidden_size": 7,
    "rope_theta": 1234.5,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "is_neox_style": False,
    "max_position_embeddings": 100,
    "dtype": "float16",
    "bias": True,
    "norm_kind": "gemma",
    "norm_eps": 0.25,
    "value_scale": 3.0,
}


@pytest.mark.parametrize("as_strategy", [False, True], ids=["value", "strategy"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_heeded(name, as_strategy):
    value = ARGUMENTS[name]

    @settings(deadline=None, max_examples=10, derandomize=True)
    @given(layer_configs(**{name: st.just(value) if as_strategy else value}))
    def check(config):
        assert getattr(config, name) == value
        assert config.num_heads % config.num_kv_heads == 0
        assert config.rotary_dim <= config.head_dim
        assert config.rotary_dim % 2 == 0

    check()


def test_the_fields_of_a_dynamic_scaling_are_given_lanes_enough():
    @settings(deadline=None, max_examples=40, derandomize=True)
    @given(layer_configs(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    def check(config):
        assert config.rotary_dim >= 4

    check()


def test_it_shrinks_to_the_plainest_configuration():
    found = find(layer_configs(), lambda config: True, settings=FINDING)
    assert found == LayerConfig(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1)
