"""Order of the CPU kernel's two methods, for no CPU in particular: only which one is faster is known."""

from __future__ import annotations

from typing import Any

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem

_SUM_TOKENS = 4
"""Largest m that "sum" is ranked first for. Time of "sum" / time of "dense", geometric mean over four sizes of layers,
float32 and bfloat16, one and two cores of an EPYC with AVX-512 (2026-11-22): 0.7 at 4 tokens, 1.1 at 6, 1.5 at 8."""


def predicted_us(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    """1 for the method that is faster, 2 for the other."""
    few = problem.m <= _SUM_TOKENS
    return 1.0 if (config.tile_m == 1) == few else 2.0
