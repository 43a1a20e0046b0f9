"""From a configuration to a `DraftSpec`.

What these catch: a key read from the wrong place, or not in its other spellings; a default taken where the file is silent and nothing
may be guessed, or the other way round; a null read as a value; a value of the wrong type that becomes a traceback, or is believed. The
tiny configurations are those of `pytest_specdecode.testing`; every test changes one thing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import Draft, load
from pytest_specdecode.spec import DraftSpec, GQASpec, MLASpec, RopeSpec
from pytest_specdecode.testing import tiny_config, write_sparse


def opened(directory: Path, config: dict[str, Any]) -> Draft:
    (directory / "config.json").write_text(json.dumps(config))
    return load(Checkpoint.open(directory))


@pytest.fixture
def parse(tmp_path: Path) -> Any:
    """`parse(family, **changes)`: the spec of a tiny configuration with these changes; no value may be a fault."""

    def spec(family: str, **changes: Any) -> DraftSpec:
        draft = opened(tmp_path, tiny_config(family, **changes))
        assert draft.config_faults == ()
        assert draft.spec is not None
        assert draft.spec.family == family
        return draft.spec

    return spec


def gqa(spec: DraftSpec, layer: int = 0) -> GQASpec:
    attention = spec.layers[layer].attention
    assert isinstance(attention, GQASpec)
    return attention


def rope(spec: DraftSpec, layer: int = 0) -> RopeSpec:
    return spec.layers[layer].attention.rope


def stated(spec: DraftSpec) -> dict[str, float]:
    return {item.key: item.value for item in rope(spec).theta_stated}


# --- whole specs ---------------------------------------------------------------------------------------------------------


def test_eagle3_whole(parse: Any) -> None:
    spec = parse("eagle3")
    assert (spec.packaging, spec.architectures, spec.model_type) == ("plain", ("LlamaForCausalLMEagle3",), "llama")
    assert (spec.hidden_size, spec.target_hidden_size, spec.num_hidden_layers) == (64, 64, 1)
    assert (spec.dtype, spec.norm_eps) == ("bfloat16", 1e-5)
    assert spec.block is None
    (layer,) = spec.layers
    assert (layer.intermediate_size, layer.hidden_act, layer.mlp_bias) == (128, "silu", False)
    assert (layer.norm_eps, layer.norm_kind, layer.layer_type, layer.is_causal) == (1e-5, "rms", "full_attention", True)
    attention = gqa(spec)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 32)
    assert (attention.in_features, attention.out_features) == (128, 64)
    assert (attention.qk_norm, attention.qkv_bias, attention.o_bias) == (False, False, False)
    assert (attention.sliding_window, attention.value_scale) == (None, 1.0)
    assert attention.rope.is_neox_style
    assert (attention.rope.theta, attention.rope.rope_type, attention.rope.rotary_dim) == (500000.0, "default", 32)
    assert (attention.rope.max_position_embeddings, attention.rope.scaling) == (4096, {})
    assert (spec.vocabulary.vocab_size, spec.vocabulary.draft_vocab_size) == (512, 256)
    assert (spec.vocabulary.is_reduced, spec.vocabulary.head_rows) == (True, 256)
    assert (spec.taps.ids, spec.taps.count, spec.taps.convention) == ((1, 7, 12), 3, "output")
    assert [item.key for item in spec.taps.stated] == [
        "eagle_config.eagle_aux_hidden_state_layer_ids",
        "eagle_aux_hidden_state_layer_ids",
    ]
    assert (spec.taps.num_target_layers, spec.taps.required) == (16, True)


def test_eagle3_mla_whole(parse: Any) -> None:
    spec = parse("eagle3-mla")
    attention = spec.layers[0].attention
    assert isinstance(attention, MLASpec)
    assert (attention.num_heads, attention.q_lora_rank, attention.kv_lora_rank) == (4, 48, 32)
    assert (attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim) == (16, 8, 16)
    assert (attention.qk_head_dim, attention.in_features, attention.out_features) == (24, 128, 64)
    assert not attention.rope.is_neox_style
    assert (attention.rope.rope_type, attention.rope.rotary_dim, attention.rope.theta) == ("deepseek_yarn", 8, 50000.0)
    assert attention.rope.scaling == {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert not spec.vocabulary.is_reduced


def test_dflash_whole(parse: Any) -> None:
    spec = parse("dflash")
    assert spec.eagle3 is None
    assert [layer.index for layer in spec.layers] == [0, 1]
    for index, layer in enumerate(spec.layers):
        attention = gqa(spec, index)
        assert (attention.in_features, attention.out_features, attention.qk_norm) == (64, 64, True)
        assert (layer.layer_type, layer.is_causal) == ("full_attention", False)
    assert spec.block is not None
    assert (spec.block.block_size, spec.block.mask_token_id, spec.block.variant) == (8, 511, "dflash")
    assert (spec.block.is_causal, spec.block.sample_from_anchor) == (False, None)
    assert (spec.taps.ids, spec.taps.count, spec.taps.convention) == ((1, 9, 17), 3, "output")
    assert [item.key for item in spec.taps.stated] == ["dflash_config.target_layer_ids"]


def test_to_dict_is_plain_and_whole(parse: Any) -> None:
    for family in ("eagle3", "eagle3-mla", "dflash"):
        spec = parse(family)
        plain = json.loads(json.dumps(spec.to_dict()))
        assert plain == spec.to_dict()
        assert plain["layers"][0]["attention"]["num_heads"] == 4
        assert plain["taps"]["stated"][0]["value"] == list(spec.taps.ids)


# --- EAGLE3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, {}),
        ({"norm_before_residual": True}, {"norm_before_residual": True}),
        ({"norm_before_residual": False}, {"norm_before_residual": False}),
        ({"norm_before_fc": True}, {"norm_before_fc": True}),
        ({"eagle_config": {"norm_before_fc": True}}, {"norm_before_fc": True}),
        ({"eagle_config": {"norm_before_fc": False}, "norm_before_fc": True}, {"norm_before_fc": False}),
        ({"fc_norm": True, "norm_output": True}, {"fc_norm": True, "norm_output": True}),
        ({"use_aux_norm": True}, {"fc_norm": True}),
        ({"eagle_config": {"fc_norm": True}}, {"fc_norm": True}),
        ({"eagle_config": {"return_hidden_post_norm": True}}, {"norm_output": True}),
        ({"bias": True}, {"fc_bias": True}),
    ],
)
@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla"])
def test_eagle3_flags(parse: Any, family: str, changes: dict[str, Any], flags: dict[str, Any]) -> None:
    found = parse(family, **changes).eagle3
    silent = {"norm_before_residual": None, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    due = {**silent, "fc_bias": False, **flags}
    assert {name: getattr(found, name) for name in due} == due


@pytest.mark.parametrize(
    ("changes", "ids", "count", "required"),
    [
        # As vLLM and SGLang count: nested ids, else ids at the top, else a stated number, else three.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, (1, 2), 2, True),
        ({"eagle_config": ...}, (2, 8, 13), 3, True),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": ...}, None, 3, True),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": ..., "num_aux_hidden_states": 5}, None, 5, True),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": None}, None, 3, True),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": []}, None, 3, True),
        ({"eagle_config": {"use_aux_hidden_state": False}, "eagle_aux_hidden_state_layer_ids": ...}, None, 3, False),
        ({"eagle_config": ..., "use_aux_hidden_state": False}, (2, 8, 13), 3, False),
    ],
)
def test_eagle3_taps(parse: Any, changes: dict[str, Any], ids: object, count: int, required: bool) -> None:
    taps = parse("eagle3", **changes).taps
    assert (taps.ids, taps.count, taps.required) == (ids, count, required)


def test_eagle3_layers_from_one_on_read_one_width(parse: Any) -> None:
    spec = parse("eagle3", num_hidden_layers=3)
    assert [gqa(spec, index).in_features for index in range(3)] == [128, 64, 64]


@pytest.mark.parametrize("stated_layers", [24, 1, 0, None])
def test_eagle3_layers_are_those_in_the_file(tmp_path: Path, stated_layers: int | None) -> None:
    write_sparse(tmp_path, tiny_config("eagle3"), "eagle3")
    spec = opened(tmp_path, tiny_config("eagle3", num_hidden_layers=stated_layers)).spec
    assert spec is not None
    assert (spec.num_hidden_layers, len(spec.layers)) == (stated_layers, 1)


@pytest.mark.parametrize("index", ["99999999999", "9" * 5000, "600", "٣"])
def test_a_tensor_of_an_absurd_layer_builds_no_layers(tmp_path: Path, index: str) -> None:
    header = {f"layers.{index}.x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0")
    spec = opened(tmp_path, tiny_config("eagle3")).spec
    assert spec is not None
    assert len(spec.layers) <= 4


def test_target_hidden_size(parse: Any) -> None:
    assert parse("eagle3", target_hidden_size=96).target_hidden_size == 96
    assert parse("dflash", target_hidden_size=96).target_hidden_size == 96


def test_sliding_window_of_eagle3_needs_its_switch(parse: Any) -> None:
    assert gqa(parse("eagle3", sliding_window=512, use_sliding_window=True)).sliding_window == 512
    assert gqa(parse("eagle3", sliding_window=512, use_sliding_window=False)).sliding_window is None
    assert gqa(parse("eagle3", sliding_window=512)).sliding_window is None


@pytest.mark.parametrize("change", [{"q_lora_rank": ...}, {"q_lora_rank": None}])
def test_a_rank_that_is_absent_or_null_stays_unknown(parse: Any, change: dict[str, Any]) -> None:
    assert parse("eagle3-mla", **change).layers[0].attention.q_lora_rank is None


# --- DFlash --------------------------------------------------------------------------------------------------------------

FLAT = {
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 9, 17]},
    "block_size": 8,
    "num_target_layers": 20,
}
NESTED = {
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 9, 17], "block_size": 8, "num_target_layers": 20},
    "block_size": ...,
    "num_target_layers": ...,
}
TOP = {"dflash_config": {}, "target_layer_ids": [1, 9, 17], "mask_token_id": 511, "block_size": 8}


@pytest.mark.parametrize(
    ("changes", "block", "mask", "taps"),
    [
        (FLAT, "block_size", "dflash_config.mask_token_id", "dflash_config.target_layer_ids"),
        (NESTED, "dflash_config.block_size", "dflash_config.mask_token_id", "dflash_config.target_layer_ids"),
        (TOP, "block_size", "mask_token_id", "target_layer_ids"),
    ],
    ids=["flat", "nested", "all at the top"],
)
def test_dflash_layouts_are_one_spec(parse: Any, changes: dict[str, Any], block: str, mask: str, taps: str) -> None:
    spec = parse("dflash", **changes)
    assert (spec.block.block_size, spec.block.mask_token_id, spec.taps.ids) == (8, 511, (1, 9, 17))
    assert [item.key for item in spec.block.block_size_stated] == [block]
    assert [item.key for item in spec.block.mask_token_stated] == [mask]
    assert [item.key for item in spec.taps.stated] == [taps]
    assert spec.taps.num_target_layers == 20


def test_dflash_both_places_are_kept(parse: Any) -> None:
    spec = parse("dflash", block_size=16)
    assert [(item.key, item.value) for item in spec.block.block_size_stated] == [
        ("dflash_config.block_size", 8),
        ("block_size", 16),
    ]


def test_mask_token_zero_is_a_token(parse: Any) -> None:
    spec = parse("dflash", dflash_config={"mask_token_id": 0, "target_layer_ids": [1]}, mask_token_id=5)
    assert spec.block.mask_token_id == 0


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        # is_causal for all; else dflash_config.causal; else sliding layers look back and full ones both ways.
        ({}, [True, False]),
        ({"is_causal": True}, [True, True]),
        ({"is_causal": False}, [False, False]),
        ({"dflash_config": {"causal": False}}, [False, False]),
        ({"dflash_config": {"causal": True}}, [True, True]),
        ({"dflash_config": {"causal": True}, "is_causal": False}, [False, False]),
    ],
)
def test_dflash_causality(parse: Any, changes: dict[str, Any], causal: list[bool]) -> None:
    mixed = {"layer_types": [SLIDING, FULL], "sliding_window": 6, "use_sliding_window": True, "is_causal": ...}
    spec = parse("dflash", **{**mixed, **changes})
    assert [layer.is_causal for layer in spec.layers] == causal
    assert [layer.layer_type for layer in spec.layers] == [SLIDING, FULL]
    assert [gqa(spec, index).sliding_window for index in (0, 1)] == [6, None]


def test_dflash_swa_forces_sliding_everywhere(parse: Any) -> None:
    spec = parse("dflash", dflash_config={"use_swa": True, "swa_window_size": 5}, is_causal=...)
    assert [layer.layer_type for layer in spec.layers] == [SLIDING, SLIDING]
    assert [gqa(spec, index).sliding_window for index in (0, 1)] == [5, 5]


def test_dflash_window_beside_full_layers_has_no_effect(parse: Any) -> None:
    spec = parse("dflash", sliding_window=6, layer_types=...)
    assert [gqa(spec, index).sliding_window for index in (0, 1)] == [None, None]


@pytest.mark.parametrize(
    ("changes", "neox"),
    [
        ({}, True),
        ({"is_neox_style": False}, False),
        ({"rope_is_neox_style": False}, False),
        ({"is_neox_style": True}, True),
    ],
)
def test_dflash_rope_style(parse: Any, changes: dict[str, Any], neox: bool) -> None:
    assert rope(parse("dflash", **changes)).is_neox_style is neox


def test_dflash_value_scale_and_biases(parse: Any) -> None:
    spec = parse("dflash", attention_bias=True, mlp_bias=True, attention_value_scale=0.5)
    assert (gqa(spec).qkv_bias, gqa(spec).o_bias, spec.layers[0].mlp_bias, gqa(spec).value_scale) == (
        True,
        True,
        True,
        0.5,
    )
    nested = parse("dflash", dflash_config={"attention_value_scale": 0.25}, attention_value_scale=0.5)
    assert gqa(nested).value_scale == 0.25


def test_laguna_is_a_variant(parse: Any) -> None:
    assert parse("dflash", architectures=["DFlashLagunaForCausalLM"]).block.variant == "laguna"


# --- packaging -------------------------------------------------------------------------------------------------------------


def speculators(kind: str, **changes: Any) -> dict[str, Any]:
    """A tiny configuration in the speculators packaging."""
    inner = tiny_config(kind)
    outer: dict[str, Any] = {"speculators_model_type": kind, "architectures": ["DFlashSpeculator"]}
    if kind == "eagle3":
        outer["architectures"] = ["Eagle3Speculator"]
        outer |= {"eagle_aux_hidden_state_layer_ids": [3, 9, 14], "norm_before_residual": True}
        outer["draft_vocab_size"] = inner.pop("draft_vocab_size")
        for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
            inner.pop(key)
    else:
        outer |= {"aux_hidden_state_layer_ids": [2, 10, 18], "mask_token_id": 511, "block_size": 8}
        for key in ("dflash_config", "block_size", "is_causal"):
            inner.pop(key)
    inner.pop("architectures")
    return {**outer, "transformer_layer_config": inner, **changes}


@pytest.mark.parametrize(("kind", "ids"), [("eagle3", (3, 9, 14)), ("dflash", (2, 10, 18))])
def test_speculators_packaging_is_the_same_draft(tmp_path: Path, kind: str, ids: tuple[int, ...]) -> None:
    draft = opened(tmp_path, speculators(kind))
    plain = opened(tmp_path, tiny_config(kind)).spec
    assert draft.config_faults == ()
    assert draft.spec is not None
    assert plain is not None
    assert (draft.spec.family, draft.spec.packaging) == (kind, "speculators")
    assert draft.spec.model_type == plain.model_type
    (place,) = rope(draft.spec).theta_stated
    assert place.key == "transformer_layer_config.rope_theta"
    moved = replace(gqa(draft.spec), rope=replace(rope(draft.spec), theta_stated=rope(plain).theta_stated))
    assert moved == gqa(plain)
    assert (draft.spec.vocabulary.vocab_size, draft.spec.vocabulary.draft_vocab_size) == (
        512,
        plain.vocabulary.draft_vocab_size,
    )
    assert (draft.spec.taps.ids, draft.spec.taps.convention, draft.spec.taps.count) == (ids, "boundary", 3)
    assert draft.spec.dtype == "bfloat16"


def test_speculators_null_taps_are_legal(tmp_path: Path) -> None:
    draft = opened(tmp_path, speculators("eagle3", eagle_aux_hidden_state_layer_ids=None))
    assert draft.config_faults == ()
    assert draft.spec is not None
    assert (draft.spec.taps.ids, draft.spec.taps.count) == (None, 3)


# --- RoPE ------------------------------------------------------------------------------------------------------------------

YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_theta": 7.0, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": ..., "rope_scaling": {"type": "yarn", "rope_theta": 7, **YARN}},
        {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, **YARN}},
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 7.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
            },
        },
    ],
    ids=["flat", "old type key", "theta in scaling", "rope_parameters", "per layer type"],
)
@pytest.mark.parametrize("family", ["eagle3", "dflash"])
def test_every_spelling_of_rope_is_one_rope(parse: Any, family: str, changes: dict[str, Any]) -> None:
    found = rope(parse(family, **changes))
    assert (found.theta, found.rope_type, found.scaling, found.rotary_dim) == (7.0, "yarn", YARN, 32)


def test_rope_per_layer_type_is_that_layer_s(parse: Any) -> None:
    parameters = {
        FULL: {"rope_type": "default", "rope_theta": 7.0},
        SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0},
    }
    spec = parse("dflash", layer_types=[SLIDING, FULL], sliding_window=6, rope_theta=None, rope_parameters=parameters)
    assert (rope(spec, 0).theta, rope(spec, 0).rope_type, rope(spec, 0).scaling) == (9.0, "linear", {"factor": 2.0})
    assert (rope(spec, 1).theta, rope(spec, 1).rope_type, rope(spec, 1).scaling) == (7.0, "default", {})


def test_every_place_that_states_theta_is_kept_in_reading_order(parse: Any) -> None:
    spec = parse("eagle3", rope_theta=1.0, rope_scaling={"rope_theta": 2.0}, rope_parameters={"rope_theta": 3.0})
    assert list(stated(spec).items()) == [
        ("rope_parameters.rope_theta", 3.0),
        ("rope_scaling.rope_theta", 2.0),
        ("rope_theta", 1.0),
    ]
    assert rope(spec).theta == 3.0


def test_no_theta_is_not_guessed(parse: Any) -> None:
    found = rope(parse("eagle3", rope_theta=...))
    assert (found.theta, found.theta_stated) == (None, ())


@pytest.mark.parametrize(
    ("changes", "rotary_dim"),
    [
        ({"partial_rotary_factor": 0.25}, 8),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 16),
        ({"partial_rotary_factor": 1}, 32),
        # Proportional RoPE keeps exponents over the whole head; the factor says how many lanes turn at all.
        ({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}, 32),
    ],
)
def test_partial_rotary_factor(parse: Any, changes: dict[str, Any], rotary_dim: int) -> None:
    assert rope(parse("eagle3", **changes)).rotary_dim == rotary_dim


def test_mla_rope_turns_the_rope_lanes_only(parse: Any) -> None:
    found = rope(parse("eagle3-mla", rope_scaling=None))
    assert (found.rope_type, found.rotary_dim, found.is_neox_style) == ("default", 8, False)


# --- what several families read alike ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        ({"head_dim": 24}, 24),
        ({"head_dim": ...}, 16),
        ({"head_dim": None}, 16),
        ({"head_dim": ..., "num_attention_heads": 7}, None),
    ],
)
def test_head_dim_is_stated_or_a_whole_quotient(parse: Any, changes: dict[str, Any], head_dim: int | None) -> None:
    assert gqa(parse("eagle3", **changes)).head_dim == head_dim


def test_kv_heads_default_to_the_query_heads(parse: Any) -> None:
    assert gqa(parse("eagle3", num_key_value_heads=...)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "size", "key", "rows", "reduced"),
    [
        ({}, 256, "draft_vocab_size", 256, True),
        ({"draft_vocab_size": ..., "truncated_vocab_size": 300}, 300, "truncated_vocab_size", 300, True),
        ({"draft_vocab_size": 256, "truncated_vocab_size": 300}, 256, "draft_vocab_size", 256, True),
        ({"draft_vocab_size": None, "truncated_vocab_size": 300}, 300, "truncated_vocab_size", 300, True),
        ({"draft_vocab_size": 512}, 512, "draft_vocab_size", 512, False),
        ({"draft_vocab_size": ...}, None, None, 512, False),
    ],
)
def test_vocabulary(parse: Any, changes: dict[str, Any], size: object, key: object, rows: int, reduced: bool) -> None:
    found = parse("eagle3", **changes).vocabulary
    assert (found.draft_vocab_size, found.draft_vocab_key) == (size, key)
    assert (found.head_rows, found.is_reduced) == (rows, reduced)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": ...}, None),
    ],
)
def test_declared_dtype(parse: Any, changes: dict[str, Any], dtype: str | None) -> None:
    assert parse("eagle3", **changes).dtype == dtype


def test_eps_defaults_to_the_classes_default(parse: Any) -> None:
    assert parse("eagle3", rms_norm_eps=...).layers[0].norm_eps == 1e-6


# --- wrong types ---------------------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str, Any]] = [
    ("eagle3", "hidden_size", "4096"),
    ("eagle3", "hidden_size", 64.0),
    ("eagle3", "hidden_size", -64),
    ("eagle3", "hidden_size", True),
    ("eagle3", "hidden_size", 1 << 31),
    ("eagle3", "hidden_size", 10**299),
    ("eagle3", "num_hidden_layers", 513),
    ("eagle3", "num_attention_heads", [4]),
    ("eagle3", "rms_norm_eps", "1e-5"),
    ("eagle3", "rope_theta", "10000"),
    ("eagle3", "rope_scaling", "yarn"),
    ("eagle3", "rope_parameters", [1]),
    ("eagle3", "partial_rotary_factor", 1e308),
    ("eagle3", "partial_rotary_factor", -0.5),
    ("eagle3", "tie_word_embeddings", "false"),
    ("eagle3", "attention_bias", 0),
    ("eagle3", "architectures", "LlamaForCausalLMEagle3"),
    ("eagle3", "eagle_config", []),
    ("eagle3", "eagle_aux_hidden_state_layer_ids", "2,8,13"),
    ("eagle3", "eagle_aux_hidden_state_layer_ids", [2, 8.0, 13]),
    ("eagle3", "eagle_aux_hidden_state_layer_ids", [True, False]),
    ("eagle3", "num_aux_hidden_states", 2_000_000_000),
    ("eagle3", "hidden_act", 3),
    ("eagle3", "torch_dtype", 16),
    ("eagle3-mla", "q_lora_rank", "1536"),
    ("eagle3-mla", "kv_lora_rank", 32.5),
    ("dflash", "layer_types", "full_attention"),
    ("dflash", "layer_types", [1, 2]),
    ("dflash", "is_causal", "no"),
    ("dflash", "block_size", 8.5),
]


@pytest.mark.parametrize(("family", "key", "value"), WRONG)
def test_a_value_of_the_wrong_type_is_a_fault_and_counts_as_absent(
    tmp_path: Path, family: str, key: str, value: Any
) -> None:
    draft = opened(tmp_path, tiny_config(family, fc_norm=True, **{key: value}))
    (fault,) = draft.config_faults
    assert (fault.key, fault.path, fault.got) == (key, str(tmp_path / "config.json"), value)
    assert str(fault).isprintable()
    assert len(fault.message) < 200
    assert draft.spec is not None
    if key == "hidden_size":
        assert draft.spec.hidden_size is None
        assert gqa(draft.spec).in_features is None
    assert draft.binding is not None
    assert len(draft.binding.expected) < 100


def test_a_nested_fault_names_its_whole_key(tmp_path: Path) -> None:
    config = tiny_config("dflash", dflash_config={"mask_token_id": "<mask>", "target_layer_ids": [1, 9, 17]})
    (fault,) = opened(tmp_path, config).config_faults
    assert str(fault).endswith(
        "config.json: dflash_config.mask_token_id: '<mask>' where a whole number from 0 to 2147483647 was due"
    )
