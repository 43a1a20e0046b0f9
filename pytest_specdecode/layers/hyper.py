"""Hyper-connections: a residual of several parallel streams, which every sublayer reads as one and writes back to all.

Kept apart from the layers that stand between, because an attention or a mixture of experts knows nothing of them. DeepSeek-V4 makes the
mixing of the streams doubly stochastic (Xie et al. 2026, manifold-constrained hyper-connections; Sinkhorn and Knopp 1967).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pytest_specdecode.layers.linear import frozen


class HyperConnection(nn.Module):
    """What one sublayer reads of n streams x_1 … x_n, each `[..., H]`, and what becomes of them:

        m = fn(x / rms(x)) over the n H lanes together, in three parts, each times its scale, plus base
        pre = sigmoid(m_1) + eps        [n]
        post = 2 sigmoid(m_2)           [n]
        mix = softmax(m_3) + eps        [n, n], then columns and rows divided by their sums in turn
        y = sublayer(sum_j pre_j x_j)
        x_k' = post_k y + sum_j mix_jk x_j

    Computed in float32 or wider and rounded to the streams' dtype where it leaves.

    Args:
        fn: `[n (n + 2), n H]`: rows of pre, of post, then of mix.
        base: `[n (n + 2)]`.
        scale: `[3]`.
        streams: n.
        iterations: divisions by the columns' sums; those by the rows' are one fewer.
        eps: keeps the sums from zero.
        norm_eps: of the norm, which has no weight.
    """

    def __init__(
        self, fn: Tensor, base: Tensor, scale: Tensor, *, streams: int, iterations: int, eps: float, norm_eps: float
    ) -> None:
        super().__init__()
        self.fn, self.base, self.scale = frozen(fn), frozen(base), frozen(scale)
        self.streams, self.iterations, self.eps, self.norm_eps = streams, iterations, eps, norm_eps

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the sublayer reads, `[..., H]`, and post `[..., n]` and mix `[..., n, n]` for `spread`, from `[..., n, H]`."""
        n = self.streams
        values = _projected(streams, self.fn, self.norm_eps)
        parts = torch.tensor([n, n, n * n], device=values.device)
        scale = self.scale.to(values.dtype).repeat_interleave(parts)
        pre, post, mix = torch.split(values * scale + self.base.to(values.dtype), [n, n, n * n], dim=-1)
        return (
            _weighted(streams, pre.sigmoid() + self.eps),
            2.0 * post.sigmoid(),
            self._balanced(torch.unflatten(mix, -1, (n, n)).softmax(dim=-1) + self.eps),
        )

    def spread(self, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        """The new streams `[..., n, H]`, from the old ones and the sublayer's output `[..., H]`."""
        wide = post.dtype
        written = post.unsqueeze(-1) * output.to(wide).unsqueeze(-2)
        kept = torch.einsum("...jk,...jd->...kd", mix, streams.to(wide))
        return (written + kept).to(streams.dtype)

    def _balanced(self, mix: Tensor) -> Tensor:
        mix = mix / (mix.sum(dim=-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + self.eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + self.eps)
        return mix


class StreamHead(nn.Module):
    """The streams as one, before the last norm: `sum_j (sigmoid(scale fn(x / rms(x)) + base) + eps)_j x_j`.

    Args:
        fn: `[n, n H]`.
        base: `[n]`.
        scale: `[1]`.
        eps, norm_eps: as for `HyperConnection`.
    """

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.fn, self.base, self.scale = frozen(fn), frozen(base), frozen(scale)
        self.eps, self.norm_eps = eps, norm_eps

    def forward(self, streams: Tensor) -> Tensor:
        """`[..., H]` from `[..., n, H]`, in the same dtype."""
        values = _projected(streams, self.fn, self.norm_eps)
        gates = (values * self.scale.to(values.dtype) + self.base.to(values.dtype)).sigmoid() + self.eps
        return _weighted(streams, gates)


def _projected(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """`fn` of all lanes of the streams together, normed without a weight; in float32 or wider."""
    wide = torch.promote_types(streams.dtype, torch.float32)
    lanes = streams.flatten(-2).to(wide)
    normed = lanes * torch.rsqrt(lanes.square().mean(dim=-1, keepdim=True) + norm_eps)
    return nn.functional.linear(normed, fn.to(wide))


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * streams.to(weights.dtype)).sum(dim=-2).to(streams.dtype)
