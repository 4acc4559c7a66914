"""Host side of the decode kernel: its configs and their order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from w4gemm.config import GemmConfig
from w4gemm.epilogue import PLAIN
from w4gemm.kernels.hopper import HopperKernel
from w4gemm.kernels.sm90_decode.variant import Variant
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import INT4_MMA16, WeightOperand
from w4gemm.problem import GemmProblem

_TILE_M = (8, 16)
_TILE_N = (16, 32, 64, 128)
_SPLIT_K = (1, 2)


class Sm90Decode(HopperKernel):
    """W4A16 on SM90 for few tokens, with mma.sync: any m (meant for 16 and fewer), n, k, every format."""

    name = "sm90_decode"
    revision = 1
    variant = Variant

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_decode.kernel import Decode

        return Decode

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        return list(_fitting(Variant.of(problem, GemmConfig(8, 64, 128)).block, problem.experts > 0))

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        """The warps of all CTAs take k blocks in turn, and their sums are added in a fixed order."""
        variant = Variant.of(problem, config)
        return self.name, variant.warps, variant.reduction_warps, config.split_k


@functools.cache
def _fitting(block: Block, grouped: bool) -> tuple[GemmConfig, ...]:
    """Every config whose ring fits shared memory with at least four warps."""
    found = []
    for schedule in ("coop", "pingpong"):
        for tile_m in _TILE_M:
            for tile_n in _TILE_N:
                for split_k in _SPLIT_K:
                    config = GemmConfig(tile_m, tile_n, 128, schedule=schedule, split_k=split_k)
                    weight = WeightOperand(INT4_MMA16, "bf16", "bf16", "none", block)
                    v = Variant(config, weight, PLAIN, True, grouped)
                    if v.warps:
                        found.append(config)
    return tuple(found)
