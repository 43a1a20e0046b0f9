"""The checks of an implementation that somebody names, on a draft's own layers.

What goes wrong without this file: a class that serves one odd layer by layer 0's numbers and passes; one that refuses everything and passes
for that; a fault of a single call (a stride, an order, a byte beside the tensor) that no check makes; a refusal whose text the user never
sees; a draft whose layers differ and which a class serves wrong, reported as fine; checks that slow down every run that names nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import AXES, FusedKV, check_draft, testing
from pytest_specdecode.checks import REGISTRY, fused_kv_subject
from pytest_specdecode.errors import DraftError
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.fused_kv import facts_of
from pytest_specdecode.fused_kv.odd_layers import NoOddLayerError, odd_layer
from pytest_specdecode.report import Report
from pytest_specdecode.trials import MOST_TEXT, error_text, named_layer

MATCHES, ODD, CALLS, RANKS = (
    f"fused-kv.{name}" for name in ("matches-reference", "odd-layers", "calls", "tensor-parallel")
)


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that agree in everything; not to be changed."""
    return testing.write_tiny(tmp_path_factory.mktemp("drafts") / "dflash-tiny", "dflash")


@pytest.fixture
def differing(tmp_path: Path) -> Path:
    """A draft that states another base for its second layer, as a file may."""
    plain = {"rope_type": "default", "rope_theta": 1e6}
    config = testing.tiny_config(
        "dflash",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=64,
        rope_theta=...,
        rope_parameters={"full_attention": plain, "sliding_attention": {**plain, "rope_theta": 1e4}},
    )
    return testing.write_tiny(tmp_path / "differing", "dflash", config=config)


def _checked(path: Path, subject: object, *ids: str) -> Report:
    return check_draft(path, checks=ids or ["fused-kv"], fused_kv=subject)  # type: ignore[arg-type]


def _found(path: Path, subject: object, id: str) -> CheckResult:
    return _checked(path, subject, id)[id]


class Mine(FusedKV):
    """A subclass, so that it is a subject of its own, and right."""


class Trusting(FusedKV):
    """Takes layers for alike without looking."""

    def _validated(self, layers: Any) -> Any:
        return tuple(facts_of(layer) for layer in layers)


class Sequential:
    """Serves every layer by itself, as a fall-back path does."""

    def __init__(self, layers: Any, rotary_emb: Any, num_kv_heads: int, head_dim: int, device: Any) -> None:
        each = [(layer, layer.self_attn) for layer in layers]
        self._paths = [
            FusedKV([layer], attn.rotary_emb, attn.num_kv_heads, attn.head_dim, device) for layer, attn in each
        ]

    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        for index, path in enumerate(self._paths):
            path.materialize(ctx_hidden, positions, lambda _, k, v, index=index: write_layer_kv(index, k, v))


class Refusing:
    """Serves nothing."""

    def __init__(self, *args: Any) -> None:
        raise NotImplementedError("fused path is off; set MINE_FUSED=1\nto have it")


class Broken:
    """Ends far from its cause."""

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("shape '[2, 2]' is invalid for input of size 3")


# --- the draft's own layers ---------------------------------------------------------------------------------------------------------------


def test_a_right_implementation_passes_everything(dflash: Path) -> None:
    report = _checked(dflash, Mine)
    assert {report[id].status for id in (MATCHES, ODD, CALLS, RANKS)} == {"passed"}, str(report)
    assert f"refuses {len(AXES)} of {len(AXES)} axes" in report[ODD].message
    assert "of eager's" in report[MATCHES].message
    assert report.to_dict()["drafts"][0]["fused_kv"] == f"{__name__}:Mine"


def test_where_nothing_is_named_only_the_numbers_are_looked_at(dflash: Path) -> None:
    """The other checks are skipped with what to give; the report says that ours was run."""
    report = check_draft(dflash, checks=["fused-kv"])
    assert report[MATCHES].status == "passed"
    for id in (ODD, CALLS):
        assert report[id].status == "skipped"
        assert "--draft-fused-kv" in report[id].message
        assert report[id].seconds < 0.1
    assert report.to_dict()["drafts"][0]["fused_kv"] == "ours"


def test_ours_by_name_is_held_to_all_of_it(dflash: Path) -> None:
    report = _checked(dflash, "ours")
    assert {report[id].status for id in (MATCHES, ODD, CALLS, RANKS)} == {"passed"}
    assert "bit for bit" in report[MATCHES].message
    for given in (FusedKV, "pytest_specdecode.fused_kv:FusedKV"):
        assert _checked(dflash, given, "fused-kv.bias").drafts[0].fused_kv == "ours"


def test_a_refusal_is_shown_as_it_was_written_and_is_no_pass_of_anything(dflash: Path) -> None:
    """Were a refusal of plain layers let through, refusing everything would pass for refusing what is odd."""
    report = _checked(dflash, Refusing)
    assert report[MATCHES].status == "warned"
    assert "NotImplementedError: fused path is off; set MINE_FUSED=1 to have it" in report[MATCHES].message
    for id in (ODD, CALLS, RANKS):
        assert report[id].status == "inconclusive", id
        assert "MINE_FUSED=1" in report[id].message


def test_an_error_that_is_no_refusal_fails(dflash: Path) -> None:
    result = _found(dflash, Broken, MATCHES)
    assert result.status == "failed"
    assert "breaks on this draft's layers: RuntimeError: shape '[2, 2]'" in result.message


def test_wrong_numbers_on_layers_that_agree_fail(dflash: Path) -> None:
    class Late(FusedKV):
        def compute(self, ctx_hidden: Any, positions: Any) -> Any:
            return super().compute(ctx_hidden, positions + 1)

    result = _found(dflash, Late, MATCHES)
    assert result.status == "failed"
    assert "serves this draft's layers wrong: layer 0: K is off by up to" in result.message
    # The element, what eager code makes of it, and how far off it might be.
    assert re.search(
        r"; layer 0's K: \d+ of \d+ elements are too far off, worst at token=\d head=\d dim=\d+: got \S+, due \S+, error \S+, eager's "
        r"there \S+ and at most \S+, bound \S+$",
        result.message,
    )
    assert isinstance(result.findings[0].got, float)


@pytest.mark.parametrize(
    ("subject", "status", "said"),
    [
        (Mine, "warned", "refuses this draft's layers, which differ in rope-theta: StackMismatchError: "),
        (
            Trusting,
            "failed",
            "serves this draft's layers, which differ in rope-theta wrong: layer 1: K is off by up to",
        ),
        (Sequential, "passed", "of eager's"),
    ],
)
def test_layers_that_differ_are_refused_served_wrong_or_right(
    subject: type, status: str, said: str, differing: Path
) -> None:
    """And what an odd layer would be is not asked of layers that are odd already."""
    report = _checked(differing, subject)
    assert report[MATCHES].status == status
    assert said in report[MATCHES].message
    assert report[ODD].status == "skipped"
    assert "rope-theta" in report[ODD].message


def test_a_layer_that_contradicts_its_configuration_is_put_to_the_implementation_as_it_is(tmp_path: Path) -> None:
    """One KV head where the file states two: no reference layer builds, but an engine that reads the shapes has one."""

    def uneven(tensors: dict[str, torch.Tensor]) -> None:
        for part in "kv":
            name = f"layers.1.self_attn.{part}_proj.weight"
            tensors[name] = tensors[name][:32].clone()

    path = testing.write_tiny(tmp_path / "uneven", "dflash", edit=uneven)
    refused, served = _found(path, Mine, MATCHES), _found(path, Sequential, MATCHES)
    assert refused.status == "warned"
    assert "expected 2, got 1 at layer 1" in refused.message
    assert refused.findings[0].where == "layer 1"
    assert served.status == "passed"


# --- one layer made odd -------------------------------------------------------------------------------------------------------------------


def test_what_is_not_refused_is_named_axis_by_axis(dflash: Path) -> None:
    """Values that a stack takes from layer 0 are served wrong; shapes that do not fit break."""
    result = _found(dflash, Trusting, "fused-kv.odd-layers")
    assert result.status == "failed"
    axes = result.figures["axes"]
    assert {axis for axis, found in axes.items() if found["outcome"] == "wrong"} >= {
        *("rope-theta", "rope-scaling", "rope-style", "rotary-dim", "value-scale", "q-size")
    }
    assert {axis for axis, found in axes.items() if found["outcome"] == "broke"} >= {"hidden-size", "quantization"}
    said = [finding.message for finding in result.findings if "rope-theta" in finding.message]
    assert len(said) == 1
    assert "wrong: layer 1: K is off by up to" in said[0]
    assert result.figures["subject"] == f"{__name__}:Trusting"
    assert {finding.severity for finding in result.findings if " breaks: " in finding.message} == {"warning"}


def test_an_implementation_that_serves_each_layer_by_itself_passes(dflash: Path) -> None:
    """It need not refuse what it computes right."""
    result = _found(dflash, Sequential, ODD)
    assert not [finding for finding in result.findings if finding.severity == "error"]
    assert result.figures["axes"]["rope-theta"]["outcome"] == "right"
    assert result.figures["axes"]["num-kv-heads"]["outcome"] == "right"


def test_a_refusal_that_names_another_layer_is_told_apart(dflash: Path) -> None:
    class Misnaming(FusedKV):
        def __init__(self, *args: Any) -> None:
            try:
                super().__init__(*args)
            except DraftError:
                raise ValueError("layer 7 is odd") from None

    axes = _found(dflash, Misnaming, ODD).figures["axes"]
    assert axes["bias"] == {"outcome": "refused", "detail": "ValueError: layer 7 is odd (layer 1 is not named)"}


def test_the_only_layer_is_taken_twice(tmp_path: Path) -> None:
    path = testing.write_tiny(
        tmp_path / "one", "dflash", num_hidden_layers=1, num_key_value_heads=1, layer_types=["full_attention"]
    )
    report = _checked(path, Trusting, MATCHES, ODD)
    assert report[MATCHES].status == "passed"
    assert report[ODD].figures["axes"]["rope-theta"]["outcome"] == "wrong"
    assert _found(path, Mine, ODD).status == "passed"


def _layers(path: Path) -> tuple[Any, Any]:
    from pytest_specdecode import open_draft

    draft = open_draft(path)
    assert draft.spec is not None
    return draft.layers(), draft.spec.layers[-1].attention.rope  # type: ignore[union-attr]


@pytest.mark.parametrize("axis", AXES)
def test_an_odd_layer_is_refused_on_its_own_axis(axis: str, dflash: Path) -> None:
    """By ours, whose axes are tested elsewhere; and the layer that it was made from is as it was."""
    layers, rope = _layers(dflash)
    before = {name: tensor.clone() for name, tensor in layers[1].self_attn.state_dict().items()}
    first = layers[0].self_attn
    with pytest.raises(DraftError) as caught:
        FusedKV(
            [layers[0], odd_layer(layers[1], axis, rope)], first.rotary_emb, first.num_kv_heads, first.head_dim, "cpu"
        )
    assert caught.value.axis == axis  # type: ignore[attr-defined]
    for name, tensor in layers[1].self_attn.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_layer_without_room_to_differ_is_left_out(tmp_path: Path) -> None:
    """Two lanes rotate at one frequency, whatever the base, and in no other number."""
    path = testing.write_tiny(tmp_path / "narrow", "dflash", head_dim=2)
    layers, rope = _layers(path)
    for axis in ("rotary-dim", "rope-theta"):
        with pytest.raises(NoOddLayerError):
            odd_layer(layers[1], axis, rope)
    result = _found(path, Mine, ODD)
    assert result.status == "passed"
    assert "left out rotary-dim, rope-theta" in result.message


# --- calls --------------------------------------------------------------------------------------------------------------------------------


class _Wrapped:
    """Ours, with one fault around it."""

    def __init__(self, *args: Any) -> None:
        self.path = FusedKV(*args)

    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions, write_layer_kv)


class ReadsOn(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        flat = torch.as_strided(positions, positions.shape, (1,))
        self.path.materialize(ctx_hidden, flat, write_layer_kv)


class CallsForNothing(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        if not len(ctx_hidden):
            write_layer_kv(0, ctx_hidden, ctx_hidden)
        self.path.materialize(ctx_hidden, positions, write_layer_kv)


class LastFirst(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        pairs: list[Any] = []
        self.path.materialize(ctx_hidden, positions, lambda *call: pairs.append(call))
        for call in reversed(pairs):
            write_layer_kv(*call)


class LeavesRows(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        def partly(layer: int, k: Any, v: Any) -> None:
            mine = torch.empty_like(k)
            mine[:-1] = k[:-1]
            write_layer_kv(layer, mine, v)

        self.path.materialize(ctx_hidden, positions, partly)


class Scribbles(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions, write_layer_kv)
        ctx_hidden[0, 0] += 1


class WritesBeside(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions, write_layer_kv)
        torch.as_strided(ctx_hidden, (1,), (1,), ctx_hidden.storage_offset() + ctx_hidden.numel())[0] = 0


class OldWorkspace(_Wrapped):
    """Keeps the rows of its largest call, and hands them out again for smaller ones."""

    kept: Any = None

    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        if self.kept is None or len(self.kept[0][1]) < len(ctx_hidden):
            self.kept = []
            self.path.materialize(ctx_hidden, positions, lambda *call: self.kept.append(call))
        for layer, k, v in self.kept:
            write_layer_kv(layer, k[: len(ctx_hidden)], v[: len(ctx_hidden)])


class Copies(_Wrapped):
    def __init__(self, layers: Any, *args: Any) -> None:
        super().__init__(copy.deepcopy(list(layers)), *args)


class Clamps(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions.clamp(0, 7), write_layer_kv)


class OwnDtype(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        if ctx_hidden.dtype != torch.bfloat16:
            raise RuntimeError("expected m1 and m2 to have the same dtype")
        self.path.materialize(ctx_hidden, positions, write_layer_kv)


class Sorts(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions.sort().values, write_layer_kv)


class Unique(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        if len(positions.unique()) < len(positions):
            positions = torch.arange(len(positions))
        self.path.materialize(ctx_hidden, positions, write_layer_kv)


class UpTo16(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        positions = torch.cat([positions[:16], positions[16:] * 0])
        self.path.materialize(ctx_hidden, positions, write_layer_kv)


class NeverOne(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions * (len(positions) > 1), write_layer_kv)


class From1(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions.clamp(min=1), write_layer_kv)


class ShortTable(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions.clamp(max=4094), write_layer_kv)


#: By property, a subject that does not hold it.
FAULTS: dict[str, Callable[..., Any]] = {
    "empty-input": CallsForNothing,
    "one-token": NeverOne,
    "many-tokens": UpTo16,
    "first-position": From1,
    "last-position": ShortTable,
    "repeated-positions": Unique,
    "unsorted-positions": Sorts,
    "strided-positions": ReadsOn,
    "callback-order": LastFirst,
    "bounds": WritesBeside,
    "no-element-unwritten": LeavesRows,
    "workspace-growth": UpTo16,
    "workspace-reuse": OldWorkspace,
    "context-dtype": OwnDtype,
    "weights-updated": Copies,
    "norms-updated": Copies,
    "negative-position": Clamps,
    "position-past-the-table": Clamps,
}


def test_every_property_has_a_fault_that_shows_it() -> None:
    assert set(FAULTS) == set(fused_kv_subject.PROPERTIES)


@pytest.mark.parametrize("name", sorted(set(FAULTS) - {"workspace-growth"}))
def test_a_fault_of_a_call_is_named_by_its_property(name: str, dflash: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each property alone, so that nothing else can find the fault; the draft's layers themselves stay as they were."""
    hold, severity = fused_kv_subject.PROPERTIES[name]
    monkeypatch.setattr(fused_kv_subject, "PROPERTIES", {name: (hold, severity)})
    monkeypatch.setattr(fused_kv_subject, "tried", lambda *_: _RIGHT)
    result = _found(dflash, FAULTS[name], CALLS)
    assert result.status == ("failed" if severity == "error" else "warned"), result
    (finding,) = result.findings
    assert finding.where == name
    assert f"{FAULTS[name].__name__}, {name}: " in finding.message
    assert _found(dflash, _Wrapped, CALLS).status == "passed"


class _RIGHT:
    kind, text = "right", ""


def test_an_input_that_is_written_to_is_named(dflash: Path) -> None:
    said = [finding.message for finding in _found(dflash, Scribbles, CALLS).findings if finding.where == "bounds"]
    assert said
    assert "ctx_hidden was written to" in said[0]


class ScalesWeights(_Wrapped):
    def __init__(self, layers: Any, *args: Any) -> None:
        for layer in layers:
            layer.self_attn.qkv_proj.weight.data.mul_(2.0)
        super().__init__(layers, *args)


class ScalesTheTable(_Wrapped):
    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.materialize(ctx_hidden, positions, write_layer_kv)
        self.path._layers[1].self_attn.rotary_emb.cos_sin_cache.mul_(2.0)


@pytest.mark.parametrize(
    ("subject", "tensor"),
    [(ScalesWeights, "layer 0's qkv_proj.weight"), (ScalesTheTable, "layer 1's rotary_emb.cos_sin_cache")],
)
def test_a_layer_that_is_written_to_is_named(
    subject: Any, tensor: str, dflash: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served is then right by the layers as they have become."""
    monkeypatch.setattr(fused_kv_subject, "PROPERTIES", {"bounds": fused_kv_subject.PROPERTIES["bounds"]})
    monkeypatch.setattr(fused_kv_subject, "tried", lambda *_: _RIGHT)
    result = _found(dflash, subject, CALLS)
    assert result.status == "failed"
    assert tensor in result.message
    assert "was written to" in result.message


class ClampsInPlace(_Wrapped):
    """Moves what it would be held against with it."""

    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        if len(positions) > 4:
            positions.clamp_(max=3)
        self.path.materialize(ctx_hidden, positions, write_layer_kv)


def test_positions_that_are_written_to_are_no_truth(dflash: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _found(dflash, ClampsInPlace, MATCHES)
    assert "ClampsInPlace serves this draft's layers wrong: layer 0: K is off by" in result.message
    monkeypatch.setattr(fused_kv_subject, "tried", lambda *_: _RIGHT)
    named = {finding.where for finding in _found(dflash, ClampsInPlace, CALLS).findings}
    assert {"many-tokens", "unsorted-positions", "workspace-growth"} <= named


class NeedsToGrow(_Wrapped):
    """Asks more of the rotary object than a table that cannot grow has."""

    def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        self.path.rotary_emb.grow_as_ours_do(positions)


def test_an_error_of_any_kind_is_no_refusal_of_a_position(dflash: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kv_subject, "tried", lambda *_: _RIGHT)
    said = {finding.where: finding.message for finding in _found(dflash, NeedsToGrow, CALLS).findings}
    for name in ("negative-position", "position-past-the-table"):
        assert "positions 0, 1 and 7 are not served: AttributeError" in said[name]


# --- what no implementation should do -----------------------------------------------------------------------------------------------------


def _raising(error: BaseException) -> Callable[..., Any]:
    class Raising(_Wrapped):
        def materialize(self, *args: Any) -> None:
            raise error

    return Raising


class _Unprintable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class _Unreadable(ValueError):
    @property
    def layer(self) -> int:
        raise RuntimeError("no layer")


def _handing(change: Callable[..., Any], *, then: BaseException | None = None) -> Callable[..., Any]:
    class Handing(_Wrapped):
        def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
            def hand(layer: int, k: Any, v: Any) -> None:
                for call in change(layer, k, v):
                    write_layer_kv(*call)

            self.path.materialize(ctx_hidden, positions, hand)
            if then is not None:
                raise then

    return Handing


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (_raising(SystemExit(3)), "breaks on this draft's layers: SystemExit: 3"),
        (_raising(pytest.skip.Exception("not here")), "breaks on this draft's layers: Skipped: not here"),
        (_raising(pytest.fail.Exception("never")), "breaks on this draft's layers: Failed: never"),
        (_raising(BaseException("odd")), "breaks on this draft's layers: BaseException: odd"),
        (_raising(_Unprintable()), "refuses this draft's layers: _Unprintable: (its text cannot be had: RuntimeError)"),
        (_raising(_Unreadable("x")), "refuses this draft's layers: _Unreadable: x"),
        (_handing(lambda n, k, v: [(n, k * 0, v), (n, k, v)]), "wrong: layer 0 was handed over 2 times"),
        (_handing(lambda n, k, v: [(n, k, v), (n + 7, k, v)]), "wrong: layer 7 was handed over, and there are 2"),
        (_handing(lambda n, k, v: [(n - 2, k, v)]), "wrong: layer -2 was handed over, and there are 2"),
        (_handing(lambda n, k, v: [(n, k, v), ("last", k, v)]), "wrong: a layer called 'last' was handed over"),
        (
            _handing(lambda n, k, v: [(n, k, v), ("last", k, v)], then=ValueError("x")),
            "breaks on this draft's layers: after a layer called 'last' was handed over, ValueError: x",
        ),
        (_handing(lambda n, k, v: [(n, None, v)]), "wrong: layer 0: K is of type NoneType; a tensor is due"),
        (_handing(lambda n, k, v: [(n, k.to(torch.complex64), v)]), "wrong: layer 0: K is torch.complex64"),
        (_handing(lambda n, k, v: [(n, k, v.to("meta"))]), "wrong: layer 0: V lies on meta; due is cpu"),
        (_handing(lambda n, k, v: [(n, k.to_sparse(), v)]), "wrong: layer 0: K is torch.sparse_coo"),
    ],
    ids=[
        *("exits", "skips", "fails", "base", "unprintable", "unreadable", "twice", "another", "negative", "named"),
        *("named-then-raises", "none", "complex", "elsewhere", "sparse"),
    ],
)
def test_whatever_it_does_is_its_own_fault_and_ends_nothing(subject: Any, said: str, dflash: Path) -> None:
    report = _checked(dflash, subject, MATCHES, ODD, CALLS, RANKS)
    assert said in report[MATCHES].message
    for id in (MATCHES, ODD, CALLS, RANKS):
        assert "the check itself broke" not in report[id].message, id


def test_a_layer_may_come_as_any_whole_number(dflash: Path) -> None:
    """What a list of caches can be asked for."""
    report = _checked(dflash, _handing(lambda n, k, v: [(torch.tensor(n), k, v)]), MATCHES, CALLS)
    assert (report[MATCHES].status, report[CALLS].status) == ("passed", "passed")


def test_an_errors_text_is_shown_as_far_as_one_reads_it() -> None:
    assert error_text(ValueError("ab\n c")) == "ValueError: ab c"
    assert error_text(ValueError("x" * 5000)) == f"ValueError: {'x' * MOST_TEXT}... (5000 characters)"


def test_true_is_no_layer() -> None:
    error = ValueError("nothing of a number")
    error.layer = True  # type: ignore[attr-defined]
    assert named_layer(error) is None
    error.layer = 2  # type: ignore[attr-defined]
    assert named_layer(error) == 2


def test_workspace_that_grows_is_held_to_the_later_calls(dflash: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first size that all later calls are cut to."""

    class Fixed(_Wrapped):
        size = 0

        def materialize(self, ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
            self.size = self.size or len(ctx_hidden)
            positions = torch.cat([positions[: self.size], positions[self.size :] * 0])
            self.path.materialize(ctx_hidden, positions, write_layer_kv)

    name = "workspace-growth"
    monkeypatch.setattr(fused_kv_subject, "PROPERTIES", {name: fused_kv_subject.PROPERTIES[name]})
    result = _found(dflash, Fixed, "fused-kv.calls")
    assert result.status == "failed"
    assert result.findings[0].where == name


def test_ranks_are_built_by_the_implementation_too(dflash: Path) -> None:
    class WholeOnly(FusedKV):
        def compute(self, ctx_hidden: Any, positions: Any) -> Any:
            k, v = super().compute(ctx_hidden, positions)
            return (k, v) if self.num_kv_heads == 2 else (k * 0, v)

    result = _found(dflash, WholeOnly, RANKS)
    assert result.status == "failed"
    assert "K of 2 ranks" in result.message


# --- names --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("sglnag", "did you mean sglang"),
        ("nowhere_at_all:Path", "nowhere_at_all"),
        ("pytest_specdecode.fused_kv:FusedKw", "FusedK"),
        ("pytest_specdecode.fused_kv:AXES", "cannot be called"),
        (7, "not int"),
    ],
)
def test_what_is_no_implementation_is_a_draft_error(given: Any, said: str, dflash: Path) -> None:
    with pytest.raises(DraftError, match=said):
        check_draft(dflash, checks=[MATCHES], fused_kv=given)


def test_a_class_is_called_by_its_module_in_reports(dflash: Path) -> None:
    for given in (Mine, f"{__name__}:Mine"):
        assert _checked(dflash, given, "fused-kv.bias").drafts[0].fused_kv == f"{__name__}:Mine"


@pytest.mark.parametrize("family", ["eagle3", "dflare", "medusa"])
def test_a_draft_without_a_stack_skips_whatever_is_named(family: str, tmp_path: Path) -> None:
    report = _checked(testing.write_tiny(tmp_path / family, family), Broken)
    assert {result.status for result in report} == {"skipped"}


def test_the_checks_are_in_the_one_list() -> None:
    assert [id for id in REGISTRY if id.startswith("fused-kv.")][-2:] == [ODD, CALLS]
