"""How fast the fused K/V kernel is tried on a CPU, with every access guarded.

One example is 17 tokens x 4 heads x 5 layers x head_dim 128: one interpreted launch on poisoned outputs, bounds, races and unwritten
elements checked. The same inputs then go through the kernel one row per program, as a kernel written for a GPU's grid would be run, in
the same process, for the ratio. Times are CPU time of one thread, so that a busy machine does not count. Run it from the repository's root:

    python benchmarks/kernel.py [--seconds 3]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import torch
import triton

from pytest_specdecode.fused_kv import fused_kv_reference, fused_norm_rope
from pytest_specdecode.memory import guarded, poison_
from pytest_specdecode.numerics import assert_close

TOKENS, HEADS, LAYERS, HEAD_DIM = 17, 4, 5, 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each line of the table")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}, one thread")
    print(
        f"{TOKENS} tokens x {HEADS} heads x {LAYERS} layers x {HEAD_DIM}, CPU time, median of as many runs as fit {seconds:g} s\n"
    )
    print("| what | ms per example | examples/s |\n| --- | --- | --- |")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        row(f"{name}, guarded", example(dtype, guard=True), seconds)
        row(f"{name}, unguarded", example(dtype, guard=False), seconds)
    row("float32, guarded, compared with the float64 truth", compared_example(), seconds)
    row("float32, guarded, 1 token x 1 head x 1 layer", example(torch.float32, guard=True, shape=(1, 1, 1)), seconds)
    fast = row("float32, guarded, again", example(torch.float32, guard=True), seconds)
    naive = row("float32, guarded, one row per program", example(torch.float32, guard=True, block_rows=1), seconds)
    print(f"\none row per program takes {naive / fast:.0f} times as long")


def row(what: str, run: Callable[[], object], seconds: float) -> float:
    """Time `run`, print its line, return the median in seconds of CPU time."""
    run()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken) < 3:
        started = time.process_time()
        run()
        taken.append(time.process_time() - started)
    median = sorted(taken)[len(taken) // 2]
    print(f"| {what} | {median * 1e3:.1f} | {1 / median:.0f} |", flush=True)
    return median


def example(
    dtype: torch.dtype,
    *,
    guard: bool,
    block_rows: int | None = None,
    shape: tuple[int, int, int] = (TOKENS, HEADS, LAYERS),
) -> Callable[[], object]:
    """A function that runs one example."""
    tokens, heads, layers = shape
    kv = torch.randn(tokens, layers, 2 * heads * HEAD_DIM).to(dtype)
    positions = torch.arange(tokens)
    weight, eps = torch.rand(layers, HEAD_DIM) + 0.5, torch.full((layers,), 1e-6)
    table = rope_table(64)
    outputs = [torch.empty(layers, tokens, heads, HEAD_DIM, dtype=dtype) for _ in range(2)]

    def launch_once() -> object:
        return fused_norm_rope(
            kv,
            positions,
            weight,
            eps,
            table,
            num_kv_heads=heads,
            head_dim=HEAD_DIM,
            rotary_dim=HEAD_DIM,
            k_out=poison_(outputs[0]),
            v_out=poison_(outputs[1]),
            block_rows=block_rows,
        )

    def guarded_once() -> object:
        with guarded(filled=("k_out", "v_out")):
            return launch_once()

    return guarded_once if guard else launch_once


def compared_example() -> Callable[[], object]:
    """As `example`, through FusedKV on layers with a projection, and compared with the reference."""
    from types import SimpleNamespace

    from pytest_specdecode.fused_kv import FusedKV

    hidden = 64
    rope = SimpleNamespace(rotary_dim=HEAD_DIM, is_neox_style=True, base=1e4, cos_sin_cache=rope_table(64))
    layers = [
        SimpleNamespace(
            self_attn=SimpleNamespace(
                num_kv_heads=HEADS,
                head_dim=HEAD_DIM,
                q_size=HEADS * HEAD_DIM,
                kv_size=HEADS * HEAD_DIM,
                rotary_emb=rope,
                qkv_proj=SimpleNamespace(weight=torch.randn(3 * HEADS * HEAD_DIM, hidden) / 8, bias=None),
                k_norm=SimpleNamespace(weight=torch.rand(HEAD_DIM) + 0.5, variance_epsilon=1e-6),
            )
        )
        for _ in range(LAYERS)
    ]
    path = FusedKV(layers, rope, HEADS, HEAD_DIM, "cpu")
    ctx, positions = torch.randn(TOKENS, hidden), torch.arange(TOKENS)

    def run() -> object:
        with guarded(filled=("k_out", "v_out")):
            k, v = path.compute(ctx, positions)
        due_k, due_v = fused_kv_reference(layers, ctx, positions)
        sums = (hidden, HEAD_DIM)
        return assert_close(k, due_k, what="K", reduction_sizes=sums), assert_close(
            v, due_v, what="V", reduction_sizes=sums
        )

    return run


def rope_table(rows: int) -> torch.Tensor:
    """Cosines and sines, `[rows, HEAD_DIM]`."""
    angles = torch.arange(rows)[:, None] / 1e4 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


if __name__ == "__main__":
    main()
