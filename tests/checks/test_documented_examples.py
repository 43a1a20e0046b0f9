"""What the page of checks says of a check is true of it.

What goes wrong without this file: an example that no longer fails, a check that nobody is told how to mend.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks import REGISTRY

CONFIGURATIONS = {id: item.example for id, item in REGISTRY.items() if not isinstance(item.example, str)}


@pytest.mark.parametrize("id", REGISTRY)
def test_every_check_says_what_it_is_for_and_how_to_mend_it(id: str) -> None:
    item = REGISTRY[id]
    assert item.example
    assert item.fix
    for text in (item.title, item.why, item.fix, item.cost):
        assert "\n" not in text


@pytest.mark.parametrize("id", CONFIGURATIONS)
def test_the_example_is_reported(id: str, tmp_path: Path) -> None:
    """The changes are put into a tiny draft's configuration, as the page shows them."""
    changes = dict(CONFIGURATIONS[id])
    family = changes.pop("family", "eagle3")
    testing.write_tiny(tmp_path, family)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        if value is ...:
            del config[key]
        else:
            config[key] = value
    file.write_text(json.dumps(config))
    result = check_draft(tmp_path, checks=[id])[id]
    assert result.status in ("failed", "warned"), f"{result.status}: {result.message}"
