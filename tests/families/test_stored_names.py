"""What a finding says of a tensor is what a person finds in the file, in every family and packaging.

What goes wrong without this file: a finding that names `layers.0.mlp.up_proj.weight` where the target's file holds
`model.layers.61.mlp.up_proj.weight`, or `fc.weight` where all names start with `model.`; a missing tensor that is asked for under a name
which nobody would write beside the others; a layer that goes by another number than in the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packagings import PACKAGINGS, Packaging, Tensors

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.report import Report
from pytest_specdecode.testing import random_tensors, stored_names, tiny_config, write_checkpoint

#: A dotted name that ends as tensors' names do.
_TENSOR = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*\.(?:weight|bias|e_score_correction_bias)\b")
#: Names that a fix or a meaning may give in general.
_GENERAL = {"q_a_proj.weight", "kv_a_proj_with_mqa.weight"}


def _write(path: Path, case: Packaging, tensors: Tensors) -> Path:
    return write_checkpoint(path, case.whole, tensors, rename=case.rename())


def _matrices(tensors: Tensors) -> list[str]:
    return [name for name, value in tensors.items() if value.ndim == 2 and value.is_floating_point()]


def _nan(tensors: Tensors, name: str) -> None:
    tensors[name][0, 0] = float("nan")


def _zero(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.zeros_like(tensors[name])


def _short(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1]


def _integers(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].to(torch.int64)


def _narrow(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def _wide(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].float()


def _bias(tensors: Tensors, name: str) -> None:
    tensors[f"{name.removesuffix('.weight')}.bias"] = torch.zeros(len(tensors[name])).bfloat16()


def _dropped(tensors: Tensors, name: str) -> None:
    del tensors[name]


#: What looks at tensors one by one, but for the numbers that layers give.
CHECKS = ("config", "vocabulary", "weights", "taps", "layers.build")
BREAKS: dict[str, Callable[[Tensors, str], None]] = {
    edit.__name__.strip("_"): edit for edit in (_nan, _zero, _short, _integers, _narrow, _wide, _bias, _dropped)
}


@pytest.mark.parametrize("case", PACKAGINGS, ids=lambda case: case.id)
def test_every_tensor_that_a_finding_names_is_in_the_file(tmp_path: Path, case: Packaging) -> None:
    """A tensor is broken in some of the ways, the next packaging's in others, each time another tensor."""
    whole = case.tensors()
    rename = case.rename()
    names = _matrices(whole)
    start = PACKAGINGS.index(case)
    ways = list(BREAKS.items())
    for position, (how, edit) in [(start + step, ways[(start + step) % len(ways)]) for step in (0, 2, 5)]:
        tensors = {name: value.clone() for name, value in whole.items()}
        # Without its joined projection a layer is one whose projections are apart.
        alone = f"{_alone(case)}|qkv_proj" if how == "dropped" else "(?!)"
        near = [name for name in names if not re.search(alone, name)]
        broken = near[(position * 5 + 2) % len(near)]
        edit(tensors, broken)
        report = check_draft(_write(tmp_path / how, case, tensors), checks=CHECKS)
        real = {rename(name) for name in {*whole, *tensors}} | _GENERAL
        if case.id == "eagle3-mla-prefixed":
            # What weights.names asks for.
            real |= {name.removeprefix("model.") for name in real}
        strange = {name for name in _named(report) if name not in real and name.rpartition("_")[0] not in real}
        assert not strange, (how, broken, strange, str(report))
        if how not in ("wide", "bias"):
            assert any(rename(broken) in text for text in _texts(report)), (how, rename(broken), str(report))


@pytest.mark.parametrize("case", PACKAGINGS, ids=lambda case: case.id)
def test_a_missing_tensor_goes_by_the_name_that_its_neighbours_would_give_it(tmp_path: Path, case: Packaging) -> None:
    """Each tensor in turn is forgotten; the name that is asked for is the one that was written."""
    draft = open_draft(_write(tmp_path, case, case.tensors()))
    assert draft.binding is not None
    assert draft.family is not None
    stored: Any = draft.binding.stored
    alone = _alone(case)
    for name, written in list(stored.items()):
        assert draft.stored_name(name) == written
        del stored[name]
        draft.memo.clear()
        if not re.search(alone, name):
            assert draft.stored_name(name) == written, (name, written)
        stored[name] = written


def _alone(case: Packaging) -> str:
    """Pattern of tensors whose spelling nothing beside them shows."""
    return {
        "mistral": r"fc\.|embed_tokens|layernorm|mlp",
        "encoder": r"fc\.|hidden_norm",
        "codebook-weights": "codebook",
        "mtp-block": r"layernorm|hnorm|enorm|eh_proj|shared_head",
        "modelopt": "confidence",
    }.get(case.what, "(?!)")


def test_a_layer_goes_by_the_number_that_it_has_in_the_file(tmp_path: Path) -> None:
    cases = {case.id: case for case in PACKAGINGS}
    for id, number in {"mtp-tiny": 3, "mtp-nested": 3, "mtp-cut-out": 0, "mtp-qwen": 0, "eagle3-midlayer": 0}.items():
        case = cases[id]
        assert open_draft(_write(tmp_path / id, case, case.tensors())).stored_layer(0) == number
    tensors = cases["mtp-tiny"].tensors()
    tensors["layers.0.mlp.experts.0.down_proj.weight"].fill_(3e38)
    report = check_draft(_write(tmp_path / "huge", cases["mtp-tiny"], tensors), checks=["layers"])
    assert report["layers.finite"].findings[0].where == "layers 3"


def test_evidence_names_a_tensor_as_the_file_does(tmp_path: Path) -> None:
    """A label that the tensors contradict: the finding shows both."""
    rename = stored_names(tiny_config("mtp"), "mtp")
    config = {**tiny_config("mtp"), "architectures": ["DFlashDraftModel"]}
    path = write_checkpoint(tmp_path, config, random_tensors(tiny_config("mtp"), "mtp"), rename=rename)
    (finding,) = check_draft(path, checks=["config.family"])["config.family"].findings
    assert any("model.layers.3.eh_proj.weight" in text for text in finding.got["mtp"])


def _texts(report: Report) -> Iterator[str]:
    for result in report:
        yield result.message
        for finding in result.findings:
            yield " ".join(
                str(item) for item in (finding.message, finding.where, finding.got, finding.due, finding.fix)
            )


def _named(report: Report) -> set[str]:
    return {match[0] for text in _texts(report) for match in _TENSOR.finditer(text)}
