"""The roofline: the least time of a problem on a device, from the bytes it moves and the operations it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from w4gemm.core.epilogue import SCALE_BLOCK
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.codecs import scales_on_sums
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


RATES = {"NVIDIA H200": Rates(4.5e6, 790e6, 1550e6), "NVIDIA H100 80GB HBM3": Rates(3.07e6, 790e6, 1550e6)}
"""Rates by the device's name. The H200's were measured (2026-11-21), and the H100's bandwidth. The H100 has the same
multiprocessors and power limit; products have reached 778 and 1448 TFLOP/s there (2026-11-27)."""


_SUMS_COLUMNS = 32
"""Columns of fp8 that tensor cores multiply in the time of one fma of each of their sums: a multiprocessor does 4096
multiplications of fp8 or 128 fmas a cycle. In no kernel or order of instructions that was timed did both overlap
(H200, 2026-11-29, docs/measured.md)."""


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
    sums_us: float = 0.0
    """Part by which ``us`` grows if tensor cores wait while float32 sums are multiplied by their scales: fp8 x, whose
    scales are not rounded into weights."""

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
        us = max(bytes_us, operations_us)
        with_sums = operations_us * (1 + _SUMS_COLUMNS / group) if (group := _group_of_sums(problem)) else 0.0
        return cls(us, "bytes" if bytes_us >= operations_us else "operations", max(with_sums - us, 0.0))


def _group_of_sums(problem: GemmProblem) -> int:
    """Columns whose sums are multiplied by a scale and added to others; 0 if none are."""
    group = max(problem.format.group_size, 0)
    if problem.dtype.itemsize > 1:
        return 0
    if problem.epilogue.block_scale:
        return min(group or SCALE_BLOCK, SCALE_BLOCK)
    return group if scales_on_sums(problem.format) else 0
