"""Host side of the W4A8 kernel for GPUs from SM89 on: its configs. All else is sm80_mixed_gemm's."""

from __future__ import annotations

from pathlib import Path

import torch

from w4gemm.kernels.sm80_mixed_gemm.spec import HELD_BACK, IMPOSSIBLE, Sm80MixedGemm
from w4gemm.kernels.space import Space

_TILES = {
    "64x512_1x1x1_coop": "8 16 32",
    "64x256_1x1x1_coop": "64",
    "128x128_1x1x1_coop": "64 128",
    "128x256_1x1x1_coop": "64",
    "256x128_1x1x1_coop": "64",
    "64x128_1x1x1_coop": "128",
    "64x256_1x1x1_pingpong": "8 16 32",
    "128x256_1x1x1_pingpong": "8 16",
    "64x128_1x1x1_pingpong": "64",
    "128x128_1x1x1_pingpong": "64",
    "64x256_1x1x1_stream": "8",
    "128x256_1x1x1_stream": "16 32",
    "64x128_1x1x1_stream": "64",
    "128x128_1x1x1_stream": "64",
}
"""Tiles like those of sm80_mixed_gemm, with as many bytes of x in a stage. A thread has at most 64 accumulators,
because 128 spill on GPUs that multiply e4m3 as fp16."""


class Sm89Fp8Gemm(Sm80MixedGemm):
    """W4A8 with cp.async and mma.sync, e4m3 activations, on any GPU from SM89 on: any m, n, k, every format without
    float zero points. Scales are applied to the float32 sums of a group; e4m3 ones to the weights, which are then
    rounded to e4m3."""

    name = "sm89_fp8_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    revision = 1
    space = Space(_TILES, Path(__file__).with_name("legality.jsonl"), IMPOSSIBLE, HELD_BACK)
    least = (8, 9)
    since = "RTX 40, L4, L40S and later, whose tensor cores take e4m3"
    otherwise = "w.repack('mma16') takes 16-bit activations from 8.0 on, w.to('cpu') runs on the CPU"
