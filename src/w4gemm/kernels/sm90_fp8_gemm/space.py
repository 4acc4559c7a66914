"""Legal configs of the W4A8 kernel for Hopper."""

from __future__ import annotations

from w4gemm.core.config import GemmConfig
from w4gemm.kernels.sm90_mixed_gemm import space as mixed
from w4gemm.kernels.sm90_mixed_gemm.variant import ONE_GROUP, Sm90MixedVariant
from w4gemm.kernels.space import Rule, Space

_TILES = {
    "64x128_1x1x1_coop": "128 192 224 240 256",
    "64x128_1x1x1_coop_k2": "128 192 256",
    "64x128_1x2x1_coop": "128 192 256",
    "64x256_1x1x1_coop": "8 16 24 32 40 48 56 64 72 80 96 112 128",
    "64x256_1x1x1_coop_k2": "8 16 24 32 40 48 56 64 80 96 112 128",
    "64x256_1x2x1_coop": "8 16 32 64 128",
    "64x512_1x1x1_coop": "8 16 24 32 40 48 56 64 128",
    "64x512_1x1x1_coop_k2": "8 16 24 32 40 48 56 64 128",
    "64x512_1x2x1_coop": "8 16 32 64 128",
    "128x128_1x1x1_coop": "128 144 160 168 192 200 224 240 256",
    "128x128_1x1x1_coop_k2": "128 192 256",
    "128x128_1x2x1_coop": "128 192 256",
    "128x128_2x1x1_coop": "128 192 256",
    "128x256_1x1x1_coop": "8 16 24 32 40 48 56 64 72 80 96 112 120 128 144 160 168 192 200",
    "128x256_1x1x1_coop_k2": "8 16 24 32 40 48 56 64 128 192",
    "128x256_1x2x1_coop": "8 16 32 64 128 192",
    "128x256_2x1x1_coop": "128",
    "128x512_1x1x1_coop": "8 16 32 64",
    "128x512_1x1x1_coop_k2": "8 16 32 64",
    "128x512_1x2x1_coop": "8 16 32 64",
    "192x128_1x1x1_coop": "72 96 112 128 192",
    "192x128_1x1x1_coop_k2": "128 168 192",
    "192x128_1x2x1_coop": "128 192",
    "192x256_1x1x1_coop": "8 16 24 32 40 48 64 72 80 96 112 120 128 144 160 168",
    "192x256_1x1x1_coop_k2": "8 16 24 32 40 48 64 96 112 128 144 160",
    "192x256_1x2x1_coop": "64 128",
    "256x128_1x1x1_coop": "72 80 96 112 128 144 160 168",
    "256x128_1x2x1_coop": "128",
    "256x256_1x1x1_coop": "8 16 24 32 40 48 56 64",
    "256x256_1x1x1_coop_k2": "8 16 32 64",
    "256x256_1x2x1_coop": "8 16 32 64",
    "64x128_1x1x1_pingpong": "128 192 200 224 240 256",
    "64x128_1x1x1_pingpong_k2": "128",
    "64x128_1x2x1_pingpong": "192 256",
    "64x256_1x1x1_pingpong": "8 16 32 64 128 192 200 224 240 256",
    "64x256_1x1x1_pingpong_k2": "8 16 32 64 128",
    "64x256_1x2x1_pingpong": "192 256",
    "64x512_1x1x1_pingpong": "8 16 32 64",
    "64x512_1x1x1_pingpong_k2": "8 16 32 64",
    "128x256_1x1x1_pingpong": "8 16 32",
    "128x256_1x1x1_pingpong_k2": "8 16 32",
    "128x256_1x1x1_stream": "40 48 56 64 80 96 112 120 128 168",
}
"""By a config's string without tile_m, each tile_m; see the W4A16 kernel's. tile_k 128 is for many tokens, and for sums
that have one set of registers."""

_MAX_TILE_M = {
    0: {"coop": {64: 256, 128: 256, 192: 192, 256: 168}, "pingpong": {64: 256, 128: 32}, "stream": {128: 168}},
    1: {"coop": {64: 128, 128: 192, 192: 112, 256: 32}, "pingpong": {64: 32, 128: 16}, "stream": {128: 128}},
    2: {"coop": {64: 128, 128: 128, 192: 64, 256: 32}, "pingpong": {64: 32, 128: 16}, "stream": {128: 128}},
}
"""Largest tile_m by the sets of registers for sums beside the accumulators, which scales on sums take, by schedule and
by tile_n, which fix the number of threads: what the registers have room for."""


def _sets_of_sums(v: Sm90MixedVariant) -> int:
    return 0 if not v.promotes else 1 if v.one_set_of_sums else 2


def _spills_with_groups(v: Sm90MixedVariant) -> bool:
    """True if the scales and zero points of several groups do not fit beside two sets of accumulators."""
    half = v.warpgroups == 4 or v.occupancy == 2
    return (
        v.scales_on_sums
        and v.block.scale_bytes > ONE_GROUP
        and ((half and v.config.tile_m > 16) or v.config.cluster_m > 1)
    )


def _spills_with_block_scales(v: Sm90MixedVariant) -> bool:
    """True if scales of x do not fit beside sums, and scales of groups if these are applied to sums."""
    several = v.scales_on_sums and v.block.scale_bytes > ONE_GROUP and (v.warpgroups > 2 or v.config.tile_m > 64)
    tokens = 32 if v.config.tile_n == 192 else 64
    experts = v.scales_on_sums and v.grouped and v.warpgroups > 1 and v.config.tile_m > tokens
    bytes_of_experts = v.block.bits == 8 and v.grouped and (v.config.tile_m, v.config.tile_n) == (64, 192)
    return v.block_scales and (several or experts or bytes_of_experts or (v.warpgroups == 4 and v.config.tile_m > 32))


def _spills_with_activation(v: Sm90MixedVariant) -> bool:
    """True if an activation of each feature does not fit beside the accumulators of 256 tokens; where rows
    are gathered it does."""
    large = (v.config.schedule, v.config.tile_m) == ("pingpong", 256)
    return v.grouped and not v.gathered and large and v.epilogue.activation is not None and not v.epilogue.gated


SPACE = Space(
    _TILES,
    impossible=(
        mixed.GROUPED_STREAM,
        mixed.GROUPED_CLUSTER,
        mixed.GATHERED_CLUSTER,
        mixed.GATHERED_WARPS,
        mixed.MULTICAST_BLOCKS,
        mixed.SPLIT_ROW_BLOCKS,
        mixed.SPLIT_PINGPONG,
        mixed.stream_sums(256),
        Rule(
            "one chunk for two sets of sums",
            "with scales on sums tile_k 128 leaves a warpgroup one set of registers for sums: of one row block, one "
            "scale group, and rows of x without scales of their own; others take tile_k 256",
            lambda v: v.one_set_of_sums and (v.m64_atoms > 1 or v.block.groups > 1 or v.block_scales),
        ),
        Rule(
            "blocks for each k set",
            "with tile_k over 128 each set of warpgroups takes two weight blocks of a k-slice",
            lambda v: v.config.tile_k > 128 and v.blocks_k != 2 * v.k_sets,
        ),
        mixed.SHARED_MEMORY,
    ),
    slow=(
        Rule(
            "registers",
            "the accumulators of so many tokens leave too few registers to as many threads as tile_n takes",
            lambda v: v.config.tile_m > _MAX_TILE_M[_sets_of_sums(v)][v.config.schedule].get(v.config.tile_n, 0),
        ),
        Rule(
            "one set of sums of 192 tokens",
            "beside accumulators and sums of 192 tokens the shares of a split, clusters and gathered rows spill",
            lambda v: (
                v.one_set_of_sums
                and v.config.tile_m > 168
                and (v.config.split_k * v.config.cluster_m * v.config.cluster_n > 1 or v.gathered)
            ),
        ),
        Rule(
            "one set of sums of 192 tokens and a residual",
            "beside an expert's rows a residual in rows that are no multiple of 16 bytes would spill",
            lambda v: (
                v.one_set_of_sums and v.grouped and v.config.tile_m > 168 and v.epilogue.residual and not v.vector
            ),
            of="epilogue",
        ),
        Rule(
            "several groups",
            "scales and zero points of several groups spill beside two sets of accumulators",
            _spills_with_groups,
        ),
        Rule(
            "scales of x",
            "they take registers, which four warpgroups lack for 64 tokens, and scales of several groups, or experts, "
            "leave none for more than 64 or to more than two warpgroups; beside codes of 8 bits experts leave none for "
            "64 tokens of 192 features",
            _spills_with_block_scales,
        ),
        Rule(
            "four groups with zero points",
            "with token scales, 64 x 192 of tile_k 256 spills 8 bytes beside four scales and zero points",
            lambda v: (
                v.scales_on_sums
                and (v.block.scale_group, v.block.has_zero) == (32, True)
                and v.config == GemmConfig(64, 192, 256)
                and not v.grouped
            ),
        ),
        Rule(
            "one set of sums and zero points",
            "zero points spill beside accumulators and sums of so many tokens",
            lambda v: v.one_set_of_sums and v.block.has_zero,
        ),
        Rule(
            "one set of sums without token scales",
            "beside accumulators and sums of so many tokens some epilogues spill if tokens have no scales",
            lambda v: v.one_set_of_sums and not v.epilogue.token_scale,
            of="epilogue",
        ),
        Rule(
            "experts and registers",
            "looking for an expert's rows takes registers, which pingpong and four warpgroups lack for 33 to 128",
            lambda v: (
                v.grouped
                and (v.config.schedule == "pingpong" or (v.promotes and v.warpgroups == 4))
                and 32 < v.config.tile_m <= 128
            ),
        ),
        Rule(
            "two groups in a step",
            "the decoder's rows for two groups spill beside the accumulators of two row blocks of more than 144 tokens",
            lambda v: v.block.scale_group == 16 and v.m64_atoms > 1 and v.config.tile_m > 144,
        ),
        Rule(
            "256 features, many tokens and a residual",
            "beside the accumulators of two row blocks of more than 144 tokens a residual would spill",
            lambda v: v.m64_atoms > 1 and v.config.tile_m > 144 and v.epilogue.residual,
            of="epilogue",
        ),
        mixed.GROUPED_WIDE,
        mixed.GROUPED_RESIDUAL,
        Rule(
            "experts, pingpong and an activation",
            "looking for an expert's rows takes registers: with 256 tokens an activation of each feature would spill",
            _spills_with_activation,
            of="epilogue",
        ),
    ),
)
"""Configs of one launch."""
