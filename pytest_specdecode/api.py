"""The script door: the same checks without pytest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pytest_specdecode import checks as rules
from pytest_specdecode import engines as known_engines
from pytest_specdecode import families
from pytest_specdecode.checkpoint import CONFIG_NAME, Checkpoint
from pytest_specdecode.checks.subject import OURS, Subject, subject_of
from pytest_specdecode.engines import ServeOptions
from pytest_specdecode.errors import DraftError, UnknownFamilyError, printable
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.replay import baseline as baselines
from pytest_specdecode.replay.traces import Trace
from pytest_specdecode.report import CheckText, DraftReport, Report, finding_lines
from pytest_specdecode.target import Target

if TYPE_CHECKING:
    from pytest_specdecode.replay import ReplayResult

Path = str | os.PathLike[str]


def open_draft(path: Path) -> Draft:
    """Open the checkpoint in the directory `path`; only its configuration and headers are read.

    Raises:
        CheckpointError: the directory, its configuration or a header cannot be read.
        UnknownFamilyError: no family, or several, are recognised.
    """
    checkpoint = Checkpoint.open(path)
    draft = families.load(checkpoint)
    # Only now: a draft inside its target needs no more of the shards than hold it.
    for fault in (*checkpoint.faults, *checkpoint.index_faults):
        raise fault
    if draft.spec is None:
        evidence = draft.recognition.evidence()
        found = draft.recognition
        named = ", ".join(found.disagreement or sorted(evidence)) or "none"
        if found.is_template:
            message = "every size is null: a template, not a configuration"
        elif found.disagreement:
            message = f"signals name more than one family: {named}"
        else:
            message = f"no draft family that this version reads; signals name {named}"
        raise UnknownFamilyError(
            message,
            path=checkpoint.path / CONFIG_NAME,
            got=evidence,
            due=[family.name for family in families.FAMILIES],
        )
    return draft


def check_draft(
    path: Path,
    target: Path | None = None,
    engines: Sequence[str] | str | None = None,
    checks: Iterable[str] | str | None = None,
    skip: Iterable[str] | str | None = None,
    *,
    serve: str | ServeOptions | None = None,
    device: str = "cpu",
    trace: Path | None = None,
    draft_tokens: int | None = None,
    baseline: Path | None = None,
    fused_kv: str | Callable[..., Any] | Subject | None = None,
    pictures: bool = False,
) -> Report:
    """Run the checks on the checkpoint in `path`.

    Args:
        path: the draft's directory.
        target: the target's directory; its `config.json` is enough.
        engines: names of the engines whose outcomes are shown and count, or one text of them with commas: an error is then what one of them
            stops at or serves wrong, and what one falls back from is a warning. Where None, all are shown, and each finding has the
            severity of its check.
        checks: ids and groups to run, such as `"rope"` or `["weights.shapes", "taps"]`; all where None.
        skip: ids and groups to leave out.
        serve: the options that the server is to be started with, such as `"algorithm=EAGLE3 num-steps=3"`.
        device: where numeric checks run: `cpu`, `cuda`.
        trace: a directory of recorded hidden states of the target, see `replay`.
        draft_tokens: how many tokens a round drafts in a replay; what the draft states where None.
        baseline: the file with the accepted lengths that must not be undercut.
        fused_kv: the implementation of the stacked K/V path that is held to account on the draft's layers: a class, called as SGLang's
            is, with (layers, rotary_emb, num_kv_heads, head_dim, device); `MODULE:CLASS`; or `ours`, `sglang` or `vllm`. Where None,
            ours, and only its numbers.
        pictures: also measure what only the pictures of an HTML report show: the spread of each tensor's weights, RoPE frequencies.

    Returns:
        A report with one result per selected check. A checkpoint that is broken inside has failed and inconclusive checks.

    Raises:
        CheckpointError: there is no checkpoint in `path`, or no readable configuration in `target`.
        UnknownCheckError: `checks` or `skip` names no check and no group.
        ServeOptionError: `serve` states an unknown option or a value that it cannot have.
        DraftError: an unknown engine, a trace or a baseline that cannot be read, or no such implementation of the stacked path.
    """
    selected = rules.select(_names(checks), _names(skip))
    context = open_context(
        path,
        target=target,
        engines=engines,
        serve=serve,
        device=device,
        trace=trace,
        draft_tokens=draft_tokens,
        baseline=baseline,
        fused_kv=fused_kv,
        pictures=pictures,
    )
    results = [run_check(item, context) for item in selected]
    return Report(drafts=(draft_report(path, context, results),), about=about(results))


class RejectedDraftError(DraftError):
    """A draft failed checks, which the text lists.

    Attributes:
        report: the results of every check.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self.report = report
        failed = [result for result in report if result.status == "failed"]
        self._lines = [
            line for item in failed for finding in item.findings or () for line in finding_lines(item.id, finding)
        ]
        # A check that broke has a message and no finding.
        self._lines += [f"  error {item.id}: {printable(item.message)}" for item in failed if not item.findings]
        super().__init__(f"{len(failed)} of {len(list(report))} checks failed", path=os.fspath(path))

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._lines])


def gate(
    path: Path,
    target: Path | None = None,
    engines: Sequence[str] | str | None = None,
    checks: Iterable[str] | str | None = None,
    skip: Iterable[str] | str | None = None,
    *,
    serve: str | ServeOptions | None = None,
    device: str = "cpu",
) -> Report:
    """Let the checkpoint in `path` pass, or raise one error: for the line after `save_pretrained` in an export script.

    Warnings and inconclusive checks let it pass. Of several ranks, only the one that saves calls this.

    Args:
        path, target, engines, checks, skip, serve, device: as for `check_draft`.

    Returns:
        The report, to be written or searched for warnings.

    Raises:
        RejectedDraftError: a check failed. It holds the report, and its text every finding with what each engine does.
        DraftError: otherwise as `check_draft`.
    """
    report = check_draft(path, target, engines, checks, skip, serve=serve, device=device)
    if not report.ok:
        raise RejectedDraftError(path, report)
    return report


def replay(
    path: Path,
    trace: Path,
    target: Path | None = None,
    draft_tokens: int | None = None,
    *,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> ReplayResult:
    """The accepted length of the draft in `path` over recorded hidden states of its target, as serving would give it.

    Args:
        path: the draft's directory.
        trace: a directory of recordings, or one: speculators' `hs_<i>.safetensors` or SpecForge's `.ckpt`.
        target: the target's directory, for the embedding, head and final norm that the draft shares with it or that tell which recorded
            tokens are the target's own; nothing else of its weights is read.
        draft_tokens: how many tokens a round drafts; what the draft states, or 4 for a chain, where None.
        device: where it runs.
        progress: told now and then how far it is.

    Raises:
        CheckpointError: the draft or the target cannot be read.
        TraceError: a recording does not fit the draft.
        TargetMissingError: the draft shares a tensor with a target that was not given.
        LayerBuildError: the draft does not build; NoReferenceError where there is no replay of its family.
    """
    from pytest_specdecode.replay.run import replay as run
    from pytest_specdecode.replay.target_weights import TargetWeights

    return run(
        open_draft(path),
        Trace.open(trace),
        target=None if target is None else TargetWeights(target),
        draft_tokens=draft_tokens,
        device=device,
        progress=progress,
    )


def update_baseline(path: Path, report: Report) -> None:
    """Write the accepted lengths that `report` holds into the baseline `path`, beside those of other drafts that are there.

    A figure that is only agreement with a recorded text is not one to be held to, and is left out.

    Raises:
        DraftError: the report holds no accepted length, or the file cannot be written.
    """
    entries = {}
    for draft in report.drafts:
        for result in draft.results:
            if result.id == "acceptance.length" and result.figures.get("label") == "accepted length":
                entries[draft.name] = baselines.Entry.of(result.figures)
    if not entries:
        raise DraftError("no accepted length was measured; the trace is given with --draft-trace=DIR", path=path)
    baselines.update(path, entries)


def open_context(
    path: Path,
    *,
    target: Path | None = None,
    engines: Sequence[str] | str | None = None,
    serve: str | ServeOptions | None = None,
    device: str = "cpu",
    trace: Path | None = None,
    draft_tokens: int | None = None,
    baseline: Path | None = None,
    fused_kv: str | Callable[..., Any] | Subject | None = None,
    pictures: bool = False,
) -> rules.Context:
    """What the checks of one draft share; errors as `check_draft`."""
    return context_of(
        families.load(Checkpoint.open(path)),
        target=target,
        engines=engines,
        serve=serve,
        device=device,
        trace=trace,
        draft_tokens=draft_tokens,
        baseline=baseline,
        fused_kv=fused_kv,
        pictures=pictures,
    )


def context_of(
    draft: Draft,
    *,
    target: Path | None = None,
    engines: Sequence[str] | str | None = None,
    serve: str | ServeOptions | None = None,
    device: str = "cpu",
    trace: Path | None = None,
    draft_tokens: int | None = None,
    baseline: Path | None = None,
    fused_kv: str | Callable[..., Any] | Subject | None = None,
    pictures: bool = False,
    progress: Callable[[str], None] | None = None,
) -> rules.Context:
    """As `open_context`, for a draft that is open already."""
    return rules.Context(
        draft=draft,
        target=None if target is None else Target.open(target),
        device=device,
        engines=known_engines.select(_names(engines)),
        judged=engines is not None,
        serve=ServeOptions.parse(serve) if isinstance(serve, str) else serve or ServeOptions(),
        trace=None if trace is None else Trace.open(trace),
        draft_tokens=draft_tokens,
        baseline=None if baseline is None else baselines.read(baseline),
        fused_kv=None if fused_kv is None else subject_of(fused_kv),
        pictures=pictures,
        progress=progress,
    )


def run_check(item: rules.Check, context: rules.Context) -> CheckResult:
    """Run one check; a defect of the check itself fails that check alone and says so."""
    try:
        return rules.run(item, context)
    except Exception as error:
        message = f"the check itself broke, which is a defect of pytest-specdecode: {type(error).__name__}: {error}"
        return CheckResult(id=item.id, status="failed", message=message)


def draft_report(path: Path, context: rules.Context, results: Iterable[CheckResult]) -> DraftReport:
    """The results of one draft with its description."""
    draft = context.draft
    return DraftReport(
        path=os.fspath(path),
        name=draft.name,
        description=draft.describe(),
        family=None if draft.spec is None else draft.spec.family,
        packaging=None if draft.spec is None else draft.spec.packaging,
        spec=draft.spec,
        results=tuple(results),
        engines=known_engines.versions(context.engines),
        fused_kv=OURS if context.fused_kv is None else context.fused_kv.name,
        config_file=os.path.abspath(draft.checkpoint.path / CONFIG_NAME),
    )


def about(results: Iterable[CheckResult]) -> dict[str, CheckText]:
    """What the checks of `results` are about, in words, for the reports that show it."""
    found = (rules.REGISTRY[id] for id in dict.fromkeys(result.id for result in results) if id in rules.REGISTRY)
    return {item.id: CheckText(title=item.title, why=item.why, fix=item.fix) for item in found}


def _names(names: Iterable[str] | str | None) -> list[str] | None:
    if names is None:
        return None
    parts = names.split(",") if isinstance(names, str) else list(names)
    return [name.strip() for name in parts if name.strip()]
