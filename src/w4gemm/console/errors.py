"""Errors in one sentence for users: :func:`sentence`, :func:`memory_for`; and the reading of files that users name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from w4gemm.core.errors import FormatError, UnsupportedError
from w4gemm.core.files import system_reason

_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, MemoryError, UnsupportedError)
_LACKS_MEMORY = re.compile(r"can't allocate memory|out of memory|Storage size calculation overflowed")
"""Words of PyTorch's RuntimeErrors: of its CPU allocator, of CUDA, and for sizes beyond 64 bits."""
_ASKED = re.compile(r"allocate (?:(?P<bytes>\d+) bytes|(?P<text>[\d.]+ [KMGT]iB))")


def sentence(error: Exception) -> str | None:
    """Return the text to print for an error that a user can mend; None for other errors, which need a traceback."""
    if (memory := _lacking(error)) is not None:
        return str(error) if isinstance(error, MemoryError) and str(error) else f"not enough memory; {memory}"
    if isinstance(error, OSError):
        return system_reason(error)
    return str(error) if isinstance(error, _USER_ERRORS) else None


@contextlib.contextmanager
def memory_for(expected: str) -> Iterator[None]:
    """Raise MemoryError with the words ``expected`` and the bytes that were requested, in place of an allocator's own
    error."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if (memory := _lacking(e)) is None:
            raise
        raise MemoryError(f"{expected}; {memory}") from e


def _lacking(error: Exception) -> str | None:
    """Return in words how much memory could not be allocated; None for an error that is not about memory."""
    match = isinstance(error, RuntimeError) and _LACKS_MEMORY.search(str(error))
    if not (match or isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))):
        return None
    amount = _ASKED.search(str(error))
    size = (amount["text"] or f"{int(amount['bytes']) / 2**30:.1f} GiB") if amount else "what it wants"
    return f"{size} could not be allocated"


def read_text(name: str, path: str | Path) -> str:
    """Return the text of a file.

    Args:
        name: the argument that named the file, as messages call it.

    Raises:
        OSError, FormatError: if it cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8").removeprefix("\ufeff")  # which some editors begin a file with
    except UnicodeDecodeError as e:
        raise FormatError(
            f"{name}: wanted a text file in UTF-8, got {str(path)!r}, which is none at byte {e.start}"
        ) from e
