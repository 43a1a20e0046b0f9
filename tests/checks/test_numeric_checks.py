"""The checks that compute: they must fail when the arithmetic is wrong, and say by how much.

No good checkpoint makes these fail, since both sides of each comparison are ours; so the arithmetic is broken here, one step at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import checks, testing
from pytest_specdecode.api import open_context
from pytest_specdecode.families.dflash import DFlashLayer
from pytest_specdecode.families.eagle3 import Eagle3Layer
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.fused_kv import path as fused_path
from pytest_specdecode.layers import MLAAttention


def _run(id: str, family: str, tmp_path: Path, **changes: Any) -> CheckResult:
    return checks.run(checks.REGISTRY[id], open_context(testing.write_tiny(tmp_path / "draft", family, **changes)))


@pytest.mark.parametrize(
    ("family", "layer"), [("eagle3", Eagle3Layer), ("eagle3-mla", Eagle3Layer), ("dflash", DFlashLayer)]
)
def test_incremental_fails_when_steps_forget_their_positions(
    family: str, layer: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding at positions shifted by one is another function."""
    good = _run("layers.incremental", family, tmp_path)
    assert good.status == "passed"
    assert "largest difference" in good.message

    real = layer.incremental  # type: ignore[attr-defined]

    def shifted(self: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        key = "context_positions" if "context_positions" in inputs else "positions"
        moved = {**inputs, key: torch.where(inputs[key] > 5, inputs[key] + 1, inputs[key])}
        return real(self, moved)

    monkeypatch.setattr(layer, "incremental", shifted)
    broken = _run("layers.incremental", family, tmp_path)
    assert broken.status == "failed"
    assert broken.findings[0].got > 1e-3
    # The first steps are right, so that the worst element is of a later one.
    found = re.fullmatch(
        r"step by step differs from one prefill: at (?:batch=0 )?token=(\d+) lane=\d+ got \S+, due \S+, \S+ of the largest value apart",
        broken.message,
    )
    assert found is not None, broken.message
    assert int(found[1]) > 0


def test_mla_absorbed_fails_when_the_value_half_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kv_b_proj holds, per head, the key part and then the value part."""
    assert _run("layers.mla-absorbed", "eagle3-mla", tmp_path).status == "passed"
    real = MLAAttention._absorbed

    def swapped(self: MLAAttention, *args: torch.Tensor) -> torch.Tensor:
        rows = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        whole = self.kv_b_proj.weight
        self.kv_b_proj.weight = torch.nn.Parameter(rows.flip(1).flatten(0, 1), requires_grad=False)
        try:
            return real(self, *args)
        finally:
            self.kv_b_proj.weight = whole

    monkeypatch.setattr(MLAAttention, "_absorbed", swapped)
    assert _run("layers.mla-absorbed", "eagle3-mla", tmp_path).status == "failed"


def test_finite_warns_where_only_float16_overflows(tmp_path: Path) -> None:
    """A bf16 draft served in fp16 beside an fp16 target."""

    def large(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.mlp.down_proj.weight"] *= 1e5

    result = _run("layers.finite", "dflash", tmp_path, edit=large)
    assert result.status == "warned"
    assert "float16" in result.message


@pytest.mark.parametrize("fault", ["k by one position", "v by one ulp", "norm eps", "layers swapped"])
def test_matches_reference_fails_on_a_wrong_kernel(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a fault that an engine has had or could have."""
    assert _run("fused-kv.matches-reference", "dflash", tmp_path).status == "passed"
    real = fused_path.fused_norm_rope

    def wrong(kv: Any, positions: Any, weight: Any, eps: Any, table: Any, **options: Any) -> Any:
        if fault == "k by one position":
            positions = (positions - 1).clamp(min=0)
        if fault == "norm eps":
            eps = torch.full_like(eps, 1e-2)
        k, v = real(kv, positions, weight, eps, table, **options)
        if fault == "v by one ulp":
            v.view(torch.int16).view(-1)[7] += 1
        if fault == "layers swapped":
            k = k.flip(0)
        return k, v

    monkeypatch.setattr(fused_path, "fused_norm_rope", wrong)
    result = _run("fused-kv.matches-reference", "dflash", tmp_path)
    assert result.status == "failed"
    name = "V" if fault.startswith("v") else "K"
    (finding,) = result.findings
    assert finding.message.startswith(f"{name}: ")
    assert re.fullmatch(rf"fused {name}: layer=\d token=\d( head=\d dim=\d+| head=\d)?", finding.where)
    assert isinstance(finding.got, float)
    assert isinstance(finding.due, float)


def test_matches_reference_says_what_it_measured(tmp_path: Path) -> None:
    """A passing check shows its figure."""
    assert (
        "of eager's, V is the projection's bit for bit"
        in _run("fused-kv.matches-reference", "dflash", tmp_path).message
    )


def test_matches_reference_is_open_where_triton_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows: the stack is then served by eager code, which proves nothing of the kernel."""
    from pytest_specdecode import launch

    monkeypatch.setattr(launch, "triton_missing", lambda: "triton is not installed")
    result = _run("fused-kv.matches-reference", "dflash", tmp_path)
    assert result.status == "inconclusive"
    assert "triton is not installed" in result.message


# --- rows of a batch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["statistics", "neighbour", "positions", "shape"])
@pytest.mark.parametrize(("family", "layer"), [("eagle3", Eagle3Layer), ("dflash", DFlashLayer)])
def test_batch_fails_when_rows_are_mixed(
    fault: str, family: str, layer: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm over the batch, a state of the row before, another row's positions, a batch that is not kept apart."""
    good = _run("layers.batch", family, tmp_path)
    assert good.status == "passed"
    assert "of a row's largest value" in good.message
    real = layer.prefill  # type: ignore[attr-defined]

    def mixed(self: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if inputs["positions"].ndim == 1:
            out: torch.Tensor = real(self, inputs)
            return out
        if fault == "positions":
            names = ("positions", "context_positions") if family == "dflash" else ("positions",)
            # RoPE sees differences only, so of a block and its context one has to move.
            inputs = {**inputs, names[0]: inputs[names[0]][:1].expand_as(inputs[names[0]]) * 2}
        out = real(self, inputs)
        if fault == "statistics":
            out = out * 1.0001
        if fault == "neighbour":
            out = out + 1e-3 * out.roll(1, 0)
        return out.flatten(0, 1) if fault == "shape" else out

    monkeypatch.setattr(layer, "prefill", mixed)
    broken = _run("layers.batch", family, tmp_path)
    assert broken.status == "failed", broken
    assert broken.findings[0].where.startswith("layer 0")


# --- what the storage dtype costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("bfloat16", 5e-4, 2e-2), ("float16", 5e-5, 2e-3), ("float32", 5e-9, 1e-6)]
)
def test_precision_is_a_number_of_the_dtypes_size(dtype: str, low: float, high: float, tmp_path: Path) -> None:
    """Half an ulp is 2^-9, 2^-12 and 2^-25 of a number; a layer's dozen roundings make a few of them."""
    result = _run("layers.precision", "eagle3", tmp_path, dtype=dtype)
    assert result.status == "passed"
    assert f"in {dtype}, largest in layer 0" in result.message
    assert low < float(result.message.split()[2]) < high


def test_precision_has_nothing_to_say_of_float64(tmp_path: Path) -> None:
    assert _run("layers.precision", "eagle3", tmp_path, dtype="float64").status == "skipped"


def test_precision_warns_of_sums_that_cancel(tmp_path: Path) -> None:
    """Units in pairs of opposite sign, a hundred times larger than what is left of them."""

    def cancel(tensors: dict[str, torch.Tensor]) -> None:
        up, gate, down = (tensors[f"layers.0.mlp.{name}_proj.weight"] for name in ("up", "gate", "down"))
        gate[1::2] = gate[::2]
        down[:, 1::2] = down[:, ::2]
        up[1::2, 1:] = -up[::2, 1:]
        up[:, 1:] *= 100
        down *= 100

    result = _run("layers.precision", "eagle3", tmp_path, edit=cancel)
    assert result.status == "warned"
    assert "more than its roundings make up" in result.message
    assert result.findings[0].got > 0.1
    assert result.findings[0].where == "layers 0"


def test_precision_warns_of_an_overflow(tmp_path: Path) -> None:
    """65504 is the largest float16; float64 goes on."""

    def large(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.mlp.down_proj.weight"] *= 3e4
        tensors["layers.0.mlp.up_proj.weight"] *= 1e3

    result = _run("layers.precision", "eagle3", tmp_path, dtype="float16", edit=large)
    assert result.status == "warned"
    assert result.message == "a layer overflows in float16 where float64 does not"
