"""Write docs/strategies.md: every strategy with its guarantee, what it shrinks towards, and examples that were drawn.

python tools/strategies_page.py            rewrite the page
python tools/strategies_page.py --check    fail where it is not current

The examples are drawn from a fixed seed. Another version of Hypothesis than the page's draws others; then only the words are compared.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.strategies import SearchStrategy

from pytest_specdecode import strategies
from pytest_specdecode.strategies.faults import FAULTS, NOT_IN_CONFIG

PAGE = Path(__file__).resolve().parent.parent / "docs" / "strategies.md"
WIDTH = 120

HEAD = """# The strategies

<!-- all python run by: tests/strategies/test_strategies_page.py -->

Made by `python tools/strategies_page.py` from the strategies' own docstrings and from what they draw; change the words there.

    from hypothesis import given
    from pytest_specdecode.strategies import draft_configs

    @given(draft_configs(family="eagle3"))
    def test_my_reader(config): ...

All arguments are keywords, each a value or a strategy of it, and are checked when the strategy is made. What is drawn prints as the Python
that makes it again; tensors are filled from its seed when they are first asked for, so drawing needs no torch. The first example of each
strategy is the plainest, which all failures shrink towards; the others were drawn, with Hypothesis {version}.
"""

#: The calls that are shown, in the order of the page; the first call of a strategy has the plainest example beside a drawn one.
CALLS = (
    ("draft_configs", ""),
    ("draft_configs", "family='dflash', packaging='speculators'"),
    ("draft_specs", "family='mlp-speculator'"),
    ("mutated_configs", ""),
    ("mutated_configs", "check='taps.order'"),
    ("checkpoints", ""),
    ("checkpoints", "family='medusa', min_shards=2"),
    ("layer_configs", ""),
    ("homogeneous_stacks", ""),
    ("heterogeneous_stacks", ""),
    ("heterogeneous_stacks", "axis='rope-theta'"),
    ("kernel_inputs", ""),
    ("latent_configs", ""),
    ("homogeneous_latent_stacks", ""),
    ("heterogeneous_latent_stacks", ""),
    ("latent_kernel_inputs", ""),
    ("mla_configs", ""),
    ("mla_layers", ""),
)

#: Failures as a test would have them: what a reader gets wrong, the strategy, and when it fails.
FAILURES = (
    (
        "A reader that drops windows",
        "draft_configs()",
        "lambda config: config.get('layer_types', ['full_attention'])[0] == 'sliding_attention' and 'dflash_config' in config",
    ),
    (
        "A check of the order of taps that knows nothing of the speculators packaging",
        "mutated_configs(check='taps.order')",
        "lambda mutated: 'speculators_config' in mutated.config",
    ),
    (
        "A loader that reads one file of several",
        "checkpoints()",
        "lambda files: files.shards > 1 and files.family == 'dflash'",
    ),
)

SHRINKING = settings(
    database=None, deadline=None, derandomize=True, max_examples=1000, phases=[Phase.generate, Phase.shrink]
)
DRAWING = settings(
    database=None, deadline=None, max_examples=12, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)


def page() -> str:
    """The whole page."""
    lines = [HEAD.replace("{version}", hypothesis.__version__)]
    shown = ""
    for name, arguments in CALLS:
        if name != shown:
            lines += [f"## `{name}`", "", *_words(name)]
        lines += [f"`{name}({arguments})`", ""]
        strategy = getattr(strategies, name)(**eval(f"dict({arguments})"))
        if name != shown:
            lines += _block(repr(plainest(strategy)))
        if name != "draft_specs":
            lines += _block(repr(example(strategy)))
        shown = name
    lines += [*_failures(), *_faults()]
    return "\n".join(lines).rstrip() + "\n"


def is_current(text: str) -> bool:
    """Whether `text` is the page; without its examples where another version of Hypothesis drew them."""
    made = page()
    if f"with Hypothesis {hypothesis.__version__}." in text:
        return text == made
    return _without_examples(text) == _without_examples(made)


def _without_examples(text: str) -> str:
    return re.sub(r"(?ms)^```python\n.*?^```$|with Hypothesis [\d.]+\.", "", text)


def plainest(strategy: SearchStrategy[Any]) -> Any:
    """What everything shrinks towards."""
    return find(strategy, lambda drawn: True, settings=SHRINKING)


def example(strategy: SearchStrategy[Any]) -> Any:
    """Of some that are drawn, one of middling length: not the plainest, and not the longest."""
    drawn: list[Any] = []

    @seed(20240607)
    @DRAWING
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return sorted(drawn, key=lambda value: len(repr(value)))[len(drawn) // 3]


def _words(name: str) -> Iterator[str]:
    """What the strategy draws, its guarantee and its shrink order, as its docstring says them."""
    text = inspect.getdoc(getattr(strategies, name)) or ""
    found = {part.split(" ", 1)[0]: " ".join(part.split()) for part in re.split(r"\n\n", text)}
    yield " ".join(text.split("\n\n")[0].split())
    yield ""
    for word in ("Guarantee:", "Requirement:", "Shrinks"):
        yield f"- {found[word]}"
    yield ""


def _block(text: str) -> list[str]:
    """Python that is wrapped between its words."""
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return ["```python", *lines, "```", ""]


def _failures() -> Iterator[str]:
    yield "## What a failure shrinks to"
    yield ""
    yield "Three typical ones, each with the strategy, when it fails, and the example that Hypothesis then shows."
    yield ""
    for title, strategy, fails in FAILURES:
        found = find(eval(strategy, vars(strategies)), eval(fails), settings=SHRINKING)
        yield f"{title}: `{strategy}`, `{fails}`"
        yield ""
        yield from _block(repr(found))


def _faults() -> Iterator[str]:
    yield "## The faults of `mutated_configs`"
    yield ""
    yield "| check | fault | forms |"
    yield "|---|---|---|"
    for id, fault in FAULTS.items():
        families = list(dict.fromkeys(form.family for form in fault.forms))
        shown = "every family" if len(families) == len(strategies.FAMILY_NAMES) else ", ".join(families)
        yield f"| `{id}` | {fault.what} | {shown} |"
    yield ""
    yield "Checks that read the configuration and whose fault it does not show alone:"
    yield ""
    reasons: dict[str, list[str]] = {}
    for id, reason in NOT_IN_CONFIG.items():
        reasons.setdefault(reason, []).append(f"`{id}`")
    yield from (f"- {', '.join(ids)}: {reason}." for reason, ids in reasons.items())


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and is_current(PAGE.read_text(encoding="utf-8"))
        sys.exit(0 if current else f"{PAGE.name}: run python tools/strategies_page.py")
    PAGE.write_text(page(), encoding="utf-8")
