"""TensorRT-LLM: how its PyTorch backend's draft models read a checkpoint.

Read from `tensorrt_llm/_torch/models/modeling_speculative.py` and `_torch/speculative/dflash.py` at 00679c66 and
`_torch/models/modeling_dflash.py` at 009d8fa4.
"""

from __future__ import annotations

from pytest_specdecode.engines.base import Engine
from pytest_specdecode.engines.tensorrt_llm.faults import FAULTS
from pytest_specdecode.engines.tensorrt_llm.reads import IGNORES, READS, why_not_fused
from pytest_specdecode.engines.tensorrt_llm.serving import SERVING

ENGINE = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    version="00679c66",
    reads=READS,
    ignores=IGNORES,
    fused_path=why_not_fused,
    serving=SERVING,
    known=FAULTS,
)
