"""Somebody who has never seen the project: from a clone to the first finding understood, by README.md and docs/start.md alone.

What goes wrong without this file: a command of the quick start that works in our directory and not in a fresh clone, because a file that it
needs is not in the repository; one that says success and shows nothing; a finding of the README whose fix does not mend it; a word in the
output that no page explains; a page that the README sends a reader to and that says something else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="what is in the repository is asked of git"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of this tree would have: the files that git tracks or would add, as they are now, and none that it ignores."""
    folder = tmp_path_factory.mktemp("elsewhere") / "pytest-specdecode"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def quick_start(document: Path) -> list[str]:
    """The commands under `Quick start` of the README, as the gate reads them."""
    spec = importlib.util.spec_from_file_location("quick_start", document.parent / "tools" / "quick_start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    commands: list[str] = module.commands(document)
    return commands


def consoles(document: Path) -> list[str]:
    """The commands of the `console` blocks, in order."""
    return re.findall(r"^\$ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)


def typed(clone: Path, command: str) -> subprocess.CompletedProcess[str]:
    """`command` in the clone, in the environment at hand, but with the clone's code: what pip would install is on the path."""
    program, *arguments = shlex.split(command)
    if program == "pytest":
        arguments = ["-m", "pytest", *arguments]
    assert program in ("python", "pytest")
    hidden = ("PYTEST_", "GITHUB_", "COV_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden) and key != "CI"}
    env |= {"PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1", "COLUMNS": "100"}
    start = [sys.executable, *arguments, "-p", "no:cacheprovider"]
    return subprocess.run(start, cwd=clone, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_the_first_command_installs_this_and_judges_a_draft(clone: Path) -> None:
    """Nothing fails, the draft is named, and what was left open says what to give."""
    first, _ = quick_start(clone / "README.md")
    install, judge = first.split(" && ")
    assert install == "python -m pip install -c constraints.txt ."
    for file in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        assert (clone / file).is_file(), file
    done = typed(clone, judge)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^dflash-tiny: dflash \(plain\), 2 layers, .* parameters, bfloat16$", done.stdout, re.MULTILINE)
    assert "--draft-target=DIR" in done.stdout
    assert "--draft-trace=DIR" in done.stdout
    ran = set(re.findall(r"^SKIPPED \[\d+\] (\S+):\d+:", done.stdout, re.MULTILINE))
    assert ran == {"pytest_specdecode/plugin/suite.py"}, "the clone's code was not what ran"


def test_the_second_command_finds_the_projects_tests(clone: Path) -> None:
    """They are collected in the clone; one quick file of them is run."""
    _, second = quick_start(clone / "README.md")
    install, tests = second.split(" && ")
    assert install == "python -m pip install -c constraints.txt -e '.[test]'"
    assert re.search(r"^test = \[", (clone / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert tests == "python -m pytest -n 2"
    done = typed(clone, f"{tests.removesuffix(' -n 2')} tests/test_examples.py -k 'broken or shipped'")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readmes_first_finding_is_understood_and_its_fix_mends_it(clone: Path) -> None:
    """The finding has what, where, got, due, each engine's outcome and a fix; with the fix carried out the check passes."""
    command = consoles(clone / "README.md")[0]
    done = typed(clone, command)
    assert done.returncode == 1
    text = re.sub(r"\n {4}(?=\S)", " ", done.stdout)
    for line in (
        "Eagle3 MLA layer requires q_lora_rank in the draft config: the key is absent",
        "  where: config.json: q_lora_rank",
        "  got:   absent",
        "  due:   48",
        "  vllm: serves wrong: DeepSeek-V3's configuration class fills in 1536",
        "  fix:   state the rank that q_a_proj's rows have",
    ):
        assert line in text.splitlines(), line
    folder = clone / re.findall(r"--draft-model=(\S+)", command)[0]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        (folder / "config.json").write_text(json.dumps({**config, "q_lora_rank": 48}), encoding="utf-8")
        mended = typed(clone, command)
    finally:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert mended.returncode == 0, mended.stdout


def test_a_printed_id_can_be_run_again(clone: Path) -> None:
    """As the README says it can."""
    command = consoles(clone / "README.md")[0]
    (id,) = re.findall(r"^FAILED (\S+)", typed(clone, command).stdout, re.MULTILINE)
    again = typed(clone, f"{command.partition(' --draft-checks')[0]} '{id}'")
    assert "1 failed" in again.stdout.splitlines()[-1]
    assert "passed" not in again.stdout.splitlines()[-1]


def test_every_word_of_a_finding_is_explained(clone: Path) -> None:
    """Labels of a finding, outcomes and statuses stand in the README's prose or in the page that it sends a beginner to."""
    readme, start = ((clone / name).read_text(encoding="utf-8") for name in ("README.md", "docs/start.md"))
    assert "docs/start.md" in readme
    prose = re.sub(r"^```.*?^```$", "", readme + start, flags=re.DOTALL | re.MULTILINE)
    for label in ("where", "got", "due", "fix"):
        assert f"`{label}`" in prose, label
    for outcome in ("stops", "falls back", "serves wrong", "passed", "failed", "warned", "skipped", "inconclusive"):
        assert re.search(rf"\b{outcome}\b", prose), outcome
    # What a first-time user passes over, because it is a word of ours.
    for word in ("trace", "packaging", "draft-model", "target"):
        assert re.search(rf"\b{word}\b", prose), word


def test_the_beginners_page_says_the_same_as_the_readme(clone: Path) -> None:
    """One first command; every option in it is one that the README's table has."""
    first, _ = quick_start(clone / "README.md")
    start = (clone / "docs" / "start.md").read_text(encoding="utf-8")
    assert first in start
    readme = (clone / "README.md").read_text(encoding="utf-8")
    for option in set(re.findall(r"--draft-[\w-]+", start)):
        assert re.search(rf"^\| `{option}\b", readme, re.MULTILINE), option


def test_nothing_is_left_behind_in_the_clone(clone: Path) -> None:
    """Judging a draft writes nothing into the working directory."""
    before = {path for path in clone.rglob("*") if "__pycache__" not in path.parts}
    typed(clone, consoles(clone / "README.md")[0])
    assert {path for path in clone.rglob("*") if "__pycache__" not in path.parts} == before
