"""The draft-layer contract: our reference layers pass whole, and each thing that is wrong fails the test that bears its name, and no other.

Failure modes this file exists to catch: a property whose test cannot fail; one that fails for another's fault; a family that decodes token
by token and cannot be put under the contract.
"""

from __future__ import annotations

import pytest
import torch
from running import failing

from pytest_specdecode.contracts import DraftLayerContract
from pytest_specdecode.contracts.base import DRAWN
from pytest_specdecode.contracts.draft_layer import _Weights
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.families.building import new_cache
from pytest_specdecode.testing import expected_tensors


class Ours:
    """A reference layer, called as the contract calls an engine's."""

    family = "eagle3"

    def __init__(self, config, weights):
        spec, _ = expected_tensors(config, self.family)
        family = next(each for each in FAMILIES if each.name == self.family)
        self.layer = family.build_layer(spec, spec.layers[0], _Weights(weights))

    def new_cache(self):
        return new_cache(self.layer.self_attn)

    def __call__(self, *, positions, cache=None, **states):
        return self.layer.forward(**states, positions=positions, cache=cache)


def of(name):
    return type("Layer", (Ours,), {"family": name})


class TestEagle3(DraftLayerContract):
    build = staticmethod(Ours)


class TestEagle1(DraftLayerContract):
    family = "eagle1"
    build = staticmethod(of("eagle1"))


class TestLatentEagle3(DraftLayerContract):
    family = "eagle3-mla"
    build = staticmethod(of("eagle3-mla"))


class TestPredictionLayer(DraftLayerContract):
    family = "mtp"
    build = staticmethod(of("mtp"))


# --- broken layers ------------------------------------------------------------------------------------------------------------------------


def wrong_where(condition, spoil=lambda out, hidden: out * 1.05):
    class Wrong(Ours):
        def __call__(self, *, hidden, positions, cache=None, **states):
            out = super().__call__(hidden=hidden, positions=positions, cache=cache, **states)
            return spoil(out, hidden) if condition(hidden, positions, cache) else out

    return Wrong


class WrongPlaces(Ours):
    """Positions counted from where they start, not told, times two."""

    def __call__(self, *, positions, **rest):
        if len(positions) == 6 and positions.ndim == 1:
            positions = positions * (1 + (positions[0] > 9).long())
        return super().__call__(positions=positions, **rest)


def is_prefill(dtype):
    return lambda hidden, positions, cache: hidden.shape[0] == 7 and hidden.dtype == dtype and cache is None


def spoiled_by_the_last(out, hidden):
    out = out.clone()
    out[0] += hidden[-1]
    return out


def spoiled_by_neighbours(out, hidden):
    return out + 0.1 * hidden.mean(dim=0)


def overflowing(out, hidden):
    return torch.where(hidden.abs() > 100, torch.inf, out)


BROKEN = {
    "reference-float32": wrong_where(is_prefill(torch.float32)),
    "reference-bfloat16": wrong_where(is_prefill(torch.bfloat16)),
    "incremental": wrong_where(lambda hidden, positions, cache: cache is not None and len(hidden) == 1),
    "chunked": wrong_where(lambda hidden, positions, cache: cache is not None and len(hidden) == 3),
    "batch-independence": wrong_where(lambda hidden, positions, cache: hidden.ndim == 3, spoiled_by_neighbours),
    "causality": wrong_where(
        lambda hidden, positions, cache: len(hidden) == 6 and positions[0] == 0, spoiled_by_the_last
    ),
    "position-shift": WrongPlaces,
    "large-inputs-float32": wrong_where(lambda hidden, *_: hidden.dtype == torch.float32, overflowing),
    "large-inputs-bfloat16": wrong_where(lambda hidden, *_: hidden.dtype == torch.bfloat16, overflowing),
}


def contract(build):
    return type("Subject", (DraftLayerContract,), {"build": staticmethod(build)})


def test_there_is_a_broken_layer_for_every_property():
    assert set(BROKEN) == {name for name in DraftLayerContract.properties() if not name.endswith(DRAWN)}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_fails_the_test_of_its_name_and_no_other(name, tmp_path):
    assert list(failing(contract(BROKEN[name]), tmp_path)) == [name]


def test_a_cut_that_goes_wrong_is_found_by_drawing():
    broken = wrong_where(lambda hidden, positions, cache: cache is not None and len(hidden) == 2)
    with pytest.raises(AssertionError, match="decoding in pieces"):
        contract(broken)().test_incremental_any(rest="")


def test_a_layer_that_gives_nothing_but_the_past_is_not_causal():
    broken = wrong_where(lambda hidden, *_: len(hidden) == 6, lambda out, hidden: out[:1].expand_as(out))
    with pytest.raises(AssertionError, match="whatever tokens 4 and 5 are"):
        contract(broken)().test_causality(what="")


def test_families_that_draft_blocks_are_not_for_this_contract():
    subject = type("Subject", (DraftLayerContract,), {"build": staticmethod(of("dflash")), "family": "dflash"})
    with pytest.raises(TypeError, match="do not decode token by token"):
        subject().test_causality(what="")
