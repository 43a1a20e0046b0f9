"""Checkpoints for tests: small real ones, broken ones, and true headers over a hole.

A tiny configuration of each family, the tensors that its spec calls for filled from a seed, and writers to disk. What is written is what
the family's own data sheet demands, so a test changes one thing and knows that everything else is right.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_specdecode.checkpoint import CONFIG_NAME, DTYPE_BITS, INDEX_NAME, Checkpoint
from pytest_specdecode.families import FAMILIES, Family
from pytest_specdecode.families.base import ExpectedTensor, open_view
from pytest_specdecode.spec import DraftSpec

if TYPE_CHECKING:
    import torch

__all__ = [
    "expected_tensors",
    "random_tensors",
    "stored_names",
    "tiny_config",
    "write_checkpoint",
    "write_sparse",
    "write_tiny",
]


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A small complete `config.json` of `family`, with `changes` at the top level; a change to `...` drops the key."""
    config: dict[str, Any] = json.loads(json.dumps(_family(family).tiny))
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    return config


def stored_names(config: Mapping[str, Any], family: str) -> Callable[[str], str]:
    """From canonical names to those on disk, as `family` writes the draft of `config`; what `write_checkpoint` takes as `rename`."""
    sheet = _family(family)
    checkpoint = Checkpoint(Path("config"))
    checkpoint.config = config
    view = open_view(checkpoint)
    spec = sheet.parse(view)
    return lambda name: sheet.stored_name(name, view.root, spec)


def expected_tensors(config: Mapping[str, Any], family: str) -> tuple[DraftSpec, tuple[ExpectedTensor, ...]]:
    """The spec that `config` states as `family`, and the tensors that it calls for."""
    sheet = _family(family)
    checkpoint = Checkpoint(Path("config"))
    checkpoint.config = config
    spec = sheet.parse(open_view(checkpoint))
    return spec, sheet.tensors(spec)


def random_tensors(
    config: Mapping[str, Any], family: str, *, seed: int = 0, dtype: str = "bfloat16"
) -> dict[str, torch.Tensor]:
    """The required tensors of `config`, filled from `seed`, by canonical name.

    Matrices are normal with deviation 1 / sqrt(columns), norms lie around one (around zero where the layer multiplies by 1 + w), `d2t` is
    a random increasing map in offset form and `t2d` its image; other integers are token ids, each once.
    """
    import torch

    spec, tensors = expected_tensors(config, family)
    generator = torch.Generator().manual_seed(seed)
    zero_centred = {layer.index for layer in spec.layers if layer.norm_kind == "gemma"}
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.need != "required":
            continue
        shape = _known_shape(tensor)
        if tensor.name == "d2t":
            found |= _vocabulary_maps(spec, generator)
            continue
        if tensor.kind == "int":
            found[tensor.name] = _token_ids(spec, shape, generator)
            continue
        values = torch.randn(shape, generator=generator)
        centre = 0 if tensor.layer in zero_centred and tensor.name.endswith(".weight") else 1
        values = centre + values / 10 if len(shape) == 1 else values / math.sqrt(shape[-1])
        found[tensor.name] = values.to(getattr(torch, dtype))
    return found


def write_tiny(
    directory: str | os.PathLike[str],
    family: str,
    *,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **changes: Any,
) -> Path:
    """Write a small complete draft of `family` and return its directory.

    Args:
        directory: made where it does not exist.
        family: a family with a tiny configuration.
        config: the configuration to build tensors for; the tiny one with `changes` where None.
        seed: of the weights.
        dtype: torch's name of the weights' dtype.
        edit: changes the tensors in place, by canonical name, before they are written by the family's own names, to break one.
        changes: keys of the configuration; `...` drops one.
    """
    whole = tiny_config(family, **changes) if config is None else dict(config)
    tensors = random_tensors(whole, family, seed=seed, dtype=dtype)
    if edit is not None:
        edit(tensors)
    return write_checkpoint(directory, whole, tensors, rename=stored_names(whole, family))


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    shards: int = 1,
    rename: Callable[[str], str] = lambda name: name,
) -> Path:
    """Write `config` and `tensors` as safetensors, in one file or in `shards` with an index, and return the directory.

    The names are those of `tensors`, changed by `rename`; `stored_names` has a family's own.
    """
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {rename(name): value.contiguous() for name, value in tensors.items()}
    if shards == 1:
        _save(save_file, stored, path / "model.safetensors")
        return path
    names = sorted(stored)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in names[shard::shards]}
        _save(save_file, part, path / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.numel() * value.element_size() for value in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return path


def write_sparse(
    directory: str | os.PathLike[str], config: Mapping[str, Any], family: str, *, dtype: str = "BF16"
) -> Path:
    """Write a checkpoint of real size that takes no room: a true header over a hole that reads as zeros.

    Needs neither torch nor the space. Only the required tensors are described, and `t2d` beside a `d2t`.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    spec, tensors = expected_tensors(config, family)
    rename = stored_names(config, family)
    header: dict[str, Any] = {}
    position = 0
    for tensor in tensors:
        if tensor.need != "required" and not (tensor.name == "t2d" and spec.vocabulary.is_reduced):
            continue
        kind = {"float": dtype, "int": "I64", "bool": "BOOL"}[tensor.kind]
        shape = _known_shape(tensor)
        size = math.prod(shape) * DTYPE_BITS[kind] // 8
        header[rename(tensor.name)] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
    return path


def _save(save_file: Callable[..., None], tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)


def _token_ids(spec: DraftSpec, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Different target ids: all of them in some order, or some of them rising."""
    import torch

    count = math.prod(shape)
    order = torch.randperm(spec.vocabulary.vocab_size or count, generator=generator)[:count]
    return (order if count == spec.vocabulary.vocab_size else order.sort().values).view(shape)


def _vocabulary_maps(spec: DraftSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    vocabulary = spec.vocabulary
    assert vocabulary.vocab_size is not None
    assert vocabulary.head_rows is not None
    order = torch.randperm(vocabulary.vocab_size, generator=generator)
    images = order[: vocabulary.head_rows].sort().values
    t2d = torch.zeros(vocabulary.vocab_size, dtype=torch.bool)
    t2d[images] = True
    return {"d2t": images - torch.arange(vocabulary.head_rows), "t2d": t2d}


def _known_shape(tensor: ExpectedTensor) -> tuple[int, ...]:
    if None in tensor.shape:
        raise ValueError(f"{tensor.name}: the configuration does not settle its shape {tensor.shape}")
    return tuple(extent for extent in tensor.shape if extent is not None)


def _family(name: str) -> Family:
    for family in FAMILIES:
        if family.name == name:
            return family
    raise KeyError(f"no family is called {name!r}; known are {', '.join(family.name for family in FAMILIES)}")
