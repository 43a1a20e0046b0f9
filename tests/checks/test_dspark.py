"""DSpark's checks beyond one row each.

What goes wrong without this file: a head key in the one place that an engine does not look at; a rank of zero taken for a fault of the
file; head tensors that are there under names nobody finds; a matrix with a row for each draft id where target ids index it; a flag that
says one width where the weights have another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, testing
from pytest_specdecode.findings import CheckResult

Tensors = dict[str, torch.Tensor]
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
#: The keys that make the tiny draft one of Kimi K3's kind.
LATENT = {
    "architectures": ["K3DSparkModel"],
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_target_layers": 3,
    "target_num_hidden_layers": 20,
}


def _keys(
    tmp_path: Path, nested: dict[str, Any] | None = None, engines: list[str] | None = None, **changes: Any
) -> CheckResult:
    config = testing.tiny_config("dspark", **changes)
    if nested is not None:
        config["dflash_config"] = nested
    (tmp_path / "config.json").write_text(json.dumps(config))
    return check_draft(tmp_path, checks=["dspark.keys"], engines=engines)["dspark.keys"]


def _heads(
    tmp_path: Path, edit: Callable[[Tensors], Any] | None = None, *, after: dict[str, Any] | None = None, **shape: Any
) -> CheckResult:
    """dspark.heads on a draft built for `shape`, its tensors changed by `edit` and its configuration by `after`."""
    path = testing.write_tiny(tmp_path, "dspark", config=testing.tiny_config("dspark", **shape), edit=edit)
    if after:
        config = {**json.loads((path / "config.json").read_text()), **after}
        kept = {key: value for key, value in config.items() if value is not ...}
        (path / "config.json").write_text(json.dumps(kept))
    return check_draft(path, checks=["dspark.heads"])["dspark.heads"]


# --- keys -----------------------------------------------------------------------------------------------------------------------------


def test_keys_in_one_place_of_two(tmp_path: Path) -> None:
    plain = testing.tiny_config("dspark")
    nested = {key: plain[key] for key in HEADS}
    (finding,) = _keys(tmp_path, nested, **dict.fromkeys(HEADS, ...)).findings
    assert (finding.severity, finding.outcomes["vllm"].outcome) == ("warning", "stops")
    assert all(key in finding.message for key in HEADS)
    assert _keys(tmp_path, nested).status == "passed"
    assert _keys(tmp_path, nested, engines=["vllm"], **dict.fromkeys(HEADS, ...)).status == "failed"


def test_two_values_for_one_key(tmp_path: Path) -> None:
    found = _keys(tmp_path, {"markov_rank": 32})
    assert (found.status, found.message) == ("failed", "markov_rank is stated with different values")


@pytest.mark.parametrize(("label", "status"), [("DSparkDraftModel", "passed"), ("Lfm2DSparkDraftModel", "warned")])
def test_labels(label: str, status: str, tmp_path: Path) -> None:
    assert _keys(tmp_path, architectures=[label]).status == status


def test_a_label_of_one_engine_is_a_fault_for_another_only(tmp_path: Path) -> None:
    for engines, status in ((None, "passed"), (["vllm"], "passed"), (["sglang"], "failed")):
        assert _keys(tmp_path, engines=engines, architectures=["Gemma4DSparkModel"]).status == status


def test_a_packaging_counts_for_an_engine_that_was_asked_for(tmp_path: Path) -> None:
    plain = testing.tiny_config("dspark")
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": plain,
        **{key: plain[key] for key in (*HEADS, "block_size", "mask_token_id")},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for engines, status in ((None, "passed"), (["vllm"], "passed"), (["sglang"], "failed")):
        assert check_draft(tmp_path, checks=["dspark.keys"], engines=engines)["dspark.keys"].status == status


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"draft_vocab_size": 256}, "draft_vocab_size 256 is not vocab_size 512"),
        ({"num_target_layers": 20}, "num_target_layers is 20"),
    ],
)
def test_what_a_latent_draft_states(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    found = _keys(tmp_path, **{**LATENT, **changes})
    assert found.status == ("failed" if text else "passed")
    assert text in found.message


# --- heads ----------------------------------------------------------------------------------------------------------------------------


def test_a_rank_of_zero_is_legal_and_not_taken_everywhere(tmp_path: Path) -> None:
    found = _heads(tmp_path, markov_rank=0)
    assert found.status == "warned"
    assert found.findings[0].outcomes["sglang"].outcome == "stops"


def _joined_rows(tensors: Tensors) -> None:
    tensors[W1] = tensors[W1][:256].contiguous()


def _narrow(tensors: Tensors) -> None:
    tensors[CONFIDENCE] = tensors[CONFIDENCE][:, :64].contiguous()


def _gate(tensors: Tensors) -> None:
    tensors["markov_head.gate_proj.weight"] = torch.randn(16, 80).bfloat16()


@pytest.mark.parametrize(
    ("shape", "edit", "after", "text"),
    [
        ({}, None, {}, ""),
        ({"markov_head_type": "gated"}, None, {}, ""),
        ({"markov_head_type": "rnn"}, None, {}, ""),
        ({"draft_vocab_size": 256}, None, {}, ""),
        ({"confidence_head_with_markov": False}, None, {}, ""),
        ({"enable_confidence_head": False}, None, {}, ""),
        ({}, _gate, {}, "markov_head_type is vanilla, and the weights hold gate_proj"),
        ({"markov_head_type": "rnn"}, None, {"markov_head_type": "gated"}, "hold joint_proj of another type"),
        (
            {"markov_head_type": "rnn"},
            lambda found: found.pop("markov_head.joint_proj.weight"),
            {},
            "a rnn head of rank 16",
        ),
        ({}, lambda found: found.pop(W2), {}, "a vanilla head of rank 16 without markov_head.markov_w2.weight"),
        ({}, None, {"markov_rank": 32}, "markov_w1 has rank 16, markov_rank is 32"),
        ({}, None, {"markov_rank": 0}, "markov_rank is 0, and the weights hold a Markov head"),
        ({"draft_vocab_size": 256}, _joined_rows, {}, "markov_w1 has 256 rows; it has one for each target id, 512"),
        ({"draft_vocab_size": 256}, None, {"draft_vocab_size": 128}, "it has one for each draft id, 128"),
        ({}, _narrow, {}, "the confidence head reads 64 features; confidence_head_with_markov true gives 80"),
        ({}, None, {"confidence_head_with_markov": False}, "confidence_head_with_markov false gives 64"),
        ({}, lambda found: found.pop(CONFIDENCE), {}, "enable_confidence_head is true"),
        ({}, None, {"enable_confidence_head": False}, "enable_confidence_head is false, and the weights hold the head"),
    ],
)
def test_heads(
    shape: dict[str, Any], edit: Callable[[Tensors], Any] | None, after: dict[str, Any], text: str, tmp_path: Path
) -> None:
    found = _heads(tmp_path, edit, after=after, **shape)
    assert found.status == ("failed" if text else "passed"), found
    assert any(text in finding.message for finding in found.findings) or not text


def test_names_without_their_prefix(tmp_path: Path) -> None:
    whole = testing.tiny_config("dspark")
    names = {W1: "markov_w1.weight", W2: "markov_w2.weight", CONFIDENCE: "confidence_proj.weight"}
    tensors = testing.random_tensors(whole, "dspark")
    testing.write_checkpoint(tmp_path, whole, tensors, rename=lambda name: names.get(name, name))
    (finding,) = check_draft(tmp_path, checks=["dspark.heads"])["dspark.heads"].findings
    assert sorted(finding.got) == sorted(names.values())
    assert finding.severity == "error"
    assert finding.outcomes["sglang"].outcome == "serves wrong"
    assert finding.outcomes["vllm"].outcome == "stops"


@pytest.mark.parametrize("value", [None, "x", -1, 1.5, True, [], {}, 1 << 70])
def test_no_value_breaks_a_check(value: Any, tmp_path: Path) -> None:
    for key in (*HEADS, "dflash_config", "num_target_layers", "draft_vocab_size", "architectures"):
        for base in ({}, LATENT):
            config = {**testing.tiny_config("dspark", **base), key: value}
            (tmp_path / "config.json").write_text(json.dumps(config))
            check_draft(tmp_path, checks=["dspark"])
