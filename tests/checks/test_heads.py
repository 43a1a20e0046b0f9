"""Counts of drafts that are made of heads.

What goes wrong without this file: a head that is never run because nobody counts it, a tree that stops for want of a list entry, and a key
that its writer misspelled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import checks, testing
from pytest_specdecode.api import open_context
from pytest_specdecode.findings import CheckResult

Tensors = dict[str, torch.Tensor]


def _run(path: Path) -> CheckResult:
    return checks.run(checks.REGISTRY["heads.counts"], open_context(path))


def _write(path: Path, family: str, edit: Callable[[Tensors], Any] | None = None, **changes: Any) -> Path:
    testing.write_tiny(path, family, edit=edit)
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return path


def _drop(*starts: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(starts)]:
            del tensors[name]

    return edit


CASES = [
    ("medusa", None, {"num_heads": 4}, "num_heads is 4, the weights hold 3 of lm_heads; 3 is not there; also blocks"),
    ("medusa", None, {"num_heads": 2}, "num_heads is 2, the weights hold 3 of lm_heads; also blocks"),
    ("medusa", _drop("blocks.1."), {}, "num_heads is 3, the weights hold 2 of blocks; 1 is not there"),
    ("medusa", None, {"num_hidden_layers": 2}, "num_hidden_layers is 2, head 0 holds 1 blocks; 2 more heads differ"),
    ("medusa", None, {"medusa_num_heads": 5}, "medusa_num_heads and num_heads state one number with different values"),
    (
        "hydra",
        None,
        {"hydra_num_heads": 4},
        "hydra_num_heads is 4, the weights hold 3 of hydra_lm_head; 3 is not there; also hydra_mlp",
    ),
    (
        "hydra",
        None,
        {"hydra_num_heads": 2},
        "hydra_num_heads is 2, the weights hold 3 of hydra_lm_head; also hydra_mlp",
    ),
    ("hydra", None, {"hydra_num_layers": 1}, "hydra_num_layers is 1, head 0 holds 2 blocks; 2 more heads differ"),
    ("mlp-speculator", None, {"n_predict": 4}, "top_k_tokens_per_head has 3 entries for 4 stages"),
    (
        "mlp-speculator",
        None,
        {"n_predict": 2, "top_k_tokens_per_head": [4, 3]},
        "n_predict is 2, the weights hold 3 of emb; also proj, ln, head",
    ),
    (
        "mlp-speculator",
        None,
        {"top_k_tokens_per_head": ..., "top_k_tokesns_per_head": [4, 3, 2]},
        "top_k_tokens_per_head is not stated; top_k_tokesns_per_head is a misspelling that nothing reads",
    ),
    ("mlp-speculator", _drop("head.2."), {}, "n_predict is 3, the weights hold 2 of head; 2 is not there"),
]


@pytest.mark.parametrize(("family", "edit", "changes", "text"), CASES)
def test_a_count_that_does_not_fit(
    family: str, edit: Callable[[Tensors], Any] | None, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    result = _run(_write(tmp_path, family, edit, **changes))
    assert result.status == "failed"
    assert text in [finding.message for finding in result.findings]
    assert all(finding.where for finding in result.findings)


@pytest.mark.parametrize(
    ("family", "edit", "changes"),
    [
        # Stages that share their tensors store them once, and the projection behind the first once more.
        (
            "mlp-speculator",
            _drop("emb.1", "emb.2", "ln.1", "ln.2", "head.1", "head.2", "proj.2"),
            {"tie_weights": True},
        ),
        ("mlp-speculator", None, {"tie_weights": True}),
        # 0 stands for emb_dim.
        ("mlp-speculator", None, {"inner_dim": 0}),
        ("medusa", None, {"medusa_num_heads": 3}),
        ("hydra", None, {}),
    ],
)
def test_counts_that_fit(
    family: str, edit: Callable[[Tensors], Any] | None, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert _run(_write(tmp_path, family, edit, **changes)).status == "passed"


def test_a_hydra_layer_in_place_of_the_heads_has_none_to_count(tmp_path: Path) -> None:
    config = testing.tiny_config("hydra", hydra_head_arch="eagle-attn", hydra_num_heads=1, hydra_num_layers=1)
    assert _run(testing.write_tiny(tmp_path, "hydra", config=config)).status == "passed"


def test_a_list_is_judged_without_weights(tmp_path: Path) -> None:
    path = _write(tmp_path, "mlp-speculator", top_k_tokens_per_head=[1])
    (path / "model.safetensors").unlink()
    assert _run(path).status == "failed"


@pytest.mark.parametrize("family", ["medusa", "hydra", "mlp-speculator"])
@pytest.mark.parametrize("value", ["3", [3], {}, None, True, 1 << 40, -1])
def test_a_count_of_another_type_raises_nothing(family: str, value: Any, tmp_path: Path) -> None:
    keys = {"medusa": "num_heads", "hydra": "hydra_num_heads", "mlp-speculator": "n_predict"}
    changes = {
        keys[family]: value,
        "top_k_tokens_per_head": value,
        "hydra_num_layers": value,
        "num_hidden_layers": value,
    }
    assert _run(_write(tmp_path, family, **changes)).status in ("failed", "inconclusive")
