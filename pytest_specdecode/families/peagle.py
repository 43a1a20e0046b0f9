"""P-EAGLE: EAGLE3's build, several layers, and all draft tokens in one pass.

The last accepted position reads the target's taps, as in EAGLE3. Every position after it reads `mask_hidden` [1, 1, K * Ht] in place of
taps, through the same norms and `fc`, and the embedding of `mask_token_id`; position by position the rows are causal, so the layers are
EAGLE3's (`families/eagle3.py` has the formula):

    g_0 = fc(taps), e_0 = embed(token)      g_i = fc(mask_hidden), e_i = embed(mask), i >= 1
    logits_i = lm_head(norm(layers(e_i, g_i)))

Three packagings: SpecForge's `PEagleDraftModel` (which reads no RoPE scaling), speculators' `peagle`, and an EAGLE3 head that sets
`parallel_drafting`.

Sources: SpecForge `specforge/modeling/draft/peagle.py`, speculators `models/peagle`, vLLM `llama_eagle3.py` and
`v1/worker/gpu/spec_decode`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_specdecode.families.base import ConfigView, ExpectedTensor, Family, ReferenceLayer, Signal, TensorSource
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.eagle3 import (
    Eagle3Head,
    Eagle3Layer,
    canonical_eagle3,
    eagle3_tensors,
    parse_eagle3,
    read_attention,
)
from pytest_specdecode.spec import BlockSpec, DraftSpec, LayerSpec, Stated, times

if TYPE_CHECKING:
    import torch

#: Where engines look for the mask token, in vLLM's order.
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


class PEagle(Family):
    """P-EAGLE, and EAGLE3 heads that draft in parallel."""

    name = "peagle"
    title = "P-EAGLE (parallel drafting)"
    packagings: tuple[str, ...] = ("plain", "speculators")
    fused_kv = "a P-EAGLE draft computes the K/V of its own positions; no engine stacks them over layers"
    tiny: Mapping[str, Any] = {
        "architectures": ["PEagleDraftModel"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": 512,
        "draft_vocab_size": 256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "mask_token_id": 511,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 8, 13],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 8, 13], "use_aux_hidden_state": True},
        "num_target_layers": 16,
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """Label, `parallel_drafting` beside an EAGLE3 label, or `mask_hidden`."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if re.search(r"p-?eagle", architecture, re.IGNORECASE)
        ]
        if view.root.text("speculators_model_type") == "peagle":
            found.append(Signal(family=self.name, kind="label", where="speculators_model_type", value="peagle"))
        if view.root.raw("parallel_drafting") is True:
            found.append(Signal(family=self.name, kind="label", where="parallel_drafting", value=True))
        header = view.tensors.get("mask_hidden")
        if header is not None:
            found.append(
                Signal(family=self.name, kind="tensors", where="mask_hidden", value=list(header.shape)),
            )
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """EAGLE3's spec, with the mask token in `block`."""
        return replace(parse_eagle3(view, self.name, read_attention), block=_block(view))

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """EAGLE3's tensors and `mask_hidden`."""
        return (
            *eagle3_tensors(spec),
            ExpectedTensor(
                name="mask_hidden",
                shape=(1, 1, times(spec.taps.count, spec.target_hidden_size)),
                fault="mask-hidden-missing",
            ),
        )

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer, EAGLE3's."""
        return Eagle3Layer(spec, layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> PEagleHead:
        """What stands around the layers."""
        return PEagleHead(spec, source)

    def run_head(self, spec: DraftSpec, head: PEagleHead, states: torch.Tensor) -> Any:
        """The masked positions' hidden states."""
        return head.fuse_block(states.new_zeros(0, len(head.mask_hidden)), len(states))

    def canonical(self, name: str, root: Section | None = None) -> str:
        """As EAGLE3."""
        return canonical_eagle3(name)


class PEagleHead(Eagle3Head):
    """EAGLE3's parts around the layers, and the state that stands in for taps.

    Attributes:
        mask_hidden: [K * Ht].
    """

    def __init__(self, spec: DraftSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import take_named
        from pytest_specdecode.layers.linear import known

        super().__init__(spec, source)
        width = known(times(spec.taps.count, spec.target_hidden_size), "num_aux_hidden_states")
        self.mask_hidden: torch.Tensor = take_named(source, "mask_hidden", (1, 1, width)).flatten()

    def fuse_block(self, taps: torch.Tensor, rows: int) -> torch.Tensor:
        """Hidden states [T + rows, H]: of the positions whose `taps` [T, K * Ht] are known, then of `rows` masked ones."""
        import torch

        return self.fuse(torch.cat([taps, self.mask_hidden.expand(rows, -1)]))


def _block(view: ConfigView) -> BlockSpec:
    nested = view.root.section("dflash_config")
    stated: tuple[Stated, ...] = (*nested.stated("mask_token_id"), *view.root.stated(*MASK_KEYS))
    token = nested.extent("mask_token_id")
    return BlockSpec(
        mask_token_id=view.root.extent(*MASK_KEYS) if token is None else token,
        mask_token_stated=stated,
        is_causal=True,
        sample_from_anchor=True,
        variant="peagle",
    )
