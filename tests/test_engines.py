"""What the engine models say of a draft, held against small configurations read by hand in the engines' sources.

What goes wrong without this file: a setting taken from a place that the engine does not read, a default that is another engine's, a
statement without a source, a fault that checks report and no engine knows, a fault that engines know and no check reports, a statement
that raises on a configuration nobody meant to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import engines, testing
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.engines import ENGINES, SETTINGS, Reads
from pytest_specdecode.families import FAMILIES, Draft, load
from pytest_specdecode.findings import Outcome

TAPS = "eagle_aux_hidden_state_layer_ids"


def a_draft(family: str, **changes: Any) -> Draft:
    """The tiny draft of `family` with `changes`; a dotted key, with `__` for the dot, changes one key of a nested object."""
    config = testing.tiny_config(family)
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner and not isinstance(config.get(outer), dict):
            config[outer] = {}
        place = config[outer] if inner else config
        if value is ...:
            place.pop(inner or outer, None)
        else:
            place[inner or outer] = value
    return of(config)


def of(config: Mapping[str, Any]) -> Draft:
    checkpoint = Checkpoint(Path("config"))
    checkpoint.config = dict(config)
    return load(checkpoint)


def speculators(kind: str, layer: Mapping[str, Any] | None = None, **changes: Any) -> Draft:
    """A small draft in the speculators packaging; `layer` changes its transformer_layer_config."""
    config: dict[str, Any] = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": 256,
        "transformer_layer_config": {
            "model_type": "qwen3" if kind in ("dflash", "dspark") else "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2 if kind in ("dflash", "dspark") else 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 512,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            **(layer or {}),
        },
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/name", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    if kind in ("dflash", "dspark"):
        config |= {"aux_hidden_state_layer_ids": [2, 10, 18], "mask_token_id": 511, "block_size": 8}
    if kind == "dspark":
        config |= {"markov_rank": 16, "markov_head_type": "vanilla"}
    for key, value in changes.items():
        if value is ...:
            config.pop(key)
        else:
            config[key] = value
    return of(config)


#: Engine, draft, setting, value, place; a place of None: nothing is known.
READINGS: list[tuple[str, Draft, str, Any, str | None]] = [
    # Taps, over 16 layers of the target.
    (
        "sglang",
        a_draft("eagle3", eagle_config__eagle_aux_hidden_state_layer_ids=[2, 8, 13]),
        "taps",
        [3, 9, 14],
        f"eagle_config.{TAPS}",
    ),
    ("vllm", a_draft("eagle3", eagle_aux_hidden_state_layer_ids=[2, 8, 13]), "taps", [2, 8, 13], TAPS),
    ("sglang", a_draft("eagle3", eagle_config=...), "taps", [2, 8, 13], ""),
    ("sglang", a_draft("eagle3", eagle_config=..., num_target_layers=...), "taps", None, None),
    (
        "sglang",
        a_draft("eagle3", eagle_config__eagle_aux_hidden_state_layer_ids=[4, 8, 16]),
        "taps",
        [4, 8, 16],
        f"eagle_config.{TAPS}",
    ),
    ("vllm", a_draft("eagle3", eagle_aux_hidden_state_layer_ids=...), "taps", [2, 8, 13], ""),
    ("vllm", a_draft("eagle3", eagle_aux_hidden_state_layer_ids=[13, 2, 8]), "taps", [2, 8, 13], TAPS),
    ("sglang", a_draft("eagle3", eagle_config__use_aux_hidden_state=False), "taps", None, None),
    (
        "sglang",
        a_draft("eagle3-mla", eagle_config__eagle_aux_hidden_state_layer_ids=[2, 30, 58]),
        "taps",
        [2, 30, 58],
        f"eagle_config.{TAPS}",
    ),
    (
        "sglang",
        a_draft("eagle3-mla", eagle_config__eagle_aux_hidden_state_layer_ids=[1, 29, 57]),
        "taps",
        [2, 30, 58],
        f"eagle_config.{TAPS}",
    ),
    ("vllm", speculators("eagle3", eagle_aux_hidden_state_layer_ids=[2, 14, 25]), "taps", [2, 14, 25], TAPS),
    ("sglang", a_draft("dflash"), "taps", [2, 10, 18], "dflash_config.target_layer_ids"),
    ("vllm", a_draft("dflash"), "taps", [2, 10, 18], "dflash_config.target_layer_ids"),
    (
        "tensorrt-llm",
        a_draft("dflash", dflash_config__target_layer_ids=[17, 1, 9]),
        "taps",
        [2, 10, 18],
        "dflash_config.target_layer_ids",
    ),
    # Two draft layers over 20 of the target: 1 and 17, read behind the layer. vLLM has one default for all.
    ("sglang", a_draft("dflash", dflash_config__target_layer_ids=...), "taps", [2, 18], ""),
    ("vllm", a_draft("dflash", dflash_config__target_layer_ids=...), "taps", [2, 10, 17], ""),
    ("vllm", speculators("dflash"), "taps", [2, 10, 18], "aux_hidden_state_layer_ids"),
    ("sglang", speculators("dflash"), "taps", None, None),
    ("sglang", a_draft("dspark"), "taps", [2, 10, 18], "target_layer_ids"),
    ("vllm", a_draft("dspark"), "taps", [2, 10, 18], "target_layer_ids"),
    # How many taps fc is built for.
    ("sglang", a_draft("eagle3", num_aux_hidden_states=4), "taps-count", 4, "num_aux_hidden_states"),
    ("sglang", a_draft("eagle3", eagle_config=..., eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "taps-count", 3, ""),
    ("vllm", a_draft("eagle3", eagle_config=..., eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "taps-count", 3, ""),
    (
        "vllm",
        a_draft(
            "eagle3",
            eagle_config=...,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4],
            architectures=["Eagle3Qwen3ForCausalLM"],
        ),
        "taps-count",
        4,
        TAPS,
    ),
    ("sglang", a_draft("eagle3-mla", eagle_config=..., eagle_aux_hidden_state_layer_ids=[1, 2]), "taps-count", 2, TAPS),
    # EAGLE3's switches.
    ("sglang", a_draft("eagle3", norm_before_residual=True), "norm-before-residual", False, ""),
    ("tensorrt-llm", a_draft("eagle3", norm_before_residual=True), "norm-before-residual", False, ""),
    ("vllm", a_draft("eagle3", norm_before_residual=True), "norm-before-residual", True, "norm_before_residual"),
    ("vllm", a_draft("eagle3"), "norm-before-residual", False, ""),
    ("vllm", speculators("eagle3"), "norm-before-residual", True, ""),
    ("vllm", speculators("peagle", mask_token_id=511), "norm-before-residual", False, ""),
    ("sglang", a_draft("eagle3", norm_before_fc=True), "norm-before-fc", True, "norm_before_fc"),
    (
        "sglang",
        a_draft("eagle3", norm_before_fc=True, eagle_config__norm_before_fc=False),
        "norm-before-fc",
        False,
        "eagle_config.norm_before_fc",
    ),
    ("tensorrt-llm", a_draft("eagle3", norm_before_fc=True), "norm-before-fc", False, ""),
    (
        "tensorrt-llm",
        a_draft("eagle3", eagle_config__norm_before_fc=True),
        "norm-before-fc",
        True,
        "eagle_config.norm_before_fc",
    ),
    ("sglang", a_draft("eagle3-mla", norm_before_fc=True), "norm-before-fc", False, ""),
    ("vllm", a_draft("eagle3-mla", norm_before_fc=True), "norm-before-fc", False, ""),
    ("sglang", a_draft("eagle3", use_aux_norm=True), "fc-norm", True, "use_aux_norm"),
    ("vllm", a_draft("eagle3", use_aux_norm=True), "fc-norm", False, ""),
    ("vllm", a_draft("eagle3-mla", fc_norm=True), "fc-norm", True, "fc_norm"),
    ("vllm", speculators("peagle", mask_token_id=511, fc_norm=True), "fc-norm", False, ""),
    ("sglang", a_draft("eagle3", norm_output=True), "norm-output", True, "norm_output"),
    (
        "tensorrt-llm",
        a_draft("eagle3", eagle_config__return_hidden_post_norm=True),
        "norm-output",
        True,
        "eagle_config.return_hidden_post_norm",
    ),
    (
        "tensorrt-llm",
        a_draft("eagle3", eagle_config__return_hidden_post_norm=False, norm_output=True),
        "norm-output",
        True,
        "norm_output",
    ),
    ("sglang", a_draft("eagle3", dtype=..., torch_dtype="bfloat16"), "dtype", "bfloat16", "torch_dtype"),
    ("sglang", a_draft("eagle3", dtype="float32"), "dtype", "float16", "dtype"),
    ("sglang", a_draft("eagle3", dtype=..., torch_dtype=...), "dtype", "float16", ""),
    ("sglang", a_draft("eagle3", dtype=..., torch_dtype=..., model_type="gemma3_text"), "dtype", "bfloat16", ""),
    ("sglang", a_draft("eagle3", architectures=["Eagle3Qwen3ForCausalLM"]), "qk-norm", False, ""),
    ("vllm", a_draft("eagle3", architectures=["Eagle3Qwen3ForCausalLM"]), "qk-norm", True, ""),
    ("vllm", a_draft("eagle3"), "qk-norm", False, ""),
    ("sglang", a_draft("eagle3", attention_bias=True), "qkv-bias", False, ""),
    ("vllm", a_draft("eagle3", attention_bias=True), "qkv-bias", True, "attention_bias"),
    ("tensorrt-llm", a_draft("eagle3", attention_bias=True), "qkv-bias", True, "attention_bias"),
    (
        "vllm",
        speculators("eagle3", {"attention_bias": True}),
        "qkv-bias",
        True,
        "transformer_layer_config.attention_bias",
    ),
    ("sglang", a_draft("eagle3", bias=True), "fc-bias", True, "bias"),
    ("vllm", a_draft("eagle3", bias=True), "fc-bias", False, ""),
    ("tensorrt-llm", a_draft("eagle3", bias=True), "fc-bias", True, "bias"),
    ("sglang", a_draft("eagle1", bias=False), "fc-bias", True, ""),
    ("vllm", a_draft("eagle1"), "fc-bias", False, ""),
    ("sglang", a_draft("eagle3-mla"), "layers", 1, ""),
    ("sglang", a_draft("eagle3"), "layers", None, ""),
    ("vllm", a_draft("eagle3-mla"), "layers", None, ""),
    # Rotation.
    ("sglang", a_draft("eagle3"), "rope-theta", 500000.0, "rope_theta"),
    ("sglang", a_draft("eagle3", rope_theta=...), "rope-theta", 10000.0, ""),
    ("sglang", a_draft("eagle3", model_type="gpt_oss", rope_theta=...), "rope-theta", 150000.0, ""),
    ("sglang", a_draft("eagle3", model_type="another", rope_theta=...), "rope-theta", None, None),
    ("vllm", a_draft("dflash", rope_theta=...), "rope-theta", 10000.0, ""),
    ("vllm", speculators("dflash"), "rope-theta", 1000000.0, ""),
    ("vllm", speculators("eagle3"), "rope-theta", 10000.0, ""),
    ("vllm", speculators("eagle3", {"rope_theta": 1e6}), "rope-theta", 1e6, "transformer_layer_config.rope_theta"),
    ("sglang", a_draft("dspark"), "rope-theta", 1000000.0, "rope_parameters.rope_theta"),
    ("vllm", a_draft("dspark", rope_theta=7), "rope-theta", 1000000.0, "rope_parameters.rope_theta"),
    # A rope_scaling that is not empty takes the place of rope_parameters as a whole.
    (
        "sglang",
        a_draft("dspark", rope_theta=7, rope_scaling={"type": "linear", "factor": 2.0}),
        "rope-theta",
        7.0,
        "rope_theta",
    ),
    (
        "sglang",
        a_draft("dspark", rope_scaling={"type": "linear", "factor": 2.0}),
        "rope-scaling",
        (("factor", 2.0), ("rope_type", "linear")),
        "rope_scaling",
    ),
    ("vllm", a_draft("eagle3"), "rope-scaling", (), ""),
    ("sglang", a_draft("dspark", rope_parameters={"full_attention": {"rope_theta": 5.0}}), "rope-theta", None, None),
    (
        "vllm",
        a_draft("eagle3", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "rope-scaling",
        (("factor", 4.0), ("original_max_position_embeddings", 4096), ("rope_type", "yarn")),
        "rope_scaling",
    ),
    ("vllm", a_draft("dflash", is_neox_style=False), "is-neox-style", False, "is_neox_style"),
    ("vllm", a_draft("dflash", rope_is_neox_style=False), "is-neox-style", True, ""),
    ("sglang", a_draft("dflash", rope_is_neox_style=False), "is-neox-style", False, "rope_is_neox_style"),
    ("sglang", a_draft("dflash", is_neox_style=False), "is-neox-style", False, "is_neox_style"),
    ("vllm", a_draft("eagle3"), "is-neox-style", True, ""),
    ("sglang", a_draft("eagle3-mla"), "is-neox-style", False, ""),
    ("sglang", a_draft("dflash", partial_rotary_factor=0.5), "partial-rotary-factor", 0.5, "partial_rotary_factor"),
    ("sglang", a_draft("dspark", rope_parameters__partial_rotary_factor=0.5), "partial-rotary-factor", 1.0, ""),
    (
        "vllm",
        a_draft("dspark", rope_parameters__partial_rotary_factor=0.5),
        "partial-rotary-factor",
        0.5,
        "rope_parameters.partial_rotary_factor",
    ),
    # Blocks.
    ("sglang", a_draft("dflash"), "block-size", 8, "dflash_config.block_size"),
    ("sglang", a_draft("dflash", block_size=..., dflash_config__block_size=...), "block-size", 16, ""),
    ("tensorrt-llm", a_draft("dflash", block_size=4), "block-size", 4, "block_size"),
    ("tensorrt-llm", a_draft("dflash", block_size=...), "block-size", None, None),
    ("vllm", a_draft("dflash"), "block-size", None, None),
    ("vllm", a_draft("dspark"), "block-size", 7, "block_size"),
    ("sglang", a_draft("dspark", block_size=...), "block-size", 7, ""),
    ("sglang", a_draft("dflash"), "mask-token-id", 511, "dflash_config.mask_token_id"),
    ("sglang", a_draft("dflash", dflash_config__mask_token_id=...), "mask-token-id", None, None),
    ("tensorrt-llm", a_draft("dflash", dflash_config__mask_token_id=...), "mask-token-id", 512, ""),
    ("vllm", a_draft("peagle"), "mask-token-id", 511, "mask_token_id"),
    ("vllm", speculators("dflash"), "mask-token-id", 511, "mask_token_id"),
    ("sglang", a_draft("dflash", sample_from_anchor=True), "sample-from-anchor", False, ""),
    ("sglang", a_draft("dspark", sample_from_anchor=False), "sample-from-anchor", False, "sample_from_anchor"),
    ("sglang", a_draft("dspark", sample_from_anchor=...), "sample-from-anchor", True, ""),
    ("vllm", a_draft("dspark", sample_from_anchor=...), "sample-from-anchor", True, ""),
    ("vllm", speculators("dspark"), "sample-from-anchor", False, ""),
    # Causality and windows, layer by layer.
    ("sglang", a_draft("dflash"), "is-causal", (False, False), "is_causal"),
    (
        "sglang",
        a_draft("dflash", is_causal=..., layer_types=["sliding_attention", "full_attention"]),
        "is-causal",
        (True, False),
        "",
    ),
    (
        "vllm",
        a_draft("dflash", is_causal=..., layer_types=["sliding_attention", "full_attention"]),
        "is-causal",
        (True, False),
        "",
    ),
    ("sglang", a_draft("dflash", is_causal=..., dflash_config__causal=True), "is-causal", (False, False), ""),
    (
        "vllm",
        a_draft("dflash", is_causal=..., dflash_config__causal=True),
        "is-causal",
        (True, True),
        "dflash_config.causal",
    ),
    ("vllm", a_draft("dflash", is_causal=False, dflash_config__causal=True), "is-causal", (False, False), "is_causal"),
    ("vllm", speculators("dflash"), "is-causal", (False, False), ""),
    (
        "vllm",
        speculators("dflash", sliding_window_non_causal=False),
        "is-causal",
        (True, True),
        "sliding_window_non_causal",
    ),
    (
        "vllm",
        speculators("dspark", {"layer_types": ["sliding_attention", "full_attention"]}),
        "is-causal",
        (True, False),
        "",
    ),
    ("sglang", a_draft("dflash", sliding_window=64), "sliding-window", (None, None), ""),
    (
        "sglang",
        a_draft(
            "dflash", layer_types=["full_attention", "sliding_attention"], sliding_window=64, use_sliding_window=True
        ),
        "sliding-window",
        (None, 64),
        "",
    ),
    (
        "vllm",
        a_draft("dflash", dflash_config__use_swa=True, dflash_config__swa_window_size=32),
        "sliding-window",
        (32, 32),
        "",
    ),
    (
        "sglang",
        a_draft("dflash", dflash_config__use_swa=True, dflash_config__swa_window_size=32),
        "sliding-window",
        (None, None),
        "",
    ),
    (
        "vllm",
        speculators("dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}),
        "sliding-window",
        (64, 64),
        "",
    ),
    (
        "sglang",
        a_draft("dflash", dflash_config__attention_value_scale=0.5),
        "value-scale",
        0.5,
        "dflash_config.attention_value_scale",
    ),
    ("sglang", a_draft("dflash", attention_value_scale=0.5), "value-scale", 1.0, ""),
    ("tensorrt-llm", a_draft("dflash", dflash_config__attention_value_scale=0.5), "value-scale", 1.0, ""),
    # Vocabulary and DSpark's heads.
    ("sglang", a_draft("eagle3"), "draft-vocab-size", 256, "draft_vocab_size"),
    ("sglang", a_draft("dflash", draft_vocab_size=256), "draft-vocab-size", 512, ""),
    ("vllm", a_draft("dflash", draft_vocab_size=256), "draft-vocab-size", 256, "draft_vocab_size"),
    ("sglang", a_draft("eagle3", tie_word_embeddings=True), "tie-word-embeddings", True, "tie_word_embeddings"),
    ("vllm", a_draft("eagle3", tie_word_embeddings=True), "tie-word-embeddings", False, ""),
    ("sglang", a_draft("dspark"), "markov-rank", 16, "markov_rank"),
    ("vllm", a_draft("dspark"), "confidence-head", True, "enable_confidence_head"),
    ("sglang", a_draft("dspark"), "confidence-head", False, ""),
    ("sglang", a_draft("dspark", markov_head_type="gated"), "markov-head-type", "gated", "markov_head_type"),
    ("vllm", a_draft("dspark", markov_head_type="gated"), "markov-head-type", "vanilla", ""),
    ("sglang", a_draft("dflash"), "mask-token", "<|MASK|>", ""),
    ("sglang", a_draft("medusa"), "taps", None, None),
    # Which half a prediction layer's projection reads first goes by the class, whatever the tensors are called.
    ("vllm", a_draft("mtp"), "combine", "embed-first", ""),
    ("vllm", a_draft("mtp", architectures=["MiMoForCausalLM"]), "combine", "hidden-first", ""),
    ("vllm", a_draft("mtp", architectures=["LlamaForCausalLM"], model_type="mimo"), "combine", "embed-first", ""),
    ("vllm", a_draft("mtp", model_type="deepseek_v4"), "combine", "sum", ""),
    ("vllm", a_draft("mtp", architectures="MiMoForCausalLM"), "combine", "embed-first", ""),
    ("sglang", a_draft("mtp", architectures=["MiMoForCausalLM"]), "combine", "hidden-first", ""),
    ("sglang", a_draft("mtp"), "combine", None, None),
]


@pytest.mark.parametrize(
    ("engine", "draft", "setting", "value", "place"),
    READINGS,
    ids=[
        f"{index}-{row[0]}-{row[1].spec.family if row[1].spec else None}-{row[2]}" for index, row in enumerate(READINGS)
    ],
)
def test_a_setting_is_read_from_where_the_engine_looks(
    engine: str, draft: Draft, setting: str, value: Any, place: str | None
) -> None:
    reading = ENGINES[engine].reading(setting, draft)
    if place is None:
        assert reading is None
    else:
        assert reading is not None
        assert (reading.value, reading.place) == (value, place)
        assert type(reading.value) is type(value)


def test_every_setting_that_an_engine_reads_is_read_somewhere_above() -> None:
    read = {(name, rule.setting) for name, engine in ENGINES.items() for rule in engine.reads}
    # What one engine says in the same words as another, with nothing that could differ.
    plain = {"layers", "fc-bias", "is-neox-style", "taps-count", "draft-vocab-size", "tie-word-embeddings", "fc-norm"}
    plain |= {
        "partial-rotary-factor",
        "sliding-window",
        "qkv-bias",
        "norm-output",
        "markov-rank",
        "value-scale",
        "rope-scaling",
    }
    assert {pair for pair in read - {row[0::2][:2] for row in READINGS} if pair[1] not in plain} == set()
    assert {setting for _, setting in read} == set(SETTINGS)


#: Engine, draft, setting, what the engine says to the value it takes.
REFUSED = [
    ("sglang", a_draft("eagle3-mla", num_hidden_layers=2), "layers", "EAGLE3 currently only supports 1 layer"),
    (
        "vllm",
        a_draft("dflash", dflash_config__sample_from_anchor=True),
        "sample-from-anchor",
        "sample_from_anchor=True is not supported",
    ),
    ("sglang", a_draft("dspark", markov_rank=...), "markov-rank", "DSpark requires markov_rank > 0"),
    ("vllm", a_draft("dspark", markov_rank=...), "markov-rank", "AttributeError"),
    (
        "sglang",
        a_draft("dflash", layer_types=["full_attention"]),
        "sliding-window",
        "must contain one entry per draft layer",
    ),
    (
        "sglang",
        a_draft("dflash", layer_types=["other", "full_attention"]),
        "sliding-window",
        "Unsupported DFLASH draft layer type",
    ),
    # transformers' Qwen3 class drops a window that use_sliding_window does not switch on.
    (
        "sglang",
        a_draft("dflash", layer_types=["sliding_attention"] * 2, sliding_window=64),
        "sliding-window",
        "require config.sliding_window",
    ),
    (
        "vllm",
        a_draft("dflash", layer_types=["sliding_attention"] * 2, sliding_window=64),
        "sliding-window",
        "requires a window size",
    ),
    ("sglang", a_draft("dflash", dflash_config__mask_token_id=-1), "mask-token-id", "must be non-negative"),
    ("sglang", a_draft("dflash", dflash_config__mask_token_id="a"), "mask-token-id", "must be an integer"),
    ("sglang", a_draft("dflash", dflash_config__block_size=0), "block-size", "must be positive, got 0"),
]


@pytest.mark.parametrize(("engine", "draft", "setting", "text"), REFUSED)
def test_a_value_that_the_engine_refuses_stops_it(engine: str, draft: Draft, setting: str, text: str) -> None:
    reading = ENGINES[engine].reading(setting, draft)
    assert reading is not None
    assert text in str(reading)
    outcome = engines.compare(setting, reading.value, draft, [engine])[engine]
    assert outcome == Outcome(outcome="stops", message=reading.refused, source=reading.source)


def test_engines_are_compared_with_what_is_meant() -> None:
    found = engines.compare("norm-before-residual", True, speculators("eagle3"))
    assert {name: outcome.outcome for name, outcome in found.items()} == {
        "sglang": "unknown",
        "vllm": "fine",
        "tensorrt-llm": "unknown",
    }
    found = engines.compare("norm-before-residual", True, a_draft("eagle3", norm_before_residual=True))
    assert {name: outcome.outcome for name, outcome in found.items()} == {
        "sglang": "serves wrong",
        "vllm": "fine",
        "tensorrt-llm": "serves wrong",
    }
    assert found["sglang"].message == "takes False, its own"
    assert found["vllm"].message == "takes True from norm_before_residual"


def test_a_setting_that_does_not_exist_is_a_defect_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no setting is called 'rope_theta'"):
        ENGINES["vllm"].reading("rope_theta", a_draft("eagle3"))
    with pytest.raises(ValueError, match="no setting is called 'theta'"):
        Reads(setting="theta")


#: Engine, draft, the keys it passes over.
IGNORED: list[tuple[str, Draft, list[str]]] = [
    (
        "sglang",
        a_draft("eagle3", norm_before_residual=True, attention_bias=True),
        ["norm_before_residual", "attention_bias"],
    ),
    ("sglang", a_draft("eagle3", norm_before_residual=False, attention_bias=False), []),
    ("tensorrt-llm", a_draft("eagle3", norm_before_fc=True), ["norm_before_fc"]),
    ("tensorrt-llm", a_draft("eagle3", norm_before_fc=True, eagle_config__norm_before_fc=True), []),
    ("vllm", a_draft("eagle3", eagle_aux_hidden_state_layer_ids=...), [f"eagle_config.{TAPS}"]),
    ("vllm", a_draft("eagle3"), []),
    ("vllm", a_draft("eagle3", bias=True, use_aux_norm=True), ["use_aux_norm", "bias"]),
    ("vllm", a_draft("dflash", rope_is_neox_style=False), ["rope_is_neox_style"]),
    ("vllm", a_draft("dflash", rope_is_neox_style=False, is_neox_style=False), []),
    ("sglang", a_draft("dflash", rope_is_neox_style=False, is_neox_style=False), []),
    ("tensorrt-llm", a_draft("dflash", is_neox_style=False), ["is_neox_style"]),
    (
        "sglang",
        a_draft("dspark", rope_parameters__partial_rotary_factor=0.5),
        ["rope_parameters.partial_rotary_factor"],
    ),
    ("sglang", a_draft("dspark", rope_parameters__partial_rotary_factor=1.0), []),
    *((name, a_draft("dflash", fc_layernorm=True), ["fc_layernorm"]) for name in ENGINES),
    ("sglang", a_draft("dflash", dflash_config__output_multiplier=2.0), ["dflash_config.output_multiplier"]),
    ("sglang", a_draft("dflash2", dflash_config__output_multiplier=2.0), []),
    ("sglang", a_draft("dflash", is_causal=..., dflash_config__causal=True), ["dflash_config.causal"]),
    # The fused path has no factor on V; a biased draft goes layer by layer, where V is multiplied.
    ("sglang", a_draft("dflash", dflash_config__attention_value_scale=0.5), ["dflash_config.attention_value_scale"]),
    ("sglang", a_draft("dflash", dflash_config__attention_value_scale=0.5, attention_bias=True), []),
    (
        "tensorrt-llm",
        a_draft("dflash", dflash_config__attention_value_scale=0.5),
        ["dflash_config.attention_value_scale"],
    ),
    ("tensorrt-llm", a_draft("dflash", block_size=...), ["dflash_config.block_size"]),
    ("sglang", a_draft("dflash", draft_vocab_size=256), ["draft_vocab_size"]),
    ("sglang", a_draft("dflash", draft_vocab_size=512), []),
    ("vllm", speculators("peagle", mask_token_id=511, fc_norm=True, norm_output=True), ["fc_norm", "norm_output"]),
    ("sglang", a_draft("eagle3", layer_types=["sliding_attention"], sliding_window=64), ["sliding_window"]),
    ("sglang", a_draft("eagle3", sliding_window=64), []),
]


@pytest.mark.parametrize(("engine", "draft", "keys"), IGNORED)
def test_keys_that_an_engine_passes_over(engine: str, draft: Draft, keys: list[str]) -> None:
    assert [item.key for item in ENGINES[engine].ignored(draft)] == keys


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_good_draft_states_nothing_that_an_engine_passes_over(family: str) -> None:
    for name, engine in ENGINES.items():
        found = [item.key for item in engine.ignored(a_draft(family))]
        assert found == [], name


#: Engine, draft, what is in the reason, or None where the fused path is used.
FUSED: list[tuple[str, Draft, str | None]] = [
    *((name, a_draft("dflash"), None) for name in ENGINES),
    ("sglang", a_draft("dflash", attention_bias=True), "qkv bias is not supported for fused KV path: layer=0"),
    ("vllm", a_draft("dflash", attention_bias=True), None),
    (
        "sglang",
        a_draft("dflash", rope_is_neox_style=False),
        "non-neox RoPE is not supported for fused KV path: layer=0",
    ),
    ("sglang", a_draft("dflash", use_gemma_norm=True), "draft model does not support fused context KV"),
    (
        "sglang",
        a_draft("dflash", architectures=["DFlashLagunaForCausalLM"]),
        "draft model does not support fused context KV",
    ),
    ("vllm", a_draft("dflash", architectures=["DFlashLagunaForCausalLM"]), None),
    (
        "sglang",
        a_draft("dflash", quantization_config={"quant_method": "fp8"}),
        "quantized qkv_proj is not supported for this path: layer=0",
    ),
    (
        "vllm",
        a_draft("dflash", quantization_config={"quant_method": "fp8"}),
        "projects layer by layer where weights are quantised: layers 0, 1",
    ),
    # Half of a head of 30 lanes: construction passes, the first materialize does not.
    (
        "sglang",
        a_draft("dflash", head_dim=30, partial_rotary_factor=0.5),
        "Invalid fused KV rotary/head dim pair: rotary_dim=15, head_dim=30.",
    ),
    ("sglang", a_draft("dspark"), None),
    ("sglang", a_draft("dspark", attention_bias=True), "takes no qkv bias: layer 0"),
    ("sglang", a_draft("dspark", dtype="float16"), "needs bfloat16, not float16"),
    ("sglang", a_draft("dspark", head_dim=24), "needs powers of two: head_dim 24"),
    (
        "sglang",
        a_draft("dspark", rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=...),
        "plain RoPE only, not linear",
    ),
    ("sglang", a_draft("eagle3"), "no fused path for a eagle3 draft"),
    ("vllm", a_draft("eagle3"), "no fused path for a eagle3 draft"),
    ("tensorrt-llm", a_draft("eagle3"), "no fused path for a eagle3 draft"),
    ("sglang", speculators("dflash"), "no fused path for a speculators draft"),
    ("vllm", speculators("dflash"), None),
]


@pytest.mark.parametrize(("engine", "draft", "reason"), FUSED)
def test_why_an_engine_goes_layer_by_layer(engine: str, draft: Draft, reason: str | None) -> None:
    ask = ENGINES[engine].fused_path
    assert ask is not None
    found = ask(draft)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_draft_with_packed_weights_goes_layer_by_layer(tmp_path: Path) -> None:
    import torch

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors["layers.1.self_attn.k_proj.weight"]
        tensors["layers.1.self_attn.k_proj.weight"] = weight.to(torch.float8_e4m3fn)
        tensors["layers.1.self_attn.k_proj.weight_scale"] = torch.ones(())

    scheme = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}
    path = testing.write_tiny(tmp_path, "dflash", edit=pack)
    draft = load(Checkpoint.open(path))
    reasons = {name: engine.fused_path(draft) for name, engine in ENGINES.items() if engine.fused_path is not None}
    assert "quantized qkv_proj is not supported for this path: layer=1" in str(reasons["sglang"])
    assert reasons["vllm"] == "projects layer by layer where weights are quantised: layers 1"

    def scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.self_attn.attn.v_scale"] = torch.full((), 0.5)

    draft = load(Checkpoint.open(testing.write_tiny(tmp_path / "scales", "dflash", edit=scale)))
    ask = ENGINES["sglang"].fused_path
    assert ask is not None
    assert ask(draft) is None, "nothing loads a scale where the cache is not quantised"
    draft.checkpoint.config = {**draft.checkpoint.config, "quantization_config": scheme}
    assert "non-unit v_scale is not supported for fused KV path: layer=0" in str(ask(draft))


# -- Every statement ----------------------------------------------------------------------------------------------------------------


def drafts() -> Iterator[Draft]:
    """A draft of every family, and of every packaging whose statements differ."""
    yield from (a_draft(family.name) for family in FAMILIES)
    yield from (speculators(kind) for kind in ("eagle3", "dflash", "dspark"))
    yield a_draft("eagle3", target_hidden_size=96)
    yield a_draft("eagle3", draft_vocab_size=None)
    yield a_draft("dflash", num_hidden_layers=3, layer_types=["full_attention"] * 3)


@pytest.mark.parametrize("name", ENGINES)
def test_every_statement_has_a_source(name: str) -> None:
    engine = ENGINES[name]
    assert all(rule.source for rule in engine.reads)
    assert all(item.source and item.instead for item in engine.ignores)
    specs = [draft.spec for draft in drafts()]
    assert None not in specs
    for slug in engine.known:
        for spec in specs:
            outcome = engine.outcome(slug, spec)
            assert outcome.source or not (outcome.message or outcome.outcome != "unknown"), (slug, spec and spec.family)
            assert outcome.message or outcome.outcome == "unknown", (slug, spec and spec.family)


#: Faults of which nothing is known of any engine, each with the reason.
UNKNOWN_TO_ALL: dict[str, str] = {
    "causality-unstated": "each engine has a reading, and none is known to be the trained one",
    "family-disagrees": "what comes of it hangs on which class is put over which tensors",
    "key-misspelled": "what is lost is whatever the key was meant to say",
    "layout-unstated": "each engine has a reading, and none is known to be the trained one",
    "sinks": "whether they are applied hangs on the attention backend",
    "target-quantised": "accepted nothing in one report, whose cause is not settled",
    "target-rotated": "what a rotation costs depends on what the draft was trained on",
}


def test_every_fault_that_checks_report_is_known_to_an_engine() -> None:
    specs = [draft.spec for draft in drafts()]
    declared = {fault for check in REGISTRY.values() for fault in check.faults}
    silent = {
        fault
        for fault in declared
        if all(engine.outcome(fault, spec).outcome == "unknown" for engine in ENGINES.values() for spec in specs)
    }
    assert silent == set(UNKNOWN_TO_ALL) & declared


def test_no_engine_knows_a_fault_that_no_check_reports() -> None:
    declared = {fault for check in REGISTRY.values() for fault in check.faults}
    assert {fault for engine in ENGINES.values() for fault in engine.known} <= declared


ODD: tuple[Any, ...] = ("text", "", [], [None, "1"], [[1]], {}, {"a": []}, True, -1, 0, 10**299, 1.5, None)


@pytest.mark.parametrize("family", ["eagle1", "eagle3", "eagle3-mla", "peagle", "dflash", "dflash2", "dspark"])
def test_no_configuration_makes_a_statement_raise(family: str) -> None:
    places = {place for engine in ENGINES.values() for rule in engine.reads for place in rule.places}
    places |= {item.key for engine in ENGINES.values() for item in engine.ignores}
    places |= {
        "layer_types",
        "sliding_window",
        "model_type",
        "architectures",
        "eagle_config",
        "dflash_config",
        "num_hidden_layers",
    }
    places |= {
        "quantization_config",
        "rope_parameters",
        "rope_scaling",
        "use_sliding_window",
        "head_dim",
        "num_target_layers",
    }
    for place in sorted(places):
        for value in ODD:
            draft = a_draft(family, **{place.replace(".", "__", 1): value})
            for engine in ENGINES.values():
                for setting in SETTINGS:
                    str(engine.reading(setting, draft))
                engine.ignored(draft)
                assert engine.fused_path is not None
                engine.fused_path(draft)
