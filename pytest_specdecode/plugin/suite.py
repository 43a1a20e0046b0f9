"""The built-in suite: one test per check and draft.

It is collected as `draft-model`. To have the tests in a file of your own, where that directory's conftest applies to them, write there:

    from pytest_specdecode.plugin.suite import test_draft
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest

from pytest_specdecode import api
from pytest_specdecode.checks import Check, Context
from pytest_specdecode.errors import printable
from pytest_specdecode.plugin.expected import reason_for
from pytest_specdecode.plugin.options import SETTINGS, names_of
from pytest_specdecode.plugin.results import PROPERTY, failure_text


# What torch or triton has to say about Python's own future is no fault of the draft, and must not fail it under -W error.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_draft(request: pytest.FixtureRequest, draft_check: Check, draft_context: Context) -> None:
    """Run one check: it fails, is skipped, or passes with what it has to say in the summary."""
    result = api.run_check(draft_check, draft_context)
    given = request.node.callspec.params.get("_given_draft")
    path = str(draft_context.draft.path) if given is None else given.path
    expected = reason_for(request.config.stash[SETTINGS].expected, draft_check.id, names_of(draft_context.draft))
    if expected is not None:
        result = replace(result, expected=expected)
        request.applymarker(pytest.mark.xfail(reason=expected))
    request.node.user_properties.append((PROPERTY, json.dumps({"path": path, **result.to_dict()})))
    if result.status == "failed":
        pytest.fail(failure_text(result), pytrace=False)
    if result.status == "skipped":
        pytest.skip(printable(result.message))
    if result.status == "inconclusive":
        want = request.config.stash[SETTINGS].requires(result.want, *_wants(draft_check, draft_context))
        if want is not None:
            pytest.fail(
                f"inconclusive, and --draft-require={want} asks for an answer: {printable(result.message)}",
                pytrace=False,
            )
        pytest.skip(f"inconclusive: {printable(result.message)}")


def _wants(check: Check, context: Context) -> tuple[str, ...]:
    """What `check` needs and this run does not have, in the words of --draft-require; `all` stands for any other want."""
    draft = context.draft
    absent = {
        "target": context.target is None,
        "serving": not context.serve,
        "tensors": not draft.checkpoint.complete,
        "triton": importlib.util.find_spec("triton") is None,
        "gpu": context.device == "cpu",
        "trace": context.trace is None,
    }
    needs = {"tensors" if need == "headers" else need for need in check.needs}
    return (*(want for want, is_absent in absent.items() if is_absent and want in needs), "all")
