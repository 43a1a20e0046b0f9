"""Gemma 4's assistant. Its forward is held against transformers' own class in `tests/peers/test_peer_mtp.py`.

What these catch: widths of full layers read from the wrong place, or from sliding layers; k and v asked for, or overlooked where they lie;
published sizes that do not come out; a burst that is not one row at a time; clusters that do not share the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.spec import GQASpec

CORPUS = Path(__file__).parents[1] / "corpus" / "configs"
PUBLISHED = {
    "31B": {"pre": [1024, 10752], "sliding": (32, 16, 256), "full": (32, 4, 512), "ordered": False},
    "E2B": {"pre": [256, 3072], "sliding": (4, 1, 256), "full": (4, 1, 512), "ordered": True},
    "E4B": {"pre": [256, 5120], "sliding": (4, 2, 256), "full": (4, 2, 512), "ordered": True},
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_configurations(size: str) -> None:
    config = json.loads((CORPUS / f"mtp-gemma4assistant--google-gemma-4-{size}.json").read_text())
    spec, tensors = testing.expected_tensors(config, "gemma4-assistant")
    due = PUBLISHED[size]
    found = {tensor.name: list(tensor.shape) for tensor in tensors if tensor.need == "required"}
    width, backbone = due["pre"][0], due["pre"][1] // 2  # type: ignore[index]
    assert found["pre_projection.weight"] == due["pre"]
    assert found["post_projection.weight"] == [backbone, width]
    for index, kind in enumerate(("sliding", "sliding", "sliding", "full")):
        heads, kv_heads, head_dim = due[kind]  # type: ignore[misc]
        attention = spec.layers[index].attention
        assert isinstance(attention, GQASpec)
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (heads, kv_heads, head_dim)
        assert attention.rope.rope_type == ("default" if kind == "sliding" else "proportional")
        assert found[f"layers.{index}.self_attn.q_proj.weight"] == [heads * head_dim, width]
        assert found[f"layers.{index}.self_attn.o_proj.weight"] == [width, heads * head_dim]
        assert found[f"layers.{index}.layer_scalar"] == [1]
    assert ("masked_embedding.centroids.weight" in found) == due["ordered"]
    assert not any(".k_proj" in name or ".v_proj" in name for name in found)


def test_newer_files_state_a_layer_s_width_apart(tmp_path: Path) -> None:
    text: dict[str, Any] = testing.tiny_config("gemma4-assistant")["text_config"]
    del text["global_head_dim"]
    text["per_layer_config"] = {"1": {"head_dim": 32, "num_key_value_heads": 1}}
    spec, _ = testing.expected_tensors(testing.tiny_config("gemma4-assistant", text_config=text), "gemma4-assistant")
    full = spec.layers[1].attention
    assert isinstance(full, GQASpec)
    assert (full.head_dim, full.num_kv_heads) == (32, 1)


def test_keys_and_values_of_its_own_have_no_place(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.self_attn.k_proj.weight"] = torch.ones(32, 64, dtype=torch.bfloat16)

    report = check_draft(testing.write_tiny(tmp_path, "gemma4-assistant", edit=add))
    assert report["weights.unexpected"].status == "failed"
    assert "reads the target's keys" in report["weights.unexpected"].message


def test_token_ordering_is_integers(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["masked_embedding.token_ordering"] = tensors["masked_embedding.token_ordering"].float()

    report = check_draft(testing.write_tiny(tmp_path, "gemma4-assistant", edit=spoil))
    assert report["weights.dtypes"].status == "failed"
    assert "token_ordering" in report["weights.dtypes"].message


def test_a_burst_is_one_row_at_a_time_and_a_far_key_of_a_sliding_layer_is_not_seen(tmp_path: Path) -> None:
    draft = open_draft(testing.write_tiny(tmp_path, "gemma4-assistant"))
    for index, sees in ((0, False), (1, True)):
        layer: Any = draft.layer(index, dtype=torch.float64)
        inputs = dict(layer.probe(3, 1))
        before = layer.prefill(inputs)
        # Eleven keys behind a window of eight: nine are seen, so the second is the last that is not.
        inputs["k"] = inputs["k"].clone()
        inputs["k"][1] += 5.0
        assert torch.equal(before, layer.prefill(inputs)) != sees
        inputs["k"][2] += 5.0
        assert not torch.equal(before, layer.prefill(inputs))


def test_clusters_that_do_not_fit_the_head_are_named(tmp_path: Path) -> None:
    draft = open_draft(testing.write_tiny(tmp_path, "gemma4-assistant", num_centroids=32))
    config = testing.tiny_config("gemma4-assistant", num_centroids=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    wrong = open_draft(tmp_path)
    assert draft.family is not None
    assert draft.spec is not None
    assert wrong.spec is not None
    draft.family.build_head(draft.spec, draft.source())
    with pytest.raises(LayerBuildError, match="centroids"):
        draft.family.build_head(wrong.spec, wrong.source())
