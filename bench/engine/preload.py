"""One process that imports vLLM, which takes as long as starting an engine, and forks a process for each engine.

:class:`Preloaded` is the side of the benchmark; ``python -m bench.engine.preload`` is the other. It reads an order a
line, and answers with the number of the process that it forked, then with its exit code. Nothing of CUDA may be
initialized before a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MODULES = (
    *("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"),
    *("vllm.v1.worker.gpu.model_runner", "vllm.v1.executor.uniproc_executor", "vllm.model_executor.models.llama"),
)
"""Imported if they exist: an engine needs them, whatever it serves."""
_READY = "ready"
_NOT_INITIALIZED = 3
"""The driver's error if cuInit was not called."""


class Preloaded:
    """A process with vLLM imported. Close it at the end."""

    def __init__(self, variables: dict[str, str], folder: Path, log: Path) -> None:
        """Start it, in a folder that its modules are found from."""
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.engine.preload"],
                env=variables,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._lines = b""
        self._ready: bool | None = None

    def ready(self, seconds: float = 180) -> bool:
        """Wait until it has imported vLLM; False if it cannot fork engines."""
        if self._ready is None:
            self._ready = self._line(seconds) == _READY
        return self._ready

    def run(self, task: Path, result: Path, variables: dict[str, str], log: Path, seconds: float) -> int:
        """Run ``bench.engine.offline`` in a process of its own, of which nothing is left at the end.

        Returns:
            Its exit code; -1 if it could not be forked, or if this process has ended.

        Raises:
            subprocess.TimeoutExpired: if it is not done in time.
        """
        order = {"task": str(task), "result": str(result), "variables": variables, "log": str(log)}
        child = self._forked(order)
        if child is None:
            self._ready = False
            return -1
        try:
            code = self._line(seconds)
        finally:
            end_tree(child)
        if code is None:
            self._line(30)
            raise subprocess.TimeoutExpired("bench.engine.offline", seconds)
        if not code:
            self._ready = False
        return int(code or -1)

    def _forked(self, order: dict[str, Any]) -> int | None:
        """Return the number of the process that takes an order; None if this one has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        line = self._line(30)
        return int(line) if line else None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _line(self, seconds: float) -> str | None:
        """Return the next line of its answers; None if there is none in time, "" if it has ended."""
        assert self._process.stdout is not None
        handle, end = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._lines:
            if not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            piece = os.read(handle, 4096)
            if not piece:
                return ""
            self._lines += piece
        line, _, self._lines = self._lines.partition(b"\n")
        return line.decode()


def end_tree(leader: int) -> None:
    """End a process group and every descendant of its leader. An engine's core that is left over by one that was not
    done in time would hold its GPU's memory and take time from the next; what has made a group of its own is found as
    a descendant, as long as its parent lives, so descendants are looked for first."""
    found = descendants(leader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    _kill(found)


def end_descendants(process: int) -> None:
    """End the children of a process, theirs, and so on."""
    _kill(descendants(process))


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def descendants(process: int) -> list[int]:
    """Return the children of a process, theirs, and so on; on Linux."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            after_name = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found, todo = [], [process]
    while todo:
        own = children.get(todo.pop(), [])
        found += own
        todo += own
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints while it is imported is no answer
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as e:
            print(f"{name}: {e!r}", file=sys.stderr, flush=True)
    print("CUDA is initialized" if cuda_is_initialized() else _READY, file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            serve_order(order)
        print(child, file=answers)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


def cuda_is_initialized() -> bool:
    """True if this process has initialized the driver; it asks without doing so."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def serve_order(order: dict[str, Any]) -> None:
    """Run one engine in this process, and end it."""
    code = 1
    try:
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(order["variables"])
        from bench.engine import offline

        offline.main([order["task"], order["result"]])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
