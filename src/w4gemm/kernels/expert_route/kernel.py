"""Choices of experts, sorted by expert and stable, in one launch of one CTA.

A choice is an entry of ids (tokens, top k); those of a token follow one another. Each warp has an equal run of
consecutive choices, 32 at a time, one a lane:

1. Each warp counts its choices of each expert. Lanes of equal experts find each other by ``match.any``; the first of
   them adds their number to the warp's counter in shared memory, so that nothing is added up in an unknown order.
2. Thread e turns expert e's counters into the number of its choices in earlier warps, and a scan over threads turns
   their sums into the expert's first row.
3. Each warp walks its choices again. A choice's row is the expert's first row, and the number of the expert's choices
   in earlier warps, in earlier steps of this warp, and in earlier lanes.

Barriers: all threads of the CTA meet after the counters are zero, after phase 1, inside the scan, and after phase 2.
The lanes of a warp meet after the counters are read and after they are written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

THREADS = 1024
_WARPS = THREADS // 32
_ALL = 0xFFFFFFFF


class Tensors(NamedTuple):
    """Inputs and results of a sort of choices."""

    ids: cute.Tensor
    """int32 or int64 (choices,)."""
    expert_map: cute.Tensor | None
    """int32 (global experts,): the expert here; None if ids are those of experts here."""
    m_offsets: cute.Tensor
    """int32 (experts + 1,): each expert's first row, then the number of rows."""
    tokens: cute.Tensor
    """int32 (choices,): the token of each row."""
    row_of_choice: cute.Tensor
    """int32 (choices,): -1 for an expert elsewhere."""


class ExpertRouteKernel:
    """The kernel for ``experts`` experts, at most 1024; ``mapped`` if ids name global ones."""

    def __init__(self, experts: int, mapped: bool) -> None:
        self.experts, self.mapped = experts, mapped

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        expert_map: cute.Tensor | None,
        m_offsets: cute.Tensor,
        tokens: cute.Tensor,
        row_of_choice: cute.Tensor,
        top_k: Int32,
        stream: Any,
    ) -> None:
        """Launch; tensors as in :class:`Tensors`. top_k: choices of a token."""
        self.kernel(Tensors(ids, expert_map, m_offsets, tokens, row_of_choice), top_k).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: Tensors, top_k: Int32) -> None:
        tokens, row_of_choice = tensors.tokens, tensors.row_of_choice
        thread = cute.arch.thread_idx()[0]
        lane, warp = thread % 32, thread // 32
        smem = cutlass.memory.SmemAllocator()
        counters = smem.allocate_tensor(Int32, cute.make_layout(_WARPS * self.experts))
        first_rows = smem.allocate_tensor(Int32, cute.make_layout(self.experts + 1))
        sums = smem.allocate_tensor(Int32, cute.make_layout(32))
        mine = warp * self.experts  # the warp's counters
        choices = tensors.ids.shape[0]
        run = cute.ceil_div(cute.ceil_div(choices, 32), _WARPS) * 32
        start = warp * run
        end = cutlass.min(choices, start + run)
        i = thread
        while i < _WARPS * self.experts:
            counters[i] = 0
            i += THREADS
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()

        at = start
        while at < end:
            expert = self.expert(tensors, at + lane)
            peers = cute.arch.match_sync(_ALL, expert)
            if expert >= 0 and (peers & cute.arch.lanemask_lt()) == 0:
                counters[mine + expert] = counters[mine + expert] + Int32(cute.arch.popc(peers))
            cute.arch.sync_warp()
            at += 32
        cute.arch.sync_threads()

        self.first_rows_of(counters, first_rows, sums, tensors.m_offsets, thread)
        cute.arch.sync_threads()

        at = start
        while at < end:
            choice = at + lane
            expert = self.expert(tensors, choice)
            peers = cute.arch.match_sync(_ALL, expert)
            earlier = Int32(cute.arch.popc(peers & cute.arch.lanemask_lt()))
            row = Int32(-1)
            if expert >= 0:
                row = first_rows[expert] + counters[mine + expert] + earlier
                tokens[row] = choice // top_k
            if choice < choices:
                row_of_choice[choice] = row
            cute.arch.sync_warp()
            if expert >= 0 and earlier == 0:
                counters[mine + expert] = counters[mine + expert] + Int32(cute.arch.popc(peers))
            cute.arch.sync_warp()
            at += 32
        row = first_rows[self.experts] + thread  # rows of no expert: a copy of rows may read their token
        while row < choices:
            tokens[row] = 0
            row += THREADS

    @cute.jit
    def expert(self, tensors: Tensors, choice: Int32) -> Int32:
        """Return the expert of a choice; -1 if it is elsewhere, or past the last choice."""
        ids, expert_map = tensors.ids, tensors.expert_map
        found = Int32(-1)
        if choice < ids.shape[0]:
            given = Int64(ids[choice])
            if cutlass.const_expr(self.mapped):
                if given >= 0 and given < expert_map.shape[0]:
                    given = Int64(expert_map[Int32(given)])
                else:
                    given = Int64(-1)
            if given >= 0 and given < self.experts:
                found = Int32(given)
        return found

    @cute.jit
    def first_rows_of(
        self, counters: cute.Tensor, first_rows: cute.Tensor, sums: cute.Tensor, m_offsets: cute.Tensor, thread: Int32
    ) -> None:
        """Turn counters into numbers of choices in earlier warps; write each expert's first row, and behind the last
        one the number of all rows."""
        lane, warp = thread % 32, thread // 32
        count = Int32(0)
        if thread < self.experts:
            for w in cutlass.range_constexpr(_WARPS):
                here = counters[w * self.experts + thread]
                counters[w * self.experts + thread] = count
                count += here
        scanned = count  # over the lanes so far
        for step in (1, 2, 4, 8, 16):
            before = cute.arch.shuffle_sync_up(scanned, step)
            scanned += before if lane >= step else Int32(0)
        if lane == 31:
            sums[warp] = scanned
        cute.arch.sync_threads()
        earlier = sums[lane] if lane < warp else Int32(0)
        for offset in (16, 8, 4, 2, 1):
            earlier += cute.arch.shuffle_sync_bfly(earlier, offset)
        last = earlier + scanned
        if thread < self.experts:
            first_rows[thread] = last - count
            m_offsets[thread] = last - count
        if thread == self.experts - 1:
            first_rows[self.experts] = last
            m_offsets[self.experts] = last
