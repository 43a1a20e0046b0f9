"""Where the configuration says that weights are quantised, and in which dtype.

What goes wrong without this file: a prediction layer that is stored plain and listed nowhere, or under another layer's number, passes;
a list in one of its many spellings is not understood and a right file fails; a pattern of a file runs for ever; a bfloat16 draft that
is to be run in float16 passes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks.quantization import _is_excluded
from pytest_specdecode.findings import CheckResult

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
Tensors = dict[str, torch.Tensor]


def _float8(*names: str) -> Callable[[Tensors], None]:
    """The named matrices as block-quantised exporters store them."""

    def edit(tensors: Tensors) -> None:
        for name in names or [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    return edit


def _result(
    tmp_path: Path,
    settings: dict[str, Any],
    edit: Callable[[Tensors], None] | None = None,
    family: str = "dflash",
    id: str = "config.quantization",
    serve: str | None = None,
) -> CheckResult:
    config = testing.tiny_config(family, quantization_config=settings)
    path = testing.write_tiny(tmp_path / "draft", family, config=config, edit=edit)
    return check_draft(path, checks=[id], serve=serve)[id]


VICTIM = "layers.1.mlp.up_proj"


def _all_but_one(tensors: Tensors) -> None:
    _float8(*(name for name in tensors if name.endswith("_proj.weight") and not name.startswith(VICTIM)))(tensors)


def test_all_quantised_and_nothing_listed_is_right(tmp_path: Path) -> None:
    assert _result(tmp_path, FP8, _float8()).status == "passed"


def test_a_plain_projection_that_no_list_leaves_out(tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, FP8, _all_but_one).findings
    assert (finding.severity, finding.where) == ("error", f"{VICTIM}.weight")
    assert finding.outcomes["vllm"].outcome == finding.outcomes["sglang"].outcome == "stops"


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("modules_to_not_convert", VICTIM),
        ("ignored_layers", f"model.{VICTIM}"),
        ("exclude_modules", "*layers.1.mlp*"),
        ("ignore", "re:.*layers\\.1\\.mlp.*"),
        ("ignore", "layers.1"),
        ("ignore", "up_proj"),
        ("ignore", "layers.1.mlp.gate_up_proj"),
    ],
)
def test_every_spelling_of_a_list_is_understood(key: str, entry: str, tmp_path: Path) -> None:
    assert not [
        finding
        for finding in _result(tmp_path, {**FP8, key: [entry]}, _all_but_one).findings
        if finding.where == f"{VICTIM}.weight"
    ]


@pytest.mark.parametrize("entry", ["layers.11", "re:.*layers\\.7\\.", "*.layers.2.*", "p_proj", "mlp.up"])
def test_a_list_that_means_other_modules_leaves_nothing_out(entry: str, tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, {**FP8, "ignore": [entry]}, _all_but_one).findings
    assert (finding.where, finding.due) == (f"{VICTIM}.weight", [VICTIM])


def test_a_module_that_is_left_out_and_stored_quantised(tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, {**FP8, "ignore": [VICTIM]}, _float8()).findings
    assert (finding.severity, finding.where) == ("error", f"{VICTIM}.weight")
    assert "leaves it out" in finding.message


def test_nothing_is_quantised(tmp_path: Path) -> None:
    (finding,) = _result(tmp_path, FP8).findings
    assert "every projection of the draft is stored plain" in finding.message
    assert _result(tmp_path / "listed", {**FP8, "ignore": ["layers.0", "layers.1"]}).status == "passed"


def test_a_dtype_that_the_method_does_not_store(tmp_path: Path) -> None:
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
    }
    (finding,) = _result(tmp_path, settings, _float8()).findings
    assert finding.message.startswith(
        "layers.0.self_attn.q_proj.weight is stored as float8_e4m3fn; int-quantized weights are int8"
    )


def test_groups_that_name_modules_cover_only_those(tmp_path: Path) -> None:
    group = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    assert _result(tmp_path, settings, _all_but_one).status == "passed"


@pytest.mark.parametrize(("number", "hint"), [(3, False), (61, True)])
def test_a_prediction_layer_is_listed_under_its_own_number(number: int, hint: bool, tmp_path: Path) -> None:
    """The tiny target has three layers, so its prediction layer is stored as layer 3."""
    result = _result(tmp_path, {**FP8, "modules_to_not_convert": [f"model.layers.{number}"]}, family="mtp")
    (finding,) = result.findings
    if hint:
        assert result.status == "failed"
        assert "names layer 61, the draft's is stored as layer 3" in finding.fix
    else:
        # Right, and one engine's loader knows no number but 61.
        assert result.status == "warned"
        assert finding.outcomes["sglang"].message.startswith("Downcasting not allowed")
        assert finding.outcomes["vllm"].outcome == "unknown"


def test_packed_weights_and_a_quantised_head_are_named_with_the_engine_that_minds(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors.pop(name).shape
            tensors[f"{name}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
            tensors[f"{name}_scale"] = torch.ones(rows, columns // 32).bfloat16()
            tensors[f"{name}_shape"] = torch.tensor([rows, columns])

    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True}}},
    }
    (finding,) = _result(tmp_path, settings, edit).findings
    assert (finding.severity, finding.outcomes["sglang"].outcome) == ("warning", "serves wrong")
    assert "1.10" in finding.outcomes["sglang"].message
    head = _result(tmp_path / "head", {**FP8, "ignore": ["layers.0"]}, _float8("lm_head.weight"), "eagle3")
    (finding,) = head.findings
    assert (head.status, finding.outcomes["vllm"].outcome) == ("warned", "stops")


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:.*.*.*.*.*x", "re:(a|a)*b", "re:[", "re:" + "a" * 300, "*" * 300])
def test_a_pattern_that_could_run_for_ever_is_not_tried(pattern: str) -> None:
    started = time.perf_counter()
    assert _is_excluded("a" * 200, (pattern,)) is None
    assert time.perf_counter() - started < 1


def _dtype(tmp_path: Path, stored: str, serve: str | None = None, **changes: Any) -> CheckResult:
    config = testing.tiny_config("eagle3", **changes)
    path = testing.write_tiny(tmp_path, "eagle3", config=config, dtype=stored)
    return check_draft(path, checks=["config.dtype"], serve=serve)["config.dtype"]


@pytest.mark.parametrize(
    ("stored", "declared", "status"),
    [
        ("bfloat16", "bfloat16", "passed"),
        ("bfloat16", "torch.bfloat16", "passed"),
        ("bfloat16", "float16", "warned"),
        ("float16", "bfloat16", "warned"),
        ("float32", "float32", "passed"),
        ("bfloat16", ..., "warned"),
    ],
)
def test_declared_against_stored(stored: str, declared: Any, status: str, tmp_path: Path) -> None:
    assert _dtype(tmp_path, stored, dtype=declared, torch_dtype=...).status == status


def test_an_undeclared_dtype_is_taken_for_float16_by_one_engine(tmp_path: Path) -> None:
    (finding,) = _dtype(tmp_path, "bfloat16", dtype=..., torch_dtype=...).findings
    assert finding.outcomes["sglang"].outcome == "serves wrong"
    assert "float16" in finding.outcomes["sglang"].message


@pytest.mark.parametrize(
    ("asked", "status"), [("float16", "warned"), ("half", "warned"), ("bfloat16", "passed"), ("auto", "passed")]
)
def test_a_bfloat16_draft_that_is_served_in_float16(asked: str, status: str, tmp_path: Path) -> None:
    assert _dtype(tmp_path, "bfloat16", f"dtype={asked}").status == status


def test_the_declared_dtype_is_enough_where_there_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(testing.tiny_config("eagle3", dtype="bfloat16")))
    found = check_draft(tmp_path, checks=["config.dtype"], serve="dtype=float16")["config.dtype"]
    assert (found.status, found.findings[0].where) == ("warned", "--draft-serve: dtype")
