"""What an engine sees of a `config.json` once transformers has read it, and the small functions that statements of engines share.

SGLang 0.5.23 (transformers 5.19) and vLLM 0.33.0 (5.16 to 5.20) read a plain draft through transformers' configuration class of its
`model_type`. That class moves the rotary fields together, fills in a base and, for Qwen, drops a window that is not switched on, before
any of the engine's own code looks. Tried with transformers 5.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pytest_specdecode.engines.base import Reads, at
from pytest_specdecode.families import Draft
from pytest_specdecode.families.quantised import PLAIN_FLOATS
from pytest_specdecode.fused_kv.stack import normal_scaling
from pytest_specdecode.spec import MLASpec

#: transformers' classes for what draft layers are labelled as, and the base that each fills in where the file states none.
THETA_DEFAULTS: Mapping[str, float] = {
    "llama": 10_000.0,
    "mistral": 10_000.0,
    "qwen2": 10_000.0,
    "qwen3": 10_000.0,
    "qwen3_moe": 10_000.0,
    "deepseek_v3": 10_000.0,
    "gpt_oss": 150_000.0,
    "lfm2": 1_000_000.0,
    "mixtral": 1_000_000.0,
}

#: The epsilon that each class fills in where the file states none, tried likewise.
EPS_DEFAULTS: Mapping[str, float] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "deepseek_v3"), 1e-6),
    **dict.fromkeys(("mixtral", "gpt_oss", "lfm2", "phi3", "glm_moe_dsa", "llama4_text", "cohere"), 1e-5),
}

#: Decoders' model types for which transformers 5.15.0 has a configuration class, then those for which engines bring one themselves.
_DECODERS = """
afmoe apertus arcee aria_text axk1 axk2 bamba bitnet bloom blt codegen cohere cohere2 cohere2_moe ctrl cwm dbrx deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
falcon_mamba flex_olmo gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified
gemma4_unified_assistant gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt2 gpt_bigcode gpt_neo
gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax inkling_text jais2 jamba jetmoe laguna lfm2 lfm2_moe llama llama4 llama4_text
longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
mistral3 mistral4 mixtral mllama mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_5_omni_text qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl qwen3_vl_moe qwen3_vl_moe_text
qwen3_vl_text recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu zamba zamba2 zaya
eagle hydra k3_dspark kimi_k2 kimi_k25 kimi_k3 kimi_linear medusa minicpm mlp_speculator speculators
"""
MODEL_TYPES = frozenset(_DECODERS.split())

#: Classes that drop `sliding_window` unless `use_sliding_window` is true.
_DROPS_WINDOW = ("qwen2", "qwen3", "qwen3_moe")

#: Fields that every configuration class of transformers refuses a null in, being typed as plain numbers and booleans.
_NO_NULLS = """
hidden_size initializer_range intermediate_size max_position_embeddings num_attention_heads num_hidden_layers tie_word_embeddings
use_cache vocab_size
"""

#: Further ones by `model_type`, found by giving each class of transformers 5.15.0 a null for each of its fields.
_OWN_NO_NULLS = {
    "llama": "attention_bias hidden_act mlp_bias rms_norm_eps",
    "mistral": "attention_dropout hidden_act num_key_value_heads rms_norm_eps",
    "mixtral": "attention_dropout hidden_act num_key_value_heads num_local_experts num_experts_per_tok output_router_logits rms_norm_eps",
    "qwen2": "attention_dropout hidden_act max_window_layers rms_norm_eps use_sliding_window",
    "qwen3": "attention_bias attention_dropout head_dim hidden_act max_window_layers rms_norm_eps use_sliding_window",
    "qwen3_moe": "attention_bias attention_dropout decoder_sparse_step hidden_act moe_intermediate_size norm_topk_prob num_experts "
    "num_experts_per_tok num_key_value_heads output_router_logits rms_norm_eps use_sliding_window",
    "deepseek_v3": "attention_bias hidden_act kv_lora_rank moe_intermediate_size n_routed_experts n_shared_experts qk_nope_head_dim "
    "qk_rope_head_dim rms_norm_eps routed_scaling_factor",
    "gpt_oss": "attention_bias attention_dropout head_dim hidden_act num_experts_per_tok num_key_value_heads num_local_experts "
    "rms_norm_eps",
    "lfm2": "conv_L_cache conv_bias norm_eps num_key_value_heads",
}

#: The keys in which each `model_type`'s class refuses a null.
NO_NULLS: Mapping[str, frozenset[str]] = {
    model_type: frozenset((*_NO_NULLS.split(), *own.split())) for model_type, own in _OWN_NO_NULLS.items()
}

_CLASSES = "transformers' configuration classes, modeling_rope_utils.py"


#: Model types of EAGLE-1 drafts whose layers have classes of their own.
_OWN_CLASSES = ("llama4", "llama4_text", "cohere", "cohere2")


def plain(draft: Draft) -> bool:
    """Whether the draft is written as an ordinary Hugging Face checkpoint of its own."""
    return draft.spec is not None and draft.spec.packaging == "plain"


def latent(draft: Draft) -> bool:
    """Whether the draft's layers have latent attention, which every engine rotates by interleaved pairs."""
    spec = draft.spec
    return spec is not None and bool(spec.layers) and isinstance(spec.layers[0].attention, MLASpec)


def llama_layers(draft: Draft) -> bool:
    """Whether engines build the draft's layers with Llama's classes: grouped heads, and no model type with classes of its own."""
    return draft.spec is not None and not latent(draft) and draft.spec.model_type not in _OWN_CLASSES


def speculators(draft: Draft) -> bool:
    """Whether the draft is written by speculators."""
    return draft.spec is not None and draft.spec.packaging == "speculators"


def embedded(draft: Draft) -> bool:
    """Whether the draft lies inside its target's checkpoint."""
    return draft.spec is not None and draft.spec.packaging == "embedded"


def num_layers(draft: Draft) -> int:
    """Draft layers, 0 where not known."""
    return 0 if draft.spec is None else len(draft.spec.layers)


def depth(draft: Draft) -> int | None:
    """Layers of the target as the draft states it."""
    return None if draft.spec is None else draft.spec.taps.num_target_layers


def layer_types(draft: Draft) -> list[Any] | None:
    """`layer_types` of the layers, or None where it is not a list."""
    value = at(draft.checkpoint.config, _in_layer(draft, "layer_types"))
    return value if isinstance(value, list) else None


def is_sliding(draft: Draft, index: int) -> bool:
    """Whether `layer_types` calls layer `index` a sliding one."""
    types = layer_types(draft)
    return types is not None and index < len(types) and types[index] == "sliding_attention"


def is_causal_by_layer_type(draft: Draft) -> tuple[bool, ...]:
    """Sliding layers look back only, all others both ways: what engines assume where nothing is stated."""
    return tuple(is_sliding(draft, index) for index in range(num_layers(draft)))


def window(draft: Draft) -> Any:
    """`sliding_window` as the configuration class leaves it."""
    config = draft.checkpoint.config
    switched = at(config, _in_layer(draft, "use_sliding_window"))
    if plain(draft) and config.get("model_type") in _DROPS_WINDOW and switched is not True:
        return None
    return at(config, _in_layer(draft, "sliding_window"))


def dflash_guess(count: int, target_layers: int) -> list[int]:
    """The taps that readers assume for `count` draft layers where a file states none: ids of layers whose output is read."""
    if count == 1:
        return [target_layers // 2]
    return [round(1 + index * (target_layers - 4) / (count - 1)) for index in range(count)]


def three_defaults(draft: Draft) -> list[int] | None:
    """The states entering layers 2, N // 2 and N - 3, which EAGLE3 targets hand out unless told otherwise."""
    layers = depth(draft)
    return None if layers is None or layers < 6 else [2, layers // 2, layers - 3]


def plus_one(value: Any, draft: Draft) -> Any:
    """Ids of layers whose output is read as ids of the states entering the next, in the order in which layers run."""
    return in_order([id + 1 for id in value]) if _is_ids(value) else value


def in_order(ids: Any) -> Any:
    """`ids` once each and rising: targets hand out states as they run through their layers, whatever the list's order."""
    return sorted(set(ids)) if _is_ids(ids) else ids


def as_bool(value: Any, draft: Draft) -> bool:
    """Python's truth of the value."""
    return bool(value)


def as_float(value: Any, draft: Draft) -> Any:
    """A number as a float; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return float(value)


def as_length(value: Any, draft: Draft) -> Any:
    """The length of a list; a number as it is."""
    return len(value) if isinstance(value, list) else value


def read_rope(families: tuple[str, ...], source: str, *, beside: bool) -> tuple[Reads, ...]:
    """How base and scaling of plain drafts of `families` reach an engine that uses transformers' configuration classes.

    A `rope_scaling` that is not empty takes the place of `rope_parameters` as a whole; the base is the one in there, else the flat one,
    else the class's own. An `original_max_position_embeddings` outside the dictionary comes too late for the class, which fills in
    `max_position_embeddings`; `beside` says that the engine makes up for it. Nothing is said of a `rope_parameters` per layer type.
    """
    source = f"{source}; {_CLASSES}"

    def rule(setting: str, places: tuple[str, ...], when: Callable[[Draft], bool], **fields: Any) -> Reads:
        return Reads(setting=setting, families=families, places=places, when=when, source=source, **fields)

    def stated_or_known(draft: Draft) -> bool:
        config = draft.checkpoint.config
        places = ("rope_scaling.rope_theta", "rope_parameters.rope_theta", "rope_theta")
        return _class_theta(draft) is not None or any(at(config, place) is not None for place in places)

    def scaled(draft: Draft) -> bool:
        return plain(draft) and bool(draft.checkpoint.config.get("rope_scaling")) and stated_or_known(draft)

    def unscaled(draft: Draft) -> bool:
        return plain(draft) and not scaled(draft) and not _per_layer_type(draft) and stated_or_known(draft)

    scaling = partial(_scaling, beside=beside)
    return (
        rule("rope-theta", ("rope_scaling.rope_theta", "rope_theta"), scaled, default=_class_theta, take=as_float),
        rule("rope-theta", ("rope_parameters.rope_theta", "rope_theta"), unscaled, default=_class_theta, take=as_float),
        rule("rope-scaling", ("rope_scaling",), scaled, default=(), take=scaling),
        rule("rope-scaling", ("rope_parameters",), unscaled, default=(), take=scaling),
    )


def stores_quantised_k(draft: Draft, index: int) -> bool:
    """Whether layer `index`'s K projection is stored in a form that is not plain, or said to be quantised where no weights are there."""
    for stem in ("k_proj", "qkv_proj"):
        name = f"layers.{index}.self_attn.{stem}.weight"
        header = draft.header(name)
        if header is None or draft.binding is None:
            continue
        form = draft.binding.storage.forms.get(name)
        return header.dtype not in PLAIN_FLOATS or (form is not None and form.kind != "plain")
    stored = draft.checkpoint.has_weights
    return not stored and at(draft.checkpoint.config, "quantization_config.quant_method") is not None


def refused_nulls(draft: Draft) -> frozenset[str]:
    """The keys in which the configuration class of the draft's layers refuses a null, with their section; none where it is not known.

    The layers of a speculators file are read through that class by speculators 0.9.0 itself, with transformers 5.15.0.
    """
    if not (plain(draft) or speculators(draft)):
        return frozenset()
    keys = NO_NULLS.get(str(at(draft.checkpoint.config, _in_layer(draft, "model_type"))), frozenset())
    return frozenset(_in_layer(draft, key) for key in keys)


def no_nulls(draft: Draft) -> frozenset[str]:
    """The keys at which a null stops an engine that reads a plain draft through its class; of other packagings nothing is known."""
    return refused_nulls(draft) if plain(draft) else frozenset()


def any_of(*places: str) -> Callable[[Draft], bool]:
    """A condition: one of `places` is stated."""
    return lambda draft: any(at(draft.checkpoint.config, place) is not None for place in places)


def unless(*places: str) -> Callable[[Draft], bool]:
    """A condition: none of `places` is stated."""
    return lambda draft: not any_of(*places)(draft)


def both(*conditions: Callable[[Draft], bool]) -> Callable[[Draft], bool]:
    """A condition: all of `conditions`."""
    return lambda draft: all(condition(draft) for condition in conditions)


def _class_theta(draft: Draft) -> float | None:
    return THETA_DEFAULTS.get(str(draft.checkpoint.config.get("model_type")))


def _scaling(value: Any, draft: Draft, *, beside: bool) -> Any:
    if not isinstance(value, Mapping):
        return value
    fields = dict(value)
    if fields.get("rope_type", fields.get("type")) in ("llama3", "yarn", "longrope"):
        outside = draft.checkpoint.config.get("original_max_position_embeddings") if beside else None
        length = fields.get("original_max_position_embeddings", draft.checkpoint.config.get("max_position_embeddings"))
        fields["original_max_position_embeddings"] = length if outside is None else outside
    return normal_scaling(fields)


def _per_layer_type(draft: Draft) -> bool:
    parameters = draft.checkpoint.config.get("rope_parameters")
    return isinstance(parameters, Mapping) and any(isinstance(value, Mapping) for value in parameters.values())


def _in_layer(draft: Draft, key: str) -> str:
    return f"transformer_layer_config.{key}" if speculators(draft) else key


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(id, int) and not isinstance(id, bool) for id in value)
