"""TensorRT-LLM: what it does about each fault of a draft."""

from __future__ import annotations

from pytest_specdecode.engines.base import Known, fine, serves_wrong, stops
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

_SPEC = "_torch/models/modeling_speculative.py"
_DFLASH = "_torch/models/modeling_dflash.py"
_DRAFT = "_torch/speculative/dflash.py"


def _head_missing(spec: DraftSpec) -> Outcome:
    if spec.block is None and spec.vocabulary.is_reduced:
        return serves_wrong("takes the target's head, whose ids d2t does not map", _SPEC)
    return fine("takes the target's head", _DFLASH if spec.block is not None else _SPEC)


def _eagle3_only(outcome: Outcome) -> Known:
    """`outcome` for EAGLE3; a DFlash draft uses the target's head and no map, and of others nothing is known."""

    def known(spec: DraftSpec) -> Outcome:
        if spec.family in ("eagle3", "eagle3-mla"):
            return outcome
        if spec.family == "dflash":
            return fine("uses the target's head and reads no map", _DFLASH)
        return Outcome(outcome="unknown")

    return known


def _dflash_only(outcome: Outcome) -> Known:
    return lambda spec: outcome if spec.family == "dflash" else Outcome(outcome="unknown")


#: What it does about each fault, by slug.
FAULTS: dict[str, Known] = {
    "dtype-overflow": serves_wrong("casts the weights; what passes 65504 becomes infinite", "arithmetic"),
    "key-misspelled": Outcome(
        outcome="unknown",
        message="passes over a key that it does not know",
        source="transformers' configuration classes keep any key",
    ),
    "lm-head-missing": _head_missing,
    "embedding-missing": _dflash_only(fine("uses the target's embedding", _DFLASH)),
    "tied-reduced": _dflash_only(fine("uses the target's head", _DFLASH)),
    "d2t-absolute": _eagle3_only(serves_wrong("adds the index once more: every id is shifted", _SPEC)),
    "d2t-zero": _eagle3_only(serves_wrong("drafts from the first ids of the vocabulary only", _SPEC)),
    "tensor-unexpected": serves_wrong("partial loading drops it without a word", _SPEC),
    "bias-dropped": serves_wrong("partial loading drops it without a word", _SPEC),
    "fc-missing": _dflash_only(stops("AttributeError: fc is built from the file", _DFLASH)),
    "fc-width": _dflash_only(stops("builds fc as wide as the file has it: a shape error at the first pass", _DFLASH)),
    "fc-skipped": _eagle3_only(serves_wrong("takes a state of the hidden size for a recycled one and skips fc", _SPEC)),
    "taps-top-only": _dflash_only(Outcome(outcome="unknown", message="reads dflash_config only", source=_DFLASH)),
    "taps-unordered": serves_wrong("sorts them, so fc reads permuted features", _DRAFT),
    "mask-token-missing": serves_wrong("takes vocab_size for the id, one past the embedding", _DFLASH),
    "causality-unstated": Outcome(
        outcome="unknown",
        message="lets layers with a window look back only, and all others both ways",
        source=_DFLASH,
    ),
    "dflare-unserved": stops("takes the backbone's class by model_type, and finds no fc: AttributeError", _DFLASH),
    "block-size-missing": serves_wrong("takes one row more than it drafts", _DRAFT),
    "block-size-nested-only": serves_wrong(
        "reads block_size at top level only, and takes one row more than it drafts without it", _DRAFT
    ),
    "block-size-disagrees": serves_wrong("reads block_size at top level only", _DFLASH),
    "tokens-exceed-block": stops("DFlash checkpoint was trained with block_size=<n>. Lower max_draft_len", _DRAFT),
    "nan": serves_wrong("NaN spreads through every head that reads the tensor", "arithmetic"),
    "degenerate": serves_wrong("serves what the tensor gives", "arithmetic"),
    "fused-kv-num-kv-heads": stops("refuses layers whose q/kv/head sizes differ", _DFLASH),
    "fused-kv-head-dim": stops("refuses layers whose q/kv/head sizes differ", _DFLASH),
    "fused-kv-hidden-size": stops("stacks the rows of all layers: sizes of tensors must match", _DFLASH),
    "fused-kv-q-size": stops("refuses layers whose q/kv/head sizes differ", _DFLASH),
    "fused-kv-rotary-dim": stops("refuses layers whose RoPE signature differs", _DFLASH),
    "fused-kv-rope-style": stops("refuses layers whose RoPE signature differs", _DFLASH),
    "fused-kv-rope-theta": stops("refuses layers whose RoPE signature differs", _DFLASH),
    "fused-kv-rope-scaling": stops("refuses layers whose RoPE signature differs", _DFLASH),
    "fused-kv-k-norm": stops("takes k_norm on all layers or on none", _DFLASH),
    "fused-kv-bias": serves_wrong("uses biases only where layer 0 has one", _DFLASH),
    "fused-kv-norm-kind": serves_wrong("multiplies by w where 1 + w is meant", _DFLASH),
    "fused-kv-value-scale": serves_wrong("multiplies V by nothing", _DFLASH),
    "fused-kv-norm-eps": stops("refuses layers whose k_norm eps differs", _DFLASH),
}
