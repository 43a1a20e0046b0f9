"""SGLang: how its draft models read a checkpoint.

Read from the wheel `sglang` 0.5.23 and from the project's issues and pull requests.
"""

from __future__ import annotations

from pytest_specdecode.engines.base import Engine, falls_back, fine, serves_wrong, stops
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

_K25 = "srt/models/kimi_k25_eagle3.py"
_FKV = "kernels/ops/speculative/fused_kv_materialize.py"
_WORKER = "srt/speculative/dflash_worker_v2.py"
_DFLASH = "srt/speculative/dflash_utils.py"
_FALLBACK = "DFLASH fused KV initialization failed, falling back to sequential path"


def _is_dflash(spec: DraftSpec) -> bool:
    return spec.family == "dflash"


def _missing_tensor(spec: DraftSpec) -> Outcome:
    return serves_wrong("the parameter keeps what memory held; nothing checks that every parameter was loaded", _K25)


def _unexpected(spec: DraftSpec) -> Outcome:
    if spec.family == "eagle3-mla":
        return serves_wrong("drops it with the warning `Eagle3 MLA: skipping unexpected weight <name>`", _K25)
    return serves_wrong("drops it without a word", "srt/models/llama_eagle3.py, dflash.py")


def _layer_count(spec: DraftSpec) -> Outcome:
    if spec.family == "eagle3-mla":
        return stops("EAGLE3 currently only supports 1 layer", _K25)
    return serves_wrong("layers that the file lacks stay uninitialised", "srt/models/llama_eagle3.py")


def _fc_width(spec: DraftSpec) -> Outcome:
    if _is_dflash(spec):
        return stops("DFLASH fc.weight shape mismatch", "srt/models/dflash.py")
    return stops("the loader's shape assertion", "srt/models/llama_eagle3.py")


def _theta_missing(spec: DraftSpec) -> Outcome:
    return serves_wrong("takes rope_theta 10000", "transformers' configuration classes")


def _taps_missing(spec: DraftSpec) -> Outcome:
    depth = spec.taps.num_target_layers
    if _is_dflash(spec):
        count = len(spec.layers)
        guess = f": {dflash_guess(count, depth)}" if depth and count else ""
        return serves_wrong(f"guesses evenly spaced taps{guess}", "issue 37475")
    guess = f" = [2, {depth // 2}, {depth - 3}]" if depth else ""
    return Outcome(
        outcome="unknown", message=f"captures the default [2, N // 2, N - 3]{guess}, right only if it was trained so"
    )


def dflash_guess(count: int, depth: int) -> list[int]:
    """The taps that readers assume for `count` draft layers and `depth` target layers where a file states none."""
    if count == 1:
        return [depth // 2]
    return [round(1 + index * (depth - 4) / (count - 1)) for index in range(count)]


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    known={
        "architecture-plain-llama": stops(
            "LlamaForCausalLM is no draft class here; users rewrite the field to LlamaForCausalLMEagle3", "PR 33966"
        ),
        "layer-count": _layer_count,
        "q-lora-rank-null": stops("Eagle3 MLA layer requires q_lora_rank in the draft config", _K25),
        "q-lora-rank-absent": serves_wrong(
            "DeepSeek-V3's configuration class fills in 1536; a bare one stops with an AttributeError", _K25
        ),
        "mla-field-missing": serves_wrong("the configuration class fills in its default", _K25),
        "lm-head-missing": serves_wrong(
            "drafts with an uninitialised head: accepted length 1.00, no error", "issue 27829"
        ),
        "tied-reduced": serves_wrong(
            "takes the whole embedding as the head of a reduced vocabulary", "SpecForge PR 140"
        ),
        "d2t-missing": serves_wrong("takes draft ids for target ids", _K25),
        "d2t-absolute": serves_wrong("adds the index once more: every id is shifted, none is checked", _K25),
        "d2t-out-of-range": serves_wrong("reads rows past the vocabulary; no range test", _K25),
        "d2t-zero": serves_wrong("drafts from the first ids of the vocabulary only", _K25),
        "t2d-wrong": fine("does not read t2d", _K25),
        "tensor-missing": _missing_tensor,
        "fc-missing": _missing_tensor,
        "markov-missing": serves_wrong("drafts without the Markov bias and says nothing", "PR 29917"),
        "tensor-unexpected": _unexpected,
        "name-prefixed": serves_wrong(
            "skips each with a warning, the two down projections without one: they stay uninitialised", _K25
        ),
        "name-joined": serves_wrong("drops it without a word: the projection stays uninitialised", _K25),
        "tensor-shape": stops("the loader's shape assertion", "srt/model_loader"),
        "fc-width": _fc_width,
        "fc-skipped": serves_wrong("takes a state of the embedding's width for a recycled one and skips fc", _K25),
        "bias-dropped": serves_wrong("builds no bias and drops the tensor", "srt/models/llama_eagle3.py"),
        "bias-missing": serves_wrong("the bias stays uninitialised", "srt/models/dflash.py"),
        "nan": serves_wrong("NaN spreads through every head that reads the tensor"),
        "degenerate": serves_wrong("serves what the tensor gives"),
        "taps-missing": _taps_missing,
        "taps-miscounted": stops(
            "the loader's shape assertion: fc is built for num_aux_hidden_states taps", "srt/models/llama_eagle3.py"
        ),
        "taps-range": stops("DFLASH target_layer_ids contains an out-of-range layer id", _DFLASH),
        "taps-places-differ": serves_wrong("reads eagle_config only", "srt/model_executor/spec_aux_hidden_state.py"),
        "taps-nested-only": fine("reads eagle_config", "srt/model_executor/spec_aux_hidden_state.py"),
        "taps-top-only": serves_wrong(
            "captures the default [2, N // 2, N - 3] instead: only eagle_config is read",
            "srt/model_executor/spec_aux_hidden_state.py",
        ),
        "theta-missing": _theta_missing,
        "theta-disagrees": serves_wrong("reads rope_parameters first, then the flat key", _K25),
        "mask-token-missing": serves_wrong("asks the tokenizer for <|MASK|>, adds it where it is absent", _WORKER),
        "mask-token-range": stops("DFLASH mask_token_id is outside the target vocab size", _WORKER),
        "block-size-missing": falls_back("takes 16 with a warning", "srt/arg_groups/speculative_hook.py"),
        "block-size-disagrees": serves_wrong("dflash_config wins over the top level", _DFLASH),
        "fused-kv-num-kv-heads": falls_back(_FALLBACK, _WORKER),
        "fused-kv-head-dim": falls_back(_FALLBACK, _WORKER),
        "fused-kv-rotary-dim": falls_back(_FALLBACK, _WORKER),
        "fused-kv-rope-style": falls_back("non-neox RoPE is not supported for fused KV path", _WORKER),
        "fused-kv-rope-theta": serves_wrong("uses layer 0's cos/sin table for every layer", _FKV),
        "fused-kv-rope-scaling": serves_wrong("uses layer 0's cos/sin table for every layer", _FKV),
        "fused-kv-hidden-size": falls_back(_FALLBACK, _WORKER),
        "fused-kv-dtype": fine("stacking promotes to the wider dtype: right, twice the memory and slower", _FKV),
        "fused-kv-bias": falls_back("qkv bias is not supported for fused KV path", _WORKER),
        "fused-kv-k-norm": stops("the layer-by-layer path needs k_norm as well: AttributeError", _WORKER),
        "fused-kv-norm-kind": serves_wrong("multiplies by w where 1 + w is meant", _FKV),
        "fused-kv-v-head-dim": serves_wrong("cuts V as wide as K: the rows are split in the wrong place", _FKV),
        "fused-kv-value-scale": serves_wrong("the fused path has no value scale", _FKV),
        "fused-kv-q-size": serves_wrong("cuts K and V from inside the rows of Q", _FKV),
        "fused-kv-quantization": falls_back("quantized qkv_proj is not supported for this path", _WORKER),
        "fused-kv-norm-eps": fine("takes an eps per layer", _FKV),
    },
)
