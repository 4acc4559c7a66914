"""Which experts a launch of the layer of experts has, and which tokens chose them: :class:`Tally`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from w4gemm.kernels.expert_layer.spec import ExpertLayer
from w4gemm.kernels.expert_layer.values import Choices, GivenChoice, OwnChoice, PlaceOfExperts, Tensors
from w4gemm.ptx.memory import load_shared, shared_address


class Tally:
    """Fills :class:`Choices` in shared memory. Weights are requested as soon as the experts are known, so their factors
    follow behind the first requests.

    Up to 16 choices each warp tallies by itself, a choice a lane, without a barrier, and the first one stores what all
    read later. More are tallied by all warps together, behind two barriers, an expert a thread; a third one follows.
    """

    def __init__(self, layer: ExpertLayer) -> None:
        self.layer = layer
        self.router = None if layer.choice is None else layer.choice.math()

    @property
    def alone(self) -> bool:
        return self.layer.tallies > 1

    @cute.jit
    def read(self, t: Tensors, thread: Int32) -> GivenChoice:
        """The thread's choice; of expert -1 if there is none, or the launch chooses."""
        expert, weight = Int32(-1), Float32(0.0)
        choice = thread % 32 if const_expr(self.alone) else thread
        if const_expr(self.layer.choice is None):
            if choice < cutlass.min(t.ids.shape[0], self.layer.choices):
                expert, weight = self.expert_of(t, Int64(t.ids[choice])), t.weights[choice]
            if const_expr(not self.alone):
                cute.arch.sync_warp()  # else ptxas moves these loads behind the copies of x
        return GivenChoice(expert, weight)

    @cute.jit
    def count(
        self, t: Tensors, c: Choices, choice: GivenChoice, thread: Int32
    ) -> tuple[Int32, OwnChoice | PlaceOfExperts]:
        """Fill the experts of ``c``, and return how many were chosen, and what :meth:`store_factors` needs."""
        if const_expr(self.alone):
            active, own = self.count_alone(c, choice, thread % 32)
        else:
            active, own = self.count_together(t, c, choice, thread)
        return active, own

    @cute.jit
    def store_factors(self, t: Tensors, c: Choices, own: OwnChoice | PlaceOfExperts, thread: Int32) -> None:
        """Fill the rest of ``c``, which is there for all threads behind the next barrier."""
        if const_expr(self.alone):
            if thread < 32:
                if const_expr(self.layer.in_order):
                    self.store_places_alone(c, own, thread)
                else:
                    self.store_factors_alone(t, c, own, thread)
        elif const_expr(self.layer.in_order):
            self.store_places_together(c, own, thread)
        else:
            self.store_factors_together(t, c, own, thread)

    @cute.jit
    def count_together(self, t: Tensors, c: Choices, own: GivenChoice, thread: Int32) -> tuple[Int32, PlaceOfExperts]:
        layer, lane = self.layer, thread % 32
        if const_expr(not layer.in_order):
            for i in cutlass.range(thread, layer.choices * layer.tokens, layer.threads, unroll=1):
                c.factors[i] = Float32(0.0)
                if const_expr(layer.down_scale):
                    c.scaled[i] = Float32(0.0)
        if const_expr(layer.choice is not None):
            self.choose(t, c, thread)
        else:
            if thread < -(-layer.choices // 4) * 4:
                c.ids[thread] = own.expert
                if thread < layer.choices:
                    c.weights[thread] = own.weight
        cute.arch.sync_threads()
        masks = []
        for first in cutlass.range_constexpr(0, layer.experts, layer.threads):
            expert, mask = first + thread, Int32(0)
            if first + thread // 32 * 32 < layer.experts:
                mask = self.mask_of(shared_address(c.ids.iterator), expert)
                bits = cute.arch.vote_ballot_sync(mask != 0)
                if lane == 0:
                    c.present[expert // 32] = bits
            masks.append(mask)
        cute.arch.sync_threads()
        present = Int32(0)
        if lane < -(-layer.experts // 32):
            present = c.present[lane]
        count = Int32(cute.arch.popc(present))
        scanned = count
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(scanned, 1 << step)
            if lane >= 1 << step:
                scanned += before
        active, before = cute.arch.shuffle_sync(scanned, 31), scanned - count
        for i in cutlass.range_constexpr(len(masks)):
            expert = i * layer.threads + thread
            slot = self.slot_of(expert, present, before)
            if masks[i] != 0:
                c.experts[slot] = expert
                c.masks[slot] = masks[i]
        cute.arch.sync_threads()
        return active, PlaceOfExperts(present, before)

    @cute.jit
    def store_factors_together(self, t: Tensors, c: Choices, places: PlaceOfExperts, thread: Int32) -> None:
        layer = self.layer
        choice = cutlass.min(thread, layer.choices - 1)
        expert, token = c.ids[choice], choice // layer.top_k
        slot = self.slot_of(cutlass.max(expert, 0), *places)
        if thread < layer.choices and expert >= 0:
            factor = Float32(0.0)
            for j in cutlass.range_constexpr(layer.top_k):
                other = token * layer.top_k + j
                factor += Float32(cutlass.select_(c.ids[other] == expert, c.weights[other], Float32(0.0)))
            c.factors[slot * layer.tokens + token] = factor
            if const_expr(layer.down_scale):
                c.scaled[slot * layer.tokens + token] = factor * t.down_scale[expert]

    @cute.jit
    def store_places_together(self, c: Choices, places: PlaceOfExperts, thread: Int32) -> None:
        """:meth:`store_factors_together` for sums in order."""
        layer = self.layer
        choice = cutlass.min(thread, layer.choices - 1)
        expert, token, first = c.ids[choice], choice // layer.top_k, Int32(-1)
        slot = self.slot_of(cutlass.max(expert, 0), *places)
        if thread < layer.choices:
            for j in reversed(range(layer.top_k)):
                other = token * layer.top_k + j
                first = Int32(cutlass.select_((c.ids[other] == expert) & (expert >= 0), other, first))
            c.firsts[choice] = first
            if expert >= 0:
                c.places[slot * layer.tokens + token] = first

    @cute.jit
    def count_alone(self, c: Choices, choice: GivenChoice, lane: Int32) -> tuple[Int32, OwnChoice]:
        expert = choice.expert
        again, below = Boolean(False), Int32(0)
        others = [cute.arch.shuffle_sync(expert, i) for i in range(self.layer.choices)]
        for i, other in enumerate(others):
            again = again | ((other == expert) & (lane > i))
        firsts = cute.arch.vote_ballot_sync((expert >= 0) & ~again)  # choices of an expert that no earlier one is of
        for i, other in enumerate(others):
            below += Int32(cutlass.select_(other < expert, (firsts >> i) & 1, Int32(0)))
        if expert >= 0:
            c.experts[below] = expert
        cute.arch.sync_warp()
        return Int32(cute.arch.popc(firsts)), OwnChoice(expert, choice.weight, below)

    @cute.jit
    def store_factors_alone(self, t: Tensors, c: Choices, own: OwnChoice, lane: Int32) -> None:
        layer, mask, factor = self.layer, Int32(0), Float32(0.0)
        for i in cutlass.range(lane, layer.choices * layer.tokens, 32, unroll=1):
            c.factors[i] = Float32(0.0)
            if const_expr(layer.down_scale):
                c.scaled[i] = Float32(0.0)
        cute.arch.sync_warp()
        token = lane // layer.top_k
        for i in cutlass.range_constexpr(layer.choices):
            same = cute.arch.shuffle_sync(own.expert, i) == own.expert
            weight = cute.arch.shuffle_sync(own.weight, i)
            mask = mask | Int32(cutlass.select_(same, Int32(1 << i // layer.top_k), Int32(0)))
            factor += Float32(cutlass.select_(same & (token == i // layer.top_k), weight, Float32(0.0)))
        if own.expert >= 0:
            c.masks[own.slot] = mask
            c.factors[own.slot * layer.tokens + token] = factor
            if const_expr(layer.down_scale):
                c.scaled[own.slot * layer.tokens + token] = factor * t.down_scale[own.expert]

    @cute.jit
    def store_places_alone(self, c: Choices, own: OwnChoice, lane: Int32) -> None:
        """:meth:`store_factors_alone` for sums in order."""
        layer, mask, first = self.layer, Int32(0), Int32(-1)
        token = lane // layer.top_k
        for i in reversed(range(layer.choices)):
            same = (cute.arch.shuffle_sync(own.expert, i) == own.expert) & (own.expert >= 0)
            mask = mask | Int32(cutlass.select_(same, Int32(1 << i // layer.top_k), Int32(0)))
            first = Int32(cutlass.select_(same & (token == i // layer.top_k), Int32(i), first))
        if lane < layer.choices:
            c.firsts[lane], c.weights[lane] = first, own.weight
        if own.expert >= 0:
            c.masks[own.slot] = mask
            c.places[own.slot * layer.tokens + token] = first

    def mask_of(self, ids: Int32, expert: Int32) -> Int32:
        """The tokens that chose an expert, one a bit."""
        mask = Int32(0)
        for first in range(0, self.layer.choices, 4):
            for choice, other in enumerate(load_shared(ids + first * 4, 4), first):
                if choice < self.layer.choices:
                    bit = Int32(1 << choice // self.layer.top_k)
                    mask = mask | Int32(cutlass.select_(other == expert, bit, Int32(0)))
        return mask

    def slot_of(self, expert: Int32, present: Int32, before: Int32) -> Int32:
        """The number of chosen experts below one; called by a whole warp, whose lane i holds the bits of experts 32 i
        and on, and the number of chosen ones below them."""
        bits = cute.arch.shuffle_sync(present, expert // 32) & ((1 << expert % 32) - 1)
        return cute.arch.shuffle_sync(before, expert // 32) + Int32(cute.arch.popc(bits))

    @cute.jit
    def choose(self, t: Tensors, c: Choices, thread: Int32) -> None:
        """Choose each token's experts by its logits, a warp for each token: as the launch of expert_choice does."""
        layer, lane = self.layer, thread % 32
        for token in cutlass.range(cute.arch.make_warp_uniform(thread // 32), layer.tokens, layer.warps, unroll=1):
            expert, weight = Int32(-1), Float32(0.0)
            if token < t.logits.shape[0]:
                expert, weight = self.router.choose(t.logits, t.router_bias, token)
            if lane < layer.top_k:
                c.ids[token * layer.top_k + lane] = self.expert_of(t, Int64(expert))
                c.weights[token * layer.top_k + lane] = weight
        if const_expr(layer.choices % 4 != 0):
            if thread < 4 - layer.choices % 4:
                c.ids[layer.choices + thread] = Int32(-1)

    @cute.jit
    def expert_of(self, t: Tensors, number: Int64) -> Int32:
        """The expert here of the number that was chosen; -1 if it is elsewhere."""
        expert = Int32(-1)
        if const_expr(self.layer.mapped):
            if number >= 0 and number < t.expert_map.shape[0]:
                number = Int64(t.expert_map[Int32(number)])
            else:
                number = Int64(-1)
        if number >= 0 and number < self.layer.experts:
            expert = Int32(number)
        return expert
