"""EAGLE-4's layer, its experts and its layer without rotation, against transformers' Llama, Nemotron-H and DeepSeek-V3 modules.

What these catch: queries and keys that rotate although the file says they do not; experts in the latent space that read the token itself;
a router that reads the latent, or weighs with its bias; relu where its square is due; a routed sum scaled twice, or a shared expert
scaled with it; a shared expert that is left out.

No implementation of the whole draft runs on a CPU: both that exist are parts of a serving engine. Theirs is Llama's attention over
projections twice as wide, between norms, with the target's own block of experts, and those parts are transformers'. SwiGLU experts are
built by no engine; DeepSeek-V3's block, whose keys they have, stands in their place. `float32` runs the peers as they are, `float64` with
their float32 casts turned into float64.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from widening import widened

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.testing import tiny_config, write_checkpoint

TOLERANCE = {torch.float32: {"rtol": 2e-4, "atol": 2e-5}, torch.float64: {"rtol": 1e-11, "atol": 1e-11}}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float64"])
HIDDEN, TOKENS, WINDOW = 64, 12, 8

ROUTED: dict[str, Any] = {
    "enable_moe": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
LATENT: dict[str, Any] = {
    **ROUTED,
    "moe_architecture": "nemotron_latent_relu2",
    "hidden_act": "relu2",
    "moe_latent_size": 16,
    "moe_shared_expert_intermediate_size": 40,
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "unturned": {"use_rope": False},
    "unturned-by-type": {"position_embedding_type": "none", "attn_norm": True},
    "latent": LATENT,
    "latent-unturned": {**LATENT, "partial_rotary_factor": 0, "attn_norm": True, "norm_topk_prob": False},
    "latent-one-group": {**LATENT, "n_group": ..., "topk_group": ...},
    "swiglu": ROUTED,
}


def mlp(transformers: ModuleType, config: dict[str, Any]) -> nn.Module:
    """The peer's block in the place of the MLP."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    if not config.get("enable_moe"):
        return LlamaMLP(transformers.LlamaConfig(hidden_size=HIDDEN, intermediate_size=config["intermediate_size"]))
    fields = {key: value for key, value in config.items() if key in ROUTED or key.startswith("moe_")}
    fields = {"hidden_size": HIDDEN, "n_group": 1, "topk_group": 1, **fields}
    latent = "moe_latent_size" in config
    made = transformers.NemotronHConfig(**fields) if latent else transformers.DeepseekV3Config(**fields)
    made._experts_implementation = "eager"
    return NemotronHMoE(made) if latent else DeepseekV3MoE(made)


def stored(block: nn.Module) -> dict[str, Tensor]:
    """The block's tensors as a file has them: each expert by its own."""
    found: dict[str, Tensor] = {}
    for name, value in block.state_dict().items():
        if name == "experts.gate_up_proj":
            for index, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                found[f"experts.{index}.gate_proj.weight"], found[f"experts.{index}.up_proj.weight"] = gate, up
        elif name.startswith("experts."):
            for index, matrix in enumerate(value):
                found[f"experts.{index}.{name.removeprefix('experts.')}.weight"] = matrix
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("case", list(CASES))
@DTYPES
def test_the_layer_is_the_peers_parts(tmp_path: Path, case: str, dtype: torch.dtype, transformers: ModuleType) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = tiny_config("eagle4", **CASES[case])
    heads, width = config["num_attention_heads"], config["head_dim"]
    eps, fused = config["rms_norm_eps"], config.get("attn_norm", False)
    llama = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width,
        max_position_embeddings=4096,
        rope_parameters=dict(config["rope_parameters"]),
        attn_implementation="sdpa",
    )
    with widened(dtype):
        rotary = LlamaRotaryEmbedding(llama)
    parts = nn.ModuleDict({"self_attn": LlamaAttention(llama, 0), "mlp": mlp(transformers, config)})
    for name in ("q_proj", "k_proj", "v_proj"):
        columns = HIDDEN if fused else 2 * HIDDEN
        setattr(parts["self_attn"], name, nn.Linear(columns, heads * width, bias=False))
    names = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    for name in [*names, "pre_attention_layernorm"] if fused else names:
        parts[name] = nn.RMSNorm(HIDDEN, eps=eps)
    if fused:
        parts["eh_proj"] = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    generator = torch.Generator().manual_seed(6)
    for name, value in (*parts.named_parameters(), *parts.named_buffers()):
        values = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.2
        value.data = (values + 1.0 if "norm" in name else values).to(dtype)
    parts.eval().requires_grad_(False)

    held = {name: value for name, value in parts.state_dict().items() if not name.startswith("mlp.")}
    held |= {f"mlp.{name}": value for name, value in stored(parts["mlp"]).items()}
    tensors = {f"layers.0.{name}": value.clone() for name, value in held.items()}
    for name, shape in {
        "norm": (HIDDEN,),
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (config["vocab_size"], HIDDEN),
    }.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator).to(dtype)
    for index in range(3):
        tensors[f"fc_norm.{index}.weight"] = torch.ones(HIDDEN, dtype=dtype)
    draft = open_draft(write_checkpoint(tmp_path, {**config, "torch_dtype": "float32"}, tensors))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())

    embeds, hidden = (torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    positions = torch.arange(30, 30 + TOKENS)
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(diagonal=1 - WINDOW)
    mask = torch.zeros(TOKENS, TOKENS, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]
    n = torch.cat([parts["input_layernorm"](embeds), parts["hidden_norm"](hidden)], dim=-1)
    residual = parts["eh_proj"](n) if fused else hidden
    states = parts["pre_attention_layernorm"](residual) if fused else n
    with widened(dtype):
        cos, sin = rotary(states[None], positions[None])
        if "unturned" in case:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        y = residual + parts["self_attn"](states[None], position_embeddings=(cos, sin), attention_mask=mask)[0][0]
        due = y + parts["mlp"](parts["post_attention_layernorm"](y)[None])[0]
    assert due.dtype == dtype
    assert due.abs().max() > 0.5
    layer: Any = draft.layer(0, dtype=dtype)
    torch.testing.assert_close(layer.forward(embeds, hidden, positions), due, **TOLERANCE[dtype])
    found = layer.incremental({"embeds": embeds, "hidden": hidden, "positions": positions})
    torch.testing.assert_close(found, due, **TOLERANCE[dtype])
    if dtype == torch.float32:
        report = check_draft(tmp_path, checks=["config", "weights", "layers"])
        assert report.ok, [result for result in report if result.status == "failed"]
        for id in ("layers.build", "layers.finite", "layers.incremental"):
            assert report[id].status == "passed", report[id]
