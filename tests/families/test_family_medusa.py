"""Medusa heads under their three naming schemes.

What these catch: a scheme's names not known, or a block taken for a head; the pickle not found; a bias that is due and not read; the map of
tokens read as offsets, missing, or out of range; sizes that Medusa's own configuration leaves out; one head for all.

No library that serves Medusa runs here (vLLM dropped it with 0.33), so the forward is held against the formula written out in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.report import Report

OWN = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
#: The same draft as vLLM's class states it.
VLLM: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": 16,
    "vocab_size": 40,
    "num_heads": 3,
    "num_hidden_layers": 2,
    "medusa_fc_bias": True,
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def heads(rows: int = 40) -> dict[str, Tensor]:
    """Canonical names: three heads of two blocks."""
    found = {}
    for head in range(3):
        for place in range(2):
            found[f"blocks.{head}.layers.{place}.weight"] = drawn(10 * head + place, 16, 16)
            found[f"blocks.{head}.layers.{place}.bias"] = drawn(10 * head + place + 5, 16)
        found[f"lm_heads.{head}.weight"] = drawn(100 + head, rows, 16)
    return found


def own(name: str) -> str:
    kind, head, *rest = name.split(".")
    return f"{head}.2.weight" if kind == "lm_heads" else f"{head}.{rest[1]}.linear.{rest[2]}"


def modelopt(name: str) -> str:
    kind, head, *rest = name.split(".")
    return f"medusa_heads.{head}." + (
        "lm_head.weight" if kind == "lm_heads" else f"medusa_layers.{rest[1]}.linear.{rest[2]}"
    )


def written(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], rename: Callable[[str], str] = str) -> Path:
    return testing.write_checkpoint(path, config, tensors, rename=rename)


def expected(head: int, x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    x = x.double()
    for place in range(2):
        y = (
            x @ tensors[f"blocks.{head}.layers.{place}.weight"].double().T
            + tensors[f"blocks.{head}.layers.{place}.bias"].double()
        )
        x = x + y / (1 + torch.exp(-y))
    return x @ tensors[f"lm_heads.{head}.weight"].double().T


@pytest.mark.parametrize("scheme", [str, own, modelopt, lambda name: f"medusa_heads.{name}"])
def test_a_head_under_every_scheme(tmp_path: Path, scheme: Callable[[str], str]) -> None:
    draft = open_draft(written(tmp_path, VLLM, heads(), scheme))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    x = drawn(7, 5, 16).double()
    for head in range(3):
        layer: Any = draft.layer(head, dtype=torch.float64)
        torch.testing.assert_close(layer.forward(x), expected(head, x, heads()), rtol=1e-12, atol=1e-12)
    assert check_draft(tmp_path).ok


def test_medusa_s_own_pickle_and_configuration(tmp_path: Path) -> None:
    """Neither width nor vocabulary is stated, no label, and the weights are a pickle under a name of its own."""
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    torch.save({own(name): value for name, value in heads().items()}, tmp_path / "medusa_lm_head.pt")
    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert draft.spec.family == "medusa"
    assert (draft.spec.hidden_size, draft.spec.vocabulary.vocab_size, len(draft.spec.layers)) == (16, 40, 3)
    x = drawn(7, 5, 16).double()
    layer: Any = draft.layer(2, dtype=torch.float64)
    torch.testing.assert_close(layer.forward(x), expected(2, x, heads()), rtol=1e-12, atol=1e-12)
    report = check_draft(tmp_path)
    assert report.ok
    assert {result.id for result in report if result.status == "warned"} == {"files.pickle", "config.architectures"}


def test_a_bias_that_no_flag_announces_is_reported(tmp_path: Path) -> None:
    report = check_draft(written(tmp_path, {**VLLM, "medusa_fc_bias": False}, heads()))
    assert report["weights.biases"].status == "failed"


def test_a_head_beyond_the_count_is_reported(tmp_path: Path) -> None:
    report = check_draft(written(tmp_path, {**VLLM, "num_heads": 2}, heads()))
    counted = report["config.num-hidden-layers"]
    assert (counted.status, counted.findings[0].where) == ("failed", "config.json: num_heads")
    assert report["weights.unexpected"].status == "failed"


REDUCED = {**VLLM, "truncated_vocab_size": 24}
IDS = torch.arange(24) + 8


def judged(path: Path, token_map: Tensor | None, rows: int = 24) -> Report:
    tensors = heads(rows) if token_map is None else {**heads(rows), "token_map": token_map}
    return check_draft(written(path, REDUCED, tensors))


def test_a_reduced_vocabulary_has_a_map_of_target_ids(tmp_path: Path) -> None:
    assert judged(tmp_path, IDS)["vocabulary.d2t"].status == "passed"


@pytest.mark.parametrize(
    ("token_map", "text"),
    [
        (None, "token_map is not in the weights"),
        (IDS.float(), "not of an integer type"),
        (IDS[:-1], "another shape"),
        (IDS + 12, "outside the target's vocabulary of 40"),
        (IDS.clamp(max=20), "twice"),
    ],
)
def test_a_map_that_is_none_is_reported(tmp_path: Path, token_map: Tensor | None, text: str) -> None:
    result = judged(tmp_path, token_map)["vocabulary.d2t"]
    assert result.status == "failed"
    assert text in result.message
    assert "token_map" in result.findings[0].where


def test_whole_heads_under_a_map_are_cut_by_it(tmp_path: Path) -> None:
    assert judged(tmp_path, IDS, rows=40).ok
    draft = open_draft(tmp_path)
    x = drawn(7, 5, 16).double()
    layer: Any = draft.layer(1, dtype=torch.float64)
    torch.testing.assert_close(layer.forward(x), expected(1, x, heads())[:, IDS], rtol=1e-12, atol=1e-12)


def test_one_head_for_all(tmp_path: Path) -> None:
    """`original_lm_head`: the first head's tensor is every head's, and a factor may lie on the logits."""
    tensors = {name: value for name, value in heads().items() if not name.startswith(("lm_heads.1", "lm_heads.2"))}
    config = {**VLLM, "original_lm_head": True, "logit_scale": 0.5}
    draft = open_draft(written(tmp_path, config, tensors))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    x = drawn(7, 5, 16).double()
    layer: Any = draft.layer(2, dtype=torch.float64)
    shared = {**heads(), "lm_heads.2.weight": heads()["lm_heads.0.weight"]}
    torch.testing.assert_close(layer.forward(x), 0.5 * expected(2, x, shared), rtol=1e-12, atol=1e-12)
