"""EAGLE-4: recognition, window, low-rank head, the two forms of the layer's input.

What these catch: an EAGLE-4 file taken for EAGLE3, whose layer it has; a window that is on where the file turns it off, or off where a
lone `sliding_window` turns it on; candidates picked by the exact logits, or scored by the estimate; `attn_norm` ignored; a plain MLP
demanded where there are experts; experts given the token where they read its latent; a rotation that the file turns off. The layer is
held against transformers' parts in `tests/peers/test_peer_eagle4.py`, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_numbers import Array, Weights, attention, close, mlp, numbers, rms, silu, tensor, weights_of

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
LATENT: dict[str, Any] = {
    "enable_moe": True,
    "moe_architecture": "nemotron_latent_relu2",
    "hidden_act": "relu2",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_latent_size": 16,
    "n_shared_experts": 2,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
}
SWIGLU = {
    key: value for key, value in LATENT.items() if key not in ("moe_architecture", "moe_latent_size", "hidden_act")
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attn-norm": {"attn_norm": True},
    "enable-fc-norm": {"fc_norm": ..., "enable_fc_norm": True},
    "latent": LATENT,
    "swiglu": SWIGLU,
    "unturned": {"use_rope": False, "rope_parameters": ...},
}


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


@pytest.mark.parametrize("form", list(FORMS))
def test_a_tiny_draft_passes_and_every_broken_tensor_is_named(tmp_path: Path, form: str) -> None:
    config = tiny_config("eagle4", **FORMS[form])
    whole = random_tensors(config, "eagle4")
    assert "fc_norm.2.weight" in whole
    add_factors(whole, torch.bfloat16)
    report = check_draft(write_checkpoint(tmp_path, config, whole))
    assert not [f"{result.id}: {result.message}" for result in report if result.status in ("failed", "warned")]
    for id in ("layers.build", "layers.finite", "layers.incremental"):
        assert report[id].status == "passed", id
    for name in whole:
        if re.search(r"experts\.[1-9]", name):
            continue
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
    assert (result.status, result.message) == ("failed", "2 layers are declared; the most that eagle4 drafts have is 1")


@pytest.mark.parametrize(
    ("changes", "rotates"),
    [
        ({"use_rope": True}, True),
        ({"use_rope": False}, False),
        ({"position_embedding_type": "none"}, False),
        ({"position_embedding_type": "rope"}, True),
        ({"partial_rotary_factor": 0}, False),
        ({"partial_rotary_factor": None}, True),
    ],
)
def test_any_of_three_keys_turns_the_rotation_off(changes: dict[str, Any], rotates: bool) -> None:
    spec, _ = expected_tensors(tiny_config("eagle4", **changes), "eagle4")
    attention = spec.layers[0].attention
    assert isinstance(attention, GQASpec)
    assert attention.rotates == rotates


def test_experts_stand_in_the_place_of_the_mlp() -> None:
    def held(changes: dict[str, Any]) -> dict[str, tuple[int | None, ...]]:
        _, tensors = expected_tensors(tiny_config("eagle4", **changes), "eagle4")
        found = {item.name.removeprefix("layers.0.mlp."): item.shape for item in tensors if ".mlp." in item.name}
        return {name: shape for name, shape in found.items() if not re.search(r"experts\.[1-9]", name)}

    router = {"gate.weight": (6, 64), "gate.e_score_correction_bias": (6,)}
    assert held(LATENT) == {
        **router,
        "fc1_latent_proj.weight": (16, 64),
        "fc2_latent_proj.weight": (64, 16),
        "experts.0.up_proj.weight": (24, 16),
        "experts.0.down_proj.weight": (16, 24),
        "shared_experts.up_proj.weight": (40, 64),
        "shared_experts.down_proj.weight": (64, 40),
    }
    assert held(SWIGLU) == {
        **router,
        **{f"experts.0.{name}_proj.weight": (24, 64) for name in ("gate", "up")},
        "experts.0.down_proj.weight": (64, 24),
        **{f"shared_experts.{name}_proj.weight": (40, 64) for name in ("gate", "up")},
        "shared_experts.down_proj.weight": (64, 40),
    }
    assert "shared_experts.up_proj.weight" not in held({**LATENT, "n_shared_experts": 0})


@pytest.mark.parametrize(
    "key",
    [
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_latent_size",
        "moe_shared_expert_intermediate_size",
    ],
)
def test_a_size_of_the_experts_that_is_not_stated_is_a_finding(tmp_path: Path, key: str) -> None:
    config = tiny_config("eagle4", **{**LATENT, key: ...})
    tensors = random_tensors(tiny_config("eagle4", **LATENT), "eagle4")
    report = check_draft(write_checkpoint(tmp_path, config, tensors), checks=["config"])
    found = [finding.where for result in report if result.status == "failed" for finding in result.findings]
    assert any(key in where for where in found), found


@pytest.mark.parametrize("form", ["latent", "swiglu"])
def test_a_layer_of_experts_that_does_not_rotate(tmp_path: Path, form: str) -> None:
    draft = opened(tmp_path, **FORMS[form], **FORMS["unturned"], sliding_window=4)
    w, eps, name = weights_of(draft), 1e-6, "layers.0."
    embeds, g, positions = numbers(1, TOKENS, 64), numbers(2, TOKENS, 64), np.arange(TOKENS, dtype=float)
    n = np.concatenate(
        [rms(embeds, w[name + "input_layernorm.weight"], eps), rms(g, w[name + "hidden_norm.weight"], eps)], axis=-1
    )
    y = g + unturned(w, n, np.tril(positions[:, None] - positions[None] < 4))
    z = y + experts(w, rms(y, w[name + "post_attention_layernorm.weight"], eps), latent=form == "latent")
    layer: Any = draft.layer(0, dtype=torch.float64)
    close(layer.forward(tensor(embeds), tensor(g), torch.arange(TOKENS)), z)


def unturned(w: Weights, states: Array, seen: Array) -> Array:
    name, outputs = "layers.0.self_attn.", []
    for head in range(4):
        rows = slice(32 * head, 32 * head + 32)
        q, k, v = (states @ w[f"{name}{part}_proj.weight"][rows].T for part in "qkv")
        scores = np.where(seen, q @ k.T / np.sqrt(32), -np.inf)
        exps = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(exps / exps.sum(axis=-1, keepdims=True) @ v)
    out: Array = np.concatenate(outputs, axis=-1) @ w[name + "o_proj.weight"].T
    return out


def experts(w: Weights, x: Array, *, latent: bool) -> Array:
    name = "layers.0.mlp."

    def run(stem: str, row: Array) -> Array:
        up = w[f"{name}{stem}.up_proj.weight"] @ row
        inner = np.maximum(up, 0) ** 2 if latent else silu(w[f"{name}{stem}.gate_proj.weight"] @ row) * up
        out: Array = w[f"{name}{stem}.down_proj.weight"] @ inner
        return out

    rows = []
    for row in x:
        scores = 1 / (1 + np.exp(-(w[name + "gate.weight"] @ row)))
        chosen = np.argsort(-(scores + w[name + "gate.e_score_correction_bias"]))[:2]
        given = w[name + "fc1_latent_proj.weight"] @ row if latent else row
        total = sum(scores[index] * run(f"experts.{index}", given) for index in chosen)
        total = 1.5 * total / scores[chosen].sum()
        rows.append((w[name + "fc2_latent_proj.weight"] @ total if latent else total) + run("shared_experts", row))
    return np.stack(rows)


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
