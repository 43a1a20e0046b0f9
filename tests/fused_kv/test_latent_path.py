"""`FusedLatentKV` from layers to the callback, and the reference it is held against.

Failure modes this file exists to catch: a row that is to be normed whole normed in part, and the reverse; rows of a joined projection
sliced where Q still is; one layer's weights, norm or epsilon used for another; a bias dropped or added after the norm; positions negative,
past the table, miscounted, floating, or read with the wrong stride; a rope table grown with the wrong rows; a stacked copy that goes
stale; tensors handed out that the next call overwrites; a path that silently is not the kernel; a reference that shares the path's
mistakes; a draft that has the stack and does not get it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fakes import FakeRope, ForgetfulRope, GrowingRope
from latent_fakes import latent_layers
from latent_harness import AXES

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.errors import (
    FusedKVError,
    InputError,
    StackMismatchError,
    StackRangeError,
    StackUnsupportedError,
)
from pytest_specdecode.fused_kv import FusedLatentKV, eager_latent, fused_latent_reference, stack
from pytest_specdecode.fused_kv.latent_stack import down_projection_of, latent_widths_of, row_norm_of
from pytest_specdecode.layers import LatentCache, MLAAttention
from pytest_specdecode.memory import guarded
from pytest_specdecode.numerics import assert_close, assert_exact
from pytest_specdecode.spec import MLASpec, RopeSpec
from pytest_specdecode.testing import random_tensors, stored_names, tiny_config, write_checkpoint, write_tiny

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def stacked(layers, **options):
    attn = layers[0].self_attn
    return FusedLatentKV(layers, attn.rotary_emb, *latent_widths_of(attn), "cpu", **options)


def context(tokens=5, hidden_size=20, dtype=torch.float32, seed=1):
    return torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def collect(path, ctx, positions):
    seen = []
    path.materialize(ctx, positions, lambda layer, rows: seen.append((layer, rows)))
    assert [layer for layer, _ in seen] == list(range(path.num_layers))
    return torch.stack([rows for _, rows in seen])


def check_against_reference(layers, ctx, positions, **options):
    path = stacked(layers, **options)
    with guarded(filled=("out",)):
        rows = collect(path, ctx, positions)
    due, baseline = fused_latent_reference(layers, ctx, positions), eager_latent(layers, ctx, positions)
    sums = (path.hidden_size, path.kv_lora_rank + path.qk_rope_head_dim)
    for what, lanes in (("latent", slice(0, path.kv_lora_rank)), ("k_pe", slice(path.kv_lora_rank, None))):
        assert_close(
            rows[..., lanes], due[..., lanes], baseline[..., lanes], what=what, axes=AXES, reduction_sizes=sums
        )
    return rows


SHAPES = [
    {},
    {"bias": True},
    {"norm_kind": "gemma"},
    {"q_lora_rank": 6},
    {"q_lora_rank": 6, "bias": True, "norm_kind": "gemma"},
    {"is_neox_style": True},
    {"rank": 100, "rope_dim": 10},
    {"eps_name": "eps", "eps": 1e-5},
    {"norm": "whole"},
    {"norm": "whole", "q_lora_rank": 6, "bias": True, "norm_kind": "gemma", "is_neox_style": True},
    {"norm": "whole", "is_row": True},
    {"norm": "whole", "is_row": True, "q_lora_rank": 6, "rank": 100, "rope_dim": 10},
    {"is_row": True},
]


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_matches_the_reference(shape, dtype, backend):
    layers = latent_layers(3, dtype=dtype, **shape)
    check_against_reference(layers, context(dtype=dtype), torch.tensor([0, 63, 5, 5, 17]), backend=backend)


@pytest.mark.parametrize("shape", [{}, {"norm": "whole", "is_row": True}], ids=["latent", "whole"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epsilons_may_differ_and_each_layer_uses_its_own(dtype, shape):
    # Rows of this size are far below the epsilons, so a layer with the wrong one is wrong by a factor.
    layers = latent_layers(3, dtype=dtype, weight_scale=1e-3, overrides={1: {"eps": 1e-5}, 2: {"eps": 1e-4}}, **shape)
    check_against_reference(layers, context(dtype=dtype), torch.arange(5))


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_position_zero_k_pe_is_the_projection_bit_for_bit(dtype, backend):
    path = stacked(latent_layers(3, dtype=dtype, bias=True), backend=backend)
    ctx = context(dtype=dtype)
    rows = collect(path, ctx, torch.zeros(5, dtype=torch.long))
    assert_exact(
        rows[..., 24:].contiguous(), path.project(ctx).transpose(0, 1)[..., 24:].contiguous(), bits=True, axes=AXES
    )


def test_a_joined_projection_is_read_after_qs_rows():
    joined = latent_layers(2, q_lora_rank=6, bias=True)
    separate = latent_layers(2, bias=True)
    for one, other in zip(joined, separate, strict=True):
        for name in ("weight", "bias"):
            setattr(
                other.self_attn.kv_a_proj_with_mqa,
                name,
                getattr(one.self_attn.fused_qkv_a_proj_with_mqa, name)[6:].clone(),
            )
        other.self_attn.kv_a_layernorm = one.self_attn.kv_a_layernorm
    ctx, positions = context(), torch.arange(5)
    assert torch.equal(collect(stacked(joined), ctx, positions), collect(stacked(separate), ctx, positions))


def test_no_tokens_call_nothing_and_look_at_no_positions():
    stacked(latent_layers(1)).materialize(context(0), torch.tensor([-1.5]), pytest.fail)


def test_a_context_in_another_dtype_is_cast_and_positions_are_flattened():
    layers = latent_layers(2, dtype=torch.bfloat16)
    rows = collect(stacked(layers), context(4), torch.tensor([[3, 1], [0, 2]]))
    again = collect(stacked(layers), context(4, dtype=torch.bfloat16), torch.tensor([3, 0, 1, 0, 0, 0, 2, 0])[::2])
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, again)


@pytest.mark.parametrize(
    ("ctx", "positions", "error", "text"),
    [
        (context(2), torch.arange(3), InputError, "positions must match .* fused latent materialization: positions=3, total_ctx=2"),
        (context(2), torch.tensor([0, -1]), InputError, "must not be negative for fused latent materialization: got -1"),
        (context(2), torch.tensor([0.0, 1.0]), InputError, "must be integers for fused latent materialization"),
        (context(2), torch.tensor([3, 64]), StackRangeError, "too short for fused latent materialization: max_position=64, cache_len=64"),
        (torch.zeros(20), torch.arange(1), InputError, "must be 2D"),
        (torch.zeros(2, 21), torch.arange(2), InputError, "20 wide for fused latent materialization"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit(ctx, positions, error, text):
    with pytest.raises(error, match=text):
        collect(stacked(latent_layers(1)), ctx, positions)


def test_every_mismatch_is_raised_at_construction():
    with pytest.raises(StackMismatchError, match=r"rope_theta mismatch .* at layer 1\."):
        stacked(latent_layers(2, overrides={1: {"theta": 1e6}}))
    with pytest.raises(StackMismatchError, match=r"rotary_dim=4, qk_rope_head_dim=8\."):
        FusedLatentKV(latent_layers(1), FakeRope(4, is_neox_style=False), 24, 8, "cpu")
    with pytest.raises(StackMismatchError, match=r"is_neox_style .* expected True, got False at layer 0"):
        FusedLatentKV(latent_layers(1), FakeRope(8), 24, 8, "cpu")


@pytest.mark.parametrize("name", ["kv_a_proj_with_mqa", "kv_lora_rank", "qk_rope_head_dim", "rotary_emb"])
def test_layers_without_what_the_path_reads_are_named(name):
    layers = latent_layers(2)
    good = stacked(layers)
    delattr(layers[1].self_attn, name)
    with pytest.raises(StackUnsupportedError, match=rf"without self_attn\.{name} .* fused latent path: layer 1"):
        good.refresh_weights(layers)


@pytest.mark.parametrize(
    ("gone", "named"), [("wkv", "kv_a_proj_with_mqa"), ("head_dim", "head_dim"), ("qk_rope_head_dim",) * 2]
)
def test_what_the_path_reads_of_a_row_is_named_as_deepseek_v4_names_it(gone, named):
    layers = latent_layers(2, norm="whole", is_row=True)
    good = stacked(layers)
    assert good.latent_norm == "whole"
    delattr(layers[1].self_attn, gone)
    with pytest.raises(StackUnsupportedError, match=rf"without self_attn\.{named} .* fused latent path: layer 1"):
        good.refresh_weights(layers)


def test_the_other_name_of_a_rows_rotated_lanes():
    layers = latent_layers(2, norm="whole", is_row=True)
    due = collect(stacked(layers), context(), torch.arange(5))
    for layer in layers:
        layer.self_attn.rope_head_dim = layer.self_attn.qk_rope_head_dim
        del layer.self_attn.qk_rope_head_dim
    assert torch.equal(collect(stacked(layers), context(), torch.arange(5)), due)


@pytest.mark.parametrize("shape", [{}, {"is_row": True}], ids=["latent", "row"])
def test_a_joined_layer_without_q_lora_rank_is_named(shape):
    layers = latent_layers(2, q_lora_rank=6, **shape)
    del layers[1].self_attn.q_lora_rank
    with pytest.raises(StackUnsupportedError, match=r"without self_attn\.q_lora_rank"):
        stacked(layers)


def test_a_norm_without_epsilon_is_named():
    layers = latent_layers(2)
    del layers[1].self_attn.kv_a_layernorm.variance_epsilon
    with pytest.raises(StackUnsupportedError, match=r"kv_a_layernorm without an epsilon .* at layer 1"):
        stacked(layers)


def test_a_table_that_can_grow_grows():
    rope = GrowingRope(8, rows=8, is_neox_style=False)
    layers = latent_layers(2, rotary_emb=rope)
    check_against_reference(layers, context(3), torch.tensor([0, 7, 100]))
    stacked(layers, max_position_hint=500)
    assert rope.cos_sin_cache.shape[0] >= 500


def test_a_scaled_table_that_grows_without_its_scaling_is_refused():
    rope = ForgetfulRope(64, theta=1e6, rows=32, factor=4.0, is_neox_style=False)
    layers = latent_layers(1, rope_dim=64, rotary_emb=rope)
    with pytest.raises(StackUnsupportedError, match="fused latent path: row 32 does not continue rows 0 to 31"):
        stacked(layers, max_position_hint=64)
    assert rope.cos_sin_cache.shape[0] == 32, "the wrong rows were left behind"


def test_every_call_hands_out_fresh_tensors():
    path = stacked(latent_layers(2))
    rows = collect(path, context(5), torch.arange(5))
    before = rows.clone()
    handed = []
    path.materialize(context(5), torch.arange(5), lambda layer, rows: handed.append(rows))
    collect(path, context(9, seed=9), torch.arange(9))
    assert torch.equal(rows, before)
    assert torch.equal(torch.stack(handed), before)


@pytest.mark.parametrize(
    "shape",
    [{}, {"q_lora_rank": 6}, {"is_row": True, "norm": "whole"}],
    ids=["separate", "joined", "row"],
)
@pytest.mark.parametrize("what", ["weight", "norm", "bias"])
def test_weights_changed_in_place_are_noticed(what, shape):
    layers = latent_layers(2, bias=True, **shape)
    path = stacked(layers)
    stale = collect(path, context(), torch.arange(5))
    attn = layers[1].self_attn
    projection, _ = down_projection_of(attn)
    {"weight": projection.weight, "norm": row_norm_of(attn).weight, "bias": projection.bias}[what].mul_(2)
    rows = collect(path, context(), torch.arange(5))
    assert torch.equal(rows, collect(stacked(layers), context(), torch.arange(5)))
    assert torch.equal(rows[0], stale[0])
    assert not torch.equal(rows[1], stale[1])


def test_a_refused_refresh_leaves_the_stack_as_it_was():
    path = stacked(latent_layers(2))
    due = collect(path, context(), torch.arange(5))
    with pytest.raises(StackMismatchError, match="at layer 1"):
        path.refresh_weights(latent_layers(2, overrides={1: {"rank": 16}}))
    assert torch.equal(collect(path, context(), torch.arange(5)), due)


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_no_graph_is_kept(backend):
    layers = latent_layers(2)
    layers[0].self_attn.kv_a_proj_with_mqa.weight.requires_grad_()
    assert not collect(stacked(layers, backend=backend), context().requires_grad_(), torch.arange(5)).requires_grad


def test_one_launch_serves_all_layers():
    path = stacked(latent_layers(3))
    assert path.backend == "triton"
    with guarded() as guard:
        collect(path, context(), torch.arange(5))
    assert [launch.kernel for launch in guard.launches] == ["_latent_norm_rope_kernel"]
    with guarded() as guard:
        collect(stacked(latent_layers(3), backend="eager"), context(), torch.arange(5))
    assert guard.launches == []


# The reference itself.
def test_the_reference_by_hand():
    # Hidden size 1, a latent of 2 and a k_pe of 4: every number can be checked with a pencil.
    layers = latent_layers(1, rank=2, rope_dim=4, hidden_size=1, eps=0.0)
    attn = layers[0].self_attn
    attn.kv_a_proj_with_mqa.weight = torch.tensor([[1.0], [-1.0], [1.0], [2.0], [3.0], [4.0]])
    attn.kv_a_layernorm.weight = torch.tensor([3.0, 5.0])
    attn.rotary_emb.cos_sin_cache = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.6, 0.0, 0.8, 1.0]])
    rows = fused_latent_reference(layers, torch.tensor([[5.0]]), torch.tensor([1]))
    # The latent is (5, -5), its root mean square 5. k_pe is (5, 10, 15, 20): the pair (5, 10) turned by (0.6, 0.8), (15, 20) by a quarter.
    due = torch.tensor([3.0, -5.0, 5 * 0.6 - 10 * 0.8, 10 * 0.6 + 5 * 0.8, -20.0, 15.0], dtype=torch.float64)
    torch.testing.assert_close(rows[0, 0], due, atol=1e-6, rtol=0)


def test_the_reference_of_a_row_normed_whole_by_hand():
    # A row of 4 whose last 2 lanes rotate: (3, -3, 3, 3) has the root mean square 3, so the norm leaves (1, -1, 1, 1) times its weights.
    layers = latent_layers(1, rank=2, rope_dim=2, hidden_size=1, eps=0.0, norm="whole", is_row=True)
    attn = layers[0].self_attn
    attn.wkv.weight = torch.tensor([[1.0], [-1.0], [1.0], [1.0]])
    attn.kv_norm.weight = torch.tensor([3.0, 5.0, 10.0, 20.0])
    attn.rotary_emb.cos_sin_cache = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    rows = fused_latent_reference(layers, torch.tensor([[3.0]]), torch.tensor([1]))
    due = torch.tensor([3.0, -5.0, 10 * 0.6 - 20 * 0.8, 20 * 0.6 + 10 * 0.8], dtype=torch.float64)
    torch.testing.assert_close(rows[0, 0], due, atol=1e-6, rtol=0)


def test_the_reference_needs_the_widths():
    layers = latent_layers(1)
    del layers[0].self_attn.kv_lora_rank
    with pytest.raises(FusedKVError, match="layer 0 does not say how wide"):
        fused_latent_reference(layers, context(1), torch.arange(1))


def mla(seed, *, dtype, rope, rank=24, norm_kind="rms", norm_eps=1e-6, joined=False):
    generator = torch.Generator().manual_seed(seed)
    spec = MLASpec(
        num_heads=2, q_lora_rank=6, kv_lora_rank=rank, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=4,
        in_features=20, out_features=20, rope=rope,
    )  # fmt: skip
    shapes = {
        "q_a_proj": (6, 20), "q_a_layernorm": (6,), "q_b_proj": (24, 6), "kv_a_proj_with_mqa": (rank + 8, 20),
        "kv_a_layernorm": (rank,), "kv_b_proj": (16, rank), "o_proj": (20, 8),
    }  # fmt: skip
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=generator).to(dtype) / 4 for name, shape in shapes.items()
    }
    if joined:
        parts = [tensors.pop(f"{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        tensors["fused_qkv_a_proj_with_mqa.weight"] = torch.cat(parts)
    return SimpleNamespace(self_attn=MLAAttention(spec, tensors, norm_eps=norm_eps, norm_kind=norm_kind))


ROPES = {
    "default": RopeSpec(
        theta=1e4, rope_type="default", rotary_dim=8, is_neox_style=False, max_position_embeddings=4096
    ),
    "neox": RopeSpec(theta=1e4, rope_type="default", rotary_dim=8, is_neox_style=True, max_position_embeddings=4096),
    "yarn": RopeSpec(
        theta=5e4,
        rope_type="deepseek_yarn",
        rotary_dim=8,
        is_neox_style=False,
        scaling={"factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 0.5},
        max_position_embeddings=4096,
    ),
}


@pytest.mark.parametrize("norm_kind", ["rms", "gemma"])
@pytest.mark.parametrize("rope", ROPES)
def test_the_layers_own_latent_is_the_reference(rope, norm_kind):
    """`MLAAttention.latent` takes its angles from no table; so the reference is given a table in float64."""
    layers = [
        mla(seed, dtype=torch.float64, rope=ROPES[rope], norm_kind=norm_kind, norm_eps=10.0**-seed, joined=seed == 2)
        for seed in (1, 2, 3)
    ]
    ctx, positions = context(6).double(), torch.tensor([0, 4000, 1, 1500, 1, 4095])
    own = layers[0].self_attn.rotary_emb
    exact = SimpleNamespace(
        cos_sin_cache=torch.cat(own.cos_sin(torch.arange(4096)), dim=-1), is_neox_style=own.is_neox_style, rotary_dim=8
    )
    rows = fused_latent_reference(layers, ctx, positions, rotary_emb=exact)
    for index, layer in enumerate(layers):
        torch.testing.assert_close(rows[index], layer.self_attn.latent(ctx, positions), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", ROPES)
def test_the_path_is_the_layers_own_latent(rope, dtype):
    layers = [mla(seed, dtype=dtype, rope=ROPES[rope]) for seed in (1, 2)]
    exact = [mla(seed, dtype=dtype, rope=ROPES[rope]).self_attn.double() for seed in (1, 2)]
    # Below position 64, where a float32 table row is within a few float32 ulps of the exact one.
    ctx, positions = context(5, dtype=dtype), torch.tensor([0, 63, 5, 5, 17])
    due = torch.stack([attn.latent(ctx.double(), positions) for attn in exact])
    own = torch.stack([layer.self_attn.latent(ctx, positions) for layer in layers])
    assert_close(stacked(layers).compute(ctx, positions), due, own, axes=AXES, reduction_sizes=(20, 24))


def test_the_reference_uses_each_layers_own_everything():
    # Layers that the path must refuse are still right in the reference.
    layers = latent_layers(
        2, overrides={1: {"theta": 1e6, "bias": True, "norm_kind": "gemma", "eps": 1e-5, "q_lora_rank": 6}}
    )
    ctx, positions = context(3), torch.tensor([1, 2, 60])
    together = fused_latent_reference(layers, ctx, positions)
    for index in range(2):
        assert torch.equal(together[index], fused_latent_reference(layers[index : index + 1], ctx, positions)[0])


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
        fused_latent_reference(latent_layers(1), ctx, positions)


def test_no_tokens_in_the_reference():
    assert fused_latent_reference(latent_layers(2), context(0), torch.arange(0)).shape == (2, 0, 32)


# A draft's.
K3 = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "num_hidden_layers": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": ...,
    "num_key_value_heads": 4,
    "layer_types": ["full_attention"] * 3,
}


def test_a_latent_draft_has_the_stack(tmp_path):
    draft = open_draft(write_tiny(tmp_path, "dspark", **K3))
    assert draft.fused_latent_reason is None
    path = draft.fused_latent_kv(max_position_hint=300)
    assert (path.num_layers, path.kv_lora_rank, path.qk_rope_head_dim, path.is_neox_style) == (3, 20, 8, False)
    ctx, positions = context(4, 64, dtype=torch.bfloat16), torch.tensor([0, 299, 7, 7])
    layers = draft.layers()
    rows = path.compute(ctx, positions)
    assert_close(
        rows,
        fused_latent_reference(layers, ctx, positions),
        eager_latent(layers, ctx, positions),
        axes=AXES,
        reduction_sizes=(64, 20),
    )
    with pytest.raises(StackUnsupportedError, match="one latent row per token"):
        draft.fused_kv()


# DeepSeek-V4 with DSpark inside, of which only the three stages are written.
V4 = {
    **dict.fromkeys(("target_layer_ids", "mask_token_id", "sample_from_anchor", "block_size", "markov_rank"), ...),
    **dict.fromkeys(("markov_head_type", "enable_confidence_head", "confidence_head_with_markov"), ...),
    **dict.fromkeys(("rope_parameters", "layer_types", "num_target_layers"), ...),
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 20,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "hc_mult": 2,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 8,
    "sliding_window": 16,
    "rope_theta": 10000,
    # Of the layers that compress; a stage of the draft does not.
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 9, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [17, 18, 19],
    "dspark_markov_rank": 16,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_inside_deepseek_v4_has_the_stack(tmp_path, dtype):
    draft = open_draft(write_tiny(tmp_path, "dspark", dtype=dtype, **V4))
    assert draft.fused_latent_reason is None
    layers, exact = draft.layers(), draft.layers(dtype=torch.float64)
    path = draft.fused_latent_kv(layers=layers, max_position_hint=3000)
    assert (path.num_layers, path.kv_lora_rank, path.qk_rope_head_dim, path.is_neox_style) == (3, 24, 8, False)
    assert path.latent_norm == "whole"
    ctx, positions = context(5, 64, dtype=path.dtype), torch.tensor([0, 299, 7, 7, 63])
    # The layers' own rows, which no window or sink is in; the angles of a float32 table are those of float64 that far out.
    due = torch.stack([layer.self_attn.row(ctx.double(), positions) for layer in exact])
    own = torch.stack([layer.self_attn.row(ctx, positions) for layer in layers])
    rows = path.compute(ctx, positions)
    assert_close(rows, due, own, axes=AXES, reduction_sizes=(64, 32))
    truth, eager = fused_latent_reference(layers, ctx, positions), eager_latent(layers, ctx, positions)
    assert_close(rows, truth, eager, axes=AXES, reduction_sizes=(64, 32))
    with pytest.raises(StackUnsupportedError, match="one latent row per token"):
        draft.fused_kv()


def test_the_checks_of_the_other_stack_say_why_they_do_not_apply(tmp_path):
    report = check_draft(write_tiny(tmp_path, "dspark", **V4), checks="fused-kv")
    assert {result.status for result in report} == {"skipped"}
    assert all("one latent row per token" in result.message for result in report)
    assert {f"fused-kv.{axis}" for axis in stack.AXES} < {result.id for result in report}


def test_a_context_in_the_cache_may_be_the_stacks(tmp_path):
    """A block over rows that the stack made sees what a block over its context sees."""
    draft = open_draft(write_tiny(tmp_path, "dspark", dtype="float32", **V4))
    layers = draft.layers()
    ctx, positions = context(9, 64), torch.arange(9)
    rows = draft.fused_latent_kv(layers=layers).compute(ctx, positions)
    for index, layer in enumerate(layers):
        cache = LatentCache()
        cache.append(rows[index], positions)
        block = layer.probe(9, seed=3)
        due = layer.forward(block["block"], block["positions"], ctx, positions)
        got = layer.forward(block["block"], block["positions"], cache=cache)
        torch.testing.assert_close(got, due, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "names", "stage"),
    [
        ({"compress_ratios": [0] * 20 + [0, 128, 0]}, (), "stage 1 "),
        ({"compress_ratios": [4] * 20 + [128, 1, 4]}, (), "stage 0, 2 "),
        ({}, ("mtp.2.attn.compressor.wkv.weight",), "stage 2 "),
        ({"compress_ratios": ...}, ("layers.1.attn.compressor.wkv.weight",), None),
        ({"compress_ratios": [4] * 20 + [1, 0]}, (), None),
        ({"compress_ratios": [4] * 20 + [1.5, "4", None]}, (), None),
    ],
    ids=["stated", "two stated", "held", "held by the target", "too few stated", "no numbers"],
)
def test_a_stage_that_compresses_is_not_served(tmp_path, changes, names, stage):
    whole = tiny_config("dspark", **{**V4, **changes})
    tensors = {stored_names(whole, "dspark")(name): each for name, each in random_tensors(whole, "dspark").items()}
    tensors |= {name: torch.zeros(4, 64) for name in names}
    reason = open_draft(write_checkpoint(tmp_path, whole, tensors)).fused_latent_reason
    if stage is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(stage)
        assert "a compressor makes of several tokens" in reason


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("dspark", {**V4, "dspark_target_layer_ids": [19], "compress_ratios": ...}, "has one layer"),
        ("dspark", {}, "keeps K/V heads"),
        ("dspark", {**K3, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, "has one layer"),
        ("eagle3-mla", {}, "one shared context"),
        ("dflash", {}, "one shared context"),
    ],
)
def test_a_draft_without_the_stack_says_why(tmp_path, family, changes, text):
    draft = open_draft(write_tiny(tmp_path, family, **changes))
    with pytest.raises(StackUnsupportedError, match=text) as caught:
        draft.fused_latent_kv()
    assert str(caught.value) == draft.fused_latent_reason
