"""From packed indices of a codebook's numbers to the 16-bit elements of a matrix instruction's operand A, in registers.

prmt picks four bytes out of eight by the low three bits of four nibbles; where a nibble's high bit is set, it gives
eight copies of the byte's sign instead. The numbers are ordered such that each byte of number i, i < 8, exceeds that of
number i + 8 by 0 to 127 (packing/codecs/codebook.py). One prmt looks up these differences: its result is 0 for indices
from 8 on. Another one, without the high bits, looks up numbers 8..15. The sum is the number wanted; an integer
multiplication adds, because the FMA pipe has less to do than the others. If the numbers have no such order, both halves
are looked up as they are, and the nibbles' high bits choose.

    numbers     of eight codes
    16-bit      low and high bytes apart: 3 instructions for selectors, 12 that find, 4 that join a number's two bytes
    integers    one byte, the number + 128: 3, 6, and 4 that put each byte into a halfword of its own

In bf16 such a byte is the subnormal (number + 128) * 2**-133, since the smallest exponents continue the subnormals, and
one fma is the weight: 128 s is exact. In fp16 a byte beside the exponent of 1024 is 1024 + number + 128. With scales of
another dtype the product is formed in float32 and rounded once; there a byte at bits 16 to 23 is the same subnormal.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32

from w4gemm.packing.codecs.codebook import bits_in, first_half_exceeds
from w4gemm.packing.codecs.integers_decode import Decoder, fma_pair, pair, signed_level
from w4gemm.ptx.arithmetic import fma, half_to_float, hidden_constant, pack_half2, repeat_half, to_float
from w4gemm.ptx.asm import asm

_CHOOSE = 0xCA  # of lop3: the second operand where the first one's bit is set, else the third
_JOIN = (0x5140, 0x7362)  # of prmt: two numbers, from the low and the high bytes of four
_SPREAD = (0x4140, 0x4342)  # of prmt: two bytes of four in halfwords, beside bytes of the other operand
_BIAS = 128  # added to an integer, which makes it a byte
_SMALLEST = 2.0**-133  # the smallest bf16
_UNIT, _SUM_SCALE = 2.0**6, 2.0**33  # what a decoded 1.0 stands for: without its scale, with it


@dataclass(frozen=True)
class CodebookDecoder(Decoder):
    """Decodes to one of 16 numbers as ``kind`` holds it, times the scale."""

    values: tuple[float, ...] = ()
    """Number at each index."""

    def offsets(self, words: tuple[Int32, ...], _table: Int32) -> tuple[Any, ...]:
        """No offsets: what is found are the numbers themselves."""
        return None, None

    def scales_and_zeros(self, words: tuple[Int32, ...], field: int = 0) -> tuple[tuple[Float32, None], ...]:
        if self.scale_kind == "f32":
            return tuple((to_float("f32", word), None) for word in words)
        if self.scale_kind == "s8":
            return tuple((signed_level(words, row, field), None) for row in range(2))
        return tuple((half_to_float(self.scale_kind, words[0], high), None) for high in (False, True))

    def prepare(self, words: tuple[Int32, ...], _table: Int32, field: int = 0) -> tuple[Any, ...]:
        """The scales of rows g and g + 8, in float32 or in both halves of a word."""
        if self.mixed:
            return tuple(scale for scale, _ in self.scales_and_zeros(words, field))
        return tuple(repeat_half(words[0], high) for high in (False, True))

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights, rounded once to ``kind``."""
        numbers = self.decode_exact(words, (None, None))
        return tuple(self._scaled(number, prepared[i % 2], None) for i, number in enumerate(numbers))

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction, without their scales."""
        bits = bits_in(self.kind, self.values)
        finder = _ByteLookup([b.to_bytes(2, "little") for b in bits])
        text = ""
        for half in range(2):
            text += finder.find("l", 0, half) + finder.find("h", 1, half)
            text += "".join(f"prmt.b32 ${2 * half + i}, l, h, {join:#x}; " for i, join in enumerate(_JOIN))
        return finder.run(text, 4, words[0])


@dataclass(frozen=True)
class IntegerDecoder(CodebookDecoder):
    """The same for integers of one byte. allow_sum_scale: see :class:`w4gemm.packing.codecs.base.Decoding`."""

    allow_sum_scale: bool = False

    @property
    def _in_one_fma(self) -> bool:
        """True if a weight is one fma of a byte as a subnormal, and the sums take a factor."""
        return self.kind == "bf16" and self.allow_sum_scale

    @property
    def sum_scale(self) -> float:  # type: ignore[override]
        return _SUM_SCALE if self._in_one_fma else 1.0

    @property
    def exact_scale(self) -> float:  # type: ignore[override]
        return _UNIT if self.kind == "bf16" else 1.0

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[Any, ...]:
        """For rows g and g + 8: the scale or, for one fma, the factor and the addend of a byte."""
        if self._in_one_fma:
            factor = 1 / _SMALLEST / _SUM_SCALE
            addend = -_BIAS / _SUM_SCALE
            if self.mixed:
                scales = [scale for scale, _ in self.scales_and_zeros(words, field)]
                return tuple((scale * Float32(factor), scale * Float32(addend)) for scale in scales)
            parts = [self._pairwise("mul", words[0], pair(number, number)) for number in (factor, addend)]
            return tuple(tuple(repeat_half(part, high) for part in parts) for high in (False, True))
        if self.mixed:
            return tuple(scale * Float32(self.exact_scale) for scale, _ in self.scales_and_zeros(words, field))
        if self.kind == "bf16":
            words = (self._pairwise("mul", words[0], pair(_UNIT, _UNIT)),)
        return super().prepare(words, table, field)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale, rounded once to ``kind``."""
        if not self._in_one_fma:
            return super().decode(words, prepared)
        if not self.mixed:
            spread = self._spread(words[0], 0)
            return tuple(fma_pair("bf16", number, *prepared[i % 2]) for i, number in enumerate(spread))
        singles = self._singles(words[0])
        weights = [fma(number, *prepared[i // 2 % 2]) for i, number in enumerate(singles)]
        return tuple(pack_half2("bf16", *weights[i : i + 2]) for i in range(0, 8, 2))

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Any, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction, without their scales; in bf16 divided by 64."""
        if self.kind == "bf16":
            factor, addend = (pair(n, n) for n in (1 / _SMALLEST / _UNIT, -_BIAS / _UNIT))
            return tuple(fma_pair("bf16", number, factor, addend) for number in self._spread(words[0], 0))
        addend = pair(-1024.0 - _BIAS, -1024.0 - _BIAS, "f16")
        return tuple(self._pairwise("add", number, addend) for number in self._spread(words[0], 0x64646464))

    def _spread(self, word: Int32, beside: int) -> tuple[Int32, ...]:
        """Bytes of two numbers each in four registers, with a byte of ``beside`` above each."""
        spread = [
            f"prmt.b32 ${2 * half + i}, l{half}, {beside:#x}, {s:#x}; "
            for half in range(2)
            for i, s in enumerate(_SPREAD)
        ]
        return self._bytes(word, "".join(spread), 4)

    def _singles(self, word: Int32) -> list[Float32]:
        """Eight numbers of float32: their bytes times 2**-133, as subnormals."""
        spread = [f"prmt.b32 ${i}, l{i // 4}, 0, {0x4044 | i % 4 << 8:#x}; " for i in range(8)]
        return [to_float("f32", bits) for bits in self._bytes(word, "".join(spread), 8)]

    def _bytes(self, word: Int32, then: str, outputs: int) -> tuple[Int32, ...]:
        """Outputs of PTX that begins with the bytes of four numbers each in l0 and l1."""
        finder = _ByteLookup([bytes([int(value) + _BIAS]) for value in self.values])
        return finder.run(finder.find("l0", 0, 0) + finder.find("l1", 0, 1) + then, outputs, word)


class _ByteLookup:
    """PTX that finds bytes of numbers by a word of eight indices.

    Args:
        numbers: the bytes of the number at each index.
    """

    def __init__(self, numbers: list[bytes]) -> None:
        self.by_sum = first_half_exceeds(numbers)
        self.tables: list[tuple[list[int], list[int]]] = []
        """For each byte, what is looked up for indices 0..7, and for 8..15, or for all if the sum is wanted."""
        for table in zip(*numbers, strict=True):
            first, later = table[:8], table[8:]
            differences = [a - b for a, b in zip(first, later, strict=True)] if self.by_sum else first
            self.tables.append((_words(differences), _words(later)))

    def find(self, to: str, byte: int, half: int) -> str:
        """PTX that finds a byte of four numbers. half: 1 for the upper four indices of the word."""
        (_, first), (_, later) = self.tables[byte]
        selector = f"w{half}" if self.by_sum else f"m{half}"
        text = f"prmt.b32 a, t{2 * byte}, {first:#x}, {selector}; prmt.b32 b, t{2 * byte + 1}, {later:#x}, m{half}; "
        if self.by_sum:
            return f"{text}mad.lo.u32 {to}, a, 1, b; "
        return f"{text}lop3.b32 {to}, k{half}, b, a, {_CHOOSE:#x}; "

    def run(self, text: str, outputs: int, word: Int32) -> tuple[Int32, ...]:
        """Run PTX behind the selectors: w0 and w1 indices, m0 and m1 without their high bits, k0 and k1 bytes of ones
        where the high bit is set."""
        held = [hidden_constant(words[0]) for tables in self.tables for words in tables]
        moved = "".join(f"mov.b32 t{i}, ${outputs + 1 + i}; " for i in range(len(held)))
        start = f"{moved}mov.b32 w0, ${outputs}; and.b32 m0, w0, 0x77777777; "
        if self.by_sum:  # dot products bring the upper half down: neither waits for prmt, as shifts do
            start += "dp2a.lo.u32.u32 w1, w0, 0x100, 0; dp2a.lo.u32.u32 m1, m0, 0x100, 0; "
        else:
            start += "shr.u32 m1, m0, 16; shr.u32 s, w0, 3; and.b32 s, s, 0x11111111; "
            start += "prmt.b32 k0, 0x0000FF00, 0, s; shr.u32 s, s, 16; prmt.b32 k1, 0x0000FF00, 0, s; "
        declared = ".reg .b32 w0, w1, m0, m1, k0, k1, s, a, b, l, h, l0, l1, t0, t1, t2, t3; "
        return asm(f"{{ {declared}{start}{text}}}", [Int32] * outputs, [word, *held], pure=True, early=True)


def _words(table: Sequence[int]) -> list[int]:
    """Eight bytes as two words."""
    return [int.from_bytes(bytes(table[i : i + 4]), "little") for i in (0, 4)]
