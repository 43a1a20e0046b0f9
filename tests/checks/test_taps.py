"""The tap checks beyond one row each: what the file says of the target's depth and of its own count, in each packaging.

What goes wrong without this file: the last id of a boundary list that is called out of range, or an output list that is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.findings import CheckResult

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
