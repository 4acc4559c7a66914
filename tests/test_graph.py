"""Captures of CUDA graphs while other threads work."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from w4gemm.kernels.workspace import capturing
from w4gemm.tuning import timing


def at_once(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_captures_wait_for_each_other_and_leave_other_threads_alone(monkeypatch):
    inside, most, modes = [0], [0], []

    @contextmanager
    def capture(graph: object, capture_error_mode: str = "global") -> Iterator[None]:
        modes.append(capture_error_mode)
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        yield
        inside[0] -= 1

    def work() -> None:
        with capturing():
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    at_once(3, work)
    assert most == [1] and modes == ["thread_local"] * 3


def test_one_thread_measures_at_a_time(monkeypatch):
    inside, most = [0], [0]

    def measured(variants: object, replays: int) -> list[timing.Timing]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return []

    monkeypatch.setattr(timing, "_time_graphs", measured)
    at_once(3, lambda: timing.time_graphs([]))
    assert most == [1]


@pytest.mark.gpu
def test_other_threads_allocate_and_wait_while_graphs_are_measured():
    gc.collect()  # another test's graph that a thread deletes during a capture would end it
    x = torch.ones(8, device="cuda")
    wrong, end = [], time.monotonic() + 2

    def serve() -> None:
        size = 1 << 20
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < end:
                size = size * 2 if size < 1 << 28 else 1 << 20
                if torch.ones(size, device="cuda", dtype=torch.int8)[-1].item() != 1:
                    wrong.append(size)

    def measure() -> None:
        while time.monotonic() < end:
            timing.time_graphs([[lambda: x + 1, lambda: x + 2]], replays=2)

    def safely(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as e:
            wrong.append(e)

    works = itertools.cycle((serve, measure))
    at_once(4, lambda: safely(next(works)))
    assert not wrong
