"""d.T (n, m) = w (n, k) @ x.T (k, m) on Hopper, the weight decoded in registers.

WGMMA takes operand A from registers and operand B from shared memory, so the weight is A and the kernel computes the
transpose of d; only this folder depends on that. Sizes are named in the problem's frame: tile_m tokens, tile_n
features. The files, in the order in which a tile's data passes them:

    kernel.py           launch, shared memory, barriers; Producer: weights and x from memory into stages
    consumer.py         Consumer: the tiles of a warpgroup, sums over k sets and stream-k; StreamFlags
    cluster_sums.py     SplitKReduction and ChainSum, sums over a cluster
    values.py           what passes between the consumers' files
    mainloop.py         Mainloop: from a stage into registers, decode, WGMMA, release
    promotion.py        PromotingMainloop: the same, with sums that are scaled
    shared_levels.py    SharedLevels: scales of two levels, which a warp's lanes prepare for one another
    epilogue.py         EpilogueStore: from sums to rows of d
    tile_scheduler.py   which tiles a CTA has, read by all of them
    variant.py          every number below that follows from the config, as a property of that name

Warps, in warpgroups of 128 threads; W = warpgroups_n * k_sets * pingpong_warpgroups:

    warpgroup     role      registers per thread
    0 .. W - 1    consumer  consumer_registers: 232 or 240 if W is 2 (104 with two CTAs a multiprocessor), 160 if 3,
                            112 if 4; 0 is an equal share, without setmaxnreg. m64_atoms * tile_m / 2 are
                            accumulators, 32 fragments, about 40 others. A consumer owns m64_atoms blocks of 64 features
                            (2 if tile_n is 256 and tile_m > 64, because four consumers would have 112 registers) and
                            all tile_m tokens of a tile
    W             producer  producer_registers: 24, or 32 to 40 if gathered. Warp 0 issues all copies; if gathered, all
                            four warps copy x. Under stream-k warps 1 and 2 handle the flags of the consumer warpgroups

Shared memory, in this order:

    what          bytes                             written by                      read by
    x             num_stages * x_bytes              producer: TMA (if gathered      consumers: WGMMA, as operand B
                                                    cp.async), 128-byte swizzle
    staging       staging_buffers * staging_bytes   consumers: sums of their tile   the same warpgroup, or TMA
    weights       num_stages * weight_bytes         producer: bulk copies           consumers: packed words
    block scales  num_stages * block_scale_bytes    producer: TMA                   consumers: scales of sums, or sums
                                                                                    of x
    full, empty   8 * num_stages each               see below
    expert map    expert_map_bytes                  warp 1, before the roles begin  all roles
    k sets        k_set_bytes                       consumers of all k sets but 0   consumers of k set 0
    handover      handover_bytes                    consumers of the cluster's      consumers of k set 0
                                                    other CTAs: sums of a split,
                                                    of a chain the next CTA
    decode table  decode_table_bytes                consumers, before their tiles   consumers, to decode
    levels        all_levels_bytes                  a consumer warp: its scales     the same warp

    If all_levels_bytes is 0, these scales lie in the staging buffer, which is idle while a tile is multiplied. Sums of
    k sets in a grid that is not persistent lie from x on over the drained pipeline. So do those that split-k hands over
    if handover_bytes is 0, at the same address, once the sums of k sets are read.

Barriers:

    name             arrive count                     who arrives; what it says                         who waits
    full[stage]      1 + gather_threads               the producer's arrive_and_expect_tx; if gathered  consumers
                                                      each producer thread, when its cp.async are done.
                                                      Transaction bytes: weight_bytes, and what TMA
                                                      brings: the boxes of x that begin before m, and
                                                      the block scales
    empty[stage]     stage_readers * multicast_peers  each consumer thread that reads the stage, in     producer
                                                      every CTA that shares its x or weights
    handover         1                                a thread at the start, which expects the bytes    consumers of
                                                      that the other CTAs of a split store here         k set 0
    named 1          128 * W                          all consumers: the table is filled; the pipeline  the same
                                                      is drained; sums of k sets are stored
    named 2 .. 5     128                              a consumer warpgroup: its staging buffer is       the same
                                                      filled, or read out; so are its shared scales
    named 6, 7       256                              a pingpong warpgroup: it has waited for all       the other one
                                                      stages of its tile
    named 8, 9       160                              a consumer warpgroup: its partials are stored     its flag warp
    named 10, 11     160                              a flag warp: another CTA's partials are there     its warpgroup
    cluster barrier  all threads of the cluster       mbarriers are initialized; with split_k and       the same
                                                      without handover_bytes: pipelines are drained.
                                                      With them all wait in front of their loops

    Warp 0 initializes the mbarriers, and all warps meet. If variant.weights_first the producer initializes ``full``,
    and requests its first weights before they meet.

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
With split_k > 1 they divide k of one tile, and each stores a share of its tokens. It gets the others' sums of them by
st.async into its shared memory, and adds up in rank order, so that the result does not depend on timing.

Schedules: ``coop``, all consumers on one tile; ``pingpong``, two tiles at a time, so that one is multiplied while the
other is stored: two CTAs per multiprocessor or, if tile_m > 128, two consumer warpgroups of one CTA that alternate;
``chain``, as coop, but the split_k CTAs of a cluster, in a row, have one tile fewer: each but the last owns one, and
each but the first begins with the end of the tile before, whose sums it stores into that owner's memory by st.async;
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
They write no weights, and end only after their own wait. A kernel that is not w4gemm's may say nothing of its
successor. Behind it, and behind it and one of those, CUDA may start this one before that one's writes are visible. So
making a QuantizedWeight launches something small behind its writer (weights/weight.py), and docs/engines.md says what
engines keep to.

With fp8 activations (variant.kind "e4m3", the kernel sm90_fp8_gemm) a k chunk is 128 columns, still 128 bytes of x, and
the codes become e4m3. If variant.scales_on_sums, the scales multiply the float32 sums of each group:
``multiply_groups`` then replaces ``multiply_stage``, with two sets of sums of a range of tokens beside the
accumulators. It also does if each 128 columns of a row of x have a scale (variant.block_scales), because that scale
multiplies the sums too: TMA brings a stage's scales, those of a tile's tokens for each weight block along k, with x
and on the same barrier. If a stage is one k chunk, the sums have one set (variant.one_set_of_sums), for 128 tokens and
more: ``multiply_chunk`` decodes the next stage while its own is multiplied, and adds the sums while the tensor cores
work for the other warpgroup. Beside float zero points (variant.takes_x_sums) the sums of x over each scale group come
in the place of these scales, from a launch in front (helpers/row_sums.py), and meet the zero points when a group's sums
meet its scales. If rows g and g + 8 of the weight share their scale, as those of e4m3 in blocks of 128
rows, a sum takes one fma, by a factor of its token (variant.one_factor_a_sum). With 16-bit x the scales of codebooks
multiply sums too, if they have another dtype than x and tokens are few.

If grouped (variant.grouped), there are several weights, experts, each for some rows of x that only the device knows: a
warp of each CTA counts all experts' tiles first (device/expert_tiles.py), after ``griddepcontrol.wait``, while L2
fetches weights. If the rows are settled (ExpertRows.settled) it counts before the wait, and the producer fills all
stages with weights: so the product after another one of the same rows streams while that one still runs. The boxes of x
then start at any row; rows past the expert's last row are multiplied and not stored.

Experts with few rows may have other tiles than those with many (scheduler.part). Those of the same warps run in one
launch, one width after the other (two_widths.py), others in two launches (two_launches.py). The second one starts
while CTAs of the first still run: all of these have waited, so what it reads is there, and it does not wait before it
reads. Its first CTA waits before it ends, so that what waits for the second launch waits for both.

If gathered (variant.gathered, of a grouped problem), the producer's four warps copy x by cp.async
(device/row_gather.py); each thread arrives at the full barrier when its copies are done. A consumer fences behind its
wait, so that its WGMMAs see these writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.device.epilogue_math import EpilogueMath
from w4gemm.kernels.device.expert_tiles import (
    WHOLE,
    ExpertTiles,
    Part,
    TileRows,
    max_m_tiles,
    weight_of_expert,
    with_indexed_scales,
)
from w4gemm.kernels.device.launch import memory_of_launch
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.row_gather import RowGather
from w4gemm.kernels.device.scheduler import tile_coordinates
from w4gemm.kernels.sm90_mixed_gemm.cluster_sums import Handover
from w4gemm.kernels.sm90_mixed_gemm.consumer import Consumer, ConsumerMemory
from w4gemm.kernels.sm90_mixed_gemm.epilogue import EpilogueStore, TmaStore
from w4gemm.kernels.sm90_mixed_gemm.mainloop import Mainloop
from w4gemm.kernels.sm90_mixed_gemm.promotion import PromotingMainloop
from w4gemm.kernels.sm90_mixed_gemm.tile_scheduler import (
    ClusterCoord,
    Pipeline,
    SchedulerParams,
    TileScheduler,
    WorkTile,
)
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.packing.block import Copy
from w4gemm.ptx.memory import bulk_copy, bulk_copy_multicast, bulk_prefetch, copies_wait, shared_address

DTYPES = {
    "f16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}
"""By kind, of x and of decoded weights."""
_PREFETCHED_STAGES = 2  # stages of an expert's weights, into L2, before the experts' rows may be read


class ScaleSource(NamedTuple):
    """Where the producer reads scales of x."""

    tma: cute.CopyAtom
    scales: cute.Tensor
    """float32 (m, k blocks) as TMA sees it."""
    layout: cute.Layout
    """(token, k block, stage) of the scales of all stages."""


class XSource(NamedTuple):
    """Where the producer reads x."""

    tma: cute.CopyAtom | None
    """None if gathered."""
    x: cute.Tensor
    """(m, k) as TMA sees it; if gathered, x itself."""
    operand_layout: cute.ComposedLayout
    """x of all stages, as WGMMA reads it."""
    box_layout: cute.Layout
    """Tokens and columns of the first box of each k chunk of all stages, in the same memory."""
    scales: ScaleSource | None = None
    """None unless each 128 columns of a row have a scale, or each scale group a sum."""


class OutTarget(NamedTuple):
    """Where TMA stores d; nothing but d itself if threads store it."""

    tma: cute.CopyAtom | None
    d: cute.Tensor
    """(m, columns) as TMA sees it."""
    staging_layout: cute.ComposedLayout | None
    """All staging buffers, two boxes each."""


class TileTensors(NamedTuple):
    """What the host function makes of the arguments for tiles of one size."""

    x: XSource
    mma: cute.TiledMma
    """The consumers' WGMMA."""
    out: OutTarget


class Sm90MixedGemmKernel:
    """The device code of one :class:`Sm90MixedVariant`."""

    def __init__(self, variant: Sm90MixedVariant, part: Part = WHOLE):
        self.variant = variant
        self.dtype = DTYPES[variant.kind]
        decoder = variant.weight.decoder(
            allow_sum_scale=True,
            pairs=variant.pairs,
            on_sums=variant.scales_on_sums,
            held=variant.holds_words,
            by_dots=variant.moves_codes_by_dots,
        )
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
        self.scheduler = TileScheduler(variant, part=part)
        self.producer = Producer(variant, self.scheduler)
        loop = PromotingMainloop if variant.promotes else Mainloop
        self.consumer = Consumer(variant, self.scheduler, loop(variant, self.scheduler, decoder), epilogue)

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch the kernel on ``stream``."""
        variant, clusters = self.variant, self.most_tiles(args)
        if const_expr(variant.stream_k):
            iterations = cute.ceil_div(args.weight.shape[1], variant.blocks_k_per_iteration)
            clusters = clusters * iterations  # at least one iteration per CTA
        if const_expr(variant.persistent):
            clusters = cutlass.min(clusters, args.max_clusters)
        self.kernel(self.tensors(args), args.behind_tma()).launch(
            grid=[clusters * self.scheduler.cluster_size, 1, 1],
            block=[variant.threads, 1, 1],
            cluster=[self.scheduler.cluster_size, 1, 1],
            smem=memory_of_launch(variant, clusters, args.max_clusters),
            min_blocks_per_mp=variant.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def most_tiles(self, args: Arguments) -> Int32:
        """The largest number of tiles of a launch, each as large as a cluster's."""
        variant, m, experts = self.variant, args.out.shape[0], 1
        if const_expr(variant.grouped):
            experts = args.rows.starts.shape[0]
        tiles = self.scheduler.tiles(m, args.weight.shape[0] // experts)
        m_tiles = tiles.m_tile
        if const_expr(variant.grouped):
            m_tiles = max_m_tiles(m, experts, variant.config.tile_m, self.scheduler.part)
        return m_tiles * tiles.n_tile

    def tensors(self, args: Arguments) -> TileTensors:
        numbers = args.x_sums if self.variant.takes_x_sums else args.epilogue.block_scale
        return TileTensors(self.x_source(args.x, numbers), self.tiled_mma(), self.out_target(args.out))

    def tiled_mma(self) -> cute.TiledMma:
        """The consumers' WGMMA."""
        variant = self.variant
        return sm90.make_trivial_tiled_mma(
            DTYPES[variant.weight.decoded],
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (variant.warpgroups_n, 1, 1),
            tiler_mn=(64, variant.config.tile_m // variant.token_splits),
            a_source=warpgroup.OperandSource.RMEM,
        )

    def x_source(self, x: cute.Tensor, numbers: cute.Tensor | None) -> XSource:
        """TMA that loads x and its scales or sums, ``numbers``, and the layout of x in all stages."""
        variant, config = self.variant, self.variant.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        chunks = self.producer.k_chunks * variant.num_stages
        operand_layout = cute.tile_to_shape(atom, (config.tile_m, variant.chunk_k, chunks), order=(0, 1, 2))
        # the same memory as the first boxes of all k chunks
        box_shape = (variant.box_tokens, variant.chunk_k)
        box = cute.tile_to_shape(atom, box_shape, order=(0, 1)).outer
        of_chunk = config.tile_m * variant.chunk_k
        box_layout = cute.make_layout((*box.shape, chunks), stride=(*box.stride, of_chunk))
        if variant.gathered:
            return XSource(None, x, operand_layout, box_layout)
        scales = self.scale_source(numbers) if variant.row_numbers else None
        multicast = config.cluster_n > 1
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
        box = cute.tile_to_shape(atom, box_shape, order=(0, 1))
        tma, tma_x = cpasync.make_tiled_tma_atom(copy, x, box, box_shape, num_multicast=config.cluster_n)
        return XSource(tma, tma_x, operand_layout, box_layout, scales)

    def scale_source(self, numbers: cute.Tensor) -> ScaleSource:
        """TMA that loads the scales, or sums, of a tile's rows for a k-slice. numbers: float32 (m, k blocks), or by
        scale group."""
        variant = self.variant
        boxes = variant.scale_boxes
        shape, size = self.producer.numbers_box, variant.block_scale_bytes // (4 * boxes)
        strides = (1, shape[0])
        box = cute.make_layout(shape, stride=strides)
        tma, scales = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), numbers, box, shape)
        stages = cute.make_layout((*shape, variant.num_stages * boxes), stride=(*strides, size))
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
    def kernel(self, tensors: TileTensors, args: Arguments):
        """One CTA: shared memory and barriers, then the roles, by warp."""
        variant, rows = self.variant, args.rows
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        pipeline, memory = self.allocate(smem, smem, tensors, args, warp)
        if const_expr(not variant.weights_first):
            self.init_barriers(pipeline, memory.handover, warp)
        rank = cute.arch.block_idx()[0] % self.scheduler.cluster_size
        n_blocks, params = self.work(args, memory.expert_tiles, rank)
        inputs = Inputs(tensors.x, args.weight, n_blocks, rows.indices, args.out.shape[0], memory.expert_tiles)
        if const_expr(variant.weights_first):
            params = self.scheduler.with_tile(params)
            if warp == 4 * variant.warpgroups:
                self.init_full(pipeline)
                self.producer.load_first(inputs, pipeline, params, rank)
            self.init_barriers(pipeline, memory.handover, warp)
        if warp >= 4 * variant.warpgroups:
            if const_expr(variant.consumer_registers > 0):
                cute.arch.setmaxregister_decrease(variant.producer_registers)
            if const_expr(variant.handover_bytes > 0):  # behind the loop racecheck would hold the consumers for good
                cute.arch.cluster_wait()
            if const_expr(variant.gathered):
                self.producer.run(inputs, pipeline, params, rank)
            elif warp == 4 * variant.warpgroups:
                self.producer.run(inputs, pipeline, params, rank)
            elif const_expr(variant.stream_k):
                warpgroup = warp - 4 * variant.warpgroups - 1
                if warpgroup < variant.warpgroups:
                    self.consumer.stream_flags.run(args.workspace, params, warpgroup)
            if const_expr(variant.config.split_k > 1 and variant.handover_bytes == 0):
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
        else:
            if const_expr(variant.consumer_registers > 0):
                cute.arch.setmaxregister_increase(variant.consumer_registers)
            operands = with_indexed_scales(args.epilogue, rows.indices)
            self.consumer.run(tensors.mma, pipeline, params, rank, memory._replace(operands=operands))

    @cute.jit
    def work(self, args: Arguments, expert_tiles: ExpertTiles | None, rank: Int32) -> tuple[Int32, SchedulerParams]:
        """The blocks along n of one weight, and the CTA's work tiles. rank: of the CTA in its cluster."""
        variant, size = self.variant, self.scheduler.cluster_size
        first_k_slice, k_slices = self.k_range(args.weight.shape[1], rank)
        n_blocks = args.weight.shape[0]
        if const_expr(variant.grouped):
            n_blocks = n_blocks // expert_tiles.experts
        tiles = self.scheduler.tiles(args.out.shape[0], n_blocks)
        m_tiles = expert_tiles.m_tiles if const_expr(variant.grouped) else tiles.m_tile
        cluster, clusters = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
        params = SchedulerParams(cluster, clusters, m_tiles, tiles.n_tile, first_k_slice, k_slices)
        return n_blocks, params._replace(rank=rank) if variant.chained else params

    @cute.jit
    def allocate(
        self, smem: Any, lasting: Any, tensors: TileTensors, args: Arguments, warp: Int32
    ) -> tuple[Pipeline, ConsumerMemory]:
        """Divide shared memory in the order of the table above. If grouped, a warp counts the tiles of experts, which
        the barrier at the end of :meth:`init_barriers` makes visible.

        Args:
            smem, lasting: allocators, the latter of barriers and the expert map. Two, if a launch has tiles of two
                widths, see two_widths.py.
        """
        variant, rows = self.variant, args.rows
        x_layout, out = tensors.x.operand_layout, tensors.out
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
        store = None
        if const_expr(variant.boxed):
            outer, inner = out.staging_layout.outer, out.staging_layout.inner
            halves = smem.allocate_tensor(args.out.element_type, outer, byte_alignment=1024, swizzle=inner)
            staging, store = shared_address(halves.iterator), TmaStore(out.tma, out.d, halves)
        else:
            staging = shared_address(allocate_words(smem, variant.staging_buffers * variant.staging_bytes))
        s_weight = shared_address(allocate_words(smem, variant.num_stages * variant.weight_bytes))
        s_scales = Int32(0)
        if const_expr(variant.row_numbers > 0):
            s_scales = shared_address(allocate_words(smem, variant.num_stages * variant.block_scale_bytes))
        full = lasting.allocate_array(Int64, variant.num_stages, byte_alignment=8)
        empty = lasting.allocate_array(Int64, variant.num_stages, byte_alignment=8)
        expert_tiles, s_k_sets = None, s_x.iterator
        if const_expr(variant.grouped):
            expert_tiles = ExpertTiles(lasting.allocate_tensor(Int32, cute.make_layout(variant.expert_map)), rows)
            if const_expr(self.scheduler.part.least == 0):
                if rows.settled == 0:
                    if warp == 4 * variant.warpgroups:
                        self.producer.prefetch_first(args.weight, expert_tiles.experts, cute.arch.block_idx()[0])
                    cute.arch.griddepcontrol_wait()
            if warp == self.scheduler.part.counter:
                self.scheduler.expert_tile_map.fill(expert_tiles)
        if const_expr(variant.k_set_bytes > 0):
            s_k_sets = allocate_words(smem, variant.k_set_bytes)
        handover = None
        if const_expr(variant.config.split_k > 1):
            sums = s_x.iterator
            if const_expr(variant.handover_bytes > 0):
                sums = allocate_words(smem, variant.handover_bytes)
            handover = Handover(smem.allocate_array(Int64, 1, byte_alignment=8), shared_address(sums))
        table = Int32(0)
        if const_expr(variant.decode_table_bytes > 0):
            table = shared_address(allocate_words(smem, variant.decode_table_bytes, byte_alignment=16))
        levels = staging
        if const_expr(variant.all_levels_bytes > 0):
            levels = shared_address(allocate_words(smem, variant.all_levels_bytes))
        pipeline = Pipeline(full, empty, s_x, s_weight, s_scales)
        memory = ConsumerMemory(
            staging, store, s_k_sets, handover, table, levels, args.workspace, expert_tiles, args.out, args.epilogue
        )
        return pipeline, memory

    @cute.jit
    def init_full(self, pipeline: Pipeline):
        """Initialize the full barriers alone, in the warp that fills them."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.variant.num_stages):
                cute.arch.mbarrier_init(pipeline.full + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()  # for racecheck, as below

    @cute.jit
    def init_mbarriers(self, pipeline: Pipeline, handover: Handover | None, warp: Int32):
        """Initialize the mbarriers, as warp 0."""
        variant = self.variant
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(variant.num_stages):
                    if const_expr(not variant.weights_first):
                        cute.arch.mbarrier_init(pipeline.full + i, 1 + variant.gather_threads)
                    cute.arch.mbarrier_init(pipeline.empty + i, variant.stage_readers * variant.multicast_peers)
                if const_expr(variant.config.split_k > 1):
                    cute.arch.mbarrier_init(handover.barrier, 1)
            if const_expr(variant.config.split_k > 1):
                cute.arch.sync_warp()  # for racecheck, which takes an elected lane's uniform instruction for all lanes'
                with cute.arch.elect_one():
                    rank = cute.arch.block_idx()[0] % self.scheduler.cluster_size
                    expected = self.consumer.sums.bytes_for(rank)
                    cute.arch.mbarrier_arrive_and_expect_tx(handover.barrier, expected)
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def init_barriers(self, pipeline: Pipeline, handover: Handover | None, warp: Int32):
        """Initialize the mbarriers, and make them visible to the CTAs that arrive at them."""
        variant = self.variant
        self.init_mbarriers(pipeline, handover, warp)
        # relaxed, because the fence has released all that other CTAs need: a release would take 0.4 us here
        if const_expr(variant.handover_bytes > 0 or variant.multicast_peers > 1):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        if const_expr(variant.multicast_peers > 1):
            cute.arch.cluster_wait()  # a split waits where it stores into other CTAs

    def k_range(self, k_blocks: Int32, rank: Int32) -> tuple[Int32, Int32]:
        """The first k-slice of this CTA and their number: all, or its share of a split, in whole main-loop
        iterations."""
        variant, split_k = self.variant, self.variant.config.split_k
        first, count = Int32(0), cute.ceil_div(k_blocks, variant.blocks_k_per_iteration)
        if split_k > 1 and not variant.chained:
            share = count // split_k
            remainder = count - share * split_k
            first = rank * share + cutlass.min(rank, remainder)
            count = share + cutlass.select_(rank < remainder, Int32(1), Int32(0))
        return first * variant.stages_per_iteration, count * variant.stages_per_iteration


def allocate_words(smem: Any, size: int, byte_alignment: int = 128) -> cute.Pointer:
    """Allocate ``size`` bytes of 32-bit words."""
    return smem.allocate_array(Int32, size // 4, byte_alignment=byte_alignment)


class Inputs(NamedTuple):
    """Tensors and counts that the producer reads to fill stages."""

    x: XSource
    weight: cute.Tensor
    """int32 (blocks along n, blocks along k, words), those of all experts in a row."""
    n_blocks: Int32
    """Blocks along n of one expert."""
    indices: cute.Tensor | None
    """int32 (m,): row of x by row of d; None unless gathered."""
    m: Int32
    expert_tiles: ExpertTiles | None
    """None unless grouped."""


class Producer:
    """Fills the pipeline of one CTA. Run by one warp or, if gathered, by all four of the producer warpgroup."""

    def __init__(self, variant: Sm90MixedVariant, scheduler: TileScheduler):
        config = variant.config
        self.variant, self.scheduler = variant, scheduler
        self.k_chunks = config.tile_k // variant.chunk_k
        self.row_gather = RowGather(config.tile_m, self.k_chunks, variant.itemsize, warps=4)

    @cute.jit
    def run(self, inputs: Inputs, pipeline: Pipeline, params: SchedulerParams, cta_rank: Int32):
        """Fill stages for all work tiles."""
        variant = self.variant
        source, expert_tiles = inputs.x, inputs.expert_tiles
        full, empty, s_x = pipeline.full, pipeline.empty, pipeline.x
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        coord = self.scheduler.cta_coord_in_cluster(cta_rank)
        count, share = self.scheduler.work_tiles(params)
        work_tile = first = self.scheduler.work_tile(Int32(0), params, share)
        tile = self.scheduler.cta_tile(first.tile, params, coord)
        if const_expr(variant.weights_first):
            early = cutlass.min(first.k_slices, variant.early_stages)
        elif const_expr(variant.grouped):
            early = Int32(0)
            if expert_tiles.rows.settled != 0 and count > 0:  # the launch before may still run for long
                early = self.load_early(variant.num_stages, first, inputs, pipeline, params, coord, warp)
        else:
            early = self.load_early(variant.early_stages, first, inputs, pipeline, params, coord, warp)
        if const_expr(self.scheduler.part.second):
            self.scheduler.acquire(count)
        else:
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        state = PipelineState.producer()
        for index in cutlass.range(count, unroll=1):
            if const_expr(not variant.tile_ahead):
                work_tile = self.scheduler.work_tile(index, params, share)
                tile = self.scheduler.cta_tile(work_tile.tile, params, coord)
            rows = self.scheduler.rows(tile.m_tile, inputs.m, expert_tiles)
            boxes = self.boxes_of(rows)
            if const_expr(variant.gathered):
                row_numbers = self.row_gather.indices(inputs.indices, rows.first, rows.end, warp)
            else:
                partitions = self.partition(source, s_x, rows, coord)
            if const_expr(variant.row_numbers > 0):
                s_scales, g_scales = self.partition_scales(source.scales, pipeline.scales, rows)
            weight = self.weight_of(inputs, rows)
            for i in cutlass.range(work_tile.k_slices, unroll=1):
                stage, k_slice = state.stage, work_tile.first_k_slice + i
                if index > 0 or i >= early:
                    cute.arch.mbarrier_wait(empty + stage, state.phase)
                    if const_expr(not variant.gathered) or warp == 0:
                        self.load_weight(weight, pipeline, tile.n_tile, k_slice, stage, boxes, coord)
                if const_expr(variant.gathered):
                    target = shared_address(s_x.iterator) + stage * variant.x_bytes
                    self.row_gather.copy(source.x, row_numbers, k_slice, target, warp)
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                for b in cutlass.range_constexpr(variant.scale_boxes if variant.row_numbers else 0):
                    cute.copy(
                        source.scales.tma,
                        g_scales[(None, b, k_slice)],
                        s_scales[(None, stage * variant.scale_boxes + b)],
                        tma_bar_ptr=full + stage,
                    )
                for chunk in cutlass.range_constexpr(0 if variant.gathered else self.k_chunks):
                    for b in cutlass.range_constexpr(variant.boxes):
                        s_box, g_box = partitions[b]
                        if b < boxes:
                            cute.copy(
                                source.tma,
                                g_box[(None, 0, k_slice * self.k_chunks + chunk)],
                                s_box[(None, stage * self.k_chunks + chunk)],
                                tma_bar_ptr=full + stage,
                                mcast_mask=coord.x_mask,
                            )
                state = state.after(variant.num_stages)
            if const_expr(variant.tile_ahead):
                if index + 1 < count:
                    work_tile = self.scheduler.work_tile(index + 1, params, share)
                    tile = self.scheduler.cta_tile(work_tile.tile, params, coord)
        if const_expr(variant.gathered):
            copies_wait()
        if const_expr(self.scheduler.part.second):
            if params.cluster == 0:  # what waits for this launch waits for the first one too
                cute.arch.griddepcontrol_wait()
        if const_expr(variant.multicast_peers > 1):
            # Producer tail: wait once on every empty barrier, oldest stage first, so that this CTA does not exit before
            # its cluster peers have consumed all multicast data sent to it or by it. The wait for a stage that was
            # never filled passes at once.
            for _ in cutlass.range(variant.num_stages, unroll=1):
                cute.arch.mbarrier_wait(empty + state.stage, state.phase)
                state = state.after(variant.num_stages)

    @cute.jit
    def load_first(self, inputs: Inputs, pipeline: Pipeline, params: SchedulerParams, cta_rank: Int32):
        """:meth:`load_early` of a CTA's only tile, by the producer's first warp."""
        _, share = self.scheduler.work_tiles(params)
        first, coord = self.scheduler.work_tile(Int32(0), params, share), self.scheduler.cta_coord_in_cluster(cta_rank)
        self.load_early(self.variant.early_stages, first, inputs, pipeline, params, coord, Int32(0))

    @cute.jit
    def load_early(
        self,
        num_stages: int,
        first: WorkTile,
        inputs: Inputs,
        pipeline: Pipeline,
        params: SchedulerParams,
        coord: ClusterCoord,
        warp: Int32,
    ) -> Int32:
        """Request the weights of up to ``num_stages`` stages of the first work tile, before x may be read; return the
        number of those stages. Of experts only if their rows are settled. warp: number in the producer warpgroup."""
        early = cutlass.min(first.k_slices, num_stages)
        tile = self.scheduler.cta_tile(first.tile, params, coord)
        rows = self.scheduler.rows(tile.m_tile, inputs.m, inputs.expert_tiles, early=True)
        weight, boxes = self.weight_of(inputs, rows), self.boxes_of(rows)
        if const_expr(not self.variant.gathered) or warp == 0:
            for i in cutlass.range(early, unroll=1):
                self.load_weight(weight, pipeline, tile.n_tile, first.first_k_slice + i, i, boxes, coord)
        return early

    def weight_of(self, inputs: Inputs, rows: TileRows) -> cute.Tensor:
        """The blocks of the expert whose rows these are, or of the one weight."""
        if not self.variant.grouped:
            return inputs.weight
        return weight_of_expert(inputs.weight, rows.expert, inputs.n_blocks)

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
        size = cutlass.min(_PREFETCHED_STAGES * variant.blocks_k, k_blocks) * variant.block.stride
        if coord.m == 0:
            with cute.arch.elect_one():
                for r in cutlass.range_constexpr(variant.blocks_n):
                    row = cutlass.min(first + r, weight.shape[0] - 1)
                    bulk_prefetch(weight.iterator.toint() + Int64(row) * k_blocks * variant.block.stride, size)

    def boxes_of(self, rows: TileRows) -> Int32 | int:
        """The number of boxes of a tile that hold a token; the others keep old data, which reaches no stored result."""
        variant = self.variant
        if variant.gathered:
            return 0
        boxes = cutlass.min(cute.ceil_div(rows.end - rows.first, variant.box_tokens), variant.boxes)
        return cutlass.max(boxes, 0) if const_expr(variant.config.cluster_m > 1) else boxes

    def partition(self, source: XSource, s_x: cute.Tensor, rows: TileRows, coord: ClusterCoord) -> list:
        """TMA's view of each box of a tile of x: the pair of it in shared memory, by k chunk of the first box, and in
        global memory, by (0, k chunk)."""
        variant, box = self.variant, self.variant.box_tokens
        group, cluster = cute.group_modes, cute.make_layout(variant.config.cluster_n)
        # The last box that is fetched ends at the last token, rounded up to eight: rows past m are slow, and the rows
        # that it shares with the previous box are not. A shift, and a uniform value, because the first copy of x
        # waits for this.
        last, partitions = cutlass.max(((rows.end - rows.first + 7) >> 3) - box // 8, 0), []
        for b in range(variant.boxes):
            full = min(b * box, variant.config.tile_m - box) // 8  # the place in a tile with all its tokens
            eights = cute.arch.make_warp_uniform(cutlass.min(full, last)) if b > 0 else 0
            s_boxes = cute.make_tensor(s_x.iterator + eights * (8 * variant.chunk_k), source.box_layout)
            tokens_on = cute.domain_offset((rows.first + eights * 8, 0), source.x)
            g_x = cute.local_tile(tokens_on, (box, variant.chunk_k), (None, None))
            boxes = group(s_boxes, 0, 2), group(g_x, 0, 2)
            partitions.append(cpasync.tma_partition(source.tma, coord.n, cluster, *boxes))
        return partitions

    @property
    def numbers_box(self) -> tuple[int, int]:
        """Tokens and numbers of each in a TMA box of the scales or sums of x."""
        variant = self.variant
        return variant.scale_tokens // variant.scale_boxes, variant.blocks_k * variant.row_numbers

    def partition_scales(self, source: ScaleSource, address: Int32, rows: TileRows) -> tuple[cute.Tensor, cute.Tensor]:
        """TMA's view of the scales or sums of a tile's rows of x, from a multiple of four on: shared by stage and box,
        in global memory by (box, k-slice)."""
        variant, first = self.variant, rows.first
        if variant.grouped:
            first = first // 4 * 4
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=128)
        shared = cute.make_tensor(pointer, source.layout)
        tokens_on = cute.domain_offset((first, 0), source.scales)
        tiles = cute.local_tile(tokens_on, self.numbers_box, (None, None))
        whole = cute.make_layout(1)
        both = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        return cpasync.tma_partition(source.tma, 0, whole, *both)

    @cute.jit
    def load_weight(
        self,
        weight: cute.Tensor,
        pipeline: Pipeline,
        n_tile: Int32,
        k_slice: Int32,
        stage: Int32,
        boxes: Int32 | int,
        coord: ClusterCoord,
    ):
        """Arrive at a stage's full barrier, and request the stage's weight blocks, or this CTA's share of them for all
        CTAs that share them. boxes: TMA boxes of x per k chunk that will complete on the barrier."""
        variant = self.variant
        with cute.arch.elect_one():
            barrier = shared_address(pipeline.full + stage)
            box_bytes = variant.box_tokens * variant.config.tile_k * variant.itemsize  # of all k chunks
            transaction_bytes = variant.copied_bytes + boxes * box_bytes
            transaction_bytes += variant.scale_tokens * variant.blocks_k * variant.row_numbers * 4
            cute.arch.mbarrier_arrive_and_expect_tx(pipeline.full + stage, transaction_bytes)
            for r in cutlass.range_constexpr(variant.blocks_n):
                # past the last block of rows: that block again, whose results are not stored
                row = cutlass.min(n_tile * variant.blocks_n + r, weight.shape[0] - 1)
                for b in cutlass.range_constexpr(variant.blocks_k):
                    # past the last block along k: that block again, which meets the zeros that TMA puts past x's end
                    k_block = k_slice * variant.blocks_k + b
                    if const_expr(variant.half_block_stages):
                        k_block = k_slice // 2
                    if const_expr(variant.blocks_k_per_iteration > 1):
                        k_block = cutlass.min(k_block, weight.shape[1] - 1)
                    block = (Int64(row) * weight.shape[1] + k_block) * variant.block.stride
                    source, target = weight.iterator.toint() + block, pipeline.weights + stage * variant.weight_bytes
                    copies = self.copies(r * variant.blocks_k + b, k_slice, k_block)
                    if const_expr(variant.config.cluster_m == 1):
                        self.request(copies, target, source, barrier, None)
                    else:
                        if r % variant.config.cluster_m == coord.m:
                            self.request(copies, target, source, barrier, coord.weight_mask)

    def copies(self, index: int, k_slice: Int32, k_block: Int32) -> list[Copy]:
        """The copies of a block, or of half of it, to its place in the stage. index: number of the block there."""
        block = self.variant.stage_block
        copies = block.copies(half=k_slice % 2, k_block=k_block)
        return [copy._replace(target=index * block.bytes + copy.target) for copy in copies]

    def request(self, copies: list[Copy], target: Int32, source: Int64, barrier: Int32, mask: Int16 | None) -> None:
        """Request copies from a block to a stage. mask: the CTAs that get them; None for this CTA alone."""
        for copy in copies:
            to, start, size = target + copy.target, source + copy.source + copy.offset, Int32(copy.size)
            if mask is None:
                bulk_copy(to, start, size, barrier)
            else:
                bulk_copy_multicast(to, start, size, barrier, mask)
