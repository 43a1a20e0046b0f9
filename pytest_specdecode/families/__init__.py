"""The draft architectures that are in public use, one module each, and the way from a directory to a `Draft`."""

from __future__ import annotations

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families.base import ExpectedTensor, Family, ReferenceLayer, Signal, open_view
from pytest_specdecode.families.dflash import DFlash
from pytest_specdecode.families.draft import Binding, Draft
from pytest_specdecode.families.eagle3 import Eagle3
from pytest_specdecode.families.eagle3_mla import Eagle3MLA
from pytest_specdecode.families.recognise import Recognition, recognise

__all__ = [
    "FAMILIES",
    "Binding",
    "Draft",
    "ExpectedTensor",
    "Family",
    "Recognition",
    "ReferenceLayer",
    "Signal",
    "load",
]

#: Every family that is read, in the order of the documentation.
FAMILIES: tuple[Family, ...] = (Eagle3(), Eagle3MLA(), DFlash())


def load(checkpoint: Checkpoint) -> Draft:
    """`checkpoint` with its family, spec and bound tensors; where the family is not known, those are None."""
    recognition = recognise(checkpoint, FAMILIES)
    family = next((family for family in FAMILIES if family.name == recognition.family), None)
    if family is None:
        return Draft(checkpoint, recognition, None, None, ())
    root = open_view(checkpoint).root
    if not all(family.owns(name, root) for name in checkpoint.tensors):
        checkpoint.narrow(lambda name: family.owns(name, root))
    view = open_view(checkpoint, family)
    spec = family.parse(view)
    return Draft(checkpoint, recognition, family, spec, tuple(view.root.faults.values()))
