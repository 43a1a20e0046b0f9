"""What the user asks for: options, their ini twins, and the one frozen record that the rest of the plugin reads.

Values are taken as text and judged here, so that a bad one is a single `ERROR:` line and exit status 4 rather than argparse's usage page or
a traceback, and so that they cross to xdist's workers as they are.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_specdecode.checks import Check
    from pytest_specdecode.checks.subject import Subject
    from pytest_specdecode.engines import ServeOptions
    from pytest_specdecode.families import Draft
    from pytest_specdecode.plugin.expected import ExpectedFailure
    from pytest_specdecode.report import OldReport
    from pytest_specdecode.target import Target

MODEL = "--draft-model"
TARGET = "--draft-target"
ENGINE = "--draft-engine"
SERVE = "--draft-serve"
CHECKS = "--draft-checks"
SKIP = "--draft-skip"
DEVICE = "--draft-device"
REQUIRE = "--draft-require"
MAX_EXAMPLES = "--draft-max-examples"
REPORT = "--draft-report"
COMPARE = "--draft-compare"
TRACE = "--draft-trace"
TOKENS = "--draft-tokens"
BASELINE = "--draft-baseline"
UPDATE_BASELINE = "--draft-update-baseline"
FUSED_KV = "--draft-fused-kv"
WRITE_TEST = "--draft-write-test"
LIST_CHECKS = "--draft-list-checks"

#: Ini name only: what is expected to fail belongs to the project, with its reason.
EXPECTED = "draft_expected_failures"

DEVICES = ("auto", "cpu", "cuda")
DEVICE_FORM = ", ".join(DEVICES)
NEEDS = ("model", "target", "serving", "tensors", "triton", "gpu", "trace")
DEFAULT_MAX_EXAMPLES = 20
#: More than any draft proposes a round; each costs a row of every start.
MOST_TOKENS = 1024

_MODEL_HELP = (
    "judge the draft model in DIR, which holds config.json and the weights; may be given several times. The built-in suite then runs as "
    "`draft-model`, beside the other tests or, with `draft-model` as the only argument, alone. Where no such directory exists, "
    "ORG/NAME[@REVISION] is a model on the Hugging Face Hub, as hf://ORG/NAME[@REVISION] always is. Default: none"
)
_TARGET_HELP = (
    "directory of the target that the draft proposes for, or its name on the Hub, as in --draft-model; its config.json is enough. "
    "Default: none"
)
_ENGINE_HELP = (
    "judge the draft for the engine NAME; may be given several times. What one of them stops at or serves wrong is then an error, what one "
    "falls back from a warning. Default: every engine is shown and each check has its own severity"
)
_SERVE_HELP = (
    "the options that the server is started with, as in 'algorithm=EAGLE3 num-steps=3 kv-cache-dtype=fp8_e4m3', or its command line; they "
    "are checked against the draft. Default: none"
)
_CHECKS_HELP = "run only these checks: ids and groups with commas between, such as rope,weights.shapes. Default: all"
_SKIP_HELP = "leave these checks out: ids and groups with commas between. Default: none"
_DEVICE_HELP = (
    "where layers and kernels run: auto (cuda where torch sees a device, else cpu), cpu or cuda. Default: auto"
)
_REQUIRE_HELP = f"fail what is skipped or inconclusive for want of these: {', '.join(NEEDS)}, or all, with commas between. Default: none"
_MAX_EXAMPLES_HELP = (
    "examples that a test which draws its inputs should run; it is the value of the fixture draft_max_examples. Built-in checks with fixed "
    f"inputs do not read it. Default: {DEFAULT_MAX_EXAMPLES}"
)
_REPORT_HELP = "write the results to FILE; the suffix tells the form (.json, .md, .html, .sarif); may be given several times. Default: none"
_COMPARE_HELP = (
    "say what got worse, better, new and gone against FILE, a .json report of an older run; drafts are matched by name, or one to one. "
    "Default: none"
)
_TRACE_HELP = (
    "replay the draft over the target's recorded hidden states in DIR (hs_<i>.safetensors of speculators, .ckpt of SpecForge) and measure "
    "its accepted length. Default: none"
)
_TOKENS_HELP = (
    "tokens that the draft proposes a round in a replay. Default: what its file states, or a block of its size, else 4"
)
_BASELINE_HELP = (
    "fail a draft whose accepted length on the trace is under 95 percent of what FILE (.json) says, beyond chance. "
    "Default: none"
)
_UPDATE_BASELINE_HELP = "write the measured accepted lengths to the file of --draft-baseline instead of judging by it"
_FUSED_KV_HELP = (
    "hold this implementation of the stacked K/V path to account on the draft's layers: MODULE:CLASS, called with (layers, rotary_emb, "
    "num_kv_heads, head_dim, device), or ours, sglang, vllm (as installed). Default: ours, and only its numbers"
)
_WRITE_TEST_HELP = "write a test file for the draft of --draft-model, to be kept and edited, to FILE (.py), and exit"
_LIST_CHECKS_HELP = "print the checks that --draft-checks and --draft-skip select, and exit"


@dataclass(frozen=True, kw_only=True)
class GivenDraft:
    """A draft that the user named.

    Attributes:
        label: its part of test ids: the directory's name, with parents' names before it where that is needed to tell two apart.
        path: the directory, as the user gave it (relative ini values with the rootdir before them), or the name of the model on the Hub.
        draft: the opened checkpoint.
    """

    label: str
    path: str
    draft: Draft = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What this run was asked to do.

    Attributes:
        drafts: in the order given, without repetitions.
        on_command_line: whether the drafts were named there rather than in the ini file.
        target: the target's directory; that of a target on the Hub is in the cache.
        target_model: what it says of itself.
        engines: names of the engines that the draft is judged for; None where all are shown.
        serve: the options that the server is started with; None where none were given.
        checks: the selected checks; None for all.
        device: `cpu` or `cuda`.
        require: wants that turn a skip or an inconclusive result into a failure.
        max_examples: for tests that draw their inputs.
        reports: files to write results to, without repetitions.
        compare: the older report that this run is compared with.
        expected: failures that the project knows of.
        trace: directory or file of recorded hidden states.
        draft_tokens: proposed a round; None for what the draft states.
        baseline: file of accepted lengths.
        updates_baseline: whether it is written rather than judged by.
        fused_kv: the implementation of the stacked K/V path that is held to account; None where none was named.
    """

    drafts: tuple[GivenDraft, ...] = ()
    on_command_line: bool = False
    target: str | None = None
    target_model: Target | None = None
    engines: tuple[str, ...] | None = None
    serve: ServeOptions | None = None
    checks: tuple[Check, ...] | None = None
    device: str = "cpu"
    require: frozenset[str] = frozenset()
    max_examples: int = DEFAULT_MAX_EXAMPLES
    reports: tuple[Path, ...] = ()
    compare: OldReport | None = None
    expected: tuple[ExpectedFailure, ...] = ()
    trace: str | None = None
    draft_tokens: int | None = None
    baseline: Path | None = None
    updates_baseline: bool = False
    fused_kv: Subject | None = None

    @property
    def pictures(self) -> bool:
        """Whether a report is asked for that has pictures."""
        return any(file.suffix == ".html" for file in self.reports)

    def requires(self, *wants: str) -> str | None:
        """The first of `wants` whose absence is to be a failure, or None."""
        return next((want for want in wants if want in self.require), None)


UNUSED = Settings()
SETTINGS = pytest.StashKey[Settings]()

#: Directory of each model on the Hub that this run names, by the text that names it. Workers are handed it, and ask the Hub nothing.
ON_THE_HUB = pytest.StashKey[dict[str, str]]()
WORKER_INPUT = "specdecode_hub"


def add(parser: pytest.Parser) -> None:
    """Declare every option, and an ini twin where a project would commit the value."""
    group = parser.getgroup("specdecode", "draft models for speculative decoding (pytest-specdecode)")
    group.addoption(MODEL, action="append", metavar="DIR", help=_MODEL_HELP)
    group.addoption(TARGET, metavar="DIR", help=_TARGET_HELP)
    group.addoption(ENGINE, action="append", metavar="NAME", help=_ENGINE_HELP)
    group.addoption(SERVE, metavar="OPTIONS", help=_SERVE_HELP)
    group.addoption(CHECKS, metavar="LIST", help=_CHECKS_HELP)
    group.addoption(SKIP, metavar="LIST", help=_SKIP_HELP)
    group.addoption(DEVICE, metavar="|".join(DEVICES), help=_DEVICE_HELP)
    group.addoption(REQUIRE, metavar="LIST", help=_REQUIRE_HELP)
    group.addoption(MAX_EXAMPLES, metavar="N", help=_MAX_EXAMPLES_HELP)
    group.addoption(REPORT, action="append", metavar="FILE", help=_REPORT_HELP)
    group.addoption(COMPARE, metavar="FILE", help=_COMPARE_HELP)
    group.addoption(TRACE, metavar="DIR", help=_TRACE_HELP)
    group.addoption(TOKENS, metavar="N", help=_TOKENS_HELP)
    group.addoption(BASELINE, metavar="FILE", help=_BASELINE_HELP)
    group.addoption(UPDATE_BASELINE, action="store_true", default=False, help=_UPDATE_BASELINE_HELP)
    group.addoption(FUSED_KV, metavar="MODULE:CLASS", help=_FUSED_KV_HELP)
    group.addoption(WRITE_TEST, metavar="FILE", help=_WRITE_TEST_HELP)
    group.addoption(LIST_CHECKS, action="store_true", default=False, help=_LIST_CHECKS_HELP)
    parser.addini("draft_model", _twin(MODEL, "one directory a line, relative to the rootdir"), "linelist", [])
    parser.addini("draft_target", _twin(TARGET, "relative to the rootdir"), "string", "")
    parser.addini("draft_engine", _twin(ENGINE, "names with spaces between"), "args", [])
    parser.addini("draft_serve", _twin(SERVE, "name=value pairs with spaces between"), "string", "")
    parser.addini("draft_checks", _twin(CHECKS, "names with spaces between"), "args", [])
    parser.addini("draft_skip", _twin(SKIP, "names with spaces between"), "args", [])
    parser.addini(
        EXPECTED,
        "failures that are known, one `check-id[draft-name]: reason` a line; without [draft-name] for every draft",
        "linelist",
        [],
    )
    parser.addini("draft_device", _twin(DEVICE, DEVICE_FORM), "string", "")
    parser.addini("draft_require", _twin(REQUIRE, "names with spaces between"), "args", [])
    parser.addini("draft_trace", _twin(TRACE, "relative to the rootdir"), "string", "")
    parser.addini("draft_tokens", _twin(TOKENS, "a whole number"), "string", "")
    parser.addini("draft_baseline", _twin(BASELINE, "relative to the rootdir"), "string", "")
    parser.addini("draft_fused_kv", _twin(FUSED_KV, "a module is looked for in the rootdir, too"), "string", "")


_INI_NAMES = tuple(
    option.removeprefix("--").replace("-", "_")
    for option in (MODEL, TARGET, ENGINE, SERVE, CHECKS, SKIP, DEVICE, REQUIRE, TRACE, TOKENS, BASELINE, FUSED_KV)
)


def any_given(config: pytest.Config) -> bool:
    """Whether the user asks anything of this plugin, on the command line or in the ini file."""
    given = (
        *(MODEL, TARGET, ENGINE, SERVE, CHECKS, SKIP, DEVICE, REQUIRE, MAX_EXAMPLES),
        *(REPORT, COMPARE, TRACE, TOKENS, BASELINE, FUSED_KV),
    )
    on_command_line = any(config.getoption(option) is not None for option in given) or config.getoption(UPDATE_BASELINE)
    return on_command_line or any(map(config.getini, _INI_NAMES))


def read(config: pytest.Config) -> Settings:
    """Judge every value.

    Raises:
        pytest.UsageError: the first one that will not do, in one line.
    """
    target = next(iter(_models(config, TARGET).values()), None)
    return Settings(
        drafts=_drafts(config),
        on_command_line=config.getoption(MODEL) is not None,
        target=target,
        target_model=None if target is None else _target_model(config, target),
        engines=_engines(config),
        serve=_serve(config),
        checks=selected_checks(config),
        device=_device(_text(config, DEVICE) or "auto"),
        require=_require(_names(config, REQUIRE) or []),
        max_examples=_max_examples(config.getoption(MAX_EXAMPLES)),
        reports=_reports(config),
        compare=_compare(config),
        expected=_expected(config),
        trace=_trace(config),
        draft_tokens=_tokens(config),
        baseline=_baseline(config),
        updates_baseline=config.getoption(UPDATE_BASELINE),
        fused_kv=_fused_kv(config),
    )


def selected_checks(config: pytest.Config) -> tuple[Check, ...]:
    """The checks that the options select.

    Raises:
        pytest.UsageError: a name that is no check's and no group's, or nothing is left.
    """
    from pytest_specdecode import checks as rules

    chosen, dropped = _names(config, CHECKS), _names(config, SKIP)
    for option, names in ((CHECKS, chosen), (SKIP, dropped)):
        try:
            rules.select(names)
        except rules.UnknownCheckError as error:
            raise _refusal(option, f"{error.message} (--draft-list-checks prints all)") from None
    selected = rules.select(chosen, dropped)
    if not selected:
        raise _refusal(SKIP, "no check is left; to run no suite and keep the fixtures, use --deselect=draft-model")
    return selected


def checks_of(settings: Settings) -> tuple[Check, ...]:
    """The checks that `settings` selects."""
    if settings.checks is not None:
        return settings.checks
    from pytest_specdecode import checks as rules

    return rules.select()


def the_draft(config: pytest.Config) -> GivenDraft:
    """The one draft that a test is written for.

    Raises:
        pytest.UsageError: there is none, there are several, or it cannot be read.
    """
    drafts = _drafts(config)
    if len(drafts) != 1:
        found = ", ".join(given.label for given in drafts) or "there is none"
        raise _refusal(WRITE_TEST, f"a test is written for one draft; give one {MODEL}=DIR ({found})")
    (given,) = drafts
    if (fault := given.draft.unread_config) is not None:
        raise _refusal(WRITE_TEST, str(fault))
    if given.draft.spec is None:
        raise _refusal(WRITE_TEST, given.draft.describe())
    return given


def test_file(config: pytest.Config) -> Path:
    """The file that a test is to be written to.

    Raises:
        pytest.UsageError: it is there already, it is no .py, or its directory is not there or cannot be written to.
    """
    text: str = config.getoption(WRITE_TEST)
    file = config.invocation_params.dir / os.path.expanduser(text)
    if file.suffix != ".py":
        raise _refusal(f"{WRITE_TEST}={text}", "a name that ends in .py is due")
    if file.name in ("conftest.py", "__init__.py"):
        raise _refusal(f"{WRITE_TEST}={text}", "pytest has another use for a file of that name; give another name")
    if os.path.lexists(file):
        raise _refusal(f"{WRITE_TEST}={text}", "is there already, and is not overwritten; give another name")
    _require_parent(f"{WRITE_TEST}={text}", file)
    return file


# --- each value ---


def _drafts(config: pytest.Config) -> tuple[GivenDraft, ...]:
    from pytest_specdecode.checkpoint import Checkpoint
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.families import load

    paths: dict[str, str] = {}
    for path, directory in _models(config, MODEL).items():
        # Opened by its full path, so that a test may change the working directory.
        paths.setdefault(os.path.abspath(directory), path)
    on_the_hub = config.stash.get(ON_THE_HUB, {})
    named = [_hub_name(path) if path in on_the_hub else absolute for absolute, path in paths.items()]
    found = []
    for (absolute, path), label in zip(paths.items(), _labels(named), strict=True):
        try:
            draft = load(Checkpoint.open(absolute))
        except DraftError as error:
            raise _refusal(f"{MODEL}={path}", error.message) from None
        except OSError as error:
            raise _refusal(f"{MODEL}={path}", f"cannot be opened: {error.strerror or error}") from None
        draft.label = label
        found.append(GivenDraft(label=label, path=path, draft=draft))
    return tuple(found)


def _hub_name(text: str) -> str:
    """`hf://org/name@refs/pr/1` as a path to make a label from."""
    repo, at, revision = text.removeprefix("hf://").partition("@")
    return f"/{repo}{at}{revision.replace('/', '_')}"


def _labels(paths: Sequence[str]) -> list[str]:
    """A label per path: its last part, or as many of its last parts as tell it from the others."""
    parts = [[_tame(part) for part in Path(path).parts[1:] or ("root",)] for path in paths]
    depths = [1] * len(paths)
    while True:
        labels = ["/".join(names[-depth:]) for names, depth in zip(parts, depths, strict=True)]
        alike = [index for index, label in enumerate(labels) if labels.count(label) > 1]
        longer = [index for index in alike if depths[index] < len(parts[index])]
        if not longer:
            break
        for index in longer:
            depths[index] += 1
    # Only names that differ in what an id cannot hold are still alike here.
    return [
        f"{label}.{labels[:index].count(label) + 1}" if index in alike else label for index, label in enumerate(labels)
    ]


def names_of(draft: Draft) -> tuple[str, ...]:
    """What a line of the ini file may call `draft`: its label, its directory's name, and that name as test ids write it."""
    name = os.path.basename(os.path.abspath(draft.path))
    return tuple(dict.fromkeys((draft.name, name, _tame(name))))


def without_draft(config: pytest.Config) -> str | None:
    """What to say where the command line asks how a draft is to be judged, and names none; None where it does not."""
    given = [
        option
        for option in (TARGET, ENGINE, SERVE, CHECKS, TRACE, TOKENS, BASELINE, FUSED_KV)
        if config.getoption(option)
    ]
    if not given:
        return None
    return f"{', '.join(given)}: no draft was judged, since {MODEL}=DIR is missing"


def _tame(name: str) -> str:
    """`name` without what has a meaning in test ids or does not print."""
    return re.sub(r"[^\w.+=@-]", "_", name)


def _models(config: pytest.Config, option: str) -> dict[str, str]:
    """The directory of each model that `option` names, by the text that names it; those on the Hub are laid out first."""
    from pytest_specdecode import hub
    from pytest_specdecode.errors import DraftError

    known = config.stash.setdefault(ON_THE_HUB, dict(getattr(config, "workerinput", {}).get(WORKER_INPUT, {})))
    models: dict[str, str] = {}
    here = config.invocation_params.dir if config.getoption(option) is not None else config.rootpath
    for text, path in _given_paths(config, option):
        try:
            reference = hub.parse(text, here)
            if reference is not None and text not in known:
                known[text] = str(hub.resolve(reference))
        except DraftError as error:
            where = "" if text.startswith(hub.SCHEME) else "there is no such directory, and "
            raise _refusal(f"{option}={text}", f"{where}{error.message}") from None
        models[path if reference is None else text] = path if reference is None else known[text]
    return models


def _target_model(config: pytest.Config, target: str) -> Target:
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.target import Target

    try:
        return Target.open(target)
    except DraftError as error:
        given = {directory: text for text, directory in config.stash[ON_THE_HUB].items()}.get(target, target)
        raise _refusal(f"{TARGET}={given}", error.message) from None


def _engines(config: pytest.Config) -> tuple[str, ...] | None:
    names = _names(config, ENGINE)
    if names is None:
        return None
    from pytest_specdecode import engines
    from pytest_specdecode.errors import DraftError

    try:
        return engines.select(dict.fromkeys(names))
    except DraftError as error:
        raise _refusal(ENGINE, error.message) from None


def _serve(config: pytest.Config) -> ServeOptions | None:
    text = _text(config, SERVE)
    if text is None:
        return None
    from pytest_specdecode.engines import ServeOptionError, ServeOptions

    try:
        return ServeOptions.parse(text)
    except ServeOptionError as error:
        raise _refusal(SERVE, error.message) from None


def _device(name: str) -> str:
    if name not in DEVICES:
        raise _refusal(f"{DEVICE}={name}", f"is none of {DEVICE_FORM}")
    if name == "cpu" or (name == "auto" and not _gpu_possible()):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise _refusal(f"{DEVICE}=cuda", "torch sees no CUDA device here; use auto or cpu")
    return "cpu"


def _gpu_possible() -> bool:
    """Whether it is worth importing torch, which takes seconds, to ask for a GPU."""
    if sys.platform == "darwin":
        return False
    if sys.platform != "linux" or "torch" in sys.modules:
        return True
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))


def _require(names: Iterable[str]) -> frozenset[str]:
    known = (*NEEDS, "all")
    for name in names:
        if name not in known:
            raise _refusal(REQUIRE, f"{name!r} is none of {', '.join(known)}{_hint(name, known)}")
    return frozenset(known if "all" in names else names)


def _max_examples(text: str | None) -> int:
    if text is None:
        return DEFAULT_MAX_EXAMPLES
    if not text.isdecimal() or int(text) < 1:
        raise _refusal(f"{MAX_EXAMPLES}={text}", "is not a whole number of at least 1")
    return int(text)


def _trace(config: pytest.Config) -> str | None:
    place = _directory_given(config, TRACE)
    if place is None:
        return None
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.replay.traces import Trace

    try:
        Trace.open(place)
    except DraftError as error:
        raise _refusal(f"{TRACE}={place}", error.message) from None
    # By its full path, so that a test may change the working directory.
    return os.path.abspath(place)


def _tokens(config: pytest.Config) -> int | None:
    text = _text(config, TOKENS)
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TOKENS:
        raise _refusal(f"{TOKENS}={text}", f"is not a whole number from 1 to {MOST_TOKENS}")
    return int(text)


def _baseline(config: pytest.Config) -> Path | None:
    place, updates = _directory_given(config, BASELINE), config.getoption(UPDATE_BASELINE)
    if place is None:
        if updates:
            raise _refusal(UPDATE_BASELINE, f"says nothing of the file; give it with {BASELINE}=FILE")
        return None
    file = Path(os.path.abspath(place))
    if updates and not file.exists() and file.parent.is_dir():
        return file
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.replay import baseline

    if not file.is_file():
        raise _refusal(f"{BASELINE}={place}", f"there is no such file; {UPDATE_BASELINE} writes it")
    try:
        baseline.read(file)
    except DraftError as error:
        raise _refusal(f"{BASELINE}={place}", error.message) from None
    return file


def _fused_kv(config: pytest.Config) -> Subject | None:
    text = _text(config, FUSED_KV)
    if text is None:
        return None
    if not text.strip():
        raise _refusal(f"{FUSED_KV}=", "is empty; give MODULE:CLASS, ours, sglang or vllm")
    from pytest_specdecode.checks.subject import subject_of
    from pytest_specdecode.errors import DraftError

    # A module of the project's own, as `python -m pytest` would find it; what is installed comes first.
    place = config.rootpath if config.getoption(FUSED_KV) is None else config.invocation_params.dir
    if ":" in text and str(place) not in sys.path:
        sys.path.append(str(place))
    try:
        return subject_of(text.strip())
    except DraftError as error:
        raise _refusal(f"{FUSED_KV}={text}", error.message) from None


def _expected(config: pytest.Config) -> tuple[ExpectedFailure, ...]:
    lines = config.getini(EXPECTED)
    if not lines:
        return ()
    from pytest_specdecode.plugin import expected

    try:
        return expected.parse(lines)
    except expected.ExpectedFailureError as error:
        raise _refusal(EXPECTED, str(error)) from None


def _reports(config: pytest.Config) -> tuple[Path, ...]:
    given: list[str] = config.getoption(REPORT) or []
    return tuple(dict.fromkeys(_report(text, config) for text in given))


def _report(text: str, config: pytest.Config) -> Path:
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.report import require_suffix

    file = config.invocation_params.dir / os.path.expanduser(text)
    try:
        require_suffix(file)
    except DraftError as error:
        raise _refusal(f"{REPORT}={text}", error.message) from None
    if file.is_dir():
        raise _refusal(f"{REPORT}={text}", "is a directory")
    _require_parent(f"{REPORT}={text}", file)
    return file


def _compare(config: pytest.Config) -> OldReport | None:
    text: str | None = config.getoption(COMPARE)
    if text is None:
        return None
    from pytest_specdecode.errors import DraftError
    from pytest_specdecode.report import read_report

    try:
        return replace(read_report(config.invocation_params.dir / os.path.expanduser(text)), path=text)
    except DraftError as error:
        raise _refusal(f"{COMPARE}={text}", error.message) from None


def _require_parent(option: str, file: Path) -> None:
    if not file.parent.is_dir():
        raise _refusal(option, f"there is no directory {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise _refusal(option, f"the directory {file.parent} cannot be written to")


# --- where values come from: the command line first, then the ini file ---


def _text(config: pytest.Config, option: str) -> str | None:
    value: str | None = config.getoption(option)
    return value if value is not None else config.getini(_ini_name(option)) or None


def _names(config: pytest.Config, option: str) -> list[str] | None:
    """The names given to a list option, with commas between or in several places; None where it was not given."""
    given = config.getoption(option)
    if given is None:
        given = config.getini(_ini_name(option)) or None
    if given is None:
        return None
    names = [name.strip() for text in ([given] if isinstance(given, str) else given) for name in text.split(",")]
    if not any(names):
        raise _refusal(option, "names nothing")
    return [name for name in names if name]


def _given_paths(config: pytest.Config, option: str) -> list[tuple[str, str]]:
    """What was given on the command line, else in the ini file, each with the path that it means: in the ini file under the rootdir."""
    given = config.getoption(option)
    if given is not None:
        paths = [given] if isinstance(given, str) else given
        if not all(paths):
            raise _refusal(f"{option}=", "is empty; give a directory")
        return [(path, os.path.expanduser(path)) for path in paths]
    stated = config.getini(_ini_name(option))
    lines = [stated] if isinstance(stated, str) else stated
    return [(line, os.path.join(config.rootpath, os.path.expanduser(line))) for line in lines if line]


def _directory_given(config: pytest.Config, option: str) -> str | None:
    return next((path for _, path in _given_paths(config, option)), None)


def _ini_name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _twin(option: str, form: str) -> str:
    return f"used where {option} is not given; {form}"


def _hint(name: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _refusal(what: str, why: str) -> pytest.UsageError:
    from pytest_specdecode.errors import printable
    from pytest_specdecode.report.github import inert

    return pytest.UsageError(inert(printable(" ".join(f"{what}: {why}".split()))))
