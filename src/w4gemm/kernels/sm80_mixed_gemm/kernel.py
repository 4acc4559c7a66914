"""d.T (n, m) = w (n, k) @ x.T (k, m) with what every NVIDIA GPU since SM80 has: cp.async, ldmatrix, mma.sync.

mma.sync m16n8k16 with the weight as A, decoded from 4 bits in registers, and x as B: eight tokens a matrix
instruction. The transpose of d is computed; only this file knows. Sizes are named in the problem's frame: tile_m
tokens, tile_n features.

All warps of a CTA do the same: copy, decode, multiply. Along a tile's tokens, features and k there are

    m_warps x n_warps x k_sets     warps; each has 16 x units features (one, two or four row units of 16) and 8 x
                                   token_blocks tokens, at most 64 x 64, and ``chunks`` runs of 64 columns of a slot

Pipeline of ``stages`` slots, filled by cp.async of 16 bytes, one group of copies a slot, and no other barrier than that
of the CTA:

    slot    x        [run of 64 columns][token][128 bytes], the eight parts of 16 bytes in the order part ^ (token % 8),
                     so that ldmatrix meets no bank twice; zeros past m and k
            weights  [64 rows][128 columns, or half of them]: the packed block as it is, codes and then scales

    wait for slot i's copies | barrier | read the first codes | copy slot i + stages - 1 | decode and multiply slot i

The barrier says that slot i is there for all, and that all have read slot i - 1, which is then filled again. A lane's
codes of a row unit and 64 columns are 16 bytes: one read, four matrix instructions along k for each block of tokens.

At a tile's end all accumulators go to the drained pipeline's memory as rows of features; every thread then takes four
features of a token at a time, adds them up over the k sets in order, and stores what the epilogue makes of them.

Schedules: ``coop``, a CTA of eight warps on a multiprocessor; ``pingpong``, two of four, so that one multiplies while
the other waits or stores; ``stream``, as pingpong, but the tiles that do not fill a wave, and those of the wave
before, are cut along k so that all CTAs have equal work (device/stream_k.py). Only a stream's CTAs walk over tiles.

Grouped (v.grouped), every CTA counts all experts' tiles first (device/groups.py) and takes one; the grid is as large
as it may have to be, and who has no tile leaves. Gathered (v.gathered), a row's index is read before each copy of it:
the first time from L2, then from L1, which these copies pass by.

With fp8 activations (v.kind "e4m3", the kernel sm89_fp8_gemm) the instruction is m16n8k32. A run is 128 columns, still
128 bytes of x, and a step of it 32, so copies and ldmatrix are the same. Codes, in the order of the layout mma8,
become e4m3, by a table behind the ring where they have zero points or e4m3 scales. 16-bit scales (v.promoted) multiply
the float32 sums of each group, for which there is a second set of accumulators.

From SM90 on, a launch does not wait for the one before to end: it requests the weights of its first slot meanwhile.

Registers of a thread: units x token_blocks x 4 accumulators (128 at most, or two sets of 64), 4 x units code words (8 x
units with fp8 activations), 2 x token_blocks of x, 4 of decoded weights, scales, about 30 more. Nothing else here needs
more than SM80: bf16 pairs are added and multiplied by fma.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.decode_fp8 import decoder_of
from w4gemm.kernels.device.formula import Formula, scaled
from w4gemm.kernels.device.groups import Groups, extras_of, first_rows, most_tiles, scales_of_rows, weight_of
from w4gemm.kernels.device.ptx import (
    copy_async,
    e4m3_to_halves,
    fma,
    load_global,
    load_matrix,
    load_shared,
    mma_sync,
    shared_address,
    store_shared_f32,
    to_float,
)
from w4gemm.kernels.device.scheduler import stream_pieces, stream_segment, stream_share, tile_coordinates
from w4gemm.kernels.device.stream_k import StreamSum
from w4gemm.kernels.gpu import MAX_EXPERTS
from w4gemm.kernels.sm80_mixed_gemm.variant import Variant
from w4gemm.packing.block import BLOCK_K, LANE_BYTES, STRIP_BYTES

_STREAM_BARRIER = 1
_TOKENS_PER_BAND = 1024  # of the tile order: x and weights then take about equal room in L2
_QUADS_TOGETHER = 4  # of a thread, whose bias and residual are on their way at once


class MixedGemm:
    """The kernel for one :class:`Variant`; an instance is what ``cute.compile`` is given."""

    def __init__(self, variant: Variant):
        self.v = v = variant
        self.decoder = decoder_of(v, only_fma=True)
        self.formula = Formula(v.epilogue, v.bias_kind, v.out_kind, v.vector, v.folded)
        self.experts = Groups(v.config.tile_m)
        # as if four accumulators a block of eight tokens: a thread's share is all that counts
        self.stream_sum = StreamSum(2 * v.accumulators, 1)
        self.band = max(1, _TOKENS_PER_BAND // v.config.tile_m)
        self.reader = BlockReader(v.part)
        self.groups = v.block.part(columns=v.chunk_k).groups  # of scales in a run of columns

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch. args.max_clusters: CTAs of a stream-k launch."""
        v, c = self.v, self.v.config
        x, weight, out = args.x, args.weight, args.out
        m_tiles, n_blocks = cute.ceil_div(out.shape[0], c.tile_m), weight.shape[0]
        if const_expr(v.grouped):
            m_tiles, n_blocks = (
                most_tiles(out.shape[0], args.rows.starts.shape[0], c.tile_m),
                n_blocks // args.rows.starts.shape[0],
            )
        ctas = m_tiles * cute.ceil_div(n_blocks, v.row_blocks)
        if const_expr(v.stream):
            ctas = cutlass.min(ctas * cute.ceil_div(x.shape[1], c.tile_k), args.max_clusters)
        self.kernel(args).launch(
            grid=[ctas, 1, 1],
            block=[v.threads, 1, 1],
            min_blocks_per_mp=v.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=v.dependent_launch,
        )

    @cute.kernel
    def kernel(self, args: Arguments):
        v, c = self.v, self.v.config
        x, weight, out = args.x, args.weight, args.out
        starts, ends, indices = args.rows
        extras = args.epilogue._replace(token_scale=scales_of_rows(args.epilogue.token_scale, indices))
        cta = cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        words = (v.stages * v.stage_bytes + v.decode_table_bytes) // 4
        ring = shared_address(smem.allocate_array(Int32, words, byte_alignment=128))
        m_tiles, n_blocks, slots = (
            cute.ceil_div(out.shape[0], c.tile_m),
            weight.shape[0],
            cute.ceil_div(x.shape[1], c.tile_k),
        )
        if const_expr(v.grouped):
            self.begin(ring)
            experts = starts.shape[0]
            n_blocks = n_blocks // experts
            n_tiles = cute.ceil_div(n_blocks, v.row_blocks)
            table, rows = smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS)), (starts, ends)
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                self.experts.fill(table, rows)
            cute.arch.sync_threads()
            m_tiles = table[experts - 1]
            if cta < m_tiles * n_tiles:
                m_tile, n_tile = tile_coordinates(cta, m_tiles, n_tiles, self.band)
                expert, token, end = self.experts.find(table, rows, m_tile)
                own, tile = weight_of(weight, expert, n_blocks), (token, end, n_tile, indices)
                acc = self.multiply(x, own, ring, tile, Int32(0), slots)
                self.store(acc, first_rows(out, end), extras_of(extras, expert, end), ring, (token, n_tile))
        else:
            n_tiles = cute.ceil_div(n_blocks, v.row_blocks)
            if const_expr(v.stream):
                self.begin(ring)
                self.walk(x, weight, out, extras, args.workspace, ring, (m_tiles, n_tiles, slots))
            else:
                m_tile, n_tile = tile_coordinates(cta, m_tiles, n_tiles, self.band)
                self.load_weights(weight, ring, n_tile, Int32(0), Int32(0))
                self.begin(ring)
                tile = (m_tile * c.tile_m, out.shape[0], n_tile, None)
                acc = self.multiply(x, weight, ring, tile, Int32(0), slots, early=1)
                self.store(acc, out, extras, ring, (m_tile * c.tile_m, n_tile))

    @cute.jit
    def walk(self, x, weight, out, extras, parked, ring, sizes):
        """The pieces of a stream's CTA. sizes: tiles along m and n, slots along k."""
        v = self.v
        m_tiles, n_tiles, slots = sizes
        thread, ctas = cute.arch.thread_idx()[0], cute.arch.grid_dim()[0]
        # backwards: CTAs that others wait for have the lower numbers of the grid, which start first
        cta = ctas - 1 - cute.arch.block_idx()[0]
        share = stream_share(cta, ctas, m_tiles * n_tiles, slots)
        for index in cutlass.range(share[0] + stream_pieces(share[2], share[3], slots), unroll=1):
            tile, first, stop = stream_segment(index, cta, ctas, slots, share)
            m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, self.band)
            token = m_tile * v.config.tile_m
            acc = self.multiply(x, weight, ring, (token, out.shape[0], n_tile, None), first, stop)
            flat = cute.make_tensor(acc.iterator, cute.make_layout(v.accumulators))
            if first > 0:
                self.stream_sum.park(flat, *parked, cta, (0, thread), _STREAM_BARRIER)
            else:
                other = cta + 1
                if stop < slots:  # add what the next CTAs multiplied of this tile
                    while other * (share[1] * slots) // ctas < (tile + 1) * slots:
                        self.stream_sum.add(flat, *parked, other, (0, thread), _STREAM_BARRIER)
                        other += 1
                self.store(acc, out, extras, ring, (token, n_tile))
            cute.arch.sync_threads()  # the sums are read out

    def begin(self, ring):
        """Fill the decoder's table, which all may read behind the main loop's first barrier. Then wait until the
        kernels before have written what this one reads, the weight aside. Only then may the next start, so none of
        those can still be writing weights either."""
        if self.v.decode_table_bytes:
            self.decoder.fill_table(self.table(ring), cute.arch.thread_idx()[0], self.v.threads)
        if self.v.dependent_launch:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    def table(self, ring):
        """The fp8 decoder's, behind the ring."""
        return ring + self.v.stages * self.v.stage_bytes

    def place(self):
        """(k set, place along the features, along the tokens, lane) of this warp."""
        v = self.v
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        rest = warp % (v.n_warps * v.m_warps)
        return warp // (v.n_warps * v.m_warps), rest // v.m_warps, rest % v.m_warps, thread % 32

    # ------------------------------------------------------------------------------------------------- main loop

    @cute.jit
    def multiply(self, x, weight, ring, tile, first, stop, early: cutlass.Constexpr = 0):
        """The accumulators (4, token blocks, row units) of a tile's slots first .. stop. tile: (first token, end of the
        tokens, tile along n, indices of x's rows or None). early: slots whose weights have been requested."""
        v = self.v
        acc = self.no_sums()
        for i in cutlass.range(v.stages - 1, unroll=1):
            if first + i < stop:
                if const_expr(early == 0):
                    self.load_weights(weight, ring, tile[2], first + i, i)
                elif i >= early:
                    self.load_weights(weight, ring, tile[2], first + i, i)
                self.load_x(x, ring, tile, first + i, i)
            cute.arch.cp_async_commit_group()
        stage, free = Int32(0), Int32(v.stages - 1)
        for slot in cutlass.range(first, stop, unroll=1):
            cute.arch.cp_async_wait_group(v.stages - 2)
            cute.arch.sync_threads()
            packed = self.read_codes(ring, stage, 0)
            if slot + (v.stages - 1) < stop:
                self.load_x(x, ring, tile, slot + (v.stages - 1), free)
                self.load_weights(weight, ring, tile[2], slot + (v.stages - 1), free)
            cute.arch.cp_async_commit_group()
            for j in cutlass.range_constexpr(v.chunks):
                self.multiply_chunk(acc, ring, stage, j, packed if j == 0 else self.read_codes(ring, stage, j))
            free = stage
            stage += 1
            if stage == v.stages:
                stage = Int32(0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # the pipeline's memory is free
        return acc

    @cute.jit
    def load_x(self, x, ring, tile, slot, stage):
        """Request a slot's x into a stage of the ring."""
        v, c = self.v, self.v.config
        token0, end, _, indices = tile
        thread = cute.arch.thread_idx()[0]
        # x: neighbouring threads copy neighbouring parts of a row
        columns = 16 // v.itemsize
        parts = c.tile_k // columns
        part, row = thread % parts, thread // parts
        column = slot * c.tile_k + part * columns
        size = cutlass.max(cutlass.min((x.shape[1] - column) * v.itemsize, 16), 0)
        step = v.threads // parts
        source = x.iterator.toint() + (Int64(token0 + row) * x.stride[0] + column) * v.itemsize
        target = ring + stage * v.stage_bytes + part // 8 * (c.tile_m * 128)
        rows = self.row_indices(indices, token0 + row, end, step)
        for i in cutlass.range_constexpr(-(-c.tile_m // step)):
            to = target + (row + i * step) * 128 + ((part ^ (row + i * step)) % 8) * 16
            bytes = size if token0 + row + i * step < end else Int32(0)
            if const_expr(v.gathered):
                source = x.iterator.toint() + (Int64(rows[i]) * x.stride[0] + column) * v.itemsize
            if const_expr((i + 1) * step <= c.tile_m):
                copy_async(to, source, bytes)
            else:
                if row + i * step < c.tile_m:
                    copy_async(to, source, bytes)
            if const_expr(not v.gathered):
                source += Int64(x.stride[0]) * (v.itemsize * step)

    def row_indices(self, indices, token, end, step):
        """Gathered, those of the rows of x that a thread copies, requested together: of every ``step``-th token."""
        count = -(-self.v.config.tile_m // step) if self.v.gathered else 0
        tokens = [token + i * step for i in range(count)]
        return [load_global(indices.iterator.toint() + Int64(t) * 4, 1, t < end)[0] for t in tokens]

    @cute.jit
    def load_weights(self, weight, ring, n_tile, slot, stage):
        """Request a slot's weights: of each block, or half block, the codes and then the scales."""
        v = self.v
        half = slot % 2 if const_expr(v.halves) else 0
        target = ring + stage * v.stage_bytes + v.x_bytes
        for piece in v.part.pieces(half):
            self.load_parts(weight, n_tile, slot, target + piece.target, piece.source + piece.offset, piece.size // 16)

    @cute.jit
    def load_parts(self, weight, n_tile, slot, target, start, parts):
        """Of each block of a slot the ``parts`` times 16 bytes from ``start`` on."""
        v, threads = self.v, self.v.threads
        thread, total = cute.arch.thread_idx()[0], v.row_blocks * v.blocks * parts
        # a round of copies is a part of one block, or several blocks
        first, part = (thread // parts, thread % parts) if const_expr(parts < threads) else (0, thread)
        for i in cutlass.range_constexpr(-(-total // threads)):
            block, at = i * threads // parts + first, (i * threads % parts + part) * 16
            # past the last block: that block again, whose rows are not stored, or which meets zeros of x
            row = cutlass.min(n_tile * v.row_blocks + block // v.blocks, weight.shape[0] - 1)
            k_block = slot // 2 if const_expr(v.halves) else slot * v.blocks + block % v.blocks
            place = row * weight.shape[1] + cutlass.min(k_block, weight.shape[1] - 1)
            source = weight.iterator.toint() + Int64(place) * v.block.bytes + (start + at)
            to = target + block * v.part.bytes + at
            if const_expr((i + 1) * threads <= total):
                copy_async(to, source, Int32(16))
            else:
                if thread < total - i * threads:
                    copy_async(to, source, Int32(16))

    # --------------------------------------------------- arithmetic (no control flow of the device: plain Python)

    def read_codes(self, ring, stage, j):
        """(code words [unit], a function that gives a group's scale words [unit]) of a warp's j-th run of columns in a
        slot. The first group's are read at once, the others not before they are used: registers are scarce."""
        v = self.v
        k_set, n_place, _, lane = self.place()
        chunk = k_set * v.chunks + j if v.k_sets > 1 else j
        halves = v.chunk_k // 64  # of a block, in a run
        block, half = (0, 0) if v.halves else (chunk, 0) if halves == 2 else (chunk // 2, chunk % 2)
        unit = n_place * v.units
        base = ring + stage * v.stage_bytes + v.x_bytes + (unit // 4 * v.blocks + block) * v.part.bytes
        codes = base + half * v.part.half_bytes + unit % 4 * STRIP_BYTES + lane * LANE_BYTES
        words = [sum((self.reader.codes(codes, i, u) for i in range(halves)), ()) for u in range(v.units)]
        scales = base + v.part.code_bytes + (unit % 4 * 8 + lane // 4) * v.part.pair_bytes
        if v.block.scale_group < BLOCK_K:
            scales += v.part.run(half * self.groups) * v.part.pair_bytes

        def read_scales(g):
            return [self.reader.scales(scales, g, u) for u in range(v.units)]

        first = read_scales(0)
        return words, lambda g: read_scales(g) if g else first

    def multiply_chunk(self, acc, ring, stage, j, packed):
        """acc += a run of columns, group by group."""
        v, width, steps = self.v, self.decoder.words_per_step, 4 // self.groups
        words, scales = packed
        x_address = self.x_address(ring, stage, j)
        for group in range(self.groups):
            scale_words = scales(group)
            prepared = [self.decoder.prepare(s, self.table(ring)) for s in scale_words]
            sums = self.no_sums() if v.promoted else acc
            for step in range(group * steps, (group + 1) * steps):
                if v.token_blocks > 1 or step % 2 == 0:
                    fragments = self.read_x(x_address, step)
                for u in range(v.units):
                    a = self.decoder.decode(words[u][step * width : (step + 1) * width], prepared[u])
                    for t in range(v.token_blocks):
                        b = fragments[t] if v.token_blocks > 1 else fragments[step % 2]
                        product = self.add_product([sums[i, t, u] for i in range(4)], a, b)
                        for i in range(4):
                            sums[i, t, u] = product[i]
            if v.promoted:
                self.promote(acc, sums, scale_words)

    def no_sums(self):
        """Accumulators (4, token blocks, row units), all 0."""
        acc = cute.make_rmem_tensor((4, self.v.token_blocks, self.v.units), Float32)
        acc.fill(0.0)
        return acc

    def promote(self, acc, sums, scale_words):
        """acc += a group's sums, by the scales of rows g and g + 8."""
        for u, words in enumerate(scale_words):
            factors = self.decoder.scales(words)
            for t in range(self.v.token_blocks):
                for i in range(4):
                    acc[i, t, u] = fma(sums[i, t, u], factors[i // 2], acc[i, t, u])

    def add_product(self, sums, a, b):
        """sums + a @ b, of a step along k. Without an instruction for e4m3 in two halves, as fp16: ptxas would make the
        same of it, and spill. In both halves a register's first two columns meet each other, and then its last two."""
        v = self.v
        if not v.widened:
            return mma_sync(v.kind, sums, a, b)
        for half in range(2):
            sums = mma_sync("f16", sums, [e4m3_to_halves(r)[half] for r in a], [e4m3_to_halves(r)[half] for r in b])
        return sums

    def x_address(self, ring, stage, j):
        """Where a lane's rows for ldmatrix begin: four 8 x 8 matrices are 16 tokens x 32 bytes, or, where a warp has
        eight tokens, 8 x 64."""
        v = self.v
        k_set, _, m_place, lane = self.place()
        chunk = k_set * v.chunks + j if v.k_sets > 1 else j
        row, matrix = lane % 8, lane // 8
        token = m_place * (8 * v.token_blocks) + row + (matrix // 2 * 8 if v.token_blocks > 1 else 0)
        part = matrix % 2 if v.token_blocks > 1 else matrix
        base = ring + stage * v.stage_bytes + chunk * (v.config.tile_m * 128)
        return base + token * 128 + (part ^ row) * 16

    def read_x(self, address, step):
        """Fragments, two registers each: of a step's token blocks, or of two steps of the only one."""
        found: list = []
        for pair in range(max(1, self.v.token_blocks // 2)):
            r = load_matrix((address ^ (step * 32)) + pair * 2048)
            found += [(r[0], r[1]), (r[2], r[3])]
        return found

    # -------------------------------------------------------------------------------------------------- epilogue

    @cute.jit
    def store(self, acc, out, extras, ring, tile):
        """tile: (first token, tile along n)."""
        self.park(acc, ring)
        cute.arch.sync_threads()
        self.finish(out, extras, ring, tile)

    def park(self, acc, ring):
        """This warp's accumulators into the drained pipeline's memory, float32 [k set][token][feature]."""
        v = self.v
        k_set, n_place, m_place, lane = self.place()
        token = (k_set * v.m_warps + m_place) * (8 * v.token_blocks) + lane % 4 * 2
        at = ring + (token * v.sums_row + n_place * (16 * v.units) + lane // 4) * 4
        for t in range(v.token_blocks):
            for u in range(v.units):
                for i in range(4):
                    store_shared_f32(at + ((8 * t + i % 2) * v.sums_row + 16 * u + i // 2 * 8) * 4, acc[i, t, u])

    @cute.jit
    def finish(self, out, extras, ring, tile):
        """Each thread sums quads, four features of a token, over the k sets, and stores them."""
        v, c, formula = self.v, self.v.config, self.formula
        thread, per_row = cute.arch.thread_idx()[0], c.tile_n // 4
        quads = c.tile_m * per_row
        alpha = formula.load_alpha(extras)
        together = min(_QUADS_TOGETHER, -(-quads // v.threads))
        for first in cutlass.range(thread, quads, together * v.threads, unroll=1):
            places = []
            for i in cutlass.range_constexpr(together):
                index = first + i * v.threads
                places.append((index // per_row, index % per_row * 4))
            addends, factors = [], []
            for token, feature in places:
                row, column = tile[0] + token, tile[1] * c.tile_n + feature
                biases = [formula.load_bias(extras, column + j) for j in range(4)]
                addends.append((alpha, biases, formula.load_residual(extras, row, column)))
                channels = [formula.load_channel(extras, column + j) for j in range(4)]
                factors.append((formula.load_token_scale(extras, row, out.shape[0]), channels))
            for (token, feature), added, (scale, channels) in zip(places, addends, factors, strict=True):
                sums = [Float32(0.0)] * 4
                for k_set in range(v.k_sets):
                    at = ring + ((k_set * c.tile_m + token) * v.sums_row + feature) * 4
                    sums = [y + to_float("f32", word) for y, word in zip(sums, load_shared(at, 4), strict=True)]
                sums = [scaled(y, scale, channel) for y, channel in zip(sums, channels, strict=True)]
                formula.store_quad(sums, added, out, tile[0] + token, tile[1] * c.tile_n + feature)
