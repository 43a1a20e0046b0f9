"""What both attention layers share: who sees whom, the softmax, and the caches that let a test decode step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError


class KVCache:
    """The keys and values of the rows seen so far, in the order in which they came.

    Attributes:
        k, v: `[..., S, num_kv_heads, head_dim]` after norm and rotation, or None while empty.
        positions: `[..., S]`, or None while empty.
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.positions: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.positions is None else self.positions.shape[-1]

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Add rows: `k` and `v` `[..., T, heads, dim]`, `positions` `[..., T]` or `[T]`."""
        self.k, self.v, self.positions = self.joined(k, v, positions)

    def joined(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `append` would hold afterwards, the cache left as it is."""
        positions = positions.expand(k.shape[:-2])
        if self.k is None or self.v is None or self.positions is None:
            return k, v, positions
        _same_rows(self.k, k)
        return (
            torch.cat([self.k, k], dim=-3),
            torch.cat([self.v, v], dim=-3),
            torch.cat([self.positions, positions], dim=-1),
        )


class LatentCache:
    """What MLA keeps of the rows seen so far: one vector per token, shared by all heads.

    Attributes:
        rows: `[..., S, kv_lora_rank + qk_rope_head_dim]`, the normed latent and then the rotated `k_pe`; None while
            empty.
        positions: `[..., S]`, or None while empty.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.positions: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.positions is None else self.positions.shape[-1]

    def append(self, rows: Tensor, positions: Tensor) -> None:
        """Add rows `[..., T, kv_lora_rank + qk_rope_head_dim]` at `positions`, `[..., T]` or `[T]`."""
        self.rows, self.positions = self.joined(rows, positions)

    def joined(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `append` would hold afterwards, the cache left as it is."""
        positions = positions.expand(rows.shape[:-1])
        if self.rows is None or self.positions is None:
            return rows, positions
        _same_rows(self.rows.unsqueeze(-2), rows.unsqueeze(-2))
        return torch.cat([self.rows, rows], dim=-2), torch.cat([self.positions, positions], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scaling: float, visible: Tensor, sink: Tensor | None = None) -> Tensor:
    """Softmax attention, computed in float32 or wider and rounded once to the dtype of `q`.

    Args:
        q: `[..., T, heads, dim]`.
        k, v: `[..., S, kv_heads, dim]`; query head h reads KV head h // (heads / kv_heads). `v` may have another width.
        scaling: factor on the scores.
        visible: bool, `[..., T, S]` or `[T, S]`; every row must see a key, as `visibility` makes sure.
        sink: `[heads]`, a logit per query head that no scaling and no mask touches: it takes part in the softmax as a key
            whose value is zero, so that a row's weights add up to less than one.

    Returns:
        `[..., T, heads, width of v]`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[-2] // k.shape[-2]
    keys = k.to(wide).repeat_interleave(groups, dim=-2)
    values = v.to(wide).repeat_interleave(groups, dim=-2)
    scores = torch.einsum("...thd,...shd->...hts", q.to(wide), keys) * scaling
    scores = scores.masked_fill(~visible.unsqueeze(-3), -torch.inf)
    if sink is None:
        weights = scores.softmax(dim=-1)
    else:
        extra = sink.to(wide).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("...hts,...shd->...thd", weights, values).to(q.dtype)


def visibility(
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    mask: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Which keys each query sees, bool `[..., T, S]`.

    The T queries are the last T of the S keys. Causal goes by that order, so rows that share a position are still told
    apart; the window goes by position: `|q - k| < window`, the query itself included, and with `causal` off it limits
    both sides.

    Args:
        q_positions, k_positions: `[..., T]` and `[..., S]`.
        mask: bool `[T, S]` or `[..., T, S]`, True where a query may look; narrows the rest and never widens it.
        chunk: positions are cut into chunks of this many, counted from 0, and a query sees no other chunk than its own.

    Raises:
        DraftError: the mask has another shape or dtype, or a query is left with no key: its softmax has no value.
    """
    rows, columns = q_positions.shape[-1], k_positions.shape[-1]
    device = q_positions.device
    visible = torch.ones(*q_positions.shape[:-1], rows, columns, dtype=torch.bool, device=device)
    if causal:
        visible = visible.tril(diagonal=columns - rows)
    if window is not None:
        visible = visible & ((q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).abs() < window)
    if chunk is not None:
        visible = visible & (q_positions.unsqueeze(-1) // chunk == k_positions.unsqueeze(-2) // chunk)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape not in ((rows, columns), visible.shape):
            raise DraftError(
                f"the mask is {mask.dtype} of shape {list(mask.shape)}; bool of [{rows}, {columns}] is due",
                key="mask",
                got=tuple(mask.shape),
                due=(rows, columns),
            )
        visible = visible & mask.to(device)
    if not bool(visible.any(dim=-1).all()):
        raise DraftError("a query sees no key at all", key="mask", due="at least one visible key per row")
    return visible


def check_rows(x: Tensor, positions: Tensor) -> None:
    """`x` must be `[T, in]` or `[B, T, in]` and `positions` `[T]` or `x.shape[:-1]`; DraftError says what was got."""
    if x.ndim not in (2, 3):
        raise DraftError(
            f"the input has shape {list(x.shape)}; [T, in] or [B, T, in] is due", key="x", got=tuple(x.shape)
        )
    if positions.shape not in (x.shape[:-1], x.shape[-2:-1]):
        raise DraftError(
            f"positions have shape {list(positions.shape)}; the input has {list(x.shape[:-1])} rows",
            key="positions",
            got=tuple(positions.shape),
            due=tuple(x.shape[:-1]),
        )


def _same_rows(old: Tensor, new: Tensor) -> None:
    if old.shape[:-3] != new.shape[:-3] or old.shape[-2:] != new.shape[-2:] or old.dtype != new.dtype:
        raise DraftError(
            f"rows of shape {list(new.shape)}, {new.dtype}, do not fit a cache of {list(old.shape)}, {old.dtype}",
            key="cache",
            got=tuple(new.shape),
            due=tuple(old.shape),
        )
