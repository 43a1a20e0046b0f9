"""Latent-attention layers, stacks of them, and the inputs of a latent kernel: what `layer_configs`, `homogeneous_stacks`,
`heterogeneous_stacks` and `kernel_inputs` are for K/V heads.

A layer here is what the stack reads of multi-head latent attention: the down projection to one row per token, the norm of its latent,
and the rotation of the k_pe behind it. Queries and the up projections have the least widths there are; no cache row depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.fused_kv.latent_stack import LATENT_AXES, LATENT_SOFT_AXES, LatentFacts, latent_facts_of
from pytest_specdecode.fused_kv.stack import DTYPES, normal_scaling
from pytest_specdecode.spec import MLASpec, RopeSpec
from pytest_specdecode.strategies.arguments import (
    ValueOr,
    argument,
    boolean,
    check_bounds,
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
from pytest_specdecode.strategies.kernels import (
    LAYOUTS,
    POSITION_DTYPES,
    POSITION_KINDS,
    check_block,
    drawn_positions,
    laid_out,
    token_counts,
    usable_kinds,
)
from pytest_specdecode.strategies.stacks import projection, rotary, shown_configs
from pytest_specdecode.strategies.tensors import KINDS, SEEDS, filled, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

Built = TypeVar("Built")

#: What is drawn where nothing is asked for, plainest first.
KV_LORA_RANKS = (1, 2, 3, 5, 8, 16, 24, 80, 100, 512)
ROPE_HEAD_DIMS = (2, 4, 6, 8, 10, 64)
Q_LORA_RANKS = (1, 2, 3, 8)


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
        latent_norm: `latent` (over kv_lora_rank), `whole` (over the whole row), or `none`.
        norm_kind: `rms` (times w) or `gemma` (times 1 + w).
        norm_eps: epsilon of the latent's norm.
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
    def rope(self) -> RopeSpec:
        """The rotation as a RopeSpec."""
        return RopeSpec(
            theta=self.rope_theta,
            rope_type=str(self.rope_scaling.get("rope_type", "default")),
            rotary_dim=self.qk_rope_head_dim,
            is_neox_style=self.is_neox_style,
            scaling=self.rope_scaling,
            max_position_embeddings=self.max_position_embeddings,
        )

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
    norm_kind: ValueOr[str] | None = None,
    norm_eps: ValueOr[float] | None = None,
    is_joined: ValueOr[bool] | None = None,
    q_lora_rank: ValueOr[int] | None = None,
) -> SearchStrategy[LatentConfig]:
    """Configurations of one latent-attention layer.

    An example, as printed:

        LatentConfig(kv_lora_rank=24, qk_rope_head_dim=8, hidden_size=16, dtype='bfloat16', is_joined=True)

    Guarantee: any number of layers with one such configuration is a stack that FusedLatentKV serves: `qk_rope_head_dim` is even and above
    0; the norm runs over the latent alone; nothing is quantised.

    Requirement: arguments that are strategies must not draw what contradicts another argument.

    Shrinks towards a latent of 1 lane and a k_pe of 2, hidden size 1, theta 10000 unscaled, interleaved, float32, no bias, not joined.

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


# --- stacks -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class LatentStack:
    """Draft layers as an engine would hand them to its stacked latent path.

    Layers are built when first asked for, once; each has weights of its own. `layer.self_attn` is a `layers.MLAAttention` where that class
    can be such a layer, and else a plain namespace with the attributes that engines read.

    Attributes:
        configs: one per layer.
        seed: of all numbers.
        weights: kind of the numbers (`KINDS`) of projections and biases.
        norms: kind of the norms' weights: what is multiplied by is 1 plus such numbers (`zeros`: 1 exactly), so never all 0.
    """

    configs: Sequence[LatentConfig]
    seed: int = 0
    weights: str = "normal"
    norms: str = "normal"

    @cached_property
    def layers(self) -> tuple[Any, ...]:
        """The built layers, each with a `self_attn`."""
        return tuple(
            SimpleNamespace(self_attn=_attention(config, self, index)) for index, config in enumerate(self.configs)
        )

    @property
    def rotary_emb(self) -> Any:
        """The rotary object that serves all layers: layer 0's."""
        return self.layers[0].self_attn.rotary_emb

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.configs)

    @property
    def kv_lora_rank(self) -> int:
        """Layer 0's, which is what the path is built with."""
        return self.configs[0].kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        """Layer 0's."""
        return self.configs[0].qk_rope_head_dim

    @property
    def hidden_size(self) -> int:
        """Layer 0's."""
        return self.configs[0].hidden_size

    @property
    def dtype(self) -> str:
        """Layer 0's, without `torch.`."""
        return self.configs[0].dtype

    @property
    def facts(self) -> tuple[LatentFacts, ...]:
        """What the built layers say of themselves."""
        return tuple(latent_facts_of(layer) for layer in self.layers)

    def build(self, factory: Callable[..., Built], *, device: Any = "cpu", **options: Any) -> Built:
        """`factory(layers, rotary_emb, kv_lora_rank, qk_rope_head_dim, device, **options)`: FusedLatentKV, or a helper of that shape.

        Layers stay on the CPU; moving what it needs to `device` is the factory's.
        """
        return factory(self.layers, self.rotary_emb, self.kv_lora_rank, self.qk_rope_head_dim, device, **options)

    def __repr__(self) -> str:
        return f"LatentStack(configs={shown_configs(self.configs)}, seed={self.seed}, weights={self.weights!r}, norms={self.norms!r})"


def homogeneous_latent_stacks(
    *,
    min_layers: int = 1,
    max_layers: int = 3,
    config: ValueOr[LatentConfig] | None = None,
    norm_eps: ValueOr[float] | None = None,
    weights: ValueOr[str] | None = None,
    norms: ValueOr[str] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[LatentStack]:
    """Stacks whose layers agree in every axis of `LATENT_AXES`.

    An example, as printed:

        LatentStack(configs=[LatentConfig(kv_lora_rank=3, qk_rope_head_dim=4, hidden_size=2)] * 2, seed=0, weights='integers',
        norms='zeros')

    Guarantee: `stack.build(FusedLatentKV)` succeeds, and its `compute(...)` for hidden states of `stack.hidden_size` and positions below
    `max_position_embeddings`. All numbers are finite, in float16 too. What differs from layer to layer: all weights, and the norm's
    epsilon.

    Requirement: a `config` of the caller's must be one that `latent_configs` could draw.

    Shrinks towards one layer, then towards the plainest configuration, then zeros, then seed 0.

    Args:
        min_layers, max_layers: bounds of the number of layers.
        config: of every layer, but for `norm_eps`; drawn: any of `latent_configs`.
        norm_eps: of each layer, drawn anew for each.
        weights, norms: kinds of numbers, see `KINDS` and `LatentStack`.
        seed: of all numbers.

    Raises:
        InvalidArgument: an argument is no such value, or the bounds cross; from a draw where an argument is a strategy.

    See also: `heterogeneous_latent_stacks` for those that must be refused; `latent_kernel_inputs` for what to run a stack on.
    """
    check_bounds("min_layers", min_layers, "max_layers", max_layers, least=1)
    return _homogeneous(
        num_layers=st.integers(min_layers, max_layers),
        config=argument("config", config, latent_configs(norm_eps=NORM_EPSILONS[0]), instance(LatentConfig)),
        norm_eps=argument("norm_eps", norm_eps, st.sampled_from(NORM_EPSILONS), number),
        **_numbers(weights, norms, seed),
    )


@st.composite
def _homogeneous(
    draw: DrawFn,
    /,
    *,
    num_layers: SearchStrategy[int],
    config: SearchStrategy[LatentConfig],
    norm_eps: SearchStrategy[float],
    **numbers: SearchStrategy[Any],
) -> LatentStack:
    count, shared = draw(num_layers), draw(config)
    configs = [shared.changed(norm_eps=draw(norm_eps)) for _ in range(count)]
    return LatentStack(configs=configs, **{name: draw(strategy) for name, strategy in numbers.items()})


def _numbers(
    weights: ValueOr[str] | None, norms: ValueOr[str] | None, seed: ValueOr[int] | None
) -> dict[str, SearchStrategy[Any]]:
    return {
        "weights": argument("weights", weights, st.sampled_from(KINDS), choice(KINDS)),
        "norms": argument("norms", norms, st.sampled_from(KINDS), choice(KINDS)),
        "seed": argument("seed", seed, SEEDS, integer(0)),
    }


#: Streams of a stack's seed, one per tensor; layer n has those from n times this many on.
_STREAMS = 10


def _attention(config: LatentConfig, stack: LatentStack, index: int) -> Any:
    """A layer's attention, of our class or, where that cannot be such a layer, a namespace with the attributes that engines read."""
    from pytest_specdecode.layers import MLAAttention, RMSNorm

    dtype = torch_dtype(config.dtype)

    def made(kind: str, stream: int, *shape: int) -> Tensor:
        return filled(kind, shape, dtype, seed=stack.seed, stream=index * _STREAMS + stream)

    offset = 0.0 if config.norm_kind == "gemma" else 1.0
    width = {"latent": config.kv_lora_rank, "whole": config.row_width, "none": 0}[config.latent_norm]
    norm = made(stack.norms, 1, width) + offset if width else None
    weight = made(stack.weights, 0, config.projection_rows, config.hidden_size)
    bias = made(stack.weights, 2, config.projection_rows) if config.bias else None
    whole_class = config.quantization is None and bias is None and not config.is_joined
    if whole_class and config.latent_norm == "latent" and config.table_breaks_at is None:
        tensors = {
            "q_a_proj.weight": made(stack.weights, 3, config.q_lora_rank, config.hidden_size),
            "q_a_layernorm.weight": made(stack.norms, 4, config.q_lora_rank) + offset,
            "q_b_proj.weight": made(stack.weights, 5, 1 + config.qk_rope_head_dim, config.q_lora_rank),
            "kv_a_proj_with_mqa.weight": weight,
            "kv_a_layernorm.weight": norm,
            "kv_b_proj.weight": made(stack.weights, 6, 2, config.kv_lora_rank),
            "o_proj.weight": made(stack.weights, 7, config.hidden_size, 1),
        }
        return MLAAttention(
            config.spec,
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            norm_eps=config.norm_eps,
            norm_kind=config.norm_kind,
        )
    name = "fused_qkv_a_proj_with_mqa" if config.is_joined else "kv_a_proj_with_mqa"
    return SimpleNamespace(
        **{name: projection(config.quantization, weight, bias)},
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        kv_a_layernorm=None if norm is None else RMSNorm(norm, config.norm_eps, config.norm_kind),
        rotary_emb=rotary(config.rope, config.qk_rope_head_dim, config.table_breaks_at),
    )


# --- stacks with an odd layer -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BrokenLatentStack:
    """A stack with one odd layer.

    Attributes:
        axis: in what the layer is odd: one of `LATENT_AXES`, or of `LATENT_SOFT_AXES`, where nothing is to be refused.
        odd_layer: which layer it is.
        layer: which layer is to be reported: the odd one, but layer 1 where that is layer 0, which the others are held against. Layer 0
            itself where it contradicts itself (a stated q_lora_rank that does not fit its rows).
        expected, got: the two values to be reported, as FusedLatentKV's error carries them.
        stack: the layers.
    """

    axis: str
    odd_layer: int
    layer: int
    expected: Any
    got: Any
    stack: LatentStack

    @property
    def is_soft(self) -> bool:
        """Whether the stack can be served all the same."""
        return self.axis in LATENT_SOFT_AXES


def heterogeneous_latent_stacks(
    *,
    axis: ValueOr[str] | None = None,
    min_layers: int = 2,
    max_layers: int = 3,
    config: ValueOr[LatentConfig] | None = None,
    weights: ValueOr[str] | None = None,
    norms: ValueOr[str] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[BrokenLatentStack]:
    """Latent stacks in which exactly one layer differs from the others in exactly one axis.

    An example, as printed:

        BrokenLatentStack(axis='kv-lora-rank', odd_layer=1, layer=1, expected=1, got=2,
        stack=LatentStack(configs=[LatentConfig(kv_lora_rank=1, qk_rope_head_dim=2, hidden_size=1)] +
        [LatentConfig(kv_lora_rank=2, qk_rope_head_dim=2, hidden_size=1)], seed=0, weights='zeros', norms='zeros'))

    Guarantee: `broken.stack.build(FusedLatentKV)` raises a FusedKVError with this `axis`, `layer`, `expected` and `got`; for a soft axis
    it succeeds. Any layer may be the odd one, layer 0 included.

    Requirement: a `config` of the caller's must be one that `latent_configs` could draw, and leave room to differ: without a joined
    projection no q_lora_rank can be odd.

    Shrinks towards two layers of which layer 1 is odd, then the plainest configuration.

    Args:
        axis: one of `LATENT_AXES` or `LATENT_SOFT_AXES`; drawn: one of `LATENT_AXES`, with a `config` given as a value one in which that
            leaves room.
        min_layers, max_layers: bounds of the number of layers, at least 2.
        config: what the layers share; drawn: any of `latent_configs` that leaves room to differ.
        weights, norms: kinds of numbers, see `KINDS` and `LatentStack`; they have no say in whether a stack is refused.
        seed: of all numbers.

    Raises:
        InvalidArgument: an argument is no such value, the bounds cross, or `config` leaves no room; from a draw where an argument is a
            strategy.

    See also: `homogeneous_latent_stacks` for those that must be served.
    """
    check_bounds("min_layers", min_layers, "max_layers", max_layers, least=2)
    shared = None if config is None else argument("config", config, latent_configs(), instance(LatentConfig))
    given = fixed(config)
    roomy: tuple[str, ...] = LATENT_AXES
    if given is not None:
        roomy = tuple(each for each in LATENT_AXES if any(_CHANGES[each](given)))
    axes = (*LATENT_AXES, *LATENT_SOFT_AXES)
    choices = argument("axis", axis, st.sampled_from(roomy), choice(axes))
    if given is not None and fixed(axis) in LATENT_AXES and fixed(axis) not in roomy:
        raise InvalidArgument(f"config={given!r} leaves no room for another value of axis={axis!r}")
    return _heterogeneous(
        axis=choices,
        num_layers=st.integers(min_layers, max_layers),
        config=shared,
        **_numbers(weights, norms, seed),
    )


@st.composite
def _heterogeneous(
    draw: DrawFn,
    /,
    *,
    axis: SearchStrategy[str],
    num_layers: SearchStrategy[int],
    config: SearchStrategy[LatentConfig] | None,
    **numbers: SearchStrategy[Any],
) -> BrokenLatentStack:
    name, count = draw(axis), draw(num_layers)
    odd_layer = draw(st.sampled_from([*range(1, count), 0]))
    if config is None:
        config = latent_configs(is_joined=True) if name == "q-lora-rank" else latent_configs()
    shared = draw(config)
    changes = list(_CHANGES[name](shared))
    if not changes:
        reject()
    odd = shared.changed(**draw(st.sampled_from(changes)))
    configs = [odd if layer == odd_layer else shared for layer in range(count)]
    stack = LatentStack(configs=configs, **{name: draw(strategy) for name, strategy in numbers.items()})
    layer, expected, got = _due(name, shared, odd, odd_layer)
    return BrokenLatentStack(axis=name, odd_layer=odd_layer, layer=layer, expected=expected, got=got, stack=stack)


def _due(axis: str, shared: LatentConfig, odd: LatentConfig, odd_layer: int) -> tuple[int, Any, Any]:
    """The layer to be reported, and the values expected and got."""
    if axis == "rope-scaling" and odd.table_breaks_at is not None:
        return odd_layer or 1, "the shared cos_sin_cache", f"another row at position {odd.table_breaks_at}"
    if axis == "q-lora-rank" and odd.q_rows != odd.q_lora_rank:
        return odd_layer, odd.q_rows, odd.q_lora_rank
    usual, other = _VALUES[axis](shared), _VALUES[axis](odd)
    return (odd_layer, usual, other) if odd_layer > 0 else (1, other, usual)


#: The value of an axis that a configuration has, as an error names it.
_VALUES: dict[str, Callable[[LatentConfig], Any]] = {
    "kv-lora-rank": lambda config: config.kv_lora_rank,
    "qk-rope-head-dim": lambda config: config.qk_rope_head_dim,
    "rope-style": lambda config: config.is_neox_style,
    "rope-theta": lambda config: config.rope_theta,
    "rope-scaling": lambda config: normal_scaling(config.rope_scaling),
    "hidden-size": lambda config: config.hidden_size,
    "dtype": lambda config: config.dtype,
    "bias": lambda config: config.bias,
    "latent-norm": lambda config: config.latent_norm,
    "norm-kind": lambda config: config.norm_kind,
    "q-lora-rank": lambda config: config.q_lora_rank,
    "quantization": lambda config: config.quantization or "none",
    "norm-eps": lambda config: config.norm_eps,
}

Changes = Iterator[Mapping[str, Any]]


def _others(field_name: str, values: Sequence[Any]) -> Callable[[LatentConfig], Changes]:
    def changes(config: LatentConfig) -> Changes:
        yield from ({field_name: value} for value in values if value != getattr(config, field_name))

    return changes


def _other_rope_widths(config: LatentConfig) -> Changes:
    least = 4 if needs_pairs(config.rope_scaling) else 2
    for lanes in ROPE_HEAD_DIMS:
        if lanes >= least and lanes != config.qk_rope_head_dim:
            yield {"qk_rope_head_dim": lanes}


def _other_scalings(config: LatentConfig) -> Changes:
    """Another scaling stated; or the same one stated and a table that does not follow it."""
    usual = normal_scaling(config.rope_scaling)
    scalings = rope_scalings(config.qk_rope_head_dim)
    yield from ({"rope_scaling": each} for each in scalings if normal_scaling(each) != usual)
    for row in (1, 8):
        if row < min(config.max_position_embeddings, 256):
            yield {"table_breaks_at": row}


def _other_q_ranks(config: LatentConfig) -> Changes:
    """Another rank; or a stated one that the rows of the weight contradict. Where nothing is joined, nothing depends on it."""
    if not config.is_joined:
        return
    yield from ({"q_lora_rank": rank} for rank in Q_LORA_RANKS if rank != config.q_lora_rank)
    yield {"q_rows": config.q_lora_rank + 1}


_QUANTIZATIONS = ("int8", "float8_e4m3fn", "qweight", "weight_packed", "fp8", "Fp8LinearMethod")

_CHANGES: dict[str, Callable[[LatentConfig], Changes]] = {
    "kv-lora-rank": _others("kv_lora_rank", KV_LORA_RANKS),
    "qk-rope-head-dim": _other_rope_widths,
    "rope-style": _others("is_neox_style", (False, True)),
    "rope-theta": _others("rope_theta", ROPE_THETAS),
    "rope-scaling": _other_scalings,
    "hidden-size": _others("hidden_size", HIDDEN_SIZES),
    "dtype": _others("dtype", DTYPES),
    "bias": _others("bias", (False, True)),
    "latent-norm": _others("latent_norm", ("none", "whole")),
    "norm-kind": _others("norm_kind", NORM_KINDS),
    "q-lora-rank": _other_q_ranks,
    "quantization": _others("quantization", _QUANTIZATIONS),
    "norm-eps": _others("norm_eps", NORM_EPSILONS),
}


# --- inputs of a kernel -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LatentInput:
    """A latent stack and what one call is to compute with it.

    Tensors are made when first asked for, once, on the CPU.

    Attributes:
        stack: the layers.
        tokens: T.
        positions_kind, positions_dtype: one of `POSITION_KINDS`; `int64` or `int32`.
        values: kind of the numbers of `ctx_hidden` and `kv_a`, one of `KINDS`.
        layout: of `ctx_hidden` and `kv_a`, one of `LAYOUTS`.
        block_rows: for the launcher, None for its default.
        seed: of all numbers, apart from the stack's.
    """

    stack: LatentStack
    tokens: int
    positions_kind: str = "arange"
    positions_dtype: str = "int64"
    values: str = "normal"
    layout: str = "contiguous"
    block_rows: int | None = None
    seed: int = 0

    @cached_property
    def ctx_hidden(self) -> Tensor:
        """Hidden states `[T, hidden_size]` in the stack's dtype, for the whole path."""
        return self._drawn((self.tokens, self.stack.hidden_size), stream=1)

    @cached_property
    def kv_a(self) -> Tensor:
        """Projected rows `[T, L, kv_lora_rank + qk_rope_head_dim]` in the stack's dtype, for the launcher.

        Not `ctx_hidden`'s projection: its numbers are of kind `values` themselves.
        """
        return self._drawn((self.tokens, self.stack.num_layers, self.stack.configs[0].row_width), stream=2)

    @cached_property
    def positions(self) -> Tensor:
        """Integers `[T]`, each below the stack's `max_position_embeddings`."""
        last = self.stack.configs[0].max_position_embeddings - 1
        return drawn_positions(
            self.positions_kind, self.tokens, last=last, dtype=torch_dtype(self.positions_dtype), seed=self.seed
        )

    @cached_property
    def norm_weight(self) -> Tensor:
        """What each layer's latent is multiplied by, float32 `[L, kv_lora_rank]`: w, or 1 + w for a Gemma norm."""
        import torch

        norms = [layer.self_attn.kv_a_layernorm for layer in self.stack.layers]
        return torch.stack([norm.weight.detach().float() + (norm.norm_kind == "gemma") for norm in norms])

    @cached_property
    def eps(self) -> Tensor:
        """Each layer's epsilon, float32 `[L]`."""
        import torch

        return torch.tensor([config.norm_eps for config in self.stack.configs], dtype=torch.float32)

    @property
    def cos_sin_cache(self) -> Tensor:
        """Layer 0's rope table, float32 `[rows, qk_rope_head_dim]`, with a row for each of `positions`."""
        rotary_emb = self.stack.rotary_emb
        if self.tokens:
            rotary_emb._ensure_cos_sin_cache_length(int(self.positions.max()))
        table: Tensor = rotary_emb.cos_sin_cache
        return table

    @property
    def launch_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `fused_latent_norm_rope`, the output left out."""
        config = self.stack.configs[0]
        return {
            "kv_a": self.kv_a,
            "positions": self.positions,
            "norm_weight": self.norm_weight,
            "eps": self.eps,
            "cos_sin_cache": self.cos_sin_cache,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "is_neox_style": config.is_neox_style,
            "block_rows": self.block_rows,
        }

    @property
    def materialize_arguments(self) -> dict[str, Tensor]:
        """The keyword arguments of `FusedLatentKV.compute`, and with `write_layer_latent` of `materialize`."""
        return {"ctx_hidden": self.ctx_hidden, "positions": self.positions}

    def _drawn(self, shape: tuple[int, ...], *, stream: int) -> Tensor:
        values = filled(self.values, shape, torch_dtype(self.stack.dtype), seed=self.seed, stream=stream)
        return laid_out(values, self.layout)


def latent_kernel_inputs(
    *,
    stack: ValueOr[LatentStack] | None = None,
    min_tokens: int = 0,
    max_tokens: int = 17,
    positions: ValueOr[str] | None = None,
    positions_dtype: ValueOr[str] | None = None,
    values: ValueOr[str] | None = None,
    layout: ValueOr[str] | None = None,
    block_rows: ValueOr[int | None] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[LatentInput]:
    """Inputs of `fused_latent_norm_rope` (`launch_arguments`) and of `FusedLatentKV.materialize` and `.compute`
    (`materialize_arguments`).

    An example, as printed:

        LatentInput(stack=LatentStack(configs=[LatentConfig(kv_lora_rank=5, qk_rope_head_dim=4, hidden_size=3)], seed=7,
        weights='normal', norms='integers'), tokens=9, positions_kind='unsorted', positions_dtype='int64', values='tiny',
        layout='padded', block_rows=8, seed=3)

    Guarantee: shapes fit the stack; positions are at least 0 and below `max_position_embeddings`; all numbers are finite, in the stack's
    dtype, and so is what is computed of them.

    Requirement: a `stack` of the caller's must be one that `homogeneous_latent_stacks` could draw.

    Shrinks as its stack does; then towards zeros, the fewest tokens, positions 0, contiguous tensors, the launcher's own block, seed 0.

    Args:
        stack: drawn: any of `homogeneous_latent_stacks`.
        min_tokens, max_tokens: bounds of T.
        positions: kind of positions, one of `POSITION_KINDS`.
        positions_dtype: `int64` or `int32`.
        values: kind of numbers, one of `KINDS`; drawn: any, but not `tiny` for tiny weights in float16, whose products have no digits left.
        layout: one of `LAYOUTS`.
        block_rows: rows per program, a power of two; drawn: None (the launcher's default, which on a CPU is one block for all rows), or 8,
            which leaves most inputs with a ragged last block.
        seed: of all numbers, apart from the stack's.

    Raises:
        InvalidArgument: an argument is no such value, or the bounds cross; from a draw where an argument is a strategy.

    See also: `homogeneous_latent_stacks`.
    """
    check_bounds("min_tokens", min_tokens, "max_tokens", max_tokens, least=0)
    blocks: SearchStrategy[int | None] = st.sampled_from((None, 8))
    return _latent_inputs(
        stack=argument("stack", stack, homogeneous_latent_stacks(), instance(LatentStack)),
        tokens=token_counts(min_tokens, max_tokens),
        positions_kind=argument("positions", positions, st.sampled_from(POSITION_KINDS), choice(POSITION_KINDS)),
        positions_dtype=argument(
            "positions_dtype", positions_dtype, st.sampled_from(POSITION_DTYPES), choice(POSITION_DTYPES)
        ),
        values=None if values is None else argument("values", values, st.nothing(), choice(KINDS)),
        layout=argument("layout", layout, st.sampled_from(LAYOUTS), choice(LAYOUTS)),
        block_rows=argument("block_rows", block_rows, blocks, check_block),
        seed=argument("seed", seed, SEEDS, integer(0)),
    )


@st.composite
def _latent_inputs(
    draw: DrawFn,
    /,
    *,
    stack: SearchStrategy[LatentStack],
    values: SearchStrategy[str] | None,
    **rest: SearchStrategy[Any],
) -> LatentInput:
    layers = draw(stack)
    if values is None:
        values = st.sampled_from(usable_kinds(layers.dtype, layers.weights))
    return LatentInput(stack=layers, values=draw(values), **{name: draw(strategy) for name, strategy in rest.items()})
