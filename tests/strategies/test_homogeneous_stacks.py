"""`homogeneous_stacks` promises layers that the stacked path serves, each with weights of its own. It would break that promise by

- layers that differ in an axis, which a validator refuses;
- layers that share numbers, so that a path which takes layer 0's for all of them passes;
- numbers that depend on the number of layers or on the order in which tensors are made, so that an example does not replay or shrink;
- norm weights of 0, or numbers that overflow, behind which any fault hides.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import find, given, settings

from pytest_specdecode import AXES, FusedKV
from pytest_specdecode.fused_kv.stack import LayerFacts
from pytest_specdecode.layers import GQAAttention, RMSNorm
from pytest_specdecode.strategies import KINDS, LayerConfig, Stack, homogeneous_stacks, layer_configs

PLAIN = LayerConfig(num_heads=2, num_kv_heads=1, head_dim=4, hidden_size=3)
FINDING = settings(database=None, deadline=None, derandomize=True, max_examples=500)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(homogeneous_stacks(max_layers=4))
def test_every_one_is_accepted(stack):
    path = stack.build(FusedKV)
    assert path.num_layers == stack.num_layers
    assert path.dtype == getattr(torch, stack.dtype)
    assert path.hidden_size == stack.hidden_size


@settings(deadline=None, max_examples=40, derandomize=True)
@given(homogeneous_stacks(min_layers=2))
def test_layers_agree_in_every_axis(stack):
    for axis in AXES:
        values = {getattr(fact, _ATTRIBUTES.get(axis, axis.replace("-", "_"))) for fact in stack.facts}
        assert len(values) == 1, axis


_ATTRIBUTES = {"rope-style": "is_neox_style"}


def test_the_facts_are_those_of_the_configuration():
    config = PLAIN.changed(rotary_dim=2, bias=True, dtype="float16", value_scale=0.5, norm_eps=1e-3)
    (fact,) = Stack(configs=[config]).facts
    assert fact == LayerFacts(
        num_kv_heads=1,
        head_dim=4,
        rotary_dim=2,
        is_neox_style=True,
        rope_theta=10000.0,
        rope_scaling=(),
        hidden_size=3,
        dtype="float16",
        bias=True,
        k_norm="per-head",
        norm_kind="rms",
        v_head_dim=4,
        value_scale=0.5,
        q_size=8,
        norm_eps=1e-3,
        kv_size=4,
        qkv_rows=16,
        k_norm_width=4,
        context_norm="none",
    )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(homogeneous_stacks(min_layers=2, weights="normal", norms="normal"))
def test_every_layer_has_numbers_of_its_own(stack):
    first, second = (layer.self_attn for layer in stack.layers[:2])
    assert isinstance(first, GQAAttention)
    assert isinstance(first.k_norm, RMSNorm)
    assert not torch.equal(first.qkv_proj.weight, second.qkv_proj.weight)
    assert not torch.equal(first.k_norm.weight, second.k_norm.weight)
    if stack.configs[0].bias:
        assert not torch.equal(first.qkv_proj.bias, second.qkv_proj.bias)


def test_epsilons_of_one_stack_differ():
    stack = find(homogeneous_stacks(), lambda stack: len({c.norm_eps for c in stack.configs}) > 1, settings=FINDING)
    assert [attn.self_attn.k_norm.variance_epsilon for attn in stack.layers] == [c.norm_eps for c in stack.configs]


def test_a_layers_numbers_do_not_depend_on_its_neighbours():
    two, three = (Stack(configs=[PLAIN] * count, seed=5) for count in (2, 3))
    wider = Stack(configs=[PLAIN.changed(head_dim=8), PLAIN], seed=5)
    for other in (three, wider):
        second, due = other.layers[1].self_attn, two.layers[1].self_attn
        assert torch.equal(second.qkv_proj.weight, due.qkv_proj.weight)
        assert torch.equal(second.k_norm.weight, due.k_norm.weight)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(homogeneous_stacks())
def test_what_is_printed_makes_the_same_stack(stack):
    again = eval(repr(stack))
    assert list(again.configs) == list(stack.configs)
    for mine, other in zip(stack.layers, again.layers, strict=True):
        for name, tensor in mine.self_attn.state_dict().items():
            assert torch.equal(tensor, other.self_attn.state_dict()[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_of_every_kind_are_finite_and_of_that_kind(kind, dtype):
    config = PLAIN.changed(dtype=dtype, hidden_size=33, bias=True)
    stack = Stack(configs=[config], weights=kind, norms=kind, seed=3)
    attn = stack.layers[0].self_attn
    weight, norm = attn.qkv_proj.weight.float(), attn.k_norm.weight.float()
    hidden = torch.full((1, 33), 16.0, dtype=getattr(torch, dtype))
    assert all(part.isfinite().all() for part in (weight, norm, attn.qkv_proj(hidden)))
    expected = {
        "zeros": weight.eq(0).all() and norm.eq(1).all(),
        "integers": weight.eq(weight.round()).all() and weight.abs().max() == 3,
        "one-hot": weight.sum(dim=1).eq(1).all() and weight.ne(0).sum() == weight.shape[0],
        "repeated": weight.eq(weight[0]).all() and weight[0].unique().numel() > 30,
        "normal": 0.8 < weight.std() < 1.2,
        "tiny": 0.8e-3 < weight.std() < 1.2e-3,
        "large": 12 < weight.std() < 20,
    }
    assert expected[kind]


def test_a_gemma_norm_stores_what_is_added_to_one():
    rms, gemma = (
        Stack(configs=[PLAIN.changed(norm_kind=kind)], norms="integers").layers[0].self_attn.k_norm.weight
        for kind in ("rms", "gemma")
    )
    assert torch.equal(rms, gemma + 1)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    homogeneous_stacks(min_layers=2, max_layers=5, config=PLAIN, norm_eps=0.5, weights="tiny", norms="zeros", seed=8)
)
def test_arguments_are_heeded(stack):
    assert 2 <= stack.num_layers <= 5
    assert (stack.weights, stack.norms, stack.seed) == ("tiny", "zeros", 8)
    assert all(config == PLAIN.changed(norm_eps=0.5) for config in stack.configs)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(homogeneous_stacks(config=layer_configs(head_dim=80, dtype="bfloat16")))
def test_the_configuration_may_be_a_strategy(stack):
    assert (stack.head_dim, stack.dtype) == (80, "bfloat16")


def test_it_shrinks_to_one_plain_layer():
    found = find(homogeneous_stacks(), lambda stack: True, settings=FINDING)
    assert repr(found) == (
        "Stack(configs=[LayerConfig(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1)], seed=0, weights='zeros', "
        "norms='zeros')"
    )


def test_equal_layers_are_printed_once():
    odd = PLAIN.changed(bias=True)
    assert repr(Stack(configs=[PLAIN, PLAIN, odd])) == (
        f"Stack(configs=[{PLAIN!r}] * 2 + [{odd!r}], seed=0, weights='normal', norms='normal')"
    )


def test_drawing_needs_no_torch():
    script = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from pytest_specdecode import strategies\n"
        "for made in (strategies.kernel_inputs(), strategies.heterogeneous_stacks()): repr(made.example())\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
