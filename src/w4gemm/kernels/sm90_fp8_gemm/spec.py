"""Host side of the W4A8 kernel: its configs. All else is sm90_mixed_gemm's."""

from __future__ import annotations

import functools
import itertools

import torch

from w4gemm.config import GemmConfig
from w4gemm.epilogue import PLAIN
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm
from w4gemm.kernels.sm90_mixed_gemm.variant import ONE_GROUP, Variant
from w4gemm.packing.codecs import WeightOperand
from w4gemm.problem import GemmProblem

_TILE_M = (8, 16, 32, 64, 128, 192, 256)
_BETWEEN = (96, 112)
"""Tiles for about as many tokens as they hold, of 256 features."""
_TILE_N = (64, 128, 192, 256)
_TILE_K = (128, 256, 512)
_CLUSTER_SPLIT_K = ((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1))
"""(cluster_m, cluster_n, split_k)."""
_MAX_TILE_M = {
    True: {"coop": {64: 128, 128: 128, 192: 64, 256: 32}, "pingpong": {64: 32, 128: 16}},
    False: {"coop": {64: 256, 128: 256, 192: 128, 256: 128}, "pingpong": {64: 256, 128: 32}},
}
"""By whether scales are applied to sums (which takes two sets of accumulators besides), schedule and tile_n, which fix
the number of threads: what the registers leave room for."""


class Sm90Fp8Gemm(Sm90MixedGemm):
    """W4A8 on SM90, e4m3 activations: any m, n, k, every format without float zero points. Scales are applied to the
    float32 sums of a group; e4m3 ones to the weights, which are then rounded to e4m3."""

    name = "sm90_fp8_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    revision = 2
    parts = (
        "256x128x128_1x1x1_coop+128x64x256_1x1x1_coop",
        "256x128x128_1x1x1_coop+256x64x128_1x1x1_coop",
        "256x128x128_1x1x1_coop+192x64x128_1x1x1_coop",
        "256x128x128_1x1x1_coop+128x192x256_1x1x1_coop",
        "256x128x128_1x1x1_coop+64x64x512_1x1x1_coop",
        "192x128x128_1x1x1_coop+192x64x128_1x1x1_coop",
        "128x192x256_1x1x1_coop+128x128x256_1x1x1_coop",
        "128x192x256_1x1x1_coop+128x64x256_1x1x1_coop",
        "96x256x128_1x1x1_coop+128x192x256_1x1x1_coop",
        "96x256x128_1x1x1_coop+64x64x256_1x1x1_coop",
        "128x128x256_1x1x1_coop+128x64x256_1x1x1_coop",
        "128x128x256_1x1x1_coop+64x64x512_1x1x1_coop",
        # cut along k, where few features are left and k is large
        "256x128x128_1x1x1_coop+256x64x128_1x1x1_coop_k2",
        "256x64x128_1x1x1_coop+128x64x256_1x1x1_coop_k2",
        "192x128x128_1x1x1_coop+192x64x128_1x1x1_coop_k2",
    )

    def fitting(self, problem: GemmProblem) -> tuple[GemmConfig, ...]:
        v = Variant.of(problem, GemmConfig(8, 64, 256))
        return _fitting(v.weight, v.grouped)


def _spills_with_groups(v: Variant) -> bool:
    """Whether there is no room for the scales and zero points of many groups beside two sets of accumulators."""
    c = v.config
    shared = v.warpgroups == 4 or v.occupancy == 2
    return (shared and c.tile_m > 16) or c.cluster_m > 1


@functools.cache
def _fitting(weight: WeightOperand, grouped: bool) -> tuple[GemmConfig, ...]:
    """Every config whose accumulators fit the registers and whose pipeline fits shared memory, at least two deep."""
    tile_m_sizes = _TILE_M if grouped else (*_TILE_M, *_BETWEEN)
    sizes = itertools.product(("coop", "pingpong"), _TILE_N, tile_m_sizes, _TILE_K, _CLUSTER_SPLIT_K)
    found = []
    for schedule, tile_n, tile_m, tile_k, (cluster_m, cluster_n, split_k) in sizes:
        config = GemmConfig(tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, split_k)
        v = Variant(config, weight, PLAIN, True, grouped)
        if tile_m > _MAX_TILE_M[v.scales_on_sums][schedule].get(tile_n, 0):
            continue
        if schedule == "pingpong" and tile_m <= 128 and cluster_n > 1:
            continue
        if grouped and (split_k > 1 or cluster_m > 1):
            continue
        # weights are worth sharing where many tokens meet them; each of two CTAs fetches one of two row blocks
        if cluster_m > 1 and (tile_n != 128 or tile_m < 128 or schedule != "coop" or tile_k * tile_m > 2**15):
            continue
        if tile_m > 128 and (tile_k > 128 or (schedule == "pingpong" and split_k > 1)):
            continue
        # more than two units of work in a slot are serialized by ptxas; a share of the sums is of one row block
        if v.m64_atoms > 1 and (tile_k > 128 or split_k > 1):
            continue
        if v.scales_on_sums and tile_k == 128:  # a slot has a chunk for each of two sets of fragments
            continue
        if tile_m in _BETWEEN and (tile_n != 256 or cluster_n > 1):
            continue
        if (tile_k == 128 and tile_m < 128 and v.m64_atoms == 1) or (tile_n == 192 and tile_m < 64):
            continue  # never the fastest
        if tile_k > 128 and v.blocks_k != 2 * v.k_sets:  # two blocks for each set
            continue
        if v.scales_on_sums and weight.block.bytes > ONE_GROUP and _spills_with_groups(v):
            continue
        # looking for an expert's rows takes registers
        if grouped and (schedule == "pingpong" or (v.scales_on_sums and v.warpgroups == 4)) and 32 < tile_m <= 128:
            continue
        if v.stages >= 2 and v.reduction_bytes <= v.stages * v.stage_bytes:
            found.append(config)
    return tuple(found)
