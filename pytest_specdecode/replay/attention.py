"""Attention of many drafts at once: each looks at its own prefix of one recorded context, and at rows of its own.

A served draft keeps the K and V of its context and drafts behind the last token. In a replay every position of a recording is such a last
token. Their contexts are prefixes of one another, so their K and V are computed once, and a start is only a number: how many rows it sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_specdecode.layers import MLAAttention
from pytest_specdecode.spec import WindowReading

#: Scores that are held at once.
_SCORES = 1 << 25


class ContextKV:
    """K and V of a recording's rows in one layer, row i at position i.

    Attributes:
        k, v: [rows, kv_heads, dim].
    """

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None) -> None:
        self._parts = [] if k is None or v is None else [(k, v)]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add rows behind those that are there."""
        self._parts.append((k, v))

    @property
    def k(self) -> Tensor:
        """All keys."""
        return self._whole()[0]

    @property
    def v(self) -> Tensor:
        """All values."""
        return self._whole()[1]

    def _whole(self) -> tuple[Tensor, Tensor]:
        if len(self._parts) > 1:
            ks, vs = zip(*self._parts, strict=True)
            self._parts = [(torch.cat(ks), torch.cat(vs))]
        return self._parts[0]


class OwnKV:
    """What each of S drafts adds to its context in one layer.

    Attributes:
        context: the layer's.
        prefix: int64 [S], rows of the context that each draft sees; its own rows stand at the positions behind them.
        k, v: [S, J, kv_heads, dim], or None before the first.
    """

    def __init__(self, context: ContextKV, prefix: Tensor) -> None:
        self.context, self.prefix = context, prefix
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add rows [S, R, kv_heads, dim] behind those that are there."""
        self.k = k if self.k is None else torch.cat([self.k, k], dim=1)
        self.v = v if self.v is None else torch.cat([self.v, v], dim=1)

    def keep(self, live: Tensor) -> None:
        """Go on with the drafts that `live` (bool [S]) names."""
        self.prefix = self.prefix[live]
        self.k = None if self.k is None else self.k[live]
        self.v = None if self.v is None else self.v[live]


class ChainAttention:
    """Stands in for a chain layer's attention: with a `ContextKV` as cache it fills it, with an `OwnKV` it drafts over it.

    A layer's forward hands its cache through to `self_attn`, so that everything around the attention stays the reference's.
    """

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def __call__(self, x: Tensor, positions: Tensor, *, cache: ContextKV | OwnKV) -> Tensor:
        """[T, out] from x [T, in], the next rows of the context; or [S, R, out] from x [S, R, in], the next rows of S drafts."""
        attention = self.attention
        q, k, v = project(attention, x, positions)
        window, chunk = getattr(attention, "sliding_window", None), getattr(attention, "chunk_size", None)
        if isinstance(cache, ContextKV):
            cache.append(k, v)
            at = positions.unsqueeze(1)
            low = _lower(at, window, chunk)
            heads = attend(
                q.unsqueeze(1), cache.k, cache.v, low, at + 1, scaling=attention.scaling, sink=_sink(attention)
            )
            return finish(attention, heads.squeeze(1), x)
        cache.append(k, v)
        assert cache.k is not None
        assert cache.v is not None
        own = cache.prefix.unsqueeze(1) + torch.arange(cache.k.shape[1], device=x.device)
        away = positions.unsqueeze(2) - own.unsqueeze(1)
        seen = away >= 0
        if window is not None:
            seen = seen & (away < window)
        if chunk is not None:
            seen = seen & (positions.unsqueeze(2) // chunk == own.unsqueeze(1) // chunk)
        heads = attend(
            q,
            cache.context.k,
            cache.context.v,
            _lower(positions, window, chunk),
            cache.prefix.unsqueeze(1).expand_as(positions),
            own=(cache.k, cache.v, seen),
            scaling=attention.scaling,
            sink=_sink(attention),
        )
        return finish(attention, heads, x)


class BlockAttention:
    """Stands in for a block layer's `attention`: S blocks at once, each over the context before its anchor and over itself."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, states: Tensor, positions: Tensor, context: None, places: None, cache: ContextKV) -> Tensor:
        """[S, B, out] of normed block states [S, B, in]; the first of `positions` [S, B] is the anchor's, `cache` is the context."""
        attention, layer = self.layer.self_attn, self.layer
        q, k, v = project(attention, states, positions)
        window: int | None = getattr(attention, "sliding_window", None)
        reading: WindowReading = layer.window_reading
        away = positions.unsqueeze(2) - positions.unsqueeze(1)
        seen = away >= 0 if layer.is_causal else torch.ones_like(away, dtype=torch.bool)
        low = torch.zeros_like(positions)
        if window is not None and reading == "anchor":
            low = (positions[:, :1] - window).expand_as(positions)
        elif window is not None:
            reach = window if reading == "row-inclusive" else window - 1
            low, seen = positions - reach, seen & (away.abs() <= reach)
        heads = attend(
            q,
            cache.k,
            cache.v,
            low,
            positions[:, :1].expand_as(positions),
            own=(k, v, seen),
            scaling=attention.scaling,
            sink=_sink(attention),
        )
        return finish(attention, heads, states)


def project(attention: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of rows `x` [..., in], each [..., heads, dim]; a latent is expanded to keys and values per head."""
    if not isinstance(attention, MLAAttention):
        return (attention.q(x, positions), *attention.kv(x, positions))
    return (torch.cat(attention.q(x, positions), dim=-1), *expand(attention, attention.latent(x, positions)))


def expand(attention: MLAAttention, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [..., n, nope + rope] and values [..., n, v] of latent rows [..., kv_lora_rank + rope]."""
    latent, turned = torch.split(rows, [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    widths = [attention.qk_nope_head_dim, attention.v_head_dim]
    k, v = attention.kv_b_proj(latent).unflatten(-1, (attention.num_heads, sum(widths))).split(widths, dim=-1)
    shared = turned.unsqueeze(-2).expand(*k.shape[:-1], attention.qk_rope_head_dim)
    return torch.cat([k, shared], dim=-1), v


def finish(attention: Any, heads: Tensor, x: Tensor) -> Tensor:
    """The attention's output [..., out] from its heads' [..., heads, dim] and its input."""
    out: Tensor = (
        attention.o_proj(heads.flatten(-2)) if isinstance(attention, MLAAttention) else attention.output(heads, x)
    )
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    scaling: float,
    own: tuple[Tensor, Tensor, Tensor] | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Softmax attention of S drafts with R rows each, in float32 or wider and rounded once to the dtype of `q`.

    Args:
        q: [S, R, heads, dim].
        k, v: [C, kv_heads, dim], the one context; query head h reads KV head h // (heads / kv_heads).
        low, high: int64 [S, R]; a row sees the context from `low` to before `high`.
        own: keys and values [S, J, kv_heads, dim] of each draft's own, and bool [S, R, J] who sees which.
        scaling: factor on the scores.
        sink: [heads], a logit beside the scores whose value is zero.

    Returns:
        [S, R, heads, width of v].
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(wide), v.to(wide)
    starts, rows, heads, _ = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    out = q.new_empty(starts, rows, heads, v.shape[2])
    step = max(1, _SCORES // max(1, rows * heads * max(1, len(k))))
    for begin in range(0, starts, step):
        part = slice(begin, begin + step)
        left, right = max(0, int(low[part].min())), int(high[part].max())
        left = min(left, right)
        size = len(q[part])
        # [kv, S R g, dim]: all queries that read one KV head side by side.
        grouped = torch.unflatten(q[part].to(wide), 2, (kv_heads, groups))
        queries = grouped.permute(2, 0, 1, 3, 4).flatten(1, 3)
        scores = torch.bmm(queries, keys[left:right].permute(1, 2, 0)).mul_(scaling)
        column = torch.arange(left, right, device=q.device)
        hidden = (column < low[part].unsqueeze(2)) | (column >= high[part].unsqueeze(2))
        if bool(hidden.any()):
            by_row = scores.view(kv_heads, size, rows, groups, right - left)
            by_row.masked_fill_(hidden.unsqueeze(2), -torch.inf)
        top = scores.amax(-1, keepdim=True) if right > left else scores.new_full((*scores.shape[:2], 1), -torch.inf)
        beside = None
        if own is not None:
            beside = torch.einsum("srkgd,sjkd->ksrgj", grouped, own[0][part].to(wide))
            beside = beside.mul_(scaling).masked_fill_(~own[2][part].unsqueeze(2), -torch.inf).flatten(1, 3)
            top = torch.maximum(top, beside.amax(-1, keepdim=True))
        logit = None
        if sink is not None:
            logit = sink.to(wide).view(kv_heads, 1, groups).expand(-1, size * rows, -1).reshape(kv_heads, -1, 1)
            top = torch.maximum(top, logit)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        mixed = torch.bmm(weights, values[left:right].transpose(0, 1))
        if own is not None and beside is not None:
            weights = beside.sub_(top).exp_()
            total = total + weights.sum(-1, keepdim=True)
            shaped = torch.unflatten(weights, 1, (size, rows, groups))
            mixed = mixed + torch.einsum("ksrgj,sjkd->ksrgd", shaped, own[1][part].to(wide)).flatten(1, 3)
        if logit is not None:
            total = total + (logit - top).exp()
        mixed = torch.unflatten(mixed / total, 1, (size, rows, groups))
        out[part] = mixed.permute(1, 2, 0, 3, 4).flatten(2, 3).to(q.dtype)
    return out


def _lower(positions: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """The first position that each of `positions` sees."""
    low = torch.zeros_like(positions)
    if window is not None:
        low = torch.maximum(low, positions - window + 1)
    if chunk is not None:
        low = torch.maximum(low, positions // chunk * chunk)
    return low


def _sink(attention: Any) -> Tensor | None:
    found: Tensor | None = getattr(attention, "attention_sink_bias", None)
    return found
