"""How kernels are run.

Failure modes this file exists to catch: bfloat16 truncated, or added as raw bits, by Triton's interpreter; a language left patched, so
that nothing compiles any more; an int32 overflow or a failed device_assert that passes in silence; a NumPy gather that differs from the
interpreter's own loop; a scalar condition taken for indices; two threads in one interpreter; a process without triton that cannot even
import.
"""

from __future__ import annotations

import operator
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pytest_specdecode import launch as launching
from pytest_specdecode.errors import DraftError, MissingDependencyError
from pytest_specdecode.launch import (
    KernelOverflowError,
    bf16_bits,
    bf16_values,
    interpreted,
    launch,
    observed,
    triton_available,
    triton_missing,
)
from pytest_specdecode.memory import guarded


@triton.jit
def cast_kernel(source, target, count, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + lane, mask=lane < count, other=0)
    tl.store(target + lane, value.to(target.dtype.element_ty), mask=lane < count)


@triton.jit
def arithmetic_kernel(x, y, out, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mask = lane < count
    a, b = tl.load(x + lane, mask=mask, other=0.0), tl.load(y + lane, mask=mask, other=0.0)
    tl.store(out + lane, a + b, mask=mask)
    tl.store(out + count + lane, a * b, mask=mask)
    tl.store(out + 2 * count + lane, -a, mask=mask)
    tl.store(out + 3 * count + lane, tl.where(a < b, a, b), mask=mask)


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def nested_kernel(source, target, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = tl.load(source + lane, mask=lane < count, other=0.0)
    parts = tl.cdiv(count, 4)
    tl.store(
        target,
        helper(tl.sum(value, axis=0)) + tl.max(value, axis=0) + parts + tl.sum(tl.zeros([4], tl.float32), axis=0),
    )


@triton.jit
def overflow_kernel(target, factor):
    tl.store(target, tl.program_id(0) * 65536 + factor * 65536)


@triton.jit
def assert_kernel(target, limit):
    tl.device_assert(tl.program_id(0) < limit, "program past the limit")
    tl.store(target + tl.program_id(0), 1)


@triton.jit
def gather_kernel(source, index, target, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mask = lane < count
    where = tl.load(index + lane, mask=mask, other=0)
    tl.store(target + where, tl.load(source + where, mask=mask & (where % 3 != 0), other=-1), mask=mask)


@triton.jit
def rsqrt_kernel(source, target, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(target + lane, tl.rsqrt(tl.load(source + lane)))


def cast(source, dtype):
    target = torch.empty(source.shape, dtype=dtype)
    launch(cast_kernel, (triton.cdiv(source.numel(), 1 << 14),), source, target, source.numel(), BLOCK=1 << 14)
    return target


def random_float32_bits():
    """65,536 bit patterns: NaNs of every kind, infinities, both zeros, subnormals, ties, and the rest at random."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (65536,), generator=generator, dtype=torch.int64)
    special = [
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x7F7FFFFF,
        0x7F7F8000,
        0x7F800000,
        0x7F800001,
        0x7F80FFFF,
        0x7FC00000,
        0x7FFFFFFF,
    ]
    ties = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00008000, 0x00018000]
    patterns = torch.tensor(special + ties, dtype=torch.int64)
    bits[: 2 * len(patterns)] = torch.cat([patterns, patterns - 2**31])
    return bits.to(torch.int32).view(torch.float32)


# bfloat16.
def test_float32_to_bfloat16_rounds_as_torch_does():
    source = random_float32_bits()
    got, due = cast(source, torch.bfloat16), source.to(torch.bfloat16)
    nan = source.isnan()
    assert int(nan.sum()) > 100
    # torch itself gives a NaN another payload in its vector code than in its scalar code; that it is a NaN is what counts.
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int16), due[~nan].view(torch.int16))


def test_bfloat16_widens_exactly():
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got, due = cast(bits, torch.float32), bits.to(torch.float32)
    assert torch.equal(got.view(torch.int32), due.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float16], ids=str)
def test_other_types_to_bfloat16_and_back(dtype):
    source = torch.arange(-300, 300, dtype=torch.int32).to(dtype)
    assert torch.equal(cast(source, torch.bfloat16), source.to(torch.bfloat16))
    assert torch.equal(cast(source.to(torch.bfloat16), dtype), source.to(torch.bfloat16).to(dtype))


def test_bfloat16_arithmetic_is_arithmetic():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(100, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(400, dtype=torch.bfloat16)
    launch(arithmetic_kernel, (1,), x, y, out, 100, BLOCK=128)
    assert torch.equal(out, torch.cat([x + y, x * y, -x, torch.minimum(x, y)]))


def test_the_bits_by_hand():
    values = np.array([1.0, 1.00390625, 1.01171875, np.inf, -0.0, 3.4e38], dtype=np.float32)
    # 1.00390625 lies halfway between 0x3F80 and 0x3F81 and goes to the even one, 1.01171875 between 0x3F81 and 0x3F82 likewise.
    assert [hex(bits) for bits in bf16_bits(values)] == ["0x3f80", "0x3f80", "0x3f82", "0x7f80", "0x8000", "0x7f80"]
    assert bf16_values(np.array([0x3F80, 0xC040], dtype=np.uint16)).tolist() == [1.0, -3.0]


# What an interpreted launch does and leaves behind.
def test_device_functions_and_reductions_run():
    source, target = torch.arange(6.0), torch.zeros(1)
    launch(nested_kernel, (1,), source, target, 6, BLOCK=8)
    assert target.item() == (15 + 1) + 5 + 2


def test_compile_options_are_passed_over():
    target = torch.zeros(4)
    launch(cast_kernel, (1,), torch.ones(4), target, 4, BLOCK=4, num_warps=8, num_stages=2)
    assert target.tolist() == [1.0] * 4


def test_a_grid_may_be_a_function():
    target = torch.zeros(10)
    launch(cast_kernel, lambda meta: (triton.cdiv(10, 4),), torch.ones(10), target, 10, BLOCK=4)
    assert target.tolist() == [1.0] * 10


def test_heuristics_around_a_kernel_are_looked_through():
    wrapped = triton.heuristics({"BLOCK": lambda args: 16})(cast_kernel)
    target = torch.zeros(4)
    launch(wrapped, (1,), torch.ones(4), target, 4, BLOCK=16)
    assert target.tolist() == [1.0] * 4


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match=r"triton\.jit"):
        launch(len, (1,), torch.ones(1))


def test_the_language_is_left_as_it_was():
    before = {name: dict(vars(space)) for name, space in NAMESPACES.items()}
    launch(nested_kernel, (1,), torch.arange(6.0), torch.zeros(1), 6, BLOCK=8)
    with pytest.raises(KernelOverflowError):
        launch(overflow_kernel, (1,), torch.zeros(1, dtype=torch.int32), 2**20)
    for name, space in NAMESPACES.items():
        assert {key: value for key, value in vars(space).items() if before[name].get(key) is not value} == {}
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        helper(1)


NAMESPACES = {"tl": tl, "core": tl.core, "math": tl.math, "tensor": tl.core.tensor, "dtype": tl.core.dtype}


def test_square_roots_of_zero_do_not_warn():
    target = torch.empty(2)
    launch(rsqrt_kernel, (1,), torch.tensor([0.0, -1.0]), target, BLOCK=2)
    assert target[0] == float("inf")
    assert target[1].isnan()


def test_int32_overflow_is_an_error():
    with pytest.raises(
        KernelOverflowError, match=r"int32 overflow detected for operation mul in program \(0, 0, 0\)"
    ) as caught:
        launch(overflow_kernel, (1,), torch.zeros(1, dtype=torch.int32), 2**20)
    assert caught.value.got == 2**36
    target = torch.zeros(1, dtype=torch.int32)
    launch(overflow_kernel, (1,), target, 2**14)
    assert target.item() == 2**30


def test_overflow_of_a_sum_is_an_error_at_the_exact_bound():
    # 32767 * 65536 still fits; program 1 adds 65536 to it and does not.
    launch(overflow_kernel, (1,), torch.zeros(1, dtype=torch.int32), 2**15 - 1)
    with pytest.raises(KernelOverflowError, match=r"operation add in program \(1, 0, 0\)"):
        launch(overflow_kernel, (2,), torch.zeros(1, dtype=torch.int32), 2**15 - 1)


def test_device_asserts_count():
    with pytest.raises(Exception, match="program past the limit"):
        launch(assert_kernel, (3,), torch.zeros(3, dtype=torch.int32), 2)


@pytest.mark.parametrize("count", [5, 63, 64, 1000])
def test_few_lanes_and_many_lanes_load_and_store_alike(count):
    generator = torch.Generator().manual_seed(count)
    index = torch.randperm(count, generator=generator)
    source = torch.randn(count, generator=generator)
    target = torch.zeros(count)
    launch(gather_kernel, (1,), source, index, target, count, BLOCK=1024)
    assert torch.equal(target, torch.where(torch.arange(count) % 3 == 0, -1.0, source))


@triton.jit
def condition_kernel(source, scalar, target, count, BLOCK: tl.constexpr, HOW: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    condition = tl.load(scalar) > 3
    if HOW == "alone":
        mask = condition
    elif HOW == "not":
        mask = (lane < count) & ~(condition & (lane >= 0))
    elif HOW == "not splatted":
        mask = (lane < count) & ~tl.broadcast_to(condition, [BLOCK])
    else:
        mask = condition & (lane < count)
    tl.store(target + lane, tl.load(source + lane, mask=mask, other=-1.0), mask=mask)


@pytest.mark.parametrize("how", ["alone", "and", "not", "not splatted"])
@pytest.mark.parametrize("block", [8, 128], ids=["few lanes", "many lanes"])
@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float64], ids=str
)
def test_a_scalar_condition_is_a_mask(dtype, block, how):
    source, count = torch.arange(block) + 1.0, block - 3
    for number in (7, 1):
        target = torch.zeros(block)
        with guarded():
            launch(
                condition_kernel, (1,), source, torch.tensor([number]).to(dtype), target, count, BLOCK=block, HOW=how
            )
        holds = (number > 3) != how.startswith("not")
        due = source * holds
        if how != "alone":
            due[count:] = 0.0
        assert torch.equal(target, due), f"{number} > 3"


# Observers.
class Record:
    def __init__(self, raising=None):
        self.events, self.raising = [], raising

    def begin(self, kernel, tensors):
        self.events.append(("begin", kernel, sorted(tensors)))
        self.bases = {tensor.data_ptr(): name for name, tensor in tensors.items()}

    def load(self, program, addresses, itemsize, origin):
        self.events.append(("load", program, addresses.size, itemsize, self.bases.get(origin)))
        if self.raising:
            raise self.raising

    def store(self, program, addresses, itemsize, origin):
        self.events.append(("store", program, addresses.size, itemsize, self.bases.get(origin)))

    def end(self, completed):
        self.events.append(("end", completed))


def test_observers_see_every_access_of_active_lanes():
    record = Record()
    source, target = torch.ones(10), torch.zeros(10, dtype=torch.float16)
    with observed(record):
        launch(cast_kernel, (2,), source, target, 10, BLOCK=8)
    launch(cast_kernel, (1,), source, target, 10, BLOCK=16)
    assert record.events == [
        ("begin", "cast_kernel", ["source", "target"]),
        ("load", (0, 0, 0), 8, 4, "source"),
        ("store", (0, 0, 0), 8, 2, "target"),
        ("load", (1, 0, 0), 2, 4, "source"),
        ("store", (1, 0, 0), 2, 2, "target"),
        ("end", True),
    ]


def test_what_an_observer_raises_comes_out_as_it_is_and_nothing_is_written():
    record, target = Record(raising=DraftError("not this")), torch.zeros(4)
    with observed(record), pytest.raises(DraftError, match="not this"):
        launch(cast_kernel, (1,), torch.ones(4), target, 4, BLOCK=4)
    assert record.events[-1] == ("end", False)
    assert target.tolist() == [0.0] * 4


# Other people's kernels, threads, processes.
def test_kernels_launched_by_others_are_interpreted_inside_the_context():
    target = torch.zeros(4)
    with interpreted():
        cast_kernel[(1,)](torch.ones(4), target, 4, BLOCK=4)
    assert target.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="active drivers"):
        cast_kernel[(1,)](torch.ones(4), target, 4, BLOCK=4)


def test_threads_take_turns():
    targets = [torch.zeros(1) for _ in range(6)]

    def run(index):
        launch(nested_kernel, (1,), torch.full((6,), float(index)), targets[index], 6, BLOCK=8)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(6)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert [target.item() for target in targets] == [7.0 * index + 3 for index in range(6)]


def test_a_kernel_compiles_after_it_was_interpreted():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch(nested_kernel, (1,), torch.arange(6.0), torch.zeros(1), 6, BLOCK=8)
    signature = {"source": "*fp32", "target": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(nested_kernel, signature, {"BLOCK": 8})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert "nested_kernel" in compiled.asm["ptx"]
    target = torch.zeros(1)
    launch(nested_kernel, (1,), torch.arange(6.0), target, 6, BLOCK=8)
    assert target.item() == 23


def test_it_runs_where_the_user_has_set_the_interpreter():
    code = (
        "import torch, triton, triton.language as tl\n"
        "from pytest_specdecode.fused_kv import fused_norm_rope\n"
        "from pytest_specdecode.memory import guarded\n"
        "kv = torch.randn(3, 2, 64).bfloat16()\n"
        "with guarded(filled=('k_out', 'v_out')) as guard:\n"
        "    k, v = fused_norm_rope(kv, torch.zeros(3, dtype=torch.long), torch.ones(2, 16), torch.zeros(2), "
        "torch.ones(1, 16), num_kv_heads=2, head_dim=16, rotary_dim=16)\n"
        "assert len(guard.launches) == 1\n"
        "assert torch.equal(v, kv.view(3, 2, 2, 2, 16)[:, :, 1].transpose(0, 1))\n"
    )
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_a_missing_triton_is_a_reason_and_not_a_crash(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_missing.cache_clear()
    try:
        assert not triton_available()
        assert "triton is not installed" in triton_missing()
        assert launching.jit(operator.add) is operator.add
        with pytest.raises(MissingDependencyError, match="eager path"):
            launch(cast_kernel, (1,), torch.ones(1))
        with pytest.raises(ImportError), interpreted():
            pass
    finally:
        triton_missing.cache_clear()
