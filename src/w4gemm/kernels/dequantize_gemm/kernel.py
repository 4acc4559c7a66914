"""Decode a packed weight (n, k) to a dense matrix in x's dtype, as fast as its bytes move; cuBLAS multiplies by it.

A CTA loops over blocks of 64 rows x 128 columns, of which a quad of lanes decodes two rows (device/row_pair.py).

Programmatic dependent launch: the decoder's table, if it has one, is filled before ``griddepcontrol.wait``. The dense
matrix is written after it, because the kernel before may still read that memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from w4gemm.kernels.device.row_pair import CHUNK_BYTES, ODD_STEP, RowPair, RowPairDecoder, exchanged, lane_byte
from w4gemm.kernels.variant import GpuVariant
from w4gemm.packing.block import BLOCK_K, BLOCK_N
from w4gemm.ptx.memory import store_global

_THREADS = 128


class DequantizeKernel:
    """The kernel for a variant, of which only the formats of the weight and of x matter. ``hopper``: True for SM90 and
    later, which have arithmetic on pairs of bf16 and programmatic dependent launch."""

    def __init__(self, variant: GpuVariant, hopper: bool):
        self.variant = variant
        self.hopper = hopper
        self.rows = RowPairDecoder(variant, only_fma=not hopper)

    @cute.jit
    def __call__(self, weight: cute.Tensor, dense: cute.Tensor, max_ctas: Int32, stream: Any):
        """Launch. weight: int32 (n blocks, k blocks, words). dense: int32 (64 * n blocks, words of 128 * k blocks)."""
        ctas = cutlass.min(weight.shape[0] * weight.shape[1], max_ctas)
        self.kernel(weight, dense).launch(grid=[ctas, 1, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=self.hopper)

    @cute.kernel
    def kernel(self, weight: cute.Tensor, dense: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        k_blocks, stride = weight.shape[1], cute.arch.grid_dim()[0]
        table = self.rows.filled_table(thread, _THREADS)
        if const_expr(self.hopper):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        block = cute.arch.block_idx()[0]
        while block < weight.shape[0] * k_blocks:
            self.dequantize(weight, dense, block, thread, table)
            block += stride

    @cute.jit
    def dequantize(self, weight: cute.Tensor, dense: cute.Tensor, block: Int32, thread: Int32, table: Int32):
        """Decode one block. A warp decodes a strip of sixteen rows."""
        warp, lane = thread // 32, thread % 32
        g, q = lane // 4, lane % 4
        n_block, k_block = block // weight.shape[1], block % weight.shape[1]
        start = weight.iterator.toint() + Int64(block) * self.variant.block.stride
        row_bytes = dense.shape[1] * 4
        row = Int64(n_block * BLOCK_N + warp * 16 + g)
        target = dense.iterator.toint() + row * row_bytes + k_block * (BLOCK_K * self.variant.itemsize)
        packed = self.rows.load(RowPair(start, k_block, warp, g, q))
        for chunk in cutlass.range_constexpr(self.rows.k_chunks):
            decoded = self.rows.decode(packed, chunk, table)
            for row8 in cutlass.range_constexpr(2):
                halves = [[values[row8 + 2 * half] for values in decoded] for half in range(2)]
                steps = exchanged(*halves, q % 2 == 1)
                at = lane_byte(target + row8 * 8 * row_bytes + chunk * CHUNK_BYTES, q)
                store_global(at, steps.even, Boolean(True))
                store_global(at + ODD_STEP, steps.odd, Boolean(True))
