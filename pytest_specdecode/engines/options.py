"""The options that a server is started with, as one line of text.

Names are SGLang's, without `--` and without `speculative-`; vLLM's `method` and `num-speculative-tokens` and TensorRT-LLM's `max-draft-len`
are beside them. Everything is optional: a rule that needs an option which was not given says nothing.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_specdecode.engines.server_options import SHORT, STARTS, is_passed_over
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
    "algo": "algorithm",
}

_SHORT: Mapping[str, str] = {"-tp": "tp", "-pp": "pp", "-q": "quantization", "-sc": "speculative-config"}

#: Numbers below one mean nothing to any server; others are judged in the engines' own words.
_COUNTS = ("page-size", "context-length", "tp", "pp")

_CACHE_TYPES = """
auto bf16 bfloat16 float16 fp16 half fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla fp4_e2m1 nvfp4 mxfp8 int8 int4 fp8_per_token_head
int8_per_token_head int4_per_token_head turboquant_k8v4 turboquant_4bit_nc turboquant_3bit_nc turboquant_k3v4_nc
"""
_BACKENDS = """
aiter ascend cutedsl_mla cutlass_mla dual_chunk_flash_attn fa3 fa4 flashinfer flashmla flex_attention hybrid_linear_attn intel_amx
intel_xpu nsa tokenspeed_mla torch_native triton trtllm trtllm_mha trtllm_mla wave compressed dsa dsv4 vanilla flash_attn flash_attn_mla
flashattn_mla flash_attn_diffkv flashinfer_mla flashinfer_mla_sparse flashmla_sparse triton_attn triton_mla rocm_attn rocm_aiter_fa
rocm_aiter_unified_attn rocm_aiter_mla rocm_aiter_mla_sparse rocm_aiter_triton_mla tree_attn xformers torch_sdpa cpu_attn xpu_mla_sparse
fa2 tokenspeed_attn cutedsl hpc_ops minicpm_flashattn minicpm_flashinfer mlu
"""

#: Names that some engine takes, by option; what is none of them is most likely misspelled.
KNOWN_VALUES: Mapping[str, frozenset[str]] = {
    "kv-cache-dtype": frozenset(_CACHE_TYPES.split()),
    "attention-backend": frozenset(_BACKENDS.split()),
    "decode-attention-backend": frozenset(_BACKENDS.split()),
    "draft-attention-backend": frozenset(_BACKENDS.split()),
}

_TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class ServeOptionError(DraftError):
    """An option that is not known, or a value that it cannot have."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server is started with.

    Attributes:
        given: value by option name; only what was stated.
        ignored: names of the server's options that were given too and that no rule looks at, in order, as they were written.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ServeOptions:
        """Read `name=value` pairs with spaces between, such as `algorithm=EAGLE3 num-steps=3`.

        A server's command line is read too, whole or in part: with `--`, with `speculative-` before the name, with `_` for `-`,
        `--name value` for `--name=value`, `-tp 4`, vLLM's `--speculative-config` with its JSON, and the command itself before them. The
        server's options that no rule looks at are put into `ignored`.

        Raises:
            ServeOptionError: a word that is no option, an unknown name (with the nearest known ones), a name given twice, or a value that
                the option cannot have.
        """
        given: dict[str, Any] = {}
        ignored: dict[str, None] = {}
        try:
            # A line that goes on is one line.
            words = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "))
        except ValueError as error:
            raise ServeOptionError(f"cannot be read: {error}") from None
        for word, name, value in _options(words):
            if name is None:
                ignored[word] = None
                continue
            if name not in OPTIONS:
                near = difflib.get_close_matches(name, OPTIONS, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(OPTIONS)}"
                raise ServeOptionError(f"no serving option is called {name!r}; {hint}", got=name, due=near)
            if not value:
                raise ServeOptionError(f"{name} has no value; write {name}=VALUE", got=word)
            if name in given:
                raise ServeOptionError(f"{name} is given twice", got=word)
            found = _value(name, value)
            if found is None:
                ignored[word] = None
            else:
                given[name] = found
        return cls(given=given, ignored=tuple(ignored))

    def __getitem__(self, name: str) -> Any:
        """The option's value, or None where it was not given."""
        assert name in OPTIONS, name
        return self.given.get(name)

    def __bool__(self) -> bool:
        return bool(self.given)

    def unknown(self, name: str) -> str | None:
        """The value of `name` where no engine is known to take it, else None."""
        value = self[name]
        return (
            value if isinstance(value, str) and value.lower() not in KNOWN_VALUES.get(name, (value.lower(),)) else None
        )

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.given.items())


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """Each option as it was written, its name and its value, empty where there is none; the name is None where it is passed over."""
    waiting, is_command = _without_command(list(words))
    while waiting:
        word = waiting.pop(0)
        written, equals, value = word.partition("=")
        dashed = written.startswith("-")
        name = _SHORT.get(written, written.lstrip("-")).replace("_", "-")
        option = name.removeprefix("speculative-")
        option = _ALIASES.get(option, option)
        if name.partition(".")[0] == "speculative-config":
            if not equals and waiting:
                value = waiting.pop(0)
            yield from _configured(name.partition(".")[2], value)
        elif option in OPTIONS:
            if not equals and dashed:
                if waiting and not _is_option(waiting[0]) and "=" not in waiting[0]:
                    value = waiting.pop(0)
                elif OPTIONS[option] is bool:
                    value = "true"
            yield word, option, value
        elif (written in SHORT or is_passed_over(option)) and not (_near(option) and option.startswith(STARTS)):
            if dashed and not equals:
                while waiting and not _is_option(waiting[0]) and not _is_pair(waiting[0]):
                    waiting.pop(0)
            yield written, None, ""
        elif is_command and not dashed and not equals:
            yield word, None, ""
        else:
            if dashed and not equals and waiting and not _is_option(waiting[0]):
                value = waiting.pop(0)
            yield word, option, value


def _without_command(words: list[str]) -> tuple[list[str], bool]:
    """The words after the command that starts a server, its model among what is dropped, and whether there is such a command."""
    start = 0
    while start < len(words) and re.match(r"[A-Z][A-Z0-9_]*=", words[start]):
        start += 1
    rest = words[start:]
    first = os.path.basename(rest[0]) if rest else ""
    if re.fullmatch(r"python[\d.]*", first) and len(rest) > 2 and rest[1] == "-m":
        return rest[3:], True
    if first in ("vllm", "sglang", "trtllm-serve"):
        rest = rest[2:] if rest[1:2] == ["serve"] else rest[1:]
        return (rest[1:] if rest and not _is_option(rest[0]) and not _is_pair(rest[0]) else rest), True
    return words, False


def _configured(key: str, text: str) -> Iterator[tuple[str, str | None, str]]:
    """What vLLM's `speculative-config` states: a JSON object, or the value of one `key` of it."""
    form = """--speculative-config='{"method": "eagle3", "num_speculative_tokens": 3}'"""
    found: Any = {key: text}
    if not key:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise ServeOptionError(f"speculative-config is not a JSON object; quote it, as in {form}", got=text)
    for name, value in found.items():
        option = name.replace("_", "-")
        if option in ("method", "num-speculative-tokens"):
            if value is not None:
                yield f"speculative-config.{name}", option, value if isinstance(value, str) else json.dumps(value)
            continue
        near = difflib.get_close_matches(name, ("method", "num_speculative_tokens"), n=1, cutoff=0.75)
        if near:
            raise ServeOptionError(
                f"no key of speculative-config is called {name!r}; did you mean {near[0]}?", got=name, due=near
            )
        yield f"speculative-config.{name}", None, ""


def _is_option(word: str) -> bool:
    """Whether `word` is a name with dashes, and no negative number."""
    return re.match(r"--?[A-Za-z]", word) is not None


def _is_pair(word: str) -> bool:
    """Whether `word` is one of ours, written `name=value`."""
    name, equals, _ = word.partition("=")
    name = name.replace("_", "-").removeprefix("speculative-")
    return bool(equals) and _ALIASES.get(name, name) in OPTIONS


def _near(name: str) -> bool:
    return bool(difflib.get_close_matches(name, (*OPTIONS, *_ALIASES), n=1, cutoff=0.88))


def _value(name: str, text: str) -> Any:
    """The value, or None where it leaves the choice to the server."""
    kind = OPTIONS[name]
    if kind is int:
        if name == "context-length":
            if text in ("auto", "-1"):
                return None
            text = _long(text)
        if not re.fullmatch(r"-?[0-9]{1,12}", text):
            raise ServeOptionError(f"{name}={text} is not a whole number", got=text)
        if name in _COUNTS and int(text) < 1:
            raise ServeOptionError(f"{name}={text} is less than one", got=text, due="at least 1")
        return int(text)
    if kind is bool:
        if text.lower() not in _TRUE:
            raise ServeOptionError(f"{name}={text} is neither true nor false", got=text)
        return _TRUE[text.lower()]
    return text


def _long(text: str) -> str:
    """A length as vLLM takes it, `32k` for thousands and `32K` for 1024s, written out; any other text as it is."""
    match = re.fullmatch(r"([0-9]{1,9})(\.[0-9]{1,6})?([kKmM])", text)
    if match is None or (match[2] and match[3].isupper()):
        return text
    times = {"k": 1000, "K": 1 << 10, "m": 1_000_000, "M": 1 << 20}[match[3]]
    return str(round(float(match[1] + (match[2] or "")) * times))
