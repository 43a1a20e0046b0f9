"""What SGLang takes each setting of a draft to be, and which keys it passes over.

Classes: `LlamaForCausalLMEagle` (eagle1), `LlamaForCausalLMEagle3` (eagle3), `Eagle3DeepseekV2ForCausalLM` (eagle3-mla), `DFlashDraftModel`
and its subclasses (dflash, dflash2, domino) and `DSparkDraftModel` (dspark). Nothing in it reads the speculators packaging.
"""

from __future__ import annotations

from typing import Any

from pytest_specdecode.engines.base import Ignores, Reading, Reads, at
from pytest_specdecode.engines.hf_config import (
    any_of,
    as_bool,
    as_float,
    as_length,
    both,
    depth,
    dflash_guess,
    embedded,
    is_causal_by_layer_type,
    is_sliding,
    latent,
    layer_types,
    llama_layers,
    num_layers,
    plain,
    plus_one,
    read_rope,
    three_defaults,
    unless,
    window,
)
from pytest_specdecode.engines.sglang.fused_path import why_not_fused
from pytest_specdecode.families import Draft
from pytest_specdecode.target import Target

_EAGLE1 = "srt/models/llama_eagle.py"
_EAGLE3 = "srt/models/llama_eagle3.py"
_MLA = "srt/models/kimi_k25_eagle3.py"
_DFLASH = "srt/models/dflash.py"
_UTILS = "srt/speculative/dflash_utils.py"
_DSPARK = "srt/models/dspark.py"
_DSPARK_CONFIG = "srt/speculative/dspark_components/dspark_config.py"
_AUX = "srt/model_executor/model_runner_components/spec_aux_hidden_state.py"

_BLOCK = ("dflash", "dflash2", "domino")
_NESTED_TAPS = "eagle_config.eagle_aux_hidden_state_layer_ids"


def _vocab_size(draft: Draft) -> int | None:
    return None if draft.spec is None else draft.spec.vocabulary.vocab_size


def _fed_by_taps(draft: Draft) -> bool:
    return plain(draft) and at(draft.checkpoint.config, "eagle_config.use_aux_hidden_state") is not False


def _stated_or_known_depth(draft: Draft) -> bool:
    return _fed_by_taps(draft) and (any_of(_NESTED_TAPS)(draft) or three_defaults(draft) is not None)


def _eagle3_taps(value: Any, draft: Draft) -> Any:
    """Most targets take the output of each layer; gpt-oss takes the ids as they are when the last one is its depth."""
    if isinstance(value, list) and value and value[-1] == depth(draft):
        return value
    return plus_one(value, draft)


def _mla_taps(value: Any, draft: Draft) -> Any:
    """DeepSeek's targets take outputs where the first id is 1, and the ids as they are otherwise."""
    return plus_one(value, draft) if isinstance(value, list) and value[:1] == [1] else value


def captures(draft: Draft, target: Target) -> Reading | None:
    """Which states an EAGLE3 head is handed in `target`: each target's code has a rule of its own for the ids of `eagle_config`."""
    stated = at(draft.checkpoint.config, _NESTED_TAPS)
    family = None if draft.spec is None else draft.spec.family
    if family not in ("eagle3", "eagle3-mla") or not _fed_by_taps(draft) or not isinstance(stated, list) or not stated:
        return None
    label = "".join(target.architectures)
    if label.startswith(("Deepseek", "Kimi")):
        value, source = _mla_taps(stated, draft), "srt/models/deepseek_v2.py; PR 25454"
    elif label.startswith("GptOss"):
        value, source = _eagle3_taps(stated, draft), "srt/models/gpt_oss.py; PR 32334"
    else:
        value, source = plus_one(stated, draft), "srt/models/llama.py, qwen3.py"
    return Reading(value=value, place=_NESTED_TAPS, source=f"{_AUX}; {source}")


def _guessed_taps(draft: Draft) -> list[int] | None:
    layers = depth(draft)
    if layers is None or layers < 4 or not num_layers(draft):
        return None
    return [id + 1 for id in dflash_guess(num_layers(draft), layers)]


def _dflash_taps_known(draft: Draft) -> bool:
    return plain(draft) and (
        any_of("dflash_config.target_layer_ids", "target_layer_ids")(draft) or _guessed_taps(draft) is not None
    )


def _causal(value: Any, draft: Draft) -> tuple[bool, ...]:
    return (bool(value),) * num_layers(draft)


def _windows(draft: Draft) -> tuple[Any, ...]:
    return tuple(window(draft) if is_sliding(draft, index) else None for index in range(num_layers(draft)))


def _refuse_windows(value: Any, draft: Draft) -> str | None:
    types = layer_types(draft) or []
    for index, kind in enumerate(types[: num_layers(draft)]):
        if kind not in ("full_attention", "sliding_attention"):
            return f"Unsupported DFLASH draft layer type. layer_types[{index}]={kind!r}."
    if types and len(types) < num_layers(draft):
        return "DFLASH config.layer_types must contain one entry per draft layer."
    if any(is_sliding(draft, index) and value[index] is None for index in range(num_layers(draft))):
        return "DFLASH sliding_attention layers require config.sliding_window."
    return None


def _refuse_rank(value: Any, draft: Draft) -> str | None:
    if isinstance(value, int) and value > 0:
        return None
    return (
        f"DSpark requires markov_rank > 0 (the Markov head is the core of the semi-AR draft); got markov_rank={value}."
    )


def _refuse_mask(value: Any, draft: Draft) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return None if value >= 0 else f"DFLASH dflash_config.mask_token_id must be non-negative, got {value}."
    return f"DFLASH dflash_config.mask_token_id must be an integer, got {value!r} (type={type(value).__name__})."


def _refuse_taps(value: Any, draft: Draft) -> str | None:
    if draft.spec is None or draft.spec.family not in _BLOCK:
        return None
    if not isinstance(value, list) or not all(isinstance(id, int) for id in value):
        return "target_layer_ids must be a list of ints"
    return None if value else "target_layer_ids must be non-empty"


def _refuse_block(value: Any, draft: Draft) -> str | None:
    return f"DFLASH block_size must be positive, got {value}." if isinstance(value, int) and value < 1 else None


def _refuse_layers(value: Any, draft: Draft) -> str | None:
    stated = draft.checkpoint.config.get("num_hidden_layers")
    return None if stated in (None, value) else "EAGLE3 currently only supports 1 layer"


def _has_sliding(draft: Draft) -> bool:
    return any(is_causal_by_layer_type(draft))


def _slides(draft: Draft) -> bool:
    return llama_layers(draft) and _has_sliding(draft)


def _plain_llama(draft: Draft) -> bool:
    return plain(draft) and llama_layers(draft)


def _reduced(draft: Draft) -> bool:
    return draft.spec is not None and draft.spec.vocabulary.is_reduced


def _no_rope_dim(draft: Draft) -> bool:
    """`rope_dim` in the RoPE dictionary overrides every factor."""
    return plain(draft) and not any_of("rope_parameters.rope_dim", "rope_scaling.rope_dim")(draft)


_EAGLE = (
    Reads(
        setting="taps",
        places=(_NESTED_TAPS,),
        default=three_defaults,
        take=_eagle3_taps,
        families=("eagle3",),
        when=_stated_or_known_depth,
        source=f"{_AUX}; srt/models/llama.py, gpt_oss.py",
    ),
    Reads(
        setting="taps",
        places=(_NESTED_TAPS,),
        default=three_defaults,
        take=_mla_taps,
        families=("eagle3-mla",),
        when=_stated_or_known_depth,
        source=f"{_AUX}; srt/models/deepseek_v2.py; PR 25454",
    ),
    Reads(
        setting="taps-count",
        places=("num_aux_hidden_states", _NESTED_TAPS),
        default=3,
        take=as_length,
        families=("eagle3",),
        when=_fed_by_taps,
        source=_EAGLE3,
    ),
    Reads(
        setting="taps-count",
        places=(_NESTED_TAPS, "eagle_aux_hidden_state_layer_ids"),
        default=3,
        take=as_length,
        families=("eagle3-mla",),
        when=_fed_by_taps,
        source=_MLA,
    ),
    Reads(setting="norm-before-residual", default=False, families=("eagle3",), when=plain, source=_EAGLE3),
    Reads(setting="norm-before-residual", default=False, families=("eagle3-mla",), when=plain, source=_MLA),
    Reads(
        setting="norm-before-fc",
        places=("eagle_config.norm_before_fc", "norm_before_fc"),
        default=False,
        take=as_bool,
        families=("eagle3",),
        when=plain,
        source=f"{_EAGLE3}; PR 32334",
    ),
    Reads(setting="norm-before-fc", default=False, families=("eagle3-mla",), when=plain, source=_MLA),
    Reads(
        setting="fc-norm",
        places=("fc_norm", "use_aux_norm"),
        default=False,
        take=as_bool,
        families=("eagle3", "eagle3-mla"),
        when=plain,
        source=f"{_EAGLE3}, {_MLA}; PR 24663, PR 26506",
    ),
    Reads(
        setting="norm-output",
        places=("norm_output",),
        default=False,
        take=as_bool,
        families=("eagle3", "eagle3-mla"),
        when=plain,
        source=f"{_EAGLE3}, {_MLA}; PR 24663, PR 26506",
    ),
    Reads(setting="qk-norm", default=False, families=("eagle3",), when=plain, source=f"{_EAGLE3}, srt/models/llama.py"),
    Reads(setting="qkv-bias", default=False, families=("eagle3",), when=plain, source=_EAGLE3),
    Reads(setting="qkv-bias", default=False, families=("eagle3-mla",), when=plain, source=_MLA),
    Reads(
        setting="qkv-bias",
        places=("attention_bias", "bias"),
        default=False,
        take=as_bool,
        families=("eagle1",),
        when=plain,
        source="srt/models/llama.py",
    ),
    Reads(setting="fc-bias", default=True, families=("eagle1",), when=plain, source=_EAGLE1),
    Reads(
        setting="fc-bias",
        places=("bias",),
        default=False,
        take=as_bool,
        families=("eagle3", "eagle3-mla"),
        when=plain,
        source=f"{_EAGLE3}, {_MLA}",
    ),
    Reads(setting="layers", default=1, families=("eagle3-mla",), refuses=_refuse_layers, source=_MLA),
    Reads(setting="layers", default=None, families=("eagle3",), when=plain, source=f"{_EAGLE3}; PR 24663"),
    Reads(
        setting="is-neox-style",
        places=("rope_is_neox_style",),
        default=True,
        take=as_bool,
        families=("eagle1", "eagle3"),
        when=_plain_llama,
        source="srt/models/llama.py",
    ),
    Reads(
        setting="is-neox-style", default=False, families=("eagle3-mla",), when=plain, source="srt/models/deepseek_v2.py"
    ),
    Reads(
        setting="partial-rotary-factor",
        places=("partial_rotary_factor",),
        default=1.0,
        take=as_float,
        families=("eagle1", "eagle3"),
        when=plain,
        source="srt/models/llama.py",
    ),
    Reads(
        setting="sliding-window",
        default=lambda draft: (None,) * num_layers(draft),
        families=("eagle1", "eagle3", "eagle3-mla"),
        when=plain,
        source=f"{_EAGLE3}: only --speculative-draft-window-size sets one",
    ),
    Reads(
        setting="draft-vocab-size",
        places=("draft_vocab_size",),
        default=_vocab_size,
        families=("eagle3", "eagle3-mla"),
        when=plain,
        source=f"{_EAGLE3}, {_MLA}",
    ),
    Reads(
        setting="tie-word-embeddings",
        places=("tie_word_embeddings",),
        default=False,
        take=as_bool,
        families=("eagle1", "eagle3", "eagle3-mla"),
        when=plain,
        source=f"{_EAGLE1}, {_EAGLE3}, {_MLA}",
    ),
)

_DFLASH_RULES = (
    Reads(
        setting="taps",
        places=("dflash_config.target_layer_ids", "target_layer_ids"),
        default=_guessed_taps,
        take=plus_one,
        families=(*_BLOCK, "dspark"),
        when=_dflash_taps_known,
        refuses=_refuse_taps,
        source=f"{_UTILS}; issue 37475",
    ),
    Reads(
        setting="taps-count",
        places=("dflash_config.target_layer_ids", "target_layer_ids"),
        default=num_layers,
        take=as_length,
        families=(*_BLOCK, "dspark"),
        when=plain,
        source=_DFLASH,
    ),
    Reads(
        setting="block-size",
        places=("dflash_config.block_size", "block_size"),
        default=16,
        families=_BLOCK,
        when=plain,
        refuses=_refuse_block,
        source=f"{_UTILS}, srt/arg_groups/speculative_hook.py",
    ),
    Reads(
        setting="mask-token-id",
        places=("dflash_config.mask_token_id", "mask_token_id"),
        families=_BLOCK,
        when=both(plain, any_of("dflash_config.mask_token_id", "mask_token_id")),
        refuses=_refuse_mask,
        source=_UTILS,
    ),
    Reads(
        setting="mask-token",
        places=("dflash_config.mask_token", "mask_token"),
        default="<|MASK|>",
        families=_BLOCK,
        source="srt/speculative/dflash_worker_v2.py",
    ),
    Reads(setting="sample-from-anchor", default=False, families=_BLOCK, when=plain, source=f"{_UTILS}; issue 40144"),
    Reads(
        setting="is-causal",
        places=("is_causal",),
        default=is_causal_by_layer_type,
        take=_causal,
        families=(*_BLOCK, "dspark"),
        when=plain,
        source=f"{_DFLASH}; PR 34524",
    ),
    Reads(
        setting="sliding-window",
        default=_windows,
        families=(*_BLOCK, "dspark"),
        when=plain,
        refuses=_refuse_windows,
        source=f"{_UTILS}, {_DFLASH}; PR 27469",
    ),
    Reads(
        setting="is-neox-style", default=False, families=("dspark",), when=latent, source="srt/models/deepseek_v2.py"
    ),
    Reads(
        setting="is-neox-style",
        places=("rope_is_neox_style", "is_neox_style"),
        default=True,
        take=as_bool,
        families=(*_BLOCK, "dspark"),
        when=plain,
        source=_DFLASH,
    ),
    Reads(
        setting="partial-rotary-factor",
        places=("partial_rotary_factor",),
        default=1.0,
        take=as_float,
        families=(*_BLOCK, "dspark"),
        when=_no_rope_dim,
        source=_DFLASH,
    ),
    Reads(
        setting="qkv-bias",
        places=("attention_bias",),
        default=False,
        take=as_bool,
        families=(*_BLOCK, "dspark"),
        when=plain,
        source=_DFLASH,
    ),
    Reads(setting="fc-bias", default=False, families=(*_BLOCK, "dspark"), when=plain, source=_DFLASH),
    Reads(setting="layers", default=None, families=(*_BLOCK, "dspark"), when=plain, source=_DFLASH),
    Reads(
        setting="value-scale",
        places=("dflash_config.attention_value_scale",),
        default=1.0,
        take=as_float,
        families=(*_BLOCK, "dspark"),
        when=plain,
        source=_UTILS,
    ),
    Reads(
        setting="draft-vocab-size",
        default=_vocab_size,
        families=(*_BLOCK, "dspark"),
        when=plain,
        source=f"{_DFLASH}, {_DSPARK}: the target's head serves every draft",
    ),
    Reads(setting="tie-word-embeddings", default=False, families=(*_BLOCK, "dspark"), when=plain, source=_DFLASH),
)

_DSPARK_RULES = (
    Reads(
        setting="block-size",
        places=("dflash_config.block_size", "block_size"),
        default=7,
        families=("dspark",),
        when=plain,
        refuses=_refuse_block,
        source=f"{_DSPARK_CONFIG}, srt/arg_groups/speculative_hook.py",
    ),
    Reads(
        setting="mask-token-id",
        places=("dspark_config.mask_token_id", "dflash_config.mask_token_id", "mask_token_id"),
        families=("dspark",),
        when=both(plain, any_of("dspark_config.mask_token_id", "dflash_config.mask_token_id", "mask_token_id")),
        refuses=_refuse_mask,
        source=_DSPARK_CONFIG,
    ),
    Reads(
        setting="sample-from-anchor",
        places=("sample_from_anchor",),
        default=True,
        take=as_bool,
        families=("dspark",),
        when=plain,
        source=_DSPARK_CONFIG,
    ),
    Reads(
        setting="markov-rank",
        places=("markov_rank",),
        default=0,
        families=("dspark",),
        when=plain,
        refuses=_refuse_rank,
        source=f"{_DSPARK}: the head is built from the top level",
    ),
    Reads(
        setting="markov-head-type",
        places=("markov_head_type",),
        default="vanilla",
        families=("dspark",),
        when=plain,
        source=f"{_DSPARK}: the head is built from the top level",
    ),
    Reads(
        setting="confidence-head",
        default=False,
        families=("dspark",),
        when=plain,
        source=f"{_DSPARK}: built only where SGLANG_RAGGED_VERIFY_MODE is not static, whatever the flag says",
    ),
    Reads(
        setting="taps",
        places=("dspark_target_layer_ids",),
        take=plus_one,
        families=("dspark",),
        when=both(embedded, any_of("dspark_target_layer_ids")),
        source=_DSPARK_CONFIG,
    ),
    Reads(
        setting="block-size",
        places=("dspark_block_size", "block_size"),
        default=7,
        families=("dspark",),
        when=embedded,
        source=f"{_DSPARK_CONFIG}, srt/arg_groups/speculative_hook.py",
    ),
    Reads(
        setting="mask-token-id",
        places=("dspark_noise_token_id", "mask_token_id"),
        families=("dspark",),
        when=both(embedded, any_of("dspark_noise_token_id", "mask_token_id")),
        source=_DSPARK_CONFIG,
    ),
    Reads(
        setting="markov-rank",
        places=("dspark_markov_rank", "markov_rank"),
        default=0,
        families=("dspark",),
        when=embedded,
        source=_DSPARK_CONFIG,
    ),
)


def _half_for_full(value: Any, draft: Draft) -> Any:
    """float32 is served in half precision, in bfloat16 for Gemma."""
    if str(value).removeprefix("torch.") not in ("float32", "float"):
        return str(value).removeprefix("torch.")
    return _undeclared_dtype(draft)


def _undeclared_dtype(draft: Draft) -> str:
    return "bfloat16" if str(draft.checkpoint.config.get("model_type")).startswith("gemma") else "float16"


def _is_mimo(draft: Draft) -> bool:
    labels = draft.checkpoint.config.get("architectures")
    return isinstance(labels, list) and labels[:1] in (["MiMoForCausalLM"], ["MiMoMTP"])


READS: tuple[Reads, ...] = (
    Reads(setting="combine", default="hidden-first", families=("mtp",), when=_is_mimo, source="srt/models/mimo_mtp.py"),
    Reads(
        setting="dtype",
        places=("dtype", "torch_dtype"),
        default=_undeclared_dtype,
        take=_half_for_full,
        when=plain,
        source="srt/configs/model_config.py",
    ),
    *_EAGLE,
    *_DFLASH_RULES,
    *_DSPARK_RULES,
    *read_rope(("eagle1", "eagle3"), "srt/models/llama.py", beside=True),
    *read_rope(("eagle3-mla",), _MLA, beside=False),
    *read_rope((*_BLOCK, "dspark"), f"{_DFLASH}, srt/utils/hf_transformers/common.py", beside=False),
)

IGNORES: tuple[Ignores, ...] = (
    Ignores(
        key="norm_before_residual",
        instead="adds the hidden state before its norm",
        families=("eagle3", "eagle3-mla"),
        harmless=(False,),
        source=f"{_EAGLE3}, {_MLA}",
    ),
    Ignores(
        key="norm_before_fc",
        instead="builds no norm before fc; input_norm is skipped with a warning",
        families=("eagle3-mla",),
        harmless=(False,),
        source=_MLA,
    ),
    Ignores(
        key="attention_bias",
        instead="builds q, k and v without biases and drops those of the file",
        families=("eagle3", "eagle3-mla"),
        harmless=(False,),
        source=f"{_EAGLE3}, {_MLA}",
    ),
    Ignores(
        key="sliding_window",
        instead="attends to everything unless --speculative-draft-window-size is given",
        families=("eagle1", "eagle3"),
        when=_slides,
        source=_EAGLE3,
    ),
    Ignores(
        key="truncated_vocab_size",
        instead="reads draft_vocab_size only",
        families=("eagle3", "eagle3-mla"),
        when=unless("draft_vocab_size"),
        source=f"{_EAGLE3}, {_MLA}",
    ),
    Ignores(
        key="rope_parameters.partial_rotary_factor",
        instead="reads the key at top level only and rotates whole heads",
        families=("eagle1", "eagle3", *_BLOCK, "dspark"),
        when=unless("partial_rotary_factor"),
        harmless=(1, 1.0),
        source=f"srt/models/llama.py, {_DFLASH}",
    ),
    Ignores(
        key="is_neox_style",
        instead="reads rope_is_neox_style, and rotates halves without it",
        families=("eagle1", "eagle3"),
        harmless=(True,),
        when=unless("rope_is_neox_style"),
        source="srt/models/llama.py",
    ),
    Ignores(
        key="dflash_config.causal",
        instead="reads is_causal at top level; without it sliding layers look back, full layers both ways",
        families=(*_BLOCK, "dspark"),
        when=unless("is_causal"),
        source=_DFLASH,
    ),
    Ignores(
        key="dflash_config.use_swa",
        instead="reads layer_types only",
        families=(*_BLOCK, "dspark"),
        harmless=(False,),
        source=_UTILS,
    ),
    Ignores(
        key="attention_value_scale",
        instead="reads it in dflash_config only",
        families=(*_BLOCK, "dspark"),
        harmless=(1, 1.0),
        when=unless("dflash_config.attention_value_scale"),
        source=_UTILS,
    ),
    Ignores(
        key="attention_sink_bias",
        instead="reads it in dflash_config only",
        families=(*_BLOCK, "dspark"),
        harmless=(False,),
        when=unless("dflash_config.attention_sink_bias"),
        source=_UTILS,
    ),
    Ignores(
        key="fc_layernorm",
        instead="gives fc the taps without a norm",
        families=(*_BLOCK, "dspark"),
        harmless=(False,),
        source=_DFLASH,
    ),
    Ignores(
        key="dflash_config.fc_layernorm",
        instead="gives fc the taps without a norm",
        families=(*_BLOCK, "dspark"),
        harmless=(False,),
        source=_DFLASH,
    ),
    Ignores(
        key="dflash_config.output_multiplier",
        instead="leaves the logits as they are; only DFlash2 multiplies",
        families=("dflash", "domino", "dspark"),
        harmless=(1, 1.0),
        source=_DFLASH,
    ),
    Ignores(
        key="output_multiplier",
        instead="reads it in dflash_config only",
        families=(*_BLOCK, "dspark"),
        harmless=(1, 1.0),
        when=unless("dflash_config.output_multiplier"),
        source=_UTILS,
    ),
    Ignores(
        key="dflash_config.final_logit_softcapping",
        instead="leaves the logits as they are; only DFlash2 caps them",
        families=("dflash", "domino", "dspark"),
        harmless=(0, 0.0),
        source=_DFLASH,
    ),
    Ignores(
        key="dflash_config.input_embedding_scale",
        instead="takes the target's embeddings as they are",
        families=(*_BLOCK, "dspark"),
        harmless=(1, 1.0),
        source=_DFLASH,
    ),
    Ignores(
        key="input_embedding_scale",
        instead="takes the target's embeddings as they are",
        families=(*_BLOCK, "dspark"),
        harmless=(1, 1.0),
        source=_DFLASH,
    ),
    Ignores(
        key="sample_from_anchor",
        instead="drafts from row 1 on",
        families=_BLOCK,
        harmless=(False,),
        source=f"{_UTILS}; issue 40144",
    ),
    Ignores(
        key="dflash_config.sample_from_anchor",
        instead="drafts from row 1 on",
        families=_BLOCK,
        harmless=(False,),
        source=f"{_UTILS}; issue 40144",
    ),
    Ignores(
        key="query_zero_predicts_next",
        instead="drafts from row 1 on",
        families=_BLOCK,
        harmless=(False,),
        source=f"{_UTILS}; issue 40144",
    ),
    Ignores(
        key="dflash_config.sample_from_anchor",
        instead="reads it at top level, and takes true without it",
        families=("dspark",),
        harmless=(True,),
        source=_DSPARK_CONFIG,
    ),
    Ignores(
        key="draft_vocab_size",
        instead="drafts in the target's vocabulary with the target's head",
        families=(*_BLOCK, "dspark"),
        when=_reduced,
        source=f"{_DFLASH}, {_DSPARK}",
    ),
    Ignores(
        key="dflash_config.attention_value_scale",
        instead="multiplies V of the block by it, but not V of the context, which the fused path writes without a factor",
        families=(*_BLOCK, "dspark"),
        harmless=(1, 1.0),
        when=lambda draft: why_not_fused(draft) is None,
        source="kernels/ops/speculative/fused_kv_materialize.py, srt/models/dspark.py, by reading",
    ),
)
