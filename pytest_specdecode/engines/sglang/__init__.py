"""SGLang: how its draft models read a checkpoint.

Read from the wheel `sglang` 0.5.23 and from the project's issues and pull requests.
"""

from __future__ import annotations

from pytest_specdecode.engines.base import Engine
from pytest_specdecode.engines.hf_config import no_nulls
from pytest_specdecode.engines.sglang.faults import FAULTS, LABELS, MISNAMES
from pytest_specdecode.engines.sglang.fused_path import why_not_fused
from pytest_specdecode.engines.sglang.reads import IGNORES, READS, captures
from pytest_specdecode.engines.sglang.serving import SERVING

ENGINE = Engine(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    reads=READS,
    ignores=IGNORES,
    fused_path=why_not_fused,
    captures=captures,
    serving=SERVING,
    labels=LABELS,
    misnames=MISNAMES,
    no_nulls=no_nulls,
    known=FAULTS,
)
