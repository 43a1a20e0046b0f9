"""Fixtures over the draft that --draft-model names.

All are of session scope and meant to be read only, so that tests under `@given` may ask for them; where a test wants to change layers it
takes fresh ones from a `make_...` fixture. What a fixture stands on is imported when it is first used.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import pytest

from pytest_specdecode.plugin.options import SETTINGS, GivenDraft, Settings

if TYPE_CHECKING:
    import torch

    from pytest_specdecode.checks import Check, Context
    from pytest_specdecode.checks.subject import Subject
    from pytest_specdecode.families import Draft, ReferenceLayer
    from pytest_specdecode.fused_kv import FusedKV
    from pytest_specdecode.spec import DraftSpec
    from pytest_specdecode.trials import Served

NO_MODEL = "no draft model: give one with --draft-model=DIR, or with draft_model in the ini file"
NO_TARGET = "no target: give its directory with --draft-target=DIR, or with draft_target in the ini file"


@pytest.fixture(scope="session")
def _given_draft(request: pytest.FixtureRequest) -> GivenDraft:
    """The draft that the user named; tests that depend on it run once per draft."""
    if not hasattr(request, "param"):
        _absent("model", NO_MODEL, request.config.stash[SETTINGS])
    given: GivenDraft = request.param
    return given


@pytest.fixture(scope="session")
def draft(_given_draft: GivenDraft) -> Iterator[Draft]:
    """The draft under test, opened: its files, its family, its spec.

    A test runs once per --draft-model, and is skipped, with the reason, where none is given. A draft whose files are broken is opened too,
    and `draft.spec` is None where its family is not known. To test another draft, override this fixture, with session scope, in the
    rootdir's conftest:

        @pytest.fixture(scope="session")
        def draft():
            return open_draft(download("org/name"))
    """
    yield _given_draft.draft
    _given_draft.draft.checkpoint.close()


@pytest.fixture(scope="session")
def draft_spec(draft: Draft) -> DraftSpec:
    """What the draft is: `draft_spec.hidden_size`, `.layers[0].attention.num_kv_heads`, `.taps.ids`, …

    Fails, with the reason, where the configuration cannot be read or the family is not known.
    """
    if draft.unread_config is not None:
        pytest.fail(str(draft.unread_config), pytrace=False)
    if draft.spec is None:
        pytest.fail(draft.describe(), pytrace=False)
    return draft.spec


@pytest.fixture(scope="session")
def draft_layers(draft: Draft, draft_spec: DraftSpec, draft_device: str) -> tuple[ReferenceLayer, ...]:
    """The draft's layers as readable eager torch, with the stored weights in the stored dtype, on `draft_device`.

    One object for the whole session; do not change it. For float64, or for layers to change, see `make_draft_layers`. Fails, with the
    reason, where a layer does not build.
    """
    with _in_one_line():
        return draft.layers(device=draft_device)


@pytest.fixture(scope="session")
def fused_kv(
    request: pytest.FixtureRequest, _stackable_draft: Draft, draft_layers: tuple[ReferenceLayer, ...], draft_device: str
) -> FusedKV | Served:
    """The stacked K/V path over all draft layers, as an engine builds it: one GEMM and one kernel for every layer.

        def test_mine(fused_kv):
            fused_kv.materialize(ctx_hidden, positions, write_layer_kv)

    With --draft-fused-kv it is that implementation's, which has `materialize`, `compute`, `hidden_size`, `dtype` and what else the
    implementation itself has; its Triton kernels are interpreted on a CPU.

    Skipped, with the reason, for a family that has no such path in any engine; fails where the layers cannot be stacked.
    """
    if (subject := _named_path(request)) is not None:
        from pytest_specdecode.trials import Served, error_text

        try:
            return Served(subject.build, draft_layers, draft_device)
        except Exception as error:
            reason = f"{subject.name} does not serve the layers of {_stackable_draft.name}: {error_text(error)}"
            pytest.fail(reason, pytrace=False)
    with _in_one_line():
        return _stackable_draft.fused_kv(layers=draft_layers, device=draft_device)


@pytest.fixture(scope="session")
def fused_kv_reference(
    _stackable_draft: Draft, draft_layers: tuple[ReferenceLayer, ...]
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The truth for `fused_kv`: a function of (ctx_hidden `[T, hidden_size]`, positions `[T]`).

    It returns K and V, each `[L, T, num_kv_heads, head_dim]` in float64, one layer at a time over `draft_layers`. Skipped as `fused_kv` is.
    """
    from pytest_specdecode.fused_kv import fused_kv_reference as reference

    def over_this_draft(ctx_hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(draft_layers, ctx_hidden, positions)

    return over_this_draft


@pytest.fixture(scope="session")
def make_draft_layers(
    draft: Draft, draft_spec: DraftSpec, draft_device: str
) -> Callable[..., tuple[ReferenceLayer, ...]]:
    """A function that builds the draft's layers anew: `make_draft_layers(dtype=None, device=None)`.

    Each call gives layers of its own, to be changed at will, also under `@given`. dtype None is the stored one, device None is
    `draft_device`.
    """

    def make(dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> tuple[ReferenceLayer, ...]:
        return draft.layers(dtype=dtype, device=draft_device if device is None else device)

    return make


@pytest.fixture(scope="session")
def make_fused_kv(
    request: pytest.FixtureRequest,
    _stackable_draft: Draft,
    make_draft_layers: Callable[..., tuple[ReferenceLayer, ...]],
    draft_device: str,
) -> Callable[..., FusedKV | Served]:
    """A function that builds the stacked K/V path anew: `make_fused_kv(layers=None, dtype=None, device=None, max_position_hint=None)`.

    Without layers it builds fresh ones. It raises FusedKVError for layers that cannot be stacked. Skipped as `fused_kv` is.
    With --draft-fused-kv it builds that implementation, and raises what that raises.
    """
    subject = _named_path(request)

    def make(
        layers: tuple[ReferenceLayer, ...] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_position_hint: int | None = None,
    ) -> FusedKV | Served:
        place = draft_device if device is None else device
        built = make_draft_layers(dtype, place) if layers is None else layers
        if subject is not None:
            from pytest_specdecode.trials import Served

            hint = {} if max_position_hint is None else {"max_position_hint": max_position_hint}
            return Served(subject.build, built, place, **hint)
        return _stackable_draft.fused_kv(layers=built, device=place, max_position_hint=max_position_hint)

    return make


@pytest.fixture(scope="session")
def draft_target(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """The configuration of the target that --draft-target names, as parsed; skipped, with the reason, where none is given."""
    settings = request.config.stash[SETTINGS]
    if settings.target_model is None:
        _absent("target", NO_TARGET, settings)
    return settings.target_model.config


@pytest.fixture(scope="session")
def draft_device(request: pytest.FixtureRequest) -> str:
    """Where layers and kernels run: `cpu` or `cuda`, as --draft-device says."""
    return request.config.stash[SETTINGS].device


@pytest.fixture(scope="session")
def draft_max_examples(request: pytest.FixtureRequest) -> int:
    """How many examples a test that draws its inputs should run, as --draft-max-examples says."""
    return request.config.stash[SETTINGS].max_examples


@pytest.fixture(scope="session")
def draft_context(request: pytest.FixtureRequest, draft: Draft) -> Context:
    """What the checks of the draft share; `pytest_specdecode.api.run_check(check, draft_context)` runs one."""
    from pytest_specdecode import api

    settings = request.config.stash[SETTINGS]
    return api.context_of(
        draft,
        target=settings.target,
        engines=settings.engines,
        serve=settings.serve,
        device=settings.device,
        trace=settings.trace,
        draft_tokens=settings.draft_tokens,
        baseline=None if settings.updates_baseline else settings.baseline,
        fused_kv=settings.fused_kv,
        pictures=settings.pictures,
        progress=_progress(request.config),
    )


@pytest.fixture(scope="session")
def draft_check(request: pytest.FixtureRequest, draft: Draft) -> Check:
    """A built-in check; tests that ask for it run once per selected check and draft."""
    raise AssertionError(f"{request.node} was not parametrised with the checks")


@pytest.fixture(scope="session")
def _stackable_draft(draft: Draft, draft_spec: DraftSpec) -> Draft:
    """The draft, where some engine stacks its K and V projections."""
    with _in_one_line():
        reason = draft.fused_kv_reason
    if reason is not None:
        pytest.skip(f"{draft.name} has no stacked K/V path: {reason}")
    return draft


def _named_path(request: pytest.FixtureRequest) -> Subject | None:
    """The implementation that --draft-fused-kv names, where it is not ours."""
    subject = request.config.stash[SETTINGS].fused_kv
    return None if subject is None or subject.is_ours else subject


def _progress(config: pytest.Config, seconds: float = 10.0) -> Callable[[str], None] | None:
    """What tells a person at the terminal how far a long check is, every few seconds; None where nobody would see it.

    A worker of xdist has no terminal of its own, but the errors' stream of the process that started it.
    """
    terminal = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        return None
    worker: str | None = getattr(config, "workerinput", {}).get("workerid")
    if worker is not None:
        with capture.global_and_fixture_disabled():
            if not _is_terminal(sys.stderr):
                return None
    elif terminal is None or not terminal.isatty:
        return None
    from pytest_specdecode.errors import printable

    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last < seconds:
            return
        last = time.monotonic()
        with capture.global_and_fixture_disabled():
            if worker is None:
                terminal.write_line(printable(text))
            else:
                # In one piece, from a line's start to its end: others write there, too.
                sys.stderr.write(f"\n[{worker}] {printable(text)}\n")
                sys.stderr.flush()

    return tell


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _absent(want: str, reason: str, settings: Settings) -> NoReturn:
    """Skip, or fail where --draft-require names `want`."""
    if settings.requires(want) is not None:
        pytest.fail(f"--draft-require={want}: {reason}", pytrace=False)
    pytest.skip(reason)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Fail with the reason alone where the draft cannot give what a fixture asks of it."""
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.report.github import inert

    try:
        yield
    except DraftError as error:
        # From None: pytest would show the error, and what it came from, above the reason.
        raise pytest.fail.Exception(inert(str(error)), pytrace=False) from None
