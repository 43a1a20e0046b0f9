"""The draft architectures that are in public use, one module each, and the way from a directory to a `Draft`."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_specdecode.checkpoint import Checkpoint, TensorHeader
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
    recognition = recognise(open_view(checkpoint, _canonical_headers(checkpoint)), FAMILIES)
    family = next((family for family in FAMILIES if family.name == recognition.family), None)
    if family is None:
        return Draft(checkpoint, recognition, None, None, ())
    headers = {family.canonical(name): header for name, header in checkpoint.tensors.items()}
    view = open_view(checkpoint, headers)
    spec = family.parse(view)
    return Draft(checkpoint, recognition, family, spec, tuple(view.root.faults.values()))


def _canonical_headers(checkpoint: Checkpoint) -> Mapping[str, TensorHeader]:
    """Headers by every name that some family gives them, for recognition."""
    return {
        canonical: header
        for family in FAMILIES
        for name, header in checkpoint.tensors.items()
        for canonical in (name, family.canonical(name))
    }
