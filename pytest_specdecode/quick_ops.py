"""Triton's interpreter with its common operations done at once, instead of through the layers that a compiler needs.

An interpreted `a + b` of two float32 tiles passes through a dozen Python functions that find out again what the operands are, broadcast
both even where they have one shape, and make a type, a shape and a handle anew; NumPy's part of it is a fiftieth. Where both operands are
tensors of one plain dtype, integers of 32 and 64 bits, or a pointer and an integer, what is to be done is known at once. Everything else,
other mixed dtypes, unsigned integers and bfloat16 among it, is left to Triton, so that its rules of types are written a second time only
where they say nothing surprising.

What Triton patches into its language for a launch is worked out once per process and set of namespaces, and put there at once from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]

#: An owner, a name in it, what is put there for a launch, and what was there.
Patch = tuple[Any, str, Any, Any]


class LanguagePatch:
    """`triton.language` made ready for interpreting, for one launch, and put back by `undo`.

    Args:
        original: Triton's own patching, which is asked once per set of namespaces.
        check_overflow: called with (lhs, rhs, Triton's name of the operation), arrays, before int32 is added, subtracted or multiplied.
    """

    def __init__(self, original: Method, check_overflow: Method) -> None:
        self._original = original
        self._check_overflow = check_overflow
        self._ready: set[tuple[bool, bool]] = set()
        self._active: list[Patch] = []

    def __call__(self, function: Any) -> LanguagePatch:
        """Make the namespaces ready through which `function`, a kernel's Python function, sees the language."""
        import triton.language as tl

        seen = function.__globals__.values()
        languages = any(each is tl for each in seen), any(each is tl.core for each in seen)
        if languages in self._ready:
            return self
        self._ready.add(languages)
        if languages not in _RECORDED:
            _RECORDED[languages] = self._record(function)
        self._put(_RECORDED[languages])
        if languages not in _QUICK:
            _QUICK[languages] = [
                (owner, name, value, vars(owner).get(name, _ABSENT))
                for owner, methods in _quick_methods(self._check_overflow)
                for name, value in methods.items()
            ]
        self._put(_QUICK[languages])
        return self

    def restore(self) -> None:
        """What newer versions call after a launch; `undo` does it."""

    def undo(self) -> None:
        """Put back everything that was patched."""
        _take_back(self._active)
        self._active.clear()
        self._ready.clear()

    def _put(self, patches: list[Patch]) -> None:
        for owner, name, value, _ in patches:
            setattr(owner, name, value)
        self._active += patches

    def _record(self, function: Any) -> list[Patch]:
        """What Triton patches for `function`, found out on the language as it is without any patch."""
        active, self._active, ready = self._active, [], set(self._ready)
        _take_back(active)
        owners = [(owner, dict(vars(owner))) for owner in namespaces()]
        self._original(function)
        found = [
            (owner, name, value, known.get(name, _ABSENT))
            for owner, known in owners
            for name, value in list(vars(owner).items())
            if known.get(name, _ABSENT) is not value and name != "__annotations__"
        ]
        self._put(found)
        self.undo()
        self._ready = ready
        self._put(active)
        return found


#: What Triton's own patching sets, by whether a kernel sees `triton.language` and `triton.language.core`.
_RECORDED: dict[tuple[bool, bool], list[Patch]] = {}

#: Ours on top of it, with what it sets behind them.
_QUICK: dict[tuple[bool, bool], list[Patch]] = {}

_ABSENT = object()


def _take_back(patches: list[Patch]) -> None:
    for owner, name, _, before in reversed(patches):
        if before is not _ABSENT:
            setattr(owner, name, before)
        elif name in vars(owner):  # two sets of namespaces share some of their patches
            delattr(owner, name)


def namespaces() -> list[Any]:
    """The namespaces of `triton.language` that interpreting patches."""
    import triton.language as tl

    # Never triton.language.standard: some versions keep names of ours in its globals.
    names = ("tensor_descriptor_base", "condition", "tensor_descriptor", "_experimental_tensor_descriptor")
    return [tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype] + [
        getattr(tl.core, name) for name in names if hasattr(tl.core, name)
    ]


def _quick_methods(check_overflow: Method) -> list[tuple[Any, dict[str, Method]]]:
    import triton.language as tl
    import triton.language.semantic as semantic

    return [
        (tl.core.tensor, _operators(check_overflow)),
        (tl.core.block_type, {"__init__": _quick_block_init()}),
        (getattr(semantic, "TritonSemantic", semantic), _quick_broadcast()),
    ]


# --- operators --------------------------------------------------------------------------------------------------------------------------


def _operators(check_overflow: Method) -> dict[str, Method]:
    """Methods of an interpreted tensor, each with Triton's own, as it stands patched now, behind it."""
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    tensor, builder = tl.core.tensor, interpreter.interpreter_builder
    handle_of = interpreter.TensorHandle
    int1, int32, int64 = tl.int1, tl.int32, tl.int64
    floats = {tl.float32, tl.float64}

    def arithmetic(
        name: str, operation: Any, *, on_floats: bool = True, on_integers: bool = True, result: Any = None
    ) -> Method:
        slow = getattr(tensor, name)
        word = {"add": "add", "subtract": "sub", "multiply": "mul"}.get(operation.__name__)
        swapped = name.startswith("__r")

        def method(self: Any, other: Any) -> Any:
            dtype, lhs = self.dtype, self.handle.data
            if type(other) is tensor:
                rhs, block = other.handle.data, self.type.is_block() or other.type.is_block()
                if other.dtype is not dtype:
                    if not on_integers or {dtype, other.dtype} != {int32, int64}:
                        return slow(self, other)
                    dtype = int64
                    lhs, rhs = lhs.astype(np.int64, copy=False), rhs.astype(np.int64, copy=False)
            elif type(other) is int and (dtype is int32 or dtype is int64) and -(2**31) <= other < 2**31:
                rhs, block = np.array([other], dtype=lhs.dtype), self.type.is_block()
            else:
                return slow(self, other)
            if dtype in floats:
                if not on_floats:
                    return slow(self, other)
            elif not on_integers or not (
                dtype is int64 or dtype is int32 or (dtype is int1 and word is None and result is None)
            ):
                return slow(self, other)
            if dtype is int32 and word is not None:
                check_overflow(*((rhs, lhs) if swapped else (lhs, rhs)), word)
            data = operation(rhs, lhs) if swapped else operation(lhs, rhs)
            out = dtype if result is None else result
            return tensor(handle_of(data, out), _block_type(out, data.shape) if block else out)

        return method

    added = arithmetic("__add__", np.add)

    def add(self: Any, other: Any) -> Any:
        if type(other) is tensor and self.dtype.is_ptr() and (other.dtype is int64 or other.dtype is int32):
            handle = builder.create_addptr(self.handle, other.handle)
            block = self.type.is_block() or other.type.is_block()
            return tensor(handle, _block_type(self.dtype, handle.data.shape) if block else self.dtype)
        return added(self, other)

    methods = {
        "__add__": add,
        "__radd__": arithmetic("__radd__", np.add),
        "__sub__": arithmetic("__sub__", np.subtract),
        "__mul__": arithmetic("__mul__", np.multiply),
        "__rmul__": arithmetic("__rmul__", np.multiply),
        "__truediv__": arithmetic("__truediv__", np.divide, on_integers=False),
        "__and__": arithmetic("__and__", np.bitwise_and, on_floats=False),
        "__or__": arithmetic("__or__", np.bitwise_or, on_floats=False),
    }
    for name, operation in (
        ("__lt__", np.less),
        ("__le__", np.less_equal),
        ("__gt__", np.greater),
        ("__ge__", np.greater_equal),
        ("__eq__", np.equal),
        ("__ne__", np.not_equal),
    ):
        methods[name] = arithmetic(name, operation, result=int1)
    return {**methods, "__init__": _quick_init()}


def _block_type(dtype: Any, shape: tuple[int, ...]) -> Any:
    import triton.language as tl

    found = _BLOCK_TYPES.get((dtype.name, shape))
    if found is None or found.element_ty is not dtype:
        found = _BLOCK_TYPES[dtype.name, shape] = tl.core.block_type(dtype, list(shape))
    return found


#: The last block type made, by the name of its elements' dtype and shape.
_BLOCK_TYPES: dict[tuple[str, tuple[int, ...]], Any] = {}


@functools.cache
def _quick_init() -> Method:
    """A tensor's constructor that knows the types it has seen: the shape follows from the type's name."""
    import triton.language as tl

    original = vars(tl.core.tensor)["__init__"]
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        fields = known.get(type.name)
        if fields is None:
            original(self, handle, type)
            known[type.name] = {
                name: value for name, value in vars(self).items() if name not in ("handle", "type", "dtype")
            }
            return
        self.__dict__.update(fields)
        self.handle = handle
        self.type = type
        self.dtype = type.scalar

    return init


@functools.cache
def _quick_block_init() -> Method:
    """A block type's constructor that checks a shape once."""
    import triton.language as tl

    original = vars(tl.core.block_type)["__init__"]
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        fields = known.get(key)
        if fields is None:
            original(self, element_ty, shape)
            known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            return
        self.__dict__.update(fields)
        self.element_ty = element_ty

    return init


@functools.cache
def quick_np_dtype(original: Method) -> Method:
    """NumPy's dtype for one of Triton's, which `original` finds in a table that it makes anew each time."""
    known: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = original(dtype)
        return found

    return np_dtype


@functools.cache
def _quick_broadcast() -> dict[str, Method]:
    """Broadcasting that sees that there is nothing to do; a method of a class from triton 3.4 on."""
    import triton.language.semantic as semantic

    owner = getattr(semantic, "TritonSemantic", None)
    if owner is None:
        return {}
    original = owner.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and tuple(lhs.type.shape) == tuple(rhs.type.shape):
            return lhs, rhs
        return original(self, lhs, rhs)

    return {"broadcast_impl_value": broadcast}
