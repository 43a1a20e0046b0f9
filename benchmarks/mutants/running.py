"""Runs tests against mutants: collected once, then one forked process per mutant, in which the mutant's code is swapped in.

Importing torch and collecting the tests takes seconds, and a mutant is killed in hundredths of one, so both are done once. A mutant inside
a function takes the place of that function's code in the forked process. First a run of all tests notes which of them reach which lines;
a mutant then meets only those that reach its own, the quickest first and the most telling before them. What survives so, and what is edited
outside any function, is run once more the slow way: the package imported anew with the edit in it, and every test file of the module.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants.edits import Mutant, mutated

PACKAGE = "pytest_specdecode"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a mutant: `killed`, `timed out`, or `survived`.

    Attributes:
        by: the first test that failed.
        seconds: of CPU time, until it was killed, or until all tests had passed.
    """

    kind: str
    by: str = ""
    seconds: float = 0.0


def source_of(module: str) -> Path:
    """The file of a module named without the package."""
    return ROOT / PACKAGE / f"{module.replace('.', '/')}.py"


def preload() -> None:
    """Import once what every test needs and no mutant touches."""
    import hypothesis  # noqa: F401
    import torch
    from _pytest import nodes
    from hypothesis import strategies  # noqa: F401

    with contextlib.suppress(ImportError):
        import triton
        import triton.language
        import triton.runtime.interpreter  # noqa: F401
    torch.set_num_threads(1)
    # A traceback with its source takes longer than most tests, and nobody reads it.
    nodes.Node._repr_failure_py = lambda self, excinfo, style=None: excinfo.exconly()  # type: ignore[method-assign]
    sys.path.insert(0, str(ROOT))


PYTEST = (
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:cov",
    "-s",
    "--no-header",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)


class Settings:
    """A pytest plugin: Hypothesis draws the same examples every time, at the tests' own counts."""

    def pytest_configure(self, config: Any) -> None:
        from hypothesis import Phase, settings

        # No example of one mutant may help to find the next, and none is shrunk.
        settings.register_profile(
            "mutants", database=None, derandomize=True, print_blob=False, phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from hypothesis import Phase, settings

        for item in items:
            test = getattr(getattr(item, "function", None), "_hypothesis_internal_use_settings", None)
            if test is not None:
                item.function._hypothesis_internal_use_settings = settings(
                    test, database=None, derandomize=True, print_blob=False, phases=(Phase.explicit, Phase.generate)
                )


class Session(Settings):
    """A pytest plugin: where pytest would run the tests it has collected, `work` is called with this object.

    Attributes:
        items: the tests.
        functions: every function object of the package, by file and qualified name.
    """

    def __init__(self, work: Callable[[Session], None], modules: Sequence[str]) -> None:
        self.items: list[Any] = []
        self.functions: dict[tuple[str, str], list[types.FunctionType]] = {}
        self._work, self._modules = work, modules
        self._failed = False

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = list(session.items)
        # Some are imported where they are first used, which is after the swap.
        for module in self._modules:
            importlib.import_module(f"{PACKAGE}.{module}")
        self.functions = _functions()
        gc.collect()
        gc.freeze()
        self._work(self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        # An expected failure that came is no failure.
        self._failed = self._failed or report.failed

    def run(self, item: Any, following: Any = None) -> bool:
        """Run one test; whether it passed, or was skipped."""
        self._failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return not self._failed


# --- which tests reach which lines --------------------------------------------------------------------------------------------------------


@dataclass
class Reach:
    """By test, the seconds it takes and the lines of each file that it reaches."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, set[int]]]

    def tests(self, file: str, first: int, last: int) -> list[str]:
        """The tests that reach any of these lines, the quickest first."""
        wanted = set(range(first, last + 1))
        found = [test for test, files in self.lines.items() if not wanted.isdisjoint(files.get(file, ()))]
        return sorted(found, key=self.seconds.__getitem__)

    def files(self, file: str) -> list[str]:
        """The test files whose tests reach this file at all, the quickest first."""
        times: dict[str, float] = {}
        for test, reached in self.lines.items():
            if reached.get(file):
                name = test.split("::")[0]
                times[name] = times.get(name, 0.0) + self.seconds[test]
        return sorted(times, key=times.__getitem__)


def reach(session: Session, files: Sequence[str]) -> Reach:
    """Run every collected test once, as things are, in a process of its own."""
    names = set(files)

    def measure() -> dict[str, Any]:
        seconds, lines, failed = {}, {}, []
        current: dict[str, set[int]] = {}

        def inside(frame: types.FrameType, event: str, _: Any) -> Any:
            if event == "line":
                current.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
            return inside

        def outside(frame: types.FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in names:
                return None
            # Reaching a function is reaching its header.
            current.setdefault(frame.f_code.co_filename, set()).add(frame.f_code.co_firstlineno)
            return inside

        for number, item in enumerate(session.items):
            current = {}
            following = session.items[number + 1] if number + 1 < len(session.items) else None
            sys.settrace(outside)
            started = time.perf_counter()
            passed = session.run(item, following)
            seconds[item.nodeid] = time.perf_counter() - started
            sys.settrace(None)
            lines[item.nodeid] = {file: sorted(reached) for file, reached in current.items()}
            if not passed:
                failed.append(item.nodeid)
        return {"seconds": seconds, "lines": lines, "failed": failed}

    found = _only(forked([measure], processes=1, timeout=1800.0))
    if not isinstance(found, dict):
        raise RuntimeError(f"the tests could not be run as they are: {found}")
    if found["failed"]:
        raise RuntimeError(f"fails without any mutant: {found['failed'][:5]}")
    return Reach(
        seconds=found["seconds"],
        lines={test: {file: set(each) for file, each in reached.items()} for test, reached in found["lines"].items()},
    )


# --- the quick way ----------------------------------------------------------------------------------------------------------------------


def run_quick(
    session: Session, chosen: Sequence[Mutant], reached: Reach, *, processes: int, timeout: float
) -> Iterator[tuple[Mutant, Outcome]]:
    """Each mutant, its function's code swapped, against the tests that reach it."""
    items = {item.nodeid: item for item in session.items}
    kills: dict[str, int] = {}

    def job(mutant: Mutant) -> Callable[[], Any]:
        def work() -> Any:
            file = source_of(mutant.module)
            tests = reached.tests(str(file), *mutant.lines)
            tests.sort(key=lambda test: -kills.get(test, 0))
            if not _swap(mutant, file, session.functions):
                return {"kind": "survived", "by": "not swapped"}
            ordered = [items[test] for test in tests]
            for number, item in enumerate(ordered):
                following = ordered[number + 1] if number + 1 < len(ordered) else None
                if not session.run(item, following):
                    return {"kind": "killed", "by": item.nodeid}
            return {"kind": "survived"}

        return work

    for number, found in forked([job(mutant) for mutant in chosen], processes=processes, timeout=timeout):
        outcome = _outcome(found)
        if outcome.kind == "killed":
            kills[outcome.by] = kills.get(outcome.by, 0) + 1
        yield chosen[number], outcome


def _functions() -> dict[tuple[str, str], list[types.FunctionType]]:
    """By file and qualified name, every function object of the package."""
    package = str(ROOT / PACKAGE)
    found: dict[tuple[str, str], list[types.FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(package):
            found.setdefault((each.__code__.co_filename, each.__code__.co_qualname), []).append(each)
    return found


def _swap(mutant: Mutant, file: Path, functions: dict[tuple[str, str], list[types.FunctionType]]) -> bool:
    code = compile(mutated(file.read_text(), mutant.index), str(file), "exec", dont_inherit=True)
    new = _code_of(code, mutant.function or "")
    targets = functions.get((str(file), mutant.function or ""), [])
    if new is None or not targets:
        return False
    try:
        for target in targets:
            target.__code__ = new
    except ValueError:
        # It closes over other names than before.
        return False
    return True


def _code_of(code: types.CodeType, name: str) -> types.CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == name:
                return constant
            if name.startswith(f"{constant.co_qualname}.") and (found := _code_of(constant, name)) is not None:
                return found
    return None


# --- the slow way -----------------------------------------------------------------------------------------------------------------------


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a tree instead of its file."""

    def __init__(self, name: str, file: Path, tree: Any) -> None:
        self._name, self._file, self._tree = name, file, tree

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._file, loader=self)

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self._tree, str(self._file), "exec", dont_inherit=True), module.__dict__)


class _First:
    """Notes the first test, or file, that fails."""

    def __init__(self) -> None:
        self.by = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid


def run_slow(
    chosen: Sequence[Mutant], files: Callable[[Mutant], Sequence[str]], *, processes: int, timeout: float
) -> Iterator[tuple[Mutant, Outcome]]:
    """Each mutant in a package imported anew, against whole test files. The package must not have been imported here."""

    def job(mutant: Mutant) -> Callable[[], Any]:
        def work() -> Any:
            import pytest

            file = source_of(mutant.module)
            tree = mutated(file.read_text(), mutant.index)
            sys.meta_path.insert(0, _Instead(f"{PACKAGE}.{mutant.module}", file, tree))
            # Before pytest, which would put a finder of its own first.
            importlib.import_module(f"{PACKAGE}.{mutant.module}")
            # File by file: most are killed in the first, and the others need not be collected.
            for tests in files(mutant):
                first = _First()
                if pytest.main([*PYTEST, tests], plugins=[first, Settings()]) != 0:
                    return {"kind": "killed", "by": first.by or "importing the package"}
            return {"kind": "survived"}

        return work

    for number, found in forked([job(mutant) for mutant in chosen], processes=processes, timeout=timeout):
        yield chosen[number], _outcome(found)


# --- processes ----------------------------------------------------------------------------------------------------------------------------


def in_session(tests: Sequence[str], modules: Sequence[str], work: Callable[[Session], Any]) -> Iterator[Any]:
    """Collect tests in a process of its own, call `work` there, and give what it yields as it comes; `modules` are to be swapped."""

    def collect(send: Callable[[Any], None]) -> None:
        import pytest

        def pass_on(session: Session) -> None:
            try:
                for each in work(session):
                    send(each)
            except Exception as error:
                send({"error": f"{type(error).__name__}: {error}"})

        code = pytest.main([*PYTEST, *tests], plugins=[Session(pass_on, modules)])
        if code not in (0, 5):
            send({"error": f"pytest ended with {code} while collecting"})

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with _quiet(), os.fdopen(write, "w") as pipe:

            def send(value: Any) -> None:
                pipe.write(json.dumps(value) + "\n")
                pipe.flush()

            try:
                collect(send)
            except BaseException as error:
                send({"error": f"{type(error).__name__}: {error}"})
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        for line in pipe:
            value = json.loads(line)
            if isinstance(value, dict) and "error" in value:
                raise RuntimeError(value["error"])
            yield value
    os.waitpid(child, 0)


@dataclass
class _Running:
    number: int
    pipe: int
    started: float
    data: bytes = b""


def forked(jobs: Sequence[Callable[[], Any]], *, processes: int, timeout: float) -> Iterator[tuple[int, Any]]:
    """Each job in a process of its own, so many at a time; its number, and what it returned, `timed out`, or None where it died.

    Times are CPU time, so that a busy machine does not make a mutant slow; one that sleeps is ended after twenty times as long.
    """
    waiting, running = iter(enumerate(jobs)), {}
    exhausted = False
    while True:
        while len(running) < processes and not exhausted:
            following = next(waiting, None)
            if following is None:
                exhausted = True
                break
            child, each = _start(*following, timeout)
            running[child] = each
        if not running:
            return
        ready, _, _ = select.select([each.pipe for each in running.values()], [], [], 0.5)
        for child, each in list(running.items()):
            ended: Any = ...
            if each.pipe in ready:
                data = os.read(each.pipe, 1 << 16)
                each.data += data
                if not data:
                    ended = json.loads(each.data) if each.data else None
            elif time.perf_counter() - each.started > 20 * timeout:
                os.kill(child, signal.SIGKILL)
                ended = "timed out"
            if ended is not ...:
                os.close(each.pipe)
                _, status, usage = os.wait4(child, 0)
                del running[child]
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                    ended = "timed out"
                if isinstance(ended, dict):
                    ended["took"] = usage.ru_utime + usage.ru_stime
                yield each.number, ended


def _start(number: int, job: Callable[[], Any], timeout: float) -> tuple[int, _Running]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with _quiet():
            gc.disable()
            resource.setrlimit(resource.RLIMIT_CPU, (int(timeout) + 1, int(timeout) + 2))
            try:
                result = job()
            except BaseException as error:
                result = {"kind": "killed", "by": f"{type(error).__name__} outside any test: {error}"[:300]}
            os.write(write, b"")
            with os.fdopen(write, "wb") as pipe:
                pipe.write(json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    return child, _Running(number=number, pipe=read, started=time.perf_counter())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.stdout = sys.stderr = io.StringIO()
    yield


def _outcome(found: Any) -> Outcome:
    if found == "timed out":
        return Outcome(kind="timed out")
    if found is None:
        return Outcome(kind="killed", by="the process died")
    return Outcome(kind=found["kind"], by=found.get("by", ""), seconds=found.get("took", 0.0))


def _only(found: Iterator[tuple[int, Any]]) -> Any:
    (_, value), *_ = found
    return value
