"""P-EAGLE: recognition among EAGLE3's packagings, tensors, the mask, forward.

What these catch: a parallel draft served as EAGLE3, or the other way round, since labels and layers are the same; `mask_hidden` not
missed; a mask token read from the wrong key; masked positions fed after `fc` in place of before it, or with their own embedding.
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
from pytest_specdecode.families import Recognition, load
from pytest_specdecode.families.peagle import PEagleHead
from pytest_specdecode.testing import (
    expected_tensors,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_sparse,
    write_tiny,
)

CONFIGS = Path(__file__).parents[1] / "corpus" / "configs"
PARALLEL = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "parallel_drafting": True,
    "k_train": 8,
    "cod_retention": 0.8,
    "num_hidden_layers": 1,
}
_LAYER = {key: value for key, value in tiny_config("peagle").items() if not key.startswith(("eagle", "mask", "norm_b"))}
SPECULATORS = {
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": 256,
    "mask_token_id": 17,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [2, 8, 13],
    "transformer_layer_config": _LAYER,
}


def recognised(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Recognition:
    write_checkpoint(directory, config, tensors or {"x": torch.ones(1)})
    return load(Checkpoint.open(directory)).recognition


def test_the_published_configuration(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "peagle--specforge-qwen3-8b.json").read_text())
    spec, tensors = expected_tensors(config, "peagle")
    found = {item.name: item.shape for item in tensors if item.need == "required"}
    assert len(spec.layers) == 4
    assert found["fc.weight"] == (4096, 12288)
    assert found["mask_hidden"] == (1, 1, 12288)
    assert found["layers.0.self_attn.q_proj.weight"] == (4096, 8192)
    assert found["layers.0.self_attn.v_proj.weight"] == (1024, 8192)
    assert found["layers.3.self_attn.q_proj.weight"] == (4096, 4096)
    assert found["lm_head.weight"] == (32000, 4096)
    assert "layers.0.hidden_norm.weight" in found
    assert "layers.1.hidden_norm.weight" not in found
    # fc, norm, head, map and mask; ten tensors in layer 0, nine in each of the other three.
    assert len(found) == 5 + 10 + 3 * 9
    write_sparse(tmp_path, config, "peagle")
    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert draft.binding is not None
    assert (draft.spec.family, draft.binding.missing, draft.binding.unexpected) == ("peagle", (), ())


@pytest.mark.parametrize(
    ("config", "family", "disagreement"),
    [
        ({"architectures": ["PEagleDraftModel"]}, "peagle", ()),
        ({"architectures": ["PeagleQwen3ForCausalLM"]}, "peagle", ()),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "peagle"}, None, ("eagle3", "peagle")),
        ({"speculators_model_type": "peagle", "transformer_layer_config": {}}, "peagle", ()),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "peagle", ()),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": False}, "eagle3", ()),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3", ()),
    ],
)
def test_labels(tmp_path: Path, config: dict[str, Any], family: str | None, disagreement: tuple[str, ...]) -> None:
    found = recognised(tmp_path, config)
    assert (found.family, found.disagreement) == (family, disagreement)


def test_mask_hidden_under_an_eagle3_label_is_a_contradiction(tmp_path: Path) -> None:
    config = tiny_config("peagle", architectures=["LlamaForCausalLMEagle3"])
    found = recognised(tmp_path, config, random_tensors(config, "peagle"))
    assert (found.family, found.disagreement) == ("eagle3", ("eagle3", "peagle"))
    message = check_draft(tmp_path, checks=["config.family"])["config.family"].message
    assert message == "signals name more than one family: eagle3, peagle"


@pytest.mark.parametrize("folder", ["eagle3-head", "dflash", "x"])
def test_the_folder_s_name_decides_nothing(tmp_path: Path, folder: str) -> None:
    unlabelled = tiny_config("peagle", architectures=..., eagle_config=..., eagle_aux_hidden_state_layer_ids=...)
    write_tiny(tmp_path / folder, "peagle", config=unlabelled)
    assert load(Checkpoint.open(tmp_path / folder)).recognition.family == "peagle"


@pytest.mark.parametrize(
    "config",
    [tiny_config("peagle"), tiny_config("peagle", **PARALLEL), SPECULATORS],
    ids=["plain", "eagle3", "speculators"],
)
def test_each_packaging_passes_its_checks(tmp_path: Path, config: dict[str, Any]) -> None:
    report = check_draft(write_tiny(tmp_path, "peagle", config=config))
    assert not [f"{result.id}: {result.message}" for result in report if result.status == "failed"]
    spec = open_draft(tmp_path).spec
    assert spec is not None
    assert spec.packaging == ("speculators" if config is SPECULATORS else "plain")
    assert report["dflash.mask-token"].status == "passed"


@pytest.mark.parametrize("how", ["dropped", "misshapen"])
def test_a_broken_tensor_is_named_whatever_its_group(tmp_path: Path, how: str) -> None:
    config = tiny_config("peagle", norm_before_fc=True)
    whole = random_tensors(config, "peagle")
    for name in whole:
        tensors = dict(whole)
        value = tensors.pop(name)
        if how == "misshapen":
            tensors[name] = value[..., :-1].clone()
        report = check_draft(
            write_checkpoint(tmp_path, config, tensors),
            checks=["weights.missing", "weights.flags", "weights.shapes", "vocabulary", "taps"],
        )
        found = [
            str((result.message, [f.where for f in result.findings])) for result in report if result.status == "failed"
        ]
        assert any(name in text for text in found) or name == "t2d", (name, found)


def test_a_missing_mask_state_stops_vllm(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "peagle", edit=lambda tensors: tensors.pop("mask_hidden"))
    finding = check_draft(path, checks=["weights.missing"])["weights.missing"].findings[0]
    assert finding.outcomes["vllm"].outcome == "stops"
    assert "mask_hidden not found in weights" in finding.outcomes["vllm"].message


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({}, "passed", ""),
        ({"mask_token_id": ..., "ptd_token_id": 500}, "passed", ""),
        ({"mask_token_id": ..., "dflash_config": {"mask_token_id": 500}}, "passed", ""),
        ({"mask_token_id": ...}, "warned", "not stated"),
        ({"mask_token_id": 512}, "failed", "outside an embedding of 512"),
        ({"pard_token": 3}, "failed", "different values"),
    ],
)
def test_the_mask_token(tmp_path: Path, changes: dict[str, Any], status: str, text: str) -> None:
    result = check_draft(write_tiny(tmp_path, "peagle", **changes), checks=["dflash.mask-token"])["dflash.mask-token"]
    assert result.status == status
    assert text in result.message


@pytest.mark.parametrize("normed_residual", [False, True])
@pytest.mark.parametrize("fused", ["plain", "norm_before_fc", "fc_norm"])
def test_known_and_masked_positions_in_one_pass(tmp_path: Path, normed_residual: bool, fused: str) -> None:
    flags = {fused: True} if fused != "plain" else {}
    changes = {"norm_before_residual": normed_residual, "rms_norm_eps": 1e-3, **flags}
    draft = open_draft(write_tiny(tmp_path, "peagle", dtype="float32", seed=2, **changes))
    assert draft.spec is not None
    w, eps = weights_of(draft), 1e-3
    taps, embeds, masked = numbers(1, 4, 192), numbers(2, 7, 64), 3
    head = PEagleHead(draft.spec, draft.source(dtype=torch.float64))
    hidden = head.fuse_block(tensor(taps), masked)
    # By hand: masked rows enter where taps do, before the norms and fc.
    wide = np.concatenate([taps, np.repeat(w["mask_hidden"].reshape(1, 192), masked, axis=0)])
    if fused == "norm_before_fc":
        wide = rms(wide, w["input_norm.weight"], eps)
    if fused == "fc_norm":
        wide = np.concatenate(
            [rms(wide[:, 64 * i : 64 * i + 64], w[f"fc_norm.{i}.weight"], eps) for i in range(3)], axis=-1
        )
    g = wide @ w["fc.weight"].T
    close(hidden, g)
    positions = np.arange(7.0)
    n = rms(g, w["layers.0.hidden_norm.weight"], eps)
    states = np.concatenate([rms(embeds, w["layers.0.input_layernorm.weight"], eps), n], axis=-1)
    x = n if normed_residual else g
    for layer in range(2):
        if layer:
            states = rms(x, w["layers.1.input_layernorm.weight"], eps)
        y = x + attention(w, layer, states, positions, heads=4, kv_heads=2, theta=1000000.0)
        x = y + mlp(w, layer, rms(y, w[f"layers.{layer}.post_attention_layernorm.weight"], eps))
    for reference in draft.layers(dtype=torch.float64):
        hidden = reference.forward(tensor(embeds), hidden, torch.arange(7))  # type: ignore[attr-defined]
    close(hidden, x)
    close(head.logits(hidden), rms(x, w["norm.weight"], eps) @ w["lm_head.weight"].T)
