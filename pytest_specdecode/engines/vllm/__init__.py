"""vLLM: how its draft models read a checkpoint.

Read from the wheel `vllm` 0.33.0 and from the project's issues and pull requests.
"""

from __future__ import annotations

from pytest_specdecode.engines.base import Engine
from pytest_specdecode.engines.hf_config import no_nulls
from pytest_specdecode.engines.vllm.faults import FAULTS, LABELS
from pytest_specdecode.engines.vllm.reads import IGNORES, READS, why_not_fused
from pytest_specdecode.engines.vllm.serving import SERVING

ENGINE = Engine(
    name="vllm",
    title="vLLM",
    version="0.33.0",
    reads=READS,
    ignores=IGNORES,
    fused_path=why_not_fused,
    serving=SERVING,
    labels=LABELS,
    no_nulls=no_nulls,
    known=FAULTS,
)
