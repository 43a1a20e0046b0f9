"""The stacked rows of DeepSeek-V4's layers against those that transformers' layers put in their cache.

What these catch: the norm over the unrotated lanes alone, or after the rotation; the first lanes turned for the last, halves for pairs;
a row that a window or a sink changes; the rope table of the compressing layers taken for that of the others.

The peer's row is taken where its attention hands it to the cache, so nothing of it is computed by a hand that wrote the stack.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_specdecode.errors import StackUnsupportedError
from pytest_specdecode.fused_kv import FusedLatentKV, eager_latent, fused_latent_reference
from pytest_specdecode.launch import triton_available
from pytest_specdecode.layers import RotaryEmbedding
from pytest_specdecode.numerics import assert_close
from pytest_specdecode.spec import RopeSpec

HIDDEN, HEAD_DIM, ROPE_DIM, TOKENS = 40, 24, 8, 6
BACKENDS = ["eager", *(["triton"] if triton_available() else [])]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def deepseek(transformers: ModuleType) -> ModuleType:
    """transformers' module of DeepSeek-V4."""
    return importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")


def peer_config(deepseek: ModuleType, layer_types: list[str]) -> Any:
    """A small configuration in which the two kinds of layers rotate differently."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    return deepseek.DeepseekV4Config(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        qk_rope_head_dim=ROPE_DIM,
        q_lora_rank=12,
        o_lora_rank=8,
        o_groups=2,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_layer_types=["moe"] * len(layer_types),
        sliding_window=3,
        index_n_heads=2,
        index_head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-4,
        rope_parameters=yarn,
        attn_implementation="eager",
    )


class Seen:
    """A cache that keeps what it is given, and gives it back."""

    rows: Tensor

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        assert keys is values
        self.rows = keys
        return keys, values


def peer_layers(deepseek: ModuleType, config: Any) -> list[nn.Module]:
    """One attention per layer, its weights drawn: the norm's around 1, so that they do not commute with the rotation."""
    generator = torch.Generator().manual_seed(5)
    layers = [deepseek.DeepseekV4Attention(config, index) for index in range(config.num_hidden_layers)]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        drawn = torch.randn(parameter.shape, generator=generator) / 4
        parameter.data = drawn + 1 if parameter.ndim == 1 else drawn
    return [layer.eval().requires_grad_(False) for layer in layers]


def peer_rows(deepseek: ModuleType, config: Any, layers: list[nn.Module], hidden: Tensor, positions: Tensor) -> Tensor:
    """`[L, T, head_dim]`: what each layer hands to its cache for one sequence."""
    rotary = deepseek.DeepseekV4RotaryEmbedding(config)
    angles = {kind: rotary(hidden[None], positions[None], layer_type=kind) for kind in ("main", "compress")}
    rows = []
    for layer in layers:
        cache = Seen()
        layer(hidden[None], angles, positions[None], None, past_key_values=cache)
        rows.append(cache.rows[0, 0])
    return torch.stack(rows)


def as_engines_name_it(layer: Any, rotary_emb: Any, **more: Any) -> Any:
    """A peer's attention under the names that the stack reads: the modules are the peer's own."""
    attn = SimpleNamespace(
        wkv=layer.kv_proj,
        kv_norm=layer.kv_norm,
        head_dim=layer.head_dim,
        qk_rope_head_dim=ROPE_DIM,
        rotary_emb=rotary_emb,
        compressor=layer.compressor,
        **more,
    )
    return SimpleNamespace(self_attn=attn)


def plain_rope() -> RotaryEmbedding:
    """The rotation of the layers that do not compress."""
    rope = RopeSpec(
        theta=1e4, rope_type="default", rotary_dim=ROPE_DIM, is_neox_style=False, max_position_embeddings=256
    )
    return RotaryEmbedding(rope, ROPE_DIM)


def drawn_context(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)) * scale
    return hidden, torch.tensor([0, 1, 7, 100, 7, 255])


def stacked(layers: list[Any], backend: str = "eager") -> FusedLatentKV:
    return FusedLatentKV(layers, layers[0].self_attn.rotary_emb, HEAD_DIM - ROPE_DIM, ROPE_DIM, "cpu", backend=backend)


# At the smaller scale the norm's epsilon is most of what the row is divided by.
@pytest.mark.parametrize("scale", [1.0, 1e-2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_those_of_the_peers_cache(deepseek: ModuleType, backend: str, scale: float) -> None:
    config = peer_config(deepseek, ["sliding_attention"] * 3)
    layers, (hidden, positions) = peer_layers(deepseek, config), drawn_context(scale)
    due = peer_rows(deepseek, config, layers, hidden, positions)
    ours = [as_engines_name_it(layer, rotary) for rotary in [plain_rope()] for layer in layers]
    path = stacked(ours, backend)
    assert path.latent_norm == "whole"
    rows, truth = path.compute(hidden, positions), fused_latent_reference(ours, hidden, positions)
    torch.testing.assert_close(rows, due, **CLOSE)
    torch.testing.assert_close(truth.float(), due, **CLOSE)
    # The stack is no further from the float64 truth than the peer's own layers are.
    assert_close(rows, truth, due, axes=("layer", "token", "lane"), reduction_sizes=(HIDDEN, HEAD_DIM))


def test_rows_in_bfloat16_are_as_near_the_truth_as_the_peers(deepseek: ModuleType) -> None:
    config = peer_config(deepseek, ["sliding_attention"] * 3)
    layers, (hidden, positions) = peer_layers(deepseek, config), drawn_context()
    layers, hidden = [layer.bfloat16() for layer in layers], hidden.bfloat16()
    due = peer_rows(deepseek, config, layers, hidden, positions)
    ours = [as_engines_name_it(layer, rotary) for rotary in [plain_rope()] for layer in layers]
    truth = fused_latent_reference(ours, hidden, positions)
    eager = eager_latent(ours, hidden, positions)
    axes, sums = ("layer", "token", "lane"), (HIDDEN, HEAD_DIM)
    for backend in BACKENDS:
        assert_close(stacked(ours, backend).compute(hidden, positions), truth, due, axes=axes, reduction_sizes=sums)
    # And what is called eager here rounds as the peer does.
    assert_close(eager, truth, due, axes=axes, reduction_sizes=sums)


@pytest.mark.parametrize(
    "wrong",
    [
        "norm over the unrotated lanes",
        "norm after the rotation",
        "first lanes turned",
        "halves turned",
        "no norm of k_pe",
    ],
)
def test_what_the_rows_are_not(deepseek: ModuleType, wrong: str) -> None:
    """Each near miss differs from the peer's rows by far more than the tests above allow."""
    config = peer_config(deepseek, ["sliding_attention"])
    layers, (hidden, positions) = peer_layers(deepseek, config), drawn_context()
    (due,) = peer_rows(deepseek, config, layers, hidden, positions)
    projection, norm = layers[0].kv_proj, layers[0].kv_norm
    still = HEAD_DIM - ROPE_DIM
    cos, sin = (each.float() for each in plain_rope().cos_sin(positions))

    def turned(lanes: Tensor, halves: bool = False) -> Tensor:
        first, second = lanes.chunk(2, -1) if halves else (lanes[..., 0::2], lanes[..., 1::2])
        parts = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2)

    def normed(row: Tensor, lanes: int) -> Tensor:
        inverse = torch.rsqrt(row[:, :lanes].square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return row * inverse * norm.weight

    row = projection(hidden)
    whole = normed(row, HEAD_DIM)
    got = {
        "norm over the unrotated lanes": lambda: torch.cat(
            [normed(row, still)[:, :still], turned(normed(row, still)[:, still:])], -1
        ),
        "norm after the rotation": lambda: normed(torch.cat([row[:, :still], turned(row[:, still:])], -1), HEAD_DIM),
        "first lanes turned": lambda: torch.cat([turned(whole[:, :ROPE_DIM]), whole[:, ROPE_DIM:]], -1),
        "halves turned": lambda: torch.cat([whole[:, :still], turned(whole[:, still:], halves=True)], -1),
        "no norm of k_pe": lambda: torch.cat([whole[:, :still], turned(row[:, still:])], -1),
    }[wrong]()
    torch.testing.assert_close(torch.cat([whole[:, :still], turned(whole[:, still:])], -1), due, **CLOSE)
    # At position 0 nothing turns, and some of the misses are none.
    assert ((got - due).abs().amax(dim=-1)[1:] > 1e-2).all()


@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_layers_that_compress_are_refused(deepseek: ModuleType, kind: str) -> None:
    """Their own row is made as the others', by another rope table; but their cache holds more than it."""
    config = peer_config(deepseek, [kind, kind])
    layers = peer_layers(deepseek, config)
    rotary = deepseek.DeepseekV4RotaryEmbedding(config)
    every = torch.arange(256)[None]
    table = torch.cat(rotary(torch.zeros(1), every, layer_type="compress"), dim=-1)[0]
    rope = SimpleNamespace(cos_sin_cache=table, is_neox_style=False, rotary_dim=ROPE_DIM)
    ours = [as_engines_name_it(layer, rope) for layer in layers]
    with pytest.raises(StackUnsupportedError, match="further rows that are made of several tokens each") as caught:
        stacked(ours)
    assert (caught.value.axis, caught.value.layer) == ("compressor", 0)
    hidden, positions = drawn_context()
    for attn in (layer.self_attn for layer in ours):
        attn.compressor = None
    for layer in layers:
        layer.compressor = None
    due = peer_rows(deepseek, config, layers, hidden, positions)
    torch.testing.assert_close(stacked(ours).compute(hidden, positions), due, **CLOSE)
