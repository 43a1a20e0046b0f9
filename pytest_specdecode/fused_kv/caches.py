"""Paged caches that a kernel writes by slot: what is asked of them, and the table of addresses by which it finds each layer's.

Layers' caches are tensors of their own at unrelated addresses, so the kernel is given where they start. What it may touch there the guard
must be told (`launch`'s `reached`), because it is no argument of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    projected: Tensor,
    layers: int,
    head_shape: tuple[int, int],
    cache_dtype: torch.dtype | None,
) -> tuple[CacheSet, CacheSet]:
    """What the kernel needs of the K and of the V caches; StackMismatchError where they do not fit the projection or each other, or where
    two of their elements are one."""
    k_set, v_set = (
        _checked_set(name, caches, projected, layers, head_shape, cache_dtype)
        for name, caches in (("k_caches", k_caches), ("v_caches", v_caches))
    )
    besides: tuple[tuple[str, object, object], ...] = (
        ("slots", k_set.num_slots, v_set.num_slots),
        ("dtype", _dtype_of(k_set, projected), _dtype_of(v_set, projected)),
    )
    for what, ours, theirs in besides:
        if ours != theirs:
            raise _misfit("v_caches", f"the {what} of the K caches, {ours}", ours, theirs)
    page_size = k_set.page_size or v_set.page_size
    if v_set.page_size not in (0, page_size):
        raise _misfit("v_caches", f"the block size of the K caches, {page_size}", page_size, v_set.page_size)
    _check_apart((*k_set.named.items(), *v_set.named.items()))
    return _paged(k_set, page_size), _paged(v_set, page_size)


def _checked_set(
    name: str,
    caches: Sequence[Tensor],
    projected: Tensor,
    layers: int,
    head_shape: tuple[int, int],
    cache_dtype: torch.dtype | None,
) -> CacheSet:
    if not isinstance(caches, Sequence | Tensor):
        raise _misfit(name, "one cache per layer", layers, type(caches).__name__)
    if len(caches) != layers:
        raise _misfit(name, "one cache per layer", layers, len(caches))
    for layer, cache in enumerate(caches):
        if not isinstance(cache, Tensor):
            raise _misfit(name, "a tensor", "Tensor", type(cache).__name__, layer)
    first = caches[0]
    if cache_dtype is not None and cache_dtype not in FP8_FORMATS:
        raise _misfit(name, f"a cache_dtype of {(*FP8_FORMATS,)}", (*FP8_FORMATS,), cache_dtype)
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
    blocks, page_size = (1, 0) if first.ndim == 3 else first.shape[:2]
    outer, inner, head = (0, *first.stride()[:2]) if first.ndim == 3 else first.stride()[:3]
    slots = blocks * page_size if page_size else first.shape[0] * (first.ndim == 3)
    if outer == page_size * inner:
        page_size = 0
    return CacheSet(
        named={f"{name}[{layer}]": cache for layer, cache in enumerate(caches)},
        addresses=torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=projected.device),
        num_slots=slots,
        page_size=page_size,
        strides=(outer, inner, head),
        fp8=FP8_FORMATS.get(dtype, 0),
        aligned=all(cache.data_ptr() % 16 == 0 for cache in caches),
    )


def _dtype_of(caches: CacheSet, projected: Tensor) -> torch.dtype:
    return next((dtype for dtype, code in FP8_FORMATS.items() if code == caches.fp8), projected.dtype)


def _paged(caches: CacheSet, page_size: int) -> CacheSet:
    """The set as blocks of `page_size`, where its slots follow each other at one stride."""
    if caches.page_size == page_size:
        return caches
    return replace(caches, page_size=page_size, strides=(page_size * caches.strides[1], *caches.strides[1:]))


# --- whether all elements lie apart -------------------------------------------------------------------------------------------------------


def _check_apart(caches: Sequence[tuple[str, Tensor]]) -> None:
    """StackMismatchError where two slots, or two caches, share memory: which of them it would hold is undefined."""
    reaches: list[tuple[int, int, _Extents, str]] = []
    for name, cache in caches:
        extents = sorted((step, size) for size, step in zip(cache.shape, cache.stride(), strict=True) if size > 1)
        span = 1
        for step, size in extents:
            if step < span:
                raise _misfit(name, "elements that lie apart", "no overlap", f"strides {tuple(cache.stride())}")
            span += (size - 1) * step
        if cache.numel():
            start = cache.data_ptr()
            reaches.append((start, start + span * cache.element_size(), tuple(extents), name))
    width = caches[0][1].element_size() if caches else 1
    reaches.sort()
    for index, (start, end, extents_here, name) in enumerate(reaches):
        for other_start, _, extents_there, other in reaches[index + 1 :]:
            if other_start >= end:
                break
            # Reaches meet where caches are interleaved in one block of memory, as K and V of a page are; elements need not.
            if _share((other_start - start) // width, extents_here, extents_there):
                raise _misfit(other, "memory of its own", "no overlap", f"some of {name}'s")


#: Strides and sizes of a tensor's dimensions, or strides with the least and the largest multiple.
_Extents = tuple[tuple[int, int], ...]
_Multiples = tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=4096)
def _share(distance: int, here: _Extents, there: _Extents) -> bool:
    """Whether two tensors have an element in common, the second beginning `distance` elements behind the first."""
    bounds: dict[int, tuple[int, int]] = {}
    for sign, extents in ((1, here), (-1, there)):
        for step, size in extents:
            low, high = bounds.get(step, (0, 0))
            bounds[step] = (low, high + size - 1) if sign > 0 else (low - size + 1, high)
    return _is_sum(distance, tuple((step, *bounds[step]) for step in sorted(bounds, reverse=True)))


def _is_sum(distance: int, multiples: _Multiples) -> bool:
    """Whether `distance` is a sum of multiples of the strides, each within its bounds; the widest stride first."""
    if not multiples:
        return distance == 0
    (step, low, high), inner = multiples[0], multiples[1:]
    least, most = sum(each * first for each, first, _ in inner), sum(each * last for each, _, last in inner)
    counts = range(max(low, -((most - distance) // step)), min(high, (distance - least) // step) + 1)
    return any(_is_sum(distance - count * step, inner) for count in counts)


def checked_slots(slot_mapping: Tensor, tokens: int, num_slots: int) -> Tensor:
    """The slots as a row; InputError where they are no integers `[T]`, one is outside the caches, or two tokens share one."""
    if not isinstance(slot_mapping, Tensor):
        raise InputError(
            f"Invalid slot_mapping for fused KV materialization: got {type(slot_mapping).__name__}, expected a tensor ({tokens},).",
            axis="slot_mapping",
            expected=(tokens,),
            got=type(slot_mapping).__name__,
        )
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
    reciprocals = factors.reciprocal()
    if not bool((torch.isfinite(factors) & torch.isfinite(reciprocals) & (factors > 0)).all()):
        raise InputError(
            f"Invalid {name} for fused KV materialization: scales and their float32 reciprocals must be finite and above 0.",
            axis=name,
            got=scale,
        )
    return reciprocals.contiguous()


def _misfit(name: str, due: str, expected: object, got: object, layer: int | None = None) -> StackMismatchError:
    where = "" if layer is None else f" at layer {layer}"
    return StackMismatchError(
        f"Invalid {name} for fused KV materialization: expected {due}, got {got}{where}.",
        axis=name,
        expected=expected,
        got=got,
        layer=layer,
    )
