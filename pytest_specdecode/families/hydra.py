"""Hydra: Medusa's heads made dependent: head i also reads the embeddings of the tokens drafted before it.

    p = prefix layer over the target's hidden states      [T, H], one Llama layer and a norm (`prefix-mlp`); else the states themselves
    x = [p, e_1, …, e_{i+1}] when grounded, else p        e_k: the target's embedding of the k-th token after the position
    x = res_connection(x) + silu(linear(x))               the first block; res_connection only where x is wider than H
    x = x + silu(linear(x))                               the blocks behind it
    logits = hydra_lm_head_i(x)                           [T, V], with a bias

The weights are a pickle, `hydra_lm_head.pt`. Block j of head i is `hydra_mlp.{i}.{2 j + 1}`, since dropouts are counted too; files from
before the dropouts start at 0. The prefix layer is called `prefix_embeding_layer`, and its sizes are those of the base model, which the
configuration names and does not repeat.

The forms `cross-attn` and `eagle-attn` have one attention layer in place of the heads. Their tensors are known here, their forwards are
not.

Sources: zankner/Hydra `hydra/model/hydra_heads`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import NoReferenceError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, Family, ReferenceLayer, Signal, TensorSource
from pytest_specdecode.families.common import read_dtype, read_eps, read_head_dim, read_vocabulary, stores_fused_qkv
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.heads import HeadLayer, head_linear
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.stepping import SteppingLayer
from pytest_specdecode.families.tensors import gqa_tensors, mlp_tensors, norm
from pytest_specdecode.spec import DraftSpec, Extent, GQASpec, LayerSpec, TapsSpec, VocabularySpec, plus, times

if TYPE_CHECKING:
    import torch

_PREFIX = "prefix_embeding_layer"
_HEAD = re.compile(r"hydra_(?:mlp|lm_head)\.(\d{1,6})\.")
_OLD_HEAD = re.compile(r"hydra_lm_head\.(\d{1,6})\.(weight|bias)")
_OLD_BLOCK = re.compile(r"hydra_mlp\.(\d{1,6})\.0\.(.+)")
_TARGETS = "the base model's, saved along"


@dataclass(frozen=True, kw_only=True)
class HydraOptions:
    """What Hydra's heads have beside their number.

    Attributes:
        arch: `mlp`, `prefix-mlp`, `cross-attn` or `eagle-attn`.
        num_layers: blocks of one head, or None.
        grounded: whether heads read embeddings of drafted tokens.
        prefix: the prefix layer as the weights and the configuration show it; None where the form has none.
    """

    arch: str
    num_layers: Extent
    grounded: bool
    prefix: LayerSpec | None = None


class Hydra(Family):
    """Hydra heads."""

    name = "hydra"
    title = "Hydra"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = "Hydra's heads have no attention, and its one prefix layer has K/V of its own; there is nothing to stack"
    tiny: Mapping[str, Any] = {
        "hydra_num_heads": 3,
        "hydra_num_layers": 2,
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "architectures": ["HydraModel"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """The label, a first head in the weights, or Hydra's own keys."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if re.match(r"Hydra", architecture)
        ]
        head = view.tensors.get("hydra_lm_head.0.1.weight")
        if head is not None:
            where = "hydra_lm_head.0.1.weight"
            found.append(Signal(family=self.name, kind="tensors", where=where, value=list(head.shape)))
        found += [
            Signal(family=self.name, kind="keys", where=key, value=view.root.raw(key))
            for key in ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch")
            if view.root.raw(key) is not None
        ]
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; sizes that the configuration leaves to the base model are those of the weights."""
        stated = view.root.layers("hydra_num_heads")
        arch = view.root.text("hydra_head_arch") or "mlp"
        head = view.tensors.get("hydra_lm_head.0.1.weight")
        shape: tuple[Extent, ...] = head.shape if head is not None and len(head.shape) == 2 else (None, None)
        hidden = view.layer.extent("hidden_size")
        hidden = shape[1] if hidden is None else hidden
        vocabulary = read_vocabulary(view)
        if vocabulary.vocab_size is None:
            vocabulary = VocabularySpec(vocab_size=shape[0])
        heads = tuple(LayerSpec(index=index) for index in range(stated or 0)) if arch.endswith("mlp") else ()
        prefix = _prefix_layer(view, len(heads), hidden) if arch == "prefix-mlp" else None
        # Without the number of its heads the prefix layer cannot be run, and the configuration need not repeat the base model's.
        runs = prefix is not None and isinstance(prefix.attention, GQASpec) and prefix.attention.num_heads is not None
        return DraftSpec(
            family=self.name,
            packaging=view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=hidden,
            target_hidden_size=hidden,
            num_hidden_layers=stated,
            layer_key="hydra_num_heads",
            layers=(*heads, prefix) if runs and prefix is not None else heads,
            vocabulary=vocabulary,
            taps=TapsSpec(required=False),
            dtype=read_dtype(view),
            norm_eps=read_eps(view),
            options=HydraOptions(
                arch=arch,
                num_layers=view.root.layers("hydra_num_layers"),
                grounded=bool(view.root.flag("grounded_heads")),
                prefix=prefix,
            ),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """The heads, the prefix layer where there is one, and what the base model leaves in the file."""
        options = spec.options
        assert isinstance(options, HydraOptions)
        found = [tensor for layer in spec.layers if layer.attention is None for tensor in _head_tensors(spec, layer)]
        if options.prefix is not None:
            found += _prefix_tensors(options.prefix, spec.hidden_size)
        if options.arch in ("cross-attn", "eagle-attn"):
            found += _attention_tensors(options.arch, spec.hidden_size)
        names = ["input_embed_fn", "lm_head", *([f"{_PREFIX}.embed_tokens"] if options.prefix is not None else [])]
        found += [
            ExpectedTensor(
                name=f"{name}.weight",
                shape=(spec.vocabulary.vocab_size, spec.hidden_size),
                need="optional",
                reason=_TARGETS,
            )
            for name in names
        ]
        return tuple(found)

    def no_layers_reason(self, spec: DraftSpec) -> str | None:
        """The forms with an attention layer in place of the heads have no reference forward."""
        options = spec.options
        assert isinstance(options, HydraOptions)
        return None if options.arch.endswith("mlp") else _unwritten(options.arch)

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """A head, or the prefix layer behind the last of them.

        Raises:
            NoReferenceError: the form is `cross-attn` or `eagle-attn`.
        """
        options = spec.options
        assert isinstance(options, HydraOptions)
        if not options.arch.endswith("mlp"):
            raise NoReferenceError(_unwritten(options.arch))
        if layer.attention is None:
            return HydraHead(spec, layer, source)
        return HydraPrefix(layer, _Moved(source, f"layers.{layer.index}", f"{_PREFIX}.layers.0"))

    def canonical(self, name: str, root: Section | None = None) -> str:
        """Names of files from before the dropouts; where a head has several blocks those cannot be told apart, and stay."""
        name = name.removeprefix("hydra_head.")
        if match := _OLD_HEAD.fullmatch(name):
            return f"hydra_lm_head.{match[1]}.1.{match[2]}"
        if match := _OLD_BLOCK.fullmatch(name):
            return f"hydra_mlp.{match[1]}.1.{match[2]}"
        return name

    def layer_index(self, name: str) -> int | None:
        """The head."""
        match = _HEAD.match(name)
        return int(match[1]) if match else None


class HydraHead(HeadLayer):
    """One head; see the module's formula."""

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.layers.linear import known

        options = spec.options
        assert isinstance(options, HydraOptions)
        hidden, vocab = known(spec.hidden_size, "hidden_size"), known(spec.vocabulary.vocab_size, "vocab_size")
        count = known(options.num_layers, "hydra_num_layers")
        width = hidden * (layer.index + 2) if options.grounded else hidden
        prefix = f"hydra_mlp.{layer.index}"
        self.blocks = [
            head_linear(source, f"{prefix}.{2 * place + 1}.linear", hidden, width if place == 0 else hidden, bias=True)
            for place in range(count)
        ]
        self.residual = (
            head_linear(source, f"{prefix}.1.res_connection", hidden, width, bias=True) if options.grounded else None
        )
        self.lm_head = head_linear(source, f"hydra_lm_head.{layer.index}.1", vocab, hidden, bias=True)
        self.widths = {"prefix": hidden, "embeds": width - hidden} if options.grounded else {"prefix": hidden}

    def forward(self, prefix: torch.Tensor, embeds: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[..., T, V]`.

        Args:
            prefix: `[..., T, H]`.
            embeds: `[..., T, (i + 1) * H]`, the embeddings of the tokens behind each position, nearest first; None for a head that
                is not grounded.
        """
        import torch
        from torch.nn.functional import silu

        x = prefix if embeds is None else torch.cat([prefix, embeds], dim=-1)
        first, *rest = self.blocks
        x = (x if self.residual is None else self.residual(x)) + silu(first(x))
        for block in rest:
            x = x + silu(block(x))
        logits: torch.Tensor = self.lm_head(x)
        return logits


class HydraPrefix(SteppingLayer):
    """The prefix layer: one Llama layer over the target's hidden states, and the norm behind it."""

    reads = ("hidden",)

    def __init__(self, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_attention, build_mlp, build_norm

        prefix = f"layers.{layer.index}"
        self.input_layernorm = build_norm(layer, source, f"{prefix}.input_layernorm")
        self.self_attn = build_attention(layer, source)
        self.post_attention_layernorm = build_norm(layer, source, f"{prefix}.post_attention_layernorm")
        self.mlp = build_mlp(layer, source)
        self.norm = build_norm(layer, source, f"{_PREFIX}.norm")

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """`[T, H]` or `[B, T, H]` to the same shape."""
        attended = hidden + self.self_attn(self.input_layernorm(hidden), positions, cache=cache)
        out: torch.Tensor = self.norm(attended + self.mlp(self.post_attention_layernorm(attended)))
        return out


class _Moved:
    """A source in which the tensors under `new` are asked for under `old`."""

    def __init__(self, source: TensorSource, old: str, new: str) -> None:
        self._source, self._old, self._new = source, old, new

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        if prefix.startswith(f"{self._old}."):
            prefix = self._new + prefix.removeprefix(self._old)
        return self._source.under(prefix)


def _unwritten(arch: str) -> str:
    return f"there is no reference forward for Hydra's {arch} form, which has one attention layer in place of its heads"


def _prefix_layer(view: ConfigView, index: int, hidden: Extent) -> LayerSpec:
    def rows(name: str) -> Extent:
        header = view.tensors.get(f"{_PREFIX}.layers.0.{name}.weight")
        return header.shape[0] if header is not None and len(header.shape) == 2 else None

    heads = view.layer.extent("num_attention_heads")
    head_dim = read_head_dim(view)
    kv_heads = view.layer.extent("num_key_value_heads")
    kv_rows = rows("self_attn.k_proj")
    joined, q_rows = rows("self_attn.qkv_proj"), times(heads, head_dim)
    if joined is not None and q_rows is not None and joined > q_rows:
        kv_rows = (joined - q_rows) // 2
    if kv_heads is None and head_dim and kv_rows is not None:
        kv_heads = kv_rows // head_dim
    inner = view.layer.extent("intermediate_size")
    return LayerSpec(
        index=index,
        attention=GQASpec(
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            in_features=hidden,
            out_features=hidden,
            rope=read_rope(view.layer, head_dim=head_dim),
            fused_qkv=stores_fused_qkv(view, 0, stem=f"{_PREFIX}.layers"),
        ),
        intermediate_size=rows("mlp.gate_proj") if inner is None else inner,
        hidden_act=view.layer.text("hidden_act") or "silu",
        norm_eps=read_eps(view),
        is_causal=True,
    )


def _head_tensors(spec: DraftSpec, layer: LayerSpec) -> Iterator[ExpectedTensor]:
    options, hidden = spec.options, spec.hidden_size
    width = times(hidden, layer.index + 2) if options.grounded else hidden
    prefix = f"hydra_mlp.{layer.index}"

    def linear(name: str, rows: Extent, columns: Extent) -> Iterator[ExpectedTensor]:
        yield ExpectedTensor(name=f"{name}.weight", shape=(rows, columns), layer=layer.index)
        yield ExpectedTensor(name=f"{name}.bias", shape=(rows,), layer=layer.index)

    for place in range(options.num_layers or 0):
        yield from linear(f"{prefix}.{2 * place + 1}.linear", hidden, width if place == 0 else hidden)
        if place == 0 and options.grounded:
            yield from linear(f"{prefix}.1.res_connection", hidden, width)
    yield from linear(f"hydra_lm_head.{layer.index}.1", spec.vocabulary.vocab_size, hidden)


def _prefix_tensors(layer: LayerSpec, hidden: Extent) -> Iterator[ExpectedTensor]:
    assert isinstance(layer.attention, GQASpec)
    old, new = f"layers.{layer.index}", f"{_PREFIX}.layers.0"
    tensors = [
        norm(f"{old}.input_layernorm", hidden, layer.index),
        *gqa_tensors(layer, layer.attention),
        norm(f"{old}.post_attention_layernorm", hidden, layer.index),
        *mlp_tensors(layer, hidden),
    ]
    for tensor in tensors:
        yield replace(tensor, name=new + tensor.name.removeprefix(old))
    yield norm(f"{_PREFIX}.norm", hidden, layer.index)


def _attention_tensors(arch: str, hidden: Extent) -> Iterator[ExpectedTensor]:
    """One attention layer, its widths those of the base model as far as the configuration does not tell."""
    prefix, attention = ("", "cross_attn") if arch == "cross-attn" else ("attn.", "attn.self_attn")
    for name, shape in {
        f"{attention}.q_proj": (hidden, hidden),
        f"{attention}.k_proj": (None, hidden),
        f"{attention}.v_proj": (None, hidden),
        f"{attention}.o_proj": (hidden, hidden),
        f"{prefix}mlp.gate_proj": (None, hidden),
        f"{prefix}mlp.up_proj": (None, hidden),
        f"{prefix}mlp.down_proj": (hidden, None),
    }.items():
        yield ExpectedTensor(name=f"{name}.weight", shape=shape)
    yield norm(f"{prefix}input_layernorm", hidden)
    yield norm(f"{prefix}post_attention_layernorm", hidden)
    if arch == "eagle-attn":
        yield ExpectedTensor(name="fc.weight", shape=(hidden, plus(hidden, hidden)))
        yield ExpectedTensor(name="fc.bias", shape=(hidden,))
