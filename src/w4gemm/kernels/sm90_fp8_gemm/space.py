"""Legal configs of the W4A8 kernel for Hopper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from w4gemm.core.config import GemmConfig
from w4gemm.kernels.sm90_mixed_gemm import space as mixed
from w4gemm.kernels.sm90_mixed_gemm.space import TILE_M, TILE_N, beside
from w4gemm.kernels.sm90_mixed_gemm.variant import ONE_GROUP, Sm90MixedVariant
from w4gemm.kernels.space import Rule, Sizes, Space, listed

_TILE_K = (128, 256, 512)
_FEW = beside("coop", 64, 256, 1, 2) | beside("coop", 64, 512, 1, 2) | beside("coop", 128, 256, 1, 2)
_LONG = beside("coop", 64, 256, 1, 2) | beside("coop", 128, 256)
_FEATURES_192, _FEATURES_256 = beside("coop", 192, 256), beside("coop", 256, 128)
_SHORT_192 = beside("coop", 192, 128)
_MANY = beside("coop", 128, 128) | beside("coop", 128, 256)
_PINGPONG = beside("pingpong", 64, 128) | beside("pingpong", 64, 256)
_STREAM = beside("stream", 128, 256)
_BETWEEN = {
    24: _FEW | beside("coop", 192, 256, 1, 2) | beside("coop", 256, 256),
    **dict.fromkeys((40, 48), _FEW | _STREAM | beside("coop", 192, 256, 1, 2) | beside("coop", 256, 256)),
    56: _FEW | _STREAM | beside("coop", 256, 256),
    72: beside("coop", 64, 256) | beside("coop", 128, 256) | _FEATURES_192 | _SHORT_192 | _FEATURES_256,
    80: _LONG | _STREAM | _FEATURES_192 | _FEATURES_256,
    **dict.fromkeys((96, 112), _LONG | _STREAM | beside("coop", 192, 256, 1, 2) | _SHORT_192 | _FEATURES_256),
    120: beside("coop", 128, 256) | _STREAM | _FEATURES_192,
    **dict.fromkeys((144, 160), _MANY | beside("coop", 192, 256, 1, 2) | _FEATURES_256),
    168: _MANY | _STREAM | _FEATURES_192 | beside("coop", 192, 128, 2) | _FEATURES_256,
    200: _MANY | _PINGPONG,
    224: _MANY | beside("coop", 64, 128) | _PINGPONG,
    240: beside("coop", 64, 128) | beside("coop", 128, 128) | _PINGPONG,
}
"""tile_m between the powers of two, with the other sizes that are kept; see the W4A16 kernel's."""
_CLUSTER_SPLIT_K = ((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1))
"""(cluster_m, cluster_n, split_k)."""
_MAX_TILE_M = {
    0: {"coop": {64: 256, 128: 256, 192: 192, 256: 168}, "pingpong": {64: 256, 128: 32}, "stream": {128: 168}},
    1: {"coop": {64: 128, 128: 192, 192: 112, 256: 32}, "pingpong": {64: 32, 128: 16}, "stream": {128: 128}},
    2: {"coop": {64: 128, 128: 128, 192: 64, 256: 32}, "pingpong": {64: 32, 128: 16}, "stream": {128: 128}},
}
"""Largest tile_m by the sets of registers for sums beside the accumulators, which scales on sums take, by schedule and
by tile_n, which fix the number of threads: what the registers have room for."""


def _candidates() -> Iterator[Sizes]:
    sizes = itertools.product(("coop", "pingpong", "stream"), TILE_N, TILE_M, _TILE_K, _CLUSTER_SPLIT_K)
    for schedule, tile_n, tile_m, tile_k, (cluster_m, cluster_n, split_k) in sizes:
        yield Sizes(tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, split_k)
    yield from mixed.between(_BETWEEN)


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
    return v.block_scales and (several or experts or (v.warpgroups == 4 and v.config.tile_m > 32))


def _spills_with_activation(v: Sm90MixedVariant) -> bool:
    """True if an activation of each feature does not fit beside the accumulators of 256 tokens; where rows
    are gathered it does."""
    large = (v.config.schedule, v.config.tile_m) == ("pingpong", 256)
    return v.grouped and not v.gathered and large and v.epilogue.activation is not None and not v.epilogue.gated


SPACE = Space(
    _candidates,
    f"tile_m {listed(TILE_M)}; tile_n {listed(TILE_N)}; tile_k {listed(_TILE_K)}; (cluster_m, cluster_n, split_k) "
    f"{listed(_CLUSTER_SPLIT_K)}; and some of these with tile_m {listed(_BETWEEN)}",
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
        mixed.REGISTERS._replace(
            excludes=lambda v: (
                v.config.tile_m > _MAX_TILE_M[_sets_of_sums(v)][v.config.schedule].get(v.config.tile_n, 0)
            ),
            of="variant",
        ),
        Rule(
            "long slices of two row blocks",
            "a k-slice of more than two MMA batches, which ptxas serializes: with two row blocks tile_k is 128",
            lambda c: Sm90MixedVariant.m64_atoms_of(c) > 1 and c.tile_k > 128,
            of="sizes",
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
            "leave none for more than 64 or to more than two warpgroups",
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
    pruned=(
        mixed.experts_between(_BETWEEN),
        mixed.PINGPONG_CLUSTER,
        mixed.MULTICAST_TOKENS,
        Rule(
            "shared weights of long slices",
            "weights are worth sharing with tile_m * tile_k up to 32768",
            lambda c: c.cluster_m > 1 and c.tile_k * c.tile_m > 2**15,
            of="sizes",
        ),
        Rule(
            "long slices of many tokens",
            "with tile_m over 128, tile_k 256 gains where three stages have room; of 64 features only in pingpong",
            lambda c: (
                c.tile_m > 128
                and (c.tile_k > 256 or (c.tile_k == 256 and (c.tile_n == 64) != (c.schedule == "pingpong")))
            ),
            of="sizes",
        ),
        Rule(
            "long slices in two stages",
            "with tile_m over 128, two stages of tile_k 256 are slower than more of tile_k 128",
            lambda v: v.config.tile_m > 128 and v.config.tile_k > 128 and v.num_stages < 3,
        ),
        Rule(
            "short slices of few tokens",
            "tile_k 128 was never the fastest with tile_m under 128, but of 192 features and over 64",
            lambda c: (
                c.tile_k == 128
                and c.tile_m < 128
                and (c.tile_n != 192 or c.tile_m <= 64)
                and Sm90MixedVariant.m64_atoms_of(c) == 1
            ),
            of="sizes",
        ),
        Rule(
            "short slices of 192 features",
            "tile_k 128 was never the fastest with tile_m under 128, but with one set of sums",
            lambda v: (v.config.tile_k, v.config.tile_n) == (128, 192) and v.config.tile_m < 128 and not v.promotes,
        ),
        mixed.WIDE_FEW_CLUSTER,
        Rule(
            "sizes of stream-k",
            "stream-k with tile_k 128 or fewer than 40 tokens was not looked at",
            lambda c: c.schedule == "stream" and (c.tile_k == 128 or c.tile_m < 40),
            of="sizes",
        ),
        Rule(
            "one set of sums",
            "with scales on sums, one set of registers for sums is slower than two for 128 tokens",
            lambda v: v.one_set_of_sums and v.config.tile_m == 128,
        ),
    ),
)
"""Configs of one launch."""
