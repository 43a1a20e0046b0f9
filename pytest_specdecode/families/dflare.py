"""DFlare: DFlash in which every layer mixes the taps anew and projects the context by weights of its own.

    c_l = hidden_norm(sum_t softmax(layer_fusion_weights[l])_t * tap_t)      context of layer l; there is no fc
    per layer: k, v of the block by k_proj, v_proj; of the context by k_proj_target, v_proj_target; k_norm on both
    the rest is DFlash's

The layers read different contexts, so one GEMM over one context does not give their K/V.

Source: AngelSlim `train/models/draft/qwen_dflare.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_specdecode.families.base import ConfigView, ExpectedTensor, TensorSource
from pytest_specdecode.families.dflash import DFlash, DFlashModel
from pytest_specdecode.spec import DraftSpec, GQASpec, LayerSpec

if TYPE_CHECKING:
    import torch


class DFlare(DFlash):
    """DFlare."""

    name = "dflare"
    title = "DFlare"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = "DFlare mixes the taps anew for every layer, so no one context vector serves a stack of all layers"
    label = r"DFlare"
    own_tensors = ("layer_fusion_weights", "layers.0.self_attn.k_proj_target.")
    tiny: Mapping[str, Any] = {**DFlash.tiny, "architectures": ["QwenDFlareDraftModel"]}

    def build_model(self, spec: DraftSpec, source: TensorSource) -> DFlareModel:
        """The whole backbone."""
        return DFlareModel(spec, [self.build_layer(spec, layer, source) for layer in spec.layers], source)

    def _layer(self, view: ConfigView, index: int) -> LayerSpec:
        layer = super()._layer(view, index)
        assert isinstance(layer.attention, GQASpec)
        return replace(layer, attention=replace(layer.attention, target_kv=True))

    def _fusion_tensors(self, spec: DraftSpec) -> Iterator[ExpectedTensor]:
        yield ExpectedTensor(
            name="layer_fusion_weights", shape=(spec.num_hidden_layers, spec.taps.count), fault="fc-missing"
        )


class DFlareModel(DFlashModel):
    """DFlash's backbone with a context per layer.

    Attributes:
        fusion: `[L, K]`, the softmaxed weights of the taps.
    """

    def _fc(self, build: Any, spec: DraftSpec, source: TensorSource) -> Any:
        from pytest_specdecode.families.building import take_named
        from pytest_specdecode.layers.linear import known

        shape = (known(spec.num_hidden_layers, "num_hidden_layers"), known(spec.taps.count, "target_layer_ids"))
        self.fusion = take_named(source, "layer_fusion_weights", shape).softmax(dim=-1)
        return None

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """The contexts `[..., C, L, H]` of all layers, of `taps` `[..., C, K, H]`."""
        out: torch.Tensor = self.hidden_norm(self.fusion @ taps)
        return out

    def layer_context(self, context: torch.Tensor, layer: int) -> torch.Tensor:
        """The context `[..., C, H]` of layer `layer`."""
        return context[..., layer, :]
