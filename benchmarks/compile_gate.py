"""The fused K/V kernel compiled for four GPUs, held against a committed budget: no GPU is needed.

Every shape of a draft in `tests/corpus` is compiled for sm_80, sm_90, sm_100 and gfx942, and the shapes of the limits below in every way in
which K and V can be stored. A number that is worse than `kernel_budget.json` says, or beyond a limit, ends it with a line that names the
number. Run it from the repository's root:

    python benchmarks/compile_gate.py               # compare with the budget of this triton version
    python benchmarks/compile_gate.py --write       # write the budget anew
    python benchmarks/compile_gate.py --table       # print registers and bytes, beside the floor and two other kernels
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_code import TARGETS, Code, NoDevice, code_of

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import load
from pytest_specdecode.fused_kv.kernel import _norm_rope_kernel
from pytest_specdecode.fused_kv.tiles import Tile, meta_of, tile_of
from pytest_specdecode.spec import GQASpec

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_name("kernel_budget.json")

#: What a kernel may cost at 128 lanes in 16 bits, for these numbers of KV heads.
LIMIT_HEADS = (1, 2, 4, 8)
LIMIT_REGISTERS = 96
LIMIT_OVER_FLOOR = 1.1

#: Issued load bytes per row of other kernels, bf16, 4 KV heads, 128 lanes, sm_90, triton 3.9.0.
OTHERS = {"SGLang's fused_kv_materialize": 2688, "halves over flat rows, this kernel's predecessor": 1376}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the kernel is compiled for.

    Attributes:
        heads, head_dim, rotary_dim, is_neox_style: of the layers.
        into: `rows` (handed out), `slots` or `blocks` (caches), or either with `-fp8`.
    """

    heads: int
    head_dim: int = 128
    rotary_dim: int = 128
    is_neox_style: bool = True
    into: str = "rows"

    def __str__(self) -> str:
        style = "neox" if self.is_neox_style else "pairs"
        return f"h{self.heads}-d{self.head_dim}-r{self.rotary_dim}-{style}-{self.into}"

    @property
    def tile(self) -> Tile:
        return tile_of("cuda", 1 << 20, self.heads, self.head_dim)

    @property
    def rows(self) -> int:
        """Rows of one program."""
        return self.tile.items * self.tile.steps * self.heads

    @property
    def floor(self) -> float:
        """Load bytes of a row that no kernel does without, bf16: K and V, its share of its token's float32 row of the rope table, and its
        share of a float32 row of the norm's weights among eight tokens."""
        return 4 * self.head_dim + 4 * self.rotary_dim / self.heads + 4 * self.head_dim / (8 * self.heads)

    @property
    def kv_loads(self) -> int:
        """Loads of 128 bits by which the threads of a program bring its rows of K and V, bf16, each element once."""
        return 4 * self.head_dim * self.rows // (16 * 32 * self.tile.warps)

    @property
    def due_store_bytes(self) -> int:
        return (2 if self.into.endswith("fp8") else 4) * self.head_dim


def corpus_shapes() -> list[Shape]:
    """The distinct shapes of attention in the corpus's drafts."""
    found = set()
    for path in sorted((ROOT / "tests" / "corpus" / "configs").glob("*.json")):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_bytes(path.read_bytes())
            spec = load(Checkpoint.open(Path(folder))).spec
        for layer in [] if spec is None else spec.layers:
            attention = layer.attention
            if not isinstance(attention, GQASpec) or not attention.rotates:
                continue
            widths = attention.num_kv_heads, attention.head_dim, attention.rope.rotary_dim
            if None not in widths:
                found.add((*widths, attention.rope.is_neox_style))
    names = ("heads", "head_dim", "rotary_dim", "is_neox_style")
    return [Shape(**dict(zip(names, each, strict=True))) for each in sorted(found)]


def option_shapes() -> list[Shape]:
    """The shapes of the limits, and every way of storing."""
    ways = ("slots", "blocks", "slots-fp8", "blocks-fp8")
    return [
        *(Shape(heads=heads) for heads in LIMIT_HEADS),
        *(Shape(heads=heads, into=into) for heads in (4, 8) for into in ways),
        Shape(heads=4, is_neox_style=False),
        Shape(heads=8, is_neox_style=False, into="blocks"),
        Shape(heads=3, head_dim=80, rotary_dim=32),
        Shape(heads=2, head_dim=96, rotary_dim=96),
    ]


def all_shapes() -> list[Shape]:
    """Every shape once."""
    return list(dict.fromkeys((*option_shapes(), *corpus_shapes())))


def compiled(shape: Shape, target: str) -> Any:
    """The kernel as a launch on that GPU would compile it, bf16, pointers and strides divisible by 16."""
    layers, tokens = 5, 16
    kv = torch.empty(tokens, layers, 2 * shape.heads * shape.head_dim, dtype=torch.bfloat16)
    fp8 = 4 if shape.into.endswith("fp8") else 0
    if shape.into == "rows":
        out = torch.empty(layers, tokens, shape.heads, shape.head_dim, dtype=kv.dtype)
        targets: tuple[Any, ...] = (out, torch.empty_like(out), None, None, None)
        strides = out.stride()[:3]
    else:
        addresses, factors = torch.empty(layers, dtype=torch.long), torch.empty(layers)
        slots = torch.empty(tokens, dtype=torch.long)
        targets = (
            addresses,
            torch.empty_like(addresses),
            slots,
            *((factors, factors.clone()) if fp8 else (None, None)),
        )
        slot = shape.heads * shape.head_dim
        strides = (2 * 16 * slot if shape.into.startswith("blocks") else 0, slot, shape.head_dim)
    # Not set_active: there is no real driver to go back to where there is no GPU.
    driver = triton.runtime.driver
    place = "_active" if hasattr(driver, "_active") else "active"  # the latter up to triton 3.2
    before = getattr(driver, place)
    setattr(driver, place, NoDevice(TARGETS[target]))
    try:
        return _norm_rope_kernel.warmup(
            kv, torch.empty(tokens, dtype=torch.long), torch.empty(layers, shape.head_dim), torch.empty(layers),
            torch.empty(64, shape.rotary_dim), *targets, layers, 1000, *kv.stride()[:2], shape.head_dim, shape.rotary_dim,
            *strides, *strides, 1.0, **meta_of(shape.heads, shape.head_dim, shape.rotary_dim), BLOCK_ITEMS=shape.tile.items,
            STEPS=shape.tile.steps, FLAT=False, IS_NEOX=shape.is_neox_style, SCALE_VALUES=False,
            PAGE_SIZE={"rows": -1, "slots": 0, "blocks": 16}[shape.into.removesuffix("-fp8")], ALIGNED=True, FP8=fp8,
            num_warps=shape.tile.warps, enable_fp_fusion=False, grid=(1,),
        )  # fmt: skip
    finally:
        setattr(driver, place, before)


def measured(shape: Shape, target: str) -> dict[str, Any]:
    """The numbers of one compiled kernel, as the budget keeps them."""
    code = code_of(compiled(shape, target), rows=shape.rows, warps=shape.tile.warps)
    numbers = asdict(code)
    for name in ("loads", "stores", "kv_loads"):
        numbers[name] = {str(width): count for width, count in numbers[name].items()}
    return numbers


def measured_for(targets: Sequence[str], jobs: int) -> dict[str, dict[str, Any]]:
    """The numbers of every shape by target."""
    if jobs < 2 or len(targets) < 2:
        return {target: all_measured(target) for target in targets}
    # Fresh processes: a compiler's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(targets)), mp_context=context) as pool:
        return dict(zip(targets, pool.map(all_measured, targets), strict=True))


def all_measured(target: str) -> dict[str, Any]:
    """The numbers of every shape for one target."""
    return {str(shape): measured(shape, target) for shape in all_shapes()}


def beyond_limits(shape: Shape, target: str, numbers: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a kernel whatever the budget says."""
    where = f"{target} {shape}"
    if numbers["spills"]:
        yield f"{where}: spills {numbers['spills']}, due 0"
    if numbers["fused_multiply_adds"]:
        yield f"{where}: fused_multiply_adds {numbers['fused_multiply_adds']}, due 0: they round unlike the interpreter"
    limited = shape.heads in LIMIT_HEADS and (shape.head_dim, shape.rotary_dim) == (128, 128)
    if not limited or target == "gfx942" or not shape.is_neox_style:
        return
    if numbers["store_bytes"] != shape.due_store_bytes:
        yield f"{where}: store_bytes {numbers['store_bytes']:g}, due {shape.due_store_bytes}"
    if shape.into != "rows":
        return
    if numbers["registers"] > LIMIT_REGISTERS:
        yield f"{where}: registers {numbers['registers']}, at most {LIMIT_REGISTERS}"
    if numbers["load_bytes"] > LIMIT_OVER_FLOOR * shape.floor * (1 + 1e-9):
        yield f"{where}: load_bytes {numbers['load_bytes']:g}, at most {LIMIT_OVER_FLOOR} x {shape.floor:g}"
    if set(numbers["stores"]) != {"16"}:
        yield f"{where}: stores {numbers['stores']}, due 128 bits each"
    # A budget written by an older gate has no loads of K and V apart.
    ours = numbers.get("kv_loads")
    if ours is not None and (due := {"16": shape.kv_loads}) != ours:
        yield f"{where}: kv_loads {ours}, due {due}: K and V once, 128 bits each"
    # The same in the machine code, where the rest of the wide loads is the rope table's.
    wide = 16 * numbers["loads"].get("16", 0) * 32 * shape.tile.warps / shape.rows
    if wide < 4 * shape.head_dim:
        yield f"{where}: 128-bit loads bring {wide:g} bytes a row, due at least {4 * shape.head_dim} for K and V"


def worse_than(budget: Mapping[str, Any], numbers: Mapping[str, Any]) -> Iterator[str]:
    """Numbers that are above the budget's, and wide loads or stores that became narrower."""
    for name in ("registers", "spills", "load_bytes", "store_bytes", "fused_multiply_adds"):
        if numbers[name] > budget[name]:
            yield f"{name} {numbers[name]:g}, budget {budget[name]:g}"
    for name in ("loads", "stores"):
        for width in sorted(set(numbers[name]) | set(budget[name]), key=int):
            got, due = numbers[name].get(width, 0), budget[name].get(width, 0)
            if int(width) < 16 and got > due:
                yield f"{name} of {width} bytes {got}, budget {due}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Compile, compare, and say what moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the budget of this triton version anew")
    parser.add_argument("--table", action="store_true", help="print the table of the limits' shapes alone")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this GPU; may be given again")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes, one GPU each (default: %(default)s)"
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    targets = options.target or list(TARGETS)
    if options.table:
        print_table(targets)
        return 0
    budgets = json.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}
    version = triton.__version__
    if not options.write and version not in budgets:
        print(f"no budget for triton {version}, only for {', '.join(budgets)}; write one with --write", file=sys.stderr)
        return 2
    found, wrong, better = measured_for(targets, options.jobs), [], 0
    for target in targets:
        for shape in all_shapes():
            numbers = found[target][str(shape)]
            wrong += beyond_limits(shape, target, numbers)
            if options.write:
                continue
            due = budgets[version].get(target, {}).get(str(shape))
            if due is None:
                wrong.append(f"{target} {shape}: not in the budget; write it with --write")
                continue
            wrong += [f"{target} {shape}: {text}" for text in worse_than(due, numbers)]
            better += any(numbers[name] < due[name] for name in ("registers", "load_bytes"))
    if options.write:
        budgets[version] = {**budgets.get(version, {}), **found}
        BUDGET.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    count = sum(map(len, found.values()))
    print(
        f"triton {version}: {count} kernels for {', '.join(targets)}, {len(wrong)} beyond budget or limit, {better} better"
    )
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


def print_table(targets: Iterable[str]) -> None:
    """Registers and issued bytes of the limits' shapes, the floor, and other kernels."""
    print(f"triton {triton.__version__}, bf16, 128 lanes, issued bytes per row of K and V\n")
    print("| KV heads | target | registers | spills | load bytes | floor | times the floor | store bytes |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for heads in LIMIT_HEADS:
        shape = Shape(heads=heads)
        for target in targets:
            code = Code(**measured(shape, target))
            print(
                f"| {heads} | {target} | {code.registers} | {code.spills} | {code.load_bytes:g} | {shape.floor:g} | "
                f"{code.load_bytes / shape.floor:.3f} | {code.store_bytes:g} |"
            )
    for name, figure in OTHERS.items():
        print(
            f"| 4 | sm_90, {name} | | | {figure} | {Shape(heads=4).floor:g} | {figure / Shape(heads=4).floor:.3f} | 512 |"
        )


if __name__ == "__main__":
    sys.exit(main())
