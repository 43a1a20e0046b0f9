"""The checks of block drafters beyond one row each.

What goes wrong without this file: a layout that two keys state two ways and nobody notices; a draft that is called wrong because a key
that is only usual is not there; a window that is dropped by the class that reads it; a variant that is served as plain DFlash; the
tokens that a server asks for measured by the wrong count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, testing
from pytest_specdecode.findings import CheckResult

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
LAGUNA = {"architectures": ["DFlashLagunaForCausalLM"], "draft_vocab_size": 512}


def _run(tmp_path: Path, check: str, config: dict[str, Any], **given: Any) -> CheckResult:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return check_draft(tmp_path, checks=[check], **given)[check]


def _tiny(
    tmp_path: Path, check: str, family: str = "dflash", nested: dict[str, Any] | None = None, **changes: Any
) -> CheckResult:
    """The check on the family's tiny configuration with changes; `nested` ones go to dflash_config."""
    config = testing.tiny_config(family, **changes)
    if nested is not None:
        config["dflash_config"] = {
            key: value for key, value in {**config.get("dflash_config", {}), **nested}.items() if value is not ...
        }
    return _run(tmp_path, check, config)


def _packaged(**changes: Any) -> dict[str, Any]:
    """A tiny DFlash in the speculators packaging; changes of the layer's keys go to the layer's configuration."""
    plain = testing.tiny_config("dflash")
    layer = {key: value for key, value in plain.items() if key not in ("architectures", "dflash_config", "is_causal")}
    layer |= {
        key: changes.pop(key) for key in ("layer_types", "sliding_window", "use_sliding_window") if key in changes
    }
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 10, 18],
        "block_size": 8,
        "mask_token_id": 511,
        "transformer_layer_config": layer,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


# --- mask and block -------------------------------------------------------------------------------------------------------------------


def test_the_targets_own_words_count_as_well(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [500, 511], "vocab_size": 511}})
    )
    found = _run(tmp_path, "dflash.mask-token", testing.tiny_config("dflash"), target=target)
    assert [finding.message for finding in found.findings] == [
        "mask_token_id 511 lies outside an embedding of 511 rows",
        "mask_token_id is eos_token_id, which means something else to the target",
    ]


def test_each_engine_has_its_own_way_without_a_mask(tmp_path: Path) -> None:
    (finding,) = _tiny(tmp_path, "dflash.mask-token", nested={"mask_token_id": ...}).findings
    assert {name: outcome.outcome for name, outcome in finding.outcomes.items()} == {
        "sglang": "serves wrong",
        "vllm": "stops",
        "tensorrt-llm": "serves wrong",
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-3, "DFLASH dflash_config.mask_token_id must be non-negative, got -3."),
        (True, "DFLASH dflash_config.mask_token_id must be an integer, got True (type=bool)."),
        ("511", "DFLASH dflash_config.mask_token_id must be an integer, got '511' (type=str)."),
    ],
)
def test_a_mask_that_is_no_id_stops_one_engine_and_is_taken_by_others(value: Any, said: str, tmp_path: Path) -> None:
    (finding,) = _tiny(tmp_path, "dflash.mask-token", nested={"mask_token_id": value}).findings
    assert (finding.message, finding.got, finding.severity) == ("mask_token_id is not an id", value, "error")
    assert (finding.outcomes["sglang"].outcome, finding.outcomes["sglang"].message) == ("stops", said)
    for name in ("vllm", "tensorrt-llm"):
        assert finding.outcomes[name].outcome == "unknown"
        assert finding.outcomes[name].message == f"takes {value!r} from dflash_config.mask_token_id"


def test_a_parallel_head_with_a_mask_that_is_no_id(tmp_path: Path) -> None:
    (finding,) = _tiny(tmp_path, "dflash.mask-token", "peagle", mask_token_id=-3).findings
    assert (finding.message, finding.severity) == ("mask_token_id is not an id", "warning")
    assert finding.outcomes["sglang"].message == "has no class for heads that draft in parallel"
    assert finding.outcomes["vllm"].message == "takes -3 from mask_token_id"


def test_one_of_two_masks_is_no_id(tmp_path: Path) -> None:
    (finding,) = _tiny(tmp_path, "dflash.mask-token", nested={"mask_token_id": -3}, mask_token_id=511).findings
    assert finding.message == "mask_token_id is stated with different values"
    assert finding.outcomes["sglang"].outcome == "stops"


def test_a_mask_embedding_of_its_own_is_passed_over(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "dflash")
    torch.save(torch.zeros(64), path / "mask_embedding.pt")
    (finding,) = check_draft(path, checks=["files.code"])["files.code"].findings
    assert finding.severity == "warning"
    assert {name: outcome.outcome for name, outcome in finding.outcomes.items()} == {
        "sglang": "unknown",
        "vllm": "serves wrong",
        "tensorrt-llm": "unknown",
    }
    assert "ignores it" in finding.outcomes["vllm"].message


def test_a_block_size_in_one_place_names_no_engine_but_its_outcome_does(tmp_path: Path) -> None:
    (finding,) = _tiny(tmp_path, "dflash.block-size", block_size=...).findings
    assert finding.severity == "warning"
    assert "TensorRT" not in finding.message
    assert finding.outcomes["tensorrt-llm"].outcome == "serves wrong"


def test_what_stands_in_for_a_block_size_may_be_right_and_a_word_is_never(tmp_path: Path) -> None:
    assert _tiny(tmp_path, "dflash.block-size", block_size=..., nested={"block_size": ...}).status == "warned"
    assert _tiny(tmp_path, "dflash.block-size", block_size="8", nested={"block_size": ...}).status == "failed"


@pytest.mark.parametrize(
    ("family", "serve", "status"),
    [
        # One counts the anchor among the tokens, the other does not: 8 rows are 8 or 7.
        ("dflash", "algorithm=DFLASH num-draft-tokens=8", "passed"),
        ("dflash", "algorithm=DFLASH num-draft-tokens=9", "failed"),
        ("dflash", "num-speculative-tokens=7", "passed"),
        ("dflash", "num-speculative-tokens=8", "failed"),
        # DSpark's seven rows all draft.
        ("dspark", "num-speculative-tokens=7", "passed"),
        ("dspark", "num-speculative-tokens=8", "failed"),
    ],
)
def test_tokens_asked_of_a_block(family: str, serve: str, status: str, tmp_path: Path) -> None:
    found = _run(tmp_path, "dflash.block-size", testing.tiny_config(family), serve=serve)
    assert found.status == status
    assert status == "passed" or found.findings[0].where.startswith("--draft-serve: num-")


# --- layout ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "nested", "status"),
    [
        ("dflash", {}, {}, "passed"),
        ("dflash", {"sample_from_anchor": False}, {}, "passed"),
        ("dflash", {"sample_from_anchor": True}, {}, "warned"),
        ("dflash", {}, {"query_zero_predicts_next": True}, "warned"),
        ("dflash", {"sample_from_anchor": False}, {"sample_from_anchor": True}, "failed"),
        ("dflash", {"sample_from_anchor": False, "query_zero_predicts_next": True}, {}, "failed"),
        ("domino", {}, {"shift_label": True}, "passed"),
        ("domino", {"sample_from_anchor": False}, {"shift_label": True}, "failed"),
        # Trainer and engines agree on what an absent key of DSpark means, and no engine reads a nested one.
        ("dspark", {"sample_from_anchor": ...}, None, "passed"),
        ("dspark", {"sample_from_anchor": ...}, {"sample_from_anchor": True}, "passed"),
        ("dspark", {"sample_from_anchor": ...}, {"sample_from_anchor": False}, "warned"),
        ("dspark", {"sample_from_anchor": False}, None, "passed"),
        # A word and null state nothing; the types' check names the word.
        ("dflash", {"sample_from_anchor": "yes"}, {"sample_from_anchor": None}, "passed"),
    ],
)
def test_whether_row_0_drafts(
    family: str, changes: dict[str, Any], nested: dict[str, Any] | None, status: str, tmp_path: Path
) -> None:
    assert _tiny(tmp_path, "dflash.block-layout", family, nested, **changes).status == status


def test_what_is_not_stated_is_shown_with_what_engines_take(tmp_path: Path) -> None:
    config = _packaged(architectures=["DSparkDraftModel"], speculators_model_type="dspark", markov_rank=16)
    (finding,) = _run(tmp_path, "dflash.block-layout", config).findings
    assert finding.message.startswith("whether row 0 drafts is not stated; dspark is trained so that it drafts")
    assert finding.outcomes["vllm"].outcome == "serves wrong"
    assert _run(tmp_path, "dflash.block-layout", {**config, "sample_from_anchor": True}).status == "passed"
    told = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 7}]}}
    assert _run(tmp_path, "dflash.block-layout", {**config, **told}).status == "passed"
    assert "row 0 is trained as the anchor" in _tiny(tmp_path, "dflash.block-layout").message


@pytest.mark.parametrize(
    ("drafts", "tokens", "status"),
    [(False, 7, "passed"), (False, 8, "failed"), (False, 3, "passed"), (True, 8, "warned"), (True, 7, "warned")],
)
def test_the_number_of_proposed_tokens_is_a_statement_too(
    drafts: bool, tokens: int, status: str, tmp_path: Path
) -> None:
    methods = {"proposal_methods": [{"speculative_tokens": tokens}]}
    found = _run(tmp_path, "dflash.block-layout", _packaged(sample_from_anchor=drafts, speculators_config=methods))
    assert found.status == status
    assert ("as if it were the anchor" in str(found.findings)) == (drafts and tokens == 7)


# --- layer types and windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "nested", "status", "text"),
    [
        ({"layer_types": ["full_attention"] * 3}, None, "failed", "3 layer types for 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, None, "failed", "linear_attention"),
        ({"layer_types": ...}, None, "passed", ""),
        ({"layer_types": "full_attention"}, None, "passed", ""),
        (SLIDING, None, "passed", ""),
        ({**SLIDING, "sliding_window": None}, None, "failed", "layers 0, 1 are sliding, and no window"),
        ({**MIXED, "sliding_window": None}, None, "failed", "layer 0 is sliding, and no window"),
        ({**SLIDING, "sliding_window": 0}, None, "failed", "not a positive number"),
        ({**SLIDING, "sliding_window": "64"}, None, "failed", "not a positive number"),
        ({**SLIDING, "sliding_window": True}, None, "failed", "not a positive number"),
        ({**SLIDING, "sliding_window": 1 << 80}, None, "passed", ""),
        ({**SLIDING, "sliding_window": 7}, None, "warned", "narrower than a block of 8 rows"),
        ({**SLIDING, "use_sliding_window": False}, None, "warned", "drops the window"),
        ({**SLIDING, "use_sliding_window": ...}, None, "warned", "drops the window"),
        # Another class has no such switch, and a window of DFlash's own does not pass through it.
        ({**SLIDING, "use_sliding_window": ..., "model_type": "llama"}, None, "passed", ""),
        ({}, {"use_swa": True, "swa_window_size": 64}, "passed", ""),
        ({}, {"use_swa": True}, "failed", "no window is stated"),
        ({"sliding_window": 64, "use_sliding_window": True}, None, "warned", "no layer slides"),
        ({"sliding_window": 64, "use_sliding_window": False}, None, "passed", ""),
    ],
)
def test_types_and_windows(
    changes: dict[str, Any], nested: dict[str, Any] | None, status: str, text: str, tmp_path: Path
) -> None:
    found = _tiny(tmp_path, "dflash.layer-types", "dflash", nested, **changes)
    assert (found.status, text in found.message) == (status, True)


def test_engines_differ_in_what_a_strange_type_is(tmp_path: Path) -> None:
    (finding,) = _tiny(tmp_path, "dflash.layer-types", layer_types=["full_attention", "linear_attention"]).findings
    assert finding.outcomes["sglang"].outcome == "stops"
    assert finding.outcomes["vllm"].outcome == "serves wrong"


def test_a_layers_keys_are_named_where_they_stand(tmp_path: Path) -> None:
    config = _packaged(layer_types=["full_attention"], sliding_window=64)
    (finding,) = _run(tmp_path, "dflash.layer-types", config).findings
    assert finding.where == "config.json: transformer_layer_config.layer_types"


# --- causality ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "nested", "texts"),
    [
        (SLIDING, None, []),
        ({**SLIDING, "is_causal": ...}, None, ["is_causal is not stated"]),
        ({**SLIDING, "is_causal": ...}, {"causal": True}, []),
        ({"is_causal": ...}, None, []),
        ({"is_causal": ...}, {"causal": True}, ["not every engine lets rows of a block see"]),
        ({"is_causal": True}, None, []),
        ({"is_causal": True}, {"causal": False}, ["say different things"]),
        (MIXED, None, ["mixed"]),
        ({**MIXED, "is_causal": ...}, None, ["is_causal is not stated", "mixed"]),
    ],
)
def test_what_a_block_sees(
    changes: dict[str, Any], nested: dict[str, Any] | None, texts: list[str], tmp_path: Path
) -> None:
    found = _tiny(tmp_path, "dflash.causality", "dflash", nested, **changes)
    assert found.status == ("warned" if texts else "passed")
    assert [text for text, finding in zip(texts, found.findings, strict=True) if text in finding.message] == texts


def test_the_packagings_flag_over_mixed_layers_is_read_wrong(tmp_path: Path) -> None:
    config = _packaged(**MIXED, sliding_window_non_causal=False)
    found = _run(tmp_path, "dflash.causality", config)
    assert found.status == "failed"
    assert found.findings[0].outcomes["vllm"].outcome == "serves wrong"
    assert _run(tmp_path, "dflash.causality", _packaged(**SLIDING, sliding_window_non_causal=False)).status == "passed"
    unstated = _run(tmp_path, "dflash.causality", _packaged(**SLIDING))
    assert unstated.message.startswith("layers slide and sliding_window_non_causal is not stated")


# --- variants -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "nested", "texts"),
    [
        ("dflash2", {}, {"conv_kernel_size": ...}, ["conv_kernel_size is not stated"]),
        (
            "dflash2",
            {},
            {"selector_rank": ..., "selector_top_k": ...},
            ["selector_rank, selector_top_k are not stated"],
        ),
        ("domino", {}, {"pure_draft_prefix_len": 0}, ["pure_draft_prefix_len is not 1"]),
        ("domino", {}, {"pure_draft_prefix_len": True}, ["pure_draft_prefix_len is not 1"]),
        ("domino", {}, {"emb_dim": ...}, ["emb_dim is not stated"]),
        ("domino", {"gru_hidden_dim": 32}, {}, ["gru_hidden_dim is stated with different values"]),
        ("dflash", {**LAGUNA, "draft_vocab_size": ...}, {}, ["draft_vocab_size is not stated"]),
        ("dflash", {**LAGUNA, "draft_vocab_size": 256}, {}, ["draft_vocab_size 256 is not vocab_size 512"]),
        ("dflash", {"output_multiplier": 0}, {}, ["output_multiplier is not positive"]),
        ("dflash", {"output_multiplier": -1}, {}, ["output_multiplier is not positive"]),
    ],
)
def test_keys_of_a_variant(
    family: str, changes: dict[str, Any], nested: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    found = _tiny(tmp_path, "dflash.variants", family, nested, **changes)
    assert [text for text, finding in zip(texts, found.findings, strict=True) if text in finding.message] == texts


def test_half_a_pair_is_another_fault_than_a_whole_one(tmp_path: Path) -> None:
    (half,) = _tiny(tmp_path, "dflash.variants", "dflash2", {"conv_kernel_size": ...}).findings
    (whole,) = _tiny(tmp_path, "dflash.variants", "dflash2", {"conv_kernel_size": ..., "conv_group_size": ...}).findings
    assert (half.fault, whole.fault) == ("dflash2-half-pair", "dflash2-keys-missing")
    assert "conv_kernel_size beside conv_group_size" in half.outcomes["sglang"].message


@pytest.mark.parametrize(
    ("family", "changes", "part", "title"),
    [
        ("dflash2", {}, "candidate_selector.", "DFlash2"),
        ("domino", {}, "prefix_gru.", "Domino"),
        ("dflare", {}, "layers.0.self_attn.k_proj_target.", "DFlare"),
        ("dflash", LAGUNA, "aux_hidden_norms.", "Laguna"),
    ],
)
def test_tensors_of_a_variant(family: str, changes: dict[str, Any], part: str, title: str, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(part)]:
            del tensors[name]

    config = testing.tiny_config(family, **changes)
    whole = check_draft(testing.write_tiny(tmp_path / "whole", family, config=config), checks=["dflash.variants"])
    assert whole["dflash.variants"].status == "passed"
    path = testing.write_tiny(tmp_path / "broken", family, config=config, edit=drop)
    found = check_draft(path, checks=["dflash.variants"])["dflash.variants"]
    assert f"the tensors that make it {title} are not in the weights" in found.message
    assert found.findings[0].where.startswith(part)


def test_plain_dflash_has_nothing_of_the_kind_and_dflare_no_engine(tmp_path: Path) -> None:
    assert _tiny(tmp_path, "dflash.variants").status == "skipped"
    config = testing.tiny_config("dflare")
    assert _run(tmp_path, "dflash.variants", config).status == "inconclusive"
    assert _run(tmp_path, "dflash.variants", config, engines=["sglang"]).status == "failed"


@pytest.mark.parametrize("value", [None, "x", -1, 0, 1.5, True, [], {}, [None], 1 << 70])
def test_no_value_breaks_a_check(value: Any, tmp_path: Path) -> None:
    """Whatever stands at a key, the checks speak of it or leave it to the types' check."""
    keys = ("block_size", "mask_token_id", "layer_types", "sliding_window", "is_causal", "sample_from_anchor")
    for family in ("dflash", "dflash2", "domino", "dspark", "xpress"):
        for key in (*keys, "dflash_config", "output_multiplier", "speculators_config"):
            (tmp_path / "config.json").write_text(json.dumps(testing.tiny_config(family, **{key: value})))
            check_draft(tmp_path, checks=["dflash"])
        nested = {"use_swa": value, "swa_window_size": value, "causal": value, "emb_dim": value, "shift_label": value}
        config = testing.tiny_config(family, dflash_config=nested, layer_types=["sliding_attention", value])
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_draft(tmp_path, checks=["dflash"])
