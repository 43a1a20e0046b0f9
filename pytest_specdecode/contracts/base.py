"""What the contracts have in common: tests whose ids are properties, and gaps that an implementation is known to have.

A contract is a class of plain test methods that a subject's own test class inherits. Nothing is kept in a module or on an instance, so the
tests run in any order, in any number of processes, and as often as a fuzzer likes.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings

Test = TypeVar("Test", bound=Callable[..., Any])

#: What a property's Hypothesis twin is called: `rope-theta` and `rope-theta-drawn`.
DRAWN = "-drawn"


class ContractError(AssertionError):
    """The subject does not hold a property of its contract."""


class Contract:
    """The base of the contracts.

    Attributes:
        known_gaps: by property (what stands in brackets in a test's id), why the subject does not hold it. Such a test is expected to fail.
            One that passes fails: the gap is closed, and its line has to go. A property's drawn twin is skipped with it, because finding
            and shrinking what is known takes long; declared by its own name it is run, and held to failing.
    """

    known_gaps: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        properties = cls.properties()
        for name, reason in cls.known_gaps.items():
            if name not in properties:
                near = difflib.get_close_matches(name, properties, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(properties)}"
                raise TypeError(
                    f"{cls.__name__}.known_gaps names {name!r}, which is no property of the contract; {hint}"
                )
            if not isinstance(reason, str) or not reason.strip():
                raise TypeError(f"{cls.__name__}.known_gaps[{name!r}] is {reason!r}; the reason is due, in words")

    @classmethod
    def properties(cls) -> tuple[str, ...]:
        """Every property, in the order of the tests."""
        found = [name for test in _tests(cls) for name in test.contract_cases[1]]
        return tuple(dict.fromkeys(found))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per property, those of `known_gaps` expected to fail."""
        found = getattr(metafunc.function, "contract_cases", None)
        if found is None:
            return
        argument, cases = found
        # By this mark Hypothesis tells cases apart, and gives each a key of its own in the example database: the one that a fuzzer uses.
        case = pytest.mark.parametrize(argument, list(cases))
        parameters = [pytest.param(value, id=name, marks=[case, *self._marks(name)]) for name, value in cases.items()]
        metafunc.parametrize(argument, parameters)

    def has_gap(self, name: str) -> bool:
        """Whether the subject is known not to hold a property, so that drawn tests need not find it again."""
        return name in self.known_gaps

    def _marks(self, name: str) -> list[pytest.MarkDecorator]:
        own, twin = self.known_gaps.get(name), self.known_gaps.get(name.removesuffix(DRAWN))
        if own is not None:
            # pytest shows this for an expected failure, and for a test that should have failed and did not.
            due = f"known gap {name}: {own} (where this is a failure: gap closed; take the line out of known_gaps)"
            return [pytest.mark.xfail(strict=True, reason=due)]
        if twin is not None:
            return [pytest.mark.skip(reason=f"known gap {name.removesuffix(DRAWN)}: {twin}")]
        return []


def cases(argument: str, properties: Iterable[str] | Mapping[str, Any]) -> Callable[[Test], Test]:
    """Run a test once per property, with the property, or what it is mapped to, as `argument`."""
    mapping = dict(properties) if isinstance(properties, Mapping) else {name: name for name in properties}

    def attach(test: Test) -> Test:
        test.contract_cases = (argument, mapping)  # type: ignore[attr-defined]
        return test

    return attach


def scaled(count: int) -> int:
    """A test's own number of examples, times as many as the loaded Hypothesis profile has more than its usual 100."""
    return count * max(1, settings().max_examples // 100)


def examples(count: int) -> Callable[[Test], Test]:
    """Hypothesis settings of one test. The first call of a kernel takes long, so there is no deadline; explaining a failure, as Hypothesis
    does after shrinking it, takes as many calls again and says little of a stack.

    The tests are inherited, so several classes run one function. They share nothing but that, which is what the health check is about.

    Database and randomness are those of the profile that is loaded when the contracts are imported.
    """
    return settings(
        deadline=None,
        max_examples=scaled(count),
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.differing_executors],
    )


def _tests(cls: type) -> Iterator[Any]:
    for name in dict.fromkeys(name for each in reversed(cls.__mro__) for name in vars(each)):
        test = inspect.getattr_static(cls, name)
        if name.startswith("test") and hasattr(test, "contract_cases"):
            yield test
