"""Domino: DFlash whose logits a recurrent state over the block's own tokens corrects.

    s = GRU over the embeddings of the block's tokens, the anchor first, from a zero state
    logits[r] += embed_proj.2 silu(embed_proj.0 [h[r], s[r]]), s[r] the state after every token before the one that row r drafts

With `shift_label` row r drafts the token behind position r, so s[r] has seen rows 0 to r; without, it drafts the token at position r and
s[r] has seen rows 0 to r - 1. The first `pure_draft_prefix_len` drafting rows keep DFlash's logits. The layers are DFlash's, and so is the
stacked K/V path.

Source: SpecForge `specforge/modeling/draft/domino.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError, LayerBuildError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, TensorSource, unstated
from pytest_specdecode.families.dflash import DFlash
from pytest_specdecode.spec import DraftSpec, Extent, plus, times

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DominoOptions:
    """What Domino states beyond DFlash.

    Attributes:
        emb_dim: inner width of `embed_proj`.
        gru_hidden_dim: width of the recurrent state.
        pure_draft_prefix_len: drafting rows that keep DFlash's logits; 0 where absent, as the trainer reads it.
        shift_label: whether row r drafts the token behind its position; False where absent.
    """

    emb_dim: Extent = None
    gru_hidden_dim: Extent = None
    pure_draft_prefix_len: int = 0
    shift_label: bool = False


class Domino(DFlash):
    """Domino."""

    name = "domino"
    title = "Domino"
    packagings: tuple[str, ...] = ("plain",)
    label = r"Domino"
    own_tensors = ("prefix_gru.", "embed_proj.")
    own_keys = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
    tiny: Mapping[str, Any] = {
        **DFlash.tiny,
        "architectures": ["DominoDraftModel"],
        "dflash_config": {
            **DFlash.tiny["dflash_config"],
            "projector_type": "domino",
            "emb_dim": 16,
            "gru_hidden_dim": 24,
            "pure_draft_prefix_len": 1,
            "shift_label": False,
        },
    }

    def parse(self, view: ConfigView) -> DraftSpec:
        """As for DFlash; `shift_label` is what `sample_from_anchor` says elsewhere."""
        spec = super().parse(view)
        assert spec.block is not None
        assert isinstance(spec.options, DominoOptions)
        if spec.block.sample_from_anchor is not None:
            return spec
        return dataclasses.replace(
            spec, block=dataclasses.replace(spec.block, sample_from_anchor=spec.options.shift_label)
        )

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Any:
        """The `DominoHead`."""
        from pytest_specdecode.families.building import prefixed
        from pytest_specdecode.layers.linear import known
        from pytest_specdecode.layers.prefix_gru import DominoHead, PrefixGRU

        options = _options(spec)
        hidden, state = known(spec.hidden_size, "hidden_size"), known(options.gru_hidden_dim, "gru_hidden_dim")
        with prefixed("prefix_gru"):
            gru = PrefixGRU(source.under("prefix_gru"), in_features=hidden, hidden=state)
        sizes = {
            "hidden_size": hidden,
            "emb_dim": known(options.emb_dim, "emb_dim"),
            "rows": known(spec.vocabulary.head_rows, "vocab_size"),
        }
        with prefixed("embed_proj"):
            return DominoHead(
                gru,
                source.under("embed_proj"),
                **sizes,
                shift_label=options.shift_label,
                pure_draft_prefix_len=options.pure_draft_prefix_len,
            )

    def run_head(self, spec: DraftSpec, head: Any, states: torch.Tensor) -> Any:
        """The corrected logits of a block whose embeddings are its states."""
        rows = head.up.weight.shape[0]
        return head(states.new_zeros(*states.shape[:-1], rows), states, states)

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """Both widths must be stated."""
        options = _options(spec)
        return tuple(
            unstated(dflash_config__emb_dim=options.emb_dim, dflash_config__gru_hidden_dim=options.gru_hidden_dim)
        )

    def _options(self, view: ConfigView) -> DominoOptions:
        nested = view.root.section("dflash_config")
        return DominoOptions(
            emb_dim=nested.extent("emb_dim"),
            gru_hidden_dim=nested.extent("gru_hidden_dim"),
            pure_draft_prefix_len=nested.extent("pure_draft_prefix_len") or 0,
            shift_label=bool(nested.flag("shift_label")),
        )

    def _head_tensors(self, spec: DraftSpec) -> Iterator[ExpectedTensor]:
        options, hidden = _options(spec), spec.hidden_size
        gates = times(3, options.gru_hidden_dim)
        yield ExpectedTensor(name="prefix_gru.weight_ih_l0", shape=(gates, hidden))
        yield ExpectedTensor(name="prefix_gru.weight_hh_l0", shape=(gates, options.gru_hidden_dim))
        yield ExpectedTensor(name="embed_proj.0.weight", shape=(options.emb_dim, plus(hidden, options.gru_hidden_dim)))
        yield ExpectedTensor(name="embed_proj.2.weight", shape=(spec.vocabulary.head_rows, options.emb_dim))


def _options(spec: DraftSpec) -> DominoOptions:
    if not isinstance(spec.options, DominoOptions):
        raise LayerBuildError("the spec holds no Domino options")
    return spec.options
