"""Sum over CTAs that each multiplied a part of k of one tile, through global memory.

Of a tile that is cut, the CTA with its first block is the owner. The others, which follow it in k and in number, each
park their accumulators and raise a flag; the owner adds them up in the order of k, so that the result does not depend
on timing, and lowers the flags again: they are down before and after a launch. A CTA parks the end of a tile before it
owns the start of another, and waits for no one meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.kernels.device.ptx import (
    load_acquire,
    load_global_f32x4,
    store_global_f32x4,
    store_release,
)

_ON_THEIR_WAY = 8
"""Loads of 16 bytes that a thread issues before it adds."""


@dataclass(frozen=True)
class StreamSum:
    """For one warpgroup's accumulators of ``tokens`` tokens; ``warpgroups`` in a CTA, each with a flag of its own.

    partials: float32 (ctas, warpgroups, 64 * tokens). flags: int32 (ctas * warpgroups).
    """

    tokens: int
    warpgroups: int

    @cute.jit
    def park(self, acc: cute.Tensor, partials: cute.Tensor, flags: cute.Tensor, cta: Int32, place, barrier: Int32):
        """place: (warpgroup, thread 0..127). barrier: a named barrier of the warpgroup."""
        wg, thread = place
        own = self.address(partials, cta, wg, thread)
        for i in cutlass.range_constexpr(self.tokens // 8):
            store_global_f32x4(own + i * 2048, [acc[4 * i + j] for j in range(4)])
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        if thread == 0:
            store_release(self.flag(flags, cta, wg), Int32(1))

    @cute.jit
    def add(self, acc: cute.Tensor, partials: cute.Tensor, flags: cute.Tensor, cta: Int32, place, barrier: Int32):
        """Wait until ``cta`` has parked its part, and add it."""
        wg, thread = place
        if thread == 0:
            flag = self.flag(flags, cta, wg)
            raised = load_acquire(flag)
            while raised == 0:
                raised = load_acquire(flag)
            store_release(flag, Int32(0))
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        other = self.address(partials, cta, wg, thread)
        for first in cutlass.range_constexpr(0, self.tokens // 8, _ON_THEIR_WAY):
            count = min(_ON_THEIR_WAY, self.tokens // 8 - first)
            values = [load_global_f32x4(other + (first + i) * 2048) for i in range(count)]
            for i in cutlass.range_constexpr(count):
                for j in cutlass.range_constexpr(4):
                    at = 4 * (first + i) + j
                    acc[at] = acc[at] + values[i][j]

    def address(self, partials: cute.Tensor, cta: Int32, wg: Int32, thread: Int32) -> Int64:
        size = 64 * self.tokens * 4
        return partials.iterator.toint() + Int64((cta * self.warpgroups + wg) * size + thread * 16)

    def flag(self, flags: cute.Tensor, cta: Int32, wg: Int32) -> Int64:
        return flags.iterator.toint() + Int64((cta * self.warpgroups + wg) * 4)
