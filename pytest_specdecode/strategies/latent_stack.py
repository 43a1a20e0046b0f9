"""Stacks of built latent-attention layers, and the strategy of those that one GEMM and one kernel launch can serve: what `stacks.py` is for
K/V heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pytest_specdecode.fused_kv.latent_stack import (
    JOINED_PROJECTION,
    PROJECTION,
    ROW_PROJECTIONS,
    LatentFacts,
    latent_facts_of,
)
from pytest_specdecode.strategies.arguments import ValueOr, argument, check_bounds, instance, number
from pytest_specdecode.strategies.configs import NORM_EPSILONS
from pytest_specdecode.strategies.latent_config import LatentConfig, latent_configs
from pytest_specdecode.strategies.stacks import (
    Built,
    LayerStack,
    drawn_homogeneous,
    norm,
    numbers_of_stacks,
    projection,
    rotary,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class LatentStack(LayerStack):
    """Draft layers as an engine would hand them to its stacked latent path.

    Layers are built when first asked for, once; each has weights of its own. `layer.self_attn` is a `layers.MLAAttention` where that class
    can be such a layer, and else a plain namespace with the attributes that engines read: where the norm goes over the whole row, under
    the names that they have in DeepSeek-V4 (`wkv` or `fused_wqa_wkv`, `kv_norm`, `head_dim`).

    Attributes:
        configs: one per layer.
        seed: of all numbers.
        weights, norms: kinds of numbers, as in `LayerStack`.
    """

    configs: Sequence[LatentConfig]

    @property
    def kv_lora_rank(self) -> int:
        """Layer 0's, which is what the path is built with."""
        return self.configs[0].kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        """Layer 0's."""
        return self.configs[0].qk_rope_head_dim

    @property
    def facts(self) -> tuple[LatentFacts, ...]:
        """What the built layers say of themselves."""
        return tuple(latent_facts_of(layer) for layer in self.layers)

    def build(self, factory: Callable[..., Built], *, device: Any = "cpu", **options: Any) -> Built:
        """`factory(layers, rotary_emb, kv_lora_rank, qk_rope_head_dim, device, **options)`: FusedLatentKV, or a helper of that shape.

        Layers stay on the CPU; moving what it needs to `device` is the factory's.
        """
        return factory(self.layers, self.rotary_emb, self.kv_lora_rank, self.qk_rope_head_dim, device, **options)

    def _attention(self, layer: int) -> Any:
        """A layer's attention, of our class or, where that cannot be such a layer, a namespace with the attributes that engines read."""
        from pytest_specdecode.layers import MLAAttention

        config = self.configs[layer]
        offset = 0.0 if config.norm_kind == "gemma" else 1.0
        width = {"latent": config.kv_lora_rank, "whole": config.row_width, "none": 0}[config.latent_norm]
        norm_weight = self._filled(self.norms, layer, 1, width) + offset if width else None
        weight = self._filled(self.weights, layer, 0, config.projection_rows, config.hidden_size)
        bias = self._filled(self.weights, layer, 2, config.projection_rows) if config.bias else None
        whole_class = config.quantization is None and bias is None and not config.is_joined
        if whole_class and config.latent_norm == "latent" and config.table_breaks_at is None:
            rank, lanes = config.q_lora_rank, config.qk_rope_head_dim
            tensors = {
                "q_a_proj.weight": self._filled(self.weights, layer, 3, rank, config.hidden_size),
                "q_a_layernorm.weight": self._filled(self.norms, layer, 4, rank) + offset,
                "q_b_proj.weight": self._filled(self.weights, layer, 5, 1 + lanes, rank),
                "kv_a_proj_with_mqa.weight": weight,
                "kv_a_layernorm.weight": norm_weight,
                "kv_b_proj.weight": self._filled(self.weights, layer, 6, 2, config.kv_lora_rank),
                "o_proj.weight": self._filled(self.weights, layer, 7, config.hidden_size, 1),
            }
            return MLAAttention(
                config.spec,
                {name: tensor for name, tensor in tensors.items() if tensor is not None},
                norm_eps=config.norm_eps,
                norm_kind=config.norm_kind,
            )
        is_row = config.latent_norm == "whole"
        separate, joined = ROW_PROJECTIONS if is_row else (PROJECTION, JOINED_PROJECTION)
        row: dict[str, Any] = {
            joined if config.is_joined else separate: projection(config.quantization, weight, bias),
            "kv_norm" if is_row else "kv_a_layernorm": norm(config, norm_weight),
            "head_dim" if is_row else "kv_lora_rank": config.row_width if is_row else config.kv_lora_rank,
        }
        return SimpleNamespace(
            **row,
            q_lora_rank=config.q_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            rotary_emb=rotary(config.rope, config.qk_rope_head_dim, config.table_breaks_at),
        )


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
    return drawn_homogeneous(
        LatentStack,
        num_layers=st.integers(min_layers, max_layers),
        config=argument("config", config, latent_configs(norm_eps=NORM_EPSILONS[0]), instance(LatentConfig)),
        norm_eps=argument("norm_eps", norm_eps, st.sampled_from(NORM_EPSILONS), number),
        **numbers_of_stacks(weights, norms, seed),
    )
