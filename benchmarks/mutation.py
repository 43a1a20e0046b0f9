"""Whether the tests would notice: the code of validators, layers and kernels is changed in one place at a time, and the tests are run.

A change that no test notices has survived: a test is missing, or the change makes no difference; then it is listed with the reason, in
`benchmarks/mutants/equivalent.py`. Ends with 1 where one survived, or where the list no longer fits the code. Run it from the repository's
root; the package is never written to.

    python benchmarks/mutation.py                            everything
    python benchmarks/mutation.py --module layers.rope       one module, or several
    python benchmarks/mutation.py --only yarn                mutants whose name holds a text
    python benchmarks/mutation.py --list                     what would be run, without running it
    python benchmarks/mutation.py --quick                    a sample: one mutant in forty, the same ones every time
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.chdir(Path(__file__).resolve().parents[1])

from mutants.edits import Mutant, mutants  # noqa: E402
from mutants.equivalent import EQUIVALENT  # noqa: E402
from mutants.running import (  # noqa: E402
    Outcome,
    Session,
    in_session,
    preload,
    reach,
    run_quick,
    run_slow,
    source_of,
)
from mutants.slips import SUBJECTS, run_slips, slips  # noqa: E402

LAYER_TESTS = ("tests/layers",)
STACK_TESTS = (
    "tests/fused_kv/test_fused_kv_stack.py",
    "tests/fused_kv/test_fused_kv_stack_details.py",
    "tests/fused_kv/test_fused_kv_path.py",
    "tests/fused_kv/test_latent_stack.py",
    "tests/test_axes.py",
)

#: Modules whose syntax trees are edited, by the tests that are to notice; those of one set are collected once.
MODULES: dict[tuple[str, ...], tuple[str, ...]] = {
    STACK_TESTS: ("fused_kv.stack",),
    LAYER_TESTS: (
        "layers.attention",
        "layers.conv",
        "layers.gqa",
        "layers.hyper",
        "layers.linear",
        "layers.mla",
        "layers.mlp",
        "layers.moe",
        "layers.norms",
        "layers.prefix_gru",
        "layers.refiner",
        "layers.rope",
        "layers.selector",
        "layers.shared_row",
    ),
}

ONE_IN = 40


@dataclass
class Score:
    """What became of one module's mutants; `rows` are (name, seconds, what found it)."""

    module: str
    rows: list[tuple[str, float, str]] = field(default_factory=list)
    timed_out: list[str] = field(default_factory=list)
    survived: list[str] = field(default_factory=list)
    equivalent: int = 0

    @property
    def total(self) -> int:
        return len(self.rows) + len(self.timed_out) + len(self.survived) + self.equivalent

    def line(self) -> str:
        """Its line of the table."""
        slowest = max(self.rows, key=lambda row: row[1], default=("", 0.0, ""))
        killed = len(self.rows) + len(self.timed_out)
        return f"| {self.module} | {self.total} | {killed} | {self.equivalent} | {len(self.survived)} | {slowest[1]:.1f} s |"


def main() -> int:
    """Run what is asked for and print the score."""
    arguments = _arguments()
    started = time.perf_counter()
    chosen = arguments.module or [*(name for names in MODULES.values() for name in names), *SUBJECTS]
    if unknown := [
        name for name in chosen if name not in SUBJECTS and not any(name in each for each in MODULES.values())
    ]:
        print(f"no module {unknown[0]}", file=sys.stderr)
        return 2
    stale = _stale(chosen)
    if arguments.list:
        for name in chosen:
            for each in _names(name, arguments):
                print(f"{name}: {each}")
        return 0
    preload()
    scores: dict[str, Score] = {name: Score(name) for name in chosen}
    for tests, modules in MODULES.items():
        wanted = [name for name in modules if name in chosen]
        if wanted:
            stale += _mutate(wanted, tests, arguments, scores)
    for name in SUBJECTS:
        if name in chosen:
            _slip(name, arguments, scores[name])
    print(
        "\n| module | mutants | killed | equivalent | survived | slowest kill |\n| --- | --- | --- | --- | --- | --- |"
    )
    for score in scores.values():
        print(score.line())
    survived = [f"{score.module}: {name}" for score in scores.values() for name in score.survived]
    print(f"\n{time.perf_counter() - started:.0f} s, {arguments.processes} processes")
    for each in survived:
        print(f"survived: {each}")
    for each in stale:
        print(f"stale: {each}")
    return 1 if survived or stale else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="mutation.py"
    )
    parser.add_argument("--module", action="append", help="a module, such as layers.rope, fused_kv.stack or kernel")
    parser.add_argument("--only", default="", help="mutants whose name holds this text")
    parser.add_argument("--list", action="store_true", help="print the mutants' names")
    parser.add_argument("--quick", action="store_true", help=f"one mutant in {ONE_IN}")
    parser.add_argument(
        "--listed", action="store_true", help="run those listed as equivalent, too: one that is killed is stale"
    )
    parser.add_argument("--verbose", action="store_true", help="print each mutant and what found it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one mutant")
    return parser.parse_args()


# --- validators and layers ----------------------------------------------------------------------------------------------------------------


def _mutate(modules: Sequence[str], tests: Sequence[str], arguments: Any, scores: dict[str, Score]) -> list[str]:
    chosen = [mutant for module in modules for mutant in _chosen(module, arguments)]
    listed = {id(mutant) for mutant in chosen if mutant.key in EQUIVALENT.get(mutant.module, {})}
    for mutant in chosen:
        scores[mutant.module].equivalent += id(mutant) in listed
    run = [mutant for mutant in chosen if arguments.listed or id(mutant) not in listed]
    by_key = {(mutant.module, mutant.key): mutant for mutant in run}
    if not run:
        return []
    again = [mutant for mutant in run if mutant.function is None]
    stale: list[str] = []
    files: dict[str, list[str]] = {}

    def take(mutant: Mutant, outcome: Outcome) -> None:
        score = scores[mutant.module]
        if arguments.verbose:
            print(f"{outcome.kind} in {outcome.seconds:.2f} s by {outcome.by or 'nothing'}: {mutant}", flush=True)
        if id(mutant) in listed:
            if outcome.kind != "survived":
                stale.append(f"{mutant} is listed as equivalent, and {outcome.by or 'the time limit'} noticed it")
        elif outcome.kind == "killed":
            score.rows.append((str(mutant), outcome.seconds, outcome.by))
        elif outcome.kind == "timed out":
            score.timed_out.append(str(mutant))
        else:
            score.survived.append(mutant.key)

    def work(session: Session) -> Iterator[Any]:
        reached = reach(session, [str(source_of(module)) for module in modules])
        yield {"files": {module: reached.files(str(source_of(module))) for module in modules}}
        quick = [mutant for mutant in run if mutant.function is not None]
        for mutant, outcome in run_quick(
            session, quick, reached, processes=arguments.processes, timeout=arguments.timeout
        ):
            yield {"key": [mutant.module, mutant.key], "outcome": vars(outcome)}

    for found in in_session(tests, modules, work):
        if "files" in found:
            files = found["files"]
            continue
        mutant, outcome = by_key[tuple(found["key"])], Outcome(**found["outcome"])
        if outcome.kind == "survived" and id(mutant) not in listed:
            again.append(mutant)
        else:
            take(mutant, outcome)
    for mutant, outcome in run_slow(
        again,
        lambda mutant: files[mutant.module] or list(tests),
        processes=arguments.processes,
        timeout=arguments.timeout,
    ):
        take(mutant, outcome)
    return stale


def _all(module: str) -> list[Mutant]:
    return mutants(module, source_of(module).read_text())


def _chosen(module: str, arguments: Any) -> list[Mutant]:
    found = [mutant for mutant in _all(module) if arguments.only in mutant.key]
    return found[::ONE_IN] if arguments.quick else found


def _stale(modules: Sequence[str]) -> list[str]:
    """Entries of the list that name no mutant of today's code."""
    return [
        f"{module}: listed as equivalent, but there is no such mutant any more: {key}"
        for module in modules
        if module in EQUIVALENT
        for key in sorted(set(EQUIVALENT[module]) - {mutant.key for mutant in _all(module)})
    ]


# --- kernels ------------------------------------------------------------------------------------------------------------------------------


def _slip(name: str, arguments: Any, score: Score) -> None:
    subject, chosen = SUBJECTS[name], _slips(name, arguments)

    def work(session: Session) -> Iterator[Any]:
        for slip, found in run_slips(
            session, subject, chosen, processes=arguments.processes, timeout=arguments.timeout
        ):
            yield {"slip": slip, "found": vars(found)}

    print(f"\n| {name}: slip | found by | examples | seconds |\n| --- | --- | --- | --- |")
    for each in in_session(subject.tests, [subject.module], work):
        slip, found = each["slip"], each["found"]
        if not found["by"]:
            score.survived.append(slip)
            continue
        score.rows.append((slip, found["seconds"], found["by"]))
        test = found["by"].split("/")[-1].split("::")[-1]
        print(f"| {slip} | {test} | {found['examples'] or ''} | {found['seconds']:.1f} |", flush=True)


def _slips(name: str, arguments: Any) -> list[str]:
    found = [slip for slip in slips(SUBJECTS[name]) if arguments.only in slip]
    return found[:: ONE_IN // 4] if arguments.quick else found


def _names(name: str, arguments: Any) -> list[str]:
    if name in SUBJECTS:
        return _slips(name, arguments)
    return [
        mutant.key + (" (equivalent)" if mutant.key in EQUIVALENT.get(name, {}) else "")
        for mutant in _chosen(name, arguments)
    ]


if __name__ == "__main__":
    sys.exit(main())
