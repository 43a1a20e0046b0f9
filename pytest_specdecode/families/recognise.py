"""Which family a checkpoint is, decided on its configuration and tensors, never on its folder's name.

Every family states the signals that speak for it. Names that a file gives itself (architecture, speculators type, projector type)
outrank the tensors' names and shapes, and those outrank configuration keys. Where signals of the highest kind present disagree, no
family is chosen; where a lower kind contradicts the choice, the choice stands and the contradiction is kept for a finding. A file
whose every size is null, with no weights beside it, is an exporter's template and of no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families.base import ConfigView, Family, Signal, SignalKind, open_view

#: From the signals that settle a family to those that only suggest one.
KINDS: tuple[SignalKind, ...] = ("label", "tensors", "keys")


@dataclass(frozen=True, kw_only=True)
class Recognition:
    """What recognition found.

    Attributes:
        family: the name of the family, or None where none or several are named.
        signals: all evidence, strongest first.
        disagreement: the families that the evidence names, where that is more than one.
        is_template: every size in the configuration is null and there are no weights: a template, not a configuration.
    """

    family: str | None
    signals: tuple[Signal, ...]
    disagreement: tuple[str, ...] = ()
    is_template: bool = False

    def evidence(self) -> dict[str, list[str]]:
        """Per family, the signals that speak for it, as text."""
        found: dict[str, list[str]] = {}
        for signal in self.signals:
            found.setdefault(signal.family, []).append(f"{signal.where} = {signal.value!r}")
        return found


def recognise(checkpoint: Checkpoint, families: Sequence[Family]) -> Recognition:
    """The family of `checkpoint`, among `families`."""
    signals = [
        _on_disk(signal, view)
        for view, family in ((open_view(checkpoint, family), family) for family in families)
        for signal in family.signals(view)
    ]
    read = {family.name for family in families}
    claimed = {signal.where for signal in signals if signal.kind == "label"}
    signals += [
        signal
        for signal in _unknown_names(open_view(checkpoint))
        if signal.family not in read and signal.where not in claimed
    ]
    signals.sort(key=lambda signal: KINDS.index(signal.kind))
    named = _named(signals)
    if _is_template(open_view(checkpoint)):
        return Recognition(family=None, signals=tuple(signals), is_template=True)
    strongest = next((named[kind] for kind in KINDS if named[kind]), [])
    # Keys alone never contradict a name or the tensors: configurations copied from elsewhere carry foreign keys.
    telling = sorted({*named["label"], *named["tensors"]}) or sorted(named["keys"])
    return Recognition(
        family=strongest[0] if len(strongest) == 1 else None,
        signals=tuple(signals),
        disagreement=tuple(telling) if len(telling) > 1 else (),
    )


def _on_disk(signal: Signal, view: ConfigView) -> Signal:
    """The signal with the name of its tensor as the file has it."""
    header = view.tensors.get(signal.where) if signal.kind == "tensors" else None
    return signal if header is None else replace(signal, where=header.name)


def _is_template(view: ConfigView) -> bool:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return not view.tensors and all(key in view.layer and view.layer.raw(key) is None for key in sizes)


def _named(signals: Sequence[Signal]) -> dict[SignalKind, list[str]]:
    return {kind: sorted({signal.family for signal in signals if signal.kind == kind}) for kind in KINDS}


def _unknown_names(view: ConfigView) -> list[Signal]:
    """What the file calls itself where every file of that form does; a name that no family claims is a family that is not read."""
    nested = view.root.section("dflash_config")
    projector = nested.text("projector_type")
    named = {
        "speculators_model_type": view.root.text("speculators_model_type"),
        nested.path("projector_type"): None if projector == "dflash" else projector,
    }
    return [Signal(family=value, kind="label", where=where, value=value) for where, value in named.items() if value]
