"""What is shipped to be copied into other people's CI.

Caught here: YAML that does not parse; a command that fails as it stands, or names an option, an extra or a file that is gone; a workflow
whose steps use what no step before them wrote; a hook that runs on the wrong files, or takes longer than a commit should; a gate that
lets a broken draft through, or leaves it where a good one is looked for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_specdecode import DraftError, RejectedDraftError, Report, gate
from pytest_specdecode.testing import write_tiny

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the test extra brings")

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "ci"
GOOD = ROOT / "examples" / "checkpoints" / "eagle3-tiny"
BROKEN = ROOT / "examples" / "broken" / "eagle3-no-lm-head"

GITHUB = yaml.safe_load((RECIPES / "github-actions.yml").read_text())
GITLAB = yaml.safe_load((RECIPES / "gitlab-ci.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
GITHUB_STEPS = {
    (job, step["name"]): step for job, body in GITHUB["jobs"].items() for step in body["steps"] if "name" in step
}


def shell(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a recipe in a copy of this repository's examples, by the shell that the runner uses."""
    for name in ("examples", "constraints.txt"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "CI", "PYTEST_"))}
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env=own | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"} | more,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def few(command: str) -> str:
    """The command with two workers, and without the checks that run layers and kernels, which other tests run."""
    return command.replace("-n auto", "-n 2") + " --draft-checks=config,rope,vocabulary"


# --- GitHub ---


def test_github_reports_what_it_found_even_where_a_check_fails(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    summary = tmp_path / "summary.md"
    more = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(tmp_path)}
    env = {**GITHUB["env"], "DRAFT": "examples/broken/eagle3-no-lm-head"}
    done = shell(few(GITHUB_STEPS["judge", "every check"]["run"]), tmp_path, **env, **more)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "::error " in done.stdout
    assert "vocabulary.lm-head" in summary.read_text()
    sarif = json.loads((tmp_path / "draft.sarif").read_text())
    assert [item["ruleId"] for item in sarif["runs"][0]["results"]] == ["vocabulary.lm-head"]
    # What later steps take up is what this one wrote.
    uses = {step["uses"].split("@")[0]: step for step in GITHUB["jobs"]["judge"]["steps"] if "uses" in step}
    assert uses["github/codeql-action/upload-sarif"]["with"]["sarif_file"] == "draft.sarif"
    assert uses["github/codeql-action/upload-sarif"]["if"] == uses["actions/upload-artifact"]["if"] == "always()"
    kept = {path.name for path in tmp_path.glob(uses["actions/upload-artifact"]["with"]["path"])}
    assert kept == {"draft.json", "draft.html", "draft.sarif"}
    assert GITHUB["jobs"]["judge"]["permissions"]["security-events"] == "write"


def test_github_passes_the_example_as_it_stands(tmp_path: Path) -> None:
    done = shell(GITHUB_STEPS["config", "configuration and headers"]["run"], tmp_path, **GITHUB["env"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_github_jobs_need_jobs_that_exist_and_nights_are_apart() -> None:
    jobs = GITHUB["jobs"]
    for body in jobs.values():
        assert body.get("needs", "fuzz") in jobs
    # YAML 1.1 reads the key `on` as true.
    assert {"schedule", "pull_request"} <= set(GITHUB[True])
    for name in ("config", "judge"):
        assert jobs[name]["if"] == "github.event_name != 'schedule'"
    for name in ("fuzz", "join"):
        assert "github.event_name == 'schedule'" in jobs[name]["if"]


def test_the_nights_command_is_the_one_that_is_documented_and_tested() -> None:
    command = GITHUB_STEPS["fuzz", "fuzz"]["run"]
    page = (ROOT / "docs" / "fuzzing.md").read_text()
    assert command in page
    (line,) = GITLAB["fuzz"]["script"]
    as_github = line.replace("$((CI_NODE_INDEX - 1))", "${{ matrix.worker }}").replace("$CI_NODE_TOTAL", "4")
    assert as_github == command
    assert GITLAB["fuzz"]["parallel"] == len(GITHUB["jobs"]["fuzz"]["strategy"]["matrix"]["worker"]) == 4
    documented = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])["jobs"]
    for job in ("fuzz", "join"):
        for ours, theirs in zip(GITHUB["jobs"][job]["steps"], documented[job]["steps"], strict=True):
            assert ours.get("uses") == theirs.get("uses")
    for pin in ("hypofuzz==25.11.1", "hypothesis==6.148.7"):
        assert pin in page
        assert any(pin in step.get("run", "") for step in GITHUB["jobs"]["fuzz"]["steps"])


@pytest.mark.parametrize(
    "install", [GITHUB["env"]["INSTALL"], GITLAB["variables"]["INSTALL"]], ids=["github", "gitlab"]
)
def test_what_is_installed_exists(install: str) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings a TOML reader")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"\.\[(.+)\]", install)[0].split(",")
    assert set(named) <= set(extras)
    for option, value in zip(install.split(), install.split()[1:], strict=False):
        if option == "-c":
            assert (ROOT / value).is_file()


# --- GitLab ---


@pytest.mark.parametrize("job", ["config", "judge"])
def test_gitlab_runs_and_keeps_its_reports(job: str, tmp_path: Path) -> None:
    (command,) = GITLAB[job]["script"]
    variables = {name: value for name, value in GITLAB["variables"].items() if "CI_PROJECT_DIR" not in value}
    done = shell(command if job == "config" else few(command), tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    artifacts = GITLAB[job].get("artifacts", {"paths": [], "reports": {}})
    for name in (*artifacts["paths"], *artifacts["reports"].values()):
        assert (tmp_path / name).stat().st_size > 100
    assert GITLAB[job]["stage"] in GITLAB["stages"]
    assert GITLAB[GITLAB[job]["extends"]]["before_script"] == ["pip install $INSTALL"]


# --- before a commit ---


def test_the_hook_refuses_what_a_configuration_shows(tmp_path: Path) -> None:
    (repo,) = yaml.safe_load((RECIPES / "pre-commit-config.yaml").read_text())["repos"]
    (chosen,) = repo["hooks"]
    assert chosen["id"] == HOOK["id"]
    # A project's own settings must not reach it.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise AssertionError('read')")
    done = shell(shlex.join([*shlex.split(HOOK["entry"]), *chosen["args"]]), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((GOOD / "config.json").read_text())
    del config["rope_theta"]
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytest.ini").write_text("[pytest]\ndraft_model = draft\n")
    done = shell(HOOK["entry"], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rope_theta is not stated" in done.stdout


@pytest.mark.parametrize(
    ("file", "runs"),
    [
        ("config.json", True),
        ("drafts/mine/config.json", True),
        ("drafts/mine/model-00001-of-00002.safetensors", True),
        ("drafts/mine/model.safetensors.index.json", True),
        ("drafts/mine/hf_quant_config.json", True),
        ("src/my_config.json", False),
        ("src/config.json.py", False),
        ("README.md", False),
    ],
)
def test_the_hook_runs_where_a_draft_changed(file: str, runs: bool) -> None:
    assert (re.search(HOOK["files"], file) is not None) is runs


def test_the_hook_takes_no_longer_than_a_commit_may(tmp_path: Path) -> None:
    """Processor time, for the machine may be busy with the rest of this suite."""
    command = shlex.join([*shlex.split(HOOK["entry"]), f"--draft-model={GOOD}"])
    # Compiled files are written as they are for a user.
    more = {"PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}

    def seconds(command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert shell(command, tmp_path, **more).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seconds(command)
    # The best of several: a neighbour only ever makes a run slower.
    assert any(seconds(command) < 0.6 for _ in range(6))


# --- after an export ---


def test_the_gate_returns_the_report_or_lists_the_findings() -> None:
    report = gate(GOOD, checks="vocabulary,rope")
    assert isinstance(report, Report)
    assert report.ok
    with pytest.raises(RejectedDraftError) as caught:
        gate(BROKEN, engines=["sglang"], checks="vocabulary")
    text = str(caught.value)
    assert text.startswith(
        f"{BROKEN}: 1 of 6 checks failed\n  error vocabulary.lm-head: lm_head.weight is not in the weights\n"
    )
    assert "    sglang: serves wrong: " in text
    assert "vllm" not in text
    assert caught.value.report["vocabulary.lm-head"].status == "failed"
    assert isinstance(caught.value, DraftError)
    with pytest.raises(DraftError, match=r"holds no config\.json"):
        gate(RECIPES)


def test_a_check_that_broke_stops_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_specdecode.checks import registry

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(registry, "_require", broken)
    with pytest.raises(RejectedDraftError, match=r"(?m)^  error config\.family: the check itself broke, .*a\\nb$"):
        gate(GOOD, checks="config.family")


class Model:
    """What an export script has: something that writes a draft."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def save_pretrained(self, directory: str, *, state_dict: object = None) -> None:
        assert state_dict == "state"
        write_tiny(directory, "eagle3", **self.changes)


@pytest.fixture
def recipe() -> ModuleType:
    """examples/ci/save_checked.py."""
    found = importlib.util.spec_from_file_location("save_checked", RECIPES / "save_checked.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_only_what_passes_is_saved(recipe: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "epoch_1"
    assert recipe.save_checked(Model(), place, engines=["sglang"], state_dict="state").ok
    assert {path.name for path in place.iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(RejectedDraftError, match=r"rope\.theta-stated"):
        recipe.save_checked(Model(rope_theta=...), tmp_path / "epoch_2", state_dict="state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_1", "epoch_2.rejected"]
    report = json.loads((tmp_path / "epoch_2.rejected" / "specdecode-report.json").read_text())
    assert report["drafts"][0]["status"] == "failed"
    # A second try that passes takes its place.
    recipe.save_checked(Model(), tmp_path / "epoch_2", state_dict="state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_1", "epoch_2"]


def test_the_script_gates_what_another_one_wrote(tmp_path: Path) -> None:
    readme = (RECIPES / "README.md").read_text()
    (command,) = re.findall(r"^    (python examples/ci/save_checked\.py .*)$", readme, re.MULTILINE)
    target = tmp_path / "path" / "of" / "the" / "target"
    target.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 32, "rope_theta": 1e4}
    (target / "config.json").write_text(json.dumps(config))
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "epoch_9").symlink_to(BROKEN)
    done = shell(command, tmp_path)
    assert done.returncode == 1
    assert "  error vocabulary.lm-head: lm_head.weight is not in the weights\n" in done.stderr
    good = shell(f"python examples/ci/save_checked.py {GOOD}", tmp_path)
    assert (good.returncode, good.stderr) == (0, "")


def test_the_readme_names_every_file_and_no_other() -> None:
    named = set(re.findall(r"^\| `(.+?)` \|", (RECIPES / "README.md").read_text(), re.MULTILINE))
    assert named | {"README.md"} == {path.name for path in RECIPES.iterdir() if path.is_file()}
