"""The trained pair of `examples/tiny-pair`: served and replayed, and every convention turned over in its configuration.

What goes wrong without this file: a replay that equals its own kind and not the decoding of a trained pair, a probe that names conventions
only where the draft wrote the text itself.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pytest_specdecode import open_draft
from pytest_specdecode.replay.probe import probe
from pytest_specdecode.replay.readings import other_readings
from pytest_specdecode.replay.run import Replayer, replay
from pytest_specdecode.replay.target_weights import TargetWeights
from pytest_specdecode.replay.traces import Trace
from pytest_specdecode.target import Target

PAIR = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny-pair"
TRACE = Trace.open(PAIR / "trace")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The example's script, which has the loop that serves the pair."""
    spec = importlib.util.spec_from_file_location("tiny_pair_served", PAIR / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["eagle3", "eagle3-mla", "dflash"])
def test_a_replay_of_the_pair_is_its_decoding_round_by_round(name: str, script: ModuleType) -> None:
    """But for rounds that the recorded text ends in: there the decoding goes on, and the replay has less to compare with."""
    target = script.open_target(PAIR / "target")
    drafter = script.open_drafter(PAIR / name, target)
    draft, weights = open_draft(PAIR / name), TargetWeights(PAIR / "target")
    for file in TRACE.files[2:5]:
        text = load_file(file)["token_ids"].tolist()
        served = script.speculate(target, drafter, text[: script.PROMPT], len(text))
        assert served.ids[: len(text)] == text
        (found,) = replay(draft, Trace(file, (file,)), target=weights).files
        whole = [item.accepted + 1 for item in found.rounds if item.whole]
        assert len(whole) > 10
        assert whole == served.gained[: len(whole)]
        assert found.confirmed == 1.0


#: What is turned over: changes of the configuration, and the reading that is to be named.
FLIPS: dict[str, tuple[str, dict[str, Any], str]] = {
    "eagle3, theta": ("eagle3", {"rope_theta": 100.0}, "theta 10000"),
    "eagle3, pairs": ("eagle3", {"is_neox_style": False}, "neox"),
    "eagle3, partial rotary": ("eagle3", {"partial_rotary_factor": 0.5}, "partial rotary off"),
    "eagle3, scaling": (
        "eagle3",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "rope scaling off",
    ),
    "eagle3, taps reversed": ("eagle3", {"taps": [3, 2, 1]}, "taps reversed"),
    "eagle3, taps one early": ("eagle3", {"taps": [0, 1, 2]}, "taps +1"),
    "eagle3, taps one late": ("eagle3", {"taps": [2, 3, 4]}, "taps -1"),
    "eagle3, residual": ("eagle3", {"norm_before_residual": True}, "raw residual"),
    "eagle3, recycled": ("eagle3", {"norm_output": True}, "recycled state raw"),
    "eagle3-mla, residual": ("eagle3-mla", {"norm_before_residual": True}, "raw residual"),
    "eagle3-mla, taps reversed": ("eagle3-mla", {"taps": [3, 2, 1]}, "taps reversed"),
    "dflash, theta": ("dflash", {"rope_theta": 100.0}, "theta 10000"),
    "dflash, taps reversed": ("dflash", {"taps": [3, 2, 1]}, "taps reversed"),
    "dflash, taps one late": ("dflash", {"taps": [2, 3, 4]}, "taps -1"),
    "dflash, anchor": ("dflash", {"sample_from_anchor": True}, "first mask row drafts"),
    "dflash, window": ("dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2}, "no window"),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_a_convention_turned_over_in_the_configuration_is_named(flip: str, tmp_path: Path) -> None:
    name, changes, reading = FLIPS[flip]
    draft = open_draft(_turned_over(tmp_path / name, PAIR / name, changes))
    others = other_readings(draft, Target.open(PAIR / "target"))
    (key,) = {item.key for item in others if item.name == reading}
    found = probe(Replayer(draft, TargetWeights(PAIR / "target")), TRACE, [item for item in others if item.key == key])
    assert found.better, [(item.reading.name, item.verdict, item.p) for item in found.comparisons]
    assert found.better[0].reading.name == reading
    assert found.better[0].rate.accepted_length is not None
    assert found.declared.accepted_length is not None
    assert found.better[0].rate.accepted_length > found.declared.accepted_length


def test_the_convention_that_this_trace_cannot_tell_comes_with_the_tokens_that_would(tmp_path: Path) -> None:
    """The block draft reads about as well one way as both ways, and 1,829 tokens are too few for the difference."""
    draft = open_draft(_turned_over(tmp_path / "dflash", PAIR / "dflash", {"is_causal": True}))
    others = [item for item in other_readings(draft) if item.name == "not causal"]
    (found,) = probe(Replayer(draft, TargetWeights(PAIR / "target")), TRACE, others).comparisons
    assert found.verdict == "open"
    assert found.tokens is not None
    assert found.tokens > found.compared > 1000


def _turned_over(directory: Path, source: Path, changes: dict[str, Any]) -> Path:
    config = json.loads((source / "config.json").read_text())
    changes = dict(changes)
    taps = changes.pop("taps", None)
    if taps is not None and "dflash_config" in config:
        config["dflash_config"]["target_layer_ids"] = [id - 1 for id in taps]
    elif taps is not None:
        config["eagle_aux_hidden_state_layer_ids"] = taps
        config.pop("eagle_config")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(load_file(source / "model.safetensors"), directory / "model.safetensors")
    return directory
