"""out[b, h, :] = softmax(scale * rotated(q[b, h]) . keys) @ values, over what sequence b has cached and its new token.

The new token's key is rotated too, and it and its value are written to the cache at ``slot``, which all sequences
share. Sequence b sees slots first[b] .. slot, at most ``window`` of them. Keys and values are (batch, kv heads, length,
dim) in 16 bits, and ``group`` heads of q share those of one kv head. With ``sinks`` the softmax of a head of q has one
more score, its sink, which adds to the sum of shares and to no value.

A cluster of ``splits`` CTAs has one sequence and kv head; each takes an equal run of slots. The CTA whose run has the
newest slot writes the new token's key and value, and reads them back behind a barrier. ``lanes`` neighbouring lanes
hold one key, and its value, in chunks of eight elements; a warp holds 32 / lanes keys at a time, twice. Each such set
of lanes keeps a running maximum, a sum and a weighted sum of values in float32 (online softmax), for every head of the
group. They are added up over the lanes of a warp by shuffles, over warps through shared memory, over the cluster
through distributed shared memory, in an order that depends on ``splits`` alone.

Barriers: all threads of the CTA meet after q is rotated and the new key stored, and after the warps' sums are stored;
all of the cluster after the CTA's sums are stored, and before a CTA ends whose sums may still be read. The launch
behind this one may start at once (sm90_mixed_gemm/kernel.py, programmatic dependent launch).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from w4gemm.ptx.arithmetic import divide, exp2, fma, maximum, pack_half2, to_float
from w4gemm.ptx.memory import (
    cluster_address,
    load_global,
    load_shared_cluster_f32,
    shared_address,
    store_global_half,
)

WARPS = 8
_THREADS = 32 * WARPS
_UNROLL = 2
_LOG2_E = math.log2(math.e)
_NOTHING = -1.0e30
"""A maximum over no keys: finite, so that differences are numbers."""


class Step(NamedTuple):
    """The tensors of a step; see the module's docstring."""

    q: cute.Tensor
    """(batch, heads, dim), as ``out``."""
    k: cute.Tensor
    """(batch, kv heads, dim), as ``v``."""
    v: cute.Tensor
    cos: cute.Tensor
    """(batch, dim), as ``sin``."""
    sin: cute.Tensor
    keys: cute.Tensor
    values: cute.Tensor
    slot: cute.Tensor
    """int64 (1,)."""
    first: cute.Tensor
    """int32 (batch,)."""
    sinks: cute.Tensor | None
    """(heads,)."""
    out: cute.Tensor


class Head(NamedTuple):
    """A kv head of a sequence."""

    batch: Int32
    number: Int32


class Slots(NamedTuple):
    """The slots start .. end - 1 of a kv head, whose first is row ``row`` of the cache."""

    row: Int64
    start: Int32
    end: Int32


class WarpSums(NamedTuple):
    """Sums of each warp of a CTA, in shared memory, by warp and head of the group."""

    values: cute.Tensor
    """Weighted sums of values, dim for each head."""
    tops: cute.Tensor
    totals: cute.Tensor
    """Sums of shares."""


class Running(NamedTuple):
    """A softmax so far, in registers: for each head of the group the maximum, the sum of shares, the sums of values."""

    tops: cute.Tensor
    totals: cute.Tensor
    sums: cute.Tensor


@dataclass(frozen=True)
class StepAttentionKernel:
    """The kernel for heads of ``dim`` elements of ``kind`` "f16" or "bf16".

    Args:
        group: heads of q of one kv head.
        splits: CTAs of a kv head, one cluster.
        sinks: True if there are sinks.
    """

    kind: str
    dim: int
    group: int
    splits: int
    sinks: bool

    @property
    def elements(self) -> int:
        """Elements of a key that a lane holds: fewer for many heads, whose sums all lie in registers."""
        return 16 if self.group <= 4 else 8

    @property
    def lanes(self) -> int:
        return self.dim // self.elements

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        keys: cute.Tensor,
        values: cute.Tensor,
        slot: cute.Tensor,
        first: cute.Tensor,
        sinks: cute.Tensor | None,
        out: cute.Tensor,
        scale: Float32,
        window: Int32,
        stream: Any,
    ) -> None:
        """Launch; tensors as in :class:`Step`. scale: with the factor log2(e) of the exponential."""
        self.kernel(Step(q, k, v, cos, sin, keys, values, slot, first, sinks, out), scale, window).launch(
            grid=[k.shape[0] * k.shape[1] * self.splits, 1, 1],
            block=[_THREADS, 1, 1],
            cluster=[self.splits, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, step: Step, scale: Float32, window: Int32) -> None:
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        rank, unit = cta % self.splits, cta // self.splits
        kv_heads = step.k.shape[1]
        head = Head(unit // kv_heads, unit % kv_heads)
        heads = self.group * self.dim
        smem = cutlass.memory.SmemAllocator()
        s_q = smem.allocate_tensor(Float32, cute.make_layout(heads), 16)
        each = (cute.make_layout(WARPS * size) for size in (heads, self.group, self.group))
        warps = WarpSums(*(smem.allocate_tensor(Float32, layout, 16) for layout in each))
        s_mine = smem.allocate_tensor(Float32, cute.make_layout(heads + 2 * self.group), 16)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        newest = Int32(step.slot[0])
        oldest = cutlass.max(step.first[head.batch], newest + 1 - window)
        run = cute.ceil_div(newest + 1 - oldest, self.splits)
        start = oldest + rank * run
        end = cutlass.min(start + run, newest + 1)
        slots = Slots((Int64(head.batch) * kv_heads + head.number) * step.keys.shape[2], start, end)
        for i in cutlass.range_constexpr(-(-heads // _THREADS)):
            at = i * _THREADS + thread
            if at < heads:
                s_q[at] = (
                    self.rotated(step, step.q, head.batch, head.number * self.group + at // self.dim, at % self.dim)
                    * scale
                )
        if start <= newest and newest < end and thread < self.dim:
            offset = ((slots.row + newest) * self.dim + thread) * 2
            turned = self.rotated(step, step.k, head.batch, head.number, thread)
            store_global_half(step.keys.iterator.toint() + offset, pack_half2(self.kind, turned, turned), Boolean(True))
            value = step.v[head.batch, head.number, thread].to(Float32)
            store_global_half(step.values.iterator.toint() + offset, pack_half2(self.kind, value, value), Boolean(True))
        cute.arch.sync_threads()
        self.attend(s_q, step, slots, thread, warps)
        cute.arch.sync_threads()
        self.add_warps(warps, s_mine, step, head, thread)
        if cutlass.const_expr(self.splits > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            self.add_ranks(shared_address(s_mine.iterator), step, head, rank, thread)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def rotated(self, step: Step, x: cute.Tensor, batch: Int32, head: Int32, i: Int32) -> Float32:
        """Element i of a head of x, q or k, turned by its angle with the element half a head away."""
        half = self.dim // 2
        low = i < half
        other = Int32(cutlass.select_(low, i + half, i - half))
        sign = Float32(cutlass.select_(low, Float32(-1.0), Float32(1.0)))
        here, there = x[batch, head, i].to(Float32), x[batch, head, other].to(Float32)
        return here * step.cos[batch, i].to(Float32) + sign * there * step.sin[batch, i].to(Float32)

    @cute.jit
    def attend(self, s_q: cute.Tensor, step: Step, slots: Slots, thread: Int32, warps: WarpSums) -> None:
        """Attend to the slots, and store each warp's maxima, sums, and weighted sums of values."""
        keys, values = step.keys.iterator.toint(), step.values.iterator.toint()
        group, elements, lanes = self.group, self.elements, self.lanes
        warp, lane = thread // 32, thread % 32
        part, own = lane % lanes, lane // lanes
        columns = [(e // 8) * lanes * 8 + part * 8 + e % 8 for e in range(elements)]
        query = cute.make_rmem_tensor(cute.make_layout(group * elements), Float32)
        sums = cute.make_rmem_tensor(cute.make_layout(group * elements), Float32)
        tops = cute.make_rmem_tensor(cute.make_layout(group), Float32)
        totals = cute.make_rmem_tensor(cute.make_layout(group), Float32)
        for h in cutlass.range_constexpr(group):
            tops[h] = Float32(_NOTHING)
            totals[h] = Float32(0.0)
            for e in cutlass.range_constexpr(elements):
                query[h * elements + e] = s_q[h * self.dim + columns[e]]
                sums[h * elements + e] = Float32(0.0)
        per_step = WARPS * (32 // lanes)
        at = slots.start + warp * (32 // lanes) + own
        for _ in cutlass.range(cute.ceil_div(cutlass.max(slots.end - slots.start, 0), per_step * _UNROLL), unroll=1):
            at_slots = [at + u * per_step for u in range(_UNROLL)]
            offsets = [(slots.row + at_slots[u]) * (self.dim * 2) for u in range(_UNROLL)]
            key = [self.load(keys + offsets[u], part, at_slots[u] < slots.end) for u in range(_UNROLL)]
            value = [self.load(values + offsets[u], part, at_slots[u] < slots.end) for u in range(_UNROLL)]
            for h in cutlass.range_constexpr(group):
                self.take(
                    h, key, value, [at_slots[u] < slots.end for u in range(_UNROLL)], query, Running(tops, totals, sums)
                )
            at += per_step * _UNROLL
        for h in cutlass.range_constexpr(group):
            top = self.over_warp(tops[h], maximum)
            factor = exp2(tops[h] - top)
            total = self.over_warp(totals[h] * factor, plus)
            mixed = [self.over_warp(sums[h * elements + e] * factor, plus) for e in range(elements)]
            if own == 0:
                for e in cutlass.range_constexpr(elements):
                    warps.values[(warp * group + h) * self.dim + columns[e]] = mixed[e]
            if lane == 0:
                warps.tops[warp * group + h] = top
                warps.totals[warp * group + h] = total

    def take(
        self,
        h: int,
        key: list[list[Int32]],
        value: list[list[Int32]],
        exist: list[Boolean],
        query: cute.Tensor,
        running: Running,
    ) -> None:
        """Add a few keys to the running softmax of head h."""
        elements, scores = self.elements, []
        for words, exists in zip(key, exist, strict=True):
            score = Float32(0.0)
            for e in range(elements):
                score = fma(query[h * elements + e], self.element(words, e), score)
            for step in range(self.lanes.bit_length() - 1):
                score = score + cute.arch.shuffle_sync_bfly(score, 1 << step)
            scores.append(Float32(cutlass.select_(exists, score, Float32(2 * _NOTHING))))
        before = top = running.tops[h]
        for score in scores:
            top = maximum(top, score)
        factor, shares = exp2(before - top), [exp2(score - top) for score in scores]
        running.tops[h], total = top, running.totals[h] * factor
        for share in shares:
            total = total + share
        running.totals[h] = total
        for e in range(elements):
            mixed = running.sums[h * elements + e] * factor
            for share, words in zip(shares, value, strict=True):
                mixed = fma(share, self.element(words, e), mixed)
            running.sums[h * elements + e] = mixed

    def element(self, words: list[Int32], e: int) -> Float32:
        return to_float(self.kind, words[e // 2], e % 2 == 1)

    def load(self, row: Int64, part: Int32, exists: Boolean) -> list[Int32]:
        """The words of a lane's chunks of a row; zeros if there is none."""
        chunks = range(self.elements // 8)
        return [word for c in chunks for word in load_global(row + Int64((c * self.lanes + part) * 16), 4, exists)]

    def over_warp(self, value: Float32, combine: Callable[[Float32, Float32], Float32]) -> Float32:
        """Combine over the keys of a warp."""
        for step in range(self.lanes.bit_length() - 1, 5):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, 1 << step))
        return value

    @cute.jit
    def add_warps(self, warps: WarpSums, s_mine: cute.Tensor, step: Step, head: Head, thread: Int32) -> None:
        """Add up the CTA's warps: to ``out`` if it is alone, else to its own sums in shared memory, behind which lie
        the maxima and sums of shares."""
        group, heads = self.group, self.group * self.dim
        for i in cutlass.range_constexpr(-(-heads // _THREADS)):
            at = i * _THREADS + thread
            if at < heads:
                h = at // self.dim
                top = Float32(_NOTHING)
                for w in cutlass.range_constexpr(WARPS):
                    top = maximum(top, warps.tops[w * group + h])
                mixed, total = Float32(0.0), Float32(0.0)
                for w in cutlass.range_constexpr(WARPS):
                    factor = exp2(warps.tops[w * group + h] - top)
                    mixed = fma(warps.values[w * heads + at], factor, mixed)
                    total = fma(warps.totals[w * group + h], factor, total)
                if cutlass.const_expr(self.splits > 1):
                    s_mine[at] = mixed
                    if at % self.dim == 0:
                        s_mine[heads + h] = top
                        s_mine[heads + group + h] = total
                else:
                    self.store(step.out, head, at, self.divided(step, head, h, top, mixed, total))

    @cute.jit
    def add_ranks(self, mine: Int32, step: Step, head: Head, rank: Int32, thread: Int32) -> None:
        """Add up the cluster's CTAs; each stores its share of the elements."""
        heads = self.group * self.dim
        share = heads // self.splits
        for i in cutlass.range_constexpr(-(-share // _THREADS)):
            own = i * _THREADS + thread
            if own < share:
                at = rank * share + own
                h = at // self.dim
                self.store(step.out, head, at, self.over_cluster(mine, step, head, at, h))

    def over_cluster(self, mine: Int32, step: Step, head: Head, at: Int32, h: Int32) -> Float32:
        """Element ``at`` of the group's heads, of head h, of all CTAs together."""
        group, heads = self.group, self.group * self.dim
        bases = [cluster_address(mine, Int32(r)) for r in range(self.splits)]
        tops = [load_shared_cluster_f32(base + (heads + h) * 4) for base in bases]
        top = tops[0]
        for other in tops[1:]:
            top = maximum(top, other)
        mixed, total = Float32(0.0), Float32(0.0)
        for base, own_top in zip(bases, tops, strict=True):
            factor = exp2(own_top - top)
            mixed = fma(load_shared_cluster_f32(base + at * 4), factor, mixed)
            total = fma(load_shared_cluster_f32(base + (heads + group + h) * 4), factor, total)
        return self.divided(step, head, h, top, mixed, total)

    def divided(self, step: Step, head: Head, h: Int32, top: Float32, mixed: Float32, total: Float32) -> Float32:
        """The sum of values, over that of shares, to which the sink of the group's head h adds one."""
        if self.sinks:
            sink = step.sinks[head.number * self.group + h].to(Float32) * Float32(_LOG2_E)
            highest = maximum(top, sink)
            factor = exp2(top - highest)
            mixed, total = mixed * factor, fma(total, factor, exp2(sink - highest))
        return divide(mixed, total)

    def store(self, out: cute.Tensor, head: Head, at: Int32, value: Float32) -> None:
        offset = (Int64(head.batch) * out.shape[1] + head.number * self.group) * self.dim + at
        store_global_half(out.iterator.toint() + offset * 2, pack_half2(self.kind, value, value), Boolean(True))


def plus(x: Float32, y: Float32) -> Float32:
    return x + y
