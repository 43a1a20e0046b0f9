"""Which family a checkpoint is.

What these catch: a label that is not known, or not preferred to the tensors; tensors that are not preferred to keys; signals that
disagree and are settled in silence; a neighbour (EAGLE-1, P-EAGLE, DSpark, DFlash2, …) taken for one of the families that are read; a
decision by the folder's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import Recognition, load
from pytest_specdecode.families.recognise import KINDS
from pytest_specdecode.testing import tiny_config, write_sparse

FAMILIES = ("eagle3", "eagle3-mla", "dflash")
Shapes = Mapping[str, Sequence[int]]

Q = "layers.0.self_attn.q_proj.weight"
Q_A = "layers.0.self_attn.q_a_proj.weight"
EAGLE3: Shapes = {"fc.weight": (64, 192), Q: (128, 128)}
EAGLE3_MLA: Shapes = {"fc.weight": (64, 192), Q_A: (48, 128)}
DFLASH: Shapes = {"fc.weight": (64, 192), "hidden_norm.weight": (64,), Q: (128, 64)}
EAGLE1: Shapes = {"fc.weight": (64, 128), Q: (128, 64)}


def recognised(directory: Path, config: Mapping[str, Any], tensors: Shapes | None = None) -> Recognition:
    """What is made of this configuration and of weights with these shapes."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        header, position = {}, 0
        for name, shape in tensors.items():
            size = 2
            for extent in shape:
                size *= extent
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
            position += size
        raw = json.dumps(header).encode()
        with (directory / "model.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + position)
    return load(Checkpoint.open(directory)).recognition


LABELS = [
    ("LlamaForCausalLMEagle3", "eagle3"),
    ("Eagle3LlamaForCausalLM", "eagle3"),
    ("Eagle3Qwen3ForCausalLM", "eagle3"),
    ("Eagle3MiniMaxM2ForCausalLM", "eagle3"),
    ("Eagle3Speculator", "eagle3"),
    ("Eagle3DraftModel", "eagle3"),
    ("EAGLE3LlamaForCausalLM", "eagle3"),
    ("Eagle3DeepseekV2ForCausalLM", "eagle3-mla"),
    ("Eagle3DeepseekV3ForCausalLM", "eagle3-mla"),
    ("DFlashDraftModel", "dflash"),
    ("DFlashSpeculator", "dflash"),
    ("DFlashLagunaForCausalLM", "dflash"),
    # Families that are known by name only.
    ("DFlash2DraftModel", "dflash2"),
    ("DFlash2BeamDraftModel", "dflash2"),
    ("DominoDraftModel", "domino"),
    ("QwenDFlareDraftModel", "dflare"),
    ("DSparkDraftModel", "dspark"),
    ("Qwen3DSparkModel", "dspark"),
    ("PEagleDraftModel", "peagle"),
    ("PeagleLlamaForCausalLM", "peagle"),
    ("LlamaForCausalLMEagle4", "eagle4"),
    ("EagleLlamaForCausalLM", "eagle1"),
    ("EagleDeepSeekMTPModel", "mtp"),
    ("DeepseekV3ForCausalLMNextN", "mtp"),
    ("Qwen3NextMTP", "mtp"),
    ("Qwen3XPressModel", "xpress"),
    ("Gemma4AssistantForCausalLM", "gemma4-assistant"),
    ("MedusaModel", "medusa"),
    ("MLPSpeculatorPreTrainedModel", "mlp-speculator"),
]


@pytest.mark.parametrize(("label", "family"), LABELS)
def test_a_label_alone_names_its_family(tmp_path: Path, label: str, family: str) -> None:
    found = recognised(tmp_path, {"architectures": [label]})
    assert (found.family, found.disagreement) == (family, ())
    assert {signal.kind for signal in found.signals} == {"label"}


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"speculators_model_type": "eagle3", "transformer_layer_config": {}}, "eagle3"),
        ({"speculators_model_type": "dflash", "transformer_layer_config": {}}, "dflash"),
        ({"speculators_model_type": "dspark", "transformer_layer_config": {}}, "dspark"),
        ({"speculators_model_type": "dflash2"}, "dflash2"),
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"speculators_model_type": "mtp"}, "mtp"),
        ({"model_type": "eagle"}, "eagle1"),
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp-speculator"),
        ({"dflash_config": {"projector_type": "dflash"}}, "dflash"),
        ({"dflash_config": {"projector_type": "dspark"}}, "dspark"),
        # A plain label with a draft vocabulary is an old EAGLE3 head; model_type alone is a backbone and says nothing.
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 9}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "truncated_vocab_size": 9}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "draft_vocab_size": 9}, None),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, None),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "eagle3"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "kv_lora_rank": 32}, "eagle3-mla"),
        ({"dflash_config": {"mask_token_id": 5}}, "dflash"),
        ({"model_type": "qwen3"}, None),
        ({}, None),
    ],
)
def test_other_labels_and_keys(tmp_path: Path, config: dict[str, Any], family: str | None) -> None:
    found = recognised(tmp_path, config)
    assert (found.family, found.disagreement) == (family, ())


@pytest.mark.parametrize(("tensors", "family"), [(EAGLE3, "eagle3"), (EAGLE3_MLA, "eagle3-mla"), (DFLASH, "dflash")])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensors_alone_name_their_family(tmp_path: Path, tensors: Shapes, family: str, prefix: str) -> None:
    found = recognised(tmp_path, {}, {prefix + name: shape for name, shape in tensors.items()})
    assert (found.family, found.disagreement) == (family, ())
    assert {signal.kind for signal in found.signals} <= {"tensors"}


def test_a_head_of_eagle1_is_not_taken_for_a_neighbour(tmp_path: Path) -> None:
    assert recognised(tmp_path, {}, EAGLE1).family in (None, "eagle1")


def test_midlayer_names_count_as_layer_zero(tmp_path: Path) -> None:
    tensors = {name.replace("layers.0", "midlayer"): shape for name, shape in EAGLE3.items()}
    assert recognised(tmp_path, {}, tensors).family == "eagle3"


@pytest.mark.parametrize("name", ["markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook"])
def test_tensors_of_a_dflash_relative_do_not_speak_for_dflash(tmp_path: Path, name: str) -> None:
    assert recognised(tmp_path, {}, {**DFLASH, name: (4, 4)}).family != "dflash"


@pytest.mark.parametrize("shape", [(), (64,), (2, 64, 64), (0, 0)])
@pytest.mark.parametrize("name", ["fc.weight", Q, Q_A])
@pytest.mark.parametrize("tensors", [EAGLE3, EAGLE3_MLA, DFLASH])
def test_a_projection_that_is_no_matrix_speaks_for_nothing(
    tmp_path: Path, tensors: Shapes, name: str, shape: tuple[int, ...]
) -> None:
    found = recognised(tmp_path, {}, {**tensors, name: shape})
    assert name not in {signal.where for signal in found.signals}


def test_a_label_outranks_tensors_and_their_contradiction_is_kept(tmp_path: Path) -> None:
    found = recognised(tmp_path, {"architectures": ["LlamaForCausalLMEagle3"]}, DFLASH)
    assert found.family == "eagle3"
    assert found.disagreement == ("dflash", "eagle3")
    assert found.evidence() == {
        "eagle3": ["architectures[0] = 'LlamaForCausalLMEagle3'"],
        "dflash": ["hidden_norm.weight = [64, 192]"],
    }


def test_tensors_outrank_keys_and_foreign_keys_are_no_contradiction(tmp_path: Path) -> None:
    found = recognised(tmp_path, {"dflash_config": {"mask_token_id": 3}}, EAGLE3)
    assert (found.family, found.disagreement) == ("eagle3", ())


def test_labels_that_disagree_name_no_family(tmp_path: Path) -> None:
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}
    found = recognised(tmp_path, config)
    assert (found.family, found.disagreement) == (None, ("dflash", "dspark"))
    both = recognised(tmp_path, {"architectures": ["DFlashDraftModel", "LlamaForCausalLMEagle3"]})
    assert (both.family, both.disagreement) == (None, ("dflash", "eagle3"))


def test_latent_tensors_under_a_plain_label_are_a_contradiction(tmp_path: Path) -> None:
    found = recognised(tmp_path, {"architectures": ["LlamaForCausalLMEagle3"]}, EAGLE3_MLA)
    assert (found.family, found.disagreement) == ("eagle3", ("eagle3", "eagle3-mla"))


def test_keys_that_disagree_name_no_family(tmp_path: Path) -> None:
    config = {"dflash_config": {}, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    found = recognised(tmp_path, config)
    assert (found.family, found.disagreement) == (None, ("dflash", "eagle3"))


def test_evidence_is_kept_strongest_first(tmp_path: Path) -> None:
    write_sparse(tmp_path, tiny_config("eagle3"), "eagle3")
    kinds = [signal.kind for signal in load(Checkpoint.open(tmp_path)).recognition.signals]
    assert set(kinds) == set(KINDS)
    assert kinds == sorted(kinds, key=KINDS.index)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("folder", ["eagle-7b", "my-eagle3-draft", "some-dflash", "dspark", "x"])
def test_the_folder_s_name_decides_nothing(tmp_path: Path, family: str, folder: str) -> None:
    write_sparse(tmp_path / folder, tiny_config(family), family)
    assert load(Checkpoint.open(tmp_path / folder)).recognition.family == family
    unlabelled = tiny_config(family, architectures=..., eagle_config=..., dflash_config=...)
    unlabelled.pop("eagle_aux_hidden_state_layer_ids", None)
    (tmp_path / folder / "config.json").write_text(json.dumps(unlabelled))
    assert load(Checkpoint.open(tmp_path / folder)).recognition.family == family
    (tmp_path / folder / "model.safetensors").unlink()
    (tmp_path / folder / "config.json").write_text("{}")
    assert load(Checkpoint.open(tmp_path / folder)).recognition.family is None
