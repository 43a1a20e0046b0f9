"""The machine over one path's life: what is right survives it, and each thing that a path may wrongly remember is found.

Failure modes this file exists to catch: a machine that never reaches the state in which a fault shows, so that every subject passes; one
that needs more lives than a user's run has; one that fails a right path, or draws what a path is known not to serve; a failure that prints
no steps to follow.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pytest_specdecode.contracts import FusedKVContract, fused_kv_machine
from pytest_specdecode.contracts.machine import PAGE_ROWS, PAGES, Call
from pytest_specdecode.fused_kv import FusedKV


class Eager(FusedKV):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, backend="eager", **kwargs)


#: As a user writes it. The contract's own tests run the machine on the kernel.
TestOverTime = fused_kv_machine(Eager, lives=20).TestCase


# --- what a path may wrongly remember -----------------------------------------------------------------------------------------------------


class Workspace(Eager):
    """Rows past the first call's size are not computed: the buffer is as it was allocated."""

    buffer = None

    def compute(self, ctx_hidden, positions):
        k, v = super().compute(ctx_hidden, positions)
        if k.shape[1] == 0:
            return k, v
        if self.buffer is None:
            self.buffer = torch.empty_like(k)
        rows = min(k.shape[1], self.buffer.shape[1])
        self.buffer[:, :rows] = k[:, :rows]
        whole = torch.cat([self.buffer, self.buffer.new_zeros(k.shape[0], k.shape[1], *k.shape[2:])], dim=1)
        return whole[:, : k.shape[1]], v


class Stale(Eager):
    """Weights are taken once."""

    def _weight_versions(self):
        return []


class StaleBias(Eager):
    def _weight_versions(self):
        attentions = [layer.self_attn for layer in self._layers]
        return [(attn.qkv_proj.weight._version, attn.k_norm.weight._version) for attn in attentions]


class StaleNorm(Eager):
    def _weight_versions(self):
        return [layer.self_attn.qkv_proj.weight._version for layer in self._layers]


class KeepsItsLayers(Eager):
    """`refresh_weights` takes the old layers anew."""

    def refresh_weights(self, layers):
        super().refresh_weights(getattr(self, "_layers", layers))


class WrittenTwice(Eager):
    """The first layer is handed over again where a call is larger than the one before."""

    before = 99

    def materialize(self, ctx_hidden, positions, write_layer_kv):
        kept = []
        super().materialize(ctx_hidden, positions, lambda *call: (kept.append(call), write_layer_kv(*call)))
        if len(positions) > self.before:
            write_layer_kv(*kept[0])
        self.before = len(positions)


class FirstCallback(Eager):
    """What was captured with the first call is what every call writes through."""

    captured = None

    def materialize(self, ctx_hidden, positions, write_layer_kv):
        self.captured = self.captured or write_layer_kv
        super().materialize(ctx_hidden, positions, lambda *call: self._write(*call, write_layer_kv))

    def _write(self, layer, k, v, write_layer_kv):
        (write_layer_kv if layer == 0 else self.captured)(layer, k, v)


class FirstDtype(Eager):
    """The context is rounded to the first call's dtype."""

    first = None

    def compute(self, ctx_hidden, positions):
        if self.first is None:
            self.first = ctx_hidden.dtype
        return super().compute(ctx_hidden.to(self.first), positions)


class FirstTable(Eager):
    """The table's last row is read for all positions that it had not at first."""

    def compute(self, ctx_hidden, positions):
        return super().compute(ctx_hidden, positions.clamp(max=255))


class KeepsTable(Eager):
    """The table is copied, and once somebody else made it longer, rows past the copy are its last one."""

    rows = None

    def compute(self, ctx_hidden, positions):
        if self.rows is None:
            self.rows = self.rotary_emb.cos_sin_cache.shape[0]
        elsewhere = self.rotary_emb.cos_sin_cache.shape[0] > self.rows
        return super().compute(ctx_hidden, positions.clamp(max=self.rows - 1) if elsewhere else positions)


class AfterRefusal(Eager):
    """A refused call leaves a flag behind that turns the next one's rows around."""

    broken = False

    def compute(self, ctx_hidden, positions):
        if len(positions) and int(positions.min()) < 0:
            self.broken = True
        k, v = super().compute(ctx_hidden, positions)
        if self.broken:
            self.broken = False
            return k.flip(1), v
        return k, v


class OnceOnly(Eager):
    """The same positions twice in a row give what was kept, whatever the context."""

    kept = None

    def compute(self, ctx_hidden, positions):
        k, v = super().compute(ctx_hidden, positions)
        if self.kept is not None and len(positions) and torch.equal(self.kept[0], positions):
            return self.kept[1], v
        self.kept = (positions.clone(), k)
        return k, v


SEEDED = {
    "workspace not grown": Workspace,
    "stale weights": Stale,
    "stale bias": StaleBias,
    "stale norms": StaleNorm,
    "reloaded layers ignored": KeepsItsLayers,
    "slot written twice": WrittenTwice,
    "first callback kept": FirstCallback,
    "dtype of the first call": FirstDtype,
    "table growth ignored": FirstTable,
    "growth elsewhere ignored": KeepsTable,
    "state left by a refusal": AfterRefusal,
    "positions as a key": OnceOnly,
}


def quiet(machine, *phases):
    """The machine's own number of lives and steps, the same ones each time."""
    return settings(machine.TestCase.settings, database=None, derandomize=True, phases=phases or [Phase.generate])


@pytest.mark.parametrize("what", SEEDED)
def test_what_is_wrongly_remembered_is_found_in_the_default_number_of_lives(what):
    machine = fused_kv_machine(SEEDED[what])
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(machine, settings=quiet(machine))


def test_the_contract_runs_the_machine():
    """Which a fuzzer sees as a test like any other, with data of its own."""
    subject = type("Subject", (FusedKVContract,), {"build": staticmethod(WrittenTwice)})
    assert "calls-drawn" in subject.properties()
    with pytest.raises(AssertionError, match="handed over in the order"):
        subject().test_calls_any(rest="calls-drawn")


class FirstOfAll(Eager):
    """Everything that gaps can say at once is wrong: no bias, one epsilon, one size, one dtype, no growth, nothing noticed."""

    count = dtype_seen = None

    def __init__(self, layers, *args):
        if getattr(layers[0].self_attn.qkv_proj, "bias", None) is not None:
            raise NotImplementedError("bias")
        super().__init__(layers, *args)
        self._eps = self._eps[:1].expand_as(self._eps)

    def _weight_versions(self):
        return []

    def compute(self, ctx_hidden, positions):
        if len(positions) == 0:
            raise RuntimeError("nothing to do")
        self.count = self.count or len(positions)
        self.dtype_seen = self.dtype_seen or ctx_hidden.dtype
        assert len(positions) == self.count
        assert ctx_hidden.dtype == self.dtype
        assert positions.is_contiguous()
        return super().compute(ctx_hidden, positions.clamp(0, 63))


GAPS = (
    "epsilon-per-layer",
    "context-dtype",
    "growing-table",
    "weights-updated",
    "norms-updated",
    "strided-positions",
    "negative-position",
    "empty-input",
    "workspace-growth",
    "workspace-reuse",
)


def test_what_a_subject_is_known_not_to_serve_is_not_drawn():
    machine = fused_kv_machine(FirstOfAll, gaps=GAPS, lives=20)
    run_state_machine_as_test(machine, settings=quiet(machine))


@pytest.mark.parametrize("gap", [gap for gap in GAPS if gap != "empty-input"])
def test_each_gap_that_is_not_declared_is_found(gap):
    machine = fused_kv_machine(FirstOfAll, gaps=[name for name in GAPS if name != gap])
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        run_state_machine_as_test(machine, settings=quiet(machine))


class ToldOf(Stale):
    """Wants to be told."""


def test_a_subject_is_told_of_writes():
    machine = fused_kv_machine(ToldOf, refresh=lambda subject, layers: subject.refresh_weights(layers), lives=20)
    run_state_machine_as_test(machine, settings=quiet(machine))


def test_a_failure_is_a_short_list_of_steps(capsys):
    """One call, one write and the same call again."""
    machine = fused_kv_machine(StaleNorm)
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(machine, settings=quiet(machine, Phase.generate, Phase.shrink))
    # Python 3.10 has no notes, and Hypothesis prints there.
    told = "\n".join(getattr(caught.value, "__notes__", [])) + capsys.readouterr().out
    steps = [line.strip().split("(")[0] for line in told.splitlines() if line.strip().startswith("state.")]
    assert steps in (
        ["state.built", "state.materialize", "state.write", "state.teardown"],
        ["state.built", "state.write", "state.teardown"],
    )
    assert "tensor='k_norm.weight'" in told
    assert "num_kv_heads=1" in told or "num_heads=2, num_kv_heads=1" in " ".join(told.split())


def test_slots_are_named_once_and_some_are_skipped():
    call = Call(tokens=20, dtype="float32", positions="arange", last=63, skipped=3, seed=4)
    slots = call.slots().tolist()
    named = [slot for slot in slots if slot >= 0]
    assert slots[::3] == [-1] * 7
    assert len(set(named)) == len(named) == 13
    assert max(named) < PAGES * PAGE_ROWS
