"""That the latent kernel which is interpreted here also compiles for GPUs, without one.

Failure modes this file exists to catch: a construct that the interpreter takes and the compiler does not; a tile that spills registers;
scalar loads of the latent where the layout allows wide ones; a fused multiply-add that would round unlike the interpreter. Each for a
norm over the latent and for one over the whole row.
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
    def compile_for(name, *, rank=512, rope_dim=64, dtype=torch.bfloat16, is_neox=False, whole=False):
        layers, tokens, width = 5, 16, rank + rope_dim
        normed = width if whole else rank
        kv_a = torch.empty(tokens, layers, width, dtype=dtype)
        out = torch.empty(layers, tokens, width, dtype=dtype)
        monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice(TARGETS[name]))
        return _latent_norm_rope_kernel.warmup(
            kv_a, torch.zeros(tokens, dtype=torch.long), torch.empty(layers, normed), torch.empty(layers),
            torch.empty(64, rope_dim), out, layers * tokens, tokens,
            kv_a.stride(0), kv_a.stride(1), normed, rope_dim, *out.stride()[:2],
            RANK=rank, HALF=rope_dim // 2, BLOCK_ROWS=4, BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_HALF=triton.next_power_of_2(rope_dim // 2), IS_NEOX=is_neox, WHOLE=whole,
            num_warps=4, enable_fp_fusion=False, grid=(1,),
        )  # fmt: skip

    return compile_for


# DeepSeek's rows: a latent of 512 with 64 lanes behind it, and V4's row of 512 of which the last 64 rotate.
ROWS = {"latent": {"rank": 512, "whole": False}, "whole": {"rank": 448, "whole": True}}
ODD = {"rank": 100, "rope_dim": 10, "is_neox": True}


@pytest.mark.parametrize(
    "shape", [*ROWS.values(), ODD, {**ODD, "whole": True}], ids=["latent", "whole", "odd", "odd whole"]
)
def test_compiles_for_amd(compiled_for, shape):
    text = compiled_for("gfx942", **shape).asm["amdgcn"]
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", text) == ["0"]
    assert re.findall(r"\.sgpr_spill_count:\s*(\d+)", text) == ["0"]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("sm_80", torch.bfloat16), ("sm_90", torch.bfloat16), ("sm_90", torch.float32), ("sm_100", torch.bfloat16)],
    ids=str,
)
def test_compiles_for_nvidia_without_spills(compiled_for, target, dtype, row, tmp_path):
    usage, code = inspect(compiled_for(target, dtype=dtype, **ROWS[row]), tmp_path)
    assert re.findall(r"STACK:(\d+)", usage) == ["0"]
    assert not re.search(r"\b(LDL|STL)\b", code)
    # The latent moves 128 bits at a time, in and out.
    assert re.search(r"LDG\.E\.128", code)
    assert re.search(r"STG\.E\.128", code)
    assert "FFMA" not in code


@pytest.mark.parametrize("whole", [False, True], ids=["latent", "whole"])
def test_odd_widths_compile(compiled_for, whole, tmp_path):
    usage, _ = inspect(compiled_for("sm_90", dtype=torch.float16, whole=whole, **ODD), tmp_path)
    assert re.findall(r"STACK:(\d+)", usage) == ["0"]
