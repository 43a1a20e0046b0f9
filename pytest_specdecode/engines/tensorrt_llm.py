"""TensorRT-LLM: how its PyTorch backend's draft models read a checkpoint.

Read from `tensorrt_llm/_torch/models/modeling_speculative.py` and `_torch/speculative/dflash.py` at 00679c66 and
`_torch/models/modeling_dflash.py` at 009d8fa4.
"""

from __future__ import annotations

from pytest_specdecode.engines.base import Engine, fine, serves_wrong, stops

_SPEC = "_torch/models/modeling_speculative.py"
_DFLASH = "_torch/models/modeling_dflash.py"

ENGINE = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    version="00679c66",
    known={
        "lm-head-missing": fine("takes the target's head", _SPEC),
        "tensor-unexpected": serves_wrong("partial loading drops it without a word", _SPEC),
        "taps-unordered": serves_wrong("sorts them, so fc reads permuted features", _SPEC),
        "block-size-nested-only": serves_wrong(
            "reads block_size at top level only, and 16 otherwise", "_torch/speculative/dflash.py"
        ),
        "nan": serves_wrong("NaN spreads through every head that reads the tensor"),
        "degenerate": serves_wrong("serves what the tensor gives"),
        "fused-kv-num-kv-heads": stops("refuses layers whose q/kv/head sizes differ", _DFLASH),
        "fused-kv-head-dim": stops("refuses layers whose q/kv/head sizes differ", _DFLASH),
        "fused-kv-q-size": stops("refuses layers whose q/kv/head sizes differ", _DFLASH),
        "fused-kv-rotary-dim": stops("refuses layers whose RoPE signature differs", _DFLASH),
        "fused-kv-rope-style": stops("refuses layers whose RoPE signature differs", _DFLASH),
        "fused-kv-rope-theta": stops("refuses layers whose RoPE signature differs", _DFLASH),
        "fused-kv-rope-scaling": stops("refuses layers whose RoPE signature differs", _DFLASH),
        "fused-kv-k-norm": stops("takes k_norm on all layers or on none", _DFLASH),
        "fused-kv-norm-eps": stops("refuses layers whose k_norm eps differs", _DFLASH),
    },
)
