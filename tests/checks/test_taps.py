"""The tap checks beyond one row each: what the file says of the target's depth and of its own count, in each packaging.

What goes wrong without this file: the last id of a boundary list that is called out of range, or an output list that is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.spec import DraftSpec

KEY = "eagle_aux_hidden_state_layer_ids"


def _eagle3(tmp_path: Path, ids: list[int], target: Path | None = None, **changes: Any) -> dict[str, CheckResult]:
    config = testing.tiny_config("eagle3", **{KEY: ids, "eagle_config": {KEY: ids}, **changes})
    path = testing.write_tiny(tmp_path / "draft", "eagle3", config=config)
    return {result.id: result for result in check_draft(path, target=target, checks="taps")}


@pytest.mark.parametrize(("last", "status"), [(15, "passed"), (16, "passed"), (17, "failed")])
def test_an_eagle3_list_may_be_of_either_convention(last: int, status: str, tmp_path: Path) -> None:
    """Boundary ids run to the depth itself, output ids to one less; the file does not say which it means."""
    assert _eagle3(tmp_path, [2, 8, last])["taps.range"].status == status


@pytest.mark.parametrize(("last", "status"), [(19, "passed"), (20, "failed")])
def test_a_dflash_list_names_outputs(last: int, status: str, tmp_path: Path) -> None:
    nested = {"mask_token_id": 511, "target_layer_ids": [1, 9, last], "block_size": 8}
    path = testing.write_tiny(tmp_path / "draft", "dflash", dflash_config=nested)
    assert check_draft(path, checks="taps.range")["taps.range"].status == status


def test_the_targets_own_depth_counts_before_the_drafts_word(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 12}}))
    assert "target with 12 layers" in _eagle3(tmp_path, [2, 8, 13], target)["taps.range"].message


def test_without_a_depth_the_range_is_open(tmp_path: Path) -> None:
    found = _eagle3(tmp_path, [2, 8, 99], num_target_layers=...)["taps.range"]
    assert found.status == "inconclusive"
    assert "--draft-target=DIR" in found.message


def test_one_place_of_two_is_served_right_by_one_engine(tmp_path: Path) -> None:
    (finding,) = _eagle3(tmp_path, [2, 8, 13], eagle_config=...)["taps.places"].findings
    assert finding.severity == "warning"
    assert finding.outcomes["sglang"].outcome == "serves wrong"
    assert finding.outcomes["vllm"].outcome == "fine"


def test_a_count_that_is_not_the_lists(tmp_path: Path) -> None:
    found = _eagle3(tmp_path, [2, 8, 13], num_aux_hidden_states=4)["taps.stated"]
    assert found.status == "failed"
    assert found.findings[0].where == "config.json: num_aux_hidden_states"


def _packaged(tmp_path: Path, **own: Any) -> tuple[DraftSpec, dict[str, CheckResult]]:
    """A DFlash draft as the speculators library writes it, with taps stated as `own` says."""
    plain = testing.tiny_config("dflash")
    layer = {key: value for key, value in plain.items() if key not in ("dflash_config", "num_target_layers")}
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "block_size": 8,
        "mask_token_id": 511,
        "num_target_layers": 18,
        **own,
    }
    path = testing.write_checkpoint(tmp_path, config, {})
    spec = open_draft(path).spec
    assert spec is not None
    return spec, {result.id: result for result in check_draft(path, checks="taps")}


@pytest.mark.parametrize(
    ("own", "convention", "range_status"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 9, 17]}}, "output", "passed"),
        ({"dflash_config": {"target_layer_ids": [1, 9, 18]}}, "output", "failed"),
        ({"target_layer_ids": [1, 9, 18]}, None, "passed"),
    ],
)
def test_a_packaged_dflash_with_the_other_librarys_key_only(
    tmp_path: Path, own: dict[str, Any], convention: str | None, range_status: str
) -> None:
    """speculators 0.9.0 reads aux_hidden_state_layer_ids and nothing else; what the other key counts depends on who wrote it."""
    spec, found = _packaged(tmp_path, **own)
    assert (spec.taps.convention, spec.taps.count) == (convention, 3)
    (finding,) = found["taps.stated"].findings
    assert finding.severity == "error"
    assert "readers of this packaging do not look at" in finding.message
    assert "aux_hidden_state_layer_ids" in finding.fix
    if convention == "output":
        assert finding.due == {"aux_hidden_state_layer_ids": [id + 1 for id in spec.taps.ids or ()]}
    assert found["taps.range"].status == range_status


@pytest.mark.parametrize(
    ("nested", "status"), [([1, 9, 17], "passed"), ([2, 10, 18], "failed"), ([1, 9, 16], "failed")]
)
def test_two_keys_that_count_differently_agree_one_apart(tmp_path: Path, nested: list[int], status: str) -> None:
    """z-lab's key counts the outputs of layers, speculators' the states between them: a list copied from one to the other is wrong."""
    own = {"aux_hidden_state_layer_ids": [2, 10, 18], "dflash_config": {"target_layer_ids": nested}}
    spec, found = _packaged(tmp_path, **own)
    assert (spec.taps.ids, spec.taps.convention) == ((2, 10, 18), "boundary")
    assert (found["taps.stated"].status, found["taps.places"].status) == ("passed", status)


@pytest.mark.parametrize(
    ("family", "packaging", "keys"),
    [
        ("dflash", "plain", ("dflash_config.target_layer_ids", "dflash_config.mask_token_id")),
        ("dspark", "plain", ("target_layer_ids", "mask_token_id")),
        ("dflash", "speculators", ("aux_hidden_state_layer_ids", "mask_token_id")),
    ],
)
def test_what_is_absent_is_asked_for_where_readers_look(
    tmp_path: Path, family: str, packaging: str, keys: tuple[str, str]
) -> None:
    config = testing.tiny_config(family, target_layer_ids=..., mask_token_id=...)
    if family == "dflash":
        config["dflash_config"] = {"block_size": 8}
    if packaging == "speculators":
        config = {"speculators_model_type": family, "transformer_layer_config": config}
    path = testing.write_checkpoint(tmp_path, config, {})
    report = check_draft(path, checks=["taps.stated", "dflash.mask-token"])
    places = [report[id].findings[0].where for id in ("taps.stated", "dflash.mask-token")]
    assert places == [f"config.json: {key}" for key in keys]
