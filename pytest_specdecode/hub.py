"""A model on the Hugging Face Hub, laid out as a local directory that every reader takes for an ordinary checkpoint.

Judging a configuration and headers needs kilobytes of a repository of gigabytes. So each file of a repository is laid out as a stand-in, a
sparse file of its true size, with a note beside it that says where it comes from. Readers say what they are about to read: the header of a
safetensors file comes by range requests, anything else is downloaded whole into the Hub's own cache, where every other tool finds it, and
the stand-in becomes a link to it. Files are put in place whole or not at all, and one process at a time.

The directory is keyed by commit and lies among the Hub's assets (`HF_ASSETS_CACHE`), so that a second run asks only which commit the
revision is. `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean to `huggingface_hub`, which does the network and
is imported only where a reference is resolved or a stand-in is read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_specdecode.errors import DraftError, MissingDependencyError

SCHEME = "hf://"
INSTALL = "pip install 'pytest-specdecode[hub]'"

_NAME = r"[A-Za-z0-9_][\w.-]*"
_PLAIN = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[^\s@]+))?", re.ASCII)
#: Behind hf:// the oldest repositories, which have no owner, are meant too.
_EXPLICIT = re.compile(rf"(?P<repo>(?:{_NAME}/)?{_NAME})(?:@(?P<revision>[^\s@]+))?", re.ASCII)

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
#: Folder of the notes that mark stand-ins, one by the name of each.
_NOTES = ".hub"
#: Beside them, the notes of files that were fetched since, and locks. No file of a repository is laid out whose name starts with a dot.
_FETCHED = ".fetched"
_LOCKS = ".locks"
#: Bytes of the first request for a header; most headers of drafts are shorter. Smaller files are downloaded whole.
_FIRST = 1 << 16
#: A header is not followed beyond this; the reader refuses it.
_LONGEST = 100_000_000


class HubError(DraftError):
    """A model cannot be had from the Hub. This says nothing of the model."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A repository on the Hub, at a revision.

    Attributes:
        repo: `org/name`.
        revision: a branch, a tag or a commit; None for the main branch.
    """

    repo: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """The last part of the repository's name."""
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse(text: str, here: str | os.PathLike[str] = "") -> Reference | None:
    """The reference that `text` is: `hf://org/name@revision`, or the same without `hf://`; None where a path is meant.

    Without `hf://`, what exists in the directory `here` is a path; so is what is due, without a revision, in a directory that exists there.

    Raises:
        HubError: `hf://` is followed by something else, or the address of a page is given.
    """
    if text.startswith(("https://", "http://")):
        raise HubError(
            "it is the address of a page; a model is named hf://org/name or hf://org/name@revision", got=text
        )
    if text.startswith(SCHEME):
        found = _EXPLICIT.fullmatch(text.removeprefix(SCHEME))
        if found is None:
            raise HubError("is no reference to a model; hf://org/name or hf://org/name@revision is due", got=text)
        return Reference(repo=found["repo"], revision=found["revision"])
    found = _PLAIN.fullmatch(text)
    if found is None or os.path.lexists(os.path.join(here, text)):
        return None
    if found["revision"] is None and os.path.isdir(os.path.join(here, found["repo"].partition("/")[0])):
        return None
    return Reference(repo=found["repo"], revision=found["revision"])


def resolve(reference: Reference | str) -> Path:
    """A directory that holds the model: its `config.json`, and a stand-in for each other file until it is read.

    Offline, what the Hub's cache holds.

    Raises:
        HubError: no such repository or revision, no access to it, no network, or nothing of it in the cache of an offline run.
        MissingDependencyError: huggingface_hub is not installed.
    """
    if isinstance(reference, str):
        parsed = parse(reference if reference.startswith(SCHEME) else f"{SCHEME}{reference}")
        assert parsed is not None
        reference = parsed
    hub = _library(str(reference))
    with _refusing(f"the model {reference}", _CONFIG):
        snapshot = _snapshot(hub, reference)
    commit = snapshot.name
    directory = _directory(hub, reference.repo, commit)
    if directory.exists():
        _mend(directory)
    elif _offline():
        _require_shards(snapshot, reference)
        return snapshot
    else:
        with _refusing(f"the model {reference}", "its list of files"):
            found = hub.HfApi().model_info(reference.repo, revision=commit, files_metadata=True, timeout=60)
        _lay_out(directory, reference.repo, commit, {item.rfilename: item.size or 0 for item in found.siblings or ()})
    provide(directory / _CONFIG)
    return directory


def commit_of(directory: str | os.PathLike[str]) -> str:
    """The commit whose files lie in `directory`, which `resolve` gave."""
    place = Path(directory)
    return place.parent.name if (place / _NOTES).is_dir() else place.name


def provide(path: Path, header_only: bool = False) -> None:
    """Called with a file that is about to be read: fetch what is missing of it, where it is a stand-in.

    Args:
        path: the file.
        header_only: whether no more than the header of a safetensors file is read.

    Raises:
        HubError: it cannot be had.
    """
    note = path.parent / _NOTES / path.name
    # For a path of any kind, and without an error for any.
    if not os.path.exists(note) or (header_only and _has_header(path)):
        return
    told = json.loads(note.read_text(encoding="utf-8"))
    repo, commit, size = str(told["repo"]), str(told["commit"]), int(told["size"])
    hub = _library(f"{repo}@{commit}")
    # A note in a directory that was not laid out here is somebody else's word.
    if path.parent.resolve() != _directory(hub, repo, commit).resolve():
        raise HubError(f"is a stand-in outside the Hub's assets; give {SCHEME}{repo}@{commit} instead", path=path)
    from filelock import FileLock

    with FileLock(path.parent / _NOTES / _LOCKS / path.name):
        if not note.exists() or (header_only and _has_header(path)):
            return
        cached = hub.try_to_load_from_cache(repo, path.name, revision=commit)
        if isinstance(cached, str):
            _link(Path(cached), path)
        elif header_only and size > _FIRST:
            with _refusing(f"{path.name} of {repo}", "its header"):
                _write(path, _header(hub, repo, commit, path.name, size), size)
        else:
            with (
                _refusing(f"{path.name} of {repo}", path.name),
                _shown(f"fetching {path.name} of {repo}, {_size(size)}"),
            ):
                _link(Path(hub.hf_hub_download(repo, path.name, revision=commit)), path)


def _shows_nothing(text: str) -> AbstractContextManager[object]:
    return nullcontext()


_shown: Callable[[str], AbstractContextManager[object]] = _shows_nothing


def show_with(shown: Callable[[str], AbstractContextManager[object]] | None) -> None:
    """Let `shown`, a context manager that is given a line of text, surround each download from now on; None for nothing."""
    global _shown
    _shown = shown or _shows_nothing


# --- the directory ---


def _directory(hub: Any, repo: str, commit: str) -> Path:
    """Where a commit is laid out. `models--org--name` among its parents says what it is, as in the Hub's cache."""
    place = Path(hub.cached_assets_path("pytest-specdecode", f"models/{repo}", commit))
    return place / repo.rpartition("/")[2]


def _lay_out(directory: Path, repo: str, commit: str, sizes: dict[str, int]) -> None:
    """Write a stand-in for each file at the top of the repository; the directory appears whole."""
    draft = directory.with_name(f".{os.urandom(8).hex()}")
    for folder in (_FETCHED, _LOCKS):
        (draft / _NOTES / folder).mkdir(parents=True)
    for name, size in sizes.items():
        # The server's word: what is no plain name is nothing that a loader reads.
        if not name or name.startswith(".") or name != os.path.basename(name) or "\\" in name or "\0" in name:
            continue
        note = json.dumps({"repo": repo, "commit": commit, "size": size})
        (draft / _NOTES / name).write_text(note, encoding="utf-8")
        _write(draft / name, b"", size)
    try:
        draft.rename(directory)
    except OSError:
        # Another process was first.
        shutil.rmtree(draft)
        if not directory.exists():
            raise


def _mend(directory: Path) -> None:
    """Put stand-ins back where the files they were linked to have left the cache."""
    kept = directory / _NOTES / _FETCHED
    for note in kept.iterdir():
        if not (directory / note.name).exists():
            told = json.loads(note.read_text(encoding="utf-8"))
            os.replace(note, directory / _NOTES / note.name)
            _write(directory / note.name, b"", int(told["size"]))


def _link(source: Path, path: Path) -> None:
    """Make `path`, a stand-in, the file `source`."""
    other = path.with_name(f".{os.urandom(8).hex()}")
    try:
        os.symlink(source.resolve(), other)
    except OSError:
        shutil.copyfile(source, other)
    os.replace(other, path)
    kept = path.parent / _NOTES / _FETCHED
    with contextlib.suppress(FileNotFoundError):
        os.replace(path.parent / _NOTES / path.name, kept / path.name)


def _write(path: Path, start: bytes, size: int) -> None:
    """Write a file of `size` bytes that begins with `start` and has a hole behind it."""
    other = path.with_name(f".{os.urandom(8).hex()}")
    with other.open("wb") as file:
        file.write(start)
        file.truncate(max(size, len(start)))
    os.replace(other, path)


def _has_header(path: Path) -> bool:
    """Whether the start of a stand-in has been written: its first eight bytes are the header's length."""
    with path.open("rb") as file:
        return any(file.read(8))


def _require_shards(snapshot: Path, reference: Reference) -> None:
    """Refuse, offline, an index without its shards, which would look like a fault of the model."""
    try:
        shards = set(json.loads((snapshot / _INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    absent = sorted(str(shard) for shard in shards if not (snapshot / str(shard)).exists())
    if absent:
        raise HubError(
            f"the model {reference} is in the cache without {absent[0]}, and HF_HUB_OFFLINE keeps from fetching it"
        )


# --- the Hub ---


def _snapshot(hub: Any, reference: Reference) -> Path:
    """The directory of the Hub's cache, named by the commit, that holds `config.json` at the revision."""
    if not _offline():
        try:
            # The download would ask again and again before it said that there is no network.
            hub.get_hf_file_metadata(hub.hf_hub_url(reference.repo, _CONFIG, revision=reference.revision))
        except Exception as error:
            cached = hub.try_to_load_from_cache(reference.repo, _CONFIG, revision=reference.revision)
            # An answer is an answer; without one, what was there before will do, as it does for the library's own downloads.
            if getattr(error, "response", None) is not None or not isinstance(cached, str):
                raise
            return Path(cached).parent
    return Path(hub.hf_hub_download(reference.repo, _CONFIG, revision=reference.revision)).parent


def _header(hub: Any, repo: str, commit: str, name: str, size: int) -> bytes:
    """The start of a safetensors file, as far as its header goes."""
    start = _range(hub, repo, commit, name, 0, min(size, _FIRST))
    end = 8 + int.from_bytes(start[:8], "little")
    if len(start) < end <= min(size, _LONGEST):
        start += _range(hub, repo, commit, name, len(start), end)
    return start[: max(end, 520)]


def _range(hub: Any, repo: str, commit: str, name: str, start: int, end: int) -> bytes:
    constants, utils = (importlib.import_module(f"huggingface_hub.{part}") for part in ("constants", "utils"))
    answer = utils.http_backoff(
        "GET",
        hub.hf_hub_url(repo, name, revision=commit),
        headers={**utils.build_hf_headers(), "Range": f"bytes={start}-{end - 1}"},
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )
    utils.hf_raise_for_status(answer)
    if answer.status_code != 206 or len(answer.content) != end - start:
        raise HubError("the server does not answer range requests, by which headers are read")
    return bytes(answer.content)


def _library(what: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise MissingDependencyError(f"to read {what} from the Hub needs huggingface_hub: {INSTALL}") from None


def _offline() -> bool:
    return bool(importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE)


@contextlib.contextmanager
def _refusing(what: str, file: str) -> Iterator[None]:
    """Say in one line why `file` of `what` cannot be had."""
    try:
        yield
    except DraftError:
        raise
    # The library raises errors of its own, of its network's and of the system's, and its network differs by version.
    except Exception as error:
        raise HubError(_reason(what, file, error)) from None


def _reason(what: str, file: str, error: Exception) -> str:
    constants, errors = (importlib.import_module(f"huggingface_hub.{part}") for part in ("constants", "errors"))
    if isinstance(error, errors.GatedRepoError):
        return f"{what} is gated: ask for access on its page, and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{what} has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{what} is not on the Hub ({constants.ENDPOINT}), or is private and HF_TOKEN does not open it"
    if isinstance(error, errors.HFValidationError):
        return f"{what} is not named as the Hub names models"
    if constants.HF_HUB_OFFLINE:
        return f"{what}: {file} is not in the cache, and HF_HUB_OFFLINE keeps from fetching it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__ or error
        return f"{what}: no answer from {constants.ENDPOINT} ({_line(cause)}), and {file} is not in the cache"
    if isinstance(error, errors.EntryNotFoundError):
        return f"{what} holds no {file}"
    return f"{what}: {file} cannot be fetched from {constants.ENDPOINT} ({_line(error)})"


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _size(size: int) -> str:
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= step:
            return f"{size / step:.3g} {unit}"
    return f"{size} bytes"
