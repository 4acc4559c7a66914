"""A step that runs: its process, all that this starts, and what it leaves."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_steps.schedule import Busy
from bench.gpu_steps.steps import Step

ROOT = Path(__file__).resolve().parents[2]
PATHS = tuple(str(ROOT / part) for part in ("src", "tests", "."))
"""Where a step's modules are found before others."""
LOG = "log"
MARK = "W4GEMM_GPU_STEP"
"""Environment variable by which all processes of a step are found, also those in sessions of their own."""
GRACE_S = 5
"""How long before its limit a step is interrupted, so that it can say what it has found."""
MOST_PACKED = 4 << 20
"""Bytes of a file that are packed, from its end."""


def words(step: Step, folder: Path) -> list[str]:
    """Return the command with its folder and its rows filled in."""
    filled = step.command.replace("{rows}", str(folder / step.rows)).replace("{folder}", str(folder))
    first, *others = shlex.split(filled)
    return [sys.executable if first == "python" else first, *others]


class Running:
    """A step's process group, with its output in a log."""

    def __init__(self, step: Step, gpus: Sequence[str], folder: Path, kernels: Path, seconds: float) -> None:
        """Start a step.

        Args:
            folder: for its log and its rows; it must not exist.
            kernels: for what it compiles and tunes, unless W4GEMM_CACHE_DIR names a folder.
            seconds: it is killed after so long.
        """
        folder.mkdir(parents=True)
        self.step, self.folder, self.started = step, folder, time.monotonic()
        self.busy = Busy(step, tuple(gpus), self.started + seconds)
        self._mark = f"{step.name} of {os.getpid()} at {self.started}"
        self._timed_out = False
        self.seconds = 0.0
        """From the start to the end."""
        before = os.environ.get("PYTHONPATH")
        paths = [*PATHS, before] if before else PATHS
        environment = {"W4GEMM_CACHE_DIR": str(kernels.resolve())} | os.environ
        environment |= {
            MARK: self._mark,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
        }
        with open(folder / LOG, "wb") as log:
            self._process = subprocess.Popen(
                words(step, folder.resolve()),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> bool:
        """Return True if the step has ended; past its limit it is killed. Nothing that it started outlives it."""
        now = time.monotonic()
        if self._process.poll() is None and now < self.busy.end:
            if now >= self.busy.end - GRACE_S and not self._timed_out:
                self._timed_out = True
                self._process.send_signal(signal.SIGINT)
            return False
        self._timed_out |= self._process.returncode is None
        self.kill()
        self.seconds = now - self.started
        return True

    def outcome(self) -> str:
        """Return what became of a step that has ended."""
        if self._timed_out:
            return "ran out of time"
        status = self._process.returncode
        return f"failed with exit status {status}" if status else "passed"

    def kill(self) -> None:
        """Kill every process of the step."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        while alive := marked(self._mark):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.wait()

    def last_line(self) -> str:
        """Return the last line of the log that is not empty."""
        with open(self.folder / LOG, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def marked(mark: str) -> list[int]:
    """Return the processes that run with a mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def pack(folder: Path, archive: Path) -> None:
    """Write the files below a folder to an archive, in one step, so that a reader never sees a partial one."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(partial, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                with open(path, "rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_PACKED))
                    data = file.read(MOST_PACKED)
                info = tarfile.TarInfo(str(path.relative_to(folder.parent)))
                info.size, info.mtime = len(data), int(path.stat().st_mtime)
                tar.addfile(info, io.BytesIO(data))
    os.replace(partial, archive)
