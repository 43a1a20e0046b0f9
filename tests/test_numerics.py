"""How close is close.

Failure modes this file exists to catch: a tolerance under half an ulp, which a right result fails; one so wide that a wrong result
passes; a NaN that compares equal to a number, or a number to a NaN; a bad row hidden among larger rows, a bias hidden under a large
maximum; a message that sends the reader to the wrong element.
"""

from __future__ import annotations

import pytest
import torch

from pytest_specdecode.numerics import TOLERANCES, NumericsError, Tolerance, assert_close, assert_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def sample(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def refused(*args, **kwargs):
    with pytest.raises(NumericsError) as caught:
        assert_close(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_truth_rounded_once_passes_at_every_size(dtype, scale):
    truth = sample(2, 3, 4, 32, scale=scale)
    assert_close(truth.to(dtype), truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_an_ulp_off_everywhere_passes_and_two_ulps_fail(dtype):
    # At 1.0 the next value is eps away, so truths halfway between two values may go either way.
    eps = torch.finfo(dtype).eps
    truth = torch.full((4, 8), 1.0 + eps / 2, dtype=torch.float64)
    assert_close(torch.full((4, 8), 1.0 + eps, dtype=dtype), truth)
    assert_close(torch.full((4, 8), 1.0, dtype=dtype), truth)
    ulps = TOLERANCES[dtype].max_ulps + 1.5
    with pytest.raises(NumericsError):
        assert_close(torch.full((4, 8), 1.0 + ulps * eps, dtype=dtype), truth)


def test_as_bad_as_eager_is_good_enough():
    truth = sample(3, 4, 5, 64)
    twice_rounded = ((truth * 3.1).bfloat16().double() / 3.1).bfloat16()
    assert_close(twice_rounded, truth, twice_rounded)


def test_what_is_measured_is_returned():
    truth = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    got, eager = torch.tensor([[1.0, 2.5]]), torch.tensor([[1.25, 2.0]])
    measured = assert_close(got, truth, eager, tolerance=Tolerance(max_ulps=1e8, mean_ulps=1e8, row_l2=9))
    assert (measured.max_error, measured.mean_error, measured.eager_max) == (0.5, 0.25, 0.25)
    assert measured.row_error == pytest.approx(0.5 / 5**0.5)
    assert measured.rms_ratio == pytest.approx(2.0)


def test_the_worst_element_is_named():
    truth = sample(2, 3, 4, 8)
    got = truth.float()
    got[1, 2, 0, 5] += 0.5
    fault = refused(got, truth, what="K")
    assert fault.kind == "max"
    assert fault.index == (1, 2, 0, 5)
    assert fault.axes == ("layer", "token", "head", "dim")
    assert fault.count == 1
    assert fault.error == pytest.approx(0.5, rel=1e-5)
    assert fault.place == "layer=1 token=2 head=0 dim=5"
    text = str(fault)
    assert text.startswith("K: 1 of 192 elements are too far off, worst at layer=1 token=2 head=0 dim=5: got ")
    assert "eager's there" in text
    assert "bound" in text


def test_axes_fit_the_tensor_from_the_right():
    truth = sample(3, 8)
    got = truth.float()
    got[2, 7] += 1
    assert "head=2 dim=7" in str(refused(got, truth))
    truth, got = truth[None, None, None], got[None, None, None]
    assert "axis0=0 layer=0 token=0 head=2 dim=7" in str(refused(got, truth))


def test_a_bias_under_the_largest_error_is_seen_in_the_mean():
    truth = sample(1, 1, 64, 64).abs() + 0.5
    truth[0, 0, 0, 0] = 100.0
    eps = torch.finfo(torch.bfloat16).eps
    biased = (truth * (1 + 2 * eps)).bfloat16()
    biased[0, 0, 0, 0] = 100.0
    assert refused(biased, truth).kind == "mean"


def test_a_bad_row_among_larger_rows_is_seen():
    truth = sample(1, 1, 256, 64)
    truth[0, 0, 7] *= 1e-4
    got = truth.bfloat16()
    got[0, 0, 7] *= 1.5
    fault = refused(got, truth)
    assert (fault.kind, fault.index) == ("row", (0, 0, 7))
    assert "worst at layer=0 token=0 head=7: relative L2 error" in str(fault)
    assert fault.place == "layer=0 token=0 head=7"
    # The row has 64 elements; half of one too much is largest at its largest.
    worst = int(truth[0, 0, 7].abs().argmax())
    assert (fault.got, fault.due) == (got[0, 0, 7, worst].item(), truth[0, 0, 7, worst].item())
    assert f"its worst element is at layer=0 token=0 head=7 dim={worst}: got {fault.got:.9g}, due " in str(fault)


@pytest.mark.parametrize(("bad", "name"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_a_value_that_must_be_finite(bad, name):
    truth = sample(2, 8)
    got = truth.float()
    got[1, 3] = bad
    fault = refused(got, truth, axes=("token", "dim"))
    assert (fault.kind, fault.index, fault.count) == ("finiteness", (1, 3), 1)
    assert f"token=1 dim=3: got {name}" in str(fault)


def test_a_value_that_must_not_be_finite():
    truth = sample(2, 8)
    truth[0, 0] = float("nan")
    assert refused(torch.nan_to_num(truth).float(), truth).kind == "finiteness"


def test_infinities_are_told_apart_and_right_ones_pass():
    truth = sample(2, 8)
    truth[0, 0], truth[1, 1] = float("nan"), float("inf")
    assert_close(truth.float(), truth)
    got = truth.float()
    got[1, 1] = float("-inf")
    assert refused(got, truth).kind == "finiteness"


def test_what_overflows_in_the_dtype_may_overflow():
    truth = torch.tensor([1e5, 1.0], dtype=torch.float64)
    assert_close(truth.half(), truth)
    near = torch.tensor([65519.0, 1.0], dtype=torch.float64)
    overflowing = torch.tensor([float("inf"), 1.0], dtype=torch.float16)
    assert refused(overflowing, near).kind == "finiteness"
    assert_close(overflowing, near, overflowing)


def test_shape_and_dtype_come_first():
    truth = sample(2, 8)
    assert refused(truth.float()[:1], truth).kind == "shape"
    assert refused(truth.float(), truth, truth.half()).kind == "dtype"
    assert refused(truth.to(torch.float8_e4m3fn), truth).kind == "dtype"


def test_zero_truth_allows_no_error_to_speak_of():
    truth = torch.zeros(2, 8, dtype=torch.float64)
    assert_close(truth.float(), truth)
    got = truth.float()
    got[0, 1] = 1e-20
    assert refused(got, truth).kind == "max"


def test_empty_tensors_are_close():
    assert_close(torch.empty(2, 0, 8), torch.empty(2, 0, 8, dtype=torch.float64))


def test_subnormal_results_may_be_an_ulp_off():
    # Half precision has nothing between 0 and 6e-8; eager rounds 4e-8 up, and down is an ulp from there.
    truth = torch.full((1, 8), 4e-8, dtype=torch.float64)
    assert_close(truth.half(), truth)
    assert_close(torch.zeros(1, 8).half(), truth)
    assert refused(torch.full((1, 8), 2e-7).half(), truth).kind == "max"


# Tolerance zero.
def test_exact_is_exact():
    due = torch.tensor([[1.0, float("nan"), -0.0]])
    assert_exact(due.clone(), due)
    assert_exact(torch.tensor([[1.0, float("nan"), 0.0]]), due)
    with pytest.raises(NumericsError, match="1 of 3 elements differ") as caught:
        assert_exact(torch.tensor([[1.0, float("nan"), 0.0]]), due, bits=True)
    assert caught.value.index == (0, 2)


def test_exact_names_the_first_difference_and_counts_them():
    due = torch.zeros(2, 3, 1, 4)
    got = due.clone()
    got[1, 0, 0, 2] = got[1, 2, 0, 3] = 1e-30
    with pytest.raises(NumericsError) as caught:
        assert_exact(got, due, what="V")
    assert str(caught.value).startswith("V: 2 of 24 elements differ, the first at layer=1 token=0 head=0 dim=2: got ")
    assert (caught.value.kind, caught.value.count) == ("exact", 2)


def test_exact_wants_the_dtype_too():
    with pytest.raises(NumericsError, match=r"got torch.float16, due torch.float32"):
        assert_exact(torch.zeros(2).half(), torch.zeros(2))


def test_exact_compares_integers():
    assert_exact(torch.arange(3), torch.arange(3))
    with pytest.raises(NumericsError):
        assert_exact(torch.arange(3), torch.tensor([0, 1, 3]))
