"""Legal configs of the W4A16 kernel for Hopper; the rules that the W4A8 kernel shares are here too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from w4gemm.kernels.sm90_mixed_gemm.variant import ONE_GROUP, WGMMA_TOKENS, Sm90MixedVariant
from w4gemm.kernels.space import Rule, Sizes, Space, listed

TILE_M = (8, 16, 32, 64, 128, 192, 256)
TILE_N = (64, 128, 192, 256)
_TILE_K = (64, 128, 256, 512)
_CLUSTER_SPLIT_K = ((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1))
"""(cluster_m, cluster_n, split_k)."""


_REGISTERS_OF_FLOATS, _REGISTERS_OF_TABLES = 4, 16
"""From so many registers of a codec on, rules exclude some configs: 4-bit floats, and codebooks."""


class Beside(NamedTuple):
    """The other sizes of a config beside tile_m, of one that has no cluster but for split_k."""

    schedule: str
    tile_n: int
    tile_k: int
    split_k: int = 1


def beside(schedule: str, tile_n: int, tile_k: int, *split_k: int) -> set[Beside]:
    """Return the sizes with each split_k; with 1 if none is named."""
    return {Beside(schedule, tile_n, tile_k, split) for split in split_k or (1,)}


_MANY = beside("coop", 64, 128, 1, 2) | beside("coop", 128, 128, 1, 2)
_LONG = beside("coop", 64, 256, 1, 2)
_FEW = _LONG | beside("coop", 128, 256, 1, 2) | beside("coop", 192, 128, 1, 2) | beside("coop", 256, 128)
_FEATURES_192 = beside("coop", 192, 128)
_FEATURES_256 = beside("coop", 256, 64)
_STREAM = beside("stream", 128, 128)
_BETWEEN = {
    24: _FEW | beside("coop", 64, 512, 1, 2),
    **dict.fromkeys((40, 48, 56), _FEW | _STREAM),
    72: _MANY | _LONG | _FEATURES_192,
    **dict.fromkeys((80, 96), _MANY | _LONG | _STREAM | beside("coop", 192, 128, 1, 2)),
    112: _MANY | _LONG | _STREAM | beside("coop", 192, 128, 1, 2) | _FEATURES_256,
    120: _MANY | _FEATURES_192 | _STREAM | _FEATURES_256,
    **dict.fromkeys((144, 168), _MANY | _STREAM | _FEATURES_192 | beside("coop", 192, 64) | _FEATURES_256),
    160: _MANY | _FEATURES_192 | beside("coop", 192, 64) | _FEATURES_256,
    224: _MANY,
    **dict.fromkeys((200, 240), beside("coop", 128, 64) | beside("pingpong", 64, 128)),
}
"""tile_m between the powers of two, with the other sizes that were the fastest somewhere, or are by the cost model
(2026-11-24). Tokens past m cost time, so a tile of 48 is better for 48 tokens than one of 64, and four of 112 better
for 400 than four of 128. The box of x that divides tile_m should be large (``box_tokens`` of the variant): no 88, 104
or 136."""
_OVER_WGMMA = (272,)
"""tile_m of two WGMMAs: for a few tokens more than tiles of 256 hold in a wave. 304 was the fastest at one of 44
points, by 0.2 %, 288 at none, and 320 spills (H200, 2026-11-27)."""
_MAX_TILE_M = {"coop": {64: 256, 128: 272, 192: 192, 256: 168}, "pingpong": {64: 256, 128: 64}, "stream": {128: 256}}
"""Largest tile_m by schedule and tile_n, which fix the number of threads: what the registers have room for."""


def _candidates() -> Iterator[Sizes]:
    sizes = itertools.product(("coop", "pingpong", "stream"), TILE_N, TILE_M, _TILE_K, _CLUSTER_SPLIT_K)
    for schedule, tile_n, tile_m, tile_k, (cluster_m, cluster_n, split_k) in sizes:
        yield Sizes(tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, split_k)
    yield from between(_BETWEEN)
    for tile_m, cluster_n in itertools.product(_OVER_WGMMA, (1, 2)):
        yield Sizes(tile_m, 128, 64, 1, cluster_n, "coop", 1)


def between(kept: dict[int, set[Beside]]) -> Iterator[Sizes]:
    """Yield the candidates of a table of tile_m between the powers of two."""
    for tile_m, others in kept.items():
        for c in sorted(others):
            yield Sizes(tile_m, c.tile_n, c.tile_k, 1, 1, c.schedule, c.split_k)


def fits(v: Sm90MixedVariant) -> bool:
    """True if shared memory holds two stages, and the sums that lie over the drained pipeline. Those of several k sets
    must not lie over the staging buffers, which the first warps of the first set write to while others read sums."""
    over_staging = v.k_sets > 1 and v.sums_reach_staging
    return v.num_stages >= 2 and v.reduction_bytes <= v.num_stages * v.stage_bytes and not over_staging


def experts_between(kept: dict[int, set[Beside]]) -> Rule:
    """Return the rule that leaves experts no tiles of 64 features of a table."""
    reason = "of the sizes between the powers of two, 64 features were never the fastest for experts"
    return Rule("experts between", reason, lambda v: v.grouped and v.config.tile_m in kept and v.config.tile_n == 64)


def stream_sums(largest_tile_k: int) -> Rule:
    """Return the rule that stream-k has no other sums; longer k-slices take a second set of warpgroups."""
    return Rule(
        "stream-k and other sums",
        "a CTA of stream-k goes from tile to tile, so that its pipeline is never drained, as the sums of several k "
        f"sets or CTAs need it: tile_k {largest_tile_k} at most, no split_k, no cluster along n",
        lambda c: c.schedule == "stream" and (c.tile_k > largest_tile_k or c.cluster_n * c.split_k > 1),
        of="sizes",
    )


GROUPED_STREAM = Rule(
    "experts and stream-k",
    "stream-k wants to know the number of tiles beforehand",
    lambda v: v.grouped and v.stream_k,
)
GROUPED_CLUSTER = Rule(
    "experts and clusters along m",
    "neighbouring tiles along m may be of two experts, and split_k wants to know the number of tiles beforehand",
    lambda v: v.grouped and (v.config.split_k > 1 or v.config.cluster_m > 1),
)
GATHERED_CLUSTER = Rule(
    "gathered rows and clusters along n",
    "a CTA gathers what it multiplies: of rows that cp.async brings nothing can be shared in a cluster",
    lambda v: v.gathered and v.config.cluster_n > 1,
)
GATHERED_WARPS = Rule(
    "gathered rows and warps",
    "four warps copy x, four rows at a time: all four share rows that are a multiple of 16, two share others, and each "
    "two need a k chunk of their own",
    lambda v: v.gathered and v.config.tile_m % 16 > 0 and v.config.tile_k <= v.chunk_k,
)
MULTICAST_BLOCKS = Rule(
    "shared weights",
    "with cluster_m 2 each of two CTAs fetches one of two row blocks, so tile_n must be 128",
    lambda c: c.cluster_m > 1 and c.tile_n != 128,
    of="sizes",
)
SPLIT_ROW_BLOCKS = Rule(
    "split_k of two row blocks",
    "the CTAs of a split hand over shares of one row block per warpgroup, here each has two",
    lambda c: Sm90MixedVariant.m64_atoms_of(c) > 1 and c.split_k > 1,
    of="sizes",
)
SPLIT_PINGPONG = Rule(
    "split_k of pingpong",
    "two warpgroups alternate between the output tiles of a CTA, split_k gives a CTA one tile",
    lambda c: c.tile_m > 128 and c.schedule == "pingpong" and c.split_k > 1,
    of="sizes",
)
SHARED_MEMORY = Rule(
    "shared memory",
    "there is no room for two stages, or for the sums that warpgroups and CTAs hand over in the drained stages",
    lambda v: not fits(v),
)
GROUPED_WIDE = Rule(
    "experts and 192 features of many tokens",
    "looking for an expert's rows takes registers, which three warpgroups of more than 128 tokens lack",
    lambda v: v.grouped and v.config.tile_n == 192 and v.config.tile_m > 128,
)
GROUPED_RESIDUAL = Rule(
    "experts, many tokens and a residual",
    "looking for an expert's rows takes registers: with 256 tokens, or over 128 and 256 features, a residual in rows "
    "that are no multiple of 16 bytes would spill, and in a cluster along n one in float32",
    lambda v: (
        v.grouped
        and (v.config.tile_m == 256 or (v.m64_atoms > 1 and v.config.tile_m > 128))
        and v.epilogue.residual
        and (not v.vector or (v.out_kind == "f32" and v.config.cluster_n > 1))
    ),
    of="epilogue",
)
PINGPONG_CLUSTER = Rule(
    "pingpong and clusters",
    "with two CTAs on a multiprocessor a cluster of two along n is not looked at",
    lambda c: c.schedule == "pingpong" and c.tile_m <= 128 and c.cluster_n > 1,
    of="sizes",
)
MULTICAST_TOKENS = Rule(
    "shared weights of few tokens",
    "weights are worth sharing where many tokens meet them: tile_m 128 and more, coop",
    lambda c: c.cluster_m > 1 and (c.tile_m < 128 or c.schedule != "coop"),
    of="sizes",
)
REGISTERS = Rule(
    "registers",
    "the accumulators of so many tokens leave too few registers to as many threads as tile_n takes",
    lambda c: c.tile_m > _MAX_TILE_M[c.schedule].get(c.tile_n, 0),
    of="sizes",
)
WIDE_FEW_CLUSTER = Rule(
    "192 features of few tokens in a cluster",
    "with tile_n 192 and tile_m under 64 a cluster along n was never faster than none by more than chance",
    lambda c: c.tile_n == 192 and c.tile_m < 64 and c.cluster_n > 1,
    of="sizes",
)


def _many_groups(v: Sm90MixedVariant) -> bool:
    return v.block.scale_bytes > ONE_GROUP


def _large(v: Sm90MixedVariant) -> bool:
    c = v.config
    return (c.tile_m, c.schedule) == (128, "pingpong") or (c.tile_m, c.tile_n) == (256, 128)


SPACE = Space(
    _candidates,
    f"tile_m {listed(TILE_M)}; tile_n {listed(TILE_N)}; tile_k {listed(_TILE_K)}; (cluster_m, cluster_n, split_k) "
    f"{listed(_CLUSTER_SPLIT_K)}; and some of these with tile_m {listed((*_BETWEEN, *_OVER_WGMMA))}",
    impossible=(
        GROUPED_STREAM,
        GROUPED_CLUSTER,
        GATHERED_CLUSTER,
        GATHERED_WARPS,
        MULTICAST_BLOCKS,
        SPLIT_ROW_BLOCKS,
        SPLIT_PINGPONG,
        stream_sums(128),
        SHARED_MEMORY,
    ),
    slow=(
        REGISTERS,
        Rule(
            "long slices of many tokens",
            "ptxas serializes some configs with tile_k and tile_m over 128, and none was ever the fastest",
            lambda c: c.tile_k > 128 and c.tile_m > 128,
            of="sizes",
        ),
        Rule(
            "long slices of two row blocks",
            "a k-slice of more than two MMA batches, which ptxas serializes: with two row blocks tile_k is 64",
            lambda c: Sm90MixedVariant.m64_atoms_of(c) > 1 and c.tile_k > 64,
            of="sizes",
        ),
        Rule(
            "several blocks for a k set",
            "ptxas serializes the WGMMAs of k-slices with several weight blocks for each set of warpgroups",
            lambda v: v.blocks_k > v.k_sets,
        ),
        Rule(
            "experts, many groups, large tiles",
            "looking for an expert's rows takes registers: the scales of several groups would spill",
            lambda v: (
                v.grouped and _many_groups(v) and (_large(v) or (v.config.tile_k, v.config.cluster_n) == (512, 2))
            ),
        ),
        Rule(
            "floats, codebooks and a residual",
            "the bits of a word and tables take registers: a residual in rows that are no multiple of 16 bytes would "
            "spill in pingpong of 128 tokens and streams of 256; beside experts' rows any would in pingpong of 256",
            lambda v: (
                v.weight.codec.registers >= _REGISTERS_OF_FLOATS
                and v.epilogue.residual
                and (
                    (not v.vector and (v.config.tile_m, v.config.schedule) in ((128, "pingpong"), (256, "stream")))
                    or (v.grouped and (v.config.tile_m, v.config.schedule) == (256, "pingpong"))
                )
            ),
            of="epilogue",
        ),
        Rule(
            "codebooks of experts",
            "tables take registers beside those for an expert's rows: pingpong of 192 tokens and more would spill, "
            "beside float32 scales of 64 tokens and 128 features, and where rows are gathered the largest tiles of "
            "long slices",
            lambda v: (
                v.grouped
                and v.weight.codec.registers >= _REGISTERS_OF_TABLES
                and (
                    (v.config.schedule == "pingpong" and v.config.tile_m > 128)
                    or (v.block.scale_bits == 32 and v.config.schedule == "pingpong" and v.config.tile_n == 128)
                    or (v.gathered and v.config.tile_k > 128 and v.config.tile_m * v.config.tile_n >= 8192)
                    or (v.gathered and (v.config.tile_m, v.config.tile_k) == (32, 512))
                )
            ),
        ),
        Rule(
            "wide scales",
            "weights that are formed in float32 take registers: two CTAs of 128 tokens would spill, and of two levels "
            "64 tokens of four warpgroups with split_k, and 192 tokens of three; beside float32 scales and zero points "
            "for each 32 columns 192 tokens, and long slices of gathered rows",
            lambda v: (
                v.weight.codec.in_float32
                and (
                    (v.config.tile_m, v.config.schedule) == (128, "pingpong")
                    or (v.config.tile_m, v.config.tile_n) == (192, 192)
                    or (
                        v.block.factors
                        and (v.config.tile_m, v.config.split_k) == (64, 2)
                        and v.warpgroups * v.occupancy == 4
                    )
                    or (
                        v.block.scale_bytes > 1024
                        and (v.config.tile_m >= 192 or (v.gathered and v.config.tile_k == 512))
                    )
                )
            ),
        ),
        GROUPED_WIDE,
        GROUPED_RESIDUAL,
        Rule(
            "experts and more than 256 tokens",
            "looking for an expert's rows takes registers: beside so many accumulators a residual would spill",
            lambda v: v.grouped and v.config.tile_m > WGMMA_TOKENS,
        ),
        Rule(
            "pingpong, many groups, two k sets",
            "the scales of several groups spill where two sets share half a multiprocessor",
            lambda v: v.config.schedule == "pingpong" and v.k_sets > 1 and v.config.tile_m > 32 and _many_groups(v),
        ),
    ),
    pruned=(
        experts_between(_BETWEEN),
        PINGPONG_CLUSTER,
        Rule(
            "short slices",
            "tile_k 64 gains where x fills the stages: tile_m 192 and more, over 128 with tile_n 192, or two row "
            "blocks, and not in pingpong",
            lambda c: (
                c.tile_k == 64
                and (
                    (c.tile_m < (144 if c.tile_n == 192 else 192) and Sm90MixedVariant.m64_atoms_of(c) == 1)
                    or c.schedule == "pingpong"
                )
            ),
            of="sizes",
        ),
        WIDE_FEW_CLUSTER,
        Rule(
            "split_k of 192 features",
            "for up to 16 tokens sm90_decode's tiles of 80 and 96 features are faster, for more than 128 other tiles "
            "without split_k are (at 15 of 17 points)",
            lambda c: c.tile_n == 192 and c.split_k > 1 and not 24 <= c.tile_m <= 128,
            of="sizes",
        ),
        MULTICAST_TOKENS,
        Rule(
            "tile_m of stream-k",
            "stream-k with 8, 16 or 192 tokens was never the fastest",
            lambda c: c.schedule == "stream" and c.tile_m in (8, 16, 192),
            of="sizes",
        ),
        Rule(
            "longest slices",
            "only four k sets gain by tile_k 512: tile_n 64, tile_m up to 32, not in pingpong",
            lambda c: c.tile_k == 512 and (c.tile_n > 64 or c.tile_m > 32 or c.schedule == "pingpong"),
            of="sizes",
        ),
    ),
)
"""Configs of one launch."""
