"""The report as JSON, and the schema that it keeps."""

from __future__ import annotations

import importlib.resources
import json
from typing import TYPE_CHECKING, Any

from pytest_specdecode.report.text import shortened

if TYPE_CHECKING:
    from pytest_specdecode.report.model import Report

#: Letters of one text. A name of a megabyte is a fault to be reported, not to be carried along.
TEXT_LIMIT = 4096


def text(report: Report) -> str:
    """The report as JSON, ending on a line end."""
    return json.dumps(shortened(report.to_dict(), TEXT_LIMIT), indent=2, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the file."""
    file = importlib.resources.files("pytest_specdecode.report") / "schema.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
