"""d.T (n, m) = w (n, k) @ x.T (k, m) with what every NVIDIA GPU since SM80 has: cp.async, ldmatrix, mma.sync.

mma.sync m16n8k16 with the weight as operand A, decoded in registers, and x as operand B: eight tokens per
instruction. The transpose of d is computed; no other file depends on this. Sizes are named in the problem's frame:
tile_m tokens, tile_n features.

All warps of a CTA have the same role: copy, decode, multiply. Along a tile's tokens, features and k there are

    m_warps x n_warps x k_sets     warps. Each has 16 x m16_atoms_per_warp features (one, two or four atoms of 16) and
                                   8 x token_blocks tokens, at most 64 x 64, and k_chunks_per_warp chunks (64 columns)
                                   of each k-slice.

Shared memory, in this order; each number of bytes is a property of variant.py:

    what          bytes                       written by                                    read by
    stages        num_stages * (x_bytes       all threads: cp.async, one group a stage      all warps
                  + weight_bytes)
      x           [k chunk][token][128        zeros past m and k; eight vectors of 16       ldmatrix, without bank
                  bytes]                      bytes in the order vector ^ (token % 8)       conflicts
      weights     [64 rows][128 columns, or   the packed block as it is: codes, then        packed words
                  64 if tile_k = 64]          scales
    sums          sums_bytes, over the        all warps, at the end of a tile: float32      all threads, by quads
                  drained stages              [k set][token][feature]
    decode table  decode_table_bytes          all threads, before the main loop             all warps
    expert map    expert_map_bytes            warp 0, before the main loop                  all warps

Barriers: CTA barriers only, of all threads; no mbarriers.

    wait_group for k-slice i | CTA barrier | read the first codes | copy k-slice i + num_stages - 1 | decode, multiply i

The barrier makes k-slice i visible to all warps, and says that all have read k-slice i - 1, whose stage is filled next.
A lane's codes of an m16 atom and 64 columns, 16 bytes if they have four bits, are one load or two, for four matrix
instructions along k per block of eight tokens.

At the end of a tile all accumulators are stored to the drained pipeline's memory as rows of features. Each thread then
takes four features of a token at a time, adds them over the k sets in order, applies the epilogue and stores them.

Schedules: ``coop`` has one CTA of eight warps per SM; ``pingpong`` has two CTAs of four, so that one multiplies while
the other waits or stores; ``stream`` is stream-k with two CTAs per SM: the tiles that do not fill a wave, and those of
the wave before, are divided along k so that all CTAs have equal work (device/stream_k.py). Only its CTAs loop over
tiles.

If grouped, every CTA counts all experts' tiles first (device/expert_tiles.py) and takes one. The grid has as many CTAs
as there can be tiles; a CTA without a tile exits. If gathered, a row's index is loaded before each copy of the row:
from L2 the first time, then from L1, which cp.async bypasses.

With e4m3 x (variant.kind "e4m3", the kernel sm89_fp8_gemm) the instruction is m16n8k32. A k chunk has 128 columns,
still 128 bytes of x, and a step of it 32, so copies and ldmatrix are the same. The codes, in the order of the layout
mma8, become e4m3; if they have zero points or e4m3 scales, through a table behind the pipeline. 16-bit scales
(variant.scales_on_sums) multiply the float32 sums of each group, which take a second set of accumulators. Beside float
zero points (variant.adds_zeros) one more instruction, with ones as operand A, gives the sums of x.

From SM90 on, programmatic dependent launch: a launch requests the weights of its first stage while the kernel before it
is still running.

Registers per thread: m16_atoms_per_warp x token_blocks x 4 accumulators (128 at most, or two sets of 64), 4 code words
per atom (8 with e4m3 x), 2 x token_blocks words of x, 4 of decoded weights, the scales, about 30 more. Nothing else
here needs more than SM80: pairs of bf16 are added and multiplied by fma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

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
    with_indexed_scales,
)
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.scheduler import m_tiles_per_band, stream_share, stream_tile, tile_coordinates
from w4gemm.kernels.device.stream_k import StreamSum, WarpgroupThread
from w4gemm.kernels.sm80_mixed_gemm.variant import Sm80MixedVariant
from w4gemm.packing.block import BLOCK_K, HALF_K
from w4gemm.ptx.arithmetic import e4m3_to_halves, e5m2_to_halves, fma, mma_sync, to_float
from w4gemm.ptx.memory import (
    copy_async,
    load_global,
    load_matrix,
    load_shared,
    shared_address,
    store_shared_f32,
)

_ONES = 0x38383838  # as e4m3
_QUADS_TOGETHER = 4  # per thread, whose biases and residuals are loaded before the first is stored


class Grid(NamedTuple):
    """Tiles along m and n, and k-slices of each."""

    m_tiles: Int32
    n_tiles: Int32
    k_slices: Int32


class CtaTile(NamedTuple):
    """An output tile, or under stream-k a range of its k-slices."""

    row: Int32
    """First row of d."""
    end: Int32
    """End of the rows of d, or of the expert's."""
    n_tile: Int32
    first: Int32
    """First k-slice."""
    stop: Int32
    """k-slice behind the last one."""
    indices: cute.Tensor | None = None
    """int32 (m,): row of x by row of d; None unless gathered."""


class WarpCoord(NamedTuple):
    """Where a warp is in its CTA's tile, and a thread in it."""

    k_set: Int32
    n: Int32
    """Among the warps along the features."""
    m: Int32
    """Among the warps along the tokens."""
    lane: Int32


class Packed(NamedTuple):
    """A warp's k chunk in registers, before it is decoded."""

    codes: list[tuple[Int32, ...]]
    """Code words by m16 atom."""
    scales: Callable[[int], list[tuple[Int32, ...]]]
    """Function that gives a group's scale words (and zero words) by m16 atom."""


class Sm80MixedGemmKernel:
    """The kernel for one :class:`Sm80MixedVariant`; an instance is what ``cute.compile`` is given."""

    def __init__(self, variant: Sm80MixedVariant):
        self.variant = variant
        config = variant.config
        self.decoder = variant.weight.decoder(only_fma=True, allow_sum_scale=True)
        kinds, scales = (variant.bias_kind, variant.out_kind), (variant.channel_scales, self.decoder.sum_scale)
        self.epilogue_math = EpilogueMath(variant.epilogue, *kinds, variant.vector, *scales)
        self.expert_tile_map = ExpertTileMap(config.tile_m)
        # as if of a warpgroup with four accumulators per thread and block of eight tokens
        self.stream_sum = StreamSum(2 * variant.accumulators, 1)
        self.band = m_tiles_per_band(config.tile_m)
        self.reader = BlockReader(variant.stage_block, variant.weight.codec.turns)
        self.groups_per_chunk = variant.block.sub_block(columns=variant.chunk_k).groups

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch. args.max_clusters: CTAs of a stream-k launch."""
        variant, config = self.variant, self.variant.config
        m_tiles, blocks_n = cute.ceil_div(args.out.shape[0], config.tile_m), args.weight.shape[0]
        if const_expr(variant.grouped):
            experts = args.rows.starts.shape[0]
            m_tiles, blocks_n = max_m_tiles(args.out.shape[0], experts, config.tile_m), blocks_n // experts
        ctas = m_tiles * cute.ceil_div(blocks_n, variant.blocks_n)
        if const_expr(variant.stream_k):
            ctas = cutlass.min(ctas * cute.ceil_div(args.x.shape[1], config.tile_k), args.max_clusters)
        self.kernel(args).launch(
            grid=[ctas, 1, 1],
            block=[variant.threads, 1, 1],
            min_blocks_per_mp=variant.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=variant.dependent_launch,
        )

    @cute.kernel
    def kernel(self, args: Arguments):
        variant, config = self.variant, self.variant.config
        x, weight, out = args.x, args.weight, args.out
        operands = with_indexed_scales(args.epilogue, args.rows.indices)
        cta = cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        words = (variant.num_stages * variant.stage_bytes + variant.decode_table_bytes) // 4
        pipeline = shared_address(smem.allocate_array(Int32, words, byte_alignment=128))
        m_tiles, blocks_n = cute.ceil_div(out.shape[0], config.tile_m), weight.shape[0]
        k_slices = cute.ceil_div(x.shape[1], config.tile_k)
        if const_expr(variant.grouped):
            self.begin(pipeline)
            expert_tiles = ExpertTiles(smem.allocate_tensor(Int32, cute.make_layout(variant.expert_map)), args.rows)
            blocks_n = blocks_n // expert_tiles.experts
            n_tiles = cute.ceil_div(blocks_n, variant.blocks_n)
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                self.expert_tile_map.fill(expert_tiles)
            cute.arch.sync_threads()
            m_tiles = expert_tiles.m_tiles
            if cta < m_tiles * n_tiles:
                m_tile, n_tile = tile_coordinates(cta, m_tiles, n_tiles, self.band)
                rows = self.expert_tile_map.find(expert_tiles, m_tile)
                own = weight_of_expert(weight, rows.expert, blocks_n)
                tile = CtaTile(rows.first, rows.end, n_tile, Int32(0), k_slices, args.rows.indices)
                acc = self.multiply(x, own, pipeline, tile)
                of_expert = operands_of_expert(operands, rows.expert, rows.end)
                self.store(acc, first_rows(out, rows.end), of_expert, pipeline, tile)
        else:
            n_tiles = cute.ceil_div(blocks_n, variant.blocks_n)
            if const_expr(variant.stream_k):
                self.begin(pipeline)
                self.run_stream_k(args._replace(epilogue=operands), pipeline, Grid(m_tiles, n_tiles, k_slices))
            else:
                m_tile, n_tile = tile_coordinates(cta, m_tiles, n_tiles, self.band)
                self.load_weights(weight, pipeline, n_tile, Int32(0), Int32(0))
                self.begin(pipeline)
                tile = CtaTile(m_tile * config.tile_m, out.shape[0], n_tile, Int32(0), k_slices)
                acc = self.multiply(x, weight, pipeline, tile, early=1)
                self.store(acc, out, operands, pipeline, tile)

    @cute.jit
    def run_stream_k(self, args: Arguments, pipeline: Int32, grid: Grid):
        """Run the work tiles of this CTA: first its k-ranges of shared tiles, then its own tiles."""
        variant, workspace = self.variant, args.workspace
        ctas = cute.arch.grid_dim()[0]
        own = WarpgroupThread(0, cute.arch.thread_idx()[0])
        cta = cute.arch.block_idx()[0]  # CTAs that others wait for have the lower numbers, which start first
        share = stream_share(cta, ctas, grid.m_tiles * grid.n_tiles, grid.k_slices)
        for index in cutlass.range(share.work_tiles(grid.k_slices), unroll=1):
            own_range = stream_tile(index, cta, ctas, grid.k_slices, share)
            m_tile, n_tile = tile_coordinates(own_range.tile, grid.m_tiles, grid.n_tiles, self.band)
            tile = CtaTile(m_tile * variant.config.tile_m, args.out.shape[0], n_tile, own_range.first, own_range.stop)
            acc = self.multiply(args.x, args.weight, pipeline, tile)
            flat = cute.make_tensor(acc.iterator, cute.make_layout(variant.accumulators))
            if own_range.stop < grid.k_slices:
                self.stream_sum.store_partials(flat, workspace, cta, own)
                cute.arch.sync_threads()
                if own.thread == 0:
                    self.stream_sum.raise_flag(workspace, cta, 0)
            else:
                if own_range.first > 0:  # add what the CTAs before multiplied of this tile
                    other = share.first_sharer(own_range.tile, ctas, grid.k_slices)
                    while other < cta:
                        if own.thread == 0:
                            self.stream_sum.await_flag(workspace, other, 0)
                        cute.arch.sync_threads()
                        self.stream_sum.add_partials(flat, workspace, other, own)
                        other += 1
                self.store(acc, args.out, args.epilogue, pipeline, tile)
            cute.arch.sync_threads()  # the sums have been read

    def begin(self, pipeline: Int32) -> None:
        """Fill the decoder's table, which all threads may read after the main loop's first barrier. Then wait until the
        kernels before have written what this one reads, except the weight. Only then may the next kernel start, so no
        kernel before can still be writing weights."""
        if self.variant.decode_table_bytes:
            self.decoder.fill_table(self.decode_table(pipeline), cute.arch.thread_idx()[0], self.variant.threads)
        if self.variant.dependent_launch:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    def decode_table(self, pipeline: Int32) -> Int32:
        """Address of the decoder's table, if it has one, behind the pipeline."""
        return pipeline + self.variant.num_stages * self.variant.stage_bytes

    def warp_coord(self) -> WarpCoord:
        variant = self.variant
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        in_set = warp % (variant.n_warps * variant.m_warps)
        return WarpCoord(
            warp // (variant.n_warps * variant.m_warps),
            in_set // variant.m_warps,
            in_set % variant.m_warps,
            thread % 32,
        )

    # ------------------------------------------------------------------------------------------------- main loop

    @cute.jit
    def multiply(
        self, x: cute.Tensor, weight: cute.Tensor, pipeline: Int32, tile: CtaTile, early: cutlass.Constexpr = 0
    ) -> cute.Tensor:
        """The accumulators (4, token blocks, m16 atoms) of a work tile. early: stages whose weights were requested."""
        variant = self.variant
        acc = self.no_sums()
        for i in cutlass.range(variant.num_stages - 1, unroll=1):
            if tile.first + i < tile.stop:
                if const_expr(early == 0):
                    self.load_weights(weight, pipeline, tile.n_tile, tile.first + i, i)
                elif i >= early:
                    self.load_weights(weight, pipeline, tile.n_tile, tile.first + i, i)
                self.load_x(x, pipeline, tile, tile.first + i, i)
            cute.arch.cp_async_commit_group()
        state, free = PipelineState.consumer(), Int32(variant.num_stages - 1)  # no mbarriers: the phase is not used
        for k_slice in cutlass.range(tile.first, tile.stop, unroll=1):
            cute.arch.cp_async_wait_group(variant.num_stages - 2)
            cute.arch.sync_threads()
            packed = self.read_codes(pipeline, state.stage, 0)
            if k_slice + (variant.num_stages - 1) < tile.stop:
                self.load_x(x, pipeline, tile, k_slice + (variant.num_stages - 1), free)
                self.load_weights(weight, pipeline, tile.n_tile, k_slice + (variant.num_stages - 1), free)
            cute.arch.cp_async_commit_group()
            for j in cutlass.range_constexpr(variant.k_chunks_per_warp):
                packed = packed if j == 0 else self.read_codes(pipeline, state.stage, j)
                self.multiply_chunk(acc, pipeline, state.stage, j, packed)
            free, state = state.stage, state.after(variant.num_stages)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # the pipeline's memory is free
        return acc

    @cute.jit
    def load_x(self, x: cute.Tensor, pipeline: Int32, tile: CtaTile, k_slice: Int32, stage: Int32):
        """Request a k-slice of x into a stage: neighbouring threads copy neighbouring 16 bytes of a row."""
        variant, config = self.variant, self.variant.config
        thread = cute.arch.thread_idx()[0]
        columns = 16 // variant.itemsize
        vectors = config.tile_k // columns
        vector, row = thread % vectors, thread // vectors
        column = k_slice * config.tile_k + vector * columns
        size = cutlass.max(cutlass.min((x.shape[1] - column) * variant.itemsize, 16), 0)
        step = variant.threads // vectors
        source = x.iterator.toint() + (Int64(tile.row + row) * x.stride[0] + column) * variant.itemsize
        target = pipeline + stage * variant.stage_bytes + vector // 8 * (config.tile_m * 128)
        rows = self.row_indices(tile, tile.row + row, step)
        for i in cutlass.range_constexpr(-(-config.tile_m // step)):
            to = target + (row + i * step) * 128 + ((vector ^ (row + i * step)) % 8) * 16
            bytes = size if tile.row + row + i * step < tile.end else Int32(0)
            if const_expr(variant.gathered):
                source = x.iterator.toint() + (Int64(rows[i]) * x.stride[0] + column) * variant.itemsize
            if const_expr((i + 1) * step <= config.tile_m):
                copy_async(to, source, bytes)
            else:
                if row + i * step < config.tile_m:
                    copy_async(to, source, bytes)
            if const_expr(not variant.gathered):
                source += Int64(x.stride[0]) * (variant.itemsize * step)

    def row_indices(self, tile: CtaTile, row: Int32, step: int) -> list[Int32]:
        """If gathered, the rows of x for every ``step``-th row of d from ``row`` on: those that a thread copies,
        requested together."""
        count = -(-self.variant.config.tile_m // step) if self.variant.gathered else 0
        rows = [row + i * step for i in range(count)]
        return [load_global(tile.indices.iterator.toint() + Int64(r) * 4, 1, r < tile.end)[0] for r in rows]

    @cute.jit
    def load_weights(self, weight: cute.Tensor, pipeline: Int32, n_tile: Int32, k_slice: Int32, stage: Int32):
        """Request a k-slice of the weights: the codes of each block, or half block, then the scales."""
        variant = self.variant
        half = k_slice % 2 if const_expr(variant.half_block_stages) else 0
        target = pipeline + stage * variant.stage_bytes + variant.x_bytes
        for i, run in enumerate(variant.stage_block.separate_copies(half)):
            self.load_runs(weight, n_tile, k_slice, half, target + run.target, i, run.size // 16)

    @cute.jit
    def load_runs(
        self,
        weight: cute.Tensor,
        n_tile: Int32,
        k_slice: Int32,
        half: Int32,
        target: Int32,
        run: cutlass.Constexpr,
        count: cutlass.Constexpr,
    ):
        """Request a run of ``count`` times 16 bytes of each block of a k-slice. run: its number among the copies."""
        variant, threads = self.variant, self.variant.threads
        thread, total = cute.arch.thread_idx()[0], variant.blocks_n * variant.blocks_k * count
        # a round of copies, one of each thread, covers several blocks, or some vectors of one block
        first, vector = (thread // count, thread % count) if const_expr(count < threads) else (0, thread)
        for i in cutlass.range_constexpr(-(-total // threads)):
            block, at = i * threads // count + first, (i * threads % count + vector) * 16
            if const_expr(threads % count and count % threads):  # or parts of several
                block, at = (i * threads + thread) // count, (i * threads + thread) % count * 16
            # past the last block: that block again, whose rows are not stored, or which meets zeros of x
            row = cutlass.min(n_tile * variant.blocks_n + block // variant.blocks_k, weight.shape[0] - 1)
            if const_expr(variant.half_block_stages):
                k_block = k_slice // 2
            else:
                k_block = k_slice * variant.blocks_k + block % variant.blocks_k
            k_block = cutlass.min(k_block, weight.shape[1] - 1)
            copy = variant.stage_block.separate_copies(half, k_block=k_block)[run]
            block_at = Int64(row * weight.shape[1] + k_block) * variant.block.stride
            source = weight.iterator.toint() + block_at + (copy.source + copy.offset + at)
            to = target + block * variant.stage_block.bytes + at
            if const_expr((i + 1) * threads <= total):
                copy_async(to, source, Int32(16))
            else:
                if thread < total - i * threads:
                    copy_async(to, source, Int32(16))

    # ------------------------------------------------------------- arithmetic: plain Python, no device control flow

    def k_chunk(self, coord: WarpCoord, j: int) -> Int32 | int:
        """Index in a stage of a warp's ``j``-th k chunk."""
        return coord.k_set * self.variant.k_chunks_per_warp + j if self.variant.k_sets > 1 else j

    def read_codes(self, pipeline: Int32, stage: Int32, j: int) -> Packed:
        """Codes and scales of a warp's ``j``-th k chunk in a stage. The first group's scales are loaded at once, the
        others not before they are used, because registers are scarce."""
        variant, coord = self.variant, self.warp_coord()
        chunk = self.k_chunk(coord, j)
        halves = variant.chunk_k // HALF_K  # of a block, in a chunk
        if variant.half_block_stages:
            block, half = 0, 0
        else:
            block, half = (chunk, 0) if halves == 2 else (chunk // 2, chunk % 2)
        first_atom = coord.n * variant.m16_atoms_per_warp
        base = pipeline + stage * variant.stage_bytes + variant.x_bytes
        base += (first_atom // 4 * variant.blocks_k + block) * variant.stage_block.bytes
        held = variant.stage_block
        codes = base + half * held.half_bytes + first_atom % 4 * held.strip_bytes
        atoms = range(variant.m16_atoms_per_warp)
        words = [sum((self.reader.codes(codes, i, atom, coord.lane) for i in range(halves)), ()) for atom in atoms]
        pair = first_atom % 4 * 8 + coord.lane // 4
        scales = base + held.code_bytes + pair * held.pair_bytes
        factors = base + held.code_bytes + pair * held.factor_pair_bytes
        if variant.block.scale_group < BLOCK_K:
            scales += held.run(half * self.groups_per_chunk) * held.pair_bytes

        def read_scales(group: int) -> list[tuple[Int32, ...]]:
            return [self.reader.scales(scales, group, atom) + self.reader.factors(factors, atom) for atom in atoms]

        first = read_scales(0)
        return Packed(words, lambda group: read_scales(group) if group else first)

    def multiply_chunk(self, acc: cute.Tensor, pipeline: Int32, stage: Int32, j: int, packed: Packed) -> None:
        """acc += a warp's ``j``-th k chunk of a stage, group by group."""
        variant, steps = self.variant, 4 // self.groups_per_chunk
        x_address = self.x_address(pipeline, stage, j)
        for group in range(self.groups_per_chunk):
            scale_words = packed.scales(group)
            field = group % variant.block.groups_per_word
            prepared = [self.decoder.prepare(words, self.decode_table(pipeline), field) for words in scale_words]
            sums = self.no_sums() if variant.scales_on_sums else acc
            x_sums: list[Sequence[Float32]] = [[Float32(0.0)] * 4] * variant.token_blocks
            for step in range(group * steps, (group + 1) * steps):
                if variant.token_blocks > 1 or step % 2 == 0:
                    fragments = self.read_x(x_address, step)
                own = fragments if variant.token_blocks > 1 else [fragments[step % 2]]
                if variant.adds_zeros:
                    ones = (Int32(_ONES),) * 4
                    x_sums = [self.add_product(list(x), ones, b) for x, b in zip(x_sums, own, strict=True)]
                for atom in range(variant.m16_atoms_per_warp):
                    a = self.decoder.decode(self.reader.words_of_step(packed.codes[atom], step), prepared[atom])
                    for t in range(variant.token_blocks):
                        product = self.add_product([sums[i, t, atom] for i in range(4)], a, own[t])
                        for i in range(4):
                            sums[i, t, atom] = product[i]
            if variant.adds_zeros:
                self.add_zeros(acc, x_sums, scale_words)
            if variant.scales_on_sums:
                self.add_scaled_sums(acc, sums, scale_words)

    def no_sums(self) -> cute.Tensor:
        """Accumulators (4, token blocks, m16 atoms), all 0."""
        acc = cute.make_rmem_tensor((4, self.variant.token_blocks, self.variant.m16_atoms_per_warp), Float32)
        acc.fill(0.0)
        return acc

    def add_zeros(
        self, acc: cute.Tensor, x_sums: list[Sequence[Float32]], scale_words: list[tuple[Int32, ...]]
    ) -> None:
        """acc += a group's sums of x times the zero points of rows g and g + 8."""
        for atom, words in enumerate(scale_words):
            zeros = self.decoder.zeros(words)
            for t, of_tokens in enumerate(x_sums):
                for i in range(4):
                    acc[i, t, atom] = fma(of_tokens[i], zeros[i // 2], acc[i, t, atom])

    def add_scaled_sums(self, acc: cute.Tensor, sums: cute.Tensor, scale_words: list[tuple[Int32, ...]]) -> None:
        """acc += a group's sums times the scales of rows g and g + 8."""
        for atom, words in enumerate(scale_words):
            factors = self.decoder.scales(words)
            for t in range(self.variant.token_blocks):
                for i in range(4):
                    acc[i, t, atom] = fma(sums[i, t, atom], factors[i // 2], acc[i, t, atom])

    def add_product(self, sums: list[Float32], a: tuple[Int32, ...], b: tuple[Int32, ...]) -> Sequence[Float32]:
        """sums + a @ b, one step along k. A GPU without an instruction for e4m3 multiplies two halves as fp16: ptxas
        would make the same of the e4m3 instruction, and spill. In both halves the first two columns of a register meet
        each other, then the last two."""
        variant = self.variant
        if not variant.widened:
            return mma_sync(variant.kind, sums, a, b, variant.weight.decoded)
        widen = e5m2_to_halves if variant.weight.decoded == "e5m2" else e4m3_to_halves
        for half in range(2):
            sums = mma_sync("f16", sums, [widen(r)[half] for r in a], [e4m3_to_halves(r)[half] for r in b])
        return sums

    def x_address(self, pipeline: Int32, stage: Int32, j: int) -> Int32:
        """Address of a lane's row for ldmatrix: four 8 x 8 matrices are 16 tokens x 32 bytes or, if a warp has eight
        tokens, 8 x 64."""
        variant, coord = self.variant, self.warp_coord()
        chunk = self.k_chunk(coord, j)
        row, matrix = coord.lane % 8, coord.lane // 8
        token = coord.m * (8 * variant.token_blocks) + row + (matrix // 2 * 8 if variant.token_blocks > 1 else 0)
        vector = matrix % 2 if variant.token_blocks > 1 else matrix
        base = pipeline + stage * variant.stage_bytes + chunk * (variant.config.tile_m * 128)
        return base + token * 128 + (vector ^ row) * 16

    def read_x(self, address: Int32, step: int) -> list[tuple[Int32, ...]]:
        """Fragments, two registers each: of a step's token blocks or, if a warp has one block, of two steps."""
        fragments: list = []
        for pair in range(max(1, self.variant.token_blocks // 2)):
            r = load_matrix((address ^ (step * 32)) + pair * 2048)
            fragments += [(r[0], r[1]), (r[2], r[3])]
        return fragments

    # -------------------------------------------------------------------------------------------------- epilogue

    @cute.jit
    def store(self, acc: cute.Tensor, out: cute.Tensor, operands: EpilogueOperands, pipeline: Int32, tile: CtaTile):
        """Store a tile of d, through the pipeline's memory."""
        self.store_partials(acc, pipeline)
        cute.arch.sync_threads()
        self.store_tile(out, operands, pipeline, tile)

    def store_partials(self, acc: cute.Tensor, pipeline: Int32) -> None:
        """Store this warp's accumulators to the drained pipeline's memory, float32 [k set][token][feature]."""
        variant, coord = self.variant, self.warp_coord()
        token = (coord.k_set * variant.m_warps + coord.m) * (8 * variant.token_blocks) + coord.lane % 4 * 2
        first_feature = coord.n * (16 * variant.m16_atoms_per_warp)
        address = pipeline + (token * variant.sums_row + first_feature + coord.lane // 4) * 4
        for t in range(variant.token_blocks):
            for atom in range(variant.m16_atoms_per_warp):
                for i in range(4):
                    offset = (8 * t + i % 2) * variant.sums_row + 16 * atom + i // 2 * 8
                    store_shared_f32(address + offset * 4, acc[i, t, atom])

    @cute.jit
    def store_tile(self, out: cute.Tensor, operands: EpilogueOperands, pipeline: Int32, tile: CtaTile):
        """Sum quads, four features of a token, over the k sets, and store them; each thread has some."""
        variant, config, math = self.variant, self.variant.config, self.epilogue_math
        thread, per_row = cute.arch.thread_idx()[0], config.tile_n // 4
        quads = config.tile_m * per_row
        alpha = math.load_alpha(operands)
        together = min(_QUADS_TOGETHER, -(-quads // variant.threads))
        for first in cutlass.range(thread, quads, together * variant.threads, unroll=1):
            coords = []
            for i in cutlass.range_constexpr(together):
                index = first + i * variant.threads
                coords.append((index // per_row, index % per_row * 4))
            quad_operands, factors = [], []
            for token, feature in coords:
                row, column = tile.row + token, tile.n_tile * config.tile_n + feature
                biases = [math.load_bias(operands, column + j) for j in range(4)]
                quad_operands.append(QuadOperands(alpha, biases, math.load_residual(operands, row, column)))
                channels = [math.load_channel_scale(operands, column + j) for j in range(4)]
                factors.append((math.load_token_scale(operands, row, out.shape[0]), channels))
            for (token, feature), added, (scale, channels) in zip(coords, quad_operands, factors, strict=True):
                sums = [Float32(0.0)] * 4
                for k_set in range(variant.k_sets):
                    address = pipeline + ((k_set * config.tile_m + token) * variant.sums_row + feature) * 4
                    sums = [y + to_float("f32", word) for y, word in zip(sums, load_shared(address, 4), strict=True)]
                sums = [scaled(y, scale, channel) for y, channel in zip(sums, channels, strict=True)]
                math.store_quad(sums, added, out, tile.row + token, tile.n_tile * config.tile_n + feature)
