"""EAGLE-1, EAGLE-2 and HASS: recognition, tensors, packagings, variants, forward.

What these catch: a draft taken for a neighbour whose `fc` is as wide, or a plain model taken for a draft; `fc`'s bias read as absent where
the reader's default is present; a norm applied, or accepted, that the layout does not have (acceptance 0.308 for 0.619 due); a second
layer without its norm; vLLM's nest read at the wrong level; a name of another maker's that is not known; a pickled file that is not read;
a list of Llama 4's or Cohere 2's counted from the target's first layer; a default of another class's.
Shapes are those published; the forward is written out in NumPy, in float64. Llama 4's and Cohere's layers are held against transformers
in `tests/peers/test_peer_eagle1.py`, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_numbers import (
    Array,
    Weights,
    attention,
    close,
    layer_norm,
    mlp,
    numbers,
    rms,
    silu,
    tensor,
    turned,
    weights_of,
)

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.families import Draft, load
from pytest_specdecode.families.eagle1 import Eagle1Head, Eagle1Options
from pytest_specdecode.spec import GQASpec, TemperatureSpec
from pytest_specdecode.testing import (
    expected_tensors,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_sparse,
    write_tiny,
)

CONFIGS = Path(__file__).parents[1] / "corpus" / "configs"
HIDDEN, TOKENS = 64, 6
Tensors = dict[str, torch.Tensor]

MINICPM = {
    "architectures": ["EagleMiniCPMForCausalLM"],
    "model_type": "minicpm",
    "bias": ...,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "mup_denominator": 32,
    "dim_model_base": 16,
}
COHERE = {
    "architectures": ["EagleCohereForCausalLM"],
    "model_type": "cohere",
    "bias": ...,
    "layer_norm_eps": 1e-5,
    "rms_norm_eps": ...,
    "tie_word_embeddings": True,
}
LLAMA4 = {
    "architectures": ["EagleLlama4ForCausalLM"],
    "model_type": "llama4_text",
    "bias": ...,
    "head_dim": 16,
    "intermediate_size_mlp": 160,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
}
MISTRAL = {
    "architectures": ["EagleMistralLarge3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bias": ...,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
#: vLLM's converted form: the layer's fields in a nest of their own.
CONVERTED = {
    "architectures": ["EAGLEModel"],
    "model_type": "eagle",
    "eagle_fc_bias": True,
    "truncated_vocab_size": 256,
    "model": {key: value for key, value in tiny_config("eagle1").items() if key != "bias"},
}
VARIANTS = {"minicpm": MINICPM, "cohere": COHERE, "llama4": LLAMA4, "mistral-large-3": MISTRAL}
LLAMA4_EXPERTS = {**LLAMA4, "interleave_moe_layer_step": 1, "num_experts_per_tok": 2}
COHERE2 = {**COHERE, "model_type": "cohere2", "layer_types": ["sliding_attention"], "sliding_window": 4}
#: Every group of tensors that a layer of another target's may have.
FORMS = {
    **VARIANTS,
    "llama4-experts": LLAMA4_EXPERTS,
    "llama4-unturned": {**LLAMA4, "no_rope_layers": [0]},
    "cohere-head-norms": {**COHERE, "use_qk_norm": True},
    "cohere2": COHERE2,
    "cohere-north": {**COHERE2, "norm_type": "rms_norm", "rms_norm_eps": 1e-6},
}


def required(config: dict[str, Any]) -> dict[str, tuple[int | None, ...]]:
    return {tensor.name: tensor.shape for tensor in expected_tensors(config, "eagle1")[1] if tensor.need == "required"}


def plain(fc_bias: bool, hidden: int, kv: int, inner: int) -> dict[str, tuple[int | None, ...]]:
    """The tensors of a one-layer draft beside the target's own embedding and head."""
    return {
        "fc.weight": (hidden, 2 * hidden),
        **({"fc.bias": (hidden,)} if fc_bias else {}),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (kv, hidden),
        "layers.0.self_attn.v_proj.weight": (kv, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
    }


def from_config(directory: Path, config: dict[str, Any]) -> Draft:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return load(Checkpoint.open(directory))


# --- published files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hidden", "kv", "inner", "rows", "fc_bias"),
    [
        ("LLaMA3-Instruct-70B", 8192, 1024, 28672, 128256, False),
        ("LLaMA3-Instruct-8B", 4096, 1024, 14336, 128256, False),
        ("Mixtral-8x7B", 4096, 4096, 14336, 32000, True),
        ("llama2-chat-70B", 8192, 1024, 28672, 32000, True),
        ("vicuna-13B", 5120, 5120, 13824, 32000, True),
        ("vicuna-33B", 6656, 1664, 17920, 32000, True),
        ("vicuna-7B", 4096, 4096, 11008, 32000, True),
    ],
)
def test_published_shapes(
    tmp_path: Path, name: str, hidden: int, kv: int, inner: int, rows: int, fc_bias: bool
) -> None:
    config = json.loads((CONFIGS / f"eagle1--eagle-repo-{name}.json").read_text())
    draft = from_config(tmp_path, config)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging, draft.recognition.disagreement) == ("eagle1", "plain", ())
    assert required(config) == plain(fc_bias, hidden, kv, inner)
    assert draft.binding is not None
    assert draft.binding.expected["embed_tokens.weight"].shape == (rows, hidden)
    assert not [result for result in check_draft(tmp_path) if result.status in ("failed", "warned")]


def test_converted_form_is_read_from_its_nest(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "eagle1--vllm-converted-llama2-chat-7B-shape.json").read_text())
    found = required(config)
    assert found == {**plain(True, 4096, 4096, 11008), "lm_head.weight": (32000, 4096)}
    without = {**config, "eagle_fc_bias": ...}
    without.pop("eagle_fc_bias")
    assert "fc.bias" not in required(without)
    draft = from_config(tmp_path, config)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging, draft.spec.vocabulary.is_reduced) == ("eagle1", "plain", False)


# --- recognition ---------------------------------------------------------------------------------------------------------


def headers(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> str | None:
    directory.mkdir(exist_ok=True)
    write_checkpoint(directory, config, {name: torch.ones(shape) for name, shape in shapes.items()})
    return load(Checkpoint.open(directory)).recognition.family


Q = "layers.0.self_attn.q_proj.weight"


def test_fc_of_two_widths_before_one_width_projections_is_eagle1(tmp_path: Path) -> None:
    assert headers(tmp_path / "a", {}, {"fc.weight": (8, 16), Q: (8, 8)}) == "eagle1"
    assert headers(tmp_path / "b", {}, {"model.fc.weight": (8, 16), "model." + Q: (8, 8)}) == "eagle1"
    # Two taps give DFlash and EAGLE3 an fc of the same shape.
    two_taps = {"fc.weight": (8, 16), "hidden_norm.weight": (8,), "layers.0.input_layernorm.weight": (8,), Q: (8, 8)}
    assert headers(tmp_path / "c", {}, two_taps) == "dflash"
    assert headers(tmp_path / "d", {}, {"fc.weight": (8, 16), Q: (8, 16)}) == "eagle3"


def test_a_small_target_is_not_taken_for_a_draft(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8}
    target = {Q: (8, 8), "layers.0.input_layernorm.weight": (8,), "norm.weight": (8,)}
    assert headers(tmp_path, config, target) is None
    assert from_config(tmp_path / "few", config).recognition.family == "eagle1"
    assert from_config(tmp_path / "many", {**config, "num_hidden_layers": 32}).recognition.family is None


@pytest.mark.parametrize("name", ["vicuna", "eagle3-head", "dflash"])
def test_the_folder_s_name_decides_nothing(tmp_path: Path, name: str) -> None:
    unlabelled = tiny_config("eagle1", architectures=["LlamaForCausalLM"])
    write_sparse(tmp_path / name, unlabelled, "eagle1", dtype="F16")
    assert load(Checkpoint.open(tmp_path / name)).recognition.family == "eagle1"


# --- tensors -------------------------------------------------------------------------------------------------------------


def test_a_second_layer_norms_its_input() -> None:
    found = required(tiny_config("eagle1", num_hidden_layers=2))
    assert found.keys() - required(tiny_config("eagle1")).keys() == {
        name.replace("layers.0", "layers.1") for name in plain(True, 1, 1, 1) if name.startswith("layers.0")
    } | {"layers.1.input_layernorm.weight"}


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({"bias": ...}, {"fc.bias"}),
        ({"bias": False}, set()),
        ({"qkv_bias": True}, {"fc.bias", *(f"layers.0.self_attn.{x}_proj.bias" for x in "qkv")}),
        ({"attention_bias": True}, {"fc.bias", *(f"layers.0.self_attn.{x}_proj.bias" for x in "qkvo")}),
        ({"model_type": "qwen2"}, {"fc.bias", *(f"layers.0.self_attn.{x}_proj.bias" for x in "qkv")}),
        ({"model_type": "qwen2", "qkv_bias": False}, {"fc.bias"}),
    ],
)
def test_biases_follow_their_flags(changes: dict[str, Any], biases: set[str]) -> None:
    assert {name for name in required(tiny_config("eagle1", **changes)) if name.endswith(".bias")} == biases


def test_variants_have_the_tensors_of_their_targets_layers() -> None:
    norms = {"layers.0.input_layernorm.weight": (64,), "norm.weight": (64,)}
    own = plain(False, 64, 32, 128)
    due = {
        "minicpm": {
            **own,
            "input_norm1.weight": (64,),
            "input_norm2.weight": (64,),
            "layers.0.input_layernorm.weight": (64,),
        },
        "cohere": {**plain(True, 64, 32, 128), **norms},
        "llama4": {**plain(False, 64, 32, 160), **norms},
        "mistral-large-3": {
            **{name: shape for name, shape in own.items() if "self_attn" not in name},
            **norms,
            "layers.0.self_attn.q_a_proj.weight": (48, 64),
            "layers.0.self_attn.q_a_layernorm.weight": (48,),
            "layers.0.self_attn.q_b_proj.weight": (96, 48),
            "layers.0.self_attn.kv_a_proj_with_mqa.weight": (40, 64),
            "layers.0.self_attn.kv_a_layernorm.weight": (32,),
            "layers.0.self_attn.kv_b_proj.weight": (128, 32),
            "layers.0.self_attn.o_proj.weight": (64, 64),
        },
    }
    del due["cohere"]["layers.0.post_attention_layernorm.weight"]
    for variant, changes in VARIANTS.items():
        assert required(tiny_config("eagle1", **changes)) == due[variant], variant


def test_llama4_experts_are_due_where_every_layer_has_them() -> None:
    found = required(tiny_config("eagle1", **{**LLAMA4, "interleave_moe_layer_step": 1}))
    assert {name.removeprefix("layers.0.mlp."): shape for name, shape in found.items() if ".mlp." in name} == {
        "router.weight": (4, 64),
        "experts.gate_up_proj": (4, 64, 256),
        "experts.down_proj": (4, 128, 64),
        "shared_expert.gate_proj.weight": (128, 64),
        "shared_expert.up_proj.weight": (128, 64),
        "shared_expert.down_proj.weight": (64, 128),
    }


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"interleave_moe_layer_step": 2}, [False, True, False]),
        ({"interleave_moe_layer_step": ...}, [True, True, True]),
        ({"moe_layers": []}, [False, False, False]),
        ({"moe_layers": [0, 2]}, [True, False, True]),
        ({"num_local_experts": ..., "interleave_moe_layer_step": ...}, [False, False, False]),
    ],
)
def test_the_file_says_which_of_llama4_s_layers_have_experts(changes: dict[str, Any], experts: list[bool]) -> None:
    config = tiny_config("eagle1", **{**LLAMA4, "num_hidden_layers": 3, **changes})
    spec, _ = expected_tensors(config, "eagle1")
    assert [layer.moe is not None for layer in spec.layers] == experts
    assert [layer.intermediate_size for layer in spec.layers] == [128 if routed else 160 for routed in experts]


def attentions(changes: dict[str, Any]) -> list[GQASpec]:
    spec, _ = expected_tensors(tiny_config("eagle1", **changes), "eagle1")
    found = [layer.attention for layer in spec.layers]
    assert all(isinstance(attention, GQASpec) for attention in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("changes", "turning", "chunks"),
    [
        ({}, [True, True, True, False, True], [8192, 8192, 8192, None, 8192]),
        ({"no_rope_layers": []}, [True, True, True, False, True], [8192, 8192, 8192, None, 8192]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False, True], [8192, None, 8192, None, 8192]),
        ({"no_rope_layers": [1, 1, 0, 0, 0]}, [True, True, False, False, False], [8192, 8192, None, None, None]),
        ({"attention_chunk_size": None}, [True, True, True, False, True], [None] * 5),
        ({"layer_types": ["full_attention"] * 5}, [True, True, True, False, True], [None] * 5),
    ],
)
def test_which_of_llama4_s_layers_rotate(
    changes: dict[str, Any], turning: list[bool], chunks: list[int | None]
) -> None:
    found = attentions({**LLAMA4, "num_hidden_layers": 5, **changes})
    assert [attention.rotates for attention in found] == turning
    assert [attention.chunk_size for attention in found] == chunks
    assert [attention.qk_norm for attention in found] == turning
    assert [attention.temperature is not None for attention in found] == [not turned for turned in turning]


@pytest.mark.parametrize(("stated", "tuned"), [(..., True), (True, True), (4, True), (False, False), (0, False)])
def test_llama4_s_temperature_is_a_flag_or_a_number(stated: Any, tuned: bool) -> None:
    (found,) = attentions({**LLAMA4, "no_rope_layers": [0], "attn_temperature_tuning": stated})
    assert found.temperature == (TemperatureSpec(attn_scale=0.1, floor_scale=8192.0) if tuned else None)


@pytest.mark.parametrize(
    ("changes", "windows", "turning"),
    [
        ({"model_type": "cohere", "layer_types": ["full_attention"] * 5}, [None] * 5, [True] * 5),
        ({}, [4096, 4096, 4096, None, 4096], [True, True, True, False, True]),
        ({"sliding_window_pattern": 2, "sliding_window": 7}, [7, None, 7, None, 7], [True, False, True, False, True]),
        ({"model_type": "cohere2_moe", "layer_types": ["sliding_attention"] * 5}, [4096] * 5, [True] * 5),
    ],
)
def test_cohere_2_s_windows(changes: dict[str, Any], windows: list[int | None], turning: list[bool]) -> None:
    found = attentions({**COHERE, "model_type": "cohere2", "num_hidden_layers": 5, **changes})
    assert [attention.sliding_window for attention in found] == windows
    assert [attention.rotates for attention in found] == turning


@pytest.mark.parametrize(
    ("changes", "layer_norm", "eps"),
    [
        ({}, True, 1e-5),
        ({"layer_norm_eps": ..., "rms_norm_eps": 1e-3}, True, 1e-5),
        ({"norm_type": "rms_norm", "rms_norm_eps": 1e-3}, False, 1e-3),
        ({"norm_type": "layer_norm", "rms_norm_eps": 1e-3}, True, 1e-5),
        ({"model_type": "cohere2_moe", "rms_norm_eps": 1e-3}, False, 1e-3),
        ({"model_type": "cohere2_moe", "rms_norm_eps": None}, True, 1e-5),
    ],
)
def test_which_norm_a_cohere_draft_has(changes: dict[str, Any], layer_norm: bool, eps: float) -> None:
    spec, _ = expected_tensors(tiny_config("eagle1", **{**COHERE, **changes}), "eagle1")
    assert (spec.options.layer_norm, spec.norm_eps, spec.layers[0].norm_eps) == (layer_norm, eps, eps)


@pytest.mark.parametrize(
    ("changes", "theta"), [(LLAMA4, 500000.0), (COHERE, None), (MINICPM, 10000.0), ({"num_hidden_layers": 1}, 10000.0)]
)
def test_the_base_of_a_file_without_one_is_its_class_s(changes: dict[str, Any], theta: float | None) -> None:
    assert attentions({**changes, "rope_theta": ...})[0].rope.theta == theta


NATIVE = {
    "fc.": "eagle_linear.",
    "layers.0.input_layernorm": "layers.0.attention_norm",
    "layers.0.post_attention_layernorm": "layers.0.ffn_norm",
    "layers.0.self_attn.q_a_proj": "layers.0.attention.wq_a",
    "layers.0.self_attn.q_a_layernorm": "layers.0.attention.q_a_norm",
    "layers.0.self_attn.q_b_proj": "layers.0.attention.wq_b",
    "layers.0.self_attn.kv_a_proj_with_mqa": "layers.0.attention.wkv_a_with_mqa",
    "layers.0.self_attn.kv_a_layernorm": "layers.0.attention.kv_a_norm",
    "layers.0.self_attn.kv_b_proj": "layers.0.attention.wkv_b",
    "layers.0.self_attn.o_proj": "layers.0.attention.wo",
    "layers.0.mlp.gate_proj": "layers.0.feed_forward.w1",
    "layers.0.mlp.down_proj": "layers.0.feed_forward.w2",
    "layers.0.mlp.up_proj": "layers.0.feed_forward.w3",
}


def native(name: str) -> str:
    for ours, theirs in NATIVE.items():
        if name.startswith(ours):
            return name.replace(ours, theirs, 1)
    return name


@pytest.mark.parametrize(
    ("changes", "rename"),
    [
        (MISTRAL, native),
        (MINICPM, lambda name: "model." + name.replace("layers.", "eagle_layers.")),
        (LLAMA4, lambda name: name.replace(".mlp.", ".feed_forward.")),
        ({}, lambda name: name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")),
        ({}, lambda name: "model.model." + name),
    ],
    ids=["mistral", "minicpm", "llama4", "old speculators", "model.model"],
)
def test_other_makers_names_are_known(tmp_path: Path, changes: dict[str, Any], rename: Callable[[str], str]) -> None:
    config = tiny_config("eagle1", **changes)
    write_checkpoint(tmp_path, config, random_tensors(config, "eagle1"), rename=rename)
    draft = open_draft(tmp_path)
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    assert check_draft(tmp_path).ok


# --- checks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["llama", *FORMS])
@pytest.mark.parametrize("how", ["dropped", "misshapen"])
def test_a_broken_tensor_is_named_whatever_its_group(tmp_path: Path, form: str, how: str) -> None:
    config = tiny_config("eagle1", **FORMS.get(form, {}))
    whole = random_tensors(config, "eagle1", dtype="float16")
    for name in whole:
        tensors = dict(whole)
        value = tensors.pop(name)
        if how == "misshapen":
            tensors[name] = value[:-1].clone()
        report = check_draft(
            write_checkpoint(tmp_path, config, tensors),
            checks=["weights.missing", "weights.shapes", "weights.biases"],
        )
        found = [
            str((result.message, [f.where for f in result.findings])) for result in report if result.status == "failed"
        ]
        assert any(name in text for text in found), (name, found)


@pytest.mark.parametrize("name", ["layers.0.input_layernorm.weight", "norm.weight"])
def test_a_norm_that_the_layout_does_not_have_is_named(tmp_path: Path, name: str) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name] = torch.full((64,), 1.5, dtype=torch.float16)

    report = check_draft(write_tiny(tmp_path, "eagle1", dtype="float16", edit=edit), checks=["weights"])
    assert report["weights.unexpected"].status == "failed"
    assert name in report["weights.unexpected"].message
    converted = write_tiny(tmp_path / "converted", "eagle1", config=CONVERTED, dtype="float16", edit=edit)
    assert check_draft(converted, checks=["weights"])["weights.unexpected"].status == "passed"


def test_a_bias_without_its_flag_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(CONVERTED, "eagle1")
    unflagged = {key: value for key, value in CONVERTED.items() if key != "eagle_fc_bias"}
    result = check_draft(write_checkpoint(tmp_path, unflagged, tensors), checks=["weights"])["weights.biases"]
    assert result.status == "failed"
    assert "fc.bias" in result.message


def test_a_reduced_head_needs_its_map(tmp_path: Path) -> None:
    tensors = random_tensors(CONVERTED, "eagle1")
    assert tensors["lm_head.weight"].shape == (256, 64)
    assert tensors["token_map"].shape == (256,)
    assert check_draft(write_checkpoint(tmp_path, CONVERTED, tensors)).ok
    del tensors["token_map"]
    result = check_draft(write_checkpoint(tmp_path, CONVERTED, tensors), checks=["weights"])["weights.missing"]
    assert (result.status, "token_map" in result.message) == ("failed", True)


def test_a_pickled_file_is_read(tmp_path: Path) -> None:
    config = tiny_config("eagle1", architectures=["LlamaForCausalLM"])
    tensors = random_tensors(config, "eagle1")
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    report = check_draft(tmp_path)
    assert report.ok
    assert [result.id for result in report if result.status == "warned"] == ["files.pickle"]
    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert draft.spec.family == "eagle1"
    assert torch.equal(draft.tensor("fc.weight"), tensors["fc.weight"])
    twin = open_draft(write_checkpoint(tmp_path / "twin", config, tensors))
    probe = twin.layer(0).probe(3, 1)
    assert torch.equal(draft.layer(0).prefill(probe), twin.layer(0).prefill(probe))


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_passes_every_check(tmp_path: Path, form: str) -> None:
    report = check_draft(write_tiny(tmp_path, "eagle1", **FORMS[form]))
    assert not [result for result in report if result.status in ("failed", "warned")]
    for id in ("layers.build", "layers.finite", "layers.incremental"):
        assert report[id].status == "passed", id


def test_a_layer_that_does_not_rotate_needs_no_base(tmp_path: Path) -> None:
    unturned = write_tiny(tmp_path / "one", "eagle1", **{**LLAMA4, "no_rope_layers": [0], "rope_theta": ...})
    assert check_draft(unturned, checks=["rope"])["rope.theta-stated"].status == "skipped"
    silent = write_tiny(tmp_path / "two", "eagle1", **COHERE, rope_theta=...)
    assert check_draft(silent, checks=["rope"])["rope.theta-stated"].status == "failed"


@pytest.mark.parametrize(("key", "value"), [("floor_scale", 0), ("attention_chunk_size", 0)])
def test_a_scale_that_divides_by_nothing_is_named(tmp_path: Path, key: str, value: int) -> None:
    lists = {"no_rope_layers": [0 if key == "floor_scale" else 1]}
    path = write_tiny(tmp_path, "eagle1", **{**LLAMA4, **lists, key: value})
    result = check_draft(path, checks=["layers.build"])["layers.build"]
    assert (result.status, result.findings[0].where) == ("failed", key)


# --- forward -------------------------------------------------------------------------------------------------------------


def ours(draft: Draft, embeds: Array, hidden: Array, positions: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """What `fc` gives, and what comes out behind all layers."""
    assert draft.spec is not None
    head = Eagle1Head(draft.spec, draft.source(dtype=torch.float64))
    states = fused = head.fuse(tensor(embeds), tensor(hidden))
    for layer in draft.layers(dtype=torch.float64):
        states = layer.forward(states, torch.from_numpy(positions.astype(np.int64)))  # type: ignore[attr-defined]
    return fused, head.output(states)


def written(directory: Path, **changes: Any) -> tuple[Draft, Weights]:
    draft = open_draft(write_tiny(directory, "eagle1", seed=3, dtype="float32", **changes))
    return draft, weights_of(draft)


POSITIONS = np.array([3.0, 4, 5, 9, 10, 40])


def test_one_and_two_layers(tmp_path: Path) -> None:
    draft, w = written(tmp_path, num_hidden_layers=2, qkv_bias=True)
    embeds, hidden = numbers(1, TOKENS, HIDDEN), 2 * numbers(2, TOKENS, HIDDEN)
    fused, out = ours(draft, embeds, hidden, POSITIONS)
    x = np.concatenate([embeds, hidden], axis=-1) @ w["fc.weight"].T + w["fc.bias"]
    close(fused, x)
    for layer in range(2):
        n = x if layer == 0 else rms(x, w["layers.1.input_layernorm.weight"], 1e-5)
        y = x + attention(w, layer, n, POSITIONS, heads=4, kv_heads=2, theta=500000.0)
        x = y + mlp(w, layer, rms(y, w[f"layers.{layer}.post_attention_layernorm.weight"], 1e-5))
    close(out, x)


def test_a_file_without_a_base_is_rotated_by_10000(tmp_path: Path) -> None:
    draft, w = written(tmp_path, rope_theta=...)
    embeds, hidden = numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN)
    _, out = ours(draft, embeds, hidden, POSITIONS)
    x = np.concatenate([embeds, hidden], axis=-1) @ w["fc.weight"].T + w["fc.bias"]
    y = x + attention(w, 0, x, POSITIONS, heads=4, kv_heads=2, theta=10000.0)
    close(out, y + mlp(w, 0, rms(y, w["layers.0.post_attention_layernorm.weight"], 1e-5)))


def test_minicpm_scales_embeddings_sublayers_and_output(tmp_path: Path) -> None:
    draft, w = written(tmp_path, **MINICPM)
    embeds, hidden = numbers(1, TOKENS, HIDDEN), 3 * numbers(2, TOKENS, HIDDEN)
    _, out = ours(draft, embeds, hidden, POSITIONS)
    normed = rms(12 * embeds, w["input_norm1.weight"], 1e-5), rms(hidden, w["input_norm2.weight"], 1e-5)
    x = np.concatenate(normed, axis=-1) @ w["fc.weight"].T
    scale = 1.4 / np.sqrt(32)
    n = rms(x, w["layers.0.input_layernorm.weight"], 1e-5)
    y = x + scale * attention(w, 0, n, POSITIONS, heads=4, kv_heads=2, theta=500000.0)
    z = y + scale * mlp(w, 0, rms(y, w["layers.0.post_attention_layernorm.weight"], 1e-5))
    close(out, z / (64 / 16))


def test_cohere_runs_its_sublayers_side_by_side(tmp_path: Path) -> None:
    draft, w = written(tmp_path, **COHERE)
    embeds, hidden = numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN) + 1
    _, out = ours(draft, embeds, hidden, POSITIONS)
    x = np.concatenate([embeds, hidden], axis=-1) @ w["fc.weight"].T + w["fc.bias"]
    n = layer_norm(x, w["layers.0.input_layernorm.weight"], 1e-5)
    z = x + attention(w, 0, n, POSITIONS, heads=4, kv_heads=2, theta=500000.0, neox=False) + mlp(w, 0, n)
    close(out, layer_norm(z, w["norm.weight"], 1e-5))


def test_cohere_norms_each_head_with_a_weight_of_its_own(tmp_path: Path) -> None:
    draft, w = written(tmp_path, **FORMS["cohere-head-norms"])
    embeds, hidden = numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN) + 1
    fused, out = ours(draft, embeds, hidden, POSITIONS)
    x = fused.numpy()
    n = layer_norm(x, w["layers.0.input_layernorm.weight"], 1e-5)
    q, k, v = (heads_of(n, w, part) for part in "qkv")
    q, k = (layer_norm(each, w[f"layers.0.self_attn.{part}_norm.weight"], 1e-5) for each, part in ((q, "q"), (k, "k")))
    q, k = (turn_heads(each, 500000.0) for each in (q, k))
    seen = np.tril(np.ones((TOKENS, TOKENS), dtype=bool))
    z = x + attended(w, q, k, v, seen) + mlp(w, 0, n)
    close(out, layer_norm(z, w["norm.weight"], 1e-5))


def test_cohere_s_logits_are_scaled_and_its_states_are_not(tmp_path: Path) -> None:
    draft, _ = written(tmp_path, **COHERE, logit_scale=0.25)
    assert draft.spec is not None
    head = Eagle1Head(draft.spec, draft.source(dtype=torch.float64))
    states, weight = tensor(numbers(1, TOKENS, HIDDEN)), tensor(numbers(2, 512, HIDDEN))
    close(head.logits(states, weight), states.numpy() @ weight.numpy().T / 4)
    with pytest.raises(LayerBuildError, match=r"lm_head\.weight"):
        head.logits(states)
    default = open_draft(write_tiny(tmp_path / "default", "eagle1", **COHERE)).spec
    assert default is not None
    assert default.options.logit_scale == 0.0625


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("turned_layer", [False, True])
def test_a_llama4_layer(tmp_path: Path, experts: bool, turned_layer: bool) -> None:
    sizes = {"attention_chunk_size": 6, "floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [int(turned_layer)]}
    draft, w = written(tmp_path, **{**(LLAMA4_EXPERTS if experts else LLAMA4), **sizes})
    embeds, hidden = numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN)
    _, out = ours(draft, embeds, hidden, POSITIONS)
    x = np.concatenate([embeds, hidden], axis=-1) @ w["fc.weight"].T
    n = rms(x, w["layers.0.input_layernorm.weight"], 1e-5)
    q, k, v = (heads_of(n, w, part) for part in "qkv")
    seen = np.tril(np.ones((TOKENS, TOKENS), dtype=bool))
    if turned_layer:
        q, k = (rms(turn_heads(each, 500000.0), np.ones(16), 1e-5) for each in (q, k))
        # Positions 3, 4 and 5 lie in the first chunk of six; 9 and 10 in the second; 40 in one of its own.
        seen &= np.equal.outer([0, 0, 0, 1, 1, 6], [0, 0, 0, 1, 1, 6])
    else:
        # Four positions to a step, counted from one: 3 is the fourth.
        q = q * (1 + 0.5 * np.log(1 + np.array([1, 1, 1, 2, 2, 10])))[:, None, None]
    y = x + attended(w, q, k, v, seen)
    n = rms(y, w["layers.0.post_attention_layernorm.weight"], 1e-5)
    z = y + (llama4_experts(w, n, chosen=2) if experts else mlp(w, 0, n))
    close(out, rms(z, w["norm.weight"], 1e-5))


def heads_of(states: Array, w: Weights, part: str) -> Array:
    projected: Array = states @ w[f"layers.0.self_attn.{part}_proj.weight"].T
    return projected.reshape(TOKENS, -1, 16)


def turn_heads(heads: Array, theta: float) -> Array:
    return np.stack([turned(heads[:, head], POSITIONS, theta, neox=False) for head in range(heads.shape[1])], axis=1)


def attended(w: Weights, q: Array, k: Array, v: Array, seen: Array) -> Array:
    outputs = []
    for head in range(q.shape[1]):
        kv = head // (q.shape[1] // k.shape[1])
        scores = np.where(seen, q[:, head] @ k[:, kv].T / np.sqrt(q.shape[-1]), -np.inf)
        exps = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(exps / exps.sum(axis=-1, keepdims=True) @ v[:, kv])
    out: Array = np.concatenate(outputs, axis=-1) @ w["layers.0.self_attn.o_proj.weight"].T
    return out


def llama4_experts(w: Weights, x: Array, chosen: int) -> Array:
    name = "layers.0.mlp."
    scores = x @ w[name + "router.weight"].T
    rows = []
    for row, logits in zip(x, scores, strict=True):
        shared = silu(w[name + "shared_expert.gate_proj.weight"] @ row) * (
            w[name + "shared_expert.up_proj.weight"] @ row
        )
        total = w[name + "shared_expert.down_proj.weight"] @ shared
        for index in np.argsort(-logits)[:chosen]:
            given = row / (1 + np.exp(-logits[index]))
            gate, up = np.split(given @ w[name + "experts.gate_up_proj"][index], 2)
            total = total + (silu(gate) * up) @ w[name + "experts.down_proj"][index]
        rows.append(total)
    return np.stack(rows)


def test_mistral_large_3_is_a_deepseek_layer(tmp_path: Path) -> None:
    """The attention itself is held against transformers elsewhere; here it is what stands around it."""
    draft, w = written(tmp_path, **MISTRAL)
    embeds, hidden = numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN)
    _, out = ours(draft, embeds, hidden, POSITIONS)
    x = np.concatenate([embeds, hidden], axis=-1) @ w["fc.weight"].T
    n = rms(x, w["layers.0.input_layernorm.weight"], 1e-5)
    layer: Any = draft.layer(0, dtype=torch.float64)
    attended = layer.self_attn.forward_naive(tensor(n), torch.from_numpy(POSITIONS.astype(np.int64))).numpy()
    y = x + attended
    z = y + mlp(w, 0, rms(y, w["layers.0.post_attention_layernorm.weight"], 1e-5))
    close(out, rms(z, w["norm.weight"], 1e-5))


@pytest.mark.parametrize("form", ["llama", *FORMS])
def test_step_by_step_is_one_prefill(tmp_path: Path, form: str) -> None:
    small = {"attention_chunk_size": 3, "floor_scale": 2} if form.startswith("llama4") else {}
    draft, _ = written(tmp_path, **{**FORMS.get(form, {}), **small})
    assert draft.spec is not None
    assert isinstance(draft.spec.options, Eagle1Options)
    assert form.removesuffix("2").startswith(draft.spec.options.variant)
    layer = draft.layer(0, dtype=torch.float64)
    for batch in (1, 2):
        probe = layer.probe(7, 1, batch=batch)
        torch.testing.assert_close(layer.incremental(probe), layer.prefill(probe), rtol=0, atol=1e-12)
