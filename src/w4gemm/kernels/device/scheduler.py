"""Order of a launch's output tiles, and the work tiles of a CTA under stream-k."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


def m_tiles_per_band(tokens: int, band: int = 1024) -> int:
    """The number of m tiles in a band of :func:`tile_coordinates`: 1024 tokens, because x and weights of 4 bits then
    take about equal room in L2. tokens: of an m tile. band: tokens of a band."""
    return max(1, band // tokens)


class TileCoord(NamedTuple):
    """An output tile."""

    m_tile: Int32
    n_tile: Int32


class StreamShare(NamedTuple):
    """One CTA's share of a stream-k launch: ``whole`` tiles alone, and of the first ``cut`` tiles, taken together, the
    blocks begin .. end along k."""

    whole: Int32
    cut: Int32
    begin: Int32
    end: Int32

    def cut_work_tiles(self, blocks: Int32) -> Int32:
        """The number of cut tiles, of ``blocks`` each, that begin .. end meets; 0 if there are no blocks."""
        return (self.end + blocks - 1) // blocks - self.begin // blocks

    def work_tiles(self, blocks: Int32) -> Int32:
        """The number of work tiles of the CTA."""
        return self.whole + self.cut_work_tiles(blocks)

    def first_sharer(self, tile: Int32, ctas: Int32, blocks: Int32) -> Int32:
        """The number of the first CTA with blocks of a cut tile. This one and those up to the tile's owner, who has the
        last block, store partials of it."""
        return ((tile * blocks + 1) * ctas - 1) // (self.cut * blocks)


class StreamTile(NamedTuple):
    """A work tile under stream-k: the blocks first .. stop along k of an output tile."""

    tile: Int32
    first: Int32
    stop: Int32


@cute.jit
def tile_coordinates(tile: Int32, m_tiles: Int32, n_tiles: Int32, group_m: int, short: bool = True) -> TileCoord:
    """The ``tile``-th output tile: bands of ``group_m`` m tiles, m fastest inside a band.

    CTAs that run side by side share weights (same n tile) and, ``group_m`` tiles on, activations, so that both come
    from L2 all but once. With one m tile there is nothing to divide; the branch saves a division before the first copy,
    which counts if launches are ``short``.
    """
    m_tile, n_tile = Int32(0), tile
    if const_expr(not short) or m_tiles > 1:
        band = tile // (n_tiles * group_m)
        in_band = tile - band * (n_tiles * group_m)
        height = cutlass.min(m_tiles - band * group_m, group_m)
        n_tile = in_band // height
        m_tile = band * group_m + in_band - n_tile * height
    return TileCoord(m_tile, n_tile)


@cute.jit
def stream_share(cta: Int32, ctas: Int32, tiles: Int32, blocks: Int32) -> StreamShare:
    """One CTA's equal share of ``tiles`` tiles of ``blocks`` along k.

    Every CTA takes ``whole`` tiles alone. The first ``cut`` tiles, between one and two per CTA unless there are fewer,
    are divided evenly along k.
    """
    whole = tiles // ctas
    if whole * ctas != tiles and whole > 0:
        whole = whole - 1
    cut = tiles - whole * ctas
    return StreamShare(whole, cut, cta * (cut * blocks) // ctas, (cta + 1) * (cut * blocks) // ctas)


@cute.jit
def stream_tile(index: Int32, cta: Int32, ctas: Int32, blocks: Int32, share: StreamShare) -> StreamTile:
    """The ``index``-th work tile of a CTA. Ranges of cut tiles come first, so that no CTA waits long for one.

    They come last one first. So nearly every CTA begins with the first block of a tile, and all stay in step along k,
    so that what one reads of x and of the weights is still in L2 for the others.
    """
    cut_work_tiles = share.cut_work_tiles(blocks)
    tile = share.begin // blocks + cut_work_tiles - 1 - index
    first = cutlass.max(share.begin - tile * blocks, 0)
    stop = cutlass.min(share.end - tile * blocks, blocks)
    if index >= cut_work_tiles:
        tile = share.cut + (index - cut_work_tiles) * ctas + cta
        first = Int32(0)
        stop = blocks
    return StreamTile(tile, first, stop)
