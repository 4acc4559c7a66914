"""From packed indices into a codebook to the 16-bit elements of a matrix instruction's operand A, in registers.

A number's two bytes are looked up apart: one prmt picks four bytes out of eight, by the low three bits of four nibbles,
so the lower and the upper half of 16 entries take one each, and the nibbles' high bits choose between them. The numbers
are exact in 16 bits; one multiplication by the scale rounds once, as :class:`Decoder` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from w4gemm.kernels.device.decode import Decoder, bits_of
from w4gemm.kernels.device.ptx import asm

_CHOOSE = 0xCA  # of lop3: the second operand where the first one's bit is set, else the third


@dataclass(frozen=True)
class CodebookDecoder(Decoder):
    """Decodes to one of 16 numbers that ``kind`` holds exactly, times the scale."""

    values: tuple[float, ...] = ()
    """Number of each code."""

    def offsets(self, words: tuple[Int32, ...]) -> tuple[None, None]:
        """No offsets: the table has the numbers themselves."""
        return None, None

    def decode_exact(self, word: Int32, offsets: tuple[None, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of a code word, without their scales. Registers of the PTX: m low bits of the
        nibbles, s high bits, k bytes of ones where the high bit is set, l and h the low and high bytes found."""
        low, high = self._table(0), self._table(8)
        text = "and.b32 m, $4, 0x77777777; shr.u32 s, $4, 3; and.b32 s, s, 0x11111111; "
        for half in range(2):
            text += "shr.u32 m, m, 16; shr.u32 s, s, 16; " if half else ""
            text += f"prmt.b32 k, 0x0000FF00, 0, s; {_lookup('l', low)}{_lookup('h', high)}"
            text += f"prmt.b32 ${2 * half}, l, h, 0x5140; prmt.b32 ${2 * half + 1}, l, h, 0x7362; "
        return asm(f"{{ .reg .b32 s, m, k, w, a, b, l, h; {text}}}", [Int32] * 4, [word], pure=True, early=True)

    def _table(self, shift: int) -> list[int]:
        """Four words of one byte of each number, the byte ``shift`` bits up."""
        entries = [bits_of(self.kind, value) >> shift & 0xFF for value in self.values]
        return [int.from_bytes(bytes(entries[first : first + 4]), "little") for first in range(0, 16, 4)]


def _lookup(found: str, table: list[int]) -> str:
    """PTX that finds four bytes of the table by the nibbles whose low bits are in m and whose high ones in k."""
    halves = (("a", *table[:2]), ("b", *table[2:]))
    picks = "".join(f"mov.b32 w, {first:#x}; prmt.b32 {to}, w, {second:#x}, m; " for to, first, second in halves)
    return f"{picks}lop3.b32 {found}, k, b, a, {_CHOOSE:#x}; "
