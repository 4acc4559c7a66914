"""Lower bounds of times, by data sheets: of moving a problem's bytes, of copying rows of x, of matrix instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from w4gemm.choice.cost.constants import constants_for, scale_of
from w4gemm.core.config import GemmConfig
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.block import BLOCK_K, BLOCK_N, Block
from w4gemm.packing.codecs import MMA8, MMA16, codec_for

Timer = Callable[[int], float]
"""Microseconds by m, of a problem that is fixed but for its m. inf if the config is needless there: it has two
launches, and the first does everything."""

_MMA_SYNC = 0.625
"""Rate of mma.sync over that of WGMMA, on a Hopper GPU at best."""
SHARPNESS = 8
"""Power of the smooth maximum of the time of moving bytes and another time."""


@functools.cache
def _block_bytes(format: WeightFormat, fp8: bool) -> int:
    codec = codec_for(format, MMA8 if fp8 else MMA16)
    return (Block.of(format) if codec is None else codec.block(format)).stride


def moved_us(problem: GemmProblem) -> Timer:
    """Return the microseconds, by m, to move every byte once: packed blocks, x and d, the latter two as if in 16
    bits."""
    blocks = -(-problem.n // BLOCK_N) * -(-problem.k // BLOCK_K)
    block_bytes = _block_bytes(problem.format, problem.dtype == torch.float8_e4m3fn)
    rate = constants_for(problem.device).models["waves"]["bytes_per_us"] / scale_of(problem.device).memory
    weight_us, row_us = block_bytes * blocks / rate, 2 * (problem.n + problem.k) / rate
    weights = max(1, problem.experts)
    return lambda m: weight_us * min(weights, m) + row_us * m


def copy_us(problem: GemmProblem) -> float:
    """Return the microseconds of a copy of x's rows, and of their scales if they have any, before a launch."""
    copy = constants_for(problem.device).models["copy"]
    moved = problem.m * problem.k * problem.dtype.itemsize
    return (1 + problem.epilogue.token_scale) * copy["launch_us"] + moved / copy["bytes_per_us"] * scale_of(
        problem.device
    ).memory


def unmeasured_us(problem: GemmProblem) -> float:
    """Return the time that a kernel or config without measurements is ranked by: twice the larger of the times of all
    bytes and of all operations, by the device's data sheet as far as it is known."""
    ours = constants_for(problem.device).device
    operations = 2 * problem.m * problem.n * problem.k
    return 2 * max(moved_us(problem)(problem.m), operations / (problem.device.operations or ours.operations))


def mma_us(problem: GemmProblem, config: GemmConfig, wgmma: bool) -> float:
    """Least time of the matrix instructions of a k-slice, WGMMA or mma.sync; 0 if tensor cores are no slower than the
    clock says, because measured times, scaled by the clock, then include them."""
    ours, scale = constants_for(problem.device).device, scale_of(problem.device)
    if scale.mma <= 1.01 * scale.clock:
        return 0.0
    rate = ours.operations / ours.sms / scale.mma * (2 if problem.dtype.itemsize == 1 else 1)
    return 2 * config.tile_m * config.tile_n * config.tile_k / (rate if wgmma else _MMA_SYNC * rate)
