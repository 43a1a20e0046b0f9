"""Whole latent-attention layers: what `latent_config.py` leaves out because no cache row depends on it, the queries and the expansion.

For whoever computes attention itself: the two forms of it, naive and absorbed, an engine's backend, a trainer's module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.fused_kv.stack import DTYPES
from pytest_specdecode.spec import MLASpec
from pytest_specdecode.strategies.arguments import (
    ValueOr,
    argument,
    boolean,
    choice,
    fixed,
    instance,
    integer,
    mapping,
    number,
)
from pytest_specdecode.strategies.configs import (
    DERIVED,
    HIDDEN_SIZES,
    MAX_POSITIONS,
    NORM_EPSILONS,
    NORM_KINDS,
    ROPE_THETAS,
    Configuration,
    needs_pairs,
    rope_scalings,
)
from pytest_specdecode.strategies.tensors import KINDS, SEEDS, filled, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_specdecode.layers import MLAAttention

#: What is drawn where nothing is asked for, plainest first.
HEADS = (1, 2, 3)
RANKS = (1, 2, 3, 8, 16)
HEAD_WIDTHS = (1, 2, 3, 8)
ROPE_WIDTHS = (2, 4, 8)
QUERY_RANKS = (1, 2, 3, 8)

_FLAGS = st.sampled_from((False, True))


@dataclass(frozen=True, kw_only=True, repr=False)
class MLAConfig(Configuration):
    """One latent-attention layer with its queries. Printed without the fields that have their default.

    Attributes:
        num_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, hidden_size: as the words of the field;
            `q_lora_rank` None for queries without a latent.
        in_features: width that the down projections read; hidden_size where not given, twice that in an EAGLE3 layer.
        rope_theta: base of the frequencies.
        rope_scaling: the scaling's fields with `rope_type`; empty for none. With `mscale_all_dim` the scores are scaled too.
        is_neox_style: rotate-half (True) or interleaved pairs.
        max_position_embeddings: positions that the rope table may be asked for, before a scaling stretches them.
        table_breaks_at: None; the tables of these layers are right.
        dtype: of every weight, without `torch.`.
        norm_kind: `rms` (times w) or `gemma` (times 1 + w).
        norm_eps: epsilon of both latent norms.
        is_joined: whether the two down projections are one tensor.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    hidden_size: int
    in_features: int = DERIVED
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    is_neox_style: bool = False
    max_position_embeddings: int = 64
    table_breaks_at: None = None
    dtype: str = "float32"
    norm_kind: Literal["rms", "gemma"] = "rms"
    norm_eps: float = 1e-6
    is_joined: bool = False

    @property
    def spec(self) -> MLASpec:
        """The same layer as an MLASpec."""
        return MLASpec(
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            in_features=self.in_features,
            out_features=self.hidden_size,
            rope=self.rope,
            whole_query=self.q_lora_rank is None,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' shapes `[out, in]` by local name, as `layers.MLAAttention` takes them."""
        width, latent_rows = self.in_features, self.kv_lora_rank + self.qk_rope_head_dim
        queries = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.q_lora_rank is None:
            shapes["q_proj.weight"] = (queries, width)
        else:
            shapes["q_a_layernorm.weight"] = (self.q_lora_rank,)
            shapes["q_b_proj.weight"] = (queries, self.q_lora_rank)
        if self.is_joined and self.q_lora_rank is not None:
            shapes["fused_qkv_a_proj_with_mqa.weight"] = (self.q_lora_rank + latent_rows, width)
        else:
            shapes["kv_a_proj_with_mqa.weight"] = (latent_rows, width)
            if self.q_lora_rank is not None:
                shapes["q_a_proj.weight"] = (self.q_lora_rank, width)
        shapes["kv_a_layernorm.weight"] = (self.kv_lora_rank,)
        shapes["kv_b_proj.weight"] = (self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        shapes["o_proj.weight"] = (self.hidden_size, self.num_heads * self.v_head_dim)
        return shapes

    def _derived(self) -> dict[str, int]:
        return {"in_features": self.hidden_size}

    @property
    def rotating_lanes(self) -> int:
        """qk_rope_head_dim."""
        return self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class MLALayer:
    """One latent-attention layer with weights; its tensors are made when first asked for, once.

    Attributes:
        config: the layer's shapes and options.
        seed: of all numbers.
        weights: kind of the numbers (`KINDS`) of the projections.
        norms: kind of the norms' weights: what is multiplied by is 1 plus such numbers, so never all 0.
    """

    config: MLAConfig
    seed: int = 0
    weights: str = "normal"
    norms: str = "normal"

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by local name, as `layers.MLAAttention` takes them."""
        dtype, offset = torch_dtype(self.config.dtype), 0.0 if self.config.norm_kind == "gemma" else 1.0
        found: dict[str, Tensor] = {}
        for stream, (name, shape) in enumerate(self.config.shapes.items()):
            is_norm = len(shape) == 1
            values = filled(self.norms if is_norm else self.weights, shape, dtype, seed=self.seed, stream=stream)
            found[name] = values + offset if is_norm else values
        return found

    @cached_property
    def attention(self) -> MLAAttention:
        """The layer, built."""
        from pytest_specdecode.layers import MLAAttention

        return MLAAttention(
            self.config.spec, self.tensors, norm_eps=self.config.norm_eps, norm_kind=self.config.norm_kind
        )

    def inputs(self, tokens: int, *, values: str = "normal") -> tuple[Tensor, Tensor]:
        """States `[tokens, in_features]` of a kind of numbers, and the positions 0, 1, 2, …, which the rope table has for up to
        `max_position_embeddings` tokens."""
        import torch

        shape = (tokens, self.config.in_features)
        states = filled(values, shape, torch_dtype(self.config.dtype), seed=self.seed, stream=len(self.config.shapes))
        return states, torch.arange(tokens) % self.config.max_position_embeddings


def mla_configs(
    *,
    num_heads: ValueOr[int] | None = None,
    q_lora_rank: ValueOr[int] | None = None,
    kv_lora_rank: ValueOr[int] | None = None,
    qk_nope_head_dim: ValueOr[int] | None = None,
    qk_rope_head_dim: ValueOr[int] | None = None,
    v_head_dim: ValueOr[int] | None = None,
    hidden_size: ValueOr[int] | None = None,
    rope_theta: ValueOr[float] | None = None,
    rope_scaling: ValueOr[Mapping[str, Any]] | None = None,
    is_neox_style: ValueOr[bool] | None = None,
    max_position_embeddings: ValueOr[int] | None = None,
    dtype: ValueOr[str] | None = None,
    norm_kind: ValueOr[str] | None = None,
    norm_eps: ValueOr[float] | None = None,
    whole_query: ValueOr[bool] | None = None,
    is_joined: ValueOr[bool] | None = None,
    reads_both: ValueOr[bool] | None = None,
) -> SearchStrategy[MLAConfig]:
    """Configurations of one whole latent-attention layer.

    An example, as printed:

        MLAConfig(num_heads=2, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2, hidden_size=16,
        in_features=32, dtype='bfloat16')

    Guarantee: `layers.MLAAttention` builds such a layer from tensors of `shapes`: `qk_rope_head_dim` is even and above 0, and where the
    queries have no latent, nothing is joined.

    Requirement: arguments that are strategies must not draw what contradicts another argument.

    Shrinks towards one head whose latents and halves are 1 lane wide and whose k_pe is 2, hidden size 1, theta 10000 unscaled, interleaved,
    float32, projections apart, reading the hidden state alone.

    Args:
        num_heads: drawn: 1, 2, 3.
        q_lora_rank: drawn: 1, 2, 3, 8.
        kv_lora_rank: drawn: 1, 2, 3, 8, 16.
        qk_nope_head_dim, v_head_dim: drawn: 1, 2, 3, 8.
        qk_rope_head_dim: drawn: 2, 4, 8.
        hidden_size: drawn: 1, 2, 3, 8, 16, 33.
        rope_theta: drawn: 1e4, 5e5, 1e6, 1e7.
        rope_scaling: fields with `rope_type`, empty for none; drawn: none, linear, llama3, yarn, DeepSeek's yarn, and dynamic where more
            than 2 lanes rotate.
        is_neox_style: rotate-half or interleaved pairs.
        max_position_embeddings: drawn: 64 or 300.
        dtype: `float32`, `float16` or `bfloat16`.
        norm_kind: `rms` or `gemma`.
        norm_eps: drawn: 1e-6, 1e-5, 1e-3.
        whole_query: whether queries come from one projection without a latent; then there is no `q_lora_rank`.
        is_joined: whether the two down projections are one tensor; drawn where the queries have a latent.
        reads_both: whether the down projections read two states side by side, as in an EAGLE3 layer.

    Raises:
        InvalidArgument: an argument is no such value, or two contradict each other; from a draw where an argument is a strategy.

    See also: `mla_layers`, which fills the tensors; `latent_configs` for the part that a cache row depends on.
    """
    _check_together(
        fixed(q_lora_rank), fixed(whole_query), fixed(is_joined), fixed(qk_rope_head_dim), fixed(rope_scaling)
    )
    positive, unset = integer(1), st.none()
    widths = st.sampled_from(HEAD_WIDTHS)
    return _mla_configs(
        q_lora_rank=argument("q_lora_rank", q_lora_rank, unset, positive),
        whole_query=argument("whole_query", whole_query, unset, boolean),
        is_joined=argument("is_joined", is_joined, unset, boolean),
        reads_both=argument("reads_both", reads_both, _FLAGS, boolean),
        qk_rope_head_dim=argument("qk_rope_head_dim", qk_rope_head_dim, unset, integer(2, even=True)),
        rope_scaling=argument("rope_scaling", rope_scaling, unset, mapping),
        num_heads=argument("num_heads", num_heads, st.sampled_from(HEADS), positive),
        kv_lora_rank=argument("kv_lora_rank", kv_lora_rank, st.sampled_from(RANKS), positive),
        qk_nope_head_dim=argument("qk_nope_head_dim", qk_nope_head_dim, widths, positive),
        v_head_dim=argument("v_head_dim", v_head_dim, widths, positive),
        hidden_size=argument("hidden_size", hidden_size, st.sampled_from(HIDDEN_SIZES), positive),
        rope_theta=argument("rope_theta", rope_theta, st.sampled_from(ROPE_THETAS), number),
        is_neox_style=argument("is_neox_style", is_neox_style, _FLAGS, boolean),
        max_position_embeddings=argument(
            "max_position_embeddings", max_position_embeddings, st.sampled_from(MAX_POSITIONS), positive
        ),
        dtype=argument("dtype", dtype, st.sampled_from(DTYPES), choice(DTYPES)),
        norm_kind=argument("norm_kind", norm_kind, st.sampled_from(NORM_KINDS), choice(NORM_KINDS)),
        norm_eps=argument("norm_eps", norm_eps, st.sampled_from(NORM_EPSILONS), number),
    )


def mla_layers(
    *,
    config: ValueOr[MLAConfig] | None = None,
    weights: ValueOr[str] | None = None,
    norms: ValueOr[str] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[MLALayer]:
    """Whole latent-attention layers with weights.

    An example, as printed:

        MLALayer(config=MLAConfig(num_heads=1, q_lora_rank=1, kv_lora_rank=2, qk_nope_head_dim=1, qk_rope_head_dim=2, v_head_dim=1,
        hidden_size=3), seed=0, weights='integers', norms='zeros')

    Guarantee: `layer.attention` builds, and for `layer.inputs(...)` of any kind but `large` its output is finite in the layer's dtype, in
    the naive form and in the absorbed one.

    Requirement: a `config` of the caller's must be one that `mla_configs` could draw.

    Shrinks as `mla_configs`, then towards zeros, then seed 0.

    Args:
        config: drawn: any of `mla_configs`.
        weights, norms: kinds of numbers, see `KINDS` and `MLALayer`; drawn: any, but not `large` for float16, which four products of large
            numbers leave.
        seed: of all numbers.

    Raises:
        InvalidArgument: an argument is no such value; from a draw where an argument is a strategy.

    See also: `homogeneous_latent_stacks` for several layers that share a context.
    """
    unset: SearchStrategy[Any] = st.none()
    return _mla_layers(
        argument("config", config, mla_configs(), instance(MLAConfig)),
        weights=argument("weights", weights, unset, choice(KINDS)),
        norms=argument("norms", norms, unset, choice(KINDS)),
        seed=argument("seed", seed, SEEDS, integer(0)),
    )


@st.composite
def _mla_configs(
    draw: DrawFn,
    /,
    *,
    q_lora_rank: SearchStrategy[int | None],
    whole_query: SearchStrategy[bool | None],
    is_joined: SearchStrategy[bool | None],
    reads_both: SearchStrategy[bool],
    qk_rope_head_dim: SearchStrategy[int | None],
    rope_scaling: SearchStrategy[Mapping[str, Any] | None],
    **rest: SearchStrategy[Any],
) -> MLAConfig:
    rank, whole, joined = draw(q_lora_rank), draw(whole_query), draw(is_joined)
    lanes, scaling = draw(qk_rope_head_dim), draw(rope_scaling)
    if lanes is None:
        least = 4 if needs_pairs(scaling) else 2
        lanes = draw(st.sampled_from([each for each in ROPE_WIDTHS if each >= least]))
    _check_together(rank, whole, joined, lanes, scaling)
    # Drawn whether they are used or not: a layer without a latent of the queries is then no shorter example.
    flags, some_rank = (draw(_FLAGS), draw(_FLAGS)), draw(st.sampled_from(QUERY_RANKS))
    if whole is None:
        whole = rank is None and not joined and flags[0]
    if joined is None:
        joined = not whole and flags[1]
    rank = None if whole else rank or some_rank
    if scaling is None:
        scaling = draw(st.sampled_from([*rope_scalings(lanes), _DEEPSEEK_YARN]))
    values = {name: draw(strategy) for name, strategy in rest.items()}
    width = values["hidden_size"]
    return MLAConfig(
        q_lora_rank=rank,
        is_joined=joined,
        qk_rope_head_dim=lanes,
        rope_scaling=scaling,
        in_features=2 * width if draw(reads_both) else width,
        **values,
    )


@st.composite
def _mla_layers(
    draw: DrawFn,
    configs: SearchStrategy[MLAConfig],
    *,
    weights: SearchStrategy[str | None],
    norms: SearchStrategy[str | None],
    seed: SearchStrategy[int],
) -> MLALayer:
    config = draw(configs)
    usual = _usable_kinds(config.dtype)
    kinds = [draw(kind) or draw(st.sampled_from(usual)) for kind in (weights, norms)]
    return MLALayer(config=config, weights=kinds[0], norms=kinds[1], seed=draw(seed))


#: Scores are scaled with it as well as frequencies.
_DEEPSEEK_YARN: Mapping[str, Any] = {
    "rope_type": "deepseek_yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _usable_kinds(dtype: str) -> Sequence[str]:
    """Kinds of weights whose products stay inside the dtype."""
    return [kind for kind in KINDS if kind != "large"] if dtype == "float16" else KINDS


def _check_together(
    rank: int | None,
    whole: bool | None,
    joined: bool | None,
    lanes: int | None,
    scaling: Mapping[str, Any] | None,
) -> None:
    """What two arguments must be to each other."""
    for name, value in (("q_lora_rank", rank), ("is_joined", joined or None)):
        if whole is True and value is not None:
            raise InvalidArgument(f"{name}={value!r}: queries without a latent have none, whole_query=True")
    if isinstance(lanes, int) and lanes < 4 and isinstance(scaling, Mapping) and needs_pairs(scaling):
        raise InvalidArgument(f"rope_scaling={scaling!r}: dynamic scaling needs more rotating lanes than {lanes}")
