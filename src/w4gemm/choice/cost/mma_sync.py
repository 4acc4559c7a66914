"""Model of sm80_mixed_gemm and sm89_fp8_gemm: the multiprocessor with the most output tiles.

It takes them one after the other, also if it holds two CTAs. With stream-k all have equal work, and a CTA that has only
a k-range of a tile hands its sums to another one. A launch takes no less than it takes to begin and to move its
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from w4gemm.choice.cost.constants import constants_for, scale_of
from w4gemm.choice.cost.experts import Width, random_and_zipf_rows
from w4gemm.choice.cost.traffic import SHARPNESS, Timer, mma_us, moved_us
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import scales_on_sums


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


def timers(kernel: Any, problem: GemmProblem) -> Callable[[GemmConfig], Timer]:
    """Return a function from a config to the :data:`Timer` of a launch."""
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
        stream, n_tiles, slices = v.stream, -(-problem.n // config.tile_n), -(-problem.k // config.tile_k)

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
