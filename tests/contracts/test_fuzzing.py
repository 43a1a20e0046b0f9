"""The fuzzing recipe: workers that share the tests and one example database, with or without HypoFuzz.

Failure modes this file exists to catch: a test that no worker takes, or two do, or another one after the suite grew; a failure that stays
with the process that found it; contracts that keep to a database of their own; a worker that ends well although something failed; a page
that names options or files that are not there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "fuzz"
PAGE = ROOT / "docs" / "fuzzing.md"

#: Two tests that fail for few examples, one for each of two workers, and one that never does. Replaying alone generates nothing.
RARE = """
    import os

    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st

    phases = [Phase.reuse] if "REPLAY_ONLY" in os.environ else [Phase.reuse, Phase.generate, Phase.shrink]
    rarely = settings(max_examples=300, phases=phases, deadline=None)

    @rarely
    @given(st.integers(0, 10**6))
    def test_one(number):
        assert number % 100 != 7

    @rarely
    @given(st.integers(0, 10**6))
    def test_other(number):
        assert number % 100 != 8

    @rarely
    @given(st.integers(0, 10**6))
    def test_sound(number):
        assert number >= 0
"""


WORKER = (sys.executable, "worker.py", "--plain")


@pytest.fixture(scope="module")
def worker():
    found = importlib.util.spec_from_file_location("fuzz_worker", RECIPE / "worker.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_each_test_is_one_worker_s_whatever_else_there_is(worker):
    ids = [f"tests/test_mine.py::TestMine::test_{name}[{at}]" for name in ("one", "two") for at in range(40)]
    shares = [worker.share(ids, at, 3) for at in range(3)]
    assert sorted(id for share in shares for id in share) == sorted(ids)
    assert all(10 < len(share) < 50 for share in shares)
    assert worker.share(ids[::-1], 1, 3) == shares[1][::-1]
    # SHA-256 of the id, as `sha256sum` gives it, modulo the workers.
    assert worker.share(["a"], 0xCA978112CA1BBDCAFAC231B39A23DC4DA786EFF8147C4E72B9807785AFEE48BB % 3, 3) == ["a"]


def environment(database, **more):
    return {**os.environ, "CI": "true", "FUZZ_DATABASE": str(database), "PYTEST_ADDOPTS": "", **more}


def ordinary(directory, *args, **env):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *args]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)


def outcome(done, word):
    found = re.search(rf"(\d+) {word}", done.stdout)
    return int(found[1]) if found else 0


@pytest.fixture
def project(tmp_path):
    for name in ("conftest.py", "worker.py"):
        (tmp_path / name).write_text((RECIPE / name).read_text(encoding="utf-8"), encoding="utf-8")
    lines = RARE.strip("\n").splitlines()
    (tmp_path / "test_rare.py").write_text("\n".join(line[4:] for line in lines) + "\n", encoding="utf-8")
    return tmp_path


def test_what_one_process_finds_another_replays(project, worker):
    database = project / "shared"
    ids = [f"test_rare.py::test_{name}" for name in ("one", "other", "sound")]
    assert [worker.share(ids[:2], at, 2) for at in range(2)] in ([ids[:1], ids[1:2]], [ids[1:2], ids[:1]])

    before = ordinary(project, "test_rare.py", **environment(database, REPLAY_ONLY="1"))
    # Hypothesis skips a test that may only replay and has nothing to.
    assert outcome(before, "skipped") == 3, before.stdout

    processes = [
        subprocess.Popen(
            [*WORKER, f"--worker={at}", "--of=2", "--seconds=60", "--", "test_rare.py", "-k", "one or other"],
            cwd=project,
            env=environment(database),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for at in range(2)
    ]
    told = [process.communicate(timeout=150)[0] for process in processes]
    assert sorted(process.returncode for process in processes) == [1, 1], told

    after = ordinary(project, "test_rare.py", **environment(database, REPLAY_ONLY="1"))
    assert (outcome(after, "failed"), outcome(after, "skipped")) == (2, 1), after.stdout
    elsewhere = ordinary(project, "test_rare.py", **environment(project / "another", REPLAY_ONLY="1"))
    assert outcome(elsewhere, "skipped") == 3, elsewhere.stdout


def test_a_contract_s_failure_goes_to_the_shared_database(project):
    (project / "test_wrong.py").write_text(
        "from pytest_specdecode.contracts import CheckpointReaderContract\n\n\n"
        "class TestNothing(CheckpointReaderContract):\n"
        "    build = staticmethod(lambda path: {})\n",
        encoding="utf-8",
    )
    database = project / "shared"
    done = ordinary(project, "test_wrong.py", "-k", "tensors-drawn", **environment(database))
    assert outcome(done, "failed") == 1, done.stdout
    assert [file for file in database.rglob("*") if file.is_file()]


def test_a_selection_without_drawn_tests_says_so(project):
    (project / "test_plain.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    command = [*WORKER, "--worker=0", "--of=1", "--seconds=1", "test_plain.py"]
    done = subprocess.run(
        command, cwd=project, env=environment(project / "shared"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no drawn tests in test_plain.py" in done.stderr


# --- the page -----------------------------------------------------------------------------------------------------------------------------


def test_the_page_names_what_is_there():
    text = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"(?:examples|docs|benchmarks)/[\w/.-]+\w", text):
        assert (ROOT / path).exists(), path
    source = (RECIPE / "worker.py").read_text(encoding="utf-8")
    for line in re.findall(r"examples/fuzz/worker\.py (.+)", text):
        for option in re.findall(r"(?<!\S)(--[a-z]+)", line):
            assert f'"{option}"' in source, option
    for name in ("FUZZ_DATABASE", "FUZZ_REPOSITORY", "fuzz-database"):
        assert name in text
        assert name in (RECIPE / "conftest.py").read_text(encoding="utf-8")
