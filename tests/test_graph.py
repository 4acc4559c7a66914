"""Captures of CUDA graphs while other threads work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from w4gemm.kernels.graph import capturing


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
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and modes == ["thread_local"] * 3


@pytest.mark.gpu
def test_other_threads_allocate_and_wait_while_graphs_are_captured():
    x = torch.ones(8, device="cuda")
    wrong, end = [], time.monotonic() + 2

    def serve() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            size = 1 << 20
            while time.monotonic() < end:
                size = size * 2 if size < 1 << 28 else 1 << 20
                if torch.ones(size, device="cuda", dtype=torch.int8)[-1].item() != 1:
                    wrong.append(size)

    def capture() -> None:
        while time.monotonic() < end:
            with capturing() as graph:
                y = x + 1
            graph.replay()
            torch.cuda.current_stream().synchronize()
            if y[0].item() != 2:
                wrong.append(0)

    def safely(work) -> None:
        try:
            work()
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=safely, args=(work,)) for work in (serve, serve, capture, capture)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
