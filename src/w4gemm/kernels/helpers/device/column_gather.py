"""out[i, j] = x[i, perm[j]] for 16-bit x (m, k), as fast as the bytes move; of experts x[indices[i], perm[e, j]], where
e is the expert that has row i, the last one whose rows begin at i or before.

A CTA gathers one run of columns of one row of the result; ``ctas_per_row`` CTAs share a row, because one CTA per row
would not fill the GPU if m is small. One bulk copy loads the whole row of x into shared memory, because 2-byte reads at
random addresses are cheap there and would cost a sector each in global memory. Then every thread reads eight perm
entries, gathers eight elements and stores 16 bytes. Two or four rows per CTA, which share the perm entries, were no
faster (H200, 2026-11-21).

Pipeline: one mbarrier, arrive count 1 (thread 0, with 2 k transaction bytes); all threads wait for the row of x.
Programmatic dependent launch: the first perm entries are read before ``griddepcontrol.wait``, unless they depend on the
expert, whose rows the launch before may write. The product that follows requests its weights meanwhile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from w4gemm.ptx.memory import bulk_copy, load_global_int32x4, load_shared_half, shared_address, store_global

_THREADS = 256
_VECTOR = 8  # columns of a thread's store


class ColumnGatherKernel:
    """The kernel for rows of at most ``capacity`` elements."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        perm: cute.Tensor,
        starts: cute.Tensor | None,
        indices: cute.Tensor | None,
        out: cute.Tensor,
        ctas_per_row: Int32,
        stream: Any,
    ) -> None:
        """x (rows, k) and out (m, k), their rows at multiples of 16 bytes, k a multiple of 8; perm int32 (k,), without
        starts, the first row of each expert, and indices. Of experts perm is (experts, k), starts int32 (experts,), and
        indices int32 (m,) or None."""
        self.kernel(x, perm, starts, indices, out, ctas_per_row).launch(
            grid=[out.shape[0] * ctas_per_row, 1, 1],
            block=[_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        perm: cute.Tensor,
        starts: cute.Tensor | None,
        indices: cute.Tensor | None,
        out: cute.Tensor,
        ctas_per_row: Int32,
    ) -> None:
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        row, run = Int64(cta // ctas_per_row), cta % ctas_per_row
        smem = cutlass.memory.SmemAllocator()
        s_row = shared_address(smem.allocate_array(Int32, self.capacity // 2, byte_alignment=16))
        full = smem.allocate_array(Int64, 1, byte_alignment=8)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init_fence()
        k = x.shape[1]
        vectors = k // _VECTOR
        vectors_per_run = cute.ceil_div(vectors, ctas_per_row)
        end = cutlass.min(vectors, (run + 1) * vectors_per_run)
        vector = run * vectors_per_run + thread
        order, source = perm.iterator.toint(), row
        columns = None
        if const_expr(starts is None):
            columns = self.read_perm(order, vector, end)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(starts is not None):
            order += Int64(self.expert_of(starts, Int32(row))) * k * 4
            columns = self.read_perm(order, vector, end)
        if const_expr(indices is not None):
            source = Int64(indices[row])
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, k * 2)
            bulk_copy(s_row, x.iterator.toint() + source * x.stride[0] * 2, k * 2, shared_address(full))
        cute.arch.mbarrier_wait(full, 0)
        while vector < end:
            halves = [load_shared_half(s_row + columns[i] * 2) for i in range(_VECTOR)]
            words = [halves[2 * i] | (halves[2 * i + 1] << 16) for i in range(_VECTOR // 2)]
            store_global(out.iterator.toint() + (row * out.stride[0] + vector * _VECTOR) * 2, words, Boolean(True))
            vector += _THREADS
            columns = self.read_perm(order, vector, end)

    @cute.jit
    def expert_of(self, starts: cute.Tensor, row: Int32) -> Int32:
        """Return the last expert whose rows begin at ``row`` or before, 0 if there is none. Each warp counts them."""
        experts, expert = starts.shape[0], Int32(-1)
        for first in cutlass.range(0, experts, 32, unroll=1):
            own = first + cute.arch.lane_idx()
            before = Boolean(False)
            if own < experts:
                before = starts[own] <= row
            expert += cute.arch.popc(cute.arch.vote_ballot_sync(before))
        return cutlass.max(expert, 0)

    @cute.jit
    def read_perm(self, order: Int64, vector: Int32, end: Int32) -> tuple[Int32, ...]:
        """Return the eight entries of a vector of a perm at the address ``order``; past the end those of the last
        vector, which are not used."""
        address = order + Int64(cutlass.min(vector, end - 1)) * 32
        return (*load_global_int32x4(address), *load_global_int32x4(address + 16))
