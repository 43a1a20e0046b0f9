"""How wrong the fused K/V path is against float64, beside eager code and SGLang's kernel, for each dtype and rounding order.

Printed first is the table of tolerances that every comparison in the library uses, a reason per line. Then, per dtype, the error of K of:
the kernel here; eager layer-by-layer code; the three orders in which engines round (once at the store, after the norm, after each step);
and SGLang's kernel, where its file is given or sglang is installed. Errors are against the float64 reference, of inputs in the storage
dtype. In float32 the weights and states are small whole numbers, so that every order of the projection's sums gives the same: there a GEMM
over all layers and one per layer would differ by as much as the kernels do. It ends with status 1 where the kernel's is above eager's.
Run it from the repository's root; with SGLang's unpacked package on PYTHONPATH its kernel is shown, too:

    python benchmarks/errors.py [--seeds 8]
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from pytest_specdecode.contracts.rounding import rounded_kv
from pytest_specdecode.engines.subjects import fused_kv_class
from pytest_specdecode.errors import DraftError
from pytest_specdecode.fused_kv import FusedKV, eager_kv, fused_kv_reference
from pytest_specdecode.launch import interpreted
from pytest_specdecode.numerics import TOLERANCE_REASONS, TOLERANCES
from pytest_specdecode.strategies.configs import LayerConfig
from pytest_specdecode.strategies.stacks import Stack

LAYERS, HEADS, HEAD_DIM, HIDDEN, TOKENS = 3, 4, 128, 256, 32
ORDERS = ("at-the-store", "after-the-norm", "after-each-step")


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4, help="how many random stacks; the worst of them counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("Tolerances: what a result may be beyond the eager baseline's own error.\n")
    print(
        "| dtype | largest error, ulps | mean error, ulps | worst row, relative L2 | why |\n| --- | --- | --- | --- | --- |"
    )
    for dtype, rule in TOLERANCES.items():
        name = str(dtype).removeprefix("torch.")
        print(f"| {name} | {rule.max_ulps:g} | {rule.mean_ulps:g} | {rule.row_l2:g} | {TOLERANCE_REASONS[dtype]} |")
    helper = sglang_helper()
    print(
        f"\nError of K against float64, worst of {options.seeds} stacks of {LAYERS} layers x {HEADS} heads x {HEAD_DIM}, {TOKENS} tokens"
        f"{'' if helper else '; SGLang: not installed'}.\n"
    )
    print("| dtype | what | largest | mean | worst row, relative L2 |\n| --- | --- | --- | --- | --- |")
    worse = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = errors(dtype, options.seeds, helper)
        for what, (largest, mean, row) in found.items():
            print(
                f"| {str(dtype).removeprefix('torch.')} | {what} | {largest:.2e} | {mean:.2e} | {row:.2e} |", flush=True
            )
        worse += [
            f"{dtype} {measure}: ours {ours:.3e}, eager {eager:.3e}"
            for measure, ours, eager in zip(("largest", "mean", "row"), found["ours"], found["eager"], strict=True)
            if ours > eager
        ]
    for text in worse:
        print(f"above eager's: {text}", file=sys.stderr)
    return 1 if worse else 0


def errors(dtype: torch.dtype, seeds: int, helper: Any) -> dict[str, tuple[float, float, float]]:
    """Largest, mean and worst row's error of K by who computed it, the worst over all seeds."""
    worst: dict[str, tuple[float, float, float]] = {}
    for seed in range(seeds):
        config = LayerConfig(
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            hidden_size=HIDDEN,
            dtype=str(dtype).removeprefix("torch."),
            max_position_embeddings=4096,
        )
        exact = dtype == torch.float32
        layers = Stack(configs=[config] * LAYERS, seed=seed, weights="integers" if exact else "normal").layers
        generator = torch.Generator().manual_seed(seed)
        ctx = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
        if exact:
            ctx = (2 * ctx).round()
        positions = torch.randint(0, 4096, (TOKENS,), generator=generator)
        arguments = layers, layers[0].self_attn.rotary_emb, HEADS, HEAD_DIM, torch.device("cpu")
        truth = fused_kv_reference(layers, ctx, positions)[0]
        results = contenders(arguments, ctx, positions, helper)
        for what, compute in results.items():
            error = (compute().double() - truth).abs()
            rows = error.square().sum(-1).sqrt() / truth.square().sum(-1).sqrt()
            numbers = float(error.max()), float(error.mean()), float(rows.max())
            known = worst.get(what, (0.0, 0.0, 0.0))
            worst[what] = max(known[0], numbers[0]), max(known[1], numbers[1]), max(known[2], numbers[2])
    return worst


def contenders(
    arguments: Any, ctx: torch.Tensor, positions: torch.Tensor, helper: Any
) -> dict[str, Callable[[], torch.Tensor]]:
    """Who computes K, by name."""
    layers = arguments[0]
    results: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: FusedKV(*arguments).compute(ctx, positions)[0],
        "eager": lambda: eager_kv(layers, ctx, positions)[0],
    }
    for order in ORDERS:
        results[f"rounded {order}"] = functools.partial(lambda how: rounded_kv(layers, ctx, positions, how)[0], order)
    if helper is not None:
        results["SGLang"] = lambda: of_sglang(helper, arguments, ctx, positions)
    return results


def of_sglang(helper: Any, arguments: Any, ctx: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """K as SGLang's helper hands it over, its kernel interpreted."""
    seen: list[torch.Tensor] = []
    with interpreted():
        helper(*arguments).materialize(ctx, positions, lambda _, k, v: seen.append(k.clone()))
    return torch.stack(seen)


def sglang_helper() -> Any:
    """SGLang's helper class from the installed package; None where there is none."""
    try:
        return fused_kv_class("sglang")
    except DraftError:
        return None


if __name__ == "__main__":
    sys.exit(main())
