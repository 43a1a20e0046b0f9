"""The latent norm-and-rotation kernel against a float64 truth, one launch at a time.

Failure modes this file exists to catch: k_pe normed with the latent, or left out where the norm goes over the whole row, or normed after
it has turned; its pairs read in the other style; a latent that is no power of two
read past its end, into k_pe or the next layer; one layer's weight, epsilon or rows used for another; a position off by one; an epsilon
that only small latents can show; a block boundary crossed wrongly; an element not written or written outside; offsets that wrap at 2^31;
the launcher accepting what the kernel misreads.

Small random cases of every width in every dtype catch the formula, exact cases with tolerance zero the layout, a few rows per program the
block boundaries. Every launch runs between guard bands on poisoned outputs with every access watched.
"""

from __future__ import annotations

import pytest
import torch
from latent_harness import AXES, Case, check, draw, run_watched, truth

from pytest_specdecode.errors import InputError, StackMismatchError
from pytest_specdecode.fused_kv import fused_latent_norm_rope
from pytest_specdecode.fused_kv.latent_kernel import _latent_norm_rope_kernel
from pytest_specdecode.launch import launch, observed
from pytest_specdecode.memory import guarded
from pytest_specdecode.numerics import NumericsError, assert_close, assert_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Latent, k_pe: DeepSeek's, powers of two and not, a k_pe wider than the latent, an odd number of pairs, the least of both.
WIDTHS = [(512, 64), (48, 16), (100, 6), (80, 10), (3, 64), (1, 2), (257, 2)]
NORMS = ["latent", "whole"]
SMALL_ROWS = [(*widths, latent_norm) for widths in WIDTHS[1:] for latent_norm in NORMS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox_style", [False, True], ids=["interleaved", "neox"])
@pytest.mark.parametrize(("rank", "rope_dim", "latent_norm"), [(*WIDTHS[0], "latent"), (448, 64, "whole"), *SMALL_ROWS])
def test_matches_the_truth(rank, rope_dim, latent_norm, is_neox_style, dtype):
    check(draw(rank=rank, rope_dim=rope_dim, latent_norm=latent_norm, is_neox_style=is_neox_style, dtype=dtype))


@pytest.mark.parametrize("latent_norm", NORMS)
@pytest.mark.parametrize("block_rows", [1, 2, 4, 64])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_rows_that_do_not_fill_the_last_program(tokens, block_rows, latent_norm):
    check(draw(tokens=tokens, layers=3, rank=24, rope_dim=10, latent_norm=latent_norm), block_rows=block_rows)


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


@pytest.mark.parametrize("latent_norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_latents_where_only_the_epsilon_counts(dtype, latent_norm):
    check(draw(scale=1e-3, eps=torch.tensor([1e-6, 1e-5]), dtype=dtype, latent_norm=latent_norm))


def test_a_wrong_epsilon_would_show_at_that_size():
    case = draw(scale=1e-3, eps=torch.tensor([1e-6, 1e-5]))
    rows = run_watched(case.changed(eps=torch.tensor([1e-6, 1e-6])))
    with pytest.raises(NumericsError, match="layer=1"):
        assert_close(rows, truth(case), axes=AXES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tables_and_weights_in_half_precision(dtype):
    check(draw(dtype=dtype, table_dtype=dtype))


@pytest.mark.parametrize("latent_norm", NORMS)
def test_rows_with_gaps_between_them(latent_norm):
    check(draw(rank=24, rope_dim=12, latent_norm=latent_norm), gap=5)


def test_strided_inputs_and_outputs_are_read_by_their_strides():
    case = draw(layers=3, tokens=4)
    out = torch.empty(4, 3, 64).transpose(0, 1)
    rows = fused_latent_norm_rope(
        case.kv_a.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([case.positions, case.positions * 0], dim=-1)[:, 0],
        case.weight.T.contiguous().T,
        case.eps.repeat_interleave(2)[::2],
        case.table.T.contiguous().T,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        out=out,
    )
    assert rows is out
    assert_close(rows, truth(case), axes=AXES)


def test_an_input_whose_last_stride_is_not_one():
    case = draw()
    spread = case.kv_a.repeat_interleave(2, dim=-1)[..., ::2]
    rows = fused_latent_norm_rope(
        spread, case.positions, case.weight, case.eps, case.table, kv_lora_rank=48, qk_rope_head_dim=16
    )
    assert_exact(rows, run_watched(case), bits=True, axes=AXES)


@pytest.mark.parametrize("is_neox_style", [False, True], ids=["interleaved", "neox"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_one_constant_per_layer_token_and_lane(dtype, is_neox_style):
    # A latent with one 1 among 64 lanes has the root mean square 1/8, so it becomes 8 * w exactly; k_pe holds small integers that tell
    # layer, token and lane apart, and position p turns by p quarter turns.
    layers, tokens, rank, rope_dim = 3, 4, 64, 6
    kv_a, due = torch.zeros(tokens, layers, rank + rope_dim), torch.zeros(layers, tokens, rank + rope_dim)
    for layer in range(layers):
        for token in range(tokens):
            lane = (layer * 17 + token * 5) % rank
            kv_a[token, layer, lane] = -1.0 if token % 2 else 1.0
            due[layer, token, lane] = (-8.0 if token % 2 else 8.0) * 2**layer
            k_pe = [layer * 64 + token * 8 + lane + 1 for lane in range(rope_dim)]
            kv_a[token, layer, rank:] = torch.tensor(k_pe)
            pairs = [(0, 3), (1, 4), (2, 5)] if is_neox_style else [(0, 1), (2, 3), (4, 5)]
            for first, second in pairs:
                turned = complex(k_pe[first], k_pe[second]) * 1j**token
                due[layer, token, rank + first], due[layer, token, rank + second] = turned.real, turned.imag
    quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    case = Case(
        kv_a=kv_a.to(dtype),
        positions=torch.arange(4),
        weight=torch.tensor([1.0, 2.0, 4.0])[:, None].expand(layers, rank).to(dtype),
        eps=torch.zeros(layers),
        table=quarter.repeat_interleave(rope_dim // 2, dim=1),
        rank=rank,
        rope_dim=rope_dim,
        is_neox_style=is_neox_style,
    )
    assert_exact(run_watched(case, block_rows=4), due.to(dtype), axes=AXES)


@pytest.mark.parametrize("is_neox_style", [False, True], ids=["interleaved", "neox"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_a_row_that_is_normed_whole_and_then_turned(dtype, is_neox_style):
    # Four 2s of either sign among 16 lanes make the mean square 1, so a lane becomes itself times w, whatever of it lies in k_pe; there w
    # is another power of two in each lane, so that a norm after the turn would show.
    layers, tokens, rank, rope_dim = 2, 4, 10, 6
    kv_a, due = torch.zeros(tokens, layers, 16), torch.zeros(layers, tokens, 16)
    weight = torch.stack([2.0 ** ((torch.arange(16) + 5 * layer) % 7) for layer in range(layers)])
    pairs = [(10, 13), (11, 14), (12, 15)] if is_neox_style else [(10, 11), (12, 13), (14, 15)]
    for layer in range(layers):
        for token in range(tokens):
            for lane in ((3 * token + layer) % rank, *pairs[(token + layer) % 3], pairs[(token + layer + 1) % 3][0]):
                kv_a[token, layer, lane] = -2.0 if (lane + token) % 3 == 0 else 2.0
            due[layer, token] = kv_a[token, layer] * weight[layer]
            for first, second in pairs:
                turned = complex(due[layer, token, first], due[layer, token, second]) * 1j**token
                due[layer, token, first], due[layer, token, second] = turned.real, turned.imag
    quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    case = Case(
        kv_a=kv_a.to(dtype),
        positions=torch.arange(4),
        weight=weight.to(dtype),
        eps=torch.zeros(layers),
        table=quarter.repeat_interleave(rope_dim // 2, dim=1),
        rank=rank,
        rope_dim=rope_dim,
        is_neox_style=is_neox_style,
        latent_norm="whole",
    )
    assert_exact(run_watched(case, block_rows=4), due.to(dtype), axes=AXES)


def test_a_norm_over_the_whole_row_sees_every_lane():
    case = draw(latent_norm="whole")
    rows = run_watched(case)
    for lane in (0, 47, 48, 49, 63):
        other = case.kv_a.clone()
        other[..., lane] += 10
        changed = run_watched(case.changed(kv_a=other))
        assert (changed != rows).all(dim=-1).all()


def test_at_position_zero_k_pe_is_copied_bit_for_bit():
    case = draw(dtype=torch.bfloat16, positions=torch.zeros(3, dtype=torch.long))
    assert_exact(
        run_watched(case)[..., 48:].contiguous(), case.kv_a.transpose(0, 1)[..., 48:].contiguous(), bits=True, axes=AXES
    )


def test_the_norm_and_the_rotation_do_not_see_each_other():
    case = draw()
    rows = run_watched(case)
    other_pe, other_latent = case.kv_a.clone(), case.kv_a.clone()
    other_pe[..., 48:] *= 100
    other_latent[..., :48] *= 100
    assert torch.equal(run_watched(case.changed(kv_a=other_pe))[..., :48], rows[..., :48])
    assert torch.equal(run_watched(case.changed(kv_a=other_latent))[..., 48:], rows[..., 48:])


@pytest.mark.parametrize("latent_norm", NORMS)
def test_zero_rows_stay_zero(latent_norm):
    rows = run_watched(draw(scale=0.0, latent_norm=latent_norm))
    assert torch.equal(rows, torch.zeros_like(rows))


def test_a_nan_spoils_its_own_part_of_its_own_row_only():
    case = draw(tokens=2, layers=2)
    case.kv_a[1, 0, 3] = float("nan")
    rows = run_watched(case)
    assert rows[0, 1, :48].isnan().all()
    assert int(rows.isnan().sum()) == 48


def test_a_nan_spoils_the_whole_of_a_row_that_is_normed_whole():
    case = draw(tokens=2, layers=2, latent_norm="whole")
    case.kv_a[1, 0, 50] = float("nan")
    rows = run_watched(case)
    assert rows[0, 1].isnan().all()
    assert int(rows.isnan().sum()) == 64


@pytest.mark.parametrize("latent_norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_block_sizes_agree_bit_for_bit(dtype, latent_norm):
    case = draw(tokens=5, rank=80, rope_dim=10, dtype=dtype, latent_norm=latent_norm)
    assert_exact(run_watched(case, block_rows=4), run_watched(case), bits=True, axes=AXES)


@pytest.mark.parametrize("latent_norm", NORMS)
def test_each_element_is_read_once_and_written_once_in_one_launch(latent_norm):
    case = draw(tokens=7, rank=80, rope_dim=10, latent_norm=latent_norm)
    with guarded() as guard:
        fused_latent_norm_rope(
            case.kv_a,
            case.positions,
            case.weight,
            case.eps,
            case.table,
            kv_lora_rank=80,
            qk_rope_head_dim=10,
            latent_norm=latent_norm,
        )
    (traffic,) = guard.launches
    assert traffic.tensors["kv_a"].loaded_bytes == traffic.tensors["kv_a"].unique_loaded_bytes == case.kv_a.numel() * 4
    assert traffic.tensors["out"].stored_bytes == traffic.tensors["out"].unique_stored_bytes == case.kv_a.numel() * 4
    assert traffic.tensors["out"].loaded_bytes == 0


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
@pytest.mark.parametrize("which", ["kv_a", "out", "table", "norm_weight"])
@pytest.mark.parametrize("latent_norm", NORMS)
def test_offsets_do_not_wrap_at_two_to_the_31(which, stride, latent_norm):
    # Tensors that large do not fit a test; strides that large do, and the launch is stopped before it follows them.
    positions = torch.tensor([0, 63, 2], dtype=torch.int32)
    case = draw(tokens=3, layers=3, rank=8, rope_dim=4, positions=positions, latent_norm=latent_norm)
    out = torch.empty(case.shape)
    tensors = {"kv_a": case.kv_a, "norm_weight": case.weight, "table": case.table, "out": out}
    strides = {name: tensor.stride()[:-1] for name, tensor in tensors.items()}
    strides[which] = (stride,) * len(strides[which])
    watch = FarAccess(tensors[which].data_ptr())
    with observed(watch), pytest.raises(Exception, match="Stop"):
        launch(
            _latent_norm_rope_kernel, (1,), case.kv_a, case.positions, case.weight, case.eps, case.table, out, 9, 3,
            *(step for name in tensors for step in strides[name]),
            RANK=8, HALF=2, BLOCK_ROWS=16, BLOCK_RANK=8, BLOCK_HALF=2, IS_NEOX=False, WHOLE=latent_norm == "whole",
        )  # fmt: skip
    rows = [(layer, token) for layer in range(3) for token in range(3)]
    due = {
        "kv_a": [(layer + token) * stride for layer, token in rows],
        # Of a row that is normed whole the weights of k_pe are the first to be read.
        "norm_weight": [layer * stride + (8 if latent_norm == "whole" else 0) for layer, _ in rows],
        "table": [[0, 63, 2][token] * stride for _, token in rows],
        "out": [sum(row) * stride for row in rows],
    }[which]
    assert watch.offsets.reshape(9, -1)[:, 0].tolist() == due


# The launcher.
def arguments(**changes):
    case = draw()
    named = {
        "kv_a": case.kv_a,
        "positions": case.positions,
        "norm_weight": case.weight,
        "eps": case.eps,
        "cos_sin_cache": case.table,
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 16,
    }
    return {**named, **changes}


REFUSED = [
    (
        {"kv_a": torch.zeros(3, 128)},
        "Invalid stacked fused latent projection shape: got (3, 128), expected 3D [total_ctx, n_layers, 64].",
    ),
    (
        {"kv_a": torch.zeros(3, 2, 65)},
        "Invalid stacked fused latent projection shape: got (3, 2, 65), expected 3D [total_ctx, n_layers, 64].",
    ),
    ({"qk_rope_head_dim": 15}, "Invalid fused latent widths: kv_lora_rank=48, qk_rope_head_dim=15."),
    ({"qk_rope_head_dim": 0}, "Invalid fused latent widths: kv_lora_rank=48, qk_rope_head_dim=0."),
    ({"kv_lora_rank": 0}, "Invalid fused latent widths: kv_lora_rank=0, qk_rope_head_dim=16."),
    (
        {"norm_weight": torch.ones(2, 64)},
        "Invalid stacked norm_weight shape for fused latent materialization: got (2, 64), expected (2, 48).",
    ),
    (
        {"latent_norm": "whole"},
        "Invalid stacked norm_weight shape for fused latent materialization: got (2, 48), expected (2, 64).",
    ),
    ({"latent_norm": "none"}, "latent_norm must be latent or whole; got 'none'"),
    ({"eps": torch.ones(3)}, "Invalid stacked eps shape for fused latent materialization: got (3,), expected (2,)."),
    (
        {"out": torch.zeros(3, 2, 64)},
        "Invalid out shape for fused latent materialization: got (3, 2, 64), expected (2, 3, 64).",
    ),
    (
        {"out": torch.zeros(2, 3, 64, dtype=torch.float16)},
        "Invalid out device/dtype for fused latent materialization: got device=cpu, dtype=torch.float16, "
        "expected device=cpu, dtype=torch.float32.",
    ),
    (
        {"out": torch.zeros(2, 64, 3).transpose(1, 2)},
        "Invalid out strides for fused latent materialization: got (192, 1, 3), expected a last stride of 1.",
    ),
    (
        {"positions": torch.zeros(4, dtype=torch.long)},
        "Invalid positions for fused latent materialization: got torch.int64 (4,), expected integers (3,).",
    ),
    (
        {"positions": torch.zeros(3)},
        "Invalid positions for fused latent materialization: got torch.float32 (3,), expected integers (3,).",
    ),
    (
        {"cos_sin_cache": torch.zeros(64, 8)},
        "Invalid cos_sin_cache shape for fused latent materialization: got (64, 8), expected (rows, 16).",
    ),
    ({"block_rows": 3}, "Invalid block_rows: got 3, expected a power of two."),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_the_launcher_refuses_what_the_kernel_would_misread(changes, text):
    with pytest.raises((InputError, StackMismatchError)) as caught:
        fused_latent_norm_rope(**arguments(**changes))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_a": torch.zeros(3, 2, 64, dtype=torch.float64)}, "Invalid kv_a dtype for fused latent"),
        ({"eps": torch.zeros(2, dtype=torch.long)}, "Invalid eps dtype"),
        ({"cos_sin_cache": torch.zeros(64, 16, device="meta")}, "Invalid cos_sin_cache device"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_dtypes_and_devices(changes, text):
    with pytest.raises(InputError, match=text):
        fused_latent_norm_rope(**arguments(**changes))


def test_no_tokens_give_an_empty_tensor():
    rows = fused_latent_norm_rope(**arguments(kv_a=torch.zeros(0, 2, 64), positions=torch.zeros(0, dtype=torch.long)))
    assert rows.shape == (2, 0, 64)


@pytest.mark.parametrize("latent_norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_are_rounded_once(dtype, latent_norm):
    # Rounded where the truth is, but for the few elements that float32 and float64 round to either side.
    case = draw(tokens=9, dtype=dtype, latent_norm=latent_norm)
    rows = run_watched(case)
    assert (rows != truth(case).to(dtype)).double().mean() < 0.02
