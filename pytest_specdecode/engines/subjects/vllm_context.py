"""vLLM's context kernel of DFlash2 drafts in the shape of a stacked K/V path.

vLLM publishes it as a function: `store_context_kv` norms and turns the keys of all layers and scatters keys and values into their paged
caches. The model around it cannot be loaded without the rest of vLLM, so what it does before the call is done here: the rows of K and V of
every layer stacked into one GEMM without a bias, the K norms' weights stacked, epsilon and rope table taken from layer 0. All of that is
taken once, at construction, and anew by `refresh_weights`, as vLLM takes it after loading weights.

Three things differ from vLLM. The model takes bfloat16 only, with a table of that dtype; here every dtype goes through, with the table that
the rotary object holds, so that the kernel can be asked more than the model asks it. What the model asserts of layer 0's rope, that the
whole head is turned, is a NotImplementedError here. And vLLM's table has all rows of the model's length from the start; here it is made as
long as a call needs it, up to that length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pytest_specdecode.engines.subjects.installed import attribute_of

_MODULE = "vllm.models.beam.nvidia.dflash2_context_ops"

#: Tokens in a page of the cache.
PAGE = 16


def vllm_path() -> Callable[..., Any]:
    """VLLMContextKV, once it is known that the function is there.

    Raises:
        MissingDependencyError: vllm is not installed, or has no such file or function.
    """
    _store_context_kv()
    return VLLMContextKV


class VLLMContextKV:
    """The call shape of a stacked K/V path around vLLM's `store_context_kv`.

    Args:
        layers: `layer.self_attn.{qkv_proj.weight, q_size, k_norm}` is read.
        rotary_emb: the rotary object that serves all layers; its `cos_sin_cache` is handed over.
        num_kv_heads, head_dim: of every layer; not compared with what the layers say.
        device: where the weights lie.
        max_position_hint: not used.

    Raises:
        NotImplementedError: a part of the head is not turned, which vLLM asserts it is.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        rotary_emb: Any,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        max_position_hint: int | None = None,
    ) -> None:
        if rotary_emb.rotary_dim != head_dim:
            raise NotImplementedError(
                f"vLLM's context kernel turns whole heads: rotary_dim is {rotary_emb.rotary_dim}, head_dim is {head_dim}"
            )
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.device = torch.device(device)
        self.rotary_emb = rotary_emb
        self._length: int | None = getattr(rotary_emb, "max_length", None)
        self.refresh_weights(layers)

    def refresh_weights(self, layers: Sequence[Any]) -> None:
        """Take the layers' weights anew."""
        stack = [layer.self_attn for layer in layers]
        self.num_layers = len(stack)
        self._weight = torch.cat([attn.qkv_proj.weight.detach()[attn.q_size :] for attn in stack])
        self._norm_weight = torch.stack([attn.k_norm.weight.detach() for attn in stack]).contiguous()
        self._eps = float(stack[0].k_norm.variance_epsilon)

    @torch.no_grad()
    def materialize(
        self, ctx_hidden: Tensor, positions: Tensor, write_layer_kv: Callable[[int, Tensor, Tensor], object]
    ) -> None:
        """K and V of the context, stored by vLLM's kernel into caches of its layout, and handed over from there as views.

        Args:
            ctx_hidden: `[T, hidden_size]` in the weights' dtype.
            positions: `[T]`; the kernel takes them as unit stride and compares them with nothing.
            write_layer_kv: called with (layer index, K, V), each `[T, num_kv_heads, head_dim]`; not called where T is 0.
        """
        tokens = ctx_hidden.shape[0]
        if tokens == 0:
            return
        width = self.head_dim
        kv = F.linear(ctx_hidden, self._weight).view(tokens, self.num_layers, 2, self.num_kv_heads, width)
        pages = -(-tokens // PAGE) + 1
        # Every layer's cache is a part of one tensor, which is what the kernel is told of them: so a guard knows where they end.
        memory = torch.empty(
            (self.num_layers * pages, PAGE, self.num_kv_heads, 2 * width), dtype=kv.dtype, device=self.device
        )
        caches = memory.transpose(1, 2)
        addresses = [memory[layer * pages].data_ptr() for layer in range(self.num_layers)]
        # From the second page on, so that a slot is no row's index.
        slots = torch.arange(PAGE, PAGE + tokens, device=self.device)
        _store_context_kv()(
            kv,
            self._norm_weight,
            positions,
            self._table(positions),
            torch.tensor(addresses, dtype=torch.int64, device=self.device),
            slots,
            caches,
            self._eps,
        )
        rows = memory.view(self.num_layers, pages * PAGE, self.num_kv_heads, 2 * width)[:, PAGE : PAGE + tokens]
        for layer in range(self.num_layers):
            write_layer_kv(layer, rows[layer, ..., :width], rows[layer, ..., width:])

    def _table(self, positions: Tensor) -> Tensor:
        """The rope table with a row for each of the positions, as far as the rotary object's length goes."""
        grow, length = getattr(self.rotary_emb, "_ensure_cos_sin_cache_length", None), self._length
        if grow is not None:
            last = int(positions.max())
            grow(last if length is None else min(last, length - 1))
        return self.rotary_emb.cos_sin_cache  # type: ignore[no-any-return]


@functools.cache
def _store_context_kv() -> Callable[..., None]:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        stand_ins: dict[str, dict[str, Any]] = {}
    else:
        stand_ins = {"vllm.triton_utils": {"tl": tl, "triton": triton}}
    return attribute_of("vllm", (_MODULE,), "store_context_kv", stand_ins)  # type: ignore[no-any-return]
