"""DeepSeek-V4's stages in both drafts that are built of them: what the file decides of their forward, and what is said where it fails.

What these catch: a stage that rotates with the scaling of the target's compressing layers; a rotation, a router or a bound that is read
from another key, or not by its default; the embedding of position 0 read; a window that counts from each row of a block, or cuts the block;
rows of a block that look back only; a context that a stage keeps; a missing tensor named by another name than the file's; quantised
matrices taken for plain ones; a number of divisions that would never end.

The arithmetic is held against NumPy in `tests/layers/test_layer_shared_row.py` and `test_layer_hyper.py`, and whole stages against
transformers in `tests/peers/test_peer_deepseek_v4.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.errors import NoReferenceError
from pytest_specdecode.families import Draft
from pytest_specdecode.fused_kv.reference import eager_latent
from pytest_specdecode.layers import LatentCache
from pytest_specdecode.spec import GQASpec
from pytest_specdecode.testing import expected_tensors, random_tensors, stored_names, write_checkpoint, write_tiny

STREAMS, HIDDEN, WINDOW = 3, 64, 4
STAGE: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 9,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "hc_mult": STREAMS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "sliding_window": WINDOW,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 4096},
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
DSPARK: dict[str, Any] = {
    "dspark_block_size": 4,
    "dspark_noise_token_id": 127,
    "dspark_target_layer_ids": [6, 8],
    "dspark_markov_rank": 8,
}
CONFIGS = {"mtp": STAGE, "dspark": {**STAGE, **DSPARK}}
FAMILIES = sorted(CONFIGS)


def written(
    directory: Path, family: str, *, edit: Callable[[dict[str, Tensor]], None] | None = None, **changes: Any
) -> Path:
    whole = {key: value for key, value in {**CONFIGS[family], **changes}.items() if value is not ...}
    return write_tiny(directory, family, config=whole, edit=edit)


def attention_of(family: str, **changes: Any) -> GQASpec:
    config = {key: value for key, value in {**CONFIGS[family], **changes}.items() if value is not ...}
    found = expected_tensors(config, family)[0].layers[0].attention
    assert isinstance(found, GQASpec)
    return found


def layer_of(directory: Path, family: str, **changes: Any) -> Any:
    return open_draft(written(directory, family, **changes)).layer(0, dtype=torch.float64)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tiny_draft_passes_every_check(tmp_path: Path, family: str, dtype: str) -> None:
    path = write_tiny(tmp_path, family, config=CONFIGS[family], dtype=dtype)
    draft = open_draft(path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging) == (family, "embedded")
    report = check_draft(path)
    # A file of 32-bit weights is twice as large as what is served.
    due = ["config.dtype"] if dtype == "float32" else []
    assert [result.id for result in report if result.status in ("failed", "warned")] == due
    assert {report[f"layers.{name}"].status for name in ("build", "finite", "incremental")} == {"passed"}


# --- what the file decides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_rotates_by_its_base_alone(family: str) -> None:
    rope = attention_of(family).rope
    assert (rope.theta, rope.rope_type, dict(rope.scaling)) == (10000.0, "default", {})
    assert (rope.rotary_dim, rope.is_neox_style) == (8, False)
    # transformers 5 states one rotation for sliding layers and one for those that compress.
    main = {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5}
    compress = {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0, "partial_rotary_factor": 0.5}
    changes: dict[str, Any] = {"rope_parameters": {"main": main, "compress": compress}, "rope_scaling": ...}
    rope = attention_of(family, **changes, rope_theta=..., qk_rope_head_dim=...).rope
    assert (rope.theta, rope.rope_type, rope.rotary_dim) == (77.0, "default", 16)
    assert attention_of(family, qk_rope_head_dim=...).rope.rotary_dim is None


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_as_stated_and_else_as_deepseek_s_class_has_them(family: str) -> None:
    moe = expected_tensors(CONFIGS[family], family)[0].layers[0].moe
    assert moe is not None
    assert (moe.scoring, moe.norm_topk_prob, moe.routed_scaling_factor) == ("sqrtsoftplus", True, 1.5)
    assert (moe.swiglu_limit, moe.correction_bias, moe.n_group, moe.shared_intermediate_size) == (10.0, True, 1, 32)
    stated = {"scoring_func": "sigmoid", "norm_topk_prob": False, "routed_scaling_factor": 2.5, "swiglu_limit": 0}
    moe = expected_tensors({**CONFIGS[family], **stated, "n_group": 2}, family)[0].layers[0].moe
    assert moe is not None
    assert (moe.scoring, moe.norm_topk_prob, moe.routed_scaling_factor) == ("sigmoid", False, 2.5)
    assert (moe.swiglu_limit, moe.n_group) == (None, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_the_mixing_reach_the_forward(tmp_path: Path, family: str) -> None:
    layer = layer_of(tmp_path / "one", family)
    inputs = layer.probe(6, 5)
    first = layer.prefill(inputs)
    for name, changes in {
        "hc_sinkhorn_iters": {"hc_sinkhorn_iters": 1},
        "hc_eps": {"hc_eps": 0.1},
        "swiglu_limit": {"swiglu_limit": 0.01},
        "routed_scaling_factor": {"routed_scaling_factor": 3.0},
        "rope_theta": {"rope_theta": 10.0},
        "sliding_window": {"sliding_window": 2},
    }.items():
        changed = layer_of(tmp_path / name, family, **changes).prefill(inputs)
        assert (changed - first).abs().max() > 1e-4, name
    scaled = layer_of(tmp_path / "scaled", family, rope_scaling=...)
    torch.testing.assert_close(scaled.prefill(inputs), first, rtol=0, atol=0)


# --- a prediction layer ----------------------------------------------------------------------------------------------


def test_position_0_reads_no_embedding(tmp_path: Path) -> None:
    layer, positions = layer_of(tmp_path, "mtp"), torch.arange(5)
    embeds, hidden = drawn(1, 5, HIDDEN), drawn(2, 5, STREAMS * HIDDEN)
    other = embeds.clone()
    other[0] = 7.0
    torch.testing.assert_close(layer.forward(other, hidden, positions), layer.forward(embeds, hidden, positions))
    assert not torch.allclose(layer.forward(other, hidden, positions + 1), layer.forward(embeds, hidden, positions + 1))


def test_a_prediction_layer_looks_back_over_its_window(tmp_path: Path) -> None:
    layer, positions = layer_of(tmp_path, "mtp"), torch.arange(9) + 3
    embeds, hidden = drawn(1, 9, HIDDEN), drawn(2, 9, STREAMS * HIDDEN)
    before = layer.forward(embeds, hidden, positions)
    for changed, first, last in ((0, 0, WINDOW - 1), (5, 5, 8)):
        other = hidden.clone()
        other[changed] += 1.0
        rows = (layer.forward(embeds, other, positions) - before).abs().amax(-1) > 1e-9
        assert rows.nonzero().flatten().tolist() == list(range(first, last + 1))


def test_what_a_step_hands_on_is_the_streams_and_not_their_sum(tmp_path: Path) -> None:
    layer, positions = layer_of(tmp_path, "mtp"), torch.arange(4) + 1
    embeds, hidden = drawn(1, 2, 4, HIDDEN), drawn(2, 2, 4, STREAMS * HIDDEN)
    streams = layer.streams(embeds, hidden, positions)
    assert streams.shape == (2, 4, STREAMS * HIDDEN)
    torch.testing.assert_close(
        layer.norm(layer.hc_head(streams.unflatten(-1, (STREAMS, HIDDEN)))), layer.forward(embeds, hidden, positions)
    )
    # Each of a batch by itself.
    torch.testing.assert_close(layer.streams(embeds[1], hidden[1], positions), streams[1])


# --- DSpark ----------------------------------------------------------------------------------------------------------


def test_a_block_sees_its_context_from_the_anchor_s_window_on_and_all_of_itself(tmp_path: Path) -> None:
    spec = expected_tensors(CONFIGS["dspark"], "dspark")[0]
    assert {(layer.window_reading, layer.is_causal) for layer in spec.layers} == {("anchor", False)}
    stage = layer_of(tmp_path, "dspark")
    block, context = drawn(1, 4, STREAMS, HIDDEN), drawn(2, 7, HIDDEN)
    places, ahead = torch.arange(4) + 17, torch.arange(7) + 10
    before = stage.forward(block, places, context, ahead)
    for row in range(7):
        other = context.clone()
        other[row] += 1.0
        changed = (stage.forward(block, places, other, ahead) - before).abs().amax((-1, -2)) > 1e-9
        # The last WINDOW rows, for every row of the block alike.
        assert changed.tolist() == [row >= 7 - WINDOW] * 4
    for row in range(4):
        other = block.clone()
        # Not all lanes by one factor, which the norms would take away.
        other[row, :, ::2] += 1.0
        changed = (stage.forward(other, places, context, ahead) - before).abs().amax((-1, -2)) > 1e-9
        assert changed.tolist() == [True] * 4


def test_a_stage_keeps_its_context_only(tmp_path: Path) -> None:
    stage, cache = layer_of(tmp_path, "dspark"), LatentCache()
    inputs = stage.probe(7, 3)
    cache.append(stage.self_attn.row(inputs["context"], inputs["context_positions"]), inputs["context_positions"])
    first = stage.forward(inputs["block"], inputs["positions"], cache=cache)
    assert len(cache) == 7
    torch.testing.assert_close(stage.forward(inputs["block"], inputs["positions"], cache=cache), first)
    torch.testing.assert_close(stage.prefill(inputs), first)


def test_the_stacked_latent_path_gives_the_rows_that_the_stages_keep(tmp_path: Path) -> None:
    draft = open_draft(written(tmp_path, "dspark"))
    layers: tuple[Any, ...] = draft.layers(dtype=torch.float64)
    context, positions = drawn(1, 6, HIDDEN), torch.arange(6) + 9
    found = eager_latent(layers, context, positions, rotary_emb=layers[0].self_attn.rotary_emb)
    due = torch.stack([layer.self_attn.row(context, positions) for layer in layers])
    assert found.shape == (2, 6, 32)
    torch.testing.assert_close(found.double(), due, rtol=1e-6, atol=1e-6)


def test_the_final_norm_stands_before_lm_head_and_not_before_the_confidence(tmp_path: Path) -> None:
    draft: Draft = open_draft(written(tmp_path, "dspark"))
    assert draft.family is not None
    assert draft.spec is not None
    head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float64))
    rows, before, lm_head = drawn(1, 4, HIDDEN), torch.tensor([3, 5, 7, 11]), drawn(2, 128, HIDDEN)
    logits, confidence = head.block_logits(rows, before, lm_head)
    far, far_confidence = head.block_logits(1000.0 * rows, before, lm_head)
    torch.testing.assert_close(far, logits, rtol=1e-5, atol=1e-5)
    assert (far_confidence - confidence).abs().max() > 10.0


# --- what is said where it fails -------------------------------------------------------------------------------------

LOST = [
    ("layers.0.attn.wo_a.weight", "mtp.0.attn.wo_a.weight"),
    ("layers.0.attn.attn_sink", "mtp.0.attn.attn_sink"),
    ("layers.0.hc_ffn_scale", "mtp.0.hc_ffn_scale"),
    ("layers.0.ffn.gate.bias", "mtp.0.ffn.gate.bias"),
    ("layers.0.ffn.experts.1.w2.weight", "mtp.0.ffn.experts.1.w2.weight"),
    ("layers.0.ffn.shared_experts.w3.weight", "mtp.0.ffn.shared_experts.w3.weight"),
    ("layers.0.ffn_norm.weight", "mtp.0.ffn_norm.weight"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "stored"), LOST)
def test_a_tensor_that_does_not_fit_is_named_as_the_file_has_it(
    tmp_path: Path, family: str, name: str, stored: str
) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][1:].clone()

    report = check_draft(written(tmp_path, family, edit=cut), checks=["weights.shapes", "layers.build"])
    assert report["layers.build"].status == "failed"
    assert report["weights.shapes"].findings[0].where == stored
    assert report["layers.build"].findings[0].where == stored


@pytest.mark.parametrize("name", ["e_proj.weight", "h_proj.weight", "hc_head_fn", "norm.weight", "enorm.weight"])
def test_a_tensor_around_a_prediction_layer_that_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[f"layers.0.{name}"] = tensors[f"layers.0.{name}"][1:].clone()

    report = check_draft(written(tmp_path, "mtp", edit=cut), checks=["layers.build"])
    assert report["layers.build"].findings[0].where == f"mtp.0.{name}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("matrix", ["attn.wq_b", "ffn.experts.3.w1"])
def test_a_matrix_with_its_scales_is_no_matrix_to_multiply_by(tmp_path: Path, family: str, matrix: str) -> None:
    """Rounded to eight bits by blocks: the bytes alone would run, and give another layer."""
    config = CONFIGS[family]
    tensors = random_tensors(config, family)
    tensors[f"layers.0.{matrix}.weight"] = tensors[f"layers.0.{matrix}.weight"].to(torch.float8_e4m3fn)
    tensors[f"layers.0.{matrix}.scale"] = torch.ones(1, 1)
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stated = {**config, "expert_dtype": "fp8", "quantization_config": quantised}
    path = write_checkpoint(tmp_path, stated, tensors, rename=stored_names(config, family))
    with pytest.raises(NoReferenceError, match=f"{matrix}.scale"):
        open_draft(path).layer(0, dtype=torch.float32)
    report = check_draft(path, checks=["layers"])
    assert {report[f"layers.{name}"].status for name in ("build", "finite", "incremental")} == {"inconclusive"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters"),
        ({"num_experts_per_tok": ...}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": ...}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 40}, "qk_rope_head_dim"),
        ({"rope_theta": ...}, "rope_theta"),
    ],
)
def test_a_number_that_makes_no_stage_is_named(tmp_path: Path, family: str, changes: dict[str, Any], key: str) -> None:
    finding = check_draft(written(tmp_path, family, **changes), checks=["layers.build"])["layers.build"].findings[0]
    assert finding.where == key
