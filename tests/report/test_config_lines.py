"""The lines of the keys in `config.json`.

What these catch: a line that is one off; keys of nested objects and lists that are taken for others; braces, quotes and escapes inside
strings that are counted as structure; a file that is no JSON, or is nested a hundred thousand deep, and brings the scan down.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_specdecode.report.config_lines import key_lines, line_of, lines_of

TEXT = """{
  "architectures": ["LlamaForCausalLMEagle3"],
  "rope_parameters": {
    "rope_theta": 10000.0,
    "nested": {"deep": [1,
      {"in": 2}]}
  },
  "odd \\"} , { name": "a { \\" : , } b",
  "unicode \\u00e9": 1, "same_line": 2,

  "rope_theta":
    1000000,
  "layers": [
    1,
    2
  ],
  "again": 1,
  "again": 2
}
"""


def test_lines_by_hand() -> None:
    assert key_lines(TEXT) == {
        "architectures": 2,
        "architectures.0": 2,
        "rope_parameters": 3,
        "rope_parameters.rope_theta": 4,
        "rope_parameters.nested": 5,
        "rope_parameters.nested.deep": 5,
        "rope_parameters.nested.deep.0": 5,
        "rope_parameters.nested.deep.1": 6,
        "rope_parameters.nested.deep.1.in": 6,
        'odd "} , { name': 8,
        "unicode \u00e9": 9,
        "same_line": 9,
        "rope_theta": 11,
        "layers": 13,
        "layers.0": 14,
        "layers.1": 15,
        "again": 18,
    }


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_a_mark_of_the_byte_order(end: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", end).encode())
    assert lines_of(file) == key_lines(TEXT)


def paths(value: Any, prefix: str = "") -> set[str]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = set()
    for key, item in entries:
        path = f"{prefix}.{key}" if prefix else str(key)
        found |= {path} | paths(item, path)
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(value=st.dictionaries(st.text(min_size=1), JSON, max_size=4), indent=st.sampled_from([None, 2]))
def test_every_key_has_a_line_that_holds_it(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    found = key_lines(text)
    assert set(found) == paths(value)
    lines = text.split("\n")
    for key in value:
        assert json.dumps(key) in lines[found[key] - 1]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(text=st.text(st.sampled_from('{}[]",:\\ \nab1')))
def test_what_is_no_json_brings_nothing_down(text: str) -> None:
    last = text.count("\n") + 1
    assert all(1 <= line <= last for line in key_lines(text).values())


def test_depth_and_length_bring_nothing_down(tmp_path: Path) -> None:
    assert key_lines("[" * 20_000)["0"] == 1
    assert key_lines('{"a' + "x" * 1_000_000) == {}
    assert key_lines('{"' + "\\" * 100_001) == {}
    # Looked at anew from each of its quotes, this takes many seconds.
    started = time.process_time()
    assert len(key_lines('{"a": 1, "' + '\\"' * 30_000)) <= 2
    assert time.process_time() - started < 2
    assert lines_of(tmp_path / "absent.json") == {}
    assert lines_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("config.json: rope_theta", 11),
        ("config.json: rope_parameters.rope_theta, rope_theta", 4),
        ("config.json: absent, rope_theta", 11),
        ("config.json: layers[1]", 15),
        ("config.json: rope_parameters.absent", 3),
        ("config.json: absent", 1),
        ("config.json", 1),
        ("the target's config.json: rope_theta", None),
        ("layers.0.self_attn", None),
        ("", None),
    ],
)
def test_the_place_of_a_finding(where: str, line: int | None) -> None:
    assert line_of(where, key_lines(TEXT)) == line
