"""Every family, generically: its tiny draft passes everything, and each tensor it calls for is missed by name.

What goes wrong without this file: a family whose data sheet demands a tensor that no check looks for, a tiny draft that nobody opened
since it was written, a family that is read by one module and claimed by two.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.families import FAMILIES

NAMES = [family.name for family in FAMILIES]


def _group(name: str) -> str:
    """The name with every number replaced, so that the same tensor of all layers is one group."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _cases() -> list[tuple[str, str]]:
    found = []
    for family in FAMILIES:
        _, tensors = testing.expected_tensors(family.tiny, family.name)
        groups = {_group(tensor.name): tensor.name for tensor in tensors if tensor.need == "required"}
        found += [(family.name, name) for name in groups.values()]
    return found


def test_names_are_unique() -> None:
    """Reports and selections use them."""
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_draft_opens_as_its_family(name: str, tmp_path: Path) -> None:
    """Whatever its folder is called, with no other family's signals of the same weight."""
    draft = open_draft(testing.write_tiny(tmp_path / "medusa-eagle3-dflash", name))
    assert draft.family is not None
    assert draft.family.name == name
    assert draft.recognition.disagreement == ()
    assert draft.binding is not None
    assert draft.binding.unexpected == ()
    assert draft.binding.missing == ()


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_draft_passes_every_check(name: str, tmp_path: Path) -> None:
    """Passed, or skipped with a reason; nothing stays open but what asks for a target."""
    report = check_draft(testing.write_tiny(tmp_path / "draft", name))
    open_ones = [result for result in report if result.status not in ("passed", "skipped")]
    assert not open_ones, [f"{result.id}: {result.status}: {result.message}" for result in open_ones]
    assert all(result.message for result in report if result.status == "skipped")


@pytest.mark.parametrize(("family", "tensor"), _cases())
def test_a_missing_tensor_is_named(family: str, tensor: str, tmp_path: Path) -> None:
    """Each group of tensors, dropped from the file, makes some check fail that names it."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[tensor]

    path = testing.write_tiny(tmp_path / "draft", family, edit=drop)
    report = check_draft(
        path, checks=["weights", "vocabulary", "config", "taps"], skip=["weights.finite", "weights.degenerate"]
    )
    said = [
        finding
        for result in report
        if result.status == "failed"
        for finding in result.findings
        if tensor in f"{finding.message} {finding.where} {finding.due}"
    ]
    assert said, str(report)
