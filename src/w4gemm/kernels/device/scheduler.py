"""Which output tiles a CTA works on, in which order, and on which part of k."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def tile_coordinates(tile: Int32, m_tiles: Int32, n_tiles: Int32, group_m: int, short: bool = True):
    """(m tile, n tile) of the ``tile``-th tile: bands of ``group_m`` token tiles, m fastest inside a band.

    CTAs that run side by side then share weights (same n tile) and, ``group_m`` tiles on, activations, so that both
    come from L2 all but once. With a single token tile there is nothing to divide, which the first copy would wait for:
    worth the branch where launches are ``short``.
    """
    m_tile, n_tile = Int32(0), tile
    if const_expr(not short) or m_tiles > 1:
        band = tile // (n_tiles * group_m)
        rest = tile - band * (n_tiles * group_m)
        height = cutlass.min(m_tiles - band * group_m, group_m)
        n_tile = rest // height
        m_tile = band * group_m + rest - n_tile * height
    return m_tile, n_tile


@cute.jit
def stream_share(cta: Int32, ctas: Int32, tiles: Int32, blocks: Int32):
    """How ``tiles`` of ``blocks`` each, along k, are divided so that all CTAs do the same: (whole, rest, begin, end).

    Every CTA takes ``whole`` tiles alone. The first ``rest`` tiles, between one and two for each CTA unless there are
    fewer, are cut evenly: this CTA's blocks are begin .. end of theirs in a row.
    """
    whole = tiles // ctas
    if whole * ctas != tiles and whole > 0:
        whole = whole - 1
    rest = tiles - whole * ctas
    return whole, rest, cta * (rest * blocks) // ctas, (cta + 1) * (rest * blocks) // ctas


@cute.jit
def stream_segment(index: Int32, cta: Int32, ctas: Int32, blocks: Int32, share: tuple[Int32, Int32, Int32, Int32]):
    """The ``index``-th piece of work of a CTA: (tile, its first block, the block behind its last). First come the
    pieces of cut tiles, so that whoever waits for one does not wait long."""
    _, rest, begin, end = share
    tile = begin // blocks + index
    first = cutlass.max(begin - tile * blocks, 0)
    stop = cutlass.min(end - tile * blocks, blocks)
    cut = stream_pieces(begin, end, blocks)
    if index >= cut:
        tile = rest + (index - cut) * ctas + cta
        first = Int32(0)
        stop = blocks
    return tile, first, stop


def stream_pieces(begin: Int32, end: Int32, blocks: Int32) -> Int32:
    """Pieces of cut tiles among the blocks begin .. end; none if there are no blocks."""
    return (end + blocks - 1) // blocks - begin // blocks
