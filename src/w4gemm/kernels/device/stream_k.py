"""Stream-k fixup: the sum over CTAs that each multiplied a k-range of one output tile, through global memory.

The CTA with a tile's first block along k owns the tile. Every other CTA of that tile, in the order of k and of CTA
numbers, stores its float32 partials and sets a flag. The owner waits for each flag, adds the partials in k order, so
that the result does not depend on timing, and clears the flag: flags are 0 before and after a launch. A CTA stores its
own partials, of the end of a tile, before it owns the start of another, and waits for no flag before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.kernels.arguments import StreamWorkspace
from w4gemm.kernels.device.memory import load_acquire, load_global_f32x4, store_global_f32x4, store_release

_LOADS_IN_FLIGHT = 8
"""Loads of 16 bytes that a thread issues before it adds."""


class WarpgroupThread(NamedTuple):
    """A thread of a warpgroup whose partials are stored together."""

    warpgroup: Int32 | int
    thread: Int32
    """0 .. 127."""
    barrier: Int32 | int
    """Named barrier of the warpgroup's 128 threads."""


@dataclass(frozen=True)
class StreamSum:
    """Fixup of one warpgroup's accumulators of ``tokens`` tokens; a CTA has ``warpgroups``, each with its own flag.

    The workspace has partials (ctas, warpgroups, 64 * tokens) and flags (ctas * warpgroups).
    """

    tokens: int
    warpgroups: int

    @cute.jit
    def store_partials(self, acc: cute.Tensor, workspace: StreamWorkspace, cta: Int32, own: WarpgroupThread):
        """Store the accumulators as CTA ``cta``'s partials and set its flag."""
        address = self.address(workspace, cta, own)
        for i in cutlass.range_constexpr(self.tokens // 8):
            store_global_f32x4(address + i * 2048, [acc[4 * i + j] for j in range(4)])
        cute.arch.barrier(barrier_id=own.barrier, number_of_threads=128)
        if own.thread == 0:
            store_release(self.flag(workspace, cta, own), Int32(1))

    @cute.jit
    def add_partials(self, acc: cute.Tensor, workspace: StreamWorkspace, cta: Int32, own: WarpgroupThread):
        """Wait for the flag of ``cta``, clear it and add its partials to acc."""
        if own.thread == 0:
            flag = self.flag(workspace, cta, own)
            raised = load_acquire(flag)
            while raised == 0:
                raised = load_acquire(flag)
            store_release(flag, Int32(0))
        cute.arch.barrier(barrier_id=own.barrier, number_of_threads=128)
        other = self.address(workspace, cta, own)
        for first in cutlass.range_constexpr(0, self.tokens // 8, _LOADS_IN_FLIGHT):
            count = min(_LOADS_IN_FLIGHT, self.tokens // 8 - first)
            values = [load_global_f32x4(other + (first + i) * 2048) for i in range(count)]
            for i in cutlass.range_constexpr(count):
                for j in cutlass.range_constexpr(4):
                    at = 4 * (first + i) + j
                    acc[at] = acc[at] + values[i][j]

    def address(self, workspace: StreamWorkspace, cta: Int32, own: WarpgroupThread) -> Int64:
        """The address of a thread's partials."""
        size = 64 * self.tokens * 4
        offset = (cta * self.warpgroups + own.warpgroup) * size + own.thread * 16
        return workspace.partials.iterator.toint() + Int64(offset)

    def flag(self, workspace: StreamWorkspace, cta: Int32, own: WarpgroupThread) -> Int64:
        """The address of a warpgroup's flag."""
        return workspace.flags.iterator.toint() + Int64((cta * self.warpgroups + own.warpgroup) * 4)
