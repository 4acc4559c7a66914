"""About how long a config takes, without running it: one formula per kernel, with constants as data (constants.py).

A new kernel needs no formula: it is ranked by twice its roofline until one is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from w4gemm.choice.cost import library, mma_sync, waves
from w4gemm.choice.cost.traffic import Timer, roofline_us
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import Kernel

_Timers = Callable[[GemmConfig], Timer]


def _each(model: Callable[[Any, GemmProblem, GemmConfig], float]) -> Callable[[Any, GemmProblem], _Timers]:
    """A model of one problem and config as the timers of all configs."""
    return lambda kernel, problem: lambda config: lambda m: model(kernel, replace(problem, m=m), config)


_TIMERS: dict[str, Callable[[Any, GemmProblem], _Timers]] = {
    "sm90_decode": waves.timers,
    "sm90_mixed_gemm": waves.timers,
    "sm90_fp8_gemm": waves.timers,
    "sm89_fp8_gemm": mma_sync.timers,
    "sm80_mixed_gemm": mma_sync.timers,
    "dequantize_gemm": _each(library.dequantize_gemm_us),
    "cpu_mixed_gemm": _each(library.cpu_order),
}
"""By the kernel's name."""
_ROOFLINE = _each(lambda kernel, problem, config: 2 * roofline_us(problem))


def timers(kernel: Kernel, problem: GemmProblem) -> _Timers:
    """Return a function from a config to its :data:`Timer`. Times are above 0. They order configs and kernels on one
    device, no more."""
    return _TIMERS.get(kernel.name, _ROOFLINE)(kernel, problem)


def predicted_us(kernel: Kernel, problem: GemmProblem, config: GemmConfig) -> float:
    """Return the microseconds of a launch of one config at the problem's m."""
    return timers(kernel, problem)(config)(problem.m)
