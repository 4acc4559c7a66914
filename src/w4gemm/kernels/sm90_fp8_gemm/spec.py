"""Host side of the W4A8 kernel: its configs. All else is sm90_mixed_gemm's."""

from __future__ import annotations

from pathlib import Path

import torch

from w4gemm.kernels.sm90_mixed_gemm import space as mixed
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
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
    "128x128_1x1x1_stream": "96 112 128 144 160",
    "128x256_1x1x1_stream": "40 48 56 64 80 96 112 120 128 168",
}
"""By a config's string without tile_m, each tile_m; see the W4A16 kernel's. tile_k 128 is for many tokens, and for sums
that have one set of registers."""


_MORE_SPLITS = {
    "64x256_1x1x1_coop_k3": "8 16 24 32 40 48 56 64 72 80 88 96 104 112 128",
    "64x256_1x1x1_coop_k4": "8 16 24 32 40 48 56 64 72 80 88 96 104 112 128",
    "64x256_1x1x1_coop_k5": "8 16 24 32 40 48 56 64 72 80 96",
    "64x512_1x1x1_coop_k3": "8 16 24 32 40 48 56 64",
    "128x256_1x1x1_coop_k3": "8 16 24 32 40 48 56 64 72 80 88 96 104 112 128",
    "128x256_1x1x1_coop_k5": "24 32 40 48 56 72 80 96",
    "192x256_1x1x1_coop_k4": "8 16 24 32 40 48 64 72 80",
}
"""Splits of more than two CTAs, for layers whose tiles leave multiprocessors idle: 0.76 to 0.99 of the time at 101 of
106 drawn points where they were predicted to be near (H200, 2026-11-30). They were timed with the decoders below. With
scales on sums 56 tokens of 192 features take half as long again as 48 or 64 do."""


_CHAINS = {
    "64x256_1x1x1_chain_k3": "72 80 88 96 104 112 128",
    "64x256_1x1x1_chain_k4": "72 80 88 96 104 112 128",
    "128x256_1x1x1_chain_k3": "24 32 40 48 56 64 72 80 88 96 104 112 128",
    "128x256_1x1x1_chain_k4": "24 40 56 72 80 88 96 104 112",
}
"""For as many tiles as fill over half of a GPU: 4,225 to 5,760 features in tiles of 64, 8,449 to 11,520 in tiles of
128. Tiles of 64 features with fewer tokens, and of 128 with more, were not faster (H200, 2026-12-01)."""


_FINE_TILES = {
    "up to 4 bits, 0 registers, scales on sums": {
        "64x128_1x1x1_coop_k2": "136 144 160 168 176",
        "64x128_1x1x1_coop_k3": "136 144 160 176",
        "64x256_1x1x1_coop": "88 104",
        "64x256_1x1x1_coop_k2": "88 104",
        "128x128_1x1x1_coop": "136 152",
        "128x128_1x1x1_coop_k2": "136 144 152 160 168",
        "128x128_1x1x1_coop_k3": "136 144 152 160 168",
        "128x128_1x1x1_stream": "136 152 168",
        "128x256_1x1x1_coop": "88 104",
        "128x256_1x1x1_coop_k2": "72 80 88 96 104 112",
        "192x128_1x1x1_coop": "104",
        "128x256_1x1x1_stream": "72 88 104",
        **_MORE_SPLITS,
        **_CHAINS,
        "64x128_1x1x1_chain_k4": "136 144 160",
    },
    "up to 4 bits, 0 registers, table rows of 16 bytes": {
        "64x128_1x1x1_coop": "136",
        "64x256_1x1x1_coop": "104 136 144 160 176",
        "64x256_1x1x1_coop_k2": "136 144 160 176",
        "128x128_1x1x1_coop_k2": "152 176",
        "128x256_1x1x1_coop": "176",
        "128x256_1x1x1_coop_k2": "72 80 88 96 104 112 136 144 152 160 168 176",
        "192x128_1x1x1_coop": "176",
        "192x256_1x1x1_coop": "152",
        "192x256_1x1x1_coop_k2": "88",
        "256x128_1x1x1_coop": "104",
        "128x256_1x1x1_stream": "88 136 144 152 160",
        **_MORE_SPLITS,
        **_CHAINS,
        "128x256_1x1x1_coop_k3": _MORE_SPLITS["128x256_1x1x1_coop_k3"] + " 136 144 160",
        "192x256_1x1x1_coop_k4": "8 16 24 32 40 48 56 64 72 80",
    },
}
"""See the W4A16 kernel's. Tiles of 136 to 176 tokens, also of streams and splits, decode a weight once where two tiles
of half as many decode it twice: 0.97 (scales on sums) and 0.95 (folded) of the time at 60 held-out points of 129 to 333
tokens whose choice they changed, at best 0.84 (H200, 2026-11-30)."""


_FLOAT_ZEROS = {
    "64x256_1x1x1_coop_k2": "8 16 32 64 96 128",
    "64x512_1x1x1_coop": "8 16 32 64",
    "64x512_1x1x1_coop_k2": "8 16",
    "128x256_1x1x1_coop": "32 48 64 80 96 112 128",
    "128x256_1x1x1_coop_k2": "64 128",
    "128x128_1x1x1_coop": "128 152 168",
    "128x256_1x1x1_stream": "64 96 128",
}
"""Those that were built and timed beside float zero points."""
_BESIDE_FLOATS = {f"{tile_m}x{others}" for others, text in _FLOAT_ZEROS.items() for tile_m in text.split()}


def _held_back(v: Sm90MixedVariant) -> bool:
    if not v.scales_on_sums or v.block.scale_bytes <= mixed.ONE_GROUP or v.one_factor_a_sum:
        return False
    slow = v.occupancy == 2 or (v.warpgroups == 4 and (v.grouped or v.block_scales))
    square = v.block_scales and (v.config.tile_m, v.config.tile_n, v.config.schedule) == (128, 128, "coop")
    return (slow and v.config.tile_m > 16) or v.config.cluster_m > 1 or square


_SPACE = Space(
    mixed.with_fine_tiles(_TILES, _FINE_TILES),
    Path(__file__).with_name("legality.jsonl"),
    impossible=(
        mixed.fine_tiles(_FINE_TILES),
        Rule(
            "float zero points",
            "was not built beside the sums of x that float zero points meet",
            lambda v: v.takes_x_sums and str(v.config) not in _BESIDE_FLOATS,
        ),
        mixed.GROUPED_STREAM,
        mixed.CHAIN,
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
            "scale group, and rows of x without scales of their own unless rows of the weight share theirs; others "
            "take tile_k 256",
            lambda v: (
                v.one_set_of_sums
                and (v.m64_atoms > 1 or v.block.groups > 1 or (v.block_scales and not v.one_factor_a_sum))
            ),
        ),
        Rule(
            "blocks for each k set",
            "with tile_k over 128 each set of warpgroups takes two weight blocks of a k-slice",
            lambda v: v.config.tile_k > 128 and v.blocks_k != 2 * v.k_sets,
        ),
        mixed.SHARED_MEMORY,
    ),
    held_back=(
        mixed.WIDE_TILES_OF_EXPERTS,
        Rule(
            "sums of several groups",
            "with scales on sums: two CTAs a multiprocessor and more than 16 tokens took 3 to 26 % longer than what "
            "the model ranks behind; four warpgroups were not timed beside experts' rows, and took 1 to 2 % longer "
            "beside scales of x, and 128 x 128 took 15 % longer there",
            _held_back,
        ),
    ),
)
"""Configs of one launch."""


class Sm90Fp8Gemm(Sm90MixedGemm):
    """W4A8 on SM90, e4m3 activations: any m, n, k, every format. Scales are applied to the float32 sums of a group;
    e4m3 ones to the weights, which are then rounded to e4m3. Scales for each 128 columns of a row of x are applied to
    the sums of these columns. Float zero points meet sums of x, which a launch in front adds up."""

    name = "sm90_fp8_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    revision = 2
    space = _SPACE
    block_scales = True
    half_steps = True
    launch_pairs = (
        *(f"{m}x256x256_1x1x1_coop+{m}x192x256_1x1x1_coop" for m in (24, 32, 40, 48, 64)),
        *(f"{m}x128x256_1x1x1_coop+{m}x64x512_1x1x1_coop" for m in (40, 48, 56, 64)),
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
    width_pairs = ()
