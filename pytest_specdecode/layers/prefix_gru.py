"""Domino's correction of a block's logits by a recurrent state over the tokens before each row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_specdecode.errors import DraftError
from pytest_specdecode.layers.linear import Linear, take


class PrefixGRU(nn.Module):
    """A one-layer GRU without biases (Cho et al. 2014, gates ordered reset, update, new as in torch).

    Args:
        tensors: by local name: `weight_ih_l0` `[3 * hidden, in]` and `weight_hh_l0` `[3 * hidden, hidden]`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, in_features: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.ih = Linear(take(tensors, "weight_ih_l0", (3 * hidden, in_features)), name="weight_ih_l0")
        self.hh = Linear(take(tensors, "weight_hh_l0", (3 * hidden, hidden)), name="weight_hh_l0")

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """The state `[..., hidden]` after one more input `[..., in]`."""
        r_in, z_in, n_in = self.ih(x).chunk(3, dim=-1)
        r_state, z_state, n_state = self.hh(state).chunk(3, dim=-1)
        reset, update = torch.sigmoid(r_in + r_state), torch.sigmoid(z_in + z_state)
        new = torch.tanh(n_in + reset * n_state)
        return (1 - update) * new + update * state

    def forward(self, inputs: Tensor) -> Tensor:
        """States `[..., T, hidden]` after each of `inputs` `[..., T, in]`, from a zero state."""
        state = inputs.new_zeros(*inputs.shape[:-2], self.hidden)
        states: list[Tensor] = []
        for step in range(inputs.shape[-2]):
            state = self.step(inputs[..., step, :], state)
            states.append(state)
        return torch.stack(states, dim=-2)


class DominoHead(nn.Module):
    """`logits[r] += W2 silu(W1 [h[r], s[r]])`, s[r] the GRU's state over the embeddings of all tokens before the one that row r drafts.

    The rows before `suffix_start` keep their logits (SpecForge's Domino).

    Args:
        gru: the recurrence, over `hidden_size` features.
        projection: tensors by local name: `0.weight` `[emb_dim, hidden_size + gru.hidden]`, `2.weight` `[rows, emb_dim]`.
        shift_label: row r drafts the token behind position r (True) or the token at it, row 0 being the anchor (False).
        pure_draft_prefix_len: drafting rows that keep their logits.

    Raises:
        LayerBuildError: a tensor is missing or of another shape.
    """

    def __init__(
        self,
        gru: PrefixGRU,
        projection: Mapping[str, Tensor],
        *,
        hidden_size: int,
        emb_dim: int,
        rows: int,
        shift_label: bool,
        pure_draft_prefix_len: int,
    ) -> None:
        super().__init__()
        self.prefix_gru = gru
        width = hidden_size + gru.hidden
        self.down = Linear(take(projection, "0.weight", (emb_dim, width)), name="embed_proj.0.weight")
        self.up = Linear(take(projection, "2.weight", (rows, emb_dim)), name="embed_proj.2.weight")
        self.shift_label = shift_label
        self.suffix_start = pure_draft_prefix_len + (0 if shift_label else 1)

    def forward(self, logits: Tensor, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """The corrected logits `[..., B, rows]` of a block.

        Args:
            logits: `[..., B, rows]`.
            hidden: `[..., B, hidden_size]`, after the final norm.
            embeddings: `[..., B, hidden_size]`: the block's tokens, the anchor first. Without `shift_label` the last is not looked at.
        """
        if embeddings.shape != hidden.shape:
            raise DraftError(
                f"embeddings of {list(embeddings.shape)} beside states of {list(hidden.shape)}",
                key="embeddings",
                got=tuple(embeddings.shape),
                due=tuple(hidden.shape),
            )
        states = self.prefix_gru(embeddings)
        if not self.shift_label:
            states = states.roll(1, dims=-2)
        first = self.suffix_start
        correction = self.up(F.silu(self.down(torch.cat([hidden, states], dim=-1)[..., first:, :])))
        return torch.cat([logits[..., :first, :], logits[..., first:, :] + correction], dim=-2)
