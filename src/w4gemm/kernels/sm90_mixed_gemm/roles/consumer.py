"""The consumers: a warpgroup's tiles, from the first stage to the stored result."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.core.epilogue import EpilogueOperands
from w4gemm.kernels.arguments import StreamWorkspace
from w4gemm.kernels.device.epilogue_store import EpilogueStore, LoadedOperands, OutputCoord, Staging, TmaStore
from w4gemm.kernels.device.expert_tiles import ExpertTiles, first_rows, operands_of_expert, operands_until
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.scheduler import TileCoord
from w4gemm.kernels.device.split_k import Reduction
from w4gemm.kernels.device.stream_k import StreamSum, WarpgroupThread
from w4gemm.kernels.sm90_mixed_gemm.roles.mainloop import Mainloop, MmaOperands, StageState
from w4gemm.kernels.sm90_mixed_gemm.roles.pipeline import Pipeline
from w4gemm.kernels.sm90_mixed_gemm.roles.stream_flags import StreamFlags
from w4gemm.kernels.sm90_mixed_gemm.roles.tile_scheduler import SchedulerParams, TileScheduler
from w4gemm.kernels.sm90_mixed_gemm.roles.weight_fragments import ConsumerCoord
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.packing.codecs.pairs_decode import own_pairs
from w4gemm.ptx.memory import load_shared_cluster, shared_address, store_shared_f32x4

_CONSUMER_BARRIER = 1
_EPILOGUE_BARRIER = 2  # named barriers from here on, one per consumer warpgroup
_MMA_ORDER_BARRIER = 6  # and 7


class ConsumerMemory(NamedTuple):
    """Memory of the consumers besides the pipeline: shared, but for the workspace."""

    staging: Int32
    """Address of all staging buffers."""
    store: TmaStore | None
    k_sets: cute.Pointer
    """Where k sets reduce."""
    decode_table: Int32
    """Address of the decoder's table, if it has one."""
    workspace: StreamWorkspace
    """Global memory of stream-k."""


class Output(NamedTuple):
    """d and the operands of the epilogue, of the whole problem or of one expert's tile."""

    d: cute.Tensor
    operands: EpilogueOperands


class OutputTile(NamedTuple):
    """A warpgroup's part of an output tile."""

    output: Output
    coord: OutputCoord


class Consumer:
    """Multiplies and stores the tiles of one CTA. Run by every consumer warpgroup."""

    def __init__(self, variant: Variant, scheduler: TileScheduler, mainloop: Mainloop, epilogue: EpilogueStore):
        self.variant, self.scheduler = variant, scheduler
        self.mainloop, self.epilogue = mainloop, epilogue
        self.stream_sum = StreamSum(variant.config.tile_m * variant.m64_atoms, variant.warpgroups_n)
        self.stream_flags = StreamFlags(scheduler, self.stream_sum)

    @cute.jit
    def run(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        params: SchedulerParams,
        cta_rank: Int32,
        output: Output,
        expert_tiles: ExpertTiles | None,
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
        thr = mma.get_slice(thread)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((config.tile_n, config.tile_m)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        x_operands = self.mainloop.x_operands(mma, thr, pipeline.x)
        shape = thr.partition_shape_A((64 * variant.warpgroups_n, 2 * variant.chunk_k))
        fragment = cute.make_rmem_tensor(shape, mma.op.a_dtype)
        packed = cute.make_rmem_tensor((self.mainloop.weights.packed_words,), Int32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.arch.griddepcontrol_wait()
        state = PipelineState.consumer()
        cluster_coord = self.scheduler.cta_coord_in_cluster(cta_rank)
        accumulators = flat if variant.promotes else self.mainloop.by_wgmma(acc, flat)
        table = memory.decode_table
        if const_expr(variant.pairs is not None):
            table = own_pairs(table, t, variant.pairs)
        operands = MmaOperands(accumulators, fragment, x_operands, packed, table)
        if const_expr(variant.decode_table_bytes > 0):  # while the first stages are on their way
            threads = 128 * variant.warpgroups
            self.mainloop.weights.decoder.fill_table(memory.decode_table, cute.arch.thread_idx()[0], threads)
            self.consumer_barrier()
        sums = self.mainloop.group_sums(thr)
        if const_expr(variant.pingpong_warpgroups > 1):
            # An mbarrier wait tests one parity bit, so a wait more than one lap ahead would pass at once on an old
            # phase. A warpgroup therefore starts a tile only after the other one has waited on every stage of the
            # previous tile.
            state = state.after_several(pingpong * params.k_slices, variant.stages)
            if pingpong == 1:
                cute.arch.barrier_arrive(barrier_id=_MMA_ORDER_BARRIER, number_of_threads=256)
        work_tiles = self.scheduler.work_tiles(params)
        for index in cutlass.range(pingpong, work_tiles.count, variant.pingpong_warpgroups, unroll=1):
            work_tile = self.scheduler.work_tile(index, params, work_tiles.share)
            k_slices = work_tile.k_slices
            tile = self.scheduler.cta_tile(work_tile.tile, params, cluster_coord)
            acc.fill(0.0)
            if const_expr(any(variant.prefetches)):
                ahead = self.output_tile(tile, consumer, output, expert_tiles)
                for coord in self.m64_coords(ahead.coord):
                    self.epilogue.prefetch(ahead.output.operands, coord, *variant.prefetches)
            if const_expr(variant.pingpong_warpgroups > 1):
                cute.arch.barrier(barrier_id=_MMA_ORDER_BARRIER + pingpong, number_of_threads=256)
            filled = pipeline
            if const_expr(variant.block_scales and variant.grouped):
                rows = self.scheduler.rows(tile.m_tile, output.d.shape[0], expert_tiles)
                filled = pipeline._replace(scales=pipeline.scales + rows.first % 4 * 4)
            if k_slices > 0:
                self.mainloop.wait_full(pipeline, state)
                self.mainloop.begin(operands, sums, pipeline, state.stage, consumer)
            previous = state.stage
            for i in cutlass.range(k_slices // variant.stages_per_iteration, unroll=1):
                for number in cutlass.range_constexpr(variant.stages_per_iteration):
                    current, state = state.stage, state.after(variant.stages)
                    done = i * variant.stages_per_iteration + number
                    stage_state = StageState(current, state, previous, done > 0, done + 1 < k_slices)
                    if const_expr(variant.one_set_of_sums):
                        self.mainloop.multiply_chunk(mma, filled, operands, sums, stage_state, consumer, number)
                    elif const_expr(variant.promotes):
                        self.mainloop.multiply_groups(mma, filled, operands, sums, stage_state, consumer)
                    else:
                        self.mainloop.multiply_stage(mma, pipeline, operands, stage_state, consumer, number)
                    previous = current
            if const_expr(variant.pingpong_warpgroups > 1):
                cute.arch.barrier_arrive(barrier_id=_MMA_ORDER_BARRIER + 1 - pingpong, number_of_threads=256)
            loaded = None
            if const_expr(variant.loads_early):
                own = self.output_tile(tile, consumer, output, expert_tiles)
                loaded = self.epilogue.load(own.output.operands, own.coord, own.output.d.shape[0])
            if const_expr(not variant.promotes):
                warpgroup.wait_group(0)
                if k_slices > 0:
                    self.mainloop.release(pipeline, previous, consumer)
            if const_expr(not variant.loads_early):
                own = self.output_tile(tile, consumer, output, expert_tiles)
            if const_expr(variant.k_sets > 1):
                self.reduce_k_sets(flat, shared_address(memory.k_sets), k_set, thread)
            if const_expr(config.split_k > 1):
                self.reduce_split_k(flat, own, pipeline, consumer, thread, memory)
            elif const_expr(variant.stream_k):
                warpgroup_thread = WarpgroupThread(wg, t)
                if work_tile.first_k_slice > 0:
                    self.stream_sum.store_partials(flat, memory.workspace, params.cluster, warpgroup_thread)
                    self.stream_flags.partials_stored(wg)
                else:
                    if k_slices < params.k_slices:
                        other = params.cluster + 1
                        while other < self.scheduler.end_of_sharers(work_tile, params, work_tiles.share):
                            self.stream_flags.partials_ready(wg)
                            self.stream_sum.add_partials(flat, memory.workspace, other, warpgroup_thread)
                            other += 1
                    self.store_tile(flat, own, memory, wg)
            elif const_expr(variant.k_sets == 1):
                self.store_tile(flat, own, memory, wg + pingpong, loaded)
                if const_expr(variant.pingpong_warpgroups > 1):
                    state = state.after_several(k_slices, variant.stages)
            else:
                if k_set == 0:
                    self.store_tile(flat, own, memory, wg, loaded)
        self.epilogue.drain()

    def output_tile(
        self, tile: TileCoord, consumer: ConsumerCoord, output: Output, expert_tiles: ExpertTiles | None
    ) -> OutputTile:
        """Where a warpgroup's part of a tile goes. A grouped problem computes it anew when it is needed, because to
        keep it while the tile is multiplied would take registers."""
        variant = self.variant
        rows = self.scheduler.rows(tile.m_tile, output.d.shape[0], expert_tiles)
        feature = tile.n_tile * variant.config.tile_n + consumer.warpgroup * (64 * variant.m64_atoms)
        if variant.grouped:
            operands = operands_of_expert(output.operands, rows.expert, rows.end)
            output = Output(first_rows(output.d, rows.end), operands)
        return OutputTile(output, OutputCoord(rows.first, feature, consumer.thread))

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
                    other = load_shared_cluster(s_k_sets + (s * size + i) * line + thread * 16)
                    for j in cutlass.range_constexpr(4):
                        flat[4 * i + j] = flat[4 * i + j] + other[j]

    @cute.jit
    def reduce_split_k(
        self,
        flat: cute.Tensor,
        own: OutputTile,
        pipeline: Pipeline,
        consumer: ConsumerCoord,
        thread: Int32,
        memory: ConsumerMemory,
    ):
        """Sum over the cluster and store this CTA's share of the tokens. thread: number in the k set."""
        variant, config, coord = self.variant, self.variant.config, own.coord
        (d, operands), k_set = own.output, consumer.k_set
        reduction = Reduction(config.tile_m, variant.stored_tokens // 8, config.split_k, variant.warpgroups_n * 128)
        if const_expr(variant.k_sets == 1):
            self.consumer_barrier()  # the pipeline is drained
        partials = shared_address(pipeline.x.iterator) + (variant.k_sets - 1) * variant.accumulator_bytes + thread * 16
        if k_set == 0:
            reduction.store_partials(flat, partials)
        self.scheduler.cluster_barrier()
        if const_expr(variant.stored_tokens * config.split_k > config.tile_m):  # the last share reaches past the tile
            end = cutlass.min(coord.token + config.tile_m, d.shape[0])
            d, operands = first_rows(d, end), operands_until(operands, end)
        if k_set == 0:
            first, mine = reduction.sum(flat, partials, consumer.cta_rank)
            if const_expr(variant.sums_reach_staging):
                self.scheduler.cluster_barrier()  # no CTA reads what the epilogue writes over
            if mine:
                share = cute.make_tensor(flat.iterator, cute.make_layout(variant.stored_tokens // 2))
                tile = OutputTile(Output(d, operands), coord._replace(token=coord.token + first))
                self.store_tile(share, tile, memory, consumer.warpgroup)
        if const_expr(not variant.sums_reach_staging):
            self.scheduler.cluster_barrier()  # the other CTAs have read this CTA's partials

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
        (d, operands), coord = own.output, own.coord
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
