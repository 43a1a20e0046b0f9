"""DSpark: a DFlash block whose rows are corrected by the token before them, with a guess of how likely each row is accepted.

    h = norm(DFlash layers(block, context))                      rows of the block [B, H]
    e_i = markov_w1[token before row i]                          rank r; a target id: the anchor at first, then what was drafted
    logits_i = lm_head(h_i) + markov_w2(s_i)
        vanilla: s_i = e_i
        gated:   s_i = sigmoid(gate_proj([h_i, e_i])) * e_i
        rnn:     g, c, o = joint_proj([state, e_i, h_i]);  state = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c);  s_i = tanh(o)
    confidence_i = confidence_head.proj([h_i, e_i])              a logit; without e_i where the head does not read it

With a reduced vocabulary `lm_head` and `markov_w2` have a row per draft id, `embed_tokens` and `markov_w1` one per target id, and a
drafted id goes through d2t before it is the token before the next row. Row 0 drafts where `sample_from_anchor` says so; the context
holds no anchor.

Six packagings: DeepSpec (all keys at top level, embedding and head of its own), SpecForge and LiquidAI (`dflash_config`, the target's
embedding and head), `speculators`, ModelOpt (heads without their prefixes), Kimi K3 (latent attention) and DeepSeek-V4, where the draft
lies inside its target as stages `mtp.{i}.*`. A configuration that DeepSpec's trainer copied from a Qwen 3.5 target speaks of the
target's partial rotation and gates; only where the draft is a native fork of such a model do they describe the draft, and then its
norms multiply by 1 + w and q_proj holds a gate beside every query. The formula of DeepSeek-V4's stages stands in `deepseek_v4_layers`; its
confidence head reads rows before the final norm.

Gemma 4's layers take V from the K projection (full attention), norm it without a weight, and norm each sublayer's output as well:

    y = x + post_attention_layernorm(attention(input_layernorm(x)))
    z = (y + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(y)))) * layer_scalar

Sources: deepseek-ai/DeepSpec, SpecForge `specforge/modeling/draft/dspark.py`, speculators `models/dspark`, vLLM `gemma4_dspark.py` and
`configs/k3_dspark.py`, SGLang `srt/models/dspark.py`, mlx-dspark `config.py` and `model.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_specdecode.errors import ConfigError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, ReferenceLayer, Signal, TensorSource
from pytest_specdecode.families.common import held_layers, read_dtype, read_eps, read_mla, read_vocabulary
from pytest_specdecode.families.config import MAX_LAYERS, Section
from pytest_specdecode.families.deepseek_v4 import (
    StageSpec,
    head_streams,
    read_stage,
    read_stage_moe,
    read_stage_rope,
    stage_tensors,
)
from pytest_specdecode.families.dflash import DFlash, sink
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.tensors import (
    embedding,
    gqa_tensors,
    mla_tensors,
    mlp_tensors,
    norm,
    vocabulary_tensors,
)
from pytest_specdecode.spec import (
    BlockSpec,
    DraftSpec,
    Extent,
    GQASpec,
    LayerSpec,
    MLASpec,
    TapsSpec,
    plus,
    times,
)

if TYPE_CHECKING:
    import torch

    from pytest_specdecode.families.dspark_heads import DSparkHead, DSparkModel

Backbone = Literal["qwen3", "gemma4", "mla", "deepseek-v4"]
MarkovKind = Literal["vanilla", "gated", "rnn"]

#: Keys that only DSpark's own part of a configuration has.
HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_EMBEDDED_KEYS = ("dspark_block_size", "dspark_target_layer_ids", "dspark_markov_rank", "dspark_noise_token_id")

#: ModelOpt's names, Kimi K3's, and those of a DeepSeek-V4 stage, by what they are called here.
_ALIASES = {
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
}
_STAGE_ALIASES = {
    "main_proj.": "fc.",
    "main_norm.": "hidden_norm.",
    "norm.": "norm.",
    "head.": "lm_head.",
    "embed.": "embed_tokens.",
    "emb.tok_emb.": "embed_tokens.",
    "markov_head.": "markov_head.",
    "confidence_head.": "confidence_head.",
    "hc_head_": "hc_head.",
}
_STAGE_NAMES = {new: old for old, new in reversed(_STAGE_ALIASES.items())}
_OPENING = ("fc.", "hidden_norm.", "embed_tokens.")
_MARKOV_KINDS: dict[str, MarkovKind] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
#: What closes the draft, and lies in its last stage.
_CLOSING = ("norm.", "hc_head.", "markov_head.", "confidence_head.", "lm_head.")
_STAGE = re.compile(r"mtp\.(\d{1,4})\.(.+)")


@dataclass(frozen=True, kw_only=True)
class DSparkOptions:
    """What a DSpark draft has beside its block layers.

    Attributes:
        backbone: whose layers they are.
        rank_stated: whether the file states r, and not only the weights.
        markov_rank: r; 0 for no Markov head, None where neither the file nor the weights say.
        markov_head_type: `vanilla` where the file does not say, as every reader takes it; None for a word that is not known.
        confidence_head: whether there is one; None where the file does not say.
        confidence_with_markov: whether it reads the Markov embedding beside the hidden state.
        confidence_bias: whether its projection must have a bias.
        own_vocabulary: whether embedding and head must be in the file, because the packaging's engines do not take the target's.
        norm_kind: of the norms outside the layers.
        fc_norm: one norm per tap before the concatenation.
        stage: sizes of a DeepSeek-V4 stage, where the draft is built of such.
        compressed: the stages that keep compressed rows beside those of their window; none in any file that is known.
        packed: stems of matrices that MLX packed, with the bits of a number and the numbers that share a scale.
    """

    backbone: Backbone = "qwen3"
    markov_rank: Extent = None
    rank_stated: bool = True
    markov_head_type: MarkovKind | None = "vanilla"
    confidence_head: bool | None = None
    confidence_with_markov: bool = True
    confidence_bias: bool = True
    own_vocabulary: bool = False
    norm_kind: Literal["rms", "gemma"] = "rms"
    fc_norm: bool = False
    stage: StageSpec | None = None
    compressed: tuple[int, ...] = ()
    packed: tuple[str, ...] = ()
    packed_bits: Extent = None
    packed_group: Extent = None


class DSpark(DFlash):
    """DSpark in all its packagings."""

    name = "dspark"
    title = "DSpark"
    packagings: tuple[str, ...] = ("plain", "speculators", "embedded")
    label = r"DSpark"
    own_tensors = ("markov_head.", "confidence_head.")
    own_keys = HEAD_KEYS
    tiny: Mapping[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
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
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "layer_types": ["full_attention", "full_attention"],
        "dtype": "bfloat16",
        "block_size": 7,
        "mask_token_id": 511,
        "target_layer_ids": [1, 9, 17],
        "num_target_layers": 20,
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """As for DFlash's relatives; and `projector_type` at top level, Kimi K3's `model_type`, a target's `dspark_*` keys."""
        labels = [
            (key, value)
            for key, value in (
                ("projector_type", view.root.text("projector_type")),
                ("model_type", view.root.text("model_type")),
            )
            if value in ("dspark", "k3_dspark")
        ]
        labels += [(section.path(key), section.raw(key)) for section, key in _embedded_keys(view.root)]
        named = [Signal(family=self.name, kind="label", where=where, value=value) for where, value in labels]
        return [*named, *super().signals(view)]

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; a draft inside a DeepSeek-V4 target is told by the target's `dspark_*` keys."""
        if is_embedded(view.root):
            return _parse_embedded(view)
        spec = super().parse(view)
        assert spec.block is not None
        backbone = _backbone(view)
        taps = spec.taps
        if backbone == "mla":
            # Kimi K3 counts its taps under that name and the target's layers under another.
            taps = replace(taps, num_target_layers=view.root.extent("target_num_hidden_layers"))
        scale = spec.block.input_embedding_scale
        if backbone == "gemma4" and "input_embedding_scale" not in view.root and spec.hidden_size:
            scale = math.sqrt(spec.hidden_size)
        block = replace(
            spec.block,
            sample_from_anchor=_sample_from_anchor(view),
            is_causal=_first_flag(spec.block.is_causal, view.root.flag("dflash_query_causal")),
            input_embedding_scale=scale,
        )
        return replace(spec, taps=taps, block=block)

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """The backbone's tensors, then the Markov and confidence heads'."""
        found = _v4_tensors(spec) if _options(spec).backbone == "deepseek-v4" else _block_tensors(spec)
        return tuple(_packed(found, _options(spec)))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer; NoReferenceError for packed and for quantised weights."""
        if _options(spec).backbone == "deepseek-v4":
            from pytest_specdecode.families.deepseek_v4_layers import DraftStage

            return DraftStage(spec, layer, source)
        from pytest_specdecode.families.dspark_heads import DSparkLayer, LatentBlockLayer

        latent = isinstance(layer.attention, MLASpec)
        return LatentBlockLayer(spec, layer, source) if latent else DSparkLayer(spec, layer, source)

    def build_head(self, spec: DraftSpec, source: TensorSource) -> DSparkHead:
        """What turns rows into tokens: the draft's own head where it has one, the Markov and the confidence head.

        Raises:
            LayerBuildError: the spec or a tensor does not allow it.
        """
        from pytest_specdecode.families.dspark_heads import DSparkHead

        return DSparkHead(spec, source)

    def run_head(self, spec: DraftSpec, head: DSparkHead, states: torch.Tensor) -> Any:
        """A block's logits and confidences behind token 0; where the target's head serves, one of zeros stands in for it."""
        lm_head = (
            None if head.lm_head is not None else states.new_zeros(spec.vocabulary.head_rows or 0, states.shape[-1])
        )
        return head.block_logits(states, states.new_zeros(len(states)).long(), lm_head)

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """The Markov head's rank must be stated, and its kind be one that is known."""
        options = _options(spec)
        found = []
        if not options.rank_stated:
            found.append(
                ConfigError("markov_rank is not stated", key="markov_rank", due=options.markov_rank or "a whole number")
            )
        if options.markov_head_type is None:
            message = "markov_head_type is no kind of Markov head that is known"
            found.append(ConfigError(message, key="markov_head_type", due=list(_MARKOV_KINDS)))
        return tuple(found)

    def fused_kv_reason(self, spec: DraftSpec) -> str | None:
        """Why there is no stack: shared K and V, latent attention, interleaved rotation or packed weights."""
        options = _options(spec)
        if options.backbone in ("mla", "deepseek-v4"):
            return "its attention keeps one latent row per token, not K/V heads that a stack of projections could fill"
        for layer in spec.layers:
            if not isinstance(layer.attention, GQASpec):
                continue
            if layer.attention.k_eq_v or layer.attention.v_norm:
                return "Gemma's V is the K projection under a norm of its own, and the stack's kernel writes V as the GEMM gave it"
            if not layer.attention.rope.is_neox_style:
                return "its rotation is interleaved, which no engine's stacked kernel does; engines go layer by layer"
        if options.packed:
            return "its projections are stored packed, so engines project layer by layer"
        return None

    def fused_latent_reason(self, spec: DraftSpec) -> str | None:
        """Why there is no latent stack: K/V heads, one layer, packed weights, or a DeepSeek-V4 stage that compresses its context.

        Windows and sinks are no reasons: they change who is looked at, not the row that a token leaves.
        """
        options = _options(spec)
        if options.backbone not in ("mla", "deepseek-v4"):
            return "its attention keeps K/V heads, not one latent row per token"
        if len(spec.layers) < 2:
            return "it has one layer, so there is nothing to stack"
        if options.packed:
            return "its projections are stored packed"
        if options.compressed:
            stages = ", ".join(map(str, options.compressed))
            return f"stage {stages} keeps rows that a compressor makes of several tokens, and the latent stack makes one row per token"
        return None

    def canonical(self, name: str, root: Section | None = None) -> str:
        """ModelOpt's, Kimi K3's and DeepSeek-V4's names, and a leading `model.`."""
        name = name.removeprefix("model.")
        stage = _STAGE.fullmatch(name)
        if stage is not None:
            return _renamed(stage[2], _STAGE_ALIASES) or f"layers.{int(stage[1])}.{stage[2]}"
        name = super().canonical(name)
        return _renamed(name, _ALIASES) or name

    def stored_name(self, name: str, root: Section, spec: DraftSpec) -> str:
        """Inside a target the stage that holds it: the first what reads the taps, the last what closes the draft."""
        if spec.packaging != "embedded":
            return name
        if match := re.fullmatch(r"layers\.(.+)", name):
            return f"mtp.{match[1]}"
        for new, old in _STAGE_NAMES.items():
            if name.startswith(new):
                last = 0 if new in _OPENING else max(len(spec.layers) - 1, 0)
                return f"mtp.{last}.{old}{name.removeprefix(new)}"
        return name

    def owns(self, name: str, root: Section) -> bool:
        """Inside a target only the stages' tensors."""
        return not is_embedded(root) or _STAGE.fullmatch(name.removeprefix("model.")) is not None

    def build_model(self, spec: DraftSpec, source: TensorSource) -> DSparkModel:
        """The whole backbone: taps to context, a block to states after the final norm."""
        layers = [self.build_layer(spec, layer, source) for layer in spec.layers]
        if _options(spec).backbone == "deepseek-v4":
            from pytest_specdecode.families.deepseek_v4_layers import DraftStages

            return DraftStages(spec, layers, source)
        from pytest_specdecode.families.dspark_heads import DSparkModel

        return DSparkModel(spec, layers, source)

    def _options(self, view: ConfigView) -> DSparkOptions:
        return _read_options(view, _backbone(view), _is_native_fork(view))

    def _key_signals(self, view: ConfigView) -> list[Signal]:
        return [
            Signal(family=self.name, kind="keys", where=section.path(key), value=section.raw(key))
            for section in (view.root, view.root.section("dflash_config"))
            for key in HEAD_KEYS
            if section.raw(key) is not None
        ]

    def _layer(self, view: ConfigView, index: int) -> LayerSpec:
        layer, backbone, native = super()._layer(view, index), _backbone(view), _is_native_fork(view)
        assert isinstance(layer.attention, GQASpec)
        attention = (
            read_mla(view, in_features=view.layer.extent("hidden_size"))
            if backbone == "mla"
            else _gemma(view, layer.attention, index, layer.layer_type)
            if backbone == "gemma4"
            else _grouped(view, layer.attention, native=native)
        )
        causal = _query_causal(view)
        return replace(
            layer,
            attention=attention,
            hidden_act=view.layer.text("hidden_act", "hidden_activation") or "silu",
            norm_kind="gemma" if native else "rms",
            is_causal=layer.is_causal if causal is None else causal,
        )


def is_embedded(root: Section) -> bool:
    """Whether `root` is the configuration of a target that holds a DSpark draft."""
    return bool(_embedded_keys(root))


def _embedded_keys(root: Section) -> list[tuple[Section, str]]:
    sections = [root]
    if isinstance(root.raw("text_config"), Mapping):
        sections.append(root.section("text_config"))
    return [(section, key) for section in sections for key in _EMBEDDED_KEYS if section.raw(key) is not None]


def _renamed(name: str, aliases: Mapping[str, str]) -> str | None:
    return next((new + name.removeprefix(old) for old, new in aliases.items() if name.startswith(old)), None)


def _options(spec: DraftSpec) -> DSparkOptions:
    return spec.options if isinstance(spec.options, DSparkOptions) else DSparkOptions()


# --- a draft of its own ---------------------------------------------------------------------------------------------------------------


def _backbone(view: ConfigView) -> Backbone:
    names = (*view.root.texts("architectures"), view.layer.text("model_type") or "")
    if view.layer.raw("kv_lora_rank") is not None or any(re.match(r"K3|k3_", name) for name in names):
        return "mla"
    return "gemma4" if any("gemma4" in name.lower() for name in names) else "qwen3"


def _is_native_fork(view: ConfigView) -> bool:
    """Whether the layers are Qwen 3.5's own, so that what the configuration says of gates and rotation is true of them."""
    labelled = any(re.search(r"Qwen3_?5", architecture) for architecture in view.root.texts("architectures"))
    return bool(
        labelled
        or view.layer.flag("enable_qwen35_gated_q_proj")
        or view.layer.text("model_type") in ("qwen3_5", "qwen3_5_text")
    )


def _query_causal(view: ConfigView) -> bool | None:
    """`dflash_query_causal`, where nothing that outranks it is stated."""
    stated = view.root.raw("is_causal") is not None or view.root.section("dflash_config").raw("causal") is not None
    return None if stated or view.packaging == "speculators" else view.root.flag("dflash_query_causal")


def _grouped(view: ConfigView, attention: GQASpec, *, native: bool) -> GQASpec:
    if native:
        return replace(attention, q_gate=bool(view.layer.flag("enable_qwen35_gated_q_proj")))
    # Qwen 3's rotary class turns the whole head and does not know `partial_rotary_factor`: the value is the target's.
    return replace(attention, rope=replace(attention.rope, rotary_dim=attention.head_dim))


def _gemma(view: ConfigView, attention: GQASpec, index: int, layer_type: str) -> GQASpec:
    full = layer_type != "sliding_attention"
    # transformers 5.15 writes the sizes layer by layer where older files say `global_head_dim`.
    own = view.layer.section("per_layer_config").section(str(index))
    head_dim = own.extent("head_dim")
    if head_dim is None:
        head_dim = _first(view.layer.extent("global_head_dim") if full else None, attention.head_dim)
    k_eq_v = full and bool(view.layer.flag("attention_k_eq_v"))
    global_heads = view.layer.extent("num_global_key_value_heads") if k_eq_v else None
    return replace(
        attention,
        num_kv_heads=_first(own.extent("num_key_value_heads"), global_heads, attention.num_kv_heads),
        head_dim=head_dim,
        rope=read_rope(view.layer, head_dim=head_dim, layer_type=layer_type),
        k_eq_v=k_eq_v,
        v_norm=True,
        scaling=1.0,
    )


def _sample_from_anchor(view: ConfigView) -> bool | None:
    """As stated, else from the number of tokens that the file says a block proposes."""
    stated = view.root.flag("sample_from_anchor")
    if stated is None:
        stated = view.root.section("dflash_config").flag("sample_from_anchor")
    if stated is not None:
        return stated
    methods = view.root.section("speculators_config").raw("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    block = view.root.extent("block_size")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or block is None:
        return None
    return {block: True, block - 1: False}.get(tokens)


def _read_options(view: ConfigView, backbone: Backbone, native: bool) -> DSparkOptions:
    nested = view.root.section("dflash_config")
    kind = nested.text("markov_head_type") or view.root.text("markov_head_type") or "vanilla"
    enabled = _first_flag(nested.flag("enable_confidence_head"), view.root.flag("enable_confidence_head"))
    with_markov = _first_flag(nested.flag("confidence_head_with_markov"), view.root.flag("confidence_head_with_markov"))
    stated_rank = _first(nested.extent("markov_rank"), view.root.extent("markov_rank"))
    rank = _first(stated_rank, _rank_of_weights(view))
    confidence = view.tensors.get("confidence_head.proj.weight")
    quantisation = view.root.section("quantization") if isinstance(view.root.raw("quantization"), Mapping) else None
    deepspec = view.packaging == "plain" and backbone != "mla" and nested.ids("target_layer_ids") is None
    return DSparkOptions(
        backbone=backbone,
        markov_rank=rank,
        rank_stated=stated_rank is not None,
        markov_head_type=_MARKOV_KINDS.get(kind.lower()),
        confidence_head=enabled if enabled is not None or confidence is None else True,
        confidence_with_markov=with_markov is not False and rank != 0,
        own_vocabulary=deepspec and view.root.flag("has_lm_head") is not False,
        norm_kind="gemma" if native else "rms",
        fc_norm=bool(view.root.flag("fc_norm")),
        packed=tuple(
            sorted(
                name.removesuffix(".scales")
                for name in view.tensors
                if name.endswith(".scales") and f"{name.removesuffix('.scales')}.weight" in view.tensors
            )
        ),
        packed_bits=None if quantisation is None else quantisation.extent("bits"),
        packed_group=None if quantisation is None else quantisation.extent("group_size"),
    )


def _rank_of_weights(view: ConfigView) -> Extent:
    header = view.tensors.get("markov_head.markov_w1.weight")
    return header.shape[1] if header is not None and len(header.shape) == 2 else None


def _first(*values: Extent) -> Extent:
    return next((value for value in values if value is not None), None)


def _first_flag(*values: bool | None) -> bool | None:
    return next((value for value in values if value is not None), None)


# --- a draft inside DeepSeek-V4 -------------------------------------------------------------------------------------------------------


def _parse_embedded(view: ConfigView) -> DraftSpec:
    place = next((section for section, _ in _embedded_keys(view.root)), view.layer)
    hidden = place.extent("hidden_size")
    stages = _stages(view, place)
    ids = place.ids("dspark_target_layer_ids") or None
    rank = _first(place.extent("dspark_markov_rank"), _rank_of_weights(view))
    return DraftSpec(
        family=DSpark.name,
        packaging="embedded",
        architectures=view.root.texts("architectures"),
        model_type=place.text("model_type"),
        hidden_size=hidden,
        target_hidden_size=hidden,
        num_hidden_layers=stages,
        layer_key=place.path("dspark_target_layer_ids" if place.raw("compress_ratios") is None else "compress_ratios"),
        layers=tuple(_stage(view, place, index) for index in range(stages or 0)),
        vocabulary=read_vocabulary(view),
        taps=TapsSpec(
            ids=ids,
            convention="output",
            count=len(ids) if ids else None,
            stated=place.stated("dspark_target_layer_ids") if ids else (),
            num_target_layers=place.layers(),
        ),
        dtype=read_dtype(view),
        norm_eps=read_eps(view, place),
        block=BlockSpec(
            block_size=place.extent("dspark_block_size"),
            block_size_stated=place.stated("dspark_block_size"),
            mask_token_id=place.extent("dspark_noise_token_id"),
            mask_token_stated=place.stated("dspark_noise_token_id"),
            is_causal=False,
            sample_from_anchor=True,
            variant="dspark",
        ),
        options=DSparkOptions(
            backbone="deepseek-v4",
            markov_rank=rank,
            confidence_head=True,
            confidence_bias=False,
            compressed=_compressed(view, place, stages or 0),
            stage=read_stage(
                place,
                packed_experts=any(
                    re.fullmatch(r"layers\.\d+\.ffn\.experts\.\d+\.w1\.weight", name) and not header.is_float
                    for name, header in view.tensors.items()
                ),
            ),
        ),
    )


def _stages(view: ConfigView, place: Section) -> Extent:
    """Stages in the weights, else what the configuration states.

    What closes the draft lies in its last stage. Where the weights hold none of it, their last stage is not the draft's, and a higher
    number that is stated is believed.
    """
    held, stated = held_layers(view), _stated_stages(place)
    if held and any(name.startswith(_CLOSING) for name in view.tensors):
        return held
    return max(held, stated or 0) or None


def _stated_stages(place: Section) -> Extent:
    """What `compress_ratios` has beyond the target's layers, else one stage for each tap."""
    ratios, depth = place.raw("compress_ratios"), place.layers()
    if isinstance(ratios, list) and depth is not None and 0 < len(ratios) - depth <= MAX_LAYERS:
        return len(ratios) - depth
    ids = place.ids("dspark_target_layer_ids")
    return min(len(ids), MAX_LAYERS) if ids else None


def _compressed(view: ConfigView, place: Section, stages: int) -> tuple[int, ...]:
    """The stages that compress: those whose ratio, beyond the target's, is above 1, or that hold a compressor's weights."""
    ratios, depth = place.raw("compress_ratios"), place.layers()
    stated = ratios[depth : depth + stages] if isinstance(ratios, list) and depth is not None else []
    # By the names on disk: the target's layers, which compress, go by the stages' canonical names.
    parts = [_STAGE.fullmatch(header.name.removeprefix("model.")) for header in view.tensors.values()]
    held = {int(part[1]) for part in parts if part is not None and part[2].startswith("attn.compressor.")}
    return tuple(
        index
        for index in range(stages)
        if index in held or (index < len(stated) and isinstance(stated[index], int) and stated[index] > 1)
    )


def _stage(view: ConfigView, place: Section, index: int) -> LayerSpec:
    hidden, head_dim = place.extent("hidden_size"), place.extent("head_dim")
    return LayerSpec(
        index=index,
        attention=GQASpec(
            num_heads=place.extent("num_attention_heads"),
            num_kv_heads=place.extent("num_key_value_heads"),
            head_dim=head_dim,
            in_features=hidden,
            out_features=hidden,
            rope=read_stage_rope(place),
            sliding_window=place.extent("sliding_window"),
            k_eq_v=True,
        ),
        intermediate_size=place.extent("moe_intermediate_size"),
        norm_eps=read_eps(view, place),
        layer_type="sliding_attention",
        is_causal=False,
        moe=read_stage_moe(place),
        window_reading="anchor",
    )


# --- tensors --------------------------------------------------------------------------------------------------------------------------


def _block_tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    options, hidden, target_hidden = _options(spec), spec.hidden_size, spec.target_hidden_size
    yield ExpectedTensor(name="fc.weight", shape=(hidden, times(spec.taps.count, target_hidden)), fault="fc-missing")
    if options.fc_norm:
        for index in range(spec.taps.count or 0):
            yield norm(f"fc_norm.{index}", target_hidden)
    yield norm("hidden_norm", hidden)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        yield norm(f"{prefix}.input_layernorm", hidden, layer.index)
        if isinstance(layer.attention, MLASpec):
            yield from mla_tensors(layer, layer.attention)
        elif layer.attention is not None:
            yield from gqa_tensors(layer, layer.attention)
            yield sink(layer, layer.attention)
        yield norm(f"{prefix}.post_attention_layernorm", hidden, layer.index)
        if options.backbone == "gemma4":
            yield norm(f"{prefix}.pre_feedforward_layernorm", hidden, layer.index)
            yield norm(f"{prefix}.post_feedforward_layernorm", hidden, layer.index)
            yield ExpectedTensor(name=f"{prefix}.layer_scalar", shape=(1,), layer=layer.index)
        yield from mlp_tensors(layer, hidden)
    yield norm("norm", hidden)
    yield from head_tensors(spec)
    yield from vocabulary_tensors(spec, own_head=options.own_vocabulary or spec.vocabulary.is_reduced)
    yield embedding(spec, required=options.own_vocabulary)


def head_tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    """The Markov and the confidence head."""
    options, hidden, rank = _options(spec), spec.hidden_size, _options(spec).markov_rank
    if rank != 0:
        for name, rows in (("markov_w1", spec.vocabulary.vocab_size), ("markov_w2", spec.vocabulary.head_rows)):
            yield ExpectedTensor(name=f"markov_head.{name}.weight", shape=(rows, rank), fault="markov-missing")
        extra: dict[str, tuple[Extent, Extent]] = {}
        if options.markov_head_type == "gated":
            extra = {"gate_proj": (rank, plus(hidden, rank))}
        elif options.markov_head_type == "rnn":
            extra = {"joint_proj": (times(3, rank), plus(times(2, rank), hidden))}
        for name, shape in extra.items():
            yield ExpectedTensor(name=f"markov_head.{name}.weight", shape=shape, fault="markov-missing")
            yield ExpectedTensor(name=f"markov_head.{name}.bias", shape=shape[:1], fault="markov-missing")
    if options.confidence_head is False:
        return
    width = plus(hidden, rank) if options.confidence_with_markov else hidden
    stated = options.confidence_head is True
    unstated = "enable_confidence_head is not stated, and readers differ on what that means"
    yield ExpectedTensor(
        name="confidence_head.proj.weight",
        shape=(1, width),
        need="required" if stated else "optional",
        reason="" if stated else unstated,
        fault="confidence-missing",
    )
    with_bias = stated and options.confidence_bias
    yield ExpectedTensor(
        name="confidence_head.proj.bias",
        shape=(1,),
        need="required" if with_bias else "optional",
        reason="" if with_bias else "heads inside a DeepSeek-V4 target have none" if stated else unstated,
        fault="confidence-missing",
    )


def _v4_tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    """Stages of DeepSeek-V4; every quantised matrix may have its scales beside it."""
    options, hidden = _options(spec), spec.hidden_size
    fc = ExpectedTensor(name="fc.weight", shape=(hidden, times(spec.taps.count, hidden)), fault="fc-missing")
    yield fc
    yield from _v4_scales(fc, False)
    yield norm("hidden_norm", hidden)
    stage = options.stage
    assert stage is not None
    for layer in spec.layers:
        yield from stage_tensors(layer, stage, hidden=hidden, inner=layer.intermediate_size, scales=_v4_scales)
    yield norm("norm", hidden)
    yield from head_streams(stage, hidden, "hc_head.", None)
    yield from head_tensors(spec)
    yield from vocabulary_tensors(spec, own_head=False)
    yield embedding(spec)


def _v4_scales(matrix: ExpectedTensor, packed: bool) -> Iterator[ExpectedTensor]:
    yield ExpectedTensor(
        name=f"{matrix.name.removesuffix('weight')}scale",
        shape=(None, None),
        need="optional",
        reason="the scales of a matrix that is stored in eight or four bits",
        layer=matrix.layer,
    )


def _packed(tensors: Iterator[ExpectedTensor], options: DSparkOptions) -> Iterator[ExpectedTensor]:
    """The same, with the matrices that MLX packed in their packed form: words of 32 bits, scales and offsets per group."""
    for tensor in tensors:
        stem = tensor.name.removesuffix(".weight")
        if stem not in options.packed or stem == tensor.name or len(tensor.shape) != 2:
            yield tensor
            continue
        rows, columns = tensor.shape
        bits, group = options.packed_bits, options.packed_group
        words = None if columns is None or bits is None else columns * bits // 32
        yield replace(tensor, shape=(rows, words), kind="int")
        for name in ("scales", "biases"):
            yield ExpectedTensor(
                name=f"{stem}.{name}",
                shape=(rows, None if columns is None or not group else columns // group),
                layer=tensor.layer,
            )
