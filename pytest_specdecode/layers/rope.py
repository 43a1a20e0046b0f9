"""Rotary position embeddings: frequencies of every scaling type, tables that grow, and the rotation itself.

Everything is worked out in float64 and rounded at the end. Two things here are usually wrong elsewhere and so are done
with care: a scaled table that grows keeps its scaling in the new rows, and the types whose frequencies depend on the
length (`dynamic`, `longrope`) say for which length they are set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.spec import RopeSpec

#: Rows by which a table grows; small, so that a tiny draft costs a tiny table.
_ROWS = 256


class RotaryEmbedding(nn.Module):
    """The rotary embedding of one layer, with the attributes that serving engines read.

    Args:
        rope: what the file states.
        head_dim: width of a head, of which the leading `rotary_dim` lanes rotate.
        seq_len: the length for which `dynamic` and `longrope` set their frequencies; the longest length served
            (`max_length`) where None. No other type reads it.

    Attributes:
        rotary_dim: lanes that rotate; `head_dim` for `proportional`, whose idle pairs have frequency 0.
        head_size: `head_dim`.
        is_neox_style: rotate-half (True) or interleaved pairs.
        base: theta.
        rope_scaling: the scaling fields with `rope_type`, or None for the default type.
        max_position_embeddings: as stated, or None.
        max_length: positions that may be asked for: `max_position_embeddings` stretched by the scaling, or what
            `_ensure_cos_sin_cache_length` was asked for where that is more; None for no bound.

    Raises:
        LayerBuildError: theta or a field of the scaling is missing or senseless, the type is unknown, or `rotary_dim`
            is odd, not positive, or wider than the head.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, *, seq_len: int | None = None) -> None:
        super().__init__()
        self.head_size = head_dim
        self.rotary_dim = _rotary_dim(rope, head_dim)
        self.is_neox_style = rope.is_neox_style
        self.base = _theta(rope)
        self.rope_scaling: Mapping[str, Any] | None = None
        if rope.rope_type != "default":
            self.rope_scaling = {**rope.scaling, "rope_type": rope.rope_type}
        self.max_position_embeddings = rope.max_position_embeddings
        self.max_length = _max_length(rope)
        self._rope = rope
        self._seq_len = seq_len if seq_len is not None else self.max_length
        self._inv_freq, self._scale = inv_freq_and_scale(rope, self._seq_len, head_dim=head_dim)
        self._table = torch.empty(0, self.rotary_dim, dtype=torch.float32)

    @property
    def attention_scaling(self) -> float:
        """The factor on cos and sin (YaRN's mscale, LongRoPE's attention factor); 1.0 for most types."""
        return self._scale

    @property
    def inv_freq(self) -> Tensor:
        """The frequencies in radians per position, float64 `[rotary_dim / 2]`."""
        return self._inv_freq

    @property
    def cos_sin_cache(self) -> Tensor:
        """The table, float32 `[rows, rotary_dim]`: cosines in the first half, sines in the second. Starts small; see
        `_ensure_cos_sin_cache_length`."""
        if self._table.shape[0] == 0:
            self._extend(_ROWS if self.max_length is None else min(_ROWS, self.max_length))
        return self._table

    def _ensure_cos_sin_cache_length(self, needed_max_pos: int) -> None:
        """Grow `cos_sin_cache` until row `needed_max_pos` exists; the name and the argument are the engines'.

        The old rows stay as they are unless the type's frequencies depend on the length and the length set at
        construction is exceeded: then the whole table is made anew, as it would have been for that length.
        """
        rows = needed_max_pos + 1
        if self.max_length is not None and rows > self.max_length:
            self.max_length = rows
        if self._seq_len is not None and rows > self._seq_len:
            self._seq_len = rows
            inv_freq, scale = inv_freq_and_scale(self._rope, rows, head_dim=self.head_size)
            if scale != self._scale or not torch.equal(inv_freq, self._inv_freq):
                self._inv_freq, self._scale = inv_freq, scale
                self._table = self._table[:0]
        if rows <= self._table.shape[0]:
            return
        grown = -(-rows // _ROWS) * _ROWS
        self._extend(grown if self.max_length is None else min(grown, self.max_length))

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Cosines and sines at `positions` (integers, `[...]`), each `[..., rotary_dim / 2]` in `dtype`.

        Angles are float64 whatever the dtype; no table is read.

        Raises:
            DraftError: positions that are not integers, negative, or not below `max_length`.
        """
        _check_positions(positions, self.max_length)
        cos, sin = self._angles(positions)
        return cos.to(dtype), sin.to(dtype)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x`, `[..., T, heads, head_dim]`, rotated at `positions`, `[..., T]` or `[T]`; one rounding to `x`'s
        dtype.
        """
        cos, sin = self.cos_sin(positions, torch.promote_types(x.dtype, torch.float32))
        return apply_rotary(x, cos.to(x.device), sin.to(x.device), self.is_neox_style)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key, each `[..., T, heads, head_dim]`, rotated at `positions`."""
        return self.rotate(query, positions), self.rotate(key, positions)

    def extra_repr(self) -> str:
        """What distinguishes one rotary embedding from another, for `print(module)`."""
        kind = "default" if self.rope_scaling is None else self.rope_scaling["rope_type"]
        return f"{self.rotary_dim} of {self.head_size}, base={self.base}, type={kind}, neox={self.is_neox_style}"

    def _extend(self, rows: int) -> None:
        fresh = torch.cat(self._angles(torch.arange(self._table.shape[0], rows)), dim=-1)
        self._table = torch.cat([self._table, fresh.to(self._table.device, torch.float32)])

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float64).unsqueeze(-1) * self._inv_freq.to(positions.device)
        return angles.cos() * self._scale, angles.sin() * self._scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # The table follows the module to another device but stays float32 when the module changes dtype.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._table = self._table.to(fn(self._table[:0]).device)
        return self


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """`x` with its leading lanes rotated and the rest untouched (Su et al. 2021).

    Args:
        x: `[..., T, heads, head_dim]`.
        cos, sin: `[..., T, rotary_dim / 2]`; they set `rotary_dim`.
        is_neox_style: pairs are lanes (i, i + rotary_dim / 2); else (2i, 2i + 1).

    Returns:
        The shape and dtype of `x`; computed in the wider of `x`'s and `cos`'s dtype and rounded once.

    Raises:
        DraftError: the shapes do not fit.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or cos.shape[-2:-1] != x.shape[-3:-2] or 2 * half > x.shape[-1]:
        raise DraftError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} do not fit x {list(x.shape)}: "
            "[..., T, rotary_dim / 2] and [..., T, heads, head_dim] are due",
            got=(tuple(cos.shape), tuple(sin.shape), tuple(x.shape)),
        )
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    wide = torch.promote_types(x.dtype, cos.dtype)
    turning = x[..., : 2 * half].to(wide)
    if is_neox_style:
        first, second = turning[..., :half], turning[..., half:]
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, dim=-1) if is_neox_style else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat([joined.to(x.dtype), x[..., 2 * half :]], dim=-1)


def inv_freq_and_scale(
    rope: RopeSpec, seq_len: int | None = None, *, head_dim: int | None = None
) -> tuple[Tensor, float]:
    """Frequencies (radians per position) and the factor on cos and sin.

    Args:
        rope: the embedding. `mrope` counts as `default`: the rows of its position table agree on text.
        seq_len: the length that `dynamic` and `longrope` are set for; None means within the length of pre-training.
        head_dim: width of a head; needed where `rope.rotary_dim` is None, and by `proportional`, whose exponents run
            over the head.

    Returns:
        Float64 `[rotary_dim / 2]`, and a float.

    Raises:
        LayerBuildError: theta, `rotary_dim` or a field that the type needs is missing, the type is unknown, or a number
            makes no sense.

    Formulas: RoFormer (default); position interpolation (linear); NTK-aware scaling by length (dynamic); YaRN, arXiv
    2309.00071, with DeepSeek's two mscales; Llama 3.1; LongRoPE, arXiv 2402.13753; Gemma 4 (proportional). The shapes
    of the fields are those of transformers' configurations.
    """
    if rope.rope_type not in _TYPES:
        raise LayerBuildError(
            f"unknown RoPE type {rope.rope_type!r}; known: {', '.join(sorted(_TYPES))}",
            key="rope_type",
            got=rope.rope_type,
            due=tuple(sorted(_TYPES)),
        )
    dim = _rotary_dim(rope, head_dim)
    return _TYPES[rope.rope_type](rope, _theta(rope), dim, seq_len)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude, `0.1 * mscale * ln(factor) + 1` for a factor above 1, else 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _default(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    return _plain(theta, dim), 1.0


def _linear(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    return _plain(theta, dim) / _number(rope, "factor"), 1.0


def _dynamic(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    factor, trained = _number(rope, "factor"), _stated_length(rope)
    if dim <= 2:
        raise LayerBuildError("dynamic RoPE needs more than 2 rotating lanes", key="rotary_dim", got=dim)
    length = trained if seq_len is None else max(seq_len, trained)
    stretched = theta * (factor * length / trained - (factor - 1.0)) ** (dim / (dim - 2))
    return _plain(stretched, dim), 1.0


def _yarn(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    # transformers takes the ratio of the two mscales only where both are there and not 0; DeepSeek's class always does.
    inv_freq, factor = _yarn_frequencies(rope, theta, dim, truncate=rope.scaling.get("truncate") is not False)
    if rope.scaling.get("attention_factor") is not None:
        return inv_freq, _float(rope, "attention_factor", 1.0)
    mscale, mscale_all_dim = _float(rope, "mscale", 0.0), _float(rope, "mscale_all_dim", 0.0)
    scale = yarn_mscale(factor)
    if mscale and mscale_all_dim:
        scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return inv_freq, scale * _float(rope, "attn_factor", 1.0)


def _deepseek_yarn(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    inv_freq, factor = _yarn_frequencies(rope, theta, dim, truncate=True)
    mscale, mscale_all_dim = _float(rope, "mscale", 1.0), _float(rope, "mscale_all_dim", 0.0)
    ratio = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return inv_freq, ratio * _float(rope, "attn_factor", 1.0)


def _yarn_frequencies(rope: RopeSpec, theta: float, dim: int, *, truncate: bool) -> tuple[Tensor, float]:
    factor, original = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    if theta == 1.0:
        raise LayerBuildError("YaRN is not defined for a base of 1", key="rope_theta", got=theta)

    def lane(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = lane(_turns(rope, "beta_fast", 32.0)), lane(_turns(rope, "beta_slow", 1.0))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    kept = (1.0 - ramp) * _float(rope, "extrapolation_factor", 1.0)
    plain = _plain(theta, dim)
    return plain / factor * (1.0 - kept) + plain * kept, factor


def _turns(rope: RopeSpec, field: str, default: float) -> float:
    """Full turns within the original length at which YaRN's ramp starts or ends; 0 and absent are the default, as in the peers."""
    turns = _float(rope, field, 0.0) or default
    if not 1e-6 <= turns <= 1e6:
        raise LayerBuildError(
            f"is {turns!r}; a number of turns is due, 32 or 1 as a rule",
            key=f"rope_scaling.{field}",
            got=turns,
            due="1e-6 to 1e6",
        )
    return turns


def _llama3(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    factor, original = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise LayerBuildError(
            f"is {low}; it must be below high_freq_factor, {high}", key="low_freq_factor", got=low, due=f"< {high}"
        )
    plain = _plain(theta, dim)
    turns = original * plain / (2 * math.pi)  # full turns within the length of pre-training
    smooth = (turns - low) / (high - low)
    blended = (1.0 - smooth) * plain / factor + smooth * plain
    return torch.where(turns < low, plain / factor, torch.where(turns > high, plain, blended)), 1.0


def _longrope(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    original = _number(rope, "original_max_position_embeddings")
    short, long = _list(rope, "short_factor", dim // 2), _list(rope, "long_factor", dim // 2)
    stated = rope.scaling.get("factor") is not None
    factor = _number(rope, "factor") if stated else _stated_length(rope) / original
    scale = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    if rope.scaling.get("attention_factor") is not None:
        scale = _float(rope, "attention_factor", 1.0)
    chosen = long if seq_len is not None and seq_len > original else short
    return _plain(theta, dim) / chosen, scale


def _proportional(rope: RopeSpec, theta: float, dim: int, seq_len: int | None) -> tuple[Tensor, float]:
    stated = 1.0 if rope.rotary_dim is None else rope.rotary_dim / dim
    proportion = _float(rope, "partial_rotary_factor", stated)
    if not 0.0 <= proportion <= 1.0:
        raise LayerBuildError(
            f"is {proportion}; a proportion is due", key="partial_rotary_factor", got=proportion, due="0 to 1"
        )
    turning = int(proportion * dim // 2)
    inv_freq = torch.zeros(dim // 2, dtype=torch.float64)
    inv_freq[:turning] = _plain(theta, dim)[:turning]
    return inv_freq / (_float(rope, "factor", 0.0) or 1.0), 1.0


_TYPES: dict[str, Callable[[RopeSpec, float, int, int | None], tuple[Tensor, float]]] = {
    "deepseek_yarn": _deepseek_yarn,
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": _default,
    "proportional": _proportional,
    "yarn": _yarn,
}


def _plain(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return torch.pow(torch.tensor(theta, dtype=torch.float64), -exponents)


def _theta(rope: RopeSpec) -> float:
    if rope.theta is None:
        raise LayerBuildError("is not stated, and engines differ in what they assume", key="rope_theta", due="a base")
    if isinstance(rope.theta, bool) or not 0.0 < float(rope.theta) < math.inf:
        raise LayerBuildError(
            f"is {rope.theta}; a positive base is due", key="rope_theta", got=rope.theta, due="a positive number"
        )
    return float(rope.theta)


def _rotary_dim(rope: RopeSpec, head_dim: int | None) -> int:
    whole = rope.rope_type == "proportional" and head_dim is not None
    dim = head_dim if whole or rope.rotary_dim is None else rope.rotary_dim
    if dim is None:
        raise LayerBuildError("is not known, and neither is the head's width", key="rotary_dim", due="an even number")
    if dim <= 0 or dim % 2 or (head_dim is not None and dim > head_dim):
        due = "an even number above 0" + ("" if head_dim is None else f", at most head_dim={head_dim}")
        raise LayerBuildError(f"is {dim}; due is {due}", key="rotary_dim", got=dim, due=due)
    return dim


def _stated_length(rope: RopeSpec) -> int:
    length = rope.max_position_embeddings
    if length is None or length <= 0:
        raise LayerBuildError(
            f"{rope.rope_type} RoPE needs it; got {length}", key="max_position_embeddings", got=length, due="a length"
        )
    return length


def _max_length(rope: RopeSpec) -> int | None:
    stated = rope.max_position_embeddings
    if rope.rope_type in {"linear", "dynamic"}:
        return None if stated is None else max(stated, int(stated * _number(rope, "factor")))
    if rope.rope_type in {"yarn", "deepseek_yarn", "llama3"}:
        stretched = int(_number(rope, "original_max_position_embeddings") * _number(rope, "factor"))
        return stretched if stated is None else max(stated, stretched)
    return stated


def _number(rope: RopeSpec, field: str) -> float:
    value = rope.scaling.get(field)
    if value is None:
        raise LayerBuildError(
            f"is missing; {rope.rope_type} RoPE needs it", key=f"rope_scaling.{field}", due="a positive number"
        )
    number = _as_float(field, value)
    if number <= 0.0:
        raise LayerBuildError(
            f"is {value!r}; it must be positive", key=f"rope_scaling.{field}", got=value, due="a positive number"
        )
    return number


def _float(rope: RopeSpec, field: str, default: float) -> float:
    value = rope.scaling.get(field)
    return default if value is None else _as_float(field, value)


def _as_float(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise LayerBuildError(f"is {value!r}; a number is due", key=f"rope_scaling.{field}", got=value, due="a number")
    return float(value)


def _list(rope: RopeSpec, field: str, length: int) -> Tensor:
    value = rope.scaling.get(field)
    if not isinstance(value, (list, tuple)) or len(value) != length:
        got = len(value) if isinstance(value, (list, tuple)) else value
        raise LayerBuildError(
            f"a list of {length} numbers is due, one per pair of lanes; got {got}",
            key=f"rope_scaling.{field}",
            got=got,
            due=length,
        )
    numbers = [_as_float(field, item) for item in value]
    if min(numbers) <= 0.0:
        raise LayerBuildError("holds a number that is not positive", key=f"rope_scaling.{field}", got=min(numbers))
    return torch.tensor(numbers, dtype=torch.float64)


def _check_positions(positions: Tensor, bound: int | None) -> None:
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise DraftError(
            f"positions are {positions.dtype}; integers are due", key="positions", got=str(positions.dtype), due="int64"
        )
    if positions.numel() == 0:
        return
    least, most = int(positions.min()), int(positions.max())
    if least < 0:
        raise DraftError(f"position {least} is negative", key="positions", got=least, due=">= 0")
    if bound is not None and most >= bound:
        raise DraftError(
            f"position {most} lies beyond the last one served, {bound - 1}", key="positions", got=most, due=f"< {bound}"
        )
