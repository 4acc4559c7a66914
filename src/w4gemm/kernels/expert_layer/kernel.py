"""out[t] = sum over the experts e of token t of weight[t, e] * (down[e] @ act(gate_up[e] @ x[t])), for at most eight
tokens, in one launch.

The experts of a token and their weights are given, or every CTA chooses them by a router's logits, a warp for each
token (:class:`w4gemm.kernels.device.router.RouterMath`).

The weights of the chosen experts are nearly all that moves, so the launch is built around their stream. A CTA for each
multiprocessor requests its first weights as soon as it has read the choices, and requests weights of down while it
still multiplies those of gate_up.

Units. A step is a strip of 16 rows times one or two blocks of 128 columns of a weight, which one warp multiplies by
mma.sync with the weight as operand A and all tokens as the eight columns of operand B. So nothing is sorted: an expert
has a mask of its tokens, and what it computes for the others is dropped. A unit is a strip of gate_up of one expert
(all of its k blocks), or a strip of down of all experts (all of their k blocks). A CTA has consecutive units of gate_up
(:meth:`.shares.Shares.of`), all CTAs about equally many, whatever they have of down, because all wait for the last one.

Strips of down. If they divide among the C CTAs about evenly, a CTA has every C-th one, whose sum over experts never
leaves it. Else (``split``) four CTAs side by side are a group, each with one of the four strips of packed blocks. The
steps of all rows of blocks, in a row, are divided evenly among groups, so that a CTA has parts of its first and of its
last strip. CTAs with parts of a strip meet in pairs, the left one's sums and the right one's, at a place in global
memory, by an exchange: who comes first leaves its sums there, who comes second takes them and adds its own. So nobody
waits, no fence is needed, and the sum of two is one whoever comes first. Of more, pairs meet in turn.

Either way CTAs side by side read strips side by side at about the same time. A line of L2 holds the scales of all four,
32 bytes each, and comes from memory whole: strips that come later find it gone.

The CTA's units are divided into rounds of at most 16. The steps of a round follow one another, and each warp has
consecutive ones, by its rank (:meth:`.shares.Shares.rank`), some one more than others. Where a warp's unit or range
ends, it stores its partial sums; when all have, each thread adds those of some rows and tokens in the order of ranks.

Sums in order (``in_order``), for layers that are batch invariant: bits are those of four launches, whose WGMMAs add up
steps of 16 columns one after the other, as one chain of mma.sync does. A warp has whole units, of down a strip of one
expert at a time, and decodes weights as those launches do, rounded with their scales. It stores rows of gate_up itself.
Rows of down lie in shared memory by choice, and each thread adds them, rounded, in the order of a token's choices. So
a CTA has one round, and strips of down are never split.

Shared memory, in this order:

    what       bytes                            written by                            read by
    x          tokens * x_row_bytes             all threads: cp.async                 all warps: ldmatrix
    partials   2 * partial_slots * slot_bytes   each warp: a slot for each unit,      all threads
               (two rounds; in order            at unit + rank: the first is reached
               partial_bytes)                   before the second on any path of
                                                warps through units
    stages     warps * warp_bytes               their warp: cp.async of 16 bytes a    their warp
                                                lane; behind its stages what
                                                lanes share of a row
    table      decode_table_bytes               all threads, before the first step    all warps
    choices    see Choices                      all threads or, of few, each warp     all threads
                                                and the first, before the first step

No mbarriers: each warp commits a group of cp.async a step, and waits for the oldest of ``num_stages``. Barriers of the
CTA: those of :class:`.tally.Tally`, one before the first step (x is there), one a round (partials are stored), two
around the wait for other CTAs.

From gate_up to down. The activated rows go through global memory (``scratch``), in the order of down's fragments. CTA c
stores them, meets its threads, and stores 2 * epoch to flag c (release). Warps of each CTA wait until all flags hold
that (acquire), a flag for each lane, and then the CTA reads. The epoch is one more than the last launch's with these
flags, which CTA c itself keeps beside its flag, and replaces once all its warps have read it; so nothing is cleared,
and a graph's replays need nothing from the host. Flags belong to one stream or graph, whose launches do not overlap:
``griddepcontrol.wait`` comes before the first access.

No two CTAs need to run at once. At its start CTA c stores 2 * epoch - 1 to flag c. A CTA that waits for a share that no
CTA has begun claims it by the same store and computes it itself: it drops the weights of down that it has requested,
and goes through its loop once more. Whoever computes a share writes the same bits, so it does no harm if several do.
Computing a share waits for nothing, so whoever stores 2 * epoch - 1 to a flag stores 2 * epoch to it later, in the same
thread. A CTA thus waits only for work that a running CTA has begun. So all CTAs end in whatever order they run, even
one after another, on a GPU of which other kernels or processes hold a part.

If strips are split, the former store is a compare and swap, from 2 * epoch - 2, what the last launch left. One CTA
alone claims share c, zeroes the place where CTA c meets those on its left, and publishes the share. Who comes too late,
CTA c itself perhaps, publishes nothing: CTAs may have met at the place already.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from w4gemm.core.activation import parse
from w4gemm.core.epilogue import Epilogue
from w4gemm.kernels.device.activation import activated
from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.epilogue_math import EpilogueMath
from w4gemm.kernels.device.warp_product import WarpProduct
from w4gemm.kernels.expert_layer.requests import Requests
from w4gemm.kernels.expert_layer.shares import Shares, divided, quotient
from w4gemm.kernels.expert_layer.spec import EPOCHS_AT, SLOT_ROW, ExpertLayer
from w4gemm.kernels.expert_layer.tally import Tally
from w4gemm.kernels.expert_layer.values import (
    ActivatedRows,
    Choices,
    Cursor,
    Down,
    Groups,
    HiddenRows,
    Memory,
    PartialSums,
    PlaceOfSums,
    Share,
    Tensors,
)
from w4gemm.packing.block import STRIP_N
from w4gemm.packing.codecs.e2m1_decode import E2m1Decoder
from w4gemm.packing.codecs.integers_decode import pair
from w4gemm.packing.codecs.pairs_decode import own_pairs
from w4gemm.ptx.arithmetic import (
    float_word,
    fma,
    halves_to_floats,
    lane_again,
    multiply_halves,
    pack_half2,
    to_float,
    warp_maximum,
)
from w4gemm.ptx.memory import (
    compare_and_store,
    copies_wait,
    copy_async_if,
    exchange,
    load_acquire,
    load_global,
    load_l2,
    load_matrix,
    load_shared,
    load_shared_f32x4,
    store_global,
    store_relaxed,
    store_release,
    store_shared_f32,
    store_shared_x4,
)

_CHAINS = 2
"""Sums that the eight matrix instructions of a step take in turn."""
_LARGER = 2.0**64
"""Beside bare numbers, which are 2**-126 times theirs, x and activated rows are so many times as large: those of 2**64
and more overflow, and those below 2**-62 lose bits of their products."""
_QUADS = STRIP_N // 4
"""Fours of consecutive rows of a strip."""


class ExpertLayerKernel:
    """The kernel of one :class:`ExpertLayer`; an instance is what ``cute.compile`` is given."""

    def __init__(self, layer: ExpertLayer) -> None:
        self.layer = layer
        weight = layer.weight
        decoder, bare = weight.decoder(allow_sum_scale=True, pairs=layer.pairs), None
        if isinstance(decoder, E2m1Decoder) and not layer.in_order:
            bare = decoder.bare()
        self.decoder = bare or decoder
        self.larger = _LARGER if bare else 1.0
        self.reader = BlockReader(layer.stage_block, weight.codec.turns)
        self.product = WarpProduct(
            weight, self.decoder, 1, chains=1 if layer.in_order else _CHAINS, scaled=layer.in_order
        )
        self.tally = Tally(layer)
        on_sums = self.decoder.separate_scales and not layer.in_order
        scale = self.decoder.exact_scale if on_sums else self.decoder.sum_scale
        scale /= self.larger
        self.sum_scale = scale
        self.shares = Shares(layer)
        self.requests = Requests(layer, self.shares)
        self.epilogue = EpilogueMath(Epilogue(layer.activation), weight.kind, weight.kind, False, False, scale)

    @cute.jit
    def __call__(self, *values: Any) -> None:
        """Launch. values: the fields of :class:`Tensors`, then the stream."""
        layer = self.layer
        self.kernel(Tensors(*values[:-1])).launch(
            grid=[layer.ctas, 1, 1],
            block=[layer.threads, 1, 1],
            smem=layer.shared_bytes,
            min_blocks_per_mp=1,
            stream=values[-1],
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, t: Tensors) -> None:
        layer = self.layer
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        memory, rank = self.allocate(thread, warp), self.shares.rank(warp)
        share = self.shares.of(cta, cta, Int32(layer.choices))  # of different experts, as choices mostly are
        cursor = self.requests.first_step(share, rank)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        flags = t.flags.iterator.toint()
        epoch = Int32(0)
        if warp < layer.pollers:
            epoch = load_l2(flags + Int64(EPOCHS_AT + cta) * 4, 1, Boolean(True))[0] + 1
        choice = self.tally.read(t, thread)
        self.copy_x(t, memory.x, thread)
        if const_expr(layer.split):  # in front of the weights, because the answer would come behind them
            was = self.claim(flags, cta, epoch, thread)
        active, own = self.tally.count(t, memory.choices, choice, thread)
        if active != layer.choices:
            share = self.shares.of(cta, cta, active)
            cursor = self.requests.first_step(share, rank)
        cursor = self.requests.at_row(t, memory, share, cursor)
        for stage in cutlass.range(layer.num_stages, unroll=1):
            cursor = self.requests.request(t, memory, share, cursor, stage, rank)
        self.tally.store_factors(t, memory.choices, own, thread)
        if const_expr(not layer.split):
            self.claim(flags, cta, epoch, thread)
        down = self.first_of_down(memory, share, rank)
        cute.arch.cp_async_wait_group(layer.num_stages)
        if const_expr(self.larger != 1.0):
            self.enlarge_x(t, memory.x, thread)
        cute.arch.sync_threads()  # x of all threads is there
        if thread == 0:  # only now, because until the barrier warps read it
            store_relaxed(flags + Int64(EPOCHS_AT + cta) * 4, epoch)
        if const_expr(layer.split):
            self.begin(t, memory.choices, cta, was, epoch, warp)

        stage, computed, ahead = Int32(0), cta, cute.make_rmem_tensor((8 if layer.shares_rows else 16,), Int32)
        terms = cute.make_rmem_tensor((3 if layer.in_order else 2,), Float32)
        terms.fill(1.0)
        while computed >= 0:
            if const_expr(layer.in_order):
                cursor, stage = self.multiply_up_in_order(t, memory, share, cursor, stage, rank)
            else:
                cursor, stage = self.multiply_up(t, memory, share, cursor, stage, rank)
            cute.arch.sync_threads()  # the rows of all threads are stored
            if warp == 0:
                if lane == 0 and (const_expr(not layer.split) or memory.choices.owned[0] == epoch):
                    store_release(flags + Int64(computed) * 4, epoch * 2)
            first = self.first_rows(t, memory.choices, down)
            if const_expr(layer.shares_rows):
                second = HiddenRows(Int64(0), Int32(0))
                if down.count > 1:
                    behind = self.step_behind(share, down.slot, down.k_block)
                    second = self.rows_of(t, memory.choices, *behind, lane_again())
            if down.count > 0:
                self.load_terms(t, memory.choices, share, down.slot, down.column, terms)
            if warp < layer.pollers:
                memory.choices.shares[warp] = self.await_flags(flags, cta, epoch, warp, lane)
            else:
                if computed == cta:
                    self.add_biases(t, memory.choices, share, thread - 32 * layer.pollers)
            cute.arch.sync_threads()
            preferred = self.preferred_share(memory.choices)
            left = cutlass.select_(preferred > 0, Int32(0), first.left)
            self.load_rows(first._replace(left=left), ahead)
            if const_expr(layer.shares_rows):
                left = cutlass.select_(preferred > 0, Int32(0), second.left)
                self.load_rows(second._replace(left=left), ahead, True)
            if preferred > 0:
                computed = self.share_to_claim(preferred, cta)
                again = self.claim(flags, computed, epoch, thread)
                if const_expr(layer.split):
                    self.begin(t, memory.choices, computed, again, epoch, warp)
                copies_wait()
                cute.arch.sync_threads()
                share = self.shares.of(computed, cta, active)
                cursor, stage = self.requests.at_row(t, memory, share, self.requests.first_step(share, rank)), Int32(0)
                for at in cutlass.range(layer.num_stages, unroll=1):
                    cursor = self.requests.request(t, memory, share, cursor, at, rank)
            else:
                computed = Int32(-1)
        self.multiply_down(t, memory, share, down, ahead, terms, cursor, stage, rank)

    def allocate(self, thread: Int32, warp: Int32) -> Memory:
        """Divide shared memory, and fill the decoder's table."""
        layer, memory = self.layer, Memory.allocated(self.layer, warp)
        if layer.pairs is None:
            return memory
        self.decoder.fill_table(memory.table, thread, layer.threads)
        return memory._replace(table=own_pairs(memory.table, thread, layer.pairs))

    # ------------------------------------------------------------------------------------------------------ x, shares

    @cute.jit
    def copy_x(self, t: Tensors, target: Int32, thread: Int32) -> None:
        """Request x, with zeros past the last feature, as one group of cp.async."""
        layer = self.layer
        vectors = layer.k_blocks_up * 16  # of a row, 16 bytes each
        source, row_bytes = t.x.iterator.toint(), layer.features * 2
        for i in cutlass.range(thread, t.x.shape[0] * vectors, layer.threads, unroll=1):
            row, vector = i // vectors, i % vectors
            exists = vector * 8 < layer.features
            at = Int64(row) * row_bytes + vector * 16
            copy_async_if(target + row * layer.x_row_bytes + vector * 16, source + at, exists)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def enlarge_x(self, t: Tensors, target: Int32, thread: Int32) -> None:
        """Multiply what this thread has copied of x by ``larger``."""
        layer, vectors = self.layer, self.layer.k_blocks_up * 16
        for i in cutlass.range(thread, t.x.shape[0] * vectors, layer.threads, unroll=1):
            at = target + i // vectors * layer.x_row_bytes + i % vectors * 16
            factor = pair(self.larger, self.larger, layer.kind)
            store_shared_x4(at, [multiply_halves(layer.kind, word, factor) for word in load_shared(at, 4)])

    def enlarged(self, value: Float32) -> Float32:
        return value * Float32(self.larger) if self.larger != 1.0 else value

    def read_weight(self, memory: Memory, stage: Int32, lane: Int32, b: int) -> tuple[Any, Any]:
        """The code words of a stage's block, and a function of strip and group that gives the scale words."""
        block = self.layer.stage_block
        address = memory.stages + stage * self.layer.stage_bytes + b * block.bytes
        halves = [self.reader.codes(address, half, 0, lane) for half in range(2)]
        words = [self.reader.words_of_step(codes, step) for codes in halves for step in range(4)]
        scales, together = address + block.code_bytes, block.groups_per_word
        factors = self.reader.factors(scales, 0, lane // 4)
        loaded = [self.reader.scales(scales, g, 0, lane // 4) + factors for g in range(0, block.groups, together)]
        return [words], lambda _, group: loaded[group // together]

    # ------------------------------------------------------------------------------------------------------- gate_up

    @cute.jit
    def multiply_up(
        self, t: Tensors, memory: Memory, share: Share, cursor: Cursor, stage: Int32, rank: Int32
    ) -> tuple[Cursor, Int32]:
        """Multiply the share's units of gate_up, and store their activated rows."""
        layer, lane = self.layer, cute.arch.lane_idx()
        acc = cute.make_rmem_tensor((4, 1, 1), Float32)
        acc.fill(0.0)
        row = cutlass.min(lane % 8, t.x.shape[0] - 1)
        x = memory.x + row * layer.x_row_bytes + lane // 8 * 16
        for round in cutlass.range(share.rounds, unroll=1):
            steps = self.shares.steps_of(share, round, rank)
            partials = memory.partials + round % 2 * (layer.partial_slots * layer.slot_bytes)
            unit, k_step = divided(steps.first, layer.steps_up)
            rows = self.rows_of_round(t, memory.choices, share, round, partials, steps.dealt)
            for i in cutlass.range(steps.count, unroll=1):
                cursor = self.multiply_step(t, memory, share, acc, x, k_step, cursor, stage, rank)
                stage = self.next_stage(stage)
                k_step += 1
                if k_step == layer.steps_up or i == steps.count - 1:
                    self.store_partial(acc, partials + (unit + rank) * layer.slot_bytes, lane)
                    acc.fill(0.0)
                    unit, k_step = unit + 1, Int32(0)
            cute.arch.sync_threads()
            self.store_rows(rows)
        return cursor, stage

    @cute.jit
    def multiply_up_in_order(
        self, t: Tensors, memory: Memory, share: Share, cursor: Cursor, stage: Int32, rank: Int32
    ) -> tuple[Cursor, Int32]:
        """:meth:`multiply_up`, each warp whole units, whose rows it stores itself."""
        layer, lane = self.layer, cute.arch.lane_idx()
        acc = cute.make_rmem_tensor((4, 1, 1), Float32)
        row = cutlass.min(lane % 8, t.x.shape[0] - 1)
        x = memory.x + row * layer.x_row_bytes + lane // 8 * 16
        slot_of_sums = memory.partials + rank * layer.slot_bytes
        steps = self.shares.steps_of(share, Int32(0), rank)
        first, count = (quotient(number, layer.steps_up) for number in (steps.first, steps.count))
        if share.rounds == 0:
            count = Int32(0)
        for unit in cutlass.range(first, first + count, unroll=1):
            rows = self.rows_of_unit(t, memory.choices, share.first + unit, slot_of_sums, lane)
            acc.fill(0.0)
            for k_step in cutlass.range(layer.steps_up, unroll=1):
                cursor = self.multiply_step(t, memory, share, acc, x, k_step, cursor, stage, rank)
                stage = self.next_stage(stage)
            self.store_partial(acc, slot_of_sums, lane)
            cute.arch.sync_warp()
            self.store_rows(rows)
        return cursor, stage

    @cute.jit
    def multiply_step(
        self,
        t: Tensors,
        memory: Memory,
        share: Share,
        acc: cute.Tensor,
        x: Int32,
        k_step: Int32,
        cursor: Cursor,
        stage: Int32,
        rank: Int32,
    ) -> Cursor:
        """Multiply a step of gate_up, and request another one into its stage. x: address of this lane's row."""
        layer, lane = self.layer, cute.arch.lane_idx()
        cute.arch.cp_async_wait_group(layer.num_stages - 1)
        cute.arch.sync_warp()
        for b in cutlass.range_constexpr(layer.step_blocks):
            at = x + (k_step * layer.step_blocks + b) * 256
            if const_expr(b == 0 or not layer.ragged_up):
                words, scales = self.read_weight(memory, stage, lane, b)
                fragments = self.read_x(at)
                if const_expr(b == layer.step_blocks - 1):
                    cursor = self.refill(t, memory, share, cursor, stage, rank)
                self.product.multiply(acc, 0, words, scales, [fragments], memory.table)
            else:
                if k_step < layer.steps_up - 1:
                    self.multiply_block(memory, acc, stage, b, self.read_x(at))
                cursor = self.refill(t, memory, share, cursor, stage, rank)
        return cursor

    @cute.jit
    def multiply_block(
        self, memory: Memory, acc: cute.Tensor, stage: Int32, b: cutlass.Constexpr, fragments: list
    ) -> None:
        """Multiply a block of a stage."""
        words, scales = self.read_weight(memory, stage, cute.arch.lane_idx(), b)
        self.product.multiply(acc, 0, words, scales, [fragments], memory.table)

    @cute.jit
    def refill(self, t: Tensors, memory: Memory, share: Share, cursor: Cursor, stage: Int32, rank: Int32) -> Cursor:
        """Request the next step's weights into a stage that this lane has read."""
        cute.arch.sync_warp()
        return self.requests.request(t, memory, share, cursor, stage, rank)

    @cute.jit
    def next_stage(self, stage: Int32) -> Int32:
        stage += 1
        if stage == self.layer.num_stages:
            stage = Int32(0)
        return stage

    def read_x(self, address: Int32) -> list[tuple[Int32, Int32]]:
        """The x fragments of 128 columns: two registers for each of eight steps. address: of this lane's row."""
        steps: list = []
        for quarter in range(4):  # of 32 columns: four 8 x 8 matrices, the fragments of two steps
            r = load_matrix(address + quarter * 64)
            steps += [(r[0], r[1]), (r[2], r[3])]
        return steps

    @cute.jit
    def store_partial(self, acc: cute.Tensor, slot: Int32, lane: Int32) -> None:
        """Store this warp's sums of a unit: float32 [token][row], with a gap behind each token's."""
        for i in cutlass.range_constexpr(4):
            token, row = lane % 4 * 2 + i % 2, lane // 4 + i // 2 * 8
            if token < self.layer.tokens:
                store_shared_f32(slot + (token * SLOT_ROW + row) * 4, acc[i])

    def place_of(self, thread: Int32) -> PlaceOfSums:
        """Which four sums of a round a thread adds up."""
        rest, quad = divided(thread, _QUADS)
        unit, token = divided(rest, self.layer.tokens)
        return PlaceOfSums(unit, quad, token)

    def sums_of(self, thread: Int32, partials: Int32, begin: Int32, end: Int32, dealt: Int32) -> PartialSums:
        """The partial sums of those warps that have steps of the thread's unit, from ``begin`` to ``end`` - 1 of the
        round's."""
        unit, quad, token = self.place_of(thread)
        first, last = self.shares.rank_of(begin, dealt), self.shares.rank_of(end - 1, dealt)
        at = (unit + first) * self.layer.slot_bytes + (token * SLOT_ROW + quad * 4) * 4
        return PartialSums(partials + at, last + 1 - first)

    @cute.jit
    def sum_of(self, own: PartialSums) -> list[Float32]:
        """Add the partial sums in the order of ranks."""
        sums = cute.make_rmem_tensor((4,), Float32)
        sums.fill(0.0)
        for warp in cutlass.range(own.warps, unroll=4):
            partial = load_shared_f32x4(own.partials + warp * self.layer.slot_bytes)
            for i in cutlass.range_constexpr(4):
                sums[i] = sums[i] + partial[i]
        return [sums[i] for i in range(4)]

    @cute.jit
    def rows_of_round(
        self, t: Tensors, c: Choices, share: Share, round: Int32, partials: Int32, dealt: Int32
    ) -> ActivatedRows:
        """What this thread adds up of a round of gate_up: nothing for tokens that did not choose the expert."""
        layer, thread = self.layer, cute.arch.thread_idx()[0]
        own, slot, strip, expert = PartialSums(Int32(0), Int32(0)), Int32(0), Int32(0), Int32(0)
        unit, _, token = place = self.place_of(thread)
        if unit < cutlass.min(share.units - round * share.chunk, share.chunk):
            slot, strip = divided(share.first + round * share.chunk + unit, layer.strips_up)
            if (c.masks[slot] >> token) & 1 != 0:
                begin, expert = unit * layer.steps_up, c.experts[slot]
                own = self.sums_of(thread, partials, begin, begin + layer.steps_up, dealt)
        return self.activated_rows(t, own, place, slot, strip, expert)

    @cute.jit
    def rows_of_unit(self, t: Tensors, c: Choices, unit: Int32, sums: Int32, lane: Int32) -> ActivatedRows:
        """What this lane activates and stores of a unit whose sums its warp has; ``sums``: their address."""
        layer, place, expert = self.layer, self.place_of(lane), Int32(0)
        own, (slot, strip) = PartialSums(Int32(0), Int32(0)), divided(unit, layer.strips_up)
        if lane < _QUADS * layer.tokens:
            if (c.masks[slot] >> place.token) & 1 != 0:
                expert = c.experts[slot]
                own = PartialSums(sums + (place.token * SLOT_ROW + place.quad * 4) * 4, Int32(1))
        return self.activated_rows(t, own, place, slot, strip, expert)

    @cute.jit
    def activated_rows(
        self, t: Tensors, own: PartialSums, place: PlaceOfSums, slot: Int32, strip: Int32, expert: Int32
    ) -> ActivatedRows:
        """Where the activated rows of some sums go, and what else makes them."""
        layer, (_, quad, token) = self.layer, place
        if const_expr(layer.gated):  # two columns
            at = self.hidden_at(t, slot, quotient(strip, 4), token * 4 + quad) + Int64(strip % 4 * 4)
        else:  # four columns, of two lanes
            at = self.hidden_at(t, slot, quotient(strip, 2), token * 4 + quad % 2 * 2)
            at = at + Int64(strip % 2 * 8 + quotient(quad, 2) * 4)
        scale, biases, channels = Float32(1.0), (Int32(0), Int32(0)), ()
        row = Int64(expert) * layer.rows_up + strip * STRIP_N + quad * 4
        if const_expr(layer.gate_up_scale):
            scale = t.gate_up_scale[expert]
        if const_expr(layer.gate_up_bias):
            biases = tuple(load_global(t.gate_up_bias.iterator.toint() + row * 2, 2, own.warps > 0))
        if const_expr(layer.weight.channels):
            channels = tuple(load_global(t.gate_up_channels.iterator.toint() + row * 4, 4, own.warps > 0))
        return ActivatedRows(own, at, scale, biases, channels)

    @cute.jit
    def store_rows(self, rows: ActivatedRows) -> None:
        """Activate the sums of a round and store them."""
        layer = self.layer
        if rows.own.warps > 0:
            biases = [None] * 4
            if const_expr(layer.gate_up_bias):
                biases = [to_float(layer.kind, word, high) for word in rows.biases for high in (False, True)]
            scale = rows.scale if const_expr(layer.gate_up_scale) else None
            if const_expr(layer.in_order):
                sums = list(load_shared_f32x4(rows.own.partials))
            else:
                sums = self.sum_of(rows.own)
            if const_expr(layer.weight.channels):
                sums = [value * to_float("f32", word) for value, word in zip(sums, rows.channels, strict=True)]
            y = [self.epilogue.affine(v, scale, b) for v, b in zip(sums, biases, strict=True)]
            activation = parse(layer.activation)
            if const_expr(layer.gated):
                values = [self.enlarged(activated(activation, y[j], y[j + 1])) for j in (0, 2)]
                store_global(rows.at, [pack_half2(layer.kind, *values)], Boolean(True))
            else:
                values = [self.enlarged(activated(activation, value)) for value in y]
                for j in cutlass.range_constexpr(2):
                    words = [pack_half2(layer.kind, values[2 * j], values[2 * j + 1])]
                    store_global(rows.at + j * 16, words, Boolean(True))

    def hidden_at(self, t: Tensors, slot: Int32, quarter: Int32, lane: Int32) -> Int64:
        """The address of what a lane loads of 32 columns of a slot's rows: 16 bytes, of two steps the two fragment
        registers. Those of a warp follow one another, so that it loads whole sectors of 32 bytes."""
        layer = self.layer
        vector = (slot * (4 * layer.k_blocks_down) + quarter) * (4 * layer.tokens) + lane
        return t.scratch.iterator.toint() + Int64(vector) * 16

    # ---------------------------------------------------------------------------------------------------------- flags

    @cute.jit
    def claim(self, flags: Int64, share: Int32, epoch: Int32, thread: Int32) -> Int32:
        """Say, as thread 0, that this CTA computes a share, and return what its flag was, if strips are split."""
        flag, was = flags + Int64(share) * 4, epoch * 2 - 2
        if thread == 0:
            if const_expr(self.layer.split):
                was = compare_and_store(flag, epoch * 2 - 2, epoch * 2 - 1)
            else:
                store_relaxed(flag, epoch * 2 - 1)
        return was

    @cute.jit
    def begin(self, t: Tensors, c: Choices, share: Int32, was: Int32, epoch: Int32, warp: Int32) -> None:
        """Zero, as warp 0, where CTA ``share`` meets those on its left, unless another CTA has claimed the share."""
        lane = cute.arch.lane_idx()
        if warp == 0:
            owned = cute.arch.shuffle_sync(was, 0) == epoch * 2 - 2
            if lane == 0:
                c.owned[0] = Int32(cutlass.select_(owned, epoch, ~epoch))
            if owned:
                for i in cutlass.range(lane, self.layer.part_bytes // 16, 32, unroll=1):
                    at = self.meeting_at(t, share, quotient(i, _QUADS), i % _QUADS)
                    store_global(at, [Int32(0)] * 4, Boolean(True))

    @cute.jit
    def await_flags(self, flags: Int64, cta: Int32, epoch: Int32, warp: Int32, lane: Int32) -> Int32:
        """Wait, as one warp, until the shares of 32 CTAs, from ``32 * warp`` on, are computed, and return 0; or return
        the preference for one that no CTA has begun. CTAs that look at the same time prefer different ones. A lane has
        one flag, because a load with acquire waits for the one before it: five take microseconds."""
        ctas = self.layer.ctas
        other, preferred = cutlass.min(warp * 32 + lane, ctas - 1), Int32(-1)
        while preferred < 0:
            flag, preference = load_acquire(flags + Int64(other) * 4), Int32(0)
            if flag != epoch * 2 and flag != epoch * 2 - 1:
                preference = (other + cta) % ctas + 1
            preference = warp_maximum(preference)
            if cute.arch.vote_ballot_sync(flag != epoch * 2) == 0:
                preferred = Int32(0)
            elif preference > 0:
                preferred = preference
        return preferred

    def preferred_share(self, c: Choices) -> Int32:
        """The largest preference of the warps that waited; 0 if all shares are computed."""
        preferred = c.shares[0]
        for warp in range(1, self.layer.pollers):
            preferred = cutlass.max(preferred, c.shares[warp])
        return preferred

    def share_to_claim(self, preferred: Int32, cta: Int32) -> Int32:
        """The share of a preference."""
        return (preferred - 1 - cta + self.layer.ctas) % self.layer.ctas

    # ----------------------------------------------------------------------------------------------------------- down

    @cute.jit
    def add_biases(self, t: Tensors, c: Choices, share: Share, thread: Int32) -> None:
        """Add up the weighted biases of the strips that begin in this CTA; by all warps that do not wait for flags."""
        layer = self.layer
        if const_expr(layer.down_bias and not layer.in_order):
            count = share.columns * (layer.tokens * STRIP_N)
            for i in cutlass.range(thread, count, layer.threads - 32 * layer.pollers, unroll=1):
                column, token, row = i // (layer.tokens * STRIP_N), i // STRIP_N % layer.tokens, i % STRIP_N
                feature = (share.column + column * self.shares.column_stride) * STRIP_N + row
                total = Float32(0.0)
                begins = (column > 0) | (share.skipped == 0)
                for slot in cutlass.range(share.active, unroll=4):
                    if begins & ((c.masks[slot] >> token) & 1 != 0):
                        bias = t.down_bias[c.experts[slot], feature]
                        total += c.factors[slot * layer.tokens + token] * Float32(bias)
                c.biases[i] = total

    def first_of_down(self, memory: Memory, share: Share, rank: Int32) -> Down:
        """Where a warp begins in the CTA's strips of down, and what this thread adds up of them."""
        steps = self.shares.steps_of(share, share.rounds, rank)
        column, rest = divided(share.skipped + steps.first, self.shares.steps_of_column(share.active))
        slot, k_step = divided(rest, self.layer.steps_down)
        own = self.sums_of_columns(share, memory.partials, steps.dealt)
        return Down(steps.count, column, slot, k_step * self.layer.step_blocks, own)

    @cute.jit
    def first_rows(self, t: Tensors, c: Choices, down: Down) -> HiddenRows:
        """What this lane loads first, computed before the wait for other CTAs."""
        rows = HiddenRows(Int64(0), Int32(0))
        if down.count > 0:
            rows = self.rows_of(t, c, down.slot, down.k_block, lane_again())
        return rows

    @cute.jit
    def step_behind(self, share: Share, slot: Int32, k_block: Int32) -> tuple[Int32, Int32]:
        """The slot and the first block of the step of down behind one."""
        k_block += self.layer.step_blocks
        if k_block >= self.layer.k_blocks_down:
            slot, k_block = slot + 1, Int32(0)
            if slot == share.active:
                slot = Int32(0)
        return slot, k_block

    @cute.jit
    def multiply_down(
        self,
        t: Tensors,
        memory: Memory,
        share: Share,
        down: Down,
        ahead: cute.Tensor,
        terms: cute.Tensor,
        cursor: Cursor,
        stage: Int32,
        rank: Int32,
    ) -> None:
        """Multiply the CTA's strips of down, add up over experts, and store the sums. ahead: the first rows. channels:
        the scales of a lane's two rows of the first expert's strip."""
        layer, lane, c = self.layer, cute.arch.lane_idx(), memory.choices
        count, column, slot, k_block, own = down.count, down.column, down.slot, down.k_block, down.own
        acc, totals = (cute.make_rmem_tensor((4, 1, 1), Float32) for _ in range(2))
        acc.fill(0.0)
        totals.fill(0.0)
        for i in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(layer.num_stages - 1)
            cute.arch.sync_warp()
            first, was, last = k_block, slot, i == count - 1
            k_block += layer.step_blocks
            expert_done = k_block >= layer.k_blocks_down
            if expert_done:
                slot, k_block = slot + 1, Int32(0)
            column_done = slot == share.active
            if column_done:
                slot = Int32(0)
            if const_expr(layer.shares_rows):
                self.share_rows(memory.rows, ahead, lane)
                if i + 2 < count:
                    behind = self.step_behind(share, slot, k_block)
                    self.load_rows(self.rows_of(t, c, *behind, lane), ahead, True)
            for b in cutlass.range_constexpr(layer.step_blocks):
                fragments = self.fragments_of(memory.rows, ahead, lane, b)
                if const_expr(b == 0 or not layer.ragged_down):
                    words, scales = self.read_weight(memory, stage, lane, b)
                refills = b == layer.step_blocks - 1 and not layer.ragged_down
                if const_expr(refills and layer.refills_first):
                    cursor = self.refill(t, memory, share, cursor, stage, rank)
                if const_expr(not layer.shares_rows and b < layer.step_blocks - 1):
                    self.load_rows(self.rows_of(t, c, was, first + b + 1, lane), ahead)
                elif const_expr(not layer.shares_rows):
                    if not last:
                        self.load_rows(self.rows_of(t, c, slot, k_block, lane), ahead)
                if const_expr(refills and not layer.refills_first):
                    cursor = self.refill(t, memory, share, cursor, stage, rank)
                if const_expr(b == 0 or not layer.ragged_down):
                    self.product.multiply(acc, 0, words, scales, [fragments], memory.table)
                else:
                    if first + b < layer.k_blocks_down:
                        self.multiply_block(memory, acc, stage, b, fragments)
                    cursor = self.refill(t, memory, share, cursor, stage, rank)
            stage = self.next_stage(stage)
            if expert_done or last:
                if const_expr(layer.in_order):
                    self.store_down(acc, c, memory.partials, column, was, terms)
                else:
                    self.add_expert(acc, c, was, terms, totals)
                acc.fill(0.0)
            if column_done or last:
                if const_expr(not layer.in_order):
                    self.store_partial(totals, memory.partials + (column + rank) * layer.slot_bytes, lane)
                    totals.fill(0.0)
                column += 1
            if const_expr(layer.weight.channels or layer.in_order):
                if expert_done and not last:
                    self.load_terms(t, c, share, slot, column, terms)
        groups = self.shares.groups_of(share, self.place_of(cute.arch.thread_idx()[0]).unit)
        cute.arch.sync_threads()
        self.store_sums(t, c, share, own, groups)

    @cute.jit
    def add_expert(self, acc: cute.Tensor, c: Choices, slot: Int32, terms: cute.Tensor, totals: cute.Tensor) -> None:
        """Add what a warp has of an expert's strip of down to its sums over experts."""
        layer, lane = self.layer, cute.arch.lane_idx()
        for j in cutlass.range_constexpr(4):
            token = lane % 4 * 2 + j % 2
            if token < layer.tokens and (const_expr(layer.alone) or (c.masks[slot] >> token) & 1 != 0):
                factor = c.scaled[slot * layer.tokens + token]
                if const_expr(layer.weight.channels):
                    factor *= terms[j // 2]
                totals[j] = fma(factor, acc[j], totals[j])

    @cute.jit
    def store_down(
        self, acc: cute.Tensor, c: Choices, rows: Int32, column: Int32, slot: Int32, terms: cute.Tensor
    ) -> None:
        """Store an expert's strip of down for the tokens that chose it, each at its first choice. terms: what
        :meth:`load_terms` loads."""
        layer, lane = self.layer, cute.arch.lane_idx()
        scale = terms[2] if layer.down_scale else None
        for j in cutlass.range_constexpr(4):
            token, row = lane % 4 * 2 + j % 2, lane // 4 + j // 2 * 8
            if token < layer.tokens and (const_expr(layer.alone) or (c.masks[slot] >> token) & 1 != 0):
                choice = c.places[slot * layer.tokens + token]
                value = self.epilogue.affine(acc[j], scale, terms[j // 2] if layer.down_bias else None)
                store_shared_f32(rows + ((column * layer.choices + choice) * STRIP_N + row) * 4, value)

    @cute.jit
    def load_terms(self, t: Tensors, c: Choices, share: Share, slot: Int32, column: Int32, terms: cute.Tensor) -> None:
        """Load the scales of a lane's rows, g and g + 8, of an expert's strip of down; if sums are in order, the biases
        of the rows and the expert's scale."""
        if const_expr(self.layer.in_order):
            expert = c.experts[slot]
            if const_expr(self.layer.down_bias):
                feature = (share.column + column * self.shares.column_stride) * STRIP_N + cute.arch.lane_idx() // 4
                for j in cutlass.range_constexpr(2):
                    terms[j] = Float32(t.down_bias[expert, feature + j * 8])
            if const_expr(self.layer.down_scale):
                terms[2] = t.down_scale[expert]
        if const_expr(self.layer.weight.channels):
            row = (share.column + column * self.shares.column_stride) * STRIP_N + cute.arch.lane_idx() // 4
            at = t.down_channels.iterator.toint() + (Int64(c.experts[slot]) * self.layer.features + row) * 4
            for j in cutlass.range_constexpr(2):
                terms[j] = to_float("f32", load_global(at + j * 32, 1, Boolean(True))[0])

    def rows_of(self, t: Tensors, c: Choices, slot: Int32, k_block: Int32, lane: Int32) -> HiddenRows:
        """What a lane loads of a k block of a slot's rows; of a step's, if lanes share them."""
        layer = self.layer
        vectors = 16 * layer.step_blocks if layer.shares_rows else 4
        chosen = lane < vectors if layer.alone else (c.masks[slot] >> (lane // 4)) & 1 != 0
        at, left = self.hidden_at(t, slot, k_block * 4, lane), layer.width - k_block * 128
        if layer.shares_rows:
            left -= lane // 4 * 32
        return HiddenRows(at, Int32(cutlass.select_(chosen, left, Int32(0))))

    @cute.jit
    def load_rows(self, rows: HiddenRows, ahead: cute.Tensor, second: cutlass.Constexpr = False) -> None:
        """Load the fragments of a k block, zeros where there are no columns; if lanes share rows, what
        :meth:`share_rows` stores next or, ``second``, behind that."""
        for piece in cutlass.range_constexpr(1 if self.layer.shares_rows else 4):  # of 32 columns
            words = load_l2(rows.at + Int64(piece * self.layer.tokens * 64), 4, piece * 32 < rows.left)
            for j in cutlass.range_constexpr(4):
                ahead[(piece + second) * 4 + j] = words[j]

    @cute.jit
    def share_rows(self, rows: Int32, ahead: cute.Tensor, lane: Int32) -> None:
        """Store what lanes have loaded of a step's row for one another, in place of the step before, which all lanes
        have read: its matrix instructions waited for them."""
        if lane < 16 * self.layer.step_blocks:
            store_shared_x4(rows + lane * 16, [ahead[j] for j in range(4)])
        for j in cutlass.range_constexpr(4):
            ahead[j] = ahead[4 + j]
        cute.arch.sync_warp()

    def fragments_of(self, rows: Int32, ahead: cute.Tensor, lane: Int32, b: int) -> list[tuple[Int32, Int32]]:
        """The fragments of a step's block: two registers for each of eight steps of the instruction. If lanes share
        rows, all columns are the one token's, as only the first one's sums are read."""
        if not self.layer.shares_rows:
            return [(ahead[2 * j] + 0, ahead[2 * j + 1] + 0) for j in range(8)]
        steps: list = []
        for piece in range(4 * b, 4 * b + 4):
            r = load_shared(rows + piece * 64 + lane % 4 * 16, 4)
            steps += [(r[0], r[1]), (r[2], r[3])]
        return steps

    @cute.jit
    def sums_of_columns(self, share: Share, partials: Int32, dealt: Int32) -> PartialSums:
        """What this thread adds up of the CTA's strips of down."""
        thread, own, per_column = (
            cute.arch.thread_idx()[0],
            PartialSums(Int32(0), Int32(0)),
            self.shares.steps_of_column(share.active),
        )
        column, quad, _ = self.place_of(thread)
        begin = column * per_column - share.skipped
        if const_expr(self.layer.in_order):
            own = PartialSums(partials + (column * self.layer.choices * STRIP_N + quad * 4) * 4, Int32(0))
        elif (column < share.columns) & (share.active > 0):
            end = cutlass.min(begin + per_column, share.steps)
            own = self.sums_of(thread, partials, cutlass.max(begin, 0), end, dealt)
        return own

    @cute.jit
    def store_sums(self, t: Tensors, c: Choices, share: Share, own: PartialSums, groups: Groups) -> None:
        """Add the warps' sums and biases, and store them. groups: those with steps of the thread's strip of down."""
        layer = self.layer
        column, quad, token = self.place_of(cute.arch.thread_idx()[0])
        if (column < share.columns) & (token < t.out.shape[0]):
            if const_expr(layer.in_order):
                sums = self.sum_of_choices(c, own.partials, token)
            else:
                sums = [self.epilogue.affine(value, None, None) for value in self.sum_of(own)]
            if const_expr(layer.down_bias and not layer.in_order):
                at = (column * layer.tokens + token) * STRIP_N + quad * 4
                sums = [value + c.biases[at + j] for j, value in enumerate(sums)]
            feature = (share.column + column * self.shares.column_stride) * STRIP_N + quad * 4
            at = t.out.iterator.toint() + (Int64(token) * layer.features + feature) * 2
            if const_expr(layer.split):
                self.add_parts(t, groups, token, quad, sums, at)
            else:
                store_global(at, self.rounded(sums), Boolean(True))

    @cute.jit
    def sum_of_choices(self, c: Choices, rows: Int32, token: Int32) -> list[Float32]:
        """Four weighted sums of rows of down, rounded to x's dtype, in the order of a token's choices. rows: address of
        the first choice's."""
        layer = self.layer
        sums = cute.make_rmem_tensor((4,), Float32)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(layer.top_k):
            choice = token * layer.top_k + j
            first, factor = c.firsts[choice], c.weights[choice]
            if first >= 0:
                words = self.rounded(load_shared_f32x4(rows + first * (STRIP_N * 4)))
                for i, value in enumerate(halves_to_floats(layer.kind, words)):
                    sums[i] = sums[i] + factor * value
        return [sums[i] for i in range(4)]

    @cute.jit
    def add_parts(self, t: Tensors, groups: Groups, token: Int32, quad: Int32, part: list[Float32], to: Int64) -> None:
        """Add up what CTAs have of four sums of a strip, two as one, and store them. CTAs of groups side by side meet,
        then those of pairs of groups, until one has the sums of all: who comes first leaves what it has where they
        meet, never zeros, and who comes second adds that."""
        (first, last), neighbours = groups, self.layer.neighbours
        group, member = divided(cute.arch.block_idx()[0], neighbours)
        begin, width, pairs = group - first, Int32(1), Int32(3)
        sums = cute.make_rmem_tensor((4,), Float32)
        for j in cutlass.range_constexpr(4):
            sums[j] = part[j]
        while width < last + 1 - first:
            begin -= begin & width
            right, others = first + begin + width, []
            for p in cutlass.range_constexpr(2):
                own = [float_word(sums[2 * p + j]) for j in range(2)]
                own[0] = Int32(cutlass.select_((own[0] | own[1]) == 0, Int32(-(2**31)), own[0]))  # -0.0
                meet = (right <= last) & ((pairs >> p) & 1 != 0)
                others.append(
                    exchange(self.meeting_at(t, right * neighbours + member, token, quad) + Int64(p * 8), own, meet)
                )
            for p in cutlass.range_constexpr(2):
                if (right <= last) & ((others[p][0] | others[p][1]) == 0):
                    pairs = pairs & ~(1 << p)
                for j in cutlass.range_constexpr(2):
                    sums[2 * p + j] = sums[2 * p + j] + to_float("f32", others[p][j])
            width *= 2
        words = self.rounded([sums[j] for j in range(4)])
        for p in cutlass.range_constexpr(2):
            store_global(to + Int64(p * 4), [words[p]], (pairs >> p) & 1 != 0)

    def meeting_at(self, t: Tensors, right: Int32, token: Int32, quad: Int32) -> Int64:
        """The address where four sums of CTAs below ``right``, and of it and CTAs above, meet."""
        layer = self.layer
        offset = right * layer.part_bytes + (token * STRIP_N + quad * 4) * 4
        return t.scratch.iterator.toint() + Int64(layer.hidden_bytes + offset)

    def rounded(self, sums: list[Float32]) -> list[Int32]:
        return [pack_half2(self.layer.kind, sums[j], sums[j + 1]) for j in (0, 2)]
