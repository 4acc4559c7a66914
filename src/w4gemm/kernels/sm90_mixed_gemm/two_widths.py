"""A grouped GEMM in tiles of two widths in one launch: experts with few rows in narrow tiles, then those with many in
wide ones.

Each width has its own pipeline. A CTA goes through its narrow tiles as a launch of those alone does; if it has wide
ones, it goes through those behind them, in the same shared memory:

    what                                            bytes
    stages, staging buffers and the rest of a       the larger of both, ``changing_bytes``
    width, in the order of kernel.py's table
    barriers and expert map, narrow, then wide      the rest
    mbarrier ``free``: 128 * W; every consumer: it has read and written all of its narrow tiles
    named barrier 6: 128, if gathered; the producer's warps: their copies of x are there

What fills stages waits at ``free``, as it does for any stage, and consumers wait for each other. Racecheck follows
that; of a named barrier where all met it reported bulk copies behind it beside reads in front of it (H200, 2026-11-30).

Wide tiles are dealt from the CTA on at which narrow ones end, so that a last wave of narrow tiles is filled up. Both
widths have equally many warps, with the same registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.device.expert_tiles import ExpertTiles, Part, with_indexed_scales
from w4gemm.kernels.device.launch import memory_of_launch
from w4gemm.kernels.hopper import most_narrow_rows
from w4gemm.kernels.sm90_mixed_gemm.consumer import ConsumerMemory
from w4gemm.kernels.sm90_mixed_gemm.kernel import Inputs, Sm90MixedGemmKernel, TileTensors
from w4gemm.kernels.sm90_mixed_gemm.tile_scheduler import SchedulerParams
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.ptx.arithmetic import again, grid_again
from w4gemm.ptx.memory import fence_proxy_async

_COPIED_BARRIER = 6


class SharedRegion:
    """Hands out parts of a range of shared memory, as ``SmemAllocator`` does of all of it."""

    def __init__(self, start: cute.Pointer):
        self.start, self.used = start, 0

    def allocate_array(self, dtype: Any, count: int, byte_alignment: int = 16) -> cute.Pointer:
        begin = -(-self.used // byte_alignment) * byte_alignment
        self.used = begin + count * dtype.width // 8
        return cute.recast_ptr(self.start + begin // 4, dtype=dtype)

    def allocate_tensor(self, dtype: Any, layout: Any, byte_alignment: int = 16, swizzle: Any = None) -> cute.Tensor:
        pointer = self.allocate_array(dtype, cute.cosize(layout), byte_alignment)
        if swizzle is not None:
            pointer = cute.recast_ptr(pointer, swizzle, dtype=dtype)
        return cute.make_tensor(pointer, layout)


class WideTiles(NamedTuple):
    """The wide tiles of a CTA."""

    n_blocks: Int32
    """Blocks along n of one expert."""
    expert_tiles: ExpertTiles
    params: SchedulerParams


class TwoWidths:
    """The host function and the device code of a grouped variant whose config has a tail, the wide tiles, for one
    launch."""

    def __init__(self, variant: Sm90MixedVariant):
        config, most = variant.config, most_narrow_rows(variant.config)
        assert config.tail is not None
        narrow, wide = (replace(variant, config=c, widths=2) for c in (replace(config, tail=None), config.tail))
        self.larger = max(narrow, wide, key=lambda v: v.shared_bytes)
        self.narrow = Sm90MixedGemmKernel(narrow, Part(most=most))
        self.wide = Sm90MixedGemmKernel(wide, Part(least=most + 1))

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch the kernel on ``stream``."""
        variant, narrow, wide = self.larger, self.narrow, self.wide
        ctas = cutlass.min(narrow.most_tiles(args) + wide.most_tiles(args), args.max_clusters)
        self.kernel(narrow.tensors(args), wide.tensors(args), args.behind_tma()).launch(
            grid=[ctas, 1, 1],
            block=[variant.threads, 1, 1],
            smem=memory_of_launch(variant, ctas, args.max_clusters),
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, narrow: TileTensors, wide: TileTensors, args: Arguments):
        """One CTA: shared memory and barriers of both widths, then the roles, by warp."""
        variant, rows = self.larger, args.rows
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        changing = smem.allocate_array(Int32, variant.changing_bytes // 4, byte_alignment=1024)
        first, memory = self.narrow.allocate(SharedRegion(changing), smem, narrow, args, warp)
        second, wide_memory = self.wide.allocate(SharedRegion(changing), smem, wide, args, warp)
        free = smem.allocate_array(Int64, 1, byte_alignment=8)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(free, 128 * variant.warpgroups)
        self.wide.init_mbarriers(second, None, warp)
        self.narrow.init_barriers(first, None, warp)
        n_blocks, params = self.narrow.work(args, memory.expert_tiles, Int32(0))
        if warp >= 4 * variant.warpgroups:
            cute.arch.setmaxregister_decrease(variant.producer_registers)
            inputs = Inputs(narrow.x, args.weight, n_blocks, rows.indices, args.out.shape[0], memory.expert_tiles)
            if const_expr(variant.gathered) or warp == 4 * variant.warpgroups:
                self.narrow.producer.run(inputs, first, params, Int32(0))
                n_blocks, tiles, wide_params = self.wide_tiles(args, memory, wide_memory)
                wide_inputs = inputs._replace(x=wide.x, n_blocks=n_blocks, expert_tiles=tiles)
                if self.wide.scheduler.work_tiles(wide_params)[0] > 0:
                    if const_expr(variant.gathered):
                        cute.arch.barrier(barrier_id=_COPIED_BARRIER, number_of_threads=variant.gather_threads)
                    cute.arch.mbarrier_wait(free, 0)
                    self.wide.producer.run(wide_inputs, second, wide_params, Int32(0))
        else:
            cute.arch.setmaxregister_increase(variant.consumer_registers)
            operands = with_indexed_scales(args.epilogue, rows.indices)
            self.narrow.consumer.run(narrow.mma, first, params, Int32(0), memory._replace(operands=operands))
            _, tiles, wide_params = self.wide_tiles(args, memory, wide_memory)
            wide_memory = wide_memory._replace(operands=operands, expert_tiles=tiles)
            if self.wide.scheduler.work_tiles(wide_params)[0] > 0:
                fence_proxy_async()  # the producer's copies come next to where consumers stored sums
                cute.arch.mbarrier_arrive(free)
                self.wide.consumer.consumer_barrier()
                self.wide.consumer.run(wide.mma, second, wide_params, Int32(0), wide_memory)

    @cute.jit
    def wide_tiles(self, args: Arguments, memory: ConsumerMemory, wide_memory: ConsumerMemory) -> WideTiles:
        """A CTA's wide tiles, numbered on behind the narrow ones. Computed anew where they begin: registers that hold
        them meanwhile are spilled, and ptxas then takes the stages of narrow tiles for numbers that differ from thread
        to thread."""
        (cta, ctas), shape, blocks = grid_again(), args.weight.shape, args.weight
        layout = cute.make_layout((again(shape[0]), shape[1], shape[2]), stride=blocks.stride)
        args = args._replace(weight=cute.make_tensor(blocks.iterator, layout))
        starts = args.rows.starts
        rows = args.rows._replace(starts=cute.make_tensor(starts.iterator, cute.make_layout((again(starts.shape[0]),))))
        _, narrow = self.narrow.work(args, memory.expert_tiles._replace(rows=rows), Int32(0))
        tiles = wide_memory.expert_tiles._replace(rows=rows)
        n_blocks, wide = self.wide.work(args, tiles, Int32(0))
        cluster = cta - narrow.m_tiles * narrow.n_tiles % ctas
        wide = wide._replace(cluster=cutlass.select_(cluster < 0, cluster + ctas, cluster), clusters=ctas)
        return WideTiles(n_blocks, tiles, wide)
