"""A dense weight (n, k) in 16 bits to packed blocks: each group's scale, each number's nearest code, in one launch.

A CTA makes one block of 64 rows x 128 columns, a warp one strip of 16 rows. A lane loads the numbers whose codes it
has in the block, so that codes are put into words where they are made. The four lanes of a row agree on the ends of a
group by two shuffles. The ends of groups that reach beyond a block, in columns or rows, are an operand.

The arithmetic is that of :func:`w4gemm.quantize`, each operation rounded once, so that bits are equal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64

from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, HALF_K, LANE_CODES, Block
from w4gemm.packing.codecs.base import Bits, Codec
from w4gemm.packing.codecs.e2m1 import POWER_BIAS
from w4gemm.ptx.arithmetic import (
    divide,
    e4m3_to_halves,
    float_word,
    magnitude,
    maximum,
    minimum,
    pack_e4m3,
    pack_e5m2,
    pack_half2,
    to_float,
)
from w4gemm.ptx.memory import load_global, store_global

THREADS = 128
_STEP_K = 16
"""Columns of a matrix instruction, of which the four lanes of a row have four each."""
_ROUND = 12582912.0
"""1.5 * 2**23: a sum of it and a number up to 2**21 is rounded to an integer, ties to even, in the low bits."""
_LEAST_POWER = 2.0**-126


class Dense(NamedTuple):
    """Tensors on the device: the dense numbers, and the blocks that they are quantized into."""

    even: cute.Tensor
    """(experts, rows, k), contiguous, k even. The rows of the weight or, with ``odd``, its rows 0, 2, 4, ..."""
    odd: cute.Tensor | None
    """Like ``even``: rows 1, 3, 5, ..."""
    channels: cute.Tensor | None
    """float32 (experts, n): the scale of each row, if the codec has them."""
    ends: cute.Tensor | None
    """float32 (experts, n, groups, 2): the least and the largest number of each group, if groups reach beyond a
    block."""
    blocks: cute.Tensor
    """int32 (experts, n blocks, k blocks, words)."""
    refused: cute.Tensor
    """int32 (1,): set to 1 if a number is not finite or beyond the limit."""


class Column(NamedTuple):
    """The place of one of a lane's numbers in a block."""

    half: int
    step: int
    col8: int
    element: int


class LaneRow(NamedTuple):
    """One of a lane's two rows: its numbers of the block, and what is known of them."""

    values: list[list[Float32]]
    """By half, from left to right."""
    exists: Boolean
    scaled: Boolean
    """Whether it has scales."""
    scale: Float32 | None
    """The scale of the whole row."""

    def value(self, column: Column) -> Float32:
        return self.values[column.half][4 * column.step + 2 * column.col8 + column.element]


class WeightQuantizeKernel:
    """The kernel for dense numbers of ``kind`` "f16" or "bf16", of a magnitude of at most ``limit``."""

    def __init__(self, kind: str, format: WeightFormat, codec: Codec, limit: float) -> None:
        self.kind, self.format, self.codec, self.limit = kind, format, codec, limit
        self.block: Block = codec.block(format)
        self.channels = codec.has_channels(format)
        """True if each row has a float32 scale."""

    @cute.jit
    def __call__(
        self,
        even: cute.Tensor,
        odd: cute.Tensor | None,
        channels: cute.Tensor | None,
        ends: cute.Tensor | None,
        blocks: cute.Tensor,
        refused: cute.Tensor,
        n: Int32,
        stream: Any,
    ) -> None:
        """Launch; tensors as in :class:`Dense`."""
        count = blocks.shape[0] * blocks.shape[1] * blocks.shape[2]
        self.kernel(Dense(even, odd, channels, ends, blocks, refused), n).launch(
            grid=[count, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, t: Dense, n: Int32) -> None:
        self.quantize_block(t, n)

    def quantize_block(self, t: Dense, n: Int32) -> None:
        """All of the kernel: without control flow of the device, so plain Python."""
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        strip, lane = thread // 32, thread % 32
        k_blocks, n_blocks, k = t.blocks.shape[2], t.blocks.shape[1], t.even.shape[2]
        first_column = index % k_blocks * BLOCK_K
        first_row = index // k_blocks % n_blocks * BLOCK_N + strip * 16 + lane // 4
        expert = index // k_blocks // n_blocks
        rows = [self.load(t, expert, first_row + 8 * row8, first_column + lane % 4 * 2, n) for row8 in (0, 1)]
        if self.format.scale_rule.block_rows:  # rows past n have the scales of their block, as those before
            rows = [row._replace(scaled=Boolean(True)) for row in rows]
        block = self.block
        target = t.blocks.iterator.toint() + Int64(index) * block.bytes
        words = [[Int32(0)] * (block.bits * LANE_CODES // 32) for _ in range(2)]
        fields: list[list[Int32]] = []
        for group in range(block.groups):
            if t.ends is None:
                ends = [self.checked(t, row, self.ends(row, group, first_column + lane % 4 * 2, k)) for row in rows]
            else:
                column = first_column + group * block.scale_group
                places = [cutlass.min(first_row + 8 * row8, n - 1) + Int64(expert) * n for row8 in (0, 1)]
                beyond = [self.ends_beyond(t.ends, place, column, k) for place in places]
                ends = [self.checked(t, *both) for both in zip(rows, beyond, strict=True)]
            there = first_column + group * block.scale_group < k
            codes, stored = self.quantized(rows, ends, group, there)
            fields.append(stored)
            for (half, position), code in codes.items():
                column = self.column_of(position)
                exists = rows[self.row8_of(position)].exists & (
                    first_column + lane % 4 * 2 + half * HALF_K + column < k
                )
                padded = Int32(cutlass.select_(exists, code, Int32(self.format.element_rule.padding_code)))
                for bits in self.places(position):
                    part = padded & bits.mask
                    words[half][bits.word] ^= part << bits.shift if bits.shift >= 0 else part >> -bits.shift
        for half in (0, 1):
            base, start = target + half * block.half_bytes + strip * block.strip_bytes, 0
            for segment in block.segments:
                part = words[half][start : start + segment.words]
                store_global(base + segment.offset + Int64(lane) * segment.lane_bytes, part, Boolean(True))
                start += segment.words
        scales = target + block.code_bytes + Int64(strip * 8 + lane // 4) * block.pair_bytes
        for run in range(block.runs if block.scale_bits else 0):
            parts = fields[run * block.groups_per_word : (run + 1) * block.groups_per_word]
            together = [self.joined([part[i] for part in parts]) for i in range(len(parts[0]))]
            store_global(scales + run * block.run_bytes, together, lane % 4 == 0)

    # --- where things are

    def places(self, position: int) -> list[Bits]:
        """Where the bits of a lane's code lie in the words of a half."""
        together = 1 + max(place.position for place in self.codec.places)
        count = 1 + max(place.word for place in self.codec.places)
        return [
            place._replace(word=place.word + position // together * count)
            for place in self.codec.places
            if place.position == position % together
        ]

    def row8_of(self, position: int) -> int:
        return position % 2

    def column_of(self, position: int) -> int:
        """The column of a code in its half, for the first lane of a row."""
        step, place = divmod(position, 8)
        return step * _STEP_K + place // 2 % 2 * 8 + place // 4

    def position(self, row8: int, column: Column) -> int:
        return 8 * column.step + row8 + 2 * column.col8 + 4 * column.element

    # --- numbers

    def load(self, t: Dense, expert: Int32, row: Int32, first: Int32, n: Int32) -> LaneRow:
        """Load the lane's numbers of a row, 0 where there are none."""
        k, exists = t.even.shape[2], row < n
        if t.odd is None:
            source = t.even.iterator.toint() + (Int64(expert) * t.even.shape[1] + row) * k * 2
        else:
            starts = [x.iterator.toint() for x in (t.even, t.odd)]
            start = Int64(cutlass.select_(row % 2 == 0, *starts))
            source = start + (Int64(expert) * t.even.shape[1] + row // 2) * k * 2
        values = []
        for half in (0, 1):
            values.append([])
            for step in range(HALF_K // _STEP_K):
                for col8 in (0, 1):
                    column = first + half * HALF_K + step * _STEP_K + col8 * 8
                    word = load_global(source + Int64(column) * 2, 1, exists & (column < k))[0]
                    values[half] += [to_float(self.kind, word, high) for high in (False, True)]
        scale = None
        if t.channels is not None:
            address = t.channels.iterator.toint() + (Int64(expert) * n + row) * 4
            scale = to_float("f32", load_global(address, 1, exists)[0])
        return LaneRow(values, exists, exists, scale)

    def columns(self, group: int) -> list[Column]:
        """The lane's columns of a row in a group, in order."""
        steps = [(half, step) for half in (0, 1) for step in range(HALF_K // _STEP_K)]
        own = [s for s in steps if (s[0] * HALF_K + s[1] * _STEP_K) // self.block.scale_group == group]
        return [Column(*s, col8, i) for s in own for col8 in (0, 1) for i in (0, 1)]

    def checked(self, t: Dense, row: LaneRow, ends: tuple[Float32, Float32]) -> tuple[Float32, Float32]:
        """The ends of a group. Raises the flag of the refused."""
        low, high = ends
        # of a group without columns low is above high; a NaN is in both
        legal = (low >= Float32(-self.limit)) & (high <= Float32(self.limit))
        store_global(t.refused.iterator.toint(), [Int32(1)], (legal == Boolean(False)) & row.exists)
        return ends

    def ends_beyond(self, ends: cute.Tensor, row: Int64, column: Int32, k: Int32) -> tuple[Float32, Float32]:
        """The least and the largest number of the group of a column, of one of the rows of all experts; 0 past k."""
        size = self.format.group_size
        group = Int32(0) if size == PER_COLUMN else column // size
        words = load_global(ends.iterator.toint() + (row * ends.shape[2] + group) * 8, 2, column < k)
        return to_float("f32", words[0]), to_float("f32", words[1])

    def ends(self, row: LaneRow, group: int, first: Int32, k: Int32) -> tuple[Float32, Float32]:
        """The least and the largest number of a row's group, over its four lanes."""
        low, high = Float32(float("inf")), Float32(float("-inf"))
        for column in self.columns(group):
            value = row.value(column)
            exists = first + column.half * HALF_K + column.step * _STEP_K + column.col8 * 8 < k
            low = minimum(low, Float32(cutlass.select_(exists, value, Float32(float("inf")))))
            high = maximum(high, Float32(cutlass.select_(exists, value, Float32(float("-inf")))))
        for offset in (1, 2):
            low = minimum(low, cute.arch.shuffle_sync_bfly(low, offset))
            high = maximum(high, cute.arch.shuffle_sync_bfly(high, offset))
        return low, high

    def quantized(
        self, rows: list[LaneRow], ends: list[tuple[Float32, Float32]], group: int, there: Boolean
    ) -> tuple[dict[tuple[int, int], Int32], list[Int32]]:
        """The codes of a group by half and position, and its words: the fields of both rows' scales and zero points."""
        words, factors = self.stored([self.scale(*end) for end in ends], rows)
        zeros = [Float32(0.0)] * 2
        if self.format.has_zero:
            zeros = [self.integer_zero(end[0], factor) for end, factor in zip(ends, factors, strict=True)]
            words.append(pack_half2(self.scale_kind, *zeros))
        masked = []
        for i, word in enumerate(words):
            if self.block.scale_bits == 32:  # a word of each row
                masked.append(Int32(cutlass.select_(there & rows[i].scaled, word, Int32(0))))
                continue
            for row8, shift in ((0, 0), (1, 16)):
                own = word >> shift & 0xFFFF
                word = word ^ (own ^ Int32(cutlass.select_(there & rows[row8].scaled, own, Int32(0)))) << shift
            masked.append(word)
        codes = {}
        for row8, row in enumerate(rows):
            safe = Float32(cutlass.select_(factors[row8] == Float32(0.0), Float32(1.0), factors[row8]))
            for column in self.columns(group):
                ratio = divide(row.value(column), safe)
                codes[column.half, self.position(row8, column)] = self.nearest(ratio, zeros[row8])
        return codes, masked

    def joined(self, fields: list[Int32]) -> Int32:
        """One word of those of neighbouring groups: bytes, in each half the first group's lowest."""
        word = fields[0]
        for i, field in enumerate(fields[1:], 1):
            word = word | field << (self.block.scale_bits * i)
        return word

    # --- the rules of quantize

    @property
    def scale_kind(self) -> str:
        """Kind of a scale of 16 or 32 bits, and of the one that is found first with scales of rows."""
        return {torch.float16: "f16", torch.float32: "f32"}.get(self.format.scale_dtype, "bf16")

    def scale(self, low: Float32, high: Float32) -> Float32:
        """The scale of a group, by its ends, before it is rounded to what is stored."""
        element, zero = self.format.element_rule, Float32(0.0)
        if self.format.has_zero:
            least, most = minimum(low, zero), maximum(high, zero)
            return divide(most - least, Float32(float(element.largest_code)))
        small, large = sorted((element.least, element.most), key=abs)
        below, above = magnitude(low), magnitude(high)
        if not self.format.scale_rule.signed:
            return maximum(divide(low, Float32(element.least)), divide(high, Float32(element.most)))
        extreme = Float32(cutlass.select_(below >= above, low, high))
        size = divide(extreme, Float32(large))
        size = maximum(magnitude(size), divide(minimum(below, above), Float32(abs(small))))
        if self.scale_kind != "f32":
            size = to_float(self.scale_kind, pack_half2(self.scale_kind, size, size))
        if element.symmetric:
            return size
        opposite = extreme * Float32(large) < zero
        return Float32(cutlass.select_(opposite, -size, size))

    def stored(self, scales: list[Float32], rows: list[LaneRow]) -> tuple[list[Int32], list[Float32]]:
        """The words of both rows' scales, and the numbers by which the rows are divided."""
        if self.channels and not self.format.has_channels:  # of all columns, and beside the blocks
            return [], [row.scale for row in rows]
        if self.scale_kind == "f32":
            return [float_word(scale) for scale in scales], scales
        if self.format.scale == "e8m0":
            powers = []
            for scale in scales:  # the least power of two that is no less
                bits = float_word(maximum(scale, Float32(_LEAST_POWER)))
                powers.append(bits + 0x7FFFFF >> 23)
            fields = [
                Int32(cutlass.select_(power + POWER_BIAS < 255, power + POWER_BIAS, Int32(255))) for power in powers
            ]
            return [fields[0] | fields[1] << 16], [to_float("f32", power << 23) for power in powers]
        if self.format.has_channels:
            channels = [row.scale for row in rows]
            halves = [to_float("bf16", pack_half2("bf16", scale, scale)) for scale in scales]
            safe = [Float32(cutlass.select_(c == Float32(0.0), Float32(1.0), c)) for c in channels]
            ratios = [divide(half, channel) for half, channel in zip(halves, safe, strict=True)]
            word = e4m3_to_halves(pack_e4m3([*ratios, Float32(0.0), Float32(0.0)]))[0]
            numbers = [to_float("f16", word, high) * c for high, c in zip((False, True), channels, strict=True)]
            return [word >> 7 & 0x00FF00FF], numbers
        word = pack_half2(self.scale_kind, *scales)
        return [word], [to_float(self.scale_kind, word, high) for high in (False, True)]

    def integer_zero(self, low: Float32, scale: Float32) -> Float32:
        """The zero point, an integer."""
        safe = Float32(cutlass.select_(scale == Float32(0.0), Float32(1.0), scale))
        return self.rounded(divide(-minimum(low, Float32(0.0)), safe))[1]

    def rounded(self, number: Float32) -> tuple[Int32, Float32]:
        """The nearest integer, ties to even, from 0 to the largest code: as both."""
        largest = Float32(float(self.format.element_rule.largest_code))
        number = minimum(maximum(number, Float32(0.0)), largest) + Float32(_ROUND)
        return float_word(number) & self.format.element_rule.largest_code, number - Float32(_ROUND)

    def nearest(self, ratio: Float32, zero: Float32) -> Int32:
        """The code of the number nearest to ``ratio`` = w / scale, or to ratio + zero."""
        element = self.format.element_rule
        if element.counts:
            addend = zero if self.format.has_zero else Float32(float(element.padding_code))
            return self.rounded(ratio + addend)[0]
        if element.bits == 8:
            pack = pack_e4m3 if element.mantissa_bits == 3 else pack_e5m2
            code = pack([ratio, *[Float32(0.0)] * 3]) & 0xFF
            return Int32(cutlass.select_(code == 0x80, Int32(0), code))  # no weight has a -0
        size = minimum(magnitude(ratio), Float32(element.most))
        # the exponent of the size, or of the smallest number of a whole mantissa
        exponent = float_word(maximum(size, Float32(element.values[2**element.mantissa_bits]))) >> 23
        # a sum with 1.5 * 2**23 units of the size's last place is rounded to a count of them, ties to even
        unit = exponent - element.mantissa_bits
        count = float_word(size + to_float("f32", (unit + 23 << 23) + 0x400000)) & 2 ** (element.mantissa_bits + 2) - 1
        code = count + (unit - self.least_unit << element.mantissa_bits)
        sign = Int32(cutlass.select_((ratio < Float32(0.0)) & (code > 0), Int32(2 ** (element.bits - 1)), Int32(0)))
        return code | sign

    @property
    def least_unit(self) -> int:
        """Exponent field of the smallest number of a float."""
        return 126 + math.frexp(self.format.element_rule.values[1])[1]
