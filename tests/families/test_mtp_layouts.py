"""Prediction layers whose names and sizes follow neither DeepSeek's nor Qwen's: MiMo-V2, LongCat, and SGLang's cut-out layer.

What these catch: names that are read as the target's and not as the draft's, V heads taken for as wide as K heads, a dense layer taken for
one of the target's experts, a layer whose number is taken for the target's depth. The names are those of vLLM's loaders
(`mimo_v2_mtp.py`, `longcat_flash_mtp.py`) and of SGLang's exporter (`scripts/export_deepseek_nextn.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packagings import CUT_OUT, LONGCAT, MIMO_V2

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.spec import GQASpec
from pytest_specdecode.testing import random_tensors, stored_names, tiny_config, write_checkpoint

H = 64
MIMO_V2_LAYER = {
    "enorm.weight": (H,),
    "hnorm.weight": (H,),
    "eh_proj.weight": (H, 2 * H),
    "input_layernorm.weight": (H,),
    # 4 query heads and 2 KV heads, 24 wide in K and 16 in V.
    "self_attn.q_proj.weight": (4 * 24, H),
    "self_attn.k_proj.weight": (2 * 24, H),
    "self_attn.v_proj.weight": (2 * 16, H),
    "self_attn.o_proj.weight": (H, 4 * 16),
    "self_attn.attention_sink_bias": (4,),
    "pre_mlp_layernorm.weight": (H,),
    "mlp.gate_proj.weight": (128, H),
    "mlp.up_proj.weight": (128, H),
    "mlp.down_proj.weight": (H, 128),
    "final_layernorm.weight": (H,),
}
LONGCAT_LAYER = {
    "model.mtp.layers.0.eh_proj.weight": (H, 2 * H),
    "model.mtp.layers.0.enorm.m.weight": (H,),
    "model.mtp.layers.0.hnorm.m.weight": (H,),
    "model.mtp.layers.0.input_layernorm.weight": (H,),
    "model.mtp.layers.0.post_attention_layernorm.weight": (H,),
    # Ranks 48 and 32, 4 heads of 16 + 8 in K and 16 in V.
    "model.mtp.layers.0.self_attn.q_a_proj.weight": (48, H),
    "model.mtp.layers.0.self_attn.q_a_layernorm.weight": (48,),
    "model.mtp.layers.0.self_attn.q_b_proj.weight": (4 * 24, 48),
    "model.mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight": (32 + 8, H),
    "model.mtp.layers.0.self_attn.kv_a_layernorm.weight": (32,),
    "model.mtp.layers.0.self_attn.kv_b_proj.weight": (4 * 32, 32),
    "model.mtp.layers.0.self_attn.o_proj.weight": (H, 4 * 16),
    "model.mtp.layers.0.transformer_layer.mlp.gate_proj.weight": (96, H),
    "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight": (96, H),
    "model.mtp.layers.0.transformer_layer.mlp.down_proj.weight": (H, 96),
    "model.mtp.norm.weight": (H,),
}
TARGET = {"model.embed_tokens.weight": (4, H), "model.layers.0.input_layernorm.weight": (H,), "model.norm.weight": (H,)}


@pytest.mark.parametrize("style", ["mimo-v2", "longcat"])
def test_the_names_of_the_loader_are_read_and_no_others(tmp_path: Path, style: str) -> None:
    mimo = {f"model.mtp.layers.{i}.{name}": shape for i in range(2) for name, shape in MIMO_V2_LAYER.items()}
    config, shapes = (MIMO_V2, mimo) if style == "mimo-v2" else (LONGCAT, LONGCAT_LAYER)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in {**TARGET, **shapes}.items()}
    draft = open_draft(write_checkpoint(tmp_path, config, tensors))
    assert draft.spec is not None
    assert draft.binding is not None
    assert (draft.spec.family, draft.spec.packaging) == ("mtp", "embedded")
    assert set(draft.binding.stored.values()) == set(shapes)
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    assert all(layer.moe is None for layer in draft.spec.layers)
    report = check_draft(tmp_path)
    assert report.ok, str(report)
    # Nobody has written these layers' forward here.
    assert "is not written" in report["layers.build"].message
    assert report["layers.build"].status == "inconclusive"


def test_mimo_v2_reads_the_settings_of_its_sliding_layers(tmp_path: Path) -> None:
    tensors = random_tensors(MIMO_V2, "mtp")
    draft = open_draft(write_checkpoint(tmp_path, MIMO_V2, tensors, rename=stored_names(MIMO_V2, "mtp")))
    assert draft.spec is not None
    layer = draft.spec.layers[0]
    assert isinstance(layer.attention, GQASpec)
    rope = layer.attention.rope
    assert (rope.theta, rope.rotary_dim, rope.theta_stated[0].key) == (10000.0, 12, "swa_rope_theta")
    assert (layer.attention.value_scale, layer.attention.sink, layer.norm_eps) == (0.707, True, 1e-5)


def test_a_layer_cut_out_of_its_target_is_the_layer_inside_it(tmp_path: Path) -> None:
    """Its names count from 0, and what the configuration says of the target's first layers is not about it."""
    inside = tiny_config("mtp")
    tensors = random_tensors(inside, "mtp")
    there = open_draft(write_checkpoint(tmp_path / "in", inside, tensors, rename=stored_names(inside, "mtp")))
    path = write_checkpoint(tmp_path / "out", CUT_OUT, {f"model.{name}": value for name, value in tensors.items()})
    alone = open_draft(path)
    assert alone.spec is not None
    assert (alone.spec.family, alone.spec.packaging, len(alone.spec.layers)) == ("mtp", "plain", 1)
    assert alone.spec.layers[0].moe is not None
    assert check_draft(path).ok
    probe = there.layer(0).probe(5, 1)
    assert torch.equal(alone.layer(0).prefill(probe), there.layer(0).prefill(probe))


def test_a_target_of_one_layer_is_not_a_cut_out_layer(tmp_path: Path) -> None:
    """Only the label says so: here the prediction layer is number 1."""
    config = tiny_config("mtp", num_hidden_layers=1, first_k_dense_replace=0)
    tensors = random_tensors(config, "mtp")
    draft = open_draft(write_checkpoint(tmp_path, config, tensors, rename=stored_names(config, "mtp")))
    assert draft.binding is not None
    assert all(name.startswith("model.layers.1.") for name in draft.binding.stored.values())
