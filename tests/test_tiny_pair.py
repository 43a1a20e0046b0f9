"""The trained pair in `examples/tiny-pair` is whole, fits together, and does what it is shipped for.

What goes wrong without this file: a trace of another target than the one beside it, a mask that counts tokens which the target did not
choose, a draft that was trained one way and is computed another (its accepted length falls to one), a script that no longer runs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.checkpoint import Checkpoint

PAIR = Path(__file__).resolve().parent.parent / "examples" / "tiny-pair"
DRAFTS = ("eagle3", "eagle3-mla", "dflash")
TRACES = sorted((PAIR / "trace").glob("hs_*.safetensors"))
#: Accepted lengths below this would mean that a draft is misread; the shipped ones are well above, see the example's README.
LEAST = 1.5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices of one round are so small that a second thread only waits, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The example's script as a module."""
    spec = importlib.util.spec_from_file_location("tiny_pair_train", PAIR / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def target(script: ModuleType) -> Any:
    """The shipped target in float32."""
    return script.open_target(PAIR / "target")


def test_what_is_shipped_stays_small() -> None:
    """Under 6 MB together, and nothing is missing."""
    assert {path.name for path in PAIR.iterdir() if path.is_dir()} - {"__pycache__"} == {"target", *DRAFTS, "trace"}
    assert len(TRACES) >= 8
    assert sum(file.stat().st_size for file in PAIR.rglob("*") if file.is_file()) < 6_000_000


@pytest.mark.parametrize("name", DRAFTS)
def test_a_shipped_draft_passes_beside_its_target(name: str) -> None:
    """Nothing fails and nothing warns."""
    report = check_draft(PAIR / name, target=PAIR / "target")
    assert not {"failed", "warned"} & {result.status for result in report}, str(report)
    assert open_draft(PAIR / name).spec is not None


def test_the_reduced_vocabulary_holds_the_end_of_a_text(script: ModuleType) -> None:
    """And its two maps are each other's image."""
    draft = open_draft(PAIR / "eagle3")
    images = draft.tensor("d2t") + torch.arange(len(draft.tensor("d2t")))
    assert torch.equal(draft.tensor("t2d").nonzero().squeeze(1), images)
    assert script.EOS in images


@pytest.mark.parametrize("file", TRACES, ids=lambda file: str(file.stem))
def test_a_trace_is_the_targets_own_greedy_text(file: Path, script: ModuleType, target: Any) -> None:
    """Its states are this target's to the last bit of float16 but one, and the last of them gives each token that the mask counts."""
    trace = load_file(file)
    assert {name: value.dtype for name, value in trace.items()} == {
        "token_ids": torch.int64,
        "hidden_states": torch.float16,
        "loss_mask": torch.bool,
    }
    with safe_open(file, framework="pt") as handle:
        said = handle.metadata()
    assert said == {"format": "pt", "layer_ids": "[1, 2, 3]", "last_state": "raw", "prompt_length": "48"}
    ids, mask, stored = trace["token_ids"], trace["loss_mask"], trace["hidden_states"].float()
    assert stored.shape == (len(ids), 4, 128)
    assert mask.tolist() == [place >= script.PROMPT for place in range(len(ids))]
    states, _ = target(ids.unsqueeze(0))
    assert torch.allclose(stored, states[0][:, [1, 2, 3, 4]], rtol=2e-3, atol=2e-3)
    chosen = target.logits(stored[:, -1]).argmax(-1)
    assert torch.equal(chosen[:-1][mask[1:]], ids[1:][mask[1:]])


@pytest.mark.parametrize("name", DRAFTS)
def test_a_shipped_draft_speeds_its_target_up(name: str, script: ModuleType, target: Any) -> None:
    """Real speculative decoding gives the recorded text, in clearly fewer rounds than tokens, from the trace's rounding too."""
    drafter = script.open_drafter(PAIR / name, target)
    gained: list[int] = []
    for file in TRACES[:3]:
        text = load_file(file)["token_ids"].tolist()
        plain, rounded = (
            script.speculate(target, drafter, text[: script.PROMPT], len(text), rounded=value)
            for value in (False, True)
        )
        assert plain.ids[: len(text)] == text
        assert plain.proposed == rounded.proposed
        gained += plain.gained
    assert sum(gained) / len(gained) > LEAST


def test_the_script_writes_all_five_directories(tmp_path: Path, script: ModuleType) -> None:
    """With two steps a model; each draft opens, and the trace is in the layout of the shipped one."""
    script.main(["--steps", "2", "--out", str(tmp_path), "--threads", "1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dflash", "eagle3", "eagle3-mla", "target", "trace"]
    for name in DRAFTS:
        report = check_draft(tmp_path / name, target=tmp_path / "target")
        assert not {"failed", "warned"} & {result.status for result in report}, str(report)
        fresh, shipped = (
            {stored: header.shape for stored, header in Checkpoint.open(place / name).tensors.items()}
            for place in (tmp_path, PAIR)
        )
        assert fresh == shipped
    for file in (tmp_path / "trace").iterdir():
        assert set(load_file(file)) == {"token_ids", "hidden_states", "loss_mask"}
