"""Drafts whose q, k and v are stored as one `qkv_proj`, in every family that has such layers.

What these catch: a family that looks for `q_proj` and reports three tensors as missing and one as left over; a draft that is recognised
only while its projections are apart; gates beside the queries that are not counted in the joined rows; the joined rows read in another
order, which no shape shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import FAMILIES, recognise
from pytest_specdecode.spec import GQASpec
from pytest_specdecode.testing import expected_tensors, random_tensors, stored_names, tiny_config, write_checkpoint

Tensors = dict[str, torch.Tensor]

#: A target with prediction layers of grouped-query attention.
DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Case:
    """A draft to write: a family's tiny configuration with `changes`, or `whole` in its place."""

    family: str
    what: str = "tiny"
    changes: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        return tiny_config(self.family, **self.changes) if self.whole is None else self.whole


def mtp(architecture: str, model_type: str, **changes: Any) -> Case:
    whole = {**DENSE, "architectures": [architecture], "model_type": model_type, **changes}
    return Case("mtp", model_type, whole=whole)


CASES = (
    Case("eagle1"),
    Case("eagle1", "two layers", {"num_hidden_layers": 2}),
    Case("eagle1", "qwen2 biases", {"model_type": "qwen2"}),
    Case("eagle1", "minicpm", {"architectures": ["EagleMiniCPMForCausalLM"], "model_type": "minicpm"}),
    Case("eagle1", "cohere", {"architectures": ["EagleCohereForCausalLM"], "model_type": "cohere"}),
    Case("eagle3"),
    Case("eagle3", "biases", {"attention_bias": True}),
    Case("eagle3", "last state", {"eagle_config": {"use_aux_hidden_state": False}}),
    Case("peagle"),
    Case("eagle4"),
    Case("eagle4", "attn_norm", {"attn_norm": True}),
    Case("dflash"),
    Case("dflash", "biases", {"attention_bias": True}),
    Case("dflash2"),
    Case("domino"),
    Case("dflare"),
    Case("dspark"),
    Case("dspark", "gated", {"architectures": ["Qwen3_5DSparkModel"], "enable_qwen35_gated_q_proj": True}),
    Case("xpress"),
    mtp("MiMoForCausalLM", "mimo", attention_bias=True),
    mtp("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", moe_num_experts=8),
    mtp("Qwen3_5ForCausalLM", "qwen3_5_text"),
    Case("hydra"),
)


def name_of(case: Case) -> str:
    return f"{case.family}-{case.what}"


def tensors_of(case: Case) -> Tensors:
    found = random_tensors(case.config(), case.family)
    if case.family == "eagle4":
        # Optional in the file, and all that tells this family from its parent by tensors.
        generator = torch.Generator().manual_seed(3)
        for name, shape in (("efficient_lm_head", (512, 16)), ("efficient_lm_head_down_proj", (16, 64))):
            found[f"{name}.weight"] = (torch.randn(shape, generator=generator) / shape[1] ** 0.5).bfloat16()
    return found


def joined(tensors: Tensors) -> Tensors:
    """The same with rows of q, then k, then v in one tensor, weights and biases."""
    found = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"(.+\.)q_proj\.(weight|bias)", name)
        if match:
            parts = [found.pop(f"{match[1]}{part}_proj.{match[2]}") for part in "qkv"]
            found[f"{match[1]}qkv_proj.{match[2]}"] = torch.cat(parts)
    return found


def test_every_family_that_projects_q_k_and_v_is_here() -> None:
    due = set()
    for family in FAMILIES:
        spec, tensors = expected_tensors(family.tiny, family.name)
        # A family that reads the target's keys has grouped-query layers, and nothing to join.
        own_keys = any(tensor.name.endswith("k_proj.weight") and tensor.need == "required" for tensor in tensors)
        if own_keys and any(isinstance(layer.attention, GQASpec) for layer in spec.layers):
            due.add(family.name)
    # The tiny prediction layer is latent; other targets' are not.
    assert {case.family for case in CASES} == due | {"mtp"}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_joined_projections_are_the_same_draft(tmp_path: Path, case: Case) -> None:
    tensors = tensors_of(case)
    rename = stored_names(case.config(), case.family)
    apart = open_draft(write_checkpoint(tmp_path / "apart", case.config(), tensors, rename=rename))
    one = open_draft(write_checkpoint(tmp_path / "one", case.config(), joined(tensors), rename=rename))
    assert one.spec is not None
    assert apart.spec is not None
    assert (one.spec.family, one.recognition.disagreement) == (case.family, ())
    assert one.binding is not None
    assert (one.binding.missing, one.binding.unexpected, one.binding.twice) == ((), (), ())
    held = [layer for layer in one.spec.layers if layer.attention is not None]
    assert held
    assert all(isinstance(layer.attention, GQASpec) and layer.attention.fused_qkv for layer in held)
    assert not any(getattr(layer.attention, "fused_qkv", False) for layer in apart.spec.layers)
    for layer in held:
        due, found = apart.layer(layer.index), one.layer(layer.index)
        probe = due.probe(5, 2)
        assert torch.equal(found.prefill(probe), due.prefill(probe))
    report = check_draft(tmp_path / "one")
    assert report.ok
    # What holds of the parts holds of the whole, an engine's warning about biases included.
    assert {item.id: item.status for item in report} == {
        item.id: item.status for item in check_draft(tmp_path / "apart")
    }


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_joined_projections_are_recognised_by_tensors_alone(tmp_path: Path, case: Case) -> None:
    """The configuration says nothing at all."""
    for name, tensors in (("apart", tensors_of(case)), ("one", joined(tensors_of(case)))):
        rename = stored_names(case.config(), case.family)
        found = recognise(Checkpoint.open(write_checkpoint(tmp_path / name, {}, tensors, rename=rename)), FAMILIES)
        assert {(signal.family, signal.kind) for signal in found.signals} == {(case.family, "tensors")}


@pytest.mark.parametrize("case", [case for case in CASES if case.what == "tiny"], ids=name_of)
def test_a_joined_projection_with_a_row_too_few_is_named(tmp_path: Path, case: Case) -> None:
    tensors = joined(tensors_of(case))
    name = next(name for name in tensors if name.endswith("qkv_proj.weight"))
    tensors[name] = tensors[name][:-1]
    report = check_draft(write_checkpoint(tmp_path, case.config(), tensors), checks=["weights.shapes"])
    assert [(item.status, item.findings[0].where) for item in report] == [("failed", name)]


def test_hydra_counts_its_kv_heads_in_the_joined_rows(tmp_path: Path) -> None:
    """Its configuration need not repeat the base model's."""
    whole = tiny_config("hydra", num_key_value_heads=2)
    tensors = joined(random_tensors(whole, "hydra"))
    del whole["num_key_value_heads"]
    draft = open_draft(write_checkpoint(tmp_path, whole, tensors))
    assert draft.spec is not None
    attention = draft.spec.layers[-1].attention
    assert isinstance(attention, GQASpec)
    assert attention.num_kv_heads == 2
    assert draft.binding is not None
    assert draft.binding.missing == ()
