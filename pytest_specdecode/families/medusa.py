"""Medusa: independent heads on the target's last hidden state, head i predicting the token i + 2 places on.

    x = hidden                                        [T, H], after the target's final norm
    x = x + silu(W_j x + b_j)                         for each block j of the head
    logits = lm_head_i(x)                             [T, V], or [T, Vd] with a map of the most frequent tokens

Three schemes name the same tensors; canonical names are vLLM's:

    Medusa's own   medusa_lm_head.pt: {i}.{j}.linear.{weight,bias}, {i}.{num_layers}.weight
    vLLM           blocks.{i}.layers.{j}.weight, lm_heads.{i}.weight (all heads one `lm_head` with `original_lm_head`), token_map
    ModelOpt       medusa_heads.{i}.medusa_layers.{j}.linear.*, medusa_heads.{i}.lm_head.weight

ModelOpt's heads may lie inside their target, whose configuration then states their number beside its own layers.

`token_map` holds target ids, not offsets: draft id i stands for token_map[i].

Sources: FasterDecoding/Medusa `medusa/model/medusa_model.py`, vLLM `medusa.py` (until 0.32), ModelOpt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_specdecode.families.base import ConfigView, ExpectedTensor, Family, ReferenceLayer, Signal, TensorSource
from pytest_specdecode.families.common import read_dtype, read_vocabulary
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.heads import HeadLayer, head_linear
from pytest_specdecode.families.tensors import bias
from pytest_specdecode.spec import DraftSpec, Extent, LayerSpec, TapsSpec, VocabularySpec

if TYPE_CHECKING:
    import torch

_HEADS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
_LAYERS = ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers")

_PREFIX = re.compile(r"(?:medusa_heads?\.)?(.+)")
_UPSTREAM_BLOCK = re.compile(r"(\d{1,6})\.(\d{1,6})\.linear\.(weight|bias)")
_UPSTREAM_HEAD = re.compile(r"(\d{1,6})\.(\d{1,6})\.weight")
_MODELOPT_BLOCK = re.compile(r"(\d{1,6})\.medusa_layers\.(\d{1,6})\.linear\.(weight|bias)")
_MODELOPT_HEAD = re.compile(r"(\d{1,6})\.lm_head\.weight")
_OWN = re.compile(
    r"medusa_heads?\.|blocks\.\d{1,6}\.layers\.|lm_heads\.\d|token_map$|\d{1,6}\.\d{1,6}\.(?:linear\.)?(?:weight|bias)$"
)
_BLOCK = re.compile(r"(?:blocks|lm_heads)\.(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """What Medusa's heads have beside their number.

    Attributes:
        num_layers: blocks of one head, or None.
        bias: whether the blocks' projections have one.
        one_head: all heads share one `lm_head` (`original_lm_head`).
        whole_heads: heads are stored with the target's rows although a map picks from them.
        logit_scale: factor on the logits.
    """

    num_layers: Extent
    bias: bool
    one_head: bool = False
    whole_heads: bool = False
    logit_scale: float = 1.0


class Medusa(Family):
    """Medusa heads."""

    name = "medusa"
    title = "Medusa"
    packagings: tuple[str, ...] = ("plain", "embedded")
    fused_kv = "Medusa heads have no attention, so there is no K/V"
    tiny: Mapping[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 64,
        "vocab_size": 512,
        "truncated_vocab_size": 256,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "torch_dtype": "bfloat16",
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """The label, the type, a block beside a head, or Medusa's own count of heads."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if "Medusa" in architecture
        ]
        if view.root.text("model_type") == "medusa":
            found.append(Signal(family=self.name, kind="label", where="model_type", value="medusa"))
        block = view.tensors.get("blocks.0.layers.0.weight")
        if block is not None and {"lm_heads.0.weight", "lm_head.weight"} & set(view.tensors):
            where = "blocks.0.layers.0.weight"
            found.append(Signal(family=self.name, kind="tensors", where=where, value=list(block.shape)))
        found += [
            Signal(family=self.name, kind="keys", where=key, value=view.root.raw(key))
            for key in (*_HEADS[:2], *_LAYERS[:2])
            if view.root.raw(key) is not None
        ]
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; Medusa's own configuration states neither H nor V, which then are those of the weights."""
        key = next((name for name in _HEADS if view.root.raw(name) is not None), _HEADS[0])
        stated = view.root.layers(key)
        embedded = _is_embedded(view.root)
        # A target's num_hidden_layers is not the heads'.
        names = _LAYERS[:2] if embedded else _LAYERS
        layers = next((name for name in names if view.root.raw(name) is not None), _LAYERS[0])
        block = view.tensors.get("blocks.0.layers.0.weight")
        head = view.tensors.get("lm_heads.0.weight") or view.tensors.get("lm_head.weight")
        hidden = view.layer.extent("hidden_size")
        if hidden is None and block is not None and block.shape:
            hidden = block.shape[0]
        vocabulary = read_vocabulary(view)
        if vocabulary.vocab_size is None and head is not None and head.shape:
            vocabulary = VocabularySpec(vocab_size=head.shape[0])
        biased = view.root.flag("medusa_fc_bias")
        if biased is None:
            # Medusa's own blocks have one; vLLM's only where the flag says so.
            biased = any(name in view.root for name in _HEADS[:2])
        scale = view.root.number("logit_scale")
        return DraftSpec(
            family=self.name,
            packaging="embedded" if embedded else view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=hidden,
            target_hidden_size=hidden,
            num_hidden_layers=stated,
            layer_key=key,
            layers=tuple(LayerSpec(index=index) for index in range(stated or 0)),
            vocabulary=vocabulary,
            taps=TapsSpec(required=False),
            dtype=read_dtype(view),
            options=MedusaOptions(
                num_layers=view.root.layers(layers),
                bias=biased,
                one_head=bool(view.root.flag("original_lm_head")),
                whole_heads=vocabulary.is_reduced and head is not None and head.shape[:1] == (vocabulary.vocab_size,),
                logit_scale=1.0 if scale is None else scale,
            ),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """The blocks and heads, and the map where the vocabulary is reduced."""
        options, vocabulary, hidden = spec.options, spec.vocabulary, spec.hidden_size
        assert isinstance(options, MedusaOptions)
        rows = vocabulary.vocab_size if options.whole_heads else vocabulary.head_rows
        found: list[ExpectedTensor] = []
        for layer in spec.layers:
            for place in range(options.num_layers or 0):
                prefix = f"blocks.{layer.index}.layers.{place}"
                found.append(ExpectedTensor(name=f"{prefix}.weight", shape=(hidden, hidden), layer=layer.index))
                found.append(bias(f"{prefix}.bias", hidden, options.bias, layer.index))
            if not options.one_head:
                name = f"lm_heads.{layer.index}.weight"
                found.append(
                    ExpectedTensor(name=name, shape=(rows, hidden), layer=layer.index, fault="lm-head-missing")
                )
        if options.one_head:
            found.append(ExpectedTensor(name="lm_head.weight", shape=(rows, hidden), check="vocabulary.lm-head"))
        found.append(
            ExpectedTensor(
                name="token_map",
                shape=(vocabulary.head_rows,),
                need="required" if vocabulary.is_reduced else "optional",
                reason="" if vocabulary.is_reduced else "with the target's vocabulary the map is the identity",
                kind="int",
                check="vocabulary.d2t",
                fault="d2t-missing",
            )
        )
        return tuple(found)

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """One head with its blocks."""
        return MedusaHead(spec, layer, source)

    def canonical(self, name: str, root: Section | None = None) -> str:
        """vLLM's name for one of Medusa's own or of ModelOpt's."""
        whole = _PREFIX.fullmatch(name)
        rest = whole[1] if whole else name
        if match := _UPSTREAM_BLOCK.fullmatch(rest) or _MODELOPT_BLOCK.fullmatch(rest):
            return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
        if match := _UPSTREAM_HEAD.fullmatch(rest) or _MODELOPT_HEAD.fullmatch(rest):
            return f"lm_heads.{match[1]}.weight"
        if root is not None and root.raw("original_lm_head") is True and rest == "lm_heads.0.weight":
            return "lm_head.weight"
        return rest

    def owns(self, name: str, root: Section) -> bool:
        """Inside a target only what one of the schemes names."""
        return not _is_embedded(root) or _OWN.match(name) is not None

    def layer_index(self, name: str) -> int | None:
        """The head."""
        match = _BLOCK.match(name)
        return int(match[1]) if match else None


def _is_embedded(root: Section) -> bool:
    """Whether `root` describes a target's layers beside the heads: Medusa's own configurations have no attention to count heads of."""
    layers = root.section("text_config") if isinstance(root.raw("text_config"), Mapping) else root
    counted = any(root.raw(key) is not None for key in _HEADS[:2])
    return counted and layers.raw("num_attention_heads") is not None and layers.raw("num_hidden_layers") is not None


class MedusaHead(HeadLayer):
    """One head; see the module's formula."""

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.layers.linear import known

        options = spec.options
        assert isinstance(options, MedusaOptions)
        hidden = known(spec.hidden_size, "hidden_size")
        rows = known(spec.vocabulary.head_rows, "vocab_size")
        stored = known(spec.vocabulary.vocab_size, "vocab_size") if options.whole_heads else rows
        self.logit_scale = options.logit_scale
        self.blocks = [
            head_linear(source, f"blocks.{layer.index}.layers.{place}", hidden, hidden, bias=options.bias)
            for place in range(known(options.num_layers, "num_hidden_layers"))
        ]
        name = "lm_head" if options.one_head else f"lm_heads.{layer.index}"
        self.lm_head = head_linear(source, name, stored, hidden)
        self.rows = source.under("token_map")[""].long() if options.whole_heads else None
        self.widths = {"hidden": hidden}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., Vd]` for `[..., H]`."""
        from torch.nn.functional import silu

        for block in self.blocks:
            hidden = hidden + silu(block(hidden))
        logits: torch.Tensor = self.lm_head(hidden) * self.logit_scale
        return logits if self.rows is None else logits[..., self.rows]
