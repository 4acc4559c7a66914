"""Sum over the CTAs of a cluster that each multiplied a part of k, through distributed shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from w4gemm.kernels.device.ptx import cluster_address, load_shared_cluster, store_shared_f32x4


@dataclass(frozen=True)
class Reduction:
    """For a tile of ``tokens`` tokens, ``ranks`` CTAs with ``threads`` consumer threads each.

    Each rank sums ``share`` blocks of eight tokens over all ranks, in rank order: the result does not depend on timing.
    Where the shares of the first ranks are all there is, the last ranks have nothing to sum; of a share that reaches
    past the tile, what lies behind is the tile's last block again.
    """

    tokens: int
    share: int
    ranks: int
    threads: int

    @cute.jit
    def park(self, acc: cute.Tensor, own: Int32):
        """Store all accumulators at ``own``, this thread's part of the first line. A cluster barrier must follow."""
        for i in cutlass.range_constexpr(self.tokens // 8):
            store_shared_f32x4(own + i * self.line, [acc[4 * i + j] for j in range(4)])

    @cute.jit
    def sum(self, acc: cute.Tensor, own: Int32, rank: Int32):
        """Sum this rank's share into the first 4 * share accumulators: (its first token, whether it has one).

        A cluster barrier must follow before the parked values are overwritten or their CTA exits.
        """
        first, blocks = rank * self.share, self.tokens // 8
        mine = first < blocks
        if mine:
            for i in cutlass.range_constexpr(4 * self.share):
                acc[i] = Float32(0.0)
            for r in cutlass.range_constexpr(self.ranks):
                other = cluster_address(own, Int32(r))
                for i in cutlass.range_constexpr(self.share):
                    block = first + i
                    if const_expr(blocks % self.share > 0):
                        block = cutlass.min(block, blocks - 1)
                    values = load_shared_cluster(other + block * self.line)
                    for j in cutlass.range_constexpr(4):
                        acc[4 * i + j] = acc[4 * i + j] + values[j]
        return first * 8, mine

    @property
    def line(self) -> int:
        """Bytes of one block of four accumulators, all threads."""
        return self.threads * 16
