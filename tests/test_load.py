"""Threads that mix products, tuning, compiling and clearing: a slice of tests/load.py, and that it finds faults."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import load
from w4gemm.jit import disk

pytest.importorskip("cutlass")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    return tmp_path


def of_threads(count: int, seconds: float) -> load.Outcome:
    arguments, outcome, end = load.products("cpu"), load.Outcome(Counter(), []), time.time() + seconds
    workers = [threading.Thread(target=load.work, args=(str(i), "cpu", end, arguments, outcome)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcome


def test_a_slice(folder: Path) -> None:
    outcome = of_threads(4, 4)
    assert not outcome.problems and not load.left_behind(folder)
    assert outcome.calls["linear"]


def test_wrong_products_and_errors_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise FileNotFoundError("tuned.jsonl")

    monkeypatch.setattr(load, "TOLERANCE", 0.0)
    monkeypatch.setattr(load, "CALLS", {load.linear: 1, broken: 1})
    problems = of_threads(2, 60).problems
    assert any("linear: " in text and "relative error" in text for text in problems)
    assert any("FileNotFoundError: tuned.jsonl" in text for text in problems)


def test_what_is_left_is_found(folder: Path) -> None:
    disk.write("toy-sm_90a-0-0.o", b"\x7fELF")
    assert not load.left_behind(folder)
    (folder / "toy-sm_90a-0-0.o").write_bytes(b"half")
    (folder / "tuned.jsonl").write_text('{"us": 1\n')
    (folder / ".toy-sm_90a-0-0.o.abc").write_bytes(b"")
    assert len(load.left_behind(folder)) == 3
