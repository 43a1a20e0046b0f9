"""`Target`: what the model that a draft proposes for says of itself.

Its `config.json` is enough. Tokenizer files and tensor headers are read where they lie beside it and somebody asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_specdecode.checkpoint import CONFIG_NAME, INDEX_NAME, TensorHeader, read_json_object, read_safetensors
from pytest_specdecode.errors import CheckpointError

#: Above this a tokenizer file is refused; the largest in public use is about half of it.
MAX_TOKENIZER_BYTES = 64_000_000

#: What nearly every text holds, in the spellings of byte-level and of SentencePiece vocabularies.
_COMMON: Mapping[str, tuple[str, ...]] = {
    "newline": ("Ċ", "<0x0A>", "\n"),
    "space": ("Ġ", "▁", " "),
    ",": (",",),
    ".": (".",),
    **{f" {word}": (f"Ġ{word}", f"▁{word}") for word in ("the", "of", "and", "to", "a", "in", "is")},
}

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte|tok_embeddings|embed|embeddings)\.weight$")
#: Embeddings of other things: pictures, sounds, and those that a prediction layer inside the target carries.
_NOT_THE_EMBEDDING = re.compile(r"(^|\.)(vision\w*|visual|audio\w*|mtp|layers|blocks|h|patch\w*|position\w*)\.")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A target's tokens, so far as its files name them.

    Attributes:
        ids: id by token, as the file spells it; added and special tokens are among them.
        special: token by role, such as `eos_token`.
        whole: whether the whole vocabulary is known, and not the added tokens alone.
    """

    ids: Mapping[str, int] = field(repr=False)
    special: Mapping[str, str]
    whole: bool

    def role(self, role: str) -> int | None:
        """The id of the token in `role`, such as `mask_token`, or None."""
        return self.ids.get(self.special.get(role, ""))

    @cached_property
    def common(self) -> dict[str, int]:
        """Ids of tokens that nearly every text holds, by what they stand for; only those that the vocabulary has."""
        if not self.whole:
            return {}
        found = {
            meaning: next((self.ids[token] for token in spellings if token in self.ids), None)
            for meaning, spellings in _COMMON.items()
        }
        return {meaning: id for meaning, id in found.items() if id is not None}


@dataclass(frozen=True)
class Target:
    """A target's configuration, and the files beside it.

    Attributes:
        path: its directory.
        config: the whole of `config.json`.
    """

    path: Path
    config: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Target:
        """The target in the directory `path`.

        Raises:
            CheckpointError: there is no such directory, or no readable `config.json` in it.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError("is not a directory; give the target's directory", path=directory)
        if not (directory / CONFIG_NAME).exists():
            raise CheckpointError("holds no config.json; give the target's directory", path=directory)
        # What others wrote is read as Python's json reads it: `Infinity` is found in public targets.
        return cls(directory, read_json_object(directory / CONFIG_NAME, odd=[]))

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the language model: a nested `text_config` (or the like) of a multimodal one, else the whole."""
        for key in ("text_config", "llm_config", "language_config"):
            nested = self.config.get(key)
            if isinstance(nested, dict):
                return nested
        return self.config

    def number(self, key: str) -> int | None:
        """The whole number at `key`, in the language model's configuration or beside it."""
        for place in (self.text, self.config):
            value = place.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @property
    def hidden_size(self) -> int | None:
        """Width of its hidden states."""
        return self.number("hidden_size")

    @property
    def vocab_size(self) -> int | None:
        """Rows of its embedding, as stated."""
        return self.number("vocab_size")

    @property
    def num_hidden_layers(self) -> int | None:
        """Its depth."""
        return self.number("num_hidden_layers")

    @property
    def rope_theta(self) -> float | None:
        """The base of its rotary embedding, of full attention where layer types have bases of their own."""
        for place in (self.rope, self.text, self.config):
            theta = place.get("rope_theta")
            if isinstance(theta, (int, float)) and not isinstance(theta, bool):
                return float(theta)
        return None

    @cached_property
    def rope(self) -> Mapping[str, Any]:
        """Its RoPE parameters: `rope_parameters`, those of full attention where there are several, else `rope_scaling`; or empty."""
        for place in (self.text, self.config):
            for key in ("rope_parameters", "rope_scaling"):
                found = place.get(key)
                if isinstance(found, dict):
                    nested = found.get("full_attention")
                    return nested if isinstance(nested, dict) else found
        return {}

    @cached_property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        """Its RoPE parameters, one record per kind of layer, each with its `rope_theta` where one is stated; empty where none are."""
        nested = [item for item in self._rope_place.values() if isinstance(item, dict) and "rope_theta" in item]
        flat = next((place["rope_theta"] for place in (self.text, self.config) if "rope_theta" in place), None)
        if nested:
            return tuple(nested)
        whole = {"rope_theta": flat, **self._rope_place} if flat is not None else dict(self._rope_place)
        # Gemma 3's sliding layers have a base of their own.
        local = [place["rope_local_base_freq"] for place in (self.text, self.config) if "rope_local_base_freq" in place]
        return (*([whole] if whole else []), *({"rope_theta": theta} for theta in local[:1]))

    @property
    def _rope_place(self) -> Mapping[str, Any]:
        places = [place.get(key) for place in (self.text, self.config) for key in ("rope_parameters", "rope_scaling")]
        return next((found for found in places if isinstance(found, dict)), {})

    @property
    def max_position_embeddings(self) -> int | None:
        """The positions that it was trained for, as stated."""
        return self.number("max_position_embeddings")

    @property
    def is_mla(self) -> bool:
        """Whether it keeps latent rows instead of keys and values."""
        return self.number("kv_lora_rank") is not None

    @property
    def architectures(self) -> tuple[str, ...]:
        """As stated, strings only."""
        stated = self.config.get("architectures")
        return tuple(item for item in stated if isinstance(item, str)) if isinstance(stated, list) else ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What it says of its own name: `_name_or_path`, and the repository where it lies in a Hugging Face cache."""
        stated = self.config.get("_name_or_path")
        found = [stated] if isinstance(stated, str) and stated else []
        for part in Path(os.path.abspath(self.path)).parts:
            if part.startswith("models--"):
                found.append(part.removeprefix("models--").replace("--", "/"))
        return tuple(found)

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """How its weights are stored quantised; empty where they are not."""
        for place in (self.config, self.text):
            for key in ("quantization_config", "compression_config"):
                found = place.get(key)
                if isinstance(found, dict) and found:
                    return found
        return {}

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end its text: of `generation_config.json`, of its configuration, of its tokenizer; each once.

        Raises:
            CheckpointError: a file that states them is there and cannot be read.
        """
        generation = self._side_file("generation_config.json") or {}
        places = [_ids(place.get("eos_token_id")) for place in (generation, self.text, self.config)]
        tokenizer = self.tokenizer
        from_tokenizer = None if tokenizer is None else tokenizer.role("eos_token")
        return tuple(dict.fromkeys([*(id for ids in places for id in ids), *_ids(from_tokenizer)]))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokens from `tokenizer.json` or `vocab.json`, and `tokenizer_config.json`; None where none of them is there.

        Raises:
            CheckpointError: one of the files is there and cannot be read.
        """
        whole = self._side_file("tokenizer.json", MAX_TOKENIZER_BYTES)
        config = self._side_file("tokenizer_config.json")
        plain = None if whole is not None else self._side_file("vocab.json", MAX_TOKENIZER_BYTES)
        if whole is None and config is None and plain is None:
            return None
        ids = _vocabulary(whole.get("model")) if whole is not None else _only_ids(plain or {})
        is_whole = bool(ids)
        added = [] if whole is None else whole.get("added_tokens")
        for item in added if isinstance(added, list) else []:
            if isinstance(item, dict) and isinstance(item.get("content"), str):
                ids |= _only_ids({item["content"]: item.get("id")})
        decoder = {} if config is None else config.get("added_tokens_decoder")
        for key, item in (decoder if isinstance(decoder, dict) else {}).items():
            token = _token(item)
            if token is not None and key.isdecimal():
                ids |= _only_ids({token: int(key)})
        roles = {} if config is None else {key: _token(item) for key, item in config.items() if key.endswith("_token")}
        return Tokenizer(
            ids=ids, special={role: token for role, token in roles.items() if token is not None}, whole=is_whole
        )

    @cached_property
    def embedding(self) -> TensorHeader | None:
        """Header of its token embedding, where weights lie beside the configuration; read from the one shard that holds it.

        Raises:
            CheckpointError: the index or that shard is there and cannot be read.
        """
        return next((self._header(name) for name in self._stored if _is_embedding(name)), None)

    @property
    def embedding_rows(self) -> int | None:
        """Rows of its token embedding as stored; None where its weights are not there or cannot be read."""
        try:
            header = self.embedding
        except CheckpointError:
            return None
        return header.shape[0] if header is not None and len(header.shape) == 2 else None

    @cached_property
    def has_dense_head(self) -> bool | None:
        """Whether its head is stored in a float dtype of 16 bits or more; None where no head of its own is stored or can be read."""
        try:
            names = [name for name in self._stored if re.search(r"(^|\.)lm_head\.", name)]
            dense = next((name for name in names if name.endswith("lm_head.weight")), None)
            header = None if dense is None else self._header(dense)
        except CheckpointError:
            return None
        if not names:
            return None
        return header is not None and header.dtype in ("float16", "bfloat16", "float32")

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """The file of each tensor, by its name; empty where no weights lie beside the configuration."""
        index = self._side_file(INDEX_NAME, MAX_TOKENIZER_BYTES)
        if index is None:
            single = self.path / "model.safetensors"
            return {header.name: single.name for header in read_safetensors(single)} if single.is_file() else {}
        shards = index.get("weight_map")
        named = shards.items() if isinstance(shards, dict) else ()
        return {name: os.path.basename(shard) for name, shard in named if isinstance(shard, str)}

    def _header(self, name: str) -> TensorHeader | None:
        file = self.path / self._stored[name]
        headers = read_safetensors(file) if file.is_file() else []
        return next((header for header in headers if header.name == name), None)

    def _side_file(self, name: str, limit: int = 16_000_000) -> dict[str, Any] | None:
        path = self.path / name
        return read_json_object(path, limit, odd=[]) if path.is_file() else None


def _is_embedding(name: str) -> bool:
    return _EMBEDDING.search(name) is not None and _NOT_THE_EMBEDDING.search(name) is None


def _vocabulary(model: Any) -> dict[str, int]:
    """Ids of the tokens of a `tokenizer.json`'s model: an object of ids, or Unigram's list of pieces."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return _only_ids(vocab)
    if not isinstance(vocab, list):
        return {}
    pieces: Sequence[Any] = [item[0] if isinstance(item, list) and item else None for item in vocab]
    return {piece: id for id, piece in enumerate(pieces) if isinstance(piece, str)}


def _only_ids(found: Mapping[str, Any]) -> dict[str, int]:
    return {token: id for token, id in found.items() if isinstance(id, int) and not isinstance(id, bool)}


def _token(value: Any) -> str | None:
    """A token as tokenizer files write it: its text, or an object that holds it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ids(value: Any) -> Iterator[int]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item
