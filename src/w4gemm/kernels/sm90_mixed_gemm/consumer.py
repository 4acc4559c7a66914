"""The consumers: :class:`Consumer` takes a warpgroup through its tiles. The main loop multiplies them,
:class:`SplitKReduction` and :class:`StreamFlags` bring sums of other CTAs, and the epilogue stores them. kernel.py has
the facts: memory, barriers, registers.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.core.epilogue import EpilogueOperands
from w4gemm.kernels.arguments import StreamWorkspace
from w4gemm.kernels.device.expert_tiles import (
    ExpertTiles,
    TileRows,
    first_rows,
    operands_of_expert,
    operands_until,
)
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.scheduler import TileCoord
from w4gemm.kernels.device.stream_k import StreamSum, WarpgroupThread
from w4gemm.kernels.sm90_mixed_gemm.cluster_sums import ChainSum, Handover, SplitKReduction
from w4gemm.kernels.sm90_mixed_gemm.epilogue import EpilogueStore, LoadedOperands, OutputCoord, Staging, TmaStore
from w4gemm.kernels.sm90_mixed_gemm.mainloop import Mainloop
from w4gemm.kernels.sm90_mixed_gemm.tile_scheduler import Pipeline, SchedulerParams, TileScheduler, WorkTile
from w4gemm.kernels.sm90_mixed_gemm.values import ConsumerCoord, flattened
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.packing.codecs.pairs_decode import own_pairs
from w4gemm.ptx.memory import barrier_of_roles, load_shared_f32x4, shared_address, store_shared_f32x4

# the first of the named barriers of each row of kernel.py's table
_CONSUMER_BARRIER = 1
_EPILOGUE_BARRIER = 2
_MMA_ORDER_BARRIER = 6
_STORED_BARRIER = 8
_READY_BARRIER = 10
_FLAG_THREADS = 128 + 32
"""Threads at the last two: a consumer warpgroup and the warp that handles its flags."""


class ConsumerMemory(NamedTuple):
    """Memory of the consumers besides the pipeline."""

    staging: Int32
    """Address of all staging buffers."""
    store: TmaStore | None
    k_sets: cute.Pointer
    """Shared memory in which k sets reduce."""
    handover: Handover | None
    """None without split_k."""
    decode_table: Int32
    """Address of the decoder's table, if it has one."""
    levels: Int32
    """Address of scales that lanes prepare for one another."""
    workspace: StreamWorkspace
    """Global memory of stream-k."""
    expert_tiles: ExpertTiles | None
    """None unless grouped."""
    d: cute.Tensor
    operands: EpilogueOperands

    def output_tile(self, rows: TileRows, coord: OutputCoord) -> OutputTile:
        """Where a warpgroup's part of a tile goes that has these rows."""
        if self.expert_tiles is None:
            return OutputTile(self.d, self.operands, coord)
        return OutputTile(first_rows(self.d, rows.end), operands_of_expert(self.operands, rows.expert, rows.end), coord)


class OutputTile(NamedTuple):
    """A warpgroup's part of an output tile."""

    d: cute.Tensor
    """If grouped, cut off behind the expert's last row."""
    operands: EpilogueOperands
    """If grouped, the expert's."""
    coord: OutputCoord


class StreamFlags:
    """Handles the flags for the consumers of one CTA. A consumer warpgroup arrives at a barrier behind its stores, and
    goes on while they reach L2. It meets its warp at another barrier in front of its loads; the warp is there first if
    the other CTA was in time, so no consumer waits for a flag to arrive from L2."""

    def __init__(self, scheduler: TileScheduler, stream_sum: StreamSum):
        self.scheduler, self.stream_sum = scheduler, stream_sum

    @cute.jit
    def run(self, workspace: StreamWorkspace, params: SchedulerParams, warpgroup: Int32):
        """Serve all work tiles of a consumer warpgroup. Run by one warp."""
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_wait()  # the launch before may still use the workspace
        count, share = self.scheduler.work_tiles(params)
        for index in cutlass.range(count, unroll=1):
            work_tile = self.scheduler.work_tile(index, params, share)
            if self.scheduler.of_another(work_tile, params):
                cute.arch.barrier(barrier_id=_STORED_BARRIER + warpgroup, number_of_threads=_FLAG_THREADS)
                if lane == 0:
                    self.stream_sum.raise_flag(workspace, params.cluster, warpgroup)
            elif work_tile.first_k_slice > 0:
                other = self.scheduler.first_sharer(work_tile, params, share)
                while other < params.cluster:
                    if lane == 0:
                        self.stream_sum.await_flag(workspace, other, warpgroup)
                    cute.arch.sync_warp()
                    self.partials_ready(warpgroup)
                    other += 1

    def partials_stored(self, warpgroup: Int32) -> None:
        """Tell the warp that this consumer thread has stored its partials."""
        cute.arch.barrier_arrive(barrier_id=_STORED_BARRIER + warpgroup, number_of_threads=_FLAG_THREADS)

    def partials_ready(self, warpgroup: Int32) -> None:
        """Meet the other side, behind which the next CTA's partials may be read: called by the warp when their flag is
        up, and by the consumers in front of their loads."""
        barrier_of_roles(_READY_BARRIER + warpgroup, _FLAG_THREADS)


class Consumer:
    """Multiplies and stores the tiles of one CTA. Run by every consumer warpgroup."""

    def __init__(
        self, variant: Sm90MixedVariant, scheduler: TileScheduler, mainloop: Mainloop, epilogue: EpilogueStore
    ):
        self.variant, self.scheduler = variant, scheduler
        self.mainloop, self.epilogue = mainloop, epilogue
        self.stream_sum = StreamSum(variant.config.tile_m * variant.m64_atoms, variant.warpgroups_n)
        self.stream_flags = StreamFlags(scheduler, self.stream_sum)
        blocks, ranks, threads = variant.config.tile_m // 8, variant.config.split_k, variant.warpgroups_n * 128
        self.reduction = SplitKReduction(blocks, ranks, threads, variant.stored_tokens // 8)
        self.chain = ChainSum(blocks, ranks, threads)
        self.sums = self.chain if variant.chained else self.reduction

    @cute.jit
    def run(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        params: SchedulerParams,
        cta_rank: Int32,
        memory: ConsumerMemory,
    ):
        """Multiply and store all work tiles."""
        variant, config = self.variant, self.variant.config
        thread = cute.arch.thread_idx()[0]
        wg, t = cute.arch.make_warp_uniform(thread // 128 % variant.warpgroups_n), thread % 128
        k_set, pingpong = cute.arch.make_warp_uniform(thread // (128 * variant.warpgroups_n)), Int32(0)
        if const_expr(variant.pingpong_warpgroups > 1):
            k_set, pingpong = Int32(0), k_set
        thread = thread % (128 * variant.warpgroups_n)
        consumer = ConsumerCoord(wg, k_set, t, cta_rank)
        thr_mma = mma.get_slice(thread)
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((config.tile_n, config.tile_m)), Float32)
        flat = flattened(acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        if const_expr(not self.scheduler.part.second):
            cute.arch.griddepcontrol_wait()
        state = PipelineState.consumer()
        cluster_coord = self.scheduler.cta_coord_in_cluster(cta_rank)
        table = memory.decode_table
        if const_expr(variant.pairs is not None):
            table = own_pairs(table, t, variant.pairs)
        operands = self.mainloop.operands(mma, thr_mma, acc, pipeline.x, table, memory.levels)
        if const_expr(variant.decode_table_bytes > 0):  # while the first stages are on their way
            threads = 128 * variant.warpgroups
            self.mainloop.decoder.fill_table(memory.decode_table, cute.arch.thread_idx()[0], threads)
            self.consumer_barrier()
        sums = self.mainloop.group_sums(thr_mma)
        if const_expr(variant.pingpong_warpgroups > 1):
            # An mbarrier wait tests one parity bit, so a wait more than one lap ahead would pass at once on an old
            # phase. A warpgroup therefore starts a tile only after the other one has waited on every stage of the
            # previous tile.
            state = state.after_several(pingpong * params.k_slices, variant.num_stages)
            if pingpong == 1:
                cute.arch.barrier_arrive(barrier_id=_MMA_ORDER_BARRIER, number_of_threads=256)
        if const_expr(variant.handover_bytes > 0):  # while the first stages are on their way
            cute.arch.cluster_wait()
        count, share = self.scheduler.work_tiles(params)
        if const_expr(self.scheduler.part.second):
            self.scheduler.acquire(count)
        for index in cutlass.range(pingpong, count, variant.pingpong_warpgroups, unroll=1):
            work_tile = self.scheduler.work_tile(index, params, share)
            k_slices = work_tile.k_slices
            tile = self.scheduler.cta_tile(work_tile.tile, params, cluster_coord)
            acc.fill(0.0)
            if const_expr(any(variant.prefetches)):
                ahead = self.output_tile(tile, consumer, memory)
                for coord in self.m64_coords(ahead.coord):
                    self.epilogue.prefetch(ahead.operands, coord, *variant.prefetches)
            if const_expr(variant.pingpong_warpgroups > 1):
                cute.arch.barrier(barrier_id=_MMA_ORDER_BARRIER + pingpong, number_of_threads=256)
            filled = pipeline
            if const_expr(variant.row_numbers > 0 and variant.grouped):
                rows = self.scheduler.rows(tile.m_tile, memory.d.shape[0], memory.expert_tiles)
                filled = pipeline._replace(scales=pipeline.scales + rows.first % 4 * 4)
            if const_expr(variant.levels_in_staging):
                self.free_staging(consumer, wg + pingpong)
            state, last_stage = self.mainloop.multiply(mma, filled, operands, sums, state, k_slices, consumer)
            if const_expr(variant.pingpong_warpgroups > 1):
                cute.arch.barrier_arrive(barrier_id=_MMA_ORDER_BARRIER + 1 - pingpong, number_of_threads=256)
            loaded = None
            if const_expr(variant.loads_early):
                own = self.output_tile(tile, consumer, memory)
                loaded = self.epilogue.load(own.operands, own.coord, own.d.shape[0])
            if const_expr(not variant.promotes):
                warpgroup.wait_group(0)
                if k_slices > 0:
                    self.scheduler.release(pipeline, last_stage, consumer.cta_rank)
            if const_expr(variant.levels_in_staging):  # its warps have read their scales
                cute.arch.barrier(barrier_id=_EPILOGUE_BARRIER + wg + pingpong, number_of_threads=128)
            if const_expr(not variant.loads_early):
                own = self.output_tile(tile, consumer, memory)
            if const_expr(variant.k_sets > 1):
                self.reduce_k_sets(flat, shared_address(memory.k_sets), k_set, thread)
            if const_expr(variant.chained):
                helps = self.scheduler.helps(index, params)
                if k_set == 0:
                    self.reduce_chain(flat, own, helps, consumer, thread, memory)
            elif const_expr(config.split_k > 1):
                self.reduce_split_k(flat, own, consumer, thread, memory)
            elif const_expr(variant.stream_k):
                self.reduce_stream_k(flat, own, work_tile, params, share, consumer, memory)
            elif const_expr(variant.k_sets == 1):
                self.store_tile(flat, own, memory, wg + pingpong, loaded)
                if const_expr(variant.pingpong_warpgroups > 1):
                    state = state.after_several(k_slices, variant.num_stages)
            else:
                if k_set == 0:
                    self.store_tile(flat, own, memory, wg, loaded)
        self.epilogue.drain()

    @cute.jit
    def free_staging(self, consumer: ConsumerCoord, buffer: Int32):
        """Wait until a staging buffer is read out, so that scales may be written there."""
        if const_expr(self.variant.boxed):
            if cute.arch.make_warp_uniform(consumer.thread // 32) == 0:
                self.epilogue.drain()
        cute.arch.barrier(barrier_id=_EPILOGUE_BARRIER + buffer, number_of_threads=128)

    def output_tile(self, tile: TileCoord, consumer: ConsumerCoord, memory: ConsumerMemory) -> OutputTile:
        """Where a warpgroup's part of a tile goes. A grouped problem computes it anew when it is needed, because to
        keep it while the tile is multiplied would take registers."""
        variant = self.variant
        rows = self.scheduler.rows(tile.m_tile, memory.d.shape[0], memory.expert_tiles)
        feature = tile.n_tile * variant.config.tile_n + consumer.warpgroup * (64 * variant.m64_atoms)
        return memory.output_tile(rows, OutputCoord(rows.first, feature, consumer.thread))

    def m64_coords(self, coord: OutputCoord) -> list[OutputCoord]:
        """The coordinates of each of a warpgroup's 64-row blocks."""
        return [coord._replace(feature=coord.feature + 64 * r) for r in range(self.variant.m64_atoms)]

    @cute.jit
    def reduce_k_sets(self, flat: cute.Tensor, s_k_sets: Int32, k_set: Int32, thread: Int32):
        """Add the accumulators of all k sets into the first one's, through the memory at ``s_k_sets``. Nothing else
        uses it before all consumers come here again: it is the drained pipeline's or, in a persistent grid, where the
        next tile is on its way into the pipeline, memory of its own."""
        variant = self.variant
        line = variant.warpgroups_n * 128 * 16  # bytes of one block of four accumulators, all threads of a set
        size = cute.size(flat) // 4
        self.consumer_barrier()  # the pipeline is drained, and the last tile's sums have been read
        if k_set > 0:
            for i in cutlass.range_constexpr(size):
                at = s_k_sets + ((k_set - 1) * size + i) * line + thread * 16
                store_shared_f32x4(at, [flat[4 * i + j] for j in range(4)])
        self.consumer_barrier()
        if k_set == 0:
            for s in cutlass.range_constexpr(variant.k_sets - 1):
                for i in cutlass.range_constexpr(size):
                    other = load_shared_f32x4(s_k_sets + (s * size + i) * line + thread * 16)
                    for j in cutlass.range_constexpr(4):
                        flat[4 * i + j] = flat[4 * i + j] + other[j]

    @cute.jit
    def reduce_split_k(
        self, flat: cute.Tensor, own: OutputTile, consumer: ConsumerCoord, thread: Int32, memory: ConsumerMemory
    ):
        """Sum over the cluster and store this CTA's share of the tokens. thread: number in the k set."""
        variant, config, coord = self.variant, self.variant.config, own.coord
        d, operands, reduction = own.d, own.operands, self.reduction
        if const_expr(variant.handover_bytes == 0):
            cute.arch.cluster_arrive()  # this CTA's pipeline is drained, and sums of its k sets have been read
            cute.arch.cluster_wait()
        if const_expr(variant.stored_tokens * config.split_k > config.tile_m):  # the last share reaches past the tile
            end = cutlass.min(coord.token + config.tile_m, d.shape[0])
            d, operands = first_rows(d, end), operands_until(operands, end)
        if consumer.k_set == 0:
            barrier = shared_address(memory.handover.barrier)
            sums, rank = memory.handover.sums + thread * 16, consumer.cta_rank
            reduction.hand_over(flat, sums, barrier, rank)
            if reduction.first(rank) < config.tile_m:
                cute.arch.mbarrier_wait(memory.handover.barrier, 0)
                reduction.add(flat, sums, rank)
                share = cute.make_tensor(flat.iterator, cute.make_layout(variant.stored_tokens // 2))
                tile = OutputTile(d, operands, coord._replace(token=coord.token + reduction.first(rank)))
                self.store_tile(share, tile, memory, consumer.warpgroup)

    @cute.jit
    def reduce_chain(
        self,
        flat: cute.Tensor,
        own: OutputTile,
        helps: Int32,
        consumer: ConsumerCoord,
        thread: Int32,
        memory: ConsumerMemory,
    ):
        """Hand over the end of the tile before, or add the end of the own tile and store it."""
        sums, rank = memory.handover.sums + thread * 16, consumer.cta_rank
        if helps == 1:
            self.chain.hand_over(flat, sums, shared_address(memory.handover.barrier), rank)
        else:
            cute.arch.mbarrier_wait(memory.handover.barrier, 0)
            self.chain.add(flat, sums)
            self.store_tile(flat, own, memory, consumer.warpgroup)

    @cute.jit
    def reduce_stream_k(
        self,
        flat: cute.Tensor,
        own: OutputTile,
        work_tile: WorkTile,
        params: SchedulerParams,
        share: Int32,
        consumer: ConsumerCoord,
        memory: ConsumerMemory,
    ):
        """Store the partials of a tile that another CTA owns; or add those of other CTAs to a tile, and store it."""
        thread = WarpgroupThread(consumer.warpgroup, consumer.thread)
        if self.scheduler.of_another(work_tile, params):
            self.stream_sum.store_partials(flat, memory.workspace, params.cluster, thread)
            self.stream_flags.partials_stored(consumer.warpgroup)
        else:
            if work_tile.first_k_slice > 0:
                other = self.scheduler.first_sharer(work_tile, params, share)
                while other < params.cluster:
                    self.stream_flags.partials_ready(consumer.warpgroup)
                    self.stream_sum.add_partials(flat, memory.workspace, other, thread)
                    other += 1
            self.store_tile(flat, own, memory, consumer.warpgroup)

    @cute.jit
    def store_tile(
        self,
        flat: cute.Tensor,
        own: OutputTile,
        memory: ConsumerMemory,
        buffer: Int32,
        loaded: LoadedOperands | None = None,
    ):
        """Run the epilogue for a warpgroup's 64-row blocks. buffer: number of its staging buffer. loaded: the operands
        of the first block, if they were loaded before."""
        variant, epilogue = self.variant, self.epilogue
        d, operands, coord = own.d, own.operands, own.coord
        if const_expr(loaded is None):
            loaded = epilogue.load(operands, coord, d.shape[0])
        features = [loaded.features]
        address = memory.staging + buffer * variant.staging_bytes
        staging = Staging(address, _EPILOGUE_BARRIER + buffer, memory.store, 2 * buffer)
        coords, size = self.m64_coords(coord), cute.size(flat) // variant.m64_atoms
        if const_expr(not variant.float32_staging):  # with it there are no registers for them yet
            features += [epilogue.load_features(operands, other) for other in coords[1:]]
        for r in cutlass.range_constexpr(variant.m64_atoms):
            if const_expr(r == len(features)):
                features.append(epilogue.load_features(operands, coords[r]))
            sums = cute.make_tensor(flat.iterator + r * size, cute.make_layout(size))
            epilogue.store(sums, d, operands, coords[r], loaded._replace(features=features[r]), staging)

    @cute.jit
    def consumer_barrier(self):
        cute.arch.barrier(barrier_id=_CONSUMER_BARRIER, number_of_threads=128 * self.variant.warpgroups)
