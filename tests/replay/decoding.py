"""Speculative decoding as an engine does it, one round after another, with a target small enough to run: what a replay is held against.

Nothing of `pytest_specdecode.replay` is used here. Layers are the library's reference layers, driven through their own caches one row at a
time; everything around them is written out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pytest_specdecode import open_draft
from pytest_specdecode.families import Draft
from pytest_specdecode.families.building import new_cache
from pytest_specdecode.testing import write_checkpoint

WIDE = torch.float64
HIDDEN = 64


class Target:
    """A recurrent model: causal, greedy, and with as many states a token as are tapped, each of its own making.

    Its weights but the recurrence are written as a checkpoint, for what drafts share with it.
    """

    def __init__(self, taps: int, vocab: int, seed: int, width: int = HIDDEN) -> None:
        chance = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=chance, dtype=WIDE)

        self.taps, self.vocab, self.width = taps, vocab, width
        self.embedding = normal(vocab, width)
        self.recur, self.lift = (
            normal(width, width) / math.sqrt(width),
            normal(taps + 1, width, width) / math.sqrt(width),
        )
        self.norm = 1 + normal(width) / 4
        self.head = normal(vocab, width)
        self._run: list[tuple[int, Tensor]] = []

    def states(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Taps [T, K, H] and last states [T, H] before the final norm; what is known of the last text's beginning is not run again."""
        same = 0
        while same < min(len(tokens), len(self._run)) and self._run[same][0] == tokens[same]:
            same += 1
        del self._run[same:]
        for place in range(same, len(tokens)):
            # The place keeps a greedy text from going round in circles.
            beat = torch.cos(torch.arange(self.width, dtype=WIDE) * (place + 1))
            before = self._run[-1][1] if self._run else torch.zeros(self.width, dtype=WIDE)
            hidden = torch.tanh(self.recur @ before + self.embedding[tokens[place]] + beat)
            self._run.append((tokens[place], hidden))
        both = torch.einsum("khj,tj->tkh", self.lift, torch.stack([hidden for _, hidden in self._run]))
        return both[:, :-1], both[:, -1]

    def normed(self, last: Tensor) -> Tensor:
        return last / torch.sqrt((last * last).mean(-1, keepdim=True) + 1e-6) * self.norm

    def greedy(self, last: Tensor) -> Tensor:
        return (self.normed(last) @ self.head.T).argmax(-1)

    def continued(self, prompt: Sequence[int], length: int) -> list[int]:
        """The plain greedy text."""
        tokens = list(prompt)
        while len(tokens) < length:
            tokens.append(int(self.greedy(self.states(tokens)[1][-1])))
        return tokens

    def write(self, directory: Path) -> Path:
        config = {"model_type": "llama", "hidden_size": self.width, "vocab_size": self.vocab, "rms_norm_eps": 1e-6}
        tensors = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
            "lm_head.weight": self.head,
            "model.layers.0.never.weight": torch.full((4,), math.nan),
        }
        return write_checkpoint(directory, config, tensors)

    def record(self, file: Path, tokens: Sequence[int], *, prompt: int | None, last: bool = True) -> None:
        """The trace of a text."""
        taps, final = self.states(tokens)
        states = torch.cat([taps, final[:, None]], dim=1) if last else taps
        tensors = {"token_ids": torch.tensor(tokens), "hidden_states": states.contiguous()}
        if prompt is not None:
            tensors["loss_mask"] = (torch.arange(len(tokens)) >= prompt).int()
        save_file(tensors, file)


@dataclass
class Decoded:
    """What a decoding did."""

    tokens: list[int]
    rounds: list[tuple[int, list[int], int]] = field(default_factory=list)


def decode(target: Target, draft: Any, prompt: Sequence[int], length: int, count: int) -> Decoded:
    """Greedy speculative decoding: (start, proposed, accepted) of every round until the text has `length` tokens."""
    tokens = list(prompt)
    tokens.append(int(target.greedy(target.states(tokens)[1][-1])))
    found = Decoded(tokens)
    while len(tokens) < length:
        start = len(tokens) - 1
        taps, last = target.states(tokens[:-1])
        proposed = draft.propose(tokens, taps, target.normed(last), count)
        chosen = target.greedy(target.states([*tokens, *proposed])[1][start:]).tolist()
        accepted = 0
        while accepted < count and proposed[accepted] == chosen[accepted]:
            accepted += 1
        found.rounds.append((start, proposed, accepted))
        tokens += chosen[: accepted + 1]
    return found


class _Slow:
    def __init__(self, path: Path, target: Target) -> None:
        self.draft: Draft = open_draft(path)
        assert self.draft.spec is not None
        self.spec: Any = self.draft.spec
        self.family: Any = self.draft.family
        self.layers: Any = self.draft.layers(dtype=WIDE)
        self.source = self.draft.source(dtype=WIDE)
        stored = {
            name: self.source.under(name)[""]
            for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "token_map")
            if self.source.under(name)
        }
        self.embedding = stored.get("embed_tokens.weight", target.embedding)
        self.head_weight = stored.get("lm_head.weight", target.head)
        self.d2t, self.token_map = stored.get("d2t"), stored.get("token_map")
        self.target = target

    def image(self, logits: Tensor) -> int:
        best = int(logits.argmax())
        if self.token_map is not None:
            return int(self.token_map[best])
        return best if self.d2t is None else best + int(self.d2t[best])


class SlowChain(_Slow):
    """EAGLE-1, EAGLE3, MTP and P-EAGLE, a row at a time through the layers' caches."""

    def __init__(self, path: Path, target: Target) -> None:
        super().__init__(path, target)
        self.head: Any = None if self.spec.family == "mtp" else self.family.build_head(self.spec, self.source)
        self.caches: list[Any] = [new_cache(layer.self_attn) for layer in self.layers]
        self.rows = 0
        self.out: Any = None
        if self.spec.family == "eagle1" and not self.spec.options.own_head:
            self.head_weight = target.head

    def propose(self, tokens: Sequence[int], taps: Tensor, last: Tensor, count: int) -> list[int]:
        if self.spec.family == "mtp" and len(self.layers) > 1:
            return self.in_turn(tokens, last, count)
        eagle3 = self.spec.family.startswith("eagle3") or self.spec.family == "peagle"
        for row in range(self.rows, len(tokens) - 1):
            state = self.head.fuse(taps[row].flatten()) if eagle3 and self.head.fc is not None else last[row]
            self.out = self.step(self.embedding[tokens[row + 1]], state, row, self.caches)
        self.rows = len(tokens) - 1
        found, out, caches = [self.image(self.logits(self.out))], self.out, copy.deepcopy(self.caches)
        for place in range(1, count):
            if self.spec.family == "peagle":
                embed = self.embedding[self.spec.block.mask_token_id]
                state = self.head.fuse(self.head.mask_hidden)
            else:
                embed = self.embedding[found[-1]]
                state = self.head.recycled(out) if eagle3 else out
            out = self.step(embed, state, self.rows - 1 + place, caches)
            found.append(self.image(self.logits(out)))
        return found

    def in_turn(self, tokens: Sequence[int], last: Tensor, count: int) -> list[int]:
        """A layer a token, each over the whole text anew: its row i reads row i of the layer before and one token further."""
        rows, found, hidden = len(tokens) - 1, [], last
        for depth, layer in zip(range(count), self.layers, strict=False):
            known = torch.tensor([*tokens, *found])[depth + 1 : depth + 1 + rows]
            hidden = layer.forward(self.embedding[known], hidden, torch.arange(rows), new_cache(layer.self_attn))
            found.append(self.image(self.logits(hidden[-1])))
        return found

    def step(self, embed: Tensor, state: Tensor, position: int, caches: list[Any]) -> Tensor:
        at, embed, state = torch.tensor([position]), embed[None], state[None]
        if self.spec.family == "eagle1":
            state = self.head.fuse(embed, state)
            for layer, cache in zip(self.layers, caches, strict=True):
                state = layer.forward(state, at, cache)
            found: Tensor = self.head.output(state)[0]
            return found
        for layer, cache in zip(self.layers, caches, strict=True):
            state = layer.forward(embed, state, at, cache)
        return state[0]

    def logits(self, out: Tensor) -> Tensor:
        if self.spec.family == "mtp" and not self.spec.options.own_norm:
            return self.head_weight @ self.target.normed(out)
        if self.spec.family in ("eagle1", "mtp"):
            return self.head_weight @ out
        normed: Tensor = self.head.norm(out)
        return self.head_weight @ normed


class SlowBlock(_Slow):
    """DFlash and its relatives, one block over the whole context anew each round."""

    def __init__(self, path: Path, target: Target) -> None:
        super().__init__(path, target)
        self.model: Any = self.family.build_model(self.spec, self.source)
        heads = ("dflash2", "dspark", "domino")
        self.head: Any = self.family.build_head(self.spec, self.source) if self.spec.family in heads else None

    def propose(self, tokens: Sequence[int], taps: Tensor, last: Tensor, count: int) -> list[int]:
        block = self.spec.block
        from_anchor = block.sample_from_anchor if block.sample_from_anchor is not None else self.spec.family == "dspark"
        rows, anchor = count + (not from_anchor), len(tokens) - 1
        ids = torch.tensor([tokens[-1], *[block.mask_token_id] * (rows - 1)])
        embeds = self.embedding[ids] * block.input_embedding_scale
        hidden = self.model.forward(embeds, anchor + torch.arange(rows), taps[:anchor], torch.arange(anchor))
        if self.spec.family == "dspark":
            own = None if self.head.lm_head is not None else self.head_weight
            found: list[int] = self.head.draft(hidden, tokens[-1], own).tokens.tolist()
            return found
        logits = self.model.logits(hidden, self.head_weight)
        if self.spec.family == "domino":
            return self._domino(logits, hidden, tokens[-1], count)
        if not from_anchor:
            logits, hidden = logits[1:], hidden[1:]
        if self.spec.family == "dflash2":
            chosen: list[int] = self.head(logits, hidden, torch.tensor(tokens[-1])).tolist()
            return chosen
        return [self.image(row) for row in logits]

    def _domino(self, logits: Tensor, hidden: Tensor, anchor: int, count: int) -> list[int]:
        """The whole block is corrected again for every token that is drafted; what is not drafted yet is not looked at."""
        found: list[int] = []
        first = len(logits) - count
        for row in range(count):
            known = [anchor, *found, *[0] * (len(logits) - 1 - len(found))]
            corrected = self.head(logits, hidden, self.embedding[torch.tensor(known)])
            found.append(self.image(corrected[first + row]))
        return found
