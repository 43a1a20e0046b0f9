"""A checkpoint directory, read with the standard library: its configuration and the headers of its weights.

Opening costs a few small reads whatever the size of the weights, and never imports torch. Values are loaded on demand, by rows where
asked. What cannot be read is kept as a fault rather than raised, so that one bad file costs only the checks that need it; `Checkpoint.open`
raises only where there is no checkpoint at all.

A file that still lies on the Hub is fetched before it is read, by `hub.provide`; a checkpoint of our own disk pays one `stat` for that.

Safetensors layout: 8 bytes little-endian header length, a JSON object, then the data that the object's offsets cover without a gap
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import re
import stat
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from pytest_specdecode import hub
from pytest_specdecode.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"

#: Bits of one element, by safetensors dtype name.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

#: torch's name for each dtype name that a draft's tensors may have.
TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    # torch has no 6-bit floats; named as it would name them, so that they count as floats.
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

#: Refused above these: no draft's file comes near, and a reader that believes them can be made to eat the machine.
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 16_000_000
MAX_JSON_DEPTH = 64
MAX_DIGITS = 300

_ARRAY_CODES = {
    "bool": "B",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
}

#: Letters of `struct`, and how far one rounding moves a number, by dtype; bfloat16 is the upper half of a float32.
_FLOAT_CODES = {"float64": "d", "float32": "f", "float16": "e", "bfloat16": "f"}
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_BLOCK = 1 << 20

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
#: Pickles that training leaves beside the weights, or that hold one tensor of their own.
_SIDE_PICKLES = frozenset(
    (
        "mask_embedding.pt",
        "optimizer.bin",
        "optimizer.pt",
        "rng_state.pth",
        "scaler.pt",
        "scheduler.bin",
        "scheduler.pt",
        "training_args.bin",
    )
)
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """What a header says of one tensor.

    Attributes:
        name: as on disk.
        dtype: torch's name, such as `bfloat16`.
        shape: extents.
        file: name of the weights file inside the directory.
        start, end: byte range in that file (0, 0 for a pickled tensor).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int = 0
    end: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether elements are floating point, 8-bit and narrower ones included."""
        return self.dtype.startswith(("float", "bfloat"))


class Checkpoint:
    """One opened checkpoint directory.

    Attributes:
        path: the directory.
        config: the parsed `config.json`; empty where it could not be read.
        tensors: header of every tensor that a loader following the index would see, by name on disk.
        files: weights files that were read, in name order.
        config_oddities: duplicate keys and non-finite numbers of `config.json`. They are read as the last value and as null; a draft that
            is read from one of them is refused when it is loaded.
        faults: why the configuration or a header could not be read.
        index_faults: contradictions between the index, the shards and the directory.
        index_total_size: `metadata.total_size` of the index, or None.
        weight_map: shard by tensor name, as the index states it; empty without one.
        has_index: whether an index was read, or tried.
        has_weights: whether the directory holds any weights file, readable or not.
        unindexed: weights files that lie beside an index which does not name them.
        pickles: pickled weights files in the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = {}
        self.tensors: dict[str, TensorHeader] = {}
        self.files: list[str] = []
        self.config_oddities: tuple[CheckpointError, ...] = ()
        self.faults: list[CheckpointError] = []
        self.index_faults: list[CheckpointError] = []
        self.index_total_size: int | None = None
        self.weight_map: Mapping[str, str] = {}
        self.has_index = False
        self.has_weights = False
        self.unindexed: list[str] = []
        self.pickles: list[str] = []
        self._handles: dict[str, Any] = {}
        self._pickled: dict[str, Any] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open the directory `path`.

        Raises:
            CheckpointError: there is no such directory, or no `config.json` in it.
        """
        directory = Path(path)
        try:
            mode = directory.stat().st_mode
            if not stat.S_ISDIR(mode):
                raise CheckpointError(
                    "is a file; give the directory that holds config.json and the weights", path=directory
                )
            (directory / CONFIG_NAME).stat()
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and directory.exists():
                message = "holds no config.json; give the directory of one draft checkpoint"
            else:
                message = f"cannot be opened: {_reason(error)}"
            raise CheckpointError(message, path=directory) from None
        checkpoint = cls(directory)
        checkpoint._read_config()
        checkpoint._read_weights()
        return checkpoint

    @property
    def complete(self) -> bool:
        """Whether every header that belongs to the checkpoint was read."""
        return self.has_weights and not self.faults and not self.index_faults

    @property
    def num_parameters(self) -> int:
        """Elements of all floating-point tensors."""
        return sum(header.numel for header in self.tensors.values() if header.is_float)

    def tensor(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """The tensor `name` as on disk, or only its `rows`.

        Raises:
            CheckpointError: no such tensor, or its data cannot be read.
        """
        header = self.tensors.get(name)
        if header is None:
            raise CheckpointError("no tensor of this name in the weights", path=self.path, key=name)
        if header.file.endswith(_PICKLE_SUFFIXES):
            value: torch.Tensor = self._pickled_tensors(header.file)[name]
            return value if rows is None else value[rows]
        from safetensors import SafetensorError

        try:
            handle = self._handle(header.file)
            found: torch.Tensor = handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"data cannot be read: {error}", path=self.path / header.file, key=name) from None
        return found

    def integers(self, name: str) -> Sequence[int]:
        """The values of a one-dimensional integer or bool tensor, read without torch where it is stored as safetensors.

        Raises:
            CheckpointError: no such tensor, not of an integer type, or its data cannot be read.
        """
        header = self.tensors.get(name)
        if header is None:
            raise CheckpointError("no tensor of this name in the weights", path=self.path, key=name)
        code = _ARRAY_CODES.get(header.dtype)
        if code is None:
            raise CheckpointError(f"is {header.dtype}; an integer type was due", path=self.path, key=name)
        if header.file.endswith(_PICKLE_SUFFIXES):
            values: list[int] = self.tensor(name).flatten().tolist()
            return values
        found = array.array(code)
        file = self.path / header.file
        hub.provide(file)
        try:
            with file.open("rb") as stream:
                _seek(stream, header)
                found.frombytes(stream.read(header.end - header.start))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"data cannot be read: {error}", path=file, key=name) from None
        if len(found) != header.numel:
            raise CheckpointError("data ends early", path=file, key=name, got=len(found), due=header.numel)
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def number(self, name: str) -> float | None:
        """The value of a tensor of one element, read without torch from safetensors; None where its dtype is no plain float.

        Raises:
            CheckpointError: no such tensor, not of one element, or its data cannot be read.
        """
        header = self.tensors.get(name)
        if header is None:
            raise CheckpointError("no tensor of this name in the weights", path=self.path, key=name)
        if header.numel != 1:
            raise CheckpointError(
                "has more than one value or none", path=self.path, key=name, got=header.shape, due=[1]
            )
        if header.dtype not in _FLOAT_CODES:
            return None
        if header.file.endswith(_PICKLE_SUFFIXES):
            return float(self.tensor(name).reshape(-1)[0])
        return _floats(b"".join(self._blocks(header)), header.dtype)[0]

    def same(self, name: str, other: str) -> bool:
        """Whether the tensor `name` is a copy of `other`, compared in blocks, without torch where both are stored as safetensors.

        Of one dtype they are compared bit by bit. Where one was cast, no value of the first block may be further off than a rounding to the
        dtype of `name`; a narrow dtype that needs a scale is no copy of a plain one.

        Raises:
            CheckpointError: no such tensor, or its data cannot be read.
        """
        for key in (name, other):
            if key not in self.tensors:
                raise CheckpointError("no tensor of this name in the weights", path=self.path, key=key)
        own, theirs = self.tensors[name], self.tensors[other]
        if own.shape != theirs.shape:
            return False
        if own.file.endswith(_PICKLE_SUFFIXES) or theirs.file.endswith(_PICKLE_SUFFIXES):
            import torch

            mine = self.tensor(name)
            return torch.equal(mine, self.tensor(other).to(mine.dtype))
        if own.dtype == theirs.dtype:
            return all(a == b for a, b in zip(self._blocks(own), self._blocks(theirs), strict=True))
        if own.dtype not in _FLOAT_CODES or theirs.dtype not in _FLOAT_CODES:
            return False
        # Cast copies are rare, and two trained tensors differ at once: the first block settles it.
        pairs = zip(*(_floats(next(self._blocks(header), b""), header.dtype) for header in (own, theirs)), strict=False)
        step = _ROUNDING[own.dtype]
        return all(abs(a - b) <= max(step * abs(b), 2.0**-25) or a == b or (a != a and b != b) for a, b in pairs)

    def chunks(self, name: str, max_bytes: int = 64 << 20) -> Iterator[torch.Tensor]:
        """The tensor `name` in consecutive row blocks of at most about `max_bytes` each."""
        header = self.tensors[name]
        if len(header.shape) == 0 or header.end - header.start <= max_bytes:
            yield self.tensor(name)
            return
        step = max(1, header.shape[0] * max_bytes // max(1, header.end - header.start))
        for start in range(0, header.shape[0], step):
            yield self.tensor(name, slice(start, start + step))

    def narrow(self, owns: Callable[[str], bool]) -> None:
        """Keep only the tensors whose name on disk `owns` accepts: those of a draft inside a larger checkpoint.

        Faults of shards that hold none of them, and of tensors that are not among them, are dropped: a target may lie here in part.
        """
        shards = {shard for name, shard in self.weight_map.items() if owns(name)}
        foreign = set(self.weight_map.values()) - shards

        def concerns(fault: CheckpointError) -> bool:
            if fault.key == "weight_map":
                return fault.got not in foreign
            if fault.key in self.weight_map or fault.key in self.tensors:
                return owns(str(fault.key))
            return fault.path is None or Path(fault.path).name not in foreign

        self.faults = [fault for fault in self.faults if concerns(fault)]
        self.index_faults = [fault for fault in self.index_faults if concerns(fault)]
        self.tensors = {name: header for name, header in self.tensors.items() if owns(name)}
        # The index's total is the whole checkpoint's.
        self.index_total_size = None

    def close(self) -> None:
        """Let go of open files and of pickled tensors."""
        self._handles.clear()
        self._pickled.clear()

    def _blocks(self, header: TensorHeader) -> Iterator[bytes]:
        """The data of a tensor that is stored as safetensors, some bytes at a time."""
        file = self.path / header.file
        hub.provide(file)
        left = header.end - header.start
        try:
            with file.open("rb") as stream:
                _seek(stream, header)
                while left and (block := stream.read(min(left, _BLOCK))):
                    left -= len(block)
                    yield block
        except (OSError, ValueError) as error:
            raise CheckpointError(f"data cannot be read: {error}", path=file, key=header.name) from None
        if left:
            size = header.end - header.start
            raise CheckpointError("data ends early", path=file, key=header.name, got=size - left, due=size)

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            from safetensors import safe_open

            hub.provide(self.path / file)
            self._handles[file] = safe_open(self.path / file, framework="pt", device="cpu")
        return self._handles[file]

    def _pickled_tensors(self, file: str) -> dict[str, Any]:
        if file not in self._pickled:
            self._pickled[file] = read_pickle(self.path / file)
        found: dict[str, Any] = self._pickled[file]
        return found

    def _read_config(self) -> None:
        odd: list[CheckpointError] = []
        try:
            self.config = read_json_object(self.path / CONFIG_NAME, odd=odd)
        except CheckpointError as error:
            self.faults.append(error)
            return
        if odd:
            self.config, self.config_oddities = without_constants(self.config), tuple(odd)

    def refuse_config(self, fault: CheckpointError) -> None:
        """Take the configuration for one that cannot be read, because of `fault`."""
        self.config, self.config_oddities = {}, ()
        self.faults.insert(0, fault)

    def _read_weights(self) -> None:
        try:
            names = sorted(os.listdir(self.path))
        except OSError as error:
            self.faults.append(CheckpointError(f"cannot be listed: {error.strerror or error}", path=self.path))
            return
        self.pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
        stored = [name for name in names if name.endswith(".safetensors")]
        index_name = next((name for name in (INDEX_NAME, PICKLE_INDEX_NAME) if name in names), None)
        self.has_weights = bool(stored or self.pickles or index_name)
        if index_name == PICKLE_INDEX_NAME and stored:
            index_name = None
        if index_name is None:
            for name in stored or [name for name in self.pickles if name not in _SIDE_PICKLES]:
                self._read_file(name)
            return
        self.has_index = True
        try:
            weight_map, self.index_total_size = _read_index(self.path / index_name)
        except CheckpointError as error:
            self.index_faults.append(error)
            return
        self.weight_map = weight_map
        shards = Counter(weight_map.values())
        absent = set(shards).difference(names)
        self.unindexed = [name for name in stored if name not in shards]
        for shard, count in sorted(shards.items()):
            if shard in absent:
                self.index_faults.append(
                    CheckpointError(
                        f"shard {shard} is named for {count} tensors and is not in the directory",
                        path=self.path / index_name,
                        key="weight_map",
                        got=shard,
                        due="a file in the directory",
                    )
                )
                continue
            self._read_file(shard, weight_map, index_name)
        # A tensor of a shard that could not be read is that shard's fault, not one more.
        unread = {Path(fault.path).name for fault in self.faults if fault.path} | absent
        twice = {fault.key for fault in self.index_faults}
        for name, shard in weight_map.items():
            held = self.tensors[name].file if name in self.tensors else None
            if held != shard and shard not in unread and name not in twice:
                self.index_faults.append(
                    CheckpointError(
                        f"the index names this tensor in {shard}, which does not hold it"
                        + (f"; {held} does" if held else ""),
                        path=self.path / index_name,
                        key=name,
                        got=held or "absent",
                        due=shard,
                    )
                )

    def _read_file(self, name: str, weight_map: Mapping[str, str] | None = None, index_name: str = "") -> None:
        try:
            headers = (
                self._pickle_headers(name) if name.endswith(_PICKLE_SUFFIXES) else read_safetensors(self.path / name)
            )
        except CheckpointError as error:
            self.faults.append(error)
            return
        self.files.append(name)
        for header in headers:
            earlier = self.tensors.get(header.name)
            if earlier is not None:
                self.index_faults.append(
                    CheckpointError(
                        f"is stored twice, in {earlier.file} and in {name}",
                        path=self.path,
                        key=header.name,
                        got=[earlier.file, name],
                        due="one file",
                    )
                )
                continue
            if weight_map is not None and header.name not in weight_map:
                self.index_faults.append(
                    CheckpointError(
                        f"lies in {name} and the index does not name it",
                        path=self.path / index_name,
                        key=header.name,
                        got="absent from weight_map",
                        due=name,
                    )
                )
            self.tensors[header.name] = header

    def _pickle_headers(self, name: str) -> list[TensorHeader]:
        return [
            TensorHeader(name=key, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape), file=name)
            for key, value in self._pickled_tensors(name).items()
        ]


def _seek(stream: BinaryIO, header: TensorHeader) -> None:
    """Go to the first byte of a tensor's data in an open safetensors file."""
    length = int.from_bytes(stream.read(8), "little")
    stream.seek(8 + length + header.start)


def _floats(data: bytes, dtype: str) -> tuple[float, ...]:
    """The numbers that `data` holds, of a dtype in `_FLOAT_CODES`."""
    if dtype == "bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        data = bytes(wide)
    code = _FLOAT_CODES[dtype]
    return struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)


def read_json_object(
    path: Path, limit: int = MAX_JSON_BYTES, odd: list[CheckpointError] | None = None
) -> dict[str, Any]:
    """The JSON object in `path`; anything but an object and more than `limit` bytes are refused.

    Duplicate keys and non-finite numbers, which Python's `json` reads and the standard has not, are refused too. With `odd` they are read
    as Python does, the last of two values and infinity as a float, and a fault for each is put there, whose `key` is its dotted path.

    Raises:
        CheckpointError: with the file and, where it is known, the line.
    """
    raw = _read_bytes(path, limit)
    if not raw.strip():
        raise CheckpointError("is empty; a JSON object was due", path=path)
    if (kind := _foreign(raw)) is not None:
        raise CheckpointError(f"is {kind}, not JSON", path=path)
    value = _parse_json(raw, path, odd=odd)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"holds a JSON {_json_kind(value)}; an object was due", path=path, got=_json_kind(value), due="object"
        )
    return value


def read_safetensors(path: Path) -> list[TensorHeader]:
    """Every tensor that the header of `path` describes, in order of name; the data is not read.

    Raises:
        CheckpointError: the file is something else, is cut short, or its header contradicts itself.
    """
    try:
        with _open_regular(path, header_only=True) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if (kind := _foreign(prefix + file.read(512))) is not None:
                raise CheckpointError(f"is {kind}, not safetensors", path=path)
            if len(prefix) < 8:
                raise CheckpointError(f"is {size} bytes long; a safetensors file has at least 8", path=path)
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"claims a header of {length} bytes, over the limit of {MAX_HEADER_BYTES}; not a safetensors file?",
                    path=path,
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"claims a header of {length} bytes and is {size} bytes long: cut short", path=path
                )
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=path) from None
    entries = _parse_json(raw, path, what="header")
    if not isinstance(entries, dict):
        raise CheckpointError(f"the header is a JSON {_json_kind(entries)}; an object was due", path=path)
    metadata = entries.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("is not an object of strings", path=path, key="__metadata__")
    headers = [_tensor_header(path, name, entry) for name, entry in entries.items()]
    _require_contiguous(path, headers, 8 + length, size)
    return sorted(headers, key=lambda header: header.name)


def _tensor_header(path: Path, name: str, entry: Any) -> TensorHeader:
    def fault(message: str, got: Any = None, due: Any = None) -> NoReturn:
        raise CheckpointError(message, path=path, key=name, got=got, due=due)

    if not isinstance(entry, dict):
        fault(f"the header entry is a JSON {_json_kind(entry)}; an object was due")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        fault(f"unknown dtype {_short(dtype)}", got=dtype, due=sorted(DTYPE_BITS))
    if not isinstance(shape, list) or not all(_is_extent(extent) for extent in shape):
        fault(f"shape {_short(shape)} is not a list of whole numbers from 0 up", got=shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_extent(offset) for offset in offsets):
        fault(f"data_offsets {_short(offsets)} are not two whole numbers from 0 up", got=offsets)
    start, end = offsets
    bits = DTYPE_BITS[dtype]
    for extent in shape:
        bits *= extent
        if bits >= 1 << 64:
            fault(f"shape {_short(shape)} of {dtype} takes more than 2**61 bytes", got=shape, due=end - start)
    if end < start:
        fault(f"data_offsets {offsets} run backwards", got=offsets)
    if bits != 8 * (end - start):
        fault(
            f"shape {_short(shape)} of {dtype} takes {bits / 8:g} bytes, data_offsets give {end - start}",
            got=end - start,
            due=bits / 8,
        )
    return TensorHeader(
        name=name,
        dtype=TORCH_NAMES.get(dtype, dtype.lower()),
        shape=tuple(shape),
        file=path.name,
        start=start,
        end=end,
    )


def _require_contiguous(path: Path, headers: list[TensorHeader], data_start: int, size: int) -> None:
    position = 0
    for header in sorted(headers, key=lambda item: (item.start, item.end)):
        if header.start != position:
            how = "overlaps the one before it" if header.start < position else "leaves a gap before it"
            raise CheckpointError(
                f"starts at byte {header.start} of the data, {position} was due: {how}",
                path=path,
                key=header.name,
                got=header.start,
                due=position,
            )
        position = header.end
    due = data_start + position
    if due > size:
        raise CheckpointError(
            f"is cut short: the header describes {due} bytes, the file has {size}", path=path, got=size, due=due
        )
    if due < size:
        raise CheckpointError(
            f"has {size - due} bytes after the last tensor: the header describes {due} bytes, the file has {size}",
            path=path,
            got=size,
            due=due,
        )


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    index = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"weight_map is a JSON {_json_kind(weight_map)}; an object was due", path=path, key="weight_map"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard != os.path.basename(shard) or shard in (".", ".."):
            raise CheckpointError(
                f"{_short(shard)} is not a plain file name; shards lie beside the index",
                path=path,
                key=f"weight_map.{name}",
                got=shard,
                due="a file name",
            )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if _is_extent(total) else None


def read_pickle(path: Path) -> dict[str, Any]:
    """The tensors of the dictionary that torch saved in `path`, by name; read with `weights_only=True`.

    Raises:
        CheckpointError: the file is something else, or needs more than that to be read.
    """
    try:
        with _open_regular(path) as file:
            start = file.read(512)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=path) from None
    is_zip = start.startswith(_ZIP)
    if not is_zip and (kind := _foreign(start)) is not None:
        raise CheckpointError(f"is {kind}, not a pickle", path=path)
    import torch

    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    # A pickle is a program; one that was cut or forged can make the reader raise anything.
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["not a readable pickle"])[0][:200]
        raise CheckpointError(f"cannot be read with weights_only=True: {reason}", path=path) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"holds a {type(value).__name__}; a dictionary of tensors was due", path=path)
    return {str(key): item for key, item in value.items() if isinstance(item, torch.Tensor)}


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        with _open_regular(path) as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=path) from None
    if len(raw) > limit:
        raise CheckpointError(f"is larger than {limit} bytes", path=path)
    return raw


@contextlib.contextmanager
def _open_regular(path: Path, header_only: bool = False) -> Iterator[BinaryIO]:
    """`path` open for reading; a pipe or a device is refused, and not waited for."""
    hub.provide(path, header_only)

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError("is not a regular file", path=path)
        yield file


def _parse_json(raw: bytes, path: Path, what: str = "file", odd: list[CheckpointError] | None = None) -> Any:
    repeated: list[tuple[dict[str, Any], str]] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
            if odd is not None:
                repeated.extend((found, name) for name in names)
                return found
            twice = names[0]
            raise CheckpointError(f"states the key {_short(twice)} twice", path=path, key=twice)
        return found

    def whole(text: str) -> int | float:
        if len(text) > MAX_DIGITS:
            raise CheckpointError(f"holds a number of {len(text)} digits", path=path)
        return -0.0 if text == "-0" else int(text)

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) and odd is None:
            raise CheckpointError(f"holds {_short(text)}, which is not a finite number", path=path)
        return value

    def no_constant(text: str) -> float:
        if odd is not None:
            return float(text)
        raise CheckpointError(f"holds {text}, which JSON has not", path=path)

    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=whole,
            parse_float=finite,
            parse_constant=no_constant,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the {what} is not UTF-8 (byte {error.start})", path=path) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"the {what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}", path=path
        ) from None
    except RecursionError:
        raise CheckpointError(f"the {what} nests too deeply", path=path) from None
    if not _is_shallow(value):
        raise CheckpointError(f"the {what} nests more than {MAX_JSON_DEPTH} deep", path=path)
    if re.search(rb"\\u[dD][89a-fA-F]", raw) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"the {what} holds half a surrogate pair, which is no text", path=path) from None
    if odd is not None:
        odd.extend(_oddities(value, repeated, path))
    return value


def _oddities(value: Any, repeated: list[tuple[dict[str, Any], str]], path: Path) -> Iterator[CheckpointError]:
    """A fault for each key of `repeated` and each non-finite number in `value`, with its dotted path."""
    again: dict[int, list[str]] = {}
    for found, name in repeated:
        again.setdefault(id(found), []).append(name)
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, float) and not math.isfinite(item):
            text = "NaN" if math.isnan(item) else "Infinity" if item > 0 else "-Infinity"
            yield CheckpointError(f"holds {text}, which JSON has not", path=path, key=place, got=text)
        if isinstance(item, dict):
            for name in again.get(id(item), ()):
                key = f"{place}.{name}" if place else name
                yield CheckpointError(f"states the key {_short(name)} twice", path=path, key=key)
        if isinstance(item, (dict, list)):
            children = item.items() if isinstance(item, dict) else enumerate(item)
            waiting += [(f"{place}.{name}" if place else str(name), child) for name, child in children]


def without_constants(value: Any) -> Any:
    """`value`, parsed JSON, with null for every number that is not finite."""
    if isinstance(value, dict):
        return {name: without_constants(child) for name, child in value.items()}
    if isinstance(value, list):
        return [without_constants(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return True
    return False


def _foreign(raw: bytes) -> str | None:
    """What the bytes are, where they are something that is often saved in place of the real file."""
    start = raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:64]
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer (fetch the real file with `git lfs pull`)"
    if start[:1] == b"<" and start[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "an HTML or XML page (a failed download?)"
    if start.startswith(_ZIP):
        return "a zip archive (a pickle?)"
    return None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_extent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {dict: "object", list: "list", str: "string", int: "number", float: "number"}.get(type(value), "value")
