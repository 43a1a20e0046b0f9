"""Options that only one family has, and the head behind its last layer.

What goes wrong without this file: a size that nobody states makes every shape that hangs on it unjudged, and the draft passes; a head
that does not build, or does not run, passes because only layers are built; a name that no family claims is overlooked beside names that
one does; heads inside a target are read together with the target; a draft that a check does not apply to is reported as unjudged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.families import FAMILIES

Tensors = dict[str, torch.Tensor]


def _rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def _without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in keys:
            section = config
            *parents, last = key.split(".")
            for parent in parents:
                section = section[parent]
            del section[last]

    return change


def _with(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key, value in values.items():
            *parents, last = key.split("__")
            section = config
            for parent in parents:
                section = section[parent]
            section[last] = value

    return change


OPTIONS = [
    ("domino", _without("dflash_config.emb_dim"), ["dflash_config.emb_dim"]),
    ("domino", _without("dflash_config.gru_hidden_dim"), ["dflash_config.gru_hidden_dim"]),
    ("dspark", _with(markov_head_type="fancy"), ["markov_head_type"]),
    ("dspark", _without("markov_rank"), ["markov_rank"]),
    ("dflash2", _without("dflash_config.conv_kernel_size"), ["dflash_config.conv_kernel_size"]),
    ("dflash2", _without("dflash_config.conv_group_size"), ["dflash_config.conv_group_size"]),
    ("dflash2", _without("dflash_config.selector_rank"), ["dflash_config.selector_rank"]),
    ("dflash2", _without("dflash_config.selector_top_k"), ["dflash_config.selector_top_k"]),
    ("dflash2", _with(dflash_config__conv_group_size=24), ["dflash_config.conv_group_size"]),
    ("dflash2", _with(dflash_config__selector_top_k=513), ["dflash_config.selector_top_k"]),
    # One finding: the wrong type; that it is read as absent is no second.
    ("dflash2", _with(dflash_config__selector_top_k="4"), ["dflash_config.selector_top_k"]),
    ("xpress", _without("xpress_rank"), ["xpress_rank"]),
    ("xpress", _without("xpress_mlp_ratio"), ["xpress_mlp_ratio"]),
    ("gemma4-assistant", _without("backbone_hidden_size"), ["backbone_hidden_size"]),
    ("gemma4-assistant", _without("num_centroids"), ["num_centroids"]),
    ("gemma4-assistant", _with(num_centroids=48), ["num_centroids"]),
    ("gemma4-assistant", _with(centroid_intermediate_top_k=17), ["centroid_intermediate_top_k"]),
    ("mlp-speculator", _without("top_k_tokens_per_head"), ["top_k_tokens_per_head"]),
    ("mlp-speculator", _with(top_k_tokens_per_head=[4, 3]), ["top_k_tokens_per_head"]),
    ("mlp-speculator", _with(top_k_tokens_per_head=[4, 3, 0]), ["top_k_tokens_per_head"]),
]


@pytest.mark.parametrize("weights", [True, False], ids=["whole", "configuration-only"])
@pytest.mark.parametrize(("family", "change", "keys"), OPTIONS)
def test_an_option_that_is_not_stated_or_cannot_be(
    family: str, change: Callable[[dict[str, Any]], None], keys: list[str], weights: bool, tmp_path: Path
) -> None:
    path = _rewrite(testing.write_tiny(tmp_path, family), change)
    if not weights:
        for file in path.glob("*.safetensors"):
            file.unlink()
    result = check_draft(path, checks=["config.types"])["config.types"]
    assert result.status == "failed"
    assert [finding.where for finding in result.findings] == [f"config.json: {key}" for key in keys]


def _efficient(tensors: Tensors) -> None:
    """EAGLE-4's factors, which a file may leave to the engine."""
    rows = len(tensors["lm_head.weight"])
    tensors["efficient_lm_head.weight"] = torch.randn(rows, 16).bfloat16()
    tensors["efficient_lm_head_down_proj.weight"] = torch.randn(16, 64).bfloat16()


def _cut(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        if name.startswith("efficient"):
            _efficient(tensors)
        tensors[name] = tensors[name][:-1].contiguous()

    return edit


HEADS = [
    ("eagle1", "fc.weight"),
    ("eagle3", "fc.weight"),
    ("eagle3-mla", "norm.weight"),
    ("peagle", "fc.weight"),
    ("eagle4", "efficient_lm_head.weight"),
    ("dflash2", "candidate_selector.hidden_projection.weight"),
    ("domino", "prefix_gru.weight_hh_l0"),
    ("dspark", "markov_head.markov_w1.weight"),
    ("xpress", "refiner_head.readout.weight"),
    ("gemma4-assistant", "post_projection.weight"),
]


@pytest.mark.parametrize(("family", "tensor"), HEADS)
def test_a_head_that_does_not_build_is_named(family: str, tensor: str, tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, family, edit=_cut(tensor))
    result = check_draft(path, checks=["layers.build"])["layers.build"]
    assert (result.status, result.findings[0].where) == ("failed", tensor)


def test_every_family_with_a_head_has_a_row() -> None:
    from pytest_specdecode.families import Family

    assert {family.name for family in FAMILIES if type(family).build_head is not Family.build_head} == {
        family for family, _ in HEADS
    }


@pytest.mark.parametrize("family", ["dflash2", "domino", "dspark", "xpress", "gemma4-assistant", "eagle4", "peagle"])
def test_a_head_is_run(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a block's worth of states, with a finite result."""
    sheet = next(item for item in FAMILIES if item.name == family)
    results: list[Any] = []
    run = type(sheet).run_head

    def kept(self: Any, spec: Any, head: Any, states: torch.Tensor) -> Any:
        results.append(run(self, spec, head, states))
        return results[-1]

    monkeypatch.setattr(type(sheet), "run_head", kept)
    path = testing.write_tiny(tmp_path, family, edit=_efficient if family == "eagle4" else None)
    assert check_draft(path, checks=["layers.build"]).ok
    (found,) = results
    first = found[0] if isinstance(found, tuple) else found
    assert torch.isfinite(first.double()).all()


def test_token_ordering_holds_every_id_once(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["masked_embedding.token_ordering"][3] = tensors["masked_embedding.token_ordering"][4]

    path = testing.write_tiny(tmp_path, "gemma4-assistant", edit=edit)
    result = check_draft(path, checks=["layers.build"])["layers.build"]
    assert (result.status, result.findings[0].where) == ("failed", "masked_embedding.token_ordering")


# --- names --------------------------------------------------------------------------------------------------------------------------


def test_a_speculators_type_that_no_family_claims(tmp_path: Path) -> None:
    path = _rewrite(testing.write_tiny(tmp_path, "xpress"), _with(speculators_model_type="zzz"))
    result = check_draft(path, checks=["config.family"])["config.family"]
    assert (result.status, result.message) == ("failed", "signals name more than one family: xpress, zzz")


def test_an_algorithm_that_is_not_the_type(tmp_path: Path) -> None:
    path = _rewrite(testing.write_tiny(tmp_path, "xpress"), _with(speculators_config__algorithm="dspark"))
    result = check_draft(path, checks=["config.family"])["config.family"]
    assert result.status == "failed"
    assert (result.findings[0].got, result.findings[0].due) == ("dspark", "xpress")


# --- stages that are tied -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("copies", "status"), [(True, "passed"), (False, "failed")])
def test_tied_stages_that_are_stored_several_times(copies: bool, status: str, tmp_path: Path) -> None:
    """As copies they are what the configuration says; as different tensors all but the first are dropped."""

    def tie(tensors: Tensors) -> None:
        if copies:
            for name in tensors:
                kind, index, last = name.split(".")
                tensors[name] = tensors[f"{kind}.{min(int(index), int(kind == 'proj'))}.{last}"].clone()

    path = _rewrite(testing.write_tiny(tmp_path, "mlp-speculator", edit=tie), _with(tie_weights=True))
    result = check_draft(path, checks=["weights.unexpected"])["weights.unexpected"]
    assert result.status == status
    if not copies:
        assert result.findings[0].where == "emb.1.weight"
        assert "proj.2.weight" in result.findings[0].got
        assert "proj.1.weight" not in result.findings[0].got


# --- attention sinks ----------------------------------------------------------------------------------------------------------------


WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}


def _sinks(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(8)
    for layer in (0, 1):
        tensors[f"layers.{layer}.self_attn.attention_sink_bias"] = torch.randn(4, generator=generator).bfloat16()


@pytest.mark.parametrize("family", ["dflash", "dflash2", "domino", "dflare", "dspark"])
@pytest.mark.parametrize(
    ("flag", "stored", "check"),
    [(True, False, "weights.missing"), (False, True, "weights.unexpected"), (True, True, None), (None, True, None)],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_sink_is_there_as_its_flag_says(
    family: str, flag: bool | None, stored: bool, check: str | None, nested: bool, tmp_path: Path
) -> None:
    path = testing.write_tiny(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    place = config.setdefault("dflash_config", {}) if nested else config
    place["attention_sink_bias"] = flag
    tensors = testing.random_tensors(config, family)
    if stored:
        _sinks(tensors)
    else:
        tensors = {name: value for name, value in tensors.items() if "sink" not in name}
    report = check_draft(testing.write_checkpoint(path, config, tensors))
    failed = [result.id for result in report if result.status == "failed"]
    assert set(failed) == (set() if check is None else {check, "layers.build"})
    if check is not None:
        assert report["layers.build"].findings[0].where == "layers.0.self_attn.attention_sink_bias"
        assert "attention_sink_bias" in report[check].message
        return
    assert report["layers.incremental"].status == "passed"
    assert report["fused-kv.matches-reference"].status == ("skipped" if family == "dflare" else "passed")


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_a_sink_of_another_size_is_named(family: str, tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        _sinks(tensors)
        name = "layers.1.self_attn.attention_sink_bias"
        tensors[name] = tensors[name][:2].clone()

    report = check_draft(testing.write_tiny(tmp_path, family, edit=cut), checks=["weights.shapes", "layers.build"])
    assert {result.findings[0].where for result in report} == {"layers.1.self_attn.attention_sink_bias"}


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_sinks_and_windows_change_the_block_and_not_the_stacked_context(family: str, tmp_path: Path) -> None:
    """The same weights with and without: other states, the same K and V, from the layers and from one stack over all of them."""
    plain = open_draft(testing.write_tiny(tmp_path / "plain", family))
    sunk = open_draft(testing.write_tiny(tmp_path / "sunk", family, edit=_sinks, **WINDOWED))
    assert sunk.fused_kv_reason is None
    probe = plain.layer(1).probe(9, 4)
    assert not torch.equal(plain.layer(1).prefill(probe), sunk.layer(1).prefill(probe))
    stacks = [draft.fused_kv().compute(probe["context"], probe["context_positions"]) for draft in (plain, sunk)]
    for one, other in zip(*stacks, strict=True):
        assert torch.equal(one, other)
    k, v = stacks[1]
    for index, layer in enumerate(sunk.layers(dtype=torch.float64)):
        due = layer.context_kv(probe["context"].double(), probe["context_positions"])  # type: ignore[attr-defined]
        torch.testing.assert_close(k[index].double(), due[0], rtol=0.02, atol=0.02)
        torch.testing.assert_close(v[index].double(), due[1], rtol=0.02, atol=0.02)


def test_a_sink_beside_latents_is_left_open(tmp_path: Path) -> None:
    latent = {
        "architectures": ["K3DSparkModel"],
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    report = check_draft(
        testing.write_tiny(tmp_path, "dspark", edit=_sinks, **latent), checks=["layers.build", "weights"]
    )
    assert report["weights.unexpected"].status == "failed"
    assert report["layers.build"].status == "inconclusive"
    assert report["layers.build"].message == "there is no reference forward for latent attention with a learned sink"


# --- heads in their target ----------------------------------------------------------------------------------------------------------


def _medusa_in_target() -> tuple[dict[str, Any], Tensors]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
    }
    tensors = {"model.layers.0.self_attn.q_proj.weight": made(64, 64), "lm_head.weight": made(512, 64)}
    for head in (0, 1):
        prefix = f"medusa_heads.{head}"
        tensors[f"{prefix}.medusa_layers.0.linear.weight"] = made(64, 64)
        tensors[f"{prefix}.medusa_layers.0.linear.bias"] = made(64)
        tensors[f"{prefix}.lm_head.weight"] = made(512, 64)
    return config, tensors


def test_medusa_heads_inside_their_target(tmp_path: Path) -> None:
    config, tensors = _medusa_in_target()
    report = check_draft(testing.write_checkpoint(tmp_path, config, tensors), checks=["config", "weights", "layers"])
    assert report.ok, str(report)
    assert report.drafts[0].description.startswith(f"{tmp_path.name}: medusa (embedded), 2 layers")
    del tensors["medusa_heads.1.lm_head.weight"]
    broken = check_draft(testing.write_checkpoint(tmp_path, config, tensors), checks=["weights.missing"])
    assert broken["weights.missing"].findings[0].due == {"medusa_heads.1.lm_head.weight": [512, 64]}


# --- what does not apply, and why ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["eagle3", "medusa", "dflare", "gemma4-assistant"])
def test_a_stack_that_no_engine_has_is_skipped_whatever_is_missing(family: str, tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, family)
    index = {"metadata": {}, "weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = check_draft(path, checks=["fused-kv"])
    reason = next(item for item in FAMILIES if item.name == family).fused_kv
    assert {(result.status, result.message) for result in report} == {("skipped", reason)}
