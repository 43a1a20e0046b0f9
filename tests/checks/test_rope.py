"""The rotary checks beyond one row each: every type's fields, every length, every style, every key that came from a target.

What goes wrong without this file: a scaling that lacks a field and is served with another's default, a whole one that is called broken, a
draft that is shorter than what is served and nobody counts, a published configuration that is called wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.findings import CheckResult

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def _check(
    tmp_path: Path,
    id: str,
    family: str = "eagle3",
    *,
    target: Path | None = None,
    serve: str | None = None,
    **changes: Any,
) -> CheckResult:
    config = testing.tiny_config(family, **changes)
    path = testing.write_checkpoint(tmp_path / "draft", config, {})
    return check_draft(path, target=target, serve=serve, checks=id)[id]


def _target(tmp_path: Path, **config: Any) -> Path:
    target = tmp_path / "target"
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    return target


# The tiny heads have 32 lanes, which are 16 pairs.
@pytest.mark.parametrize(
    ("scaling", "status", "text"),
    [
        (LLAMA3, "passed", ""),
        ({**LLAMA3, "low_freq_factor": 4.0}, "failed", "low_freq_factor 4.0 is not below high_freq_factor 4.0"),
        ({**LLAMA3, "factor": True}, "failed", "factor is True"),
        ({**LLAMA3, "factor": -8}, "failed", "factor is -8"),
        (YARN, "passed", ""),
        ({"type": "yarn", "factor": 4.0}, "failed", "yarn scaling without original_max_position_embeddings"),
        ({**YARN, "factor": 0.25}, "warned", "makes the context shorter"),
        ({**YARN, "factor": "4"}, "failed", "factor is '4'"),
        ({**YARN, "type": "yarn"}, "passed", ""),
        ({**YARN, "type": "linear"}, "failed", "type says 'linear', rope_type says 'yarn'"),
        ({"type": "linear"}, "failed", "linear scaling without factor"),
        ({"type": "dynamic", "alpha": 1000.0}, "passed", ""),
        ({"type": "dynamic"}, "failed", "dynamic scaling without factor or alpha"),
        ({"type": "twisted", "factor": 2.0}, "failed", "'twisted' is no type of scaling"),
        ({"factor": 2.0}, "warned", "factor stands there without a type"),
        (
            {"type": "su", "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
            | {"original_max_position_embeddings": 4096},
            "passed",
            "",
        ),
        (
            {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 16}
            | {"original_max_position_embeddings": 4096},
            "failed",
            "short_factor is not a list of one positive number for each pair",
        ),
        ({"type": "longrope"}, "failed", "without short_factor and long_factor and original_max_position_embeddings"),
        ({"type": "mrope", "mrope_section": [4, 6, 6]}, "passed", ""),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "failed", "does not add up to the pairs of lanes"),
        ({"type": "mrope"}, "failed", "mrope scaling without mrope_section"),
        ({"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]}, "passed", ""),
        ({"type": "default", "mrope_section": [4, 6, 7]}, "warned", "does not add up"),
    ],
)
def test_each_type_has_its_fields(scaling: dict[str, Any], status: str, text: str, tmp_path: Path) -> None:
    found = _check(tmp_path, "rope.scaling-complete", rope_scaling=scaling)
    assert (found.status, text in found.message) == (status, True), found.message


def test_the_original_length_may_stand_beside_the_scaling(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    found = _check(tmp_path, "rope.scaling-complete", rope_scaling=scaling, original_max_position_embeddings=1024)
    assert found.status == "passed"


def test_each_type_of_layer_is_looked_at(tmp_path: Path) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    found = _check(tmp_path, "rope.scaling-complete", "dflash", rope_theta=..., rope_parameters=parameters)
    assert found.findings[0].where == "config.json: rope_parameters.full_attention"


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "yarn",
        [],
        {},
        {"rope_type": []},
        {"rope_type": 3},
        {"type": None},
        {"rope_type": "yarn", "factor": {}},
        {**YARN, "factor": 10**60},
        {**YARN, "factor": 1e308, "original_max_position_embeddings": 1e308},
        {**YARN, "original_max_position_embeddings": -1},
        {"type": "linear", "factor": 0},
        {"type": "mrope", "mrope_section": "16,24,24"},
        {"type": "mrope", "mrope_section": [None]},
        {"type": "longrope", "short_factor": 1, "long_factor": [None]},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters", "partial_rotary_factor", "is_neox_style"])
def test_odd_values_raise_nothing(key: str, value: Any, tmp_path: Path) -> None:
    config = testing.tiny_config("dspark", **{key: value})
    path = testing.write_checkpoint(tmp_path / "draft", config, {})
    target = _target(tmp_path, max_position_embeddings=8192, rope_scaling=value if key == "rope_scaling" else None)
    report = check_draft(path, target=target, serve="context-length=8192", checks="rope")
    assert len(list(report)) == 7


@pytest.mark.parametrize(
    ("serve", "positions", "status"),
    [
        ("context-length=4096", None, "passed"),
        ("context-length=4097", None, "failed"),
        (None, 4096, "passed"),
        (None, 131072, "failed"),
        # What is served counts before what the target could.
        ("context-length=2048", 131072, "passed"),
        (None, None, "inconclusive"),
        ("tp=2", None, "inconclusive"),
    ],
)
def test_the_draft_is_as_long_as_what_is_served(
    serve: str | None, positions: int | None, status: str, tmp_path: Path
) -> None:
    target = None if positions is None else _target(tmp_path, max_position_embeddings=positions)
    assert _check(tmp_path, "rope.max-position", target=target, serve=serve).status == status


def test_each_engine_has_its_own_way_with_a_short_draft(tmp_path: Path) -> None:
    (plain,) = _check(tmp_path / "a", "rope.max-position", serve="context-length=8192").findings
    assert (plain.got, plain.due) == (4096, "at least 8192")
    assert plain.outcomes["sglang"].outcome == "stops"
    assert "is greater than the derived context_length (4096)" in plain.outcomes["sglang"].message
    assert plain.outcomes["vllm"].outcome == "fine"
    scaled = _check(tmp_path / "b", "rope.max-position", serve="context-length=8192", rope_scaling=YARN)
    assert scaled.findings[0].outcomes["vllm"].outcome == "serves wrong"
    block = _check(tmp_path / "c", "rope.max-position", "dflash", serve="context-length=8192")
    assert block.findings[0].outcomes["tensorrt-llm"].outcome == "falls back"


def test_a_draft_without_a_length_stays_open(tmp_path: Path) -> None:
    found = _check(tmp_path, "rope.max-position", serve="context-length=8192", max_position_embeddings=...)
    assert found.status == "inconclusive"
    assert "states no max_position_embeddings" in found.message


@pytest.mark.parametrize(
    ("scaling", "served", "status"),
    [
        (YARN, 4087, "passed"),
        (YARN, 4088, "warned"),
        (None, 131072, "skipped"),
        (LLAMA3, 131072, "skipped"),
        # Four times 4096 positions; 8 rows of a block beyond what is served.
        ({"rope_type": "linear", "factor": 4.0}, 16375, "passed"),
        ({"rope_type": "linear", "factor": 4.0}, 16376, "warned"),
    ],
)
def test_a_scaled_table_that_is_made_longer(scaling: Any, served: int, status: str, tmp_path: Path) -> None:
    """The helper asks for a row at the served length and a block more; the table has rows 0 to 4095."""
    found = _check(tmp_path, "rope.scaled-growth", "dflash", serve=f"context-length={served}", rope_scaling=scaling)
    assert found.status == status
    if status == "warned":
        assert found.findings[0].outcomes["sglang"].outcome == "serves wrong"
        assert found.findings[0].due == f"at most {served - 1}"


def test_a_draft_without_the_fused_path_grows_no_table(tmp_path: Path) -> None:
    found = _check(
        tmp_path, "rope.scaled-growth", "dflash", serve="context-length=8192", rope_scaling=YARN, attention_bias=True
    )
    assert found.status == "passed"


@pytest.mark.parametrize(
    ("family", "changes", "status", "wrong"),
    [
        ("dflash", {"is_neox_style": False, "rope_is_neox_style": False}, "warned", ["tensorrt-llm"]),
        ("dflash", {"is_neox_style": False}, "warned", ["tensorrt-llm"]),
        ("dflash", {"rope_is_neox_style": False}, "warned", ["vllm", "tensorrt-llm"]),
        ("dflash", {"rope_is_neox_style": True}, "passed", []),
        ("dspark", {"is_neox_style": True, "rope_is_neox_style": False}, "warned", []),
        ("eagle3", {"is_neox_style": False}, "warned", ["sglang", "vllm", "tensorrt-llm"]),
        ("eagle3-mla", {}, "passed", []),
        ("eagle3-mla", {"is_neox_style": True}, "warned", []),
        ("dspark", {"architectures": ["Lfm2DSparkDraftModel"]}, "warned", ["sglang", "vllm"]),
    ],
)
def test_the_style_is_read_where_it_is_stated(
    family: str, changes: dict[str, Any], status: str, wrong: list[str], tmp_path: Path
) -> None:
    found = _check(tmp_path, "rope.style", family, **changes)
    assert found.status == status, found.message
    outcomes = found.findings[0].outcomes if found.findings else {}
    assert [name for name, outcome in outcomes.items() if outcome.outcome == "serves wrong"] == wrong


@pytest.mark.parametrize(
    ("changes", "status", "key"),
    [
        ({"partial_rotary_factor": 0.25}, "warned", "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.0}, "passed", ""),
        ({"attn_output_gate": True}, "warned", "attn_output_gate"),
        ({"attn_output_gate": False}, "passed", ""),
        ({"linear_num_value_heads": 32}, "warned", "linear_num_value_heads"),
        # A native fork has these parts, whatever its layers are labelled.
        ({"partial_rotary_factor": 0.25, "enable_qwen35_gated_q_proj": True}, "skipped", ""),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [4, 6, 6]}},
            "warned",
            "rope_parameters.mrope_section",
        ),
    ],
)
def test_keys_of_the_target_in_stock_layers(changes: dict[str, Any], status: str, key: str, tmp_path: Path) -> None:
    found = _check(tmp_path, "rope.inherited", "dspark", **changes)
    assert found.status == status
    assert not key or found.findings[0].where == f"config.json: {key}"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        # The same keys: copied from the target in the first, the draft's own in the second and third.
        ("dspark--satgeze-Qwen3.6-27B-DSpark-shape", "warned"),
        ("dspark--stanleyphoong-Ornith-1.0-9B-DSpark-shape", "skipped"),
        ("dspark--deepseek-dspark_gemma4_12b_block7", "skipped"),
        ("dspark--specforge-qwen3-8b", "passed"),
    ],
)
def test_public_configurations_with_keys_of_the_target(name: str, status: str, tmp_path: Path) -> None:
    config = json.loads((Path(__file__).parents[1] / "corpus" / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    path = testing.write_checkpoint(tmp_path, config, {})
    found = check_draft(path, checks="rope.inherited")["rope.inherited"]
    assert found.status == status
    if status == "warned":
        speaks = [finding.message for finding in found.findings]
        assert len(speaks) == 3
        assert found.findings[0].outcomes["vllm"].outcome == "serves wrong"


def test_two_bases_show_which_each_engine_takes(tmp_path: Path) -> None:
    found = _check(tmp_path, "rope.theta-agrees", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert found.findings[0].outcomes["vllm"].message.startswith("takes 10000.0 from rope_parameters.rope_theta; ")
