"""The geometry of a packed block, the unit that one bulk copy brings: read by the host that packs and by device code.

A block holds 64 rows x 128 columns of a weight: the codes of its two halves of 64 columns, then its scales.

    codes    [half: 2][strip of 16 rows: 4][segment][lane: 32][word of the segment]
    scales   [run: 128 / scale_group / groups per word][strip: 4][row pair: 8][scale word, zero word if any]
    factors  [strip: 4][row pair: 8][word of scales' factors, of zero points' if any], if any

If factors are for 256 columns, two blocks along k share them: they lie between, behind the scales of the first block
and before the codes of the second. Each block's share of them is counted to it, so blocks still lie at equal distances.

A lane has 32 codes of a strip and half, which are as many words as a code has bits: a segment is what it loads at once,
at most four words. A matrix instruction takes its part of the words of each segment; a segment of fewer words than
instructions has bits of several in each word. If codes of 8 bits are numbers as they are stored, a segment is a core
matrix: one word of each lane, 8 rows x 16 columns of contiguous rows. The codec says which bits of the words a code
has. A scale word holds the fields of rows g and g + 8 of a strip: of one group of columns if a field has 16 bits, of
two if it has 8 (group 2 i in the low byte of each half, group 2 i + 1 in the high byte). Fields of 32 bits are a word
each, row g before row g + 8. Factors are fp16, of rows g and g + 8 in a word.

An offset is plain arithmetic, so a row, half or group may be a Python int or an Int32 of device code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from w4gemm.core.formats import PER_COLUMN, WeightFormat

BLOCK_N, BLOCK_K = 64, 128
"""Rows and columns of a block."""
HALF_K = 64
"""Columns of half a block."""
STRIP_N = 16
"""Rows that the 32 lanes of a warp hold together, as operand A of one matrix instruction."""
LANES = 32
"""Lanes of a warp."""
LANE_CODES = STRIP_N * HALF_K // LANES
"""Codes that one lane has of a strip and half."""
MATRIX_BYTES = 128
"""Bytes of a core matrix, 8 rows of 16 bytes: what matrix instructions read from shared memory, and ldmatrix."""
MATRICES_OF_ROW = 4
"""Core matrices side by side in a half; those of rows g + 8 of a strip follow those of rows g."""


class Segment(NamedTuple):
    """Words that one load brings each lane of a warp: part of the codes of a strip and half."""

    offset: int
    """Bytes from the strip's first code."""
    words: int
    """Words of a lane."""

    @property
    def lane_bytes(self) -> int:
        """Bytes from one lane's words to the next one's."""
        return 4 * self.words


class Copy(NamedTuple):
    """A run of bytes to copy out of a block in global memory."""

    target: Any
    """First byte in the copy."""
    source: int
    """First byte in the block, for half 0 and row 0."""
    offset: Any
    """Bytes from ``source`` to the first byte of the half and row that were asked for."""
    size: Any
    """Bytes."""


@dataclass(frozen=True)
class Block:
    """Sizes and offsets, in bytes, of a block, or of the sub-block that a stage or a warp holds. A sub-block of other
    rows than a block's is packed as a block of so many rows.

    Args:
        bits: bits of a code.
        scale_group: columns that share a scale inside the block: 16, 32, 64 or 128.
        has_zero: True if a zero word follows each scale word.
        scale_bits: bits of a scale or zero point: 32, 16 or 8; 0 if scales lie beside the blocks.
        factors: 1 if the scales of all columns share a factor, 2 if their zero points share another one, else 0.
        factor_blocks: blocks along k that share factors, 1 or 2.
        rows: 64, or another multiple of 16 for a sub-block.
        columns: 128, or 64 for half a block.
        matrices: True if codes of 8 bits lie in core matrices.
    """

    bits: int
    scale_group: int = BLOCK_K
    has_zero: bool = False
    scale_bits: int = 16
    factors: int = 0
    factor_blocks: int = 1
    rows: int = BLOCK_N
    columns: int = BLOCK_K
    matrices: bool = False

    @classmethod
    def of(cls, format: WeightFormat, scale_bits: int = 16, matrices: bool = False) -> Block:
        """The block of a format. A group of more than 128 columns, or all of k, repeats its scale in each block."""
        group = BLOCK_K if format.group_size == PER_COLUMN else math.gcd(format.group_size, BLOCK_K)
        factor_blocks = format.scale_rule.factor_columns // BLOCK_K if format.factors else 1
        factors = format.factors, factor_blocks
        return cls(format.bits, group, format.has_zero, scale_bits, *factors, matrices=matrices)

    def sub_block(self, rows: int = BLOCK_N, columns: int = BLOCK_K) -> Block:
        """The sub-block of so many rows and columns, packed without gaps."""
        return replace(self, rows=rows, columns=columns)

    # --- codes

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row and 64 columns."""
        return HALF_K * self.bits // 8

    @property
    def strip_bytes(self) -> int:
        """Bytes of the codes of a strip and half."""
        return STRIP_N * self.row_bytes

    @property
    def lane_words(self) -> int:
        """Words of codes that one lane has of a strip and all columns."""
        return self.columns // HALF_K * self.bits * LANE_CODES // 32

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Loads that bring a lane's codes of a strip and half: of 16 bytes and, for what is left, of 8 and 4; core
        matrices."""
        sizes = (4,) * (self.bits // 4) + tuple(size for size in (2, 1) if self.bits & size)
        if self.matrices:
            sizes = (1,) * self.bits
        return tuple(Segment(4 * LANES * sum(sizes[:i]), size) for i, size in enumerate(sizes))

    @staticmethod
    def words_of_step(segment: Segment, step: Any, steps: int) -> tuple[Any, int]:
        """The first word of a segment that matrix instruction ``step`` takes, of ``steps`` along 64 columns, and how
        many it takes."""
        if segment.words < steps:
            return step // (steps // segment.words), 1
        count = segment.words // steps
        return step * count, count

    @property
    def half_bytes(self) -> int:
        """Bytes of the codes of 64 columns."""
        return self.rows * self.row_bytes

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes; the scales follow."""
        return self.columns // HALF_K * self.half_bytes

    @property
    def code_words(self) -> int:
        """int32 words of all codes."""
        return self.code_bytes // 4

    # --- scales

    @property
    def groups(self) -> int:
        """Groups of columns; 1 if a group has more columns than the sub-block."""
        return max(1, self.columns // self.scale_group)

    @property
    def words_per_scale(self) -> int:
        """Words that one load brings: the scale word and, with zero points, the zero word; of 32 bits two each. 0 if
        there are no scales."""
        return (2 if self.has_zero else 1) * {0: 0, 32: 2}.get(self.scale_bits, 1)

    @property
    def field_mask(self) -> int:
        """The bits of a scale or zero point, in an int32."""
        return -1 if self.scale_bits == 32 else (1 << self.scale_bits) - 1

    @property
    def groups_per_word(self) -> int:
        """Groups of columns whose fields share a scale word."""
        return 2 if self.scale_bits == 8 and self.scale_group < HALF_K else 1

    @property
    def runs(self) -> int:
        """Runs of scale words, each of one word (two with zero points) for every pair of rows."""
        return -(-self.groups // self.groups_per_word)

    @property
    def run_bytes(self) -> int:
        """Bytes of a run."""
        return self.rows // 2 * 4 * self.words_per_scale

    @property
    def group_bytes(self) -> int:
        """Bytes of the scales and zero points of all groups."""
        return self.runs * self.run_bytes

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors, behind the scales; 0 if there are none."""
        return self.rows // 2 * self.factor_pair_bytes

    @property
    def factor_pair_bytes(self) -> int:
        """Bytes from the factors of one pair of rows to those of the next."""
        return 4 * self.factors

    @property
    def scale_bytes(self) -> int:
        """Bytes of all scales, zero points and factors."""
        return self.group_bytes + self.factor_bytes

    @property
    def scale_words(self) -> int:
        """int32 words of all scales, zero points and factors."""
        return self.scale_bytes // 4

    @property
    def pair_bytes(self) -> int:
        """Bytes from one pair of rows to the next in a run: of what one load brings."""
        return 4 * self.words_per_scale

    def run(self, group: Any) -> Any:
        """Pairs of rows before the run of a group: a run has one for every two rows."""
        return (group if self.groups_per_word == 1 else group // self.groups_per_word) * (self.rows // 2)

    def scales_at(self, group: int) -> int:
        """Offset of a group's scales from the first code."""
        return self.code_bytes + self.run(group) * self.pair_bytes

    @property
    def factors_at(self) -> int:
        """Offset of the factors from the first code, in a block that shares them with none or the next."""
        return self.code_bytes + self.group_bytes

    # --- the whole

    @property
    def bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.code_bytes + self.scale_bytes

    @property
    def stride(self) -> int:
        """Bytes from a whole block to the next one along k: without the other block's share of factors."""
        return self.bytes - self.lead

    @property
    def words(self) -> int:
        """int32 words from a whole block to the next."""
        return self.stride // 4

    @property
    def lead(self) -> int:
        """Bytes before the codes of every second block, the latter half of the factors that it shares."""
        return self.sub_block().factor_bytes // 2 if self.factor_blocks == 2 else 0

    def codes_from(self, k_block: Any) -> Any:
        """Offset of the first code of a block, by its number along k."""
        return k_block % 2 * self.lead if self.lead else 0

    def factors_from(self, k_block: Any) -> Any:
        """Offset of the factors of a whole block from where the block starts."""
        at = self.factors_at
        return at - k_block % 2 * (at + self.lead) if self.lead else at

    def copies(self, half: Any = 0, k_block: Any = 0) -> list[Copy]:
        """The fewest runs of bytes of a whole block that make this sub-block of all its rows. half: the half of the
        block that a sub-block of 64 columns is. k_block: the block's number along k."""
        if self != self.sub_block():
            return self.separate_copies(half, k_block)
        if not self.lead:
            return [Copy(0, 0, 0, self.bytes)]
        others = Copy(0, 0, self.codes_from(k_block), self.factors_at)
        return [others, Copy(self.factors_at, 0, self.factors_from(k_block), self.factor_bytes)]

    def separate_copies(self, half: Any, k_block: Any = 0) -> list[Copy]:
        """Like :meth:`copies`, with codes and scales in runs of their own, the codes first."""
        assert self.rows == BLOCK_N, "fewer rows are not in one run: row_copies"
        whole = self.sub_block()
        half_of_scales = half * self.group_bytes if self.runs < whole.runs else 0
        start = self.codes_from(k_block)
        copies = [
            Copy(0, 0, start + half * whole.half_bytes, self.code_bytes),
            Copy(self.code_bytes, whole.code_bytes, start + half_of_scales, self.group_bytes),
            Copy(self.factors_at, 0, whole.factors_from(k_block), self.factor_bytes),
        ]
        return [copy for copy in copies if copy.size]

    def row_copies(self, row: Any, rows: Any, at: Any, k_block: Any) -> list[Copy]:
        """The runs of bytes that bring ``rows`` rows of a whole block, from ``row`` on, to this sub-block's rows from
        ``at`` on: all three multiples of 16."""
        assert self.columns == BLOCK_K, "other rows have all columns"
        whole, start = self.sub_block(), self.codes_from(k_block)
        runs = [
            (h * self.half_bytes, h * whole.half_bytes, start, self.row_bytes) for h in range(self.columns // HALF_K)
        ]
        runs += [
            (self.code_bytes + r * self.run_bytes, whole.code_bytes + r * whole.run_bytes, start, self.pair_bytes // 2)
            for r in range(self.runs if self.pair_bytes else 0)
        ]
        if self.factors:
            runs.append((self.factors_at, 0, whole.factors_from(k_block), self.factor_pair_bytes // 2))
        return [
            Copy(target + at * row_bytes, source, from_start + row * row_bytes, rows * row_bytes)
            for target, source, from_start, row_bytes in runs
        ]

    def blocks_along(self, k: int) -> int:
        """Blocks along k columns: an even number if two share factors."""
        return -(-k // (BLOCK_K * self.factor_blocks)) * self.factor_blocks
