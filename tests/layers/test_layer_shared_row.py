"""DeepSeek-V4's window attention against a calculation in NumPy, head by head and key by key.

What these catch: leading lanes rotated in the place of the last; pairs of the other style; a norm over part of the row; queries that are
not normed by head; a value that is not turned back, or turned at the key's position; a sink that is scaled, masked or weighs a value;
output groups that take every other head; a cache that does not continue what it began. The same against transformers is in
`tests/peers/test_peer_deepseek_v4.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers import LatentCache, SharedRowAttention
from pytest_specdecode.spec import GQASpec, RopeSpec

Array = NDArray[np.float64]
HEADS, DIM, TURNING, HIDDEN, RANK, OUT, GROUPS, TOKENS = 4, 6, 4, 8, 5, 3, 2, 7
SPEC = GQASpec(
    num_heads=HEADS,
    num_kv_heads=1,
    head_dim=DIM,
    in_features=HIDDEN,
    out_features=HIDDEN,
    rope=RopeSpec(theta=100.0, rotary_dim=TURNING, is_neox_style=False),
    k_eq_v=True,
)
RANKS: dict[str, Any] = {"q_lora_rank": RANK, "o_lora_rank": OUT, "o_groups": GROUPS, "norm_eps": 1e-3}
SHAPES = {
    "wq_a.weight": (RANK, HIDDEN),
    "q_norm.weight": (RANK,),
    "wq_b.weight": (HEADS * DIM, RANK),
    "wkv.weight": (DIM, HIDDEN),
    "kv_norm.weight": (DIM,),
    "wo_a.weight": (GROUPS * OUT, HEADS * DIM // GROUPS),
    "wo_b.weight": (HIDDEN, GROUPS * OUT),
    "attn_sink": (HEADS,),
}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def layer(**changes: Any) -> SharedRowAttention:
    return SharedRowAttention(replace(SPEC, **changes), tensors(), **RANKS)


def states(seed: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms(x: Array) -> Array:
    normed: Array = x / math.sqrt(float((x * x).mean()) + 1e-3)
    return normed


def turned(lanes: Array, position: float) -> Array:
    """The last TURNING lanes in pairs of neighbours; a negative position turns back."""
    out = lanes.copy()
    for pair in range(TURNING // 2):
        angle = position * 100.0 ** (-2 * pair / TURNING)
        at = DIM - TURNING + 2 * pair
        out[at] = lanes[at] * math.cos(angle) - lanes[at + 1] * math.sin(angle)
        out[at + 1] = lanes[at + 1] * math.cos(angle) + lanes[at] * math.sin(angle)
    return out


def written_out(x: Array, positions: list[int], visible: list[list[int]]) -> Array:
    held = {name: value.numpy() for name, value in tensors().items()}
    rows = [
        turned(rms(held["wkv.weight"] @ row) * held["kv_norm.weight"], at) for row, at in zip(x, positions, strict=True)
    ]
    out = []
    for query, at, keys in zip(x, positions, visible, strict=True):
        latent = rms(held["wq_a.weight"] @ query) * held["q_norm.weight"]
        heads = []
        for head in range(HEADS):
            q = turned(rms(held["wq_b.weight"][head * DIM : (head + 1) * DIM] @ latent), at)
            weights = [math.exp(float(q @ rows[key]) / math.sqrt(DIM)) for key in keys]
            total = sum(weights) + math.exp(float(held["attn_sink"][head]))
            value = sum((weight / total * rows[key] for weight, key in zip(weights, keys, strict=True)), np.zeros(DIM))
            heads.append(turned(value, -at))
        groups = [
            held["wo_a.weight"][group * OUT : (group + 1) * OUT] @ np.concatenate(heads[2 * group : 2 * group + 2])
            for group in range(GROUPS)
        ]
        out.append(held["wo_b.weight"] @ np.concatenate(groups))
    return np.stack(out)


def test_the_whole_attention_written_out() -> None:
    x, positions = states(1), [5, 6, 7, 8, 9, 10, 11]
    due = written_out(x.numpy(), positions, [list(range(row + 1)) for row in range(TOKENS)])
    found = layer()(x, torch.tensor(positions)).numpy()
    np.testing.assert_allclose(found, due, rtol=1e-10, atol=1e-10)


def test_a_window_counts_the_query_itself() -> None:
    x, positions = states(2), list(range(TOKENS))
    due = written_out(x.numpy(), positions, [list(range(max(0, row - 2), row + 1)) for row in range(TOKENS)])
    found = layer(sliding_window=3)(x, torch.tensor(positions)).numpy()
    np.testing.assert_allclose(found, due, rtol=1e-10, atol=1e-10)


def test_a_context_gives_rows_and_asks_nothing() -> None:
    x, positions = states(3), list(range(20, 20 + TOKENS))
    due = written_out(x.numpy(), positions, [list(range(TOKENS))] * TOKENS)[4:]
    places = torch.tensor(positions)
    found = layer()(x[4:], places[4:], context=(x[:4], places[:4]), causal=False).numpy()
    np.testing.assert_allclose(found, due, rtol=1e-10, atol=1e-10)


def test_a_cache_continues_what_it_began() -> None:
    attention, cache, x, positions = layer(sliding_window=3), LatentCache(), states(4), torch.arange(TOKENS)
    pieces = [attention(x[at], positions[at], cache=cache) for at in (slice(0, 3), slice(3, 4), slice(4, 7))]
    torch.testing.assert_close(torch.cat(pieces), attention(x, positions))
    torch.testing.assert_close(cache.rows, attention.row(x, positions))
    attention(x, positions + TOKENS, cache=cache, update_cache=False)
    assert len(cache) == TOKENS


def test_a_row_keeps_its_norm_when_it_turns_and_scores_know_distances_only() -> None:
    attention, x = layer(), states(5)
    near, far = attention.row(x, torch.arange(TOKENS)), attention.row(x, torch.arange(TOKENS) + 1000)
    torch.testing.assert_close(near.square().sum(-1), far.square().sum(-1))
    torch.testing.assert_close(attention(x, torch.arange(TOKENS)), attention(x, torch.arange(TOKENS) + 1000))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(name: str) -> None:
    held = tensors()
    value = held.pop(name)
    for given in (held, {**held, name: value[1:].clone()}):
        with pytest.raises(LayerBuildError) as error:
            SharedRowAttention(SPEC, given, **RANKS)
        assert (error.value.key, error.value.due) == (name, SHAPES[name])


@pytest.mark.parametrize(
    ("fields", "ranks", "key"),
    [
        ({"num_heads": None}, {}, "num_attention_heads"),
        ({"num_kv_heads": 2}, {}, "num_key_value_heads"),
        ({"rope": replace(SPEC.rope, rotary_dim=None)}, {}, "qk_rope_head_dim"),
        ({"rope": replace(SPEC.rope, rotary_dim=8)}, {}, "qk_rope_head_dim"),
        ({}, {"q_lora_rank": None}, "q_lora_rank"),
        ({}, {"o_lora_rank": None}, "o_lora_rank"),
        ({}, {"o_groups": 3}, "o_groups"),
        ({}, {"o_groups": 0}, "o_groups"),
    ],
)
def test_sizes_that_make_no_attention_are_named(fields: dict[str, Any], ranks: dict[str, Any], key: str) -> None:
    with pytest.raises(LayerBuildError) as error:
        SharedRowAttention(replace(SPEC, **fields), tensors(), **{**RANKS, **ranks})
    assert error.value.key == key
