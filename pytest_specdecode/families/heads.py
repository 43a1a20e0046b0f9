"""What drafts made of heads share: Medusa, Hydra and the MLP speculator look at one position at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_specdecode.families.base import ReferenceLayer, TensorSource

if TYPE_CHECKING:
    import torch

    from pytest_specdecode.layers import Linear


class HeadLayer(ReferenceLayer):
    """A head without attention: each row of its inputs gives one row of logits.

    Attributes:
        widths: width of each input, by the name of `forward`'s argument.
        lm_head: gives device and dtype of a probe.
        forward: logits for the inputs that `widths` names.
    """

    self_attn: Any = None
    widths: Mapping[str, int]
    lm_head: Linear
    forward: Callable[..., torch.Tensor]

    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, torch.Tensor]:
        """One random matrix per input."""
        from pytest_specdecode.families.building import random_states

        weight = self.lm_head.weight
        return {
            name: random_states(weight.new_empty(width), 1, tokens, seed + place, scale, batch)[0]
            for place, (name, width) in enumerate(self.widths.items())
        }

    def prefill(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """All rows in one call."""
        return self.forward(**inputs)

    def incremental(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Row by row; a head keeps nothing, so nothing but rounding may differ."""
        import torch

        rows = next(iter(inputs.values())).shape[-2]
        return torch.cat(
            [
                self.forward(**{name: value[..., row : row + 1, :] for name, value in inputs.items()})
                for row in range(rows)
            ],
            dim=-2,
        )


def head_linear(source: TensorSource, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
    """The projection stored as `name`.weight, with a bias exactly where `bias`; LayerBuildError names the whole tensor."""
    from pytest_specdecode.layers import Linear
    from pytest_specdecode.layers.linear import take, take_bias

    held = {f"{name}.{rest}": value for rest, value in source.under(name).items()}
    return Linear(
        take(held, f"{name}.weight", (rows, columns)),
        take_bias(held, f"{name}.bias", rows, due=bias),
        name=f"{name}.weight",
    )
