"""EAGLE3 with DeepSeek's latent attention (Kimi K2.x and K3 heads).

The layer is EAGLE3's; only the attention differs: its two down projections read [embedding, hidden], 2H wide, and its RoPE is
interleaved on `qk_rope_head_dim` lanes. A yarn scaling dictionary is DeepSeek's kind, with `mscale` and `mscale_all_dim`.

Sources: SGLang `srt/models/kimi_k25_eagle3.py`, vLLM `deepseek_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, Family, ReferenceLayer, Signal, TensorSource
from pytest_specdecode.families.common import read_mla
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.eagle3 import (
    Eagle3Head,
    Eagle3Layer,
    canonical_eagle3,
    eagle3_tensors,
    is_mla,
    key_signals,
    label_signals,
    parallel_faults,
    parse_eagle3,
    width_signals,
)
from pytest_specdecode.spec import DraftSpec, LayerSpec, MLASpec, times

if TYPE_CHECKING:
    import torch


class Eagle3MLA(Family):
    """EAGLE3 with multi-head latent attention."""

    name = "eagle3-mla"
    title = "EAGLE3-MLA (Kimi K2.x)"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = (
        "an EAGLE3-MLA draft has one layer and interleaved RoPE on a latent; no engine has a stacked K/V path for it"
    )
    tiny: Mapping[str, Any] = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
        "draft_vocab_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
        "num_target_layers": 61,
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """Label, 2H-wide q_a_proj under an `fc`, or EAGLE3's keys beside `kv_lora_rank`."""
        return [
            *label_signals(view, self.name, mla=True),
            *width_signals(view, self.name, "layers.0.self_attn.q_a_proj.weight"),
            *(key_signals(view, self.name) if is_mla(view) else []),
        ]

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; a missing or null rank stays None."""
        return parse_eagle3(view, self.name, _attention)

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """EAGLE3's tensors with the latent projections."""
        return tuple(eagle3_tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer."""
        return Eagle3Layer(spec, layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Eagle3Head:
        """What stands around the layers, as in EAGLE3."""
        return Eagle3Head(spec, source)

    def run_head(self, spec: DraftSpec, head: Eagle3Head, states: torch.Tensor) -> Any:
        """The logits of the parallel heads, where there are any."""
        return head.parallel_logits(states) if head.parallel else None

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """See `parallel_faults`."""
        return parallel_faults(spec)

    def canonical(self, name: str, root: Section | None = None) -> str:
        """As EAGLE3."""
        return canonical_eagle3(name)


def _attention(view: ConfigView, index: int) -> MLASpec:
    hidden = view.layer.extent("hidden_size")
    return read_mla(view, in_features=times(2, hidden) if index == 0 else hidden)
