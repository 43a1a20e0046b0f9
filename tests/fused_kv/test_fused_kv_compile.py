"""That the kernel which is interpreted here also compiles for GPUs, without one, and costs what the committed budget says.

Failure modes this file exists to catch: a construct that the interpreter takes and the compiler does not; a tile that spills registers;
accesses narrower than 128 bits where the layout allows wide ones; a row of the rope table loaded once per head instead of once per token; a
fused multiply-add that would round unlike the interpreter; a gate that lets a regression through, or says only that there is one.

The gate over all shapes and GPUs is `benchmarks/compile_gate.py`, whose parts are used here on a few.
"""

from __future__ import annotations

import json

import pytest
import triton
from targets import TARGETS

if not hasattr(triton.runtime.driver, "_active"):
    pytest.skip("this triton has no driver that can be stood in for", allow_module_level=True)

import compile_gate
from compile_gate import Shape, beyond_limits, measured, worse_than
from gpu_code import loads_from

BUDGETS = json.loads(compile_gate.BUDGET.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        *(("sm_90", Shape(heads=heads)) for heads in compile_gate.LIMIT_HEADS),
        ("sm_80", Shape(heads=8, into="blocks-fp8")),
        ("sm_100", Shape(heads=4, is_neox_style=False)),
        ("gfx942", Shape(heads=4)),
        ("gfx942", Shape(heads=3, head_dim=80, rotary_dim=32)),
    ],
    ids=str,
)
def test_a_kernel_keeps_its_limits_and_its_budget(target, shape):
    if target != "gfx942":
        try:
            compile_gate.compiled(shape, target)
        except RuntimeError as error:
            pytest.skip(f"this triton cannot compile for {target}: {error}")
    numbers = measured(shape, target)
    assert target == "gfx942" or sum(numbers["kv_loads"].values()) > 0
    assert list(beyond_limits(shape, target, numbers)) == []
    if triton.__version__ in BUDGETS:
        assert list(worse_than(BUDGETS[triton.__version__][target][str(shape)], numbers)) == []


def test_the_budget_has_every_shape_of_the_corpus_and_every_option():
    due = {str(shape) for shape in compile_gate.all_shapes()}
    assert len(compile_gate.corpus_shapes()) == 21
    assert "h8-d128-r128-neox-rows" in due
    for version, targets in BUDGETS.items():
        assert set(targets) == set(TARGETS), version
        for target, shapes in targets.items():
            assert set(shapes) == due, f"{version} {target}"


@pytest.mark.parametrize("version", BUDGETS)
def test_no_budget_is_beyond_a_limit(version):
    for shape in compile_gate.all_shapes():
        for target in TARGETS:
            assert list(beyond_limits(shape, target, BUDGETS[version][target][str(shape)])) == []


GOOD = {
    "registers": 72,
    "spills": 0,
    "load_bytes": 720.0,
    "store_bytes": 512.0,
    "loads": {"4": 3, "8": 1, "16": 10},
    "stores": {"16": 8},
    "fused_multiply_adds": 0,
    "instructions": 660,
    "kv_loads": {"16": 8},
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"registers": 73}, "registers 73, budget 72"),
        ({"spills": 8}, "spills 8, budget 0"),
        ({"load_bytes": 736.0}, "load_bytes 736, budget 720"),
        ({"store_bytes": 513.0}, "store_bytes 513, budget 512"),
        ({"loads": {"4": 3, "8": 3, "16": 9}}, "loads of 8 bytes 3, budget 1"),
        ({"stores": {"2": 1, "16": 8}}, "stores of 2 bytes 1, budget 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_regression_names_the_number_that_moved(change, text):
    assert list(worse_than(GOOD, {**GOOD, **change})) == [text]
    assert list(worse_than(GOOD, GOOD)) == []
    assert list(worse_than(GOOD, {**GOOD, "registers": 60, "load_bytes": 700.0})) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spills": 4}, "spills 4, due 0"),
        ({"registers": 97}, "registers 97, at most 96"),
        ({"load_bytes": 722.0}, "load_bytes 722, at most 1.1 x 656"),
        ({"store_bytes": 768.0}, "store_bytes 768, due 512"),
        ({"stores": {"8": 16}}, "stores {'8': 16}, due 128 bits each"),
        ({"loads": {"8": 20, "16": 2}}, "128-bit loads bring 128 bytes a row, due at least 512 for K and V"),
        ({"kv_loads": {"8": 4, "16": 6}}, "kv_loads {'8': 4, '16': 6}, due {'16': 8}: K and V once, 128 bits each"),
        ({"kv_loads": {"16": 9}}, "kv_loads {'16': 9}, due {'16': 8}"),
        ({"fused_multiply_adds": 3}, "fused_multiply_adds 3, due 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_beyond_a_limit_is_named_too(change, text):
    shape = Shape(heads=4)
    (found,) = beyond_limits(shape, "sm_90", {**GOOD, **change})
    assert found.startswith(f"sm_90 {shape}: {text}")


PTX = """
	ld.param.b64 	%rd1, [_kernel_param_0];
	ld.param.b64 	%rd2, [_kernel_param_1];
	mul.wide.s32 	%rd3, %r1, 2;
	add.s64 	%rd4, %rd1, %rd3;
	mad.wide.s32 	%rd5, %r1, 8, %rd2;
	// begin inline asm
	mov.u64 %rd6, 0x0;
	@%p1 ld.global.L1::evict_last.b64 { %rd6 }, [ %rd5 + 0 ]; // of the second
	// end inline asm
	add.s64 	%rd7, %rd4, %rd6;
	@%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd7 + 16 ];
	@!%p1 ld.global.b16 { %rs1 }, [ %rd4 + 0 ];
	cvt.u64.u16 %rd8, %rs1;
	ld.global.b32 %r6, [%rd8];
	@%p1 st.global.v4.b32 [ %rd4 + 0 ], { %r2, %r3, %r4, %r5 };
"""


def test_loads_are_counted_by_the_argument_that_their_address_begins_at():
    # An offset that was loaded from elsewhere, %rd6, and a number that was loaded through it, %rs1, are not its address.
    assert loads_from(PTX, 0) == {2: 1, 16: 1}
    assert loads_from(PTX, 1) == {8: 1}
    assert loads_from(PTX, 2) == {}


def test_the_floors_are_the_sums_of_what_a_row_needs():
    # K and V 512, a share of 512 bytes of the rope table, and of 512 bytes of weights among eight tokens.
    assert [Shape(heads=heads).floor for heads in (1, 2, 4, 8)] == [1088, 800, 656, 584]


def test_a_release_without_a_budget_is_told_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compile_gate, "BUDGET", tmp_path / "budget.json")
    assert compile_gate.main(["--target", "sm_90"]) == 2
    assert "--write" in capsys.readouterr().err


def test_the_gate_writes_a_budget_that_it_then_keeps(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compile_gate, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(compile_gate, "all_shapes", lambda: [Shape(heads=4)])
    assert compile_gate.main(["--write", "--target", "sm_90"]) == 0
    assert compile_gate.main(["--target", "sm_90"]) == 0
    budget = json.loads(compile_gate.BUDGET.read_text(encoding="utf-8"))
    budget[triton.__version__]["sm_90"]["h4-d128-r128-neox-rows"]["load_bytes"] = 700
    compile_gate.BUDGET.write_text(json.dumps(budget), encoding="utf-8")
    assert compile_gate.main(["--target", "sm_90"]) == 1
    assert "sm_90 h4-d128-r128-neox-rows: load_bytes 720, budget 700" in capsys.readouterr().err
