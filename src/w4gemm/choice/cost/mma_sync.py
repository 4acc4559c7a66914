"""Model of sm80_mixed_gemm and sm89_fp8_gemm: the multiprocessor with the most output tiles.

It takes them one after the other, also if it holds two CTAs. With stream-k all have as much, and each part of a tile is
passed on by one CTA to the next. Constants, in us: ``launch``; ``slot``, a k-slice; ``decode``, 8192 codes;
``operations``, 1e6 of them; ``read``, 8 KiB of x from shared memory; ``sums``, 8192 that are stored, or, with stream-k,
passed on.
"""

from __future__ import annotations

import math
from typing import Any

from w4gemm.choice.cost.constants import reference, scale_of
from w4gemm.choice.cost.experts import m_tiles
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import scales_on_sums

_TERMS = ("launch", "slot", "decode", "operations", "read", "sums")


def predicted_us(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    """Microseconds of a launch."""
    v = kernel.variant.of(problem, config)
    launch, slot, decode, operations, read, sums = _terms(kernel, v, problem, config)
    tile = config.tile_m * config.tile_n
    tiles = m_tiles(problem, config.tile_m) * -(-problem.n // config.tile_n)
    waves = tiles / problem.device.sms
    waves, stored = (waves, max(1.0, 2 / waves)) if v.stream else (math.ceil(waves), math.ceil(waves))
    slot += decode * config.tile_n * config.tile_k / 8192 * v.m_warps
    slot += operations * 2 * tile * config.tile_k / 1e6 + read * v.x_bytes / 8192 * v.n_warps
    clock = scale_of(problem.device).clock
    return float(launch + waves * -(-problem.k // config.tile_k) * slot * clock + sums * stored * tile / 8192 * clock)


def _terms(kernel: Any, v: Any, problem: GemmProblem, config: GemmConfig) -> tuple[float, ...]:
    """Constants in the order of ``_TERMS``. With e4m3 x, those of 16-bit x with twice the operations per us, or, if
    e4m3 are widened, half as many instructions again for a code; and with what the scales of sums take."""
    models = reference().models
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
