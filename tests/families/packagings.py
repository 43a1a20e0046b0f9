"""Every way in which a draft of each family is written to disk, as tiny drafts: for tests that go over all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_specdecode.families import FAMILIES
from pytest_specdecode.strategies import namings
from pytest_specdecode.strategies.checkpoints import joined
from pytest_specdecode.testing import random_tensors, stored_names, tiny_config

Tensors = dict[str, torch.Tensor]

#: A target with prediction layers of grouped-query attention.
DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
MIMO = {**DENSE, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
ERNIE = {**DENSE, "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_num_experts": 8}
QWEN = {
    **{key: value for key, value in DENSE.items() if key != "num_nextn_predict_layers"},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
}
MIMO_V2 = {
    **{key: value for key, value in DENSE.items() if key not in ("rms_norm_eps", "rope_theta")},
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "layernorm_epsilon": 1e-5,
    "swa_rope_theta": 10000,
    "rope_theta": 5000000,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "num_nextn_predict_layers": 2,
}
LONGCAT = {
    **tiny_config("mtp"),
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "ffn_hidden_size": 96,
    "num_layers": 3,
}
#: One layer that SGLang's exporter cut out of its target, whose first layers are dense.
CUT_OUT = {
    **tiny_config("mtp", first_k_dense_replace=3),
    "architectures": ["DeepseekV3ForCausalLMNextN"],
    "num_hidden_layers": 1,
}


@dataclass(frozen=True)
class Packaging:
    """A draft to write.

    Attributes:
        family: its name.
        what: the packaging, for people.
        config: `config.json`; the family's tiny one where None.
        names: patterns of names as the family writes them, with what they are on disk.
        joined: q, k and v are one tensor.
    """

    family: str
    what: str = "tiny"
    config: dict[str, Any] | None = None
    names: dict[str, str] = field(default_factory=dict)
    joined: bool = False

    @property
    def id(self) -> str:
        return f"{self.family}-{self.what}"

    @property
    def whole(self) -> dict[str, Any]:
        return tiny_config(self.family) if self.config is None else self.config

    def tensors(self) -> Tensors:
        """The draft's tensors by canonical name."""
        found = random_tensors(self.whole, self.family)
        return joined(found) if self.joined else found

    def rename(self) -> Callable[[str], str]:
        """From canonical names to those on disk."""
        released = stored_names(self.whole, self.family)

        def stored(name: str) -> str:
            found = released(name)
            for pattern, new in self.names.items():
                if re.match(pattern, found):
                    return re.sub(pattern, new, found, count=1)
            return found

        return stored


def packaged(family: str, **own: Any) -> dict[str, Any]:
    """The family's tiny draft as the speculators library writes it."""
    plain = tiny_config(family)
    kept = {key: plain[key] for key in ("block_size", "mask_token_id", "draft_vocab_size") if key in plain}
    return {
        "architectures": plain["architectures"],
        "speculators_model_type": family,
        "transformer_layer_config": {key: value for key, value in plain.items() if key != "architectures"},
        "speculators_config": {"algorithm": family},
        **kept,
        **own,
    }


_MODEL = (
    "eagle1",
    "eagle3",
    "eagle3-mla",
    "peagle",
    "eagle4",
    "dflash",
    "dflash2",
    "domino",
    "dflare",
    "dspark",
    "xpress",
)
_TAPPED = {"aux_hidden_state_layer_ids": [2, 10, 18]}
_EMBEDDED_DSPARK: dict[str, Any] = {
    key: value
    for key, value in tiny_config("dspark").items()
    if not key.startswith(("markov", "confidence", "enable_confidence"))
    and key not in ("target_layer_ids", "mask_token_id", "sample_from_anchor", "block_size", "layer_types")
    and key not in ("rope_parameters", "num_target_layers")
} | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "n_routed_experts": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 1,
    "hc_mult": 2,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 8,
    "sliding_window": 128,
    "rope_theta": 10000,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [17, 18, 19],
    "dspark_markov_rank": 16,
}
_V4 = {
    **{key: value for key, value in _EMBEDDED_DSPARK.items() if not key.startswith("dspark_")},
    "num_hidden_layers": 3,
}

PACKAGINGS: tuple[Packaging, ...] = (
    *(Packaging(family.name) for family in FAMILIES),
    *(Packaging(name, "prefixed", names=namings.PREFIXED) for name in (*_MODEL, "gemma4-assistant")),
    *(Packaging(name, "midlayer", names=namings.MIDLAYER) for name in ("eagle3", "eagle3-mla", "peagle", "eagle4")),
    *(Packaging(name, "joined", joined=True) for name in namings.JOINED),
    Packaging("eagle1", "mistral", names=namings.MISTRAL),
    Packaging(
        "eagle1", "converted", {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": tiny_config("eagle1")}
    ),
    Packaging("eagle1", "minicpm", names=namings.MINICPM),
    Packaging("eagle3", "speculators", packaged("eagle3", eagle_aux_hidden_state_layer_ids=[2, 8, 13])),
    Packaging("peagle", "speculators", packaged("peagle", eagle_aux_hidden_state_layer_ids=[2, 8, 13])),
    *(
        Packaging(name, "speculators", packaged(name, **_TAPPED, mask_token_id=511, **own))
        for name, own in {
            "dflash": {},
            "dspark": {
                key: value for key, value in tiny_config("dspark").items() if key.startswith(("markov", "conf"))
            },
        }.items()
    ),
    Packaging("dflash", "encoder", names=namings.ENCODER),
    Packaging("dflash2", "codebook-weights", names=namings.CODEBOOK_WEIGHTS),
    Packaging("dspark", "modelopt", names=namings.MODELOPT_DSPARK),
    Packaging("dspark", "embedded", _EMBEDDED_DSPARK),
    Packaging("mtp", "nested", names=namings.NESTED_MTP),
    Packaging("mtp", "mtp-block", names=namings.MTP_BLOCK),
    Packaging("mtp", "cut-out", CUT_OUT),
    Packaging("mtp", "mimo", MIMO),
    Packaging("mtp", "mimo-joined", MIMO, joined=True),
    Packaging("mtp", "mimo-v2", MIMO_V2),
    Packaging("mtp", "mimo-v2-joined", MIMO_V2, joined=True),
    Packaging("mtp", "longcat", LONGCAT),
    Packaging("mtp", "ernie", ERNIE),
    Packaging("mtp", "qwen", QWEN),
    Packaging("mtp", "qwen-nested", QWEN, names={r"mtp\.": "model.mtp."}),
    Packaging("mtp", "deepseek-v4", _V4),
    Packaging("mtp", "speculators", packaged("mtp")),
    Packaging("medusa", "upstream", names=namings.MEDUSA_UPSTREAM),
    Packaging("medusa", "modelopt", names=namings.MEDUSA_MODELOPT),
    Packaging("mlp-speculator", "prefixed", names=namings.SPECULATOR),
)
