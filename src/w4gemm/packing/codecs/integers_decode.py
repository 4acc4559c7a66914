"""From packed integers of 2 to 8 bits to the 16-bit elements of a matrix instruction's operand A, in registers.

The trick (Kim et al., "Who says elephants can't run", 2022): a 4-bit code OR-ed into the lowest mantissa bits of 1024.0
in fp16, or of 128.0 in bf16, *is* 1024 + u or 128 + u; subtracting 1024 + z gives u - z exactly, and one multiplication
by the scale rounds once. Folding both into one fma would round z * s too, which is an error of up to 0.27 s in bf16.
In fp16 four bits further up are 1024 + 16 * u, which one fma turns into u - z, so every second code needs no shift.

Codes of more than four bits, which do not fit bf16's mantissa beside a bias, are subnormals there, see
:class:`SubnormalDecoder`: exact numbers are u / 64 - z / 64, of one fma.

The code words of a step (packing/codecs/integers.py) become four registers: rows g, g + 8, g, g + 8 of the fragment.
"""

# mypy: ignore-errors
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cutlass import Float32, Int32

from w4gemm.packing.codecs.integers import upper_factor
from w4gemm.ptx.arithmetic import broadcast_half, fma, half_to_float, hidden_constant, pack_half2, signed, to_float
from w4gemm.ptx.asm import asm

_BIAS = {"f16": 1024.0, "bf16": 128.0}
_SUBNORMAL = 2.0**-133  # the smallest bf16
_UNIT = 64.0  # what a decoded 1.0 without its scale stands for, if codes are subnormals
_BYTE_BIAS = 2.0**15  # of a byte at bits 8 to 15 of a float32
SIGNED_BIAS = 2.0**15 + 128
"""What a byte with a sign is below the exponent of 2**15 for the scale 0."""


class PreparedRow(NamedTuple):
    """Operands that turn the codes of one row and group into weights: float32, or pairs of equal 16-bit numbers."""

    offset: Int32
    """Addend that makes the exact number of a code."""
    scale: Int32 | Float32
    zero: Int32 | Float32 | None
    """Float zero point, if there is one."""


@dataclass(frozen=True)
class Decoder:
    """Decodes to ``kind`` ("f16" or "bf16") with scales of ``scale_kind`` and zero points "none", "int" or "float".

    Where the two kinds differ the product is formed in float32 and rounded once, at about twice the instructions.
    ``only_fma``: for GPUs before SM90, which have no other arithmetic on pairs of bf16; the bits are the same.
    ``bits``: of a code.
    """

    kind: str
    scale_kind: str
    zero: str
    only_fma: bool = False
    bits: int = field(default=4, kw_only=True)

    sum_scale = 1.0
    """Factor of the sums: a decoded 1.0 stands for this weight."""
    separate_scales = True
    """True if :meth:`decode_exact` gives numbers without their scales, for a kernel that scales sums."""

    held_word = None
    """What :meth:`prepare` wants in a register; None if that is the address of a table, if anything."""
    factors_on_sums = False
    """True if ``decode_levels`` gives numbers times their scales of two levels, for a kernel that multiplies sums by
    ``factors``."""

    @property
    def exact_scale(self) -> float:
        """What a number stands for that is decoded to 1.0 without its scale."""
        return _UNIT if self._subnormal else 1.0

    @property
    def _subnormal(self) -> bool:
        """True if exact numbers are made of codes as subnormals."""
        return self.kind == "bf16" and self.bits > 4

    @property
    def middle(self) -> float:
        """The code of 0 if there are no zero points."""
        return 2.0 ** (self.bits - 1)

    @property
    def upper(self) -> int:
        """Factor of the codes of rows g + 8 where they lie."""
        return upper_factor(self.bits)

    @property
    def mixed(self) -> bool:
        return self.kind != self.scale_kind

    @property
    def _factors(self) -> tuple[float, float]:
        """What the codes of rows g and g + 8 are multiplied by, with their biases."""
        if self._subnormal:
            return 1 / _SUBNORMAL / _UNIT, 1 / _SUBNORMAL / _UNIT / self.upper
        return 1.0, 1 / self.upper if self.kind == "f16" else 1.0

    @property
    def _biases(self) -> tuple[float, float]:
        """Numbers to subtract from the products."""
        if self._subnormal:
            return 0.0, 0.0
        return tuple(_BIAS[self.kind] * factor for factor in self._factors)

    def offsets(self, words: tuple[Int32, ...], _table: Int32) -> tuple[Int32, ...]:
        """For rows g and g + 8: what turns bias + u into the exact number that the scale multiplies, u minus the middle
        or u - z (or u itself with a float zero point). ``words`` is the scale word, and the zero word if there is
        one."""
        if self.zero == "int":
            return tuple(self._integer_offset(b, words[1], h) for b, h in zip(self._biases, (False, True), strict=True))
        middle = self.middle / self.exact_scale if self.zero == "none" else 0
        return tuple(_twice(self.kind, -b - middle) for b in self._biases)

    def _integer_offset(self, bias: float, word: Int32, high: bool) -> Int32:
        if self.mixed:
            value = Float32(-bias) - half_to_float(self.scale_kind, word, high) * Float32(1 / self.exact_scale)
            return pack_half2(self.kind, value, value)
        if self._subnormal:
            return self._pairwise("mul", broadcast_half(word, high), _twice(self.kind, -1 / _UNIT))
        return self._pairwise("sub", _twice(self.kind, -bias), broadcast_half(word, high))

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction as exact numbers, for a kernel that scales its sums: integers,
        or integers / exact_scale."""
        return tuple(
            self._exact(biased, self._factors[i % 2], offsets[i % 2]) for i, biased in enumerate(self._biased(words))
        )

    def _exact(self, biased: Int32, factor: float, offset: Int32) -> Int32:
        if factor == 1.0:
            return self._pairwise("add", biased, offset)
        return fma_pair(self.kind, biased, _twice(self.kind, factor), offset)

    def scales_and_zeros(self, words: tuple[Int32, ...], field: int = 0) -> tuple[tuple[Float32, Float32 | None], ...]:
        """For rows g and g + 8, in float32: the scale, and the float zero point if there is one. field: which of the
        groups that share the words."""
        rows = []
        for high in (False, True):
            zero = None
            if self.zero == "float":
                zero = half_to_float(self.scale_kind, words[1], high)
            rows.append((half_to_float(self.scale_kind, words[0], high), zero))
        return tuple(rows)

    def prepare(self, words: tuple[Int32, ...], table: Int32, _field: int = 0) -> tuple[PreparedRow, ...]:
        """Once per group: what :meth:`decode` needs of rows g and g + 8."""
        offsets = self.offsets(words, table)
        if self.mixed:
            unit, rows = self.exact_scale, zip(offsets, self.scales_and_zeros(words), strict=True)
            return tuple(PreparedRow(offset, times(scale, unit), zero) for offset, (scale, zero) in rows)
        rows = []
        for offset, high in zip(offsets, (False, True), strict=True):
            zero = broadcast_half(words[1], high) if self.zero == "float" else None
            rows.append(PreparedRow(offset, broadcast_half(words[0], high), zero))
        return tuple(rows)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[PreparedRow, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights, rounded once to ``kind``."""
        exact = self.decode_exact(words, tuple(row.offset for row in prepared))
        return tuple(self._scaled(e, prepared[i % 2].scale, prepared[i % 2].zero) for i, e in enumerate(exact))

    def _biased(self, words: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """bias + u, two codes a register; in fp16, and as subnormals, those of rows g + 8 are ``upper`` times as
        high."""
        if self._subnormal:
            return codes_of(words, self.bits)
        bias = bits_of(self.kind, _BIAS[self.kind]) * 0x10001
        if self.kind == "f16":
            return codes_of(words, self.bits, bias)
        mask = (2**self.bits - 1) * 0x10001
        shifts = "".join(f"shr.u32 t{i}, $4, {4 * i}; " for i in (1, 2, 3))
        picks = "".join(f"lop3.b32 ${i}, {f't{i}' if i else '$4'}, {mask:#x}, {bias:#x}, 0xEA; " for i in range(4))
        fields = fields_of(words, self.bits)
        return asm(f"{{ .reg .b32 t1, t2, t3; {shifts}{picks}}}", [Int32] * 4, fields, pure=True, early=True)

    def _scaled(self, exact: Int32, scale: Int32 | Float32, zero: Int32 | Float32 | None) -> Int32:
        if not self.mixed:
            if zero is None:
                return self._pairwise("mul", exact, scale)
            return fma_pair(self.kind, exact, scale, zero)
        low, high = (half_to_float(self.kind, exact, h) for h in (False, True))
        if zero is None:
            return pack_half2(self.kind, low * scale, high * scale)
        return pack_half2(self.kind, low * scale + zero, high * scale + zero)

    def _pairwise(self, operation: str, x: Int32, y: Int32) -> Int32:
        """x + y, x - y or x * y, of two elements each, rounded once."""
        if not self.only_fma or self.kind == "f16":
            return asm(f"{operation}.rn.{self.kind}x2 $0, $1, $2;", [Int32], [x, y], pure=True)[0]
        one, minus_one, minus_zero = (_twice("bf16", value) for value in (1.0, -1.0, -0.0))
        factors = {"add": (x, one, y), "sub": (y, minus_one, x), "mul": (x, y, minus_zero)}[operation]
        return fma_pair("bf16", *factors)


class SubnormalRow(NamedTuple):
    """Operands that turn the codes of one row and group into weights, each in both halves of a word."""

    scales: list[Int32]
    """The scale or, if it is an fp16 one, two bf16 numbers that add up to it."""
    addend: Int32
    """Addend of the code or, if one fma makes the weight, of the product."""


@dataclass(frozen=True)
class SubnormalDecoder(Decoder):
    """Decodes to bf16 in fewer instructions: beside a matrix instruction each takes twice its time (H200, 2026-11-21).

    A code's bits alone are the subnormal u * 2**-133, and four bits further up 16 * u * 2**-133, since the smallest
    exponents continue the subnormals: any byte is one. So every second code needs no shift, and with a scale of bf16 a
    weight is one fma of it: 8 s is exact, other than (128 + 8) s, and what is rounded is (u - 8) s alone. z s is not
    exact: with integer zero points u - z comes first. A scale of fp16 is the sum of two bf16, of 8 and 3 bits; (u - z)
    times the lesser is exact if u has four bits.

    Scales are multiplied by 2**100, so that scale * (u * 2**-133) stays in the range of bf16; those of three and two
    bits, which may be twice and four times as large, by 2**99 and 2**98. A decoded value is thus the weight times
    2**-33, and the epilogue multiplies the sums by ``sum_scale`` = 2**33; if it does not, one more multiplication of
    the weight does. Limits of four bits and more: |scale| >= 2**28 gives infinite weights; |scale| < 2**-93 loses bits.
    """

    allow_sum_scale: bool = field(default=True, kw_only=True)

    @property
    def _subnormal(self) -> bool:
        return True  # nine instead of eleven instructions for eight exact numbers of four bits

    @property
    def sum_scale(self) -> float:  # type: ignore[override]
        return self._weight_of_one if self.allow_sum_scale else 1.0

    @property
    def _scale_up(self) -> float:
        return 2.0 ** (96 + min(self.bits, 4))

    @property
    def _weight_of_one(self) -> float:
        """The weight whose product of scale and subnormal is 1."""
        return 1 / (_SUBNORMAL * self._scale_up)

    @staticmethod
    def decodes(kind: str, scale_kind: str, zero: str, bits: int = 4) -> bool:
        return kind == "bf16" and (scale_kind == "bf16" or (zero != "float" and bits <= 4))

    def prepare(self, words: tuple[Int32, ...], _table: Int32, _field: int = 0) -> tuple[SubnormalRow, ...]:
        """Once per group: what :meth:`decode` needs of rows g and g + 8."""
        if self.zero == "int":
            zeros = pack_half2("bf16", *self._floats(words[1])) if self.mixed else words[1]
            addends = self._pairwise("mul", zeros, pair(-_SUBNORMAL, -self.upper * _SUBNORMAL))
        elif self.zero == "float":
            addends = self._pairwise("mul", words[1], _twice("bf16", 1 / self._weight_of_one))
        elif self.mixed:
            addends = pair(-self.middle * _SUBNORMAL, -self.middle * self.upper * _SUBNORMAL)
        else:
            addends = self._pairwise("mul", words[0], _twice("bf16", -self.middle / self._weight_of_one))
        scales = self._scaled_up(words[0])
        return tuple(
            SubnormalRow([broadcast_half(both, high) for both in scales], broadcast_half(addends, high))
            for high in (False, True)
        )

    def _floats(self, word: Int32) -> list[Float32]:
        return [half_to_float(self.scale_kind, word, high) for high in (False, True)]

    def _scaled_up(self, word: Int32) -> list[Int32]:
        """One or two bf16 pairs that add up to the scales of rows g and g + 8, whose codes are one and ``upper`` times
        as large."""
        factors = self._scale_up, self._scale_up / self.upper
        if not self.mixed:
            return [self._pairwise("mul", word, pair(*factors))]
        values = [value * Float32(factor) for value, factor in zip(self._floats(word), factors, strict=True)]
        nearest = pack_half2("bf16", *values)
        low_bits = [value - half_to_float("bf16", nearest, bool(h)) for h, value in enumerate(values)]
        return [nearest, pack_half2("bf16", *low_bits)]

    def decode(self, words: tuple[Int32, ...], prepared: tuple[SubnormalRow, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale, rounded once."""
        codes = codes_of(words, self.bits)
        weights = tuple(self._weight(code, prepared[i % 2]) for i, code in enumerate(codes))
        if self.allow_sum_scale:
            return weights
        return tuple(self._pairwise("mul", weight, _twice("bf16", self._weight_of_one)) for weight in weights)

    def _weight(self, code: Int32, row: SubnormalRow) -> Int32:
        if not self.mixed and self.zero != "int":
            return fma_pair("bf16", code, row.scales[0], row.addend)
        number = self._pairwise("add", code, row.addend)
        if not self.mixed:
            return self._pairwise("mul", number, row.scales[0])
        nearest, low_bits = row.scales
        return fma_pair("bf16", number, nearest, self._pairwise("mul", number, low_bits))


class SinglesDecoder(Decoder):
    """Decodes codes of more than four bits beside scales of the other 16-bit dtype, whose products have up to 19 bits.

    A byte below the exponent of 2**15 is 2**15 + byte in float32, from which one fma makes (2**15 + u) s - (2**15 +
    128) s, exactly: the factors have 9 bits, or 12 for codes of five, and a scale 11.
    """

    @staticmethod
    def decodes(kind: str, scale_kind: str, zero: str, bits: int) -> bool:
        return bits > 4 and kind != scale_kind and zero == "none"

    def prepare(self, words: tuple[Int32, ...], _table: Int32, _field: int = 0) -> tuple[tuple[Float32, Float32], ...]:
        """Factor and addend of the bytes of rows g and g + 8."""
        rows = []
        for upper, (scale, _) in zip((1, self.upper), self.scales_and_zeros(words), strict=True):
            factor = times(scale, 1 / upper)
            rows.append((factor, factor * Float32(-_BYTE_BIAS - upper * self.middle)))
        return tuple(rows)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[tuple[Float32, Float32], ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights, rounded once to ``kind``."""
        fields, weights = fields_of(words, self.bits), []
        for position in range(8):
            number = biased_byte(fields[position % 2], position // 4 * 2 + position // 2 % 2)
            weights.append(fma(number, *prepared[position % 2]))
        return in_registers(self.kind, weights)


def in_registers(kind: str, weights: Sequence[Float32]) -> tuple[Int32, ...]:
    """Eight weights by position, rounded to ``kind``, as the four fragment registers of one instruction."""
    return tuple(pack_half2(kind, weights[i], weights[i + 4]) for i in range(4))


def fields_of(words: tuple[Int32, ...], bits: int) -> tuple[Int32, ...]:
    """The codes of a step, of up to four bits in the nibbles of one word, of more in the bytes of two: of rows g and of
    rows g + 8, the latter times ``upper``. A nibble of two or three bits has others above them."""
    if bits == 3:
        return (_select(0x33333333, *words),)
    if bits in (5, 6):
        rest = words[1] & (0x18181818 if bits == 5 else 0x3C3C3C3C)
        return _select(0x0F0F0F0F, words[0], rest), _select(0xF0F0F0F0, words[0], rest)
    return tuple(words)


def _select(mask: int, word: Int32, other: Int32) -> Int32:
    """The bits of ``word`` where the mask has ones, else those of ``other``."""
    return asm(f"lop3.b32 $0, {mask:#x}, $1, $2, 0xCA;", [Int32], [word, other], pure=True)[0]


def codes_of(words: tuple[Int32, ...], bits: int, bias: int = 0) -> tuple[Int32, ...]:
    """Two codes of a step a register, in the bits of ``bias``; those of rows g + 8 ``upper`` times as high."""
    fields = fields_of(words, bits)
    if bits > 4:
        spread = "".join(
            f"prmt.b32 ${i}, ${4 + i % 2}, {(bias >> 8 & 0xFF) * 0x1010101:#x}, {0x4240 + i // 2 * 0x101:#x}; "
            for i in range(4)
        )
        return asm(spread, [Int32] * 4, fields, pure=True, early=True)
    mask = (2**bits - 1) * 0x10001
    pick = f"lop3.b32 {{}}, {{}}, {{:#x}}, {bias:#x}, 0xEA; " if bias else "and.b32 {}, {}, {:#x}; "
    picks = "".join(pick.format(f"${i}", "t" if i > 1 else "$4", mask << i % 2 * 4) for i in range(4))
    return asm(f"{{ .reg .b32 t; shr.u32 t, $4, 8; {picks}}}", [Int32] * 4, fields, pure=True, early=True)


def biased_byte(word: Int32, byte: int) -> Float32:
    """A byte of a word + 2**15, in float32."""
    text = f"prmt.b32 $0, $1, $2, {0x7404 | byte << 4:#x};"
    return to_float("f32", asm(text, [Int32], [word, hidden_constant(0x47000000)], pure=True)[0])


def signed_level(
    words: tuple[Int32, ...], row: int, field: int, power: float = 1.0, bias: float = SIGNED_BIAS
) -> Float32:
    """A scale of two levels times a power of two: of row g (0) or g + 8, a byte with a sign of the first word, ``bias``
    for 0, times an fp16 factor of the second one."""
    factor = times(half_to_float("f16", words[1], row == 1), power)
    return fma(biased_byte(words[0], 2 * row + field), factor, factor * Float32(-bias))


def times(value: Float32, factor: float) -> Float32:
    """A float32 times a constant."""
    return value if factor == 1.0 else value * Float32(factor)


def fma_pair(kind: str, x: Int32, y: Int32, z: Int32) -> Int32:
    """x * y + z, of two elements each, rounded once."""
    return asm(f"fma.rn.{kind}x2 $0, $1, $2, $3;", [Int32], [x, y, z], pure=True)[0]


def bits_of(kind: str, value: float) -> int:
    """Bits of a number that ``kind`` holds exactly."""
    if kind == "f16":
        return int.from_bytes(struct.pack("<e", value), "little")
    return int.from_bytes(struct.pack("<f", value), "little") >> 16


def pair(low: float, high: float, kind: str = "bf16") -> Int32:
    """Two numbers that ``kind`` holds exactly, in the halves of a word."""
    return Int32(signed(pair_bits(low, high, kind)))


def pair_bits(low: float, high: float, kind: str = "bf16") -> int:
    """Bits of such a word."""
    return bits_of(kind, low) | bits_of(kind, high) << 16


def _twice(kind: str, value: float) -> Int32:
    return pair(value, value, kind)
