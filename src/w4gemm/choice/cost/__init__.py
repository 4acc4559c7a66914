"""About how long a config takes, without running it: one formula per kernel, with constants as data (constants.py).

The Hopper kernels' is in waves.py. Here are those of kernels of mma.sync and of kernels that call a library:
dequantize_gemm (cuBLAS) and cpu_mixed_gemm (PyTorch). A new kernel needs no formula: it is ranked by twice its roofline
until one is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from w4gemm.choice.cost import waves
from w4gemm.choice.cost.constants import (
    SHARPNESS,
    Timer,
    constants_for,
    mma_us,
    moved_us,
    row_sums_us,
    scale_of,
    unmeasured_us,
)
from w4gemm.choice.cost.experts import Width, random_and_zipf_rows
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import Kernel
from w4gemm.kernels.cpu.matmul import fast_dtype
from w4gemm.kernels.cpu.spec import COMPILED_TOKENS, PAIRS_TOKENS, ROUNDED_TOKENS, TILES_TOKENS
from w4gemm.kernels.dequantize_gemm.spec import dense_bytes
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import scales_on_sums

_Timers = Callable[[GemmConfig], Timer]


# --- mma.sync --------------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """Constants of one schedule, in us."""

    launch: float = 0.0
    k_slice: float = 0.0
    """Time of a k-slice, whatever its size."""
    decode: float = 0.0
    """Time of 8192 codes."""
    operations: float = 0.0
    """Time of 1e6 operations."""
    read: float = 0.0
    """Time of reading 8 KiB of x from shared memory."""
    sums: float = 0.0
    """Time of storing 8192 sums or, with stream-k, handing them over."""


def _mma_sync_timers(kernel: Any, problem: GemmProblem) -> Callable[[GemmConfig], Timer]:
    """Return a function from a config to the :data:`Timer` of a launch of sm80_mixed_gemm or sm89_fp8_gemm: the time of
    the multiprocessor with the most output tiles.

    It takes them one after the other, also if it holds two CTAs. With stream-k all have equal work, and a CTA that has
    only a k-range of a tile hands its sums to another one. A launch takes no less than it takes to begin and to move
    its bytes.
    """
    any_variant, clock, sms = kernel.any_variant(problem), scale_of(problem.device).clock, problem.device.sms

    def timer(config: GemmConfig) -> Timer:
        v = replace(any_variant, config=config)
        us_of = _terms(kernel, v, problem, config)
        tile = config.tile_m * config.tile_n
        codes_us = us_of.decode * config.tile_n * config.tile_k / 8192 * v.m_warps
        x_us = us_of.read * v.x_bytes / 8192 * v.n_warps
        products_us = us_of.operations * 2 * tile * config.tile_k / 1e6
        slice_us = us_of.k_slice + codes_us + (products_us + x_us)
        slice_us = max(slice_us * clock, mma_us(problem, config, wgmma=False))
        moved = moved_us(problem)
        stream, n_tiles, slices = v.stream_k, -(-problem.n // config.tile_n), -(-problem.k // config.tile_k)

        def of_tiles(m: int, m_tiles: float) -> float:
            waves = m_tiles * n_tiles / sms
            waves, stored = (waves, max(1.0, 2 / waves)) if stream else (math.ceil(waves), math.ceil(waves))
            busy = waves * slices * slice_us + us_of.sums * stored * tile / 8192 * clock
            return float(us_of.launch + (busy**SHARPNESS + moved(m) ** SHARPNESS) ** (1 / SHARPNESS))

        if not problem.experts:
            return lambda m: of_tiles(m, -(-m // config.tile_m))
        return lambda m: random_and_zipf_rows(
            replace(problem, m=m), [Width(config.tile_m)], lambda m_tiles: of_tiles(m, m_tiles)
        )

    return timer


def _terms(kernel: Any, v: Any, problem: GemmProblem, config: GemmConfig) -> Terms:
    """Return the constants of a config. e4m3 x has the constants of 16-bit x with twice the operations per us. If e4m3
    are widened, the rate of operations stays and codes take half as many instructions again. Scales on sums take
    operations of their own."""
    constants = constants_for(problem.device)
    models = constants.models
    model = models[f"mma_sync/{config.schedule}"]
    terms = Terms(**{name: us for name, us in model.items() if name in Terms._fields})
    slower = 1 + constants.decode_overhead(kernel.name, v.weight, v.pairs)
    terms = terms._replace(decode=terms.decode * slower)
    if kernel.name != "sm89_fp8_gemm":
        return terms
    fp8 = models["mma_sync_fp8"]
    slower = fp8["stream"] if config.schedule == "stream" else 1.0
    terms = Terms(*(slower * us for us in terms))
    if v.widened:
        terms = terms._replace(decode=terms.decode * fp8["widened_decode"])
    else:
        terms = terms._replace(operations=terms.operations / 2)
    if scales_on_sums(problem.format):
        promotion = fp8["promotion"] / Block.of(problem.format).scale_group
        terms = terms._replace(operations=terms.operations + promotion)
    return terms


# --- cuBLAS ----------------------------------------------------------------------------------------------------------

_TILES = ((128, 256), (256, 128), (128, 128))
"""Tokens and features of the tiles that cuBLAS is taken to choose from."""


def _dequantize_gemm_us(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    """Return the microseconds of all launches: two for each chunk of tile_n features.

    The dense weight is written and read once, and cuBLAS multiplies at its usual rate. In fp8 the rate falls as less of
    a wave is filled; in 16 bits the power limit sets it, whatever the waves. Storing the results takes time of its own,
    which counts if k is small: an SM's tensor cores do nothing while it stores a tile.
    """
    constants, scale, device = constants_for(problem.device), scale_of(problem.device), problem.device
    model = constants.models["cublas"]
    moved = dense_bytes(problem, problem.n) + problem.n * problem.k // 2
    others = constants.models["cublas_rate"]
    rate = constants.models.get(f"cublas_rate/{'.'.join(map(str, device.capability))}", others)
    per_sm, result_us = rate["operations"] / rate["sms"], model["result_us"]
    if problem.dtype.itemsize == 1:
        result_us = model["fp8_result_us"]
        per_sm = model["fp8_operations"] / constants.device.sms
        per_sm *= _filled(problem.m, min(problem.n, config.tile_n), device.sms) ** model["fp8_waves"]
    per_sm /= scale.mma
    chunks = -(-problem.n // config.tile_n)
    results = problem.m * problem.n / device.sms
    product = results * (2 * problem.k / per_sm + result_us * scale.clock)
    return float(chunks * model["launch_us"] + moved / model["bytes_per_us"] * scale.memory + product)


def _filled(m: int, n: int, sms: int) -> float:
    """Part of the tensor cores' time in which waves of cuBLAS's best tiles use them."""
    waves = ((tokens * features * sms, -(-m // tokens) * -(-n // features) / sms) for tokens, features in _TILES)
    return max(m * n / (each * math.ceil(count)) for each, count in waves)


# --- the CPU ---------------------------------------------------------------------------------------------------------

_SUM_TOKENS = 4
"""Largest m that the CPU's "sum" is ranked first for. Time of "sum" / time of "dense", geometric mean over four sizes
of layers, float32 and bfloat16, one and two cores of an EPYC with AVX-512 (2026-11-22): 0.7 at 4 tokens, 1.1 at 6, 1.5
at 8."""
_NATIVE_TOKENS = 96
"""Largest m that "compiled" is ranked first for where PyTorch multiplies bfloat16 faster than float32. Time of
"compiled" / time of "dense", one thread of a Xeon with AMX, 4096 x 4096, 1536 x 576 and 576 x 576: 0.8, 0.8 and
0.6 at 64 tokens, 1.0, 0.9 and 0.8 at 96, 1.0, 1.5 and 1.0 at 128 (2026-11-28)."""
_TILED_FROM = {torch.bfloat16: 6, torch.float16: 9}
"""Least m that "tiles" is ranked first for, by dtype; 13 for others, of which AMX multiplies three parts.

Time of "tiles" / time of "compiled", median of eleven layers, one thread of a busy Xeon (2026-11-29): bfloat16 1.2 at 4
tokens, 1.0 at 5, 0.9 at 6, 0.8 at 8; float32 1.3 at 8, 1.2 at 10, 1.05 at 12, 0.8 at 16. float16, of two parts, was not
measured."""
_EXACT_TOKENS = 32
"""Largest m that codes are multiplied for, but those of shorter groups only up to a quarter of a group's columns. Time
of "rounded" / time of "tiles", a thread of a Xeon, bfloat16, 4096 x 4096 in groups of 128, 11008 x 2048 and 1536 x 576
in groups of 32: 0.8, 1.0 and 1.2 at 8 tokens, 1.0, 0.8 and 0.8 at 16, 1.1, 0.8 and 0.8 at 32, 1.0, 0.8 and 0.7 at 64,
0.9, 0.6 and 0.6 at 256. With AVX-512 on an EPYC 1.1, 0.9 and 1.0 at 16, 1.0, 0.9 and 0.95 at 32 (2026-11-29)."""


class CpuRank:
    """Places of the CPU kernel's methods, which stand for their microseconds. Only their order holds on every CPU."""

    ROUNDED = 0.1
    TILES = 0.2
    PAIRS = 0.4
    NATIVE = 0.7
    """PyTorch's bfloat16 matmul, where it is faster than compiled vectors."""
    COMPILED = 1.0
    PAIRS_OF_FEW = 1.4
    """The method "pairs" with one or two tokens. Time of "compiled" / time of "pairs", EPYC, five layers: 0.86 to 0.9
    at 2 tokens, 0.91 to 0.99 at 3, 0.94 to 1.18 at 4 (2026-11-29)."""
    TILES_OF_FEW = 1.5
    """The method "tiles" with fewer tokens than it is worth."""
    ROUNDED_OF_FEW = 1.6
    """The method "rounded" with fewer tokens than it is worth."""
    FASTER = 2.0
    """The one of "sum" and "dense" that is the faster with so many tokens."""
    SLOWER = 3.0


def _cpu_rank(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    """Return the place of a method of the CPU kernel, see :class:`CpuRank`."""
    m, method = problem.m, config.tile_m
    if method == ROUNDED_TOKENS:
        exact = min(problem.format.group_length(problem.k) // 4, _EXACT_TOKENS)
        return CpuRank.ROUNDED if m > exact else CpuRank.ROUNDED_OF_FEW
    if method == TILES_TOKENS:
        return CpuRank.TILES if m >= _TILED_FROM.get(problem.dtype, 13) else CpuRank.TILES_OF_FEW
    if method == PAIRS_TOKENS:
        return CpuRank.PAIRS if m > 2 else CpuRank.PAIRS_OF_FEW
    is_native = problem.dtype == fast_dtype(problem.dtype) == torch.bfloat16 and problem.epilogue == PLAIN
    if is_native and m > _NATIVE_TOKENS and method > ROUNDED_TOKENS:
        return CpuRank.NATIVE
    if method == COMPILED_TOKENS:
        return CpuRank.COMPILED
    return CpuRank.FASTER if (method == 1) == (m <= _SUM_TOKENS) else CpuRank.SLOWER


# --- by kernel -------------------------------------------------------------------------------------------------------


def _each(model: Callable[[Any, GemmProblem, GemmConfig], float]) -> Callable[[Any, GemmProblem], _Timers]:
    """A model of one problem and config as the timers of all configs."""
    return lambda kernel, problem: lambda config: lambda m: model(kernel, replace(problem, m=m), config)


_TIMERS: dict[str, Callable[[Any, GemmProblem], _Timers]] = {
    "sm90_decode": waves.timers,
    "sm90_mixed_gemm": waves.timers,
    "sm90_fp8_gemm": waves.timers,
    "sm90_fp8_block_gemm": waves.timers,
    "sm89_fp8_gemm": _mma_sync_timers,
    "sm80_mixed_gemm": _mma_sync_timers,
    "dequantize_gemm": _each(_dequantize_gemm_us),
    "cpu_mixed_gemm": _each(_cpu_rank),
}
"""By the kernel's name."""
_UNMEASURED = _each(lambda kernel, problem, config: unmeasured_us(problem))


def timers(kernel: Kernel, problem: GemmProblem) -> _Timers:
    """Return a function from a config to its :data:`Timer`. Times are above 0. They order configs and kernels on one
    device, no more."""
    of_config = _TIMERS.get(kernel.name, _UNMEASURED)(kernel, problem)
    if kernel.name != "sm90_fp8_gemm" or problem.format.zero != "float":
        return of_config
    sums = row_sums_us(problem)

    def with_sums(config: GemmConfig) -> Timer:
        alone = of_config(config)
        return lambda m: alone(m) + sums(m)

    return with_sums


def predicted_us(kernel: Kernel, problem: GemmProblem, config: GemmConfig) -> float:
    """Return the microseconds of a launch of one config at the problem's m."""
    return timers(kernel, problem)(config)(problem.m)
