"""`FusedKV` from layers to the callback, and the reference it is held against.

Failure modes this file exists to catch: K rows sliced where Q still is; one layer's weights, norm or epsilon used for another; a bias
dropped or added after the norm; V scaled or rotated when it must not be; positions negative, past the table, miscounted, floating, or
read with the wrong stride; a rope table grown with the wrong rows; a stacked copy that goes stale; tensors handed out that the next call
overwrites; a path that silently is not the kernel; a reference that shares the path's mistakes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fakes import FakeRope, ForgetfulRope, GrowingRope, fake_layers
from torch.nn import functional as F

from pytest_specdecode.errors import InputError, StackMismatchError, StackRangeError, StackUnsupportedError
from pytest_specdecode.fused_kv import FusedKV, eager_kv, fused_kv_reference
from pytest_specdecode.layers.rope import RotaryEmbedding
from pytest_specdecode.memory import guarded
from pytest_specdecode.numerics import assert_close, assert_exact
from pytest_specdecode.spec import RopeSpec

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def stacked(layers, **options):
    attn = layers[0].self_attn
    return FusedKV(layers, attn.rotary_emb, attn.num_kv_heads, attn.head_dim, "cpu", **options)


def context(tokens=5, hidden_size=24, dtype=torch.float32, seed=1):
    return torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def collect(path, ctx, positions):
    seen = []
    path.materialize(ctx, positions, lambda layer, k, v: seen.append((layer, k, v)))
    assert [layer for layer, _, _ in seen] == list(range(path.num_layers))
    return torch.stack([k for _, k, _ in seen]), torch.stack([v for _, _, v in seen])


def check_against_reference(layers, ctx, positions, **options):
    path = stacked(layers, **options)
    with guarded(filled=("k_out", "v_out")):
        k, v = collect(path, ctx, positions)
    due_k, due_v = fused_kv_reference(layers, ctx, positions)
    eager_k, eager_v = eager_kv(layers, ctx, positions)
    sums = (path.hidden_size, path.head_dim)
    assert_close(k, due_k, eager_k, what="K", reduction_sizes=sums)
    assert_close(v, due_v, eager_v, what="V", reduction_sizes=sums)
    return k, v


SHAPES = [
    {},
    {"bias": True},
    {"norm_kind": "gemma"},
    {"value_scale": 0.612},
    {"bias": True, "norm_kind": "gemma", "value_scale": 0.612},
    {"rotary_dim": 6},
    {"head_dim": 80, "rotary_dim": 40, "num_kv_heads": 1, "num_heads": 3},
    {"eps_name": "eps", "eps": 1e-5},
]


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_matches_the_reference(shape, dtype, backend):
    layers = fake_layers(3, dtype=dtype, **shape)
    check_against_reference(layers, context(dtype=dtype), torch.tensor([0, 63, 5, 5, 17]), backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epsilons_may_differ_and_each_layer_uses_its_own(dtype):
    # K of this size is far below the epsilons, so a layer with the wrong one is wrong by a factor.
    layers = fake_layers(3, dtype=dtype, weight_scale=1e-3, overrides={1: {"eps": 1e-5}, 2: {"eps": 1e-4}})
    check_against_reference(layers, context(dtype=dtype), torch.arange(5))


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_token_counts(tokens):
    check_against_reference(fake_layers(1), context(tokens), torch.arange(tokens))


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_v_is_the_layers_own_projection_bit_for_bit(dtype, backend):
    # Small integers: every order of summation gives the same number, so zero is the tolerance.
    layers = fake_layers(3, dtype=dtype, bias=True)
    generator = torch.Generator().manual_seed(3)
    for layer in layers:
        qkv = layer.self_attn.qkv_proj
        for tensor in (qkv.weight, qkv.bias):
            tensor.copy_(torch.randint(-2, 3, tensor.shape, generator=generator))
    ctx = torch.randint(-2, 3, (4, 24), generator=generator).to(dtype)
    _, v = collect(stacked(layers, backend=backend), ctx, torch.arange(4))
    for index, layer in enumerate(layers):
        qkv = layer.self_attn.qkv_proj
        due = F.linear(ctx, qkv.weight, qkv.bias)[:, -32:].view(4, 2, 16)
        assert_exact(v[index], due, what="V", bits=True, axes=("token", "head", "dim"))


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_v_is_the_stacked_projection_bit_for_bit(dtype, backend):
    # Against a layer's own GEMM random numbers may differ by the order of sums; against the stacked one they may not.
    path = stacked(fake_layers(3, dtype=dtype, bias=True), backend=backend)
    ctx = context(dtype=dtype)
    _, v = collect(path, ctx, torch.arange(5))
    due = path.project(ctx).view(5, 3, 2, 2, 16)[:, :, 1].transpose(0, 1)
    assert_exact(v, due, what="V", bits=True)


def test_the_bias_is_added_before_the_norm():
    layers = fake_layers(1, bias=True, rotary_dim=2)
    layers[0].self_attn.qkv_proj.weight.zero_()
    k, v = collect(stacked(layers), context(1), torch.tensor([0]))
    attn = layers[0].self_attn
    bias = attn.qkv_proj.bias[64:].view(2, 2, 16)
    due = bias[0] * torch.rsqrt(bias[0].square().mean(-1, keepdim=True) + 1e-6) * attn.k_norm.weight
    torch.testing.assert_close(k[0, 0], due)
    assert torch.equal(v[0, 0], bias[1])


def test_a_context_in_another_dtype_is_cast_to_the_weights():
    layers = fake_layers(2, dtype=torch.bfloat16)
    k, _ = collect(stacked(layers), context(dtype=torch.float32), torch.arange(5))
    again, _ = collect(stacked(layers), context(dtype=torch.bfloat16), torch.arange(5))
    assert k.dtype == torch.bfloat16
    assert torch.equal(k, again)


def test_a_strided_context_is_read_by_its_strides():
    layers = fake_layers(2)
    wide = context(5, 48)
    k, _ = collect(stacked(layers), wide[:, ::2], torch.arange(5))
    due, _ = collect(stacked(layers), wide[:, ::2].contiguous(), torch.arange(5))
    assert torch.equal(k, due)


# Where SGLang's helper has a text, ours is the same.
def test_no_tokens_call_nothing_and_look_at_no_positions():
    stacked(fake_layers(1)).materialize(context(0), torch.tensor([-1.5]), pytest.fail)


def test_positions_are_flattened():
    layers = fake_layers(1)
    k, _ = collect(stacked(layers), context(4), torch.tensor([[3, 1], [0, 2]]))
    due, _ = collect(stacked(layers), context(4), torch.tensor([3, 1, 0, 2]))
    assert torch.equal(k, due)


@pytest.mark.parametrize("count", [4, 15])
def test_the_number_of_positions_must_fit(count):
    with pytest.raises(InputError) as caught:
        collect(stacked(fake_layers(1)), context(5), torch.arange(count))
    assert str(caught.value) == (
        f"positions must match ctx_hidden token count for fused KV materialization: positions={count}, total_ctx=5."
    )
    assert isinstance(caught.value, ValueError)


def test_a_position_past_the_table():
    with pytest.raises(StackRangeError) as caught:
        collect(stacked(fake_layers(1)), context(2), torch.tensor([3, 64]))
    assert str(caught.value) == (
        "RoPE cos/sin cache is too short for fused KV materialization: max_position=64, cache_len=64."
    )
    assert isinstance(caught.value, RuntimeError)


def test_a_position_past_the_table_is_seen_with_a_hint_too():
    with pytest.raises(StackRangeError, match="max_position=64"):
        collect(stacked(fake_layers(1), max_position_hint=8), context(1), torch.tensor([64]))


def test_the_hint_is_checked_at_construction():
    stacked(fake_layers(1), max_position_hint=64)
    with pytest.raises(StackRangeError, match=r"max_position=64, cache_len=64\."):
        stacked(fake_layers(1), max_position_hint=65)


# Where SGLang's helper goes wrong in silence or far from the cause, ours says so.
@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (torch.tensor([0, -1]), "must not be negative for fused KV materialization: got -1"),
        (torch.tensor([0.0, 1.0]), "must be integers for fused KV materialization: got torch.float32"),
        (torch.tensor([True, False]), "must be integers"),
    ],
)
def test_positions_that_would_be_misread(positions, text):
    with pytest.raises(InputError, match=text):
        collect(stacked(fake_layers(1)), context(2), positions)


def test_strided_positions_are_read_by_their_stride():
    layers = fake_layers(1)
    strided = torch.tensor([9, 0, 4, 0, 63, 0])[::2]
    k, _ = collect(stacked(layers), context(3), strided)
    due, _ = collect(stacked(layers), context(3), torch.tensor([9, 4, 63]))
    assert torch.equal(k, due)


@pytest.mark.parametrize(
    ("ctx", "text"),
    [
        (torch.zeros(24), "must be 2D"),
        (torch.zeros(1, 2, 24), "must be 2D"),
        (torch.zeros(2, 25), "24 wide for fused KV materialization: got torch.float32, 25 wide"),
        (torch.zeros(2, 24, dtype=torch.long), "must be floating"),
    ],
)
def test_a_context_that_does_not_fit(ctx, text):
    with pytest.raises(InputError, match=text):
        collect(stacked(fake_layers(1)), ctx, torch.arange(2))


def test_every_mismatch_is_raised_at_construction():
    with pytest.raises(StackMismatchError, match=r"rope_theta mismatch .* at layer 1\."):
        stacked(fake_layers(2, overrides={1: {"theta": 1e6}}))
    with pytest.raises(StackMismatchError, match=r"rotary_dim=7, head_dim=16\."):
        FusedKV(fake_layers(1), FakeRopeOfWidth(7), 2, 16, "cpu")


def FakeRopeOfWidth(width):
    rope = FakeRope(16)
    rope.rotary_dim = width
    return rope


def test_layers_are_held_against_the_rope_that_is_used():
    layers = fake_layers(2)
    with pytest.raises(StackMismatchError, match=r"rope_theta .* expected 500000\.0, got 10000\.0 at layer 0"):
        FusedKV(layers, FakeRope(16, theta=5e5), 2, 16, "cpu")


def test_layers_without_what_the_path_reads_are_named():
    layers = fake_layers(2)
    del layers[1].self_attn.qkv_proj
    with pytest.raises(StackUnsupportedError, match=r"without self_attn\.qkv_proj .* layer 1"):
        stacked(layers)


def test_a_norm_without_epsilon_is_named():
    layers = fake_layers(2)
    del layers[1].self_attn.k_norm.variance_epsilon
    with pytest.raises(StackUnsupportedError, match=r"epsilon .* at layer 1"):
        stacked(layers)


# Growth of the rope table.
def test_a_table_that_can_grow_grows():
    rope = GrowingRope(16, rows=8)
    layers = fake_layers(2, rotary_emb=rope)
    ctx, positions = context(3), torch.tensor([0, 7, 100])
    k, _ = collect(stacked(layers), ctx, positions)
    long = fake_layers(2, rotary_emb=FakeRope(16, rows=128))
    assert_close(k, fused_kv_reference(long, ctx, positions)[0], what="K", reduction_sizes=(24, 16))
    stacked(layers, max_position_hint=500)
    assert rope.cos_sin_cache.shape[0] >= 500


@pytest.mark.parametrize("scaling", [{"factor": 4.0}, {"mscale": 1.1386}], ids=repr)
def test_a_scaled_table_that_grows_rightly_is_accepted(scaling):
    rope = GrowingRope(64, theta=1e6, rows=32, **scaling)
    stacked(fake_layers(1, head_dim=64, rotary_emb=rope), max_position_hint=4096)


@pytest.mark.parametrize("scaling", [{"factor": 4.0}, {"mscale": 1.1386}], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scaled_table_that_grows_without_its_scaling_is_refused(scaling, dtype):
    rope = ForgetfulRope(64, theta=1e6, rows=32, **scaling)
    rope.cos_sin_cache = rope.cos_sin_cache.to(dtype)
    layers = fake_layers(1, head_dim=64, rotary_emb=rope)
    with pytest.raises(StackUnsupportedError, match="row 32 does not continue rows 0 to 31") as caught:
        stacked(layers, max_position_hint=64)
    assert caught.value.axis == "rope-scaling"
    assert rope.cos_sin_cache.shape[0] == 32, "the wrong rows were left behind"
    path = stacked(layers)
    collect(path, context(1), torch.tensor([31]))
    with pytest.raises(StackUnsupportedError, match="row 32"):
        collect(path, context(1), torch.tensor([32]))


def test_a_plain_table_whose_growth_forgets_nothing_is_accepted():
    rope = ForgetfulRope(64, theta=1e6, rows=32)
    stacked(fake_layers(1, head_dim=64, rotary_emb=rope), max_position_hint=4096)


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("yarn", YARN),
        ("deepseek_yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}),
        ("llama3", {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("longrope", {**YARN, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}),
    ],
)
def test_our_own_rope_grows_as_it_began(kind, scaling):
    spec = RopeSpec(theta=1e6, rope_type=kind, rotary_dim=32, scaling=scaling, max_position_embeddings=512)
    ropes = [RotaryEmbedding(spec, 32) for _ in range(2)]
    layers = fake_layers(2, head_dim=32, overrides={index: {"rotary_emb": rope} for index, rope in enumerate(ropes)})
    path = stacked(layers, max_position_hint=600)
    positions = torch.tensor([0, 599, 2000])
    k, _ = collect(path, context(3), positions)
    assert_close(k, fused_kv_reference(layers, context(3), positions)[0], what="K", reduction_sizes=(24, 32))


class RemakingRope(FakeRope):
    """Like dynamic NTK: growing makes the whole table anew, for the new length."""

    def _ensure_cos_sin_cache_length(self, needed_max_pos):
        self.inv_freq = self.inv_freq / 2
        self.cos_sin_cache = self.rows_at(torch.arange(needed_max_pos + 1))


def test_a_table_made_anew_is_accepted_before_use_and_refused_after():
    rope = RemakingRope(16, rows=8)
    path = stacked(fake_layers(1, rotary_emb=rope), max_position_hint=16)
    with pytest.raises(StackUnsupportedError, match="it changed row 1"):
        collect(path, context(1), torch.tensor([16]))


class OnDemandRope(RemakingRope):
    """One whose table is a property, so that nobody can put an old one back."""

    cos_sin_cache = property(lambda self: self.table)

    def __init__(self, *args, **kwargs):
        self.table = FakeRope(*args, **kwargs).cos_sin_cache
        self.__dict__.update({**vars(FakeRope(*args, **kwargs)), "table": self.table})

    def _ensure_cos_sin_cache_length(self, needed_max_pos):
        self.inv_freq = self.inv_freq / 2
        self.table = self.rows_at(torch.arange(needed_max_pos + 1))


def test_a_refused_table_that_cannot_be_put_back_stays_refused():
    path = stacked(fake_layers(1, rotary_emb=OnDemandRope(16, rows=8)))
    for position in (8, 0):
        with pytest.raises(StackUnsupportedError, match="it changed row 1"):
            collect(path, context(1), torch.tensor([position]))


def test_a_table_that_somebody_else_grew_wrongly_is_refused_too():
    rope = ForgetfulRope(64, theta=1e6, rows=32, factor=4.0)
    path = stacked(fake_layers(1, head_dim=64, rotary_emb=rope))
    rope._ensure_cos_sin_cache_length(40)
    with pytest.raises(StackUnsupportedError, match="row 32"):
        collect(path, context(1), torch.tensor([0]))


def test_a_shared_table_recast_by_its_owner_is_followed():
    rope = FakeRope(16)
    path = stacked(fake_layers(1, rotary_emb=rope))
    rope.cos_sin_cache = rope.cos_sin_cache.bfloat16()
    collect(path, context(1), torch.tensor([5]))


# Tensors and weights over time.
def test_every_call_hands_out_fresh_tensors():
    path = stacked(fake_layers(2))
    k, v = collect(path, context(5), torch.arange(5))
    before = k.clone(), v.clone()
    collect(path, context(3, seed=9), torch.arange(3))
    collect(path, context(9, seed=9), torch.arange(9))
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_no_graph_is_kept(backend):
    layers = fake_layers(2)
    layers[0].self_attn.qkv_proj.weight.requires_grad_()
    k, v = collect(stacked(layers, backend=backend), context().requires_grad_(), torch.arange(5))
    assert not k.requires_grad
    assert not v.requires_grad


def test_a_float64_table_is_read_as_float32():
    rope = FakeRope(16)
    exact = FakeRope(16)
    exact.cos_sin_cache = exact.cos_sin_cache.double()
    k, _ = collect(stacked(fake_layers(2, rotary_emb=exact)), context(), torch.arange(5))
    due, _ = collect(stacked(fake_layers(2, rotary_emb=rope)), context(), torch.arange(5))
    assert torch.equal(k, due)


def test_the_input_is_left_alone():
    ctx, positions = context(), torch.arange(5)
    copies = ctx.clone(), positions.clone()
    collect(stacked(fake_layers(2)), ctx, positions)
    assert torch.equal(ctx, copies[0])
    assert torch.equal(positions, copies[1])


@pytest.mark.parametrize("what", ["weight", "norm", "bias"])
def test_weights_changed_in_place_are_noticed(what):
    layers = fake_layers(2, bias=True)
    path = stacked(layers)
    stale, _ = collect(path, context(), torch.arange(5))
    attn = layers[1].self_attn
    with torch.no_grad():
        {"weight": attn.qkv_proj.weight, "norm": attn.k_norm.weight, "bias": attn.qkv_proj.bias}[what].mul_(2)
    k, _ = collect(path, context(), torch.arange(5))
    due, _ = collect(stacked(layers), context(), torch.arange(5))
    assert torch.equal(k, due)
    assert torch.equal(k[0], stale[0])
    assert not torch.equal(k[1], stale[1])


def test_refresh_weights_takes_other_layers_and_validates_them():
    path = stacked(fake_layers(2))
    others = fake_layers(3, seed=5)
    path.refresh_weights(others)
    k, _ = collect(path, context(), torch.arange(5))
    due, _ = collect(stacked(others), context(), torch.arange(5))
    assert torch.equal(k, due)
    with pytest.raises(StackMismatchError, match="at layer 1"):
        path.refresh_weights(fake_layers(2, overrides={1: {"num_kv_heads": 4}}))
    again, _ = collect(path, context(), torch.arange(5))
    assert torch.equal(again, due), "a refused refresh must leave the stack as it was"


def test_auto_takes_the_kernel_where_triton_is():
    path = stacked(fake_layers(2))
    assert path.backend == "triton"
    with guarded() as guard:
        collect(path, context(), torch.arange(5))
    assert [launch.kernel for launch in guard.launches] == ["_norm_rope_kernel"]
    with guarded() as guard:
        collect(stacked(fake_layers(2), backend="eager"), context(), torch.arange(5))
    assert guard.launches == []


def test_an_unknown_backend_is_refused():
    with pytest.raises(InputError, match="backend"):
        stacked(fake_layers(1), backend="cuda")


def test_the_eager_path_serves_where_triton_is_missing():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        f"sys.path.insert(0, {str(__file__.rsplit('/', 1)[0])!r})\n"
        "import torch\n"
        "from fakes import fake_layers\n"
        "from pytest_specdecode.errors import MissingDependencyError\n"
        "from pytest_specdecode.fused_kv import FusedKV, fused_kv_reference\n"
        "layers = fake_layers(2)\n"
        "rope = layers[0].self_attn.rotary_emb\n"
        "path = FusedKV(layers, rope, 2, 16, 'cpu')\n"
        "assert path.backend == 'eager'\n"
        "ctx, positions = torch.randn(3, 24), torch.arange(3)\n"
        "k, v = path.compute(ctx, positions)\n"
        "torch.testing.assert_close(k, fused_kv_reference(layers, ctx, positions)[0].float())\n"
        "try:\n"
        "    FusedKV(layers, rope, 2, 16, 'cpu', backend='triton').compute(ctx, positions)\n"
        "except MissingDependencyError as error:\n"
        "    assert 'triton is not installed' in str(error)\n"
        "else:\n"
        "    raise AssertionError('a kernel ran without triton')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# The reference itself.
def test_the_reference_by_hand():
    # Hidden size 1, head of 4, two lanes turn: every number can be checked with a pencil.
    layers = fake_layers(
        1, num_heads=1, num_kv_heads=1, head_dim=4, rotary_dim=2, hidden_size=1, eps=0.0, value_scale=3.0
    )
    attn = layers[0].self_attn
    attn.qkv_proj.weight = torch.tensor([[9.0]] * 4 + [[1.0], [1.0], [-1.0], [1.0]] + [[1.0], [2.0], [3.0], [4.0]])
    attn.k_norm.weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    attn.rotary_emb.cos_sin_cache = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    k, v = fused_kv_reference(layers, torch.tensor([[5.0]]), torch.tensor([1]))
    # Normed: signs (1, 1, -1, 1) times the weight; lanes 0 and 1 turned by (0.6, 0.8).
    due = torch.tensor([1 * 0.6 - 2 * 0.8, 2 * 0.6 + 1 * 0.8, -3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(k[0, 0, 0], due, atol=1e-7, rtol=0)
    assert v[0, 0, 0].tolist() == [15.0, 30.0, 45.0, 60.0]


def test_the_reference_uses_each_layers_own_everything():
    # Layers that the path must refuse are still right in the reference.
    layers = fake_layers(
        2, overrides={1: {"theta": 1e6, "bias": True, "norm_kind": "gemma", "eps": 1e-5, "num_heads": 6}}
    )
    ctx, positions = context(3), torch.tensor([1, 2, 60])
    together = fused_kv_reference(layers, ctx, positions)
    for index in range(2):
        alone = fused_kv_reference(layers[index : index + 1], ctx, positions)
        assert torch.equal(together[0][index], alone[0][0])
        assert torch.equal(together[1][index], alone[1][0])


def test_the_reference_turns_interleaved_pairs_too():
    layers = fake_layers(1, head_dim=4, num_heads=1, num_kv_heads=1, rotary_dim=4)
    ctx, positions = context(1), torch.tensor([1])
    halves, _ = fused_kv_reference(layers, ctx, positions)
    attn = layers[0].self_attn
    attn.rotary_emb.is_neox_style = False
    order = torch.tensor([0, 2, 1, 3])
    for tensor in (attn.qkv_proj.weight[4:8], attn.k_norm.weight):
        tensor.copy_(tensor[order].clone())
    pairs, _ = fused_kv_reference(layers, ctx, positions)
    torch.testing.assert_close(pairs[..., order], halves)


@pytest.mark.parametrize(
    ("ctx", "positions", "error"),
    [
        (context(2), torch.arange(3), InputError),
        (context(2)[0], torch.arange(2), InputError),
        (context(1), torch.tensor([-1]), InputError),
        (context(1), torch.tensor([64]), StackRangeError),
    ],
)
def test_the_reference_refuses_what_it_cannot_mean(ctx, positions, error):
    with pytest.raises(error):
        fused_kv_reference(fake_layers(1), ctx, positions)


def test_no_tokens_in_the_reference():
    k, v = fused_kv_reference(fake_layers(2), context(0), torch.arange(0))
    assert k.shape == v.shape == (2, 0, 2, 16)
