"""The rules about the options that a server is started with, each against the text that the engine has for it.

What goes wrong without this file: an EAGLE3 draft that is started as EAGLE passes, and accepts nothing in production; a number that an
engine replaces in a log line is not shown; a rule speaks where its algorithm is not asked for; a text is not the engine's own, so that a
person who looks it up finds nothing; an option that nobody gave is judged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, testing
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.findings import CheckResult

MLA_TARGET = {"hidden_size": 64, "kv_lora_rank": 512, "max_position_embeddings": 4096}
BLOCK_8 = {"target_layer_ids": [1, 9, 17], "mask_token_id": 511, "block_size": 8}


def judge(
    path: Path,
    check: str,
    family: str,
    serve: str,
    *,
    target: dict[str, Any] | None = None,
    engines: list[str] | None = None,
    **changes: Any,
) -> CheckResult:
    """One check of the configuration alone."""
    (path / "config.json").write_text(json.dumps(testing.tiny_config(family, **changes)))
    if target is not None:
        (path / "target").mkdir()
        (path / "target" / "config.json").write_text(json.dumps(target))
    place = None if target is None else path / "target"
    return check_draft(path, target=place, checks=[check], serve=serve, engines=engines)[check]


ALGORITHMS = [
    # (family, options, engine, outcome, its text)
    ("eagle3", "algorithm=EAGLE", "sglang", "serves wrong", "accepted length 1.00"),
    ("eagle3", "algorithm=NEXTN", "sglang", "serves wrong", "accepted length 1.00"),
    ("eagle3", "algorithm=eagle", "sglang", "serves wrong", "fc is skipped"),
    ("eagle3-mla", "algorithm=EAGLE", "sglang", "serves wrong", "accepted length 1.00"),
    (
        "gemma4-assistant",
        "algorithm=EAGLE3",
        "sglang",
        "stops",
        "Gemma4AssistantForCausalLM draft requires --speculative-algorithm NEXTN or EAGLE; "
        "EAGLE3 is not supported for this draft architecture.",
    ),
    ("medusa", "algorithm=EAGLE", "sglang", "unknown", ""),
    ("dflash", "algorithm=DSPARK", "sglang", "unknown", ""),
    ("dspark", "algorithm=DFLASH", "sglang", "unknown", ""),
    (
        "dflash",
        "algorithm=DFLASH dp-attention=true",
        "sglang",
        "stops",
        "Currently DFLASH speculative decoding does not support dp attention.",
    ),
    (
        "dflash",
        "algorithm=DFLASH pp=2",
        "sglang",
        "stops",
        "Currently DFLASH speculative decoding only supports pp_size == 1.",
    ),
    (
        "dspark",
        "algorithm=DSPARK pp=2",
        "sglang",
        "stops",
        "Currently DSpark speculative decoding only supports pp_size == 1.",
    ),
    (
        "eagle3",
        "algorithm=EAGLE3 skip-dp-mlp-sync=true",
        "sglang",
        "stops",
        "--speculative-skip-dp-mlp-sync is only supported with speculative_algorithm == EAGLE, got EAGLE3.",
    ),
    ("eagle3", "method=dflash", "vllm", "unknown", ""),
    ("hydra", "method=medusa", "vllm", "unknown", ""),
]


@pytest.mark.parametrize(("family", "serve", "engine", "outcome", "text"), ALGORITHMS)
def test_an_algorithm_that_is_not_the_drafts(
    family: str, serve: str, engine: str, outcome: str, text: str, tmp_path: Path
) -> None:
    result = judge(tmp_path, "serving.algorithm", family, serve)
    assert result.status == "failed", result
    assert result.findings[0].outcomes[engine].outcome == outcome
    assert text in result.findings[0].outcomes[engine].message
    others = {name: found.outcome for name, found in result.findings[0].outcomes.items() if name != engine}
    assert set(others.values()) == {"unknown"}


@pytest.mark.parametrize(
    ("dtype", "status"), [("int32", "failed"), ("float8_e4m3fn", "failed"), ("bfloat16", "passed")]
)
def test_a_quantised_head_of_the_target_is_not_split(dtype: str, status: str, tmp_path: Path) -> None:
    name = "lm_head.weight_packed" if dtype == "int32" else "lm_head.weight"
    head = {name: torch.zeros(8, 4).to(getattr(torch, dtype)), "model.embed_tokens.weight": torch.zeros(8, 4)}
    testing.write_checkpoint(tmp_path / "target", {"hidden_size": 4}, head)
    (tmp_path / "config.json").write_text(json.dumps(testing.tiny_config("dflash")))
    checks = ["serving.algorithm"]
    for serve in ("algorithm=DFLASH tp=2", "algorithm=DFLASH tp=1"):
        result = check_draft(tmp_path, target=tmp_path / "target", checks=checks, serve=serve)["serving.algorithm"]
        assert result.status == ("passed" if serve.endswith("1") else status)
        if result.status == "failed":
            due = "DFLASH with a quantized target lm_head is only supported at tp=1, got tp_size=2."
            assert result.findings[0].outcomes["sglang"].message == due


BACKENDS = [
    (
        "draft-attention-backend=trtllm_mha",
        {},
        "DFLASH only enables 'trtllm_mha' when all layers use sliding attention",
    ),
    ("draft-attention-backend=flashmla", {}, "but got 'flashmla'. Falling back to 'flashinfer'."),
    # The target's backend is the draft's where the draft has none of its own.
    ("attention-backend=tokenspeed_mla", {}, "but got 'tokenspeed_mla'"),
]


@pytest.mark.parametrize(("serve", "changes", "text"), BACKENDS)
def test_a_backend_that_a_dflash_draft_falls_back_from(
    serve: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    result = judge(tmp_path, "serving.algorithm", "dflash", f"algorithm=DFLASH {serve}", **changes)
    assert result.status == "warned", result
    assert result.findings[0].outcomes["sglang"].outcome == "falls back"
    assert text in result.findings[0].outcomes["sglang"].message


FITTING = [
    ("eagle1", "algorithm=EAGLE"),
    ("eagle1", "algorithm=nextn"),
    ("mtp", "algorithm=NEXTN"),
    ("gemma4-assistant", "algorithm=NEXTN"),
    ("gemma4-assistant", "algorithm=EAGLE"),
    ("eagle3", "algorithm=EAGLE3 pp=2 dp-attention=true"),
    ("eagle3-mla", "algorithm=EAGLE3"),
    ("dflash", "algorithm=DFLASH dp-attention=false pp=1"),
    ("dflash", "algorithm=DFLASH attention-backend=tokenspeed_mla draft-attention-backend=fa3"),
    ("dflash2", "algorithm=DFLASH"),
    ("dspark", "algorithm=DSPARK"),
    ("eagle3", "method=eagle3"),
    ("peagle", "method=eagle3"),
    ("mlp-speculator", "method=mlp_speculator"),
]


@pytest.mark.parametrize(("family", "serve"), FITTING)
def test_an_algorithm_that_fits(family: str, serve: str, tmp_path: Path) -> None:
    assert judge(tmp_path, "serving.algorithm", family, serve).status == "passed"


def test_a_causal_dflash_draft_runs_on_trtllm(tmp_path: Path) -> None:
    serve = "algorithm=DFLASH draft-attention-backend=trtllm_mha"
    assert judge(tmp_path, "serving.algorithm", "dflash", serve, is_causal=True).status == "passed"


def test_an_algorithm_that_nobody_knows_is_a_warning(tmp_path: Path) -> None:
    result = judge(tmp_path, "serving.algorithm", "eagle3", "algorithm=MY_OWN")
    assert result.status == "warned"
    assert result.message == "MY_OWN is no algorithm that is known"


def test_every_family_can_be_asked_about(tmp_path: Path) -> None:
    """All options at once, with numbers that fit nothing; no rule may break, whatever the family lacks."""
    serve = (
        "algorithm=DFLASH method=eagle num-steps=-1 eagle-topk=9 num-draft-tokens=999 num-speculative-tokens=999 max-draft-len=999 "
        "dflash-block-size=0 dspark-block-size=0 draft-window-size=0 page-size=3 attention-backend=trtllm_mla "
        "kv-cache-dtype=fp8_ds_mla context-length=99999999"
    )
    for family in FAMILIES:
        for algorithm in ("DFLASH", "EAGLE", "EAGLE3", "DSPARK", "NGRAM"):
            place = tmp_path / f"{family.name}-{algorithm}"
            place.mkdir()
            for check in ("serving.algorithm", "serving.draft-tokens", "serving.kv-cache-dtype"):
                (place / "config.json").write_text(json.dumps(family.tiny))
                (place / "target").mkdir(exist_ok=True)
                (place / "target" / "config.json").write_text(json.dumps(MLA_TARGET))
                asked = serve.replace("=DFLASH", f"={algorithm}")
                result = check_draft(place, target=place / "target", checks=[check], serve=asked)[check]
                assert result.status in ("passed", "failed", "warned"), (family.name, check, result)
                assert "defect" not in result.message


TOKENS = [
    # (family, changes, options, status, outcome, SGLang's text)
    (
        "eagle3",
        {},
        "algorithm=EAGLE3 num-steps=3 eagle-topk=1 num-draft-tokens=8",
        "warned",
        "falls back",
        "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1",
    ),
    ("eagle3", {}, "algorithm=EAGLE3 eagle-topk=1", "failed", "stops", "AssertionError"),
    ("eagle3", {}, "algorithm=EAGLE3 num-draft-tokens=4", "failed", "stops", "AssertionError"),
    (
        "eagle3",
        {},
        "algorithm=EAGLE3 num-steps=3 eagle-topk=4 attention-backend=trtllm_mha",
        "failed",
        "stops",
        "trtllm_mha backend only supports topk = 1 for speculative decoding.",
    ),
    (
        "eagle3",
        {},
        "algorithm=EAGLE3 num-steps=3 eagle-topk=4 page-size=64 attention-backend=flashmla",
        "failed",
        "stops",
        "speculative_eagle_topk > 1 with page_size > 1 is only supported on ('flashinfer', 'fa3', 'triton'); "
        "got attention_backend='flashmla'. Use page_size == 1 or one of those backends.",
    ),
    # 2 + 2 * 2 candidates behind the token that they follow.
    (
        "eagle3",
        {},
        "algorithm=EAGLE3 num-steps=2 eagle-topk=2 num-draft-tokens=8",
        "failed",
        "stops",
        "index k out of range",
    ),
    (
        "dflash",
        {},
        "algorithm=DFLASH num-steps=3",
        "warned",
        "falls back",
        "DFLASH only supports speculative_num_steps == 1; overriding speculative_num_steps=3 to 1.",
    ),
    (
        "dflash",
        {},
        "algorithm=DFLASH eagle-topk=2",
        "warned",
        "falls back",
        "DFLASH only supports speculative_eagle_topk == 1; overriding speculative_eagle_topk=2 to 1.",
    ),
    (
        "dflash",
        {},
        "algorithm=DFLASH dflash-block-size=0",
        "failed",
        "stops",
        "DFLASH requires --speculative-dflash-block-size to be positive, got 0.",
    ),
    (
        "dflash",
        {},
        "algorithm=DFLASH dflash-block-size=8 num-draft-tokens=4",
        "failed",
        "stops",
        "Both --speculative-num-draft-tokens and --speculative-dflash-block-size are set but they differ. For DFLASH they must match.",
    ),
    (
        "dflash",
        {},
        "algorithm=DFLASH draft-window-size=4",
        "failed",
        "stops",
        "--speculative-draft-window-size must be >= --speculative-num-draft-tokens (block_size). window_size=4, block_size=8.",
    ),
    (
        "eagle3",
        {},
        "algorithm=EAGLE3 draft-window-size=-2",
        "failed",
        "stops",
        "--speculative-draft-window-size must be positive, got -2.",
    ),
    (
        "eagle1",
        {},
        "algorithm=NEXTN draft-window-size=512",
        "warned",
        "falls back",
        "--speculative-draft-window-size has no effect with speculative_algorithm=EAGLE (honored by Llama EAGLE-3 and DFLASH only).",
    ),
    ("dspark", {}, "algorithm=DSPARK draft-window-size=512", "warned", "falls back", "speculative_algorithm=DSPARK"),
    (
        "dspark",
        {"block_size": 7},
        "algorithm=DSPARK num-draft-tokens=7",
        "failed",
        "stops",
        "DSpark speculative_num_draft_tokens must equal gamma + 1 (= 8 for gamma=7), but got speculative_num_draft_tokens=7.",
    ),
    (
        "dspark",
        {"block_size": 7},
        "algorithm=DSPARK num-draft-tokens=8 dspark-block-size=5",
        "failed",
        "stops",
        "must equal gamma + 1 (= 6 for gamma=5)",
    ),
    (
        "dspark",
        {"block_size": ...},
        "algorithm=DSPARK num-draft-tokens=1",
        "failed",
        "stops",
        "DSpark speculative_num_draft_tokens must be >= 2 (= gamma + 1), got 1.",
    ),
]


@pytest.mark.parametrize(("family", "changes", "serve", "status", "outcome", "text"), TOKENS)
def test_numbers_that_do_not_fit(
    family: str, changes: dict[str, Any], serve: str, status: str, outcome: str, text: str, tmp_path: Path
) -> None:
    result = judge(tmp_path, "serving.draft-tokens", family, serve, **changes)
    assert result.status == status, result
    (found,) = [finding.outcomes["sglang"] for finding in result.findings]
    assert found.outcome == outcome
    assert text in found.message


TOKENS_THAT_FIT = [
    ("eagle3", "algorithm=EAGLE3 num-steps=3 eagle-topk=1 num-draft-tokens=4"),
    ("eagle3", "algorithm=EAGLE3 num-steps=2 eagle-topk=2 num-draft-tokens=7"),
    ("eagle3", "algorithm=EAGLE3 num-steps=3 eagle-topk=4 page-size=64 attention-backend=fa3"),
    ("eagle3", "algorithm=EAGLE3 num-steps=3 eagle-topk=1 attention-backend=trtllm_mha"),
    ("eagle3", "algorithm=EAGLE3 draft-window-size=512"),
    ("dflash", "algorithm=DFLASH num-steps=1 eagle-topk=1 num-draft-tokens=8 dflash-block-size=8 draft-window-size=8"),
    ("dspark", "algorithm=DSPARK num-draft-tokens=8 dspark-block-size=7"),
    ("mtp", "num-speculative-tokens=1"),
    # Options of another algorithm say nothing.
    ("eagle3", "dflash-block-size=0 num-draft-tokens=4"),
]


@pytest.mark.parametrize(("family", "serve"), TOKENS_THAT_FIT)
def test_numbers_that_fit(family: str, serve: str, tmp_path: Path) -> None:
    assert judge(tmp_path, "serving.draft-tokens", family, serve).status == "passed"


def test_drafts_in_no_whole_number_of_rounds(tmp_path: Path) -> None:
    """vLLM goes through an MLP speculator's three stages once, twice, …"""
    result = judge(tmp_path, "serving.draft-tokens", "mlp-speculator", "num-speculative-tokens=4")
    assert result.findings[0].outcomes["vllm"].message == "num_speculative_tokens:4 must be divisible by n_predict=3"
    (tmp_path / "2").mkdir()
    for fits in ("2", "3", "6"):
        asked = f"num-speculative-tokens={fits}"
        assert judge(tmp_path / "2", "serving.draft-tokens", "mlp-speculator", asked).status == "passed"


BLOCKS = [
    # (family, changes, options, engine, status, outcome, text)
    ("dflash", {}, "num-speculative-tokens=8", "vllm", "failed", "serves wrong", "1.31 instead of 2.74"),
    (
        "dspark",
        {"sample_from_anchor": False, "block_size": 7},
        "num-speculative-tokens=7",
        "vllm",
        "failed",
        "serves wrong",
        "1.31",
    ),
    (
        "dflash",
        {},
        "algorithm=DFLASH num-draft-tokens=9",
        "sglang",
        "failed",
        "serves wrong",
        "DFLASH block size mismatch: using speculative_num_draft_tokens=9 but draft config block_size=8.",
    ),
    (
        "dflash",
        {"block_size": 8},
        "max-draft-len=8",
        "tensorrt-llm",
        "failed",
        "stops",
        "DFlash checkpoint was trained with block_size=8.Lower max_draft_len to at most 7.Current max_draft_len=8.",
    ),
]


@pytest.mark.parametrize(("family", "changes", "serve", "engine", "status", "outcome", "text"), BLOCKS)
def test_more_than_a_block_was_trained_on(
    family: str,
    changes: dict[str, Any],
    serve: str,
    engine: str,
    status: str,
    outcome: str,
    text: str,
    tmp_path: Path,
) -> None:
    if family == "dflash":
        changes = {"dflash_config": BLOCK_8, "block_size": 8, **changes}
    result = judge(tmp_path, "dflash.block-size", family, serve, **changes)
    assert result.status == status, result
    (found,) = [finding.outcomes[engine] for finding in result.findings]
    assert found.outcome == outcome
    assert text in found.message


@pytest.mark.parametrize(
    ("family", "changes", "serve"),
    [
        ("dflash", {}, "num-speculative-tokens=7"),
        ("dflash", {}, "algorithm=DFLASH num-draft-tokens=8"),
        # Fewer than were trained is harmless.
        ("dflash", {}, "algorithm=DFLASH num-draft-tokens=4 max-draft-len=7"),
        ("dspark", {"sample_from_anchor": True, "block_size": 7}, "num-speculative-tokens=7 max-draft-len=7"),
        # A file that does not say whether row 0 drafts is given the benefit of the doubt.
        ("dspark", {"sample_from_anchor": ..., "block_size": 7}, "num-speculative-tokens=7"),
    ],
)
def test_no_more_than_a_block_was_trained_on(family: str, changes: dict[str, Any], serve: str, tmp_path: Path) -> None:
    if family == "dflash":
        changes = {"dflash_config": BLOCK_8, "block_size": 8}
    assert judge(tmp_path, "dflash.block-size", family, serve, **changes).status == "passed"


KV = [
    (
        "attention-backend=trtllm_mla kv-cache-dtype=fp8_e5m2",
        "failed",
        "TensorRT-LLM MLA backend only supports kv-cache-dtype of fp8_e4m3, fp4_e2m1, bf16, or auto.",
    ),
    (
        "attention-backend=tokenspeed_mla kv-cache-dtype=bf16",
        "failed",
        "tokenspeed_mla backend requires kv-cache-dtype=fp8_e4m3, got bf16.",
    ),
    (
        "attention-backend=tokenspeed_mla",
        "failed",
        "tokenspeed_mla backend requires kv-cache-dtype=fp8_e4m3, got auto.",
    ),
    (
        "decode-attention-backend=tokenspeed_mla kv-cache-dtype=fp8_e5m2",
        "failed",
        "tokenspeed_mla backend requires kv-cache-dtype=fp8_e4m3, got fp8_e5m2.",
    ),
    (
        "decode-attention-backend=cutedsl_mla kv-cache-dtype=fp4_e2m1",
        "failed",
        "CuteDSL MLA backend only supports kv-cache-dtype of fp8_e4m3, bf16, or auto.",
    ),
    (
        "attention-backend=fa3 kv-cache-dtype=fp8_e5m2",
        "warned",
        "FlashAttention3 only supports fp8_e4m3 if using FP8; Setting attention backend to triton.",
    ),
    ("attention-backend=trtllm_mla page-size=16", "warned", "changing page_size from 16 to 64."),
]


@pytest.mark.parametrize(("serve", "status", "text"), KV)
def test_a_kv_cache_type_that_a_backend_does_not_take(serve: str, status: str, text: str, tmp_path: Path) -> None:
    result = judge(tmp_path, "serving.kv-cache-dtype", "eagle3-mla", serve)
    assert result.status == status, result
    (found,) = [finding.outcomes["sglang"] for finding in result.findings]
    assert found.outcome == ("stops" if status == "failed" else "falls back")
    assert text in found.message
    assert result.findings[0].fix


@pytest.mark.parametrize(
    "serve",
    [
        "attention-backend=trtllm_mla",
        "attention-backend=trtllm_mla kv-cache-dtype=fp4_e2m1 page-size=32",
        "attention-backend=tokenspeed_mla kv-cache-dtype=fp8_e4m3",
        "attention-backend=cutedsl_mla kv-cache-dtype=bfloat16",
        "attention-backend=fa3 kv-cache-dtype=fp8_e4m3",
        "kv-cache-dtype=fp8_e5m2",
    ],
)
def test_a_kv_cache_type_that_fits(serve: str, tmp_path: Path) -> None:
    assert judge(tmp_path, "serving.kv-cache-dtype", "eagle3-mla", serve).status == "passed"


def test_one_kv_cache_type_for_latents_and_heads(tmp_path: Path) -> None:
    result = judge(tmp_path, "serving.kv-cache-dtype", "eagle3", "kv-cache-dtype=fp8_e4m3", target=MLA_TARGET)
    assert result.status == "warned"
    assert result.findings[0].outcomes["sglang"].outcome == "falls back"
    for family, target in (("eagle3-mla", MLA_TARGET), ("eagle3", {"hidden_size": 64})):
        (tmp_path / family).mkdir()
        again = judge(
            tmp_path / family,
            "serving.kv-cache-dtype",
            family,
            "kv-cache-dtype=fp8_e4m3",
            target=target,
            engines=["sglang"],
        )
        assert again.status == "passed"


def test_vllm_hands_the_draft_the_targets_kv_cache_type(tmp_path: Path) -> None:
    result = judge(tmp_path, "serving.kv-cache-dtype", "eagle3", "kv-cache-dtype=fp8_ds_mla")
    assert result.status == "failed"
    assert result.findings[0].outcomes["vllm"].source == "issue 48380"
    (tmp_path / "2").mkdir()
    block = judge(tmp_path / "2", "serving.kv-cache-dtype", "dflash", "kv-cache-dtype=fp8_e4m3")
    assert block.status == "warned"
    assert block.findings[0].outcomes["vllm"].source == "issue 41559"


def test_only_the_chosen_engine_is_asked(tmp_path: Path) -> None:
    serve = "algorithm=EAGLE attention-backend=tokenspeed_mla kv-cache-dtype=bf16"
    for index, check in enumerate(("serving.algorithm", "serving.kv-cache-dtype")):
        (tmp_path / str(index)).mkdir()
        assert judge(tmp_path / str(index), check, "eagle3-mla", serve, engines=["vllm"]).status == "passed"


def test_options_that_do_not_speak_of_it_leave_a_check_open(tmp_path: Path) -> None:
    for index, check in enumerate(("serving.algorithm", "serving.draft-tokens", "serving.kv-cache-dtype")):
        (tmp_path / str(index)).mkdir()
        result = judge(tmp_path / str(index), check, "eagle3", "page-size=16")
        assert result.status == "inconclusive"
        assert "the options given do not speak of it; give" in result.message


def test_a_context_that_is_longer_than_the_draft() -> None:
    """The rule behind rope.max-position: SGLang's derived length, which a factor without an original length multiplies."""
    from pytest_specdecode import engines
    from pytest_specdecode.checkpoint import Checkpoint
    from pytest_specdecode.engines import ServeOptions
    from pytest_specdecode.families import load

    def refused(serve: str, **changes: Any) -> list[str]:
        checkpoint = Checkpoint(Path("draft"))
        checkpoint.config = testing.tiny_config("eagle3", **changes)
        found = engines.refusals("context-length", load(checkpoint), None, ServeOptions.parse(serve), ["sglang"])
        return [outcomes["sglang"].message for _, outcomes in found]

    (text,) = refused("context-length=4096", max_position_embeddings=2048)
    assert text.startswith(
        "Warning: Target model's context_length (4096) is greater than the derived context_length (2048)."
    )
    assert refused("context-length=2048", max_position_embeddings=2048) == []
    linear = {"rope_type": "linear", "factor": 2.0}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
    assert refused("context-length=4096", max_position_embeddings=2048, rope_scaling=linear) == []
    assert len(refused("context-length=4096", max_position_embeddings=2048, rope_scaling=yarn)) == 1


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp", "MIMO_MTP"])
def test_a_method_by_its_models_name_is_the_method(method: str, tmp_path: Path) -> None:
    assert judge(tmp_path, "serving.algorithm", "mtp", f"method={method}").status == "passed"


@pytest.mark.parametrize(
    ("serve", "engine", "due"),
    [("algorithm=EAGEL3", "sglang", "algorithm=EAGLE3"), ("method=eagel3", "vllm", "method=eagle3")],
)
def test_a_misspelled_algorithm_stops(serve: str, engine: str, due: str, tmp_path: Path) -> None:
    for index, engines in enumerate((None, [engine])):
        (tmp_path / str(index)).mkdir()
        result = judge(tmp_path / str(index), "serving.algorithm", "eagle3", serve, engines=engines)
        assert result.status == "failed"
        assert result.findings[0].outcomes[engine].outcome == "stops"
        assert result.findings[0].fix == f"start with {due}"


@pytest.mark.parametrize("option", ["dflash-block-size", "num-draft-tokens"])
def test_a_block_of_one_row_drafts_nothing(option: str, tmp_path: Path) -> None:
    result = judge(tmp_path, "serving.draft-tokens", "dflash", f"algorithm=DFLASH {option}=1", **BLOCK_8)
    assert result.status == "failed"
    assert result.message == "a block of one row holds the anchor and no draft"
    assert result.findings[0].where == f"--draft-serve: {option}"


@pytest.mark.parametrize(
    ("check", "serve", "got"),
    [
        ("serving.kv-cache-dtype", "kv-cache-dtype=zorp", "zorp is no kv-cache-dtype"),
        ("serving.kv-cache-dtype", "attention-backend=zorp", "zorp is no attention-backend"),
        ("serving.kv-cache-dtype", "decode-attention-backend=zorp", "zorp is no decode-attention-backend"),
        ("serving.algorithm", "algorithm=EAGLE3 draft-attention-backend=zorp", "zorp is no draft-attention-backend"),
    ],
)
def test_a_name_that_no_engine_knows_is_a_warning(check: str, serve: str, got: str, tmp_path: Path) -> None:
    result = judge(tmp_path, check, "eagle3", serve)
    assert result.status == "warned"
    assert result.message == f"{got} that any engine is known to take"


def test_vllm_writes_its_backends_in_capitals(tmp_path: Path) -> None:
    serve = "attention-backend=FLASH_ATTN kv-cache-dtype=auto"
    assert judge(tmp_path, "serving.kv-cache-dtype", "eagle3", serve).status == "passed"
