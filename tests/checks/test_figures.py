"""What checks measure for pictures.

What these catch: quantiles of something else than the tensor's magnitudes; a large tensor that is read whole; an error that is laid to the
wrong layer or head; frequencies of another base; figures that are measured where no picture asks for them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pytest_specdecode.api import check_draft, open_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.checks import figures
from pytest_specdecode.testing import tiny_config, write_tiny


def test_quantiles_by_numpy(tmp_path: Path) -> None:
    write_tiny(tmp_path / "x", "dflash")
    draft = open_draft(tmp_path / "x")
    found = figures.weight_spreads(draft)
    assert set(found) == {header.name for header in draft.checkpoint.tensors.values() if header.is_float}
    for name, item in found.items():
        values = np.abs(draft.checkpoint.tensor(name).to(torch.float64).numpy().ravel())
        for key, level in (("p05", 0.05), ("p25", 0.25), ("p50", 0.5), ("p75", 0.75), ("p95", 0.95), ("p999", 0.999)):
            assert item[key] == pytest.approx(np.quantile(values, level), rel=1e-4, abs=1e-9), (name, key)
        assert item["largest"] == pytest.approx(values.max(), rel=1e-4)


def test_of_a_large_tensor_few_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path / "x", "dflash")
    draft = open_draft(tmp_path / "x")
    monkeypatch.setattr(figures, "_MOST_ELEMENTS", 640)
    figures.scan(draft)
    read: list[int] = []
    tensor = Checkpoint.tensor

    def counted(self: Checkpoint, name: str, rows: slice | None = None) -> torch.Tensor:
        found = tensor(self, name, rows)
        read.append(found.numel())
        return found

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    found = figures.weight_spreads(draft)
    large = [header.name for header in draft.checkpoint.tensors.values() if header.is_float and header.numel > 640]
    assert large
    assert sum(read) <= 640 * len(found)
    for name in large:
        # A sample of so many is that near to the whole; a first block of zeros or of padding would not be.
        middle = tensor(draft.checkpoint, name).to(torch.float32).abs().median()
        assert found[name]["p50"] == pytest.approx(float(middle), rel=0.3)


def test_the_largest_is_exact_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_MOST_ELEMENTS", 640)
    path = tmp_path / "x"
    write_tiny(path, "dflash")
    draft = open_draft(path)
    tensors = {
        name: draft.checkpoint.tensor(name).to(torch.float32).numpy().copy() for name in draft.checkpoint.tensors
    }
    tensors["fc.weight"][3, 5] = -77.0
    tensors["norm.weight"][0] = np.nan
    save_file(tensors, path / "model.safetensors")
    found = figures.weight_spreads(open_draft(path))
    assert found["fc.weight"]["largest"] == 77.0
    assert found["norm.weight"]["p50"] == pytest.approx(float(np.nanmedian(np.abs(tensors["norm.weight"]))), rel=1e-4)


def test_errors_are_laid_to_their_layer_and_head() -> None:
    truth = torch.ones(2, 3, 4, 5, dtype=torch.float64)
    truth[1, :, 2] = 10.0
    got = truth.clone()
    got[1, :, 2] += 1.0
    got[0, 1, 3, 0] += 15.0**0.5
    assert figures.error_by_head(got.to(torch.float32), truth) == [[0, 0, 0, 1.0], [0, 0, 0.1, 0]]


def test_frequencies_by_hand(tmp_path: Path) -> None:
    write_tiny(tmp_path / "x", "dflash")
    width = tiny_config("dflash")["head_dim"]
    target = {
        "model_type": "qwen3",
        "rope_theta": 500.0,
        "head_dim": 8,
        "hidden_size": 64,
        "max_position_embeddings": 64,
    }
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(target))
    found = check_draft(tmp_path / "x", target=tmp_path / "target", checks="target.rope", pictures=True)[
        "target.rope"
    ].figures
    theta = open_draft(tmp_path / "x").spec.layers[0].attention.rope.theta  # type: ignore[union-attr]
    (mine,), (theirs,) = found["draft"], found["target"]
    assert theirs["label"] == "default, theta 500"
    assert theirs["frequencies"] == pytest.approx([500 ** (-2 * pair / 8) for pair in range(4)], rel=1e-4)
    assert mine["frequencies"] == pytest.approx([theta ** (-2 * pair / width) for pair in range(width // 2)], rel=1e-4)


def test_the_fused_path_s_error_is_measured_per_layer_and_head(tmp_path: Path) -> None:
    write_tiny(tmp_path / "x", "dflash")
    found = check_draft(tmp_path / "x", checks="fused-kv.matches-reference")["fused-kv.matches-reference"]
    assert found.status == "passed", found.message
    config = tiny_config("dflash")
    for name in ("k_error", "k_eager", "v_error", "v_eager"):
        table = found.figures[name]
        assert [len(row) for row in table] == [config["num_key_value_heads"]] * config["num_hidden_layers"]
        # bfloat16 has 8 bits: an error of a rounding or two.
        assert all(1e-4 < value < 1e-2 for row in table for value in row)


def test_nothing_is_measured_for_pictures_that_nobody_asked_for(tmp_path: Path) -> None:
    write_tiny(tmp_path / "x", "dflash")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 8})
    )
    found = check_draft(tmp_path / "x", target=tmp_path / "target", checks="target.rope,weights.finite")
    assert [result.figures for result in found] == [{}, {}]
