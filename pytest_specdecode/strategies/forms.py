"""The forms in which drafts are published: one entry per family, packaging and layout of `config.json`, and how to draw one.

A form starts from a whole small configuration, most often the one that the family itself keeps for tests, and says what may vary in it and
what must follow. So a drawn configuration has every key that a real file of its form has, and only the numbers are small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pytest_specdecode.testing import tiny_config

Config = dict[str, Any]
T = TypeVar("T")

#: Sizes and options that are drawn wherever a configuration states them, for its layers or at top level, plainest first.
DRAWN: Mapping[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1, 2, 3),
    "hidden_size": (24, 48, 72),
    "intermediate_size": (16, 24, 40),
    "vocab_size": (64, 96, 128),
    "rms_norm_eps": (1e-6, 1e-5),
    "attention_bias": (False, True),
    "max_position_embeddings": (64, 4096),
    "q_lora_rank": (4, 8, 12),
    "kv_lora_rank": (4, 8, 16),
    "qk_nope_head_dim": (4, 8),
    "v_head_dim": (4, 8),
    "qk_rope_head_dim": (2, 4, 8),
    "num_nextn_predict_layers": (1, 2),
    "num_heads": (1, 2, 3),
    "hydra_num_heads": (1, 2, 3),
    "hydra_num_layers": (1, 2),
    "markov_rank": (4, 8),
    "xpress_rank": (4, 8),
    "emb_dim": (24, 48),
    "inner_dim": (16, 24),
}
KV_HEADS = (1, 2, 3)
QUERY_GROUPS = (1, 2)
HEAD_DIMS = (4, 8, 16)
THETAS = (10000.0, 500000.0, 1000000.0)
DTYPES = ("bfloat16", "float16", "float32")
DRAFT_VOCABULARIES = (16, 24)
TARGET_DEPTHS = (8, 12, 20)
BLOCK_SIZES = (4, 7, 8)
WINDOWS = (8, 16)

#: Scalings as a file states them, plainest first; `None` is the null of a file without one.
SCALINGS: tuple[Config | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of `config.json`.

    Attributes:
        family: the family's name.
        packaging: as its spec says: `plain`, `speculators` or `embedded`.
        name: what tells it from the family's other forms of that packaging; empty for the usual one.
        base: makes the whole configuration to start from.
        fixed: keys of `DRAWN`, and `heads`, `rope`, that keep what `base` states.
        finish: draws what only this form has, in place.
    """

    family: str
    packaging: str = "plain"
    name: str = ""
    base: Callable[[], Config]
    fixed: tuple[str, ...] = ()
    finish: Callable[[Picks, Config, Mapping[str, Any]], None] = lambda pick, config, wishes: None

    @property
    def id(self) -> str:
        """Unique among `FORMS`."""
        return "-".join(part for part in (self.family, self.packaging, self.name) if part)


class Picks:
    """Drawn bytes, one for each thing that is picked.

    All forms are drawn from as many bytes, whatever they use of them. So no form is a shorter example than another, a byte stands for the
    same choice before and after a shrink, and an example shrinks byte by byte to zeros, which pick the plainest of everything. As one
    string it is also drawn and shrunk many times faster than choice by choice.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)

    def __call__(self, options: Sequence[T]) -> T:
        """One of `options`; the first where the byte is 0."""
        return options[next(self._numbers) % len(options)]


#: More than any form picks, with what is picked beside it.
_MOST_PICKS = 32


def picks() -> SearchStrategy[Picks]:
    """Enough for one form and what is picked beside it."""
    return st.binary(min_size=_MOST_PICKS, max_size=_MOST_PICKS).map(Picks)


def layer_section(config: Config) -> Config:
    """Where the layers' fields stand."""
    nested = (config.get(key) for key in ("transformer_layer_config", "model", "text_config"))
    found: Config = next((value for value in nested if isinstance(value, dict)), config)
    return found


def drawn(pick: Picks, form: Form, wishes: Mapping[str, Any]) -> Config:
    """A configuration of `form`.

    Args:
        pick: what is picked from; forms share it with whatever is drawn beside them.
        form: one of `FORMS`.
        wishes: `sliding` and `reduced`, true or false, where the caller needs layers that slide, or a reduced vocabulary; `taps`, the
            least number of tapped layers of a block draft; `inner_taps`, true where EAGLE3 must not tap the target's last state.
    """
    config = copy.deepcopy(form.base())
    layer = layer_section(config)
    for section in [layer] if layer is config else [layer, config]:
        for key, values in DRAWN.items():
            if key in section and key not in form.fixed:
                section[key] = pick(values)
    if "heads" not in form.fixed and "num_attention_heads" in layer:
        _heads(pick, layer)
    if "rope" not in form.fixed:
        _rope(pick, layer)
    for section in (config, layer):
        for key in ("torch_dtype", "dtype"):
            if key in section and "dtype" not in form.fixed:
                section[key] = pick(DTYPES)
    form.finish(pick, config, wishes)
    return config


def _heads(pick: Picks, layer: Config) -> None:
    """Heads that divide; where no width is stated, one that the hidden size gives."""
    heads = pick(KV_HEADS)
    group = pick(QUERY_GROUPS)
    latent = "kv_lora_rank" in layer
    layer["num_attention_heads"] = heads * group
    if "num_key_value_heads" in layer:
        layer["num_key_value_heads"] = heads * group if latent else heads
    if latent:
        return
    width = pick(HEAD_DIMS)
    if "head_dim" in layer:
        layer["head_dim"] = width
    else:
        layer["hidden_size"] = heads * group * width


def _rope(pick: Picks, layer: Config) -> None:
    for section in (layer, layer.get("rope_parameters")):
        if isinstance(section, dict) and "rope_theta" in section:
            section["rope_theta"] = pick(THETAS)
    if layer.get("rope_scaling", ...) is None and "kv_lora_rank" not in layer:
        layer["rope_scaling"] = copy.deepcopy(pick(SCALINGS))


# --- what only some forms have ------------------------------------------------------------------------------------------------------------


def _reduced(pick: Picks, config: Config, wishes: Mapping[str, Any], key: str = "draft_vocab_size") -> None:
    """A vocabulary of the draft's own, or the target's whole one."""
    whole = layer_section(config)["vocab_size"]
    reduced = pick((False, True)) if wishes.get("reduced") is None else wishes["reduced"]
    config[key] = pick(DRAFT_VOCABULARIES) if reduced else whole


def _outputs(pick: Picks, depth: int, *, first: int = 0, least: int = 1, most: int = 4) -> list[int]:
    """Layers of a target whose outputs feed the draft, rising from `first` or later."""
    count = pick(range(least, most + 1))
    outputs: list[int] = []
    for left in range(count - 1, -1, -1):
        outputs.append(pick(range(outputs[-1] + 1 if outputs else first, depth - left)))
    return outputs


def _usual_states(depth: int) -> list[int]:
    """States entering layers that EAGLE3 taps where nobody says otherwise."""
    return [2, depth // 2, depth - 3]


def _eagle3(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    depth = pick(TARGET_DEPTHS)
    outputs = _outputs(pick, depth - bool(wishes.get("inner_taps")), least=2)
    config["num_target_layers"] = depth
    config["eagle_aux_hidden_state_layer_ids"] = [id + 1 for id in outputs]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = outputs
    if len(outputs) != 3:
        config["num_aux_hidden_states"] = len(outputs)
    _reduced(pick, config, wishes)


def _usual_taps(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    depth = pick(TARGET_DEPTHS)
    config |= {"num_target_layers": depth, "draft_vocab_size": config["vocab_size"]}
    for section in (config, config["eagle_config"]):
        if "eagle_aux_hidden_state_layer_ids" in section:
            section["eagle_aux_hidden_state_layer_ids"] = _usual_states(depth)


def _peagle(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    _usual_taps(pick, config, wishes)
    _reduced(pick, config, wishes)
    config["mask_token_id"] = config["vocab_size"] - 1


def _eagle4(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    depth = pick(TARGET_DEPTHS)
    config["num_target_layers"] = depth
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = _usual_states(depth)
    config["draft_vocab_size"] = config["vocab_size"]
    config["target_hidden_size"] = config["hidden_size"]


def _block(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    """Block size, mask token, taps and layer types of a plain block draft, wherever the base states them."""
    layer = layer_section(config)
    depth, size = pick(TARGET_DEPTHS), pick(BLOCK_SIZES)
    # States counted from 1 would look like outputs that were copied from the other packaging.
    outputs = _outputs(pick, depth, first=int("aux_hidden_state_layer_ids" in config), least=wishes.get("taps", 1))
    due = {
        "block_size": size,
        "mask_token_id": layer["vocab_size"] - 1,
        "target_layer_ids": outputs,
        "num_target_layers": depth,
        "aux_hidden_state_layer_ids": [id + 1 for id in outputs],
    }
    for section in (config, config.get("dflash_config", {})):
        section.update({key: value for key, value in due.items() if key in section})
    if config.get("speculators_model_type") == "xpress":
        _reduced(pick, config, wishes)
    elif "draft_vocab_size" in config:
        # Not every engine reads a reduced one of these.
        config["draft_vocab_size"] = layer["vocab_size"]
    if "layer_types" in layer:
        _layer_types(pick, config, wishes)
    if "speculators_config" in config:
        tokens = size if config.get("sample_from_anchor") else size - 1
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens


def _layer_types(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    """All layers full, or all sliding where the file says what rows of a block then see."""
    layer = layer_section(config)
    # Not every engine reads the packaging's key for DSpark.
    may_slide = "is_causal" in config or "sliding_window_non_causal" in config
    may_slide = may_slide and config.get("speculators_model_type") != "dspark"
    slides = may_slide and (pick((False, True)) if wishes.get("sliding") is None else wishes["sliding"])
    layer["layer_types"] = ["sliding_attention" if slides else "full_attention"] * layer["num_hidden_layers"]
    if slides:
        layer |= {"sliding_window": pick(WINDOWS), "use_sliding_window": True}


def _dflash2(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    _block(pick, config, wishes)
    place = config.get("dflash_config", config)
    place |= {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": pick((2, 4))}


def _packaged_eagle3(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    depth = pick(TARGET_DEPTHS)
    config["eagle_aux_hidden_state_layer_ids"] = _usual_states(depth)
    _reduced(pick, config, wishes)
    if "mask_token_id" in config:
        config["mask_token_id"] = layer_section(config)["vocab_size"] - 1


def _medusa(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    _reduced(pick, config, wishes, "truncated_vocab_size")


def _embedded_medusa(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    config["medusa_num_heads"] = pick((1, 2, 3))
    config["medusa_num_layers"] = pick((1, 2))


def _embedded_dspark(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    depth = pick(TARGET_DEPTHS)
    config |= {
        "num_hidden_layers": depth,
        "dspark_block_size": pick(BLOCK_SIZES),
        "dspark_noise_token_id": config["vocab_size"] - 1,
        "dspark_target_layer_ids": _outputs(pick, depth),
    }


def _stages(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    stages = pick((1, 2, 3))
    config |= {"n_predict": stages, "top_k_tokens_per_head": [4, 3, 2][:stages]}


def _cut_out(pick: Picks, config: Config, wishes: Mapping[str, Any]) -> None:
    config["num_hidden_layers"] = 1


# --- what the forms start from ------------------------------------------------------------------------------------------------------------


def _tiny(family: str, **changes: Any) -> Callable[[], Config]:
    return lambda: tiny_config(family, **changes)


def _packaged(family: str, architecture: str, *dropped: str, **own: Any) -> Callable[[], Config]:
    """The family's tiny draft as the speculators library writes it: the layers' fields in an object of their own."""

    def base() -> Config:
        plain = tiny_config(family)
        outside = {"architectures", "dflash_config", "eagle_config", "eagle_aux_hidden_state_layer_ids", "is_causal"}
        outside |= {"num_target_layers", "target_layer_ids", "block_size", "mask_token_id", "draft_vocab_size"}
        outside |= {"torch_dtype", "dtype", "tie_word_embeddings", "norm_before_residual", *own, *dropped}
        return {
            "architectures": [architecture],
            "speculators_model_type": family,
            "speculators_version": "0.9.0",
            **own,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "transformer_layer_config": {key: value for key, value in plain.items() if key not in outside},
            "speculators_config": {
                "algorithm": family,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
            },
        }

    return base


#: A target with prediction layers of grouped-query attention.
_DENSE: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
_MIMO_V2: Mapping[str, Any] = {
    **{key: value for key, value in _DENSE.items() if key != "rms_norm_eps"},
    "layernorm_epsilon": 1e-5,
    "swa_rope_theta": 10000.0,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 8,
    "swa_v_head_dim": 4,
    "partial_rotary_factor": 0.5,
    "attention_value_scale": 0.5,
    "add_swa_attention_sink_bias": True,
}
#: DeepSeek-V4, whose stages are of one kind for prediction and of another for DSpark.
_V4: Mapping[str, Any] = {
    **{key: value for key, value in _DENSE.items() if key != "intermediate_size"},
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "head_dim": 8,
    "q_lora_rank": 4,
    "o_lora_rank": 4,
    "o_groups": 2,
    "n_routed_experts": 2,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 1,
    "hc_mult": 2,
    "qk_rope_head_dim": 4,
    "sliding_window": 16,
    "num_nextn_predict_layers": 1,
}


def _target(base: Mapping[str, Any], architecture: str, model_type: str, **own: Any) -> Callable[[], Config]:
    return lambda: {**base, "architectures": [architecture], "model_type": model_type, **own}


_ONE = ("num_hidden_layers",)
_STAGE = (*_ONE, "attention_bias", "heads", "qk_rope_head_dim")
_BLOCK_KEYS: Mapping[str, Any] = {
    "aux_hidden_state_layer_ids": [2],
    "block_size": 4,
    "draft_vocab_size": 64,
    "mask_token_id": 63,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
}

#: Every form, a family's usual one first, families in the order of the documentation.
FORMS: tuple[Form, ...] = (
    Form(family="eagle1", base=_tiny("eagle1"), fixed=_ONE),
    Form(
        family="eagle1",
        name="nested",
        base=lambda: {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": tiny_config("eagle1")},
        fixed=_ONE,
    ),
    Form(family="eagle3", base=_tiny("eagle3"), fixed=(*_ONE, "attention_bias"), finish=_eagle3),
    Form(
        family="eagle3",
        packaging="speculators",
        base=_packaged(
            "eagle3",
            "Eagle3DraftModel",
            eagle_aux_hidden_state_layer_ids=[2],
            draft_vocab_size=64,
            norm_before_residual=True,
        ),
        fixed=(*_ONE, "attention_bias"),
        finish=_packaged_eagle3,
    ),
    Form(family="eagle3-mla", base=_tiny("eagle3-mla"), fixed=_ONE, finish=_usual_taps),
    Form(family="peagle", base=_tiny("peagle"), finish=_peagle),
    Form(
        family="peagle",
        packaging="speculators",
        base=_packaged(
            "peagle",
            "PEagleDraftModel",
            eagle_aux_hidden_state_layer_ids=[2],
            draft_vocab_size=64,
            mask_token_id=63,
            norm_before_residual=False,
        ),
        finish=_packaged_eagle3,
    ),
    Form(family="eagle4", base=_tiny("eagle4"), fixed=_ONE, finish=_eagle4),
    Form(family="dflash", base=_tiny("dflash"), finish=_block),
    Form(
        family="dflash",
        packaging="speculators",
        base=_packaged("dflash", "DFlashDraftModel", **_BLOCK_KEYS),
        finish=_block,
    ),
    Form(family="dflash2", base=_tiny("dflash2"), finish=_dflash2),
    Form(
        family="dflash2",
        packaging="speculators",
        base=_packaged(
            "dflash2",
            "DFlash2DraftModel",
            **_BLOCK_KEYS,
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=4,
            selector_top_k=2,
        ),
        finish=_dflash2,
    ),
    Form(family="domino", base=_tiny("domino"), finish=_block),
    Form(family="dflare", base=_tiny("dflare"), finish=_block),
    Form(family="dspark", base=_tiny("dspark"), fixed=("attention_bias", "dtype"), finish=_block),
    Form(
        family="dspark",
        packaging="speculators",
        base=_packaged(
            "dspark",
            "DSparkDraftModel",
            **{**_BLOCK_KEYS, "sample_from_anchor": True},
            markov_rank=4,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
        fixed=("attention_bias", "dtype"),
        finish=_block,
    ),
    Form(
        family="dspark",
        packaging="embedded",
        base=lambda: {
            **_V4,
            "dspark_block_size": 4,
            "dspark_noise_token_id": 63,
            "dspark_target_layer_ids": [0],
            "dspark_markov_rank": 4,
        },
        fixed=_STAGE,
        finish=_embedded_dspark,
    ),
    Form(family="xpress", packaging="speculators", base=_tiny("xpress"), finish=_block),
    Form(family="mtp", packaging="embedded", base=_tiny("mtp"), fixed=_ONE),
    Form(
        family="mtp",
        packaging="embedded",
        name="mimo",
        base=_target(_DENSE, "MiMoForCausalLM", "mimo", attention_bias=True, num_nextn_predict_layers=1),
        fixed=(*_ONE, "attention_bias"),
    ),
    Form(
        family="mtp",
        packaging="embedded",
        name="mimo-v2",
        base=_target(_MIMO_V2, "MiMoV2FlashForCausalLM", "mimo_v2_flash", num_nextn_predict_layers=2),
        fixed=(*_ONE, "heads"),
    ),
    Form(
        family="mtp",
        packaging="embedded",
        name="longcat",
        base=lambda: {
            **tiny_config("mtp"),
            "architectures": ["LongcatFlashForCausalLM"],
            "model_type": "longcat_flash",
            "ffn_hidden_size": 24,
            "num_layers": 3,
        },
        fixed=(*_ONE, "num_nextn_predict_layers"),
    ),
    Form(
        family="mtp",
        packaging="embedded",
        name="ernie",
        base=_target(_DENSE, "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", moe_num_experts=2, num_nextn_predict_layers=1),
        fixed=_ONE,
    ),
    Form(
        family="mtp",
        packaging="embedded",
        name="qwen",
        base=_target(_DENSE, "Qwen3_5ForCausalLM", "qwen3_5_text", mtp_num_hidden_layers=1),
        fixed=_ONE,
    ),
    Form(family="mtp", packaging="embedded", name="deepseek-v4", base=lambda: dict(_V4), fixed=_STAGE),
    Form(
        family="mtp",
        base=_tiny("mtp", architectures=["DeepseekV3ForCausalLMNextN"], first_k_dense_replace=3),
        fixed=(*_ONE, "num_nextn_predict_layers"),
        finish=_cut_out,
    ),
    Form(
        family="mtp",
        packaging="speculators",
        base=_packaged("mtp", "DeepseekV3ForCausalLM"),
        fixed=(*_ONE, "num_nextn_predict_layers"),
    ),
    Form(
        family="gemma4-assistant",
        base=_tiny("gemma4-assistant"),
        fixed=("heads", "rope", *_ONE, "hidden_size"),
    ),
    Form(family="medusa", base=_tiny("medusa"), finish=_medusa),
    Form(
        family="medusa",
        packaging="embedded",
        base=_target(_DENSE, "LlamaForCausalLM", "llama", medusa_num_heads=1, medusa_num_layers=1),
        fixed=_ONE,
        finish=_embedded_medusa,
    ),
    Form(family="hydra", base=_tiny("hydra")),
    Form(family="mlp-speculator", base=_tiny("mlp-speculator"), finish=_stages),
)
