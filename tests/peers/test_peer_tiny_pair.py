"""The trained pair of `examples/tiny-pair` under other people's code: transformers runs the target, dflash the block draft, speculators
reads the trace.

What these catch: a target that is not the Qwen3 it says it is, so that its states mean nothing; a trace that training stacks would not
take; a block draft whose accepted lengths hold in our own loop only.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

PAIR = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny-pair"
TRACES = sorted((PAIR / "trace").glob("hs_*.safetensors"))


@pytest.fixture(scope="module")
def qwen3(transformers: ModuleType) -> Any:
    """The target as transformers loads it, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_pair_train", PAIR / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", TRACES, ids=lambda file: str(file.stem))
def test_transformers_computes_the_traces_states_and_text(file: Path, qwen3: Any) -> None:
    """The states entering layers 1, 2 and 3; the last one, after the final norm here, through it; and greedy generation."""
    trace = load_file(file)
    ids, mask, stored = trace["token_ids"], trace["loss_mask"], trace["hidden_states"].float()
    with torch.no_grad():
        out = qwen3(ids.unsqueeze(0), output_hidden_states=True)
    assert type(qwen3).__name__ == "Qwen3ForCausalLM"
    for place, layer in enumerate((1, 2, 3)):
        assert torch.allclose(stored[:, place], out.hidden_states[layer][0], rtol=2e-3, atol=2e-3)
    assert torch.allclose(qwen3.model.norm(stored[:, 3]), out.hidden_states[4][0], rtol=1e-2, atol=1e-2)
    chosen = out.logits[0].argmax(-1)
    assert torch.equal(chosen[:-1][mask[1:]], ids[1:][mask[1:]])


def test_dflash_generates_with_the_same_accepted_lengths(
    script: ModuleType, qwen3: Any, transformers: ModuleType
) -> None:
    """Round by round but the last, which the package cuts to what is left to generate."""
    zlab = pytest.importorskip("dflash.model", reason="dflash is not installed; see tests/peers/requirements*.txt")
    model = zlab.DFlashDraftModel.from_pretrained(PAIR / "dflash", dtype=torch.float32).eval()
    target = script.open_target(PAIR / "target")
    drafter = script.open_drafter(PAIR / "dflash", target)
    for file in TRACES[:3]:
        text = load_file(file)["token_ids"]
        prompt = text[: script.PROMPT].unsqueeze(0)
        theirs = zlab.dflash_generate(model, qwen3, prompt, len(text) - script.PROMPT, None, return_stats=False)
        assert torch.equal(theirs[0], text)
        stats = _lengths(zlab, model, qwen3, prompt, len(text) - script.PROMPT)
        ours = script.speculate(target, drafter, prompt[0].tolist(), len(text)).gained
        assert stats[:-2] == ours[: len(stats) - 2]
        assert len(stats) == len(ours)


def _lengths(zlab: Any, model: Any, target: Any, prompt: torch.Tensor, count: int) -> list[int]:
    """What the package says of its rounds; its clock is CUDA's, so that it is stopped here."""
    clock, zlab._cuda_time = zlab._cuda_time, lambda: 1.0
    try:
        found: list[int] = zlab.dflash_generate(
            model, target, prompt, count, None, return_stats=True
        ).acceptance_lengths
    finally:
        zlab._cuda_time = clock
    return found


def test_speculators_takes_the_trace(transformers: ModuleType) -> None:
    """Its own check of a payload finds nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offline = pytest.importorskip("speculators.data_generation.offline", reason="speculators is not installed")
    assert offline.get_existing_hidden_state_indices(PAIR / "trace") == list(range(len(TRACES)))
    for file in TRACES:
        trace = load_file(file)
        offline.check_hidden_states(trace, trace["token_ids"].tolist())
