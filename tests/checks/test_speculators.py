"""What the speculators packaging holds around a draft.

What goes wrong without this file: a file that no server starts with passes for want of a key; a proposal of no tokens, or of more than a
block drafts; a legal null or an absent key that one reader needs called an error of the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.findings import CheckResult

WHOLE = testing.tiny_config("xpress")["speculators_config"]
LAYER = testing.tiny_config("xpress")["transformer_layer_config"]
METHOD = {"proposal_type": "greedy", "speculative_tokens": 7}


def _run(tmp_path: Path, config: dict[str, Any], **given: Any) -> CheckResult:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return check_draft(tmp_path, checks=["speculators"], **given)["speculators.structure"]


def _xpress(tmp_path: Path, structure: Any = None, **changes: Any) -> CheckResult:
    """The check on a tiny draft whose speculators_config has changes; `...` drops a key."""
    if isinstance(structure, dict):
        structure = {key: value for key, value in {**WHOLE, **structure}.items() if value is not ...}
    given = {} if structure is None else {"speculators_config": structure}
    return _run(tmp_path, testing.tiny_config("xpress", **given, **changes))


def _eagle3(**layer: Any) -> dict[str, Any]:
    plain = testing.tiny_config("eagle3")
    nested = {key: value for key, value in {**plain, **layer}.items() if key != "architectures" and value is not ...}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {**WHOLE, "algorithm": "eagle3"},
        "draft_vocab_size": plain["draft_vocab_size"],
        "transformer_layer_config": nested,
    }


def test_a_whole_one_passes_and_others_are_not_asked(tmp_path: Path) -> None:
    assert _xpress(tmp_path).status == "passed"
    found = _run(tmp_path, testing.tiny_config("dflash"))
    assert (found.status, found.message) == ("skipped", "the draft is not in the speculators packaging")


@pytest.mark.parametrize(
    ("structure", "status", "texts"),
    [
        ({"algorithm": ...}, "warned", ["algorithm is not stated"]),
        ({"default_proposal_method": ...}, "warned", ["default_proposal_method is not stated"]),
        ({"verifier": ...}, "warned", ["verifier.name_or_path, verifier.architectures are not stated"]),
        ({"verifier": {"name_or_path": None, "architectures": []}}, "warned", ["verifier.name_or_path is not stated"]),
        ({"proposal_methods": ...}, "warned", ["proposal_methods is not stated"]),
        ({"algorithm": 3}, "failed", ["algorithm is not a name"]),
        ({"verifier": "Qwen"}, "failed", ["verifier is not an object"]),
        ({"proposal_methods": []}, "failed", ["proposal_methods is not a list with one method or more"]),
        ({"proposal_methods": {}}, "failed", ["proposal_methods is not a list with one method or more"]),
        ({"proposal_methods": ["greedy"]}, "failed", ["proposal_methods[0] is not an object"]),
        (
            {"proposal_methods": [{**METHOD, "speculative_tokens": 0}]},
            "failed",
            ["speculative_tokens is not 1 or more"],
        ),
        (
            {"proposal_methods": [{**METHOD, "speculative_tokens": "7"}]},
            "failed",
            ["speculative_tokens is not 1 or more"],
        ),
        (
            {"proposal_methods": [{**METHOD, "speculative_tokens": True}]},
            "failed",
            ["speculative_tokens is not 1 or more"],
        ),
        (
            {"proposal_methods": [{**METHOD, "speculative_tokens": 9}]},
            "failed",
            ["9 tokens are to be proposed of a block of 8"],
        ),
        ({"proposal_methods": [{"proposal_type": "greedy"}]}, "passed", []),
        ({"default_proposal_method": "tree"}, "failed", ["default_proposal_method is none of those"]),
        ("xpress", "failed", ["speculators_config is not an object"]),
    ],
)
def test_the_structure(structure: Any, status: str, texts: list[str], tmp_path: Path) -> None:
    found = _xpress(tmp_path, structure)
    assert found.status == status
    assert [text for text, finding in zip(texts, found.findings, strict=True) if text in finding.message] == texts


def test_a_file_without_the_object_is_the_librarys_but_no_servers(tmp_path: Path) -> None:
    config = testing.tiny_config("xpress", speculators_config=...)
    (finding,) = _run(tmp_path, config).findings
    assert (finding.severity, finding.outcomes["vllm"].message) == ("warning", "Invalid speculators config structure")
    assert _run(tmp_path, config, engines=["vllm"]).status == "failed"


@pytest.mark.parametrize(
    ("layer", "status", "text"),
    [
        ({}, "passed", ""),
        ({"model_type": "qwen3"}, "passed", ""),
        ({"model_type": "gpt_oss"}, "warned", "layers of type gpt_oss"),
        ({"model_type": ...}, "warned", "model_type is not stated"),
        ({"model_type": 3}, "failed", "model_type is not a name"),
    ],
)
def test_the_layers_type(layer: dict[str, Any], status: str, text: str, tmp_path: Path) -> None:
    found = _run(tmp_path, _eagle3(**layer))
    assert (found.status, text in found.message) == (status, True)


@pytest.mark.parametrize("layer", [None, {}, []])
def test_no_layer_configuration(layer: Any, tmp_path: Path) -> None:
    found = _run(tmp_path, testing.tiny_config("xpress", transformer_layer_config=layer))
    assert (found.status, found.findings[0].outcomes["vllm"].outcome) == ("failed", "stops")


@pytest.mark.parametrize("value", [None, "x", -1, 0, 1.5, True, [], {}, [None], 1 << 70])
def test_no_value_breaks_the_check(value: Any, tmp_path: Path) -> None:
    for key in (*WHOLE, "speculators_config"):
        _xpress(tmp_path, {key: value} if key != "speculators_config" else value)
    _xpress(tmp_path, {"verifier": {"name_or_path": value, "architectures": value}})
    _xpress(tmp_path, {"proposal_methods": [{"proposal_type": value, "speculative_tokens": value}]})
    _run(tmp_path, _eagle3(model_type=value))
