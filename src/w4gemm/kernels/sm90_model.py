"""How long a launch takes on Hopper, predicted without one; dispatch ranks configs by it.

A launch is waves of clusters that fill the GPU, the last one perhaps partly. In a wave every CTA goes through its slots
of k and then stores its tile:

    time = fixed + bound(heat * sum over waves (slots * slot_us + tile_us), bytes / bandwidth)

slot_us grows from a config's time with the GPU to itself to its time with the GPU full, as CTAs share L2, memory and
power: alone + shared * contention. Of a stream (stream-k) all CTAs have equal work; they park and add up parts of tiles
besides, the more the smaller a CTA's part of a tile is. These three numbers of each config (alone, shared, tile_us) are
measured: ``sm90_times.py`` and ``sm90_fp8_times.py``, made by ``bench/fit.py`` from timings of all configs on several
layers; a format that takes more to decode has longer slots (``HopperKernel.decode_overhead``). heat: large products
bring the GPU to its power limit, which lowers the clock. bound is a smooth maximum.

Where rows are gathered on load, a slot takes longer by what its part of x has in bytes: cp.async brings them, and takes
instructions. ``copy_us`` is what it takes to gather them before.
"""

from __future__ import annotations

from w4gemm.config import GemmConfig
from w4gemm.kernels import sm90_fp8_times, sm90_times
from w4gemm.kernels.gpu import m_tiles
from w4gemm.packing.block import BLOCK_K, BLOCK_N, Block
from w4gemm.problem import GemmProblem

# H200, 2026-11-21
FIXED_US = 1.8
BYTES_PER_US = 4.4e6
_SHARPNESS = 8
_HEAT, _HOT_OPERATIONS = 0.15, 1.4e11
# all 20 points in bench/results/grouped.jsonl are decided by these as measured there
_GATHERED_US = 8e-6
"""Of a byte of x in a slot, on a multiprocessor."""
_COPY_US, _COPIED_PER_US = 4.0, 2.9e6
"""Of PyTorch's ``index_select``, or of two where x has scales, and of the bytes that it writes."""
_DECODE_BOUND_TOKENS = 60
"""Up to so many the time to decode a slot shows in full; of more tokens the tensor cores hide it."""
_UNKNOWN = (1e3, 0.0, 0.0)
_TIMES = sm90_times.TIMES | sm90_fp8_times.TIMES


def predicted_us(
    problem: GemmProblem,
    kernel: str,
    config: GemmConfig,
    ctas_per_sm: int,
    decode_overhead: float = 0.0,
    operations: int = 0,
) -> float:
    """Microseconds; a config that was never measured is put last. decode_overhead: see HopperKernel. operations: of all
    that is multiplied, if the problem is a part of it."""
    alone, shared, tile_us = _TIMES.get(f"{kernel}/{config}", _UNKNOWN)
    slower = 1 + decode_overhead * min(1, _DECODE_BOUND_TOKENS / config.tile_m)
    return launch_us(problem, config, ctas_per_sm, (alone * slower, shared * slower, tile_us), operations)


def launch_us(
    problem: GemmProblem,
    config: GemmConfig,
    ctas_per_sm: int,
    times: tuple[float, float, float],
    operations: int = 0,
) -> float:
    alone, shared, tile_us = times
    if problem.gathered:
        alone += _GATHERED_US * config.tile_m * config.tile_k * problem.dtype.itemsize * ctas_per_sm
    cluster = config.cluster_m * config.cluster_n * config.split_k
    along_m = m_tiles(problem, config.tile_m * config.cluster_m)
    n_tiles = -(-problem.n // (config.tile_n * config.cluster_n))
    fill = along_m * n_tiles / (problem.device.sms // cluster * ctas_per_sm)
    slots = -(-problem.k // (config.tile_k * config.split_k))
    full, part = int(fill), fill - int(fill)
    if config.schedule == "stream":
        busy = fill * slots * (alone + shared) + (fill + max(1, 1 / fill)) * tile_us
    else:
        busy = full * (slots * (alone + shared) + tile_us)
        if part > 1e-9:
            busy += slots * (alone + shared * _contention(part, ctas_per_sm)) + tile_us
    busy *= 1 + _HEAT * min(1, (operations or 2 * problem.m * problem.n * problem.k) / _HOT_OPERATIONS)
    return FIXED_US + (busy**_SHARPNESS + _bytes_us(problem) ** _SHARPNESS) ** (1 / _SHARPNESS)


def copy_us(problem: GemmProblem) -> float:
    """To gather x's rows, and the scales that they have, before a launch."""
    launches = 1 + problem.epilogue.token_scale
    return launches * _COPY_US + problem.m * problem.k * problem.dtype.itemsize / _COPIED_PER_US


def _contention(part: float, ctas_per_sm: int) -> float:
    """From 0 to 1, where ``part`` of the CTAs that the GPU holds run. Beyond half, some multiprocessors hold two."""
    if ctas_per_sm > 1 and part > 0.5:
        part = 0.5 + part / 2
    return part**1.5


def _bytes_us(problem: GemmProblem) -> float:
    """Every byte once: packed blocks, x and d, these as if in 16 bits."""
    blocks = -(-problem.n // BLOCK_N) * -(-problem.k // BLOCK_K)
    weight = Block.of(problem.format).bytes * blocks * min(max(1, problem.experts), problem.m)
    return (weight + 2 * problem.m * (problem.n + problem.k)) / BYTES_PER_US
