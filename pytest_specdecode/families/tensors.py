"""The tensors that several families share, as functions of a spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_specdecode.families.base import ExpectedTensor
from pytest_specdecode.families.config import MAX_EXPERTS
from pytest_specdecode.spec import DraftSpec, Extent, GQASpec, LayerSpec, MLASpec, plus, times


def gqa_tensors(layer: LayerSpec, attention: GQASpec, *, fused_qkv: bool = False) -> Iterator[ExpectedTensor]:
    """Projections of grouped-query attention and, where the layer has them, its head norms.

    q, k and v are one `qkv_proj` where `fused_qkv` or the spec says so.
    """
    prefix = f"layers.{layer.index}.self_attn"
    q_rows = times(attention.num_heads, attention.head_dim)
    kv_rows = times(attention.num_kv_heads, attention.head_dim)
    v_head_dim = attention.head_dim if attention.v_head_dim is None else attention.v_head_dim
    v_rows, o_columns = times(attention.num_kv_heads, v_head_dim), times(attention.num_heads, v_head_dim)
    queries = times(2, q_rows) if attention.q_gate else q_rows
    rows: list[tuple[str, Extent]] = [("q_proj", queries), ("k_proj", kv_rows)]
    if not attention.k_eq_v:
        rows.append(("v_proj", v_rows))
    if fused_qkv or attention.fused_qkv:
        rows = [("qkv_proj", plus(queries, kv_rows, v_rows))]
    if attention.target_kv:
        rows += [("k_proj_target", kv_rows), ("v_proj_target", kv_rows)]
    for name, extent in rows:
        yield ExpectedTensor(name=f"{prefix}.{name}.weight", shape=(extent, attention.in_features), layer=layer.index)
    if attention.output_gate is not None:
        gates = attention.num_heads if attention.output_gate == "per-head" else q_rows
        yield ExpectedTensor(name=f"{prefix}.g_proj.weight", shape=(gates, attention.in_features), layer=layer.index)
    yield ExpectedTensor(name=f"{prefix}.o_proj.weight", shape=(attention.out_features, o_columns), layer=layer.index)
    for name, extent in rows:
        yield bias(f"{prefix}.{name}.bias", extent, attention.qkv_bias, layer.index)
    yield bias(f"{prefix}.o_proj.bias", attention.out_features, attention.o_bias, layer.index)
    if attention.qk_norm and attention.head_norm != "plain":
        for name, heads in (("q_norm", attention.num_heads), ("k_norm", attention.num_kv_heads)):
            shape = (heads, attention.head_dim) if attention.head_norm == "layer" else (attention.head_dim,)
            yield ExpectedTensor(name=f"{prefix}.{name}.weight", shape=shape, layer=layer.index)


def mla_tensors(layer: LayerSpec, attention: MLASpec) -> Iterator[ExpectedTensor]:
    """DeepSeek's latent attention, its down projections `in_features` wide; its query one `q_proj` where the spec says so."""
    prefix = f"layers.{layer.index}.self_attn"
    width, rank, latent = attention.in_features, attention.q_lora_rank, attention.kv_lora_rank
    queries = times(attention.num_heads, attention.qk_head_dim)
    expanded = times(attention.num_heads, plus(attention.qk_nope_head_dim, attention.v_head_dim))
    shapes: dict[str, tuple[Extent, ...]] = (
        {"q_proj": (queries, width)}
        if attention.whole_query
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
    for name in ("q_proj" if attention.whole_query else "q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
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


def moe_tensors(layer: LayerSpec, hidden: Extent) -> Iterator[ExpectedTensor]:
    """The experts of `layer`, as `layers.MoE` names them; the plain MLP of a layer without any."""
    moe = layer.moe
    if moe is None:
        yield from mlp_tensors(layer, hidden)
        return
    prefix, inner = f"layers.{layer.index}.mlp", moe.intermediate_size
    width = moe.latent_size if moe.latent else hidden

    def tensor(name: str, *shape: Extent) -> ExpectedTensor:
        return ExpectedTensor(name=f"{prefix}.{name}", shape=shape, layer=layer.index)

    def expert(name: str, features: Extent, inner: Extent) -> Iterator[ExpectedTensor]:
        for part in ("gate_proj", "up_proj") if moe.gated else ("up_proj",):
            yield tensor(f"{name}.{part}.weight", inner, features)
        yield tensor(f"{name}.down_proj.weight", features, inner)

    yield tensor("gate.weight", moe.num_experts, hidden)
    if moe.correction_bias:
        yield replace(tensor("gate.e_score_correction_bias", moe.num_experts), dtype="float32")
    if moe.latent:
        yield tensor("fc1_latent_proj.weight", width, hidden)
        yield tensor("fc2_latent_proj.weight", hidden, width)
    if moe.fused_experts:
        yield tensor("experts.gate_up_proj", moe.num_experts, times(2, inner), width)
        yield tensor("experts.down_proj", moe.num_experts, width, inner)
    else:
        for index in range(min(moe.num_experts or 0, MAX_EXPERTS)):
            yield from expert(f"experts.{index}", width, inner)
    if moe.shared_intermediate_size:
        name = "shared_expert" if moe.shared_gate else "shared_experts"
        yield from expert(name, hidden, moe.shared_intermediate_size)
        if moe.shared_gate:
            yield tensor("shared_expert_gate.weight", 1, hidden)


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
