"""Flags beside the tensors that go with them, names that loaders follow, and factors beside K, V and the softmax.

What goes wrong without this file: a norm whose flag is missing is dropped by every engine and passes; a flag that an engine does not read
is shown as if all did; a rule of one engine's loader is taken for everybody's; a scale of one is called a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, testing
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.report import Report

Tensors = dict[str, torch.Tensor]


def _report(
    tmp_path: Path,
    checks: list[str],
    family: str = "eagle3",
    edit: Callable[[Tensors], Any] | None = None,
    engines: list[str] | None = None,
    shape: dict[str, Any] | None = None,
    **changes: Any,
) -> Report:
    """Tensors are made for `shape`, the configuration is that with `changes`."""
    whole = testing.tiny_config(family, **(shape or {}))
    tensors = testing.random_tensors(whole, family)
    if edit is not None:
        edit(tensors)
    testing.write_checkpoint(tmp_path, testing.tiny_config(family, **{**(shape or {}), **changes}), tensors)
    return check_draft(tmp_path, checks=checks, engines=engines)


def _flags(tmp_path: Path, **arguments: Any) -> CheckResult:
    return _report(tmp_path, ["weights.flags"], **arguments)["weights.flags"]


def _kinds(result: CheckResult) -> dict[str, str]:
    (finding,) = result.findings
    return {name: outcome.outcome for name, outcome in finding.outcomes.items()}


def test_a_norm_before_fc_without_its_flag_is_dropped_by_all(tmp_path: Path) -> None:
    result = _flags(tmp_path, edit=lambda found: found.update({"input_norm.weight": torch.ones(192).bfloat16()}))
    assert (result.status, result.findings[0].where) == ("failed", "input_norm.weight")
    assert _kinds(result) == {"sglang": "serves wrong", "vllm": "serves wrong", "tensorrt-llm": "serves wrong"}


def test_no_other_check_reports_the_norms_that_flags_own(tmp_path: Path) -> None:
    report = _report(
        tmp_path,
        ["weights.unexpected", "weights.missing", "weights.flags"],
        edit=lambda found: found.update({f"fc_norm.{tap}.weight": torch.ones(64).bfloat16() for tap in range(3)}),
    )
    assert [result.id for result in report if result.status == "failed"] == ["weights.flags"]
    assert (
        report["weights.flags"].message
        == "fc_norm.0.weight is in the weights, and fc_norm is not true; 2 more norms are without the flag"
    )


def test_a_flag_without_its_norm(tmp_path: Path) -> None:
    report = _report(tmp_path, ["weights.missing", "weights.flags"], fc_norm=True)
    assert [result.id for result in report if result.status == "failed"] == ["weights.flags"]
    finding = report["weights.flags"].findings[0]
    assert (finding.fault, finding.where) == ("tensor-missing", "fc_norm.0.weight")


def test_a_flag_at_top_level_only_is_not_read_by_one_engine(tmp_path: Path) -> None:
    result = _flags(tmp_path, shape={"norm_before_fc": True})
    assert result.status == "warned"
    assert _kinds(result) == {"sglang": "fine", "vllm": "fine", "tensorrt-llm": "serves wrong"}
    assert result.findings[0].fix == "state it as eagle_config.norm_before_fc too"


def test_both_norms_at_once(tmp_path: Path) -> None:
    result = _flags(tmp_path, shape={"norm_before_fc": True, "fc_norm": True})
    assert "the taps are normed twice" in result.message


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla"])
def test_the_normed_residual_is_read_by_one_engine(family: str, tmp_path: Path) -> None:
    result = _flags(tmp_path, family=family, norm_before_residual=True)
    assert _kinds(result) == {"sglang": "serves wrong", "vllm": "fine", "tensorrt-llm": "serves wrong"}
    assert result.status == "warned"
    assert _flags(tmp_path / "raw", family=family, norm_before_residual=False).status == "passed"
    assert _flags(tmp_path / "vllm", family=family, engines=["vllm"], norm_before_residual=True).status == "passed"
    assert _flags(tmp_path / "sglang", family=family, engines=["sglang"], norm_before_residual=True).status == "failed"


def test_the_recycled_state_of_a_nested_flag(tmp_path: Path) -> None:
    """`eagle_config.return_hidden_post_norm` is one engine's spelling."""
    nested = {"eagle_aux_hidden_state_layer_ids": [2, 8, 13], "return_hidden_post_norm": True}
    assert _kinds(_flags(tmp_path, eagle_config=nested)) == {
        "sglang": "serves wrong",
        "vllm": "serves wrong",
        "tensorrt-llm": "fine",
    }


def test_norms_of_q_and_k_need_a_label_whose_class_has_them(tmp_path: Path) -> None:
    result = _flags(tmp_path, shape={"architectures": ["Eagle3Qwen3ForCausalLM"]})
    assert _kinds(result) == {"sglang": "serves wrong", "vllm": "fine", "tensorrt-llm": "unknown"}


def _biases(tmp_path: Path, **arguments: Any) -> CheckResult:
    return _report(tmp_path, ["weights.biases"], **arguments)["weights.biases"]


def test_a_bias_flag_that_one_engine_does_not_read(tmp_path: Path) -> None:
    result = _biases(tmp_path, shape={"attention_bias": True})
    assert _kinds(result) == {"sglang": "serves wrong", "vllm": "fine", "tensorrt-llm": "fine"}


def test_a_latent_layer_has_no_biases_in_any_engine(tmp_path: Path) -> None:
    result = _biases(tmp_path, family="eagle3-mla", attention_bias=True)
    assert "no engine builds such biases" in result.message


def test_the_bias_of_fc_stops_the_engine_that_never_builds_it(tmp_path: Path) -> None:
    result = _biases(tmp_path, shape={"bias": True})
    assert _kinds(result) == {"sglang": "fine", "vllm": "stops", "tensorrt-llm": "fine"}


def _names(tmp_path: Path, family: str, old: str, new: str, engines: list[str] | None = None) -> CheckResult:
    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return _report(tmp_path, ["weights.names"], family, rename, engines)["weights.names"]


def test_names_that_one_loader_does_not_follow(tmp_path: Path) -> None:
    result = _names(tmp_path, "eagle3-mla", "fc.", "model.fc.")
    (finding,) = result.findings
    assert (finding.got, finding.due) == (["model.fc.weight"], ["fc.weight"])
    assert finding.outcomes["sglang"].outcome == "serves wrong"


def test_a_loader_s_rule_counts_only_where_that_engine_does(tmp_path: Path) -> None:
    assert _names(tmp_path, "eagle3-mla", "fc.", "model.fc.", ["vllm"]).status == "passed"
    assert _names(tmp_path / "llama", "eagle3", "fc.", "model.fc.").status == "passed"


def test_joined_down_projections(tmp_path: Path) -> None:
    def join(tensors: Tensors) -> None:
        stem = "layers.0.self_attn"
        parts = [tensors.pop(f"{stem}.{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        tensors[f"{stem}.fused_qkv_a_proj_with_mqa.weight"] = torch.cat(parts)

    (finding,) = _report(tmp_path, ["weights.names"], "eagle3-mla", join)["weights.names"].findings
    assert (finding.severity, finding.fault) == ("error", "name-joined")


def test_legacy_names_of_the_tap_norms(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for tap, name in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{tap}.weight")

    result = _report(tmp_path, ["weights.names"], "eagle3-mla", rename, shape={"fc_norm": True})["weights.names"]
    (finding,) = result.findings
    assert (result.status, finding.outcomes["sglang"].outcome) == ("warned", "serves wrong")


def _scales(tmp_path: Path, **arguments: Any) -> CheckResult:
    return _report(tmp_path, ["weights.scales"], "dflash", **arguments)["weights.scales"]


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.attn.k_scale", "layers.1.self_attn.v_proj.v_scale", "layers.0.self_attn.v_scale"]
)
@pytest.mark.parametrize(("value", "status"), [(1.0, "passed"), (0.25, "warned"), (float("nan"), "warned")])
def test_a_scale_of_the_cache_is_one_or_the_fused_path_is_off(
    name: str, value: float, status: str, tmp_path: Path
) -> None:
    result = _scales(tmp_path, edit=lambda found: found.update({name: torch.tensor(value)}))
    assert result.status == status
    if status == "warned":
        assert result.findings[0].where == name
        assert _kinds(result)["sglang"] == "falls back"


def test_a_scale_of_the_cache_is_not_reported_twice(tmp_path: Path) -> None:
    name = "layers.0.self_attn.attn.k_scale"
    report = _report(tmp_path, ["weights"], "dflash", lambda found: found.update({name: torch.tensor(0.5)}))
    assert [result.id for result in report if result.status in ("failed", "warned")] == ["weights.scales"]


BLOCK = {"mask_token_id": 511, "target_layer_ids": [1, 9, 17], "block_size": 8}


def test_a_factor_on_v_is_lost_by_the_fused_path_and_by_who_does_not_read_it(tmp_path: Path) -> None:
    result = _scales(tmp_path, dflash_config={**BLOCK, "attention_value_scale": 0.5})
    assert _kinds(result) == {"sglang": "serves wrong", "vllm": "fine", "tensorrt-llm": "serves wrong"}
    assert "V of the context" in result.findings[0].outcomes["sglang"].message


def test_a_factor_of_one_is_none(tmp_path: Path) -> None:
    assert _scales(tmp_path, dflash_config={**BLOCK, "attention_value_scale": 1.0}).status == "passed"


def test_sinks_that_nothing_announces_and_sinks_that_one_engine_leaves_out(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors |= {f"layers.{layer}.self_attn.attention_sink_bias": torch.zeros(4).bfloat16() for layer in range(2)}

    result = _scales(tmp_path / "silent", edit=add)
    assert _kinds(result)["sglang"] == "serves wrong"
    result = _scales(tmp_path / "stated", edit=add, dflash_config={**BLOCK, "attention_sink_bias": True})
    assert _kinds(result) == {"sglang": "unknown", "vllm": "unknown", "tensorrt-llm": "serves wrong"}
