"""Messages and progress, which go to standard error and leave standard output to the result."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from w4gemm.core import environment

_DELETE = "\r\x1b[K"


def say(text: str) -> None:
    """Print a line on standard error and flush it."""
    print(text, file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, such as "1 problem" and "2 problems"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function ``(done, total, what)`` that keeps one line on a terminal up to date and prints nothing
    elsewhere."""
    shown = 0.0

    def progress(done: int, total: int, what: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if _has_lines() and (now - shown > 0.1 or done in (0, total)):
            shown = now
            count = f" {done}/{total}" if total else ""
            text = f"{what}{count} ..."[: _columns() - 1]  # the terminal would break it, and only its end be deleted
            print(f"{_DELETE}{text}", end="", file=sys.stderr, flush=True)

    try:
        yield progress
    finally:
        if shown:
            delete_line()


def delete_line() -> None:
    """Delete the line that :func:`progress_line` keeps on a terminal, before another is printed in its place."""
    if _has_lines():
        print(_DELETE, end="", file=sys.stderr, flush=True)


def _has_lines() -> bool:
    """True if standard error is a terminal that can delete a line, which one in Emacs cannot."""
    return sys.stderr.isatty() and not environment.is_dumb_terminal()


def _columns() -> int:
    """Return the terminal's number of characters in a line; 80 if it does not tell."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Like :func:`progress_line`, but the line is a bar with an estimate of the remaining time."""
    started = time.monotonic()
    with progress_line() as line:

        def progress(done: int, total: int, what: str) -> None:
            seconds_left = (time.monotonic() - started) / max(done, 1) * (total - done)
            full = 24 * done // max(total, 1)
            left = f", {seconds_left:.0f} s left" * (done < total)  # the last step of all may take long, too
            line(0, 0, f"[{'#' * full}{'.' * (24 - full)}] {done}/{total}{left}: {what}")

        yield progress
