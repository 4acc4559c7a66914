"""out[i, j] = x[i, perm[j]] for 16-bit x (m, k), as fast as the bytes move.

A CTA takes one row, and of its result one of ``parts`` runs of columns (few rows alone would not fill the GPU). One
bulk copy brings all of x's row into shared memory, where 2-byte reads anywhere are cheap: from global memory each would
cost a sector. Every thread then reads eight perm entries, gathers, and stores 16 bytes. Two or four rows a CTA, which
share the perm entries, were no faster (H200, 2026-11-21).

Programmatic dependent launch: the first perm entries are read before ``griddepcontrol.wait``, and the product that
follows requests its weights meanwhile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from w4gemm.kernels.device.ptx import (
    bulk_copy,
    load_global_int32x4,
    load_shared_half,
    shared_address,
    store_global,
)

_THREADS = 256


class Gather:
    """The kernel for rows of at most ``capacity`` elements."""

    def __init__(self, capacity: int):
        self.capacity = capacity

    @cute.jit
    def __call__(self, x: cute.Tensor, perm: cute.Tensor, out: cute.Tensor, parts: Int32, stream: Any):
        """x and out (m, k), their rows at multiples of 16 bytes, k a multiple of 8; perm int32 (k). parts: CTAs that
        share a row."""
        self.kernel(x, perm, out, parts).launch(
            grid=[x.shape[0] * parts, 1, 1],
            block=[_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, perm: cute.Tensor, out: cute.Tensor, parts: Int32):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        row, part = Int64(cta // parts), cta % parts
        smem = cutlass.memory.SmemAllocator()
        s_row = shared_address(smem.allocate_array(Int32, self.capacity // 2, byte_alignment=16))
        full = smem.allocate_array(Int64, 1, byte_alignment=8)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init_fence()
        k = x.shape[1]
        vectors = k // 8  # of eight columns
        share = cute.ceil_div(vectors, parts)
        last = cutlass.min(vectors, (part + 1) * share)
        at = part * share + thread
        columns = self.read_perm(perm, at, last)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, k * 2)
            bulk_copy(s_row, x.iterator.toint() + row * x.stride[0] * 2, k * 2, shared_address(full))
        cute.arch.mbarrier_wait(full, 0)
        while at < last:
            halves = [load_shared_half(s_row + columns[i] * 2) for i in range(8)]
            words = [halves[2 * i] | (halves[2 * i + 1] << 16) for i in range(4)]
            store_global(out.iterator.toint() + (row * out.stride[0] + at * 8) * 2, words, Boolean(True))
            at += _THREADS
            columns = self.read_perm(perm, at, last)

    @cute.jit
    def read_perm(self, perm: cute.Tensor, at: Int32, last: Int32):
        """Eight entries; past the end the last ones, which nobody uses."""
        address = perm.iterator.toint() + Int64(cutlass.min(at, last - 1)) * 32
        return (*load_global_int32x4(address), *load_global_int32x4(address + 16))
