"""Compilation in several processes: :class:`CompilePool`.

A process can compile only one kernel at a time, because the DSL compiles in global state. The processes are plain
children that answer over a pipe. They are not those of ``multiprocessing``, which would run a caller's unguarded script
again, and forking is not allowed once CUDA runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from w4gemm.core import environment
from w4gemm.jit.compile import object_code
from w4gemm.jit.unit import Unit

# -c puts the current folder before the standard library: it is removed, so that nothing is imported from it.
# prctl(1, 9): Linux kills the child when the thread that started it ends, so that none outlives a killed parent.
_CHILD = (
    "import sys; sys.path[:] = filter(None, sys.path); import ctypes, pickle; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "
    "sys.path[:] = pickle.load(sys.stdin.buffer); from w4gemm.jit.pool import _serve; _serve()"
)
_CGROUP = Path("/sys/fs/cgroup")
_END_S = 5.0  # a child that gave no answer has ended, or is about to


class CompilePool:
    """A context manager that compiles units in child processes, in the order in which they are submitted.

    Args:
        workers: number of processes; None for the number of processors that this process may use.

    Raises:
        ValueError: for fewer than one.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers: wanted an int from 1 on, or None, got {workers}")
        self.workers = workers or usable_processors()
        self._jobs: queue.SimpleQueue[tuple[Future[bytes], Unit] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *error: object) -> None:
        """Cancel the units that no child has begun, and end the children."""
        self._closed = True
        for child in self._children:
            with contextlib.suppress(OSError):
                child.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        while not self._jobs.empty():
            if (work := self._jobs.get()) is not None:
                _drop(work[0])

    def submit(self, units: Iterable[Unit]) -> list[Future[bytes]]:
        """Return for each unit a future of the object's bytes, which the child also writes to the cache folder. If
        compiling fails, the future's exception is a RuntimeError with the child's message."""
        futures: list[Future[bytes]] = []
        for unit in units:
            future: Future[bytes] = Future()
            self._jobs.put((future, unit))
            futures.append(future)
        for _ in range(min(self.workers - len(self._threads), len(futures))):
            self._threads.append(threading.Thread(target=self._feed, daemon=True))
            self._threads[-1].start()
        return futures

    def _feed(self) -> None:
        """Hand units to one child until there are no more; runs in a thread of its own."""
        child: subprocess.Popen[bytes] | None = None
        while (work := self._jobs.get()) is not None:
            future, unit = work
            if self._closed:
                _drop(future)
                continue
            if not future.set_running_or_notify_cancel():  # its owner does not want it any more
                continue
            try:
                if child is None:
                    child = _start()
                    self._children.append(child)
                code, error = _ask(child, unit)
            except (OSError, EOFError, pickle.UnpicklingError) as e:  # the compiler took the child with it
                why = e if child is None else _ended(child)
                child, code, error = None, b"", f"the compiling process ended ({why})"
            except Exception as e:  # whatever it is: a future without an answer would keep its owner waiting for ever
                if child is not None:
                    _end(child)
                child = None
                future.set_exception(e)
                continue
            if error:
                future.set_exception(RuntimeError(error))
            else:
                future.set_result(code)
        if child is not None:
            _end(child)


def _drop(future: Future[bytes]) -> None:
    """Cancel a future and wake the threads that wait for it."""
    if future.cancel():
        future.set_running_or_notify_cancel()


def usable_processors() -> int:
    """Number of processors that this process may use at a time. A container may be allowed less than it sees."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    return max(1, math.ceil(min(count, _allowed_processors())))


def _allowed_processors() -> float:
    """Return how many processors the container's control group may keep busy; infinite without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of cgroup v2, of v1
        with contextlib.suppress(OSError, ValueError):  # not there; "max"
            quota, period = map(int, " ".join((_CGROUP / name).read_text() for name in names).split())
            if quota > 0 and period > 0:
                return quota / period
    return math.inf


def _start() -> subprocess.Popen[bytes]:
    # the DSL prints messages: _serve sends them to standard error, which is dropped, so none gets between the answers
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        env=environment.of_children(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdin is not None
    pickle.dump(sys.path, child.stdin)
    child.stdin.flush()
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and close its pipes."""
    child.kill()
    child.communicate()


def _ended(child: subprocess.Popen[bytes]) -> str:
    """Return in words how a child that gave no answer came to its end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)
    code = child.poll()
    _end(child)
    if code == -signal.SIGKILL:
        return "killed, as by a system without enough memory: fewer processes need less"
    return "no answer" if code is None else f"by signal {-code}" if code < 0 else f"with exit status {code}"


def _ask(child: subprocess.Popen[bytes], unit: Unit) -> tuple[bytes, str]:
    """Return (object, error) of a unit; the error is the empty string if there is none."""
    assert child.stdin is not None and child.stdout is not None
    pickle.dump(unit, child.stdin)
    child.stdin.flush()
    answer: tuple[bytes, str] = pickle.load(child.stdout)
    return answer


def _serve() -> None:
    """Answer every unit on standard input with (object, error) on standard output; runs in a child."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            unit: Unit = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (object_code(unit), "")
        except Exception as e:  # whatever the compiler raises: the caller goes on without this config
            answer = (b"", f"{type(e).__name__}: {e}")
        pickle.dump(answer, answers)
        answers.flush()
