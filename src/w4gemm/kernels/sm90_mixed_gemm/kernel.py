"""d.T (n, m) = w (n, k) @ x.T (k, m) on Hopper, the weight decoded from 4 bits in registers.

WGMMA takes operand A from registers and operand B from shared memory, so the weight is A and the kernel computes the
transpose of d; only this folder and the epilogue depend on that. Sizes are named in the problem's frame: tile_m tokens,
tile_n features. This file launches; ``roles`` has the code of the warps.

Warp roles, in warpgroups of 128 threads:

    0 .. W - 1   consumers, W = variant.warpgroups_n * variant.k_sets * variant.pingpong_warpgroups; each owns
                 variant.m64_atoms blocks of 64 features and all tile_m tokens of a tile
    W            producer: one warp issues all copies, three are idle; if gathered, all four copy; under stream-k two
                 of the three handle flags (roles/stream_flags.py)

variant.m64_atoms is 2 if tile_n is 256 and tile_m > 64, because four consumers would have 112 registers per thread.

Pipeline of variant.stages stages, each with a full and an empty mbarrier:

    full    arrive count 1 (the producer's arrive_and_expect_tx), 1 + 128 if gathered (each producer thread, when its
            cp.async copies are done). Transaction bytes: the tile_n / 64 x tile_k / 128 weight blocks (bulk copy) and
            the TMA boxes of x (128-byte swizzle), variant.boxes per 128 bytes of k, less those wholly past m
    empty   arrive count variant.stage_readers * variant.multicast_peers: one per consumer thread that reads the stage,
            in every CTA that shares its x or weights

Timeline of a consumer warpgroup, by MMA batch: one k chunk (128 bytes of x) of one 64-row block. f0 and f1 are the two
fragment buffers:

    decode f0 | wgmma f0 ->             | wgmma f0 ->
              | decode f1   | wgmma f1 ->
                            ^ wait until wgmma f0 is done, so that f0 may be overwritten

One buffer would not do, because the next batch's decode would overwrite registers that an asynchronous WGMMA still
reads. A stage is released one MMA batch late: in the first batch of the next stage, after wait_group(1), which proves
that its last WGMMA has completed. The last stage of a tile, and every stage in ``multiply_groups`` and
``multiply_chunk``, is released after wait_group(0).

With cluster_n > 1 the CTAs of a cluster compute neighbouring features of the same tokens; each fetches a part of x and
multicasts it. With cluster_m > 1 they compute neighbouring tokens of the same features and share the weights alike.
With split_k > 1 they divide k of one tile, store their accumulators to shared memory over the drained pipeline, and
each sums a share of the tokens over all CTAs in rank order, so that the result does not depend on timing.

Schedules: ``coop``, all consumers on one tile; ``pingpong``, two tiles at a time, so that one is multiplied while the
other is stored: two CTAs per multiprocessor or, if tile_m > 128, two consumer warpgroups of one CTA that alternate;
``stream``, as coop, but the tiles that do not fill a wave, and those of the wave before, are divided along k so that
all CTAs have equal work (device/stream_k.py). If a stage has several weight blocks along k and few tokens, the
consumers form two or four k sets, which divide the blocks of a stage; at the end of a tile the first set adds up.

A dense grid is persistent (a CTA loops over tiles) except with split_k or several k sets: a cluster then has one tile,
because its sums pass through the drained pipeline. A grouped grid always is; its k sets reduce through memory of their
own.

Programmatic dependent launch: the weights of one stage or two are requested before ``griddepcontrol.wait``. So nothing
earlier in the stream may still be writing them. Behind another product this holds, because each lets its successor
start only after its own wait. Kernels that come between products (rms_norm, gate_halves, step_attention, add_rms of
activation_quantize) let theirs start at once, so that a product requests weights while the one in front of them ends.
They write no weights, and end only after their own wait. Behind a kernel that is not w4gemm's, and may say nothing of
its successor, CUDA may start this one before that one's writes are visible, also with one of those between: so making a
QuantizedWeight launches something small behind its writer (weights/weight.py), and docs/engines.md says what engines
keep to.

With fp8 activations (variant.kind "e4m3", the kernel sm90_fp8_gemm) a k chunk is 128 columns, still 128 bytes of x, and
the codes become e4m3. If variant.scales_on_sums, the scales multiply the float32 sums of each group:
``multiply_groups`` then replaces ``multiply_stage``, with two sets of sums of a range of tokens beside the
accumulators. It also does if each 128 columns of a row of x have a scale (variant.block_scales), because that scale
multiplies the sums too: TMA brings a stage's scales, those of a tile's tokens for each weight block along k, with x
and on the same barrier. Of more than 128 tokens the sums have one set (variant.one_set_of_sums): ``multiply_chunk``
decodes the next stage while its own is multiplied, and adds the sums while the tensor cores work for the other
warpgroup. With 16-bit x the scales of codebooks multiply sums too, if they have another dtype than x and tokens are
few.

If grouped (variant.grouped), there are several weights, experts, each for some rows of x that only the device knows: a
warp of each CTA counts all experts' tiles first (device/expert_tiles.py), after ``griddepcontrol.wait``, while L2
fetches weights. If the rows are settled (ExpertRows.settled) it counts before the wait, and the producer fills all
stages with weights: so the product after another one of the same rows streams while that one still runs. The boxes of x
then start at any row; rows past the expert's last row are multiplied and not stored.

If gathered (variant.gathered, of a grouped problem), the producer's four warps copy x by cp.async
(device/row_gather.py); each thread arrives at the full barrier when its copies are done. A consumer fences behind its
wait, so that its WGMMAs see these writes.

Shared memory: stages x (x + weights), the epilogue's staging buffers, barriers. Registers: 24 per producer thread, up
to 40 if gathered; per consumer thread variant.m64_atoms * tile_m / 2 accumulators, 32 of fragments, about 40 more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.device.epilogue_math import EpilogueMath
from w4gemm.kernels.device.epilogue_store import EpilogueStore, TmaStore
from w4gemm.kernels.device.expert_tiles import ExpertTiles, max_m_tiles, with_indexed_scales
from w4gemm.kernels.device.launch import memory_of_launch
from w4gemm.kernels.sm90_mixed_gemm.roles.consumer import Consumer, ConsumerMemory, Output
from w4gemm.kernels.sm90_mixed_gemm.roles.mainloop import Mainloop
from w4gemm.kernels.sm90_mixed_gemm.roles.pipeline import Pipeline, ScaleSource, XSource
from w4gemm.kernels.sm90_mixed_gemm.roles.producer import Inputs, Producer, WeightSource
from w4gemm.kernels.sm90_mixed_gemm.roles.tile_scheduler import SchedulerParams, TileScheduler
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.ptx.memory import shared_address

_DTYPES = {
    "f16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}


class OutTarget(NamedTuple):
    """Where TMA stores d; nothing but d itself if threads store it."""

    tma: cute.CopyAtom | None
    d: cute.Tensor
    """(m, columns) as TMA sees it."""
    staging_layout: cute.ComposedLayout | None
    """All staging buffers, two boxes each."""


class Sm90MixedGemmKernel:
    """The device code of one :class:`Variant`."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.dtype = _DTYPES[variant.kind]
        pairs, on_sums = variant.pairs, variant.scales_on_sums
        decoder = variant.weight.decoder(allow_sum_scale=True, pairs=pairs, on_sums=on_sums)
        kinds = variant.bias_kind, variant.out_kind
        math = EpilogueMath(variant.epilogue, *kinds, variant.vector, variant.channel_scales, decoder.sum_scale)
        epilogue = EpilogueStore(
            math,
            variant.float32_staging,
            variant.stored_tokens,
            variant.tokens_per_round,
            variant.residuals_ahead,
            boxed=variant.boxed,
            grouped=variant.grouped,
        )
        self.scheduler = TileScheduler(variant)
        self.producer = Producer(variant, self.scheduler)
        self.consumer = Consumer(variant, self.scheduler, Mainloop(variant, self.scheduler, decoder), epilogue)

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch the kernel on ``stream``."""
        variant, config, out = self.variant, self.variant.config, args.out
        mma = sm90.make_trivial_tiled_mma(
            _DTYPES[variant.weight.decoded],
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (variant.warpgroups_n, 1, 1),
            tiler_mn=(64, config.tile_m // variant.token_splits),
            a_source=warpgroup.OperandSource.RMEM,
        )
        blocks, experts = args.weight, 1
        if const_expr(variant.grouped):
            experts = args.rows.starts.shape[0]
        tiles = self.scheduler.tiles(out.shape[0], blocks.shape[0] // experts)
        m_tiles = tiles.m_tile
        if const_expr(variant.grouped):
            m_tiles = max_m_tiles(out.shape[0], experts, config.tile_m)
        clusters = m_tiles * tiles.n_tile
        if const_expr(variant.stream_k):
            iterations = cute.ceil_div(blocks.shape[1], variant.blocks_k_per_iteration)
            clusters = clusters * iterations  # at least one iteration per CTA
        if const_expr(variant.persistent):
            clusters = cutlass.min(clusters, args.max_clusters)
        self.kernel(
            self.x_source(args.x, args.epilogue.block_scale), mma, self.out_target(out), args.behind_tma()
        ).launch(
            grid=[clusters * self.scheduler.cluster_size, 1, 1],
            block=[variant.threads, 1, 1],
            cluster=[self.scheduler.cluster_size, 1, 1],
            smem=memory_of_launch(variant, clusters, args.max_clusters),
            min_blocks_per_mp=variant.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    def x_source(self, x: cute.Tensor, block_scale: cute.Tensor | None) -> XSource:
        """TMA that loads x and its scales, and the layout of x in all stages."""
        variant, config = self.variant, self.variant.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        chunks = self.producer.k_chunks * variant.stages
        operand_layout = cute.tile_to_shape(atom, (config.tile_m, variant.chunk_k, chunks), order=(0, 1, 2))
        # the same memory with the tokens of a stage divided into boxes
        box_shape = (variant.box_tokens, variant.chunk_k)
        box_layout = cute.tile_to_shape(atom, (*box_shape, variant.boxes * chunks), order=(0, 1, 2))
        if variant.gathered:
            return XSource(None, x, operand_layout, box_layout)
        scales = self.scale_source(block_scale) if variant.block_scales else None
        multicast = config.cluster_n > 1
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
        box = cute.tile_to_shape(atom, box_shape, order=(0, 1))
        tma, tma_x = cpasync.make_tiled_tma_atom(copy, x, box, box_shape, num_multicast=config.cluster_n)
        return XSource(tma, tma_x, operand_layout, box_layout, scales)

    def scale_source(self, block_scale: cute.Tensor) -> ScaleSource:
        """TMA that loads the scales of a tile's rows for a k-slice. block_scale: float32 (m, k blocks)."""
        variant = self.variant
        shape, size = (variant.scale_tokens, variant.blocks_k), variant.block_scale_bytes // 4
        strides = (1, variant.scale_tokens)
        box = cute.make_layout(shape, stride=strides)
        tma, scales = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), block_scale, box, shape)
        stages = cute.make_layout((*shape, variant.stages), stride=(*strides, size))
        return ScaleSource(tma, scales, stages)

    def out_target(self, out: cute.Tensor) -> OutTarget:
        """TMA that stores d, and the layout of the staging buffers."""
        variant = self.variant
        if not variant.boxed:
            return OutTarget(None, out, None)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, out.element_type)
        shape = (variant.tokens_per_round, 64)
        box = cute.tile_to_shape(atom, shape, order=(0, 1))
        tma, d = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, box, shape)
        return OutTarget(tma, d, cute.tile_to_shape(atom, (*shape, 2 * variant.staging_buffers), order=(0, 1, 2)))

    @cute.kernel
    def kernel(self, x_source: XSource, mma: cute.TiledMma, out_target: OutTarget, args: Arguments):
        variant, config = self.variant, self.variant.config
        blocks, out, rows = args.weight, args.out, args.rows
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        x_layout = x_source.operand_layout
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
        store = None
        if const_expr(variant.boxed):
            outer, inner = out_target.staging_layout.outer, out_target.staging_layout.inner
            halves = smem.allocate_tensor(out.element_type, outer, byte_alignment=1024, swizzle=inner)
            staging, store = shared_address(halves.iterator), TmaStore(out_target.tma, out_target.d, halves)
        else:
            staging = smem.allocate_array(
                Int32, variant.staging_buffers * variant.staging_bytes // 4, byte_alignment=128
            )
            staging = shared_address(staging)
        s_weight = smem.allocate_array(Int32, variant.stages * variant.weight_bytes // 4, byte_alignment=128)
        s_scales = Int32(0)
        if const_expr(variant.block_scales):
            words = variant.stages * variant.block_scale_bytes // 4
            s_scales = shared_address(smem.allocate_array(Int32, words, byte_alignment=128))
        full = smem.allocate_array(Int64, variant.stages, byte_alignment=8)
        empty = smem.allocate_array(Int64, variant.stages, byte_alignment=8)
        expert_tiles, s_k_sets = None, s_x.iterator
        if const_expr(variant.grouped):
            expert_tiles = ExpertTiles(smem.allocate_tensor(Int32, cute.make_layout(variant.expert_map)), rows)
            if rows.settled == 0:
                if warp == 4 * variant.warpgroups:
                    self.producer.prefetch_first(blocks, expert_tiles.experts, cute.arch.block_idx()[0])
                cute.arch.griddepcontrol_wait()
            if warp == 1:
                self.scheduler.expert_tile_map.fill(expert_tiles)
        if const_expr(variant.k_set_bytes > 0):
            s_k_sets = smem.allocate_array(Int32, variant.k_set_bytes // 4, byte_alignment=128)
        decode_table = Int32(0)
        if const_expr(variant.decode_table_bytes > 0):
            decode_table = shared_address(
                smem.allocate_array(Int32, variant.decode_table_bytes // 4, byte_alignment=16)
            )
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(variant.stages):
                    cute.arch.mbarrier_init(full + i, 1 + variant.gather_threads)
                    cute.arch.mbarrier_init(empty + i, variant.stage_readers * variant.multicast_peers)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.scheduler.cluster_size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        cta = cute.arch.block_idx()[0]
        rank = cta % self.scheduler.cluster_size
        # the main-loop iterations of this CTA along k, all or its share; then in k-slices
        iterations = cute.ceil_div(blocks.shape[1], variant.blocks_k_per_iteration)
        first_iteration = Int32(0)
        if const_expr(config.split_k > 1):
            share = iterations // config.split_k
            remainder = iterations - share * config.split_k
            first_iteration = rank * share + cutlass.min(rank, remainder)
            iterations = share + (1 if rank < remainder else 0)
        first_k_slice = first_iteration * variant.stages_per_iteration
        k_slices = iterations * variant.stages_per_iteration
        n_blocks = blocks.shape[0] // expert_tiles.experts if const_expr(variant.grouped) else blocks.shape[0]
        tiles = self.scheduler.tiles(out.shape[0], n_blocks)
        m_tiles = expert_tiles.m_tiles if const_expr(variant.grouped) else tiles.m_tile
        cluster, clusters = cta // self.scheduler.cluster_size, cute.arch.grid_dim()[0] // self.scheduler.cluster_size
        if const_expr(variant.stream_k):
            # backwards: CTAs that others wait for have the lower numbers of the grid, which start first
            cluster = clusters - 1 - cluster
        params = SchedulerParams(cluster, clusters, m_tiles, tiles.n_tile, first_k_slice, k_slices)
        pipeline = Pipeline(full, empty, s_x, shared_address(s_weight), s_scales)
        if warp >= 4 * variant.warpgroups:
            if const_expr(variant.consumer_registers > 0):
                cute.arch.setmaxregister_decrease(variant.producer_registers)
            weight = WeightSource(blocks, n_blocks)
            inputs = Inputs(x_source, weight, rows.indices, out.shape[0], expert_tiles)
            if const_expr(variant.gathered):
                self.producer.run(inputs, pipeline, params, rank)
            elif warp == 4 * variant.warpgroups:
                self.producer.run(inputs, pipeline, params, rank)
            elif const_expr(variant.stream_k):
                warpgroup = warp - 4 * variant.warpgroups - 1
                if warpgroup < variant.warpgroups:
                    self.consumer.stream_flags.run(args.workspace, params, warpgroup)
            if const_expr(config.split_k > 1):  # every thread of the cluster takes part in its barriers
                self.scheduler.cluster_barrier()
                self.scheduler.cluster_barrier()
        else:
            if const_expr(variant.consumer_registers > 0):
                cute.arch.setmaxregister_increase(variant.consumer_registers)
            output = Output(out, with_indexed_scales(args.epilogue, rows.indices))
            memory = ConsumerMemory(staging, store, s_k_sets, decode_table, args.workspace)
            self.consumer.run(mma, pipeline, params, rank, output, expert_tiles, memory)
