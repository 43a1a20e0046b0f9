"""What TensorRT-LLM takes each setting of a draft to be, which keys it passes over, and when it fills the context's K/V by its fused path.

Classes: `Eagle3ForCausalLM` (eagle3 and eagle3-mla) and `DFlashForCausalLM` (dflash, Laguna included). Its DSpark drafter lies in a module
that was not read.
"""

from __future__ import annotations

from typing import Any

from pytest_specdecode.engines.base import Declined, Ignores, Reads
from pytest_specdecode.engines.hf_config import any_of, as_bool, as_length, both, num_layers, plain, plus_one, unless
from pytest_specdecode.families import Draft
from pytest_specdecode.spec import MLASpec

_SPEC = "_torch/models/modeling_speculative.py"
_DFLASH = "_torch/models/modeling_dflash.py"
_WORKER = "_torch/speculative/dflash.py"

_EAGLE3S = ("eagle3", "eagle3-mla")
_BLOCK = ("dflash",)


def _vocab_size(draft: Draft) -> int | None:
    return None if draft.spec is None else draft.spec.vocabulary.vocab_size


def _is_laguna(draft: Draft) -> bool:
    return draft.spec is not None and draft.spec.block is not None and draft.spec.block.variant == "laguna"


READS: tuple[Reads, ...] = (
    Reads(setting="norm-before-residual", default=False, families=_EAGLE3S, when=plain, source=_SPEC),
    Reads(
        setting="norm-before-fc",
        places=("eagle_config.norm_before_fc",),
        default=False,
        take=as_bool,
        families=_EAGLE3S,
        when=plain,
        source=f"{_SPEC}; PR 10124",
    ),
    Reads(
        setting="fc-norm",
        places=("fc_norm",),
        default=False,
        take=as_bool,
        families=_EAGLE3S,
        when=plain,
        source=f"{_SPEC}; PR 14988",
    ),
    Reads(
        setting="norm-output",
        places=("eagle_config.return_hidden_post_norm",),
        take=as_bool,
        families=_EAGLE3S,
        when=lambda draft: plain(draft) and any_of("eagle_config.return_hidden_post_norm")(draft) and _post_norm(draft),
        source=_SPEC,
    ),
    Reads(
        setting="norm-output",
        places=("norm_output",),
        default=False,
        take=as_bool,
        families=_EAGLE3S,
        when=plain,
        source=f"{_SPEC}; PR 14988",
    ),
    Reads(
        setting="qkv-bias",
        places=("attention_bias",),
        default=False,
        take=as_bool,
        families=("eagle3",),
        when=plain,
        source=_SPEC,
    ),
    Reads(setting="qkv-bias", default=False, families=("eagle3-mla",), when=plain, source=_SPEC),
    Reads(
        setting="fc-bias", places=("bias",), default=False, take=as_bool, families=_EAGLE3S, when=plain, source=_SPEC
    ),
    Reads(setting="layers", default=None, families=_EAGLE3S, when=plain, source=_SPEC),
    Reads(setting="is-neox-style", default=True, families=("eagle3",), when=plain, source=_SPEC),
    Reads(setting="is-neox-style", default=False, families=("eagle3-mla",), when=plain, source=_SPEC),
    Reads(
        setting="draft-vocab-size",
        places=("draft_vocab_size",),
        default=_vocab_size,
        families=_EAGLE3S,
        when=plain,
        source=_SPEC,
    ),
    Reads(
        setting="taps",
        places=("dflash_config.target_layer_ids",),
        take=plus_one,
        families=_BLOCK,
        when=both(plain, any_of("dflash_config.target_layer_ids")),
        source=f"{_DFLASH}, {_WORKER}",
    ),
    Reads(
        setting="taps-count",
        places=("dflash_config.target_layer_ids",),
        take=as_length,
        families=_BLOCK,
        when=both(plain, any_of("dflash_config.target_layer_ids")),
        source=f"{_DFLASH}, {_WORKER}",
    ),
    Reads(
        setting="mask-token-id",
        places=("dflash_config.mask_token_id", "mask_token_id"),
        default=_vocab_size,
        families=_BLOCK,
        when=plain,
        source=_DFLASH,
    ),
    Reads(
        setting="block-size",
        places=("block_size", "dflash_config.block_size"),
        families=_BLOCK,
        when=both(plain, _is_laguna, any_of("block_size", "dflash_config.block_size")),
        source=_DFLASH,
    ),
    Reads(
        setting="block-size",
        places=("block_size",),
        families=_BLOCK,
        when=both(plain, any_of("block_size")),
        source=f"{_DFLASH}, {_WORKER}",
    ),
    Reads(setting="fc-bias", default=False, families=_BLOCK, when=plain, source=_DFLASH),
    Reads(setting="is-neox-style", default=True, families=_BLOCK, when=plain, source=_DFLASH),
    Reads(setting="layers", default=None, families=_BLOCK, when=plain, source=_DFLASH),
    Reads(setting="value-scale", default=1.0, families=_BLOCK, when=plain, source=_DFLASH),
    Reads(
        setting="draft-vocab-size",
        default=_vocab_size,
        families=_BLOCK,
        when=plain,
        source=f"{_DFLASH}: the target's head serves every draft",
    ),
)


def _post_norm(draft: Draft) -> bool:
    eagle_config = draft.checkpoint.config.get("eagle_config")
    return isinstance(eagle_config, dict) and bool(eagle_config.get("return_hidden_post_norm"))


def _reduced(draft: Draft) -> bool:
    return draft.spec is not None and draft.spec.vocabulary.is_reduced


def _ignores(key: str, instead: str, families: tuple[str, ...], source: str, *harmless: Any, **fields: Any) -> Ignores:
    return Ignores(key=key, instead=instead, families=families, harmless=harmless, source=source, **fields)


IGNORES: tuple[Ignores, ...] = (
    _ignores("norm_before_residual", "adds the hidden state before its norm", _EAGLE3S, _SPEC, False),
    _ignores(
        "norm_before_fc",
        "reads it in eagle_config only",
        _EAGLE3S,
        _SPEC,
        False,
        when=unless("eagle_config.norm_before_fc"),
    ),
    _ignores("use_aux_norm", "reads fc_norm only", _EAGLE3S, _SPEC, False, when=unless("fc_norm")),
    _ignores("is_neox_style", "rotates halves", ("eagle3", *_BLOCK), f"{_SPEC}, {_DFLASH}", True),
    _ignores("rope_is_neox_style", "rotates halves", ("eagle3", *_BLOCK), f"{_SPEC}, {_DFLASH}", True),
    _ignores(
        "is_causal",
        "lets layers with a window look back, and all others both ways",
        _BLOCK,
        _DFLASH,
        False,
        when=lambda draft: not _is_laguna(draft),
    ),
    _ignores(
        "dflash_config.causal",
        "lets layers with a window look back, and all others both ways",
        _BLOCK,
        _DFLASH,
        False,
        when=lambda draft: not _is_laguna(draft),
    ),
    _ignores(
        "dflash_config.block_size",
        "reads it at top level, and takes one row more than it drafts without it",
        _BLOCK,
        f"{_DFLASH}, {_WORKER}",
        when=lambda draft: not _is_laguna(draft) and not any_of("block_size")(draft),
    ),
    _ignores(
        "target_layer_ids",
        "reads it in dflash_config only",
        _BLOCK,
        _DFLASH,
        when=unless("dflash_config.target_layer_ids"),
    ),
    _ignores("dflash_config.attention_value_scale", "multiplies V by nothing", _BLOCK, _DFLASH, 1, 1.0),
    _ignores("attention_value_scale", "multiplies V by nothing", _BLOCK, _DFLASH, 1, 1.0),
    _ignores("dflash_config.attention_sink_bias", "attends without sinks", _BLOCK, _DFLASH, False),
    _ignores("attention_sink_bias", "attends without sinks", _BLOCK, _DFLASH, False),
    _ignores("fc_layernorm", "gives fc the taps without a norm", _BLOCK, _DFLASH, False),
    _ignores("dflash_config.fc_layernorm", "gives fc the taps without a norm", _BLOCK, _DFLASH, False),
    _ignores("draft_vocab_size", "drafts with the target's whole head", _BLOCK, _DFLASH, when=_reduced),
)


def why_not_fused(draft: Draft) -> str | None:
    """Why TensorRT-LLM does not fill the context's K/V by one GEMM; None where it does. It has no other path: it stops instead."""
    spec = draft.spec
    if spec is None:
        return "the draft's family is not known"
    if spec.family not in (*_BLOCK, "dspark") or spec.packaging == "embedded":
        return Declined(f"has no fused path for a {spec.family} draft", "absent")
    if any(isinstance(layer.attention, MLASpec) for layer in spec.layers):
        return Declined("DFlash block decode requires a fused self_attn.qkv_proj on every draft layer", "stops")
    return None if num_layers(draft) else Declined("DFlash requires at least one draft model layer.", "stops")
