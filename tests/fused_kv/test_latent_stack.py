"""The validators of the latent stack.

Failure modes this file exists to catch: a layer that differs from the others in one thing and is stacked all the same (wrong cache rows in
silence); the wrong layer or axis blamed; a joined down projection sliced at the wrong row; a norm over the whole row taken for one of the
latent; a layer whose cache holds more than a row per token taken for one that holds no more; an unknown value taken for a difference;
validators that pull in torch, so that headers alone cannot be judged.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeRope
from latent_fakes import latent_layers

from pytest_specdecode.errors import StackMismatchError, StackUnsupportedError
from pytest_specdecode.fused_kv import (
    LATENT_AXES,
    LATENT_SOFT_AXES,
    LatentFacts,
    latent_facts_of,
    latent_mismatches,
    validate_latent,
)
from pytest_specdecode.fused_kv.stack import normal_scaling, rope_facts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fused-kv.md").read_text(encoding="utf-8")
SHARED = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "is_neox_style": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# Axis, what all layers have, what is changed in one layer, expected, got, and the word in the message.
ONE_LAYER_DIFFERS = [
    ("kv-lora-rank", {}, {"rank": 16}, 24, 16, "kv_lora_rank"),
    ("qk-rope-head-dim", {}, {"rope_dim": 4}, 8, 4, "qk_rope_head_dim"),
    ("rope-style", {}, {"is_neox_style": True}, False, True, "is_neox_style"),
    ("rope-theta", {}, {"theta": 1e6}, 1e4, 1e6, "rope_theta"),
    ("rope-scaling", {}, {"rope_scaling": YARN}, (), normal_scaling(YARN), "rope_scaling"),
    ("hidden-size", {}, {"hidden_size": 40}, 20, 40, "hidden_size"),
    ("dtype", {}, {"dtype": torch.float16}, "float32", "float16", "kv_a weight dtype"),
    ("bias", {}, {"bias": True}, False, True, "kv_a bias"),
    ("latent-norm", {}, {"norm": "whole"}, "latent", "whole", "latent norm"),
    ("norm-kind", {}, {"norm_kind": "gemma"}, "rms", "gemma", "norm kind"),
    ("q-lora-rank", {"q_lora_rank": 6}, {"q_lora_rank": 10}, 6, 10, "q_lora_rank"),
    ("quantization", {}, {"quant_method": "awq"}, "none", "awq", "quantization"),
]


def facts(layers):
    return [latent_facts_of(layer) for layer in layers]


def first_fault(layers, **arguments):
    with pytest.raises((StackMismatchError, StackUnsupportedError)) as caught:
        validate_latent(facts(layers), **{**SHARED, **arguments})
    return caught.value


def shown(value):
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{name}={item}" for name, item in value) + "}" if value else "none"
    return str(value)


def test_every_axis_has_a_case_here():
    assert tuple(case[0] for case in ONE_LAYER_DIFFERS) == LATENT_AXES
    assert LATENT_SOFT_AXES == ("norm-eps",)
    assert len(set(LATENT_AXES)) == len(LATENT_AXES)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize(("axis", "shape", "change", "expected", "got", "what"), ONE_LAYER_DIFFERS, ids=LATENT_AXES)
def test_a_layer_that_differs_is_refused(axis, shape, change, expected, got, what, layer):
    fault = first_fault(latent_layers(3, overrides={layer: change}, **shape))
    assert str(fault) == (
        f"{what} mismatch across layers for fused latent path: expected {shown(expected)}, got {shown(got)} at layer {layer}."
    )
    assert (fault.axis, fault.expected, fault.got, fault.layer) == (axis, expected, got, layer)
    assert isinstance(fault, ValueError)


def documented():
    """The rows of the page's table, by axis."""
    section = PAGE.split("\n## The latent stack\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return {axis.strip("`"): rest for axis, *rest in cells}


def test_the_page_says_of_each_axis_what_is_raised():
    assert tuple(documented()) == LATENT_AXES
    for axis, *_, what in ONE_LAYER_DIFFERS:
        meaning, text = documented()[axis]
        assert meaning
        assert text == f"{what} mismatch across layers for fused latent path: expected E, got G at layer L."


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"bias": True},
        {"norm_kind": "gemma"},
        {"rank": 5, "rope_dim": 2},
        {"q_lora_rank": 6},
        {"q_lora_rank": 6, "bias": True},
        {"dtype": torch.bfloat16},
        {"rope_scaling": YARN},
        {"theta": 5e5},
        {"eps_name": "eps"},
        {"is_neox_style": True},
        {"norm": "whole"},
        {"norm": "whole", "is_row": True},
        {"norm": "whole", "is_row": True, "q_lora_rank": 6, "norm_kind": "gemma", "bias": True},
    ],
    ids=repr,
)
def test_layers_that_agree_are_accepted(shape):
    layers = latent_layers(3, **shape)
    built_with = {
        "kv_lora_rank": shape.get("rank", 24),
        "qk_rope_head_dim": shape.get("rope_dim", 8),
        "is_neox_style": shape.get("is_neox_style", False),
    }
    shared = rope_facts(layers[0].self_attn.rotary_emb, built_with["qk_rope_head_dim"])
    assert list(latent_mismatches(facts(layers), **built_with, shared_rope=shared)) == []


@pytest.mark.parametrize(("norm", "other"), [("whole", "latent"), ("whole", "none"), ("latent", "other")])
def test_norms_over_other_lanes_do_not_mix(norm, other):
    fault = first_fault(latent_layers(2, norm=norm, overrides={1: {"norm": other}}))
    assert (fault.axis, fault.expected, fault.got, fault.layer) == ("latent-norm", norm, other, 1)
    assert isinstance(fault, StackMismatchError)


@pytest.mark.parametrize("norm", ["latent", "whole"])
def test_the_names_of_deepseek_v4_say_nothing_of_the_norm(norm):
    """What a norm goes over is its weight's width, whatever the projection is called."""
    for is_row in (False, True):
        (said,) = facts(latent_layers(1, norm=norm, is_row=is_row))
        assert (said.latent_norm, said.kv_lora_rank, said.qk_rope_head_dim, said.rows) == (norm, 24, 8, 32)
    assert list(latent_mismatches(facts(latent_layers(2, norm=norm, overrides={1: {"is_row": True}})), **SHARED)) == []


def test_rows_of_deepseek_v4_that_do_not_add_up():
    fault = first_fault(latent_layers(2, norm="whole", is_row=True, overrides={1: {"extra_rows": 3}}))
    assert str(fault) == (
        "kv_lora_rank mismatch for fused latent path: expected 27 (wkv.weight has 35 rows, of which latent and k_pe take 24 + 8), "
        "got 24 at layer 1."
    )


def test_epsilons_may_differ():
    assert list(latent_mismatches(facts(latent_layers(2, overrides={1: {"eps": 1e-3}})), **SHARED)) == []


def test_a_joined_and_a_separate_projection_may_stand_side_by_side():
    assert list(latent_mismatches(facts(latent_layers(2, overrides={1: {"q_lora_rank": 6}})), **SHARED)) == []


def test_for_one_layer_the_order_is_that_of_the_axes():
    layers = latent_layers(2, overrides={1: {"rank": 16, "is_neox_style": True, "theta": 1e6, "bias": True}})
    found = [fault.axis for fault in latent_mismatches(facts(layers), **SHARED)]
    assert found == ["kv-lora-rank", "rope-style", "rope-theta", "bias"]


@pytest.mark.parametrize(
    ("widths", "text", "axis"),
    [
        (
            {"qk_rope_head_dim": 7},
            "Invalid fused latent widths: kv_lora_rank=24, qk_rope_head_dim=7.",
            "qk-rope-head-dim",
        ),
        (
            {"qk_rope_head_dim": 0},
            "Invalid fused latent widths: kv_lora_rank=24, qk_rope_head_dim=0.",
            "qk-rope-head-dim",
        ),
        ({"kv_lora_rank": 0}, "Invalid fused latent widths: kv_lora_rank=0, qk_rope_head_dim=8.", "kv-lora-rank"),
    ],
)
def test_widths_that_no_row_can_have(widths, text, axis):
    fault = first_fault(latent_layers(1), **widths)
    assert (str(fault), fault.axis, fault.layer) == (text, axis, None)


def test_a_shared_rope_of_another_width_than_k_pe():
    fault = first_fault(latent_layers(1), shared_rope=rope_facts(FakeRope(4)))
    assert str(fault) == "Invalid fused latent rotary/rope dim pair: rotary_dim=4, qk_rope_head_dim=8."
    assert fault.axis == "qk-rope-head-dim"


def test_a_layers_own_rope_of_another_width_than_k_pe():
    fault = first_fault(latent_layers(2, overrides={1: {"rotary_dim": 4}}))
    assert str(fault) == "rotary_dim mismatch across layers for fused latent path: expected 8, got 4 at layer 1."


def test_a_table_that_does_not_follow_what_is_stated():
    fault = first_fault(latent_layers(2, overrides={1: {"table_factor": 2.0}}))
    assert fault.axis == "rope-scaling"
    assert str(fault) == (
        "RoPE table mismatch across layers for fused latent path: expected the rows of the shared cos_sin_cache, "
        "got other values from position 1 on at layer 1."
    )


def test_rows_that_do_not_add_up():
    fault = first_fault(latent_layers(2, overrides={1: {"extra_rows": 3}}))
    assert str(fault) == (
        "kv_lora_rank mismatch for fused latent path: expected 27 (kv_a_proj_with_mqa.weight has 35 rows, of which latent and k_pe "
        "take 24 + 8), got 24 at layer 1."
    )
    assert (fault.axis, fault.expected, fault.got) == ("kv-lora-rank", 27, 24)


def test_rows_of_a_joined_projection_that_do_not_add_up():
    fault = first_fault(latent_layers(2, q_lora_rank=6, overrides={0: {"q_rows": 5}}))
    assert str(fault) == (
        "q_lora_rank mismatch for fused latent path: expected 5 (fused_qkv_a_proj_with_mqa.weight has 37 rows, of which latent and k_pe "
        "take 24 + 8), got 6 at layer 0."
    )


def no_table(layer):
    del layer.self_attn.rotary_emb.cos_sin_cache


def odd_norm_kind(layer):
    layer.self_attn.kv_a_layernorm.norm_kind = "layer"


def context_norm(layer):
    layer.supports_fused_context_kv = False


# What all layers may agree in, and the path cannot do.
@pytest.mark.parametrize(
    ("shape", "edit", "axis", "text"),
    [
        (
            {},
            no_table,
            "rope-scaling",
            "RoPE without a usable table is not supported for fused latent path: FakeRope has no",
        ),
        (
            {"dtype": torch.float64},
            None,
            "dtype",
            "a kv_a weight of this dtype is not supported for fused latent path: float64",
        ),
        ({"norm": "none"}, None, "latent-norm", "attention without a norm of the latent is not supported"),
        (
            {"norm": "none", "is_row": True},
            None,
            "latent-norm",
            "attention without a norm .* kv_norm=none at layer 0",
        ),
        (
            {"norm": "other"},
            None,
            "latent-norm",
            "a norm over anything but the latent or the whole row .* kv_a_layernorm over 33 features at layer 0",
        ),
        (
            {"norm": "whole", "is_row": True, "compressor": object()},
            None,
            "compressor",
            "a cache with further rows that are made of several tokens each is not supported for fused latent path: a compressor at",
        ),
        (
            {},
            odd_norm_kind,
            "norm-kind",
            "this kind of kv_a_layernorm is not supported for fused latent path: layer at",
        ),
        (
            {"quant_method": "awq"},
            None,
            "quantization",
            "a quantized down projection is not supported .* awq at layer 0",
        ),
        ({}, context_norm, "context-norm", "a norm of the context inside each layer is not supported"),
    ],
)
def test_what_layers_agree_in_but_the_path_cannot_do(shape, edit, axis, text):
    layers = latent_layers(2, **shape)
    for layer in {id(layer.self_attn.rotary_emb): layer for layer in layers}.values() if edit is no_table else layers:
        if edit is not None:
            edit(layer)
    fault = first_fault(layers)
    assert re.match(text, str(fault)), str(fault)
    assert (fault.axis, fault.layer) == (axis, 0)
    assert isinstance(fault, StackUnsupportedError)


def test_no_layers():
    fault = first_fault([])
    assert str(fault) == "No layers to stack for fused latent path: expected at least one."


def test_an_unknown_value_differs_from_nothing():
    unknown = LatentFacts()
    known = facts(latent_layers(1))[0]
    assert list(latent_mismatches([unknown, known, unknown], **SHARED)) == []
    assert list(latent_mismatches([unknown] * 2, kv_lora_rank=None, qk_rope_head_dim=None, is_neox_style=None)) == []
    wider = facts(latent_layers(1, rank=25))[0]
    (fault, *_) = latent_mismatches([known, wider], kv_lora_rank=None, qk_rope_head_dim=None, is_neox_style=None)
    assert (fault.axis, fault.expected, fault.got) == ("kv-lora-rank", 24, 25)


def test_facts_of_a_layer_that_says_nothing():
    said = latent_facts_of(SimpleNamespace(self_attn=SimpleNamespace()))
    assert said.latent_norm == "none"
    assert said.rope_problem == "the layer has no rotary_emb"
    assert (said.kv_lora_rank, said.rows, said.bias, said.q_lora_rank) == (None, None, None, None)


def test_no_torch_for_headers():
    code = (
        "import sys\n"
        "from pytest_specdecode.fused_kv import LatentFacts, latent_mismatches\n"
        "both = [LatentFacts(kv_lora_rank=4), LatentFacts(kv_lora_rank=5)]\n"
        "(fault,) = latent_mismatches(both, kv_lora_rank=4, qk_rope_head_dim=2, is_neox_style=False)\n"
        "assert fault.layer == 1 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
