"""Paged caches that a kernel writes by slot: what is asked of them, and the table of addresses by which it finds each layer's.

Layers' caches are tensors of their own at unrelated addresses, so the kernel is given where they start. What it may touch there the guard
must be told (`launch`'s `reached`), because it is no argument of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_specdecode.errors import InputError, StackMismatchError
from pytest_specdecode.fused_kv.inputs import INTEGERS

#: Mantissa code of the kernel by fp8 dtype: how many bits the exponent has.
FP8_FORMATS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


@dataclass(frozen=True, kw_only=True)
class CacheSet:
    """The K or the V caches of all layers, checked.

    Attributes:
        named: the tensors by the name a message gives them.
        addresses: int64 `[L]` on the caches' device: where each begins.
        num_slots: of each.
        page_size: slots per block, 0 where slots follow each other at one stride.
        strides: of a block, a slot and a head, in elements.
        fp8: 0, or an entry of FP8_FORMATS.
        aligned: whether each begins at a multiple of 16 bytes.
    """

    named: Mapping[str, Tensor]
    addresses: Tensor
    num_slots: int
    page_size: int
    strides: tuple[int, int, int]
    fp8: int
    aligned: bool


def checked_caches(
    name: str,
    caches: Sequence[Tensor],
    projected: Tensor,
    layers: int,
    head_shape: tuple[int, int],
    cache_dtype: torch.dtype | None,
    *,
    beside: CacheSet | None = None,
) -> CacheSet:
    """What the kernel needs of `caches`; StackMismatchError where they do not fit the projection, each other, or the set `beside` them."""
    if len(caches) != layers:
        raise _misfit(name, "one cache per layer", layers, len(caches))
    first = caches[0]
    dtype = cache_dtype if first.dtype == torch.uint8 and cache_dtype is not None else first.dtype
    if dtype != projected.dtype and dtype not in FP8_FORMATS:
        due = (projected.dtype, *FP8_FORMATS)
        hint = "; of uint8 caches say which fp8 they hold by cache_dtype" if dtype == torch.uint8 else ""
        raise _misfit(name, f"a dtype of {due}{hint}", due, dtype)
    if cache_dtype is not None and cache_dtype != dtype:
        raise _misfit(name, f"cache_dtype {cache_dtype}", cache_dtype, dtype)
    if first.ndim not in (3, 4) or tuple(first.shape[-2:]) != head_shape:
        due_shape = f"[num_slots, {head_shape[0]}, {head_shape[1]}] or [num_blocks, block_size, {head_shape[0]}, {head_shape[1]}]"
        raise _misfit(name, due_shape, due_shape, tuple(first.shape))
    axes: tuple[tuple[str, object, object], ...]
    for layer, cache in enumerate(caches):
        axes = (
            ("shape", tuple(first.shape), tuple(cache.shape)),
            ("dtype", first.dtype, cache.dtype),
            ("strides", first.stride(), cache.stride()),
            ("device", projected.device, cache.device),
        )
        for what, usual, found in axes:
            if usual != found:
                raise _misfit(name, f"caches of one {what}, {usual}", usual, found, layer)
    if first.stride(-1) != 1:
        raise _misfit(name, "a last stride of 1", 1, first.stride(-1))
    blocks = 1 if first.ndim == 3 else first.shape[0]
    page_size = 0 if first.ndim == 3 else first.shape[1]
    outer, inner, head = (0, *first.stride()[:2]) if first.ndim == 3 else first.stride()[:3]
    if page_size and outer == page_size * inner:
        page_size, slots = 0, blocks * page_size
    else:
        slots = first.shape[0] if not page_size else blocks * page_size
    result = CacheSet(
        named={f"{name}[{layer}]": cache for layer, cache in enumerate(caches)},
        addresses=torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=projected.device),
        num_slots=slots,
        page_size=page_size,
        strides=(outer, inner, head),
        fp8=FP8_FORMATS.get(dtype, 0),
        aligned=all(cache.data_ptr() % 16 == 0 for cache in caches),
    )
    if beside is not None:
        besides: tuple[tuple[str, int, int], ...] = (
            ("slots", beside.num_slots, result.num_slots),
            ("dtype", beside.fp8, result.fp8),
            ("block size", beside.page_size, result.page_size),
        )
        for what, ours, theirs in besides:
            if ours != theirs:
                raise _misfit(name, f"the {what} of the K caches, {ours}", ours, theirs)
    return result


def checked_slots(slot_mapping: Tensor, tokens: int, num_slots: int) -> Tensor:
    """The slots as a row; InputError where they are no integers `[T]`, one is outside the caches, or two tokens share one."""
    if tuple(slot_mapping.shape) != (tokens,) or slot_mapping.dtype not in INTEGERS:
        raise InputError(
            f"Invalid slot_mapping for fused KV materialization: got {slot_mapping.dtype} {tuple(slot_mapping.shape)}, expected "
            f"integers ({tokens},).",
            axis="slot_mapping",
            expected=(tokens,),
            got=tuple(slot_mapping.shape),
        )
    ordered = slot_mapping.sort().values
    lowest, highest = int(ordered[0]), int(ordered[-1])
    if lowest < -1 or highest >= num_slots:
        got = lowest if lowest < -1 else highest
        raise InputError(
            f"A slot is outside the caches for fused KV materialization: got {got}, expected -1 (skip) to {num_slots - 1}.",
            axis="slot_mapping",
            expected=(-1, num_slots - 1),
            got=got,
        )
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if bool(twice.any()):
        slot = int(ordered[1:][twice][0])
        raise InputError(
            f"Two tokens share a slot for fused KV materialization: got slot {slot} twice; which of them it would hold is undefined.",
            axis="slot_mapping",
            expected="each slot once",
            got=slot,
        )
    return slot_mapping.contiguous()


def scale_factors(
    name: str, scale: Tensor | Sequence[float] | float | None, layers: int, caches: CacheSet, device: torch.device
) -> Tensor | None:
    """What K or V is multiplied by before it becomes fp8, float32 `[L]`; None for caches that are not fp8."""
    if not caches.fp8:
        if scale is not None:
            raise InputError(
                f"{name} is for fp8 caches; these hold the stack's own dtype.", axis=name, expected=None, got=scale
            )
        return None
    factors = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device).detach()
    if factors.ndim == 0:
        factors = factors.expand(layers)
    if tuple(factors.shape) != (layers,):
        raise InputError(
            f"Invalid {name} for fused KV materialization: got shape {tuple(factors.shape)}, expected one number or ({layers},).",
            axis=name,
            expected=(layers,),
            got=tuple(factors.shape),
        )
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise InputError(
            f"Invalid {name} for fused KV materialization: scales must be finite and above 0.", axis=name, got=scale
        )
    return factors.reciprocal().contiguous()


def _misfit(name: str, due: str, expected: object, got: object, layer: int | None = None) -> StackMismatchError:
    where = "" if layer is None else f" at layer {layer}"
    return StackMismatchError(
        f"Invalid {name} for fused KV materialization: expected {due}, got {got}{where}.",
        axis=name,
        expected=expected,
        got=got,
        layer=layer,
    )
