"""Host side of sm90_decode: its configs, and the order in which each adds products."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.gpu import MOST_GROUP_WORDS
from w4gemm.kernels.hopper import HopperKernel
from w4gemm.kernels.sm90_decode.variant import Sm90DecodeVariant
from w4gemm.kernels.space import Rule, Space
from w4gemm.kernels.variant import adds_zeros_by_block

_TILES = {
    "16x128_1x1x1_coop": "8 16",
    "16x128_1x1x1_coop_k2": "8 16",
    "32x128_1x1x1_coop": "8 16",
    "32x128_1x1x1_coop_k2": "8 16",
    "48x128_1x1x1_coop": "8 16",
    "48x128_1x1x1_coop_k2": "8 16",
    "64x128_1x1x1_coop": "8 16",
    "64x128_1x1x1_coop_k2": "8 16",
    "80x128_1x1x1_coop": "8 16",
    "80x128_1x1x1_coop_k2": "8 16",
    "96x128_1x1x1_coop": "8 16",
    "128x128_1x1x1_coop": "8 16",
    "128x128_1x1x1_coop_k2": "8 16",
    "16x128_1x1x1_pingpong": "8 16",
    "16x128_1x1x1_pingpong_k2": "8 16",
    "32x128_1x1x1_pingpong": "8 16",
    "32x128_1x1x1_pingpong_k2": "8 16",
    "64x128_1x1x1_pingpong": "8 16",
    "64x128_1x1x1_pingpong_k2": "8 16",
    "128x128_1x1x1_pingpong": "8 16",
    "128x128_1x1x1_pingpong_k2": "8 16",
}
"""By a config's string without tile_m, each tile_m. tile_n between the powers of two is for layers of which tiles of 64
or 32 features leave a third of the SMs without work: 6144 / 48, 10240 / 80 and 12288 / 96 are 128 tiles, and 5120 / 80
are 64, of two CTAs each. 96 features by two CTAs were always slower than 80."""
SPACE = Space(
    _TILES,
    Path(__file__).with_name("legality.jsonl"),
    impossible=(Rule("shared memory", "there is no room for the pipelines of four warps", lambda v: not v.warps),),
)


class Sm90Decode(HopperKernel):
    """W4A16 on SM90 for few tokens, with mma.sync: any m (meant for 16 and fewer), n and k, the formats
    of sm90_mixed_gemm."""

    name = "sm90_decode"
    revision = 1
    group_words = MOST_GROUP_WORDS
    variant = Sm90DecodeVariant
    space = SPACE

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_decode.kernel import Sm90DecodeKernel

        return Sm90DecodeKernel

    def any_variant(self, problem: GemmProblem) -> Any:
        return replace(super().any_variant(problem), tokens=0)  # no rule looks at them, and they depend on m

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        """Each warp of a CTA takes every W-th k block, and their sums are added in a fixed order. The groups of up to
        four tokens are added in others, and so may zero points be in a tile of one strip."""
        variant = Sm90DecodeVariant.of(problem, config)
        by_block = adds_zeros_by_block(variant.block, variant.m16_atoms)
        return self.name, variant.warps, variant.reduction_warps, config.split_k, variant.few, by_block
