"""What a draft computes with: its own tensors, read once for all readings of it, and what it shares with its target."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError
from pytest_specdecode.families import Draft
from pytest_specdecode.replay.target_weights import TargetMissingError, TargetWeights
from pytest_specdecode.replay.truth import best
from pytest_specdecode.spec import DraftSpec

#: Families whose engines take the target's head even where the file holds one.
_TARGETS_HEAD = ("eagle1", "mtp")
_IN_PREDICTION_LAYER = {"embed_tokens": "layers.0.embed_tokens.weight", "lm_head": "layers.0.shared_head.head.weight"}


class Weights:
    """The tensors of one draft, and its target's where they are shared.

    It is a `TensorSource` for the families' builders. What it hands out is shared by all who ask, and must not be changed.

    Attributes:
        draft: the draft.
        target: its target's weights, or None.
        dtype, device: of the arithmetic.
    """

    def __init__(
        self, draft: Draft, target: TargetWeights | None, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.draft, self.target, self.dtype, self.device = draft, target, dtype, torch.device(device)
        self._held: dict[str, Tensor] = {}

    def under(self, prefix: str) -> dict[str, Tensor]:
        """As `TensorSource` says; embedding and head, which may be large, are not kept."""
        stored = {} if self.draft.binding is None else self.draft.binding.stored
        return {
            name.removeprefix(prefix).removeprefix("."): self._tensor(name)
            for name in stored
            if (name == prefix or name.startswith(f"{prefix}.")) and name not in _IN_PREDICTION_LAYER.values()
        }

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [..., H] of target ids.

        Raises:
            DraftError: there is no row for one of them.
        """
        return self._looked_up(self._embedding, tokens)

    def entering_first_layer(self, tokens: Tensor) -> Tensor | None:
        """The target's embeddings [..., Ht] of its ids; None where there is no target.

        Raises:
            DraftError: there is no row for one of them.
        """
        return None if self.target is None else self._looked_up(self.target.embedding, tokens)

    @cached_property
    def head(self) -> Tensor:
        """The head's weight [Vd, H] in `dtype`."""
        found = self._head()
        width = self.draft.spec.hidden_size if self.draft.spec is not None else None
        if found.ndim != 2 or (width is not None and found.shape[1] != width):
            raise DraftError(
                f"the head is {list(found.shape)}; rows of {width} are due", path=self.draft.path, key="lm_head.weight"
            )
        return found.to(self.device, self.dtype)

    def images(self, spec: DraftSpec) -> Tensor | None:
        """int64 [Vd], the target id of each draft id as `spec` reads the map; None where there is no map.

        Raises:
            DraftError: it is no list of whole numbers, or there are fewer than the head has rows.
        """
        stored = {} if self.draft.binding is None else self.draft.binding.stored
        name = next((name for name in ("token_map", "d2t") if name in stored), None)
        if name is None:
            return None
        found, rows = self.draft.tensor(name), len(self.head)
        whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
        if not whole or found.ndim != 1 or len(found) < rows:
            kind = str(found.dtype).removeprefix("torch.")
            raise DraftError(
                f"is {kind} {list(found.shape)}; an id for each of the head's {rows} rows is due",
                path=self.draft.path,
                key=name,
                got=list(found.shape),
                due=[rows],
            )
        found = found.long().to(self.device)
        absolute = name == "token_map" or spec.vocabulary.absolute_map
        return found if absolute else found + torch.arange(len(found), device=self.device)

    def normed(self, last: Tensor) -> Tensor:
        """Last states, as they come from the target's last layer, after its final norm."""
        if self.target is None:
            raise TargetMissingError("needs the target's final norm: this draft reads the state behind it")
        return self._final_norm(last)

    def greedy(self, last: Tensor, *, is_normed: bool) -> Tensor:
        """The ids that the target chooses behind last states [n, Ht]."""
        if self.target is None:
            raise TargetMissingError("needs the target's final norm and head")
        head, width = self.target.head.to(self.device, self.dtype), last.shape[-1]
        if head.ndim != 2 or head.shape[1] != width:
            raise DraftError(
                f"the target's head is {list(head.shape)}; rows of {width}, as wide as the recorded states, are due",
                path=self.target.path,
                got=list(head.shape),
                due=["V", width],
            )

        def logits(states: Tensor) -> Tensor:
            states = states.to(self.device, self.dtype)
            return torch.nn.functional.linear(states if is_normed else self._final_norm(states), head)

        return best(logits, last, len(head)).cpu()

    @cached_property
    def _final_norm(self) -> Callable[[Tensor], Tensor]:
        assert self.target is not None
        width = None if self.draft.spec is None else self.draft.spec.target_hidden_size
        return self.target.final_norm(self.dtype, self.device, width=width)

    @cached_property
    def _embedding(self) -> Tensor:
        spec = self.draft.spec
        width = None if spec is None else spec.hidden_size
        own = self._own("embed_tokens")
        if own is not None:
            found = self.draft.tensor(own)
        elif self.target is not None:
            found = self.target.embedding
        else:
            raise TargetMissingError("needs the target's embedding: the draft holds none of its own")
        if found.ndim != 2 or (width is not None and found.shape[1] != width):
            raise DraftError(
                f"the embedding is {list(found.shape)}; rows of {width} are due", key="embed_tokens.weight"
            )
        return found

    def _looked_up(self, embedding: Tensor, tokens: Tensor) -> Tensor:
        least, most = (int(tokens.min()), int(tokens.max())) if tokens.numel() else (0, -1)
        if least < 0 or most >= len(embedding):
            wrong = least if least < 0 else most
            shared = self._own("embed_tokens") is None or embedding is not self._embedding
            raise DraftError(
                f"has {len(embedding)} rows, and none for the id {wrong}",
                path=self.target.path if shared and self.target is not None else self.draft.path,
                key="embed_tokens.weight",
                got=wrong,
                due=f"below {len(embedding)}",
            )
        rows = torch.nn.functional.embedding(tokens.to(embedding.device), embedding)
        return rows.to(self.device, self.dtype)

    def _head(self) -> Tensor:
        spec = self.draft.spec
        assert spec is not None
        own = self._own("lm_head")
        shared = spec.family in _TARGETS_HEAD and not getattr(spec.options, "own_head", False)
        if self.target is not None and (own is None or shared):
            return self.target.head
        if own is not None:
            return self.draft.tensor(own)
        if spec.vocabulary.tie_word_embeddings and not spec.vocabulary.is_reduced:
            return self._embedding
        raise TargetMissingError("needs the target's head: the draft holds none of its own")

    def _own(self, part: str) -> str | None:
        stored = {} if self.draft.binding is None else self.draft.binding.stored
        names = (f"{part}.weight", _IN_PREDICTION_LAYER[part])
        return next((name for name in names if name in stored), None)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._held:
            found = self.draft.tensor(name)
            found = found.to(self.device, self.dtype) if found.is_floating_point() else found.to(self.device)
            if name in ("embed_tokens.weight", "lm_head.weight"):
                return found
            self._held[name] = found
        return self._held[name]
