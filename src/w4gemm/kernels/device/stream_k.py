"""Stream-k fixup: the sum over CTAs that each multiplied a k-range of one output tile, through global memory.

The CTA with a tile's last block along k owns the tile. Every other CTA of that tile, in the order of k and of CTA
numbers, stores its float32 partials and raises a flag. The owner waits for each flag, lowers it, and adds the partials
in k order, so that the result does not depend on timing: flags are 0 before and after a launch. A CTA stores its own
partials, of the start of a tile, before it owns the end of another, and waits for no flag before that, and then for
CTAs of lower numbers, which start before it. In a launch each flag is raised once and waited for by one CTA, so
lowering it needs no order: no CTA raises it before the next launch.

A thread that raises a flag waits until all partials are in L2, and one that waits for a flag reads L2 at least once, a
microsecond each if memory is busy. The Hopper kernel leaves both to warps that do nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.kernels.arguments import StreamWorkspace
from w4gemm.ptx.memory import (
    load_acquire,
    load_global_f32x4,
    store_global_f32x4,
    store_relaxed,
    store_release,
)

_LOADS_IN_FLIGHT = 8
"""Loads of 16 bytes that a thread issues before it adds."""


class WarpgroupThread(NamedTuple):
    """A thread of a warpgroup whose partials are stored together."""

    warpgroup: Int32 | int
    thread: Int32
    """0 .. 127."""


@dataclass(frozen=True)
class StreamSum:
    """Fixup of one warpgroup's accumulators of ``tokens`` tokens; a CTA has ``warpgroups``, each with its own flag.

    The workspace has partials (ctas, warpgroups, 64 * tokens) and flags (ctas * warpgroups).
    """

    tokens: int
    warpgroups: int

    @cute.jit
    def store_partials(self, acc: cute.Tensor, workspace: StreamWorkspace, cta: Int32, own: WarpgroupThread):
        """Store the accumulators as CTA ``cta``'s partials."""
        address = self.address(workspace, cta, own)
        for i in cutlass.range_constexpr(self.tokens // 8):
            store_global_f32x4(address + i * 2048, [acc[4 * i + j] for j in range(4)])

    def raise_flag(self, workspace: StreamWorkspace, cta: Int32, warpgroup: Int32 | int) -> None:
        """Say that ``cta``'s partials are there, behind a barrier that all threads met which stored them; by one
        thread."""
        store_release(self.flag(workspace, cta, warpgroup), Int32(1))

    @cute.jit
    def await_flag(self, workspace: StreamWorkspace, cta: Int32, warpgroup: Int32 | int):
        """Wait for ``cta``'s partials, in front of a barrier that all threads meet which add them; by one thread."""
        flag = self.flag(workspace, cta, warpgroup)
        raised = load_acquire(flag)
        while raised == 0:
            raised = load_acquire(flag)
        store_relaxed(flag, Int32(0))

    def add_partials(self, acc: cute.Tensor, workspace: StreamWorkspace, cta: Int32, own: WarpgroupThread) -> None:
        """Add ``cta``'s partials to acc."""
        other = self.address(workspace, cta, own)
        for first in range(0, self.tokens // 8, _LOADS_IN_FLIGHT):
            count = min(_LOADS_IN_FLIGHT, self.tokens // 8 - first)
            values = [load_global_f32x4(other + (first + i) * 2048) for i in range(count)]
            for i in range(count):
                for j in range(4):
                    at = 4 * (first + i) + j
                    acc[at] = acc[at] + values[i][j]

    def address(self, workspace: StreamWorkspace, cta: Int32, own: WarpgroupThread) -> Int64:
        """The address of a thread's partials."""
        size = 64 * self.tokens * 4
        offset = (cta * self.warpgroups + own.warpgroup) * size + own.thread * 16
        return workspace.partials.iterator.toint() + Int64(offset)

    def flag(self, workspace: StreamWorkspace, cta: Int32, warpgroup: Int32 | int) -> Int64:
        """The address of a warpgroup's flag."""
        return workspace.flags.iterator.toint() + Int64((cta * self.warpgroups + warpgroup) * 4)
