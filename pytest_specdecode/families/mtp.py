"""Multi-token prediction: one decoder layer per predicted token, trained with its target and mostly stored inside it.

For the embedding of the token that was just accepted and the hidden state before it, both [T, H]:

    x = eh_proj([enorm(embed), hnorm(hidden)])        (MiMo: hidden first; DeepSeek-V4: e_proj and h_proj, added)
    y = x + self_attn(input_layernorm(x))
    z = y + mlp(post_attention_layernorm(y))          mlp: the target's kind, often a mixture of experts
    h = norm(z)                                       recycled, and read by the target's head

The same tensors go by several sets of names. N is the target's depth, i counts from 0; canonical names are `layers.{i}.*`:

    DeepSeek, GLM, Kimi, …   model.layers.{N+i}.{enorm,hnorm,eh_proj,shared_head.norm, block}
    MiMo                     model.mtp_layers.{i}.{token_layernorm,hidden_layernorm,input_proj,final_layernorm, block}
    MiMo-V2                  model.mtp.layers.{i}.{enorm,hnorm,eh_proj,pre_mlp_layernorm,final_layernorm, block}
    LongCat                  model.mtp.layers.0.{enorm.m,hnorm.m,eh_proj,transformer_layer.mlp, block}, model.mtp.norm
    ERNIE                    model.mtp_{emb_norm,hidden_norm,linear_proj}.{i}, model.mtp_block.{i}.*; the target's own norm closes it
    Qwen3-Next, Qwen3.5, …   mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}, once; mtp.layers.{i}.*
    speculators              mtp_layers.{i}.*, MiMo's names in DeepSeek's order
    DeepSeek-V4              mtp.{i}.*, its block's own names

SGLang's exporter cuts a DeepSeek layer out of its target: `...ForCausalLMNextN` with num_hidden_layers 1, the layer's names counted from
0. Its other keys stay the target's, so what they say of the first layers is not about this one.

Qwen's and Step's norms multiply by 1 + w. vLLM sets the embedding of position 0 to zero for DeepSeek's, MiMo's and ERNIE's layers, not
for the others'. MiMo-V2's heads are wider in K than in V, and LongCat scales its low-rank states; of those two the tensors are known
here, the forward is not. The block of a DeepSeek-V4 stage runs on parallel residual streams; its formula stands in `deepseek_v4_layers`.

Sources: vLLM `deepseek_mtp.py`, `mimo_mtp.py`, `mimo_v2_mtp.py`, `longcat_flash_mtp.py`, `ernie_mtp.py`, `qwen3_next_mtp.py`,
`models/deepseek_v4`; SGLang `scripts/export_deepseek_nextn.py`; transformers `MtpLayer`; speculators `models/mtp`, `convert/mtp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_specdecode.errors import NoReferenceError
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
    read_mla,
    stores_fused_qkv,
)
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.deepseek_v4 import (
    StageSpec,
    head_streams,
    read_stage,
    read_stage_moe,
    read_stage_rope,
    stage_tensors,
)
from pytest_specdecode.families.dflash import sink
from pytest_specdecode.families.rope import read_rope
from pytest_specdecode.families.stepping import SteppingLayer
from pytest_specdecode.families.tensors import gqa_tensors, mla_tensors, moe_tensors, norm
from pytest_specdecode.spec import (
    DraftSpec,
    Extent,
    GQASpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    Stated,
    TapsSpec,
    VocabularySpec,
    plus,
    times,
)

if TYPE_CHECKING:
    import torch

Style = Literal["deepseek", "mimo", "mimo-v2", "longcat", "ernie", "qwen", "deepseek-v4", "speculators"]

_LABEL = re.compile(r"MTP|NextN")
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
#: Keys of other drafts; where one stands, a count of prediction layers was copied from the target.
_FOREIGN = re.compile(r"dspark_|eagle_|dflash_config$|speculators_model_type$|draft_vocab_size$|medusa_|hydra_")

_COUNTED = re.compile(r"(?:(?:model|language_model)\.)*layers\.(?P<index>\d{1,6})\.(?P<rest>.+)")
_NAMED = re.compile(r"(?:(?:model|language_model)\.)*mtp_layers\.(\d{1,6})\.(.+)")
_QWEN_LAYER = re.compile(r"(?:(?:model|language_model)\.)*mtp\.layers\.(\d{1,6})\.(.+)")
_QWEN_STEM = re.compile(
    r"(?:(?:model|language_model)\.)*mtp\.(fc|norm|embed_tokens|pre_fc_norm_embedding|pre_fc_norm_hidden)\.(.+)"
)
_STAGE = re.compile(r"(?:(?:model|language_model)\.)*mtp\.(\d{1,6})\.(.+)")
_ERNIE = re.compile(r"(?:(?:model|language_model)\.)*mtp_(emb_norm|hidden_norm|linear_proj|block)\.(\d{1,6})\.(.+)")
_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")

_STEM = {"fc": "eh_proj", "norm": "shared_head.norm", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
#: LongCat's one layer keeps these beside it.
_BESIDE = {"norm": "shared_head.norm", "embed_tokens": "embed_tokens"}
_MIMO = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "shared_head.norm.",
}
_MIMO_V2 = {"final_layernorm.": "shared_head.norm.", "pre_mlp_layernorm.": "post_attention_layernorm."}
_LONGCAT = {"enorm.m.": "enorm.", "hnorm.m.": "hnorm.", "transformer_layer.mlp.": "mlp."}
_ERNIE_STEM = {"emb_norm": "enorm.", "hidden_norm": "hnorm.", "linear_proj": "eh_proj.", "block": ""}
_REST = {"mtp_block.": "", "shared_head.output.": "shared_head.head."}

_SHARED = "engines take the target's"
#: Edge of the blocks that one fp8 scale covers.
_FP8_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class MTPOptions:
    """What the naming scheme of a prediction layer decides.

    Attributes:
        style: the scheme.
        combine: order in which embedding and hidden state enter `eh_proj`; `sum` for two projections that are added.
        shared_stem: the stem (`enorm`, `hnorm`, `eh_proj`) and the last norm are stored once, with layer 0.
        own_norm: whether a norm closes the layer; else the target's own does.
        zero_first_embedding: position 0 reads a zero embedding, as vLLM serves it.
        fp8_block: rows and columns of a weight that share one scale, where the checkpoint is quantised so.
        indexer: heads and width of the sparse-attention indexer (DeepSeek-V3.2, GLM-5), where there is one.
        stage: sizes of a DeepSeek-V4 stage.
    """

    style: Style
    combine: Literal["embed-first", "hidden-first", "sum"] = "embed-first"
    shared_stem: bool = False
    own_norm: bool = True
    zero_first_embedding: bool = False
    fp8_block: tuple[int, int] | None = None
    indexer: tuple[int, int] | None = None
    stage: StageSpec | None = None


class MTP(Family):
    """Multi-token prediction layers, inside their target or apart."""

    name = "mtp"
    title = "MTP / NextN"
    packagings: tuple[str, ...] = ("embedded", "plain", "speculators")
    fused_kv = "a prediction layer computes the K/V of its own steps; no engine stacks them over layers"
    tiny: Mapping[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """A label, a stem in the weights, or a count of prediction layers above zero in a file with no other draft's keys."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if _LABEL.search(architecture)
        ]
        if view.root.text("speculators_model_type") == "mtp":
            found.append(Signal(family=self.name, kind="label", where="speculators_model_type", value="mtp"))
        for name, header in view.tensors.items():
            # An EAGLE-4 layer has an eh_proj, too, behind the fc of its taps.
            stem = re.fullmatch(r"layers\.\d{1,6}\.(eh_proj|e_proj)\.weight", name) and "fc.weight" not in view.tensors
            if stem and len(header.shape) == 2:
                found.append(Signal(family=self.name, kind="tensors", where=name, value=list(header.shape)))
                break
        if not any(_FOREIGN.match(key) for key in view.root.values):
            found += [
                Signal(family=self.name, kind="keys", where=section.path(key), value=section.raw(key))
                for section, key in _count_places(view)
                if section.extent(key)
            ]
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec: as many layers as are predicted, each of the kind of the target's last."""
        style = _style(view)
        places = [(section, key) for section, key in _count_places(view) if section.raw(key) is not None]
        section, key = places[0] if places else (view.layer, "mtp_num_hidden_layers" if style == "qwen" else _COUNTS[0])
        stated = section.layers(key) if places else None
        labelled = any(_LABEL.search(label) for label in view.root.texts("architectures"))
        return DraftSpec(
            family=self.name,
            packaging=view.packaging if labelled or view.packaging == "speculators" else "embedded",
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=view.layer.extent("hidden_size"),
            target_hidden_size=view.layer.extent("hidden_size"),
            num_hidden_layers=stated,
            layer_key=section.path(key),
            layers=tuple(
                _layer(view, style, index) for index in range(held_layers(view) if stated is None else stated)
            ),
            vocabulary=VocabularySpec(vocab_size=view.layer.extent("vocab_size")),
            taps=TapsSpec(required=False),
            dtype=read_dtype(view),
            norm_eps=read_eps(view),
            options=_options(view, style),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """The stem, the block and the last norm of each layer; embedding and head where a file repeats the target's."""
        options = spec.options
        assert isinstance(options, MTPOptions)
        found: list[ExpectedTensor] = []
        for layer in spec.layers:
            found += (
                _stage_tensors(spec, layer, options, options.stage)
                if options.stage is not None
                else _layer_tensors(spec, layer, options)
            )
        if spec.packaging != "embedded":
            found += [
                ExpectedTensor(
                    name=name,
                    shape=(spec.vocabulary.vocab_size, spec.hidden_size),
                    need="optional",
                    reason=_SHARED,
                )
                for name in ("embed_tokens.weight", "lm_head.weight")
            ]
        return tuple(found)

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """The reference layer; a block of fp8 weights is multiplied by its scales first.

        Raises:
            NoReferenceError: a DeepSeek-V4 stage that is quantised, or a layer of MiMo-V2 or LongCat.
        """
        options = spec.options
        assert isinstance(options, MTPOptions)
        if options.stage is not None:
            from pytest_specdecode.families.deepseek_v4_layers import PredictionStage

            return PredictionStage(options, layer, source)
        if options.style in ("mimo-v2", "longcat"):
            raise NoReferenceError(f"the reference forward of a {options.style} prediction layer is not written")
        return MTPLayer(
            options, layer, source if options.fp8_block is None else _Dequantised(source, options.fp8_block)
        )

    def canonical(self, name: str, root: Section | None = None) -> str:
        """See the table in the module; a name of the target's stays as it is."""
        if _is_cut_out(root) and name == "model.embed_tokens.weight":
            return "embed_tokens.weight"
        return _predicted(name, root) or name

    def stored_name(self, name: str, root: Section, spec: DraftSpec) -> str:
        """The released name of a prediction layer's tensor, by the scheme of its target; see the table in the module."""
        match = _LAYER.fullmatch(name)
        options = spec.options
        if match is None or not isinstance(options, MTPOptions):
            return name
        index, rest = match.groups()
        if options.style in ("mimo", "speculators"):
            inner = f"mtp_layers.{index}.{_back(rest, _MIMO) or rest}"
            return inner if options.style == "speculators" else f"model.{inner}"
        if options.style == "mimo-v2":
            return f"model.mtp.layers.{index}.{_back(rest, _MIMO_V2) or rest}"
        if options.style == "longcat":
            part, _, end = rest.rpartition(".")
            beside = _back(part, _BESIDE)
            return (
                f"model.mtp.{beside}.{end}" if beside else f"model.mtp.layers.{index}.{_back(rest, _LONGCAT) or rest}"
            )
        if options.style == "ernie":
            part, dot, end = rest.partition(".")
            stem = _back(f"{part}.", _ERNIE_STEM)
            return f"model.mtp_{stem}.{index}.{end}" if stem and dot else f"model.mtp_block.{index}.{rest}"
        if options.style == "qwen":
            part, _, end = rest.rpartition(".")
            stem = _back(part, _STEM)
            return f"mtp.{stem}.{end}" if stem and index == "0" else f"mtp.layers.{index}.{rest}"
        if options.style == "deepseek-v4":
            return f"mtp.{index}.{rest}"
        depth = _target_depth(root)
        return name if depth is None else f"model.layers.{depth + int(index)}.{rest}"

    def owns(self, name: str, root: Section) -> bool:
        """Whether `name` is a prediction layer's as it stands on disk; in a file of its own, where nothing else lies, any is."""
        alone = root.text("speculators_model_type") == "mtp" or _is_cut_out(root)
        return alone or _predicted(name, root) is not None


def stated_counts(view: ConfigView) -> tuple[Stated, ...]:
    """Every number of prediction layers that the file states, the one that counts first."""
    return tuple(
        Stated(key=section.path(key), value=section.raw(key))
        for section, key in _count_places(view)
        if section.raw(key) is not None
    )


class MTPLayer(SteppingLayer):
    """One prediction layer; see the module's formula."""

    def __init__(self, options: MTPOptions, layer: LayerSpec, source: TensorSource) -> None:
        from pytest_specdecode.families.building import build_attention, build_mlp, build_moe, build_norm
        from pytest_specdecode.families.heads import head_linear

        prefix = f"layers.{layer.index}"
        stem = "layers.0" if options.shared_stem else prefix
        self.options = options
        self.enorm = build_norm(layer, source, f"{stem}.enorm")
        self.hnorm = build_norm(layer, source, f"{stem}.hnorm")
        hidden = self.enorm.weight.shape[0]
        self.eh_proj = head_linear(source, f"{stem}.eh_proj", hidden, 2 * hidden)
        self.input_layernorm = build_norm(layer, source, f"{prefix}.input_layernorm")
        self.self_attn = build_attention(layer, source)
        self.post_attention_layernorm = build_norm(layer, source, f"{prefix}.post_attention_layernorm")
        self.mlp: Any = build_mlp(layer, source) if layer.moe is None else build_moe(layer, source)
        self.norm = build_norm(layer, source, f"{stem}.shared_head.norm") if options.own_norm else None

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        """The new hidden state, after the layer's own last norm where it has one.

        Args:
            embeds: [T, H] or [B, T, H], of the tokens after those whose states are in `hidden`.
            hidden: like `embeds`.
            positions: [T] or [B, T], absolute.
            cache: what `new_cache` gave, to continue a sequence.
        """
        import torch

        if self.options.zero_first_embedding:
            embeds = embeds.masked_fill((positions == 0).unsqueeze(-1), 0.0)
        pair = [self.enorm(embeds), self.hnorm(hidden)]
        x = self.eh_proj(torch.cat(pair[::-1] if self.options.combine == "hidden-first" else pair, dim=-1))
        x = x + self.self_attn(self.input_layernorm(x), positions, cache=cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: torch.Tensor = x if self.norm is None else self.norm(x)
        return out

    @property
    def probed_norm(self) -> Any:
        """The embedding's norm."""
        return self.enorm


class _Dequantised:
    """A source whose weights are multiplied by the block scales that lie beside them."""

    def __init__(self, source: TensorSource, block: tuple[int, int]) -> None:
        self._source, self._block = source, block

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        import torch

        held = self._source.under(prefix)
        found: dict[str, torch.Tensor] = {}
        for name, value in held.items():
            if name.endswith("weight_scale_inv"):
                continue
            scale = held.get(f"{name}_scale_inv")
            if scale is not None and value.ndim == 2:
                dtype = torch.bfloat16 if value.dtype.itemsize == 1 else value.dtype
                wide = torch.promote_types(dtype, torch.float32)
                factors = scale.to(wide).repeat_interleave(self._block[0], 0).repeat_interleave(self._block[1], 1)
                value = (value.to(wide) * factors[: value.shape[0], : value.shape[1]]).to(dtype)
            found[name] = value
        return found


def _count_places(view: ConfigView) -> Iterator[tuple[Section, str]]:
    """Where a number of prediction layers may stand."""
    for section in (view.root, view.layer) if view.layer is not view.root else (view.root,):
        for key in _COUNTS:
            if key in section:
                yield section, key


def _style(view: ConfigView) -> Style:
    if view.packaging == "speculators":
        return "speculators"
    told = " ".join(
        (view.layer.text("model_type") or "", view.root.text("model_type") or "", *view.root.texts("architectures"))
    )
    for pattern, style in _STYLES:
        if re.search(pattern, told, re.IGNORECASE):
            return style
    return "deepseek"


_STYLES: tuple[tuple[str, Style], ...] = (
    (r"deepseek_?v4", "deepseek-v4"),
    (r"mimo_?v2", "mimo-v2"),
    (r"mimo", "mimo"),
    (r"longcat", "longcat"),
    (r"ernie", "ernie"),
    (r"qwen3_?next|qwen3[._]?5|exaone", "qwen"),
)


def _options(view: ConfigView, style: Style) -> MTPOptions:
    heads, width = view.layer.extent("index_n_heads"), view.layer.extent("index_head_dim")
    quantised = view.root.section("quantization_config")
    fp8 = quantised.raw("quant_method") == "fp8"
    stage = None
    if style == "deepseek-v4":
        packed = fp8 and view.layer.raw("expert_dtype") in (None, "fp4")
        stage = read_stage(view.layer, packed_experts=packed)
    return MTPOptions(
        style=style,
        combine={"mimo": "hidden-first", "deepseek-v4": "sum"}.get(style, "embed-first"),  # type: ignore[arg-type]
        shared_stem=style == "qwen",
        own_norm=style != "ernie",
        zero_first_embedding=style in ("deepseek", "mimo", "ernie", "deepseek-v4"),
        fp8_block=_block_edges(quantised) if fp8 else None,
        indexer=(heads, width) if heads and width else None,
        stage=stage,
    )


def _block_edges(quantised: Section) -> tuple[int, int]:
    edges = quantised.ids("weight_block_size") or ()
    return (edges[0], edges[1]) if len(edges) == 2 and min(edges) > 0 else (_FP8_BLOCK, _FP8_BLOCK)


def _layer(view: ConfigView, style: Style, index: int) -> LayerSpec:
    return LayerSpec(
        index=index,
        attention=_attention(view, style, index),
        intermediate_size=view.layer.extent(*(("ffn_hidden_size",) if style == "longcat" else ()), "intermediate_size"),
        hidden_act=view.layer.text("hidden_act") or "silu",
        norm_eps=_eps(view),
        norm_kind="gemma" if re.match(r"qwen3_next|qwen3_5|step3", view.layer.text("model_type") or "") else "rms",
        is_causal=True,
        moe=_moe(view, style, index),
    )


def _attention(view: ConfigView, style: Style, index: int) -> GQASpec | MLASpec:
    # A stage's rows are latent in a way of its own, whatever keys were copied along.
    if view.layer.raw("kv_lora_rank") is not None and style != "deepseek-v4":
        return _latent(view)
    return _mimo_v2(view, index) if style == "mimo-v2" else _gqa(view, style, index)


def _eps(view: ConfigView) -> float:
    """MiMo-V2 calls it `layernorm_epsilon`."""
    stated = view.layer.number("layernorm_epsilon")
    return read_eps(view) if stated is None else stated


def _mimo_v2(view: ConfigView, index: int) -> GQASpec:
    """The attention of the target's sliding layers."""
    hidden, head_dim = view.layer.extent("hidden_size"), view.layer.extent("swa_head_dim", "head_dim")
    rope = read_rope(view.layer, head_dim=head_dim, is_neox_style=True)
    if (theta := view.layer.number("swa_rope_theta")) is not None:
        rope = replace(rope, theta=theta, theta_stated=view.layer.stated("swa_rope_theta"))
    scale, biased = view.layer.number("attention_value_scale"), bool(view.layer.flag("attention_bias"))
    return GQASpec(
        num_heads=view.layer.extent("swa_num_attention_heads", "num_attention_heads"),
        num_kv_heads=view.layer.extent("swa_num_key_value_heads", "num_key_value_heads"),
        head_dim=head_dim,
        v_head_dim=view.layer.extent("swa_v_head_dim", "v_head_dim"),
        in_features=hidden,
        out_features=hidden,
        rope=rope,
        qkv_bias=biased,
        sliding_window=view.layer.extent("sliding_window_size", "sliding_window"),
        value_scale=1.0 if scale is None else scale,
        fused_qkv=stores_fused_qkv(view, index),
        sink=view.layer.flag("add_swa_attention_sink_bias"),
    )


def _latent(view: ConfigView) -> MLASpec:
    neox = view.layer.flag("rope_interleave") is False
    found = read_mla(view, in_features=view.layer.extent("hidden_size"), is_neox_style=neox)
    # DeepSeek's classes project the query whole where there is no rank (Moonlight, DeepSeek-V2-Lite).
    return replace(found, whole_query=found.q_lora_rank is None)


def _gqa(view: ConfigView, style: Style, index: int) -> GQASpec:
    hidden = view.layer.extent("hidden_size")
    model_type = view.layer.text("model_type") or ""
    q_norm = view.tensors.get(f"layers.{index}.self_attn.q_norm.weight")
    head_dim = read_head_dim(view)
    if view.layer.extent("head_dim") is None and q_norm is not None and len(q_norm.shape) == 1:
        # Written files may leave out what their class has by default; the norm of one head has the head's width.
        head_dim = q_norm.shape[0]
    stage = style == "deepseek-v4"
    qkv_bias = view.layer.flag("attention_bias", "use_bias")
    if qkv_bias is None:
        qkv_bias = style == "mimo"
    return GQASpec(
        num_heads=view.layer.extent("num_attention_heads"),
        num_kv_heads=view.layer.extent("num_key_value_heads", "num_attention_heads"),
        head_dim=head_dim,
        in_features=hidden,
        out_features=hidden,
        rope=read_stage_rope(view.layer)
        if stage
        else read_rope(view.layer, head_dim=head_dim, is_neox_style=style != "ernie"),
        # One of the two without the other is a loss; the first classes always have both.
        qk_norm=re.match(r"qwen3|exaone", model_type) is not None
        or q_norm is not None
        or f"layers.{index}.self_attn.k_norm.weight" in view.tensors
        or (not view.tensors and bool(view.layer.flag("use_qk_norm"))),
        qkv_bias=qkv_bias,
        o_bias=qkv_bias and style != "mimo" and not model_type.startswith("glm"),
        q_gate=re.match(r"qwen3_next|qwen3_5", model_type) is not None,
        k_eq_v=stage,
        sliding_window=view.layer.extent("sliding_window") if stage else None,
        fused_qkv=stores_fused_qkv(view, index),
    )


def _moe(view: ConfigView, style: Style, index: int) -> MoESpec | None:
    """The experts of layer `index`; ERNIE's, MiMo's and LongCat's prediction layers are dense whatever their targets are."""
    section = view.layer
    experts = section.extent("n_routed_experts", "num_experts")
    if not experts or style in ("ernie", "mimo", "mimo-v2", "longcat"):
        return None
    if style == "deepseek-v4":
        return read_stage_moe(section)
    place = plus(section.extent("num_hidden_layers"), index)
    first = section.extent("first_k_dense_replace")
    # What is said of the target's first layers is not about a layer that was cut out of it.
    if place is not None and first is not None and place < first and not _is_cut_out(view.root):
        return None
    inner = section.extent("moe_intermediate_size")
    shared_gate = section.extent("shared_expert_intermediate_size") is not None
    shared = (
        section.extent("shared_expert_intermediate_size")
        if shared_gate
        else times(section.extent("n_shared_experts"), inner)
    )
    deepseek = section.extent("n_routed_experts") is not None
    scoring = section.text("scoring_func") or ("sigmoid" if deepseek else "softmax")
    method = section.text("topk_method")
    normed = section.flag("norm_topk_prob")
    scale = section.number("routed_scaling_factor")
    prefix = f"layers.{index}.mlp.experts"
    fused = f"{prefix}.gate_up_proj" in view.tensors
    if not fused and f"{prefix}.0.gate_proj.weight" not in view.tensors:
        fused = style == "speculators"
    return MoESpec(
        num_experts=experts,
        top_k=section.extent("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=shared or None,
        scoring="softmax" if scoring == "softmax" else "sigmoid",
        norm_topk_prob=True if normed is None else normed,
        routed_scaling_factor=1.0 if scale is None else scale,
        n_group=section.extent("n_group") or 1,
        topk_group=section.extent("topk_group") or 1,
        correction_bias=method == "noaux_tc" or (method is None and scoring == "sigmoid"),
        shared_gate=shared_gate,
        fused_experts=fused,
    )


def _layer_tensors(spec: DraftSpec, layer: LayerSpec, options: MTPOptions) -> Iterator[ExpectedTensor]:
    hidden, vocab = spec.hidden_size, spec.vocabulary.vocab_size
    prefix = f"layers.{layer.index}"
    if not options.shared_stem or layer.index == 0:
        yield norm(f"{prefix}.enorm", hidden, layer.index)
        yield norm(f"{prefix}.hnorm", hidden, layer.index)
        yield from _scaled(f"{prefix}.eh_proj.weight", (hidden, times(2, hidden)), layer, options)
        if options.own_norm:
            yield norm(f"{prefix}.shared_head.norm", hidden, layer.index)
    yield norm(f"{prefix}.input_layernorm", hidden, layer.index)
    block = list(_attention_tensors(layer, options)) + list(moe_tensors(layer, hidden))
    for tensor in block:
        yield tensor
        routing = tensor.name.endswith((".mlp.gate.weight", ".shared_expert_gate.weight"))
        if options.fp8_block is not None and len(tensor.shape) == 2 and tensor.need == "required" and not routing:
            yield _block_scale(tensor, options.fp8_block)
    yield norm(f"{prefix}.post_attention_layernorm", hidden, layer.index)
    for name in ("embed_tokens", "shared_head.head"):
        yield ExpectedTensor(
            name=f"{prefix}.{name}.weight", shape=(vocab, hidden), need="optional", reason=_SHARED, layer=layer.index
        )


def _scaled(name: str, shape: tuple[Extent, ...], layer: LayerSpec, options: MTPOptions) -> Iterator[ExpectedTensor]:
    tensor = ExpectedTensor(name=name, shape=shape, layer=layer.index)
    yield tensor
    if options.fp8_block is not None:
        yield _block_scale(tensor, options.fp8_block)


def _block_scale(tensor: ExpectedTensor, block: tuple[int, int]) -> ExpectedTensor:
    """The scales of an fp8 weight, one per block."""
    return ExpectedTensor(
        name=f"{tensor.name}_scale_inv",
        shape=tuple(
            None if extent is None else -(-extent // edge) for extent, edge in zip(tensor.shape, block, strict=True)
        ),
        need="optional",
        reason="a weight that is left in its plain dtype has no scales",
        layer=tensor.layer,
        dtype="float32",
    )


def _attention_tensors(layer: LayerSpec, options: MTPOptions) -> Iterator[ExpectedTensor]:
    attention = layer.attention
    if isinstance(attention, GQASpec):
        yield from gqa_tensors(layer, attention)
        if options.style == "mimo-v2":
            yield sink(layer, attention)
        return
    assert attention is not None
    prefix = f"layers.{layer.index}.self_attn"
    width, rank = attention.in_features, attention.q_lora_rank
    yield from mla_tensors(layer, attention)
    if options.indexer is None:
        return
    heads, head_dim = options.indexer
    for name, shape in {
        "wq_b.weight": (times(heads, head_dim), rank),
        "wk.weight": (head_dim, width),
        "k_norm.weight": (head_dim,),
        "k_norm.bias": (head_dim,),
        "weights_proj.weight": (heads, width),
    }.items():
        yield ExpectedTensor(
            name=f"{prefix}.indexer.{name}",
            shape=shape,
            need="optional",
            reason="it picks the keys of long contexts; without it the layer attends to all",
            layer=layer.index,
        )


def _stage_tensors(
    spec: DraftSpec, layer: LayerSpec, options: MTPOptions, stage: StageSpec
) -> Iterator[ExpectedTensor]:
    """A DeepSeek-V4 stage between its stem, two projections that are added, and its last norm."""
    hidden, moe = spec.hidden_size, layer.moe
    prefix = f"layers.{layer.index}"

    def scales(matrix: ExpectedTensor, packed: bool) -> Iterator[ExpectedTensor]:
        name = f"{matrix.name.removesuffix('weight')}scale"
        if packed:
            rows, halves = matrix.shape
            shape = (rows, None if halves is None else halves // 16)
            yield ExpectedTensor(name=name, shape=shape, layer=layer.index, dtype="float8_e8m0fnu")
        elif options.fp8_block is not None:
            yield replace(_block_scale(matrix, options.fp8_block), name=name, dtype="float8_e8m0fnu")

    for name in ("enorm", "hnorm", "norm"):
        yield norm(f"{prefix}.{name}", hidden, layer.index)
    for name in ("e_proj", "h_proj"):
        projection = ExpectedTensor(name=f"{prefix}.{name}.weight", shape=(hidden, hidden), layer=layer.index)
        yield projection
        yield from scales(projection, False)
    held = replace(
        stage,
        num_experts=0 if moe is None else moe.num_experts,
        shared_experts=moe is not None and bool(moe.shared_intermediate_size),
    )
    inner = None if moe is None else moe.intermediate_size
    yield from stage_tensors(layer, held, hidden=hidden, inner=inner, scales=scales)
    yield from head_streams(stage, hidden, f"{prefix}.hc_head_", layer.index)
    for name in ("emb.tok_emb", "head"):
        yield ExpectedTensor(
            name=f"{prefix}.{name}.weight",
            shape=(spec.vocabulary.vocab_size, hidden),
            need="optional",
            reason=_SHARED,
            layer=layer.index,
        )


def _predicted(name: str, root: Section | None) -> str | None:
    """The canonical name of a prediction layer's tensor; None for any other, such as one of the target's layers."""
    if match := _NAMED.fullmatch(name):
        return f"layers.{match[1]}.{_renamed(match[2], _MIMO)}"
    if match := _QWEN_LAYER.fullmatch(name):
        return f"layers.{match[1]}.{_renamed(match[2], {**_MIMO_V2, **_LONGCAT})}"
    if match := _QWEN_STEM.fullmatch(name):
        return f"layers.0.{_STEM.get(match[1]) or _BESIDE[match[1]]}.{match[2]}"
    if match := _STAGE.fullmatch(name):
        return f"layers.{match[1]}.{match[2]}"
    if match := _ERNIE.fullmatch(name):
        return f"layers.{match[2]}.{_ERNIE_STEM[match[1]]}{match[3]}"
    match = _COUNTED.fullmatch(name)
    depth = _target_depth(root)
    if match is None or depth is None or int(match["index"]) < depth:
        return None
    return f"layers.{int(match['index']) - depth}.{_renamed(match['rest'], _REST)}"


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """`name` with the beginning that `names` has another one for replaced."""
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _back(name: str, names: Mapping[str, str]) -> str | None:
    """The name that `names` turns into `name`, or into its start; the rest is kept."""
    for old, new in names.items():
        if new and (name == new or (new.endswith(".") and name.startswith(new))):
            return old + name.removeprefix(new)
    return None


def _is_cut_out(root: Section | None) -> bool:
    """Whether the file is one layer that SGLang's exporter took out of its target."""
    if root is None or root.raw("num_hidden_layers") != 1:
        return False
    labels = root.raw("architectures")
    return isinstance(labels, list) and any(isinstance(label, str) and label.endswith("NextN") for label in labels)


def _target_depth(root: Section | None) -> int | None:
    if root is None:
        return None
    if _is_cut_out(root):
        return 0
    for section in (root.values, root.values.get("text_config")):
        depth = section.get("num_hidden_layers") if isinstance(section, Mapping) else None
        if isinstance(depth, int) and not isinstance(depth, bool):
            return depth
    return None
