"""The main loop of a consumer warpgroup: decode, multiply and release the stages of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.sm90_mixed_gemm.roles.pipeline import Pipeline
from w4gemm.kernels.sm90_mixed_gemm.roles.tile_scheduler import TileScheduler
from w4gemm.kernels.sm90_mixed_gemm.roles.weight_fragments import ConsumerCoord, WeightFragments
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.ptx.arithmetic import fma, to_float
from w4gemm.ptx.memory import fence_proxy_async, load_shared


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
    """One operand per 64-row block or range of tokens or, if scales are applied to sums, flat."""
    fragment: cute.Tensor
    """Two buffers of decoded weights, operand A."""
    x: list[cute.Tensor]
    """x of all stages as operand B, by range of tokens."""
    packed: cute.Tensor
    """A packed block in registers, see :class:`WeightFragments`."""
    decode_table: Int32
    """Address of the decoder's table, if it has one; of a table of pairs, of the thread's own copies."""


class PartialSums(NamedTuple):
    """float32 sums of one MMA batch whose scales are applied to sums."""

    sums: cute.Tensor
    scales: cute.Tensor
    """Scales of rows g and g + 8."""


class GroupSums(NamedTuple):
    """Registers besides, if scales are applied to sums."""

    sets: list[PartialSums]
    scales: cute.Tensor
    """Scales of the k chunk that was decoded last: rows g and g + 8 of each group."""

    def batch(self, index: int) -> PartialSums:
        """The sums that an MMA batch adds into; batches alternate if there are two sets."""
        return self.sets[index % len(self.sets)]


class Mainloop:
    """Multiplies stages, for one variant."""

    def __init__(self, variant: Variant, scheduler: TileScheduler, decoder: Any):
        self.variant, self.scheduler = variant, scheduler
        self.weights = WeightFragments(variant, decoder)
        self.k_chunks = variant.config.tile_k // variant.chunk_k
        """K chunks of 128 bytes of x in a stage."""
        self.chunks_per_block = variant.stage_block.columns // variant.chunk_k
        self.groups = variant.stage_block.groups
        """Scale groups of a packed block."""
        self.steps_per_group = 4 * self.chunks_per_block // self.groups
        """Matrix instructions of a scale group within a packed block."""

    def x_operands(self, mma: cute.TiledMma, thr: Any, s_x: cute.Tensor) -> list[cute.Tensor]:
        """x as operand B, by range of tokens."""
        variant = self.variant
        shape = (variant.config.tile_m // variant.token_splits, variant.chunk_k)
        tiles = [cute.local_tile(s_x, shape, (i, 0, None)) for i in range(variant.token_splits)]
        return [mma.make_fragment_B(thr.partition_B(t)) for t in tiles]

    def by_wgmma(self, acc: cute.Tensor, flat: cute.Tensor) -> list[cute.Tensor]:
        """The accumulators of each 64-row block, or of each range of tokens, as one operand: ranges of ``flat``, one
        after the other."""
        count = self.variant.m64_atoms * self.variant.token_splits
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
        sets = [
            PartialSums(cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor((2,), Float32))
            for _ in range(1 if variant.one_set_of_sums else 2)
        ]
        return GroupSums(sets, cute.make_rmem_tensor((2 * self.groups,), Float32))

    @cute.jit
    def begin(
        self, operands: MmaOperands, sums: GroupSums | None, pipeline: Pipeline, stage: Int32, consumer: ConsumerCoord
    ):
        """Bring the first packed block of a tile's first stage into registers, behind the wait for it."""
        if const_expr(self.variant.promotes):
            self.begin_groups(operands, sums, pipeline, stage, consumer)
        else:
            self.weights.load(operands.packed, pipeline, stage, 0, consumer)

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
        chunks = self.k_chunks // variant.k_sets
        x_chunk = state.stage * self.k_chunks + consumer.k_set * chunks
        batches = chunks * variant.m64_atoms
        for batch in cutlass.range_constexpr(batches):
            buffer = (stage_in_iteration * batches + batch) % 2
            packed_block, chunk = divmod(batch, self.chunks_per_block)
            block, atom = divmod(packed_block, variant.m64_atoms)
            self.weights.decode(operands.packed, operands.fragment, chunk, buffer, operands.decode_table)
            if const_expr(chunk == self.chunks_per_block - 1 and batch < batches - 1):
                self.weights.load(operands.packed, pipeline, state.stage, packed_block + 1, consumer)
            warpgroup.fence()
            for step in cutlass.range_constexpr(4):
                for tokens in cutlass.range_constexpr(variant.token_splits):
                    acc = operands.accumulators[atom * variant.token_splits + tokens]
                    cute.gemm(
                        mma,
                        acc,
                        operands.fragment[(None, None, buffer * 4 + step)],
                        operands.x[tokens][(None, None, step, x_chunk + block * self.chunks_per_block + chunk)],
                        acc,
                    )
            warpgroup.commit_group()
            if const_expr(batch == batches - 1):
                if state.has_next:  # its latency passes while the tensor cores work
                    self.wait_full(pipeline, state.next)
                    self.weights.load(operands.packed, pipeline, state.next.stage, 0, consumer)
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
        chunks, steps = self.k_chunks // variant.k_sets, 4 // variant.promotions
        x_chunk = state.stage * self.k_chunks + consumer.k_set * chunks
        batches_per_chunk = variant.batches_per_chunk
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
                place = chunk % self.chunks_per_block * 4 + group * steps
                for row in cutlass.range_constexpr(2):
                    batch_scales[row] = sums.scales[place // self.steps_per_group * 2 + row]
            if const_expr(batch_in_chunk == batches_per_chunk - 1 and chunk < chunks - 1):
                packed_block, number = divmod(chunk + 1, self.chunks_per_block)
                self.decode_group_chunk(operands, sums, (chunk + 1) % 2, number)
                if const_expr(number == self.chunks_per_block - 1 and chunk + 2 < chunks):
                    self.weights.load(operands.packed, pipeline, state.stage, packed_block + 1, consumer)
        if state.has_next:
            self.wait_full(pipeline, state.next)
            self.begin_groups(operands, sums, pipeline, state.next.stage, consumer)
        warpgroup.wait_group(0)
        last = chunks * batches_per_chunk - 1
        block = consumer.k_set * chunks + chunks - 1
        self.add_scaled_sums(acc, sums, last, self.block_scales(scales_of_x, block, last, consumer))
        self.release(pipeline, state.stage, consumer)

    @cute.jit
    def multiply_chunk(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: MmaOperands,
        sums: GroupSums,
        state: StageState,
        consumer: ConsumerCoord,
        stage_in_iteration: int,
    ):
        """Add a stage of one k chunk, which is one scale group, to the accumulators, with one set of sums.
        ``begin_groups`` or the stage before has decoded it.

        The next chunk is decoded while this one is multiplied: in a branch, behind which ptxas leaves the wait. While
        the sums are added, the tensor cores work for the other warpgroup.
        """
        buffer = stage_in_iteration % 2
        batch_sums, batch_scales = sums.batch(0)
        warpgroup.fence()
        for step in cutlass.range_constexpr(4):
            mma.set(warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(
                mma,
                batch_sums,
                operands.fragment[(None, None, buffer * 4 + step)],
                operands.x[0][(None, None, step, state.stage)],
                batch_sums,
            )
        warpgroup.commit_group()
        for row in cutlass.range_constexpr(2):
            batch_scales[row] = sums.scales[row]
        if state.has_next:
            self.wait_full(pipeline, state.next)
            self.weights.load(operands.packed, pipeline, state.next.stage, 0, consumer)
            self.decode_group_chunk(operands, sums, 1 - buffer)
        warpgroup.wait_group(0)
        self.release(pipeline, state.stage, consumer)
        self.add_scaled_sums(operands.accumulators, sums, 0, [])

    @cute.jit
    def begin_groups(
        self, operands: MmaOperands, sums: GroupSums, pipeline: Pipeline, stage: Int32, consumer: ConsumerCoord
    ):
        """Decode a stage's first chunk, and bring its second into registers if it has one."""
        self.weights.load(operands.packed, pipeline, stage, 0, consumer)
        self.decode_group_chunk(operands, sums, 0)
        if const_expr(not self.variant.one_set_of_sums and self.chunks_per_block == 1):
            self.weights.load(operands.packed, pipeline, stage, 1, consumer)

    def decode_group_chunk(self, operands: MmaOperands, sums: GroupSums, buffer: int, number: int = 0) -> None:
        """Decode a chunk of what is packed into a fragment buffer; with the first one take the scales of all, if they
        are applied to sums."""
        self.weights.decode(operands.packed, operands.fragment, number, buffer, operands.decode_table)
        if self.variant.scales_on_sums and number == 0:
            self.weights.take_scales(operands.packed, sums.scales)

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
