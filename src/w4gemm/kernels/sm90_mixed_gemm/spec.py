"""Host side of the Hopper kernel: its configs and their order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from w4gemm.config import GemmConfig
from w4gemm.epilogue import PLAIN
from w4gemm.kernels.hopper import HopperKernel
from w4gemm.kernels.sm90_mixed_gemm.variant import ONE_GROUP, Variant
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import INT4_MMA16, WeightOperand
from w4gemm.problem import GemmProblem

_TILE_M = (8, 16, 32, 64, 128, 192, 256)
_TILE_N = (64, 128, 192, 256)
_MANY = set(itertools.product(("coop",), (64, 128), (128,), (1, 2)))
_FEW = {("coop", 256, 128, 1), *itertools.product(("coop",), (64, 128), (256,), (1, 2))}
_STREAM = {("stream", 128, 128, 1)}
_BETWEEN = {
    24: _FEW | {("coop", 64, 512, 1), ("coop", 64, 512, 2)},
    **dict.fromkeys((40, 48, 56), _FEW | _STREAM),
    **dict.fromkeys((80, 96, 112), _MANY | _STREAM | {("coop", 64, 256, 1), ("coop", 192, 128, 2)}),
    **dict.fromkeys((160, 224), _MANY),
}
"""Tiles for about as many tokens as they hold, since rows past m cost time: by tile_m what is the fastest of its
neighbours somewhere, as (schedule, tile_n, tile_k, split_k)."""
_TILE_K = (64, 128, 256, 512)
_CLUSTER_SPLIT_K = ((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1))
"""(cluster_m, cluster_n, split_k)."""
_MAX_TILE_M = {"coop": {64: 256, 128: 256, 192: 128, 256: 128}, "pingpong": {64: 256, 128: 64}, "stream": {128: 256}}
"""By schedule and tile_n, which fix the number of threads: what the accumulators leave room for in the registers."""


class Sm90MixedGemm(HopperKernel):
    """W4A16 on SM90 with TMA and register-sourced WGMMA: any m, n, k, every :class:`WeightFormat`, fp16 and bf16."""

    name = "sm90_mixed_gemm"
    revision = 2
    variant = Variant
    parts: tuple[str, ...] = (
        "256x128x128_1x1x1_coop+128x128x128_1x1x1_coop",
        "256x128x128_1x1x1_coop+112x128x128_1x1x1_coop",
        "128x256x64_1x1x1_coop+128x192x128_1x1x1_coop",
        "128x192x128_1x1x1_coop+128x128x128_1x1x1_coop",
        "128x192x128_1x1x1_coop+64x64x256_1x1x1_coop",
        "96x128x128_1x1x1_coop+96x64x128_1x1x1_coop",
    )
    """Configs of two launches, for one weight: see parts.py."""

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_mixed_gemm.kernel import Sm90Kernel
        from w4gemm.kernels.sm90_mixed_gemm.two_launches import TwoLaunches

        return lambda variant: TwoLaunches(variant) if variant.config.tail else Sm90Kernel(variant)

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        # a CTA gathers what it multiplies: of rows that cp.async brings nothing can be shared in a cluster
        found = [c for c in self.fitting(problem) if not (problem.gathered and c.cluster_n > 1)]
        pairs = [] if problem.experts else [GemmConfig.parse(text) for text in self.parts]
        legal = set(found)
        return found + [c for c in pairs if {replace(c, tail=None), c.tail} <= legal]

    def fitting(self, problem: GemmProblem) -> tuple[GemmConfig, ...]:
        """The configs that registers and shared memory have room for, for the problem's format."""
        return _fitting(Variant.of(problem, GemmConfig(8, 64, 128)).block, problem.experts > 0)

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """One set on all of k adds up steps of 16 in order: tiles, cluster, schedule and stages do not matter. Several
        sets or CTAs cut k at multiples of tile_k; a stream cuts it where the number of tiles says."""
        if config.schedule == "stream":
            return None
        if config.tail is not None:
            orders = {self.reduction_order(problem, c) for c in (replace(config, tail=None), config.tail)}
            return orders.pop() if len(orders) == 1 else None
        sets = Variant.of(problem, config).k_sets
        alone = sets == 1 and config.split_k == 1
        return self.name, sets, config.split_k, 0 if alone else config.tile_k


@functools.cache
def _fitting(block: Block, grouped: bool) -> tuple[GemmConfig, ...]:
    """Every config whose accumulators fit the registers and whose pipeline fits shared memory, at least two deep."""
    tile_m_sizes = _TILE_M if grouped else (*_TILE_M, *_BETWEEN)
    sizes = itertools.product(("coop", "pingpong", "stream"), _TILE_N, tile_m_sizes, _TILE_K, _CLUSTER_SPLIT_K)
    found = []
    for schedule, tile_n, tile_m, tile_k, (cluster_m, cluster_n, split_k) in sizes:
        config = GemmConfig(tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, split_k)
        v = Variant(config, WeightOperand(INT4_MMA16, "bf16", "bf16", "none", block), PLAIN, True, grouped)
        if tile_m > _MAX_TILE_M[schedule].get(tile_n, 0) or (
            schedule == "pingpong" and tile_m <= 128 and cluster_n > 1
        ):
            continue
        if tile_m in _BETWEEN and (
            cluster_m * cluster_n > 1 or (schedule, tile_n, tile_k, split_k) not in _BETWEEN[tile_m]
        ):
            continue
        if tile_k > 128 and tile_m > 128:  # ptxas serializes some of these, and none was ever the fastest
            continue
        # smaller steps gain where x fills the stages
        if tile_k == 64 and ((tile_m < 192 and v.m64_atoms == 1) or schedule == "pingpong"):
            continue
        # larger ones have more than two units of work, which ptxas serializes; a share of the sums is of one row block
        if v.m64_atoms > 1 and (tile_k > 64 or split_k > 1):
            continue
        # streams and split_k want to know the number of tiles beforehand; neighbours along m may be of two experts
        if grouped and (schedule == "stream" or split_k > 1 or cluster_m > 1):
            continue
        # looking for an expert's rows takes registers: with the scales of many groups these would spill
        large = (tile_m, schedule) == (128, "pingpong") or (tile_m, tile_n) == (256, 128)
        if grouped and (large or (tile_k, cluster_n) == (512, 2)) and block.bytes > ONE_GROUP:
            continue
        if tile_n == 192 and tile_m < 64:
            continue
        # weights are worth sharing where many tokens meet them; each of two CTAs fetches one of two row blocks
        if cluster_m > 1 and (tile_n != 128 or tile_m < 128 or schedule != "coop"):
            continue
        # a CTA of a stream walks over parts of tiles, which other sums through the drained pipeline do not allow
        if schedule == "stream" and (tile_m in (8, 16, 192) or tile_k > 128 or cluster_n * split_k > 1):
            continue
        if tile_k == 512 and (tile_n > 64 or tile_m > 32 or schedule == "pingpong"):  # only four k sets gain by it
            continue
        if tile_m > 128 and schedule == "pingpong" and split_k > 1:
            continue
        if v.blocks_k > v.k_sets:  # ptxas serializes the WGMMAs of slots with several blocks a set
            continue
        # the scales of many groups spill where two sets share half a multiprocessor
        if schedule == "pingpong" and v.k_sets > 1 and tile_m > 32 and block.bytes > ONE_GROUP:
            continue
        if v.stages >= 2 and v.reduction_bytes <= v.stages * v.stage_bytes:
            found.append(config)
    return tuple(found)
