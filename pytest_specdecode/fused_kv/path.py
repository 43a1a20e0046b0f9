"""`FusedKV`: the K and V of every draft layer from one GEMM and one kernel launch.

It has the call shape of SGLang's `FusedKVMaterializeHelper`, so that one contract can test both, and differs from it on purpose where
that one goes wrong in silence: it refuses what the stack cannot serve (`stack.py`), checks positions against the table, reads strided
positions by their stride, adds a projection bias, notices changed weights, refuses a rope table that grew wrongly, and hands out fresh
tensors.

Where the numbers are rounded: the projection, bias included, once to the weight's dtype by the GEMM (as `nn.Linear` does it); K once more
at the store, after norm and rotation in float32; V not again, or once where it is scaled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_specdecode.errors import InputError, StackRangeError, StackUnsupportedError
from pytest_specdecode.fused_kv.kernel import FLOATS, INTEGERS, fused_norm_rope
from pytest_specdecode.fused_kv.stack import (
    LayerFacts,
    facts_of,
    first_differing_row,
    norm_eps_of,
    norm_kind_of,
    rope_facts,
    validate,
    value_scale_of,
)
from pytest_specdecode.launch import triton_available

WriteLayerKV = Callable[[int, Tensor, Tensor], object]


class FusedKV:
    """The stacked K/V path of a draft.

    Args:
        layers: `layer.self_attn.{qkv_proj, q_size, kv_size, num_kv_heads, head_dim, rotary_emb, k_norm}` is read; see `facts_of`.
        rotary_emb: the rotary object that serves all layers.
        num_kv_heads, head_dim: what every layer must have.
        device: where the stacked weights live and the work is done.
        max_position_hint: positions below this must be in the rope table from the start; it is grown if it can grow.
        backend: `triton`, `eager` (plain torch, same roundings), or `auto`: triton where it is installed.

    Attributes:
        num_layers, rotary_dim, hidden_size, dtype: of the stack.
        backend: `triton` or `eager`, as chosen.
        facts: one LayerFacts per layer.

    Raises:
        StackMismatchError, StackUnsupportedError: the first reason why these layers are no stack; carries axis, expected, got, layer.
        StackRangeError: the rope table is shorter than the hint and does not grow.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        rotary_emb: Any,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        max_position_hint: int | None = None,
        *,
        backend: Literal["auto", "triton", "eager"] = "auto",
    ) -> None:
        self.rotary_emb = rotary_emb
        self.num_kv_heads = int(num_kv_heads)
        self.head_dim = int(head_dim)
        self.device = torch.device(device)
        self.max_position_hint = max_position_hint
        self.rotary_dim = int(getattr(rotary_emb, "rotary_dim", self.head_dim))
        self.backend = _chosen(backend)
        self.refresh_weights(layers)
        self._table: Tensor = rotary_emb.cos_sin_cache
        if max_position_hint is not None:
            self._reach(max(max_position_hint - 1, 0), served=False)

    def refresh_weights(self, layers: Sequence[Any]) -> None:
        """Take the weights anew, from these layers, which are validated as at construction.

        Weights changed in place are noticed by `materialize` without this, except where they were written through `.data`.
        """
        for index, layer in enumerate(layers):
            _check_attributes(layer, index)
        facts = tuple(facts_of(layer) for layer in layers)
        self._validate(facts)
        for index, fact in enumerate(facts):
            if fact.norm_eps is None:
                raise StackUnsupportedError(
                    "k_norm without an epsilon is not supported for fused KV path: "
                    f"neither variance_epsilon nor eps at layer {index}.",
                    axis="norm-eps",
                    layer=index,
                )
        self.facts = facts
        self._layers = tuple(layers)
        self._stack()

    def materialize(self, ctx_hidden: Tensor, positions: Tensor, write_layer_kv: WriteLayerKV) -> None:
        """K and V of the context, handed over layer by layer.

        Args:
            ctx_hidden: `[T, hidden_size]`; cast to the weights' dtype.
            positions: T integers of any shape and stride, each >= 0 and in the rope table (which is grown if it can grow).
            write_layer_kv: called with (layer index, K, V) for layer 0, 1, …; K and V are `[T, num_kv_heads, head_dim]` in the
                weights' dtype, fresh for each call of `materialize`. Not called where T is 0. K- and V-cache scales are the callback's.

        Raises:
            InputError: ctx_hidden or positions do not fit.
            StackRangeError: the rope table is too short for the positions.
            StackUnsupportedError: the table grew, and the new rows do not continue the old ones.
        """
        pair = self.compute(ctx_hidden, positions)
        if pair[0].shape[1] == 0:
            return
        for layer, (k, v) in enumerate(zip(*pair, strict=True)):
            write_layer_kv(layer, k, v)

    @torch.no_grad()
    def compute(self, ctx_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `materialize`, but returned: K and V, each `[L, T, num_kv_heads, head_dim]`."""
        if ctx_hidden.ndim != 2:
            raise InputError(
                f"ctx_hidden must be 2D [total_ctx, hidden_size] for fused KV materialization: got {tuple(ctx_hidden.shape)}.",
                axis="ctx_hidden",
                expected="[total_ctx, hidden_size]",
                got=tuple(ctx_hidden.shape),
            )
        tokens, width = ctx_hidden.shape
        if tokens == 0:
            shape = (self.num_layers, 0, self.num_kv_heads, self.head_dim)
            return torch.empty(shape, dtype=self.dtype, device=self.device), torch.empty(
                shape, dtype=self.dtype, device=self.device
            )
        positions = positions.reshape(-1)
        if positions.shape[0] != tokens:
            raise InputError(
                "positions must match ctx_hidden token count for fused KV materialization: "
                f"positions={positions.shape[0]}, total_ctx={tokens}.",
                axis="positions",
                expected=tokens,
                got=positions.shape[0],
            )
        if width != self.hidden_size or not ctx_hidden.is_floating_point():
            raise InputError(
                f"ctx_hidden must be floating and {self.hidden_size} wide for fused KV materialization: "
                f"got {ctx_hidden.dtype}, {width} wide.",
                axis="ctx_hidden",
                expected=self.hidden_size,
                got=width,
            )
        self._check_positions(positions)
        if self._weights_changed():
            self.refresh_weights(self._layers)

        kv = self.project(ctx_hidden.to(self.device, self.dtype))
        positions = positions.to(self.device)
        table = self._table.to(self.device)
        if table.dtype not in FLOATS:
            table = table.float()
        run = fused_norm_rope if self.backend == "triton" else _eager_norm_rope
        return run(
            kv,
            positions,
            self._norm_weight,
            self._eps,
            table,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            value_scale=self.value_scale,
        )

    # --- weights ---

    def _validate(self, facts: tuple[LayerFacts, ...]) -> None:
        validate(
            facts,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            is_neox_style=bool(getattr(self.rotary_emb, "is_neox_style", True)),
            shared_rope=rope_facts(self.rotary_emb, self.head_dim),
        )

    def _stack(self) -> None:
        attns = [layer.self_attn for layer in self._layers]
        weights, biases, norms = [], [], []
        for attn in attns:
            rows = slice(attn.q_size, attn.q_size + 2 * self.num_kv_heads * self.head_dim)
            weights.append(attn.qkv_proj.weight.detach()[rows].to(self.device))
            bias = getattr(attn.qkv_proj, "bias", None)
            if bias is not None:
                biases.append(bias.detach()[rows].to(self.device, weights[0].dtype))
            norm = attn.k_norm.weight.detach().to(self.device, torch.float32)
            norms.append(1.0 + norm if norm_kind_of(attn.k_norm) == "gemma" else norm)
        self.num_layers = len(attns)
        self.hidden_size = int(weights[0].shape[1])
        self.dtype = weights[0].dtype
        self.value_scale = value_scale_of(attns[0])
        self._weight = torch.cat(weights).T.contiguous()
        self._bias = torch.cat(biases) if biases else None
        self._norm_weight = torch.stack(norms)
        self._eps = torch.tensor([norm_eps_of(attn.k_norm) for attn in attns], dtype=torch.float32, device=self.device)
        self._versions = self._weight_versions()

    def project(self, ctx_hidden: Tensor) -> Tensor:
        """The stacked projection alone, bias included: `[T, hidden_size]` in the stack's dtype and device to
        `[T, L, 2 * num_kv_heads * head_dim]`, per layer the K heads, then the V heads. What V must equal bit for bit."""
        flat = (
            torch.mm(ctx_hidden, self._weight)
            if self._bias is None
            else torch.addmm(self._bias, ctx_hidden, self._weight)
        )
        return flat.view(ctx_hidden.shape[0], self.num_layers, 2 * self.num_kv_heads * self.head_dim)

    def _weight_versions(self) -> list[tuple[int, int, int]]:
        tensors = []
        for layer in self._layers:
            attn = layer.self_attn
            tensors += [attn.qkv_proj.weight, getattr(attn.qkv_proj, "bias", None), attn.k_norm.weight]
        return [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors if t is not None]

    def _weights_changed(self) -> bool:
        return self._weight_versions() != self._versions

    # --- positions and the table ---

    def _check_positions(self, positions: Tensor) -> None:
        if positions.dtype not in INTEGERS:
            raise InputError(
                f"positions must be integers for fused KV materialization: got {positions.dtype}.",
                axis="positions",
                expected="int64",
                got=positions.dtype,
            )
        lowest, highest = (int(bound) for bound in torch.aminmax(positions))
        if lowest < 0:
            raise InputError(
                f"positions must not be negative for fused KV materialization: got {lowest}.",
                axis="positions",
                expected=">= 0",
                got=lowest,
            )
        self._reach(highest, served=True)

    def _reach(self, position: int, *, served: bool) -> None:
        """See to it that row `position` of the table exists, growing the table if it can and checking what it grew."""
        self._accept(self.rotary_emb.cos_sin_cache, served)
        grow = getattr(self.rotary_emb, "_ensure_cos_sin_cache_length", None)
        if position >= self._table.shape[0] and grow is not None:
            grow(position)
            self._accept(self.rotary_emb.cos_sin_cache, served)
        rows = self._table.shape[0]
        if position >= rows:
            raise StackRangeError(
                "RoPE cos/sin cache is too short for fused KV materialization: "
                f"max_position={position}, cache_len={rows}.",
                axis="positions",
                expected=rows - 1,
                got=position,
            )

    def _accept(self, table: Tensor, served: bool) -> None:
        """Take over the rotary object's table where it is another than before, whoever made it grow, or refuse it and put the old back."""
        known = self._table
        if table is known or (table.data_ptr() == known.data_ptr() and table.shape == known.shape):
            return
        problem = _growth_problem(known, table, served)
        if problem is None:
            self._table = table
            return
        with contextlib.suppress(AttributeError):  # a table that is made on demand has no setter
            self.rotary_emb.cos_sin_cache = known
        raise StackUnsupportedError(
            f"RoPE cos/sin cache growth is not supported for fused KV path: {problem}.",
            axis="rope-scaling",
            expected="rows that continue the table",
            got=problem,
        )


def _chosen(backend: str) -> Literal["triton", "eager"]:
    if backend == "auto":
        return "triton" if triton_available() else "eager"
    if backend not in ("triton", "eager"):
        raise InputError(
            f"backend must be auto, triton or eager; got {backend!r}",
            axis="backend",
            expected=("auto", "triton", "eager"),
            got=backend,
        )
    return "triton" if backend == "triton" else "eager"


def _check_attributes(layer: Any, index: int) -> None:
    attn = getattr(layer, "self_attn", None)
    for name in ("qkv_proj", "q_size", "kv_size", "num_kv_heads", "head_dim", "rotary_emb"):
        if getattr(attn, name, None) is None:
            raise StackUnsupportedError(
                f"a layer without self_attn.{name} is not supported for fused KV path: layer {index} is {type(layer).__name__}.",
                axis="layers",
                expected=f"self_attn.{name}",
                layer=index,
            )


def _growth_problem(before: Tensor, after: Tensor, served: bool) -> str | None:
    """What is wrong with a grown table, or None.

    Turning by a + b is turning by a, then by b, whatever the frequencies; so old rows prove new ones without knowing the formula.
    With m the magnitude of a pair (YaRN's mscale): row[a + b] = row[a] * row[b] / m as complex numbers.
    """
    old, new = before.shape[0], after.shape[0]
    if after.shape[1:] != before.shape[1:]:
        return f"its width changed from {before.shape[1]} to {after.shape[1]}"
    if served and first_differing_row(before, after) is not None:
        return f"it changed row {first_differing_row(before, after)}, which may have been used already"
    known = new if first_differing_row(before, after) is not None else old
    if known < 2:
        return "its one old row does not tell the frequencies" if new > old == 1 else None
    table = torch.complex(*(part.contiguous() for part in after.detach().cpu().double().chunk(2, dim=-1)))
    magnitude = table[0].abs().clamp_min(torch.finfo(torch.float64).tiny)
    eps = torch.finfo(after.dtype).eps
    while known < new:
        # Rows [known, top) from rows [0, known): the last known one turned further by 1, 2, …
        top = min(new, 2 * known - 1)
        due = table[known - 1] * table[1 : top - known + 1] / magnitude
        distance = ((table[known:top] - due).abs() / magnitude).amax(dim=-1)
        positions = torch.arange(known, top, dtype=torch.float64)
        wrong = (distance > 6 * eps + 8 * torch.finfo(torch.float32).eps * (positions + 1)).nonzero()
        if len(wrong):
            row = known + int(wrong[0])
            return f"row {row} does not continue rows 0 to {old - 1} (a scaled table extended without its scaling?)"
        known = top
    return None


# --- the same without triton ------------------------------------------------------------------------------------------------------------


def _eager_norm_rope(
    kv: Tensor,
    positions: Tensor,
    k_norm_weight: Tensor,
    eps: Tensor,
    cos_sin_cache: Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    value_scale: float,
) -> tuple[Tensor, Tensor]:
    """`fused_norm_rope` in plain torch: float32 between the load and the one rounding at the end."""
    tokens, layers = kv.shape[:2]
    k, v = kv.view(tokens, layers, 2, num_kv_heads, head_dim).permute(2, 1, 0, 3, 4).unbind(0)
    exact = k.float()
    inverse = torch.rsqrt(exact.square().sum(dim=-1, keepdim=True) / head_dim + eps[:, None, None, None])
    normed = exact * inverse * k_norm_weight[:, None, None, :].float()
    cos, sin = cos_sin_cache[positions.long()].float()[None, :, None, :].chunk(2, dim=-1)
    first, second = normed[..., :rotary_dim].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, normed[..., rotary_dim:]], dim=-1)
    values = v.contiguous() if value_scale == 1.0 else (v.float() * value_scale).to(v.dtype)
    return turned.to(kv.dtype), values
