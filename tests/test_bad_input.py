"""What is not a draft, handed in as one.

What these catch: a traceback from deep inside; a reason that does not name the file, or takes more than a line; a check that passes, or
breaks, on what could not be read; one broken file that makes other findings up. Each case goes through both doors: `open_draft`, which
raises, and `check_draft`, which reports.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_specdecode import checks as rules
from pytest_specdecode.api import check_draft, open_draft
from pytest_specdecode.checkpoint import INDEX_NAME
from pytest_specdecode.errors import CheckpointError, DraftError, UnknownFamilyError
from pytest_specdecode.testing import random_tensors, tiny_config, write_checkpoint


def one_line(error: DraftError) -> str:
    text = str(error)
    assert text.isprintable()
    assert len(text) < 500
    return text


# --- no checkpoint at all ------------------------------------------------------------------------------------------------

NOTHING: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing directory": (lambda path: None, "cannot be opened: No such file or directory"),
    "file": (lambda path: path.write_text("x"), "is a file; give the directory that holds config.json and the weights"),
    "empty directory": (lambda path: path.mkdir(), "holds no config.json; give the directory of one draft checkpoint"),
    "directory of weights alone": (
        lambda path: (path.mkdir(), (path / "model.safetensors").write_bytes(b"")),
        "holds no config.json; give the directory of one draft checkpoint",
    ),
    "name too long": (lambda path: None, "cannot be opened: File name too long"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_where_there_is_no_checkpoint_both_doors_say_so(tmp_path: Path, name: str) -> None:
    make, says = NOTHING[name]
    path = tmp_path / ("x" * 300 if name == "name too long" else "draft")
    make(path)
    for door in (open_draft, check_draft):
        with pytest.raises(CheckpointError) as caught:
            door(path)
        assert one_line(caught.value) == f"{path}: {says}"


# --- a broken configuration ------------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty; a JSON object was due"),
    "list": (b'["a"]', "holds a JSON list; an object was due"),
    "cut": (b'{"architectures": ["Llama', "the file is not JSON: Unterminated string starting at at line 1, column 20"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 700\n",
        "is a git-lfs pointer (fetch the real file with `git lfs pull`), not JSON",
    ),
    "HTML page": (b"<!DOCTYPE html><html></html>", "is an HTML or XML page (a failed download?), not JSON"),
    "not UTF-8": (b'{"a": "\xe9"}', "the file is not UTF-8 (byte 7)"),
    "key twice": (b'{"hidden_size": 64, "hidden_size": 32}', "states the key 'hidden_size' twice"),
    "NaN": (b'{"rms_norm_eps": NaN}', "holds NaN, which JSON has not"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", [True, False], ids=["with weights", "alone"])
def test_a_broken_configuration_is_one_finding_and_no_check_passes_on_it(
    tmp_path: Path, name: str, weights: bool
) -> None:
    content, says = CONFIGS[name]
    if weights:
        # Tensors that no family is recognised by, so that only the configuration could say what this is.
        write_checkpoint(tmp_path, {}, {"x": random_tensors(tiny_config("eagle3"), "eagle3")["norm.weight"]})
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_draft(tmp_path)
    assert one_line(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert one_line(caught.value).endswith(says)
    report = check_draft(tmp_path)
    (finding,) = report["files.readable"].findings
    assert finding.message.endswith(says)
    assert finding.where.startswith(str(tmp_path / "config.json"))
    # Where weights lie and whether they are pickles can be seen without the configuration.
    seen = ["files.index", "files.pickle"] if weights else ["files.pickle"]
    assert [result.id for result in report if result.status == "passed"] == seen
    for result in report:
        if result.id not in ("files.readable", "files.index", "files.pickle"):
            assert result.status == "inconclusive", result
            assert str(tmp_path / "config.json") in result.message
            assert result.message.isprintable()


# --- broken weights --------------------------------------------------------------------------------------------------------

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def lfs(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4000\n")


def html(file: Path) -> None:
    file.write_bytes(b"<html><head><title>Sign in</title></head></html>")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "git-lfs pointer": (lfs, "is a git-lfs pointer (fetch the real file with `git lfs pull`), not safetensors"),
    "HTML page": (html, "is an HTML or XML page (a failed download?), not safetensors"),
    "cut": (cut, "is cut short"),
    "cut in the header": (cut_header, "cut short"),
    "empty": (emptied, "is 0 bytes long; a safetensors file has at least 8"),
    "folder": (folder, "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("shards", [1, 2], ids=["one file", "shards"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_broken_weights_are_one_finding_and_their_checks_are_inconclusive(
    tmp_path: Path, name: str, shards: int
) -> None:
    spoil, says = WEIGHTS[name]
    write_checkpoint(tmp_path, tiny_config("eagle3"), random_tensors(tiny_config("eagle3"), "eagle3"), shards=shards)
    file = tmp_path / ("model.safetensors" if shards == 1 else SHARDS[1])
    spoil(file)
    with pytest.raises(CheckpointError) as caught:
        open_draft(tmp_path)
    assert one_line(caught.value).startswith(f"{file}: ")
    assert says in str(caught.value)
    judged(tmp_path, "files.readable", file, says)


def judged(path: Path, check: str, file: Path, says: str) -> None:
    """`check` fails with one finding that names `file`; what needs headers is inconclusive and repeats the reason."""
    report = check_draft(path)
    (finding,) = report[check].findings
    assert says in finding.message
    assert str(file) in finding.where
    assert finding.fix
    for result in report:
        assert "the check itself broke" not in result.message
        if result.id in (check, "files.pickle", "files.readable"):
            continue
        needs = rules.REGISTRY[result.id].needs
        assert (
            result.status in ("inconclusive", "skipped") or set(needs) == {"config"} or result.id == "config.family"
        ), result
        assert result.status in ("inconclusive", "skipped", "passed"), result
        if result.status == "inconclusive":
            asks_for_more = {"target", "serving", "trace"} & set(needs) and not {"headers", "tensors"} & set(needs)
            assert asks_for_more or str(file) in result.message
            assert result.message.isprintable()
    assert len(report.findings()) == 1 + (file.suffix == ".bin")
    # The configuration can be read, and is judged.
    assert report["taps.stated"].status == "passed"
    assert report.drafts[0].family == "eagle3"


def test_an_absent_shard_is_one_finding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("eagle3"), random_tensors(tiny_config("eagle3"), "eagle3"), shards=2)
    (tmp_path / SHARDS[0]).unlink()
    says = f"shard {SHARDS[0]} is named for 8 tensors and is not in the directory"
    with pytest.raises(CheckpointError) as caught:
        open_draft(tmp_path)
    assert one_line(caught.value) == f"{tmp_path / INDEX_NAME}: weight_map: {says}"
    judged(tmp_path, "files.index", tmp_path / INDEX_NAME, says)


def test_a_broken_index_is_one_finding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("eagle3"), random_tensors(tiny_config("eagle3"), "eagle3"), shards=2)
    (tmp_path / INDEX_NAME).write_text("{}")
    judged(tmp_path, "files.index", tmp_path / INDEX_NAME, "weight_map is a JSON null; an object was due")


def test_a_pickle_that_would_run_code_is_one_finding(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("eagle3")))
    payload = f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode()
    (tmp_path / "pytorch_model.bin").write_bytes(payload)
    judged(tmp_path, "files.readable", tmp_path / "pytorch_model.bin", "cannot be read with weights_only=True")
    assert not mark.exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
@pytest.mark.parametrize("name", ["model.safetensors", INDEX_NAME])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("eagle3")))
    os.mkfifo(tmp_path / name)
    judged(tmp_path, "files.index" if name == INDEX_NAME else "files.readable", tmp_path / name, "not a regular file")


def test_an_unreadable_file_is_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, tiny_config("eagle3"), random_tensors(tiny_config("eagle3"), "eagle3"))
    file = tmp_path / "model.safetensors"
    real = os.open

    # Modes do not stop the superuser, as whom tests may run.
    def refuse(path: str, flags: int, *rest: int) -> int:
        if str(path) == str(file):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    judged(tmp_path, "files.readable", file, "cannot be read: Permission denied")


@pytest.mark.skipif(sys.platform == "win32" or not os.geteuid(), reason="modes do not stop the superuser")
def test_modes_are_respected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("eagle3"), random_tensors(tiny_config("eagle3"), "eagle3"))
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match="Permission denied"):
        open_draft(tmp_path)


# --- families ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "none"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "none"),
        ({"speculators_model_type": "someday"}, "someday"),
        ({"architectures": ["DFlashDraftModel", "LlamaForCausalLMEagle3"]}, "dflash, eagle3"),
    ],
)
def test_an_unknown_family_is_one_finding(tmp_path: Path, config: dict[str, object], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownFamilyError) as caught:
        open_draft(tmp_path)
    assert one_line(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert re.search(r"no draft family that this version reads|signals name more than one family", str(caught.value))
    assert one_line(caught.value).endswith(named)
    report = check_draft(tmp_path)
    assert len(report["config.family"].findings) == 1
    for result in report:
        if result.id.split(".")[0] != "files" and result.id not in ("config.family", "config.types"):
            assert result.status == "inconclusive", result
            assert "config.family" in result.message


def test_names_with_control_codes_do_not_reach_the_terminal(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config("eagle3"), "eagle3")
    tensors["\x1b[2Jgone\nfc.weight"] = tensors["norm.weight"].clone()
    path = tmp_path / "dr\x1baft"
    write_checkpoint(path, tiny_config("eagle3"), tensors)
    text = str(check_draft(path))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\\x1b[2Jgone\\nfc.weight is no tensor of this draft" in " ".join(text.split())
    assert text.startswith("dr\\x1baft: eagle3")


def test_a_broken_draft_does_not_spoil_the_next(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "good", tiny_config("eagle3"), random_tensors(tiny_config("eagle3"), "eagle3"))
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    cut(tmp_path / "bad" / "model.safetensors")
    before = check_draft(tmp_path / "good", checks=["files", "weights.missing"]).to_dict()
    check_draft(tmp_path / "bad")
    assert check_draft(tmp_path / "good", checks=["files", "weights.missing"]).to_dict() == before
