"""The main loop of a consumer warpgroup: decode, multiply and release the stages of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.ptx import fence_proxy_async, fma, load_shared, to_float
from w4gemm.kernels.sm90_mixed_gemm.roles.pipeline import Pipeline
from w4gemm.kernels.sm90_mixed_gemm.roles.tile_scheduler import TileScheduler
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant


class ConsumerCoord(NamedTuple):
    """A consumer thread."""

    warpgroup: Int32
    """Number of its warpgroup along the features of a tile."""
    k_set: Int32
    thread: Int32
    """0 .. 127 in the warpgroup."""
    cta_rank: Int32
    """Rank of the CTA in its cluster."""


class StageState(NamedTuple):
    """A stage that is multiplied, and its neighbours."""

    stage: Int32
    next: PipelineState
    previous: Int32
    has_previous: Boolean
    """True if ``previous`` is of the same work tile, and not yet released."""
    has_next: Boolean
    """True if ``next`` is of the same work tile."""


class MmaOperands(NamedTuple):
    """Registers and shared memory of a consumer thread that the main loop works on."""

    accumulators: Any
    """One operand per 64-row block or, if scales are applied to sums, flat."""
    fragment: cute.Tensor
    """Two buffers of decoded weights, operand A."""
    x: list[cute.Tensor]
    """x of all stages as operand B, by range of tokens."""
    packed: cute.Tensor
    """A packed block in registers: code words, then the scale words of each group."""
    decode_lut: Int32
    """Address of the fp8 decoder's table."""


class PartialSums(NamedTuple):
    """float32 sums of one MMA batch whose scales are applied to sums."""

    sums: cute.Tensor
    scales: cute.Tensor
    """Scales of rows g and g + 8."""


class GroupSums(NamedTuple):
    """Registers besides, if scales are applied to sums."""

    first: PartialSums
    second: PartialSums
    scales: cute.Tensor
    """Scales of the k chunk that was decoded last: rows g and g + 8 of each group."""

    def batch(self, index: int) -> PartialSums:
        """The sums that an MMA batch adds into; batches alternate."""
        return self.second if index % 2 else self.first


class Mainloop:
    """Multiplies stages, for one variant."""

    def __init__(self, variant: Variant, scheduler: TileScheduler, decoder: Any):
        self.variant, self.scheduler, self.decoder = variant, scheduler, decoder
        self.reader = BlockReader(variant.stage_block)
        self.k_chunks = variant.config.tile_k // variant.chunk_k
        """K chunks of 128 bytes of x in a stage."""
        self.chunks_per_block = variant.stage_block.columns // variant.chunk_k
        self.code_words = variant.stage_block.columns // 16
        """Code words of a packed block that a thread holds."""
        self.groups = variant.stage_block.groups
        """Scale groups of a packed block."""
        self.promotions = self.groups if variant.scales_on_sums else 1
        """Ranges of columns of a k chunk whose sums are promoted."""
        self.runs = variant.stage_block.runs
        """Runs of scale words, each of one or two groups."""

    @property
    def packed_words(self) -> int:
        """Words of a packed block that a thread holds."""
        runs = self.runs + self.variant.block.factors
        return self.code_words + runs * self.variant.block.words_per_scale

    def x_operands(self, mma: cute.TiledMma, thr: Any, s_x: cute.Tensor) -> list[cute.Tensor]:
        """x as operand B, by range of tokens."""
        variant = self.variant
        shape = (variant.config.tile_m // variant.token_splits, variant.chunk_k)
        tiles = [cute.local_tile(s_x, shape, (i, 0, None)) for i in range(variant.token_splits)]
        return [mma.make_fragment_B(thr.partition_B(t)) for t in tiles]

    def by_m64_atom(self, acc: cute.Tensor, flat: cute.Tensor) -> list[cute.Tensor]:
        """The accumulators of each 64-row block as one operand: ranges of ``flat``, one after the other."""
        count = self.variant.m64_atoms
        if count == 1:
            return [acc]
        layout = cute.make_layout((*acc.shape[:1], 1, 1))
        return [cute.make_tensor(flat.iterator + r * (cute.size(flat) // count), layout) for r in range(count)]

    def group_sums(self, thr: Any) -> GroupSums | None:
        """Registers for sums that are promoted; None if none are."""
        variant = self.variant
        if not variant.promotes:
            return None
        shape = thr.partition_shape_C((variant.config.tile_n, variant.config.tile_m // variant.token_splits))
        first, second = (
            PartialSums(cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor((2,), Float32)) for _ in range(2)
        )
        return GroupSums(first, second, cute.make_rmem_tensor((2 * self.groups,), Float32))

    @cute.jit
    def begin(
        self, operands: MmaOperands, sums: GroupSums | None, pipeline: Pipeline, stage: Int32, consumer: ConsumerCoord
    ):
        """Bring the first packed block of a tile's first stage into registers, behind the wait for it."""
        if const_expr(self.variant.promotes):
            self.begin_groups(operands, sums, pipeline, stage, consumer)
        else:
            self.load_packed_block(operands.packed, pipeline, stage, 0, consumer)

    @cute.jit
    def multiply_stage(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
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
        registers = cute.recast_tensor(operands.fragment, Int32)
        chunks = self.k_chunks // variant.k_sets
        x_chunk = state.stage * self.k_chunks + consumer.k_set * chunks
        batches = chunks * variant.m64_atoms
        for batch in cutlass.range_constexpr(batches):
            buffer = (stage_in_iteration * batches + batch) % 2
            packed_block, chunk = divmod(batch, self.chunks_per_block)
            block, atom = divmod(packed_block, variant.m64_atoms)
            acc = operands.accumulators[atom]
            self.decode_chunk(operands.packed, registers, chunk, buffer, operands.decode_lut)
            if const_expr(chunk == self.chunks_per_block - 1 and batch < batches - 1):
                self.load_packed_block(operands.packed, pipeline, state.stage, packed_block + 1, consumer)
            warpgroup.fence()
            for step in cutlass.range_constexpr(4):
                cute.gemm(
                    mma,
                    acc,
                    operands.fragment[(None, None, buffer * 4 + step)],
                    operands.x[0][(None, None, step, x_chunk + block * self.chunks_per_block + chunk)],
                    acc,
                )
            warpgroup.commit_group()
            if const_expr(batch == batches - 1):
                if state.has_next:  # its latency passes while the tensor cores work
                    self.wait_full(pipeline, state.next)
                    self.load_packed_block(operands.packed, pipeline, state.next.stage, 0, consumer)
            warpgroup.wait_group(1)
            if const_expr(batch == 0):
                if state.has_previous:
                    self.release(pipeline, state.previous, consumer)

    @cute.jit
    def multiply_groups(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
        sums: GroupSums,
        state: StageState,
        consumer: ConsumerCoord,
    ):
        """Add this k set's share of one stage to the accumulators, with scales that are applied to the sums of a group.
        ``begin_groups`` has run for the stage.

        An MMA batch is one scale group and one range of tokens. Two sets of sums alternate, so that one batch is
        multiplied while the previous one is scaled and added to acc, and the next chunk decoded. No batch is in flight
        at the end, because ptxas would serialize all of them.
        """
        variant = self.variant
        acc, fragment = operands.accumulators, operands.fragment
        chunks, steps = self.k_chunks // variant.k_sets, 4 // self.promotions
        x_chunk = state.stage * self.k_chunks + consumer.k_set * chunks
        batches_per_chunk = self.promotions * variant.token_splits
        scales_of_x = pipeline.scales + state.stage * variant.block_scale_bytes
        for batch in cutlass.range_constexpr(chunks * batches_per_chunk):
            chunk, batch_in_chunk = divmod(batch, batches_per_chunk)
            group, tokens = divmod(batch_in_chunk, variant.token_splits)
            batch_sums, batch_scales = sums.batch(batch)
            warpgroup.fence()
            for step in cutlass.range_constexpr(group * steps, (group + 1) * steps):
                mma.set(warpgroup.Field.ACCUMULATE, step > group * steps)
                cute.gemm(
                    mma,
                    batch_sums,
                    fragment[(None, None, chunk % 2 * 4 + step)],
                    operands.x[tokens][(None, None, step, x_chunk + chunk)],
                    batch_sums,
                )
            warpgroup.commit_group()
            if const_expr(batch > 0):
                warpgroup.wait_group(1)
                block = consumer.k_set * chunks + (batch - 1) // batches_per_chunk
                self.add_scaled_sums(acc, sums, batch - 1, self.block_scales(scales_of_x, block, batch - 1, consumer))
            if const_expr(variant.scales_on_sums):
                for row in cutlass.range_constexpr(2):
                    batch_scales[row] = sums.scales[2 * group + row]
            if const_expr(batch_in_chunk == batches_per_chunk - 1 and chunk < chunks - 1):
                self.decode_group_chunk(operands, sums.scales, (chunk + 1) % 2)
                if const_expr(chunk + 2 < chunks):
                    self.load_packed_block(operands.packed, pipeline, state.stage, chunk + 2, consumer)
        if state.has_next:
            self.wait_full(pipeline, state.next)
            self.begin_groups(operands, sums, pipeline, state.next.stage, consumer)
        warpgroup.wait_group(0)
        last = chunks * batches_per_chunk - 1
        block = consumer.k_set * chunks + chunks - 1
        self.add_scaled_sums(acc, sums, last, self.block_scales(scales_of_x, block, last, consumer))
        self.release(pipeline, state.stage, consumer)

    @cute.jit
    def begin_groups(
        self, operands: MmaOperands, sums: GroupSums, pipeline: Pipeline, stage: Int32, consumer: ConsumerCoord
    ):
        """Decode a stage's first chunk, and bring its second into registers."""
        self.load_packed_block(operands.packed, pipeline, stage, 0, consumer)
        self.decode_group_chunk(operands, sums.scales, 0)
        self.load_packed_block(operands.packed, pipeline, stage, 1, consumer)

    def decode_group_chunk(self, operands: MmaOperands, scales: cute.Tensor, buffer: int) -> None:
        """Decode what is packed into a fragment buffer, and take the scales of rows g and g + 8 of each group."""
        registers = cute.recast_tensor(operands.fragment, Int32)
        self.decode_chunk(operands.packed, registers, 0, buffer, operands.decode_lut)
        for group in range(self.groups if self.variant.scales_on_sums else 0):
            first = self.code_words + group * self.variant.block.words_per_scale
            for row, scale in enumerate(self.decoder.scales((operands.packed[first],))):
                scales[2 * group + row] = scale

    def add_scaled_sums(self, acc: cute.Tensor, sums: GroupSums, batch: int, of_x: list[Float32]) -> None:
        """Add the sums of an MMA batch to acc, times the scales of rows g and g + 8 if they are applied to sums, and
        those of x, if it has some."""
        batch_sums, scales = sums.batch(batch)
        flat = cute.make_tensor(batch_sums.iterator, cute.make_layout(cute.size(batch_sums)))
        first = batch % self.variant.token_splits * cute.size(flat)
        for i in range(cute.size(flat)):
            factors = [of_x[i // 4 * 2 + i % 2]] if of_x else []
            if self.variant.scales_on_sums:
                factors.append(scales[i // 2 % 2])
            value = flat[i] if len(factors) == 1 else flat[i] * factors[0]
            acc[first + i] = fma(value, factors[-1], acc[first + i])

    def block_scales(self, address: Int32, block: Int32 | int, batch: int, consumer: ConsumerCoord) -> list[Float32]:
        """The scales of x for the sums of an MMA batch that a thread holds, two for each eight tokens; none if rows of
        x have no scales of 128 columns. address: of the first token's scale in the stage. block: the k block in it."""
        variant = self.variant
        if not variant.block_scales:
            return []
        tokens = variant.config.tile_m // variant.token_splits
        first = batch % variant.token_splits * tokens + consumer.thread % 4 * 2
        at = address + (block * variant.scale_tokens + first) * 4
        together = 1 if variant.grouped else 2  # an expert's first scale may be at an odd place
        starts = [at + eight * 32 + word * 4 for eight in range(tokens // 8) for word in range(0, 2, together)]
        return [to_float("f32", word) for start in starts for word in load_shared(start, together)]

    def wait_full(self, pipeline: Pipeline, state: PipelineState) -> None:
        """Wait until a stage is filled, and visible to WGMMA: what cp.async wrote needs a fence besides the barrier."""
        cute.arch.mbarrier_wait(pipeline.full + state.stage, state.phase)
        if self.variant.gathered:
            fence_proxy_async()

    def load_packed_block(
        self, packed: cute.Tensor, pipeline: Pipeline, stage: Int32, number: int, consumer: ConsumerCoord
    ) -> None:
        """Load one of this k set's packed blocks, or half a block, into registers. number: which of the warpgroup's
        blocks in the stage, counted over its 64-row blocks first, then along k."""
        variant, thread = self.variant, consumer.thread
        block, atom = divmod(number, variant.m64_atoms)
        row = (consumer.warpgroup * variant.m64_atoms + atom) * variant.blocks_k
        index = row + consumer.k_set * (variant.blocks_k // variant.k_sets) + block
        address = pipeline.weights + stage * variant.weight_bytes + index * variant.stage_block.bytes
        pair_offset = (thread // 32 * 8 + thread % 32 // 4) * variant.stage_block.pair_bytes
        words: list[Int32] = []
        for half in range(variant.stage_block.columns // 64):
            words += self.reader.codes(address, half, lane=thread)
        for run in range(self.runs):
            first = variant.stage_block.scales_at(run * variant.block.groups_per_word)
            words += self.reader.scales(address + first + pair_offset)
        words += self.reader.factors(address + variant.stage_block.code_bytes + pair_offset)
        for i, word in enumerate(words):
            packed[i] = word

    def decode_chunk(
        self, packed: cute.Tensor, registers: cute.Tensor, chunk: int, buffer: int, decode_lut: Int32
    ) -> None:
        """Decode a k chunk of a packed block into one of the two fragment buffers."""
        width, words = self.variant.block.words_per_scale, self.decoder.words_per_step
        prepared: Any = None
        step_k = self.variant.chunk_k // 4
        for step in range(4):
            group, column = divmod(chunk * self.variant.chunk_k + step * step_k, self.variant.block.scale_group)
            if step == 0 or column == 0:
                run, field = divmod(group, self.variant.block.groups_per_word)
                first = self.code_words + run * width
                indices = [*range(first, first + width), *range(self.code_words + self.runs * width, self.packed_words)]
                prepared = self.decoder.prepare(tuple(packed[i] for i in indices), decode_lut, field)
            first = (chunk * 4 + step) * words
            values = self.decoder.decode(tuple(packed[first + i] for i in range(words)), prepared)
            for r, value in enumerate(values):
                registers[(0, r % 2, r // 2), 0, buffer * 4 + step] = value

    @cute.jit
    def release(self, pipeline: Pipeline, stage: Int32, consumer: ConsumerCoord):
        """Arrive at the stage's empty barrier, in every CTA that its x or weights came from. Every lane arrives for its
        own reads: one lane for its warp would need a warp barrier first, and measured 1 to 5 % slower."""
        config = self.variant.config
        empty = pipeline.empty + stage
        if const_expr(self.variant.multicast_peers == 1):
            cute.arch.mbarrier_arrive(empty)
        else:
            coord = self.scheduler.cta_coord_in_cluster(consumer.cta_rank)
            for i in cutlass.range_constexpr(config.cluster_n):
                cute.arch.mbarrier_arrive(empty, Int32(coord.m * config.cluster_n + i))
            for i in cutlass.range_constexpr(1, config.cluster_m):
                other = (coord.m + i) % config.cluster_m
                cute.arch.mbarrier_arrive(empty, Int32(other * config.cluster_n + coord.n))
