"""What the engine models say that transformers makes of a configuration, against transformers itself.

What goes wrong without this file: a base, a scaling or a window that the engines' configuration classes move, fill in or drop, and the
models say otherwise. Both engines read plain drafts through these classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import testing
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.engines import ENGINES
from pytest_specdecode.engines.hf_config import THETA_DEFAULTS
from pytest_specdecode.families import load
from pytest_specdecode.fused_kv.stack import normal_scaling

transformers = pytest.importorskip("transformers", minversion="5.15.0")

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"type": "yarn", "factor": 4.0}

CHANGES: dict[str, dict[str, Any]] = {
    "nothing stated": {},
    "flat base": {"rope_theta": 5e5},
    "two bases": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
    "scaling beside a flat base": {"rope_theta": 5e5, "rope_scaling": LINEAR},
    "scaling over parameters": {"rope_theta": 5e5, "rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 7e5}},
    "scaling with a base": {"rope_theta": 5e5, "rope_scaling": {**LINEAR, "rope_theta": 3e5}},
    "yarn without its length": {"rope_theta": 5e5, "rope_scaling": YARN},
    "yarn with its length beside": {"rope_theta": 5e5, "rope_scaling": YARN, "original_max_position_embeddings": 1024},
    "parameters without a base": {"rope_parameters": {"rope_type": "default"}},
    "flat share": {"partial_rotary_factor": 0.5},
    "nested share": {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5, "partial_rotary_factor": 0.5}},
}


def both(tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    config = testing.tiny_config("dflash", rope_theta=..., rope_scaling=..., architectures=["DFlashDraftModel"])
    config |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(Path("config"))
    checkpoint.config = config
    return transformers.AutoConfig.from_pretrained(tmp_path), load(checkpoint)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_rotary_fields_reach_the_engine_so(engine: str, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs, draft = both(tmp_path, **changes)
    theta, scaling, share = (
        ENGINES[engine].reading(setting, draft) for setting in ("rope-theta", "rope-scaling", "partial-rotary-factor")
    )
    assert theta is not None
    assert scaling is not None
    if engine == "vllm":
        # As transformers_utils/config.py does once more after loading.
        theirs.standardize_rope_params()
    assert share is not None
    assert theta.value == theirs.rope_parameters["rope_theta"]
    fields = {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    assert scaling.value == normal_scaling(fields)
    # SGLang asks the configuration, vLLM the rotary fields.
    where = theirs.rope_parameters if engine == "vllm" else vars(theirs)
    assert share.value == where.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize("model_type", THETA_DEFAULTS)
def test_a_class_fills_in_its_own_base(model_type: str, tmp_path: Path) -> None:
    theirs, draft = both(tmp_path, model_type=model_type)
    reading = ENGINES["sglang"].reading("rope-theta", draft)
    assert reading is not None
    assert reading.value == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("switched", [True, False, None])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_window_that_is_not_switched_on_is_dropped(model_type: str, switched: bool | None, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    if switched is not None:
        changes["use_sliding_window"] = switched
    theirs, draft = both(tmp_path, model_type=model_type, **changes)
    reading = ENGINES["vllm"].reading("sliding-window", draft)
    assert reading is not None
    assert reading.value == (theirs.sliding_window, None)
