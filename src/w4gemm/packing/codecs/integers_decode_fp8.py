"""From packed codes of up to five bits to e4m3 elements of a WGMMA's operand A, in registers.

With 16-bit scales, as exact multiples of the scale. In e4m3 the bytes 0 .. 16 are 0 .. 16 times 2**-9: subnormals, the
binade above them and one more number lie on one line. So the byte of 2 * v, for v = u - 8, is v's sign at bit 7 beside
2 * abs(v), and sums of such bytes are 2**-8 times sums of v. The scale is applied to the float32 sums of a group, after
the products.

    symmetric            a code is 2 * t + s with v = t, or for s = 1 v = -1 - t; adding 129 * s to it gives the byte
    float zero points    a code is its byte, so sums of bytes are 2**-9 times sums of u; the zero points meet sums of x
                         after the products
    integer zero points  the bytes of 2 * (u - z) for all 16 codes are a row of a table in shared memory, one row for
                         each z; prmt picks four of eight bytes, once from the lower half and once from the upper
    2 and 3 bits         the same by one prmt, of four or eight bytes; symmetric, the row is that of the middle code
    5 bits               abs(v) is at most 16, so its byte is abs(v) itself, and sums of bytes are 2**-9 times sums of v
    e4m3 scales          as zero points, with one row for each scale s: s * v, rounded to e4m3; the upper half is of v
                         from -4 to 3, the lower half what is to be added for v from -8 to -5 and from 4 to 7. prmt
                         replaces a byte by its sign, here 0, where a selector's high bit is set, and no sum of bytes
                         carries

One code word of int4 (packing/codecs/integers_fp8.py) becomes two registers: columns 0 .. 3 and 16 .. 19 of a row.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from w4gemm.packing.codecs.table_decode import WordTable
from w4gemm.ptx.arithmetic import half_to_float, hidden_constant, pack_e4m3, to_float
from w4gemm.ptx.asm import asm
from w4gemm.ptx.memory import load_shared

_SUM_SCALE = 256.0
"""Factor from sums of bytes of 2 * v to sums of v."""


@dataclass(frozen=True)
class Fp8Decoder:
    """Decodes symmetric codes to e4m3, with scales of ``scale_kind`` for the sums of a group: "bf16", "f16", "f32"."""

    scale_kind: str

    sum_scale: ClassVar = 1.0
    """See Decoder."""
    factor: ClassVar = _SUM_SCALE
    """Factor from sums of bytes to sums of v."""

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[tuple[Int32, ...] | None, ...]:
        """Once a group: the table's rows for rows g and g + 8, None without a table. words: of scale and zero. field:
        which of the groups that share them."""
        return None, None

    def scales(self, words: tuple[Int32, ...], _field: int = 0) -> tuple[Float32, ...]:
        """Factors for the sums of a group, of rows g and g + 8."""
        return tuple(scale * Float32(self.factor) for scale in self._numbers(words, 0))

    def zeros(self, words: tuple[Int32, ...]) -> tuple[Float32, ...]:
        """Float zero points of rows g and g + 8: factors for the sums of x over a group."""
        return self._numbers(words, 1)

    def _numbers(self, words: tuple[Int32, ...], which: int) -> tuple[Float32, ...]:
        """The scales (0) or zero points (1) of both rows."""
        if self.scale_kind == "f32":
            return tuple(to_float("f32", word) for word in words[2 * which : 2 * which + 2])
        return tuple(half_to_float(self.scale_kind, words[which], high) for high in (False, True))

    def decode(self, words: tuple[Int32, ...], prepared: tuple[tuple[Int32, ...] | None, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        rows = [self._row(w, row) for w, row in zip(words, prepared, strict=True)]
        return rows[0][0], rows[1][0], rows[0][1], rows[1][1]

    def _row(self, word: Int32, table_row: tuple[Int32, ...] | None) -> tuple[Int32, ...]:
        """The two registers of a word."""
        return _signed(word)


class PlainDecoder(Fp8Decoder):
    """Decodes codes beside float zero points: to what they are."""

    factor: ClassVar = 2 * _SUM_SCALE

    def _row(self, word: Int32, table_row: tuple[Int32, ...] | None) -> tuple[Int32, ...]:
        return _nibbles(word)


class FiveBitDecoder(Fp8Decoder):
    """Decodes symmetric codes of five bits: words of nibbles of rows g and g + 8, and that of the signs."""

    factor: ClassVar = 2 * _SUM_SCALE

    def decode(self, words: tuple[Int32, ...], prepared: tuple[None, None]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        return _five_bits(words)


@dataclass(frozen=True)
class NarrowDecoder(Fp8Decoder):
    """Decodes codes of ``bits`` 3 or 2, symmetric or ``plain`` beside float zero points: a word of two bits for each
    code and, of 3 bits, the word of the third ones."""

    bits: int
    plain: bool = False

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[tuple[Int32, ...] | None, ...]:
        first = 0 if self.plain else -(2 ** (self.bits - 1))
        row = tuple(hidden_constant(_bytes_of(range(v, v + 4))) for v in range(first, first + 2**self.bits, 4))
        return row, row

    def decode(self, words: tuple[Int32, ...], prepared: tuple[tuple[Int32, ...], ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        return _selected(words, *prepared)


class TableDecoder(WordTable, Fp8Decoder):
    """Decodes codes beside integer zero points: a row of the table for each zero point."""

    table_rows: ClassVar = 16
    row_stride: ClassVar = 4
    row_words: ClassVar = 4
    """Words of a row that are read."""

    def table_word(self, row: Int32, word: Int32) -> Int32:
        return _differences(word * 4 - row)

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[tuple[Int32, ...] | None, ...]:
        places = words[-1] & 0xFFFF, words[-1] >> 16
        return tuple(load_shared(table + place, self.row_words) for place in places)

    def _row(self, word: Int32, table_row: tuple[Int32, ...] | None) -> tuple[Int32, ...]:
        return _picked(word, table_row)


@dataclass(frozen=True)
class NarrowTableDecoder(TableDecoder):
    """Decodes codes of ``bits`` 3 or 2 beside integer zero points. A row of the table has four or eight bytes, and is
    as long as int4's."""

    bits: int

    @property
    def table_rows(self) -> int:  # type: ignore[override]
        return 2**self.bits

    @property
    def row_words(self) -> int:  # type: ignore[override]
        return self.table_rows // 4

    def decode(self, words: tuple[Int32, ...], prepared: tuple[tuple[Int32, ...], ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        return _selected(words, *prepared)


class FoldedDecoder(TableDecoder):
    """Decodes to scale * v, rounded to e4m3: a row of the table for each e4m3 scale."""

    table_rows: ClassVar = 256

    def table_word(self, row: Int32, word: Int32) -> Int32:
        return _scaled_codes(row, word)

    def _row(self, word: Int32, table_row: tuple[Int32, ...] | None) -> tuple[Int32, ...]:
        return _folded(word, table_row)


@cute.jit
def _differences(first: Int32):
    """The bytes of 2 * v for v = first .. first + 3."""
    word = Int32(0)
    for i in cutlass.range_constexpr(4):
        v = first + i
        size = cutlass.max(v, -v)
        byte = cutlass.min(2 * size, size + 8)  # above 16 there is every second number
        if v < 0:
            byte = byte | 0x80
        word = word | (byte << (8 * i))
    return word


@cute.jit
def _scaled_codes(scale: Int32, word: Int32):
    """A word of the row of an e4m3 scale, given by its bits: words 2 and 3 are the bytes for v = -4 .. -1 and 0 .. 3,
    words 0 and 1 are added to them for v = -8 .. -5 and 4 .. 7."""
    first = word % 2 * 4 - 4
    bytes = _scaled(scale, first)
    if word < 2:
        bytes = _scaled(scale, word * 12 - 8) - bytes
    return bytes


def _scaled(scale: Int32, first: Int32) -> Int32:
    """The e4m3 nearest to scale * v for v = first .. first + 3."""
    value, factor = Float32(first), _float_of_e4m3(scale)
    return pack_e4m3([(value + Float32(i)) * factor for i in range(4)])


def _float_of_e4m3(bits: Int32) -> Float32:
    text = (
        "{ .reg .b16 e, h, none; .reg .b32 t; mov.b32 {e, none}, $1; cvt.rn.f16x2.e4m3x2 t, e; "
        "mov.b32 {h, none}, t; cvt.f32.f16 $0, h; }"
    )
    return asm(text, [Float32], [bits], pure=True)[0]


def _signed(word: Int32) -> tuple[Int32, ...]:
    pick = "and.b32 c, {0}, 0x0F0F0F0F; and.b32 s, {0}, 0x01010101; mad.lo.u32 {1}, s, 129, c; "
    text = pick.format("$2", "$0") + "shr.u32 t, $2, 4; " + pick.format("t", "$1")
    return asm(f"{{ .reg .b32 c, s, t; {text}}}", [Int32] * 2, [word], pure=True, early=True)


def _nibbles(word: Int32) -> tuple[Int32, ...]:
    text = "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 t, $2, 4; and.b32 $1, t, 0x0F0F0F0F; "
    return asm(f"{{ .reg .b32 t; {text}}}", [Int32] * 2, [word], pure=True, early=True)


def _bytes_of(numbers: Iterable[int]) -> int:
    """A word of the bytes of 2 * v for four v of at most 8, in the order of bits."""
    return sum((2 * abs(v) | (0x80 if v < 0 else 0)) << 8 * i for i, v in enumerate(numbers))


def _five_bits(words: tuple[Int32, ...]) -> tuple[Int32, ...]:
    """Four registers of the words of a step: row g's and row g + 8's nibbles, and the signs, those of register r at bit
    r of each byte."""
    text = ""
    for r in range(4):
        code, sign = f"${4 + r % 2}", "$6"
        if r > 1:
            text += f"shr.u32 t, {code}, 4; "
            code = "t"
        text += f"and.b32 c, {code}, 0x0F0F0F0F; "
        if r > 0:
            text += f"shr.u32 t, {sign}, {r}; "
            sign = "t"
        text += f"and.b32 s, {sign}, 0x01010101; mad.lo.u32 ${r}, s, 129, c; "
    return asm(f"{{ .reg .b32 c, s, t; {text}}}", [Int32] * 4, list(words), pure=True, early=True)


def _selected(words: tuple[Int32, ...], low: tuple[Int32, ...], high: tuple[Int32, ...]) -> tuple[Int32, ...]:
    """Four registers of the words of a step, whose codes pick bytes of rows ``low``, for rows g, and ``high``."""
    inputs, rows = [*words, *low, *high], []
    for row in (0, 1):
        first = 4 + len(words) + row * len(low)
        rows.append(f"${first}, ${first + len(low) - 1}")
    text = ""
    for col16 in (0, 1):
        parts = ["$4", "$5"][: len(words)]
        if col16:
            text += "shr.u32 t, $4, 2; " + ("shr.u32 u, $5, 1; " if len(words) > 1 else "")
            parts = ["t", "u"]
        text += f"and.b32 m, {parts[0]}, 0x33333333; "
        if len(words) > 1:
            text += f"lop3.b32 m, {parts[1]}, 0x44444444, m, 0xEA; "
        text += f"prmt.b32 ${2 * col16}, {rows[0]}, m; shr.u32 m, m, 16; prmt.b32 ${2 * col16 + 1}, {rows[1]}, m; "
    return asm(f"{{ .reg .b32 m, t, u; {text}}}", [Int32] * 4, inputs, pure=True, early=True)


def _picked(word: Int32, row: tuple[Int32, ...]) -> tuple[Int32, ...]:
    """Two registers: the codes' low bits pick one of the bytes 0 .. 7 of a table's row and one of 8 .. 15, the high
    bits one of these two."""
    pick = (
        "prmt.b32 low, $3, $4, {0}; prmt.b32 high, $5, $6, {0}; prmt.b32 mask, {1}, {1}, 0xBA98; "
        "lop3.b32 {2}, mask, high, low, 0xCA; "
    )
    text = "and.b32 m, $2, 0x77777777; " + pick.format("m", "$2", "$0")
    text += "shr.u32 m, m, 16; shl.b32 t, $2, 4; " + pick.format("m", "t", "$1")
    return asm(f"{{ .reg .b32 m, t, low, high, mask; {text}}}", [Int32] * 2, [word, *row], pure=True, early=True)


def _folded(word: Int32, row: tuple[Int32, ...]) -> tuple[Int32, ...]:
    """Two registers: the codes' low bits pick one of the bytes 8 .. 15 of a table's row; where the high bit is not set,
    that of 0 .. 7 is added. The word's upper half comes down by a dot product, and sums are a multiplication's: neither
    waits for prmt, as shifts and logical operations do."""
    pick = "prmt.b32 low, $3, $4, {0}; prmt.b32 high, $5, $6, {1}; mad.lo.u32 {2}, low, 1, high; "
    text = "and.b32 m, $2, 0x77777777; " + pick.format("$2", "m", "$0")
    text += "dp2a.lo.u32.u32 t, $2, 0x100, 0; dp2a.lo.u32.u32 m, m, 0x100, 0; " + pick.format("t", "m", "$1")
    return asm(f"{{ .reg .b32 m, t, low, high; {text}}}", [Int32] * 2, [word, *row], pure=True, early=True)
