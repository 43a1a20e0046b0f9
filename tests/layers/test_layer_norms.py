"""RMSNorm, and LayerNorm without a bias.

What these catch: a weight read as w where it means 1 + w or the other way; an epsilon outside the root, dropped or
defaulted (seen only on tiny rows); a mean over the wrong dimension; arithmetic in half precision; a second rounding
before the weight; a width that silently broadcasts.
"""

from __future__ import annotations

import math

import pytest
import torch

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers import LayerNorm, RMSNorm


def test_values_worked_out_by_hand() -> None:
    # mean(9, 16) = 12.5 and sqrt(12.5) = 3.5355339...; 3 / 3.5355339 = 0.8485281, 4 / 3.5355339 = 1.1313708
    x = torch.tensor([[3.0, 4.0], [-3.0, 4.0]], dtype=torch.float64)
    got = RMSNorm(torch.tensor([1.0, 2.0]), 0.0)(x)
    due = torch.tensor([[0.848528137423857, 2.262741699796952], [-0.848528137423857, 2.262741699796952]])
    torch.testing.assert_close(got, due.double(), rtol=1e-7, atol=0)
    assert got.dtype == torch.float64


def test_gemma_adds_one_to_the_weight() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    plain = RMSNorm(torch.tensor([1.0, 2.0]), 1e-6)(x)
    assert torch.equal(RMSNorm(torch.tensor([0.0, 1.0]), 1e-6, "gemma")(x), plain)
    assert not torch.equal(RMSNorm(torch.tensor([1.0, 2.0]), 1e-6, "gemma")(x), plain)


@pytest.mark.parametrize(("eps", "due"), [(1e-6, 0.7071067811865475), (1e-5, 0.30151134457776363)])
def test_epsilon_is_inside_the_root(eps: float, due: float) -> None:
    # mean of squares 1e-6: 1e-3 / sqrt(2e-6) and 1e-3 / sqrt(1.1e-5)
    got = RMSNorm(torch.ones(3), eps)(torch.full((2, 3), 1e-3, dtype=torch.float64))
    torch.testing.assert_close(got, torch.full((2, 3), due, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 128, generator=generator).to(dtype)
    weight = torch.randn(128, generator=generator).to(dtype)
    truth = RMSNorm(weight, 1e-6).double()(x.double()).to(dtype)
    twice = (RMSNorm(torch.ones(128), 1e-6).double()(x.double()).to(dtype) * weight).to(dtype)
    got = RMSNorm(weight, 1e-6)(x)
    assert got.dtype == dtype
    assert (got != truth).sum() <= 2  # float32 in between can fall on the other side of a tie
    assert (twice != truth).sum() > 500


def test_half_precision_does_not_overflow() -> None:
    got = RMSNorm(torch.ones(4, dtype=torch.float16), 1e-6)(torch.full((1, 4), 6e4, dtype=torch.float16))
    assert torch.equal(got, torch.ones(1, 4, dtype=torch.float16))


def test_attributes_are_the_engines_and_frozen() -> None:
    norm = RMSNorm(torch.ones(4), 1e-5, "gemma")
    assert (norm.variance_epsilon, norm.norm_kind) == (1e-5, "gemma")
    assert not norm.weight.requires_grad
    assert "eps=1e-05" in repr(norm)


def test_a_zero_row_stays_zero() -> None:
    assert torch.equal(RMSNorm(torch.ones(4), 1e-6)(torch.zeros(2, 4)), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("weight", "eps", "kind", "text"),
    [
        (torch.ones(2, 2), 1e-6, "rms", "shape [2, 2]"),
        (torch.ones(2, dtype=torch.int64), 1e-6, "rms", "torch.int64"),
        (torch.ones(2), -1.0, "rms", "epsilon is -1.0"),
        (torch.ones(2), float("nan"), "rms", "epsilon is nan"),
        (torch.ones(2), 1e-6, "layer", "unknown norm kind 'layer'; known: rms, gemma"),
    ],
)
def test_bad_arguments(weight: torch.Tensor, eps: float, kind: str, text: str) -> None:
    with pytest.raises(LayerBuildError) as caught:
        RMSNorm(weight, eps, kind)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_another_width_is_refused_even_where_it_would_broadcast() -> None:
    with pytest.raises(DraftError, match="over 1 features was given 4"):
        RMSNorm(torch.ones(1), 1e-6)(torch.ones(2, 4))


def test_a_layer_norm_takes_the_mean_away_and_may_have_a_weight_per_head() -> None:
    # (1, 3) has mean 2 and variance 1, (10, 30) mean 20 and variance 100.
    x = torch.tensor([[[1.0, 3.0], [10.0, 30.0]]], dtype=torch.float64)
    signs = torch.tensor([[[-1.0, 1.0], [-1.0, 1.0]]], dtype=torch.float64)
    assert torch.equal(LayerNorm(torch.ones(2), 0.0)(x), signs)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(LayerNorm(weight, 0.0)(x), signs * weight)
    # The epsilon lies under the root: 1 + 3 is 4, whose root is 2.
    assert torch.equal(LayerNorm(torch.ones(2), 3.0)(x)[0, 0], signs[0, 0] / 2)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 2)])
def test_a_layer_norm_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises((DraftError, LayerBuildError)):
        LayerNorm(torch.ones(shape), 1e-5)(torch.ones(5, 2, 2))


def test_rows_do_not_meet_in_a_layer_norm() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    x = (
        torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)
        * torch.tensor([1.0, 3.0, 9.0, 27.0])[:, None, None]
    )
    got = LayerNorm(weight, 0.25)(x)
    for row in range(4):
        for head in range(2):
            lanes = x[row, head] - sum(x[row, head].tolist()) / 3
            due = lanes / math.sqrt(float((lanes * lanes).sum()) / 3 + 0.25) * weight[head]
            torch.testing.assert_close(got[row, head], due)
