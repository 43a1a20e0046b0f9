"""DSpark against the models of two public packages, with the same weights.

What these catch: heads that the package names otherwise; a Markov bias that reads the row's own token, or the hidden state where the head
does not; gate and candidate swapped in the recurrent head, or its state carried from block to block; a reduced vocabulary whose bias is
added in target ids, or fed back unmapped; a confidence head without the embedding that it was trained with; a row 0 that drafts where it is
the anchor; a window counted from each row. And of the layers: Gemma 4's V taken from the normed K, normed with a weight, or its scores
scaled; a gate that is taken for queries, or normed; norms around one where they lie around zero; the target's quarter rotation on a
draft's own heads; a context that latent attention does not see, or sees normed.

speculators 0.9.0 runs its own whole model, saved by its own `save_pretrained`. DeepSpec itself is in no registry, so its Gemma 4, Qwen 3.5
and latent layers are held against transformers' layers: a DSpark layer is one whose keys and values come from context and normed block
side by side, so the peer's attention over both, two-sided, must give the same rows. DeepSeek-V4's stages are held in a file of their own.

The peers compute angles and norms in float32, so agreement is held to 2e-5 of outputs of order one.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_specdecode.api import check_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import Draft, load
from pytest_specdecode.testing import tiny_config, write_tiny

H, V, VD, B, C, K, R = 64, 512, 128, 6, 12, 3, 16
ANCHOR = 301
LAYERS: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "layer_types": ["full_attention", "full_attention"],
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}


@pytest.fixture(scope="session")
def speculators(transformers: ModuleType) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "speculators", reason="speculators is not installed; see tests/peers/requirements*.txt"
        )


@pytest.fixture(autouse=True)
def _peers_may_warn() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def drawn(module: nn.Module, centre: float = 1.0) -> nn.Module:
    """Every parameter drawn anew: norms around `centre`, the rest of size 1 / sqrt(columns), a scale at which every part is felt."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        norm = "norm" in name and parameter.ndim == 1
        parameter.data = centre + noise / 5 if norm else noise / parameter.shape[-1] ** 0.5
    return module.eval().requires_grad_(False)


def same(found: Tensor, due: Tensor) -> None:
    assert due.abs().max() > 0.3
    torch.testing.assert_close(found, due, rtol=2e-5, atol=2e-5)


def other(found: Tensor, due: Tensor) -> None:
    assert (found - due).abs().max() > 0.02


# --- speculators 0.9.0 --------------------------------------------------------------------------------------------------------


def peer_model(transformers: ModuleType, speculators: ModuleType, **changes: Any) -> Any:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    layers = {**LAYERS, **changes.pop("layers", {})}
    config = DSparkSpeculatorConfig(
        transformer_layer_config=transformers.Qwen3Config(**layers, attn_implementation="eager"),
        **{
            "draft_vocab_size": V,
            "block_size": B,
            "aux_hidden_state_layer_ids": [2, 10, 18],
            "mask_token_id": V - 1,
            "markov_rank": R,
            **changes,
        },
    )
    model = drawn(DSparkDraftModel(config))
    if model.use_draft_vocab:
        images = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:VD].sort().values
        model.d2t = images - torch.arange(VD)
        model.t2d = torch.zeros(V, dtype=torch.bool)
        model.t2d[images] = True
    return model


def peer_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One block behind C context tokens, run by the peer's own training forward; its tokens are drawn, the first is the anchor."""
    from speculators.models.dspark import core

    generator = torch.Generator().manual_seed(7)
    length = C + B + 3
    tokens = torch.randint(0, V, (1, length), generator=generator)
    tokens[0, C] = ANCHOR
    taps = 2 * torch.randn(1, length, K * H, generator=generator)
    # Only the token behind the context may be an anchor, so the peer's random choice has one outcome.
    mask = torch.zeros(1, length)
    mask[0, C] = 1
    caught: dict[str, Any] = {}

    def catch(
        logits: Tensor, targets: Tensor, confidence: Tensor | None, *_: Any, **__: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        caught.update(logits=logits[0], confidence=None if confidence is None else confidence[0])
        return torch.zeros(()), {}

    monkeypatch.setattr(core, "compute_metrics", catch)
    handle = model.norm.register_forward_hook(lambda _, __, output: caught.update(hidden=output[0]))
    model(
        taps,
        tokens,
        mask,
        torch.randn(1, length, H, generator=generator),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    handle.remove()
    return SimpleNamespace(taps=taps[0, :C].reshape(C, K, H), block=tokens[0, C : C + B], **caught)


def opened(model: Any, path: Path) -> Draft:
    """`model` saved by its own method and opened here; no tensor is missing, extra or misshapen, and no check fails."""
    model.save_pretrained(path)
    draft = load(Checkpoint.open(path))
    assert draft.spec is not None
    assert draft.binding is not None
    assert (draft.spec.family, draft.spec.packaging) == ("dspark", "speculators")
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    report = check_draft(path, skip=["fused-kv.matches-reference", "layers", "weights.degenerate"])
    # Windows are read differently by engines, which is no fault of what the peer wrote.
    failed = {result.id for result in report if result.status == "failed"}
    assert failed <= {"dflash.causality", "dflash.layer-types"}, report
    return draft


def our_rows(draft: Draft, peer: SimpleNamespace, embeddings: Tensor) -> Tensor:
    assert draft.family is not None
    model = draft.family.build_model(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[attr-defined]
    block = embeddings[torch.tensor([ANCHOR] + [V - 1] * (B - 1))]
    rows: Tensor = model.forward(block, torch.arange(C, C + B), peer.taps, torch.arange(C))
    return rows


@pytest.mark.parametrize("anchored", [True, False], ids=["from-anchor", "behind-anchor"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_rows_logits_and_confidence_are_the_peers(
    kind: str,
    anchored: bool,
    transformers: ModuleType,
    speculators: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = peer_model(
        transformers, speculators, markov_head_type=kind, sample_from_anchor=anchored, draft_vocab_size=VD
    )
    model.embed_tokens.weight.data = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    draft, peer = opened(model, tmp_path), peer_rows(model, monkeypatch)
    rows = our_rows(draft, peer, model.embed_tokens.weight)
    same(rows, peer.hidden)
    head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr, arg-type]
    # Row r's token before is the block's token r where row 0 drafts, else token r - 1, and the anchor twice.
    before = peer.block if anchored else torch.cat([peer.block[:1], peer.block[:-1]])
    logits, confidence = head.block_logits(rows, before)
    assert logits.shape == (B, VD)
    same(logits, peer.logits)
    same(confidence, peer.confidence)
    other(head.base_logits(rows), peer.logits)
    other(head.block_logits(rows, before.roll(1))[0], peer.logits)
    other(head.block_logits(rows, before.roll(1))[1], peer.confidence)
    assert head.sample_from_anchor == anchored


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_greedy_draft_is_what_the_peer_says_of_its_own_tokens(
    kind: str, transformers: ModuleType, speculators: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tokens drafted here, given to the peer's Markov head as the block's tokens, are its own best ids."""
    model = peer_model(transformers, speculators, markov_head_type=kind, draft_vocab_size=VD)
    model.embed_tokens.weight.data = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    model.markov_head.markov_w1.weight.data *= 8
    draft, peer = opened(model, tmp_path), peer_rows(model, monkeypatch)
    head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr, arg-type]
    found = head.draft(peer.hidden, ANCHOR)
    before = torch.cat([torch.tensor([ANCHOR]), found.tokens[:-1]])
    bias = model.markov_head.block_bias(prev_token_ids=before[None], hidden_states=peer.hidden[None])[0]
    due = model.lm_head(peer.hidden) + bias
    same(found.logits, due)
    best = due.argmax(dim=-1)
    assert found.tokens.tolist() == (best + model.d2t[best]).tolist()
    features = torch.cat([peer.hidden, model.markov_head.prev_embeddings(before)], dim=-1)
    same(found.confidence, model.confidence_head(features))
    assert len(set(found.tokens.tolist())) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"enable_confidence_head": False},
        {"confidence_head_with_markov": False},
        {"layers": WINDOWED},
        {"layers": WINDOWED, "sliding_window_non_causal": True},
    ],
    ids=["no-markov", "no-confidence", "confidence-alone", "window", "window-two-sided"],
)
def test_other_shapes_of_the_draft(
    changes: dict[str, Any],
    transformers: ModuleType,
    speculators: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = peer_model(transformers, speculators, **changes)
    model.embed_tokens.weight.data = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    model.lm_head.weight.data = torch.randn(V, H, generator=torch.Generator().manual_seed(2)) / 8
    draft, peer = opened(model, tmp_path), peer_rows(model, monkeypatch)
    rows = our_rows(draft, peer, model.embed_tokens.weight)
    same(rows, peer.hidden)
    # With the whole vocabulary the file holds neither embedding nor head; both are the target's.
    head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr, arg-type]
    assert (head.embed_tokens, head.lm_head) == (None, None)
    logits, confidence = head.block_logits(rows, peer.block, model.lm_head.weight)
    same(logits, peer.logits)
    if peer.confidence is None:
        assert confidence is None
    else:
        same(confidence, peer.confidence)


# --- transformers: the layers of other backbones ----------------------------------------------------------------------------


def draft_of(path: Path, layer: nn.Module, **changes: Any) -> Draft:
    """A draft whose layer 0 has the weights of the peer's `layer`."""
    given = {f"layers.0.{name}": value for name, value in layer.state_dict().items()}

    def put(tensors: dict[str, Tensor]) -> None:
        due = {name: value.shape for name, value in tensors.items() if name.startswith("layers.0.")}
        assert due == {name: value.shape for name, value in given.items()}
        tensors |= given

    config = tiny_config("dspark", **{**changes, "num_hidden_layers": 1})
    return load(Checkpoint.open(write_tiny(path, "dspark", config=config, dtype="float32", edit=put)))


def given() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(7)
    return SimpleNamespace(
        context=torch.randn(C, H, generator=generator),
        block=torch.randn(B, H, generator=generator),
        context_positions=torch.arange(40, 40 + C),
        positions=torch.arange(40 + C, 40 + C + B),
    )


def run(draft: Draft, inputs: SimpleNamespace, dtype: torch.dtype = torch.float32) -> Tensor:
    rows: Tensor = draft.layer(0, dtype=dtype).forward(  # type: ignore[attr-defined]
        inputs.block, inputs.positions, inputs.context, inputs.context_positions
    )
    return rows


def side_by_side(layer: Any, inputs: SimpleNamespace, angles: Any, **more: Any) -> Tensor:
    """The peer's attention over context and normed block, two-sided; the block's rows."""
    states = torch.cat([inputs.context, layer.input_layernorm(inputs.block)])[None]
    positions = torch.cat([inputs.context_positions, inputs.positions])[None]
    out = layer.self_attn(
        hidden_states=states,
        position_embeddings=angles(states, positions),
        attention_mask=torch.zeros(1, 1, C + B, C + B),
        **more,
    )[0]
    rows: Tensor = out[0, -B:]
    return rows


GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
    "sliding_window": 64,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "rope_theta": None,
        "rope_type": "default",
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_a_gemma_layer_is_transformers_own(layer_type: str, transformers: ModuleType, tmp_path: Path) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

    named = {key: value for key, value in GEMMA.items() if key not in ("architectures", "model_type", "hidden_act")}
    rope = {kind: fields for kind, fields in GEMMA["rope_parameters"].items() if isinstance(fields, dict)}
    # transformers makes the last of a model's layers a full one, whatever is asked for.
    config = transformers.Gemma4TextConfig(
        **{**LAYERS, **named, "rope_parameters": rope, "layer_types": [layer_type, "full_attention"]},
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        attn_implementation="eager",
    )
    layer = drawn(Gemma4TextDecoderLayer(config, 0))
    layer.layer_scalar.fill_(0.7)
    rotary = Gemma4TextRotaryEmbedding(config)
    inputs = given()
    attended = side_by_side(
        layer, inputs, lambda states, positions: rotary(states, positions, layer_type), shared_kv_states={}
    )
    states = inputs.block + layer.post_attention_layernorm(attended)
    fed = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(states)))
    draft = draft_of(tmp_path, layer, **GEMMA, layer_types=[layer_type], is_causal=False)
    same(run(draft, inputs), (states + fed) * 0.7)
    # Without a context it is the peer's whole layer.
    whole = layer(
        inputs.block[None],
        shared_kv_states={},
        position_embeddings=rotary(inputs.block[None], inputs.positions[None], layer_type),
        attention_mask=torch.zeros(1, 1, B, B),
    )
    alone: Any = draft.layer(0)
    same(alone.forward(inputs.block, inputs.positions), whole[0])


@pytest.mark.parametrize("native", [True, False], ids=["native", "copied-target-keys"])
def test_a_qwen35_fork_is_gated_and_zero_centred_and_a_copied_configuration_is_not(
    native: bool, transformers: ModuleType, tmp_path: Path
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

    rope = {**LAYERS["rope_parameters"], "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    keys: dict[str, Any] = {"rope_parameters": rope, "partial_rotary_factor": 0.25, "attn_output_gate": True}
    layer: Any
    rotary: Any
    if native:
        config = transformers.Qwen3_5TextConfig(**{**LAYERS, "rope_parameters": rope}, attn_implementation="eager")
        layer, rotary = drawn(Qwen3_5DecoderLayer(config, 0), centre=0.0), Qwen3_5TextRotaryEmbedding(config)
        keys |= {
            "architectures": ["Qwen35DSparkModel"],
            "model_type": "qwen3_5",
            "enable_qwen35_gated_q_proj": True,
        }
    else:
        config = transformers.Qwen3Config(**{**LAYERS, "rope_parameters": rope}, attn_implementation="eager")
        layer, rotary = drawn(Qwen3DecoderLayer(config, 0)), Qwen3RotaryEmbedding(config)
    inputs = given()
    states = inputs.block + side_by_side(layer, inputs, rotary)
    draft = draft_of(tmp_path, layer, **keys)
    same(run(draft, inputs), states + layer.mlp(layer.post_attention_layernorm(states)))


def test_a_latent_layer_is_deepseeks_over_context_and_block(transformers: ModuleType, tmp_path: Path) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

    latent = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = transformers.DeepseekV3Config(
        **{**LAYERS, **latent, "rope_parameters": rope, "num_key_value_heads": 4, "head_dim": 8},
        first_k_dense_replace=2,
        attn_implementation="eager",
    )
    layer: Any = drawn(DeepseekV3DecoderLayer(config, 0))
    inputs = given()
    states = inputs.block + side_by_side(layer, inputs, DeepseekV3RotaryEmbedding(config))
    draft = draft_of(
        tmp_path,
        layer,
        architectures=["K3DSparkModel"],
        model_type="k3_dspark",
        **latent,
        rope_parameters=rope,
        num_target_layers=3,
        target_num_hidden_layers=20,
    )
    same(run(draft, inputs), states + layer.mlp(layer.post_attention_layernorm(states)))


def test_a_saved_file_states_the_convention_of_its_taps(
    transformers: ModuleType, speculators: ModuleType, tmp_path: Path
) -> None:
    model = peer_model(transformers, speculators)
    draft = opened(model, tmp_path)
    assert draft.spec is not None
    assert (draft.spec.taps.ids, draft.spec.taps.convention) == ((2, 10, 18), "boundary")
    assert "sample_from_anchor" in json.loads((tmp_path / "config.json").read_text())
