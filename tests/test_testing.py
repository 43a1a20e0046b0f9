"""Checkpoints for tests.

What these catch: a writer whose checkpoint is not whole, so that a test of one fault meets two; tensors that differ from run to run; maps
that are no maps; a sparse file whose header lies or whose hole takes room.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import load
from pytest_specdecode.testing import (
    expected_tensors,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_sparse,
    write_tiny,
)

FAMILIES = ("eagle3", "eagle3-mla", "dflash")


def test_tiny_config_changes_and_drops_keys_and_is_fresh() -> None:
    config = tiny_config("eagle3", hidden_size=32, rope_theta=..., brand_new=1)
    assert config["hidden_size"] == 32
    assert "rope_theta" not in config
    assert config["brand_new"] == 1
    config["eagle_config"]["use_aux_hidden_state"] = "spoiled"
    assert tiny_config("eagle3")["eagle_config"]["use_aux_hidden_state"] is True
    with pytest.raises(KeyError):
        tiny_config("eagle9")


@pytest.mark.parametrize("family", FAMILIES)
def test_random_tensors_are_the_required_ones_and_replay(family: str) -> None:
    config = tiny_config(family)
    spec, tensors = expected_tensors(config, family)
    assert spec.family == family
    found = random_tensors(config, family, seed=1)
    due = {tensor.name: tensor.shape for tensor in tensors if tensor.need == "required"}
    due |= {"t2d": (512,)} if "d2t" in due else {}
    assert {name: tuple(value.shape) for name, value in found.items()} == due
    again, other = random_tensors(config, family, seed=1), random_tensors(config, family, seed=2)
    for name, value in found.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])
        assert value.dtype == {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)


def test_random_matrices_and_norms_look_trained() -> None:
    found = random_tensors(tiny_config("dflash"), "dflash", dtype="float32")
    fc, norm = found["fc.weight"], found["norm.weight"]
    assert abs(float(fc.std()) * fc.shape[1] ** 0.5 - 1) < 0.05
    assert abs(float(norm.mean()) - 1) < 0.1
    assert float(norm.std()) > 0.05


def test_random_maps_are_offsets_and_their_image() -> None:
    found = random_tensors(tiny_config("eagle3"), "eagle3", seed=5)
    images = (found["d2t"] + torch.arange(256)).tolist()
    assert images == sorted(set(images))
    assert 0 <= images[0] <= images[-1] < 512
    assert found["t2d"].nonzero().flatten().tolist() == images


@pytest.mark.parametrize("family", FAMILIES)
def test_write_tiny_is_a_whole_draft(tmp_path: Path, family: str) -> None:
    path = write_tiny(tmp_path / "deep" / "er", family, seed=4, hidden_act="gelu")
    draft = load(Checkpoint.open(path))
    assert draft.checkpoint.complete
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    assert draft.checkpoint.config == tiny_config(family, hidden_act="gelu")
    for name, value in random_tensors(tiny_config(family), family, seed=4).items():
        assert torch.equal(draft.tensor(name), value)
    assert sum(file.stat().st_size for file in path.iterdir()) < 400_000


def test_write_tiny_edits_before_it_writes_and_takes_a_whole_configuration(tmp_path: Path) -> None:
    config = tiny_config("eagle3", hidden_size=32)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"].fill_(2)
        del tensors["fc.weight"]

    found = Checkpoint.open(write_tiny(tmp_path, "eagle3", config=config, dtype="float16", edit=edit))
    assert found.tensor("norm.weight").tolist() == [2.0] * 32
    assert found.tensors["norm.weight"].dtype == "float16"
    assert "fc.weight" not in found.tensors


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_and_their_index_agree(tmp_path: Path, shards: int) -> None:
    tensors = random_tensors(tiny_config("dflash"), "dflash")
    path = write_checkpoint(tmp_path, tiny_config("dflash"), tensors, shards=shards)
    found = Checkpoint.open(path)
    assert (found.faults, found.index_faults, found.unindexed) == ([], [], [])
    assert len(found.files) == shards
    assert found.index_total_size == sum(header.end - header.start for header in found.tensors.values())
    assert all(torch.equal(found.tensor(name), value) for name, value in tensors.items())


def test_names_may_be_changed_on_writing(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T}
    path = write_checkpoint(tmp_path, {}, tensors, rename=lambda name: f"model.{name}")
    assert torch.equal(Checkpoint.open(path).tensor("model.a"), tensors["a"])


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_files_may_be_read_by_others(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "eagle3")
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_sparse_file_is_a_true_header_over_zeros(tmp_path: Path, family: str, dtype: str) -> None:
    path = write_sparse(tmp_path, tiny_config(family), family, dtype=dtype)
    due = {name: tuple(value.shape) for name, value in random_tensors(tiny_config(family), family).items()}
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        assert {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()} == due  # noqa: SIM118
        assert not opened.get_tensor("fc.weight").any()
        assert opened.get_slice("fc.weight").get_dtype() == dtype
    found = Checkpoint.open(path)
    assert found.complete
    assert {name: header.shape for name, header in found.tensors.items()} == due


@pytest.mark.skipif(sys.platform != "linux", reason="holes are taken for granted on Linux only")
def test_a_sparse_file_takes_no_room_and_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pytest_specdecode.testing import tiny_config, write_sparse;"
        "sizes = dict(hidden_size=1 << 14, intermediate_size=1 << 16, vocab_size=1 << 18);"
        "write_sparse(sys.argv[1], tiny_config('dflash', **sizes), 'dflash');"
        "print(*{'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
    status = (tmp_path / "model.safetensors").stat()
    assert status.st_size > 10 << 30
    assert status.st_blocks * 512 < 1 << 20


def test_a_configuration_that_leaves_a_shape_open_cannot_be_written(tmp_path: Path) -> None:
    config = tiny_config("eagle3", hidden_size=...)
    for write in (
        lambda: write_sparse(tmp_path, config, "eagle3"),
        lambda: write_tiny(tmp_path, "eagle3", config=config),
    ):
        with pytest.raises(ValueError, match=r"fc\.weight: the configuration does not settle its shape"):
            write()


def test_written_configurations_are_json(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "eagle3-mla")
    assert json.loads((path / "config.json").read_text()) == tiny_config("eagle3-mla")
