"""That the latent kernel which is interpreted here also compiles for GPUs, without one.

Failure modes this file exists to catch: a construct that the interpreter takes and the compiler does not; a tile that spills registers;
scalar loads of the latent where the layout allows wide ones; a fused multiply-add that would round unlike the interpreter.
"""

from __future__ import annotations

import re

import pytest
import torch
import triton
from targets import TARGETS, NoDevice, inspect

from pytest_specdecode.fused_kv.latent_kernel import _latent_norm_rope_kernel

if not hasattr(triton.runtime.driver, "_active"):
    pytest.skip("this triton has no driver that can be stood in for", allow_module_level=True)


@pytest.fixture
def compiled_for(monkeypatch):
    def compile_for(name, *, rank=512, rope_dim=64, dtype=torch.bfloat16, is_neox=False):
        layers, tokens, width = 5, 16, rank + rope_dim
        kv_a = torch.empty(tokens, layers, width, dtype=dtype)
        out = torch.empty(layers, tokens, width, dtype=dtype)
        monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice(TARGETS[name]))
        return _latent_norm_rope_kernel.warmup(
            kv_a, torch.zeros(tokens, dtype=torch.long), torch.empty(layers, rank), torch.empty(layers),
            torch.empty(64, rope_dim), out, layers * tokens, tokens,
            kv_a.stride(0), kv_a.stride(1), rank, rope_dim, *out.stride()[:2],
            RANK=rank, HALF=rope_dim // 2, BLOCK_ROWS=4, BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_HALF=triton.next_power_of_2(rope_dim // 2), IS_NEOX=is_neox,
            num_warps=4, enable_fp_fusion=False, grid=(1,),
        )  # fmt: skip

    return compile_for


@pytest.mark.parametrize(("rank", "rope_dim", "is_neox"), [(512, 64, False), (100, 10, True)])
def test_compiles_for_amd(compiled_for, rank, rope_dim, is_neox):
    text = compiled_for("gfx942", rank=rank, rope_dim=rope_dim, is_neox=is_neox).asm["amdgcn"]
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", text) == ["0"]
    assert re.findall(r"\.sgpr_spill_count:\s*(\d+)", text) == ["0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiles_for_nvidia_without_spills(compiled_for, dtype, tmp_path):
    usage, code = inspect(compiled_for("sm_90", dtype=dtype), tmp_path)
    assert re.findall(r"STACK:(\d+)", usage) == ["0"]
    assert not re.search(r"\b(LDL|STL)\b", code)
    # The latent moves 128 bits at a time, in and out.
    assert re.search(r"LDG\.E\.128", code)
    assert re.search(r"STG\.E\.128", code)
    assert "FFMA" not in code


def test_odd_widths_compile(compiled_for, tmp_path):
    usage, _ = inspect(compiled_for("sm_90", rank=100, rope_dim=10, dtype=torch.float16, is_neox=True), tmp_path)
    assert re.findall(r"STACK:(\d+)", usage) == ["0"]
