"""The norm-and-rotation kernel against a float64 truth, one launch at a time.

Failure modes this file exists to catch: halves of the rotation swapped or negated; a head width that is no power of two read past its
end; lanes beyond rotary_dim rotated or left out of the norm; one layer's weight, epsilon or rows used for another; a position off by
one; an epsilon that only small K can show; a block boundary crossed wrongly; V touched; an element not written or written outside;
offsets that wrap at 2^31; the launcher accepting what the kernel misreads.

Three regimes catch them: small random cases of every width in every dtype (formula), exact cases with tolerance zero (layout), and
cases of a few rows per program (block boundaries). Every launch runs between guard bands on poisoned outputs with every access watched.
"""

from __future__ import annotations

import pytest
import torch
from harness import Case, check, draw, run_watched, truth

from pytest_specdecode.errors import InputError, StackMismatchError
from pytest_specdecode.fused_kv import fused_norm_rope
from pytest_specdecode.fused_kv.inputs import next_power_of_two
from pytest_specdecode.fused_kv.kernel import _norm_rope_kernel
from pytest_specdecode.fused_kv.tiles import meta_of
from pytest_specdecode.launch import launch, observed
from pytest_specdecode.memory import guarded
from pytest_specdecode.numerics import NumericsError, assert_close, assert_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Head width, rotating lanes: whole heads, half heads, widths that are no power of two, an odd half, and the least that can rotate.
WIDTHS = [(64, 64), (80, 32), (80, 80), (96, 96), (96, 6), (128, 64), (128, 128), (192, 192), (192, 130), (16, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), WIDTHS)
def test_matches_the_truth(head_dim, rotary_dim, dtype):
    check(draw(head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype))


@pytest.mark.parametrize("block_rows", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_rows_that_do_not_fill_the_last_program(tokens, block_rows):
    check(draw(tokens=tokens, heads=3, head_dim=24, rotary_dim=10), block_rows=block_rows)


@pytest.mark.parametrize(
    "positions",
    [[0, 0, 0], [63, 63, 63], [63, 0, 62], [5, 4, 3], [1, 1, 2]],
    ids=["zero", "last row", "ends of the table", "descending", "repeated"],
)
def test_positions(positions):
    check(draw(positions=torch.tensor(positions)))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_positions_of_other_integer_types(dtype):
    check(draw(positions=torch.tensor([7, 63, 0], dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_k_where_only_the_epsilon_counts(dtype):
    # At this size the mean square is far below the epsilons, which differ tenfold between the layers.
    check(draw(scale=1e-3, eps=torch.tensor([1e-6, 1e-5]), dtype=dtype))


def test_a_wrong_epsilon_would_show_at_that_size():
    case = draw(scale=1e-3, eps=torch.tensor([1e-6, 1e-5]))
    wrong = Case(**{**vars(case), "eps": torch.tensor([1e-6, 1e-6])})
    k, _ = run_watched(wrong)
    with pytest.raises(NumericsError, match="layer=1"):
        assert_close(k, truth(case)[0], what="K")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tables_and_weights_in_half_precision(dtype):
    check(draw(dtype=dtype, table_dtype=dtype))


def test_rows_with_gaps_between_them():
    check(draw(head_dim=24, rotary_dim=12), gap=5)


def test_transposed_inputs_and_outputs_are_read_by_their_strides():
    case = draw(layers=3, tokens=4)
    layer_first = case.kv.transpose(0, 1).contiguous().transpose(0, 1)
    table_column_first = case.table.T.contiguous().T
    k_out = torch.empty(4, 3, 2, 64).transpose(0, 1)
    k, v = fused_norm_rope(
        layer_first, case.positions, case.weight, case.eps, table_column_first,
        num_kv_heads=2, head_dim=64, rotary_dim=64, k_out=k_out,
    )  # fmt: skip
    assert k is k_out
    assert_close(k, truth(case)[0], what="K")
    assert_exact(v, truth(case)[1].float(), what="V")


def test_inputs_whose_last_stride_is_not_one():
    case = draw()
    spread = Case(**{**vars(case), "kv": case.kv.repeat_interleave(2, dim=-1)[..., ::2]})
    weight = case.weight.repeat_interleave(2, dim=-1)[..., ::2]
    k, v = fused_norm_rope(
        spread.kv, case.positions, weight, case.eps.repeat_interleave(2)[::2], case.table,
        num_kv_heads=2, head_dim=64, rotary_dim=64,
    )  # fmt: skip
    due_k, due_v = run_watched(case)
    assert_exact(k, due_k, what="K", bits=True)
    assert_exact(v, due_v, what="V", bits=True)


def test_strided_positions_are_read_by_their_stride():
    every_other = torch.arange(12)[::3]
    check(draw(tokens=4, positions=every_other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_values_are_rounded_once(dtype):
    check(draw(dtype=dtype, value_scale=0.612))


def test_values_are_copied_bit_for_bit_nans_and_all():
    case = draw(dtype=torch.bfloat16, head_dim=16)
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(-1, 32)
    kv = torch.cat([torch.ones(len(bits), 32, dtype=torch.int16), bits], dim=-1).view(torch.bfloat16)[:, None, :]
    _, v = fused_norm_rope(
        kv, torch.zeros(len(bits), dtype=torch.long), case.weight[:1], case.eps[:1], case.table,
        num_kv_heads=2, head_dim=16, rotary_dim=16,
    )  # fmt: skip
    assert torch.equal(v.view(torch.int16).flatten(), bits.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_one_constant_per_layer_token_and_head(dtype):
    # Every K row is a one-hot of magnitude 1 with D = 64: its root mean square is 1/8, so K = 8 * w * sign, exactly.
    layers, tokens, heads, dim = 3, 4, 2, 64
    kv = torch.zeros(tokens, layers, 2, heads, dim)
    due_k = torch.zeros(layers, tokens, heads, dim)
    weight = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(layers, dim)
    for layer in range(layers):
        for token in range(tokens):
            for head in range(heads):
                lane = (layer * 17 + token * 5 + head * 31) % dim
                kv[token, layer, 0, head, lane] = -1.0 if token % 2 else 1.0
                kv[token, layer, 1, head] = layer * 64 + token * 8 + head
                due_k[layer, token, head, lane] = 8.0 * 2**layer * (-1 if token % 2 else 1)
    # Position p turns by p quarter turns, whose sines and cosines are exact.
    quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    table = quarter.repeat_interleave(dim // 2, dim=1)
    positions = torch.tensor([0, 1, 2, 3])
    case = Case(
        kv=kv.view(tokens, layers, -1).to(dtype),
        positions=positions,
        weight=weight.to(dtype),
        eps=torch.zeros(layers),
        table=table,
        num_kv_heads=heads,
        head_dim=dim,
        rotary_dim=dim,
    )
    first, second = due_k.chunk(2, -1)
    cos, sin = (part[None, :, None, :] for part in table[positions].chunk(2, -1))
    k, v = run_watched(case, block_rows=4)
    assert_exact(k, torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(dtype), what="K")
    assert_exact(v, kv[:, :, 1].transpose(0, 1).to(dtype), what="V", bits=True)


def test_lanes_beyond_rotary_dim_are_normed_and_not_turned():
    case = draw(head_dim=32, rotary_dim=8, dtype=torch.float32)
    k, _ = run_watched(case)
    moved, _ = run_watched(Case(**{**vars(case), "positions": (case.positions + 1) % 64}))
    assert torch.equal(k[..., 8:], moved[..., 8:])
    assert not torch.equal(k[..., :8], moved[..., :8])


def test_zero_rows_stay_zero():
    case = draw(scale=0.0)
    k, v = run_watched(case)
    assert torch.equal(k, torch.zeros_like(k))
    assert torch.equal(v, torch.zeros_like(v))


def test_a_nan_spoils_its_own_head_only():
    case = draw(tokens=2, layers=2, heads=2)
    case.kv[1, 0, 3] = float("nan")
    k, v = run_watched(case)
    assert k[0, 1, 0].isnan().all()
    assert int(k.isnan().any(-1).sum()) == 1
    assert not v.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_and_two_block_sizes_agree_bit_for_bit(dtype):
    case = draw(tokens=5, head_dim=80, rotary_dim=48, dtype=dtype)
    k, _ = run_watched(case)
    for block_rows in (None, 4):
        assert_exact(run_watched(case, block_rows=block_rows)[0], k, what="K", bits=True)


def test_each_k_and_v_is_read_once_and_written_once():
    case = draw(tokens=7, head_dim=80, rotary_dim=32)
    with guarded() as guard:
        fused_norm_rope(
            case.kv, case.positions, case.weight, case.eps, case.table, num_kv_heads=2, head_dim=80, rotary_dim=32
        )
    (traffic,) = guard.launches
    kv, k, v = (traffic.tensors[name] for name in ("kv", "k_out", "v_out"))
    assert kv.loaded_bytes == kv.unique_loaded_bytes == case.kv.numel() * 4
    assert k.stored_bytes == k.unique_stored_bytes == v.stored_bytes == case.kv.numel() * 2
    assert k.loaded_bytes == v.loaded_bytes == 0


class Stop(Exception):
    """Raised by an observer so that an access that must not happen does not."""


class FarAccess:
    """Notes the offsets of the first access to the tensor at `base` and ends the launch."""

    def __init__(self, base):
        self.base, self.offsets = base, None

    def begin(self, kernel, tensors): ...

    def end(self, completed): ...

    def load(self, program, addresses, itemsize, origin):
        if origin == self.base:
            self.offsets = (addresses.astype("int64") - self.base) // itemsize
            raise Stop

    store = load


@pytest.mark.parametrize("stride", [2**30, 2**33], ids=["stride fits int32", "stride does not"])
@pytest.mark.parametrize("which", ["kv", "k_out", "v_out", "table", "norm_weight"])
def test_offsets_do_not_wrap_at_two_to_the_31(which, stride):
    # Tensors that large do not fit a test; strides that large do, and the launch is stopped before it follows them.
    case = draw(tokens=3, layers=3, heads=3, head_dim=16, positions=torch.tensor([0, 63, 2], dtype=torch.int32))
    k_out, v_out = torch.empty(case.shape), torch.empty(case.shape)
    tensors = {"kv": case.kv, "norm_weight": case.weight, "table": case.table, "k_out": k_out, "v_out": v_out}
    strides = {
        "kv": case.kv.stride()[:2],
        "norm_weight": case.weight.stride()[:1],
        "table": case.table.stride()[:1],
        "k_out": k_out.stride()[:3],
        "v_out": v_out.stride()[:3],
    }
    strides[which] = (stride,) * len(strides[which])
    watch = FarAccess(tensors[which].data_ptr())
    with observed(watch), pytest.raises(Exception, match="Stop"):
        launch(
            _norm_rope_kernel, (1,), case.kv, case.positions, case.weight, case.eps, case.table, k_out, v_out, None, None, None,
            3, 3, *(step for name in tensors for step in strides[name]), 1.0,
            **meta_of(3, 16, 16), BLOCK_ITEMS=16, STEPS=1, FLAT=True, IS_NEOX=True, SCALE_VALUES=False, PAGE_SIZE=-1,
            ALIGNED=False, FP8=0,
        )  # fmt: skip
    items = [(layer, token) for layer in range(3) for token in range(3)]
    rows = [(*item, head) for item in items for head in range(3)]
    due = {
        "kv": [(layer + token) * stride + head * 16 for layer, token, head in rows],
        "norm_weight": [layer * stride for layer, _ in items],
        "table": [[0, 63, 2][token] * stride for _, token in items],
        "k_out": [sum(row) * stride for row in rows],
        "v_out": [sum(row) * stride for row in rows],
    }[which]
    assert watch.offsets.reshape(len(due), -1)[:, 0].tolist() == due


# The launcher.
def arguments(**changes):
    case = draw()
    named = {
        "kv": case.kv,
        "positions": case.positions,
        "k_norm_weight": case.weight,
        "eps": case.eps,
        "cos_sin_cache": case.table,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rotary_dim": 64,
    }
    return {**named, **changes}


SHAPE = (2, 3, 2, 64)

REFUSED = [
    (
        {"kv": torch.zeros(3, 512)},
        "Invalid stacked fused KV projection shape: got (3, 512), expected 3D [total_ctx, n_layers, kv_size*2].",
    ),
    (
        {"kv": torch.zeros(3, 2, 255)},
        "Invalid fused KV projection shape: got (3, 2, 255), expected trailing dim 256.",
    ),
    ({"rotary_dim": 0}, "Invalid fused KV rotary/head dim pair: rotary_dim=0, head_dim=64."),
    ({"rotary_dim": 66}, "Invalid fused KV rotary/head dim pair: rotary_dim=66, head_dim=64."),
    ({"rotary_dim": 63}, "Invalid fused KV rotary/head dim pair: rotary_dim=63, head_dim=64."),
    (
        {"k_norm_weight": torch.ones(2, 128)},
        "Invalid stacked k_norm_weight shape for fused KV materialization: got (2, 128), expected (2, 64).",
    ),
    (
        {"eps": torch.ones(3)},
        "Invalid stacked eps shape for fused KV materialization: got (3,), expected (2,).",
    ),
    (
        {"k_out": torch.zeros(2, 3, 2, 32)},
        "Invalid k_out shape for fused KV materialization: got (2, 3, 2, 32), expected (2, 3, 2, 64).",
    ),
    (
        {"k_out": torch.zeros(SHAPE, dtype=torch.float16)},
        "Invalid k_out device/dtype for fused KV materialization: got device=cpu, dtype=torch.float16, "
        "expected device=cpu, dtype=torch.float32.",
    ),
    (
        {"v_out": torch.zeros(3, 2, 2, 64)},
        "Invalid v_out shape for fused KV materialization: got (3, 2, 2, 64), expected (2, 3, 2, 64).",
    ),
    (
        {"v_out": torch.zeros(SHAPE, dtype=torch.float64)},
        "Invalid v_out device/dtype for fused KV materialization: got device=cpu, dtype=torch.float64, "
        "expected device=cpu, dtype=torch.float32.",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_the_launcher_says_what_sglangs_says(changes, text):
    with pytest.raises(StackMismatchError) as caught:
        fused_norm_rope(**arguments(**changes))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"positions": torch.zeros(4, dtype=torch.long)}, "Invalid positions"),
        ({"positions": torch.zeros(3)}, "Invalid positions"),
        ({"cos_sin_cache": torch.zeros(64, 32)}, "Invalid cos_sin_cache shape"),
        ({"kv": torch.zeros(3, 2, 256, dtype=torch.float64)}, "Invalid kv dtype"),
        ({"eps": torch.zeros(2, dtype=torch.long)}, "Invalid eps dtype"),
        ({"k_out": torch.zeros(2, 3, 64, 2).transpose(2, 3)}, "Invalid k_out strides"),
        ({"cos_sin_cache": torch.zeros(64, 64, device="meta")}, "Invalid cos_sin_cache device"),
        ({"block_rows": 3}, "Invalid block_rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_launcher_refuses_what_sglangs_misreads(changes, text):
    with pytest.raises((InputError, StackMismatchError), match=text):
        fused_norm_rope(**arguments(**changes))


def test_the_checks_run_in_sglangs_order():
    everything = {"rotary_dim": 63, "k_norm_weight": torch.ones(1), "eps": torch.ones(1), "k_out": torch.ones(1)}
    with pytest.raises(StackMismatchError, match="rotary/head dim pair"):
        fused_norm_rope(**arguments(**everything))
    with pytest.raises(StackMismatchError, match="k_norm_weight"):
        fused_norm_rope(**arguments(**{**everything, "rotary_dim": 64}))


def test_no_tokens_give_two_empty_tensors():
    k, v = fused_norm_rope(**arguments(kv=torch.zeros(0, 2, 256), positions=torch.zeros(0, dtype=torch.long)))
    assert k.shape == v.shape == (2, 0, 2, 64)
    assert k is not v


@pytest.mark.parametrize(("count", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_two(count, power):
    assert next_power_of_two(count) == power
