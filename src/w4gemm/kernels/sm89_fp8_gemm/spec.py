"""Host side of the W4A8 kernel for GPUs from SM89 on: its configs. All else is sm80_mixed_gemm's."""

from __future__ import annotations

import torch

from w4gemm.config import GemmConfig
from w4gemm.kernels.sm80_mixed_gemm.spec import TIMES, Sm80MixedGemm, Tiles
from w4gemm.kernels.sm80_mixed_gemm.variant import Variant
from w4gemm.packing.block import Block
from w4gemm.problem import GemmProblem

_TILES: Tiles = {
    "coop": (
        *((8, 64, 512), (16, 64, 512), (32, 64, 512), (64, 64, 256), (64, 128, 128), (64, 128, 256), (64, 256, 128)),
        *((128, 64, 128), (128, 128, 128)),
    ),
    "pingpong": (
        *((8, 64, 256), (8, 128, 256), (16, 64, 256), (16, 128, 256), (32, 64, 256), (64, 64, 128), (64, 128, 128)),
    ),
    "stream": ((8, 64, 256), (16, 128, 256), (32, 128, 256), (64, 64, 128), (64, 128, 128)),
}
"""(tile_m, tile_n, tile_k) by schedule: as those of sm80_mixed_gemm, with as many bytes of x in a slot. At most 64
accumulators, since those of 128 spill where e4m3 are multiplied as fp16."""

_STREAM = 1.15
"""How much longer streams take beside the others than those of sm80_mixed_gemm (widened, n and k 8192, m 1 to 1024;
H200, 2026-11-21)."""
_PROMOTION = 2.3
"""Microseconds of 1e6 operations in groups of one: an fma for each, of which a multiprocessor does 128 a cycle."""


class Sm89Fp8Gemm(Sm80MixedGemm):
    """W4A8 with cp.async and mma.sync, e4m3 activations, on any GPU from SM89 on: any m, n, k, every format without
    float zero points. Scales are applied to the float32 sums of a group; e4m3 ones to the weights, which are then
    rounded to e4m3."""

    name = "sm89_fp8_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    revision = 1
    tiles = _TILES
    least = (8, 9)
    since = "RTX 40, L4, L40S and later, whose tensor cores take e4m3"
    otherwise = "w.repack('mma16') takes 16-bit activations from 8.0 on, w.to('cpu') runs on the CPU"

    def times(self, problem: GemmProblem, config: GemmConfig) -> tuple[float, ...]:
        """Those of sm80_mixed_gemm, with twice the operations, or, where e4m3 are widened, half as many instructions
        again for a code; and with what the scales of sums take. Not fitted: nothing has been measured on a GPU that has
        an instruction for e4m3."""
        slower = _STREAM if config.schedule == "stream" else 1.0
        launch, slot, decode, operations, read, sums = (slower * us for us in TIMES[config.schedule])
        if Variant.of(problem, config).widened:
            decode *= 1.5
        else:
            operations /= 2
        if not problem.format.has_channels:
            operations += _PROMOTION / Block.of(problem.format).scale_group
        return launch, slot, decode, operations, read, sums
