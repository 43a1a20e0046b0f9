"""The fused-KV contract: what is right passes, and each thing that is wrong fails the test that bears its name, and no other.

Failure modes this file exists to catch: a property whose test cannot fail, so that it proves nothing; a test that fails for another
property's fault, so that its name misleads; a refusal accepted that names no layer, or the wrong one; a right implementation refused.

Each broken subject is FusedKV with one thing wrong. They run in eager torch, except where the fault is a kernel's.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from running import failing

from pytest_specdecode.contracts import ROUNDINGS, FusedKVContract, rounded_kv, try_axis
from pytest_specdecode.contracts.base import DRAWN
from pytest_specdecode.contracts.fused_kv import ARGUMENTS, ODD, PLAIN
from pytest_specdecode.errors import FusedKVError
from pytest_specdecode.fused_kv import AXES, FusedKV, eager_kv, fused_kv_reference, kernel, path
from pytest_specdecode.numerics import assert_exact
from pytest_specdecode.strategies import BrokenStack, Stack


class TestOurs(FusedKVContract):
    """The whole contract, drawn tests included, on the kernel."""

    build = staticmethod(FusedKV)


class TestOursWithoutTriton(FusedKVContract):
    """And on the same in eager torch."""

    @staticmethod
    def build(*args, **kwargs):
        return Eager(*args, **kwargs)


class Eager(FusedKV):
    def __init__(self, *args, backend="eager", **kwargs):
        super().__init__(*args, backend=backend, **kwargs)


# --- broken subjects ----------------------------------------------------------------------------------------------------------------------


class Silent:
    """Accepts everything and does nothing."""

    def materialize(self, ctx_hidden, positions, write_layer_kv):
        pass


def blind(axis, *, arguments=False):
    """Does not look at an axis: of several layers, or of one layer against the arguments."""

    def build(layers, *args, **kwargs):
        try:
            return Eager(layers, *args, **kwargs)
        except FusedKVError as error:
            if error.axis != axis or (len(layers) == 1) is not arguments:
                raise
            return Silent()

    return build


def wrong_where(condition):
    """K half as large again where `condition` of the path, the context and the positions holds."""

    class Wrong(Eager):
        def compute(self, ctx_hidden, positions):
            k, v = super().compute(ctx_hidden, positions)
            return (k * 1.5 if len(positions) and condition(self, ctx_hidden, positions) else k), v

    return Wrong


class NoBias(Eager):
    def _stack(self):
        super()._stack()
        self._bias = None


class PlainNorm(Eager):
    def _stack(self):
        super()._stack()
        self._norm_weight = torch.stack([layer.self_attn.k_norm.weight.float() for layer in self._layers])


class NoScale(Eager):
    def _stack(self):
        super()._stack()
        self.value_scale = 1.0


class OneEpsilon(Eager):
    def _stack(self):
        super()._stack()
        self._eps = self._eps[:1].expand_as(self._eps)


def rounding_in(dtype):
    class Rounding(Eager):
        def compute(self, ctx_hidden, positions):
            k, v = super().compute(ctx_hidden, positions)
            if self.dtype == dtype and len(positions) == 6:
                k, _ = rounded_kv(self._layers, ctx_hidden, positions, "after-the-norm")
            return k, v

    return Rounding


class LastBit(Eager):
    def compute(self, ctx_hidden, positions):
        k, v = super().compute(ctx_hidden, positions)
        return k, torch.nextafter(v, torch.full_like(v, 99.0)) if len(positions) == 4 else v


class CallsForNothing(Eager):
    def materialize(self, ctx_hidden, positions, write_layer_kv):
        for layer, pair in enumerate(zip(*self.compute(ctx_hidden, positions), strict=True)):
            write_layer_kv(layer, *pair)


class IgnoresStride(Eager):
    def compute(self, ctx_hidden, positions):
        if not positions.is_contiguous():
            positions = torch.as_strided(positions, positions.shape, (1,)).clamp(0, 63)
        return super().compute(ctx_hidden, positions)


class FromTheEnd(Eager):
    """Negative positions as Python reads them."""

    def compute(self, ctx_hidden, positions):
        return super().compute(ctx_hidden, positions.clamp(min=0))


class LastRowForMore(Eager):
    def compute(self, ctx_hidden, positions):
        fixed = not hasattr(self.rotary_emb, "_ensure_cos_sin_cache_length")
        return super().compute(ctx_hidden, positions.clamp(max=39) if fixed else positions)


class Backwards(Eager):
    def materialize(self, ctx_hidden, positions, write_layer_kv):
        calls = []
        super().materialize(ctx_hidden, positions, lambda *call: calls.append(call))
        for call in reversed(calls):
            write_layer_kv(*call)


@triton.jit
def peek(positions, out, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(positions + lane, mask=lane <= count, other=0), mask=lane < count)


class Peeks(Eager):
    """A mask that lets one lane too many through, whose value nobody uses."""

    def compute(self, ctx_hidden, positions):
        if self.head_dim == 10:
            peek[(1,)](positions, torch.empty_like(positions), len(positions), BLOCK=8)
        return super().compute(ctx_hidden, positions)


class ChangesItsInput(Eager):
    def compute(self, ctx_hidden, positions):
        pair = super().compute(ctx_hidden, positions)
        if self.head_dim == 10:
            ctx_hidden[-1] = 0
        return pair


class LeavesALane(Eager):
    def compute(self, ctx_hidden, positions):
        k, v = super().compute(ctx_hidden, positions)
        if self.head_dim != 10:
            return k, v
        out = torch.empty_like(k)
        out[..., :-1] = k[..., :-1]
        return out, v


def narrow_kernel():
    """The kernel with int32 offsets."""
    source = Path(kernel.__file__).read_text(encoding="utf-8")
    wide = ("token = (item % num_tokens).to(tl.int64)", "layer = (item // num_tokens).to(tl.int64)")
    for line in wide:
        assert line in source
        source = source.replace(line, line.replace(".to(tl.int64)", ""))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "narrow_kernel.py"
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("narrow_kernel", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # Triton reads a kernel's source when it is first interpreted.
        module._norm_rope_kernel.src  # noqa: B018
        yield module.fused_norm_rope


class Narrow(FusedKV):
    """Only for many heads, so that the other tests stay quick."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, backend="triton" if args[2] in (2, 64) else "eager", **kwargs)

    def compute(self, ctx_hidden, positions):
        with mock.patch.object(path, "fused_norm_rope", next(narrow_kernel_kept)):
            return super().compute(ctx_hidden, positions)


class Grown(Eager):
    """What lies beyond the first call's size is wrong."""

    capacity = None

    def compute(self, ctx_hidden, positions):
        k, v = super().compute(ctx_hidden, positions)
        self.capacity = self.capacity or len(positions)
        k[:, self.capacity :] *= 1.5
        return k, v


class Stale(Eager):
    """A smaller call is given what the larger one before it left."""

    kept = None

    def compute(self, ctx_hidden, positions):
        k, v = super().compute(ctx_hidden, positions)
        if self.kept is None or self.kept.shape[1] < k.shape[1]:
            self.kept = k
        return (self.kept[:, -k.shape[1] :] if self.kept.shape[1] > k.shape[1] else k), v


class FirstDtype(Eager):
    first = None

    def compute(self, ctx_hidden, positions):
        self.first = self.first or ctx_hidden.dtype
        k, v = super().compute(ctx_hidden, positions)
        return (k if ctx_hidden.dtype == self.first else k * 1.5), v


def not_noticing(which):
    class NotNoticing(Eager):
        def _weight_versions(self):
            other = "k_norm" if which == "qkv_proj" else "qkv_proj"
            return [getattr(layer.self_attn, other).weight._version for layer in self._layers]

    return NotNoticing


class LastSlotForNone(Eager):
    """Of pools, -1 is taken for the last slot, as Python has it."""

    def materialize_into(self, ctx_hidden, positions, slot_mapping, k_caches, v_caches):
        if k_caches[0].ndim == 3 and (slot_mapping < 0).sum() == 1:
            slot_mapping = slot_mapping % len(k_caches[0])
            slot_mapping[slot_mapping == 11] = torch.tensor([11, 10])[: (slot_mapping == 11).sum()]
        super().materialize_into(ctx_hidden, positions, slot_mapping, k_caches, v_caches)


class TouchesANeighbour(Eager):
    """Of blocks, a slot that no token has."""

    def materialize_into(self, ctx_hidden, positions, slot_mapping, k_caches, v_caches):
        super().materialize_into(ctx_hidden, positions, slot_mapping, k_caches, v_caches)
        if v_caches[0].ndim == 4 and 11 not in slot_mapping.tolist():
            v_caches[1][2, 3, 0, 5] = 1.0


class MapsByToken(Eager):
    """Tokens follow each other whatever the mapping says."""

    def materialize_into(self, ctx_hidden, positions, slot_mapping, k_caches, v_caches):
        order = torch.arange(len(slot_mapping), device=slot_mapping.device)
        slot_mapping = torch.where(slot_mapping < 0, slot_mapping, order)
        super().materialize_into(ctx_hidden, positions, slot_mapping, k_caches, v_caches)


class LayersSwapped(Eager):
    """Right when handed over; the last layer's cache is given the first's."""

    def materialize_into(self, ctx_hidden, positions, slot_mapping, k_caches, v_caches):
        super().materialize_into(ctx_hidden, positions, slot_mapping, k_caches, [*v_caches[1:], v_caches[0]])


def same(positions, value=None):
    return positions.eq(positions[0] if value is None else value).all() and len(positions) == 5


BROKEN = {
    **{axis: blind(axis) for axis in AXES},
    **{name: blind(name.removesuffix("-argument"), arguments=True) for name in ARGUMENTS},
    "one-layer": wrong_where(lambda path, ctx, positions: path.num_layers == 1),
    "eight-layers": wrong_where(lambda path, ctx, positions: path.num_layers == 8),
    "one-kv-head": wrong_where(lambda path, ctx, positions: path.num_kv_heads == 1 and path.num_layers == 3),
    "as-many-kv-heads": wrong_where(lambda path, ctx, positions: path.num_kv_heads == 4),
    "partial-rotary": wrong_where(lambda path, ctx, positions: (path.head_dim, path.rotary_dim) == (16, 6)),
    "head-of-80": wrong_where(lambda path, ctx, positions: path.head_dim == 80),
    "head-of-2": wrong_where(lambda path, ctx, positions: path.head_dim == 2),
    "odd-hidden-size": wrong_where(lambda path, ctx, positions: path.hidden_size == 33),
    "float16": wrong_where(lambda path, ctx, positions: path.dtype == torch.float16 and len(positions) == 3),
    "bfloat16": wrong_where(
        lambda path, ctx, positions: (path.dtype, path.num_layers, len(positions)) == (torch.bfloat16, 3, 3)
    ),
    "bias-everywhere": NoBias,
    "gemma-norm-everywhere": PlainNorm,
    "value-scale-everywhere": NoScale,
    "scaled-rope": wrong_where(lambda path, ctx, positions: path.facts[0].rope_scaling != ()),
    "growing-table": wrong_where(lambda path, ctx, positions: positions.max() >= 256),
    "epsilon-per-layer": OneEpsilon,
    "interleaved-pairs": wrong_where(lambda path, ctx, positions: not path.is_neox_style),
    "rounding-float16": rounding_in(torch.float16),
    "rounding-bfloat16": rounding_in(torch.bfloat16),
    "v-exact": LastBit,
    "empty-input": CallsForNothing,
    "one-token": wrong_where(lambda path, ctx, positions: len(positions) == 1 and path.num_kv_heads == 1),
    "many-tokens": wrong_where(lambda path, ctx, positions: len(positions) == 17),
    "first-position": wrong_where(lambda path, ctx, positions: same(positions, 0)),
    "last-position": wrong_where(lambda path, ctx, positions: same(positions, 63)),
    "repeated-positions": wrong_where(
        lambda path, ctx, positions: same(positions) and positions[0] not in (0, 63) and path.num_layers == 3
    ),
    "unsorted-positions": wrong_where(
        lambda path, ctx, positions: (
            len(positions) == 5 and path.num_layers == 3 and not same(positions) and positions.is_contiguous()
        )
    ),
    "strided-positions": IgnoresStride,
    "negative-position": FromTheEnd,
    "position-past-the-table": LastRowForMore,
    "callback-order": Backwards,
    "bounds": Peeks,
    "no-element-unwritten": LeavesALane,
    "caches-by-slot": LastSlotForNone,
    "caches-by-block": TouchesANeighbour,
    "far-offsets": Narrow,
    "workspace-growth": Grown,
    "workspace-reuse": Stale,
    "context-dtype": FirstDtype,
    "weights-updated": not_noticing("qkv_proj"),
    "norms-updated": not_noticing("k_norm"),
    "tensor-parallel": wrong_where(lambda path, ctx, positions: path.num_kv_heads == 2 and positions[0] == 2),
    "replicated-heads": wrong_where(lambda path, ctx, positions: path.num_kv_heads == 1 and positions[0] == 2),
}

narrow_kernel_kept = iter(())


@pytest.fixture(autouse=True, scope="module")
def kernel_with_narrow_offsets():
    global narrow_kernel_kept
    made = narrow_kernel()
    function = next(made)
    narrow_kernel_kept = iter(lambda: function, None)
    yield
    made.close()


def contract(build, **attributes):
    return type("Subject", (FusedKVContract,), {"build": staticmethod(build), **attributes})


def test_there_is_a_broken_subject_for_every_property():
    assert set(BROKEN) == {name for name in FusedKVContract.properties() if not name.endswith(DRAWN)}
    assert set(ODD) == set(AXES)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_fails_the_test_of_its_name_and_no_other(name, tmp_path):
    # A subject that only refuses less serves all the rest as it did.
    refusing = name in AXES or name in ARGUMENTS
    tests = ("test_rejects", "test_rejects_arguments", "test_serves_or_rejects", "test_ranks") if refusing else None
    assert list(failing(contract(BROKEN[name]), tmp_path, tests=tests)) == [name]


def test_an_input_that_is_written_to_is_found(tmp_path):
    assert list(failing(contract(ChangesItsInput), tmp_path)) == ["bounds"]


class ScalesWeights(Eager):
    """Right by the layers as they have become."""

    def __init__(self, layers, *args, **kwargs):
        for layer in layers:
            layer.self_attn.qkv_proj.weight.data.mul_(2.0)
        super().__init__(layers, *args, **kwargs)


class ScalesANormLater(Eager):
    def materialize(self, ctx_hidden, positions, write_layer_kv):
        super().materialize(ctx_hidden, positions, write_layer_kv)
        if len(positions) > 8:
            self._layers[0].self_attn.k_norm.weight.data.mul_(2.0)


def test_layers_that_are_written_to_are_found(tmp_path):
    found = failing(contract(ScalesWeights), tmp_path, tests=("test_memory",))
    assert list(found) == ["bounds"]
    assert "layer 0's qkv_proj.weight and layer 1's qkv_proj.weight was written to" in found["bounds"]
    for subject, said in (
        (ScalesWeights, "written to at construction"),
        (ScalesANormLater, "k_norm.weight was written"),
    ):
        with pytest.raises(AssertionError, match=said):
            contract(subject)().test_calls_any(rest="calls-drawn")


class ClampsInPlace(Eager):
    """Moves what it would be held against with it, in long calls alone."""

    def compute(self, ctx_hidden, positions):
        if len(positions) > 8:
            positions.clamp_(max=3)
        return super().compute(ctx_hidden, positions)


def test_positions_that_are_written_to_are_no_truth(tmp_path):
    assert list(failing(contract(ClampsInPlace), tmp_path)) == ["many-tokens"]
    with pytest.raises(AssertionError, match="positions was written to"):
        contract(ClampsInPlace)().test_calls_any(rest="calls-drawn")


class HandsOverTwice(Eager):
    """In long calls alone."""

    def materialize(self, ctx_hidden, positions, write_layer_kv):
        if len(positions) > 8:
            super().materialize(ctx_hidden, positions, lambda layer, k, v: write_layer_kv(layer, k * 0, v))
        super().materialize(ctx_hidden, positions, write_layer_kv)


def test_a_layer_that_comes_twice_is_found_in_any_call(tmp_path):
    found = failing(contract(HandsOverTwice), tmp_path)
    assert list(found) == ["many-tokens"]
    assert "layer 0 was handed over 2 times" in found["many-tokens"]


class NeedsToGrow(Eager):
    """Asks more of the rotary object than a table that cannot grow has."""

    def compute(self, ctx_hidden, positions):
        self.rotary_emb._ensure_cos_sin_cache_length(0)
        return super().compute(ctx_hidden, positions)


def test_an_error_of_any_kind_is_no_refusal_of_a_position(tmp_path):
    found = failing(contract(NeedsToGrow), tmp_path, tests=("test_out_of_range",))
    assert list(found) == ["negative-position", "position-past-the-table"]
    assert "cannot grow, positions [0, 7, 39] are not served: AttributeError" in found["negative-position"]


def test_what_is_wrong_in_the_caches_alone_is_found(tmp_path):
    found = failing(contract(LayersSwapped), tmp_path)
    assert list(found) == ["caches-by-slot", "caches-by-block"]
    assert "V: " in found["caches-by-slot"]
    found = failing(contract(TouchesANeighbour), tmp_path, tests=("test_caches",))
    assert "slot 11 of layer 1's V cache is no token's, and was written to" in found["caches-by-block"]
    with pytest.raises(AssertionError, match="cache is no token's"):
        contract(MapsByToken)().test_caches_any(rest="caches")


def test_a_subject_that_hands_over_alone_is_not_asked_about_caches():
    with pytest.raises(pytest.skip.Exception, match="has no materialize_into"):
        contract(lambda *_: Silent())().test_caches(layout="slots")


def test_pairs_that_are_turned_as_halves_are_found_by_drawing():
    broken = wrong_where(lambda path, ctx, positions: not path.is_neox_style)
    with pytest.raises(AssertionError, match="K: "):
        contract(broken)().test_serves_any(rest="plain")


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_that_is_not_looked_at_is_found_by_drawing(axis):
    with pytest.raises(AssertionError, match=f"differ in {axis}"):
        contract(blind(axis))().test_rejects_any(axis=axis)


def test_a_fault_of_one_width_is_found_by_drawing():
    broken = wrong_where(lambda path, ctx, positions: path.head_dim == 2)
    with pytest.raises(AssertionError, match="K: "):
        contract(broken)().test_serves_any(rest="plain")


# --- refusals -----------------------------------------------------------------------------------------------------------------------------


def saying(error, text, *, keep_layer=False):
    """Refuses what FusedKV refuses, in other words."""

    def build(*args, **kwargs):
        try:
            return Eager(*args, **kwargs)
        except FusedKVError as fault:
            raised = error(text.format(layer=fault.layer))
            if keep_layer:
                raised.layer = fault.layer
            raise raised from None

    return build


@pytest.mark.parametrize(
    "build",
    [
        saying(ValueError, "bias at layer {layer} is not as that of layer 0"),
        saying(RuntimeError, "layer={layer}: no"),
        saying(AssertionError, "Layer {layer}"),
        saying(ValueError, "no", keep_layer=True),
    ],
    ids=["text", "equals", "capital", "attribute"],
)
def test_a_refusal_names_the_layer_in_its_text_or_as_an_attribute(build):
    for axis in AXES:
        contract(build)().test_rejects(axis=axis)


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (saying(ValueError, "these layers cannot be stacked"), "rejected-unnamed"),
        (saying(ValueError, "layer 2 is odd"), "rejected-unnamed"),
        (saying(AttributeError, "weight"), "crashed"),
    ],
    ids=["none", "another", "crash"],
)
def test_a_refusal_that_does_not_name_it_is_none(build, kind):
    with pytest.raises(AssertionError, match=f"{kind} "):
        contract(build)().test_rejects(axis="bias")


def one_odd(axis, **change):
    odd = PLAIN.changed(**(change or ODD[axis]))
    stack = Stack(configs=[PLAIN, odd, PLAIN], seed=1)
    return BrokenStack(axis=axis, odd_layer=1, layer=1, expected=None, got=None, stack=stack)


class ByLayer:
    """Serves every layer by itself, as layer-by-layer code does."""

    def __init__(self, layers, *args):
        self.layers = layers

    def materialize(self, ctx_hidden, positions, write_layer_kv):
        for index, layer in enumerate(self.layers):
            k, v = eager_kv([layer], ctx_hidden, positions)
            write_layer_kv(index, k[0], v[0])


def test_layers_that_differ_may_be_served_right_where_that_is_said():
    for axis in ("rope-theta", "bias", "norm-kind", "value-scale"):
        assert try_axis(ByLayer, one_odd(axis)).kind == "served-right"
        contract(ByLayer, serves=("rope-theta", "bias", "norm-kind", "value-scale"))().test_rejects(axis=axis)
        with pytest.raises(AssertionError, match="served-right"):
            contract(ByLayer)().test_rejects(axis=axis)


def test_what_is_served_wrong_is_measured():
    outcome = try_axis(ByLayer, one_odd("q-size"))
    assert outcome.kind == "served-wrong"
    assert "K is off by up to" in outcome.detail
    assert try_axis(ByLayer, one_odd("v-head-dim")).detail == "layer 1: V is 16 wide, due is 32"


class HandsOverThenFails(ByLayer):
    def materialize(self, ctx_hidden, positions, write_layer_kv):
        write_layer_kv(0, *(part[0] for part in eager_kv(self.layers[:1], ctx_hidden, positions)))
        raise ValueError("layer 1 is odd")


def test_a_refusal_after_something_was_handed_over_is_none():
    outcome = try_axis(HandsOverThenFails, one_odd("bias"))
    assert outcome.kind == "crashed"
    assert "after layer 0 was handed over" in outcome.detail


# --- rounding -----------------------------------------------------------------------------------------------------------------------------


def test_one_rounding_is_the_float64_reference_rounded():
    stack = Stack(configs=[PLAIN.changed(dtype="bfloat16")] * 2, weights="integers", seed=4)
    ctx, positions = torch.ones(3, 12, dtype=torch.bfloat16), torch.tensor([0, 5, 63])
    k, v = rounded_kv(stack.layers, ctx, positions, "at-the-store")
    due = fused_kv_reference(stack.layers, ctx, positions)
    assert_exact(k, due[0].bfloat16(), what="K")
    assert_exact(v, due[1].bfloat16(), what="V")


def test_roundings_by_hand():
    # One head of two lanes, K = (1, 3): mean square 5, so 1/sqrt(5) = 0.4472…, in bfloat16 0.447265625.
    attn = SimpleNamespace(
        qkv_proj=SimpleNamespace(weight=torch.tensor([[1.0], [3.0], [7.0], [9.0]]).bfloat16(), bias=None),
        q_size=0,
        kv_size=2,
        num_kv_heads=1,
        head_dim=2,
        k_norm=SimpleNamespace(weight=torch.tensor([1.0, 1.0078125]).bfloat16(), variance_epsilon=0.0),
        rotary_emb=SimpleNamespace(cos_sin_cache=torch.tensor([[0.3, 0.9]])),
    )
    layers, ctx, positions = [SimpleNamespace(self_attn=attn)], torch.ones(1, 1).bfloat16(), torch.tensor([0])
    bf16 = lambda x: float(torch.tensor(x, dtype=torch.float64).bfloat16())  # noqa: E731
    cos, sin = (float(x) for x in attn.rotary_emb.cos_sin_cache[0])
    n1, n2 = 1 / 5**0.5, 3 / 5**0.5
    due = {
        "at-the-store": (n1 * cos - n2 * 1.0078125 * sin, n2 * 1.0078125 * cos + n1 * sin),
        "after-the-norm": (
            bf16(n1) * cos - bf16(n2 * 1.0078125) * sin,
            bf16(n2 * 1.0078125) * cos + bf16(n1) * sin,
        ),
    }
    m1, m2, c, s = bf16(n1), bf16(bf16(n2) * 1.0078125), bf16(cos), bf16(sin)
    due["after-each-step"] = (bf16(m1 * c) - bf16(m2 * s), bf16(m2 * c) + bf16(m1 * s))
    for name in ROUNDINGS:
        k, v = rounded_kv(layers, ctx, positions, name)
        assert k.flatten().tolist() == [bf16(x) for x in due[name]], name
        assert v.flatten().tolist() == [7.0, 9.0]


class Rounds:
    """Each order, as a subject."""

    def __init__(self, layers, *args):
        self.layers = layers

    def materialize(self, ctx_hidden, positions, write_layer_kv):
        for index, (k, v) in enumerate(
            zip(*rounded_kv(self.layers, ctx_hidden, positions, self.rounding), strict=True)
        ):
            write_layer_kv(index, k, v)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("stated", ROUNDINGS)
def test_an_order_of_roundings_is_told_from_the_others(rounding, stated):
    subject = contract(type("Subject", (Rounds,), {"rounding": rounding}), rounding=stated)()
    for dtype in ("float16", "bfloat16"):
        if rounding == stated:
            subject.test_rounding(dtype=dtype)
            continue
        with pytest.raises(AssertionError, match=rf"\b0% from {rounding}"):
            subject.test_rounding(dtype=dtype)
