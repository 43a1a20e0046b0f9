"""The page of the strategies shows what is drawn.

What goes wrong without this file: an example that no strategy draws any more, or that cannot be copied into a test; a new strategy that the
page leaves out.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from pytest_specdecode import spec, strategies
from pytest_specdecode.families import mlp_speculator

ROOT = Path(__file__).resolve().parents[2]
NAMES = {**vars(spec), **vars(mlp_speculator), **vars(strategies)}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("strategies_page", ROOT / "tools" / "strategies_page.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_page_is_current(tool: ModuleType) -> None:
    """Every example is drawn again, with the version of Hypothesis that drew it."""
    assert tool.is_current(tool.PAGE.read_text(encoding="utf-8")), "run python tools/strategies_page.py"


def test_another_version_of_hypothesis_leaves_the_words(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(tool, "page", lambda: text)
    other = text.replace(f"Hypothesis {hypothesis.__version__}.", "Hypothesis 6.100.0.").replace("seed=0", "seed=1")
    assert other != text
    assert tool.is_current(other)
    assert not tool.is_current(other.replace("Guarantee", "Promise"))


def test_every_example_is_the_python_that_makes_it_again(tool: ModuleType) -> None:
    """And every strategy has one."""
    text = tool.PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        line = " ".join(block.split())
        assert repr(eval(line, NAMES)) == line
    assert len(blocks) > len(tool.CALLS)
    assert {name for name, _ in tool.CALLS} == {name for name in strategies.__all__ if name[0].islower()}
