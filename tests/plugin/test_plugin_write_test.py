"""--draft-write-test: a test file to begin with.

What goes wrong without this file: a file that fails on the checkpoint it was written from, or passes on another; one that is written over
somebody's work, or by half; one that a team's formatter rewrites; a family of which the writer knows nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_specdecode import testing
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import FAMILIES, load
from pytest_specdecode.plugin.starting_test import text_for, write_new

Run = Callable[..., pytest.RunResult]

CORPUS = sorted((Path(__file__).parents[1] / "corpus" / "configs").glob("*.json"))
#: The rules that a team may be expected to have on.
RULES = "E,F,W,I,UP,B,C4,SIM,RUF,PT,PIE,RET"


def _refused(result: pytest.RunResult, *texts: str) -> None:
    assert result.ret == 4
    (line,) = [line for line in (*result.outlines, *result.errlines) if line]
    assert line.startswith("ERROR: --draft-write-test")
    for text in texts:
        assert text in line


def test_the_file_is_written_and_nothing_is_run(run: Run, pytester: pytest.Pytester, dflash: Path) -> None:
    pytester.makepyfile("def test_of_the_user(): raise AssertionError")
    result = run("--draft-write-test=test_mine.py")
    assert result.ret == 0
    assert result.outlines == ["wrote test_mine.py; run it with", f"  pytest --draft-model={dflash} test_mine.py"]
    text = (pytester.path / "test_mine.py").read_text()
    assert text.startswith('"""Tests of the dflash draft dflash-tiny, to be kept beside it and edited.\n')
    for pinned in (
        'draft_spec.family == "dflash"',
        "draft_spec.hidden_size == 64",
        "draft_spec.taps.ids == (1, 9, 17)",
        "draft_spec.vocabulary.vocab_size == 512",
        "draft_spec.block.block_size == 8",
        "len(draft_spec.layers) == 2",
        "layer.attention.num_kv_heads == 2",
        "layer.attention.rope.theta == 1000000.0",
    ):
        assert f"    assert {pinned}\n" in text, pinned
    assert "@given(positions=" in text
    assert "class TestOurPath(FusedKVContract)" in text
    assert len(text.splitlines()) < 100
    assert os.listdir(pytester.path).count("test_mine.py") == 1
    assert not [name for name in os.listdir(pytester.path) if name.endswith(".part")]


def _written(run: Run, pytester: pytest.Pytester, model: Path) -> str:
    """A file for `model`, written and set up to be run where the current pytester is."""
    run("--draft-write-test=test_mine.py", model=model)
    return "test_mine.py"


ALONE = ("--deselect=draft-model", "-W", "error")


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_the_file_passes_on_the_draft_it_was_written_for(
    family: str, run: Run, pytester: pytest.Pytester, tmp_path: Path
) -> None:
    """And is nothing but tests that ran; for every family."""
    model = testing.write_tiny(tmp_path / "drafts" / family, family)
    result = run(*ALONE, _written(run, pytester, model), model=model)
    outcomes = result.parseoutcomes()
    assert set(outcomes) <= {"passed", "deselected"}, result.stdout.str()
    assert outcomes["passed"] >= 4


def _with_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _retrain(path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] *= 1.01

    shutil.rmtree(path)
    testing.write_tiny(path, "dflash", edit=edit)


@pytest.mark.parametrize(
    ("change", "test"),
    [
        (lambda path: _with_config(path, rope_theta=5e5), "test_its_layers_are_the_ones_we_trained"),
        (
            lambda path: _with_config(path, dflash_config={"target_layer_ids": [1, 9, 16], "mask_token_id": 511}),
            "test_the_draft_is_the_one_we_trained",
        ),
        (lambda path: _with_config(path, is_causal=True), "test_the_draft_is_the_one_we_trained"),
        (_retrain, "test_its_weights_are_the_ones_we_released"),
    ],
    ids=["theta", "a tap", "causality", "weights"],
)
def test_the_file_fails_on_a_changed_checkpoint(
    change: Callable[[Path], None], test: str, run: Run, pytester: pytest.Pytester, copied: Path
) -> None:
    file = _written(run, pytester, copied)
    run(*ALONE, file, model=copied).assert_outcomes(passed=5, deselected=None)
    change(copied)
    result = run(*ALONE, file, model=copied)
    assert result.ret == 1
    assert re.search(rf"^FAILED .*{test}", result.stdout.str(), re.MULTILINE), result.stdout.str()


def test_the_named_path_is_put_in_the_place_of_ours(run: Run, pytester: pytest.Pytester, dflash: Path) -> None:
    """So that the file is of use to those who write one. What fails is not shrunk here."""
    pytester.makeconftest(
        """
        from hypothesis import Phase, settings
        settings.register_profile("quick", phases=[Phase.generate])
        settings.load_profile("quick")
        """
    )
    pytester.makepyfile(
        late="""
        from pytest_specdecode import FusedKV

        class Late(FusedKV):
            def compute(self, ctx_hidden, positions):
                return super().compute(ctx_hidden, positions + 1)
        """
    )
    file = _written(run, pytester, dflash)
    result = run(*ALONE, "--draft-fused-kv=late:Late", file)
    result.assert_outcomes(passed=4, failed=1, deselected=None)
    result.stdout.fnmatch_lines(["FAILED *test_its_context_kv_is_right*"])


# --- refused ------------------------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_left_alone(run: Run, pytester: pytest.Pytester) -> None:
    file = pytester.path / "test_mine.py"
    file.write_text("kept")
    _refused(run("--draft-write-test=test_mine.py"), "test_mine.py", "is not overwritten")
    assert file.read_text() == "kept"
    (pytester.path / "test_link.py").symlink_to("nowhere.py")
    _refused(run("--draft-write-test=test_link.py"), "is not overwritten")
    assert not (pytester.path / "nowhere.py").exists()


def test_a_directory_that_is_not_there_is_named(run: Run, pytester: pytest.Pytester) -> None:
    _refused(run("--draft-write-test=no/where/test_mine.py"), f"there is no directory {pytester.path / 'no' / 'where'}")


def test_only_python_files_are_written(run: Run) -> None:
    _refused(run("--draft-write-test=mine.txt"), "ends in .py")


@pytest.mark.parametrize("name", ["conftest.py", "__init__.py"])
def test_names_that_mean_something_to_pytest_are_refused(name: str, run: Run, pytester: pytest.Pytester) -> None:
    _refused(run(f"--draft-write-test={name}"), "pytest has another use for a file of that name")
    assert not (pytester.path / name).exists()


@pytest.mark.parametrize(
    ("name", "shown"),
    [("test mine.py", "'test mine.py'"), ("-x.py", "./-x.py"), ("test_it's.py", "'test_it'\"'\"'s.py'")],
)
def test_the_command_can_be_pasted_whatever_the_name(name: str, shown: str, run: Run) -> None:
    run(f"--draft-write-test={name}").stdout.fnmatch_lines([f"  pytest --draft-model=* {shown}"])


def test_one_draft_is_due(run: Run, eagle3: Path) -> None:
    _refused(run("--draft-write-test=test_mine.py", model=None), "--draft-model=DIR", "there is none")
    _refused(
        run("--draft-write-test=test_mine.py", f"--draft-model={eagle3}"), "give one --draft-model=DIR", "dflash-tiny"
    )


def test_a_draft_that_cannot_be_read_is_refused(run: Run, pytester: pytest.Pytester) -> None:
    model = pytester.mkdir("odd")
    (model / "config.json").write_text('{"model_type": "bert"}')
    _refused(run("--draft-write-test=test_mine.py", model=model), "family not recognised")
    (model / "config.json").write_text("{")
    _refused(run("--draft-write-test=test_mine.py", model=model), "config.json")


# --- written whole, in good form ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are no hard links; and another's file that appears meanwhile stays."""
    write_new(tmp_path / "a.py", "text\n")
    assert (tmp_path / "a.py").read_text() == "text\n"
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a.py", "other\n")

    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    write_new(tmp_path / "b.py", "text\n")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "b.py", "other\n")
    with pytest.raises(UnicodeEncodeError):
        write_new(tmp_path / "c.py", "begun \udcff")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.py": "text\n", "b.py": "text\n"}


def _texts(tmp_path: Path) -> dict[str, str]:
    """Of every tiny draft, of every configuration of the corpus that is some family's, and of names that are no words."""
    found = {}
    for family in FAMILIES:
        path = testing.write_tiny(tmp_path / "tiny" / family.name, family.name)
        found[f"tiny {family.name}"] = text_for(load(Checkpoint.open(path)), str(path))
    for config in CORPUS:
        path = tmp_path / "corpus" / config.stem
        path.mkdir(parents=True)
        shutil.copy(config, path / "config.json")
        draft = load(Checkpoint.open(path))
        if draft.spec is not None and draft.unread_config is None:
            found[config.stem] = text_for(draft, str(path))
    odd = testing.write_tiny(
        tmp_path / 'a"""b\\c d',
        "dflash",
        num_hidden_layers=60,
        layer_types=[*["full_attention", "sliding_attention", "sliding_attention"] * 18, *["sliding_attention"] * 6],
        sliding_window=8,
    )
    found["odd"] = text_for(load(Checkpoint.open(odd)), str(odd), 'test_"""x.py')
    return found


def test_every_text_is_python_as_ruff_would_have_it(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    texts = _texts(tmp_path)
    assert len(texts) > 100
    files = tmp_path / "texts"
    files.mkdir()
    for number, (name, text) in enumerate(texts.items()):
        compile(text, name, "exec")
        (files / f"test_{number}.py").write_text(text)
    for command in (["check", "--no-cache", f"--select={RULES}"], ["format", "--no-cache", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", command[0], "--isolated", "--line-length=120", *command[1:], "."],
            cwd=files,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_configuration_alone_gives_pins_alone(tmp_path: Path) -> None:
    """No test of weights that are not there."""
    path = tmp_path / "configuration"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(testing.tiny_config("dflash")))
    text = text_for(load(Checkpoint.open(path)), "DIR")
    assert re.findall(r"^def (\w+)", text, re.MULTILINE) == [
        "test_the_draft_is_the_one_we_trained",
        "test_its_layers_are_the_ones_we_trained",
    ]
    assert "import torch" not in text
