"""out[t, :] = w[ids[t], :] for a packed weight (n, k) and 16-bit out (tokens, k): the rows that an embedding looks up.

A quad of lanes decodes 128 columns of one token's row (device/row_pair.py): codes lie in pairs of rows, so it loads
twice what it stores. A CTA loops over 32 such units; those of a token lie side by side.

The row of an id outside 0 .. n - 1 is NaN, and row 0 is read in its place.

Programmatic dependent launch: the decoder's table, if it has one, is filled before ``griddepcontrol.wait``; ids are
read after it, because the launch before this one may write them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.kernels.device.row_pair import CHUNK_BYTES, ODD_STEP, RowPair, RowPairDecoder, exchanged, lane_byte
from w4gemm.kernels.variant import GpuVariant
from w4gemm.packing.block import BLOCK_K, BLOCK_N, STRIP_N
from w4gemm.ptx.memory import store_global

_THREADS = 128
_UNITS = _THREADS // 4
_STORED = 8  # columns of a store
_TWO_NANS = 0x7FFF7FFF  # in float16 and in bfloat16


class EmbeddingRowsKernel:
    """The kernel for a variant, of which only the formats of the weight and of the rows matter."""

    def __init__(self, variant: GpuVariant) -> None:
        self.variant = variant
        self.rows = RowPairDecoder(variant, only_fma=False)

    @cute.jit
    def __call__(
        self, weight: cute.Tensor, ids: cute.Tensor, out: cute.Tensor, n: Int32, max_ctas: Int32, stream: Any
    ) -> None:
        """weight: int32 (n blocks, k blocks, words); ids int32 or int64 (tokens,); out (tokens, k) contiguous, k a
        multiple of 8."""
        units = out.shape[0] * cute.ceil_div(out.shape[1], BLOCK_K)
        ctas = cutlass.min(cute.ceil_div(units, _UNITS), max_ctas)
        self.kernel(weight, ids, out, n).launch(grid=[ctas, 1, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, weight: cute.Tensor, ids: cute.Tensor, out: cute.Tensor, n: Int32) -> None:
        thread = cute.arch.thread_idx()[0]
        units = out.shape[0] * cute.ceil_div(out.shape[1], BLOCK_K)
        table = self.rows.filled_table(thread, _THREADS)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        first = cute.arch.block_idx()[0] * _UNITS
        while first < units:
            self.look_up(weight, ids, out, n, first + thread // 4, table)
            first += cute.arch.grid_dim()[0] * _UNITS

    @cute.jit
    def look_up(
        self, weight: cute.Tensor, ids: cute.Tensor, out: cute.Tensor, n: Int32, unit: Int32, table: Int32
    ) -> None:
        """Decode a unit; past the last one, the last one again, because lanes exchange words."""
        k, q = out.shape[1], cute.arch.lane_idx() % 4
        k_blocks = cute.ceil_div(k, BLOCK_K)
        exists = unit < out.shape[0] * k_blocks
        unit = cutlass.min(unit, out.shape[0] * k_blocks - 1)
        token, k_block = unit // k_blocks, unit % k_blocks
        asked = Int64(ids[token])
        is_row = (asked >= 0) & (asked < Int64(n))
        row = Int32(cutlass.select_(is_row, Int32(asked), Int32(0)))
        block = Int64(row // BLOCK_N * weight.shape[1] + k_block)
        start = weight.iterator.toint() + block * self.variant.block.stride
        pair = RowPair(start, k_block, row % BLOCK_N // STRIP_N, row % 8, q)
        packed, second = self.rows.load(pair), row % STRIP_N >= 8
        column = lane_byte(k_block * BLOCK_K * 2, q) // 2
        target = out.iterator.toint() + (Int64(token) * k + column) * 2
        for chunk in cutlass.range_constexpr(self.rows.k_chunks):
            decoded = self.rows.decode(packed, chunk, table)
            halves = [
                [Int32(cutlass.select_(second, v[1 + 2 * half], v[2 * half])) for v in decoded] for half in range(2)
            ]
            steps = exchanged(*halves, q % 2 == 1)
            for odd in cutlass.range_constexpr(2):
                at = (chunk * CHUNK_BYTES + odd * ODD_STEP) // 2
                words = [Int32(cutlass.select_(is_row, word, Int32(_TWO_NANS))) for word in steps[odd]]
                store_global(target + at * 2, words, exists & (column + at + _STORED <= k))
