"""Processes that start together take turns at compiling, and none waits for one that is gone or stands still."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from w4gemm.core import trust
from w4gemm.jit import turns
from w4gemm.jit.turns import turn

fcntl = pytest.importorskip("fcntl")

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(turns, "_POLL_S", 0.01)
    return tmp_path / "cache"


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose turn it is, until it is killed."""
    folder.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-S", "-c", HOLD, str(folder / turns._LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_one_at_a_time(folder: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with turn() as is_alone:
            assert is_alone
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and inside == 0
    assert (folder / turns._LOCK).stat().st_mode & 0o777 == 0o600


def test_an_error_ends_the_turn(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), turn():
        raise KeyboardInterrupt
    with turn() as is_alone:
        assert is_alone


def test_a_killed_process_has_had_its_turn(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holder(folder) as process, caplog.at_level(logging.INFO, "w4gemm"):
        begun = time.monotonic()
        threading.Timer(0.2, process.kill).start()
        with turn() as is_alone:
            assert is_alone and time.monotonic() - begun >= 0.2
    assert caplog.text.count("waiting for the kernels") == 1


class Clock:
    """Stands for ``time``: a wait for the lock takes half a minute, in which ``meanwhile`` is called."""

    def __init__(self, meanwhile: Callable[[int], None]) -> None:
        self.waits, self.meanwhile = 0, meanwhile

    def monotonic(self) -> float:
        return 30.0 * self.waits

    def sleep(self, seconds: float) -> None:
        self.waits += 1
        self.meanwhile(self.waits)


def test_a_process_that_stands_still_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(lambda wait: None)
    monkeypatch.setattr(turns, "time", clock)
    with holder(folder), turn() as is_alone:
        assert not is_alone and clock.waits == 5
    assert "has stored no kernel for 120 s: compiling without it" in caplog.text


def test_a_process_that_stores_kernels_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holder(folder) as process:

        def store(wait: int) -> None:
            if wait == 20:
                process.kill()
                process.wait()
            elif wait % 4 == 0:
                (folder / f"{wait}.o").touch()

        monkeypatch.setattr(turns, "time", clock := Clock(store))
        with turn() as is_alone:
            assert is_alone and clock.waits == 20


@pytest.mark.parametrize("reason", ["off", "not writable", "not trusted", "no locks"])
def test_where_there_is_no_lock(folder: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def refuse(*args: object) -> None:
        raise OSError(38, "Function not implemented")  # as Lustre without -o flock

    if reason == "off":
        monkeypatch.setenv("W4GEMM_CACHE_DIR", "off")
    elif reason == "not writable":
        folder.write_text("a file")  # not even root can make a folder of it
    elif reason == "not trusted":
        folder.mkdir()
        folder.chmod(0o777)
        assert trust.refusal(folder)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    with turn() as is_alone:
        assert not is_alone
