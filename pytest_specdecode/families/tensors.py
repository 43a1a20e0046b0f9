"""The tensors that several families share, as functions of a spec."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode.families.base import ExpectedTensor
from pytest_specdecode.spec import DraftSpec, Extent, GQASpec, LayerSpec, MLASpec, plus, times


def gqa_tensors(layer: LayerSpec, attention: GQASpec, *, fused_qkv: bool = False) -> Iterator[ExpectedTensor]:
    """Projections of grouped-query attention and, where the layer has them, its head norms.

    q, k and v are one `qkv_proj` where `fused_qkv` or the spec says so.
    """
    prefix = f"layers.{layer.index}.self_attn"
    q_rows = times(attention.num_heads, attention.head_dim)
    kv_rows = times(attention.num_kv_heads, attention.head_dim)
    queries = times(2, q_rows) if attention.q_gate else q_rows
    rows: list[tuple[str, Extent]] = [("q_proj", queries), ("k_proj", kv_rows)]
    if not attention.k_eq_v:
        rows.append(("v_proj", kv_rows))
    if fused_qkv or attention.fused_qkv:
        rows = [("qkv_proj", plus(queries, times(2, kv_rows)))]
    if attention.target_kv:
        rows += [("k_proj_target", kv_rows), ("v_proj_target", kv_rows)]
    for name, extent in rows:
        yield ExpectedTensor(name=f"{prefix}.{name}.weight", shape=(extent, attention.in_features), layer=layer.index)
    if attention.output_gate is not None:
        gates = attention.num_heads if attention.output_gate == "per-head" else q_rows
        yield ExpectedTensor(name=f"{prefix}.g_proj.weight", shape=(gates, attention.in_features), layer=layer.index)
    yield ExpectedTensor(name=f"{prefix}.o_proj.weight", shape=(attention.out_features, q_rows), layer=layer.index)
    for name, extent in rows:
        yield bias(f"{prefix}.{name}.bias", extent, attention.qkv_bias, layer.index)
    yield bias(f"{prefix}.o_proj.bias", attention.out_features, attention.o_bias, layer.index)
    if attention.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield ExpectedTensor(name=f"{prefix}.{name}.weight", shape=(attention.head_dim,), layer=layer.index)


def mla_tensors(layer: LayerSpec, attention: MLASpec, *, whole_query: bool = False) -> Iterator[ExpectedTensor]:
    """DeepSeek's latent attention, its down projections `in_features` wide.

    The query is one `q_proj` where `whole_query` says so; a rank that is not known does not.
    """
    prefix = f"layers.{layer.index}.self_attn"
    width, rank, latent = attention.in_features, attention.q_lora_rank, attention.kv_lora_rank
    queries = times(attention.num_heads, attention.qk_head_dim)
    expanded = times(attention.num_heads, plus(attention.qk_nope_head_dim, attention.v_head_dim))
    shapes: dict[str, tuple[Extent, ...]] = (
        {"q_proj": (queries, width)}
        if whole_query
        else {"q_a_proj": (rank, width), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    )
    shapes |= {
        "kv_a_proj_with_mqa": (plus(latent, attention.qk_rope_head_dim), width),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (expanded, latent),
        "o_proj": (attention.out_features, times(attention.num_heads, attention.v_head_dim)),
    }
    for name, shape in shapes.items():
        yield ExpectedTensor(name=f"{prefix}.{name}.weight", shape=shape, layer=layer.index)
    for name in ("q_proj" if whole_query else "q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
        yield bias(f"{prefix}.{name}.bias", shapes[name][0], False, layer.index)


def bias(name: str, rows: Extent, flag: bool, layer: int | None = None) -> ExpectedTensor:
    """A bias that is there exactly where its flag says."""
    return ExpectedTensor(
        name=name,
        shape=(rows,),
        need="required" if flag else "never",
        reason="" if flag else "no flag of the configuration gives this projection a bias",
        check="weights.biases",
        fault="bias-missing",
        layer=layer,
    )


def mlp_tensors(layer: LayerSpec, hidden_size: Extent) -> Iterator[ExpectedTensor]:
    """A gated MLP."""
    prefix = f"layers.{layer.index}.mlp"
    inner = layer.intermediate_size
    for name, shape in (
        ("gate_proj", (inner, hidden_size)),
        ("up_proj", (inner, hidden_size)),
        ("down_proj", (hidden_size, inner)),
    ):
        yield ExpectedTensor(name=f"{prefix}.{name}.weight", shape=shape, layer=layer.index)
        if layer.mlp_bias:
            yield bias(f"{prefix}.{name}.bias", shape[0], True, layer.index)


def norm(name: str, width: Extent, layer: int | None = None) -> ExpectedTensor:
    """The weight of a norm."""
    return ExpectedTensor(name=f"{name}.weight", shape=(width,), layer=layer)


def vocabulary_tensors(spec: DraftSpec, *, own_head: bool) -> Iterator[ExpectedTensor]:
    """Head and maps between the token spaces: `lm_head` [Vd, H], `d2t` [Vd], `t2d` [V].

    Args:
        spec: the draft.
        own_head: whether this draft must bring its own head.
    """
    vocabulary = spec.vocabulary
    yield ExpectedTensor(
        name="lm_head.weight",
        shape=(vocabulary.head_rows, spec.hidden_size),
        need="required" if own_head else "optional",
        reason="" if own_head else "the target's head serves where the draft has none",
        check="vocabulary.lm-head",
        fault="lm-head-missing",
    )
    reduced = vocabulary.is_reduced
    yield ExpectedTensor(
        name="d2t",
        shape=(vocabulary.head_rows,),
        need="required" if reduced else "optional",
        reason="" if reduced else "with the target's vocabulary the map is the identity",
        kind="int",
        check="vocabulary.d2t",
        fault="d2t-missing",
    )
    yield ExpectedTensor(
        name="t2d",
        shape=(vocabulary.vocab_size,),
        need="optional",
        reason="trainers read it, engines do not",
        kind="bool",
        check="vocabulary.t2d",
    )


def embedding(spec: DraftSpec, *, required: bool = False) -> ExpectedTensor:
    """`embed_tokens` [V, H]; the target's serves where it is absent."""
    return ExpectedTensor(
        name="embed_tokens.weight",
        shape=(spec.vocabulary.vocab_size, spec.hidden_size),
        need="required" if required else "optional",
        reason="" if required else "the target's embedding serves where the draft has none",
        fault="embedding-missing",
    )
