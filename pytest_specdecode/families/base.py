"""What a family module has to state, and what the rest of the library may ask of it.

A family is a data sheet: the signals by which it is recognised, the parser that turns a configuration into a `DraftSpec`, the exact
set of tensors as a function of that spec, the names they go by, and the layers' forward.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pytest_specdecode.checkpoint import Checkpoint, TensorHeader
from pytest_specdecode.errors import ConfigError, LayerBuildError
from pytest_specdecode.families.config import Section
from pytest_specdecode.spec import DraftSpec, Extent, LayerSpec

if TYPE_CHECKING:
    import torch

SignalKind = Literal["label", "tensors", "keys"]
Need = Literal["required", "optional", "never"]


class TensorSource(Protocol):
    """Where a layer's builder takes its tensors from, in the dtype and on the device that the layer is built for."""

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        """Every stored tensor whose canonical name is `prefix` or starts with it and a dot, by the rest of its name ("" for itself)."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One piece of evidence for a family.

    Attributes:
        family: the family it speaks for.
        kind: `label` (a name the file gives itself), `tensors` (names and shapes in the weights) or `keys` (config keys only that
            family has). Labels outrank tensors, tensors outrank keys.
        where: the place, such as `architectures[0]` or a tensor's name.
        value: what stands there.
    """

    family: str
    kind: SignalKind
    where: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class ExpectedTensor:
    """One tensor that a spec calls for.

    Attributes:
        name: canonical name.
        shape: `[out, in]`; None for an extent that the configuration does not settle.
        need: `required`, `optional` or `never`.
        reason: why it is optional, or must not be there.
        kind: `float`, `int` or `bool`.
        check: id of the check that reports its absence.
        fault: slug by which the engine models know its absence.
        layer: layer index, or None.
        same_as: canonical name of the tensor that this one, where it is stored, must equal (tied stages).
        dtype: torch's name of the dtype that it is stored in whatever the draft's own is (float32 routing biases and scales), or None.
    """

    name: str
    shape: tuple[Extent, ...]
    need: Need = "required"
    reason: str = ""
    kind: Literal["float", "int", "bool"] = "float"
    check: str = "weights.missing"
    fault: str = "tensor-missing"
    layer: int | None = None
    dtype: str | None = None
    same_as: str | None = None


@dataclass(frozen=True, kw_only=True)
class ConfigView:
    """A configuration as a parser sees it.

    Attributes:
        packaging: `plain` or `speculators`; a family whose draft lies inside its target says `embedded` in its spec.
        root: the whole file.
        layer: where the transformer's own fields stand: the root, or a nested layer configuration.
        tensors: headers by the family's canonical names; empty where there are no weights.
    """

    packaging: str
    root: Section
    layer: Section
    tensors: Mapping[str, TensorHeader]


class ReferenceLayer(ABC):
    """One draft layer in eager torch, with the probes that the checks run on it.

    Attributes:
        self_attn: the attention module, in the shape that fused-KV paths read.
    """

    self_attn: Any

    @abstractmethod
    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, torch.Tensor]:
        """Random inputs of `tokens` positions in the layer's dtype, entries of about `scale`."""

    @abstractmethod
    def prefill(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The layer's output for all positions in one call."""

    @abstractmethod
    def incremental(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same output, computed piece by piece through a cache."""


class Family(ABC):
    """One draft architecture.

    Attributes:
        name: as in reports, such as `eagle3-mla`.
        title: for people.
        packagings: ways in which it is written to disk that are read.
        fused_kv: None where the family has a stacked K/V path in some engine, else the reason why it has none.
        tiny: a small complete `config.json`, from which `testing` writes drafts.
        most_layers: the largest number of layers that the architecture has; None where it has no bound.
    """

    name: str
    title: str
    packagings: tuple[str, ...] = ("plain",)
    fused_kv: str | None = None
    tiny: Mapping[str, Any]
    most_layers: int | None = None

    @abstractmethod
    def signals(self, view: ConfigView) -> list[Signal]:
        """Evidence that a file is of this family."""

    @abstractmethod
    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec that the configuration (and, where it is silent, the tensors) states."""

    @abstractmethod
    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """Every tensor that `spec` calls for or allows, required ones first within their place."""

    @abstractmethod
    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer `layer`, its weights taken from `source`.

        Raises:
            LayerBuildError: the spec or a tensor does not allow it.
        """

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Any:
        """What the draft computes behind its last layer beside a plain projection: a selector, a correction, a refiner.

        Raises:
            LayerBuildError: the family has no such head, or a tensor is missing or of the wrong shape.
        """
        raise LayerBuildError(f"{self.title} drafts have no head beyond lm_head")

    def run_head(self, spec: DraftSpec, head: Any, states: torch.Tensor) -> Any:
        """What `head`, as `build_head` gave it, makes of `states` [rows, H] behind the last norm; None where nothing is to be run.

        `states` has as many rows as a block, four where the draft has none.
        """
        return None

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """Options of the family's own that `spec` lacks or that cannot be, each with its key; general values have checks of their own."""
        return ()

    def no_layers_reason(self, spec: DraftSpec) -> str | None:
        """Why the draft that is `spec` has no layers here although its configuration is complete; None where it should have some."""
        return None

    def fused_kv_reason(self, spec: DraftSpec) -> str | None:
        """Why the draft that is `spec` has no stacked K/V path in any engine, or None where it has one."""
        return self.fused_kv

    def fused_latent_reason(self, spec: DraftSpec) -> str | None:
        """Why the draft that is `spec` has no stacked latent path, or None where it has one: several layers of latent attention that
        project their cache rows from one shared context."""
        return "its layers do not project latent rows from one shared context, so there is nothing to stack"

    def canonical(self, name: str, root: Section | None = None) -> str:
        """The canonical name of a tensor that is stored as `name`; `root` is the configuration, for names that count layers."""
        return name

    def stored_name(self, name: str, root: Section, spec: DraftSpec) -> str:
        """The name by which the tensor with the canonical name `name` is written: one that `canonical` turns into `name`.

        Canonical names are such names themselves, except where a draft lies inside its target.
        """
        return name

    def layer_index(self, name: str) -> int | None:
        """The layer, or head, that the tensor with the canonical name `name` belongs to; None for the draft's own."""
        match = re.match(r"layers\.(\d{1,6})\.", name)
        return int(match[1]) if match else None

    def owns(self, name: str, root: Section) -> bool:
        """Whether the tensor stored as `name` is the draft's; False for the target's in a checkpoint that holds both."""
        return True


def unstated(**values: object) -> list[ConfigError]:
    """A fault for each key whose value is None, for `Family.faults`; two underscores in a key stand for a dot."""
    return [
        ConfigError(
            f"{key.rpartition('__')[2]} is not stated", key=key.replace("__", "."), due="a positive whole number"
        )
        for key, value in values.items()
        if value is None
    ]


def open_view(checkpoint: Checkpoint, family: Family | None = None) -> ConfigView:
    """How `family`'s parser sees `checkpoint`; without a family, tensors go by the names on disk."""
    root = Section(checkpoint.config, file=checkpoint.path / "config.json")
    packaged = "speculators_model_type" in root
    return ConfigView(
        packaging="speculators" if packaged else "plain",
        root=root,
        layer=_layer_section(root, packaged),
        tensors=checkpoint.tensors
        if family is None
        else {
            # What is the draft's comes last: a target's layer may go by the canonical name of one of the draft's.
            family.canonical(name, root): checkpoint.tensors[name]
            for name in sorted(checkpoint.tensors, key=lambda name: family.owns(name, root))
        },
    )


def _layer_section(root: Section, packaged: bool) -> Section:
    """Where the transformer's fields stand: nested by speculators, by vLLM's converter (`model`) and by multimodal targets."""
    if packaged:
        return root.section("transformer_layer_config")
    for key in ("model", "text_config"):
        if isinstance(root.raw(key), Mapping) and "hidden_size" not in root:
            return root.section(key)
    return root
