"""The report as SARIF 2.1.0, which code scanning services read: a rule per check, a result per finding, each at a line of `config.json`.

Terms and required properties are those of OASIS' standard, sections 3.13 to 3.58.
"""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from typing import TYPE_CHECKING, Any

from pytest_specdecode.report.groups import Item, items
from pytest_specdecode.report.model import CheckText, tool_versions
from pytest_specdecode.report.places import Places
from pytest_specdecode.report.text import message, shown

if TYPE_CHECKING:
    from pytest_specdecode.report.model import DraftReport, Report

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def text(report: Report) -> str:
    """The report as SARIF."""
    return json.dumps(to_dict(report), indent=2, ensure_ascii=False) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """The SARIF log: one run over all drafts. What could not be judged is a notification, not a result."""
    ids = list(dict.fromkeys(result.id for result in report))
    places = Places()
    driver = {
        "name": "pytest-specdecode",
        "version": tool_versions()["pytest-specdecode"] or "0",
        "rules": [_rule(id, report.about.get(id)) for id in ids],
    }
    index = {id: number for number, id in enumerate(ids)}
    notes = [
        _notification(draft, result.id, index[result.id], result.message, places)
        for draft in report.drafts
        for result in draft.results
        if result.status == "inconclusive"
    ]
    return {
        "$schema": SCHEMA_URI,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
                "results": [_result(item, index[item.result.id], places) for item in items(report.drafts)],
            }
        ],
    }


def _rule(id: str, about: CheckText | None) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": id}
    if about is None:
        return rule
    rule["shortDescription"] = {"text": about.title}
    if about.why:
        rule["fullDescription"] = {"text": about.why}
    if about.fix:
        rule["help"] = {"text": about.fix}
    return rule


def _result(item: Item, index: int, places: Places) -> dict[str, Any]:
    one, draft = item.finding, item.draft
    result: dict[str, Any] = {
        "ruleId": item.result.id,
        "ruleIndex": index,
        "level": "note" if item.result.is_expected else one.severity,
        "message": {"text": _text(item)},
        "locations": [_location(draft, one.where, places)],
        "partialFingerprints": {"draftFinding/v1": _fingerprint(item)},
        "properties": {
            "draft": shown(draft.name),
            "group": item.group,
            "got": shown(one.got),
            "due": shown(one.due),
            "outcomes": {name: outcome.outcome for name, outcome in one.outcomes.items()},
        },
    }
    if item.result.is_expected:
        result["suppressions"] = [{"kind": "external", "justification": message(item.result.expected)}]
    return result


def _text(item: Item) -> str:
    """The finding in full sentences, as one reads it beside the line."""
    one = item.finding
    lines = [f"{shown(item.draft.name, 80)}: {message(one.message)}"]
    lines += [
        f"{name}: {outcome.outcome}{': ' + message(outcome.message) if outcome.message else ''}"
        for name, outcome in one.outcomes.items()
        if outcome.outcome != "unknown"
    ]
    if one.fix:
        lines.append(f"Fix: {message(one.fix)}")
    # `[text](target)` is a link in a message of SARIF; a name from a checkpoint shall be none.
    return "\n".join(lines).replace("](", "] (")


def _location(draft: DraftReport, where: str, places: Places) -> dict[str, Any]:
    file = places.file(draft)
    uri = urllib.parse.quote(file.encode("utf-8", errors="surrogateescape"))
    # A full path is a file URI; one under the root is relative to it.
    artifact = {"uri": f"file://{uri}"} if file.startswith("/") else {"uri": uri, "uriBaseId": "%SRCROOT%"}
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": artifact, "region": {"startLine": places.line(draft, where)}}
    }
    if where:
        location["logicalLocations"] = [{"fullyQualifiedName": shown(where), "kind": "member"}]
    return location


def _fingerprint(item: Item) -> str:
    """The same for the same finding in another run, whatever line it has moved to and whatever numbers it holds."""
    parts = (item.draft.name, item.result.id, item.finding.where, item.finding.fault)
    return hashlib.sha256("\0".join(parts).encode("utf-8", errors="surrogatepass")).hexdigest()[:32]


def _notification(draft: DraftReport, id: str, index: int, reason: str, places: Places) -> dict[str, Any]:
    return {
        "level": "note",
        "message": {"text": f"{shown(draft.name, 80)}: {id} is inconclusive: {message(reason)}"},
        "associatedRule": {"id": id, "index": index},
        "locations": [_location(draft, "", places)],
    }
