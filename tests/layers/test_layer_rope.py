"""Rotary embeddings.

What these catch: interleaved read as rotate-half; the trailing lanes rotated instead of the leading ones; cos and sin
swapped in the table; a table that grows without its scaling; YaRN's bounds, truncation and magnitude; the two readings
of a lone `mscale`; angles in single precision at large positions; a theta or a scaling field that is assumed instead of
demanded; positions that index from the end. The right values are worked out by hand or with `math`, lane by lane.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers import RotaryEmbedding, apply_rotary, inv_freq_and_scale, yarn_mscale
from pytest_specdecode.spec import RopeSpec

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0], "original_max_position_embeddings": 4096}

#: One usable rope of four lanes per type, with a table that can grow past its stated length.
EVERY_TYPE: dict[str, RopeSpec] = {
    kind: RopeSpec(theta=1e4, rope_type=kind, rotary_dim=4, scaling=scaling, max_position_embeddings=length)
    for kind, scaling, length in [
        ("default", {}, 300),
        ("mrope", {"mrope_section": [1, 1, 0]}, 300),
        ("linear", {"factor": 2.0}, 300),
        ("dynamic", {"factor": 2.0}, 300),
        ("yarn", {**YARN, "original_max_position_embeddings": 100}, 300),
        ("deepseek_yarn", {**YARN, "original_max_position_embeddings": 100, "mscale": 0.7}, 300),
        ("llama3", {**LLAMA3, "original_max_position_embeddings": 64}, 300),
        ("longrope", {**LONGROPE, "original_max_position_embeddings": 310}, 300),
        ("proportional", {"partial_rotary_factor": 0.5}, 300),
    ]
}


def rope(kind: str = "default", dim: int = 4, theta: float | None = 1e4, **fields: Any) -> RopeSpec:
    return RopeSpec(theta=theta, rope_type=kind, rotary_dim=dim, **fields)


def test_default_frequencies() -> None:
    inv_freq, scale = inv_freq_and_scale(rope())
    assert inv_freq.dtype == torch.float64
    assert (inv_freq.tolist(), scale) == ([1.0, 0.01], 1.0)


def test_text_positions_of_mrope_are_plain() -> None:
    inv_freq, scale = inv_freq_and_scale(rope("mrope", scaling={"mrope_section": [1, 1, 0]}))
    assert (inv_freq.tolist(), scale) == ([1.0, 0.01], 1.0)


def test_linear_divides_the_frequencies() -> None:
    inv_freq, scale = inv_freq_and_scale(rope("linear", scaling={"factor": 4}))
    assert (inv_freq.tolist(), scale) == ([0.25, 0.0025], 1.0)


def test_dynamic_stretches_the_base_with_the_length() -> None:
    # 2 * 128 / 64 - 1 = 3, to the power 8 / 6
    spec = rope("dynamic", 8, scaling={"factor": 2.0}, max_position_embeddings=64)
    due = [(1e4 * 3.0 ** (8 / 6)) ** (-2 * i / 8) for i in range(4)]
    assert inv_freq_and_scale(spec, 128)[0].tolist() == pytest.approx(due, rel=1e-14)
    plain = [1e4 ** (-2 * i / 8) for i in range(4)]
    for within in (None, 1, 64):
        assert inv_freq_and_scale(spec, within)[0].tolist() == pytest.approx(plain, rel=1e-14)


def test_dynamic_is_set_for_the_longest_length_served() -> None:
    spec = rope("dynamic", 8, scaling={"factor": 2.0}, max_position_embeddings=64)
    assert torch.equal(RotaryEmbedding(spec, 8).inv_freq, inv_freq_and_scale(spec, 128)[0])


def test_yarn_by_hand() -> None:
    # 128 * ln(32768 / (32 * 2 pi)) / (2 ln 1e6) = 23.60 and, for one turn, 39.65: lanes up to 23 keep their frequency,
    # lanes from 40 on are divided by 4, and between them the share of the division rises by 1/17 a lane.
    inv_freq, scale = inv_freq_and_scale(rope("yarn", 128, 1e6, scaling=YARN))
    plain = [1e6 ** (-2 * i / 128) for i in range(64)]
    share = [min(max((i - 23) / 17, 0.0), 1.0) for i in range(64)]
    due = [f * (1 - s) + f / 4 * s for f, s in zip(plain, share, strict=True)]
    assert inv_freq.tolist() == pytest.approx(due, rel=1e-13)
    assert inv_freq[23].item() == pytest.approx(plain[23], rel=1e-14)
    assert inv_freq[40].item() == pytest.approx(plain[40] / 4, rel=1e-14)
    assert scale == pytest.approx(1.138629436, rel=1e-9)


def test_yarn_without_truncation_keeps_the_broken_bounds() -> None:
    inv_freq, _ = inv_freq_and_scale(rope("yarn", 128, 1e6, scaling={**YARN, "truncate": False}))
    low, high = (128 * math.log(32768 / (turns * 2 * math.pi)) / (2 * math.log(1e6)) for turns in (32, 1))
    share = (24 - low) / (high - low)
    plain = 1e6 ** (-2 * 24 / 128)
    assert inv_freq[24].item() == pytest.approx(plain * (1 - share) + plain / 4 * share, rel=1e-13)
    assert inv_freq[24].item() != pytest.approx(inv_freq_and_scale(rope("yarn", 128, 1e6, scaling=YARN))[0][24].item())


def test_yarn_bounds_that_meet_on_a_lane_make_no_nan() -> None:
    # In 6 tokens no lane makes one turn (2 pi is more): both bounds become 0, and lane 0 alone keeps its frequency.
    scaling = {"factor": 4.0, "original_max_position_embeddings": 6}
    inv_freq, _ = inv_freq_and_scale(rope("yarn", 8, scaling=scaling))
    assert inv_freq.tolist() == pytest.approx([1.0, 0.025, 0.0025, 0.00025], rel=1e-13)


def test_deepseek_yarn_always_truncates() -> None:
    whole, broken = ({**YARN, "truncate": value} for value in (True, False))
    got = [inv_freq_and_scale(rope("deepseek_yarn", 128, 1e6, scaling=scaling))[0] for scaling in (whole, broken)]
    assert torch.equal(*got)


@pytest.mark.parametrize(
    ("fields", "yarn", "deepseek"),
    [
        ({}, 1.3688879454113936, 1.3688879454113936),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            1.3688879454113936 / 1.1844439727056968,
            1.3688879454113936 / 1.1844439727056968,
        ),
        # A lone mscale: transformers ignores it, DeepSeek's class does not.
        ({"mscale": 0.707}, 1.3688879454113936, 1.2608037774058553),
        ({"mscale_all_dim": 1.0}, 1.3688879454113936, 1.0),
        ({"attn_factor": 2.0}, 2.7377758908227872, 2.7377758908227872),
        ({"attention_factor": 0.5}, 0.5, 1.3688879454113936),
    ],
    ids=lambda value: ",".join(value) or "none" if isinstance(value, dict) else "",
)
def test_yarn_magnitude(fields: dict[str, float], yarn: float, deepseek: float) -> None:
    # 0.1 ln 40 + 1 = 1.36888794541
    scaling = {"factor": 40, "original_max_position_embeddings": 4096, **fields}
    got = [inv_freq_and_scale(rope(kind, 64, scaling=scaling))[1] for kind in ("yarn", "deepseek_yarn")]
    assert got == pytest.approx([yarn, deepseek], rel=1e-12)


def test_yarn_mscale_is_one_without_stretching() -> None:
    assert [yarn_mscale(factor, 2.0) for factor in (0.5, 1.0)] == [1.0, 1.0]
    assert yarn_mscale(math.e, 2.0) == pytest.approx(1.2)


def test_llama3_by_hand() -> None:
    # In 8192 tokens a lane turns 8192 f / 2 pi times: above 4 kept, below 1 divided by 8, between blended.
    inv_freq, scale = inv_freq_and_scale(rope("llama3", 128, 5e5, scaling=LLAMA3))
    due = []
    for i in range(64):
        f = 5e5 ** (-2 * i / 128)
        turns = 8192 * f / (2 * math.pi)
        kept = min(max((turns - 1) / 3, 0.0), 1.0)
        due.append(f * kept + f / 8 * (1 - kept))
    assert inv_freq.tolist() == pytest.approx(due, rel=1e-13)
    assert scale == 1.0
    assert sum(5e5 ** (-2 * i / 128) / 8 < value < 5e5 ** (-2 * i / 128) for i, value in enumerate(due)) >= 5


def test_longrope_by_hand() -> None:
    # ln 32 / ln 4096 = 5 / 12
    spec = rope("longrope", scaling=LONGROPE, max_position_embeddings=131072)
    for length, factors in [(None, (1.0, 1.5)), (4096, (1.0, 1.5)), (4097, (2.0, 8.0))]:
        inv_freq, scale = inv_freq_and_scale(spec, length)
        assert inv_freq.tolist() == pytest.approx([1.0 / factors[0], 0.01 / factors[1]], rel=1e-14)
        assert scale == pytest.approx(math.sqrt(1 + 5 / 12), rel=1e-14)


@pytest.mark.parametrize(
    ("fields", "due"),
    [({"factor": 64.0}, math.sqrt(1.5)), ({"factor": 0.5}, 1.0), ({"attention_factor": 1.25}, 1.25)],
    ids=["factor", "shrunk", "attention_factor"],
)
def test_longrope_magnitude(fields: dict[str, float], due: float) -> None:
    spec = rope("longrope", scaling={**LONGROPE, **fields}, max_position_embeddings=131072)
    assert inv_freq_and_scale(spec)[1] == pytest.approx(due, rel=1e-14)


def test_longrope_is_set_for_the_longest_length_served() -> None:
    spec = rope("longrope", scaling=LONGROPE, max_position_embeddings=131072)
    assert RotaryEmbedding(spec, 4).inv_freq.tolist() == pytest.approx([0.5, 0.00125])
    assert RotaryEmbedding(spec, 4, seq_len=4096).inv_freq.tolist() == pytest.approx([1.0, 0.01 / 1.5])


@pytest.mark.parametrize(
    ("rotary_dim", "scaling"),
    [(16, {"partial_rotary_factor": 0.5}), (None, {"partial_rotary_factor": 0.5}), (8, {})],
    ids=["whole-head", "unstated", "only-rotary-dim"],
)
def test_proportional_idles_the_last_pairs_of_the_whole_head(rotary_dim: int | None, scaling: dict[str, float]) -> None:
    spec = RopeSpec(theta=1e4, rope_type="proportional", rotary_dim=rotary_dim, scaling=scaling)
    emb = RotaryEmbedding(spec, 16)
    due = [1.0, 1e4 ** (-2 / 16), 1e4 ** (-4 / 16), 1e4 ** (-6 / 16), 0.0, 0.0, 0.0, 0.0]
    assert emb.inv_freq.tolist() == pytest.approx(due, rel=1e-14)
    assert emb.rotary_dim == 16


def test_proportional_factor() -> None:
    inv_freq, _ = inv_freq_and_scale(rope("proportional", scaling={"factor": 8.0}))
    assert inv_freq.tolist() == pytest.approx([0.125, 0.00125])


def test_rotation_by_hand_in_both_styles() -> None:
    cos, sin = RotaryEmbedding(rope(), 6).cos_sin(torch.tensor([1]))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]], dtype=torch.float64)
    c0, s0, c1, s1 = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    neox = apply_rotary(x, cos, sin, True).flatten().tolist()
    assert neox == pytest.approx([c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + s0, 4 * c1 + 2 * s1, 5, 6], rel=1e-14)
    pairs = apply_rotary(x, cos, sin, False).flatten().tolist()
    assert pairs == pytest.approx([c0 - 2 * s0, 2 * c0 + s0, 3 * c1 - 4 * s1, 4 * c1 + 3 * s1, 5, 6], rel=1e-14)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_scores_depend_on_the_distance_only(neox: bool) -> None:
    emb = RotaryEmbedding(rope(dim=8, is_neox_style=neox), 8)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    near = [
        (emb.rotate(q, torch.tensor([a])) * emb.rotate(k, torch.tensor([b]))).sum() for a, b in [(7, 3), (104, 100)]
    ]
    torch.testing.assert_close(*near, rtol=1e-12, atol=1e-12)


def test_rotation_keeps_a_batch_and_its_dtype() -> None:
    emb = RotaryEmbedding(rope(), 4)
    x = torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    positions = torch.arange(15).view(3, 5)
    got = emb.rotate(x, positions)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[1], emb.rotate(x[1], positions[1]))
    query, key = emb(positions, x, x[..., :1, :])
    assert torch.equal(query, got)
    assert torch.equal(key, got[..., :1, :])


def test_the_table_holds_cosines_then_sines() -> None:
    emb = RotaryEmbedding(rope(max_position_embeddings=40960), 4)
    table = emb.cos_sin_cache
    assert (table.dtype, table.shape[1]) == (torch.float32, 4)
    assert table.shape[0] <= 256  # small at first: the stated length would cost 40,960 rows
    assert table[3].tolist() == pytest.approx([math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)], rel=1e-7)


def test_a_short_draft_gets_no_rows_beyond_its_length() -> None:
    assert RotaryEmbedding(rope(max_position_embeddings=32), 4).cos_sin_cache.shape[0] == 32


def test_large_positions_keep_their_angle() -> None:
    # The float32 product 123457 * theta is off by up to 4e-3 rad; the frequency 1 makes the right value plain.
    emb = RotaryEmbedding(rope(max_position_embeddings=200_000), 4)
    cos, sin = emb.cos_sin(torch.tensor([123_457]), torch.float32)
    assert cos[0].tolist() == pytest.approx([math.cos(123_457), math.cos(1234.57)], abs=1e-7)
    assert sin[0].tolist() == pytest.approx([math.sin(123_457), math.sin(1234.57)], abs=1e-7)


def test_positions_beyond_what_float32_counts() -> None:
    cos, _ = RotaryEmbedding(rope(), 4).cos_sin(torch.tensor([2**24, 2**24 + 1]))
    assert cos[:, 0].tolist() == pytest.approx([math.cos(2**24), math.cos(2**24 + 1)], rel=1e-12)


@pytest.mark.parametrize("kind", sorted(EVERY_TYPE))
def test_a_grown_table_equals_one_built_larger(kind: str) -> None:
    grown = RotaryEmbedding(EVERY_TYPE[kind], 4)
    first = grown.cos_sin_cache.shape[0]
    for last in (first, 1500, 1200):
        grown._ensure_cos_sin_cache_length(last)
    larger = RotaryEmbedding(EVERY_TYPE[kind], 4, seq_len=1501)
    larger._ensure_cos_sin_cache_length(1500)
    assert grown.cos_sin_cache.shape[0] > 1500 >= first
    assert torch.equal(grown.cos_sin_cache[:1501], larger.cos_sin_cache[:1501])
    cos, sin = grown.cos_sin(torch.arange(1501), torch.float32)
    assert torch.equal(grown.cos_sin_cache[:1501], torch.cat([cos, sin], dim=-1))


@pytest.mark.parametrize("kind", ["linear", "yarn", "deepseek_yarn", "llama3"])
def test_appended_rows_are_scaled_and_old_rows_stay(kind: str) -> None:
    emb = RotaryEmbedding(EVERY_TYPE[kind], 4)
    before = emb.cos_sin_cache.clone()
    emb._ensure_cos_sin_cache_length(2000)
    assert torch.equal(emb.cos_sin_cache[: len(before)], before)
    inv_freq, scale = inv_freq_and_scale(EVERY_TYPE[kind])
    due = [scale * f(2000 * w) for f in (math.cos, math.sin) for w in inv_freq.tolist()]
    assert emb.cos_sin_cache[2000].tolist() == pytest.approx(due, abs=1e-6)
    plain = RotaryEmbedding(EVERY_TYPE["default"], 4)
    plain._ensure_cos_sin_cache_length(2000)
    assert not torch.allclose(emb.cos_sin_cache[2000], plain.cos_sin_cache[2000], atol=1e-3)


def test_asking_for_rows_that_are_there_does_nothing() -> None:
    emb = RotaryEmbedding(rope(max_position_embeddings=300), 4)
    table = emb.cos_sin_cache
    emb._ensure_cos_sin_cache_length(255)
    assert emb.cos_sin_cache is table


def test_a_module_that_changes_dtype_keeps_its_float32_table() -> None:
    emb = RotaryEmbedding(rope(max_position_embeddings=64), 4)
    before = emb.cos_sin_cache.clone()
    assert torch.equal(emb.double().bfloat16().cos_sin_cache, before)
    assert torch.equal(copy.deepcopy(emb).cos_sin_cache, before)


def test_attributes_are_the_engines() -> None:
    emb = RotaryEmbedding(rope("yarn", scaling=YARN, is_neox_style=False, max_position_embeddings=40960), 6)
    assert (emb.rotary_dim, emb.head_size, emb.is_neox_style, emb.base) == (4, 6, False, 1e4)
    assert emb.rope_scaling == {**YARN, "rope_type": "yarn"}
    assert emb.max_position_embeddings == 40960
    assert RotaryEmbedding(rope(), 4).rope_scaling is None
    assert "4 of 6" in repr(emb)


@pytest.mark.parametrize(
    ("kind", "length", "scaling", "due"),
    [
        ("default", 512, {}, 512),
        ("default", None, {}, None),
        ("linear", 512, {"factor": 4}, 2048),
        ("dynamic", 512, {"factor": 2.5}, 1280),
        ("yarn", 40960, YARN, 131072),
        ("yarn", 262144, YARN, 262144),
        ("yarn", None, YARN, 131072),
        ("llama3", 131072, LLAMA3, 131072),
        ("longrope", 8192, LONGROPE, 8192),
    ],
)
def test_how_far_positions_reach(kind: str, length: int | None, scaling: dict[str, Any], due: int | None) -> None:
    emb = RotaryEmbedding(rope(kind, scaling=scaling, max_position_embeddings=length), 4)
    assert emb.max_length == due


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (torch.tensor([0, -1]), "position -1 is negative"),
        (torch.tensor([0, 512]), "position 512 lies beyond the last one served, 511"),
        (torch.tensor([0.0]), "positions are torch.float32; integers are due"),
        (torch.tensor([True]), "positions are torch.bool; integers are due"),
    ],
)
def test_positions_that_cannot_be_served(positions: torch.Tensor, text: str) -> None:
    emb = RotaryEmbedding(rope(max_position_embeddings=512), 4)
    with pytest.raises(DraftError, match=text) as caught:
        emb.cos_sin(positions)
    assert caught.value.key == "positions"


def test_the_bound_moves_when_the_table_is_asked_to_grow() -> None:
    emb = RotaryEmbedding(rope(max_position_embeddings=512), 4)
    emb.cos_sin(torch.tensor([511]))
    emb._ensure_cos_sin_cache_length(600)
    emb.cos_sin(torch.tensor([600]))
    with pytest.raises(DraftError, match="position 601"):
        emb.cos_sin(torch.tensor([601]))


def test_no_positions_are_fine_and_no_length_is_no_bound() -> None:
    emb = RotaryEmbedding(rope(), 4)
    assert emb.cos_sin(torch.empty(0, dtype=torch.int64))[0].shape == (0, 2)
    assert emb.cos_sin(torch.tensor([10**9]))[0].shape == (1, 2)


@pytest.mark.parametrize(
    ("spec", "key", "text"),
    [
        (rope(theta=None), "rope_theta", "is not stated"),
        (rope(theta=0.0), "rope_theta", "a positive base is due"),
        (rope(theta=float("inf")), "rope_theta", "a positive base is due"),
        (rope("su"), "rope_type", "unknown RoPE type 'su'"),
        (rope("linear"), "rope_scaling.factor", "is missing; linear RoPE needs it"),
        (rope("linear", scaling={"factor": 0}), "rope_scaling.factor", "must be positive"),
        (rope("linear", scaling={"factor": "8"}), "rope_scaling.factor", "is '8'; a number is due"),
        (rope("linear", scaling={"factor": True}), "rope_scaling.factor", "is True; a number is due"),
        (rope("dynamic", scaling={"factor": 2}), "max_position_embeddings", "dynamic RoPE needs it"),
        (rope("dynamic", 2, scaling={"factor": 2}, max_position_embeddings=64), "rotary_dim", "more than 2"),
        (rope("yarn", scaling={"factor": 2}), "rope_scaling.original_max_position_embeddings", "is missing"),
        (rope("yarn", scaling={**YARN, "factor": None}), "rope_scaling.factor", "is missing"),
        (rope("yarn", theta=1.0, scaling=YARN), "rope_theta", "not defined for a base of 1"),
        (rope("yarn", scaling={**YARN, "mscale": float("nan")}), "rope_scaling.mscale", "a number is due"),
        (rope("deepseek_yarn"), "rope_scaling.original_max_position_embeddings", "is missing; deepseek_yarn RoPE"),
        (rope("llama3", scaling={**LLAMA3, "low_freq_factor": None}), "rope_scaling.low_freq_factor", "is missing"),
        (rope("llama3", scaling={**LLAMA3, "low_freq_factor": 4.0}), "low_freq_factor", "must be below"),
        (rope("longrope", scaling={**LONGROPE, "long_factor": None}), "rope_scaling.long_factor", "a list of 2"),
        (rope("longrope", scaling={**LONGROPE, "short_factor": [1.0]}), "rope_scaling.short_factor", "got 1"),
        (rope("longrope", scaling={**LONGROPE, "short_factor": [1.0, 0]}), "rope_scaling.short_factor", "not positive"),
        (rope("longrope", scaling=LONGROPE), "max_position_embeddings", "longrope RoPE needs it"),
        (rope("proportional", scaling={"partial_rotary_factor": 2}), "partial_rotary_factor", "a proportion is due"),
        (rope(dim=3), "rotary_dim", "is 3; due is an even number"),
        (rope(dim=0), "rotary_dim", "is 0; due is an even number"),
        (rope(dim=6), "rotary_dim", "at most head_dim=4"),
    ],
)
def test_what_cannot_be_built(spec: RopeSpec, key: str, text: str) -> None:
    with pytest.raises(LayerBuildError) as caught:
        RotaryEmbedding(spec, 4)
    assert text in caught.value.message
    assert caught.value.key == key


def test_a_width_is_needed() -> None:
    with pytest.raises(LayerBuildError, match="neither is the head's width"):
        inv_freq_and_scale(RopeSpec(theta=1e4))
    assert inv_freq_and_scale(RopeSpec(theta=1e4), head_dim=4)[0].tolist() == [1.0, 0.01]


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (1, 2)], ids=["rows", "width", "broadcast"])
def test_angles_that_do_not_fit(shape: tuple[int, int]) -> None:
    with pytest.raises(DraftError, match="do not fit"):
        apply_rotary(torch.ones(2, 1, 6), torch.ones(shape), torch.ones(shape), True)
