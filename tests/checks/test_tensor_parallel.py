"""Stacks that are divided among ranks, and which engines take their fused path.

What goes wrong without this file: a slicer that gives a rank other heads than it believes, a count of ranks that no engine can serve and
that passes, and a path that is off or wrong without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import checks, open_draft, testing
from pytest_specdecode.api import open_context
from pytest_specdecode.engines import ServeOptions
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.fused_kv import tensor_parallel
from pytest_specdecode.fused_kv.tensor_parallel import rank_kv_heads, rank_layers, why_not_divided


def _run(id: str, path: Path, serve: str = "", **options: Any) -> CheckResult:
    context = open_context(path, **options)
    context.serve = ServeOptions.parse(serve)
    return checks.run(checks.REGISTRY[id], context)


# --- counts -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "reason"),
    [
        (32, 8, 8, None),
        (32, 8, 1, None),
        (32, 2, 8, None),
        (32, 1, 4, None),
        (28, 4, 8, "28 query heads do not divide among 8 ranks"),
        (24, 6, 4, "6 KV heads do not divide among 4 ranks"),
        (24, 3, 8, "3 KV heads cannot be replicated over 8 ranks, which they do not divide"),
    ],
)
def test_heads_divide_or_are_replicated(heads: int, kv_heads: int, ranks: int, reason: str | None) -> None:
    """The three asserts of SGLang's DFlashAttention, by hand."""
    assert why_not_divided(heads, kv_heads, ranks) == reason


def test_which_heads_a_rank_holds() -> None:
    assert [list(rank_kv_heads(4, 2, rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(rank_kv_heads(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize("biased", [False, True])
def test_a_rank_holds_its_rows_of_q_k_and_v(biased: bool, tmp_path: Path) -> None:
    """4 query heads, 2 KV heads of width 32: rows 0 to 127 are Q, 128 to 191 K, 192 to 255 V."""
    layers = open_draft(testing.write_tiny(tmp_path, "dflash", attention_bias=biased)).layers()
    whole = layers[1].self_attn
    assert (whole.q_size, whole.kv_size, whole.head_dim) == (128, 64, 32)
    rows = {2: [64, 65, 160, 161, 224, 225], 4: [96, 97, 160, 161, 224, 225]}
    for ranks, due in rows.items():
        mine = rank_layers(layers, ranks, ranks - 1)[1].self_attn
        first = [0, 1, mine.q_size, mine.q_size + 1, mine.q_size + mine.kv_size, mine.q_size + mine.kv_size + 1]
        assert torch.equal(mine.qkv_proj.weight[first], whole.qkv_proj.weight[due])
        assert (mine.num_kv_heads, mine.kv_size, mine.q_size) == (1, 32, 128 // ranks)
        if biased:
            assert torch.equal(mine.qkv_proj.bias[first], whole.qkv_proj.bias[due])


# --- fused-kv.tensor-parallel -------------------------------------------------------------------------------------------------------


def test_it_says_which_numbers_of_ranks_it_tried(tmp_path: Path) -> None:
    result = _run("fused-kv.tensor-parallel", testing.write_tiny(tmp_path, "dflash"))
    assert result.status == "passed"
    assert result.message == ("1, 2, 4 ranks rebuild the whole; not 8: 4 query heads do not divide among 8 ranks")


@pytest.mark.parametrize(("ranks", "status"), [(1, "passed"), (4, "passed"), (8, "failed"), (3, "failed")])
@pytest.mark.parametrize("weights", [True, False])
def test_only_ranks_that_are_asked_for_are_an_error(ranks: int, status: str, weights: bool, tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "dflash")
    if not weights:
        (path / "model.safetensors").unlink()
    result = _run("fused-kv.tensor-parallel", path, f"tp={ranks}")
    assert result.status == (status if weights or status == "failed" else "inconclusive")
    if status == "failed":
        (finding,) = result.findings
        assert finding.message == f"4 query heads do not divide among {ranks} ranks"
        assert finding.due == "tp of 1, 2, 4"
        assert finding.outcomes["sglang"].outcome == "stops"
        assert "total_num_heads divisible by tp_size" in finding.outcomes["sglang"].message


def test_a_huge_number_of_ranks_fails_at_once(tmp_path: Path) -> None:
    result = _run("fused-kv.tensor-parallel", testing.write_tiny(tmp_path, "dflash"), f"tp={10**11}")
    assert result.status == "failed"


@pytest.mark.parametrize("family", ["dflash", "dspark", "domino", "xpress"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_division_rebuilds_the_whole(family: str, kv_heads: int, tmp_path: Path) -> None:
    if family == "xpress":
        layer = {**testing.tiny_config("xpress")["transformer_layer_config"], "num_key_value_heads": kv_heads}
        path = testing.write_tiny(tmp_path, family, transformer_layer_config=layer)
    else:
        path = testing.write_tiny(tmp_path, family, num_key_value_heads=kv_heads)
    assert _run("fused-kv.tensor-parallel", path).status == "passed"


@pytest.mark.parametrize("fault", ["next rank's heads", "v before k", "copies differ"])
def test_a_wrong_slice_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = testing.write_tiny(tmp_path, "dflash")
    real = tensor_parallel.rank_layers

    def wrong(layers: Any, ranks: int, rank: int) -> Any:
        if fault == "next rank's heads":
            return real(layers, ranks, (rank + 1) % ranks)
        if fault == "copies differ":
            return real(layers, ranks, rank ^ 2 if ranks == 4 and rank in (1, 3) else rank)
        found = real(layers, ranks, rank)
        for layer in found:
            attn = layer.self_attn
            q, k, v = attn.qkv_proj.weight.split([attn.q_size, attn.kv_size, attn.kv_size])
            attn.qkv_proj.weight = torch.cat([q, v, k])
        return found

    monkeypatch.setattr("pytest_specdecode.checks.fused_kv.rank_layers", wrong)
    result = _run("fused-kv.tensor-parallel", path)
    assert result.status == "failed"
    assert "ranks" in result.message or "of 4" in result.message
    assert result.findings[0].where == "layers.0.self_attn.k_proj.weight, layers.0.self_attn.v_proj.weight"


def test_layers_that_are_no_stack_are_left_open(tmp_path: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("k", "v"):
            name = f"layers.1.self_attn.{part}_proj.weight"
            tensors[name] = tensors[name][:32]

    assert _run("fused-kv.tensor-parallel", testing.write_tiny(tmp_path, "dflash", edit=halve)).status == "inconclusive"


# --- fused-kv.engine-path -----------------------------------------------------------------------------------------------------------


def test_what_every_engine_does_stands_in_the_note(tmp_path: Path) -> None:
    result = _run("fused-kv.engine-path", testing.write_tiny(tmp_path, "domino"))
    assert result.status == "passed"
    assert result.message.startswith("SGLang uses its fused path; vLLM has no fused path for a domino draft")


def test_a_path_that_is_off_without_a_word(tmp_path: Path) -> None:
    """SGLang's DSpark writer takes plain RoPE only and says nothing of it."""
    rope = {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    path = testing.write_tiny(tmp_path, "dspark", rope_parameters=rope)
    result = _run("fused-kv.engine-path", path)
    assert result.status == "warned"
    assert result.message.startswith("SGLang does not use its fused path: ")
    assert "plain RoPE only, not linear" in result.message
    assert result.findings[0].outcomes["sglang"].outcome == "falls back"


def test_a_path_that_is_off_with_a_line_in_the_log(tmp_path: Path) -> None:
    """A note, and a warning for whoever chose that engine."""
    path = testing.write_tiny(tmp_path, "dflash", attention_bias=True)
    result = _run("fused-kv.engine-path", path)
    assert result.status == "passed"
    assert "qkv bias is not supported for fused KV path: layer=0" in result.message
    assert _run("fused-kv.engine-path", path, engines=["sglang"]).status == "warned"
    assert _run("fused-kv.engine-path", path, engines=["vllm"]).status == "passed"


def test_a_path_that_is_used_and_passes_over_a_scale(tmp_path: Path) -> None:
    block = {**testing.tiny_config("dflash")["dflash_config"], "attention_value_scale": 0.5}
    result = _run("fused-kv.engine-path", testing.write_tiny(tmp_path, "dflash", dflash_config=block))
    assert result.status == "warned"
    assert "uses its fused path and fills the cache wrong" in result.message
    assert result.findings[0].where == "config.json: dflash_config.attention_value_scale"
    assert result.findings[0].outcomes["sglang"].outcome == "serves wrong"


def test_a_path_that_takes_layer_0_for_all(tmp_path: Path) -> None:
    """Bases that differ between layer types: the engine that does not compare them rotates every layer by layer 0's."""
    types = ["full_attention", "sliding_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(types, (1e6, 1e4), strict=True)}
    path = testing.write_tiny(
        tmp_path,
        "dflash",
        layer_types=types,
        sliding_window=64,
        use_sliding_window=True,
        rope_parameters=rope,
        rope_theta=...,
    )
    draft = open_draft(path)
    assert draft.spec is not None
    thetas = {layer.attention.rope.theta for layer in draft.spec.layers if layer.attention is not None}
    assert len(thetas) == 2
    result = _run("fused-kv.engine-path", path)
    assert result.status == "warned"
    assert "layer 0's cos/sin table for every layer" in result.message
    assert result.findings[0].where == "layer 1"
    assert set(result.findings[0].got) == {"rope_theta"}


@pytest.mark.parametrize("value", ["x", None, [], {}, 1 << 40, True])
def test_odd_values_raise_nothing(value: Any, tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "dflash")
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_scaling", "dflash_config"):
        file.write_text(json.dumps({**config, key: value}))
        for id in ("fused-kv.tensor-parallel", "fused-kv.engine-path"):
            assert _run(id, path, "tp=2").status in ("passed", "failed", "warned", "inconclusive", "skipped")
