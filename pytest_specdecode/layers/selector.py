"""DFlash2's candidate selector: which of the top candidates of each row go together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pytest_specdecode.layers.linear import Linear, frozen, take


class CandidateSelector(nn.Module):
    """`score(c | p) = logit(c) + sum_r A[p, r] * (P h)_r * B[c, r]`, greedily along the block (DFlash2, z-lab/dflash).

    Args:
        tensors: by local name: `predecessor_codebook` and `successor_codebook` `[vocab_size, rank]`, `hidden_projection.weight`
            `[rank, hidden_size]`.
        hidden_size, vocab_size, rank, top_k: sizes; the selector looks at the `top_k` best tokens of a row.

    Raises:
        LayerBuildError: a tensor is missing or of another shape.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, hidden_size: int, vocab_size: int, rank: int, top_k: int
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = frozen(take(tensors, "predecessor_codebook", (vocab_size, rank)))
        self.successor_codebook = frozen(take(tensors, "successor_codebook", (vocab_size, rank)))
        self.hidden_projection = Linear(
            take(tensors, "hidden_projection.weight", (rank, hidden_size)), name="hidden_projection.weight"
        )

    def scores(self, logits: Tensor, hidden: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """Scores of `candidates` `[..., K]` after `predecessors` `[...]`, from logits `[..., V]` and states `[..., H]`."""
        context = self.predecessor_codebook[predecessors] * self.hidden_projection(hidden)
        edges = (context.unsqueeze(-2) * self.successor_codebook[candidates]).sum(dim=-1)
        found: Tensor = logits.gather(-1, candidates) + edges
        return found

    def forward(self, logits: Tensor, hidden: Tensor, anchor: Tensor) -> Tensor:
        """The drafted ids `[..., R]` for R drafting rows behind the token `anchor` `[...]`.

        Args:
            logits: `[..., R, V]` from the drafting rows, the anchor's row left out.
            hidden: `[..., R, H]`, the rows' states after the final norm.
        """
        candidates = logits.topk(self.top_k, dim=-1).indices
        path: list[Tensor] = []
        previous = anchor
        for row in range(logits.shape[-2]):
            scores = self.scores(logits[..., row, :], hidden[..., row, :], previous, candidates[..., row, :])
            best = scores.argmax(dim=-1, keepdim=True)
            previous = candidates[..., row, :].gather(-1, best).squeeze(-1)
            path.append(previous)
        return torch.stack(path, dim=-1)
