"""EAGLE-4: recognition, window, low-rank head, the two forms of the layer's input.

What these catch: an EAGLE-4 file taken for EAGLE3, whose layer it has; a window that is on where the file turns it off, or off where a
lone `sliding_window` turns it on; candidates picked by the exact logits, or scored by the estimate; `attn_norm` ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_numbers import attention, close, mlp, numbers, rms, tensor, weights_of

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.families import Draft, load
from pytest_specdecode.families.eagle4 import Eagle4Head
from pytest_specdecode.spec import GQASpec
from pytest_specdecode.testing import (
    expected_tensors,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_sparse,
    write_tiny,
)

CONFIG = Path(__file__).parents[1] / "corpus" / "configs" / "eagle4--eagle-harness-mi355x-qwen3.8-27b-tp1.json"
TOKENS = 12


def add_factors(tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(9)
    tensors["efficient_lm_head.weight"] = torch.randn(512, 16, generator=generator).to(dtype)
    tensors["efficient_lm_head_down_proj.weight"] = torch.randn(16, 64, generator=generator).to(dtype)


def opened(directory: Path, *, factors: bool = True, **changes: Any) -> Draft:
    edit = add_factors if factors else None
    return open_draft(write_tiny(directory, "eagle4", dtype="float32", seed=4, edit=edit, **changes))


def test_the_published_configuration(tmp_path: Path) -> None:
    config = json.loads(CONFIG.read_text())
    spec, tensors = expected_tensors(config, "eagle4")
    found = {item.name: item.shape for item in tensors if item.need == "required"}
    assert found["fc.weight"] == (5120, 15360)
    assert found["layers.0.self_attn.q_proj.weight"] == (5120, 10240)
    assert found["layers.0.self_attn.k_proj.weight"] == (5120, 10240)
    assert found["lm_head.weight"] == (248320, 5120)
    assert {f"fc_norm.{index}.weight" for index in range(3)} <= found.keys()
    assert "d2t" not in found
    optional = {item.name: item.shape for item in tensors if item.need == "optional"}
    assert optional["efficient_lm_head.weight"] == (248320, 128)
    assert optional["efficient_lm_head_down_proj.weight"] == (128, 5120)
    attention = spec.layers[0].attention
    assert isinstance(attention, GQASpec)
    assert (attention.sliding_window, attention.rope.theta) == (4096, 1e7)
    assert spec.eagle3 is not None
    assert (spec.eagle3.fc_norm, spec.eagle3.norm_output) == (True, True)
    write_sparse(tmp_path, config, "eagle4")
    draft = open_draft(tmp_path)
    assert (draft.recognition.family, draft.recognition.disagreement) == ("eagle4", ())


def test_tensors_or_keys_alone_name_the_family(tmp_path: Path) -> None:
    config = tiny_config("eagle4", architectures=...)
    tensors = random_tensors(config, "eagle4")
    add_factors(tensors, torch.bfloat16)
    assert load(Checkpoint.open(write_checkpoint(tmp_path / "eagle3", config, tensors))).recognition.family == "eagle4"
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "config.json").write_text(json.dumps(config))
    assert load(Checkpoint.open(tmp_path / "keys")).recognition.family == "eagle4"
    labelled = {**config, "architectures": ["LlamaForCausalLMEagle3"]}
    found = load(Checkpoint.open(write_checkpoint(tmp_path / "both", labelled, tensors))).recognition
    assert (found.family, found.disagreement) == ("eagle3", ("eagle3", "eagle4"))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 8),
        ({"layer_types": ["full_attention"]}, None),
        ({"layer_types": ["sliding_attention"], "use_sliding_window": False}, 8),
        ({"layer_types": ..., "use_sliding_window": False}, None),
        ({"layer_types": ..., "use_sliding_window": ...}, 8),
        ({"layer_types": ..., "use_sliding_window": ..., "sliding_window": ...}, None),
    ],
)
def test_window(changes: dict[str, Any], window: int | None) -> None:
    spec, _ = expected_tensors(tiny_config("eagle4", **changes), "eagle4")
    attention = spec.layers[0].attention
    assert isinstance(attention, GQASpec)
    assert attention.sliding_window == window
    assert spec.layers[0].layer_type == ("full_attention" if window is None else "sliding_attention")


@pytest.mark.parametrize("changes", [{}, {"attn_norm": True}, {"fc_norm": ..., "enable_fc_norm": True}])
def test_a_tiny_draft_passes_and_every_broken_tensor_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config("eagle4", **changes)
    whole = random_tensors(config, "eagle4")
    assert "fc_norm.2.weight" in whole
    add_factors(whole, torch.bfloat16)
    report = check_draft(write_checkpoint(tmp_path, config, whole))
    assert not [f"{result.id}: {result.message}" for result in report if result.status == "failed"]
    for name in whole:
        tensors = dict(whole)
        tensors[name] = tensors[name][:-1].clone()
        report = check_draft(
            write_checkpoint(tmp_path, config, tensors), checks=["weights.missing", "weights.shapes", "vocabulary"]
        )
        found = [
            str((result.message, [f.where for f in result.findings])) for result in report if result.status == "failed"
        ]
        assert any(name in text for text in found), (name, found)


def test_more_than_one_layer_is_a_finding(tmp_path: Path) -> None:
    result = check_draft(write_tiny(tmp_path, "eagle4", num_hidden_layers=2), checks=["config"])[
        "config.num-hidden-layers"
    ]
    assert (result.status, result.message) == ("failed", "2 layers; an EAGLE-4 draft has one")


@pytest.mark.parametrize("changes", [{"use_rope": False}, {"position_embedding_type": "none"}, {"enable_moe": True}])
def test_a_form_without_a_reference_forward_is_inconclusive(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert (
        check_draft(write_tiny(tmp_path, "eagle4", **changes), checks=["layers.build"])["layers.build"].status
        == "inconclusive"
    )


def test_names_of_the_trainer_are_known(tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("layers.0.", "midlayer.").replace("fc.weight", "fc.linear.weight")

    config = tiny_config("eagle4")
    write_checkpoint(tmp_path, config, random_tensors(config, "eagle4"), rename=rename)
    draft = open_draft(tmp_path)
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())


@pytest.mark.parametrize("attn_norm", [False, True])
def test_forward(tmp_path: Path, attn_norm: bool) -> None:
    draft = opened(tmp_path, attn_norm=attn_norm, sliding_window=4)
    assert draft.spec is not None
    w, eps = weights_of(draft), 1e-6
    taps, embeds, positions = numbers(1, TOKENS, 192), numbers(2, TOKENS, 64), np.arange(TOKENS, dtype=float) + 5
    head = Eagle4Head(draft.spec, draft.source(dtype=torch.float64))
    layer: Any = draft.layer(0, dtype=torch.float64)
    parts = [rms(taps[:, 64 * i : 64 * i + 64], w[f"fc_norm.{i}.weight"], eps) for i in range(3)]
    g = np.concatenate(parts, axis=-1) @ w["fc.weight"].T
    name = "layers.0."
    n = np.concatenate(
        [rms(embeds, w[name + "input_layernorm.weight"], eps), rms(g, w[name + "hidden_norm.weight"], eps)], axis=-1
    )
    residual, states = g, n
    if attn_norm:
        residual = n @ w[name + "eh_proj.weight"].T
        states = rms(residual, w[name + "pre_attention_layernorm.weight"], eps)
    y = residual + attention(w, 0, states, positions, heads=4, kv_heads=4, theta=1e7, window=4)
    z = y + mlp(w, 0, rms(y, w[name + "post_attention_layernorm.weight"], eps))
    hidden = layer.forward(tensor(embeds), head.fuse(tensor(taps)), torch.arange(TOKENS) + 5)
    close(hidden, z)
    normed = rms(z, w["norm.weight"], eps)
    close(head.recycled(hidden), normed)
    estimate = normed @ w["efficient_lm_head_down_proj.weight"].T @ w["efficient_lm_head.weight"].T
    exact = normed @ w["lm_head.weight"].T
    ids, logits = head.candidates(hidden)
    assert ids.shape == (TOKENS, 32)
    for row in range(TOKENS):
        due = np.argsort(-estimate[row])[:32]
        assert ids[row].tolist() == due.tolist()
        np.testing.assert_allclose(logits[row].numpy(), exact[row][due], rtol=0, atol=1e-11)


def test_without_factors_the_head_says_that_engines_make_them(tmp_path: Path) -> None:
    draft = opened(tmp_path, factors=False)
    assert draft.spec is not None
    head = Eagle4Head(draft.spec, draft.source(dtype=torch.float64))
    with pytest.raises(LayerBuildError, match="engines make it from lm_head"):
        head.candidates(torch.ones(1, 64, dtype=torch.float64))


def test_step_by_step_is_one_prefill(tmp_path: Path) -> None:
    layer = opened(tmp_path, attn_norm=True).layer(0, dtype=torch.float64)
    probe = layer.probe(11, 1)
    torch.testing.assert_close(layer.incremental(probe), layer.prefill(probe), rtol=0, atol=1e-12)
