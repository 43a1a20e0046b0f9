"""Which implementation of the stacked K/V path the suite is run against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytest_specdecode.engines.subjects import NAMES, fused_kv_class

OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An implementation of the stacked K/V path.

    Attributes:
        name: for people and reports: `ours`, `sglang 0.5.23`, `mine.path:FusedKV`.
        build: called with (layers, rotary_emb, num_kv_heads, head_dim, device).
    """

    name: str
    build: Callable[..., Any] = field(repr=False)

    @property
    def is_ours(self) -> bool:
        """Whether it is this library's own."""
        return self.name == OURS


def subject_of(given: str | Callable[..., Any] | Subject) -> Subject:
    """The implementation that is called `given`, or that it is.

    Args:
        given: `ours`, `sglang`, `vllm`, `MODULE:CLASS`, or what is to be called.

    Raises:
        DraftError: no such name or class, not callable, or the engine is not installed.
    """
    if isinstance(given, Subject):
        return given
    if not isinstance(given, str):
        return _of_class(given)
    build = fused_kv_class(given)
    if _is_ours(build):
        return Subject(name=OURS, build=build)
    version = None
    if given in NAMES and given != OURS:
        from pytest_specdecode.engines.subjects.installed import version_of

        version = version_of(given)
    return Subject(name=given if version is None else f"{given} {version}", build=build)


def _of_class(given: Callable[..., Any]) -> Subject:
    from pytest_specdecode.errors import DraftError

    if not callable(given):
        raise DraftError(
            f"a class or a name of a fused-KV path is due, not {type(given).__name__}", got=repr(given), due=NAMES
        )
    if _is_ours(given):
        return Subject(name=OURS, build=given)
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    return Subject(name=f"{module}:{name}" if name else type(given).__qualname__, build=given)


def _is_ours(build: Callable[..., Any]) -> bool:
    place = (getattr(build, "__module__", None), getattr(build, "__qualname__", None))
    return place == ("pytest_specdecode.fused_kv.path", "FusedKV")
