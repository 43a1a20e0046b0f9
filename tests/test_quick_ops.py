"""Operators that are done at once give what Triton's own give.

Failure modes this file exists to catch: a type rule that differs from Triton's (a promotion, a comparison's result, a Python number's
dtype); a broadcast to another shape; an overflow that is passed over; a pointer that forgets where it came from; a patch that stays behind
or that a second kernel does not get.

Each kernel runs twice, with the quick operators and without, and every bit must be the same.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pytest_specdecode import quick_ops
from pytest_specdecode.launch import KernelOverflowError, launch
from pytest_specdecode.memory import KernelMemoryError, guarded
from pytest_specdecode.numerics import assert_exact

KINDS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


@pytest.fixture
def slow(monkeypatch):
    """What an operator of Triton's own gives: the quick ones are not put there, and what was put together before is forgotten."""

    def without(run):
        with monkeypatch.context() as patch:
            patch.setattr(quick_ops, "_quick_methods", lambda *_: [])
            patch.setattr(quick_ops, "_QUICK", {})
            return run()

    return without


@triton.jit
def arithmetic(a, b, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x, y = tl.load(a + row), tl.load(b + column)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = x / y
    elif OP == "and":
        z = x & y
    elif OP == "or":
        z = x | y
    elif OP == "lt":
        z = x < y
    elif OP == "ge":
        z = x >= y
    elif OP == "eq":
        z = x == y
    elif OP == "number":
        z = 3 * x + 1 - 2 * x
    else:
        z = x + tl.load(b)
    tl.store(out + row * COLUMNS + column, z.to(tl.float64) if z.dtype.is_floating() else z.to(tl.int64))


def inputs(left, right):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(1, 9, (count,), generator=generator).to(KINDS[kind]) for count, kind in ((4, left), (8, right))
    ]


NUMBERS = [kind for kind in KINDS if kind != "bool"]
INTEGERS = ["int64", "int32", "int16", "uint8"]


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "and", "or", "lt", "ge", "eq", "number", "scalar"])
@pytest.mark.parametrize("left", KINDS)
def test_every_pair_of_dtypes(left, op, slow):
    for right in KINDS:
        if "bool" in (left, right) and op not in ("and", "or", "eq"):
            continue
        if op in ("and", "or") and not {left, right} <= {*INTEGERS, "bool"}:
            continue
        a, b = inputs(left, right)

        def run(a=a, b=b):
            floating = a.is_floating_point() or (b.is_floating_point() and op != "number")
            compares = op in ("lt", "ge", "eq")
            out = torch.zeros(4, 8, dtype=torch.float64 if (floating or op == "div") and not compares else torch.int64)
            try:
                launch(arithmetic, (1,), a, b, out, ROWS=4, COLUMNS=8, OP=op)
            except Exception as error:  # what Triton refuses is refused in the same words
                return str(error)
            return out

        quick, due = run(), slow(run)
        if isinstance(due, str):
            assert quick == due
        else:
            assert_exact(quick, due, what=f"{left} {op} {right}", bits=True, axes=("row", "column"))


@triton.jit
def pointers(source, out, count, stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    wide = lane.to(tl.int64) * stride
    first = tl.load(source + wide, mask=lane < count, other=-1.0)
    second = tl.load(source + 1 + wide, mask=(lane < count) & (lane >= 1), other=-2.0)
    tl.store(out + lane, first * 10.0 + second, mask=lane < count)


def test_pointers(slow):
    source = torch.arange(12, dtype=torch.float32)

    def run():
        out = torch.zeros(8)
        with guarded() as guard:
            launch(pointers, (1,), source, out, 5, 2, BLOCK=8)
        return out, guard.launches[0].tensors["source"].loaded_bytes

    quick, due = run(), slow(run)
    assert torch.equal(quick[0], due[0])
    assert quick[1] == due[1] == 9 * 4
    with guarded(), pytest.raises(KernelMemoryError, match=r"source\[12\]"):
        launch(pointers, (1,), source, torch.zeros(8), 7, 2, BLOCK=8)


@triton.jit
def overflowing(out, factor, OP: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK) + 2147483640
    if OP == "tensor":
        value = lane + tl.arange(0, BLOCK)
    elif OP == "number":
        value = lane + 100
    elif OP == "reversed":
        value = 100 + lane
    elif OP == "scalar":
        value = lane * factor
    else:
        value = (0 - lane) - lane
    tl.store(out + tl.arange(0, BLOCK), value)


@pytest.mark.parametrize("op", ["tensor", "number", "reversed", "scalar", "negative"])
def test_overflow_is_seen(op, slow):
    def run():
        with pytest.raises(KernelOverflowError) as caught:
            launch(overflowing, (1,), torch.zeros(8, dtype=torch.int32), 3, OP=op, BLOCK=8)
        return caught.value.got

    assert run() == slow(run)


@triton.jit
def ragged(a, out, ROWS: tl.constexpr):
    tl.store(out + tl.arange(0, 8), tl.load(a + tl.arange(0, 8)) + tl.load(a + tl.arange(0, ROWS)))


def test_shapes_that_do_not_fit_are_refused(slow):
    def run():
        with pytest.raises(Exception, match=r"broadcast|compatible"):
            launch(ragged, (1,), torch.zeros(8), torch.zeros(8), ROWS=4)

    run()
    slow(run)


def test_nothing_is_left_behind():
    before = [(owner, name, vars(owner).get(name)) for owner in quick_ops.namespaces() for name in dir(owner)]
    launch(pointers, (1,), torch.arange(12.0), torch.zeros(8), 5, 2, BLOCK=8)
    with pytest.raises(KernelOverflowError):
        launch(overflowing, (1,), torch.zeros(8, dtype=torch.int32), 3, OP="tensor", BLOCK=8)
    for owner, name, value in before:
        if name not in ("__annotations__", "__annotations_cache__"):
            assert vars(owner).get(name) is value, f"{owner}.{name}"
