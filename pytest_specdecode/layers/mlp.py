"""The gated feed-forward of nearly every draft family here, `down(act(gate(x)) * up(x))`, and the plain one of Nemotron's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers.linear import Linear, take, take_bias

#: Activations by the names that configurations use.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
}


class GatedMLP(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))` (Shazeer 2020).

    Args:
        gate, up: weights `[intermediate, in]`.
        down: weight `[out, intermediate]`.
        hidden_act: a key of `ACTIVATIONS`.
        biases: `gate_proj`, `up_proj` and `down_proj` to their biases, or None; a name that is absent has none.
        limit: a bound on the gate from above, and on up from both sides, before they are multiplied (DeepSeek-V4); None for no bound.

    Raises:
        LayerBuildError: an unknown activation, an unknown name in `biases`, or shapes that do not chain.
    """

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        hidden_act: str = "silu",
        biases: Mapping[str, Tensor] | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        biases = biases or {}
        self.hidden_act = _known_activation(hidden_act)
        strangers = sorted(set(biases) - {"gate_proj", "up_proj", "down_proj"})
        if strangers:
            raise LayerBuildError(f"biases of unknown projections: {', '.join(strangers)}", got=tuple(strangers))
        self.limit = limit
        self.gate_proj = Linear(gate, biases.get("gate_proj"), name="gate_proj.weight")
        self.up_proj = Linear(up, biases.get("up_proj"), name="up_proj.weight")
        self.down_proj = Linear(down, biases.get("down_proj"), name="down_proj.weight")
        take({"up_proj.weight": up}, "up_proj.weight", gate.shape)
        take({"down_proj.weight": down}, "down_proj.weight", (down.shape[0], gate.shape[0]))

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        in_features: int,
        intermediate_size: int,
        out_features: int | None = None,
        hidden_act: str = "silu",
        bias: bool = False,
        limit: float | None = None,
    ) -> GatedMLP:
        """Built from local names: `gate_proj.weight` and `up_proj.weight`, or both joined (gate first) as
        `gate_up_proj.weight`; `down_proj.weight`; and `.bias` beside each where `bias`. `out_features` equals
        `in_features` where None.

        Raises:
            LayerBuildError: as for the class, or a tensor is missing, of another shape, or a bias that is not due.
        """
        out_features = in_features if out_features is None else out_features
        rows = {"gate_proj": intermediate_size, "up_proj": intermediate_size, "down_proj": out_features}
        tensors = {**tensors, **_split(tensors, intermediate_size, in_features, bias=bias)}
        biases = {name: take_bias(tensors, f"{name}.bias", size, due=bias) for name, size in rows.items()}
        return cls(
            take(tensors, "gate_proj.weight", (intermediate_size, in_features)),
            take(tensors, "up_proj.weight", (intermediate_size, in_features)),
            take(tensors, "down_proj.weight", (out_features, intermediate_size)),
            hidden_act,
            {name: value for name, value in biases.items() if value is not None},
            limit,
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]` in the weights' dtype."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        out: Tensor = self.down_proj(ACTIVATIONS[self.hidden_act](gate) * up)
        return out


class PlainMLP(nn.Module):
    """`down_proj(act(up_proj(x)))`, without biases (Nemotron-H).

    Args:
        tensors: by local name: `up_proj.weight` `[intermediate, in]` and `down_proj.weight` `[in, intermediate]`.
        in_features, intermediate_size: the two widths.
        hidden_act: a key of `ACTIVATIONS`.

    Raises:
        LayerBuildError: an unknown activation, or a tensor is missing or of another shape.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, in_features: int, intermediate_size: int, hidden_act: str = "relu2"
    ) -> None:
        super().__init__()
        self.hidden_act = _known_activation(hidden_act)
        up = take(tensors, "up_proj.weight", (intermediate_size, in_features))
        down = take(tensors, "down_proj.weight", (in_features, intermediate_size))
        self.up_proj, self.down_proj = Linear(up, name="up_proj.weight"), Linear(down, name="down_proj.weight")

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to the same shape in the weights' dtype."""
        out: Tensor = self.down_proj(ACTIVATIONS[self.hidden_act](self.up_proj(x)))
        return out


def _known_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise LayerBuildError(
            f"unknown activation {name!r}; known: {', '.join(sorted(ACTIVATIONS))}",
            key="hidden_act",
            got=name,
            due=tuple(sorted(ACTIVATIONS)),
        )
    return name


def _split(tensors: Mapping[str, Tensor], rows: int, columns: int, *, bias: bool) -> dict[str, Tensor]:
    """The halves of a joined `gate_up_proj`, if there is one."""
    parts: dict[str, Tensor] = {}
    if "gate_up_proj.weight" in tensors:
        joined = take(tensors, "gate_up_proj.weight", (2 * rows, columns))
        parts["gate_proj.weight"], parts["up_proj.weight"] = torch.split(joined, rows)
    if "gate_up_proj.bias" in tensors:
        joined_bias = take_bias(tensors, "gate_up_proj.bias", 2 * rows, due=bias)
        assert joined_bias is not None
        parts["gate_proj.bias"], parts["up_proj.bias"] = torch.split(joined_bias, rows)
    return parts
