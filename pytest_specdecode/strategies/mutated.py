"""Configurations with one fault that was drawn, and the check that must report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.strategies.arguments import ValueOr, argument, choice, fixed
from pytest_specdecode.strategies.drafts import FAMILY_NAMES, PACKAGINGS
from pytest_specdecode.strategies.faults import FAULTS, Change, Reported, value_at
from pytest_specdecode.strategies.forms import Form, drawn, picks

#: A multiple of the numbers of changes that faults have.
_MOST_CHANGES = 120

#: The checks that a drawn fault may trip, in the order in which faults shrink.
FAULTY_CHECKS: tuple[str, ...] = tuple(FAULTS)


@dataclass(frozen=True, kw_only=True)
class MutatedConfig:
    """A configuration with one fault.

    Attributes:
        family: of the sound configuration that it was.
        check: id of the check that must report it.
        status: how that check ends: `failed` or `warned`.
        key: dotted path of the one key that was changed.
        got: what stands there now; `...` where the key was taken out.
        due: what stood there; `...` where the key was put in.
        config: the faulty configuration.
    """

    family: str
    check: str
    status: Reported
    key: str
    got: Any
    due: Any
    config: Mapping[str, Any]

    @property
    def sound(self) -> dict[str, Any]:
        """The configuration without the fault."""
        return Change(key=self.key, value=self.due).made(self.config)


def mutated_configs(
    *,
    check: ValueOr[str] | None = None,
    family: ValueOr[str] | None = None,
    packaging: ValueOr[str] | None = None,
) -> SearchStrategy[MutatedConfig]:
    """Configurations that differ from one that no check reports in exactly one key, so that one check must.

    An example, as printed:

        MutatedConfig(family='medusa', check='vocabulary.sizes', status='failed', key='truncated_vocab_size', got=65, due=16,
        config={'architectures': ['MedusaModel'], 'model_type': 'medusa', 'hidden_size': 24, 'vocab_size': 64, 'truncated_vocab_size': 65,
        'num_heads': 3, 'num_hidden_layers': 1, 'medusa_fc_bias': True, 'torch_dtype': 'bfloat16'})

    Guarantee: written as `config.json` without weights, `config` makes the check `check` end with `status`; other checks may report what
    follows from it. `sound` is one of `draft_configs`, in which that check reports nothing.

    Requirement: arguments that are strategies must not draw a family or packaging that has no room for the fault.

    Shrinks towards the first check of `FAULTY_CHECKS`, then the first form that has room for it, then as `draft_configs`, then the plainest
    change.

    Args:
        check: id of the check to trip, one of `FAULTY_CHECKS`; drawn: any for which the other arguments leave room.
        family, packaging: as for `draft_configs`.

    Raises:
        InvalidArgument: an argument is no such value, or two leave no room for the fault; from a draw where an argument is a strategy.

    See also: `draft_configs` for those that no check reports; `heterogeneous_stacks` for faults between layers.
    """
    _room(fixed(check), fixed(family), fixed(packaging))
    return _mutated(
        check=argument("check", check, st.none(), choice(FAULTY_CHECKS)),
        family=argument("family", family, st.none(), choice(FAMILY_NAMES)),
        packaging=argument("packaging", packaging, st.none(), choice(PACKAGINGS)),
    )


@st.composite
def _mutated(
    draw: DrawFn,
    *,
    check: SearchStrategy[str | None],
    family: SearchStrategy[str | None],
    packaging: SearchStrategy[str | None],
) -> MutatedConfig:
    room = _room(draw(check), draw(family), draw(packaging))
    pick = draw(picks())
    id = pick(list(room))
    form = pick(room[id])
    # Before the configuration, whose number of picks is its form's own.
    place = pick(range(_MOST_CHANGES))
    sound = drawn(pick, form, FAULTS[id].wishes)
    changes = list(FAULTS[id].changes(sound))
    change = changes[place % len(changes)]
    return MutatedConfig(
        family=form.family,
        check=id,
        status=change.status,
        key=change.key,
        got=change.value,
        due=value_at(sound, change.key),
        config=change.made(sound),
    )


def _room(check: str | None, family: str | None, packaging: str | None) -> dict[str, list[Form]]:
    """The forms that are left for each check; a value that is no such word is for the arguments' own checks."""
    known = (None, *FAULTY_CHECKS), (None, *FAMILY_NAMES), (None, *PACKAGINGS)
    if any(value not in words for value, words in zip((check, family, packaging), known, strict=True)):
        return {}
    room = {
        id: [form for form in fault.forms if family in (None, form.family) and packaging in (None, form.packaging)]
        for id, fault in FAULTS.items()
        if check in (None, id)
    }
    room = {id: forms for id, forms in room.items() if forms}
    if not room:
        asked = {"check": check, "family": family, "packaging": packaging}
        shown = ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)
        raise InvalidArgument(f"{shown}: no configuration has room for such a fault")
    return room
