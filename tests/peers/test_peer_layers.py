"""Norms, MLPs and attention layers against transformers' modules with the same weights.

What these catch: everything that our own loops, written by the same hands, would get wrong in the same way: the place
of the norms, the order of the heads, the score's scale, the layout of `kv_b_proj`, the pairs that turn together, what a
DFlash context contributes.

Two regimes. `float32` runs the peer untouched, its own rotary module and norms included; it is good to about 1e-6.
`float64` gives the peer our angles and torch's own RMSNorm in place of its float32 one, and then has to agree to twelve
digits. Both use torch's `scaled_dot_product_attention`, since the peer's eager softmax is float32 whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_specdecode.layers import (
    GatedMLP,
    GQAAttention,
    KVCache,
    LatentCache,
    MLAAttention,
    RMSNorm,
    RotaryEmbedding,
)
from pytest_specdecode.spec import GQASpec, MLASpec, RopeSpec

TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 5e-6}, torch.float64: {"rtol": 1e-11, "atol": 1e-12}}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float64"])

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module` with every parameter drawn anew: weights of size 0.3, and norms around 1."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data = (drawn + 1.0 if "norm" in name else drawn).to(dtype)
    return module.eval().requires_grad_(False)


def prepared(module: nn.Module, dtype: torch.dtype, norms: Iterable[str]) -> nn.Module:
    """`filled`, and in float64 its float32 norms replaced by torch's."""
    filled(module, dtype)
    if dtype == torch.float64:
        for name in norms:
            old = getattr(module, name)
            new = nn.RMSNorm(old.weight.shape[0], eps=old.variance_epsilon, dtype=dtype)
            new.weight.data = old.weight.data
            setattr(module, name, new)
    return module


def rows(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(12), dtype=torch.float64).to(dtype)


def angles(peer: nn.Module, ours: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The pair that the peer's layers take: from its own module in float32, from ours in float64."""
    if dtype == torch.float32:
        return peer(torch.zeros(1, dtype=dtype), positions[None])
    cos, sin = ours.cos_sin(positions, dtype)
    return torch.cat([cos, cos], dim=-1)[None], torch.cat([sin, sin], dim=-1)[None]


def hidden(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The peer's additive mask `[1, 1, T, S]` for a bool one."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def rope_spec(rope: dict[str, Any], rotary_dim: int, **fields: Any) -> RopeSpec:
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    kind = rope.get("rope_type", "default")
    return RopeSpec(theta=rope["rope_theta"], rope_type=kind, rotary_dim=rotary_dim, scaling=scaling, **fields)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        YARN,
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    ],
    ids=["default", "yarn", "yarn-mscale", "yarn-unequal-mscale"],
)
@pytest.mark.parametrize("interleave", [True, False], ids=["interleaved", "neox"])
@DTYPES
def test_mla_is_deepseek_v3s(
    rope: dict[str, Any], interleave: bool, dtype: torch.dtype, transformers: ModuleType
) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    rope = {"rope_theta": 10000.0, **rope}
    config = transformers.DeepseekV3Config(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=20,
        kv_lora_rank=14,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=6,
        max_position_embeddings=4096,
        rope_interleave=interleave,
        rope_parameters=dict(rope),
        attn_implementation="sdpa",
    )
    peer = prepared(DeepseekV3Attention(config, 0), dtype, ["q_a_layernorm", "kv_a_layernorm"])
    spec = MLASpec(
        num_heads=4,
        q_lora_rank=20,
        kv_lora_rank=14,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=6,
        in_features=24,
        out_features=24,
        rope=rope_spec(rope, 8, is_neox_style=not interleave),
    )
    # transformers gives both norms their class's default of 1e-6, whatever rms_norm_eps says.
    ours = MLAAttention(spec, peer.state_dict(), norm_eps=1e-6)
    assert ours.scaling == pytest.approx(peer.scaling, rel=1e-14)

    x, positions = rows(dtype, 7, 24), torch.arange(50, 57)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    pair = angles(DeepseekV3RotaryEmbedding(config), ours.rotary_emb, positions, dtype)
    due = peer(x[None], position_embeddings=pair, attention_mask=hidden(causal, dtype))[0][0]
    assert due.abs().max() > 0.1
    torch.testing.assert_close(ours.forward_naive(x, positions), due, **TOLERANCE[dtype])
    torch.testing.assert_close(ours.forward_absorbed(x, positions), due, **TOLERANCE[dtype])
    cache = LatentCache()
    steps = [ours(x[i : i + 1], positions[i : i + 1], absorbed=True, cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(steps), due, **TOLERANCE[dtype])


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@DTYPES
def test_gqa_is_qwen3s_with_a_norm_and_llamas_without(
    family: str, window: int | None, bias: bool, dtype: torch.dtype, transformers: ModuleType
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    rope = {"rope_theta": 1e6, **YARN} if family == "qwen3" else {"rope_theta": 500000.0}
    make = transformers.Qwen3Config if family == "qwen3" else transformers.LlamaConfig
    config = make(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        attention_bias=bias,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_parameters=dict(rope),
        attn_implementation="sdpa",
    )
    attention = Qwen3Attention if family == "qwen3" else LlamaAttention
    norms = ["q_norm", "k_norm"] if family == "qwen3" else []
    peer = prepared(attention(config, 0), dtype, norms)
    spec = GQASpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        in_features=24,
        out_features=24,
        rope=rope_spec(rope, 10),
        qk_norm=family == "qwen3",
        qkv_bias=bias,
        o_bias=bias,
        sliding_window=window,
    )
    ours = GQAAttention(spec, peer.state_dict(), norm_eps=1e-5)

    x, positions = rows(dtype, 7, 24), torch.arange(50, 57)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    if window:
        visible = visible.triu(diagonal=1 - window)
    pair = angles(LlamaRotaryEmbedding(config), ours.rotary_emb, positions, dtype)
    due = peer(x[None], position_embeddings=pair, attention_mask=hidden(visible, dtype))[0][0]
    torch.testing.assert_close(ours(x, positions), due, **TOLERANCE[dtype])
    cache = KVCache()
    steps = [ours(x[i : i + 2], positions[i : i + 2], cache=cache) for i in range(0, 7, 2)]
    torch.testing.assert_close(torch.cat(steps), due, **TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 3])
@DTYPES
def test_a_learned_sink_is_gpt_oss(window: int | None, dtype: torch.dtype, transformers: ModuleType) -> None:
    """A logit per head in the softmax's denominator, which no scaling and no mask touches."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    config = transformers.GptOssConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_hidden_layers=1,
        attention_bias=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        layer_types=["full_attention"],
        attn_implementation="eager",
    )
    # Sinks of the scores' own size: at zero each would be one more key, at -inf none.
    peer = filled(GptOssAttention(config, 0), dtype)
    peer.sinks.data = 2.0 * rows(dtype, 4)
    stored = peer.state_dict()
    stored["attention_sink_bias"] = stored.pop("sinks")
    spec = GQASpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        in_features=24,
        out_features=24,
        rope=rope_spec({"rope_theta": 150000.0}, 10),
        qkv_bias=True,
        o_bias=True,
        sliding_window=window,
        sink=True,
    )
    ours = GQAAttention(spec, stored)

    x, positions = rows(dtype, 7, 24), torch.arange(50, 57)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    if window:
        visible = visible.triu(diagonal=1 - window)
    if dtype == torch.float32:
        pair = GptOssRotaryEmbedding(config)(x, positions[None])
    else:
        cos, sin = ours.rotary_emb.cos_sin(positions, dtype)
        pair = (cos[None], sin[None])
    due = peer(x[None], position_embeddings=pair, attention_mask=hidden(visible, dtype))[0][0]
    assert due.abs().max() > 0.1
    torch.testing.assert_close(ours(x, positions), due, **TOLERANCE[dtype])
    cache = KVCache()
    steps = [ours(x[i : i + 2], positions[i : i + 2], cache=cache) for i in range(0, 7, 2)]
    torch.testing.assert_close(torch.cat(steps), due, **TOLERANCE[dtype])
    without = GQAAttention(replace(spec, sink=None), {name: stored[name] for name in stored if "sink" not in name})
    assert (without(x, positions) - due).abs().max() > 0.01


@pytest.mark.parametrize(
    ("rope", "interleave"),
    [({"rope_type": "default"}, True), ({**YARN, "mscale": 0.707, "mscale_all_dim": 0.5}, False)],
    ids=["default", "yarn"],
)
@DTYPES
def test_mla_with_a_whole_query_is_deepseek_v3s(
    rope: dict[str, Any], interleave: bool, dtype: torch.dtype, transformers: ModuleType
) -> None:
    """`q_lora_rank` null: one `q_proj`, no norm on its way."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    rope = {"rope_theta": 10000.0, **rope}
    sizes = {"kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
    config = transformers.DeepseekV3Config(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        **sizes,
        max_position_embeddings=4096,
        rope_interleave=interleave,
        rope_parameters=dict(rope),
        attn_implementation="sdpa",
    )
    peer = prepared(DeepseekV3Attention(config, 0), dtype, ["kv_a_layernorm"])
    spec = MLASpec(
        num_heads=4,
        q_lora_rank=None,
        **sizes,
        in_features=24,
        out_features=24,
        rope=rope_spec(rope, 8, is_neox_style=not interleave),
        whole_query=True,
    )
    ours = MLAAttention(spec, peer.state_dict(), norm_eps=1e-6)
    assert ours.q_a_proj is None
    x, positions = rows(dtype, 7, 24), torch.arange(50, 57)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    pair = angles(DeepseekV3RotaryEmbedding(config), ours.rotary_emb, positions, dtype)
    due = peer(x[None], position_embeddings=pair, attention_mask=hidden(causal, dtype))[0][0]
    assert due.abs().max() > 0.1
    torch.testing.assert_close(ours.forward_naive(x, positions), due, **TOLERANCE[dtype])
    torch.testing.assert_close(ours.forward_absorbed(x, positions), due, **TOLERANCE[dtype])
    cache = LatentCache()
    steps = [ours(x[i : i + 1], positions[i : i + 1], absorbed=True, cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(steps), due, **TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 3])
@DTYPES
def test_gqa_with_a_context_is_dflashs(window: int | None, dtype: torch.dtype, transformers: ModuleType) -> None:
    from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
        MuseGlimmerAssistantAttention,
        MuseGlimmerAssistantRotaryEmbedding,
    )

    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_hidden_layers=1,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        layer_types=["full_attention"],
        attn_implementation="sdpa",
    )
    peer = prepared(MuseGlimmerAssistantAttention(config, 0), dtype, ["q_norm", "k_norm"])
    spec = GQASpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        in_features=24,
        out_features=24,
        rope=rope_spec({"rope_theta": 500000.0}, 10),
        qk_norm=True,
        sliding_window=window,
    )
    ours = GQAAttention(spec, peer.state_dict(), norm_eps=1e-5)

    x, positions = rows(dtype, 9, 24), torch.arange(40, 49)
    context, block = x[:5], x[5:]
    distance = positions[5:, None] - positions[None, :]
    # The peer's own masks would let |q - k| reach W; the mask given here is the reading in which W counts the row itself.
    visible = distance.abs() < (window or 100)
    pair = angles(MuseGlimmerAssistantRotaryEmbedding(config), ours.rotary_emb, positions, dtype)
    due = peer(block[None], context[None], position_embeddings=pair, attention_mask=hidden(visible, dtype))[0][0]
    got = ours(block, positions[5:], context=(context, positions[:5]), causal=False)
    torch.testing.assert_close(got, due, **TOLERANCE[dtype])
    cache = KVCache()
    cache.append(*ours.kv(context, positions[:5]), positions[:5])
    cached = ours(block, positions[5:], cache=cache, update_cache=False, causal=False)
    torch.testing.assert_close(cached, due, **TOLERANCE[dtype])


def test_rms_norm_is_llamas_up_to_its_second_rounding(transformers: ModuleType) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    peer = LlamaRMSNorm(48, eps=1e-5)
    peer.weight.data = 1.0 + rows(torch.float32, 48)
    ours = RMSNorm(peer.weight, 1e-5)
    x = rows(torch.float32, 64, 48)
    torch.testing.assert_close(ours(x), peer(x), rtol=1e-6, atol=1e-7)
    tiny = x * 1e-3
    torch.testing.assert_close(ours(tiny), peer(tiny), rtol=1e-6, atol=1e-7)
    half, peer_half = ours.bfloat16()(x.bfloat16()), peer.bfloat16()(x.bfloat16())
    assert not torch.equal(half, peer_half)
    torch.testing.assert_close(half, peer_half, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
def test_gemma_norm_is_gemmas_bit_by_bit(dtype: torch.dtype, transformers: ModuleType) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    peer = Gemma2RMSNorm(48, eps=1e-6).to(dtype)
    peer.weight.data = rows(dtype, 48)
    x = rows(dtype, 64, 48)
    assert torch.equal(RMSNorm(peer.weight, 1e-6, "gemma")(x), peer(x))


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_gated_mlp_is_llamas(hidden_act: str, bias: bool, transformers: ModuleType) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=20, hidden_act=hidden_act, mlp_bias=bias)
    peer = filled(LlamaMLP(config), torch.float64)
    ours = GatedMLP.from_tensors(
        peer.state_dict(), in_features=32, intermediate_size=20, hidden_act=hidden_act, bias=bias
    )
    x = rows(torch.float64, 5, 32)
    torch.testing.assert_close(ours(x), peer(x), rtol=1e-12, atol=1e-12)
