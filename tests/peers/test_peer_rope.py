"""RoPE of every scaling type against transformers.

What these catch: a formula misread in the same way by our code and by our hand-worked values; a type that transformers
gains and we do not know; fields that real files state (`truncate` false, `mscale` beside `mscale_all_dim`, integers for
floats) and that only one side reads. transformers computes in float32, which sets the tolerances: a power in float32 is
good to about 1e-6, and an angle to its position times that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from pytest_specdecode.layers import RotaryEmbedding, inv_freq_and_scale
from pytest_specdecode.spec import RopeSpec

KIMI = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
GPT_OSS = {**KIMI, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LLAMA = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PHI = {
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i * i for i in range(8)],
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    scaling: dict[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    head_dim: int = 64
    partial: float = 1.0
    length: int = 131072
    seq_len: int | None = None

    def spec(self) -> RopeSpec:
        return RopeSpec(
            theta=self.theta,
            rope_type=self.kind,
            rotary_dim=int(self.head_dim * self.partial),
            scaling=self.scaling,
            max_position_embeddings=self.length,
        )

    def config(self, transformers: ModuleType) -> Any:
        rope = {"rope_type": self.kind, "rope_theta": self.theta, **self.scaling}
        if self.partial != 1.0:
            rope["partial_rotary_factor"] = self.partial
        return transformers.LlamaConfig(
            hidden_size=4 * self.head_dim,
            num_attention_heads=4,
            head_dim=self.head_dim,
            max_position_embeddings=self.length,
            rope_parameters=rope,
        )


CASES = {
    "default": Case(kind="default"),
    "default-1e7": Case(kind="default", theta=1e7, head_dim=128),
    "linear": Case(kind="linear", scaling={"factor": 4.0}),
    "linear-partial": Case(kind="linear", scaling={"factor": 4.0}, partial=0.25),
    "dynamic-unset": Case(kind="dynamic", scaling={"factor": 2.0}, length=64),
    "dynamic-within": Case(kind="dynamic", scaling={"factor": 2.0}, length=64, seq_len=40),
    "dynamic-beyond": Case(kind="dynamic", scaling={"factor": 2.0}, length=64, seq_len=200),
    "yarn": Case(kind="yarn", scaling=KIMI, theta=50000.0),
    "yarn-qwen": Case(
        kind="yarn", scaling={"factor": 4.0, "original_max_position_embeddings": 32768}, theta=1e6, head_dim=128
    ),
    "yarn-kimi": Case(kind="yarn", scaling={**KIMI, "mscale": 1.0, "mscale_all_dim": 1.0}, theta=50000.0),
    "yarn-unequal-mscale": Case(kind="yarn", scaling={**KIMI, "mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn-lone-mscale": Case(kind="yarn", scaling={**KIMI, "mscale": 0.707}),
    "yarn-lone-mscale-all-dim": Case(kind="yarn", scaling={**KIMI, "mscale_all_dim": 1.0}),
    "yarn-attention-factor": Case(kind="yarn", scaling={**KIMI, "attention_factor": 0.9}),
    "yarn-gpt-oss": Case(kind="yarn", scaling=GPT_OSS, theta=150000.0),
    "yarn-partial": Case(kind="yarn", scaling=KIMI, partial=0.5),
    "yarn-short": Case(kind="yarn", scaling={**KIMI, "original_max_position_embeddings": 16}, head_dim=8),
    "yarn-point": Case(kind="yarn", scaling={**KIMI, "beta_fast": 1, "beta_slow": 1, "truncate": False}),
    "llama3": Case(kind="llama3", scaling=LLAMA, theta=500000.0, head_dim=128),
    "llama3-small": Case(kind="llama3", scaling={**LLAMA, "original_max_position_embeddings": 256}, head_dim=32),
    "longrope-short": Case(kind="longrope", scaling=PHI, head_dim=16, length=256, seq_len=64),
    "longrope-long": Case(kind="longrope", scaling=PHI, head_dim=16, length=256, seq_len=65),
    "longrope-factor": Case(kind="longrope", scaling={**PHI, "factor": 32.0}, head_dim=16, length=256),
    "longrope-no-stretch": Case(kind="longrope", scaling=PHI, head_dim=16, length=64),
    "longrope-attention-factor": Case(kind="longrope", scaling={**PHI, "attention_factor": 1.5}, head_dim=16),
    "proportional": Case(kind="proportional", scaling={"partial_rotary_factor": 0.25}, theta=1e6, head_dim=256),
    "proportional-factor": Case(kind="proportional", scaling={"partial_rotary_factor": 0.3, "factor": 8.0}),
    "proportional-whole": Case(kind="proportional"),
}


def peer(case: Case, transformers: ModuleType) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = case.config(transformers)
    if case.kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[case.kind](config, "cpu", seq_len=case.seq_len)


def test_every_type_of_the_peer_is_known_and_compared(transformers: ModuleType) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {case.kind for case in CASES.values()} >= set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_magnitude(name: str, transformers: ModuleType) -> None:
    case = CASES[name]
    due, due_scale = peer(case, transformers)
    got, scale = inv_freq_and_scale(case.spec(), case.seq_len)
    torch.testing.assert_close(got, due.double(), rtol=3e-6, atol=0)
    assert scale == pytest.approx(due_scale, rel=1e-12)


@pytest.mark.parametrize("name", ["yarn", "yarn-kimi", "yarn-unequal-mscale"])
def test_deepseek_yarn_is_yarn_unless_one_mscale_stands_alone(name: str, transformers: ModuleType) -> None:
    case = CASES[name]
    due, due_scale = peer(case, transformers)
    spec = RopeSpec(theta=case.theta, rope_type="deepseek_yarn", rotary_dim=64, scaling=case.scaling)
    got, scale = inv_freq_and_scale(spec)
    torch.testing.assert_close(got, due.double(), rtol=3e-6, atol=0)
    assert scale == pytest.approx(due_scale, rel=1e-12)


# Partial rotary is left out: Llama's own module ignores it for the default type, and the frequencies are compared above.
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.partial == 1.0])
def test_tables(name: str, transformers: ModuleType) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    case = CASES[name]
    positions = torch.arange(min(case.seq_len or 200, 200))
    cos, sin = LlamaRotaryEmbedding(case.config(transformers))(torch.zeros(1), positions[None])
    half = case.head_dim // 2
    ours = RotaryEmbedding(case.spec(), case.head_dim, seq_len=len(positions))
    ours._ensure_cos_sin_cache_length(len(positions) - 1)
    table = ours.cos_sin_cache[: len(positions)]
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=6e-5)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=6e-5)
