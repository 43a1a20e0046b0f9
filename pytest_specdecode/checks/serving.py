"""Will a server that is started with these options draft with this draft?

What the options are checked against stands with the engines, as their rules about the options that they are started with.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pytest_specdecode import engines
from pytest_specdecode.checks.registry import Context, Inconclusive, check
from pytest_specdecode.engines.options import KNOWN_VALUES
from pytest_specdecode.findings import Finding

#: The options that each topic's rules look at; without any of them there is nothing to judge.
_OPTIONS = {
    "algorithm": (
        "algorithm",
        "method",
        "tp",
    ),
    "draft-tokens": (
        "num-steps",
        "eagle-topk",
        "num-draft-tokens",
        "num-speculative-tokens",
        "max-draft-len",
        "dflash-block-size",
        "dspark-block-size",
        "draft-window-size",
    ),
    "kv-cache-dtype": (
        "kv-cache-dtype",
        "attention-backend",
        "decode-attention-backend",
    ),
}


@check(
    "serving.algorithm",
    title="the algorithm asked for is the draft's, and its heads divide among the ranks",
    why="An EAGLE3 draft started as EAGLE loads, serves and accepts nothing: one engine then skips fc in silence.",
    needs=("config", "serving"),
    cost="accepted length 1.00 for an EAGLE3 draft started with algorithm EAGLE (sgl-project/sglang PR 21272)",
    example="--draft-serve='algorithm=EAGLE' with an EAGLE3 draft",
    fix="start the server with the draft's own algorithm",
)
def algorithm(context: Context) -> Iterator[Finding]:
    """The algorithm against the family, what it is not combined with, and the ranks that share its heads."""
    yield from _refused(context, "algorithm")


@check(
    "serving.draft-tokens",
    title="steps, top-k, draft tokens and window fit each other and the draft",
    why="Counts that do not fit stop the server, or are replaced by others in a log line.",
    needs=("config", "serving"),
    example="--draft-serve='algorithm=EAGLE3 num-steps=3 eagle-topk=1 num-draft-tokens=8'",
    fix="ask for as many tokens as the draft was trained to draft",
)
def draft_tokens(context: Context) -> Iterator[Finding]:
    """The numbers against each other and against the block."""
    yield from _refused(context, "draft-tokens")


@check(
    "serving.kv-cache-dtype",
    title="the KV-cache type is one that the attention backend takes",
    why="A backend for latent attention takes few types and stops at others; draft and target share the type, whatever their layouts.",
    needs=("config", "serving"),
    example="--draft-serve='attention-backend=tokenspeed_mla kv-cache-dtype=auto'",
    fix="start the server with a KV-cache type that the backend takes",
)
def kv_cache_dtype(context: Context) -> Iterator[Finding]:
    """The type against the backends, and against what the draft keeps."""
    yield from _refused(context, "kv-cache-dtype")


def _refused(context: Context, topic: str) -> Iterator[Finding]:
    """One finding for each thing that the engines say to the options on `topic`."""
    options = _OPTIONS[topic]
    refused = engines.refusals(topic, context.draft, context.target, context.serve, context.engines)
    yield from _unknown(context, options if topic != "algorithm" else ("draft-attention-backend",))
    if not refused and all(context.serve[option] is None for option in options):
        raise Inconclusive(f"the options given do not speak of it; give {_listed(options)}", "serving")
    for refusal, outcomes in refused:
        kinds = {outcome.outcome for outcome in outcomes.values()}
        wrong = bool(kinds & set(engines.UNFIT)) or ("falls back" not in kinds and not refusal.doubtful)
        make = context.fail if wrong else context.warn
        yield make(
            refusal.message,
            where=f"--draft-serve: {refusal.option}",
            got=refusal.got,
            due=refusal.due,
            fix=refusal.fix,
            outcomes=outcomes,
        )


def _unknown(context: Context, options: tuple[str, ...]) -> Iterator[Finding]:
    """Names that no engine is known to have."""
    for option in options:
        got = context.serve.unknown(option)
        if got is None:
            continue
        near = difflib.get_close_matches(got.lower(), KNOWN_VALUES[option], n=3)
        yield context.warn(
            f"{got} is no {option} that any engine is known to take",
            where=f"--draft-serve: {option}",
            got=got,
            due=sorted(near) or sorted(KNOWN_VALUES[option]),
            fix=f"start with {option}={near[0]}" if near else "see which names the engine's --help lists",
        )


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
