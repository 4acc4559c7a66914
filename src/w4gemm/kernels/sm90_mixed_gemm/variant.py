"""What follows from a compiled form of the kernel: sizes, threads, registers."""

from __future__ import annotations

from dataclasses import dataclass

from w4gemm.config import GemmConfig
from w4gemm.kernels import gpu
from w4gemm.kernels.device.staging import QUADS_BYTES, TOKEN_BYTES
from w4gemm.packing.block import BLOCK_K, Block

ONE_GROUP = Block().bytes
"""Bytes of a block with a single group of scales and no zero points."""

_BARRIERS_AND_ALIGNMENT = 1536
_OTHER_REGISTERS = 77
"""Besides accumulators: fragments, what is packed, addresses."""
_RESERVED = 1024  # shared memory that the system takes for each CTA


@dataclass(frozen=True)
class Variant(gpu.Variant):
    @property
    def token_parts(self) -> int:
        """Parts of the tokens that are multiplied in turn, where scales are applied to sums: two sets of sums of such a
        part must fit the registers beside the accumulators."""
        if not self.scales_on_sums:
            return 1
        registers = self.consumer_registers or min(255, 65536 // (self.threads * self.occupancy))
        room = registers - _OTHER_REGISTERS - self.config.tile_m // 2
        return next(parts for parts in (1, 2, 4, 8) if self.config.tile_m // parts <= max(room, 8))

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows that one warpgroup owns: two where four warpgroups would have too few registers each."""
        return 2 if self.config.tile_n == 256 and self.config.tile_m > 64 else 1

    @property
    def tile_blocks(self) -> int:
        """Blocks of 64 rows in a tile of the weight."""
        return self.config.tile_n // 64

    @property
    def row_groups(self) -> int:
        """Consumer warpgroups along the rows of the weight tile."""
        return self.tile_blocks // self.row_blocks

    @property
    def k_sets(self) -> int:
        """Sets of consumer warpgroups that share the k blocks of a slot: as many as there are registers for, since with
        few tokens one set alone does not keep the tensor cores busy while it decodes."""
        limit = 4 if self.occupancy == 1 and self.config.tile_m <= 64 else 2
        if self.kind == "e4m3":  # the two sets of fragment registers take turns within a slot
            return max(1, min(self.blocks // 2, limit // self.row_groups))
        return min(self.blocks, max(1, limit // self.row_groups)) if self.config.tile_m <= 128 else 1

    @property
    def persistent(self) -> bool:
        """Whether a CTA walks over tiles. It cannot where sums pass through the drained pipeline's memory. A grouped
        one must, since the host does not know how many tiles there are: its sets add up in memory of their own."""
        return self.grouped or (self.k_sets == 1 and self.config.split_k == 1)

    @property
    def fold_bytes(self) -> int:
        """Memory besides the pipeline in which the sets along k hand over their accumulators."""
        return (self.k_sets - 1) * self.tile_bytes if self.persistent else 0

    @property
    def stream(self) -> bool:
        """Whether CTAs share the k range of tiles, see device/stream_k.py."""
        return self.config.schedule == "stream"

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.row_groups * self.k_sets * self.turns

    @property
    def staging_buffers(self) -> int:
        """Warpgroups that store."""
        return self.row_groups * self.turns

    @property
    def slot_threads(self) -> int:
        """Consumer threads that read a slot."""
        return 128 * self.row_groups * self.k_sets

    @property
    def sharers(self) -> int:
        """CTAs of a cluster that share x or weights with one of them, itself included."""
        return self.config.cluster_m + self.config.cluster_n - 1

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 2 if config.schedule == "pingpong" and config.tile_m <= 128 else 1

    @property
    def turns(self) -> int:
        """Consumer warpgroups of one CTA that take turns at its tiles, so that one multiplies while another stores: the
        pingpong of tiles that are too large for two CTAs on a multiprocessor."""
        return 2 if self.config.schedule == "pingpong" and self.occupancy == 1 else 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def gather_threads(self) -> int:
        """Threads of the producer that copy x themselves."""
        return 128 if self.gathered else 0

    @property
    def blocks(self) -> int:
        """Weight blocks along k in one stage."""
        return max(1, self.config.tile_k // 128)

    @property
    def slots_per_step(self) -> int:
        """Slots that a step of the main loop goes through: two where a slot has one unit of work alone, so that the two
        sets of fragment registers take turns, and where it takes two to make a block."""
        return 2 if self.halves or self.config.tile_k * self.row_blocks == self.chunk_k else 1

    @property
    def step_blocks(self) -> int:
        """Weight blocks along k in one step."""
        return max(1, self.slots_per_step * self.config.tile_k // 128)

    @property
    def halves(self) -> bool:
        """Whether a stage holds half a block along k: 64 columns, with the scales that they need."""
        return self.config.tile_k == 64

    @property
    def part(self) -> Block:
        """The part of a block that a stage holds: all of it or, with ``halves``, its codes and scales of 64 columns."""
        return self.block.part(columns=min(self.config.tile_k, BLOCK_K))

    @property
    def weight_bytes(self) -> int:
        return self.tile_blocks * self.blocks * self.part.bytes

    @property
    def x_bytes(self) -> int:
        return self.config.tile_m * self.config.tile_k * self.itemsize

    @property
    def box_tokens(self) -> int:
        """Tokens of one TMA box, at most 64, a part of tile_m. Rows past m are slow: 31 of them in a box of 64 make a
        launch half as long again, eight cost nothing (H200, 2026-11-21). So boxes wholly past m are not fetched, and
        the last one that is reaches back; only a tile's first box has no room for that. Boxes of 32 cost nothing where
        a tile has 128 tokens; elsewhere they make full tiles 5 % slower and more."""
        if self.config.tile_m == 128:
            return 32
        return next(box for box in range(min(self.config.tile_m, 64), 0, -8) if self.config.tile_m % box == 0)

    @property
    def boxes(self) -> int:
        """TMA boxes along the tokens of a tile."""
        return self.config.tile_m // self.box_tokens

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.x_bytes

    @property
    def staging_bytes(self) -> int:
        """The epilogue's staging buffer of one warpgroup."""
        return self._staging_bytes(self.staging_tokens)

    def _staging_bytes(self, staging_tokens: int) -> int:
        return max(staging_tokens * TOKEN_BYTES, QUADS_BYTES if self.quads else 0)

    @property
    def quads(self) -> bool:
        """Whether d is stored in quads, see kernels/device/epilogue.py."""
        return self.epilogue.gated or self.epilogue.residual or self.out_kind == "f32"

    @property
    def boxed(self) -> bool:
        """Whether d leaves the staging buffer by TMA, a half of the buffer at a time, while the other is filled: worth
        it where a tile has much to store, and nothing else to do meanwhile."""
        many = self.config.tile_m in (128, 192, 256) and self.config.split_k == self.turns == 1
        return many and self.vector and not self.quads

    @property
    def stored_tokens(self) -> int:
        """Tokens of a tile that one CTA stores: with split_k its share, in whole blocks of eight, the last perhaps past
        the tile."""
        return -(-self.config.tile_m // (8 * self.config.split_k)) * 8

    @property
    def staging_tokens(self) -> int:
        """Tokens that pass through the staging buffer at a time, 16 to 128: as many as do not cost a stage. Of halves,
        five stages and a large buffer do better than six and a small one. With four warpgroups, long rounds spill."""
        most = 128 if self.warpgroups < 4 else 56
        step = 32 if self.boxed else 8
        chunks = [chunk for chunk in range(max(16, step), most + 1, step) if self.stored_tokens % chunk == 0] or [8]
        stages = self._stages_beside(chunks[0])
        if self.halves:
            stages = min(stages, 5)
        return next(chunk for chunk in reversed(chunks) if self._stages_beside(chunk) >= stages)

    @property
    def stored_at_once(self) -> int:
        """Tokens that go the way through the staging buffer together."""
        return self.staging_tokens // 2 if self.boxed else self.staging_tokens

    @property
    def short(self) -> bool:
        """Whether a launch may be so short that its first microsecond counts."""
        return self.config.tile_m <= 128 and self.config.cluster_m == 1

    @property
    def loads_early(self) -> bool:
        """Whether what a tile's sums meet (bias, scales of tokens) is asked for before the last sums are there. Where a
        CTA stores but a part of them, it would take registers meanwhile; where weights are shared, there are none."""
        return self.config.split_k == 1 and self.config.cluster_m == 1 and not self.stream

    @property
    def prefetches(self) -> tuple[bool, bool]:
        """Whether what a tile's sums meet is brought into L2 when it begins: biases and scales of features, residuals.
        From memory they would take as long as a small tile's last slot. Where weights are shared, there are no
        registers to spare for the first; with split_k, a CTA stores but some of the second."""
        features = (self.channel_scales or self.epilogue.bias) and self.config.cluster_m == 1
        return features, self.epilogue.residual and self.config.split_k == 1

    @property
    def residuals_ahead(self) -> int:
        """Blocks of eight tokens whose residuals are on their way: more where there are registers for them. Elsewhere
        another CTA or more warps hide the latency."""
        if self.row_blocks > 1:
            return 2  # with more some formats spill
        return 8 if 65536 // (self.threads * self.occupancy) > 128 else 1

    @property
    def tile_bytes(self) -> int:
        """The float32 accumulators of a tile."""
        return self.config.tile_m * self.config.tile_n * 4

    @property
    def reduction_bytes(self) -> int:
        """Accumulators that lie over the drained pipeline: those that the k sets but the first hand to it, and those
        that a CTA parks for its cluster."""
        if self.persistent:
            return 0
        return (self.k_sets - 1 + (self.config.split_k > 1)) * self.tile_bytes

    @property
    def stages(self) -> int:
        return self._stages_beside(self.staging_tokens)

    def _stages_beside(self, staging_tokens: int) -> int:
        """As many as there is room for, at most eight."""
        room = (gpu.HOPPER_SHARED_MEMORY + _RESERVED) // self.occupancy - _RESERVED - _BARRIERS_AND_ALIGNMENT
        room -= self.staging_buffers * self._staging_bytes(staging_tokens) + self.fold_bytes + self.table_bytes
        room -= self.decode_table_bytes
        return min(8, room // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, alignment included."""
        staging = self.staging_buffers * self.staging_bytes
        tables = self.table_bytes + self.decode_table_bytes
        return self.stages * self.stage_bytes + staging + self.fold_bytes + tables + _BARRIERS_AND_ALIGNMENT

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer thread asks for, 0 where the launch's own share is enough."""
        if self.occupancy == 2:
            return {1: 0, 2: 104}[self.warpgroups]
        return {1: 0, 2: 232 if self.gathered else 240, 3: 160, 4: 112}[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        """Those that a producer thread keeps: more where it copies x itself, what the consumers of a launch's share
        leave."""
        if not self.gathered:
            return 24
        return 40 if self.consumer_registers == 232 else 32
