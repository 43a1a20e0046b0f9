"""What an interpreted kernel does to memory: bounds, traffic, outputs left unwritten, and programs that collide.

A kernel can give the right numbers while it reads past a table or overwrites a neighbour, and on a CPU nothing says so. `guarded`
watches every load and store of the launches made inside it; `banded` hands out tensors between bands of known bytes, which works on
any device and for code that is no kernel at all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_specdecode.errors import DraftError
from pytest_specdecode.launch import observed


class KernelMemoryError(DraftError):
    """A kernel touched memory that it must not touch, or left memory untouched that it must fill.

    Attributes:
        kernel: name of the kernel, or None where bands were found damaged.
        kind: `load`, `store`, `race`, `unwritten` or `band`.
        program: the program's index in the grid, or None.
        tensor: name of the kernel's argument (or of the banded tensor).
        element: flat offset in elements from the tensor's first one; negative before it.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        tensor: str,
        kernel: str | None = None,
        program: tuple[int, int, int] | None = None,
        element: int | None = None,
    ) -> None:
        super().__init__(message, key=kernel, got=element)
        self.kind = kind
        self.tensor = tensor
        self.kernel = kernel
        self.program = program
        self.element = element


@dataclass(frozen=True, kw_only=True)
class TensorTraffic:
    """What one launch did to one tensor argument.

    Attributes:
        name: the kernel's argument.
        loaded_bytes, stored_bytes: as requested, lane by lane.
        unique_loaded_bytes, unique_stored_bytes: every element counted once.
        written, elements: elements stored to at least once, and elements of the tensor.
    """

    name: str
    loaded_bytes: int
    stored_bytes: int
    unique_loaded_bytes: int
    unique_stored_bytes: int
    written: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class LaunchTraffic:
    """What one launch did to memory: the kernel's name, its tensors by argument name, and how many loads and stores were issued."""

    kernel: str
    tensors: Mapping[str, TensorTraffic]
    loads: int
    stores: int

    @property
    def requested_bytes(self) -> int:
        """Bytes loaded and stored, lane by lane."""
        return sum(tensor.loaded_bytes + tensor.stored_bytes for tensor in self.tensors.values())

    @property
    def unique_bytes(self) -> int:
        """Bytes loaded and stored, every element counted once per direction."""
        return sum(tensor.unique_loaded_bytes + tensor.unique_stored_bytes for tensor in self.tensors.values())


@contextlib.contextmanager
def guarded(*, filled: Collection[str] = ()) -> Iterator[MemoryGuard]:
    """Watch the interpreted launches made inside.

    Args:
        filled: kernel arguments of which every element must have been stored to when a launch that has them ends.

    Yields:
        The guard, whose `launches` hold one LaunchTraffic per finished launch.

    Raises (inside, from the launch):
        KernelMemoryError: an access outside the tensor that its pointer came from or in a gap between a strided tensor's elements; two
            programs, or two lanes of one store, that write one element; a program that reads what another wrote; an element of
            `filled` that was not written.
    """
    guard = MemoryGuard(filled=tuple(filled))
    with observed(guard):
        yield guard


@dataclass(eq=False)
class MemoryGuard:
    """The observer behind `guarded`.

    Attributes:
        filled: arguments that must be written completely.
        launches: one record per finished launch, in order.
    """

    filled: tuple[str, ...] = ()
    launches: list[LaunchTraffic] = field(default_factory=list)
    _kernel: str = ""
    _regions: dict[str, _Region] = field(default_factory=dict)
    _by_base: dict[int, _Region] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _programs: list[tuple[int, int, int]] = field(default_factory=list)

    def begin(self, kernel: str, tensors: Mapping[str, Any]) -> None:
        """See LaunchObserver."""
        self._kernel = kernel
        self._counts = {"load": 0, "store": 0}
        self._programs = []
        self._regions = {name: _Region.of(name, tensor) for name, tensor in tensors.items()}
        self._by_base = {}
        for region in self._regions.values():
            # Two arguments may start at one address; the longer one is then the one whose bounds count.
            known = self._by_base.get(region.base)
            if known is None or region.span > known.span:
                self._by_base[region.base] = region

    def load(self, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any) -> None:
        """See LaunchObserver."""
        self._counts["load"] += 1
        for region, elements in self._resolve("load", program, addresses, itemsize, origin):
            region.mark_read(elements, itemsize)
            if region.owner is None:
                continue
            owners = region.owner[elements]
            foreign = (owners >= 0) & ((owners >> _LANE_BITS) != self._serial(program))
            if foreign.any():
                element = int(elements[foreign][0])
                raise self._error(
                    "race",
                    program,
                    region,
                    element,
                    f"program {program} reads {region.label(element)}, which program "
                    f"{self._programs[int(owners[foreign][0]) >> _LANE_BITS]} of the same launch wrote; programs run in no order",
                )

    def store(self, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any) -> None:
        """See LaunchObserver."""
        self._counts["store"] += 1
        for region, elements in self._resolve("store", program, addresses, itemsize, origin):
            serial = self._serial(program)
            other = region.mark_written(elements, itemsize, serial)
            if other is None:
                continue
            element, owner = other
            who = "two lanes of one store" if owner == serial else f"programs {self._programs[owner]} and {program}"
            raise self._error("race", program, region, element, f"{who} both write {region.label(element)}")

    def end(self, completed: bool) -> None:
        """See LaunchObserver."""
        if not completed:
            return
        self.launches.append(
            LaunchTraffic(
                kernel=self._kernel,
                tensors={name: region.traffic() for name, region in self._regions.items()},
                loads=self._counts["load"],
                stores=self._counts["store"],
            )
        )
        for name in self.filled:
            region = self._regions.get(name)
            missing = None if region is None else region.first_unwritten()
            if region is not None and missing is not None:
                element, count = missing
                raise self._error(
                    "unwritten",
                    None,
                    region,
                    element,
                    f"{count} of {region.elements} elements were never written, the first {region.label(element)}",
                )

    def _serial(self, program: tuple[int, int, int]) -> int:
        """Programs are numbered as they run, one after the other."""
        if not self._programs or self._programs[-1] != program:
            self._programs.append(program)
        return len(self._programs) - 1

    def _resolve(
        self, kind: str, program: tuple[int, int, int], addresses: Any, itemsize: int, origin: Any
    ) -> Iterator[tuple[_Region, Any]]:
        """The region or regions touched and the elements touched in each; raises where an active lane is in none."""
        if addresses.size == 0:
            return
        if hasattr(origin, "shape"):
            yield from self._resolve_each(kind, program, addresses, itemsize, origin)
            return
        region = self._by_base.get(origin)
        if region is not None:
            offsets, inside = region.locate(addresses, itemsize)
            if inside is not None and not inside.all():
                raise self._out_of_bounds(kind, program, region, offsets, ~inside, itemsize)
            yield region, offsets
            return
        # A pointer of unknown origin may point into any argument.
        pending = addresses
        for candidate in self._regions.values():
            offsets, inside = candidate.locate(pending, itemsize)
            if inside is None:
                yield candidate, offsets
                return
            if inside.any():
                yield candidate, offsets[inside]
            pending = pending[~inside]
            if pending.size == 0:
                return
        nearest = min(self._regions.values(), key=lambda each: abs(each.base - int(pending[0])))
        offsets, inside = nearest.locate(pending, itemsize)
        raise self._out_of_bounds(kind, program, nearest, offsets, ~inside, itemsize)

    def _resolve_each(
        self, kind: str, program: tuple[int, int, int], addresses: Any, itemsize: int, origins: Any
    ) -> Iterator[tuple[_Region, Any]]:
        """The same where each lane has an origin of its own: pointers that were loaded from a table of addresses."""
        import numpy as np

        while addresses.size:
            base = int(origins[0])
            if base in self._by_base:
                lanes, due = origins == base, base
            else:
                lanes, due = ~np.isin(origins, np.array(list(self._by_base), dtype=np.uint64)), None
            yield from self._resolve(kind, program, addresses[lanes], itemsize, due)
            addresses, origins = addresses[~lanes], origins[~lanes]

    def _out_of_bounds(
        self, kind: str, program: tuple[int, int, int], region: _Region, offsets: Any, outside: Any, itemsize: int
    ) -> KernelMemoryError:
        element = int(offsets[outside][0])
        return self._error(
            kind,
            program,
            region,
            element,
            f"{kind} of {itemsize} bytes out of bounds: program {program}, {int(outside.sum())} of {offsets.size} lanes, "
            f"first at {region.label(element)}",
        )

    def _error(
        self, kind: str, program: tuple[int, int, int] | None, region: _Region, element: int, text: str
    ) -> KernelMemoryError:
        return KernelMemoryError(
            text, kind=kind, tensor=region.name, kernel=self._kernel, program=program, element=element
        )


#: An element's owner is `serial << _LANE_BITS | lane`; a tile has at most 2^20 lanes.
_LANE_BITS = 21


@dataclass(eq=False)
class _Region:
    """One tensor argument: where it lies, which elements of its span are its own, and what was done to them."""

    name: str
    base: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    elements: int
    valid: Any = None
    read: Any = None
    owner: Any = None
    loaded_bytes: int = 0
    stored_bytes: int = 0

    @classmethod
    def of(cls, name: str, tensor: Any) -> _Region:
        import numpy as np

        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        elements = math.prod(shape)
        reach = zip(shape, strides, strict=True)
        span = 0 if elements == 0 else 1 + sum((size - 1) * stride for size, stride in reach)
        valid = None
        if span != elements:
            valid = np.zeros(span, dtype=bool)
            np.lib.stride_tricks.as_strided(valid, shape=shape, strides=strides)[...] = True
        return cls(
            name=name,
            base=tensor.data_ptr(),
            itemsize=tensor.element_size(),
            shape=shape,
            strides=strides,
            span=span,
            elements=elements if valid is None else int(valid.sum()),
            valid=valid,
        )

    def locate(self, addresses: Any, itemsize: int) -> tuple[Any, Any]:
        """Element offsets (int64, possibly out of range) and which of them lie inside; None for all, where that is seen at once."""
        import numpy as np

        offsets = (addresses - np.uint64(self.base)).view(np.int64)
        last = self.span * self.itemsize - itemsize
        elements = offsets if self.itemsize == 1 else offsets >> (self.itemsize.bit_length() - 1)
        if self.valid is None and offsets.min() >= 0 and offsets.max() <= last:
            return elements, None
        inside = (offsets >= 0) & (offsets <= last)
        if self.valid is not None:
            inside &= self.valid[np.where(inside, elements, 0)] if self.span else False
        return elements, inside

    def mark_read(self, elements: Any, itemsize: int) -> None:
        import numpy as np

        self.loaded_bytes += elements.size * itemsize
        if self.read is None:
            self.read = np.zeros(self.span, dtype=bool)
        for step in range(max(1, itemsize // self.itemsize)):
            self.read[elements + step if step else elements] = True

    def mark_written(self, elements: Any, itemsize: int, program: int) -> tuple[int, int] | None:
        """Note the writer; returns an element written twice and its other writer where there is one."""
        import numpy as np

        self.stored_bytes += elements.size * itemsize
        if self.owner is None:
            self.owner = np.full(self.span, -1, dtype=np.int64)
        before = self.owner[elements]
        foreign = (before >= 0) & ((before >> _LANE_BITS) != program)
        if foreign.any():
            return int(elements[foreign][0]), int(before[foreign][0]) >> _LANE_BITS
        marks = np.arange(elements.size, dtype=np.int64) + (program << _LANE_BITS)
        for step in range(max(1, itemsize // self.itemsize)):
            self.owner[elements + step if step else elements] = marks
        twice = self.owner[elements] != marks
        return (int(elements[twice][0]), program) if twice.any() else None

    def first_unwritten(self) -> tuple[int, int] | None:
        """The first own element that no program wrote, and how many there are."""
        import numpy as np

        written = np.zeros(self.span, dtype=bool) if self.owner is None else self.owner >= 0
        missing = ~written if self.valid is None else ~written & self.valid
        return (int(missing.argmax()), int(missing.sum())) if missing.any() else None

    def traffic(self) -> TensorTraffic:
        read = 0 if self.read is None else int(self.read.sum())
        written = 0 if self.owner is None else int((self.owner >= 0).sum())
        return TensorTraffic(
            name=self.name,
            loaded_bytes=self.loaded_bytes,
            stored_bytes=self.stored_bytes,
            unique_loaded_bytes=read * self.itemsize,
            unique_stored_bytes=written * self.itemsize,
            written=written,
            elements=self.elements,
        )

    def label(self, element: int) -> str:
        """`name[i, j]`, with the flat offset and the shape, so that both a stride error and an index error can be recognised."""
        place = f"element {element}"
        if element >= 0 and self.shape and all(stride > 0 for stride in self.strides):
            index, rest = [0] * len(self.shape), element
            for axis in sorted(range(len(self.shape)), key=lambda axis: (-self.strides[axis], axis)):
                index[axis], rest = divmod(rest, self.strides[axis])
            if rest == 0:
                return f"{self.name}[{', '.join(map(str, index))}] ({place}) of shape {self.shape}"
        return f"{self.name}[{place}] of shape {self.shape}"


# --- bands ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Banded:
    """A tensor whose surroundings are known bytes; see `banded`.

    Attributes:
        tensor: the payload.
        name: for messages.
    """

    tensor: Any
    name: str
    _buffer: Any
    _own: Any

    def assert_intact(self) -> None:
        """Raise KernelMemoryError where a byte before, after or between the payload's elements changed."""
        due = _poison_bytes(self.tensor.dtype, self._buffer.numel()).to(self._buffer.device)
        damaged = ((self._buffer != due) & ~self._own).nonzero()
        if len(damaged) == 0:
            return
        first = int(self._own.nonzero()[0]) if self._own.any() else 0
        element = (int(damaged[0]) - first) // self.tensor.element_size()
        raise KernelMemoryError(
            f"{self.name}: {len(damaged)} bytes outside the tensor were overwritten, the first at element {element} of "
            f"shape {tuple(self.tensor.shape)}, strides {tuple(self.tensor.stride())}",
            kind="band",
            tensor=self.name,
            element=element,
        )

    def unwritten(self) -> Any:
        """Boolean tensor of the payload's shape: which elements still hold the poison."""
        return still_poison(self.tensor)

    def assert_filled(self) -> None:
        """`assert_intact`, and raise KernelMemoryError where an element of the payload still holds the poison."""
        self.assert_intact()
        missing = self.unwritten().nonzero()
        if len(missing):
            index = tuple(int(at) for at in missing[0])
            raise KernelMemoryError(
                f"{self.name}: {len(missing)} of {self.tensor.numel()} elements were never written, the first {list(index)}",
                kind="unwritten",
                tensor=self.name,
                element=sum(at * stride for at, stride in zip(index, self.tensor.stride(), strict=True)),
            )


def banded(
    shape: Sequence[int],
    dtype: Any,
    *,
    device: Any = "cpu",
    name: str = "tensor",
    band: int = 64,
    gap: int = 0,
) -> Banded:
    """A poisoned tensor between two bands.

    Args:
        shape, dtype, device: of the payload.
        name: for messages.
        band: elements before and after it; rounded up so that the payload stays 64-byte aligned.
        gap: elements between its rows (of the last dimension), which belong to the bands.

    Bands and payload hold a NaN of a payload of our own where dtype is floating, so that whatever is read from there and used shows,
    and no NaN that was computed looks like it; else bytes 0xA5.
    """
    import torch

    size = torch.empty((), dtype=dtype).element_size()
    lead = -(-band * size // 64) * 64
    strides = _strides(shape, gap)
    count = math.prod(shape)
    span = 0 if count == 0 else 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    total = lead + span * size + lead
    buffer = _poison_bytes(dtype, total).to(device)
    payload = (
        buffer[lead : lead + span * size]
        .view(dtype)
        .as_strided(tuple(shape), strides, (buffer.storage_offset() + lead) // size)
    )
    own = torch.zeros(total, dtype=torch.bool, device=device)
    inner = own[lead : lead + span * size].view(-1, size)
    for byte in range(size):
        inner.as_strided(tuple(shape), [stride * size for stride in strides], own.storage_offset() + lead + byte).fill_(
            True
        )
    return Banded(tensor=payload, name=name, _buffer=buffer, _own=own)


def banded_copy(tensor: Any, *, name: str = "tensor", band: int = 64, gap: int = 0) -> Banded:
    """`tensor`'s values in a tensor between two bands; arguments as for `banded`."""
    copy = banded(tuple(tensor.shape), tensor.dtype, device=tensor.device, name=name, band=band, gap=gap)
    copy.tensor.copy_(tensor)
    return copy


def poison_(tensor: Any) -> Any:
    """Fill `tensor` in place with the poison of its dtype (a NaN, or 0xA5 bytes) and return it."""
    integer = _integer_of(tensor)
    word = _poison_bytes(tensor.dtype, tensor.element_size()).view(integer)
    tensor.view(integer).copy_(word.to(tensor.device).expand(tensor.shape))
    return tensor


def still_poison(tensor: Any) -> Any:
    """Which elements of `tensor` hold the poison, bit for bit: a NaN that was computed is another NaN."""
    integer = _integer_of(tensor)
    return tensor.view(integer) == _poison_bytes(tensor.dtype, tensor.element_size()).view(integer).to(tensor.device)


def _poison_bytes(dtype: Any, count: int) -> Any:
    """`count` bytes of poison. Words of 0xFFF5 are a NaN in every float of two bytes or more, and not one that torch or a GPU makes:
    those are 0x7FC0, 0x7FFF or 0xFFFF."""
    import torch

    if not dtype.is_floating_point:
        return torch.full((count,), 0xA5, dtype=torch.uint8)
    word = [0xFF] if dtype.itemsize == 1 else [0xF5, 0xFF]
    return torch.tensor(word, dtype=torch.uint8).repeat(-(-count // len(word)))[:count]


def _integer_of(tensor: Any) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _strides(shape: Sequence[int], gap: int) -> tuple[int, ...]:
    strides, step = [1] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= max(1, shape[axis])
        if axis == len(shape) - 1:
            step += gap
    return tuple(strides)
