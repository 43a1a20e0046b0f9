"""TensorRT-LLM's rules about the options it is started with, read from `_torch/speculative/dflash.py`."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode.engines.base import Refusal, ServingRule, falls_back, stops
from pytest_specdecode.engines.options import ServeOptions
from pytest_specdecode.families import Draft
from pytest_specdecode.target import Target

_DFLASH = "_torch/speculative/dflash.py"
_BLOCKS = ("dflash", "dflash2", "domino", "dspark")


def _block(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The block is taken from the top level of the file, 16 where it does not stand there, and bounds `max_draft_len`."""
    asked, spec = serve["max-draft-len"], draft.spec
    if asked is None or spec is None or spec.family not in _BLOCKS or spec.packaging == "embedded":
        return
    stated = draft.checkpoint.config.get("block_size")
    block = stated if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0 else 16
    # The anchor takes a row of its own, except where the first row already drafts.
    most = block if spec.family == "dspark" else block - 1
    if asked > most:
        yield Refusal(
            topic="block-size",
            message=f"{asked} drafts are asked for, a block was trained on {most}",
            outcome=stops(
                f"DFlash checkpoint was trained with block_size={block}.Lower max_draft_len to at most {most}."
                f"Current max_draft_len={asked}.",
                _DFLASH,
            ),
            option="max-draft-len",
            got=asked,
            due=f"at most {most}",
            fix=f"start with max-draft-len={most}",
        )


def _context(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The served length against the positions that the draft states."""
    served, spec = serve["context-length"], draft.spec
    if spec is None or spec.family not in _BLOCKS:
        return
    if served is None and target is not None:
        served = target.max_position_embeddings
    ropes = [layer.attention.rope for layer in spec.layers if layer.attention is not None]
    covered = ropes[0].max_position_embeddings if ropes else None
    if served is None or covered is None or served <= covered:
        return
    yield Refusal(
        topic="context-length",
        message=f"{served} positions are served, the draft has {covered}",
        outcome=falls_back(
            f"DFlash drafter covers {covered} positions but the engine serves up to {served}. "
            f"max_position_embeddings={covered} is the binding constraint, so requests past it will draft nothing.",
            _DFLASH,
        ),
        option="context-length",
        got=served,
        due=f"at most {covered}",
        fix="state the max_position_embeddings that the draft was trained for, or serve a shorter context",
    )


SERVING: tuple[ServingRule, ...] = (_block, _context)
