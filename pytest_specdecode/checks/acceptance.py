"""Does the draft predict its target? Measured over recorded hidden states, as it would be served, without the target and without a GPU.

Static checks see a checkpoint; whether a draft works shows only in what it proposes. See `replay`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_specdecode.checks.registry import Context, Inconclusive, check
from pytest_specdecode.errors import LayerBuildError, NoReferenceError
from pytest_specdecode.findings import Finding
from pytest_specdecode.replay.baseline import Entry

if TYPE_CHECKING:
    from pytest_specdecode.replay import ReplayResult

#: Of the baseline's accepted length, below which a draft fails.
SHARE = 0.95

_LENGTH = "acceptance.length"


@check(
    _LENGTH,
    title="accepted length on a recorded trace is not below the baseline",
    why="A draft that was trained on, quantised or converted may load, serve and pass every other check, and be accepted less.",
    needs=("tensors", "trace"),
    cost="accepted length is what is measured",
    example="a draft that is accepted at 2.1 where its baseline says 2.8",
    fix="serve the checkpoint that the baseline was measured on; where the fall is meant, write the baseline anew: --draft-update-baseline",
)
def length(context: Context) -> Iterator[Finding]:
    """The served accepted length against the baseline's, beyond what chance explains."""
    result = measured(context)
    context.figures[_LENGTH] = result.to_dict()
    context.notes[_LENGTH] = str(result)
    if not result.is_served_figure or context.baseline is None:
        return
    entry = context.baseline.get(context.draft.name)
    if entry is None:
        raise Inconclusive(
            f"the baseline has no entry of {context.draft.name}: --draft-update-baseline writes one; {result}"
        )
    if (other := _difference(entry, result)) is not None:
        raise Inconclusive(f"the baseline was measured {other}; {result}")
    due = SHARE * entry.accepted_length
    served, highest = result.accepted_length, result.served.high + 1.0
    if served >= due:
        return
    message = f"accepted length is {served:.2f}; {SHARE:.0%} of the baseline's {entry.accepted_length:.2f} is {due:.2f}"
    make = context.fail if highest < due else context.warn
    if highest >= due:
        message += f", which {result.served.rounds} rounds do not rule out"
    yield make(message, where=str(context.trace.path) if context.trace else "", got=round(served, 4), due=round(due, 4))


def measured(context: Context) -> ReplayResult:
    """The replay of the declared reading; made once per draft.

    Raises:
        Inconclusive: the draft shares tensors with a target that was not given, or there is no replay of its family.
    """
    if "replay" not in context.memo:
        context.memo["replay"] = _replayed(context)
    found: ReplayResult = context.memo["replay"]
    return found


def _replayed(context: Context) -> ReplayResult:
    from pytest_specdecode.replay.run import replay
    from pytest_specdecode.replay.target_weights import TargetMissingError, TargetWeights

    assert context.trace is not None
    target = None
    try:
        if context.target is not None:
            target = TargetWeights(context.target.path)
        return replay(
            context.draft,
            context.trace,
            target=target,
            draft_tokens=context.draft_tokens,
            device=context.device,
            progress=context.progress,
        )
    except TargetMissingError as error:
        raise Inconclusive(f"{error.message}; give the target with its weights: --draft-target=DIR", "target") from None
    except NoReferenceError as error:
        raise Inconclusive(str(error)) from None
    except LayerBuildError as error:
        raise Inconclusive(f"the draft does not build, see layers.build: {error.brief}") from None


def _difference(entry: Entry, result: ReplayResult) -> str | None:
    """In what the baseline's measurement was another one, or None."""
    if entry.trace != result.fingerprint:
        return f"on another trace ({entry.trace}, this one is {result.fingerprint})"
    if entry.draft_tokens != result.draft_tokens:
        return f"with {entry.draft_tokens} drafted tokens a round, not {result.draft_tokens}"
    return None
