"""Checkpoints that hold 4-bit weights, by format: :func:`open_checkpoint`.

A new format is one file with a ``CheckpointFormat`` and one line in ``FORMATS``.
"""

from __future__ import annotations

from pathlib import Path

from w4gemm.checkpoints import gguf
from w4gemm.checkpoints.base import Checkpoint, CheckpointFormat
from w4gemm.errors import FormatError

FORMATS: tuple[CheckpointFormat, ...] = (gguf.FORMAT,)


def find_checkpoint(path: str | Path) -> tuple[CheckpointFormat, Path] | None:
    """The first format that recognizes ``path``, a file or folder, and the file or folder it would open.

    Raises:
        FileNotFoundError: if nothing is at ``path``.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"path: no file or folder {str(path)!r}")
    for format in FORMATS:
        if (found := format.find(path)) is not None:
            return format, found
    return None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint of any known format.

    Raises:
        FileNotFoundError: if nothing is at ``path``.
        FormatError: if no format recognizes it, or it is truncated or damaged.
    """
    found = find_checkpoint(path)
    if found is None:
        known = ", ".join(format.name for format in FORMATS)
        raise FormatError(f"path: {str(path)!r} is no checkpoint of a known format ({known})")
    format, where = found
    return format.open(where)


__all__ = ["FORMATS", "Checkpoint", "CheckpointFormat", "find_checkpoint", "open_checkpoint"]
