"""Drafts that are broken inside. Caught here: a traceback or an internal error where a reason is due; a reason that does not name the
file; a fault that takes the user's own tests, or another draft's, down with it; inconclusive checks that count as passed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_specdecode.testing import random_tensors, tiny_config, write_checkpoint

Run = Callable[..., pytest.RunResult]

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123\n"


def _config(text: bytes) -> Callable[[Path], None]:
    return lambda path: _put(path / "config.json", text)


def _weights(content: bytes) -> Callable[[Path], None]:
    return lambda path: _put(path / "model.safetensors", content)


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _unknown_family(path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").unlink()


def _sharded(path: Path) -> None:
    shutil.rmtree(path)
    config = tiny_config("dflash")
    write_checkpoint(path, config, random_tensors(config, "dflash"), shards=2)


def _absent_shard(path: Path) -> None:
    _sharded(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def _directory_for_a_shard(path: Path) -> None:
    _absent_shard(path)
    (path / "model-00002-of-00002.safetensors").mkdir()


FAULTS = [
    ("empty config", _config(b""), "config.json: is empty"),
    ("config list", _config(b"[1, 2]"), "config.json: holds a JSON list"),
    ("config lfs", _config(LFS), "config.json: is a git-lfs pointer"),
    ("config cut", _config(b'{"architectures": ["DFlash'), "config.json: "),
    ("config not text", _config(b"\xff\xfe\x00\x01"), "config.json: "),
    ("weights lfs", _weights(LFS), "model.safetensors: is a git-lfs pointer"),
    ("weights html", _weights(b"<!DOCTYPE html><html>404</html>"), "model.safetensors: is an HTML"),
    ("weights empty", _weights(b""), "model.safetensors: "),
    ("weights cut", _cut, "model.safetensors: "),
    ("absent shard", _absent_shard, "model-00002-of-00002.safetensors"),
    ("directory for a shard", _directory_for_a_shard, "model-00002-of-00002.safetensors"),
    ("unknown family", _unknown_family, "config.json"),
]


@pytest.mark.parametrize(("breaks", "reason"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_broken_draft_fails_its_checks_with_a_reason_and_nothing_else(
    run: Run, pytester: pytest.Pytester, dflash: Path, copied: Path, breaks: Callable[[Path], None], reason: str
) -> None:
    breaks(copied)
    pytester.makepyfile("def test_of_the_user(): pass")
    checks = "--draft-checks=files,config,weights.shapes,rope.theta-stated,rope.theta-agrees,layers.build"
    result = run("-v", f"--draft-model={copied}", checks, "--draft-report=r.json", model=dflash)
    assert result.ret == 1
    text = str(result.stdout) + str(result.stderr)
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    assert "the check itself broke" not in text
    assert any(reason in line for line in result.outlines), text
    result.stdout.fnmatch_lines(["*::test_of_the_user PASSED*"])
    good, broken = json.loads((pytester.path / "r.json").read_text())["drafts"]
    assert good["status"] in ("passed", "skipped")
    statuses = {check["id"]: check["status"] for check in broken["checks"]}
    assert "failed" in statuses.values()
    if reason.startswith("config.json"):
        # Without a configuration nothing that reads one can have been judged.
        assert statuses["layers.build"] == "inconclusive"
    assert "error" not in result.parseoutcomes()


def test_fixtures_of_a_broken_draft_fail_in_one_line(run: Run, pytester: pytest.Pytester, copied: Path) -> None:
    (copied / "config.json").write_text("")
    pytester.makepyfile(
        """
        def test_spec(draft_spec): pass
        def test_layers(draft_layers): pass
        def test_stack(fused_kv): pass
        def test_draft_is_still_there(draft): assert draft.unread_config is not None
        """
    )
    result = run("--deselect=draft-model", model=copied)
    outcomes = result.parseoutcomes()
    assert (outcomes["errors"], outcomes["passed"]) == (3, 1)
    assert "fixtures.py" not in str(result.stdout)
    result.stdout.fnmatch_lines(["*config.json: is empty*"])


def test_weights_that_do_not_fit_fail_the_layers_fixture_with_the_tensor(
    run: Run, pytester: pytest.Pytester, copied: Path
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    pytester.makepyfile("def test_layers(draft_layers): pass")
    result = run("--deselect=draft-model", model=copied)
    result.stdout.fnmatch_lines(["*layers.0.self_attn.k_proj.weight: has shape*"])
    assert "fixtures.py" not in str(result.stdout)
