"""Hyper-connections: the mixing of the streams, worked out by hand and stream by stream.

What these catch: columns and rows divided in the wrong order or once too often; streams mixed by the transposed matrix; pre, post and mix
taken from another's rows; a factor of two, or an epsilon, that is left out; the norm over one stream in the place of all. The same against
transformers is in `tests/peers/test_peer_deepseek_v4.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pytest_specdecode.layers import HyperConnection, StreamHead

N, HIDDEN = 2, 3
ROWS = N * (N + 2)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def connection(base: list[float], iterations: int = 1, eps: float = 0.0, fn: Tensor | None = None) -> HyperConnection:
    """One whose values are `base` alone, unless `fn` is given."""
    return HyperConnection(
        torch.zeros(ROWS, N * HIDDEN, dtype=torch.float64) if fn is None else fn,
        torch.tensor(base, dtype=torch.float64),
        torch.tensor([0.5, 2.0, -1.5], dtype=torch.float64),
        streams=N,
        iterations=iterations,
        eps=eps,
        norm_eps=1e-3,
    )


STREAMS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], dtype=torch.float64)


def test_what_the_sublayer_reads_is_a_weighted_sum() -> None:
    states, post, _ = connection([0.0, math.log(3.0), 0.0, math.log(3.0), 0, 0, 0, 0], eps=0.25)(STREAMS)
    # 1/2 + 1/4 and 3/4 + 1/4; twice 1/2 and 3/4.
    torch.testing.assert_close(states, torch.tensor([0.75 + 10.0, 1.5 + 20.0, 2.25 + 30.0], dtype=torch.float64))
    torch.testing.assert_close(post, torch.tensor([1.0, 1.5], dtype=torch.float64))


def test_rows_are_softmaxed_and_then_columns_divided() -> None:
    # softmax rows [1/4, 3/4] and [1/2, 1/2]; columns add up to 3/4 and 5/4.
    mix = connection([0, 0, 0, 0, 0.0, math.log(3.0), 0.0, 0.0])(STREAMS)[2]
    torch.testing.assert_close(mix, torch.tensor([[1 / 3, 3 / 5], [2 / 3, 2 / 5]], dtype=torch.float64))
    # Once more: rows add up to 14/15 and 16/15; columns of the divided matrix to 55/56 and 57/56.
    again = connection([0, 0, 0, 0, 0.0, math.log(3.0), 0.0, 0.0], iterations=2)(STREAMS)[2]
    rows = torch.tensor([[5 / 14, 9 / 14], [10 / 16, 6 / 16]], dtype=torch.float64)
    torch.testing.assert_close(again, rows / rows.sum(0))


def test_many_divisions_make_the_mixing_doubly_stochastic() -> None:
    mix = connection([0, 0, 0, 0, 2.0, -1.0, 0.5, 3.0], iterations=200)(STREAMS)[2]
    torch.testing.assert_close(mix.sum(0), torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(mix.sum(1), torch.ones(N, dtype=torch.float64))


def test_a_stream_takes_from_the_others_by_its_column() -> None:
    output = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    post = torch.tensor([2.0, 0.0], dtype=torch.float64)
    mix = torch.tensor([[0.0, 1.0], [0.25, 0.0]], dtype=torch.float64)
    found = connection([0.0] * ROWS).spread(STREAMS, output, post, mix)
    due = torch.stack([2.0 * output + 0.25 * STREAMS[1], STREAMS[0]])
    torch.testing.assert_close(found, due)


def test_the_values_come_from_all_lanes_normed_together_each_part_by_its_scale() -> None:
    fn, base = drawn(1, ROWS, N * HIDDEN), drawn(2, ROWS)
    module = connection(base.tolist(), eps=0.01, fn=fn)
    lanes = STREAMS.flatten()
    lanes = lanes / math.sqrt(float((lanes * lanes).mean()) + 1e-3)
    values = fn @ lanes
    pre = (0.5 * values[:2] + base[:2]).sigmoid() + 0.01
    post = 2 * (2.0 * values[2:4] + base[2:4]).sigmoid()
    mix = (-1.5 * values[4:] + base[4:]).view(2, 2).softmax(dim=1) + 0.01
    states, found_post, found_mix = module(STREAMS)
    torch.testing.assert_close(states, pre @ STREAMS)
    torch.testing.assert_close(found_post, post)
    torch.testing.assert_close(found_mix, mix / (mix.sum(0) + 0.01))


def test_the_head_joins_the_streams_by_gates_of_its_own() -> None:
    fn, base = drawn(3, N, N * HIDDEN), drawn(4, N)
    scale = torch.tensor([0.7], dtype=torch.float64)
    lanes = STREAMS.flatten()
    lanes = lanes / math.sqrt(float((lanes * lanes).mean()) + 1e-3)
    due = ((0.7 * (fn @ lanes) + base).sigmoid() + 0.02) @ STREAMS
    head = StreamHead(fn, base, scale, eps=0.02, norm_eps=1e-3)
    torch.testing.assert_close(head(STREAMS), due)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_streams_keep_their_dtype_and_are_mixed_in_float32_or_wider(dtype: torch.dtype) -> None:
    module = connection(drawn(5, ROWS).tolist(), iterations=20, eps=1e-6, fn=drawn(6, ROWS, N * HIDDEN))
    streams = drawn(7, 4, N, HIDDEN).to(dtype)
    states, post, mix = module(streams)
    wide = torch.promote_types(dtype, torch.float32)
    assert (states.dtype, post.dtype, mix.dtype) == (dtype, wide, wide)
    assert module.spread(streams, states, post, mix).dtype == dtype
    exact = module(streams.double())
    torch.testing.assert_close(mix.double(), exact[2], rtol=1e-5, atol=1e-5)


def test_rows_of_a_batch_do_not_meet_in_the_norm() -> None:
    fn, base = drawn(3, ROWS, N * HIDDEN), drawn(4, ROWS)
    module = connection(base.tolist(), fn=fn)
    head = StreamHead(fn[:N], base[:N], torch.tensor([0.5], dtype=torch.float64), eps=0.25, norm_eps=1e-3)
    batch = torch.stack([STREAMS, 5.0 * STREAMS.flip(0), STREAMS.square()])
    for index, streams in enumerate(batch):
        for together, alone in zip(module(batch), module(streams), strict=True):
            torch.testing.assert_close(together[index], alone)
        torch.testing.assert_close(head(batch)[index], head(streams))


def test_the_epsilon_is_added_to_each_sum_that_divides() -> None:
    # softmax rows [1/4, 3/4] and [1/2, 1/2], each entry a quarter more.
    mix = connection([0, 0, 0, 0, 0.0, math.log(3.0), 0.0, 0.0], iterations=3, eps=0.25)(STREAMS)[2]
    due = torch.tensor([[0.5, 1.0], [0.75, 0.75]], dtype=torch.float64)
    for axis in (0, 1, 0, 1, 0):
        due = due / (due.sum(axis, keepdim=True) + 0.25)
    torch.testing.assert_close(mix, due)
