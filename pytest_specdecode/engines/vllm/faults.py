"""vLLM: what it does about each fault of a draft."""

from __future__ import annotations

from pytest_specdecode.engines.base import Known, falls_back, fine, serves_wrong, stops
from pytest_specdecode.engines.hf_config import THETA_DEFAULTS
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

_EAGLE3 = "model_executor/models/llama_eagle3.py"
_DFLASH = "model_executor/models/qwen3_dflash.py"
_DSPARK = "model_executor/models/qwen3_dspark.py"
_DFLASH2 = "model_executor/models/qwen3_dflash2.py"
_MLA = "model_executor/models/deepseek_eagle3.py"
_LOADER = "model_executor/models/utils.py"
_AUX = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
_SHARING = "v1/worker/gpu/spec_decode/eagle/utils.py, dflash/utils.py"
_UNNOTICED = "load_weights returns nothing, so missing tensors are not noticed"
_UNKNOWN_NAME = "There is no module or parameter named <tensor>"
_REGISTRY = "model_executor/models/registry.py"
_SPEC_DECODE = "v1/worker/gpu/spec_decode"
_SPECULATORS = "transformers_utils/configs/speculators/base.py"
_ALGOS = "transformers_utils/configs/speculators/algos.py"
_SAME_ATTENTION = "All layers must have the same attn config for DFlash precomputation"


def _theta_missing(spec: DraftSpec) -> Outcome:
    if spec.packaging == "speculators":
        block = spec.block is not None and spec.block.variant != "peagle"
        return serves_wrong(f"takes rope_theta {1_000_000 if block else 10_000}", _DFLASH if block else _EAGLE3)
    theta = THETA_DEFAULTS.get(spec.model_type or "", 10_000)
    return serves_wrong(f"takes rope_theta {theta:.0f}", "transformers' configuration classes")


def _head_missing(spec: DraftSpec) -> Outcome:
    if not spec.vocabulary.is_reduced:
        return fine("shares the target's head", _SHARING)
    if spec.family == "dspark":
        return stops(
            "Reduced-vocabulary Qwen3 DSpark checkpoints must include lm_head weights; the full target lm_head cannot "
            "be shared.",
            _DSPARK,
        )
    return serves_wrong("shares the target's head and takes its first rows for the draft's", _SHARING)


def _embedding_missing(spec: DraftSpec) -> Outcome:
    if spec.target_hidden_size == spec.hidden_size:
        return fine("shares the target's embedding", _SHARING)
    return stops("shares the target's embedding, which is of another width: a shape error at the first pass", _SHARING)


def _d2t_missing(spec: DraftSpec) -> Outcome:
    if spec.family == "dspark":
        return stops(
            "Reduced-vocabulary Qwen3 DSpark checkpoints must include a d2t mapping so sampled draft ids can be converted "
            "to target ids.",
            _DSPARK,
        )
    return serves_wrong("takes draft ids for target ids: accepted length 1.12 instead of 2.99", "PR 18909")


def _taps_missing(spec: DraftSpec) -> Outcome:
    default = "the target's default taps (2, N // 2, N - 3)"
    if spec.block is None or spec.block.variant == "peagle":
        return Outcome(outcome="unknown", message=f"takes {default}, right only if it was trained so", source=_AUX)
    if spec.packaging == "speculators":
        return stops("KeyError: aux_hidden_state_layer_ids", _ALGOS)
    if len(spec.layers) == 3:
        return serves_wrong(f"takes {default}", _AUX)
    return stops(f"builds fc for one tap a layer and takes {default}: features of another width than fc takes", _DFLASH)


def _taps_range(spec: DraftSpec) -> Outcome:
    if spec.block is not None and spec.block.variant != "peagle":
        return stops(
            "DFlash drafter expects <n> concatenated aux hidden features but received fewer: target_layer_ids reference "
            "layers that do not exist in the target model",
            _DFLASH,
        )
    return stops("a state past the last layer is not handed out: features of another width than fc takes", _EAGLE3)


def _block_size_unread(otherwise: Outcome) -> Known:
    """DFlash drafts as many rows as it is told to; DSpark takes the trained block."""
    unread = fine("drafts num_speculative_tokens rows and reads no block_size", _SPEC_DECODE)
    return lambda spec: otherwise if spec.family == "dspark" else unread


#: Labels of DSpark drafts in the registry of models.
_DSPARKLABELS = (
    "DSparkDraftModel",
    "DSparkV41DraftModel",
    "Qwen3DSparkModel",
    "Qwen3OmniDSparkModel",
    "K3DSparkModel",
    "MuseSparkDSparkModel",
    "Gemma4DSparkModel",
)


def _dspark_label(spec: DraftSpec) -> Outcome:
    if not spec.architectures:
        return Outcome(outcome="unknown")
    if spec.architectures[0] in _DSPARKLABELS:
        return fine("registers the label", _REGISTRY)
    return stops(f"registers no {spec.architectures[0]}", _REGISTRY)


def _speculators_layer_type(spec: DraftSpec) -> Outcome:
    if spec.family != "eagle3" or spec.model_type is None:
        return Outcome(outcome="unknown")
    if spec.model_type in ("llama", "qwen3"):
        return fine("builds llama and qwen3 layers", _ALGOS)
    return stops(f"Unsupported model_type {spec.model_type} for Eagle3 speculator", _ALGOS)


#: Labels in the registry of models, and those that are found there with `Eagle3` or `DFlash` put before them.
LABELS = {
    "eagle3": (
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Qwen2_5vlForCausalLM",
        "Qwen3vlForCausalLM",
        "Qwen3ForCausalLM",
    ),
    "eagle3-mla": ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    "peagle": ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"),
    "dflash": (
        "DFlashDraftModel",
        "DFlashLagunaForCausalLM",
        "MuseGlimmerAssistantModel",
        "DFlashMuseGlimmerAssistantModel",
    ),
    "dflash2": ("DFlash2DraftModel", "DFlash2BeamDraftModel"),
}


def _mtp_layers_missing(spec: DraftSpec) -> Outcome:
    if spec.model_type in ("deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_mtp", "glm_moe_dsa"):
        return stops(
            "MTP speculative decoding layer <i> weights missing from checkpoint.",
            "model_executor/models/deepseek_mtp.py",
        )
    return Outcome(outcome="unknown")


def _heads_count(spec: DraftSpec) -> Outcome:
    if spec.family in ("medusa", "mlp-speculator"):
        return stops("registers no class for Medusa or the MLP speculator any more", _REGISTRY)
    return Outcome(outcome="unknown")


#: What it does about each fault, by slug.
FAULTS: dict[str, Known] = {
    "dtype-overflow": serves_wrong("casts the weights; what passes 65504 becomes infinite", "arithmetic"),
    "key-misspelled": Outcome(
        outcome="unknown",
        message="passes over a key that it does not know",
        source="transformers' configuration classes keep any key",
    ),
    "architecture-unknown": stops(
        "registers no class for the label", f"{_REGISTRY}, transformers_utils/configs/eagle.py"
    ),
    "activation": stops(
        "Unsupported activation: <name>. Only silu is supported for now.", "model_executor/models/llama.py"
    ),
    "model-type-unknown": stops(
        "AutoConfig raises at start, where it has no class of its own", "transformers_utils/config.py"
    ),
    "rope-type-unknown": stops(
        "ValueError: Unknown RoPE scaling type <name>", "model_executor/layers/rotary_embedding"
    ),
    "null-value": stops(
        "StrictDataclassFieldValidationError: Validation error for field",
        "transformers 5; Model-Optimizer triage guide",
    ),
    "name-legacy-norm": stops(_UNKNOWN_NAME, _LOADER),
    "quantization-disagrees": stops(
        "size mismatch: a quantised parameter is built where a plain one is stored, or the reverse", "PR 49187"
    ),
    "head-quantised": stops("There is no module or parameter named lm_head.input_scale", "issue 45102"),
    "architecture-plain-llama": fine("renames it to an EAGLE class of its own", "transformers_utils/configs/eagle.py"),
    "lm-head-missing": _head_missing,
    "embedding-missing": _embedding_missing,
    "tied-reduced": fine("does not look at tie_word_embeddings; the file's own head counts", _EAGLE3),
    "d2t-missing": _d2t_missing,
    "d2t-absolute": serves_wrong("adds the index once more: every id is shifted", _EAGLE3),
    "d2t-out-of-range": stops("an index assertion on the device, at the first pass", _EAGLE3),
    "d2t-zero": serves_wrong("drafts from the first ids of the vocabulary only", _EAGLE3),
    "t2d-wrong": fine("does not read t2d", _EAGLE3),
    "tensor-missing": serves_wrong(_UNNOTICED, _EAGLE3),
    "fc-missing": serves_wrong(_UNNOTICED, _EAGLE3),
    "markov-missing": serves_wrong(_UNNOTICED, _DSPARK),
    "bias-missing": serves_wrong(_UNNOTICED, _EAGLE3),
    "confidence-missing": fine("drafts without a confidence head where the file holds none", _DSPARK),
    "markov-prefix": stops(_UNKNOWN_NAME, _LOADER),
    "layer-count": serves_wrong(
        "layers that the file lacks keep what memory held; one beyond the number stops the server", _EAGLE3
    ),
    "tensor-unexpected": stops(_UNKNOWN_NAME, _LOADER),
    "name-prefixed": stops(_UNKNOWN_NAME, _LOADER),
    "name-joined": stops(_UNKNOWN_NAME, _MLA),
    "tensor-shape": stops("the loader's shape assertion", _LOADER),
    "fc-width": stops("the loader's shape assertion", _LOADER),
    "fc-skipped": fine("puts the target's states through fc whatever their width", _EAGLE3),
    "bias-dropped": stops(_UNKNOWN_NAME, _LOADER),
    "q-lora-rank-null": stops(_UNKNOWN_NAME, _MLA),
    "q-lora-rank-absent": serves_wrong("DeepSeek-V3's configuration class fills in 1536", _MLA),
    "mla-field-missing": serves_wrong("the configuration class fills in its default, or the model 0", _MLA),
    "mask-hidden-missing": stops(
        "mask_hidden not found in weights but model is configured for parallel drafting. "
        "Please provide mask_hidden in the weights.",
        _EAGLE3,
    ),
    "parallel-mask-token-missing": stops("ValueError where no key states a mask token", "v1/worker/gpu/spec_decode"),
    "target-hidden-size": stops("a shape assertion", "issue 18906"),
    "target-vocab-size": stops("index out of range", "issue 34583"),
    "target-rotated": Outcome(
        outcome="unknown",
        message="hands the draft the states as they are; acceptance falls where it was trained on plain states",
        source="vllm-ascend PR 6914",
    ),
    "nan": serves_wrong("NaN spreads through every head that reads the tensor", "arithmetic"),
    "degenerate": serves_wrong("serves what the tensor gives", "arithmetic"),
    "taps-miscounted": stops("the loader's shape assertion: fc is built for num_aux_hidden_states taps", _EAGLE3),
    "taps-missing": _taps_missing,
    "taps-range": _taps_range,
    "taps-unordered": serves_wrong("sorts them, so fc reads permuted features", "model_executor/models/interfaces.py"),
    "taps-places-differ": serves_wrong("reads the top level first", "v1/worker/gpu_model_runner.py"),
    "taps-nested-only": serves_wrong(
        "the V2 runner does not choose layers by eagle_config and takes the default; the V1 runner reads it",
        "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    ),
    "taps-top-only": fine("reads the top level first", "v1/worker/gpu_model_runner.py"),
    "theta-missing": _theta_missing,
    "theta-disagrees": serves_wrong(
        "reads rope_scaling first, else rope_parameters, then the flat key",
        "transformers' configuration classes, modeling_rope_utils.py",
    ),
    "mask-embedding-file": lambda spec: (
        serves_wrong("ignores it: masked rows start from the target's row of the mask token", "PR 46104, PR 46105")
        if spec.block is not None
        else Outcome(outcome="unknown")
    ),
    "mask-token-missing": stops("ValueError where no key states a mask token", _SPEC_DECODE),
    "block-size-missing": _block_size_unread(
        stops(
            "A speculative model was provided, but `num_speculative_tokens` was not provided",
            "config/speculative.py",
        )
    ),
    "block-size-disagrees": _block_size_unread(serves_wrong("reads the top level only", "config/speculative.py")),
    "block-size-nested-only": _block_size_unread(
        stops(
            "A speculative model was provided, but `num_speculative_tokens` was not provided",
            "config/speculative.py",
        )
    ),
    "layer-type-unknown": serves_wrong("takes the layer for full attention", _DFLASH),
    "layer-types-length": stops("IndexError where a layer has no type", _DFLASH),
    "window-missing": stops(
        "DFlash sliding attention requires a window size configured in dflash_config.swa_window_size "
        "or the top-level sliding_window.",
        _DFLASH,
    ),
    "causality-unstated": Outcome(
        outcome="unknown", message="takes sliding layers for causal, full ones for two-sided", source=_DFLASH
    ),
    "layer-types-mixed": Outcome(outcome="unknown", message="needs the V2 model runner", source=_DFLASH),
    "laguna-draft-vocab": stops(
        "wants draft_vocab_size, the same as vocab_size", "model_executor/models/laguna_dflash.py"
    ),
    "dflash2-half-pair": stops("KeyError: the key", _DFLASH2),
    "dflash2-keys-missing": stops("KeyError: the key", _DFLASH2),
    "domino-keys": stops("has no class for Domino", _REGISTRY),
    "domino-prefix": stops("has no class for Domino", _REGISTRY),
    "dflare-unserved": stops("has no class for DFlare", _REGISTRY),
    "dspark-keys-nested": stops("wants the heads' keys at top level: AttributeError", _DSPARK),
    "dspark-label": _dspark_label,
    "k3-fields": stops(
        "wants draft_vocab_size to be vocab_size, and num_target_layers the number of taps",
        "transformers_utils/configs/k3_dspark.py",
    ),
    "speculators-structure": stops("Invalid speculators config structure", _SPECULATORS),
    "speculators-key-missing": stops("KeyError: the key", _ALGOS),
    "speculators-layer-config": stops("Invalid speculators config structure", _SPECULATORS),
    "speculators-layer-type": _speculators_layer_type,
    "tokens-exceed-block": serves_wrong(
        "drafts rows that no one trained: accepted length 1.31 instead of 2.74", "PR 41834"
    ),
    "fused-kv-num-kv-heads": stops(_SAME_ATTENTION, _DFLASH),
    "fused-kv-head-dim": stops(_SAME_ATTENTION, _DFLASH),
    "fused-kv-hidden-size": stops("stacks the rows of all layers: sizes of tensors must match", _DFLASH),
    "fused-kv-dtype": fine("loads every layer in one dtype", _DFLASH),
    "fused-kv-k-norm": serves_wrong("builds k_norm in every layer, and does not notice a missing weight", _DFLASH),
    "fused-kv-norm-kind": serves_wrong("multiplies by w where 1 + w is meant", _DFLASH),
    "fused-kv-q-size": stops("the loader's shape assertion: every layer is built from one configuration", _DFLASH),
    "fused-kv-v-head-dim": stops("the loader's shape assertion: V is built as wide as K", _DFLASH),
    "fused-kv-rotary-dim": serves_wrong(
        "uses layer 0's cos/sin table for every layer; rotary_dim is not compared", _DFLASH
    ),
    "fused-kv-rope-style": stops("All layers must have the same RoPE parameters for DFlash precomputation", _DFLASH),
    "fused-kv-rope-theta": serves_wrong("uses layer 0's cos/sin table for every layer", _DFLASH),
    "fused-kv-rope-scaling": serves_wrong("uses layer 0's cos/sin table for every layer", _DFLASH),
    "fused-kv-bias": serves_wrong("uses a bias only where layer 0 has one", _DFLASH),
    "fused-kv-value-scale": serves_wrong("multiplies every layer by layer 0's scale", _DFLASH),
    "fused-kv-norm-eps": serves_wrong("norms every layer with layer 0's eps", _DFLASH),
    "fused-kv-quantization": falls_back("projects layer by layer where weights are quantised", _DFLASH),
    "tensor-parallel-heads": stops("asserts that the heads divide among the ranks: AssertionError", _DFLASH),
    "mtp-layers-missing": _mtp_layers_missing,
    "mtp-layers-beyond": stops("KeyError: the name of the layer's tensor", "local-inference-lab/vllm PR 436"),
    "mtp-norm-convention": serves_wrong(
        "multiplies by w or by 1 + w as the target's class does, whatever the file holds",
        "model_executor/models/deepseek_mtp.py, qwen3_next_mtp.py",
    ),
    "heads-count": _heads_count,
}
