"""Host side of the kernels for GPUs without Hopper's units, with 16-bit and with e4m3 x: where they run, their configs,
and the order in which each adds products."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit.unit import Unit
from w4gemm.kernels.gpu import MOST_GROUP_WORDS, GpuKernel
from w4gemm.kernels.requirements import TARGETS, refusal
from w4gemm.kernels.sm80_mixed_gemm.variant import Sm80MixedVariant
from w4gemm.kernels.space import Rule, Space

_log = logging.getLogger("w4gemm")

_TILES = {
    "64x256_1x1x1_coop": "8 16 32 64",
    "128x128_1x1x1_coop": "64 128",
    "256x64_1x1x1_coop": "64 128",
    "256x128_1x1x1_coop": "64",
    "128x64_1x1x1_coop": "128",
    "64x128_1x1x1_pingpong": "8 16 32 64",
    "64x256_1x1x1_pingpong": "8 16",
    "128x128_1x1x1_pingpong": "8 16 32 64",
    "128x64_1x1x1_pingpong": "64 128",
    "64x256_1x1x1_stream": "8 16",
    "64x128_1x1x1_stream": "16 64",
    "128x128_1x1x1_stream": "16 32 64",
    "128x64_1x1x1_stream": "64",
    "128x256_1x1x1_stream": "64",
}
"""By a config's string without tile_m, each tile_m: tiles that were the fastest somewhere on an H200 (2026-11-21),
smaller ones for the shared memory of other GPUs, and those between. Others compile too, if a warp has 16, 32 or 64
features and at most 128 accumulators; with stream-k, 128 spill."""
_FP8_TILES = {
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

_IMPOSSIBLE = (
    Rule(
        "experts and stream-k",
        "stream-k wants to know the number of tiles beforehand",
        lambda v: v.grouped and v.stream_k,
    ),
    Rule(
        "shared memory",
        "there is no room for two stages, or for the sums of all sets of warps in the drained ones",
        lambda v: v.num_stages < 2 or v.sums_bytes > v.num_stages * v.stage_bytes,
    ),
)
_FLOAT_ZEROS = {
    *(f"{tile_m}x64x{tiles}" for tile_m in (8, 16) for tiles in ("512_1x1x1_coop", "256_1x1x1_pingpong")),
    "64x128x128_1x1x1_coop",
}
_BESIDE_FLOATS = Rule(
    "float zero points",
    "was not compiled with e4m3 x beside float zero points, where the sums of x take registers",
    lambda v: v.adds_zeros and str(v.config) not in _FLOAT_ZEROS,
)
_HELD_BACK = (
    Rule(
        "gathered rows and several groups",
        "128 x 128 was not timed, and is not predicted to be faster",
        lambda v: v.gathered and v.block.scale_group < 128 and v.config.tile_m == 128 == v.config.tile_n,
    ),
)


class Sm80MixedGemm(GpuKernel):
    """W4A16 with cp.async and mma.sync, on any GPU from SM80 on: any m, n, k, every format, fp16 and bf16."""

    name = "sm80_mixed_gemm"
    revision = 2
    group_words = MOST_GROUP_WORDS
    variant = Sm80MixedVariant
    space = Space(_TILES, Path(__file__).with_name("legality.jsonl"), _IMPOSSIBLE, _HELD_BACK)
    least = (8, 0)
    """The compute capability from which on there is all that it takes."""
    since = "A100, RTX 30 and later"
    otherwise = "w.to('cpu') runs on the CPU"

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm80_mixed_gemm.kernel import Sm80MixedGemmKernel

        return Sm80MixedGemmKernel

    def refusal(self, device: Device) -> str:
        return refusal(device, self.least, self.since, self.otherwise)

    def arch(self, device: Device) -> str:
        return TARGETS[device.capability]

    def unit(self, problem: GemmProblem, config: GemmConfig) -> Unit:
        if problem.device.capability[0] == 10:
            _say_what_is_missing(self.name, problem.device.name)
        return super().unit(problem, config)

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """One set of warps on all of k adds up steps of 16 in order: nothing else matters. Several sets take runs of
        columns of each stage; a stream cuts k where the number of tiles says."""
        if config.schedule == "stream":
            return None
        sets = Sm80MixedVariant.of(problem, config).k_sets
        return self.name, sets, 0 if sets == 1 else config.tile_k


class Sm89Fp8Gemm(Sm80MixedGemm):
    """W4A8 with cp.async and mma.sync, e4m3 activations, on any GPU from SM89 on: any m, n, k, every format.
    Scales are applied to the float32 sums of a group; e4m3 ones to the weights, which are then rounded to e4m3."""

    name = "sm89_fp8_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    revision = 1
    space = Space(
        _FP8_TILES, Path(__file__).with_name("legality_fp8.jsonl"), (*_IMPOSSIBLE, _BESIDE_FLOATS), _HELD_BACK
    )
    least = (8, 9)
    since = "RTX 40, L4, L40S and later, whose tensor cores take e4m3"
    otherwise = "w.repack('mma16') takes 16-bit activations from 8.0 on, w.to('cpu') runs on the CPU"


@functools.cache
def _say_what_is_missing(kernel: str, device: str) -> None:
    _log.warning(
        "%s runs %s, slower than it could be: a kernel for its tensor cores (tcgen05) does not exist yet",
        device or "this GPU",
        kernel,
    )
