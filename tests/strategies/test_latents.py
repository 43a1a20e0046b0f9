"""The latent strategies promise stacks that are served, stacks that must be refused and say why, and inputs that show a wrong kernel.

Either side can be wrong: the validators pass a stack that they would serve wrong, refuse for another reason or at another layer; the
strategy breaks more than it says, always the same layer, or never in one of the ways; a wrong kernel passes on all that is drawn.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pytest_specdecode.errors import FusedKVError, StackMismatchError
from pytest_specdecode.fused_kv import (
    LATENT_AXES,
    LATENT_SOFT_AXES,
    FusedLatentKV,
    eager_latent,
    fused_latent_norm_rope,
    fused_latent_reference,
)
from pytest_specdecode.layers import MLAAttention
from pytest_specdecode.memory import banded, guarded
from pytest_specdecode.numerics import TOLERANCES, assert_close, assert_exact
from pytest_specdecode.strategies import (
    KINDS,
    LatentConfig,
    LatentInput,
    LatentStack,
    heterogeneous_latent_stacks,
    homogeneous_latent_stacks,
    latent_configs,
    latent_kernel_inputs,
)

FINDING = settings(database=None, deadline=None, derandomize=True, max_examples=500)
LOOKING = settings(FINDING, max_examples=300, phases=[Phase.generate])
NAMES = ("layer", "token", "lane")

#: A whole tensor may be one row repeated, and then all its errors may be the same half ulp: so twice the slack for the mean.
FEW_NUMBERS = {
    dtype: dataclasses.replace(tolerance, mean_ulps=2 * tolerance.mean_ulps) for dtype, tolerance in TOLERANCES.items()
}

#: What is said of a layer that is odd in an axis.
WORDS = {
    "kv-lora-rank": "kv_lora_rank",
    "qk-rope-head-dim": "qk_rope_head_dim",
    "rope-style": "is_neox_style",
    "rope-theta": "rope_theta",
    "rope-scaling": "rope_scaling",
    "hidden-size": "hidden_size",
    "dtype": "kv_a weight dtype",
    "bias": "kv_a bias",
    "latent-norm": "latent norm",
    "norm-kind": "norm kind",
    "q-lora-rank": "q_lora_rank",
    "quantization": "quantization",
}
TEXT = "{what} mismatch across layers for fused latent path: expected {expected}, got {got} at layer {layer}."
OWN_ROWS = (
    "q_lora_rank mismatch for fused latent path: expected {expected} ({name}.weight has {rows} rows, of which latent "
    "and k_pe take {rank} + {rope}), got {got} at layer {layer}."
)
TABLE = (
    "RoPE table mismatch across layers for fused latent path: expected the rows of the shared cos_sin_cache, "
    "got other values from position {row} on at layer {layer}."
)


def due_text(broken):
    """The error's text, from what the strategy says it broke."""
    odd = broken.stack.configs[broken.odd_layer]
    values = {"expected": broken.expected, "got": broken.got, "layer": broken.layer}
    if odd.q_rows != odd.q_lora_rank:
        name = "fused_wqa_wkv" if odd.latent_norm == "whole" else "fused_qkv_a_proj_with_mqa"
        return OWN_ROWS.format(
            **values, name=name, rows=odd.projection_rows, rank=odd.kv_lora_rank, rope=odd.qk_rope_head_dim
        )
    if odd.table_breaks_at is not None:
        return TABLE.format(row=odd.table_breaks_at, layer=broken.layer)
    if broken.axis == "rope-scaling":
        values |= {name: scaling_text(values[name]) for name in ("expected", "got")}
    return TEXT.format(**values, what=WORDS[broken.axis])


def scaling_text(pairs):
    return "{" + ", ".join(f"{name}={value}" for name, value in pairs) + "}" if pairs else "none"


def assert_refused(broken):
    """FusedLatentKV refuses it, for this reason and in these words."""
    with pytest.raises(FusedKVError) as caught:
        broken.stack.build(FusedLatentKV)
    error = caught.value
    assert (error.axis, error.layer) == (broken.axis, broken.layer)
    assert (error.expected, error.got) == (broken.expected, broken.got)
    assert str(error) == due_text(broken)
    assert isinstance(error, StackMismatchError)


# --- refused ----------------------------------------------------------------------------------------------------------------------------


def test_every_axis_has_its_words():
    assert tuple(WORDS) == LATENT_AXES


@pytest.mark.parametrize("axis", LATENT_AXES)
def test_one_odd_layer_is_refused_with_its_text_axis_and_layer(axis):
    @settings(deadline=None, max_examples=20, derandomize=True)
    @given(heterogeneous_latent_stacks(axis=axis))
    def check(broken):
        assert broken.axis == axis
        assert_refused(broken)

    check()


@settings(deadline=None, max_examples=80, derandomize=True)
@given(heterogeneous_latent_stacks(max_layers=5))
def test_whatever_is_odd_in_whichever_layer_is_refused(broken):
    assert not broken.is_soft
    assert_refused(broken)


@pytest.mark.parametrize("axis", LATENT_AXES)
@pytest.mark.parametrize("odd_layer", [0, 1, 3])
def test_every_layer_can_be_the_odd_one(axis, odd_layer):
    broken = find(
        heterogeneous_latent_stacks(axis=axis, min_layers=4, max_layers=4),
        lambda b: b.odd_layer == odd_layer,
        settings=LOOKING,
    )
    assert_refused(broken)


WAYS = {
    "no norm": ("latent-norm", lambda odd: odd.latent_norm == "none"),
    "a norm over the whole row": ("latent-norm", lambda odd: odd.latent_norm == "whole"),
    "a norm over the latent": ("latent-norm", lambda odd: odd.latent_norm == "latent"),
    "another rank of Q": ("q-lora-rank", lambda odd: odd.q_rows == odd.q_lora_rank),
    "a rank of Q that the rows contradict": ("q-lora-rank", lambda odd: odd.q_rows != odd.q_lora_rank),
    "a table that leaves its scaling": ("rope-scaling", lambda odd: odd.table_breaks_at is not None),
    "packed integers": ("quantization", lambda odd: odd.quantization in ("qweight", "weight_packed")),
    "8-bit floats": ("quantization", lambda odd: odd.quantization == "float8_e4m3fn"),
    "a method's name": ("quantization", lambda odd: odd.quantization == "fp8"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_be_odd_is_drawn(way):
    axis, holds = WAYS[way]
    broken = find(
        heterogeneous_latent_stacks(axis=axis), lambda b: holds(b.stack.configs[b.odd_layer]), settings=LOOKING
    )
    assert_refused(broken)


#: Fields that an axis changes, where they are not called like it.
FIELDS = {
    "rope-style": {"is_neox_style"},
    "rope-scaling": {"rope_scaling", "table_breaks_at"},
    "q-lora-rank": {"q_lora_rank", "q_rows"},
}


@pytest.mark.parametrize("axis", [*LATENT_AXES, *LATENT_SOFT_AXES])
def test_one_layer_differs_in_one_axis(axis):
    @settings(deadline=None, max_examples=20, derandomize=True)
    @given(heterogeneous_latent_stacks(axis=axis, max_layers=4))
    def check(broken):
        configs = list(broken.stack.configs)
        odd = configs.pop(broken.odd_layer)
        assert all(config == configs[0] for config in configs)
        names = [field.name for field in dataclasses.fields(LatentConfig)]
        differing = {name for name in names if getattr(odd, name) != getattr(configs[0], name)}
        assert differing
        assert differing <= FIELDS.get(axis, {axis.replace("-", "_")})

    check()


@settings(deadline=None, max_examples=40, derandomize=True)
@given(heterogeneous_latent_stacks())
def test_without_the_odd_layer_the_stack_is_accepted(broken):
    configs = [config for layer, config in enumerate(broken.stack.configs) if layer != broken.odd_layer]
    LatentStack(configs=configs, seed=broken.stack.seed).build(FusedLatentKV)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    heterogeneous_latent_stacks(axis="norm-eps", weights="tiny", norms="normal", config=latent_configs(dtype="float32"))
)
def test_a_soft_axis_is_served_right(broken):
    assert broken.is_soft
    layers = broken.stack.layers
    hidden = torch.randn(3, broken.stack.hidden_size, generator=torch.Generator().manual_seed(broken.stack.seed))
    positions = torch.tensor([5, 0, 3])
    rows = broken.stack.build(FusedLatentKV).compute(hidden, positions)
    due, eager = fused_latent_reference(layers, hidden, positions), eager_latent(layers, hidden, positions)
    assert_close(rows, due, eager, axes=NAMES, reduction_sizes=(33, 512))


# --- served -----------------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80, derandomize=True)
@given(homogeneous_latent_stacks())
def test_every_homogeneous_stack_is_accepted(stack):
    path = stack.build(FusedLatentKV, max_position_hint=stack.configs[0].max_position_embeddings)
    assert path.facts == stack.facts
    assert path.num_layers == stack.num_layers


def test_every_kind_of_layer_is_drawn():
    names = ("fused_qkv_a_proj_with_mqa", "wkv", "fused_wqa_wkv")
    joined_or_row = [lambda attn, name=name: hasattr(attn, name) for name in names]
    for holds in (lambda attn: isinstance(attn, MLAAttention), *joined_or_row):
        find(homogeneous_latent_stacks(), lambda stack, holds=holds: holds(stack.layers[0].self_attn), settings=LOOKING)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(latent_kernel_inputs())
def test_launcher_equals_float64(inputs):
    arguments = inputs.launch_arguments
    width = arguments["kv_lora_rank"] + arguments["qk_rope_head_dim"]
    out = banded((inputs.stack.num_layers, inputs.tokens, width), arguments["kv_a"].dtype, name="out", gap=3)
    with guarded(filled=("out",)):
        fused_latent_norm_rope(**arguments, out=out.tensor)
    if inputs.tokens:
        out.assert_filled()
        check_launcher(arguments, out.tensor)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(latent_kernel_inputs())
def test_path_equals_the_reference_on_every_homogeneous_stack(inputs):
    stack = inputs.stack
    with guarded(filled=("out",)):
        rows = stack.build(FusedLatentKV).compute(**inputs.materialize_arguments)
    due = fused_latent_reference(stack.layers, inputs.ctx_hidden, inputs.positions)
    eager = eager_latent(stack.layers, inputs.ctx_hidden, inputs.positions)
    sums = (stack.hidden_size, stack.configs[0].row_width)
    for what, lanes in parts(stack.kv_lora_rank):
        assert_close(
            rows[..., lanes], due[..., lanes], eager[..., lanes], what=what, axes=NAMES, reduction_sizes=sums,
            tolerance=FEW_NUMBERS[rows.dtype],
        )  # fmt: skip


@settings(deadline=None, max_examples=20, derandomize=True)
@given(latent_kernel_inputs(min_tokens=1))
def test_every_layer_is_handed_over_once_and_in_order(inputs):
    path = inputs.stack.build(FusedLatentKV)
    written = []
    path.materialize(**inputs.materialize_arguments, write_layer_latent=lambda *pair: written.append(pair))
    rows = path.compute(**inputs.materialize_arguments)
    assert [layer for layer, _ in written] == list(range(inputs.stack.num_layers))
    for layer, layer_rows in written:
        assert_exact(layer_rows, rows[layer], bits=True)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(latent_kernel_inputs(positions="zero", min_tokens=1), st.sampled_from(("float32", "float16", "bfloat16")))
def test_where_nothing_can_round_nothing_does(inputs, dtype):
    # At position 0 nothing turns. A latent of 0 and 2 only with 4 lanes per 2: mean square 1, so it becomes 2 times the norm's integer.
    config = LatentConfig(kv_lora_rank=8, qk_rope_head_dim=4, hidden_size=1, norm_eps=1e-30, dtype=dtype)
    stack = LatentStack(configs=[config] * inputs.stack.num_layers, norms="integers", seed=inputs.seed)
    arguments = dataclasses.replace(inputs, stack=stack).launch_arguments
    row = torch.tensor([0.0, 2.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, 3.0, -1.0, 2.0, 1.0], dtype=arguments["kv_a"].dtype)
    arguments["kv_a"] = row.expand(arguments["kv_a"].shape)
    rows = fused_latent_norm_rope(**arguments)
    due = row.repeat(stack.num_layers, 1, 1)
    due[..., :8] *= arguments["norm_weight"].to(row.dtype)[:, None, :]
    assert_exact(rows, due.expand(rows.shape), axes=NAMES)


def parts(rank):
    """Latent and k_pe are compared apart: the one's size must not hide the other's error."""
    return ("latent", slice(0, rank)), ("k_pe", slice(rank, None))


def check_launcher(arguments, rows):
    """Hold the launcher's output against this file's float64."""
    due, eager = truth(arguments, torch.float64), truth(arguments, rows.dtype)
    rank, normed = arguments["kv_lora_rank"], arguments["norm_weight"].shape[1]
    for what, lanes in parts(rank):
        assert_close(
            rows[..., lanes], due[..., lanes], eager[..., lanes], what=what, axes=NAMES, reduction_sizes=(normed,),
            tolerance=FEW_NUMBERS[rows.dtype],
        )  # fmt: skip


def truth(arguments, dtype):
    """The rows in float64, one layer at a time, a pair of lanes being a complex number; in another dtype rounded at the end."""
    kv_a, positions, table = arguments["kv_a"], arguments["positions"].long(), arguments["cos_sin_cache"].double()
    rank, half = arguments["kv_lora_rank"], arguments["qk_rope_head_dim"] // 2
    turn = torch.complex(table[positions, :half], table[positions, half:])
    first = torch.arange(half) if arguments["is_neox_style"] else 2 * torch.arange(half)
    second = first + (half if arguments["is_neox_style"] else 1)
    layers = []
    for layer in range(kv_a.shape[1]):
        row, normed = kv_a[:, layer].double(), rank + 2 * half if arguments["latent_norm"] == "whole" else rank
        length = torch.sqrt((row[:, :normed] ** 2).sum(-1, keepdim=True) / normed + arguments["eps"][layer].double())
        row = torch.cat([row[:, :normed] / length * arguments["norm_weight"][layer].double(), row[:, normed:]], dim=-1)
        latent, k_pe = row[:, :rank], row[:, rank:]
        turned = torch.complex(k_pe[:, first], k_pe[:, second]) * turn
        rotated = torch.empty_like(k_pe)
        rotated[:, first], rotated[:, second] = turned.real, turned.imag
        layers.append(torch.cat([latent, rotated], dim=-1))
    return torch.stack(layers).to(dtype)


# --- wrong kernels ----------------------------------------------------------------------------------------------------------------------


def first_layer(name):
    """Layer 0's row of a parameter taken for every layer."""
    return lambda arguments: {**arguments, name: arguments[name][:1].expand_as(arguments[name])}


def later_positions(arguments):
    rows = arguments["cos_sin_cache"].shape[0]
    return {**arguments, "positions": (arguments["positions"] + 1) % rows}


def counted_positions(arguments):
    return {**arguments, "positions": torch.arange(len(arguments["positions"])) % arguments["cos_sin_cache"].shape[0]}


def misread_positions(arguments):
    """The stride of a sliced tensor ignored."""
    positions, rows = arguments["positions"], arguments["cos_sin_cache"].shape[0]
    unit = torch.as_strided(positions, positions.shape, (1,))
    return {**arguments, "positions": unit.clamp(max=rows - 1)}


def other_eps(arguments):
    return {**arguments, "eps": torch.where(arguments["eps"] < 5e-6, 1e-5, 1e-6)}


def other_style(arguments):
    return {**arguments, "is_neox_style": not arguments["is_neox_style"]}


def other_norm_kind(arguments):
    return {**arguments, "norm_weight": arguments["norm_weight"] + 1}


def swapped_layers(arguments):
    return {**arguments, "kv_a": arguments["kv_a"].flip(1)}


def normed_k_pe(arguments):
    """The latent's norm over k_pe as well, where it is not to be."""
    if arguments["latent_norm"] == "whole":
        return arguments
    kv_a, rank = arguments["kv_a"].clone(), arguments["kv_lora_rank"]
    latent = kv_a[..., :rank].double()
    length = torch.sqrt((latent**2).mean(-1, keepdim=True) + arguments["eps"].double()[:, None])
    kv_a[..., rank:] = (kv_a[..., rank:].double() / length).to(kv_a.dtype)
    return {**arguments, "kv_a": kv_a}


def latent_alone(arguments):
    """A norm of the latent where the whole row is due."""
    if arguments["latent_norm"] == "latent":
        return arguments
    weights = arguments["norm_weight"][:, : arguments["kv_lora_rank"]]
    return {**arguments, "latent_norm": "latent", "norm_weight": weights}


SLIPS = {
    "the latent alone normed": latent_alone,
    "norm weight of layer 0": first_layer("norm_weight"),
    "epsilon of layer 0": first_layer("eps"),
    "position off by one": later_positions,
    "positions counted, not read": counted_positions,
    "positions' stride ignored": misread_positions,
    "another epsilon": other_eps,
    "the other style of rotation": other_style,
    "1 + w for w": other_norm_kind,
    "layers swapped": swapped_layers,
    "k_pe normed": normed_k_pe,
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_kernel_is_shown_by_an_input(slip):
    def shows(inputs):
        arguments = inputs.launch_arguments
        if not inputs.tokens:
            return False
        try:
            check_launcher(arguments, fused_latent_norm_rope(**SLIPS[slip](arguments)))
        except AssertionError:
            return True
        return False

    find(latent_kernel_inputs(), shows, settings=LOOKING)


# --- arguments and printing ---------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40, derandomize=True)
@given(latent_configs(kv_lora_rank=80, qk_rope_head_dim=st.sampled_from([4, 6]), dtype="bfloat16", bias=True))
def test_arguments_may_be_values_or_strategies(config):
    assert (config.kv_lora_rank, config.dtype, config.bias) == (80, "bfloat16", True)
    assert config.qk_rope_head_dim in (4, 6)


def test_every_kind_and_axis_is_drawn():
    for axis in LATENT_AXES:
        find(heterogeneous_latent_stacks(), lambda broken, axis=axis: broken.axis == axis, settings=LOOKING)
    for kind in KINDS:
        find(latent_kernel_inputs(), lambda inputs, kind=kind: inputs.values == kind, settings=LOOKING)


def test_the_smallest_broken_stack_can_be_read():
    """Pinned: what a reader sees when a validator misses an odd latent width."""
    found = find(heterogeneous_latent_stacks(), lambda broken: broken.axis == "kv-lora-rank", settings=FINDING)
    assert repr(found) == (
        "BrokenLatentStack(axis='kv-lora-rank', odd_layer=1, layer=1, expected=1, got=2, stack=LatentStack(configs="
        "[LatentConfig(kv_lora_rank=1, qk_rope_head_dim=2, hidden_size=1)] + "
        "[LatentConfig(kv_lora_rank=2, qk_rope_head_dim=2, hidden_size=1)], seed=0, weights='zeros', norms='zeros'))"
    )


@settings(deadline=None, max_examples=30, derandomize=True)
@given(heterogeneous_latent_stacks() | heterogeneous_latent_stacks(axis="norm-eps"))
def test_what_is_printed_makes_the_same_stack(broken):
    again = eval(repr(broken.stack))
    assert list(again.configs) == list(broken.stack.configs)
    assert again.facts == broken.stack.facts


@settings(deadline=None, max_examples=20, derandomize=True)
@given(latent_kernel_inputs())
def test_an_input_that_is_printed_is_the_same_input(inputs):
    again = eval(repr(inputs))
    assert isinstance(again, LatentInput)
    assert_exact(again.kv_a, inputs.kv_a, bits=True)
    assert_exact(again.ctx_hidden, inputs.ctx_hidden, bits=True)
    assert torch.equal(again.positions, inputs.positions)
