"""The options that a server is started with, as one line of text.

Names are SGLang's, without `--` and without `speculative-`; vLLM's `method` and `num-speculative-tokens` and TensorRT-LLM's `max-draft-len`
are beside them. Everything is optional: a rule that needs an option which was not given says nothing.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_specdecode.errors import DraftError

#: The options that are read, with the type of each.
OPTIONS: Mapping[str, type] = {
    "algorithm": str,
    "method": str,
    "num-steps": int,
    "eagle-topk": int,
    "num-draft-tokens": int,
    "num-speculative-tokens": int,
    "max-draft-len": int,
    "dflash-block-size": int,
    "dspark-block-size": int,
    "draft-window-size": int,
    "draft-attention-backend": str,
    "attention-backend": str,
    "decode-attention-backend": str,
    "kv-cache-dtype": str,
    "dtype": str,
    "quantization": str,
    "page-size": int,
    "context-length": int,
    "tp": int,
    "pp": int,
    "dp-attention": bool,
    "skip-dp-mlp-sync": bool,
}

#: Other spellings that servers have for them.
_ALIASES: Mapping[str, str] = {
    "tp-size": "tp",
    "tensor-parallel-size": "tp",
    "pp-size": "pp",
    "pipeline-parallel-size": "pp",
    "enable-dp-attention": "dp-attention",
    "max-model-len": "context-length",
}

_TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class ServeOptionError(DraftError):
    """An option that is not known, or a value that it cannot have."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server is started with.

    Attributes:
        given: value by option name; only what was stated.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ServeOptions:
        """Read `name=value` pairs with spaces between, such as `algorithm=EAGLE3 num-steps=3`.

        The same options as a server's command line has them are read too: with `--`, with `speculative-` before the name, with `_` for
        `-`, and `--name value` for `--name=value`.

        Raises:
            ServeOptionError: a pair without `=`, an unknown name (with the nearest known ones), a name given twice, or a value of
                the wrong type.
        """
        given: dict[str, Any] = {}
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ServeOptionError(f"cannot be read: {error}") from None
        for word, name, value in _pairs(words):
            if name not in OPTIONS:
                near = difflib.get_close_matches(name, OPTIONS, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(OPTIONS)}"
                raise ServeOptionError(f"no serving option is called {name!r}; {hint}", got=name, due=near)
            if not value:
                raise ServeOptionError(f"{name} has no value; write {name}=VALUE", got=word)
            if name in given:
                raise ServeOptionError(f"{name} is given twice", got=word)
            given[name] = _value(name, value)
        return cls(given=given)

    def __getitem__(self, name: str) -> Any:
        """The option's value, or None where it was not given."""
        assert name in OPTIONS, name
        return self.given.get(name)

    def __bool__(self) -> bool:
        return bool(self.given)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.given.items())


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The words with the option's name and its value, empty where there is none; a word may be the value of the one before."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        option = name.removeprefix("--").replace("_", "-").removeprefix("speculative-")
        option = _ALIASES.get(option, option)
        if not equals and name.startswith("--"):
            if waiting and not waiting[0].startswith("--") and "=" not in waiting[0]:
                value = waiting.pop(0)
            elif OPTIONS.get(option) is bool:
                value = "true"
        yield word, option, value


def _value(name: str, text: str) -> Any:
    kind = OPTIONS[name]
    if kind is int:
        if not text.removeprefix("-").isdecimal() or len(text) > 12:
            raise ServeOptionError(f"{name}={text} is not a whole number", got=text)
        return int(text)
    if kind is bool:
        if text.lower() not in _TRUE:
            raise ServeOptionError(f"{name}={text} is neither true nor false", got=text)
        return _TRUE[text.lower()]
    return text
