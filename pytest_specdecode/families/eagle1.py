"""EAGLE-1 and EAGLE-2 (one set of weights, another tree), and HASS, which trains the same layout with one or two layers.

For a token's embedding e and the target's last state h [T, H] (the draft's own output after the first step):

    x = fc([e, h])                                     fc [H, 2H], with a bias unless `bias` is false
    y = x + self_attn(x)                               layer 0 has no input_layernorm; later layers have one
    z = y + mlp(post_attention_layernorm(y))           z is the input of the target's head, and is recycled; there is no final norm

Variants of other targets keep their target's decoder layer, whole:

    minicpm          x = fc([input_norm1(scale_emb * e), input_norm2(h)]); both sublayers are scaled by
                     scale_depth / sqrt(mup_denominator, or the number of layers); output z / (H / dim_model_base)
    cohere           n = input_layernorm(x); z = x + self_attn(n) + mlp(n), LayerNorms without bias, interleaved RoPE; output norm(z);
                     logits * logit_scale
    llama4           n = input_layernorm(x); y = x + self_attn(n); z = y + feed_forward(post_attention_layernorm(y)); output norm(z)
    mistral-large-3  DeepSeek-V3 layer with latent attention; output norm(z); stored by Mistral's own names, `eagle_linear` for `fc`

vLLM's converted form nests the layer's configuration under `model`, says `eagle_fc_bias` (false where absent) and brings a head of
`truncated_vocab_size` rows with `token_map` [Vd], the target id of each row. A file without `rope_theta` means 10000: it is what the
trainer, transformers' Llama class and with it every engine fill in; Llama 4's class fills in 500000, and Cohere's 10000 or 500000,
by its version, so that there the base has to be stated.

Llama 4's attention rotates interleaved pairs, then divides q and k by their root mean square (`use_qk_norm`), and sees its own chunk of
`attention_chunk_size` positions. A layer whose `no_rope_layers` entry is 0 does none of that: it sees everything, and multiplies its
queries by `layers.TemperatureSpec`'s factor. `feed_forward` is a gated MLP of `intermediate_size_mlp`, or, by `moe_layers` or every
`interleave_moe_layer_step`-th layer, experts of `intermediate_size` with one more that every token passes: the `num_experts_per_tok` best
by a router whose sigmoid multiplies what each expert is given. vLLM's draft class stops at layers of experts. Lists count the draft's
own layers.

Cohere's q and k may pass LayerNorms with a weight per head (`use_qk_norm`) before they rotate. Cohere 2 sees a window in its
`sliding_attention` layers, and its other layers do not rotate. A file may say `norm_type` rms_norm, or be of `cohere2_moe`'s type and
state `rms_norm_eps`: its layers and its output are then normed by root mean square; vLLM's class has LayerNorms all the same.

Sources: SafeAILab/EAGLE `eagle/model/cnets1.py`; vLLM `llama_eagle.py`, `minicpm_eagle.py`, `cohere_eagle.py`, `llama4_eagle.py`,
`mistral_large_3_eagle.py`, `mistral_large_3.py`, `llama4.py`, `commandr.py`, and `eagle.py` of 2024 for the converted form; transformers'
`llama4`, `cohere`, `cohere2` and `cohere2_moe`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_specdecode.families.base import ConfigView, ExpectedTensor, Family, ReferenceLayer, Signal, TensorSource
from pytest_specdecode.families.common import (
    held_layers,
    read_dtype,
    read_eps,
    read_head_dim,
    read_mla,
    stores_fused_qkv,
)
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.stepping import SteppingLayer
from pytest_specdecode.families.tensors import bias, gqa_tensors, mla_tensors, mlp_tensors, norm
from pytest_specdecode.spec import (
    DraftSpec,
    Extent,
    GQASpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    RopeSpec,
    TapsSpec,
    TemperatureSpec,
    VocabularySpec,
    times,
)

if TYPE_CHECKING:
    import torch

Variant = Literal["llama", "minicpm", "cohere", "llama4", "mistral-large-3"]

#: The base of a file that states none, by the class that reads it. Cohere's changed from one version of transformers to the next.
DEFAULT_THETA: Mapping[Variant, float | None] = {
    "llama": 10000.0,
    "minicpm": 10000.0,
    "cohere": None,
    "llama4": 500000.0,
    "mistral-large-3": 10000.0,
}

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

_BY_LABEL: tuple[tuple[str, Variant], ...] = (
    (r"MiniCPM", "minicpm"),
    (r"Cohere", "cohere"),
    (r"Llama-?4", "llama4"),
    (r"MistralLarge3", "mistral-large-3"),
)
#: Mistral's own names, and what they are called elsewhere.
_MISTRAL = {
    r"eagle_linear\.": "fc.",
    r"tok_embeddings\.": "embed_tokens.",
    r"output\.": "lm_head.",
    r"(layers\.\d+)\.attention_norm\.": r"\1.input_layernorm.",
    r"(layers\.\d+)\.ffn_norm\.": r"\1.post_attention_layernorm.",
    r"(layers\.\d+)\.attention\.wq_a\.": r"\1.self_attn.q_a_proj.",
    r"(layers\.\d+)\.attention\.q_a_norm\.": r"\1.self_attn.q_a_layernorm.",
    r"(layers\.\d+)\.attention\.wq_b\.": r"\1.self_attn.q_b_proj.",
    r"(layers\.\d+)\.attention\.wkv_a_with_mqa\.": r"\1.self_attn.kv_a_proj_with_mqa.",
    r"(layers\.\d+)\.attention\.kv_a_norm\.": r"\1.self_attn.kv_a_layernorm.",
    r"(layers\.\d+)\.attention\.wkv_b\.": r"\1.self_attn.kv_b_proj.",
    r"(layers\.\d+)\.attention\.wo\.": r"\1.self_attn.o_proj.",
    r"(layers\.\d+)\.feed_forward\.w1\.": r"\1.mlp.gate_proj.",
    r"(layers\.\d+)\.feed_forward\.w2\.": r"\1.mlp.down_proj.",
    r"(layers\.\d+)\.feed_forward\.w3\.": r"\1.mlp.up_proj.",
    r"(layers\.\d+)\.feed_forward\.": r"\1.mlp.",
}


@dataclass(frozen=True, kw_only=True)
class Eagle1Options:
    """What differs between drafts of this family.

    Attributes:
        variant: whose decoder layer the draft has.
        converted: vLLM's form of 2024, with the layer nested under `model`.
        fc_bias: `fc` has a bias.
        own_head: the file brings `lm_head`, of `truncated_vocab_size` rows.
        embedding_scale: factor on the embeddings before they are normed.
        residual_scale: factor on what a sublayer adds.
        output_scale: factor on the last layer's output, before the head and the next step.
        logit_scale: factor on the logits.
        layer_norm: the norms take the mean away as well (Cohere).
        hidden_first: `fc` reads [hidden, embedding] instead of [embedding, hidden]. No file is meant so; it is a reading that a replay
            can rule out.
    """

    variant: Variant = "llama"
    converted: bool = False
    fc_bias: bool = True
    own_head: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    output_scale: float = 1.0
    logit_scale: float = 1.0
    layer_norm: bool = False
    hidden_first: bool = False

    @property
    def has_final_norm(self) -> bool:
        """Whether the output passes a norm."""
        return self.variant in ("cohere", "llama4", "mistral-large-3")

    @property
    def has_first_input_norm(self) -> bool:
        """Whether layer 0 norms its input, as its target's layer does."""
        return self.variant != "llama"


class Eagle1(Family):
    """EAGLE-1, EAGLE-2 and HASS."""

    name = "eagle1"
    title = "EAGLE-1 and EAGLE-2, HASS"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = "an EAGLE-1 draft computes the K/V of its own steps; no engine stacks them over layers"
    tiny: Mapping[str, Any] = {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "bias": True,
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """Label, `fc` of 2H columns before projections that read H, or the keys of a one-layer Llama with EAGLE's own."""
        return [*_labels(view), *_widths(view), *_keys(view)]

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; `taps` are not required, since the draft is fed the target's last state."""
        variant = _variant(view)
        hidden = view.layer.extent("hidden_size")
        stated = view.layer.layers()
        options = _options(view, variant, stated)
        eps = _eps(view, variant, options)
        return DraftSpec(
            family=self.name,
            packaging=view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=hidden,
            target_hidden_size=hidden,
            num_hidden_layers=stated,
            layer_key=view.layer.path("num_hidden_layers"),
            layers=tuple(_layer(view, variant, index, eps) for index in range(_layers_built(view, stated))),
            vocabulary=_vocabulary(view),
            taps=TapsSpec(required=False),
            dtype=read_dtype(view),
            norm_eps=eps,
            options=options,
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """`fc`, the layers and, by variant, norms around them; a head where the file brings one."""
        return tuple(_tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer."""
        return Eagle1Layer(spec, layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Eagle1Head:
        """`fc` and what stands around the layers."""
        return Eagle1Head(spec, source)

    def canonical(self, name: str, root: Section | None = None) -> str:
        """Without leading `model.`; MiniCPM's `eagle_layers`, Llama 4's `feed_forward`, Mistral's own names, old speculators' names."""
        while name.startswith("model."):
            name = name.removeprefix("model.")
        for old, new in (("eagle_layers.", "layers."), ("transformer.", "layers.0."), ("fusion_fc.", "fc.")):
            if name.startswith(old):
                name = new + name.removeprefix(old)
        for pattern, due in _MISTRAL.items():
            if re.match(pattern, name):
                return re.sub(pattern, due, name, count=1)
        return name


class Eagle1Layer(SteppingLayer):
    """One layer over the fused states; see the module's formula. The final norm and the output's scale are `Eagle1Head`'s."""

    reads = ("hidden",)

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_attention, build_mlp, build_norm

        options = _of(spec)
        prefix = f"layers.{layer.index}"
        self.parallel = options.variant == "cohere"
        self.residual_scale = options.residual_scale
        self.self_attn = build_attention(layer, source)
        self.mlp: Any = build_mlp(layer, source) if layer.moe is None else _build_experts(layer, layer.moe, source)
        self.input_layernorm: Any = None
        self.post_attention_layernorm: Any = None
        if self.parallel:
            self.input_layernorm = _norm(options, source, f"{prefix}.input_layernorm", spec.hidden_size, layer.norm_eps)
        else:
            if layer.index > 0 or options.has_first_input_norm:
                self.input_layernorm = build_norm(layer, source, f"{prefix}.input_layernorm")
            self.post_attention_layernorm = build_norm(layer, source, f"{prefix}.post_attention_layernorm")

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """The new states z.

        Args:
            hidden: [T, H] or [B, T, H], what `fc` gave or the layer before.
            positions: [T] or [B, T], absolute.
            cache: what `new_cache` gave, to continue a sequence.
        """
        states = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        attended = self.self_attn(states, positions, cache=cache)
        if self.parallel:
            both: torch.Tensor = hidden + attended + self.mlp(states)
            return both
        attended = hidden + attended * self.residual_scale
        out: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(attended)) * self.residual_scale
        return out

    @property
    def probed_norm(self) -> Any:
        """The norm that every variant has."""
        return self.input_layernorm if self.post_attention_layernorm is None else self.post_attention_layernorm


class Eagle1Head:
    """What stands around the layers: the fusion before them, and what their output passes through.

    Attributes:
        fc: Linear [H, 2H].
        norms: norms of embedding and state before `fc` (MiniCPM), or None.
        norm: final norm, or None.
        lm_head: Linear [Vd, H], or None where the target's serves.
        logit_scale: factor on its output.
    """

    def __init__(self, spec: DraftSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import take_named
        from pytest_specdecode.layers import Linear, RMSNorm
        from pytest_specdecode.layers.linear import known

        options = _of(spec)
        hidden = known(spec.hidden_size, "hidden_size")
        fc_bias = take_named(source, "fc.bias", (hidden,)) if options.fc_bias else None
        self.fc = Linear(take_named(source, "fc.weight", (hidden, 2 * hidden)), fc_bias, name="fc.weight")
        self.embedding_scale, self.output_scale = options.embedding_scale, options.output_scale
        self.hidden_first = options.hidden_first
        self.norms = None
        if options.variant == "minicpm":
            self.norms = tuple(
                RMSNorm(take_named(source, f"{name}.weight", (hidden,)), spec.norm_eps)
                for name in ("input_norm1", "input_norm2")
            )
        self.logit_scale = options.logit_scale
        self.norm: Any = None
        if options.has_final_norm:
            self.norm = _norm(options, source, "norm", hidden, spec.norm_eps)
        head = source.under("lm_head").get("weight")
        self.lm_head = None if head is None else Linear(head, name="lm_head.weight")

    def fuse(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The first layer's input [..., H] from embeddings and states of that shape."""
        import torch

        embeds = embeds * self.embedding_scale
        if self.norms is not None:
            embeds, hidden = self.norms[0](embeds), self.norms[1](hidden)
        pair = [embeds, hidden]
        fused: torch.Tensor = self.fc(torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1))
        return fused

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads and the next step takes as its state, from the last layer's output z [..., H]."""
        normed: torch.Tensor = hidden if self.norm is None else self.norm(hidden)
        return normed * self.output_scale

    def logits(self, output: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., Vd] of what `output` gave, by `weight` [Vd, H], the target's head, or where None by the file's own.

        Raises:
            LayerBuildError: neither is there.
        """
        from pytest_specdecode.errors import LayerBuildError
        from pytest_specdecode.layers import Linear

        head = self.lm_head if weight is None else Linear(weight, name="lm_head.weight")
        if head is None:
            raise LayerBuildError("is not in the weights; the target's head serves this draft", key="lm_head.weight")
        scores: torch.Tensor = head(output) * self.logit_scale
        return scores


def _of(spec: DraftSpec) -> Eagle1Options:
    assert isinstance(spec.options, Eagle1Options)
    return spec.options


def _labels(view: ConfigView) -> list[Signal]:
    found = [
        Signal(family="eagle1", kind="label", where=f"architectures[{position}]", value=architecture)
        for position, architecture in enumerate(view.root.texts("architectures"))
        if re.match(r"E(agle|AGLE)(?!-?[34])", architecture) and "MTP" not in architecture
    ]
    for key in ("model_type", "speculators_model_type"):
        if view.root.text(key) == "eagle":
            found.append(Signal(family="eagle1", kind="label", where=key, value="eagle"))
    return found


def _widths(view: ConfigView) -> list[Signal]:
    """`fc` of twice its rows before a projection that reads them, and none of the norms that a DFlash or EAGLE3 draft has."""
    fc = view.tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or not fc.shape[0] or fc.shape[1] != 2 * fc.shape[0]:
        return []
    if "hidden_norm.weight" in view.tensors or "layers.0.hidden_norm.weight" in view.tensors:
        return []
    for name in ("q_proj", "qkv_proj", "q_a_proj"):
        first = view.tensors.get(f"layers.0.self_attn.{name}.weight")
        if first is not None and len(first.shape) == 2 and first.shape[1] == fc.shape[0]:
            return [Signal(family="eagle1", kind="tensors", where="fc.weight", value=list(fc.shape))]
    return []


def _keys(view: ConfigView) -> list[Signal]:
    """`eagle_fc_bias`, or a Llama of one or two layers that says nothing of a draft vocabulary.

    The published files hold plain Llama fields; few layers are all that tells them from a target. The tensors, where they are there,
    outrank this.
    """
    if view.tensors and "fc.weight" not in view.tensors:
        return []
    keys = ["eagle_fc_bias"] if view.root.raw("eagle_fc_bias") is not None else []
    plain = view.root.texts("architectures") == ("LlamaForCausalLM",)
    reduced = any(view.root.raw(key) is not None for key in ("draft_vocab_size", "truncated_vocab_size"))
    foreign = any("eagle_" in key or "aux_hidden" in key or key == "dflash_config" for key in view.root.values)
    if (
        plain
        and not reduced
        and not foreign
        and view.root.raw("num_hidden_layers") in (1, 2)
        and "hidden_size" in view.root
    ):
        keys.append("num_hidden_layers")
    return [Signal(family="eagle1", kind="keys", where=key, value=view.root.raw(key)) for key in keys]


def _variant(view: ConfigView) -> Variant:
    architectures = " ".join((*view.root.texts("architectures"), *view.layer.texts("architectures")))
    for pattern, variant in _BY_LABEL:
        if re.search(pattern, architectures):
            return variant
    model_type = view.layer.text("model_type") or ""
    if model_type.startswith("minicpm") or "input_norm1.weight" in view.tensors:
        return "minicpm"
    if model_type.startswith("cohere"):
        return "cohere"
    if model_type.startswith("llama4"):
        return "llama4"
    if view.layer.raw("kv_lora_rank") is not None or "layers.0.self_attn.kv_b_proj.weight" in view.tensors:
        return "mistral-large-3"
    return "llama"


def _options(view: ConfigView, variant: Variant, layers: Extent) -> Eagle1Options:
    converted = view.root.text("model_type") == "eagle"
    if view.packaging == "speculators":
        fc_bias = view.root.flag("fusion_bias") is True
    elif converted:
        fc_bias = view.root.flag("eagle_fc_bias", "bias") is True
    elif variant in ("minicpm", "llama4", "mistral-large-3"):
        fc_bias = False
    else:
        fc_bias = view.root.flag("bias") is not False
    options = Eagle1Options(variant=variant, converted=converted, fc_bias=fc_bias, own_head=converted)
    if variant == "cohere":
        # The class's own default is what a file without the key is served with.
        scale = view.layer.number("logit_scale")
        return replace(
            options, logit_scale=0.0625 if scale is None else scale, layer_norm=not _by_root_mean_square(view)
        )
    if variant == "llama4":
        return replace(options, logit_scale=_or_one(view.layer.number("logit_scale")))
    if variant != "minicpm":
        return options
    base, hidden = view.layer.number("dim_model_base"), view.layer.extent("hidden_size")
    depth = view.layer.number("scale_depth")
    denominator = view.layer.number("mup_denominator") or float(layers or 0)
    return replace(
        options,
        embedding_scale=_or_one(view.layer.number("scale_emb")),
        residual_scale=1.0 if depth is None or denominator <= 0 else depth / math.sqrt(denominator),
        output_scale=base / hidden if base and hidden else 1.0,
    )


def _by_root_mean_square(view: ConfigView) -> bool:
    """Whether a Cohere draft's norms leave the mean where it is."""
    kind = view.layer.text("norm_type")
    if kind is not None:
        return kind.startswith("rms")
    return view.layer.text("model_type") == "cohere2_moe" and view.layer.raw("rms_norm_eps") is not None


def _eps(view: ConfigView, variant: Variant, options: Eagle1Options) -> float:
    """The epsilon of every norm; 1e-5 is the default of Cohere's and Llama 4's classes."""
    if variant == "cohere" and options.layer_norm:
        stated = view.layer.number("layer_norm_eps")
    elif variant == "llama4":
        stated = view.layer.number("rms_norm_eps")
    else:
        return read_eps(view)
    return 1e-5 if stated is None else stated


def _layer(view: ConfigView, variant: Variant, index: int, eps: float) -> LayerSpec:
    moe = _experts(view, index) if variant == "llama4" else None
    attention = _attention(view, variant, index)
    widths = (
        ("intermediate_size_mlp", "intermediate_size")
        if variant == "llama4" and moe is None
        else ("intermediate_size",)
    )
    kind = FULL
    if isinstance(attention, GQASpec):
        kind = CHUNKED if attention.chunk_size else SLIDING if attention.sliding_window else FULL
    return LayerSpec(
        index=index,
        attention=attention,
        intermediate_size=view.layer.extent(*widths),
        hidden_act=view.layer.text("hidden_act") or "silu",
        mlp_bias=bool(view.layer.flag("mlp_bias")),
        norm_eps=eps,
        layer_type=kind,
        is_causal=True,
        moe=moe,
    )


def _experts(view: ConfigView, index: int) -> MoESpec | None:
    """Llama 4's experts, or None where layer `index` is dense: as the tensors show it, else as the lists have it."""
    prefix = f"layers.{index}.mlp"
    if view.tensors:
        parts = (f"{prefix}.router.", f"{prefix}.experts.", f"{prefix}.shared_expert.")
        present = any(name.startswith(parts) for name in view.tensors)
    else:
        listed, step = view.layer.ids("moe_layers"), view.layer.extent("interleave_moe_layer_step") or 1
        present = (index + 1) % step == 0 if listed is None else index in listed
    experts = view.layer.extent("num_local_experts")
    if not present or not experts:
        return None
    inner, chosen = view.layer.extent("intermediate_size"), view.layer.extent("num_experts_per_tok")
    return MoESpec(
        num_experts=experts,
        top_k=1 if chosen is None else chosen,
        intermediate_size=inner,
        shared_intermediate_size=inner,
        scoring="sigmoid",
        fused_experts=True,
        weigh_inputs=True,
    )


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


def _attention(view: ConfigView, variant: Variant, index: int) -> GQASpec | MLASpec:
    hidden = view.layer.extent("hidden_size")
    if variant == "mistral-large-3":
        latent = read_mla(view, in_features=hidden)
        return replace(latent, rope=_with_theta(latent.rope, variant))
    head_dim = read_head_dim(view)
    every = bool(view.layer.flag("attention_bias"))
    stated = view.layer.flag("qkv_bias", "attention_bias")
    # Qwen2's layer has biases on q, k and v whatever its configuration says.
    qkv = view.layer.text("model_type") == "qwen2" if stated is None else stated
    found = GQASpec(
        num_heads=view.layer.extent("num_attention_heads"),
        num_kv_heads=view.layer.extent("num_key_value_heads", "num_attention_heads"),
        head_dim=head_dim,
        in_features=hidden,
        out_features=hidden,
        rope=_with_theta(
            read_rope(view.layer, head_dim=head_dim, is_neox_style=variant not in ("cohere", "llama4")), variant
        ),
        qkv_bias=bool(qkv),
        o_bias=every,
        fused_qkv=stores_fused_qkv(view, index),
    )
    if variant == "cohere":
        return _cohere(view, found, index)
    return _llama4(view, found, index) if variant == "llama4" else found


def _cohere(view: ConfigView, attention: GQASpec, index: int) -> GQASpec:
    """Head norms with a weight per head; the second version's windows, outside of which nothing rotates."""
    attention = replace(attention, qk_norm=bool(view.layer.flag("use_qk_norm")), head_norm="layer")
    types, model_type = view.layer.texts("layer_types"), view.layer.text("model_type") or ""
    if model_type == "cohere" or not (types or model_type.startswith("cohere2")):
        return attention
    pattern = view.layer.extent("sliding_window_pattern") or 4
    kind = types[index] if index < len(types) else FULL if (index + 1) % pattern == 0 else SLIDING
    if kind != SLIDING:
        return replace(attention, rotates=False)
    stated = "sliding_window" in view.layer
    return replace(attention, sliding_window=view.layer.extent("sliding_window") if stated else 4096)


def _llama4(view: ConfigView, attention: GQASpec, index: int) -> GQASpec:
    """What layers that rotate have, and what those that do not; a key that is absent means what Llama 4's class says."""
    layer = view.layer
    turning = layer.ids("no_rope_layers") or ()
    interval = layer.extent("no_rope_layer_interval") or 4
    rotates = bool(turning[index]) if index < len(turning) else (index + 1) % interval != 0
    types = layer.texts("layer_types")
    chunked = types[index] == CHUNKED if index < len(types) else rotates
    chunk = layer.extent("attention_chunk_size") if "attention_chunk_size" in layer else 8192
    # Older files state the tuning as a number.
    tuned = layer.raw("attn_temperature_tuning")
    tuned = bool(tuned) if isinstance(tuned, (bool, int)) else layer.flag("attn_temperature_tuning") is not False
    default = TemperatureSpec()
    strength, floor = layer.number("attn_scale"), layer.number("floor_scale")
    temperature = TemperatureSpec(
        attn_scale=default.attn_scale if strength is None else strength,
        floor_scale=default.floor_scale if floor is None else floor,
    )
    return replace(
        attention,
        qk_norm=rotates and layer.flag("use_qk_norm") is not False,
        head_norm="plain",
        rotates=rotates,
        chunk_size=chunk if chunked else None,
        temperature=temperature if tuned and not rotates else None,
    )


def _with_theta(rope: RopeSpec, variant: Variant) -> RopeSpec:
    return replace(rope, theta=DEFAULT_THETA[variant]) if rope.theta is None else rope


def _vocabulary(view: ConfigView) -> VocabularySpec:
    key = "truncated_vocab_size" if view.root.raw("truncated_vocab_size") is not None else None
    tied = view.root.flag("tie_word_embeddings")
    tied = view.layer.flag("tie_word_embeddings") if tied is None else tied
    return VocabularySpec(
        vocab_size=view.layer.extent("vocab_size"),
        draft_vocab_size=None if key is None else view.root.extent(key),
        draft_vocab_key=key,
        tie_word_embeddings=bool(tied),
    )


def _layers_built(view: ConfigView, stated: Extent) -> int:
    return held_layers(view) or stated or 1


def _tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    options, hidden = _of(spec), spec.hidden_size
    yield ExpectedTensor(name="fc.weight", shape=(hidden, times(2, hidden)), fault="fc-missing")
    yield bias("fc.bias", hidden, options.fc_bias)
    if options.variant == "minicpm":
        yield norm("input_norm1", hidden)
        yield norm("input_norm2", hidden)
    for layer in spec.layers:
        yield from _layer_tensors(spec, options, layer)
    yield _final_norm(options, hidden)
    yield ExpectedTensor(
        name="embed_tokens.weight",
        shape=(spec.vocabulary.vocab_size, hidden),
        need="optional",
        reason="engines take the target's embedding",
    )
    vocabulary = spec.vocabulary
    yield ExpectedTensor(
        name="lm_head.weight",
        shape=(vocabulary.head_rows, hidden),
        need="required" if options.own_head else "optional",
        reason="" if options.own_head else "engines take the target's head, and ignore one in the file",
        check="vocabulary.lm-head",
        fault="lm-head-missing",
    )
    if options.converted:
        yield ExpectedTensor(
            name="token_map",
            shape=(vocabulary.head_rows,),
            need="required" if vocabulary.is_reduced else "optional",
            reason="" if vocabulary.is_reduced else "with the target's vocabulary the map is the identity",
            kind="int",
        )


def _layer_tensors(spec: DraftSpec, options: Eagle1Options, layer: LayerSpec) -> Iterator[ExpectedTensor]:
    prefix, hidden = f"layers.{layer.index}", spec.hidden_size
    if layer.index > 0 or options.has_first_input_norm:
        yield norm(f"{prefix}.input_layernorm", hidden, layer.index)
    else:
        yield ExpectedTensor(
            name=f"{prefix}.input_layernorm.weight",
            shape=(hidden,),
            need="optional" if options.converted else "never",
            reason="vLLM's converted class stores it and replaces it by the identity"
            if options.converted
            else "an EAGLE-1 draft does not norm the input of its first layer",
            layer=layer.index,
        )
    if isinstance(layer.attention, MLASpec):
        yield from mla_tensors(layer, layer.attention)
    elif layer.attention is not None:
        yield from gqa_tensors(layer, layer.attention)
    if options.variant != "cohere":
        yield norm(f"{prefix}.post_attention_layernorm", hidden, layer.index)
    if layer.moe is None:
        yield from mlp_tensors(layer, hidden)
        return
    for name, shape in _expert_shapes(layer.moe, hidden).items():
        yield ExpectedTensor(name=f"{prefix}.mlp.{name}", shape=shape, layer=layer.index)


def _expert_shapes(moe: MoESpec, hidden: Extent) -> dict[str, tuple[Extent, ...]]:
    """Llama 4's experts, stored [experts, in, out], and the one that every token passes."""
    experts, inner, shared = moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size
    return {
        "router.weight": (experts, hidden),
        "experts.gate_up_proj": (experts, hidden, times(2, inner)),
        "experts.down_proj": (experts, inner, hidden),
        "shared_expert.gate_proj.weight": (shared, hidden),
        "shared_expert.up_proj.weight": (shared, hidden),
        "shared_expert.down_proj.weight": (hidden, shared),
    }


def _build_experts(layer: LayerSpec, moe: MoESpec, source: TensorSource) -> Any:
    """Llama 4's experts under the names, and in the orientation, of `layers.MoE`."""
    from pytest_specdecode.families.building import take_named
    from pytest_specdecode.layers import MoE
    from pytest_specdecode.layers.linear import known

    prefix = f"layers.{layer.index}.mlp"
    hidden = known(None if layer.attention is None else layer.attention.out_features, "hidden_size")
    known(moe.num_experts, "num_local_experts")
    known(moe.intermediate_size, "intermediate_size")
    held = {
        name: take_named(source, f"{prefix}.{name}", tuple(known(extent, name) for extent in shape))
        for name, shape in _expert_shapes(moe, hidden).items()
    }
    parts = {
        "gate.weight": held["router.weight"],
        "experts.gate_up_proj": held["experts.gate_up_proj"].transpose(1, 2),
        "experts.down_proj": held["experts.down_proj"].transpose(1, 2),
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        parts[f"shared_experts.{name}.weight"] = held[f"shared_expert.{name}.weight"]
    return MoE(moe, parts, hidden_size=hidden, hidden_act=layer.hidden_act)


def _final_norm(options: Eagle1Options, hidden: Extent) -> ExpectedTensor:
    if options.has_final_norm:
        return norm("norm", hidden)
    tolerated = {
        "minicpm": "vLLM's class has one and does not apply it",
        "llama": "vLLM's converted class stores one and replaces it by the identity" if options.converted else "",
    }[options.variant if options.variant == "minicpm" else "llama"]
    return ExpectedTensor(
        name="norm.weight",
        shape=(hidden,),
        need="optional" if tolerated else "never",
        reason=tolerated or "an EAGLE-1 draft does not norm its output",
    )


def _norm(options: Eagle1Options, source: TensorSource, name: str, width: Extent, eps: float) -> Any:
    from pytest_specdecode.families.building import take_named
    from pytest_specdecode.layers.linear import known
    from pytest_specdecode.layers.norms import LayerNorm, RMSNorm

    weight = take_named(source, f"{name}.weight", (known(width, "hidden_size"),))
    return LayerNorm(weight, eps) if options.layer_norm else RMSNorm(weight, eps)
