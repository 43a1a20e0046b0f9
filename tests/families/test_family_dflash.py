"""DFlash in every packaging, and what its relatives share with it.

What these catch: a window read as another package reads it; taps, mask or block size of the speculators packaging looked for in the wrong
place; Laguna's gate without softplus, its context not normed, or its taps normed with one weight; fused `qkv_proj` that is refused, or read
in another order; a relative recognised as DFlash, or the other way round; a tensor that may go missing, or have another shape, unnoticed.
Right values come from NumPy in float64, one head at a time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_family_forward import (
    BLOCK,
    CONTEXT,
    FULL_VIEW,
    Array,
    Weights,
    attention,
    close,
    dflash,
    inputs,
    mlp,
    numbers,
    past,
    places,
    rms,
    tensor,
    written,
)

from pytest_specdecode import check_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import StackUnsupportedError
from pytest_specdecode.families import FAMILIES, load
from pytest_specdecode.families.dflash import DFlash
from pytest_specdecode.fused_kv import FusedKV
from pytest_specdecode.testing import expected_tensors, tiny_config, write_checkpoint, write_tiny

SLIDING, FULL = "sliding_attention", "full_attention"
RELATIVES = ("dflash", "dflash2", "domino", "dflare", "xpress")


def packaged(**changes: Any) -> dict[str, Any]:
    """A tiny DFlash in the speculators packaging; changes go to the layer's configuration where it has the key."""
    plain = tiny_config("dflash")
    inner = {
        key: plain[key]
        for key in DFlash.tiny
        if key not in ("architectures", "dflash_config", "is_causal", "block_size")
    }
    outer = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 10, 18],
        "mask_token_id": 511,
        "block_size": 8,
        "draft_vocab_size": 512,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    }
    inner |= {"sliding_window": 3, "use_sliding_window": True}
    for key, value in changes.items():
        (inner if key in inner else outer)[key] = value
    return {**outer, "transformer_layer_config": inner}


# --- what a window means ----------------------------------------------------------------------


@pytest.mark.parametrize("two_sided", [True, False])
def test_in_speculators_a_window_goes_from_the_anchor_back_and_never_into_the_block(
    tmp_path: Path, two_sided: bool
) -> None:
    """W = 3, so that a block of four rows would be cut by any reading that counts from the row."""
    config = packaged(layer_types=[SLIDING, FULL], sliding_window_non_causal=two_sided)
    draft, w = written(tmp_path, "dflash", config=config)
    block, context, positions, ahead = inputs()
    visible = np.ones((BLOCK, CONTEXT + BLOCK), dtype=bool) if two_sided else past(BLOCK, CONTEXT + BLOCK)
    visible[:, :CONTEXT] &= ahead >= positions[0] - 3
    assert visible[:, :CONTEXT].sum(axis=1).tolist() == [3] * BLOCK
    due = dflash(w, 0, block, context, positions, ahead, visible)
    layer: Any = draft.layer(0, dtype=torch.float64)
    close(layer.forward(tensor(block), places(positions), tensor(context), places(ahead)), due)
    # Full layers look both ways, whatever is said of the sliding ones.
    due = dflash(w, 1, block, context, positions, ahead, FULL_VIEW)
    layer = draft.layer(1, dtype=torch.float64)
    close(layer.forward(tensor(block), places(positions), tensor(context), places(ahead)), due)


def test_in_transformers_a_window_is_two_sided_and_one_token_wider(tmp_path: Path) -> None:
    muse = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "is_causal": ...}
    top = {"dflash_config": ..., "target_layer_ids": [1, 9, 17], "mask_token_id": 511}
    draft, w = written(tmp_path, "dflash", **muse, **top, layer_types=[SLIDING, FULL], sliding_window=3)
    block, context, positions, ahead = inputs()
    visible = np.abs(positions[:, None] - np.concatenate([ahead, positions])[None]) <= 3
    due = dflash(w, 0, block, context, positions, ahead, visible)
    layer: Any = draft.layer(0, dtype=torch.float64)
    close(layer.forward(tensor(block), places(positions), tensor(context), places(ahead)), due)


@pytest.mark.parametrize("reading", ["anchor", "row-inclusive"])
def test_a_window_means_the_same_through_a_cache_and_in_a_batch(tmp_path: Path, reading: str) -> None:
    config = packaged(layer_types=[SLIDING, SLIDING])
    if reading == "row-inclusive":
        muse = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
        config = tiny_config("dflash", **muse, layer_types=[SLIDING] * 2, sliding_window=3)
    draft, _ = written(tmp_path, "dflash", config=config)
    assert draft.spec is not None
    assert draft.spec.layers[0].window_reading == reading
    layer = draft.layer(0, dtype=torch.float64)
    probe = layer.probe(9, 4, batch=2)
    whole = layer.prefill(probe)
    torch.testing.assert_close(layer.incremental(probe), whole, rtol=0, atol=1e-12)
    alone = layer.prefill({name: value[1] for name, value in probe.items()})
    torch.testing.assert_close(whole[1], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({"layer_types": [SLIDING, FULL]}, [3, None], [True, False]),
        ({"layer_types": [SLIDING, FULL], "sliding_window_non_causal": True}, [3, None], [False, False]),
        # What transformers' Qwen3 configuration drops, the library trains without: no window, both ways.
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": False}, [None, None], [False, False]),
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": None}, [None, None], [False, False]),
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": None, "model_type": "llama"}, [3, None], [True, False]),
        ({"layer_types": [FULL, FULL]}, [None, None], [False, False]),
    ],
)
def test_windows_of_the_speculators_packaging(
    changes: dict[str, Any], windows: list[int | None], causal: list[bool]
) -> None:
    spec, _ = expected_tensors(packaged(**changes), "dflash")
    assert [layer.attention.sliding_window for layer in spec.layers] == windows  # type: ignore[union-attr]
    assert [layer.is_causal for layer in spec.layers] == causal
    assert {layer.window_reading for layer in spec.layers} == {"anchor"}


# --- the speculators packaging ----------------------------------------------------------------------


def test_speculators_keys() -> None:
    spec, tensors = expected_tensors(packaged(draft_vocab_size=200, target_hidden_size=96), "dflash")
    assert (spec.packaging, spec.taps.ids, spec.taps.convention, spec.taps.count) == (
        "speculators",
        (2, 10, 18),
        "boundary",
        3,
    )
    assert spec.block is not None
    assert (spec.block.block_size, spec.block.mask_token_id, spec.block.sample_from_anchor) == (8, 511, False)
    need = {item.name: (item.need, item.shape) for item in tensors}
    # The library accepts target_hidden_size and builds fc for H all the same.
    assert need["fc.weight"] == ("required", (64, 192))
    assert need["lm_head.weight"] == ("required", (200, 64))
    assert need["d2t"] == ("required", (200,))
    assert need["embed_tokens.weight"][0] == "optional"
    full = {item.name: item.need for item in expected_tensors(packaged(), "dflash")[1]}
    assert (full["lm_head.weight"], full["d2t"]) == ("optional", "optional")


def test_one_rope_per_layer_type_is_the_sliding_layers_for_all() -> None:
    parameters = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ((SLIDING, 1e4), (FULL, 1e6))}
    config = packaged(layer_types=[SLIDING, FULL])
    config["transformer_layer_config"] |= {"rope_theta": None, "rope_parameters": parameters}
    spec, _ = expected_tensors(config, "dflash")
    assert [layer.attention.rope.theta for layer in spec.layers] == [1e4, 1e4]  # type: ignore[union-attr]
    plain = tiny_config("dflash", layer_types=[SLIDING, FULL], rope_theta=None, rope_parameters=parameters)
    spec, _ = expected_tensors(plain, "dflash")
    assert [layer.attention.rope.theta for layer in spec.layers] == [1e4, 1e6]  # type: ignore[union-attr]


# --- Laguna ----------------------------------------------------------------------

HEADS, HEAD_DIM, KV_ROWS = 4, 32, 64


def split(w: Weights) -> dict[str, Array]:
    """q, k and v out of `qkv_proj`: rows in that order."""
    found = dict(w)
    for layer in (0, 1):
        name = f"layers.{layer}.self_attn."
        joined = found.pop(name + "qkv_proj.weight")
        parts = np.split(joined, [HEADS * HEAD_DIM, HEADS * HEAD_DIM + KV_ROWS])
        found |= {name + f"{key}_proj.weight": part for key, part in zip("qkv", parts, strict=True)}
    return found


def laguna(
    w: Weights, layer: int, block: Array, context: Array, positions: Array, ahead: Array, visible: NDArray[np.bool_]
) -> Array:
    """DFlash with the context normed by each layer, and every head's output times softplus of its gate."""
    name = f"layers.{layer}."
    normed = rms(block, w[name + "input_layernorm.weight"], 1e-6)
    keys = np.concatenate([rms(context, w[name + "input_layernorm.weight"], 1e-6), normed])
    where = np.concatenate([ahead, positions])
    # The gate multiplies before o_proj, so each row goes through an o_proj whose columns are scaled by its gates.
    rows = []
    for row in range(len(block)):
        gate = np.log1p(np.exp(w[name + "self_attn.g_proj.weight"] @ normed[row]))
        gate = gate if len(gate) == HEADS * HEAD_DIM else np.repeat(gate, HEAD_DIM)
        scaled = {**w, name + "self_attn.o_proj.weight": w[name + "self_attn.o_proj.weight"] * gate}
        one = slice(row, row + 1)
        rows.append(
            attention(scaled, layer, normed[one], keys, positions[one], where, visible[one], 1e6, head_norm_eps=1e-6)
        )
    x = block + np.concatenate(rows)
    return x + mlp(w, layer, rms(x, w[name + "post_attention_layernorm.weight"], 1e-6))


@pytest.mark.parametrize("gating", ["per-head", "per-element"])
@pytest.mark.parametrize("layer", [0, 1])
def test_laguna_layer(tmp_path: Path, layer: int, gating: str) -> None:
    draft, stored = written(
        tmp_path, "dflash", architectures=["DFlashLagunaForCausalLM"], is_causal=True, gating=gating
    )
    assert stored[f"layers.{layer}.self_attn.g_proj.weight"].shape == (4 if gating == "per-head" else 128, 64)
    block, context, positions, ahead = inputs()
    due = laguna(split(stored), layer, block, context, positions, ahead, past(BLOCK, CONTEXT + BLOCK))
    built: Any = draft.layer(layer, dtype=torch.float64)
    close(built.forward(tensor(block), places(positions), tensor(context), places(ahead)), due)
    inputs_ = built.probe(7, 1)
    torch.testing.assert_close(built.incremental(inputs_), built.prefill(inputs_), rtol=0, atol=1e-12)


def test_laguna_norms_each_tap_by_its_own_weight(tmp_path: Path) -> None:
    draft, w = written(tmp_path, "dflash", architectures=["DFlashLagunaForCausalLM"])
    taps = numbers(4, CONTEXT, 3, 64)
    normed = [rms(taps[:, index], w[f"aux_hidden_norms.{index}.weight"], 1e-6) for index in range(3)]
    due = rms(np.concatenate(normed, axis=-1) @ w["fc.weight"].T, w["hidden_norm.weight"], 1e-6)
    model = DFlash().build_model(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[arg-type]
    close(model.context(tensor(taps)), due)


def test_laguna_has_no_gate_where_gating_is_disabled() -> None:
    config = tiny_config("dflash", architectures=["DFlashLagunaForCausalLM"], gating="disabled")
    assert not [item for item in expected_tensors(config, "dflash")[1] if "g_proj" in item.name]


# --- fused qkv_proj on disk ----------------------------------------------------------------------


def fuse(tensors: dict[str, torch.Tensor], layers: tuple[int, ...] = (0, 1)) -> None:
    for layer in layers:
        name = f"layers.{layer}.self_attn."
        parts = [tensors.pop(f"{name}{key}_proj.weight") for key in "qkv"]
        tensors[name + "qkv_proj.weight"] = torch.cat(parts)


@pytest.mark.parametrize("family", [name for name in RELATIVES if name != "dflare"])
def test_projections_that_are_stored_joined_are_the_same_draft(tmp_path: Path, family: str) -> None:
    apart = load(Checkpoint.open(write_tiny(tmp_path / "apart", family)))
    joined = load(Checkpoint.open(write_tiny(tmp_path / "joined", family, edit=fuse)))
    assert joined.binding is not None
    assert (joined.binding.missing, joined.binding.unexpected) == ((), ())
    for index in (0, 1):
        one, other = apart.layer(index), joined.layer(index)
        probe = one.probe(5, 2)
        assert torch.equal(one.prefill(probe), other.prefill(probe))
    report = check_draft(tmp_path / "joined")
    assert report.ok
    judged = [item for item in report if item.id.startswith("fused-kv.") and "--draft-fused-kv" not in item.message]
    assert len(judged) > 10
    assert {item.status for item in judged} == {"passed"}


def test_an_eagle3_may_join_its_projections_too(tmp_path: Path) -> None:
    apart = load(Checkpoint.open(write_tiny(tmp_path / "apart", "eagle3")))
    joined = load(Checkpoint.open(write_tiny(tmp_path / "joined", "eagle3", edit=lambda found: fuse(found, (0,)))))
    probe = apart.layer(0).probe(5, 2)
    assert torch.equal(apart.layer(0).prefill(probe), joined.layer(0).prefill(probe))
    assert check_draft(tmp_path / "joined").ok


def test_layers_that_are_no_stack_are_refused_when_they_are_passed_in_by_hand(tmp_path: Path) -> None:
    draft, _ = written(tmp_path, "dflare")
    layers: Any = draft.layers()
    attention_ = layers[0].self_attn
    with pytest.raises(StackUnsupportedError):
        FusedKV(layers, attention_.rotary_emb, num_kv_heads=2, head_dim=32, device="cpu")


def test_a_stack_of_joined_projections_is_judged_by_its_headers(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        fuse(tensors)
        name = "layers.1.self_attn.qkv_proj.weight"
        tensors[name] = tensors[name].float()

    report = check_draft(write_tiny(tmp_path, "dflash", edit=edit), checks=["fused-kv.dtype"])
    assert report["fused-kv.dtype"].status == "failed"
    assert "expected bfloat16, got float32 at layer 1" in report["fused-kv.dtype"].message


# --- recognition ----------------------------------------------------------------------


@pytest.mark.parametrize("family", RELATIVES)
def test_a_relative_is_known_by_its_label_its_tensors_and_never_by_its_folder(tmp_path: Path, family: str) -> None:
    whole = load(Checkpoint.open(write_tiny(tmp_path / "dflash-draft", family)))
    assert (whole.recognition.family, whole.recognition.disagreement) == (family, ())
    config = tiny_config(family, architectures=..., dflash_config=..., speculators_model_type=...)
    tensors = {name: whole.tensor(name) for name in whole.binding.stored}  # type: ignore[union-attr]
    bare = load(Checkpoint.open(write_checkpoint(tmp_path / "eagle3", config, tensors)))
    assert (bare.recognition.family, bare.recognition.disagreement) == (family, ())
    assert {signal.kind for signal in bare.recognition.signals} == {"tensors"}


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "muse_glimmer_assistant"}, "dflash"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "dflash"),
        ({"architectures": ["DFlash2BeamDraftModel"]}, "dflash2"),
        ({"architectures": ["Qwen3XPressModel"]}, "xpress"),
        ({"speculators_model_type": "xpress"}, "xpress"),
        ({"dflash_config": {"projector_type": "domino"}}, "domino"),
        # Keys alone: what only one family states speaks for it, the rest for DFlash.
        ({"dflash_config": {"mask_token_id": 1, "conv_kernel_size": 2, "selector_rank": 4}}, "dflash2"),
        ({"dflash_config": {"mask_token_id": 1, "gru_hidden_dim": 8}}, "domino"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]}}, "dflash"),
    ],
)
def test_labels_and_keys(tmp_path: Path, config: dict[str, Any], family: str) -> None:
    found = load(Checkpoint.open(write_checkpoint(tmp_path, config, {"x": torch.zeros(1)}))).recognition
    assert (found.family, found.disagreement) == (family, ())


def test_a_dflash2_labelled_dflash_is_a_finding(tmp_path: Path) -> None:
    report = check_draft(write_tiny(tmp_path, "dflash2", config=tiny_config("dflash2")), checks=["config.family"])
    assert report["config.family"].status == "passed"
    tensors = load(Checkpoint.open(tmp_path))
    stored = {name: tensors.tensor(name) for name in tensors.binding.stored}  # type: ignore[union-attr]
    write_checkpoint(tmp_path, tiny_config("dflash2", architectures=["DFlashDraftModel"]), stored)
    result = check_draft(tmp_path, checks=["config.family"])["config.family"]
    assert result.status == "failed"
    assert "dflash2" in str(result.findings[0].got)


# --- every tensor counts ----------------------------------------------------------------------


def groups(family: str, **changes: Any) -> list[str]:
    """One required tensor of each kind, from the last layer where it is a layer's."""
    _, tensors = expected_tensors(tiny_config(family, **changes), family)
    kinds = {re.sub(r"\.\d+\.", ".N.", item.name): item.name for item in tensors if item.need == "required"}
    return list(kinds.values())


CASES = [(family, {}, name) for family in RELATIVES for name in groups(family)]
LAGUNA = {"architectures": ["DFlashLagunaForCausalLM"]}
CASES += [("dflash", LAGUNA, name) for name in groups("dflash", **LAGUNA)]


@pytest.mark.parametrize("how", ["missing", "misshapen"])
@pytest.mark.parametrize(("family", "changes", "name"), CASES, ids=[f"{case[0]} {case[2]}" for case in CASES])
def test_a_broken_tensor_is_named(tmp_path: Path, family: str, changes: dict[str, Any], name: str, how: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        value = tensors.pop(name)
        if how == "misshapen":
            tensors[name] = value[..., :-1].clone()

    path = write_tiny(tmp_path, family, edit=edit, **changes)
    report = check_draft(path, checks=["weights.missing", "weights.shapes", "vocabulary", "taps"])
    failed = [result for result in report if result.status == "failed"]
    assert failed
    told = "".join(f"{item.message}{item.where}{item.got}{item.due}" for result in failed for item in result.findings)
    assert name in told


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if isinstance(family, DFlash)])
def test_a_tiny_draft_passes_every_check(tmp_path: Path, family: str) -> None:
    report = check_draft(write_tiny(tmp_path, family))
    assert {result.status for result in report if not result.want} <= {"passed", "skipped"}, [
        str(item) for item in report
    ]


@pytest.mark.parametrize("family", RELATIVES)
def test_a_model_is_its_layers_between_fusion_and_norm(tmp_path: Path, family: str) -> None:
    draft, w = written(tmp_path, family)
    sheet = next(item for item in FAMILIES if item.name == family)
    model = sheet.build_model(draft.spec, draft.source(dtype=torch.float64))  # type: ignore[attr-defined]
    taps, block = tensor(numbers(4, CONTEXT, 3, 64)), tensor(numbers(5, BLOCK, 64))
    ahead, positions = torch.arange(CONTEXT), torch.arange(CONTEXT, CONTEXT + BLOCK)
    states = block
    context = model.context(taps)
    if family != "dflare":
        fused = taps.flatten(-2).numpy() @ w["fc.weight"].T
        close(context, rms(fused, w["hidden_norm.weight"], 1e-6))
    for index in (0, 1):
        layer: Any = draft.layer(index, dtype=torch.float64)
        states = layer.forward(states, positions, model.layer_context(context, index), ahead)
    close(model.forward(block, positions, taps, ahead), rms(states.numpy(), w["norm.weight"], 1e-6))
