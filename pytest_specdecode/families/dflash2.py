"""DFlash2: DFlash with a convolution along the block around each sublayer, and a selector over the best candidates.

    per layer: n, kernels = attention_conv.prepare(input_layernorm(x));  x += attention_conv.finish(attention(n, context), kernels)
               m, kernels = mlp_conv.prepare(post_attention_layernorm(x)); x += mlp_conv.finish(mlp(m), kernels)
    drafts = candidate_selector(logits, h, anchor): among each row's top candidates the one that scores best beside its predecessor

The context goes around the convolutions, so its stacked K/V path is DFlash's. A convolution sees rows of its own block only; rows before
the anchor count as zero. The selector's codebooks are stored with and without `.weight`.

Sources: z-lab/dflash 0.1.0 `dflash/model.py`, speculators 0.9.0 `models/dflash2`, vLLM `qwen3_dflash2.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_specdecode.errors import ConfigError, LayerBuildError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, ReferenceLayer, TensorSource, unstated
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.dflash import DFlash, DFlashLayer
from pytest_specdecode.spec import DraftSpec, Extent, LayerSpec, times

if TYPE_CHECKING:
    import torch

_CODEBOOK = re.compile(r"(candidate_selector\.\w+_codebook)\.weight$")


@dataclass(frozen=True, kw_only=True)
class DFlash2Options:
    """What DFlash2 states beyond DFlash.

    Attributes:
        conv_kernel_size: rows that a convolution sees.
        conv_group_size: channels that share a dynamic kernel; divides H.
        selector_rank, selector_top_k: lanes of the selector's codebooks, and candidates per row.
    """

    conv_kernel_size: Extent = None
    conv_group_size: Extent = None
    selector_rank: Extent = None
    selector_top_k: Extent = None


class DFlash2(DFlash):
    """DFlash2, plain and in the speculators packaging."""

    name = "dflash2"
    title = "DFlash2"
    packagings: tuple[str, ...] = ("plain", "speculators")
    label = r"^DFlash2"
    own_tensors = ("candidate_selector.", "layers.0.attention_conv.", "layers.0.mlp_conv.")
    own_keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    sliding_non_causal: ClassVar[bool] = True
    tiny: Mapping[str, Any] = {
        **DFlash.tiny,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            **DFlash.tiny["dflash_config"],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 16,
            "selector_top_k": 4,
        },
    }

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer, with its two convolutions."""
        return DFlash2Layer(spec, layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Any:
        """The `CandidateSelector`."""
        from pytest_specdecode.families.building import prefixed
        from pytest_specdecode.layers.linear import known
        from pytest_specdecode.layers.selector import CandidateSelector

        options = _options(spec)
        sizes = {
            "hidden_size": known(spec.hidden_size, "hidden_size"),
            "vocab_size": known(spec.vocabulary.vocab_size, "vocab_size"),
            "rank": known(options.selector_rank, "selector_rank"),
            "top_k": known(options.selector_top_k, "selector_top_k"),
        }
        if (fault := _top_k_fault(spec)) is not None:
            raise LayerBuildError(fault.message, key=fault.key, got=fault.got, due=fault.due)
        with prefixed("candidate_selector"):
            return CandidateSelector(source.under("candidate_selector"), **sizes)

    def run_head(self, spec: DraftSpec, head: Any, states: torch.Tensor) -> Any:
        """The ids chosen for rows whose logits are all alike."""
        return head(states.new_zeros(len(states), len(head.successor_codebook)), states, states.new_zeros(()).long())

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """All four keys must be stated (a lenient reader takes a file without them for DFlash), and groups must divide H."""
        options, hidden = _options(spec), spec.hidden_size
        found = unstated(**{f"dflash_config__{key}": getattr(options, key) for key in self.own_keys})
        group = options.conv_group_size
        if hidden is not None and group is not None and (group < 1 or hidden % group):
            found.append(
                ConfigError(
                    f"{group} channels to a group do not divide hidden_size {hidden}",
                    key="dflash_config.conv_group_size",
                    got=group,
                    due=f"a divisor of {hidden}",
                )
            )
        if (fault := _top_k_fault(spec)) is not None:
            found.append(fault)
        return tuple(found)

    def canonical(self, name: str, root: Section | None = None) -> str:
        """DFlash's aliases, and the codebooks without `.weight`."""
        return _CODEBOOK.sub(r"\1", super().canonical(name, root))

    def _options(self, view: ConfigView) -> DFlash2Options:
        nested = view.root.section("dflash_config")

        def stated(key: str) -> Extent:
            value = nested.extent(key)
            return view.root.extent(key) if value is None else value

        return DFlash2Options(**{key: stated(key) for key in self.own_keys})

    def _layer_tensors(self, spec: DraftSpec, layer: LayerSpec) -> Iterator[ExpectedTensor]:
        options, hidden = _options(spec), spec.hidden_size
        group = options.conv_group_size
        groups = None if hidden is None or not group or hidden % group else hidden // group
        for side in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer.index}.{side}"
            yield ExpectedTensor(
                name=f"{prefix}.base_kernel", shape=(2, options.conv_kernel_size, hidden), layer=layer.index
            )
            yield ExpectedTensor(
                name=f"{prefix}.kernel_projection.weight",
                shape=(times(2, options.conv_kernel_size, groups), hidden),
                layer=layer.index,
            )

    def _head_tensors(self, spec: DraftSpec) -> Iterator[ExpectedTensor]:
        rank = _options(spec).selector_rank
        for name in ("predecessor_codebook", "successor_codebook"):
            yield ExpectedTensor(name=f"candidate_selector.{name}", shape=(spec.vocabulary.vocab_size, rank))
        yield ExpectedTensor(name="candidate_selector.hidden_projection.weight", shape=(rank, spec.hidden_size))


class DFlash2Layer(DFlashLayer):
    """One DFlash2 layer; see the module's formula."""

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        super().__init__(spec, layer, source)
        self.attention_conv = _convolution(spec, layer, source, "attention_conv")
        self.mlp_conv = _convolution(spec, layer, source, "mlp_conv")

    def forward(
        self,
        block: torch.Tensor,
        positions: torch.Tensor,
        context: torch.Tensor | None = None,
        context_positions: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """The block's new states; arguments as for `DFlashLayer.forward`, the rows of one call being one block."""
        states, kernels = self.attention_conv.prepare(self.input_layernorm(block))
        attended = self.attention(states, positions, context, context_positions, cache)
        block = block + self.attention_conv.finish(attended, kernels)
        states, kernels = self.mlp_conv.prepare(self.post_attention_layernorm(block))
        out: torch.Tensor = block + self.mlp_conv.finish(self.mlp(states), kernels)
        return out


def _convolution(spec: DraftSpec, layer: LayerSpec, source: TensorSource, name: str) -> Any:
    from pytest_specdecode.families.building import prefixed
    from pytest_specdecode.layers.conv import GroupedDynamicConv
    from pytest_specdecode.layers.linear import known

    options, prefix = _options(spec), f"layers.{layer.index}.{name}"
    sizes = {
        "hidden_size": known(spec.hidden_size, "hidden_size"),
        "taps": known(options.conv_kernel_size, "conv_kernel_size"),
        "group_size": known(options.conv_group_size, "conv_group_size"),
    }
    with prefixed(prefix):
        return GroupedDynamicConv(source.under(prefix), **sizes)


def _top_k_fault(spec: DraftSpec) -> ConfigError | None:
    top_k, vocab = _options(spec).selector_top_k, spec.vocabulary.vocab_size
    if top_k is None or vocab is None or 0 < top_k <= vocab:
        return None
    due = f"from 1 to {vocab}"
    return ConfigError(f"{top_k} candidates of {vocab} tokens", key="dflash_config.selector_top_k", got=top_k, due=due)


def _options(spec: DraftSpec) -> DFlash2Options:
    if not isinstance(spec.options, DFlash2Options):
        raise LayerBuildError("the spec holds no DFlash2 options")
    return spec.options
