"""Does the draft predict its target? Measured over recorded hidden states, as it would be served, without the target and without a GPU.

Static checks see a checkpoint; whether a draft works shows only in what it proposes. See `replay`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_specdecode import engines
from pytest_specdecode.checks.registry import Context, Inconclusive, check
from pytest_specdecode.errors import LayerBuildError, NoReferenceError
from pytest_specdecode.findings import Finding, Outcome
from pytest_specdecode.replay.baseline import Entry

if TYPE_CHECKING:
    from pytest_specdecode.replay import ReplayResult
    from pytest_specdecode.replay.probe import Comparison, ProbeResult
    from pytest_specdecode.replay.readings import EngineReading, OtherReading
    from pytest_specdecode.replay.target_weights import TargetWeights

#: Of the baseline's accepted length, below which a draft fails.
SHARE = 0.95

#: Of the tokens that a trace calls the target's own, the share that the target at hand is to choose again; rounding moves a few.
CONFIRMED = 0.9

_LENGTH = "acceptance.length"
_CONVENTIONS = "acceptance.conventions"


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
    if doubted := [file for file in result.files if file.confirmed is not None and file.confirmed < CONFIRMED]:
        least = min(doubted, key=lambda file: file.confirmed or 0.0)
        yield context.warn(
            f"the trace calls tokens the target's own of which the target chooses {least.confirmed:.0%}; a draft that agrees with it "
            "is marked wrong at the others",
            where=", ".join(file.file for file in doubted),
            got=least.confirmed,
            due=f"{CONFIRMED} or more",
            fix="record texts that this target wrote greedily, or leave the mask out of the trace, so that its choice is worked out",
        )
    if (beyond := _beyond_block(context)) is not None:
        tokens, most = beyond
        yield context.warn(
            f"{tokens} tokens are drafted a round; a block of the size that the draft was trained for gives {most}",
            where="draft_tokens",
            got=tokens,
            due=f"up to {most}",
            fix=f"measure with --draft-tokens={most} or fewer",
        )
    if context.baseline is None:
        return
    if not result.is_served_figure:
        raise Inconclusive(
            "the trace does not say which tokens are the target's own, so that nothing is held against the baseline: record loss_mask or "
            f"prompt_length, or give the target with its weights and record the last state; {result}",
            "trace",
        )
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


@check(
    _CONVENTIONS,
    title="no other reading of the checkpoint predicts the target better than the declared one",
    why="A wrong base, pairs of lanes, order of taps or residual loads, runs and passes every other check; only what is accepted shows it.",
    needs=("tensors", "trace"),
    cost="accepted length 1.03 as declared, 2.0 read as it was trained (rotary pairs)",
    example="a draft that was trained with interleaved rotary pairs, and whose configuration leaves readers at halves",
    fix="state in config.json the reading that predicts the target, or export the weights for the declared one",
)
def conventions(context: Context) -> Iterator[Finding]:
    """Every other reading on the same starts as the declared one, one convention at a time; and what engines will read."""
    if (beyond := _beyond_block(context)) is not None:
        tokens, most = beyond
        raise Inconclusive(
            f"{tokens} tokens are drafted a round, and a block of the size that the draft was trained for gives {most}: a reading that "
            f"does better there need not be the trained one; give --draft-tokens={most} or fewer"
        )
    result, engines_read = _probed(context)
    lengths = {name: result.served.get(name) for name in engines_read}
    texts = {name: _engine_text(name, read, lengths[name]) for name, read in engines_read.items()}
    context.figures[_CONVENTIONS] = {
        **result.to_dict(),
        "engines": {
            name: {
                "differs": list(read.names),
                "refuses": read.refused,
                "known_settings": read.settings,
                "accepted_length": None if (rate := lengths[name]) is None else rate.accepted_length,
                "says": texts[name],
            }
            for name, read in engines_read.items()
        },
    }
    said = [text for text in texts.values() if text]
    for item in result.better:
        yield context.fail(
            f"declared {item.reading.declared}, {result.declared}; {item.reading.name}, {item.rate}",
            where=str(context.trace.path) if context.trace else "",
            got={"reading": item.reading.declared, "kept_by_it_alone": item.only_declared, **result.declared.to_dict()},
            due={"reading": item.reading.name, "kept_by_it_alone": item.only_other, **item.rate.to_dict()},
            fix=f"state {item.reading.name} in config.json, or export the weights for {item.reading.declared}",
            outcomes=_as_engines_read(context, item.reading, lengths),
        )
    if result.better:
        return
    undecided = "; ".join(_open_text(item) for item in result.open)
    untold = f"; not in this trace: {', '.join(result.unrecorded)}" if result.unrecorded else ""
    if not result.comparisons:
        raise Inconclusive(f"no other reading can be replayed of this draft and this trace{untold}")
    if len(result.open) == len(result.comparisons):
        raise Inconclusive(
            f"a trace of {result.tokens} tokens tells no other reading from the declared one ({result.declared}): {undecided}{untold}"
        )
    worse = [item for item in result.comparisons if item.verdict == "worse"]
    parts = [f"{result.declared} as declared" + ("" if result.label == "acceptance" else f", {result.label}")]
    parts.append("worse: " + ", ".join(f"{item.reading.name} {item.rate}" for item in worse))
    if undecided:
        parts.append(f"not told apart: {undecided}")
    if result.unrecorded:
        parts.append(f"not in this trace: {', '.join(result.unrecorded)}")
    context.notes[_CONVENTIONS] = "; ".join([*parts, *said])


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

    assert context.trace is not None
    with _open_where_it_cannot():
        return replay(
            context.draft,
            context.trace,
            target=_target_weights(context),
            draft_tokens=context.draft_tokens,
            device=context.device,
            progress=context.progress,
        )


def _probed(context: Context) -> tuple[ProbeResult, dict[str, EngineReading]]:
    """The probe, and how each engine will read the draft."""
    from pytest_specdecode.replay import readings
    from pytest_specdecode.replay.probe import probe
    from pytest_specdecode.replay.run import Replayer

    assert context.trace is not None
    draft, target = context.draft, context.target
    taken = readings.taken(draft, target, context.engines)
    values: dict[str, list[object]] = {}
    for settings in taken.values():
        for setting, reading in settings.items():
            if not reading.refused:
                values.setdefault(setting, []).append(reading.value)
    read = {name: readings.engine_reading(context.spec, settings) for name, settings in taken.items()}
    with _open_where_it_cannot():
        result = probe(
            Replayer(draft, _target_weights(context), device=context.device),
            context.trace,
            readings.other_readings(draft, target, values),
            also={name: item.spec for name, item in read.items() if item.settings and not item.refused},
            draft_tokens=context.draft_tokens,
            progress=context.progress,
        )
    return result, read


def _beyond_block(context: Context) -> tuple[int, int] | None:
    """The number of tokens asked for and the most that a trained block gives, where that is fewer."""
    from pytest_specdecode.replay.run import Replayer

    if context.draft_tokens is None:
        return None
    with _open_where_it_cannot():
        most = Replayer(context.draft).most_tokens()
    return None if most is None or context.draft_tokens <= most else (context.draft_tokens, most)


def _target_weights(context: Context) -> TargetWeights | None:
    from pytest_specdecode.replay.target_weights import TargetWeights

    return None if context.target is None else TargetWeights(context.target.path)


@contextlib.contextmanager
def _open_where_it_cannot() -> Iterator[None]:
    """Inside, what keeps a draft from being replayed leaves the check open."""
    from pytest_specdecode.replay.target_weights import TargetMissingError
    from pytest_specdecode.replay.traces import NothingCountedError

    try:
        yield
    except NothingCountedError as error:
        raise Inconclusive(str(error), "trace") from None
    except TargetMissingError as error:
        raise Inconclusive(f"{error.message}; give the target with its weights: --draft-target=DIR", "target") from None
    except NoReferenceError as error:
        raise Inconclusive(str(error)) from None
    except LayerBuildError as error:
        raise Inconclusive(f"the draft does not build, see layers.build: {error.brief}") from None


def _as_engines_read(context: Context, reading: OtherReading, lengths: Mapping[str, object]) -> dict[str, Outcome]:
    """Per engine, whether it reads so, with the length that it will be accepted at."""
    if not reading.setting:
        return {name: Outcome(outcome="unknown") for name in context.engines}
    if reading.setting == "taps":
        found = engines.against(engines.captures(context.draft, context.target, context.engines), reading.value)
    else:
        found = context.read_as(reading.setting, reading.value)
    return {
        name: outcome
        if outcome.outcome in ("unknown", "stops") or lengths.get(name) is None
        else replace(outcome, message=f"{outcome.message}: about {lengths[name]}")
        for name, outcome in found.items()
    }


def _engine_text(name: str, read: EngineReading, rate: object) -> str:
    """`SGLang will read theta 10000: about 1.06`; empty where nothing is known."""
    title = engines.ENGINES[name].title
    if read.refused:
        return f"{title} stops: {read.refused}"
    if not read.settings:
        return ""
    what = "as declared" if not read.names else " and ".join(read.names)
    return f"{title} will read {what}: " + ("not replayed" if rate is None else f"about {rate}")


def _open_text(item: Comparison) -> str:
    assert item.tokens is not None
    assert item.difference is not None
    return (
        f"{item.reading.name} {item.rate} (about {item.tokens:,} tokens would settle a difference of {item.difference:.2g} in the "
        f"{'first' if item.reading.place == 1 else 'second'} token's rate)"
    )


def _difference(entry: Entry, result: ReplayResult) -> str | None:
    """In what the baseline's measurement was another one, or None."""
    if entry.trace != result.fingerprint:
        return f"on another trace ({entry.trace}, this one is {result.fingerprint})"
    if entry.draft_tokens != result.draft_tokens:
        return f"with {entry.draft_tokens} drafted tokens a round, not {result.draft_tokens}"
    return None
