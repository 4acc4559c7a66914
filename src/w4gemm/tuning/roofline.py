"""The least time that a problem can take on a device, from what it moves and multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from w4gemm.core.problem import GemmProblem
from w4gemm.packing.layouts import layout_named


class Rates(NamedTuple):
    """Rates that large library calls reach on a device, per us. The GPU's power limits them, so they are below those
    of its data sheet (:mod:`w4gemm.core.gpu_rates`)."""

    bytes: float
    operations: float
    """Operations per microsecond on 16-bit operands."""
    fp8_operations: float


RATES = {"NVIDIA H200": Rates(4.5e6, 790e6, 1550e6)}
"""By device name (2026-11-21)."""


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
    work, fp8 = Work.of(problem), problem.dtype.itemsize == 1
    return max(work.bytes / rates.bytes, work.operations / (rates.fp8_operations if fp8 else rates.operations))
