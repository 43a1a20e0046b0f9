"""EAGLE3, Llama style, with the 3.1 switches: one layer that reads the token's embedding beside the target's tapped states.

Layer 0, for a token's embedding and a hidden state g [T, H] (the fused taps at first, the recycled state after that):

    e = input_layernorm(embed)          n = hidden_norm(g)
    r = n if norm_before_residual else g
    y = r + self_attn([e, n])           z = y + mlp(post_attention_layernorm(y))
    logits = lm_head(norm(z))           recycled = norm(z) if norm_output else z

The taps are fused by `fc` over their concatenation [T, K * Ht], each normed before by `fc_norm` (3.1), or all at once by `input_norm`
(`norm_before_fc`). A head with `use_aux_hidden_state` false has no `fc`: its g is the target's last state, after the target's final norm.
Layers from 1 on are plain decoder layers over H. Qwen3-style heads norm each q and k head and may give each layer its own window.
`Eagle3Head` is all of this but the layers.

ModelOpt may train heads beside `lm_head` (`parallel_draft_step` above 1). After the last step of a round, head i drafts the token i + 1
places behind the step's own from the same state:

    x = norm(z);  x = x + silu(linear_j(x)) for each block j;  logits_i = the shared lm_head(x), in the draft's vocabulary

They are stored as `parallel_draft_heads.{i}.medusa_layers.{j}.linear.*` and `parallel_draft_heads.lm_head.weight`; the first exporter
gave each head an `lm_head` of its own. Module names and TensorRT-LLM's (`medusa_heads.{i}.{j}`, `{i}.{j}`) stand for the same.

Sources: SafeAILab/EAGLE `eagle/model/cnets.py`, SpecForge `specforge/modeling/draft/llama3_eagle.py`, vLLM `llama_eagle3.py` and
`qwen3_eagle3.py`, speculators `models/eagle3`, ModelOpt `modelopt/torch/export/plugins/hf_spec_export.py` and
`modelopt/torch/speculative/plugins/transformers.py`, TensorRT-LLM `modeling_medusa.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError
from pytest_specdecode.families.base import (
    ConfigView,
    ExpectedTensor,
    Family,
    ReferenceLayer,
    Signal,
    TensorSource,
)
from pytest_specdecode.families.common import (
    held_layers,
    read_dtype,
    read_eps,
    read_head_dim,
    read_vocabulary,
    stores_fused_qkv,
)
from pytest_specdecode.families.config import MAX_LAYERS, Section
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.stepping import SteppingLayer
from pytest_specdecode.families.tensors import (
    bias,
    embedding,
    gqa_tensors,
    mla_tensors,
    moe_tensors,
    norm,
    vocabulary_tensors,
)
from pytest_specdecode.spec import (
    DraftSpec,
    Eagle3Flags,
    Extent,
    GQASpec,
    LayerSpec,
    MLASpec,
    ParallelHeads,
    Stated,
    TapsConvention,
    TapsSpec,
    times,
)

if TYPE_CHECKING:
    import torch

    from pytest_specdecode.layers import Linear

#: Taps that every engine assumes where a file states neither ids nor a count.
DEFAULT_TAP_COUNT = 3

FULL, SLIDING = "full_attention", "sliding_attention"

_LEGACY = {
    "logit_head.": "lm_head.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_PARALLEL = "parallel_draft_heads"
_PARALLEL_BLOCK = re.compile(rf"{_PARALLEL}\.(?:medusa_heads\.)?(\d{{1,6}})\.(\d{{1,6}})\.linear\.(weight|bias)")
_PARALLEL_HEAD = re.compile(rf"{_PARALLEL}\.(\d{{1,6}})\.\d{{1,6}}\.weight")


class Eagle3(Family):
    """EAGLE3 with grouped-query attention."""

    name = "eagle3"
    title = "EAGLE3 (Llama style)"
    packagings: tuple[str, ...] = ("plain", "speculators")
    fused_kv = "an EAGLE3 draft computes the K/V of its own steps; no engine stacks them over layers"
    tiny: Mapping[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "vocab_size": 512,
        "draft_vocab_size": 256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 8, 13],
        # The outputs of layers 1, 7 and 12 are the states entering 2, 8 and 13: served alike by readers of either place.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 12], "use_aux_hidden_state": True},
        "num_target_layers": 16,
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """Label, 2H-wide q_proj or qkv_proj under an `fc`, or EAGLE3's own keys."""
        if relative_of(view) is not None:
            return label_signals(view, self.name, mla=False)
        return [
            *label_signals(view, self.name, mla=False),
            *self._tensor_signals(view),
            *([] if is_mla(view) else key_signals(view, self.name)),
        ]

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; layers from 1 on read H, layer 0 reads 2H."""
        return parse_eagle3(view, self.name, read_attention)

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """`fc`, the layers, `norm`, and the vocabulary's tensors."""
        return tuple(eagle3_tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer."""
        return Eagle3Layer(spec, layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Eagle3Head:
        """What stands around the layers."""
        return Eagle3Head(spec, source)

    def run_head(self, spec: DraftSpec, head: Eagle3Head, states: torch.Tensor) -> Any:
        """The logits of the parallel heads, where there are any."""
        return head.parallel_logits(states) if head.parallel else None

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """See `parallel_faults`."""
        return parallel_faults(spec)

    def canonical(self, name: str, root: Section | None = None) -> str:
        """`midlayer.`, a leading `model.`, the legacy names of heads and tap norms, and the other names of parallel heads."""
        return canonical_eagle3(name)

    def _tensor_signals(self, view: ConfigView) -> list[Signal]:
        stored = (f"layers.0.self_attn.{name}.weight" for name in ("q_proj", "qkv_proj"))
        return [signal for name in stored for signal in width_signals(view, self.name, name)]


class Eagle3Layer(SteppingLayer):
    """One EAGLE3 layer over grouped-query or latent attention; see the module's formula.

    Attributes:
        first: whether this is layer 0, which reads the embedding beside the hidden state.
        norm_before_residual: where the residual is taken; what the file does not say is the raw state, as EAGLE trains.
    """

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_attention, build_mlp, build_moe, build_norm

        prefix = f"layers.{layer.index}"
        self.first = layer.index == 0
        self.norm_before_residual = bool(spec.eagle3 and spec.eagle3.norm_before_residual)
        self.hidden_first = bool(spec.eagle3 and spec.eagle3.hidden_first)
        self.self_attn = build_attention(layer, source)
        self.mlp: Any = build_mlp(layer, source) if layer.moe is None else build_moe(layer, source)
        self.input_layernorm = build_norm(layer, source, f"{prefix}.input_layernorm")
        self.post_attention_layernorm = build_norm(layer, source, f"{prefix}.post_attention_layernorm")
        self.hidden_norm = build_norm(layer, source, f"{prefix}.hidden_norm") if self.first else None

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        """The new hidden state z.

        Args:
            embeds: [T, H] or [B, T, H]; read by layer 0 only.
            hidden: like `embeds`.
            positions: [T] or [B, T], absolute.
            cache: what `new_cache` gave, to continue a sequence.
        """
        import torch

        if self.hidden_norm is None:
            states, residual = self.input_layernorm(hidden), hidden
        else:
            normed = self.hidden_norm(hidden)
            pair = [self.input_layernorm(embeds), normed]
            states = torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1)
            residual = normed if self.norm_before_residual else hidden
        attended = residual + self.self_attn(states, positions, cache=cache)
        out: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


class Eagle3Head:
    """What stands around the layers of an EAGLE3 draft: the fusion of the taps, the final norm, the head. See the module's formula.

    Attributes:
        fc: Linear [H, K * Ht], or None where `use_aux_hidden_state` is false.
        input_norm: norm over K * Ht, or None. fc_norm: a norm per tap, or empty.
        norm: final norm over H.
        lm_head: Linear [Vd, H], or None where the target's serves.
        parallel: the heads that draft further tokens at once: blocks of one, and the `lm_head` that it ends in; empty without any.
    """

    def __init__(self, spec: DraftSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import take_named
        from pytest_specdecode.layers import Linear, RMSNorm
        from pytest_specdecode.layers.linear import known

        flags = spec.eagle3 or Eagle3Flags()
        hidden = known(spec.hidden_size, "hidden_size")
        target_hidden = known(spec.target_hidden_size, "target_hidden_size")
        taps = known(spec.taps.count, "num_aux_hidden_states") if spec.taps.required else 0

        def normed(name: str, width: int) -> RMSNorm:
            return RMSNorm(take_named(source, f"{name}.weight", (width,)), spec.norm_eps)

        self.norm_output = flags.norm_output
        self.input_norm = normed("input_norm", taps * target_hidden) if taps and flags.norm_before_fc else None
        self.fc_norm = [normed(f"fc_norm.{index}", target_hidden) for index in range(taps)] if flags.fc_norm else []
        self.fc: Linear | None = None
        if taps:
            fc_bias = take_named(source, "fc.bias", (hidden,)) if flags.fc_bias else None
            self.fc = Linear(take_named(source, "fc.weight", (hidden, taps * target_hidden)), fc_bias, name="fc.weight")
        self.norm = normed("norm", hidden)
        head = source.under("lm_head").get("weight")
        self.lm_head = None if head is None else Linear(head, name="lm_head.weight")
        self.parallel = _parallel_heads(spec, source)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """The first hidden state g [..., H] from the taps side by side, [..., K * Ht]; without `fc`, the state itself."""
        import torch

        if self.fc is None:
            return taps
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: torch.Tensor = self.fc(taps)
        return fused

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd] of the last layer's output z [..., H].

        Raises:
            LayerBuildError: the draft has no head of its own.
        """
        from pytest_specdecode.errors import LayerBuildError

        if self.lm_head is None:
            raise LayerBuildError("is not in the weights; the target's head serves this draft", key="lm_head.weight")
        scores: torch.Tensor = self.lm_head(self.norm(hidden))
        return scores

    def parallel_logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits [..., Vd] of each parallel head for the last layer's output z [..., H]."""
        from torch.nn.functional import silu

        found = []
        for blocks, lm_head in self.parallel:
            x = self.norm(hidden)
            for block in blocks:
                x = x + silu(block(x))
            found.append(lm_head(x))
        return tuple(found)

    def recycled(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the next draft step takes as its hidden state, from the last layer's output z [..., H]."""
        return self.norm(hidden) if self.norm_output else hidden


def _parallel_heads(spec: DraftSpec, source: TensorSource) -> tuple[tuple[list[Linear], Linear], ...]:
    from pytest_specdecode.families.heads import head_linear
    from pytest_specdecode.layers.linear import known

    parallel = None if spec.eagle3 is None else spec.eagle3.parallel
    if parallel is None:
        return ()
    hidden, rows = known(spec.hidden_size, "hidden_size"), known(spec.vocabulary.head_rows, "draft_vocab_size")
    count = known(parallel.num_layers, "parallel_draft_heads_num_layers")
    shared = head_linear(source, f"{_PARALLEL}.lm_head", rows, hidden) if parallel.shared_head else None
    found = []
    for index in range(parallel.num_heads):
        stem = f"{_PARALLEL}.{index}"
        blocks = [
            head_linear(source, f"{stem}.medusa_layers.{place}.linear", hidden, hidden, bias=True)
            for place in range(count)
        ]
        found.append((blocks, head_linear(source, f"{stem}.lm_head", rows, hidden) if shared is None else shared))
    return tuple(found)


def read_attention(view: ConfigView, index: int) -> GQASpec:
    """The grouped-query attention of layer `index`, 2H wide in layer 0."""
    hidden = view.layer.extent("hidden_size")
    head_dim = read_head_dim(view)
    has_bias = bool(view.layer.flag("attention_bias"))
    return GQASpec(
        num_heads=view.layer.extent("num_attention_heads"),
        num_kv_heads=view.layer.extent("num_key_value_heads", "num_attention_heads"),
        head_dim=head_dim,
        in_features=times(2, hidden) if index == 0 else hidden,
        out_features=hidden,
        rope=read_rope(
            view.layer,
            head_dim=head_dim,
            is_neox_style=view.layer.flag("is_neox_style") is not False,
            layer_type=_rope_entry(view, index),
        ),
        qk_norm=_has_qk_norm(view),
        qkv_bias=has_bias,
        o_bias=has_bias,
        sliding_window=view.layer.extent("sliding_window") if layer_type(view, index) == SLIDING else None,
        fused_qkv=stores_fused_qkv(view, index),
    )


def layer_type(view: ConfigView, index: int) -> str:
    """`layer_types[index]` where the file lists types, else what `use_sliding_window` says of all layers."""
    types = view.layer.texts("layer_types")
    if types:
        return types[index] if index < len(types) else FULL
    return SLIDING if view.layer.flag("use_sliding_window") else FULL


def _rope_entry(view: ConfigView, index: int) -> str:
    """The entry of per-type RoPE parameters; speculators trains every layer with the sliding layers' where there is one."""
    per_type = view.layer.section("rope_parameters")
    if view.packaging == "speculators" and isinstance(per_type.raw(SLIDING), Mapping):
        return SLIDING
    return layer_type(view, index)


def _has_qk_norm(view: ConfigView) -> bool:
    """Qwen3 classes norm q and k whatever the file holds; another label says nothing, and the tensors decide."""
    qwen3 = view.packaging == "speculators" and view.layer.text("model_type") == "qwen3"
    named = any(re.match(r"Eagle3Qwen3(?!vl)", name) for name in view.root.texts("architectures"))
    return (
        qwen3
        or named
        or any(name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")) for name in view.tensors)
    )


def relative_of(view: ConfigView) -> str | None:
    """The family that shares EAGLE3's layers and adds parts of its own, where the configuration or the tensors show those."""
    architectures = " ".join(view.root.texts("architectures"))
    if re.search(r"p-?eagle", architectures, re.IGNORECASE) or view.root.text("speculators_model_type") == "peagle":
        return "peagle"
    if re.search(r"eagle-?4", architectures, re.IGNORECASE):
        return "eagle4"
    if view.root.raw("parallel_drafting") is True or "mask_hidden" in view.tensors:
        return "peagle"
    if isinstance(view.root.raw("efficient_lm_head_config"), Mapping) or "efficient_lm_head.weight" in view.tensors:
        return "eagle4"
    return None


def label_signals(view: ConfigView, family: str, *, mla: bool) -> list[Signal]:
    """Architectures and speculators types that name EAGLE3; those that name DeepSeek are the latent form's.

    A label beside `parallel_drafting` is P-EAGLE's: the same class serves both.
    """
    if not mla and view.root.raw("parallel_drafting") is True:
        return []
    found = [
        Signal(family=family, kind="label", where=f"architectures[{position}]", value=architecture)
        for position, architecture in enumerate(view.root.texts("architectures"))
        if re.search(r"eagle-?3", architecture, re.IGNORECASE) and ("deepseek" in architecture.lower()) == mla
    ]
    if not mla and view.root.text("speculators_model_type") == "eagle3":
        found.append(Signal(family=family, kind="label", where="speculators_model_type", value="eagle3"))
    return found


def key_signals(view: ConfigView, family: str) -> list[Signal]:
    """Keys that only EAGLE3 configurations have."""
    keys = [
        key for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state") if key in view.root
    ]
    reduced = [key for key in ("draft_vocab_size", "truncated_vocab_size") if view.root.raw(key) is not None]
    if view.root.texts("architectures") == ("LlamaForCausalLM",) and view.root.raw("num_hidden_layers") == 1:
        keys += reduced
    return [
        Signal(family=family, kind="keys", where=key, value=view.root.raw(key))
        for key in keys
        if view.root.raw(key) is not None
    ]


def width_signals(view: ConfigView, family: str, projection: str) -> list[Signal]:
    """A first projection that reads twice what `fc.weight` writes or, in a head without `fc`, what `hidden_norm` is wide."""
    first = view.tensors.get(projection)
    fc, norm = view.tensors.get("fc.weight"), view.tensors.get("layers.0.hidden_norm.weight")
    if first is None or len(first.shape) != 2:
        return []
    if fc is not None:
        hidden = fc.shape[0] if len(fc.shape) == 2 else None
    else:
        hidden = norm.shape[0] if norm is not None and len(norm.shape) == 1 else None
    if not hidden or first.shape[1] != 2 * hidden:
        return []
    return [Signal(family=family, kind="tensors", where=projection, value=list(first.shape))]


def is_mla(view: ConfigView) -> bool:
    """Whether the configuration or the tensors speak of latent attention."""
    return view.layer.raw("kv_lora_rank") is not None or any("kv_a_proj_with_mqa" in name for name in view.tensors)


def canonical_eagle3(name: str) -> str:
    """See `Eagle3.canonical`."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    for old, new in _LEGACY.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    if match := _PARALLEL_BLOCK.fullmatch(name):
        return f"{_PARALLEL}.{match[1]}.medusa_layers.{match[2]}.linear.{match[3]}"
    if match := _PARALLEL_HEAD.fullmatch(name):
        return f"{_PARALLEL}.{match[1]}.lm_head.weight"
    return name


def parallel_faults(spec: DraftSpec) -> tuple[ConfigError, ...]:
    """Parallel heads whose number of blocks is not stated, or cannot be."""
    parallel = None if spec.eagle3 is None else spec.eagle3.parallel
    if parallel is None or parallel.num_layers:
        return ()
    return (
        ConfigError(
            "parallel_draft_step calls for parallel heads, and parallel_draft_heads_num_layers gives them no usable number of blocks",
            key="eagle_config.parallel_draft_heads_num_layers",
            got=parallel.num_layers,
            due="a positive whole number",
        ),
    )


def parse_eagle3(view: ConfigView, family: str, attention: Any) -> DraftSpec:
    """A spec of the EAGLE3 kind; `attention(view, index)` reads one layer's attention."""
    stated = view.layer.layers()
    hidden = view.layer.extent("hidden_size")
    flags = _flags(view)
    return DraftSpec(
        family=family,
        packaging=view.packaging,
        architectures=view.root.texts("architectures"),
        model_type=view.layer.text("model_type"),
        hidden_size=hidden,
        target_hidden_size=view.root.extent("target_hidden_size") or hidden,
        num_hidden_layers=stated,
        layer_key=view.layer.path("num_hidden_layers"),
        layers=tuple(
            LayerSpec(
                index=index,
                attention=attention(view, index),
                intermediate_size=view.layer.extent("intermediate_size"),
                hidden_act=view.layer.text("hidden_act") or "silu",
                mlp_bias=bool(view.layer.flag("mlp_bias")),
                norm_eps=read_eps(view),
                layer_type=layer_type(view, index),
                is_causal=True,
            )
            for index in range(_layers_built(view, stated))
        ),
        vocabulary=read_vocabulary(view),
        taps=_taps(view),
        dtype=read_dtype(view),
        norm_eps=read_eps(view),
        eagle3=flags,
    )


def eagle3_tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    """The tensors of an EAGLE3 draft, latent attention included."""
    hidden, target_hidden = spec.hidden_size, spec.target_hidden_size
    flags = spec.eagle3 or Eagle3Flags()
    width = times(spec.taps.count, target_hidden)
    if spec.taps.required:
        yield ExpectedTensor(name="fc.weight", shape=(hidden, width), fault="fc-missing")
        yield bias("fc.bias", hidden, flags.fc_bias)
        yield _flagged_norm("input_norm", width, flags.norm_before_fc, "norm_before_fc")
        for index in range(spec.taps.count or 0):
            yield _flagged_norm(f"fc_norm.{index}", target_hidden, flags.fc_norm, "fc_norm")
    else:
        yield ExpectedTensor(
            name="fc.weight",
            shape=(hidden, None),
            need="never",
            reason="use_aux_hidden_state is false, so the draft reads the target's last state as it is",
        )
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        if layer.index == 0:
            yield norm(f"{prefix}.hidden_norm", hidden, 0)
        else:
            yield ExpectedTensor(
                name=f"{prefix}.hidden_norm.weight",
                shape=(hidden,),
                need="optional",
                reason="engines differ on whether layers from 1 on norm the hidden state with it",
                layer=layer.index,
            )
        yield norm(f"{prefix}.input_layernorm", hidden, layer.index)
        if isinstance(layer.attention, MLASpec):
            yield from mla_tensors(layer, layer.attention)
        elif layer.attention is not None:
            yield from gqa_tensors(layer, layer.attention)
        yield norm(f"{prefix}.post_attention_layernorm", hidden, layer.index)
        yield from moe_tensors(layer, hidden)
    yield norm("norm", hidden)
    if flags.parallel is not None:
        yield from _parallel_tensors(spec, flags.parallel)
    yield from vocabulary_tensors(spec, own_head=spec.vocabulary.draft_vocab_size is not None)
    yield embedding(spec, required=None not in (hidden, target_hidden) and hidden != target_hidden)


def _flagged_norm(name: str, width: Extent, flag: bool, key: str) -> ExpectedTensor:
    """A norm that is there exactly where its flag says."""
    return ExpectedTensor(
        name=f"{name}.weight",
        shape=(width,),
        need="required" if flag else "never",
        reason="" if flag else f"{key} is not true",
        check="weights.flags",
    )


def _parallel_tensors(spec: DraftSpec, parallel: ParallelHeads) -> Iterator[ExpectedTensor]:
    hidden = spec.hidden_size
    for index in range(parallel.num_heads):
        for place in range(parallel.num_layers or 0):
            name = f"{_PARALLEL}.{index}.medusa_layers.{place}.linear"
            yield ExpectedTensor(name=f"{name}.weight", shape=(hidden, hidden))
            yield bias(f"{name}.bias", hidden, True)
    stems = [_PARALLEL] if parallel.shared_head else [f"{_PARALLEL}.{index}" for index in range(parallel.num_heads)]
    for stem in stems:
        yield ExpectedTensor(name=f"{stem}.lm_head.weight", shape=(spec.vocabulary.head_rows, hidden))


def _layers_built(view: ConfigView, stated: int | None) -> int:
    """Layers whose tensors are due: as stated, but one where the file shows one (training classes build one `midlayer`)."""
    return held_layers(view) or stated or 1


def _flags(view: ConfigView) -> Eagle3Flags:
    nested = view.root.section("eagle_config")

    def read(*names: str) -> bool | None:
        value = nested.flag(*names)
        return value if value is not None else view.root.flag(*names)

    return Eagle3Flags(
        norm_before_residual=read("norm_before_residual"),
        norm_before_fc=bool(read("norm_before_fc")),
        fc_norm=bool(read("fc_norm", "use_aux_norm")),
        norm_output=bool(read("norm_output", "return_hidden_post_norm")),
        fc_bias=bool(view.root.flag("bias")),
        parallel=_parallel(view),
    )


def _parallel(view: ConfigView) -> ParallelHeads | None:
    """What ModelOpt's keys say, and the weights of where the heads end; None where each step drafts one token."""
    nested = view.root.section("eagle_config")

    def read(key: str) -> int | None:
        value = nested.layers(key)
        return value if value is not None else view.root.layers(key)

    steps, layers = read("parallel_draft_step"), read("parallel_draft_heads_num_layers")
    if steps is None or steps < 2:
        return None
    heads = steps - 1
    own = f"{_PARALLEL}.lm_head.weight" not in view.tensors and f"{_PARALLEL}.0.lm_head.weight" in view.tensors
    # Each may be as many as a draft has layers; together they are no more than that.
    usable = layers is not None and heads * layers <= MAX_LAYERS
    return ParallelHeads(num_heads=heads, num_layers=layers if usable else None, shared_head=not own)


def _taps(view: ConfigView) -> TapsSpec:
    nested = view.root.section("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    found = [
        (Stated(key=section.path(key), value=list(ids)), ids)
        for section in (nested, view.root)
        if (ids := section.ids(key))
    ]
    used = nested.flag("use_aux_hidden_state")
    if used is None:
        used = view.root.flag("use_aux_hidden_state")
    counted = view.root.layers("num_aux_hidden_states")
    ids = found[0][1] if found else None
    convention: TapsConvention | None = "boundary" if view.packaging == "speculators" else None
    if convention is None and len(found) == 2 and found[1][1] == tuple(id + 1 for id in found[0][1]):
        # The two places are read by different engines, and lists that are one apart name the same states in both.
        convention = "output"
    return TapsSpec(
        ids=ids,
        convention=convention,
        count=len(ids) if ids else (counted or DEFAULT_TAP_COUNT),
        stated=tuple(stated for stated, _ in found),
        num_target_layers=view.root.extent("num_target_layers", "target_num_hidden_layers"),
        required=used is not False,
    )
