"""The roofline: the least time of a problem on a device, from the bytes it moves and the operations it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from w4gemm.core.problem import GemmProblem
from w4gemm.packing.layouts import layout_named

LAUNCH_US = 2.0
"""Time of a launch in a CUDA graph besides that of its bytes and operations."""


class Rates(NamedTuple):
    """The rates that large library calls reach on a device. The GPU's power limits them, so they are below the rates of
    its data sheet (:mod:`w4gemm.core.problem`)."""

    bytes: float
    """Bytes of memory per us."""
    operations: float
    """Operations on 16-bit operands per us."""
    fp8_operations: float
    """Operations on fp8 operands per us."""


RATES = {
    "NVIDIA H200": Rates(4.5e6, 790e6, 1550e6),
    "NVIDIA H100 80GB HBM3": Rates(3.07e6, 790e6, 1550e6),
}
"""Rates by the device's name. The H200's were measured (2026-11-21), and the H100's bandwidth. The H100 has the same
multiprocessors and power limit; products have reached 778 and 1448 TFLOP/s there (2026-11-27)."""


@dataclass(frozen=True)
class Work:
    """The least bytes that a problem moves and the operations that it does."""

    bytes: int
    """Bytes of the weight, packed without padding, of x, d and a residual, each once."""
    operations: int
    """2 * m * n * k, a multiplication and an addition each."""

    @classmethod
    def of(cls, problem: GemmProblem) -> Work:
        """Return the work of a problem of a single weight."""
        m, n, k = problem.m, problem.n, problem.k
        weight = 0
        for dtype, shape in layout_named("canonical").shapes(problem.format, n, k):
            size = dtype.itemsize
            for extent in shape:
                size *= extent
            weight += size
        out = m * problem.epilogue.columns(n) * problem.out_dtype.itemsize * (2 if problem.epilogue.residual else 1)
        return cls(weight + m * k * problem.dtype.itemsize + out, 2 * m * n * k)


class Roofline(NamedTuple):
    """The least time of a problem on a device."""

    us: float
    """max(bytes / bandwidth, operations / rate) in microseconds."""
    bound: str
    """Which of both it is: "bytes" or "operations"."""

    @property
    def limit_us(self) -> float:
        """The least time of a product in a CUDA graph: that of the roofline and of a launch."""
        return self.us + LAUNCH_US

    @classmethod
    def of(cls, problem: GemmProblem) -> Roofline | None:
        """Return the least time of a problem; None for a device of unknown rates."""
        rates = RATES.get(problem.device.name)
        if rates is None:
            return None
        work, fp8 = Work.of(problem), problem.dtype.itemsize == 1
        operations_us = work.operations / (rates.fp8_operations if fp8 else rates.operations)
        bytes_us = work.bytes / rates.bytes
        return cls(bytes_us, "bytes") if bytes_us >= operations_us else cls(operations_us, "operations")
