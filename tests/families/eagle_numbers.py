"""EAGLE's arithmetic written out in NumPy, float64, one head at a time: what the reference layers are compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_specdecode.families import Draft

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def weights_of(draft: Draft) -> Weights:
    """Every stored float tensor, by canonical name."""
    assert draft.binding is not None
    return {name: draft.tensor(name).to(torch.float64).numpy() for name in draft.binding.stored}


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def rms(x: Array, weight: Array, eps: float) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return scaled


def layer_norm(x: Array, weight: Array, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled: Array = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps) * weight
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


def attention(
    w: Weights,
    layer: int,
    states: Array,
    positions: Array,
    *,
    heads: int,
    kv_heads: int,
    theta: float,
    window: int | None = None,
    neox: bool = True,
    head_norm_eps: float | None = None,
) -> Array:
    """Causal grouped-query attention over `states` [T, in], with `o_proj`."""
    name = f"layers.{layer}.self_attn."
    width = w[name + "q_proj.weight"].shape[0] // heads
    visible = np.tril(np.ones((len(states), len(states)), dtype=bool))
    if window is not None:
        visible &= positions[:, None] - positions[None] < window
    outputs = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        rows, kv_rows = slice(head * width, (head + 1) * width), slice(kv * width, (kv + 1) * width)
        q, k, v = (
            states @ w[f"{name}{part}_proj.weight"][chosen].T
            + w.get(f"{name}{part}_proj.bias", np.zeros(w[f"{name}{part}_proj.weight"].shape[0]))[chosen]
            for part, chosen in (("q", rows), ("k", kv_rows), ("v", kv_rows))
        )
        if head_norm_eps is not None:
            q, k = rms(q, w[name + "q_norm.weight"], head_norm_eps), rms(k, w[name + "k_norm.weight"], head_norm_eps)
        q, k = turned(q, positions, theta, neox=neox), turned(k, positions, theta, neox=neox)
        scores = np.where(visible, q @ k.T / math.sqrt(width), -np.inf)
        exps = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(exps / exps.sum(axis=-1, keepdims=True) @ v)
    out: Array = np.concatenate(outputs, axis=-1) @ w[name + "o_proj.weight"].T
    return out


def mlp(w: Weights, layer: int, x: Array) -> Array:
    name = f"layers.{layer}.mlp."
    gated = silu(x @ w[name + "gate_proj.weight"].T) * (x @ w[name + "up_proj.weight"].T)
    out: Array = gated @ w[name + "down_proj.weight"].T
    return out


def close(found: torch.Tensor, due: Array) -> None:
    assert found.dtype == torch.float64
    assert np.abs(due).max() > 0.5
    np.testing.assert_allclose(found.numpy(), due, rtol=0, atol=1e-11)
