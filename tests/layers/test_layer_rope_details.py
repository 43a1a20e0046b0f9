"""Rotary embeddings down to their bounds: how far a table grows, and what is just allowed and just not.

Failure modes this file exists to catch: a table that grows past the length that is served, or by far more than was asked for; frequencies
of a length that is not known; a limit off by one; an error that carries another number than the one that is wrong.
"""

from __future__ import annotations

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


def rope(kind: str = "default", dim: int | None = 4, theta: float | None = 1e4, **fields: Any) -> RopeSpec:
    return RopeSpec(theta=theta, rope_type=kind, rotary_dim=dim, **fields)


def test_a_table_starts_small_and_ends_where_the_length_does() -> None:
    assert RotaryEmbedding(rope(), 4).cos_sin_cache.shape == (256, 4)
    assert RotaryEmbedding(rope(max_position_embeddings=100), 4).cos_sin_cache.shape == (100, 4)


@pytest.mark.parametrize(("length", "rows"), [(None, 512), (300, 300), (1000, 512)])
def test_a_table_grows_by_whole_steps_up_to_the_length(length: int | None, rows: int) -> None:
    embedding = RotaryEmbedding(rope(max_position_embeddings=length), 4)
    embedding._ensure_cos_sin_cache_length(299)
    assert embedding.cos_sin_cache.shape == (rows, 4)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    due = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    torch.testing.assert_close(embedding.cos_sin_cache, due)


def test_a_table_without_a_length_has_no_bound() -> None:
    embedding = RotaryEmbedding(rope(), 4)
    embedding._ensure_cos_sin_cache_length(10)
    assert embedding.max_length is None
    assert embedding.cos_sin_cache.shape == (256, 4)


def test_the_factor_on_cosines_and_sines() -> None:
    assert RotaryEmbedding(rope(), 4).attention_scaling == 1.0
    assert RotaryEmbedding(rope("yarn", scaling=YARN), 4).attention_scaling == 0.1 * math.log(4.0) + 1.0


def test_what_prints_an_embedding() -> None:
    assert repr(RotaryEmbedding(rope(), 6)) == "RotaryEmbedding(4 of 6, base=10000.0, type=default, neox=True)"
    yarn = RotaryEmbedding(rope("yarn", is_neox_style=False, scaling=YARN), 4)
    assert repr(yarn) == "RotaryEmbedding(4 of 4, base=10000.0, type=yarn, neox=False)"


@pytest.mark.parametrize(
    ("cos", "sin"),
    [((2, 2), (2, 1)), ((2, 1), (2, 2)), ((3, 2), (3, 2)), ((2, 4), (2, 4))],
    ids=["sines", "cosines", "rows", "width"],
)
def test_angles_that_do_not_fit_say_all_shapes(cos: tuple[int, int], sin: tuple[int, int]) -> None:
    with pytest.raises(DraftError) as caught:
        apply_rotary(torch.ones(2, 1, 6), torch.ones(cos), torch.ones(sin), True)
    assert caught.value.got == (cos, sin, (2, 1, 6))


@pytest.mark.parametrize("neox", [True, False])
def test_a_head_that_turns_whole(neox: bool) -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    quarter = torch.tensor([[0.0, 0.0]], dtype=torch.float64), torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    due = [-3.0, -4.0, 1.0, 2.0] if neox else [-2.0, 1.0, -4.0, 3.0]
    assert apply_rotary(x, *quarter, neox).flatten().tolist() == due


# What is wrong, and the number that is.
@pytest.mark.parametrize(
    ("spec", "key", "got", "due"),
    [
        (rope(theta=None), "rope_theta", None, "a base"),
        (rope(theta=0.0), "rope_theta", 0.0, "a positive number"),
        (rope(theta=True), "rope_theta", True, "a positive number"),
        (rope(theta=math.inf), "rope_theta", math.inf, "a positive number"),
        (rope("linear"), "rope_scaling.factor", None, "a positive number"),
        (rope("linear", scaling={"factor": 0}), "rope_scaling.factor", 0, "a positive number"),
        (rope("linear", scaling={"factor": -1}), "rope_scaling.factor", -1, "a positive number"),
        (rope("linear", scaling={"factor": "8"}), "rope_scaling.factor", "8", "a number"),
        (rope("dynamic", scaling={"factor": 2}), "max_position_embeddings", None, "a length"),
        (rope("dynamic", scaling={"factor": 2}, max_position_embeddings=0), "max_position_embeddings", 0, "a length"),
        (rope("dynamic", 2, scaling={"factor": 2}, max_position_embeddings=64), "rotary_dim", 2, None),
        (rope("yarn", theta=1.0, scaling=YARN), "rope_theta", 1.0, None),
        (rope("yarn", scaling={**YARN, "beta_fast": 1e7}), "rope_scaling.beta_fast", 1e7, "1e-6 to 1e6"),
        (rope("yarn", scaling={**YARN, "beta_slow": 1e-7}), "rope_scaling.beta_slow", 1e-7, "1e-6 to 1e6"),
        (rope("yarn", scaling={**YARN, "beta_slow": 7e-7}), "rope_scaling.beta_slow", 7e-7, "1e-6 to 1e6"),
        (rope("yarn", scaling={**YARN, "beta_fast": 1e6 + 0.5}), "rope_scaling.beta_fast", 1e6 + 0.5, "1e-6 to 1e6"),
        (rope("llama3", scaling={**LLAMA3, "low_freq_factor": 4.0}), "low_freq_factor", 4.0, "< 4.0"),
        (rope("longrope", scaling={**LONGROPE, "short_factor": [1.0]}), "rope_scaling.short_factor", 1, 2),
        (rope("longrope", scaling={**LONGROPE, "long_factor": 3}), "rope_scaling.long_factor", 3, 2),
        (rope("longrope", scaling={**LONGROPE, "long_factor": [2, 0]}), "rope_scaling.long_factor", 0.0, None),
        (
            rope("proportional", scaling={"partial_rotary_factor": 1.5}), "partial_rotary_factor", 1.5, "0 to 1",
        ),
        (rope("proportional", scaling={"partial_rotary_factor": -0.5}), "partial_rotary_factor", -0.5, "0 to 1"),
        (rope(dim=3), "rotary_dim", 3, "an even number above 0, at most head_dim=4"),
        (rope(dim=0), "rotary_dim", 0, "an even number above 0, at most head_dim=4"),
        (rope(dim=6), "rotary_dim", 6, "an even number above 0, at most head_dim=4"),
    ],
)  # fmt: skip
def test_an_error_carries_the_number_that_is_wrong(spec: RopeSpec, key: str, got: Any, due: Any) -> None:
    with pytest.raises(LayerBuildError) as caught:
        RotaryEmbedding(spec, 4)
    assert (caught.value.key, caught.value.got, caught.value.due) == (key, got, due)


def test_an_unknown_type_and_a_width_that_nobody_states() -> None:
    known = (
        "deepseek_yarn", "default", "dynamic", "linear", "llama3", "longrope", "mrope", "proportional", "yarn",
    )  # fmt: skip
    with pytest.raises(LayerBuildError) as caught:
        inv_freq_and_scale(rope("su"))
    assert (caught.value.key, caught.value.got, caught.value.due) == ("rope_type", "su", known)
    with pytest.raises(LayerBuildError) as caught:
        inv_freq_and_scale(rope(dim=None))
    assert (caught.value.key, caught.value.due) == ("rotary_dim", "an even number")
    with pytest.raises(LayerBuildError) as caught:
        inv_freq_and_scale(rope(dim=3))
    assert caught.value.due == "an even number above 0"


@pytest.mark.parametrize(
    ("positions", "got", "due"),
    [
        (torch.tensor([1.0]), "torch.float32", "int64"),
        (torch.tensor([True]), "torch.bool", "int64"),
        (torch.tensor([1j]), "torch.complex64", "int64"),
        (torch.tensor([3, -1]), -1, ">= 0"),
        (torch.tensor([3, 100]), 100, "< 100"),
    ],
)
def test_positions_that_are_refused(positions: torch.Tensor, got: Any, due: str) -> None:
    embedding = RotaryEmbedding(rope(max_position_embeddings=100), 4)
    with pytest.raises(DraftError) as caught:
        embedding.cos_sin(positions)
    assert (caught.value.key, caught.value.got, caught.value.due) == ("positions", got, due)
    if got == 100:
        assert "the last one served, 99" in str(caught.value)
    embedding.cos_sin(torch.tensor([0, 99]))


# What is just allowed.
def test_limits_that_are_still_served() -> None:
    RotaryEmbedding(rope(dim=4), 4)
    RotaryEmbedding(rope(theta=1e-3), 4)
    RotaryEmbedding(rope("linear", scaling={"factor": 1e-3}), 4)
    RotaryEmbedding(rope("dynamic", scaling={"factor": 2}, max_position_embeddings=1), 4)
    RotaryEmbedding(rope("yarn", scaling={**YARN, "beta_fast": 1e6, "beta_slow": 1e-6}), 4)
    for proportion, turning in ((0, 0), (1, 2)):
        spec = rope("proportional", scaling={"partial_rotary_factor": proportion})
        assert int((RotaryEmbedding(spec, 4).inv_freq > 0).sum()) == turning


@pytest.mark.parametrize(
    ("kind", "scaling", "length", "due"),
    [
        ("linear", {"factor": 2.5}, 101, 252),
        ("linear", {"factor": 0.5}, 101, 101),
        ("linear", {"factor": 2.5}, None, None),
        ("dynamic", {"factor": 3}, 50, 150),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 100}, None, 400),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 100}, 500, 500),
        ("deepseek_yarn", {"factor": 4.0, "original_max_position_embeddings": 100}, 300, 400),
        ("llama3", {**LLAMA3, "original_max_position_embeddings": 10}, 20, 80),
        ("longrope", {**LONGROPE, "factor": 4.0}, 77, 77),
        ("default", {}, 77, 77),
    ],
)
def test_how_far_positions_reach(kind: str, scaling: dict[str, Any], length: int | None, due: int | None) -> None:
    embedding = RotaryEmbedding(rope(kind, scaling=scaling, max_position_embeddings=length), 4)
    assert embedding.max_length == due
    assert embedding.max_position_embeddings == length


def test_a_length_that_is_given_is_the_one_that_counts() -> None:
    spec = rope("longrope", scaling=LONGROPE, max_position_embeddings=8192)
    for seq_len, factors in (
        (4096, LONGROPE["short_factor"]),
        (4097, LONGROPE["long_factor"]),
        (None, LONGROPE["long_factor"]),
    ):
        due = [1.0 / factors[0], 0.01 / factors[1]]
        assert RotaryEmbedding(spec, 4, seq_len=seq_len).inv_freq.tolist() == pytest.approx(due, rel=1e-14)
    assert inv_freq_and_scale(spec)[0].tolist() == pytest.approx([1.0, 0.01 / 1.5], rel=1e-14)


@pytest.mark.parametrize(("factor", "due"), [(0.75, 1.0), (1.0, 1.0), (1.5, 0.1 * math.log(1.5) + 1.0)])
def test_the_magnitude_grows_from_a_factor_of_one_on(factor: float, due: float) -> None:
    assert yarn_mscale(factor) == due


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("default", {}),
        ("mrope", {}),
        ("linear", {"factor": 2.0}),
        ("dynamic", {"factor": 2.0}),
        ("llama3", LLAMA3),
        ("longrope", {**LONGROPE, "factor": 1.0}),
        ("proportional", {}),
    ],
)
def test_most_types_leave_the_magnitude_alone(kind: str, scaling: dict[str, Any]) -> None:
    assert RotaryEmbedding(rope(kind, scaling=scaling, max_position_embeddings=100), 4).attention_scaling == 1.0


def yarn_by_hand(dim: int, original: float, factor: float, fast: float, slow: float, *, truncate: bool) -> list[float]:
    """YaRN, arXiv 2309.00071, lane by lane."""
    low, high = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    found = []
    for pair in range(dim // 2):
        plain = 1e4 ** (-2 * pair / dim)
        ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
        found.append(plain / factor * ramp + plain * (1 - ramp))
    return found


@pytest.mark.parametrize(
    ("kind", "stated", "truncate"),
    [("yarn", {}, True), ("yarn", {"truncate": True}, True), ("yarn", {"truncate": False}, False),
     ("deepseek_yarn", {}, True), ("deepseek_yarn", {"truncate": False}, True)],
)  # fmt: skip
@pytest.mark.parametrize("turns", [{}, {"beta_fast": 20, "beta_slow": 2}])
def test_yarn_lane_by_lane(kind: str, stated: dict[str, Any], truncate: bool, turns: dict[str, float]) -> None:
    scaling = {"factor": 5.0, "original_max_position_embeddings": 700, **stated, **turns}
    got = RotaryEmbedding(rope(kind, 24, scaling=scaling), 24).inv_freq
    fast, slow = turns.get("beta_fast", 32.0), turns.get("beta_slow", 1.0)
    due = yarn_by_hand(24, 700, 5.0, fast, slow, truncate=truncate)
    assert got.tolist() == pytest.approx(due, rel=1e-13)


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_yarn_keeps_less_where_its_factor_says_so(kept: float) -> None:
    scaling = {"factor": 5.0, "original_max_position_embeddings": 700}
    whole = yarn_by_hand(24, 700, 5.0, 32, 1, truncate=True)
    plain = [1e4 ** (-2 * pair / 24) for pair in range(12)]
    # Between division by the factor (nothing kept) and YaRN (all kept).
    due = [p / 5.0 * (1 - kept) + w * kept for p, w in zip(plain, whole, strict=True)]
    got = RotaryEmbedding(rope("yarn", 24, scaling={**scaling, "extrapolation_factor": kept}), 24).inv_freq
    assert got.tolist() == pytest.approx(due, rel=1e-13)


def test_llama3_pair_by_pair() -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": 600}
    got = RotaryEmbedding(rope("llama3", 24, scaling=scaling), 24).inv_freq.tolist()
    for pair, value in enumerate(got):
        plain = 1e4 ** (-2 * pair / 24)
        turns = 600 * plain / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - 1.0) / 3.0))
        assert value == pytest.approx(plain * smooth + plain / 8.0 * (1 - smooth), rel=1e-13)


@pytest.mark.parametrize(("seq_len", "length"), [(None, 100), (50, 100), (100, 100), (250, 250)])
def test_dynamic_pair_by_pair(seq_len: int | None, length: int) -> None:
    spec = rope("dynamic", 6, scaling={"factor": 3.0}, max_position_embeddings=100)
    got = inv_freq_and_scale(spec, seq_len)[0].tolist()
    base = 1e4 * (3.0 * length / 100 - 2.0) ** (6 / 4)
    assert got == pytest.approx([1.0, base ** (-1 / 3), base ** (-2 / 3)], rel=1e-13)


@pytest.mark.parametrize(
    ("fields", "due"),
    [
        ({}, 1.0 + math.log(2.0) / math.log(4096)),
        ({"factor": 8.0}, 1.0 + math.log(8.0) / math.log(4096)),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.75}, 1.0),
        ({"factor": 1.5}, 1.0 + math.log(1.5) / math.log(4096)),
        ({"attention_factor": 3.0}, 9.0),
    ],
)
def test_longropes_magnitude(fields: dict[str, float], due: float) -> None:
    spec = rope("longrope", scaling={**LONGROPE, **fields}, max_position_embeddings=8192)
    assert RotaryEmbedding(spec, 4).attention_scaling == pytest.approx(math.sqrt(due), rel=1e-14)


@pytest.mark.parametrize(
    ("stated", "proportion", "turning"), [(None, None, 6), (6, None, 3), (6, 0.5, 3), (None, 0.4, 2)]
)
def test_proportional_turns_whole_pairs(stated: int | None, proportion: float | None, turning: int) -> None:
    scaling = {} if proportion is None else {"partial_rotary_factor": proportion}
    got = RotaryEmbedding(rope("proportional", stated, scaling={**scaling, "factor": 4.0}), 12).inv_freq.tolist()
    due = [1e4 ** (-2 * pair / 12) / 4.0 if pair < turning else 0.0 for pair in range(6)]
    assert got == pytest.approx(due, rel=1e-13)


def test_yarns_ramp_ends_with_the_lanes() -> None:
    scaling = {"factor": 5.0, "original_max_position_embeddings": 1e9, "beta_fast": 1e6}
    due = yarn_by_hand(24, 1e9, 5.0, 1e6, 1, truncate=True)
    got = RotaryEmbedding(rope("yarn", 24, scaling=scaling), 24).inv_freq
    assert got.tolist() == pytest.approx(due, rel=1e-13)
    assert due[11] != due[10] / 1e4 ** (1 / 12)
