"""Grouped-query attention as EAGLE3 and DFlash drafts use it, written for reading.

The attributes carry the names that serving engines give them (`qkv_proj`, `q_size`, `kv_size`, `rotary_emb`, `k_norm`),
so that a layer built here can stand wherever code expects an engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers.attention import KVCache, attend, check_rows, visibility
from pytest_specdecode.layers.linear import Linear, frozen, join, known, take, take_bias
from pytest_specdecode.layers.norms import LayerNorm, NormKind, RMSNorm
from pytest_specdecode.layers.rope import RotaryEmbedding
from pytest_specdecode.spec import GQASpec

_ENDS = ("weight", "bias")


class GQAAttention(nn.Module):
    """One attention layer: q, k, v from one input, a norm per head on q and k where the spec says so, rotation,
    softmax, `o_proj`.

    Args:
        spec: shapes and options; every extent must be known.
        tensors: by local name: `q_proj.weight`, `k_proj.weight`, `v_proj.weight` or, joined, `qkv_proj.weight`;
            `o_proj.weight`; no `v_proj` with `spec.k_eq_v`; `q_norm.weight` and `k_norm.weight` of `[head_dim]`, or of
            `[heads, head_dim]`, with `spec.qk_norm` and as `spec.head_norm` says; `g_proj.weight` with `spec.output_gate`;
            `k_proj_target.weight` and `v_proj_target.weight` with `spec.target_kv`; `.bias` beside the projections where the
            spec has one; `attention_sink_bias` of `[num_heads]` with `spec.sink`, and also where the spec says nothing of it
            and the tensor is there. Other names are not looked at.
        norm_eps, norm_kind: of the per-head norms.
        scaling: factor on the scores; `spec.scaling`, else `head_dim ** -0.5`, where None.

    Attributes:
        qkv_proj: `.weight` `[q_size + 2 * kv_size, in_features]` (rows of q, then k, then v) and `.bias` or None.
        q_size, kv_size: rows of q, and of k or v. With `spec.q_gate` q has twice the rows: query and gate, head by head.
        num_heads, num_kv_heads, head_dim, v_head_dim: `v_head_dim` equals `head_dim`.
        rotary_emb: a `RotaryEmbedding`, or None where nothing rotates.
        q_norm, k_norm: a norm over `head_dim`, or None; see `spec.head_norm` for its place.
        v_norm: the same without a weight, with `spec.v_norm`, or None.
        g_proj: `.weight` `[num_heads, in_features]`, or `[q_size, in_features]` for a gate per lane, or None.
        kv_proj_target: K and V rows for the context, `.weight` `[2 * kv_size, in_features]`, or None where the context
            goes through `qkv_proj` like everything else.
        attention_sink_bias: `[num_heads]`, each head's logit beside its scores, or None. K and V know nothing of it.
        o_proj, value_scale, scaling, sliding_window, chunk_size.

    Raises:
        LayerBuildError: an extent is unknown, heads do not divide, or a tensor is missing, of another shape, or not
            due.
    """

    def __init__(
        self,
        spec: GQASpec,
        tensors: Mapping[str, Tensor],
        *,
        norm_eps: float = 1e-6,
        norm_kind: NormKind = "rms",
        scaling: float | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = known(spec.num_heads, "num_attention_heads")
        self.num_kv_heads = known(spec.num_kv_heads, "num_key_value_heads")
        self.head_dim = known(spec.head_dim, "head_dim")
        self.v_head_dim = self.head_dim
        if self.num_heads % self.num_kv_heads:
            raise LayerBuildError(
                f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads",
                key="num_key_value_heads",
                got=self.num_kv_heads,
                due=f"a divisor of {self.num_heads}",
            )
        self.q_size = self.num_heads * self.head_dim * (2 if spec.q_gate else 1)
        self.kv_size = self.num_kv_heads * self.head_dim
        stated = spec.scaling if scaling is None else scaling
        self.scaling = self.head_dim**-0.5 if stated is None else stated
        self.value_scale = spec.value_scale
        self.sliding_window = spec.sliding_window
        self.chunk_size = None if spec.chunk_size is None else known(spec.chunk_size, "attention_chunk_size")
        if spec.temperature is not None and not spec.temperature.floor_scale > 0:
            got = spec.temperature.floor_scale
            raise LayerBuildError(f"is {got}; it must be positive", key="floor_scale", got=got, due="a positive number")
        in_features = known(spec.in_features, "in_features")
        self.qkv_proj = self._qkv(tensors, in_features, bias=spec.qkv_bias)
        self.kv_proj_target = self._kv_target(tensors, in_features, bias=spec.qkv_bias) if spec.target_kv else None
        self.g_proj: Linear | None = None
        if spec.output_gate is not None:
            gates = self.num_heads if spec.output_gate == "per-head" else self.q_size
            self.g_proj = Linear(take(tensors, "g_proj.weight", (gates, in_features)), name="g_proj.weight")
        out_features = known(spec.out_features, "out_features")
        self.o_proj = Linear(
            take(tensors, "o_proj.weight", (out_features, self.num_heads * self.head_dim)),
            take_bias(tensors, "o_proj.bias", out_features, due=spec.o_bias),
            name="o_proj.weight",
        )
        self.q_norm: RMSNorm | LayerNorm | None = None
        self.k_norm: RMSNorm | LayerNorm | None = None
        if spec.qk_norm:
            self.q_norm = self._head_norm(tensors, "q_norm.weight", self.num_heads, norm_eps, norm_kind)
            self.k_norm = self._head_norm(tensors, "k_norm.weight", self.num_kv_heads, norm_eps, norm_kind)
        self.attention_sink_bias = _sink(tensors, self.num_heads, stated=spec.sink)
        self.v_norm = RMSNorm(self.qkv_proj.weight.new_ones(self.head_dim), norm_eps) if spec.v_norm else None
        self.rotary_emb = RotaryEmbedding(spec.rope, self.head_dim) if spec.rotates else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        cache: KVCache | None = None,
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
            cache: rows seen before. Those of this call are added unless `update_cache` is False, as for a block that is
                only drafted.
            context: a pair (hidden, positions) shaped like `x` and `positions`, whose keys and values come from the
                same projections and norm (DFlash); it has no queries and is visible to every row as far as window and
                mask allow.
            causal: row i sees rows 0..i of `x`, and all of cache and context.
            window: whether `spec.sliding_window` applies.
            mask: bool `[T, S]` or `[B, T, S]`, True where a query may look; narrows what the others leave.

        Raises:
            DraftError: shapes, dtypes or positions do not fit, or a row sees no key.
        """
        check_rows(x, positions)
        q_positions = positions.expand(x.shape[:-1])
        new = (*self.kv(x, positions), q_positions)
        if context is not None:
            ahead = KVCache()
            ahead.append(*self.context_kv(*context), context[1])
            new = ahead.joined(*new)
        k, v, k_positions = new if cache is None else cache.joined(*new)
        visible = visibility(
            q_positions,
            k_positions,
            causal=causal,
            window=self.sliding_window if window else None,
            mask=mask,
            chunk=self.chunk_size,
        )
        if cache is not None and update_cache:
            cache.append(*new)
        sink = self.attention_sink_bias
        heads = attend(self.q(x, positions), k, v, scaling=self.scaling, visible=visible, sink=sink)
        return self.output(heads, x)

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        """The layer's output from what its heads attended to, `[..., T, num_heads, head_dim]`, and its input `x`: gates and `o_proj`."""
        if self.spec.q_gate:
            heads = heads * self._query_and_gate(x)[1].sigmoid()
        out: Tensor = self.o_proj(self._gated(heads, x).flatten(-2))
        return out

    def q(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries, normed and rotated, and multiplied by their temperature: `[..., T, num_heads, head_dim]`."""
        queries = self._turned(self._query_and_gate(x)[0], positions, self.q_norm)
        tuning = self.spec.temperature
        if tuning is None:
            return queries
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = ((positions.to(wide) + 1.0) / tuning.floor_scale).floor()
        factor = steps.log1p() * tuning.attn_scale + 1.0
        return (queries * factor[..., None, None]).to(queries.dtype)

    def kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values, scaled by `value_scale`: each `[..., T, num_kv_heads, head_dim]`.

        Rounded to the weights' dtype after each step (projection, norm, rotation), as module after module does it in an
        engine.
        """
        return self._kv(self.qkv_proj, self.q_size, x, positions)

    def context_kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `kv`, for rows of a context: through `kv_proj_target` where there is one."""
        if self.kv_proj_target is None:
            return self.kv(x, positions)
        return self._kv(self.kv_proj_target, 0, x, positions)

    def _kv(self, projection: Linear, start: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        check_rows(x, positions)
        k = self._turned(self._project(projection, x, start, self.num_kv_heads), positions, self.k_norm)
        v = self._project(projection, x, start + self.kv_size, self.num_kv_heads)
        v = v if self.v_norm is None else self.v_norm(v)
        return k, v if self.value_scale == 1.0 else v * self.value_scale

    def _query_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The projected queries, and the gates beside them (with no gates, the queries again)."""
        if not self.spec.q_gate:
            query = self._project(self.qkv_proj, x, 0, self.num_heads)
            return query, query
        both = self._project(self.qkv_proj, x, 0, 2 * self.num_heads)
        query, gate = both.reshape(*both.shape[:-2], self.num_heads, 2, self.head_dim).unbind(-2)
        return query, gate

    def _turned(self, projected: Tensor, positions: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        late = self.spec.head_norm == "plain"
        if norm is not None and not late:
            projected = norm(projected)
        if self.rotary_emb is not None:
            projected = self.rotary_emb.rotate(projected, positions)
        return norm(projected) if norm is not None and late else projected

    def _head_norm(
        self, tensors: Mapping[str, Tensor], name: str, heads: int, eps: float, kind: NormKind
    ) -> RMSNorm | LayerNorm:
        if self.spec.head_norm == "plain":
            return RMSNorm(self.qkv_proj.weight.new_ones(self.head_dim), eps)
        if self.spec.head_norm == "layer":
            return LayerNorm(take(tensors, name, (heads, self.head_dim)), eps)
        return RMSNorm(take(tensors, name, (self.head_dim,)), eps, kind)

    def _project(self, projection: Linear, x: Tensor, start: int, heads: int) -> Tensor:
        rows = slice(start, start + heads * self.head_dim)
        return projection.rows(x, rows).reshape(*x.shape[:-1], heads, self.head_dim)

    def _gated(self, heads: Tensor, x: Tensor) -> Tensor:
        if self.g_proj is None:
            return heads
        gate = self.g_proj(x)
        gate = F.softplus(gate.to(torch.promote_types(gate.dtype, torch.float32))).to(heads.dtype)
        return heads * gate.reshape(*heads.shape[:-1], -1)

    def _kv_target(self, tensors: Mapping[str, Tensor], in_features: int, *, bias: bool) -> Linear:
        names = ("k_proj_target", "v_proj_target")
        weight = join(
            [take(tensors, f"{name}.weight", (self.kv_size, in_features)) for name in names], "kv_proj_target.weight"
        )
        biases = [take_bias(tensors, f"{name}.bias", self.kv_size, due=bias) for name in names]
        present = [part for part in biases if part is not None]
        return Linear(weight, join(present, "kv_proj_target.bias") if present else None, name="kv_proj_target.weight")

    def _qkv(self, tensors: Mapping[str, Tensor], in_features: int, *, bias: bool) -> Linear:
        sizes = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        if self.spec.k_eq_v:
            shared = {f"v_proj.{end}": tensors[f"k_proj.{end}"] for end in _ENDS if f"k_proj.{end}" in tensors}
            tensors = {**tensors, **shared}
        total = self.q_size + 2 * self.kv_size
        if "qkv_proj.weight" in tensors:
            weight = take(tensors, "qkv_proj.weight", (total, in_features))
        else:
            parts = [take(tensors, f"{name}.weight", (rows, in_features)) for name, rows in sizes.items()]
            weight = join(parts, "qkv_proj.weight")
        if "qkv_proj.bias" in tensors:
            return Linear(weight, take_bias(tensors, "qkv_proj.bias", total, due=bias), name="qkv_proj.weight")
        biases = [take_bias(tensors, f"{name}.bias", rows, due=bias) for name, rows in sizes.items()]
        present = [part for part in biases if part is not None]
        return Linear(weight, join(present, "qkv_proj.bias") if present else None, name="qkv_proj.weight")


def _sink(tensors: Mapping[str, Tensor], heads: int, *, stated: bool | None) -> nn.Parameter | None:
    """The logit per head where one is due; where nothing is stated the tensor decides, and one that is not due is an error."""
    present = "attention_sink_bias" in tensors
    if stated is False and present:
        got = tuple(tensors["attention_sink_bias"].shape)
        raise LayerBuildError("is a sink where the spec says there is none", key="attention_sink_bias", got=got)
    return frozen(take(tensors, "attention_sink_bias", (heads,))) if stated or present else None
