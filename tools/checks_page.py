"""Write docs/checks.md: every check with what it means, what each engine does, an example that it reports, and the fix.

python tools/checks_page.py            rewrite the page
python tools/checks_page.py --check    fail where it is not current
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks import REGISTRY, Check
from pytest_specdecode.engines import ENGINES, Engine
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import DraftSpec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "checks.md"

HEAD = """# The checks

Made from the registry by `python tools/checks_page.py`; change a check's words where it is registered.

A check ends in one of five ways. *Failed* and *warned* carry findings; *passed* means that its evidence was there and showed no fault;
*skipped* means that it does not apply to this draft; *inconclusive* means that evidence was missing, and says what to give. An
inconclusive check is never a pass.

What an engine does with a fault is one of four things. It **stops** with an error, it **falls back** to something slower with a log line,
it **serves wrong** and says nothing, or it is **fine** with it. What is not known is left out of the tables. The statements were read from
these versions, and each has its source in the JSON report:

"""

_NEEDS = {
    "config": "`config.json`",
    "headers": "the tensors' headers",
    "tensors": "the tensors' values",
    "target": "`--draft-target`",
    "serving": "`--draft-serve`",
    "trace": "a recorded trace",
    "triton": "triton",
    "gpu": "a GPU",
}


def page() -> str:
    """The whole page."""
    specs = tiny_specs()
    lines = [HEAD.rstrip(), "", *(f"- {engine.title} {engine.version}" for engine in ENGINES.values()), ""]
    group = ""
    for item in REGISTRY.values():
        if item.group != group:
            group = item.group
            lines += [f"## {group}", ""]
        lines += [*_entry(item, specs), ""]
    return "\n".join(lines).rstrip() + "\n"


def tiny_specs() -> dict[str, DraftSpec]:
    """What the smallest draft of each family is; engines are asked about these."""
    return {
        family.name: testing.expected_tensors(testing.tiny_config(family.name), family.name)[0] for family in FAMILIES
    }


def _entry(item: Check, specs: Mapping[str, DraftSpec]) -> Iterator[str]:
    yield f"### `{item.id}`"
    yield ""
    yield f"- What must hold: {_sentence(item.title)}"
    yield f"- Why: {item.why}"
    yield f"- Severity: {item.severity}, as its worst case."
    yield f"- Needs: {', '.join(_NEEDS[need] for need in item.needs)}."
    if item.families is not None:
        yield f"- For: {', '.join(item.families)}."
    elif item.applies:
        yield f"- For: {item.applies}."
    if item.cost:
        yield f"- Measured: {_sentence(item.cost)}"
    rows = list(_outcomes(item, specs))
    if rows:
        yield ""
        yield "| fault | engine | outcome | what it does |"
        yield "|---|---|---|---|"
        yield from rows
    if item.example:
        yield ""
        yield from _example(item)
    if item.fix:
        yield ""
        yield f"Fix: {_sentence(item.fix)}"


def _example(item: Check) -> Iterator[str]:
    if isinstance(item.example, str):
        yield f"Example: {_sentence(item.example)}"
        return
    changes = dict(item.example)
    family = changes.pop("family", "eagle3")
    gone = [key for key, value in changes.items() if value is ...]
    kept = {key: value for key, value in changes.items() if value is not ...}
    without = f" without {', '.join(f'`{key}`' for key in gone)}" if gone else ""
    if not kept:
        yield f"Example: a `config.json` of {_article(family)} {family} draft{without}."
        return
    yield f"Example: a `config.json` of {_article(family)} {family} draft{without} that holds"
    yield ""
    yield "```json"
    yield json.dumps(kept, indent=2)
    yield "```"
    rows = [] if item.faults else list(_outcomes_of_example(item, family, changes))
    if rows:
        yield ""
        yield "| engine | outcome | what it does with the example |"
        yield "|---|---|---|"
        yield from rows


def _outcomes_of_example(item: Check, family: str, changes: Mapping[str, object]) -> Iterator[str]:
    """What the engines do with the example, where that follows from what each reads and not from a fault with a name."""
    config = {**testing.tiny_config(family), **changes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        testing.write_tiny(path, family)
        (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
        findings = check_draft(path, checks=[item.id])[item.id].findings
    for name, outcome in findings[0].outcomes.items() if findings else ():
        if outcome.outcome != "unknown":
            yield f"| {ENGINES[name].title} | {outcome.outcome} | {_cell(outcome.message)} |"


def _outcomes(item: Check, specs: Mapping[str, DraftSpec]) -> Iterator[str]:
    for fault in item.faults:
        for engine in ENGINES.values():
            for families, outcome in _distinct(engine, fault, item, specs):
                if outcome.outcome != "unknown":
                    of = f" ({families})" if families else ""
                    yield f"| {fault}{of} | {engine.title} | {outcome.outcome} | {_cell(outcome.message)} |"


def _distinct(engine: Engine, fault: str, item: Check, specs: Mapping[str, DraftSpec]) -> Iterator[tuple[str, Outcome]]:
    """The engine's outcomes for `fault`, with the families that each is for; no families where it is the same for all."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in item.families or tuple(specs):
        outcome = engine.outcome(fault, specs[name])
        found.setdefault((outcome.outcome, outcome.message), []).append(name)
    for (kind, message), names in found.items():
        yield "" if len(found) == 1 else ", ".join(names), Outcome(outcome=kind, message=message)  # type: ignore[arg-type]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    return text + ("" if text.endswith((".", "?")) else ".")


def _article(name: str) -> str:
    return "an" if name[0] in "aeioux" else "a"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(
            0
            if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
            else f"{PAGE.name}: run python tools/checks_page.py"
        )
    PAGE.write_text(text, encoding="utf-8")
