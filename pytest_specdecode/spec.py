"""`DraftSpec`: what a draft *is*, the same for every packaging.

A family's parser turns a raw configuration into these frozen records. Nothing here guesses: a field that the file does not state and
that cannot be derived from what it states is None, and whoever needs it says so. Shapes are `[out, in]`, as torch's Linear keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

#: An extent that may not be known yet.
Extent = int | None


def times(*factors: Extent) -> Extent:
    """The product, or None where a factor is unknown."""
    product = 1
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product


def plus(*terms: Extent) -> Extent:
    """The sum, or None where a term is unknown."""
    total = 0
    for term in terms:
        if term is None:
            return None
        total += term
    return total


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A value together with the place that states it.

    Attributes:
        key: dotted path in `config.json`, such as `dflash_config.block_size`.
        value: the value found there, as parsed.
    """

    key: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one layer.

    Attributes:
        theta: the base that the file states (first of `theta_stated`), or None.
        rope_type: `default`, `linear`, `dynamic`, `yarn`, `deepseek_yarn`, `llama3`, `longrope`, `proportional`, …
        rotary_dim: leading lanes of a head that rotate.
        is_neox_style: rotate-half (True) or interleaved pairs (False).
        scaling: the fields of the scaling dictionary as stated, without theta; empty for `default`.
        max_position_embeddings: as stated.
        theta_stated: every place that states a theta, in the order in which they are to be read.
    """

    theta: float | None
    rope_type: str = "default"
    rotary_dim: Extent = None
    is_neox_style: bool = True
    scaling: Mapping[str, Any] = field(default_factory=dict)
    max_position_embeddings: Extent = None
    theta_stated: tuple[Stated, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TemperatureSpec:
    """Queries that grow with their position, `q * (1 + attn_scale * ln(1 + floor((p + 1) / floor_scale)))` (Llama 4).

    Attributes:
        attn_scale: strength.
        floor_scale: tokens per step.
    """

    attn_scale: float = 0.1
    floor_scale: float = 8192.0


@dataclass(frozen=True, kw_only=True)
class GQASpec:
    """Grouped-query attention (one KV head: MQA; as many as query heads: MHA).

    Attributes:
        in_features: width that q, k and v read: H, or 2H in an EAGLE3 first layer.
        out_features: width that o writes, H.
        qk_norm: a norm per head on q and k.
        head_norm: which norm that is: `rms` with one weight [head_dim] for all heads, `layer` (mean and variance) with weights
            [heads, head_dim] (Cohere), both before the rotation; or `plain`, by root mean square without a weight, after it (Llama 4).
        rotates: whether q and k are rotated at all.
        temperature: what queries are multiplied by, or None.
        fused_qkv: q, k and v are stored as one `qkv_proj`, rows in that order.
        qkv_bias, o_bias: whether the projections have a bias, as the config says.
        sliding_window: tokens that a query sees, itself included, or None for all.
        chunk_size: a query sees its own chunk of this many positions, counted from 0, or None for all (Llama 4).
        output_gate: the heads' outputs are multiplied by softplus of `g_proj`: one factor per head, or one per lane (Laguna).
        target_kv: the context has projections of its own, `k_proj_target` and `v_proj_target` (DFlare).
        q_gate: q_proj gives, head by head, a query and a gate of the same width; the head's output is multiplied by the gate's sigmoid.
        k_eq_v: V is the K projection before its norm; there is no v_proj.
        v_norm: a norm without a weight over each V head.
        scaling: factor on the scores; None for `head_dim ** -0.5`.
        v_head_dim: width of a V head; None for `head_dim`.
        sink: a learned logit per head takes part in every softmax (`attention_sink_bias`); None where the file does not say, and
            the tensor decides. It changes no K and no V.
    """

    num_heads: Extent
    num_kv_heads: Extent
    head_dim: Extent
    in_features: Extent
    out_features: Extent
    rope: RopeSpec
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: Extent = None
    value_scale: float = 1.0
    fused_qkv: bool = False
    output_gate: Literal["per-head", "per-element"] | None = None
    target_kv: bool = False
    q_gate: bool = False
    k_eq_v: bool = False
    v_norm: bool = False
    scaling: float | None = None
    v_head_dim: Extent = None
    sink: bool | None = None
    head_norm: Literal["rms", "layer", "plain"] = "rms"
    rotates: bool = True
    chunk_size: Extent = None
    temperature: TemperatureSpec | None = None


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek).

    Attributes:
        q_lora_rank, kv_lora_rank: widths of the query and key/value latents; `q_lora_rank` None = absent or null.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: per-head widths.
        in_features: width that the down projections read: 2H in an EAGLE3 layer.
        whole_query: queries come from one `q_proj` without a latent, so that there is no rank. A rank that is None without it is
            one that is not known.
    """

    num_heads: Extent
    q_lora_rank: Extent
    kv_lora_rank: Extent
    qk_nope_head_dim: Extent
    qk_rope_head_dim: Extent
    v_head_dim: Extent
    in_features: Extent
    out_features: Extent
    rope: RopeSpec
    whole_query: bool = False

    @property
    def qk_head_dim(self) -> Extent:
        """Width of one query or key head: nope + rope."""
        return plus(self.qk_nope_head_dim, self.qk_rope_head_dim)


#: What a sliding window of W hides from a drafted block whose row r stands at position a + r: `row` leaves |q - k| < W, `row-inclusive`
#: |q - k| <= W, and `anchor` leaves every row the context from a - W on and never cuts the block itself.
TapsConvention = Literal["output", "boundary"]
WindowReading = Literal["row", "row-inclusive", "anchor"]


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts in the place of a layer's MLP.

    Attributes:
        num_experts: routed experts.
        top_k: experts that one token goes to.
        intermediate_size: width of one routed expert.
        shared_intermediate_size: width of the shared experts together; None without any.
        scoring: what turns router logits into scores.
        norm_topk_prob: the weights of the chosen experts are divided by their sum.
        routed_scaling_factor: factor on those weights after that.
        n_group, topk_group: experts lie in `n_group` groups, and only the best `topk_group` of them are chosen from.
        correction_bias: the choice, not the weight, adds `e_score_correction_bias` (DeepSeek-V3's balance without a loss).
        shared_gate: the shared expert's output is multiplied by a sigmoid gate per token (Qwen).
        fused_experts: experts are stored as `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I].
        weigh_inputs: an expert is given the token multiplied by its weight, and not its output multiplied (Llama 4).
        gated: experts are `down(act(gate(x)) * up(x))`; False for `down(act(up(x)))` (Nemotron).
        latent: routed experts read and write a projection of the token, `latent_size` wide (`fc1_latent_proj` before them,
            `fc2_latent_proj` behind their sum). Router and shared experts read the token itself.
        swiglu_limit: a bound on what an expert's gate and up projections give, before they are multiplied; None for none.
    """

    num_experts: Extent
    top_k: Extent
    intermediate_size: Extent
    shared_intermediate_size: Extent = None
    scoring: Literal["sigmoid", "softmax", "sqrtsoftplus"] = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    correction_bias: bool = False
    shared_gate: bool = False
    fused_experts: bool = False
    weigh_inputs: bool = False
    gated: bool = True
    latent: bool = False
    latent_size: Extent = None
    swiglu_limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One draft layer, or one head of a draft that is made of heads.

    Attributes:
        index: position in the draft, from 0.
        attention: None for a head without attention (Medusa, Hydra, an MLP speculator's stage).
        layer_type: `full_attention`, `sliding_attention` or `chunked_attention`.
        is_causal: whether rows of one block may only look back; None where the file does not say.
        moe: the experts where the layer has them instead of one MLP.
        norm_eps: epsilon of every norm of the layer.
        norm_kind: `rms` (multiply by w) or `gemma` (multiply by 1 + w).
        window_reading: for a block-drafting layer, what its sliding window means, as the packaging's own code trained it; else None.
    """

    index: int
    attention: GQASpec | MLASpec | None = None
    intermediate_size: Extent = None
    hidden_act: str = "silu"
    mlp_bias: bool = False
    norm_eps: float = 1e-6
    norm_kind: Literal["rms", "gemma"] = "rms"
    layer_type: str = "full_attention"
    is_causal: bool | None = None
    moe: MoESpec | None = None
    window_reading: WindowReading | None = None


@dataclass(frozen=True, kw_only=True)
class VocabularySpec:
    """Token spaces of draft and target.

    Attributes:
        vocab_size: V, the target's.
        draft_vocab_size: Vd as declared under any spelling, or None.
        tie_word_embeddings: as stated, False where absent.
        draft_vocab_key: the key that declares Vd.
        absolute_map: d2t holds target ids, and not what is to be added to a draft id.
    """

    vocab_size: Extent
    draft_vocab_size: Extent = None
    tie_word_embeddings: bool = False
    draft_vocab_key: str | None = None
    absolute_map: bool = False

    @property
    def head_rows(self) -> Extent:
        """Rows of the draft's own head: Vd where declared, else V."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def is_reduced(self) -> bool:
        """Whether the draft predicts in a smaller vocabulary than the target's."""
        return None not in (self.draft_vocab_size, self.vocab_size) and self.draft_vocab_size != self.vocab_size


@dataclass(frozen=True, kw_only=True)
class TapsSpec:
    """Target layers whose hidden states feed the draft.

    Attributes:
        ids: the ids as stated, or None.
        convention: `output` (state after layer id) or `boundary` (state entering layer id), as the packaging means it; None where the
            file does not settle it.
        count: K, the number of taps: from the ids, else from what the file says of the count, else None.
        stated: every place that states ids.
        num_target_layers: depth of the target where the file gives it.
        required: whether this draft is fed by taps at all (`use_aux_hidden_state` not false).
    """

    ids: tuple[int, ...] | None = None
    convention: TapsConvention | None = None
    count: Extent = None
    stated: tuple[Stated, ...] = ()
    num_target_layers: Extent = None
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class ParallelHeads:
    """Heads beside `lm_head` that draft the tokens behind the last step's at once, as ModelOpt trains them.

    Attributes:
        num_heads: one less than `parallel_draft_step`.
        num_layers: residual blocks of one head, or None.
        shared_head: all end in one `lm_head`; else each has its own, as the first exporter wrote it.
    """

    num_heads: int
    num_layers: Extent
    shared_head: bool = True


@dataclass(frozen=True, kw_only=True)
class Eagle3Flags:
    """Switches of EAGLE3 and its 3.1 form.

    Attributes:
        norm_before_residual: the residual is the normed hidden state (None: the file does not say).
        norm_before_fc: one norm over the concatenated taps (`input_norm`).
        fc_norm: one norm per tap before the concatenation.
        norm_output: the recycled hidden state is taken after the final norm.
        fc_bias: `fc` has a bias.
        parallel: the heads that draft further tokens at once, where there are any.
        hidden_first: the first layer reads [hidden, embedding] instead of [embedding, hidden]. No file is meant so; it is a reading that
            a replay can rule out.
    """

    norm_before_residual: bool | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    parallel: ParallelHeads | None = None
    hidden_first: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block-drafting head: DFlash and its relatives.

    Attributes:
        block_size: rows of a block as trained, or None.
        block_size_stated: every place that states it.
        mask_token_id: id of the mask token, or None.
        mask_token_stated: every place that states it.
        is_causal: as stated for the whole draft, or None.
        sample_from_anchor: whether row 0 already drafts, or None.
        variant: `dflash`, `laguna`, …
        input_embedding_scale: factor on the target's embeddings of a block.
        output_multiplier, final_logit_softcapping: what the logits pass through, in this order; None: no cap.
    """

    block_size: Extent = None
    block_size_stated: tuple[Stated, ...] = ()
    mask_token_id: Extent = None
    mask_token_stated: tuple[Stated, ...] = ()
    is_causal: bool | None = None
    sample_from_anchor: bool | None = None
    variant: str = "dflash"
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """Everything that decides what the draft's tensors must be and what its forward does.

    Attributes:
        family, packaging: words of the design.
        architectures: as stated, strings only.
        model_type: of the layers (inside a nested layer config where the packaging has one).
        hidden_size, target_hidden_size: H and Ht (Ht = H where the file does not say otherwise).
        num_hidden_layers: L as stated: layers, or heads of a draft that is made of heads.
        layer_key: the key that states it.
        layers: one record per layer that the family builds.
        dtype: the declared dtype, without `torch.`, or None.
        eagle3, block: options that several families share.
        options: a frozen dataclass of the family's own, defined in its module, or None.
    """

    family: str
    packaging: str
    architectures: tuple[str, ...] = ()
    model_type: str | None = None
    hidden_size: Extent = None
    target_hidden_size: Extent = None
    num_hidden_layers: Extent = None
    layer_key: str = "num_hidden_layers"
    layers: tuple[LayerSpec, ...] = ()
    vocabulary: VocabularySpec = VocabularySpec(vocab_size=None)
    taps: TapsSpec = TapsSpec()
    dtype: str | None = None
    norm_eps: float = 1e-6
    eagle3: Eagle3Flags | None = None
    block: BlockSpec | None = None
    options: Any = None

    def to_dict(self) -> dict[str, Any]:
        """As the JSON report holds it; unknown values are null."""
        found: dict[str, Any] = _plain(self)
        return found


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
