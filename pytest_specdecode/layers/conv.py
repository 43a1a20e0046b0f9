"""DFlash2's convolution along a drafted block, before and after a sublayer.

Kept apart from the layers because both sides share one projection: the kernels for a sublayer's output are made from its input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers.linear import Linear, frozen, take


class GroupedDynamicConv(nn.Module):
    """Causal convolution of `taps` rows whose kernel is a fixed part per channel plus a part per group, made from the row itself.

    `y[i] = sum_t (base[side, t] + delta[i, side, t]) * x[i - t]`, where rows before the block count as zero and `delta`, made once
    by `kernel_projection` from the sublayer's input, holds one number for each group of neighbouring channels (DFlash2, z-lab/dflash).

    Args:
        tensors: by local name: `base_kernel` `[2, taps, hidden_size]` (input side, output side) and `kernel_projection.weight`
            `[2 * taps * groups, hidden_size]`, rows ordered by side, tap, group.
        hidden_size, taps, group_size: channels, rows that a row sees, channels of a group.

    Raises:
        LayerBuildError: the group size does not divide, or a tensor is missing or of another shape.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        if taps < 1 or group_size < 1 or hidden_size % group_size:
            raise LayerBuildError(
                f"conv_group_size {group_size} does not divide {hidden_size} channels, or there are {taps} taps",
                got=group_size,
                due=f"a divisor of {hidden_size}",
            )
        self.taps, self.group_size, self.groups = taps, group_size, hidden_size // group_size
        self.base_kernel = frozen(take(tensors, "base_kernel", (2, taps, hidden_size)))
        self.kernel_projection = Linear(
            take(tensors, "kernel_projection.weight", (2 * taps * self.groups, hidden_size)),
            name="kernel_projection.weight",
        )

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input `[..., B, H]`, convolved along the B rows of a block, and the kernels that `finish` takes."""
        kernels = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        return self._convolve(x, kernels[..., 0, :, :], 0), kernels[..., 1, :, :]

    def finish(self, x: Tensor, kernels: Tensor) -> Tensor:
        """The sublayer's output `[..., B, H]`, convolved with `kernels` `[..., B, taps, groups]`."""
        return self._convolve(x, kernels, 1)

    def _convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        if delta.shape[:-2] != x.shape[:-1]:
            raise DraftError(
                f"kernels of {list(delta.shape)} do not fit rows of {list(x.shape)}",
                key="kernels",
                got=tuple(delta.shape),
            )
        out = torch.zeros_like(x)
        for tap in range(min(self.taps, x.shape[-2])):
            kernel = self.base_kernel[side, tap] + delta[..., tap, :].repeat_interleave(self.group_size, dim=-1)
            shifted = torch.zeros_like(x)
            shifted[..., tap:, :] = x[..., : x.shape[-2] - tap, :]
            out = out + kernel * shifted
        return out
