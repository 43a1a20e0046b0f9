"""A draft, a target and a trace that do not go together: one line that names the tensor, and nothing that breaks inside torch.

What goes wrong without this file: a map of ids that is too short and ends in an index error, a target of another size that is taken for a
broken norm, an id that the embedding has no row for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoding import Target
from safetensors.torch import save_file

from pytest_specdecode import api, testing

VOCAB, LENGTH = 5, 40
Tensors = dict[str, torch.Tensor]


def judged(
    directory: Path,
    target: Path | None = None,
    family: str = "eagle3",
    edit: Callable[[Tensors], None] | None = None,
) -> str:
    """What `acceptance.length` says of a tiny draft of five ids, over a text of its target or of `target`; other checks say the same."""
    config: dict[str, object] = {"draft_vocab_size": 3}
    if family == "dflash":
        config["dflash_config"] = {"mask_token_id": 4, "target_layer_ids": [1, 9, 17], "block_size": 4}
    path = testing.write_tiny(directory / "draft", family, vocab_size=VOCAB, dtype="float32", edit=edit, **config)
    own = Target(3, VOCAB, seed=11)
    own.write(directory / "target")
    (directory / "trace").mkdir()
    text = own.continued([4, 3, 2], LENGTH)
    own.record(directory / "trace" / "hs_0.safetensors", text, prompt=3)
    report = api.check_draft(path, target or directory / "target", checks="acceptance", trace=directory / "trace")
    length, conventions = report["acceptance.length"], report["acceptance.conventions"]
    assert (length.status, conventions.status) == ("failed", "failed"), (length.message, conventions.message)
    assert conventions.message == length.message
    (finding,) = length.findings
    return f"{Path(finding.where).name}: {length.message}"


@pytest.mark.parametrize("family", ["eagle3", "dflash"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d2t: d2t[:2], "is int64 [2]; an id for each of the head's 3 rows is due"),
        (lambda d2t: d2t[None], "is int64 [1, 3]; an id for each of the head's 3 rows is due"),
        (lambda d2t: d2t.float(), "is float32 [3]; an id for each of the head's 3 rows is due"),
        (lambda d2t: d2t.bool(), "is bool [3]; an id for each of the head's 3 rows is due"),
    ],
    ids=["short", "a row", "floats", "bools"],
)
def test_a_map_that_is_no_list_of_ids(
    family: str, change: Callable[[torch.Tensor], torch.Tensor], said: str, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["d2t"] = change(tensors["d2t"])

    assert judged(tmp_path, family=family, edit=edit).endswith(said)


def test_a_target_of_another_width(tmp_path: Path) -> None:
    """Its embedding is looked at where the draft has none of its own, else its head and norm, which tell whose the tokens are."""

    def embed(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(0))

    other = Target(3, VOCAB, seed=1, width=48).write(tmp_path / "other")
    said = judged(tmp_path, other, edit=embed)
    assert said == "other: other: the target's head is [5, 48]; rows of 64, as wide as the recorded states, are due"


def test_a_targets_norm_of_another_width(tmp_path: Path) -> None:
    """EAGLE-1 reads the state behind the norm."""
    path = testing.write_tiny(tmp_path / "draft", "eagle1", vocab_size=VOCAB, dtype="float32")
    own, other = Target(0, VOCAB, seed=1), Target(0, VOCAB, seed=1, width=48)
    tensors = {"model.embed_tokens.weight": own.embedding, "lm_head.weight": own.head, "model.norm.weight": other.norm}
    testing.write_checkpoint(tmp_path / "target", {"model_type": "llama", "vocab_size": VOCAB}, tensors)
    (tmp_path / "trace").mkdir()
    own.record(tmp_path / "trace" / "hs_0.safetensors", own.continued([4, 3], LENGTH), prompt=2)
    report = api.check_draft(path, tmp_path / "target", checks="acceptance.length", trace=tmp_path / "trace")
    result = report["acceptance.length"]
    assert result.message == "target: the target's final norm has 48 lanes; the draft reads states 64 wide"


def test_a_target_with_fewer_ids_than_the_trace(tmp_path: Path) -> None:
    other = Target(3, 3, seed=1).write(tmp_path / "other")
    assert (
        judged(tmp_path, other) == "other: embed_tokens.weight: embed_tokens.weight: has 3 rows, and none for the id 4"
    )


def test_a_mask_token_that_the_embedding_has_no_row_for(tmp_path: Path) -> None:
    path = testing.write_tiny(
        tmp_path / "draft",
        "dflash",
        vocab_size=VOCAB,
        dtype="float32",
        dflash_config={"mask_token_id": 77, "target_layer_ids": [1, 9, 17], "block_size": 4},
    )
    own = Target(3, VOCAB, seed=11)
    own.write(tmp_path / "target")
    (tmp_path / "trace").mkdir()
    own.record(tmp_path / "trace" / "hs_0.safetensors", own.continued([1], LENGTH), prompt=1)
    report = api.check_draft(path, tmp_path / "target", checks="acceptance", trace=tmp_path / "trace")
    for result in report:
        assert result.message == "embed_tokens.weight: has 5 rows, and none for the id 77"


def test_many_files_are_held_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is alive at a time beside the one that it takes the place of, however many there are, and none waits for a collector."""
    import weakref

    from pytest_specdecode.replay.traces import Recording, Trace

    path = testing.write_tiny(tmp_path / "draft", "eagle3", vocab_size=VOCAB, draft_vocab_size=3, dtype="float32")
    own = Target(3, VOCAB, seed=11)
    own.write(tmp_path / "target")
    (tmp_path / "trace").mkdir()
    first = tmp_path / "trace" / "hs_0.safetensors"
    own.record(first, own.continued([1], 12), prompt=1)
    files = 6
    for index in range(1, files):
        (first.parent / f"hs_{index}.safetensors").write_bytes(first.read_bytes())
    alive: list[weakref.ref[Recording]] = []
    most, plain = 0, Trace.read

    def noted(self: Trace, *args: object) -> Recording:
        nonlocal most
        found: Recording = plain(self, *args)  # type: ignore[arg-type]
        alive.append(weakref.ref(found))
        most = max(most, sum(one() is not None for one in alive))
        return found

    monkeypatch.setattr(Trace, "read", noted)
    report = api.check_draft(path, tmp_path / "target", checks="acceptance", trace=tmp_path / "trace", draft_tokens=1)
    assert report["acceptance.length"].figures["trace"]["files"] == files
    assert len(alive) == 2 * files
    assert most <= 2


def test_files_of_one_trace_may_differ_in_form(tmp_path: Path) -> None:
    """int32 and int64 ids, three float dtypes, with a mask and with a prompt length: each counts as it would alone."""
    path = testing.write_tiny(tmp_path / "draft", "eagle3", vocab_size=VOCAB, draft_vocab_size=3, dtype="float32")
    own = Target(3, VOCAB, seed=11)
    own.write(tmp_path / "target")
    text = own.continued([1, 2], LENGTH)
    taps, last = own.states(text)
    states = torch.cat([taps, last[:, None]], dim=1)
    forms = [
        (torch.int32, torch.float32, True),
        (torch.int64, torch.bfloat16, False),
        (torch.uint8, torch.float16, True),
        (torch.int16, torch.float64, False),
    ]
    (tmp_path / "trace").mkdir()
    for index, (ids, floats, masked) in enumerate(forms):
        parts = {"token_ids": torch.tensor(text).to(ids), "hidden_states": states.to(floats)}
        if masked:
            parts["loss_mask"] = (torch.arange(LENGTH) >= 2).to(ids)[None]
        metadata = None if masked else {"prompt_length": "2"}
        save_file(parts, tmp_path / "trace" / f"hs_{index}.safetensors", metadata)
    result = api.replay(path, tmp_path / "trace", tmp_path / "target")
    assert [file.basis for file in result.files] == ["loss mask", "prompt length"] * 2
    assert {file.counted for file in result.files} == {LENGTH - 2}
    assert len({tuple(file.rounds) for file in result.files}) == 1
