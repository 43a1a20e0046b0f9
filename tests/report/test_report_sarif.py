"""The SARIF report.

What these catch: a log that lacks a property which the standard requires, or holds a word that it does not know; a result without its
rule; a line that is not the key's; a place that cannot be a URI; a link made of a tensor's name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest
from report_samples import ALL, HOSTILE, draft, hostile, report, written

from pytest_specdecode.report import Report
from pytest_specdecode.report.sarif import to_dict

TEXT = {"type": "string", "minLength": 1}
MESSAGE = {"type": "object", "required": ["text"], "properties": {"text": TEXT}, "additionalProperties": False}
LOCATION = {
    "type": "object",
    "additionalProperties": False,
    "required": ["physicalLocation"],
    "properties": {
        "physicalLocation": {
            "type": "object",
            "additionalProperties": False,
            "required": ["artifactLocation", "region"],
            "properties": {
                "artifactLocation": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["uri"],
                    "properties": {
                        "uri": {"type": "string", "pattern": r"^(file:///)?[A-Za-z0-9._~%!$&'()*+,;=@/-]+$"},
                        "uriBaseId": {"const": "%SRCROOT%"},
                    },
                },
                "region": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["startLine"],
                    "properties": {"startLine": {"type": "integer", "minimum": 1}},
                },
            },
        },
        "logicalLocations": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"fullyQualifiedName": TEXT, "kind": {"const": "member"}},
            },
        },
    },
}
LEVELS = ["error", "warning", "note"]
#: What OASIS' standard says of the properties that are used here (sections 3.13 log, 3.14 run, 3.18 tool, 3.19 component, 3.49 rule,
#: 3.27 result, 3.35 suppression, 3.20 invocation, 3.58 notification): which are required, and what they may be. None is spelt otherwise.
STANDARD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version", "runs"],
    "properties": {
        "$schema": {"type": "string", "pattern": "^https://.*sarif-schema-2.1.0.json$"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["tool"],
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["name"],
                                "properties": {
                                    "name": TEXT,
                                    "version": TEXT,
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "additionalProperties": False,
                                            "required": ["id"],
                                            "properties": {
                                                "id": TEXT,
                                                "shortDescription": MESSAGE,
                                                "fullDescription": MESSAGE,
                                                "help": MESSAGE,
                                            },
                                        },
                                    },
                                },
                            }
                        },
                    },
                    "invocations": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["executionSuccessful"],
                            "properties": {
                                "executionSuccessful": {"type": "boolean"},
                                "toolExecutionNotifications": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["message"],
                                        "properties": {
                                            "message": MESSAGE,
                                            "level": {"enum": LEVELS},
                                            "locations": {"type": "array", "items": LOCATION},
                                            "associatedRule": {
                                                "type": "object",
                                                "additionalProperties": False,
                                                "properties": {"id": TEXT, "index": {"type": "integer", "minimum": 0}},
                                            },
                                        },
                                    },
                                },
                            },
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["message", "ruleId", "level", "locations"],
                            "properties": {
                                "ruleId": TEXT,
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "level": {"enum": LEVELS},
                                "message": MESSAGE,
                                "locations": {"type": "array", "minItems": 1, "maxItems": 1, "items": LOCATION},
                                "partialFingerprints": {"type": "object", "additionalProperties": TEXT},
                                "properties": {"type": "object"},
                                "suppressions": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["kind"],
                                        "properties": {
                                            "kind": {"enum": ["inSource", "external"]},
                                            "justification": TEXT,
                                        },
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
VALIDATOR = jsonschema.Draft202012Validator(STANDARD)
CONFIG = '{\n  "architectures": [],\n  "rope_parameters": {\n    "rope_theta": 1.0\n  }\n}\n'


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the root of the repository, with a draft in it."""
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafts" / "x").mkdir(parents=True)
    (tmp_path / "drafts" / "x" / "config.json").write_text(CONFIG)
    return tmp_path


def run(found: Report) -> dict[str, Any]:
    whole = to_dict(found)
    VALIDATOR.validate(whole)
    (only,) = whole["runs"]
    return only


def test_results_stand_at_their_keys(placed: Path) -> None:
    found = run(report())
    results = found["results"]
    assert [(item["ruleId"], item["level"]) for item in results] == [
        ("rope.theta-agrees", "error"),
        ("weights.missing", "error"),
        ("weights.missing", "error"),
        ("weights.missing", "error"),
        ("files.pickle", "warning"),
        ("taps.range", "note"),
    ]
    places = [item["locations"][0]["physicalLocation"] for item in results]
    assert {place["artifactLocation"]["uri"] for place in places} == {"drafts/x/config.json"}
    assert [place["region"]["startLine"] for place in places] == [4, 1, 1, 1, 1, 4]
    assert results[1]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "fc.weight"
    assert results[0]["message"]["text"] == (
        "x: rope_theta is stated with different values\nsglang: serves wrong: takes 10000\nFix: leave the trained one"
    )
    assert results[5]["suppressions"] == [{"kind": "external", "justification": "it is being retrained"}]


def test_each_result_has_its_rule(placed: Path) -> None:
    found = run(Report(drafts=(draft(*ALL), draft(*ALL, name="y")), about=report().about))
    rules = found["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [item.id for item in ALL]
    assert all(rules[item["ruleIndex"]]["id"] == item["ruleId"] for item in found["results"])
    assert rules[1]["shortDescription"] == {"text": "all places agree"}
    notes = found["invocations"][0]["toolExecutionNotifications"]
    assert [note["associatedRule"]["id"] for note in notes] == ["target.widths", "target.widths"]
    assert rules[notes[0]["associatedRule"]["index"]]["id"] == "target.widths"


def test_the_same_finding_has_the_same_fingerprint(placed: Path) -> None:
    first, again = run(report())["results"], run(report())["results"]
    prints = [item["partialFingerprints"]["draftFinding/v1"] for item in first]
    assert prints == [item["partialFingerprints"]["draftFinding/v1"] for item in again]
    assert len(set(prints)) == len(prints)
    other = run(Report(drafts=(draft(*ALL, name="y"),)))["results"]
    assert other[0]["partialFingerprints"] != first[0]["partialFingerprints"]


def test_a_draft_outside_the_root_has_its_full_path(placed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (placed / "elsewhere").mkdir()
    monkeypatch.setenv("GITHUB_WORKSPACE", str(placed / "elsewhere"))
    config = str(placed / "drafts" / "x" / "config.json")
    place = run(Report(drafts=(draft(*ALL, config_file=config),)))["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": f"file://{os.path.realpath(config)}"}
    assert place["region"]["startLine"] == 4


def test_hostile_texts(placed: Path) -> None:
    found = run(hostile())
    assert json.loads(written(hostile(), ".sarif", placed)) == json.loads(json.dumps(to_dict(hostile())))
    uri = found["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri).startswith("<script>")
    text = found["results"][0]["message"]["text"]
    assert "](" not in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert HOSTILE not in text
    assert len(written(hostile("x" * (1 << 20)), ".sarif", placed)) < 50_000
