"""What layers share that decode token by token: one position after another, over a cache of what came before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_specdecode.families.base import ReferenceLayer

if TYPE_CHECKING:
    import torch


class SteppingLayer(ReferenceLayer):
    """A layer over one state per position (or several), and the positions.

    Attributes:
        reads: names of the states, `[T, H]` or `[B, T, H]` each, in the order of `forward`'s first arguments.
        forward: the new states for the states that `reads` names, `positions` and a cache.
        probed_norm: a norm over H, which gives the width, dtype and device of a probe.
    """

    reads: ClassVar[tuple[str, ...]] = ("embeds", "hidden")
    forward: Callable[..., torch.Tensor]

    @property
    def probed_norm(self) -> Any:
        """The layer's input norm, as a rule."""
        return self.input_layernorm  # type: ignore[attr-defined]

    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, torch.Tensor]:
        """Random states and positions 0, 1, …"""
        from pytest_specdecode.families.building import positions_like, random_states

        states = random_states(self.probed_norm.weight, len(self.reads), tokens, seed, scale, batch)
        return {**dict(zip(self.reads, states, strict=True)), "positions": positions_like(states[0])}

    def prefill(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One call over all positions."""
        return self.forward(*(inputs[name] for name in self.reads), inputs["positions"])

    def incremental(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A prefix of half the positions, then one position a call."""
        import torch

        from pytest_specdecode.families.building import new_cache

        cache = new_cache(self.self_attn)
        tokens = inputs["positions"].shape[-1]
        cuts = [0, *range(max(1, tokens // 2), tokens + 1)]
        pieces = [
            self.forward(
                *(inputs[name][..., start:end, :] for name in self.reads), inputs["positions"][..., start:end], cache
            )
            for start, end in itertools.pairwise(cuts)
        ]
        return torch.cat(pieces, dim=-2)
