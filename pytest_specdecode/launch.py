"""One way to run a Triton kernel: interpreted where its tensors lie on the CPU, compiled where they lie on a GPU.

Triton decides between the two by an environment variable that is read while kernels are decorated, so a process can do only one of
them. Here the tensors decide, launch by launch, and the same process may do both. An interpreted launch also

- rounds to bfloat16 as the hardware and torch do (Triton's interpreter truncates, and does bfloat16 arithmetic on the raw bits),
- takes a scalar condition for a condition (Triton's splats it in the dtype of what was compared),
- reports int32 overflow and failed `device_assert`s, which a compiled kernel passes over,
- tells observers (`pytest_specdecode.memory`) of every load and store,
- and runs under a lock, because Triton's interpreter patches its own language while it runs.

Triton is imported when it is first needed; where it is missing (macOS, Windows) everything here still imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from pytest_specdecode import quick_ops
from pytest_specdecode.errors import DraftError, MissingDependencyError

Grid = tuple[int, ...] | Callable[[Mapping[str, Any]], tuple[int, ...]]


class KernelOverflowError(DraftError, OverflowError):
    """An integer of 32 bits or fewer overflowed inside an interpreted kernel."""


class LaunchObserver(Protocol):
    """What wants to see an interpreted launch from inside; see `observed`.

    Addresses are a flat uint64 NumPy array, one per active lane: lanes that a mask switches off touch nothing and are not told.
    `origin` is the address of the tensor that the pointers were computed from: an argument's, or, where pointers were loaded from memory,
    whatever each began as. It is one number, or an array with one for each active lane. None where it is not known. An exception raised
    here ends the launch before the access happens.
    """

    def begin(self, kernel: str, tensors: Mapping[str, Any]) -> None:
        """A launch of `kernel` starts; `tensors` maps argument names to CPU tensors."""

    def load(self, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any) -> None:
        """`program` is about to read `itemsize` bytes at each address."""

    def store(self, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any) -> None:
        """`program` is about to write `itemsize` bytes at each address."""

    def end(self, completed: bool) -> None:
        """The launch is over; `completed` is False where it raised."""


def launch(kernel: Any, grid: Grid, *args: Any, reached: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """Run `kernel` over `grid`: interpreted if its tensors lie on the CPU, else compiled.

    Args:
        kernel: a function decorated with `triton.jit` (or with `jit` below), with or without heuristics around it.
        grid: up to three extents, or a function of the arguments that returns them.
        args, kwargs: the kernel's arguments; compile options such as `num_warps` are ignored by an interpreted launch.
        reached: tensors that are no arguments and that the kernel finds by an address it loads, by the name a message is to give them.

    Returns:
        What Triton returns for a compiled launch; None for an interpreted one.

    Raises:
        MissingDependencyError: triton (or numpy, which its interpreter needs) is not installed.
        KernelOverflowError: int32 arithmetic overflowed (interpreted only).
        DraftError: what an observer raised, as it raised it.
    """
    _require_triton()
    if _on_accelerator(args) or _on_accelerator(kwargs.values()):
        # The first launch compiles, which it cannot while another thread interprets.
        with _LOCK:
            return kernel[grid](*args, **kwargs)
    return _interpret(kernel, grid, args, kwargs, reached or {})


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or where triton is missing a stand-in whose launch raises MissingDependencyError."""
    if triton_missing() is not None:
        return function
    import triton

    return triton.jit(function)


def triton_available() -> bool:
    """Whether a kernel can be run here."""
    return triton_missing() is None


@functools.cache
def triton_missing() -> str | None:
    """Why no kernel can be run here, or None where one can."""
    for name in ("triton", "numpy"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} is not installed ({error})"
    return None


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, `kernel[grid](...)` on CPU tensors is interpreted too, whoever calls it and wherever it was defined.

    For engines' own helpers, which launch their kernels themselves. Nothing else is changed, and launches on a GPU stay compiled.
    """
    _require_triton()
    from triton.runtime.jit import JITFunction

    with _LOCK:
        run = JITFunction.run

        def run_by_device(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if warmup or _on_accelerator(args) or _on_accelerator(kwargs.values()):
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            return _interpret(self, grid, args, kwargs, {})

        JITFunction.run = run_by_device
        try:
            yield
        finally:
            JITFunction.run = run


@contextlib.contextmanager
def observed(observer: LaunchObserver) -> Iterator[None]:
    """Inside, `observer` is told of every interpreted launch of this thread (or task), innermost observer last."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


_LOCK = threading.RLock()
_observers: ContextVar[tuple[LaunchObserver, ...]] = ContextVar("specdecode_launch_observers", default=())


def _require_triton() -> None:
    reason = triton_missing()
    if reason is not None:
        raise MissingDependencyError(
            f"a Triton kernel cannot be run: {reason}; install it where a wheel exists (Linux), or use the eager path"
        )


def _on_accelerator(values: Any) -> bool:
    return any(getattr(getattr(value, "device", None), "type", "cpu") not in ("cpu", "meta") for value in values)


def _interpret(
    kernel: Any, grid: Grid, args: tuple[Any, ...], kwargs: dict[str, Any], reached: Mapping[str, Any]
) -> None:
    import numpy as np
    from triton.runtime.errors import InterpreterError

    function = _interpretable(kernel)
    observers = _observers.get()
    with _LOCK, _patched(observers), np.errstate(all="ignore"):
        tensors = {**_tensor_arguments(function, args, kwargs), **reached} if observers else {}
        for observer in observers:
            observer.begin(function.fn.__name__, tensors)
        completed = False
        try:
            function[grid](*args, **kwargs)
            completed = True
        except InterpreterError as error:
            for cause in _causes(error):
                if isinstance(cause, DraftError):
                    raise cause from None
            raise
        finally:
            for observer in reversed(observers):
                observer.end(completed)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _interpretable(kernel: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    inner = kernel
    while not isinstance(inner, (JITFunction, InterpretedFunction)):
        if not hasattr(inner, "fn"):
            raise TypeError(f"launch() takes a function decorated with triton.jit; got {kernel!r}")
        inner = inner.fn
    # Keyed by the Python function: a JITFunction's hash reads triton.language, which is patched while a kernel is interpreted.
    return inner if isinstance(inner, InterpretedFunction) else _interpreted_function(inner.fn)


@functools.cache
def _interpreted_function(function: Callable[..., Any]) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function)


def _tensor_arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    named = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if hasattr(value, "data_ptr")}


# --- what is patched while a kernel is interpreted -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _patched(observers: tuple[LaunchObserver, ...]) -> Iterator[None]:
    """Triton's interpreter repaired and observed, everything put back on the way out.

    Interpreting leaves `triton.language` patched when a kernel calls other jit functions (`tl.sum`, `tl.cdiv`), and a patched language
    can no longer be compiled; hence the snapshot.
    """
    import triton.runtime.interpreter as interpreter
    from triton.runtime.jit import JITFunction

    builder = interpreter.interpreter_builder
    with contextlib.ExitStack() as stack:
        patch = quick_ops.LanguagePatch(interpreter._patch_lang, _check_integers)
        stack.callback(patch.undo)
        _replace(stack, interpreter, "_patch_lang", patch)
        _replace(stack, interpreter, "_get_np_dtype", quick_ops.quick_np_dtype(interpreter._get_np_dtype))
        _replace(stack, JITFunction, "__call__", _nested_call(patch))
        _replace(stack, builder, "options", dataclasses.replace(builder.options, debug=True))
        for name, method in _repairs().items():
            _replace(stack, interpreter.InterpreterBuilder, name, method)
        _replace(stack, *_overflow_check())
        for name, method in _memory_methods(observers).items():
            _replace(stack, interpreter.InterpreterBuilder, name, method)
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    stack.callback(delattr, owner, name) if original is _ABSENT else stack.callback(setattr, owner, name, original)


_ABSENT = object()


def _nested_call(patch: Callable[[Any], Any]) -> Callable[..., Any]:
    """How a jit function calls another one while both are interpreted."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch(self.fn)
        return _interpreted_function(self.fn).rewrite()(*args, **kwargs)

    return call


def _overflow_check() -> tuple[Any, str, Callable[..., None]]:
    """Where Triton keeps its overflow check, its name there, and ours in its place."""
    import triton.language.semantic as semantic

    name = "binary_op_sanitize_overflow_impl"
    if hasattr(semantic, name):  # a function of the module up to triton 3.3

        def check_function(lhs: Any, rhs: Any, builder: Any, binary_op: Any) -> None:
            _check_overflow(builder, lhs, rhs, binary_op)

        return semantic, name, check_function

    def check_method(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        _check_overflow(self.builder, lhs, rhs, binary_op)

    return semantic.TritonSemantic, name, check_method


def _check_overflow(builder: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """Triton's overflow check, done on NumPy arrays: its own takes ten more interpreted operations for every int32 one."""
    scalar = lhs.type.scalar
    if scalar.int_bitwidth < 64 and builder.options.sanitize_overflow and binary_op.__name__ in _OPERATIONS:
        low, high = scalar.get_int_min_value(), scalar.get_int_max_value()
        _check_range(lhs.handle.data, rhs.handle.data, binary_op.__name__, low, high, scalar.int_bitwidth)


def _check_integers(lhs: Any, rhs: Any, operation: str) -> None:
    """The same for two arrays of int32."""
    _check_range(lhs, rhs, operation, -(2**31), 2**31 - 1, 32)


#: NumPy's function by Triton's name for it.
_OPERATIONS = {"add": "add", "sub": "subtract", "mul": "multiply"}


def _check_range(lhs: Any, rhs: Any, name: str, low: int, high: int, width: int) -> None:
    import numpy as np
    import triton.runtime.interpreter as interpreter

    operation = getattr(np, _OPERATIONS[name])
    reach = operation.outer(_extremes(lhs), _extremes(rhs))
    if reach.min() >= low and reach.max() <= high:
        return
    exact = operation(lhs.astype(np.int64), rhs.astype(np.int64))
    worst = int(exact.max()) if exact.max() > high else int(exact.min())
    if low <= worst <= high:
        return
    raise KernelOverflowError(
        f"int{width} overflow detected for operation {name} in program {tuple(interpreter.interpreter_builder.grid_idx)}: "
        f"the result reaches {worst}; make one operand int64 first",
        got=worst,
        due=(low, high),
    )


def _extremes(data: Any) -> Any:
    import numpy as np

    return np.array([data.min(), data.max()], dtype=np.int64)


# --- bfloat16 --------------------------------------------------------------------------------------------------------------------------


def bf16_bits(values: Any) -> Any:
    """The bfloat16 nearest to each float32 of a NumPy array, ties to even, as uint16; NaNs stay NaN, quiet, with their sign."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = ((bits + (np.uint32(0x7FFF) + (high & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded[is_nan] = (high[is_nan] | np.uint32(0x40)).astype(np.uint16)
    return rounded


def bf16_values(bits: Any) -> Any:
    """The float32 value of each bfloat16 given as uint16."""
    import numpy as np

    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@functools.cache
def _repairs() -> dict[str, Callable[..., Any]]:
    """Methods of the interpreter's builder that get bfloat16 and conditions right, and leave everything else to the original."""
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original = interpreter.InterpreterBuilder
    cast_impl, create_fp_to_fp = original.cast_impl, original.create_fp_to_fp
    binary_op, unary_op = original.binary_op, original.unary_op
    handle_of, np_dtype_of = interpreter.TensorHandle, interpreter._get_np_dtype
    bf16, wide = tl.bfloat16, (tl.float16, tl.bfloat16, tl.float32, tl.float64)

    def cast(self: Any, source: Any, dst_type: Any) -> Any:
        due = dst_type.scalar
        if source.dtype.scalar == bf16:
            return source if due == bf16 else handle_of(bf16_values(source.data).astype(np_dtype_of(due)), due)
        if due == bf16:
            return handle_of(bf16_bits(source.data.astype(np.float32)), due)
        return cast_impl(self, source, dst_type)

    def fp_to_fp(self: Any, source: Any, dst_type: Any, *rest: Any) -> Any:
        kinds = (source.dtype.scalar, dst_type.scalar)
        if bf16 in kinds and all(kind in wide for kind in kinds):
            return cast(self, source, dst_type)
        return create_fp_to_fp(self, source, dst_type, *rest)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != bf16 or rhs.dtype.scalar != bf16:
            result = binary_op(self, lhs, rhs, op)
            # Triton keeps the operands' dtype, and a scalar condition is later splatted as that: as 1.0, or as 1, of which ~ is true.
            return handle_of(result.data, tl.int1) if result.data.dtype == np.bool_ else result
        result = op(bf16_values(lhs.data), bf16_values(rhs.data))
        return handle_of(result, tl.int1) if result.dtype == np.bool_ else handle_of(bf16_bits(result), bf16)

    def unary(self: Any, source: Any, op: Any) -> Any:
        if source.dtype.scalar != bf16:
            return unary_op(self, source, op)
        return handle_of(bf16_bits(op(bf16_values(source.data))), bf16)

    found: dict[str, Callable[..., Any]] = {
        "cast_impl": cast,
        "create_fp_to_fp": fp_to_fp,
        "binary_op": binary,
        "unary_op": unary,
    }
    if not hasattr(original, "get_int1_ty"):
        # Triton 3.2 has no type for conditions in its interpreter, so that none can be negated there.
        all_ones = original.get_all_ones_value

        def ones(self: Any, kind: Any) -> Any:
            return handle_of(np.ones(1, np.bool_), tl.int1) if kind.scalar == tl.int1 else all_ones(self, kind)

        found |= {"get_int1_ty": lambda self: tl.int1, "get_all_ones_value": ones}
    return found


# --- memory ----------------------------------------------------------------------------------------------------------------------------

#: Methods of the builder whose result points where their first argument points.
_POINTER_METHODS = (
    "create_addptr",
    "create_bitcast",
    "create_broadcast",
    "create_expand_dims",
    "create_reshape",
    "create_trans",
)

#: Those of them that leave the shape as it is, or broadcast it.
_IN_PLACE = ("create_addptr", "create_bitcast")

#: From this many lanes on, NumPy gathers and scatters faster than the interpreter's loop over addresses (about five times at 32,768).
_MANY_LANES = 64


def _memory_methods(observers: tuple[LaunchObserver, ...]) -> dict[str, Callable[..., Any]]:
    """Loads and stores of the interpreter's builder: quick, and shown to the observers first."""
    import numpy as np
    import triton.runtime.interpreter as interpreter

    original = interpreter.InterpreterBuilder
    masked_load, masked_store = original.create_masked_load, original.create_masked_store

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        access = _Access.of(ptrs, mask)
        for observer in observers:
            observer.load(tuple(self.grid_idx), access.addresses, access.itemsize, access.origin)
        memory = access.memory(interpreter._get_np_dtype(ptrs.get_element_ty()))
        if memory is None:
            return masked_load(self, ptrs, mask, other, *rest, **named)
        view, index = memory
        if access.everywhere:
            return interpreter.TensorHandle(view[index].reshape(ptrs.data.shape), ptrs.get_element_ty())
        values = np.zeros(ptrs.data.shape, dtype=view.dtype)
        if other is not None:
            values[...] = other.data
        values[access.mask] = view[index]
        return interpreter.TensorHandle(values, ptrs.get_element_ty())

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        access = _Access.of(ptrs, mask)
        for observer in observers:
            observer.store(tuple(self.grid_idx), access.addresses, access.itemsize, access.origin)
        memory = access.memory(value.data.dtype)
        if memory is None:
            return masked_store(self, ptrs, value, mask, *rest, **named)
        view, index = memory
        view[index] = np.broadcast_to(value.data, ptrs.data.shape)[access.mask]
        return None

    methods: dict[str, Callable[..., Any]] = {"create_masked_load": load, "create_masked_store": store}
    return {**methods, **_origin_methods()} if observers else methods


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Access:
    """The active lanes of one load or store."""

    addresses: Any
    mask: Any
    everywhere: bool
    itemsize: int
    origin: Any

    @classmethod
    def of(cls, pointers: Any, mask: Any) -> _Access:
        import numpy as np

        # A descriptor's mask is a bare array, whose own `data` is something else.
        active = np.broadcast_to(mask if isinstance(mask, np.ndarray) else mask.data, pointers.data.shape)
        # A scalar condition that Triton splats comes in the dtype of what was compared, and would be taken for indices.
        active = active.astype(bool, copy=False)
        everywhere = bool(active.all())
        return cls(
            addresses=pointers.data.reshape(-1) if everywhere else pointers.data[active],
            mask=active,
            everywhere=everywhere,
            itemsize=max(1, pointers.get_element_ty().primitive_bitwidth // 8),
            origin=_active_origin(pointers, active, everywhere),
        )

    def memory(self, dtype: Any) -> tuple[Any, Any] | None:
        """The stretch of memory from the lowest address to the highest as an array, and the lanes' indices in it.

        None where the interpreter's own loop does as well or better: few lanes, or addresses not a whole number of elements apart.
        """
        import ctypes

        import numpy as np

        if self.addresses.size < _MANY_LANES or dtype.itemsize != self.itemsize:
            return None
        low, high = int(self.addresses.min()), int(self.addresses.max())
        offsets = (self.addresses - np.uint64(low)).view(np.int64)
        if self.itemsize > 1:
            if (offsets & (self.itemsize - 1)).any():
                return None
            offsets >>= self.itemsize.bit_length() - 1
        stretch: Any = (ctypes.c_char * (high - low + self.itemsize)).from_address(low)
        return np.frombuffer(stretch, dtype=dtype), offsets


def _origin_methods() -> dict[str, Callable[..., Any]]:
    """Pointer arithmetic that remembers which argument a pointer came from, so that an access can be held against its bounds."""
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def following(name: str) -> Callable[..., Any]:
        method = getattr(original, name)

        def follow(self: Any, source: Any, *rest: Any, **named: Any) -> Any:
            result = method(self, source, *rest, **named)
            if isinstance(source.dtype, tl.pointer_type):
                origin = _origin(source)
                if isinstance(origin, np.ndarray):
                    # Whatever is done to the shape of the pointers is done to what they began as.
                    origin = (
                        origin
                        if name in _IN_PLACE
                        else method(self, handle_of(origin, source.dtype), *rest, **named).data
                    )
                result.origin = origin
            return result

        return follow

    splat = original.create_splat

    def follow_splat(self: Any, *args: Any) -> Any:
        # (type, value) in newer versions, (value, shape) in older ones.
        result = splat(self, *args)
        source = args[1] if isinstance(args[1], interpreter.TensorHandle) else args[0]
        if isinstance(source.dtype, tl.pointer_type):
            result.origin = _origin(source)
        return result

    methods = {name: following(name) for name in _POINTER_METHODS if hasattr(original, name)}
    return {**methods, "create_splat": follow_splat}


def _origin(handle: Any) -> Any:
    """The address of the tensor that a pointer handle comes from: remembered, or what the handle itself holds, one address or several."""
    origin = getattr(handle, "origin", None)
    if origin is None:
        origin = int(handle.data.reshape(-1)[0]) if handle.data.size == 1 else handle.data
    return origin


def _active_origin(pointers: Any, active: Any, everywhere: bool) -> Any:
    """`_origin` of the active lanes: one number where they have one."""
    import numpy as np

    origin = _origin(pointers)
    if not isinstance(origin, np.ndarray):
        return origin
    lanes = np.broadcast_to(origin, pointers.data.shape)
    return lanes.reshape(-1) if everywhere else lanes[active]
