"""The strategy of whole latent-attention layers promises layers that build and whose two forms agree.

What goes wrong without this file: a tensor of a shape that the layer does not take; a kind of numbers on which a form overflows, so that a
user's comparison of the two fails for no reason; an option that is never drawn; an example that fails and is too long to read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pytest_specdecode.layers import MLAAttention
from pytest_specdecode.strategies import KINDS, MLAConfig, MLALayer, mla_configs, mla_layers

FINDING = settings(
    database=None, deadline=None, derandomize=True, max_examples=500, phases=[Phase.generate, Phase.shrink]
)
LOOKING = settings(FINDING, max_examples=300, phases=[Phase.generate])
PLAINEST = MLAConfig(
    num_heads=1, q_lora_rank=1, kv_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=2, v_head_dim=1, hidden_size=1
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(layer=mla_layers(), values=st.sampled_from([kind for kind in KINDS if kind != "large"]))
def test_a_layer_builds_and_both_forms_are_finite(layer: MLALayer, values: str) -> None:
    states, positions = layer.inputs(5, values=values)
    assert isinstance(layer.attention, MLAAttention)
    for absorbed in (False, True):
        out = layer.attention(states, positions, absorbed=absorbed)
        assert out.shape == (5, layer.config.hidden_size)
        assert out.isfinite().all()


@settings(deadline=None, max_examples=100, derandomize=True)
@given(layer=mla_layers())
def test_the_two_forms_agree_in_float64(layer: MLALayer) -> None:
    """Of all options that can be drawn, scaled scores and whole queries among them."""
    tensors = {name: value.double() for name, value in layer.tensors.items()}
    wide = MLAAttention(layer.config.spec, tensors, norm_eps=layer.config.norm_eps, norm_kind=layer.config.norm_kind)
    states, positions = layer.inputs(5)
    naive, absorbed = (wide(states.double(), positions, absorbed=form) for form in (False, True))
    assert torch.allclose(naive, absorbed, rtol=1e-9, atol=1e-9 * float(naive.abs().max()))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(layer=mla_layers())
def test_tensors_have_the_shapes_and_the_dtype_that_the_configuration_says(layer: MLALayer) -> None:
    assert {name: tuple(value.shape) for name, value in layer.tensors.items()} == layer.config.shapes
    assert {str(value.dtype) for value in layer.tensors.values()} == {f"torch.{layer.config.dtype}"}
    again = eval(repr(layer), {"MLALayer": MLALayer, "MLAConfig": MLAConfig})
    assert again == layer
    assert all(torch.equal(value, again.tensors[name]) for name, value in layer.tensors.items())


def test_every_option_is_drawn() -> None:
    """One after the other: forms of the query, a joined projection, two states side by side, each scaling, each kind of numbers."""
    seen: dict[str, set[Any]] = {}

    @LOOKING
    @given(mla_layers())
    def look(layer: MLALayer) -> None:
        config = layer.config
        facts = {
            "whole": config.q_lora_rank is None,
            "joined": config.is_joined,
            "both": config.in_features != config.hidden_size,
            "scaling": config.rope_scaling.get("rope_type"),
            "dtype": config.dtype,
            "style": config.is_neox_style,
            "norm": config.norm_kind,
            "weights": layer.weights,
            "norms": layer.norms,
        }
        for name, value in facts.items():
            seen.setdefault(name, set()).add(value)

    look()
    flags = {False, True}
    assert seen == {
        "whole": flags,
        "joined": flags,
        "both": flags,
        "scaling": {None, "linear", "llama3", "yarn", "dynamic", "deepseek_yarn"},
        "dtype": {"float32", "float16", "bfloat16"},
        "style": flags,
        "norm": {"rms", "gemma"},
        "weights": set(KINDS),
        "norms": set(KINDS),
    }


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.data())
def test_arguments_are_kept(data: st.DataObject) -> None:
    """Given as values, all at once; what is not given follows."""
    drawn = data.draw(mla_configs())
    fields = {item.name: getattr(drawn, item.name) for item in dataclasses.fields(drawn)}
    del fields["table_breaks_at"]
    both = fields.pop("in_features") != drawn.hidden_size
    whole = fields["q_lora_rank"] is None
    again = data.draw(mla_configs(**fields, whole_query=whole, reads_both=both))
    assert again == drawn


def test_shrinks_to_one_lane_of_everything() -> None:
    found = find(mla_layers(), lambda layer: True, settings=FINDING)
    assert found == MLALayer(config=PLAINEST, seed=0, weights="zeros", norms="zeros")


def test_a_form_that_forgets_the_scores_scale_fails_on_one_head() -> None:
    """Only the scaling is odd; the numbers are the plainest that show it."""

    def differs(layer: MLALayer) -> bool:
        states, positions = layer.inputs(2)
        right = layer.attention(states, positions)
        layer.attention.scaling = (layer.config.qk_nope_head_dim + layer.config.qk_rope_head_dim) ** -0.5
        return not torch.allclose(layer.attention(states, positions), right, rtol=0.05)

    found = find(mla_layers(), differs, settings=FINDING)
    assert found.config.rope_scaling["rope_type"] == "deepseek_yarn"
    plain = found.config.changed(rope_scaling={})
    assert plain.changed(hidden_size=plain.in_features) in (PLAINEST, PLAINEST.changed(in_features=1))
