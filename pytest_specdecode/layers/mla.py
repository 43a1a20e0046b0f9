"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its two equal forms.

The naive form expands the latent into keys and values per head; the absorbed form folds that expansion into the query
and the output, which is what engines run. Both are here so that each can be held against the other, and an engine's
result against the one that rounds as it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers.attention import LatentCache, attend, check_rows, visibility
from pytest_specdecode.layers.linear import Linear, known, take, take_bias
from pytest_specdecode.layers.norms import NormKind, RMSNorm
from pytest_specdecode.layers.rope import RotaryEmbedding, yarn_mscale
from pytest_specdecode.spec import MLASpec


class MLAAttention(nn.Module):
    """One MLA layer.

    Args:
        spec: shapes and options; every extent must be known.
        tensors: by local name, with n heads: `q_a_proj.weight` `[q_lora_rank, in]`, `q_a_layernorm.weight`,
            `q_b_proj.weight` `[n * (nope + rope), q_lora_rank]` (per head nope first), `kv_a_proj_with_mqa.weight`
            `[kv_lora_rank + rope, in]` (latent first), `kv_a_layernorm.weight`, `kv_b_proj.weight` `[n * (nope + v),
            kv_lora_rank]` (per head keys first), `o_proj.weight` `[out, n * v]`. The two down projections may come
            joined as `fused_qkv_a_proj_with_mqa.weight`. With `spec.whole_query` the query has no latent: one
            `q_proj.weight` `[n * (nope + rope), in]` stands for the three `q_*` above. Biases are not known in this layer
            and refused. Other names are not looked at.
        norm_eps: of both latent norms. Engines read `rms_norm_eps`; transformers fixes 1e-6 here.
        norm_kind: of both latent norms.

    Attributes:
        q_lora_rank: None for a whole query, as are then `q_a_proj`, `q_a_layernorm` and `q_b_proj`; else `q_proj` is None.
        scaling: the factor on the scores, see `mla_scaling`.
        rotary_emb: over `qk_rope_head_dim` lanes; in the style that `spec.rope` says (interleaved in DeepSeek).

    Raises:
        LayerBuildError: `q_lora_rank` (unless the query is whole) or another extent is unknown, or a tensor is missing, of
            another shape, or not due.
    """

    def __init__(
        self, spec: MLASpec, tensors: Mapping[str, Tensor], *, norm_eps: float = 1e-6, norm_kind: NormKind = "rms"
    ) -> None:
        super().__init__()
        self.spec = spec
        self.q_lora_rank = None if spec.whole_query else require_q_lora_rank(spec)
        self.num_heads = known(spec.num_heads, "num_attention_heads")
        self.kv_lora_rank = known(spec.kv_lora_rank, "kv_lora_rank")
        self.qk_nope_head_dim = known(spec.qk_nope_head_dim, "qk_nope_head_dim")
        self.qk_rope_head_dim = known(spec.qk_rope_head_dim, "qk_rope_head_dim")
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.v_head_dim = known(spec.v_head_dim, "v_head_dim")
        self.scaling = mla_scaling(spec)
        in_features, out_features = known(spec.in_features, "in_features"), known(spec.out_features, "out_features")

        latent_rows = self.kv_lora_rank + self.qk_rope_head_dim
        if self.q_lora_rank is not None and "fused_qkv_a_proj_with_mqa.weight" in tensors:
            fused = take(tensors, "fused_qkv_a_proj_with_mqa.weight", (self.q_lora_rank + latent_rows, in_features))
            q_a, kv_a = torch.split(fused, [self.q_lora_rank, latent_rows])
            tensors = {**tensors, "q_a_proj.weight": q_a, "kv_a_proj_with_mqa.weight": kv_a}

        def linear(name: str, rows: int, columns: int) -> Linear:
            bias = take_bias(tensors, f"{name}.bias", rows, due=False)
            return Linear(take(tensors, f"{name}.weight", (rows, columns)), bias, name=f"{name}.weight")

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(take(tensors, f"{name}.weight", (width,)), norm_eps, norm_kind)

        queries = self.num_heads * self.qk_head_dim
        self.q_proj: Linear | None = None
        self.q_a_proj: Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if self.q_lora_rank is None:
            self.q_proj = linear("q_proj", queries, in_features)
        else:
            self.q_a_proj = linear("q_a_proj", self.q_lora_rank, in_features)
            self.q_a_layernorm = norm("q_a_layernorm", self.q_lora_rank)
            self.q_b_proj = linear("q_b_proj", queries, self.q_lora_rank)
        self.kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", latent_rows, in_features)
        self.kv_a_layernorm = norm("kv_a_layernorm", self.kv_lora_rank)
        expanded = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = linear("kv_b_proj", expanded, self.kv_lora_rank)
        self.o_proj = linear("o_proj", out_features, self.num_heads * self.v_head_dim)
        self.rotary_emb = RotaryEmbedding(spec.rope, self.qk_rope_head_dim)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        absorbed: bool = False,
        cache: LatentCache | None = None,
        update_cache: bool = True,
        causal: bool = True,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The layer's output, `[..., T, out_features]`, in the dtype of `x`.

        Args:
            x: `[T, in_features]` or `[B, T, in_features]`, as the projections read it (already normed).
            positions: `[T]`, or `[B, T]` for a batch.
            absorbed: which form; they differ by rounding only.
            cache: latent rows seen before; those of this call are added unless `update_cache` is False.
            causal: row i sees rows 0..i of `x`, and all of the cache.
            mask: bool `[T, S]` or `[B, T, S]`, True where a query may look; narrows what `causal` leaves.

        Raises:
            DraftError: shapes, dtypes or positions do not fit, or a row sees no key.
        """
        check_rows(x, positions)
        q_positions = positions.expand(x.shape[:-1])
        rows = self.latent(x, positions)
        seen, k_positions = (rows, q_positions) if cache is None else cache.joined(rows, q_positions)
        visible = visibility(q_positions, k_positions, causal=causal, mask=mask)
        if cache is not None and update_cache:
            cache.append(rows, q_positions)
        latent, k_pe = torch.split(seen, [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_nope, q_pe = self.q(x, positions)
        heads = (self._absorbed if absorbed else self._naive)(q_nope, q_pe, latent, k_pe, visible)
        out: Tensor = self.o_proj(heads.flatten(-2))
        return out

    def forward_naive(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        cache: LatentCache | None = None,
        causal: bool = True,
        mask: Tensor | None = None,
    ) -> Tensor:
        """`forward` with keys and values expanded per head: `score = q_nope . k_nope + q_pe . k_pe`."""
        return self.forward(x, positions, absorbed=False, cache=cache, causal=causal, mask=mask)

    def forward_absorbed(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        cache: LatentCache | None = None,
        causal: bool = True,
        mask: Tensor | None = None,
    ) -> Tensor:
        """`forward` in latent space: `score = (q_nope W_UK) . latent + q_pe . k_pe`, the values expanded after the
        softmax.
        """
        return self.forward(x, positions, absorbed=True, cache=cache, causal=causal, mask=mask)

    def q(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries: `[..., T, n, qk_nope_head_dim]`, and rotated `[..., T, n, qk_rope_head_dim]`."""
        heads = self._query(x)
        heads = heads.reshape(*heads.shape[:-1], self.num_heads, self.qk_head_dim)
        q_nope, q_pe = torch.split(heads, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return q_nope, self.rotary_emb.rotate(q_pe, positions)

    def latent(self, x: Tensor, positions: Tensor) -> Tensor:
        """What the cache keeps, `[..., T, kv_lora_rank + qk_rope_head_dim]`: the normed latent, then `k_pe` rotated and
        not normed.
        """
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        turned = self.rotary_emb.rotate(k_pe.unsqueeze(-2), positions).squeeze(-2)
        return torch.cat([self.kv_a_layernorm(latent), turned], dim=-1)

    def _query(self, x: Tensor) -> Tensor:
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            whole: Tensor = self.q_proj(x)
            return whole
        query: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return query

    def _naive(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, visible: Tensor) -> Tensor:
        heads = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, self.qk_nope_head_dim + self.v_head_dim))
        k_nope, v = heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        shared = k_pe.unsqueeze(-2).expand(*k_nope.shape[:-1], self.qk_rope_head_dim)
        q, k = torch.cat([q_nope, q_pe], dim=-1), torch.cat([k_nope, shared], dim=-1)
        return attend(q, k, v, scaling=self.scaling, visible=visible)

    def _absorbed(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, visible: Tensor) -> Tensor:
        per_head = self.kv_b_proj.weight.reshape(self.num_heads, -1, self.kv_lora_rank)
        w_uk, w_uv = torch.split(per_head, [self.qk_nope_head_dim, self.v_head_dim], dim=1)
        q = torch.cat([torch.einsum("...thd,hdc->...thc", q_nope, w_uk), q_pe], dim=-1)
        k = torch.cat([latent, k_pe], dim=-1).unsqueeze(-2)
        mixed = attend(q, k, latent.unsqueeze(-2), scaling=self.scaling, visible=visible)
        return torch.einsum("...thc,hvc->...thv", mixed, w_uv)


def require_q_lora_rank(spec: MLASpec) -> int:
    """`spec.q_lora_rank`; LayerBuildError in the words that SGLang uses where it is None."""
    if spec.q_lora_rank is None:
        raise LayerBuildError("Eagle3 MLA layer requires q_lora_rank in the draft config", due="a positive integer")
    return known(spec.q_lora_rank, "q_lora_rank")


def mla_scaling(spec: MLASpec) -> float:
    """The factor on the scores, `(nope + rope) ** -0.5`, times `mscale ** 2` where the RoPE is scaled.

    `mscale = 0.1 * mscale_all_dim * ln(factor) + 1` for a factor above 1; without `mscale_all_dim` it is 1 (DeepSeek-V2
    and V3).

    Raises:
        LayerBuildError: a head's width is unknown, or `mscale_all_dim` is stated without a usable `factor`.
    """
    nope, rope = known(spec.qk_nope_head_dim, "qk_nope_head_dim"), known(spec.qk_rope_head_dim, "qk_rope_head_dim")
    base = 1.0 / math.sqrt(nope + rope)
    mscale_all_dim = spec.rope.scaling.get("mscale_all_dim") or 0.0
    if spec.rope.rope_type == "default" or not mscale_all_dim:
        return base
    factor = spec.rope.scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise LayerBuildError(
            "is missing or no number; mscale_all_dim needs it", key="rope_scaling.factor", got=factor, due="a number"
        )
    mscale = yarn_mscale(float(factor), float(mscale_all_dim))
    return base * mscale * mscale
