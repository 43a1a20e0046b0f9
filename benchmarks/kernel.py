"""How fast the fused K/V kernel is tried on a CPU, with every access guarded, and what memory it asks for.

One example is 17 tokens x 4 heads x 5 layers x head_dim 128: one interpreted launch on poisoned outputs, bounds, races and unwritten
elements checked. The same inputs then go through the kernel one token per program, as a kernel written for a GPU's grid would be run, in
the same process, for the ratio. Whole calls of `FusedKV` follow, projection and checks included, at that shape, at one of the size that
the strategies draw, and into paged caches; and last, on whatever `kernel_inputs` draws by default. Times are CPU time of one thread, so
that a busy machine does not count. Run it from the repository's root:

    python benchmarks/kernel.py [--seconds 3]
    python benchmarks/kernel.py --traffic

With `--traffic` it prints bytes instead: loaded and stored per row of K and V, as asked for lane by lane and as unique elements, counted by
the guard while the tile of a GPU is interpreted, beside SGLang's kernel where its file is given.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from hypothesis import HealthCheck, given, settings

from pytest_specdecode.fused_kv import FusedKV, fused_kv_reference, fused_norm_rope, kernel
from pytest_specdecode.fused_kv.tiles import tile_of
from pytest_specdecode.launch import interpreted
from pytest_specdecode.memory import guarded, poison_
from pytest_specdecode.numerics import assert_close
from pytest_specdecode.strategies import kernel_inputs

TOKENS, HEADS, LAYERS, HEAD_DIM = 17, 4, 5, 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each line of the table")
    parser.add_argument("--traffic", action="store_true", help="print bytes per row instead of times")
    options = parser.parse_args()
    seconds = options.seconds
    torch.set_num_threads(1)
    if options.traffic:
        print_traffic()
        return
    print(f"triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}, one thread")
    print(
        f"{TOKENS} tokens x {HEADS} heads x {LAYERS} layers x {HEAD_DIM}, CPU time, median of as many runs as fit {seconds:g} s\n"
    )
    print("| what | ms per example | examples/s |\n| --- | --- | --- |")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        row(f"{name}, guarded", example(dtype, guard=True), seconds)
        row(f"{name}, unguarded", example(dtype, guard=False), seconds)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        row(f"{name}, guarded, whole FusedKV call", whole_call(dtype), seconds)
        row(
            f"{name}, guarded, whole FusedKV call, 4 tokens x 2 heads x 2 layers x 64",
            whole_call(dtype, (4, 2, 2), 64),
            seconds,
        )
        row(f"{name}, guarded, whole FusedKV call into caches", whole_call(dtype, into=True), seconds)
    row("float32, guarded, compared with the float64 truth", compared_example(), seconds)
    row("float32, guarded, 1 token x 1 head x 1 layer", example(torch.float32, guard=True, shape=(1, 1, 1)), seconds)
    fast = row("float32, guarded, again", example(torch.float32, guard=True), seconds)
    naive = row("float32, guarded, one token per program", example(torch.float32, guard=True, block_rows=1), seconds)
    print(f"\none token per program takes {naive / fast:.0f} times as long")
    print_drawn()


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


def whole_call(
    dtype: torch.dtype,
    shape: tuple[int, int, int] = (TOKENS, HEADS, LAYERS),
    head_dim: int = HEAD_DIM,
    *,
    into: bool = False,
) -> Callable[[], object]:
    """A function that makes one guarded call of FusedKV on layers with a projection; with `into` it writes caches of 16 slots a block."""
    _, path, ctx, positions = stack(dtype, shape, head_dim)
    tokens, heads, layers = shape
    blocks = -(-tokens // 16) + 1
    k_caches, v_caches = ([torch.zeros(blocks, 16, heads, head_dim, dtype=dtype) for _ in range(layers)] for _ in "kv")
    slots = torch.randperm(16 * blocks)[:tokens]

    def run() -> object:
        with guarded(filled=("k_out", "v_out")):
            return path.compute(ctx, positions)

    def run_into() -> object:
        with guarded():
            return path.materialize_into(ctx, positions, slots, k_caches, v_caches)

    return run_into if into else run


def print_drawn(count: int = 100, due: float = 150.0) -> None:
    """How often a second whole calls are made on inputs as the strategies draw them."""
    rates: list[float] = []

    @settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(kernel_inputs(min_tokens=1))
    def each(inputs: Any) -> None:
        path, taken = inputs.stack.build(FusedKV), []
        ctx, positions = inputs.ctx_hidden, inputs.positions
        for _ in range(4):
            started = time.process_time()
            with guarded(filled=("k_out", "v_out")):
                path.compute(ctx, positions)
            taken.append(time.process_time() - started)
        rates.append(1 / sorted(taken)[1])

    each()
    rates.sort()
    print(
        f"{len(rates)} inputs as `kernel_inputs` draws them, guarded, whole calls: median {rates[len(rates) // 2]:.0f}/s, slowest "
        f"{rates[0]:.0f}/s, {sum(rate < due for rate in rates) / len(rates):.0%} below {due:.0f}/s"
    )


def compared_example() -> Callable[[], object]:
    """As `whole_call`, and compared with the reference."""
    layers, path, ctx, positions = stack(torch.float32, (TOKENS, HEADS, LAYERS), HEAD_DIM)

    def run() -> object:
        with guarded(filled=("k_out", "v_out")):
            k, v = path.compute(ctx, positions)
        due_k, due_v = fused_kv_reference(layers, ctx, positions)
        sums = (path.hidden_size, HEAD_DIM)
        return assert_close(k, due_k, what="K", reduction_sizes=sums), assert_close(
            v, due_v, what="V", reduction_sizes=sums
        )

    return run


def stack(
    dtype: torch.dtype, shape: tuple[int, int, int], head_dim: int
) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Layers, their path, a context and positions."""
    tokens, heads, num_layers = shape
    hidden = 64
    rope = SimpleNamespace(rotary_dim=head_dim, is_neox_style=True, base=1e4, cos_sin_cache=rope_table(64, head_dim))
    layers = [
        SimpleNamespace(
            self_attn=SimpleNamespace(
                num_kv_heads=heads,
                head_dim=head_dim,
                q_size=heads * head_dim,
                kv_size=heads * head_dim,
                rotary_emb=rope,
                qkv_proj=SimpleNamespace(weight=(torch.randn(3 * heads * head_dim, hidden) / 8).to(dtype), bias=None),
                k_norm=SimpleNamespace(weight=(torch.rand(head_dim) + 0.5).to(dtype), variance_epsilon=1e-6),
            )
        )
        for _ in range(num_layers)
    ]
    return (
        layers,
        FusedKV(layers, rope, heads, head_dim, "cpu"),
        torch.randn(tokens, hidden).to(dtype),
        torch.arange(tokens),
    )


def print_traffic() -> None:
    """Bytes per row by the guard, bf16, 64 tokens, for the tiles of a GPU."""
    print(
        "| kernel, bf16, 128 lanes | KV heads | loaded, asked for | loaded, unique | stored |\n| --- | --- | --- | --- | --- |"
    )
    for heads in (1, 2, 4, 8):
        tokens, layers = 64, 2
        _, path, ctx, positions = stack(torch.bfloat16, (tokens, heads, layers), HEAD_DIM)
        tile = tile_of("cuda", layers * tokens, heads, HEAD_DIM)
        with mock.patch.object(kernel, "tile_of", lambda *_, tile=tile: tile), guarded() as guard:
            path.compute(ctx, positions)
        print_bytes("fused_norm_rope", heads, guard.launches, layers * tokens * heads)
    from errors import sglang_helper

    if (helper_class := sglang_helper()) is None:
        print("SGLang is not installed")
        return

    for heads in (4, 8):
        layers, _, ctx, positions = stack(torch.bfloat16, (8, heads, 2), HEAD_DIM)
        helper = helper_class(layers, layers[0].self_attn.rotary_emb, heads, HEAD_DIM, torch.device("cpu"))
        with interpreted(), guarded() as guard:
            helper.materialize(ctx, positions, lambda *_: None)
        print_bytes("SGLang's fused_kv_materialize", heads, guard.launches, 2 * 8 * heads)


def print_bytes(name: str, heads: int, launches: Any, rows: int) -> None:
    """One line of the table."""
    tensors = [tensor for launch in launches for tensor in launch.tensors.values()]
    asked = sum(tensor.loaded_bytes for tensor in tensors) / rows
    unique = sum(tensor.unique_loaded_bytes for tensor in tensors) / rows
    stored = sum(tensor.stored_bytes for tensor in tensors) / rows
    print(f"| {name} | {heads} | {asked:.0f} | {unique:.0f} | {stored:.0f} |", flush=True)


def rope_table(rows: int, head_dim: int = HEAD_DIM) -> torch.Tensor:
    """Cosines and sines, `[rows, head_dim]`."""
    angles = torch.arange(rows)[:, None] / 1e4 ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


if __name__ == "__main__":
    main()
