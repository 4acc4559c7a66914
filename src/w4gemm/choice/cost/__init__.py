"""About how long a config takes, without running it: :func:`candidates`, and :func:`in_order`, which orders by it.

Each kernel has a model; its constants are data, see constants.py. A new kernel needs none: it is ranked by twice its
roofline until one is written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from w4gemm.choice.cost import cpu, cublas, mma_sync, waves
from w4gemm.choice.cost.constants import unmeasured
from w4gemm.choice.cost.traffic import Timer, copy_us, roofline_us
from w4gemm.choice.intervals import LARGEST, WAVES_FROM, planned, ragged
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import Kernel

_Model = Callable[[Kernel, GemmProblem, GemmConfig], float]
_Timers = Callable[[GemmConfig], Timer]


def _each(model: _Model) -> Callable[[Kernel, GemmProblem], _Timers]:
    """A model of one problem and config as the timers of all configs."""
    return lambda kernel, problem: lambda config: lambda m: model(kernel, replace(problem, m=m), config)


TIMERS: dict[str, Callable[[Kernel, GemmProblem], _Timers]] = {
    "sm90_decode": waves.timers,
    "sm90_mixed_gemm": waves.timers,
    "sm90_fp8_gemm": waves.timers,
    "sm89_fp8_gemm": mma_sync.timers,
    "sm80_mixed_gemm": mma_sync.timers,
    "dequantize_gemm": _each(cublas.predicted_us),
    "cpu_mixed_gemm": _each(cpu.predicted_us),
}
"""By the kernel's name."""
_ROOFLINE = _each(lambda kernel, problem, config: 2 * roofline_us(problem))


def timer(kernel: Kernel, problem: GemmProblem, config: GemmConfig) -> Timer:
    """Return the microseconds of a launch by m, more than 0: they order configs and kernels on one device, no more."""
    return TIMERS.get(kernel.name, _ROOFLINE)(kernel, problem)(config)


def predicted_us(kernel: Kernel, problem: GemmProblem, config: GemmConfig) -> float:
    """:func:`timer` at the problem's own m."""
    return timer(kernel, problem, config)(problem.m)


class Candidate(NamedTuple):
    """A legal config, and how long it takes."""

    us: Timer
    kernel: Kernel
    config: GemmConfig


class Ranked(NamedTuple):
    """A legal config with its prediction for one m."""

    us: float
    """Predicted microseconds per launch."""
    kernel: Kernel
    config: GemmConfig


def candidates(kernels: Iterable[Kernel], problem: GemmProblem) -> list[Candidate]:
    """Return every config of every kernel that supports ``problem``, whatever its m."""
    of_all_m = replace(problem, m=LARGEST)
    supporting: list[Any] = [kernel for kernel in kernels if kernel.supports(problem)]  # mypy knows no hash of a Kernel
    return [found for kernel in supporting for found in _of_kernel(kernel, of_all_m)]


@functools.lru_cache(maxsize=16)
def _of_kernel(kernel: Any, problem: GemmProblem) -> tuple[Candidate, ...]:
    """:func:`candidates` of one kernel that supports the problem. The choices of a layer for all its intervals of m
    follow one another, so the last layers are kept."""
    of_config = TIMERS.get(kernel.name, _ROOFLINE)(kernel, problem)
    return tuple(Candidate(of_config(config), kernel, config) for config in kernel.configs(problem))


def ranked(kernels: Iterable[Kernel], problem: GemmProblem) -> list[Ranked]:
    """Return every config of every kernel that supports ``problem``, least predicted time first."""
    return in_order(candidates(kernels, problem), problem)


def in_order(found: Iterable[Candidate], problem: GemmProblem) -> list[Ranked]:
    """Return candidates with their predictions for the m of ``problem``, least predicted time first.

    If m stands for an interval of few tokens, us is the geometric mean for this m and one inside the interval, because
    some configs are slow where a tile reaches far past m.
    """
    m, inside = problem.m, problem.m
    if m <= WAVES_FROM and not problem.experts and m == planned(m):
        inside = ragged(m)
    timed = []
    for us, kernel, config in found:
        at = us(m)
        timed.append(Ranked(at if inside == m else math.sqrt(at * us(inside)), kernel, config))
    return sorted(timed, key=lambda entry: (entry.us, entry.kernel.name, str(entry.config)))


__all__ = [
    "Candidate",
    "Ranked",
    "Timer",
    "candidates",
    "copy_us",
    "in_order",
    "predicted_us",
    "ranked",
    "timer",
    "unmeasured",
]
