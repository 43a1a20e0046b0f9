"""Values that parse and cannot be: of the wrong kind, out of all bounds, or at odds with another one.

What goes wrong without this file: a draft that an engine stops at when it starts, or that runs on another base, scaling or epsilon than
it was trained with, passes every check because each value by itself can be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.engines.hf_config import EPS_DEFAULTS, MODEL_TYPES, NO_NULLS
from pytest_specdecode.findings import CheckResult

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "scoring_func": "sigmoid",
}


def _check(
    path: Path, id: str, family: str = "eagle3", *, weights: bool = True, target: Any = None, **changes: Any
) -> CheckResult:
    """What check `id` says of the tiny draft after `changes` of its written configuration; `...` drops a key."""
    draft = path / "draft"
    testing.write_tiny(draft, family)
    file = draft / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    if not weights:
        (draft / "model.safetensors").unlink()
    if target is not None:
        (path / "target").mkdir()
        (path / "target" / "config.json").write_text(json.dumps(target))
    return check_draft(draft, checks=[id], target=None if target is None else path / "target")[id]


@pytest.mark.parametrize("count", [..., None])
def test_prediction_layers_whose_number_no_key_states(tmp_path: Path, count: Any) -> None:
    """SGLang: ValueError `num_nextn_predict_layers is not in the config`."""
    result = _check(tmp_path, "mtp.layers", "mtp", num_nextn_predict_layers=count)
    (finding,) = result.findings
    assert (result.status, finding.due) == ("failed", 1)
    assert "not in the config" in finding.outcomes["sglang"].message


@pytest.mark.parametrize("family", ["eagle1", "eagle3", "eagle3-mla", "peagle", "dflash", "dspark"])
def test_an_activation_that_engines_have_no_layers_for(tmp_path: Path, family: str) -> None:
    result = _check(tmp_path, "config.types", family, hidden_act="gelu")
    (finding,) = result.findings
    assert (result.status, finding.where, finding.due) == ("failed", "config.json: hidden_act", "silu")
    assert {name: finding.outcomes[name].outcome for name in ("sglang", "vllm")} == {"sglang": "stops", "vllm": "stops"}


@pytest.mark.parametrize("stated", [..., None, "bogus", 3, ["llama"]])
def test_a_model_type_that_no_configuration_class_goes_by(tmp_path: Path, stated: Any) -> None:
    result = _check(tmp_path, "config.architectures", "dflash", model_type=stated)
    assert (result.status, result.findings[0].where) == ("warned", "config.json: model_type")
    assert "AutoConfig" in result.message


def test_a_model_type_of_code_that_comes_along_or_of_an_engine_is_no_fault(tmp_path: Path) -> None:
    assert (
        _check(tmp_path / "a", "config.architectures", model_type="own", auto_map={"AutoConfig": "c.C"}).status
        == "passed"
    )
    assert _check(tmp_path / "b", "config.architectures", "eagle3-mla", model_type="kimi_k2").status == "passed"
    assert set(NO_NULLS) | set(EPS_DEFAULTS) <= MODEL_TYPES


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("stated", ["bf16", "bf17", "fp16", "BFLOAT16"])
def test_a_dtype_that_torch_does_not_have(tmp_path: Path, key: str, stated: str) -> None:
    """transformers 5.15.0: AttributeError, module 'torch' has no attribute 'bf16'."""
    changes = {"torch_dtype": ..., "dtype": ..., key: stated}
    result = _check(tmp_path, "config.dtype", **changes)
    (finding,) = result.findings
    assert (result.status, finding.where, finding.due) == ("failed", f"config.json: {key}", "bfloat16")


@pytest.mark.parametrize("stated", ["auto", "half", "torch.bfloat16", "float8_e4m3fn"])
def test_a_dtype_that_torch_has_is_no_error(tmp_path: Path, stated: str) -> None:
    assert _check(tmp_path, "config.dtype", torch_dtype=stated).status in ("passed", "warned")


@pytest.mark.parametrize("key", ["use_cache", "attention_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("stated", ["yes", 1])
def test_a_switch_that_is_neither_true_nor_false(tmp_path: Path, key: str, stated: Any) -> None:
    result = _check(tmp_path, "config.types", **{key: stated})
    assert (result.status, [item.where for item in result.findings]) == ("failed", [f"config.json: {key}"])


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"quant_method": "bogus"}, "none that an engine is known to have"),
        ({"quant_method": 7}, "none that an engine is known to have"),
        ("fp8", "quantization_config is a str"),
        (["fp8"], "quantization_config is a list"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "says modelopt"),
        ({"quant_algo": "NVFP4", "exclude_modules": []}, "says modelopt"),
    ],
)
def test_a_section_on_quantisation_that_plain_weights_do_not_have(tmp_path: Path, section: Any, text: str) -> None:
    result = _check(tmp_path, "config.quantization", quantization_config=section)
    assert result.status == "failed"
    assert text in result.message


def test_modelopts_own_list_is_heard_inside_the_configuration(tmp_path: Path) -> None:
    section = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["*"]}}
    assert _check(tmp_path, "config.quantization", quantization_config=section).status == "passed"


def test_a_section_on_quantisation_without_a_method(tmp_path: Path) -> None:
    assert _check(tmp_path, "config.quantization", quantization_config={"weights": "int4"}).status == "warned"


def test_a_cut_quantisation_file_beside_the_weights(tmp_path: Path) -> None:
    testing.write_tiny(tmp_path, "eagle3")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant')
    result = check_draft(tmp_path, checks=["files.readable"])["files.readable"]
    assert result.status == "failed"
    assert "hf_quant_config.json" in result.findings[0].where


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        (YARN, {**YARN, "factor": 8.0}, "factor"),
        (YARN, {"rope_type": "linear", "factor": 4.0}, "rope_type"),
        (YARN, {"rope_type": "default"}, "rope_type"),
        (YARN, {**YARN, "original_max_position_embeddings": 2048}, "original_max_position_embeddings"),
        (YARN, {"full_attention": {**YARN, "factor": 2.0}}, "factor"),
    ],
)
def test_two_scalings_that_are_not_one(tmp_path: Path, one: Any, other: Any, differs: str) -> None:
    result = _check(tmp_path, "rope.scaling-complete", rope_scaling=one, rope_parameters=other)
    assert result.status == "failed"
    (finding,) = [item for item in result.findings if "different scalings" in item.message]
    assert finding.message.endswith(differs)
    assert "rope_scaling" in finding.where
    assert "rope_parameters" in finding.where


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (YARN, YARN),
        (YARN, {"rope_theta": 10000.0}),
        ({"type": "deepseek_yarn", "factor": 4.0}, YARN),
        ({"rope_type": "mrope", "mrope_section": [2, 3, 3]}, {"rope_type": "default"}),
        (YARN, {"sliding_attention": {"rope_type": "default"}, "full_attention": YARN}),
    ],
)
def test_two_scalings_that_are_one(tmp_path: Path, one: Any, other: Any) -> None:
    result = _check(tmp_path, "rope.scaling-complete", rope_scaling=one, rope_parameters=other)
    assert not [item for item in result.findings if "different scalings" in item.message]


@pytest.mark.parametrize(
    ("family", "model_type", "filled"), [("eagle3", "llama", "1e-06"), ("dflash", "gpt_oss", "1e-05")]
)
def test_an_epsilon_that_is_left_to_the_class(tmp_path: Path, family: str, model_type: str, filled: str) -> None:
    result = _check(tmp_path, "config.types", family, rms_norm_eps=..., model_type=model_type)
    assert (result.status, result.findings[0].where) == ("warned", "config.json: rms_norm_eps")
    assert result.message.endswith(f"the class of {model_type} fills in {filled}")


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_type_of_scaling_that_nobody_has(tmp_path: Path, key: str) -> None:
    result = _check(tmp_path, "rope.scaling-complete", rope_scaling={key: "bogus", "factor": 2.0})
    assert result.status == "failed"
    assert "Unknown RoPE scaling type" in result.findings[0].outcomes["sglang"].message


@pytest.mark.parametrize("value", ["64", [64], {}, 64.5, True])
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_width_of_the_target_that_is_no_number_is_never_passed(tmp_path: Path, key: str, value: Any) -> None:
    target = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 16}
    assert _check(tmp_path / "twin", "target.widths", target=target).status == "passed"
    result = _check(tmp_path, "target.widths", target={**target, key: value})
    assert result.status == "warned"
    assert result.findings[0].where == f"the target's config.json: {key}"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"scoring_func": "bogus"}, "scoring_func"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
    ],
)
def test_experts_that_cannot_be_chosen(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    assert not _check(tmp_path / "twin", "config.types", "mtp", weights=False, **DEEPSEEK).findings
    result = _check(tmp_path, "config.types", "mtp", weights=False, **{**DEEPSEEK, **change})
    assert (result.status, [item.where for item in result.findings]) == ("failed", [f"config.json: {key}"])


@pytest.mark.parametrize(
    ("family", "change", "status", "key"),
    [
        ("eagle3", {"rope_theta": 0}, "failed", "rope_theta"),
        ("eagle3", {"rope_theta": -1.0}, "failed", "rope_theta"),
        ("eagle3", {"rope_theta": 0.5}, "warned", "rope_theta"),
        ("eagle3", {"rope_parameters": {"rope_theta": 0.0}}, "failed", "rope_parameters.rope_theta"),
        ("eagle3", {"max_position_embeddings": 0}, "failed", "max_position_embeddings"),
        ("eagle3", {"max_position_embeddings": -5}, "failed", "max_position_embeddings"),
        ("dflash", {"max_position_embeddings": 2}, "failed", "max_position_embeddings"),
    ],
)
def test_bases_and_lengths_that_cannot_be(
    tmp_path: Path, family: str, change: dict[str, Any], status: str, key: str
) -> None:
    result = _check(tmp_path, "config.types", family, **change)
    assert result.status == status
    assert result.findings[0].where.endswith(key)


def test_a_base_at_top_level_beside_that_of_the_layers(tmp_path: Path) -> None:
    layer = testing.tiny_config("eagle3", rope_theta=10000.0)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": layer["draft_vocab_size"],
        "transformer_layer_config": layer,
    }
    found = {}
    for theta in (10000, 500000.0):
        (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": theta}))
        found[theta] = check_draft(tmp_path, checks=["rope.theta-agrees"])["rope.theta-agrees"]
    assert found[10000].status == "passed"
    assert found[500000.0].status == "failed"
    assert found[500000.0].findings[0].got == {"rope_theta": 500000.0, "transformer_layer_config.rope_theta": 10000.0}
