"""How many tiles the rows of experts make: tokens choose experts at random, about evenly.

A plan is chosen for the average number of rows of an expert. Their numbers spread around it as a Poisson distribution
does, and an expert with a row more than a tile has takes another tile, which decodes all weights once more. On an H200
(2026-11-23) a layer of 128 experts took 91 us at 64 tokens, four rows of an expert in tiles of eight, and 128 us at 128
tokens, eight rows of an expert in the same tiles.
"""

from __future__ import annotations

import functools
import math

from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import gpu

_FEW = 32
"""Rows of an expert up to which decoding bounds a product. From there on choices were measured with even rows alone."""


def m_tiles(problem: GemmProblem, tile_m: int) -> float:
    """Return the m tiles of a problem. With experts, it is their number if all have equally many rows or, for few rows,
    the expected number under random routing, if that is larger. A smaller expected number, because some experts have no
    rows, is not used: how full the last wave of tiles is then depends on the routing."""
    even = gpu.m_tiles(problem, tile_m)
    if not problem.experts or problem.m > _FEW * problem.experts:
        return even
    return max(even, problem.experts * _tiles_of_one(problem.m / problem.experts, tile_m))


@functools.cache
def _tiles_of_one(mean: float, tile_m: int) -> float:
    """Expected number of tiles of an expert that has ``mean`` rows on average."""
    probability, tiles = math.exp(-mean), 0.0
    for rows in range(1, int(mean + 12 * math.sqrt(mean)) + 20):
        probability *= mean / rows
        tiles += probability * -(-rows // tile_m)
    return tiles
