"""Train a small target and three drafts for it, and record what a draft needs to be replayed without the target.

    python examples/tiny-pair/train.py            # about a quarter of an hour on two cores; rewrites the directories beside this file
    python examples/tiny-pair/train.py --steps 2 --out DIR    # seconds; the files are whole, the models know nothing

The target reads bytes and is trained on the text of this repository. It is written as Hugging Face's Qwen3. The drafts are what serving
engines load: an EAGLE3 head with a reduced vocabulary, one with latent attention, and a DFlash draft of blocks of eight. They are built,
trained and run as the library's own reference layers, so that what is trained is what `open_draft` computes.

A trace is a text that the target has written by greedy decoding from a prompt that it never saw, with the states that a draft taps:
`trace/hs_<i>.safetensors` in the layout that speculators writes for offline training. `README.md` beside this file describes it.

Weights are rounded to bfloat16 before anything is derived from them: the drafts are trained on the rounded target and the trace is
recorded from it, both in float32 arithmetic. Of the prompts only those are kept whose replay no rounding can change: the target's two best
logits are apart everywhere, and the drafts propose the same tokens from the states as they are and as the trace stores them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_specdecode import open_draft, testing
from pytest_specdecode.families import Draft
from pytest_specdecode.families.building import new_cache

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

#: Bytes are their own ids; after them come the end of a text and DFlash's mask.
EOS, MASK = 256, 257

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "vocab_size": 258,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}

#: The states entering layers 1, 2 and 3, which are the outputs of layers 0, 1 and 2. They are consecutive so that a trace, with the
#: embedding before them and the last state behind, also holds what a reading shifted by one would tap.
BOUNDARIES, OUTPUTS = [1, 2, 3], [0, 1, 2]

#: What the two EAGLE3 heads have in common. Both places of the ids are stated, each in the counting of those who read it.
_EAGLE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "vocab_size": 258,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": BOUNDARIES,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": OUTPUTS, "use_aux_hidden_state": True},
    "norm_before_residual": False,
    "num_target_layers": 4,
}

DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_EAGLE,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "draft_vocab_size": 96,
    },
    "eagle3-mla": {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        **_EAGLE,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "draft_vocab_size": 258,
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": 258,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "is_causal": False,
        "layer_types": ["full_attention", "full_attention"],
        "dtype": "bfloat16",
        "block_size": 8,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": OUTPUTS, "block_size": 8},
    },
}

PARTS = ["target", *DRAFTS, "trace"]

#: Tokens that an EAGLE3 chain proposes in a round, and the steps that it is trained for.
CHAIN = 4

#: Tokens of a prompt.
PROMPT = 48


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is done.

    Attributes:
        target_steps, eagle_steps, dflash_steps: optimiser steps.
        length: tokens of a text, its prompt among them.
        texts: continuations that the drafts learn from.
        candidates: prompts tried for the trace.
        tokens, least: about how many tokens are recorded, and the fewest generated ones in a text.
        margin: the target's best logit must lead by this wherever it chose a recorded token.
        picky: end a text before it goes round in a loop, and leave out those that rounding may change. Untrained models give no others.
    """

    target_steps: int = 600
    eagle_steps: int = 300
    dflash_steps: int = 450
    length: int = 208
    texts: int = 1536
    candidates: int = 192
    tokens: int = 1800
    least: int = 64
    margin: float = 0.02
    picky: bool = True


def smoke(steps: int) -> Plan:
    """As little as still passes through every part."""
    return Plan(
        target_steps=steps,
        eagle_steps=steps,
        dflash_steps=steps,
        length=80,
        texts=16,
        candidates=16,
        tokens=150,
        least=4,
        margin=1e-4,
        picky=False,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, record, measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="where the five directories go")
    parser.add_argument(
        "--steps", type=int, help="optimiser steps of each model, for a trial run; the default trains in full"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=PARTS,
        default=PARTS,
        help="parts to make; the others are taken as they lie in --out",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    plan = Plan() if options.steps is None else smoke(options.steps)
    begun = time.perf_counter()
    learnt, held_out = repository_text()
    print(f"text: {len(learnt)} bytes to learn from, {len(held_out)} held out", flush=True)

    rows = {name: Row(name) for name in options.only}
    with timed(rows, "target"):
        if "target" in rows:
            rows["target"].loss = train_target(options.out / "target", learnt, plan, seed=options.seed)
    target = open_target(options.out / "target")
    if set(DRAFTS) & set(rows):
        texts, _ = continuations(target, windows(learnt, plan.texts, PROMPT, generator(options.seed + 1)), plan.length)
        print(f"{plan.texts} continuations: {time.perf_counter() - begun:.0f} s", flush=True)
    for place, name in enumerate(DRAFTS):
        if name in rows:
            with timed(rows, name):
                train = train_dflash if name == "dflash" else train_eagle
                rows[name].loss = train(options.out / name, name, target, texts, plan, seed=options.seed + 2 + place)

    if "trace" in rows:
        torch.set_num_threads(1)  # One round's matrices are too small to share out.
        with timed(rows, "trace"):
            prompts = windows(held_out, plan.candidates, PROMPT, generator(options.seed + 9))
            drafters = {name: open_drafter(options.out / name, target) for name in DRAFTS}
            traces = choose(target, drafters, prompts, plan)
            record(options.out / "trace", target, traces)
        for name, drafter in drafters.items():
            row = rows.setdefault(name, Row(name))
            row.measured = [speculate(target, drafter, text[:PROMPT], len(text)) for text in traces]
        generated = sum(len(text) - PROMPT for text in traces)
        print(f"{len(traces)} texts, {sum(map(len, traces))} tokens, {generated} of them the target's own")
    report(rows.values(), options.out)
    print(f"{time.perf_counter() - begun:.0f} s in all")


# --- text ---


def repository_text() -> tuple[Tensor, Tensor]:
    """What the models learn from, and what they never see: one file in twelve, chosen by its name. Each file ends in EOS."""
    patterns = ["*.md", "docs/*.md", "pytest_specdecode/**/*.py", "tests/**/*.py", "tools/*.py", "benchmarks/*.py"]
    files = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    parts: tuple[list[int], list[int]] = ([], [])
    for path in files:
        held = zlib.crc32(path.relative_to(ROOT).as_posix().encode()) % 12 == 0
        parts[held].extend([*path.read_bytes(), EOS])
    return torch.tensor(parts[False]), torch.tensor(parts[True])


def windows(text: Tensor, count: int, length: int, chance: torch.Generator) -> Tensor:
    """`count` pieces of the ids `text`, [count, length]."""
    starts = torch.randint(len(text) - length, (count,), generator=chance)
    return text[starts.unsqueeze(1) + torch.arange(length)]


def generator(seed: int) -> torch.Generator:
    """A source of chance of its own, so that no part's draws depend on another's."""
    return torch.Generator().manual_seed(seed)


# --- the target ---


class Target(nn.Module):
    """Qwen3 with the parameter names that transformers gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()
        self.lm_head = nn.Linear(TARGET["hidden_size"], TARGET["vocab_size"], bias=False)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """States [B, T, layers + 1, H], each as it enters a layer and the last before the final norm; and logits [B, T, V]."""
        start = 0 if cache is None else cache.length
        angles = (start + torch.arange(ids.shape[1])).unsqueeze(1) * _frequencies()
        states = [self.embed(ids)]
        for index, layer in enumerate(self.model.layers):
            states.append(layer(states[-1], angles, cache, index))
        if cache is not None:
            cache.length += ids.shape[1]
        return torch.stack(states, dim=2), self.logits(states[-1])

    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] of last states [..., H]."""
        scores: Tensor = self.lm_head(self.model.norm(last))
        return scores

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H]."""
        rows: Tensor = self.model.embed_tokens(ids)
        return rows


class Backbone(nn.Module):
    """The target without its head."""

    def __init__(self) -> None:
        super().__init__()
        width = TARGET["hidden_size"]
        self.embed_tokens = nn.Embedding(TARGET["vocab_size"], width)
        self.layers = nn.ModuleList(TargetLayer() for _ in range(TARGET["num_hidden_layers"]))
        self.norm = nn.RMSNorm(width, eps=TARGET["rms_norm_eps"])


class TargetLayer(nn.Module):
    """One layer of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = TargetAttention(), TargetMLP()
        self.input_layernorm = nn.RMSNorm(TARGET["hidden_size"], eps=TARGET["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(TARGET["hidden_size"], eps=TARGET["rms_norm_eps"])

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None, index: int) -> Tensor:
        """The state [B, T, H] behind this layer."""
        x = x + self.self_attn(self.input_layernorm(x), angles, cache, index)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TargetAttention(nn.Module):
    """Grouped-query attention with a norm on each head of q and k."""

    def __init__(self) -> None:
        super().__init__()
        width, dim, eps = TARGET["hidden_size"], TARGET["head_dim"], TARGET["rms_norm_eps"]
        q_size, kv_size = dim * TARGET["num_attention_heads"], dim * TARGET["num_key_value_heads"]
        self.q_proj = nn.Linear(width, q_size, bias=False)
        self.k_proj = nn.Linear(width, kv_size, bias=False)
        self.v_proj = nn.Linear(width, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None, index: int) -> Tensor:
        """The attention's output [B, T, H] for normed states."""
        q, k, v = (
            project(x).unflatten(-1, (-1, TARGET["head_dim"])).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(self.q_norm(q), angles), _rotate(self.k_norm(k), angles)
        if cache is not None:
            k, v = cache.joined(index, k, v)
        rows, columns = q.shape[2], k.shape[2]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class TargetMLP(nn.Module):
    """The gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        width, wide = TARGET["hidden_size"], TARGET["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down_proj = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] for normed states."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Cache:
    """The target's keys and values of the first `length` tokens; what lies behind is written over."""

    def __init__(self) -> None:
        self.length = 0
        self.rooms: dict[int, Tensor] = {}

    def joined(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of layer `layer` with those of the new tokens behind them."""
        end = self.length + k.shape[2]
        room = self.rooms.get(layer)
        if room is None or room.shape[3] < end:
            wider = k.new_empty(2, *k.shape[:2], max(2 * end, 256), k.shape[3])
            if room is not None:
                wider[:, :, :, : self.length] = room[:, :, :, : self.length]
            room = self.rooms[layer] = wider
        room[:, :, :, self.length : end] = torch.stack([k, v])
        return room[0, :, :, :end], room[1, :, :, :end]


def _frequencies() -> Tensor:
    dim = TARGET["head_dim"]
    inverse: Tensor = TARGET["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
    return inverse


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def train_target(directory: Path, text: Tensor, plan: Plan, *, seed: int) -> float:
    """Train and write the target, its weights rounded; the last loss in nats a byte."""
    torch.manual_seed(seed)
    target, chance = Target(), generator(seed)
    for name, weight in target.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=1.0 if "embed" in name else 0.5 / math.sqrt(weight.shape[1]))

    def loss() -> Tensor:
        ids = windows(text, 16, plan.length + 1, chance)
        _, logits = target(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    last = optimise("target", dict(target.named_parameters()), loss, steps=plan.target_steps, rate=4e-3)
    tensors = {name: weight.detach().bfloat16() for name, weight in target.state_dict().items()}
    testing.write_checkpoint(directory, TARGET, tensors)
    return last


def open_target(directory: Path) -> Target:
    """The target in `directory`, in float32."""
    target = Target()
    target.load_state_dict({name: value.float() for name, value in load_file(directory / "model.safetensors").items()})
    return target.requires_grad_(False)


@torch.no_grad()
def continuations(target: Target, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Greedy continuations of prompts [N, P]: ids [N, length], and by how much each token behind the prompt led, [N, length - P]."""
    found, leads = [], []
    for part in torch.split(prompts, 256):
        cache, ids, lead = Cache(), part, []
        _, logits = target(part, cache)
        while ids.shape[1] < length:
            best = logits[:, -1].topk(2)
            lead.append(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], dim=1)
            _, logits = target(ids[:, -1:], cache)
        found.append(ids)
        leads.append(torch.stack(lead, dim=1))
    return torch.cat(found), torch.cat(leads)


# --- training the drafts ---


#: Matrices that stand between ids and states.
_OUTER = re.compile("embed_tokens|lm_head")


def optimise(
    name: str, weights: Mapping[str, nn.Parameter], loss: Callable[[], Tensor], *, steps: int, rate: float
) -> float:
    """Minimise `loss`: a short rise of the rates, then a straight fall to a twentieth. The mean of the last losses.

    Matrices between hidden states go by Muon, which learns from half the steps; embeddings, heads and norms by AdamW.
    """
    inner = [weight for name, weight in weights.items() if weight.ndim == 2 and not _OUTER.search(name)]
    outer = [weight for name, weight in weights.items() if weight.ndim != 2 or _OUTER.search(name)]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, lr=2 * rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.97), weight_decay=0.0),
    ]
    rise = max(1, min(20, steps // 4))
    rates = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min((step + 1) / rise, 1 - 0.95 * step / steps))
        for each in optimisers
    ]
    seen: list[float] = []
    start = time.perf_counter()
    for step in range(steps):
        for each in optimisers:
            each.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for optimiser, schedule in zip(optimisers, rates, strict=True):
            optimiser.step()
            schedule.step()
        seen.append(value.item())
        if step % 25 == 24:
            spent = time.perf_counter() - start
            print(f"{name}: step {step + 1} of {steps}, loss {_mean(seen[-25:]):.3f}, {spent:.0f} s", flush=True)
    return _mean(seen[-25:])


def fresh(directory: Path, name: str, *, seed: int) -> Draft:
    """An untrained draft, written to `directory` in float32 and opened."""
    testing.write_tiny(directory, name, config=DRAFTS[name], seed=seed, dtype="float32")
    return open_draft(directory)


def trainable(parts: Mapping[str, object]) -> dict[str, nn.Parameter]:
    """The weights of the reference layers in `parts`, by the tensor's name: a part's prefix, its module's name, the parameter's own.

    The library freezes what it reads from a file; here the weights are thawed.
    """
    found = {
        f"{prefix}{module}.{name}": weight
        for prefix, part in parts.items()
        for module, value in vars(part).items()
        if isinstance(value, nn.Module)
        for name, weight in value.named_parameters()
    }
    for weight in found.values():
        weight.requires_grad_(True)
    return found


def write_draft(
    directory: Path, name: str, weights: Mapping[str, Tensor], maps: Mapping[str, Tensor] | None = None
) -> None:
    """Write the trained draft, rounded, by its family's own names; joined projections are parted."""
    config = DRAFTS[name]
    tensors: dict[str, Tensor] = dict(maps or {})
    for tensor, weight in weights.items():
        value = weight.detach().bfloat16()
        if not tensor.endswith("qkv_proj.weight"):
            tensors[tensor] = value
            continue
        sizes = [config["head_dim"] * config[key] for key in ("num_attention_heads", *["num_key_value_heads"] * 2)]
        for letter, part in zip("qkv", torch.split(value, sizes), strict=True):
            tensors[tensor.replace("qkv_proj", f"{letter}_proj")] = part
    testing.write_checkpoint(directory, config, tensors, rename=testing.stored_names(config, name))


def train_eagle(directory: Path, name: str, target: Target, texts: Tensor, plan: Plan, *, seed: int) -> float:
    """An EAGLE3 head, latent attention or not, trained on its own recycled states for `CHAIN` steps; the last loss."""
    maps = reduced(texts, DRAFTS[name]["draft_vocab_size"])
    draft = fresh(directory, name, seed=seed)
    assert draft.family is not None
    assert draft.spec is not None
    layer: Any = draft.layer(0, dtype=torch.float32)
    head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))
    weights = trainable({"": head, "layers.0.": layer})
    kept = maps["t2d"].nonzero().squeeze(1)
    chance = generator(seed)
    rows = texts.shape[1] - CHAIN
    past, own = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.eye(rows, dtype=torch.bool)

    def loss() -> Tensor:
        ids = texts[torch.randint(len(texts), (12,), generator=chance)]
        with torch.no_grad():
            states, logits = target(ids)
            embeds = target.embed(ids)
        hidden = head.fuse(taps(states))[:, :rows]
        cache, total = new_cache(layer.self_attn), torch.zeros(())
        for step in range(CHAIN):
            # Row i reads token i + 1 + step. A chain sees the true states up to where it begins, and of the steps only its own.
            here = slice(1 + step, 1 + step + rows)
            seen = torch.cat([past, *[own] * step], dim=1)
            hidden = eagle_layer(layer, embeds[:, here], hidden, torch.arange(rows) + step, cache, seen)
            due = logits[:, here]
            counted = maps["t2d"][due.argmax(-1)]
            each = F.cross_entropy(head.logits(hidden)[counted], due[counted][:, kept].softmax(-1), reduction="mean")
            total = total + 0.8**step * each
            hidden = head.recycled(hidden)
        return total / sum(0.8**step for step in range(CHAIN))

    last = optimise(name, weights, loss, steps=plan.eagle_steps, rate=4e-3)
    stored = maps if draft.spec.vocabulary.is_reduced else None
    write_draft(directory, name, weights, stored)
    check_equal(layer, open_draft(directory).layer(0, dtype=torch.float32))
    return last


def eagle_layer(
    layer: Any, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: Any, seen: Tensor | None = None
) -> Tensor:
    """`layer.forward` with a mask, which serving never needs: many chains are trained at once."""
    normed = layer.hidden_norm(hidden)
    states = torch.cat([layer.input_layernorm(embeds), normed], dim=-1)
    attended = hidden + layer.self_attn(states, positions, cache=cache, mask=seen)
    out: Tensor = attended + layer.mlp(layer.post_attention_layernorm(attended))
    return out


def reduced(texts: Tensor, size: int) -> dict[str, Tensor]:
    """The `size` most frequent ids, the end of a text among them, as `d2t` (offsets) and `t2d`."""
    counts = torch.bincount(texts.flatten(), minlength=TARGET["vocab_size"])
    counts[EOS] = texts.numel()
    images = counts.sort(descending=True, stable=True).indices[:size].sort().values
    chosen = torch.zeros(TARGET["vocab_size"], dtype=torch.bool)
    chosen[images] = True
    return {"d2t": images - torch.arange(size), "t2d": chosen}


def train_dflash(directory: Path, name: str, target: Target, texts: Tensor, plan: Plan, *, seed: int) -> float:
    """A DFlash draft, trained on blocks behind random anchors in the generated part of the texts; the last loss."""
    draft = fresh(directory, name, seed=seed)
    model = open_block_model(draft)
    weights = trainable({"": model, **{f"layers.{index}.": layer for index, layer in enumerate(model.layers)}})
    chance = generator(seed)
    block, blocks, length = DRAFTS[name]["block_size"], 16, texts.shape[1]
    inside = torch.eye(blocks, dtype=torch.bool).repeat_interleave(block, 0).repeat_interleave(block, 1)
    worth = torch.exp(-torch.arange(block - 1) / 4.0)

    def loss() -> Tensor:
        ids = texts[torch.randint(len(texts), (12,), generator=chance)]
        with torch.no_grad():
            states, _ = target(ids)
        anchors = PROMPT + torch.randperm(length - block - PROMPT, generator=chance)[:blocks]
        positions = anchors.unsqueeze(1) + torch.arange(block)
        masked = ids[:, positions].clone()
        masked[:, :, 1:] = MASK
        # A block sees the context before its anchor, and itself both ways.
        before = torch.arange(length) < anchors.repeat_interleave(block).unsqueeze(1)
        seen = torch.cat([before, inside], dim=1)
        hidden = block_states(model, target.embed(masked.flatten(1)), positions.flatten(), states, seen)
        logits = target.lm_head(hidden).unflatten(1, (blocks, block))[:, :, 1:]
        each = F.cross_entropy(logits.flatten(0, 2), ids[:, positions[:, 1:]].flatten(), reduction="none")
        return (each.view(-1, block - 1) * worth).sum(-1).mean() / worth.sum()

    last = optimise(name, weights, loss, steps=plan.dflash_steps, rate=4e-3)
    write_draft(directory, name, weights)
    again = open_block_model(open_draft(directory))
    for layer, other in zip(model.layers, again.layers, strict=True):
        check_equal(layer, other)
    check_block(again, target, texts[:1])
    return last


def block_states(model: Any, rows: Tensor, positions: Tensor, states: Tensor, seen: Tensor) -> Tensor:
    """`model.forward` with a mask: many blocks are trained at once."""
    context = model.context(states[:, :, BOUNDARIES])
    places = torch.arange(context.shape[1])
    for layer in model.layers:
        both = (context, places)
        normed = layer.input_layernorm(rows)
        rows = rows + layer.self_attn(normed, positions, context=both, causal=layer.is_causal, mask=seen)
        rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
    out: Tensor = model.norm(rows)
    return out


def open_block_model(draft: Draft) -> Any:
    """The DFlash draft's whole backbone, in float32."""
    family: Any = draft.family
    return family.build_model(draft.spec, draft.source(dtype=torch.float32))


def taps(states: Tensor) -> Tensor:
    """The tapped states [..., K * H] side by side, from all states [..., layers + 1, H]."""
    return states[..., BOUNDARIES, :].flatten(-2)


@torch.no_grad()
def check_equal(trained: Any, opened: Any) -> None:
    """What was trained is what `open_draft` computes, up to the rounding of the weights; and nothing of it was lost."""
    inputs = trained.probe(16, seed=1)
    one, other = trained.prefill(inputs), opened.prefill(inputs)
    error = ((one - other).norm() / one.norm()).item()
    assert error < 0.02, f"the layer that was written differs from the trained one by {error:.3f}"


@torch.no_grad()
def check_block(model: Any, target: Target, ids: Tensor) -> None:
    """The masked pass of the training gives what the model's own forward gives for one block."""
    states, _ = target(ids)
    anchor, block = PROMPT, DRAFTS["dflash"]["block_size"]
    positions = anchor + torch.arange(block)
    rows = target.embed(torch.tensor([[ids[0, anchor].item()] + [MASK] * (block - 1)]))
    seen = torch.cat([torch.arange(ids.shape[1]).expand(block, -1) < anchor, torch.ones(block, block).bool()], dim=1)
    masked = block_states(model, rows, positions, states, seen)
    plain = model.forward(rows, positions, states[:, :anchor, BOUNDARIES], torch.arange(anchor))
    assert torch.allclose(masked, plain, atol=1e-4), (masked - plain).abs().max()


# --- greedy speculative decoding ---


@dataclass(kw_only=True)
class Decoded:
    """A text that was decoded with a draft.

    Attributes:
        ids: the whole text, prompt included.
        proposed: the tokens that the draft proposed, round by round.
        gained: tokens that each round added: those accepted, and the target's own.
    """

    ids: list[int]
    proposed: list[list[int]] = field(default_factory=list)
    gained: list[int] = field(default_factory=list)


class EagleDrafter:
    """Proposes a chain of tokens; its cache holds the entries (token i + 1, state i) of all that is known."""

    def __init__(self, draft: Draft, target: Target) -> None:
        assert draft.family is not None
        assert draft.spec is not None
        self.target = target
        self.layer: Any = draft.layer(0, dtype=torch.float32)
        self.head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))
        self.d2t = draft.tensor("d2t") if draft.spec.vocabulary.is_reduced else None

    def begin(self) -> None:
        """Forget the last text."""
        self.cache = new_cache(self.layer.self_attn)

    def read(self, ids: Sequence[int], states: Tensor) -> None:
        """Take the states [n, layers + 1, H] of the newest tokens but the last one of `ids`, which has none yet."""
        start = len(ids) - 1 - len(states)
        tokens = torch.tensor(ids[start + 1 :])
        positions = start + torch.arange(len(states))
        self.last = self.layer.forward(self.target.embed(tokens), self.head.fuse(taps(states)), positions, self.cache)[
            -1:
        ]
        self.position = positions[-1:]

    def propose(self) -> list[int]:
        """`CHAIN` tokens; the entries of the chain are not kept."""
        cache, hidden, position = copy.copy(self.cache), self.last, self.position
        tokens = [self._best(hidden)]
        while len(tokens) < CHAIN:
            position = position + 1
            hidden = self.layer.forward(
                self.target.embed(torch.tensor(tokens[-1:])), self.head.recycled(hidden), position, cache
            )
            tokens.append(self._best(hidden))
        return tokens

    def _best(self, hidden: Tensor) -> int:
        index = int(self.head.logits(hidden)[0].argmax())
        return index if self.d2t is None else index + int(self.d2t[index])


class DFlashDrafter:
    """Proposes a block at once; its context is all that is known but the newest token, the anchor."""

    def __init__(self, draft: Draft, target: Target) -> None:
        assert draft.spec is not None
        self.target, self.model = target, open_block_model(draft)
        self.block = DRAFTS["dflash"]["block_size"]

    def begin(self) -> None:
        """Forget the last text."""
        self.taps = torch.empty(0, len(BOUNDARIES), TARGET["hidden_size"])

    def read(self, ids: Sequence[int], states: Tensor) -> None:
        """As `EagleDrafter.read`."""
        self.taps = torch.cat([self.taps, states[:, BOUNDARIES]])
        self.anchor = ids[-1]

    def propose(self) -> list[int]:
        """`block_size - 1` tokens."""
        known = len(self.taps)
        rows = self.target.embed(torch.tensor([self.anchor] + [MASK] * (self.block - 1)))
        hidden = self.model.forward(rows, known + torch.arange(self.block), self.taps, torch.arange(known))
        found: list[int] = self.model.logits(hidden[1:], self.target.lm_head.weight).argmax(-1).tolist()
        return found


def open_drafter(directory: Path, target: Target) -> EagleDrafter | DFlashDrafter:
    """What proposes for the draft in `directory`."""
    draft = open_draft(directory)
    assert draft.spec is not None
    return (DFlashDrafter if draft.spec.family == "dflash" else EagleDrafter)(draft, target)


@torch.no_grad()
def speculate(
    target: Target, drafter: EagleDrafter | DFlashDrafter, prompt: Sequence[int], length: int, *, rounded: bool = False
) -> Decoded:
    """Decode to `length` tokens: the draft proposes, the target keeps the tokens that it would have chosen and adds one of its own.

    Args:
        target: the target.
        drafter: what proposes.
        prompt: the first tokens.
        length: of the whole; the last round may reach beyond it and is counted in full.
        rounded: give the draft the states as the trace stores them.
    """
    cache, found = Cache(), Decoded(ids=list(prompt))
    states, logits = target(torch.tensor([found.ids]), cache)
    found.ids.append(int(logits[0, -1].argmax()))
    drafter.begin()
    while True:
        drafter.read(found.ids, states[0].half().float() if rounded else states[0])
        if len(found.ids) >= length:
            return found
        proposed = drafter.propose()
        states, logits = target(torch.tensor([[found.ids[-1], *proposed]]), cache)
        chosen = logits[0].argmax(-1).tolist()
        gained = 1
        while gained <= len(proposed) and proposed[gained - 1] == chosen[gained - 1]:
            gained += 1
        found.ids += chosen[:gained]
        found.proposed.append(proposed)
        found.gained.append(gained)
        cache.length = len(found.ids) - 1
        states = states[:, :gained]


# --- the trace ---


def choose(
    target: Target, drafters: Mapping[str, EagleDrafter | DFlashDrafter], prompts: Tensor, plan: Plan
) -> list[list[int]]:
    """The texts of the trace: greedy continuations, cut where the target hardly decided, that every draft replays alike."""
    ids, leads = continuations(target, prompts, plan.length)
    found: list[list[int]] = []
    for text, lead in zip(ids.tolist(), leads, strict=True):
        tight = (lead < plan.margin).nonzero().flatten().tolist()
        whole = text[: PROMPT + (tight[0] if tight else len(lead))]
        if EOS in whole:
            whole = whole[: whole.index(EOS)]
        if plan.picky:
            whole = whole[: PROMPT + _fresh(whole[PROMPT:])]
        if len(whole) - PROMPT < plan.least:
            continue
        alike = [_alike(target, drafter, whole) for drafter in drafters.values()]
        if all(alike) or not plan.picky:
            found.append(whole)
        if sum(map(len, found)) >= plan.tokens:
            break
    assert found, "no candidate can be recorded"
    return found


def _alike(target: Target, drafter: EagleDrafter | DFlashDrafter, text: Sequence[int]) -> bool:
    """Whether the draft proposes the same from rounded states; the text itself must come out of it whatever it proposes."""
    plain, rounded = (speculate(target, drafter, text[:PROMPT], len(text), rounded=value) for value in (False, True))
    for decoded in (plain, rounded):
        assert decoded.ids[: len(text)] == list(text), "speculative decoding gave another text than plain decoding"
    return plain.proposed == rounded.proposed


def _fresh(text: Sequence[int]) -> int:
    """Tokens before a continuation goes round in a loop, which any draft predicts: before a run of 24 comes for the second time."""
    seen: set[tuple[int, ...]] = set()
    for place in range(len(text) - 23):
        run = tuple(text[place : place + 24])
        if run in seen:
            return place
        seen.add(run)
    return len(text)


@torch.no_grad()
def record(directory: Path, target: Target, texts: Iterable[Sequence[int]]) -> None:
    """Write `hs_<i>.safetensors`: the text, the tapped states and the last one before the final norm, and which tokens are the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("hs_*.safetensors"):
        stale.unlink()
    for index, text in enumerate(texts):
        ids = torch.tensor(text)
        states, _ = target(ids.unsqueeze(0))
        stored = states[0, :, [*BOUNDARIES, TARGET["num_hidden_layers"]]].half()
        mask = torch.arange(len(text)) >= PROMPT
        chosen = target.logits(stored[:, -1].float()).argmax(-1)
        assert torch.equal(chosen[:-1][mask[1:]], ids[1:][mask[1:]]), "the last state does not give the recorded token"
        tensors = {"token_ids": ids, "hidden_states": stored.contiguous(), "loss_mask": mask}
        file = directory / f"hs_{index}.safetensors"
        # What speculators leaves to the draft's configuration, so that a configuration with other taps is found out.
        said = {"format": "pt", "layer_ids": json.dumps(BOUNDARIES), "last_state": "raw", "prompt_length": str(PROMPT)}
        save_file(tensors, file, metadata=said)
        file.chmod(0o644)


# --- what came of it ---


@dataclass
class Row:
    """A line of the table."""

    name: str
    seconds: float = 0.0
    loss: float | None = None
    measured: list[Decoded] = field(default_factory=list)

    def cells(self, out: Path) -> Iterator[str]:
        """The line's cells, by `COLUMNS`."""
        yield f"{self.seconds:.0f} s"
        yield "" if self.loss is None else f"{self.loss:.3f}"
        yield f"{sum(file.stat().st_size for file in (out / self.name).iterdir()) / 1e6:.2f} MB"
        if self.measured:
            gained = [count for text in self.measured for count in text.gained]
            yield f"{_mean(gained):.2f}"
            yield f"{_mean([count > 1 for count in gained]):.2f}"
            yield str(len(gained))


#: Accepted: tokens a round, the target's own among them. First: share of rounds whose first proposed token was right.
COLUMNS = ("time", "loss", "size", "accepted", "first", "rounds")


def report(rows: Iterable[Row], out: Path) -> None:
    """Print the table."""
    print("\n" + " " * 12 + "".join(f"{column:>10}" for column in COLUMNS))
    for row in rows:
        print(f"{row.name:12}" + "".join(f"{cell:>10}" for cell in row.cells(out)))


@contextmanager
def timed(rows: Mapping[str, Row], name: str) -> Iterator[None]:
    """Note how long the part `name` took, where it is made."""
    start = time.perf_counter()
    yield
    if name in rows:
        rows[name].seconds = time.perf_counter() - start


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
