"""The validators of the stack.

Failure modes this file exists to catch: a layer that differs from the others in one thing and is stacked all the same (wrong K or V in
silence); a message that is not SGLang's, so that nobody finds it by looking it up; the wrong layer or axis blamed; checks in another
order than SGLang's; an unknown value taken for a difference; validators that pull in torch, so that headers alone cannot be judged.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeRope, fake_layers

from pytest_specdecode.errors import StackMismatchError, StackUnsupportedError
from pytest_specdecode.fused_kv.stack import (
    AXES,
    SOFT_AXES,
    LayerFacts,
    facts_of,
    first_differing_row,
    mismatches,
    normal_scaling,
    validate,
)

GOOD = LayerFacts(
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    is_neox_style=True,
    rope_theta=1e4,
    rope_scaling=(),
    hidden_size=24,
    dtype="bfloat16",
    bias=False,
    k_norm="per-head",
    norm_kind="rms",
    v_head_dim=16,
    value_scale=1.0,
    q_size=64,
    norm_eps=1e-6,
)

SHARED = {"num_kv_heads": 2, "head_dim": 16, "rotary_dim": 16, "is_neox_style": True}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# Axis, what is changed in one layer, expected, got, and the message up to the layer.
ONE_LAYER_DIFFERS = [
    (
        "num-kv-heads",
        {"num_kv_heads": 4},
        2,
        4,
        "num_kv_heads mismatch across layers for fused KV path: expected 2, got 4",
    ),
    ("head-dim", {"head_dim": 32}, 16, 32, "head_dim mismatch across layers for fused KV path: expected 16, got 32"),
    (
        "rotary-dim",
        {"rotary_dim": 8},
        16,
        8,
        "RoPE config mismatch across layers for fused KV path: "
        "expected (rotary_dim=16, neox=True), got (rotary_dim=8, neox=True)",
    ),
    (
        "rope-style",
        {"is_neox_style": False},
        True,
        False,
        "RoPE config mismatch across layers for fused KV path: "
        "expected (rotary_dim=16, neox=True), got (rotary_dim=16, neox=False)",
    ),
    (
        "rope-theta",
        {"theta": 1e6},
        1e4,
        1e6,
        "rope_theta mismatch across layers for fused KV path: expected 10000.0, got 1000000.0",
    ),
    (
        "rope-scaling",
        {"rope_scaling": YARN},
        (),
        normal_scaling(YARN),
        "rope_scaling mismatch across layers for fused KV path: expected none, "
        "got {factor=4.0, original_max_position_embeddings=32.0, rope_type=yarn}",
    ),
    (
        "hidden-size",
        {"hidden_size": 40},
        24,
        40,
        "hidden_size mismatch across layers for fused KV path: expected 24, got 40",
    ),
    (
        "dtype",
        {"dtype": torch.float16},
        "float32",
        "float16",
        "qkv weight dtype mismatch across layers for fused KV path: expected float32, got float16",
    ),
    (
        "bias",
        {"bias": True},
        False,
        True,
        "qkv bias mismatch across layers for fused KV path: expected False, got True",
    ),
    (
        "k-norm",
        {"k_norm": "whole"},
        "per-head",
        "whole",
        "k_norm mismatch across layers for fused KV path: expected per-head, got whole",
    ),
    (
        "norm-kind",
        {"norm_kind": "gemma"},
        "rms",
        "gemma",
        "norm kind mismatch across layers for fused KV path: expected rms, got gemma",
    ),
    ("v-head-dim", {"v_head_dim": 8}, 16, 8, "v_head_dim mismatch across layers for fused KV path: expected 16, got 8"),
    (
        "value-scale",
        {"value_scale": 0.5},
        1.0,
        0.5,
        "value scale mismatch across layers for fused KV path: expected 1.0, got 0.5",
    ),
    ("q-size", {"num_heads": 8}, 64, 128, "q_size mismatch across layers for fused KV path: expected 64, got 128"),
    (
        "quantization",
        {"quant_method": "awq"},
        "none",
        "awq",
        "quantization mismatch across layers for fused KV path: expected none, got awq",
    ),
]


def built_facts(layers):
    return [facts_of(layer) for layer in layers]


def first_fault(facts, **arguments):
    with pytest.raises((StackMismatchError, StackUnsupportedError)) as caught:
        validate(facts, **{**SHARED, **arguments})
    return caught.value


def test_every_axis_has_a_case_here():
    assert [case[0] for case in ONE_LAYER_DIFFERS] == list(AXES)
    assert SOFT_AXES == ("norm-eps",)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize(("axis", "change", "expected", "got", "text"), ONE_LAYER_DIFFERS, ids=AXES)
def test_a_layer_that_differs_is_refused(axis, change, expected, got, text, layer):
    fault = first_fault(built_facts(fake_layers(3, overrides={layer: change})))
    assert str(fault) == f"{text} at layer {layer}."
    assert (fault.axis, fault.expected, fault.got, fault.layer) == (axis, expected, got, layer)
    assert isinstance(fault, ValueError)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"bias": True},
        {"norm_kind": "gemma"},
        {"value_scale": 0.612},
        {"rotary_dim": 6},
        {"head_dim": 80, "rotary_dim": 2},
        {"dtype": torch.bfloat16},
        {"rope_scaling": YARN},
        {"theta": 5e5},
        {"eps_name": "eps"},
        {"num_kv_heads": 1},
    ],
    ids=repr,
)
def test_layers_that_agree_are_accepted(shape):
    layers = fake_layers(3, **shape)
    facts = built_facts(layers)
    assert (
        list(
            mismatches(
                facts,
                num_kv_heads=shape.get("num_kv_heads", 2),
                head_dim=shape.get("head_dim", 16),
                rotary_dim=shape.get("rotary_dim", shape.get("head_dim", 16)),
                is_neox_style=True,
            )
        )
        == []
    )


def test_the_norms_epsilon_may_differ():
    validate(built_facts(fake_layers(2, overrides={1: {"eps": 1e-5}})), **SHARED)


# SGLang's order: style, then width, then per layer heads, head_dim and RoPE, layer 0 completely before layer 1.
def test_style_of_the_shared_rope_comes_before_everything():
    fault = first_fault([], is_neox_style=False, rotary_dim=0, interleaved=False)
    assert str(fault) == "Only neox-style RoPE is supported."
    assert isinstance(fault, NotImplementedError)


@pytest.mark.parametrize("rotary_dim", [0, -2, 18, 7])
def test_width_of_the_shared_rope_comes_second_and_odd_widths_are_seen_at_construction(rotary_dim):
    fault = first_fault([LayerFacts(num_kv_heads=99)], rotary_dim=rotary_dim)
    assert str(fault) == f"Invalid fused KV rotary/head dim pair: rotary_dim={rotary_dim}, head_dim=16."
    assert fault.axis == "rotary-dim"


def test_a_layer_is_checked_completely_before_the_next():
    layers = fake_layers(3, overrides={1: {"num_kv_heads": 4}, 2: {"rotary_dim": 8}})
    assert first_fault(built_facts(layers)).layer == 1
    layers = fake_layers(3, overrides={1: {"rotary_dim": 8}, 2: {"num_kv_heads": 4}})
    assert first_fault(built_facts(layers)).axis == "rotary-dim"


def test_heads_come_before_head_dim_before_rope_within_a_layer():
    everything = {"num_kv_heads": 4, "head_dim": 32, "rotary_dim": 8, "theta": 1e6}
    facts = built_facts(fake_layers(2, overrides={1: everything}))
    axes = [fault.axis for fault in mismatches(facts, **SHARED)]
    assert axes[:3] == ["num-kv-heads", "head-dim", "rotary-dim"]
    assert "rope-theta" in axes[3:]


def test_sglangs_checks_of_all_layers_come_before_ours():
    facts = built_facts(fake_layers(3, overrides={1: {"theta": 1e6}, 2: {"head_dim": 32, "rotary_dim": 16}}))
    assert first_fault(facts).axis == "head-dim"


def test_arguments_that_do_not_fit_layer_0_blame_layer_0():
    fault = first_fault(built_facts(fake_layers(2)), num_kv_heads=8)
    assert str(fault) == "num_kv_heads mismatch across layers for fused KV path: expected 8, got 2 at layer 0."


def test_all_offending_layers_are_listed():
    facts = built_facts(fake_layers(4, overrides={1: {"theta": 1e6}, 3: {"theta": 1e5}}))
    assert [(fault.axis, fault.layer, fault.got) for fault in mismatches(facts, **SHARED)] == [
        ("rope-theta", 1, 1e6),
        ("rope-theta", 3, 1e5),
    ]


def test_zero_layers():
    assert "expected at least one" in str(first_fault([]))


def test_unknown_values_are_compared_with_nothing():
    unknown = LayerFacts()
    facts = [GOOD, unknown, GOOD]
    assert list(mismatches(facts, **SHARED)) == []
    assert (
        list(mismatches([unknown, unknown], num_kv_heads=None, head_dim=None, rotary_dim=None, is_neox_style=None))
        == []
    )


def test_an_unknown_layer_0_does_not_hide_a_difference_between_the_others():
    facts = [LayerFacts(), GOOD, LayerFacts(rope_theta=1e6)]
    fault = first_fault(facts)
    assert (fault.axis, fault.layer, fault.expected) == ("rope-theta", 2, 1e4)


# What all layers agree in, and the path cannot do.
@pytest.mark.parametrize(
    ("shape", "axis", "got"),
    [
        ({"k_norm": "none"}, "k-norm", "k_norm=none"),
        ({"k_norm": "whole"}, "k-norm", "k_norm over 32 features"),
        ({"quant_method": "awq"}, "quantization", "awq"),
        ({"v_head_dim": 8}, "v-head-dim", 8),
        ({"dtype": torch.float64}, "dtype", "float64"),
        (
            {"rotary_emb": SimpleNamespace(rotary_dim=16, base=1e4)},
            "rope-scaling",
            "SimpleNamespace has no cos_sin_cache",
        ),
        ({"norm_kind": "layernorm"}, "norm-kind", "layernorm"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_the_path_cannot_do_is_refused_by_name(shape, axis, got):
    fault = first_fault(built_facts(fake_layers(2, **shape)))
    assert isinstance(fault, NotImplementedError)
    assert (fault.axis, fault.got, fault.layer) == (axis, got, 0)
    assert "is not supported for fused KV path" in str(fault)


def test_a_rope_table_of_three_dimensions_is_refused():
    rope = SimpleNamespace(rotary_dim=16, cos_sin_cache=torch.zeros(8, 2, 16))
    fault = first_fault(built_facts(fake_layers(2, rotary_emb=rope)))
    assert fault.axis == "rope-scaling"
    assert "(8, 2, 16)" in str(fault)


def test_a_table_made_for_another_rotary_dim_is_refused():
    rope = FakeRope(32)
    rope.rotary_dim = 16
    fault = first_fault(built_facts(fake_layers(1, rotary_emb=rope)))
    assert (fault.axis, fault.expected, fault.got) == ("rotary-dim", 16, 32)


def test_kv_size_must_be_the_heads_times_their_width():
    fault = first_fault(built_facts(fake_layers(2, overrides={1: {"kv_size": 16}})))
    assert str(fault) == "kv_size mismatch across layers for fused KV path: expected 32, got 16 at layer 1."
    assert fault.axis == "num-kv-heads"


def test_q_size_must_leave_k_and_v_their_rows():
    # A query projection with an output gate is twice as wide as q_size says: K would be read out of Q.
    layers = fake_layers(2, num_heads=8, q_size=64)
    fault = first_fault(built_facts(layers))
    assert (fault.axis, fault.expected, fault.got, fault.layer) == ("q-size", 128, 64, 0)


def test_layers_that_norm_their_context_are_refused():
    layers = fake_layers(2)
    layers[1].supports_fused_context_kv = False
    fault = first_fault(built_facts(layers))
    assert (fault.layer, fault.axis) == (1, "context-norm")


# Layers may say the same and hold different tables.
def test_equal_words_and_another_table_is_a_scaling_mismatch():
    facts = built_facts(fake_layers(3, overrides={2: {"table_factor": 4.0}}))
    fault = first_fault(facts)
    assert (fault.axis, fault.layer) == ("rope-scaling", 2)
    assert str(fault) == (
        "RoPE table mismatch across layers for fused KV path: expected the rows of the shared cos_sin_cache, "
        "got other values from position 1 on at layer 2."
    )


def test_a_theta_fault_is_reported_once_and_not_as_a_table_fault_too():
    facts = built_facts(fake_layers(2, overrides={1: {"theta": 1e6}}))
    assert [fault.axis for fault in mismatches(facts, **SHARED)] == ["rope-theta"]


def test_tables_of_different_length_are_compared_as_far_as_both_go():
    validate(built_facts(fake_layers(2, overrides={1: {"table_rows": 16}})), **SHARED)


def test_tables_rounded_to_bfloat16_are_the_same_table():
    table = FakeRope(16).cos_sin_cache
    assert first_differing_row(table, table.bfloat16()) is None
    assert first_differing_row(table, table * 1.1386) == 0
    assert first_differing_row(table.bfloat16(), FakeRope(16, theta=1e5).cos_sin_cache) == 1


def test_a_table_computed_in_float32_is_the_same_table():
    exact = FakeRope(64, theta=1e6, rows=8192).cos_sin_cache
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, 64, 2).float() / 64)
    angles = torch.arange(8192).float()[:, None] * inv_freq
    assert first_differing_row(exact, torch.cat([angles.cos(), angles.sin()], dim=-1)) is None


def test_the_shared_rope_is_what_layers_are_held_against():
    facts = built_facts(fake_layers(2, theta=1e6))
    fault = first_fault(facts, shared_rope=LayerFacts(rope_theta=1e4))
    assert (fault.axis, fault.layer, fault.expected) == ("rope-theta", 0, 1e4)


# Reading layers.
class YaRNScalingRotaryEmbedding(FakeRope):
    def __init__(self, factor):
        super().__init__(16)
        del self.rope_scaling
        self.scaling_factor = factor


class LinearScalingRotaryEmbedding(YaRNScalingRotaryEmbedding):
    pass


@pytest.mark.parametrize("other", [YaRNScalingRotaryEmbedding(8.0), LinearScalingRotaryEmbedding(4.0)])
def test_rotary_classes_without_a_dictionary_are_told_apart_by_class_and_factor(other):
    layers = fake_layers(2, rotary_emb=YaRNScalingRotaryEmbedding(4.0), overrides={1: {"rotary_emb": other}})
    assert first_fault(built_facts(layers)).axis == "rope-scaling"


def test_scaling_spelled_two_ways_is_one_scaling():
    assert normal_scaling({"type": "yarn", "factor": 4}) == normal_scaling(
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    )
    assert normal_scaling({"rope_type": "default", "rope_theta": 1e6}) == normal_scaling(None) == ()
    assert hash(normal_scaling({"rope_type": "longrope", "short_factor": [1.0, 2.0]}))


def test_gemma_norms_are_known_by_class_name_too():
    class GemmaRMSNorm:
        weight = torch.zeros(16)
        eps = 1e-6

    layers = fake_layers(1)
    layers[0].self_attn.k_norm = GemmaRMSNorm()
    facts = facts_of(layers[0])
    assert (facts.norm_kind, facts.norm_eps, facts.k_norm) == ("gemma", 1e-6, "per-head")


def test_quantised_weights_are_known_by_what_they_hold():
    class Fp8LinearMethod:
        pass

    class UnquantizedLinearMethod:
        pass

    def quantization(qkv):
        return facts_of(SimpleNamespace(self_attn=SimpleNamespace(qkv_proj=qkv))).quantization

    weight = torch.zeros(4, 4)
    assert quantization(SimpleNamespace(weight=weight, quant_method=UnquantizedLinearMethod())) is None
    assert quantization(SimpleNamespace(weight=weight, quant_method=Fp8LinearMethod())) == "Fp8LinearMethod"
    assert quantization(SimpleNamespace(weight=weight.to(torch.float8_e4m3fn))) == "float8_e4m3fn"
    assert quantization(SimpleNamespace(weight_packed=weight)) == "weight_packed"


def test_a_value_scale_may_be_a_tensor():
    layers = fake_layers(1)
    layers[0].self_attn.v_scale = torch.tensor(0.5)
    assert facts_of(layers[0]).value_scale == 0.5


def test_headers_alone_are_judged_without_torch():
    code = (
        "import sys\n"
        "from pytest_specdecode.fused_kv import AXES, LayerFacts, mismatches\n"
        "facts = [LayerFacts(num_kv_heads=2), LayerFacts(num_kv_heads=4)]\n"
        "found = list(mismatches(facts, num_kv_heads=2, head_dim=None, rotary_dim=None, is_neox_style=None))\n"
        "assert [fault.layer for fault in found] == [1], found\n"
        "assert not {'torch', 'numpy', 'triton'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
