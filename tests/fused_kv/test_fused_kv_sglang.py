"""SGLang's own helper beside ours, where sglang is installed (its file needs only torch and triton, so it is loaded by path).

Failure modes this file exists to catch: a message or an order of checks that is no longer SGLang's; a rounding that differs from the
kernel in production; a launch path that runs our kernels only.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from fakes import fake_layers
from harness import load_source

from pytest_specdecode.fused_kv import FusedKV
from pytest_specdecode.launch import interpreted
from pytest_specdecode.memory import KernelMemoryError, guarded
from pytest_specdecode.numerics import assert_exact


@pytest.fixture(scope="module")
def helper():
    spec = importlib.util.find_spec("sglang")
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    path = folder and folder / "kernels" / "ops" / "speculative" / "fused_kv_materialize.py"
    if not path or not path.exists():
        pytest.skip("sglang with kernels/ops/speculative/fused_kv_materialize.py is not installed")
    return load_source(path, "sglang_fused_kv_materialize").FusedKVMaterializeHelper


def arguments(layers):
    attn = layers[0].self_attn
    return layers, attn.rotary_emb, attn.num_kv_heads, attn.head_dim, torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [{}, {"head_dim": 80, "rotary_dim": 48}, {"eps": 1e-5}], ids=repr)
def test_both_kernels_agree_bit_for_bit(helper, shape, dtype):
    layers = fake_layers(3, dtype=dtype, **shape)
    ctx = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([0, 63, 5, 5, 17])
    theirs = []
    with interpreted(), guarded():
        helper(*arguments(layers)).materialize(ctx, positions, lambda _, k, v: theirs.append((k.clone(), v.clone())))
    ours = FusedKV(*arguments(layers)).compute(ctx, positions)
    assert_exact(ours[0], torch.stack([k for k, _ in theirs]), what="K", bits=True)
    assert_exact(ours[1], torch.stack([v for _, v in theirs]), what="V", bits=True)


@pytest.mark.parametrize(
    "stack",
    [
        {"overrides": {1: {"num_kv_heads": 4}}},
        {"overrides": {2: {"head_dim": 32}}},
        {"overrides": {1: {"rotary_dim": 8}}},
        {"overrides": {1: {"is_neox_style": False}}},
        {"overrides": {1: {"rotary_dim": 8}, 2: {"num_kv_heads": 4}}},
        {"overrides": {1: {"num_kv_heads": 4, "head_dim": 8, "rotary_dim": 4}}},
    ],
    ids=repr,
)
def test_both_refuse_with_the_same_words(helper, stack):
    layers = fake_layers(3, **stack)
    texts = []
    for build in (helper, FusedKV):
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            build(*arguments(layers))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("position", [-1, 64])
def test_the_guard_sees_what_their_helper_does_not_check(helper, position):
    path = helper(*arguments(fake_layers(2)), max_position_hint=8)
    with interpreted(), guarded(), pytest.raises(KernelMemoryError, match="cos_sin_cache_ptr"):
        path.materialize(torch.zeros(1, 24), torch.tensor([position]), lambda *_: None)
