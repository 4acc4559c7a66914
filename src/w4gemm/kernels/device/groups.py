"""Which rows of x an expert has: the scheduler of a grouped product, which is the dense one over all experts' tiles.

Token tiles are numbered over all experts in turn, each expert's ceil(rows / tile_m) of them, so every order of tiles
that a dense kernel has serves a grouped one; :class:`Groups` says whose tile a number is. The first rows and ends of
experts are read on the device, so that a launch, or a CUDA graph of one, serves any routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

_NEVER = 0x7FFFFFFF


@dataclass(frozen=True)
class Groups:
    """For tiles of ``tile_m`` tokens. ``table``: int32 in shared memory, as many as MAX_EXPERTS: entry e holds the
    number of token tiles of the experts 0 .. e. ``rows``: (starts, ends), int32 (experts) in global memory: expert e
    has the rows starts[e] .. ends[e] of x."""

    tile_m: int

    @cute.jit
    def fill(self, table: cute.Tensor, rows: Any):
        """By one warp, each lane some experts side by side; up to a multiple of 32 the table says "never"."""
        starts, ends = rows
        lane, experts = cute.arch.lane_idx(), starts.shape[0]
        share = (experts + 31) // 32
        count = Int32(0)
        # loads of several experts at once: one after the other they would take as long as a small expert's product
        for i in cutlass.range(share, unroll=4):
            expert = lane * share + i
            known = cutlass.min(expert, experts - 1)
            count += self.tiles(starts[known], ends[known])
            table[expert] = count
        before = count
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(before, 1 << step)
            if lane >= 1 << step:
                before += other
        before -= count
        for i in cutlass.range(share, unroll=1):
            expert = lane * share + i
            if expert < experts:
                table[expert] = table[expert] + before
            else:
                table[expert] = Int32(_NEVER)

    def tiles(self, start: Int32, end: Int32) -> Int32:
        return cutlass.max(end - start + self.tile_m - 1, 0) // self.tile_m

    @cute.jit
    def find(self, table: cute.Tensor, rows: Any, m_tile: Int32):
        """(expert, first row, end of the expert's rows) of a token tile: a converged warp looks at 32 experts at a
        time. Experts without rows have no tile and are passed over. Past the last tile: the last expert, anywhere."""
        starts, ends = rows
        lane, experts = cute.arch.lane_idx(), starts.shape[0]
        expert = Int32(0)
        for first in cutlass.range(0, experts, 32, unroll=1):
            expert += cute.arch.popc(cute.arch.vote_ballot_sync(table[first + lane] <= m_tile))
        expert = cutlass.min(expert, experts - 1)
        before = Int32(0)
        if expert > 0:
            before = table[expert - 1]
        return expert, starts[expert] + (m_tile - before) * self.tile_m, ends[expert]


def first_rows(t: cute.Tensor, end: Int32) -> cute.Tensor:
    """t (m, columns) cut off at row ``end``, so that what lies behind is neither read nor written."""
    return cute.make_tensor(t.iterator, cute.make_layout((end, t.shape[1]), stride=t.stride))


def extras_of(extras: Any, expert: Int32, end: Int32) -> Any:
    """(alpha, bias, residual, token scales, channel scales) of an expert: its own rows of those that are (experts, n),
    the residual cut off at its last row."""
    bias, channel_scale = row_of(extras.bias, expert), row_of(extras.channel_scale, expert)
    return cut_off(extras._replace(bias=bias, channel_scale=channel_scale), end)


def scales_of_rows(token_scale: cute.Tensor | None, indices: cute.Tensor | None) -> Any:
    """The scales of x's rows as Formula takes them: with the indices of the rows where those are gathered."""
    return token_scale if token_scale is None or indices is None else (token_scale, indices)


def cut_off(extras: Any, end: Int32) -> Any:
    """The same with the residual cut off at row ``end``."""
    return extras if extras.residual is None else extras._replace(residual=first_rows(extras.residual, end))


def row_of(t: cute.Tensor | None, index: Int32) -> cute.Tensor | None:
    """Row ``index`` of a contiguous matrix, where there is one."""
    if t is None:
        return None
    n = t.shape[1]
    return cute.make_tensor(t.iterator + index * n, cute.make_layout((n,)))


def weight_of(weight: cute.Tensor, expert: Int32, n_blocks: Int32) -> cute.Tensor:
    """The blocks (n_blocks, k blocks, words) of an expert, of those of all experts in a row."""
    _, k_blocks, words = weight.shape
    start = Int64(expert * n_blocks) * (k_blocks * words)
    return cute.make_tensor(weight.iterator + start, cute.make_layout((n_blocks, k_blocks, words)))


def most_tiles(m: Int32, experts: Int32, tile_m: int) -> Int32:
    """As many token tiles as m rows can make, however they are divided."""
    return m // tile_m + cutlass.min(m, experts)
