"""The one timer. On a GPU it replays CUDA graphs over operands that rotate, so that no weight is in L2; on the CPU it
times plain calls."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from w4gemm.kernels.workspace import capturing, exclusive

LONG_CALL_US = 40.0
"""Microseconds from which a call counts as long: the GPU is warmed up before each replay, so few replays are enough."""
_WARM_UP_MS = 20.0


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: percentiles over the replays."""

    p20: float
    p50: float
    p80: float


def time_graphs(variants: Sequence[Sequence[Callable[[], object]]], replays: int = 15) -> list[Timing]:
    """Return the time of a call of each variant. Variants are measured interleaved, so that a drifting clock affects
    all of them alike.

    A GPU at its power limit lowers its clock within milliseconds and raises it again after lighter work. So each timed
    replay follows untimed ones of the same graph (20 ms of them if calls are long), and each round has another order of
    variants, so that none always follows a cooler one. Of several threads one measures at a time.

    Args:
        variants: for each variant the calls of one graph, each over operands of its own, together larger than L2.
        replays: number of timed replays of each graph.
    """
    with exclusive:
        return _time_graphs(variants, replays)


def _time_graphs(variants: Sequence[Sequence[Callable[[], object]]], replays: int) -> list[Timing]:
    graphs = [_capture(calls) for calls in variants]
    warm_ups = [_warm_ups(_replay_ms(graph), len(calls)) for graph, calls in zip(graphs, variants, strict=True)]
    times: list[list[float]] = [[] for _ in variants]
    order, shuffle = list(zip(graphs, variants, warm_ups, times, strict=True)), random.Random(0).shuffle
    for _ in range(replays):
        shuffle(order)
        for graph, calls, before, samples in order:
            for _ in range(before):
                graph.replay()
            samples.append(_replay_ms(graph) * 1e3 / len(calls))
    return [_percentiles(samples) for samples in times]


def _warm_ups(ms: float, calls: int) -> int:
    """Number of untimed replays before a timed one: more if calls are long, as products of many tokens are."""
    return math.ceil(_WARM_UP_MS / ms) if ms * 1e3 / calls > LONG_CALL_US else 1


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_calls(variants: Sequence[Sequence[Callable[[], object]]], replays: int = 5) -> list[Timing]:
    """Return the time of a call of each variant on the CPU, by the clock. Arguments as for :func:`time_graphs`."""
    for calls in variants:
        calls[0]()
    times: list[list[float]] = [[] for _ in variants]
    for _ in range(replays):
        for calls, samples in zip(variants, times, strict=True):
            start = time.perf_counter()
            for call in calls:
                call()
            samples.append((time.perf_counter() - start) * 1e6 / len(calls))
    return [_percentiles(samples) for samples in times]


def _capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # lazy set-up stays out of the capture
    torch.cuda.current_stream().wait_stream(side)
    with capturing() as graph:
        for call in calls:
            call()
    return graph


def _percentiles(times: list[float]) -> Timing:
    ordered = sorted(times)

    def at(q: float) -> float:
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    return Timing(at(0.2), at(0.5), at(0.8))
