"""Drafts and targets that are named as they are on the Hub, against a local server that speaks its API.

Caught here: gigabytes that are fetched to judge a configuration; weights that are fetched twice, by a second run or a second worker; a file
that is left in place half fetched; requests in offline mode; a token that is not sent; a network's failure that is taken for the draft's;
a name that is taken for a path or a path for a name; errors that are tracebacks; listings and notes that make the reader write or fetch
where they please.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repo

from pytest_specdecode import hub
from pytest_specdecode.testing import tiny_config, write_sparse, write_tiny

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub, which the hub extra brings")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

GOOD, OLD, BIG, TARGET = (letter * 40 for letter in "abcd")
CONFIG_ONLY = "--draft-checks=config,rope,taps,files"
VALUES = "--draft-checks=weights.finite"

#: A DFlash draft of 2.1 GB, for Qwen3-8B.
QWEN = {
    **tiny_config("dflash"),
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of what lies on the server, by commit."""
    root = tmp_path_factory.mktemp("on-the-hub")
    found = {commit: root / commit for commit in (GOOD, OLD, BIG, TARGET)}
    write_tiny(found[GOOD], "eagle3")
    write_tiny(found[OLD], "eagle3", edit=lambda tensors: tensors.pop("lm_head.weight"))
    write_sparse(found[BIG], QWEN, "dflash")
    found[TARGET].mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 16, "rope_theta": 1e4}
    (found[TARGET] / "config.json").write_text(json.dumps(config))
    (found[TARGET] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "padding": "x" * 200_000}))
    return found


@pytest.fixture
def server(files: dict[str, Path]) -> Iterator[Hub]:
    """The server, with repositories of its own for each test."""
    drafts = Repo(commits={GOOD: files[GOOD], OLD: files[OLD]}, refs={"main": GOOD, "v0": OLD, "refs/pr/1": OLD})
    running = Hub(
        {
            "org/draft": drafts,
            "org/big": Repo(commits={BIG: files[BIG]}, refs={"main": BIG}),
            "org/target": Repo(commits={TARGET: files[TARGET]}, refs={"main": TARGET}),
        }
    )
    yield running
    running.close()


@pytest.fixture
def environment(server: Hub, tmp_path: Path) -> dict[str, str]:
    """The environment of a user of that server, whose caches are empty."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GITHUB_", "CI"))}
    more = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "COLUMNS": "100"}
    return own | more | {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture
def judge(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run pytest in an empty directory as a user would, without the plugins that only cost time."""
    (tmp_path / "here").mkdir()

    def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        fast = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:cov"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *fast, *args],
            cwd=tmp_path / "here",
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def resolve(environment: dict[str, str], tmp_path: Path) -> Callable[..., list[str]]:
    """What a script gets for each text: the directory, or the error's kind and message."""
    code = (
        "import sys\nfrom pytest_specdecode import hub\nfor text in sys.argv[1:]:\n"
        "    try: print(hub.resolve(text))\n    except Exception as error: print(f'{type(error).__name__}: {error}')"
    )

    def run(*texts: str, **more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *texts],
            env=environment | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == len(texts), done.stdout
        return done.stdout.splitlines()

    return run


def assert_refused(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    """A usage error in one line that holds `texts`."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert done.returncode == 4, lines
    assert len(lines) == 1, lines
    for text in ("ERROR: ", *texts):
        assert text in lines[0]


# --- what is fetched ---


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files")
def test_config_and_header_of_gigabytes_cost_kilobytes(server: Hub, judge: Run, files: dict[str, Path]) -> None:
    assert (files[BIG] / "model.safetensors").stat().st_size > 2e9
    done = judge("--draft-model=org/big", CONFIG_ONLY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "big: dflash (plain), 5 layers, 1.02 B parameters, bfloat16" in done.stdout
    assert f"on the Hub: org/big is commit {BIG[:12]}" in done.stdout
    assert "files.readable" not in done.stdout
    assert 1000 < server.sent < 1_000_000
    assert server.downloads("model.safetensors") == 1
    server.forget()
    again = judge("--draft-model=org/big", CONFIG_ONLY)
    assert again.returncode == 0
    # Which commit the branch is, and nothing else.
    about = {line for line in server.asked if "org/big" in line}
    assert about == {"HEAD /org/big/resolve/main/config.json"}
    assert server.sent < 100


def test_the_results_are_those_of_the_directory(judge: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Every check, values and all."""
    statuses = []
    for name, model in (("hub", "org/draft@v0"), ("disk", str(files[OLD]))):
        file = tmp_path / f"{name}.json"
        judge(f"--draft-model={model}", f"--draft-report={file}")
        (draft,) = json.loads(file.read_text())["drafts"]
        statuses.append({check["id"]: (check["status"], check["message"]) for check in draft["checks"]})
    assert statuses[0] == statuses[1]
    assert statuses[0]["vocabulary.lm-head"] == ("failed", "lm_head.weight is not in the weights")


def test_values_are_fetched_once_and_said_to_be(server: Hub, judge: Run, files: dict[str, Path]) -> None:
    done = judge("--draft-model=org/draft", VALUES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fetching model.safetensors of org/draft, " in done.stdout
    # The header, then the whole file.
    assert server.downloads("model.safetensors") == 2
    assert server.sent > (files[GOOD] / "model.safetensors").stat().st_size
    server.forget()
    assert judge("--draft-model=org/draft", VALUES).returncode == 0
    assert server.downloads("model.safetensors") == 0


def test_workers_fetch_nothing_twice(server: Hub, judge: Run) -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    done = judge("--draft-model=org/draft", "--draft-checks=weights,vocabulary", "-n2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.downloads("model.safetensors") == 2
    assert sum("/api/models/" in line for line in server.asked) == 1
    assert server.asked.count("HEAD /org/draft/resolve/main/config.json") == 2


def test_a_target_costs_what_is_read_of_it(server: Hub, judge: Run) -> None:
    done = judge("--draft-model=org/draft", "--draft-target=hf://org/target@main", "--draft-checks=target.widths")
    assert "fetching" not in done.stdout
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert server.downloads("tokenizer.json") == 0
    judge("--draft-model=org/draft", "--draft-target=org/target", "--draft-checks=vocabulary.common-tokens")
    assert server.downloads("tokenizer.json") == 1


def test_a_revision_has_a_label_of_its_own(judge: Run) -> None:
    args = [
        "--draft-model=hf://org/draft@v0",
        "--draft-model=org/draft@main",
        "--draft-checks=vocabulary.lm-head",
        "-v",
    ]
    done = judge(*args)
    assert done.returncode == 1
    assert "draft-model::test_draft[draft@v0-vocabulary.lm-head] FAILED" in done.stdout
    assert "draft-model::test_draft[draft@main-vocabulary.lm-head] PASSED" in done.stdout
    alone = judge("--draft-model=org/draft@refs/pr/1", "draft-model::test_draft[draft@refs_pr_1-vocabulary.lm-head]")
    assert (alone.returncode, "1 failed" in alone.stdout) == (1, True)


def test_what_another_tool_has_fetched_is_not_fetched_again(
    server: Hub, judge: Run, environment: dict[str, str]
) -> None:
    code = "from huggingface_hub import hf_hub_download as get; get('org/draft', 'model.safetensors')"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=60)
    server.forget()
    assert judge("--draft-model=org/draft", VALUES).returncode == 0
    assert server.downloads("model.safetensors") == 0


# --- what goes wrong ---


def test_what_is_not_there_is_said_in_one_line(server: Hub, resolve: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "README.md").write_text("nothing else")
    server.repos["org/bare"] = Repo(commits={GOOD: tmp_path / "bare"}, refs={"main": GOOD})
    said = resolve("org/none", "org/draft@v9", "org/bare", "hf://-", "hf://a/b/c")
    assert said == [
        f"HubError: the model org/none is not on the Hub ({server.url}), or is private and HF_TOKEN does not open it",
        "HubError: the model org/draft@v9 has no such revision",
        "HubError: the model org/bare holds no config.json",
        "HubError: is no reference to a model; hf://org/name or hf://org/name@revision is due",
        "HubError: is no reference to a model; hf://org/name or hf://org/name@revision is due",
    ]


def test_a_gated_model_needs_its_token(server: Hub, judge: Run, resolve: Callable[..., list[str]]) -> None:
    server.repos["org/draft"].is_gated = True
    refused = "HubError: the model org/draft is gated: ask for access on its page, and set HF_TOKEN"
    assert resolve("org/draft") == [refused]
    (place,) = resolve("org/draft", HF_TOKEN="hf_secret")
    assert Path(place, "config.json").exists()
    assert judge("--draft-model=org/draft", CONFIG_ONLY, HF_TOKEN="hf_secret").returncode == 0


def test_no_network_is_no_fault_of_the_draft(server: Hub, judge: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert_refused(judge("--draft-model=org/draft", HF_ENDPOINT=nobody), "--draft-model=org/draft: ", nobody)
    # Headers came, values do not.
    assert judge("--draft-model=org/draft", CONFIG_ONLY).returncode == 0
    assert judge("--draft-model=org/draft", CONFIG_ONLY, HF_ENDPOINT=nobody).returncode == 0
    server.is_cut = True
    done = judge("--draft-model=org/draft", VALUES)
    assert done.returncode == 0
    assert "1 inconclusive" in done.stdout
    assert "model.safetensors cannot be fetched" in done.stdout
    server.is_cut = False
    done = judge("--draft-model=org/draft", VALUES)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True)


def test_usage_errors_name_the_option_and_leave_with_4(judge: Run, tmp_path: Path) -> None:
    assert_refused(
        judge("--draft-model=org/none"), "--draft-model=org/none: there is no such directory, and the model org/none"
    )
    assert_refused(
        judge("--draft-model=org/draft", "--draft-target=hf://org/none"), "--draft-target=hf://org/none: the model"
    )
    without = tmp_path / "without"
    without.mkdir()
    (without / "huggingface_hub.py").write_text("raise ImportError('not here')")
    done = judge("--draft-model=org/draft", PYTHONPATH=str(without))
    assert_refused(done, "needs huggingface_hub: pip install 'pytest-specdecode[hub]'")


def test_a_server_without_range_requests_is_refused(server: Hub, judge: Run) -> None:
    server.answers_ranges = False
    assert_refused(judge("--draft-model=org/draft", CONFIG_ONLY), "does not answer range requests")


# --- a name or a path ---


def test_what_is_a_name_and_what_a_path(tmp_path: Path) -> None:
    (tmp_path / "drafts" / "mine").mkdir(parents=True)
    for text in (
        "drafts/mine",
        "drafts/typo",
        "./org/name",
        "/org/name",
        "~/name",
        "name",
        "a/b/c",
        "org/",
        "org/na me",
    ):
        assert hub.parse(text, tmp_path) is None, text
    for text, repo, revision in (
        ("org/name", "org/name", None),
        ("org/name@v1", "org/name", "v1"),
        ("hf://drafts/mine", "drafts/mine", None),
        ("drafts/other@refs/pr/2", "drafts/other", "refs/pr/2"),
        ("hf://gpt2", "gpt2", None),
    ):
        assert hub.parse(text, tmp_path) == hub.Reference(repo=repo, revision=revision), text


def test_a_directory_of_that_name_wins(server: Hub, judge: Run, files: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(files[OLD], tmp_path / "here" / "org" / "draft")
    check = "--draft-checks=vocabulary.lm-head"
    assert judge("--draft-model=org/draft", check).returncode == 1
    assert server.asked == []
    assert_refused(judge("--draft-model=org/other", check), "--draft-model=org/other: cannot be opened: No such file")
    assert server.asked == []
    assert judge("--draft-model=hf://org/draft", check).returncode == 0
    (tmp_path / "here" / "pytest.ini").write_text("[pytest]\ndraft_model = hf://org/draft@main\n")
    assert judge(check).returncode == 0


# --- offline ---


def test_offline_is_what_was_fetched_and_asks_nothing(server: Hub, judge: Run) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    done = judge("--draft-model=org/draft", CONFIG_ONLY, **offline)
    assert_refused(done, "config.json is not in the cache, and HF_HUB_OFFLINE keeps from fetching it")
    assert server.asked == []
    judge("--draft-model=org/draft", CONFIG_ONLY)
    server.forget()
    done = judge("--draft-model=org/draft", "--draft-checks=files,weights.finite", "-rs", **offline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.safetensors is not in the cache, and HF_HUB_OFFLINE" in done.stdout
    assert server.asked == []


def test_offline_reads_the_hubs_own_cache(server: Hub, judge: Run, environment: dict[str, str]) -> None:
    code = "from huggingface_hub import hf_hub_download as get; [get('org/draft', f'{n}') for n in ('config.json', 'model.safetensors')]"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=60)
    server.forget()
    done = judge("--draft-model=org/draft", VALUES, HF_HUB_OFFLINE="1")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert server.asked == []


def test_offline_a_shard_that_was_never_fetched_is_no_fault_of_the_draft(
    server: Hub, judge: Run, environment: dict[str, str], files: dict[str, Path], tmp_path: Path
) -> None:
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    shutil.copy(files[GOOD] / "config.json", sharded)
    index = {"weight_map": {"fc.weight": "model-00001-of-00001.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    server.repos["org/sharded"] = Repo(commits={GOOD: sharded}, refs={"main": GOOD})
    code = (
        "from huggingface_hub import hf_hub_download as get\n"
        "for name in ('config.json', 'model.safetensors.index.json'): get('org/sharded', name)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=60)
    done = judge("--draft-model=org/sharded", CONFIG_ONLY, HF_HUB_OFFLINE="1")
    assert_refused(done, "is in the cache without model-00001-of-00001.safetensors, and HF_HUB_OFFLINE")


# --- the directory ---


def test_a_file_that_left_the_cache_is_fetched_again(
    server: Hub, judge: Run, resolve: Callable[..., list[str]]
) -> None:
    assert judge("--draft-model=org/draft", VALUES).returncode == 0
    (place,) = resolve("org/draft")
    linked = Path(place, "model.safetensors")
    linked.resolve().unlink()
    server.forget()
    done = judge("--draft-model=org/draft", VALUES)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert server.downloads("model.safetensors") == 2


def test_names_that_a_listing_makes_up_are_not_followed(
    server: Hub, resolve: Callable[..., list[str]], tmp_path: Path
) -> None:
    made_up = ("../evil", "sub/model.safetensors", "..", ".hub", "/etc/evil", "a\\b", ".hub/config.json", "")
    server.repos["org/draft"].names = made_up
    (place,) = resolve("org/draft")
    assert sorted(path.name for path in Path(place).iterdir()) == [".hub", "config.json", "model.safetensors"]
    assert not list(tmp_path.rglob("evil*"))


def test_a_note_elsewhere_is_not_followed(
    server: Hub, resolve: Callable[..., list[str]], judge: Run, tmp_path: Path
) -> None:
    """A checkpoint that somebody sends must not make this machine fetch."""
    (place,) = resolve("org/draft")
    shutil.copytree(place, tmp_path / "here" / "sent", symlinks=True)
    server.forget()
    done = judge("--draft-model=sent", CONFIG_ONLY)
    assert_refused(done, "is a stand-in outside the Hub's assets")
    assert server.asked == []
