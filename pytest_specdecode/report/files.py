"""Which suffix is which form, and how a file is written: whole or not at all."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_specdecode.errors import DraftError

if TYPE_CHECKING:
    from pytest_specdecode.report.model import Report

#: The writer of each suffix; a module with `text(report) -> str`, loaded when it is asked for.
_WRITERS = {".json": "json_file", ".md": "markdown", ".html": "html_page", ".sarif": "sarif"}

#: Suffixes that `Report.write` knows.
SUFFIXES: tuple[str, ...] = tuple(_WRITERS)


def require_suffix(file: Path) -> None:
    """Raise DraftError where no report is written under `file`'s suffix."""
    if file.suffix not in _WRITERS:
        raise DraftError(
            f"reports are written as {', '.join(SUFFIXES)}, not {file.suffix or 'without a suffix'}", path=file
        )


def write(report: Report, path: str | os.PathLike[str]) -> None:
    """Write `report` to `path`, by its suffix.

    Raises:
        DraftError: an unknown suffix, or the file cannot be written.
    """
    file = Path(path)
    require_suffix(file)
    writer = importlib.import_module(f"pytest_specdecode.report.{_WRITERS[file.suffix]}")
    write_whole(file, writer.text(report))


def write_whole(file: Path, text: str) -> None:
    """Replace `file` by `text` in one step; where that fails, what was there stays.

    Raises:
        DraftError: the file cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
        try:
            # Names of files that are not UTF-8 come as lone surrogates, and stay readable JSON as escapes.
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise DraftError(f"cannot be written: {error.strerror or error}", path=file) from None
