"""What follows from the compile-time parameters of the kernel: besides work.py's numbers stages, the buffers through
which it stores d, and shared memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from w4gemm.kernels.sm90_mixed_gemm.work import WGMMA_TOKENS, Sm90MixedWork
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY, registers_of, shared_memory_of_each
from w4gemm.packing.codecs import Pairs

TOKEN_BYTES = 128
"""Bytes of one token in the staging buffer as 16-bit numbers: 64 features. Its eight vectors of 16 bytes lie in the
order vector ^ (token % 8), TMA's 128-byte swizzle, which keeps the rows of an 8x8 matrix in different banks."""

FLOAT32_ROW_BYTES = 80
"""Bytes of one token as float32 in a warp's part of the staging buffer: 16 features, and 16 bytes that keep eight
tokens in different banks."""

FLOAT32_BYTES = 4 * 8 * FLOAT32_ROW_BYTES
"""Bytes of a warpgroup's buffer for float32: eight tokens for each of its four warps."""

LEVEL_BYTES = 16
"""Prepared scales of rows g and g + 8 of a group: a factor and an addend each."""
GROUP_LEVEL_BYTES = 8 * LEVEL_BYTES
"""Prepared scales of a group, of a warp's eight pairs of rows."""
_LEAST_BOX = 24
_BARRIERS_AND_ALIGNMENT = 1536
_BARRIERS = 256
_ENOUGH_STAGES = 3
"""With two, nothing is loaded while one is multiplied and the other decoded."""
_STAGES_OF_SPLITS, _LEAST_STAGING = 4, 16
"""Stages, and tokens of a staging buffer, that memory for the sums of a split must leave."""
_SMALL_X, _SMALL_WEIGHTS = 8 * 1024, 19 * 1024
"""Bytes of a stage's x and of its weights: up to one of them, two stages are requested early."""


def _even_share(tokens: int, most: int) -> int:
    """Tokens of each of the fewest shares of at most ``most`` tokens, in whole blocks of eight."""
    return -(-tokens // (8 * -(-tokens // most))) * 8


class Prefetches(NamedTuple):
    """Operands of the epilogue that are brought into L2 when a tile begins."""

    features: bool
    """Biases and channel scales."""
    residuals: bool


@dataclass(frozen=True)
class Sm90MixedVariant(Sm90MixedWork):
    """All compile-time parameters of the kernel."""

    # --- stages

    @property
    def scale_tokens(self) -> int:
        """Tokens whose scales or sums a stage holds: TMA reads from a multiple of 16 bytes on, and an expert's rows
        begin anywhere."""
        return self.config.tile_m + (4 if self.grouped else 0)

    @property
    def row_numbers(self) -> int:
        """float32 numbers of a row of x that lie in a stage beside each weight block: a scale, or the sums over its
        scale groups."""
        return self.block.groups if self.takes_x_sums else int(self.block_scales)

    @property
    def scale_boxes(self) -> int:
        """TMA boxes of the scales of a stage's tokens."""
        return 1

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of the scales or sums of x per stage, [k block][scale group][token] in float32; what TMA writes begins
        at a multiple of 128."""
        return -(-self.scale_tokens * self.blocks_k * self.row_numbers * 4 // 128) * 128

    @property
    def copied_bytes(self) -> int:
        """Bytes of weights that are copied to a stage."""
        return self.weight_bytes

    @functools.cached_property
    def stage_bytes(self) -> int:
        """Bytes per stage."""
        return self.weight_bytes + self.x_bytes + self.block_scale_bytes

    @property
    def box_tokens(self) -> int:
        """Tokens of one TMA box: at most 64, or half of tile_m if that is over 256. It is a divisor of tile_m if there
        is one of ``_LEAST_BOX`` or more; else boxes are equal shares, the last of which the producer moves back to the
        tile's end.

        Rows past m are slow: 31 of them in a box of 64 make a launch 59 % longer, eight cost nothing (H200,
        2026-11-21). So the producer skips boxes wholly past m and moves the last box back; it cannot move a tile's
        first box. Boxes of 32 cost nothing if tile_m is 128; otherwise they make full tiles 5 % slower or more.
        """
        if self.config.tile_m == 128:
            return 32
        if self.config.tile_m > WGMMA_TOKENS:
            return self.config.tile_m // 2
        box = next(box for box in range(min(self.config.tile_m, 64), 0, -8) if self.config.tile_m % box == 0)
        return box if box >= min(self.config.tile_m, _LEAST_BOX) else _even_share(self.config.tile_m, 64)

    @property
    def boxes(self) -> int:
        """Number of TMA boxes along the tokens of a tile."""
        return -(-self.config.tile_m // self.box_tokens)

    @property
    def levels_bytes(self) -> int:
        """Prepared scales of a warp's rows in a packed block."""
        return self.stage_block.groups * GROUP_LEVEL_BYTES if self.shares_levels else 0

    @property
    def levels_in_staging(self) -> bool:
        """True if prepared scales lie in the warpgroup's staging buffer, which is idle while a tile is multiplied."""
        return self.shares_levels and self.k_sets == 1

    @property
    def all_levels_bytes(self) -> int:
        """Shared memory for prepared scales of all consumer warps, if these do not lie in staging buffers."""
        return 0 if self.levels_in_staging else 4 * self.warpgroups * self.levels_bytes

    # --- epilogue

    @property
    def float32_staging(self) -> bool:
        """True if d passes the staging buffer as float32, see epilogue.py."""
        return self.epilogue.gated or self.epilogue.residual or self.out_kind == "f32"

    @property
    def boxed(self) -> bool:
        """True if TMA stores d from one half of the staging buffer while the other is filled: if a tile has much to
        store, and its CTA nothing else to do meanwhile."""
        many = self.config.tile_m in (128, 192, 256) and self.config.split_k == self.pingpong_warpgroups == 1
        return many and self.vector and not self.float32_staging

    @property
    def staging_buffers(self) -> int:
        """Number of warpgroups that store."""
        return self.warpgroups_n * self.pingpong_warpgroups

    @property
    def stored_tokens(self) -> int:
        """Tokens of a tile that one CTA stores: all, or with split_k its share in whole blocks of eight, the last of
        which can reach past the tile."""
        return -(-self.config.tile_m // (8 * (1 if self.chained else self.config.split_k))) * 8

    @functools.cached_property
    def staging_tokens(self) -> int:
        """Tokens that the staging buffer holds, 16 to 128: as many as do not cost a stage.

        Stages of half a block do better with five of them and a large buffer than with six and a small one. With four
        warpgroups, long rounds spill. Boxes of eight tokens are worth a third stage, but not a fourth. Tiles of more
        than 256 tokens take three rounds, the last of which may be short.
        """
        if self.config.tile_m > WGMMA_TOKENS:
            return -(-self.config.tile_m // (3 * 16)) * 16
        most = 128 if self.warpgroups < 4 else 56
        step = 32 if self.boxed else 8
        sizes = [size for size in range(max(16, step), most + 1, step) if self.stored_tokens % size == 0]
        if not sizes:  # the last round is short
            sizes = [8] if self.stored_tokens <= 16 else [16, _even_share(self.stored_tokens, most)]
        if self.boxed and self._stages_beside(sizes[0]) < _ENOUGH_STAGES:
            sizes.insert(0, 16)
        stages = self._stages_beside(sizes[0])
        if self.half_block_stages:
            stages = min(stages, 5)
        return next(size for size in reversed(sizes) if self._stages_beside(size) >= stages)

    @property
    def tokens_per_round(self) -> int:
        """Tokens that pass through the staging buffer together."""
        return self.staging_tokens // 2 if self.boxed else self.staging_tokens

    @property
    def loads_early(self) -> bool:
        """True if the epilogue's operands are loaded before the last sums are there. With split_k, where a CTA stores
        only part of a tile, they would occupy registers meanwhile; with cluster_m > 1 there are no registers left."""
        return self.config.split_k == 1 and self.config.cluster_m == 1 and not self.stream_k

    @property
    def prefetches(self) -> Prefetches:
        """Operands that are brought into L2 when a tile begins. From memory they would take as long as a small tile's
        last stage. With cluster_m > 1 there are no registers for the features' operands; with split_k a CTA stores only
        some of the tokens."""
        features = (self.channel_scales or self.epilogue.bias) and self.config.cluster_m == 1
        return Prefetches(features, self.epilogue.residual and self.config.split_k == 1)

    @property
    def residuals_ahead(self) -> int:
        """Blocks of eight tokens whose residuals are in flight: more if there are registers for them. Otherwise another
        CTA or more warps hide the latency."""
        if self.m64_atoms > 1:
            return 2  # with more some formats spill
        return 8 if registers_of(self.threads * self.occupancy) > 128 else 1

    # --- shared memory, in bytes per CTA

    @property
    def staging_bytes(self) -> int:
        """The epilogue's staging buffer of one warpgroup."""
        return self._staging_bytes(self.staging_tokens)

    def _staging_bytes(self, staging_tokens: int) -> int:
        levels = 4 * self.levels_bytes if self.levels_in_staging else 0
        return max(staging_tokens * TOKEN_BYTES, FLOAT32_BYTES if self.float32_staging else 0, levels)

    @property
    def accumulator_bytes(self) -> int:
        """The float32 accumulators of a tile."""
        return self.config.tile_m * self.config.tile_n * 4

    @property
    def k_set_bytes(self) -> int:
        """Memory besides the pipeline through which the k sets reduce."""
        return (self.k_sets - 1) * self.accumulator_bytes if self.persistent or self.chained else 0

    @property
    def share_bytes(self) -> int:
        """The sums that another CTA of a split or chain hands over: float32, of the tokens that a CTA stores."""
        return self.stored_tokens * self.config.tile_n * 4 if self.config.split_k > 1 else 0

    @functools.cached_property
    def handover_bytes(self) -> int:
        """Memory besides the pipeline in which the other CTAs of a split store their sums. 0 if it would cost one of
        four stages: they then store over the drained pipeline, for which they wait. A chain has no such time."""
        if self.chained:
            return self.share_bytes
        size = (self.config.split_k - 1) * self.share_bytes
        beside = self._memory - self.staging_buffers * self._staging_bytes(_LEAST_STAGING)
        enough = min(_STAGES_OF_SPLITS, beside // self.stage_bytes)
        return size if (beside - size) // self.stage_bytes >= enough else 0

    @property
    def reduction_bytes(self) -> int:
        """Accumulators in the drained pipeline's memory: those of all k sets but the first and, when these have been
        read, those that the other CTAs of a split store."""
        if self.persistent or self.chained:
            return 0
        of_splits = 0 if self.handover_bytes else (self.config.split_k - 1) * self.share_bytes
        return max((self.k_sets - 1) * self.accumulator_bytes, of_splits)

    @functools.cached_property
    def num_stages(self) -> int:
        """Number of stages: as many as there is room for, at most eight."""
        return self._stages_beside(self.staging_tokens)

    @property
    def early_stages(self) -> int:
        """Stages whose weights a dense product requests before x may be read. The first copy of x queues up behind
        them, so one is enough, except in streams, and where a stage has little x beside its weights and is small: there
        a second one gains 1 to 5 %, elsewhere it costs as much. A third gains nothing (H200, 2026-11-26). Beside a
        table of float32 numbers ptxas orders the main loop worse then, which costs q4_k 13 % (2026-11-27)."""
        if self.pairs is Pairs.FLOATS:
            return 1
        little_x = self.x_bytes <= self.weight_bytes
        small = self.x_bytes <= _SMALL_X or self.weight_bytes <= _SMALL_WEIGHTS
        return 2 if self.stream_k or (little_x and small) else 1

    @property
    def weights_first(self) -> bool:
        """True if the first weights are requested before the warps of a CTA have met: if k is split, 0.992 of the time.
        Without it takes 1.007, and 1.01 if CTAs are persistent (H200, 2026-11-30)."""
        return self.config.split_k > 1 and not self.chained

    @property
    def tile_ahead(self) -> bool:
        """True if the producer works out the next tile before x may be read, or while the last one is multiplied: 0.985
        of the time where there is one consumer warpgroup. With more ptxas orders their instructions otherwise, up to
        1.045 (H200, 2026-11-30)."""
        return self.persistent and not self.grouped and self.warpgroups == 1

    def _stages_beside(self, staging_tokens: int) -> int:
        room = self._memory - self.handover_bytes - self.staging_buffers * self._staging_bytes(staging_tokens)
        return min(8, room // self.stage_bytes)

    @functools.cached_property
    def _other_bytes(self) -> int:
        """Memory besides stages, staging buffers and what the CTAs of a split hand over."""
        tables = self.decode_table_bytes + self.all_levels_bytes
        return self.k_set_bytes + tables + self.lasting_bytes + _BARRIERS_AND_ALIGNMENT

    @property
    def lasting_bytes(self) -> int:
        """The expert map or, of two widths, both, and the barriers of the other one."""
        return self.widths * self.expert_map_bytes + (self.widths - 1) * _BARRIERS

    @property
    def changing_bytes(self) -> int:
        """Shared memory of either of two widths."""
        return self.shared_bytes - self.lasting_bytes - _BARRIERS

    @functools.cached_property
    def _memory(self) -> int:
        """Memory for stages, staging buffers and what the CTAs of a split hand over."""
        return shared_memory_of_each(HOPPER_SHARED_MEMORY, self.occupancy) - self._other_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory per CTA, alignment included."""
        staging = self.staging_buffers * self.staging_bytes
        return self.num_stages * self.stage_bytes + staging + self.handover_bytes + self._other_bytes
