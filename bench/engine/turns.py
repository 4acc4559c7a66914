"""Engines that start side by side and are measured one at a time, because a start leaves the GPU idle for a minute.

:class:`Turns` is a lock on a file. Every engine that starts shares it; the one that is measured has it alone. So none
is measured while another starts, and none starts in the middle of a measurement.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_BEGUN = b"."


@dataclass(frozen=True)
class Turns:
    """Attributes:
    file: to lock. It holds a byte for each engine that has begun to start. None for an engine that is alone, which
        waits for nobody.
    """

    file: Path | None = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Hold the lock together with other engines that start."""
        with self._locked(fcntl.LOCK_SH) as handle:
            if handle is not None:
                os.write(handle, _BEGUN)
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Wait until no engine starts or is measured, and hold the lock alone."""
        with self._locked(fcntl.LOCK_EX):
            yield

    @contextmanager
    def until_begun(self, engines: int, seconds: float = 60) -> Iterator[None]:
        """Hold the lock together with engines that start, and at the end until as many have begun, or so long: else the
        first to be up could be measured before the last begins."""
        with self._locked(fcntl.LOCK_SH):
            yield
            end = time.monotonic() + seconds
            while self.file and self.file.stat().st_size < engines * len(_BEGUN) and time.monotonic() < end:
                time.sleep(0.05)

    @contextmanager
    def _locked(self, how: int) -> Iterator[int | None]:
        if self.file is None:
            yield None
            return
        handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(handle, how)
            yield handle
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked engine has the handle too
            os.close(handle)
