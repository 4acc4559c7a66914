"""The least time that a problem can take on a device, from what it moves and multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from w4gemm.packing.layouts import layout_named
from w4gemm.problem import GemmProblem

RATES: dict[str, tuple[float, float, float]] = {"NVIDIA H200": (4.5e6, 790e6, 1550e6)}
"""(bytes, operations, operations on fp8 activations) a microsecond by device name: what large library matmuls reach
there (2026-11-21; power-limited, so below the data sheet's)."""


@dataclass(frozen=True)
class Work:
    """Bytes that a problem moves and operations that it does, at the least."""

    bytes: int
    """The weight as packed without padding, x, d and a residual, each once."""
    operations: int
    """2 m n k."""

    @classmethod
    def of(cls, problem: GemmProblem) -> Work:
        m, n, k = problem.m, problem.n, problem.k
        weight = 0
        for dtype, shape in layout_named("canonical").shapes(problem.format, n, k):
            size = dtype.itemsize
            for extent in shape:
                size *= extent
            weight += size
        out = m * problem.epilogue.columns(n) * problem.out_dtype.itemsize * (2 if problem.epilogue.residual else 1)
        return cls(weight + m * k * problem.dtype.itemsize + out, 2 * m * n * k)


def roofline_us(problem: GemmProblem) -> float | None:
    """max(bytes / bandwidth, operations / rate) in microseconds; None for a device whose rates are not known."""
    rates = RATES.get(problem.device.name)
    if rates is None:
        return None
    work = Work.of(problem)
    return max(work.bytes / rates[0], work.operations / rates[2 if problem.dtype.itemsize == 1 else 1])
