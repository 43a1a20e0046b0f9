"""One draft attention layer's configuration, and the strategy of those that a stack can serve.

The record can say everything in which a layer can differ from its neighbours, senseless things included, because broken stacks are made
of the same records; the strategy only draws what a stack of such layers may be.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.fused_kv.stack import DTYPES
from pytest_specdecode.spec import GQASpec, RopeSpec
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

#: Replaced when the record is made by what follows from its other fields.
DERIVED: Any = None

#: What is drawn where nothing is asked for, plainest first.
KV_HEADS = (1, 2, 3, 4)
QUERY_GROUPS = (1, 2, 3)
HEAD_DIMS = (2, 3, 4, 5, 8, 16, 64, 80, 96, 128)
HIDDEN_SIZES = (1, 2, 3, 8, 16, 33)
ROPE_THETAS = (10000.0, 500000.0, 1000000.0, 10000000.0)
NORM_KINDS = ("rms", "gemma")
NORM_EPSILONS = (1e-6, 1e-5, 1e-3)
VALUE_SCALES = (1.0, 0.5, 0.612)
MAX_POSITIONS = (64, 300)


class Configuration(ABC):
    """What the configurations of a layer have in common: fields that follow from others unless they are given, and a short print.

    Subclasses are frozen keyword-only dataclasses whose following fields have the default DERIVED; all have the fields named here.
    """

    hidden_size: int
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    is_neox_style: bool
    max_position_embeddings: int
    table_breaks_at: int | None
    dtype: str
    norm_eps: float
    norm_kind: Literal["rms", "gemma"]

    @property
    def rope(self) -> RopeSpec:
        """The rotation as a RopeSpec."""
        return RopeSpec(
            theta=self.rope_theta,
            rope_type=str(self.rope_scaling.get("rope_type", "default")),
            rotary_dim=self.rotating_lanes,
            is_neox_style=self.is_neox_style,
            scaling=self.rope_scaling,
            max_position_embeddings=self.max_position_embeddings,
        )

    def __post_init__(self) -> None:
        for name, value in self._derived().items():
            if getattr(self, name) is DERIVED:
                object.__setattr__(self, name, value)

    def changed(self: Config, **fields: Any) -> Config:
        """A copy with other fields, in which what followed from the old ones follows from the new ones."""
        kept = {name: value for name, value in self._derived().items() if getattr(self, name) != value}
        followed = {name: DERIVED for name in self._derived() if name not in kept}
        return dataclasses.replace(self, **{**followed, **fields})  # type: ignore[type-var]

    def __repr__(self) -> str:
        items = dataclasses.fields(self)  # type: ignore[arg-type]
        defaults = {item.name: item.default for item in items} | {"rope_scaling": {}, **self._derived()}
        shown = ((name, getattr(self, name)) for name in defaults)
        body = ", ".join(f"{name}={value!r}" for name, value in shown if value != defaults[name])
        return f"{type(self).__name__}({body})"

    @abstractmethod
    def _derived(self) -> dict[str, int]:
        """Fields that follow from others, by name."""

    @property
    @abstractmethod
    def rotating_lanes(self) -> int:
        """How many lanes rotate: of a head, or of k_pe."""


Config = TypeVar("Config", bound=Configuration)


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerConfig(Configuration):
    """One attention layer of a draft. Printed without the fields that have their default.

    Attributes:
        num_heads, num_kv_heads, head_dim, hidden_size: as the words of the field.
        rotary_dim: leading lanes of a head that rotate; head_dim where not given.
        rope_theta: base of the frequencies.
        rope_scaling: the scaling's fields with `rope_type`; empty for none.
        is_neox_style: rotate-half (True) or interleaved pairs.
        max_position_embeddings: positions that the rope table may be asked for, before a scaling stretches them.
        table_breaks_at: the first row of the rope table that does not follow the fields above (it and the later ones repeat the row
            before it), or None for a right table.
        dtype: of every weight, without `torch.`.
        bias: whether the qkv projection has one.
        k_norm: `per-head` (over head_dim), `whole` (over all KV heads at once), or `none`.
        norm_kind: `rms` (times w) or `gemma` (times 1 + w).
        norm_eps: epsilon of the K norm.
        v_head_dim: width of a V head; head_dim where not given.
        value_scale: factor on V.
        q_size: rows of Q in the qkv weight as the layer *states* them; num_heads * head_dim, which is what it has, where not given.
        quantization: None, or how the qkv weight is quantised: a dtype (`float8_e4m3fn`, `int8`), the name of a packed tensor
            (`qweight`, `weight_packed`), or else a quantisation method's name.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rotary_dim: int = DERIVED
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    is_neox_style: bool = True
    max_position_embeddings: int = 64
    table_breaks_at: int | None = None
    dtype: str = "float32"
    bias: bool = False
    k_norm: Literal["per-head", "whole", "none"] = "per-head"
    norm_kind: Literal["rms", "gemma"] = "rms"
    norm_eps: float = 1e-6
    v_head_dim: int = DERIVED
    value_scale: float = 1.0
    q_size: int = DERIVED
    quantization: str | None = None

    @property
    def kv_size(self) -> int:
        """Rows of K in the qkv weight."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the qkv weight: Q, K, V."""
        return self.num_heads * self.head_dim + self.kv_size + self.num_kv_heads * self.v_head_dim

    @property
    def spec(self) -> GQASpec:
        """The same layer as a GQASpec, as far as a GQASpec can say it."""
        return GQASpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            in_features=self.hidden_size,
            out_features=self.hidden_size,
            rope=self.rope,
            qk_norm=self.k_norm != "none",
            qkv_bias=self.bias,
            value_scale=self.value_scale,
        )

    def _derived(self) -> dict[str, int]:
        return {
            "rotary_dim": self.head_dim,
            "v_head_dim": self.head_dim,
            "q_size": self.num_heads * self.head_dim,
        }

    @property
    def rotating_lanes(self) -> int:
        """rotary_dim."""
        return self.rotary_dim


def layer_configs(
    *,
    num_heads: ValueOr[int] | None = None,
    num_kv_heads: ValueOr[int] | None = None,
    head_dim: ValueOr[int] | None = None,
    rotary_dim: ValueOr[int] | None = None,
    hidden_size: ValueOr[int] | None = None,
    rope_theta: ValueOr[float] | None = None,
    rope_scaling: ValueOr[Mapping[str, Any]] | None = None,
    is_neox_style: ValueOr[bool] = True,
    max_position_embeddings: ValueOr[int] | None = None,
    dtype: ValueOr[str] | None = None,
    bias: ValueOr[bool] | None = None,
    norm_kind: ValueOr[str] | None = None,
    norm_eps: ValueOr[float] | None = None,
    value_scale: ValueOr[float] | None = None,
) -> SearchStrategy[LayerConfig]:
    """Configurations of one attention layer.

    An example, as printed:

        LayerConfig(num_heads=4, num_kv_heads=2, head_dim=80, hidden_size=16, rotary_dim=40, dtype='bfloat16', bias=True)

    Guarantee: any number of layers with one such configuration is a stack that FusedKV serves: `num_kv_heads` divides `num_heads`;
    `rotary_dim` is even, above 0 and at most `head_dim`; K normed per head; V as wide as K; nothing quantised.

    Requirement: arguments that are strategies must not draw what contradicts another argument.

    Shrinks towards one KV head and one query head of 2 lanes which both rotate, hidden size 1, theta 10000 unscaled, float32, no bias.

    Args:
        num_heads: a multiple of `num_kv_heads`; drawn: one to three times it.
        num_kv_heads: drawn: 1 to 4.
        head_dim: drawn: 2, 3, 4, 5, 8, 16, 64, 80, 96, 128.
        rotary_dim: drawn: all lanes, half of them, or 2.
        hidden_size: drawn: 1, 2, 3, 8, 16, 33.
        rope_theta: drawn: 1e4, 5e5, 1e6, 1e7.
        rope_scaling: fields with `rope_type`, empty for none; drawn: none, linear, llama3, yarn, and dynamic where more than 2 lanes
            rotate.
        is_neox_style: rotate-half, or interleaved pairs where it is False, which not every path serves; `st.booleans()` for both.
        max_position_embeddings: drawn: 64 or 300; a table starts with at most 256 rows, so that with 300 it has to grow.
        dtype: `float32`, `float16` or `bfloat16`.
        bias: of the qkv projection.
        norm_kind: `rms` or `gemma`.
        norm_eps: drawn: 1e-6, 1e-5, 1e-3.
        value_scale: drawn: 1, 0.5, 0.612.

    Raises:
        InvalidArgument: an argument is no such value, or two contradict each other; from a draw where an argument is a strategy.

    See also: `homogeneous_stacks`, which builds layers.
    """
    _check_together(fixed(num_heads), fixed(num_kv_heads), fixed(head_dim), fixed(rotary_dim), fixed(rope_scaling))
    positive = integer(1)
    unset: SearchStrategy[Any] = st.none()
    return _layer_configs(
        num_heads=argument("num_heads", num_heads, unset, positive),
        num_kv_heads=argument("num_kv_heads", num_kv_heads, unset, positive),
        head_dim=argument("head_dim", head_dim, unset, integer(2)),
        rotary_dim=argument("rotary_dim", rotary_dim, unset, integer(2, even=True)),
        hidden_size=argument("hidden_size", hidden_size, st.sampled_from(HIDDEN_SIZES), positive),
        rope_theta=argument("rope_theta", rope_theta, st.sampled_from(ROPE_THETAS), number),
        rope_scaling=argument("rope_scaling", rope_scaling, unset, mapping),
        is_neox_style=argument("is_neox_style", is_neox_style, st.just(True), boolean),
        max_position_embeddings=argument(
            "max_position_embeddings", max_position_embeddings, st.sampled_from(MAX_POSITIONS), positive
        ),
        dtype=argument("dtype", dtype, st.sampled_from(DTYPES), choice(DTYPES)),
        bias=argument("bias", bias, st.booleans(), boolean),
        norm_kind=argument("norm_kind", norm_kind, st.sampled_from(NORM_KINDS), choice(NORM_KINDS)),
        norm_eps=argument("norm_eps", norm_eps, st.sampled_from(NORM_EPSILONS), number),
        value_scale=argument("value_scale", value_scale, st.sampled_from(VALUE_SCALES), number),
    )


@st.composite
def _layer_configs(
    draw: DrawFn,
    /,
    *,
    num_heads: SearchStrategy[int | None],
    num_kv_heads: SearchStrategy[int | None],
    head_dim: SearchStrategy[int | None],
    rotary_dim: SearchStrategy[int | None],
    rope_scaling: SearchStrategy[Mapping[str, Any] | None],
    **rest: SearchStrategy[Any],
) -> LayerConfig:
    heads, kv_heads = draw(num_heads), draw(num_kv_heads)
    if kv_heads is None:
        kv_heads = draw(st.sampled_from([count for count in KV_HEADS if heads is None or heads % count == 0]))
    if heads is None:
        heads = kv_heads * draw(st.sampled_from(QUERY_GROUPS))

    width, turning, scaling = draw(head_dim), draw(rotary_dim), draw(rope_scaling)
    least = 4 if needs_pairs(scaling) else 2
    if width is None:
        due = turning or least
        width = draw(st.sampled_from([each for each in HEAD_DIMS if each >= due] or [due]))
    if turning is None:
        turning = draw(rotary_dims(width, least=least))
    _check_together(heads, kv_heads, width, turning, scaling)
    if scaling is None:
        scaling = draw(st.sampled_from(rope_scalings(turning)))
    return LayerConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        rotary_dim=turning,
        rope_scaling=scaling,
        **{name: draw(strategy) for name, strategy in rest.items()},
    )


def rotary_dims(head_dim: int, *, least: int = 2) -> SearchStrategy[int]:
    """All lanes, half of them, or `least`, each even and at least `least` where the head is that wide."""
    whole = head_dim - head_dim % 2
    half = whole // 2 - whole // 2 % 2
    return st.sampled_from([whole, *(each for each in dict.fromkeys((half, least)) if least <= each < whole)])


def rope_scalings(rotary_dim: int) -> list[dict[str, Any]]:
    """RoPE scalings that can be had with so many rotating lanes."""
    original = {"original_max_position_embeddings": 32}
    scalings: list[dict[str, Any]] = [
        {},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        {"rope_type": "yarn", "factor": 2.0, **original},
        {"rope_type": "yarn", "factor": 4.0, **original},
    ]
    if rotary_dim > 2:
        scalings.append({"rope_type": "dynamic", "factor": 2.0})
    return scalings


def _check_together(
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_dim: int | None,
    rope_scaling: Mapping[str, Any] | None,
) -> None:
    """What two arguments must be to each other; those that are no numbers have checks of their own."""
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and num_kv_heads > 0 and num_heads % num_kv_heads:
        raise InvalidArgument(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    if isinstance(head_dim, int) and isinstance(rotary_dim, int) and rotary_dim > head_dim:
        raise InvalidArgument(f"rotary_dim={rotary_dim} is above head_dim={head_dim}")
    narrow = next((width for width in (rotary_dim, head_dim) if isinstance(width, int) and width < 4), None)
    if narrow is not None and isinstance(rope_scaling, Mapping) and needs_pairs(rope_scaling):
        raise InvalidArgument(f"rope_scaling={rope_scaling!r}: dynamic scaling needs more rotating lanes than {narrow}")


def needs_pairs(scaling: Mapping[str, Any] | None) -> bool:
    """Dynamic scaling stretches theta by a power of rotary_dim / (rotary_dim - 2)."""
    return scaling is not None and scaling.get("rope_type") == "dynamic"
