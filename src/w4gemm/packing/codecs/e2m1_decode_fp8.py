"""From packed e2m1 codes to elements of a matrix instruction's operand A beside fp8 x, in registers.

The eight magnitudes times a scale are a row of a table in shared memory. For e8m0 scales they are e5m2, one row for
each number of binades that a group's scale lies below the largest one of its row of the weight (e2m1.py); for e4m3
scales they are e4m3, one row for each scale, and the two halves of an instruction's columns may have a row each. prmt
picks four of the eight bytes by the codes' low three bits, and the signs are put beside them: seven instructions for
eight weights. One dot product makes the address of a table's row of one byte of a scale word.
"""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from w4gemm.packing.codecs.e2m1 import LARGEST_EXPONENT
from w4gemm.packing.codecs.table_decode import WordTable
from w4gemm.ptx.arithmetic import e4m3_to_halves, half_to_float, pack_e4m3, pack_e5m2, row_address, to_float
from w4gemm.ptx.asm import asm
from w4gemm.ptx.memory import load_shared

_ROW_BYTES = 8
_MAGNITUDES = ((0, 0.5, 1, 1.5), (2, 3, 4, 6))
_LARGEST = 127 + LARGEST_EXPONENT  # exponent field of the float32 that the first row's numbers are multiplied by


@cute.jit
def _power(row: Int32) -> Float32:
    """The power of two of a row; 0 below float32's."""
    return to_float("f32", cutlass.max(_LARGEST - row, 0) << 23)


@cute.jit
def _scale(row: Int32) -> Float32:
    """The e4m3 scale whose code is the row's number."""
    return half_to_float("f16", e4m3_to_halves(row)[0], False)


@dataclass(frozen=True)
class E2m1Fp8Decoder(WordTable):
    """Decodes to scale * v, relative to the row's scale, in e5m2."""

    sum_scale: ClassVar = 1.0
    """See Decoder."""
    table_rows: ClassVar = 256
    row_stride: ClassVar = _ROW_BYTES // 4
    halves: ClassVar = False
    """True if the first and the last 16 columns of a step have a scale each."""

    def table_word(self, row: Int32, word: Int32) -> Int32:
        return Int32(cutlass.select_(word == 1, *reversed(self.entry(row))))

    def entry(self, row: Int32) -> tuple[Int32, Int32]:
        """Both words of a row of the table: its factor times the eight magnitudes."""
        power = _power(row)
        return tuple(pack_e5m2([Float32(v) * power for v in values]) for values in _MAGNITUDES)

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[tuple[Int32, ...], ...]:
        """Once a group, or a step if it has two of them: the table's rows for rows g and g + 8, each for the step's
        columns or for both halves of them, which are the fields of a scale word. field: which of them a group has."""
        fields = (0, 1) if self.halves else (field,)
        bytes_of_word = (2 * row8 + each for row8 in range(2) for each in fields)
        return tuple(load_shared(row_address(table, _ROW_BYTES, words[0], byte), 2) for byte in bytes_of_word)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[tuple[Int32, ...], ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        of_row = len(prepared) // 2
        first, second = _picked(words[0], *prepared[:of_row]), _picked(words[1], *prepared[of_row:])
        return first[0], second[0], first[1], second[1]


@dataclass(frozen=True)
class E2m1FoldedDecoder(E2m1Fp8Decoder):
    """Decodes to scale * v, rounded to e4m3."""

    table_rows: ClassVar = 128
    halves: bool

    def entry(self, row: Int32) -> tuple[Int32, Int32]:
        factor = _scale(row)
        return tuple(pack_e4m3([Float32(v) * factor for v in values]) for values in _MAGNITUDES)


def _picked(word: Int32, row: tuple[Int32, ...], last: tuple[Int32, ...] = ()) -> tuple[Int32, ...]:
    """Two registers: magnitudes out of a table's row, and their signs; of the second register out of row ``last`` if
    there is one. The upper half of the word comes down by a dot product, and its last signs go up by a multiplication:
    neither waits for prmt, as shifts do."""
    pick = "prmt.b32 p, {1}, {2}, m; lop3.b32 {0}, {3}, 0x80808080, p, 0xEA; "
    text = "and.b32 m, $2, 0x77777777; " + pick.format("$0", "$3", "$4", "$2")
    text += "dp2a.lo.u32.u32 m, m, 0x100, 0; mad.lo.u32 t, $2, 16, 0; "
    text += pick.format("$1", *(("$5", "$6") if last else ("$3", "$4")), "t")
    inputs = [word, *row, *last]
    return asm(f"{{ .reg .b32 m, t, p; {text}}}", [Int32] * 2, inputs, pure=True, early=True)
