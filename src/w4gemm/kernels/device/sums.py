"""Sums over a warp and over a CTA, of which every thread gets the same bits."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from w4gemm.ptx.arithmetic import fma


def warp_sum(value: Float32) -> Float32:
    """Add up over a warp; every lane gets the same bits, because addition commutes."""
    for offset in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value


@cute.jit
def cta_sum_of_squares(values: list[list[Float32]], sums: cute.Tensor, thread: Int32, threads: int) -> Float32:
    """Add up the squares of all threads' values, of a thread in their order. The rest as :func:`cta_sum`."""
    total = Float32(0.0)
    for chunk in values:
        for value in chunk:
            total = fma(value, value, total)
    return cta_sum(total, sums, thread, threads)


@cute.jit
def cta_sum(value: Float32, sums: cute.Tensor, thread: Int32, threads: int) -> Float32:
    """Add up over a CTA of ``threads`` threads. sums: float32 (32,) in shared memory; one barrier if there are several
    warps."""
    value = warp_sum(value)
    if cutlass.const_expr(threads > 32):
        lane = thread % 32
        if lane == 0:
            sums[thread // 32] = value
        cute.arch.sync_threads()
        value = warp_sum(sums[lane] if lane < threads // 32 else Float32(0.0))
    return value
