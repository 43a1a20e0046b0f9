"""Keys that nobody reads, nulls, labels and numbers of layers.

What goes wrong without this file: a misspelled option passes for a stated one; a key that means something to somebody else is called a
mistake; a table of known keys that falls behind the parsers; a null that stops a server passes, or a legal one does not; an engine's
own rule is taken for everybody's.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import pytest_specdecode.families
from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks.known_keys import READ, UNREAD, keys_of
from pytest_specdecode.engines.hf_config import NO_NULLS
from pytest_specdecode.findings import CheckResult

CORPUS = Path(__file__).parents[1] / "corpus"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CORPUS / "expected.json").read_text(encoding="utf-8"))
MINE = (
    *("config.unread-keys", "config.null-values", "config.architectures", "config.num-hidden-layers"),
    *("config.quantization", "config.dtype", "weights"),
)

#: Methods of a configuration's section that look for the keys they are given.
_ASKING = ("raw", "extent", "flag", "number", "text", "ids", "section", "layers", "stated", "texts", "fraction")


def _result(
    tmp_path: Path, id: str, family: str = "eagle3", engines: list[str] | None = None, **changes: Any
) -> CheckResult:
    """What the check says of the tiny draft's configuration with `changes`; without weights, nothing else is in the way."""
    (tmp_path / "config.json").write_text(json.dumps(testing.tiny_config(family, **changes)))
    return check_draft(tmp_path, checks=[id], engines=engines)[id]


def _asked() -> set[str]:
    found = set()
    for file in Path(pytest_specdecode.families.__file__).parent.glob("*.py"):
        if file.name in ("config.py", "quantised.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ASKING:
                found |= {
                    item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)
                }
    return found


#: Keys of RoPE dictionaries, of lists and of objects that have checks of their own.
_DEEPER = {
    *(
        "proposal_methods",
        "speculative_tokens",
        "proposal_type",
        "rope_type",
        "type",
        "full_attention",
        "sliding_attention",
    ),
    *("rank", "num_candidates", "dim", "verifier", "algorithm"),
    *("bits", "group_size", "quant_method", "weight_block_size"),
}


def test_the_table_holds_every_key_that_a_parser_looks_for() -> None:
    known = frozenset().union(*READ.values(), UNREAD, *(keys_of(section) for section in READ))
    assert _asked() - known - _DEEPER == set()


def test_no_key_is_both_read_and_not() -> None:
    assert frozenset().union(*READ.values()) & UNREAD == frozenset()


@pytest.mark.parametrize(
    ("family", "changes", "key", "due"),
    [
        ("eagle3", {"target_vocab_size": 151936}, "target_vocab_size", "vocab_size"),
        ("eagle3", {"speculator_config": {}}, "speculator_config", "speculators_config"),
        ("eagle3", {"use_aux_hidden_states": True}, "use_aux_hidden_states", "eagle_config.use_aux_hidden_state"),
        (
            "eagle3",
            {"eagle_config": {"aux_hidden_state_layer_ids": [2, 8, 13]}},
            "eagle_config.aux_hidden_state_layer_ids",
            "eagle_config.eagle_aux_hidden_state_layer_ids",
        ),
        ("eagle3", {"norm_befor_fc": True}, "norm_befor_fc", "norm_before_fc"),
        ("eagle3", {"eagle_config": {"norm_before_fcs": True}}, "eagle_config.norm_before_fcs", "eagle_config.norm_before_fc"),
        ("dflash", {"dflash_config": {"mask_tokenid": 511}}, "dflash_config.mask_tokenid", "dflash_config.mask_token_id"),
        ("dflash", {"dflash_config": {"target_layers_ids": [1]}}, "dflash_config.target_layers_ids", "dflash_config.target_layer_ids"),
        ("mlp-speculator", {"top_k_tokesns_per_head": [4, 3, 2]}, "top_k_tokesns_per_head", "top_k_tokens_per_head"),
    ],
)  # fmt: skip
def test_a_misspelled_key_is_named_with_the_one_that_is_read(
    family: str, changes: dict[str, Any], key: str, due: str, tmp_path: Path
) -> None:
    result = _result(tmp_path, "config.unread-keys", family, **changes)
    found = {finding.where: finding for finding in result.findings if finding.fault == "key-misspelled"}
    assert result.status == "warned"
    assert found[f"config.json: {key}"].due == due


@pytest.mark.parametrize(
    "changes",
    [
        {"eom_token_id": 7, "eos_token_ids": [7], "mrope_section": [8, 4, 4]},
        {"norm_before_fcs": None},
        {"our_trainer_run": "x", "wandb_run_id": 3, "loss_weights": [1]},
        {"norm_before_fc": False, "norm_before_fc2": 1},
    ],
    ids=["other ids", "null", "far from all", "beside the key itself"],
)
def test_a_key_of_somebody_else_is_no_mistake(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not _result(tmp_path, "config.unread-keys", **changes).findings


def test_a_key_that_every_engine_passes_over_is_an_error_and_says_what_they_do(tmp_path: Path) -> None:
    nested = {**testing.tiny_config("dflash")["dflash_config"], "fc_layernorm": True}
    result = _result(tmp_path, "config.unread-keys", "dflash", dflash_config=nested)
    (finding,) = result.findings
    assert (result.status, finding.where) == ("failed", "config.json: dflash_config.fc_layernorm")
    assert {outcome.outcome for outcome in finding.outcomes.values()} == {"serves wrong"}
    assert "gives fc the taps without a norm" in finding.message


def test_a_key_that_one_engine_passes_over_is_a_warning_until_that_engine_is_chosen(tmp_path: Path) -> None:
    changes = {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "rope_theta": ...}
    result = _result(tmp_path, "config.unread-keys", "dflash", **changes)
    (finding,) = result.findings
    assert (finding.severity, finding.outcomes["sglang"].outcome, finding.outcomes["vllm"].outcome) == (
        *("warning", "serves wrong", "fine"),
    )
    assert _result(tmp_path, "config.unread-keys", "dflash", ["sglang"], **changes).status == "failed"
    assert not _result(tmp_path, "config.unread-keys", "dflash", ["vllm"], **changes).findings


@pytest.mark.parametrize(("model_type", "key"), [("llama", "use_cache"), ("qwen3", "head_dim"), ("llama", "mlp_bias")])
def test_a_null_that_a_configuration_class_refuses(model_type: str, key: str, tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, "config.null-values", model_type=model_type, **{key: None}).findings
    assert finding.where == f"config.json: {key}"
    assert finding.outcomes["sglang"].outcome == finding.outcomes["vllm"].outcome == "stops"
    assert finding.outcomes["tensorrt-llm"].outcome == "unknown"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None, "sliding_window": None, "pad_token_id": None, "num_key_value_heads": None},
        {"head_dim": None},
        {"model_type": "of-nobody", "use_cache": None},
    ],
    ids=["optional", "llama derives it", "class not known"],
)
def test_a_legal_null_is_none(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not _result(tmp_path, "config.null-values", **changes).findings


@pytest.mark.parametrize("key", ["use_cache", "initializer_range"])
def test_a_null_in_the_layers_of_a_speculators_file(key: str, tmp_path: Path) -> None:
    """speculators 0.9.0 with transformers 5.15.0 refuses to load it; what vLLM does is not known, so it is a warning."""
    layer = testing.tiny_config("xpress")["transformer_layer_config"]
    result = _result(tmp_path, "config.null-values", "xpress", transformer_layer_config={**layer, key: None})
    (finding,) = result.findings
    assert (finding.severity, finding.where) == ("warning", f"config.json: transformer_layer_config.{key}")
    assert {outcome.outcome for outcome in finding.outcomes.values()} == {"unknown"}
    for legal in ({"sliding_window": None}, {"model_type": None, key: None}):
        config = {**layer, **legal}
        assert not _result(tmp_path, "config.null-values", "xpress", transformer_layer_config=config).findings
    assert not _result(tmp_path, "config.null-values", "xpress", transformer_layer_config=None).findings


def test_the_classes_and_the_keys_of_each_are_those_tried_by_hand() -> None:
    assert {"use_cache", "tie_word_embeddings", "hidden_size"} <= frozenset.intersection(*NO_NULLS.values())
    assert "q_lora_rank" not in NO_NULLS["deepseek_v3"]


def test_a_label_without_a_class_in_one_engine(tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, "config.architectures", architectures=["Eagle3LlamaForCausalLM"]).findings
    assert finding.severity == "warning"
    assert {name: outcome.outcome for name, outcome in finding.outcomes.items()} == {
        "sglang": "stops",
        "vllm": "fine",
        "tensorrt-llm": "unknown",
    }
    assert finding.due == ["LlamaForCausalLMEagle3"]
    chosen = _result(tmp_path, "config.architectures", engines=["sglang"], architectures=["Eagle3LlamaForCausalLM"])
    assert chosen.status == "failed"
    chosen = _result(tmp_path, "config.architectures", engines=["vllm"], architectures=["Eagle3LlamaForCausalLM"])
    assert not chosen.findings


def test_a_plain_label_keeps_each_engine_s_own_word(tmp_path: Path) -> None:
    result = _result(tmp_path, "config.architectures", architectures=["LlamaForCausalLM"])
    (finding,) = result.findings
    assert finding.fault == "architecture-plain-llama"
    assert "users rewrite the field" in finding.outcomes["sglang"].message
    assert finding.outcomes["vllm"].outcome == "fine"


def test_a_latent_draft_of_several_layers_stops_the_engine_that_takes_one(tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, "config.num-hidden-layers", "eagle3-mla", num_hidden_layers=2).findings
    assert finding.severity == "error"
    assert finding.outcomes["sglang"].message == "EAGLE3 currently only supports 1 layer"
    assert finding.outcomes["vllm"].outcome == "fine"
    assert not _result(tmp_path, "config.num-hidden-layers", "eagle3-mla", ["vllm"], num_hidden_layers=2).findings


def test_a_family_of_one_layer_takes_one_whatever_the_engine(tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, "config.num-hidden-layers", "eagle4", num_hidden_layers=3).findings
    assert (finding.severity, finding.due) == ("error", 1)


ODD: list[Any] = [None, "x", "", -1, 1 << 70, 1e400, [], {}, [[]], {"a": None}, True]


@pytest.mark.parametrize("family", ["eagle3", "dflash", "mtp"])
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_values_end_in_no_traceback(odd: Any, family: str, tmp_path: Path) -> None:
    keys = (
        "architectures",
        "eagle_config",
        "dflash_config",
        "quantization_config",
        "dtype",
        "torch_dtype",
        "num_hidden_layers",
    )
    for key in (*keys, "use_cache", "attention_bias", "norm_before_fc", "attention_value_scale", "attention_sink_bias"):
        (tmp_path / "config.json").write_text(json.dumps(testing.tiny_config(family, **{key: odd})))
        report = check_draft(tmp_path, checks=list(MINE), serve="dtype=float16")
        assert not [result for result in report if "the check itself broke" in result.message]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_public_configuration_is_reported_as_listed_and_no_other_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CORPUS / "configs" / name).read_bytes())
    listed = EXPECTED[name]["findings"]
    for result in check_draft(tmp_path, checks=list(MINE)):
        if result.id in listed:
            assert result.status in ("failed", "warned"), result
        else:
            assert result.status != "failed", result


# --- config.family --------------------------------------------------------------------------------------------------------------------


def test_eagle3_weights_under_eagles_label_are_served_without_a_word(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "eagle3", architectures=["EagleLlamaForCausalLM"])
    (finding,) = check_draft(path, checks=["config.family"])["config.family"].findings
    assert finding.outcomes["sglang"].outcome == "serves wrong"
    assert "accepted length 1.00" in finding.outcomes["sglang"].message
    assert finding.outcomes["vllm"].outcome == "unknown"


def test_other_labels_over_other_weights_are_not_said_to_run(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "eagle3", architectures=["DFlashDraftModel"])
    (finding,) = check_draft(path, checks=["config.family"])["config.family"].findings
    assert finding.outcomes["sglang"].outcome == "unknown"
    assert "goes by the label" in finding.outcomes["sglang"].message
