"""Write docs/failures.md: the failures of drafts that were reported in public, each with the check that catches it.

python tools/failures_page.py            rewrite the page
python tools/failures_page.py --check    fail where it is not current
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "failures.md"
sys.path.insert(0, str(ROOT / "tests" / "checks"))

from public_failures import FAILURES, Failure  # noqa: E402

HEAD = """# Failures that were reported in public

Written by `python tools/failures_page.py` from `tests/checks/public_failures.py`, where each row has the smallest checkpoint that holds the
cause. A test writes it, runs the check, and asserts what it says; then the same draft without the cause, which has to pass.

{caught} of {all} are caught. The others have the reason why no check of a checkpoint can see them. References are `repository#number`, an
issue or a pull request; a dash stands where the repository is not known. What each check means is in
[the checks](checks.md).

| | what goes wrong | caught by, or why not | reported in |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    caught = sum(bool(failure.cases) for failure in FAILURES)
    rows = "\n".join(" | ".join(_cells(failure)) for failure in FAILURES)
    return HEAD.format(caught=caught, all=len(FAILURES)) + rows + "\n"


def _cells(failure: Failure) -> Iterator[str]:
    yield f"| {failure.number}"
    yield failure.symptom.replace("|", "\\|")
    yield (
        ", ".join(f"[{id}](checks.md#{id.replace('.', '')})" for id in failure.checks)
        or f"Not to be seen: {failure.reason}"
    )
    yield f"{', '.join(failure.references) or '-'} |"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        sys.exit(0 if current else f"{PAGE.name}: run python tools/failures_page.py")
    PAGE.write_text(text, encoding="utf-8")
