"""Host side of sm90_decode: its configs, and the order in which each adds products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.hopper import HopperKernel
from w4gemm.kernels.sm90_decode.variant import Sm90DecodeVariant
from w4gemm.kernels.space import Rule, Sizes, Space, listed

_TILE_M = (8, 16)
_BETWEEN = (48, 80, 96)
"""tile_n between the powers of two, for layers of which tiles of 64 or 32 features leave a third of the SMs without
work: 6144 / 48, 10240 / 80 and 12288 / 96 are 128 tiles, and 5120 / 80 are 64, of two CTAs each."""
_TILE_N = tuple(sorted((16, 32, 64, 128, *_BETWEEN)))
_SPLIT_K = (1, 2)


def _candidates() -> Iterator[Sizes]:
    for schedule, tile_m, tile_n, split_k in itertools.product(("coop", "pingpong"), _TILE_M, _TILE_N, _SPLIT_K):
        yield Sizes(tile_m, tile_n, 128, schedule=schedule, split_k=split_k)


SPACE = Space(
    _candidates,
    f"tile_m {listed(_TILE_M)}; tile_n {listed(_TILE_N)}; tile_k 128; split_k {listed(_SPLIT_K)}; coop and pingpong",
    impossible=(Rule("shared memory", "there is no room for the pipelines of four warps", lambda v: not v.warps),),
    pruned=(
        Rule(
            f"{listed(_BETWEEN)} features in pairs",
            "two CTAs per SM were never faster than with 32, 64 or 128 features",
            lambda c: c.schedule == "pingpong" and c.tile_n in _BETWEEN,
            of="sizes",
        ),
        Rule(
            "96 features by two CTAs",
            "80 were always faster",
            lambda c: c.tile_n == 96 and c.split_k == 2,
            of="sizes",
        ),
        Rule(
            f"{listed(_BETWEEN)} features of experts",
            "they make as many tiles as there are SMs, and experts have many more",
            lambda v: v.grouped and v.config.tile_n in _BETWEEN,
        ),
    ),
)


class Sm90Decode(HopperKernel):
    """W4A16 on SM90 for few tokens, with mma.sync: any m (meant for 16 and fewer), n and k, the formats
    of sm90_mixed_gemm."""

    name = "sm90_decode"
    revision = 1
    variant = Sm90DecodeVariant
    space = SPACE

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_decode.kernel import Sm90DecodeKernel

        return Sm90DecodeKernel

    def any_variant(self, problem: GemmProblem) -> Any:
        return replace(super().any_variant(problem), tokens=0)  # no rule looks at them, and they depend on m

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        """Each warp of a CTA takes every W-th k block, and their sums are added in a fixed order."""
        variant = Sm90DecodeVariant.of(problem, config)
        return self.name, variant.warps, variant.reduction_warps, config.split_k
