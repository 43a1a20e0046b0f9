"""Prediction layers inside a target: are they there, in which convention are their norms, and which half comes first.

What goes wrong without this file: an export that lost its prediction layers passes, a trained norm whose mean happens to be small raises an
alarm, a norm of the other convention does not, and a MiMo layer under another class's names is taken for what it is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import checks, testing
from pytest_specdecode.api import open_context
from pytest_specdecode.findings import CheckResult

Tensors = dict[str, torch.Tensor]
QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_nextn_predict_layers": 1,
    "vocab_size": 512,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
MIMO = {**QWEN, "architectures": ["MiMoForCausalLM"], "model_type": "mimo"}


def _run(id: str, path: Path, **options: Any) -> CheckResult:
    return checks.run(checks.REGISTRY[id], open_context(path, **options))


def _write(path: Path, config: dict[str, Any] | None = None, edit: Callable[[Tensors], Any] | None = None) -> Path:
    return testing.write_tiny(path, "mtp", config=config, edit=edit)


def _restate(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return path


def _without(*indices: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(tuple(f"layers.{index}." for index in indices))]:
            del tensors[name]

    return edit


# --- mtp.layers ---------------------------------------------------------------------------------------------------------------------


def _two(tmp_path: Path, edit: Callable[[Tensors], Any] | None = None, **changes: Any) -> Path:
    path = _write(tmp_path, testing.tiny_config("mtp", num_nextn_predict_layers=2), edit)
    return _restate(path, **changes)


def test_whole_layers_are_named_by_their_numbers_in_the_file(tmp_path: Path) -> None:
    result = _run("mtp.layers", _two(tmp_path))
    assert (result.status, result.message) == ("passed", "prediction layers 3, 4")


def test_layers_that_an_export_lost(tmp_path: Path) -> None:
    """ModelOpt wrote 0 of 15 `mtp.*` tensors; nothing in the file says so but the count."""

    def keep_target(tensors: Tensors) -> None:
        _without(0)(tensors)
        tensors["lm_head.weight"] = torch.ones(512, 64)

    result = _run("mtp.layers", _write(tmp_path, edit=keep_target))
    assert result.status == "failed"
    assert result.message == "the declared prediction layer is not in the weights"
    assert result.findings[0].where == "model.layers.3.enorm.weight"
    outcomes = result.findings[0].outcomes
    assert (outcomes["vllm"].outcome, outcomes["sglang"].outcome) == ("stops", "serves wrong")
    assert "MTP speculative decoding layer" in outcomes["vllm"].message


def test_one_of_several_is_missing(tmp_path: Path) -> None:
    result = _run("mtp.layers", _write(tmp_path, testing.tiny_config("mtp", num_nextn_predict_layers=3), _without(1)))
    assert (result.status, result.message) == (
        "failed",
        "1 of 3 declared prediction layers are not in the weights: 4",
    )
    assert result.findings[0].got == "layers 3, 5"


def test_a_shared_layer_counts_once(tmp_path: Path) -> None:
    """One layer that a server runs three times, declared as three."""
    result = _run("mtp.layers", _restate(_write(tmp_path), num_nextn_predict_layers=3))
    assert result.status == "failed"
    assert "the weights hold one" in result.message
    assert result.findings[0].fix == "state 1 where one layer serves every step"


def test_a_layer_beyond_the_count(tmp_path: Path) -> None:
    """`layers.81` beside N = 78 and three layers was a KeyError."""
    result = _run("mtp.layers", _two(tmp_path, num_nextn_predict_layers=1))
    assert (result.status, result.message) == (
        "failed",
        "layer 4 beyond the 1 that num_nextn_predict_layers counts",
    )
    assert result.findings[0].where.startswith("model.layers.4.")
    assert result.findings[0].outcomes["vllm"].outcome == "stops"


def test_a_plain_layer_of_the_target_is_no_prediction_layer(tmp_path: Path) -> None:
    """The depth is stated one too small, so the target's last layer is counted as predicted."""

    def plain(tensors: Tensors) -> None:
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            del tensors[f"layers.0.{name}.weight"]

    result = _run("mtp.layers", _two(tmp_path, plain))
    assert result.status == "failed"
    assert result.message == (
        "layer 3 has none of model.layers.3.enorm.weight, model.layers.3.hnorm.weight, model.layers.3.eh_proj.weight: "
        "it is no prediction layer"
    )


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"num_nextn_predict_layers": 0}, "failed", "no prediction layer is declared, the weights hold 2: 3, 4"),
        ({"num_nextn_predict_layers": ...}, "failed", "2 prediction layers are in the weights and no key states"),
        ({"mtp_num_hidden_layers": 1}, "warned", "stated with different values"),
        ({"mtp_num_hidden_layers": 2}, "passed", "prediction layers 3, 4"),
    ],
)
def test_a_count_that_is_nought_absent_or_stated_twice(
    changes: dict[str, Any], status: str, text: str, tmp_path: Path
) -> None:
    path = _two(tmp_path, **changes)
    result = _run("mtp.layers", path)
    assert result.status == status, result
    assert text in result.message


def test_a_stem_that_is_stored_once_serves_all_layers(tmp_path: Path) -> None:
    """Qwen's layers share one."""
    result = _run("mtp.layers", _write(tmp_path, {**QWEN, "num_nextn_predict_layers": 2}))
    assert (result.status, result.message) == ("passed", "prediction layers 0, 1")


@pytest.mark.parametrize("value", ["2", [1], {}, True, 1 << 40, -1, 2.5])
def test_a_count_of_another_type_raises_nothing(value: Any, tmp_path: Path) -> None:
    path = _restate(_write(tmp_path), num_nextn_predict_layers=value)
    for id in ("mtp.layers", "mtp.norms", "mtp.combine"):
        assert _run(id, path).status in ("passed", "failed", "warned", "inconclusive", "skipped")


# --- mtp.norms ----------------------------------------------------------------------------------------------------------------------


def _norms(*parts: str, make: Callable[[torch.Generator], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(3)
        for part in parts:
            tensors[f"layers.0.{part}.weight"] = make(generator).bfloat16()

    return edit


WIDE = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")


def _around(mean: float, spread: float) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: mean + spread * torch.randn(64, generator=generator)


def _positive(mean: float) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: mean * torch.exp(0.4 * torch.randn(64, generator=generator))


@pytest.mark.parametrize("mean", [0.02, 0.1, 0.5, 1.0, 3.0, 20.0])
def test_trained_norms_raise_no_alarm_whatever_their_mean(mean: float, tmp_path: Path) -> None:
    """A weight w that was trained keeps its sign; a mean near 0 proves nothing."""
    assert _run("mtp.norms", _write(tmp_path, edit=_norms(*WIDE, make=_positive(mean)))).status == "passed"


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 0.05), (0.3, 0.3), (-0.2, 0.1), (1.0, 0.6), (2.5, 0.4)])
def test_trained_norms_of_the_other_kind_raise_no_alarm(mean: float, spread: float, tmp_path: Path) -> None:
    """Zero-centred weights of a Qwen3-Next head, of any size that training gives them."""
    assert _run("mtp.norms", _write(tmp_path, QWEN, _norms(*WIDE, make=_around(mean, spread)))).status == "passed"


def test_one_norm_proves_nothing(tmp_path: Path) -> None:
    assert _run("mtp.norms", _write(tmp_path, edit=_norms("enorm", make=_around(0.0, 0.1)))).status == "passed"


def test_several_norms_against_the_family(tmp_path: Path) -> None:
    result = _run("mtp.norms", _write(tmp_path, edit=_norms(*WIDE, make=_around(0.0, 0.1))))
    assert result.status == "warned"
    assert result.message.startswith("5 of 5 norms have entries of both signs, as for 1 + w; a deepseek_v3 target")
    assert result.findings[0].where == "model.layers.3.enorm.weight"


def test_norms_to_which_one_was_added(tmp_path: Path) -> None:
    """An exporter that folds 1 + w, under a class that adds 1 again."""
    result = _run("mtp.norms", _write(tmp_path, QWEN, _norms(*WIDE, make=_around(1.0, 0.05))))
    assert result.status == "warned"
    assert "all 5 norms lie around 1" in result.message
    assert "mtp.pre_fc_norm_embedding.weight" in result.findings[0].got


def test_two_conventions_in_one_head(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        _norms("enorm", "hnorm", make=_around(0.0, 0.1))(tensors)
        _norms("input_layernorm", "post_attention_layernorm", make=_around(1.0, 0.05))(tensors)

    result = _run("mtp.norms", _write(tmp_path, edit=edit))
    assert result.status == "warned"
    assert "mixes two conventions" in result.message
    assert set(result.findings[0].got.values()) >= {"w", "1 + w"}


def test_norms_with_nan_are_another_checks(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for part in WIDE:
            tensors[f"layers.0.{part}.weight"][0] = float("nan")

    assert _run("mtp.norms", _write(tmp_path, edit=edit)).status == "inconclusive"


# --- mtp.combine --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "the embedding before the hidden state"),
        (QWEN, "the embedding before the hidden state"),
        (MIMO, "the hidden state before the embedding"),
    ],
)
def test_layers_under_their_own_names_pass(config: dict[str, Any] | None, text: str, tmp_path: Path) -> None:
    result = _run("mtp.combine", _write(tmp_path, config))
    assert (result.status, result.message) == ("passed", f"reads {text}")


def test_mimos_names_under_another_type(tmp_path: Path) -> None:
    """The names alone mean either order."""
    path = _restate(_write(tmp_path, MIMO), model_type="llama", architectures=["LlamaForCausalLM"])
    result = _run("mtp.combine", path)
    assert result.status == "warned"
    assert "is a name that MiMo's layers have" in result.message
    assert result.findings[0].where.startswith("model.mtp_layers.0.")


def test_deepseeks_names_under_mimos_type(tmp_path: Path) -> None:
    path = _restate(_write(tmp_path), architectures=["MiMoForCausalLM"], model_type="mimo")
    result = _run("mtp.combine", path)
    assert result.status == "warned"
    assert "a name of DeepSeek's layers" in result.message


def test_a_mimo_layer_in_the_speculators_packaging(tmp_path: Path) -> None:
    config = {
        "speculators_model_type": "mtp",
        "speculators_config": {"algorithm": "mtp"},
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": {key: value for key, value in MIMO.items() if key != "architectures"},
    }
    result = _run("mtp.combine", _write(tmp_path, config))
    assert result.status == "warned"
    assert result.message == "a mimo layer reads the hidden state first, and this packaging the embedding"
    assert result.findings[0].where == "config.json: transformer_layer_config.model_type"


def test_an_engine_that_goes_by_another_key(tmp_path: Path) -> None:
    """vLLM knows MiMo by its label; where only the type says so, it takes the layer for DeepSeek's."""
    path = _restate(_write(tmp_path, MIMO), architectures=["LlamaForCausalLM"])
    result = _run("mtp.combine", path)
    assert result.status == "warned"
    assert "not every engine gives it so" in result.message
    assert result.findings[0].outcomes["vllm"].outcome == "serves wrong"
    assert _run("mtp.combine", path, engines=["sglang"]).status in ("passed", "warned")
