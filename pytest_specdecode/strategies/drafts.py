"""What a draft is, drawn: its `config.json`, and the spec that this library reads from it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.spec import DraftSpec
from pytest_specdecode.strategies.arguments import ValueOr, argument, choice, fixed
from pytest_specdecode.strategies.forms import FORMS, Config, Form, Picks, drawn, picks
from pytest_specdecode.testing import expected_tensors

#: Every family that is read, and every packaging that one of them has.
FAMILY_NAMES: tuple[str, ...] = tuple(dict.fromkeys(form.family for form in FORMS))
PACKAGINGS: tuple[str, ...] = ("plain", "speculators", "embedded")


def draft_configs(
    *, family: ValueOr[str] | None = None, packaging: ValueOr[str] | None = None
) -> SearchStrategy[dict[str, Any]]:
    """Configurations of drafts, as `config.json` holds them: plain dictionaries, with the keys that published files of that form have.

    An example, as printed:

        {'architectures': ['MedusaModel'], 'model_type': 'medusa', 'hidden_size': 24, 'vocab_size': 64, 'truncated_vocab_size': 16,
        'num_heads': 3, 'num_hidden_layers': 1, 'medusa_fc_bias': True, 'torch_dtype': 'bfloat16'}

    Guarantee: written as `config.json`, such a dictionary opens as `family` in `packaging`, and no check of the configuration fails or
    warns. Weights for it are small: hidden sizes to 72, vocabularies to 128, at most three layers.

    Requirement: arguments that are strategies must not draw a family that is not published in the packaging.

    Shrinks towards the first family in the order of the documentation, its usual form, one layer, and the first of the values that are
    drawn for a key, which are the plainest.

    Args:
        family: a family's name, such as `eagle3`; drawn: any.
        packaging: `plain`, `speculators`, or `embedded` for a draft inside its target; drawn: any that the family has, `plain` first.

    Raises:
        InvalidArgument: an argument is no such value, or the family is not published so; from a draw where an argument is a strategy.

    See also: `checkpoints`, which writes weights beside it; `mutated_configs` for those that must be reported.
    """
    return _configs(draft_forms(family, packaging))


def draft_specs(
    *, family: ValueOr[str] | None = None, packaging: ValueOr[str] | None = None
) -> SearchStrategy[DraftSpec]:
    """What drafts are, whatever their packaging: the specs of the configurations that `draft_configs` draws.

    An example, as printed, without the fields that have their default:

        DraftSpec(family='mlp-speculator', packaging='plain', architectures=('MLPSpeculatorPreTrainedModel',), model_type='mlp_speculator',
        hidden_size=24, target_hidden_size=24, num_hidden_layers=1, layer_key='n_predict', layers=(LayerSpec(index=0, hidden_act='gelu'),),
        vocabulary=VocabularySpec(vocab_size=64), taps=TapsSpec(required=False), dtype='bfloat16',
        options=MLPSpeculatorOptions(inner_dim=16, tie_weights=False, scale_input=True, n_predict=1, top_k_tokens_per_head=(4,)))

    Guarantee: the family's parser gives this spec for some configuration that no check fails, with every extent known that a
    required tensor's shape needs, so that the family's data sheet lists the tensors with their shapes.

    Requirement: as for `draft_configs`.

    Shrinks as `draft_configs`.

    Args:
        family, packaging: as for `draft_configs`.

    Raises:
        InvalidArgument: as `draft_configs`.

    See also: `draft_configs`.
    """
    return _specs(draft_forms(family, packaging))


def draft_forms(family: ValueOr[str] | None, packaging: ValueOr[str] | None) -> SearchStrategy[tuple[Form, Picks]]:
    """A form that the two arguments leave, and what its values are picked from."""
    _left(fixed(family), fixed(packaging))
    return _forms(
        argument("family", family, st.none(), choice(FAMILY_NAMES)),
        argument("packaging", packaging, st.none(), choice(PACKAGINGS)),
    )


@st.composite
def _forms(
    draw: DrawFn, family: SearchStrategy[str | None], packaging: SearchStrategy[str | None]
) -> tuple[Form, Picks]:
    left = _left(draw(family), draw(packaging))
    # First the family, so that those with many forms are not drawn more often.
    pick = draw(picks())
    name = pick(list(dict.fromkeys(form.family for form in left)))
    return pick([form for form in left if form.family == name]), pick


def _left(family: str | None, packaging: str | None) -> list[Form]:
    """The forms that are left; a value that is no such word is for the arguments' own checks."""
    if family not in (None, *FAMILY_NAMES) or packaging not in (None, *PACKAGINGS):
        return []
    of_family = [form for form in FORMS if family in (None, form.family)]
    left = [form for form in of_family if packaging in (None, form.packaging)]
    if not left:
        known = ", ".join(dict.fromkeys(repr(form.packaging) for form in of_family))
        raise InvalidArgument(f"packaging={packaging!r}: a draft of the family {family} is written as {known}")
    return left


# Composites and no maps: of a map, a failing example would print what it is made from.


@st.composite
def _configs(draw: DrawFn, forms: SearchStrategy[tuple[Form, Picks]]) -> Config:
    return config_of(draw(forms))


@st.composite
def _specs(draw: DrawFn, forms: SearchStrategy[tuple[Form, Picks]]) -> DraftSpec:
    form, pick = draw(forms)
    return expected_tensors(config_of((form, pick)), form.family)[0]


def config_of(chosen: tuple[Form, Picks]) -> Config:
    """The configuration of a form and its picks."""
    form, pick = chosen
    return drawn(pick, form, {})
