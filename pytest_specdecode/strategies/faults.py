"""The catalogue of faults that a configuration alone shows: for each check, the changes of a sound configuration that it must report.

One place for all who break configurations on purpose. A change is of one key, given by its dotted path; the value `...` takes the key out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_specdecode.strategies.forms import FORMS, Config, Form, layer_section

Reported = Literal["failed", "warned"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One key that gets another value.

    Attributes:
        key: dotted path in `config.json`.
        value: what is put there; `...` where the key is taken out.
        status: how the check then ends.
    """

    key: str
    value: Any
    status: Reported = "failed"

    def made(self, config: Mapping[str, Any]) -> Config:
        """A copy of `config` with the change."""
        changed = copy.deepcopy(dict(config))
        *parents, last = self.key.split(".")
        place = changed
        for parent in parents:
            place = place.setdefault(parent, {})
        if self.value is ...:
            place.pop(last, None)
        else:
            place[last] = copy.deepcopy(self.value)
        return changed


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one check must report.

    Attributes:
        what: the fault, in one line.
        changes: of a sound configuration, each change that is such a fault, plainest first; none where it has no room for one.
        families, packagings, names: those of the forms whose configurations always have room; None for all.
        wishes: what a configuration must be for that, as `forms.drawn` takes it.
    """

    what: str
    changes: Callable[[Config], Iterable[Change]]
    families: tuple[str, ...] | None = None
    packagings: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    wishes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms that have room for the fault."""
        return tuple(
            form
            for form in FORMS
            if (self.families is None or form.family in self.families)
            and (self.packagings is None or form.packaging in self.packagings)
            and (self.names is None or form.name in self.names)
        )


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path; `...` where there is none."""
    place: Any = config
    for part in key.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return ...
        place = place[part]
    return place


def _layer_path(config: Config, key: str) -> str:
    layer = layer_section(config)
    return next((f"{name}.{key}" for name, value in config.items() if value is layer), key)


def _stated(config: Config, *keys: str) -> list[str]:
    """Those of the layers' `keys` that the file states, with their paths."""
    layer = layer_section(config)
    return [_layer_path(config, key) for key in keys if layer.get(key) is not None]


def _block(config: Config, key: str) -> list[str]:
    """The paths at which a block draft states `key`, the one that engines read first in front."""
    return [path for path in (key, f"dflash_config.{key}") if value_at(config, path) is not ...]


# --- the changes, in the order of the catalogue -------------------------------------------------------------------------------------------


def _code(config: Config) -> Iterator[Change]:
    yield Change(key="auto_map", value={"AutoModel": "modeling_draft.Draft"}, status="warned")


def _second_label(config: Config) -> Iterator[Change]:
    for family, label in (("medusa", "MedusaModel"), ("dflash", "DFlashDraftModel")):
        if label not in config["architectures"] and not (family == "dflash" and "dflash_config" in config):
            yield Change(key="architectures", value=[*config["architectures"], label])


def _texts(config: Config) -> Iterator[Change]:
    for path in _stated(config, "vocab_size", "rms_norm_eps", "max_position_embeddings"):
        yield Change(key=path, value=str(value_at(config, path)))


def _bare_label(config: Config) -> Iterator[Change]:
    yield Change(key="architectures", value=config["architectures"][0])


def _no_layers(config: Config) -> Iterator[Change]:
    yield Change(key=_layer_path(config, "num_hidden_layers"), value=0)


def _odd_heads(config: Config) -> Iterator[Change]:
    path = _layer_path(config, "num_key_value_heads")
    yield Change(key=path, value=layer_section(config)["num_attention_heads"] + 1)


def _misspelled(config: Config) -> Iterator[Change]:
    yield Change(key="norm_before_fcs", value=True, status="warned")


def _null(config: Config) -> Iterator[Change]:
    yield Change(key="use_cache", value=None)


def _null_rank(config: Config) -> Iterator[Change]:
    for value in (None, ..., 0):
        yield Change(key=_layer_path(config, "q_lora_rank"), value=value)


def _no_latent_width(config: Config) -> Iterator[Change]:
    for key in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        for value in (..., 0):
            yield Change(key=key, value=value)


def _larger_vocabulary(config: Config) -> Iterator[Change]:
    whole = layer_section(config)["vocab_size"]
    for key in ("draft_vocab_size", "truncated_vocab_size"):
        if key in config:
            yield Change(key=key, value=whole + 1)


def _tied(config: Config) -> Iterator[Change]:
    yield Change(key="tie_word_embeddings", value=True)


def _unread_bias(config: Config) -> Iterator[Change]:
    yield Change(key=_layer_path(config, "attention_bias"), value=True, status="warned")


def _unread_flag(config: Config) -> Iterator[Change]:
    yield Change(key="norm_before_residual", value=not config.get("norm_before_residual"), status="warned")


def _taps(config: Config) -> str:
    keys = ("aux_hidden_state_layer_ids", *_block(config, "target_layer_ids"), "eagle_aux_hidden_state_layer_ids")
    return next(key for key in keys if value_at(config, key) is not ...)


def _no_taps(config: Config) -> Iterator[Change]:
    path = _taps(config)
    ids = value_at(config, path)
    yield Change(key=path, value=...)
    yield Change(key=path, value=[*ids, ids[-1]])


def _unsorted_taps(config: Config) -> Iterator[Change]:
    path = _taps(config)
    ids = value_at(config, path)
    if len(ids) > 1:
        yield Change(key=path, value=ids[::-1], status="warned")


def _tap_beyond(config: Config) -> Iterator[Change]:
    path = _taps(config)
    depth = config["num_target_layers"]
    yield Change(key=path, value=[*value_at(config, path)[:-1], depth])


def _one_convention(config: Config) -> Iterator[Change]:
    key = "eagle_aux_hidden_state_layer_ids"
    yield Change(key=f"eagle_config.{key}", value=config[key], status="warned")


def _other_tap(config: Config) -> Iterator[Change]:
    ids = config["eagle_aux_hidden_state_layer_ids"]
    yield Change(key="eagle_aux_hidden_state_layer_ids", value=[*ids[:-1], ids[-1] + 1])


def _one_tap(config: Config) -> Iterator[Change]:
    yield Change(key="eagle_aux_hidden_state_layer_ids", value=[2])


def _theta_path(config: Config) -> str:
    flat = _layer_path(config, "rope_theta")
    return flat if value_at(config, flat) is not ... else _layer_path(config, "rope_parameters.rope_theta")


def _no_theta(config: Config) -> Iterator[Change]:
    for value in (..., None):
        yield Change(key=_theta_path(config), value=value)


def _second_theta(config: Config) -> Iterator[Change]:
    other = 2 * layer_section(config)["rope_theta"]
    yield Change(key=_layer_path(config, "rope_parameters"), value={"rope_type": "default", "rope_theta": other})


def _half_scaling(config: Config) -> Iterator[Change]:
    path = _layer_path(config, "rope_scaling")
    yield Change(key=path, value={"rope_type": "linear"})
    yield Change(key=path, value={"rope_type": "llama3", "factor": 8.0})
    yield Change(key=path, value={"rope_type": "yarn", "factor": 4.0})
    yield Change(key=path, value={"rope_type": "yarn", "type": "linear", "factor": 4.0})


def _interleaved(config: Config) -> Iterator[Change]:
    yield Change(key="rope_is_neox_style", value=False, status="warned")


def _partial_rotation(config: Config) -> Iterator[Change]:
    yield Change(key="partial_rotary_factor", value=0.25, status="warned")


def _odd_rotation(config: Config) -> Iterator[Change]:
    yield Change(key="partial_rotary_factor", value=1 / config["head_dim"])


def _scaled_values(config: Config) -> Iterator[Change]:
    yield Change(key="attention_value_scale", value=0.5, status="warned")


def _plain_label(config: Config) -> Iterator[Change]:
    yield Change(key="architectures", value=["LlamaForCausalLM"], status="warned")


def _no_mask(config: Config) -> Iterator[Change]:
    whole = layer_section(config)["vocab_size"]
    for path in _block(config, "mask_token_id"):
        yield Change(key=path, value=whole)
        yield Change(key=path, value=...)


def _block_sizes(config: Config) -> Iterator[Change]:
    places = _block(config, "block_size")
    if len(places) == 2:
        yield Change(key=places[0], value=2 * config["block_size"])
    else:
        yield Change(key=places[0], value=1)


def _row_zero(config: Config) -> Iterator[Change]:
    yield Change(key="sample_from_anchor", value=True, status="warned")


def _layer_kinds(config: Config) -> Iterator[Change]:
    path = _layer_path(config, "layer_types")
    kinds = value_at(config, path)
    yield Change(key=path, value=[*kinds, kinds[0]])
    yield Change(key=path, value=["windowed_attention", *kinds[1:]])


def _no_causality(config: Config) -> Iterator[Change]:
    for key in ("is_causal", "sliding_window_non_causal"):
        if key in config:
            yield Change(key=key, value=..., status="warned")


def _half_variant(config: Config) -> Iterator[Change]:
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "emb_dim", "gru_hidden_dim")
    for key in keys:
        for path in _block(config, key):
            yield Change(key=path, value=...)


def _two_ranks(config: Config) -> Iterator[Change]:
    yield Change(key="dflash_config", value={"markov_rank": 2 * config["markov_rank"]})


def _rank_zero(config: Config) -> Iterator[Change]:
    yield Change(key="markov_rank", value=0, status="warned")


def _two_counts(config: Config) -> Iterator[Change]:
    if "n_predict" in config:
        yield Change(key="top_k_tokens_per_head", value=[4] * (config["n_predict"] + 1))
        return
    stated = next(key for key in ("medusa_num_heads", "num_heads") if key in config)
    yield Change(key="num_medusa_heads", value=config[stated] + 1)


def _two_stages(config: Config) -> Iterator[Change]:
    yield Change(key="transformer_layer_config.num_nextn_predict_layers", value=2, status="warned")


def _wide_dtype(config: Config) -> Iterator[Change]:
    yield Change(key="dtype", value="float32", status="warned")


def _proposals(config: Config) -> Iterator[Change]:
    nested = "speculators_config"
    method = {"proposal_type": "greedy", "speculative_tokens": 0}
    yield Change(key=f"{nested}.proposal_methods", value=[method])
    yield Change(key=f"{nested}.verifier", value=..., status="warned")
    yield Change(key="transformer_layer_config.model_type", value=..., status="warned")


_EAGLE3 = ("eagle3", "eagle3-mla", "peagle", "eagle4")
_DFLASH = ("dflash", "dflash2", "domino", "dflare")
_BLOCKS = (*_DFLASH, "dspark", "xpress")
_PLAIN = ("plain",)
_OWN = ("plain", "speculators")
_LAYERED = ("eagle1", "eagle3", "peagle", *_BLOCKS)

#: By the id of the check that must report it.
FAULTS: Mapping[str, Fault] = {
    "files.code": Fault(what="the file names code to run", changes=_code),
    "config.family": Fault(what="a second label, of another family", changes=_second_label, packagings=_OWN),
    "config.types": Fault(
        what="a number as text", changes=_texts, families=(*_LAYERED, "eagle3-mla", "eagle4", "mtp", "hydra")
    ),
    "config.architectures": Fault(what="a label that stands in no list", changes=_bare_label),
    "config.unread-keys": Fault(what="a misspelled key", changes=_misspelled, packagings=_OWN),
    "config.null-values": Fault(
        what="a null where readers want a value",
        changes=_null,
        families=("eagle3", "peagle", "eagle4", *_DFLASH, "dspark"),
        packagings=_PLAIN,
    ),
    "config.num-hidden-layers": Fault(
        what="no layers", changes=_no_layers, families=(*_LAYERED, "eagle3-mla", "eagle4"), packagings=_OWN
    ),
    "config.head-arithmetic": Fault(
        what="more KV heads than heads", changes=_odd_heads, families=_LAYERED, packagings=_OWN
    ),
    "config.q-lora-rank": Fault(what="no rank of the queries", changes=_null_rank, families=("eagle3-mla",)),
    "config.mla-fields": Fault(what="no width of a latent head", changes=_no_latent_width, families=("eagle3-mla",)),
    "vocabulary.sizes": Fault(
        what="a draft vocabulary larger than the target's",
        changes=_larger_vocabulary,
        families=("eagle3", "peagle", "xpress", "medusa"),
        packagings=_OWN,
    ),
    "vocabulary.tied-embeddings": Fault(
        what="a tied head beside a reduced vocabulary",
        changes=_tied,
        families=("eagle3", "peagle", "xpress"),
        wishes={"reduced": True},
    ),
    "weights.biases": Fault(
        what="biases that not every engine builds", changes=_unread_bias, families=("eagle3",), packagings=_PLAIN
    ),
    "weights.flags": Fault(
        what="a flag that not every engine reads", changes=_unread_flag, families=("eagle3",), packagings=_PLAIN
    ),
    "weights.scales": Fault(
        what="a factor on V that not every engine applies",
        changes=_scaled_values,
        families=("dflash",),
        packagings=_PLAIN,
    ),
    "taps.stated": Fault(what="no tapped layers, or one twice", changes=_no_taps, families=_BLOCKS, packagings=_OWN),
    "taps.order": Fault(
        what="tapped layers that fall", changes=_unsorted_taps, families=_BLOCKS, packagings=_OWN, wishes={"taps": 2}
    ),
    "taps.range": Fault(what="a tapped layer past the end", changes=_tap_beyond, families=_DFLASH, packagings=_PLAIN),
    "taps.convention": Fault(
        what="two places that count alike where engines count apart",
        changes=_one_convention,
        families=("eagle3",),
        packagings=_PLAIN,
        wishes={"inner_taps": True},
    ),
    "taps.places": Fault(
        what="other layers in one of two places", changes=_other_tap, families=("eagle3",), packagings=_PLAIN
    ),
    "taps.fc-width": Fault(
        what="one tap, as wide as the draft",
        changes=_one_tap,
        families=("eagle3", "peagle"),
        packagings=("speculators",),
    ),
    "rope.theta-stated": Fault(
        what="no rotary base",
        changes=_no_theta,
        families=("eagle3", "eagle3-mla", "peagle", "eagle4", *_BLOCKS),
        packagings=_OWN,
    ),
    "rope.theta-agrees": Fault(
        what="two rotary bases",
        changes=_second_theta,
        families=("eagle1", "eagle3", "peagle", *_DFLASH),
    ),
    "rope.scaling-complete": Fault(
        what="a scaling without its fields", changes=_half_scaling, families=("eagle1", "eagle3", "peagle", *_DFLASH)
    ),
    "rope.style": Fault(
        what="interleaved pairs that not every engine reads",
        changes=_interleaved,
        families=("dflash", "dflash2"),
        packagings=_PLAIN,
    ),
    "rope.inherited": Fault(
        what="a partial rotation of the target's",
        changes=_partial_rotation,
        families=(*_DFLASH, "dspark"),
        packagings=_PLAIN,
    ),
    "dflash.mask-token": Fault(
        what="a mask token outside the embedding, or none", changes=_no_mask, families=_BLOCKS, packagings=_OWN
    ),
    "dflash.block-size": Fault(
        what="two block sizes, or one row", changes=_block_sizes, families=_BLOCKS, packagings=_OWN
    ),
    "dflash.block-layout": Fault(
        what="a drafting row 0 that not every engine reads", changes=_row_zero, families=("dflash",), packagings=_PLAIN
    ),
    "dflash.layer-types": Fault(
        what="a layer type too many, or one that nobody knows",
        changes=_layer_kinds,
        families=_BLOCKS,
        packagings=_OWN,
    ),
    "dflash.causality": Fault(
        what="layers that slide, and no word of what they see",
        changes=_no_causality,
        families=("dflash", "dflash2", "domino", "dflare", "xpress"),
        wishes={"sliding": True},
    ),
    "dflash.variants": Fault(
        what="a key too few of what makes the variant", changes=_half_variant, families=("dflash2", "domino")
    ),
    "dspark.keys": Fault(
        what="two ranks of the Markov head", changes=_two_ranks, families=("dspark",), packagings=_PLAIN
    ),
    "dspark.heads": Fault(what="a Markov head of rank 0", changes=_rank_zero, families=("dspark",), packagings=_OWN),
    "mtp.combine": Fault(
        what="a plain label over layers that take the hidden state first",
        changes=_plain_label,
        families=("mtp",),
        names=("mimo",),
    ),
    "heads.counts": Fault(
        what="another number of heads in a second place", changes=_two_counts, families=("medusa", "mlp-speculator")
    ),
    "mtp.layers": Fault(
        what="two prediction layers where one is read",
        changes=_two_stages,
        families=("mtp",),
        packagings=("speculators",),
    ),
    "speculators.structure": Fault(
        what="proposals or a verifier that are not there", changes=_proposals, packagings=("speculators",)
    ),
    "fused-kv.rotary-dim": Fault(
        what="an odd number of lanes that rotate",
        changes=_odd_rotation,
        families=("dflash", "dflash2", "domino"),
        packagings=_PLAIN,
    ),
    "fused-kv.engine-path": Fault(
        what="a dtype that an engine's fused path does not take",
        changes=_wide_dtype,
        families=("dspark",),
        packagings=_PLAIN,
    ),
    "fused-kv.rope-style": Fault(
        what="interleaved pairs, which SGLang's stack does not rotate",
        changes=_interleaved,
        families=("dflash", "dflash2", "domino"),
        packagings=_PLAIN,
    ),
}

#: Why a configuration alone does not show what a check that reads it is for, by the check's id.
NOT_IN_CONFIG: Mapping[str, str] = {
    "files.readable": "a file that is no JSON object is no configuration to change",
    "config.quantization": "it compares the method with the stored weights",
    "config.dtype": "it compares the dtype with the stored weights",
    "vocabulary.lm-head": "it looks for the head in the weights",
    "mtp.norms": "it reads the weights' numbers",
    "fused-kv.tensor-parallel": "the number of ranks is an option of the server",
    "fused-kv.odd-layers": "it judges an implementation that is named, not the draft",
    "fused-kv.calls": "it judges an implementation that is named, not the draft",
    **{
        f"fused-kv.{axis}": "all layers of a form take it from one key; only weights can differ"
        for axis in (
            *("num-kv-heads", "head-dim", "rope-theta", "rope-scaling", "hidden-size", "dtype", "bias", "k-norm"),
            *("norm-kind", "v-head-dim", "value-scale", "q-size", "quantization", "norm-eps"),
        )
    },
}
