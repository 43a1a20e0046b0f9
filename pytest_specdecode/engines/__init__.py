"""The serving engines, as data: what each reads, passes over and refuses, and what it does about each fault of a draft."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pytest_specdecode.engines import sglang, tensorrt_llm, vllm
from pytest_specdecode.engines.base import (
    SETTINGS,
    UNFIT,
    Engine,
    Ignores,
    Misnames,
    Reading,
    Reads,
    Refusal,
    at,
    fine,
    serves_wrong,
    stops,
)
from pytest_specdecode.engines.options import OPTIONS, ServeOptionError, ServeOptions
from pytest_specdecode.errors import DraftError
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec
from pytest_specdecode.target import Target

__all__ = [
    "ENGINES",
    "NAMES",
    "OPTIONS",
    "SETTINGS",
    "UNFIT",
    "Engine",
    "Ignores",
    "Misnames",
    "Reading",
    "Reads",
    "Refusal",
    "ServeOptionError",
    "ServeOptions",
    "against",
    "at",
    "captures",
    "compare",
    "fine",
    "ignored",
    "known_labels",
    "looks_in",
    "misnames",
    "null_stops",
    "outcomes",
    "readings",
    "refusals",
    "select",
    "stops",
    "versions",
]

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (sglang.ENGINE, vllm.ENGINE, tensorrt_llm.ENGINE)}

#: Names of all engines, in the order of reports.
NAMES: tuple[str, ...] = tuple(ENGINES)


def outcomes(fault: str, spec: DraftSpec | None, names: Iterable[str] = NAMES) -> dict[str, Outcome]:
    """What each of the engines `names` does about `fault` in a draft that is `spec` (None: the family is not known)."""
    return {name: ENGINES[name].outcome(fault, spec) for name in names}


def readings(setting: str, draft: Draft, names: Iterable[str] = NAMES) -> dict[str, Reading | None]:
    """What each of the engines `names` takes `setting` of `draft` to be; None where that is not known."""
    return {name: ENGINES[name].reading(setting, draft) for name in names}


def compare(
    setting: str, meant: object, draft: Draft, names: Iterable[str] = NAMES, otherwise: str = ""
) -> dict[str, Outcome]:
    """Per engine: fine where it takes `setting` as `meant`, served wrong where it takes another value, unknown where not known.

    An engine that refuses the value it takes stops. Where one takes another value and states what it does about the fault `otherwise`,
    that is its outcome.
    """
    judged = against(readings(setting, draft, names), meant)
    for name, outcome in judged.items():
        if otherwise and outcome.outcome == "serves wrong":
            stated = ENGINES[name].outcome(otherwise, draft.spec)
            judged[name] = outcome if stated.outcome == "unknown" else stated
    return judged


def ignored(draft: Draft, names: Iterable[str] = NAMES) -> dict[str, dict[str, Outcome]]:
    """The keys of the draft's configuration that one of the engines `names` passes over at a loss, with what each of them does.

    An engine that does not pass a key over is fine where it looks there for some setting of such a draft, else not known.
    """
    chosen = tuple(names)
    passed = {name: {item.key: item for item in ENGINES[name].ignored(draft)} for name in chosen}
    found: dict[str, dict[str, Outcome]] = {}
    for key in dict.fromkeys(key for items in passed.values() for key in items):
        found[key] = {}
        for name in chosen:
            item = passed[name].get(key)
            if item is not None:
                found[key][name] = serves_wrong(item.instead, item.source)
            else:
                found[key][name] = fine("reads it") if _reads(name, key, draft) else Outcome(outcome="unknown")
    return found


def known_labels(draft: Draft, names: Iterable[str] = NAMES) -> dict[str, tuple[str, ...] | None]:
    """The `architectures` entries under which each of the engines `names` serves such a draft; None where that is not known."""
    family = None if draft.spec is None else draft.spec.family
    return {name: ENGINES[name].labels.get(family or "") for name in names}


def misnames(draft: Draft, names: Iterable[str] = NAMES) -> list[Misnames]:
    """The rules about names of tensors that the loaders of the engines `names` have for such a draft, each fault once."""
    family = None if draft.spec is None else draft.spec.family
    found = {
        (rule.fault, rule.pattern): rule for name in names for rule in ENGINES[name].misnames if family in rule.families
    }
    return list(found.values())


def null_stops(draft: Draft, names: Iterable[str] = NAMES) -> dict[str, frozenset[str]]:
    """The keys at which a null stops each of the engines `names`; an engine of which that is not known is left out."""
    rules = ((name, ENGINES[name].no_nulls) for name in names)
    return {name: rule(draft) for name, rule in rules if rule is not None}


def _reads(name: str, key: str, draft: Draft) -> bool:
    """Whether the engine may take some setting of such a draft from `key`."""
    return any(key in (ENGINES[name].looks_in(setting, draft) or ()) for setting in SETTINGS)


def against(found: Mapping[str, Reading | None], meant: object) -> dict[str, Outcome]:
    """As `compare`, of readings that are at hand."""
    judged = {}
    for name, reading in found.items():
        if reading is None:
            judged[name] = Outcome(outcome="unknown")
        elif reading.refused:
            judged[name] = stops(reading.refused, reading.source)
        else:
            make = fine if reading.value == meant else serves_wrong
            judged[name] = make(str(reading), reading.source)
    return judged


def looks_in(setting: str, draft: Draft, names: Iterable[str] = NAMES) -> dict[str, tuple[str, ...] | None]:
    """The keys that each of the engines `names` may take `setting` of such a draft from; None where nothing is known of it."""
    return {name: ENGINES[name].looks_in(setting, draft) for name in names}


def captures(draft: Draft, target: Target | None, names: Iterable[str] = NAMES) -> dict[str, Reading | None]:
    """Which states each of the engines `names` hands the draft, as `taps` names them; None where that is not known.

    Where the target is known, its own depth counts before the draft's word, and so does what an engine does in such a target.
    """
    spec = draft.spec
    if target is None or spec is None:
        return readings("taps", draft, names)
    if target.num_hidden_layers is not None:
        draft = copy.copy(draft)
        draft.spec = replace(spec, taps=replace(spec.taps, num_target_layers=target.num_hidden_layers))
    found = {}
    for name in names:
        rule = ENGINES[name].captures
        there = None if rule is None else rule(draft, target)
        found[name] = ENGINES[name].reading("taps", draft) if there is None else there
    return found


def refusals(
    topic: str, draft: Draft, target: Target | None, serve: ServeOptions, names: Iterable[str] = NAMES
) -> list[tuple[Refusal, dict[str, Outcome]]]:
    """What the engines `names` say to the options `serve` on `topic`: each fault once, with what each of them does about it.

    An engine that has no rule about the fault is shown as unknown.
    """
    chosen = tuple(names)
    found: dict[tuple[str, str, str], tuple[Refusal, dict[str, Outcome]]] = {}
    for name in chosen:
        for rule in ENGINES[name].serving:
            for refusal in rule(draft, target, serve):
                if refusal.topic != topic:
                    continue
                key = (refusal.message, refusal.option, repr(refusal.got))
                unknown = {other: Outcome(outcome="unknown") for other in chosen}
                found.setdefault(key, (refusal, unknown))[1][name] = refusal.outcome
    return list(found.values())


def versions(names: Iterable[str] = NAMES) -> dict[str, str]:
    """The version of each engine that the statements about it were read from."""
    return {name: ENGINES[name].version for name in names}


def select(names: Iterable[str] | None) -> tuple[str, ...]:
    """`names` as given, all engines where None.

    Raises:
        DraftError: a name that is no engine's, with the nearest one.
    """
    if names is None:
        return NAMES
    chosen = tuple(names)
    for name in chosen:
        if name not in ENGINES:
            near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.5)
            raise DraftError(
                f"no engine is called {name!r}; {'did you mean ' + near[0] + '?' if near else 'known are ' + ', '.join(NAMES)}"
            )
    return chosen
