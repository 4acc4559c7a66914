"""The producer: fills stages with weights by bulk copies and with x by TMA or, if gathered, by cp.async."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from w4gemm.kernels.device.expert_tiles import ExpertTiles, TileRows, weight_of_expert
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.row_gather import RowGather
from w4gemm.kernels.device.scheduler import tile_coordinates
from w4gemm.kernels.sm90_mixed_gemm.roles.pipeline import Pipeline, ScaleSource, XSource
from w4gemm.kernels.sm90_mixed_gemm.roles.tile_scheduler import ClusterCoord, SchedulerParams, TileScheduler, WorkTile
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.ptx.memory import bulk_copy, bulk_copy_multicast, bulk_prefetch, copies_wait, shared_address

_PREFETCHED_STAGES = 2  # stages of an expert's weights, into L2, before the experts' rows may be read


class WeightSource(NamedTuple):
    """The weight of a problem."""

    blocks: cute.Tensor
    """int32 (blocks along n, blocks along k, words), those of all experts in a row."""
    n_blocks: Int32
    """Blocks along n of one expert."""


class StageFill(NamedTuple):
    """Contents of a stage."""

    k_slice: Int32
    stage: Int32
    boxes: Int32 | int
    """TMA boxes of x per k chunk that will complete on its full barrier."""


class WeightMulticast(NamedTuple):
    """How the CTAs of a cluster share weights."""

    rank_m: Int32 | int
    """Number of this CTA among those that share its weights."""
    mask: Int16
    """One bit for each of these CTAs, by rank in the cluster."""


class Inputs(NamedTuple):
    """Tensors and counts that the producer reads to fill stages."""

    x: XSource
    weight: WeightSource
    indices: cute.Tensor | None
    """int32 (m,): row of x by row of d; None unless gathered."""
    m: Int32
    expert_tiles: ExpertTiles | None
    """None unless grouped."""


class ProducerWarp(NamedTuple):
    """A producer warp, and the tiles of its CTA."""

    params: SchedulerParams
    coord: ClusterCoord
    multicast: WeightMulticast
    warp: Int32
    """Number of the warp in the producer warpgroup."""


class BoxPartition(NamedTuple):
    """TMA's view of one box of a tile of x."""

    shared: cute.Tensor
    """By k chunk of the first box."""
    source: cute.Tensor
    """By (0, k chunk)."""


class Producer:
    """Fills the pipeline of one CTA. Run by one warp or, if gathered, by all four of the producer warpgroup."""

    def __init__(self, variant: Variant, scheduler: TileScheduler):
        config = variant.config
        self.variant, self.scheduler = variant, scheduler
        self.k_chunks = config.tile_k // variant.chunk_k
        self.row_gather = RowGather(config.tile_m, self.k_chunks, variant.itemsize, warps=4)

    @cute.jit
    def run(self, inputs: Inputs, pipeline: Pipeline, params: SchedulerParams, cta_rank: Int32):
        """Fill stages for all work tiles."""
        variant, config = self.variant, self.variant.config
        source, weight, expert_tiles = inputs.x, inputs.weight, inputs.expert_tiles
        full, empty, s_x = pipeline.full, pipeline.empty, pipeline.x
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        coord = self.scheduler.cta_coord_in_cluster(cta_rank)
        # the CTAs that get the same x, and those that get the same weights
        x_mask = Int16(Int32((1 << config.cluster_n) - 1) << (coord.m * config.cluster_n))
        weight_mask = Int16(Int32(sum(1 << i * config.cluster_n for i in range(config.cluster_m))) << coord.n)
        multicast = WeightMulticast(coord.m, weight_mask)
        own_warp = ProducerWarp(params, coord, multicast, warp)
        work_tiles = self.scheduler.work_tiles(params)
        first = self.scheduler.work_tile(Int32(0), params, work_tiles.share)
        if const_expr(variant.grouped):
            early = Int32(0)
            if expert_tiles.rows.settled != 0 and work_tiles.count > 0:  # the launch before may still run for long
                early = self.load_early(variant.stages, first, inputs, pipeline, own_warp)
        else:
            early = self.load_early(variant.early_stages, first, inputs, pipeline, own_warp)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        state = PipelineState.producer()
        for index in cutlass.range(work_tiles.count, unroll=1):
            work_tile = self.scheduler.work_tile(index, params, work_tiles.share)
            tile = self.scheduler.cta_tile(work_tile.tile, params, coord)
            rows = self.scheduler.rows(tile.m_tile, inputs.m, expert_tiles)
            boxes = self.boxes_of(rows)
            if const_expr(variant.gathered):
                row_numbers = self.row_gather.indices(inputs.indices, rows.first, rows.end, warp)
            else:
                partitions = self.partition(source, s_x, rows, coord)
            if const_expr(variant.block_scales):
                scales = self.partition_scales(source.scales, pipeline.scales, rows)
            own = self.weight_of(weight, rows)
            for i in cutlass.range(work_tile.k_slices, unroll=1):
                stage, k_slice = state.stage, work_tile.first_k_slice + i
                if index > 0 or i >= early:
                    cute.arch.mbarrier_wait(empty + stage, state.phase)
                    if const_expr(not variant.gathered) or warp == 0:
                        self.load_weight(own, pipeline, tile.n_tile, StageFill(k_slice, stage, boxes), multicast)
                if const_expr(variant.gathered):
                    target = shared_address(s_x.iterator) + stage * variant.x_bytes
                    self.row_gather.copy(source.x, row_numbers, k_slice, target, warp)
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                if const_expr(variant.block_scales):
                    cute.copy(
                        source.scales.tma,
                        scales.source[(None, 0, k_slice)],
                        scales.shared[(None, stage)],
                        tma_bar_ptr=full + stage,
                    )
                for chunk in cutlass.range_constexpr(0 if variant.gathered else self.k_chunks):
                    for b in cutlass.range_constexpr(variant.boxes):
                        if b < boxes:
                            cute.copy(
                                source.tma,
                                partitions[b].source[(None, 0, k_slice * self.k_chunks + chunk)],
                                partitions[b].shared[(None, (stage * self.k_chunks + chunk) * variant.boxes)],
                                tma_bar_ptr=full + stage,
                                mcast_mask=x_mask,
                            )
                state = state.after(variant.stages)
        if const_expr(variant.gathered):
            copies_wait()
        if const_expr(variant.multicast_peers > 1):
            # Producer tail: wait once on every empty barrier, oldest stage first, so that this CTA does not exit before
            # its cluster peers have consumed all multicast data sent to it or by it. The wait for a stage that was
            # never filled passes at once.
            for _ in cutlass.range(variant.stages, unroll=1):
                cute.arch.mbarrier_wait(empty + state.stage, state.phase)
                state = state.after(variant.stages)

    @cute.jit
    def load_early(
        self, stages: int, first: WorkTile, inputs: Inputs, pipeline: Pipeline, own_warp: ProducerWarp
    ) -> Int32:
        """Request the weights of up to ``stages`` stages of the first work tile, before x may be read; return the
        number of those stages. Of experts only if their rows are settled."""
        early = cutlass.min(first.k_slices, stages)
        tile = self.scheduler.cta_tile(first.tile, own_warp.params, own_warp.coord)
        rows = self.scheduler.rows(tile.m_tile, inputs.m, inputs.expert_tiles, early=True)
        own, boxes = self.weight_of(inputs.weight, rows), self.boxes_of(rows)
        if const_expr(not self.variant.gathered) or own_warp.warp == 0:
            for i in cutlass.range(early, unroll=1):
                fill = StageFill(first.first_k_slice + i, i, boxes)
                self.load_weight(own, pipeline, tile.n_tile, fill, own_warp.multicast)
        return early

    def weight_of(self, weight: WeightSource, rows: TileRows) -> cute.Tensor:
        """The blocks of the expert whose rows these are, or of the one weight."""
        if not self.variant.grouped:
            return weight.blocks
        return weight_of_expert(weight.blocks, rows.expert, weight.n_blocks)

    @cute.jit
    def prefetch_first(self, weight: cute.Tensor, experts: Int32, cta: Int32):
        """Bring into L2 the first weights of the tile that this CTA starts with if every expert has one m tile. A wrong
        guess costs little, because nothing waits for these weights; without the prefetch memory would idle while the
        experts' tiles are counted."""
        variant, config, scheduler = self.variant, self.variant.config, self.scheduler
        coord = scheduler.cta_coord_in_cluster(cta % scheduler.cluster_size)
        n_blocks, k_blocks = weight.shape[0] // experts, weight.shape[1]
        n_tiles = scheduler.tiles(1, n_blocks).n_tile
        tile = tile_coordinates(cta // scheduler.cluster_size, experts, n_tiles, scheduler.band, variant.short)
        expert, n_tile = tile.m_tile, tile.n_tile
        first = expert * n_blocks + (n_tile * config.cluster_n + coord.n) * variant.blocks_n
        size = cutlass.min(_PREFETCHED_STAGES * variant.blocks_k, k_blocks) * variant.block.bytes
        if coord.m == 0:
            with cute.arch.elect_one():
                for r in cutlass.range_constexpr(variant.blocks_n):
                    row = cutlass.min(first + r, weight.shape[0] - 1)
                    bulk_prefetch(weight.iterator.toint() + Int64(row) * k_blocks * variant.block.bytes, size)

    def boxes_of(self, rows: TileRows) -> Int32 | int:
        """The number of boxes of a tile that hold a token; the others keep old data, which reaches no stored result."""
        variant = self.variant
        if variant.gathered:
            return 0
        boxes = cutlass.min(cute.ceil_div(rows.end - rows.first, variant.box_tokens), variant.boxes)
        return cutlass.max(boxes, 0) if const_expr(variant.config.cluster_m > 1) else boxes

    def partition(self, source: XSource, s_x: cute.Tensor, rows: TileRows, coord: ClusterCoord) -> list[BoxPartition]:
        """TMA's view of each box of a tile of x."""
        variant, box = self.variant, self.variant.box_tokens
        group, cluster = cute.group_modes, cute.make_layout(variant.config.cluster_n)
        # The last box that is fetched ends at the last token, rounded up to eight: rows past m are slow, and the rows
        # that it shares with the previous box are not. A shift, and a uniform value, because the first copy of x
        # waits for this.
        last, partitions = cutlass.max(((rows.end - rows.first + 7) >> 3) - box // 8, 0), []
        for b in range(variant.boxes):
            eights = cute.arch.make_warp_uniform(cutlass.min(b * box // 8, last)) if b > 0 else 0
            s_boxes = cute.make_tensor(s_x.iterator + eights * (8 * variant.chunk_k), source.box_layout.outer)
            tokens_on = cute.domain_offset((rows.first + eights * 8, 0), source.x)
            g_x = cute.local_tile(tokens_on, (box, variant.chunk_k), (None, None))
            partition = cpasync.tma_partition(source.tma, coord.n, cluster, group(s_boxes, 0, 2), group(g_x, 0, 2))
            partitions.append(BoxPartition(*partition))
        return partitions

    def partition_scales(self, source: ScaleSource, address: Int32, rows: TileRows) -> BoxPartition:
        """TMA's view of the scales of a tile's rows of x, from a multiple of four on: shared by stage, in global memory
        by (0, k-slice)."""
        variant, first = self.variant, rows.first
        if variant.grouped:
            first = first // 4 * 4
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=128)
        shared = cute.make_tensor(pointer, source.layout)
        tokens_on = cute.domain_offset((first, 0), source.scales)
        tiles = cute.local_tile(tokens_on, (variant.scale_tokens, variant.blocks_k), (None, None))
        whole = cute.make_layout(1)
        both = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        return BoxPartition(*cpasync.tma_partition(source.tma, 0, whole, *both))

    @cute.jit
    def load_weight(
        self, weight: cute.Tensor, pipeline: Pipeline, n_tile: Int32, fill: StageFill, multicast: WeightMulticast
    ):
        """Request a stage's weight blocks, or this CTA's share of them for all CTAs that share them."""
        variant = self.variant
        with cute.arch.elect_one():
            barrier = shared_address(pipeline.full + fill.stage)
            transaction_bytes = variant.weight_bytes + fill.boxes * (variant.x_bytes // variant.boxes)
            if const_expr(variant.block_scales):
                transaction_bytes += variant.scale_tokens * variant.blocks_k * 4
            cute.arch.mbarrier_arrive_and_expect_tx(pipeline.full + fill.stage, transaction_bytes)
            for r in cutlass.range_constexpr(variant.blocks_n):
                # past the last block of rows: that block again, whose results are not stored
                row = cutlass.min(n_tile * variant.blocks_n + r, weight.shape[0] - 1)
                for b in cutlass.range_constexpr(variant.blocks_k):
                    # past the last block along k: that block again, which meets the zeros that TMA puts past x's end
                    k_block = fill.k_slice * variant.blocks_k + b
                    if const_expr(variant.half_block_stages):
                        k_block = fill.k_slice // 2
                    if const_expr(variant.blocks_k_per_iteration > 1):
                        k_block = cutlass.min(k_block, weight.shape[1] - 1)
                    block = (Int64(row) * weight.shape[1] + k_block) * variant.block.bytes
                    source = weight.iterator.toint() + block
                    index = r * variant.blocks_k + b
                    target = pipeline.weights + fill.stage * variant.weight_bytes + index * variant.stage_block.bytes
                    if const_expr(variant.config.cluster_m == 1):
                        self.load_block(target, source, fill.k_slice, barrier, None)
                    else:
                        if r % variant.config.cluster_m == multicast.rank_m:
                            self.load_block(target, source, fill.k_slice, barrier, multicast.mask)

    def load_block(self, target: Int32, source: Int64, k_slice: Int32, barrier: Int32, mask: Int16 | None) -> None:
        """Request a block, or half of it. mask: the CTAs that get it; None for this CTA alone."""
        for copy in self.variant.stage_block.copies(half=k_slice % 2):
            to, start, size = target + copy.target, source + copy.source + copy.offset, Int32(copy.size)
            if mask is None:
                bulk_copy(to, start, size, barrier)
            else:
                bulk_copy_multicast(to, start, size, barrier, mask)
