"""Recorded traces: a text that the target wrote, with the hidden states that a draft taps.

Trainers record them for offline training, and the same files say what a draft would have been given in serving. Two layouts are read, T
tokens and K taps of width Ht:

    speculators, vLLM    `hs_<i>.safetensors`: token_ids [T], hidden_states [T, K + 1, Ht]: the taps in order, then the state behind the
                         target's last layer, *before* its final norm; or [T, K, Ht] without that one
    SpecForge            `rows_<a>-<b>/data_<i>.ckpt`, a dictionary that torch saved: input_ids [T], aux_hidden_state [1, T, K * Ht]
                         (hidden_states for DFlash) and hidden_state [1, T, Ht], the state *after* the final norm

Either may hold loss_mask [T], above zero where the token is the target's own. A safetensors file may say more in its metadata:
`prompt_length`, the tokens before the target's first; `layer_ids`, a JSON list of what each state but the last is, counted as the state
that enters layer i, so that more states than the draft taps can be recorded; `last_state`, `raw` or `normed`.

Opening a trace reads names only. A recording is checked when it is read: shapes against the draft's spec, ids against the vocabulary, a
mask's entries against 0, and that every number is finite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pytest_specdecode.checkpoint import read_pickle, read_safetensors
from pytest_specdecode.errors import DraftError
from pytest_specdecode.spec import DraftSpec, TapsSpec

if TYPE_CHECKING:
    import os

    import torch

T = TypeVar("T")

_PICKLES = (".ckpt", ".pt")
_GROUP = r"(?:dp_\d+_)?rows_\d+-\d+"
#: What each part goes by, in the order in which it is looked for.
_TOKENS = ("token_ids", "input_ids")
_TAPS = ("aux_hidden_state", "hidden_states")
_LAST = "hidden_state"
_MASK = "loss_mask"
#: Rows that are looked at together for numbers that are not finite.
_ROWS = 1024
#: Digits of a number of tokens, and characters of a bad value that are shown.
_DIGITS = 18
_SHOWN = 60


class TraceError(DraftError):
    """A recorded trace cannot be read, or does not fit the draft."""


class NothingCountedError(TraceError):
    """A trace fits the draft, and holds too little of the target's own text to count anything in."""


@dataclass(kw_only=True)
class Recording:
    """One file of a trace, read and checked.

    Attributes:
        name: the file's.
        tokens: int64 [T].
        states: [T, M, Ht] as stored, in the order of `boundaries`.
        boundaries: of each state, the layer that it enters; None for taps whose ids are not stated, which are taken in order.
        last: [T, Ht] behind the target's last layer, or None.
        last_is_normed: whether `last` has passed the target's final norm.
        own: bool [T], the tokens that are the target's; None where the file does not say.
        own_by: what says so, `loss mask` or `prompt length`.
        memo: what has been worked out of it, for several readings of one draft.
    """

    name: str
    tokens: torch.Tensor
    states: torch.Tensor
    boundaries: tuple[int, ...] | None
    last: torch.Tensor | None
    last_is_normed: bool
    own: torch.Tensor | None
    own_by: str = ""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for `key`."""
        if key not in self.memo:
            self.memo[key] = make()
        found: T = self.memo[key]
        return found


@dataclass(frozen=True)
class Trace:
    """A directory of recordings, or one.

    Attributes:
        path: as given.
        files: in the order of their numbers.
    """

    path: Path
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Trace:
        """The recordings in the directory `path`, or in its `hidden_states`, grouped by rows or not; or the one file `path`.

        Raises:
            TraceError: there are none.
        """
        place = Path(path)
        if place.is_file():
            return cls(place, (place,))
        if not place.is_dir():
            raise TraceError("is no file and no directory; give the directory with the recorded traces", path=place)
        nested = place / "hidden_states"
        files = _recordings(place) or _recordings(nested)
        if not files:
            looked = [inner for outer in (place, nested) for inner in (outer, *_groups(outer))]
            packed = next(
                (file for inner in looked for ending in ("gz", "zst") for file in inner.glob(f"*.{ending}")), None
            )
            hint = f"; {packed.name} is compressed, unpack it first" if packed is not None else ""
            raise TraceError(f"holds no hs_<i>.safetensors and no .ckpt{hint}", path=place)
        return cls(place, tuple(files))

    def read(self, file: Path, spec: DraftSpec) -> Recording:
        """The recording in `file`, checked against the draft that is `spec`.

        Raises:
            TraceError: naming the file and the key that does not fit.
        """
        parts, metadata = _load(file)
        return _Reader(file, parts, metadata, spec).recording()


def boundaries(taps: TapsSpec) -> tuple[int, ...] | None:
    """The layers that the tapped states enter; None where no ids are stated. Ids of no stated convention count as such already."""
    if taps.ids is None:
        return None
    return tuple(id + 1 for id in taps.ids) if taps.convention == "output" else taps.ids


def _groups(directory: Path) -> list[Path]:
    """The directories in `directory` that SpecForge puts so many rows in each."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if path.is_dir() and re.fullmatch(_GROUP, path.name)]


def _recordings(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    places = [directory, *_groups(directory)]
    found = [path for place in places for path in place.iterdir() if path.is_file() and not path.name.startswith(".")]
    named = [path for path in found if re.fullmatch(r"hs_\d+\.safetensors", path.name)]
    chosen = named or [path for path in found if path.suffix in (".safetensors", *_PICKLES)]
    return sorted(
        chosen, key=lambda path: ([int(part) for part in re.findall(r"\d+", path.stem)][-1:], path.name, str(path))
    )


def _load(file: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    if file.suffix in _PICKLES:
        return read_pickle(file), {}
    headers = read_safetensors(file)
    from safetensors import SafetensorError, safe_open

    wanted = {*_TOKENS, *_TAPS, _LAST, _MASK}
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            found = {header.name: handle.get_tensor(header.name) for header in headers if header.name in wanted}
            return found, handle.metadata() or {}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise TraceError(f"cannot be read: {error}", path=file) from None


class _Reader:
    """One file's tensors on their way into a `Recording`."""

    def __init__(
        self, file: Path, parts: Mapping[str, torch.Tensor], metadata: Mapping[str, str], spec: DraftSpec
    ) -> None:
        self.file, self.parts, self.metadata, self.spec = file, parts, metadata, spec

    def recording(self) -> Recording:
        for key in (*_TOKENS, *_TAPS, _LAST, _MASK):
            if key in self.parts and not _is_plain(self.parts[key]):
                self.fail(f"is {_form(self.parts[key])}; a plain tensor with its numbers is due", key)
        tokens = self.tokens()
        states, last, normed = self.states(len(tokens))
        names = self.layer_ids()
        known = boundaries(self.spec.taps) if names is None else names
        due = (self.spec.taps.count or 0) if names is None and self.spec.taps.required else len(names or ())
        if last is None and states.shape[1] == due + 1:
            states, last = states[:, :-1], states[:, -1]
        if states.shape[1] != due:
            got = states.shape[1] + (last is not None)
            what = f"{due} layer_ids are listed" if names is not None else f"the draft taps {due}"
            self.fail(
                f"holds {got} states a token; {what}, so {due} or, with the last, {due + 1} are due",
                self.taps_key,
                got=got,
                due=[due, due + 1],
            )
        if not due and last is None:
            self.fail("no last state; this draft reads the target's last hidden state", self.taps_key)
        own, own_by = self.own(len(tokens))
        return Recording(
            name=self.file.name,
            tokens=tokens,
            states=states,
            boundaries=known if due else (),
            last=last,
            last_is_normed=normed,
            own=own,
            own_by=own_by,
        )

    def tokens(self) -> torch.Tensor:
        key = self.key(_TOKENS, "the recorded token ids")
        found = self.parts[key]
        found = found[0] if found.ndim == 2 and found.shape[0] == 1 else found
        if found.ndim != 1 or found.is_floating_point() or found.is_complex() or str(found.dtype) == "torch.bool":
            self.fail(f"is {_described(found)}; integers of shape [T] are due", key)
        if len(found) < 2:
            self.fail(f"holds {len(found)} tokens; a trace needs at least 2", key)
        found = found.long()
        vocab = self.spec.vocabulary.vocab_size
        least, most = int(found.min()), int(found.max())
        if least < 0 or (vocab is not None and most >= vocab):
            wrong = least if least < 0 else most
            due = "" if vocab is None else f" of a vocabulary of {vocab}"
            self.fail(f"holds the id {wrong}, which is none{due}", key, got=wrong, due=vocab)
        return found

    def states(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        """The taps, the last state where it is stored apart, and whether the last state is normed."""
        import torch

        width = self.spec.target_hidden_size
        if width is None:
            raise TraceError("is not stated; a trace cannot be read without it", key="target_hidden_size")
        apart = _LAST in self.parts
        last = None
        if apart:
            last = self.rows(_LAST, rows)
            if last.ndim != 2 or last.shape[1] != width:
                self.fail(f"is {_described(last)}; [{rows}, {width}] is due", _LAST, due=[rows, width])
        if apart and not any(key in self.parts for key in _TAPS):
            assert last is not None
            taps = last[:, None][:, :0]
        else:
            taps = self.rows(self.taps_key, rows)
            if taps.ndim == 2 and width and taps.shape[1] % width == 0:
                taps = torch.unflatten(taps, 1, (-1, width))
            if taps.ndim != 3 or taps.shape[2] != width:
                message = f"is {_described(taps)}; [{rows}, K, {width}] is due, the draft reads states {width} wide"
                self.fail(message, self.taps_key, due=[rows, "K", width])
        stated = self.metadata.get("last_state")
        if stated not in (None, "raw", "normed"):
            shown = _short(stated)
            self.fail(f"is {shown!r}; raw or normed is due", "last_state", got=shown)
        return taps, last, apart if stated is None else stated == "normed"

    def rows(self, key: str, rows: int) -> torch.Tensor:
        """The float tensor `key` of a row per token, without a leading batch of one, every number finite."""
        found = self.parts[key]
        if found.ndim >= 3 and found.shape[0] == 1 and rows > 1:
            found = found[0]
        if not found.is_floating_point() or found.dtype.itemsize < 2:
            self.fail(f"is {_described(found)}; floats of at least 16 bits are due", key)
        if found.ndim < 2 or found.shape[0] != rows:
            self.fail(f"is {_described(found)} beside {rows} tokens; a row for each token is due", key)
        for start in range(0, rows, _ROWS):
            wrong = ~found[start : start + _ROWS].isfinite().flatten(1).all(1)
            if bool(wrong.any()):
                self.fail(f"is not finite at token {start + int(wrong.nonzero()[0])}", key, got="NaN or infinity")
        return found

    def own(self, rows: int) -> tuple[torch.Tensor | None, str]:
        """Which tokens are the target's own, and what says so."""
        import torch

        if _MASK in self.parts:
            mask = self.parts[_MASK]
            mask = mask[0] if mask.ndim == 2 and mask.shape[0] == 1 else mask
            if tuple(mask.shape) != (rows,):
                self.fail(f"is {_described(mask)}; [{rows}], one entry per token, is due", _MASK)
            if mask.is_complex() or (mask.is_floating_point() and mask.dtype.itemsize < 2):
                self.fail(f"is {_described(mask)}; bool, whole numbers or floats of at least 16 bits are due", _MASK)
            mask = mask if mask.is_floating_point() else mask.long()
            # NaN is not above zero, and not below it either.
            wrong = ~(mask >= 0)
            if bool(wrong.any()):
                place = int(wrong.nonzero()[0])
                got = mask[place].item()
                self.fail(f"holds {got} at token {place}; 0 or 1 is due", _MASK, got=str(got), due=[0, 1])
            return mask > 0, "loss mask"
        stated = self.metadata.get("prompt_length")
        if stated is None:
            return None, ""
        # So many digits are more than there are tokens, and more than int() takes.
        if not stated.isdecimal() or len(stated) > _DIGITS or not int(stated) <= rows:
            shown = _short(stated)
            self.fail(f"is {shown!r}; a whole number up to {rows} is due", "prompt_length", got=shown)
        return torch.arange(rows) >= int(stated), "prompt length"

    def layer_ids(self) -> tuple[int, ...] | None:
        stated = self.metadata.get("layer_ids")
        if stated is None:
            return None
        try:
            found = json.loads(stated)
        except (ValueError, RecursionError):
            found = None
        shown = _short(stated)
        if not isinstance(found, list) or not all(isinstance(id, int) and not isinstance(id, bool) for id in found):
            self.fail(f"is {shown!r}; a JSON list of whole numbers is due", "layer_ids", got=shown)
        if any(id < 0 for id in found):
            self.fail(f"names a layer below 0: {shown}", "layer_ids", got=shown)
        if len(set(found)) != len(found):
            self.fail(f"names a layer twice: {shown}", "layer_ids", got=shown)
        return tuple(found)

    @property
    def taps_key(self) -> str:
        return self.key(_TAPS, "the recorded hidden states")

    def key(self, names: tuple[str, ...], what: str) -> str:
        """The first of `names` that the file has."""
        for name in names:
            if name in self.parts:
                return name
        return self.fail(f"is missing; {what} are due ({' or '.join(names)})", names[0])

    def fail(self, message: str, key: str, got: Any = None, due: Any = None) -> NoReturn:
        raise TraceError(message, path=self.file, key=key, got=got, due=due)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it can be looked at number by number: dense, with memory of its own, and not quantised."""
    return str(tensor.layout) == "torch.strided" and tensor.device.type != "meta" and not tensor.is_quantized


def _form(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "without its numbers (device meta)"
    return "quantised" if tensor.is_quantized else f"stored as {str(tensor.layout).removeprefix('torch.')}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
