"""Runs the kernels' slips, of the one table in `tests/fused_kv/slips.py`, against the contract and the kernels' own tests.

A mutator of syntax trees does not reach inside a Triton kernel, whose text Triton reads. So a slip is an edit of the text, loaded as a
module of its own, whose kernel then takes the place of ours wherever that is bound.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants.running import PACKAGE, ROOT, Session, forked, source_of

HERE = ROOT / "tests" / "fused_kv"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A kernel, the tables of its slips, and the tests that are to find them.

    Attributes:
        module: where it is.
        kernel: its name there.
        tables: names in `tests/fused_kv/slips.py`.
        tests: files, in the order in which they are tried.
        drawn: the test with drawn examples that is tried first, and the method of its class that is called once per example.
    """

    module: str
    kernel: str
    tables: tuple[str, ...]
    tests: tuple[str, ...]
    drawn: tuple[str, str] | None = None


SUBJECTS: Mapping[str, Subject] = {
    "kernel": Subject(
        module="fused_kv.kernel",
        kernel="_norm_rope_kernel",
        tables=("KERNEL", "FAR"),
        tests=("tests/contracts/test_fused_kv_contract.py", "tests/fused_kv/test_fused_kv_kernel.py"),
        drawn=("TestOurs::test_serves_any[", "_check"),
    ),
    "latent_kernel": Subject(
        module="fused_kv.latent_kernel",
        kernel="_latent_norm_rope_kernel",
        tables=("LATENT",),
        tests=("tests/fused_kv/test_latent_kernel.py",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What found a slip: the test, the examples that it drew until then (0 where it draws none), and the seconds of CPU time
    that all tests until then took. `by` is empty where nothing did."""

    by: str
    examples: int = 0
    seconds: float = 0.0


def slips(subject: Subject) -> dict[str, Any]:
    """The subject's slips by name."""
    table = _load(HERE / "slips.py", "slips")
    return {name: edits for each in subject.tables for name, edits in getattr(table, each).items()}


def run_slips(
    session: Session, subject: Subject, names: Sequence[str], *, processes: int, timeout: float
) -> Iterator[tuple[str, Found]]:
    """Each slip against the tests, until one fails."""
    edits = slips(subject)
    ordered = _ordered(session, subject)

    def job(name: str) -> Callable[[], Any]:
        def work() -> Any:
            _put_in(subject, edits[name])
            counted = _count(subject, ordered)
            started = time.process_time()
            for number, item in enumerate(ordered):
                before = counted["calls"]
                following = ordered[number + 1] if number + 1 < len(ordered) else None
                if not session.run(item, following):
                    drawn = counted["first"] - before if "drawn" in item.nodeid and counted["first"] else 0
                    return {"by": item.nodeid, "examples": drawn, "seconds": time.process_time() - started}
            return {"by": "", "seconds": time.process_time() - started}

        return work

    for number, found in forked([job(name) for name in names], processes=processes, timeout=timeout):
        if not isinstance(found, dict):
            yield names[number], Found(by="no end within the time limit" if found else "the process died")
        else:
            yield names[number], Found(**{key: found[key] for key in ("by", "examples", "seconds") if key in found})


# --- building blocks ---------------------------------------------------------------------------------------------------------------------


def _ordered(session: Session, subject: Subject) -> list[Any]:
    """The drawn test, then the contract's other properties, then the kernel's tests; of the contract what runs our kernel."""
    first = subject.drawn[0] if subject.drawn else "\0"
    chosen = [item for item in session.items if "::Test" not in item.nodeid or "::TestOurs::" in item.nodeid]
    chosen = [
        item
        for item in chosen
        # Refusals do not get as far as the kernel, and what the contract's own tests prove of broken subjects is not ours.
        if "::test_rejects" not in item.nodeid and ("contract.py" not in item.nodeid or "::TestOurs::" in item.nodeid)
    ]
    return sorted(chosen, key=lambda item: (first not in item.nodeid, "drawn" in item.nodeid))


def _put_in(subject: Subject, edits: Any) -> None:
    module = importlib.import_module(f"{PACKAGE}.{subject.module}")
    table = _load(HERE / "slips.py", "slips")
    folder = Path(tempfile.mkdtemp())
    slipped = _load(table.slipped(source_of(subject.module), edits, folder), "slipped")
    ours = getattr(module, subject.kernel)
    for other in list(sys.modules.values()):
        for name, value in list(vars(other).items()) if hasattr(other, "__dict__") else ():
            if value is ours:
                setattr(other, name, getattr(slipped, subject.kernel))
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            value.__code__ = getattr(slipped, name).__code__


def _count(subject: Subject, items: Sequence[Any]) -> dict[str, int]:
    """Counts the calls of the drawn test's method, and notes how many it were when one first failed."""
    counted = {"calls": 0, "first": 0}
    if subject.drawn is None or not items:
        return counted
    owner = items[0].cls
    method = getattr(owner, subject.drawn[1])

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted["calls"] += 1
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            counted["first"] = counted["first"] or counted["calls"]
            raise

    setattr(owner, subject.drawn[1], counting)
    return counted


def _load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
