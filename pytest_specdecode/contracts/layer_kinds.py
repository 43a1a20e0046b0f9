"""The three ways in which a draft's layers are called, and what each makes of a property.

A stepping layer reads one state per position and keeps them in a cache; a block layer drafts some rows at once over a context that others
computed, and keeps the context alone; a row layer (a head, or one that reads the target's own keys and values) keeps nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from pytest_specdecode.families.base import ReferenceLayer
from pytest_specdecode.families.stepping import SteppingLayer

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Tools:
    """How a subject is called.

    Attributes:
        call: (layer, inputs, cache) to states.
        commit: (layer, context, positions, cache), for block layers.
        new_cache: of a layer.
    """

    call: Callable[[Any, Mapping[str, Tensor | None], Any], Tensor]
    commit: Callable[..., object]
    new_cache: Callable[[Any], Any]


class LayerKind(ABC):
    """One way to be called.

    Attributes:
        inapplicable: by property, why a layer of this kind cannot have it.
        caches: whether `cache` is among the arguments.
    """

    inapplicable: ClassVar[Mapping[str, str]] = {}
    caches: ClassVar[bool] = True

    @abstractmethod
    def variations(self, inputs: Inputs, others: Inputs) -> Iterator[tuple[str, Inputs]]:
        """`inputs` with the states of one place each taken from `others`, and that place in words."""

    @abstractmethod
    def decode(self, layer: Any, inputs: Inputs, others: Inputs, cuts: Sequence[int], tools: Tools) -> Tensor:
        """The layer's states for `inputs`, computed in the pieces between `cuts` through one cache."""

    def shifted(self, inputs: Inputs, by: int) -> Inputs:
        """The same at positions `by` further on."""
        return {name: value + by if name.endswith("positions") else value for name, value in inputs.items()}


class Stepping(LayerKind):
    """eagle1, eagle3, eagle3-mla, peagle, eagle4, mtp, Hydra's decoder layers."""

    def variations(self, inputs: Inputs, others: Inputs) -> Iterator[tuple[str, Inputs]]:
        """Token by token."""
        for token in range(inputs["positions"].shape[-1]):
            yield f"token {token}", _replaced(inputs, others, token, [name for name in inputs if name != "positions"])

    def decode(self, layer: Any, inputs: Inputs, others: Inputs, cuts: Sequence[int], tools: Tools) -> Tensor:
        """Piece after piece, each of which the cache keeps."""
        cache = tools.new_cache(layer)
        return torch.cat(
            [
                tools.call(layer, {name: value[start:end] for name, value in inputs.items()}, cache)
                for start, end in pairwise(cuts)
            ]
        )


class Block(LayerKind):
    """dflash and its relatives, dspark, xpress."""

    def variations(self, inputs: Inputs, others: Inputs) -> Iterator[tuple[str, Inputs]]:
        """Every token of the context, every row of the block."""
        for name, what in (("context", "context token"), ("block", "block row")):
            for place in range(len(inputs[name])):
                yield f"{what} {place}", _replaced(inputs, others, place, [name])

    def decode(self, layer: Any, inputs: Inputs, others: Inputs, cuts: Sequence[int], tools: Tools) -> Tensor:
        """The context in pieces, and between them a block that is drafted and dropped, as one is whose tokens were rejected."""
        cache = tools.new_cache(layer)
        nothing = {"context": None, "context_positions": None}
        for start, end in pairwise(cuts):
            tools.commit(layer, inputs["context"][start:end], inputs["context_positions"][start:end], cache)
            drafted = {"block": others["block"], "positions": inputs["positions"] - cuts[-1] + end, **nothing}
            tools.call(layer, drafted, cache)
        return tools.call(layer, {"block": inputs["block"], "positions": inputs["positions"], **nothing}, cache)


class RowByRow(LayerKind):
    """medusa, Hydra's heads, mlp-speculator, gemma4-assistant."""

    inapplicable: ClassVar[Mapping[str, str]] = {
        "position-shift": "the layer rotates no keys of its own, so there is no difference of positions to keep"
    }
    caches: ClassVar[bool] = False
    _given = ("k", "v")

    def variations(self, inputs: Inputs, others: Inputs) -> Iterator[tuple[str, Inputs]]:
        """Row by row; keys and values of the target, where the layer reads them, are one place."""
        own = [name for name in inputs if name not in (*self._given, "positions")]
        for row in range(len(inputs[own[0]])):
            yield f"row {row}", _replaced(inputs, others, row, own)
        if "k" in inputs:
            yield "the target's keys and values", {**inputs, **{name: others[name] for name in self._given}}

    def decode(self, layer: Any, inputs: Inputs, others: Inputs, cuts: Sequence[int], tools: Tools) -> Tensor:
        """Rows apart from each other."""
        return torch.cat(
            [
                tools.call(
                    layer,
                    {name: value if name in self._given else value[start:end] for name, value in inputs.items()},
                    None,
                )
                for start, end in pairwise(cuts)
            ]
        )


def kind_of(layer: ReferenceLayer, inputs: Inputs) -> LayerKind:
    """How a layer is called, told from its reference and what that is probed with."""
    if isinstance(layer, SteppingLayer):
        return Stepping()
    return Block() if "block" in inputs else RowByRow()


def _replaced(inputs: Inputs, others: Inputs, place: int, names: Sequence[str]) -> Inputs:
    changed = {name: inputs[name].clone() for name in names}
    for name in names:
        changed[name][place] = others[name][place]
    return {**inputs, **changed}
