"""DFlare: a mix of the taps per layer, and context projections of their own.

What these catch: a softmax over the layers in place of the taps; one layer's mix given to another; the context projected by the block's
weights, or the block by the context's; a norm left out. Right values from NumPy in float64. AngelSlim, the only public code that runs this
head, is not a package that installs, so a separate computation stands in for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_family_forward import (
    CONTEXT,
    FULL_VIEW,
    Array,
    Weights,
    attention,
    close,
    inputs,
    mlp,
    numbers,
    places,
    rms,
    softmaxed,
    tensor,
    written,
)

from pytest_specdecode.families.dflare import DFlare
from pytest_specdecode.testing import expected_tensors, tiny_config

CONFIGS = Path(__file__).parents[1] / "corpus" / "configs"


def dflare(w: Weights, layer: int, block: Array, context: Array, positions: Array, ahead: Array) -> Array:
    """A DFlash layer whose K and V of the context go by `k_proj_target` and `v_proj_target`.

    Both kinds of rows are laid side by side: a key reads [row, 0] or [0, row] by weights [block's, context's].
    """
    name = f"layers.{layer}."
    normed = rms(block, w[name + "input_layernorm.weight"], 1e-6)
    nothing = np.zeros_like
    keys = np.concatenate(
        [np.concatenate([nothing(context), context], -1), np.concatenate([normed, nothing(normed)], -1)]
    )
    both = dict(w)
    for key in ("k", "v"):
        stem = f"{name}self_attn.{key}_proj"
        both[f"{stem}.weight"] = np.concatenate([w[f"{stem}.weight"], w[f"{stem}_target.weight"]], -1)
    query = f"{name}self_attn.q_proj.weight"
    both[query] = np.concatenate([w[query], nothing(w[query])], -1)
    queries = np.concatenate([normed, nothing(normed)], -1)
    where = np.concatenate([ahead, positions])
    attended = attention(both, layer, queries, keys, positions, where, FULL_VIEW, 1000000.0, head_norm_eps=1e-6)
    x = block + attended
    return x + mlp(w, layer, rms(x, w[name + "post_attention_layernorm.weight"], 1e-6))


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer(tmp_path: Path, layer: int) -> None:
    draft, w = written(tmp_path, "dflare")
    block, context, positions, ahead = inputs()
    built: Any = draft.layer(layer, dtype=torch.float64)
    due = dflare(w, layer, block, context, positions, ahead)
    close(built.forward(tensor(block), places(positions), tensor(context), places(ahead)), due)


def test_every_layer_mixes_the_taps_by_its_own_softmax(tmp_path: Path) -> None:
    draft, w = written(tmp_path, "dflare")
    taps = numbers(4, CONTEXT, 3, 64)
    weights = softmaxed(w["layer_fusion_weights"], np.ones((2, 3), dtype=bool))
    model = DFlare().build_model(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[arg-type]
    context = model.context(tensor(taps))
    assert context.shape == (CONTEXT, 2, 64)
    for layer in (0, 1):
        mixed = sum(weights[layer, index] * taps[:, index] for index in range(3))
        close(model.layer_context(context, layer), rms(np.asarray(mixed), w["hidden_norm.weight"], 1e-6))


def test_the_published_configuration() -> None:
    config = json.loads((CONFIGS / "dflare--angelslim-qwen3-4b.json").read_text())
    spec, tensors = expected_tensors(config, "dflare")
    shapes = {item.name: item.shape for item in tensors if item.need == "required"}
    assert shapes["layer_fusion_weights"] == (7, 9)
    for index in range(7):
        for name in ("k_proj", "v_proj", "k_proj_target", "v_proj_target"):
            assert shapes[f"layers.{index}.self_attn.{name}.weight"] == (1024, 2560)
    assert not [name for name in shapes if name.startswith("fc.")]
    assert spec.block is not None
    assert (spec.block.block_size, spec.block.mask_token_id) == (16, 151669)


def test_biases_of_the_context_projections_go_by_attention_bias(tmp_path: Path) -> None:
    draft, _ = written(tmp_path, "dflare", attention_bias=True)
    layer: Any = draft.layer(0, dtype=torch.float64)
    assert layer.self_attn.kv_proj_target.bias.shape == (128,)
    shapes = {item.name: item.need for item in expected_tensors(tiny_config("dflare"), "dflare")[1]}
    assert shapes["layers.0.self_attn.k_proj_target.bias"] == "never"


def test_there_is_no_stacked_path_and_the_reason_is_said(tmp_path: Path) -> None:
    draft, _ = written(tmp_path, "dflare")
    assert "mixes the taps anew for every layer" in str(draft.fused_kv_reason)
