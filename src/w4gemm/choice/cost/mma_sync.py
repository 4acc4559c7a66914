"""Model of sm80_mixed_gemm and sm89_fp8_gemm: the multiprocessor with the most output tiles.

It takes them one after the other, also if it holds two CTAs. With stream-k all have as much, and each part of a tile is
passed on by one CTA to the next. No launch takes less than the bytes that it moves. Constants, in us: ``launch``;
``slot``, a k-slice; ``decode``, 8192 codes; ``operations``, 1e6 of them; ``read``, 8 KiB of x from shared memory;
``sums``, 8192 that are stored, or, with stream-k, passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from w4gemm.choice.cost.constants import constants_for, scale_of
from w4gemm.choice.cost.experts import m_tiles
from w4gemm.choice.cost.traffic import SHARPNESS, Timer, mma_us, moved_us
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import scales_on_sums

_TERMS = ("launch", "slot", "decode", "operations", "read", "sums")


def timers(kernel: Any, problem: GemmProblem) -> Callable[[GemmConfig], Timer]:
    """Return what gives the microseconds of a launch by m of each config."""
    like, clock, sms = kernel.like(problem), scale_of(problem.device).clock, problem.device.sms

    def timer(config: GemmConfig) -> Timer:
        v = replace(like, config=config)
        launch, slot, decode, operations, read, sums = _terms(kernel, v, problem, config)
        tile = config.tile_m * config.tile_n
        slot += decode * config.tile_n * config.tile_k / 8192 * v.m_warps
        slot += operations * 2 * tile * config.tile_k / 1e6 + read * v.x_bytes / 8192 * v.n_warps
        slice_us = max(slot * clock, mma_us(problem, config, wgmma=False))
        moved = moved_us(problem)
        stream, n_tiles, slices = v.stream, -(-problem.n // config.tile_n), -(-problem.k // config.tile_k)

        def us(m: int) -> float:
            along_m = m_tiles(replace(problem, m=m), config.tile_m) if problem.experts else -(-m // config.tile_m)
            waves = along_m * n_tiles / sms
            waves, stored = (waves, max(1.0, 2 / waves)) if stream else (math.ceil(waves), math.ceil(waves))
            busy = launch + waves * slices * slice_us + sums * stored * tile / 8192 * clock
            return float((busy**SHARPNESS + moved(m) ** SHARPNESS) ** (1 / SHARPNESS))

        return us

    return timer


def _terms(kernel: Any, v: Any, problem: GemmProblem, config: GemmConfig) -> tuple[float, ...]:
    """Constants in the order of ``_TERMS``. With e4m3 x, those of 16-bit x with twice the operations per us, or, if
    e4m3 are widened, half as many instructions again for a code; and with what the scales of sums take."""
    models = constants_for(problem.device).models
    launch, slot, decode, operations, read, sums = (
        models[f"mma_sync/{config.schedule}"].get(term, 0.0) for term in _TERMS
    )
    if kernel.name != "sm89_fp8_gemm":
        return launch, slot, decode, operations, read, sums
    fp8 = models["mma_sync_fp8"]
    slower = fp8["stream"] if config.schedule == "stream" else 1.0
    launch, slot, decode, operations, read, sums = (
        slower * us for us in (launch, slot, decode, operations, read, sums)
    )
    if v.widened:
        decode *= fp8["widened_decode"]
    else:
        operations /= 2
    if scales_on_sums(problem.format):
        operations += fp8["promotion"] / Block.of(problem.format).scale_group
    return launch, slot, decode, operations, read, sums
