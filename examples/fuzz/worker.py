"""One of several workers that share a night's fuzzing and one example database.

    python examples/fuzz/worker.py --worker 0 --of 2 --seconds 3000 -- examples/fuzz/test_my_path.py

collects the drawn tests that the arguments behind `--` select, takes those whose id hashes to this worker, and draws examples for them
until the time is up: with HypoFuzz where it is installed, else by running pytest again and again, each time with other examples. What fails
is in the database, and the last thing a worker does is an ordinary run of its tests, which replays it and whose exit status is the
worker's. Run it where pytest is run: a test's id is part of its key in the database.
"""

import argparse
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
FUZZ = [sys.executable, "-c", "from hypothesis.extra.cli import main; main()", "fuzz", "--no-dashboard", "-n", "1"]


def collected(selection):
    """Ids of the tests that draw."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "-q", "-m", "hypothesis", *selection], capture_output=True, text=True, check=False
    )
    found = [line for line in listed.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "SKIPPED"))]
    if listed.returncode or not found:
        sys.exit(f"no drawn tests in {' '.join(selection)}:\n{listed.stdout}{listed.stderr}")
    return found


def share(ids, worker, of):
    """Those of this worker: the same ones on every machine and every night, whatever else is collected."""
    return [id for id in ids if int(hashlib.sha256(id.encode()).hexdigest(), 16) % of == worker]


def fuzz(ids, seconds):
    """HypoFuzz on these tests. It goes on until it is stopped."""
    process = subprocess.Popen([*FUZZ, "--", *ids, "-p", "no:cacheprovider"], start_new_session=True)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def repeat(ids, seconds, seed):
    """Pytest on these tests, with other examples each time; a test that failed is left out of the next runs."""
    end, runs, left = time.monotonic() + seconds, 0, list(ids)
    many = {"FUZZ_EXAMPLES": "1000", **os.environ}
    while left and time.monotonic() < end:
        chosen = [] if seed is None else [f"--hypothesis-seed={seed + runs}"]
        command = [*PYTEST, "-q", "-rf", *chosen, *left]
        done = subprocess.run(command, env=many, capture_output=True, text=True, check=False)
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        left = [id for id in left if id not in failed]
        runs += 1
        for id in failed:
            print(f"run {runs}: {id} fails", flush=True)
    print(f"{runs} runs", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worker", type=int, required=True, help="which worker this is, from 0")
    parser.add_argument("--of", type=int, required=True, help="how many there are")
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument(
        "--seed", type=int, help="of the first run, for runs that are to be the same; HypoFuzz has none"
    )
    parser.add_argument("--plain", action="store_true", help="without HypoFuzz, installed or not")
    parser.add_argument("selection", nargs="+", help="arguments of pytest that select the tests")
    options = parser.parse_args()

    ids = share(collected(options.selection), options.worker, options.of)
    print(f"worker {options.worker} of {options.of}: {len(ids)} tests", flush=True)
    if not ids:
        return 0
    if options.plain or importlib.util.find_spec("hypofuzz") is None:
        repeat(ids, options.seconds, options.seed)
    else:
        fuzz(ids, options.seconds)
    return subprocess.run([*PYTEST, "-q", *ids], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
