"""Every axis of a stack has a check that fails on a checkpoint whose layers differ in it, and names the layer.

What goes wrong without this file: an axis whose check compares nothing, because the headers or the spec never give it a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import AXES, checks, testing
from pytest_specdecode.api import open_context
from pytest_specdecode.checks import Context
from pytest_specdecode.checks.fused_kv import MEANING
from pytest_specdecode.spec import GQASpec

Tensors = dict[str, torch.Tensor]
ATTN = "layers.1.self_attn"

#: Differences that a file can hold in its tensors.
STORED: dict[str, Callable[[Tensors], Any]] = {
    "num-kv-heads": lambda t: t.update({f"{ATTN}.{n}_proj.weight": t[f"{ATTN}.{n}_proj.weight"][:32] for n in "kv"}),
    "head-dim": lambda t: t.update({f"{ATTN}.k_norm.weight": torch.ones(16).bfloat16()}),
    "hidden-size": lambda t: t.update({f"{ATTN}.k_proj.weight": t[f"{ATTN}.k_proj.weight"][:, :32]}),
    "dtype": lambda t: t.update({f"{ATTN}.k_proj.weight": t[f"{ATTN}.k_proj.weight"].half()}),
    "bias": lambda t: t.update({f"{ATTN}.k_proj.bias": torch.zeros(64).bfloat16()}),
    "k-norm": lambda t: t.pop(f"{ATTN}.k_norm.weight"),
    "v-head-dim": lambda t: t.update({f"{ATTN}.v_proj.weight": t[f"{ATTN}.v_proj.weight"][:32]}),
    "q-size": lambda t: t.update({f"{ATTN}.q_proj.weight": t[f"{ATTN}.q_proj.weight"].repeat(2, 1)}),
    "quantization": lambda t: t.update({f"{ATTN}.k_proj.weight": t[f"{ATTN}.k_proj.weight"].to(torch.float8_e4m3fn)}),
}

_PER_TYPE = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64, "rope_theta": ...}
_FULL = {"rope_type": "default", "rope_theta": 1e6}
#: Differences that a configuration can state, layer type by layer type.
STATED: dict[str, dict[str, Any]] = {
    "rope-theta": {"full_attention": _FULL, "sliding_attention": {**_FULL, "rope_theta": 1e4}},
    "rope-scaling": {
        "full_attention": _FULL,
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    },
    "rotary-dim": {"full_attention": _FULL, "sliding_attention": {**_FULL, "partial_rotary_factor": 0.5}},
}


def _attention(**changes: Any) -> Callable[[Any], Any]:
    def change(layer: Any) -> Any:
        assert isinstance(layer.attention, GQASpec)
        return replace(layer, attention=replace(layer.attention, **changes))

    return change


#: Differences that no packaging of this family states per layer; the spec is changed, as a family that has them would parse it.
SPEC: dict[str, Callable[[Any], Any]] = {
    "rope-style": lambda layer: replace(
        layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, is_neox_style=False))
    ),
    "norm-kind": lambda layer: replace(layer, norm_kind="gemma"),
    "value-scale": _attention(value_scale=0.5),
}


def test_every_axis_is_shown() -> None:
    """No axis without a case here, and none without a meaning for the documentation."""
    assert set(STORED) | set(STATED) | set(SPEC) == set(AXES)
    assert set(MEANING) == set(AXES)


@pytest.mark.parametrize("axis", AXES)
def test_a_difference_in_layer_1_fails_the_axis(axis: str, tmp_path: Path) -> None:
    """The check fails and names layer 1; the same draft without the difference passes it."""
    broken = checks.run(checks.REGISTRY[f"fused-kv.{axis}"], _context(axis, tmp_path))
    assert broken.status == "failed", broken
    assert broken.findings[0].where == "layer 1"
    assert broken.findings[0].got != broken.findings[0].due
    good = open_context(testing.write_tiny(tmp_path / "good", "dflash"))
    assert checks.run(checks.REGISTRY[f"fused-kv.{axis}"], good).status == "passed"


@pytest.mark.parametrize(("odd", "status"), [((0,), "failed"), ((1,), "failed"), ((0, 1), "warned")])
def test_interleaved_rope_is_slow_on_all_layers_and_wrong_on_some(
    odd: tuple[int, ...], status: str, tmp_path: Path
) -> None:
    """A style that all layers share only keeps an engine from stacking; whichever layer differs, that is an error."""
    context = open_context(testing.write_tiny(tmp_path / "draft", "dflash"))
    spec = context.draft.spec
    assert spec is not None
    layers = tuple(SPEC["rope-style"](layer) if layer.index in odd else layer for layer in spec.layers)
    context.draft.spec = replace(spec, layers=layers)
    assert checks.run(checks.REGISTRY["fused-kv.rope-style"], context).status == status


def test_a_difference_in_norm_eps_warns(tmp_path: Path) -> None:
    """The kernel takes an epsilon per layer; vLLM does not."""
    context = open_context(testing.write_tiny(tmp_path / "draft", "dflash"))
    _change_layer_1(context, lambda layer: replace(layer, norm_eps=1e-5))
    result = checks.run(checks.REGISTRY["fused-kv.norm-eps"], context)
    assert result.status == "warned"
    assert result.findings[0].outcomes["vllm"].outcome == "serves wrong"
    assert result.findings[0].outcomes["sglang"].outcome == "fine"


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla"])
def test_a_family_without_a_stack_is_skipped_with_the_reason(family: str, tmp_path: Path) -> None:
    """Not passed: nothing was compared."""
    context = open_context(testing.write_tiny(tmp_path / "draft", family))
    for axis in AXES:
        result = checks.run(checks.REGISTRY[f"fused-kv.{axis}"], context)
        assert result.status == "skipped"
        assert "no engine" in result.message


def _context(axis: str, tmp_path: Path) -> Context:
    if axis in STATED:
        config = testing.tiny_config("dflash", **_PER_TYPE, rope_parameters=STATED[axis])
        return open_context(testing.write_tiny(tmp_path / "draft", "dflash", config=config))
    context = open_context(testing.write_tiny(tmp_path / "draft", "dflash", edit=STORED.get(axis)))
    if axis in SPEC:
        _change_layer_1(context, SPEC[axis])
    return context


def _change_layer_1(context: Context, change: Callable[[Any], Any]) -> None:
    spec = context.draft.spec
    assert spec is not None
    context.draft.spec = replace(spec, layers=(spec.layers[0], change(spec.layers[1])))
