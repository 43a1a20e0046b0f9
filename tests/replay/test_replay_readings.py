"""A replay is a function of the draft, of how it is read, and of the trace.

What goes wrong without this file: a reading that is taken from the checkpoint's own configuration after all, a memo of one reading that
serves another, a shift of the taps that takes the wrong states, a probe that compares a draft with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Target
from safetensors.torch import save_file

from pytest_specdecode import open_draft, testing
from pytest_specdecode.errors import LayerBuildError, NoReferenceError
from pytest_specdecode.families import Draft
from pytest_specdecode.replay import Trace, TraceError
from pytest_specdecode.replay.drafting import Drafter
from pytest_specdecode.replay.run import Replayer, replay
from pytest_specdecode.replay.target_weights import TargetMissingError, TargetWeights
from pytest_specdecode.spec import DraftSpec

VOCAB, LENGTH, PROMPT = 4, 80, 5
STARTS = torch.arange(1, LENGTH - 8)
Tensors = dict[str, torch.Tensor]
Reading = Callable[[DraftSpec], DraftSpec]


def attention(spec: DraftSpec, **changes: Any) -> DraftSpec:
    """`spec` with changes of every layer's attention."""
    layers = [replace(layer, attention=replace(layer.attention, **changes)) for layer in spec.layers if layer.attention]
    return replace(spec, layers=tuple(layers))


def rope(spec: DraftSpec, **changes: Any) -> DraftSpec:
    layers = []
    for layer in spec.layers:
        assert layer.attention is not None
        turned = replace(layer.attention, rope=replace(layer.attention.rope, **changes))
        layers.append(replace(layer, attention=turned))
    return replace(spec, layers=tuple(layers))


def flags(spec: DraftSpec, **changes: Any) -> DraftSpec:
    assert spec.eagle3 is not None
    return replace(spec, eagle3=replace(spec.eagle3, **changes))


def swapped(tensors: Tensors) -> None:
    """As a layer that reads [hidden, embedding] stores its columns."""
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        tensors[key] = tensors[key].roll(64, dims=1)


def as_offsets(tensors: Tensors) -> None:
    """The map whose offsets give the ids that this one holds."""
    tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))


EAGLE3 = {"vocab_size": VOCAB, "draft_vocab_size": 3}
#: Another reading of a draft, and the draft that is meant so: changes of its configuration and of its tensors.
READINGS: dict[str, tuple[str, Reading, dict[str, Any], Callable[[Tensors], None] | None]] = {
    "theta": ("eagle3", lambda spec: rope(spec, theta=100.0), {"rope_theta": 100.0}, None),
    "interleaved": ("eagle3", lambda spec: rope(spec, is_neox_style=False), {"is_neox_style": False}, None),
    "partial": ("eagle3", lambda spec: rope(spec, rotary_dim=16), {"partial_rotary_factor": 0.5}, None),
    "window": (
        "eagle3",
        lambda spec: attention(spec, sliding_window=3),
        {"layer_types": ["sliding_attention"], "sliding_window": 3},
        None,
    ),
    "unscaled": (
        "eagle3, scaled",
        lambda spec: rope(spec, rope_type="default", scaling={}),
        {"rope_scaling": None},
        None,
    ),
    "residual": ("eagle3", lambda spec: flags(spec, norm_before_residual=True), {"norm_before_residual": True}, None),
    "recycled": ("eagle3", lambda spec: flags(spec, norm_output=True), {"norm_output": True}, None),
    "hidden first": ("eagle3", lambda spec: flags(spec, hidden_first=True), {}, swapped),
    "absolute map": (
        "eagle3",
        lambda spec: replace(spec, vocabulary=replace(spec.vocabulary, absolute_map=True)),
        {},
        as_offsets,
    ),
    "causal": (
        "dflash",
        lambda spec: replace(spec, layers=tuple(replace(layer, is_causal=True) for layer in spec.layers)),
        {"is_causal": True},
        None,
    ),
}


def written(directory: Path, family: str, changes: dict[str, Any], edit: Callable[[Tensors], None] | None) -> Draft:
    family, _, scaled = family.partition(", ")
    base = EAGLE3 if family == "eagle3" else {"vocab_size": VOCAB, "dflash_config": {**BLOCK}}
    if scaled:
        base = {**base, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}

    def change(tensors: Tensors) -> None:
        if "d2t" in tensors:
            # Ids that are neither all offsets of zero nor out of range as ids.
            tensors["d2t"] = torch.tensor([0, 1, 1])
        if edit is not None:
            edit(tensors)

    path = testing.write_tiny(directory, family, dtype="float64", seed=3, edit=change, **{**base, **changes})
    return open_draft(path)


BLOCK = {"mask_token_id": 3, "target_layer_ids": [1, 9, 17], "block_size": 6}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(5, VOCAB, seed=11)


@pytest.fixture(scope="module")
def target_weights(target: Target, tmp_path_factory: pytest.TempPathFactory) -> TargetWeights:
    return TargetWeights(target.write(tmp_path_factory.mktemp("target") / "target"))


def trace(directory: Path, target: Target, taps: slice = slice(1, 4), metadata: dict[str, str] | None = None) -> Trace:
    """A greedy text of the target with some of its five states."""
    states, last = target.states(target.continued([1, 2, 3, 0, 2], LENGTH))
    text = target.continued([1, 2, 3, 0, 2], LENGTH)
    directory.mkdir()
    tensors = {
        "token_ids": torch.tensor(text),
        "hidden_states": torch.cat([states[:, taps], last[:, None]], dim=1).contiguous(),
        "loss_mask": torch.arange(LENGTH) >= PROMPT,
    }
    save_file(tensors, directory / "hs_0.safetensors", metadata)
    return Trace.open(directory)


def drafted(replayer: Replayer, drafter: Drafter) -> list[list[int]]:
    with torch.no_grad():
        return drafter.draft(STARTS, 4).tolist()


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_drafts_what_a_file_that_states_it_drafts(
    name: str, target: Target, target_weights: TargetWeights, tmp_path: Path
) -> None:
    family, reading, changes, edit = READINGS[name]
    draft = written(tmp_path / "draft", family, {}, None)
    other = written(tmp_path / "other", family, changes, edit)
    recorded = trace(tmp_path / "trace", target)
    replayer = Replayer(draft, target_weights, dtype=torch.float64)
    recording = recorded.read(recorded.files[0], replayer.spec)
    declared = drafted(replayer, replayer.model().read(recording))
    # The same recording, so that a memo of the declared reading would show.
    read_so = drafted(replayer, replayer.model(reading(replayer.spec)).read(recording))
    meant = Replayer(other, target_weights, dtype=torch.float64)
    assert read_so == drafted(meant, meant.model().read(recorded.read(recorded.files[0], meant.spec)))
    assert read_so != declared
    assert drafted(replayer, replayer.model().read(recording)) == declared


@pytest.mark.parametrize("ids", [(1, 7, 12), (13, 2, 8), (2, 8, 16)])
def test_other_taps_are_taken_from_what_is_recorded(
    ids: tuple[int, ...], target: Target, target_weights: TargetWeights, tmp_path: Path
) -> None:
    """By the layers that the states enter, which the file lists, and the last state for the layer behind the last."""
    listed = [1, 2, 7, 8, 12, 13]
    draft = written(tmp_path / "draft", "eagle3", {}, None)
    wide = Target(6, VOCAB, seed=11)
    recorded = trace(tmp_path / "trace", wide, slice(None), {"layer_ids": str(listed)})
    replayer = Replayer(draft, target_weights, dtype=torch.float64)
    recording = recorded.read(recorded.files[0], replayer.spec)
    spec = replace(replayer.spec, taps=replace(replayer.spec.taps, ids=ids, convention="boundary"))
    states = {**{id: recording.states[:, place] for place, id in enumerate(listed)}, 16: recording.last}
    chosen = torch.stack([state for id in ids if (state := states[id]) is not None], dim=1)
    by_hand = replace_states(recording, chosen)
    assert drafted(replayer, replayer.model(spec).read(recording)) == drafted(replayer, replayer.model().read(by_hand))


def replace_states(recording: Any, states: torch.Tensor) -> Any:
    return replace(recording, states=states, boundaries=(2, 8, 13), memo={})


def test_the_embedding_is_what_enters_layer_0(target: Target, target_weights: TargetWeights, tmp_path: Path) -> None:
    draft = written(tmp_path / "draft", "eagle3", {}, None)
    recorded = trace(tmp_path / "trace", target)
    replayer = Replayer(draft, target_weights, dtype=torch.float64)
    recording = recorded.read(recorded.files[0], replayer.spec)
    spec = replace(replayer.spec, taps=replace(replayer.spec.taps, ids=(0, 2, 8), convention="boundary"))
    states = torch.cat([target.embedding[recording.tokens][:, None], recording.states[:, :2]], dim=1)
    by_hand = replace_states(recording, states)
    assert drafted(replayer, replayer.model(spec).read(recording)) == drafted(replayer, replayer.model().read(by_hand))
    spec = replace(replayer.spec, taps=replace(replayer.spec.taps, ids=(3, 8, 13), convention="boundary"))
    with pytest.raises(TraceError, match=r"the state that enters layer 3 is not recorded; those of \[2, 8, 13\] are$"):
        replayer.model(spec).read(recording)


def test_a_reading_that_the_tensors_do_not_allow_is_refused(target_weights: TargetWeights, tmp_path: Path) -> None:
    replayer = Replayer(written(tmp_path / "draft", "eagle3", {}, None), target_weights)
    with pytest.raises(LayerBuildError, match="fc_norm"):
        replayer.model(flags(replayer.spec, fc_norm=True))


def test_only_the_shared_tensors_of_a_target_are_read(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's other tensors may be huge, or not there."""
    from pytest_specdecode.checkpoint import Checkpoint

    weights = TargetWeights(target.write(tmp_path / "target"))
    read: list[str] = []
    plain = Checkpoint.tensor

    def noted(self: Checkpoint, name: str, rows: slice | None = None) -> torch.Tensor:
        if self.path == tmp_path / "target":
            read.append(name)
        return plain(self, name, rows)

    monkeypatch.setattr(Checkpoint, "tensor", noted)
    draft = written(tmp_path / "draft", "dflash", {}, None)
    replay(draft, trace(tmp_path / "trace", target), target=weights)
    assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_a_tied_target_has_its_embedding_for_a_head(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "hidden_size": 8, "tie_word_embeddings": True}
    weights = TargetWeights(testing.write_checkpoint(tmp_path, config, {"model.embed_tokens.weight": torch.ones(4, 8)}))
    assert weights.head is weights.embedding
    with pytest.raises(TargetMissingError, match="the target's final norm is not among its weights"):
        weights.final_norm(torch.float32)


def test_norms_that_multiply_by_one_more_are_known_by_the_model(tmp_path: Path) -> None:
    """x = (3, 4): its root mean square is sqrt(12.5)."""
    tensors = {"model.norm.weight": torch.tensor([0.5, 1.0])}
    given = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for model_type, due in (
        ("llama", [0.5, 1.0]),
        ("gemma2", [1.5, 2.0]),
        ("qwen3_next", [1.5, 2.0]),
        ("gemma4", [0.5, 1.0]),
    ):
        config = {"model_type": model_type, "rms_norm_eps": 0.0}
        weights = TargetWeights(testing.write_checkpoint(tmp_path / model_type, config, tensors))
        found = weights.final_norm(torch.float64)(given)
        assert found.tolist() == pytest.approx([3 * due[0] / 12.5**0.5, 4 * due[1] / 12.5**0.5])


@pytest.mark.parametrize("family", ["medusa", "hydra", "mlp-speculator", "xpress", "eagle4"])
def test_what_has_no_replay_says_so(family: str, tmp_path: Path) -> None:
    draft = open_draft(testing.write_tiny(tmp_path / "draft", family))
    with pytest.raises(NoReferenceError, match=r"is not written$"):
        Replayer(draft).model()
