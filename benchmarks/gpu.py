"""The fused K/V kernel on a GPU: is it right, and how fast. Under four minutes; without a GPU it says so and ends with status 2.

First the compiled kernel is held against the float64 reference of this library and against the same launch interpreted, on the same drawn
inputs: both styles, whole and partial rotation, widths that are no power of two, caches and fp8. Where `compute-sanitizer` is installed,
that part is run under it once more. Then, for each number of tokens, the kernel's time beside a device copy of the same bytes and beside
the layer-by-layer eager path, whose projections are not counted. Run it from the repository's root:

    python benchmarks/gpu.py [--heads 8] [--layers 5] [--json table.json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

TOKENS = (64, 1024, 16384, 131072)
HEAD_DIM = 128
#: Where the correctness part runs; a test puts the CPU here to try the script itself.
DEVICE = "cuda"
#: The share of a copy's bandwidth that is due from this many tokens on.
DUE_SHARE, DUE_TOKENS = 0.85, 16384


def main() -> int:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the table there as well")
    parser.add_argument("--only-correctness", action="store_true", help="what is run under compute-sanitizer")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(
            f"benchmarks/gpu.py needs a GPU: {reason}. What can be measured without one: benchmarks/compile_gate.py.",
            file=sys.stderr,
        )
        return 2
    count = correctness()
    print(
        f"{torch.cuda.get_device_name()}: {count} cases right against float64 and bit for bit or within an ulp of the interpreter"
    )
    if options.only_correctness:
        return 0
    print(sanitized())
    rows = [timing(tokens, options.heads, options.layers) for tokens in TOKENS]
    print(
        f"\nbf16, {options.layers} layers x {options.heads} KV heads x {HEAD_DIM}, microseconds, median, L2 flushed before each run\n"
    )
    print(
        "| tokens | kernel | into caches, slots checked | copy of the same bytes | share of a copy | eager per layer | times faster |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['tokens']} | {row['kernel']:.1f} | {row['into']:.1f} | {row['copy']:.1f} | {row['share']:.0%} | "
            f"{row['eager']:.1f} | {row['eager'] / row['kernel']:.1f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    slow = [row["tokens"] for row in rows if row["tokens"] >= DUE_TOKENS and row["share"] < DUE_SHARE]
    if slow:
        print(f"below {DUE_SHARE:.0%} of a copy's bandwidth at {', '.join(map(str, slow))} tokens", file=sys.stderr)
    return 1 if slow else 0


def why_not() -> str | None:
    """Why nothing can be run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees none" + (
            "" if torch.version.cuda or torch.version.hip else " (this is a CPU build of torch)"
        )
    from pytest_specdecode.launch import triton_missing

    return triton_missing()


# --- correctness ------------------------------------------------------------------------------------------------------------------------


def correctness(dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32)) -> int:
    """Every case on the GPU, interpreted, and in float64; returns how many."""
    from pytest_specdecode.fused_kv import fused_norm_rope

    names = ("heads", "head_dim", "rotary_dim", "tokens")
    shapes = [(1, 128, 128, 33), (2, 64, 64, 7), (3, 80, 32, 5), (4, 128, 64, 17), (8, 128, 128, 65), (8, 256, 256, 9)]
    cases = [
        {**dict(zip(names, shape, strict=True)), "dtype": dtype, "is_neox_style": is_neox_style}
        for shape in shapes
        for dtype in dtypes
        for is_neox_style in (True, False)
    ]
    for case in cases:
        inputs, options = drawn(**case)
        k, v = fused_norm_rope(*(each.to(DEVICE) for each in inputs), **options)
        there = [each.cpu() for each in (k, v)]
        here = fused_norm_rope(*inputs, **options)
        compare(case, there, here, inputs, options)
        if case["dtype"] == dtypes[0]:  # each is three more kernels to compile
            into_caches(case, inputs, options)
    return len(cases)


def drawn(
    *, heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, is_neox_style: bool, tokens: int, layers: int = 3
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Inputs on the CPU, from a fixed seed, and the launcher's options."""
    generator = torch.Generator().manual_seed(heads * 1000 + head_dim + tokens)
    angles = torch.arange(4096)[:, None] / 1e4 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    inputs = (
        torch.randn(tokens, layers, 2 * heads * head_dim, generator=generator).to(dtype),
        torch.randint(0, 4096, (tokens,), generator=generator),
        torch.rand(layers, head_dim, generator=generator) + 0.5,
        torch.tensor([1e-6 * 10**layer for layer in range(layers)]),
        torch.cat([angles.cos(), angles.sin()], dim=-1),
    )
    return inputs, {
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "is_neox_style": is_neox_style,
    }


def compare(case: Any, there: Any, here: Any, inputs: Any, options: Any) -> None:
    """K of the GPU within the tolerances of float64 and an ulp of the interpreter's, V the same bits."""
    from pytest_specdecode.numerics import assert_close, assert_exact

    try:
        assert_exact(there[1], here[1], what="V", bits=True)
        assert_close(there[0], exact_k(inputs, **options), what="K", reduction_sizes=(options["head_dim"],))
        assert_close(
            there[0], here[0].double(), what="K beside the interpreter's", reduction_sizes=(options["head_dim"],)
        )
    except AssertionError as error:
        raise SystemExit(f"wrong on {DEVICE}, {case}: {error}") from error


def exact_k(inputs: Any, *, num_kv_heads: int, head_dim: int, rotary_dim: int, is_neox_style: bool) -> torch.Tensor:
    """K in float64."""
    kv, positions, weight, eps, table = (each.double() if each.is_floating_point() else each for each in inputs)
    tokens, layers = kv.shape[:2]
    k = kv.view(tokens, layers, 2, num_kv_heads, head_dim)[:, :, 0].transpose(0, 1)
    k = k / (k.square().mean(-1, keepdim=True) + eps[:, None, None, None]).sqrt() * weight[:, None, None, :]
    cos, sin = table[positions][None, :, None, :].chunk(2, -1)
    turning, rest = k[..., :rotary_dim], k[..., rotary_dim:]
    first, second = turning.chunk(2, -1) if is_neox_style else (turning[..., 0::2], turning[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(pair, -1) if is_neox_style else torch.stack(pair, -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def into_caches(case: Any, inputs: Any, options: Any) -> None:
    """The caches on the GPU hold what those on the CPU do, in the stack's dtype bit for bit up to K's last ulp, and nothing else moved."""
    from pytest_specdecode.fused_kv import fused_norm_rope_into
    from pytest_specdecode.numerics import assert_close

    tokens, layers = inputs[0].shape[:2]
    heads, dim = options["num_kv_heads"], options["head_dim"]
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(16 * (tokens // 16 + 2), generator=generator)[:tokens]
    slots[0] = -1
    for kind in (inputs[0].dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        found = []
        for device in (DEVICE, "cpu"):
            shape = (layers, 2, tokens // 16 + 2, 16, heads, dim)
            caches = torch.zeros(shape, dtype=torch.uint8 if kind.itemsize == 1 else kind, device=device).view(kind)
            scales = {} if kind.itemsize > 1 else {"k_scale": 0.02, "v_scale": 0.5}
            fused_norm_rope_into(
                *(each.to(device) for each in inputs),
                slots.to(device),
                list(caches[:, 0]),
                list(caches[:, 1]),
                **options,
                **scales,
            )
            found.append(caches.cpu().float())
        there, here = found
        if not torch.equal(there[:, 1], here[:, 1]) or not torch.equal(there == 0, here == 0):
            raise SystemExit(f"wrong caches on {DEVICE}, {case}, {kind}")
        differing = float((there[:, 0] != here[:, 0]).float().mean())
        if kind.itemsize == 1:
            # A K on the border between two fp8 may fall either way.
            if differing > 0.01:
                raise SystemExit(f"{differing:.1%} of fp8 K differ from the interpreter's, {case}, {kind}")
        else:
            assert_close(
                there[:, 0].to(kind), here[:, 0].double(), what=f"K in the caches, {case}", reduction_sizes=(dim,)
            )


def sanitized() -> str:
    """The correctness part under compute-sanitizer's memory check, where that is installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        return "compute-sanitizer: not installed"
    command = [
        tool,
        "--error-exitcode",
        "9",
        "--kernel-name",
        "kernel_substring=_norm_rope_kernel",
        sys.executable,
        __file__,
    ]
    try:
        done = subprocess.run([*command, "--only-correctness"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "compute-sanitizer: not finished after 60 s"
    if done.returncode:
        raise SystemExit(f"compute-sanitizer found something:\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
    return "compute-sanitizer: nothing found"


# --- time -------------------------------------------------------------------------------------------------------------------------------


def timing(tokens: int, heads: int, layers: int) -> dict[str, float]:
    """Microseconds of the kernel, of the kernel into caches, of a copy and of the eager path."""
    from pytest_specdecode.fused_kv import fused_norm_rope, fused_norm_rope_into

    inputs, options = drawn(
        heads=heads,
        head_dim=HEAD_DIM,
        rotary_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        is_neox_style=True,
        tokens=64,
        layers=layers,
    )
    kv = torch.randn(tokens, layers, 2 * heads * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(tokens, device="cuda") % 4096
    rest = [each.cuda() for each in inputs[2:]]
    k_out, v_out = (torch.empty(layers, tokens, heads, HEAD_DIM, dtype=kv.dtype, device="cuda") for _ in range(2))
    slots = torch.randperm(tokens, device="cuda")
    copied = torch.empty_like(kv)

    def kernel() -> None:
        fused_norm_rope(kv, positions, *rest, **options, k_out=k_out, v_out=v_out)

    def into() -> None:
        fused_norm_rope_into(kv, positions, *rest, slots, list(k_out), list(v_out), **options)

    def eager() -> None:
        weight, eps, table = rest
        cos, sin = table[positions].bfloat16()[:, None, :].chunk(2, -1)
        for layer in range(layers):
            k, v = kv[:, layer].view(tokens, 2, heads, HEAD_DIM).unbind(1)
            inverse = torch.rsqrt(k.float().square().mean(-1, keepdim=True) + eps[layer])
            k = (k.float() * inverse).bfloat16() * weight[layer].bfloat16()
            first, second = k.chunk(2, -1)
            k_out[layer].copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
            v_out[layer].copy_(v)

    found = {"tokens": tokens, "kernel": captured(kernel), "copy": captured(lambda: copied.copy_(kv))}
    # Into caches the slots are checked first, which waits for the GPU; what is timed is the launch.
    found["into"] = median(into)
    found["eager"] = median(eager)
    found["share"] = found["copy"] / found["kernel"]
    return found


def captured(run: Callable[[], object]) -> float:
    """As `median`, as a CUDA graph where that can be, so that the time of the launcher in Python is not the kernel's."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        return median(run)
    return median(graph.replay)


def median(run: Callable[[], object], seconds: float = 2.0) -> float:
    """Median time in microseconds over as many runs as fit, the L2 cache overwritten before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    taken: list[float] = []
    while sum(taken) < seconds * 1e6 and len(taken) < 100:
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3)
    return sorted(taken)[len(taken) // 2]


if __name__ == "__main__":
    sys.exit(main())
