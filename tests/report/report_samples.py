"""Reports by hand: one of each status, hostile ones, long ones; what the tests of the writers share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_specdecode.findings import CheckResult, Finding, Outcome
from pytest_specdecode.report import CheckText, DraftReport, Report
from pytest_specdecode.testing import expected_tensors, tiny_config

WRONG = Finding(
    message="rope_theta is stated with different values",
    where="config.json: rope_parameters.rope_theta, rope_theta",
    got={"rope_theta": 10000.0},
    due="one value",
    fix="leave the trained one",
    outcomes={
        "sglang": Outcome(outcome="serves wrong", message="takes 10000", source="SGLang 0.5.6"),
        "vllm": Outcome(outcome="unknown"),
    },
)
STOPS = Finding(
    message="fc.weight is missing", where="fc.weight", outcomes={"vllm": Outcome(outcome="stops", message="KeyError")}
)
SLOW = Finding(message="layers differ", where="layer 1", outcomes={"sglang": Outcome(outcome="falls back")})
BARE = Finding(message="a layer does not build", where="layers.0")
DOUBTFUL = Finding(message="pickles lie beside the weights", severity="warning")

PASSED = CheckResult(id="files.readable", status="passed", message="12 tensors")
FAILED = CheckResult(id="rope.theta-agrees", status="failed", message=WRONG.message, findings=(WRONG,))
MISSING = CheckResult(id="weights.missing", status="failed", message=STOPS.message, findings=(STOPS, SLOW, BARE))
WARNED = CheckResult(id="files.pickle", status="warned", message=DOUBTFUL.message, findings=(DOUBTFUL,))
SKIPPED = CheckResult(id="dflash.block-size", status="skipped", message="for dflash drafts")
UNSURE = CheckResult(id="target.widths", status="inconclusive", message="needs the target's config.json", want="target")
KNOWN = replace(FAILED, id="taps.range", expected="it is being retrained")
ALL = (PASSED, FAILED, MISSING, WARNED, SKIPPED, UNSURE, KNOWN)

ABOUT = {"rope.theta-agrees": CheckText(title="all places agree", why="two values are two drafts", fix="leave one")}

#: Markup of every writer, terminal codes, line ends, letters that turn the direction of writing, a lone surrogate.
HOSTILE = (
    "<script>alert(1)</script>|`x`**b**[l](http://evil.test)![i](x)\x1b[31m\r\n::error::x\u202e\udc80 @someone www.evil.test $x$ "
    "</details></style>\"'&amp;-->]]>%0A"
)


def score(rates: list[float], rounds: int = 100) -> dict[str, Any]:
    """As the figures of acceptance.length hold one."""
    length = 1 + sum(rates)
    places = [
        {
            "position": place,
            "accepted": int(rate * rounds),
            "rounds": rounds,
            "rate": rate,
            "low": rate - 0.1,
            "high": rate + 0.1,
        }
        for place, rate in enumerate(rates, start=1)
    ]
    return {
        "rounds": rounds,
        "accepted_length": length,
        "accepted_length_low": length - 0.2,
        "accepted_length_high": length + 0.2,
        "positions": places,
    }


def measured(rates: list[float]) -> CheckResult:
    """acceptance.length, passed, with its figures."""
    figures = {
        "label": "accepted length",
        "draft_tokens": len(rates),
        "accepted_length": 1 + sum(rates),
        "served": score(rates),
        "every": None,
        "trace": {"fingerprint": "abc"},
    }
    return CheckResult(id="acceptance.length", status="passed", message="accepted length", figures=figures)


#: Results that every picture can be drawn from.
DRAWN = (
    CheckResult(
        id="fused-kv.matches-reference",
        status="passed",
        figures={
            "k_error": [[1e-3, 2e-3], [3e-3, 4e-3]],
            "k_eager": [[2e-3, 2e-3], [3e-3, 5e-3]],
            "v_error": [[1e-3]] * 2,
            "v_eager": [[1e-3]] * 2,
        },
    ),
    CheckResult(
        id="weights.finite",
        status="passed",
        figures={
            "tensors": {
                "fc.weight": {"p05": 1e-3, "p25": 5e-3, "p50": 0.01, "p75": 0.02, "p95": 0.05, "p999": 0.1, "largest": 5.0, "std": 0.02},
                "norm.weight": {"p05": 1.0, "p25": 1.0, "p50": 1.0, "p75": 1.0, "p95": 1.0, "p999": 1.0, "largest": 1.0, "std": 0.0},
            }
        },
    ),
    measured([0.8, 0.6, 0.5]),
    CheckResult(
        id="target.rope",
        status="passed",
        figures={
            "draft": [{"label": "default, theta 10000", "frequencies": [1.0, 0.1, 0.01]}],
            "target": [{"label": "default, theta 1e+06", "frequencies": [1.0, 0.03, 0.001]}],
        },
    ),
)  # fmt: skip


def draft(*results: CheckResult, family: str = "eagle3", **fields: Any) -> DraftReport:
    """A draft with these results."""
    spec, _ = expected_tensors(tiny_config(family), family)
    values = {"path": "drafts/x", "name": "x", "description": f"x: {family}", "family": family, "packaging": "plain"}
    return DraftReport(**{**values, "spec": spec, **fields}, results=results)


def report(*results: CheckResult, **fields: Any) -> Report:
    """A report on one draft."""
    return Report(drafts=(draft(*(results or ALL)),), about=ABOUT, **fields)


def hostile(text: str = HOSTILE) -> Report:
    """A report in which every text that can come from a checkpoint is `text`."""
    finding = Finding(
        message=text,
        where=text,
        got={text: [text]},
        due=text,
        fix=text,
        outcomes={"vllm": Outcome(outcome="stops", message=text, source=text)},
    )
    failed = CheckResult(id="weights.unexpected", status="failed", message=text, findings=(finding,))
    known = replace(failed, id="weights.missing", expected=text)
    unsure = CheckResult(id="weights.finite", status="inconclusive", message=text)
    tensors = {text: {"p50": 0.1, "largest": 1.0}}
    weights = CheckResult(id="weights.finite", status="passed", message=text, figures={"tensors": tensors})
    curves = [{"label": text, "frequencies": [1.0, 0.5]}]
    rope = CheckResult(id="target.rope", status="warned", message=text, figures={"draft": curves, "target": curves})
    return Report(
        drafts=(
            draft(failed, known, unsure, weights, rope, name=text, path=text[:200], description=text, family="eagle3"),
            draft(failed, name=f"other {text}"),
        )
    )


def written(found: Report, suffix: str, folder: Path) -> str:
    """The text of the file that `found` is written to."""
    file = folder / f"report{suffix}"
    found.write(file)
    return file.read_text(encoding="utf-8")
