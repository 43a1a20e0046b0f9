"""One row per check: the smallest change that it exists for makes it report, and without the change it passes.

What goes wrong without this file: a check that never fires, a check that fires on a good draft, a check that fires for another's
reason, and a check nobody wrote a row for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.fused_kv import AXES
from pytest_specdecode.report import Report

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault and what must be reported.

    Attributes:
        family: of the tiny draft that is broken.
        config: changes of the configuration after the tensors are made; `...` drops a key.
        shape_config: changes of the configuration for which the tensors are made as well.
        tensors: changes the tensors in place.
        files: changes the written directory.
        status: what the check must say.
        text: what its message must contain.
        follow: other checks that may report because of the same fault.
    """

    family: str = "eagle3"
    config: dict[str, Any] = field(default_factory=dict)
    shape_config: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors], Any] | None = None
    files: Callable[[Path], Any] | None = None
    status: str = "failed"
    text: str = ""
    follow: tuple[str, ...] = ()


def _drop(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def _put(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = make(tensors)

    return edit


def _prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        if name != "lm_head.weight":
            tensors[f"model.{name}"] = tensors.pop(name)


def _first_rows(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in names:
            tensors[name] = tensors[name][: len(tensors[name]) // 2]

    return edit


def _nan(tensors: Tensors) -> None:
    tensors["fc.weight"][3, 5] = float("nan")


def _append_byte(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def _name_absent_shard(path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _huge(tensors: Tensors) -> None:
    tensors["layers.0.mlp.down_proj.weight"].fill_(3e38)


K1, V1 = "layers.1.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight"
UNREAD = ("files.readable", "files.index")
BLOCK = {"mask_token_id": 511, "target_layer_ids": [1, 9, 17], "block_size": 8}
STACK = ("weights.shapes", "layers.build", "config.head-arithmetic")

ROWS: dict[str, Row] = {
    "files.readable": Row(files=_append_byte, text="bytes after the last tensor"),
    "files.index": Row(files=_name_absent_shard, text="is not in the directory"),
    "files.pickle": Row(files=lambda path: torch.save({}, path / "old.bin"), status="warned"),
    "files.code": Row(config={"auto_map": {"AutoModel": "x.Y"}}, status="warned", text="not followed"),
    "config.family": Row(config={"architectures": ["DFlashDraftModel"]}, text="more than one", follow=("*",)),
    "config.types": Row(config={"rms_norm_eps": "small"}, text="'small' where a number"),
    "config.architectures": Row(config={"architectures": ["LlamaForCausalLM"]}, status="warned"),
    "config.num-hidden-layers": Row(
        family="dflash",
        config={"num_hidden_layers": 3},
        text="the weights hold 2",
        follow=("weights.missing", "layers.build"),
    ),
    "config.head-arithmetic": Row(
        config={"num_key_value_heads": 3}, text="do not divide", follow=("weights.shapes", "layers.build")
    ),
    "config.q-lora-rank": Row(
        family="eagle3-mla",
        config={"q_lora_rank": None},
        text="Eagle3 MLA layer requires q_lora_rank in the draft config",
        follow=("layers.build",),
    ),
    "config.mla-fields": Row(family="eagle3-mla", config={"v_head_dim": ...}, follow=("layers.build",)),
    "vocabulary.sizes": Row(
        config={"draft_vocab_size": 600}, text="larger than", follow=("vocabulary.lm-head", "vocabulary.d2t")
    ),
    "vocabulary.tied-embeddings": Row(config={"tie_word_embeddings": True}, text="tied"),
    "vocabulary.lm-head": Row(tensors=_drop("lm_head.weight"), text="not in the weights"),
    "vocabulary.d2t": Row(
        tensors=_put("d2t", lambda found: found["d2t"] + torch.arange(len(found["d2t"]))),
        text="target ids where offsets are due",
        follow=("vocabulary.t2d",),
    ),
    "vocabulary.t2d": Row(tensors=_put("t2d", lambda found: found["t2d"].roll(1)), text="t2d marks 256 ids"),
    "weights.missing": Row(tensors=_drop("layers.0.hidden_norm.weight"), text="hidden_norm", follow=("layers.build",)),
    "weights.unexpected": Row(tensors=_put("input_norm.weight", lambda found: torch.ones(192)), text="input_norm"),
    "weights.shapes": Row(config={"intermediate_size": 96}, text="gate_proj", follow=("layers.build",)),
    "weights.biases": Row(
        tensors=_put("layers.0.self_attn.q_proj.bias", lambda found: torch.zeros(128).bfloat16()),
        text="without a flag",
        follow=("layers.build",),
    ),
    "weights.names": Row(
        family="eagle3-mla",
        tensors=_prefix,
        text="names start with `model.`",
    ),
    "weights.dtypes": Row(
        tensors=_put("norm.weight", lambda found: found["norm.weight"].float()), status="warned", text="2 dtypes"
    ),
    "weights.finite": Row(tensors=_nan, text="fc.weight holds 1 values"),
    "weights.degenerate": Row(
        tensors=_put("fc.weight", lambda found: torch.zeros_like(found["fc.weight"])), text="all zero"
    ),
    "taps.stated": Row(
        family="dflash",
        config={"dflash_config": {"mask_token_id": 511, "block_size": 8}},
        text="not stated",
    ),
    "taps.order": Row(
        family="dflash",
        config={"dflash_config": {**BLOCK, "target_layer_ids": [9, 1, 17]}},
        status="warned",
        text="order",
    ),
    "taps.range": Row(
        family="dflash", config={"dflash_config": {**BLOCK, "target_layer_ids": [1, 9, 20]}}, text="20 is no outputs of"
    ),
    "taps.places": Row(config={"eagle_aux_hidden_state_layer_ids": [2, 8, 14]}, text="different values"),
    "taps.fc-width": Row(
        config={"eagle_aux_hidden_state_layer_ids": [2, 8], "eagle_config": ..., "num_aux_hidden_states": 2},
        text="fc reads 192 features; 2 taps of 64 give 128",
        follow=("taps.places", "layers.build"),
    ),
    "rope.theta-stated": Row(config={"rope_theta": ...}, text="not stated", follow=("layers.build",)),
    "rope.theta-agrees": Row(
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, text="different values"
    ),
    "dflash.mask-token": Row(
        family="dflash", config={"dflash_config": {**BLOCK, "mask_token_id": 512}}, text="outside an embedding of 512"
    ),
    "dflash.block-size": Row(family="dflash", config={"block_size": 16}, text="different values"),
    "layers.build": Row(config={"hidden_act": "selu"}, text="unknown activation 'selu'"),
    "layers.finite": Row(tensors=_huge, follow=("weights.degenerate",)),
    "fused-kv.num-kv-heads": Row(
        family="dflash",
        tensors=_first_rows(K1, V1),
        text="num_kv_heads mismatch across layers for fused KV path: expected 2, got 1 at layer 1.",
        follow=STACK,
    ),
}


#: Checks whose fault no checkpoint of ours can hold, with the place that shows them failing.
ELSEWHERE = {
    "layers.incremental": "test_numeric_checks.py",
    "layers.mla-absorbed": "test_numeric_checks.py",
    "fused-kv.matches-reference": "test_numeric_checks.py",
    "fused-kv.norm-eps": "test_fused_kv_axes.py",
    **{f"fused-kv.{axis}": "test_fused_kv_axes.py" for axis in AXES},
}


def test_every_check_has_a_row() -> None:
    """A check without a row here, or a named place elsewhere, is not shown to work."""
    assert set(REGISTRY) == set(ROWS) | set(ELSEWHERE)


@pytest.mark.parametrize("id", ROWS)
def test_the_fault_is_reported(id: str, tmp_path: Path) -> None:
    """The check says what the row says, and no check fails that does not follow from the fault."""
    row = ROWS[id]
    report = check_draft(_write(row, tmp_path / "draft"))
    result = report[id]
    assert result.status == row.status, result
    assert row.text in result.message
    assert result.findings[0].where
    _no_others(report, {id, *row.follow})


@pytest.mark.parametrize("id", ROWS)
def test_the_twin_passes(id: str, tmp_path: Path) -> None:
    """The same draft without the fault."""
    row = ROWS[id]
    whole = testing.tiny_config(row.family, **row.shape_config)
    report = check_draft(testing.write_tiny(tmp_path / "draft", row.family, config=whole))
    assert report[id].status == "passed", report[id]
    assert report.ok


def _write(row: Row, path: Path) -> Path:
    whole = testing.tiny_config(row.family, **row.shape_config)
    tensors = testing.random_tensors(whole, row.family)
    if row.tensors is not None:
        row.tensors(tensors)
    testing.write_checkpoint(path, testing.tiny_config(row.family, **{**row.shape_config, **row.config}), tensors)
    if row.files is not None:
        row.files(path)
    return path


def _no_others(report: Report, allowed: set[str]) -> None:
    if "*" in allowed:
        return
    others = [result for result in report if result.status in ("failed", "warned") and result.id not in allowed]
    assert not others, [_line(result) for result in others]


def _line(result: CheckResult) -> str:
    return f"{result.id}: {result.message}"
