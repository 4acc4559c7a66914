"""A product as two launches: the features that fill whole waves of tiles, and the rest in tiles of another size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from w4gemm.kernels.hopper import whole_columns
from w4gemm.kernels.sm90_mixed_gemm.kernel import MixedGemm
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.packing.block import BLOCK_N


class Parts:
    """What ``cute.compile`` is given for a variant whose config has a rest."""

    def __init__(self, variant: Variant):
        config = variant.config
        self.waves, self.rest = (
            MixedGemm(replace(variant, config=c)) for c in (replace(config, rest=None), config.rest)
        )
        self.gated = variant.epilogue.gated

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
        starts: None,
        ends: None,
        indices: None,
        partials: None,
        flags: None,
        max_clusters: Int32,
        stream: Any,
    ):
        """As MixedGemm.__call__, of one weight. Where no wave is full there is no rest."""
        m_tiles, n_tiles = self.waves.tiles(out.shape[0], weight.shape[0])
        whole = whole_columns(m_tiles, n_tiles, max_clusters)
        blocks = cutlass.min(whole * (self.waves.v.config.tile_n // BLOCK_N), weight.shape[0])
        extras, common = (alpha, bias, residual, token_scale, channels), (max_clusters, stream)
        if blocks == 0:
            blocks = weight.shape[0]
        self.launch(self.waves, (Int32(0), blocks), (x, weight, out), extras, common)
        if blocks < weight.shape[0]:
            self.launch(self.rest, (blocks, weight.shape[0]), (x, weight, out), extras, common)

    @cute.jit
    def launch(self, gemm, blocks, tensors, extras, common):
        """The blocks of rows from the first of ``blocks`` to the other."""
        (x, weight, out), (alpha, bias, residual, token_scale, channels) = tensors, extras
        rows = (blocks[0] * BLOCK_N, blocks[1] * BLOCK_N)
        columns = (rows[0] // 2, rows[1] // 2) if self.gated else rows
        gemm(
            x,
            self.part(weight, 0, blocks),
            self.part(out, 1, columns),
            alpha,
            self.part(bias, 0, rows),
            self.part(residual, 1, columns),
            token_scale,
            self.part(channels, 0, rows),
            *(None, None, None, None, None),
            *common,
        )

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
