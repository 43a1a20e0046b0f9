"""SGLang's FusedKVMaterializeHelper under the contract, as the package publishes it.

Failure modes this file exists to catch: a property that the helper lacks and the contract does not see; one that it holds and the contract
denies; a version in which a gap closed, or another one opened.
"""

from __future__ import annotations

import pytest
from published import SGLANG_GAPS, SGLang, another_theta, biased, errors, skip_unless_installed, unit_layer, wraps

from pytest_specdecode.contracts import ContractError
from pytest_specdecode.launch import KernelOverflowError
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.numerics import NumericsError

skip_unless_installed("sglang")


class TestSGLang(SGLang):
    known_gaps = SGLANG_GAPS


# --- what the contract finds without being told -------------------------------------------------------------------------------------------


def test_finds_that_layer_0s_theta_is_taken_for_all() -> None:
    with pytest.raises(ContractError, match=r"rope-theta .* layer 1 named: served-wrong \(layer \d: K is off by up to"):
        SGLang().test_rejects(axis="rope-theta")


def test_finds_that_the_bias_is_dropped() -> None:
    with pytest.raises(ContractError, match=r"bias .* layer 1 named: served-wrong \(layer \d: K is off by up to"):
        SGLang().test_rejects(axis="bias")
    with pytest.raises(NumericsError, match="K: 384 of 384 elements are too far off"):
        SGLang().test_serves_or_rejects(shape={"bias": True})


def test_finds_that_strided_positions_are_misread() -> None:
    with pytest.raises(KernelMemoryError, match="positions_ptr"):
        SGLang().test_positions(kind="strided")


def test_finds_that_offsets_wrap() -> None:
    with pytest.raises(KernelOverflowError, match="int32 overflow"):
        SGLang().test_far(what="far-offsets")


# --- the figures --------------------------------------------------------------------------------------------------------------------------


def test_on_unit_rows_the_errors_are_as_large_as_the_rows() -> None:
    """What is right is off by rounding alone, so the errors are the faults'."""
    k, v = errors(SGLang.build, [unit_layer(0), unit_layer(1)])
    assert k < 1e-5
    assert v < 1e-5
    k, v = errors(SGLang.build, another_theta())
    assert 2.5 < k < 8
    assert v < 1e-5
    k, v = errors(SGLang.build, biased())
    assert 2.5 < k < 8
    assert 1.5 < v < 5


def test_offsets_wrap_from_209717_tokens_on() -> None:
    """5 layers of 8 heads of 128: a token has 10,240 elements, and 209,716 times that is more than 2^31."""
    assert not wraps(SGLang.build, 209_716)
    assert wraps(SGLang.build, 209_717)
