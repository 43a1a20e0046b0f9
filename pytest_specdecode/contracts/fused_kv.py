"""What any stacked K/V path must do, whoever wrote it: refuse what it cannot serve, and compute the rest right.

The subject is built and called as SGLang's `FusedKVMaterializeHelper` is:

    subject = build(layers, rotary_emb, num_kv_heads, head_dim, device)
    subject.materialize(ctx_hidden, positions, write_layer_kv)
    subject.materialize_into(ctx_hidden, positions, slot_mapping, k_caches, v_caches)    # where it has it

Its Triton kernels are interpreted on a CPU, with every access held against its tensor's bounds and all memory that it allocates poisoned,
so a read or a write that is not its own shows wherever it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_specdecode.contracts.base import DRAWN, Contract, ContractError, cases, examples
from pytest_specdecode.contracts.fakes import placed, with_rows
from pytest_specdecode.contracts.machine import LIVES, fused_kv_machine, live
from pytest_specdecode.contracts.rounding import FEW_NUMBERS, ROUNDINGS, Rounding, assert_kv, rounded_kv
from pytest_specdecode.fused_kv import AXES, eager_kv, fused_kv_reference
from pytest_specdecode.fused_kv.tensor_parallel import rank_kv_heads, rank_layers
from pytest_specdecode.memory import KernelMemoryError, banded, banded_copy, still_poison
from pytest_specdecode.numerics import TOLERANCES, NumericsError, assert_close, assert_exact
from pytest_specdecode.strategies import (
    KINDS,
    POSITION_KINDS,
    BrokenStack,
    LayerConfig,
    Stack,
    heterogeneous_stacks,
    homogeneous_stacks,
    kernel_inputs,
    layer_configs,
)
from pytest_specdecode.strategies.kernels import KernelInput, drawn_positions
from pytest_specdecode.strategies.tensors import filled
from pytest_specdecode.trials import Received, Trial, changed, digests, error_text, tried
from pytest_specdecode.watching import last_part, watched

#: What the fixed cases are made of: small, and no two extents equal.
PLAIN = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=12)

#: By axis, what is changed in a layer that is to be refused.
ODD: Mapping[str, Mapping[str, Any]] = {
    "num-kv-heads": {"num_kv_heads": 4},
    "head-dim": {"head_dim": 32, "rotary_dim": 16},
    "rotary-dim": {"rotary_dim": 8},
    "rope-style": {"is_neox_style": False},
    "rope-theta": {"rope_theta": 1e6},
    "rope-scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "hidden-size": {"hidden_size": 20},
    "dtype": {"dtype": "bfloat16"},
    "bias": {"bias": True},
    "k-norm": {"k_norm": "whole"},
    "norm-kind": {"norm_kind": "gemma"},
    "v-head-dim": {"v_head_dim": 32},
    "value-scale": {"value_scale": 0.5},
    "q-size": {"q_size": 32},
    "quantization": {"quantization": "float8_e4m3fn"},
}

#: Of one layer, what the constructor's arguments contradict.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    f"{axis}-argument": ODD[axis]
    for axis in ("num-kv-heads", "head-dim", "rotary-dim", "rope-style", "rope-theta", "rope-scaling")
}

#: Stacks that every path of this kind serves.
SERVED: Mapping[str, Mapping[str, Any]] = {
    "one-layer": {"layers": 1},
    "eight-layers": {"layers": 8},
    "one-kv-head": {"num_kv_heads": 1},
    "as-many-kv-heads": {"num_kv_heads": 4},
    "partial-rotary": {"rotary_dim": 6},
    "head-of-80": {"head_dim": 80, "rotary_dim": 40},
    "head-of-2": {"head_dim": 2},
    "odd-hidden-size": {"hidden_size": 33},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}

#: Stacks that a path serves right or refuses.
OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "bias-everywhere": {"bias": True},
    "gemma-norm-everywhere": {"norm_kind": "gemma"},
    "value-scale-everywhere": {"value_scale": 0.612},
    "scaled-rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "growing-table": {"max_position_embeddings": 300},
    "epsilon-per-layer": {"epsilons": (1e-6, 1e-3, 1e-5)},
    "interleaved-pairs": {"is_neox_style": False},
}

#: Slots of a page in the caches.
PAGE = 4

#: Kinds of positions by property.
POSITIONS: Mapping[str, str] = {
    "first-position": "zero",
    "last-position": "last",
    "repeated-positions": "repeated",
    "unsorted-positions": "unsorted",
    "strided-positions": "strided",
}


class FusedKVContract(Contract):
    """Inherit, and give the implementation:

        class TestMine(FusedKVContract):
            build = staticmethod(MyFusedKV)

    Attributes:
        rounding: where the subject rounds K, one of `ROUNDINGS`.
        serves: axes of which the subject says that it serves layers that differ; those it may refuse or compute right, layer by layer.
        device: where it runs. On a CPU its kernels are interpreted.
        known_gaps: see `Contract`.
    """

    rounding: ClassVar[Rounding] = "at-the-store"
    serves: ClassVar[Collection[str]] = ()
    device: ClassVar[str] = "cpu"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.rounding not in ROUNDINGS:
            raise TypeError(f"{cls.__name__}.rounding is {cls.rounding!r}; one of {', '.join(ROUNDINGS)} is due")
        if isinstance(cls.serves, str) or not isinstance(cls.serves, Collection):
            raise TypeError(f"{cls.__name__}.serves is {cls.serves!r}; a tuple of axes is due")
        if unknown := [axis for axis in cls.serves if axis not in AXES]:
            raise TypeError(f"{cls.__name__}.serves names {unknown[0]!r}; axes are {', '.join(AXES)}")

    @staticmethod
    def build(*args: Any, **kwargs: Any) -> Any:
        """The implementation under test, called with (layers, rotary_emb, num_kv_heads, head_dim, device)."""
        raise NotImplementedError("give the implementation under test: build = staticmethod(MyFusedKV)")

    @staticmethod
    def refresh(subject: Any, layers: Sequence[Any]) -> None:
        """Tell the subject that its layers' weights were written to. Override where it wants to be told."""

    # --- refusing ---

    @cases("axis", AXES)
    def test_rejects(self, axis: str) -> None:
        """Layers 1 and 2 of four are odd: refused, and layer 1 named."""
        odd = PLAIN.changed(**ODD[axis])
        broken = BrokenStack(
            axis=axis,
            odd_layer=1,
            layer=1,
            expected=None,
            got=None,
            stack=Stack(configs=[PLAIN, odd, odd, PLAIN], seed=1),
        )
        self._reject(broken)

    @cases("axis", {f"{axis}{DRAWN}": axis for axis in AXES})
    @examples(10)
    @given(data=st.data())
    def test_rejects_any(self, axis: str, data: st.DataObject) -> None:
        """Any value, any layer, layer 0 included, of two to eight layers."""
        config = layer_configs(num_kv_heads=st.sampled_from((1, 2)), head_dim=st.sampled_from((4, 5, 8)))
        self._reject(data.draw(heterogeneous_stacks(axis=axis, max_layers=8, config=config), label="stack"))

    @cases("change", ARGUMENTS)
    def test_rejects_arguments(self, change: Mapping[str, Any]) -> None:
        """One layer, and a constructor argument that says otherwise: refused, and layer 0 named."""
        layer = placed(Stack(configs=[PLAIN], seed=1).layers, self._device)
        other = PLAIN.changed(**change)
        rotary_emb = placed(Stack(configs=[other]).layers, self._device)[0].self_attn.rotary_emb
        # An odd width belongs to the heads; the rotary object is then as it should be.
        if other.head_dim != PLAIN.head_dim or other.num_kv_heads != PLAIN.num_kv_heads:
            rotary_emb = layer[0].self_attn.rotary_emb
        outcome = _outcome(
            lambda: self.build(layer, rotary_emb, other.num_kv_heads, other.head_dim, self._device), layer, {0}
        )
        if outcome.kind != "rejected" and not (other.is_neox_style is False and outcome.kind == "rejected-unnamed"):
            raise ContractError(f"an argument that contradicts layer 0 ({dict(change)}) is to be refused: {outcome}")

    # --- serving ---

    @cases("shape", SERVED)
    def test_serves(self, shape: Mapping[str, Any]) -> None:
        """Layers that agree are accepted, and computed right."""
        self._compute(_stack(**shape))

    @cases("shape", OPTIONAL)
    def test_serves_or_rejects(self, shape: Mapping[str, Any]) -> None:
        """What not every path does: computed right, or refused."""
        stack = _stack(**shape)
        if (subject := self._built_or_refused(stack)) is not None:
            self._compute(stack, subject, tokens=4)

    @cases("rest", [f"plain{DRAWN}"])
    @examples(25)
    @given(data=st.data())
    def test_serves_any(self, rest: str, data: st.DataObject) -> None:
        """Any stack of one to eight layers, any input. What the subject is known not to do is not drawn."""
        inputs = self._drawn_inputs(data)
        if (subject := self._built_as_due(inputs.stack)) is not None:
            self._check(inputs.stack, subject, inputs.ctx_hidden, inputs.positions, few_numbers=True)

    def _drawn_inputs(self, data: st.DataObject) -> KernelInput:
        def unless(gap: str, *values: Any) -> Any:
            return values[0] if self.has_gap(gap) else st.sampled_from(values)

        whole = self.has_gap("partial-rotary")
        config = st.sampled_from((2, 8, 80) if whole else (2, 3, 5, 8, 80)).flatmap(
            lambda head_dim: layer_configs(
                num_kv_heads=st.sampled_from((1, 2)),
                head_dim=head_dim,
                rotary_dim=head_dim if whole else None,
                bias=unless("bias-everywhere", False, True),
                norm_kind=unless("gemma-norm-everywhere", "rms", "gemma"),
                value_scale=unless("value-scale-everywhere", 1.0, 0.612),
                is_neox_style=unless("interleaved-pairs", True, False),
                rope_scaling={} if self.has_gap("scaled-rope") else None,
                max_position_embeddings=unless("growing-table", 64, 300),
            )
        )
        return data.draw(
            kernel_inputs(
                stack=homogeneous_stacks(
                    max_layers=8, config=config, norm_eps=1e-6 if self.has_gap("epsilon-per-layer") else None
                ),
                min_tokens=1,
                max_tokens=4,
                positions=st.sampled_from([kind for kind in POSITION_KINDS if not self._lacks(kind)]),
                block_rows=st.none(),
            ),
            label="inputs",
        )

    def _built_as_due(self, stack: Stack) -> Any:
        """The subject; None only where it may refuse such layers, and does."""
        first = stack.configs[0]
        optional = first.bias or first.norm_kind != "rms" or first.value_scale != 1.0 or first.rope_scaling != {}
        return self._built_or_refused(stack) if optional or not first.is_neox_style else self._built(stack)

    @cases("dtype", {f"rounding-{dtype}": dtype for dtype in ("float16", "bfloat16")})
    def test_rounding(self, dtype: str) -> None:
        """K is rounded where `rounding` says: on projections that are exact, nearly every element is the one due."""
        stack = Stack(configs=[PLAIN.changed(dtype=dtype)] * 2, seed=2, weights="integers")
        ctx = _context(stack, 6, values="integers")
        positions = torch.tensor([0, 1, 63, 17, 17, 5])
        k, _ = self._run(self._built(stack), ctx, positions)
        due, _ = rounded_kv(stack.layers, ctx, positions, self.rounding)
        differing = (k.cpu() != due).double().mean().item()
        if differing > 0.02:
            others = {
                name: (k.cpu() != rounded_kv(stack.layers, ctx, positions, name)[0]).double().mean().item()
                for name in ROUNDINGS
            }
            shares = ", ".join(f"{share:.0%} from {name}" for name, share in others.items())
            raise ContractError(f"K is not rounded {self.rounding.replace('-', ' ')}: elements differ, {shares}")

    @cases("values", ["v-exact"])
    def test_values(self, values: str) -> None:
        """V is the projection, bit for bit, in every dtype: on small integers every order of sums gives the same."""
        for dtype in ("float32", "float16", "bfloat16"):
            stack = Stack(configs=[PLAIN.changed(dtype=dtype)] * 3, seed=3, weights="integers")
            ctx = _context(stack, 4, values="integers")
            _, v = self._run(self._built(stack), ctx, torch.tensor([0, 9, 63, 2]))
            assert_exact(v.cpu(), eager_kv(stack.layers, ctx, torch.arange(4))[1], what=f"V in {dtype}", bits=True)

    # --- one call ---

    @cases("count", {"empty-input": 0, "one-token": 1, "many-tokens": 17})
    def test_tokens(self, count: int) -> None:
        """No token calls nothing; one token and more than a block of 16 are computed right."""
        stack = _stack(layers=2, num_kv_heads=1)
        subject = self._built(stack)
        if count:
            self._compute(stack, subject, tokens=count)
            return

        def refuse(layer: int, k: Tensor, v: Tensor) -> None:
            raise ContractError(f"layer {layer} was handed over where there is no token")

        empty = torch.empty(0, dtype=torch.long, device=self._device)
        with watched():
            subject.materialize(_context(stack, 0).to(self._device), empty, refuse)

    @cases("kind", POSITIONS)
    def test_positions(self, kind: str) -> None:
        """The table's rows are those that the positions say, however they lie in memory."""
        stack = _stack()
        positions = drawn_positions(kind, 5, last=63, dtype=torch.int64, seed=4)
        self._check(stack, self._built(stack), _context(stack, 5), positions)

    @cases("position", {"negative-position": -1, "position-past-the-table": 40})
    def test_out_of_range(self, position: int) -> None:
        """A position that the table has not, and cannot grow to, is refused, not read from wherever it points."""
        stack = _stack(layers=2)
        layers = placed(with_rows(stack.layers, 40), self._device)
        ctx, inside = _context(stack, 3), torch.tensor([0, 7, 39])
        try:
            subject = self._build(stack, layers)
            assert_kv(self._run(subject, ctx, inside), layers, ctx, inside, self.rounding)
        except Exception as error:
            # Else an error of any kind would pass for a refusal.
            raise ContractError(
                f"with a table of 40 rows that cannot grow, positions {inside.tolist()} are not served: {error_text(error)}"
            ) from error
        try:
            self._run(subject, ctx, torch.tensor([0, position, 39]))
        except KernelMemoryError as error:
            raise ContractError(f"position {position} of a table of 40 rows is not refused: {error}") from None
        except (ContractError, NumericsError):
            raise
        except Exception:
            return
        raise ContractError(f"position {position} of a table of 40 rows was served")

    @cases("order", ["callback-order"])
    def test_callback(self, order: str) -> None:
        """Each layer is handed over once, layer 0 first, `[T, num_kv_heads, head_dim]` in the weights' dtype."""
        stack = _stack(layers=4, dtype="bfloat16")
        seen: list[int] = []

        def collect(layer: int, k: Tensor, v: Tensor) -> None:
            seen.append(layer)
            for name, tensor in (("K", k), ("V", v)):
                if tuple(tensor.shape) != (3, 2, 16) or tensor.dtype != torch.bfloat16:
                    raise ContractError(
                        f"{name} of layer {layer} is {tensor.dtype} {tuple(tensor.shape)}; due is bfloat16 (3, 2, 16)"
                    )

        with watched():
            self._built(stack).materialize(
                _context(stack, 3).to(self._device), torch.arange(3, device=self._device), collect
            )
        if seen != [0, 1, 2, 3]:
            raise ContractError(f"layers were handed over in the order {seen}; due is [0, 1, 2, 3]")

    @cases("what", ["bounds", "no-element-unwritten"])
    def test_memory(self, what: str) -> None:
        """Nothing outside the tensors is touched, the inputs stay as they were, and every element is written."""
        # Widths that no block of a power of two fits, and more rows than one.
        rotary_dim = 10 if self.has_gap("partial-rotary") else 6
        stack = _stack(layers=2, head_dim=10, rotary_dim=rotary_dim, num_heads=3, num_kv_heads=3)
        layers = placed(stack.layers, self._device)
        before = digests(layers)
        subject = self._build(stack, layers)
        values = {
            "ctx_hidden": _context(stack, 3).to(self._device),
            "positions": torch.tensor([0, 63, 5], device=self._device),
        }
        inputs = {name: banded_copy(tensor, name=name) for name, tensor in values.items()}
        unwritten: list[str] = []

        def collect(layer: int, k: Tensor, v: Tensor) -> None:
            for name, tensor in (("K", k), ("V", v)):
                missing = int(still_poison(tensor).sum())
                unwritten.extend(
                    [f"{missing} of {tensor.numel()} elements of layer {layer}'s {name}"] if missing else []
                )

        try:
            with watched():
                subject.materialize(inputs["ctx_hidden"].tensor, inputs["positions"].tensor, collect)
        except KernelMemoryError:
            if what == "bounds":
                raise
            return
        if what == "no-element-unwritten":
            if unwritten:
                raise ContractError(f"never written: {'; '.join(unwritten)}")
            return
        for name, band in inputs.items():
            band.assert_intact()
            assert_exact(band.tensor, values[name], what=name, bits=True, axes=("token", "lane"))
        if names := changed(layers, before):
            raise ContractError(f"{' and '.join(names)} was written to")

    # --- caches ---

    @cases("layout", {"caches-by-slot": "slots", "caches-by-block": "blocks"})
    def test_caches(self, layout: str) -> None:
        """Where the subject has `materialize_into`: K and V of each layer are in its cache at the token's slot, -1 skips the token, and no
        other slot changes a bit."""
        stack = _stack()
        subject = self._built(stack)
        for slots in ([7, -1, 0, 11, 4], [-1] * 5, [0, 1, 2, 3, 4]):
            positions = torch.tensor([63, 9, 0, 17, 17])
            self._check_caches(stack, subject, _context(stack, 5), positions, torch.tensor(slots), layout, pages=3)

    @cases("rest", [f"caches{DRAWN}"])
    @examples(10)
    @given(data=st.data())
    def test_caches_any(self, rest: str, data: st.DataObject) -> None:
        """The same for any stack, any input and any slots."""
        inputs = self._drawn_inputs(data)
        pages = -(-inputs.tokens // PAGE) + data.draw(st.integers(0, 1), label="pages to spare")
        places = data.draw(st.permutations(range(PAGE * pages)), label="slots")[: inputs.tokens]
        skipped = data.draw(st.sets(st.integers(0, inputs.tokens - 1), max_size=inputs.tokens), label="skipped tokens")
        slots = torch.tensor([-1 if token in skipped else slot for token, slot in enumerate(places)])
        layout = data.draw(st.sampled_from(("slots", "blocks")), label="layout")
        if (subject := self._built_as_due(inputs.stack)) is not None:
            self._check_caches(
                inputs.stack, subject, inputs.ctx_hidden, inputs.positions, slots, layout, pages=pages, few_numbers=True
            )

    @cases("what", ["far-offsets"])
    def test_far(self, what: str) -> None:
        """Offsets past 2^31 elements, of the projection and of K and V, do not wrap.

        The last token of 32,769 with 8 layers of 64 heads of 128; only it is computed, and memory that nobody touches takes no room.
        """
        if self._device.type != "cpu":
            pytest.skip("shown by interpreting the kernel, which needs CPU tensors")
        plain = _stack(layers=2)
        with watched() as guard:
            subject = self._built(plain)
            subject.materialize(_context(plain, 1), torch.tensor([1]), lambda *_: None)
        if not guard.launches:
            pytest.skip("no Triton kernel is launched; torch's own offsets are 64 bits wide")
        config = LayerConfig(num_heads=64, num_kv_heads=64, head_dim=128, hidden_size=1, dtype="float16")
        stack = Stack(configs=[config] * 8, seed=5)
        tokens = (1 << 31) // (8 * 64 * 128) + 1
        ctx, positions = _context(stack, tokens), torch.full((tokens,), 3)
        last: dict[str, Tensor] = {}

        def collect(layer: int, k: Tensor, v: Tensor) -> None:
            if layer == 7:
                last.update(K=k[-1, -1].clone(), V=v[-1, -1].clone())

        subject = self._built(stack)
        try:
            with last_part(8):
                subject.materialize(ctx, positions, collect)
        except RuntimeError as error:
            if "allocate memory" in str(error):
                pytest.skip(f"the address space for {tokens} tokens cannot be had: {error}")
            raise
        if not last["K"].any() and not last["V"].any():
            pytest.skip("inconclusive: the last programs of the grid do not write the last row")
        for name, truth in zip("KV", fused_kv_reference(stack.layers[7:], ctx[-1:], positions[-1:]), strict=True):
            assert_close(last[name], truth[0, -1, -1], what=f"{name} of the last row", axes=("dim",))

    # --- several calls ---

    @cases("counts", {"workspace-growth": (1, 3, 7), "workspace-reuse": (7, 2, 5, 7)})
    def test_calls(self, counts: Sequence[int]) -> None:
        """Calls of other sizes, each computed right whatever was before it; and twice the same call gives the same bits."""
        stack = _stack(layers=2)
        subject = self._built(stack)
        before: dict[int, tuple[Tensor, Tensor]] = {}
        for count in counts:
            pair = self._compute(stack, subject, tokens=count)
            for name, again, once in zip("KV", pair, before.setdefault(count, pair), strict=True):
                assert_exact(again, once, what=f"{name} of the same call again", bits=True)

    @cases("what", ["context-dtype"])
    def test_dtypes(self, what: str) -> None:
        """The context's dtype may change from call to call; what counts is its values in the weights' dtype."""
        stack = _stack(layers=2, dtype="bfloat16")
        subject = self._built(stack)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
            ctx = torch.randn(3, stack.hidden_size, generator=torch.Generator().manual_seed(6)).to(dtype)
            self._check(stack, subject, ctx, torch.tensor([1, 40, 7]))

    @cases("which", {"weights-updated": "qkv_proj", "norms-updated": "k_norm"})
    def test_updates(self, which: str) -> None:
        """Weights written to in place after construction are the ones that count; see `refresh`."""
        stack = _stack(layers=2)
        layers = placed(stack.layers, self._device)
        subject = self._build(stack, layers)
        self._compute(stack, subject, tokens=2)
        for each in {id(layer): layer for layer in (*layers, *stack.layers)}.values():
            with torch.no_grad():
                getattr(each.self_attn, which).weight.copy_(getattr(each.self_attn, which).weight.flip(0) * 1.5)
        self.refresh(subject, layers)
        self._compute(stack, subject, tokens=2)

    @cases("rest", [f"calls{DRAWN}"])
    @examples(LIVES)
    @given(data=st.data())
    def test_calls_any(self, rest: str, data: st.DataObject) -> None:
        """Calls of any kind into caches, among writes to the weights and growth of the table; see `FusedKVMachine`."""
        machine = fused_kv_machine(
            self.build, refresh=self.refresh, rounding=self.rounding, gaps=self.known_gaps, device=self.device
        )
        live(machine, data)

    @cases("heads", {"tensor-parallel": 4, "replicated-heads": 2})
    def test_ranks(self, heads: int) -> None:
        """Layers as each tensor-parallel rank holds them: its heads of the whole, and no other's."""
        stack, ranks = _stack(layers=2, num_kv_heads=heads), 2 if heads == 4 else 4
        ctx, positions = _context(stack, 3), torch.tensor([2, 63, 0])
        due = fused_kv_reference(stack.layers, ctx, positions)
        eager = rounded_kv(stack.layers, ctx, positions, self.rounding)
        for rank in range(ranks):
            mine = rank_kv_heads(heads, ranks, rank)
            layers = placed(rank_layers(stack.layers, ranks, rank), self._device)
            subject = self.build(layers, layers[0].self_attn.rotary_emb, len(mine), stack.head_dim, self._device)
            got = self._run(subject, ctx, positions)
            for name, tensor, truth, base in zip("KV", got, due, eager, strict=True):
                part = slice(mine.start, mine.stop)
                assert_close(tensor, truth[:, :, part], base[:, :, part], what=f"{name} of rank {rank}")

    # --- building blocks ---

    @property
    def _device(self) -> torch.device:
        return torch.device(self.device)

    def _lacks(self, kind: str) -> bool:
        return any(self.has_gap(name) and value == kind for name, value in POSITIONS.items())

    def _build(self, stack: Stack, layers: Sequence[Any]) -> Any:
        rotary_emb = layers[0].self_attn.rotary_emb
        with watched():
            return self.build(layers, rotary_emb, stack.num_kv_heads, stack.head_dim, self._device)

    def _built(self, stack: Stack) -> Any:
        return self._build(stack, placed(stack.layers, self._device))

    def _built_or_refused(self, stack: Stack) -> Any:
        """The subject, or None where it says by a ValueError or NotImplementedError that it does not serve such layers."""
        try:
            return self._built(stack)
        except (ValueError, NotImplementedError):
            return None

    def _run(self, subject: Any, ctx: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of one call, by layer. The subject gets the positions as they lie in memory, and of both inputs copies."""
        with watched():
            return _collected(subject, ctx.to(self._device, copy=True), _copied(positions).to(self._device))

    def _compute(self, stack: Stack, subject: Any = None, *, tokens: int = 3) -> tuple[Tensor, Tensor]:
        """Some hidden states through the subject, held against the truth; positions in no order, and up to the last one."""
        last = stack.configs[0].max_position_embeddings - 1
        positions = torch.tensor([last, *(7 * index % last for index in range(1, tokens))])
        return self._check(
            stack, self._built(stack) if subject is None else subject, _context(stack, tokens), positions
        )

    def _check(
        self, stack: Stack, subject: Any, ctx: Tensor, positions: Tensor, *, few_numbers: bool = False
    ) -> tuple[Tensor, Tensor]:
        got = self._run(subject, ctx, positions)
        assert_kv(got, stack.layers, ctx, positions, self.rounding, few_numbers=few_numbers)
        return got

    def _check_caches(
        self,
        stack: Stack,
        subject: Any,
        ctx: Tensor,
        positions: Tensor,
        slots: Tensor,
        layout: str,
        *,
        pages: int,
        few_numbers: bool = False,
    ) -> None:
        if not hasattr(subject, "materialize_into"):
            pytest.skip("the subject has no materialize_into")
        rows, dtype = (stack.num_kv_heads, stack.head_dim), getattr(torch, stack.dtype)
        # SGLang's pools, or vLLM's blocks, of which each holds K and V side by side.
        shape = (2, PAGE * pages, *rows) if layout == "slots" else (pages, 2, PAGE, *rows)
        wholes = [
            banded(shape, dtype, device=self._device, name=f"layer {layer}'s caches")
            for layer in range(stack.num_layers)
        ]
        k_caches, v_caches = (
            [each.tensor.select(0 if layout == "slots" else 1, part) for each in wholes] for part in (0, 1)
        )
        with watched():
            subject.materialize_into(
                ctx.to(self._device, copy=True),
                _copied(positions).to(self._device),
                slots.to(self._device, copy=True),
                k_caches,
                v_caches,
            )
        for each in wholes:
            each.assert_intact()
        written = slots >= 0
        untouched = torch.ones(PAGE * pages, dtype=torch.bool)
        untouched[slots[written]] = False
        got = []
        for name, caches in (("K", k_caches), ("V", v_caches)):
            found = [cache.cpu().reshape(-1, *rows) for cache in caches]
            for layer, cache in enumerate(found):
                changed_slots = (~still_poison(cache)).any(-1).any(-1) & untouched
                if changed_slots.any():
                    slot = int(changed_slots.nonzero()[0])
                    raise ContractError(
                        f"slot {slot} of layer {layer}'s {name} cache is no token's, and was written to"
                    )
            got.append(torch.stack([cache[slots[written]] for cache in found]))
        if written.any():
            assert_kv(
                (got[0], got[1]), stack.layers, ctx[written], positions[written], self.rounding, few_numbers=few_numbers
            )

    def _reject(self, broken: BrokenStack) -> None:
        outcome = try_axis(self.build, broken, device=self.device)
        if outcome.kind == "rejected" or (broken.axis in self.serves and outcome.kind == "served-right"):
            return
        raise ContractError(
            f"layers that differ in {broken.axis} are to be refused, and layer {broken.layer} named: {outcome}"
        )


# --- what a subject makes of one odd layer ------------------------------------------------------------------------------------------------

OutcomeKind = Literal["rejected", "rejected-unnamed", "crashed", "served-right", "served-wrong"]


@dataclass(frozen=True, kw_only=True)
class AxisOutcome:
    """What a subject did with layers of which one is odd.

    Attributes:
        kind: `rejected`, an error that names the layer; `rejected-unnamed`, a ValueError or NotImplementedError that does not, or names
            another; `crashed`, any other error; `served-right`, every layer's own K and V; `served-wrong`, anything else.
        detail: the error, or how wrong what was served is.
    """

    kind: OutcomeKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


def try_axis(build: Callable[..., Any], broken: BrokenStack, *, device: str = "cpu") -> AxisOutcome:
    """Build a subject of layers of which one is odd, and where it accepts them let it compute, and compare layer by layer.

    Args:
        build: as for FusedKVContract.
        broken: what `heterogeneous_stacks` draws.
        device: where the subject runs.
    """
    where = torch.device(device)
    stack, layers = broken.stack, placed(broken.stack.layers, where)
    # Layer 0 is what the arguments are taken from. Where it is the odd one, a subject may name it or the first that is not like it.
    names = {layer for layer in (broken.layer, broken.odd_layer) if layer is not None}
    outcome = _outcome(
        lambda: build(layers, layers[0].self_attn.rotary_emb, stack.num_kv_heads, stack.head_dim, where), layers, names
    )
    # One that rotates only halves refuses an interleaved layer 0 before it looks at any layer.
    only_halves = broken.axis == "rope-style" and broken.odd_layer == 0
    if (broken.layer is None or only_halves) and outcome.kind == "rejected-unnamed":
        return AxisOutcome(kind="rejected", detail=outcome.detail)
    return outcome


def _outcome(build: Callable[[], Any], layers: Sequence[Any], names: set[int]) -> AxisOutcome:
    hidden = getattr(getattr(layers[0].self_attn, "qkv_proj", None), "weight", torch.empty(0, 1)).shape[-1]
    dtype = getattr(layers[0].self_attn.qkv_proj, "weight", torch.empty(0)).dtype
    ctx = torch.randn(1, hidden, generator=torch.Generator().manual_seed(7))
    ctx = ctx.to(dtype if dtype in TOLERANCES else torch.float32)
    positions = torch.tensor([23])
    device = layers[0].self_attn.k_norm.weight.device if layers[0].self_attn.k_norm is not None else ctx.device
    trial = tried(build, layers, ctx.to(device), positions.to(device), FEW_NUMBERS)
    if trial.kind == "right":
        return AxisOutcome(kind="served-right", detail="each layer's K and V are its own")
    return AxisOutcome(kind=_kind(trial, names), detail=trial.text[:300])


def _kind(trial: Trial, names: set[int]) -> OutcomeKind:
    if trial.kind == "wrong":
        return "served-wrong"
    if trial.kind == "refused" and trial.layer in names:
        return "rejected"
    unnamed = trial.kind == "refused" and isinstance(trial.error, (ValueError, NotImplementedError))
    return "rejected-unnamed" if unnamed else "crashed"


# --- inputs -------------------------------------------------------------------------------------------------------------------------------


def _stack(*, layers: int = 3, epsilons: Sequence[float] | None = None, **shape: Any) -> Stack:
    config = PLAIN.changed(**shape)
    if epsilons is None:
        return Stack(configs=[config] * layers, seed=8)
    # With K this small the mean square is below the epsilons, and a layer with another's is wrong by a factor.
    return Stack(configs=[config.changed(norm_eps=eps) for eps in epsilons], seed=8, weights="tiny")


def _context(stack: Stack, tokens: int, *, values: str = "normal") -> Tensor:
    assert values in KINDS
    return filled(values, (tokens, stack.hidden_size), getattr(torch, stack.dtype), seed=9)


def _collected(subject: Any, ctx: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    received = Received(ctx.device)
    subject.materialize(ctx, positions, received)
    seen = received.kv
    if faults := received.faults(len(seen)):
        raise ContractError("; ".join(faults[:3]))
    if not seen:
        raise ContractError("no layer was handed over; due is each of them, from 0")
    return torch.stack([seen[at][0] for at in range(len(seen))]), torch.stack([seen[at][1] for at in range(len(seen))])


def _copied(positions: Tensor) -> Tensor:
    """A copy with the strides that it has, and what lies between."""
    whole = torch.as_strided(positions, (positions.untyped_storage().nbytes() // positions.element_size(),), (1,), 0)
    return torch.as_strided(whole.clone(), positions.shape, positions.stride(), positions.storage_offset())
