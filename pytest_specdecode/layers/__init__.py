"""Reference layers in eager torch: readable, in any floating dtype, float64 being the truth.

They are what a checkpoint's tensors are run through when a check needs numbers, and what faster implementations are
compared with. Parameters are frozen; `layer.double()` gives the truth of the same layer.
"""

from __future__ import annotations

from pytest_specdecode.layers.attention import KVCache, LatentCache, attend, visibility
from pytest_specdecode.layers.gqa import GQAAttention
from pytest_specdecode.layers.hyper import HyperConnection, StreamHead
from pytest_specdecode.layers.linear import Linear
from pytest_specdecode.layers.mla import MLAAttention, mla_scaling, require_q_lora_rank
from pytest_specdecode.layers.mlp import GatedMLP, PlainMLP
from pytest_specdecode.layers.moe import MoE
from pytest_specdecode.layers.norms import LayerNorm, RMSNorm
from pytest_specdecode.layers.rope import RotaryEmbedding, apply_rotary, inv_freq_and_scale, yarn_mscale
from pytest_specdecode.layers.shared_row import SharedRowAttention

__all__ = [
    "GQAAttention",
    "GatedMLP",
    "HyperConnection",
    "KVCache",
    "LatentCache",
    "LayerNorm",
    "Linear",
    "MLAAttention",
    "MoE",
    "PlainMLP",
    "RMSNorm",
    "RotaryEmbedding",
    "SharedRowAttention",
    "StreamHead",
    "apply_rotary",
    "attend",
    "inv_freq_and_scale",
    "mla_scaling",
    "require_q_lora_rank",
    "visibility",
    "yarn_mscale",
]
