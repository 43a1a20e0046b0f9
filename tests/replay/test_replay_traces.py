"""What is read of a recorded trace, and what is refused.

What goes wrong without this file: a trace of another target or another draft that is replayed and blamed on the checkpoint, NaN that turns
into token 0, a prompt whose tokens are counted as the target's, a last state that is normed twice or never, a file that is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Target
from safetensors.torch import save_file

from pytest_specdecode import api, open_draft, testing
from pytest_specdecode.errors import DraftError
from pytest_specdecode.replay import Recording, Trace, TraceError
from pytest_specdecode.replay.truth import known
from pytest_specdecode.spec import DraftSpec

TOKENS, TAPS, WIDTH, VOCAB = 9, 3, 64, 512
Parts = dict[str, Any]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DraftSpec:
    """An EAGLE3 draft's: three taps, which enter layers 2, 8 and 13, of 64 lanes, and 512 ids."""
    found = open_draft(testing.write_tiny(tmp_path_factory.mktemp("draft"), "eagle3")).spec
    assert found is not None
    return found


def parts() -> Parts:
    chance = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, TAPS + 1, WIDTH, generator=chance).bfloat16()
    return {"token_ids": torch.arange(TOKENS) * 50, "hidden_states": states}


def read(directory: Path, spec: DraftSpec, given: Parts, metadata: dict[str, str] | None = None) -> Recording:
    save_file(given, directory / "hs_0.safetensors", metadata=metadata)
    trace = Trace.open(directory)
    return trace.read(trace.files[0], spec)


def test_taps_and_the_last_state_are_told_apart(tmp_path: Path, spec: DraftSpec) -> None:
    given = parts()
    found = read(tmp_path, spec, given)
    assert torch.equal(found.states, given["hidden_states"][:, :3])
    assert found.last is not None
    assert torch.equal(found.last, given["hidden_states"][:, 3])
    assert not found.last_is_normed
    assert found.boundaries == (2, 8, 13)
    assert found.own is None


def test_a_trace_without_the_last_state_is_read(tmp_path: Path, spec: DraftSpec) -> None:
    given = parts()
    given["hidden_states"] = given["hidden_states"][:, :3].contiguous()
    assert read(tmp_path, spec, given).last is None


def test_specforge_keeps_taps_side_by_side_and_a_normed_last_state(tmp_path: Path, spec: DraftSpec) -> None:
    given = parts()
    states = given["hidden_states"]
    stored = {
        "input_ids": given["token_ids"].int()[None],
        "loss_mask": torch.tensor([0.0] * 4 + [1.0] * 5),
        "aux_hidden_state": states[:, :3].flatten(1)[None],
        "hidden_state": states[:, 3][None],
        "position_ids": torch.arange(TOKENS),
    }
    torch.save(stored, tmp_path / "0001.ckpt")
    trace = Trace.open(tmp_path)
    found = trace.read(trace.files[0], spec)
    assert torch.equal(found.tokens, given["token_ids"])
    assert torch.equal(found.states, states[:, :3])
    assert found.last is not None
    assert torch.equal(found.last, states[:, 3])
    assert found.last_is_normed
    assert found.own is not None
    assert found.own.tolist() == [False] * 4 + [True] * 5


def test_metadata_says_what_more_is_recorded(tmp_path: Path, spec: DraftSpec) -> None:
    given = parts()
    given["hidden_states"] = torch.randn(TOKENS, 6, WIDTH)
    metadata = {"layer_ids": "[1, 2, 8, 13, 14]", "prompt_length": "4", "last_state": "normed"}
    found = read(tmp_path, spec, given, metadata)
    assert found.boundaries == (1, 2, 8, 13, 14)
    assert found.states.shape[1] == 5
    assert found.last_is_normed
    assert found.own is not None
    assert (found.own_by, found.own.sum().item()) == ("prompt length", 5)


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in (10, 9, 100):
        save_file({"x": torch.ones(1)}, tmp_path / f"hs_{index}.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    assert [file.name for file in Trace.open(tmp_path).files] == [f"hs_{i}.safetensors" for i in (9, 10, 100)]
    assert [file.name for file in Trace.open(tmp_path / "model.safetensors").files] == ["model.safetensors"]
    nested = tmp_path / "prepared"
    nested.mkdir()
    (tmp_path / "hs_9.safetensors").rename(tmp_path / "kept")
    (nested / "hidden_states").mkdir()
    (tmp_path / "kept").rename(nested / "hidden_states" / "hs_9.safetensors")
    assert [file.name for file in Trace.open(nested).files] == ["hs_9.safetensors"]


@pytest.mark.parametrize("inside", [".", "hidden_states"])
def test_specforge_groups_its_files_by_rows(inside: str, tmp_path: Path) -> None:
    """Five thousand a directory; what lies beside them is not theirs."""
    for group, name in (("rows_5000-10000", "data_5000"), ("rows_0-5000", "data_10"), ("rows_0-5000", "data_9")):
        place = tmp_path / inside / group
        place.mkdir(parents=True, exist_ok=True)
        torch.save({}, place / f"{name}.ckpt")
    (tmp_path / inside / "epoch_0").mkdir()
    torch.save({}, tmp_path / inside / "epoch_0" / "training_state.pt")
    assert [file.name for file in Trace.open(tmp_path).files] == ["data_9.ckpt", "data_10.ckpt", "data_5000.ckpt"]
    for file in Trace.open(tmp_path).files:
        file.rename(file.with_suffix(".ckpt.gz"))
    with pytest.raises(TraceError, match=r"data_\d+\.ckpt\.gz is compressed, unpack it first$"):
        Trace.open(tmp_path)


BROKEN: dict[str, tuple[Callable[[Parts], None], str]] = {
    "no tokens": (
        lambda given: given.pop("token_ids"),
        "token_ids: is missing; the recorded token ids are due (token_ids or input_ids)",
    ),
    "no states": (
        lambda given: given.pop("hidden_states"),
        "aux_hidden_state: is missing; the recorded hidden states are due (aux_hidden_state or hidden_states)",
    ),
    "float tokens": (
        lambda given: given.update(token_ids=torch.ones(TOKENS)),
        "token_ids: is float32 [9]; integers of shape [T] are due",
    ),
    "one token": (
        lambda given: given.update(token_ids=torch.ones(1).long()),
        "token_ids: holds 1 tokens; a trace needs at least 2",
    ),
    "an id too large": (
        lambda given: given["token_ids"].__setitem__(3, 512),
        "token_ids: holds the id 512, which is none of a vocabulary of 512",
    ),
    "a negative id": (
        lambda given: given["token_ids"].__setitem__(3, -1),
        "token_ids: holds the id -1, which is none of a vocabulary of 512",
    ),
    "fewer states than tokens": (
        lambda given: given.update(hidden_states=given["hidden_states"][:-1].contiguous()),
        "hidden_states: is bfloat16 [8, 4, 64] beside 9 tokens; a row for each token is due",
    ),
    "another width": (
        lambda given: given.update(hidden_states=torch.randn(TOKENS, 4, 48)),
        "hidden_states: is float32 [9, 4, 48]; [9, K, 64] is due, the draft reads states 64 wide",
    ),
    "another number of taps": (
        lambda given: given.update(hidden_states=torch.randn(TOKENS, 6, WIDTH)),
        "hidden_states: holds 6 states a token; the draft taps 3, so 3 or, with the last, 4 are due",
    ),
    "integers for states": (
        lambda given: given.update(hidden_states=torch.ones(TOKENS, 4, WIDTH).int()),
        "hidden_states: is int32 [9, 4, 64]; floats of at least 16 bits are due",
    ),
    "NaN": (
        lambda given: given["hidden_states"].__setitem__((5, 2, 7), math.nan),
        "hidden_states: is not finite at token 5",
    ),
    "infinity": (
        lambda given: given["hidden_states"].__setitem__((8, 3, 0), math.inf),
        "hidden_states: is not finite at token 8",
    ),
    "a short mask": (
        lambda given: given.update(loss_mask=torch.ones(8)),
        "loss_mask: is float32 [8]; [9], one entry per token, is due",
    ),
    "a mask that is not a number": (
        lambda given: given.update(loss_mask=torch.tensor([1.0] * 4 + [math.nan] * 5)),
        "loss_mask: holds nan at token 4; 0 or 1 is due",
    ),
    "labels for a mask": (
        lambda given: given.update(loss_mask=torch.tensor([-100] * 4 + [1] * 5)),
        "loss_mask: holds -100 at token 0; 0 or 1 is due",
    ),
    "a mask of eight bits": (
        lambda given: given.update(loss_mask=torch.ones(TOKENS).to(torch.float8_e4m3fn)),
        "loss_mask: is float8_e4m3fn [9]; bool, whole numbers or floats of at least 16 bits are due",
    ),
    "a complex mask": (
        lambda given: given.update(loss_mask=torch.ones(TOKENS, dtype=torch.complex64)),
        "loss_mask: is complex64 [9]; bool, whole numbers or floats of at least 16 bits are due",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_recording_is_one_line_with_file_and_key(fault: str, tmp_path: Path, spec: DraftSpec) -> None:
    given = parts()
    change, message = BROKEN[fault]
    change(given)
    with pytest.raises(TraceError) as caught:
        read(tmp_path, spec, given)
    assert str(caught.value) == f"{tmp_path / 'hs_0.safetensors'}: {message}"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"prompt_length": "many"}, "prompt_length: is 'many'; a whole number up to 9 is due"),
        ({"prompt_length": "10"}, "prompt_length: is '10'; a whole number up to 9 is due"),
        ({"last_state": "cooked"}, "last_state: is 'cooked'; raw or normed is due"),
        ({"layer_ids": "2, 8, 13"}, "layer_ids: is '2, 8, 13'; a JSON list of whole numbers is due"),
        ({"layer_ids": "[2, 2, 3]"}, "layer_ids: names a layer twice: [2, 2, 3]"),
        ({"layer_ids": "[-1, 2, 8]"}, "layer_ids: names a layer below 0: [-1, 2, 8]"),
        ({"layer_ids": "[" * 100_000}, f"layer_ids: is '{'[' * 59}…'; a JSON list of whole numbers is due"),
        ({"prompt_length": "9" * 5000}, f"prompt_length: is '{'9' * 59}…'; a whole number up to 9 is due"),
        (
            {"layer_ids": "[2, 8]"},
            "hidden_states: holds 4 states a token; 2 layer_ids are listed, so 2 or, with the last, 3 are due",
        ),
    ],
)
def test_broken_metadata_is_one_line(metadata: dict[str, str], message: str, tmp_path: Path, spec: DraftSpec) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, spec, parts(), metadata)
    assert str(caught.value) == f"{tmp_path / 'hs_0.safetensors'}: {message}"


@pytest.mark.parametrize("key", ["input_ids", "aux_hidden_state", "hidden_state", "loss_mask"])
@pytest.mark.parametrize(
    ("form", "said"), [("sparse", "is stored as sparse_coo"), ("meta", "is without its numbers (device meta)")]
)
def test_a_pickled_tensor_that_is_not_plain_is_one_line(
    key: str, form: str, said: str, tmp_path: Path, spec: DraftSpec
) -> None:
    given = parts()
    stored = {
        "input_ids": given["token_ids"][None],
        "loss_mask": torch.ones(1, TOKENS),
        "aux_hidden_state": torch.randn(1, TOKENS, TAPS * WIDTH),
        "hidden_state": torch.randn(1, TOKENS, WIDTH),
    }
    stored[key] = stored[key].to_sparse() if form == "sparse" else stored[key].to("meta")
    torch.save(stored, tmp_path / "0.ckpt")
    trace = Trace.open(tmp_path)
    with pytest.raises(TraceError) as caught:
        trace.read(trace.files[0], spec)
    assert str(caught.value) == f"{tmp_path / '0.ckpt'}: {key}: {said}; a plain tensor with its numbers is due"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float64, torch.uint16])
def test_a_mask_may_be_of_any_plain_dtype(dtype: torch.dtype, tmp_path: Path, spec: DraftSpec) -> None:
    found = read(tmp_path, spec, {**parts(), "loss_mask": (torch.arange(TOKENS) > 3).to(dtype)})
    assert found.own is not None
    assert found.own.tolist() == [False] * 4 + [True] * 5


def test_what_is_no_trace_is_refused(tmp_path: Path, spec: DraftSpec) -> None:
    with pytest.raises(TraceError, match=r"is no file and no directory; give the directory with the recorded traces$"):
        Trace.open(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"holds no hs_<i>\.safetensors and no \.ckpt$"):
        Trace.open(tmp_path)
    (tmp_path / "0001.ckpt.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(TraceError, match=r"0001\.ckpt\.gz is compressed, unpack it first$"):
        Trace.open(tmp_path)
    for name, raw in (("hs_0.safetensors", b"\0" * 40), ("0.ckpt", b"no pickle"), ("cut.safetensors", b"\xff")):
        (tmp_path / name).write_bytes(raw)
        trace = Trace.open(tmp_path / name)
        with pytest.raises(DraftError, match=name):
            trace.read(trace.files[0], spec)


# --- which tokens count ---


def recording(tokens: list[int], own: list[int] | None = None, last: bool = False) -> Recording:
    mask = None if own is None else torch.tensor(own).bool()
    states = torch.zeros(len(tokens), 0, 1)
    final = torch.tensor(tokens).float()[:, None] if last else None
    return Recording(
        name="x",
        tokens=torch.tensor(tokens),
        states=states,
        boundaries=(),
        last=final,
        last_is_normed=True,
        own=mask,
        own_by="loss mask" if own else "",
    )


def test_a_mask_counts_its_runs_and_compares_up_to_their_ends() -> None:
    """Two answers of a conversation: tokens 2 to 4, and 7 and 8."""
    truth = known(recording(list(range(9)), [0, 0, 1, 1, 1, 0, 0, 1, 1]), None)
    assert truth.basis == "loss mask"
    assert truth.spans() == [(2, 5), (7, 9)]
    assert truth.limits.tolist() == [0, 0, 2, 1, 0, 0, 0, 1, 0]


def test_without_a_mask_the_text_stands_for_itself() -> None:
    truth = known(recording([5, 6, 7]), None)
    assert truth.basis == "recorded text"
    assert truth.limits.tolist() == [0, 1, 0]


def test_where_the_choice_is_recomputed_it_is_compared_one_token_past_the_text() -> None:
    """The target adds one. The text does so up to token 3, leaves it at 4, and follows again from 5 on."""
    truth = known(recording([1, 2, 3, 4, 9, 10, 11], last=True), lambda last: last[:, 0].long() + 1)
    assert truth.basis == "recomputed"
    assert truth.due.tolist() == [1, 2, 3, 4, 5, 10, 11]
    assert truth.follows.tolist() == [False, True, True, True, False, True, True]
    # Behind token 3 the target would have said 5: a draft that says so is right, and nothing is known after it.
    assert truth.limits.tolist() == [0, 3, 2, 1, 0, 1, 0]


@pytest.mark.parametrize("normed", [False, True])
def test_the_targets_choice_is_recomputed_from_its_own_norm_and_head(normed: bool, tmp_path: Path) -> None:
    """With the target's directory a text without a mask is known to be its own where it is; without, it is only a text."""
    vocab = 6
    path = testing.write_tiny(
        tmp_path / "draft",
        "dflash",
        vocab_size=vocab,
        dtype="float32",
        dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 9, 17], "block_size": 4},
    )
    target = Target(3, vocab, seed=2)
    target.write(tmp_path / "target")
    text = target.continued([1, 2, 3], 60)
    text[40] = (text[40] + 1) % vocab
    taps, last = target.states(text)
    states = torch.cat([taps, (target.normed(last) if normed else last)[:, None]], dim=1)
    (tmp_path / "trace").mkdir()
    metadata = {"last_state": "normed"} if normed else None
    save_file(
        {"token_ids": torch.tensor(text), "hidden_states": states}, tmp_path / "trace" / "hs_0.safetensors", metadata
    )
    result = api.replay(path, tmp_path / "trace", tmp_path / "target")
    (file,) = result.files
    due = [False, *(target.greedy(last)[:-1] == torch.tensor(text[1:])).tolist()]
    assert file.basis == "recomputed"
    assert file.counted == sum(due) < 60
    assert result.label == "accepted length"


def test_a_draft_without_its_targets_tensors_says_what_to_give(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path / "draft", "dflash")
    save_file({**parts(), "loss_mask": torch.ones(TOKENS)}, tmp_path / "hs_0.safetensors")
    report = api.check_draft(path, checks="acceptance", trace=tmp_path)
    result = report["acceptance.length"]
    assert (result.status, result.want) == ("inconclusive", "target")
    assert "give the target with its weights: --draft-target=DIR" in result.message
