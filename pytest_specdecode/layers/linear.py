"""The one place where a checkpoint's tensor becomes a parameter, so that every layer reports a missing or misshapen one
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_specdecode.errors import DraftError, LayerBuildError

_COMPUTED = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class Linear(nn.Module):
    """`y = x @ weight.T + bias` with frozen parameters.

    Args:
        weight: `[out, in]`.
        bias: `[out]`, or None.
        name: the tensor's name, for messages.

    Raises:
        LayerBuildError: the weight is not 2-D or of a dtype that is not computed in (packed, 8-bit), or the bias does
            not have `out` entries.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, name: str = "weight") -> None:
        super().__init__()
        if weight.dtype not in _COMPUTED:
            raise LayerBuildError(
                f"is {_dtype(weight)}; layers compute in {', '.join(_COMPUTED.values())}, so dequantize it first",
                key=name,
                got=_dtype(weight),
                due=tuple(_COMPUTED.values()),
            )
        if weight.ndim != 2:
            raise LayerBuildError(
                f"has shape {list(weight.shape)}; a projection is [out, in]",
                key=name,
                got=tuple(weight.shape),
                due="[out, in]",
            )
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise LayerBuildError(
                f"the bias has shape {list(bias.shape)}; due is {[weight.shape[0]]}",
                key=name,
                got=tuple(bias.shape),
                due=(weight.shape[0],),
            )
        if bias is not None and bias.dtype not in _COMPUTED:
            raise LayerBuildError(
                f"the bias is {_dtype(bias)}; layers compute in {', '.join(_COMPUTED.values())}",
                key=name,
                got=_dtype(bias),
                due=_dtype(weight),
            )
        self.name = name
        self.weight = frozen(weight)
        # Engines load every parameter in the model's one dtype.
        self.bias = None if bias is None else frozen(bias.to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]` in the weight's dtype; DraftError where width or dtype do not fit."""
        return self.rows(x, slice(None))

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """The outputs that `rows` of the weight give, `[..., len(rows)]`; errors as for the whole."""
        if x.shape[-1] != self.weight.shape[1]:
            raise DraftError(
                f"reads {self.weight.shape[1]} features; the input has {x.shape[-1]}",
                key=self.name,
                got=x.shape[-1],
                due=self.weight.shape[1],
            )
        if x.dtype != self.weight.dtype:
            raise DraftError(
                f"is {_dtype(self.weight)}; the input is {_dtype(x)}; convert one of them",
                key=self.name,
                got=_dtype(x),
                due=_dtype(self.weight),
            )
        return F.linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])


def frozen(tensor: Tensor) -> nn.Parameter:
    """`tensor` as a parameter that no optimiser moves; it shares the tensor's storage."""
    return nn.Parameter(tensor.detach(), requires_grad=False)


def take(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """`tensors[name]`, which must have `shape`; LayerBuildError names the tensor, what was got and what was due."""
    if name not in tensors:
        raise LayerBuildError(f"is missing; a tensor of shape {list(shape)} is due", key=name, due=tuple(shape))
    tensor = tensors[name]
    if tuple(tensor.shape) != tuple(shape):
        raise LayerBuildError(
            f"has shape {list(tensor.shape)}; due is {list(shape)}", key=name, got=tuple(tensor.shape), due=tuple(shape)
        )
    return tensor


def take_bias(tensors: Mapping[str, Tensor], name: str, rows: int, *, due: bool) -> Tensor | None:
    """The bias `name` of `rows` entries where one is due, else None; a bias that is not due is an error, never
    dropped.
    """
    if due:
        return take(tensors, name, (rows,))
    if name in tensors:
        raise LayerBuildError("is a bias where the spec says there is none", key=name, got=tuple(tensors[name].shape))
    return None


def join(parts: Sequence[Tensor], name: str) -> Tensor:
    """`parts` joined on dim 0; LayerBuildError where their dtypes or devices differ, which torch would paper over."""
    kinds = [f"{_dtype(part)} on {part.device}" for part in parts]
    if len(set(kinds)) > 1:
        raise LayerBuildError(f"its parts differ: {', '.join(kinds)}", key=name, got=tuple(kinds), due=kinds[0])
    return torch.cat(list(parts), dim=0)


def known(value: int | None, field: str) -> int:
    """An extent of a spec that the layer cannot do without; LayerBuildError names the field where it is None or not
    positive.
    """
    if value is None:
        raise LayerBuildError("is not known; a layer cannot be built without it", key=field, due="a positive integer")
    if value <= 0:
        raise LayerBuildError(f"is {value}; it must be positive", key=field, got=value, due="a positive integer")
    return value


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
