"""A GEMM as two launches in tiles of two sizes: features that fill whole waves of tiles, then the tail; or experts with
few rows, then those with many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.device.expert_tiles import Part
from w4gemm.kernels.hopper import full_wave_n_tiles, most_narrow_rows
from w4gemm.kernels.sm90_mixed_gemm.kernel import Sm90MixedGemmKernel
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.packing.block import BLOCK_N


class Range(NamedTuple):
    """Indices begin .. end - 1."""

    begin: Int32
    end: Int32


class TwoLaunches:
    """The host function of a variant whose config has a tail."""

    def __init__(self, variant: Sm90MixedVariant):
        config = variant.config
        assert config.tail is not None
        self.waves = Sm90MixedGemmKernel(replace(variant, config=replace(config, tail=None)))
        self.tail = Sm90MixedGemmKernel(replace(variant, config=config.tail))
        self.gated = variant.epilogue.gated

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch both kernels; if no wave is full, the first one for all features."""
        n_blocks = args.weight.shape[0]
        tiles = self.waves.scheduler.tiles(args.out.shape[0], n_blocks)
        whole = full_wave_n_tiles(tiles.m_tile, tiles.n_tile, args.max_clusters)
        blocks = cutlass.min(whole * (self.waves.variant.config.tile_n // BLOCK_N), n_blocks)
        if blocks == 0:
            blocks = n_blocks
        self.launch(self.waves, args, Range(Int32(0), blocks), stream)
        if blocks < n_blocks:
            self.launch(self.tail, args, Range(blocks, n_blocks), stream)

    @cute.jit
    def launch(self, gemm: Sm90MixedGemmKernel, args: Arguments, blocks: Range, stream: Any):
        """Launch ``gemm`` for some of the weight's 64-row blocks."""
        whole, rows = args.epilogue, Range(blocks.begin * BLOCK_N, blocks.end * BLOCK_N)
        columns = Range(rows.begin // 2, rows.end // 2) if self.gated else rows
        epilogue = whole._replace(
            bias=self.range_of(whole.bias, 0, rows),
            residual=self.range_of(whole.residual, 1, columns),
            channel_scale=self.range_of(whole.channel_scale, 0, rows),
        )
        weight, out = self.range_of(args.weight, 0, blocks), self.range_of(args.out, 1, columns)
        gemm(args._replace(weight=weight, out=out, epilogue=epilogue), stream)

    def range_of(self, tensor: cute.Tensor | None, mode: int, indices: Range) -> cute.Tensor | None:
        """A range of one mode, as far as the tensor goes; None for None."""
        if tensor is None:
            return None
        shape = [*tensor.shape]
        shape[mode] = cutlass.min(indices.end, shape[mode]) - indices.begin
        start = tuple(indices.begin if i == mode else 0 for i in range(len(shape)))
        moved = cute.domain_offset(start, tensor)
        return cute.make_tensor(moved.iterator, cute.make_layout(tuple(shape), stride=tensor.stride))


class TwoLaunchesOfExperts:
    """The host function of a grouped variant whose config has a tail: experts with few rows in narrow tiles, then those
    with many in wide ones, the tail."""

    def __init__(self, variant: Sm90MixedVariant):
        config, most = variant.config, most_narrow_rows(variant.config)
        narrow, wide = (replace(variant, config=c) for c in (replace(config, tail=None), config.tail))
        self.narrow = Sm90MixedGemmKernel(narrow, Part(most=most))
        self.wide = Sm90MixedGemmKernel(wide, Part(least=most + 1, second=True))

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch both kernels. The rows of experts are settled before the second one."""
        self.narrow(args, stream)
        self.wide(args._replace(rows=args.rows._replace(settled=Int32(1))), stream)
