"""The engines' fused-KV paths as they are published: one contract class per engine, and what is known not to hold of it, with the reason.

`docs/engines.md` has the same without the gaps, with figures; `tools/engines_page.py` writes it from these classes.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_specdecode.contracts import FusedKVContract, cases, examples, last_part, watched
from pytest_specdecode.contracts.base import DRAWN
from pytest_specdecode.engines.subjects import fused_kv_class
from pytest_specdecode.errors import MissingDependencyError
from pytest_specdecode.fused_kv import fused_kv_reference
from pytest_specdecode.launch import KernelOverflowError
from pytest_specdecode.layers import RMSNorm, RotaryEmbedding
from pytest_specdecode.spec import RopeSpec


def skip_unless_installed(name):
    """Skip the module where the engine's package is not there."""
    try:
        fused_kv_class(name)
    except MissingDependencyError as error:
        pytest.skip(str(error), allow_module_level=True)


def fixed_cases(contract):
    """Property, and the call that runs it, of all cases that are not drawn, in the contract's order."""
    found = {}
    for name in dir(contract):
        argument, values = getattr(getattr(contract, name), "contract_cases", ("", {}))
        for case, value in values.items():
            found[case] = functools.partial(getattr(contract(), name), **{argument: value})
    return {name: found[name] for name in contract.properties() if not name.endswith(DRAWN)}


class Published(FusedKVContract):
    """Eight lives instead of fifty: one program per row and head is slow where it is interpreted."""

    @cases("rest", ["calls-drawn"])
    @examples(8)
    @given(data=st.data())
    def test_calls_any(self, rest, data):
        FusedKVContract.test_calls_any.hypothesis.inner_test(self, rest=rest, data=data)


class SGLang(Published):
    """FusedKVMaterializeHelper: K is rounded once, at the store."""

    rounding = "at-the-store"

    @staticmethod
    def build(*args, **kwargs):
        return fused_kv_class("sglang")(*args, **kwargs)


class VLLM(Published):
    """store_context_kv of DFlash2: K is rounded after norm and weight, and again at the store."""

    rounding = "after-the-norm"

    @staticmethod
    def build(*args, **kwargs):
        return fused_kv_class("vllm")(*args, **kwargs)

    @staticmethod
    def refresh(subject, layers):
        """The engine stacks anew whenever it has loaded weights."""
        subject.refresh_weights(layers)


_LAYER_0 = "the rope table is layer 0's; of RoPE, width and style alone are compared"
_NO_BIAS = "the stacked GEMM has no bias"
_AS_STORED = "the norm's weight is multiplied by as it is stored"
_TORCH = "left to torch, whose error names no layer"
_PROMOTED = "layers of several dtypes are promoted to the widest, and nobody is told"
_UNSCALED = "V is not scaled"
_UNIT_STRIDE = "the kernel takes positions as unit stride; the engine hands over fresh tensors"
_TAKEN_ONCE = "the stacked copy is taken at construction, never anew"

SGLANG_GAPS = {
    "rope-theta": _LAYER_0,
    "rope-scaling": _LAYER_0,
    "hidden-size": _TORCH,
    "dtype": _PROMOTED,
    "bias": f"{_NO_BIAS}; the engine's gate refuses such layers first",
    "k-norm": _TORCH,
    "norm-kind": _AS_STORED,
    "v-head-dim": "V is taken to be as wide as K, so some of its rows are cut off",
    "value-scale": _UNSCALED,
    "q-size": "K's rows start where the layer says, and nothing compares that with the weight",
    "quantization": f"{_TORCH}; the engine's gate refuses such layers first",
    "rope-theta-argument": _LAYER_0,
    "rope-scaling-argument": _LAYER_0,
    "bias-everywhere": f"{_NO_BIAS}; the engine's gate refuses such layers first",
    "gemma-norm-everywhere": _AS_STORED,
    "value-scale-everywhere": _UNSCALED,
    "strided-positions": _UNIT_STRIDE,
    "negative-position": "positions are compared with the table's end alone",
    "far-offsets": "offsets are 32 bits wide",
    "weights-updated": _TAKEN_ONCE,
    "norms-updated": _TAKEN_ONCE,
}

_TABLE = "every layer gets layer 0's table and is turned by halves; nothing of RoPE is compared"
_WHOLE = "whole heads are turned; the engine asserts that of layer 0"
_VIEW = "nothing is compared between layers, and the rows do not fit the view"

VLLM_GAPS = {
    "num-kv-heads": _VIEW,
    "head-dim": _TORCH,
    "rotary-dim": _TABLE,
    "rope-style": _TABLE,
    "rope-theta": _TABLE,
    "rope-scaling": _TABLE,
    "hidden-size": _TORCH,
    "dtype": _PROMOTED,
    "bias": _NO_BIAS,
    "k-norm": _TORCH,
    "norm-kind": _AS_STORED,
    "v-head-dim": _VIEW,
    "value-scale": _UNSCALED,
    "q-size": _VIEW,
    "quantization": _TORCH,
    "num-kv-heads-argument": _VIEW,
    "head-dim-argument": f"{_WHOLE}, and names no layer",
    "rotary-dim-argument": f"{_WHOLE}, and names no layer",
    "rope-style-argument": f"{_TABLE}; the table is the same in both styles, so here nothing is wrong yet",
    "rope-theta-argument": _TABLE,
    "rope-scaling-argument": _TABLE,
    "partial-rotary": _WHOLE,
    "interleaved-pairs": _TABLE,
    "head-of-80": f"{_WHOLE}, and here 40 lanes of 80 are",
    "bias-everywhere": _NO_BIAS,
    "gemma-norm-everywhere": _AS_STORED,
    "value-scale-everywhere": _UNSCALED,
    "epsilon-per-layer": "the epsilon is layer 0's",
    "strided-positions": _UNIT_STRIDE,
    "negative-position": "positions are compared with nothing",
    "position-past-the-table": "positions are compared with nothing",
    "context-dtype": "the states have the model's dtype; the GEMM refuses another",
}


# --- figures at the size of a draft -------------------------------------------------------------------------------------------------------


def unit_layer(seed, *, theta=1e6, bias=False, kv_heads=2, head_dim=128, hidden_size=256):
    """A layer whose K and V are unit normal for unit-normal states, and whose bias is unit normal as well."""
    made = torch.Generator().manual_seed(seed)
    rows = 3 * kv_heads * head_dim
    projection = SimpleNamespace(
        weight=torch.randn(rows, hidden_size, generator=made) / hidden_size**0.5,
        bias=torch.randn(rows, generator=made) if bias else None,
    )
    rope = RopeSpec(theta=theta, rotary_dim=head_dim, max_position_embeddings=4096)
    attn = SimpleNamespace(
        qkv_proj=projection,
        q_size=kv_heads * head_dim,
        kv_size=kv_heads * head_dim,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_emb=RotaryEmbedding(rope, head_dim),
        k_norm=RMSNorm(torch.ones(head_dim), 1e-6, "rms"),
    )
    return SimpleNamespace(self_attn=attn)


def errors(build, layers, tokens=24):
    """The largest errors of layer 1's K and V."""
    attn = layers[0].self_attn
    ctx = torch.randn(tokens, attn.qkv_proj.weight.shape[1], generator=torch.Generator().manual_seed(4))
    positions = torch.arange(tokens) * 10
    seen = {}
    with watched():
        subject = build(layers, attn.rotary_emb, attn.num_kv_heads, attn.head_dim, torch.device("cpu"))
        subject.materialize(ctx, positions, lambda layer, k, v: seen.__setitem__(layer, (k.clone(), v.clone())))
    due = fused_kv_reference(layers[1:2], ctx, positions)
    return tuple(float((got.double() - truth[0]).abs().max()) for got, truth in zip(seen[1], due, strict=True))


def another_theta():
    """Two layers with thetas of 1e6 and 1e4."""
    return [unit_layer(0), unit_layer(1, theta=1e4)]


def biased():
    """Two layers with biases."""
    return [unit_layer(0, bias=True), unit_layer(1, bias=True)]


def wraps(build, tokens):
    """Whether a call of so many tokens, of 5 layers with 8 heads of 128 in float16, has an offset that passes 32 bits; only its last
    programs are run."""
    layers = [unit_layer(seed, kv_heads=8, hidden_size=1) for seed in range(5)]
    for layer in layers:
        layer.self_attn.qkv_proj.weight = layer.self_attn.qkv_proj.weight.half()
    attn = layers[0].self_attn
    subject = build(layers, attn.rotary_emb, 8, 128, torch.device("cpu"))
    try:
        with last_part(8):
            subject.materialize(torch.ones(tokens, 1, dtype=torch.float16), torch.full((tokens,), 3), lambda *_: None)
    except KernelOverflowError:
        return True
    return False
