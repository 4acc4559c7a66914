"""The main loop: :class:`Mainloop` decodes and multiplies the stages of a tile. kernel.py has the facts: memory,
barriers, registers, the order of MMA batches.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.sm90_mixed_gemm.shared_levels import LevelLane, SharedLevels
from w4gemm.kernels.sm90_mixed_gemm.tile_scheduler import Pipeline, TileScheduler
from w4gemm.kernels.sm90_mixed_gemm.values import ConsumerCoord, GroupSums, MmaOperands, StageState, flattened
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.packing.block import HALF_K
from w4gemm.ptx.arithmetic import hidden_constant, kept
from w4gemm.ptx.memory import fence_proxy_async


class Mainloop:
    """Multiplies stages, for one variant.

    A thread holds one packed block at a time: its code words, then the scale words of each run (one or two scale
    groups), then the factors if there are any. Of codes of more than four bits it holds those of one k chunk at a time,
    because those of a block would take too many registers.
    """

    def __init__(self, variant: Sm90MixedVariant, scheduler: TileScheduler, decoder: Any):
        self.variant, self.scheduler = variant, scheduler
        self.decoder = decoder
        self.block = variant.stage_block
        """A packed block: the part of a weight block that a stage holds, all 128 columns or 64."""
        self.reader = BlockReader(self.block, variant.weight.codec.turns)
        self.levels = SharedLevels(variant, decoder)
        self.k_chunks = variant.config.tile_k // variant.chunk_k
        """K chunks of 128 bytes of x in a stage."""
        self.chunks_per_block = self.block.columns // variant.chunk_k
        self.chunks_per_load = self.chunks_per_block if self.block.bits <= 4 else 1
        """K chunks whose codes a thread loads together."""
        self.code_words = self.block.lane_words * self.chunks_per_load // self.chunks_per_block
        """Code words that a thread holds."""
        self.groups = self.block.groups
        """Scale groups of a packed block."""

    @property
    def holds(self) -> bool:
        """True if registers hold what loads and scales of two levels need in each block."""
        return self.variant.holds_words and self.decoder.held_word is not None

    @property
    def packed_words(self) -> int:
        """Words of a packed block that a thread holds."""
        if self.variant.shares_levels:
            return self.code_words
        return self.code_words + self.block.runs * self.block.words_per_scale + self.block.factors

    def operands(
        self, mma: cute.TiledMma, thr_mma: Any, acc: cute.Tensor, s_x: cute.Tensor, register: Int32, levels: Int32
    ) -> MmaOperands:
        """The operands of a consumer thread, with registers for packed and decoded weights. acc: its accumulators.
        register: address of the decoder's table, if it has one. levels: address of scales that lanes share."""
        variant, splits = self.variant, self.variant.token_splits
        tiles = [
            cute.local_tile(s_x, (variant.config.tile_m // splits, variant.chunk_k), (i, 0, None))
            for i in range(splits)
        ]
        x = [mma.make_fragment_B(thr_mma.partition_B(tile)) for tile in tiles]
        shape = thr_mma.partition_shape_A((64 * variant.warpgroups_n, 2 * variant.chunk_k))
        fragment = cute.make_rmem_tensor(shape, mma.op.a_dtype)
        packed = cute.make_rmem_tensor((self.packed_words,), Int32)
        accumulators = self.accumulators(acc)
        offsets = None
        if self.holds:
            register = kept(hidden_constant(self.decoder.held_word))
            offsets = self.reader.offsets(cute.arch.thread_idx()[0] % 128)
        lane = self.levels.lane(register, levels) if variant.shares_levels else None
        return MmaOperands(accumulators, fragment, x, packed, register, offsets, lane)

    def accumulators(self, acc: cute.Tensor) -> Any:
        """One operand for each 64-row block or range of tokens: ranges of the registers, one after the other."""
        flat, count = flattened(acc), self.variant.m64_atoms * self.variant.token_splits
        layout = cute.make_layout((*acc.shape[:1], 1, 1))
        parts = [cute.make_tensor(flat.iterator + r * (cute.size(flat) // count), layout) for r in range(count)]
        return parts if count > 1 else [acc]

    def group_sums(self, thr_mma: Any) -> GroupSums | None:
        """Registers for sums that are promoted; None if none are."""
        return None

    def load_packed(
        self,
        operands: MmaOperands,
        pipeline: Pipeline,
        stage: Int32,
        number: int,
        consumer: ConsumerCoord,
        begins: bool = True,
    ) -> None:
        """Load codes of one of this k set's packed blocks into registers, with the first of a block its scales too.
        number: which of the warpgroup's loads in the stage, counted over a block's k chunks first, then over its 64-row
        blocks, then along k."""
        variant, thread = self.variant, consumer.thread
        packed_block, part = divmod(number, self.chunks_per_block // self.chunks_per_load)
        block, atom = divmod(packed_block, variant.m64_atoms)
        row = (consumer.warpgroup * variant.m64_atoms + atom) * variant.blocks_k
        index = row + consumer.k_set * (variant.blocks_k // variant.k_sets) + block
        address = pipeline.weights + stage * variant.weight_bytes + index * self.block.bytes
        offsets = operands.offsets
        pair: Int32 | int = 0 if self.holds else thread // 32 * 8 + thread % 32 // 4
        words: list[Int32] = []
        halves = self.chunks_per_load * variant.chunk_k // HALF_K
        for half in range(part * halves, (part + 1) * halves):
            words += self.reader.codes(address, half, lane=thread, offsets=offsets)
        if part == 0 and operands.lane is not None:
            self.levels.store(operands.lane, address, begins)
        elif part == 0:
            for run in range(self.block.runs):
                first = self.block.scales_at(run * self.block.groups_per_word)
                words += self.reader.scales(address + first, pair=pair, offsets=offsets)
            words += self.reader.factors(address + self.block.code_bytes, pair=pair, offsets=offsets)
        for i, word in enumerate(words):
            operands.packed[i] = word

    def decode_chunk(
        self,
        packed: cute.Tensor,
        fragment: cute.Tensor,
        chunk: int,
        buffer: int,
        register: Int32,
        lane: LevelLane | None = None,
    ) -> None:
        """Decode a k chunk of a packed block into one of the two buffers of ``fragment``."""
        registers = cute.recast_tensor(fragment, Int32)
        count = self.code_words // self.chunks_per_load
        at = chunk % self.chunks_per_load * count
        codes = [packed[i] for i in range(at, at + count)]
        prepared: Any = None
        step_k = self.variant.chunk_k // 4
        for step in range(4):
            group, column = divmod(chunk * self.variant.chunk_k + step * step_k, self.block.scale_group)
            if step == 0 or column == 0:
                field = group % self.block.groups_per_word
                if lane is None:
                    prepared = self.decoder.prepare(self.scale_words(packed, group), register, field)
                else:
                    prepared = self.levels.load(lane, group)
            values = self.decoder.decode(self.reader.words_of_step(codes, step), prepared)
            for r, value in enumerate(values):
                registers[(0, r % 2, r // 2), 0, buffer * 4 + step] = value

    def scale_words(self, packed: cute.Tensor, group: int) -> tuple[Int32, ...]:
        """The words of a group's scales in what is packed, and those of the block's factors."""
        width = self.block.words_per_scale
        first = self.code_words + group // self.block.groups_per_word * width
        factors = range(self.code_words + self.block.runs * width, self.packed_words)
        return tuple(packed[i] for i in (*range(first, first + width), *factors))

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
        sums: GroupSums | None,
        state: PipelineState,
        k_slices: Int32,
        consumer: ConsumerCoord,
    ) -> tuple[PipelineState, Int32]:
        """Multiply the k-slices of a work tile, which begin at ``state``. Return the state behind them, and their last
        stage: unless sums are promoted, its last MMA batch is in flight and it is not released yet."""
        variant = self.variant
        if k_slices > 0:
            self.wait_full(pipeline, state)
            self.begin(operands, sums, pipeline, state.stage, consumer)
        previous = state.stage
        for i in cutlass.range(k_slices // variant.stages_per_iteration, unroll=1):
            for number in cutlass.range_constexpr(variant.stages_per_iteration):
                current, state = state.stage, state.after(variant.num_stages)
                done = i * variant.stages_per_iteration + number
                stage_state = self.stage_state(current, state, previous, number, done > 0, done + 1 < k_slices)
                self.multiply_stage(mma, pipeline, operands, sums, stage_state, consumer, number)
                previous = current
        return state, previous

    def stage_state(
        self,
        stage: Int32,
        next_state: PipelineState,
        previous: Int32,
        number: int,
        has_previous: Boolean,
        has_next: Boolean,
    ) -> StageState:
        """A stage, number ``number`` of a main-loop iteration. An iteration of a superblock has all of its stages."""
        last = self.variant.stages_per_iteration - 1
        if not self.variant.by_superblock:
            return StageState(stage, next_state, previous, has_previous, has_next, True)
        return StageState(
            stage, next_state, previous, number > 0 or has_previous, number < last or has_next, number == last
        )

    def begin(
        self,
        operands: MmaOperands,
        _sums: GroupSums | None,
        pipeline: Pipeline,
        stage: Int32,
        consumer: ConsumerCoord,
    ) -> None:
        """Bring a tile's first stage, which is filled, as far as :meth:`multiply_stage` wants it."""
        self.load_packed(operands, pipeline, stage, 0, consumer)

    @cute.jit
    def multiply_stage(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
        _sums: GroupSums | None,
        state: StageState,
        consumer: ConsumerCoord,
        stage_in_iteration: int,
    ):
        """Add this k set's share of one stage to the accumulators, and load the first packed block of the next stage
        into registers; the last MMA batch stays in flight.

        An MMA batch is one k chunk of one 64-row block. Loop order, innermost first: chunks of a packed block, 64-row
        blocks, blocks along k. stage_in_iteration: number of this stage in the main-loop iteration, which keeps the two
        fragment buffers alternating across stages.
        """
        variant = self.variant
        chunks = self.k_chunks // variant.k_sets
        x_chunk = state.stage * self.k_chunks + consumer.k_set * chunks
        batches = chunks * variant.m64_atoms
        for batch in cutlass.range_constexpr(batches):
            buffer = (stage_in_iteration * batches + batch) % 2
            packed_block, chunk = divmod(batch, self.chunks_per_block)
            block, atom = divmod(packed_block, variant.m64_atoms)
            self.decode_chunk(operands.packed, operands.fragment, chunk, buffer, operands.register, operands.lane)
            next_load, chunk_of_load = divmod(batch + 1, self.chunks_per_load)
            if const_expr(chunk_of_load == 0 and batch < batches - 1):
                self.load_packed(operands, pipeline, state.stage, next_load, consumer)
            warpgroup.fence()
            for step in cutlass.range_constexpr(4):
                for tokens in cutlass.range_constexpr(variant.token_splits):
                    acc = operands.accumulators[atom * variant.token_splits + tokens]
                    x = operands.x[tokens][(None, None, step, x_chunk + block * self.chunks_per_block + chunk)]
                    cute.gemm(mma, acc, operands.fragment[(None, None, buffer * 4 + step)], x, acc)
            warpgroup.commit_group()
            if const_expr(batch == batches - 1):
                if state.has_next:  # its latency passes while the tensor cores work
                    self.wait_full(pipeline, state.next)
                    self.load_packed(operands, pipeline, state.next.stage, 0, consumer, state.next_begins)
            warpgroup.wait_group(1)
            if const_expr(batch == 0):
                if state.has_previous:
                    self.scheduler.release(pipeline, state.previous, consumer.cta_rank)

    def wait_full(self, pipeline: Pipeline, state: PipelineState) -> None:
        """Wait until a stage is filled, and visible to WGMMA: what cp.async wrote needs a fence besides the barrier."""
        cute.arch.mbarrier_wait(pipeline.full + state.stage, state.phase)
        if self.variant.gathered:
            fence_proxy_async()
