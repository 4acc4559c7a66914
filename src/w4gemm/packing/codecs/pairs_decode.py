"""From packed codes to 16-bit elements by a table in shared memory, two codes at a time.

A byte of a code word is two codes, and the table has a row for each of the 256 bytes: so eight weights take four
addresses and four loads, where codebooks take 17 to 23 instructions on registers (codebook_decode.py), and codes
that meet float32 scales 11 (integers_decode_wide.py). A row has 128 bytes: a copy for every lane, so that no two lanes
want different words of a bank. A dot product of the code word with one byte, 128, is the address of the lane's copy.

    halves   both numbers of a codebook in the dtype of x, which is a fragment register: its codes are neighbours
    floats   both numbers in float32, where scales of another dtype make a product that is rounded once. A load of two
             words serves sixteen lanes at a time, so sixteen copies are enough, and the table is as large
"""

# mypy: ignore-errors
from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from w4gemm.packing.codecs.base import PAIR_ROW_BYTES, Pairs
from w4gemm.packing.codecs.codebook_decode import CodebookDecoder
from w4gemm.packing.codecs.integers_decode import in_registers
from w4gemm.packing.codecs.integers_decode_wide import TwoLevelDecoder, WideDecoder
from w4gemm.ptx.arithmetic import float_word, fma, half_to_float, pack_half2, row_address, to_float
from w4gemm.ptx.memory import load_shared, store_shared

_BYTES = 4  # of a code word


class PairTable:
    """The table's side of a decoder, which is given the address of a thread's copy, see :func:`own_pairs`."""

    @cute.jit
    def fill_table(self, table: Int32, thread: Int32, threads: int):
        """All rows, by whole warps; a barrier must follow."""
        lane = thread % 32
        for index in cutlass.range(thread // 32, 256 // _BYTES, threads // 32, unroll=4):
            address = table + index * (_BYTES * PAIR_ROW_BYTES) + lane * 4
            for byte, (even, odd) in enumerate(self.rows(index)):
                word = even
                if lane % 2 == 1:
                    word = odd
                store_shared(address + byte * PAIR_ROW_BYTES, word)

    @abstractmethod
    def rows(self, index: Int32) -> list[tuple[Int32, Int32]]:
        """The words of even and odd lanes in four rows of the table, from the ``4 * index``-th on."""

    def halves(self, word: Int32, table: Int32) -> tuple[Int32, ...]:
        """The pairs of a code word, in the halves of a word each."""
        return tuple(words[0] for words in self._words(word, table, 1))

    def floats(self, word: Int32, table: Int32) -> list[Float32]:
        """The pairs of a code word, in float32."""
        return [to_float("f32", number) for both in self._words(word, table, 2) for number in both]

    def _words(self, word: Int32, table: Int32, count: int) -> list[tuple[Int32, ...]]:
        """The first words of the rows that the bytes of a code word say."""
        rows = (row_address(table, PAIR_ROW_BYTES, word, byte) for byte in range(_BYTES))
        return [load_shared(row, count, constant=True) for row in rows]


@dataclass(frozen=True)
class PairDecoder(PairTable, CodebookDecoder):
    """Decodes to one of 16 numbers as ``kind`` holds it, times the scale. pairs: what the table holds, halves also for
    a kernel that scales sums."""

    pairs: Pairs = Pairs.HALVES

    def rows(self, index: Int32) -> list[tuple[Int32, Int32]]:
        each = super().decode_exact((index * 0x04040404 + 0x03020100,), ())
        if self.pairs is Pairs.HALVES:
            return [(numbers, numbers) for numbers in each]
        both = [[half_to_float(self.kind, numbers, high) for high in (False, True)] for numbers in each]
        return [(float_word(low), float_word(high)) for low, high in both]

    def offsets(self, words: tuple[Int32, ...], table: Int32) -> tuple[Any, ...]:
        """The table."""
        return (table,)

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction, without their scales."""
        return self.halves(words[0], offsets[0])

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[Any, ...]:
        """The scales of rows g and g + 8, as CodebookDecoder has them, and the table."""
        return (*super().prepare(words, table, field), table)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights, rounded once to ``kind``."""
        *scales, table = prepared
        if self.pairs is Pairs.HALVES:
            return tuple(self._scaled(n, scales[i % 2], None) for i, n in enumerate(self.halves(words[0], table)))
        weights = [number * scales[i // 2 % 2] for i, number in enumerate(self.floats(words[0], table))]
        return tuple(pack_half2(self.kind, *weights[i : i + 2]) for i in range(0, 8, 2))


@dataclass(frozen=True)
class BarePairDecoder(PairDecoder):
    """The numbers without their scale, which multiplies the sums of a group."""

    def scales(self, words: tuple[Int32, ...], field: int = 0) -> tuple[Float32, ...]:
        """Factors of the sums of rows g and g + 8."""
        return tuple(scale for scale, _ in self.scales_and_zeros(words, field))

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[Any, ...]:
        """The table."""
        return (table,)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        return self.halves(words[0], *prepared)


class _CodePairs(PairTable):
    """A table of the codes themselves; a byte of a code word has the codes of rows g and g + 8."""

    def rows(self, index: Int32) -> list[tuple[Int32, Int32]]:
        bytes_of_word = [index * _BYTES + byte for byte in range(_BYTES)]
        return [(float_word(Float32(byte % 16)), float_word(Float32(byte // 16))) for byte in bytes_of_word]

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[Any, ...]:
        """Scales and zero points of rows g and g + 8, and the table."""
        return (*self._rows(words, field, (1.0, 1.0), 1.0), table)  # type: ignore[attr-defined]

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights, rounded once to ``kind``."""
        *rows, table = prepared
        weights = [fma(number, *rows[i % 2]) for i, number in enumerate(self.floats(words[0], table))]
        return in_registers(self.kind, weights)  # type: ignore[attr-defined]


class WidePairDecoder(_CodePairs, WideDecoder):
    """Decodes to scale * u + zero point in float32, rounded to ``kind``."""


class TwoLevelPairDecoder(_CodePairs, TwoLevelDecoder):
    """The same with scales of two levels."""


def own_pairs(table: Int32, thread: Int32, pairs: Pairs) -> Int32:
    """Address of a thread's copies in the table's first row."""
    return table + (thread % 32 * 4 if pairs is Pairs.HALVES else thread % 16 * 8)
