"""Typed reading of a raw configuration.

A family's parser asks for what it needs by name and type. A value of the wrong type is noted as a fault and read as absent, so
that one bad key is one finding and never a traceback; a null counts as absent, as every engine's readers treat it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_specdecode.errors import ConfigError
from pytest_specdecode.spec import Stated

#: No draft comes near; a reader that believes more can be made to eat the machine.
MAX_EXTENT = 1 << 31
MAX_LAYERS = 512
MAX_EXPERTS = 4096


class Section:
    """One object of a configuration, read by type.

    Attributes:
        values: the raw mapping.
        prefix: dotted path of this object in the file, empty for the root.
        faults: shared by all sections of one file; each wrong type is noted once.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        file: Path,
        prefix: str = "",
        faults: dict[str, ConfigError] | None = None,
    ) -> None:
        self.values = values
        self.file = file
        self.prefix = prefix
        self.faults: dict[str, ConfigError] = {} if faults is None else faults

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def path(self, key: str) -> str:
        """Dotted path of `key` in the file."""
        return f"{self.prefix}.{key}" if self.prefix else key

    def raw(self, key: str) -> Any:
        """The value of `key` as parsed, None where absent."""
        return self.values.get(key)

    def section(self, key: str) -> Section:
        """The object under `key`; an empty one where it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self._fault(key, value, "an object")
            value = None
        return Section(value or {}, file=self.file, prefix=self.path(key), faults=self.faults)

    def extent(self, *keys: str) -> int | None:
        """The first of `keys` that states a whole number, 0 <= n < 2**31."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_EXTENT:
                return value
            self._fault(key, value, f"a whole number from 0 to {MAX_EXTENT - 1}")
        return None

    def layers(self, key: str = "num_hidden_layers") -> int | None:
        """A number of layers or of taps, at most `MAX_LAYERS`."""
        value = self.extent(key)
        if value is not None and value > MAX_LAYERS:
            self._fault(key, value, f"at most {MAX_LAYERS}")
            return None
        return value

    def number(self, *keys: str) -> float | None:
        """The first of `keys` that states a number."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
            self._fault(key, value, "a number")
        return None

    def fraction(self, key: str) -> float | None:
        """A number from 0 to 1."""
        value = self.number(key)
        if value is not None and not 0 <= value <= 1:
            self._fault(key, value, "a number from 0 to 1")
            return None
        return value

    def flag(self, *keys: str) -> bool | None:
        """The first of `keys` that states true or false."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool):
                return value
            self._fault(key, value, "true or false")
        return None

    def text(self, *keys: str) -> str | None:
        """The first of `keys` that states a string."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, str):
                return value
            self._fault(key, value, "a string")
        return None

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where absent. A lone string or other elements are a fault."""
        value = self.values.get(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._fault(key, value, "a list of strings")
        if isinstance(value, str):
            return (value,)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    def ids(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return tuple(value)
        self._fault(key, value, "a list of whole numbers")
        return None

    def stated(self, *keys: str) -> tuple[Stated, ...]:
        """Every one of `keys` that is there with a value other than null."""
        return tuple(
            Stated(key=self.path(key), value=self.values[key]) for key in keys if self.values.get(key) is not None
        )

    def _fault(self, key: str, value: Any, due: str) -> None:
        self.faults.setdefault(
            self.path(key),
            ConfigError(f"{_short(value)} where {due} was due", path=self.file, key=self.path(key), got=value, due=due),
        )


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value) if isinstance(value, (int, float, str)) else reprlib.repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
