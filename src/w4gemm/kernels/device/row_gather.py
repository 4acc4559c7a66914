"""Rows of x from anywhere into the shared memory that a matrix instruction reads, by cp.async: a gathered problem has
this instead of TMA, which on Hopper copies consecutive rows only.

A tile's x lies as TMA would leave it: [k chunk of 128 bytes][token][128 bytes], the eight vectors of 16 bytes in
the order vector ^ (token % 8). One copy of a warp is four rows of such a k chunk: eight lanes per row, 16 bytes each.

Each thread arrives at an mbarrier through ``cp.async.mbarrier.arrive.noinc``: the hardware performs that arrival when
all copies that the thread requested before are done. So the producer never waits for its copies, and as many stages as
the pipeline has are in flight. cp.async writes through the generic proxy and WGMMA reads through the async proxy, so a
consumer executes ``fence_proxy_async`` (memory.py) between its wait for that mbarrier and the WGMMA. No fence is needed
before a stage is filled again, because its reads are over.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.ptx.memory import copy_async_if, load_row_index

_COPIES_IN_FLIGHT = 4  # copies of a warp whose row indices are shuffled together


@dataclass(frozen=True)
class RowGather:
    """Copies rows of x for tiles of ``tokens`` rows and stages of ``k_chunks`` times 128 bytes along k.

    No control flow of the device: plain Python. x must have rows at multiples of 16 bytes whose length is a multiple of
    16 bytes, see ``gpu.takes_rows``.

    Args:
        itemsize: bytes of an element of x.
        warps: number of warps that copy a stage together, one or four.
    """

    tokens: int
    k_chunks: int
    itemsize: int
    warps: int

    @property
    def row_warps(self) -> int:
        """Number of warps along the tokens, each with whole copies of four rows; the others, if any, copy other k
        chunks."""
        return next(count for count in (4, 2, 1) if count <= self.warps and self.tokens % (4 * count) == 0)

    @property
    def rows(self) -> int:
        """Number of consecutive rows that a warp copies."""
        return self.tokens // self.row_warps

    def indices(self, indices: cute.Tensor, token: Int32, end: Int32, warp: Int32 | int) -> list[Int32]:
        """Load the row numbers of x that a warp copies for the tile that begins at ``token``: lane i gets those of the
        warp's rows i, 32 + i, ...; -1 from row ``end`` on. indices: int32 (m,)."""
        row = token + warp % self.row_warps * self.rows + cute.arch.lane_idx()
        base = indices.iterator.toint()
        return [load_row_index(base + Int64(row + i) * 4, row + i < end) for i in range(0, self.rows, 32)]

    def copy(self, x: cute.Tensor, indices: list[Int32], k_slice: Int32, target: Int32, warp: Int32 | int) -> None:
        """Request this warp's share of a k-slice, into the stage at ``target``. Columns past k, and rows whose index is
        -1, become zeros."""
        lane, chunk_k, length = cute.arch.lane_idx(), 128 // self.itemsize, 16 // self.itemsize
        first_chunk, chunk_step = warp // self.row_warps, self.warps // self.row_warps
        row, vector = warp % self.row_warps * self.rows + lane // 8, lane % 8
        column = (k_slice * self.k_chunks + first_chunk) * chunk_k + vector * length
        to = target + first_chunk * (self.tokens * 128) + row * 128 + ((vector ^ row) % 8) * 16
        source = x.iterator.toint() + Int64(column) * self.itemsize
        row_bytes = Int32(x.stride[0]) * self.itemsize
        for first in range(0, self.rows // 4, _COPIES_IN_FLIGHT):
            together = range(first, min(first + _COPIES_IN_FLIGHT, self.rows // 4))
            own = [cute.arch.shuffle_sync(indices[i // 8], i % 8 * 4 + lane // 8) for i in together]
            for i, index in zip(together, own, strict=True):
                start = source + Int64(index) * Int64(row_bytes)
                # four rows on, the order of the vectors differs in one bit
                address = (to ^ 64 if i % 2 else to) + i * 512
                for j in range(0, self.k_chunks, chunk_step):
                    exists = (index >= 0) & (column + j * chunk_k < x.shape[1])
                    copy_async_if(address + j * (self.tokens * 128), start + j * 128, exists)
