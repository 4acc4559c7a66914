"""Writers that are killed at random moments lose no record but the one they were writing, and no partial file is read.

``W4GEMM_KILLS=500 python -m pytest tests/test_killed.py`` kills as many as are wanted before a release.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from test_store import record
from w4gemm.choice import store
from w4gemm.jit import disk

KILLS = int(os.environ.get("W4GEMM_KILLS", "40"))
NAME = "toy-sm_90a-0123-4567.o"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and pipes")


def killed(write: Callable[[int], None], first: int, r: random.Random) -> int:
    """Run write(first), write(first + 1), ... in a process that is killed within some ms; return how many were done."""
    reader, writer = os.pipe()

    def work() -> None:
        for i in range(first, first + 10**6):
            write(i)
            os.write(writer, struct.pack("<i", i))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    os.close(writer)
    time.sleep(r.uniform(0.001, 0.03))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    os.close(reader)
    return len(data) // 4


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    path, made, done = tmp_path / "tuned.jsonl", record(), list[int]()
    seed = random.randrange(10**6)
    r = random.Random(seed)
    for _ in range(KILLS):
        first = done[-1] + 2 if done else 1  # a record that was written, and not told of, has a number of its own
        count = killed(lambda i: store.append(path, [replace(made, us=float(i))]), first, r)
        done += range(first, first + count)
    assert len(done) > KILLS, f"seed {seed}: too slow to have been killed while it wrote"
    store.append(path, [replace(made, us=0.5)])  # no lock is left
    records, bad = store.parse_lines(path.read_text().splitlines())
    times = [found.us for found in records]
    assert set(times) >= {*map(float, done), 0.5}, f"seed {seed}"
    assert len(bad) <= KILLS and all(times.count(t) == 1 for t in times)


def test_compiled_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    seed = random.randrange(10**6)
    r, total = random.Random(seed), 0
    for _ in range(KILLS):
        count = killed(lambda i: disk.write(NAME, struct.pack("<i", i) * 50_000), total + 1, r)
        found = disk.read(NAME)
        if found is None:
            assert not total + count, f"seed {seed}"
            continue
        number = struct.unpack("<i", found[:4])[0]
        assert found == struct.pack("<i", number) * 50_000, f"seed {seed}"
        assert number in (total + count, total + count + 1), f"seed {seed}: an older object came back"
        total += count
    assert total > KILLS, f"seed {seed}: too slow to have been killed while it wrote"
