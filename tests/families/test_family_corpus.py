"""Real public configurations, in `tests/corpus/configs`.

What these catch: a published configuration that is not recognised, is recognised as another family, or whose tensors are expected in
other shapes than the published ones; and a file of a family that is not read here misread as one that is. The shapes in
`tests/corpus/expected.json` are the published ones. In a file's name, "shape" says that its sizes were shrunk by whoever quoted it,
and "partial" that only some keys are known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode.api import check_draft
from pytest_specdecode.checkpoint import DTYPE_BITS, Checkpoint, read_safetensors
from pytest_specdecode.families import Draft, load
from pytest_specdecode.families.base import open_view
from pytest_specdecode.testing import write_sparse

CORPUS = Path(__file__).parents[1] / "corpus"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CORPUS / "expected.json").read_text(encoding="utf-8"))
#: Files of no family: export templates, and a file that two families claim.
UNKNOWN = sorted(name for name, due in EXPECTED.items() if due["family"] is None)
READ = sorted(set(EXPECTED) - set(UNKNOWN))
WITH_SHAPES = [name for name in EXPECTED if "shapes" in EXPECTED[name]]
#: Export templates: all keys null, so nothing to be right or wrong about but the label.
TEMPLATES = sorted(name for name in EXPECTED if name.startswith("template--"))


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CORPUS / "configs" / name).read_text(encoding="utf-8"))
    return found


def opened(directory: Path, name: str) -> Draft:
    (directory / "config.json").write_bytes((CORPUS / "configs" / name).read_bytes())
    return load(Checkpoint.open(directory))


def test_the_table_and_the_files_are_the_same() -> None:
    assert sorted(path.name for path in (CORPUS / "configs").iterdir()) == sorted(EXPECTED)
    assert (len(EXPECTED), len(READ), len(UNKNOWN), len(TEMPLATES)) == (111, 108, 3, 2)
    assert set(WITH_SHAPES) <= set(READ)
    assert len(WITH_SHAPES) == 46


@pytest.mark.parametrize("name", EXPECTED)
def test_a_public_configuration_has_its_family_and_packaging(tmp_path: Path, name: str) -> None:
    """Every file, those of no family too: `packaging` is then what the configuration alone shows."""
    draft = opened(tmp_path, name)
    due = EXPECTED[name]
    assert draft.recognition.family == due["family"]
    assert (draft.spec is None) == (name in UNKNOWN)
    packaging = open_view(draft.checkpoint).packaging if draft.spec is None else draft.spec.packaging
    assert packaging == due["packaging"]
    if draft.spec is not None:
        assert draft.spec.family == due["family"]
    assert bool(draft.recognition.disagreement) == (name == "bad--dspark-projector-arch-disagree.json")
    assert draft.config_faults == ()


@pytest.mark.parametrize("name", READ)
def test_a_public_configuration_has_the_shape_of_every_tensor(tmp_path: Path, name: str) -> None:
    """Unless it leaves an extent out; then it is named here, and not for longer than it does."""
    draft = opened(tmp_path, name)
    assert name.startswith("bad--") or EXPECTED[name]["partial"] or all_known(draft) == (name not in _INCOMPLETE)


#: Files that leave an extent out, as quoted: the sizes of the model, the MLP's width, the blocks of the scales, or the tap list.
_INCOMPLETE = {
    "dspark--embedded-DeepSeek-V4-Flash.json",
    "dspark--embedded-DeepSeek-V4-Pro-shape.json",
    "hydra--upstream-config-class-fields.json",
    "medusa--upstream-config-class.json",
    "dflash--gemma-4-31B-it-mixed-shape.json",
    "eagle3--gpt-oss-full-vocab-community.json",
    "eagle3--modelopt-default-train.json",
}


def all_known(draft: Draft) -> bool:
    assert draft.binding is not None
    return all(None not in tensor.shape for tensor in draft.binding.expected.values())


@pytest.mark.parametrize("name", READ)
def test_the_sizes_that_a_file_states_are_those_of_its_tensors(tmp_path: Path, name: str) -> None:
    """Read here without the parsers: the MLP, k and o of every layer that has them under these names."""
    draft = opened(tmp_path, name)
    assert draft.binding is not None
    stated = config(name)
    for key in ("transformer_layer_config", "text_config", "model"):
        stated = {**stated, **(stated.get(key) or {})} if isinstance(stated.get(key), dict) else stated
    hidden, inner, head_dim = (stated.get(key) for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads = stated.get("num_attention_heads")
    kv = stated.get("num_key_value_heads", heads)
    if head_dim is None and hidden and heads and hidden % heads == 0:
        head_dim = hidden // heads
    due = {"mlp.gate_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner)}
    # Where full layers have another width of head, which of the two a layer has is for the parser to say.
    plain = draft.spec is not None and draft.spec.family in _PLAIN_HEADS and "global_head_dim" not in stated
    if head_dim and heads and plain:
        due |= {"self_attn.k_proj.weight": (kv * head_dim, None), "self_attn.o_proj.weight": (hidden, heads * head_dim)}
    seen = 0
    for tensor in draft.binding.expected.values():
        for end, shape in due.items():
            if tensor.name.startswith("layers.") and tensor.name.endswith(f".{end}"):
                for got, size in zip(tensor.shape, shape, strict=True):
                    assert size is None or got == size, tensor.name
                seen += 1
    assert seen or draft.spec is None or draft.spec.family not in _PLAIN_HEADS or name in _NOT_SO_NAMED


#: Families whose layers have q, k, v and o of `num_attention_heads` and `num_key_value_heads`.
_PLAIN_HEADS = ("eagle1", "eagle3", "peagle", "dflash", "dflash2", "domino", "dflare", "dspark")
#: DeepSeek-V4's stages name and size theirs otherwise.
_NOT_SO_NAMED = {"dspark--embedded-DeepSeek-V4-Flash.json", "dspark--embedded-DeepSeek-V4-Pro-shape.json"}


@pytest.mark.parametrize("name", WITH_SHAPES)
def test_expected_tensors_have_the_published_shapes(tmp_path: Path, name: str) -> None:
    draft = opened(tmp_path, name)
    assert draft.binding is not None
    assert draft.spec is not None
    found = {tensor.name: list(tensor.shape) for tensor in draft.binding.expected.values()}
    due = EXPECTED[name]
    assert {key: found.get(key) for key in due["shapes"]} == due["shapes"]
    if due["family"] == "dflash":
        # What is published for one layer holds for all; an EAGLE3's first layer is wider than the rest.
        layered = {key: shape for key, shape in due["shapes"].items() if key.startswith("layers.0.")}
        for index in range(1, len(draft.spec.layers)):
            assert {key: found.get(key.replace(".0.", f".{index}.", 1)) for key in layered} == layered


@pytest.mark.parametrize("name", [name for name in READ if "maps" in EXPECTED[name]])
def test_maps_are_due_exactly_for_a_reduced_vocabulary(tmp_path: Path, name: str) -> None:
    draft = opened(tmp_path, name)
    assert draft.binding is not None
    assert (draft.binding.expected["d2t"].need == "required") == EXPECTED[name]["maps"]


@pytest.mark.parametrize("name", [name for name in READ if "block_size" in EXPECTED[name]])
def test_block_and_mask_are_the_published_ones(tmp_path: Path, name: str) -> None:
    spec = opened(tmp_path, name).spec
    due = EXPECTED[name]
    assert spec is not None
    assert spec.block is not None
    found = (len(spec.layers), spec.block.block_size, spec.block.mask_token_id)
    assert found == (due["layers"], due["block_size"], due["mask_token_id"])


@pytest.mark.parametrize("name", [name for name in READ if "tensors" in EXPECTED[name]])
def test_a_whole_file_has_the_published_number_of_tensors_and_bytes(tmp_path: Path, name: str) -> None:
    due = EXPECTED[name]
    write_sparse(tmp_path, config(name), due["family"])
    headers = read_safetensors(tmp_path / "model.safetensors")
    assert len(headers) == due["tensors"]
    if "payload_bytes_bf16" in due:
        assert sum(header.numel * DTYPE_BITS["BF16"] // 8 for header in headers) == due["payload_bytes_bf16"]
    draft = load(Checkpoint.open(tmp_path))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_nulls_is_of_no_family_and_says_so(tmp_path: Path, name: str) -> None:
    draft = opened(tmp_path, name)
    assert (draft.spec, draft.recognition.family, draft.recognition.disagreement) == (None, None, ())
    finding = check_draft(tmp_path)["config.family"]
    assert (finding.status, finding.message) == ("failed", "every size is null: a template, not a configuration")


def test_every_file_can_be_checked_and_what_needs_weights_is_inconclusive(tmp_path: Path) -> None:
    for name in EXPECTED:
        (tmp_path / "config.json").write_bytes((CORPUS / "configs" / name).read_bytes())
        report = check_draft(tmp_path)
        assert not [result for result in report if "the check itself broke" in result.message], name
        assert report["weights.missing"].status == "inconclusive", name
        assert report["files.readable"].status == "inconclusive", name


def test_payload_of_laguna_by_hand() -> None:
    # fc, the norms, and per layer: fused qkv, gate, output, head norms, two norms, MLP; two bytes each.
    hidden, inner, heads, kv, head_dim, taps = 3072, 12288, 72, 8, 128, 6
    layer = (heads + 2 * kv) * head_dim * hidden + heads * hidden + hidden * heads * head_dim
    layer += 2 * head_dim + 2 * hidden + 3 * inner * hidden
    total = hidden * taps * hidden + taps * hidden + 2 * hidden + 6 * layer
    assert 2 * total == EXPECTED["dflash--laguna-poolside-Laguna-S-2.1-DFlash.json"]["payload_bytes_bf16"]
