"""A subject's run under watch: kernels interpreted, memory guarded, what is allocated poisoned; and runs too large to be done whole.

On a GPU kernels are compiled and the guard sees nothing; the poison works there, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_specdecode.launch import interpreted, observed, triton_available
from pytest_specdecode.memory import KernelMemoryError, MemoryGuard, guarded, poison_


@contextlib.contextmanager
def watched() -> Iterator[MemoryGuard]:
    """Inside, kernels are interpreted where their tensors lie on the CPU, each access is held against its tensor's bounds, and memory that
    is allocated holds the poison of `memory` until it is written."""
    with contextlib.ExitStack() as stack:
        if triton_available():
            stack.enter_context(interpreted())
        guard = stack.enter_context(guarded())
        stack.enter_context(_PoisonedAllocations())  # type: ignore[no-untyped-call]
        yield guard


class _PoisonedAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`torch.empty` and its kin give a NaN of our own instead of whatever was there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATORS and result.is_floating_point() and result.device.type != "meta":
            poison_(result)
        return result


_ATEN = torch.ops.aten
_ALLOCATORS = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)


# --- too large to be done whole -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def last_part(programs: int) -> Iterator[None]:
    """Inside, a matrix product of more than 2^27 elements is only computed for its last row, in memory that nobody has touched and which
    therefore takes no room, and an interpreted launch runs only the last `programs` programs of its grid, last one first.

    So a call whose offsets pass 2^31 can be made without the memory and the time that the whole of it takes. Accesses outside a
    tensor raise KernelMemoryError, int32 overflow KernelOverflowError.
    """
    large = _LastRowOnly()  # type: ignore[no-untyped-call]
    with interpreted(), observed(_Bounds()), _last_programs(programs), large:
        yield


class _Bounds:
    """The bounds of `memory.MemoryGuard` alone: that one keeps a record per element."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, Any] = {}
        self._kernel = ""

    def begin(self, kernel: str, tensors: Mapping[str, Any]) -> None:
        self._kernel, self._tensors = kernel, tensors

    def end(self, completed: bool) -> None:
        self._tensors = {}

    def load(self, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any) -> None:
        self._check("load", program, addresses, itemsize, origin)

    def store(self, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any) -> None:
        self._check("store", program, addresses, itemsize, origin)

    def _check(self, kind: str, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any) -> None:
        if addresses.size == 0:
            return
        if hasattr(origin, "shape"):
            for base in {tensor.data_ptr() for tensor in self._tensors.values()}:
                self._check(kind, program, addresses[origin == base], itemsize, base)
            return
        for name, tensor in self._tensors.items():
            low = tensor.data_ptr()
            if origin is not None and origin != low:
                continue
            reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            high = low + (reach + 1) * tensor.element_size()
            if low <= int(addresses.min()) and int(addresses.max()) + itemsize <= high:
                return
            if origin is not None:
                element = (int(addresses.min()) - low) // tensor.element_size()
                raise KernelMemoryError(
                    f"{kind} out of bounds: program {program}, {name}[element {element}] of shape {tuple(tensor.shape)}",
                    kind=kind,
                    tensor=name,
                    kernel=self._kernel,
                    program=program,
                    element=element,
                )


class _Enough(Exception):
    """Ends a launch after the programs that were to run."""


@contextlib.contextmanager
def _last_programs(count: int) -> Iterator[None]:
    import triton.runtime.interpreter as interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    call, set_index = executor.__call__, type(builder).set_grid_idx
    done = 0

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done = 0
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            if not isinstance(error.__cause__, _Enough):
                raise
        return None

    def set_mirrored(self: Any, *index: int) -> None:
        nonlocal done
        done += 1
        if done > count:
            raise _Enough
        set_index(self, *(extent - 1 - at for extent, at in zip(self.grid_dim, index, strict=True)))

    executor.__call__, type(builder).set_grid_idx = run, set_mirrored
    try:
        yield
    finally:
        executor.__call__, type(builder).set_grid_idx = call, set_index


class _LastRowOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Large products in which only what the last row of the first factor gives is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = {_ATEN.mm: 0, _ATEN.addmm: 1, _ATEN.bmm: 0}.get(func.overloadpacket)
        if product is None:
            return func(*args, **kwargs)
        left, right = args[product : product + 2]
        shape = (*left.shape[:-1], right.shape[-1])
        if math.prod(shape) <= 1 << 27:
            return func(*args, **kwargs)
        out: Tensor | None = kwargs.pop("out", None)
        if out is None:
            out = left.new_empty(shape)
        last = func.overloadpacket(*args[:product], left[..., -1:, :], right, *args[product + 2 :], **kwargs)
        out[..., -1:, :] = last
        return out
