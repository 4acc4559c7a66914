"""Rows of x from anywhere into the shared memory that a matrix instruction reads, by cp.async: what a grouped problem
that is ``gathered`` has in place of TMA, which takes neighbouring rows alone on Hopper.

A tile's x lies as TMA would leave it: [run of 128 bytes along k][token][128 bytes], the eight parts of 16 bytes in the
order part ^ (token % 8). A copy of a warp is four rows of such a run: eight lanes a row, each 16 bytes of it.

What the copies of a thread wrote is known to be there by ``arrive``: that thread's arrival at an mbarrier, by the
hardware, when all copies that it requested before are done. So the producer never waits for them, and as many slots as
the ring has are on their way. They are writes of the generic proxy: who has them read by WGMMA, which is of the async
proxy, puts ``fence_proxy_async`` (ptx.py) between its wait for that mbarrier and the WGMMA. Nothing is needed before a
slot is written again, whose reads are over.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.kernels.device.ptx import copy_async_if, load_row_index

_TOGETHER = 4  # copies of a warp whose rows are looked up at once


@dataclass(frozen=True)
class RowGather:
    """For tiles of ``tokens`` rows and slots of ``chunks`` runs of 128 bytes of x, whose elements have ``itemsize``
    bytes, copied by ``warps`` warps together, one or four. No control flow of the device: plain Python.

    x must have rows at multiples of 16 bytes, whose length is one: see ``gpu.takes_rows``.
    """

    tokens: int
    chunks: int
    itemsize: int
    warps: int

    @property
    def row_warps(self) -> int:
        """Warps along the tokens; the others, if any, take other runs."""
        return min(self.warps, self.tokens // 4)

    @property
    def rows(self) -> int:
        """Consecutive rows of one warp."""
        return self.tokens // self.row_warps

    def indices(self, indices: cute.Tensor, token: Int32, end: Int32, warp: Int32) -> list[Int32]:
        """Which rows of x a warp copies for the tile that begins at ``token``: lane i has those of its rows i, 32 + i,
        ...; -1 from ``end`` on. indices: int32 (m)."""
        row = token + warp % self.row_warps * self.rows + cute.arch.lane_idx()
        base = indices.iterator.toint()
        return [load_row_index(base + Int64(row + i) * 4, row + i < end) for i in range(0, self.rows, 32)]

    def copy(self, x: cute.Tensor, indices: list[Int32], slot: Int32, target: Int32, warp: Int32) -> None:
        """Request this warp's part of a slot, into shared memory from ``target`` on; zeros past k and in rows that have
        no index."""
        lane, run, length = cute.arch.lane_idx(), 128 // self.itemsize, 16 // self.itemsize
        first_run, run_step = warp // self.row_warps, self.warps // self.row_warps
        row, part = warp % self.row_warps * self.rows + lane // 8, lane % 8
        column = (slot * self.chunks + first_run) * run + part * length
        to = target + first_run * (self.tokens * 128) + row * 128 + ((part ^ row) % 8) * 16
        source = x.iterator.toint() + Int64(column) * self.itemsize
        row_bytes = Int32(x.stride[0]) * self.itemsize
        for first in range(0, self.rows // 4, _TOGETHER):
            together = range(first, min(first + _TOGETHER, self.rows // 4))
            own = [cute.arch.shuffle_sync(indices[i // 8], i % 8 * 4 + lane // 8) for i in together]
            for i, index in zip(together, own, strict=True):
                start = source + Int64(index) * Int64(row_bytes)
                # four rows on, the order of the parts differs in one bit
                place = (to ^ 64 if i % 2 else to) + i * 512
                for j in range(0, self.chunks, run_step):
                    exists = (index >= 0) & (column + j * run < x.shape[1])
                    copy_async_if(place + j * (self.tokens * 128), start + j * 128, exists)
