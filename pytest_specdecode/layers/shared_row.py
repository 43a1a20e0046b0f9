"""DeepSeek-V4's attention over a sliding window: one row per token, which every head reads as its key and as its value.

Different enough from latent attention to stand apart: the row is not expanded per head, its norm goes over the rotated lanes as well, and
since values come out rotated, the output is turned back. The layers that compress what lies behind the window are not here; no draft has
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers.attention import LatentCache, attend, check_rows, visibility
from pytest_specdecode.layers.linear import Linear, frozen, known, take
from pytest_specdecode.layers.norms import RMSNorm
from pytest_specdecode.layers.rope import RotaryEmbedding, apply_rotary
from pytest_specdecode.spec import GQASpec


class SharedRowAttention(nn.Module):
    """One attention layer; the last `qk_rope_head_dim` lanes of a head rotate, the lanes before them do not:

        q = turn(head / rms(head))          head by head of wq_b(q_norm(wq_a(x)))
        row = turn(kv_norm(wkv(x)))         K and V of every head
        o = turn back at the query's position, softmax(q row / sqrt(head_dim), attn_sink) row
        out = wo_b([wo_a_1(o_1), …])        o_g the heads of group g side by side

    Args:
        spec: shapes and options; every extent must be known. `spec.rope.rotary_dim` are the lanes that rotate.
        tensors: by local name, n heads of d lanes in G groups: `wq_a.weight` `[q_lora_rank, in]`, `q_norm.weight`, `wq_b.weight`
            `[n d, q_lora_rank]`, `wkv.weight` `[d, in]`, `kv_norm.weight` `[d]`, `wo_a.weight` `[G o_lora_rank, n d / G]` (group after
            group), `wo_b.weight` `[out, G o_lora_rank]`, `attn_sink` `[n]`. Other names are not looked at.
        q_lora_rank, o_lora_rank, o_groups: of the stage.
        norm_eps: of all norms.

    Attributes:
        wq_a, q_norm, wq_b, wkv, kv_norm, wo_a, wo_b, attn_sink: as they are stored.
        rotary_emb: over `qk_rope_head_dim` lanes.
        num_heads, head_dim, qk_rope_head_dim, sliding_window, scaling.

    Raises:
        LayerBuildError: an extent is unknown, groups do not divide the heads, or a tensor is missing or of another shape.
    """

    def __init__(
        self,
        spec: GQASpec,
        tensors: Mapping[str, Tensor],
        *,
        q_lora_rank: int | None,
        o_lora_rank: int | None,
        o_groups: int | None,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = known(spec.num_heads, "num_attention_heads")
        self.head_dim = known(spec.head_dim, "head_dim")
        self.qk_rope_head_dim = known(spec.rope.rotary_dim, "qk_rope_head_dim")
        self.sliding_window = spec.sliding_window
        self.scaling = self.head_dim**-0.5
        self.norm_eps = norm_eps
        self.o_groups = known(o_groups, "o_groups")
        if spec.num_kv_heads not in (None, 1):
            raise LayerBuildError(
                "there is one row per token", key="num_key_value_heads", got=spec.num_kv_heads, due="1"
            )
        if self.num_heads % self.o_groups:
            raise LayerBuildError(
                f"{self.num_heads} heads do not lie in {self.o_groups} groups",
                key="o_groups",
                got=self.o_groups,
                due=f"a divisor of {self.num_heads}",
            )
        if self.qk_rope_head_dim > self.head_dim:
            raise LayerBuildError(
                "is wider than the head", key="qk_rope_head_dim", got=self.qk_rope_head_dim, due=self.head_dim
            )
        q_rank, o_rank = known(q_lora_rank, "q_lora_rank"), known(o_lora_rank, "o_lora_rank")
        in_features, out_features = known(spec.in_features, "hidden_size"), known(spec.out_features, "hidden_size")
        width = self.num_heads * self.head_dim

        def linear(name: str, rows: int, columns: int) -> Linear:
            return Linear(take(tensors, f"{name}.weight", (rows, columns)), name=f"{name}.weight")

        self.wq_a = linear("wq_a", q_rank, in_features)
        self.q_norm = RMSNorm(take(tensors, "q_norm.weight", (q_rank,)), norm_eps)
        self.wq_b = linear("wq_b", width, q_rank)
        self.wkv = linear("wkv", self.head_dim, in_features)
        self.kv_norm = RMSNorm(take(tensors, "kv_norm.weight", (self.head_dim,)), norm_eps)
        self.wo_a = linear("wo_a", self.o_groups * o_rank, width // self.o_groups)
        self.wo_b = linear("wo_b", out_features, self.o_groups * o_rank)
        self.attn_sink = frozen(take(tensors, "attn_sink", (self.num_heads,)))
        self.rotary_emb = RotaryEmbedding(spec.rope, self.qk_rope_head_dim)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        cache: LatentCache | None = None,
        update_cache: bool = True,
        context: tuple[Tensor, Tensor] | None = None,
        causal: bool = True,
        window: bool = True,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The layer's output, `[..., T, out_features]`, in the dtype of `x`.

        Keys are, in order: those of `cache`, those of `context`, those of `x`.

        Args:
            x: `[T, in_features]` or `[B, T, in_features]`, as the projections read it (already normed).
            positions: `[T]`, or `[B, T]` for a batch.
            cache: rows seen before. Those of this call are added unless `update_cache` is False.
            context: a pair (hidden, positions) shaped like `x` and `positions`: rows without queries.
            causal: row i sees rows 0..i of `x`, and all of cache and context.
            window: whether `spec.sliding_window` applies row by row: `|q - k| < window`.
            mask: bool `[T, S]` or `[B, T, S]`, True where a query may look; narrows what the others leave.

        Raises:
            DraftError: shapes, dtypes or positions do not fit, or a row sees no key.
        """
        check_rows(x, positions)
        q_positions = positions.expand(x.shape[:-1])
        new = (self.row(x, positions), q_positions)
        if context is not None:
            ahead = LatentCache()
            ahead.append(self.row(*context), context[1])
            new = ahead.joined(*new)
        rows, k_positions = new if cache is None else cache.joined(*new)
        visible = visibility(
            q_positions, k_positions, causal=causal, window=self.sliding_window if window else None, mask=mask
        )
        if cache is not None and update_cache:
            cache.append(*new)
        keys = rows.unsqueeze(-2)
        heads = attend(self.q(x, positions), keys, keys, scaling=self.scaling, visible=visible, sink=self.attn_sink)
        straight = self._turned(heads, positions, back=True).flatten(-2)
        grouped = torch.unflatten(straight, -1, (self.o_groups, -1))
        per_group = torch.unflatten(self.wo_a.weight, 0, (self.o_groups, -1))
        out: Tensor = self.wo_b(torch.einsum("...gd,grd->...gr", grouped, per_group).flatten(-2))
        return out

    def q(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries, normed without a weight head by head, and rotated: `[..., T, num_heads, head_dim]`."""
        heads = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (self.num_heads, self.head_dim))
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.norm_eps)
        return self._turned(normed.to(heads.dtype), positions)

    def row(self, x: Tensor, positions: Tensor) -> Tensor:
        """What the cache keeps, `[..., T, head_dim]`: the projected row, normed as a whole, its last lanes rotated."""
        check_rows(x, positions)
        row: Tensor = self.kv_norm(self.wkv(x))
        return self._turned(row.unsqueeze(-2), positions).squeeze(-2)

    def _turned(self, heads: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """`heads` `[..., T, n, head_dim]` with the last lanes rotated at `positions`, or back."""
        lanes = [self.head_dim - self.qk_rope_head_dim, self.qk_rope_head_dim]
        still, turning = torch.split(heads, lanes, dim=-1)
        cos, sin = self.rotary_emb.cos_sin(positions, torch.promote_types(heads.dtype, torch.float32))
        cos, sin = cos.to(heads.device), sin.to(heads.device)
        turned = apply_rotary(turning, cos, -sin if back else sin, self.rotary_emb.is_neox_style)
        return torch.cat([still, turned], dim=-1)
