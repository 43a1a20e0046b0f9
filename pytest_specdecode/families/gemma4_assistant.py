"""Gemma 4 assistant: four small layers that project queries only and read the target's own keys and values.

For the embedding (scaled by sqrt(T)) and the hidden state of the target after its last norm, both T wide:

    x = pre_projection([embed * sqrt(T), hidden])                                    [d]
    x = x + post_attention_layernorm(attention(input_layernorm(x)))                  per layer
    x = x + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(x)))
    x = x * layer_scalar
    h = norm(x)      logits = embed_tokens h      next hidden = post_projection(h)

Attention norms and rotates q, multiplies scores by 1, and reads the K/V of the target's last sliding layer or of its last full layer, by
its own type. All rows of a burst stand at one position, the number of keys; a sliding layer sees the last W + 1 of them. Full layers turn
a share of a wider head ("proportional" RoPE). With `use_ordered_embeddings` the logits of a row are computed for the tokens of its best
clusters only, and every other token gets the smallest of them minus 1.

Sources: transformers `gemma4_assistant` and `gemma4`, SGLang's FROZEN_KV_MTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError
from pytest_specdecode.families.base import (
    ConfigView,
    ExpectedTensor,
    Family,
    ReferenceLayer,
    Signal,
    TensorSource,
    unstated,
)
from pytest_specdecode.families.common import read_dtype, read_eps
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.tensors import mlp_tensors, norm
from pytest_specdecode.spec import DraftSpec, Extent, GQASpec, LayerSpec, TapsSpec, VocabularySpec, times

if TYPE_CHECKING:
    import torch

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class AssistantOptions:
    """What joins the assistant to its target.

    Attributes:
        backbone_hidden_size: T, the target's width.
        ordered: whether the head looks at clusters of tokens first.
        num_centroids, top_k: number of clusters, and how many of them a row looks into.
    """

    backbone_hidden_size: Extent
    ordered: bool
    num_centroids: Extent
    top_k: Extent


class Gemma4Assistant(Family):
    """Gemma 4's multi-token-prediction assistant."""

    name = "gemma4-assistant"
    title = "Gemma 4 assistant"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = "its layers read the target's keys and values and project none of their own"
    tiny: Mapping[str, Any] = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 96,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
        "use_ordered_embeddings": True,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": None,
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": False,
            "sliding_window": 8,
            "max_position_embeddings": 4096,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "vocab_size": 512,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """The label, the type, the two projections in the weights, or the width of the backbone."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if "Gemma4Assistant" in architecture
        ]
        if view.root.text("model_type") == "gemma4_assistant":
            found.append(Signal(family=self.name, kind="label", where="model_type", value="gemma4_assistant"))
        before, after = view.tensors.get("pre_projection.weight"), view.tensors.get("post_projection.weight")
        if before is not None and after is not None:
            where = "pre_projection.weight"
            found.append(Signal(family=self.name, kind="tensors", where=where, value=list(before.shape)))
        if view.root.raw("backbone_hidden_size") is not None:
            value = view.root.raw("backbone_hidden_size")
            found.append(Signal(family=self.name, kind="keys", where="backbone_hidden_size", value=value))
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; widths of full layers under `global_head_dim` or, as newer files write it, `per_layer_config`."""
        stated = view.layer.layers()
        tied = view.root.flag("tie_word_embeddings")
        return DraftSpec(
            family=self.name,
            packaging=view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=view.layer.extent("hidden_size"),
            target_hidden_size=view.root.extent("backbone_hidden_size"),
            num_hidden_layers=stated,
            layer_key=view.layer.path("num_hidden_layers"),
            layers=tuple(_layer(view, index, stated or 0) for index in range(stated or 0)),
            vocabulary=VocabularySpec(
                vocab_size=view.layer.extent("vocab_size"), tie_word_embeddings=True if tied is None else tied
            ),
            taps=TapsSpec(required=False),
            dtype=read_dtype(view),
            norm_eps=read_eps(view),
            options=AssistantOptions(
                backbone_hidden_size=view.root.extent("backbone_hidden_size"),
                ordered=bool(view.root.flag("use_ordered_embeddings")),
                num_centroids=view.root.extent("num_centroids"),
                top_k=view.root.extent("centroid_intermediate_top_k"),
            ),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """Both projections, the layers without k and v, and the clusters where the head looks at them."""
        return tuple(_tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer."""
        return AssistantLayer(layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> AssistantHead:
        """The last norm and the logits behind it."""
        return AssistantHead(spec, source)

    def run_head(self, spec: DraftSpec, head: Any, states: torch.Tensor) -> Any:
        """Logits and the next hidden state."""
        return head.leave(states)

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """The target's width must be stated, and clusters where the head looks at them."""
        options = spec.options
        assert isinstance(options, AssistantOptions)
        found = unstated(backbone_hidden_size=options.backbone_hidden_size)
        if not options.ordered:
            return tuple(found)
        count, top_k, vocab = options.num_centroids, options.top_k, spec.vocabulary.vocab_size
        found += unstated(num_centroids=count, centroid_intermediate_top_k=top_k)
        if count is not None and vocab is not None and (count < 1 or vocab % count):
            message = f"{vocab} tokens do not divide into {count} clusters"
            found.append(ConfigError(message, key="num_centroids", got=count, due=f"a divisor of {vocab}"))
        if count is not None and top_k is not None and not 0 < top_k <= max(count, 1):
            message = f"{top_k} of {count} clusters"
            found.append(ConfigError(message, key="centroid_intermediate_top_k", got=top_k, due=f"from 1 to {count}"))
        return tuple(found)

    def canonical(self, name: str, root: Section | None = None) -> str:
        """Without a leading `model.`."""
        return name.removeprefix("model.")


class QueryAttention:
    """Attention over keys and values that another model computed.

    Attributes:
        num_heads, num_kv_heads, head_dim, window: as the layer's spec says; `window` None for all keys.
        q_proj, q_norm, o_proj, rotary_emb: the modules.
    """

    def __init__(self, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.errors import LayerBuildError
        from pytest_specdecode.families.heads import head_linear
        from pytest_specdecode.layers import RMSNorm, RotaryEmbedding
        from pytest_specdecode.layers.linear import known, take

        spec = layer.attention
        assert isinstance(spec, GQASpec)
        prefix = f"layers.{layer.index}.self_attn"
        self.num_heads = known(spec.num_heads, "num_attention_heads")
        self.num_kv_heads = known(spec.num_kv_heads, "num_key_value_heads")
        self.head_dim = known(spec.head_dim, "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise LayerBuildError(
                f"{self.num_heads} query heads are not a multiple of the target's {self.num_kv_heads} KV heads",
                key="num_key_value_heads",
                got=self.num_kv_heads,
                due=f"a divisor of {self.num_heads}",
            )
        rows, hidden = self.num_heads * self.head_dim, known(spec.out_features, "hidden_size")
        self.window = spec.sliding_window
        self.q_proj = head_linear(source, f"{prefix}.q_proj", rows, hidden, bias=spec.qkv_bias)
        self.o_proj = head_linear(source, f"{prefix}.o_proj", hidden, rows, bias=spec.o_bias)
        held = {f"{prefix}.q_norm.{rest}": value for rest, value in source.under(f"{prefix}.q_norm").items()}
        self.q_norm = RMSNorm(take(held, f"{prefix}.q_norm.weight", (self.head_dim,)), layer.norm_eps)
        self.rotary_emb = RotaryEmbedding(spec.rope, self.head_dim)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`[..., T, d]` for queries `x` `[..., T, d]` at `positions` and the target's `k` and `v`, `[..., S, KV heads, head_dim]`."""
        import torch

        from pytest_specdecode.layers import attend

        queries = self.q_norm(self.q_proj(x).reshape(*x.shape[:-1], self.num_heads, self.head_dim))
        if self.window is not None:
            k, v = k[..., -(self.window + 1) :, :, :], v[..., -(self.window + 1) :, :, :]
        seen = torch.ones(x.shape[-2], k.shape[-3], dtype=torch.bool, device=x.device)
        heads = attend(self.rotary_emb.rotate(queries, positions), k, v, scaling=1.0, visible=seen)
        out: torch.Tensor = self.o_proj(heads.flatten(-2))
        return out


class AssistantLayer(ReferenceLayer):
    """One layer; see the module's formula."""

    def __init__(self, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_mlp, build_norm
        from pytest_specdecode.layers.linear import take

        prefix = f"layers.{layer.index}"
        self.self_attn = QueryAttention(layer, source)
        self.mlp = build_mlp(layer, source)
        self.norms = {name: build_norm(layer, source, f"{prefix}.{name}") for name in _NORMS}
        held = {f"{prefix}.layer_scalar": value for value in source.under(f"{prefix}.layer_scalar").values()}
        self.layer_scalar = take(held, f"{prefix}.layer_scalar", (1,))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The layer's output, like `x`.

        Args:
            x: [T, d] or [B, T, d].
            positions: [T] or [B, T]; in a burst all the same, the number of keys.
            k, v: the target's, [S, KV heads, head_dim] or [B, S, KV heads, head_dim], normed and rotated as it caches them.
        """
        before, after, pre, post = (self.norms[name] for name in _NORMS)
        x = x + after(self.self_attn(before(x), positions, k, v))
        x = x + post(self.mlp(pre(x)))
        return x * self.layer_scalar

    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, torch.Tensor]:
        """A burst of `tokens` rows behind as many keys and a window's worth."""
        from pytest_specdecode.families.building import random_states

        attention = self.self_attn
        like = self.norms["input_layernorm"].weight
        keys = tokens + (attention.window or 0)
        kv = like.new_empty(attention.num_kv_heads * attention.head_dim)
        (x,) = random_states(like, 1, tokens, seed, scale, batch)
        k, v = random_states(kv, 2, keys, seed + 1, min(scale, 1.0), batch)
        positions = x.new_full(x.shape[:-1], keys).long()
        shape = (*k.shape[:-1], attention.num_kv_heads, attention.head_dim)
        return {"x": x, "positions": positions, "k": k.reshape(shape), "v": v.reshape(shape)}

    def prefill(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """All rows in one call."""
        return self.forward(**inputs)

    def incremental(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Row by row; a row leaves nothing for the next."""
        import torch

        x, positions = inputs["x"], inputs["positions"]
        return torch.cat(
            [
                self.forward(x[..., row : row + 1, :], positions[..., row : row + 1], inputs["k"], inputs["v"])
                for row in range(x.shape[-2])
            ],
            dim=-2,
        )


class AssistantHead:
    """What comes before the first layer and behind the last one."""

    def __init__(self, spec: DraftSpec, source: TensorSource) -> None:
        import torch

        from pytest_specdecode.errors import LayerBuildError
        from pytest_specdecode.families.heads import head_linear
        from pytest_specdecode.layers import RMSNorm
        from pytest_specdecode.layers.linear import known, take

        options = spec.options
        assert isinstance(options, AssistantOptions)
        hidden, width = (
            known(spec.hidden_size, "hidden_size"),
            known(options.backbone_hidden_size, "backbone_hidden_size"),
        )
        self.vocab_size = known(spec.vocabulary.vocab_size, "vocab_size")
        self.embedding_scale = width**0.5
        self.pre_projection = head_linear(source, "pre_projection", hidden, 2 * width)
        self.post_projection = head_linear(source, "post_projection", width, hidden)
        self.norm = RMSNorm(take(source.under("norm"), "weight", (hidden,)), spec.norm_eps)
        place = "lm_head" if source.under("lm_head") else "embed_tokens"
        own = {f"{place}.{name}": value for name, value in source.under(place).items()}
        self.lm_head = take(own, f"{place}.weight", (self.vocab_size, hidden))
        self.centroids: Any = None
        if options.ordered:
            count = known(options.num_centroids, "num_centroids")
            self.centroids = head_linear(source, "masked_embedding.centroids", count, hidden)
            ordering = source.under("masked_embedding.token_ordering")
            named = {f"token_ordering{name}": value for name, value in ordering.items()}
            tokens = take(named, "token_ordering", (self.vocab_size,)).long()
            self.top_k = known(options.top_k, "centroid_intermediate_top_k")
            if self.vocab_size % count or self.top_k > count:
                raise LayerBuildError(
                    f"{self.vocab_size} tokens do not lie in {count} clusters of which a row looks into {self.top_k}",
                    key="num_centroids",
                    got=count,
                    due=f"a divisor of {self.vocab_size}, at least {self.top_k}",
                )
            if not torch.equal(tokens.sort().values, torch.arange(self.vocab_size, device=tokens.device)):
                raise LayerBuildError(
                    "does not hold every token id once",
                    key="masked_embedding.token_ordering",
                    due=f"the ids 0 to {self.vocab_size - 1} in some order",
                )
            self.clusters = tokens.view(count, -1)

    def enter(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The first layer's input `[..., d]` from the target's unscaled embedding and its hidden state, both `[..., T]`."""
        import torch

        out: torch.Tensor = self.pre_projection(torch.cat([embeds * self.embedding_scale, hidden], dim=-1))
        return out

    def leave(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[..., V]` and the next hidden state `[..., T]` from the last layer's output `[..., d]`."""
        normed = self.norm(x)
        return self.logits(normed), self.post_projection(normed)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """`[..., V]`; with clusters, every token outside the chosen ones has the smallest chosen logit of the whole call, minus 1."""
        import torch

        if self.centroids is None:
            return normed @ self.lm_head.T
        best = self.centroids(normed).topk(self.top_k, dim=-1).indices
        tokens = self.clusters[best].flatten(-2)
        chosen = torch.einsum("...d,...td->...t", normed, self.lm_head[tokens])
        low = chosen.min() - 1.0
        return low.expand(*normed.shape[:-1], self.vocab_size).scatter(-1, tokens, chosen)


def _layer(view: ConfigView, index: int, count: int) -> LayerSpec:
    section = view.layer
    types = section.texts("layer_types")
    # The class repeats five sliding layers and a full one, and ends on a full one.
    by_class = "full_attention" if index == count - 1 or (index + 1) % 6 == 0 else "sliding_attention"
    layer_type = types[index] if index < len(types) else by_class
    full = layer_type == "full_attention"
    own = section.section("per_layer_config").section(str(index))
    heads = section.extent("num_attention_heads")
    head_dim = own.extent("head_dim")
    if head_dim is None:
        head_dim = section.extent("global_head_dim") if full else section.extent("head_dim")
    kv_heads = own.extent("num_key_value_heads")
    if kv_heads is None and full and section.flag("attention_k_eq_v"):
        kv_heads = section.extent("num_global_key_value_heads")
    if kv_heads is None:
        kv_heads = section.extent("num_key_value_heads")
    has_bias = bool(section.flag("attention_bias"))
    hidden = section.extent("hidden_size")
    return LayerSpec(
        index=index,
        attention=GQASpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            in_features=hidden,
            out_features=hidden,
            rope=read_rope(section, head_dim=head_dim, layer_type=layer_type),
            qk_norm=True,
            qkv_bias=has_bias,
            o_bias=has_bias,
            sliding_window=None if full else section.extent("sliding_window"),
            scaling=1.0,
        ),
        intermediate_size=section.extent("intermediate_size"),
        hidden_act=section.text("hidden_activation", "hidden_act") or "gelu_pytorch_tanh",
        norm_eps=read_eps(view),
        layer_type=layer_type,
        is_causal=False,
    )


def _tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    options, hidden, vocab = spec.options, spec.hidden_size, spec.vocabulary.vocab_size
    assert isinstance(options, AssistantOptions)
    width = options.backbone_hidden_size
    yield ExpectedTensor(name="pre_projection.weight", shape=(hidden, times(2, width)))
    yield ExpectedTensor(name="post_projection.weight", shape=(width, hidden))
    for layer in spec.layers:
        attention = layer.attention
        assert isinstance(attention, GQASpec)
        prefix = f"layers.{layer.index}"
        rows = times(attention.num_heads, attention.head_dim)
        for name, shape in {"q_proj": (rows, hidden), "o_proj": (hidden, rows)}.items():
            yield ExpectedTensor(name=f"{prefix}.self_attn.{name}.weight", shape=shape, layer=layer.index)
            if attention.qkv_bias:
                yield ExpectedTensor(
                    name=f"{prefix}.self_attn.{name}.bias",
                    shape=shape[:1],
                    layer=layer.index,
                    check="weights.biases",
                    fault="bias-missing",
                )
        yield norm(f"{prefix}.self_attn.q_norm", attention.head_dim, layer.index)
        kv_rows = times(attention.num_kv_heads, attention.head_dim)
        for name in ("k_proj", "v_proj"):
            yield ExpectedTensor(
                name=f"{prefix}.self_attn.{name}.weight",
                shape=(kv_rows, hidden),
                need="never",
                reason="the layer reads the target's keys and values",
                layer=layer.index,
            )
        for name in _NORMS:
            yield norm(f"{prefix}.{name}", hidden, layer.index)
        yield from mlp_tensors(layer, hidden)
        yield ExpectedTensor(name=f"{prefix}.layer_scalar", shape=(1,), layer=layer.index)
    yield norm("norm", hidden)
    yield ExpectedTensor(name="embed_tokens.weight", shape=(vocab, hidden), check="vocabulary.sizes")
    tied = spec.vocabulary.tie_word_embeddings
    yield ExpectedTensor(
        name="lm_head.weight",
        shape=(vocab, hidden),
        need="optional" if tied else "required",
        reason="tied to embed_tokens" if tied else "",
        check="vocabulary.lm-head",
        fault="lm-head-missing",
    )
    if options.ordered:
        yield ExpectedTensor(name="masked_embedding.centroids.weight", shape=(options.num_centroids, hidden))
        yield ExpectedTensor(name="masked_embedding.token_ordering", shape=(vocab,), kind="int")
