"""That the kernel which is interpreted here also compiles for GPUs, without one.

Failure modes this file exists to catch: a construct that the interpreter takes and the compiler does not; a tile that spills registers;
scalar loads where the layout allows wide ones; a fused multiply-add that would round unlike the interpreter.
"""

from __future__ import annotations

import re

import pytest
import torch
import triton
from targets import TARGETS, NoDevice, inspect

from pytest_specdecode.fused_kv.kernel import _norm_rope_kernel

if not hasattr(triton.runtime.driver, "_active"):
    pytest.skip("this triton has no driver that can be stood in for", allow_module_level=True)


@pytest.fixture
def compiled_for(monkeypatch):
    def compile_for(name, *, head_dim=128, rotary_dim=128, dtype=torch.bfloat16, scale=False):
        layers, tokens, heads = 5, 16, 4
        kv = torch.empty(tokens, layers, 2 * heads * head_dim, dtype=dtype)
        out = torch.empty(layers, tokens, heads, head_dim, dtype=dtype)
        rest = head_dim - rotary_dim
        # Not set_active: there is no real driver to go back to where there is no GPU.
        monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice(TARGETS[name]))
        return _norm_rope_kernel.warmup(
            kv, torch.zeros(tokens, dtype=torch.long), torch.empty(layers, head_dim), torch.empty(layers),
            torch.empty(64, rotary_dim), out, torch.empty_like(out), layers * tokens * heads, tokens,
            kv.stride(0), kv.stride(1), head_dim, rotary_dim, *out.stride()[:3], *out.stride()[:3], 1.0,
            NUM_HEADS=heads, HEAD_DIM=head_dim, HALF=rotary_dim // 2, BLOCK_ROWS=16,
            BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2), BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
            BLOCK_HEAD=triton.next_power_of_2(head_dim), SCALE_VALUES=scale,
            num_warps=4, enable_fp_fusion=False, grid=(1,),
        )  # fmt: skip

    return compile_for


@pytest.mark.parametrize(("head_dim", "rotary_dim", "scale"), [(128, 128, False), (96, 32, True)])
def test_compiles_for_amd(compiled_for, head_dim, rotary_dim, scale):
    text = compiled_for("gfx942", head_dim=head_dim, rotary_dim=rotary_dim, scale=scale).asm["amdgcn"]
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", text) == ["0"]
    assert re.findall(r"\.sgpr_spill_count:\s*(\d+)", text) == ["0"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_compiles_for_nvidia_without_spills(compiled_for, target, tmp_path):
    usage, code = inspect(compiled_for(target), tmp_path)
    assert re.findall(r"STACK:(\d+)", usage) == ["0"]
    assert all(int(count) <= 64 for count in re.findall(r"REG:(\d+)", usage)), usage
    assert not re.search(r"\b(LDL|STL)\b", code)
    # K, V and the outputs move 128 bits at a time.
    assert len(re.findall(r"STG\.E\.128", code)) >= 3
    assert "FFMA" not in code


def test_partial_rotation_and_narrow_dtypes_compile(compiled_for, tmp_path):
    for dtype in (torch.float32, torch.float16):
        usage, _ = inspect(compiled_for("sm_90", head_dim=80, rotary_dim=32, dtype=dtype, scale=True), tmp_path)
        assert re.findall(r"STACK:(\d+)", usage) == ["0"]
