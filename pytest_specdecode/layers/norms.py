"""RMS normalisation, in the two spellings that checkpoints use for its weight, and Cohere's layer norm.

Kept apart from the attention layers because the kind of a norm is invisible in the checkpoint: the same tensor means
`w` in one family and `1 + w` in another, and reading it the wrong way is silent.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers.linear import frozen

NormKind = Literal["rms", "gemma"]


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * w` over the last dimension (Zhang and Sennrich 2019); `gemma` multiplies by `1 + w`.

    Everything is computed in float32, or float64 where the input is float64, and rounded once to the input's dtype.
    Llama-style eager code rounds before the multiplication too, so in half precision it can differ by an ulp.

    Args:
        weight: `[width]`, any floating dtype.
        eps: added to the mean of squares.
        kind: `rms` or `gemma`.

    Attributes:
        weight, variance_epsilon: as the engines name them.
        norm_kind: `kind`.

    Raises:
        LayerBuildError: the weight is not a vector, eps is negative or not finite, or the kind is unknown.
    """

    def __init__(self, weight: Tensor, eps: float, kind: NormKind = "rms") -> None:
        super().__init__()
        if weight.ndim != 1 or not weight.is_floating_point() or weight.element_size() < 2:
            raise LayerBuildError(
                f"a norm's weight is a vector of floats of 16 bits or more; got {weight.dtype} of shape {list(weight.shape)}",
                got=tuple(weight.shape),
                due="[width]",
            )
        if not 0.0 <= eps < float("inf"):
            raise LayerBuildError(f"a norm's epsilon is {eps}; it must be finite and not negative", got=eps)
        if kind not in get_args(NormKind):
            raise LayerBuildError(
                f"unknown norm kind {kind!r}; known: {', '.join(get_args(NormKind))}", got=kind, due=get_args(NormKind)
            )
        self.weight = frozen(weight)
        self.variance_epsilon = float(eps)
        self.norm_kind: NormKind = kind

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same shape and dtype; DraftError where the width differs."""
        if x.shape[-1] != self.weight.shape[0]:
            raise DraftError(
                f"a norm over {self.weight.shape[0]} features was given {x.shape[-1]}",
                got=x.shape[-1],
                due=self.weight.shape[0],
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = self.weight.to(wide)
        if self.norm_kind == "gemma":
            scale = scale + 1.0
        exact = x.to(wide)
        inverse = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)
        return (exact * inverse * scale).to(x.dtype)

    def extra_repr(self) -> str:
        """Width, epsilon and kind, for `print(module)`."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}, kind={self.norm_kind}"


class LayerNorm(nn.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * w` over the last dimension, without a bias (Cohere).

    Computed in float32, or float64 where the input is float64, and rounded once to the input's dtype.

    Args:
        weight: `[width]`, or `[heads, width]` for one weight per head, any floating dtype.
        eps: added to the variance.

    Raises:
        LayerBuildError: the weight is neither, or eps is negative or not finite.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.variance_epsilon = RMSNorm(weight.flatten() if weight.ndim == 2 else weight, eps).variance_epsilon
        self.weight = frozen(weight)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]`, or `[..., heads, width]`, to the same shape and dtype; DraftError where that differs."""
        due = tuple(self.weight.shape)
        if tuple(x.shape[-len(due) :]) != due:
            raise DraftError(f"a norm over {list(due)} was given {list(x.shape)}", got=tuple(x.shape), due=due)
        wide = torch.promote_types(x.dtype, torch.float32)
        centred = x.to(wide) - x.to(wide).mean(dim=-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)
        return (centred * inverse * self.weight.to(wide)).to(x.dtype)
