"""What an implementation of the stacked K/V path makes of given layers: it refuses them, breaks, or serves them, right or wrong.

The implementation is built and called as SGLang's `FusedKVMaterializeHelper` is: `build(layers, rotary_emb, num_kv_heads, head_dim,
device)`, then `materialize(ctx_hidden, positions, write_layer_kv)`. A trial runs under `watched()`.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_specdecode.fused_kv import eager_kv, fused_kv_reference
from pytest_specdecode.launch import interpreted, triton_available
from pytest_specdecode.memory import KernelMemoryError
from pytest_specdecode.numerics import TOLERANCES, NumericsError, Tolerance, assert_close
from pytest_specdecode.watching import watched

Build = Callable[..., Any]
TrialKind = Literal["refused", "broke", "right", "wrong"]

#: Of an error's text, the most characters that are shown.
MOST_TEXT = 600


class StoppedError(Exception):
    """An implementation raised what ends a process or a test, such as SystemExit; says what it was."""


class HandedOverError(Exception):
    """What an implementation handed over is nothing that a cache could take; says what it was."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one try.

    Attributes:
        kind: `refused`, an error that names a layer, a ValueError or a NotImplementedError; `broke`, any other error, or an error after a
            layer was handed over, or an access outside a tensor; `right`, every layer's own K and V, once; `wrong`, anything else.
        text: the error as the implementation wrote it, with its type before it, or how wrong what was served is; empty where it is right.
        layer: the layer that the error names, or None.
        error: what was raised, or None.
        kv: K and V of each layer that was handed over, by layer, on the device.
    """

    kind: TrialKind
    text: str = ""
    layer: int | None = None
    error: Exception | None = field(default=None, repr=False)
    kv: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)


def try_layers(build: Build, layers: Sequence[Any], ctx_hidden: Tensor, positions: Tensor) -> Trial:
    """Build the implementation over `layers`, let it compute where it accepts them, and compare layer by layer.

    Args:
        build: the implementation; the arguments besides the layers are layer 0's, as an engine takes them.
        layers: duck-typed as for FusedKV; they need not agree in anything.
        ctx_hidden: `[T, hidden_size]`.
        positions: `[T]`.
    """
    device = ctx_hidden.device
    return tried(lambda: built(build, layers, device), layers, ctx_hidden, positions)


def tried(
    make: Callable[[], Any],
    layers: Sequence[Any],
    ctx_hidden: Tensor,
    positions: Tensor,
    tolerances: Mapping[torch.dtype, Tolerance] = TOLERANCES,
) -> Trial:
    """As `try_layers`, for an implementation that `make` builds over `layers` in its own way.

    Args:
        make: returns the implementation, or raises.
        layers, ctx_hidden, positions: as for `try_layers`.
        tolerances: how close is close, by dtype.
    """
    received = Received(ctx_hidden.device)
    try:
        with watched(), contained():
            # Copies, since an implementation that writes to its inputs would otherwise move what it is held against.
            make().materialize(ctx_hidden.clone(), positions.clone(), received)
    except Exception as error:
        text, layer = error_text(error), named_layer(error)
        if received.calls:
            text = f"after {received.last} was handed over, {text}"
            return Trial(kind="broke", text=text, layer=layer, error=error)
        refused = not isinstance(error, (KernelMemoryError, StoppedError))
        refused = refused and (layer is not None or isinstance(error, (ValueError, NotImplementedError)))
        return Trial(kind="refused" if refused else "broke", text=text, layer=layer, error=error)
    wrong = [*received.faults(len(layers)), *wrong_layers(layers, received.kv, ctx_hidden, positions, tolerances)]
    if wrong:
        return Trial(kind="wrong", text="; ".join(wrong[:3]), kv=received.kv)
    return Trial(kind="right", kv=received.kv)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Inside, what is no Exception is turned into one, so that a subject cannot end the run, nor have it skipped; but for the user's own
    KeyboardInterrupt.

    Raises:
        StoppedError: SystemExit, a skip or the like was raised.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise StoppedError(error_text(error)) from error


class Received:
    """What an implementation hands over: K and V by layer, copied as they come, and what no cache could take.

    It is called as `write_layer_kv` is, and never raises, since the implementation might catch it.

    Args:
        device: where K and V are due.

    Attributes:
        kv: K and V by layer; of a layer that came twice the later ones.
        order: the layers as they came, of those that are numbers.
        calls: how many calls there were.
        last: what the last call was for.
    """

    def __init__(self, device: torch.device) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        self.order: list[int] = []
        self.calls = 0
        self.last = ""
        self._device = device
        self._odd: list[str] = []

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take the K and V of one layer."""
        self.calls += 1
        try:
            layer = operator.index(layer)
        except TypeError:
            self.last = f"a layer called {shortened(repr(layer), 40)}"
            self._odd.append(f"{self.last} was handed over; its number is due")
            return
        self.last = f"layer {layer}"
        self.order.append(layer)
        odd = [f"{self.last}: {name} {said}" for name, x in (("K", k), ("V", v)) if (said := self._unlike(x))]
        self._odd += odd
        if not odd:
            self.kv[layer] = k.detach().clone(), v.detach().clone()

    def faults(self, num_layers: int) -> list[str]:
        """What is wrong with the calls themselves, whatever the numbers: a layer that there is not or that came twice, or no tensor."""
        twice = [layer for layer in dict.fromkeys(self.order) if self.order.count(layer) > 1]
        return [
            *self._odd,
            *(
                f"layer {layer} was handed over, and there are {num_layers}"
                for layer in self.order
                if not 0 <= layer < num_layers
            ),
            *(f"layer {layer} was handed over {self.order.count(layer)} times" for layer in twice),
        ]

    def _unlike(self, value: Any) -> str | None:
        """Why a value is no K or V."""
        if not isinstance(value, Tensor):
            return f"is of type {type(value).__name__}; a tensor is due"
        if value.device.type != self._device.type:
            return f"lies on {value.device}; due is {self._device}"
        if value.layout != torch.strided:
            return f"is {value.layout}; due is {torch.strided}"
        return None if value.is_floating_point() else f"is {value.dtype}; a floating-point tensor is due"


def digests(layers: Sequence[Any]) -> dict[str, tuple[int, str]]:
    """Of each tensor of the layers that a stacked path reads, how many rows it has and a digest of them, by name.

    A rope table may grow: `changed` compares the rows that there were.
    """
    return {name: (tensor.shape[0], _digest(tensor)) for name, tensor in _tensors(layers)}


def changed(layers: Sequence[Any], before: Mapping[str, tuple[int, str]]) -> list[str]:
    """The names of the tensors that are not what `digests` found."""
    now = dict(_tensors(layers))
    return [name for name, (rows, digest) in before.items() if name not in now or _digest(now[name][:rows]) != digest]


def _tensors(layers: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for index, layer in enumerate(layers):
        attn = layer.self_attn
        for part, names in (
            ("qkv_proj", ("weight", "bias")),
            ("k_norm", ("weight",)),
            ("rotary_emb", ("cos_sin_cache",)),
        ):
            for name in names:
                tensor = getattr(getattr(attn, part, None), name, None)
                if isinstance(tensor, Tensor) and tensor.dim():
                    yield f"layer {index}'s {part}.{name}", tensor


def _digest(tensor: Tensor) -> str:
    held = tensor.detach().cpu().contiguous()
    return hashlib.blake2b(held.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def built(build: Build, layers: Sequence[Any], device: torch.device | str, **options: Any) -> Any:
    """The implementation over `layers`, with layer 0's rotary object and numbers, as an engine calls its constructor."""
    first = layers[0].self_attn
    return build(layers, first.rotary_emb, first.num_kv_heads, first.head_dim, torch.device(device), **options)


def wrong_layers(
    layers: Sequence[Any],
    kv: Mapping[int, tuple[Tensor, Tensor]],
    ctx_hidden: Tensor,
    positions: Tensor,
    tolerances: Mapping[torch.dtype, Tolerance] = TOLERANCES,
) -> Iterator[str]:
    """How wrong each layer's K or V is, for those that are; each is held against its own layer alone."""
    for index, layer in enumerate(layers):
        if (reason := _wrong(kv.get(index), layer, ctx_hidden, positions, tolerances)) is not None:
            yield f"layer {index}: {reason}"


def error_text(error: BaseException) -> str:
    """The error as it would end a traceback, with its lines joined, and shortened where it is very long."""
    if isinstance(error, StoppedError):
        return str(error)
    try:
        text = " ".join(str(error).split())
    except Exception as another:
        text = f"(its text cannot be had: {type(another).__name__})"
    return f"{type(error).__name__}: {shortened(text, MOST_TEXT)}" if text else type(error).__name__


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def named_layer(error: BaseException) -> int | None:
    """The layer that an error names: its attribute `layer`, or else the first in its text."""
    try:
        stated, text = getattr(error, "layer", None), str(error)
    except Exception:
        return None
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated
    found = re.search(r"\blayers?\b\D{0,12}?(\d{1,9})\b", text, re.IGNORECASE)
    return int(found[1]) if found else None


class Served:
    """An implementation over a draft's layers, with what tests ask of a stack besides `materialize`.

    Triton kernels that it launches on CPU tensors are interpreted. What is not found here is looked for on the implementation itself.

    Args:
        build: the implementation.
        layers: the draft's layers.
        device: where it works.
        options: keyword arguments for `build`.

    Attributes:
        subject: the object that `build` returned.
        num_layers, num_kv_heads, head_dim, hidden_size, dtype, device: of the layers.
    """

    def __init__(self, build: Build, layers: Sequence[Any], device: torch.device | str, **options: Any) -> None:
        first = layers[0].self_attn
        self.num_layers = len(layers)
        self.num_kv_heads: int = first.num_kv_heads
        self.head_dim: int = first.head_dim
        self.hidden_size: int = first.qkv_proj.weight.shape[1]
        self.dtype: torch.dtype = first.qkv_proj.weight.dtype
        self.device = torch.device(device)
        with _runnable(), contained():
            self.subject = built(build, layers, device, **options)

    def materialize(
        self, ctx_hidden: Tensor, positions: Tensor, write_layer_kv: Callable[[int, Tensor, Tensor], object]
    ) -> None:
        """K and V of the context, handed over layer by layer; see `FusedKV.materialize`."""
        with _runnable(), contained():
            self.subject.materialize(ctx_hidden, positions, write_layer_kv)

    def compute(self, ctx_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `materialize`, but returned: K and V, each `[L, T, num_kv_heads, head_dim]`.

        Raises:
            HandedOverError: what was handed over is no K and V of the layers.
        """
        received = Received(self.device)
        self.materialize(ctx_hidden, positions, received)
        if faults := received.faults(self.num_layers):
            raise HandedOverError("; ".join(faults[:3]))
        seen = received.kv
        if not seen:
            empty = torch.empty(self.num_layers, 0, self.num_kv_heads, self.head_dim, dtype=self.dtype)
            return empty.to(self.device), empty.to(self.device)
        keys, values = zip(*(seen[layer] for layer in sorted(seen)), strict=True)
        return torch.stack(keys), torch.stack(values)

    def __getattr__(self, name: str) -> Any:
        if name == "subject":
            raise AttributeError(name)
        return getattr(self.subject, name)


@contextlib.contextmanager
def _runnable() -> Iterator[None]:
    with interpreted() if triton_available() else contextlib.nullcontext():
        yield


def _wrong(
    pair: tuple[Tensor, Tensor] | None,
    layer: Any,
    ctx_hidden: Tensor,
    positions: Tensor,
    tolerances: Mapping[torch.dtype, Tolerance],
) -> str | None:
    """How wrong a layer's K and V are, or None where they are right."""
    if pair is None:
        return "was not handed over"
    attn = layer.self_attn
    width = getattr(attn, "v_head_dim", attn.head_dim)
    if width != attn.head_dim:
        return f"V is {pair[1].shape[-1]} wide, due is {width}"
    try:
        # K starts where the rows say, whatever the layer states.
        own = SimpleNamespace(
            self_attn=SimpleNamespace(
                qkv_proj=attn.qkv_proj,
                q_size=attn.qkv_proj.weight.shape[0] - 2 * attn.kv_size,
                kv_size=attn.kv_size,
                num_kv_heads=attn.num_kv_heads,
                head_dim=attn.head_dim,
                rotary_emb=attn.rotary_emb,
                k_norm=attn.k_norm,
                value_scale=getattr(attn, "value_scale", 1.0),
            ),
            context_norm=getattr(layer, "context_norm", None),
        )
        truth = fused_kv_reference([own], ctx_hidden, positions)
        eager = eager_kv([own], ctx_hidden, positions)
    except Exception as error:
        return f"was served, and has no such K and V ({error_text(error)})"
    sizes = (ctx_hidden.shape[-1], attn.head_dim)
    for name, got, due, base in zip("KV", pair, truth, eager, strict=True):
        if got.shape != due.shape[1:]:
            return f"{name} is {tuple(got.shape)}, due is {tuple(due.shape[1:])}"
        if base.dtype not in TOLERANCES:
            return f"{name} is of dtype {base.dtype}, which no path can hand over"
        try:
            # In another dtype than the layer's own it is still the layer's, if its values are.
            assert_close(
                got[None].to(base.dtype), due, base, what=name, reduction_sizes=sizes, tolerance=tolerances[base.dtype]
            )
        except NumericsError as error:
            if not bool(got.isfinite().all()):
                return str(error)
            return f"{name} is off by up to {float((got.double() - due[0]).abs().max()):.2g}"
    return None
