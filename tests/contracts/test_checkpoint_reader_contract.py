"""The checkpoint-reader contract: our reader passes whole, and each thing that is wrong fails the test that bears its name, and no other.

Failure modes this file exists to catch: damage that is none, so that every reader passes; a test that another fault trips; a valid file
that the contract itself writes wrongly, which a reader of somebody else's would refuse.
"""

from __future__ import annotations

import re
from typing import ClassVar

import pytest
import torch
from running import failing
from safetensors.torch import load_file

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.contracts import CheckpointReaderContract
from pytest_specdecode.contracts.base import DRAWN
from pytest_specdecode.contracts.checkpoint_reader import QUANTISED, stored_as
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.testing import expected_tensors, random_tensors, tiny_config


def read(path):
    """Everything in the directory, or the first fault."""
    checkpoint = Checkpoint.open(path)
    for fault in (*checkpoint.faults, *checkpoint.index_faults):
        raise fault
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


class TestOurs(CheckpointReaderContract):
    build = staticmethod(read)


class TestHeadersOnly(CheckpointReaderContract):
    """A reader of shapes."""

    @staticmethod
    def build(path):
        read(path)
        return Checkpoint.open(path).tensors


class TestSafetensors(CheckpointReaderContract):
    """Somebody else's: whatever files are there, one after the other."""

    known_gaps: ClassVar = {
        "pickled": "reads safetensors only",
        "pickled-shards": "reads safetensors only",
        "stored-twice": "the later file wins",
        "missing-shard": "the index is not read",
        "absent-tensor": "the index is not read",
        "duplicate-name": "what is found under the name twice is not asked",
    }

    @staticmethod
    def build(path):
        found = {}
        for file in sorted(path.glob("*.safetensors")):
            found |= load_file(file)
        return found


# --- broken readers -----------------------------------------------------------------------------------------------------------------------

#: By property, what our reader says where it refuses.
REFUSALS = {
    "truncated": r"is cut short: the header describes",
    "trailing-bytes": r"bytes after the last tensor",
    "overlapping": r"overlaps the one before it",
    "gap": r"leaves a gap before it",
    "shape-mismatch": r"takes 28 bytes, data_offsets give 24",
    "duplicate-name": r"states the key 'first' twice",
    "unknown-dtype": r"unknown dtype 'F31'",
    "header-past-end": r"claims a header of",
    "not-json": r"the header is not JSON",
    "lfs-pointer": r"git-lfs pointer",
    "stored-twice": r"is stored twice",
    "missing-shard": r"is not in the directory",
    "absent-tensor": r"which does not hold it",
}


def lenient(text):
    """Takes for good what our reader refuses with this text."""

    def build(path):
        try:
            return read(path)
        except CheckpointError as error:
            if re.search(text, str(error)):
                return {}
            raise

    return build


def changing(condition, change):
    def build(path):
        found = read(path)
        return change(found) if condition(path, found) else found

    return build


def without_one(found):
    return dict(list(found.items())[1:])


def flipped(found):
    return {name: value.flip(0) if value.ndim == 2 else value for name, value in found.items()}


def of_family(family):
    """Of that family's draft under its own names; no other family has tensors of the same names and shapes."""
    from pytest_specdecode.testing import random_tensors, stored_names

    config = tiny_config(family)
    names = {stored_names(config, family)(name) for name in random_tensors(config, family)}
    return lambda path, found: set(found) == names and str(path).endswith(f"{family}/draft")


def files(path, pattern):
    return len(list(path.glob(pattern)))


BROKEN = {
    **{family.name: changing(of_family(family.name), flipped) for family in FAMILIES},
    "prefixed": changing(lambda path, found: "model.fc.weight" in found and "model.d2t" in found, without_one),
    "joined": changing(lambda path, found: "layers.0.self_attn.qkv_proj.weight" in found and "d2t" in found, flipped),
    "speculators": changing(
        lambda path, found: '"speculators_model_type": "eagle3"' in (path / "config.json").read_text(), without_one
    ),
    "sharded": changing(lambda path, found: files(path, "*.safetensors") == 3, without_one),
    "pickled": changing(lambda path, found: files(path, "*.bin") == 1, flipped),
    "pickled-shards": changing(lambda path, found: files(path, "*.bin") == 2, without_one),
    "quantised": changing(
        lambda path, found: any(name.endswith("weight_scale") for name in found),
        lambda found: {name: value for name, value in found.items() if not name.endswith("weight_scale")},
    ),
    "metadata": changing(lambda path, found: b"__metadata__" in head(path) and b"note" in head(path), without_one),
    "empty-tensors": changing(lambda path, found: "none" in found, lambda found: {**found, "none": torch.ones(1, 4)}),
    **{name: lenient(text) for name, text in REFUSALS.items()},
}


def head(path):
    file = next(path.glob("*.safetensors"), None)
    return b"" if file is None else file.read_bytes()


def contract(build):
    return type("Subject", (CheckpointReaderContract,), {"build": staticmethod(build)})


def test_there_is_a_broken_reader_for_every_property():
    assert set(BROKEN) == {name for name in CheckpointReaderContract.properties() if not name.endswith(DRAWN)}


# The families' tests are one test over another draft: three of them stand for all.
@pytest.mark.parametrize(
    "name", [name for name in BROKEN if name in ("dflash", "medusa", "mtp") or name not in {f.name for f in FAMILIES}]
)
def test_what_is_broken_fails_the_test_of_its_name_and_no_other(name, tmp_path):
    assert list(failing(contract(BROKEN[name]), tmp_path)) == [name]


def test_values_are_compared_bit_for_bit():
    def off_by_a_bit(path):
        return {name: -value if value.dtype == torch.float32 else value for name, value in read(path).items()}

    with pytest.raises(AssertionError, match=r"elements differ|dtype"):
        contract(off_by_a_bit)().test_reads_any(rest="")


def test_a_cut_file_that_is_taken_is_found_by_drawing():
    with pytest.raises(AssertionError, match="taken for a checkpoint"):
        contract(lenient("is cut short|claims a header|at least 8|not JSON"))().test_refuses_any_cut(rest="")


def keeping(end):
    """Reads all, but makes floats of what an exporter packed or put beside it under a name with this end."""

    def build(path):
        return {name: value.float() if name.endswith(end) else value for name, value in read(path).items()}

    return build


def test_whatever_is_wrong_with_one_way_of_writing_is_found_by_drawing():
    for build in (
        changing(lambda path, found: files(path, "*.bin") > 1, without_one),
        changing(lambda path, found: "speculators_model_type" in (path / "config.json").read_text(), without_one),
        keeping("quant_state.bitsandbytes__nf4"),
    ):
        with pytest.raises(AssertionError, match=r"tensors not read|elements differ|dtype"):
            contract(build)().test_reads_any_draft(rest="")


def test_what_is_known_not_to_be_read_is_not_drawn():
    seen = []

    def build(path):
        found = read(path)
        seen.append((files(path, "*.bin"), files(path, "*.safetensors"), *found))
        return found

    gaps = dict.fromkeys(("pickled", "quantised", "sharded", "speculators", "joined", "prefixed", "mtp"), "known")
    subject = type("Subject", (CheckpointReaderContract,), {"build": staticmethod(build), "known_gaps": gaps})
    subject().test_reads_any_draft(rest="")
    assert {entry[:2] for entry in seen} == {(0, 1)}
    names = {name for entry in seen for name in entry[2:]}
    assert not [name for name in names if "qkv_proj" in name or name.startswith(("model.fc", "mtp.fc"))]
    assert not [name for name in names if name.endswith(("scales", "weight_scale", "qweight"))]


def test_a_quantised_draft_has_all_its_matrices_in_that_form():
    tensors = random_tensors(tiny_config("eagle3"), "eagle3")
    matrices = [name for name, value in tensors.items() if value.ndim == 2]
    assert set(QUANTISED) == {"fp8", "compressed-tensors", "gptq", "mlx", "bitsandbytes"}
    for storage in QUANTISED:
        stored = stored_as(storage, tensors)
        assert len(stored) >= len(tensors) + len(matrices), storage
        assert {name for name, value in tensors.items() if value.ndim == 1} <= set(stored)


def test_tiny_drafts_have_more_than_one_tensor():
    for family in FAMILIES:
        assert len(expected_tensors(tiny_config(family.name), family.name)[1]) > 1
