"""A product as two launches: the features that fill whole waves of tiles, and the rest in tiles of another size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from w4gemm.kernels.arguments import Arguments
from w4gemm.kernels.hopper import whole_columns
from w4gemm.kernels.sm90_mixed_gemm.kernel import MixedGemm
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.packing.block import BLOCK_N


class Parts:
    """What ``cute.compile`` is given for a variant whose config has a tail."""

    def __init__(self, variant: Variant):
        config = variant.config
        self.waves, self.tail = (
            MixedGemm(replace(variant, config=c)) for c in (replace(config, tail=None), config.tail)
        )
        self.gated = variant.epilogue.gated

    @cute.jit
    def __call__(self, args: Arguments, stream: Any):
        """Launch both, of one weight. Where no wave is full there is no rest."""
        weight = args.weight
        m_tiles, n_tiles = self.waves.tiles(args.out.shape[0], weight.shape[0])
        whole = whole_columns(m_tiles, n_tiles, args.max_clusters)
        blocks = cutlass.min(whole * (self.waves.v.config.tile_n // BLOCK_N), weight.shape[0])
        if blocks == 0:
            blocks = weight.shape[0]
        self.launch(self.waves, args, Int32(0), blocks, stream)
        if blocks < weight.shape[0]:
            self.launch(self.tail, args, blocks, weight.shape[0], stream)

    @cute.jit
    def launch(self, gemm: MixedGemm, args: Arguments, begin: Int32, end: Int32, stream: Any):
        """Launch ``gemm`` for the 64-row blocks begin .. end of the weight."""
        given, blocks, rows = args.epilogue, (begin, end), (begin * BLOCK_N, end * BLOCK_N)
        columns = (rows[0] // 2, rows[1] // 2) if self.gated else rows
        epilogue = given._replace(
            bias=self.part(given.bias, 0, rows),
            residual=self.part(given.residual, 1, columns),
            channel_scale=self.part(given.channel_scale, 0, rows),
        )
        weight, out = self.part(args.weight, 0, blocks), self.part(args.out, 1, columns)
        gemm(args._replace(weight=weight, out=out, epilogue=epilogue), stream)

    def part(self, tensor, mode, bounds):
        """A range of one mode, as far as the tensor goes."""
        if tensor is None:
            return None
        first, end = bounds
        shape = [*tensor.shape]
        shape[mode] = cutlass.min(end, shape[mode]) - first
        start = tuple(first if i == mode else 0 for i in range(len(shape)))
        moved = cute.domain_offset(start, tensor)
        return cute.make_tensor(moved.iterator, cute.make_layout(tuple(shape), stride=tensor.stride))
