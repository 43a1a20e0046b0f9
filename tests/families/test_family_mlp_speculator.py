"""The MLP speculator.

What these catch: `inner_dim` 0 read as a width; the mixing weights computed from another width or count; LayerNorm in place of a root mean
square with a bias; the tanh form of gelu; the input scaled in every stage, or not at all; tied stages asked for tensors of their own.

No library that serves it runs here (vLLM dropped it with 0.33), so the forward is held against the formula written out in float64.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_specdecode import check_draft, open_draft, testing


def expected(config: dict[str, Any], tensors: dict[str, Tensor], hidden: Tensor, tokens: list[Tensor]) -> list[Tensor]:
    """Logits of every stage, each state feeding the next."""
    inner = config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / config["n_predict"])
    emb_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
    state, logits = hidden, []
    if config["scale_input"]:
        state = state / (state.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(2)
    for stage, ids in enumerate(tokens):
        own, projection = (0, min(stage, 1)) if config["tie_weights"] else (stage, stage)
        part = {name: tensors[f"{name}.{own}.weight"].double() for name in ("emb", "head", "ln")}
        z = state @ tensors[f"proj.{projection}.weight"].double().T + emb_weight / state_weight * part["emb"][ids]
        z = z / (z.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * part["ln"] + tensors[f"ln.{own}.bias"].double()
        state = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
        logits.append(state @ part["head"].T)
    return logits


@pytest.mark.parametrize("inner_dim", [0, 48])
@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("scale_input", [True, False])
def test_every_stage(tmp_path: Path, inner_dim: int, tie_weights: bool, scale_input: bool) -> None:
    config = testing.tiny_config(
        "mlp-speculator", inner_dim=inner_dim, tie_weights=tie_weights, scale_input=scale_input
    )
    tensors = testing.random_tensors(config, "mlp-speculator", seed=2, dtype="float32")
    testing.write_checkpoint(tmp_path, config, tensors, rename=lambda name: f"speculator.{name}")
    draft = open_draft(tmp_path)
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(5, 64, generator=generator, dtype=torch.float64)
    tokens = [torch.randint(512, (5,), generator=generator) for _ in range(3)]
    due = expected(config, tensors, state, tokens)
    for stage in range(3):
        layer: Any = draft.layer(stage, dtype=torch.float64)
        torch.testing.assert_close(layer.forward(state, tokens[stage]), due[stage], rtol=1e-11, atol=1e-12)
        state = layer.step(state, tokens[stage])
    assert check_draft(tmp_path).ok


def test_tied_stages_may_store_their_tensors_again(tmp_path: Path) -> None:
    config = testing.tiny_config("mlp-speculator", tie_weights=True)
    tensors = testing.random_tensors(config, "mlp-speculator")
    assert set(tensors) == {
        "emb.0.weight",
        "proj.0.weight",
        "proj.1.weight",
        "ln.0.weight",
        "ln.0.bias",
        "head.0.weight",
    }
    again = {
        **tensors,
        "emb.1.weight": tensors["emb.0.weight"].clone(),
        "proj.2.weight": tensors["proj.1.weight"].clone(),
    }
    assert check_draft(testing.write_checkpoint(tmp_path, config, again)).ok


def test_a_stage_beyond_the_count_is_reported(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "mlp-speculator")
    (path / "config.json").write_text(json.dumps(testing.tiny_config("mlp-speculator", n_predict=2)))
    result = check_draft(path)["config.num-hidden-layers"]
    assert (result.status, result.findings[0].where) == ("failed", "config.json: n_predict")


def test_a_writer_that_states_its_class_as_a_string_is_recognised_and_reported(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "mlp-speculator")
    changed = testing.tiny_config("mlp-speculator", architectures="MLPSpeculatorPreTrainedModel", model_type=...)
    (path / "config.json").write_text(json.dumps(changed))
    report = check_draft(path)
    assert report["config.family"].status == "passed"
    assert report["config.architectures"].status == "failed"
    assert report["config.types"].status == "failed"


def test_tensors_alone_name_the_family(tmp_path: Path) -> None:
    tensors = testing.random_tensors(testing.tiny_config("mlp-speculator"), "mlp-speculator")
    testing.write_checkpoint(
        tmp_path, {"n_predict": 3, "emb_dim": 64}, tensors, rename=lambda name: f"speculator.{name}"
    )
    assert open_draft(tmp_path).recognition.family == "mlp-speculator"
