"""One process at a time fills the cache folder: :func:`turn`.

The ranks of an engine, or several servers of a host, start together and need the same kernels. Each would compile all
of them, in as many processes as the host has processors. So they take turns: the first compiles, the others wait and
load what it has stored.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from w4gemm.core import environment, trust

_log = logging.getLogger("w4gemm.jit")
_LOCK = ".compiling.lock"
_POLL_S = 0.05
_PATIENCE_S = 120.0
"""Seconds without a new file in the folder after which the holder is no longer waited for: it may have been stopped. A
unit takes one second to compile, and ten on a busy machine."""


@contextlib.contextmanager
def turn() -> Iterator[bool]:
    """Wait until no other process is in this block with the same cache folder, and let none in meanwhile.

    Yield False, without a lock, if there is no such folder, if it cannot be written or its file system has no locks, or
    if the process inside has stored nothing for two minutes. The system frees the lock of a process that ends.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_lock_file())
            is_alone = _wait(file)
        except (ImportError, OSError) as e:
            _log.debug("kernels are compiled without a lock: %s", e)
            is_alone = False
        try:
            yield is_alone
        finally:
            if is_alone:
                _unlock(file)


def _lock_file() -> IO[str]:
    folder = environment.cache_dir()
    if folder is None:
        raise FileNotFoundError(environment.why_nothing_is_kept())
    trust.make_folder(folder)
    return open(folder / _LOCK, "a", opener=trust.opener)


def _unlock(file: IO[str]) -> None:
    """Closing the file would not do, if this process has been forked meanwhile."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def _wait(file: IO[str]) -> bool:
    """Lock a file of the cache folder and return True, or return False if the holder stores nothing any more."""
    import fcntl  # not on Windows

    folder, begun = Path(file.name).parent, time.monotonic()
    seen, since, is_told = -1, begun, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        now, changed = time.monotonic(), folder.stat().st_mtime_ns
        if changed != seen:
            seen, since = changed, now
        if now - since > _PATIENCE_S:
            _log.warning(
                "another process holds %s and has stored no kernel for %.0f s: compiling without it",
                *(file.name, _PATIENCE_S),
            )
            return False
        if not is_told:
            _log.info("waiting for the kernels that another process compiles into %s", folder)
            is_told = True
        time.sleep(_POLL_S)
