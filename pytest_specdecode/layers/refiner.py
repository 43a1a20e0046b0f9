"""XPress's refiner: a bias on a block's logits from the tokens that the block held in the round before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_specdecode.layers.linear import Linear, frozen, take


class Refiner(nn.Module):
    """A causal mixer over the rows of a block, in a space of `rank` lanes (speculators 0.9.0, `models/xpress`).

    `x = P [D h, G mean(h), E prev]`; `x[k] += sum_{j <= k} L[:, k, j] * x[j]` lane by lane; `x += down(silu(gate x) * up x)`;
    bias = R x.

    Args:
        tensors: by local name: `token_embed.weight` `[vocab_size, rank]`, `down_h.weight` and `down_g.weight` `[rank, hidden_size]`,
            `in_proj.weight` `[rank, 3 * rank]`, `mix_l` `[rank, block_size, block_size]`, `mlp_gate.weight` and `mlp_up.weight`
            `[inner, rank]`, `mlp_down.weight` `[rank, inner]`, `readout.weight` `[rows, rank]`.

    Raises:
        LayerBuildError: a tensor is missing or of another shape.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        hidden_size: int,
        vocab_size: int,
        rows: int,
        rank: int,
        inner: int,
        block_size: int,
    ) -> None:
        super().__init__()

        def linear(name: str, *shape: int) -> Linear:
            return Linear(take(tensors, f"{name}.weight", shape), name=f"{name}.weight")

        self.block_size = block_size
        self.token_embed = frozen(take(tensors, "token_embed.weight", (vocab_size, rank)))
        self.down_h, self.down_g = linear("down_h", rank, hidden_size), linear("down_g", rank, hidden_size)
        self.in_proj = linear("in_proj", rank, 3 * rank)
        self.mix_l = frozen(take(tensors, "mix_l", (rank, block_size, block_size)))
        self.mlp_gate, self.mlp_up = linear("mlp_gate", inner, rank), linear("mlp_up", inner, rank)
        self.mlp_down = linear("mlp_down", rank, inner)
        self.readout = linear("readout", rows, rank)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """The bias `[..., B, rows]` for the block's states `[..., B, hidden_size]` and the token before each row, `[..., B]`."""
        summary = hidden.mean(dim=-2, keepdim=True).expand_as(hidden)
        x = self.in_proj(torch.cat([self.down_h(hidden), self.down_g(summary), self.token_embed[previous]], dim=-1))
        x = x + torch.einsum("ckj,...jc->...kc", self.mix_l.tril(), x)
        x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
        bias: Tensor = self.readout(x)
        return bias

    def draft(
        self,
        logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        before: Tensor,
        *,
        rounds: int,
        sample_from_anchor: bool = False,
        d2t: Tensor | None = None,
    ) -> Tensor:
        """The logits `[..., B, rows]` after `rounds` rounds, each conditioned on the best tokens of the round before.

        Args:
            logits: `[..., B, rows]`, the backbone's.
            anchor, before: `[...]`: the block's first token, and the token before it.
            sample_from_anchor: row r drafts the token behind position r; else the token at it, row 0 being the anchor.
            d2t: offsets from draft to target ids, applied between rounds.
        """
        anchor, before = anchor.unsqueeze(-1), before.unsqueeze(-1)
        refined = logits
        for _ in range(rounds):
            best = refined.argmax(dim=-1)
            if d2t is not None:
                best = best + d2t[best]
            if sample_from_anchor:
                previous = torch.cat([anchor, best[..., :-1]], dim=-1)
            else:
                previous = torch.cat([before, anchor, best[..., 1:-1]], dim=-1)[..., : best.shape[-1]]
            refined = logits + self(hidden, previous)
        return refined
