"""Sums over the CTAs of a cluster: :class:`SplitKReduction` of a tile that all of them multiply a part of, and
:class:`ChainSum` of a tile that one CTA begins and the next one ends. Accumulators go from registers into the shared
memory of the CTA that adds them, as st.async, which an mbarrier there counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from w4gemm.ptx.memory import cluster_address, load_shared_f32x4, store_async_f32x4


class Handover(NamedTuple):
    """Where other CTAs store their sums of the tokens that this CTA stores."""

    barrier: cute.Pointer
    """mbarrier on which these stores complete."""
    sums: Int32
    """Address of the sums, by CTA."""


@dataclass(frozen=True)
class ClusterSum:
    """A sum over CTAs of a cluster (``ranks``) of the accumulators of ``threads`` consumer threads each, for a tile of
    ``blocks`` blocks of eight tokens."""

    blocks: int
    ranks: int
    threads: int

    @property
    def line(self) -> int:
        """Bytes of one block of eight tokens: four accumulators of each thread."""
        return self.threads * 16


@dataclass(frozen=True)
class SplitKReduction(ClusterSum):
    """Sum over all CTAs of a cluster. Each rank stores ``share`` blocks of the tile; the last ranks may have fewer, or
    none. The others store their sums of these blocks in its shared memory. It adds up in rank order, so that the result
    depends neither on timing nor on the rank.
    """

    share: int

    def first(self, rank: Int32) -> Int32:
        """The first token of a rank's share."""
        return rank * (8 * self.share)

    def bytes_for(self, rank: Int32) -> Int32:
        """Bytes that the other ranks store in the memory of this one."""
        blocks = cutlass.min(cutlass.max(self.blocks - rank * self.share, 0), self.share)
        return blocks * (self.line * (self.ranks - 1))

    @cute.jit
    def hand_over(self, acc: cute.Tensor, sums: Int32, barrier: Int32, rank: Int32):
        """Store the other ranks' shares in their memory, and move this one's into the first accumulators. sums: address
        of this thread's first 16 bytes, in each CTA."""
        for r in cutlass.range_constexpr(self.ranks):
            share = min(self.share, self.blocks - r * self.share)
            if rank != r:
                place = rank - Int32(rank > r)
                to = cluster_address(sums + place * (self.share * self.line), Int32(r))
                signal = cluster_address(barrier, Int32(r))
                for i in cutlass.range_constexpr(share):
                    first = 4 * (r * self.share + i)
                    store_async_f32x4(to + i * self.line, [acc[first + j] for j in range(4)], signal)
            elif const_expr(r > 0):
                for i in cutlass.range_constexpr(share):
                    for j in range(4):
                        acc[4 * i + j] = acc[4 * (r * self.share + i) + j]

    def add(self, acc: cute.Tensor, sums: Int32, rank: Int32) -> None:
        """Add the other ranks' sums of this rank's share to the first 4 * share accumulators. A share that reaches past
        the tile repeats the tile's last block."""
        either = self.ranks == 2  # two numbers have one sum in either order
        places = [Int32(0)] if either else [cutlass.min(r - Int32(rank < r), self.ranks - 2) for r in range(self.ranks)]
        for i in range(self.share):
            block = Int32(i)
            if self.blocks % self.share > 0:
                block = cutlass.min(block, self.blocks - 1 - rank * self.share)
            own = [acc[4 * i + j] for j in range(4)]
            others = [load_shared_f32x4(sums + (place * self.share + block) * self.line) for place in places]
            total, *rest = [own, *others]
            if not either:
                pairs = [zip(own, other, strict=True) for other in others]
                total, *rest = [[cutlass.select_(rank == r, *pair) for pair in part] for r, part in enumerate(pairs)]
            for part in rest:
                total = [a + b for a, b in zip(total, part, strict=True)]
            for j in range(4):
                acc[4 * i + j] = total[j]


@dataclass(frozen=True)
class ChainSum(ClusterSum):
    """Sum of a tile's two parts along k, of the CTA that owns it and of the next one in the cluster, which has the
    end."""

    def bytes_for(self, rank: Int32) -> Int32:
        """Bytes that the next rank stores in the memory of this one: a tile, and nothing for the last."""
        return cutlass.select_(rank < self.ranks - 1, Int32(self.blocks * self.line), Int32(0))

    def hand_over(self, acc: cute.Tensor, sums: Int32, barrier: Int32, rank: Int32) -> None:
        """Store the accumulators in the memory of the rank before."""
        to, signal = cluster_address(sums, rank - 1), cluster_address(barrier, rank - 1)
        for i in range(self.blocks):
            store_async_f32x4(to + i * self.line, [acc[4 * i + j] for j in range(4)], signal)

    def add(self, acc: cute.Tensor, sums: Int32) -> None:
        """Add what the next rank has stored."""
        for i in range(self.blocks):
            other = load_shared_f32x4(sums + i * self.line)
            for j in range(4):
                acc[4 * i + j] = acc[4 * i + j] + other[j]
