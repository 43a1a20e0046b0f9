"""Every error this library raises on purpose, with fields a program can read.

A message is one line and says where, what was got and what was due; the same facts stand in the fields, so that a finding, a report
or a caller's test never has to take the prose apart.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any


def printable(text: str) -> str:
    """`text` on one line that is safe to show: names come from files, and may hold line ends and terminal codes."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


class DraftError(Exception):
    """Something about a draft is not as it must be.

    Attributes:
        message: what happened, without the place.
        path: the file or directory meant, as text, or None.
        key: the key in that file (a config key, a tensor name, a shard), or None.
        got: what was found, or None.
        due: what was expected, or None.
    """

    def __init__(
        self, message: str, *, path: object = None, key: str | None = None, got: Any = None, due: Any = None
    ) -> None:
        self.message = message
        self.path = None if path is None else str(path)
        self.key = key
        self.got = got
        self.due = due
        super().__init__(str(self))

    @property
    def brief(self) -> str:
        """The message with what it is about: the key, else the file's name."""
        subject = self.key or (None if self.path is None else PurePath(self.path).name)
        return printable(f"{subject}: {self.message}" if subject else self.message)

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.path, self.key) if part)
        return printable(f"{place}: {self.message}" if place else self.message)


class CheckpointError(DraftError):
    """The files of a checkpoint cannot be read, or contradict one another."""


class ConfigError(DraftError):
    """`config.json` is not a usable draft configuration."""


class UnknownFamilyError(ConfigError):
    """No draft family, or more than one, is recognised; `got` maps each family to the signals that speak for it."""


class LayerBuildError(DraftError, ValueError):
    """A layer cannot be built from what the spec and the checkpoint hold."""


class NoReferenceError(LayerBuildError):
    """This library has no reference forward for such a layer; nothing is said of the draft."""


class MissingDependencyError(DraftError, ImportError):
    """An optional package is needed for what was asked."""


class FusedKVError(DraftError):
    """A stack of layers, or the input of a fused-KV call, cannot be served.

    Attributes:
        axis: the homogeneity axis (an entry of `pytest_specdecode.AXES`) or the input's name.
        expected, got: the two values that disagree.
        layer: index of the first offending layer, or None where the fault is not one layer's.
    """

    def __init__(
        self, message: str, *, axis: str | None = None, expected: Any = None, got: Any = None, layer: int | None = None
    ) -> None:
        super().__init__(message, got=got, due=expected)
        self.axis = axis
        self.expected = expected
        self.layer = layer


class StackMismatchError(FusedKVError, ValueError):
    """Layers of one stack differ in what they must share, or an argument does not fit them."""


class StackUnsupportedError(FusedKVError, NotImplementedError):
    """The layers agree, on something that the stacked path does not do."""


class StackRangeError(FusedKVError, RuntimeError):
    """A table is too short for the positions asked for."""


class InputError(FusedKVError, ValueError):
    """The arguments of one `materialize` call do not fit the stack or one another."""
