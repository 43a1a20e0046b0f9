"""The kernel under watch: banded and poisoned tensors, guarded launches, and a truth worked out another way."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_specdecode.fused_kv import fused_norm_rope
from pytest_specdecode.memory import banded, banded_copy, guarded
from pytest_specdecode.numerics import assert_close, assert_exact


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one launch, drawn in the storage dtype."""

    kv: Tensor
    positions: Tensor
    weight: Tensor
    eps: Tensor
    table: Tensor
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    value_scale: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.kv.shape[1], self.kv.shape[0], self.num_kv_heads, self.head_dim


def draw(
    *,
    tokens: int = 3,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    positions: Tensor | None = None,
    eps: Tensor | None = None,
    scale: float = 1.0,
    table_dtype: torch.dtype = torch.float32,
    value_scale: float = 1.0,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    angles = torch.arange(64)[:, None] / 1e4 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return Case(
        kv=(torch.randn(tokens, layers, 2 * heads * head_dim, generator=generator) * scale).to(dtype),
        positions=torch.randint(0, 64, (tokens,), generator=generator) if positions is None else positions,
        weight=(torch.rand(layers, head_dim, generator=generator) + 0.5).to(dtype),
        eps=torch.tensor([1e-6 * 10**layer for layer in range(layers)]) if eps is None else eps,
        table=torch.cat([angles.cos(), angles.sin()], dim=-1).to(table_dtype),
        num_kv_heads=heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        value_scale=value_scale,
    )


def truth(case: Case) -> tuple[Tensor, Tensor]:
    """K and V in float64, the rotation done as a product of complex numbers."""
    layers, tokens, heads, dim = case.shape
    k, v = case.kv.double().view(tokens, layers, 2, heads, dim).permute(2, 1, 0, 3, 4)
    norm = ((k * k).sum(-1, keepdim=True) / dim + case.eps.double().view(-1, 1, 1, 1)).sqrt()
    k = k / norm * case.weight.double()[:, None, None, :]
    half = case.rotary_dim // 2
    pairs = torch.complex(k[..., :half].contiguous(), k[..., half : 2 * half].contiguous())
    rows = case.table.double()[case.positions.long()]
    turned = pairs * torch.complex(rows[:, :half].contiguous(), rows[:, half:].contiguous())[None, :, None, :]
    return torch.cat([turned.real, turned.imag, k[..., 2 * half :]], dim=-1), v * case.value_scale


def eager(case: Case) -> Tensor:
    """K in the storage dtype, rounded after the norm, after the weight and after each product, as layer-by-layer code does."""
    layers, tokens, heads, dim = case.shape
    dtype = case.kv.dtype
    k = case.kv.view(tokens, layers, 2, heads, dim)[:, :, 0].transpose(0, 1)
    inverse = torch.rsqrt(k.float().square().mean(-1, keepdim=True) + case.eps.view(-1, 1, 1, 1))
    k = (k.float() * inverse).to(dtype) * case.weight[:, None, None, :]
    cos, sin = case.table[case.positions.long()].to(dtype)[None, :, None, :].chunk(2, -1)
    first, second = k[..., : case.rotary_dim].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, k[..., case.rotary_dim :]], -1)


def run_watched(
    case: Case, kernel=fused_norm_rope, *, block_rows: int | None = None, gap: int = 0
) -> tuple[Tensor, Tensor]:
    """One launch with every tensor between bands, outputs poisoned, every access watched."""
    inputs = [
        banded_copy(tensor, name=name, gap=gap)
        for name, tensor in [
            ("kv", case.kv),
            ("positions", case.positions),
            ("norm_weight", case.weight),
            ("eps", case.eps),
            ("table", case.table),
        ]
    ]
    outputs = [banded(case.shape, case.kv.dtype, name=name, gap=gap) for name in ("k_out", "v_out")]
    with guarded(filled=("k_out", "v_out")):
        k, v = kernel(
            *(each.tensor for each in inputs),
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            rotary_dim=case.rotary_dim,
            k_out=outputs[0].tensor,
            v_out=outputs[1].tensor,
            value_scale=case.value_scale,
            block_rows=block_rows,
        )
    for each in inputs:
        each.assert_intact()
    for each in outputs:
        each.assert_filled()
    assert k is outputs[0].tensor
    assert v is outputs[1].tensor
    return k, v


def check(case: Case, kernel=fused_norm_rope, **how) -> None:
    """Run and compare: K as the table of tolerances says, V bit for bit."""
    k, v = run_watched(case, kernel, **how)
    due_k, due_v = truth(case)
    assert_close(k, due_k, eager(case), what="K", reduction_sizes=(case.head_dim,))
    if case.value_scale == 1.0:
        assert_exact(v, due_v.to(v.dtype), what="V", bits=True)
    else:
        scale = torch.tensor(case.value_scale, dtype=torch.float32)
        unscaled = truth(Case(**{**vars(case), "value_scale": 1.0}))[1]
        assert_exact(v, (unscaled.float() * scale).to(v.dtype), what="V")
        assert_close(v, due_v, what="V")


def load_source(path, name="mutated_kernel"):
    """A module from a file, for kernels whose text was changed."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
