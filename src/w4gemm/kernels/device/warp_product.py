"""Products of one warp by mma.sync m16n8k16: strips of 16 rows of the weight, decoded in registers, times x."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from w4gemm.kernels.variant import adds_zeros_by_block
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import WeightOperand
from w4gemm.packing.codecs.integers_decode import pair
from w4gemm.ptx.arithmetic import half_to_float, mma_sync, pack_half2

Words = tuple[Int32, ...]
Codes = Sequence[Sequence[Words]]
"""Code words [strip][8 steps][words of a step]."""
Scales = Callable[[int, int], Words]
"""Function of strip and group that gives the scale words."""
OperandB = tuple[Int32, Int32]
"""Registers of x of a step: 16 columns of eight tokens."""
Fragments = Sequence[Sequence[OperandB]]
"""Those of a block of columns [token block][8 steps]."""


def _added(sums: Sequence[Sequence[Float32]]) -> list[Float32]:
    """The sums of several chains."""
    total = list(sums[0])
    for others in sums[1:]:
        total = [x + y for x, y in zip(total, others, strict=True)]
    return total


@dataclass(frozen=True)
class GroupColumns:
    """Beside few tokens, the eight columns of x that a matrix instruction multiplies are the tokens of several scale
    groups. Column ``slot * tokens + t`` has token t's x where that belongs to group ``slot`` of a set of groups, and
    zeros elsewhere. So the sums of a set are one chain of instructions, and a lane scales those of its two columns.

    Args:
        tokens: 1, 2 or 4.
        slots: groups of a set.
        groups: of a block of 128 columns.
        zeros: True if the lanes behind those of a single set's groups multiply the groups' zero points by the sums of
            x, where the others multiply scales by those of codes times x.
    """

    tokens: int
    slots: int
    groups: int
    zeros: bool = False

    @classmethod
    def of(cls, tokens: int, block: Block) -> GroupColumns:
        """As many groups in a set as there are columns for."""
        slots = min(8 // tokens, block.groups)
        return cls(tokens, slots, block.groups, block.has_zero and slots == block.groups and 4 >= slots * tokens >= 2)

    ZEROS = 7
    """Row of x in shared memory that holds zeros, behind those of the tokens."""

    @property
    def sets(self) -> int:
        return self.groups // self.slots

    @property
    def of_lane(self) -> int:
        """Groups that a lane scales sums of."""
        return self.sets * (2 if self.tokens == 1 else 1)

    def number(self, set: int, column: int) -> int:
        """Which of the lane's groups one of its two columns belongs to."""
        return set * 2 + column if self.tokens == 1 else set

    def group(self, number: int, lane: Int32) -> Int32:
        """The group of this number. Lanes without one take another, beside sums of 0."""
        set, column = divmod(number, 2) if self.tokens == 1 else (number, 0)
        return (lane % 4 * 2 + column) // self.tokens % self.slots + set * self.slots

    def is_zero(self, lane: Int32) -> Int32:
        """1 if a lane multiplies zero points, else 0. Lanes without a group are like either."""
        return lane % 4 * 2 // (self.slots * self.tokens) % 2

    def own_sums(self, x_sums: Sequence[Float32]) -> list[Float32]:
        """Sums of x of a lane's zero points; 0 if it multiplies scales. x_sums: of the lane's own columns."""
        lanes = self.slots * self.tokens // 2
        own = cute.arch.lane_idx() % 4 // lanes == 1
        sums = [cute.arch.shuffle_sync_bfly(total, lanes) for total in x_sums[:2]]
        return [Float32(cutlass.select_(own, total, Float32(0.0))) for total in sums] * 2

    def row(self, group: Int32, column: Int32, tokens: int) -> Int32:
        """The row of x in shared memory for a column, where x belongs to a group. tokens: rows that there are."""
        token = column % self.tokens
        own = (group % self.slots == column // self.tokens) & (token < tokens)
        return Int32(cutlass.select_(own, token, Int32(self.ZEROS)))

    def added_up(self, sums: list[Float32]) -> list[Float32]:
        """A lane's sums (rows g, g + 8; two columns) over all slots, for the columns of the first."""
        if self.tokens == 1:
            sums = [sums[row] + sums[row + 1] for row in (0, 0, 2, 2)]
        for lanes in (1, 2):
            if 2 * lanes >= self.tokens:
                sums = [total + cute.arch.shuffle_sync_bfly(total, lanes) for total in sums]
        return sums


class StripLevels(NamedTuple):
    """Scales of two levels of a strip."""

    scales: Iterable[tuple[Float32, Float32]]
    """By group: of rows g and g + 8."""
    words: Words
    """The words of scales and zero points of two groups: even lanes have groups 0 and 1, odd ones 2 and 3."""


@dataclass(frozen=True)
class WarpProduct:
    """Adds the products of a packed block's columns to accumulators. No control flow of the device: plain Python.

    Codes are multiplied as exact integers u - z if the decoder can do so; a group's products then meet its scale in
    float32, so scales of either 16-bit dtype lose nothing. A float zero point needs the sum of x over the group, which
    takes one more matrix instruction with A = 1. Codes times small scales of two levels are exact too; a block's
    products then meet its factor.

    Args:
        weight: facts of the weight's format.
        decoder: its decoder, made with ``allow_sum_scale``.
        token_blocks: blocks of eight tokens.
        columns: if the columns of x are the scale groups of few tokens.
        chains: most sums of a group that its instructions take in turn, two and more each, because each waits for the
            last one with its sums.
        scaled: True if weights are multiplied with their scales, rounded to x's dtype, whatever the decoder can do.
    """

    weight: WeightOperand
    decoder: Any
    token_blocks: int
    columns: GroupColumns | None = None
    chains: int = 1
    scaled: bool = False

    def multiply(
        self, acc: cute.Tensor, first: int, words: Codes, scales: Scales, x_fragments: Fragments, table: Int32
    ) -> None:
        """acc += the weights of some strips @ x.T, group by group.

        Args:
            acc: float32 (4, token blocks, strips).
            first: the strip of acc that the first strip of ``words`` is.
            table: address of the thread's copies of the decoder's table, see own_pairs.
        """
        if self.scaled or not self.decoder.separate_scales:
            self._multiply_scaled(acc, first, words, scales, x_fragments)
            return
        if self.columns is not None:
            self._multiply_columns(self.columns, acc, first, words, scales, x_fragments[0], table)
            return
        if self.decoder.factors_on_sums:
            self._multiply_levels(acc, first, words, scales, x_fragments)
            return
        block = self.weight.block
        if adds_zeros_by_block(block, first + len(words)):
            self._multiply_zero_levels(acc, first, words, scales, x_fragments)
            return
        steps = block.scale_group // 16
        for g in range(block.groups):
            x_sums = [self._sum_x(x_fragments[tb], g * steps, steps) for tb in range(self.token_blocks)]
            for strip in range(len(words)):
                scale_words = scales(strip, g)
                offsets = self.decoder.offsets(scale_words, table)
                sums = self._group_sums(words[strip], x_fragments, range(g * steps, (g + 1) * steps), offsets)
                values = self.decoder.scales_and_zeros(scale_words, g % block.groups_per_word)
                for tb in range(self.token_blocks):
                    for i in range(4):
                        scale, zero = values[i // 2]
                        total = acc[i, tb, first + strip] + scale * sums[tb][i]
                        acc[i, tb, first + strip] = total if zero is None else total + zero * x_sums[tb][i]

    def _group_sums(
        self, words: Sequence[Words], x_fragments: Fragments, steps: range, offsets: Any
    ) -> list[list[Float32]]:
        """The sums of a group's codes times x, without scales, by token block."""
        count = max(1, min(self.chains, len(steps) // 2))
        chains = [[[Float32(0.0)] * 4 for _ in range(self.token_blocks)] for _ in range(count)]
        for step in steps:
            a = self.decoder.decode_exact(words[step], offsets)
            sums = chains[step % count]
            for tb in range(self.token_blocks):
                sums[tb] = mma_sync(self.weight.kind, sums[tb], a, x_fragments[tb][step])
        return [_added(of_block) for of_block in zip(*chains, strict=True)]

    def _multiply_scaled(
        self, acc: cute.Tensor, first: int, words: Codes, scales: Scales, x_fragments: Fragments
    ) -> None:
        """Multiply weights that are decoded together with their scales."""
        block, together = self.weight.block, self.weight.block.groups_per_word
        steps = block.scale_group // 16
        chains = [
            [self._chains_of(acc, tb, first + strip) for tb in range(self.token_blocks)] for strip in range(len(words))
        ]
        for group, strip in itertools.product(range(0, block.groups, together), range(len(words))):
            scale_words = scales(strip, group)
            for field in range(min(together, block.groups)):
                prepared = self.decoder.prepare(scale_words, Int32(0), field)
                for step in range((group + field) * steps, (group + field + 1) * steps):
                    a = self.decoder.decode(words[strip][step], prepared)
                    for tb in range(self.token_blocks):
                        sums = chains[strip][tb]
                        sums[step % self.chains] = mma_sync(
                            self.weight.kind, sums[step % self.chains], a, x_fragments[tb][step]
                        )
        for strip, of_strip in enumerate(chains):
            for tb, sums in enumerate(of_strip):
                for i, y in enumerate(_added(sums)):
                    acc[i, tb, first + strip] = y

    def _chains_of(self, acc: cute.Tensor, token_block: int, strip: int) -> list[Sequence[Float32]]:
        """Sums of chains, the first of them what there is already."""
        return [[acc[i, token_block, strip] for i in range(4)], *([Float32(0.0)] * 4 for _ in range(1, self.chains))]

    def _multiply_columns(
        self,
        columns: GroupColumns,
        acc: cute.Tensor,
        first: int,
        words: Codes,
        scales: Scales,
        x: Sequence[OperandB],
        table: Int32,
    ) -> None:
        """Multiply few tokens, whose scale groups lie in the columns of x. A set of groups is one chain of
        instructions, and a lane scales the sums of its own two columns. ``scales``: of a strip and one of the lane's
        groups."""
        steps = len(x) // columns.sets
        for i in range(columns.sets):
            of_lane = [[scales(strip, columns.number(i, column)) for column in range(2)] for strip in range(len(words))]
            offsets = [self.decoder.offsets(own[0], table) for own in of_lane]
            by_strip, x_sums = self._sums_by_strip(words, x, range(i * steps, (i + 1) * steps), offsets)
            if columns.zeros:
                x_sums = columns.own_sums(x_sums)
            for strip, sums in enumerate(by_strip):
                if columns.zeros:
                    levels = [self.decoder.levels(*own) for own in of_lane[strip]]
                    values = [[(level, None) for level in rows] for rows in levels]
                    sums = _added([sums, x_sums])
                else:
                    values = [self.decoder.scales_and_zeros(own) for own in of_lane[strip]]
                for at in range(4):
                    scale, zero = values[at % 2][at // 2]
                    total = acc[at, 0, first + strip] + scale * sums[at]
                    acc[at, 0, first + strip] = total if zero is None else total + zero * x_sums[at]

    def _sums_by_strip(
        self, words: Codes, x: Sequence[OperandB], steps: range, offsets: Sequence[Any]
    ) -> tuple[list[Sequence[Float32]], Sequence[Float32]]:
        """The sums of codes times x of each strip, and those of x for float zero points. Instructions of all strips
        take turns, because each waits for the one before it in its chain."""
        sums: list[Sequence[Float32]] = [[Float32(0.0)] * 4 for _ in words]
        x_sums: Sequence[Float32] = [Float32(0.0)] * 4
        for step in steps:
            x_sums = self._with_sum(x_sums, x[step])
            for strip, of_strip in enumerate(words):
                a = self.decoder.decode_exact(of_strip[step], offsets[strip])
                sums[strip] = mma_sync(self.weight.kind, sums[strip], a, x[step])
        return sums, x_sums

    def _multiply_levels(
        self, acc: cute.Tensor, first: int, words: Codes, scales: Scales, x_fragments: Fragments
    ) -> None:
        """Multiply codes times their scales of few bits, which are exact together. Their sums over a block are
        multiplied by its factors."""
        block, together = self.weight.block, self.weight.block.groups_per_word
        steps = block.scale_group // 16
        for strip in range(len(words)):
            sums = [[Float32(0.0)] * 4 for _ in range(self.token_blocks)]
            scale_words: Words = ()
            for group in range(block.groups):
                if group % together == 0:
                    scale_words = scales(strip, group)
                prepared = self.decoder.prepare_levels(scale_words, group % together)
                for step in range(group * steps, (group + 1) * steps):
                    a = self.decoder.decode_levels(words[strip][step], prepared)
                    for tb in range(self.token_blocks):
                        sums[tb] = mma_sync(self.weight.kind, sums[tb], a, x_fragments[tb][step])
            factors = self.decoder.factors(scale_words)
            for tb in range(self.token_blocks):
                for i in range(4):
                    acc[i, tb, first + strip] = acc[i, tb, first + strip] + factors[i // 2] * sums[tb][i]

    def _multiply_zero_levels(
        self, acc: cute.Tensor, first: int, words: Codes, scales: Scales, x_fragments: Fragments
    ) -> None:
        """Multiply codes in groups of 32 columns whose scales and zero points have two levels. One more instruction
        multiplies the zero points of all groups of a strip, without their factor, by the sums of x."""
        odd = cute.arch.lane_idx() % 2 == 1
        x_sums = [self._sums_in_parts(x) for x in x_fragments]
        for strip in range(len(words)):
            pairs = scales(strip, 0), scales(strip, 2)
            own = tuple(Int32(cutlass.select_(odd, b, a)) for a, b in zip(*pairs, strict=True))
            self._add_zeros(acc, first + strip, own, x_sums)
            values = [self.decoder.scales_and_zeros(pairs[g // 2], g % 2) for g in range(4)]
            by_group = [(low[0], high[0]) for low, high in values]
            self._add_groups(acc, first + strip, words[strip], StripLevels(by_group, own), x_fragments)

    def multiply_shared(
        self, acc: cute.Tensor, first: int, words: Codes, levels: Callable[[int], StripLevels], x_fragments: Fragments
    ) -> None:
        """Like :meth:`multiply`, with scales of two levels that lanes have prepared for one another, by strip."""
        zeros = self.weight.zero == "float"
        x_sums = [self._sums_in_parts(x) for x in x_fragments] if zeros else []
        for strip in range(len(words)):
            own = levels(strip)
            if zeros:
                self._add_zeros(acc, first + strip, own.words, x_sums)
            self._add_groups(acc, first + strip, words[strip], own, x_fragments)

    def _add_zeros(self, acc: cute.Tensor, strip: int, words: Words, x_sums: Sequence[OperandB]) -> None:
        """Add the zero points of a strip times the sums of x. words: of a lane's two groups."""
        levels, factors = self.decoder.zero_levels(words), self.decoder.zero_factors(words)
        for tb in range(self.token_blocks):
            sums = mma_sync("bf16", [Float32(0.0)] * 4, (*levels, *levels), x_sums[tb])
            for i in range(4):
                acc[i, tb, strip] = acc[i, tb, strip] + factors[i // 2] * sums[i]

    def _add_groups(
        self, acc: cute.Tensor, strip: int, words: Sequence[Words], levels: StripLevels, x_fragments: Fragments
    ) -> None:
        """Add the codes of a strip times x, times their scales."""
        steps = self.weight.block.scale_group // 16
        offsets = self.decoder.offsets(levels.words, Int32(0))
        for g, scales in enumerate(levels.scales):
            sums = self._group_sums(words, x_fragments, range(g * steps, (g + 1) * steps), offsets)
            for tb in range(self.token_blocks):
                for i in range(4):
                    acc[i, tb, strip] = acc[i, tb, strip] + scales[i // 2] * sums[tb][i]

    def _sums_in_parts(self, x: Sequence[OperandB]) -> OperandB:
        """The sums of x of four groups as operand B: rows are two groups of each lane of a quad, columns are tokens.
        Even lanes have groups 0 and 1, odd ones 2 and 3. Three bf16 numbers add up to a float32: the former two lanes
        have the first and the third, the latter two the second and zeros."""
        ones, sums = [pair(1.0, 1.0, self.weight.kind)] * 2, []
        for g in range(4):  # x as operand A: the halves of both steps' columns are rows of their own
            halves = mma_sync(self.weight.kind, [Float32(0.0)] * 4, (*x[2 * g], *x[2 * g + 1]), ones)
            sums.append(halves[0] + halves[2])
        lane = cute.arch.lane_idx()
        own = [Float32(cutlass.select_(lane % 2 == 1, sums[2 + i], sums[i])) for i in range(2)]
        parts = []
        for _ in range(3):
            parts.append(pack_half2("bf16", *own))
            own = [value - half_to_float("bf16", parts[-1], i == 1) for i, value in enumerate(own)]
        latter = lane % 4 >= 2
        former_rows = cutlass.select_(latter, parts[1], parts[0])
        return Int32(former_rows), Int32(cutlass.select_(latter, Int32(0), parts[2]))

    def _sum_x(self, fragments: Sequence[OperandB], first: int, count: int) -> Sequence[Float32]:
        """The sum of x over ``count`` steps, those of a group, for float zero points, divided by ``exact_scale`` as
        sums of exact numbers are: a product with ones, or less."""
        sums: Sequence[Float32] = [Float32(0.0)] * 4
        for step in range(first, first + count):
            sums = self._with_sum(sums, fragments[step])
        return sums

    def _with_sum(self, sums: Sequence[Float32], x: OperandB) -> Sequence[Float32]:
        """``sums`` of :meth:`_sum_x` with those of another step."""
        if self.weight.zero != "float":
            return sums
        unit = 1 / self.decoder.exact_scale
        return mma_sync(self.weight.kind, sums, [pair(unit, unit, self.weight.kind)] * 4, x)
