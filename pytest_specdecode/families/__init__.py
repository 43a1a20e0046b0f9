"""The draft architectures that are in public use, one module each, and the way from a directory to a `Draft`."""

from __future__ import annotations

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.families.base import ExpectedTensor, Family, ReferenceLayer, Signal, open_view
from pytest_specdecode.families.dflare import DFlare
from pytest_specdecode.families.dflash import DFlash
from pytest_specdecode.families.dflash2 import DFlash2
from pytest_specdecode.families.domino import Domino
from pytest_specdecode.families.draft import Binding, Draft
from pytest_specdecode.families.dspark import DSpark
from pytest_specdecode.families.eagle1 import Eagle1
from pytest_specdecode.families.eagle3 import Eagle3
from pytest_specdecode.families.eagle3_mla import Eagle3MLA
from pytest_specdecode.families.eagle4 import Eagle4
from pytest_specdecode.families.gemma4_assistant import Gemma4Assistant
from pytest_specdecode.families.hydra import Hydra
from pytest_specdecode.families.known_keys import is_read
from pytest_specdecode.families.medusa import Medusa
from pytest_specdecode.families.mlp_speculator import MLPSpeculator
from pytest_specdecode.families.mtp import MTP
from pytest_specdecode.families.peagle import PEagle
from pytest_specdecode.families.recognise import Recognition, recognise
from pytest_specdecode.families.xpress import XPress

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
FAMILIES: tuple[Family, ...] = (
    Eagle1(),
    Eagle3(),
    Eagle3MLA(),
    PEagle(),
    Eagle4(),
    DFlash(),
    DFlash2(),
    Domino(),
    DFlare(),
    DSpark(),
    XPress(),
    MTP(),
    Gemma4Assistant(),
    Medusa(),
    Hydra(),
    MLPSpeculator(),
)


def load(checkpoint: Checkpoint) -> Draft:
    """`checkpoint` with its family, spec and bound tensors; where the family is not known, those are None.

    A draft's own configuration that holds a duplicate key or a non-finite number is refused where a key that is read is touched; a
    target's, which holds what others wrote, is not.
    """
    draft = _loaded(checkpoint)
    refused = next((fault for fault in checkpoint.config_oddities if is_read(fault.key or "")), None)
    if refused is None or (draft.spec is not None and draft.spec.packaging == "embedded"):
        return draft
    checkpoint.refuse_config(CheckpointError(refused.message, path=refused.path, key=refused.key, got=refused.got))
    return _loaded(checkpoint)


def _loaded(checkpoint: Checkpoint) -> Draft:
    recognition = recognise(checkpoint, FAMILIES)
    family = next((family for family in FAMILIES if family.name == recognition.family), None)
    if family is None:
        return Draft(checkpoint, recognition, None, None, ())
    root = open_view(checkpoint).root
    # The index names what lies in shards that are not here, too.
    if not all(family.owns(name, root) for name in (*checkpoint.tensors, *checkpoint.weight_map)):
        checkpoint.narrow(lambda name: family.owns(name, root))
    view = open_view(checkpoint, family)
    spec = family.parse(view)
    return Draft(checkpoint, recognition, family, spec, tuple(view.root.faults.values()))
