"""Grouped-query attention.

What these catch: query heads read by the wrong KV head; q, k and v rows swapped or mis-sliced; a norm over all heads
instead of one; the norm after the rotation; a norm or a bias that is dropped; rotation by row number instead of
position; a sink that is scaled, masked, read by another head or counted as a value; causality that lets a row look
ahead, or goes by position where rows share one; a window off by one or cut on one side only; a context that
is given queries, or whose keys are not normed; decoding step by step that differs from one prefill; batches that leak.
The right values come from a loop over heads and rows in plain Python, and from cases small enough for a pencil.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers import GQAAttention, KVCache
from pytest_specdecode.spec import GQASpec, RopeSpec, TemperatureSpec

Specs = Callable[..., GQASpec]
Tensors = Callable[[GQASpec], dict[str, Tensor]]
Draw = Callable[..., Tensor]

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def by_loops(
    spec: GQASpec,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    positions: list[int],
    sees: Callable[[int, int], bool],
    *,
    context: tuple[Tensor, list[int]] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The layer one head and one row at a time; `sees(row, key)` counts keys from the context's first."""
    d, group = spec.head_dim, spec.num_heads // spec.num_kv_heads
    hidden = [*(context[0] if context else []), *x]
    places = [*(context[1] if context else []), *positions]
    before = len(hidden) - len(x)

    def head(name: str, row: Tensor, place: int, index: int) -> list[float]:
        weight = tensors[f"{name}_proj.weight"][index * d : (index + 1) * d]
        lanes = (weight @ row).tolist()
        if f"{name}_proj.bias" in tensors:
            lanes = [a + b for a, b in zip(lanes, tensors[f"{name}_proj.bias"][index * d :].tolist(), strict=False)]
        if name == "v":
            return [lane * spec.value_scale for lane in lanes]
        if spec.qk_norm:
            root = math.sqrt(sum(lane * lane for lane in lanes) / d + eps)
            lanes = [lane / root * w for lane, w in zip(lanes, tensors[f"{name}_norm.weight"].tolist(), strict=True)]
        half = spec.rope.rotary_dim // 2
        turned = list(lanes)
        for i in range(half):
            angle = place * spec.rope.theta ** (-i / half)
            first, second = (i, i + half) if spec.rope.is_neox_style else (2 * i, 2 * i + 1)
            turned[first] = lanes[first] * math.cos(angle) - lanes[second] * math.sin(angle)
            turned[second] = lanes[second] * math.cos(angle) + lanes[first] * math.sin(angle)
        return turned

    out = []
    for row in range(len(x)):
        heads: list[float] = []
        for h in range(spec.num_heads):
            q = head("q", x[row], positions[row], h)
            keys = [j for j in range(len(hidden)) if sees(row + before, j)]
            dots = [dot(q, head("k", hidden[j], places[j], h // group)) / math.sqrt(d) for j in keys]
            weights = [math.exp(each) for each in dots]
            values = [head("v", hidden[j], 0, h // group) for j in keys]
            total = sum(weights)
            if "attention_sink_bias" in tensors:
                total += math.exp(float(tensors["attention_sink_bias"][h]))
            heads += [sum(w * v[lane] for w, v in zip(weights, values, strict=True)) / total for lane in range(d)]
        row_out = tensors["o_proj.weight"] @ torch.tensor(heads, dtype=torch.float64)
        out.append(row_out + tensors["o_proj.bias"] if "o_proj.bias" in tensors else row_out)
    return torch.stack(out)


def test_two_rows_by_hand() -> None:
    # One head of two lanes, every projection the identity, both rows at position 0, so that nothing turns. The second row
    # scores 0 on the first and 1/sqrt(2) on itself: weights 1 / (1 + e^0.7071) = 0.3302 and 0.6698.
    eye = torch.eye(2, dtype=torch.float64)
    rope = RopeSpec(theta=1e4, rotary_dim=2)
    spec = GQASpec(num_heads=1, num_kv_heads=1, head_dim=2, in_features=2, out_features=2, rope=rope)
    layer = GQAAttention(spec, {f"{name}_proj.weight": eye for name in "qkvo"})
    got = layer(eye, torch.zeros(2, dtype=torch.int64))
    share = 1 / (1 + math.exp(math.sqrt(0.5)))
    torch.testing.assert_close(got, torch.tensor([[1.0, 0.0], [share, 1 - share]], dtype=torch.float64), **EXACT)
    swapped = layer(eye, torch.zeros(2, dtype=torch.int64), causal=False)
    torch.testing.assert_close(swapped[0], torch.tensor([1 - share, share], dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": False},
        {"qkv_bias": True, "o_bias": True},
        {"value_scale": 0.612},
        {"num_kv_heads": 1},
        {"num_kv_heads": 4},
        {"sink": True},
    ],
    ids=["plain", "no-norm", "bias", "value-scale", "mqa", "mha", "sink"],
)
def test_equals_a_loop_over_heads_and_rows(
    options: dict[str, object], neox: bool, causal: bool, gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw
) -> None:
    spec = gqa_spec(**options)
    spec = replace(spec, rope=replace(spec.rope, is_neox_style=neox))
    tensors, x = gqa_tensors(spec), draw(4, 10)
    positions = [7, 8, 9, 30]
    got = GQAAttention(spec, tensors)(x, torch.tensor(positions), causal=causal)
    due = by_loops(spec, tensors, x, positions, lambda row, key: key <= row or not causal)
    torch.testing.assert_close(got, due, **EXACT)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_context_gives_keys_and_values_only(causal: bool, gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec()
    tensors, context, x = gqa_tensors(spec), draw(3, 10), draw(4, 10)
    layer = GQAAttention(spec, tensors)
    got = layer(x, torch.arange(3, 7), context=(context, torch.arange(3)), causal=causal)
    due = by_loops(
        spec, tensors, x, [3, 4, 5, 6], lambda row, key: key <= row or not causal, context=(context, [0, 1, 2])
    )
    torch.testing.assert_close(got, due, **EXACT)
    cache = KVCache()
    cache.append(*layer.kv(context, torch.arange(3)), torch.arange(3))
    assert torch.equal(layer(x, torch.arange(3, 7), cache=cache, update_cache=False, causal=causal), got)
    assert len(cache) == 3


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_window_counts_the_row_itself_and_goes_by_position(
    window: int, causal: bool, gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw
) -> None:
    spec = gqa_spec(sliding_window=window)
    tensors, x, positions = gqa_tensors(spec), draw(5, 10), [4, 5, 6, 8, 9]

    def sees(row: int, key: int) -> bool:
        distance = positions[row] - positions[key]
        return distance < window and (distance >= 0 if causal else -distance < window)

    layer = GQAAttention(spec, tensors)
    got = layer(x, torch.tensor(positions), causal=causal)
    torch.testing.assert_close(got, by_loops(spec, tensors, x, positions, sees), **EXACT)
    full = by_loops(spec, tensors, x, positions, lambda row, key: key <= row or not causal)
    torch.testing.assert_close(layer(x, torch.tensor(positions), causal=causal, window=False), full, **EXACT)


def test_mask_narrows_and_never_widens(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec()
    tensors, x = gqa_tensors(spec), draw(4, 10)
    tree = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    positions = [0, 1, 1, 2]  # two children of one root: they share a position and do not see each other
    got = GQAAttention(spec, tensors)(x, torch.tensor(positions), mask=tree)
    due = by_loops(spec, tensors, x, positions, lambda row, key: bool(tree[row, key]) and key <= row)
    torch.testing.assert_close(got, due, **EXACT)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1, 1), (4, 1, 1), (2, 3, 1)])
def test_decoding_by_steps_equals_one_prefill(
    steps: tuple[int, ...], window: int | None, gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw
) -> None:
    spec = gqa_spec(sliding_window=window)
    layer, x, positions = GQAAttention(spec, gqa_tensors(spec)), draw(6, 10), torch.arange(10, 16)
    cache, parts = KVCache(), []
    for rows, places in zip(x.split(steps), positions.split(steps), strict=True):
        parts.append(layer(rows, places, cache=cache))
    torch.testing.assert_close(torch.cat(parts), layer(x, positions), **EXACT)
    assert len(cache) == 6
    assert torch.equal(cache.positions, positions)


def test_a_context_goes_into_the_cache_before_its_block(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec()
    layer, x = GQAAttention(spec, gqa_tensors(spec)), draw(5, 10)
    cache = KVCache()
    layer(x[2:], torch.arange(2, 5), context=(x[:2], torch.arange(2)), cache=cache)
    k, v = layer.kv(x, torch.arange(5))
    assert torch.equal(cache.positions, torch.arange(5))
    torch.testing.assert_close((cache.k, cache.v), (k, v), **EXACT)


def test_a_chunk_is_counted_from_position_0(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec()
    tensors = gqa_tensors(spec)
    x, positions = draw(5, 10), torch.tensor([2, 3, 4, 8, 9])
    chunks = torch.tensor([0, 0, 1, 2, 2])
    mask = chunks[:, None] == chunks[None]
    due = GQAAttention(spec, tensors)(x, positions, mask=mask)
    chunked = GQAAttention(replace(spec, chunk_size=4), tensors)
    torch.testing.assert_close(chunked(x, positions), due, **EXACT)
    cache = KVCache()
    steps = [chunked(x[i : i + 1], positions[i : i + 1], cache=cache) for i in range(5)]
    torch.testing.assert_close(torch.cat(steps), due, **EXACT)


def test_without_rotation_a_position_is_only_an_order(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec(rotates=False)
    layer = GQAAttention(spec, gqa_tensors(spec))
    x = draw(4, 10)
    assert layer.rotary_emb is None
    assert torch.equal(layer(x, torch.arange(4)), layer(x, torch.arange(4) + 300))


def test_a_temperature_steps_at_every_floor(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec(rotates=False)
    tensors, x = gqa_tensors(spec), draw(2, 4, 10)
    tuned = GQAAttention(replace(spec, temperature=TemperatureSpec(attn_scale=2.0, floor_scale=4.0)), tensors)
    plain = GQAAttention(spec, tensors)
    # Rows 0, 2, 3 and 11 are the 1st, 3rd, 4th and 12th: no whole step, none, one, three.
    positions = torch.tensor([0, 2, 3, 11])
    factors = torch.tensor([1.0, 1.0, 1.0 + 2.0 * math.log(2.0), 1.0 + 2.0 * math.log(4.0)], dtype=torch.float64)
    torch.testing.assert_close(tuned.q(x, positions), plain.q(x, positions) * factors[:, None, None], **EXACT)
    assert torch.equal(tuned.kv(x, positions)[0], plain.kv(x, positions)[0])


def test_rows_of_a_batch_do_not_meet(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec(sliding_window=3)
    layer, x = GQAAttention(spec, gqa_tensors(spec)), draw(3, 4, 10)
    positions = torch.tensor([[0, 1, 2, 3], [9, 10, 11, 12], [3, 3, 4, 9]])
    context, places = draw(3, 2, 10), positions[:, :2] - positions[:, :2]
    got = layer(x, positions, context=(context, places))
    for i in range(3):
        alone = layer(x[i], positions[i], context=(context[i], places[i]))
        torch.testing.assert_close(got[i], alone, **EXACT)
    torch.testing.assert_close(layer(x, positions[0])[2], layer(x[2], positions[0]), **EXACT)


def test_joined_and_separate_projections_are_one(gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    spec = gqa_spec(qkv_bias=True)
    tensors = gqa_tensors(spec)
    joined = {name: value for name, value in tensors.items() if name[:2] not in ("q_", "k_", "v_") or "norm" in name}
    for kind in ("weight", "bias"):
        joined[f"qkv_proj.{kind}"] = torch.cat([tensors[f"{name}_proj.{kind}"] for name in "qkv"])
    one, other = GQAAttention(spec, tensors), GQAAttention(spec, joined)
    assert torch.equal(one.qkv_proj.weight, other.qkv_proj.weight)
    assert torch.equal(one.qkv_proj.bias, other.qkv_proj.bias)


def test_attributes_are_the_engines(gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    spec = gqa_spec(value_scale=0.5, sliding_window=7)
    layer = GQAAttention(spec, gqa_tensors(spec), norm_eps=1e-5)
    assert (layer.q_size, layer.kv_size, layer.num_heads, layer.num_kv_heads) == (24, 12, 4, 2)
    assert (layer.head_dim, layer.v_head_dim, layer.value_scale, layer.sliding_window) == (6, 6, 0.5, 7)
    assert (layer.qkv_proj.weight.shape, layer.qkv_proj.bias) == ((48, 10), None)
    assert (layer.k_norm.variance_epsilon, layer.q_norm.variance_epsilon) == (1e-5, 1e-5)
    assert layer.scaling == pytest.approx(6**-0.5)
    assert layer.rotary_emb.rotary_dim == 4
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert GQAAttention(gqa_spec(qk_norm=False), gqa_tensors(gqa_spec(qk_norm=False))).k_norm is None


def test_tiny_rows_show_the_norms_epsilon(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec()
    tensors, x = gqa_tensors(spec), draw(3, 10, scale=1e-3)
    for eps in (1e-6, 1e-5):
        got = GQAAttention(spec, tensors, norm_eps=eps)(x, torch.arange(3))
        due = by_loops(spec, tensors, x, [0, 1, 2], lambda row, key: key <= row, eps=eps)
        torch.testing.assert_close(got, due, rtol=1e-11, atol=1e-15)


def test_gemma_norms_add_one(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec()
    tensors, x = gqa_tensors(spec), draw(3, 10)
    less = {name: value - 1 if "norm" in name else value for name, value in tensors.items()}
    plain, gemma = GQAAttention(spec, tensors), GQAAttention(spec, less, norm_kind="gemma")
    torch.testing.assert_close(gemma(x, torch.arange(3)), plain(x, torch.arange(3)), **EXACT)


def test_another_scaling(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    spec = gqa_spec()
    tensors, x = gqa_tensors(spec), draw(3, 10)
    more = {**tensors, "q_norm.weight": tensors["q_norm.weight"] * math.sqrt(6)}
    got = GQAAttention(spec, tensors, scaling=1.0)(x, torch.arange(3))
    torch.testing.assert_close(got, GQAAttention(spec, more)(x, torch.arange(3)), **EXACT)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_lower_precision_stays_near_the_truth(
    dtype: torch.dtype, bound: float, gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw
) -> None:
    spec = gqa_spec()
    layer = GQAAttention(spec, gqa_tensors(spec)).to(dtype)
    x = draw(6, 10).to(dtype)
    got = layer(x, torch.arange(6))
    truth = layer.double()(x.double(), torch.arange(6))
    assert got.dtype == dtype
    assert ((got - truth).norm(dim=-1) / truth.norm(dim=-1)).max() < bound


@pytest.mark.parametrize(
    ("name", "shape", "due"),
    [
        ("q_proj.weight", (24, 9), "due is [24, 10]"),
        ("k_proj.weight", (24, 10), "due is [12, 10]"),
        ("v_proj.weight", (6, 10), "due is [12, 10]"),
        ("o_proj.weight", (24, 8), "due is [8, 24]"),
        ("q_norm.weight", (24,), "due is [6]"),
        ("k_norm.weight", (12,), "due is [6]"),
        ("qkv_proj.weight", (36, 10), "due is [48, 10]"),
        ("q_proj.bias", (1,), "due is [24]"),
        ("o_proj.bias", (24,), "due is [8]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(
    name: str, shape: tuple[int, ...], due: str, gqa_spec: Specs, gqa_tensors: Tensors
) -> None:
    spec = gqa_spec(qkv_bias=True, o_bias=True)
    with pytest.raises(LayerBuildError) as caught:
        GQAAttention(spec, {**gqa_tensors(spec), name: torch.zeros(shape)})
    assert caught.value.key == name
    assert caught.value.got == shape
    assert str(caught.value) == f"{name}: has shape {list(shape)}; {due}"


def test_a_sink_takes_its_share_and_no_more(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    """A logit of log 3 against one key that scores 0 leaves a quarter; keys and values, cached or not, know nothing of it."""
    eye = torch.eye(2, dtype=torch.float64)
    rope = RopeSpec(theta=1e4, rotary_dim=2)
    spec = GQASpec(num_heads=1, num_kv_heads=1, head_dim=2, in_features=2, out_features=2, rope=rope, sink=True)
    tensors = {f"{name}_proj.weight": eye for name in "kvo"} | {"q_proj.weight": 0 * eye}
    layer = GQAAttention(spec, {**tensors, "attention_sink_bias": torch.tensor([math.log(3.0)])})
    torch.testing.assert_close(layer(eye[:1], torch.zeros(1, dtype=torch.int64)), 0.25 * eye[:1], rtol=1e-7, atol=0)

    spec = gqa_spec(sliding_window=2)
    tensors, x, positions = gqa_tensors(spec), draw(5, 10), torch.arange(5)
    sunk = GQAAttention(spec, {**tensors, "attention_sink_bias": draw(4)})
    plain = GQAAttention(spec, tensors)
    for one, other in zip(sunk.kv(x, positions), plain.kv(x, positions), strict=True):
        assert torch.equal(one, other)
    # A row that sees itself alone gives less of the same value.
    first, whole = sunk(x, positions), plain(x, positions)
    assert not torch.allclose(first, whole)
    cache = KVCache()
    steps = [sunk(x[i : i + 1], positions[i : i + 1], cache=cache) for i in range(5)]
    torch.testing.assert_close(torch.cat(steps), first, **EXACT)
    lost = GQAAttention(spec, {**tensors, "attention_sink_bias": torch.full((4,), -torch.inf)})
    torch.testing.assert_close(lost(x, positions), whole, **EXACT)


def test_a_sink_is_there_as_the_spec_says(gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    tensors, sink = gqa_tensors(gqa_spec()), {"attention_sink_bias": torch.zeros(4)}
    with pytest.raises(LayerBuildError, match=r"^attention_sink_bias: is missing; a tensor of shape \[4\] is due"):
        GQAAttention(gqa_spec(sink=True), tensors)
    with pytest.raises(LayerBuildError, match=r"^attention_sink_bias: is a sink where the spec says there is none"):
        GQAAttention(gqa_spec(sink=False), {**tensors, **sink})
    with pytest.raises(LayerBuildError, match=r"^attention_sink_bias: has shape \[2\]; due is \[4\]"):
        GQAAttention(gqa_spec(), {**tensors, "attention_sink_bias": torch.zeros(2)})
    assert GQAAttention(gqa_spec(), tensors).attention_sink_bias is None
    assert GQAAttention(gqa_spec(), {**tensors, **sink}).attention_sink_bias is not None


@pytest.mark.parametrize("name", ["q_proj.weight", "v_proj.bias", "o_proj.weight", "o_proj.bias", "k_norm.weight"])
def test_a_missing_tensor_is_named(name: str, gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    spec = gqa_spec(qkv_bias=True, o_bias=True)
    tensors = gqa_tensors(spec)
    del tensors[name]
    with pytest.raises(LayerBuildError, match=f"{name}: is missing") as caught:
        GQAAttention(spec, tensors)
    assert caught.value.due is not None


@pytest.mark.parametrize("name", ["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "qkv_proj.bias"])
def test_a_bias_that_the_spec_denies_is_not_dropped(name: str, gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    spec = gqa_spec()
    with pytest.raises(LayerBuildError, match=f"{name}: is a bias where the spec says there is none"):
        GQAAttention(spec, {**gqa_tensors(spec), name: torch.zeros(24)})


@pytest.mark.parametrize(
    ("fields", "key", "text"),
    [
        ({"num_heads": None}, "num_attention_heads", "is not known"),
        ({"num_kv_heads": None}, "num_key_value_heads", "is not known"),
        ({"head_dim": None}, "head_dim", "is not known"),
        ({"in_features": None}, "in_features", "is not known"),
        ({"out_features": None}, "out_features", "is not known"),
        ({"num_kv_heads": 3}, "num_key_value_heads", "4 query heads are not a multiple of 3 KV heads"),
        ({"num_kv_heads": 0}, "num_key_value_heads", "is 0; it must be positive"),
        ({"rope": RopeSpec(theta=None, rotary_dim=4)}, "rope_theta", "is not stated"),
    ],
)
def test_a_spec_that_cannot_be_built(
    fields: dict[str, object], key: str, text: str, gqa_spec: Specs, gqa_tensors: Tensors
) -> None:
    with pytest.raises(LayerBuildError) as caught:
        GQAAttention(gqa_spec(**fields), gqa_tensors(gqa_spec()))
    assert caught.value.key == key
    assert text in str(caught.value)


def test_projections_of_different_dtypes_are_not_promoted(gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    tensors = gqa_tensors(gqa_spec())
    tensors["k_proj.weight"] = tensors["k_proj.weight"].bfloat16()
    with pytest.raises(LayerBuildError, match=r"qkv_proj.weight: its parts differ: float64 on cpu, bfloat16 on cpu"):
        GQAAttention(gqa_spec(), tensors)


def test_packed_weights_are_not_computed_with(gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    tensors = gqa_tensors(gqa_spec())
    tensors["o_proj.weight"] = tensors["o_proj.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(LayerBuildError, match=r"o_proj.weight: is float8_e4m3fn; .* dequantize it first"):
        GQAAttention(gqa_spec(), tensors)


@pytest.mark.parametrize(
    ("x", "positions", "text"),
    [
        (torch.zeros(3, 11), torch.arange(3), "reads 10 features; the input has 11"),
        (torch.zeros(3, 10), torch.arange(4), r"positions have shape \[4\]; the input has \[3\] rows"),
        (torch.zeros(2, 3, 10), torch.zeros(3, 2).long(), r"positions have shape \[3, 2\]"),
        (torch.zeros(10), torch.arange(1), r"\[T, in\] or \[B, T, in\] is due"),
        (torch.zeros(3, 10), torch.tensor([0, 1, -2]), "position -2 is negative"),
        (torch.zeros(3, 10), torch.tensor([0, 1, 512]), "position 512 lies beyond"),
        (torch.zeros(3, 10, dtype=torch.float32), torch.arange(3), "is float64; the input is float32"),
    ],
)
def test_inputs_that_do_not_fit(x: Tensor, positions: Tensor, text: str, gqa_spec: Specs, gqa_tensors: Tensors) -> None:
    layer = GQAAttention(gqa_spec(), gqa_tensors(gqa_spec()))
    x = x if "float32" in text else x.double()
    with pytest.raises(DraftError, match=text):
        layer(x, positions)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (torch.ones(3, 4).bool(), r"bool of \[3, 3\] is due"),
        (torch.ones(3, 3), "the mask is torch.float32"),
        (torch.ones(2, 3, 3).bool(), r"bool of \[3, 3\] is due"),
        (torch.eye(3).bool() & False, "a query sees no key at all"),
    ],
    ids=["shape", "dtype", "batch", "empty"],
)
def test_masks_that_do_not_fit_leave_the_cache_alone(
    mask: Tensor, text: str, gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw
) -> None:
    layer, cache = GQAAttention(gqa_spec(), gqa_tensors(gqa_spec())), KVCache()
    with pytest.raises(DraftError, match=text):
        layer(draw(3, 10), torch.arange(3), mask=mask, cache=cache)
    assert len(cache) == 0


def test_a_cache_of_another_batch_is_refused(gqa_spec: Specs, gqa_tensors: Tensors, draw: Draw) -> None:
    layer, cache = GQAAttention(gqa_spec(), gqa_tensors(gqa_spec())), KVCache()
    layer(draw(2, 3, 10), torch.arange(3), cache=cache)
    with pytest.raises(DraftError, match="do not fit a cache"):
        layer(draw(1, 10), torch.tensor([3]), cache=cache)
