"""Multi-token prediction layers, inside their target and apart.

What these catch: a naming scheme read as another, or the target's own layers taken for the draft's; a target of which only the last shard
is here turned away; prediction layers lost on export that nobody misses; a layer beyond the count; a count of zero, or one copied into
another draft's configuration, taken for a draft; hidden state and embedding swapped (MiMo); ERNIE's layer closed by a norm of its own; the
embedding of position 0 read; scales of fp8 blocks left out. The forwards of DeepSeek's, GLM's, Qwen's and speculators' layers are held
against those libraries in `tests/peers/test_peer_mtp.py`; MiMo's and ERNIE's run in no library here, so they are worked out below in
NumPy, in float64, one head at a time. The forward of DeepSeek-V4's stages has tests of its own, in `test_family_deepseek_v4.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import Draft, load
from pytest_specdecode.families.mtp import MTP

Array = NDArray[np.float64]
Weights = Mapping[str, Array]

DEEPSEEK = testing.tiny_config("mtp")
DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
MIMO = {**DENSE, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
ERNIE = {**DENSE, "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_num_experts": 8}
QWEN = {
    **{key: value for key, value in DENSE.items() if key != "num_nextn_predict_layers"},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
}


def named(config: Mapping[str, Any], style: str) -> dict[str, str]:
    """Canonical name to the released one, for every required tensor of `config`."""
    depth = config["num_hidden_layers"]
    mimo = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    }
    ernie = {"enorm": "mtp_emb_norm", "hnorm": "mtp_hidden_norm", "eh_proj": "mtp_linear_proj"}
    qwen = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
    found = {}
    for tensor in testing.expected_tensors(config, "mtp")[1]:
        if tensor.need != "required":
            continue
        rest = tensor.name.removeprefix("layers.0.")
        part, _, end = rest.rpartition(".")
        found[tensor.name] = {
            "deepseek": f"model.layers.{depth}.{rest}",
            "mimo": f"model.mtp_layers.0.{mimo.get(part, part)}.{end}",
            "ernie": f"model.{ernie[part]}.0.{end}" if part in ernie else f"model.mtp_block.0.{rest}",
            "qwen": f"mtp.{qwen[part]}.{end}" if part in qwen else f"mtp.layers.0.{rest}",
        }[style]
    return found


V4: dict[str, Any] = {
    **{
        key: value for key, value in DEEPSEEK.items() if not key.startswith(("kv_lora", "qk_nope", "v_head", "first_k"))
    },
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "hc_mult": 4,
}

SCHEMES = [(DEEPSEEK, "deepseek"), (MIMO, "mimo"), (ERNIE, "ernie"), (QWEN, "qwen")]
TARGETS = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight")


def written(
    directory: Path, config: Mapping[str, Any], style: str, *, shards: int = 1, dtype: str = "bfloat16"
) -> Path:
    """The layers of `config` under their released names, among some tensors of a target."""
    names = named(config, style)
    tensors = testing.random_tensors(config, "mtp", seed=3, dtype=dtype)
    target = {name: torch.ones(4, 4) for name in TARGETS}
    stored = {names[name]: value for name, value in tensors.items()}
    return testing.write_checkpoint(directory, config, {**target, **stored}, shards=shards)


@pytest.mark.parametrize(("config", "style"), SCHEMES)
def test_a_draft_inside_its_target_passes_every_check(tmp_path: Path, config: dict[str, Any], style: str) -> None:
    path = written(tmp_path, config, style, shards=3)
    draft = open_draft(path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging) == ("mtp", "embedded")
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    assert set(draft.checkpoint.tensors) == set(named(config, style).values())
    report = check_draft(path)
    open_ones = [result for result in report if result.status not in ("passed", "skipped") and not result.want]
    assert not open_ones, [f"{result.id}: {result.message}" for result in open_ones]


@pytest.mark.parametrize("keep_target", [True, False])
def test_only_the_shards_that_hold_the_draft_need_be_there(tmp_path: Path, keep_target: bool) -> None:
    names = named(DEEPSEEK, "deepseek")
    tensors = testing.random_tensors(DEEPSEEK, "mtp")
    first, last = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    own = {names[name]: value for name, value in tensors.items()}
    held = {**own, TARGETS[0]: torch.ones(4, 4)} if keep_target else own
    testing.write_checkpoint(tmp_path, DEEPSEEK, held)
    (tmp_path / "model.safetensors").rename(tmp_path / last)
    weight_map = {**dict.fromkeys(held, last), **dict.fromkeys(TARGETS[1:], first)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert check_draft(tmp_path).ok
    assert open_draft(tmp_path).binding is not None
    # The draft's own shard is another matter.
    (tmp_path / last).rename(tmp_path / first)
    report = check_draft(tmp_path)
    assert report["files.index"].status == "failed"
    assert last in report["files.index"].message


def test_layers_lost_on_export_are_missed(tmp_path: Path) -> None:
    """Seen with quantising exporters: the count stands, the layer is gone, and every draft is rejected."""
    testing.write_checkpoint(tmp_path, DEEPSEEK, {name: torch.ones(4, 4) for name in TARGETS})
    report = check_draft(tmp_path)
    result = report["weights.missing"]
    assert result.status == "failed"
    assert "'model.layers.3.eh_proj.weight'" in str(result.findings[0].due)
    assert result.findings[0].where == "model.layers.3.enorm.weight"


def test_a_layer_beyond_the_count_is_reported(tmp_path: Path) -> None:
    names = named(DEEPSEEK, "deepseek")
    tensors = {names[name]: value for name, value in testing.random_tensors(DEEPSEEK, "mtp").items()}
    tensors |= {name.replace("layers.3.", "layers.5."): value.clone() for name, value in tensors.items()}
    report = check_draft(testing.write_checkpoint(tmp_path, DEEPSEEK, tensors))
    counted = report["config.num-hidden-layers"]
    assert counted.status == "failed"
    assert counted.findings[0].where == "config.json: num_nextn_predict_layers"
    assert report["weights.unexpected"].status == "failed"
    assert "model.layers.5." in report["weights.unexpected"].findings[0].where


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"num_nextn_predict_layers": 1}, "mtp"),
        ({"mtp_num_hidden_layers": 1}, "mtp"),
        ({"text_config": {"hidden_size": 64, "mtp_num_hidden_layers": 1}}, "mtp"),
        ({"architectures": ["Qwen3NextMTP"]}, "mtp"),
        ({"speculators_model_type": "mtp", "transformer_layer_config": {}}, "mtp"),
        ({"num_nextn_predict_layers": 0}, None),
        ({"num_nextn_predict_layers": 1, "dspark_block_size": 5}, None),
        ({"num_nextn_predict_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, "eagle3"),
        ({"num_nextn_predict_layers": 1, "dflash_config": {"mask_token_id": 1}}, "dflash"),
    ],
)
def test_a_count_alone_is_a_weak_sign(tmp_path: Path, config: dict[str, Any], family: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load(Checkpoint.open(tmp_path)).recognition
    assert found.disagreement == ()
    assert found.family == family or (family is None and found.family != "mtp")


@pytest.mark.parametrize("name", [*TARGETS, "model.layers.2.mlp.gate_proj.weight", "layers", "mtp", "model.layers.x.y"])
def test_the_target_s_tensors_are_not_the_draft_s(tmp_path: Path, name: str) -> None:
    testing.write_checkpoint(tmp_path, DEEPSEEK, {name: torch.ones(2, 2)})
    assert open_draft(tmp_path).checkpoint.tensors == {}
    assert MTP().canonical(name) == name


def block_of(tensors: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """A layer of the target that is like the prediction layer's block, all zero, so that taking it for the draft's shows."""
    stems = ("enorm", "hnorm", "eh_proj", "e_proj", "h_proj", "shared_head", "hc_head", "norm.")
    block = {name.removeprefix("layers.0."): value for name, value in tensors.items()}
    return {
        f"layers.{index}.{rest}": torch.zeros_like(value) for rest, value in block.items() if not rest.startswith(stems)
    }


def bare_target(directory: Path, config: Mapping[str, Any], place: str, *, drop: str = "") -> Path:
    """A whole target whose own layers are stored as bare `layers.{i}.*`, with its prediction layer at `place`."""
    tensors = testing.random_tensors(config, "mtp")
    own = {name.replace("layers.0.", place, 1): value for name, value in tensors.items()}
    own.pop(drop, None)
    target = {"embed.weight": torch.zeros(4, 4), "head.weight": torch.zeros(4, 4), "norm.weight": torch.zeros(4)}
    for index in range(config["num_hidden_layers"]):
        target |= block_of(tensors, index)
    return testing.write_checkpoint(directory, config, {**target, **own}, shards=2)


BARE = [(V4, "mtp.0.", "attn.wq_a.weight"), (DEEPSEEK, "layers.3.", "self_attn.q_a_proj.weight")]


@pytest.mark.parametrize(("config", "place", "lost"), BARE, ids=["v4", "v3"])
def test_a_target_of_bare_layers_is_not_taken_for_the_draft(
    tmp_path: Path, config: dict[str, Any], place: str, lost: str
) -> None:
    """DeepSeek's own files name the target's layers as the draft's are called here."""
    path = bare_target(tmp_path / "whole", config, place)
    binding = open_draft(path).binding
    assert binding is not None
    assert (binding.missing, binding.unexpected, binding.twice) == ((), (), ())
    assert all(name.startswith(place) for name in binding.stored.values())
    assert check_draft(path).ok
    report = check_draft(bare_target(tmp_path / "lost", config, place, drop=f"{place}{lost}"))
    assert report["weights.missing"].status == "failed"
    assert report["weights.missing"].findings[0].where == f"{place}{lost}"
    assert report["weights.unexpected"].status == report["config.num-hidden-layers"].status == "passed"


@pytest.mark.parametrize(
    ("config", "place"), [(V4, "layers.0."), (DEEPSEEK, "model.layers.0."), (DEEPSEEK, "layers.0.")]
)
def test_a_prediction_layer_in_a_target_layer_s_place_is_missed(
    tmp_path: Path, config: dict[str, Any], place: str
) -> None:
    """No engine looks there: the layer counts on from the target's last."""
    tensors = testing.random_tensors(config, "mtp")
    path = testing.write_checkpoint(
        tmp_path, config, {name.replace("layers.0.", place, 1): value for name, value in tensors.items()}
    )
    report = check_draft(path)
    assert report["weights.missing"].status == "failed"
    assert open_draft(path).checkpoint.tensors == {}


def test_the_tiny_draft_counts_on_from_its_target(tmp_path: Path) -> None:
    names = set(open_draft(testing.write_tiny(tmp_path, "mtp")).checkpoint.tensors)
    assert "model.layers.3.eh_proj.weight" in names
    assert all(name.startswith("model.layers.3.") for name in names)


@pytest.mark.parametrize(("config", "style"), SCHEMES)
def test_canonical_names_are_written_by_the_released_ones(config: dict[str, Any], style: str) -> None:
    rename = testing.stored_names(config, "mtp")
    assert {name: rename(name) for name in named(config, style)} == named(config, style)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model."])
def test_a_missing_tensor_is_named_as_its_neighbours_are(tmp_path: Path, prefix: str) -> None:
    tensors = {f"{prefix}layers.3.enorm.weight": torch.ones(64)}
    finding = check_draft(testing.write_checkpoint(tmp_path, DEEPSEEK, tensors))["weights.missing"].findings[0]
    assert finding.where == f"{prefix}layers.3.hnorm.weight"


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_multimodal_targets_nest_their_names(tmp_path: Path, prefix: str) -> None:
    testing.write_checkpoint(tmp_path, DEEPSEEK, {f"{prefix}layers.3.enorm.weight": torch.ones(64)})
    binding = open_draft(tmp_path).binding
    assert binding is not None
    assert set(binding.stored) == {"layers.0.enorm.weight"}


# --- shapes ----------------------------------------------------------------------------------------------------------


def shapes(config: Mapping[str, Any]) -> dict[str, list[int | None]]:
    return {
        tensor.name: list(tensor.shape)
        for tensor in testing.expected_tensors(config, "mtp")[1]
        if tensor.need != "optional"
    }


def test_qwen3_6_27b_has_the_fifteen_published_tensors() -> None:
    config = {
        **QWEN,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
    published = {
        "eh_proj.weight": [5120, 10240],
        "enorm.weight": [5120],
        "hnorm.weight": [5120],
        "shared_head.norm.weight": [5120],
        "input_layernorm.weight": [5120],
        "post_attention_layernorm.weight": [5120],
        "self_attn.q_proj.weight": [12288, 5120],
        "self_attn.k_proj.weight": [1024, 5120],
        "self_attn.v_proj.weight": [1024, 5120],
        "self_attn.o_proj.weight": [5120, 6144],
        "self_attn.q_norm.weight": [256],
        "self_attn.k_norm.weight": [256],
        "mlp.gate_proj.weight": [17408, 5120],
        "mlp.up_proj.weight": [17408, 5120],
        "mlp.down_proj.weight": [5120, 17408],
    }
    required = {
        tensor.name.removeprefix("layers.0."): list(tensor.shape)
        for tensor in testing.expected_tensors(config, "mtp")[1]
        if tensor.need == "required"
    }
    assert required == published


def test_deepseek_v4_flash_has_the_published_shard() -> None:
    """1575 tensors in the file of `mtp.0`: eight-bit projections with their scales, 256 experts of four bits."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hc_mult": 4,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
        "rope_theta": 10000,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    found = {
        tensor.name.removeprefix("layers.0."): list(tensor.shape)
        for tensor in testing.expected_tensors(config, "mtp")[1]
        if "emb." not in tensor.name and not tensor.name.endswith("0.head.weight")
    }
    assert len(found) == 1575
    due = {
        "attn.wq_a.weight": [1024, 4096],
        "attn.wq_b.weight": [32768, 1024],
        "attn.wkv.weight": [512, 4096],
        "attn.wo_a.weight": [8192, 4096],
        "attn.wo_b.weight": [4096, 8192],
        "attn.wo_b.scale": [32, 64],
        "attn.wq_b.scale": [256, 8],
        "attn.attn_sink": [64],
        "attn.q_norm.weight": [1024],
        "attn.kv_norm.weight": [512],
        "e_proj.weight": [4096, 4096],
        "ffn.shared_experts.w2.weight": [4096, 2048],
        "ffn.shared_experts.w2.scale": [32, 16],
        "ffn.gate.weight": [256, 4096],
        "ffn.gate.bias": [256],
        "hc_attn_fn": [24, 16384],
        "hc_attn_base": [24],
        "hc_attn_scale": [3],
        "hc_head_fn": [4, 16384],
        "hc_head_scale": [1],
        "ffn.experts.128.w1.weight": [2048, 2048],
        "ffn.experts.128.w1.scale": [2048, 128],
        "ffn.experts.255.w2.weight": [4096, 1024],
        "ffn.experts.255.w2.scale": [4096, 64],
    }
    assert {name: found.get(name) for name in due} == due


def test_a_deepseek_v4_stage_passes_every_check(tmp_path: Path) -> None:
    report = check_draft(testing.write_tiny(tmp_path, "mtp", config=V4))
    assert report.ok
    assert report["weights.missing"].status == report["weights.shapes"].status == "passed"
    assert {report[f"layers.{name}"].status for name in ("build", "finite", "incremental")} == {"passed"}


# --- forward ---------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 32, 6


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def rms(x: Array, weight: Array, eps: float = 1e-5) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return scaled


def turned(x: Array, positions: Array, *, neox: bool) -> Array:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second = (slice(None, half), slice(half, None)) if neox else (slice(0, None, 2), slice(1, None, 2))
    out = np.empty_like(x)
    out[:, first] = x[:, first] * np.cos(angles) - x[:, second] * np.sin(angles)
    out[:, second] = x[:, second] * np.cos(angles) + x[:, first] * np.sin(angles)
    return out


def block(w: Weights, x: Array, positions: Array, *, neox: bool) -> Array:
    """One dense decoder layer, biases read where they are stored."""
    nothing = np.zeros(1)
    n = rms(x, w["layers.0.input_layernorm.weight"])
    heads = []
    for head in range(HEADS):
        parts = []
        for name, place in (("q", head), ("k", head // 2), ("v", head // 2)):
            rows = slice(place * HEAD_DIM, (place + 1) * HEAD_DIM)
            bias = w.get(f"layers.0.self_attn.{name}_proj.bias", nothing)
            value = n @ w[f"layers.0.self_attn.{name}_proj.weight"][rows].T + (bias[rows] if len(bias) > 1 else 0.0)
            parts.append(value if name == "v" else turned(value, positions, neox=neox))
        scores = parts[0] @ parts[1].T / math.sqrt(HEAD_DIM)
        scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        heads.append(weights / weights.sum(axis=-1, keepdims=True) @ parts[2])
    y = x + np.concatenate(heads, axis=-1) @ w["layers.0.self_attn.o_proj.weight"].T
    n = rms(y, w["layers.0.post_attention_layernorm.weight"])
    gate = n @ w["layers.0.mlp.gate_proj.weight"].T
    gated = gate / (1 + np.exp(-gate)) * (n @ w["layers.0.mlp.up_proj.weight"].T)
    out: Array = y + gated @ w["layers.0.mlp.down_proj.weight"].T
    return out


def opened(path: Path) -> tuple[Draft, Weights]:
    draft = open_draft(path)
    assert draft.binding is not None
    return draft, {name: draft.tensor(name).to(torch.float64).numpy() for name in draft.binding.stored}


def ours(draft: Draft, embeds: Array, hidden: Array, positions: Array) -> Array:
    layer: Any = draft.layer(0, dtype=torch.float64)
    places = torch.from_numpy(positions.astype(np.int64))
    found: Array = layer.forward(torch.from_numpy(embeds), torch.from_numpy(hidden), places).numpy()
    return found


def test_mimo_joins_the_hidden_state_first_and_has_biases(tmp_path: Path) -> None:
    draft, w = opened(written(tmp_path, MIMO, "mimo", dtype="float32"))
    embeds, hidden, positions = numbers(1, TOKENS, 64), 3 * numbers(2, TOKENS, 64), 5.0 + np.arange(TOKENS)
    pair = [rms(hidden, w["layers.0.hnorm.weight"]), rms(embeds, w["layers.0.enorm.weight"])]
    z = block(w, np.concatenate(pair, axis=-1) @ w["layers.0.eh_proj.weight"].T, positions, neox=True)
    assert "layers.0.self_attn.q_proj.bias" in w
    due = rms(z, w["layers.0.shared_head.norm.weight"])
    np.testing.assert_allclose(ours(draft, embeds, hidden, positions), due, rtol=0, atol=1e-12)


def test_ernie_turns_pairs_and_leaves_the_last_norm_to_the_target(tmp_path: Path) -> None:
    draft, w = opened(written(tmp_path, ERNIE, "ernie", dtype="float32"))
    embeds, hidden, positions = numbers(1, TOKENS, 64), 3 * numbers(2, TOKENS, 64), 5.0 + np.arange(TOKENS)
    pair = [rms(embeds, w["layers.0.enorm.weight"]), rms(hidden, w["layers.0.hnorm.weight"])]
    due = block(w, np.concatenate(pair, axis=-1) @ w["layers.0.eh_proj.weight"].T, positions, neox=False)
    assert not any("shared_head" in name for name in w)
    np.testing.assert_allclose(ours(draft, embeds, hidden, positions), due, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("config", "style", "reads"), [(MIMO, "mimo", False), (QWEN, "qwen", True)])
def test_who_reads_the_embedding_of_position_zero(
    tmp_path: Path, config: dict[str, Any], style: str, reads: bool
) -> None:
    draft, _ = opened(written(tmp_path, config, style, dtype="float32"))
    hidden, positions = numbers(2, 2, 64), np.arange(2.0)
    one, other = (ours(draft, numbers(seed, 2, 64), hidden, positions)[0] for seed in (1, 5))
    assert np.array_equal(one, other) != reads


def test_fp8_blocks_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    """Two blocks of rows by two of columns, each with a scale of its own; the last ones are cut by the matrix's edge."""
    config = {**MIMO, "quantization_config": {"quant_method": "fp8", "weight_block_size": [48, 40]}}
    names = named(config, "mimo")
    tensors = testing.random_tensors(config, "mtp", seed=3, dtype="float32")
    plain = {names[name]: value for name, value in tensors.items()}
    name = names["layers.0.self_attn.q_proj.weight"]
    packed = plain[name].to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 0.5], [4.0, 0.25]])
    whole = packed.float()
    for row in range(3):
        for column in range(2):
            whole[48 * row : 48 * row + 48, 40 * column : 40 * column + 40] *= scales[row, column]
    due, _ = opened(testing.write_checkpoint(tmp_path / "plain", MIMO, {**plain, name: whole}))
    stored = {**plain, name: packed, f"{name}_scale_inv": scales}
    draft, _ = opened(testing.write_checkpoint(tmp_path / "fp8", config, stored))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    embeds, hidden, positions = numbers(1, TOKENS, 64), numbers(2, TOKENS, 64), np.arange(TOKENS) + 1.0
    expected = ours(due, embeds, hidden, positions)
    np.testing.assert_array_equal(ours(draft, embeds, hidden, positions), expected)
    report = check_draft(tmp_path / "fp8")
    assert report["weights.shapes"].status == report["weights.dtypes"].status == "passed"


def test_two_layers_of_one_stem(tmp_path: Path) -> None:
    """Qwen's later layers read the stem and the last norm that are stored once."""
    config = {**QWEN, "mtp_num_hidden_layers": 2}
    path = testing.write_tiny(tmp_path, "mtp", config=config)
    draft = open_draft(path)
    assert draft.binding is not None
    assert not any(name.startswith(("layers.1.enorm", "layers.1.eh_proj")) for name in draft.binding.expected)
    assert check_draft(path).ok
    first, second = draft.layers()
    assert torch.equal(first.eh_proj.weight, second.eh_proj.weight)  # type: ignore[attr-defined]
    assert not torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)  # type: ignore[attr-defined]


def test_an_expert_that_does_not_fit_is_named(tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.mlp.experts.2.down_proj.weight"] = torch.ones(64, 16)

    report = check_draft(testing.write_tiny(tmp_path, "mtp", edit=cut))
    assert report["weights.shapes"].findings[0].where == "model.layers.3.mlp.experts.2.down_proj.weight"
    assert "model.layers.3.mlp.experts.2.down_proj.weight" in report["layers.build"].findings[0].where


@pytest.mark.parametrize(
    "changes", [{"n_group": 3}, {"topk_group": 5}, {"num_experts_per_tok": 9}, {"num_experts_per_tok": ...}]
)
def test_a_routing_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = testing.write_tiny(tmp_path, "mtp")
    (tmp_path / "config.json").write_text(json.dumps(testing.tiny_config("mtp", **changes)))
    result = check_draft(path)["layers.build"]
    assert result.status == "failed"
    assert result.findings[0].where in ("n_group", "num_experts_per_tok")


def test_a_layer_larger_than_the_memory_is_left_open(tmp_path: Path) -> None:
    """DeepSeek-R1's layer of 256 experts, as a true header over a hole: its headers are judged, its forward is not tried."""
    config = {**DEEPSEEK, "hidden_size": 7168, "moe_intermediate_size": 1 << 17, "n_routed_experts": 256, "n_group": 8}
    testing.write_sparse(tmp_path, config, "mtp")
    report = check_draft(tmp_path, checks=["weights.missing", "weights.shapes", "layers"])
    assert report["weights.missing"].status == report["weights.shapes"].status == "passed"
    for result in report:
        if result.id.startswith("layers."):
            assert result.status == "inconclusive"
            assert "GiB are free" in result.message


# --- latent attention with a whole query -----------------------------------------------------------------------------


WHOLE = {"q_lora_rank": None}


def test_a_query_without_a_rank_is_one_projection(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "mtp", **WHOLE)
    draft = open_draft(path)
    header = draft.header("layers.0.self_attn.q_proj.weight")
    assert header is not None
    assert header.shape == (4 * (16 + 8), 64)
    assert draft.header("layers.0.self_attn.q_a_proj.weight") is None
    report = check_draft(path, checks=["files", "config", "weights", "rope", "layers"])
    open_ones = [result for result in report if result.status not in ("passed", "skipped") and not result.want]
    assert not open_ones, [f"{result.id}: {result.status}: {result.message}" for result in open_ones]
    assert report["layers.mla-absorbed"].status == "passed"


@pytest.mark.parametrize("name", ["q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"])
def test_a_tensor_around_a_whole_query_that_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"layers.0.self_attn.{name}.weight"] = tensors[f"layers.0.self_attn.{name}.weight"][1:].clone()

    report = check_draft(
        testing.write_tiny(tmp_path, "mtp", edit=cut, **WHOLE), checks=["weights.shapes", "layers.build"]
    )
    assert report["weights.shapes"].findings[0].where == f"model.layers.3.self_attn.{name}.weight"
    assert f"{name}.weight" in report["layers.build"].findings[0].where


def test_a_rank_s_projections_where_none_is_stated(tmp_path: Path) -> None:
    """A null rank means one projection; what a file holds of two is not read."""
    tensors = testing.random_tensors(testing.tiny_config("mtp"), "mtp")
    config = testing.tiny_config("mtp", **WHOLE)
    path = testing.write_checkpoint(tmp_path, config, tensors, rename=testing.stored_names(config, "mtp"))
    report = check_draft(path, checks=["weights"])
    assert "q_proj.weight" in report["weights.missing"].message
    assert "q_a" in str(report["weights.unexpected"].findings[0].got)
