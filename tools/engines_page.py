"""Write docs/engines.md: what the engines' published fused-KV paths make of the contract, with figures.

python tools/engines_page.py            measure the engines that are installed, and rewrite their sections
python tools/engines_page.py --check    measure them again and fail where their sections say otherwise; of an engine that is not installed,
                                        fail where its section lacks a row or has one too many
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
sys.path.insert(0, str(ROOT / "tests" / "engines"))

import published  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from pytest_specdecode.contracts import ContractError, FusedKVContract, try_axis  # noqa: E402
from pytest_specdecode.contracts.fused_kv import ODD, PLAIN  # noqa: E402
from pytest_specdecode.engines.subjects import fused_kv_class  # noqa: E402
from pytest_specdecode.engines.subjects.installed import TRIED, version_of  # noqa: E402
from pytest_specdecode.errors import MissingDependencyError  # noqa: E402
from pytest_specdecode.fused_kv import AXES  # noqa: E402
from pytest_specdecode.launch import KernelOverflowError  # noqa: E402
from pytest_specdecode.memory import KernelMemoryError  # noqa: E402
from pytest_specdecode.numerics import NumericsError  # noqa: E402
from pytest_specdecode.strategies import BrokenStack, Stack  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A section of the page: its engine's package, what is measured, and the contract class with its gaps."""

    package: str
    title: str
    about: str
    contract: type[FusedKVContract]
    gaps: Mapping[str, str]


SUBJECTS = (
    Subject(
        package="sglang",
        title="SGLang: FusedKVMaterializeHelper",
        about="The class of `kernels/ops/speculative/fused_kv_materialize.py`, as it is. K is rounded at the store.",
        contract=published.SGLang,
        gaps=published.SGLANG_GAPS,
    ),
    Subject(
        package="vllm",
        title="vLLM: store_context_kv",
        about="""The function of `models/beam/nvidia/dflash2_context_ops.py`, in an adapter of ours that does what the model around it does:
the layers' rows stacked for one GEMM, epsilon and rope table from layer 0, all taken anew when it is told that weights were written to.
Three things differ. The model takes bfloat16 only, with a table of that dtype; here the function is given every dtype. Where a part of a
head is turned, the model's assertion is a NotImplementedError of the adapter. And the table grows up to its length, where vLLM's is whole
from the start. K is rounded after the norm, and at the store.""",
        contract=published.VLLM,
        gaps=published.VLLM_GAPS,
    ),
)

HEAD = """# What the engines' published paths make of the contract

Written by `python tools/engines_page.py`, which runs the fixed cases of `FusedKVContract` on the engines' own code, loaded from their
installed packages (`pip install --no-deps`). Nothing here is a statement about a server: what an engine refuses before it comes to its
fused path is not asked, and where that is known to happen the reason says so. [The checks](checks.md) have what a server does with a draft.

Everything ran on a CPU, interpreted. Outcomes: **rejected**, an error that names the odd layer; **rejected-unnamed**, a ValueError or
NotImplementedError that names none or another; **crashed**, any other error; **served-right**; **served-wrong**, with how far off, or which
access was outside its tensor, or which 32-bit offset wrapped. A compiled kernel reports neither of the last two: it goes on. A property
that **holds** is right in every case of its fixed test. The reasons are those under which `tests/engines/` declares the gaps, strictly: one
that closes fails there.
"""


def page(old: str = "") -> str:
    """The whole page; the section of an engine that is not installed is `old`'s."""
    known = sections(old)
    parts = [HEAD.rstrip()]
    for subject in SUBJECTS:
        fresh = None if missing(subject) else section(subject, datetime.date.today().isoformat())
        parts.append(fresh or known.get(subject.title, f"## {subject.title}\n\nNot measured."))
    return "\n\n".join(parts) + "\n"


def faults(text: str) -> Iterator[str]:
    """What is wrong with the page `text`, as far as that can be told here."""
    if not text.startswith(HEAD.rstrip()):
        yield "its first paragraphs are not the tool's"
    known = sections(text)
    for subject in SUBJECTS:
        there = known.get(subject.title)
        if there is None:
            yield f"no section on {subject.title}"
        elif missing(subject):
            yield from incomplete(subject, there)
        elif (found := section(subject, _date(there))) != there:
            yield from _differences(subject, there, found)


def incomplete(subject: Subject, text: str) -> Iterator[str]:
    """Rows that a section lacks or has too many, and reasons that are no longer those declared; no engine is needed for that."""
    rows = [re.match(r"\| `([\w-]+)` \| ([\w-]+) \|.*\| ?(.*?) ?\|$", line) for line in text.splitlines()]
    found = {row[1]: (row[2], row[3]) for row in rows if row}
    due = sorted(published.fixed_cases(subject.contract), key=lambda name: name not in AXES)
    if list(found) != due:
        odd = sorted(set(found) ^ set(due)) or "their order"
        yield f"{subject.title}: the rows are not the contract's: {odd}"
    for name, (outcome, reason) in found.items():
        if reason != subject.gaps.get(name, ""):
            yield f"{subject.title}: the reason of {name} is not the one declared"
        elif (outcome in ("rejected", "holds", "not-asked")) is (name in subject.gaps):
            yield f"{subject.title}: {name} is {outcome}, which is not what is declared"
    if f"{subject.package} {TRIED[subject.package]}," not in text:
        yield f"{subject.title}: not measured with {TRIED[subject.package]}"


def missing(subject: Subject) -> bool:
    """Whether the engine's package is not installed."""
    try:
        fused_kv_class(subject.package)
    except MissingDependencyError:
        return True
    return False


def sections(text: str) -> dict[str, str]:
    """The page's sections by title."""
    return {part.split("\n", 1)[0]: f"## {part.rstrip()}" for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}


# --- one engine ---------------------------------------------------------------------------------------------------------------------------


def section(subject: Subject, date: str) -> str:
    """What the installed engine does, measured now and dated `date`."""
    tools = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "triton"))
    lines = [
        f"## {subject.title}",
        "",
        subject.about,
        "",
        f"Measured {date} with {subject.package} {version_of(subject.package)}, {tools}.",
        "",
        "Four layers, of which 1 and 2 differ from the others in one axis:",
        "",
        "| axis | outcome | what happened | reason |",
        "|---|---|---|---|",
        *(_row(subject, axis, *_axis(subject, axis)) for axis in AXES),
        "",
        "The contract's other properties:",
        "",
        "| property | outcome | what happened | reason |",
        "|---|---|---|---|",
        *(_row(subject, name, *_property(run)) for name, run in _cases(subject).items() if name not in AXES),
        "",
        *_at_size(subject),
    ]
    return "\n".join(lines).rstrip()


def _row(subject: Subject, name: str, outcome: str, detail: str) -> str:
    return f"| `{name}` | {outcome} | {_cell(detail)} | {subject.gaps.get(name, '')} |"


def _axis(subject: Subject, axis: str) -> tuple[str, str]:
    odd = PLAIN.changed(**ODD[axis])
    stack = Stack(configs=[PLAIN, odd, odd, PLAIN], seed=1)
    outcome = try_axis(
        subject.contract.build,
        BrokenStack(axis=axis, odd_layer=1, layer=1, expected=None, got=None, stack=stack),
    )
    return outcome.kind, outcome.detail


def _cases(subject: Subject) -> dict[str, Callable[[], object]]:
    # With the gaps declared, because a case whose form a subject never serves is then asked in another.
    contract = type(subject.contract.__name__, (subject.contract,), {"known_gaps": subject.gaps})
    return published.fixed_cases(contract)


_OUTCOME = re.compile(r": (rejected|rejected-unnamed|crashed|served-right|served-wrong) \((.*)\)$")


def _property(run: Callable[[], object]) -> tuple[str, str]:
    try:
        run()
    except pytest.skip.Exception as skipped:
        return "not-asked", str(skipped)
    except NumericsError as error:
        return "served-wrong", f"{error.what} is off by {error.error:.2g}"
    except (KernelOverflowError, KernelMemoryError) as error:
        return "served-wrong", _first_line(error)
    except ContractError as error:
        stated = _OUTCOME.search(str(error))
        return (stated[1], stated[2]) if stated else ("served-wrong", _first_line(error))
    except (ValueError, NotImplementedError) as error:
        return "rejected-unnamed", f"{type(error).__name__}: {_first_line(error)}"
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {_first_line(error)}"
    return "holds", ""


def _at_size(subject: Subject) -> Iterator[str]:
    build = subject.contract.build
    yield "On rows of unit size, two layers of 2 heads of 128, 24 tokens at positions 0 to 230, the largest errors of layer 1:"
    yield ""
    yield "| layers | K | V |"
    yield "|---|---|---|"
    alike = [published.unit_layer(0), published.unit_layer(1)]
    for what, layers in (
        ("alike", alike),
        ("theta 1e6 and 1e4", published.another_theta()),
        ("biases of unit size", published.biased()),
    ):
        k, v = published.errors(build, layers)
        yield f"| {what} | {_figure(k)} | {_figure(v)} |"
    yield ""
    wraps = [tokens for tokens in (209_716, 209_717) if published.wraps(build, tokens)]
    says = f"a 32-bit offset wraps from {wraps[0]:,} tokens on" if wraps else "no 32-bit offset wraps at 209,717 tokens"
    yield f"With 5 layers of 8 heads of 128, {says}."


def _figure(error: float) -> str:
    return "rounding alone" if error < 1e-5 else f"{error:.2g}"


# --- text ---------------------------------------------------------------------------------------------------------------------------------


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else "(no text)"


def _cell(text: str) -> str:
    return (text if len(text) <= 200 else f"{text[:197]}...").replace("|", "\\|").replace("<", "&lt;")


def _date(text: str) -> str:
    found = re.search(r"^Measured (\S+) with", text, re.MULTILINE)
    return found[1] if found else "never"


def _differences(subject: Subject, old: str, new: str) -> Iterator[str]:
    before, after = old.splitlines(), new.splitlines()
    for line in [line for line in after if line not in before][:8]:
        yield f"{subject.title}: measured now: {line}"
    for line in [line for line in before if line not in after][:8]:
        yield f"{subject.title}: the page has: {line}"


def main(arguments: list[str], report: Callable[[str], object] = print) -> int:
    """As the command line; the exit status."""
    torch.set_num_threads(1)
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    for subject in SUBJECTS:
        state = "not installed, so its figures stay as they are" if missing(subject) else "measured"
        report(f"{' '.join(filter(None, (subject.package, version_of(subject.package))))}: {state}")
    if "--check" not in arguments:
        PAGE.write_text(page(old), encoding="utf-8")
        return 0
    wrong = list(faults(old))
    for fault in wrong:
        report(f"{PAGE.name}: {fault}")
    if wrong:
        report(f"{PAGE.name}: run python tools/engines_page.py where the engines are installed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
