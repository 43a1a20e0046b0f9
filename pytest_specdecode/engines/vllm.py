"""vLLM: how its draft models read a checkpoint.

Read from the wheel `vllm` 0.33.0 and from the project's issues and pull requests.
"""

from __future__ import annotations

from pytest_specdecode.engines.base import Engine, falls_back, fine, serves_wrong, stops
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

_EAGLE3 = "model_executor/models/llama_eagle3.py"
_DFLASH = "model_executor/models/qwen3_dflash.py"
_SAME_ATTENTION = "All layers must have the same attn config for DFlash precomputation"


def _theta_missing(spec: DraftSpec) -> Outcome:
    default = 1_000_000 if spec.family == "dflash" else 10_000
    return serves_wrong(f"takes rope_theta {default}", _DFLASH if spec.family == "dflash" else _EAGLE3)


def _bias_dropped(spec: DraftSpec) -> Outcome:
    return stops("There is no module or parameter named <tensor>", _EAGLE3)


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    version="0.33.0",
    known={
        "architecture-plain-llama": fine(
            "renames it to an EAGLE class of its own", "transformers_utils/configs/eagle.py"
        ),
        "lm-head-missing": serves_wrong("the head keeps what memory held; missing tensors are not noticed", _EAGLE3),
        "tied-reduced": fine("does not look at tie_word_embeddings; the file's own head counts", _EAGLE3),
        "d2t-missing": serves_wrong("takes draft ids for target ids: accepted length 1.12 instead of 2.99", "PR 18909"),
        "d2t-absolute": serves_wrong("adds the index once more: every id is shifted", _EAGLE3),
        "t2d-wrong": fine("does not read t2d", _EAGLE3),
        "tensor-missing": serves_wrong("load_weights returns nothing, so missing tensors are not noticed", _EAGLE3),
        "fc-missing": serves_wrong("load_weights returns nothing, so missing tensors are not noticed", _EAGLE3),
        "tensor-unexpected": stops("There is no module or parameter named <tensor>", _EAGLE3),
        "tensor-shape": stops("the loader's shape assertion"),
        "fc-width": stops("the loader's shape assertion"),
        "bias-dropped": _bias_dropped,
        "mask-hidden-missing": stops(
            "mask_hidden not found in weights but model is configured for parallel drafting. "
            "Please provide mask_hidden in the weights.",
            _EAGLE3,
        ),
        "parallel-mask-token-missing": stops(
            "ValueError where no key states a mask token", "v1/worker/gpu/spec_decode"
        ),
        "nan": serves_wrong("NaN spreads through every head that reads the tensor"),
        "degenerate": serves_wrong("serves what the tensor gives"),
        "taps-miscounted": stops("the loader's shape assertion: fc is built for num_aux_hidden_states taps", _EAGLE3),
        "taps-places-differ": serves_wrong("reads the top level first", "v1/worker/gpu_model_runner.py"),
        "taps-nested-only": serves_wrong(
            "the V2 runner does not choose layers by eagle_config and takes the default; the V1 runner reads it",
            "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
        ),
        "taps-top-only": fine("reads the top level first", "v1/worker/gpu_model_runner.py"),
        "theta-missing": _theta_missing,
        "fused-kv-num-kv-heads": stops(_SAME_ATTENTION, _DFLASH),
        "fused-kv-head-dim": stops(_SAME_ATTENTION, _DFLASH),
        "fused-kv-rotary-dim": serves_wrong(
            "uses layer 0's cos/sin table for every layer; rotary_dim is not compared", _DFLASH
        ),
        "fused-kv-rope-style": stops(
            "All layers must have the same RoPE parameters for DFlash precomputation", _DFLASH
        ),
        "fused-kv-rope-theta": serves_wrong("uses layer 0's cos/sin table for every layer", _DFLASH),
        "fused-kv-rope-scaling": serves_wrong("uses layer 0's cos/sin table for every layer", _DFLASH),
        "fused-kv-bias": serves_wrong("uses a bias only where layer 0 has one", _DFLASH),
        "fused-kv-value-scale": serves_wrong("multiplies every layer by layer 0's scale", _DFLASH),
        "fused-kv-norm-eps": serves_wrong("norms every layer with layer 0's eps", _DFLASH),
        "fused-kv-quantization": falls_back("projects layer by layer where weights are quantised", _DFLASH),
    },
)
