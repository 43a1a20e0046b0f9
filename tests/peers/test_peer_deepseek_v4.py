"""DeepSeek-V4's stages against transformers' `deepseek_v4`, as prediction layers and as DSpark inside the target.

What these catch: streams mixed by the transposed matrix, divided once too often, or read before their norm; queries that are not normed
head by head; leading lanes rotated in the place of the last; values that are not turned back; a sink left out; output groups taken in
another order; a router that scores by a sigmoid, weighs with its bias, or forgets to divide; gates that are not bounded; a stage that
rotates with the scaling that only the target's compressing layers have; a window that is a row too wide; a confidence read behind the norm.

transformers has the layers and loads neither draft. So the peer builds a small target of sliding layers and saves it, its layers are
written under the stages' names, and what each draft puts around them is a straight line of torch here: the two projections of a
prediction layer, DSpark's context beside its block, and its heads. The weights are plain: nothing here reads experts of four bits.
float32 throughout, in which the peer's norms, mixing and rotation compute whatever the model's dtype.
"""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.families import Draft
from pytest_specdecode.testing import write_checkpoint

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
HIDDEN, STREAMS, WINDOW, TOKENS, RANK, VOCAB = 32, 3, 5, 14, 6, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.6,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 7,
    "hc_eps": 1e-4,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def peer_of(transformers: ModuleType, layers: int, **changes: Any) -> Any:
    """A target of `layers` sliding layers, every parameter and routing bias drawn anew."""
    config = transformers.DeepseekV4Config(
        **{**SIZES, **changes},
        num_hidden_layers=layers,
        layer_types=["sliding_attention"] * layers,
        mlp_layer_types=["moe"] * layers,
    )
    model = transformers.DeepseekV4ForCausalLM(config)
    generator = torch.Generator().manual_seed(29)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("inv_freq",)):
                continue
            drawn = torch.randn(value.shape, generator=generator)
            scale, centre = (0.5, float("norm" in name)) if value.ndim == 1 else (value.shape[-1] ** -0.5, 0.0)
            # Wide enough that gates reach their bound and experts differ.
            value.copy_(scale * drawn * (3.0 if "experts" in name or name.endswith("gate.weight") else 1.0) + centre)
    return model.eval().requires_grad_(False)


def saved(model: Any, directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration that the peer writes, and its tensors: `model.layers.{i}.*` as the stages' `mtp.{i}.*`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(directory))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensors = {}
    for name, value in load_file(directory / "model.safetensors").items():
        # The peer's table of names takes every `kv_norm` back to the `norm` that only a compressor's goes by.
        tensors[re.sub(r"^model\.layers\.", "mtp.", name).replace(".attn.norm.", ".attn.kv_norm.")] = value
    return config, tensors


def embeddings(model: Any, states: Tensor, positions: Tensor) -> dict[str, Any]:
    return {"main": model.model.rotary_emb(states[None], positions[None], layer_type="main")}


def additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SIZES["rms_norm_eps"]) * weight


# --- a prediction layer ----------------------------------------------------------------------------------------------


def prediction(model: Any, directory: Path, **own: Tensor) -> Draft:
    """The peer's only layer as a prediction layer, between a stem of this file's own."""
    config, tensors = saved(model, directory / "peer")
    stored = {name: value for name, value in tensors.items() if name.startswith("mtp.0.")}
    stem = {
        "e_proj": draw(3, HIDDEN, HIDDEN) * HIDDEN**-0.5,
        "h_proj": draw(4, HIDDEN, HIDDEN) * HIDDEN**-0.5,
        "enorm": 1 + 0.3 * draw(5, HIDDEN),
        "hnorm": 1 + 0.3 * draw(6, HIDDEN),
        **own,
    }
    stored |= {f"mtp.0.{name}.weight": value for name, value in stem.items()}
    stored["mtp.0.norm.weight"] = tensors["model.norm.weight"]
    stored |= {f"mtp.0.hc_head_{part}": tensors[f"model.hc_head.hc_{part}"] for part in ("fn", "base", "scale")}
    path = write_checkpoint(directory / "draft", {**config, "num_nextn_predict_layers": 1}, stored)
    draft = open_draft(path)
    assert draft.spec is not None
    assert draft.binding is not None
    assert (draft.spec.family, draft.spec.packaging) == ("mtp", "embedded")
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    return draft


def test_a_prediction_layer_between_its_projections(tmp_path: Path, transformers: ModuleType) -> None:
    model = peer_of(transformers, 1)
    draft = prediction(model, tmp_path)
    held = {name.removeprefix("layers.0."): draft.tensor(name) for name in draft.binding.stored}  # type: ignore[union-attr]
    embeds, streams = draw(1, TOKENS, HIDDEN), draw(2, TOKENS, STREAMS, HIDDEN)
    positions = torch.arange(TOKENS) + 40
    ahead = positions[:, None] - positions
    layer: Any = draft.layer(0, dtype=torch.float32)
    for step in range(3):
        joined = F.linear(rms(embeds, held["enorm.weight"]), held["e_proj.weight"])[:, None]
        joined = joined + F.linear(rms(streams, held["hnorm.weight"]), held["h_proj.weight"])
        due = model.model.layers[0](
            joined[None],
            position_embeddings=embeddings(model, embeds, positions),
            position_ids=positions[None],
            attention_mask=additive((ahead >= 0) & (ahead < WINDOW)),
        )
        inputs = (embeds, streams.flatten(-2), positions)
        assert due.abs().max() > 0.5
        torch.testing.assert_close(layer.streams(*inputs), due[0].flatten(-2), **CLOSE)
        torch.testing.assert_close(layer.forward(*inputs), model.model.norm(model.model.hc_head(due))[0], **CLOSE)
        # A later step reads the streams that this one gave, and the next token's embedding.
        streams, embeds = due[0], draw(7 + step, TOKENS, HIDDEN)


def test_a_stage_is_the_peer_s_whole_model_where_its_stem_repeats_the_embedding(
    tmp_path: Path, transformers: ModuleType
) -> None:
    """Its own mask and, token by token, its own cache, whose window is shorter than the text."""
    model = peer_of(transformers, 1)
    ones = torch.ones(HIDDEN)
    draft = prediction(model, tmp_path, e_proj=torch.eye(HIDDEN), h_proj=torch.zeros(HIDDEN, HIDDEN), enorm=ones)
    layer: Any = draft.layer(0, dtype=torch.float32)
    embeds, streams, positions = draw(1, TOKENS, HIDDEN), draw(2, TOKENS, STREAMS * HIDDEN), torch.arange(TOKENS)
    # vLLM reads no embedding at position 0.
    embeds[0] = 0.0
    entering = rms(embeds, ones)
    due = model.model(inputs_embeds=entering[None]).last_hidden_state[0]
    got = layer.forward(embeds, streams, positions)
    torch.testing.assert_close(got, due, **CLOSE)
    torch.testing.assert_close(
        layer.incremental({"embeds": embeds, "hidden": streams, "positions": positions}), due, **CLOSE
    )
    cache = transformers.DynamicCache(config=model.config)
    steps = [
        model.model(inputs_embeds=entering[None, place : place + 1], past_key_values=cache, use_cache=True)
        for place in range(TOKENS)
    ]
    torch.testing.assert_close(got, torch.cat([step.last_hidden_state[0] for step in steps]), **CLOSE)


def test_a_batch_of_two_is_the_peer_s(tmp_path: Path, transformers: ModuleType) -> None:
    model = peer_of(transformers, 1, swiglu_limit=10.0, o_groups=4)
    draft = prediction(model, tmp_path, e_proj=torch.eye(HIDDEN), h_proj=torch.zeros(HIDDEN, HIDDEN))
    weight = draft.tensor("layers.0.enorm.weight")
    embeds, streams = draw(1, 2, TOKENS, HIDDEN), draw(2, 2, TOKENS, STREAMS * HIDDEN)
    positions = torch.arange(1, TOKENS + 1).expand(2, -1)
    due = model.model(inputs_embeds=rms(embeds, weight), position_ids=positions).last_hidden_state
    layer: Any = draft.layer(0, dtype=torch.float32)
    torch.testing.assert_close(layer.forward(embeds, streams, positions), due, **CLOSE)


def test_a_prediction_layer_of_the_peer_s_passes_its_checks(tmp_path: Path, transformers: ModuleType) -> None:
    prediction(peer_of(transformers, 1), tmp_path)
    report = check_draft(tmp_path / "draft")
    assert [result.id for result in report if result.status in ("failed", "warned")] == []
    assert {report[f"layers.{name}"].status for name in ("build", "finite", "incremental")} == {"passed"}


# --- DSpark inside the target ----------------------------------------------------------------------------------------

TAPS = [3, 7]


def dspark(model: Any, directory: Path) -> tuple[Draft, Mapping[str, Tensor]]:
    """The peer's layers as DSpark's stages, and what lies around them by its canonical name."""
    config, tensors = saved(model, directory / "peer")
    own = {
        "fc.weight": draw(3, HIDDEN, len(TAPS) * HIDDEN) * HIDDEN**-0.5,
        "hidden_norm.weight": 1 + 0.3 * draw(4, HIDDEN),
        "markov_head.markov_w1.weight": draw(5, VOCAB, RANK),
        "markov_head.markov_w2.weight": draw(6, VOCAB, RANK),
        "confidence_head.proj.weight": draw(7, 1, HIDDEN + RANK),
    }
    last = len(model.model.layers) - 1
    stored = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    stored |= {"mtp.0.main_proj.weight": own["fc.weight"], "mtp.0.main_norm.weight": own["hidden_norm.weight"]}
    stored |= {f"mtp.{last}.{name}": value for name, value in own.items() if "head" in name}
    stored |= {f"mtp.{last}.norm.weight": tensors["model.norm.weight"]}
    stored |= {f"mtp.{last}.hc_head_{part}": tensors[f"model.hc_head.hc_{part}"] for part in ("fn", "base", "scale")}
    keys = {
        "num_hidden_layers": 9,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 4,
        "dspark_noise_token_id": VOCAB - 1,
        "dspark_target_layer_ids": TAPS,
        "dspark_markov_rank": RANK,
    }
    dropped = ("layer_types", "mlp_layer_types")
    whole = {key: value for key, value in config.items() if key not in dropped} | keys
    draft = open_draft(write_checkpoint(directory / "draft", whole, stored))
    assert draft.spec is not None
    assert draft.binding is not None
    assert (draft.spec.family, draft.spec.packaging, len(draft.spec.layers)) == ("dspark", "embedded", last + 1)
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    return draft, own


def peer_stage(model: Any, layer: nn.Module, streams: Tensor, context: Tensor, positions: Tensor) -> Tensor:
    """The peer's block over a context that stands before it in the attention: rows without a residual of their own."""
    peer: Any = layer
    rows, ahead = len(streams), len(context)
    everywhere = torch.cat([positions[0] - torch.arange(ahead, 0, -1), positions])
    # The ring of the last WINDOW rows, and the whole block.
    seen = torch.arange(ahead + rows) >= ahead - WINDOW
    visible = seen.expand(ahead + rows, -1) | torch.eye(ahead + rows, dtype=torch.bool)

    post, comb, states = peer.attn_hc(streams[None])
    both = torch.cat([context[None], peer.input_layernorm(states)], dim=1)
    attended, _ = peer.self_attn(
        both,
        position_embeddings=embeddings(model, both[0], everywhere),
        position_ids=everywhere[None],
        attention_mask=additive(visible),
    )
    streams = post[0, :, :, None] * attended[0, ahead:, None] + comb[0].mT @ streams
    post, comb, states = peer.ffn_hc(streams[None])
    fed = peer.mlp(peer.post_attention_layernorm(states))
    mixed: Tensor = post[0, :, :, None] * fed[0, :, None] + comb[0].mT @ streams
    return mixed


@pytest.mark.parametrize("ahead", [2, WINDOW, 11])
def test_dspark_s_stages_over_a_context(tmp_path: Path, ahead: int, transformers: ModuleType) -> None:
    model = peer_of(transformers, 2)
    draft, own = dspark(model, tmp_path)
    assert draft.family is not None
    assert draft.spec is not None
    source = draft.source(dtype=torch.float32)
    backbone: Any = draft.family.build_model(draft.spec, source)  # type: ignore[attr-defined]
    block, taps = draw(1, 4, HIDDEN), draw(2, ahead, len(TAPS), HIDDEN)
    context_positions = torch.arange(ahead) + 30
    positions = torch.arange(4) + 30 + ahead

    context = rms(F.linear(taps.flatten(1), own["fc.weight"]), own["hidden_norm.weight"])
    streams = block[:, None].expand(-1, STREAMS, -1)
    for index, layer in enumerate(model.model.layers):
        due = peer_stage(model, layer, streams, context, positions)
        stage: Any = draft.layer(index, dtype=torch.float32)
        assert due.abs().max() > 0.5
        torch.testing.assert_close(stage.forward(streams, positions, context, context_positions), due, **CLOSE)
        inputs = {"block": streams, "positions": positions, "context": context, "context_positions": context_positions}
        torch.testing.assert_close(stage.incremental(inputs), due, **CLOSE)
        streams = due
    rows = model.model.hc_head(streams[None])[0]
    got = backbone.forward(block, positions, taps, context_positions)
    torch.testing.assert_close(got, rows, **CLOSE)

    head: Any = draft.family.build_head(draft.spec, source)
    before = torch.tensor([5, 9, 0, 63])
    logits, confidence = head.block_logits(got, before, model.lm_head.weight)
    embedded = own["markov_head.markov_w1.weight"][before]
    due_logits = model.lm_head(model.model.norm(rows)) + F.linear(embedded, own["markov_head.markov_w2.weight"])
    torch.testing.assert_close(logits, due_logits, **CLOSE)
    due_confidence = F.linear(torch.cat([rows, embedded], dim=-1), own["confidence_head.proj.weight"])[:, 0]
    torch.testing.assert_close(confidence, due_confidence, **CLOSE)


def test_dspark_s_stages_of_the_peer_s_pass_their_checks(tmp_path: Path, transformers: ModuleType) -> None:
    dspark(peer_of(transformers, 2), tmp_path)
    report = check_draft(tmp_path / "draft")
    assert [result.id for result in report if result.status in ("failed", "warned")] == []
    assert {report[f"layers.{name}"].status for name in ("build", "finite", "incremental")} == {"passed"}


def test_the_peer_takes_its_window_and_its_plain_rotation_from_what_is_read_here(transformers: ModuleType) -> None:
    """A sliding layer of the peer's has no compressor, whatever the file's scaling says of the others."""
    model = peer_of(transformers, 1)
    module = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    assert isinstance(model.model.layers[0].self_attn, module.DeepseekV4Attention)
    assert model.model.layers[0].self_attn.compressor is None
    assert model.config.rope_parameters["main"]["rope_type"] == "default"
    assert model.config.rope_parameters["compress"]["rope_type"] == "yarn"
