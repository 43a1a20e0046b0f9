"""What Python's json reads and the standard has not: `Infinity`, `NaN`, a key twice.

What goes wrong without this file: a target is refused for `time_step_limit: [0.0, Infinity]`, which Nemotron-H ships; a draft inside such a
target is refused as a whole for a key that it is not read from; a draft's own key that is read holds NaN, and is read as something else.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checkpoint import read_json_object
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.families.known_keys import is_read
from pytest_specdecode.target import Target

LIMIT = '"time_step_limit": [0.0, Infinity]'
TWICE = '"ssm_cfg": {"d": 1, "d": 2}'


def with_more(path: Path, *more: str) -> None:
    """Put `more`, written as it stands, at the end of the configuration in `path`."""
    file = path / "config.json"
    file.write_text(file.read_text().rstrip().removesuffix("}") + ", " + ", ".join(more) + "}")


def test_where_each_stands(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": [1, {"b": NaN}], "c": 1, "c": 1e999, "d": {"e": 1, "e": 2}}')
    odd: list[CheckpointError] = []
    read = read_json_object(file, odd=odd)
    assert math.isnan(read["a"][1]["b"])
    assert (read["c"], read["d"]) == (math.inf, {"e": 2})
    assert sorted((fault.key, fault.message) for fault in odd) == [
        ("a.1.b", "holds NaN, which JSON has not"),
        ("c", "holds Infinity, which JSON has not"),
        ("c", "states the key 'c' twice"),
        ("d.e", "states the key 'e' twice"),
    ]


def test_a_target_is_read_as_python_reads_it(tmp_path: Path) -> None:
    draft = testing.write_tiny(tmp_path / "draft", "eagle3")
    target = tmp_path / "target"
    target.mkdir()
    config = {"hidden_size": testing.tiny_config("eagle3")["hidden_size"], "vocab_size": 512, "num_hidden_layers": 24}
    (target / "config.json").write_text(json.dumps(config))
    with_more(target, LIMIT, TWICE)
    (target / "generation_config.json").write_text('{"eos_token_id": 7, "top_p": NaN, "top_p": NaN}')
    found = Target.open(target)
    assert found.config["time_step_limit"] == [0.0, math.inf]
    assert found.eos_ids == (7,)
    assert check_draft(draft, target=target, checks=["target.widths"])["target.widths"].status != "inconclusive"


def test_a_draft_inside_such_a_target_is_read_and_warned_of(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "mtp")
    with_more(path, LIMIT, TWICE)
    report = check_draft(path)
    result = report["files.readable"]
    assert result.status == "warned"
    assert sorted(finding.where for finding in result.findings) == [
        "config.json: ssm_cfg.d",
        "config.json: time_step_limit.1",
    ]
    assert report["config.types"].status == "passed"
    assert report.ok


def test_a_read_key_of_an_embedded_draft_is_a_warning_too(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "mtp")
    with_more(path, '"rms_norm_eps": NaN')
    report = check_draft(path, checks=["files.readable", "config.family"])
    assert report["files.readable"].status == "warned"
    assert "config.json: rms_norm_eps" in {finding.where for finding in report["files.readable"].findings}
    assert report["config.family"].status == "passed"


@pytest.mark.parametrize("more", [LIMIT, TWICE])
def test_a_plain_draft_is_refused_only_for_what_is_read(tmp_path: Path, more: str) -> None:
    path = testing.write_tiny(tmp_path, "eagle3")
    with_more(path, more)
    report = check_draft(path, checks=["files.readable", "config.types"])
    assert (report["files.readable"].status, report["config.types"].status) == ("warned", "passed")


@pytest.mark.parametrize(
    "more", ['"rope_theta": Infinity', '"hidden_size": 64', '"eagle_config": {"norm_output": NaN}']
)
def test_a_plain_draft_is_refused_for_what_is_read(tmp_path: Path, more: str) -> None:
    path = testing.write_tiny(tmp_path, "eagle3")
    with_more(path, more)
    report = check_draft(path, checks=["files.readable", "config.types"])
    assert (report["files.readable"].status, report["config.types"].status) == ("failed", "inconclusive")


@pytest.mark.parametrize(
    ("place", "read"),
    [
        ("rope_scaling.factor", True),
        ("text_config.hidden_size", True),
        ("text_config.time_step_limit.1", False),
        ("text_config", True),
        ("eagle_config.layer_ids.0", True),
        ("eagle_config.other", False),
        ("eagle_config", True),
        ("vision_config.hidden_size", False),
        ("transformer_layer_config.rope_theta", True),
    ],
)
def test_what_is_read(place: str, read: bool) -> None:
    assert is_read(place) is read
