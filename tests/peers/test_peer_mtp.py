"""Prediction layers against those of speculators and transformers, and Gemma 4's assistant against transformers' own.

What these catch: embedding and hidden state joined the other way round; a norm that multiplies by w where 1 + w is meant; the gate in
Qwen's queries left out, or taken block by block; routing that weighs with its correcting bias, forgets its groups, or divides after it
scales; an assistant that rotates at its row number, sees one key too few, or scales its scores; names and sizes that a saved file
states in another place than its class.

Each peer builds its own small model and saves it, and the file is opened here; transformers' MTP layers, which it only loads, are
written under the names that it loads. float32 throughout: the peers' norms and routers compute in it whatever the model's dtype.
"""

from __future__ import annotations

import importlib
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.layers import MoE
from pytest_specdecode.spec import MoESpec
from pytest_specdecode.testing import write_checkpoint

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
TOKENS = 9
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


@pytest.fixture(scope="module")
def speculators(transformers: ModuleType) -> ModuleType:
    """speculators' MTP module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "speculators", reason="speculators is not installed: see tests/peers/requirements-no-deps.txt"
        )
        return importlib.import_module("speculators.models.mtp")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module, seed: int = 11, around: float = 1.0) -> nn.Module:
    """`module` with every parameter drawn anew: matrices by their width, vectors of deviation 0.3 around 0, norms around `around`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            scale, centre = (
                (0.3, around * ("norm" in name)) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
            )
            parameter.copy_(scale * drawn + centre)
    return module.eval().requires_grad_(False)


def causal(tokens: int) -> Tensor:
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)
    return mask[None, None]


# --- speculators -----------------------------------------------------------------------------------------------------


def qwen3(transformers: ModuleType) -> Any:
    return transformers.Qwen3Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})


def qwen3_next(transformers: ModuleType) -> Any:
    return transformers.Qwen3NextConfig(**SIZES, **LINEAR, **EXPERTS)


def qwen3_5(transformers: ModuleType) -> Any:
    module = importlib.import_module("transformers.models.qwen3_5.configuration_qwen3_5")
    return module.Qwen3_5TextConfig(**SIZES, **LINEAR)


def qwen3_5_moe(transformers: ModuleType) -> Any:
    module = importlib.import_module("transformers.models.qwen3_5_moe.configuration_qwen3_5_moe")
    return module.Qwen3_5MoeTextConfig(**SIZES, **LINEAR, **EXPERTS)


@pytest.mark.parametrize("layer_config", [qwen3, qwen3_next, qwen3_5, qwen3_5_moe])
def test_a_speculators_draft_saved_by_its_own_class(
    tmp_path: Path, layer_config: Callable[[ModuleType], Any], speculators: ModuleType, transformers: ModuleType
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = speculators.MTPSpeculatorConfig(transformer_layer_config=layer_config(transformers))
        model = filled(speculators.MTPDraftModel(config))
        model.save_pretrained(str(tmp_path))
    peer = model.mtp_layers[0]

    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging) == ("mtp", "speculators")
    assert draft.binding is not None
    assert draft.binding.missing == ()
    # What the class leaves in its file beside the layer is the verifier's, and is pointed out.
    assert set(draft.binding.unexpected) <= {"verifier_lm_head.weight"}

    embeds, hidden, positions = draw(1, TOKENS, 32), draw(2, TOKENS, 32), torch.arange(TOKENS) + 40
    for step in range(3):
        due = peer(
            hidden_states=hidden[None],
            token_embeddings=embeds[None],
            attention_mask=causal(TOKENS),
            position_ids=positions[None],
            position_embeddings=model.rotary_emb(hidden[None], positions[None]),
        )[0]
        got = draft.layer(0, dtype=torch.float32).forward(embeds, hidden, positions)  # type: ignore[attr-defined]
        assert due.abs().max() > 0.5
        torch.testing.assert_close(got, due, **CLOSE)
        # A later step reads what this one gave, and the next token's embedding.
        hidden, embeds = due, draw(3 + step, TOKENS, 32)


def test_a_speculators_draft_passes_its_checks(
    tmp_path: Path, speculators: ModuleType, transformers: ModuleType
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = speculators.MTPSpeculatorConfig(transformer_layer_config=qwen3_5_moe(transformers))
        # A Qwen3.5 layer multiplies by 1 + w.
        filled(speculators.MTPDraftModel(config), around=0.0).save_pretrained(str(tmp_path))
    report = check_draft(tmp_path)
    assert report.ok, [result for result in report if result.status == "failed"]
    assert {result.id for result in report if result.status == "warned"} <= {
        "files.code",
        "weights.unexpected",
        "speculators.structure",
    }


# --- transformers' MTP layers ----------------------------------------------------------------------------------------

MLA = {
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
}


def deepseek(transformers: ModuleType) -> Any:
    # A head's width is the sum of its parts here; a stated one is another model's.
    sizes = {key: value for key, value in {**SIZES, **MLA}.items() if key != "head_dim"}
    sizes["rms_norm_eps"] = 1e-6
    return transformers.DeepseekV3Config(**sizes, **ROUTED)


def deepseek_with_a_whole_query(transformers: ModuleType) -> Any:
    config = deepseek(transformers)
    config.q_lora_rank = None
    return config


def glm(transformers: ModuleType) -> Any:
    return transformers.Glm4MoeConfig(
        **SIZES, **ROUTED, attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5
    )


def released(names: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """transformers' names and joined experts as the released files have them: layer N, one tensor per expert."""
    found: dict[str, Tensor] = {}
    for name, value in names.items():
        rest = name.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        rest = f"model.layers.{depth}.{rest}"
        if rest.endswith("experts.gate_up_proj"):
            for index, expert in enumerate(value):
                gate, up = expert.chunk(2)
                stem = f"{rest.removesuffix('gate_up_proj')}{index}"
                found |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif rest.endswith("experts.down_proj"):
            stem = rest.removesuffix("down_proj")
            found |= {f"{stem}{index}.down_proj.weight": expert for index, expert in enumerate(value)}
        else:
            found[rest] = value
    return found


@pytest.mark.parametrize(
    ("layer_config", "main"),
    [
        (deepseek, "DeepseekV3ForCausalLM"),
        (deepseek_with_a_whole_query, "DeepseekV3ForCausalLM"),
        (glm, "Glm4MoeForCausalLM"),
    ],
)
def test_a_prediction_layer_inside_its_target(
    tmp_path: Path, layer_config: Callable[[ModuleType], Any], main: str, transformers: ModuleType
) -> None:
    config = layer_config(transformers)
    config._attn_implementation = "sdpa"
    target = getattr(transformers, main)(config)
    module = importlib.import_module("transformers.modeling_layers")
    peer = module.MtpModel(target, 1)
    filled(peer.layers)
    with torch.no_grad():
        peer.layers[0].mtp_block.mlp.gate.e_score_correction_bias.copy_(0.2 * draw(5, 8))
    stored = {f"layers.{name}": value for name, value in peer.layers.state_dict().items()}
    written = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [main]}
    body = {name: value for name, value in target.state_dict().items() if "lm_head" not in name}
    write_checkpoint(tmp_path, written, {**body, **released(stored, SIZES["num_hidden_layers"])}, shards=3)

    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging) == ("mtp", "embedded")
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    # Positions from 1 on: at 0 vLLM reads a zero embedding, and transformers never asks.
    embeds, hidden, positions = draw(1, TOKENS, 32), draw(2, TOKENS, 32), torch.arange(TOKENS) + 1
    due = peer.layers[0](
        embeds[None],
        hidden[None],
        position_embeddings=peer.rotary_emb(hidden[None], positions[None]),
        attention_mask=causal(TOKENS),
        position_ids=positions[None],
        past_key_values=None,
    )[0]
    got = draft.layer(0, dtype=torch.float32).forward(embeds, hidden, positions)  # type: ignore[attr-defined]
    assert due.abs().max() > 0.5
    torch.testing.assert_close(got, due, **CLOSE)


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("normed", [True, False])
def test_the_mixture_is_deepseek_v3s(groups: int, chosen: int, normed: bool, transformers: ModuleType) -> None:
    module = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    fields = {**ROUTED, "n_group": groups, "topk_group": chosen, "norm_topk_prob": normed}
    config = transformers.DeepseekV3Config(hidden_size=32, num_attention_heads=4, **fields)
    peer = filled(module.DeepseekV3MoE(config))
    with torch.no_grad():
        peer.gate.e_score_correction_bias.copy_(0.3 * draw(5, 8))
    spec = MoESpec(
        num_experts=8,
        top_k=3,
        intermediate_size=24,
        shared_intermediate_size=48,
        scoring="sigmoid",
        norm_topk_prob=normed,
        routed_scaling_factor=2.5,
        n_group=groups,
        topk_group=chosen,
        correction_bias=True,
        fused_experts=True,
    )
    ours = MoE(spec, peer.state_dict(), hidden_size=32)
    x = draw(6, 40, 32)
    _, weights, ids = peer.gate(x)
    got_weights, got_ids = ours.route(x)
    assert torch.equal(got_ids.sort().values, ids.sort().values)
    torch.testing.assert_close(got_weights.sort().values, weights.sort().values, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours(x.view(5, 8, 32)), peer(x.view(5, 8, 32)), **CLOSE)


# --- Gemma 4's assistant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("keys", [3, 30])
def test_gemma_4_assistant(tmp_path: Path, ordered: bool, keys: int, transformers: ModuleType) -> None:
    text = transformers.Gemma4TextConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        head_dim=16,
        global_head_dim=24,
        sliding_window=8,
        vocab_size=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=256,
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=40,
        use_ordered_embeddings=ordered,
        num_centroids=16,
        centroid_intermediate_top_k=3,
    )
    model = filled(transformers.Gemma4AssistantForCausalLM(config))
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(0.5 + index)
        if ordered:
            ordering = torch.randperm(64, generator=torch.Generator().manual_seed(4))
            model.masked_embedding.token_ordering.copy_(ordering)
    model.save_pretrained(tmp_path)

    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging) == ("gemma4-assistant", "plain")
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    assert draft.family is not None

    embeds, hidden, position = draw(1, 1, 40), draw(2, 1, 40), torch.tensor([keys])
    kv = {
        kind: (draw(3, keys, heads, width), draw(4, keys, heads, width))
        for kind, heads, width in (("sliding_attention", 2, 16), ("full_attention", 1, 24))
    }
    due = model(
        inputs_embeds=torch.cat([embeds * math.sqrt(40.0), hidden], dim=-1)[None],
        position_ids=position[None],
        shared_kv_states={kind: tuple(part.transpose(0, 1)[None] for part in pair) for kind, pair in kv.items()},
    )
    head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))
    x = head.enter(embeds, hidden)
    for index, spec in enumerate(draft.spec.layers):
        layer: Any = draft.layer(index, dtype=torch.float32)
        x = layer.forward(x, position, *kv[spec.layer_type])
    logits, following = head.leave(x)
    assert due.logits.abs().max() > 0.5
    torch.testing.assert_close(following, due.last_hidden_state[0], **CLOSE)
    torch.testing.assert_close(logits, due.logits[0], **CLOSE)
    report = check_draft(tmp_path)
    assert report.ok, [result for result in report if result.status == "failed"]
