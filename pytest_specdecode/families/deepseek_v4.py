"""A DeepSeek-V4 stage as it is stored: latent queries, one head that is K and V, a grouped output, experts, mixed residual streams.

Two drafts are built of such stages, DeepSeek's own prediction layer and DSpark inside the same target. What stands around the stages
is each draft's own. For n streams [n, H]:

    streams = hc_attn(streams, x -> attn(attn_norm(x)))
    streams = hc_ffn(streams, x -> ffn(ffn_norm(x)))

with the formulas of `layers.HyperConnection`, `layers.SharedRowAttention` and `layers.MoE`. A stage looks back over its window alone: it
has no compressor and no indexer, so that it rotates by the plain `rope_theta`, which the file's scaling does not touch. Its router scores
by sqrt(softplus) and chooses with a bias; the tables that route a token by its id belong to the target's first layers. Routed and shared
experts bound their gate and up projections by `swiglu_limit`.

Sources: DeepSeek-V4-Flash `inference/model.py` and headers; transformers `deepseek_v4`; vLLM `models/deepseek_v4`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_specdecode.families.base import ExpectedTensor
from pytest_specdecode.families.config import MAX_EXPERTS, Section
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.spec import Extent, GQASpec, LayerSpec, MoESpec, RopeSpec, plus, times

#: The scales that lie beside a matrix, by the matrix and whether it is a packed expert's.
Scales = Callable[[ExpectedTensor, bool], Iterator[ExpectedTensor]]


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Sizes that only a DeepSeek-V4 stage has.

    Attributes:
        q_lora_rank, o_lora_rank: ranks of the query's and the output's projections.
        o_groups: groups of heads that the output projects apart.
        hc_mult: parallel residual streams.
        num_experts: routed experts; 0 for a stage without any.
        shared_experts: whether an expert that every token passes lies beside them.
        packed_experts: two 4-bit weights to a byte in the routed experts' matrices.
        sinkhorn_iters, hc_eps: of the mixing of the streams.
    """

    q_lora_rank: Extent
    o_lora_rank: Extent
    o_groups: Extent
    hc_mult: Extent
    num_experts: Extent
    shared_experts: bool = True
    packed_experts: bool = False
    sinkhorn_iters: int = 20
    hc_eps: float = 1e-6


def read_stage(section: Section, *, shared_experts: bool = True, packed_experts: bool = False) -> StageSpec:
    """The sizes as `section` states them."""
    return StageSpec(
        q_lora_rank=section.extent("q_lora_rank"),
        o_lora_rank=section.extent("o_lora_rank"),
        o_groups=section.extent("o_groups"),
        hc_mult=section.extent("hc_mult"),
        num_experts=section.extent("n_routed_experts"),
        shared_experts=shared_experts,
        packed_experts=packed_experts,
        sinkhorn_iters=section.extent("hc_sinkhorn_iters") or 20,
        hc_eps=1e-6 if (eps := section.number("hc_eps")) is None else eps,
    )


def read_stage_moe(section: Section) -> MoESpec:
    """The experts as `section` states them; what it leaves out is as DeepSeek's configuration class has it."""
    inner = section.extent("moe_intermediate_size")
    shared = section.extent("n_shared_experts")
    scoring, normed = section.text("scoring_func"), section.flag("norm_topk_prob")
    scale, limit = section.number("routed_scaling_factor"), section.number("swiglu_limit")
    return MoESpec(
        num_experts=section.extent("n_routed_experts"),
        top_k=section.extent("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=times(1 if shared is None else shared, inner) or None,
        scoring="softmax" if scoring == "softmax" else "sigmoid" if scoring == "sigmoid" else "sqrtsoftplus",
        norm_topk_prob=True if normed is None else normed,
        routed_scaling_factor=1.5 if scale is None else scale,
        correction_bias=True,
        # 0 is how DeepSeek's own code says that there is no bound.
        swiglu_limit=10.0 if limit is None else limit if limit > 0 else None,
    )


def read_stage_rope(section: Section) -> RopeSpec:
    """The rotation of a stage: the last lanes of a head in pairs, by `rope_theta` alone."""
    head_dim = section.extent("head_dim")
    rope = read_rope(section, head_dim=head_dim, is_neox_style=False, layer_type="main")
    stated = section.extent("qk_rope_head_dim")
    turning = rope.rotary_dim if stated is None and rope.rotary_dim != head_dim else stated
    return replace(rope, rope_type="default", scaling={}, rotary_dim=turning)


def stage_tensors(
    layer: LayerSpec, stage: StageSpec, *, hidden: Extent, inner: Extent, scales: Scales
) -> Iterator[ExpectedTensor]:
    """The tensors of one stage, without what its draft puts around it.

    Args:
        layer: the stage; its attention is grouped, with K = V.
        stage: its other sizes.
        hidden: H.
        inner: width of an expert.
        scales: what lies beside each matrix.
    """
    attention = layer.attention
    assert isinstance(attention, GQASpec)
    prefix, head_dim = f"layers.{layer.index}", attention.head_dim
    queries = times(attention.num_heads, head_dim)
    outputs = times(stage.o_groups, stage.o_lora_rank)
    per_group = None if queries is None or not stage.o_groups else queries // stage.o_groups

    def tensor(name: str, *shape: Extent, **fields: Any) -> ExpectedTensor:
        return ExpectedTensor(name=f"{prefix}.{name}", shape=shape, layer=layer.index, **fields)

    def matrix(name: str, rows: Extent, columns: Extent, *, packed: bool = False) -> Iterator[ExpectedTensor]:
        kind: Literal["float", "int"] = "int" if packed else "float"
        width = columns // 2 if packed and columns is not None else columns
        found = tensor(f"{name}.weight", rows, width, kind=kind)
        yield found
        yield from scales(found, packed)

    yield tensor("attn_norm.weight", hidden)
    yield tensor("ffn_norm.weight", hidden)
    yield from matrix("attn.wq_a", stage.q_lora_rank, hidden)
    yield tensor("attn.q_norm.weight", stage.q_lora_rank)
    yield from matrix("attn.wq_b", queries, stage.q_lora_rank)
    yield from matrix("attn.wkv", head_dim, hidden)
    yield tensor("attn.kv_norm.weight", head_dim)
    yield from matrix("attn.wo_a", outputs, per_group)
    yield from matrix("attn.wo_b", hidden, outputs)
    yield tensor("attn.attn_sink", attention.num_heads, dtype="float32")
    mixes = times(stage.hc_mult, plus(stage.hc_mult, 2))
    for name in ("hc_attn", "hc_ffn"):
        yield tensor(f"{name}_fn", mixes, times(stage.hc_mult, hidden), dtype="float32")
        yield tensor(f"{name}_base", mixes, dtype="float32")
        yield tensor(f"{name}_scale", 3, dtype="float32")
    if stage.num_experts == 0:
        return
    yield tensor("ffn.gate.weight", stage.num_experts, hidden)
    yield tensor("ffn.gate.bias", stage.num_experts, dtype="float32")
    experts = [("ffn.shared_experts", False)] if stage.shared_experts else []
    experts += [
        (f"ffn.experts.{expert}", stage.packed_experts) for expert in range(min(stage.num_experts or 0, MAX_EXPERTS))
    ]
    for place, packed in experts:
        yield from matrix(f"{place}.w1", inner, hidden, packed=packed)
        yield from matrix(f"{place}.w2", hidden, inner, packed=packed)
        yield from matrix(f"{place}.w3", inner, hidden, packed=packed)


def head_streams(stage: StageSpec, hidden: Extent, name: str, layer: int | None) -> Iterator[ExpectedTensor]:
    """What joins the residual streams before the head: `{name}fn`, `{name}base` and `{name}scale`."""
    for part, shape in (
        ("fn", (stage.hc_mult, times(stage.hc_mult, hidden))),
        ("base", (stage.hc_mult,)),
        ("scale", (1,)),
    ):
        yield ExpectedTensor(name=f"{name}{part}", shape=shape, layer=layer, dtype="float32")
