"""The probe names the reading that wrote a text, and says so where it cannot tell.

What goes wrong without this file: a probe that compares a draft with itself, that names what chance has made better, that calls a reading
right or wrong which its trace cannot tell, that changes more than the one convention; a convention that nobody replays.

The truth is known here because the text is written by the draft itself: every token is what the draft proposes in one reading, over states
that are random. So that reading is accepted always, and any other by chance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pytest_specdecode import api, open_draft, testing
from pytest_specdecode.families import Draft
from pytest_specdecode.replay import Trace, readings
from pytest_specdecode.replay.probe import ALPHA, ProbeResult, holm, mcnemar, probe, settled_by
from pytest_specdecode.replay.readings import CONVENTIONS, OtherReading, other_readings
from pytest_specdecode.replay.run import Replayer, operations
from pytest_specdecode.replay.target_weights import TargetWeights
from pytest_specdecode.spec import DraftSpec
from pytest_specdecode.target import Target

VOCAB, LENGTH, PROMPT, HIDDEN, COUNT = 64, 130, 4, 64, 3
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
CASES = [
    case("eagle3", "theta 10000", "theta 100", rope_theta=100.0),
    case("eagle3", "theta 1e6", "theta 100", rope_theta=100.0),
    case("eagle3", "theta 3000", "theta 100", rope_theta=100.0),
    case("eagle3", "interleaved", "neox", rope_theta=100.0),
    case("eagle3", "partial rotary 0.5", "partial rotary off", rope_theta=100.0),
    case(
        "eagle3",
        "rope scaling off",
        "rope scaling on",
        rope_theta=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    case("eagle3", "taps reversed", "taps [2, 8, 13]"),
    case("eagle3", "taps sorted", "taps [8, 2, 13]", eagle_aux_hidden_state_layer_ids=[8, 2, 13], eagle_config=...),
    case("eagle3", "taps +1", "taps [2, 8, 13]"),
    case("eagle3", "taps -1", "taps [2, 8, 13]"),
    case("eagle3", "normed residual", "raw residual"),
    case("eagle3", "recycled state normed", "recycled state raw", together=2),
    case("eagle3", "hidden-first", "embed-first"),
    case("eagle3", "fc_norm on", "fc_norm off", together=2, tensors=FC_NORM),
    case("eagle3", "norm_before_fc on", "norm_before_fc off", tensors={"input_norm.weight": (3 * HIDDEN,)}),
    case("eagle3", "window 3", "no window", sliding_window=3),
    case("eagle3", "d2t as ids", "d2t as offsets"),
    case("eagle3-mla", "neox", "interleaved", rope_theta=100.0),
    case("peagle", "interleaved", "neox", rope_theta=100.0),
    case("eagle1", "hidden-first", "embed-first"),
    case("mtp", "hidden-first", "embed-first"),
    case("dflash", "theta 1e6", "theta 100", rope_theta=100.0),
    case("dflash", "interleaved", "neox", rope_theta=100.0),
    case("dflash", "partial rotary 0.5", "partial rotary off", rope_theta=100.0),
    case("dflash", "qk_norm off", "qk_norm on"),
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
            if name == "fc.weight":
                tensors[name] *= 10
        for name, shape in item.tensors.items():
            tensors[name] = 1 + torch.randn(shape, generator=chance)
        if "d2t" in tensors:
            # Ids and offsets that are both ids of the target.
            tensors["d2t"] = torch.arange(len(tensors["d2t"]))
            tensors["t2d"] = torch.arange(VOCAB) % 2 == 0

    config: dict[str, Any] = {"vocab_size": VOCAB}
    if item.family in ("eagle3", "eagle3-mla", "peagle"):
        config["draft_vocab_size"] = VOCAB // 2
    if item.family == "eagle3-mla":
        config |= {"eagle_aux_hidden_state_layer_ids": [2, 8, 13], "eagle_config": ...}
    if item.family == "peagle":
        config["mask_token_id"] = 3
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
            # A block's rows look at one another, so that as many are drafted as later on.
            drafted = model.read(recording).draft(torch.tensor([start]), COUNT)
            tokens[start + 1 : start + 1 + together] = drafted[0, :together]
    save()
    return Trace.open(directory)


def probed(draft: Draft, replayer: Replayer, trace: Trace, place: Path) -> ProbeResult:
    return probe(replayer, trace, other_readings(draft, Target.open(place)), draft_tokens=COUNT)


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
    if item.name not in ("taps sorted", "rope scaling off"):
        assert back is not None
        assert (back.verdict, back.only_declared, back.only_other) == ("worse", first.only_other, first.only_declared)
    assert again.declared == first.rate


def test_every_convention_is_misread_once() -> None:
    """By those that only engines take otherwise in another test."""
    of_engines = {"value scale", "mask token"}
    drafts = {item.family: testing.tiny_config(item.family) for item in CHOSEN}
    assert set(drafts) == {"eagle3", "eagle3-mla", "peagle", "eagle1", "mtp", "dflash", "dspark"}
    assert {key for item in CHOSEN for key in [KEYS[item.name]]} == {item.key for item in CONVENTIONS} - of_engines


CHOSEN: list[Case] = [param.values[0] for param in CASES]
KEYS = {
    **dict.fromkeys(("theta 10000", "theta 1e6", "theta 3000"), "theta"),
    **dict.fromkeys(("interleaved", "neox"), "rope style"),
    **dict.fromkeys(("taps reversed", "taps sorted", "taps +1", "taps -1"), "taps"),
    **dict.fromkeys(("anchor row drafts", "first mask row drafts"), "anchor row"),
    "partial rotary 0.5": "partial rotary",
    "normed residual": "residual",
    "recycled state normed": "recycled state",
    "hidden-first": "order of halves",
    "fc_norm on": "norm per tap",
    "norm_before_fc on": "norm before fc",
    "rope scaling off": "rope scaling",
    "qk_norm off": "norm per head",
    "window 3": "window",
    "d2t as ids": "d2t",
    "causal": "causality",
}


def test_one_reading_changes_one_thing(place: Path, tmp_path: Path) -> None:
    """No reading is the declared one, no two are the same, and each can be told by name."""
    for family in ("eagle3", "dflash", "mtp"):
        draft = open_draft(testing.write_tiny(tmp_path / family, family))
        others = other_readings(draft, Target.open(place))
        specs = [draft.spec, *(item.spec for item in others)]
        assert all(one != two for place, one in enumerate(specs) for two in specs[:place])
        names = [item.name for item in others]
        assert len(set(names)) == len(names)
        assert all(item.name != item.declared for item in others)


# --- what engines take ---


def test_what_an_engine_takes_is_a_reading_too(place: Path, tmp_path: Path) -> None:
    draft = open_draft(testing.write_tiny(tmp_path / "draft", "dflash"))
    values: dict[str, list[Any]] = {
        "rope-theta": [123.0, None, "many", 1000000.0],
        "value-scale": [0.5],
        "mask-token-id": [7, True],
        "taps": [[2, 10], [1, 2, 3]],
        "sliding-window": [(None, 8), (None,)],
    }
    names = [item.name for item in other_readings(draft, None, values)]
    assert {"theta 123", "value scale 0.5", "mask token 7", "taps [1, 2, 3]", "window 8 in some layers"} <= set(names)
    assert not any("many" in name or "True" in name or "[2, 10]" in name for name in names)


def test_an_engine_that_leaves_the_norm_per_head_out_is_said_to(tmp_path: Path) -> None:
    """SGLang builds an EAGLE3 layer as Llama's, whatever norms the file holds; vLLM builds Qwen3's."""

    def norms(tensors: Tensors) -> None:
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.0.self_attn.{name}.weight"] = torch.ones(16)

    stated: dict[str, Any] = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    draft = open_draft(testing.write_tiny(tmp_path / "draft", "eagle3", edit=norms, head_dim=16, **stated))
    assert draft.spec is not None
    taken = readings.taken(draft, None, ("sglang", "vllm"))
    names = {name: readings.engine_reading(draft.spec, settings).names for name, settings in taken.items()}
    assert "qk_norm off" in names["sglang"]
    assert "qk_norm off" not in names["vllm"]


def check(draft: Path, place: Path, trace: Path, **options: Any) -> Any:
    return api.check_draft(draft, place, checks="acceptance.conventions", trace=trace, draft_tokens=COUNT, **options)[
        "acceptance.conventions"
    ]


def test_the_check_names_the_reading_with_figures(place: Path, tmp_path: Path) -> None:
    draft = written(tmp_path / "draft", CHOSEN[3])
    replayer = Replayer(draft, TargetWeights(place))
    record(tmp_path / "trace", replayer, named(draft, place, "interleaved").spec)
    result = check(tmp_path / "draft", place, tmp_path / "trace")
    figures = result.figures
    (other,) = [item for item in figures["readings"] if item["reading"] == "interleaved"]
    ours, theirs = figures["declared"]["accepted_length"], other["accepted_length"]
    assert result.status == "failed"
    assert result.findings[0].severity == "error"
    assert result.message == f"declared neox, {ours:.2f}; interleaved, {theirs:.2f}"
    assert theirs > 2 > ours
    # TensorRT-LLM's class takes halves whatever the file says.
    outcome = result.findings[0].outcomes["tensorrt-llm"]
    assert (outcome.outcome, outcome.message.rpartition(": about ")[2]) == ("serves wrong", f"{ours:.2f}")
    assert json.loads(json.dumps(result.to_dict()))["figures"]["readings"][0]["verdict"] in ("better", "worse", "open")
    # The same figure as the other check's.
    served = api.replay(tmp_path / "draft", tmp_path / "trace", place, COUNT)
    assert ours == pytest.approx(served.accepted_length)


def test_the_check_passes_and_says_what_engines_will_read(place: Path, tmp_path: Path) -> None:
    """TensorRT-LLM's class never norms the residual."""
    item = replace(CHOSEN[3], config={"norm_before_residual": True, "rope_theta": 100.0})
    draft = written(tmp_path / "draft", item)
    replayer = Replayer(draft, TargetWeights(place))
    record(tmp_path / "trace", replayer, replayer.spec)
    result = check(tmp_path / "draft", place, tmp_path / "trace", engines=["vllm", "tensorrt-llm"])
    assert result.status == "passed"
    (raw,) = [item for item in result.figures["readings"] if item["reading"] == "raw residual"]
    lengths = result.figures["engines"]
    ours, theirs = result.figures["declared"]["accepted_length"], raw["accepted_length"]
    assert (lengths["vllm"]["differs"], lengths["vllm"]["accepted_length"]) == ([], ours)
    assert (lengths["tensorrt-llm"]["differs"], lengths["tensorrt-llm"]["accepted_length"]) == (
        ["raw residual"],
        theirs,
    )
    assert f"{ours:.2f} as declared; worse: " in result.message
    assert f"vLLM will read as declared: about {ours:.2f}" in result.message
    assert f"TensorRT-LLM will read raw residual: about {theirs:.2f}" in result.message
    assert "SGLang" not in result.message


def test_a_short_trace_settles_nothing_and_says_how_much_would(place: Path, tmp_path: Path) -> None:
    draft = written(tmp_path / "draft", CHOSEN[3])
    replayer = Replayer(draft, TargetWeights(place))
    record(tmp_path / "trace", replayer, named(draft, place, "interleaved").spec, length=9)
    result = check(tmp_path / "draft", place, tmp_path / "trace")
    assert result.status == "inconclusive"
    assert result.message.startswith("a trace of 9 tokens tells no other reading from the declared one (")
    assert all(item["verdict"] == "open" for item in result.figures["readings"])
    for item in result.figures["readings"]:
        assert item["settled_by_tokens"] > item["compared"]
        assert f"{item['reading']} " in result.message
        assert f"about {item['settled_by_tokens']:,} tokens would settle" in result.message


def test_what_a_trace_cannot_tell_is_listed_beside_what_it_can(place: Path, tmp_path: Path) -> None:
    """A window as long as the trace changes nothing."""
    item = replace(CHOSEN[3], config={"sliding_window": 4000, "rope_theta": 100.0})
    draft = written(tmp_path / "draft", item)
    replayer = Replayer(draft, TargetWeights(place))
    record(tmp_path / "trace", replayer, replayer.spec)
    result = check(tmp_path / "draft", place, tmp_path / "trace")
    assert result.status == "passed"
    (window,) = [item for item in result.figures["readings"] if item["convention"] == "window"]
    assert (window["verdict"], window["only_declared"], window["only_other"], window["p"]) == ("open", 0, 0, 1.0)
    listed = f"window 4000 {window['accepted_length']:.2f} (about {window['settled_by_tokens']:,} tokens"
    assert listed in result.message.partition("not told apart: ")[2]


def test_a_trace_that_the_draft_cannot_be_replayed_on_leaves_it_open(place: Path, tmp_path: Path) -> None:
    draft = written(tmp_path / "draft", CHOSEN[3])
    replayer = Replayer(draft, TargetWeights(place))
    record(tmp_path / "trace", replayer, replayer.spec, length=12)
    report = api.check_draft(tmp_path / "draft", checks="acceptance.conventions", trace=tmp_path / "trace")
    result = report["acceptance.conventions"]
    assert (result.status, result.want) == ("inconclusive", "target")
    assert check(tmp_path / "draft", place, tmp_path / "trace").status == "inconclusive"


def test_readings_whose_states_are_not_recorded_are_said_to_be_so(place: Path, tmp_path: Path) -> None:
    """As speculators records a draft's taps, and nothing beside them."""
    draft = written(tmp_path / "draft", replace(CHOSEN[3], config={"rope_theta": 100.0}))
    replayer = Replayer(draft, TargetWeights(place))
    trace = record(tmp_path / "whole", replayer, replayer.spec)
    recording = trace.read(trace.files[0], replayer.spec)
    assert recording.boundaries is not None
    assert recording.last is not None
    kept = [recording.boundaries.index(id) for id in (2, 8, 13)]
    states = torch.cat([recording.states[:, kept], recording.last[:, None]], dim=1)
    (tmp_path / "trace").mkdir()
    parts = {"token_ids": recording.tokens, "hidden_states": states, "loss_mask": recording.own}
    save_file(parts, tmp_path / "trace" / "hs_0.safetensors")
    result = check(tmp_path / "draft", place, tmp_path / "trace")
    assert result.status == "passed"
    assert "; not in this trace: taps +1, taps -1" in result.message
    assert result.figures["unrecorded"] == ["taps +1", "taps -1"]
    assert set(result.figures["unrecorded"]) < set(result.figures["refused"])


# --- the work ---


def test_weights_are_read_once_for_all_readings(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_specdecode.checkpoint import Checkpoint

    draft = written(tmp_path / "draft", CHOSEN[3])
    record(tmp_path / "trace", Replayer(draft, TargetWeights(place)), draft_spec(draft), length=40)
    read: list[str] = []
    original = Checkpoint.tensor

    def noted(self: Checkpoint, name: str, rows: slice | None = None) -> torch.Tensor:
        read.append(name)
        return original(self, name, rows)

    monkeypatch.setattr(Checkpoint, "tensor", noted)
    probed(draft, Replayer(draft, TargetWeights(place)), Trace.open(tmp_path / "trace"), place)
    # The map of ids is asked for by every reading of it, and the head for its size.
    assert {name for name in read if read.count(name) > 1} <= {"d2t", "lm_head.weight"}


def draft_spec(draft: Draft) -> DraftSpec:
    assert draft.spec is not None
    return draft.spec


def test_too_much_work_leaves_out_starts_the_same_for_all(place: Path, tmp_path: Path) -> None:
    draft = written(tmp_path / "draft", CHOSEN[3])
    replayer = Replayer(draft, TargetWeights(place))
    other = named(draft, place, "interleaved")
    trace = record(tmp_path / "trace", replayer, other.spec)
    whole = probe(replayer, trace, [other], draft_tokens=COUNT)
    most = 2 * operations(replayer, COUNT) * (whole.starts // 2)
    half = probe(replayer, trace, [other], draft_tokens=COUNT, most_operations=most)
    assert (whole.sampled, half.sampled) == (False, True)
    assert half.starts < 0.6 * whole.starts
    assert half.comparisons[0].compared == half.starts
    assert half.better[0].reading.name == "interleaved"


# --- the statistics ---


@pytest.mark.parametrize(
    ("one", "other", "p"),
    [
        (0, 0, 1.0),
        (0, 5, 2 / 32),
        (5, 1, 2 * (1 + 6) / 64),
        (3, 3, 1.0),
        (2, 10, 2 * (1 + 12 + 66) / 4096),
        (500, 500, 1.0),
        (0, 5000, 0.0),
    ],
)
def test_mcnemar_by_hand(one: int, other: int, p: float) -> None:
    """Sums of binomial coefficients, written out."""
    assert mcnemar(one, other) == mcnemar(other, one) == p


def test_holm_by_hand() -> None:
    """0.01 three times over, 0.03 twice, 0.04 no less than that."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("compared", "one", "other", "tokens", "difference"),
    [
        # (2.5758 * 0.1 + 0.8416 * sqrt(0.0099))^2 / 0.0001
        (10, 0, 0, 1165, 0.01),
        # As long as that already: half of it, (2.5758 * sqrt(0.005) + 0.8416 * sqrt(0.004975))^2 / 0.000025
        (2000, 0, 0, 2333, 0.005),
        # (2.5758 * sqrt(0.3) + 0.8416 * sqrt(0.26))^2 / 0.04
        (20, 1, 5, 85, 0.2),
        # All on one side at every token: eight pairs, 2 / 2^8 < 0.01 < 2 / 2^7
        (4, 0, 4, 8, 1.0),
    ],
)
def test_the_tokens_that_would_settle_it_by_hand(
    compared: int, one: int, other: int, tokens: int, difference: float
) -> None:
    found = settled_by(compared, one, other)
    assert found[0] == pytest.approx(tokens, abs=1)
    assert found[1] == difference
    assert settled_by(compared, one, other, tests=10)[0] > found[0]


def test_chance_does_not_make_a_reading_better() -> None:
    """Five starts to none are not enough among ten readings, sixteen to none are."""
    assert holm([mcnemar(0, 5)] + [1.0] * 9)[0] > ALPHA
    assert holm([mcnemar(0, 16)] + [1.0] * 9)[0] < ALPHA
