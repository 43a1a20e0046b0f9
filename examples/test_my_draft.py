"""A team's own tests of its draft, beside the built-in suite. Run them with

pytest --draft-model=examples/checkpoints/dflash-tiny examples/test_my_draft.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_specdecode import DraftError, FusedKV
from pytest_specdecode.numerics import assert_close
from pytest_specdecode.strategies import heterogeneous_stacks, homogeneous_stacks, kernel_inputs


def test_the_draft_is_the_one_we_trained(draft_spec):
    """What the release notes promise."""
    assert draft_spec.family == "dflash"
    assert draft_spec.taps.ids == (1, 9, 17)
    assert draft_spec.block.block_size == 8


def test_a_layer_drafts_something(draft_layers):
    """The layers in eager torch, on inputs of their own making."""
    for layer in draft_layers:
        assert layer.prefill(layer.probe(tokens=7, seed=0)).isfinite().all()


@given(seed=st.integers(0, 2**16), tokens=st.integers(1, 6))
@settings(deadline=None, max_examples=5)
def test_context_kv_matches_float64(fused_kv, fused_kv_reference, seed, tokens):
    """The stacked path on the checkpoint's own weights, at drawn inputs."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, fused_kv.hidden_size, generator=generator).to(fused_kv.dtype)
    positions = torch.randint(0, 2048, (tokens,), generator=generator)
    written = {}
    fused_kv.materialize(hidden, positions, lambda layer, k, v: written.update({layer: (k, v)}))
    k, _ = fused_kv_reference(hidden, positions)
    for layer, (got, _) in written.items():
        assert_close(got, k[layer], axes=("token", "head", "dim"), what=f"K of layer {layer}")


def test_a_layer_with_another_norm_is_noticed(make_draft_layers, make_fused_kv):
    """Fresh layers may be changed; the session's may not."""
    layers = make_draft_layers()
    layers[1].self_attn.k_norm = None
    with pytest.raises(DraftError, match="k_norm mismatch across layers"):
        make_fused_kv(layers)


@given(broken=heterogeneous_stacks(axis="num-kv-heads"))
@settings(deadline=None, max_examples=10)
def test_our_engine_refuses_uneven_heads(broken):
    """For engine authors: put your own stacked path in place of FusedKV."""
    stack = broken.stack
    with pytest.raises(DraftError) as caught:
        FusedKV(stack.layers, stack.rotary_emb, stack.num_kv_heads, stack.head_dim, "cpu")
    assert (caught.value.axis, caught.value.layer) == (broken.axis, broken.layer)


@given(data=st.data(), stack=homogeneous_stacks())
@settings(deadline=None, max_examples=10)
def test_our_engine_serves_the_rest(data, stack):
    """Whatever agrees in every axis must be accepted, and V must come out as projected."""
    inputs = data.draw(kernel_inputs(stack=stack, min_tokens=1, max_tokens=4))
    path = stack.build(FusedKV)
    k, v = path.compute(inputs.ctx_hidden, inputs.positions)
    assert k.shape == v.shape == (len(stack.layers), len(inputs.positions), stack.num_kv_heads, stack.head_dim)
