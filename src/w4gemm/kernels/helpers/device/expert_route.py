"""Choices of experts, sorted by expert and stable, in one launch of one CTA or one cluster of CTAs.

A choice is an entry of ids (tokens, top k); those of a token follow one another. Each warp has an equal run of
consecutive choices, 32 at a time, one a lane; a CTA's warps have consecutive runs.

1. Each warp counts its choices of each expert. Lanes of equal experts find each other by a vote on each bit of the
   experts' numbers; the first of them adds their number to the warp's counter in shared memory, so that nothing is
   added up in an unknown order. (``match.any`` takes a while for each expert among a warp's choices: a third longer.)
2. Thread e turns expert e's counters into the number of its choices in earlier warps of the CTA, and reads those of
   the cluster's other CTAs. A scan over threads turns the sums of all CTAs into the expert's first row, and that of
   earlier CTAs makes it the first row of this CTA's choices.
3. Each warp walks its choices again. A choice's row is the first one of its expert in this CTA, and the number of the
   expert's choices in earlier warps, in earlier steps of this warp, and in earlier lanes.

Barriers: all threads of the CTA meet after the counters are zero, after phase 1, inside the scan, and after phase 2.
The lanes of a warp meet after the counters are read and after they are written. The cluster's CTAs meet after each has
stored its sums, and before any ends whose sums may still be read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.ptx.memory import cluster_address, load_shared_cluster_i32, shared_address

THREADS = 1024
_WARPS = THREADS // 32
_ALL = 0xFFFFFFFF


class RoutingTensors(NamedTuple):
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


class Sums(NamedTuple):
    """Sums in shared memory, int32."""

    counters: cute.Tensor
    """(warps * experts,): choices of each expert in a warp, then in the warps before it."""
    counts: cute.Tensor
    """(experts,): choices of each expert in this CTA."""
    first_rows: cute.Tensor
    """(experts + 1,): the first row of each expert's choices in this CTA, then the number of all rows."""
    warps: cute.Tensor
    """(32,): of the scan."""


class ExpertRouteKernel:
    """The kernel for ``experts`` experts, at most 1024; ``mapped`` if ids name global ones. ``ctas``: of the cluster; 1
    for one CTA alone."""

    def __init__(self, experts: int, mapped: bool, ctas: int) -> None:
        self.experts, self.mapped, self.ctas = experts, mapped, ctas

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
        """Launch; tensors as in :class:`RoutingTensors`. top_k: choices of a token."""
        self.kernel(RoutingTensors(ids, expert_map, m_offsets, tokens, row_of_choice), top_k).launch(
            grid=[self.ctas, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.ctas, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tensors: RoutingTensors, top_k: Int32) -> None:
        tokens, row_of_choice = tensors.tokens, tensors.row_of_choice
        thread, rank = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane, warp = thread % 32, thread // 32
        smem = cutlass.memory.SmemAllocator()
        counters = smem.allocate_tensor(Int32, cute.make_layout(_WARPS * self.experts))
        first_rows = smem.allocate_tensor(Int32, cute.make_layout(self.experts + 1))
        counts = smem.allocate_tensor(Int32, cute.make_layout(self.experts))
        sums = smem.allocate_tensor(Int32, cute.make_layout(32))
        mine = warp * self.experts  # the warp's counters
        choices = tensors.ids.shape[0]
        run = cute.ceil_div(cute.ceil_div(choices, 32), self.ctas * _WARPS) * 32
        start = (rank * _WARPS + warp) * run
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
            peers = self.peers(expert)
            if expert >= 0 and (peers & cute.arch.lanemask_lt()) == 0:
                counters[mine + expert] = counters[mine + expert] + Int32(cute.arch.popc(peers))
            cute.arch.sync_warp()
            at += 32
        cute.arch.sync_threads()

        self.first_rows_of(Sums(counters, counts, first_rows, sums), tensors.m_offsets, thread, rank)
        cute.arch.sync_threads()

        at = start
        while at < end:
            choice = at + lane
            expert = self.expert(tensors, choice)
            peers = self.peers(expert)
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
        row = first_rows[self.experts] + rank * THREADS + thread  # of no expert: a copy of rows may read their token
        while row < choices:
            tokens[row] = 0
            row += self.ctas * THREADS
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_wait()  # till the others have read this CTA's counts

    def peers(self, expert: Int32) -> Int32:
        """Return the lanes whose expert is this lane's. -1 differs from each expert in its low bits."""
        peers = Int32(_ALL)
        for bit in range(self.experts.bit_length()):
            mine = (expert >> bit) & 1
            peers = peers & (cute.arch.vote_ballot_sync(mine != 0) ^ (mine - 1))
        return peers

    @cute.jit
    def expert(self, tensors: RoutingTensors, choice: Int32) -> Int32:
        """Return the expert of a choice; -1 if it is elsewhere, or past the last choice."""
        ids, expert_map = tensors.ids, tensors.expert_map
        expert = Int32(-1)
        if choice < ids.shape[0]:
            chosen = Int64(ids[choice])
            if cutlass.const_expr(self.mapped):
                if chosen >= 0 and chosen < expert_map.shape[0]:
                    chosen = Int64(expert_map[Int32(chosen)])
                else:
                    chosen = Int64(-1)
            if chosen >= 0 and chosen < self.experts:
                expert = Int32(chosen)
        return expert

    @cute.jit
    def first_rows_of(self, sums: Sums, m_offsets: cute.Tensor, thread: Int32, rank: Int32) -> None:
        """Turn counters into numbers of choices in earlier warps; store each expert's first row for this CTA, and write
        its first row of all. Behind the last one lies the number of all rows."""
        lane, warp = thread % 32, thread // 32
        count = Int32(0)
        if thread < self.experts:
            for w in cutlass.range_constexpr(_WARPS):
                here = sums.counters[w * self.experts + thread]
                sums.counters[w * self.experts + thread] = count
                count += here
        in_earlier = Int32(0)
        if cutlass.const_expr(self.ctas > 1):
            if thread < self.experts:
                sums.counts[thread] = count
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            if thread < self.experts:
                count = Int32(0)
                mine = shared_address(sums.counts.iterator) + thread * 4
                for r in cutlass.range_constexpr(self.ctas):
                    if rank == r:
                        in_earlier = count
                    count += load_shared_cluster_i32(cluster_address(mine, Int32(r)))
            cute.arch.cluster_arrive()
        scanned = count  # over the lanes so far
        for step in (1, 2, 4, 8, 16):
            before = cute.arch.shuffle_sync_up(scanned, step)
            scanned += before if lane >= step else Int32(0)
        if lane == 31:
            sums.warps[warp] = scanned
        cute.arch.sync_threads()
        earlier = sums.warps[lane] if lane < warp else Int32(0)
        for offset in (16, 8, 4, 2, 1):
            earlier += cute.arch.shuffle_sync_bfly(earlier, offset)
        last = earlier + scanned
        if thread < self.experts:
            sums.first_rows[thread] = last - count + in_earlier
            if rank == 0:
                m_offsets[thread] = last - count
        if thread == self.experts - 1:
            sums.first_rows[self.experts] = last
            if rank == 0:
                m_offsets[self.experts] = last
