"""EAGLE-1 drafts with Llama 4's, Cohere's and Cohere 2's layers against transformers' models.

What these catch: queries normed before a rotation that scales them, or with a weight; pairs that turn as halves; a layer without rotation
that rotates, or that misses its temperature; chunks counted from the query; experts whose output is weighed where their input is due, or
whose stored matrices are taken the other way round; sublayers one after the other where they lie side by side; a norm that leaves the
mean in; head norms with one weight for all heads; a window of one token more; logits without their scale.

The draft is `fc` before a whole model of the peer's, which is given the fused states in place of embeddings, so that masks, positions and
the last norm are the peer's, too. Its tensors and its own configuration are written to a file, and the file is opened here. `float32` runs
the peer as it is. `float64` runs the same code with its float32 casts turned into float64, and then has to agree to eleven digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from widening import widened

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.families.eagle1 import Eagle1Head, Eagle1Options
from pytest_specdecode.testing import write_checkpoint

TOLERANCE = {torch.float32: {"rtol": 2e-4, "atol": 2e-5}, torch.float64: {"rtol": 1e-11, "atol": 1e-11}}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float64"])
HIDDEN, TOKENS = 32, 11

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: A rotation that scales what it turns: only there does it matter whether the norm comes before or after.
YARN = {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA4: dict[str, Any] = {
    **SIZES,
    "intermediate_size_mlp": 40,
    "head_dim": 12,
    "num_local_experts": 5,
    "rms_norm_eps": 1e-4,
    "moe_layers": [],
    "attention_chunk_size": 4,
    "floor_scale": 3,
    "attn_scale": 0.7,
}
COHERE: dict[str, Any] = {**SIZES, "layer_norm_eps": 1e-3, "logit_scale": 0.3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4-chunked": ("Llama4", LLAMA4),
    "llama4-no-head-norm": ("Llama4", {**LLAMA4, "use_qk_norm": False, "attention_chunk_size": 64}),
    "llama4-yarn": ("Llama4", {**LLAMA4, "rope_parameters": YARN}),
    "llama4-unturned": ("Llama4", {**LLAMA4, "no_rope_layers": [0]}),
    "llama4-unturned-untuned": ("Llama4", {**LLAMA4, "no_rope_layers": [0], "attn_temperature_tuning": False}),
    "llama4-experts": ("Llama4", {**LLAMA4, "moe_layers": [0], "num_experts_per_tok": 2}),
    "llama4-one-expert": ("Llama4", {**LLAMA4, "moe_layers": None}),
    "llama4-five-layers": (
        "Llama4",
        {**LLAMA4, "num_hidden_layers": 5, "moe_layers": None, "interleave_moe_layer_step": 2, "attention_bias": True},
    ),
    "cohere": ("Cohere", COHERE),
    "cohere-head-norms": ("Cohere", {**COHERE, "use_qk_norm": True, "num_hidden_layers": 2}),
    "cohere-biases": ("Cohere", {**COHERE, "attention_bias": True}),
    "cohere2": ("Cohere2", {**COHERE, "num_hidden_layers": 5, "sliding_window": 3}),
    "cohere2-full": ("Cohere2", {**COHERE, "layer_types": ["full_attention"]}),
}


def drawn(module: nn.Module, dtype: torch.dtype) -> None:
    """Weights of size 0.3, and norms around 1."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data = (values + 1.0 if "norm" in name else values).to(dtype)


def built(transformers: ModuleType, case: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Linear, dict[str, Any]]:
    """The peer's model, the fusion before it, and the configuration of the draft that the two are."""
    kind, fields = CASES[case]
    config = getattr(transformers, "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config")(**fields)
    config._attn_implementation = "sdpa"
    with widened(dtype):
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=kind != "Llama4")
    for part in (model, fc):
        drawn(part, dtype)
        part.eval().requires_grad_(False)
    written = json.loads(config.to_json_string(use_diff=False))
    name = "EagleLlama4ForCausalLM" if kind == "Llama4" else "EagleCohereForCausalLM"
    return model, fc, {**written, "architectures": [name], "torch_dtype": "float32"}


@pytest.mark.parametrize("case", list(CASES))
@DTYPES
def test_layers_are_the_peers(tmp_path: Path, case: str, dtype: torch.dtype, transformers: ModuleType) -> None:
    model, fc, config = built(transformers, case, dtype)
    tensors = {f"fc.{name}": value for name, value in fc.state_dict().items()}
    tensors |= {
        name.removeprefix("model."): value for name, value in model.state_dict().items() if "lm_head" not in name
    }
    draft = open_draft(write_checkpoint(tmp_path, config, {name: value.clone() for name, value in tensors.items()}))
    assert draft.spec is not None
    assert isinstance(draft.spec.options, Eagle1Options)
    assert draft.spec.options.variant == ("llama4" if case.startswith("llama4") else "cohere")
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())

    generator = torch.Generator().manual_seed(4)
    embeds, states = (torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    fused = fc(torch.cat([embeds, states], dim=-1))
    with widened(dtype):
        found = model(inputs_embeds=fused[None], output_hidden_states=True, use_cache=False)
    due = found.hidden_states[-1][0]
    assert due.dtype == dtype
    assert due.abs().max() > 0.5

    head = Eagle1Head(draft.spec, draft.source(dtype=dtype))
    positions = torch.arange(TOKENS)
    x = head.fuse(embeds, states)
    layers = draft.layers(dtype=dtype)
    stepped = x
    for layer in layers:
        x = layer.forward(x, positions)  # type: ignore[attr-defined]
        stepped = layer.incremental({"hidden": stepped, "positions": positions})
    torch.testing.assert_close(head.output(x), due, **TOLERANCE[dtype])
    torch.testing.assert_close(head.output(stepped), due, **TOLERANCE[dtype])
    logits = head.logits(head.output(x), model.lm_head.weight)
    torch.testing.assert_close(logits, found.logits[0], **TOLERANCE[dtype])
    if dtype == torch.float32:
        report = check_draft(tmp_path, checks=["config", "weights", "layers"])
        assert report.ok, [result for result in report if result.status == "failed"]
        for id in ("layers.build", "layers.finite", "layers.incremental"):
            assert report[id].status == "passed", report[id]


@DTYPES
def test_a_cohere_draft_of_north_s_kind_norms_by_root_mean_square(
    tmp_path: Path, dtype: torch.dtype, transformers: ModuleType
) -> None:
    """Cohere 2's layer with Llama's norm in the place of its own, as `norm_type` says."""
    model, fc, config = built(transformers, "cohere2", dtype)
    eps = 1e-3
    with torch.no_grad():
        for parent in (model.model, *model.model.layers):
            name = "norm" if parent is model.model else "input_layernorm"
            old = getattr(parent, name)
            new = nn.RMSNorm(HIDDEN, eps=eps, dtype=dtype)
            new.weight.copy_(old.weight)
            setattr(parent, name, new)
    config |= {"norm_type": "rms_norm", "rms_norm_eps": eps}
    tensors = {f"fc.{name}": value for name, value in fc.state_dict().items()}
    tensors |= {
        name.removeprefix("model."): value for name, value in model.state_dict().items() if "lm_head" not in name
    }
    draft = open_draft(write_checkpoint(tmp_path, config, {name: value.clone() for name, value in tensors.items()}))
    assert draft.spec is not None
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    with widened(dtype):
        due = model.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
    for layer in draft.layers(dtype=dtype):
        x = layer.forward(x, torch.arange(TOKENS))  # type: ignore[attr-defined]
    output = Eagle1Head(draft.spec, draft.source(dtype=dtype)).output(x)
    torch.testing.assert_close(output, due, **TOLERANCE[dtype])
