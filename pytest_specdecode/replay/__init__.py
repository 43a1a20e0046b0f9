"""Accepted length without the target and without a GPU: a draft over recorded hidden states.

`run.replay` replays; it and what it stands on import torch, and so are not imported here.
"""

from __future__ import annotations

from pytest_specdecode.replay.baseline import Entry
from pytest_specdecode.replay.score import FileScore, PositionScore, ReplayResult, Round, Score, score, wilson
from pytest_specdecode.replay.traces import NothingCountedError, Recording, Trace, TraceError

__all__ = [
    "Entry",
    "FileScore",
    "NothingCountedError",
    "PositionScore",
    "Recording",
    "ReplayResult",
    "Round",
    "Score",
    "Trace",
    "TraceError",
    "score",
    "wilson",
]
