"""Hydra: Medusa's heads made dependent: head i also reads the embeddings of the tokens drafted before it.

    p = prefix layer over the target's hidden states      [T, H], one Llama layer and a norm (`prefix-mlp`); else the states themselves
    x = [p, e_1, …, e_{i+1}] when grounded, else p        e_k: the target's embedding of the k-th token after the position
    x = res_connection(x) + silu(linear(x))               the first block; res_connection only where x is wider than H
    x = x + silu(linear(x))                               the blocks behind it
    logits = hydra_lm_head_i(x)                           [T, V], with a bias

The weights are a pickle, `hydra_lm_head.pt`. Block j of head i is `hydra_mlp.{i}.{2 j + 1}`, since dropouts are counted too; files from
before the dropouts start at 0. The prefix layer is called `prefix_embeding_layer`, and its sizes are those of the base model, which the
configuration names and does not repeat.

Two forms have one causal decoder layer in place of the heads, run once per drafted token. For the embeddings e of the tokens behind the
positions and the states h at the positions, the target's and then the layer's own, both [T, H]:

    cross-attn   y = e + cross_attn(queries of input_layernorm(e), keys and values of input_layernorm(h))    one norm for both
    eagle-attn   x = fc([e, h]) with a bias;  y = x + self_attn(input_layernorm(x))
    both         z = y + mlp(post_attention_layernorm(y));  logits = the target's head (z), with no norm between

These need one head, one layer and grounded heads. Query and key of a position turn by the same angle.

Sources: zankner/Hydra `hydra/model/hydra_heads`: `prefix_mlp_head.py`, `cross_attention_head.py`, `eagle_head.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError, LayerBuildError
from pytest_specdecode.families.base import (
    ConfigView,
    ExpectedTensor,
    Family,
    ReferenceLayer,
    Signal,
    TensorSource,
    unstated,
)
from pytest_specdecode.families.common import read_dtype, read_eps, read_head_dim, read_vocabulary, stores_fused_qkv
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.heads import HeadLayer, head_linear
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.stepping import SteppingLayer
from pytest_specdecode.families.tensors import gqa_tensors, mlp_tensors, norm
from pytest_specdecode.spec import DraftSpec, Extent, GQASpec, LayerSpec, TapsSpec, VocabularySpec, times

if TYPE_CHECKING:
    import torch

_PREFIX = "prefix_embeding_layer"
_MLPS = ("mlp", "prefix-mlp")
#: What the decoder layer of each form is called, by what `layers.{i}.*` calls it; the first that fits.
_STORED: dict[str, tuple[tuple[str, str], ...]] = {
    "prefix-mlp": (("", f"{_PREFIX}.layers.0."),),
    "cross-attn": (("self_attn.", "cross_attn."), ("", "")),
    "eagle-attn": (("", "attn."),),
}
#: The query projections by which the forms without heads are known.
_QUERIES = ("cross_attn.q_proj.weight", "attn.self_attn.q_proj.weight")
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
        decoder: the prefix layer, or the one that stands in place of the heads, as the weights and the configuration show it; None
            where the form has none.
    """

    arch: str
    num_layers: Extent
    grounded: bool
    decoder: LayerSpec | None = None


class Hydra(Family):
    """Hydra heads."""

    name = "hydra"
    title = "Hydra"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = (
        "Hydra's heads have no attention, and its one decoder layer has K/V of its own; there is nothing to stack"
    )
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
        """The label, a first head or the layer in its place in the weights, or Hydra's own keys."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if re.match(r"Hydra", architecture)
        ]
        for where in ("hydra_lm_head.0.1.weight", *_QUERIES):
            header = view.tensors.get(where)
            if header is not None:
                found.append(Signal(family=self.name, kind="tensors", where=where, value=list(header.shape)))
        found += [
            Signal(family=self.name, kind="keys", where=key, value=view.root.raw(key))
            for key in ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch")
            if view.root.raw(key) is not None
        ]
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; sizes that the configuration leaves to the base model are those of the weights."""
        stated = view.root.layers("hydra_num_heads")
        arch = _arch(view)
        head = next(
            (view.tensors[name] for name in ("hydra_lm_head.0.1.weight", *_QUERIES) if name in view.tensors), None
        )
        shape: tuple[Extent, ...] = head.shape if head is not None and len(head.shape) == 2 else (None, None)
        hidden = view.layer.extent("hidden_size")
        hidden = shape[1] if hidden is None else hidden
        vocabulary = read_vocabulary(view)
        if vocabulary.vocab_size is None and arch in _MLPS:
            vocabulary = VocabularySpec(vocab_size=shape[0])
        heads = tuple(LayerSpec(index=index) for index in range(stated or 0)) if arch in _MLPS else ()
        decoder = _decoder(view, arch, len(heads), hidden) if arch in _STORED else None
        # Without the number of its heads the layer cannot be run, and the configuration need not repeat the base model's.
        runs = (
            decoder is not None and isinstance(decoder.attention, GQASpec) and decoder.attention.num_heads is not None
        )
        return DraftSpec(
            family=self.name,
            packaging=view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=hidden,
            target_hidden_size=hidden,
            num_hidden_layers=stated,
            layer_key="hydra_num_heads",
            layers=(*heads, decoder) if runs and decoder is not None else heads,
            vocabulary=vocabulary,
            taps=TapsSpec(required=False),
            dtype=read_dtype(view),
            norm_eps=read_eps(view),
            options=HydraOptions(
                arch=arch,
                num_layers=view.root.layers("hydra_num_layers"),
                grounded=bool(view.root.flag("grounded_heads")),
                decoder=decoder,
            ),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """The heads, the decoder layer where there is one, and what the base model leaves in the file."""
        options = spec.options
        assert isinstance(options, HydraOptions)
        found = [tensor for layer in spec.layers if layer.attention is None for tensor in _head_tensors(spec, layer)]
        if options.decoder is not None:
            found += _decoder_tensors(options.arch, options.decoder, spec.hidden_size)
        names = ["input_embed_fn", "lm_head", *([f"{_PREFIX}.embed_tokens"] if options.arch == "prefix-mlp" else [])]
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
        """The layer in place of the heads has the base model's sizes, which the configuration need not repeat."""
        options = spec.options
        assert isinstance(options, HydraOptions)
        if options.arch in _MLPS or options.decoder is None:
            return None
        return "the configuration does not state num_attention_heads, which the layer has from its base model"

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """A form that is not known, one without its number of blocks, and a layer in place of the heads that is not grounded or not one."""
        options = spec.options
        assert isinstance(options, HydraOptions)
        if options.arch not in ("mlp", *_STORED):
            message = "hydra_head_arch is no form of Hydra's that is known"
            due = ["mlp", *_STORED]
            return (ConfigError(message, key="hydra_head_arch", got=options.arch, due=due),)
        if options.arch in _MLPS:
            return tuple(unstated(hydra_num_layers=options.num_layers))
        values = {"hydra_num_heads": spec.num_hidden_layers, "hydra_num_layers": options.num_layers}
        found = [
            ConfigError(f"{key} is not 1, which Hydra's {options.arch} form is built for", key=key, got=value, due=1)
            for key, value in values.items()
            if value != 1
        ]
        if not options.grounded:
            message = f"grounded_heads is not true; Hydra's {options.arch} form reads embeddings"
            found.append(ConfigError(message, key="grounded_heads", got=False, due=True))
        return tuple(found)

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """A head, the prefix layer behind the last of them, or the layer in their place."""
        options = spec.options
        assert isinstance(options, HydraOptions)
        if layer.attention is None:
            return HydraHead(spec, layer, source)
        stem = f"layers.{layer.index}."
        moved = _Moved(source, stem, options.arch)
        with _named(stem, options.arch):
            if options.arch == "cross-attn":
                return HydraCross(layer, moved)
            return HydraEagle(layer, moved) if options.arch == "eagle-attn" else HydraPrefix(layer, moved)

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


class HydraDecoder(SteppingLayer):
    """What the three forms with a decoder layer share: a Llama layer's parts."""

    def __init__(self, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_attention, build_mlp, build_norm

        prefix = f"layers.{layer.index}"
        self.input_layernorm = build_norm(layer, source, f"{prefix}.input_layernorm")
        self.self_attn = build_attention(layer, source)
        self.post_attention_layernorm = build_norm(layer, source, f"{prefix}.post_attention_layernorm")
        self.mlp = build_mlp(layer, source)

    def decode(self, states: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """The layer over one sequence of states: `[T, H]` or `[B, T, H]` to the same shape."""
        return self.fed(states + self.self_attn(self.input_layernorm(states), positions, cache=cache))

    def fed(self, attended: torch.Tensor) -> torch.Tensor:
        """What follows the attention."""
        out: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


class HydraPrefix(HydraDecoder):
    """The prefix layer: one Llama layer over the target's hidden states, and the norm behind it."""

    reads = ("hidden",)

    def __init__(self, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_norm

        super().__init__(layer, source)
        self.norm = build_norm(layer, source, f"{_PREFIX}.norm")

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """`[T, H]` or `[B, T, H]` to the same shape."""
        out: torch.Tensor = self.norm(self.decode(hidden, positions, cache))
        return out


class HydraEagle(HydraDecoder):
    """The layer of `eagle-attn`; see the module's formula."""

    def __init__(self, layer: LayerSpec, source: TensorSource) -> None:
        super().__init__(layer, source)
        hidden = self.input_layernorm.weight.shape[0]
        self.fc = head_linear(source, "fc", hidden, 2 * hidden, bias=True)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        """The new states z, which the target's head reads and the next step takes as `hidden`.

        Args:
            embeds: [T, H] or [B, T, H], of the tokens behind the positions.
            hidden: like `embeds`.
            positions: [T] or [B, T], absolute.
            cache: what `new_cache` gave, to continue a sequence.
        """
        import torch

        return self.decode(self.fc(torch.cat([embeds, hidden], dim=-1)), positions, cache)


class HydraCross(HydraDecoder):
    """The layer of `cross-attn`; see the module's formula."""

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        """The new states z; arguments as for `HydraEagle`. The cache holds keys and values of hidden states."""
        from pytest_specdecode.layers.attention import attend, visibility

        attention, rows = self.self_attn, positions.expand(hidden.shape[:-1])
        new = (*attention.kv(self.input_layernorm(hidden), positions), rows)
        k, v, key_positions = new if cache is None else cache.joined(*new)
        if cache is not None:
            cache.append(*new)
        heads = attend(
            attention.q(self.input_layernorm(embeds), positions),
            k,
            v,
            scaling=attention.scaling,
            visible=visibility(rows, key_positions, causal=True),
        )
        return self.fed(embeds + attention.o_proj(heads.flatten(-2)))


class _Moved:
    """A source in which the tensors of the form's decoder layer are asked for under `stem`."""

    def __init__(self, source: TensorSource, stem: str, arch: str) -> None:
        self._source, self._stem, self._arch = source, stem, arch

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        return self._source.under(_stored(prefix, self._stem, self._arch))


@contextmanager
def _named(stem: str, arch: str) -> Iterator[None]:
    """Inside, a LayerBuildError names a tensor of the decoder layer as it is stored."""
    try:
        yield
    except LayerBuildError as error:
        key = None if error.key is None else _stored(error.key, stem, arch)
        raise LayerBuildError(error.message, path=error.path, key=key, got=error.got, due=error.due) from error


def _stored(name: str, stem: str, arch: str) -> str:
    """The stored name of what is called `name` under `stem`; any other name as it is."""
    if not name.startswith(stem):
        return name
    # A module asked for as a whole has no dot behind it.
    rest = name.removeprefix(stem)
    old, new = next((old, new) for old, new in _STORED[arch] if f"{rest}.".startswith(old))
    return (new + f"{rest}.".removeprefix(old)).removesuffix(".")


def _arch(view: ConfigView) -> str:
    """The form as stated, else as the weights show it."""
    stated = view.root.text("hydra_head_arch")
    if stated is not None:
        return stated
    if _QUERIES[0] in view.tensors:
        return "cross-attn"
    if _QUERIES[1] in view.tensors:
        return "eagle-attn"
    return "prefix-mlp" if any(name.startswith(_PREFIX) for name in view.tensors) else "mlp"


def _decoder(view: ConfigView, arch: str, index: int, hidden: Extent) -> LayerSpec:
    def rows(name: str) -> Extent:
        header = view.tensors.get(_stored(f"layers.{index}.{name}.weight", f"layers.{index}.", arch))
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
            fused_qkv=arch == "prefix-mlp" and stores_fused_qkv(view, 0, stem=f"{_PREFIX}.layers"),
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


def _decoder_tensors(arch: str, layer: LayerSpec, hidden: Extent) -> Iterator[ExpectedTensor]:
    assert isinstance(layer.attention, GQASpec)
    stem = f"layers.{layer.index}."
    tensors = [
        norm(f"{stem}input_layernorm", hidden, layer.index),
        *gqa_tensors(layer, layer.attention),
        norm(f"{stem}post_attention_layernorm", hidden, layer.index),
        *mlp_tensors(layer, hidden),
    ]
    # The base model is a Llama, whose heads together are as wide as its states.
    whole = {"q_proj.weight": (hidden, hidden), "o_proj.weight": (hidden, hidden)}
    for tensor in tensors:
        shape = whole.get(tensor.name.removeprefix(f"{stem}self_attn."), tensor.shape)
        shape = tensor.shape if None not in tensor.shape else shape
        yield replace(tensor, name=_stored(tensor.name, stem, arch), shape=shape)
    if arch == "prefix-mlp":
        yield norm(f"{_PREFIX}.norm", hidden, layer.index)
    elif arch == "eagle-attn":
        yield ExpectedTensor(name="fc.weight", shape=(hidden, times(2, hidden)), layer=layer.index)
        yield ExpectedTensor(name="fc.bias", shape=(hidden,), layer=layer.index)
