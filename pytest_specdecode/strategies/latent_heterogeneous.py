"""Stacks in which one latent-attention layer differs from the others in one thing, and what a path must say of them: what
`heterogeneous.py` is for K/V heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from pytest_specdecode.fused_kv.latent_stack import LATENT_AXES, LATENT_SOFT_AXES
from pytest_specdecode.strategies.arguments import ValueOr
from pytest_specdecode.strategies.configs import needs_pairs
from pytest_specdecode.strategies.heterogeneous import (
    COMMON_CHANGES,
    COMMON_VALUES,
    Changes,
    OddLayers,
    others,
    stacks_with_an_odd_layer,
)
from pytest_specdecode.strategies.latent_config import (
    KV_LORA_RANKS,
    LATENT_NORMS,
    Q_LORA_RANKS,
    ROPE_HEAD_DIMS,
    LatentConfig,
    latent_configs,
)
from pytest_specdecode.strategies.latent_stack import LatentStack


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
    return stacks_with_an_odd_layer(
        _ODD_LAYERS,
        axis=axis,
        min_layers=min_layers,
        max_layers=max_layers,
        config=config,
        weights=weights,
        norms=norms,
        seed=seed,
    )


def _due(axis: str, shared: LatentConfig, odd: LatentConfig, odd_layer: int) -> tuple[int, Any, Any]:
    """The layer to be reported, and the values expected and got."""
    if axis == "rope-scaling" and odd.table_breaks_at is not None:
        return odd_layer or 1, "the shared cos_sin_cache", f"another row at position {odd.table_breaks_at}"
    if axis == "q-lora-rank" and odd.q_rows != odd.q_lora_rank:
        return odd_layer, odd.q_rows, odd.q_lora_rank
    usual, other = _VALUES[axis](shared), _VALUES[axis](odd)
    return (odd_layer, usual, other) if odd_layer > 0 else (1, other, usual)


# --- what an axis is, and how a layer can be odd in it ------------------------------------------------------------------------------------

#: The value of an axis that a configuration has, as an error names it.
_VALUES: dict[str, Callable[[LatentConfig], Any]] = {
    **COMMON_VALUES,
    "kv-lora-rank": lambda config: config.kv_lora_rank,
    "qk-rope-head-dim": lambda config: config.qk_rope_head_dim,
    "latent-norm": lambda config: config.latent_norm,
    "q-lora-rank": lambda config: config.q_lora_rank,
}


def _other_rope_widths(config: LatentConfig) -> Changes:
    least = 4 if needs_pairs(config.rope_scaling) else 2
    for lanes in ROPE_HEAD_DIMS:
        if lanes >= least and lanes != config.qk_rope_head_dim:
            yield {"qk_rope_head_dim": lanes}


def _other_q_ranks(config: LatentConfig) -> Changes:
    """Another rank; or a stated one that the rows of the weight contradict. Where nothing is joined, nothing depends on it."""
    if not config.is_joined:
        return
    yield from ({"q_lora_rank": rank} for rank in Q_LORA_RANKS if rank != config.q_lora_rank)
    yield {"q_rows": config.q_lora_rank + 1}


_CHANGES: dict[str, Callable[[LatentConfig], Changes]] = {
    **COMMON_CHANGES,
    "kv-lora-rank": others("kv_lora_rank", KV_LORA_RANKS),
    "qk-rope-head-dim": _other_rope_widths,
    "rope-style": others("is_neox_style", (False, True)),
    "latent-norm": others("latent_norm", ("none", *LATENT_NORMS)),
    "q-lora-rank": _other_q_ranks,
}


def _configs(axis: str) -> SearchStrategy[LatentConfig]:
    return latent_configs(is_joined=True) if axis == "q-lora-rank" else latent_configs()


_ODD_LAYERS = OddLayers(
    axes=LATENT_AXES,
    soft_axes=LATENT_SOFT_AXES,
    config=LatentConfig,
    configs=_configs,
    changes=_CHANGES,
    due=_due,
    stack=LatentStack,
    broken=BrokenLatentStack,
)
