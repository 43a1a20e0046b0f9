"""What the guard and the bands catch, each shown by a kernel that does the wrong thing.

Failure modes this file exists to catch: a read or write past a tensor that is not noticed, or blamed on another tensor, program or
element; masked lanes blamed; gaps of strided tensors taken for the tensor; outputs half written; two programs on one element; counts
that are not what was moved; bands that do not see damage, or see it where there is none; a NaN that was computed taken for poison.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pytest_specdecode.launch import launch
from pytest_specdecode.memory import KernelMemoryError, banded, banded_copy, guarded, poison_, still_poison


@triton.jit
def copy_kernel(source, target, count, shift, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < count
    tl.store(target + lane, tl.load(source + shift + lane, mask=mask, other=0.0), mask=mask)


@triton.jit
def rows_kernel(source, target, rows, stride, target_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    mask = row < rows
    tl.store(
        target + row * target_stride + lane, tl.load(source + row * stride + lane, mask=mask, other=0.0), mask=mask
    )


@triton.jit
def shift_store_kernel(target, shift, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + shift + lane, lane.to(tl.float32))


@triton.jit
def same_element_kernel(target, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK) // 2, tl.zeros([BLOCK], tl.float32))


@triton.jit
def everyone_to_zero_kernel(target):
    tl.store(target, 1.0)


@triton.jit
def read_neighbour_kernel(target):
    program = tl.program_id(0)
    tl.store(target + program, 1.0)
    tl.store(target + program, tl.load(target + (program + 1) % 2))


@triton.jit
def rewrite_own_kernel(target, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lane, tl.zeros([BLOCK], tl.float32))
    tl.store(target + lane, tl.load(target + lane) + 1)


@triton.jit
def laundered_pointer_kernel(source, target, bytes_ahead):
    address = source.to(tl.int64) + bytes_ahead
    tl.store(target, tl.load(address.to(tl.pointer_type(tl.float32))))


def refused(kernel, grid, *args, **kwargs):
    with guarded(), pytest.raises(KernelMemoryError) as caught:
        launch(kernel, grid, *args, **kwargs)
    return caught.value


# Bounds.
def test_a_read_past_the_end_names_kernel_program_tensor_and_element():
    fault = refused(copy_kernel, (2,), torch.ones(2, 5), torch.zeros(10), 10, 3, BLOCK=8)
    assert str(fault) == (
        "copy_kernel: load of 4 bytes out of bounds: program (0, 0, 0), 1 of 8 lanes, first at source[2, 0] (element 10) of shape (2, 5)"
    )
    assert (fault.kind, fault.kernel, fault.program, fault.tensor, fault.element) == (
        "load",
        "copy_kernel",
        (0, 0, 0),
        "source",
        10,
    )


def test_a_read_before_the_start():
    fault = refused(copy_kernel, (1,), torch.ones(8)[4:], torch.zeros(4), 4, -1, BLOCK=4)
    assert (fault.tensor, fault.element) == ("source", -1)


def test_a_write_past_the_end():
    fault = refused(shift_store_kernel, (2,), torch.zeros(16), 1, BLOCK=8)
    assert (fault.kind, fault.tensor, fault.element, fault.program) == ("store", "target", 16, (1, 0, 0))


def test_nothing_is_written_where_a_write_is_refused():
    whole = torch.zeros(16)
    refused(shift_store_kernel, (1,), whole[:8], 4, BLOCK=8)
    assert whole.tolist() == [0.0] * 16


def test_a_neighbour_in_the_same_storage_is_out_of_bounds():
    # Both halves are arguments, so the address is somebody's; the pointer still came from the first.
    whole = torch.arange(16.0)
    fault = refused(copy_kernel, (1,), whole[:8], whole[8:], 8, 4, BLOCK=8)
    assert (fault.tensor, fault.element) == ("source", 8)


def test_masked_lanes_may_point_anywhere():
    target = torch.zeros(5)
    with guarded(filled=("target",)):
        launch(copy_kernel, (1,), torch.ones(5), target, 5, 0, BLOCK=1024)
    assert target.tolist() == [1.0] * 5


def test_the_gaps_of_a_strided_tensor_are_not_the_tensor():
    wide = torch.arange(24.0).view(3, 8)
    target = torch.zeros(12)
    with guarded(filled=("target",)):
        launch(rows_kernel, (1,), wide[:, :4], target, 3, 8, 4, WIDTH=4, BLOCK=4)
    assert torch.equal(target.view(3, 4), wide[:, :4])
    fault = refused(rows_kernel, (1,), wide[:, :3], target, 3, 8, 4, WIDTH=4, BLOCK=4)
    assert (fault.tensor, fault.element) == ("source", 3)


def test_a_pointer_made_of_an_integer_is_held_against_all_arguments():
    source, target = torch.arange(4.0), torch.zeros(1)
    with guarded():
        launch(laundered_pointer_kernel, (1,), source, target, 8)
    assert target.item() == 2.0
    fault = refused(laundered_pointer_kernel, (1,), source, target, 1 << 40)
    assert fault.kind == "load"


@triton.jit
def scatter_by_address_kernel(addresses, target, count, offset, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)[:, None]
    base = tl.load(addresses + tl.arange(0, BLOCK)).to(tl.pointer_type(tl.float32))[:, None]
    lane = tl.arange(0, 4)[None, :]
    tl.store(base + (row * 0 + offset) + lane, 1.0 + row + lane * 0, mask=lane < count)
    tl.store(
        target, tl.sum(tl.sum(tl.load(tl.trans(base) + tl.arange(0, 4)[:, None], mask=tl.trans(lane < count)), 0), 0)
    )


def test_pointers_loaded_from_a_table_of_addresses_are_each_held_against_their_own_tensor():
    # Both lie in one storage, the second behind the first, so that what runs over the first is somebody's address all the same.
    whole = torch.zeros(8)
    parts = {"first": whole[:4], "second": whole[4:]}
    addresses = torch.tensor([part.data_ptr() for part in parts.values()])

    def run(count, offset):
        launch(scatter_by_address_kernel, (1,), addresses, torch.zeros(1), count, offset, BLOCK=2, reached=parts)

    with guarded() as guard:
        run(4, 0)
    assert whole.tolist() == [1.0] * 4 + [2.0] * 4
    assert [guard.launches[0].tensors[name].stored_bytes for name in parts] == [16, 16]
    with guarded(), pytest.raises(KernelMemoryError, match=r"first\[4\]") as caught:
        run(1, 4)
    assert (caught.value.kind, caught.value.tensor, caught.value.element) == ("store", "first", 4)


def test_an_empty_tensor_has_no_element():
    fault = refused(copy_kernel, (1,), torch.empty(0), torch.zeros(4), 4, 0, BLOCK=4)
    assert fault.tensor == "source"


# Writers.
def test_two_programs_that_write_one_element():
    fault = refused(everyone_to_zero_kernel, (3,), torch.zeros(1))
    assert fault.kind == "race"
    assert str(fault).startswith("everyone_to_zero_kernel: programs (0, 0, 0) and (1, 0, 0) both write target[0]")


def test_two_lanes_of_one_store_that_write_one_element():
    fault = refused(same_element_kernel, (1,), torch.zeros(8), BLOCK=8)
    assert "two lanes of one store both write target[0]" in str(fault)


def test_a_program_that_reads_what_another_wrote():
    fault = refused(read_neighbour_kernel, (2,), torch.zeros(2))
    assert fault.kind == "race"
    assert "program (1, 0, 0) reads target[0]" in str(fault)


def test_a_program_may_read_and_rewrite_its_own():
    target = torch.zeros(16)
    with guarded(filled=("target",)):
        launch(rewrite_own_kernel, (2,), target, BLOCK=8)
    assert target.tolist() == [1.0] * 16


def test_an_output_left_unwritten():
    with guarded(filled=("target",)), pytest.raises(KernelMemoryError) as caught:
        launch(copy_kernel, (1,), torch.ones(12), torch.zeros(12), 12, 0, BLOCK=8)
    assert "4 of 12 elements were never written, the first target[8]" in str(caught.value)
    assert (caught.value.kind, caught.value.element) == ("unwritten", 8)


def test_an_output_never_stored_to_is_unwritten():
    with guarded(filled=("source",)), pytest.raises(KernelMemoryError, match="12 of 12 elements"):
        launch(copy_kernel, (1,), torch.ones(12), torch.zeros(12), 12, 0, BLOCK=16)


def test_elements_between_rows_need_not_be_written():
    wide = torch.zeros(3, 8)
    with guarded(filled=("target",)) as guard:
        launch(rows_kernel, (1,), torch.ones(12), wide[:, :4], 3, 4, 8, WIDTH=4, BLOCK=4)
    target = guard.launches[0].tensors["target"]
    assert (target.written, target.elements) == (12, 12)
    with (
        guarded(filled=("target",)),
        pytest.raises(KernelMemoryError, match=r"4 of 12 elements .* first target\[2, 0\]"),
    ):
        launch(rows_kernel, (1,), torch.ones(12), wide[:, :4], 2, 4, 8, WIDTH=4, BLOCK=4)


# Counts.
def test_traffic_is_counted_by_hand():
    with guarded() as guard:
        launch(copy_kernel, (2,), torch.ones(12, dtype=torch.float16), torch.zeros(10), 10, 0, BLOCK=8)
        launch(rows_kernel, (1,), torch.ones(4), torch.zeros(8), 2, 0, 4, WIDTH=4, BLOCK=2)
    first, second = guard.launches
    assert (first.kernel, first.loads, first.stores) == ("copy_kernel", 2, 2)
    assert (first.tensors["source"].loaded_bytes, first.tensors["target"].stored_bytes) == (20, 40)
    # A stride of 0 reads the same row twice.
    assert (second.tensors["source"].loaded_bytes, second.tensors["source"].unique_loaded_bytes) == (32, 16)
    assert (second.requested_bytes, second.unique_bytes) == (64, 48)


def test_a_refused_launch_is_not_counted_and_the_next_one_starts_afresh():
    with guarded() as guard:
        with pytest.raises(KernelMemoryError):
            launch(everyone_to_zero_kernel, (2,), torch.zeros(1))
        launch(everyone_to_zero_kernel, (1,), torch.zeros(1))
    assert [launch.stores for launch in guard.launches] == [1]


def test_outside_nothing_is_watched():
    target = torch.zeros(1)
    launch(everyone_to_zero_kernel, (3,), target)
    assert target.item() == 1.0


# Bands.
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 1, 3), (0, 4)])
def test_a_banded_tensor_is_poisoned_inside_and_intact_outside(shape, gap, dtype):
    bands = banded(shape, dtype, gap=gap)
    assert (tuple(bands.tensor.shape), bands.tensor.dtype) == (shape, dtype)
    assert bands.tensor.data_ptr() % 16 == 0
    assert bool(bands.unwritten().all())
    if dtype.is_floating_point:
        assert bool(bands.tensor.isnan().all())
    bands.assert_intact()
    bands.tensor.fill_(1)
    bands.assert_filled()


@pytest.mark.parametrize("offset", [-1, 12, 3])
def test_damage_before_after_and_between_is_found(offset):
    bands = banded((3, 4), torch.float32, name="out", gap=0 if offset != 3 else 1)
    base = bands.tensor.storage_offset()
    whole = bands.tensor.as_strided((40,), (1,), base - 10)
    whole[10 + (offset if offset != 3 else 4)] = 0.0
    with pytest.raises(KernelMemoryError, match="4 bytes outside the tensor were overwritten") as caught:
        bands.assert_intact()
    assert (caught.value.tensor, caught.value.element) == ("out", offset if offset != 3 else 4)


def test_a_hole_in_the_payload_is_found():
    bands = banded((3, 4), torch.bfloat16, name="out")
    bands.tensor[:2] = 0
    bands.tensor[2, :3] = float("nan")
    with pytest.raises(KernelMemoryError, match=r"out: 1 of 12 elements were never written, the first \[2, 3\]"):
        bands.assert_filled()


def test_a_banded_copy_holds_the_values():
    values = torch.arange(12.0).view(3, 4)
    bands = banded_copy(values, gap=2)
    assert torch.equal(bands.tensor, values)
    assert bands.tensor.stride() == (6, 1)
    bands.assert_intact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_no_computed_nan_looks_like_poison(dtype):
    zero = torch.zeros(64)
    computed = [
        (zero / zero).to(dtype),
        (zero.double() / 0).sqrt().neg().to(dtype),
        torch.full((64,), float("nan"), dtype=dtype),
    ]
    assert not any(bool(still_poison(nan).any()) for nan in computed)


def test_poison_fills_any_tensor_in_place():
    whole = torch.zeros(4, 6)
    poison_(whole[:, ::2])
    assert still_poison(whole).tolist() == [[True, False] * 3] * 4
    assert poison_(torch.empty(0)).numel() == 0
