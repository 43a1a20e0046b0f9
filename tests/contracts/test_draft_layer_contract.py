"""The draft-layer contract: our reference layers pass whole, and each thing that is wrong fails the test that bears its name, and no other.

Failure modes this file exists to catch: a property whose test cannot fail; one that fails for another's fault; a family that has layers and
cannot be put under the contract; a property that is left out for a family without a reason; a block layer whose rows see what they must
not, or that keeps what it drafted.
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
from pytest_specdecode.testing import expected_tensors, tiny_config


class Ours:
    """A reference layer, called as the contract calls an engine's."""

    family, index = "eagle3", 0

    def __init__(self, config, weights):
        spec, _ = expected_tensors(config, self.family)
        family = next(each for each in FAMILIES if each.name == self.family)
        self.layer = family.build_layer(spec, spec.layers[self.index], _Weights(weights))

    def new_cache(self):
        return new_cache(self.layer.self_attn)

    def commit(self, *, context, positions, cache):
        if hasattr(self.layer.self_attn, "latent"):
            cache.append(self.layer.self_attn.latent(context, positions), positions)
        elif hasattr(self.layer.self_attn, "row"):
            cache.append(self.layer.self_attn.row(context, positions), positions)
        else:
            cache.append(*self.layer.context_kv(context, positions), positions)

    def __call__(self, **inputs):
        return self.layer.forward(**inputs)


def of(name, base=Ours, index=0):
    return type("Layer", (base,), {"family": name, "index": index})


#: Layers that a family's own file does not show, by what they are for.
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True}
MORE = {
    "dflash-causal": ("dflash", {"is_causal": True}),
    "dflash-window": ("dflash", {**SLIDING, "is_causal": False}),
    "dflash-causal-window": ("dflash", {**SLIDING, "is_causal": True}),
    "dflash2-causal": ("dflash2", {"is_causal": True}),
    "dflash-laguna": ("dflash", {"architectures": ["DFlashLagunaForCausalLM"], "is_causal": True}),
    "dspark-window": ("dspark", SLIDING),
    "eagle3-norm-before-residual": ("eagle3", {"norm_before_residual": True}),
    "hydra-prefix": ("hydra", {"hydra_head_arch": "prefix-mlp"}),
}


def contracts():
    for family in FAMILIES:
        yield family.name, family.name, None
    for name, (family, changes) in MORE.items():
        yield name, family, tiny_config(family, **changes)


for _name, _family, _config in contracts():
    _class = "Test" + "".join(part.capitalize() for part in _name.split("-"))
    _layer = -1 if _name == "hydra-prefix" else 0
    globals()[_class] = type(
        _class,
        (DraftLayerContract,),
        {
            "family": _family,
            "config": _config,
            "layer": _layer,
            "build": staticmethod(of(_family, index=_layer)),
            "__module__": __name__,
        },
    )


# --- what applies -------------------------------------------------------------------------------------------------------------------------


def test_every_family_has_a_class_here():
    assert {family for _, family, _ in contracts()} == {family.name for family in FAMILIES}


def skipped(family):
    """Properties that are left out for a family, with the reasons."""
    subject = type("Subject", (DraftLayerContract,), {"build": staticmethod(of(family)), "family": family})()
    found = {}
    for name, run in (
        ("reference-float32", lambda: subject.test_reference(dtype="float32")),
        ("incremental", lambda: subject.test_incremental(cuts=(0, 2, 3))),
        ("batch-independence", lambda: subject.test_batch(what="batch-independence")),
        ("causality", lambda: subject.test_causality(what="causality")),
        ("position-shift", lambda: subject.test_shift(what="position-shift")),
        ("large-inputs-float32", lambda: subject.test_large(dtype="float32")),
    ):
        try:
            run()
        except pytest.skip.Exception as skip:
            found[name] = str(skip)
    return found


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_property_that_does_not_apply_says_why(family):
    keeps_nothing = family in ("medusa", "hydra", "mlp-speculator", "gemma4-assistant")
    due = {"position-shift"} if keeps_nothing else set()
    found = skipped(family)
    assert set(found) == due
    assert all(family in reason and "rotates no keys" in reason for reason in found.values())


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


class Block(Ours):
    """A layer that drafts a block over a context."""

    family = "dflash"


def wrong_block(condition, spoil=lambda out, states: out * 1.05):
    class Wrong(Block):
        def __call__(self, **inputs):
            out = super().__call__(**inputs)
            return spoil(out, inputs) if condition(**inputs) else out

    return Wrong


def is_whole(dtype):
    return lambda block, context, **_: block.dtype == dtype and context is not None and context.shape[0] == 7


class KeepsItsBlock(Block):
    """The K and V of what it drafted stay in the cache."""

    def __call__(self, *, block, positions, context=None, context_positions=None, cache=None):
        out = super().__call__(
            block=block, positions=positions, context=context, context_positions=context_positions, cache=cache
        )
        if cache is not None:
            cache.append(*self.layer.context_kv(self.layer.input_layernorm(block), positions), positions)
        return out


class CommitsWrongly(Block):
    """Pieces of three are put at positions from 0 on."""

    def commit(self, *, context, positions, cache):
        super().commit(context=context, positions=positions - positions[0] * (len(context) == 3), cache=cache)


class BlockPlaces(Block):
    def __call__(self, *, positions, **rest):
        return super().__call__(positions=positions * (1 + int(positions.flatten()[0] > 20)), **rest)


BROKEN_BLOCKS = {
    "reference-float32": wrong_block(is_whole(torch.float32)),
    "reference-bfloat16": wrong_block(is_whole(torch.bfloat16)),
    "chunked": CommitsWrongly,
    "batch-independence": wrong_block(
        lambda block, **_: block.ndim == 3, lambda out, inputs: out + 0.1 * inputs["block"].mean(dim=0)
    ),
    "causality": wrong_block(
        lambda context, **_: context is not None and context.shape[0] == 6 and context.ndim == 2,
        lambda out, inputs: torch.cat([out[:1], inputs["block"][1:2] + inputs["context"][0], out[2:]]),
    ),
    "position-shift": BlockPlaces,
    "large-inputs-float32": wrong_block(
        lambda block, **_: block.dtype == torch.float32,
        lambda out, inputs: torch.where(inputs["block"].abs() > 100, torch.inf, out),
    ),
}


def contract(build, **attributes):
    return type("Subject", (DraftLayerContract,), {"build": staticmethod(build), **attributes})


def test_there_is_a_broken_layer_for_every_property():
    assert set(BROKEN) == {name for name in DraftLayerContract.properties() if not name.endswith(DRAWN)}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_fails_the_test_of_its_name_and_no_other(name, tmp_path):
    assert list(failing(contract(BROKEN[name]), tmp_path)) == [name]


@pytest.mark.parametrize("name", BROKEN_BLOCKS)
def test_a_block_that_is_broken_fails_the_test_of_its_name_and_no_other(name, tmp_path):
    assert list(failing(contract(BROKEN_BLOCKS[name], family="dflash"), tmp_path)) == [name]


def test_a_block_that_keeps_what_it_drafted_is_found(tmp_path):
    """Whatever the pieces: nothing else shows it."""
    assert list(failing(contract(KeepsItsBlock, family="dflash"), tmp_path)) == ["incremental", "chunked"]


@pytest.mark.parametrize(
    ("built_for", "checked_for", "text"),
    [
        (
            {"is_causal": False},
            {"is_causal": True},
            r"states \[0\] depend on block row 1; those that depend on it are \[1, 2, 3\]",
        ),
        ({"is_causal": True}, {"is_causal": False}, r"states \[0\] are the same whatever is in block row 1"),
        (
            {"is_causal": True},
            {**SLIDING, "is_causal": True},
            r"states \[0, 1, 2, 3\] depend on context token 0; those that depend on it are \[\]",
        ),
    ],
    ids=["looks-ahead", "looks-back-only", "ignores-the-window"],
)
def test_a_block_whose_rows_see_what_another_variant_s_do_is_found(built_for, checked_for, text):
    def build(config, weights):
        return Block(tiny_config("dflash", **built_for), weights)

    subject = contract(build, family="dflash", config=tiny_config("dflash", **checked_for))
    with pytest.raises(AssertionError, match=text):
        subject().test_causality(what="causality")


class LeaksBetweenRows(Ours):
    """A head whose rows are centred on their mean."""

    def __call__(self, hidden):
        return super().__call__(hidden=hidden - 0.5 * hidden.mean(dim=-2, keepdim=True))


def test_a_head_that_looks_at_its_neighbours_is_found(tmp_path):
    found = failing(contract(of("medusa", LeaksBetweenRows), family="medusa"), tmp_path)
    assert {"causality", "incremental", "chunked"} <= set(found)


def test_a_cut_that_goes_wrong_is_found_by_drawing():
    broken = wrong_where(lambda hidden, positions, cache: cache is not None and len(hidden) == 2)
    with pytest.raises(AssertionError, match="decoding in pieces"):
        contract(broken)().test_incremental_any(rest="")


def test_a_layer_that_gives_nothing_but_the_past_is_not_causal():
    broken = wrong_where(lambda hidden, *_: len(hidden) == 6, lambda out, hidden: out[:1].expand_as(out))
    with pytest.raises(AssertionError, match="are the same whatever is in token 1"):
        contract(broken)().test_causality(what="")
