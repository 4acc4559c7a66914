"""d.T (n, m) = w (n, k) @ x.T (k, m) on Hopper for few tokens: bound by the bytes of w, so built around their stream.

mma.sync m16n8k16 with the weight as operand A, decoded in registers, and x as operand B: eight tokens per
instruction. The transpose of d is computed; no other file depends on this.

Each warp runs its own pipeline of num_stages stages, so producer and consumer are the same warp. Warp i of W (warps)
takes the k blocks (128 columns) i, i + W, ... of a tile of tile_n features:

    wait full -> words and x fragments into registers -> refill the stage -> decode and multiply -> scale and accumulate

Shared memory, in this order; each number of bytes is a property of variant.py:

    what          bytes                            written by                             read by
    x             W * num_stages * x_bytes         its warp: two TMA boxes of 64 columns  its warp: ldmatrix
                                                   x tile_m tokens (m rows if m < tile_m)
                                                   in 128-byte swizzle; if gathered
                                                   cp.async
    weights       W * num_stages * weight_bytes    its warp: one bulk copy per 64-row     its warp: packed words
                                                   block; if tile_n is no multiple of 64,
                                                   of each block that has rows of the
                                                   tile 2 + 128 / scale_group copies (the
                                                   codes of each 64-column half, then
                                                   scales and zero points of each group)
    sums          reduction_bytes                  reduction_warps warps: their           all threads of the cluster
                                                   accumulators; before, in parts of
                                                   levels_stride, each warp: scales of    the warp
                                                   two levels (device/quad_levels.py)
    decode table  decode_table_bytes               all threads, before the first tile     all warps
    full          8 * W * num_stages               see below
    expert map    expert_map_bytes                 warp 0, before the first tile          all warps

Barriers:

    name             arrive count                who arrives; what it says                          who waits
    full[stage]      1, if gathered 33           the elected lane's expect_tx; if gathered each     its warp
                                                 lane when its cp.async are done. Transaction
                                                 bytes: weight_bytes + tma_x_bytes
    CTA or cluster   all threads of the cluster  sums are stored; sums have been read               all

    There is no empty barrier: the warp that refills a stage is the only one that reads it. Its copies do not queue up
    behind its loads, but the arrival at ``full`` does: they wait for the barrier's answer.

What a warp computes of a k block is in device/warp_product.py, and what the columns of x are beside up to four tokens
and scales of two levels.

Schedules: ``coop`` has one CTA per SM; ``pingpong`` has two, so that one streams while the other reduces.

At the end of a tile the warps' accumulators are reduced through shared memory in a fixed order: over the warps, and
with split_k over the CTAs of the cluster through distributed shared memory. The grid is persistent, and the pipelines
do not drain between tiles: a warp has already requested its first k blocks of the next tile.

Programmatic dependent launch: weights are requested before ``griddepcontrol.wait``, see sm90_mixed_gemm/kernel.py,
which also says what grouped means. If gathered, a warp copies its rows of x by cp.async (device/row_gather.py), and
ldmatrix reads them without a fence.

Registers per thread: m16_atoms x token_blocks x 4 accumulators (64 at most), the code words of a batch of rows (two for
each bit of a code and each of its m16 atoms: 32 at most), 16 x token_blocks words of x, and the scales of a block if
they take at most 256 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from w4gemm.core.epilogue import EpilogueOperands
from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.epilogue_math import EpilogueMath, QuadOperands, scaled
from w4gemm.kernels.device.expert_tiles import (
    ExpertTileMap,
    ExpertTiles,
    first_rows,
    max_m_tiles,
    operands_of_expert,
    weight_of_expert,
)
from w4gemm.kernels.device.launch import memory_of_launch
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.quad_levels import QuadLevels
from w4gemm.kernels.device.row_gather import RowGather
from w4gemm.kernels.device.scheduler import tile_coordinates
from w4gemm.kernels.device.warp_product import GroupColumns, WarpProduct, Words
from w4gemm.kernels.sm90_decode.variant import ReductionRound, Sm90DecodeVariant
from w4gemm.packing.block import BLOCK_N, STRIP_N, Copy
from w4gemm.packing.codecs.pairs_decode import own_pairs
from w4gemm.ptx.memory import (
    arrive_and_expect,
    bulk_copy,
    cluster_address,
    fence_release_shared,
    load_matrix,
    load_shared_cluster,
    load_shared_f32x4,
    shared_address,
    store_shared_f32,
    store_shared_f32x4,
    wait_barrier,
)

_DTYPES = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}


class WarpPipeline(NamedTuple):
    """Stages of one warp, in shared memory."""

    full: cute.Pointer
    """mbarrier of the warp's first stage; one per stage follows."""
    x: cute.Tensor
    """x of all warps' stages."""
    weights: Int32
    """Address of the weights of the warp's first stage."""
    warp: Int32


class XCopy(NamedTuple):
    """Source and destination of the copies of x."""

    tma: cute.CopyAtom | None
    """None if gathered."""
    source: cute.Tensor
    """Boxes by (token tile, 64 columns); if grouped, TMA's (m, k); if gathered, x."""
    target: cute.Tensor
    """Boxes in shared memory; if grouped, x of all warps' stages."""


class LoopParams(NamedTuple):
    """Bounds of a warp's loop over its tiles and k blocks."""

    clusters: Int32
    m_tiles: Int32
    n_tiles: Int32
    first_k_block: Int32
    """The first of this warp in every tile."""
    k_blocks_per_warp: Int32
    """k blocks of one tile per warp."""
    blocks_n: Int32
    """Packed blocks along n of one weight."""
    expert_tiles: ExpertTiles | None
    """None for a single weight."""
    indices: cute.Tensor | None
    """int32 (m,): row of x by row of d; None unless gathered."""


class NextBlock(NamedTuple):
    """The k block that a warp requests next, as many stages ahead of the multiplication as the pipeline has. It is
    stepped, not computed, because integer divisions in the loop would cost a tenth of its instructions."""

    tile: Int32
    m_coord: Int32
    """Index of the token tile; if grouped, its first row of d."""
    n_tile: Int32
    k_block: Int32
    k_blocks_left: Int32
    """k blocks left in the tile, this one included."""
    expert: Int32
    row: Int32
    """If gathered, the row of x that this lane looked up for the tile."""


class LoadedQuad(NamedTuple):
    """Operands of a quad, loaded before its sums are there."""

    operands: QuadOperands
    channel_scales: list[Float32 | None]
    """Scales of the four features; None without such scales."""


class Sm90DecodeKernel:
    """The kernel for one :class:`Sm90DecodeVariant`; an instance is what ``cute.compile`` is given."""

    def __init__(self, variant: Sm90DecodeVariant):
        self.variant = variant
        self.dtype = _DTYPES[variant.kind]
        self.decoder = variant.weight.decoder(allow_sum_scale=True, pairs=variant.pairs)
        groups, levels = variant.block.groups, variant.block.factors > 0  # of other scales it gains nothing
        self.columns: GroupColumns | None = None
        if variant.few and levels and groups > 1 and not (variant.few > 1 and self.decoder.factors_on_sums):
            self.columns = GroupColumns.of(variant.few, variant.block)
        self.product = WarpProduct(variant.weight, self.decoder, variant.token_blocks, self.columns)
        self.reader = BlockReader(variant.stage_block, variant.weight.codec.turns)
        self.levels: QuadLevels | None = None
        if variant.shares_levels and self.columns is None and not self.decoder.factors_on_sums:
            self.levels = QuadLevels(self.reader, self.decoder)
        early = variant.scales_in_registers or (self.levels is not None and variant.config.tile_m == 8)
        self.scales_in_registers = self.columns is not None or (early and not (levels and variant.few_registers))
        self.expert_tile_map = ExpertTileMap(variant.config.tile_m)
        self.row_gather = RowGather(variant.config.tile_m, 2, variant.itemsize, warps=1)
        decoder = self.decoder
        scales = variant.channel_scales, decoder.exact_scale if decoder.separate_scales else decoder.sum_scale
        self.epilogue_math = EpilogueMath(variant.epilogue, variant.kind, variant.out_kind, variant.vector, *scales)

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch. x is 16-bit; args.workspace is not used."""
        variant, config = self.variant, self.variant.config
        x, out = args.x, args.out
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        x_layout = cute.tile_to_shape(
            atom, (config.tile_m, 64, 2 * variant.num_stages * variant.warps), order=(0, 1, 2)
        )
        tma, tma_x = None, x
        if const_expr(not variant.gathered):
            shape = (variant.tokens, 64)
            box = cute.make_composed_layout(x_layout.inner, 0, cute.make_layout(shape, stride=(64, 1)))
            tma, tma_x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, box, shape)
        m_tiles = cute.ceil_div(out.shape[0], variant.tokens)
        if const_expr(variant.grouped):
            m_tiles = max_m_tiles(out.shape[0], args.rows.starts.shape[0], variant.tokens)
        tiles = m_tiles * cute.ceil_div(self.features(out), config.tile_n)
        clusters = cutlass.min(tiles, args.max_clusters)
        self.kernel(tma, tma_x, x_layout, args.behind_tma()).launch(
            grid=[clusters * config.split_k, 1, 1],
            block=[variant.threads, 1, 1],
            cluster=[config.split_k, 1, 1],
            smem=memory_of_launch(variant, clusters, args.max_clusters),
            min_blocks_per_mp=variant.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma: cute.CopyAtom | None,
        tma_x: cute.Tensor,
        x_layout: cute.ComposedLayout,
        args: Arguments,
    ):
        variant, config = self.variant, self.variant.config
        weight, out, operands = args.weight, args.out, args.epilogue
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.memory.SmemAllocator()
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
        warp_weight_bytes = variant.num_stages * variant.weight_bytes
        s_weight = smem.allocate_array(Int32, variant.warps * warp_weight_bytes // 4, byte_alignment=128)
        s_sums = smem.allocate_array(Float32, variant.reduction_bytes // 4, byte_alignment=16)
        table = Int32(0)
        if const_expr(variant.pairs is not None):
            table = shared_address(smem.allocate_array(Int32, variant.decode_table_bytes // 4, byte_alignment=128))
        full = (
            smem.allocate_array(Int64, variant.warps * variant.num_stages, byte_alignment=8) + warp * variant.num_stages
        )
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(variant.num_stages):
                cute.arch.mbarrier_init(full + i, 33 if variant.gathered else 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

        if const_expr(not variant.gathered):
            if warp == 0:
                cpasync.prefetch_descriptor(tma)
        expert_tiles = None
        if const_expr(variant.grouped):
            expert_tiles = ExpertTiles(smem.allocate_tensor(Int32, cute.make_layout(variant.expert_map)), args.rows)
            if args.rows.settled == 0:
                cute.arch.griddepcontrol_wait()
            if warp == 0:
                self.expert_tile_map.fill(expert_tiles)
            cute.arch.sync_threads()

        cta = cute.arch.block_idx()[0]
        rank, cluster = cta % config.split_k, cta // config.split_k
        clusters = cute.arch.grid_dim()[0] // config.split_k
        m_tiles = cute.ceil_div(out.shape[0], variant.tokens)
        n_tiles = cute.ceil_div(self.features(out), config.tile_n)
        blocks_n = weight.shape[0]
        if const_expr(variant.grouped):
            m_tiles, blocks_n = expert_tiles.m_tiles, blocks_n // expert_tiles.experts
        # this warp's k blocks: first, first + W, ... of the CTA's range
        k_blocks = weight.shape[1]
        begin, end = k_blocks * rank // config.split_k, k_blocks * (rank + 1) // config.split_k
        first = begin + warp
        k_blocks_per_warp = (end - first + variant.warps - 1) // variant.warps
        tiles = (m_tiles * n_tiles - cluster + clusters - 1) // clusters
        total = k_blocks_per_warp * tiles
        pipeline = WarpPipeline(full, s_x, shared_address(s_weight) + warp * warp_weight_bytes, warp)
        params = LoopParams(
            clusters, m_tiles, n_tiles, first, k_blocks_per_warp, blocks_n, expert_tiles, args.rows.indices
        )

        early = cutlass.min(total, variant.num_stages)
        cursor = self.start_tile(cluster, params, early=True)
        for i in cutlass.range(cutlass.min(early, variant.early_stages), unroll=1):
            self.load_weight(weight, blocks_n, pipeline, cursor, i)
            cursor = self.step(cursor, params, early=True)
        if const_expr(variant.pairs is not None):  # while the first weights are on their way
            self.decoder.fill_table(table, thread, variant.threads)
            cute.arch.sync_threads()
            table = own_pairs(table, thread, variant.pairs)
        if const_expr(self.columns is not None):
            self.store_zeros(pipeline, thread % 32)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        x_source = XCopy(tma, tma_x, s_x)
        if const_expr(not variant.grouped):  # gathered problems are grouped
            x_source = self.partition(x_source)
        cursor = self.start_tile(cluster, params)
        for i in cutlass.range(early, unroll=1):
            if i >= variant.early_stages:
                self.load_weight(weight, blocks_n, pipeline, cursor, i)
            self.load_x(x_source, pipeline, cursor, i)
            cursor = self.step(cursor, params)

        levels = shared_address(s_sums) + warp * variant.levels_stride
        acc = cute.make_rmem_tensor((4, variant.token_blocks, variant.m16_atoms), Float32)
        left, state = total - early, PipelineState.consumer()
        for tile in cutlass.range(cluster, m_tiles * n_tiles, clusters, unroll=1):
            acc.fill(0.0)
            for _ in cutlass.range(k_blocks_per_warp, unroll=1):
                wait_barrier(full + state.stage, state.phase)
                x_fragments = self.read_x(pipeline, state.stage, thread % 32)
                for batch in cutlass.range_constexpr(variant.batches):
                    words, scales = self.read_weight(pipeline, state.stage, batch, thread % 32)
                    if const_expr(self.scales_in_registers and batch == variant.batches - 1):
                        cursor, left = self.refill(weight, x_source, pipeline, params, cursor, left, state.stage)
                    first = variant.strips_of(batch).start
                    if const_expr(self.levels is not None):
                        own = self.levels.exchanged(scales, levels, thread % 32)
                        self.product.multiply_shared(acc, first, words, own, x_fragments)
                    else:
                        self.product.multiply(acc, first, words, scales, x_fragments, table)
                if const_expr(not self.scales_in_registers):
                    cursor, left = self.refill(weight, x_source, pipeline, params, cursor, left, state.stage)
                state = state.after(variant.num_stages)
            m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, 1)
            token0, own_out, own_operands = m_tile * variant.tokens, out, operands
            if const_expr(variant.grouped):
                rows = self.expert_tile_map.find(expert_tiles, m_tile)
                token0, own_out = rows.first, first_rows(out, rows.end)
                own_operands = operands_of_expert(operands, rows.expert, rows.end)
            quads = self.load_operands(own_operands, token0, n_tile, rank, thread)
            if const_expr(self.levels is not None):
                self.scales_are_read()
            for i in cutlass.range_constexpr(len(variant.warp_reduction_rounds)):
                self.reduce_warps(acc, shared_address(s_sums), warp, thread % 32, variant.warp_reduction_rounds[i])
            if warp < variant.reduction_warps:
                self.store_partials(acc, shared_address(s_sums), warp, thread % 32)
            self.tile_barrier()
            self.store_tile(shared_address(s_sums), own_out, quads, token0, n_tile, rank, thread)
            self.tile_barrier()  # the partials have been read, by the CTAs of the cluster too

    def scales_are_read(self) -> None:
        """Wait until lanes have read the scales that they prepared for one another, so that sums may overwrite them:
        lanes of the own warp or, if warps hand sums over, of all."""
        if self.variant.warp_reduction_rounds:
            cute.arch.sync_threads()
        else:
            cute.arch.sync_warp()

    def features(self, out: cute.Tensor) -> Int32:
        """n: d has one column per feature, or one per two features if the epilogue is gated."""
        return out.shape[1] * 2 if self.variant.epilogue.gated else out.shape[1]

    @cute.jit
    def tile_barrier(self):
        """Wait for all threads of the cluster."""
        if const_expr(self.variant.config.split_k > 1):
            fence_release_shared()
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    # -------------------------------------------------------------------------------------------------- pipeline

    @cute.jit
    def start_tile(self, tile: Int32, params: LoopParams, early: bool = False) -> NextBlock:
        """The cursor at this warp's first k block of a tile. early: of weights only, see
        :meth:`ExpertTileMap.rows_of`."""
        m_coord, n_tile = tile_coordinates(tile, params.m_tiles, params.n_tiles, 1)
        expert, row = Int32(0), Int32(0)
        if const_expr(self.variant.grouped):
            rows = self.expert_tile_map.find(params.expert_tiles, m_coord, early)
            expert, m_coord = rows.expert, rows.first
            if const_expr(self.variant.gathered and not early):
                row = self.row_gather.indices(params.indices, m_coord, rows.end, 0)[0]
        return NextBlock(tile, m_coord, n_tile, params.first_k_block, params.k_blocks_per_warp, expert, row)

    @cute.jit
    def step(self, cursor: NextBlock, params: LoopParams, early: bool = False) -> NextBlock:
        """The cursor one k block on, in the next tile if this one is done."""
        after = cursor._replace(k_block=cursor.k_block + self.variant.warps, k_blocks_left=cursor.k_blocks_left - 1)
        if after.k_blocks_left == 0:
            after = self.start_tile(after.tile + params.clusters, params, early)
        return after

    @cute.jit
    def refill(
        self,
        weight: cute.Tensor,
        x_source: XCopy,
        pipeline: WarpPipeline,
        params: LoopParams,
        cursor: NextBlock,
        left: Int32,
        stage: Int32,
    ) -> tuple[NextBlock, Int32]:
        """Request the next k block, if any is left, into a stage that all lanes have read."""
        cute.arch.sync_warp()
        if left > 0:
            announced = self.load_weight(weight, params.blocks_n, pipeline, cursor, stage)
            self.load_x(x_source, pipeline, announced, stage)
            cursor = self.step(cursor, params)
            left -= 1
        return cursor, left

    @cute.jit
    def load_weight(
        self, weight: cute.Tensor, blocks_n: Int32, pipeline: WarpPipeline, cursor: NextBlock, stage: Int32
    ) -> NextBlock:
        """Announce a stage's bytes, those of x included, to the full barrier, and request its weights. Returns a cursor
        whose copies come behind the warp's loads from shared memory, as these do."""
        variant, rows = self.variant, self.variant.config.tile_n
        own = weight_of_expert(weight, cursor.expert, blocks_n) if const_expr(variant.grouped) else weight
        barrier = shared_address(pipeline.full + stage)
        loaded = arrive_and_expect(barrier, variant.weight_bytes + variant.tma_x_bytes)
        cursor = cursor._replace(k_block=cursor.k_block + loaded)
        with cute.arch.elect_one():
            target = pipeline.weights + stage * variant.weight_bytes
            if const_expr(variant.whole_blocks):
                for i in cutlass.range_constexpr(rows // BLOCK_N):
                    source = self.source(own, cursor.n_tile * rows // BLOCK_N + i, cursor.k_block)
                    copies = variant.stage_block.copies(k_block=cursor.k_block)
                    self.copy(copies, source, target + i * variant.stage_block.bytes, barrier)
            else:
                row, at, blocks = cursor.n_tile * rows, 0, variant.blocks_of_tile
                for i in cutlass.range_constexpr(blocks.most):
                    source, count = self.source(own, row // BLOCK_N, cursor.k_block), rows
                    if const_expr(blocks.most > 1):
                        count = cutlass.min(BLOCK_N - row % BLOCK_N, rows - at)
                    copies = variant.stage_block.row_copies(row % BLOCK_N, count, at, cursor.k_block)
                    if const_expr(i < blocks.fewest):
                        self.copy(copies, source, target, barrier)
                    else:
                        if count > 0:
                            self.copy(copies, source, target, barrier)
                    row, at = row + count, at + count
        return cursor

    def source(self, weight: cute.Tensor, block: Int32, k_block: Int32) -> Int64:
        """The address of a packed block. A tile may reach past the last one along n: it takes that one again, and rows
        past n are not stored."""
        block = cutlass.min(block, weight.shape[0] - 1)
        return weight.iterator.toint() + (Int64(block) * weight.shape[1] + k_block) * self.variant.block.stride

    def copy(self, copies: list[Copy], source: Int64, target: Int32, barrier: Int32) -> None:
        """Request runs of bytes of a packed block."""
        for copy in copies:
            bulk_copy(target + copy.target, source + copy.source + copy.offset, Int32(copy.size), barrier)

    @cute.jit
    def load_x(self, x_source: XCopy, pipeline: WarpPipeline, cursor: NextBlock, stage: Int32):
        """Request a stage's x."""
        variant, m_tile = self.variant, cursor.m_coord
        if const_expr(variant.gathered):
            target = shared_address(x_source.target.iterator) + self.x_stage(pipeline, stage) * variant.x_bytes
            self.row_gather.copy(x_source.source, [cursor.row], cursor.k_block, target, 0)
            cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full + stage)
        elif const_expr(variant.grouped):  # boxes from any row on
            rows = cute.domain_offset((cursor.m_coord, 0), x_source.source)
            x_source = self.partition(x_source._replace(source=rows))
            m_tile = 0
        for half in cutlass.range_constexpr(0 if variant.gathered else 2):
            cute.copy(
                x_source.tma,
                x_source.source[(None, m_tile, cursor.k_block * 2 + half)],
                x_source.target[(None, self.x_stage(pipeline, stage) * 2 + half)],
                tma_bar_ptr=pipeline.full + stage,
            )

    def x_stage(self, pipeline: WarpPipeline, stage: Int32) -> Int32:
        """Index of a stage among those of all warps."""
        return pipeline.warp * self.variant.num_stages + stage

    def partition(self, x: XCopy) -> XCopy:
        """Divide TMA's x (m, k) and the stages of x into boxes."""
        variant, group = self.variant, cute.group_modes
        shape = (variant.tokens, 64)
        layout = (*shape, 2 * variant.num_stages * variant.warps), (64, 1, 64 * variant.config.tile_m)
        boxes = cute.make_tensor(x.target.iterator, cute.make_layout(layout[0], stride=layout[1]))
        tiles = cute.local_tile(x.source, shape, (None, None))
        target, source = cpasync.tma_partition(x.tma, 0, cute.make_layout(1), group(boxes, 0, 2), group(tiles, 0, 2))
        return XCopy(x.tma, source, target)

    def read_weight(
        self, pipeline: WarpPipeline, stage: Int32, batch: int, lane: Int32
    ) -> tuple[list[list[Words]], Callable[[int, int], Words] | list[list[Words]]]:
        """Code words [m16 atom][8 steps][words of a step] of the rows of a batch of a stage, and a function of m16 atom
        and group that gives the scale words; if lanes prepare scales for one another, the scale words of the lane's own
        groups [m16 atom][run]."""
        variant = self.variant
        address, strips = pipeline.weights + stage * variant.weight_bytes, variant.strips_of(batch)
        first = strips.start
        if variant.whole_blocks:
            block, first = divmod(first, BLOCK_N // STRIP_N)
            address = address + block * variant.stage_block.bytes
        words = []
        for atom in range(len(strips)):
            halves = [self.reader.codes(address, half, first + atom, lane) for half in range(2)]
            words.append([self.reader.words_of_step(codes, step) for codes in halves for step in range(4)])

        together, columns = variant.block.groups_per_word, self.columns

        scales, pair = address + variant.stage_block.code_bytes, lane // 4
        if self.levels is not None:
            return words, [self.levels.words(scales, strip, lane) for strip in range(first, first + len(words))]

        def load_scale(atom: int, g: int) -> tuple[Int32, ...]:
            strip = first + atom
            return self.reader.scales(scales, g, strip, pair) + self.reader.factors(scales, strip, pair)

        if columns is not None:
            loaded = []
            for strip in range(first, first + len(words)):
                only = columns.is_zero(lane) if columns.zeros else None
                factors, of_lane = self.reader.factors(scales, strip, pair, only=only), []
                for g in (columns.group(number, lane) for number in range(columns.of_lane)):
                    fields = self.reader.scales(scales, g, strip, pair, only=only)
                    if together > 1:  # this group's come first
                        fields = tuple(word >> g % together * 8 for word in fields)
                    of_lane.append(fields + factors)
                loaded.append(of_lane)
            return words, lambda atom, number: loaded[atom][number]
        if not self.scales_in_registers:
            return words, load_scale
        firsts = range(0, variant.block.groups, together)
        loaded = [[load_scale(atom, g) for g in firsts] for atom in range(len(words))]
        return words, lambda atom, g: loaded[atom][g // together]

    def store_zeros(self, pipeline: WarpPipeline, lane: Int32) -> None:
        """Store a row of zeros behind the tokens of each of the warp's stages."""
        variant = self.variant
        for stage in range(variant.num_stages):
            x = shared_address(pipeline.x.iterator) + self.x_stage(pipeline, Int32(stage)) * variant.x_bytes
            for half in range(2):
                store_shared_f32(x + half * (variant.x_bytes // 2) + GroupColumns.ZEROS * 128 + lane * 4, Float32(0.0))
        cute.arch.sync_warp()

    def read_x(self, pipeline: WarpPipeline, stage: Int32, lane: Int32) -> list[list[tuple[Int32, Int32]]]:
        """A stage's x fragments [token block][8 steps], two registers each."""
        variant = self.variant
        base = shared_address(pipeline.x.iterator) + self.x_stage(pipeline, stage) * variant.x_bytes
        row = lane % 8
        fragments = []
        for tb in range(variant.token_blocks):
            steps: list = []
            for quarter in range(4):  # of 32 columns: four 8 x 8 matrices, the fragments of two steps
                if const_expr(self.columns is not None):
                    group = (quarter * 32 + lane // 16 * 16) // variant.block.scale_group
                    row = self.columns.row(group, lane % 8, variant.tokens)
                swizzled = (quarter % 2 * 4 + lane // 8) ^ row
                r = load_matrix(base + quarter // 2 * (variant.x_bytes // 2) + tb * 1024 + row * 128 + swizzled * 16)
                steps += [(r[0], r[1]), (r[2], r[3])]
            fragments.append(steps)
        return fragments

    # ----------------------------------------------------------------------------------- reduction and epilogue

    @cute.jit
    def reduce_warps(self, acc: cute.Tensor, s_sums: Int32, warp: Int32, lane: Int32, round: ReductionRound):
        """Hand the accumulators of warps round.after .. round.before to the first warps, which add them: the reduction
        buffer has no room for the partials of all warps."""
        variant = self.variant
        count = variant.m16_atoms * variant.token_blocks
        flat = cute.make_tensor(acc.iterator, cute.make_layout(4 * count))
        slot = warp - round.after if warp >= round.after else warp
        address = s_sums + slot * variant.partials_bytes + lane * 16
        if warp >= round.after and warp < round.before:
            for i in cutlass.range_constexpr(count):
                store_shared_f32x4(address + i * 512, [flat[4 * i + j] for j in range(4)])
        cute.arch.sync_threads()
        if warp < round.before - round.after:
            for i in cutlass.range_constexpr(count):
                other = load_shared_f32x4(address + i * 512)
                for j in cutlass.range_constexpr(4):
                    flat[4 * i + j] = flat[4 * i + j] + other[j]
        cute.arch.sync_threads()

    def store_partials(self, acc: cute.Tensor, s_sums: Int32, warp: Int32, lane: Int32) -> None:
        """Store this warp's accumulators to the reduction buffer [warp][token][feature]."""
        variant = self.variant
        if self.columns is not None:
            for atom in range(variant.m16_atoms):
                own = self.columns.added_up([acc[i, 0, atom] for i in range(4)])
                for i, total in enumerate(own):
                    acc[i, 0, atom] = total
        for tb in range(variant.token_blocks):
            for atom in range(variant.m16_atoms):
                for i in range(4):
                    token = tb * 8 + lane % 4 * 2 + i % 2
                    feature = atom * 16 + lane // 4 + i // 2 * 8
                    index = (warp * variant.config.tile_m + token) * variant.reduction_row + feature
                    store_shared_f32(s_sums + index * 4, acc[i, tb, atom])

    @property
    def quads_per_thread(self) -> int:
        """Quads, four features of one token, that a thread stores."""
        variant, config = self.variant, self.variant.config
        return -(-config.tile_n // config.split_k // 4 * variant.tokens // variant.threads)

    def quad(self, index: int, rank: Int32, thread: Int32) -> tuple[Int32, Int32]:
        """(token, first feature) in the tile of a thread's ``index``-th quad; the last one may lie past the tile."""
        features = self.variant.config.tile_n // self.variant.config.split_k  # per rank
        number = index * self.variant.threads + thread
        return number // (features // 4), rank * features + number % (features // 4) * 4

    def load_operands(
        self, operands: EpilogueOperands, token0: Int32, n_tile: Int32, rank: Int32, thread: Int32
    ) -> list[LoadedQuad]:
        """The operands of each of a thread's quads, requested before the reduction."""
        config, math = self.variant.config, self.epilogue_math
        alpha, loaded = math.load_alpha(operands), []
        for i in range(self.quads_per_thread):
            token, feature = self.quad(i, rank, thread)
            row, feature = token0 + token, n_tile * config.tile_n + feature
            biases = [math.load_bias(operands, feature + j) for j in range(4)]
            channels = [math.load_channel_scale(operands, feature + j) for j in range(4)]
            quad = QuadOperands(alpha, biases, math.load_residual(operands, row, feature))
            loaded.append(LoadedQuad(quad, channels))
        return loaded

    @cute.jit
    def store_tile(
        self,
        s_sums: Int32,
        out: cute.Tensor,
        quads: list[LoadedQuad],
        token0: Int32,
        n_tile: Int32,
        rank: Int32,
        thread: Int32,
    ):
        """Sum the partials over ranks and warps, one quad per thread at a time, and store it; each rank stores its
        share of the features."""
        variant, config = self.variant, self.variant.config
        for i in cutlass.range_constexpr(self.quads_per_thread):
            token, feature = self.quad(i, rank, thread)
            row, column = token0 + token, n_tile * config.tile_n + feature
            if token < variant.tokens and row < out.shape[0] and column < self.features(out):
                sums = [Float32(0.0)] * 4
                for r in cutlass.range_constexpr(config.split_k):
                    base, load = s_sums, load_shared_f32x4
                    if const_expr(config.split_k > 1):
                        base, load = cluster_address(s_sums, Int32(r)), load_shared_cluster
                    for w in cutlass.range_constexpr(variant.reduction_warps):
                        address = base + ((w * config.tile_m + token) * variant.reduction_row + feature) * 4
                        partial = load(address)
                        sums = [sums[j] + partial[j] for j in range(4)]
                sums = [scaled(y, c) for y, c in zip(sums, quads[i].channel_scales, strict=True)]
                self.epilogue_math.store_quad(sums, quads[i].operands, out, row, column)
