"""The options of grouped-query attention that few drafts have, each against the formula written out.

Failure modes this file exists to catch: a gate read from the query's lanes, or applied before the softmax; one gate per lane where one per
head is due; a context that goes through the wrong projection; V normed with K's weight, or K taken for V after its norm; a norm whose
place or kind is another family's; a temperature of the row instead of the position; heads that turn where nothing turns.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers import GQAAttention, KVCache, LayerNorm, RMSNorm
from pytest_specdecode.spec import TemperatureSpec

EXACT = {"rtol": 1e-11, "atol": 1e-12}
POSITIONS = torch.tensor([3, 9, 40])


def rms(x, weight=1.0, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, positions, theta=100.0, lanes=4):
    """Pairs of lanes (i, i + 2) of the first four, as complex numbers times e^(i angle)."""
    half = lanes // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half], x[..., half:lanes]) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.cat([pairs.real, pairs.imag, x[..., lanes:]], dim=-1)


def projected(x, weight, heads, dim=6):
    return (x @ weight.T).view(len(x), heads, dim)


def attention(q, k, v, scaling, sees=None):
    """Head by head: 4 query heads over 2 KV heads."""
    out = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // 2].T * scaling
        if sees is None:
            sees = torch.ones(scores.shape).tril(scores.shape[1] - scores.shape[0]).bool()
        scores = scores.masked_fill(~sees, -math.inf)
        out.append(scores.softmax(-1) @ v[:, head // 2])
    return torch.stack(out, dim=1)


@pytest.fixture
def made(gqa_spec, gqa_tensors, draw):
    """A layer with options, its tensors, and three rows; `extra` are further tensors by name and shape."""

    def make(extra=None, *, drop=(), build=None, **fields):
        spec = gqa_spec(**fields)
        tensors = gqa_tensors(spec)
        tensors |= {name: draw(*shape) for name, shape in (extra or {}).items()}
        for name in drop:
            del tensors[name]
        return GQAAttention(spec, tensors, **(build or {})), tensors, draw(3, 10)

    return make


def plain_parts(tensors, x, positions=POSITIONS):
    q = turned(rms(projected(x, tensors["q_proj.weight"], 4), tensors["q_norm.weight"]), positions)
    k = turned(rms(projected(x, tensors["k_proj.weight"], 2), tensors["k_norm.weight"]), positions)
    return q, k, projected(x, tensors["v_proj.weight"], 2)


@pytest.mark.parametrize(("kind", "gates"), [("per-head", 4), ("per-element", 24)])
def test_an_output_gate_is_the_softplus_of_its_projection(kind, gates, made):
    layer, tensors, x = made({"g_proj.weight": (gates, 10)}, output_gate=kind)
    heads = attention(*plain_parts(tensors, x), 6**-0.5)
    gate = F.softplus(x @ tensors["g_proj.weight"].T).view(3, 4, -1)
    torch.testing.assert_close(layer(x, POSITIONS), (heads * gate).flatten(1) @ tensors["o_proj.weight"].T, **EXACT)
    assert layer.g_proj.weight.shape == (gates, 10)
    assert layer.g_proj.name == "g_proj.weight"


def test_without_a_gate_there_is_no_projection_for_it(made):
    layer, _, _ = made()
    assert (layer.g_proj, layer.v_norm, layer.kv_proj_target, layer.attention_sink_bias) == (None, None, None, None)


def test_a_query_gate_lies_beside_each_heads_query(made, draw):
    layer, tensors, x = made({"q_proj.weight": (48, 10)}, q_gate=True)
    both = (x @ tensors["q_proj.weight"].T).view(3, 4, 2, 6)
    _, k, v = plain_parts({**tensors, "q_proj.weight": tensors["q_proj.weight"][:24]}, x)
    q = turned(rms(both[:, :, 0], tensors["q_norm.weight"]), POSITIONS)
    heads = attention(q, k, v, 6**-0.5) * both[:, :, 1].sigmoid()
    torch.testing.assert_close(layer(x, POSITIONS), heads.flatten(1) @ tensors["o_proj.weight"].T, **EXACT)
    assert (layer.q_size, layer.kv_size) == (48, 12)


@pytest.mark.parametrize("bias", [False, True])
def test_a_context_has_projections_of_its_own(bias, made, draw):
    extra = {f"{name}_proj_target.weight": (12, 10) for name in "kv"}
    if bias:
        extra |= {f"{name}_proj_target.bias": (12,) for name in "kv"}
    layer, tensors, x = made(extra, target_kv=True, qkv_bias=bias)
    context, places = draw(2, 10), torch.tensor([0, 1])

    def of(name, rows, heads):
        got = projected(rows, tensors[f"{name}.weight"], heads)
        return got + tensors[f"{name}.bias"].view(heads, 6) if bias else got

    q = turned(rms(of("q_proj", x, 4), tensors["q_norm.weight"]), POSITIONS)
    own, ahead = rms(of("k_proj", x, 2), tensors["k_norm.weight"]), of("k_proj_target", context, 2)
    k = torch.cat([turned(rms(ahead, tensors["k_norm.weight"]), places), turned(own, POSITIONS)])
    v = torch.cat([of("v_proj_target", context, 2), of("v_proj", x, 2)])
    due = attention(q, k, v, 6**-0.5).flatten(1) @ tensors["o_proj.weight"].T
    torch.testing.assert_close(layer(x, POSITIONS, context=(context, places)), due, **EXACT)
    assert layer.kv_proj_target.name == "kv_proj_target.weight"


def test_values_normed_without_a_weight(made):
    layer, tensors, x = made(v_norm=True, build={"norm_eps": 0.5})
    q = turned(rms(projected(x, tensors["q_proj.weight"], 4), tensors["q_norm.weight"], 0.5), POSITIONS)
    k = turned(rms(projected(x, tensors["k_proj.weight"], 2), tensors["k_norm.weight"], 0.5), POSITIONS)
    v = rms(projected(x, tensors["v_proj.weight"], 2), eps=0.5)
    due = attention(q, k, v, 6**-0.5).flatten(1) @ tensors["o_proj.weight"].T
    torch.testing.assert_close(layer(x, POSITIONS), due, **EXACT)


def test_values_that_are_keys_before_their_norm(made):
    layer, tensors, x = made(drop=("v_proj.weight",), k_eq_v=True)
    q, k, _ = plain_parts({**tensors, "v_proj.weight": tensors["k_proj.weight"]}, x)
    v = projected(x, tensors["k_proj.weight"], 2)
    due = attention(q, k, v, 6**-0.5).flatten(1) @ tensors["o_proj.weight"].T
    torch.testing.assert_close(layer(x, POSITIONS), due, **EXACT)


def test_values_that_are_keys_with_their_bias(made):
    layer, tensors, x = made(drop=("v_proj.weight", "v_proj.bias"), k_eq_v=True, qkv_bias=True)
    _, v = layer.kv(x, POSITIONS)
    due = projected(x, tensors["k_proj.weight"], 2) + tensors["k_proj.bias"].view(2, 6)
    torch.testing.assert_close(v, due, **EXACT)


def test_a_norm_without_a_weight_after_the_rotation(made):
    layer, tensors, x = made(drop=("q_norm.weight", "k_norm.weight"), head_norm="plain", build={"norm_eps": 0.25})
    q = rms(turned(projected(x, tensors["q_proj.weight"], 4), POSITIONS), eps=0.25)
    k = rms(turned(projected(x, tensors["k_proj.weight"], 2), POSITIONS), eps=0.25)
    torch.testing.assert_close(layer.q(x, POSITIONS), q, **EXACT)
    torch.testing.assert_close(layer.kv(x, POSITIONS)[0], k, **EXACT)
    assert isinstance(layer.k_norm, RMSNorm)


def test_a_layer_norm_with_weights_per_head(made):
    extra = {"q_norm.weight": (4, 6), "k_norm.weight": (2, 6)}
    layer, tensors, x = made(extra, head_norm="layer", build={"norm_eps": 0.25})

    def normed(name, heads):
        rows = projected(x, tensors[f"{name}_proj.weight"], heads)
        rows = rows - rows.mean(-1, keepdim=True)
        return turned(rms(rows, tensors[f"{name}_norm.weight"], 0.25), POSITIONS)

    torch.testing.assert_close(layer.q(x, POSITIONS), normed("q", 4), **EXACT)
    torch.testing.assert_close(layer.kv(x, POSITIONS)[0], normed("k", 2), **EXACT)
    assert isinstance(layer.q_norm, LayerNorm)


def test_a_gemma_norm_and_an_epsilon(made):
    layer, tensors, x = made(build={"norm_eps": 0.25, "norm_kind": "gemma"})
    k = rms(projected(x, tensors["k_proj.weight"], 2), 1 + tensors["k_norm.weight"], 0.25)
    torch.testing.assert_close(layer.kv(x, POSITIONS)[0], turned(k, POSITIONS), **EXACT)


def test_nothing_turns_where_the_spec_says_so(made):
    layer, tensors, x = made(rotates=False, qk_norm=False)
    torch.testing.assert_close(layer.q(x, POSITIONS), projected(x, tensors["q_proj.weight"], 4), **EXACT)
    assert (layer.rotary_emb, layer.q_norm, layer.k_norm) == (None, None, None)


def test_queries_grow_with_their_position(made):
    tuning = TemperatureSpec(floor_scale=4, attn_scale=0.5)
    layer, tensors, x = made(temperature=tuning)
    q, k, _ = plain_parts(tensors, x)
    # (position + 1) / 4, rounded down: 1, 2, 10.
    factor = torch.tensor([math.log(2), math.log(3), math.log(11)], dtype=torch.float64) * 0.5 + 1
    torch.testing.assert_close(layer.q(x, POSITIONS), q * factor[:, None, None], **EXACT)
    torch.testing.assert_close(layer.kv(x, POSITIONS)[0], k, **EXACT)


def test_a_temperature_keeps_the_rows_dtype(made):
    layer, _, x = made(temperature=TemperatureSpec(floor_scale=4, attn_scale=0.5))
    layer = layer.bfloat16()
    # Near 4096 bfloat16 has no odd numbers: the position is one short of a step if it is rounded to them.
    assert layer.q(x.bfloat16(), POSITIONS).dtype == torch.bfloat16


@pytest.mark.parametrize("floor_scale", [0, -1])
def test_a_temperature_needs_a_positive_step(floor_scale, made):
    with pytest.raises(LayerBuildError, match=f"is {floor_scale}; it must be positive") as caught:
        made(temperature=TemperatureSpec(floor_scale=floor_scale, attn_scale=0.1))
    assert (caught.value.key, caught.value.got) == ("floor_scale", floor_scale)


def test_a_temperature_step_below_one_is_a_step(made):
    made(temperature=TemperatureSpec(floor_scale=0.5, attn_scale=0.1))


@pytest.mark.parametrize(
    ("stated", "given", "due"), [(None, None, 6**-0.5), (0.3, None, 0.3), (0.3, 0.7, 0.7), (None, 0.7, 0.7)]
)
def test_the_factor_on_scores_is_the_callers_then_the_specs_then_of_the_width(stated, given, due, made):
    layer, tensors, x = made(scaling=stated, build={"scaling": given})
    assert layer.scaling == due
    out = attention(*plain_parts(tensors, x), due).flatten(1) @ tensors["o_proj.weight"].T
    torch.testing.assert_close(layer(x, POSITIONS), out, **EXACT)


def test_a_query_sees_its_own_chunk_only(made):
    layer, tensors, x = made(chunk_size=5)
    positions = torch.tensor([3, 4, 5])
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).bool()
    due = attention(*plain_parts(tensors, x, positions), 6**-0.5, sees).flatten(1) @ tensors["o_proj.weight"].T
    torch.testing.assert_close(layer(x, positions), due, **EXACT)


def test_a_window_of_the_spec_applies_unless_it_is_switched_off(made):
    layer, tensors, x = made(sliding_window=6)
    positions = torch.tensor([3, 8, 9])
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    parts = plain_parts(tensors, x, positions)
    due = attention(*parts, 6**-0.5, sees).flatten(1) @ tensors["o_proj.weight"].T
    torch.testing.assert_close(layer(x, positions), due, **EXACT)
    due = attention(*parts, 6**-0.5).flatten(1) @ tensors["o_proj.weight"].T
    torch.testing.assert_close(layer(x, positions, window=False), due, **EXACT)


def test_a_value_scale_is_on_values_alone(made):
    layer, tensors, x = made(value_scale=0.25)
    k, v = layer.kv(x, POSITIONS)
    _, due_k, due_v = plain_parts(tensors, x)
    torch.testing.assert_close(k, due_k, **EXACT)
    torch.testing.assert_close(v, due_v * 0.25, **EXACT)


def test_joined_projections_are_the_separate_ones_in_order(made):
    layer, tensors, x = made(qkv_bias=True)
    weight = torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"])
    bias = torch.cat([tensors[f"{name}_proj.bias"] for name in "qkv"])
    rest = {name: value for name, value in tensors.items() if name[:2] not in ("q_", "k_", "v_") or "norm" in name}
    joined = GQAAttention(layer.spec, {**rest, "qkv_proj.weight": weight, "qkv_proj.bias": bias})
    assert torch.equal(joined(x, POSITIONS), layer(x, POSITIONS))
    assert torch.equal(joined.qkv_proj.weight, layer.qkv_proj.weight)
    assert joined.qkv_proj.name == layer.qkv_proj.name == "qkv_proj.weight"
    with pytest.raises(LayerBuildError) as caught:
        GQAAttention(replace(layer.spec, qkv_bias=False), {**rest, "qkv_proj.weight": weight, "qkv_proj.bias": bias})
    assert caught.value.key == "qkv_proj.bias"


def test_a_cache_is_left_alone_where_it_is_not_to_be_updated(made):
    layer, _, x = made()
    cache = KVCache()
    assert len(cache) == 0
    layer(x, POSITIONS, cache=cache, update_cache=False)
    assert len(cache) == 0
    layer(x, POSITIONS, cache=cache)
    assert len(cache) == 3
    layer(x.expand(2, 3, 10), POSITIONS, cache=(batch := KVCache()))
    assert (len(batch), batch.positions.shape) == (3, (2, 3))
