"""A rule machine that drives one stacked K/V path for as long as an engine would, and holds every call against float64.

A path is built once and lives on: its weights are written to, its rope table grows, its context comes in another dtype, large calls follow
small ones, and what it hands over goes into caches by slot. What it remembers of one call and should not shows in a later one.

    TestMineOverTime = fused_kv_machine(MyFusedKV).TestCase

`FusedKVContract` runs it as its property `calls-drawn`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, initialize, precondition, rule
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from pytest_specdecode.contracts.base import ContractError, scaled
from pytest_specdecode.contracts.fakes import placed
from pytest_specdecode.contracts.rounding import Rounding, assert_kv
from pytest_specdecode.memory import KernelMemoryError, poison_, still_poison
from pytest_specdecode.numerics import assert_exact
from pytest_specdecode.strategies import POSITION_KINDS, Stack, homogeneous_stacks, layer_configs
from pytest_specdecode.strategies.kernels import drawn_positions
from pytest_specdecode.strategies.tensors import SEEDS, filled
from pytest_specdecode.trials import changed, digests
from pytest_specdecode.watching import watched

#: Lives that are tried, and rules in each, where nothing else is said.
LIVES, STEPS = 50, 8

#: Rows of one page of a cache, and pages. More rows than a call has tokens.
PAGE_ROWS, PAGES = 4, 6

#: Kinds of numbers of weights and contexts; in all of them rows differ and no mean square is near an epsilon.
_VALUES = ("integers", "normal")
_DTYPES = ("float32", "bfloat16", "float16")
_WRITTEN = {"weights-updated": ("qkv_proj.weight", "qkv_proj.bias"), "norms-updated": ("k_norm.weight",)}
_POSITION_GAPS = {
    "zero": "first-position",
    "last": "last-position",
    "repeated": "repeated-positions",
    "unsorted": "unsorted-positions",
    "strided": "strided-positions",
}
#: A table of 64 rows is whole from the start; one of 300 starts with 256.
_LENGTHS = (64, 300)


def _of_machine(strategy: Callable[[Any], SearchStrategy[Any]]) -> SearchStrategy[Any]:
    """What the running machine's own state leaves to be drawn."""
    runner: SearchStrategy[Any] = st.runner()
    return runner.flatmap(strategy)


_THEN: SearchStrategy[Any] = st.none() | _of_machine(lambda machine: machine._calls())


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the subject.

    Attributes:
        tokens: how many; may be 0.
        dtype: of the context.
        positions: their kind (`POSITION_KINDS`). last: the largest that there may be.
        values: kind of the context's numbers (`KINDS`).
        skipped: every so many-th slot is -1; 0 for none.
        seed: of the context, the positions and the slots.
    """

    tokens: int
    dtype: str
    positions: str
    last: int
    values: str = "integers"
    skipped: int = 0
    seed: int = 0

    def slots(self) -> Tensor:
        """Where each token goes, no slot twice."""
        found = torch.randperm(PAGES * PAGE_ROWS, generator=torch.Generator().manual_seed(self.seed))[: self.tokens]
        if self.skipped:
            found[:: self.skipped] = -1
        return found


class FusedKVMachine(RuleBasedStateMachine):
    """One path over one life. `fused_kv_machine` gives it a subject; see there for the attributes.

    Rules: `materialize` a context into the caches, `write` to a tensor of a layer, `reload` other layers (where the subject has
    `refresh_weights`), `grow` the rope table from outside, and a call that is `refused`. Each ends with a call, another or the last one
    again: what it hands over is the reference's, each layer comes once and in order, and no row of a cache changes but those of the slots
    that were named.
    """

    build: ClassVar[Callable[..., Any]]
    refresh: ClassVar[Callable[[Any, Sequence[Any]], object]]
    rounding: ClassVar[Rounding] = "at-the-store"
    gaps: ClassVar[Collection[str]] = ()
    device: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._last: Call | None = None
        self._first_count: int | None = None

    # --- rules ---

    @initialize(stack=_of_machine(lambda machine: machine._stacks()))
    def built(self, stack: Stack) -> None:
        """The subject, of layers that agree. A bias and interleaved pairs are left out where the subject says that it serves none."""
        try:
            self._take(stack)
        except (ValueError, NotImplementedError):
            if stack.configs[0].is_neox_style and not stack.configs[0].bias:
                raise
            configs = [config.changed(bias=False, is_neox_style=True) for config in stack.configs]
            self._take(Stack(configs=configs, seed=stack.seed, weights=stack.weights, norms=stack.norms))
        shape = (PAGES, PAGE_ROWS, self.stack.num_kv_heads, self.stack.head_dim)
        dtype, where = getattr(torch, self.stack.dtype), torch.device(self.device)

        def cache() -> Tensor:
            poisoned: Tensor = poison_(torch.empty(shape, dtype=dtype, device=where))
            return poisoned

        self._caches = [(cache(), cache()) for _ in self.layers]

    @rule(call=_of_machine(lambda machine: machine._calls()))
    def materialize(self, call: Call) -> None:
        """One call."""
        self._first_count = self._first_count or call.tokens
        self._last = call
        self._call(call)

    @rule(
        target_layer=_of_machine(lambda machine: st.integers(0, machine.stack.num_layers - 1)),
        tensor=_of_machine(lambda machine: st.sampled_from(machine._writable())),
        seed=SEEDS,
        then=_THEN,
    )
    @precondition(lambda self: bool(self._writable()))
    def write(self, target_layer: int, tensor: str, seed: int, then: Call | None) -> None:
        """Other numbers into a tensor of a layer, in place; the subject is told by `refresh`, as it wants to be."""
        part, name = tensor.split(".")
        holders = {id(layer): layer for layer in (self.layers[target_layer], self.stack.layers[target_layer])}
        for layer in holders.values():
            held = getattr(getattr(layer.self_attn, part), name)
            values = filled("normal", held.shape, torch.float32, seed=seed, stream=1).to(held.device, held.dtype)
            with torch.no_grad():
                held.copy_(values)
        type(self).refresh(self.subject, self.layers)
        self._go_on(then)

    @precondition(lambda self: hasattr(self.subject, "refresh_weights") and "weights-updated" not in self.gaps)
    @rule(seed=SEEDS, then=_THEN)
    def reload(self, seed: int, then: Call | None) -> None:
        """Other layers of the same shape, by the subject's own `refresh_weights`."""
        self._place(Stack(configs=self.stack.configs, seed=seed, weights="normal", norms=self.stack.norms))
        with watched():
            self.subject.refresh_weights(self.layers)
        self._go_on(then)

    @precondition(lambda self: len(self._lasts()) > 1)
    @rule(then=_THEN)
    def grow(self, then: Call | None) -> None:
        """Whoever shares the rotary object makes its table as long as it gets."""
        self.rotary_emb._ensure_cos_sin_cache_length(self._lasts()[-1])
        self._go_on(then)

    @precondition(lambda self: "negative-position" not in self.gaps)
    @rule(tokens=st.integers(1, 3), then=_THEN)
    def refused(self, tokens: int, then: Call | None) -> None:
        """A position of -1 is refused, nothing is handed over, and the subject is none the worse for it."""
        positions = torch.arange(tokens)
        positions[-1] = -1
        context = filled("normal", (tokens, self.stack.hidden_size), torch.float32, seed=tokens)
        handed: list[int] = []
        before = self._copies()
        try:
            with watched():
                self.subject.materialize(
                    context.to(self.device), positions.to(self.device), lambda layer, k, v: handed.append(layer)
                )
        except KernelMemoryError as error:
            raise ContractError(f"position -1 is not refused: {error}") from None
        except Exception:
            if handed:
                raise ContractError(f"position -1 is refused after layers {handed} were handed over") from None
        else:
            raise ContractError("position -1 was served")
        self._unchanged(before, rows=set())
        self._go_on(then)

    # --- what a rule draws ---

    def _stacks(self) -> SearchStrategy[Stack]:
        config = st.sampled_from((4, 6)).flatmap(
            lambda head_dim: layer_configs(
                num_heads=2,
                num_kv_heads=st.sampled_from((1, 2)),
                head_dim=head_dim,
                rotary_dim=head_dim if "partial-rotary" in self.gaps else None,
                is_neox_style=True if "interleaved-pairs" in self.gaps else st.sampled_from((True, True, False)),
                hidden_size=5,
                dtype=st.sampled_from(_DTYPES),
                rope_scaling=st.just({}),
                max_position_embeddings=_LENGTHS[0] if "growing-table" in self.gaps else st.sampled_from(_LENGTHS),
                bias=False if "bias-everywhere" in self.gaps else st.sampled_from((False, True, True)),
                norm_kind="rms",
                value_scale=1.0,
            )
        )
        return homogeneous_stacks(
            config=config,
            norm_eps=1e-6 if "epsilon-per-layer" in self.gaps else None,
            weights=st.sampled_from(_VALUES),
            norms=st.sampled_from(("zeros", "normal")),
        )

    def _calls(self) -> SearchStrategy[Call]:
        return st.builds(
            Call,
            tokens=self._counts(),
            dtype=st.just(self.stack.dtype) if "context-dtype" in self.gaps else st.sampled_from(_DTYPES),
            positions=st.sampled_from([kind for kind in POSITION_KINDS if _POSITION_GAPS.get(kind) not in self.gaps]),
            last=st.sampled_from(self._lasts()),
            values=st.sampled_from(_VALUES),
            skipped=st.sampled_from((0, 1, 3)),
            seed=SEEDS,
        )

    def _counts(self) -> SearchStrategy[int]:
        least = int("empty-input" in self.gaps or "workspace-reuse" in self.gaps)
        most = PAGES * PAGE_ROWS - 4
        if self._first_count is not None and "workspace-growth" in self.gaps:
            most = self._first_count
        if self._first_count is not None and "workspace-reuse" in self.gaps:
            least = self._first_count
        return st.integers(least, most)

    def _lasts(self) -> list[int]:
        return [length - 1 for length in _LENGTHS if length <= self.stack.configs[0].max_position_embeddings]

    def _writable(self) -> list[str]:
        names = [name for gap, names in _WRITTEN.items() if gap not in self.gaps for name in names]
        return [name for name in names if self.stack.configs[0].bias or not name.endswith("bias")]

    # --- building blocks ---

    def _take(self, stack: Stack) -> None:
        self._place(stack)
        self.rotary_emb = self.layers[0].self_attn.rotary_emb
        weights = digests(self.layers)
        with watched():
            self.subject = type(self).build(
                self.layers, self.rotary_emb, stack.num_kv_heads, stack.head_dim, torch.device(self.device)
            )
        if names := changed(self.layers, weights):
            raise ContractError(f"{' and '.join(names)} was written to at construction")

    def _place(self, stack: Stack) -> None:
        self.stack, self.layers = stack, placed(stack.layers, torch.device(self.device))

    def _go_on(self, then: Call | None) -> None:
        """What shows whether the subject noticed what was done: another call, or the last one again."""
        call = self._last if then is None else then
        if call is not None:
            self.materialize(call)

    def _call(self, call: Call) -> None:
        context = filled(call.values, (call.tokens, self.stack.hidden_size), getattr(torch, call.dtype), seed=call.seed)
        positions = drawn_positions(call.positions, call.tokens, last=call.last, dtype=torch.int64, seed=call.seed)
        slots = call.slots()
        kept = slots >= 0
        handed: list[int] = []
        seen: list[tuple[Tensor, Tensor]] = []
        before = self._copies()
        weights, given = digests(self.layers), (context.to(self.device, copy=True), positions.to(self.device))
        dues = (given[0].clone(), given[1].clone())

        def write(layer: int, k: Tensor, v: Tensor) -> None:
            handed.append(layer)
            seen.append((k.clone(), v.clone()))
            for cache, values in zip(self._caches[layer], (k, v), strict=True):
                cache.flatten(0, 1)[slots[kept].to(cache.device)] = values[kept.to(values.device)]

        with watched():
            self.subject.materialize(*given, write)
        for name, values, due_values in zip(("ctx_hidden", "positions"), given, dues, strict=True):
            if not torch.equal(_bits(values), _bits(due_values)):
                raise ContractError(f"{name} was written to")
        if names := changed(self.layers, weights):
            raise ContractError(f"{' and '.join(names)} was written to")
        due = list(range(self.stack.num_layers)) if call.tokens else []
        if handed != due:
            raise ContractError(f"layers were handed over in the order {handed}; due is {due}")
        self._unchanged(before, rows=set(slots[kept].tolist()))
        if not seen:
            return
        for layer, pair in enumerate(seen):
            for name, values in zip("KV", pair, strict=True):
                if missing := int(still_poison(values).sum()):
                    raise ContractError(f"{missing} elements of layer {layer}'s {name} were never written")
        got = _stacked(seen)
        assert_kv(got, self.stack.layers, context, dues[1].cpu(), self.rounding, few_numbers=True)
        rows = slots[kept].to(self.device)
        held = _stacked([[cache.flatten(0, 1)[rows] for cache in pair] for pair in self._caches])
        for name, cached, values in zip("KV", held, got, strict=True):
            assert_exact(cached, values[:, kept.to(values.device)], what=f"{name} in the caches", bits=True)

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        return [(k.clone(), v.clone()) for k, v in self._caches]

    def _unchanged(self, before: Sequence[tuple[Tensor, Tensor]], *, rows: set[int]) -> None:
        """No cache changed in a row but `rows`."""
        others = [row for row in range(PAGES * PAGE_ROWS) if row not in rows]
        for layer, (pair, old) in enumerate(zip(self._caches, before, strict=True)):
            for name, cache, due in zip("KV", pair, old, strict=True):
                got, held = cache.flatten(0, 1)[others], due.flatten(0, 1)[others]
                if torch.equal(_bits(got), _bits(held)):
                    continue
                changed = (_bits(got) != _bits(held)).flatten(1).any(dim=1).nonzero().flatten().tolist()
                raise ContractError(
                    f"slots {[others[row] for row in changed]} of layer {layer}'s {name} cache changed in a call that named {sorted(rows)}"
                )


def fused_kv_machine(
    build: Callable[..., Any],
    *,
    refresh: Callable[[Any, Sequence[Any]], object] = lambda subject, layers: None,
    rounding: Rounding = "at-the-store",
    gaps: Collection[str] = (),
    device: str = "cpu",
    lives: int = LIVES,
    steps: int = STEPS,
) -> type[FusedKVMachine]:
    """A machine for one implementation; its `TestCase` is what pytest and HypoFuzz collect.

    Args:
        build: called with (layers, rotary_emb, num_kv_heads, head_dim, device), as for `FusedKVContract`.
        refresh: called with the subject and its layers after their tensors were written to in place.
        rounding: where the subject rounds K, one of `ROUNDINGS`.
        gaps: properties of `FusedKVContract` that the subject is known not to hold; what needs them is not drawn.
        device: where it runs. On a CPU its kernels are interpreted and every access is held against its tensor.
        lives: how many lives are tried. steps: rules in each.
    """
    name = f"{getattr(build, '__name__', 'Subject').strip('<>')}Machine"
    attributes = {
        "build": staticmethod(build),
        "refresh": staticmethod(refresh),
        "rounding": rounding,
        "gaps": frozenset(gaps),
        "device": device,
    }
    machine: type[FusedKVMachine] = type(name, (FusedKVMachine,), attributes)
    machine.TestCase.settings = settings(
        deadline=None,
        max_examples=scaled(lives),
        stateful_step_count=steps,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    return machine


_LIVING: ContextVar[type[FusedKVMachine]] = ContextVar("_LIVING")
_LIFE: Any = get_state_machine_test(
    cast(Any, lambda: _LIVING.get()()), settings=settings(deadline=None, stateful_step_count=STEPS)
)


def live(machine: type[FusedKVMachine], data: st.DataObject) -> None:
    """One life of `machine`, drawn from the data of the test that is running: for a test that is more than a machine's `TestCase`."""
    token = _LIVING.set(machine)
    try:
        # A test within a test is refused; the function that it wraps draws from whichever data it is given.
        _LIFE.hypothesis.inner_test(data)
    finally:
        _LIVING.reset(token)


def _stacked(pairs: Sequence[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def _bits(values: Tensor) -> Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
