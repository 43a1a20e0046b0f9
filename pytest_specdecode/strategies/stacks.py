"""Stacks of built draft layers, and the strategy of those that one GEMM and one kernel launch can serve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.fused_kv.stack import LayerFacts, facts_of
from pytest_specdecode.spec import RopeSpec
from pytest_specdecode.strategies.arguments import ValueOr, argument, check_bounds, choice, instance, integer, number
from pytest_specdecode.strategies.configs import NORM_EPSILONS, Configuration, LayerConfig, layer_configs
from pytest_specdecode.strategies.tensors import KINDS, SEEDS, filled, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

Built = TypeVar("Built")
AnyStack = TypeVar("AnyStack", bound="LayerStack")


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerStack(ABC):
    """What stacks have in common, whatever their layers' attention: layers that are built when first asked for, once, each with weights of
    its own.

    Attributes:
        configs: one per layer.
        seed: of all numbers.
        weights: kind of the numbers (`KINDS`) of projections and biases.
        norms: kind of the norms' weights: what is multiplied by is 1 plus such numbers (`zeros`: 1 exactly), so never all 0.
    """

    configs: Sequence[Configuration]
    seed: int = 0
    weights: str = "normal"
    norms: str = "normal"

    @cached_property
    def layers(self) -> tuple[Any, ...]:
        """The built layers, each with a `self_attn`."""
        return tuple(SimpleNamespace(self_attn=self._attention(layer)) for layer in range(self.num_layers))

    @property
    def rotary_emb(self) -> Any:
        """The rotary object that serves all layers: layer 0's."""
        return self.layers[0].self_attn.rotary_emb

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.configs)

    @property
    def hidden_size(self) -> int:
        """Layer 0's."""
        return self.configs[0].hidden_size

    @property
    def dtype(self) -> str:
        """Layer 0's, without `torch.`."""
        return self.configs[0].dtype

    def __repr__(self) -> str:
        shown = (
            f"configs={shown_configs(self.configs)}, seed={self.seed}, weights={self.weights!r}, norms={self.norms!r}"
        )
        return f"{type(self).__name__}({shown})"

    @abstractmethod
    def _attention(self, layer: int) -> Any:
        """The attention of layer `layer`."""

    def _filled(self, kind: str, layer: int, stream: int, *shape: int) -> Tensor:
        """A tensor of layer `layer` in its dtype; each of its tensors has another `stream`, below `_STREAMS`."""
        dtype = torch_dtype(self.configs[layer].dtype)
        return filled(kind, shape, dtype, seed=self.seed, stream=layer * _STREAMS + stream)


#: Streams of a stack's seed, one per tensor; layer n has those from n times this many on.
_STREAMS = 10


@dataclass(frozen=True, kw_only=True, repr=False)
class Stack(LayerStack):
    """Draft layers as an engine would hand them to its stacked K/V path.

    Layers are built when first asked for, once; each has weights of its own. `layer.self_attn` is a `layers.GQAAttention` where that
    class can be such a layer, and else a plain namespace with the attributes that engines read.

    Attributes:
        configs: one per layer.
        seed: of all numbers.
        weights, norms: kinds of numbers, as in `LayerStack`.
    """

    configs: Sequence[LayerConfig]

    @property
    def num_kv_heads(self) -> int:
        """Layer 0's, which is what engines build the path with."""
        return self.configs[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Layer 0's."""
        return self.configs[0].head_dim

    @property
    def facts(self) -> tuple[LayerFacts, ...]:
        """What the built layers say of themselves."""
        return tuple(facts_of(layer) for layer in self.layers)

    def build(self, factory: Callable[..., Built], *, device: Any = "cpu", **options: Any) -> Built:
        """`factory(layers, rotary_emb, num_kv_heads, head_dim, device, **options)`: FusedKV, or an engine's helper of that shape.

        Layers stay on the CPU; moving what it needs to `device` is the factory's.
        """
        return factory(self.layers, self.rotary_emb, self.num_kv_heads, self.head_dim, device, **options)

    def _attention(self, layer: int) -> Any:
        """A layer's attention, of our class or, where that cannot be such a layer, a namespace with the attributes that engines read."""
        from pytest_specdecode.layers import GQAAttention

        config = self.configs[layer]
        own_class = (
            config.quantization is None
            and config.k_norm != "whole"
            and config.v_head_dim == config.head_dim
            and config.q_size == config.num_heads * config.head_dim
            and config.table_breaks_at is None
        )
        tensors = self._tensors(layer)
        if own_class:
            return GQAAttention(config.spec, tensors, norm_eps=config.norm_eps, norm_kind=config.norm_kind)
        return SimpleNamespace(
            qkv_proj=projection(config.quantization, tensors["qkv_proj.weight"], tensors.get("qkv_proj.bias")),
            q_size=config.q_size,
            kv_size=config.kv_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            value_scale=config.value_scale,
            rotary_emb=rotary(config.rope, config.head_dim, config.table_breaks_at),
            k_norm=norm(config, tensors.get("k_norm.weight")),
        )

    def _tensors(self, layer: int) -> dict[str, Tensor]:
        config = self.configs[layer]
        q_rows, hidden = config.num_heads * config.head_dim, config.hidden_size
        tensors = {
            "qkv_proj.weight": self._filled(self.weights, layer, 0, config.qkv_rows, hidden),
            "o_proj.weight": self._filled(self.weights, layer, 1, hidden, q_rows),
        }
        if config.bias:
            tensors["qkv_proj.bias"] = self._filled(self.weights, layer, 2, config.qkv_rows)
        if config.k_norm == "none":
            return tensors
        width = config.kv_size if config.k_norm == "whole" else config.head_dim
        offset = 0.0 if config.norm_kind == "gemma" else 1.0
        for stream, name in enumerate(("q_norm.weight", "k_norm.weight"), start=3):
            tensors[name] = self._filled(self.norms, layer, stream, width) + offset
        return tensors


def homogeneous_stacks(
    *,
    min_layers: int = 1,
    max_layers: int = 3,
    config: ValueOr[LayerConfig] | None = None,
    norm_eps: ValueOr[float] | None = None,
    weights: ValueOr[str] | None = None,
    norms: ValueOr[str] | None = None,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[Stack]:
    """Stacks whose layers agree in every axis of `AXES`.

    An example, as printed:

        Stack(configs=[LayerConfig(num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=2)] * 2, seed=0, weights='integers', norms='zeros')

    Guarantee: `stack.build(FusedKV)` succeeds, and `stack.build(FusedKV).compute(...)` for hidden states of `stack.hidden_size` and
    positions below `max_position_embeddings`. All numbers are finite, in float16 too.
    What differs from layer to layer: all weights, and the K norm's epsilon.

    Requirement: a `config` of the caller's must be one that `layer_configs` could draw.

    Shrinks towards one layer, then towards the plainest configuration, then zeros, then seed 0.

    Args:
        min_layers, max_layers: bounds of the number of layers.
        config: of every layer, but for `norm_eps`; drawn: any of `layer_configs`, so rotate-half; for paths that serve interleaved pairs
            too, `layer_configs(is_neox_style=st.booleans())`.
        norm_eps: of each layer, drawn anew for each.
        weights, norms: kinds of numbers, see `KINDS` and `Stack`.
        seed: of all numbers.

    Raises:
        InvalidArgument: an argument is no such value, or the bounds cross; from a draw where an argument is a strategy.

    See also: `heterogeneous_stacks` for those that must be refused; `kernel_inputs` for what to run a stack on.
    """
    check_bounds("min_layers", min_layers, "max_layers", max_layers, least=1)
    return drawn_homogeneous(
        Stack,
        num_layers=st.integers(min_layers, max_layers),
        config=argument("config", config, layer_configs(norm_eps=NORM_EPSILONS[0]), instance(LayerConfig)),
        norm_eps=argument("norm_eps", norm_eps, st.sampled_from(NORM_EPSILONS), number),
        **numbers_of_stacks(weights, norms, seed),
    )


@st.composite
def drawn_homogeneous(
    draw: DrawFn,
    kind: type[AnyStack],
    /,
    *,
    num_layers: SearchStrategy[int],
    config: SearchStrategy[Any],
    norm_eps: SearchStrategy[float],
    **numbers: SearchStrategy[Any],
) -> AnyStack:
    """Stacks of class `kind` with one configuration for all layers, but for `norm_eps`; `numbers` as `numbers_of_stacks` makes them."""
    count, shared = draw(num_layers), draw(config)
    configs = [shared.changed(norm_eps=draw(norm_eps)) for _ in range(count)]
    return kind(configs=configs, **{name: draw(strategy) for name, strategy in numbers.items()})


def numbers_of_stacks(
    weights: ValueOr[str] | None, norms: ValueOr[str] | None, seed: ValueOr[int] | None
) -> dict[str, SearchStrategy[Any]]:
    """The arguments of a stack that its numbers follow from."""
    return {
        "weights": argument("weights", weights, st.sampled_from(KINDS), choice(KINDS)),
        "norms": argument("norms", norms, st.sampled_from(KINDS), choice(KINDS)),
        "seed": argument("seed", seed, SEEDS, integer(0)),
    }


# --- building ---------------------------------------------------------------------------------------------------------------------------


def projection(quantization: str | None, weight: Tensor, bias: Tensor | None) -> SimpleNamespace:
    """A projection as engines hold it: plain, or quantised in one of the ways that `LayerConfig.quantization` names."""
    if quantization is None:
        return SimpleNamespace(weight=weight, bias=bias)
    import torch

    if quantization in ("qweight", "weight_packed"):
        packed = torch.zeros(weight.shape[0], -(-weight.shape[1] // 8), dtype=torch.int32)
        return SimpleNamespace(**{quantization: packed}, bias=bias)
    if quantization in ("float8_e4m3fn", "float8_e5m2", "int8"):
        return SimpleNamespace(weight=weight.clamp(-100, 100).to(torch_dtype(quantization)), bias=bias)
    return SimpleNamespace(weight=weight, bias=bias, quant_method=quantization)


def norm(config: Configuration, weight: Tensor | None) -> Any:
    """A norm of the configuration's kind and epsilon; None without a weight."""
    from pytest_specdecode.layers import RMSNorm

    return None if weight is None else RMSNorm(weight, config.norm_eps, config.norm_kind)


def rotary(rope: RopeSpec, head_dim: int, table_breaks_at: int | None) -> Any:
    """A rotary object, or one whose table repeats a row from `table_breaks_at` on."""
    from pytest_specdecode.layers import RotaryEmbedding

    whole = RotaryEmbedding(rope, head_dim)
    if table_breaks_at is None:
        return whole
    table = whole.cos_sin_cache.clone()
    if not 0 < table_breaks_at < table.shape[0]:
        raise InvalidArgument(
            f"table_breaks_at={table_breaks_at!r}: a row of the table but the first is due, so 1 to {table.shape[0] - 1}"
        )
    table[table_breaks_at:] = table[table_breaks_at - 1]
    return SimpleNamespace(
        rotary_dim=whole.rotary_dim,
        is_neox_style=whole.is_neox_style,
        base=whole.base,
        rope_scaling=whole.rope_scaling,
        cos_sin_cache=table,
    )


def shown_configs(configs: Sequence[Any]) -> str:
    """The list as Python, with equal neighbours written once."""
    runs: list[tuple[Any, int]] = []
    for config in configs:
        if runs and runs[-1][0] == config:
            runs[-1] = config, runs[-1][1] + 1
        else:
            runs.append((config, 1))
    return " + ".join(f"[{config!r}]" + (f" * {count}" if count > 1 else "") for config, count in runs)
