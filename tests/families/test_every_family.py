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

FAMILY = {family.name: family for family in FAMILIES}
NAMES = list(FAMILY)


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
    assert len(FAMILY) == len(FAMILIES)


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
    """Passed, or skipped with a reason; nothing stays open but what asks for a target, serving options or a trace."""
    report = check_draft(testing.write_tiny(tmp_path / "draft", name))
    open_ones = [result for result in report if result.status not in ("passed", "skipped") and not result.want]
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
    named = testing.stored_names(FAMILY[family].tiny, family)(tensor)
    said = [
        finding
        for result in report
        if result.status == "failed"
        for finding in result.findings
        if named in f"{finding.message} {finding.where} {finding.due}"
    ]
    assert said, str(report)


@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_draft_lies_where_the_family_s_drafts_lie(name: str, tmp_path: Path) -> None:
    """What is written is what is read back, and every name that is owned on disk is one tensor."""
    family = FAMILY[name]
    draft = open_draft(testing.write_tiny(tmp_path, name))
    assert draft.binding is not None
    rename = testing.stored_names(family.tiny, name)
    assert {canonical: rename(canonical) for canonical in draft.binding.stored} == dict(draft.binding.stored)
    assert all(draft.stored_name(canonical) == stored for canonical, stored in draft.binding.stored.items())
    assert draft.binding.twice == ()
