"""The reference forward of one draft layer.

What these catch: the residual taken after the norm, or before it, against the flag; hidden state first and embedding second; a norm left
out, applied twice or with another's weight; DFlash's context normed once too often; positions that are row numbers; a block that sees the
future, or a causal one that does not see the past; layers from 1 on that read an embedding; MLA with its rotary lanes first, in the other
style, or at the wrong scale. The right values come from the formulas written out below in NumPy, in float64, one head at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import FusedKVError, LayerBuildError
from pytest_specdecode.families import Draft, load
from pytest_specdecode.fused_kv import fused_kv_reference
from pytest_specdecode.layers import KVCache
from pytest_specdecode.testing import tiny_config, write_tiny

Array = NDArray[np.float64]
Weights = Mapping[str, Array]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 32
TOKENS = 5


def written(
    directory: Path, family: str, *, config: dict[str, Any] | None = None, **changes: Any
) -> tuple[Draft, Weights]:
    """A tiny draft on disk in float32, and its tensors in float64."""
    config = tiny_config(family, **changes) if config is None else config
    draft = load(Checkpoint.open(write_tiny(directory, family, config=config, seed=3, dtype="float32")))
    assert draft.binding is not None
    return draft, {name: draft.tensor(name).to(torch.float64).numpy() for name in draft.binding.stored}


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def rms(x: Array, weight: Array, eps: float) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return scaled


def silu(x: Array) -> Array:
    gated: Array = x / (1 + np.exp(-x))
    return gated


def turned(x: Array, positions: Array, theta: float, *, neox: bool = True) -> Array:
    """RoPE over all lanes of `x` [T, dim]: pairs (i, i + dim/2), or (2i, 2i + 1)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    first, second = (slice(None, half), slice(half, None)) if neox else (slice(0, None, 2), slice(1, None, 2))
    out = np.empty_like(x)
    out[:, first] = x[:, first] * np.cos(angles) - x[:, second] * np.sin(angles)
    out[:, second] = x[:, second] * np.cos(angles) + x[:, first] * np.sin(angles)
    return out


def softmaxed(scores: Array, visible: NDArray[np.bool_]) -> Array:
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normed: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normed


def attention(
    w: Weights,
    layer: int,
    queries: Array,
    keys: Array,
    q_positions: Array,
    k_positions: Array,
    visible: NDArray[np.bool_],
    theta: float,
    *,
    head_norm_eps: float | None = None,
    neox: bool = True,
) -> Array:
    """Grouped-query attention, one head at a time."""
    name = f"layers.{layer}.self_attn."
    heads = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        rows, kv_rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM), slice(kv * HEAD_DIM, (kv + 1) * HEAD_DIM)
        q = queries @ w[name + "q_proj.weight"][rows].T
        k = keys @ w[name + "k_proj.weight"][kv_rows].T
        v = keys @ w[name + "v_proj.weight"][kv_rows].T
        if head_norm_eps is not None:
            q = rms(q, w[name + "q_norm.weight"], head_norm_eps)
            k = rms(k, w[name + "k_norm.weight"], head_norm_eps)
        q, k = turned(q, q_positions, theta, neox=neox), turned(k, k_positions, theta, neox=neox)
        heads.append(softmaxed(q @ k.T / math.sqrt(HEAD_DIM), visible) @ v)
    out: Array = np.concatenate(heads, axis=-1) @ w[name + "o_proj.weight"].T
    return out


def mlp(w: Weights, layer: int, x: Array) -> Array:
    name = f"layers.{layer}.mlp."
    gated = silu(x @ w[name + "gate_proj.weight"].T) * (x @ w[name + "up_proj.weight"].T)
    out: Array = gated @ w[name + "down_proj.weight"].T
    return out


def past(rows: int, columns: int) -> NDArray[np.bool_]:
    """Row i sees the columns before and at its own, where the rows are the last columns."""
    return np.tril(np.ones((rows, columns), dtype=bool), columns - rows)


def eagle3(
    w: Weights,
    layer: int,
    embeds: Array,
    hidden: Array,
    attend: Callable[[Array], Array],
    *,
    normed_residual: bool,
    eps: float,
) -> Array:
    """One EAGLE3 layer: y = residual + attention; z = y + mlp(norm(y))."""
    name = f"layers.{layer}."
    if layer == 0:
        normed = rms(hidden, w[name + "hidden_norm.weight"], eps)
        states = np.concatenate([rms(embeds, w[name + "input_layernorm.weight"], eps), normed], axis=-1)
        residual = normed if normed_residual else hidden
    else:
        states, residual = rms(hidden, w[name + "input_layernorm.weight"], eps), hidden
    y = residual + attend(states)
    return y + mlp(w, layer, rms(y, w[name + "post_attention_layernorm.weight"], eps))


def close(found: torch.Tensor, due: Array) -> None:
    assert found.dtype == torch.float64
    assert np.abs(due).max() > 0.5
    np.testing.assert_allclose(found.numpy(), due, rtol=0, atol=1e-12)


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


# --- EAGLE3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "normed_residual"),
    [({}, False), ({"norm_before_residual": False}, False), ({"norm_before_residual": True}, True)],
)
@pytest.mark.parametrize("neox", [True, False])
def test_eagle3_layer_zero(tmp_path: Path, changes: dict[str, Any], normed_residual: bool, neox: bool) -> None:
    draft, w = written(tmp_path, "eagle3", is_neox_style=neox, **changes)
    embeds, hidden = numbers(1, TOKENS, HIDDEN), 3 * numbers(2, TOKENS, HIDDEN)
    positions = np.array([7.0, 8, 9, 12, 40])

    def attend(states: Array) -> Array:
        return attention(w, 0, states, states, positions, positions, past(TOKENS, TOKENS), 500000.0, neox=neox)

    due = eagle3(w, 0, embeds, hidden, attend, normed_residual=normed_residual, eps=1e-5)
    layer = draft.layer(0, dtype=torch.float64)
    close(layer.forward(tensor(embeds), tensor(hidden), torch.tensor([7, 8, 9, 12, 40])), due)  # type: ignore[attr-defined]


def test_eagle3_layers_from_one_on_read_the_hidden_state_alone(tmp_path: Path) -> None:
    draft, w = written(tmp_path, "eagle3", num_hidden_layers=2)
    hidden, positions = numbers(2, TOKENS, HIDDEN), np.arange(TOKENS, dtype=float)

    def attend(states: Array) -> Array:
        return attention(w, 1, states, states, positions, positions, past(TOKENS, TOKENS), 500000.0)

    due = eagle3(w, 1, hidden, hidden, attend, normed_residual=False, eps=1e-5)
    layer = draft.layer(1, dtype=torch.float64)
    nothing = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.float64)
    close(layer.forward(nothing, tensor(hidden), torch.arange(TOKENS)), due)  # type: ignore[attr-defined]


def test_eagle3_sliding_window_counts_the_token_itself(tmp_path: Path) -> None:
    draft, w = written(tmp_path, "eagle3", sliding_window=2, use_sliding_window=True)
    embeds, hidden, positions = numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN), np.arange(TOKENS, dtype=float)
    visible = past(TOKENS, TOKENS) & (positions[:, None] - positions[None] < 2)

    def attend(states: Array) -> Array:
        return attention(w, 0, states, states, positions, positions, visible, 500000.0)

    due = eagle3(w, 0, embeds, hidden, attend, normed_residual=False, eps=1e-5)
    layer = draft.layer(0, dtype=torch.float64)
    close(layer.forward(tensor(embeds), tensor(hidden), torch.arange(TOKENS)), due)  # type: ignore[attr-defined]


NOPE, ROPE, VALUE, LATENT = 16, 8, 16, 32


def mla(w: Weights, states: Array, positions: Array, theta: float, scaling: float) -> Array:
    """DeepSeek's latent attention, expanded per head: nope lanes first, interleaved RoPE on the rest."""
    name = "layers.0.self_attn."
    q_latent = rms(states @ w[name + "q_a_proj.weight"].T, w[name + "q_a_layernorm.weight"], 1e-5)
    down = states @ w[name + "kv_a_proj_with_mqa.weight"].T
    latent = rms(down[:, :LATENT], w[name + "kv_a_layernorm.weight"], 1e-5)
    k_rope = turned(down[:, LATENT:], positions, theta, neox=False)
    heads = []
    for head in range(HEADS):
        q = q_latent @ w[name + "q_b_proj.weight"][head * (NOPE + ROPE) : (head + 1) * (NOPE + ROPE)].T
        kv = latent @ w[name + "kv_b_proj.weight"][head * (NOPE + VALUE) : (head + 1) * (NOPE + VALUE)].T
        scores = q[:, :NOPE] @ kv[:, :NOPE].T + turned(q[:, NOPE:], positions, theta, neox=False) @ k_rope.T
        heads.append(softmaxed(scores * scaling, past(len(states), len(states))) @ kv[:, NOPE:])
    out: Array = np.concatenate(heads, axis=-1) @ w[name + "o_proj.weight"].T
    return out


@pytest.mark.parametrize("normed_residual", [True, False])
def test_eagle3_mla(tmp_path: Path, normed_residual: bool) -> None:
    draft, w = written(tmp_path, "eagle3-mla", rope_scaling=None, norm_before_residual=normed_residual)
    embeds, hidden = numbers(1, TOKENS, HIDDEN), 3 * numbers(2, TOKENS, HIDDEN)
    positions = np.array([0.0, 1, 2, 30, 31])

    def attend(states: Array) -> Array:
        return mla(w, states, positions, 50000.0, (NOPE + ROPE) ** -0.5)

    due = eagle3(w, 0, embeds, hidden, attend, normed_residual=normed_residual, eps=1e-5)
    layer = draft.layer(0, dtype=torch.float64)
    close(layer.forward(tensor(embeds), tensor(hidden), torch.tensor([0, 1, 2, 30, 31])), due)  # type: ignore[attr-defined]


def test_eagle3_mla_at_position_zero_is_scaled_by_mscale_squared(tmp_path: Path) -> None:
    """At position 0 no lane turns, so yarn shows in the softmax scale alone: mscale = 0.1 * ln 4 + 1."""
    draft, w = written(tmp_path, "eagle3-mla")
    embeds, hidden, positions = numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN), np.zeros(TOKENS)
    mscale = 0.1 * math.log(4.0) + 1.0

    def attend(states: Array) -> Array:
        return mla(w, states, positions, 50000.0, (NOPE + ROPE) ** -0.5 * mscale**2)

    due = eagle3(w, 0, embeds, hidden, attend, normed_residual=False, eps=1e-5)
    layer = draft.layer(0, dtype=torch.float64)
    close(layer.forward(tensor(embeds), tensor(hidden), torch.zeros(TOKENS, dtype=torch.long)), due)  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [{"q_lora_rank": None}, {"q_lora_rank": ...}])
def test_a_latent_layer_without_its_rank_is_not_built(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write_tiny(tmp_path, "eagle3-mla")
    (path / "config.json").write_text(json.dumps(tiny_config("eagle3-mla", **change)))
    with pytest.raises(LayerBuildError) as caught:
        load(Checkpoint.open(path)).layer(0)
    assert str(caught.value) == "Eagle3 MLA layer requires q_lora_rank in the draft config"


# --- DFlash --------------------------------------------------------------------------------------------------------------

BLOCK, CONTEXT = 4, 6


def dflash(
    w: Weights, layer: int, block: Array, context: Array, positions: Array, ahead: Array, visible: NDArray[np.bool_]
) -> Array:
    """One DFlash layer: the context is read as it is, the block through input_layernorm."""
    name = f"layers.{layer}."
    normed = rms(block, w[name + "input_layernorm.weight"], 1e-6)
    keys, places = np.concatenate([context, normed]), np.concatenate([ahead, positions])
    attended = attention(w, layer, normed, keys, positions, places, visible, 1000000.0, head_norm_eps=1e-6)
    x = block + attended
    return x + mlp(w, layer, rms(x, w[name + "post_attention_layernorm.weight"], 1e-6))


def inputs() -> tuple[Array, Array, Array, Array]:
    """Block, context, and their positions: a block behind a context that starts at 20."""
    ahead = 20.0 + np.arange(CONTEXT)
    return numbers(1, BLOCK, HIDDEN), 3 * numbers(2, CONTEXT, HIDDEN), ahead[-1] + 1 + np.arange(BLOCK), ahead


FULL_VIEW = np.ones((BLOCK, CONTEXT + BLOCK), dtype=bool)


def places(positions: Array) -> torch.Tensor:
    return torch.from_numpy(positions.astype(np.int64))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_dflash_layer(tmp_path: Path, layer: int, causal: bool) -> None:
    draft, w = written(tmp_path, "dflash", is_causal=causal)
    block, context, positions, ahead = inputs()
    visible = past(BLOCK, CONTEXT + BLOCK) if causal else np.ones((BLOCK, CONTEXT + BLOCK), dtype=bool)
    due = dflash(w, layer, block, context, positions, ahead, visible)
    built = draft.layer(layer, dtype=torch.float64)
    places = torch.from_numpy(positions.astype(np.int64)), torch.from_numpy(ahead.astype(np.int64))
    close(built.forward(tensor(block), places[0], tensor(context), places[1]), due)  # type: ignore[attr-defined]
    # The same context through a cache, as committed tokens come.
    cache = KVCache()
    cache.append(*built.self_attn.kv(tensor(context), places[1]), places[1])
    close(built.forward(tensor(block), places[0], cache=cache), due)  # type: ignore[attr-defined]
    assert len(cache) == CONTEXT, "a drafted block is not kept"


@pytest.mark.parametrize("causal", [True, False])
def test_dflash_sliding_window_goes_by_position(tmp_path: Path, causal: bool) -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": causal}
    draft, w = written(tmp_path, "dflash", **sliding)
    block, context, positions, ahead = inputs()
    gap = positions[:, None] - np.concatenate([ahead, positions])[None]
    visible = (np.abs(gap) < 3) & (past(BLOCK, CONTEXT + BLOCK) if causal else True)
    due = dflash(w, 0, block, context, positions, ahead, visible)
    built = draft.layer(0, dtype=torch.float64)
    places = torch.from_numpy(positions.astype(np.int64)), torch.from_numpy(ahead.astype(np.int64))
    close(built.forward(tensor(block), places[0], tensor(context), places[1]), due)  # type: ignore[attr-defined]


def test_dflash_value_scale_is_on_values_of_block_and_context(tmp_path: Path) -> None:
    draft, w = written(tmp_path, "dflash", attention_value_scale=0.5)
    block, context, positions, ahead = inputs()
    halved = {name: value / 2 if name.endswith("v_proj.weight") else value for name, value in w.items()}
    due = dflash(halved, 0, block, context, positions, ahead, np.ones((BLOCK, CONTEXT + BLOCK), dtype=bool))
    built = draft.layer(0, dtype=torch.float64)
    places = torch.from_numpy(positions.astype(np.int64)), torch.from_numpy(ahead.astype(np.int64))
    close(built.forward(tensor(block), places[0], tensor(context), places[1]), due)  # type: ignore[attr-defined]


def test_causality_decides_who_feels_a_change_in_the_block(tmp_path: Path) -> None:
    block, context, positions, ahead = inputs()
    places = torch.from_numpy(positions.astype(np.int64)), torch.from_numpy(ahead.astype(np.int64))
    for causal in (True, False):
        draft, _ = written(tmp_path / str(causal), "dflash", is_causal=causal)
        layer: Any = draft.layer(0, dtype=torch.float64)
        before = layer.forward(tensor(block), places[0], tensor(context), places[1])
        changed = block.copy()
        changed[2] += 1
        after = layer.forward(tensor(changed), places[0], tensor(context), places[1])
        moved = [row for row in range(BLOCK) if not torch.equal(before[row], after[row])]
        assert moved == ([2, 3] if causal else [0, 1, 2, 3])


def test_laguna_stacks_over_contexts_normed_layer_by_layer(tmp_path: Path) -> None:
    """Each layer's own norm, in the path, in the reference, and in the layer's own forward."""
    draft, _ = written(tmp_path, "dflash", architectures=["DFlashLagunaForCausalLM"], is_causal=True)
    layers: Any = draft.layers(dtype=torch.float32)
    context = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 3, 9, 2, 2])
    k, v = draft.fused_kv(layers=layers).compute(context, positions)
    truth_k, truth_v = fused_kv_reference(layers, context, positions)
    for index, layer in enumerate(layers):
        own_k, own_v = layer.self_attn.context_kv(layer.input_layernorm(context), positions)
        for got, due in ((k, own_k), (v, own_v), (truth_k, own_k), (truth_v, own_v)):
            torch.testing.assert_close(got[index].double(), due.double(), rtol=1e-4, atol=1e-5)
    layers[1].context_norm = None
    with pytest.raises(FusedKVError, match="norm of the context mismatch across layers for fused KV path"):
        draft.fused_kv(layers=layers)


# --- probes and building -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla", "dflash"])
def test_probes_run_alone_in_a_batch_and_step_by_step(tmp_path: Path, family: str) -> None:
    draft, _ = written(tmp_path, family)
    (layer, *_) = draft.layers(dtype=torch.float64)
    probe = layer.probe(7, 1)
    whole = layer.prefill(probe)
    assert whole.shape[-1] == HIDDEN
    assert torch.isfinite(whole).all()
    torch.testing.assert_close(layer.incremental(probe), whole, rtol=0, atol=1e-12)
    batch = layer.probe(7, 1, batch=2)
    both = layer.prefill(batch)
    torch.testing.assert_close(layer.incremental(batch), both, rtol=0, atol=1e-12)
    second = {name: value[1] for name, value in batch.items()}
    torch.testing.assert_close(both[1], layer.prefill(second), rtol=0, atol=1e-12)
    assert not torch.equal(whole, layer.prefill(layer.probe(7, 2)))


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla", "dflash"])
def test_layers_are_built_in_the_stored_dtype_or_the_one_asked_for(tmp_path: Path, family: str) -> None:
    draft = load(Checkpoint.open(write_tiny(tmp_path, family)))
    assert draft.layer(0).prefill(draft.layer(0).probe(3, 0)).dtype == torch.bfloat16
    half = draft.layer(0, dtype=torch.float16)
    assert half.prefill(half.probe(3, 0)).dtype == torch.float16
    with pytest.raises(LayerBuildError, match="layer 9"):
        draft.layer(9)


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla", "dflash"])
@pytest.mark.parametrize(
    "name",
    ["mlp.up_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight"],
)
@pytest.mark.parametrize("how", ["missing", "misshapen"])
def test_a_layer_that_cannot_be_built_names_its_tensor(tmp_path: Path, family: str, name: str, how: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        value = tensors.pop(f"layers.0.{name}")
        if how == "misshapen":
            tensors[f"layers.0.{name}"] = value[:-2].clone()

    draft = load(Checkpoint.open(write_tiny(tmp_path, family, edit=edit)))
    with pytest.raises(LayerBuildError) as caught:
        draft.layer(0)
    assert f"layers.0.{name}" in str(caught.value)
