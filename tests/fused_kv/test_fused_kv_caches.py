"""K and V written straight into paged caches, and the options of the kernel that decide where and as what they are written.

Failure modes this file exists to catch: a slot taken for a block or the reverse; a block's stride taken for a slot's; a skipped token that
is written, or that moves the ones behind it; a neighbour's slot, a gap between blocks or another layer's cache touched; K where V belongs;
fp8 truncated, wrapped at the largest number or lost near zero; one layer's scale used for another; the interleaved style turned in halves;
a mapping that names a slot twice or one outside accepted.

Caches are poisoned before the launch and lie between bands, so what was touched shows bit for bit.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from fakes import fake_layers
from harness import Case, draw, eager, load_source, truth

from pytest_specdecode.errors import InputError, StackMismatchError
from pytest_specdecode.fused_kv import FusedKV, fused_norm_rope, fused_norm_rope_into
from pytest_specdecode.fused_kv import kernel as kernel_module
from pytest_specdecode.fused_kv.caches import _share
from pytest_specdecode.fused_kv.kernel import fp8_bits
from pytest_specdecode.fused_kv.path import _eager_norm_rope_into
from pytest_specdecode.fused_kv.tiles import Tile
from pytest_specdecode.launch import launch
from pytest_specdecode.memory import Banded, KernelMemoryError, banded, guarded, still_poison
from pytest_specdecode.numerics import assert_close, assert_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SLOTS = [7, -1, 0, 11, 4]


def flat(layers, heads, dim, dtype):
    """SGLang's pools: one tensor per layer, `[num_slots, H, D]`."""
    return [banded((12, heads, dim), dtype, name=f"cache {layer}") for layer in range(layers)]


def blocks(layers, heads, dim, dtype):
    """vLLM's blocks, `[num_blocks, block_size, H, D]`."""
    return [banded((3, 4, heads, dim), dtype, name=f"cache {layer}") for layer in range(layers)]


def gapped(layers, heads, dim, dtype):
    """Blocks that lie apart and slots that do, as where K and V of a block lie side by side: no single stride leads to slot s."""
    return [
        part(banded((3, 2, 4, heads, dim), dtype, name=f"cache {layer}"), lambda whole: whole[:, 1])
        for layer in range(layers)
    ]


def heads_first(layers, heads, dim, dtype):
    """`[num_blocks, H, block_size, D]` seen as blocks of slots."""
    return [
        part(banded((3, heads, 4, dim), dtype, name=f"cache {layer}"), lambda whole: whole.transpose(1, 2))
        for layer in range(layers)
    ]


def part(whole, view):
    """What a view of a banded tensor shows, everything else of it counted to the bands."""
    shown = view(whole.tensor)
    own, size = torch.zeros_like(whole._own), shown.element_size()
    start = shown.data_ptr() - whole._buffer.data_ptr()
    for byte in range(size):
        own.as_strided(shown.shape, [step * size for step in shown.stride()], start + byte).fill_(True)
    return Banded(tensor=shown, name=whole.name, _buffer=whole._buffer, _own=own)


LAYOUTS = [flat, blocks, gapped, heads_first]


def rows(cache, slots):
    """The cache's rows at these slots, however it is laid out."""
    cache = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    if cache.ndim == 3:
        return cache[slots]
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def write(case, layout, dtype, slots, **options):
    """One guarded launch into fresh caches; returns them once nothing but the mapped slots is found touched."""
    layers, _, heads, dim = case.shape
    k_caches, v_caches = (layout(layers, heads, dim, dtype) for _ in range(2))
    with guarded() as guard:
        fused_norm_rope_into(
            case.kv, case.positions, case.weight, case.eps, case.table, slots,
            [each.tensor for each in k_caches], [each.tensor for each in v_caches],
            num_kv_heads=heads, head_dim=dim, rotary_dim=case.rotary_dim, value_scale=case.value_scale, **options,
        )  # fmt: skip
    written = slots[slots >= 0].long()
    due = torch.zeros(12, dtype=torch.bool)
    due[written] = True
    for each in (*k_caches, *v_caches):
        each.assert_intact()
        touched = ~still_poison(each.tensor).reshape(12, heads, dim)
        assert torch.equal(touched.any(-1).any(-1), due), f"{each.name}: other slots than the mapped ones were written"
    (traffic,) = guard.launches
    stored = {name: each.stored_bytes for name, each in traffic.tensors.items() if "_caches[" in name}
    size = len(written) * heads * dim * each.tensor.element_size()
    assert stored == {f"{name}[{layer}]": size for name in ("k_caches", "v_caches") for layer in range(layers)}
    assert traffic.tensors["k_out"].stored_bytes == 0
    return k_caches, v_caches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "interleaved"])
def test_the_caches_hold_what_the_launcher_hands_out(layout, dtype, is_neox_style):
    case = draw(tokens=5, layers=3, heads=3, head_dim=20, rotary_dim=12, dtype=dtype)
    slots = torch.tensor(SLOTS)
    k_caches, v_caches = write(case, layout, dtype, slots, is_neox_style=is_neox_style)
    k, v = fused_norm_rope(
        case.kv, case.positions, case.weight, case.eps, case.table,
        num_kv_heads=3, head_dim=20, rotary_dim=12, is_neox_style=is_neox_style,
    )  # fmt: skip
    written = slots >= 0
    for layer in range(3):
        at = slots[written]
        assert_exact(
            rows(k_caches[layer].tensor, at), k[layer][written], what="K", bits=True, axes=("slot", "head", "dim")
        )
        assert_exact(
            rows(v_caches[layer].tensor, at), v[layer][written], what="V", bits=True, axes=("slot", "head", "dim")
        )


@pytest.mark.parametrize("slots", [[-1] * 5, [0, 1, 2, 3, 4], [11, 10, 9, 8, 7]], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_mappings(slots, slot_dtype):
    write(draw(tokens=5, head_dim=16), blocks, torch.float32, torch.tensor(slots, dtype=slot_dtype))


@pytest.mark.parametrize("block_rows", [1, 4])
def test_caches_across_programs(block_rows):
    write(draw(tokens=5, heads=2, head_dim=16), gapped, torch.float32, torch.tensor(SLOTS), block_rows=block_rows)


@pytest.mark.parametrize("kind", FP8, ids=str)
@pytest.mark.parametrize("as_bytes", [False, True], ids=["fp8", "uint8"])
@pytest.mark.parametrize("layout", [flat, gapped], ids=lambda layout: layout.__name__)
def test_fp8_caches(layout, kind, as_bytes):
    case = draw(tokens=5, layers=3, heads=2, head_dim=20, rotary_dim=12, dtype=torch.bfloat16, value_scale=0.612)
    k_scale, v_scale = torch.tensor([0.5, 0.013, 2.0]), torch.tensor([1.0, 0.25, 0.07])
    slots, written = torch.tensor(SLOTS), torch.tensor(SLOTS) >= 0
    k_caches, v_caches = write(
        case, layout, torch.uint8 if as_bytes else kind, slots, k_scale=k_scale, v_scale=v_scale,
        cache_dtype=kind if as_bytes else None,
    )  # fmt: skip
    # K exact but for the one rounding: float32 from the launcher, torch's own conversion after it.
    exact = Case(**{**vars(case), "kv": case.kv.float(), "weight": case.weight.float(), "value_scale": 1.0})
    k, _ = fused_norm_rope(
        exact.kv, exact.positions, exact.weight, exact.eps, exact.table, num_kv_heads=2, head_dim=20, rotary_dim=12
    )
    v = truth(exact)[1].float() * torch.tensor(0.612)
    for layer in range(3):
        for cache, values, scale in ((k_caches, k, k_scale), (v_caches, v, v_scale)):
            due = saturated(values[layer][written] * scale[layer].reciprocal(), kind)
            got = rows(cache[layer].tensor, slots[written])
            assert torch.equal(got, due.view(torch.uint8)), f"layer {layer}"


def saturated(values, kind):
    largest = torch.finfo(kind).max
    return values.clamp(-largest, largest).to(kind)


@triton.jit
def convert(source, target, count, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lane, fp8_bits(tl.load(source + lane, mask=lane < count, other=0.0), FORMAT), mask=lane < count)


@pytest.mark.parametrize(("kind", "code"), [*zip(FP8, (4, 5), strict=True)], ids=str)
def test_fp8_conversion_is_to_the_nearest_and_saturates(kind, code):
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    every = every[every.isfinite()].sort().values
    between = (every[1:] + every[:-1]) / 2
    near = [torch.nextafter(x, torch.full_like(x, way)) for x in (every, between) for way in (-1e9, 1e9)]
    odd = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-45, 3e38, -3e38, float("inf"), -float("inf"), 464.0, 465.0, 61440.0, 61441.0]
    )
    random = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 6, 4000)
    source = torch.cat([every, between, *near, odd, random])
    target = torch.zeros(len(source), dtype=torch.uint8)
    launch(convert, (-(-len(source) // 1024),), source, target, len(source), FORMAT=code, BLOCK=1024)
    assert_exact(target, saturated(source, kind).view(torch.uint8), what="fp8", axes=("value",))


@pytest.mark.parametrize(("kind", "code"), [*zip(FP8, (4, 5), strict=True)], ids=str)
def test_fp8_of_a_nan_is_a_nan(kind, code):
    source = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)
    target = torch.zeros(4, dtype=torch.uint8)
    launch(convert, (1,), source, target, 4, FORMAT=code, BLOCK=4)
    assert target.view(kind).float().isnan().all()


# Options of the launcher that hands out.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 6), (16, 2), (24, 20)])
def test_interleaved_pairs(head_dim, rotary_dim, dtype):
    case = draw(heads=3, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype)
    k, v = run_interleaved(case)
    # A pair (2i, 2i + 1) turns as (i, i + R/2) does once the lanes are sorted by it.
    order = torch.cat(
        [torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, head_dim)]
    )
    kv = case.kv.view(*case.kv.shape[:2], 2, 3, head_dim)[..., order].flatten(2)
    sorted_case = Case(**{**vars(case), "kv": kv, "weight": case.weight[:, order]})
    due, base = truth(sorted_case)[0], eager(sorted_case)
    assert_close(k[..., order], due, base, what="K", reduction_sizes=(head_dim,))
    assert_exact(v[..., order], truth(sorted_case)[1].to(dtype), what="V", bits=True)


def run_interleaved(case):
    with guarded(filled=("k_out", "v_out")):
        return fused_norm_rope(
            case.kv, case.positions, case.weight, case.eps, case.table,
            num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, rotary_dim=case.rotary_dim, is_neox_style=False,
        )  # fmt: skip


@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (2, 2), (1, 4), (8, 2)], ids=str)
def test_the_tile_of_a_gpu_gives_the_same_bits(tile, is_neox_style, monkeypatch):
    case = draw(tokens=5, layers=3, heads=3, head_dim=20, rotary_dim=12, dtype=torch.bfloat16)
    options = {"num_kv_heads": 3, "head_dim": 20, "rotary_dim": 12, "is_neox_style": is_neox_style}
    inputs = case.kv, case.positions, case.weight, case.eps, case.table
    due_k, due_v = fused_norm_rope(*inputs, **options)
    items, steps = tile
    monkeypatch.setattr(kernel_module, "tile_of", lambda *_: Tile(items=items, steps=steps, flat=False, warps=4))
    with guarded(filled=("k_out", "v_out")) as guard:
        k, v = fused_norm_rope(*inputs, **options)
    assert_exact(k, due_k, what="K", bits=True)
    assert_exact(v, due_v, what="V", bits=True)
    table = guard.launches[0].tensors["table"]
    assert table.loaded_bytes == 3 * 5 * 12 * 4, "a row of the table is loaded once per token and layer"
    slots = torch.tensor(SLOTS)
    k_caches, v_caches = write(case, gapped, torch.bfloat16, slots, is_neox_style=is_neox_style)
    for layer in range(3):
        assert torch.equal(rows(k_caches[layer].tensor, slots[slots >= 0]), due_k[layer][slots >= 0])
        assert torch.equal(rows(v_caches[layer].tensor, slots[slots >= 0]), due_v[layer][slots >= 0])


# The path.
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [{}, {"is_neox_style": False, "rotary_dim": 6}, {"value_scale": 0.5, "bias": True}], ids=repr
)
def test_materialize_into_writes_what_materialize_hands_over(shape, dtype, backend):
    layers = fake_layers(3, dtype=dtype, **shape)
    path = FusedKV(layers, layers[0].self_attn.rotary_emb, 2, 16, "cpu", backend=backend)
    ctx = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    positions, slots = torch.tensor([4, 63, 0, 9, 9]), torch.tensor(SLOTS)
    k, v = path.compute(ctx, positions)
    k_caches, v_caches = ([torch.full((3, 4, 2, 16), 7.0, dtype=dtype) for _ in range(3)] for _ in range(2))
    path.materialize_into(ctx, positions, slots, k_caches, v_caches)
    written = slots >= 0
    for caches, due in ((k_caches, k), (v_caches, v)):
        for layer, cache in enumerate(caches):
            expected = torch.full((12, 2, 16), 7.0, dtype=dtype)
            expected[slots[written]] = due[layer][written]
            assert torch.equal(cache.view(12, 2, 16), expected)


@pytest.mark.parametrize("kind", FP8, ids=str)
def test_the_eager_path_stores_the_same_fp8(kind):
    layers = fake_layers(2, dtype=torch.bfloat16)
    ctx, slots = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)).bfloat16(), torch.tensor(SLOTS)
    found = []
    for backend in ("triton", "eager"):
        path = FusedKV(layers, layers[0].self_attn.rotary_emb, 2, 16, "cpu", backend=backend)
        caches = [[torch.zeros(12, 2, 16, dtype=kind) for _ in range(2)] for _ in range(2)]
        path.materialize_into(ctx, torch.arange(5), slots, *caches, k_scale=[0.1, 0.3], v_scale=0.2)
        found.append(torch.stack([torch.stack(each) for each in caches]).float())
    # V is exact up to its rounding; K's float32 differs in the order of a sum, so a tie may fall either way.
    assert torch.equal(found[0][1], found[1][1])
    assert (found[0][0] != found[1][0]).sum() <= 2


def test_no_tokens_touch_nothing():
    layers = fake_layers(2)
    FusedKV(layers, layers[0].self_attn.rotary_emb, 2, 16, "cpu").materialize_into(
        torch.zeros(0, 24), torch.zeros(0), torch.zeros(0), [], []
    )


def test_the_example_of_the_page_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "fused-kv.md"
    block, *_ = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert "materialize_into" in block
    exec(compile(block, str(page), "exec"), {})
    assert capsys.readouterr().out.startswith("0 torch.Size([3, 2, 16])")


# What is refused.
def arguments(**changes):
    case = draw()
    k_caches, v_caches = pair(12, 2, 64), pair(12, 2, 64)
    named = {
        "kv": case.kv, "positions": case.positions, "k_norm_weight": case.weight, "eps": case.eps,
        "cos_sin_cache": case.table, "slot_mapping": torch.arange(3), "k_caches": k_caches, "v_caches": v_caches,
        "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64,
    }  # fmt: skip
    return {**named, **changes}


def pair(*shape, **how):
    return [torch.zeros(*shape, **how) for _ in range(2)]


REFUSED = [
    ({"slot_mapping": torch.tensor([0, 1])}, InputError, "slot_mapping .* expected integers \\(3,\\)"),
    ({"slot_mapping": torch.zeros(3)}, InputError, "slot_mapping"),
    ({"slot_mapping": torch.tensor([0, 12, 1])}, InputError, "got 12, expected -1 \\(skip\\) to 11"),
    ({"slot_mapping": torch.tensor([0, -2, 1])}, InputError, "got -2"),
    ({"slot_mapping": torch.tensor([4, -1, 4])}, InputError, "slot 4 twice"),
    ({"k_caches": pair(12, 2, 64)[:1]}, StackMismatchError, "one cache per layer, got 1"),
    ({"k_caches": pair(12, 2, 32)}, StackMismatchError, "got \\(12, 2, 32\\)"),
    ({"k_caches": pair(2, 64)}, StackMismatchError, "num_slots"),
    ({"k_caches": [torch.zeros(12, 2, 64), torch.zeros(13, 2, 64)]}, StackMismatchError, "one shape.*at layer 1"),
    ({"k_caches": pair(12, 2, 64, dtype=torch.float16)}, StackMismatchError, "a dtype of"),
    ({"k_caches": pair(12, 2, 64, dtype=torch.uint8)}, StackMismatchError, "say which fp8"),
    ({"cache_dtype": torch.float8_e5m2}, StackMismatchError, "cache_dtype"),
    ({"k_caches": [torch.zeros(12, 2, 64), torch.zeros(2, 12, 64).transpose(0, 1)]}, StackMismatchError, "one strides"),
    ({"k_caches": [each.transpose(1, 2) for each in pair(12, 64, 2)]}, StackMismatchError, "last stride"),
    ({"v_caches": pair(14, 2, 64)}, StackMismatchError, "slots of the K caches, 12, got 14"),
    ({"v_caches": pair(12, 2, 64, dtype=torch.float8_e5m2)}, StackMismatchError, "dtype of the K caches"),
    ({"k_scale": 0.5}, InputError, "k_scale is for fp8"),
    ({"slot_mapping": [0, 1, 2]}, InputError, "slot_mapping .* got list"),
    ({"k_caches": None}, StackMismatchError, "one cache per layer, got NoneType"),
    ({"k_caches": [None, None]}, StackMismatchError, "a tensor, got NoneType at layer 0"),
    (
        {
            "k_caches": pair(12, 2, 64, dtype=torch.uint8),
            "v_caches": pair(12, 2, 64, dtype=torch.uint8),
            "cache_dtype": torch.float32,
        },
        StackMismatchError,
        "a cache_dtype of .*float8_e4m3fn",
    ),
    (
        {
            "k_caches": [each[:, 0] for each in pair(2, 2, 6, 2, 64)],
            "v_caches": [each[:, 0] for each in pair(3, 2, 4, 2, 64)],
        },
        StackMismatchError,
        "block size of the K caches, 6, got 4",
    ),
]

POOL = torch.zeros(2 * 2 * 3 * 4 * 2 * 64)


def pooled(start):
    """Three blocks of four slots, 1,024 elements from block to block, somewhere in one pool."""
    return POOL.as_strided((3, 4, 2, 64), (1024, 128, 64, 1), start)


#: Caches that share memory, and which is named.
SHARED = {
    "one cache for two layers": ({"k_caches": [POOL[:1536].view(12, 2, 64)] * 2}, r"k_caches\[1\]"),
    "one slot for all": ({"k_caches": [torch.zeros(1, 2, 64).expand(12, 2, 64) for _ in range(2)]}, r"k_caches\[0\]"),
    "slots that overlap": (
        {"k_caches": [torch.zeros(1600).as_strided((12, 2, 64), (128, 32, 1)) for _ in range(2)]},
        r"k_caches\[0\].* apart",
    ),
    "V of another layout begins too early": (
        {
            "k_caches": [pooled(0), pooled(3072)],
            "v_caches": [POOL.as_strided((3, 4, 2, 64), (1024, 64, 256, 1), at) for at in (512, 3072 + 448)],
        },
        r"v_caches\[1\].* some of k_caches\[1\]",
    ),
    "V begins one slot too early": (
        {"k_caches": [pooled(0), pooled(3072)], "v_caches": [pooled(512), pooled(3072 + 384)]},
        r"v_caches\[1\].* some of k_caches\[1\]",
    ),
}


@pytest.mark.parametrize("into", ["kernel", "eager"])
@pytest.mark.parametrize("which", SHARED)
def test_caches_that_share_memory_are_refused(which, into):
    changes, text = SHARED[which]
    named = arguments(**changes)
    run, options = fused_norm_rope_into, {}
    if into == "eager":
        options = {"is_neox_style": True, "value_scale": 1.0, "k_scale": None, "v_scale": None, "cache_dtype": None}
        run = _eager_norm_rope_into
    with pytest.raises(StackMismatchError, match=text):
        run(**named, **options)


def test_caches_interleaved_in_one_pool_are_apart():
    """K and V of a page side by side, all layers' pages in one block: reaches meet, elements do not."""
    pool = torch.zeros(3, 2, 2, 4, 2, 64)
    k_caches, v_caches = ([pool[:, layer, part] for layer in range(2)] for part in range(2))
    fused_norm_rope_into(**arguments(k_caches=k_caches, v_caches=v_caches, slot_mapping=torch.tensor([0, 5, 11])))
    assert (pool != 0).any(-1).any(-1).sum() == 2 * 2 * 3


@pytest.mark.parametrize("seed", range(40))
def test_whether_two_tensors_share_an_element(seed):
    random = Random(seed)

    def view():
        """Some strided view, its dimensions in any order, each stride beyond the reach of those within; and its elements."""
        extents, span = [], 1
        for _ in range(3):
            size, step = random.randint(2, 4), span + random.choice((0, 0, 1, 5))
            extents.append((step, size))
            span += (size - 1) * step
        counts = product(*(range(size) for _, size in extents))
        return tuple(extents), {sum(n * step for n, (step, _) in zip(at, extents, strict=True)) for at in counts}

    for _ in range(20):
        (here, mine), (there, theirs) = view(), view()
        for distance in range(0, max(mine) + 2, 3):
            assert _share(distance, here, there) == bool(mine & {distance + each for each in theirs})


@pytest.mark.parametrize("swapped", [False, True])
def test_k_at_one_stride_and_v_in_blocks_that_lie_apart(swapped):
    case_of = {"slot_mapping": torch.tensor([7, -1, 4])}
    plain, apart = pair(12, 2, 64), [each[:, 1] for each in pair(3, 2, 4, 2, 64)]
    k_caches, v_caches = (apart, plain) if swapped else (plain, apart)
    fused_norm_rope_into(**arguments(k_caches=k_caches, v_caches=v_caches, **case_of))
    due_k, due_v = pair(12, 2, 64), pair(12, 2, 64)
    fused_norm_rope_into(**arguments(k_caches=due_k, v_caches=due_v, **case_of))
    for caches, due in ((k_caches, due_k), (v_caches, due_v)):
        for cache, expected in zip(caches, due, strict=True):
            assert torch.equal(cache.reshape(12, 2, 64), expected)


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_what_does_not_fit_is_refused(changes, error, text):
    with pytest.raises(error, match=text):
        fused_norm_rope_into(**arguments(**changes))


@pytest.mark.parametrize("scale", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, 1e-40], -1.0], ids=str)
def test_scales_that_scale_nothing_are_refused(scale):
    k_caches, v_caches = (pair(12, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2))
    with pytest.raises(InputError, match="v_scale"):
        fused_norm_rope_into(**arguments(k_caches=k_caches, v_caches=v_caches, v_scale=scale))


@pytest.mark.parametrize("block_rows", [2, None], ids=["one item", "all items"])
def test_the_guard_knows_the_caches(block_rows, monkeypatch):
    """A slot that no check stopped is seen where it is written, in the cache that it leaves, though it is exactly another cache's."""
    monkeypatch.setattr(kernel_module, "checked_slots", lambda slots, *_: slots)
    k_caches = list(torch.zeros(2, 12, 2, 64))
    with guarded(), pytest.raises(KernelMemoryError, match=r"k_caches\[0\]\[12, 0, 0\]") as caught:
        fused_norm_rope_into(
            **arguments(slot_mapping=torch.tensor([12, -1, 11]), k_caches=k_caches, block_rows=block_rows)
        )
    assert (caught.value.kind, caught.value.tensor) == ("store", "k_caches[0]")


# The same comparison catches a slip in the code of the caches.
SLIPS = {
    "block's stride for a slot's": ("slot % PAGE_SIZE * k_inner_stride", "slot % PAGE_SIZE * k_outer_stride"),
    "slot for a block": ("slot // PAGE_SIZE * v_outer_stride", "slot * v_outer_stride"),
    "skipped token written": ("active = active & (slot >= 0)", "slot = tl.maximum(slot, 1)"),
    "V into the K cache": ("v_base = tl.load(v_out + layer", "v_base = tl.load(k_out + layer"),
    "another layer's cache": ("k_base = tl.load(k_out + layer,", "k_base = tl.load(k_out + (num_layers - 1 - layer),"),
    "layer 0's scale": ("k_by = tl.load(k_factor + layer,", "k_by = tl.load(k_factor + layer * 0,"),
    "K's scale on V": ("v_by = tl.load(v_factor + layer,", "v_by = tl.load(k_factor + layer,"),
    "fp8 truncated": ("((1 << (DROPPED - 1)) - 1) + odd", "0"),
    "fp8 that wraps": ("LARGEST: tl.constexpr = 448.0", "LARGEST: tl.constexpr = 512.0"),
    "pairs taken for halves": ("partner = HALF if IS_NEOX else 1", "partner = HALF"),
    "pairs joined the other way": ("tl.join(turned, turned_partner)", "tl.join(turned_partner, turned)"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_caught(slip, tmp_path, monkeypatch):
    right, wrong = SLIPS[slip]
    source = Path(kernel_module.__file__).read_text()
    assert right in source
    path = tmp_path / "mutated_kernel.py"
    path.write_text(source.replace(right, wrong))
    mutant = load_source(path)
    monkeypatch.setitem(globals(), "fused_norm_rope_into", mutant.fused_norm_rope_into)
    with pytest.raises((AssertionError, KernelMemoryError)):
        everything(mutant)


def everything(module):
    test_the_caches_hold_what_the_launcher_hands_out(gapped, torch.float32, False)
    test_fp8_caches(gapped, torch.float8_e4m3fn, False)
    assert_saturates(module)


def assert_saturates(module):
    """K of magnitude 8 * 64 = 512 is stored as the largest e4m3, 448."""
    kv, caches = torch.zeros(1, 1, 32), [torch.zeros(4, 1, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    kv[0, 0, 15], table = 1.0, torch.tensor([[1.0, 0.0]])
    module.fused_norm_rope_into(
        kv, torch.tensor([0]), torch.full((1, 16), 128.0), torch.zeros(1), table, torch.tensor([0]),
        [caches[0]], [caches[1]], num_kv_heads=1, head_dim=16, rotary_dim=2,
    )  # fmt: skip
    assert caches[0].float()[0, 0].tolist() == [0.0] * 15 + [448.0]


def test_k_that_is_too_large_is_stored_as_the_largest():
    assert_saturates(kernel_module)
