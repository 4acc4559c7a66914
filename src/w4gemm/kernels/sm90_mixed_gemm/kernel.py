"""d.T (n, m) = w (n, k) @ x.T (k, m) on Hopper, the weight decoded from 4 bits in registers.

WGMMA takes its A operand from registers and its B operand from shared memory, so the weight is A and the kernel
computes the transpose of d; only this folder and the epilogue know. Sizes are named in the problem's frame: tile_m
tokens, tile_n features. This file launches; ``roles`` has what the warps do.

Warp roles, in warpgroups of 128 threads:

    0 .. W - 1   consumers, W = tile_n / 64; each owns 64 features and all tile_m tokens of a tile
    W            producer: one warp issues all copies, three are idle

With tile_n 256 and more than 64 tokens W is 2, since four consumers would have 112 registers each: each owns two row
blocks of 64 features (v.row_blocks).

Pipeline of ``stages`` slots, each with a full and an empty mbarrier:

    full    1 arrival (the producer's expect_tx) and the bytes of the slot: tile_n / 64 weight blocks x (tile_k / 128)
            by bulk copy, and x by TMA (128-byte swizzle), in v.boxes boxes for each 128 bytes of k, none past m
    empty   one arrival per thread that reads the slot, of every CTA that the slot's x or weights are shared with

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
other is stored: two CTAs on a multiprocessor, or, beyond 128 tokens, two consumer warpgroups of one CTA, in turn;
``stream``, as coop, but the tiles that do not fill a wave, and those of the wave before, are cut along k so that all
CTAs have equal work (device/stream_k.py). With tile_k of 256 and few tokens the consumers come in two (or four) sets
along k, which take turns at the blocks of a slot; at the end the first set adds up.

The grid is persistent (a CTA walks over tiles) except with split_k or several sets: a cluster then has one tile, since
its sums pass through the drained pipeline. Programmatic dependent launch: the weights of the first slot are requested
before ``griddepcontrol.wait``. Nothing earlier in the stream may therefore still be writing them, which holds because
this kernel lets its successor start only after its own wait.

With fp8 activations (v.kind "e4m3", the kernel sm90_fp8_gemm) a step is 128 columns long, still 128 bytes of x, and the
codes become e4m3. With v.scales_on_sums the scales multiply the float32 sums of each group: ``multiply_groups``
takes the place of ``multiply_slot``, with two sets of sums of a part of the tokens beside the accumulators.

Grouped (v.grouped), there are several weights, experts, each for some rows of x that only the device knows: a warp of
each CTA counts all experts' tiles first (device/groups.py), after ``griddepcontrol.wait``, while L2 fetches weights.
The boxes of x then start at any row; rows past the expert's last one are multiplied and not stored.

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

from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.decoders import decoder_of
from w4gemm.kernels.device.epilogue import Epilogue
from w4gemm.kernels.device.formula import Formula
from w4gemm.kernels.device.groups import Groups, most_tiles, scales_of_rows
from w4gemm.kernels.device.ptx import shared_address
from w4gemm.kernels.device.row_gather import RowGather
from w4gemm.kernels.device.stream_k import StreamSum
from w4gemm.kernels.gpu import MAX_EXPERTS
from w4gemm.kernels.sm90_mixed_gemm.roles.consumer import Consumer
from w4gemm.kernels.sm90_mixed_gemm.roles.producer import Producer
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant

_DTYPES = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16, "e4m3": cutlass.Float8E4M3FN}


class MixedGemm(Producer, Consumer):
    """The kernel for one :class:`Variant`; an instance is what ``cute.compile`` is given."""

    def __init__(self, variant: Variant):
        self.v = variant
        self.dtype = _DTYPES[variant.kind]
        self.decoder = decoder_of(variant.weight, allow_sum_scale=True)
        kinds = variant.bias_kind, variant.out_kind
        formula = Formula(variant.epilogue, *kinds, variant.vector, variant.channel_scales, self.decoder.sum_scale)
        self.epilogue = Epilogue(
            formula,
            variant.quads,
            variant.stored_tokens,
            variant.stored_at_once,
            variant.residuals_ahead,
            boxed=variant.boxed,
            cut=variant.grouped,
        )
        self.chunks = variant.config.tile_k // variant.chunk_k
        self.experts = Groups(variant.config.tile_m)
        self.row_gather = RowGather(variant.config.tile_m, self.chunks, variant.itemsize, warps=4)
        self.stream_sum = StreamSum(variant.config.tile_m * variant.row_blocks, variant.row_groups)
        self.cluster = variant.config.cluster_m * variant.config.cluster_n * variant.config.split_k
        self.reader = BlockReader(variant.part)
        self.part_k = 64 if variant.halves else 128
        self.part_chunks = self.part_k // variant.chunk_k
        self.code_words = self.part_k // 16
        self.groups = variant.part.groups

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch."""
        c = self.v.config
        x, weight, out = args.x, args.weight, args.out
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
        experts = args.rows.starts.shape[0] if const_expr(self.v.grouped) else 1
        m_tiles, n_tiles = self.tiles(out.shape[0], weight.shape[0] // experts)
        if const_expr(self.v.grouped):
            m_tiles = most_tiles(out.shape[0], experts, c.tile_m)
        clusters = m_tiles * n_tiles
        if const_expr(self.v.stream):
            steps = cute.ceil_div(weight.shape[1], self.v.step_blocks)
            clusters = clusters * steps  # a step of k for each CTA at least
        if const_expr(self.v.persistent):
            clusters = cutlass.min(clusters, args.max_clusters)
        self.kernel(tma, tma_x, mma, x_layout, box_layout, *self.boxes_of_d(out), args.behind_tma()).launch(
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
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, out.element_type)
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
        args: Arguments,
    ):
        v, c = self.v, self.v.config
        weight, out = args.weight, args.out
        starts, ends, indices = args.rows
        extras = args.epilogue._replace(token_scale=scales_of_rows(args.epilogue.token_scale, indices))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
        if const_expr(v.boxed):
            outer, inner = staging_layout.outer, staging_layout.inner
            halves = smem.allocate_tensor(out.element_type, outer, byte_alignment=1024, swizzle=inner)
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
            if warp == 4 * v.warpgroups:
                self.prefetch_first(weight, starts.shape[0], cute.arch.block_idx()[0])
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
            self.consume(mma, ring, work, rank, out, extras, args.workspace, groups, memory)
