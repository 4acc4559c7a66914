"""Reduction over the CTAs of a cluster that divide k of one output tile, through distributed shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from w4gemm.ptx.memory import cluster_address, load_shared_cluster, store_shared_f32x4


@dataclass(frozen=True)
class Reduction:
    """Sum of the accumulators of ``ranks`` CTAs with ``threads`` consumer threads each: a tile of ``tokens`` tokens.

    Each rank sums ``share`` blocks of eight tokens over all ranks, in rank order, so that the result does not depend on
    timing. If the first ranks' shares cover the tile, the last ranks have none. A share that reaches past the tile
    repeats the tile's last block.
    """

    tokens: int
    share: int
    ranks: int
    threads: int

    @cute.jit
    def store_partials(self, acc: cute.Tensor, own: Int32):
        """Store all accumulators to this CTA's shared memory. ``own``: address of this thread's first 16 bytes.

        A cluster barrier must follow before :meth:`sum`.
        """
        for i in cutlass.range_constexpr(self.tokens // 8):
            store_shared_f32x4(own + i * self.line, [acc[4 * i + j] for j in range(4)])

    @cute.jit
    def sum(self, acc: cute.Tensor, own: Int32, rank: Int32) -> tuple[Int32, Boolean]:
        """Sum this rank's share into the first 4 * share accumulators; return (its first token, True if it has one).

        A cluster barrier must follow before any CTA overwrites its partials or exits.
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
        """Bytes that all threads store for one block of eight tokens: four accumulators each."""
        return self.threads * 16
