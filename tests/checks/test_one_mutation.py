"""From any valid draft, one drawn mutation makes the check that it is for report, and no other but those that follow from it.

What goes wrong without this file: a check that works on the one draft of its row and on no other family or packaging; a check that looks
at one layer of several, at one place of two, or at one kind of wrong value; a fault that half a dozen checks report, so that nobody finds
the one that matters; a draft in another packaging whose sound parts are reported as soon as one part is not.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_every_check import ROWS, _no_others, _write_target

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.report import Report

sys.path.append(str(Path(__file__).resolve().parent.parent / "families"))

from packagings import PACKAGINGS, Packaging

Draw = Callable[[st.SearchStrategy[Any]], Any]

#: Where the transformer's own keys stand, in packagings that nest them.
_SECTIONS = ("transformer_layer_config", "text_config", "model")
_BLOCKS = ("dflash", "dflash2", "domino", "dflare")
_EAGLES = ("eagle1", "eagle3", "peagle")
_STACKED = ("dflash", "dflash2", "domino", "dspark")
_REDUCED = ("eagle3", "peagle")
_TAPS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


@dataclass
class Written:
    """A draft that is about to be written.

    Attributes:
        packaging: what it was before.
        config: its configuration.
        tensors: its tensors by canonical name; None where the configuration stands alone.
        files: what is done to the written directory.
        target: the target's configuration, or None.
        serve: the server's options, or None.
    """

    packaging: Packaging
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] | None
    files: list[Callable[[Path], Any]] = field(default_factory=list)
    target: dict[str, Any] | None = None
    serve: str | None = None

    @property
    def family(self) -> str:
        return self.packaging.family

    @property
    def layer(self) -> dict[str, Any]:
        """The section with the transformer's own keys."""
        return next((self.config[key] for key in _SECTIONS if isinstance(self.config.get(key), dict)), self.config)

    def names(self, *ends: str) -> list[str]:
        """The tensors whose names end so."""
        assert self.tensors is not None
        return sorted(name for name in self.tensors if name.endswith(ends))


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One way to break a draft.

    Attributes:
        apply: breaks it in place, with a function that draws.
        families: those that it can be done to; empty for all.
        unless: packagings that it cannot be done to, by id.
        follow: checks that may report because of the same fault.
        status: what the check ends in.
        weights: whether they are there, must not be there, or either.
    """

    apply: Callable[[Draw, Written], Any]
    families: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    status: str = "failed"
    weights: bool | None = True

    def packagings(self) -> list[Packaging]:
        """The valid drafts that it is for."""
        return [
            packaging
            for packaging in PACKAGINGS
            if (not self.families or packaging.family in self.families) and packaging.id not in self.unless
        ]


# Files


def _break_a_file(draw: Draw, draft: Written) -> None:
    kind = draw(st.sampled_from(["trailing", "cut", "header", "config"]))
    count = draw(st.integers(1, 40))

    def edit(path: Path) -> None:
        weights, config = path / "model.safetensors", path / "config.json"
        held = weights.read_bytes()
        if kind == "trailing":
            weights.write_bytes(held + bytes(count))
        elif kind == "cut":
            weights.write_bytes(held[:-count])
        elif kind == "header":
            weights.write_bytes(held[:8] + b"\0" + held[9:])
        else:
            config.write_bytes(config.read_bytes()[: -count - 1])

    draft.files.append(edit)


def _break_the_index(draw: Draw, draft: Written) -> None:
    kind = draw(st.sampled_from(["absent shard", "unnamed file", "unnamed tensor"]))

    def edit(path: Path) -> None:
        header = json.loads(
            (path / "model.safetensors").read_bytes()[8:].split(b"\0", 1)[0].partition(b"}}")[0] + b"}}"
        )
        names = [name for name in header if name != "__metadata__"]
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        if kind == "absent shard":
            index["weight_map"][names[0]] = "model-2.safetensors"
        elif kind == "unnamed file":
            (path / "extra.safetensors").write_bytes((path / "model.safetensors").read_bytes())
        else:
            del index["weight_map"][names[-1]]
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    draft.files.append(edit)


def _add_a_pickle(draw: Draw, draft: Written) -> None:
    name = draw(st.sampled_from(["pytorch_model.bin", "old.bin", "heads.pt"]))
    draft.files.append(lambda path: torch.save({}, path / name))


def _add_code(draw: Draw, draft: Written) -> None:
    name = draw(st.sampled_from(["modeling.py", "mask_embedding.pt", ""]))
    if not name:
        draft.config["auto_map"] = {"AutoModel": "modeling.Draft"}
    draft.files.append(lambda path: (path / (name or "configuration.py")).write_text(""))


# Configuration


def _relabel(draw: Draw, draft: Written) -> None:
    labels = {
        "dflash": "DFlashDraftModel",
        "eagle3": "LlamaForCausalLMEagle3",
        "eagle3-mla": "Eagle3DeepseekV2ForCausalLM",
        "medusa": "MedusaModel",
        "dspark": "Qwen3DSparkModel",
    }
    alike = {"eagle4": "eagle3", "peagle": "eagle3", "xpress": "dflash", "domino": "dflash", "dflare": "dflash"}
    own = {draft.family, alike.get(draft.family), "eagle3" if draft.family == "eagle3-mla" else None}
    draft.config["architectures"] = [
        draw(st.sampled_from([label for name, label in labels.items() if name not in own]))
    ]


def _wrong_type(draw: Draw, draft: Written) -> None:
    keys = [key for key in ("rms_norm_eps", "max_position_embeddings", "vocab_size") if key in draft.layer]
    draft.layer[draw(st.sampled_from(keys))] = draw(st.sampled_from(["many", [], {}, True]))


def _no_list_of_labels(draw: Draw, draft: Written) -> None:
    label = draft.config["architectures"][0]
    draft.config["architectures"] = draw(st.sampled_from([label, [], [label, 3], {}, 7, [""]]))


def _null(draw: Draw, draft: Written) -> None:
    draft.config[draw(st.sampled_from(["use_cache", "initializer_range"]))] = None


def _misspell(draw: Draw, draft: Written) -> None:
    names = ("norm_before_residual", "partial_rotary_factor", "sample_from_anchor", "attention_value_scale")
    if draft.family == "mtp" or draft.packaging.id in _EMBEDDED:
        # Of a file that is the target's as well, only the keys that speak of a draft are looked at.
        names = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    absent = [key for key in names if key not in draft.config and key not in draft.layer]
    key = draw(st.sampled_from(absent))
    place = draw(st.integers(1, len(key) - 2))
    draft.config[key[:place] + draw(st.sampled_from([key[place] * 2, ""])) + key[place + 1 :]] = 1


def _more_layers(draw: Draw, draft: Written) -> None:
    draft.layer["num_hidden_layers"] += draw(st.integers(1, 40))


def _odd_kv_heads(draw: Draw, draft: Written) -> None:
    draft.layer["num_key_value_heads"] = draw(st.sampled_from([3, 5, 8]))


def _no_rank(draw: Draw, draft: Written) -> None:
    _lose(draw, draft.layer, "q_lora_rank")


def _no_latent_field(draw: Draw, draft: Written) -> None:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    _lose(draw, draft.layer, draw(st.sampled_from(names)))


def _lose(draw: Draw, section: dict[str, Any], key: str) -> None:
    value = draw(st.sampled_from([None, 0, ...]))
    if value is ...:
        del section[key]
    else:
        section[key] = value


def _announce_quantisation(draw: Draw, draft: Written) -> None:
    section = draw(
        st.sampled_from(
            [
                {"quant_method": "fp8", "activation_scheme": "dynamic"},
                {"quant_method": "modelopt", "quant_algo": "FP8"},
                {"quant_method": "awq", "bits": 4, "group_size": 32},
            ]
        )
    )
    draft.config["quantization_config"] = section


def _declare_another_dtype(draw: Draw, draft: Written) -> None:
    key = next(key for key in ("dtype", "torch_dtype") if key in draft.config)
    draft.config[key] = draw(st.sampled_from(["float16", "float32", "torch.float16"]))


# Vocabulary


def _too_many_ids(draw: Draw, draft: Written) -> None:
    draft.config["draft_vocab_size"] = 512 + draw(st.integers(1, 512))


def _tie(draw: Draw, draft: Written) -> None:
    draft.config["tie_word_embeddings"] = True


def _spoil_the_head(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    rows = draw(st.sampled_from([None, 1, 128, 255]))
    if rows is None:
        del draft.tensors["lm_head.weight"]
    else:
        draft.tensors["lm_head.weight"] = draft.tensors["lm_head.weight"][:rows]


def _spoil_the_map(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    kind = draw(st.sampled_from(["none", "ids", "zero", "past", "unsorted", "floats", "short"]))
    old = draft.tensors["d2t"]
    ids = torch.arange(len(old))
    place = draw(st.integers(0, len(old) - 2))
    if kind == "none":
        del draft.tensors["d2t"]
    elif kind == "ids":
        draft.tensors["d2t"] = old + ids
    elif kind == "zero":
        draft.tensors["d2t"] = torch.zeros_like(old)
    elif kind == "past":
        old[place] += 512
    elif kind == "unsorted":
        images = old + ids
        images[[place, place + 1]] = images[[place + 1, place]]
        draft.tensors["d2t"] = images - ids
    elif kind == "floats":
        draft.tensors["d2t"] = old.float()
    else:
        draft.tensors["d2t"] = old[: place + 1]


def _spoil_the_marks(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    marks = draft.tensors["t2d"]
    place = draw(st.integers(0, len(marks) - 1))
    marks[place] = ~marks[place]


# Weights


def _owned(draft: Written, check: str) -> list[str]:
    """Required tensors that `check` answers for and that the draft holds."""
    assert draft.tensors is not None
    expected = testing.expected_tensors(draft.config, draft.family)[1]
    return [
        item.name
        for item in expected
        if item.need == "required"
        and item.check == check
        and item.name in draft.tensors
        and item.name not in ("embed_tokens.weight", "lm_head.weight")
    ]


def _lose_a_tensor(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    del draft.tensors[draw(st.sampled_from(_owned(draft, "weights.missing")))]


def _add_a_tensor(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    name = draw(st.sampled_from(["extra.weight", "layers.0.self_attn.extra_proj.weight", "layers.0.extra_norm.weight"]))
    draft.tensors[name] = torch.ones(draw(st.integers(1, 9))).bfloat16()


def _cut_a_matrix(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    name = draw(st.sampled_from(draft.names("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")))
    draft.tensors[name] = draft.tensors[name][: -draw(st.integers(1, 40))]


def _add_a_bias(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    weight = draw(st.sampled_from(draft.names("self_attn.q_proj.weight", "self_attn.v_proj.weight")))
    draft.tensors[weight.replace("weight", "bias")] = torch.zeros(len(draft.tensors[weight])).bfloat16()


def _flag_without_norm(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    kind = draw(st.sampled_from(["norm_before_fc", "fc_norm", "tensor"]))
    if kind == "tensor":
        draft.tensors["input_norm.weight"] = torch.ones(draft.tensors["fc.weight"].shape[1]).bfloat16()
    else:
        draft.config[kind] = True


def _another_dtype(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    name = draw(st.sampled_from(draft.names("norm.weight", "layernorm.weight", "mlp.down_proj.weight")))
    draft.tensors[name] = draft.tensors[name].to(draw(st.sampled_from([torch.float32, torch.float16])))


def _not_a_number(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    name = draw(st.sampled_from([name for name, value in sorted(draft.tensors.items()) if value.is_floating_point()]))
    flat = draft.tensors[name].view(-1)
    flat[draw(st.integers(0, len(flat) - 1))] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))


def _flatten(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    matrices = [name for name, value in sorted(draft.tensors.items()) if value.is_floating_point() and value.dim() > 1]
    draft.tensors[draw(st.sampled_from(matrices))].fill_(draw(st.sampled_from([0.0, 0.5, -1.0])))


# Taps


def _tap_places(draft: Written) -> Iterator[tuple[dict[str, Any], str]]:
    for section in (draft.config, draft.config.get("dflash_config"), draft.config.get("eagle_config")):
        if isinstance(section, dict):
            yield from ((section, key) for key in _TAPS if isinstance(section.get(key), list))


def _lose_the_taps(draw: Draw, draft: Written) -> None:
    null = draw(st.booleans())
    for section, key in list(_tap_places(draft)):
        section[key] = None
        if not null:
            del section[key]


def _shuffle_the_taps(draw: Draw, draft: Written) -> None:
    order = draw(st.permutations(range(3)).filter(lambda order: order != [0, 1, 2]))
    for section, key in _tap_places(draft):
        section[key] = [section[key][place] for place in order]


def _tap_past_the_end(draw: Draw, draft: Written) -> None:
    beyond = draw(st.integers(8, 90))
    for section, key in _tap_places(draft):
        section[key] = [*section[key][:-1], section[key][-1] + beyond]


def _tap_twice(draw: Draw, draft: Written) -> None:
    place = draw(st.integers(0, 1))
    for section, key in _tap_places(draft):
        section[key][place + 1] = section[key][place]


def _two_lists(draw: Draw, draft: Written) -> None:
    draft.config[_TAPS[2]] = [2, 8, 13 + draw(st.sampled_from([-3, -2, 1, 2]))]


def _another_fc(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    columns = draw(st.sampled_from([128, 160, 191]))
    draft.tensors["fc.weight"] = draft.tensors["fc.weight"][:, :columns]


# Rotary embedding


def _lose_the_base(draw: Draw, draft: Written) -> None:
    for section in (draft.layer, draft.layer.get("rope_parameters")):
        if isinstance(section, dict):
            section.pop("rope_theta", None)


def _two_bases(draw: Draw, draft: Written) -> None:
    base = draw(st.sampled_from([20_000.0, 2_000_000.0, 7.0]))
    if "rope_theta" in draft.layer:
        draft.layer["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    else:
        draft.layer["rope_theta"] = base


def _half_a_scaling(draw: Draw, draft: Written) -> None:
    whole = {"factor": 8.0, "original_max_position_embeddings": 1024}
    llama = {**whole, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kind, fields = draw(st.sampled_from([("llama3", llama), ("yarn", whole), ("linear", {"factor": 8.0})]))
    lost = draw(st.sampled_from(sorted(fields)))
    draft.layer["rope_scaling"] = {"rope_type": kind, **{key: value for key, value in fields.items() if key != lost}}


def _serve_longer(draw: Draw, draft: Written) -> None:
    length = draft.layer["max_position_embeddings"] + draw(st.integers(1, 100_000))
    if draw(st.booleans()):
        draft.serve = f"context-length={length}"
    else:
        draft.target = {"max_position_embeddings": length}


# Blocks


def _mask_outside(draw: Draw, draft: Written) -> None:
    id = draw(st.sampled_from([512, 513, 248_070, None]))
    for section in (draft.config, draft.config.get("dflash_config")):
        if isinstance(section, dict) and "mask_token_id" in section:
            section["mask_token_id"] = id


def _two_blocks(draw: Draw, draft: Written) -> None:
    section = draft.config.get("dflash_config", draft.config)
    if section is draft.config:
        section["block_size"] = draw(st.sampled_from([0, 1, "8", -3]))
    else:
        draft.config["block_size"] = draw(st.sampled_from([7, 9, 16]))


def _two_layouts(draw: Draw, draft: Written) -> None:
    first = draw(st.booleans())
    draft.config["sample_from_anchor"] = first
    draft.config["query_zero_predicts_next"] = not first


def _wrong_layer_types(draw: Draw, draft: Written) -> None:
    kinds = draft.layer["layer_types"]
    draft.layer["layer_types"] = draw(
        st.sampled_from([kinds[:1], [*kinds, kinds[0]], [*kinds[:-1], "linear_attention"]])
    )


def _slide_without_a_window(draw: Draw, draft: Written) -> None:
    draft.layer["layer_types"] = ["sliding_attention"] * 2
    draft.config["is_causal"] = draw(st.booleans())


def _unstated_causality(draw: Draw, draft: Written) -> None:
    draft.layer.update(
        layer_types=["sliding_attention"] * 2, sliding_window=draw(st.integers(8, 99)), use_sliding_window=True
    )
    draft.config.pop("is_causal", None)


def _half_a_variant(draw: Draw, draft: Written) -> None:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    del draft.config["dflash_config"][draw(st.sampled_from(names))]


def _two_values(draw: Draw, draft: Written) -> None:
    key, value = draw(
        st.sampled_from([("markov_rank", 8), ("markov_head_type", "rnn"), ("enable_confidence_head", False)])
    )
    draft.config["dflash_config"] = {key: value}


def _spoil_a_head(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    name = draw(st.sampled_from(draft.names("markov_w1.weight", "markov_w2.weight", "confidence_head.proj.weight")))
    draft.tensors[name] = draft.tensors[name][:, : -draw(st.integers(1, 8))]


def _count_other_heads(draw: Draw, draft: Written) -> None:
    key = next(key for key in ("num_heads", "hydra_num_heads", "n_predict") if key in draft.config)
    draft.config[key] = draw(st.sampled_from([2, 4, 7]))


def _no_such_proposal(draw: Draw, draft: Written) -> None:
    (method,) = draft.config["speculators_config"]["proposal_methods"]
    method["speculative_tokens"] = draw(st.sampled_from([0, -1, "4", 99, 1.5]))


def _count_other_layers(draw: Draw, draft: Written) -> None:
    key = next(key for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if key in draft.config)
    draft.config[key] += draw(st.integers(1, 3))


# Stacks, targets, servers


def _odd_layer(axis: str) -> Callable[[Draw, Written], None]:
    def apply(draw: Draw, draft: Written) -> None:
        assert draft.tensors is not None
        k, v, q = (f"layers.1.self_attn.{part}_proj.weight" for part in "kvq")
        held = draft.tensors
        if axis == "num-kv-heads":
            held[k], held[v] = held[k][:32], held[v][:32]
        elif axis == "hidden-size":
            held[k] = held[k][:, : draw(st.sampled_from([16, 32, 48]))]
        elif axis == "k-norm":
            del held["layers.1.self_attn.k_norm.weight"]
        elif axis == "v-head-dim":
            held[v] = held[v][:32]
        elif axis == "q-size":
            held[q] = held[q].repeat(2, 1)
        else:
            held[k] = held[k].to(draw(st.sampled_from([torch.float16, torch.float32])))

    return apply


def _by_type(axis: str) -> Callable[[Draw, Written], None]:
    """Layers of two types, each with a rotary embedding of its own."""

    def apply(draw: Draw, draft: Written) -> None:
        full = {"rope_type": "default", "rope_theta": 1e6}
        key, values = {
            "rope-theta": ("rope_theta", [1e4, 2e6]),
            "rope-scaling": ("factor", [2.0, 8.0]),
            "rotary-dim": ("partial_rotary_factor", [0.25, 0.5]),
        }[axis]
        other = {**full, key: draw(st.sampled_from(values))}
        if key == "factor":
            other["rope_type"] = "linear"
        draft.layer.update(layer_types=["full_attention", "sliding_attention"], sliding_window=64)
        draft.layer.pop("rope_theta", None)
        draft.layer["rope_parameters"] = {"full_attention": full, "sliding_attention": other}

    return apply


def _add_a_scale(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    name = f"layers.{draw(st.integers(0, 1))}.self_attn.attn.{draw(st.sampled_from(['k_scale', 'v_scale']))}"
    draft.tensors[name] = torch.tensor(draw(st.sampled_from([0.5, 2.0, 0.01])))


def _grow_a_scaled_table(draw: Draw, draft: Written) -> None:
    draft.layer["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    draft.serve = f"context-length={draw(st.integers(4090, 4096))}"


def _too_many_ranks(draw: Draw, draft: Written) -> None:
    draft.serve = f"tp={draw(st.sampled_from([3, 8, 16]))}"


def _another_name(draw: Draw, draft: Written) -> None:
    verifier = draft.config.get("speculators_config", {}).get("verifier")
    if verifier is None:
        draft.config["target_model_name_or_path"] = "org/a-target"
    else:
        verifier["name_or_path"] = "org/a-target"
    draft.target = {"_name_or_path": draw(st.sampled_from(["org/a-sibling", "/models/other/", "a-target-2"]))}


def _prefix_all(draw: Draw, draft: Written) -> None:
    assert draft.tensors is not None
    for name in [name for name in draft.tensors if name != "lm_head.weight"]:
        draft.tensors[f"model.{name}"] = draft.tensors.pop(name)


def _another_target(draw: Draw, draft: Written) -> None:
    key = draw(st.sampled_from(["hidden_size", "vocab_size"]))
    draft.target = {"hidden_size": 64, "vocab_size": 512, key: draw(st.sampled_from([96, 1024]))}


def _another_base(draw: Draw, draft: Written) -> None:
    draft.target = {"rope_theta": draw(st.sampled_from([20_000.0, 3e6]))}


def _another_algorithm(draw: Draw, draft: Written) -> None:
    own = {"dflash": "DFLASH", "dflash2": "DFLASH", "domino": "DFLASH", "dspark": "DSPARK"}.get(draft.family, "EAGLE3")
    others = [name for name in ("EAGLE", "EAGLE3", "DFLASH", "DSPARK") if name != own]
    draft.serve = f"algorithm={draw(st.sampled_from(others))}"


def _too_many_drafts(draw: Draw, draft: Written) -> None:
    steps = draw(st.integers(1, 6))
    tokens = steps + 1 + draw(st.integers(1, 9))
    draft.serve = f"algorithm=EAGLE3 num-steps={steps} eagle-topk=1 num-draft-tokens={tokens}"


def _no_such_cache(draw: Draw, draft: Written) -> None:
    backend = draw(st.sampled_from(["trtllm_mla", "tokenspeed_mla", "cutedsl_mla"]))
    draft.serve = f"attention-backend={backend} kv-cache-dtype={draw(st.sampled_from(['fp8_e5m2', 'int8']))}"


_GQA = (*_EAGLES, *_BLOCKS, "dspark", "xpress")
_TAPPED = (*_BLOCKS, "dspark", "eagle3", "eagle3-mla", "peagle")
_ROTATING = (*_EAGLES, "eagle3-mla", "eagle4", *_BLOCKS, "dspark", "xpress")
_EMBEDDED = ("dspark-embedded",)
#: Packagings without separate q, k and v.
_JOINED = tuple(item.id for item in PACKAGINGS if item.joined)
_SPECULATORS = tuple(item.id for item in PACKAGINGS if item.what == "speculators")
#: Packagings whose top level no class of transformers checks.
_NOT_A_CLASS = (*_EMBEDDED, "eagle1-converted", *_SPECULATORS)
_LAYERS = ("layers.finite", "layers.incremental", "layers.batch", "layers.mla-absorbed", "layers.precision")
_BUILT = ("layers.build", "weights.shapes")

MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "files.readable": (Mutation(apply=_break_a_file),),
    "files.index": (Mutation(apply=_break_the_index),),
    "files.pickle": (Mutation(apply=_add_a_pickle, status="warned"),),
    "files.code": (Mutation(apply=_add_code, status="warned", follow=("files.pickle",)),),
    # A draft under another's label is judged by that one's sheet.
    "config.family": (Mutation(apply=_relabel, families=(*_GQA, "medusa"), follow=("*",)),),
    "config.types": (Mutation(apply=_wrong_type, weights=None, follow=("layers.build", "vocabulary.d2t")),),
    "config.architectures": (Mutation(apply=_no_list_of_labels, families=_EAGLES, follow=("config.types",)),),
    "config.null-values": (
        Mutation(
            apply=_null, families=tuple(name for name in _GQA if name != "xpress"), unless=_NOT_A_CLASS, weights=None
        ),
    ),
    "config.unread-keys": (Mutation(apply=_misspell, status="warned", weights=None),),
    "config.num-hidden-layers": (
        Mutation(
            apply=_more_layers,
            families=(*_BLOCKS, "dspark", "peagle", "xpress"),
            unless=_EMBEDDED,
            follow=("dflash.layer-types", "dflash.variants", "weights.missing", *_BUILT),
        ),
        Mutation(apply=_more_layers, families=("eagle3-mla", "eagle4"), weights=None),
    ),
    "config.head-arithmetic": (
        Mutation(apply=_odd_kv_heads, families=_GQA, unless=_EMBEDDED, weights=None, follow=_BUILT),
    ),
    "config.q-lora-rank": (Mutation(apply=_no_rank, families=("eagle3-mla",), weights=None, follow=_BUILT),),
    "config.mla-fields": (Mutation(apply=_no_latent_field, families=("eagle3-mla",), weights=None, follow=_BUILT),),
    "config.quantization": (
        Mutation(apply=_announce_quantisation, families=(*_EAGLES, *_BLOCKS, "dspark"), unless=_EMBEDDED),
    ),
    "config.dtype": (Mutation(apply=_declare_another_dtype, unless=_SPECULATORS, status="warned"),),
    "vocabulary.sizes": (Mutation(apply=_too_many_ids, families=_REDUCED, weights=False),),
    "vocabulary.tied-embeddings": (Mutation(apply=_tie, families=_REDUCED, weights=None),),
    "vocabulary.lm-head": (Mutation(apply=_spoil_the_head, families=(*_REDUCED, "xpress")),),
    "vocabulary.d2t": (
        Mutation(apply=_spoil_the_map, families=(*_REDUCED, "xpress"), follow=("vocabulary.t2d", "layers.build")),
    ),
    "vocabulary.t2d": (Mutation(apply=_spoil_the_marks, families=(*_REDUCED, "xpress")),),
    "weights.missing": (
        Mutation(
            apply=_lose_a_tensor,
            follow=(
                *("layers.build", "fused-kv.k-norm", "fused-kv.engine-path", "config.num-hidden-layers"),
                *("heads.counts", "dflash.variants", "dspark.heads"),
            ),
        ),
    ),
    "weights.unexpected": (Mutation(apply=_add_a_tensor, families=(*_GQA, "eagle3-mla", "eagle4")),),
    "weights.shapes": (Mutation(apply=_cut_a_matrix, families=_GQA, unless=_EMBEDDED, follow=("layers.build",)),),
    "weights.biases": (
        Mutation(
            apply=_add_a_bias,
            families=_GQA,
            unless=(*_EMBEDDED, *_JOINED),
            follow=("layers.build", "fused-kv.bias", "fused-kv.engine-path"),
        ),
    ),
    "weights.flags": (Mutation(apply=_flag_without_norm, families=_REDUCED, follow=("layers.build",)),),
    "weights.dtypes": (
        Mutation(apply=_another_dtype, families=_GQA, unless=_EMBEDDED, status="warned", follow=("layers.build",)),
    ),
    "weights.finite": (Mutation(apply=_not_a_number, follow=(*_LAYERS, "fused-kv.matches-reference")),),
    "weights.degenerate": (Mutation(apply=_flatten, follow=_LAYERS),),
    "taps.stated": (
        Mutation(apply=_lose_the_taps, families=(*_BLOCKS, "dspark"), unless=_EMBEDDED, weights=None),
        Mutation(
            apply=_lose_the_taps, families=("eagle3", "eagle3-mla", "peagle", "eagle4"), weights=None, status="warned"
        ),
        Mutation(
            apply=_tap_twice,
            families=_TAPPED,
            unless=_EMBEDDED,
            weights=None,
            follow=("taps.convention", "taps.places"),
        ),
    ),
    "taps.order": (
        Mutation(
            apply=_shuffle_the_taps,
            families=_TAPPED,
            unless=_EMBEDDED,
            weights=None,
            status="warned",
            follow=("taps.convention",),
        ),
    ),
    "taps.range": (
        Mutation(
            apply=_tap_past_the_end,
            families=_TAPPED,
            unless=(*_EMBEDDED, *_SPECULATORS),
            weights=None,
            follow=("taps.convention",),
        ),
    ),
    "taps.places": (Mutation(apply=_two_lists, families=("eagle3",), unless=_SPECULATORS, weights=None),),
    "taps.fc-width": (
        Mutation(
            apply=_another_fc,
            families=("dflash", "dflash2", "domino", "dspark", "xpress", "eagle3", "eagle3-mla", "peagle"),
            unless=_EMBEDDED,
            follow=("layers.build",),
        ),
    ),
    "rope.theta-stated": (
        Mutation(
            apply=_lose_the_base,
            families=tuple(name for name in _ROTATING if name != "eagle1"),
            unless=_EMBEDDED,
            weights=None,
            follow=("layers.build",),
        ),
    ),
    "rope.theta-agrees": (
        Mutation(apply=_two_bases, families=_ROTATING, weights=None, follow=("rope.scaling-complete",)),
    ),
    "rope.scaling-complete": (
        Mutation(
            apply=_half_a_scaling, families=_ROTATING, weights=None, follow=("layers.build", "fused-kv.engine-path")
        ),
    ),
    "rope.max-position": (
        Mutation(
            apply=_serve_longer,
            families=_ROTATING,
            unless=("eagle1-converted", *_EMBEDDED),
            weights=None,
            follow=("taps.convention",),
        ),
    ),
    "dflash.mask-token": (
        Mutation(apply=_mask_outside, families=(*_BLOCKS, "dspark", "xpress"), unless=_EMBEDDED, weights=None),
    ),
    "dflash.block-size": (
        Mutation(
            apply=_two_blocks,
            families=(*_BLOCKS, "dspark"),
            unless=_EMBEDDED,
            weights=None,
            follow=("config.types", "speculators.structure", "dflash.layer-types"),
        ),
    ),
    "dflash.block-layout": (
        Mutation(apply=_two_layouts, families=("dflash", "dflash2", "dspark"), unless=_EMBEDDED, weights=None),
    ),
    "dflash.layer-types": (
        Mutation(apply=_wrong_layer_types, families=(*_BLOCKS, "dspark", "xpress"), unless=_EMBEDDED, weights=None),
        Mutation(
            apply=_slide_without_a_window,
            families=(*_BLOCKS, "dspark"),
            unless=_EMBEDDED,
            weights=None,
            follow=("dflash.causality", "layers.build"),
        ),
    ),
    "dflash.causality": (Mutation(apply=_unstated_causality, families=_BLOCKS, weights=None, status="warned"),),
    "dflash.variants": (
        Mutation(apply=_half_a_variant, families=("dflash2",), weights=None, follow=("config.types", "layers.build")),
    ),
    "dspark.keys": (
        Mutation(
            apply=_two_values,
            families=("dspark",),
            unless=(*_EMBEDDED, *_SPECULATORS),
            weights=None,
            follow=("dspark.heads", "weights.missing", "weights.unexpected", *_BUILT),
        ),
    ),
    "dspark.heads": (Mutation(apply=_spoil_a_head, families=("dspark",), follow=_BUILT),),
    "heads.counts": (
        Mutation(
            apply=_count_other_heads,
            families=("medusa", "hydra", "mlp-speculator"),
            follow=(
                *("config.num-hidden-layers", "config.types", "layers.build"),
                *("weights.biases", "weights.missing", "weights.unexpected"),
            ),
        ),
    ),
    "speculators.structure": (Mutation(apply=_no_such_proposal, families=("xpress",), weights=None),),
    "mtp.layers": (
        Mutation(
            apply=_count_other_layers,
            families=("mtp",),
            unless=_SPECULATORS,
            follow=("config.num-hidden-layers", "layers.build", "weights.biases", "weights.missing"),
        ),
    ),
    **{
        f"fused-kv.{axis}": (
            Mutation(
                apply=_odd_layer(axis),
                families=_STACKED,
                unless=(*_EMBEDDED, *_JOINED),
                follow=("config.head-arithmetic", "fused-kv.engine-path", own, *_BUILT),
            ),
        )
        for axis, own in {
            "num-kv-heads": "weights.shapes",
            "hidden-size": "weights.shapes",
            "k-norm": "weights.missing",
            "v-head-dim": "weights.shapes",
            "q-size": "weights.shapes",
            "dtype": "weights.dtypes",
        }.items()
    },
    "target.widths": (
        Mutation(
            apply=_another_target, families=_ROTATING, weights=None, follow=("taps.convention", "dflash.mask-token")
        ),
    ),
    **{
        f"fused-kv.{axis}": (
            Mutation(
                apply=_by_type(axis),
                families=("dflash", "dflash2", "domino"),
                # There all layers have one.
                unless=_SPECULATORS,
                weights=None,
                follow=("dflash.layer-types", "dflash.causality", "rope.inherited", "fused-kv.engine-path"),
            ),
        )
        for axis in ("rope-theta", "rope-scaling", "rotary-dim")
    },
    "fused-kv.tensor-parallel": (
        Mutation(apply=_too_many_ranks, families=_STACKED, unless=_EMBEDDED, follow=("serving.algorithm",)),
    ),
    "weights.scales": (Mutation(apply=_add_a_scale, families=_STACKED, unless=_EMBEDDED, status="warned"),),
    "weights.names": (Mutation(apply=_prefix_all, families=("eagle3-mla",), unless=("eagle3-mla-prefixed",)),),
    "rope.scaled-growth": (
        Mutation(
            apply=_grow_a_scaled_table,
            families=("dflash", "dflash2", "domino"),
            unless=_SPECULATORS,
            weights=None,
            status="warned",
            follow=("fused-kv.engine-path", "rope.max-position"),
        ),
    ),
    "target.identity": (
        Mutation(
            apply=_another_name,
            families=_ROTATING,
            unless=_EMBEDDED,
            weights=None,
            status="warned",
            follow=("taps.convention",),
        ),
    ),
    "target.rope": (
        Mutation(
            apply=_another_base,
            families=_ROTATING,
            unless=_EMBEDDED,
            weights=None,
            status="warned",
            follow=("taps.convention",),
        ),
    ),
    "serving.algorithm": (
        Mutation(apply=_another_algorithm, families=("eagle3", "eagle3-mla", "peagle", *_STACKED), weights=None),
    ),
    "serving.draft-tokens": (
        Mutation(apply=_too_many_drafts, families=("eagle3", "eagle3-mla", "peagle"), weights=None, status="warned"),
    ),
    "serving.kv-cache-dtype": (
        Mutation(apply=_no_such_cache, families=("eagle1", "eagle3", "eagle3-mla", "dspark"), weights=None),
    ),
}

#: Checks that have none: of numbers, of what few files hold, or of axes that follow from others; their rows and own tests show them.
BY_ROW = (
    *("vocabulary.common-tokens", "mtp.norms", "mtp.combine"),
    *("layers.finite", "layers.incremental", "layers.batch", "layers.mla-absorbed", "layers.precision"),
    *("fused-kv.head-dim", "fused-kv.rope-style", "fused-kv.bias", "fused-kv.norm-kind", "fused-kv.value-scale"),
    *("fused-kv.quantization", "fused-kv.norm-eps", "fused-kv.matches-reference"),
    *("fused-kv.odd-layers", "fused-kv.calls"),
)

_SLICED = "fused-kv.tensor-parallel"

#: Rows whose fault is in the configuration, and so can be had by every plain packaging of the same family.
STATED = [
    id for id, row in ROWS.items() if row.config and not (row.tensors or row.files or row.shape_config or row.serve)
]


def _pairs() -> Iterator[tuple[str, int, Mutation, list[Packaging]]]:
    """Each mutation with each family that it is for, and the packagings of that family.

    Each test draws alike, so the packagings start at another one for each mutation.
    """
    turn = itertools.count()
    for id, mutations in MUTATIONS.items():
        for place, mutation in enumerate(mutations):
            start = next(turn)
            for _, group in itertools.groupby(
                sorted(mutation.packagings(), key=lambda item: item.family), lambda item: item.family
            ):
                held = list(group)
                first = start % len(held)
                yield id, place, mutation, [*held[first:], *held[:first]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Hundreds of tiny drafts: a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_mutation_is_for_a_check() -> None:
    assert set(MUTATIONS) <= set(REGISTRY)
    assert not set(BY_ROW) & {*MUTATIONS, *STATED}


def test_every_check_has_a_mutation_or_is_named() -> None:
    measured = {id for id in REGISTRY if id.startswith("acceptance.")}
    assert set(REGISTRY) == {*MUTATIONS, *STATED, *BY_ROW, *measured}


@pytest.mark.parametrize(
    ("id", "mutation", "packagings"),
    [pytest.param(id, item, held, id=f"{id}-{place}-{held[0].family}") for id, place, item, held in _pairs()],
)
@settings(deadline=None, max_examples=1, derandomize=True, database=None)
@given(data=st.data())
def test_one_mutation_is_reported_by_its_check(
    id: str, mutation: Mutation, packagings: list[Packaging], data: st.DataObject
) -> None:
    """In every family that it can be done to, and by no other check that does not follow from it."""
    # The first example of all is the plainest of everything; one that was drawn has more to say.
    assume(data.draw(st.integers(0, 9), "plainest where 0"))
    packaging = data.draw(st.sampled_from(packagings), "packaging")
    weights = mutation.weights if mutation.weights is not None else data.draw(st.booleans(), "weights")
    before = _reported_as_it_is(packaging.id, weights)
    assume(id not in before)
    draft = _written(packaging, weights)
    mutation.apply(data.draw, draft)
    report = _judged(draft)
    assert report[id].status == mutation.status, report[id]
    _no_others(report, {id, *mutation.follow, *before})


@pytest.mark.parametrize("id", STATED)
def test_the_fault_of_a_row_is_reported_in_every_packaging(id: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same change of the configuration, over tensors that are stored under other names, or joined."""
    row = ROWS[id]
    target = _write_target(row.target, tmp_path_factory.mktemp("of") / "target")
    for packaging in PACKAGINGS:
        # The tiny draft itself is the row's own.
        if packaging.family != row.family or packaging.config is not None or packaging.what == "tiny":
            continue
        before = _reported_as_it_is(packaging.id, True)
        draft = _written(packaging, True)
        for key, value in row.config.items():
            if value is ...:
                draft.config.pop(key, None)
            else:
                draft.config[key] = value
        # What a rank holds is asked above; it takes half of the time of all checks together.
        report = _judged(draft, target, skip=None if id == _SLICED else [_SLICED])
        assert report[id].status == row.status, (packaging.id, report[id])
        _no_others(report, {id, *row.follow, *before})


@functools.cache
def _reported_as_it_is(id: str, weights: bool) -> frozenset[str]:
    """What the checks say of the draft before it is broken."""
    packaging = next(item for item in PACKAGINGS if item.id == id)
    report = _judged(_written(packaging, weights))
    return frozenset(result.id for result in report if result.status in ("failed", "warned"))


def _written(packaging: Packaging, weights: bool) -> Written:
    return Written(packaging, copy.deepcopy(packaging.whole), packaging.tensors() if weights else None)


def _judged(draft: Written, target: Path | None = None, skip: list[str] | None = None) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "draft"
        if draft.tensors is None:
            path.mkdir()
            (path / "config.json").write_text(json.dumps(draft.config))
        else:
            testing.write_checkpoint(path, draft.config, draft.tensors, rename=draft.packaging.rename())
        for edit in draft.files:
            edit(path)
        if draft.target is not None:
            target = _write_target({"config.json": draft.target}, Path(folder) / "target")
        return check_draft(path, target=target, serve=draft.serve, skip=skip)
