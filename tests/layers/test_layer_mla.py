"""Multi-head latent attention.

What these catch: `kv_b_proj` split keys-then-values over all heads instead of per head; nope and rope lanes swapped;
`k_pe` normed with the latent, or not rotated; rotate-half where pairs are due; the score's scale without, or with a
wrong, `mscale ** 2`; a cache that holds something else than latent and rotated `k_pe`; an absorbed form that is not the
naive one; a query without a latent that is normed, or takes a rank's tensors. A loop over heads and rows in plain
Python gives the right values; it shares no code with either form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers import LatentCache, MLAAttention, mla_scaling, require_q_lora_rank
from pytest_specdecode.spec import MLASpec, RopeSpec

Specs = Callable[..., MLASpec]
Tensors = Callable[[MLASpec], dict[str, Tensor]]
Draw = Callable[..., Tensor]

EXACT = {"rtol": 1e-11, "atol": 1e-12}
YARN = {"factor": 40.0, "original_max_position_embeddings": 64}


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def by_loops(
    spec: MLASpec, tensors: Mapping[str, Tensor], x: Tensor, positions: list[int], scaling: float, eps: float = 1e-6
) -> Tensor:
    """The causal layer one head and one row at a time, for an unscaled interleaved rotation."""
    nope, rope, v, rank = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim, spec.kv_lora_rank

    def normed(row: Tensor, name: str) -> Tensor:
        return row / math.sqrt(float(row @ row) / len(row) + eps) * tensors[f"{name}.weight"]

    def turned(lanes: list[float], place: int) -> list[float]:
        out = []
        for i in range(rope // 2):
            angle = place * spec.rope.theta ** (-2 * i / rope)
            a, b = lanes[2 * i], lanes[2 * i + 1]
            out += [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]
        return out

    queries, latents, shared = [], [], []
    for row, place in zip(x, positions, strict=True):
        q = (
            tensors["q_proj.weight"] @ row
            if spec.whole_query
            else tensors["q_b_proj.weight"] @ normed(tensors["q_a_proj.weight"] @ row, "q_a_layernorm")
        )
        heads = [q[h * (nope + rope) : (h + 1) * (nope + rope)].tolist() for h in range(spec.num_heads)]
        queries.append([head[:nope] + turned(head[nope:], place) for head in heads])
        down = tensors["kv_a_proj_with_mqa.weight"] @ row
        latents.append(normed(down[:rank], "kv_a_layernorm"))
        shared.append(turned(down[rank:].tolist(), place))

    out = []
    for row in range(len(x)):
        concat: list[float] = []
        for h in range(spec.num_heads):
            block = tensors["kv_b_proj.weight"][h * (nope + v) : (h + 1) * (nope + v)]
            keys = [(block[:nope] @ latents[j]).tolist() + shared[j] for j in range(row + 1)]
            weights = [math.exp(scaling * dot(queries[row][h], key)) for key in keys]
            values = [(block[nope:] @ latents[j]).tolist() for j in range(row + 1)]
            concat += [
                sum(w * u[lane] for w, u in zip(weights, values, strict=True)) / sum(weights) for lane in range(v)
            ]
        out.append(tensors["o_proj.weight"] @ torch.tensor(concat, dtype=torch.float64))
    return torch.stack(out)


@pytest.mark.parametrize("absorbed", [False, True], ids=["naive", "absorbed"])
@pytest.mark.parametrize("query", [{}, {"q_lora_rank": None, "whole_query": True}], ids=["rank", "whole"])
def test_equals_a_loop_over_heads_and_rows(
    query: dict[str, Any], absorbed: bool, mla_spec: Specs, mla_tensors: Tensors, draw: Draw
) -> None:
    spec = mla_spec(**query)
    tensors, x, positions = mla_tensors(spec), draw(5, 12), [3, 4, 5, 90, 91]
    got = MLAAttention(spec, tensors)(x, torch.tensor(positions), absorbed=absorbed)
    torch.testing.assert_close(got, by_loops(spec, tensors, x, positions, 10**-0.5), **EXACT)


@pytest.mark.parametrize("scaling", [None, YARN, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}])
@pytest.mark.parametrize("neox", [False, True], ids=["interleaved", "neox"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_naive_equals_absorbed(
    scaling: dict[str, float] | None, neox: bool, causal: bool, mla_spec: Specs, mla_tensors: Tensors, draw: Draw
) -> None:
    spec = mla_spec(scaling)
    spec = replace(spec, rope=replace(spec.rope, is_neox_style=neox))
    layer, x, positions = MLAAttention(spec, mla_tensors(spec)), draw(2, 6, 12), torch.arange(30, 36)
    naive = layer.forward_naive(x, positions, causal=causal)
    absorbed = layer.forward_absorbed(x, positions, causal=causal)
    torch.testing.assert_close(naive, absorbed, **EXACT)
    assert torch.equal(layer(x, positions, causal=causal), naive)


def test_each_form_really_runs(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    # Equal in exact arithmetic, they round in different places: in bfloat16 the bits must differ.
    layer, x = MLAAttention(mla_spec(), mla_tensors(mla_spec())).bfloat16(), draw(6, 12).bfloat16()
    naive = layer.forward_naive(x, torch.arange(6))
    absorbed = layer.forward_absorbed(x, torch.arange(6))
    assert not torch.equal(naive, absorbed)
    assert torch.equal(layer(x, torch.arange(6), absorbed=True), absorbed)


def test_each_form_looks_back_only_unless_it_is_told(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    layer, x = MLAAttention(mla_spec(), mla_tensors(mla_spec())), draw(6, 12)
    for form in (layer.forward_naive, layer.forward_absorbed, layer):
        assert torch.equal(form(x, torch.arange(6)), form(x, torch.arange(6), causal=True))
        assert not torch.equal(form(x, torch.arange(6)), form(x, torch.arange(6), causal=False))


def test_interleaved_and_neox_differ(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    spec = mla_spec()
    tensors, x = mla_tensors(spec), draw(5, 12)
    other = replace(spec, rope=replace(spec.rope, is_neox_style=True))
    outs = [MLAAttention(each, tensors)(x, torch.arange(5)) for each in (spec, other)]
    assert (outs[0] - outs[1]).abs().max() > 1e-3
    torch.testing.assert_close(outs[0][0], outs[1][0], **EXACT)  # position 0 does not turn


def test_the_latent_is_normed_and_k_pe_is_only_turned(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    spec = mla_spec()
    tensors, x = mla_tensors(spec), draw(2, 12)
    rows = MLAAttention(spec, tensors, norm_eps=0.0).latent(x, torch.tensor([0, 5]))
    down = x @ tensors["kv_a_proj_with_mqa.weight"].T
    torch.testing.assert_close(rows[0, 7:], down[0, 7:], **EXACT)
    a, b = down[1, 7:9].tolist()
    assert rows[1, 7].item() == pytest.approx(a * math.cos(5) - b * math.sin(5), rel=1e-12)
    undone = rows[:, :7] / tensors["kv_a_layernorm.weight"]
    torch.testing.assert_close(undone.square().mean(dim=-1), torch.ones(2, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize(
    ("scaling", "due"),
    [
        (None, 1.0),
        (YARN, 1.0),  # a missing mscale_all_dim counts as 0
        ({**YARN, "mscale": 1.0}, 1.0),
        ({**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}, 1.3688879454113936**2),
        ({**YARN, "mscale_all_dim": 0.5}, 1.1844439727056968**2),
        ({**YARN, "factor": 0.5, "mscale_all_dim": 1.0}, 1.0),
    ],
    ids=["unscaled", "no-mscale", "mscale-only", "both", "half", "shrunk"],
)
def test_score_scale(scaling: dict[str, float] | None, due: float, mla_spec: Specs) -> None:
    assert mla_scaling(mla_spec(scaling)) == pytest.approx(due / math.sqrt(10), rel=1e-14)


def test_score_scale_of_kimi_k2() -> None:
    # 192 ** -0.5 * (0.1 * ln 64 + 1) ** 2 = 0.0721688 * 2.0047403
    rope = RopeSpec(theta=5e4, rope_type="deepseek_yarn", scaling={"factor": 64.0, "mscale_all_dim": 1.0})
    spec = MLASpec(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        in_features=14336,
        out_features=7168,
        rope=rope,
    )
    assert mla_scaling(spec) == pytest.approx(0.14468, rel=1e-4)


def test_the_scale_reaches_the_scores(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    # mscale == mscale_all_dim leaves the table as it is, and this table's lanes do not turn at position 0.
    plain = mla_spec({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    tensors, x = mla_tensors(plain), draw(4, 12)
    got = MLAAttention(plain, tensors)(x, torch.zeros(4, dtype=torch.int64))
    due = by_loops(plain, tensors, x, [0, 0, 0, 0], 1.3688879454113936**2 / math.sqrt(10))
    torch.testing.assert_close(got, due, **EXACT)


@pytest.mark.parametrize("absorbed", [False, True], ids=["naive", "absorbed"])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1, 1), (4, 2), (2, 3, 1)])
def test_decoding_by_steps_equals_one_prefill(
    steps: tuple[int, ...], absorbed: bool, mla_spec: Specs, mla_tensors: Tensors, draw: Draw
) -> None:
    spec = mla_spec(YARN)
    layer, x, positions = MLAAttention(spec, mla_tensors(spec)), draw(6, 12), torch.arange(60, 66)
    cache, parts = LatentCache(), []
    for rows, places in zip(x.split(steps), positions.split(steps), strict=True):
        parts.append(layer(rows, places, absorbed=absorbed, cache=cache))
    torch.testing.assert_close(torch.cat(parts), layer(x, positions, absorbed=absorbed), **EXACT)
    assert (len(cache), cache.rows.shape) == (6, (6, 11))
    torch.testing.assert_close(cache.rows, layer.latent(x, positions), **EXACT)


def test_a_drafted_row_need_not_stay_in_the_cache(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    layer, cache, x = MLAAttention(mla_spec(), mla_tensors(mla_spec())), LatentCache(), draw(3, 12)
    layer(x[:2], torch.arange(2), cache=cache)
    got = layer(x[2:], torch.tensor([2]), cache=cache, update_cache=False)
    assert len(cache) == 2
    torch.testing.assert_close(got[0], layer(x, torch.arange(3))[2], **EXACT)


@pytest.mark.parametrize("absorbed", [False, True], ids=["naive", "absorbed"])
def test_rows_of_a_batch_do_not_meet(absorbed: bool, mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    layer, x = MLAAttention(mla_spec(), mla_tensors(mla_spec())), draw(3, 4, 12)
    positions = torch.tensor([[0, 1, 2, 3], [9, 10, 11, 12], [3, 3, 4, 9]])
    mask = torch.tensor(
        [[[1, 1, 1, 1]] * 4, [[1, 1, 1, 1]] * 4, [[0, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]]]
    )
    mask[2, 0, 0] = 1
    got = layer(x, positions, absorbed=absorbed, mask=mask.bool())
    for i in range(3):
        alone = layer(x[i], positions[i], absorbed=absorbed, mask=mask[i].bool())
        torch.testing.assert_close(got[i], alone, **EXACT)


def test_a_joined_down_projection_is_the_two(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    tensors, x = mla_tensors(mla_spec()), draw(3, 12)
    joined = dict(tensors)
    parts = [joined.pop(name) for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")]
    joined["fused_qkv_a_proj_with_mqa.weight"] = torch.cat(parts)
    one, other = (MLAAttention(mla_spec(), each)(x, torch.arange(3)) for each in (tensors, joined))
    assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("absorbed", [False, True], ids=["naive", "absorbed"])
def test_lower_precision_stays_near_the_truth(
    dtype: torch.dtype, bound: float, absorbed: bool, mla_spec: Specs, mla_tensors: Tensors, draw: Draw
) -> None:
    layer = MLAAttention(mla_spec(), mla_tensors(mla_spec())).to(dtype)
    x = draw(6, 12).to(dtype)
    got = layer(x, torch.arange(6), absorbed=absorbed)
    truth = layer.double()(x.double(), torch.arange(6))
    assert got.dtype == dtype
    assert ((got - truth).norm(dim=-1) / truth.norm(dim=-1)).max() < bound


def test_tiny_rows_show_the_norms_epsilon(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    tensors, x = mla_tensors(mla_spec()), draw(3, 12, scale=1e-3)
    for eps in (1e-6, 1e-5):
        got = MLAAttention(mla_spec(), tensors, norm_eps=eps)(x, torch.arange(3))
        due = by_loops(mla_spec(), tensors, x, [0, 1, 2], 10**-0.5, eps)
        torch.testing.assert_close(got, due, rtol=1e-11, atol=1e-15)


def test_without_q_lora_rank_the_words_are_sglangs(mla_spec: Specs, mla_tensors: Tensors) -> None:
    for build in (require_q_lora_rank, lambda spec: MLAAttention(spec, mla_tensors(mla_spec()))):
        with pytest.raises(LayerBuildError) as caught:
            build(mla_spec(q_lora_rank=None))
        assert str(caught.value) == "Eagle3 MLA layer requires q_lora_rank in the draft config"
        assert isinstance(caught.value, ValueError)
    assert require_q_lora_rank(mla_spec()) == 9


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"num_heads": None}, "num_attention_heads"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({"v_head_dim": None}, "v_head_dim"),
        ({"in_features": None}, "in_features"),
        ({"out_features": None}, "out_features"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"rope": RopeSpec(theta=1e4, rotary_dim=8)}, "rotary_dim"),
    ],
)
def test_a_spec_that_cannot_be_built(fields: dict[str, Any], key: str, mla_spec: Specs, mla_tensors: Tensors) -> None:
    with pytest.raises(LayerBuildError) as caught:
        MLAAttention(mla_spec(**fields), mla_tensors(mla_spec()))
    assert caught.value.key == key


def test_mscale_all_dim_needs_a_factor(mla_spec: Specs) -> None:
    with pytest.raises(LayerBuildError, match=r"rope_scaling.factor: is missing or no number") as caught:
        mla_scaling(mla_spec({"mscale_all_dim": 1.0}))
    assert caught.value.got is None


@pytest.mark.parametrize(
    ("name", "shape", "due"),
    [
        ("q_a_proj.weight", (9, 6), "due is [9, 12]"),  # the width of one of the two halves that an EAGLE3 layer reads
        ("q_a_layernorm.weight", (12,), "due is [9]"),
        ("q_b_proj.weight", (24, 9), "due is [40, 9]"),
        ("kv_a_proj_with_mqa.weight", (7, 12), "due is [11, 12]"),
        ("kv_a_layernorm.weight", (11,), "due is [7]"),
        ("kv_b_proj.weight", (40, 7), "due is [44, 7]"),
        ("o_proj.weight", (8, 24), "due is [8, 20]"),
        ("fused_qkv_a_proj_with_mqa.weight", (11, 12), "due is [20, 12]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(
    name: str, shape: tuple[int, ...], due: str, mla_spec: Specs, mla_tensors: Tensors
) -> None:
    with pytest.raises(LayerBuildError) as caught:
        MLAAttention(mla_spec(), {**mla_tensors(mla_spec()), name: torch.zeros(shape)})
    assert str(caught.value) == f"{name}: has shape {list(shape)}; {due}"


def test_a_whole_query_has_one_projection(mla_spec: Specs, mla_tensors: Tensors) -> None:
    spec = mla_spec(q_lora_rank=None, whole_query=True)
    tensors = mla_tensors(spec)
    for shape in ((40, 9), (24, 12)):
        with pytest.raises(LayerBuildError, match=r"^q_proj.weight: has shape .*; due is \[40, 12\]"):
            MLAAttention(spec, {**tensors, "q_proj.weight": torch.zeros(shape)})
    with pytest.raises(LayerBuildError, match=r"^q_proj.bias: is a bias where the spec says there is none"):
        MLAAttention(spec, {**tensors, "q_proj.bias": torch.zeros(40)})
    with pytest.raises(LayerBuildError, match=r"^q_proj.weight: is missing"):
        MLAAttention(spec, mla_tensors(mla_spec()))


def test_a_missing_tensor_and_a_bias_are_named(mla_spec: Specs, mla_tensors: Tensors) -> None:
    tensors = mla_tensors(mla_spec())
    with pytest.raises(LayerBuildError, match=r"kv_a_proj_with_mqa.bias: is a bias where the spec says there is none"):
        MLAAttention(mla_spec(), {**tensors, "kv_a_proj_with_mqa.bias": torch.zeros(11)})
    del tensors["kv_b_proj.weight"]
    with pytest.raises(LayerBuildError, match=r"kv_b_proj.weight: is missing; a tensor of shape \[44, 7\] is due"):
        MLAAttention(mla_spec(), tensors)


def test_inputs_that_do_not_fit_leave_the_cache_alone(mla_spec: Specs, mla_tensors: Tensors, draw: Draw) -> None:
    layer, cache = MLAAttention(mla_spec(), mla_tensors(mla_spec())), LatentCache()
    with pytest.raises(DraftError, match="a query sees no key at all"):
        layer(draw(3, 12), torch.arange(3), cache=cache, mask=torch.zeros(3, 3).bool())
    with pytest.raises(DraftError, match=r"reads 12 features; the input has 6"):
        layer(draw(3, 6), torch.arange(3), cache=cache)
    with pytest.raises(DraftError, match="positions have shape"):
        layer(draw(3, 12), torch.arange(2), cache=cache)
    assert len(cache) == 0
    layer(draw(2, 3, 12), torch.arange(3), cache=cache)
    with pytest.raises(DraftError, match="do not fit a cache"):
        layer(draw(1, 12), torch.tensor([3]), cache=cache)
