"""d.T (n, m) = w (n, k) @ x.T (k, m) on Hopper, the weight decoded from 4 bits in registers.

WGMMA takes its A operand from registers and its B operand from shared memory, so the weight is A and the kernel
computes the transpose of d; only this file and the epilogue know. Sizes are named in the problem's frame: tile_m
tokens, tile_n features.

Warp roles, in warpgroups of 128 threads:

    0 .. W - 1   consumers, W = tile_n / 64; each owns 64 features and all tile_m tokens of a tile
    W            producer: one warp issues all copies, three are idle

With tile_n 256 and more than 64 tokens W is 2, since four consumers would have 112 registers each: each owns two row
blocks of 64 features (v.row_blocks).

Pipeline of ``stages`` slots, each with a full and an empty mbarrier:

    full    1 arrival (the producer's expect_tx) and the bytes of the slot: tile_n / 64 weight blocks x (tile_k / 128)
            by bulk copy, and tile_k / 64 boxes of x by TMA (128-byte swizzle)
    empty   one arrival per thread that reads the slot, of every CTA that the slot's x is shared with

Timeline of a consumer warpgroup, in units of 64 columns of a row block (f: fragment registers, two sets in turn):

    decode f0 | wgmma f0 ->             | wgmma f0 ->
              | decode f1   | wgmma f1 ->
                            ^ wait until wgmma f0 is done, so that f0 may be overwritten

One set would not do: the next unit's decode would overwrite registers that an asynchronous wgmma still reads. A slot is
released one unit after its last wgmma was issued, when that wgmma is known to be done.

With cluster_n > 1 the CTAs of a cluster work on neighbouring features of the same tokens; each fetches a part of x and
multicasts it. With cluster_m > 1 they work on neighbouring tokens of the same features and share the weights alike.
With split_k > 1 they work on parts of k of the same tile, park their accumulators in shared memory over the drained
pipeline, and each sums a share of the tokens over all of them in rank order, so that the result does not depend on
timing.

Schedules: ``coop``, all consumers at one tile; ``pingpong``, two tiles at a time, so that one is multiplied while the
other is stored: two CTAs on a multiprocessor, or, for 256 tokens, two consumer warpgroups of one CTA that take turns;
``stream``, as coop, but the tiles that do not fill a wave, and those of the wave before, are cut along k so that all
CTAs have equal work (device/stream_k.py). With tile_k of 256 and few tokens the consumers come in two (or four) sets
along k, which take turns at the blocks of a slot; at the end the first set adds up.

The grid is persistent (a CTA walks over tiles) except with split_k or several sets: a cluster then has one tile, since
its sums pass through the drained pipeline. Programmatic dependent
launch: the weights of the first slot are requested before ``griddepcontrol.wait``. Nothing earlier in the stream may
therefore still be writing them, which holds because this kernel lets its successor start only after its own wait.

With fp8 activations (v.kind "e4m3", the kernel sm90_fp8_gemm) a step is 128 columns long, still 128 bytes of x, and the
codes become e4m3. With 16-bit scales (v.promoted) those multiply the float32 sums of each group: ``multiply_groups``
takes the place of ``multiply_slot``, with two sets of sums of a part of the tokens beside the accumulators.

Grouped (v.grouped), there are several weights, experts, each for some rows of x that only the device knows: a warp of
each CTA counts all experts' tiles first (device/groups.py), after ``griddepcontrol.wait``. The boxes of x then start at
any row; rows past the expert's last one are multiplied and not stored.

Gathered (v.gathered, of a grouped problem), x comes by cp.async instead (device/row_gather.py), with all four warps of
the producer at it: its threads arrive at a slot's full barrier too, each when its copies are there, and a consumer
makes what they wrote visible to its WGMMAs behind its wait.

Shared memory: stages x (x + weights), the epilogue's staging buffers, barriers. Registers: 24 for the producer, up to
40 where it gathers; for a consumer row_blocks * tile_m / 2 accumulators, 32 of fragments, about 40 more.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from w4gemm.kernels.device.decode_fp8 import decoder_of
from w4gemm.kernels.device.epilogue import Epilogue
from w4gemm.kernels.device.formula import Formula
from w4gemm.kernels.device.groups import (
    Groups,
    cut_off,
    extras_of,
    first_rows,
    most_tiles,
    scales_of_rows,
    weight_of,
)
from w4gemm.kernels.device.ptx import (
    bulk_copy,
    bulk_copy_multicast,
    copies_wait,
    fence_proxy_async,
    fma,
    load_shared,
    load_shared_cluster,
    shared_address,
    store_shared_f32x4,
)
from w4gemm.kernels.device.row_gather import RowGather
from w4gemm.kernels.device.scheduler import stream_pieces, stream_segment, stream_share, tile_coordinates
from w4gemm.kernels.device.split_k import Reduction
from w4gemm.kernels.device.stream_k import StreamSum
from w4gemm.kernels.gpu import MAX_EXPERTS
from w4gemm.kernels.sm90_mixed_gemm.variant import CODE_BYTES, Variant

_DTYPES = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16, "e4m3": cutlass.Float8E4M3FN}
_EPILOGUE_BARRIER = 2  # named barriers from here on, one per consumer warpgroup
_CONSUMER_BARRIER = 1
_TURN_BARRIER = 6  # and 7
_EARLY_SLOTS = 1  # of weights, requested before x may be read; with more, the first x would queue up behind them
_TOKENS_PER_BAND = 1024  # of the tile order: x and weights then take about equal room in L2


class MixedGemm:
    """The kernel for one :class:`Variant`; an instance is what ``cute.compile`` is given."""

    def __init__(self, variant: Variant):
        self.v = variant
        self.dtype = _DTYPES[variant.kind]
        self.decoder = decoder_of(variant)
        formula = Formula(variant.epilogue, variant.bias_kind, variant.out_kind, variant.vector, variant.folded)
        how = (variant.residuals_ahead, variant.boxed, variant.grouped)
        self.epilogue = Epilogue(formula, variant.quads, variant.stored_tokens, variant.stored_at_once, *how)
        self.out_dtype = _DTYPES.get(variant.out_kind, Float32)
        self.chunks = variant.config.tile_k // variant.chunk_k  # steps of 128 bytes of x along k in one slot
        self.experts = Groups(variant.config.tile_m)
        self.row_gather = RowGather(variant.config.tile_m, self.chunks, variant.itemsize, warps=4)
        self.stream_sum = StreamSum(variant.config.tile_m * variant.row_blocks, variant.row_groups)
        self.cluster = variant.config.cluster_m * variant.config.cluster_n * variant.config.split_k
        self.scale_bytes = 128 * self.decoder.words_per_scale  # of one group in a block
        # what a thread holds of a block, or of half a block, in registers: code words, and scales of so many groups
        self.part_k = 64 if variant.halves else 128
        self.part_chunks = self.part_k // variant.chunk_k
        self.code_words = self.part_k // 16
        self.groups = max(1, self.part_k // variant.scale_group)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        alpha: Float32 | cute.Tensor | None,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        token_scale: cute.Tensor | None,
        channels: cute.Tensor | None,
        starts: cute.Tensor | None,
        ends: cute.Tensor | None,
        indices: cute.Tensor | None,
        partials: cute.Tensor | None,
        flags: cute.Tensor | None,
        max_clusters: Int32,
        stream: Any,
    ):
        """x (m, k), weight int32 (n blocks, k blocks, words), out and residual (m, columns), alpha a number or (1),
        bias and channels (n), token_scale (m). Grouped: weight with the n blocks of all experts in a row, bias and
        channels (experts, n), starts and ends of the experts' rows, int32 (experts). Gathered: indices int32 (m), of
        rows of x (any number, k) and of token_scale. partials and flags, for schedule stream: see device/stream_k.py.
        max_clusters: how many clusters of this kernel the device holds at once."""
        c = self.v.config
        mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (self.v.row_groups, 1, 1),
            tiler_mn=(64, c.tile_m // self.v.token_parts),
            a_source=warpgroup.OperandSource.RMEM,
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        x_layout = cute.tile_to_shape(atom, (c.tile_m, self.v.chunk_k, self.chunks * self.v.stages), order=(0, 1, 2))
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.cluster_n > 1 else cpasync.CopyBulkTensorTileG2SOp()
        # the same memory as the matrix operand sees, in boxes: x_layout with its tokens in parts
        box_layout = cute.tile_to_shape(
            atom, (self.v.box_tokens, self.v.chunk_k, self.v.boxes * self.chunks * self.v.stages), order=(0, 1, 2)
        )
        box_shape = (self.v.box_tokens, self.v.chunk_k)
        box = cute.tile_to_shape(atom, box_shape, order=(0, 1))
        tma, tma_x = None, x
        if const_expr(not self.v.gathered):
            tma, tma_x = cpasync.make_tiled_tma_atom(copy, x, box, box_shape, num_multicast=c.cluster_n)
        experts = starts.shape[0] if const_expr(self.v.grouped) else 1
        m_tiles, n_tiles = self.tiles(out.shape[0], weight.shape[0] // experts)
        if const_expr(self.v.grouped):
            m_tiles = most_tiles(out.shape[0], experts, c.tile_m)
        clusters = m_tiles * n_tiles
        if const_expr(self.v.stream):
            steps = cute.ceil_div(weight.shape[1], self.v.step_blocks)
            clusters = clusters * steps  # a step of k for each CTA at least
        if const_expr(self.v.persistent):
            clusters = cutlass.min(clusters, max_clusters)
        extras, rows = (alpha, bias, residual, token_scale, channels), (starts, ends, indices)
        parked = (partials, flags)
        self.kernel(
            tma, tma_x, mma, x_layout, box_layout, *self.boxes_of_d(out), weight, out, *extras, *rows, *parked
        ).launch(
            grid=[clusters * self.cluster, 1, 1],
            block=[self.v.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=self.v.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    def boxes_of_d(self, out: cute.Tensor) -> tuple[cute.CopyAtom | None, cute.Tensor, cute.ComposedLayout | None]:
        """TMA that stores d, d as it sees it, and the layout of all staging buffers, two boxes each."""
        if not self.v.boxed:
            return None, out, None
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.out_dtype)
        shape = (self.v.stored_at_once, 64)
        box = cute.tile_to_shape(atom, shape, order=(0, 1))
        store, d = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, box, shape)
        return store, d, cute.tile_to_shape(atom, (*shape, 2 * self.v.staging_buffers), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        tma: cute.CopyAtom | None,
        tma_x: cute.Tensor,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        box_layout: cute.ComposedLayout,
        store: cute.CopyAtom | None,
        store_d: cute.Tensor,
        staging_layout: cute.ComposedLayout | None,
        weight: cute.Tensor,
        out: cute.Tensor,
        alpha: Float32 | cute.Tensor | None,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        token_scale: cute.Tensor | None,
        channels: cute.Tensor | None,
        starts: cute.Tensor | None,
        ends: cute.Tensor | None,
        indices: cute.Tensor | None,
        partials: cute.Tensor | None,
        flags: cute.Tensor | None,
    ):
        v, c = self.v, self.v.config
        extras = (alpha, bias, residual, scales_of_rows(token_scale, indices), channels)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
        if const_expr(v.boxed):
            outer, inner = staging_layout.outer, staging_layout.inner
            halves = smem.allocate_tensor(self.out_dtype, outer, byte_alignment=1024, swizzle=inner)
            staging = (shared_address(halves.iterator), (store, store_d, halves))
        else:
            s_staging = smem.allocate_array(Int32, v.staging_buffers * v.staging_bytes // 4, byte_alignment=128)
            staging = (shared_address(s_staging), ())
        s_weight = smem.allocate_array(Int32, v.stages * v.weight_bytes // 4, byte_alignment=128)
        full = smem.allocate_array(Int64, v.stages, byte_alignment=8)
        empty = smem.allocate_array(Int64, v.stages, byte_alignment=8)
        groups, s_fold = None, s_x.iterator
        if const_expr(v.grouped):
            groups = (smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS)), (starts, ends))
            cute.arch.griddepcontrol_wait()
            if warp == 1:
                self.experts.fill(*groups)
        if const_expr(v.fold_bytes > 0):
            s_fold = smem.allocate_array(Int32, v.fold_bytes // 4, byte_alignment=128)
        decode_table = Int32(0)
        if const_expr(v.decode_table_bytes > 0):
            decode_table = shared_address(smem.allocate_array(Int32, v.decode_table_bytes // 4, byte_alignment=16))
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(v.stages):
                    cute.arch.mbarrier_init(full + i, 1 + v.gather_threads)
                    cute.arch.mbarrier_init(empty + i, v.slot_threads * v.sharers)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        cta = cute.arch.block_idx()[0]
        rank = cta % self.cluster
        # the steps along k of this CTA, all of them or its share; then in slots
        slots = cute.ceil_div(weight.shape[1], v.step_blocks)
        first_slot = Int32(0)
        if const_expr(c.split_k > 1):
            share = slots // c.split_k
            extra = slots - share * c.split_k
            first_slot = rank * share + cutlass.min(rank, extra)
            slots = share + (1 if rank < extra else 0)
        first_slot, slots = first_slot * self.v.slots_per_step, slots * self.v.slots_per_step
        n_blocks = weight.shape[0] // starts.shape[0] if const_expr(v.grouped) else weight.shape[0]
        m_tiles, n_tiles = self.tiles(out.shape[0], n_blocks)
        if const_expr(v.grouped):
            m_tiles = groups[0][starts.shape[0] - 1]
        cluster, clusters = cta // self.cluster, cute.arch.grid_dim()[0] // self.cluster
        if const_expr(v.stream):
            # backwards: CTAs that others wait for have the lower numbers of the grid, which start first
            cluster = clusters - 1 - cluster
        work = (cluster, clusters, m_tiles, n_tiles, first_slot, slots)
        ring = (full, empty, s_x, shared_address(s_weight))
        if warp >= 4 * v.warpgroups:
            if const_expr(v.consumer_registers > 0):
                cute.arch.setmaxregister_decrease(v.producer_registers)
            source, tokens = (tma, tma_x, box_layout, indices), (out.shape[0], groups, n_blocks)
            if const_expr(v.gathered):
                self.produce(source, weight, tokens, ring, work, rank)
            elif warp == 4 * v.warpgroups:
                self.produce(source, weight, tokens, ring, work, rank)
            if const_expr(c.split_k > 1):  # every thread of the cluster takes part in its barriers
                self.cluster_barrier()
                self.cluster_barrier()
        else:
            if const_expr(v.consumer_registers > 0):
                cute.arch.setmaxregister_increase(v.consumer_registers)
            memory = (staging, s_fold, decode_table)
            self.consume(mma, ring, work, rank, out, extras, (partials, flags), groups, memory)

    def tiles(self, m, n_blocks):
        """(tiles along m, along n) of the problem, each as large as a cluster."""
        c = self.v.config
        return cute.ceil_div(m, c.tile_m * c.cluster_m), cute.ceil_div(n_blocks, self.v.tile_blocks * c.cluster_n)

    def place_in_cluster(self, rank):
        """(along m, along n) of a CTA's tile among those of its cluster; (0, 0) where all work on one."""
        c = self.v.config
        return (0, 0) if c.split_k > 1 else (rank // c.cluster_n, rank % c.cluster_n)

    @cute.jit
    def cluster_barrier(self):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # ------------------------------------------------------------------------------------------------- producer

    @cute.jit
    def produce(self, source, weight, tokens, ring, work, rank):
        """source: TMA, x as it sees it and its boxes; or, gathered, x and the indices of its rows. tokens: (m, groups)
        as ``find`` takes them, and the n blocks of an expert."""
        v, c = self.v, self.v.config
        full, empty, s_x, s_weight = ring
        tma, x, box_layout, indices = source
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        m_tiles, n_tiles = work[2], work[3]
        rank_m, rank_n = self.place_in_cluster(rank)
        # those who get the same x, and those who get the same weights
        x_mask = cutlass.Int16(Int32((1 << c.cluster_n) - 1) << (rank_m * c.cluster_n))
        weight_mask = cutlass.Int16(Int32(sum(1 << i * c.cluster_n for i in range(c.cluster_m))) << rank_n)
        cast = (rank_m, weight_mask)
        count, stream = self.pieces(work)
        early = 0
        if const_expr(not v.grouped):
            early = self.load_early(weight, s_weight, full, tokens[0], work, stream, rank_n, cast)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(count, unroll=1):
            tile, first_slot, slots = self.piece(index, work, stream)
            m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, self.band, v.short)
            m_tile, n_tile = m_tile * c.cluster_m + rank_m, n_tile * c.cluster_n + rank_n
            expert, token, end = self.find(m_tile, *tokens[:2])
            boxes = self.boxes_of(token, end)
            if const_expr(v.gathered):
                rows = self.row_gather.indices(indices, token, end, warp)
            else:
                x_parts = self.partition(tma, x, (s_x, box_layout), (token, end), rank_n)
            own = weight_of(weight, expert, tokens[2]) if const_expr(v.grouped) else weight
            for i in cutlass.range(slots, unroll=1):
                slot = first_slot + i
                if index > 0 or i >= early:
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    if const_expr(not v.gathered):
                        self.load_weight(own, s_weight, full, n_tile, (slot, stage, boxes), cast)
                    elif warp == 0:
                        self.load_weight(own, s_weight, full, n_tile, (slot, stage, boxes), cast)
                if const_expr(v.gathered):
                    target = shared_address(s_x.iterator) + stage * v.x_bytes
                    self.row_gather.copy(x, rows, slot, target, warp)
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                for chunk in cutlass.range_constexpr(0 if v.gathered else self.chunks):
                    for b in cutlass.range_constexpr(v.boxes):
                        if b < boxes:
                            t_s, t_g = x_parts[b]
                            cute.copy(
                                tma,
                                t_g[(None, 0, slot * self.chunks + chunk)],
                                t_s[(None, (stage * self.chunks + chunk) * v.boxes)],
                                tma_bar_ptr=full + stage,
                                mcast_mask=x_mask,
                            )
                stage += 1
                if stage == v.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
        if const_expr(v.gathered):
            copies_wait()
        if const_expr(v.sharers > 1):
            # Stay until the neighbours have consumed all that was sent to this CTA and by it: one round over the whole
            # ring from its oldest slot on. Slots that were never filled let the wait pass.
            for _ in cutlass.range(v.stages, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                stage += 1
                if stage == v.stages:
                    stage = Int32(0)
                    phase = phase ^ 1

    @cute.jit
    def load_early(self, weight, s_weight, full, m, work, stream, rank_n, cast):
        """The weights of the first slots: of how many."""
        c = self.v.config
        tile, first_slot, slots = self.piece(Int32(0), work, stream)
        early = cutlass.min(slots, _EARLY_SLOTS)
        m_tile, n_tile = tile_coordinates(tile, work[2], work[3], self.band, self.v.short)
        m_tile, n_tile = m_tile * c.cluster_m + cast[0], n_tile * c.cluster_n + rank_n
        boxes = self.boxes_of(m_tile * c.tile_m, m)
        for i in cutlass.range(early, unroll=1):
            self.load_weight(weight, s_weight, full, n_tile, (first_slot + i, i, boxes), cast)
        return early

    @property
    def band(self) -> int:
        return max(1, _TOKENS_PER_BAND // (self.v.config.tile_m * self.v.config.cluster_m))

    def boxes_of(self, token, end):
        """Boxes of a tile that hold any token; the others keep what they held, which reaches no stored result."""
        v = self.v
        if v.gathered:
            return 0
        boxes = cutlass.min(cute.ceil_div(end - token, v.box_tokens), v.boxes)
        return cutlass.max(boxes, 0) if const_expr(v.config.cluster_m > 1) else boxes

    def partition(self, tma, tma_x, shared, tokens, share):
        """For each box of the tile of x with the first token and the end ``tokens``: where it goes, by chunk of k of
        the first box, and where it comes from, by (0, chunk of k). shared: (s_x, box_layout)."""
        (s_x, box_layout), (token, end), box = shared, tokens, self.v.box_tokens
        group, cluster = cute.group_modes, cute.make_layout(self.v.config.cluster_n)
        # The last box that is fetched ends at the last token, rounded up to eight: rows past m are slow, those that the
        # box before brings as well are not. By a shift, and uniform, since x waits for it.
        last, parts = cutlass.max(((end - token + 7) >> 3) - box // 8, 0), []
        for b in range(self.v.boxes):
            eights = cute.arch.make_warp_uniform(cutlass.min(b * box // 8, last)) if b > 0 else 0
            s_boxes = cute.make_tensor(s_x.iterator + eights * (8 * self.v.chunk_k), box_layout.outer)
            tokens_on = cute.domain_offset((token + eights * 8, 0), tma_x)
            g_x = cute.local_tile(tokens_on, (box, self.v.chunk_k), (None, None))
            parts.append(cpasync.tma_partition(tma, share, cluster, group(s_boxes, 0, 2), group(g_x, 0, 2)))
        return parts

    @cute.jit
    def find(self, m_tile, m, groups):
        """(expert, first token, end of the tokens that are stored) of a token tile."""
        expert, token, end = Int32(0), m_tile * self.v.config.tile_m, m
        if const_expr(self.v.grouped):
            expert, token, end = self.experts.find(*groups, m_tile)
        return expert, token, end

    @cute.jit
    def load_weight(self, weight, s_weight, full, n_tile, place, cast):
        """A slot's weight blocks, or this CTA's part of them for all that share them. place: (slot of k, stage of the
        ring, boxes of x that will come with it). cast: (place along m in the cluster, mask of those who share)."""
        v = self.v
        slot, stage, boxes = place
        rank_m, mask = cast
        with cute.arch.elect_one():
            barrier = shared_address(full + stage)
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, v.weight_bytes + boxes * (v.x_bytes // v.boxes))
            for r in cutlass.range_constexpr(v.tile_blocks):
                # who owns rows past the last block works on that block again and stores nothing
                row = cutlass.min(n_tile * v.tile_blocks + r, weight.shape[0] - 1)
                for b in cutlass.range_constexpr(v.blocks):
                    # past the last k block: that block again, which meets the zeros that TMA puts past the end of x
                    k_block = slot // 2 if const_expr(v.halves) else slot * v.blocks + b
                    if const_expr(v.step_blocks > 1):
                        k_block = cutlass.min(k_block, weight.shape[1] - 1)
                    source = weight.iterator.toint() + (Int64(row) * weight.shape[1] + k_block) * v.block_bytes
                    target = s_weight + stage * v.weight_bytes + (r * v.blocks + b) * v.part_bytes
                    if const_expr(v.config.cluster_m == 1):
                        self.load_part_of_slot(target, source, slot, barrier, None)
                    else:
                        if r % v.config.cluster_m == rank_m:
                            self.load_part_of_slot(target, source, slot, barrier, mask)

    def load_part_of_slot(self, target, source, slot, barrier, mask):
        """A block, or half of it. mask: of the CTAs that get it, None for this one alone."""
        v = self.v
        pieces = [(target, source, v.block_bytes)]
        if v.halves:
            codes, scales = CODE_BYTES // 2, v.part_bytes - CODE_BYTES // 2
            half = slot % 2
            pieces = [
                (target, source + half * codes, codes),
                (target + codes, source + CODE_BYTES + (half * scales if v.scale_group < 128 else 0), scales),
            ]
        for to, start, size in pieces:
            if mask is None:
                bulk_copy(to, start, Int32(size), barrier)
            else:
                bulk_copy_multicast(to, start, Int32(size), barrier, mask)

    # ------------------------------------------------------------------------------------------------ consumers

    @cute.jit
    def consume(self, mma, ring, work, rank, out, extras, parked, groups, memory):
        """memory: staging and its boxes, k sets' sums, the decoder's table."""
        v, c = self.v, self.v.config
        staging, s_fold, decode_table = memory
        full, empty, s_x, _ = ring
        m_tiles, n_tiles, slots = work[2], work[3], work[5]
        thread = cute.arch.thread_idx()[0]
        wg, t = cute.arch.make_warp_uniform(thread // 128 % v.row_groups), thread % 128
        k_set, turn = cute.arch.make_warp_uniform(thread // (128 * v.row_groups)), Int32(0)
        if const_expr(v.turns > 1):
            k_set, turn = Int32(0), k_set
        thread = thread % (128 * v.row_groups)
        thr = mma.get_slice(thread)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((c.tile_n, c.tile_m)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        x_fragments = self.x_operands(mma, thr, s_x)
        fragment = cute.make_rmem_tensor(thr.partition_shape_A((64 * v.row_groups, 2 * v.chunk_k)), self.dtype)
        packed = cute.make_rmem_tensor((self.code_words + self.groups * self.decoder.words_per_scale,), Int32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.arch.griddepcontrol_wait()
        stage, phase = Int32(0), Int32(0)
        rank_m, rank_n = self.place_in_cluster(rank)
        who = (wg, k_set, t, rank)
        operands = (self.by_row_block(acc, flat), fragment, x_fragments[0], packed, decode_table)
        if const_expr(v.decode_table_bytes > 0):  # while the first slots are on their way
            self.decoder.fill_table(decode_table, cute.arch.thread_idx()[0], 128 * v.warpgroups)
            self.consumer_barrier()
        sums = []
        if const_expr(v.promoted):  # two sets: what is being added up of a group, and its scales of rows g and g + 8
            shape = thr.partition_shape_C((c.tile_n, c.tile_m // v.token_parts))
            sums = [(cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor((2,), Float32)) for _ in range(2)]
            sums.append(cute.make_rmem_tensor((2 * self.groups,), Float32))  # scales of the chunk that was decoded
            operands = (flat, fragment, x_fragments, packed, decode_table)
        if const_expr(v.turns > 1):
            # A warpgroup must not wait for a slot more than one round ahead, whose parity looks like one that is past:
            # it starts a tile when the other has seen all slots of the tile before.
            stage, phase = self.skip(turn * slots, stage, phase)
            if turn == 1:
                cute.arch.barrier_arrive(barrier_id=_TURN_BARRIER, number_of_threads=256)
        count, stream = self.pieces(work)
        for index in cutlass.range(turn, count, v.turns, unroll=1):
            tile, first_slot, slots = self.piece(index, work, stream)
            m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, self.band, v.short)
            m_tile, n_tile = m_tile * c.cluster_m + rank_m, n_tile * c.cluster_n + rank_n
            acc.fill(0.0)
            if const_expr(any(v.prefetches)):
                _, own_extras, place = self.store_place((m_tile, n_tile, wg, t), out, extras, groups)
                for own in self.places(place):
                    self.epilogue.prefetch(own_extras, own, *v.prefetches)
            if const_expr(v.turns > 1):
                cute.arch.barrier(barrier_id=_TURN_BARRIER + turn, number_of_threads=256)
            if slots > 0:
                self.wait_full(full + stage, phase)
                if const_expr(v.promoted):
                    self.begin_groups(operands, ring, sums, stage, who)
                else:
                    self.load_part(packed, ring, stage, 0, who)
            previous = stage
            for i in cutlass.range(slots // self.v.slots_per_step, unroll=1):
                for part in cutlass.range_constexpr(self.v.slots_per_step):
                    current = stage
                    stage += 1
                    if stage == v.stages:
                        stage = Int32(0)
                        phase = phase ^ 1
                    done = i * self.v.slots_per_step + part
                    state = (current, stage, phase, previous, done > 0, done + 1 < slots)
                    if const_expr(v.promoted):
                        self.multiply_groups(mma, ring, operands, sums, state, who)
                    else:
                        self.multiply_slot(mma, ring, operands, state, who, part)
                    previous = current
            if const_expr(v.turns > 1):
                cute.arch.barrier_arrive(barrier_id=_TURN_BARRIER + 1 - turn, number_of_threads=256)
            loaded = None
            if const_expr(v.loads_early):
                own_out, own_extras, place = self.store_place((m_tile, n_tile, wg, t), out, extras, groups)
                loaded = self.epilogue.load(own_extras, place, own_out.shape[0])
            if const_expr(not v.promoted):
                warpgroup.wait_group(0)
                if slots > 0:
                    self.release(empty, previous, rank)
            if const_expr(not v.loads_early):
                own_out, own_extras, place = self.store_place((m_tile, n_tile, wg, t), out, extras, groups)
            if const_expr(v.k_sets > 1):
                self.fold(flat, shared_address(s_fold), k_set, thread)
            if const_expr(c.split_k > 1):
                self.reduce(flat, place, ring, rank, k_set, thread, own_out, own_extras, staging, wg)
            elif const_expr(v.stream):
                if first_slot > 0:
                    self.stream_sum.park(flat, *parked, work[0], (wg, t), _EPILOGUE_BARRIER + wg)
                else:
                    if slots < work[5]:
                        self.gather(flat, tile, work, stream, parked, (wg, t))
                    self.finish(flat, own_out, own_extras, place, staging, wg)
            elif const_expr(v.k_sets == 1):
                self.finish(flat, own_out, own_extras, place, staging, wg + turn, loaded)
                if const_expr(v.turns > 1):
                    stage, phase = self.skip(slots, stage, phase)
            else:
                if k_set == 0:
                    self.finish(flat, own_out, own_extras, place, staging, wg, loaded)
        self.epilogue.drain()

    def wait_full(self, barrier, phase):
        """Until a slot is there, for WGMMA too: what cp.async wrote is not, by the barrier alone."""
        cute.arch.mbarrier_wait(barrier, phase)
        if self.v.gathered:
            fence_proxy_async()

    def x_operands(self, mma, thr, s_x):
        """x as operand B, by parts of the tokens."""
        v = self.v
        part = (v.config.tile_m // v.token_parts, v.chunk_k)
        tiles = [cute.local_tile(s_x, part, (i, 0, None)) for i in range(v.token_parts)]
        return [mma.make_fragment_B(thr.partition_B(t)) for t in tiles]

    def by_row_block(self, acc, flat):
        """The accumulators, those of each 64 rows as one operand: parts of ``flat``, one after the other."""
        count = self.v.row_blocks
        if count == 1:
            return [acc]
        layout = cute.make_layout((*acc.shape[:1], 1, 1))
        return [cute.make_tensor(flat.iterator + r * (cute.size(flat) // count), layout) for r in range(count)]

    def places(self, place):
        """Of each of a warpgroup's row blocks, (first token, first feature, thread)."""
        token, feature, t = place
        return [(token, feature + 64 * r, t) for r in range(self.v.row_blocks)]

    def store_place(self, tile, out, extras, groups):
        """Where a warpgroup's part of a tile goes: out and extras of its expert, and its first token and feature.
        Grouped, it is found anew when it is needed, since to keep it while the tile is multiplied would take
        registers."""
        m_tile, n_tile, wg, t = tile
        expert, token, end = self.find(m_tile, out.shape[0], groups)
        place = (token, n_tile * self.v.config.tile_n + wg * (64 * self.v.row_blocks), t)
        if self.v.grouped:
            out, extras = first_rows(out, end), extras_of(extras, expert, end)
        return out, extras, place

    @cute.jit
    def pieces(self, work):
        """How many pieces of work this cluster has: tiles, or parts of them; and what ``piece`` needs besides. One, a
        constant, where the grid has a cluster a tile, since what a loop needs to go on would take registers."""
        cluster, clusters, m_tiles, n_tiles, _, slots = work
        tiles, stream = m_tiles * n_tiles, (Int32(0), Int32(0), Int32(0), Int32(0))
        count = 1
        if const_expr(self.v.stream):
            blocks = slots // self.v.slots_per_step
            stream = stream_share(cluster, clusters, tiles, blocks)
            count = stream[0] + stream_pieces(stream[2], stream[3], blocks)
        elif const_expr(self.v.persistent):
            count = (tiles - cluster + clusters - 1) // clusters
        return count, stream

    @cute.jit
    def piece(self, index, work, stream):
        """(tile, first slot of k, slots) of this cluster's piece of work number ``index``."""
        cluster, clusters, _, _, first_slot, slots = work
        tile = cluster + index * clusters
        if const_expr(self.v.stream):
            blocks = slots // self.v.slots_per_step
            tile, first, stop = stream_segment(index, cluster, clusters, blocks, stream)
            first_slot, slots = first * self.v.slots_per_step, (stop - first) * self.v.slots_per_step
        return tile, first_slot, slots

    @cute.jit
    def gather(self, flat, tile, work, stream, parked, place):
        """Add what the next CTAs multiplied of this tile."""
        cluster, clusters, slots = work[0], work[1], work[5]
        blocks = slots // self.v.slots_per_step
        other, cut = cluster + 1, stream[1] * blocks
        while other * cut // clusters < (tile + 1) * blocks:
            self.stream_sum.add(flat, *parked, other, place, _EPILOGUE_BARRIER + place[0])
            other += 1

    @cute.jit
    def skip(self, slots, stage, phase):
        """The ring position after ``slots`` more slots: those of a tile that is another warpgroup's turn."""
        rounds = (stage + slots) // self.v.stages
        return stage + slots - rounds * self.v.stages, phase ^ (rounds & 1)

    @cute.jit
    def fold(self, flat, s_fold, k_set, thread):
        """All k sets but the first hand their accumulators to it, through memory that nothing else uses until all have
        come here again: that of the drained pipeline, or, where the next tile is on its way into it, its own."""
        v = self.v
        line = v.row_groups * 128 * 16  # bytes of one block of four accumulators, all threads of a set
        size = cute.size(flat) // 4
        self.consumer_barrier()  # the pipeline is drained, and the last tile's sums have been read
        if k_set > 0:
            for i in cutlass.range_constexpr(size):
                at = s_fold + ((k_set - 1) * size + i) * line + thread * 16
                store_shared_f32x4(at, [flat[4 * i + j] for j in range(4)])
        self.consumer_barrier()
        if k_set == 0:
            for s in cutlass.range_constexpr(v.k_sets - 1):
                for i in cutlass.range_constexpr(size):
                    other = load_shared_cluster(s_fold + (s * size + i) * line + thread * 16)
                    for j in cutlass.range_constexpr(4):
                        flat[4 * i + j] = flat[4 * i + j] + other[j]

    @cute.jit
    def reduce(self, flat, place, ring, rank, k_set, thread, out, extras, staging, wg):
        """Sum over the cluster and store this rank's share of the tokens."""
        v, c = self.v, self.v.config
        reduction = Reduction(c.tile_m, v.stored_tokens // 8, c.split_k, v.row_groups * 128)
        if const_expr(v.k_sets == 1):
            self.consumer_barrier()  # the pipeline is drained
        parked = shared_address(ring[2].iterator) + (v.k_sets - 1) * v.tile_bytes + thread * 16
        if k_set == 0:
            reduction.park(flat, parked)
        self.cluster_barrier()
        if const_expr(v.stored_tokens * c.split_k > c.tile_m):  # the last share reaches past the tile
            end = cutlass.min(place[0] + c.tile_m, out.shape[0])
            out, extras = first_rows(out, end), cut_off(extras, end)
        if k_set == 0:
            first, mine = reduction.sum(flat, parked, rank)
            if mine:
                share = cute.make_tensor(flat.iterator, cute.make_layout(v.stored_tokens // 2))
                self.finish(share, out, extras, (place[0] + first, place[1], place[2]), staging, wg)
        self.cluster_barrier()  # the neighbours have read what this CTA parked

    @cute.jit
    def consumer_barrier(self):
        cute.arch.barrier(barrier_id=_CONSUMER_BARRIER, number_of_threads=128 * self.v.warpgroups)

    @cute.jit
    def multiply_slot(self, mma, ring, operands, state, who, part):
        """acc += this slot's weights @ x.T, as far as this k set does it, and the first packed part of the next slot
        into registers. Leaves the last unit's wgmma in flight. A unit of work is a chunk of k for a row block: all
        chunks of a packed part, then those of the next row block, then of the next block along k. part: which slot of
        the main loop's step this is, so that the two sets of fragment registers take turns over all its units."""
        v = self.v
        full, empty, _, _ = ring
        accumulators, fragment, x_fragments, packed, table = operands
        stage, next_stage, next_phase, previous, has_previous, has_next = state
        k_set, rank = who[1], who[3]
        registers = cute.recast_tensor(fragment, Int32)
        chunks = self.chunks // v.k_sets
        x_chunk = stage * self.chunks + k_set * chunks
        units = chunks * v.row_blocks
        for unit in cutlass.range_constexpr(units):
            fragments = (part * units + unit) % 2
            packed_part, piece = divmod(unit, self.part_chunks)
            block, row_block = divmod(packed_part, v.row_blocks)
            acc = accumulators[row_block]
            self.decode_chunk(packed, registers, piece, fragments, table)
            if const_expr(piece == self.part_chunks - 1 and unit < units - 1):
                self.load_part(packed, ring, stage, packed_part + 1, who)
            warpgroup.fence()
            for step in cutlass.range_constexpr(4):
                cute.gemm(
                    mma,
                    acc,
                    fragment[(None, None, fragments * 4 + step)],
                    x_fragments[(None, None, step, x_chunk + block * self.part_chunks + piece)],
                    acc,
                )
            warpgroup.commit_group()
            if const_expr(unit == units - 1):
                if has_next:  # its latency passes while the tensor cores work
                    self.wait_full(full + next_stage, next_phase)
                    self.load_part(packed, ring, next_stage, 0, who)
            warpgroup.wait_group(1)
            if const_expr(unit == 0):
                if has_previous:
                    self.release(empty, previous, rank)

    @cute.jit
    def multiply_groups(self, mma, ring, operands, sums, state, who):
        """acc += this slot's weights @ x.T, as far as this k set does it, with scales that are applied to the sums of a
        group. ``begin_groups`` has been there. A unit of work is a group and a part of the tokens; two sets of sums
        take turns, so that one unit is multiplied while the one before is scaled and added to acc, and the next chunk
        decoded. Nothing is in flight at the end: ptxas would serialize all of it."""
        v = self.v
        full, empty, _, _ = ring
        acc, fragment, x_fragments, packed, _ = operands
        stage, next_stage, next_phase, _, _, has_next = state
        k_set, rank = who[1], who[3]
        chunks, steps = self.chunks // v.k_sets, 4 // self.groups
        x_chunk = stage * self.chunks + k_set * chunks
        units = chunks * self.groups * v.token_parts
        for unit in cutlass.range_constexpr(units):
            chunk, rest = divmod(unit, self.groups * v.token_parts)
            group, part = divmod(rest, v.token_parts)
            group_sums = sums[unit % 2][0]
            warpgroup.fence()
            for step in cutlass.range_constexpr(group * steps, (group + 1) * steps):
                mma.set(warpgroup.Field.ACCUMULATE, step > group * steps)
                cute.gemm(
                    mma,
                    group_sums,
                    fragment[(None, None, chunk % 2 * 4 + step)],
                    x_fragments[part][(None, None, step, x_chunk + chunk)],
                    group_sums,
                )
            warpgroup.commit_group()
            if const_expr(unit > 0):
                warpgroup.wait_group(1)
                self.promote(acc, sums, unit - 1)
            for row in cutlass.range_constexpr(2):
                sums[unit % 2][1][row] = sums[2][2 * group + row]
            if const_expr(rest == self.groups * v.token_parts - 1 and chunk < chunks - 1):
                self.decode_group(operands, sums[2], (chunk + 1) % 2)
                if const_expr(chunk + 2 < chunks):
                    self.load_part(packed, ring, stage, chunk + 2, who)
        if has_next:
            self.wait_full(full + next_stage, next_phase)
            self.begin_groups(operands, ring, sums, next_stage, who)
        warpgroup.wait_group(0)
        self.promote(acc, sums, units - 1)
        self.release(empty, stage, rank)

    @cute.jit
    def begin_groups(self, operands, ring, sums, stage, who):
        """Decode a slot's first chunk, and bring its second into registers."""
        self.load_part(operands[3], ring, stage, 0, who)
        self.decode_group(operands, sums[2], 0)
        self.load_part(operands[3], ring, stage, 1, who)

    def decode_group(self, operands, scales, fragments):
        """What is packed into a set of fragment registers, and its scales, of rows g and g + 8 of each group."""
        _, fragment, _, packed, table = operands
        self.decode_chunk(packed, cute.recast_tensor(fragment, Int32), 0, fragments, table)
        for group in range(self.groups):
            first = self.code_words + group * self.decoder.words_per_scale
            for row, scale in enumerate(self.decoder.scales((packed[first],))):
                scales[2 * group + row] = scale

    def promote(self, acc, sums, unit):
        """acc += what a unit of work summed up, by the scales of rows g and g + 8."""
        group_sums, factors = sums[unit % 2]
        flat = cute.make_tensor(group_sums.iterator, cute.make_layout(cute.size(group_sums)))
        first = unit % self.v.token_parts * cute.size(flat)
        for i in range(cute.size(flat)):
            acc[first + i] = fma(flat[i], factors[i // 2 % 2], acc[first + i])

    def load_part(self, packed, ring, stage, part, who):
        """One of this k set's packed blocks, or half a block, into registers: code words, then scale words. part: which
        of the warpgroup's blocks in the slot, counted over its row blocks first, then along k."""
        v = self.v
        wg, k_set, t, _ = who
        width = self.decoder.words_per_scale
        block, row_block = divmod(part, v.row_blocks)
        index = (wg * v.row_blocks + row_block) * v.blocks + k_set * (v.blocks // v.k_sets) + block
        address = ring[3] + stage * v.weight_bytes + index * v.part_bytes
        lane = (t // 32 * 8 + t % 32 // 4) * 4 * width
        words = []
        for half in range(self.part_k // 64):
            words += load_shared(address + half * 2048 + t * 16, 4)
        for group in range(self.groups):
            words += load_shared(address + 512 * self.code_words + group * self.scale_bytes + lane, width)
        for i, word in enumerate(words):
            packed[i] = word

    def decode_chunk(self, packed, registers, piece, fragments, table):
        """A chunk of what is packed, 128 bytes of x long, into one of the two sets of fragment registers."""
        width, words = self.decoder.words_per_scale, self.decoder.words_per_step
        prepared: Any = None
        step_k = self.v.chunk_k // 4
        for step in range(4):
            group, rest = divmod(piece * self.v.chunk_k + step * step_k, self.v.scale_group)
            if step == 0 or rest == 0:
                first = self.code_words + group * width
                prepared = self.decoder.prepare(tuple(packed[first + i] for i in range(width)), table)
            first = (piece * 4 + step) * words
            values = self.decoder.decode(tuple(packed[first + i] for i in range(words)), prepared)
            for r, value in enumerate(values):
                registers[(0, r % 2, r // 2), 0, fragments * 4 + step] = value

    @cute.jit
    def release(self, empty, stage, rank):
        """Every lane arrives for its own reads, at every CTA that this slot's x or weights came from. One lane for its
        warp would need a barrier of the warp first, and measured 1 to 5 % slower."""
        c = self.v.config
        if const_expr(self.v.sharers == 1):
            cute.arch.mbarrier_arrive(empty + stage)
        else:
            rank_m, rank_n = self.place_in_cluster(rank)
            for i in cutlass.range_constexpr(c.cluster_n):
                cute.arch.mbarrier_arrive(empty + stage, Int32(rank_m * c.cluster_n + i))
            for i in cutlass.range_constexpr(1, c.cluster_m):
                other = (rank_m + i) % c.cluster_m
                cute.arch.mbarrier_arrive(empty + stage, Int32(other * c.cluster_n + rank_n))

    @cute.jit
    def finish(self, flat, out, extras, place, staging, wg, loaded=None):
        """Store a warpgroup's row blocks. loaded: what the sums of the first meet, if that was asked for before."""
        if const_expr(loaded is None):
            loaded = self.epilogue.load(extras, place, out.shape[0])
        alpha, biases, channels, token_scales = loaded
        features, (address, boxes) = [(biases, channels)], staging
        memory = (address + wg * self.v.staging_bytes, _EPILOGUE_BARRIER + wg, (*boxes, 2 * wg))
        places, size = self.places(place), cute.size(flat) // self.v.row_blocks
        if const_expr(not self.v.quads):  # as quads there are no registers for them yet
            features += [self.epilogue.load_features(extras, own) for own in places[1:]]
        for r in cutlass.range_constexpr(self.v.row_blocks):
            if const_expr(r == len(features)):
                features.append(self.epilogue.load_features(extras, places[r]))
            sums = cute.make_tensor(flat.iterator + r * size, cute.make_layout(size))
            self.epilogue.store(sums, out, extras, places[r], (alpha, *features[r], token_scales), memory)
