"""Reading a checkpoint's files.

What these catch: a header that safetensors refuses and this reader believes, or a good one that it refuses; a cut or trailing file read
as whole; an index that contradicts its shards; a pickle that runs code, or whose damage escapes as a traceback; JSON that eats the
machine (deep nesting, endless digits, repeated keys); a pipe that is waited for; torch imported, or the data read, to look at a header;
integers or row blocks that differ from what torch loads. The safetensors library is the judge of headers.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pytest_specdecode.checkpoint import (
    DTYPE_BITS,
    INDEX_NAME,
    MAX_HEADER_BYTES,
    PICKLE_INDEX_NAME,
    TORCH_NAMES,
    Checkpoint,
    read_json_object,
    read_safetensors,
)
from pytest_specdecode.errors import CheckpointError

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def packed(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with this header, which may be raw bytes, and this length field."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


def safetensors_opens(file: Path) -> bool:
    """Whether the safetensors library takes the file."""
    try:
        with safe_open(file, framework="pt") as opened:
            list(opened.keys())
    except SafetensorError:
        return False
    return True


def refusal(call: Callable[[Path], object], file: Path) -> CheckpointError:
    """The error of `call(file)`, which must be one line that begins with the file."""
    with pytest.raises(CheckpointError) as caught:
        call(file)
    text = str(caught.value)
    assert text.startswith(str(file))
    assert text.isprintable()
    assert caught.value.__cause__ is None
    return caught.value


def directory(path: Path, config: object = None, files: Mapping[str, bytes] | None = None) -> Path:
    """A checkpoint directory with these raw files."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({} if config is None else config))
    for name, content in (files or {}).items():
        (path / name).write_bytes(content)
    return path


# --- headers ---------------------------------------------------------------------------------------------------------

TWO = {"a": entry(), "b": entry(data_offsets=[8, 16])}

#: name: (file, what the message says, key)
REFUSED: dict[str, tuple[bytes, str, str | None]] = {
    "empty": (b"", "0 bytes long", None),
    "four bytes": (b"\x08\0\0\0", "4 bytes long", None),
    "length past the file": (packed({}, length=900), "cut short", None),
    "huge length": (packed({}, length=1 << 60), "over the limit", None),
    "length just over the limit": (packed({}, length=MAX_HEADER_BYTES + 1), "over the limit", None),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull", None),
    "HTML page": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML", None),
    "HTML in capitals": (b"\n <HTML><BODY>sign in</BODY></HTML>", "HTML", None),
    "a zip": (b"PK\x03\x04" + b"\0" * 40, "zip archive", None),
    "an index": (b'{"weight_map": {"a": "model.safetensors"}}', "over the limit", None),
    "cut JSON": (packed(json.dumps(TWO).encode()[:-9], b"\0" * 16), "not JSON", None),
    "no JSON at all": (packed(b""), "not JSON", None),
    "text after the JSON": (packed(b"{}\0\0"), "not JSON", None),
    "byte order mark": (packed(b"\xef\xbb\xbf{}"), "not JSON", None),
    "bad UTF-8": (packed(b'{"\xff": {}}'), "not UTF-8", None),
    "cut data": (packed(TWO, b"\0" * 15), "cut short", None),
    "trailing bytes": (packed(TWO, b"\0" * 17), "1 bytes after the last tensor", None),
    "overlap": (packed({**TWO, "b": entry(data_offsets=[4, 12])}, b"\0" * 12), "overlaps", "b"),
    "hole": (packed({**TWO, "b": entry(data_offsets=[12, 20])}, b"\0" * 20), "gap", "b"),
    "first offset not 0": (packed({"a": entry(data_offsets=[8, 16])}, b"\0" * 16), "gap", "a"),
    "reversed offsets": (packed({"a": entry(data_offsets=[8, 0])}, b"\0" * 8), "backwards", "a"),
    "three offsets": (packed({"a": entry(data_offsets=[0, 8, 8])}, b"\0" * 8), "not two whole numbers", "a"),
    "size mismatch": (packed({"a": entry(shape=[3])}, b"\0" * 8), "takes 12 bytes", "a"),
    "odd number of half bytes": (packed({"a": entry(dtype="F4", shape=[3], data_offsets=[0, 2])}, b"\0\0"), "1.5", "a"),
    "unknown dtype": (packed({"a": entry(dtype="F33")}, b"\0" * 8), "unknown dtype 'F33'", "a"),
    "dtype in small letters": (packed({"a": entry(dtype="f32")}, b"\0" * 8), "unknown dtype 'f32'", "a"),
    "negative shape": (packed({"a": entry(shape=[-2])}, b"\0" * 8), "shape [-2]", "a"),
    "fractional shape": (packed({"a": entry(shape=[2.0])}, b"\0" * 8), "shape [2.0]", "a"),
    "negative zero": (packed(b'{"a": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}'), "shape [-0.0]", "a"),
    "shape of booleans": (packed({"a": entry(shape=[True, 2])}, b"\0" * 8), "shape [True, 2]", "a"),
    "no dtype": (packed({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8), "dtype None", "a"),
    "no shape": (packed({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, b"\0" * 8), "shape None", "a"),
    "no offsets": (packed({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), "data_offsets None", "a"),
    "entry that is a number": (packed({"a": 7}), "JSON number", "a"),
    "header that is a list": (packed([]), "JSON list", None),
    "metadata of numbers": (packed({"__metadata__": {"step": 7}, "a": entry()}, b"\0" * 8), "strings", "__metadata__"),
    "metadata that is a list": (packed({"__metadata__": [], "a": entry()}, b"\0" * 8), "strings", "__metadata__"),
    "2**80 elements": (packed({"a": entry(shape=[1 << 40, 1 << 40])}, b"\0" * 8), "2**61 bytes", "a"),
    "2**1240 elements": (packed({"a": entry(shape=[1 << 62] * 20)}, b"\0" * 8), "2**61 bytes", "a"),
    "overflow that a zero hides": (packed({"a": entry(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0])}), "2**61", "a"),
    "field stated twice": (packed(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "twice", "dtype"),
    "not a number": (packed(b'{"a": {"dtype": "F32", "shape": [NaN]}}'), "NaN", None),
    "infinite number": (packed(b'{"a": {"dtype": "F32", "shape": [1e999]}}'), "1e999", None),
    "100,000 digits": (packed(b'{"a": {"shape": [' + b"9" * 100_000 + b"]}}"), "100000 digits", None),
    "nested lists": (packed({"a": entry(x=json.loads("[" * 200 + "]" * 200))}, b"\0" * 8), "nests", None),
    "endless nesting": (packed(b'{"a": ' + b"[" * 200_000), "nests too deeply", None),
    "half a surrogate pair": (packed(b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', b"\0" * 8),
                              "surrogate", None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_header_is_one_line_that_names_file_and_key(tmp_path: Path, name: str) -> None:
    content, says, key = REFUSED[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    error = refusal(read_safetensors, file)
    assert says in error.message
    assert error.key == key
    assert len(str(error)) < 400 + len(str(file))
    assert not safetensors_opens(file), "the reference reader takes this file, so it belongs to the next table"


#: What safetensors takes and this reader does not: accidents of its parser, which no writer makes.
STRICTER: dict[str, bytes] = {
    "tensor stated twice": packed(b'{"a": %b, "a": %b}' % ((json.dumps(GOOD).encode(),) * 2), b"\0" * 8),
    "entry as a list": packed({"a": ["F32", [2], [0, 8]]}, b"\0" * 8),
    "dtype as an object": packed({"a": entry(dtype={"F32": None})}, b"\0" * 8),
    "zero-size tensor of 2**63 rows": packed({"a": entry(shape=[1 << 63, 0], data_offsets=[0, 0])}),
    "100 nested lists": packed({"a": entry(x=json.loads("[" * 100 + "]" * 100))}, b"\0" * 8),
}


@pytest.mark.parametrize("name", STRICTER)
def test_what_only_safetensors_takes_is_refused_on_purpose(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(STRICTER[name])
    assert safetensors_opens(file)
    refusal(read_safetensors, file)


ACCEPTED: dict[str, tuple[bytes, dict[str, tuple[str, tuple[int, ...]]]]] = {
    "one tensor": (packed({"a": entry()}, b"\0" * 8), {"a": ("float32", (2,))}),
    "no tensors": (packed({}), {}),
    "metadata": (packed({"__metadata__": {"format": "pt"}, "a": entry()}, b"\0" * 8), {"a": ("float32", (2,))}),
    "null metadata": (packed({"__metadata__": None, "a": entry()}, b"\0" * 8), {"a": ("float32", (2,))}),
    "spaces around": (packed(b"  \n" + json.dumps({"a": entry()}).encode() + b"   ", b"\0" * 8), {"a": ("float32", (2,))}),
    "scalar": (packed({"a": entry(shape=[], data_offsets=[0, 4])}, b"\0" * 4), {"a": ("float32", ())}),
    "zero-size between others": (
        packed({**TWO, "z": entry(shape=[0, 5], data_offsets=[8, 8])}, b"\0" * 16),
        {"a": ("float32", (2,)), "b": ("float32", (2,)), "z": ("float32", (0, 5))},
    ),
    "out of order": (
        packed({"b": entry(data_offsets=[8, 16]), "a": entry()}, b"\0" * 16),
        {"a": ("float32", (2,)), "b": ("float32", (2,))},
    ),
    "a key that no reader knows": (packed({"a": entry(note="hello")}, b"\0" * 8), {"a": ("float32", (2,))}),
    "odd names": (
        packed({"": entry(), "line\nend \x1b[31m \u00fc": entry(data_offsets=[8, 16])}, b"\0" * 16),
        {"": ("float32", (2,)), "line\nend \x1b[31m \u00fc": ("float32", (2,))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_good_header_is_read(tmp_path: Path, name: str) -> None:
    content, due = ACCEPTED[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert safetensors_opens(file)
    assert {header.name: (header.dtype, header.shape) for header in read_safetensors(file)} == due


@pytest.mark.parametrize("dtype", [*DTYPE_BITS, "C128", "U4", "I4", "F128", "F8_E4M3B11FNUZ"])
def test_dtypes_are_those_that_safetensors_knows(tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "model.safetensors"
    size = 16 * DTYPE_BITS.get(dtype, 8) // 8
    file.write_bytes(packed({"a": entry(dtype=dtype, shape=[16], data_offsets=[0, size])}, b"\0" * size))
    assert safetensors_opens(file) == (dtype in DTYPE_BITS)
    if dtype in DTYPE_BITS:
        (header,) = read_safetensors(file)
        assert header.is_float == dtype.startswith(("F", "BF"))
        assert header.numel == 16
    else:
        refusal(read_safetensors, file)


@pytest.mark.parametrize("dtype", sorted(set(TORCH_NAMES) - {"F6_E2M3", "F6_E3M2"}))
def test_dtype_names_are_those_of_torch(tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "model.safetensors"
    size = 16 * DTYPE_BITS[dtype] // 8
    file.write_bytes(packed({"a": entry(dtype=dtype, shape=[16], data_offsets=[0, size])}, b"\0" * size))
    directory(tmp_path)
    value = Checkpoint.open(tmp_path).tensor("a")
    assert str(value.dtype) == f"torch.{TORCH_NAMES[dtype]}"


_DTYPES = st.sampled_from(
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64),
    ]
)
_NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda name: name != "__metadata__")
_TENSORS = st.dictionaries(_NAMES, st.tuples(_DTYPES, st.lists(st.integers(0, 4), max_size=3)), max_size=6)


def saved(file: Path, drawn: Mapping[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str] | None) -> None:
    save_file({name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in drawn.items()}, file, metadata)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(drawn=_TENSORS, metadata=st.none() | st.dictionaries(_NAMES, _NAMES, min_size=1, max_size=2))
def test_whatever_safetensors_writes_is_read_as_written(
    scratch: Path, drawn: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str] | None
) -> None:
    # No tensors with empty metadata is left out: safetensors 0.8.0 writes a file there that it cannot read.
    file = scratch / "written.safetensors"
    saved(file, drawn, metadata)
    found = {header.name: (f"torch.{header.dtype}", list(header.shape)) for header in read_safetensors(file)}
    assert found == {name: (str(dtype), shape) for name, (dtype, shape) in drawn.items()}


def judged(file: Path) -> None:
    """This reader must refuse whatever safetensors refuses, and only ever with its own error."""
    try:
        read_safetensors(file)
    except CheckpointError:
        return
    assert safetensors_opens(file), "read here, and refused by safetensors"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(drawn=_TENSORS.filter(bool), data=st.data())
def test_a_cut_file_is_refused_at_every_length(
    scratch: Path, drawn: dict[str, tuple[torch.dtype, list[int]]], data: st.DataObject
) -> None:
    file = scratch / "cut.safetensors"
    saved(file, drawn, None)
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1), label="bytes kept")])
    assert not safetensors_opens(file)
    refusal(read_safetensors, file)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(drawn=_TENSORS.filter(bool), data=st.data())
def test_flipped_bits_never_make_this_reader_more_trusting_than_safetensors(
    scratch: Path, drawn: dict[str, tuple[torch.dtype, list[int]]], data: st.DataObject
) -> None:
    file = scratch / "flipped.safetensors"
    saved(file, drawn, {"a": "b"})
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for place in data.draw(st.lists(st.integers(0, end * 8 - 1), min_size=1, max_size=3, unique=True), label="bits"):
        content[place // 8] ^= 1 << place % 8
    file.write_bytes(bytes(content))
    judged(file)


_SCRAPS = st.recursive(
    st.sampled_from([0, 1, 2, 4, 8, -1, 0.0, 1 << 62, 1 << 64, 10**310, True, None, "F32", "U8", "F4", "\u00e9"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.fixed_dictionaries(
            {"dtype": st.sampled_from(["F32", "U8", "F4"]), "shape": st.lists(st.integers(0, 4), max_size=2)},
            optional={"data_offsets": st.just([0, 4]) | _SCRAPS, "x": _SCRAPS},
        )
        | _SCRAPS,
        max_size=3,
    ),
    size=st.sampled_from([0, 1, 4, 8]),
)
def test_made_up_headers_never_make_this_reader_more_trusting_than_safetensors(
    scratch: Path, header: dict[str, Any], size: int
) -> None:
    file = scratch / "made-up.safetensors"
    file.write_bytes(packed(header, b"\0" * size))
    judged(file)


# --- JSON ------------------------------------------------------------------------------------------------------------

BAD_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\t", "is empty"),
    "a list": (b"[]", "JSON list"),
    "a string": (b'"llama"', "JSON string"),
    "null": (b"null", "JSON null"),
    "true": (b"true", "JSON boolean"),
    "a number": (b"3", "JSON number"),
    "cut": (b'{"a": [1, 2', "line 1, column 12"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "a key twice": (b'{"a": 1, "b": {"c": 2, "c": 2}}', "'c' twice"),
    "NaN": (b'{"eps": NaN}', "NaN"),
    "minus infinity": (b'{"eps": -Infinity}', "-Infinity"),
    "beyond any float": (b'{"eps": 1e999}', "1e999"),
    "100,000 digits": (b'{"n": ' + b"1" * 100_000 + b"}", "100000 digits"),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nests too deeply"),
    "less deep": (b'{"a":' * 100 + b"1" + b"}" * 100, "nests more than 64 deep"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "HTML page": (b"\xef\xbb\xbf<!doctype html>", "HTML"),
    "a zip": (b"PK\x03\x04....", "zip archive"),
    "half a surrogate pair": (b'{"a": "\\uDC00"}', "surrogate"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json_is_one_line_that_names_the_file(tmp_path: Path, name: str) -> None:
    content, says = BAD_JSON[name]
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert says in refusal(read_json_object, file).message


def test_good_json_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": [1, -2, 3e-5, null, true, "\\ud83d\\ude00"], "deep": ' + b"[" * 60 + b"]" * 60 + b"}")
    assert read_json_object(file)["a"] == [1, -2, 3e-5, None, True, "\U0001f600"]


def test_repeated_keys_cost_no_more_than_others(tmp_path: Path) -> None:
    # Counting each name in the list of names took minutes for this file.
    file = tmp_path / "config.json"
    file.write_text("{" + ", ".join(f'"{number}": 0' for number in range(300_000)) + ', "7": 0}')
    started = time.perf_counter()
    assert refusal(read_json_object, file).key == "7"
    assert time.perf_counter() - started < 10


def test_an_index_of_many_absent_shards_costs_no_more_than_others(tmp_path: Path) -> None:
    weight_map = {str(number): f"{number}.safetensors" for number in range(30_000)}
    directory(tmp_path, files={INDEX_NAME: json.dumps({"weight_map": weight_map}).encode()})
    started = time.perf_counter()
    assert len(Checkpoint.open(tmp_path).index_faults) == 30_000
    assert time.perf_counter() - started < 10


# --- what is no file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.bin", INDEX_NAME])
@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling link", "link to itself"])
def test_what_is_no_file_is_a_fault_and_is_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "draft"
    directory(path)
    place = path / name
    place.unlink(missing_ok=True)
    if kind == "directory":
        place.mkdir()
    elif kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no pipes on this system")
        os.mkfifo(place)
    else:
        place.symlink_to(place if kind == "link to itself" else tmp_path / "nowhere")
    # In a process of its own, so that waiting for a writer fails this test and does not hang the run.
    script = (
        "import sys; from pytest_specdecode.checkpoint import Checkpoint; from pytest_specdecode.errors import DraftError\n"
        "try: found = Checkpoint.open(sys.argv[1])\n"
        "except DraftError as error: print(error)\n"
        "else: print(*found.faults, *found.index_faults, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith(str(path))
    assert name in line or (name == "config.json" and kind.endswith("itself"))


def test_no_checkpoint_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    places = {"nowhere": "No such file", "file": "is a file; give the directory", "empty": "holds no config.json"}
    for name, says in places.items():
        assert says in refusal(Checkpoint.open, tmp_path / name).message
    refusal(Checkpoint.open, tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="null byte"):
        Checkpoint.open("a\0b")


def test_a_directory_that_may_not_be_entered_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory(tmp_path)
    real = Path.stat

    def refuse(self: Path, **kwargs: Any) -> os.stat_result:
        if self.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return real(self, **kwargs)

    monkeypatch.setattr(Path, "stat", refuse)
    assert "Permission denied" in refusal(Checkpoint.open, tmp_path).message


def test_a_file_that_may_not_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory(tmp_path, files={"model.safetensors": packed({})})
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
        if str(path).endswith("model.safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    (fault,) = Checkpoint.open(tmp_path).faults
    assert str(fault) == f"{tmp_path / 'model.safetensors'}: cannot be read: Permission denied"


# --- directories -------------------------------------------------------------------------------------------------------


def one(name: str) -> bytes:
    return packed({name: entry()}, b"\0" * 8)


def indexed(weight_map: object, total_size: object = 16) -> bytes:
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}).encode()


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    shards = {"a-1.safetensors": one("a"), "a-2.safetensors": one("b")}
    index = indexed({"a": "a-1.safetensors", "b": "a-2.safetensors"})
    found = Checkpoint.open(directory(tmp_path, files={**shards, INDEX_NAME: index}))
    assert {name: header.file for name, header in found.tensors.items()} == {
        "a": "a-1.safetensors",
        "b": "a-2.safetensors",
    }
    assert found.complete
    assert found.has_index
    assert (found.files, found.unindexed, found.index_total_size) == (sorted(shards), [], 16)
    assert found.num_parameters == 4


#: name: (files, weight_map, (key, what the message says) of each fault)
CONTRADICTIONS: dict[str, tuple[dict[str, bytes], object, list[tuple[str, str]]]] = {
    "absent shard": (
        {"1.safetensors": one("a")},
        {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"},
        [("weight_map", "shard 2.safetensors is named for 2 tensors")],
    ),
    "tensor in two shards": (
        {"1.safetensors": one("a"), "2.safetensors": packed(TWO, b"\0" * 16)},
        {"a": "1.safetensors", "b": "2.safetensors"},
        [("a", "stored twice, in 1.safetensors and in 2.safetensors")],
    ),
    "tensor in two shards, the second named": (
        {"1.safetensors": packed(TWO, b"\0" * 16), "2.safetensors": one("a")},
        {"a": "2.safetensors", "b": "1.safetensors"},
        [("a", "stored twice")],
    ),
    "tensor in no shard": (
        {"1.safetensors": one("a")},
        {"a": "1.safetensors", "b": "1.safetensors"},
        [("b", "1.safetensors, which does not hold it")],
    ),
    "tensor in another shard": (
        {"1.safetensors": one("a"), "2.safetensors": one("b")},
        {"a": "2.safetensors", "b": "1.safetensors"},
        [("a", "2.safetensors, which does not hold it; 1.safetensors does"), ("b", "2.safetensors does")],
    ),
    "tensor that the index does not name": (
        {"1.safetensors": packed(TWO, b"\0" * 16)},
        {"a": "1.safetensors"},
        [("b", "the index does not name it")],
    ),
    "shard in the parent": ({}, {"a": "../1.safetensors"}, [("weight_map.a", "not a plain file name")]),
    "absolute shard": ({}, {"a": "/etc/passwd"}, [("weight_map.a", "not a plain file name")]),
    "shard in a folder": ({}, {"a": "x/1.safetensors"}, [("weight_map.a", "not a plain file name")]),
    "parent as a shard": ({}, {"a": ".."}, [("weight_map.a", "not a plain file name")]),
    "empty shard name": ({}, {"a": ""}, [("weight_map.a", "not a plain file name")]),
    "shard name with a null byte": ({}, {"a": "1\0.safetensors"}, [("weight_map", "not in the directory")]),
    "shard that is a number": ({}, {"a": 1}, [("weight_map.a", "not a plain file name")]),
    "map that is a list": ({}, ["a"], [("weight_map", "JSON list")]),
    "no map": ({}, None, [("weight_map", "JSON null")]),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_index_that_contradicts_its_shards_is_a_fault(tmp_path: Path, name: str) -> None:
    files, weight_map, due = CONTRADICTIONS[name]
    found = Checkpoint.open(directory(tmp_path, files={**files, INDEX_NAME: indexed(weight_map)}))
    assert not found.complete
    assert not found.faults
    assert [fault.key for fault in found.index_faults] == [key for key, _ in due]
    for fault, (_, says) in zip(found.index_faults, due, strict=True):
        assert says in fault.message
        assert str(tmp_path) in str(fault)
        assert str(fault).isprintable()


def test_an_index_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    found = Checkpoint.open(directory(tmp_path, files={INDEX_NAME: b"{", "1.safetensors": one("a")}))
    (fault,) = found.index_faults
    assert fault.path == str(tmp_path / INDEX_NAME)
    assert (found.complete, found.has_index, found.has_weights) == (False, True, True)


def test_a_broken_shard_is_its_own_fault_only(tmp_path: Path) -> None:
    shards = {"1.safetensors": one("a"), "2.safetensors": one("b")[:-1]}
    index = indexed({"a": "1.safetensors", "b": "2.safetensors"})
    found = Checkpoint.open(directory(tmp_path, files={**shards, INDEX_NAME: index}))
    assert [fault.path for fault in found.faults] == [str(tmp_path / "2.safetensors")]
    assert not found.index_faults
    assert list(found.tensors) == ["a"]


def test_weights_beside_the_index_are_listed_and_not_read(tmp_path: Path) -> None:
    files = {
        "1.safetensors": one("a"),
        "consolidated.safetensors": b"junk",
        INDEX_NAME: indexed({"a": "1.safetensors"}),
    }
    found = Checkpoint.open(directory(tmp_path, files=files))
    assert found.unindexed == ["consolidated.safetensors"]
    assert found.complete


@pytest.mark.parametrize("total", [None, -1, "16", 1.5, True, 10**30])
def test_a_total_size_that_is_no_size_is_none(tmp_path: Path, total: object) -> None:
    files = {"1.safetensors": one("a"), INDEX_NAME: indexed({"a": "1.safetensors"}, total)}
    assert Checkpoint.open(directory(tmp_path, files=files)).index_total_size is None


def test_files_without_an_index_are_all_read_and_may_not_repeat_a_tensor(tmp_path: Path) -> None:
    found = Checkpoint.open(directory(tmp_path, files={"x.safetensors": one("a"), "y.safetensors": one("a")}))
    (fault,) = found.index_faults
    assert "x.safetensors and in y.safetensors" in fault.message


def test_a_configuration_alone_has_no_weights_and_a_broken_file_counts_as_weights(tmp_path: Path) -> None:
    alone = Checkpoint.open(directory(tmp_path / "alone"))
    assert (alone.has_weights, alone.complete, alone.faults) == (False, False, [])
    broken = Checkpoint.open(directory(tmp_path / "broken", files={"model.safetensors": b"junk"}))
    assert (broken.has_weights, broken.complete, len(broken.faults)) == (True, False, 1)


def test_a_broken_configuration_costs_the_configuration_only(tmp_path: Path) -> None:
    directory(tmp_path, files={"model.safetensors": one("a"), "config.json": b"{"})
    found = Checkpoint.open(tmp_path)
    assert [fault.path for fault in found.faults] == [str(tmp_path / "config.json")]
    assert (dict(found.config), list(found.tensors)) == ({}, ["a"])


# --- pickles -----------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def pickled(file: Path, value: object, *, zipped: bool) -> None:
    torch.save(value, file, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "raw"])
def test_pickles_are_read_and_listed(tmp_path: Path, zipped: bool) -> None:
    value = {"a": torch.arange(6.0).reshape(2, 3), "d2t": torch.tensor([0, 3, 5]), "step": 7}
    pickled(tmp_path / "pytorch_model.bin", value, zipped=zipped)
    found = Checkpoint.open(directory(tmp_path))
    assert found.complete, found.faults
    assert found.pickles == ["pytorch_model.bin"]
    assert {header.name: (header.dtype, header.shape) for header in found.tensors.values()} == {
        "a": ("float32", (2, 3)),
        "d2t": ("int64", (3,)),
    }
    assert torch.equal(found.tensor("a", slice(1, 2)), value["a"][1:2])
    assert list(found.integers("d2t")) == [0, 3, 5]
    assert torch.equal(torch.cat(list(found.chunks("a", max_bytes=1))), value["a"])


def test_pickled_shards_are_read_through_their_index(tmp_path: Path) -> None:
    pickled(tmp_path / "1.bin", {"a": torch.zeros(2)}, zipped=True)
    pickled(tmp_path / "2.bin", {"b": torch.zeros(2)}, zipped=False)
    index = indexed({"a": "1.bin", "b": "2.bin"})
    found = Checkpoint.open(directory(tmp_path, files={PICKLE_INDEX_NAME: index}))
    assert found.complete, found.faults
    assert {name: header.file for name, header in found.tensors.items()} == {"a": "1.bin", "b": "2.bin"}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "raw"])
def test_a_pickle_never_runs_code(tmp_path: Path, zipped: bool) -> None:
    mark = tmp_path / "ran"
    pickled(tmp_path / "pytorch_model.bin", {"a": torch.zeros(1), "b": Bomb(mark)}, zipped=zipped)
    (fault,) = Checkpoint.open(directory(tmp_path)).faults
    assert not mark.exists()
    assert "weights_only=True" in fault.message
    assert fault.path == str(tmp_path / "pytorch_model.bin")
    assert str(fault).isprintable()


def test_a_plain_pickle_bomb_never_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    directory(tmp_path, files={"pytorch_model.bin": pickle.dumps(Bomb(mark))})
    assert len(Checkpoint.open(tmp_path).faults) == 1
    assert not mark.exists()


BAD_PICKLES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "weights_only=True"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "HTML page": (b"<html>", "HTML"),
    "junk": (b"junk" * 30, "weights_only=True"),
    "cut zip": (b"PK\x03\x04" + b"\0" * 100, "weights_only=True"),
    "stack underflow": (b"\x80\x02\x85.", "weights_only=True"),
    "unknown memo": (b"\x80\x02h\x07.", "weights_only=True"),
    "a bare pickle": (pickle.dumps({"a": 1}, protocol=2), "weights_only=True"),
}


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_a_bad_pickle_is_one_fault(tmp_path: Path, name: str) -> None:
    content, says = BAD_PICKLES[name]
    directory(tmp_path, files={"pytorch_model.bin": content})
    (fault,) = Checkpoint.open(tmp_path).faults
    assert says in fault.message
    assert fault.path == str(tmp_path / "pytorch_model.bin")
    assert str(fault).isprintable()


def test_a_pickle_of_a_list_is_a_fault(tmp_path: Path) -> None:
    pickled(tmp_path / "pytorch_model.bin", [torch.zeros(1)], zipped=True)
    (fault,) = Checkpoint.open(directory(tmp_path)).faults
    assert fault.message == "holds a list; a dictionary of tensors was due"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(data=st.data())
def test_damaged_pickles_are_faults_or_read(scratch: Path, data: st.DataObject) -> None:
    zipped = data.draw(st.booleans(), label="zip")
    file = scratch / "pytorch_model.bin"
    pickled(file, {"a": torch.arange(4.0), "d2t": torch.arange(3)}, zipped=zipped)
    content = bytearray(file.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) * 8 - 1), min_size=1, max_size=4), label="bits"):
        content[place // 8] ^= 1 << place % 8
    file.write_bytes(bytes(content[: data.draw(st.integers(1, len(content)), label="bytes kept")]))
    directory(scratch)
    Checkpoint.open(scratch)


# --- values ------------------------------------------------------------------------------------------------------------

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_what_torch_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    limits = None if dtype == torch.bool else torch.iinfo(dtype)
    values = [0, 1, 1, 0] if limits is None else [limits.min, limits.max, 0, 1]
    # A tensor before it, of odd size, so that reading from the wrong place cannot give the right numbers.
    save_file(
        {"a": torch.full((3,), 9, dtype=torch.uint8), "d2t": torch.tensor(values, dtype=dtype)},
        tmp_path / "m.safetensors",
    )
    found = Checkpoint.open(directory(tmp_path))
    assert [int(value) for value in found.integers("d2t")] == values
    assert found.tensor("d2t").tolist() == [bool(value) if limits is None else value for value in values]


def test_integers_refuses_what_is_none(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "m.safetensors")
    found = Checkpoint.open(directory(tmp_path))
    with pytest.raises(CheckpointError, match="float32; an integer type was due"):
        found.integers("a")
    for read in (found.integers, found.tensor):
        with pytest.raises(CheckpointError, match="no tensor of this name") as caught:
            read("b")
        assert caught.value.key == "b"


@settings(deadline=None, max_examples=40, derandomize=True)
@given(rows=st.integers(0, 9), columns=st.none() | st.integers(0, 5), max_bytes=st.integers(1, 200))
def test_chunks_are_the_tensor_in_bounded_pieces(scratch: Path, rows: int, columns: int | None, max_bytes: int) -> None:
    path = directory(scratch / "chunks")
    shape = (rows,) if columns is None else (rows, columns)
    value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    save_file({"a": value, "scalar": torch.tensor(3.0)}, path / "m.safetensors")
    found = Checkpoint.open(path)
    pieces = list(found.chunks("a", max_bytes))
    assert torch.equal(torch.cat(pieces), value)
    assert torch.equal(found.tensor("a"), value)
    assert all(piece.nbytes <= max_bytes or piece.shape[0] == 1 for piece in pieces)
    assert [piece.item() for piece in found.chunks("scalar", max_bytes)] == [3.0]


def test_rows_are_rows(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(4, 3)
    save_file({"a": value}, tmp_path / "m.safetensors")
    found = Checkpoint.open(directory(tmp_path))
    assert torch.equal(found.tensor("a", slice(1, 3)), value[1:3])
    found.close()
    assert torch.equal(found.tensor("a"), value)


@pytest.mark.parametrize("change", ["removed", "cut", "replaced"])
def test_data_that_goes_away_after_opening_is_an_error(tmp_path: Path, change: str) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"d2t": torch.arange(5)}, file)
    found = Checkpoint.open(directory(tmp_path))
    if change == "removed":
        file.unlink()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        save_file({"other": torch.arange(2)}, file)
    for read in (found.tensor, found.integers):
        with pytest.raises(CheckpointError) as caught:
            read("d2t")
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_torch_has_not_is_an_error_on_loading(tmp_path: Path, dtype: str) -> None:
    content = packed({"a": entry(dtype=dtype, shape=[4], data_offsets=[0, 3])}, b"\0" * 3)
    found = Checkpoint.open(directory(tmp_path, files={"m.safetensors": content}))
    with pytest.raises(CheckpointError, match=r"m\.safetensors: a: data cannot be read"):
        found.tensor("a")


# --- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, -0.0625, 3e-5, 448.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_number_is_the_one_that_torch_loads(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    tensors = {"a": torch.tensor(7.0, dtype=dtype), "k_scale": torch.tensor([value], dtype=dtype)}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    found = Checkpoint.open(tmp_path)
    assert found.number("k_scale") == float(tensors["k_scale"])
    assert found.number("a") == 7.0


def test_what_is_not_one_plain_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(
        {"two": torch.ones(2), "whole": torch.tensor(1), "narrow": torch.ones(1).to(torch.float8_e4m3fn)},
        tmp_path / "model.safetensors",
    )
    found = Checkpoint.open(tmp_path)
    assert found.number("whole") is None
    assert found.number("narrow") is None
    for name in ("two", "absent"):
        with pytest.raises(CheckpointError, match=r"more than one value|no tensor of this name"):
            found.number(name)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        (lambda t: t.clone(), True),
        (lambda t: t.float(), True),
        (lambda t: t.half(), True),
        (lambda t: t.index_fill(0, torch.tensor([len(t) - 1]), 9.0), False),
        (lambda t: (t.float() * 1.01).float(), False),
        (lambda t: t.float().roll(1, 0), False),
        (lambda t: t[:-1].clone(), False),
        (lambda t: t.to(torch.float8_e5m2), False),
    ],
    ids=["copy", "float32", "float16", "last row differs", "one percent more", "rows moved", "shorter", "narrow"],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_a_copy_is_one_over_blocks_and_dtypes(
    change: Callable[[torch.Tensor], torch.Tensor],
    due: bool,
    pickled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the tensors are longer than a block, and the last one tells."""
    monkeypatch.setattr("pytest_specdecode.checkpoint._BLOCK", 96)
    one = (torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    tensors = {"one": one, "other": change(one)}
    (tmp_path / "config.json").write_text("{}")
    if pickled:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    found = Checkpoint.open(tmp_path)
    assert found.same("one", "other") is due


def test_a_cast_copy_is_one_in_either_direction(tmp_path: Path) -> None:
    wide = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    (tmp_path / "config.json").write_text("{}")
    save_file({"narrow": wide.bfloat16(), "wide": wide}, tmp_path / "model.safetensors")
    found = Checkpoint.open(tmp_path)
    assert found.same("narrow", "wide")
    assert not found.same("wide", "narrow"), "what was rounded is no copy in float32"
    with pytest.raises(CheckpointError, match="no tensor of this name"):
        found.same("narrow", "absent")


_OPEN = """
import sys
from pytest_specdecode.checkpoint import Checkpoint
# Not ru_maxrss: a child process starts with its parent's.
kib = lambda field: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
before = kib("VmRSS")
found = Checkpoint.open(sys.argv[1])
assert found.complete, (found.faults, found.index_faults)
list(found.integers("d2t"))
grown = kib("VmHWM") - before
heavy = sorted({"torch", "numpy", "safetensors", "triton", "hypothesis"} & set(sys.modules))
print(grown, ",".join(heavy))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files and /proc")
def test_opening_imports_nothing_heavy_and_does_not_read_the_data(tmp_path: Path) -> None:
    size = 1 << 36
    header = {"a": entry(dtype="U8", shape=[size], data_offsets=[0, size])}
    header["d2t"] = entry(dtype="I64", shape=[4], data_offsets=[size, size + 32])
    directory(tmp_path, files={"model.safetensors": packed(header)})
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) + size + 32)
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    grown, heavy = done.stdout.strip("\n").split(" ")
    assert heavy == ""
    assert int(grown) < 4096, f"{grown} KiB more for a file of 64 GiB"
