"""DSpark: six packagings, three Markov heads, four backbones.

What these catch: a packaging that is not recognised, or is taken for DFlash's or for a target; heads without their prefixes that count as
absent; a draft inside DeepSeek-V4 whose target's tensors are read with it, or whose stages are counted by `num_nextn_predict_layers`; a
configuration copied from a Qwen 3.5 target that is believed, and a native fork that is not; a head with a row per target id where one per
draft id is due, or the other way; Gemma 4's v_proj demanded, or its shared K and V stacked; a missing tensor that no check names; rows
biased by the wrong token, drafts fed back unmapped, a recurrent state that is not carried.

The forward is held against public implementations in `tests/peers/test_peer_dspark.py`; here stand the numbers that can be worked out by
hand, and a float64 calculation of one whole block in NumPy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pytest_specdecode import checks
from pytest_specdecode.api import check_draft, context_of
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import DraftError, LayerBuildError, StackUnsupportedError
from pytest_specdecode.families import Draft, load
from pytest_specdecode.families.dspark import DSparkOptions
from pytest_specdecode.families.dspark_heads import DSparkHead, MarkovHead
from pytest_specdecode.spec import GQASpec, MLASpec
from pytest_specdecode.testing import expected_tensors, random_tensors, tiny_config, write_checkpoint, write_tiny

Array = NDArray[np.float64]
CONFIGS = Path(__file__).parents[1] / "corpus" / "configs"
HIDDEN, VOCAB, RANK, BLOCK = 64, 512, 16, 7

HEAD_KEYS: dict[str, Any] = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
TOP_KEYS: dict[str, Any] = dict.fromkeys((*HEAD_KEYS, "target_layer_ids", "mask_token_id", "sample_from_anchor"), ...)
SPECFORGE: dict[str, Any] = {
    **TOP_KEYS,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {
        **HEAD_KEYS,
        "projector_type": "dspark",
        "mask_token_id": 511,
        "target_layer_ids": [1, 9, 17],
    },
}
LIQUID: dict[str, Any] = {
    **dict.fromkeys(("target_layer_ids", "mask_token_id", "num_target_layers"), ...),
    "architectures": ["Lfm2DSparkDraftModel"],
    "rope_is_neox_style": False,
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 9, 17], "num_target_layers": 20},
}
NATIVE: dict[str, Any] = {
    "architectures": ["Qwen35DSparkModel"],
    "model_type": "qwen3_5",
    "enable_qwen35_gated_q_proj": True,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
}
COPIED: dict[str, Any] = {
    **NATIVE,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "enable_qwen35_gated_q_proj": ...,
    "attn_output_gate": True,
    "output_gate_type": "swish",
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "rope_theta": None,
        "rope_type": "default",
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
KIMI: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_target_layers": 3,
    "target_num_hidden_layers": 20,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
V4: dict[str, Any] = {
    **dict.fromkeys((*HEAD_KEYS, "target_layer_ids", "mask_token_id", "sample_from_anchor", "block_size"), ...),
    **dict.fromkeys(("rope_parameters", "layer_types", "num_target_layers"), ...),
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "hc_mult": 2,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 8,
    "sliding_window": 128,
    "rope_theta": 10000,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [17, 18, 19],
    "dspark_markov_rank": RANK,
}
SHAPES: dict[str, dict[str, Any]] = {
    "deepspec": {},
    "specforge": SPECFORGE,
    "liquid": LIQUID,
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no-markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no-confidence": {"enable_confidence_head": False},
    "reduced": {"draft_vocab_size": 128},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "native-fork": NATIVE,
    "copied-keys": COPIED,
    "gemma4": GEMMA,
    "kimi-k3": KIMI,
}


def speculators(**changes: Any) -> dict[str, Any]:
    """The tiny draft as the `speculators` library writes it, with taps that count boundaries."""
    plain = tiny_config("dspark")
    moved = ("block_size", "mask_token_id", "sample_from_anchor", *HEAD_KEYS)
    dropped = ("architectures", "target_layer_ids", "num_target_layers", *moved)
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "draft_vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": [2, 10, 18],
        **{key: plain[key] for key in moved},
        "transformer_layer_config": {key: value for key, value in plain.items() if key not in dropped},
        **changes,
    }


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def bare(directory: Path, whole: Mapping[str, Any]) -> Draft:
    """A draft of which only the configuration is there."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(whole))
    return load(Checkpoint.open(directory))


def written(directory: Path, dtype: str = "float32", **changes: Any) -> Draft:
    return load(Checkpoint.open(write_tiny(directory, "dspark", dtype=dtype, seed=3, **changes)))


def parts(draft: Draft, dtype: torch.dtype = torch.float64) -> tuple[Any, DSparkHead]:
    family: Any = draft.family
    source = draft.source(dtype=dtype)
    return family.build_model(draft.spec, source), family.build_head(draft.spec, source)


def options(draft: Draft) -> DSparkOptions:
    assert draft.spec is not None
    assert isinstance(draft.spec.options, DSparkOptions)
    return draft.spec.options


def shapes(draft: Draft) -> dict[str, tuple[int | None, ...]]:
    assert draft.binding is not None
    return {name: tensor.shape for name, tensor in draft.binding.expected.items()}


def need(draft: Draft, name: str) -> str:
    assert draft.binding is not None
    return draft.binding.expected[name].need


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- recognition --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"architectures": ["Gemma4DSparkModel"]},
        {"architectures": ["Qwen35DSparkModel"]},
        {"architectures": ["Lfm2DSparkDraftModel"], "dflash_config": {"mask_token_id": 3}},
        {"model_type": "k3_dspark"},
        {"projector_type": "dspark"},
        {"speculators_model_type": "dspark", "transformer_layer_config": {}},
        {"dflash_config": {"projector_type": "dspark"}},
        {"dflash_config": {"mask_token_id": 3, "markov_rank": 256}},
        {"markov_rank": 256, "model_type": "qwen3"},
        {"architectures": ["DeepseekV4ForCausalLM"], "num_nextn_predict_layers": 1, "dspark_block_size": 5},
        {"text_config": {"hidden_size": 64, "dspark_target_layer_ids": [1, 2]}, "num_nextn_predict_layers": 1},
    ],
)
def test_every_packaging_is_told_by_its_configuration(tmp_path: Path, given: dict[str, Any]) -> None:
    found = bare(tmp_path, given).recognition
    assert (found.family, found.disagreement) == ("dspark", ())


@pytest.mark.parametrize(
    "given", [{"architectures": ["DeepseekV4ForCausalLM"], "num_nextn_predict_layers": 1}, {"model_type": "qwen3"}]
)
def test_a_target_without_dspark_keys_is_none(tmp_path: Path, given: dict[str, Any]) -> None:
    assert bare(tmp_path, given).recognition.family != "dspark"


@pytest.mark.parametrize(
    "name", ["markov_head.markov_w1.weight", "markov_w1.weight", "mtp.2.markov_head.markov_w1.weight"]
)
def test_a_markov_head_tells_under_all_its_names(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, {}, {name: torch.ones(4, 4), "fc.weight": torch.ones(4, 12)})
    found = load(Checkpoint.open(tmp_path)).recognition
    assert (found.family, found.disagreement) == ("dspark", ())


def test_dflash_labels_over_dspark_weights_are_a_finding_that_shows_each_signal(tmp_path: Path) -> None:
    write_tiny(tmp_path, "dspark")
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("dspark", architectures=["DFlashDraftModel"])))
    finding = check_draft(tmp_path, checks=["config.family"])["config.family"].findings[0]
    assert set(finding.got) == {"dflash", "dspark"}
    draft = bare(tmp_path / "labels", config("bad--dspark-projector-arch-disagree"))
    assert (draft.spec, draft.recognition.disagreement) == (None, ("dflash", "dspark"))


# --- public configurations ----------------------------------------------------------------------------------------------------------

EXPECTED: dict[str, dict[str, Any]] = json.loads((CONFIGS.parent / "expected.json").read_text(encoding="utf-8"))
PUBLIC = sorted(name for name, due in EXPECTED.items() if due["family"] == "dspark")


def published(
    hidden: int, q: int, kv: int, head: int, taps: int, vocabulary: int, block: int, mask: int
) -> dict[str, Any]:
    return {
        "fc.weight": (hidden, taps * hidden),
        "layers.4.self_attn.q_proj.weight": (q, hidden),
        "layers.4.self_attn.k_proj.weight": (kv, hidden),
        "layers.4.self_attn.v_proj.weight": (kv, hidden),
        "layers.4.self_attn.k_norm.weight": (head,),
        "markov_head.markov_w1.weight": (vocabulary, 256),
        "markov_head.markov_w2.weight": (vocabulary, 256),
        "confidence_head.proj.weight": (1, hidden + 256),
        "block": (5, block, mask),
    }


#: What the trainers' repositories say of the tensors.
PUBLISHED = {
    "dspark--specforge-glm-5.2.json": published(6144, 4096, 1024, 64, 5, 154880, 7, 154856),
    "dspark--specforge-inkling.json": published(6144, 4096, 1024, 64, 5, 201024, 7, 200064),
    "dspark--specforge-kimi-k3.json": published(7168, 4096, 1024, 64, 5, 163840, 7, 163824),
    "dspark--specforge-qwen3-8b.json": published(4096, 4096, 1024, 128, 5, 151936, 7, 151669),
    "dspark--specforge-qwen3.6-27b.json": published(5120, 4096, 1024, 128, 5, 248320, 16, 248070),
    "bad--dspark-specforge-not-promoted.json": published(5120, 4096, 1024, 128, 5, 248320, 16, 248070),
    "dspark--deepseek-dspark_qwen3_14b_block7-quantised.json": published(5120, 5120, 1024, 128, 5, 151936, 7, 151669),
    "dspark--xllm-fixture-qwen3-8b-block7.json": published(4096, 4096, 1024, 128, 5, 151936, 7, 151669),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_configuration_opens_with_its_packaging_and_every_extent_known(tmp_path: Path, name: str) -> None:
    draft = bare(tmp_path, config(name.removesuffix(".json")))
    assert draft.spec is not None
    assert draft.binding is not None
    assert (draft.spec.family, draft.spec.packaging) == ("dspark", EXPECTED[name]["packaging"])
    assert draft.recognition.disagreement == ()
    assert draft.config_faults == ()
    # A target's file, as quoted, leaves out what only the target needs.
    assert draft.spec.packaging == "embedded" or all(None not in shape for shape in shapes(draft).values())
    assert options(draft).confidence_head is (None if "openbmb" in name else True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_configuration_expects_the_published_tensors(tmp_path: Path, name: str) -> None:
    draft = bare(tmp_path, config(name.removesuffix(".json")))
    assert draft.spec is not None
    assert draft.spec.block is not None
    block = draft.spec.block
    found = {**shapes(draft), "block": (len(draft.spec.layers), block.block_size, block.mask_token_id)}
    assert {key: found.get(key) for key in PUBLISHED[name]} == PUBLISHED[name]


def test_liquid_s_rotation_is_interleaved(tmp_path: Path) -> None:
    spec = bare(tmp_path, config("dspark--LiquidAI-LFM2.5-2.6B-DSpark-shape")).spec
    assert spec is not None
    attention = spec.layers[0].attention
    assert isinstance(attention, GQASpec)
    assert not attention.rope.is_neox_style


# --- packagings ---------------------------------------------------------------------------------------------------------------------


def test_taps_and_heads_are_read_where_each_packaging_puts_them(tmp_path: Path) -> None:
    for name, given, convention in (
        ("deepspec", tiny_config("dspark"), "output"),
        ("specforge", tiny_config("dspark", **SPECFORGE), "output"),
        ("liquid", tiny_config("dspark", **LIQUID), "output"),
        ("speculators", speculators(), "boundary"),
    ):
        draft = bare(tmp_path / name, given)
        assert draft.spec is not None
        assert draft.spec.block is not None
        taps, block = draft.spec.taps, draft.spec.block
        assert (taps.count, taps.convention) == (3, convention), name
        assert (block.block_size, block.mask_token_id) == (BLOCK, 511), name
        found = options(draft)
        assert (found.markov_rank, found.markov_head_type, found.confidence_head) == (RANK, "vanilla", True), name
        assert shapes(draft)["markov_head.markov_w1.weight"] == (VOCAB, RANK), name


@pytest.mark.parametrize(
    ("given", "embed", "head"),
    [
        (tiny_config("dspark"), "required", "required"),
        (tiny_config("dspark", has_lm_head=False), "optional", "optional"),
        (tiny_config("dspark", **SPECFORGE), "optional", "optional"),
        (tiny_config("dspark", **LIQUID), "optional", "optional"),
        (tiny_config("dspark", **KIMI), "optional", "optional"),
        (speculators(), "optional", "optional"),
        (speculators(draft_vocab_size=128), "optional", "required"),
    ],
    ids=["deepspec", "no-head", "specforge", "liquid", "kimi-k3", "speculators", "speculators-reduced"],
)
def test_who_brings_embedding_and_head(tmp_path: Path, given: dict[str, Any], embed: str, head: str) -> None:
    draft = bare(tmp_path, given)
    assert (need(draft, "embed_tokens.weight"), need(draft, "lm_head.weight")) == (embed, head)


def test_a_reduced_vocabulary_shrinks_head_and_w2_only(tmp_path: Path) -> None:
    draft = bare(tmp_path, config("speculators-dspark--makora-gemma4-26b-a4b-shape"))
    found = shapes(draft)
    assert found["lm_head.weight"] == (8, 16)
    assert found["markov_head.markov_w2.weight"] == (8, 4)
    assert found["embed_tokens.weight"] == (32, 16)
    assert found["markov_head.markov_w1.weight"] == (32, 4)
    assert need(draft, "d2t") == "required"
    full = bare(tmp_path / "full", config("dspark--openbmb-MiniCPM5-2B-DSpark-shape"))
    assert need(full, "d2t") == "optional"


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, True),
        ({"sample_from_anchor": False}, False),
        ({"sample_from_anchor": ..., "speculators_config": {"proposal_methods": [{"speculative_tokens": 7}]}}, True),
        ({"sample_from_anchor": ..., "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]}}, False),
        ({"sample_from_anchor": ..., "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, None),
        ({"sample_from_anchor": ..., "speculators_config": {"proposal_methods": "x"}}, None),
        ({"sample_from_anchor": ...}, None),
    ],
)
def test_whether_row_0_drafts_is_read_or_worked_out_and_never_guessed(
    tmp_path: Path, changes: dict[str, Any], due: bool | None
) -> None:
    given = {key: value for key, value in speculators(**changes).items() if value is not ...}
    spec = bare(tmp_path, given).spec
    assert spec is not None
    assert spec.block is not None
    assert spec.block.sample_from_anchor is due


def test_modelopt_names_are_the_same_draft(tmp_path: Path) -> None:
    names = {
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        "markov_head.gate_proj.weight": "gate_proj.weight",
        "markov_head.gate_proj.bias": "gate_proj.bias",
        "confidence_head.proj.weight": "confidence_proj.weight",
        "confidence_head.proj.bias": "confidence_proj.bias",
    }
    whole = tiny_config("dspark", **SPECFORGE)
    whole["dflash_config"]["markov_head_type"] = "gated"
    tensors = random_tensors(whole, "dspark")
    assert set(names) <= set(tensors)
    write_checkpoint(tmp_path, whole, tensors, rename=lambda name: names.get(name, name))
    draft = load(Checkpoint.open(tmp_path))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    # Read right here; engines look for the heads under their prefixes.
    assert {result.id for result in check_draft(tmp_path) if result.status == "failed"} == {"dspark.heads"}


def test_kimi_k3_has_the_tensors_of_the_published_head(tmp_path: Path) -> None:
    # Inferact/Kimi-K3-DSpark: 68 tensors, 3.56 billion parameters, an embedding and no head.
    whole = tiny_config(
        "dspark",
        **KIMI,
    ) | {
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "draft_vocab_size": 163840,
        "target_layer_ids": [2, 23, 47, 71, 89],
        "num_target_layers": 5,
        "target_num_hidden_layers": 93,
        "markov_rank": 256,
    }
    spec, tensors = expected_tensors(whole, "dspark")
    held = [tensor for tensor in tensors if tensor.need == "required" or tensor.name == "embed_tokens.weight"]
    assert len(held) == 68
    count = sum(math.prod(extent or 0 for extent in tensor.shape) for tensor in held)
    assert round(count / 1e9, 2) == 3.56
    assert (spec.taps.count, spec.taps.num_target_layers) == (5, 93)
    attention = spec.layers[0].attention
    assert isinstance(attention, MLASpec)
    assert (attention.in_features, attention.rope.rope_type, attention.rope.is_neox_style) == (
        7168,
        "deepseek_yarn",
        False,
    )
    draft = bare(tmp_path, whole)
    assert draft.family is not None
    named = {
        name: draft.family.canonical(name)
        for name in ("context_proj.weight", "context_norm.weight", "final_norm.weight")
    }
    assert list(named.values()) == ["fc.weight", "hidden_norm.weight", "norm.weight"]


# --- a draft inside DeepSeek-V4 -----------------------------------------------------------------------------------------------------


def stage_name(name: str) -> str:
    """The name on disk of one of the draft's tensors in a target of three stages."""
    fixed = {
        "fc.weight": "mtp.0.main_proj.weight",
        "hidden_norm.weight": "mtp.0.main_norm.weight",
        "embed_tokens.weight": "mtp.0.embed.weight",
        "lm_head.weight": "mtp.2.head.weight",
    }
    if name.startswith("layers."):
        return f"mtp.{name.removeprefix('layers.')}"
    return fixed.get(name) or f"mtp.2.{name.replace('hc_head.', 'hc_head_')}"


def embedded(directory: Path, edit: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **changes: Any) -> Path:
    """A target in three shards: the draft's stages, and a few tensors of its own."""
    whole = tiny_config("dspark", **{**V4, **changes})
    tensors = {stage_name(name): value for name, value in random_tensors(whole, "dspark").items()}
    tensors |= {
        "layers.0.attn.wq_a.weight": torch.full((3, 3), torch.nan),
        "layers.3.ffn.gate.weight": torch.zeros(2, 2),
        "head.weight": torch.ones(2, 2),
        "norm.weight": torch.ones(2),
    }
    edit(tensors)
    return write_checkpoint(directory, whole, tensors, shards=3)


def test_only_the_draft_s_own_tensors_are_read_out_of_a_target(tmp_path: Path) -> None:
    draft = load(Checkpoint.open(embedded(tmp_path)))
    assert draft.spec is not None
    assert draft.binding is not None
    assert (draft.spec.family, draft.spec.packaging, len(draft.spec.layers)) == ("dspark", "embedded", 3)
    assert all(name.startswith("mtp.") for name in draft.binding.stored.values())
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    report = check_draft(tmp_path)
    assert report.ok
    assert not [result for result in report if result.status in ("failed", "warned")]
    assert {report[f"layers.{name}"].status for name in ("build", "finite", "incremental")} == {"passed"}


def test_the_published_stages_of_deepseek_v4_flash(tmp_path: Path) -> None:
    draft = bare(tmp_path, config("dspark--embedded-DeepSeek-V4-Flash"))
    assert draft.spec is not None
    assert draft.family is not None
    named = {
        draft.family.canonical(name): name
        for name in (
            "mtp.0.main_proj.weight",
            "mtp.0.main_norm.weight",
            "mtp.0.embed.weight",
            "mtp.2.norm.weight",
            "mtp.2.head.weight",
            "mtp.2.markov_head.markov_w1.weight",
            "mtp.2.markov_head.markov_w2.weight",
            "mtp.2.confidence_head.proj.weight",
            "mtp.2.hc_head_fn",
            "mtp.1.attn.wq_a.weight",
            "mtp.1.attn_norm.weight",
            "mtp.1.hc_attn_fn",
            "mtp.2.ffn.experts.255.w2.weight",
            "mtp.2.ffn.shared_experts.w1.scale",
        )
    }
    found = shapes(draft)
    assert set(named) <= set(found)
    assert found["fc.weight"] == (4096, 12288)
    assert found["confidence_head.proj.weight"] == (1, 4352)
    assert found["markov_head.markov_w2.weight"] == (129280, 256)
    assert found["layers.1.attn.wq_b.weight"] == (64 * 512, 1024)
    assert found["layers.2.ffn.experts.255.w2.weight"] == (4096, 2048)
    assert need(draft, "confidence_head.proj.bias") == "optional"
    assert (len(draft.spec.layers), draft.spec.taps.num_target_layers) == (3, 43)


def test_stages_are_counted_in_the_weights_first_then_by_ratios_then_by_taps(tmp_path: Path) -> None:
    def stages(name: str, **changes: Any) -> int:
        whole = {key: value for key, value in tiny_config("dspark", **{**V4, **changes}).items() if value is not ...}
        spec = bare(tmp_path / name, whole).spec
        assert spec is not None
        return len(spec.layers)

    assert stages("taps", dspark_target_layer_ids=[17, 18]) == 2
    assert stages("ratios", compress_ratios=[0] * 24) == 4
    held = load(Checkpoint.open(embedded(tmp_path / "weights", compress_ratios=...)))
    assert held.spec is not None
    path = embedded(tmp_path / "more")
    (path / "config.json").write_text(json.dumps({**tiny_config("dspark", **V4), "compress_ratios": [0] * 24}))
    more = load(Checkpoint.open(path)).spec
    assert more is not None
    assert (len(held.spec.layers), len(more.layers)) == (3, 3)


def test_a_last_stage_that_is_wholly_gone_is_missed(tmp_path: Path) -> None:
    """The stages that are left do not count the draft where they hold nothing that closes it."""

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.2.")]:
            del tensors[name]

    path = embedded(tmp_path, drop)
    spec = load(Checkpoint.open(path)).spec
    assert spec is not None
    assert len(spec.layers) == 3
    due = [
        name
        for finding in check_draft(path, checks=["weights.missing"])["weights.missing"].findings
        for name in (finding.where, *finding.due)
    ]
    assert due[0] == "mtp.2.attn_norm.weight"
    assert "mtp.2.markov_head.markov_w1.weight" in due
    report = check_draft(path, checks=["config.num-hidden-layers"])
    assert report["config.num-hidden-layers"].status == "failed"
    assert report["config.num-hidden-layers"].findings[0].where == "config.json: dspark_target_layer_ids"


def test_packed_experts_and_scales_are_no_fault(tmp_path: Path) -> None:
    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".ffn.experts." in name]:
            rows, columns = tensors[name].shape
            tensors[name] = torch.ones(rows, columns // 2, dtype=torch.int8)
            tensors[name.replace("weight", "scale")] = torch.ones(rows, columns // 32, dtype=torch.bfloat16)

    report = check_draft(
        embedded(tmp_path, pack), checks=["weights.shapes", "weights.missing", "weights.unexpected", "weights.dtypes"]
    )
    assert {result.status for result in report} == {"passed"}


@pytest.mark.parametrize(
    "name",
    [
        "mtp.0.main_proj.weight",
        "mtp.0.main_norm.weight",
        "mtp.2.norm.weight",
        "mtp.2.hc_head_fn",
        "mtp.2.markov_head.markov_w1.weight",
        "mtp.2.confidence_head.proj.weight",
        "mtp.1.attn.wkv.weight",
        "mtp.1.attn.attn_sink",
        "mtp.1.attn_norm.weight",
        "mtp.1.hc_ffn_base",
        "mtp.1.ffn.gate.bias",
        "mtp.1.ffn.shared_experts.w3.weight",
        "mtp.1.ffn.experts.1.w2.weight",
    ],
)
def test_a_stage_without_one_tensor_fails_and_names_it(tmp_path: Path, name: str) -> None:
    draft = load(Checkpoint.open(embedded(tmp_path, lambda tensors: tensors.pop(name))))
    assert draft.family is not None
    result = check_draft(tmp_path, checks=["weights.missing"])["weights.missing"]
    assert result.status == "failed"
    assert name in result.message


# --- what configurations say that is not so -----------------------------------------------------------------------------------------


def test_a_fork_s_keys_describe_it_and_a_copied_target_s_do_not(tmp_path: Path) -> None:
    fork = bare(tmp_path / "fork", config("dspark--stanleyphoong-Ornith-1.0-9B-DSpark-shape"))
    copied = bare(tmp_path / "copied", config("dspark--satgeze-Qwen3.6-27B-DSpark-shape"))
    for draft, gate, kind, turning, rows in ((fork, True, "gemma", 2, 32), (copied, False, "rms", 8, 16)):
        assert draft.spec is not None
        (layer,) = draft.spec.layers
        assert isinstance(layer.attention, GQASpec)
        assert (layer.attention.q_gate, layer.norm_kind, layer.attention.rope.rotary_dim) == (gate, kind, turning)
        assert shapes(draft)["layers.0.self_attn.q_proj.weight"][0] == rows
        assert options(draft).norm_kind == kind


def test_gemma_4_shares_k_and_v_on_full_layers_and_has_a_size_of_its_own_there(tmp_path: Path) -> None:
    draft = bare(tmp_path, config("dspark--deepseek-dspark_gemma4_12b_block7"))
    found = shapes(draft)
    assert draft.spec is not None
    assert draft.spec.block is not None
    assert found["layers.4.self_attn.q_proj.weight"] == (16 * 512, 3840)
    assert found["layers.4.self_attn.k_proj.weight"] == (512, 3840)
    assert "layers.4.self_attn.v_proj.weight" not in found
    assert {name.split(".")[2] for name in found if name.startswith("layers.4.")} == {
        "input_layernorm",
        "self_attn",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "layer_scalar",
        "mlp",
    }
    attention = draft.spec.layers[0].attention
    assert isinstance(attention, GQASpec)
    assert (attention.rope.rope_type, attention.rope.theta, attention.rope.rotary_dim) == ("proportional", 1e6, 512)
    assert attention.rope.scaling == {"partial_rotary_factor": 0.25}
    assert (draft.spec.block.final_logit_softcapping, draft.spec.layers[0].hidden_act) == (30.0, "gelu_pytorch_tanh")
    assert draft.spec.block.input_embedding_scale == math.sqrt(3840)
    mixed = bare(tmp_path / "mixed", tiny_config("dspark", **GEMMA))
    assert mixed.spec is not None
    full, sliding = (layer.attention for layer in mixed.spec.layers)
    assert isinstance(full, GQASpec)
    assert isinstance(sliding, GQASpec)
    assert (full.num_kv_heads, full.head_dim, full.k_eq_v) == (1, 64, True)
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.k_eq_v, sliding.rope.theta) == (2, 32, False, 10000.0)
    # The spelling of transformers 5.15.
    newer = tiny_config("dspark", **{**GEMMA, "global_head_dim": ..., "per_layer_config": {"0": {"head_dim": 64}}})
    renamed = bare(tmp_path / "newer", newer)
    assert shapes(renamed) == shapes(mixed)


def test_mlx_packed_matrices_are_expected_packed_and_not_run(tmp_path: Path) -> None:
    whole = tiny_config("dspark", architectures=..., quantization={"group_size": 32, "bits": 4})
    tensors = random_tensors(whole, "dspark")
    for name in [name for name in tensors if name.endswith("_proj.weight") or name == "fc.weight"]:
        rows, columns = tensors[name].shape
        stem = name.removesuffix(".weight")
        tensors[name] = torch.ones(rows, columns // 8, dtype=torch.int32)
        tensors |= {f"{stem}.{part}": torch.ones(rows, columns // 32).bfloat16() for part in ("scales", "biases")}
    write_checkpoint(tmp_path, whole, tensors)
    draft = load(Checkpoint.open(tmp_path))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    report = check_draft(tmp_path, checks=["weights.shapes", "weights.dtypes", "layers.build", "fused-kv"])
    assert not [result for result in report if result.status == "failed"]
    assert report["layers.build"].status == "inconclusive"
    assert "packed" in report["layers.build"].message
    assert "packed" in str(draft.fused_kv_reason)
    del tensors["layers.1.mlp.up_proj.scales"]
    write_checkpoint(tmp_path, whole, tensors)
    result = check_draft(tmp_path, checks=["weights.missing"])["weights.missing"]
    assert (result.status, result.findings[0].where) == ("failed", "layers.1.mlp.up_proj.scales")


# --- every shape passes, and every tensor is missed ---------------------------------------------------------------------------------


#: What is said of shapes that are right in themselves and that not every engine takes, or that the sizes here make odd.
NOT_FOR_ALL = {
    "specforge": {"dspark.keys"},
    "liquid": {"dspark.keys", "rope.style"},
    "native-fork": {"dspark.keys", "fused-kv.engine-path"},
    "copied-keys": {"rope.inherited"},
    "reduced": {"config.unread-keys"},
    "no-markov": {"dspark.heads"},
    "window": {"dflash.layer-types", "dflash.causality"},
    "gemma4": {"dflash.layer-types", "dflash.causality"},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_tiny_draft_of_every_shape_passes_every_check(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path, "dspark", **SHAPES[name])
    report = check_draft(tmp_path)
    assert report.ok
    assert {result.id for result in report if result.status in ("failed", "warned")} == NOT_FOR_ALL.get(name, set())


def test_a_tiny_speculators_draft_passes_every_check(tmp_path: Path) -> None:
    for size in (VOCAB, 128):
        structure = tiny_config("xpress")["speculators_config"] | {"algorithm": "dspark"}
        write_tiny(
            tmp_path / str(size), "dspark", config=speculators(draft_vocab_size=size, speculators_config=structure)
        )
        report = check_draft(tmp_path / str(size))
        # One engine drafts in the target's vocabulary whatever the file says.
        due = [] if size == VOCAB else ["config.unread-keys"]
        assert [result.id for result in report if result.status in ("failed", "warned")] == due
        assert report.ok


def _groups() -> list[tuple[str, str]]:
    """Every kind of tensor once: the last layer's for those that layers have."""
    found: dict[str, str] = {}
    for shape in ("deepspec", "gated", "rnn", "reduced", "gemma4", "kimi-k3"):
        _, tensors = expected_tensors(tiny_config("dspark", **SHAPES[shape]), "dspark")
        for tensor in tensors:
            if tensor.need == "required" and tensor.layer in (None, 1 if shape != "gemma4" else 0):
                found.setdefault(tensor.name, shape)
    return [(shape, name) for name, shape in found.items()]


@pytest.mark.parametrize(("shape", "name"), _groups())
def test_a_draft_without_one_tensor_fails_and_names_it(tmp_path: Path, shape: str, name: str) -> None:
    write_tiny(tmp_path, "dspark", edit=lambda tensors: tensors.pop(name), **SHAPES[shape])
    report = check_draft(tmp_path, checks=["weights.missing", "vocabulary"])
    failed = [result for result in report if result.status == "failed"]
    assert failed
    assert any(name in result.message for result in failed)


@pytest.mark.parametrize(
    "name", ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"]
)
def test_a_head_of_another_rank_is_a_wrong_shape(tmp_path: Path, name: str) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.cat([tensors[name], tensors[name][:, :1]], dim=1)

    result = check_draft(write_tiny(tmp_path, "dspark", edit=widen), checks=["weights.shapes"])["weights.shapes"]
    assert result.status == "failed"
    assert name in result.message


def test_a_value_of_another_kind_under_any_key_is_read_or_reported(tmp_path: Path) -> None:
    whole = {name: tiny_config("dspark", **changes) for name, changes in SHAPES.items()}
    whole |= {"speculators": speculators(), "embedded": tiny_config("dspark", **V4), "empty": tiny_config("dspark")}
    whole["empty"] |= dict.fromkeys(("per_layer_config", "quantization", "speculators_config", "compress_ratios"))
    places = {key: name for name, given in whole.items() for key in given}
    nested = [
        (key, inner, name)
        for key, name in places.items()
        if isinstance(whole[name][key], dict)
        for inner in whole[name][key]
    ]
    for bad in (None, [], {}, [[]], "8", True, -1, 1e308, 10**9):
        for key, name in places.items():
            judged(bare(tmp_path, {**whole[name], key: bad}))
        for key, inner, name in nested:
            judged(bare(tmp_path, {**whole[name], key: {**whole[name][key], inner: bad}}))


def judged(draft: Draft) -> None:
    context = context_of(draft)
    for item in checks.REGISTRY.values():
        if "tensors" not in item.needs:
            json.dumps(checks.run(item, context).to_dict(), allow_nan=False)
    if draft.spec is not None:
        json.dumps(draft.spec.to_dict(), allow_nan=False)


def test_mask_and_block_are_held_to_the_same_rules_as_dflash_s(tmp_path: Path) -> None:
    whole = tiny_config("dspark", mask_token_id=512, block_size=1)
    write_tiny(tmp_path, "dspark")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    report = check_draft(tmp_path, checks=["dflash"])
    assert "outside an embedding of 512" in report["dflash.mask-token"].message
    assert report["dflash.block-size"].status == "failed"


def test_a_latent_draft_must_state_its_ranks(tmp_path: Path) -> None:
    draft = bare(tmp_path, tiny_config("dspark", **{**KIMI, "q_lora_rank": None, "v_head_dim": ...}))
    assert draft.spec is not None
    report = check_draft(tmp_path, checks=["config"])
    assert report["config.q-lora-rank"].message == "a latent DSpark layer needs q_lora_rank: it is null"
    assert report["config.mla-fields"].status == "failed"


# --- stacked K/V --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepspec", "specforge", "window", "native-fork"])
def test_the_stack_fills_every_layer_as_the_layers_do(tmp_path: Path, name: str) -> None:
    draft = written(tmp_path, **SHAPES[name])
    stack, positions = draft.fused_kv(), torch.tensor([0, 3, 3, 100])
    hidden = numbers(5, 4, HIDDEN).float()
    k, v = stack.compute(hidden, positions)
    for index, layer in enumerate(draft.layers()):
        due_k, due_v = layer.self_attn.kv(hidden, positions)
        torch.testing.assert_close(k[index], due_k, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(v[index], due_v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"), [("gemma4", "V is the K projection"), ("kimi-k3", "latent"), ("liquid", "interleaved")]
)
def test_what_has_no_stack_is_refused_with_the_reason(tmp_path: Path, name: str, why: str) -> None:
    draft = written(tmp_path, **SHAPES[name])
    with pytest.raises(StackUnsupportedError, match=why):
        draft.fused_kv()
    result = check_draft(tmp_path, checks=["fused-kv.head-dim"])["fused-kv.head-dim"]
    assert result.status == "skipped"
    assert why in result.message


# --- heads --------------------------------------------------------------------------------------------------------------------------


def markov(kind: str, **tensors: list[Any]) -> MarkovHead:
    given = {name.replace("__", "."): torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
    return MarkovHead(kind, given, vocab_size=3, head_rows=2, rank=1, hidden=1)


W1, W2 = [[1.0], [2.0], [3.0]], [[1.0], [10.0]]


def test_markov_heads_by_hand() -> None:
    tokens, hidden = torch.tensor(2), torch.tensor([5.0], dtype=torch.float64)
    bias, state = markov("vanilla", markov_w1__weight=W1, markov_w2__weight=W2).step(tokens, hidden)
    assert (bias.tolist(), state) == ([3.0, 30.0], None)
    # gate = sigmoid(1 * 5 - 1 * 3 - 2) = 1/2, on the embedding 3
    head = markov(
        "gated", markov_w1__weight=W1, markov_w2__weight=W2, gate_proj__weight=[[1.0, -1.0]], gate_proj__bias=[-2.0]
    )
    bias, state = head.step(tokens, hidden)
    assert (bias.tolist(), state) == ([1.5, 15.0], None)
    # Rows of joint_proj: gate, candidate, output; columns: state, embedding, hidden. Gate sigmoid(ln 3) = 3/4, candidate tanh(embedding),
    # output tanh(state + embedding - 5); the state starts at 0 and keeps 3/4 of itself at every step.
    head = markov(
        "rnn",
        markov_w1__weight=W1,
        markov_w2__weight=W2,
        joint_proj__weight=[[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, -1.0]],
        joint_proj__bias=[math.log(3.0), 0.0, 0.0],
    )
    bias, state = head.step(tokens, hidden)
    assert bias[0].item() == pytest.approx(math.tanh(-2.0))
    assert state is not None
    assert state.item() == pytest.approx(math.tanh(3.0) / 4)
    bias, state = head.step(torch.tensor(1), hidden, state)
    assert bias[0].item() == pytest.approx(math.tanh(math.tanh(3.0) / 4 - 3.0))
    assert state is not None
    assert state.item() == pytest.approx(0.75 * math.tanh(3.0) / 4 + math.tanh(2.0) / 4)


@pytest.mark.parametrize(("changes", "add"), [({}, 0.0), (NATIVE, 1.0), ({**KIMI, "fc_norm": True}, 0.0)])
def test_a_context_is_the_normed_projection_of_the_taps(tmp_path: Path, changes: dict[str, Any], add: float) -> None:
    draft = written(tmp_path, **changes)
    model, _ = parts(draft)
    taps = numbers(8, 5, 3, HIDDEN)
    weights = {name: draft.tensor(f"{name}.weight").double().numpy() for name in ("fc", "hidden_norm", "norm")}
    read = taps.numpy()
    if "fc_norm" in changes:
        each = [draft.tensor(f"fc_norm.{tap}.weight").double().numpy() for tap in range(3)]
        read = np.stack([_rms(read[:, tap], each[tap]) for tap in range(3)], axis=1)
    due = _rms(read.reshape(5, -1) @ weights["fc"].T, weights["hidden_norm"] + add)
    np.testing.assert_allclose(model.context(taps).numpy(), due, rtol=1e-10, atol=1e-10)
    states = numbers(9, 2, HIDDEN)
    np.testing.assert_allclose(model.norm(states).numpy(), _rms(states.numpy(), weights["norm"] + add), atol=1e-10)


def test_an_unknown_head_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    draft = written(tmp_path, markov_head_type="lstm")
    with pytest.raises(LayerBuildError, match="markov_head_type") as caught:
        parts(draft)
    assert caught.value.key == "markov_head_type"


def test_a_draft_without_a_head_asks_for_the_target_s(tmp_path: Path) -> None:
    model, head = parts(written(tmp_path, **SPECFORGE))
    rows = model.forward(
        numbers(1, BLOCK, HIDDEN), torch.arange(4, 4 + BLOCK), numbers(2, 4, 3, HIDDEN), torch.arange(4)
    )
    with pytest.raises(DraftError, match="give the target's"):
        head.draft(rows, 7)
    assert head.draft(rows, 7, numbers(3, VOCAB, HIDDEN)).tokens.shape == (BLOCK,)


def test_a_softcap_bounds_the_logits_before_the_markov_bias(tmp_path: Path) -> None:
    _, head = parts(written(tmp_path, final_logit_softcapping=2.0))
    hidden = 100 * numbers(1, BLOCK, HIDDEN)
    base = head.base_logits(hidden)
    assert base.abs().max() <= 2.0
    assert head.lm_head is not None
    torch.testing.assert_close(base, 2 * torch.tanh(head.lm_head(hidden) / 2))
    logits, _ = head.block_logits(hidden, torch.arange(BLOCK))
    assert head.markov is not None
    torch.testing.assert_close(logits - base, head.markov.w2(head.markov.embed(torch.arange(BLOCK))))


def _rms(x: Array, weight: Array) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight
    return scaled


def _turned(x: Array, positions: Array) -> Array:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 1000000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _block(weights: Mapping[str, Array], block: Array, taps: Array) -> Array:
    """Two layers, four heads of 32 over two KV heads, one head at a time; the block stands behind the context and sees all of both."""
    context = _rms(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    where = np.arange(len(context) + len(block), dtype=np.float64)
    for index in range(2):
        layer = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"layers.{index}.")}
        normed = _rms(block, layer["input_layernorm.weight"])
        both = np.concatenate([context, normed])
        heads = []
        for head in range(4):
            lanes, shared = slice(32 * head, 32 * head + 32), slice(32 * (head // 2), 32 * (head // 2) + 32)
            q = _turned(
                _rms(normed @ layer["self_attn.q_proj.weight"][lanes].T, layer["self_attn.q_norm.weight"]),
                where[len(context) :],
            )
            k = _turned(
                _rms(both @ layer["self_attn.k_proj.weight"][shared].T, layer["self_attn.k_norm.weight"]), where
            )
            scores = np.exp(q @ k.T / math.sqrt(32))
            heads.append(
                scores / scores.sum(axis=-1, keepdims=True) @ (both @ layer["self_attn.v_proj.weight"][shared].T)
            )
        block = block + np.concatenate(heads, axis=-1) @ layer["self_attn.o_proj.weight"].T
        fed = _rms(block, layer["post_attention_layernorm.weight"])
        gate = fed @ layer["mlp.gate_proj.weight"].T
        block = (
            block
            + (gate / (1 + np.exp(-gate)) * (fed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
        )
    return _rms(block, weights["norm.weight"])


@pytest.mark.parametrize("anchored", [True, False])
def test_a_whole_block_in_numpy(tmp_path: Path, anchored: bool) -> None:
    """Rows, logits, tokens and confidences of a reduced draft, the loop written out; row 0 drafts or is the anchor."""
    draft = written(tmp_path, draft_vocab_size=128, sample_from_anchor=anchored)
    assert draft.binding is not None
    weights = {name: draft.tensor(name).double().numpy() for name in draft.binding.stored}
    anchor, taps = 77, numbers(4, 5, 3, HIDDEN)
    model, head = parts(draft)
    assert head.embed_tokens is not None
    block = head.embed_tokens[torch.tensor([anchor] + [511] * (BLOCK - 1))]
    rows = model.forward(block, torch.arange(5, 5 + BLOCK), taps, torch.arange(5))
    due = _block(weights, weights["embed_tokens.weight"][[anchor] + [511] * (BLOCK - 1)], taps.flatten(1).numpy())
    np.testing.assert_allclose(rows.numpy(), due, rtol=1e-10, atol=1e-10)
    found = head.draft(rows, anchor)
    previous, tokens, confidences = anchor, [], []
    for row in range(0 if anchored else 1, BLOCK):
        embedded_token = weights["markov_head.markov_w1.weight"][previous]
        logits = weights["lm_head.weight"] @ due[row] + weights["markov_head.markov_w2.weight"] @ embedded_token
        np.testing.assert_allclose(found.logits[len(tokens)].numpy(), logits, rtol=1e-9, atol=1e-9)
        features = np.concatenate([due[row], embedded_token])
        confidences.append(
            weights["confidence_head.proj.weight"][0] @ features + weights["confidence_head.proj.bias"][0]
        )
        best = int(logits.argmax())
        previous = best + int(weights["d2t"][best])
        tokens.append(previous)
    assert found.tokens.tolist() == tokens
    assert max(tokens) > 128
    assert found.confidence is not None
    np.testing.assert_allclose(found.confidence.numpy(), confidences, rtol=1e-9, atol=1e-9)


def test_a_recurrent_head_passes_over_the_anchor_row_and_carries_its_state(tmp_path: Path) -> None:
    draft = written(tmp_path, markov_head_type="rnn", sample_from_anchor=False)
    _, head = parts(draft)
    assert head.markov is not None
    rows, anchor = numbers(6, BLOCK, HIDDEN), torch.tensor(9)
    found = head.draft(rows, 9)
    assert found.tokens.shape == (BLOCK - 1,)
    _, state = head.markov.step(anchor, rows[0])
    bias, state = head.markov.step(anchor, rows[1], state)
    torch.testing.assert_close(found.logits[0], head.base_logits(rows[1]) + bias)
    bias, _ = head.markov.step(found.tokens[0], rows[2], state)
    torch.testing.assert_close(found.logits[1], head.base_logits(rows[2]) + bias)
    assert not torch.allclose(bias, head.markov.step(found.tokens[0], rows[2])[0])
