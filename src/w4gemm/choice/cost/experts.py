"""How many tiles the rows of experts make.

A plan is chosen for the average number of rows of an expert, but tokens choose some experts more often than others: by
chance alone, so that rows spread around the average as a Poisson distribution does, and because some are preferred, up
to a Zipf distribution. An expert with a row more than a tile has takes another tile, which decodes all weights once
more. On an H200 (2026-11-23) a layer of 128 experts took 91 us at 64 tokens, four rows of an expert in tiles of eight,
and 128 us at 128 tokens, eight rows of an expert in the same tiles. For hundreds of rows, tiles of 256 tokens lose more
to uneven rows than tiles of 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from w4gemm.core.config import GemmConfig
from w4gemm.core.format_names import LARGEST_SIZE
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.kernels import gpu
from w4gemm.kernels.expert_layer.spec import ExpertLayer
from w4gemm.packing.block import BLOCK_N
from w4gemm.packing.codecs import INT4_MMA16, MMA16, MXFP4_MMA16, NVFP4_MMA16, codec_for

_MOST_US = 112.0
"""Time of the chosen experts' bytes up to which layers may run in one launch on GPUs other than an H200, where no
longer ones were timed."""
_TIMED_CODECS = (INT4_MMA16, MXFP4_MMA16, NVFP4_MMA16)
"""Codecs that were timed in one launch."""
_MOST_BYTES = 1500e6
"""Bytes of the chosen experts up to which one launch was faster than four: seven layers with 1 to 8 tokens took 0.44 to
0.95 of the time, with the choice by logits 0.50 to 0.98, in NVFP4 five 0.42 to 0.89 (H200,
bench/results/expert_layer.jsonl). DeepSeek-V3 and Kimi-K2 with eight tokens, the largest, took 0.91 and 0.94, with the
choice 0.98 and 0.95."""
_MOST_BYTES_BY_TOKENS = 2000e6
"""Bytes of the chosen experts times tokens up to which one launch whose sums are in order was faster than four: 13 of
16 points of four layers took 0.51 to 0.98 of the time, three with 3000e6 and more 1.03 to 1.11 (H200, 2026-12-01,
bench/results/expert_layer.jsonl)."""
_BYTES_PER_US = 0.9
"""Part of the data sheet's bandwidth that weights are streamed with."""


_TILE_US, _FEWEST_ROWS = 1.1, 24
"""Time that a wave of tiles of experts takes longer in sm90_mixed_gemm, with that many rows of an expert and more. At
11 points of four products, k 512 to 2048, 32 to 150 random and Zipf rows, 286 timings were predicted at 0.88 of their
time (standard deviation 0.10), with this at 1.03 (0.07); the choice took 1.042 of the fastest, at worst 1.116, now
1.017 and 1.051 (H200, 2026-11-29, bench/results/grouped_configs.jsonl). Fewer rows, and fp8 x, were not timed so."""

_THREE_WARPGROUPS, _FEW_COLUMNS = 1.06, 2880
"""Time of tiles of 8 tokens and 192 features over what the rest of the model predicts, for 16-bit x, and the largest k
that it was seen with. With 1, 2 and 4 random rows of each of 128 experts, a layer of 1536 x 2048 and 2048 x 768 whose
gate_up, and with two rows down, had such tiles took 1.03, 1.05 and 1.03 of the time of one with 256 features. It was
predicted at 1.00, 1.00 and 0.98 of it. One of gpt-oss-120b took about 1.04 (H200, 2026-11-30)."""


class Width(NamedTuple):
    """Tiles of one launch, and the experts that it takes."""

    tile_m: int
    least: int = 1
    """Fewest rows of such an expert."""
    most: int = LARGEST_SIZE
    """Most rows of one."""

    @property
    def of_all(self) -> bool:
        """True for the only launch of a product."""
        return (self.least, self.most) == (1, LARGEST_SIZE)

    def m_tiles(self, rows: int) -> int:
        """The number of m tiles of an expert with ``rows`` rows."""
        return -(-rows // self.tile_m) if self.least <= rows <= self.most else 0


Division = Callable[[GemmProblem, Sequence[Width], Callable[..., float]], float]
"""How rows are divided among experts: gives the microseconds of one or two launches, from those by the number of m
tiles of each."""

_MANY = 256
"""Most rows of an expert for which choices go by random rows. At 63 points of 16 to 192 rows (H200, 2026-11-26) the
choice takes 1.02 of the fastest with random rows and 1.14 with even ones; by even rows from 33 on it would take 1.18
and 1.03, and no routing is even."""
_ZIPF = 0.4
"""Weight of Zipf rows; random rows have the rest. By the model, with the rows of 108 points of 1 to 128 an expert
(H200, 2026-11-26; docs/measured.md), weights of 0.2 to 0.5 cost random rows 0 to 4 % and make Zipf ones 2 to 9 %
faster; from 0.4 on no expert's second tile along m makes two waves of one."""
_TWO_BLOCKS = 1.02
"""Time of tiles of 256 features beside those of 192 over what the rest of the model predicts, with many rows of experts
in 4-bit floats and 16-bit x: two warpgroups decode two blocks of rows each, where of 192 three decode one each. On an
H200 (2026-11-24, bench/results/grouped_configs.jsonl) 0.97 to 1.05 with 512 rows of an expert, 1.02 in the mean of 16
points. First choice over fastest there: 1.018 without this factor, 1.006 with it."""
_NEVER_FASTEST = 1.25
"""The same factor for 48, 80 and 96 features, and of 64 where tile_m lies between the powers of two. Times of one
weight say that they would be up to 14 % faster than what is chosen for experts; none was ever the fastest (H200,
2026-11-24)."""


def random_and_zipf_rows(problem: GemmProblem, widths: Sequence[Width], us: Callable[..., float]) -> float:
    """Return the microseconds of the launches of experts. Up to 256 rows of an expert, this is the weighted geometric
    mean of their times with random and with Zipf rows. Beyond, it is the time with even rows.

    Args:
        widths: one of each launch.
        us: the microseconds by the number of m tiles of each launch.
    """
    if problem.m > _MANY * problem.experts:
        return even_rows(problem, widths, us)
    random = us(*(random_m_tiles(problem, width) for width in widths))
    zipf = us(*(_zipf_m_tiles(problem.m, problem.experts, width) for width in widths))
    return float(random ** (1 - _ZIPF) * zipf**_ZIPF)


def even_rows(problem: GemmProblem, widths: Sequence[Width], us: Callable[..., float]) -> float:
    """Return the microseconds of the launches of experts that all have equally many rows, as timings of configs are
    taken. Arguments are those of :func:`random_and_zipf_rows`."""
    experts = min(problem.experts, problem.m)
    return us(*(experts * width.m_tiles(-(-problem.m // experts)) for width in widths))


def random_m_tiles(problem: GemmProblem, width: Width) -> float:
    """Return the expected number of m tiles of a problem of experts under random routing, but, of a launch of all
    experts, at least their number with equally many rows. A smaller number, because some experts have no rows, is not
    used: how full the last wave of tiles is then depends on the routing."""
    tiles = problem.experts * _tiles_of_one(problem.m / problem.experts, width)
    return max(tiles, gpu.m_tiles(problem, width.tile_m)) if width.of_all else tiles


def unevenness(problem: GemmProblem, tile_m: int) -> float:
    """Return the factor of the time of even rows. It is 1, except for many rows of experts in 4-bit floats with 16-bit
    x. There it is half of what uneven rows add, because even and uneven rows count alike.

    An expert's last tile is half full on average if rows are uneven, so an expert has rows / tile_m + 1/2 tiles. On an
    H200 (2026-11-23, bench/results/grouped_fp4.jsonl) launches with 512 rows of an expert took 1.09 times as long with
    Zipf routing in tiles of 128 tokens and 1.18 times in tiles of 256, for 1.11 and 1.22 times as many tiles. This is
    a factor, not a number of tiles, because how full the last wave is depends on the routing.

    With int4, and with fp8 x, tiles of 128 tokens take about 10 % longer, relative to tiles of 256, than predicted
    (runs configs_2 and configs_fp8_8 of bench/results). That is more than this factor would change."""
    if not _many_rows_of_floats(problem):
        return 1.0
    tiles = problem.m / tile_m + problem.experts / 2
    return (1 + max(1.0, tiles / gpu.m_tiles(problem, tile_m))) / 2


def more_of_tile(experts: int, m: int) -> float:
    """Return the microseconds that a wave of tiles takes longer than one of a single weight, with ``m`` rows of all
    experts."""
    return _TILE_US if _FEWEST_ROWS * experts <= m <= _MANY * experts and experts else 0.0


def of_tile(problem: GemmProblem, config: GemmConfig) -> float:
    """Return the factor of a config's time for the sizes of its tile."""
    if _between(config.tile_n) or (config.tile_n == BLOCK_N and _between(config.tile_m)):
        return _NEVER_FASTEST
    if (config.tile_m, config.tile_n) == (8, 192) and problem.dtype.itemsize == 2 and problem.k <= _FEW_COLUMNS:
        return _THREE_WARPGROUPS
    return _TWO_BLOCKS if config.tile_n == 256 and _many_rows_of_floats(problem) else 1.0


def _between(size: int) -> bool:
    """True if a size lies between the powers of two and is no multiple of 64."""
    return size % 64 > 0 and size & (size - 1) > 0


def _many_rows_of_floats(problem: GemmProblem) -> bool:
    many = problem.experts > 0 and problem.m > _MANY * problem.experts
    codec = codec_for(problem.format, MMA16) if many and problem.dtype.itemsize == 2 else None
    return codec is not None and codec.uneven_rows


def one_launch_is_slower(layer: ExpertLayer, tokens: int, device: Device) -> str:
    """Return why a layer of experts is predicted to be faster in four launches; the empty string if it is faster in
    one."""
    if layer.weight.codec not in _TIMED_CODECS:
        return f"{layer.weight.codec} weights were not timed in one launch"
    if not device.bandwidth:
        return f"the bandwidth of {device.name} is not known"
    chosen = layer.experts * (1 - (1 - min(1.0, layer.top_k / layer.experts)) ** tokens)
    size = chosen * layer.expert_bytes
    if size > _MOST_BYTES:
        return f"with {size / 1e6:.0f} MB of weights, more than {_MOST_BYTES / 1e6:.0f}, four launches may be faster"
    if layer.in_order and size * tokens > _MOST_BYTES_BY_TOKENS:
        return f"with {size / 1e6:.0f} MB of weights and {tokens} tokens four batch-invariant launches are faster"
    us = size / (_BYTES_PER_US * device.bandwidth)
    if us > _MOST_US and device.name != H200.name:
        return f"the weights alone take {us:.0f} us, and no layer above {_MOST_US:.0f} was timed in one launch"
    return ""


@functools.cache
def _tiles_of_one(mean: float, width: Width) -> float:
    """Expected number of tiles of an expert that has ``mean`` rows on average."""
    probability, tiles = math.exp(-mean), 0.0
    for rows in range(1, int(mean + 12 * math.sqrt(mean)) + 20):
        probability *= mean / rows
        tiles += probability * width.m_tiles(rows)
    return tiles


@functools.cache
def _zipf_m_tiles(m: int, experts: int, width: Width) -> int:
    """Number of m tiles if the i-th expert has a part of the ``m`` rows proportional to 1 / i."""
    all_parts = sum(1 / i for i in range(1, experts + 1))
    tiles = sum(width.m_tiles(round(m / i / all_parts)) for i in range(1, experts + 1))
    return max(1, tiles) if width.of_all else tiles
