"""What the K/V path and the latent path have in common around their kernels: the stacked weights, when they are taken anew, and the GEMM.

A path says which layers it takes (`_validated`) and where their rows and norms are (`_source`); `path.py` and `latent_path.py` have the
rest, the kernel and what is handed out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pytest_specdecode.fused_kv.inputs import RopeTable, checked_positions, chosen_backend, weight_versions
from pytest_specdecode.fused_kv.stack import norm_eps_of, norm_kind_of


class StackedPath(ABC):
    """A path whose layers' projections of the context are joined into one matrix.

    What a subclass's `_validated` reads of itself it sets before this constructor is called.
    """

    #: The word by which a message names the path.
    _path: ClassVar[str]

    facts: tuple[Any, ...]

    def __init__(
        self,
        layers: Sequence[Any],
        rotary_emb: Any,
        device: torch.device | str,
        max_position_hint: int | None,
        backend: Literal["auto", "triton", "eager"],
    ) -> None:
        self.rotary_emb = rotary_emb
        self.device = torch.device(device)
        self.max_position_hint = max_position_hint
        self.backend = chosen_backend(backend)
        self.refresh_weights(layers)
        self._table = RopeTable(rotary_emb, self._path)
        if max_position_hint is not None:
            self._table.reach(max(max_position_hint - 1, 0), served=False)

    def refresh_weights(self, layers: Sequence[Any]) -> None:
        """Take the weights anew, from these layers, which are validated as at construction.

        Weights changed in place are noticed by `materialize` without this, except where they were written through `.data`.
        """
        self.facts = self._validated(layers)
        self._layers = tuple(layers)
        self._stack()
        self._versions = self._weight_versions()

    @abstractmethod
    def _validated(self, layers: Sequence[Any]) -> tuple[Any, ...]:
        """The layers' facts; raises the first reason why they are no stack."""

    @abstractmethod
    def _source(self, attn: Any) -> tuple[Any, slice, Any]:
        """Of a layer's attention: the projection of the context, those of its rows that are stacked, and the norm of what they give."""

    def _stack(self) -> None:
        weights, biases, norms, epsilons = [], [], [], []
        for layer in self._layers:
            projection, rows, norm = self._source(layer.self_attn)
            weights.append(projection.weight.detach()[rows].to(self.device))
            bias = getattr(projection, "bias", None)
            if bias is not None:
                biases.append(bias.detach()[rows].to(self.device, weights[0].dtype))
            norm_weight = norm.weight.detach().to(self.device, torch.float32)
            norms.append(1.0 + norm_weight if norm_kind_of(norm) == "gemma" else norm_weight)
            epsilons.append(norm_eps_of(norm))
        self.num_layers = len(weights)
        self.hidden_size = int(weights[0].shape[1])
        self.dtype = weights[0].dtype
        self._weight = torch.cat(weights).T.contiguous()
        self._bias = torch.cat(biases) if biases else None
        self._norm_weight = torch.stack(norms)
        self._eps = torch.tensor(epsilons, dtype=torch.float32, device=self.device)

    def _weight_versions(self) -> list[tuple[int, int, int]]:
        tensors = []
        for layer in self._layers:
            projection, _, norm = self._source(layer.self_attn)
            tensors += [projection.weight, getattr(projection, "bias", None), norm.weight]
        return weight_versions(tensors)

    def _ready(self, ctx_hidden: Tensor, positions: Tensor) -> Tensor:
        """The positions as one row, once they and the context are checked, the table has their rows and the weights are the layers'."""
        positions = checked_positions(ctx_hidden, positions, self.hidden_size, self._path)
        self._table.serve(positions)
        if self._weight_versions() != self._versions:
            self.refresh_weights(self._layers)
        return positions

    def _projected(self, ctx_hidden: Tensor) -> Tensor:
        """The GEMM, bias included: `[T, hidden_size]` to `[T, L, rows of a layer]`."""
        flat = (
            torch.mm(ctx_hidden, self._weight)
            if self._bias is None
            else torch.addmm(self._bias, ctx_hidden, self._weight)
        )
        return flat.view(ctx_hidden.shape[0], self.num_layers, self._weight.shape[1] // self.num_layers)
