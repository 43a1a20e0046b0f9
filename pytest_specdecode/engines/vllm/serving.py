"""vLLM's rules about the options it is started with.

Read from `vllm/config/speculative.py`, `v1/worker/gpu/spec_decode` and issues. vLLM counts drafts: the token that they follow is not among
`num_speculative_tokens`, and no block size of the file bounds them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from pytest_specdecode.engines.base import Refusal, ServingRule, fine, serves_wrong, stops
from pytest_specdecode.engines.options import ServeOptions
from pytest_specdecode.engines.ranks import heads_divide
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import GQASpec
from pytest_specdecode.target import Target

_CONFIG = "config/speculative.py"

#: Families that each method serves.
_SERVED: Mapping[str, tuple[str, ...]] = {
    "eagle": ("eagle1",),
    "eagle3": ("eagle3", "eagle3-mla", "eagle4", "peagle"),
    "mtp": ("mtp", "gemma4-assistant"),
    "medusa": ("medusa",),
    "mlp_speculator": ("mlp-speculator",),
    "dflash": ("dflash", "dflash2", "domino"),
    "dspark": ("dspark",),
    "draft_model": (),
    "ngram": (),
}
#: RoPE types whose tables are made for the served length, whatever the draft states.
_GROWING = ("default", "linear", "llama3", "ntk", "proportional")
_BLOCKS = ("dflash", "dflash2", "domino", "dspark")
_DRAFTS = frozenset(family for families in _SERVED.values() for family in families)
_UNDIVIDED = stops(
    "wants attention heads that divide among the ranks, and KV heads that do or that the ranks divide among",
    "config/model.py",
)


def _method(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The method against the draft's family."""
    stated = serve["method"]
    if stated is None or draft.spec is None:
        return
    family, method = draft.spec.family, str(stated).lower()
    if method.endswith("_mtp"):
        # The names by model, deepseek_mtp and its like, are deprecated ones of the same method.
        method = "mtp"
    due = [name for name, families in _SERVED.items() if family in families]
    if method in _SERVED and family in _SERVED[method]:
        return
    known = method in _SERVED
    near = [] if known else difflib.get_close_matches(method, _SERVED, n=1, cutoff=0.75)
    yield Refusal(
        topic="algorithm",
        message=f"{method} is not the method of {family} drafts" if known else f"{method} is no method that is known",
        outcome=stops("its validation of speculative_config refuses the method", _CONFIG)
        if near
        else Outcome(outcome="unknown"),
        option="method",
        got=stated,
        due=due[0] if due else "no method of this engine is known to serve this draft",
        fix=f"start with method={due[0]}" if due else "",
        doubtful=not known and not near,
    )


def _block(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """More drafts in one pass than rows that were trained to draft."""
    asked, spec = serve["num-speculative-tokens"], draft.spec
    if (
        asked is None
        or spec is None
        or spec.family not in _BLOCKS
        or spec.block is None
        or spec.block.block_size is None
    ):
        return
    block = spec.block
    assert block.block_size is not None
    # A DSpark file that does not say whether its first row drafts is given the benefit of the doubt.
    anchor = block.sample_from_anchor is False or (block.sample_from_anchor is None and spec.family != "dspark")
    trained = block.block_size - anchor
    if asked > trained:
        yield Refusal(
            topic="block-size",
            message=f"{asked} drafts are asked for, a block was trained on {trained}",
            outcome=serves_wrong(
                "drafts past the trained block, and every position falls: accepted length 1.31 instead of 2.74",
                "PR 41834",
            ),
            option="num-speculative-tokens",
            got=asked,
            due=f"at most {trained}",
            fix=f"start with num-speculative-tokens={trained}",
        )


def _modules(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """Prediction layers and stages are gone through a whole number of times."""
    asked, spec = serve["num-speculative-tokens"], draft.spec
    if asked is None or spec is None or spec.family not in ("mtp", "mlp-speculator"):
        return
    count = spec.num_hidden_layers
    if count is None or count < 1 or asked <= count or asked % count == 0:
        return
    yield Refusal(
        topic="draft-tokens",
        message=f"{asked} drafts are no whole number of rounds through the draft's {count} heads",
        outcome=stops(f"num_speculative_tokens:{asked} must be divisible by n_predict={count}", _CONFIG),
        option="num-speculative-tokens",
        got=asked,
        due=f"at most {count}, or a multiple of it",
    )


def _positive(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """At least one draft."""
    asked = serve["num-speculative-tokens"]
    if asked is not None and asked < 1:
        yield Refusal(
            topic="draft-tokens",
            message="num-speculative-tokens is less than one",
            outcome=stops(f"Expected num_speculative_tokens to be greater than zero ({asked}).", _CONFIG),
            option="num-speculative-tokens",
            got=asked,
            due="at least 1",
        )


def _kv_cache(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The target's KV-cache type, which the draft is given too."""
    dtype, spec = serve["kv-cache-dtype"], draft.spec
    if dtype is None or spec is None:
        return
    heads = any(isinstance(layer.attention, GQASpec) for layer in spec.layers)
    if str(dtype).endswith("_mla") and heads:
        yield Refusal(
            topic="kv-cache-dtype",
            message=f"{dtype} is a KV-cache type of latent attention, and the draft keeps heads",
            outcome=Outcome(
                outcome="unknown", message="the draft inherits the target's KV-cache type", source="issue 48380"
            ),
            option="kv-cache-dtype",
            got=dtype,
            due=["auto", "bfloat16", "fp8"],
        )
    elif spec.family in _BLOCKS and str(dtype).startswith(("fp8", "fp4", "int8", "nvfp4")):
        yield Refusal(
            topic="kv-cache-dtype",
            message=f"the draft's rows of a block see each other, beside a KV cache of type {dtype}",
            outcome=Outcome(
                outcome="unknown", message="non-causal attention over a quantised KV cache", source="issue 41559"
            ),
            option="kv-cache-dtype",
            got=dtype,
            due=["auto", "bfloat16"],
            fix="measure with kv-cache-dtype=auto as well",
            doubtful=True,
        )


def _context(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The served length against the rows of the draft's rotary table."""
    served, spec = serve["context-length"], draft.spec
    if served is None and target is not None:
        served = target.max_position_embeddings
    ropes = [layer.attention.rope for layer in spec.layers if layer.attention is not None] if spec is not None else []
    covered = ropes[0].max_position_embeddings if ropes else None
    if served is None or covered is None or served <= covered:
        return
    kind = ropes[0].rope_type
    if kind in _GROWING:
        outcome = fine(f"makes the table of a {kind} RoPE as long as it serves", "PR 49343")
    else:
        outcome = serves_wrong(
            f"has no rows past the table of a {kind} RoPE: an assertion when compiled, garbage when not", "issue 48894"
        )
    yield Refusal(
        topic="context-length",
        message=f"{served} positions are served, the draft has {covered}",
        outcome=outcome,
        option="context-length",
        got=served,
        due=f"at most {covered}",
        fix="state the max_position_embeddings that the draft was trained for, or serve a shorter context",
    )


SERVING: tuple[ServingRule, ...] = (
    _method,
    _positive,
    _block,
    _modules,
    heads_divide(_DRAFTS, _UNDIVIDED),
    _kv_cache,
    _context,
)
