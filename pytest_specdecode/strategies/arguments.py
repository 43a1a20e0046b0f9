"""Arguments of the strategies: a value or a strategy of it, checked where the mistake was made.

A value is checked when the strategy is made, so that the traceback ends on the caller's line. What a strategy argument draws can only be
checked when it is drawn; the message is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

#: An argument that may be a value or a strategy of it.
ValueOr: TypeAlias = T | SearchStrategy[T]

#: Takes an argument's name and value; raises InvalidArgument.
Check = Callable[[str, Any], None]


def argument(
    name: str, value: T | SearchStrategy[T] | None, default: SearchStrategy[T], check: Check
) -> SearchStrategy[T]:
    """The strategy that an argument stands for; None stands for `default`."""
    if value is None:
        return default
    if not isinstance(value, SearchStrategy):
        check(name, value)
        return st.just(value)

    def checked(drawn: T) -> T:
        check(name, drawn)
        return drawn

    return value.map(checked)


def fixed(value: T | SearchStrategy[T] | None) -> T | None:
    """The value of an argument that is one, else None: for checks of two arguments against each other."""
    return None if isinstance(value, SearchStrategy) else value


def integer(minimum: int, *, even: bool = False) -> Check:
    """An int (no bool) of at least `minimum`."""

    def check(name: str, value: Any) -> None:
        kind = "an even integer" if even else "an integer"
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum or (even and value % 2):
            raise InvalidArgument(f"{name}={value!r}: {kind} of at least {minimum} is due")

    return check


def number(name: str, value: Any) -> None:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidArgument(f"{name}={value!r}: a finite number above 0 is due")


def boolean(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r}: True or False is due")


def mapping(name: str, value: Any) -> None:
    """A mapping with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidArgument(f"{name}={value!r}: a mapping such as {{'rope_type': 'linear', 'factor': 2.0}} is due")


def choice(options: Sequence[str]) -> Check:
    """One of `options`."""

    def check(name: str, value: Any) -> None:
        if value not in options:
            raise InvalidArgument(f"{name}={value!r}: one of {', '.join(map(repr, options))} is due")

    return check


def instance(kind: type) -> Check:
    """An instance of `kind`."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name}={value!r}: a {kind.__name__} is due")

    return check


def check_bounds(minimum_name: str, minimum: Any, maximum_name: str, maximum: Any, *, least: int) -> None:
    """Two ints, `least <= minimum <= maximum`."""
    integer(least)(minimum_name, minimum)
    integer(least)(maximum_name, maximum)
    if minimum > maximum:
        raise InvalidArgument(f"{minimum_name}={minimum!r} is above {maximum_name}={maximum!r}")
