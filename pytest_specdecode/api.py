"""The script door: the same checks without pytest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from pytest_specdecode import checks as rules
from pytest_specdecode import engines as known_engines
from pytest_specdecode import families
from pytest_specdecode.checkpoint import CONFIG_NAME, Checkpoint
from pytest_specdecode.engines import ServeOptions
from pytest_specdecode.errors import UnknownFamilyError
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.report import DraftReport, Report
from pytest_specdecode.target import Target

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
    engines: Sequence[str] | None = None,
    checks: Iterable[str] | str | None = None,
    skip: Iterable[str] | str | None = None,
    *,
    serve: str | ServeOptions | None = None,
    device: str = "cpu",
) -> Report:
    """Run the checks on the checkpoint in `path`.

    Args:
        path: the draft's directory.
        target: the target's directory; its `config.json` is enough.
        engines: names of the engines whose outcomes are shown and count: an error is then what one of them stops at or serves wrong, and
            what one falls back from is a warning. Where None, all are shown, and each finding has the severity of its check.
        checks: ids and groups to run, such as `"rope"` or `["weights.shapes", "taps"]`; all where None.
        skip: ids and groups to leave out.
        serve: the options that the server is to be started with, such as `"algorithm=EAGLE3 num-steps=3"`.
        device: where numeric checks run: `cpu`, `cuda`.

    Returns:
        A report with one result per selected check. A checkpoint that is broken inside has failed and inconclusive checks.

    Raises:
        CheckpointError: there is no checkpoint in `path`, or no readable configuration in `target`.
        UnknownCheckError: `checks` or `skip` names no check and no group.
        ServeOptionError: `serve` states an unknown option or a value that it cannot have.
        DraftError: an unknown engine.
    """
    selected = rules.select(_names(checks), _names(skip))
    context = open_context(path, target=target, engines=engines, serve=serve, device=device)
    return Report(drafts=(draft_report(path, context, [run_check(item, context) for item in selected]),))


def open_context(
    path: Path,
    *,
    target: Path | None = None,
    engines: Sequence[str] | None = None,
    serve: str | ServeOptions | None = None,
    device: str = "cpu",
) -> rules.Context:
    """What the checks of one draft share; errors as `check_draft`."""
    draft = families.load(Checkpoint.open(path))
    return context_of(draft, target=target, engines=engines, serve=serve, device=device)


def context_of(
    draft: Draft,
    *,
    target: Path | None = None,
    engines: Sequence[str] | None = None,
    serve: str | ServeOptions | None = None,
    device: str = "cpu",
) -> rules.Context:
    """As `open_context`, for a draft that is open already."""
    return rules.Context(
        draft=draft,
        target=None if target is None else Target.open(target),
        device=device,
        engines=known_engines.select(engines),
        judged=engines is not None,
        serve=ServeOptions.parse(serve) if isinstance(serve, str) else serve or ServeOptions(),
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
    )


def _names(names: Iterable[str] | str | None) -> list[str] | None:
    if names is None:
        return None
    parts = names.split(",") if isinstance(names, str) else list(names)
    return [name.strip() for name in parts if name.strip()]
