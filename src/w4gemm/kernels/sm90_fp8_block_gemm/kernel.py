"""d (m, n) = x (m, k) @ w (n, k).T on Hopper, both fp8 with float32 scales: of 128 columns, w's of 128 rows besides, or
of rows.

Nothing is decoded, so both operands of WGMMA come from shared memory, and x is operand A: a thread has sums of two
tokens of each 64, so that two factors, x's scales times that of the weight, are enough for all its sums of 128 columns.
sm90_fp8_gemm, whose weights are operand A in registers, needs one for each token of a tile.

The pipeline, producer, scheduler, clusters, experts and the order of launches are sm90_mixed_gemm's, see its kernel.py.
What differs:

    warpgroup     role      registers per thread
    0, 1          consumer  240. Each has tile_m / 2 tokens and all features of a tile or, of a tile of 64 tokens, all
                            tokens and half of the features. row_blocks * own_n / 2 are accumulators, sets_of_sums *
                            own_n / 2 sums of the 128 columns that are multiplied
    2             producer  24

    what          bytes                             written by                      read by
    x             num_stages * x_bytes              TMA, 128-byte swizzle           WGMMA, as operand A
    staging       2 * staging_bytes                 consumers: rows of 16-bit d     TMA
                                                    without gates and residuals
    weights       num_stages * weight_bytes         bulk copies: core matrices      WGMMA, as operand B
                                                    [half][row of eight features]
                                                    [16 columns], then scales       consumers
    block scales  num_stages * block_scale_bytes    TMA                             consumers

Timeline of a warpgroup, by 64-token block of a stage: wait for its turn; four WGMMAs, which begin new sums; pass the
turn on; meanwhile its factors are loaded; wait until the sums are there; add them, times factors, to the accumulators.
So the WGMMAs of one warpgroup queue up behind those of the other, and while one adds, the tensor cores work for the
other. Without turns both may multiply together and then add together. Where registers are enough for two sets of sums,
a turn is two stages, so that the tensor cores work for the warpgroup itself besides.

Without scales of 128 columns (variant.promotes is False) there are neither new sums nor turns: WGMMAs add to the
accumulators, and a stage is released when the next one is queued behind it. The scales of rows are loaded while the
last stage is multiplied.

Besides the barriers of sm90_mixed_gemm, named barriers 4 and 5, of 256 threads: the turn of warpgroup 0 and 1. The
other one arrives, its own threads wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values

from w4gemm.kernels.device.epilogue_math import EpilogueMath, QuadOperands, scaled
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.scheduler import TileCoord
from w4gemm.kernels.sm90_fp8_block_gemm.variant import BOX_TOKENS, SCALE_BYTES, Sm90Fp8BlockVariant
from w4gemm.kernels.sm90_mixed_gemm.consumer import ConsumerMemory, OutputTile
from w4gemm.kernels.sm90_mixed_gemm.epilogue import OutputCoord, Staging, boxes_of_tile, store_box, store_staged
from w4gemm.kernels.sm90_mixed_gemm.kernel import DTYPES, Producer, Sm90MixedGemmKernel
from w4gemm.kernels.sm90_mixed_gemm.tile_scheduler import Pipeline, SchedulerParams, TileScheduler
from w4gemm.kernels.sm90_mixed_gemm.values import flattened
from w4gemm.kernels.sm90_mixed_gemm.variant import TOKEN_BYTES
from w4gemm.packing.block import BLOCK_N, MATRICES_OF_ROW, MATRIX_BYTES, Copy
from w4gemm.ptx.arithmetic import fma, pack_half2, to_float
from w4gemm.ptx.memory import load_shared, store_matrix

_EPILOGUE_BARRIER = 2
"""The first of two named barriers: a warpgroup's staging buffer is filled, or read out."""
_BAND_TOKENS = 2048
"""Tokens of a band of tiles: a wave then reads about as many rows of x as of weights, both of a byte a number."""
_TURN_BARRIER = 4
"""The first of two named barriers: a warpgroup may multiply."""
_UNROLLED_STAGES = 8
"""Stages in a row of one set of sums: ptxas then tests for the next one while sums are added."""


class Sm90Fp8BlockGemmKernel(Sm90MixedGemmKernel):
    """The device code of one :class:`Sm90Fp8BlockVariant`."""

    def __init__(self, variant: Sm90Fp8BlockVariant):
        self.variant, self.dtype = variant, DTYPES[variant.kind]
        self.scheduler = TileScheduler(variant, _BAND_TOKENS)
        self.producer = BlockProducer(variant, self.scheduler)
        self.consumer = BlockConsumer(variant, self.scheduler)

    def tiled_mma(self) -> cute.TiledMma:
        variant = self.variant
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            DTYPES[variant.weight.decoded],
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (variant.warpgroups_m, variant.warpgroups_n // variant.warpgroups_m, 1),
            tiler_mn=(BOX_TOKENS, variant.own_n),
        )


class StageOperands(NamedTuple):
    """What a thread multiplies, and the registers for it."""

    x: list[cute.Tensor]
    """x of all stages as operand A, by 64-token block of the warpgroup."""
    weights: cute.Tensor
    """Weights of all stages as operand B."""
    sums: list[cute.Tensor]
    """What WGMMAs add to: sets of sums of 128 columns, or the accumulators of each 64-token block."""
    accumulators: cute.Tensor
    """Flat, by 64-token block."""


class BlockCoord(NamedTuple):
    """A consumer thread."""

    warpgroup: Int32
    thread: Int32
    """0 .. 127 in the warpgroup."""
    cta_rank: Int32
    """Rank of the CTA in its cluster."""


class Factors(NamedTuple):
    """What a thread multiplies the sums of a tile by, or of a box of 64 tokens x 64 features."""

    alpha: Float32 | None
    tokens: list[Float32]
    """Scales of tokens g and g + 8 of each 64; empty without."""
    features: list[Float32]
    """Scales of its two features of each eight; empty without."""

    def of_box(self, block: int, box: int) -> Factors:
        """Return the factors of a 64-token block and 64 features."""
        return Factors(self.alpha, self.tokens[2 * block : 2 * block + 2], self.features[16 * box : 16 * box + 16])

    def of_sum(self, eight: int, i: int) -> list[Float32]:
        """Return the scales of sum i of four, which are of tokens g, g, g + 8 and g + 8, and of eight features, number
        ``eight`` of the box."""
        return [*self.tokens[i // 2 : i // 2 + 1], *self.features[2 * eight + i % 2 :][:1]]


class BlockProducer(Producer):
    """Fills the pipeline, with the core matrices of the blocks along n of a stage one after the other."""

    def copies(self, index: int, k_slice: Int32, k_block: Int32) -> list[Copy]:
        variant, size = self.variant, self.variant.block.half_bytes
        copies = [Copy((half * variant.blocks_n + index) * size, half * size, 0, size) for half in range(2)]
        if variant.promotes and index % variant.blocks_per_scale == 0:
            place = variant.code_bytes + index // variant.blocks_per_scale * SCALE_BYTES
            copies.append(Copy(place, variant.block.code_bytes, 0, SCALE_BYTES))
        return copies


class BlockConsumer:
    """Multiplies and stores the tiles of one CTA. Run by both consumer warpgroups."""

    def __init__(self, variant: Sm90Fp8BlockVariant, scheduler: TileScheduler):
        self.variant, self.scheduler = variant, scheduler
        kinds = variant.bias_kind, variant.out_kind
        self.math = EpilogueMath(variant.epilogue, *kinds, variant.vector, variant.channel_scales)

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
        wg = cute.arch.make_warp_uniform(thread // 128)
        thr_mma = mma.get_slice(wg * 128)  # one for its threads, so that ptxas keeps descriptors in uniform registers
        box = (BOX_TOKENS * variant.warpgroups_m, variant.chunk_k)
        blocks = [cute.local_tile(pipeline.x, box, (i, 0, None)) for i in range(variant.row_blocks)]
        x = [mma.make_fragment_A(thr_mma.partition_A(block)) for block in blocks]
        weights = mma.make_fragment_B(thr_mma.partition_B(self.weights_of(pipeline)))
        shape = thr_mma.partition_shape_C((BOX_TOKENS * variant.warpgroups_m, config.tile_n))
        acc = cute.make_rmem_tensor((variant.accumulators,), Float32)
        sums = self.sums(acc, shape)
        operands, consumer = StageOperands(x, weights, sums, acc), BlockCoord(wg, thread % 128, cta_rank)
        mma_of_last = new_from_mlir_values(mma, extract_mlir_values(mma))  # what a loop sets does not leave it
        cute.arch.griddepcontrol_wait()
        if const_expr(variant.promotes):
            if wg == 1:
                self.pass_turn(wg)
        state = PipelineState.consumer()
        cluster_coord = self.scheduler.cta_coord_in_cluster(cta_rank)
        count, share = self.scheduler.work_tiles(params)
        for index in cutlass.range(count, unroll=1):
            work_tile = self.scheduler.work_tile(index, params, share)
            tile = self.scheduler.cta_tile(work_tile.tile, params, cluster_coord)
            k_slices, unroll = work_tile.k_slices, _UNROLLED_STAGES
            if const_expr(variant.promotes):
                acc.fill(0.0)
                filled = pipeline
                if const_expr(variant.grouped):
                    rows = self.scheduler.rows(tile.m_tile, memory.d.shape[0], memory.expert_tiles)
                    filled = pipeline._replace(scales=pipeline.scales + rows.first % 4 * 4)
                ready = self.is_filled(pipeline, state)
                if const_expr(variant.sets_of_sums == 2):
                    for _ in cutlass.range(k_slices // 2, unroll=1):
                        ready = self.multiply_two(mma, filled, operands, state, ready, consumer)
                        state = state.after(variant.num_stages).after(variant.num_stages)
                    k_slices, unroll = k_slices % 2, 1
                for _ in cutlass.range(k_slices, unroll=unroll):
                    ready = self.multiply_one(mma_of_last, filled, operands, state, ready, consumer)
                    state = state.after(variant.num_stages)
            else:
                state = self.accumulate(mma, pipeline, operands, state, k_slices, consumer)
            own = self.output_tile(tile, wg, thread % 128, memory)
            factors = self.load_factors(own)
            if const_expr(not variant.promotes):
                warpgroup.wait_group(0)
                self.scheduler.release(pipeline, state.stage, cta_rank)
                state = state.after(variant.num_stages)
            if const_expr(variant.float32_staging):
                self.store_quads(acc, own, factors)
            else:
                self.store(acc, own, factors, memory, wg)
        if const_expr(variant.boxed):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def sums(self, acc: cute.Tensor, shape: Any) -> list[cute.Tensor]:
        """What WGMMAs add to: sets of sums, or the accumulators of each 64-token block."""
        if self.variant.promotes:
            return [cute.make_rmem_tensor(shape, Float32) for _ in range(self.variant.sets_of_sums)]
        size, layout = self.variant.own_n // 2, cute.make_layout(shape)
        return [cute.make_tensor(acc.iterator + i * size, layout) for i in range(self.variant.row_blocks)]

    @cute.jit
    def multiply_two(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: StageOperands,
        first: PipelineState,
        ready: Boolean,
        consumer: BlockCoord,
    ) -> Boolean:
        """Add two stages to the accumulators: while the sums of the first are added, the second is multiplied. No
        WGMMA is in flight at the end, because ptxas would serialize all of them. ready: whether the first is known to
        be filled; return it of the stage behind the two."""
        second = first.after(self.variant.num_stages)
        self.wait(pipeline, first, ready)
        self.wait_for_turn(consumer.warpgroup)
        factors = []
        for i, state in enumerate((first, second)):
            if const_expr(i == 1):
                self.wait(pipeline, state, Boolean(False))
            self.multiply(mma, operands, i, 0, state.stage)
            if const_expr(i == 1):
                self.pass_turn(consumer.warpgroup)
            factors.append(self.factors(pipeline, state.stage, 0, consumer))
        for i, state in enumerate((first, second)):
            warpgroup.wait_group(1 - i)
            self.scheduler.release(pipeline, state.stage, consumer.cta_rank)
            if const_expr(i == 1):
                ready = self.is_filled(pipeline, second.after(self.variant.num_stages))
            self.add(operands, i, 0, factors[i])
        return ready

    @cute.jit
    def multiply_one(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: StageOperands,
        state: PipelineState,
        ready: Boolean,
        consumer: BlockCoord,
    ) -> Boolean:
        """Add a stage to the accumulators, by 64-token blocks. ready: whether it is known to be filled; return it of
        the next one."""
        self.wait(pipeline, state, ready)
        for block in cutlass.range_constexpr(self.variant.row_blocks):
            self.wait_for_turn(consumer.warpgroup)
            self.multiply(mma, operands, 0, block, state.stage)
            self.pass_turn(consumer.warpgroup)
            factors = self.factors(pipeline, state.stage, block, consumer)
            warpgroup.wait_group(0)
            if const_expr(block == self.variant.row_blocks - 1):
                self.scheduler.release(pipeline, state.stage, consumer.cta_rank)
                ready = self.is_filled(pipeline, state.after(self.variant.num_stages))
            self.add(operands, 0, block, factors)
        return ready

    @cute.jit
    def accumulate(
        self,
        mma: cute.TiledMma,
        pipeline: Pipeline,
        operands: StageOperands,
        state: PipelineState,
        k_slices: Int32,
        consumer: BlockCoord,
    ) -> PipelineState:
        """Multiply all stages of a tile into the accumulators. A stage is released when the next one is queued behind
        it; return the state of the last one, which WGMMAs still read."""
        self.multiply_stage(mma, pipeline, operands, state, accumulate=False)
        for _ in cutlass.range(k_slices - 1, unroll=1):
            following = state.after(self.variant.num_stages)
            self.multiply_stage(mma, pipeline, operands, following, accumulate=True)
            warpgroup.wait_group(1)
            self.scheduler.release(pipeline, state.stage, consumer.cta_rank)
            state = following
        return state

    def multiply_stage(
        self, mma: cute.TiledMma, pipeline: Pipeline, operands: StageOperands, state: PipelineState, accumulate: bool
    ) -> None:
        """Wait for a stage, and queue all its WGMMAs."""
        cute.arch.mbarrier_wait(pipeline.full + state.stage, state.phase)
        warpgroup.fence()
        for block in range(self.variant.row_blocks):
            self.queue(mma, operands, block, block, state.stage, accumulate)
        warpgroup.commit_group()

    def is_filled(self, pipeline: Pipeline, state: PipelineState) -> Boolean:
        """Test whether a stage is filled, while sums are added: a wait would hold them up."""
        return cute.arch.mbarrier_test_wait(pipeline.full + state.stage, state.phase)

    @cute.jit
    def wait(self, pipeline: Pipeline, state: PipelineState, ready: Boolean):
        """Wait until a stage is filled, unless it is known to be."""
        if not ready:
            cute.arch.mbarrier_wait(pipeline.full + state.stage, state.phase)

    def wait_for_turn(self, wg: Int32) -> None:
        cute.arch.barrier(barrier_id=_TURN_BARRIER + wg, number_of_threads=256)

    def pass_turn(self, wg: Int32) -> None:
        """Let the other warpgroup multiply."""
        cute.arch.barrier_arrive(barrier_id=_TURN_BARRIER + 1 - wg, number_of_threads=256)

    def weights_of(self, pipeline: Pipeline) -> cute.Tensor:
        """The weights of all stages as operand B: (features, columns, stage)."""
        variant = self.variant
        row8_bytes, half_bytes = MATRICES_OF_ROW * MATRIX_BYTES, variant.blocks_n * variant.block.half_bytes
        columns = (16, (2, 2, 2)), (1, (MATRIX_BYTES, 2 * MATRIX_BYTES, half_bytes))
        layout = cute.make_layout(
            ((8, variant.config.tile_n // 8), columns[0], variant.num_stages),
            stride=((16, row8_bytes), columns[1], variant.weight_bytes),
        )
        pointer = cute.make_ptr(
            DTYPES[variant.weight.decoded], pipeline.weights, cute.AddressSpace.smem, assumed_align=128
        )
        return cute.make_tensor(pointer, layout)

    def multiply(self, mma: cute.TiledMma, operands: StageOperands, number: int, block: int, stage: Int32) -> None:
        """Begin new sums, set ``number`` of them, of a 64-token block and the 128 columns of a stage."""
        warpgroup.fence()
        self.queue(mma, operands, number, block, stage, accumulate=False)
        warpgroup.commit_group()

    def queue(
        self, mma: cute.TiledMma, operands: StageOperands, number: int, block: int, stage: Int32, accumulate: bool
    ) -> None:
        """Queue the WGMMAs of a 64-token block and the 128 columns of a stage."""
        x, weights, sums = operands.x[block], operands.weights, operands.sums[number]
        for step in range(4):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or step > 0)
            cute.gemm(mma, sums, x[(None, None, step, stage)], weights[(None, None, step, stage)], sums)

    def factors(self, pipeline: Pipeline, stage: Int32, block: int, consumer: BlockCoord) -> list[list[Float32]]:
        """The factors of a thread's sums of eight features, tokens g and g + 8 of even and odd ones, by scales of the
        weights."""
        variant, thread = self.variant, consumer.thread
        token = self.first_token(consumer.warpgroup, block) + thread // 32 * 16 + thread % 32 // 4
        at = pipeline.scales + stage * variant.block_scale_bytes + token * 4
        of_tokens = [to_float("f32", load_shared(at + 32 * row8, 1)[0]) for row8 in range(2)]
        count = variant.own_n // (BLOCK_N * variant.blocks_per_scale)
        first = pipeline.weights + stage * variant.weight_bytes + variant.code_bytes
        if variant.warpgroups_m == 1:
            first = first + consumer.warpgroup * (count * SCALE_BYTES)
        words = [load_shared(first + i * SCALE_BYTES, 4) for i in range(count)]
        of_features = [[to_float("f32", each[row]) for row in (0, 2)] for each in words]  # of rows 0, 8, 1 and 9
        return [[token * feature for token in of_tokens for feature in each] for each in of_features]

    def add(self, operands: StageOperands, number: int, block: int, factors: list[list[Float32]]) -> None:
        """Add a set of sums, times their factors, to the accumulators of a 64-token block."""
        size, features = self.variant.own_n // 2, BLOCK_N * self.variant.blocks_per_scale
        acc, sums = operands.accumulators, flattened(operands.sums[number])
        for i in range(size):
            factor = factors[i // (features // 2)][i % 4]
            acc[block * size + i] = fma(sums[i], factor, acc[block * size + i])

    def first_token(self, wg: Int32, block: int) -> Int32 | int:
        """The first token in its tile of a warpgroup's 64-token block."""
        if self.variant.warpgroups_m == 1:
            return 0
        return (block * self.variant.warpgroups_m + wg) * BOX_TOKENS

    # --- d

    def output_tile(self, tile: TileCoord, wg: Int32, thread: Int32, memory: ConsumerMemory) -> OutputTile:
        """Where a warpgroup's part of a tile goes."""
        variant = self.variant
        rows = self.scheduler.rows(tile.m_tile, memory.d.shape[0], memory.expert_tiles)
        feature = tile.n_tile * variant.config.tile_n
        if variant.warpgroups_m == 1:
            feature = feature + wg * variant.own_n
        return memory.output_tile(rows, OutputCoord(rows.first + self.first_token(wg, 0), feature, thread))

    def load_factors(self, own: OutputTile) -> Factors:
        """Load what multiplies the sums of a tile. Scales of rows are loaded with each quad if quads are stored."""
        variant, math, coord = self.variant, self.math, own.coord
        alpha, lane = math.load_alpha(own.operands), coord.thread % 32
        if variant.float32_staging or not (variant.channel_scales or variant.epilogue.token_scale):
            return Factors(alpha, [], [])
        first, step = coord.token + coord.thread // 32 * 16 + lane // 4, variant.warpgroups_m * BOX_TOKENS
        rows = [first + block * step + 8 * i for block in range(variant.row_blocks) for i in range(2)]
        tokens = [math.load_token_scale(own.operands, row, own.d.shape[0]) for row in rows]
        pairs = [coord.feature + 8 * j + lane % 4 * 2 for j in range(variant.own_n // 8)]
        features = [math.load_channel_scale(own.operands, pair + i) for pair in pairs for i in range(2)]
        return Factors(alpha, *([scale for scale in scales if scale is not None] for scales in (tokens, features)))

    def store_quads(self, acc: cute.Tensor, own: OutputTile, factors: Factors) -> None:
        """Store d from registers, if it is float32 or has gates or residuals. Of each eight features a thread has two
        of tokens g and g + 8; the lanes of a pair exchange two sums each, so that both have four of one token."""
        variant, coord, math = self.variant, own.coord, self.math
        lane, size, odd = coord.thread % 32, self.variant.own_n // 2, coord.thread % 2 == 1
        token = coord.token + coord.thread // 32 * 16 + lane // 4 + lane % 2 * 8
        feature, alpha = coord.feature + lane % 4 // 2 * 4, factors.alpha

        def by_lane(even: list[Float32], other: list[Float32]) -> list[Float32]:
            return [Float32(cutlass.select_(odd, *pair)) for pair in zip(other, even, strict=True)]

        for i in range(0, variant.row_blocks * size, 4):
            row, quad = token + i // size * variant.warpgroups_m * BOX_TOKENS, feature + i % size // 4 * 8
            residual = math.load_residual(own.operands, row, quad)
            token_scale = math.load_token_scale(own.operands, row, own.d.shape[0])
            channel_scales = [math.load_channel_scale(own.operands, quad + j) for j in range(4)]
            biases = [math.load_bias(own.operands, quad + j) for j in range(4)]
            first, second = [acc[i], acc[i + 1]], [acc[i + 2], acc[i + 3]]
            kept, sent = by_lane(first, second), by_lane(second, first)
            got = [cute.arch.shuffle_sync_bfly(value, 1) for value in sent]
            sums = by_lane(kept, got) + by_lane(got, kept)
            sums = [scaled(value, token_scale, scale) for value, scale in zip(sums, channel_scales, strict=True)]
            math.store_quad(sums, QuadOperands(alpha, biases, residual), own.d, row, quad)

    @cute.jit
    def store(self, acc: cute.Tensor, own: OutputTile, factors: Factors, memory: ConsumerMemory, wg: Int32):
        """Store d in boxes of 64 tokens x 64 features, which pass through the halves of the staging buffer in turn."""
        variant, coord, barrier = self.variant, own.coord, _EPILOGUE_BARRIER + wg
        staging = memory.staging + wg * variant.staging_bytes
        warp = cute.arch.make_warp_uniform(coord.thread // 32)
        boxes = variant.own_n // 64
        if const_expr(variant.boxed):
            tile_boxes = boxes_of_tile(memory.store, coord, BOX_TOKENS)
            if const_expr(variant.row_blocks * boxes % 2 == 1):  # the last tile's last box lay in the first half
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        for block in cutlass.range_constexpr(variant.row_blocks):
            row = block * variant.warpgroups_m
            for box in cutlass.range_constexpr(boxes):
                half = (block * boxes + box) % 2
                place = coord._replace(token=coord.token + row * BOX_TOKENS, feature=coord.feature + box * 64)
                buffer = staging + half * (BOX_TOKENS * TOKEN_BYTES)
                if const_expr(not variant.boxed):
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # the buffer is read out
                of_box = factors.of_box(block, box)
                self.stage(acc, block * (variant.own_n // 2) + box * 32, own, place, of_box, buffer)
                if const_expr(variant.boxed):
                    part = Staging(buffer, barrier, memory.store, 2 * wg + half)
                    store_box(self.math, own.d, tile_boxes, (row, box), BOX_TOKENS, variant.grouped, place, part)
                else:
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
                    store_staged(self.math, own.d, 0, BOX_TOKENS, place, buffer)

    def stage(
        self, acc: cute.Tensor, first: int, own: OutputTile, coord: OutputCoord, factors: Factors, staging: Int32
    ) -> None:
        """Write 64 features of a warpgroup's 64 tokens, whose sums begin at ``first``, into a staging buffer."""
        lane, math = coord.thread % 32, self.math
        row = coord.thread // 32 * 16 + lane % 16
        for eight in range(0, 8, 2):
            registers = []
            for j in (eight, eight + 1):
                features = [coord.feature + 8 * j + lane % 4 * 2 + i for i in range(2)]
                biases = [math.load_bias(own.operands, feature) for feature in features]
                sums = [scaled(acc[first + 4 * j + i], *factors.of_sum(j, i)) for i in range(4)]
                values = [math.feature_value(value, factors.alpha, biases[i % 2]) for i, value in enumerate(sums)]
                registers += [pack_half2(math.out_kind, *values[i : i + 2]) for i in (0, 2)]
            vector = eight + lane // 16
            store_matrix(staging + row * TOKEN_BYTES + (vector ^ (row % 8)) * 16, registers)
