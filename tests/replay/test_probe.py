"""The probe names the reading that wrote a text, and says so where it cannot tell.

What goes wrong without this file: a probe that compares a draft with itself, that names what chance has made better, that calls a reading
right or wrong which its trace cannot tell, that changes more than the one convention; a convention that nobody replays.

The truth is known here because the text is written by the draft itself: every token is what the draft proposes in one reading, over states
that are random. So that reading is accepted always, and any other by chance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pytest_specdecode import api, open_draft, testing
from pytest_specdecode.families import Draft
from pytest_specdecode.replay import Trace
from pytest_specdecode.replay.probe import ALPHA, ProbeResult, holm, mcnemar, probe, settled_by
from pytest_specdecode.replay.readings import CONVENTIONS, OtherReading, other_readings
from pytest_specdecode.replay.run import Replayer
from pytest_specdecode.replay.target_weights import TargetWeights
from pytest_specdecode.spec import DraftSpec
from pytest_specdecode.target import Target

VOCAB, LENGTH, PROMPT, HIDDEN = 64, 130, 4, 64
#: The states that are recorded: those that are tapped, their neighbours, and the last one.
LAYERS = [1, 2, 3, 7, 8, 9, 12, 13, 14]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reading that a draft can be misread in.

    Attributes:
        family: of the draft.
        name: the reading that wrote the text, as the probe calls it.
        declared: what the probe calls the declared one.
        config: changes of the tiny configuration, which is what is declared.
        tensors: tensors beside those that the declared reading calls for.
        together: tokens written in one round.
    """

    family: str
    name: str
    declared: str
    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    together: int = 1


def case(family: str, name: str, declared: str, together: int = 1, **config: Any) -> Any:
    tensors = config.pop("tensors", {})
    item = Case(family=family, name=name, declared=declared, config=config, tensors=tensors, together=together)
    return pytest.param(item, id=f"{family}-{name}")


FC_NORM = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
DFLASH = {"mask_token_id": 3, "target_layer_ids": [1, 7, 12], "block_size": 6}
ROTARY = {"rope_theta": 100.0}
CASES = [
    case("eagle3", "theta 10000", "theta 100", rope_theta=100.0),
    case("eagle3", "theta 1e6", "theta 100", rope_theta=100.0),
    case("eagle3", "theta 3000", "theta 100", rope_theta=100.0),
    case("eagle3", "interleaved", "neox", **ROTARY),
    case("eagle3", "partial rotary 0.5", "partial rotary off", **ROTARY),
    case("eagle3", "taps reversed", "taps [2, 8, 13]"),
    case("eagle3", "taps sorted", "taps [8, 2, 13]", eagle_aux_hidden_state_layer_ids=[8, 2, 13], eagle_config=...),
    case("eagle3", "taps +1", "taps [2, 8, 13]"),
    case("eagle3", "taps -1", "taps [2, 8, 13]"),
    case("eagle3", "normed residual", "raw residual"),
    case("eagle3", "recycled state normed", "recycled state raw", together=2),
    case("eagle3", "hidden-first", "embed-first"),
    case("eagle3", "fc_norm on", "fc_norm off", tensors=FC_NORM),
    case("eagle3", "norm_before_fc on", "norm_before_fc off", tensors={"input_norm.weight": (3 * HIDDEN,)}),
    case("eagle3", "window 3", "no window", sliding_window=3),
    case("eagle3", "d2t as ids", "d2t as offsets"),
    case("eagle3-mla", "neox", "interleaved", **ROTARY),
    case("peagle", "interleaved", "neox", **ROTARY),
    case("eagle1", "hidden-first", "embed-first"),
    case("mtp", "hidden-first", "embed-first"),
    case("dflash", "theta 1e6", "theta 100", rope_theta=100.0),
    case("dflash", "interleaved", "neox", **ROTARY),
    case("dflash", "partial rotary 0.5", "partial rotary off", **ROTARY),
    case("dflash", "taps reversed", "taps [2, 8, 13]"),
    case("dflash", "taps +1", "taps [2, 8, 13]"),
    case("dflash", "anchor row drafts", "first mask row drafts"),
    case("dflash", "causal", "not causal"),
    case("dflash", "window 3", "no window", sliding_window=3, layer_types=["full_attention"] * 2),
    case("dspark", "first mask row drafts", "anchor row drafts"),
]


#: What the declared taps are called from where they were read otherwise; from sorted ones there is no way back.
BACK = {"taps +1": "taps -1", "taps -1": "taps +1", "taps reversed": "taps reversed"}


def written(directory: Path, item: Case) -> Draft:
    """The draft as declared, with attention that matters."""

    def edit(tensors: Tensors) -> None:
        chance = torch.Generator().manual_seed(5)
        for name in tensors:
            if name.endswith(("q_proj.weight", "q_b_proj.weight")):
                tensors[name] *= 4
            if name.endswith("o_proj.weight"):
                tensors[name] *= 6
        for name, shape in item.tensors.items():
            tensors[name] = 1 + torch.randn(shape, generator=chance)
        if "d2t" in tensors:
            # Ids and offsets that are both ids of the target.
            tensors["d2t"] = torch.arange(len(tensors["d2t"]))
            tensors["t2d"] = torch.arange(VOCAB) % 2 == 0

    config: dict[str, Any] = {"vocab_size": VOCAB}
    if item.family in ("eagle3", "eagle3-mla", "peagle"):
        config["draft_vocab_size"] = VOCAB // 2
    if item.family in ("dflash", "dspark"):
        nested = testing.tiny_config(item.family).get("dflash_config") or {}
        if nested:
            config["dflash_config"] = {**nested, **DFLASH}
        else:
            config |= DFLASH
    whole = testing.tiny_config(item.family, **{**config, **item.config})
    path = testing.write_tiny(directory, item.family, config=whole, dtype="float32", seed=3, edit=edit)
    return open_draft(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's embedding, norm and head, with a base that no other reader has."""
    chance = torch.Generator().manual_seed(1)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 3000.0,
    }
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=chance),
        "model.norm.weight": 1 + torch.randn(HIDDEN, generator=chance) / 4,
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=chance),
    }
    return testing.write_checkpoint(tmp_path_factory.mktemp("target"), config, tensors)


def record(
    directory: Path, replayer: Replayer, spec: DraftSpec, length: int = LENGTH, together: int = 1, seed: int = 7
) -> Trace:
    """A text that the draft writes, read as `spec`, in rounds of `together` tokens, over random states."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (length,), generator=chance)
    stated = replayer.spec.taps.required and replayer.spec.taps.ids is not None
    states = torch.randn(length, (len(LAYERS) if stated else 0) + 1, HIDDEN, generator=chance)
    directory.mkdir()
    file = directory / "hs_0.safetensors"
    said = {"layer_ids": json.dumps(LAYERS)} if stated else None
    model = replayer.model(spec)

    def save() -> None:
        parts = {"token_ids": tokens, "hidden_states": states, "loss_mask": torch.arange(length) >= PROMPT}
        save_file(parts, file, said)

    save()
    recording = Trace.open(directory).read(file, replayer.spec)
    with torch.no_grad():
        for start in range(PROMPT - 1, length - together, together):
            recording.tokens = tokens
            drafted = model.read(recording).draft(torch.tensor([start]), together)
            tokens[start + 1 : start + 1 + together] = drafted[0]
    save()
    return Trace.open(directory)


def probed(draft: Draft, replayer: Replayer, trace: Trace, place: Path) -> ProbeResult:
    return probe(replayer, trace, other_readings(draft, Target.open(place)), draft_tokens=3)


def named(draft: Draft, place: Path, name: str) -> OtherReading:
    return next(item for item in other_readings(draft, Target.open(place)) if item.name == name)


@pytest.mark.parametrize("item", CASES)
def test_the_reading_that_wrote_the_text_is_named(item: Case, place: Path, tmp_path: Path) -> None:
    """And once it is the declared one, nothing is better and what was declared before is worse."""
    draft = written(tmp_path / "draft", item)
    replayer = Replayer(draft, TargetWeights(place), dtype=torch.float64)
    other = named(draft, place, item.name)
    assert other.declared == item.declared
    trace = record(tmp_path / "trace", replayer, other.spec, together=item.together)
    found = probed(draft, replayer, trace, place)
    assert found.better, [(one.reading.name, one.only_declared, one.only_other) for one in found.comparisons]
    first = found.better[0]
    assert first.reading.name == item.name
    assert first.only_declared < first.only_other
    assert first.corrected <= ALPHA
    if item.together == 1:
        assert first.rate.first == 1
        assert first.only_declared == 0
    draft.spec = other.spec
    again = probed(draft, replayer, trace, place)
    assert not again.better
    back = {one.reading.name: one for one in again.comparisons}.get(BACK.get(item.name, item.declared))
    if item.name != "taps sorted":
        assert back is not None
        assert (back.verdict, back.only_declared, back.only_other) == ("worse", first.only_other, first.only_declared)
    assert again.declared == first.rate
