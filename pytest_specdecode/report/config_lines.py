"""Which line of `config.json` states a key: a scan that keeps the place of every key, which `json` does not.

It never fails: of a file that is no JSON it gives the keys up to the fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

#: A token; a string that does not end goes on to the end, so that no file is looked at twice.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],:]|\n|[^\s{}\[\],:"]+', re.DOTALL)
_MOST_BYTES = 16 << 20
#: `config.json: a.b, c`, as findings write their place.
_PLACE = re.compile(r"^config\.json(?:: (?P<keys>.*))?$", re.DOTALL)


def key_lines(text: str) -> dict[str, int]:
    """The line, from 1, of each key by its dotted path; entries of lists are counted from 0 (`layers.0.theta`).

    Of a key that stands twice in one object the last one counts, as it does for readers.
    """
    found: dict[str, int] = {}
    # Per open object or list: its path, whether it is an object, and the key or number of the entry that comes.
    stack: list[tuple[str, bool, str]] = []
    line = 1
    awaits_key = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        start = line
        line += token.count("\n")
        if token == "\n":
            continue
        if token in "{[":
            path = _joined(stack)
            if path:
                found.setdefault(path, start)
            stack.append((path, token == "{", "" if token == "{" else "0"))
            awaits_key = token == "{"
        elif token in "}]":
            if not stack:
                break
            stack.pop()
            awaits_key = False
        elif token == ",":
            if not stack:
                break
            path, is_object, entry = stack[-1]
            awaits_key = is_object
            if not is_object:
                stack[-1] = (path, False, str(int(entry) + 1))
        elif token != ":" and awaits_key and token.startswith('"'):
            if len(token) == 1 or token[-1] != '"':
                break
            path, is_object, _ = stack[-1]
            stack[-1] = (path, is_object, _decoded(token))
            found[_joined(stack)] = start
            awaits_key = False
        elif stack and not stack[-1][1]:
            found[_joined(stack)] = start
    return found


def lines_of(file: str | Path) -> dict[str, int]:
    """`key_lines` of a file; empty where it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return key_lines(stream.read(_MOST_BYTES).decode("utf-8", errors="replace"))
    except OSError:
        return {}


def line_of(where: str, lines: Mapping[str, int]) -> int | None:
    """The line of the first key that a finding's place `where` names; None where it is not in `config.json`.

    A key that is not stated has the line of the object that would hold it, else 1.
    """
    match = _PLACE.match(where)
    if match is None:
        return None
    keys = [re.sub(r"\[(\w+)\]", r".\1", key) for key in (match["keys"] or "").split(", ")]
    for key in keys:
        if key in lines:
            return lines[key]
    for key in keys:
        parts = key.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if (parent := ".".join(parts[:end])) in lines:
                return lines[parent]
    return 1


def _joined(stack: list[tuple[str, bool, str]]) -> str:
    if not stack:
        return ""
    path, _, entry = stack[-1]
    return f"{path}.{entry}" if path else entry


def _decoded(token: str) -> str:
    try:
        text = json.loads(token, strict=False)
    except ValueError:
        return token[1:-1]
    return text if isinstance(text, str) else token[1:-1]
