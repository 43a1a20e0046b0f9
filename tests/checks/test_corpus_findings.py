"""What the checks say of public configurations: each known fault, with its cause, and no error that is not true of the file.

What goes wrong without this file: a known bad configuration passes, or is reported for another reason than its fault; a published
draft that is right is refused, and people switch the plugin off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import check_draft
from pytest_specdecode.findings import CheckResult

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CORPUS / "expected.json").read_text(encoding="utf-8"))

#: What a finding on the file says, by check: parts of its messages, places and values that name the cause.
CAUSES: dict[str, dict[str, tuple[str, ...]]] = {
    "bad--dflash-fc-layernorm-unimplemented.json": {"config.unread-keys": ("dflash_config.fc_layernorm",)},
    "bad--dflash-mask-out-of-range.json": {"dflash.mask-token": ("201818", "151936")},
    "bad--dflash-no-target-layer-ids.json": {"taps.stated": ("dflash_config.target_layer_ids", "guess")},
    "bad--dspark-projector-arch-disagree.json": {
        "config.family": ("dflash, dspark", "DFlashDraftModel", "projector_type")
    },
    "bad--dspark-specforge-not-promoted.json": {
        "dspark.keys": ("markov_rank", "markov_head_type", "enable_confidence_head", "dflash_config only")
    },
    "bad--eagle3-angelslim-cosyvoice3-24-layers.json": {"config.num-hidden-layers": ("24 layers", "num_hidden_layers")},
    "bad--eagle3-angelslim-qwen3-1.7b-rope-and-tie.json": {"vocabulary.tied-embeddings": ("151936 rows", "32000 ids")},
    "bad--eagle3-gpt-oss-120b-Eagle3-v3-partial.json": {"taps.convention": ("[24, 30, 36]", "past the end")},
    "bad--eagle3-modelopt-use-cache-null.json": {"config.null-values": ("use_cache is null",)},
    "bad--eagle3-qwen3.6-27b-misspelled-keys.json": {
        "config.unread-keys": (
            "eagle_config.aux_hidden_state_layer_ids",
            "eagle_config.use_aux_hidden_states",
            "target_vocab_size",
            "speculator_config",
        ),
        "config.head-arithmetic": ("5120 does not divide by 48 heads",),
    },
    "bad--eagle3-specforge-qwen2.5-vl-32b-heads.json": {
        "config.head-arithmetic": ("28 heads", "5120", "copied from a model of another size")
    },
    "bad--eagle3-speculators-null-aux-ids.json": {"taps.stated": ("eagle_aux_hidden_state_layer_ids", "guess")},
}
#: The same for every other file.
CAUSE: dict[str, tuple[str, ...]] = {
    "vocabulary.tied-embeddings": ("the head is tied to an embedding of",),
    "rope.theta-stated": ("rope_theta is not stated",),
}

#: Errors on files that no finding is listed for and that are whole, each with what is true of the file.
TRUE_OF_THE_FILE: dict[str, dict[str, str]] = {
    "bad--eagle3-nvidia-Kimi-K2.6-no-lm-head.json": {
        "rope.theta-stated": "the file has three keys, and none of them states a base",
    },
    "dflash--gemma-4-31B-it-mixed-shape.json": {
        "taps.stated": "dflash_config has no target_layer_ids",
        "rope.theta-stated": "neither a flat key nor rope_parameters states a base",
    },
    "dflash--xllm-fixture-qwen3.5-27b.json": {
        "rope.theta-stated": "neither a flat key nor rope_parameters states a base",
    },
    "dflash--zlab-Qwen3-8B-DFlash-b16.json": {
        "rope.theta-stated": "neither a flat key nor rope_parameters states a base",
    },
    "dspark--embedded-DeepSeek-V4-Pro-shape.json": {
        "rope.theta-stated": "neither a flat key nor rope_parameters states a base",
        "dflash.mask-token": "there is no dspark_noise_token_id",
    },
    "dspark--xllm-fixture-qwen3-8b-block7.json": {
        "rope.theta-stated": "neither a flat key nor rope_parameters states a base",
    },
    "hydra--upstream-config-class-fields.json": {
        "config.types": "the class has hydra_num_layers without a value",
    },
    "speculators-dspark--DaoCloud-Muse-Glimmer-30B-shape.json": {
        "dflash.mask-token": "the mask is 201818, and the layers' vocab_size is 32",
    },
}

LISTED = [
    *((name, id) for name, entry in EXPECTED.items() for id in entry["findings"]),
    # What that file has beside the fault that it is known for.
    ("bad--eagle3-qwen3.6-27b-misspelled-keys.json", "config.head-arithmetic"),
]
SOUND = [name for name, entry in EXPECTED.items() if not entry["findings"] and not entry["partial"]]


def test_every_configuration_is_expected() -> None:
    assert set(EXPECTED) == {path.name for path in (CORPUS / "configs").glob("*.json")}
    assert set(CAUSES) <= set(EXPECTED)
    assert set(TRUE_OF_THE_FILE) <= set(SOUND)


@pytest.mark.parametrize(("name", "id"), LISTED, ids=[f"{name}-{id}" for name, id in LISTED])
def test_a_listed_fault_is_reported_with_its_cause(name: str, id: str, tmp_path: Path) -> None:
    result = _results(name, tmp_path)[id]
    assert result.status in ("failed", "warned"), result
    said = _said(result)
    for part in CAUSES.get(name, {}).get(id, CAUSE.get(id, ())) or ("a cause for each check",):
        assert part in said


def test_a_draft_size_in_place_of_the_targets_is_seen_beside_the_target(tmp_path: Path) -> None:
    """The configuration alone is at one with itself: 32000 ids, all of which the draft can say."""
    name = "bad--eagle3-qwen3.6-27b-misspelled-keys.json"
    assert _results(name, tmp_path)["target.widths"].status == "inconclusive"
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "qwen3_5_text", "hidden_size": 5120, "vocab_size": 248320}')
    result = check_draft(tmp_path, target=target)["target.widths"]
    assert result.status == "failed"
    (finding,) = result.findings
    assert (finding.where, finding.got, finding.due) == ("config.json: vocab_size", 32000, 248320)


@pytest.mark.parametrize("name", SOUND)
def test_no_error_that_is_not_true_of_the_file(name: str, tmp_path: Path) -> None:
    """And none of those that the table holds is gone."""
    failed = {id: _said(result) for id, result in _results(name, tmp_path).items() if result.status == "failed"}
    assert failed.keys() == TRUE_OF_THE_FILE.get(name, {}).keys(), failed


def _results(name: str, path: Path) -> dict[str, CheckResult]:
    (path / "config.json").write_bytes((CORPUS / "configs" / name).read_bytes())
    return {result.id: result for result in check_draft(path)}


def _said(result: CheckResult) -> str:
    return "\n".join(f"{item.message} | {item.where} | {item.got} | {item.due}" for item in result.findings)
