"""From float32 accumulators of d.T to 16-bit rows of d in global memory.

The accumulators of an m64nNk16 WGMMA hold the transpose of what is stored: thread (warp w, g, q) has, for each block of
eight tokens, tokens 2q and 2q + 1 of features 16 w + g (values 0, 1) and 16 w + g + 8 (values 2, 3). ``stmatrix.trans``
turns them into rows of 64 features in shared memory, from which every thread stores 16 contiguous bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from w4gemm.kernels.device.ptx import (
    load_shared,
    pack_half2,
    store_global,
    store_global_half,
    store_matrix_transposed,
)
from w4gemm.kernels.device.staging import ROW_BYTES


@dataclass(frozen=True)
class Epilogue:
    """Stores one warpgroup's accumulators: 64 features of ``tokens`` tokens.

    ``kind`` is "f16" or "bf16". ``chunk`` tokens, a part of ``tokens``, fit the staging buffer. ``vector`` says that
    every row of d starts at a multiple of 16 bytes and n is a multiple of 8.
    """

    kind: str
    tokens: int
    chunk: int
    vector: bool

    @cute.jit
    def store(self, acc: cute.Tensor, out: cute.Tensor, place: Any, staging: Int32, barrier: Int32):
        """acc: flat float32 accumulators. place: (first token, first feature, thread of the warpgroup 0..127).
        staging: this warpgroup's buffer. barrier: a named barrier of its own."""
        token0, feature0, thread = place
        lane, warp = thread % 32, thread // 32
        chunk = self.chunk
        for c in cutlass.range_constexpr(self.tokens // chunk):
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # the buffer is read out
            for pair in cutlass.range_constexpr((chunk + 15) // 16):
                first = (c * chunk + pair * 16) // 8 * 4
                count = 8 if chunk >= 16 else 4
                values = [acc[first + i] for i in range(count)]
                registers = [pack_half2(self.kind, values[i], values[i + 1]) for i in range(0, count, 2)]
                row = pair * 16 + lane % 8 + (lane // 16 * 8 if count == 8 else 0)
                store_matrix_transposed(staging + row * ROW_BYTES + warp * 32 + (lane // 8) % 2 * 16, registers)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # the buffer is filled
            for part in cutlass.range_constexpr((chunk * 8 + 127) // 128):
                index = part * 128 + thread
                row = index // 8
                if row < chunk:
                    words = load_shared(staging + row * ROW_BYTES + index % 8 * 16, 4)
                    self.store_row(words, out, token0 + c * chunk + row, feature0 + index % 8 * 8)

    @cute.jit
    def store_row(self, words: Any, out: cute.Tensor, token: Int32, feature: Int32):
        """Eight features of one token, as far as they exist."""
        m, n = out.shape
        if token < m:
            address = out.iterator.toint() + (Int64(token) * out.stride[0] + feature) * 2
            if const_expr(self.vector):
                if feature < n:
                    store_global(address, words)
            else:
                for i in cutlass.range_constexpr(8):
                    if feature + i < n:
                        store_global_half(address + 2 * i, words[i // 2] >> (16 * (i % 2)))


@cute.jit
def add_bias(acc: cute.Tensor, bias: cute.Tensor, feature0: Int32, thread: Int32):
    """Add bias[feature] to each token of a warpgroup's accumulators; features past the end are left alone."""
    for half in cutlass.range_constexpr(2):
        feature = feature0 + thread // 32 * 16 + thread % 32 // 4 + half * 8
        value = Float32(0.0)
        if feature < bias.shape[0]:
            value = bias[feature].to(Float32)
        for block in cutlass.range_constexpr(cute.size(acc) // 4):
            for v in cutlass.range_constexpr(2):
                i = block * 4 + half * 2 + v
                acc[i] = acc[i] + value
