"""The rules, one module per place a reader would look, and their registry.

Importing this package registers every check; none of the modules imports torch at their top.
"""

from __future__ import annotations

# The order of the imports is the order of the registry, and so of the suite and the documentation.
# isort: off
from pytest_specdecode.checks import files
from pytest_specdecode.checks import config
from pytest_specdecode.checks import config_keys
from pytest_specdecode.checks import quantization
from pytest_specdecode.checks import vocabulary
from pytest_specdecode.checks import weights
from pytest_specdecode.checks import weights_flags
from pytest_specdecode.checks import weights_values
from pytest_specdecode.checks import taps
from pytest_specdecode.checks import rope
from pytest_specdecode.checks import dflash
from pytest_specdecode.checks import dspark
from pytest_specdecode.checks import mtp
from pytest_specdecode.checks import heads
from pytest_specdecode.checks import speculators
from pytest_specdecode.checks import layers
from pytest_specdecode.checks import fused_kv
from pytest_specdecode.checks import fused_kv_subject
from pytest_specdecode.checks import target
from pytest_specdecode.checks import serving
from pytest_specdecode.checks import acceptance

# isort: on
from pytest_specdecode.checks.registry import (
    REGISTRY,
    Check,
    Context,
    Inconclusive,
    Skip,
    UnknownCheckError,
    run,
    select,
)

__all__ = [
    "REGISTRY",
    "Check",
    "Context",
    "Inconclusive",
    "Skip",
    "UnknownCheckError",
    "acceptance",
    "config",
    "config_keys",
    "dflash",
    "dspark",
    "files",
    "fused_kv",
    "fused_kv_subject",
    "heads",
    "layers",
    "mtp",
    "quantization",
    "rope",
    "run",
    "select",
    "serving",
    "speculators",
    "taps",
    "target",
    "vocabulary",
    "weights",
    "weights_flags",
    "weights_values",
]
