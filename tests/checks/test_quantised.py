"""Drafts whose weights are stored quantised: every public form passes as it should be, and fails where a part of it is not there.

What goes wrong without this file: a packed weight counts as missing, its shorter rows as a wrong shape, its scales as tensors that no
engine reads; a float8 weight that lost its scale passes, as does one whose configuration does not say that it is quantised. Names, dtypes
and shapes are those that compressed-tensors, ModelOpt, GPTQ, AWQ, MLX, bitsandbytes and DeepSeek write, set down here by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families.quantised import Scheme, read_scheme
from pytest_specdecode.report import Report

FP8 = torch.float8_e4m3fn
#: The matrix whose parts the tests take away, one per family.
VICTIM = {
    "dflash": "layers.1.mlp.up_proj",
    "dspark": "layers.1.mlp.up_proj",
    "mtp": "layers.0.mlp.experts.1.up_proj",
}


#: What reads values, which no test but one is about.
NUMERIC = ("layers", "fused-kv.matches-reference", "weights.finite", "weights.degenerate")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to store a matrix.

    Attributes:
        config: what the configuration says beside the draft's own keys.
        parts: what is stored for a matrix of O rows and I columns, by the end of its name after the projection's.
        holder: the part that holds the numbers.
        due: parts without which it cannot be read, with the check that says so.
        short: shape of the holder where the matrix has half its rows.
        families: drafts that are written so; a form with blocks of its own for one engine's files is one family's.
    """

    config: dict[str, Any]
    parts: Callable[[int, int], dict[str, Tensor]]
    holder: str = ".weight"
    due: dict[str, str]
    short: Callable[[int, int], tuple[int, ...]] | None
    families: tuple[str, ...] = ("dflash", "dspark", "mtp")


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(math.prod(shape)).remainder(100).reshape(shape).to(dtype)


def _scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.arange(math.prod(shape)).remainder(7) / 7 + 0.5).reshape(shape).to(dtype)


def _numbers(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) / math.sqrt(columns)


def _compressed(format_: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": format_, "config_groups": groups}}


FORMS: dict[str, Form] = {
    "pack-quantized": Form(
        config=_compressed("pack-quantized", num_bits=4, group_size=32, symmetric=True),
        parts=lambda o, i: {
            ".weight_packed": _ints(o, i // 8),
            ".weight_scale": _scales(o, i // 32),
            ".weight_shape": torch.tensor([o, i]),
        },
        holder=".weight_packed",
        due={".weight_scale": "weights.missing", ".weight_shape": "weights.missing"},
        short=lambda o, i: (o // 2, i // 8),
    ),
    "pack-quantized, zero points": Form(
        config=_compressed("pack-quantized", num_bits=8, group_size=32, symmetric=False),
        parts=lambda o, i: {
            ".weight_packed": _ints(o, i // 4),
            ".weight_scale": _scales(o, i // 32),
            ".weight_zero_point": _ints(o // 4, i // 32),
            ".weight_shape": torch.tensor([o, i]),
            ".weight_g_idx": _ints(i),
        },
        holder=".weight_packed",
        due={".weight_zero_point": "weights.missing"},
        short=lambda o, i: (o, i // 8),
    ),
    "nvfp4-pack-quantized": Form(
        config=_compressed("nvfp4-pack-quantized", num_bits=4, group_size=16),
        parts=lambda o, i: {
            ".weight_packed": _ints(o, i // 2, dtype=torch.uint8),
            ".weight_scale": _scales(o, i // 16, dtype=FP8),
            ".weight_global_scale": torch.ones(1),
            ".input_global_scale": torch.ones(1),
        },
        holder=".weight_packed",
        due={".weight_scale": "weights.missing", ".weight_global_scale": "weights.missing"},
        short=lambda o, i: (o, i // 4),
    ),
    "float-quantized": Form(
        config=_compressed("float-quantized", num_bits=8),
        parts=lambda o, i: {".weight": _numbers(o, i).to(FP8), ".weight_scale": _scales(o, 1)},
        due={".weight_scale": "weights.dtypes"},
        short=lambda o, i: (o // 2, i),
    ),
    "int-quantized": Form(
        config=_compressed("int-quantized", num_bits=8),
        parts=lambda o, i: {".weight": _ints(o, i, dtype=torch.int8), ".weight_scale": _scales(o, 1)},
        due={".weight_scale": "weights.dtypes"},
        short=lambda o, i: (o, i // 2),
    ),
    "fp8 blocks": Form(
        config={"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
        parts=lambda o, i: {
            ".weight": _numbers(o, i).to(FP8),
            ".weight_scale_inv": _scales(-(-o // 128), -(-i // 128), dtype=torch.float32),
        },
        due={".weight_scale_inv": "weights.dtypes"},
        short=lambda o, i: (o // 2, i),
    ),
    "modelopt fp8": Form(
        config={"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        parts=lambda o, i: {
            ".weight": _numbers(o, i).to(FP8),
            ".weight_scale": torch.tensor(0.5),
            ".input_scale": torch.tensor(0.5),
        },
        due={".weight_scale": "weights.dtypes"},
        short=lambda o, i: (o // 2, i),
    ),
    "modelopt nvfp4": Form(
        config={"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}},
        parts=lambda o, i: {
            ".weight": _ints(o, i // 2, dtype=torch.uint8),
            ".weight_scale": _scales(o, i // 16, dtype=FP8),
            ".weight_scale_2": torch.tensor(0.5),
            ".input_scale": torch.tensor(0.5),
        },
        due={".weight_scale": "weights.missing", ".weight_scale_2": "weights.missing"},
        short=lambda o, i: (o, i // 4),
    ),
    "gptq": Form(
        config={"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        parts=lambda o, i: {
            ".qweight": _ints(i // 8, o),
            ".qzeros": _ints(i // 32, o // 8),
            ".scales": _scales(i // 32, o, dtype=torch.float16),
            ".g_idx": _ints(i),
        },
        holder=".qweight",
        due={".scales": "weights.missing", ".qzeros": "weights.missing"},
        short=lambda o, i: (i // 8, o // 2),
    ),
    "awq": Form(
        config={"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
        parts=lambda o, i: {
            ".qweight": _ints(i, o // 8),
            ".qzeros": _ints(i // 32, o // 8),
            ".scales": _scales(i // 32, o, dtype=torch.float16),
        },
        holder=".qweight",
        due={".scales": "weights.missing", ".qzeros": "weights.missing"},
        short=lambda o, i: (i // 2, o // 8),
    ),
    "mlx": Form(
        config={"quantization": {"bits": 4, "group_size": 32}, "quantization_config": {"bits": 4, "group_size": 32}},
        parts=lambda o, i: {
            ".weight": _ints(o, i // 8, dtype=torch.uint32),
            ".scales": _scales(o, i // 32),
            ".biases": _scales(o, i // 32),
        },
        due={".scales": "weights.missing", ".biases": "weights.missing"},
        short=lambda o, i: (o // 2, i // 8),
    ),
    "mlx mxfp4": Form(
        config={"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}},
        parts=lambda o, i: {
            ".weight": _ints(o, i // 8, dtype=torch.uint32),
            ".scales": _ints(o, i // 32, dtype=torch.uint8),
        },
        due={".scales": "weights.dtypes"},
        short=lambda o, i: (o // 2, i // 8),
        families=("dflash", "mtp"),
    ),
    "bitsandbytes nf4": Form(
        config={"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        parts=lambda o, i: {
            ".weight": _ints(o * i // 2, 1, dtype=torch.uint8),
            ".weight.absmax": _scales(o * i // 64, dtype=torch.float32),
            ".weight.quant_map": _scales(16, dtype=torch.float32),
            ".weight.quant_state.bitsandbytes__nf4": _ints(80, dtype=torch.uint8),
        },
        due={".weight.absmax": "weights.missing", ".weight.quant_map": "weights.missing"},
        short=None,
    ),
    "bitsandbytes int8": Form(
        config={"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        parts=lambda o, i: {
            ".weight": _ints(o, i, dtype=torch.int8),
            ".SCB": _scales(o, dtype=torch.float32),
            ".weight_format": torch.tensor(0, dtype=torch.uint8),
        },
        due={".SCB": "weights.dtypes"},
        short=lambda o, i: (o // 2, i),
    ),
}
CASES = [(form, family) for form, item in FORMS.items() for family in item.families]
HALVED = [(form, family, part) for form, family in CASES for part in FORMS[form].due]


def _is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight") and name.startswith("layers.") and ".eh_proj" not in name


def _quantised(form: str, family: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of the tiny draft of `family`, its projections stored as `form`."""
    plain = testing.random_tensors(testing.tiny_config(family), family)
    tensors: dict[str, Tensor] = {}
    for name, value in plain.items():
        if not _is_quantised(name):
            tensors[name] = value
            continue
        parts = FORMS[form].parts(*value.shape)
        tensors |= {f"{name.removesuffix('.weight')}{part}": held.contiguous() for part, held in parts.items()}
    return testing.tiny_config(family, **FORMS[form].config), tensors


def _on_disk(family: str) -> Callable[[str], str]:
    # A prediction layer lies behind its target's last; the tiny target has three.
    return (lambda name: name.replace("layers.0.", "model.layers.3.")) if family == "mtp" else (lambda name: name)


def _victim(family: str, part: str = ".weight") -> str:
    return _on_disk(family)(f"{VICTIM[family]}{part}")


def _checked(
    path: Path, family: str, config: dict[str, Any], tensors: dict[str, Tensor], skip: tuple[str, ...] = NUMERIC
) -> Report:
    testing.write_checkpoint(path, config, tensors, rename=_on_disk(family))
    return check_draft(path, skip=skip)


def _failed(report: Report) -> Iterator[str]:
    return (f"{result.id}: {result.message}" for result in report if result.status == "failed")


@pytest.mark.parametrize(("form", "family"), CASES)
def test_a_draft_that_is_stored_quantised_has_no_fault(tmp_path: Path, form: str, family: str) -> None:
    report = _checked(tmp_path, family, *_quantised(form, family), skip=())
    assert not list(_failed(report))
    for id in ("weights.missing", "weights.unexpected", "weights.shapes", "weights.dtypes", "config.head-arithmetic"):
        assert report[id].status == "passed", report[id]


@pytest.mark.parametrize(("form", "family"), CASES)
def test_a_quantised_weight_is_bound_and_its_plain_shape_is_known(tmp_path: Path, form: str, family: str) -> None:
    config, tensors = _quantised(form, family)
    draft = open_draft(testing.write_checkpoint(tmp_path, config, tensors, rename=_on_disk(family)))
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    name = f"{VICTIM[family]}.weight"
    header = draft.header(name)
    assert header is not None
    assert header.name == _victim(family, FORMS[form].holder)
    plain = testing.random_tensors(testing.tiny_config(family), family)[name]
    assert draft.shape(name) == (None if FORMS[form].short is None else tuple(plain.shape))


JOINED = [(form, family) for form, family in CASES if family != "mtp"]


def _joined(form: str, family: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same with q, k and v in one `qkv_proj`, joined before they are quantised."""
    config, tensors = _quantised(form, family)
    for layer in (0, 1):
        stem = f"layers.{layer}.self_attn"
        apart = tuple(f"{stem}.{name}_proj." for name in "qkv")
        tensors = {name: value for name, value in tensors.items() if not name.startswith(apart)}
        # Four query heads, and two each for keys and values, of 32 lanes over 64.
        parts = FORMS[form].parts(8 * 32, 64)
        tensors |= {f"{stem}.qkv_proj{part}": held.contiguous() for part, held in parts.items()}
    return config, tensors


@pytest.mark.parametrize(("form", "family"), JOINED)
def test_a_joined_projection_that_is_stored_quantised(tmp_path: Path, form: str, family: str) -> None:
    config, tensors = _joined(form, family)
    report = _checked(tmp_path, family, config, tensors, skip=())
    assert not list(_failed(report))
    for id in ("weights.missing", "weights.unexpected", "weights.shapes", "weights.dtypes", "config.head-arithmetic"):
        assert report[id].status == "passed", report[id]
    draft = open_draft(tmp_path)
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    assert draft.shape("layers.1.self_attn.qkv_proj.weight") == (None if FORMS[form].short is None else (256, 64))


@pytest.mark.parametrize(
    ("form", "family", "part"), [(form, family, part) for form, family in JOINED for part in FORMS[form].due]
)
def test_a_joined_projection_without_its_companion_is_named(tmp_path: Path, form: str, family: str, part: str) -> None:
    config, tensors = _joined(form, family)
    del tensors[f"layers.1.self_attn.qkv_proj{part}"]
    result = _checked(tmp_path, family, config, tensors)[FORMS[form].due[part]]
    assert result.status == "failed"
    assert "layers.1.self_attn.qkv_proj" in result.message


@pytest.mark.parametrize(("form", "family"), [case for case in JOINED if FORMS[case[0]].short is not None])
def test_a_joined_projection_of_another_size_is_named(tmp_path: Path, form: str, family: str) -> None:
    config, tensors = _joined(form, family)
    name, short = f"layers.1.self_attn.qkv_proj{FORMS[form].holder}", FORMS[form].short
    assert short is not None
    extents = short(256, 64)
    tensors[name] = tensors[name][: extents[0], : extents[1]].contiguous()
    report = _checked(tmp_path, family, config, tensors)
    assert report["weights.shapes"].status == "failed", list(_failed(report))
    assert "layers.1.self_attn.qkv_proj" in report["weights.shapes"].message


@pytest.mark.parametrize(("form", "family", "part"), HALVED)
def test_a_weight_without_its_companion_fails_and_is_named(tmp_path: Path, form: str, family: str, part: str) -> None:
    config, tensors = _quantised(form, family)
    del tensors[f"{VICTIM[family]}{part}"]
    report = _checked(tmp_path, family, config, tensors)
    result = report[FORMS[form].due[part]]
    assert result.status == "failed", list(_failed(report))
    assert _victim(family, part if result.id == "weights.missing" else ".weight") in result.message
    assert {line.partition(":")[0] for line in _failed(report)} == {result.id}


@pytest.mark.parametrize(("form", "family"), CASES)
def test_companions_without_their_weight_are_a_missing_weight(tmp_path: Path, form: str, family: str) -> None:
    config, tensors = _quantised(form, family)
    del tensors[f"{VICTIM[family]}{FORMS[form].holder}"]
    report = _checked(tmp_path, family, config, tensors)
    result = report["weights.missing"]
    assert result.status == "failed", list(_failed(report))
    assert f"{_victim(family)} is not in the weights" in result.message
    assert _victim(family, next(iter(FORMS[form].due))) in str(result.findings[0].got)
    assert report["weights.shapes"].status == "passed"


@pytest.mark.parametrize(("form", "family"), CASES)
def test_quantised_weights_that_the_configuration_does_not_announce_fail(
    tmp_path: Path, form: str, family: str
) -> None:
    _, tensors = _quantised(form, family)
    report = _checked(tmp_path, family, testing.tiny_config(family), tensors)
    first = next(name for name in testing.random_tensors(testing.tiny_config(family), family) if _is_quantised(name))
    result = report["weights.dtypes"]
    assert result.status == "failed", list(_failed(report))
    assert "no quantization_config" in result.message
    assert result.findings[0].where == _on_disk(family)(first.replace(".weight", FORMS[form].holder))


@pytest.mark.parametrize(("form", "family"), [case for case in CASES if FORMS[case[0]].short is not None])
def test_a_packed_weight_of_another_size_fails_and_is_named(tmp_path: Path, form: str, family: str) -> None:
    config, tensors = _quantised(form, family)
    shape = testing.random_tensors(testing.tiny_config(family), family)[f"{VICTIM[family]}.weight"].shape
    name, short = f"{VICTIM[family]}{FORMS[form].holder}", FORMS[form].short
    assert short is not None
    extents = short(*shape)
    tensors[name] = tensors[name][: extents[0], : extents[1]].contiguous()
    report = _checked(tmp_path, family, config, tensors)
    assert report["weights.shapes"].status == "failed", list(_failed(report))
    assert _victim(family, ".") in report["weights.shapes"].message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_narrow_weight_without_a_scale_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    """Nothing at all lies beside the weights."""
    config = testing.tiny_config("dflash", quantization_config={"quant_method": "fp8"})
    plain = testing.random_tensors(config, "dflash")
    tensors = {name: value.to(dtype) if _is_quantised(name) else value for name, value in plain.items()}
    for whole in (config, testing.tiny_config("dflash")):
        result = _checked(tmp_path, "dflash", whole, tensors)["weights.dtypes"]
        assert result.status == "failed"
        assert "without a scale; 13 more weights are" in result.message


def test_an_input_scale_is_no_scale_of_the_weight(tmp_path: Path) -> None:
    config, tensors = _quantised("modelopt fp8", "dflash")
    del tensors["layers.0.self_attn.k_proj.weight_scale"]
    assert _checked(tmp_path, "dflash", config, tensors)["weights.dtypes"].status == "failed"


def test_what_lies_beside_no_weight_of_the_draft_is_unexpected(tmp_path: Path) -> None:
    config, tensors = _quantised("modelopt fp8", "dflash")
    tensors["layers.9.mlp.up_proj.weight_scale"] = torch.tensor(1.0)
    tensors["layers.0.self_attn.attn.k_scale"] = torch.tensor(1.0)
    tensors["layers.0.self_attn.v_scale"] = torch.tensor(1.0)
    result = _checked(tmp_path, "dflash", config, tensors)["weights.unexpected"]
    assert (result.status, result.findings[0].got) == ("failed", ["layers.9.mlp.up_proj.weight_scale"])


def test_a_scale_beside_plain_weights_is_unexpected_unless_the_configuration_speaks_of_quantisation(
    tmp_path: Path,
) -> None:
    config = testing.tiny_config("dflash")
    name = "layers.0.mlp.up_proj.weight_scale"
    tensors = {**testing.random_tensors(config, "dflash"), name: torch.ones(1)}
    result = _checked(tmp_path / "plain", "dflash", config, tensors)["weights.unexpected"]
    assert (result.status, result.findings[0].got) == ("failed", [name])
    said = {**config, **FORMS["modelopt fp8"].config}
    assert _checked(tmp_path / "said", "dflash", said, tensors)["weights.unexpected"].status == "passed"


def test_a_weight_that_is_stored_plain_and_packed_is_one_too_many(tmp_path: Path) -> None:
    config, tensors = _quantised("pack-quantized", "dflash")
    name = f"{VICTIM['dflash']}.weight"
    tensors[name] = testing.random_tensors(testing.tiny_config("dflash"), "dflash")[name]
    result = _checked(tmp_path, "dflash", config, tensors)["weights.unexpected"]
    assert (result.status, result.findings[0].got) == ("failed", [f"{name}_packed"])


def test_weights_that_are_left_plain_are_no_fault(tmp_path: Path) -> None:
    """Exporters leave some projections out, and list them."""
    config, tensors = _quantised("pack-quantized", "dflash")
    config["quantization_config"]["ignore"] = [VICTIM["dflash"]]
    plain = testing.random_tensors(testing.tiny_config("dflash"), "dflash")
    for part in FORMS["pack-quantized"].parts(8, 32):
        del tensors[f"{VICTIM['dflash']}{part}"]
    tensors[f"{VICTIM['dflash']}.weight"] = plain[f"{VICTIM['dflash']}.weight"]
    assert not list(_failed(_checked(tmp_path, "dflash", config, tensors)))


def test_a_packed_head_and_a_packed_fc_are_held_against_their_plain_shapes(tmp_path: Path) -> None:
    config = testing.tiny_config("eagle3", **FORMS["mlx"].config)
    tensors = testing.random_tensors(testing.tiny_config("eagle3"), "eagle3")
    for stem in ("lm_head", "fc"):
        shape = tensors[f"{stem}.weight"].shape
        tensors |= {f"{stem}{part}": held for part, held in FORMS["mlx"].parts(*shape).items()}
    report = _checked(tmp_path / "right", "eagle3", config, tensors)
    assert not list(_failed(report))
    for stem in ("lm_head", "fc"):
        words = tensors[f"{stem}.weight"]
        wrong = {**tensors, f"{stem}.weight": words[:, : words.shape[1] // 2].contiguous()}
        report = _checked(tmp_path / stem, "eagle3", config, wrong)
        assert report["vocabulary.lm-head" if stem == "lm_head" else "taps.fc-width"].status == "failed"


def _scheme(path: Path, config: Any) -> Scheme:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return read_scheme(Checkpoint.open(path))


@pytest.mark.parametrize(
    ("config", "method", "bits"),
    [
        ({}, None, None),
        ({"quantization_config": None}, None, None),
        ({"quantization_config": {}}, None, None),
        ({"quantization_config": "fp8"}, None, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8", None),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            "compressed-tensors",
            None,
        ),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors", None),
        ({"quantization_config": {"quant_method": "gptq_marlin", "bits": 8}}, "gptq", 8),
        ({"quantization_config": {"quant_method": "awq", "w_bit": 4}}, "awq", 4),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "gptq", None),
        ({"quantization_config": {"quant_method": "gptq", "bits": -1}}, "gptq", None),
        ({"quantization_config": {"bits": 6, "group_size": 64}}, "mlx", 6),
        ({"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 64}}}, "mlx", None),
        ({"quantization": {"bits": 4, "group_size": 64, "lm_head": False}}, "mlx", 4),
        ({"text_config": {"quantization_config": {"quant_method": "modelopt"}}}, "modelopt", None),
        ({"transformer_layer_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8", None),
    ],
)
def test_the_scheme_is_read_wherever_it_stands(
    tmp_path: Path, config: Any, method: str | None, bits: int | None
) -> None:
    scheme = _scheme(tmp_path, config)
    assert (scheme.method, scheme.bits) == (method, bits)


def test_modelopts_own_file_says_that_weights_are_quantised(tmp_path: Path) -> None:
    for text, method in (('{"quantization": {"quant_algo": "FP8"}}', "modelopt"), ("{", None), ("{}", None)):
        (tmp_path / "hf_quant_config.json").write_text(text)
        assert _scheme(tmp_path, {}).method == method


def test_groups_of_different_widths_leave_the_columns_open(tmp_path: Path) -> None:
    groups = {str(bits): {"weights": {"num_bits": bits}} for bits in (4, 8)}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    assert _scheme(tmp_path, config).bits is None
    whole, tensors = _quantised("pack-quantized", "dflash")
    report = _checked(tmp_path / "draft", "dflash", {**whole, **config}, tensors)
    assert not list(_failed(report))
