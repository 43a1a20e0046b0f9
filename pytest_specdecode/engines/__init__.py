"""The serving engines, as data: what each does about each fault of a draft."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pytest_specdecode.engines import sglang, tensorrt_llm, vllm
from pytest_specdecode.engines.base import Engine
from pytest_specdecode.errors import DraftError
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

__all__ = ["ENGINES", "NAMES", "Engine", "outcomes", "select"]

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (sglang.ENGINE, vllm.ENGINE, tensorrt_llm.ENGINE)}

#: Names of all engines, in the order of reports.
NAMES: tuple[str, ...] = tuple(ENGINES)


def outcomes(fault: str, spec: DraftSpec | None, names: Iterable[str] = NAMES) -> dict[str, Outcome]:
    """What each of the engines `names` does about `fault` in a draft that is `spec` (None: the family is not known)."""
    return {name: ENGINES[name].outcome(fault, spec) for name in names}


def select(names: Iterable[str] | None) -> tuple[str, ...]:
    """`names` as given, all engines where None.

    Raises:
        DraftError: a name that is no engine's, with the nearest one.
    """
    if names is None:
        return NAMES
    chosen = tuple(names)
    for name in chosen:
        if name not in ENGINES:
            near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.5)
            raise DraftError(
                f"no engine is called {name!r}; {'did you mean ' + near[0] + '?' if near else 'known are ' + ', '.join(NAMES)}"
            )
    return chosen
