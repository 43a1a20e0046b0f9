"""Small specs and tensors for the reference layers; everything is drawn from a seed, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_specdecode.spec import GQASpec, MLASpec, RopeSpec

Draw = Callable[..., Tensor]


@pytest.fixture
def draw() -> Draw:
    """`draw(*shape)`: normal float64 numbers, the next ones of a fixed seed; values below 1 keep softmaxes soft."""
    generator = torch.Generator().manual_seed(20)

    def numbers(*shape: int, scale: float = 0.4) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    return numbers


@pytest.fixture
def gqa_spec() -> Callable[..., GQASpec]:
    """A spec of 4 query heads over 2 KV heads of 6 lanes, 4 of which rotate; any field may be replaced."""

    def spec(**fields: Any) -> GQASpec:
        rope = RopeSpec(theta=100.0, rotary_dim=4, max_position_embeddings=512)
        defaults = {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 6,
            "in_features": 10,
            "out_features": 8,
            "rope": rope,
        }
        return GQASpec(**{**defaults, "qk_norm": True, **fields})

    return spec


@pytest.fixture
def gqa_tensors(draw: Draw) -> Callable[[GQASpec], dict[str, Tensor]]:
    """The tensors that a `GQASpec` asks for, by local name."""

    def tensors(spec: GQASpec) -> dict[str, Tensor]:
        rows = {"q": spec.num_heads * spec.head_dim, "k": spec.num_kv_heads * spec.head_dim}
        rows["v"] = rows["k"]
        made = {f"{name}_proj.weight": draw(size, spec.in_features) for name, size in rows.items()}
        made["o_proj.weight"] = draw(spec.out_features, rows["q"])
        if spec.qk_norm:
            made |= {f"{name}_norm.weight": 1.0 + draw(spec.head_dim) for name in ("q", "k")}
        if spec.sink:
            made["attention_sink_bias"] = draw(spec.num_heads, scale=1.0)
        if spec.qkv_bias:
            made |= {f"{name}_proj.bias": draw(size) for name, size in rows.items()}
        if spec.o_bias:
            made["o_proj.bias"] = draw(spec.out_features)
        return made

    return tensors


@pytest.fixture
def mla_spec() -> Callable[..., MLASpec]:
    """A spec of 4 heads with widths that are all different, so that a mixed-up one cannot pass; fields may be replaced.

    `scaling` replaces the fields of a YaRN RoPE; None means an unscaled one.
    """

    def spec(scaling: Mapping[str, Any] | None = None, **fields: Any) -> MLASpec:
        rope = RopeSpec(
            theta=100.0,
            rope_type="default" if scaling is None else "yarn",
            rotary_dim=4,
            is_neox_style=False,
            scaling=scaling or {},
            max_position_embeddings=512,
        )
        defaults = {
            "num_heads": 4,
            "q_lora_rank": 9,
            "kv_lora_rank": 7,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "in_features": 12,
            "out_features": 8,
            "rope": rope,
        }
        return MLASpec(**{**defaults, **fields})

    return spec


@pytest.fixture
def mla_tensors(draw: Draw) -> Callable[[MLASpec], dict[str, Tensor]]:
    """The tensors that an `MLASpec` asks for, by local name."""

    def tensors(spec: MLASpec) -> dict[str, Tensor]:
        queries = spec.num_heads * spec.qk_head_dim
        query = (
            {"q_proj.weight": draw(queries, spec.in_features)}
            if spec.whole_query
            else {
                "q_a_proj.weight": draw(spec.q_lora_rank, spec.in_features),
                "q_a_layernorm.weight": 1.0 + draw(spec.q_lora_rank),
                "q_b_proj.weight": draw(queries, spec.q_lora_rank),
            }
        )
        return {
            **query,
            "kv_a_proj_with_mqa.weight": draw(spec.kv_lora_rank + spec.qk_rope_head_dim, spec.in_features),
            "kv_a_layernorm.weight": 1.0 + draw(spec.kv_lora_rank),
            "kv_b_proj.weight": draw(spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
            "o_proj.weight": draw(spec.out_features, spec.num_heads * spec.v_head_dim),
        }

    return tensors
