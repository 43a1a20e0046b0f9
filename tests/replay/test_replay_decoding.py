"""A replay against speculative decoding with a target that runs.

What goes wrong without this file: a draft that sees one row of context too many or too few, a start that sees another start's rows, a
recycled state or a position that is one off, a window or a causality that holds in one chunk and not in the next, a walk that starts its
next round beside the token that the target added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import SlowBlock, SlowChain, Target, decode

from pytest_specdecode import open_draft, testing
from pytest_specdecode.errors import NoReferenceError
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.replay import Trace
from pytest_specdecode.replay.run import Replayer, replay
from pytest_specdecode.replay.target_weights import TargetWeights

#: So few tokens that even a draft that knows nothing is right often enough, and several times in a row now and then.
VOCAB, MASK, PROMPT, LENGTH = 4, 3, 7, 100

TINY = {family.name: family.tiny for family in FAMILIES}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def nested(family: str, key: str, **changes: Any) -> dict[str, Any]:
    return {key: {**TINY[family][key], **changes}}


def dflash(family: str = "dflash", **changes: Any) -> dict[str, Any]:
    block = nested(family, "dflash_config", mask_token_id=MASK, **changes.pop("dflash_config", {}))
    return {**block, **changes}


PACKAGED = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 10, 18],
    "mask_token_id": MASK,
    "block_size": 6,
    "sliding_window_non_causal": True,
    "draft_vocab_size": VOCAB,
    "transformer_layer_config": {
        **{key: TINY["dflash"][key] for key in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")},
        **{
            key: TINY["dflash"][key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
        },
        "vocab_size": VOCAB,
        "use_sliding_window": True,
        **SLIDING,
    },
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
}

GEMMA = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
KIMI = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "num_target_layers": 3,
    "target_num_hidden_layers": 20,
    **LATENT,
}
MINICPM = {
    "architectures": ["EagleMiniCPMForCausalLM"],
    "model_type": "minicpm",
    "scale_emb": 12,
    "scale_depth": 1.4,
    "mup_denominator": 32,
    "dim_model_base": 16,
}
COHERE = {
    "architectures": ["EagleCohereForCausalLM"],
    "model_type": "cohere2",
    "layer_norm_eps": 1e-5,
    "layer_types": ["sliding_attention"],
    "sliding_window": 4,
}
LLAMA4 = {
    "architectures": ["EagleLlama4ForCausalLM"],
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size_mlp": 160,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 1,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 16,
}
MISTRAL = {"architectures": ["EagleMistralLarge3ForCausalLM"], "model_type": "deepseek_v3", **LATENT}
CONVERTED = {
    "architectures": ["EAGLEModel"],
    "model_type": "eagle",
    "eagle_fc_bias": True,
    "truncated_vocab_size": 3,
    "model": {**{key: value for key, value in TINY["eagle1"].items() if key != "bias"}, "vocab_size": VOCAB},
}
DENSE = {
    **dict.fromkeys(LATENT, ...),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "rope_scaling"), ...),
    "head_dim": 32,
    "num_key_value_heads": 2,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": 3}),
    "eagle3, 3.1 and normed residual": (
        "eagle3",
        {"draft_vocab_size": VOCAB, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ),
    "eagle3, two layers and a window": (
        "eagle3",
        {"draft_vocab_size": 3, "num_hidden_layers": 2, "norm_before_fc": True, **SLIDING},
    ),
    "eagle3, a window of its own rows": (
        "eagle3",
        {"draft_vocab_size": VOCAB, "layer_types": ["sliding_attention"], "sliding_window": 2},
    ),
    "eagle3, no taps": (
        "eagle3",
        {
            "draft_vocab_size": 3,
            "eagle_config": {"use_aux_hidden_state": False},
            "eagle_aux_hidden_state_layer_ids": ...,
        },
    ),
    "eagle3-mla": ("eagle3-mla", {"draft_vocab_size": VOCAB}),
    "eagle1": ("eagle1", {}),
    "eagle1, two layers": ("eagle1", {"num_hidden_layers": 2, "bias": False}),
    "eagle1, minicpm": ("eagle1", {**MINICPM, "bias": ...}),
    "eagle1, cohere 2": ("eagle1", {**COHERE, "bias": ...}),
    "eagle1, llama 4 in chunks": ("eagle1", {**LLAMA4, "bias": ...}),
    "eagle1, llama 4 unturned": ("eagle1", {**LLAMA4, "no_rope_layers": [0], "floor_scale": 8, "bias": ...}),
    "eagle1, mistral large": ("eagle1", {**MISTRAL, "bias": ...}),
    "eagle1, converted": ("eagle1", CONVERTED),
    "peagle": ("peagle", {"draft_vocab_size": 3, "mask_token_id": MASK}),
    "mtp": ("mtp", {}),
    "mtp, mimo": ("mtp", {**DENSE, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}),
    "mtp, qwen": (
        "mtp",
        {
            **DENSE,
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "num_nextn_predict_layers": ...,
            "mtp_num_hidden_layers": 1,
        },
    ),
    "mtp, three layers in turn": ("mtp", {"num_nextn_predict_layers": 3}),
    "mtp, qwen, two layers in turn": (
        "mtp",
        {
            **DENSE,
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "num_nextn_predict_layers": ...,
            "mtp_num_hidden_layers": 2,
        },
    ),
    "mtp, ernie": ("mtp", {**DENSE, "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"}),
    "dflash": ("dflash", dflash()),
    "dflash, causal": ("dflash", dflash(is_causal=True)),
    "dflash, windows and a value scale": ("dflash", dflash(is_causal=..., attention_value_scale=0.5, **SLIDING)),
    "dflash, reduced": ("dflash", dflash(draft_vocab_size=3)),
    "dflash, speculators": ("dflash", PACKAGED),
    "dflash, sinks and a scaled embedding": (
        "dflash",
        dflash(attention_sink_bias=True, input_embedding_scale=2.0),
    ),
    "dflash, laguna": ("dflash", dflash(architectures=["DFlashLagunaForCausalLM"])),
    "dflash, muse": (
        "dflash",
        dflash(
            architectures=["MuseGlimmerAssistantModel"],
            model_type="muse_glimmer_assistant",
            is_causal=...,
            sliding_window=4,
            layer_types=...,
        ),
    ),
    "dflash2": ("dflash2", dflash("dflash2")),
    "dflare": ("dflare", dflash("dflare")),
    "domino": ("domino", dflash("domino")),
    "domino, shifted": ("domino", dflash("domino", dflash_config={"shift_label": True})),
    "dspark": ("dspark", {"mask_token_id": MASK}),
    "dspark, gated": ("dspark", {"mask_token_id": MASK, "markov_head_type": "gated"}),
    "dspark, rnn, from the second row": (
        "dspark",
        {"mask_token_id": MASK, "markov_head_type": "rnn", "sample_from_anchor": False},
    ),
    "dspark, gemma": ("dspark", {"mask_token_id": MASK, **GEMMA}),
    "dspark, kimi": ("dspark", {"mask_token_id": MASK, **KIMI}),
    "dspark, reduced": ("dspark", {"mask_token_id": MASK, "draft_vocab_size": 3}),
}


def written(case: str, directory: Path) -> Path:
    family, changes = CASES[case]
    if changes in (PACKAGED, CONVERTED):
        return testing.write_tiny(directory, family, config=changes, seed=3, dtype="float64")
    return testing.write_tiny(directory, family, seed=3, dtype="float64", vocab_size=VOCAB, **changes)


def pair(case: str, directory: Path) -> tuple[Path, Target, Any]:
    """A draft, its target and what drafts slowly."""
    path = written(case, directory / "draft")
    spec = open_draft(path).spec
    assert spec is not None
    target = Target((spec.taps.count or 0) if spec.taps.required else 0, VOCAB, seed=11)
    target.write(directory / "target")
    chain = spec.family in ("eagle1", "eagle3", "eagle3-mla", "peagle", "mtp")
    return path, target, SlowChain(path, target) if chain else SlowBlock(path, target)


def test_layers_in_turn_draft_no_more_tokens_than_there_are(tmp_path: Path) -> None:
    path, target, _ = pair("mtp, three layers in turn", tmp_path)
    (tmp_path / "trace").mkdir()
    target.record(tmp_path / "trace" / "hs_0.safetensors", target.continued([1], 40), prompt=1)
    draft, weights = open_draft(path), TargetWeights(tmp_path / "target")
    trace = Trace.open(tmp_path / "trace")
    for count in (1, 2, 3):
        assert replay(draft, trace, target=weights, draft_tokens=count).draft_tokens == count
    with pytest.raises(
        NoReferenceError, match=r"^3 prediction layers draft as many tokens in turn; give --draft-tokens=3 "
    ):
        replay(draft, trace, target=weights, draft_tokens=4)


@pytest.mark.parametrize("case", CASES)
def test_a_replay_is_the_served_decoding_round_by_round(case: str, tmp_path: Path) -> None:
    """Same starts, same proposals, same acceptance; and the decoded text is the target's plain greedy one."""
    path, target, slow = pair(case, tmp_path)
    replayer = Replayer(open_draft(path), TargetWeights(tmp_path / "target"), dtype=torch.float64)
    count = replayer.tokens()
    prompt = [place * 3 % VOCAB for place in range(PROMPT)]
    decoded = decode(target, slow, prompt, LENGTH, count)
    assert decoded.tokens == target.continued(prompt, len(decoded.tokens))

    (tmp_path / "trace").mkdir()
    target.record(tmp_path / "trace" / "hs_0.safetensors", decoded.tokens, prompt=PROMPT)
    trace = Trace.open(tmp_path / "trace")
    result = replay(replayer.draft, trace, target=replayer.target, dtype=torch.float64)
    (file,) = result.files
    known = [served for served in decoded.rounds if served[0] + count < len(decoded.tokens)]
    assert [(item.start, item.accepted) for item in file.rounds if item.whole] == [
        (start, accepted) for start, _, accepted in known
    ]
    assert result.served.mean_accepted == pytest.approx(sum(accepted for *_, accepted in known) / len(known))
    # What is drafted behind every start, not only behind those that the walk comes by, and in whatever company.
    recording = trace.read(trace.files[0], replayer.spec)
    drafter = replayer.model().read(recording)
    with torch.no_grad():
        starts = torch.tensor([start for start, *_ in known])
        if case.endswith("in turn"):
            with pytest.raises(NoReferenceError, match="behind tokens that are not kept is not computed"):
                drafter.draft(starts, count)
        else:
            assert drafter.draft(starts, count).tolist() == [proposed for _, proposed, _ in known]
            assert drafter.draft(starts[5:6], count).tolist() == [known[5][1]]
    # The case is worth something only where drafts are accepted now and then.
    assert sum(accepted > 0 for *_, accepted in known) >= 4
