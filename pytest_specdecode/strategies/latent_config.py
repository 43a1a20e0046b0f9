"""One latent-attention layer's configuration, and the strategy of those that a stack can serve: what `configs.py` is for K/V heads.

A layer here is what the stack reads of multi-head latent attention: the down projection to one row per token, the norm of its latent or
(DeepSeek-V4) of the whole row, and the rotation of the k_pe at its end. Queries and the up projections have the least widths there are; no
cache row depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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

#: What is drawn where nothing is asked for, plainest first.
KV_LORA_RANKS = (1, 2, 3, 5, 8, 16, 24, 80, 100, 512)
ROPE_HEAD_DIMS = (2, 4, 6, 8, 10, 64)
Q_LORA_RANKS = (1, 2, 3, 8)
LATENT_NORMS = ("latent", "whole")


@dataclass(frozen=True, kw_only=True, repr=False)
class LatentConfig(Configuration):
    """One latent-attention layer of a draft. Printed without the fields that have their default.

    Attributes:
        kv_lora_rank, qk_rope_head_dim, hidden_size: as the words of the field.
        rope_theta: base of the frequencies.
        rope_scaling: the scaling's fields with `rope_type`; empty for none.
        is_neox_style: rotate-half (True) or interleaved pairs.
        max_position_embeddings: positions that the rope table may be asked for, before a scaling stretches them.
        table_breaks_at: the first row of the rope table that does not follow the fields above (it and the later ones repeat the row
            before it), or None for a right table.
        dtype: of every weight, without `torch.`.
        bias: whether the down projection has one.
        latent_norm: `latent` (over kv_lora_rank), `whole` (over the whole row, as DeepSeek-V4's layers have it), or `none`.
        norm_kind: `rms` (times w) or `gemma` (times 1 + w).
        norm_eps: epsilon of the norm.
        is_joined: whether the down projection holds Q's rows before the latent's.
        q_lora_rank: rows of Q in a joined projection, as the layer *states* them.
        q_rows: rows of Q that a joined projection has; q_lora_rank where not given.
        quantization: None, or how the projection's weight is quantised, as in `LayerConfig`.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    hidden_size: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    is_neox_style: bool = False
    max_position_embeddings: int = 64
    table_breaks_at: int | None = None
    dtype: str = "float32"
    bias: bool = False
    latent_norm: Literal["latent", "whole", "none"] = "latent"
    norm_kind: Literal["rms", "gemma"] = "rms"
    norm_eps: float = 1e-6
    is_joined: bool = False
    q_lora_rank: int = 1
    q_rows: int = DERIVED
    quantization: str | None = None

    @property
    def row_width(self) -> int:
        """Width of a cache row: latent and k_pe."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def projection_rows(self) -> int:
        """Rows of the projection's weight."""
        return self.row_width + (self.q_rows if self.is_joined else 0)

    @property
    def spec(self) -> MLASpec:
        """The same layer as an MLASpec of one head, as far as an MLASpec can say it."""
        return MLASpec(
            num_heads=1,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=1,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=1,
            in_features=self.hidden_size,
            out_features=self.hidden_size,
            rope=self.rope,
        )

    def _derived(self) -> dict[str, int]:
        return {"q_rows": self.q_lora_rank}

    @property
    def rotating_lanes(self) -> int:
        """qk_rope_head_dim."""
        return self.qk_rope_head_dim


def latent_configs(
    *,
    kv_lora_rank: ValueOr[int] | None = None,
    qk_rope_head_dim: ValueOr[int] | None = None,
    hidden_size: ValueOr[int] | None = None,
    rope_theta: ValueOr[float] | None = None,
    rope_scaling: ValueOr[Mapping[str, Any]] | None = None,
    is_neox_style: ValueOr[bool] | None = None,
    max_position_embeddings: ValueOr[int] | None = None,
    dtype: ValueOr[str] | None = None,
    bias: ValueOr[bool] | None = None,
    latent_norm: ValueOr[str] | None = None,
    norm_kind: ValueOr[str] | None = None,
    norm_eps: ValueOr[float] | None = None,
    is_joined: ValueOr[bool] | None = None,
    q_lora_rank: ValueOr[int] | None = None,
) -> SearchStrategy[LatentConfig]:
    """Configurations of one latent-attention layer.

    An example, as printed:

        LatentConfig(kv_lora_rank=24, qk_rope_head_dim=8, hidden_size=16, dtype='bfloat16', is_joined=True)

    Guarantee: any number of layers with one such configuration is a stack that FusedLatentKV serves: `qk_rope_head_dim` is even and above
    0; the norm runs over the latent or over the whole row; nothing is quantised.

    Requirement: arguments that are strategies must not draw what contradicts another argument.

    Shrinks towards a latent of 1 lane and a k_pe of 2, hidden size 1, theta 10000 unscaled, interleaved, float32, no bias, a norm over the
    latent, not joined.

    Args:
        kv_lora_rank: drawn: 1, 2, 3, 5, 8, 16, 24, 80, 100, 512.
        qk_rope_head_dim: drawn: 2, 4, 6, 8, 10, 64.
        hidden_size: drawn: 1, 2, 3, 8, 16, 33.
        rope_theta: drawn: 1e4, 5e5, 1e6, 1e7.
        rope_scaling: fields with `rope_type`, empty for none; drawn: none, linear, llama3, yarn, and dynamic where more than 2 lanes
            rotate.
        is_neox_style: rotate-half or interleaved pairs.
        max_position_embeddings: drawn: 64 or 300; a table starts with at most 256 rows, so that with 300 it has to grow.
        dtype: `float32`, `float16` or `bfloat16`.
        bias: of the down projection.
        latent_norm: `latent` or `whole`.
        norm_kind: `rms` or `gemma`.
        norm_eps: drawn: 1e-6, 1e-5, 1e-3.
        is_joined: whether Q's rows stand before the latent's in one projection.
        q_lora_rank: drawn: 1, 2, 3, 8.

    Raises:
        InvalidArgument: an argument is no such value, or two contradict each other; from a draw where an argument is a strategy.

    See also: `homogeneous_latent_stacks`, which builds layers.
    """
    _check_lanes(fixed(qk_rope_head_dim), fixed(rope_scaling))
    positive, unset = integer(1), st.none()
    flags = st.sampled_from((False, True))
    return _latent_configs(
        qk_rope_head_dim=argument("qk_rope_head_dim", qk_rope_head_dim, unset, integer(2, even=True)),
        rope_scaling=argument("rope_scaling", rope_scaling, unset, mapping),
        kv_lora_rank=argument("kv_lora_rank", kv_lora_rank, st.sampled_from(KV_LORA_RANKS), positive),
        hidden_size=argument("hidden_size", hidden_size, st.sampled_from(HIDDEN_SIZES), positive),
        rope_theta=argument("rope_theta", rope_theta, st.sampled_from(ROPE_THETAS), number),
        is_neox_style=argument("is_neox_style", is_neox_style, flags, boolean),
        max_position_embeddings=argument(
            "max_position_embeddings", max_position_embeddings, st.sampled_from(MAX_POSITIONS), positive
        ),
        dtype=argument("dtype", dtype, st.sampled_from(DTYPES), choice(DTYPES)),
        bias=argument("bias", bias, flags, boolean),
        latent_norm=argument("latent_norm", latent_norm, st.sampled_from(LATENT_NORMS), choice(LATENT_NORMS)),
        norm_kind=argument("norm_kind", norm_kind, st.sampled_from(NORM_KINDS), choice(NORM_KINDS)),
        norm_eps=argument("norm_eps", norm_eps, st.sampled_from(NORM_EPSILONS), number),
        is_joined=argument("is_joined", is_joined, flags, boolean),
        q_lora_rank=argument("q_lora_rank", q_lora_rank, st.sampled_from(Q_LORA_RANKS), positive),
    )


@st.composite
def _latent_configs(
    draw: DrawFn,
    /,
    *,
    qk_rope_head_dim: SearchStrategy[int | None],
    rope_scaling: SearchStrategy[Mapping[str, Any] | None],
    **rest: SearchStrategy[Any],
) -> LatentConfig:
    lanes, scaling = draw(qk_rope_head_dim), draw(rope_scaling)
    if lanes is None:
        least = 4 if needs_pairs(scaling) else 2
        lanes = draw(st.sampled_from([each for each in ROPE_HEAD_DIMS if each >= least]))
    _check_lanes(lanes, scaling)
    if scaling is None:
        scaling = draw(st.sampled_from(rope_scalings(lanes)))
    values = {name: draw(strategy) for name, strategy in rest.items()}
    return LatentConfig(qk_rope_head_dim=lanes, rope_scaling=scaling, **values)


def _check_lanes(lanes: int | None, scaling: Mapping[str, Any] | None) -> None:
    if isinstance(lanes, int) and lanes < 4 and isinstance(scaling, Mapping) and needs_pairs(scaling):
        raise InvalidArgument(f"rope_scaling={scaling!r}: dynamic scaling needs more rotating lanes than {lanes}")
