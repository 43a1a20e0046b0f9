"""What any reader of checkpoint directories must do: read all that a valid one holds, and take nothing from a broken one.

The subject is called as `build(path)` and returns a mapping from names on disk to tensors. Where it returns shapes, or headers with a
`shape`, those are compared instead. It may be lazy; every entry is looked at.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_specdecode.checkpoint import INDEX_NAME, PICKLE_INDEX_NAME
from pytest_specdecode.contracts.base import DRAWN, Contract, ContractError, cases, examples
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.numerics import NumericsError, assert_exact
from pytest_specdecode.strategies import DraftFiles, checkpoints
from pytest_specdecode.testing import random_tensors, stored_names, tiny_config, write_checkpoint

Tensors = Mapping[str, Tensor]

_FILE = "model.safetensors"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


class CheckpointReaderContract(Contract):
    """Inherit, and give the implementation:

        class TestMyReader(CheckpointReaderContract):
            build = staticmethod(read_checkpoint)

    Attributes:
        known_gaps: see `Contract`.
    """

    @staticmethod
    def build(path: Path) -> Mapping[str, Any]:
        """The reader under test: from a directory to its tensors by name."""
        raise NotImplementedError("give the implementation under test: build = staticmethod(read_checkpoint)")

    # --- reading ---

    @cases("family", [family.name for family in FAMILIES])
    def test_reads(self, family: str, tmp_path: Path) -> None:
        """A draft of each family, under the names that the family writes."""
        config = tiny_config(family)
        rename = stored_names(config, family)
        tensors = {rename(name): value for name, value in random_tensors(config, family).items()}
        self._read(write_checkpoint(tmp_path / "draft", config, tensors), tensors)

    @cases(
        "packaging",
        [
            "prefixed",
            "joined",
            "speculators",
            "sharded",
            "pickled",
            "pickled-shards",
            "quantised",
            "metadata",
            "empty-tensors",
        ],
    )
    def test_packagings(self, packaging: str, tmp_path: Path) -> None:
        """The same draft in the other ways in which drafts are written."""
        config, tensors = tiny_config("eagle3"), random_tensors(tiny_config("eagle3"), "eagle3")
        if packaging == "prefixed":
            tensors = {f"model.{name}": value for name, value in tensors.items()}
        if packaging == "joined":
            stem = "layers.0.self_attn."
            parts = [tensors.pop(f"{stem}{name}_proj.weight") for name in "qkv"]
            tensors[f"{stem}qkv_proj.weight"] = torch.cat(parts)
        if packaging == "speculators":
            config = {"speculators_model_type": "eagle3", "transformer_layer_config": config}
        if packaging == "empty-tensors":
            tensors |= {"none": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
        if packaging == "quantised":
            stored = {storage: stored_as(storage, tensors) for storage in QUANTISED}
            tensors = {f"{storage}.{name}": value for storage in stored for name, value in stored[storage].items()}
        if packaging.startswith("pickled"):
            shards = 2 if packaging == "pickled-shards" else 1
            self._read(_write_pickled(tmp_path / "draft", config, tensors, shards=shards), tensors)
            return
        path = write_checkpoint(tmp_path / "draft", config, tensors, shards=3 if packaging == "sharded" else 1)
        if packaging == "metadata":
            _rewrite(path / _FILE, lambda entries, data: ({**entries, "__metadata__": {"note": "é"}}, data))
        self._read(path, tensors)

    @cases("rest", [f"tensors{DRAWN}"])
    @examples(20)
    @given(
        shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5),
        dtypes=st.lists(st.sampled_from(_DTYPES), min_size=5, max_size=5),
        shards=st.integers(1, 3),
    )
    def test_reads_any(
        self, rest: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], shards: int
    ) -> None:
        """Any shapes and dtypes, in one file or several."""
        tensors = {
            f"layers.{at}.weight": torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
            for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
        }
        with tempfile.TemporaryDirectory() as folder:
            self._read(write_checkpoint(Path(folder) / "draft", {}, tensors, shards=min(shards, len(tensors))), tensors)

    @cases("rest", [f"drafts{DRAWN}"])
    @examples(40)
    @given(data=st.data())
    def test_reads_any_draft(self, rest: str, data: st.DataObject) -> None:
        """Any draft of any family, as any exporter writes it: its packaging, its names, joined or not, quantised or not, in one file or
        several, pickled or not. What the subject is known not to read is not drawn."""
        files = data.draw(
            checkpoints(max_shards=1 if self.has_gap("sharded") else 3).filter(self._is_read), label="draft"
        )
        storage = data.draw(
            st.sampled_from(("plain", *(() if self.has_gap("quantised") else QUANTISED))), label="storage"
        )
        pickled = not self.has_gap("pickled") and data.draw(st.booleans(), label="pickled")
        tensors = files.tensors if storage == "plain" else stored_as(storage, files.tensors)
        shards = 1 if pickled and self.has_gap("pickled-shards") else min(files.shards, len(tensors))
        write = _write_pickled if pickled else write_checkpoint
        with tempfile.TemporaryDirectory() as folder:
            self._read(write(Path(folder) / "draft", files.config, tensors, shards=shards), tensors)

    # --- refusing ---

    @cases(
        "damage",
        [
            "truncated",
            "trailing-bytes",
            "overlapping",
            "gap",
            "shape-mismatch",
            "duplicate-name",
            "unknown-dtype",
            "header-past-end",
            "not-json",
            "lfs-pointer",
            "stored-twice",
            "missing-shard",
            "absent-tensor",
        ],
    )
    def test_refuses(self, damage: str, tmp_path: Path) -> None:
        """A file whose header and data contradict each other, or an index that the shards contradict."""
        tensors = {"first": torch.arange(4.0), "second": torch.arange(6.0), "third": torch.arange(2.0)}
        if damage in _TO_INDEX:
            path = write_checkpoint(tmp_path / "draft", {}, tensors, shards=2)
            _TO_INDEX[damage](path)
        else:
            path = write_checkpoint(tmp_path / "draft", {}, tensors)
            _TO_FILE[damage](path / _FILE)
        self._refuse(path, damage)

    @cases("rest", [f"cut{DRAWN}"])
    @examples(20)
    @given(kept=st.floats(0.0, 1.0, exclude_max=True), shard=st.integers(0, 1))
    def test_refuses_any_cut(self, rest: str, kept: float, shard: int) -> None:
        """One of two shards that ends too early, wherever."""
        tensors = {name: torch.arange(8.0) for name in ("first", "second")}
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(Path(folder) / "draft", {}, tensors, shards=2)
            file = sorted(path.glob("*.safetensors"))[shard]
            whole = file.read_bytes()
            file.write_bytes(whole[: int(len(whole) * kept)])
            self._refuse(path, f"{file.name} cut to {int(len(whole) * kept)} of {len(whole)} bytes")

    # --- building blocks ---

    def _is_read(self, files: DraftFiles) -> bool:
        """Whether no declared gap says that the subject does not read such a draft."""
        odd = {
            files.family: True,
            "speculators": "speculators_model_type" in files.config,
            "joined": files.joined,
            "prefixed": files.naming != "own",
        }
        return not any(self.has_gap(name) for name, is_so in odd.items() if is_so)

    def _read(self, path: Path, tensors: Tensors) -> None:
        found = self.build(path)
        if set(found) != set(tensors):
            absent, more = sorted(set(tensors) - set(found)), sorted(set(found) - set(tensors))
            raise ContractError(f"tensors not read: {absent}; read and not there: {more}")
        for name, due in tensors.items():
            got = found[name]
            if isinstance(got, Tensor):
                try:
                    assert_exact(got, due, what=name, bits=True, axes=())
                except NumericsError as error:
                    raise ContractError(str(error)) from None
            elif tuple(getattr(got, "shape", got)) != tuple(due.shape):
                raise ContractError(f"{name}: shape {tuple(getattr(got, 'shape', got))}, due {tuple(due.shape)}")

    def _refuse(self, path: Path, damage: str) -> None:
        try:
            found = self.build(path)
            read = {name: found[name] for name in found}
        except Exception:
            return
        raise ContractError(f"{damage}: taken for a checkpoint of {sorted(read)}")


# --- other ways to store a draft ----------------------------------------------------------------------------------------------------------

#: Ways in which quantising exporters store a matrix.
QUANTISED = ("fp8", "compressed-tensors", "gptq", "mlx", "bitsandbytes")


def stored_as(storage: str, tensors: Tensors) -> dict[str, Tensor]:
    """The draft's matrices as a quantising exporter stores them: under its names, in its dtypes and shapes, with what lies beside them.

    The numbers are not those that the exporter would find; a reader returns what is there. A matrix whose extents do not fill words stays.
    """
    generator = torch.Generator().manual_seed(11)
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        stem, _, last = name.rpartition(".")
        fills = value.ndim == 2 and value.is_floating_point() and not any(extent % 8 for extent in value.shape)
        parts = _parts(storage, value, generator) if last == "weight" and fills else {last: value.clone()}
        found |= {f"{stem}.{part}" if stem else part: tensor for part, tensor in parts.items()}
    return found


def _parts(storage: str, value: Tensor, generator: torch.Generator) -> Tensors:
    """What stands in the place of a matrix `[O, I]`, by the last part of its name."""
    rows, columns = value.shape

    def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
        size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 64 if dtype.is_floating_point else 256, (size,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).reshape(shape)

    if storage == "fp8":
        return {
            "weight": value.clamp(-400, 400).to(torch.float8_e4m3fn),
            "weight_scale": numbers(torch.float32, rows, 1),
        }
    if storage == "compressed-tensors":
        return {
            "weight_packed": numbers(torch.int32, rows, columns // 8),
            "weight_scale": numbers(torch.bfloat16, rows, columns // 8),
            "weight_shape": torch.tensor([rows, columns]),
        }
    if storage == "gptq":
        return {
            "qweight": numbers(torch.int32, columns // 8, rows),
            "qzeros": numbers(torch.int32, 1, rows // 8),
            "scales": numbers(torch.float16, 1, rows),
            "g_idx": torch.zeros(columns, dtype=torch.int32),
        }
    if storage == "mlx":
        return {
            "weight": numbers(torch.int32, rows, columns // 8).view(torch.uint32),
            "scales": numbers(torch.bfloat16, rows, columns // 8),
            "biases": numbers(torch.bfloat16, rows, columns // 8),
        }
    state = torch.frombuffer(bytearray(b'{"blocksize": 64}'), dtype=torch.uint8)
    return {
        "weight": numbers(torch.uint8, rows * columns // 2, 1),
        "weight.absmax": numbers(torch.uint8, rows * columns // 8),
        "weight.quant_map": numbers(torch.float32, 16),
        "weight.quant_state.bitsandbytes__nf4": state,
    }


def _write_pickled(directory: Path, config: Mapping[str, Any], tensors: Tensors, *, shards: int = 1) -> Path:
    """`config` and `tensors` as torch.save writes them, in one file or in several with an index."""
    path = write_checkpoint(directory, config, {})
    (path / _FILE).unlink()
    # A view would be written with all that it is a view of.
    held = {name: value.clone() for name, value in tensors.items()}
    if shards == 1:
        torch.save(held, path / "pytorch_model.bin")
        return path
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        part = {name: held[name] for name in sorted(held)[shard::shards]}
        torch.save(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / PICKLE_INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    return path


# --- damage -------------------------------------------------------------------------------------------------------------------------------

Entries = dict[str, Any]


def _rewrite(file: Path, change: Callable[[Entries, bytes], tuple[Entries, bytes]]) -> None:
    """A file with another header, or data."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries, data = change(json.loads(raw[8 : 8 + length]), raw[8 + length :])
    _write(file, json.dumps(entries).encode(), data)


def _write(file: Path, header: bytes, data: bytes) -> None:
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _moved(by: int) -> Callable[[Path], None]:
    """All tensors but the one that lies first, moved in the data, whose length follows."""

    def change(entries: Entries, data: bytes) -> tuple[Entries, bytes]:
        for entry in entries.values():
            start, end = entry.get("data_offsets", (0, 0))
            if start > 0:
                entry["data_offsets"] = [start + by, end + by]
        return entries, data + bytes(by) if by > 0 else data[:by]

    return lambda file: _rewrite(file, change)


def _edited(**fields: Any) -> Callable[[Path], None]:
    def change(entries: Entries, data: bytes) -> tuple[Entries, bytes]:
        entries["second"].update(fields)
        return entries, data

    return lambda file: _rewrite(file, change)


def _named_twice(file: Path) -> None:
    """One entry written twice, so that a reader which keeps the last one sees a whole file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    more = json.dumps({"first": entries["first"]})
    _write(file, f"{more[:-1]}, {json.dumps(entries)[1:]}".encode(), raw[8 + length :])


def _header_past_end(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes((len(raw) + 1).to_bytes(8, "little") + raw[8:])


_TO_FILE: Mapping[str, Callable[[Path], None]] = {
    "truncated": lambda file: _replace(file, lambda raw: raw[:-3]),
    "trailing-bytes": lambda file: _replace(file, lambda raw: raw + bytes(8)),
    "overlapping": _moved(-4),
    "gap": _moved(4),
    "shape-mismatch": _edited(shape=[7]),
    "unknown-dtype": _edited(dtype="F31"),
    "duplicate-name": _named_twice,
    "header-past-end": _header_past_end,
    "not-json": lambda file: _replace(file, lambda raw: raw[:8] + b"!" + raw[9:]),
    "lfs-pointer": lambda file: _replace(
        file, lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 48\n"
    ),
}


def _stored_twice(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    one, other = sorted(path.glob("*.safetensors"))
    save_file({**load_file(one), **load_file(other)}, one)


def _absent_tensor(path: Path) -> None:
    index = json.loads((path / INDEX_NAME).read_text(encoding="utf-8"))
    index["weight_map"]["fourth"] = index["weight_map"]["first"]
    (path / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


_TO_INDEX: Mapping[str, Callable[[Path], None]] = {
    "stored-twice": _stored_twice,
    "missing-shard": lambda path: sorted(path.glob("*.safetensors"))[0].unlink(),
    "absent-tensor": _absent_tensor,
}


def _replace(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))
