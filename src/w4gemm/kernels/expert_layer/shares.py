"""Which steps each CTA and each of its warps has: :class:`Shares`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from w4gemm.kernels.expert_layer.spec import ExpertLayer
from w4gemm.kernels.expert_layer.values import Division, Groups, Share, Steps

_SCHEDULERS = 4
"""Of a multiprocessor; warp w is one of number w % 4."""


def quotient(x: Int32, by: Int32 | int) -> Int32:
    """Divide numbers that are not negative: in half the instructions of signed ones."""
    return Int32(Uint32(x) // Uint32(by))


def divided(x: Int32, by: Int32 | int) -> Division:
    """The quotient and the remainder of numbers that are not negative."""
    whole = quotient(x, by)
    return Division(whole, x - whole * by)


class Shares:
    """Divides the steps of a layer, see :mod:`.kernel`."""

    def __init__(self, layer: ExpertLayer) -> None:
        self.layer = layer
        self.column_stride = layer.neighbours if layer.split else layer.ctas

    @cute.jit
    def of(self, index: Int32, cta: Int32, active: Int32) -> Share:
        """The units of share ``index``, and the strips of down of CTA ``cta``."""
        layer = self.layer
        steps, bounds = active * (layer.strips_up * layer.steps_up), []
        for c in (index, index + 1):
            begin = quotient(c * steps, layer.ctas)
            bounds.append(quotient(begin + layer.steps_up // 2, layer.steps_up))
        units = bounds[1] - bounds[0]
        rounds = quotient(units + layer.units_of_round - 1, layer.units_of_round)
        if const_expr(layer.in_order):
            rounds = cutlass.min(units, 1)
        chunk = quotient(units + cutlass.max(rounds, 1) - 1, cutlass.max(rounds, 1))
        per_column, column, skipped = self.steps_of_column(active), cta, Int32(0)
        columns = quotient(layer.columns - cta + layer.ctas - 1, layer.ctas)
        steps = columns * per_column
        if const_expr(layer.split):
            each, (group, member) = self.down_steps_of_cta(active), divided(cta, layer.neighbours)
            steps = layer.columns // layer.neighbours * per_column
            steps = cutlass.max(cutlass.min(steps - group * each, each), 0)
            row, skipped = divided(group * each, per_column)
            column = row * layer.neighbours + member
            columns = cutlass.select_(steps > 0, quotient(skipped + steps + per_column - 1, per_column), Int32(0))
        return Share(bounds[0], units, chunk, rounds, column, columns, skipped, steps, active)

    def steps_of_column(self, active: Int32) -> Int32:
        """Steps of a strip of down; 1 if no expert was chosen."""
        return cutlass.max(active * self.layer.steps_down, 1)

    def down_steps_of_cta(self, active: Int32) -> Int32:
        """Steps of down of every CTA but those of the last group, if strips are split."""
        columns, groups = (count // self.layer.neighbours for count in (self.layer.columns, self.layer.ctas))
        return quotient(columns * self.steps_of_column(active) + groups - 1, groups)

    @cute.jit
    def steps_of(self, share: Share, round: Int32, rank: Int32) -> Steps:
        """The steps of a round of the warp of a rank: some have one more than others; one unit, if sums are in order,
        where a round is all of gate_up."""
        layer = self.layer
        if const_expr(layer.in_order):
            up, pairs = round < share.rounds, share.columns * share.active
            units = Int32(cutlass.select_(up, share.units, pairs))
            each = Int32(cutlass.select_(up, Int32(layer.steps_up), Int32(layer.steps_down)))
            first, behind = (quotient(r * units, layer.warps) * each for r in (rank, rank + 1))
            return Steps(first, behind - first, Int32(1))
        units = cutlass.max(cutlass.min(share.units - round * share.chunk, share.chunk), 0)
        steps = units * layer.steps_up
        if round == share.rounds:
            steps = cutlass.select_(share.active > 0, share.steps, Int32(0))
        dealt = cutlass.max(steps, layer.warps)
        first, behind = (cutlass.min(quotient(r * dealt, layer.warps), steps) for r in (rank, rank + 1))
        return Steps(first, behind - first, dealt)

    def rank_of(self, step: Int32, dealt: Int32) -> Int32:
        """The rank of the warp that has a step of a round."""
        return quotient((step + 1) * self.layer.warps - 1, dealt)

    def rank(self, warp: Int32) -> Int32:
        """A warp's place in the order in which warps have steps: those of a scheduler follow one another, so that all
        schedulers have about equally many."""
        return warp % _SCHEDULERS * (self.layer.warps // _SCHEDULERS) + warp // _SCHEDULERS

    def groups_of(self, share: Share, column: Int32) -> Groups:
        """The groups of CTAs that have steps of a strip of down, if strips are split."""
        per_column, each = self.steps_of_column(share.active), self.down_steps_of_cta(share.active)
        begin = (quotient(share.column, self.layer.neighbours) + column) * per_column
        return Groups(quotient(begin, each), quotient(begin + per_column - 1, each))
