"""SGLang: what it does about each fault of a draft."""

from __future__ import annotations

from pytest_specdecode.engines.base import Known, Misnames, falls_back, fine, serves_wrong, stops
from pytest_specdecode.engines.hf_config import THETA_DEFAULTS
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

_K25 = "srt/models/kimi_k25_eagle3.py"
_FKV = "kernels/ops/speculative/fused_kv_materialize.py"
_WORKER = "srt/speculative/dflash_worker_v2.py"
_DFLASH = "srt/speculative/dflash_utils.py"
_DRAFT = "srt/models/dflash.py"
_DSPARK = "srt/models/dspark.py"
_LLAMA = "srt/models/llama_eagle3.py"
_DSPARK_CONFIG = "srt/speculative/dspark_components/dspark_config.py"
_HOOK = "srt/arg_groups/speculative_hook.py"
_AUX = "srt/model_executor/model_runner_components/spec_aux_hidden_state.py"
_DSPARKLABELS = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel", "DSparkMiniMaxDraftModel")
_FALLBACK = "DFLASH fused KV initialization failed, falling back to sequential path"


def _drafts_blocks(spec: DraftSpec) -> bool:
    """Whether the draft is of the classes that use the target's embedding and head and read no maps."""
    return spec.family in ("dflash", "dflash2", "domino", "dspark")


def _no_map(otherwise: Outcome) -> Known:
    """`otherwise` for drafts whose map is read."""
    return lambda spec: (
        fine("reads no map: the target's whole head drafts", _DRAFT) if _drafts_blocks(spec) else otherwise
    )


def _by_family(blocks: Outcome, dspark: Outcome) -> Known:
    return lambda spec: dspark if spec.family == "dspark" else blocks


def _d2t_missing(spec: DraftSpec) -> Outcome:
    if spec.family == "dspark":
        return stops("the loader's shape assertion: markov_w2 is built with vocab_size rows", _DSPARK)
    if _drafts_blocks(spec):
        return fine("reads no map: the target's whole head drafts", _DRAFT)
    return serves_wrong("takes draft ids for target ids", _K25)


def _tied_reduced(spec: DraftSpec) -> Outcome:
    if _drafts_blocks(spec):
        return fine("uses the target's head", _DRAFT)
    return serves_wrong("takes the whole embedding as the head of a reduced vocabulary", "SpecForge PR 140")


def _head_missing(spec: DraftSpec) -> Outcome:
    if _drafts_blocks(spec):
        return fine("uses the target's head", _DRAFT)
    if spec.family == "eagle1":
        return fine("uses the target's head, and passes over one in the file", "srt/models/llama_eagle.py")
    if spec.vocabulary.draft_vocab_size is None:
        return fine("takes the target's head where draft_vocab_size is null", _LLAMA)
    return serves_wrong("drafts with an uninitialised head: accepted length 1.00, no error", "issue 27829")


def _embedding_missing(spec: DraftSpec) -> Outcome:
    if _drafts_blocks(spec):
        return fine("uses the target's embedding", _DRAFT)
    if spec.family not in ("eagle1", "eagle3", "eagle3-mla"):
        return Outcome(outcome="unknown")
    if spec.target_hidden_size == spec.hidden_size:
        return fine("uses the target's embedding", _K25)
    return serves_wrong("keeps its own where the target is of another width: it stays uninitialised", _K25)


def _dspark_label(spec: DraftSpec) -> Outcome:
    if not spec.architectures:
        return Outcome(outcome="unknown")
    if spec.packaging == "embedded" or spec.architectures[0] in _DSPARKLABELS:
        return fine("has a class for the label", _DSPARK)
    return stops(f"has no class for {spec.architectures[0]}", "srt/models")


def _missing_tensor(spec: DraftSpec) -> Outcome:
    return serves_wrong("the parameter keeps what memory held; nothing checks that every parameter was loaded", _K25)


def _unexpected(spec: DraftSpec) -> Outcome:
    if spec.family == "eagle3-mla":
        return serves_wrong("drops it with the warning `Eagle3 MLA: skipping unexpected weight <name>`", _K25)
    return serves_wrong("drops it without a word", f"{_LLAMA}, {_DRAFT}")


def _layer_count(spec: DraftSpec) -> Outcome:
    if spec.family == "eagle3-mla":
        return stops("EAGLE3 currently only supports 1 layer", _K25)
    return serves_wrong("layers that the file lacks stay uninitialised", _LLAMA)


def _fc_width(spec: DraftSpec) -> Outcome:
    if _drafts_blocks(spec):
        return stops("DFLASH fc.weight shape mismatch", _DRAFT)
    return stops("the loader's shape assertion", _LLAMA)


def _theta_missing(spec: DraftSpec) -> Outcome:
    theta = THETA_DEFAULTS.get(spec.model_type or "", 10_000)
    return serves_wrong(f"takes rope_theta {theta:.0f}", "transformers' configuration classes")


def _taps_missing(spec: DraftSpec) -> Outcome:
    if _drafts_blocks(spec):
        return serves_wrong("guesses evenly spaced taps", "issue 37475")
    return Outcome(
        outcome="unknown",
        message="captures the default [2, N // 2, N - 3], right only if it was trained so",
        source=_AUX,
    )


def _taps_top_only(spec: DraftSpec) -> Outcome:
    if _drafts_blocks(spec):
        return fine("reads both places", _DFLASH)
    return serves_wrong("captures the default [2, N // 2, N - 3] instead: only eagle_config is read", _AUX)


def _dflash2_keys(spec: DraftSpec) -> Outcome:
    if getattr(spec.options, "selector_rank", None) is None:
        return stops("DFlash selector draft requires dflash_config.selector_rank.", _DRAFT)
    return serves_wrong("builds no convolutions and drops their tensors", _DRAFT)


def _taps_range(spec: DraftSpec) -> Outcome:
    if _drafts_blocks(spec):
        return stops("DFLASH target_layer_ids contains an out-of-range layer id", _DFLASH)
    return stops("a state past the last layer is not captured: features of another width than fc takes", "PR 32334")


#: Entry classes of srt/models, by the family that each serves.
LABELS = {
    "eagle3": ("LlamaForCausalLMEagle3",),
    "eagle3-mla": ("Eagle3DeepseekV2ForCausalLM",),
    "dflash": ("DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"),
    "dflash2": ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"),
}

MISNAMES = (
    Misnames(
        pattern=r"^model\.",
        fault="name-prefixed",
        message="names start with `model.`, which the loader of a latent draft puts in front itself",
        due="",
        families=("eagle3-mla",),
        fix="export without the prefix",
    ),
    Misnames(
        pattern=r"fused_qkv_a_proj_with_mqa",
        fault="name-joined",
        message="the down projections are stored joined, and loaders wait for them one by one",
        due=("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
        families=("eagle3-mla",),
        fix="store q_a_proj (first q_lora_rank rows) and kv_a_proj_with_mqa (the rest) apart",
    ),
    Misnames(
        pattern=r"^(?:model\.)?aux_norm_(?:low|mid|high)\.",
        fault="name-legacy-norm",
        message="the tap norms go by their legacy names, which the loader of a latent draft skips",
        due=("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"),
        families=("eagle3-mla",),
        fix="store them as fc_norm.0, fc_norm.1 and fc_norm.2",
        severity="warning",
    ),
)


def _packed_draft(spec: DraftSpec) -> Outcome:
    if spec.family not in ("dflash", "dflash2"):
        return Outcome(outcome="unknown")
    return serves_wrong(
        "packed names reach none of the dense parameters: accepted length 1.10 where 1.85 was due", "issue 39087"
    )


def _cache_scale(spec: DraftSpec) -> Outcome:
    if not _drafts_blocks(spec):
        return Outcome(outcome="unknown")
    return falls_back("non-unit k_scale or v_scale is not supported for fused KV path", _WORKER)


#: What it does about each fault, by slug.
FAULTS: dict[str, Known] = {
    "dtype-overflow": serves_wrong("casts the weights; what passes 65504 becomes infinite", "arithmetic"),
    "sinks": Outcome(
        outcome="unknown",
        message="hands them to the attention backend; drafts of Nemotron 3.5 need --speculative-draft-attention-backend trtllm_mha",
        source=_DRAFT,
    ),
    "key-misspelled": Outcome(
        outcome="unknown",
        message="passes over a key that it does not know",
        source="transformers' configuration classes keep any key",
    ),
    "family-eagle-label": serves_wrong(
        "run as EAGLE, skips fc, for the states are as wide as the embedding: accepted length 1.00, no warning",
        "PR 21272",
    ),
    "family-disagrees": Outcome(
        outcome="unknown",
        message="goes by the label and looks at no tensor: what its class has no name for is dropped, what it lacks stays uninitialised",
        source=f"{_LLAMA}, {_DRAFT}",
    ),
    "architecture-unknown": stops("has no class for the label", "srt/models"),
    "activation": lambda spec: (
        stops("Unsupported DFlash activation: <name>. Supported activations are silu and swigluoai.", _DRAFT)
        if _drafts_blocks(spec)
        else stops("Unsupported activation: <name>. Only silu is supported for now.", "srt/models/llama.py")
    ),
    "model-type-unknown": stops("AutoConfig raises at start, where it has no class of its own", "issue 25673"),
    "rope-type-unknown": stops(
        "ValueError: Unknown RoPE scaling type <name>", "srt/layers/rotary_embedding/factory.py"
    ),
    "mtp-count-missing": stops(
        "ValueError: num_nextn_predict_layers is not in the config",
        "srt/models/deepseek_common/deepseek_weight_loader.py",
    ),
    "null-value": stops(
        "StrictDataclassFieldValidationError: Validation error for field",
        "transformers 5; Model-Optimizer triage guide",
    ),
    "cache-scale": _cache_scale,
    "name-legacy-norm": serves_wrong(
        "skips them with the warning `Eagle3 MLA: skipping unexpected weight <name>`", _K25
    ),
    "packed-draft": _packed_draft,
    "quantization-disagrees": stops("The size of tensor a (2048) must match the size of tensor b (4096)", "PR 36158"),
    "quantization-layer-index": stops(
        "Downcasting not allowed: target.dtype=torch.float8_e4m3fn, loaded_weight.dtype=torch.bfloat16", "PR 34906"
    ),
    "architecture-plain-llama": stops(
        "LlamaForCausalLM is no draft class here; users rewrite the field to LlamaForCausalLMEagle3", "PR 33966"
    ),
    "layer-count": _layer_count,
    "q-lora-rank-null": stops("Eagle3 MLA layer requires q_lora_rank in the draft config", _K25),
    "q-lora-rank-absent": serves_wrong(
        "DeepSeek-V3's configuration class fills in 1536; a bare one stops with an AttributeError", _K25
    ),
    "mla-field-missing": serves_wrong("the configuration class fills in its default", _K25),
    "lm-head-missing": _head_missing,
    "embedding-missing": _embedding_missing,
    "tied-reduced": _tied_reduced,
    "d2t-missing": _d2t_missing,
    "d2t-absolute": _no_map(serves_wrong("adds the index once more: every id is shifted, none is checked", _K25)),
    "d2t-out-of-range": _no_map(serves_wrong("reads rows past the vocabulary; no range test", _K25)),
    "d2t-zero": _no_map(serves_wrong("drafts from the first ids of the vocabulary only", _K25)),
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
    "bias-dropped": serves_wrong("builds no bias and drops the tensor", _LLAMA),
    "bias-missing": serves_wrong("the bias stays uninitialised", _DRAFT),
    "nan": serves_wrong("NaN spreads through every head that reads the tensor", "arithmetic"),
    "degenerate": serves_wrong("serves what the tensor gives", "arithmetic"),
    "taps-missing": _taps_missing,
    "taps-miscounted": stops("the loader's shape assertion: fc is built for num_aux_hidden_states taps", _LLAMA),
    "taps-range": _taps_range,
    "taps-unordered": serves_wrong(
        "captures in the order of the layers, so fc reads permuted features", "srt/models/llama.py"
    ),
    "taps-places-differ": serves_wrong("reads eagle_config only", _AUX),
    "taps-nested-only": fine("reads eagle_config", _AUX),
    "taps-top-only": _taps_top_only,
    "theta-missing": _theta_missing,
    "theta-disagrees": serves_wrong(
        "reads rope_scaling first, else rope_parameters, then the flat key",
        "transformers' configuration classes, modeling_rope_utils.py",
    ),
    "mask-token-missing": _by_family(
        serves_wrong("asks the tokenizer for <|MASK|>, adds it where it is absent", _WORKER),
        stops("DSpark requires mask_token_id to be set in the draft model config.", _DSPARK_CONFIG),
    ),
    "mask-token-conflict": stops(
        "DFLASH config mismatch: mask_token_id conflicts with the tokenizer's id for the mask token", _WORKER
    ),
    "target-hidden-size": lambda spec: (
        stops("DFLASH target_hidden feature dim mismatch", _DRAFT)
        if _drafts_blocks(spec)
        else stops("the first pass: features of another width than fc takes", "issue 32226")
    ),
    "target-depth": falls_back(
        "warns, and counts the taps by the layers of the target that runs", "srt/model_executor/model_runner.py"
    ),
    "target-rotated": Outcome(
        outcome="unknown",
        message="hands the draft the states as they are; one trained on plain states accepts nothing",
        source="PR 35629, vllm-ascend PR 12886",
    ),
    "target-quantised": Outcome(
        outcome="unknown",
        message="hands the draft the states as they are; an unquantised draft beside a W8A8 target accepted nothing",
        source="PR 35629",
    ),
    "mask-token-range": _by_family(
        stops("DFLASH mask_token_id is outside the target vocab size", _WORKER),
        stops("DSpark mask_token_id is outside the target vocab size", _DSPARK_CONFIG),
    ),
    "mask-hidden-missing": stops("has no class for heads that draft in parallel", "srt/models"),
    "parallel-mask-token-missing": stops("has no class for heads that draft in parallel", "srt/models"),
    "block-size-missing": _by_family(
        falls_back("takes 16 with a warning", _HOOK), falls_back("takes 7 with a warning", _HOOK)
    ),
    "block-size-nested-only": fine("reads dflash_config first", _DFLASH),
    "block-size-disagrees": serves_wrong("dflash_config wins over the top level", _DFLASH),
    "tokens-exceed-block": serves_wrong(
        "warns of a `DFLASH block size mismatch` and drafts rows that no one trained", _WORKER
    ),
    "layer-types-length": stops("DFLASH config.layer_types must contain one entry per draft layer", _DRAFT),
    "layer-type-unknown": stops("Unsupported DFLASH draft layer type", _DRAFT),
    "window-missing": stops("DFLASH sliding_attention layers require config.sliding_window.", _DFLASH),
    "layer-types-mixed": fine("keeps a window per layer", _DRAFT),
    "causality-unstated": Outcome(
        outcome="unknown",
        message="takes sliding layers for causal, full ones for two-sided; PR 34524 reports both readings",
        source=f"{_DRAFT}; PR 34524",
    ),
    "dflash2-half-pair": stops(
        "wants conv_kernel_size beside conv_group_size, selector_rank beside selector_top_k: ValueError", _DFLASH
    ),
    "dflash2-keys-missing": _dflash2_keys,
    "domino-keys": stops(
        "wants gru_hidden_dim and emb_dim, the same in dflash_config and at top level: ValueError", _DFLASH
    ),
    "domino-prefix": stops("wants pure_draft_prefix_len 1: ValueError", _DFLASH),
    "laguna-draft-vocab": stops("wants draft_vocab_size, the same as vocab_size", _DRAFT),
    "output-multiplier": stops("DFLASH output_multiplier must be positive.", _DFLASH),
    "dflare-unserved": stops("has no class for DFlare", "srt/models"),
    "dspark-speculators": stops(
        "refuses speculators_model_type dspark, whose slots are counted from one further on: ValueError", _DSPARK
    ),
    "dspark-keys-nested": stops("DSpark requires markov_rank > 0: the heads are built from the top level", _DSPARK),
    "dspark-label": _dspark_label,
    "markov-rank-zero": stops("wants markov_rank above 0", _DSPARK),
    "markov-prefix": serves_wrong("does not find the head and drafts without it", "PR 29917"),
    "confidence-missing": fine(
        "builds the head only where SGLANG_RAGGED_VERIFY_MODE is not static, and then refuses the file", _DSPARK
    ),
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
    "tensor-parallel-heads": stops(
        "DFlashAttention requires total_num_heads divisible by tp_size, and KV heads that divide among the ranks or ranks "
        "among the KV heads: AssertionError",
        _DRAFT,
    ),
    "mtp-layers-missing": serves_wrong(
        "serves a layer into which nothing was loaded: accepted length 1.000", "issue 35797"
    ),
}
