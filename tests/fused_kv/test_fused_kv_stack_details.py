"""The validators of the stack, down to what they say and to what they read when something is absent.

Failure modes this file exists to catch: an axis, a value or a layer that an error carries wrongly; a fault reported twice; an absent
attribute that breaks a validator, or that is taken for a value; one of several spellings not read; tables called different that only their
rounding tells apart, or the same when they are not. Each is what some one-token change of `stack.py` would do.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fakes import FakeRope, fake_layers

from pytest_specdecode.errors import StackMismatchError, StackUnsupportedError
from pytest_specdecode.fused_kv.stack import (
    AXES,
    LayerFacts,
    differ,
    facts_of,
    first_differing_row,
    mismatches,
    norm_kind_of,
    norm_width_of,
    normal_scaling,
    plain_shape,
    quantization_of,
    rope_facts,
    table_mismatches,
    validate,
    value_scale_of,
)

SHARED = {"num_kv_heads": 2, "head_dim": 16, "rotary_dim": 16, "is_neox_style": True}
NOTHING = dict.fromkeys(SHARED)


def faults(facts, **arguments):
    return list(mismatches(facts, **{**SHARED, **arguments}))


def facts_of_all(layers):
    return [facts_of(layer) for layer in layers]


def said(fault):
    return fault.axis, fault.expected, fault.got, fault.layer


def test_the_style_of_the_shared_rope_is_said_in_full():
    (fault,) = faults([LayerFacts()], is_neox_style=False, interleaved=False)
    assert said(fault) == ("rope-style", True, False, None)


def test_interleaved_pairs_are_served_unless_the_path_cannot():
    """By default they are; a path that cannot says so before all else, and of layers by halves alone it says nothing."""
    pairs = [LayerFacts(is_neox_style=False)] * 2
    assert faults(pairs, is_neox_style=False) == []
    validate(pairs, **{**SHARED, "is_neox_style": False})
    for style, said_so in ((False, True), (True, False), (None, False)):
        found = [
            fault for fault in faults([LayerFacts()], is_neox_style=style, interleaved=False) if fault.layer is None
        ]
        assert bool(found) is said_so
    assert faults([LayerFacts()], is_neox_style=True, interleaved=False) == []
    with pytest.raises(StackUnsupportedError, match="Only neox-style"):
        validate(pairs, **{**SHARED, "is_neox_style": False}, interleaved=False)


def test_no_layers_is_the_only_fault_then():
    (fault,) = faults([])
    assert (fault.expected, fault.got) == (1, 0)


@pytest.mark.parametrize("unknown", SHARED)
def test_an_argument_that_is_unknown_is_compared_with_nothing(unknown):
    assert faults(facts_of_all(fake_layers(2)), **{unknown: None}) == []


# SGLang's text has a width and a style either way.
@pytest.mark.parametrize(
    ("fact", "arguments", "text", "axis"),
    [
        (
            LayerFacts(is_neox_style=False),
            {},
            "expected (rotary_dim=16, neox=True), got (rotary_dim=16, neox=False)",
            "rope-style",
        ),
        (
            LayerFacts(rotary_dim=8),
            {},
            "expected (rotary_dim=16, neox=True), got (rotary_dim=8, neox=True)",
            "rotary-dim",
        ),
        (
            LayerFacts(rotary_dim=8, is_neox_style=False),
            {"is_neox_style": None},
            "expected (rotary_dim=16, neox=True), got (rotary_dim=8, neox=False)",
            "rotary-dim",
        ),
        (
            LayerFacts(rotary_dim=8),
            {"is_neox_style": None},
            "expected (rotary_dim=16, neox=True), got (rotary_dim=8, neox=True)",
            "rotary-dim",
        ),
    ],
)
def test_a_rope_mismatch_says_both_whatever_is_unknown(fact, arguments, text, axis):
    (fault,) = faults([fact], **arguments)
    assert text in str(fault)
    assert fault.axis == axis


def test_a_rope_mismatch_says_the_style_that_was_due():
    _, fault = faults([LayerFacts(is_neox_style=True)], is_neox_style=False, interleaved=False)
    assert "expected (rotary_dim=16, neox=False), got (rotary_dim=16, neox=True)" in str(fault)
    assert said(fault) == ("rope-style", False, True, 0)


# One fault, one report.
@pytest.mark.parametrize(
    ("change", "axes"),
    [
        ({"rotary_dim": 8}, ["rotary-dim"]),
        ({"num_heads": 8, "q_size": 64}, ["q-size"]),
        ({"theta": 1e6}, ["rope-theta"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope-scaling"]),
    ],
)
def test_each_fault_is_reported_once(change, axes):
    assert [fault.axis for fault in faults(facts_of_all(fake_layers(2, overrides={1: change})))] == axes


def test_a_table_of_another_width_is_one_fault():
    rope = FakeRope(32)
    rope.rotary_dim = 16
    (fault,) = faults(facts_of_all(fake_layers(2, overrides={1: {"rotary_emb": rope}})))
    assert said(fault) == ("rotary-dim", 16, 32, 1)


def test_a_layer_without_quantisation_among_quantised_ones():
    quantised, plain = LayerFacts(quantization="awq"), LayerFacts()
    fault = faults([quantised, plain])[0]
    assert said(fault) == ("quantization", "awq", "none", 1)


# Rows that are not known are not counted.
@pytest.mark.parametrize("unknown", ["qkv_rows", "q_size", "v_head_dim"])
def test_rows_are_counted_only_where_all_of_them_are_known(unknown):
    known = {"qkv_rows": 100, "q_size": 64, "head_dim": 16, "v_head_dim": 16}
    assert [fault.axis for fault in faults([LayerFacts(**known)])] == ["q-size"]
    assert faults([LayerFacts(**{**known, unknown: None})]) == []


def test_rows_are_not_counted_where_the_heads_are_unknown():
    fact = LayerFacts(qkv_rows=100, q_size=64, head_dim=16, v_head_dim=16)
    assert faults([fact], num_kv_heads=None) == []


# What the path cannot do.
def test_a_shared_rope_without_a_table_is_refused():
    (fault,) = faults([LayerFacts()], shared_rope=LayerFacts(rope_problem="it has none"))
    assert isinstance(fault, StackUnsupportedError)
    assert said(fault) == ("rope-scaling", "cos_sin_cache [positions, rotary_dim]", "it has none", None)


def test_a_norm_over_a_width_that_is_not_known_is_refused():
    (fault,) = faults([LayerFacts(k_norm="whole")])
    assert said(fault) == ("k-norm", "per-head", "k_norm over another width", 0)


def test_what_would_be_served_is_said_beside_what_is_not():
    (fault,) = faults([LayerFacts(k_norm="none")])
    assert said(fault) == ("k-norm", "per-head", "k_norm=none", 0)
    (fault,) = faults([LayerFacts(norm_kind="layernorm")])
    assert said(fault) == ("norm-kind", ("rms", "gemma"), "layernorm", 0)
    (fault,) = faults([LayerFacts(dtype="float64")])
    assert said(fault) == ("dtype", ("float32", "float16", "bfloat16"), "float64", 0)


@pytest.mark.parametrize(
    ("fact", "head_dim"),
    [(LayerFacts(head_dim=16, v_head_dim=8), None), (LayerFacts(v_head_dim=8), 16)],
    ids=["by the layer", "by the argument"],
)
def test_v_heads_of_another_width_are_seen_whoever_knows_k(fact, head_dim):
    (fault,) = faults([fact], head_dim=head_dim)
    assert said(fault) == ("v-head-dim", "head_dim", 8, 0)


def test_the_argument_is_what_v_heads_are_held_against():
    first, second = faults([LayerFacts(head_dim=8, v_head_dim=8)])
    assert (first.axis, second.axis, second.got) == ("head-dim", "v-head-dim", 8)


def test_a_norm_of_the_context_that_is_only_stated_is_refused():
    layers = fake_layers(2)
    for layer in layers:
        layer.self_attn.supports_fused_context_kv = False
    (fault,) = faults(facts_of_all(layers))
    assert isinstance(fault, StackUnsupportedError)
    assert said(fault) == ("context-norm", False, "supports_fused_context_kv=False", 0)


def test_a_norm_of_the_context_that_some_layers_bring_is_a_mismatch():
    layers = fake_layers(2)
    layers[1].context_norm = SimpleNamespace()
    (fault,) = faults(facts_of_all(layers))
    assert isinstance(fault, StackMismatchError)
    assert said(fault) == ("context-norm", "none", "given", 1)


# Reading.
def test_a_layer_without_k_norm_has_no_kind_of_norm():
    facts = facts_of(fake_layers(1, k_norm="none")[0])
    assert (facts.k_norm, facts.norm_kind, facts.norm_eps, facts.k_norm_width) == ("none", None, None, None)


def test_a_rotary_object_that_says_little():
    table = torch.zeros(4, 16)
    assert rope_facts(SimpleNamespace(cos_sin_cache=table), 16).rotary_dim == 16
    assert rope_facts(SimpleNamespace(cos_sin_cache=table)).rotary_dim is None
    assert rope_facts(SimpleNamespace(cos_sin_cache=table, rotary_dim=0), 16).rotary_dim is None
    assert rope_facts(SimpleNamespace(cos_sin_cache=table)).is_neox_style is True
    assert rope_facts(None).rope_problem == "the layer has no rotary_emb"


@pytest.mark.parametrize("name", ["base", "theta", "rope_theta"])
def test_theta_is_read_under_each_of_its_names(name):
    assert rope_facts(SimpleNamespace(**{name: 5000})).rope_theta == 5000.0


@pytest.mark.parametrize("name", ["value_scale", "attention_value_scale", "v_scale"])
def test_a_value_scale_is_read_under_each_of_its_names(name):
    assert value_scale_of(SimpleNamespace(**{name: 0.5})) == 0.5


def test_a_norm_is_of_the_plain_kind_unless_it_says_otherwise():
    assert norm_kind_of(SimpleNamespace()) == "rms"


def test_a_norms_width_is_that_of_its_last_axis():
    assert norm_width_of(SimpleNamespace(weight=torch.zeros(4, 16))) == 16
    assert norm_width_of(None) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e5m2], ids=str)
def test_a_weight_of_a_packed_dtype_is_quantised(dtype):
    projection = SimpleNamespace(weight=torch.zeros(4, 4).to(dtype))
    assert quantization_of(projection) == str(dtype).removeprefix("torch.")
    assert plain_shape(projection) == (None, None)


def test_a_projection_without_a_weight():
    assert quantization_of(SimpleNamespace(qweight=1)) == "qweight"
    assert quantization_of(SimpleNamespace()) is None
    assert plain_shape(SimpleNamespace()) == (None, None)
    assert plain_shape(SimpleNamespace(weight=torch.zeros(8))) == (None, None)
    assert plain_shape(SimpleNamespace(weight=torch.zeros(8, 4))) == (8, 4)


def test_unknown_values_do_not_differ():
    assert (differ(None, 1), differ(1, None), differ(1, 1), differ(1, 2)) == (False, False, False, True)


def test_facts_are_equal_whatever_their_tables_and_do_not_print_them():
    first, second = LayerFacts(rope_table=torch.zeros(2, 2)), LayerFacts(rope_table=torch.ones(2, 2))
    assert first == second
    assert "rope_table" not in repr(first)


# Scaling.
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_the_default_type_with_fields_of_no_scaling_is_unscaled(spelling):
    assert normal_scaling({spelling: "default", "partial_rotary_factor": 0.5}) == ()
    assert normal_scaling({spelling: "default", "mrope_section": [2, 3], "mrope_interleaved": True}) == ()
    assert normal_scaling({spelling: "yarn", "mrope_section": [2, 3]}) != ()


def test_a_scaling_without_a_type_is_of_the_default_type():
    assert normal_scaling({"factor": 4}) == (("factor", 4.0), ("rope_type", "default"))


def test_a_field_that_is_null_is_absent():
    assert normal_scaling({"rope_type": "yarn", "beta_fast": None}) == (("rope_type", "yarn"),)


def test_fields_keep_their_meaning_when_they_are_made_comparable():
    fields = dict(normal_scaling({"rope_type": "x", "truncate": True, "nested": {"b": 2, "a": [1]}}))
    assert fields["truncate"] is True
    assert fields["nested"] == (("a", (1.0,)), ("b", 2.0))


class PlainRotary:
    pass


class YaRNRotary:
    pass


SCALING_ATTRIBUTES = [
    "scaling_factor", "factor", "scaling_type", "low_freq_factor", "high_freq_factor", "orig_max_position",
    "original_max_position_embeddings", "extrapolation_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "short_factor", "long_factor", "scaling_alpha", "ntk_alpha",
]  # fmt: skip


@pytest.mark.parametrize("name", SCALING_ATTRIBUTES)
def test_an_attribute_of_a_rotary_class_is_read_as_its_scaling(name):
    rope = PlainRotary()
    setattr(rope, name, 3)
    assert rope_facts(rope).rope_scaling == tuple(sorted([(name, 3.0), ("rope_type", "PlainRotary")]))


def test_a_rotary_class_is_known_by_its_name():
    assert rope_facts(PlainRotary()).rope_scaling == ()
    assert rope_facts(YaRNRotary()).rope_scaling == (("rope_type", "YaRNRotary"),)


# Tables.
EPS = torch.finfo(torch.float32).eps


def rows_apart(distance, *, at=0, rows=3):
    """Two tables that differ by `distance` in one row."""
    first, second = torch.zeros(rows, 2), torch.zeros(rows, 2)
    second[at, 1] = distance
    return first_differing_row(first, second)


def test_the_rounding_that_a_row_is_forgiven():
    # Twice the table's own eps, and four of float32's for each position up to the row's.
    assert rows_apart(6 * EPS) is None
    assert rows_apart(6.5 * EPS) == 0
    assert rows_apart(10 * EPS, at=1) is None
    assert rows_apart(10.5 * EPS, at=1) == 1
    big = torch.full((1, 2), 4.0)
    assert first_differing_row(big, big + 20 * EPS) is None
    assert first_differing_row(big, big + 28 * EPS) == 0


def test_the_rounding_is_that_of_the_shared_table():
    # Far out a row is forgiven more than 1, so that the layer's own table has larger entries than the shared one.
    rows = 2_200_000
    shared, own = torch.zeros(rows, 1), torch.zeros(rows, 1)
    own[-1] = 1.08
    fact = LayerFacts(rope_table=own)
    (fault,) = table_mismatches(0, fact, shared, 1)
    assert fault.got == f"another row at position {rows - 1}"


def test_tables_without_a_row_or_without_each_other_do_not_differ():
    table = FakeRope(16).cos_sin_cache
    assert first_differing_row(None, table) is None
    assert first_differing_row(table, None) is None
    assert first_differing_row(table, table.bfloat16()[:0]) is None
    assert first_differing_row(table, table[:4]) is None
    assert first_differing_row(table[:4], table) is None
    assert first_differing_row(table[:1], table[:1] + 1) == 0


def test_the_axes_have_their_names():
    assert AXES == (
        "num-kv-heads", "head-dim", "rotary-dim", "rope-style", "rope-theta", "rope-scaling", "hidden-size", "dtype", "bias", "k-norm",
        "norm-kind", "v-head-dim", "value-scale", "q-size", "quantization",
    )  # fmt: skip
