"""Files that are written whole or not at all: :func:`placed`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished"
"""End of the name of a file that is being written."""


@contextlib.contextmanager
def placed(file: Path) -> Iterator[Path]:
    """Yield the path to write a file at, which gets its own name at the end: so a file that is there is whole.

    Raises:
        OSError: if it cannot be written, as where the disk is full. It names the file, which stays what it was.
    """
    unfinished = file.with_name(f"{file.name}{UNFINISHED}")
    try:
        yield unfinished
        unfinished.replace(file)
    except OSError as e:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if e.errno is not None and e.filename in (None, str(unfinished)):  # None: of an open file
            raise OSError(e.errno, e.strerror, str(file)) from e
        raise
