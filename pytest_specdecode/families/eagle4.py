"""EAGLE-4 (eagle-harness): one EAGLE3.1 layer with a window of its own and a low-rank head that picks the candidates.

`families/eagle3.py` has the layer's formula; `fc_norm` and `norm_output` are EAGLE3.1's. Two forms of the layer's input:

    plain       n = [input_layernorm(embed), hidden_norm(g)] goes to q, k and v; the residual is g
    attn_norm   r = eh_proj(n), pre_attention_layernorm(r) goes to q, k and v, H wide; the residual is r

The head never computes all logits. For a normed output h [H]:

    candidates = the `num_candidates` largest of  efficient_lm_head @ (efficient_lm_head_down_proj @ h)      [V, rank] and [rank, H]
    logits     = lm_head[candidates] @ h

The two factors may be in the file or be made at load from the head's SVD. The window counts the query itself; explicit `layer_types`
win over `use_sliding_window`, and a `sliding_window` alone turns it on. A layer without RoPE (`use_rope` false, `position_embedding_type`
none, `partial_rotary_factor` 0: any of them) leaves q and k as they are.

With `enable_moe` the MLP is a mixture of experts under a sigmoid router over bias-corrected scores, `moe_architecture` one of

    nemotron_latent_relu2   Nemotron-H's: experts down(relu(up(x))^2) in a latent space, between `fc1_latent_proj` and `fc2_latent_proj`
    sparse_swiglu           gated experts over H, the default of a file that names none. No engine builds it; its keys are DeepSeek-V3's
                            and so, here, are its tensors

Sources: eagle-harness 0.1.3 `models/eagle4_config.py`, `models/eagle4_structure.py`, `models/low_rank_head.py`,
`sglang/models/llama_eagle4.py`, `vllm/models.py`; `NemotronHMoE` of sglang, vLLM and transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError
from pytest_specdecode.families.base import (
    ConfigView,
    ExpectedTensor,
    Family,
    ReferenceLayer,
    Signal,
    TensorSource,
    unstated,
)
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.eagle3 import (
    FULL,
    SLIDING,
    Eagle3Head,
    Eagle3Layer,
    canonical_eagle3,
    eagle3_tensors,
    parse_eagle3,
    read_attention,
)
from pytest_specdecode.families.tensors import norm
from pytest_specdecode.spec import DraftSpec, Extent, GQASpec, LayerSpec, MoESpec, times

if TYPE_CHECKING:
    import torch


#: The mixture of experts of Nemotron-H, in a latent space.
LATENT = "nemotron_latent_relu2"


@dataclass(frozen=True, kw_only=True)
class Eagle4Options:
    """What EAGLE-4 adds to EAGLE3.1.

    Attributes:
        head_type: `low_rank`, `weighted_low_rank`, or None where the file states no efficient head.
        rank: columns of the score head.
        num_candidates: ids whose logits are computed.
        attn_norm: the layer's input goes through `eh_proj` and a norm of its own.
        uses_rope: whether queries and keys rotate.
        experts: the architecture of a mixture-of-experts MLP as stated, or None for a dense one.
        shared_experts: experts beside those that every token passes.
    """

    head_type: str | None = None
    rank: Extent = None
    num_candidates: Extent = None
    attn_norm: bool = False
    uses_rope: bool = True
    experts: str | None = None
    shared_experts: int = 0


class Eagle4(Family):
    """EAGLE-4."""

    name = "eagle4"
    title = "EAGLE-4 (eagle-harness)"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = "an EAGLE-4 draft has one layer and computes the K/V of its own steps"
    most_layers = 1
    tiny: Mapping[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle4"],
        "model_type": "llama",
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 512,
        "draft_vocab_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
        "layer_types": ["sliding_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
        "fc_norm": True,
        "norm_output": True,
        "num_aux_hidden_states": 3,
        "num_target_layers": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 31, 59], "use_aux_hidden_state": True},
        "efficient_lm_head_config": {"type": "low_rank", "rank": 16, "num_candidates": 32},
        "torch_dtype": "bfloat16",
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """Label, the low-rank head's tensors, or its configuration."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if re.search(r"eagle-?4", architecture, re.IGNORECASE)
        ]
        header = view.tensors.get("efficient_lm_head.weight")
        if header is not None:
            where = "efficient_lm_head.weight"
            found.append(Signal(family=self.name, kind="tensors", where=where, value=list(header.shape)))
        if isinstance(view.root.raw("efficient_lm_head_config"), Mapping):
            where = "efficient_lm_head_config"
            found.append(Signal(family=self.name, kind="keys", where=where, value=view.root.raw(where)))
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """EAGLE3's spec with the window as EAGLE-4 reads it, and the head's options."""
        options = _options(view)

        def attention(view: ConfigView, index: int) -> GQASpec:
            found = read_attention(view, index)
            width = view.layer.extent("hidden_size") if options.attn_norm else found.in_features
            window = _window(view, index)
            return replace(found, in_features=width, sliding_window=window, rotates=options.uses_rope)

        spec = parse_eagle3(view, self.name, attention)
        flags = spec.eagle3
        if flags is not None and view.root.flag("enable_fc_norm"):
            flags = replace(flags, fc_norm=True)
        layers = tuple(
            replace(
                layer,
                layer_type=FULL if _window(view, layer.index) is None else SLIDING,
                moe=None if options.experts is None else _moe(view, latent=options.experts == LATENT),
            )
            for layer in spec.layers
        )
        return replace(spec, layers=layers, eagle3=flags, options=options)

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """EAGLE3's tensors, the factors of the head, and what `attn_norm` adds."""
        return (*eagle3_tensors(spec), *_own_tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer."""
        return Eagle4Layer(spec, layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Eagle4Head:
        """What stands around the layer."""
        return Eagle4Head(spec, source)

    def run_head(self, spec: DraftSpec, head: Eagle4Head, states: torch.Tensor) -> Any:
        """The candidates, where the file holds what finds them."""
        whole = head.down_proj is not None and head.scores is not None and head.lm_head is not None
        return head.candidates(states) if whole else None

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """Sizes of the experts that the file leaves open."""
        moe = next((layer.moe for layer in spec.layers), None)
        if moe is None:
            return ()
        keys = {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            **({"moe_latent_size": moe.latent_size} if moe.latent else {}),
            **(
                {"moe_shared_expert_intermediate_size": moe.shared_intermediate_size}
                if _of(spec).shared_experts
                else {}
            ),
        }
        return tuple(unstated(**keys))

    def canonical(self, name: str, root: Section | None = None) -> str:
        """As EAGLE3, and `fc.linear` for `fc`."""
        name = canonical_eagle3(name)
        return "fc.weight" if name == "fc.linear.weight" else name


class Eagle4Layer(Eagle3Layer):
    """The layer in either of its forms; see the module's formula."""

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_norm, take_named
        from pytest_specdecode.layers import Linear

        options = _of(spec)
        super().__init__(spec, layer, source)
        self.eh_proj: Linear | None = None
        if options.attn_norm:
            prefix, hidden = f"layers.{layer.index}", spec.hidden_size
            assert hidden is not None
            weight = take_named(source, f"{prefix}.eh_proj.weight", (hidden, 2 * hidden))
            self.eh_proj = Linear(weight, name=f"{prefix}.eh_proj.weight")
            self.pre_attention_layernorm = build_norm(layer, source, f"{prefix}.pre_attention_layernorm")

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        """The new hidden state z; arguments as EAGLE3's."""
        if self.eh_proj is None or self.hidden_norm is None:
            return super().forward(embeds, hidden, positions, cache)
        import torch

        residual = self.eh_proj(torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1))
        attended = residual + self.self_attn(self.pre_attention_layernorm(residual), positions, cache=cache)
        out: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


class Eagle4Head(Eagle3Head):
    """EAGLE3's parts around the layer, and the head that scores candidates only.

    Attributes:
        down_proj, scores: Linear [rank, H] and [V, rank], or None where the file leaves them to be made from `lm_head`.
        num_candidates: as stated.
    """

    def __init__(self, spec: DraftSpec, source: TensorSource) -> None:
        from pytest_specdecode.errors import LayerBuildError
        from pytest_specdecode.families.building import take_named
        from pytest_specdecode.layers import Linear
        from pytest_specdecode.layers.linear import known

        super().__init__(spec, source)
        options = _of(spec)
        self.num_candidates = options.num_candidates
        self.down_proj: Linear | None = None
        self.scores: Linear | None = None
        if source.under("efficient_lm_head"):
            rank, hidden = known(options.rank, "efficient_lm_head_config.rank"), known(spec.hidden_size, "hidden_size")
            rows = known(spec.vocabulary.head_rows, "vocab_size")
            count = known(options.num_candidates, "efficient_lm_head_config.num_candidates")
            if count > rows:
                key, due = "efficient_lm_head_config.num_candidates", f"from 1 to {rows}"
                raise LayerBuildError(f"{count} candidates of {rows} tokens", key=key, got=count, due=due)
            name = "efficient_lm_head_down_proj.weight"
            self.down_proj = Linear(take_named(source, name, (rank, hidden)), name=name)
            name = "efficient_lm_head.weight"
            self.scores = Linear(take_named(source, name, (rows, rank)), name=name)

    def candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [..., C] by falling estimate, and their exact logits [..., C], for the layer's output z [..., H].

        Raises:
            LayerBuildError: the file holds no factors, or no head.
        """
        from pytest_specdecode.errors import LayerBuildError

        if self.down_proj is None or self.scores is None or self.lm_head is None or self.num_candidates is None:
            raise LayerBuildError("is not in the weights; engines make it from lm_head", key="efficient_lm_head.weight")
        normed = self.norm(hidden)
        ids = self.scores(self.down_proj(normed)).topk(self.num_candidates, dim=-1).indices
        logits = (self.lm_head.weight[ids] @ normed.unsqueeze(-1)).squeeze(-1)
        return ids, logits


def _of(spec: DraftSpec) -> Eagle4Options:
    assert isinstance(spec.options, Eagle4Options)
    return spec.options


def _options(view: ConfigView) -> Eagle4Options:
    head = view.root.section("efficient_lm_head_config")
    still = (
        view.root.flag("use_rope") is False
        or view.root.raw("position_embedding_type") == "none"
        or view.root.number("partial_rotary_factor") == 0
    )
    experts = None
    if view.root.flag("enable_moe"):
        experts = view.root.text("moe_architecture") or "sparse_swiglu"
    return Eagle4Options(
        head_type=head.text("type"),
        rank=head.extent("rank"),
        num_candidates=head.extent("num_candidates"),
        attn_norm=bool(view.root.flag("attn_norm")),
        uses_rope=not still,
        experts=experts,
        shared_experts=0 if experts is None else view.root.extent("n_shared_experts") or 0,
    )


def _moe(view: ConfigView, *, latent: bool) -> MoESpec:
    """The experts as engines' Nemotron-H block reads them; shared ones are together `n_shared_experts` times as wide as one."""
    inner = view.root.extent("moe_intermediate_size")
    shared = view.root.extent("moe_shared_expert_intermediate_size")
    shared = inner if shared is None and not latent else shared
    count = view.root.extent("n_shared_experts")
    normed, scale = view.root.flag("norm_topk_prob"), view.root.number("routed_scaling_factor")
    groups = view.root.extent("n_group") or 1
    return MoESpec(
        num_experts=view.root.extent("n_routed_experts"),
        top_k=view.root.extent("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=times(count, shared) if count else None,
        scoring="sigmoid",
        norm_topk_prob=normed is not False,
        routed_scaling_factor=1.0 if scale is None else scale,
        n_group=groups,
        topk_group=view.root.extent("topk_group") or groups,
        correction_bias=True,
        gated=not latent,
        latent=latent,
        latent_size=view.root.extent("moe_latent_size") if latent else None,
    )


def _window(view: ConfigView, index: int) -> Extent:
    window = view.layer.extent("sliding_window")
    types = view.layer.texts("layer_types")
    if types:
        return window if index < len(types) and types[index] == SLIDING else None
    return None if view.layer.flag("use_sliding_window") is False else window


def _own_tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    options, hidden = _of(spec), spec.hidden_size
    if options.attn_norm:
        for layer in spec.layers:
            prefix = f"layers.{layer.index}"
            yield ExpectedTensor(name=f"{prefix}.eh_proj.weight", shape=(hidden, times(2, hidden)), layer=layer.index)
            yield norm(f"{prefix}.pre_attention_layernorm", hidden, layer.index)
    for name, shape in (
        ("efficient_lm_head.weight", (spec.vocabulary.head_rows, options.rank)),
        ("efficient_lm_head_down_proj.weight", (options.rank, hidden)),
    ):
        yield ExpectedTensor(
            name=name, shape=shape, need="optional", reason="without it engines take the SVD of lm_head at load"
        )
