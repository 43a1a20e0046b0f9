"""vLLM's store_context_kv, the context kernel of DFlash2 drafts, under the contract, as the package publishes it.

Failure modes this file exists to catch: as for SGLang's; a contract that fits one engine's kernel alone; a fault of the adapter that is
put down to the engine.
"""

from __future__ import annotations

import pytest
from published import VLLM, VLLM_GAPS, another_theta, biased, errors, skip_unless_installed, unit_layer, wraps

from pytest_specdecode.contracts import ContractError
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.numerics import NumericsError

skip_unless_installed("vllm")


class TestVLLM(VLLM):
    known_gaps = VLLM_GAPS


def test_a_whole_head_of_80_is_served() -> None:
    """The contract's own case of that width turns 40 lanes."""
    VLLM().test_serves(shape={"head_dim": 80, "rotary_dim": 80})


# --- what the contract finds without being told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["rotary-dim", "rope-style", "rope-theta", "rope-scaling", "bias"])
def test_finds_that_layers_are_not_compared(axis: str) -> None:
    with pytest.raises(ContractError, match=rf"{axis} .* layer 1 named: served-wrong \(layer \d: K is off by up to"):
        VLLM().test_rejects(axis=axis)


def test_finds_that_layer_0s_epsilon_is_taken_for_all() -> None:
    with pytest.raises(NumericsError, match="layer=1"):
        VLLM().test_serves_or_rejects(shape={"epsilons": (1e-6, 1e-3, 1e-5)})


def test_finds_that_strided_positions_are_misread() -> None:
    with pytest.raises(KernelMemoryError, match="POSITIONS"):
        VLLM().test_positions(kind="strided")


def test_finds_that_positions_are_not_compared() -> None:
    with pytest.raises(ContractError, match="position 40 of a table of 40 rows is not refused"):
        VLLM().test_out_of_range(position=40)


# --- the figures --------------------------------------------------------------------------------------------------------------------------


def test_on_unit_rows_the_errors_are_as_large_as_the_rows() -> None:
    k, v = errors(VLLM.build, [unit_layer(0), unit_layer(1)])
    assert k < 1e-5
    assert v < 1e-5
    k, v = errors(VLLM.build, another_theta())
    assert 2.5 < k < 8
    assert v < 1e-5
    k, v = errors(VLLM.build, biased())
    assert 2.5 < k < 8
    assert 1.5 < v < 5


def test_offsets_do_not_wrap() -> None:
    assert not wraps(VLLM.build, 209_717)
