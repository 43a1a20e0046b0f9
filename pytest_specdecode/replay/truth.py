"""Which recorded tokens a draft can be measured by.

Under greedy verification the target keeps a drafted token exactly where it would have chosen it itself. So a recorded text stands in for
the target where each token is the target's greedy choice, and only there: in a text from elsewhere, or one that was sampled, a draft that
agrees with the target is marked wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pytest_specdecode.replay.traces import Recording

Basis = Literal["loss mask", "prompt length", "recomputed", "recorded text"]

#: Of the tokens that a file calls the target's own, how many are asked of the target where it is at hand.
_ASKED = 64
#: Logits that are held at once.
_LOGITS = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the target chooses along one recording.

    Attributes:
        due: int64 [T], the target's choice at each position.
        follows: bool [T], whether the recorded token is that choice, so that a draft may be accepted past it.
        limits: int64 [T], how many tokens drafted behind position p can be compared; 0 where p is no anchor.
        basis: how it is known; after `recorded text` it is not, and only agreement is measured.
        confirmed: where a file calls tokens the target's own and the target is at hand, the share of those asked that it does choose.
    """

    due: Tensor
    follows: Tensor
    limits: Tensor
    basis: Basis
    confirmed: float | None = None

    def spans(self) -> list[tuple[int, int]]:
        """Runs of tokens that are the target's, each from its first position to behind its last."""
        edges = torch.diff(self.follows.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().flatten()
        return [(int(start), int(end)) for start, end in edges.view(-1, 2)]


def known(recording: Recording, greedy: Callable[[Tensor], Tensor] | None) -> Truth:
    """The truth along `recording`.

    Args:
        recording: the recording.
        greedy: from last states [n, Ht], as recorded, to the ids that the target chooses behind them; asked of every token where the file
            does not say which are the target's own, and of a few where it does. None where the target's head and norm are not at hand.
    """
    tokens = recording.tokens
    inner = torch.ones(len(tokens), dtype=torch.bool)
    inner[0] = False
    if recording.own is not None:
        basis: Basis = "loss mask" if recording.own_by == "loss mask" else "prompt length"
        own = recording.own & inner
        confirmed = None if greedy is None or recording.last is None else _confirmed(tokens, own, recording.last, greedy)
        return Truth(due=tokens, follows=own, limits=_limits(own, own), basis=basis, confirmed=confirmed)
    if greedy is None or recording.last is None:
        return Truth(due=tokens, follows=inner, limits=_limits(inner, inner), basis="recorded text")
    due = torch.cat([tokens[:1], greedy(recording.last[:-1])])
    follows = (due == tokens) & inner
    # Where the text leaves the target's choice, the choice is still known, and what is drafted there can be compared with it.
    return Truth(due=due, follows=follows, limits=_limits(follows, inner), basis="recomputed")


def best(logits: Callable[[Tensor], Tensor], states: Tensor, width: int) -> Tensor:
    """The greedy ids behind `states` [n, H], whose logits are `width` wide, a part at a time."""
    rows = max(1, _LOGITS // max(1, width))
    parts = [logits(part).argmax(dim=-1) for part in torch.split(states, rows)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=states.device)


def _confirmed(tokens: Tensor, own: Tensor, last: Tensor, greedy: Callable[[Tensor], Tensor]) -> float | None:
    places = own.nonzero().flatten()
    places = places[:: max(1, len(places) // _ASKED)]
    return float((greedy(last[places - 1]) == tokens[places]).double().mean()) if len(places) else None


def _limits(follows: Tensor, comparable: Tensor) -> Tensor:
    """How far behind each position a draft can be compared: to the end of its run, and one further where the choice is known there."""
    going, known = follows.tolist(), comparable.tolist()
    found = [0] * len(going)
    for place in range(len(going) - 2, -1, -1):
        if known[place + 1]:
            found[place] = 1 + (found[place + 1] if going[place + 1] else 0)
    return torch.tensor([count if going[place] else 0 for place, count in enumerate(found)])
