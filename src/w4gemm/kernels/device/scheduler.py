"""Which output tile a CTA works on, and in which order."""

from __future__ import annotations

import cutlass
from cutlass import Int32


def tile_coordinates(tile: Int32, m_tiles: Int32, n_tiles: Int32, group_m: int) -> tuple[Int32, Int32]:
    """(m tile, n tile) of the ``tile``-th tile: bands of ``group_m`` token tiles, m fastest inside a band.

    CTAs that run side by side then share weights (same n tile) and, ``group_m`` tiles on, activations, so that both
    come from L2 all but once.
    """
    band = tile // (n_tiles * group_m)
    rest = tile - band * (n_tiles * group_m)
    height = cutlass.min(m_tiles - band * group_m, group_m)
    n_tile = rest // height
    return band * group_m + rest - n_tile * height, n_tile
