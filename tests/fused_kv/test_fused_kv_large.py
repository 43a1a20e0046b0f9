"""The kernel beyond 2^31 elements.

Failure modes this file exists to catch: an offset made in int32, which wraps and reads or writes elsewhere in silence on a GPU; a flat
index over everything that does not fit; an address in a cache counted in int32.

The tensors are as large as they look and take no room: memory that nobody has written is not there, and of the launches only the last
programs run, whose offsets are the largest. Every access is held against its tensor's bounds, and int32 overflow is an error.
"""

from __future__ import annotations

import sys

import pytest
import torch

from pytest_specdecode.errors import InputError
from pytest_specdecode.fused_kv import fused_norm_rope, fused_norm_rope_into
from pytest_specdecode.fused_kv import kernel as kernel_module
from pytest_specdecode.fused_kv.tiles import Tile
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.watching import last_part

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is committed when it is written")

LAYERS, HEADS, DIM = 5, 8, 128
TOKENS = 420_000  # K and V of one layer: 4.3e8 elements each; of all layers 2.15e9, and what is read 4.3e9


def parameters(layers):
    angles = torch.arange(64)[:, None] / 1e4 ** (torch.arange(0, DIM, 2) / DIM)
    return (
        torch.linspace(0.5, 1.5, layers * DIM).view(layers, DIM),
        torch.full((layers,), 1e-6),
        torch.cat([angles.cos(), angles.sin()], dim=-1),
    )


WIDTHS = {"num_kv_heads": HEADS, "head_dim": DIM, "rotary_dim": DIM}


@pytest.mark.parametrize("flat", [True, False], ids=["tile of a CPU", "tile of a GPU"])
def test_the_last_token_of_more_than_two_to_the_31_elements(flat, monkeypatch):
    monkeypatch.setattr(kernel_module, "tile_of", lambda *_: Tile(items=16, steps=1, flat=flat, warps=4))
    kv = torch.empty(TOKENS, LAYERS, 2 * HEADS * DIM, dtype=torch.bfloat16)
    k_out, v_out = (torch.empty(LAYERS, TOKENS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    assert min(kv.numel(), k_out.numel()) > 2**31
    last = torch.randn(16, LAYERS, 2 * HEADS * DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    kv[-16:] = last
    positions = torch.zeros(TOKENS, dtype=torch.long)
    positions[-16:] = torch.arange(16) * 4
    with last_part(1):
        fused_norm_rope(kv, positions, *parameters(LAYERS), **WIDTHS, k_out=k_out, v_out=v_out)
    due_k, due_v = fused_norm_rope(last, positions[-16:], *parameters(LAYERS), **WIDTHS)
    # The last program has the last layer's last tokens.
    assert torch.equal(k_out[-1, -16:], due_k[-1])
    assert torch.equal(v_out[-1, -16:], due_v[-1])


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("flat", [True, False], ids=["tile of a CPU", "tile of a GPU"])
def test_a_slot_beyond_two_to_the_31_elements(flat, block_size, monkeypatch):
    monkeypatch.setattr(kernel_module, "tile_of", lambda *_: Tile(items=4, steps=1, flat=flat, warps=4))
    slots = 2_200_000
    shape = (slots // block_size, 2, block_size, HEADS, DIM) if block_size else (slots, HEADS, DIM)
    caches = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(2)]
    # Every other block, so that no single stride leads to a slot.
    k, v = (cache[:, 1] if block_size else cache for cache in caches)
    assert k.stride(0) * k.shape[0] > 2**31
    kv = torch.randn(3, 1, 2 * HEADS * DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    mapping = torch.tensor([slots - 1, 0, slots - 20])
    with last_part(1):
        fused_norm_rope_into(kv, torch.arange(3), *parameters(1), mapping, [k], [v], **WIDTHS)
    due_k, due_v = fused_norm_rope(kv, torch.arange(3), *parameters(1), **WIDTHS)
    at = (mapping // block_size, mapping % block_size) if block_size else mapping
    assert torch.equal(k[at], due_k[0])
    assert torch.equal(v[at], due_v[0])


def test_an_access_past_the_end_would_show():
    table = parameters(1)[2]
    kv = torch.zeros(1, 1, 2 * HEADS * DIM).bfloat16()
    with last_part(1), pytest.raises(KernelMemoryError, match="table"):
        fused_norm_rope(kv, torch.tensor([len(table)]), *parameters(1), **WIDTHS)


def test_more_items_than_an_int32_counts_are_refused():
    tokens = 2**31 // LAYERS
    kv = torch.empty(1, LAYERS, 4, dtype=torch.bfloat16).expand(tokens, -1, -1)
    positions, out = torch.zeros(1, dtype=torch.long).expand(tokens), torch.empty(2).bfloat16()
    with pytest.raises(InputError, match="split the tokens"):
        fused_norm_rope(
            kv, positions, torch.ones(LAYERS, 2), torch.ones(LAYERS), torch.zeros(1, 2), num_kv_heads=1, head_dim=2,
            rotary_dim=2, k_out=out.expand(LAYERS, tokens, 1, 2), v_out=out.expand(LAYERS, tokens, 1, 2),
        )  # fmt: skip
