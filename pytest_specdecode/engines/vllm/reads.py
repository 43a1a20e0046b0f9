"""What vLLM takes each setting of a draft to be, which keys it passes over, and when it fills the context's K/V by its fused path.

Classes: `EagleLlamaForCausalLM` (eagle1), `Eagle3LlamaForCausalLM` and `Eagle3Qwen3ForCausalLM` (eagle3, peagle),
`Eagle3DeepseekV2ForCausalLM` (eagle3-mla), `DFlashQwen3ForCausalLM` (dflash), `DFlash2Qwen3ForCausalLM` (dflash2) and
`Qwen3DSparkForCausalLM` (dspark). Statements are about the V2 model runner, which is the default, except for peagle, which it does not run.

The speculators packaging is turned into a configuration of vLLM's own first: the fields of `transformer_layer_config`, and of the top
level only those that `transformers_utils/configs/speculators/algos.py` names.
"""

from __future__ import annotations

from typing import Any

from pytest_specdecode.engines.base import Declined, Ignores, Reads, at
from pytest_specdecode.engines.hf_config import (
    any_of,
    as_bool,
    as_float,
    as_length,
    both,
    in_order,
    is_causal_by_layer_type,
    is_sliding,
    latent,
    llama_layers,
    num_layers,
    plain,
    plus_one,
    read_rope,
    speculators,
    stores_quantised_k,
    three_defaults,
    unless,
    window,
)
from pytest_specdecode.families import Draft

_EAGLE1 = "model_executor/models/llama_eagle.py"
_EAGLE3 = "model_executor/models/llama_eagle3.py"
_QWEN3 = "model_executor/models/qwen3_eagle3.py"
_MLA = "model_executor/models/deepseek_eagle3.py"
_DFLASH = "model_executor/models/qwen3_dflash.py"
_DFLASH2 = "model_executor/models/qwen3_dflash2.py"
_DSPARK = "model_executor/models/qwen3_dspark.py"
_ALGOS = "transformers_utils/configs/speculators/algos.py"
_AUX = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
_MASK = "v1/worker/gpu/spec_decode/utils.py"
_ROPE = "transformers_utils/config.py, model_executor/layers/rotary_embedding"

_EAGLE3S = ("eagle3", "peagle")
_BLOCK = ("dflash", "dflash2")
_BLOCKS = (*_BLOCK, "dspark")

_TOP_TAPS = "eagle_aux_hidden_state_layer_ids"
_NESTED_TAPS = f"eagle_config.{_TOP_TAPS}"
_LAYER = "transformer_layer_config"


def _vocab_size(draft: Draft) -> int | None:
    return None if draft.spec is None else draft.spec.vocabulary.vocab_size


def _ids_in_order(value: Any, draft: Draft) -> Any:
    return in_order(value)


def _not(value: Any, draft: Draft) -> bool:
    return not value


def _causal(value: Any, draft: Draft) -> tuple[bool, ...]:
    return (bool(value),) * num_layers(draft)


def _two_sided(value: Any, draft: Draft) -> tuple[bool, ...]:
    return (not value,) * num_layers(draft)


def _is_qwen3(draft: Draft) -> bool:
    """Whether an EAGLE3 head is given the Qwen3 class."""
    if speculators(draft):
        return bool(at(draft.checkpoint.config, f"{_LAYER}.model_type") == "qwen3")
    label = draft.spec.architectures[0] if draft.spec is not None and draft.spec.architectures else ""
    return label in ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM", "Qwen3ForCausalLM")


def _is_llama(draft: Draft) -> bool:
    return not _is_qwen3(draft)


def _fed_by_taps(draft: Draft) -> bool:
    return at(draft.checkpoint.config, "eagle_config.use_aux_hidden_state") is not False


def _taps_known(draft: Draft) -> bool:
    return _fed_by_taps(draft) and (any_of(_TOP_TAPS)(draft) or three_defaults(draft) is not None)


def _not_per_layer_type(draft: Draft) -> bool:
    parameters = at(draft.checkpoint.config, f"{_LAYER}.rope_parameters")
    return not (isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values()))


def _scaled(draft: Draft) -> bool:
    return plain(draft) and bool(draft.checkpoint.config.get("rope_scaling"))


def _use_swa(draft: Draft) -> bool:
    return bool(at(draft.checkpoint.config, "dflash_config.use_swa")) and plain(draft)


def _has_sliding(draft: Draft) -> bool:
    return any(is_causal_by_layer_type(draft))


def _block_windows(draft: Draft) -> tuple[Any, ...]:
    """`use_swa` puts a window on every layer where `layer_types` names none; an unknown type is taken for full attention."""
    stated = at(draft.checkpoint.config, "dflash_config.swa_window_size") if plain(draft) else None
    size = window(draft) if stated is None else stated
    everywhere = _use_swa(draft) and not _has_sliding(draft)
    return tuple(size if everywhere or is_sliding(draft, index) else None for index in range(num_layers(draft)))


def _refuse_window(value: Any, draft: Draft) -> str | None:
    wanted = _has_sliding(draft) or _use_swa(draft)
    if not wanted or any(size is not None for size in value):
        return None
    return (
        "DFlash sliding attention requires a window size configured in dflash_config.swa_window_size "
        "or the top-level sliding_window."
    )


def _head_windows(draft: Draft) -> tuple[Any, ...]:
    return tuple(window(draft) if is_sliding(draft, index) else None for index in range(num_layers(draft)))


def _refuse_anchor(value: Any, draft: Draft) -> str | None:
    if not value:
        return None
    return (
        "sample_from_anchor=True is not supported for DFlash. DFlash uses a fixed 1+N query layout where the anchor "
        "is the bonus token."
    )


def _refuse_rank(value: Any, draft: Draft) -> str | None:
    return "AttributeError: the configuration has no attribute markov_rank" if value is None else None


def _in_both(setting: str, key: str, families: tuple[str, ...], source: str, **fields: Any) -> tuple[Reads, Reads]:
    """A key of the layers: at top level in plain files, in `transformer_layer_config` in those of speculators."""
    return (
        Reads(setting=setting, places=(key,), families=families, when=plain, source=source, **fields),
        Reads(
            setting=setting, places=(f"{_LAYER}.{key}",), families=families, when=speculators, source=source, **fields
        ),
    )


_EAGLE = (
    Reads(
        setting="taps",
        places=(_TOP_TAPS,),
        default=three_defaults,
        take=_ids_in_order,
        families=("eagle3", "eagle3-mla"),
        when=_taps_known,
        source=f"{_AUX}, model_executor/models/interfaces.py",
    ),
    Reads(
        setting="taps",
        places=(_TOP_TAPS, _NESTED_TAPS),
        default=three_defaults,
        take=_ids_in_order,
        families=("peagle",),
        when=lambda draft: any_of(_NESTED_TAPS)(draft) or _taps_known(draft),
        source="v1/worker/gpu_model_runner.py",
    ),
    Reads(
        setting="taps-count",
        places=("num_aux_hidden_states", _NESTED_TAPS),
        default=3,
        take=as_length,
        families=(*_EAGLE3S, "eagle3-mla"),
        when=both(plain, _fed_by_taps, _is_llama),
        source=f"{_EAGLE3}, {_MLA}",
    ),
    Reads(
        setting="taps-count",
        places=("num_aux_layers", "num_aux_hidden_states", _TOP_TAPS, _NESTED_TAPS),
        default=3,
        take=as_length,
        families=_EAGLE3S,
        when=both(plain, _fed_by_taps, _is_qwen3),
        source=_QWEN3,
    ),
    Reads(
        setting="taps-count",
        places=(f"{_LAYER}.num_aux_hidden_states",),
        default=3,
        families=_EAGLE3S,
        when=both(speculators, _is_llama),
        source=f"{_EAGLE3}, {_ALGOS}",
    ),
    Reads(
        setting="taps-count",
        places=(f"{_LAYER}.num_aux_layers", f"{_LAYER}.num_aux_hidden_states", _TOP_TAPS),
        default=3,
        take=as_length,
        families=_EAGLE3S,
        when=both(speculators, _is_qwen3),
        source=f"{_QWEN3}, {_ALGOS}",
    ),
    Reads(
        setting="norm-before-residual",
        places=("norm_before_residual",),
        default=True,
        take=as_bool,
        families=("eagle3",),
        when=speculators,
        source=_ALGOS,
    ),
    Reads(
        setting="norm-before-residual",
        places=("norm_before_residual",),
        default=False,
        take=as_bool,
        families=(*_EAGLE3S, "eagle3-mla"),
        source=f"{_EAGLE3}, {_QWEN3}, {_MLA}; {_ALGOS}",
    ),
    Reads(
        setting="norm-before-fc",
        places=("eagle_config.norm_before_fc", "norm_before_fc"),
        default=False,
        take=as_bool,
        families=_EAGLE3S,
        when=plain,
        source=f"{_EAGLE3}, {_QWEN3}",
    ),
    Reads(
        setting="norm-before-fc",
        places=("norm_before_fc",),
        default=False,
        take=as_bool,
        families=_EAGLE3S,
        when=speculators,
        source=_ALGOS,
    ),
    Reads(setting="norm-before-fc", default=False, families=("eagle3-mla",), source=_MLA),
    Reads(setting="fc-norm", default=False, families=("peagle",), when=speculators, source=_ALGOS),
    Reads(
        setting="fc-norm",
        places=("fc_norm",),
        default=False,
        take=as_bool,
        families=(*_EAGLE3S, "eagle3-mla"),
        source=f"{_EAGLE3}, {_QWEN3}, {_MLA}; {_ALGOS}",
    ),
    Reads(setting="norm-output", default=False, families=("peagle",), when=speculators, source=_ALGOS),
    Reads(
        setting="norm-output",
        places=("norm_output",),
        default=False,
        take=as_bool,
        families=(*_EAGLE3S, "eagle3-mla"),
        source=f"{_EAGLE3}, {_QWEN3}, {_MLA}; {_ALGOS}",
    ),
    Reads(setting="qk-norm", default=_is_qwen3, families=_EAGLE3S, source=f"{_EAGLE3}, {_QWEN3}"),
    Reads(setting="qkv-bias", default=False, families=("eagle3-mla",), source=_MLA),
    Reads(
        setting="qkv-bias",
        places=("qkv_bias", "attention_bias", "bias"),
        default=False,
        take=as_bool,
        families=("eagle1",),
        when=plain,
        source="model_executor/models/llama.py",
    ),
    *_in_both("qkv-bias", "attention_bias", _EAGLE3S, f"{_EAGLE3}, {_QWEN3}", default=False, take=as_bool),
    Reads(
        setting="fc-bias",
        default=False,
        families=("eagle1", *_EAGLE3S, "eagle3-mla"),
        source=f"{_EAGLE1}, {_EAGLE3}, {_MLA}",
    ),
    Reads(setting="layers", default=None, families=("eagle1", *_EAGLE3S, "eagle3-mla"), source=f"PR 26164; {_EAGLE3}"),
    Reads(
        setting="is-neox-style",
        default=True,
        families=("eagle1", *_EAGLE3S),
        when=llama_layers,
        source="model_executor/models/llama.py",
    ),
    Reads(setting="is-neox-style", default=False, families=("eagle3-mla",), source=_MLA),
    Reads(
        setting="sliding-window",
        default=_head_windows,
        families=_EAGLE3S,
        source=f"model_executor/models/llama.py, {_QWEN3}",
    ),
    Reads(
        setting="draft-vocab-size",
        places=("draft_vocab_size",),
        default=_vocab_size,
        families=(*_EAGLE3S, "eagle3-mla", *_BLOCKS),
        source=f"{_EAGLE3}, {_DFLASH}, {_DSPARK}",
    ),
    Reads(
        setting="tie-word-embeddings",
        default=False,
        families=(*_EAGLE3S, "eagle3-mla", *_BLOCKS),
        source=f"{_EAGLE3}, {_DFLASH}: the file's own head counts, else the target's",
    ),
)

_DFLASH_RULES = (
    Reads(
        setting="taps",
        places=("aux_hidden_state_layer_ids",),
        take=_ids_in_order,
        families=_BLOCKS,
        when=both(speculators, any_of("aux_hidden_state_layer_ids")),
        source=f"{_ALGOS}, {_AUX}",
    ),
    Reads(
        setting="taps",
        places=(_TOP_TAPS,),
        take=_ids_in_order,
        families=_BLOCKS,
        when=both(plain, any_of(_TOP_TAPS)),
        source=_AUX,
    ),
    Reads(
        setting="taps",
        places=("dflash_config.target_layer_ids", "dspark_target_layer_ids", "target_layer_ids"),
        default=three_defaults,
        take=plus_one,
        families=_BLOCKS,
        when=lambda draft: (
            plain(draft)
            and (
                three_defaults(draft) is not None
                or any_of("dflash_config.target_layer_ids", "dspark_target_layer_ids", "target_layer_ids")(draft)
            )
        ),
        source=f"{_AUX}; PR 42704",
    ),
    Reads(
        setting="taps-count",
        places=(_TOP_TAPS, "dflash_config.target_layer_ids", "target_layer_ids"),
        default=num_layers,
        take=as_length,
        families=_BLOCKS,
        when=plain,
        source=_DFLASH,
    ),
    Reads(
        setting="taps-count",
        places=("aux_hidden_state_layer_ids",),
        take=as_length,
        families=_BLOCKS,
        when=both(speculators, any_of("aux_hidden_state_layer_ids")),
        source=f"{_DFLASH}, {_ALGOS}",
    ),
    Reads(
        setting="mask-token-id",
        places=("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
        families=(*_BLOCKS, "peagle"),
        when=lambda draft: (
            plain(draft)
            and any_of(
                "dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"
            )(draft)
        ),
        source=_MASK,
    ),
    Reads(
        setting="mask-token-id",
        places=("mask_token_id",),
        families=(*_BLOCKS, "peagle"),
        when=both(speculators, any_of("mask_token_id")),
        source=_ALGOS,
    ),
    Reads(
        setting="sample-from-anchor",
        places=("dflash_config.sample_from_anchor",),
        default=False,
        take=as_bool,
        families=_BLOCK,
        when=plain,
        refuses=_refuse_anchor,
        source="v1/worker/gpu/spec_decode/dflash/speculator.py",
    ),
    Reads(
        setting="sample-from-anchor",
        places=("sample_from_anchor",),
        default=False,
        take=as_bool,
        families=_BLOCK,
        when=speculators,
        refuses=_refuse_anchor,
        source=f"{_ALGOS}, v1/worker/gpu/spec_decode/dflash/speculator.py",
    ),
    Reads(
        setting="is-causal",
        places=("is_causal", "dflash_config.causal"),
        default=is_causal_by_layer_type,
        take=_causal,
        families=_BLOCKS,
        when=plain,
        source=f"{_DFLASH}; PR 43445",
    ),
    Reads(
        setting="is-causal",
        places=("sliding_window_non_causal",),
        default=lambda draft: (False,) * num_layers(draft),
        take=_two_sided,
        families=_BLOCK,
        when=speculators,
        source=f"{_ALGOS}; PR 56692",
    ),
    Reads(
        setting="is-causal",
        default=is_causal_by_layer_type,
        families=("dspark",),
        when=speculators,
        source=f"{_ALGOS}, {_DFLASH}",
    ),
    Reads(
        setting="sliding-window",
        default=_block_windows,
        families=_BLOCKS,
        refuses=_refuse_window,
        source=f"{_DFLASH}; PR 40898",
    ),
    Reads(setting="is-neox-style", default=False, families=("dspark",), when=latent, source=_MLA),
    *_in_both("is-neox-style", "is_neox_style", _BLOCKS, f"{_DFLASH}; PR 54373", default=True, take=as_bool),
    *_in_both("qkv-bias", "attention_bias", _BLOCKS, _DFLASH, default=False, take=as_bool),
    Reads(setting="fc-bias", default=False, families=_BLOCKS, source=_DFLASH),
    Reads(setting="layers", default=None, families=_BLOCKS, source=_DFLASH),
    Reads(
        setting="value-scale",
        places=("dflash_config.attention_value_scale",),
        default=1.0,
        take=as_float,
        families=_BLOCKS,
        when=plain,
        source=_DFLASH,
    ),
    Reads(setting="value-scale", default=1.0, families=_BLOCKS, when=speculators, source=_ALGOS),
)

_DSPARK_RULES = (
    Reads(
        setting="block-size",
        places=("block_size", "dspark_block_size"),
        families=("dspark",),
        when=any_of("block_size", "dspark_block_size"),
        source="config/speculative.py",
    ),
    Reads(
        setting="sample-from-anchor",
        places=("sample_from_anchor",),
        default=False,
        take=as_bool,
        families=("dspark",),
        when=speculators,
        source=_ALGOS,
    ),
    Reads(
        setting="sample-from-anchor",
        places=("sample_from_anchor",),
        default=True,
        take=as_bool,
        families=("dspark",),
        when=plain,
        source="v1/worker/gpu/spec_decode/dspark/speculator.py",
    ),
    Reads(
        setting="markov-rank",
        places=("markov_rank",),
        families=("dspark",),
        when=lambda draft: plain(draft) or speculators(draft),
        refuses=_refuse_rank,
        source=_DSPARK,
    ),
    Reads(
        setting="markov-head-type",
        default="vanilla",
        families=("dspark",),
        when=lambda draft: plain(draft) or speculators(draft),
        source=f"{_DSPARK}: the only head it has",
    ),
    Reads(
        setting="confidence-head",
        places=("enable_confidence_head",),
        default=False,
        take=as_bool,
        families=("dspark",),
        when=lambda draft: plain(draft) or speculators(draft),
        source=_DSPARK,
    ),
)

_ROTARY = (
    *read_rope(("eagle1", *_EAGLE3S), f"model_executor/models/llama.py, {_ROPE}", beside=True),
    *read_rope(("eagle3-mla",), f"{_MLA}, {_ROPE}", beside=True),
    *read_rope(_BLOCKS, f"{_DFLASH}, {_ROPE}", beside=True),
    Reads(
        setting="rope-theta",
        places=(f"{_LAYER}.rope_parameters.rope_theta", f"{_LAYER}.rope_theta"),
        default=10_000.0,
        take=as_float,
        families=_EAGLE3S,
        when=both(speculators, _not_per_layer_type),
        source=_ROPE,
    ),
    Reads(
        setting="rope-theta",
        places=(f"{_LAYER}.rope_parameters.rope_theta", f"{_LAYER}.rope_theta"),
        default=1_000_000.0,
        take=as_float,
        families=_BLOCKS,
        when=both(speculators, _not_per_layer_type),
        source=f"{_DFLASH}, {_ROPE}",
    ),
    Reads(
        setting="partial-rotary-factor",
        places=("rope_scaling.partial_rotary_factor", "partial_rotary_factor"),
        default=1.0,
        take=as_float,
        families=("eagle1", *_EAGLE3S, *_BLOCKS),
        when=_scaled,
        source=_ROPE,
    ),
    Reads(
        setting="partial-rotary-factor",
        places=("rope_parameters.partial_rotary_factor", "partial_rotary_factor"),
        default=1.0,
        take=as_float,
        families=("eagle1", *_EAGLE3S, *_BLOCKS),
        when=plain,
        source=_ROPE,
    ),
    Reads(
        setting="partial-rotary-factor",
        places=(f"{_LAYER}.rope_parameters.partial_rotary_factor", f"{_LAYER}.partial_rotary_factor"),
        default=1.0,
        take=as_float,
        families=(*_EAGLE3S, *_BLOCKS),
        when=both(speculators, _not_per_layer_type),
        source=_ROPE,
    ),
)


def _combine(draft: Draft) -> str:
    """What the class reads that vLLM chooses for the target's label and type, whatever the tensors are called."""
    config = draft.checkpoint.config
    labels = config.get("architectures")
    if config.get("model_type") == "deepseek_v4":
        return "sum"
    hidden_first = isinstance(labels, list) and labels[:1] in (["MiMoForCausalLM"], ["MiMoMTPModel"])
    return "hidden-first" if hidden_first else "embed-first"


_PREDICTION = (
    Reads(
        setting="combine",
        default=_combine,
        families=("mtp",),
        when=unless("speculators_model_type"),
        source="config/speculative.py, model_executor/models/deepseek_mtp.py, mimo_mtp.py, qwen3_next_mtp.py",
    ),
)

READS: tuple[Reads, ...] = (*_EAGLE, *_DFLASH_RULES, *_DSPARK_RULES, *_PREDICTION, *_ROTARY)


def _ignores(key: str, instead: str, families: tuple[str, ...], source: str, *harmless: Any, **fields: Any) -> Ignores:
    return Ignores(key=key, instead=instead, families=families, harmless=harmless, source=source, **fields)


def _nested_taps_only(draft: Draft) -> bool:
    return plain(draft) and not any_of(_TOP_TAPS)(draft)


IGNORES: tuple[Ignores, ...] = (
    _ignores(
        _NESTED_TAPS,
        "the V2 runner chooses layers by the top level, and takes (2, N // 2, N - 3) without it",
        ("eagle3", "eagle3-mla"),
        _AUX,
        when=_nested_taps_only,
    ),
    _ignores("norm_before_fc", "builds no norm before fc", ("eagle3-mla",), _MLA, False),
    _ignores("use_aux_norm", "reads fc_norm only", (*_EAGLE3S, "eagle3-mla"), _EAGLE3, False, when=unless("fc_norm")),
    _ignores("fc_norm", "builds no norm per tap", ("peagle",), _ALGOS, False, when=speculators),
    _ignores("norm_output", "recycles the state before the norm", ("peagle",), _ALGOS, False, when=speculators),
    _ignores("bias", "builds fc without a bias", _EAGLE3S, _EAGLE3, False, when=plain),
    _ignores(
        "truncated_vocab_size",
        "reads draft_vocab_size only",
        (*_EAGLE3S, "eagle3-mla"),
        _EAGLE3,
        when=unless("draft_vocab_size"),
    ),
    _ignores(
        "rope_is_neox_style",
        "reads is_neox_style, and rotates halves without it",
        _BLOCKS,
        _DFLASH,
        True,
        when=unless("is_neox_style"),
    ),
    _ignores("is_neox_style", "rotates halves", ("eagle1", *_EAGLE3S), "model_executor/models/llama.py", True),
    _ignores("rope_is_neox_style", "rotates halves", ("eagle1", *_EAGLE3S), "model_executor/models/llama.py", True),
    _ignores("fc_layernorm", "gives fc the taps without a norm", _BLOCKS, _DFLASH, False),
    _ignores("dflash_config.fc_layernorm", "gives fc the taps without a norm", _BLOCKS, _DFLASH, False),
    _ignores(
        "dflash_config.output_multiplier",
        "leaves the logits as they are; only DFlash2 multiplies",
        ("dflash", "dspark"),
        _DFLASH2,
        1,
        1.0,
    ),
    _ignores(
        "output_multiplier",
        "reads it in dflash_config, and for DFlash2 only",
        _BLOCKS,
        _DFLASH2,
        1,
        1.0,
        when=unless("dflash_config.output_multiplier"),
    ),
    _ignores(
        "dflash_config.final_logit_softcapping",
        "leaves the logits as they are; only DFlash2 caps them",
        ("dflash", "dspark"),
        _DFLASH2,
        0,
        0.0,
    ),
    _ignores(
        "dflash_config.input_embedding_scale",
        "takes the embeddings as they are; only DFlash2 scales them",
        ("dflash", "dspark"),
        _DFLASH2,
        1,
        1.0,
    ),
    _ignores(
        "input_embedding_scale",
        "reads it in dflash_config, and for DFlash2 only",
        _BLOCKS,
        _DFLASH2,
        1,
        1.0,
        when=unless("dflash_config.input_embedding_scale"),
    ),
    _ignores(
        "attention_value_scale",
        "reads it in dflash_config only",
        _BLOCKS,
        _DFLASH,
        1,
        1.0,
        when=unless("dflash_config.attention_value_scale"),
    ),
    _ignores(
        "attention_sink_bias",
        "reads it in dflash_config, or as add_swa_attention_sink_bias",
        _BLOCKS,
        _DFLASH,
        False,
        when=unless("dflash_config.attention_sink_bias", "add_swa_attention_sink_bias"),
    ),
    _ignores(
        "sample_from_anchor",
        "drafts from row 1 on",
        _BLOCK,
        "v1/worker/gpu/spec_decode/dflash/speculator.py",
        False,
        when=plain,
    ),
    _ignores(
        "query_zero_predicts_next",
        "drafts from row 1 on",
        _BLOCK,
        "v1/worker/gpu/spec_decode/dflash/speculator.py",
        False,
    ),
    _ignores(
        "dflash_config.sample_from_anchor",
        "reads it at top level, and takes true without it",
        ("dspark",),
        "v1/worker/gpu/spec_decode/dspark/speculator.py",
        True,
    ),
    _ignores(
        "sliding_window_non_causal",
        "takes sliding layers for causal and full ones for two-sided",
        ("dspark",),
        _ALGOS,
        False,
        when=both(speculators, _has_sliding),
    ),
)


def why_not_fused(draft: Draft) -> str | None:
    """Why vLLM projects the context layer by layer, or does not project one at all; None where one GEMM serves all layers."""
    spec = draft.spec
    if spec is None:
        return "the draft's family is not known"
    if spec.family not in _BLOCKS or spec.packaging == "embedded":
        return Declined(f"has no fused path for a {spec.family} draft", "absent")
    if spec.block is not None and spec.block.variant == "laguna":
        # Each layer norms the context itself, so weights are stacked for one batched product.
        return None
    quantised = [layer.index for layer in spec.layers if stores_quantised_k(draft, layer.index)]
    if quantised:
        return f"projects layer by layer where weights are quantised: layers {', '.join(map(str, quantised))}"
    return None
