"""Domino: DFlash's logits corrected by a recurrent state.

What these catch: gates in another order than torch's GRU; a state that has seen the token it is to predict, or one too few; the correction
added to a row that is to keep its logits, or to the anchor's; `shift_label` read the other way round. The recurrence is held against
`torch.nn.GRU`, the placing of its states against SpecForge's slices, written out per row. No package with this head installs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_family_forward import Array, Weights, close, numbers, silu, tensor, written

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.families.domino import Domino, DominoOptions
from pytest_specdecode.testing import expected_tensors, tiny_config

CONFIGS = Path(__file__).parents[1] / "corpus" / "configs"
B = 6


def options(**changes: Any) -> dict[str, Any]:
    return {**Domino.tiny["dflash_config"], **changes}


def states(w: Weights, inputs: Array) -> Array:
    """torch's GRU over `inputs` [T, H]."""
    gru = torch.nn.GRU(64, 24, batch_first=True, bias=False, dtype=torch.float64)
    gru.weight_ih_l0.data = tensor(w["prefix_gru.weight_ih_l0"])
    gru.weight_hh_l0.data = tensor(w["prefix_gru.weight_hh_l0"])
    with torch.no_grad():
        found: Array = gru(tensor(inputs)[None])[0][0].numpy()
    return found


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("shift", [False, True])
def test_every_row_is_corrected_by_the_tokens_before_the_one_it_drafts(
    tmp_path: Path, shift: bool, prefix: int
) -> None:
    draft, w = written(tmp_path, "domino", dflash_config=options(shift_label=shift, pure_draft_prefix_len=prefix))
    logits, hidden, embeddings = numbers(1, B, 512), numbers(2, B, 64), numbers(3, B, 64)
    due = logits.copy()
    for row in range(B):
        drafted = row + 1 if shift else row
        first = 1 + prefix
        if drafted < first:
            continue
        state = states(w, embeddings[:drafted])[-1]
        inner = silu(w["embed_proj.0.weight"] @ np.concatenate([hidden[row], state]))
        due[row] += w["embed_proj.2.weight"] @ inner
    head = Domino().build_head(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[arg-type]
    found = head(tensor(logits), tensor(hidden), tensor(embeddings))
    close(found, due)
    assert (found != tensor(logits)).any(dim=-1).tolist() == [row + shift >= 1 + prefix for row in range(B)]
    # In a batch, and step by step.
    both = torch.stack([tensor(embeddings), -tensor(embeddings)])
    batch = head(tensor(logits).expand(2, -1, -1), tensor(hidden).expand(2, -1, -1), both)
    close(batch[0], due)
    state = torch.zeros(24, dtype=torch.float64)
    for row in range(B):
        state = head.prefix_gru.step(tensor(embeddings[row]), state)
    np.testing.assert_allclose(state.numpy(), states(w, embeddings)[-1], rtol=0, atol=1e-12)


def test_embeddings_of_another_shape_are_refused(tmp_path: Path) -> None:
    draft, _ = written(tmp_path, "domino")
    head = Domino().build_head(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="embeddings of"):
        head(tensor(numbers(1, B, 512)), tensor(numbers(2, B, 64)), tensor(numbers(3, B - 1, 64)))


@pytest.mark.parametrize(
    ("name", "shift", "fc"),
    [
        ("domino--specforge-qwen3.5-4b.json", True, (2560, 12800)),
        ("domino--specforge-qwen3.6-27b-full-attention.json", False, (5120, 25600)),
    ],
)
def test_published_configurations(name: str, shift: bool, fc: tuple[int, int]) -> None:
    spec, tensors = expected_tensors(json.loads((CONFIGS / name).read_text()), "domino")
    assert spec.options == DominoOptions(emb_dim=256, gru_hidden_dim=1024, pure_draft_prefix_len=1, shift_label=shift)
    assert spec.block is not None
    assert (len(spec.layers), spec.block.block_size, spec.block.mask_token_id) == (5, 16, 248070)
    assert spec.block.sample_from_anchor is shift
    shapes = {item.name: item.shape for item in tensors if item.need == "required"}
    assert shapes["fc.weight"] == fc
    assert shapes["prefix_gru.weight_ih_l0"] == (3072, fc[0])
    assert shapes["prefix_gru.weight_hh_l0"] == (3072, 1024)
    assert shapes["embed_proj.0.weight"] == (256, fc[0] + 1024)
    assert shapes["embed_proj.2.weight"] == (248320, 256)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (4096, fc[0])
    assert shapes["layers.4.self_attn.v_proj.weight"] == (1024, fc[0])
    assert shapes["layers.4.self_attn.k_norm.weight"] == (128,)


def test_what_is_not_stated_stays_unknown() -> None:
    config = tiny_config("domino", dflash_config={"mask_token_id": 1, "target_layer_ids": [1, 9, 17]})
    spec, tensors = expected_tensors(config, "domino")
    assert spec.options == DominoOptions()
    shapes = {item.name: item.shape for item in tensors}
    assert shapes["prefix_gru.weight_ih_l0"] == (None, 64)
    with pytest.raises(LayerBuildError, match="gru_hidden_dim"):
        Domino().build_head(spec, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["prefix_gru.weight_hh_l0", "embed_proj.2.weight"])
def test_a_missing_part_of_the_head_is_named(tmp_path: Path, name: str) -> None:
    draft, _ = written(tmp_path, "domino")
    del draft.binding.stored[name]  # type: ignore[union-attr, attr-defined]
    with pytest.raises(LayerBuildError) as caught:
        Domino().build_head(draft.spec, draft.source())  # type: ignore[arg-type]
    assert name in str(caught.value)
