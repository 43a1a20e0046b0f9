"""The one list of checks, and the one way to run one.

A check is a generator of findings with a stable id and one reason to fail. The suite, `check_draft`, the documentation and the list that
the command line prints are all made from `REGISTRY`.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pytest_specdecode import engines
from pytest_specdecode.checks.subject import Subject
from pytest_specdecode.engines import Misnames, Reading, ServeOptions
from pytest_specdecode.errors import DraftError
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import STATUS_ORDER, CheckResult, Finding, Outcome, Severity, Status
from pytest_specdecode.replay.baseline import Entry
from pytest_specdecode.replay.traces import Trace
from pytest_specdecode.spec import DraftSpec
from pytest_specdecode.target import Target

Need = Literal["config", "headers", "tensors", "target", "serving", "trace", "triton", "gpu"]

REGISTRY: dict[str, Check] = {}

#: Why a check of layers has nothing to look at.
NO_LAYERS = "the configuration states no usable number of layers; see config.num-hidden-layers"

_NO_WEIGHTS = "no weights lie beside config.json; give the whole checkpoint directory"


class Skip(Exception):
    """The check does not apply to this draft."""


class Inconclusive(Exception):
    """The evidence that the check needs is missing; never a pass.

    Attributes:
        want: what would settle it, where the caller can give that: `target`, `serving`, `trace`, `tensors`, `gpu`.
    """

    def __init__(self, reason: str, want: Need | None = None) -> None:
        super().__init__(reason)
        self.want = want


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule.

    Attributes:
        id: stable, `group.name`.
        title: what must hold, in one line.
        why: what goes wrong otherwise.
        severity: of its worst finding. Beyond that, an engine that was chosen to judge and data that cannot be read make an error of a
            warning.
        needs: evidence without which it is inconclusive. A check that needs both config and headers looks at the configuration
            alone where there are no weights, and is inconclusive only if that shows no fault. One that needs both the target and the
            serving options is content with either.
        families: the families it applies to; None for all.
        anywhere: whether it runs on a checkpoint whose family is not known or whose files are broken.
        unless: why the check does not apply to a draft whose configuration is known, or None; asked before the weights are.
        applies: to which drafts it applies, in two or three words, where `unless` narrows the families; empty where they say it.
        faults: slugs of the engine models that its findings carry.
        cost: what the fault was measured to cost, where that is public: accepted length before and after, with the source.
        example: changes of a tiny draft's configuration that it reports (with `family`, which tiny draft), or the fault in words.
        fix: how to mend what it finds, in general.
        run: yields findings; may raise Skip or Inconclusive.
    """

    id: str
    title: str
    why: str
    severity: Severity
    needs: tuple[Need, ...]
    families: tuple[str, ...] | None
    anywhere: bool
    run: Callable[[Context], Iterator[Finding]]
    unless: Callable[[Context], str | None] | None = None
    applies: str = ""
    faults: tuple[str, ...] = ()
    cost: str = ""
    example: Mapping[str, Any] | str = ""
    fix: str = ""

    @property
    def group(self) -> str:
        """The part of the id before the first dot."""
        return self.id.split(".", 1)[0]


@dataclass
class Context:
    """What a check may ask.

    Attributes:
        draft: the draft under judgement.
        target: the model that the draft proposes for, where it was given.
        device: where numeric checks run.
        engines: names of the engines whose verdict counts.
        judged: whether those were chosen: then an error is what one of them stops at or serves wrong.
        serve: the options that the server is to be started with.
        trace: recorded hidden states of the target, where they were given.
        draft_tokens: how many tokens a round drafts; None for what the draft states.
        baseline: accepted lengths that drafts had before, by name; None where there is no such file, and it judges nothing.
        fused_kv: the implementation of the stacked K/V path that is held to account; None for ours, held to its numbers alone.
        pictures: whether a report is asked for that draws what checks measure; then those measure what they need not to judge.
        progress: told now and then how far a long check is.
        notes: figures that a passing check wants shown; the check sets `notes[its id]`.
        figures: what a check measured, in values JSON can hold, for the report; the check sets `figures[its id]`.
        memo: what one check has worked out and another may use.
    """

    draft: Draft
    target: Target | None = None
    device: str = "cpu"
    engines: tuple[str, ...] = engines.NAMES
    judged: bool = False
    serve: ServeOptions = field(default_factory=ServeOptions)
    trace: Trace | None = None
    draft_tokens: int | None = None
    baseline: Mapping[str, Entry] | None = None
    fused_kv: Subject | None = None
    pictures: bool = False
    progress: Callable[[str], None] | None = None
    notes: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> DraftSpec:
        """The draft's spec; the registry runs checks that use it only where the family is known."""
        if self.draft.spec is None:
            raise Inconclusive("the draft's family is not known; see config.family")
        return self.draft.spec

    def fail(
        self,
        message: str,
        *,
        where: str = "",
        got: Any = None,
        due: Any = None,
        fix: str = "",
        fault: str | None = None,
        outcomes: Mapping[str, Outcome] | None = None,
        severity: Severity = "error",
    ) -> Finding:
        """A finding, with what each engine does about `fault` (a slug of the engine models), or with `outcomes` worked out elsewhere."""
        return Finding(
            message=message,
            severity=severity,
            where=where,
            got=got,
            due=due,
            fix=fix,
            fault=fault or "",
            outcomes=engines.outcomes(fault or "", self.draft.spec, self.engines) if outcomes is None else outcomes,
        )

    def read_as(self, setting: str, meant: object, otherwise: str = "") -> dict[str, Outcome]:
        """Per engine, whether it takes `setting` as `meant`, and from where; see `engines.compare`."""
        return engines.compare(setting, meant, self.draft, self.engines, otherwise)

    def readings(self, setting: str) -> dict[str, Reading | None]:
        """What each engine takes `setting` of this draft to be; None where that is not known."""
        return engines.readings(setting, self.draft, self.engines)

    def labels(self) -> dict[str, tuple[str, ...] | None]:
        """The `architectures` entries under which each engine serves such a draft; None where that is not known."""
        return engines.known_labels(self.draft, self.engines)

    def ignored(self) -> dict[str, dict[str, Outcome]]:
        """The keys that an engine passes over at a loss, with what each engine does; see `engines.ignored`."""
        return engines.ignored(self.draft, self.engines)

    def misnames(self) -> list[Misnames]:
        """The rules about names of tensors that the engines' loaders have for such a draft."""
        return engines.misnames(self.draft, self.engines)

    def null_stops(self) -> dict[str, frozenset[str]]:
        """The keys at which a null stops each engine of which that is known."""
        return engines.null_stops(self.draft, self.engines)

    def warn(self, message: str, **fields: Any) -> Finding:
        """As `fail`, with severity `warning`."""
        return self.fail(message, severity="warning", **fields)


class UnknownCheckError(DraftError):
    """A selection names no check and no group."""


def check(
    id: str,
    *,
    title: str,
    why: str,
    severity: Severity = "error",
    needs: Sequence[Need] = ("config",),
    families: Sequence[str] | None = None,
    anywhere: bool = False,
    unless: Callable[[Context], str | None] | None = None,
    applies: str = "",
    faults: Sequence[str] = (),
    cost: str = "",
    example: Mapping[str, Any] | str = "",
    fix: str = "",
) -> Callable[[Callable[[Context], Iterator[Finding]]], Callable[[Context], Iterator[Finding]]]:
    """Register the decorated generator as the check `id`."""

    def register(run: Callable[[Context], Iterator[Finding]]) -> Callable[[Context], Iterator[Finding]]:
        if id in REGISTRY:
            raise ValueError(f"two checks have the id {id}")
        REGISTRY[id] = Check(
            id=id,
            title=title,
            why=why,
            severity=severity,
            needs=tuple(needs),
            families=None if families is None else tuple(families),
            anywhere=anywhere,
            run=run,
            unless=unless,
            applies=applies,
            faults=tuple(faults),
            cost=cost,
            example=example,
            fix=fix,
        )
        return run

    return register


def select(checks: Iterable[str] | None = None, skip: Iterable[str] | None = None) -> tuple[Check, ...]:
    """The checks that `checks` names (all where None), less those that `skip` names; each an id or a group.

    Raises:
        UnknownCheckError: a name that is neither, with the nearest ones.
    """
    chosen = set(REGISTRY) if checks is None else _expand(checks)
    dropped = set() if skip is None else _expand(skip)
    return tuple(item for id, item in REGISTRY.items() if id in chosen - dropped)


def run(item: Check, context: Context) -> CheckResult:
    """Run one check. A `DraftError` inside it is a finding; any other exception is a defect of the check and propagates."""
    started = time.perf_counter()

    def result(status: Status, message: str, findings: Sequence[Finding] = (), want: Need | None = None) -> CheckResult:
        return CheckResult(
            want=want or "",
            id=item.id,
            status=status,
            message=message,
            findings=tuple(findings),
            seconds=time.perf_counter() - started,
            figures=context.figures.get(item.id, {}),
        )

    try:
        _require(item, context)
        findings = [_judged(_declared(finding, item), context) for finding in item.run(context)]
    except Skip as reason:
        return result("skipped", str(reason))
    except Inconclusive as reason:
        return result("inconclusive", str(reason), want=reason.want)
    except DraftError as error:
        place = ": ".join(part for part in (error.path, error.key) if part)
        findings = [Finding(message=error.brief, where=place, got=error.got, due=error.due)]
    if not findings and _only_config(item, context):
        return result("inconclusive", f"the configuration alone shows no fault; {_NO_WEIGHTS}", want="tensors")
    if not findings:
        return result("passed", context.notes.get(item.id, ""))
    findings.sort(key=lambda finding: finding.severity != "error")
    return result("failed" if findings[0].severity == "error" else "warned", findings[0].message, findings)


def _declared(finding: Finding, item: Check) -> Finding:
    """The finding as the check has it, which may be no more than what the check is registered with."""
    if finding.fault and finding.fault not in item.faults:
        raise ValueError(f"{item.id} reports the fault {finding.fault!r}, which it does not declare")
    if finding.severity == "error" and item.severity == "warning":
        raise ValueError(f"{item.id} reports an error, and is registered with warnings as its worst: {finding.message}")
    return finding


def _judged(finding: Finding, context: Context) -> Finding:
    """The finding as the chosen engines have it.

    An engine that stops or serves wrong makes it an error, one that falls back a warning. Where every chosen engine is known to be fine
    with it, it is a warning, for the file is still not what it says; where nothing is known, it stays as the check has it.
    """
    if not context.judged:
        return finding
    kinds = {outcome.outcome for name, outcome in finding.outcomes.items() if name in context.engines}
    if kinds & set(engines.UNFIT):
        return replace(finding, severity="error")
    if "falls back" in kinds or kinds == {"fine"}:
        return replace(finding, severity="warning")
    return finding


def require_layers(context: Context) -> None:
    """Raise Inconclusive, with the true reason, where the draft has no layers to look at."""
    if context.spec.layers:
        return
    family = context.draft.family
    raise Inconclusive((None if family is None else family.no_layers_reason(context.spec)) or NO_LAYERS)


def worst(results: Iterable[CheckResult]) -> Status:
    """The status that speaks for all of them."""
    return max((result.status for result in results), key=STATUS_ORDER.index, default="passed")


def is_quantised(context: Context) -> bool:
    """Whether the configuration says that weights are stored quantised."""
    binding = context.draft.binding
    return binding is not None and binding.storage.scheme.method is not None


def _require(item: Check, context: Context) -> None:
    """Raise where the evidence that `item` needs is not there."""
    draft = context.draft
    if not item.anywhere:
        if draft.spec is None:
            reason = draft.checkpoint.faults[0] if draft.checkpoint.faults else "see config.family"
            raise Inconclusive(f"the draft's family is not known: {reason}")
        if draft.unread_config is not None:
            raise Inconclusive(f"the configuration cannot be read: {draft.unread_config}")
        if item.families is not None and draft.spec.family not in item.families:
            raise Skip(f"for {_listed(item.families)} drafts; this one is {draft.spec.family}")
        if item.unless is not None and (why_not := item.unless(context)) is not None:
            raise Skip(why_not)
        if {"headers", "tensors"} & set(item.needs):
            if not draft.checkpoint.has_weights and "config" not in item.needs:
                raise Inconclusive(_NO_WEIGHTS, "tensors")
            if draft.checkpoint.has_weights and not draft.checkpoint.complete:
                fault = [*draft.checkpoint.faults, *draft.checkpoint.index_faults][0]
                raise Inconclusive(f"the weights cannot all be read: {fault}")
    if {"target", "serving"} <= set(item.needs) and (context.target is not None or context.serve):
        return
    if "target" in item.needs and context.target is None:
        raise Inconclusive("needs the target's config.json: --draft-target=DIR", "target")
    if "serving" in item.needs and not context.serve:
        raise Inconclusive(
            'needs the options that the server is started with: --draft-serve="algorithm=EAGLE3 num-steps=3"', "serving"
        )
    if "trace" in item.needs and context.trace is None:
        raise Inconclusive("needs recorded hidden states of the target: --draft-trace=DIR", "trace")
    if "gpu" in item.needs and context.device == "cpu":
        raise Inconclusive("needs a GPU: --draft-device=cuda", "gpu")


def _only_config(item: Check, context: Context) -> bool:
    """Whether the half of the evidence that lies in the weights is not there."""
    return not item.anywhere and "headers" in item.needs and not context.draft.checkpoint.has_weights


def _expand(names: Iterable[str]) -> set[str]:
    groups = {item.group for item in REGISTRY.values()}
    found: set[str] = set()
    for name in names:
        if name in REGISTRY:
            found.add(name)
        elif name in groups:
            found |= {id for id, item in REGISTRY.items() if item.group == name}
        else:
            near = difflib.get_close_matches(name, [*groups, *REGISTRY], n=3, cutoff=0.5)
            hint = f"; did you mean {_listed(near)}?" if near else f"; groups are {_listed(sorted(groups))}"
            raise UnknownCheckError(f"no check and no group is called {name!r}{hint}", got=name, due=near)
    return found


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}" if names else "none"
