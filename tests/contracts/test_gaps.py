"""Gaps that an implementation is known to have: expected while they are there, reported when they close.

Failure modes this file exists to catch: a declared gap that hides a test which passes; a misspelt one that hides nothing and says nothing;
a gap without a reason; tests that cannot be picked by property, run again by their printed id, or run in several processes; settings of a
contract that leak into the user's own tests.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import failing

from pytest_specdecode.contracts import CheckpointReaderContract, DraftLayerContract, FusedKVContract
from pytest_specdecode.contracts.base import DRAWN
from pytest_specdecode.fused_kv import AXES, FusedKV

#: A subject that drops the bias, and its gaps.
SUBJECT = """
    from pytest_specdecode.contracts import FusedKVContract
    from pytest_specdecode.errors import FusedKVError
    from pytest_specdecode.fused_kv import FusedKV

    class NoBias(FusedKV):
        def __init__(self, *args):
            super().__init__(*args, backend="eager")

        def _stack(self):
            super()._stack()
            self._bias = None

    class TestMine(FusedKVContract):
        build = staticmethod(NoBias)
        known_gaps = {gaps}
"""

BIAS = {"bias-everywhere": "the bias is left out"}


@pytest.fixture(autouse=True, scope="module")
def everything_imported(tmp_path_factory):
    """A run in this process forgets the modules that it imported itself, and some can be imported only once."""
    contract = type("TestOurs", (FusedKVContract,), {"build": staticmethod(FusedKV)})
    failing(contract, tmp_path_factory.mktemp("subject"))
    contract().test_serves_any(rest="plain")


def run(pytester, gaps, *args, plugins=("no:cacheprovider",)):
    pytester.makepyfile(SUBJECT.replace("{gaps}", repr(gaps)))
    options = [part for plugin in plugins for part in ("-p", plugin)]
    return pytester.runpytest_inprocess(*options, "-rxXsf", *args)


def test_a_gap_that_is_not_declared_fails(pytester):
    result = run(pytester, {}, "-k", "everywhere")
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["FAILED *::TestMine::test_serves_or_rejects[[]bias-everywhere[]]*"])


def test_a_declared_gap_is_expected(pytester):
    result = run(pytester, BIAS, "-k", "everywhere or plain")
    result.assert_outcomes(xfailed=1, passed=3)
    result.stdout.fnmatch_lines(["XFAIL *bias-everywhere*known gap bias-everywhere: the bias is left out*"])


def test_a_gap_that_closed_fails(pytester):
    result = run(pytester, {**BIAS, "strided-positions": "read as if dense"}, "-k", "everywhere or positions")
    result.assert_outcomes(xfailed=1, failed=1, passed=6)
    result.stdout.fnmatch_lines(["*known gap strided-positions: read as if dense*gap closed; take the line out*"])


def test_the_drawn_twin_of_a_gap_is_skipped(pytester):
    result = run(pytester, {"rope-theta": "one table for all"}, "-k", "rope-theta and not argument")
    result.assert_outcomes(skipped=1, failed=1)
    result.stdout.fnmatch_lines(["SKIPPED*known gap rope-theta: one table for all*"])


def test_a_drawn_test_declared_by_its_own_name_is_held_to_failing(pytester):
    result = run(pytester, {"rope-theta-drawn": "one table for all"}, "-k", "rope-theta and not argument")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "FAILED *test_rejects_any[[]rope-theta-drawn[]]*",
        ]
    )


def subject_from_elsewhere(*args):
    """In a class body it would be a method."""


@pytest.mark.parametrize(
    ("gaps", "text"),
    [
        ({"rope_theta": "why"}, "names 'rope_theta', which is no property of the contract; did you mean 'rope-theta'?"),
        ({"zzz": "why"}, "there are num-kv-heads, head-dim"),
        ({"bias": ""}, r"\['bias'\] is ''; the reason is due"),
        ({"bias": None}, r"\['bias'\] is None; the reason is due"),
        ({3: "why"}, "names 3, which is no property"),
        (["bias"], r"known_gaps is \['bias'\]; a dictionary of reasons"),
        (None, "known_gaps is None; a dictionary of reasons"),
        ("bias", "known_gaps is 'bias'; a dictionary of reasons"),
    ],
    ids=["misspelt", "unknown", "empty", "none", "number", "list", "nothing", "text"],
)
def test_a_gap_that_says_nothing_is_refused(gaps, text):
    with pytest.raises(TypeError, match=text):
        type("TestMine", (FusedKVContract,), {"known_gaps": gaps})


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"rounding": "store"}, "at-the-store, after-the-norm"),
        ({"serves": ("theta",)}, "names 'theta'; axes are"),
        ({"serves": "rope-theta"}, "serves is 'rope-theta'; a tuple of axes is due"),
        ({"serves": None}, "serves is None; a tuple of axes is due"),
        ({"build": None}, "build is None, which cannot be called"),
        ({"build": "mine:Path"}, "build is 'mine:Path', which cannot be called"),
        ({"refresh": 3}, "refresh is 3, which cannot be called"),
        ({"build": subject_from_elsewhere}, r"build = staticmethod\(subject_from_elsewhere\) keeps self out"),
    ],
    ids=["rounding", "serves", "serves-text", "serves-none", "no-build", "text", "no-refresh", "function"],
)
def test_an_attribute_of_no_meaning_is_refused(attributes, text):
    with pytest.raises(TypeError, match=text):
        type("TestMine", (FusedKVContract,), attributes)


IN_OTHER_FORMS = """
import pytest
from functools import partial
from pytest_specdecode import FusedKV
from pytest_specdecode.contracts import FusedKVContract


class Mine(FusedKVContract):
    known_gaps = {"v-exact": "said above"}

    def build(self, *args):
        return FusedKV(*args, backend=self.backend)


class TestEach(Mine):
    known_gaps = {}

    @pytest.fixture(autouse=True, params=["eager", "auto"])
    def _backend(self, request):
        self.backend = request.param


class TestBelow(Mine):
    backend = "eager"


class TestPartial(FusedKVContract):
    build = partial(FusedKV, backend="eager")
"""


def test_a_subject_may_be_a_method_of_a_fixture_and_gaps_are_inherited(pytester):
    pytester.makepyfile(IN_OTHER_FORMS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "calls-drawn or v-exact or one-token", "-rfE")
    result.assert_outcomes(passed=11, failed=1)
    result.stdout.fnmatch_lines(["*known gap v-exact: said above*", "FAILED *::TestBelow::test_values[[]v-exact[]]*"])


@pytest.mark.parametrize("contract", [FusedKVContract, DraftLayerContract, CheckpointReaderContract])
def test_a_class_without_a_subject_says_what_to_give(contract):
    with pytest.raises(NotImplementedError, match=r"build = staticmethod\("):
        contract.build(None) if contract is CheckpointReaderContract else contract.build(None, None)


def test_ids_carry_the_property(pytester):
    result = run(pytester, {}, "--collect-only", "-q")
    found = re.findall(r"::TestMine::\w+\[(.+)\]", str(result.stdout))
    assert set(found) == set(FusedKVContract.properties())
    assert set(AXES) | {f"{axis}{DRAWN}" for axis in AXES} <= set(found)
    assert {"bias", "rope-theta", "num-kv-heads", "strided-positions"} <= set(found)


def test_a_printed_id_runs_again(pytester):
    run(pytester, {}, "--collect-only", "-q")
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "test_a_printed_id_runs_again.py::TestMine::test_rejects[rope-theta]"
    )
    result.assert_outcomes(passed=1)


def test_each_case_has_a_key_of_its_own_in_the_example_database(pytester):
    """By its id, as fuzzers have it, so that what one finds is replayed by the next run; see Hypothesis' own plugin."""
    pytester.makepyfile(SUBJECT.replace("{gaps}", "{}"))
    items, _ = pytester.inline_genitems("-p", "no:cacheprovider")
    assert len(items) > 50
    assert all(item.get_closest_marker("parametrize") is not None for item in items)


def test_properties_are_spread_over_processes(pytester):
    pytest.importorskip("xdist")
    result = run(pytester, BIAS, "-n", "2", "-k", "everywhere or positions or rope-theta-drawn")
    result.assert_outcomes(xfailed=1, passed=2 + 5 + 1)


def test_the_users_own_settings_stay_as_they_were(pytester):
    pytester.makepyfile(
        """
        from hypothesis import settings
        before = settings.default
        from pytest_specdecode.contracts import FusedKVContract

        def test_it():
            assert settings.default is before
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


# --- the page -----------------------------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contracts.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_three_lines_of_the_page_run(pytester):
    first = blocks()[0]
    assert len([line for line in first.splitlines() if line.strip()]) == 2 + 3
    pytester.makepyfile(first)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "rejects or positions and not drawn")
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] > 30


def test_the_other_examples_of_the_page_run(pytester):
    for number, block in enumerate(blocks()[1:]):
        pytester.makepyfile(**{f"test_example_{number}": block})
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "not drawn", "-q")
    assert result.ret == 0, str(result.stdout)


def test_the_page_names_every_property():
    text = PAGE.read_text(encoding="utf-8")
    for contract in (FusedKVContract, DraftLayerContract, CheckpointReaderContract):
        for name in contract.properties():
            if name in AXES or name.removesuffix(DRAWN) in AXES or name.endswith("-argument"):
                continue
            if contract is CheckpointReaderContract and f"test_reads[{name}]" in text:
                continue
            assert f"`{name}`" in text or _is_family(name), f"{contract.__name__}: {name}"


def _is_family(name):
    from pytest_specdecode.families import FAMILIES

    return name in {family.name for family in FAMILIES}
