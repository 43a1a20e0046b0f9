"""DFlash2: convolutions along the block, and the selector.

What these catch: a convolution that looks forward, over the edge of the block or at the wrong tap; the output side convolved with the
input side's kernel, or with a kernel made from the sublayer's output; groups that take every n-th channel; a context that is convolved;
a selector with its codebooks swapped, or that follows the wrong predecessor. Right values from NumPy in float64, loop by loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_family_forward import (
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
    tensor,
    written,
)

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.families.dflash2 import DFlash2, DFlash2Options
from pytest_specdecode.layers.conv import GroupedDynamicConv
from pytest_specdecode.testing import expected_tensors, tiny_config

CONFIGS = Path(__file__).parents[1] / "corpus" / "configs"
TAPS, GROUP = 2, 16


def kernels(w: Weights, name: str, x: Array) -> Array:
    """[rows, side, tap, group] from the projection's rows, ordered side, tap, group."""
    made: Array = (x @ w[name + "kernel_projection.weight"].T).reshape(len(x), 2, TAPS, x.shape[1] // GROUP)
    return made


def convolved(w: Weights, name: str, x: Array, made: Array, side: int) -> Array:
    """Channel by channel: the row itself by tap 0, the row before it by tap 1, nothing before the block."""
    out = np.zeros_like(x)
    for row in range(len(x)):
        for channel in range(x.shape[1]):
            for tap in range(TAPS):
                if row >= tap:
                    factor = w[name + "base_kernel"][side, tap, channel] + made[row, side, tap, channel // GROUP]
                    out[row, channel] += factor * x[row - tap, channel]
    return out


def dflash2(w: Weights, layer: int, block: Array, context: Array, positions: Array, ahead: Array) -> Array:
    name = f"layers.{layer}."
    normed = rms(block, w[name + "input_layernorm.weight"], 1e-6)
    made = kernels(w, name + "attention_conv.", normed)
    states = convolved(w, name + "attention_conv.", normed, made, 0)
    keys, where = np.concatenate([context, states]), np.concatenate([ahead, positions])
    attended = attention(w, layer, states, keys, positions, where, FULL_VIEW, 1000000.0, head_norm_eps=1e-6)
    x = block + convolved(w, name + "attention_conv.", attended, made, 1)
    normed = rms(x, w[name + "post_attention_layernorm.weight"], 1e-6)
    made = kernels(w, name + "mlp_conv.", normed)
    inner = mlp(w, layer, convolved(w, name + "mlp_conv.", normed, made, 0))
    return x + convolved(w, name + "mlp_conv.", inner, made, 1)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer(tmp_path: Path, layer: int) -> None:
    draft, w = written(tmp_path, "dflash2")
    block, context, positions, ahead = inputs()
    built: Any = draft.layer(layer, dtype=torch.float64)
    due = dflash2(w, layer, block, context, positions, ahead)
    close(built.forward(tensor(block), places(positions), tensor(context), places(ahead)), due)


def test_the_convolution_ends_at_the_block_and_never_looks_forward() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "base_kernel": torch.randn(2, 3, 8, generator=generator),
        "kernel_projection.weight": torch.randn(12, 8, generator=generator),
    }
    conv = GroupedDynamicConv(tensors, hidden_size=8, taps=3, group_size=4)
    blocks = torch.randn(2, 5, 8, generator=generator)
    whole, made = conv.prepare(blocks)
    assert torch.equal(whole[1], conv.prepare(blocks[1])[0]), "a block sees another"
    moved = blocks.clone()
    moved[:, 2] += 1
    changed = (conv.prepare(moved)[0] != whole).any(-1)[0].tolist()
    assert changed == [False, False, True, True, True]
    short, _ = conv.prepare(blocks[:, :2])
    torch.testing.assert_close(short, whole[:, :2])
    with pytest.raises(DraftError, match="kernels of"):
        conv.finish(blocks[:, :2], made)


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    options = {**DFlash2.tiny["dflash_config"], "conv_group_size": 24}
    with pytest.raises(LayerBuildError, match="conv_group_size 24 does not divide 64 channels"):
        GroupedDynamicConv({}, hidden_size=64, taps=2, group_size=24)
    _, tensors = expected_tensors(tiny_config("dflash2", dflash_config=options), "dflash2")
    shapes = {item.name: item.shape for item in tensors}
    assert shapes["layers.0.mlp_conv.kernel_projection.weight"] == (None, 64)


def test_the_selector_follows_the_best_edge(tmp_path: Path) -> None:
    draft, w = written(tmp_path, "dflash2")
    hidden, logits, anchor, top = numbers(1, 3, 64), numbers(2, 3, 512), 17, 4
    name = "candidate_selector."
    due, previous = [], anchor
    for row in range(3):
        candidates = np.argsort(-logits[row])[:top]
        context = w[name + "predecessor_codebook"][previous] * (w[name + "hidden_projection.weight"] @ hidden[row])
        scores = logits[row, candidates] + w[name + "successor_codebook"][candidates] @ context
        previous = int(candidates[np.argmax(scores)])
        due.append(previous)
    selector = DFlash2().build_head(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[arg-type]
    assert selector(tensor(logits), tensor(hidden), torch.tensor(anchor)).tolist() == due
    assert due != logits.argmax(axis=-1).tolist()


def test_options_stand_in_dflash_config_or_at_the_top() -> None:
    due = DFlash2Options(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
    for name in ("dflash2--zlab-Qwen3.8-27B-DFlash2.json", "speculators-dflash2--Qwen3-8B-shape.json"):
        spec, _ = expected_tensors(json.loads((CONFIGS / name).read_text()), "dflash2")
        assert spec.options == due
        # Two-sided sliding layers in both, and a window that each packaging reads in its own way.
        assert {layer.is_causal for layer in spec.layers} == {False}
        assert {layer.window_reading for layer in spec.layers} == {"anchor" if "speculators" in name else "row"}
    nothing, _ = expected_tensors({"architectures": ["DFlash2DraftModel"]}, "dflash2")
    assert nothing.options == DFlash2Options()


def test_speculators_dflash2_looks_both_ways_where_the_key_is_absent() -> None:
    config = json.loads((CONFIGS / "speculators-dflash2--Qwen3-8B-shape.json").read_text())
    del config["sliding_window_non_causal"]
    spec, _ = expected_tensors(config, "dflash2")
    assert {layer.is_causal for layer in spec.layers} == {False}


def test_the_published_head_is_81_tensors() -> None:
    config = json.loads((CONFIGS / "dflash2--zlab-Qwen3.8-27B-DFlash2.json").read_text())
    shapes = {item.name: item.shape for item in expected_tensors(config, "dflash2")[1] if item.need == "required"}
    assert len(shapes) == 81
    assert shapes["fc.weight"] == (5120, 25600)
    for side in ("attention_conv", "mlp_conv"):
        assert shapes[f"layers.4.{side}.base_kernel"] == (2, 2, 5120)
        assert shapes[f"layers.4.{side}.kernel_projection.weight"] == (1280, 5120)
    assert shapes["candidate_selector.successor_codebook"] == (248320, 256)
    assert shapes["candidate_selector.hidden_projection.weight"] == (256, 5120)


@pytest.mark.parametrize("name", ["predecessor_codebook", "successor_codebook"])
def test_codebooks_go_with_and_without_weight(name: str) -> None:
    for stored in (f"candidate_selector.{name}", f"model.candidate_selector.{name}.weight"):
        assert DFlash2().canonical(stored) == f"candidate_selector.{name}"
    kept = "candidate_selector.hidden_projection.weight"
    assert DFlash2().canonical(kept) == kept


def test_a_missing_part_of_layer_or_head_is_named(tmp_path: Path) -> None:
    draft, _ = written(tmp_path, "dflash2")
    stored = draft.binding.stored  # type: ignore[union-attr]
    del stored["layers.0.mlp_conv.base_kernel"]  # type: ignore[attr-defined]
    del stored["candidate_selector.successor_codebook"]  # type: ignore[attr-defined]
    with pytest.raises(LayerBuildError, match=r"layers\.0\.mlp_conv\.base_kernel"):
        draft.layer(0)
    with pytest.raises(LayerBuildError, match=r"candidate_selector\.successor_codebook"):
        DFlash2().build_head(draft.spec, draft.source())  # type: ignore[arg-type]
