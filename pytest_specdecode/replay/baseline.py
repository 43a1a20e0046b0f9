"""What accepted lengths were when they were good: a small file that a project commits.

{"schema": 1, "drafts": {"name": {"accepted_length": 2.76, "rounds": 812, "draft_tokens": 4, "trace": "fingerprint"}}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_specdecode.checkpoint import read_json_object
from pytest_specdecode.errors import DraftError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One draft's figure.

    Attributes:
        accepted_length: with the target's own token.
        rounds: that it is the mean of.
        draft_tokens: drafted a round.
        trace: fingerprint of the recorded tokens.
    """

    accepted_length: float
    rounds: int
    draft_tokens: int
    trace: str

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Entry:
        """From a replay's figures, as `ReplayResult.to_dict` gives them."""
        return cls(
            accepted_length=figures["accepted_length"],
            rounds=figures["served"]["rounds"],
            draft_tokens=figures["draft_tokens"],
            trace=figures["trace"]["fingerprint"],
        )


def read(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The entries in the file `path`, by the draft's name.

    Raises:
        DraftError: the file cannot be read, or holds something else.
    """
    file = Path(path)
    found = read_json_object(file)
    drafts = found.get("drafts")
    if found.get("schema") != SCHEMA or not isinstance(drafts, dict):
        raise DraftError("is no baseline of this version; write it with --draft-update-baseline", path=file)
    return {name: _entry(file, name, value) for name, value in drafts.items()}


def update(path: str | os.PathLike[str], entries: Mapping[str, Entry]) -> None:
    """Write `entries` into the file `path`, beside those of other drafts that are there.

    Raises:
        DraftError: the file that is there is no baseline, or it cannot be written.
    """
    file = Path(path)
    kept = {**(read(file) if file.exists() else {}), **entries}
    drafts = {
        name: {**vars(entry), "accepted_length": round(entry.accepted_length, 4)}
        for name, entry in sorted(kept.items())
    }
    text = json.dumps({"schema": SCHEMA, "drafts": drafts}, indent=2, ensure_ascii=False) + "\n"
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise DraftError(f"cannot be written: {error.strerror or error}", path=file) from None


def _entry(file: Path, name: str, value: Any) -> Entry:
    kinds: dict[str, type | tuple[type, ...]] = {
        "accepted_length": (int, float),
        "rounds": int,
        "draft_tokens": int,
        "trace": str,
    }
    whole = isinstance(value, dict) and all(
        isinstance(value.get(key), kind) and not isinstance(value[key], bool) for key, kind in kinds.items()
    )
    if not whole:
        raise DraftError(f"{', '.join(kinds)} are due", path=file, key=f"drafts.{name}", got=value)
    for key in ("accepted_length", "rounds", "draft_tokens"):
        if value[key] < 1:
            place = f"drafts.{name}.{key}"
            raise DraftError(f"is {value[key]:.6g}; a number from 1 on is due", path=file, key=place, got=value[key])
    return Entry(**{key: value[key] for key in kinds})
