"""`Draft`: a checkpoint with what it was recognised as; the one object that checks, fixtures and scripts share.

Opening one needs the configuration and the headers only. Layers and the fused-KV path are built when asked for; that is when torch is
imported and weights are read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_specdecode.checkpoint import CONFIG_NAME, Checkpoint, TensorHeader
from pytest_specdecode.errors import CheckpointError, ConfigError, DraftError, LayerBuildError, printable
from pytest_specdecode.families.base import ExpectedTensor, Family, ReferenceLayer, TensorSource, open_view
from pytest_specdecode.families.quantised import Storage, read_scheme, read_storage
from pytest_specdecode.families.recognise import Recognition
from pytest_specdecode.spec import DraftSpec, Extent

if TYPE_CHECKING:
    import torch

    from pytest_specdecode.fused_kv.latent_path import FusedLatentKV
    from pytest_specdecode.fused_kv.path import FusedKV

#: Projections that a layer joins in memory, with the tensors that they are stored as.
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "kv_proj_target": ("k_proj_target", "v_proj_target")}
#: What stands outside a model's own prefix.
_OUTSIDE = ("lm_head", "d2t", "t2d", "token_map")


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Which stored tensor stands for which expected one.

    Attributes:
        stored: name on disk, by canonical name; a weight that is packed under another name goes by its own.
        twice: names on disk that stand for an already bound canonical name, as (name, canonical name).
        expected: what the spec calls for, by canonical name.
        unexpected: stored tensors that no expected tensor accounts for, by name on disk.
        missing: required tensors that are not stored.
        storage: in which form each weight is stored.
    """

    stored: Mapping[str, str]
    twice: tuple[tuple[str, str], ...]
    expected: Mapping[str, ExpectedTensor]
    unexpected: tuple[str, ...]
    missing: tuple[ExpectedTensor, ...]
    storage: Storage


class Draft:
    """One draft checkpoint.

    Attributes:
        checkpoint: the files.
        recognition: the evidence for its family.
        family: the family, or None where it is not known.
        spec: what the draft is, or None where the family is not known.
        config_faults: configuration values of the wrong type.
        label: a name for reports, where the directory's does not tell drafts apart.
        memo: what one pass over the weights has shown, for all who need it.
        binding: stored against expected tensors; None where the family is not known.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recognition: Recognition,
        family: Family | None,
        spec: DraftSpec | None,
        config_faults: tuple[ConfigError, ...],
    ) -> None:
        self.checkpoint = checkpoint
        self.recognition = recognition
        self.family = family
        self.spec = spec
        self.config_faults = config_faults
        self.label: str | None = None
        self.memo: dict[str, Any] = {}
        self.binding = None if family is None or spec is None else _bind(checkpoint, family, spec)

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.checkpoint.path

    @property
    def name(self) -> str:
        """What tells this draft from others, for people: `label`, else the directory's name. Nothing is decided by it."""
        return printable(self.label or Path(os.path.abspath(self.path)).name)

    @property
    def unread_config(self) -> CheckpointError | None:
        """Why `config.json` could not be read, or None; the spec then says what the tensors alone tell."""
        file = str(self.path / CONFIG_NAME)
        return next((fault for fault in self.checkpoint.faults if fault.path == file), None)

    def header(self, name: str) -> TensorHeader | None:
        """Header of the tensor with the canonical name `name`, or None."""
        if self.binding is None or name not in self.binding.stored:
            return None
        return self.checkpoint.tensors[self.binding.stored[name]]

    def shape(self, name: str) -> tuple[Extent, ...] | None:
        """Shape of the tensor with the canonical name `name`, or None; of a packed weight the plain matrix's, so far as it is known."""
        if (header := self.header(name)) is None or self.binding is None:
            return None
        form = self.binding.storage.forms.get(name)
        return header.shape if form is None else form.shape

    def stored_name(self, name: str) -> str:
        """The name on disk of the tensor with the canonical name `name`; where it is not stored, the one that its neighbours' names give.

        The one place that turns a canonical name into what a person finds in the file.
        """
        if self.binding is None or self.family is None or self.spec is None:
            return name
        if name in self.binding.stored:
            return self.binding.stored[name]
        root = open_view(self.checkpoint).root
        due = self.family.stored_name(name, root, self.spec).split(".")
        if due[0] in _OUTSIDE:
            return ".".join(due)
        # Files carry prefixes and older names of their own; what lies nearest says how this one does.
        for written, stored in sorted(self._spellings(), key=lambda pair: -_shared(pair[0], due)):
            for candidate in _alike(due, written, stored):
                if self.family.canonical(candidate, root) == name:
                    return candidate
        return ".".join(due)

    def stored_layer(self, index: int) -> int:
        """The number by which layer `index` goes in the file: inside a target its layers are counted first."""
        match = re.search(r"(?<=\.)\d+(?=\.)", self.stored_name(f"layers.{index}.input_layernorm.weight"))
        return index if match is None else int(match[0])

    @contextlib.contextmanager
    def naming(self, layer: int | None = None) -> Iterator[None]:
        """Inside, a DraftError about a tensor, of `layer` where it goes by its name within one, gets the name or names on disk."""
        try:
            yield
        except DraftError as error:
            key = error.key or ""
            if error.__dict__.get("names_are_on_disk"):
                raise
            if names := [self.stored_name(name) for name in self._meant(key, layer)]:
                error.key = ", ".join(names)
            elif layer is not None and key.endswith((".weight", ".bias")):
                # A part that several tensors of the layer go by; no tensor is called so.
                error.key = f"{key.rpartition('.')[0]} of layer {self.stored_layer(layer)}"
            error.args = (str(error),)
            error.__dict__["names_are_on_disk"] = True
            raise

    def _meant(self, key: str, layer: int | None) -> list[str]:
        """Canonical names of the tensors that an error about `key` is about; a projection that is joined in memory is its parts."""
        if self.binding is None:
            return []
        known = {*self.binding.expected, *self.binding.stored}
        module, _, end = key.rpartition(".")
        place, _, projection = module.rpartition(".")
        place += "." if place else ""
        for parts in ((projection,), _JOINED.get(projection, ())):
            tails = [f"{place}{part}.{end}" for part in parts]
            found = [name for name in tails if name in known]
            if not found and layer is not None:
                own = sorted(name for name in known if name.startswith(f"layers.{layer}."))
                found = [name for tail in tails for name in own if name.endswith(f".{tail}")]
            if found and len(found) <= len(parts):
                return found
        return []

    def _spellings(self) -> list[tuple[list[str], list[str]]]:
        """Of every stored tensor, the name that its family would write and the one on disk, in parts; made once."""
        if (
            "spellings" not in self.memo
            and self.binding is not None
            and self.family is not None
            and self.spec is not None
        ):
            root = open_view(self.checkpoint).root
            holders = {weight: form.holder for weight, form in self.binding.storage.forms.items()}
            self.memo["spellings"] = [
                (self.family.stored_name(holders.get(name, name), root, self.spec).split("."), stored.split("."))
                for name, stored in self.binding.stored.items()
                if name.split(".")[0] not in _OUTSIDE
            ]
        found: list[tuple[list[str], list[str]]] = self.memo.get("spellings", [])
        return found

    def tensor(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """The tensor with the canonical name `name`, in the stored dtype.

        Raises:
            CheckpointError: it is not stored, or its data cannot be read.
        """
        header = self.header(name)
        if header is None:
            raise CheckpointError("is not in the weights", path=self.path, key=name)
        return self.checkpoint.tensor(header.name, rows)

    def layer(
        self, index: int, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> ReferenceLayer:
        """Reference layer `index`, freshly built.

        Args:
            index: from 0.
            dtype: of the weights and the arithmetic; the stored one where None.
            device: where the weights go.

        Raises:
            LayerBuildError: the spec lacks a value, or a tensor is missing or of the wrong shape.
        """
        family, spec = self._known()
        if not 0 <= index < len(spec.layers):
            raise LayerBuildError(f"layer {index} of a draft with {len(spec.layers)} layers", path=self.path)
        with self.naming(index):
            return family.build_layer(spec, spec.layers[index], _Source(self, dtype, device))

    def layers(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> tuple[ReferenceLayer, ...]:
        """Every reference layer, freshly built; see `layer`."""
        _, spec = self._known()
        return tuple(self.layer(index, dtype=dtype, device=device) for index in range(len(spec.layers)))

    def source(self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> TensorSource:
        """The draft's tensors as a family's builders take them: in `dtype` (as stored where None), on `device`."""
        return _Source(self, dtype, device)

    @property
    def fused_kv_reason(self) -> str | None:
        """Why this draft has no stacked K/V path, or None where it has one."""
        family, spec = self._known()
        return family.fused_kv_reason(spec)

    def fused_kv(
        self,
        *,
        layers: tuple[ReferenceLayer, ...] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_position_hint: int | None = None,
    ) -> FusedKV:
        """The stacked K/V path over all layers, as an engine would build it.

        Raises:
            FusedKVError: the layers are not of one shape, or the family has no such path.
        """
        from pytest_specdecode.errors import StackUnsupportedError
        from pytest_specdecode.fused_kv.path import FusedKV

        if (reason := self.fused_kv_reason) is not None:
            raise StackUnsupportedError(reason)
        built: tuple[Any, ...] = self.layers(dtype=dtype, device=device) if layers is None else layers
        first = built[0].self_attn
        return FusedKV(
            built,
            first.rotary_emb,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            device=device,
            max_position_hint=max_position_hint,
        )

    @property
    def fused_latent_reason(self) -> str | None:
        """Why this draft has no stacked latent path, or None where it has one."""
        family, spec = self._known()
        return family.fused_latent_reason(spec)

    def fused_latent_kv(
        self,
        *,
        layers: tuple[ReferenceLayer, ...] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_position_hint: int | None = None,
    ) -> FusedLatentKV:
        """The stacked latent path over all layers, for drafts whose attention keeps one row per token, a latent's or DeepSeek-V4's.

        Raises:
            FusedKVError: the layers are not of one shape, or the draft has no such path.
        """
        from pytest_specdecode.errors import StackUnsupportedError
        from pytest_specdecode.fused_kv.latent_path import FusedLatentKV
        from pytest_specdecode.fused_kv.latent_stack import latent_widths_of

        if (reason := self.fused_latent_reason) is not None:
            raise StackUnsupportedError(reason)
        built: tuple[Any, ...] = self.layers(dtype=dtype, device=device) if layers is None else layers
        first = built[0].self_attn
        kv_lora_rank, qk_rope_head_dim = latent_widths_of(first)
        if kv_lora_rank is None or qk_rope_head_dim is None:
            raise StackUnsupportedError("layer 0 does not say how wide its row is")
        return FusedLatentKV(
            built,
            first.rotary_emb,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            device=device,
            max_position_hint=max_position_hint,
        )

    def describe(self) -> str:
        """One line: family, packaging, layers, parameters, dtype."""
        if self.spec is None:
            return f"{self.name}: family not recognised"
        parts = [f"{self.spec.family} ({self.spec.packaging})", _count(len(self.spec.layers), "layer")]
        if self.checkpoint.tensors:
            parts.append(f"{_millions(self.checkpoint.num_parameters)} parameters")
            dtypes = sorted({header.dtype for header in self.checkpoint.tensors.values() if header.is_float})
            parts.append(" and ".join(dtypes))
        else:
            parts.append("configuration only")
        return f"{self.name}: {', '.join(parts)}"

    def _known(self) -> tuple[Family, DraftSpec]:
        if self.family is None or self.spec is None:
            raise LayerBuildError("the draft's family is not known", path=self.path)
        return self.family, self.spec


class _Source:
    """The draft's tensors as a layer's builder takes them."""

    def __init__(self, draft: Draft, dtype: torch.dtype | None, device: torch.device | str) -> None:
        self._draft, self._dtype, self._device = draft, dtype, device

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        stored = self._draft.binding.stored if self._draft.binding is not None else {}
        return {
            # A copy, since a tensor from a mapped file is shared by all who ask for it, and a fresh layer is its owner's to change.
            name.removeprefix(prefix).removeprefix("."): self._converted(self._draft.tensor(name))
            for name in stored
            if name == prefix or name.startswith(f"{prefix}.")
        }

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        # A map's offsets stay what they are: a narrow float would round them.
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None, copy=True)


def _bind(checkpoint: Checkpoint, family: Family, spec: DraftSpec) -> Binding:
    expected = {tensor.name: tensor for tensor in family.tensors(spec)}
    root = open_view(checkpoint).root
    stored: dict[str, str] = {}
    twice: list[tuple[str, str]] = []
    for name in checkpoint.tensors:
        canonical = family.canonical(name, root)
        if canonical in stored:
            twice.append((name, canonical))
        else:
            stored[canonical] = name
    # Ids are integers for good; a matrix that a family itself expects packed still has a plain shape.
    weights = {name: tensor for name, tensor in expected.items() if tensor.kind == "float" or name.endswith(".weight")}
    headers = {canonical: checkpoint.tensors[name] for canonical, name in stored.items()}
    storage = read_storage(read_scheme(checkpoint), headers, weights)
    for weight, form in storage.forms.items():
        if form.holder != weight:
            stored[weight] = stored.pop(form.holder)
    # What lies beside a weight is read only where the configuration says that weights are quantised.
    beside = storage.companions if storage.scheme.method is not None else frozenset()
    return Binding(
        stored=stored,
        twice=tuple(twice),
        expected=expected,
        unexpected=tuple(
            name for canonical, name in stored.items() if canonical not in expected and canonical not in beside
        ),
        missing=tuple(
            tensor for tensor in expected.values() if tensor.need == "required" and tensor.name not in stored
        ),
        storage=storage,
    )


def _alike(due: list[str], written: list[str], stored: list[str]) -> Iterator[str]:
    """Spellings of `due` as `stored` spells `written`: with the same beginning replaced, or with another number."""
    same = _shared(written[::-1], stored[::-1])
    old, new = written[: len(written) - same], stored[: len(stored) - same]
    if due[: len(old)] == old:
        yield ".".join([*new, *due[len(old) :]])
    if len(due) == len(written) and (other := [pair for pair in zip(written, due, strict=True) if pair[0] != pair[1]]):
        (here, there), *more = other
        if not more and here.isdigit() and there.isdigit():
            for place in (index for index, part in enumerate(stored) if part == here):
                yield ".".join([*stored[:place], there, *stored[place + 1 :]])


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts the two begin with in common."""
    return next(
        (count for count, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _millions(number: int) -> str:
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)
