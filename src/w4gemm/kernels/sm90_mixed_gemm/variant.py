"""Sizes, threads and registers that follow from one compiled variant of the kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from w4gemm.core.config import GemmConfig
from w4gemm.kernels import gpu
from w4gemm.kernels.device.staging import FLOAT32_BYTES, TOKEN_BYTES
from w4gemm.kernels.space import Sizes
from w4gemm.packing.block import BLOCK_K, BLOCK_N, Block
from w4gemm.packing.codecs import INT4_TWO_LEVELS_MMA16, INT4_WIDE_MMA16, CodebookCodec
from w4gemm.packing.codecs.pairs import Pairs

ONE_GROUP = Block().bytes
"""Bytes of a block with a single group of scales and no zero points."""

_BARRIERS_AND_ALIGNMENT = 1536
_OTHER_REGISTERS = 77
"""Registers besides the accumulators: fragments, packed words, addresses."""
_RESERVED = 1024  # shared memory that the system takes for each CTA
_FEW_TOKENS = 64
"""The largest tile_m of which decoding decides the time."""


class Prefetches(NamedTuple):
    """Operands of the epilogue that are brought into L2 when a tile begins."""

    features: bool
    """Biases and channel scales."""
    residuals: bool


@dataclass(frozen=True)
class Variant(gpu.Variant):
    # --- warps

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 2 if config.schedule == "pingpong" and config.tile_m <= 128 else 1

    @staticmethod
    def m64_atoms_of(config: GemmConfig | Sizes) -> int:
        """Number of 64-row blocks of the weight that one warpgroup owns: two if four warpgroups would have too few
        registers each."""
        return 2 if config.tile_n == 256 and config.tile_m > 64 else 1

    @property
    def m64_atoms(self) -> int:
        """:meth:`m64_atoms_of` this one's config."""
        return self.m64_atoms_of(self.config)

    @property
    def blocks_n(self) -> int:
        """Number of 64-row blocks of the weight in a tile."""
        return self.config.tile_n // BLOCK_N

    @property
    def warpgroups_n(self) -> int:
        """Number of consumer warpgroups along the features of a tile."""
        return self.blocks_n // self.m64_atoms

    @property
    def k_sets(self) -> int:
        """Number of sets of consumer warpgroups that divide the k blocks of a stage: as many as there are registers
        for, because with few tokens one set cannot keep the tensor cores busy while it decodes."""
        limit = 4 if self.occupancy == 1 and self.config.tile_m <= 64 else 2
        if self.kind == "e4m3":  # both fragment buffers are used within a stage
            return max(1, min(self.blocks_k // 2, limit // self.warpgroups_n))
        return min(self.blocks_k, max(1, limit // self.warpgroups_n)) if self.config.tile_m <= 128 else 1

    @property
    def pingpong_warpgroups(self) -> int:
        """Number of consumer warpgroups of one CTA that alternate between its tiles, so that one multiplies while
        another stores: two if schedule is pingpong and a tile is too large for two CTAs per multiprocessor."""
        return 2 if self.config.schedule == "pingpong" and self.occupancy == 1 else 1

    @property
    def warpgroups(self) -> int:
        """Number of consumer warpgroups."""
        return self.warpgroups_n * self.k_sets * self.pingpong_warpgroups

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128 * (self.warpgroups + 1)

    @property
    def stage_readers(self) -> int:
        """Number of consumer threads that read a stage."""
        return 128 * self.warpgroups_n * self.k_sets

    @property
    def gather_threads(self) -> int:
        """Number of producer threads that copy x by cp.async."""
        return 128 if self.gathered else 0

    @property
    def multicast_peers(self) -> int:
        """Number of CTAs of a cluster that share x or weights with one CTA, itself included."""
        return self.config.cluster_m + self.config.cluster_n - 1

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread; 0 if an equal share of the register file is enough."""
        if self.occupancy == 2:
            return {1: 0, 2: 104}[self.warpgroups]
        return {1: 0, 2: 232 if self.gathered else 240, 3: 160, 4: 112}[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        """Registers per producer thread; more if it copies x itself, as far as the consumers leave any."""
        if not self.gathered:
            return 24
        return 40 if self.consumer_registers == 232 else 32

    # --- work tiles

    @property
    def persistent(self) -> bool:
        """True if a CTA loops over output tiles.

        A dense CTA cannot if sums pass through the drained pipeline's memory. A grouped CTA must, because the host does
        not know the number of tiles; its k sets then reduce through memory of their own.
        """
        return self.grouped or (self.k_sets == 1 and self.config.split_k == 1)

    @property
    def stream_k(self) -> bool:
        """True if CTAs divide tiles along k, see device/stream_k.py."""
        return self.config.schedule == "stream"

    @property
    def short(self) -> bool:
        """True if a launch can be so short that its first microsecond counts."""
        return self.config.tile_m <= 128 and self.config.cluster_m == 1

    # --- stages

    @property
    def half_block_stages(self) -> bool:
        """True if a stage holds half a block along k: 64 columns and their scales."""
        return self.config.tile_k == 64

    @property
    def stage_block(self) -> Block:
        """The part of a block that a stage holds: all of it, or half if ``half_block_stages``."""
        return self.block.sub_block(columns=min(self.config.tile_k, BLOCK_K))

    @property
    def blocks_k(self) -> int:
        """Number of weight blocks along k in a stage."""
        return max(1, self.config.tile_k // BLOCK_K)

    @property
    def stages_per_iteration(self) -> int:
        """Stages per main-loop iteration: 2 if a stage holds half a block (tile_k = 64) or a single MMA batch
        (tile_k * m64_atoms == chunk_k), so that both fragment buffers are used in turn; else 1."""
        return 2 if self.half_block_stages or self.config.tile_k * self.m64_atoms == self.chunk_k else 1

    @property
    def blocks_k_per_iteration(self) -> int:
        """Number of weight blocks along k in one main-loop iteration."""
        return max(1, self.stages_per_iteration * self.config.tile_k // BLOCK_K)

    @property
    def token_splits(self) -> int:
        """Number of ranges of tokens that are multiplied one after the other if sums are promoted: two sets of
        sums of one range must fit into the registers beside the accumulators."""
        if not self.promotes:
            return 1
        registers = self.consumer_registers or min(255, 65536 // (self.threads * self.occupancy))
        room = registers - _OTHER_REGISTERS - self.config.tile_m // 2
        return next(splits for splits in (1, 2, 4, 8) if self.config.tile_m // splits <= max(room, 8))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights per stage."""
        return self.blocks_n * self.blocks_k * self.stage_block.bytes

    @property
    def x_bytes(self) -> int:
        """Bytes of x per stage."""
        return self.config.tile_m * self.config.tile_k * self.itemsize

    @property
    def scale_tokens(self) -> int:
        """Tokens whose scales a stage holds: TMA reads from a multiple of 16 bytes on, and an expert's rows begin
        anywhere."""
        return self.config.tile_m + (4 if self.grouped else 0)

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of the scales of x per stage, [k block][token] in float32; what TMA writes begins at a multiple of
        128."""
        return -(-self.scale_tokens * self.blocks_k * 4 // 128) * 128 if self.block_scales else 0

    @functools.cached_property
    def stage_bytes(self) -> int:
        """Bytes per stage."""
        return self.weight_bytes + self.x_bytes + self.block_scale_bytes

    @property
    def box_tokens(self) -> int:
        """Tokens of one TMA box: at most 64, a divisor of tile_m.

        Rows past m are slow: 31 of them in a box of 64 make a launch 59 % longer, eight cost nothing (H200,
        2026-11-21). So the producer skips boxes wholly past m and moves the last box back; it cannot move a tile's
        first box. Boxes of 32 cost nothing if tile_m is 128; otherwise they make full tiles 5 % slower or more.
        """
        if self.config.tile_m == 128:
            return 32
        return next(box for box in range(min(self.config.tile_m, 64), 0, -8) if self.config.tile_m % box == 0)

    @property
    def boxes(self) -> int:
        """Number of TMA boxes along the tokens of a tile."""
        return self.config.tile_m // self.box_tokens

    @property
    def pairs(self) -> Pairs | None:
        """Codebooks and what is formed in float32 have a table where decoding decides the time: with more tokens the
        tensor cores do, and a table would take the memory of a stage."""
        codec = self.weight.codec
        if self.config.tile_m > _FEW_TOKENS:
            return None
        if isinstance(codec, CodebookCodec) and self.weight.scale == self.kind:
            return Pairs.HALVES
        wide = isinstance(codec, CodebookCodec) or codec in (INT4_WIDE_MMA16, INT4_TWO_LEVELS_MMA16)
        return Pairs.FLOATS if wide else None

    # --- epilogue

    @property
    def float32_staging(self) -> bool:
        """True if d passes the staging buffer as float32, see device/epilogue_store.py."""
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
        return -(-self.config.tile_m // (8 * self.config.split_k)) * 8

    @functools.cached_property
    def staging_tokens(self) -> int:
        """Tokens that the staging buffer holds, 16 to 128: as many as do not cost a stage.

        Stages of half a block do better with five of them and a large buffer than with six and a small one. With four
        warpgroups, long rounds spill.
        """
        most = 128 if self.warpgroups < 4 else 56
        step = 32 if self.boxed else 8
        sizes = [size for size in range(max(16, step), most + 1, step) if self.stored_tokens % size == 0] or [8]
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
        return 8 if 65536 // (self.threads * self.occupancy) > 128 else 1

    # --- shared memory, in bytes per CTA

    @property
    def staging_bytes(self) -> int:
        """The epilogue's staging buffer of one warpgroup."""
        return self._staging_bytes(self.staging_tokens)

    def _staging_bytes(self, staging_tokens: int) -> int:
        return max(staging_tokens * TOKEN_BYTES, FLOAT32_BYTES if self.float32_staging else 0)

    @property
    def accumulator_bytes(self) -> int:
        """The float32 accumulators of a tile."""
        return self.config.tile_m * self.config.tile_n * 4

    @property
    def k_set_bytes(self) -> int:
        """Memory besides the pipeline through which the k sets reduce."""
        return (self.k_sets - 1) * self.accumulator_bytes if self.persistent else 0

    @property
    def reduction_bytes(self) -> int:
        """Accumulators in the drained pipeline's memory: those of all k sets but the first, and with split_k those that
        a CTA stores for its cluster."""
        if self.persistent:
            return 0
        return (self.k_sets - 1 + (self.config.split_k > 1)) * self.accumulator_bytes

    @functools.cached_property
    def stages(self) -> int:
        """Number of stages: as many as there is room for, at most eight."""
        return self._stages_beside(self.staging_tokens)

    def _stages_beside(self, staging_tokens: int) -> int:
        room = self._room - self.staging_buffers * self._staging_bytes(staging_tokens)
        return min(8, room // self.stage_bytes)

    @functools.cached_property
    def _room(self) -> int:
        """Bytes for stages and staging buffers."""
        room = (gpu.HOPPER_SHARED_MEMORY + _RESERVED) // self.occupancy - _RESERVED - _BARRIERS_AND_ALIGNMENT
        return room - self.k_set_bytes - self.expert_map_bytes - self.decode_table_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory per CTA, alignment included."""
        staging = self.staging_buffers * self.staging_bytes
        tables = self.expert_map_bytes + self.decode_table_bytes
        return self.stages * self.stage_bytes + staging + self.k_set_bytes + tables + _BARRIERS_AND_ALIGNMENT
