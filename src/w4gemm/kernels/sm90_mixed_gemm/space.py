"""Legal configs of the W4A16 kernel for Hopper; the rules that the W4A8 kernel shares are here too."""

from __future__ import annotations

from pathlib import Path

from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.kernels.sm90_mixed_gemm.work import WGMMA_TOKENS
from w4gemm.kernels.space import Rule, Space
from w4gemm.packing.block import BLOCK_N

ONE_GROUP = 2 * BLOCK_N
"""Bytes of the scales of a block with a single group, of 16 bits, and no zero points."""

_TILES = {
    "64x64_1x1x1_coop": "192 256",
    "64x64_1x1x1_coop_k2": "192 256",
    "64x64_1x2x1_coop": "192 256",
    "64x128_1x1x1_coop": "8 16 32 64 72 80 96 112 120 128 144 160 168 192 224 256",
    "64x128_1x1x1_coop_k2": "8 16 32 64 72 80 96 112 120 128 144 160 168 192 224 256",
    "64x128_1x2x1_coop": "8 16 32 64 128 192 256",
    "64x256_1x1x1_coop": "8 16 24 32 40 48 56 64 72 80 96 112 128",
    "64x256_1x1x1_coop_k2": "8 16 24 32 40 48 56 64 72 80 96 112 128",
    "64x128_1x1x1_coop_k3": "72 80 96 112 128 144",
    "64x256_1x1x1_coop_k3": "16 24 32 40 48 56 64",
    "64x128_1x1x1_coop_k4": "72 80 96 112 128 144",
    "64x128_1x1x1_coop_k5": "72 80 96 112 128",
    "64x128_1x1x1_coop_k8": "72 80 96 112",
    "64x256_1x1x1_coop_k4": "24 32 40 48 56 64",
    "64x256_1x1x1_coop_k5": "24 32 40 48 56 64",
    "64x256_1x1x1_coop_k8": "24 40 56",
    "64x256_1x2x1_coop": "8 16 32 64 128",
    "64x512_1x1x1_coop": "8 16 24 32",
    "64x512_1x1x1_coop_k2": "8 16 24 32",
    "64x512_1x2x1_coop": "8 16 32",
    "128x64_1x1x1_coop": "192 200 240 256 272",
    "128x64_1x1x1_coop_k2": "192 256",
    "128x64_1x2x1_coop": "192 256 272",
    "128x64_2x1x1_coop": "192 256",
    "128x64_2x2x1_coop": "192 256",
    "128x128_1x1x1_coop": "8 16 32 64 72 80 96 112 120 128 144 160 168 192 224 256",
    "128x128_1x1x1_coop_k2": "8 16 32 64 72 80 96 112 120 128 144 160 168 192 224 256",
    "128x128_1x1x1_coop_k3": "24 32 40 48 56 72 80 96 112",
    "128x128_1x2x1_coop": "8 16 32 64 128 192 256",
    "128x128_2x1x1_coop": "128 192 256",
    "128x128_2x2x1_coop": "128 192 256",
    "128x256_1x1x1_coop": "8 16 24 32 40 48 56 64",
    "128x256_1x1x1_coop_k2": "8 16 24 32 40 48 56 64",
    "128x256_1x2x1_coop": "8 16 32 64",
    "192x64_1x1x1_coop": "144 160 168 192",
    "192x64_1x2x1_coop": "192",
    "192x128_1x1x1_coop": "8 16 24 32 40 48 56 64 72 80 96 112 120 128 144 160 168 192",
    "192x128_1x1x1_coop_k2": "24 32 40 48 56 64 80 96 112 128",
    "192x128_1x1x1_coop_k4": "32 48 56 72 80",
    "192x128_1x2x1_coop": "64 128 192",
    "256x64_1x1x1_coop": "112 120 128 144 160 168",
    "256x64_1x2x1_coop": "128",
    "256x128_1x1x1_coop": "8 16 24 32 40 48 56 64",
    "256x128_1x1x1_coop_k2": "8 16 32 64",
    "256x128_1x2x1_coop": "8 16 32 64",
    "64x128_1x1x1_pingpong": "8 16 32 64 128 192 200 240 256",
    "64x128_1x1x1_pingpong_k2": "8 16 32 64 128",
    "64x128_1x2x1_pingpong": "192 256",
    "64x256_1x1x1_pingpong": "8 16 32 64",
    "64x256_1x1x1_pingpong_k2": "8 16 32 64",
    "128x128_1x1x1_pingpong": "8 16 32 64",
    "128x128_1x1x1_pingpong_k2": "8 16 32 64",
    "128x64_1x1x1_stream": "256",
    "128x128_1x1x1_stream": "32 40 48 56 64 80 96 112 120 128 144 168 256",
}
"""By a config's string without tile_m, each tile_m. All but a few were measured on an H200 (choice/cost), and each was
the fastest somewhere or lies beside one that was:

* tile_m between the powers of two, because tokens past m cost time: a tile of 48 is better for 48 tokens than one of
  64, and four of 112 better for 400 than four of 128. 272, of two WGMMAs, is for a few tokens more than tiles of 256
  hold in a wave.
* tile_k 64 where x fills the stages: many tokens, or two row blocks. tile_k 512 where four k sets divide it.
* split_k 3, 4, 5 and 8 where a layer has so few tiles that clusters of so many, of which a GPU holds 39, 30, 22 and
  15, still find room.
* Two CTAs share weights (cluster_m) where many tokens meet them, and x (cluster_n) if tile_m is a power of two."""


_CHAINS = {
    "64x128_1x1x1_chain_k3": "72 80 96 112 120 128 144",
    "64x128_1x1x1_chain_k4": "72 80 96 112 120 128",
    "128x128_1x1x1_chain_k3": "32 112",
}
_LONG_CHAINS = {f"64x256_1x1x1_chain_k{split}": "24 32 40 48 56 64" for split in (3, 4)}
_WIDE_SPLITS = {f"{n}x64_1x1x1_coop_k{split}": "256" for n in (64, 128) for split in (3, 4)}
_FINE_TILES = {
    **{f"{bits} bits, 3 registers, in float32, factors": _WIDE_SPLITS for bits in ("up to 4", "5 to 8")},
    "up to 4 bits, 3 registers": {
        "64x128_1x1x1_coop": "88 104 136 152 200",
        "64x128_1x1x1_coop_k2": "88 104 136 184",
        "128x128_1x1x1_coop": "88 104 136 152 176",
        "128x128_1x1x1_coop_k2": "88",
        "128x128_1x1x1_coop_k3": "64",
        "128x128_1x1x1_coop_k5": "24 40 56 64 80 96 112",
        "192x64_1x1x1_coop": "152",
        "192x128_1x1x1_coop": "88 104 136 152 176",
        "192x128_1x1x1_coop_k2": "88",
        "192x128_1x1x1_coop_k4": "40 64",
        "256x64_1x1x1_coop": "136 152",
        "128x128_1x1x1_stream": "72 88 104 136 152 160 176",
        **_CHAINS,
        **_LONG_CHAINS,
        "64x128_1x1x1_chain_k3": _CHAINS["64x128_1x1x1_chain_k3"] + " 88 104",
        "64x128_1x1x1_chain_k4": _CHAINS["64x128_1x1x1_chain_k4"] + " 88 104",
    },
    "up to 4 bits, 4 registers": _CHAINS | _LONG_CHAINS,
    "5 to 8 bits, 3 registers": _CHAINS,
}
"""By the register class of a decoder, more tile_m, where their tokens are worth it although boxes of x overlap
(``box_tokens`` of the variant): 3 to 15 % of the time where they are chosen; and splits of five CTAs with 128 features,
for layers of 2,497 to 2,816. Tiles of 120, 152, 176, 184 and 208 that were not faster than their neighbours are left
out, and so are those of other decoders, experts and x with scales of 128 columns, which nobody timed (H200,
2026-11-30). Chains are for as many tiles as fill over half of a GPU: 4,225 to 5,760 features in tiles of 64. With 192
features and more, or over 144 tokens, none was faster, nor with 256 columns of codes of 8 bits."""


def fits(v: Sm90MixedVariant) -> bool:
    """True if shared memory holds two stages, and the drained pipeline's memory of x the sums that lie over it. The
    staging buffers, which come next, are written by the first warps while others still read sums."""
    return v.num_stages >= 2 and v.reduction_bytes <= v.num_stages * v.x_bytes


def with_fine_tiles(tiles: dict[str, str], fine: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the tiles of all, each tile_m in ascending order. What ``fine`` alone has comes last."""
    of_all: dict[str, set[int]] = {}
    for part in (tiles, *fine.values()):
        for others, text in part.items():
            of_all.setdefault(others, set()).update(map(int, text.split()))
    return {others: " ".join(map(str, sorted(sizes))) for others, sizes in of_all.items()}


def fine_tiles(fine: dict[str, dict[str, str]]) -> Rule:
    """Return the rule that tiles in ``fine``, which has them by the register class of a decoder, are for that decoder
    and a single weight."""
    names = {
        decoder: {f"{tile_m}x{others}" for others, text in tiles.items() for tile_m in text.split()}
        for decoder, tiles in fine.items()
    }
    every = frozenset().union(*names.values())

    def excludes(v: Sm90MixedVariant) -> bool:
        config = str(v.config)
        timed = not v.grouped and not v.block_scales and config in names.get(v.weight.register_class, ())
        return config in every and not timed

    return Rule(
        "fine steps of tile_m",
        f"was built and timed for a single weight alone, of {' or '.join(fine)}, and x without scales of 128 columns",
        excludes,
    )


def stream_sums(largest_tile_k: int) -> Rule:
    """Return the rule that stream-k has no other sums; longer k-slices take a second set of warpgroups."""
    return Rule(
        "stream-k and other sums",
        "a CTA of stream-k goes from tile to tile, so that its pipeline is never drained, as the sums of several k "
        f"sets or CTAs need it: tile_k {largest_tile_k} at most, no split_k, no cluster along n",
        lambda v: (
            v.config.schedule == "stream"
            and (v.config.tile_k > largest_tile_k or v.config.cluster_n * v.config.split_k > 1)
        ),
    )


GROUPED_STREAM = Rule(
    "experts and stream-k",
    "stream-k wants to know the number of tiles beforehand",
    lambda v: v.grouped and v.stream_k,
)
CHAIN = Rule(
    "chains",
    "three CTAs or more of a cluster share one tile fewer of a single weight, each with one row block a warpgroup",
    lambda v: v.chained and (v.config.split_k < 3 or v.grouped or v.m64_atoms > 1),
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
    lambda v: v.config.cluster_m > 1 and v.config.tile_n != 128,
)
SPLIT_ROW_BLOCKS = Rule(
    "split_k of two row blocks",
    "the CTAs of a split hand over shares of one row block per warpgroup, here each has two",
    lambda v: v.m64_atoms > 1 and v.config.split_k > 1,
)
SPLIT_PINGPONG = Rule(
    "split_k of pingpong",
    "two warpgroups alternate between the output tiles of a CTA, split_k gives a CTA one tile",
    lambda v: v.config.tile_m > 128 and v.config.schedule == "pingpong" and v.config.split_k > 1,
)
SHARED_MEMORY = Rule(
    "shared memory",
    "there is no room for two stages, or for the sums that warpgroups and CTAs hand over in the drained stages",
    lambda v: not fits(v),
)
WIDE_TILES_OF_EXPERTS = Rule(
    "wide tiles of experts",
    "192 features of more than 128 tokens were not timed beside experts' rows",
    lambda v: v.grouped and v.config.tile_n == 192 and v.config.tile_m > 128,
)


def _large(v: Sm90MixedVariant) -> bool:
    """True for tiles whose registers scales of several groups and an expert's rows fill."""
    several = v.block.scale_bytes > ONE_GROUP and (v.config.tile_m, v.config.tile_n) == (256, 128)
    wide = v.weight.in_float32 and v.block.scale_bytes > 8 * ONE_GROUP and v.config.tile_m >= 192
    return v.config.tile_m > WGMMA_TOKENS or several or wide


SPACE = Space(
    with_fine_tiles(_TILES, _FINE_TILES),
    Path(__file__).with_name("legality.jsonl"),
    impossible=(
        fine_tiles(_FINE_TILES),
        GROUPED_STREAM,
        CHAIN,
        GROUPED_CLUSTER,
        GATHERED_CLUSTER,
        GATHERED_WARPS,
        MULTICAST_BLOCKS,
        SPLIT_ROW_BLOCKS,
        SPLIT_PINGPONG,
        stream_sums(128),
        SHARED_MEMORY,
    ),
    held_back=(
        WIDE_TILES_OF_EXPERTS,
        Rule(
            "large tiles of experts",
            "not timed beside experts' rows, where smaller tiles were compared with other libraries",
            lambda v: v.grouped and _large(v),
        ),
        Rule(
            "groups of 16 of experts",
            "tiles of 128 x 64 whose warpgroups alternate spill 8 to 24 bytes with 16-bit scales of so small groups",
            lambda v: (
                v.grouped
                and (v.block.scale_group, v.block.scale_bits) == (16, 16)
                and (v.config.tile_m, v.config.tile_n, v.config.schedule) == (128, 64, "pingpong")
            ),
        ),
    ),
)
"""Configs of one launch."""
