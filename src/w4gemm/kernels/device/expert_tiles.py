"""The m tiles of a grouped problem, numbered consecutively over all experts.

Each expert has ceil(rows / tile_m) m tiles, so every tile order of a dense kernel serves a grouped problem too.
:class:`ExpertTileMap` maps a tile number to its expert and rows. The experts' rows are read on the device, so that one
launch, or one CUDA graph, serves any routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.core.epilogue import EpilogueOperands
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.kernels.device.epilogue_math import IndexedScales
from w4gemm.ptx.memory import load_int32

_NEVER = 0x7FFFFFFF


class ExpertTiles(NamedTuple):
    """The experts' tiles and rows."""

    tile_prefix_sums: cute.Tensor
    """int32 (variant.expert_map,) in shared memory: entry e is the number of m tiles of the experts 0 .. e."""
    rows: ExpertRows

    @property
    def experts(self) -> Int32:
        return self.rows.starts.shape[0]

    @property
    def m_tiles(self) -> Int32:
        """The number of m tiles of all experts."""
        return self.tile_prefix_sums[self.experts - 1]


class Part(NamedTuple):
    """The experts that are multiplied in tiles of one width, by their rows: all, those with few, or those with many."""

    least: int = 0
    """Fewest rows of such an expert; 0 but for those with many."""
    most: int = _NEVER
    """Most rows of one."""
    second: bool = False
    """True if these experts are those of the second of two launches."""

    @property
    def counter(self) -> int:
        """The warp that counts the tiles of these experts: of two parts of one launch each has its own."""
        return 2 if self.least > 0 and not self.second else 1

    def rows(self, rows: Int32) -> Int32:
        """The rows that an expert has in this launch: ``rows`` or 0."""
        if self.least > 0:
            rows = cutlass.select_(rows >= self.least, rows, Int32(0))
        if self.most < _NEVER:
            rows = cutlass.select_(rows <= self.most, rows, Int32(0))
        return rows


WHOLE = Part()


class TileRows(NamedTuple):
    """Rows of d of one m tile."""

    expert: Int32
    """0 if the problem is dense."""
    first: Int32
    end: Int32
    """End of the rows of the expert, or of d: the tile's rows from here on are not stored."""


@dataclass(frozen=True)
class ExpertTileMap:
    """Fills and searches :class:`ExpertTiles`, for tiles of ``tile_m`` tokens. Experts outside ``part`` have none."""

    tile_m: int
    part: Part = WHOLE

    @cute.jit
    def fill(self, tiles: ExpertTiles):
        """Compute the prefix sums; called by one warp, each lane of which counts some consecutive experts. Entries up
        to a multiple of 32 are filled with a number that no tile reaches. If the rows are settled, this may be before
        ``griddepcontrol.wait``."""
        table, lane, experts = tiles.tile_prefix_sums, cute.arch.lane_idx(), tiles.experts
        share = (experts + 31) // 32
        count = Int32(0)
        # loads of several experts at once: one after the other they would take as long as a small expert's product
        for i in cutlass.range(share, unroll=4):
            expert = lane * share + i
            known = cutlass.min(expert, experts - 1)
            count += self.tiles(*self.rows_of(tiles, known, early=True))
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
        """The number of m tiles of the rows start .. end."""
        return cutlass.max(self.part.rows(end - start) + self.tile_m - 1, 0) // self.tile_m

    def rows_of(self, tiles: ExpertTiles, expert: Int32, early: bool) -> tuple[Int32, Int32]:
        """An expert's first row and end. early: if the rows are settled, perhaps before ``griddepcontrol.wait``, so
        that L1 may hold older ones."""
        rows = tiles.rows
        if not early:
            return rows.starts[expert], rows.ends[expert]
        start, end = (load_int32(t.iterator.toint() + Int64(expert) * 4, rows.settled != 0) for t in rows[:2])
        return start, end

    @cute.jit
    def find(self, tiles: ExpertTiles, m_tile: Int32, early: bool = False) -> TileRows:
        """The rows of an m tile; called by a converged warp, which compares 32 experts at a time. Experts without rows
        have no tile. For a number past the last tile it is the last expert, with any rows. early: see :meth:`rows_of`.
        """
        table, lane, experts = tiles.tile_prefix_sums, cute.arch.lane_idx(), tiles.experts
        expert = Int32(0)
        for first in cutlass.range(0, experts, 32, unroll=1):
            expert += cute.arch.popc(cute.arch.vote_ballot_sync(table[first + lane] <= m_tile))
        expert = cutlass.min(expert, experts - 1)
        before = Int32(0)
        if expert > 0:
            before = table[expert - 1]
        start, end = self.rows_of(tiles, expert, early)
        return TileRows(expert, start + (m_tile - before) * self.tile_m, end)


def max_m_tiles(m: Int32, experts: Int32, tile_m: int, part: Part = WHOLE) -> Int32:
    """The largest number of m tiles that m rows can make, however they are divided among the experts; 1 for none."""
    if part.least == 0:
        return m // tile_m + cutlass.min(m, experts)
    return cutlass.max(m // tile_m + cutlass.min(m // part.least, experts), 1)


def first_rows(t: cute.Tensor, end: Int32) -> cute.Tensor:
    """t (m, columns) cut off at row ``end``, so that rows from there on are neither read nor written."""
    return cute.make_tensor(t.iterator, cute.make_layout((end, t.shape[1]), stride=t.stride))


def operands_of_expert(operands: EpilogueOperands, expert: Int32, end: Int32) -> EpilogueOperands:
    """The operands of one expert's tile: its own row of (experts, n) tensors, the residual cut off at row ``end``."""
    return operands_until(operands.of_expert(lambda t: row_of(t, expert)), end)


def operands_until(operands: EpilogueOperands, end: Int32) -> EpilogueOperands:
    """``operands`` with the residual cut off at row ``end``."""
    if operands.residual is None:
        return operands
    return operands._replace(residual=first_rows(operands.residual, end))


def with_indexed_scales(operands: EpilogueOperands, indices: cute.Tensor | None) -> EpilogueOperands:
    """``operands`` with token scales that are read through ``indices``, if rows of x are gathered."""
    if operands.token_scale is None or indices is None:
        return operands
    return operands._replace(token_scale=IndexedScales(operands.token_scale, indices))


def row_of(t: cute.Tensor, index: Int32) -> cute.Tensor:
    """Row ``index`` of a contiguous matrix, or element ``index`` of a vector, as a vector."""
    n = t.shape[1] if cute.rank(t) > 1 else 1
    return cute.make_tensor(t.iterator + index * n, cute.make_layout((n,)))


def weight_of_expert(weight: cute.Tensor, expert: Int32, n_blocks: Int32) -> cute.Tensor:
    """The blocks (n_blocks, k blocks, words) of one expert, of the blocks of all experts in a row."""
    _, k_blocks, words = weight.shape
    start = Int64(expert * n_blocks) * (k_blocks * words)
    return cute.make_tensor(weight.iterator + start, cute.make_layout((n_blocks, k_blocks, words)))
