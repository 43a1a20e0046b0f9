"""What the layers' errors carry: the key, what was got and what was due, as numbers and not as words.

Failure modes this file exists to catch: an error that names another tensor or field; a shape read from the wrong axis; a bound that is
off by one; a check that has gone missing, so that torch fails later, or nothing does.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers import (
    GatedMLP,
    GQAAttention,
    KVCache,
    LatentCache,
    LayerNorm,
    Linear,
    MLAAttention,
    MoE,
    PlainMLP,
    RMSNorm,
    SharedRowAttention,
    mla_scaling,
    require_q_lora_rank,
    visibility,
)
from pytest_specdecode.layers.attention import check_rows
from pytest_specdecode.layers.linear import join, known, take, take_bias
from pytest_specdecode.spec import MoESpec

ROWS = torch.zeros(2, 3, 5)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


COMPUTED = ("float16", "bfloat16", "float32", "float64")

# What is done, the error's class, its key, what it got and what was due.
CASES = {
    "a norm that is no vector": (lambda: RMSNorm(zeros(2, 3), 1e-6), LayerBuildError, None, (2, 3), "[width]"),
    "a norm of integers": (lambda: RMSNorm(zeros(3).long(), 1e-6), LayerBuildError, None, (3,), "[width]"),
    "a norm of 8 bits": (lambda: RMSNorm(zeros(3).to(torch.float8_e4m3fn), 1e-6), LayerBuildError, None, (3,), "[width]"),
    "a norm with a negative epsilon": (lambda: RMSNorm(zeros(3), -1e-6), LayerBuildError, None, -1e-6, None),
    "a norm with an endless epsilon": (lambda: RMSNorm(zeros(3), float("inf")), LayerBuildError, None, float("inf"), None),
    "a norm of an unknown kind": (
        lambda: RMSNorm(zeros(3), 1e-6, "layer"), LayerBuildError, None, "layer", ("rms", "gemma"),
    ),
    "a norm of another width": (lambda: RMSNorm(zeros(4), 1e-6)(ROWS), DraftError, None, 5, 4),
    "a layer norm of another width": (lambda: LayerNorm(zeros(4), 1e-6)(ROWS), DraftError, None, (2, 3, 5), (4,)),
    "a layer norm of other heads": (lambda: LayerNorm(zeros(4, 5), 1e-6)(ROWS), DraftError, None, (2, 3, 5), (4, 5)),
    "a layer norm of three axes": (lambda: LayerNorm(zeros(2, 4, 5), 1e-6), LayerBuildError, None, (2, 4, 5), "[width]"),
    "a weight of integers": (
        lambda: Linear(zeros(2, 3).long(), name="w"), LayerBuildError, "w", "int64", COMPUTED,
    ),
    "a weight that is no matrix": (lambda: Linear(zeros(2, 3, 4), name="w"), LayerBuildError, "w", (2, 3, 4), "[out, in]"),
    "a weight without a name": (lambda: Linear(zeros(2)), LayerBuildError, "weight", (2,), "[out, in]"),
    "a weight that is a vector": (lambda: Linear(zeros(2), name="w"), LayerBuildError, "w", (2,), "[out, in]"),
    "a bias of another length": (lambda: Linear(zeros(2, 3), zeros(3), name="w"), LayerBuildError, "w", (3,), (2,)),
    "a bias of integers": (
        lambda: Linear(zeros(2, 3), zeros(2).long(), name="w"), LayerBuildError, "w", "int64", "float32",
    ),
    "an input of another width": (lambda: Linear(zeros(7, 4), name="w")(ROWS), DraftError, "w", 5, 4),
    "an input of another dtype": (
        lambda: Linear(zeros(7, 5), name="w")(ROWS.double()), DraftError, "w", "float64", "float32",
    ),
    "a tensor that is missing": (lambda: take({}, "w", (2, 3)), LayerBuildError, "w", None, (2, 3)),
    "a tensor of another shape": (lambda: take({"w": zeros(3, 2)}, "w", (2, 3)), LayerBuildError, "w", (3, 2), (2, 3)),
    "a bias that is not due": (lambda: take_bias({"b": zeros(2)}, "b", 2, due=False), LayerBuildError, "b", (2,), None),
    "a bias that is missing": (lambda: take_bias({}, "b", 2, due=True), LayerBuildError, "b", None, (2,)),
    "parts that differ": (
        lambda: join([zeros(1), zeros(1).half()], "w"),
        LayerBuildError, "w", ("float32 on cpu", "float16 on cpu"), "float32 on cpu",
    ),
    "an extent that is not known": (lambda: known(None, "f"), LayerBuildError, "f", None, "a positive integer"),
    "an extent of nothing": (lambda: known(0, "f"), LayerBuildError, "f", 0, "a positive integer"),
    "rows of one axis": (lambda: check_rows(zeros(5), zeros(1)), DraftError, "x", (5,), None),
    "rows of four axes": (lambda: check_rows(zeros(1, 2, 3, 5), zeros(3)), DraftError, "x", (1, 2, 3, 5), None),
    "positions of another count": (lambda: check_rows(ROWS, zeros(2)), DraftError, "positions", (2,), (2, 3)),
    "positions of a batch for one row": (lambda: check_rows(ROWS[0], zeros(2, 3)), DraftError, "positions", (2, 3), (3,)),
    "a mask of numbers": (
        lambda: visibility(torch.arange(2), torch.arange(3), causal=True, mask=zeros(2, 3)),
        DraftError, "mask", (2, 3), (2, 3),
    ),
    "a mask of another shape": (
        lambda: visibility(torch.arange(2), torch.arange(3), causal=True, mask=zeros(3, 2).bool()),
        DraftError, "mask", (3, 2), (2, 3),
    ),
    "a query without a key": (
        lambda: visibility(torch.arange(2), torch.arange(2), causal=True, mask=zeros(2, 2).bool()),
        DraftError, "mask", None, "at least one visible key per row",
    ),
    "an activation that is not known": (
        lambda: PlainMLP({"up_proj.weight": zeros(4, 2), "down_proj.weight": zeros(2, 4)}, in_features=2,
                         intermediate_size=4, hidden_act="tanh"),
        LayerBuildError, "hidden_act", "tanh", ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_tanh", "relu", "relu2", "silu", "swish"),
    ),
    "a bias of a stranger": (
        lambda: GatedMLP(zeros(4, 2), zeros(4, 2), zeros(2, 4), biases={"side_proj": zeros(4)}),
        LayerBuildError, None, ("side_proj",), None,
    ),
    "an up of another shape": (
        lambda: GatedMLP(zeros(4, 2), zeros(5, 2), zeros(2, 4)), LayerBuildError, "up_proj.weight", (5, 2), (4, 2),
    ),
    "a down of another shape": (
        lambda: GatedMLP(zeros(4, 2), zeros(4, 2), zeros(2, 5)), LayerBuildError, "down_proj.weight", (2, 5), (2, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_error_says_what_was_got_and_what_was_due(case):
    run, kind, key, got, due = CASES[case]
    with pytest.raises(kind) as caught:
        run()
    assert (caught.value.key, caught.value.got, caught.value.due) == (key, got, due)


@pytest.mark.parametrize(
    ("fields", "key", "got"),
    [
        ({"num_heads": None}, "num_attention_heads", None),
        ({"num_kv_heads": None}, "num_key_value_heads", None),
        ({"head_dim": None}, "head_dim", None),
        ({"in_features": None}, "in_features", None),
        ({"out_features": None}, "out_features", None),
        ({"chunk_size": 0}, "attention_chunk_size", 0),
        ({"num_kv_heads": 3}, "num_key_value_heads", 3),
        ({"sink": False}, "attention_sink_bias", (4,)),
    ],
)
def test_what_a_gqa_layer_cannot_be_built_of(fields, key, got, gqa_spec, gqa_tensors):
    tensors = gqa_tensors(gqa_spec()) | {"attention_sink_bias": zeros(4)}
    with pytest.raises(LayerBuildError) as caught:
        GQAAttention(gqa_spec(**fields), tensors)
    assert (caught.value.key, caught.value.got) == (key, got)


@pytest.mark.parametrize("name", ["k_proj_target.weight", "v_proj_target.weight", "g_proj.weight"])
def test_a_tensor_that_an_option_asks_for_is_named(name, gqa_spec, gqa_tensors, draw):
    spec = gqa_spec(target_kv=True, output_gate="per-head")
    tensors = gqa_tensors(spec)
    tensors |= {f"{each}_proj_target.weight": draw(12, 10) for each in "kv"} | {"g_proj.weight": draw(4, 10)}
    GQAAttention(spec, tensors)
    del tensors[name]
    with pytest.raises(LayerBuildError) as caught:
        GQAAttention(spec, tensors)
    assert caught.value.key == name


@pytest.mark.parametrize("joined", ["qkv_proj", "kv_proj_target"])
@pytest.mark.parametrize("end", ["weight", "bias"])
def test_parts_of_a_joined_projection_of_two_dtypes_are_named(end, joined, gqa_spec, gqa_tensors, draw):
    spec = gqa_spec(target_kv=True, qkv_bias=True)
    tensors = gqa_tensors(spec)
    for each in "kv":
        tensors |= {f"{each}_proj_target.weight": draw(12, 10), f"{each}_proj_target.bias": draw(12)}
    part = f"{'v_proj' if joined == 'qkv_proj' else 'v_proj_target'}.{end}"
    with pytest.raises(LayerBuildError) as caught:
        GQAAttention(spec, tensors | {part: tensors[part].float()})
    assert caught.value.key == f"{joined}.{end}"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"num_heads": None}, "num_attention_heads"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({"v_head_dim": None}, "v_head_dim"),
        ({"in_features": None}, "in_features"),
        ({"out_features": None}, "out_features"),
    ],
)
def test_what_a_latent_layer_cannot_be_built_of(fields, key, mla_spec, mla_tensors):
    with pytest.raises(LayerBuildError) as caught:
        MLAAttention(mla_spec(**fields), mla_tensors(mla_spec()))
    assert caught.value.key == key


def test_a_latent_layers_tensors_are_named(mla_spec, mla_tensors):
    for whole in (False, True):
        spec = mla_spec(**({"whole_query": True, "q_lora_rank": None} if whole else {}))
        tensors = mla_tensors(spec)
        layer = MLAAttention(spec, tensors)
        for name in tensors:
            with pytest.raises(LayerBuildError) as caught:
                MLAAttention(spec, {each: value for each, value in tensors.items() if each != name})
            assert caught.value.key == name
            module = getattr(layer, name.removesuffix(".weight"))
            assert not isinstance(module, Linear) or module.name == name


def test_a_rank_that_sglang_asks_for(mla_spec):
    with pytest.raises(LayerBuildError, match="Eagle3 MLA layer requires q_lora_rank in the draft config") as caught:
        require_q_lora_rank(mla_spec(q_lora_rank=None))
    assert caught.value.due == "a positive integer"
    assert require_q_lora_rank(mla_spec()) == 9
    with pytest.raises(LayerBuildError) as caught:
        require_q_lora_rank(mla_spec(q_lora_rank=0))
    assert caught.value.key == "q_lora_rank"


@pytest.mark.parametrize("factor", [None, True, "4"])
def test_an_mscale_without_a_factor(factor, mla_spec):
    scaling = {"mscale_all_dim": 1.0, "factor": factor}
    with pytest.raises(LayerBuildError) as caught:
        mla_scaling(mla_spec(scaling=scaling))
    assert (caught.value.key, caught.value.got) == ("rope_scaling.factor", factor)
    with pytest.raises(LayerBuildError) as caught:
        mla_scaling(mla_spec(scaling={"mscale_all_dim": 1.0, "factor": 4.0}, qk_nope_head_dim=None))
    assert caught.value.key == "qk_nope_head_dim"


# Caches.
def kv_cache():
    cache = KVCache()
    cache.append(zeros(3, 2, 4), zeros(3, 2, 4), torch.arange(3))
    return cache


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 3, 4), torch.float32), ((1, 2, 5), torch.float32), ((2, 1, 2, 4), torch.float32), ((1, 2, 4), torch.float64)],
    ids=["heads", "width", "batch", "dtype"],
)
def test_rows_that_do_not_fit_a_cache(shape, dtype):
    rows = zeros(*shape, dtype=dtype)
    with pytest.raises(DraftError) as caught:
        kv_cache().joined(rows, rows, torch.zeros(1))
    assert (caught.value.key, caught.value.got, caught.value.due) == ("cache", shape, (3, 2, 4))


def test_rows_that_do_not_fit_a_latent_cache():
    cache = LatentCache()
    cache.append(zeros(3, 4), torch.arange(3))
    with pytest.raises(DraftError) as caught:
        cache.joined(zeros(2, 5), torch.arange(2))
    assert (caught.value.key, caught.value.got, caught.value.due) == ("cache", (2, 1, 5), (3, 1, 4))


def test_a_cache_counts_its_rows_and_keeps_their_positions_in_a_batch():
    cache = KVCache()
    assert len(cache) == 0
    for start, count in ((0, 3), (3, 1)):
        rows = zeros(5, count, 2, 4)
        cache.append(rows, rows, torch.arange(start, start + count))
    assert (len(cache), cache.k.shape, cache.v.shape) == (4, (5, 4, 2, 4), (5, 4, 2, 4))
    assert cache.positions.tolist() == [[0, 1, 2, 3]] * 5
    latent = LatentCache()
    assert len(latent) == 0
    for start, count in ((0, 3), (3, 1)):
        latent.append(zeros(5, count, 4), torch.arange(start, start + count))
    assert (len(latent), latent.rows.shape) == (4, (5, 4, 4))
    assert latent.positions.tolist() == [[0, 1, 2, 3]] * 5


# Parameters.
def test_parameters_keep_the_tensors_memory_and_do_not_learn():
    weight, bias = torch.ones(2, 3), torch.ones(2, dtype=torch.float16)
    layer = Linear(weight, bias, name="w")
    assert layer.weight.data_ptr() == weight.data_ptr()
    assert layer.bias.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not RMSNorm(torch.ones(2), 1e-6).weight.requires_grad
    assert layer.rows(torch.ones(1, 3), slice(1, 2)).tolist() == [[4.0]]


def test_what_prints_a_norm():
    assert repr(RMSNorm(torch.ones(3), 1e-5, "gemma")) == "RMSNorm(3, eps=1e-05, kind=gemma)"


# DeepSeek-V4.
@pytest.mark.parametrize(
    ("fields", "stage", "key", "got"),
    [
        ({"num_heads": None}, {}, "num_attention_heads", None),
        ({"head_dim": None}, {}, "head_dim", None),
        ({"in_features": None}, {}, "hidden_size", None),
        ({"out_features": None}, {}, "hidden_size", None),
        ({"num_kv_heads": 2}, {}, "num_key_value_heads", 2),
        ({}, {"q_lora_rank": None}, "q_lora_rank", None),
        ({}, {"o_lora_rank": None}, "o_lora_rank", None),
        ({}, {"o_groups": None}, "o_groups", None),
        ({}, {"o_groups": 3}, "o_groups", 3),
        ({"head_dim": 2}, {}, "qk_rope_head_dim", 4),
    ],
)
def test_what_a_layer_of_shared_rows_cannot_be_built_of(fields, stage, key, got, gqa_spec):
    spec = replace(gqa_spec(num_kv_heads=1), **fields)
    with pytest.raises(LayerBuildError) as caught:
        SharedRowAttention(spec, {}, **{"q_lora_rank": 3, "o_lora_rank": 3, "o_groups": 2, "norm_eps": 1e-6, **stage})
    assert (caught.value.key, caught.value.got) == (key, got)


def test_shared_rows_whose_rotating_lanes_are_not_known(gqa_spec):
    spec = gqa_spec(num_kv_heads=1)
    spec = replace(spec, rope=replace(spec.rope, rotary_dim=None))
    with pytest.raises(LayerBuildError) as caught:
        SharedRowAttention(spec, {}, q_lora_rank=3, o_lora_rank=3, o_groups=2, norm_eps=1e-6)
    assert caught.value.key == "qk_rope_head_dim"


@pytest.mark.parametrize(("heads", "rope", "head_dim"), [(1, 4, 6), (None, 4, 4)], ids=["one row", "all lanes turn"])
def test_shared_rows_at_their_limits(heads, rope, head_dim, gqa_spec, draw):
    spec = gqa_spec(num_kv_heads=heads, head_dim=head_dim)
    shapes = {
        "wq_a.weight": (3, 10), "q_norm.weight": (3,), "wq_b.weight": (4 * head_dim, 3), "wkv.weight": (head_dim, 10),
        "kv_norm.weight": (head_dim,), "wo_a.weight": (2 * 5, 2 * head_dim), "wo_b.weight": (8, 10), "attn_sink": (4,),
    }  # fmt: skip
    tensors = {name: draw(*shape) for name, shape in shapes.items()}
    layer = SharedRowAttention(spec, tensors, q_lora_rank=3, o_lora_rank=5, o_groups=2, norm_eps=1e-6)
    assert layer(draw(2, 10), torch.arange(2)).shape == (2, 8)
    for name in shapes:
        with pytest.raises(LayerBuildError) as caught:
            SharedRowAttention(
                spec, {each: value for each, value in tensors.items() if each != name},
                q_lora_rank=3, o_lora_rank=5, o_groups=2, norm_eps=1e-6,
            )  # fmt: skip
        assert caught.value.key == name
        module = getattr(layer, name.removesuffix(".weight"))
        assert not isinstance(module, Linear) or module.name == name


def test_a_joined_down_projection_means_nothing_to_a_layer_without_a_query_latent(mla_spec, mla_tensors, draw):
    spec = mla_spec(whole_query=True, q_lora_rank=None)
    tensors = mla_tensors(spec)
    layer = MLAAttention(spec, tensors | {"fused_qkv_a_proj_with_mqa.weight": draw(2, 2)})
    assert torch.equal(layer.kv_a_proj_with_mqa.weight, tensors["kv_a_proj_with_mqa.weight"])


def test_a_sink_that_is_ruled_out_and_not_there_is_none(gqa_spec, gqa_tensors):
    spec = gqa_spec(sink=False)
    assert GQAAttention(spec, gqa_tensors(spec)).attention_sink_bias is None


def test_scores_are_scaled_by_mscale_only_where_the_rope_is_scaled_and_states_one(mla_spec):
    base = 10**-0.5
    scaling = {"mscale_all_dim": 1.0, "factor": 4.0}
    scaled, plain = mla_spec(scaling=scaling), mla_spec()
    assert mla_scaling(scaled) == pytest.approx(base * (0.1 * math.log(4.0) + 1) ** 2, rel=1e-14)
    assert mla_scaling(replace(plain, rope=replace(plain.rope, scaling=scaling))) == pytest.approx(base, rel=1e-14)
    for unstated in ({}, {"mscale_all_dim": None}, {"mscale_all_dim": 0}):
        assert mla_scaling(mla_spec(scaling=unstated)) == pytest.approx(base, rel=1e-14)
    with pytest.raises(LayerBuildError) as caught:
        mla_scaling(mla_spec(scaling=scaling, qk_rope_head_dim=None))
    assert caught.value.key == "qk_rope_head_dim"


def test_projections_carry_their_tensors_names():
    gated = GatedMLP(zeros(4, 2), zeros(4, 2), zeros(2, 4))
    plain = PlainMLP(
        {"up_proj.weight": zeros(4, 2), "down_proj.weight": zeros(2, 4)}, in_features=2, intermediate_size=4
    )
    for layer, names in ((gated, ("gate_proj", "up_proj", "down_proj")), (plain, ("up_proj", "down_proj"))):
        assert [getattr(layer, name).name for name in names] == [f"{name}.weight" for name in names]


@pytest.mark.parametrize("missing", ["up_proj.weight", "down_proj.weight"])
def test_a_plain_mlps_tensors_are_named(missing):
    tensors = {"up_proj.weight": zeros(4, 2), "down_proj.weight": zeros(2, 4)}
    del tensors[missing]
    with pytest.raises(LayerBuildError) as caught:
        PlainMLP(tensors, in_features=2, intermediate_size=4)
    assert caught.value.key == missing


MOE_OPTIONS = [
    {"shared_intermediate_size": 3, "shared_gate": True, "correction_bias": True},
    {"shared_intermediate_size": 3, "gated": False, "latent": True, "latent_size": 2},
    {"fused_experts": True, "shared_intermediate_size": 3},
]


def moe_tensors(spec):
    width = spec.latent_size if spec.latent else 4
    stems = {f"experts.{index}": width for index in range(3)} | {
        "shared_expert" if spec.shared_gate else "shared_experts": 4
    }
    found = {"gate.weight": zeros(3, 4)}
    for stem, features in stems.items():
        if spec.fused_experts and stem.startswith("experts."):
            continue
        found |= {f"{stem}.up_proj.weight": zeros(3, features), f"{stem}.down_proj.weight": zeros(features, 3)}
        found |= {f"{stem}.gate_proj.weight": zeros(3, features)} if spec.gated else {}
    if spec.correction_bias:
        found["gate.e_score_correction_bias"] = zeros(3)
    if spec.shared_gate:
        found["shared_expert_gate.weight"] = zeros(1, 4)
    if spec.latent:
        found |= {"fc1_latent_proj.weight": zeros(2, 4), "fc2_latent_proj.weight": zeros(4, 2)}
    if spec.fused_experts:
        found |= {"experts.gate_up_proj": zeros(3, 6, 4), "experts.down_proj": zeros(3, 4, 3)}
    return found


@pytest.mark.parametrize("options", MOE_OPTIONS, ids=["gated", "latent", "fused"])
def test_the_tensors_of_experts_are_named(options):
    spec = MoESpec(num_experts=3, top_k=2, intermediate_size=3, **options)
    tensors = moe_tensors(spec)
    layer = MoE(spec, tensors, hidden_size=4)
    for name, tensor in tensors.items():
        for wrong in ({}, {name: tensor[..., 1:]}):
            rest = {each: value for each, value in tensors.items() if each != name}
            with pytest.raises(LayerBuildError) as caught:
                MoE(spec, rest | wrong, hidden_size=4)
            assert (caught.value.key, caught.value.due) == (name, tuple(tensor.shape))
            assert caught.value.got == (tuple(wrong[name].shape) if wrong else None)
    for name in ("gate", "shared_expert_gate", "fc1_latent_proj", "fc2_latent_proj"):
        module = getattr(layer, name)
        assert module is None or module.name == f"{name}.weight"


@pytest.mark.parametrize(
    ("fields", "key", "got"),
    [
        ({"num_experts": None}, "num_experts", None),
        ({"top_k": 0}, "num_experts_per_tok", 0),
        ({"intermediate_size": None}, "moe_intermediate_size", None),
        ({"latent": True}, "moe_latent_size", None),
        ({"n_group": 2}, "n_group", (2, 1)),
        ({"num_experts": 4, "n_group": 2, "topk_group": 0}, "n_group", (2, 0)),
        ({"num_experts": 4, "n_group": 2, "topk_group": 3}, "n_group", (2, 3)),
        ({"num_experts": 4, "n_group": 2, "topk_group": 1, "top_k": 3}, "num_experts_per_tok", 3),
    ],
)
def test_what_experts_cannot_be_built_of(fields, key, got):
    spec = MoESpec(**{"num_experts": 3, "top_k": 2, "intermediate_size": 3, **fields})
    tensors = {"gate.weight": zeros(spec.num_experts or 3, 4)}
    with pytest.raises(LayerBuildError) as caught:
        MoE(spec, tensors, hidden_size=4)
    assert (caught.value.key, caught.value.got) == (key, got)


def test_an_experts_error_has_its_place_even_where_it_names_no_tensor():
    spec = MoESpec(num_experts=3, top_k=3, intermediate_size=3)
    tensors = moe_tensors(replace(spec, shared_intermediate_size=3))
    MoE(spec, tensors, hidden_size=4)
    with pytest.raises(LayerBuildError) as caught:
        MoE(spec, tensors, hidden_size=4, hidden_act="tanh")
    assert (caught.value.key, caught.value.got) == ("experts.0.hidden_act", "tanh")


def test_as_many_experts_may_be_chosen_as_the_chosen_groups_hold():
    spec = MoESpec(num_experts=4, top_k=4, intermediate_size=3, n_group=2, topk_group=2, fused_experts=True)
    tensors = {"gate.weight": zeros(4, 4), "experts.gate_up_proj": zeros(4, 6, 4), "experts.down_proj": zeros(4, 4, 3)}
    assert MoE(spec, tensors, hidden_size=4).top_k == 4


def shared_rows(spec, draw):
    shapes = {
        "wq_a.weight": (3, 10), "q_norm.weight": (3,), "wq_b.weight": (24, 3), "wkv.weight": (6, 10), "kv_norm.weight": (6,),
        "wo_a.weight": (10, 12), "wo_b.weight": (8, 10), "attn_sink": (4,),
    }  # fmt: skip
    tensors = {name: draw(*shape) for name, shape in shapes.items()}
    return SharedRowAttention(spec, tensors, q_lora_rank=3, o_lora_rank=5, o_groups=2, norm_eps=1e-6)


def test_positions_of_another_count_are_refused_by_each_entrance(gqa_spec, gqa_tensors, draw):
    spec = gqa_spec()
    layer, shared = GQAAttention(spec, gqa_tensors(spec)), shared_rows(gqa_spec(num_kv_heads=1), draw)
    for entrance in (layer, layer.kv, layer.context_kv, shared, shared.row):
        with pytest.raises(DraftError) as caught:
            entrance(draw(3, 10), torch.arange(2))
        assert (caught.value.key, caught.value.got, caught.value.due) == ("positions", (2,), (3,))


def test_a_window_of_shared_rows_can_be_switched_off(gqa_spec, draw):
    plain, narrow = (
        shared_rows(
            gqa_spec(num_kv_heads=1, sliding_window=window),
            lambda *shape: torch.linspace(-1, 1, math.prod(shape)).view(shape).double(),
        )
        for window in (None, 2)
    )
    x, positions = draw(4, 10), torch.arange(4)
    assert torch.equal(narrow(x, positions, window=False), plain(x, positions))
    assert not torch.equal(narrow(x, positions), plain(x, positions))
