"""What the library knows of one serving engine.

A fault is named by a slug; an engine says what it does about it, from the source or the issue that shows it. What is not known is said
to be unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

#: An outcome, or a function of the draft that gives one.
Known = Outcome | Callable[[DraftSpec], Outcome]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One serving engine.

    Attributes:
        name: as on the command line.
        title: for people.
        version: what the statements were read from.
        known: outcome by fault slug.
    """

    name: str
    title: str
    version: str
    known: Mapping[str, Known]

    def outcome(self, fault: str, spec: DraftSpec | None) -> Outcome:
        """What this engine does about `fault` in a draft that is `spec`."""
        known = self.known.get(fault)
        if known is None or (spec is None and not isinstance(known, Outcome)):
            return Outcome(outcome="unknown")
        if isinstance(known, Outcome):
            return known
        assert spec is not None
        return known(spec)


def stops(message: str, source: str = "") -> Outcome:
    """The engine refuses the draft."""
    return Outcome(outcome="stops", message=message, source=source)


def falls_back(message: str, source: str = "") -> Outcome:
    """The engine logs a line and takes a slower way."""
    return Outcome(outcome="falls back", message=message, source=source)


def serves_wrong(message: str, source: str = "") -> Outcome:
    """The engine serves the draft wrong and says nothing."""
    return Outcome(outcome="serves wrong", message=message, source=source)


def fine(message: str = "", source: str = "") -> Outcome:
    """The engine serves the draft right."""
    return Outcome(outcome="fine", message=message, source=source)
