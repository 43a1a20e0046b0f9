"""What the plugin costs a pytest run that does not use it, and how long judging a draft takes, whole processes both.

    python benchmarks/startup.py [--runs 15] [--draft examples/checkpoints/dflash-tiny]

The two kinds of run are interleaved, so that a busy machine slows both alike. Best and median of each are printed, wall time and processor
time; the difference of the bests says most on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DRAFT = Path(__file__).resolve().parent.parent / "examples" / "checkpoints" / "dflash-tiny"

Times = list[tuple[float, float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="runs of each kind without a draft (default: 15)")
    parser.add_argument(
        "--draft", type=Path, default=DRAFT, help="checkpoint to judge (default: the shipped dflash-tiny)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
        kinds: dict[str, tuple[list[str], Times]] = {
            "one test, plugin unused": ([], []),
            "one test, -p no:specdecode": (["-p", "no:specdecode"], []),
        }
        for args, _ in kinds.values():
            timed(args, folder)
        for _ in range(options.runs):
            for args, times in kinds.values():
                times.append(timed(args, folder))
        for name, (_, times) in kinds.items():
            show(name, times)
        unused, without = (times for _, times in kinds.values())
        for index, clock in enumerate(("wall", "processor")):
            best = min(run[index] for run in unused) - min(run[index] for run in without)
            median = statistics.median(a[index] - b[index] for a, b in zip(unused, without, strict=True))
            print(
                f"  extra {clock} time: {best * 1e3:+.1f} ms between the bests, {median * 1e3:+.1f} ms in the median pair"
            )
        os.remove(Path(folder, "test_one.py"))
        model = f"--draft-model={options.draft.resolve()}"
        for name, args in (
            ("every check", [model]),
            ("every check, two workers", [model, "-n2"]),
            ("files, config, taps, rope only", [model, "--draft-checks=files,config,taps,rope"]),
        ):
            timed(args, folder)
            show(name, [timed(args, folder) for _ in range(3)])


def timed(args: list[str], folder: str) -> tuple[float, float]:
    """Wall and processor seconds of one `pytest` process with `args` in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Installed packages come compiled; so do these after the first run, and nothing is left in the source tree.
    environment["PYTHONPYCACHEPREFIX"] = str(Path(folder, "compiled"))
    before, started = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    wall, after = time.perf_counter() - started, os.times()
    if done.returncode != 0:
        sys.exit(f"pytest {' '.join(args)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return wall, after.children_user - before.children_user + after.children_system - before.children_system


def show(name: str, times: Times) -> None:
    """One line of figures."""
    wall, processor = zip(*times, strict=True)
    print(
        f"{name}: best {min(wall):.3f} s, median {statistics.median(wall):.3f} s of {len(times)}; "
        f"processor best {min(processor):.3f} s"
    )


if __name__ == "__main__":
    main()
