"""Whole drafts for a directory: a configuration and weights for it, in any packaging, named as an exporter names them, sharded or not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_specdecode.spec import DraftSpec
from pytest_specdecode.strategies.arguments import ValueOr, argument, check_bounds, integer
from pytest_specdecode.strategies.drafts import config_of, draft_forms
from pytest_specdecode.strategies.forms import FORMS, Form, Picks
from pytest_specdecode.strategies.namings import JOINED, OWN, namings_of, renamed
from pytest_specdecode.strategies.tensors import SEEDS
from pytest_specdecode.testing import expected_tensors, random_tensors, stored_names, write_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

_FORM_FAMILY = {form.id: form.family for form in FORMS}


@dataclass(frozen=True, kw_only=True)
class DraftFiles:
    """A draft that can be written to a directory. Its tensors are filled when they are first asked for, once.

    Attributes:
        form: which of the published forms it has: family, packaging and what tells it from others of that packaging.
        config: what is written as `config.json`.
        naming: how its tensors are named: `own`, or another exporter's names.
        joined: whether q, k and v are one tensor.
        shards: in how many files the weights are written; more than one have an index.
        seed: of all numbers. They are as a sound draft has them: matrices normal, norms near one, a rising vocabulary map.
    """

    form: str
    config: Mapping[str, Any]
    naming: str = OWN
    joined: bool = False
    shards: int = 1
    seed: int = 0

    @property
    def family(self) -> str:
        """The family's name."""
        return _FORM_FAMILY[self.form]

    @property
    def spec(self) -> DraftSpec:
        """What the draft is."""
        return expected_tensors(self.config, self.family)[0]

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by their names on disk, in the dtype that the configuration declares."""
        spec = self.spec
        found = random_tensors(self.config, self.family, seed=self.seed, dtype=spec.dtype or "bfloat16")
        if self.joined:
            found = joined(found)
        own = stored_names(self.config, self.family)
        exported = renamed(self.form, self.naming)
        return {exported(own(name)): value for name, value in found.items()}

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """Write `config.json` and the weights, and return the directory, which is made where it does not exist."""
        return write_checkpoint(directory, self.config, self.tensors, shards=min(self.shards, len(self.tensors)))


def checkpoints(
    *,
    family: ValueOr[str] | None = None,
    packaging: ValueOr[str] | None = None,
    min_shards: int = 1,
    max_shards: int = 3,
    seed: ValueOr[int] | None = None,
) -> SearchStrategy[DraftFiles]:
    """Drafts to be written to a directory.

    An example, as printed:

        DraftFiles(form='medusa-plain', config={'architectures': ['MedusaModel'], 'model_type': 'medusa', 'hidden_size': 24,
        'vocab_size': 64, 'truncated_vocab_size': 16, 'num_heads': 3, 'num_hidden_layers': 1, 'medusa_fc_bias': True,
        'torch_dtype': 'bfloat16'}, naming='upstream', joined=False, shards=2, seed=7)

    Guarantee: the directory that `write` makes opens as `family` in `packaging`, and no check fails or warns, of the configuration, the
    headers or the numbers. A checkpoint is under 1 MB. Writing needs torch; drawing does not.

    Requirement: as for `draft_configs`.

    Shrinks as `draft_configs`, then towards the family's own names, q, k and v apart, the fewest shards, seed 0.

    Args:
        family, packaging: as for `draft_configs`.
        min_shards, max_shards: bounds of the number of files; one file has no index.
        seed: of all numbers.

    Raises:
        InvalidArgument: an argument is no such value, the family is not published so, or the bounds cross; from a draw where an argument is
            a strategy.

    See also: `draft_configs`; `pytest_specdecode.testing.write_tiny` for one draft of a family without drawing.
    """
    check_bounds("min_shards", min_shards, "max_shards", max_shards, least=1)
    return _checkpoints(
        draft_forms(family, packaging),
        shards=st.integers(min_shards, max_shards),
        seed=argument("seed", seed, SEEDS, integer(0)),
    )


@st.composite
def _checkpoints(
    draw: DrawFn, forms: SearchStrategy[tuple[Form, Picks]], *, shards: SearchStrategy[int], seed: SearchStrategy[int]
) -> DraftFiles:
    form, pick = draw(forms)
    # Picked before the configuration, whose number of picks is its form's own.
    naming = pick(namings_of(form.id))
    together = pick((False, True)) and naming == OWN and form.family in JOINED and not form.name
    config = config_of((form, pick))
    return DraftFiles(form=form.id, config=config, naming=naming, joined=together, shards=draw(shards), seed=draw(seed))


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with rows of q, then k, then v in one tensor, weights and biases."""
    import torch

    found = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"(.+\.)q_proj\.(weight|bias)", name)
        if match and f"{match[1]}v_proj.{match[2]}" in tensors:
            parts = [found.pop(f"{match[1]}{part}_proj.{match[2]}") for part in "qkv"]
            found[f"{match[1]}qkv_proj.{match[2]}"] = torch.cat(parts)
    return found
