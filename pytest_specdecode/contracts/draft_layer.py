"""What any layer of a draft must do: be the family's function, and one function however it is called.

The subject is built from a configuration and weights, `layer = build(config, weights)`, and called by keyword, as its family's layers are:

    layer(embeds=…, hidden=…, positions=…, cache=cache)                                  token by token (`hidden` alone for EAGLE)
    layer(block=…, positions=…, context=…, context_positions=…, cache=cache)             a block of rows over a context
    layer(hidden=…), layer(prefix=…, embeds=…), layer(state=…, tokens=…), layer(x=…, …)  heads, and layers that keep nothing

States are `[T, H]` or `[B, T, H]`, positions alike without the last extent, and a cache is one of `new_cache(layer)`, or None where nothing
came before and nothing will follow. A block layer's context is put into its cache by `commit`; then `context` is None.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_specdecode.contracts.base import DRAWN, Contract, ContractError, cases, examples
from pytest_specdecode.contracts.layer_kinds import LayerKind, Tools, kind_of
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.families.base import ReferenceLayer, TensorSource
from pytest_specdecode.numerics import TOLERANCES, assert_close
from pytest_specdecode.testing import expected_tensors, random_tensors, tiny_config

#: A layer is five matrix products and a softmax in a row, each with an order of sums of its own: four times the slack of one kernel.
_LAYER = {
    dtype: dataclasses.replace(rule, max_ulps=4 * rule.max_ulps, mean_ulps=4 * rule.mean_ulps, row_l2=4 * rule.row_l2)
    for dtype, rule in TOLERANCES.items()
}

#: Between two ways to compute one thing in float32: sums of a few hundred terms in another order. A wrong layer is off by order one.
_SAME = 1e3 * torch.finfo(torch.float32).eps

#: Entries of a large input, far above what a trained state shows and far below what float16 holds.
_LARGE = 64.0


class DraftLayerContract(Contract):
    """Inherit, and give the implementation:

        class TestMyLayer(DraftLayerContract):
            family = "eagle3"
            build = staticmethod(make_layer)

    Attributes:
        family: any family of the library's.
        config: its `config.json`; the family's tiny one where None.
        layer: which layer it is.
        known_gaps: see `Contract`.
    """

    family: ClassVar[str] = "eagle3"
    config: ClassVar[Mapping[str, Any] | None] = None
    layer: ClassVar[int] = 0

    @staticmethod
    def build(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Callable[..., Tensor]:
        """The layer under test.

        Args:
            config: the draft's `config.json`.
            weights: the draft's tensors by canonical name (`layers.0.self_attn.q_proj.weight`, …), all in the dtype to compute in.
        """
        raise NotImplementedError("give the implementation under test: build = staticmethod(make_layer)")

    @staticmethod
    def new_cache(layer: Any) -> Any:
        """An empty cache for one sequence (or one batch of them). Override where the layer has no `new_cache()`."""
        return layer.new_cache()

    @staticmethod
    def commit(layer: Any, context: Tensor, positions: Tensor, cache: Any) -> None:
        """Put a block layer's context `[C, H]` at `positions` into `cache`. Override where the layer has no such `commit`."""
        layer.commit(context=context, positions=positions, cache=cache)

    @cases("dtype", {f"reference-{dtype}": dtype for dtype in ("float32", "bfloat16")})
    def test_reference(self, dtype: str) -> None:
        """One prefill equals the float64 reference, as closely as eager code in the same dtype does."""
        kind = getattr(torch, dtype)
        eager = self._reference(kind)
        inputs = eager.probe(7, 1)
        truth = self._reference(torch.float64).prefill(_double(inputs))
        got = self._call(self._built(kind), inputs)
        axes = ("token", "lane") if got.ndim == 2 else ("token", "stream", "lane")
        assert_close(got, truth, eager.prefill(inputs), what="states", axes=axes, tolerance=_LAYER[kind])

    @cases("cuts", {"incremental": (0, 4, 5, 6, 7, 8, 9), "chunked": (0, 3, 6, 9)})
    def test_incremental(self, cuts: Sequence[int]) -> None:
        """Through a cache, token by token or in chunks, it computes what it does in one call; a block that is dropped leaves nothing."""
        self._decode(cuts, seed=2)

    @cases("rest", [f"incremental{DRAWN}"])
    @examples(15)
    @given(inner=st.sets(st.integers(1, 8), max_size=8), seed=st.integers(0, 99))
    def test_incremental_any(self, rest: str, inner: set[int], seed: int) -> None:
        """Cut anywhere."""
        self._decode((0, *sorted(inner), 9), seed=seed)

    @cases("what", ["batch-independence"])
    def test_batch(self, what: str) -> None:
        """A sequence's states do not depend on what else is in the batch."""
        layer, inputs = self._built(), self._reference().probe(5, 3, batch=3)
        together = self._call(layer, inputs)
        for row in range(3):
            alone = self._call(layer, {name: value[row] for name, value in inputs.items()})
            self._same(together[row], alone, f"row {row} of a batch of 3 and the same sequence alone")

    @cases("what", ["causality"])
    def test_causality(self, what: str) -> None:
        """Each state depends on the places on which the family's own does, and on no other: on none after it, on the block as the variant
        sees it, on the context as far as a window goes back."""
        layer, reference = self._built(), self._reference(torch.float64)
        inputs, others = (self._reference().probe(6, seed) for seed in (4, 5))
        whole, due = self._call(layer, inputs), reference.prefill(_double(inputs))
        for place, changed in self._kind.variations(inputs, others):
            seen = self._rows_that_differ(self._call(layer, changed), whole, _SAME)
            must = self._rows_that_differ(reference.prefill(_double(changed)), due, _SAME)
            if wrong := [row for row in range(len(must)) if seen[row] != must[row]]:
                verb = "depend on" if seen[wrong[0]] else "are the same whatever is in"
                raise ContractError(f"states {wrong} {verb} {place}; those that depend on it are {_places(must)}")

    @cases("what", ["position-shift"])
    def test_shift(self, what: str) -> None:
        """Only differences of positions count."""
        layer, inputs = self._built(), self._reference().probe(6, 6)
        if (reason := self._kind.inapplicable.get(what)) is not None:
            pytest.skip(f"{self.family} cannot have {what}: {reason}")
        # Positions from 1 on: what stands at 0 may be treated apart.
        here, there = self._kind.shifted(inputs, 1), self._kind.shifted(inputs, 38)
        self._same(self._call(layer, there), self._call(layer, here), "states 37 positions further on")

    @cases("dtype", {f"large-inputs-{dtype}": dtype for dtype in ("float32", "bfloat16")})
    def test_large(self, dtype: str) -> None:
        """Inputs of about 64 give finite states."""
        kind = getattr(torch, dtype)
        got = self._call(self._built(kind), self._reference(kind).probe(5, 7, scale=_LARGE))
        if not bool(got.isfinite().all()):
            raise ContractError(f"{int((~got.isfinite()).sum())} of {got.numel()} states are not finite in {dtype}")

    # --- building blocks ---

    def _decode(self, cuts: Sequence[int], *, seed: int) -> None:
        layer, inputs = self._built(), self._reference().probe(cuts[-1], seed)
        others = self._reference().probe(cuts[-1], seed + 100)
        tools = Tools(call=self._call, commit=self.commit, new_cache=self.new_cache)
        pieces = self._kind.decode(layer, inputs, others, cuts, tools)
        self._same(pieces, self._call(layer, inputs), f"decoding in pieces cut at {list(cuts)}")

    @property
    def _kind(self) -> LayerKind:
        return _kind(self.family, json.dumps(self._config), self.layer)

    @property
    def _config(self) -> dict[str, Any]:
        return tiny_config(self.family) if self.config is None else dict(self.config)

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Drawn in bfloat16, so that they are the same numbers in every dtype."""
        found = random_tensors(self._config, self.family, seed=8, dtype="bfloat16")
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}

    def _built(self, dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
        return self.build(self._config, self._weights(dtype))

    def _reference(self, dtype: torch.dtype = torch.float32) -> ReferenceLayer:
        return _reference(self.family, self._config, self.layer, self._weights(dtype))

    def _call(self, layer: Callable[..., Tensor], inputs: Mapping[str, Tensor | None], cache: Any = None) -> Tensor:
        more = {"cache": cache} if self._kind.caches else {}
        return layer(**inputs, **more).detach()

    def _rows_that_differ(self, got: Tensor, due: Tensor, least: float) -> list[bool]:
        if got.shape != due.shape:
            raise ContractError(f"states are {tuple(got.shape)}; due is {tuple(due.shape)}")
        found: list[bool] = ((got - due).abs().flatten(1).amax(dim=1) > least * due.abs().max()).tolist()
        return found

    def _same(self, got: Tensor, due: Tensor, what: str) -> None:
        if not (distance := self._distance(got, due)) <= _SAME:
            raise ContractError(f"{what}: off by {distance:.1e} of the largest value; at most {_SAME:.1e} is due")

    def _distance(self, got: Tensor, due: Tensor) -> float:
        if got.shape != due.shape:
            raise ContractError(f"states are {tuple(got.shape)}; due is {tuple(due.shape)}")
        return float((got - due).abs().max() / due.abs().max())


def _reference(family: str, config: Mapping[str, Any], layer: int, weights: Mapping[str, Tensor]) -> ReferenceLayer:
    spec, _ = expected_tensors(config, family)
    sheet = next(each for each in FAMILIES if each.name == family)
    return sheet.build_layer(spec, spec.layers[layer], _Weights(weights))


@functools.lru_cache
def _kind(family: str, config: str, layer: int) -> LayerKind:
    """How the family's layers are called; the same for every set of weights."""
    read = json.loads(config)
    reference = _reference(family, read, layer, random_tensors(read, family))
    return kind_of(reference, reference.probe(1, 0))


def _double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def _places(flags: Sequence[bool]) -> list[int]:
    return [place for place, is_set in enumerate(flags) if is_set]


class _Weights(TensorSource):
    """Tensors by canonical name, as a family's builder takes them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def under(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix).removeprefix("."): value
            for name, value in self._tensors.items()
            if name == prefix or name.startswith(f"{prefix}.")
        }
