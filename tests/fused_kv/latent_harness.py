"""The latent kernel under watch: banded and poisoned tensors, guarded launches, and a truth worked out another way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pytest_specdecode.fused_kv import fused_latent_norm_rope
from pytest_specdecode.memory import banded, banded_copy, guarded
from pytest_specdecode.numerics import assert_close

AXES = ("layer", "token", "lane")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one launch, drawn in the storage dtype."""

    kv_a: Tensor
    positions: Tensor
    weight: Tensor
    eps: Tensor
    table: Tensor
    rank: int
    rope_dim: int
    is_neox_style: bool = False
    latent_norm: str = "latent"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.kv_a.shape[1], self.kv_a.shape[0], self.kv_a.shape[2]

    def changed(self, **fields) -> Case:
        return replace(self, **fields)


def draw(
    *,
    tokens: int = 3,
    layers: int = 2,
    rank: int = 48,
    rope_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    positions: Tensor | None = None,
    eps: Tensor | None = None,
    scale: float = 1.0,
    table_dtype: torch.dtype = torch.float32,
    is_neox_style: bool = False,
    latent_norm: str = "latent",
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(64)[:, None] / 1e4 ** (torch.arange(0, rope_dim, 2) / rope_dim)
    return Case(
        kv_a=(torch.randn(tokens, layers, rank + rope_dim, generator=generator) * scale).to(dtype),
        positions=torch.randint(0, 64, (tokens,), generator=generator) if positions is None else positions,
        weight=(torch.rand(layers, normed_width(latent_norm, rank, rope_dim), generator=generator) + 0.5).to(dtype),
        eps=torch.tensor([1e-6 * 10**layer for layer in range(layers)]) if eps is None else eps,
        table=torch.cat([angles.cos(), angles.sin()], dim=-1).to(table_dtype),
        rank=rank,
        rope_dim=rope_dim,
        is_neox_style=is_neox_style,
        latent_norm=latent_norm,
    )


def normed_width(latent_norm: str, rank: int, rope_dim: int) -> int:
    """Lanes that the norm goes over."""
    return rank if latent_norm == "latent" else rank + rope_dim


def truth(case: Case) -> Tensor:
    """The rows in float64, the rotation done as a product of complex numbers."""
    rows = case.kv_a.double().transpose(0, 1)
    lanes = normed_width(case.latent_norm, case.rank, case.rope_dim)
    size = ((rows[..., :lanes] ** 2).sum(-1, keepdim=True) / lanes + case.eps.double().view(-1, 1, 1)).sqrt()
    rows = torch.cat([rows[..., :lanes] / size * case.weight.double()[:, None, :], rows[..., lanes:]], dim=-1)
    latent, k_pe = rows[..., : case.rank], rows[..., case.rank :]
    parts = k_pe.unflatten(-1, (2, case.rope_dim // 2) if case.is_neox_style else (case.rope_dim // 2, 2))
    pairs = parts.transpose(-1, -2).contiguous() if case.is_neox_style else parts.contiguous()
    table = case.table.double()[case.positions.long()]
    half = case.rope_dim // 2
    turned = torch.view_as_complex(pairs) * torch.complex(table[:, :half].contiguous(), table[:, half:].contiguous())
    back = torch.view_as_real(turned)
    back = back.transpose(-1, -2) if case.is_neox_style else back
    return torch.cat([latent, back.flatten(-2)], dim=-1)


def eager(case: Case) -> Tensor:
    """The rows in the storage dtype, rounded after the norm, after the weight and after each product, as layer-by-layer code does."""
    dtype = case.kv_a.dtype
    rows = case.kv_a.transpose(0, 1)
    lanes = normed_width(case.latent_norm, case.rank, case.rope_dim)
    inverse = torch.rsqrt(rows[..., :lanes].float().square().mean(-1, keepdim=True) + case.eps.view(-1, 1, 1))
    normed = (rows[..., :lanes].float() * inverse).to(dtype) * case.weight[:, None, :]
    rows = torch.cat([normed, rows[..., lanes:]], dim=-1)
    latent, k_pe = rows[..., : case.rank], rows[..., case.rank :]
    cos, sin = case.table[case.positions.long()].to(dtype).chunk(2, -1)
    first, second = k_pe.chunk(2, -1) if case.is_neox_style else (k_pe[..., 0::2], k_pe[..., 1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if case.is_neox_style else torch.stack(turned, -1).flatten(-2)
    return torch.cat([latent, joined], dim=-1)


def run_watched(case: Case, kernel=fused_latent_norm_rope, *, block_rows: int | None = None, gap: int = 0) -> Tensor:
    """One launch with every tensor between bands, the output poisoned, every access watched."""
    inputs = [
        banded_copy(tensor, name=name, gap=gap)
        for name, tensor in [
            ("kv_a", case.kv_a),
            ("positions", case.positions),
            ("norm_weight", case.weight),
            ("eps", case.eps),
            ("table", case.table),
        ]
    ]
    output = banded(case.shape, case.kv_a.dtype, name="out", gap=gap)
    with guarded(filled=("out",)):
        rows = kernel(
            *(each.tensor for each in inputs),
            kv_lora_rank=case.rank,
            qk_rope_head_dim=case.rope_dim,
            is_neox_style=case.is_neox_style,
            latent_norm=case.latent_norm,
            out=output.tensor,
            block_rows=block_rows,
        )
    for each in inputs:
        each.assert_intact()
    output.assert_filled()
    assert rows is output.tensor
    return rows


def check(case: Case, kernel=fused_latent_norm_rope, **how) -> None:
    """Run and compare as the table of tolerances says, latent and k_pe apart: the one's size must not hide the other's error."""
    rows, due, baseline = run_watched(case, kernel, **how), truth(case), eager(case)
    for what, lanes in (("latent", slice(0, case.rank)), ("k_pe", slice(case.rank, None))):
        sums = (case.weight.shape[1],) if what == "latent" or case.latent_norm == "whole" else ()
        assert_close(
            rows[..., lanes], due[..., lanes], baseline[..., lanes], what=what, axes=AXES, reduction_sizes=sums
        )
