"""The tensors that a spec calls for, and the names they go by.

What these catch: a tensor too many or too few; a shape with H where 2H or K * Ht is due; a flag that brings no tensor, or another's; an
alias that is not known; two stored names for one tensor that pass for one. The lists are written out from what trainers write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import FAMILIES, ExpectedTensor, load
from pytest_specdecode.testing import expected_tensors, random_tensors, tiny_config, write_checkpoint, write_sparse

Shapes = dict[str, tuple[int | None, ...]]


def required(family: str, config: dict[str, Any] | None = None, **changes: Any) -> Shapes:
    """Names and shapes of the required tensors of a tiny configuration with these changes."""
    _, tensors = expected_tensors(tiny_config(family, **changes) if config is None else config, family)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    return {tensor.name: tensor.shape for tensor in tensors if tensor.need == "required"}


def expected(family: str, **changes: Any) -> dict[str, ExpectedTensor]:
    return {tensor.name: tensor for tensor in expected_tensors(tiny_config(family, **changes), family)[1]}


# Hidden 64, MLP 128, 4 query and 2 KV heads of 32, vocabulary 512, draft vocabulary 256, three taps.
EAGLE3: Shapes = {
    "fc.weight": (64, 192),
    "layers.0.hidden_norm.weight": (64,),
    "layers.0.input_layernorm.weight": (64,),
    "layers.0.self_attn.q_proj.weight": (128, 128),
    "layers.0.self_attn.k_proj.weight": (64, 128),
    "layers.0.self_attn.v_proj.weight": (64, 128),
    "layers.0.self_attn.o_proj.weight": (64, 128),
    "layers.0.post_attention_layernorm.weight": (64,),
    "layers.0.mlp.gate_proj.weight": (128, 64),
    "layers.0.mlp.up_proj.weight": (128, 64),
    "layers.0.mlp.down_proj.weight": (64, 128),
    "norm.weight": (64,),
    "lm_head.weight": (256, 64),
    "d2t": (256,),
}


def test_eagle3_tensors() -> None:
    assert required("eagle3") == EAGLE3
    optional = {name: tensor.shape for name, tensor in expected("eagle3").items() if tensor.need == "optional"}
    assert optional == {"t2d": (512,), "embed_tokens.weight": (512, 64)}
    kinds = {name: tensor.kind for name, tensor in expected("eagle3").items() if tensor.kind != "float"}
    assert kinds == {"d2t": "int", "t2d": "bool"}


def test_llama_3_2_3b_is_fifteen_tensors() -> None:
    config = json.loads((_CORPUS / "eagle3--llama3.2-3b-15-tensor-contract.json").read_text())
    hidden, kv, inner, vocabulary, reduced = 3072, 1024, 8192, 128256, 32000
    assert {**required("eagle3", config), "t2d": (vocabulary,)} == {
        "fc.weight": (hidden, 9216),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (hidden, 6144),
        "layers.0.self_attn.k_proj.weight": (kv, 6144),
        "layers.0.self_attn.v_proj.weight": (kv, 6144),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (reduced, hidden),
        "d2t": (reduced,),
        "t2d": (vocabulary,),
    }


# Hidden 64, ranks 48 and 32, 4 heads of 16 + 8 and 16, full vocabulary.
EAGLE3_MLA: Shapes = {
    "fc.weight": (64, 192),
    "layers.0.hidden_norm.weight": (64,),
    "layers.0.input_layernorm.weight": (64,),
    "layers.0.self_attn.q_a_proj.weight": (48, 128),
    "layers.0.self_attn.q_a_layernorm.weight": (48,),
    "layers.0.self_attn.q_b_proj.weight": (96, 48),
    "layers.0.self_attn.kv_a_proj_with_mqa.weight": (40, 128),
    "layers.0.self_attn.kv_a_layernorm.weight": (32,),
    "layers.0.self_attn.kv_b_proj.weight": (128, 32),
    "layers.0.self_attn.o_proj.weight": (64, 64),
    "layers.0.post_attention_layernorm.weight": (64,),
    "layers.0.mlp.gate_proj.weight": (128, 64),
    "layers.0.mlp.up_proj.weight": (128, 64),
    "layers.0.mlp.down_proj.weight": (64, 128),
    "norm.weight": (64,),
    "lm_head.weight": (512, 64),
}


def test_eagle3_mla_tensors() -> None:
    assert required("eagle3-mla") == EAGLE3_MLA


def test_eagle3_mla_of_kimi_size() -> None:
    """The shapes that SGLang's `Eagle3DeepseekV2ForCausalLM` builds for Kimi K2.5."""
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64}
    ranks = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    found = required("eagle3-mla", **sizes, **ranks, vocab_size=163840, draft_vocab_size=...)
    attention = {name.rpartition("self_attn.")[2]: shape for name, shape in found.items() if "self_attn" in name}
    assert attention == {
        "q_a_proj.weight": (1536, 14336),
        "q_a_layernorm.weight": (1536,),
        "q_b_proj.weight": (12288, 1536),
        "kv_a_proj_with_mqa.weight": (576, 14336),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (16384, 512),
        "o_proj.weight": (7168, 8192),
    }
    assert found["fc.weight"] == (7168, 21504)
    assert "lm_head.weight" not in found


def dflash(layers: int, hidden: int, q_rows: int, kv_rows: int, inner: int, head_dim: int, taps: int) -> Shapes:
    """DFlash's tensors as z-lab publishes them."""
    due: Shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"layers.{layer}."
        due |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return due


def test_dflash_tensors() -> None:
    assert required("dflash") == dflash(2, 64, 128, 64, 128, 32, 3)


def test_qwen3_8b_dflash_is_58_tensors() -> None:
    config = json.loads((_CORPUS / "dflash--zlab-Qwen3-8B-DFlash-b16.json").read_text())
    found = required("dflash", config)
    assert found == dflash(5, 4096, 4096, 1024, 12288, 128, 5)
    assert len(found) == 58


def test_taps_and_not_layers_decide_the_width_of_fc() -> None:
    taps = {"mask_token_id": 511, "target_layer_ids": [1, 4, 7, 10, 13], "block_size": 8}
    assert required("dflash", dflash_config=taps)["fc.weight"] == (64, 320)
    assert required("dflash", dflash_config={})["fc.weight"] == (64, None)
    assert required("eagle3", target_hidden_size=96)["fc.weight"] == (64, 288)


def test_laguna_has_fused_projections_a_gate_and_a_norm_per_tap() -> None:
    found = required("dflash", architectures=["DFlashLagunaForCausalLM"])
    plain = dflash(2, 64, 128, 64, 128, 32, 3)
    for layer in (0, 1):
        attention = f"layers.{layer}.self_attn."
        for name in ("q_proj", "k_proj", "v_proj"):
            del plain[f"{attention}{name}.weight"]
        plain |= {attention + "qkv_proj.weight": (256, 64), attention + "g_proj.weight": (4, 64)}
    plain |= {f"aux_hidden_norms.{tap}.weight": (64,) for tap in range(3)}
    assert found == plain


def test_a_reduced_dflash_brings_its_own_head() -> None:
    found = required("dflash", draft_vocab_size=100)
    assert (found["lm_head.weight"], found["d2t"]) == ((100, 64), (100,))


BIASED = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 64}


@pytest.mark.parametrize(
    ("family", "changes", "more"),
    [
        ("eagle3", {"fc_norm": True}, {f"fc_norm.{tap}.weight": (64,) for tap in range(3)}),
        ("eagle3", {"fc_norm": True, "target_hidden_size": 64}, {f"fc_norm.{tap}.weight": (64,) for tap in range(3)}),
        ("eagle3-mla", {"fc_norm": True}, {f"fc_norm.{tap}.weight": (64,) for tap in range(3)}),
        ("eagle3", {"norm_before_fc": True}, {"input_norm.weight": (192,)}),
        ("eagle3", {"bias": True}, {"fc.bias": (64,)}),
        ("eagle3", {"norm_output": True}, {}),
        ("eagle3", {"norm_before_residual": True}, {}),
        ("eagle3", {"attention_bias": True}, {f"layers.0.self_attn.{n}.bias": (rows,) for n, rows in BIASED.items()}),
        (
            "eagle3",
            {"mlp_bias": True},
            {f"layers.0.mlp.{n}.bias": (rows,) for n, rows in (("gate_proj", 128), ("up_proj", 128), ("down_proj", 64))},
        ),
        ("eagle3", {"target_hidden_size": 96}, {"embed_tokens.weight": (512, 64), "fc.weight": (64, 288)}),
        (
            "dflash",
            {"attention_bias": True},
            {f"layers.{i}.self_attn.{n}.bias": (rows,) for i in (0, 1) for n, rows in BIASED.items()},
        ),
    ],
)  # fmt: skip
def test_a_flag_brings_exactly_its_tensors(family: str, changes: dict[str, Any], more: Shapes) -> None:
    assert required(family, **changes) == {**required(family), **more}


def test_biases_without_a_flag_must_not_be_there() -> None:
    never = {name for name, tensor in expected("eagle3").items() if tensor.need == "never" and "norm" not in name}
    assert never == {"fc.bias", *(f"layers.0.self_attn.{name}.bias" for name in BIASED)}


def test_head_and_maps_depend_on_the_vocabulary() -> None:
    assert set(required("eagle3")) - set(required("eagle3", draft_vocab_size=...)) == {"lm_head.weight", "d2t"}
    assert set(required("eagle3")) - set(required("eagle3", draft_vocab_size=512)) == {"d2t"}


def test_fc_is_not_due_where_the_draft_reads_one_state() -> None:
    changes = {"eagle_config": {"use_aux_hidden_state": False}, "eagle_aux_hidden_state_layer_ids": ...}
    assert "fc.weight" not in required("eagle3", **changes)


def test_layers_from_one_on_are_plain_and_may_have_a_hidden_norm() -> None:
    found = required("eagle3", num_hidden_layers=2)
    assert found["layers.1.self_attn.q_proj.weight"] == (128, 64)
    assert "layers.1.hidden_norm.weight" not in found
    assert expected("eagle3", num_hidden_layers=2)["layers.1.hidden_norm.weight"].need == "optional"


def test_head_norms_of_eagle3_follow_the_file(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config("eagle3"), "eagle3")
    for name in ("q_norm", "k_norm"):
        tensors[f"layers.0.self_attn.{name}.weight"] = tensors["norm.weight"][:32].clone()
    draft = load(Checkpoint.open(write_checkpoint(tmp_path, tiny_config("eagle3"), tensors)))
    assert draft.binding is not None
    assert draft.binding.expected["layers.0.self_attn.q_norm.weight"].shape == (32,)
    assert draft.binding.unexpected == ()


def test_an_unknown_extent_stays_unknown() -> None:
    found = required("eagle3", hidden_size=..., head_dim=...)
    assert found["layers.0.mlp.gate_proj.weight"] == (128, None)
    assert found["layers.0.self_attn.q_proj.weight"] == (None, None)


# --- names ---------------------------------------------------------------------------------------------------------------

ALIASES = [
    ("eagle3", "midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
    ("eagle3", "model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
    ("eagle3", "model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
    ("eagle3", "model.norm.weight", "norm.weight"),
    ("eagle3", "model.fc.weight", "fc.weight"),
    ("eagle3", "model.d2t", "d2t"),
    ("eagle3", "logit_head.weight", "lm_head.weight"),
    ("eagle3", "aux_norm_low.weight", "fc_norm.0.weight"),
    ("eagle3", "aux_norm_mid.weight", "fc_norm.1.weight"),
    ("eagle3", "aux_norm_high.weight", "fc_norm.2.weight"),
    ("eagle3-mla", "midlayer.self_attn.kv_a_proj_with_mqa.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight"),
    ("dflash", "encoder.fc.weight", "fc.weight"),
    ("dflash", "encoder.output_norm_enc.weight", "hidden_norm.weight"),
    ("dflash", "model.layers.1.self_attn.k_norm.weight", "layers.1.self_attn.k_norm.weight"),
    ("dflash", "model.encoder.fc.weight", "fc.weight"),
]


@pytest.mark.parametrize(("family", "stored", "canonical"), ALIASES)
def test_other_names_stand_for_the_canonical_one(family: str, stored: str, canonical: str) -> None:
    sheet = next(item for item in FAMILIES if item.name == family)
    assert sheet.canonical(stored) == canonical
    assert sheet.canonical(canonical) == canonical


@pytest.mark.parametrize(
    ("family", "changes", "rename"),
    [
        ("eagle3", {}, lambda name: name.replace("layers.0.", "midlayer.")),
        ("eagle3", {}, lambda name: f"model.{name}"),
        ("eagle3", {}, lambda name: name.replace("lm_head", "logit_head")),
        (
            "eagle3",
            {"fc_norm": True},
            lambda name: {"0": "aux_norm_low", "1": "aux_norm_mid", "2": "aux_norm_high"}[name[8]] + name[9:]
            if name.startswith("fc_norm.")
            else name,
        ),
        ("eagle3-mla", {}, lambda name: name.replace("layers.0.", "midlayer.")),
        ("dflash", {}, lambda name: f"model.{name}"),
        (
            "dflash",
            {},
            lambda name: f"encoder.{name}" if name == "fc.weight" else name.replace("hidden_norm", "encoder.output_norm_enc"),
        ),
    ],
)  # fmt: skip
def test_a_file_with_other_names_is_whole(tmp_path: Path, family: str, changes: dict[str, Any], rename: Any) -> None:
    config = tiny_config(family, **changes)
    tensors = random_tensors(config, family)
    draft = load(Checkpoint.open(write_checkpoint(tmp_path, config, tensors, rename=rename)))
    assert draft.recognition.family == family
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    for name, value in tensors.items():
        assert draft.tensor(name).equal(value)
    assert draft.layer(0) is not None


def test_two_names_for_one_tensor_are_kept_apart(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config("eagle3"), "eagle3")
    tensors["midlayer.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"].clone()
    draft = load(Checkpoint.open(write_checkpoint(tmp_path, tiny_config("eagle3"), tensors)))
    assert draft.binding is not None
    assert draft.binding.twice == (("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),)


def test_missing_and_unexpected_tensors_are_bound_as_such(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config("eagle3"), "eagle3")
    tensors["surprise"] = tensors.pop("fc.weight")
    draft = load(Checkpoint.open(write_checkpoint(tmp_path, tiny_config("eagle3"), tensors)))
    assert draft.binding is not None
    assert [tensor.name for tensor in draft.binding.missing] == ["fc.weight"]
    assert draft.binding.unexpected == ("surprise",)
    assert draft.header("fc.weight") is None
    assert draft.header("norm.weight") is not None


def test_describe_is_one_line_of_family_layers_parameters_and_dtype(tmp_path: Path) -> None:
    write_sparse(tmp_path / "my-draft", tiny_config("eagle3"), "eagle3")
    # fc, q, k and v, o, three of the MLP, head, four norms.
    assert 64 * 192 + 128 * 128 + 2 * 64 * 128 + 64 * 128 + 3 * 64 * 128 + 256 * 64 + 4 * 64 == 94_464
    line = load(Checkpoint.open(tmp_path / "my-draft")).describe()
    assert line == "my-draft: eagle3 (plain), 1 layer, 94.5 k parameters, bfloat16"
    (tmp_path / "my-draft" / "model.safetensors").unlink()
    assert (
        load(Checkpoint.open(tmp_path / "my-draft")).describe()
        == "my-draft: eagle3 (plain), 1 layer, configuration only"
    )


_CORPUS = Path(__file__).parents[1] / "corpus" / "configs"
