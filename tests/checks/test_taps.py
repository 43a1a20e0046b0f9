"""The tap checks beyond one row each: what the file says of the target's depth and of its own count, in each packaging.

What goes wrong without this file: the last id of a boundary list that is called out of range, or an output list that is not; a list that
one engine reads a layer too late and nobody says so, a list that is served right and is called wrong, a doubt that is called a fault.
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


@pytest.mark.parametrize(
    ("ids", "wrong", "said"),
    [
        ([], "an empty list", "target_layer_ids must be non-empty"),
        ([1, "9", 17], "a list with '9', which is no whole number", "target_layer_ids must be a list of ints"),
        ([1, 9.5, 17], "a list with 9.5, which is no whole number", "target_layer_ids must be a list of ints"),
        ("1,9", "not a list", "target_layer_ids must be a list of ints"),
    ],
)
@pytest.mark.parametrize("beside", [..., [1, 9, 17]])
def test_a_list_that_names_no_layer(ids: object, wrong: str, said: str, beside: object, tmp_path: Path) -> None:
    nested = {"mask_token_id": 511, "target_layer_ids": ids, "block_size": 8}
    config = testing.tiny_config("dflash", dflash_config=nested, target_layer_ids=beside)
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = check_draft(tmp_path, checks=["taps", "config.types"])
    (finding,) = report["taps.stated"].findings
    assert (finding.message, finding.got) == (f"dflash_config.target_layer_ids is {wrong}", ids)
    assert finding.severity == "error"
    assert (finding.outcomes["sglang"].outcome, finding.outcomes["sglang"].message) == ("stops", said)
    assert finding.outcomes["vllm"].message == f"takes {ids!r} from dflash_config.target_layer_ids"
    for typed in report["config.types"].findings:
        assert typed.message == f"{ids!r} where a list of whole numbers was due"
        assert typed.got == ids
    assert not any("defect" in result.message for result in report)


@pytest.mark.parametrize(("number", "status"), [(3, "warned"), (4, "failed"), (18, "passed")])
def test_a_depth_that_may_be_the_number_of_taps_settles_nothing(number: int, status: str, tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path / "draft", "dflash", num_target_layers=number)
    found = check_draft(path, checks=["taps.range"])["taps.range"]
    assert found.status == status, found
    if status == "warned":
        (finding,) = found.findings
        assert "and so is the number of taps" in finding.message
        assert finding.outcomes["sglang"].outcome == "falls back"
        assert "layers of the target that runs" in finding.outcomes["sglang"].message
        target = tmp_path / "target"
        target.mkdir()
        (target / "config.json").write_text(json.dumps({"num_hidden_layers": 20}))
        assert check_draft(path, target=target, checks=["taps.range"])["taps.range"].status == "passed"


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


def _target(tmp_path: Path, layers: int, label: str) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "architectures": [label]}))
    return target


@pytest.mark.parametrize(
    ("nested", "top", "depth", "status", "text"),
    [
        # One apart: one engine adds 1 to the nested list, the other takes the list at top level as it is.
        ([4, 9, 13], [5, 10, 14], 16, "passed", ""),
        ([2, 8, 13], [2, 8, 13], 16, "warned", "are states entering layers, for they are the default"),
        ([1, 7, 12], [1, 7, 12], 16, "warned", "are outputs of layers, for they are one less than the default"),
        ([2, 8, 16], [2, 8, 16], 16, "passed", ""),
        ([1, 5, 9], [1, 5, 9], 16, "warned", "look like outputs of layers, for lists of outputs begin with 1"),
        ([2, 5, 9], [2, 5, 9], 16, "warned", "look like states entering layers, for lists of states begin with 2"),
        ([4, 9, 13], [4, 9, 13], 16, "warned", "does not settle"),
        ([2, 8, 13], [2, 8, 14], 16, "inconclusive", "see taps.places"),
    ],
)
def test_what_an_eagle3_list_means(
    nested: list[int], top: list[int], depth: int, status: str, text: str, tmp_path: Path
) -> None:
    eagle_config = {KEY: nested, "use_aux_hidden_state": True}
    config = testing.tiny_config("eagle3", **{KEY: top, "eagle_config": eagle_config, "num_target_layers": depth})
    found = check_draft(testing.write_tiny(tmp_path, "eagle3", config=config), checks="taps.convention")[
        "taps.convention"
    ]
    assert (found.status, text in found.message) == (status, True)


def test_the_finding_says_which_states_each_engine_captures(tmp_path: Path) -> None:
    found = _eagle3(tmp_path, [2, 8, 13])["taps.convention"].findings[0]
    assert found.due == [2, 8, 13]
    assert found.got == {"sglang": [3, 9, 14], "vllm": [2, 8, 13]}
    assert found.outcomes["sglang"].outcome == "serves wrong"
    assert found.outcomes["sglang"].message == f"takes [3, 9, 14] from eagle_config.{KEY}"
    assert found.outcomes["vllm"].outcome == "fine"
    assert found.outcomes["tensorrt-llm"].outcome == "unknown"


def test_a_likely_meaning_makes_no_engine_wrong(tmp_path: Path) -> None:
    found = _eagle3(tmp_path, [2, 5, 9])["taps.convention"].findings[0]
    assert found.outcomes["sglang"].outcome == "unknown"
    assert "takes [3, 6, 10]" in found.outcomes["sglang"].message


@pytest.mark.parametrize(
    ("label", "captured", "status"),
    [
        ("GptOssForCausalLM", [24, 30, 36], "passed"),
        ("DeepseekV3ForCausalLM", [24, 30, 36], "passed"),
        ("LlamaForCausalLM", [25, 31, 37], "warned"),
    ],
)
def test_each_target_has_a_rule_of_its_own(label: str, captured: list[int], status: str, tmp_path: Path) -> None:
    """The head of a target 36 layers deep whose last id is that depth: states entering layers, for no layer 36 has an output."""
    target = _target(tmp_path, 36, label)
    found = _eagle3(tmp_path, [24, 30, 36], target, num_target_layers=...)["taps.convention"]
    assert found.status == status
    if status == "warned":
        assert "the last id is the target's depth, 36" in found.message
        assert found.findings[0].got["sglang"] == captured
        assert found.findings[0].outcomes["sglang"].outcome == "stops"
        assert "past the last of 36 layers" in found.findings[0].outcomes["sglang"].message


def test_a_first_id_of_one_is_moved_in_deepseeks_code_only(tmp_path: Path) -> None:
    for label in ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"):
        path = tmp_path / label
        path.mkdir()
        config = testing.tiny_config("eagle3-mla", **{KEY: [2, 30, 58], "eagle_config": {KEY: [1, 29, 57]}})
        draft = testing.write_tiny(path / "draft", "eagle3-mla", config=config)
        report = check_draft(draft, target=_target(path, 61, label), checks="taps")
        assert report["taps.convention"].status == "passed", label
        assert report["taps.places"].status == "passed"


def _corpus(tmp_path: Path, name: str, target: Path | None = None) -> dict[str, CheckResult]:
    config = json.loads((Path(__file__).parents[1] / "corpus" / "configs" / name).read_text(encoding="utf-8"))
    path = testing.write_checkpoint(tmp_path / "draft", config, {})
    return {result.id: result for result in check_draft(path, target=target, checks="taps")}


def test_the_public_head_that_ran_past_the_end(tmp_path: Path) -> None:
    """The file states no depth; what hangs on it is said, and the target settles it."""
    name = "bad--eagle3-gpt-oss-120b-Eagle3-v3-partial.json"
    found = _corpus(tmp_path / "alone", name)["taps.convention"]
    assert found.status == "warned"
    assert "were the target 36 layers deep" in found.message
    assert "1 added to it runs past the end" in found.message
    assert found.findings[0].outcomes["sglang"].message == (
        f"takes [25, 31, 37] from eagle_config.{KEY}: right if outputs of layers are meant"
    )
    (tmp_path / "with").mkdir()
    target = _target(tmp_path / "with", 36, "GptOssForCausalLM")
    assert _corpus(tmp_path / "with", name, target)["taps.convention"].status == "passed"


def test_each_engines_guess_is_shown(tmp_path: Path) -> None:
    """The published head was trained on [5, 19, 33, 47, 61]; the issue quotes the guess as [1, 16, 31, 46, 61]."""
    found = _corpus(tmp_path, "bad--dflash-no-target-layer-ids.json")["taps.stated"].findings[0]
    assert found.outcomes["sglang"].outcome == "serves wrong"
    assert found.outcomes["sglang"].message.startswith("takes [1, 16, 31, 46, 61]: guesses evenly spaced taps")
    assert found.outcomes["vllm"].message.startswith("takes [1, 31, 60]: ")


def test_the_guess_follows_the_target_where_it_is_given(tmp_path: Path) -> None:
    target = _target(tmp_path, 36, "Qwen3ForCausalLM")
    config = testing.tiny_config("eagle3", **{KEY: ..., "eagle_config": ..., "num_target_layers": ...})
    path = testing.write_tiny(tmp_path / "draft", "eagle3", config=config)
    alone = check_draft(path, checks="taps.stated")["taps.stated"].findings[0]
    assert "takes [" not in alone.outcomes["sglang"].message
    found = check_draft(path, target=target, checks="taps.stated")["taps.stated"].findings[0]
    assert found.outcomes["sglang"].message.startswith("takes [2, 18, 33]: ")


@pytest.mark.parametrize(
    ("ids", "depth", "copied"),
    [
        ([1, 9, 17, 25, 33], None, True),
        ([1, 9, 17, 25, 33], 36, True),
        ([1, 9, 17, 25, 33], 40, False),
        ([2, 10, 18, 26, 34], 36, False),
        ([1, 9, 18, 25, 33], 36, False),
    ],
)
def test_a_default_list_of_the_other_packaging(ids: list[int], depth: int | None, copied: bool, tmp_path: Path) -> None:
    """z-lab's default for five draft layers over 36 is [1, 9, 17, 25, 33], of outputs; speculators counts states."""
    _, found = _packaged(tmp_path, aux_hidden_state_layer_ids=ids, num_target_layers=depth)
    result = found["taps.convention"]
    assert result.status == ("warned" if copied else "passed")
    if copied:
        assert result.findings[0].due == [id + 1 for id in ids]
        assert {outcome.outcome for outcome in result.findings[0].outcomes.values()} == {"unknown"}


def test_a_place_that_an_engine_does_not_look_at(tmp_path: Path) -> None:
    """TensorRT-LLM reads a DFlash list in dflash_config only."""
    path = testing.write_tiny(
        tmp_path, "dflash", dflash_config={"mask_token_id": 511, "block_size": 8}, target_layer_ids=[1, 9, 17]
    )
    (finding,) = check_draft(path, checks="taps.places")["taps.places"].findings
    assert finding.where == "config.json: target_layer_ids"
    assert finding.due == ["dflash_config.target_layer_ids", "target_layer_ids"]
    assert {name: outcome.outcome for name, outcome in finding.outcomes.items()} == {
        "sglang": "fine",
        "vllm": "fine",
        "tensorrt-llm": "unknown",
    }


def test_a_number_of_taps_that_one_engine_does_not_count(tmp_path: Path) -> None:
    """Four taps at top level: the head's own class takes three where no key that it counts by is there."""
    config = testing.tiny_config("eagle3", **{KEY: [2, 6, 10, 14], "eagle_config": ...})
    path = testing.write_checkpoint(tmp_path, config, {})
    (finding,) = check_draft(path, checks="taps.fc-width")["taps.fc-width"].findings
    assert (finding.severity, finding.due, finding.got) == ("warning", 4, {"sglang": 3, "vllm": 3})
    assert finding.outcomes["vllm"].outcome == "stops"
    assert "takes 3, its own" in finding.outcomes["vllm"].message


@pytest.mark.parametrize("ids", ["1,2", [1.5], [True], [-1, 2], [], {}, [2**70, 1], [[1]], None, [1]])
@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla", "dflash", "peagle"])
def test_odd_lists_raise_nothing(family: str, ids: Any, tmp_path: Path) -> None:
    nested = {"dflash_config": {"mask_token_id": 511, "block_size": 8, "target_layer_ids": ids}}
    config = testing.tiny_config(family, **(nested if family == "dflash" else {KEY: ids, "eagle_config": {KEY: ids}}))
    target = _target(tmp_path, 16, "GptOssForCausalLM")
    report = check_draft(testing.write_checkpoint(tmp_path / "draft", config, {}), target=target, checks="taps")
    assert len(list(report)) == 6
