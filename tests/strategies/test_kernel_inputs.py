"""`kernel_inputs` promises what finds a wrong kernel. Two things are shown here.

The right kernel agrees with the truth on all of it: the launcher with float64 code of this file, written with complex numbers so that it
shares nothing with the library's; the whole path with the library's float64 reference. Bounds, bands and poison are on.

A wrong kernel does not. For each fault that has been seen, or that is one index away, there is an input that shows it, and the smallest
one is small enough to read: layer 0's epsilon, norm or table row taken for all; heads, halves or lanes mixed up; positions not read, or
read by another stride; V touched; a bias lost.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pytest_specdecode.fused_kv import FusedKV, eager_kv, fused_kv_reference, fused_norm_rope
from pytest_specdecode.memory import banded, guarded
from pytest_specdecode.numerics import TOLERANCES, assert_close, assert_exact
from pytest_specdecode.strategies import (
    KINDS,
    LAYOUTS,
    POSITION_KINDS,
    KernelInput,
    LayerConfig,
    Stack,
    homogeneous_stacks,
    kernel_inputs,
    layer_configs,
)

FINDING = settings(database=None, deadline=None, derandomize=True, max_examples=500)
LOOKING = settings(FINDING, max_examples=300, phases=[Phase.generate])

#: The table's mean slack holds for many different numbers. Here a whole tensor may be one row repeated, and then all its errors may be the
#: same half ulp: so twice the slack for the mean, and nothing more for the rest.
FEW_NUMBERS = {
    dtype: dataclasses.replace(tolerance, mean_ulps=2 * tolerance.mean_ulps) for dtype, tolerance in TOLERANCES.items()
}


# --- the right kernel -------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100, derandomize=True)
@given(kernel_inputs())
def test_launcher_equals_float64(inputs):
    arguments = inputs.launch_arguments
    shape = (inputs.stack.num_layers, inputs.tokens, inputs.stack.num_kv_heads, inputs.stack.head_dim)
    outputs = {name: banded(shape, arguments["kv"].dtype, name=name, gap=3) for name in ("k_out", "v_out")}

    with guarded(filled=("k_out", "v_out")):
        fused_norm_rope(**arguments, **{name: out.tensor for name, out in outputs.items()})
    if inputs.tokens:
        for out in outputs.values():
            out.assert_filled()
        check_launcher(arguments, outputs["k_out"].tensor, outputs["v_out"].tensor)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(kernel_inputs())
def test_path_equals_the_reference_on_every_homogeneous_stack(inputs):
    stack = inputs.stack
    path = stack.build(FusedKV)
    with guarded(filled=("k_out", "v_out")):
        k, v = path.compute(**inputs.materialize_arguments)
    assert_close(
        k,
        fused_kv_reference(stack.layers, inputs.ctx_hidden, inputs.positions)[0],
        eager_kv(stack.layers, inputs.ctx_hidden, inputs.positions)[0],
        what="K",
        reduction_sizes=(stack.hidden_size, stack.head_dim),
        tolerance=FEW_NUMBERS[k.dtype],
    )
    assert_exact(v, stacked_values(stack, inputs.ctx_hidden), what="V", bits=True)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(kernel_inputs(stack=homogeneous_stacks(config=layer_configs(is_neox_style=False)), min_tokens=1))
def test_launcher_and_path_turn_pairs(inputs):
    stack, arguments = inputs.stack, inputs.launch_arguments
    with guarded(filled=("k_out", "v_out")):
        check_launcher(arguments, *fused_norm_rope(**arguments))
        k, _ = stack.build(FusedKV).compute(**inputs.materialize_arguments)
    truth, base = (of(stack.layers, inputs.ctx_hidden, inputs.positions)[0] for of in (fused_kv_reference, eager_kv))
    sums = (stack.hidden_size, stack.head_dim)
    assert_close(k, truth, base, what="K", reduction_sizes=sums, tolerance=FEW_NUMBERS[k.dtype])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(kernel_inputs(min_tokens=1))
def test_every_layer_is_handed_over_once_and_in_order(inputs):
    path = inputs.stack.build(FusedKV)
    written = []
    path.materialize(**inputs.materialize_arguments, write_layer_kv=lambda layer, k, v: written.append((layer, k, v)))
    k, v = path.compute(**inputs.materialize_arguments)
    assert [layer for layer, _, _ in written] == list(range(inputs.stack.num_layers))
    for layer, layer_k, layer_v in written:
        assert_exact(layer_k, k[layer], bits=True)
        assert_exact(layer_v, v[layer], bits=True)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(kernel_inputs(positions="zero", min_tokens=1), st.sampled_from(("float32", "float16", "bfloat16")))
def test_where_nothing_can_round_nothing_does(inputs, dtype):
    # At position 0 nothing turns. K of 0 and 2 only with 4 lanes per 2: mean square 1, so that K is 2 times the norm's integer, exactly.
    config = LayerConfig(num_heads=2, num_kv_heads=2, head_dim=8, hidden_size=1, norm_eps=1e-30, dtype=dtype)
    stack = Stack(configs=[config] * inputs.stack.num_layers, norms="integers", seed=inputs.seed)
    exact = dataclasses.replace(inputs, stack=stack)
    arguments = exact.launch_arguments
    lanes = torch.tensor([0.0, 2.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0], dtype=arguments["kv"].dtype)
    arguments["kv"] = lanes.repeat(*arguments["kv"].shape[:2], 4)
    k, v = fused_norm_rope(**arguments)
    due = lanes * arguments["k_norm_weight"].to(lanes.dtype)[:, None, None, :]
    assert_exact(k, due.expand(k.shape), what="K")
    assert_exact(v, lanes.expand(v.shape), what="V", bits=True)


def check_launcher(arguments, k, v):
    """Hold the launcher's outputs against this file's float64."""
    assert_close(
        k,
        truth(arguments, torch.float64),
        truth(arguments, k.dtype),
        what="K",
        reduction_sizes=(arguments["head_dim"],),
        tolerance=FEW_NUMBERS[k.dtype],
    )
    assert_exact(v, scaled(value_rows(arguments), arguments["value_scale"]), what="V", bits=True)


def truth(arguments, dtype):
    """K in float64, one layer at a time, a pair of lanes being a complex number; in another dtype it is rounded after norm and rotation."""
    kv, positions, table = arguments["kv"], arguments["positions"].long(), arguments["cos_sin_cache"].double()
    heads, width, half = arguments["num_kv_heads"], arguments["head_dim"], arguments["rotary_dim"] // 2
    turn = torch.complex(table[positions, :half], table[positions, half:])[:, None, :]
    layers = []
    for layer in range(kv.shape[1]):
        k = kv[:, layer, : heads * width].double().unflatten(-1, (heads, width))
        length = torch.sqrt((k**2).sum(-1, keepdim=True) / width + arguments["eps"][layer].double())
        normed = (k / length * arguments["k_norm_weight"][layer].double()).to(dtype).double()
        turning, rest = normed[..., : 2 * half], normed[..., 2 * half :]
        if arguments["is_neox_style"]:
            turned = torch.complex(turning[..., :half], turning[..., half:]) * turn
            turning = torch.cat([turned.real, turned.imag], dim=-1)
        else:
            turned = torch.complex(turning[..., 0::2], turning[..., 1::2]) * turn
            turning = torch.view_as_real(turned).flatten(-2)
        layers.append(torch.cat([turning, rest], dim=-1).to(dtype))
    return torch.stack(layers)


def value_rows(arguments):
    heads = (2, arguments["num_kv_heads"], arguments["head_dim"])
    return arguments["kv"].unflatten(-1, heads)[:, :, 1].transpose(0, 1)


def scaled(values, scale):
    return values.contiguous() if scale == 1.0 else (values.float() * scale).to(values.dtype)


def stacked_values(stack, ctx_hidden):
    """V as one GEMM over all layers gives it: what has to come out bit for bit."""
    attns = [layer.self_attn for layer in stack.layers]
    weight = torch.cat([attn.qkv_proj.weight[attn.q_size :] for attn in attns]).T.contiguous()
    if attns[0].qkv_proj.bias is None:
        flat = torch.mm(ctx_hidden, weight)
    else:
        flat = torch.addmm(torch.cat([attn.qkv_proj.bias[attn.q_size :] for attn in attns]), ctx_hidden, weight)
    rows = flat.unflatten(-1, (len(attns), 2, stack.num_kv_heads, stack.head_dim))
    return scaled(rows[:, :, 1].transpose(0, 1), stack.configs[0].value_scale)


# --- wrong kernels ----------------------------------------------------------------------------------------------------------------------


def first_layer(name):
    """Layer 0's row of a parameter taken for every layer."""
    return lambda arguments: {**arguments, name: arguments[name][:1].expand_as(arguments[name])}


def first_position(arguments):
    return {**arguments, "positions": arguments["positions"][:1].expand_as(arguments["positions"])}


def counted_positions(arguments):
    return {**arguments, "positions": torch.arange(len(arguments["positions"])) % arguments["cos_sin_cache"].shape[0]}


def misread_positions(arguments):
    """The stride of a sliced tensor ignored."""
    positions, rows = arguments["positions"], arguments["cos_sin_cache"].shape[0]
    unit = torch.as_strided(positions, positions.shape, (1,))
    return {**arguments, "positions": unit.clamp(max=rows - 1)}


def other_direction(arguments):
    """Sines of the other sign."""
    table, half = arguments["cos_sin_cache"].clone(), arguments["rotary_dim"] // 2
    table[:, half:] *= -1
    return {**arguments, "cos_sin_cache": table}


def other_eps(arguments):
    return {**arguments, "eps": torch.where(arguments["eps"] < 5e-6, 1e-5, 1e-6)}


def rounded_norm_weight(arguments):
    """A norm's weight read as 1 + w where it is w."""
    return {**arguments, "k_norm_weight": arguments["k_norm_weight"] + 1}


def swapped_values(arguments):
    """V rows first."""
    kv = arguments["kv"].unflatten(-1, (2, -1)).flip(2).flatten(2)
    return {**arguments, "kv": kv}


def turned_heads(arguments):
    """Lane-major rows."""
    pair = (2, arguments["head_dim"], arguments["num_kv_heads"])
    return {**arguments, "kv": arguments["kv"].unflatten(-1, pair).transpose(-1, -2).flatten(2)}


def interleaved_pairs(arguments):
    """Pairs (2i, 2i + 1) read instead of (i, i + half)."""
    kv, rotary, shape = (
        arguments["kv"].clone(),
        arguments["rotary_dim"],
        (2, arguments["num_kv_heads"], arguments["head_dim"]),
    )
    heads = kv.unflatten(-1, shape)
    heads[..., :rotary] = heads[..., :rotary].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return {**arguments, "kv": heads.flatten(2)}


def no_value_scale(arguments):
    return {**arguments, "value_scale": 1.0}


FAULTS = {
    "layer 0's epsilon for all": first_layer("eps"),
    "layer 0's norm for all": first_layer("k_norm_weight"),
    "another epsilon": other_eps,
    "gemma for rms": rounded_norm_weight,
    "token 0's position for all": first_position,
    "positions counted, not read": counted_positions,
    "strided positions read as if dense": misread_positions,
    "turned the other way": other_direction,
    "interleaved pairs": interleaved_pairs,
    "V before K": swapped_values,
    "lanes before heads": turned_heads,
    "value scale left out": no_value_scale,
}


def shows(fault, inputs):
    """Whether a kernel with this fault is found out. It stands in plain torch here: a hundred shrink steps would be slow interpreted."""
    arguments = inputs.launch_arguments
    wrong = fault(dict(arguments))
    try:
        check_launcher(arguments, truth(wrong, wrong["kv"].dtype), scaled(value_rows(wrong), wrong["value_scale"]))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_found_within_a_few_hundred_inputs(name):
    fault = FAULTS[name]
    find(kernel_inputs(), lambda inputs: inputs.tokens > 0 and shows(fault, inputs), settings=LOOKING)


@pytest.mark.parametrize("name", ["token 0's position for all", "lanes before heads", "value scale left out"])
def test_the_input_that_shows_it_is_small(name):
    fault = FAULTS[name]
    found = find(kernel_inputs(), lambda inputs: inputs.tokens > 0 and shows(fault, inputs), settings=FINDING)
    config = found.stack.configs[0]
    assert found.tokens <= 2
    assert found.stack.num_layers == 1
    assert config.num_kv_heads <= 2
    assert config.head_dim <= 3
    assert not config.bias
    assert config.rope_scaling == {}


def test_the_smallest_input_that_shows_a_shared_epsilon():
    """Pinned: what a reader sees of a common fault, two layers that differ in one number, and one token."""
    fault = FAULTS["layer 0's epsilon for all"]
    found = find(kernel_inputs(), lambda inputs: inputs.tokens > 0 and shows(fault, inputs), settings=FINDING)
    assert repr(found) == (
        "KernelInput(stack=Stack(configs=[LayerConfig(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1)] + "
        "[LayerConfig(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1, norm_eps=1e-05)], "
        "seed=0, weights='zeros', norms='zeros'), tokens=1, positions_kind='zero', positions_dtype='int64', "
        "values='integers', layout='contiguous', block_rows=None, seed=0)"
    )


def test_a_lost_bias_is_found_within_a_few_hundred_inputs():
    """The launcher never sees a bias, so the path's inputs have to show it."""
    find(
        kernel_inputs(min_tokens=1),
        lambda inputs: inputs.stack.configs[0].bias and not torch.equal(*with_and_without_bias(inputs)),
        settings=LOOKING,
    )


def with_and_without_bias(inputs):
    stack = inputs.stack
    bare = Stack(**{**vars_of(stack), "configs": [config.changed(bias=False) for config in stack.configs]})
    return tuple(each.build(FusedKV).compute(**inputs.materialize_arguments)[1] for each in (stack, bare))


def vars_of(record):
    return {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}


# --- the domain -------------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80, derandomize=True)
@given(kernel_inputs())
def test_every_input_lies_in_the_promised_domain(inputs):
    stack, config = inputs.stack, inputs.stack.configs[0]
    assert 0 <= inputs.tokens <= 17
    assert inputs.ctx_hidden.shape == (inputs.tokens, stack.hidden_size)
    assert inputs.kv.shape == (inputs.tokens, stack.num_layers, 2 * config.num_kv_heads * config.head_dim)
    assert inputs.positions.shape == (inputs.tokens,)
    assert inputs.ctx_hidden.dtype == inputs.kv.dtype == getattr(torch, stack.dtype)
    assert inputs.positions.dtype in (torch.int64, torch.int32)
    assert inputs.ctx_hidden.isfinite().all()
    assert inputs.kv.isfinite().all()
    assert ((inputs.positions >= 0) & (inputs.positions < config.max_position_embeddings)).all()
    if inputs.tokens:
        assert inputs.positions.max() < inputs.cos_sin_cache.shape[0]
    assert inputs.block_rows in (None, 8)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(kernel_inputs())
def test_what_is_printed_makes_the_same_input(inputs):
    again = eval(repr(inputs))
    for name in ("ctx_hidden", "kv", "positions", "eps", "k_norm_weight", "cos_sin_cache"):
        assert torch.equal(getattr(inputs, name), getattr(again, name)), name


PLAIN = Stack(configs=[LayerConfig(num_heads=2, num_kv_heads=2, head_dim=4, hidden_size=6)] * 2)


@pytest.mark.parametrize(("norm_kind", "added"), [("rms", 0.0), ("gemma", 1.0)])
def test_the_launcher_is_given_what_the_layers_multiply_by(norm_kind, added):
    configs = [PLAIN.configs[0].changed(norm_kind=norm_kind, norm_eps=eps) for eps in (0.5, 0.25)]
    inputs = KernelInput(stack=Stack(configs=configs), tokens=1)
    stored = torch.stack([layer.self_attn.k_norm.weight for layer in inputs.stack.layers])
    assert torch.equal(inputs.k_norm_weight, stored + added)
    assert inputs.eps.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("kind", POSITION_KINDS)
def test_positions_of_every_kind_are_of_that_kind(kind):
    inputs = KernelInput(stack=PLAIN, tokens=9, positions_kind=kind, seed=4)
    positions = inputs.positions
    expected = {
        "zero": positions.eq(0).all(),
        "arange": positions.tolist() == list(range(9)),
        "repeated": len(set(positions.tolist())) == 1 and positions[0] > 0,
        "last": positions.eq(63).all(),
        "unsorted": sorted(positions.tolist()) != positions.tolist() and positions.is_contiguous(),
        "strided": sorted(positions.tolist()) != positions.tolist() and positions.stride() == (2,),
    }
    assert expected[kind]


def test_between_strided_positions_lies_what_no_table_has():
    positions = KernelInput(stack=PLAIN, tokens=5, positions_kind="strided").positions
    assert torch.as_strided(positions, (4,), (2,), 1).eq(1_000_000_000).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["ctx_hidden", "kv"])
def test_layouts_hold_the_same_numbers(name, layout):
    plain = getattr(KernelInput(stack=PLAIN, tokens=3, values="normal"), name)
    tensor = getattr(KernelInput(stack=PLAIN, tokens=3, values="normal", layout=layout), name)
    assert torch.equal(tensor, plain)
    expected = {
        "contiguous": tensor.is_contiguous(),
        "padded": tensor.stride(-1) == 1 and tensor.stride(-2) == tensor.shape[-1] + 5 and tensor.storage_offset() == 3,
        "transposed": tensor.stride(-1) > 1,
    }
    assert expected[layout]


def test_between_padded_rows_lies_nan():
    tensor = KernelInput(stack=PLAIN, tokens=3, layout="padded").ctx_hidden
    storage = torch.as_strided(tensor, (3 * 11,), (1,), 0)
    assert storage.isnan().sum() == 15


def test_the_token_counts_that_catch_bugs_are_drawn():
    counts = set()

    @settings(deadline=None, max_examples=400, derandomize=True)
    @given(kernel_inputs(stack=PLAIN))
    def check(inputs):
        counts.add(inputs.tokens)

    check()
    assert counts >= {0, 1, 7, 8, 9, 15, 16, 17}


def test_positions_beyond_the_tables_first_rows_are_drawn():
    find(kernel_inputs(), lambda inputs: inputs.tokens > 0 and inputs.positions.max() >= 256, settings=LOOKING)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    kernel_inputs(
        stack=homogeneous_stacks(max_layers=1),
        min_tokens=2,
        max_tokens=5,
        positions="last",
        positions_dtype="int32",
        values="tiny",
        layout="transposed",
        block_rows=16,
        seed=6,
    )
)
def test_arguments_are_heeded(inputs):
    assert inputs.stack.num_layers == 1
    assert 2 <= inputs.tokens <= 5
    assert (inputs.positions_kind, inputs.positions_dtype, inputs.values) == ("last", "int32", "tiny")
    assert (inputs.layout, inputs.block_rows, inputs.seed) == ("transposed", 16, 6)


@pytest.mark.parametrize("values", KINDS)
def test_computed_numbers_are_finite_in_the_narrowest_dtype(values):
    config = LayerConfig(num_heads=2, num_kv_heads=2, head_dim=128, hidden_size=33, dtype="float16", bias=True)
    for weights in KINDS:
        stack = Stack(configs=[config], weights=weights, norms="large")
        inputs = KernelInput(stack=stack, tokens=17, values=values)
        k, v = stack.build(FusedKV).compute(**inputs.materialize_arguments)
        assert k.isfinite().all()
        assert v.isfinite().all()
