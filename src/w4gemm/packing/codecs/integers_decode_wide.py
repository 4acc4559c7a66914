"""From packed integers to 16-bit elements of a matrix instruction's operand A, beside scales of more than 16 bits.

A code's four bits at bits 16 to 19 of a float32 are the subnormal u * 2**-133, and at bits 20 to 23 u * 2**-129, since
the smallest exponents continue the subnormals. So two masks leave bytes of one code each, a prmt makes a float32 of a
byte, and one fma gives a weight, rounded to float32; a conversion rounds two of them to ``kind``. That is 22
instructions for eight weights, against 9 beside 16-bit scales. A larger code is a byte of its own. Instead of prmt a
dot product moves a byte, times 2**15, so that a code is half of that.

Scales are multiplied by 2**133 * 2**-48, and zero points by 2**-48, so that both and the weights stay in the range of
float32: a decoded value is the weight times 2**-48. The epilogue multiplies the sums by ``sum_scale``, or, in fp16 and
where it does not, another multiplication follows each fma. Limit: weights below 2**-78 lose bits.

A kernel that scales sums multiplies codes as bf16: their bits in one are the subnormal u * 2**-133, or 16 times that,
and one multiplication makes u / 64 of it.

Scales of two levels are bytes, times fp16 factors. A byte below the exponent of 2**23 is 2**23 + byte, from which one
fma makes (2**23 + byte) * factor - 2**23 * factor: exact, since a product has 19 significant bits. A byte with a sign,
stored as byte + 128, lies at bits 8 to 15 below the exponent of 2**15: (2**15 + 128) * factor has 20 significant bits,
where (2**23 + 128) * factor would have 27.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32

from w4gemm.packing.codecs.integers_decode import (
    SIGNED_BIAS,
    Decoder,
    codes_of,
    fields_of,
    fma_pair,
    in_registers,
    pair,
    pair_bits,
    signed_level,
    times,
)
from w4gemm.ptx.arithmetic import float_word, fma, half_to_float, hidden_constant, kept, repeat_half, signed, to_float
from w4gemm.ptx.asm import asm

_SCALE_DOWN = 2.0**-48
"""Factor of decoded weights."""
_BYTE_BIAS = 2.0**23
_SMALL_BIAS = 2.0**15 + 32
_LEVEL_UNIT = 2.0**-13
"""Number that a decoded 1.0 times the scale 1 stands for, without its factor."""
_EXACT_UNIT = 2.0**6
"""Number that a decoded 1.0 without its scale stands for, in bf16."""


class WideRow(NamedTuple):
    """Operands of a row's fma."""

    scale: Float32
    zero: Float32


class LevelUnits(NamedTuple):
    """Constants by which a lane prepares scales of row g, or of row g + 8, whose bytes have another exponent."""

    held: Int32
    """What a scale's byte is put behind: without zero points the row's exponent, else ``held_word``."""
    bias: Float32
    """Minus the bias of a scale's byte."""
    unit: Float32
    """With zero points it multiplies a scale's factor; without, it multiplies the scale and gives the addend."""


@dataclass(frozen=True)
class WideDecoder(Decoder):
    """Decodes to scale * u + zero point in float32, rounded to ``kind``. Its scale words are a float32 scale of rows g
    and g + 8, then their zero points, if any."""

    allow_sum_scale: bool = False
    by_dots: bool = field(default=False, kw_only=True)

    @property
    def sum_scale(self) -> float:  # type: ignore[override]
        return 1 / _SCALE_DOWN if self.allow_sum_scale and self.kind == "bf16" else 1.0

    @property
    def exact_scale(self) -> float:
        return _EXACT_UNIT if self.kind == "bf16" else 1.0

    @property
    def _units(self) -> tuple[float, float]:
        """Reciprocals of what the code 1 of rows g and g + 8 is."""
        return 2.0**133, 2.0**133 / self.upper

    @property
    def _number_units(self) -> tuple[float, float]:
        """The same of what it is among :meth:`_numbers`."""
        return tuple(2 * unit if self.by_dots else unit for unit in self._units)

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction, without their scales; in bf16 divided by 64."""
        if self.kind != "bf16":
            return super().decode_exact(words, offsets)
        addend = pair(*[-self.middle / _EXACT_UNIT if self.zero == "none" else -0.0] * 2)
        factors = [pair(*[unit / _EXACT_UNIT] * 2) for unit in self._units]
        codes = codes_of(words, self.bits)
        return tuple(fma_pair("bf16", code, factors[i % 2], addend) for i, code in enumerate(codes))

    def scales_and_zeros(self, words: tuple[Int32, ...], field: int = 0) -> tuple[tuple[Float32, Float32 | None], ...]:
        """For rows g and g + 8, in float32: the scale, and the zero point if there is one."""
        rows = self._rows(words, field, (1.0, 1.0), 1.0)
        return tuple((row.scale, row.zero if self.zero == "float" else None) for row in rows)

    def prepare(self, words: tuple[Int32, ...], _table: Int32, field: int = 0) -> tuple[WideRow, ...]:
        """Once per group: what :meth:`decode` needs of rows g and g + 8."""
        return self._rows(words, field, tuple(unit * _SCALE_DOWN for unit in self._number_units), _SCALE_DOWN)

    def _rows(
        self, words: tuple[Int32, ...], field: int, of_scales: tuple[float, ...], of_zeros: float
    ) -> tuple[WideRow, ...]:
        """Scales and zero points of rows g and g + 8 times powers of two; those of scales differ by row. Without zero
        points minus so many scales as the middle code says."""
        rows = []
        for row, of_scale in enumerate(of_scales):
            scale = to_float("f32", words[row])
            zero = to_float("f32", words[2 + row]) if self.zero == "float" else scale * Float32(-self.middle)
            rows.append(WideRow(times(scale, of_scale), times(zero, of_zeros)))
        return tuple(rows)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[WideRow, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale."""
        numbers = self._numbers(words)
        weights = [fma(number, *prepared[i % 2]) for i, number in enumerate(numbers)]
        if self.sum_scale == 1.0:
            weights = [weight * Float32(1 / _SCALE_DOWN) for weight in weights]
        return in_registers(self.kind, weights)

    def _numbers(self, words: tuple[Int32, ...]) -> tuple[Float32, ...]:
        """The codes of a step by position, over ``_number_units``."""
        fields = fields_of(words, self.bits)
        if self.bits <= 4:
            mask = (2**self.bits - 1) * 0x01010101
            fields = fields[0] & mask, fields[0] & signed(mask << 4)
        picks = "".join(self._pick(p // 4 * 2 + p // 2 % 2, p, 8 + p % 2) for p in range(8))
        bits = asm(picks, [Int32] * 8, fields, pure=True, early=True)
        return tuple(to_float("f32", number) for number in bits)

    def _pick(self, byte: int, target: int, source: int) -> str:
        """PTX that moves a byte of an operand to the bits of a number of :meth:`_numbers`."""
        if not self.by_dots:
            return f"prmt.b32 ${target}, ${source}, 0, {0x4044 | byte << 8:#x}; "
        half, selector = "lo" if byte < 2 else "hi", 0x8000 << 16 * (byte % 2)
        return f"dp2a.{half}.u32.u32 ${target}, {selector:#x}, ${source}, 0; "


@dataclass(frozen=True)
class TwoLevelDecoder(WideDecoder):
    """The same with scales of two levels: the scale word and the zero word hold bytes, of two groups, and the next two
    words the fp16 factors of scales and of zero points. Without zero points there is one word of each, of bytes with
    signs."""

    held: bool = field(default=False, kw_only=True)

    _bias: ClassVar = SIGNED_BIAS

    @property
    def held_word(self) -> int | None:  # type: ignore[override]
        """Upper bytes that :meth:`prepare` gives to scales of rows g, and to those of rows g + 8 or to zero points;
        then a byte with the lowest bit of an exponent, and 0. So the power of two of a factor is in the exponent of a
        biased byte."""
        if not self.held:
            return None
        return self._exponents[0] >> 1 << 24 | self._exponents[1] >> 1 << 16 | 0x8000

    @property
    def _exponents(self) -> tuple[int, int]:
        """Of biased bytes times the powers of two that factors are multiplied by in :meth:`prepare`."""
        units = self._number_units[0], 1.0 if self.zero == "float" else self._number_units[1]
        return tuple(127 + self._bias_power + round(math.log2(unit * _SCALE_DOWN)) for unit in units)

    @property
    def _bias_power(self) -> int:
        return 23 if self.zero == "float" else 15

    def prepare(self, words: tuple[Int32, ...], register: Int32, field: int = 0) -> tuple[WideRow, ...]:
        """Once per group: what :meth:`decode` needs of rows g and g + 8."""
        return self._held_rows(words, register, field) if self.held else super().prepare(words, register, field)

    def _held_rows(self, words: tuple[Int32, ...], held: Int32, field: int) -> tuple[WideRow, ...]:
        """The same from ``held_word``."""
        rows = []
        for row, unit in enumerate(self._number_units):
            if self.zero == "float":
                scale = self._held_product(words[0], words[2], 0, row, field, held, unit / self._number_units[0])
                rows.append(WideRow(scale, self._held_product(words[1], words[3], 1, row, field, held)))
            else:
                scale = self._held_product(words[0], words[1], row, row, field, held)
                rows.append(WideRow(scale, scale * Float32(-self.middle / unit)))
        return tuple(rows)

    def _held_product(
        self, word: Int32, factors: Int32, place: int, row: int, field: int, held: Int32, power: float = 1.0
    ) -> Float32:
        """A byte of ``word`` times a row's factor, times a power of two and the one that is number ``place`` of
        ``_exponents``."""
        exponent, byte = self._exponents[place], 2 * row + field
        low = f"4{byte}" if self.zero == "float" else f"{byte}4"
        factor = times(half_to_float("f16", factors, row == 1), power)
        bias = Float32(self._bias_unit(exponent))
        return self._biased_product(word, f"{7 - place}{4 + exponent % 2}{low}", factor, held, bias)

    def _biased_product(self, word: Int32, picks: str, factor: Float32, held: Int32, bias: Float32) -> Float32:
        """A byte of ``word``, behind those of ``held``, and a bias, times a factor."""
        number = to_float("f32", asm(f"prmt.b32 $0, $1, $2, 0x{picks};", [Int32], [word, held], pure=True)[0])
        return fma(number, factor, factor * bias)

    def _bias_unit(self, exponent: int) -> float:
        """What is added to a byte behind an exponent, for its bias."""
        return -(_BYTE_BIAS if self.zero == "float" else self._bias) * 2.0 ** (exponent - 127 - self._bias_power)

    def level_units(self, held: Int32, is_upper: Boolean) -> LevelUnits:
        """Return the constants of row g + 8, if ``is_upper``, or of row g, kept in registers. All lanes of a warp must
        call this. held: ``held_word``."""

        def of_row(low: float, high: float) -> Float32:
            return to_float("f32", kept(float_word(Float32(cutlass.select_(is_upper, Float32(high), Float32(low))))))

        exponents, units = self._exponents, self._number_units
        if self.zero == "float":
            bias = Float32(self._bias_unit(exponents[0]))
            return LevelUnits(held, bias, of_row(1.0, units[1] / units[0]))
        held = kept(Int32(cutlass.select_(is_upper, *(Int32(exponent << 23) for exponent in reversed(exponents)))))
        return LevelUnits(held, of_row(*map(self._bias_unit, exponents)), of_row(*(-self.middle / u for u in units)))

    def prepare_row(
        self, levels: tuple[Int32, ...], factors: tuple[Int32, ...], units: LevelUnits, field: int
    ) -> WideRow:
        """Return what :meth:`prepare` does, of the row of ``units`` alone. levels: the row's bytes of two groups, of
        scales and, if any, of zero points. factors: fp16, one of scales and, if any, one of zero points."""
        factor = half_to_float("f16", factors[0], False)
        if self.zero == "none":
            scale = self._biased_product(levels[0], f"76{field}4", factor, units.held, units.bias)
            return WideRow(scale, scale * units.unit)
        low, high = (4 + exponent % 2 for exponent in self._exponents)
        scale = self._biased_product(levels[0], f"7{low}4{field}", factor * units.unit, units.held, units.bias)
        factor, bias = half_to_float("f16", factors[1], False), Float32(self._bias_unit(self._exponents[1]))
        return WideRow(scale, self._biased_product(levels[1], f"6{high}4{field}", factor, units.held, bias))

    def _rows(
        self, words: tuple[Int32, ...], field: int, of_scales: tuple[float, ...], of_zeros: float
    ) -> tuple[WideRow, ...]:
        rows = []
        for row, of_scale in enumerate(of_scales):
            if self.zero == "float":
                scale = self._product(words[0], words[2], row, field, of_scale)
                rows.append(WideRow(scale, self._product(words[1], words[3], row, field, of_zeros)))
            else:
                scale = signed_level(words, row, field, of_scale, self._bias)
                rows.append(WideRow(scale, scale * Float32(-self.middle * of_zeros / of_scale)))
        return tuple(rows)

    def zero_levels(self, words: tuple[Int32, ...]) -> tuple[Int32, Int32]:
        """Of rows g and g + 8: the zero points of the two groups whose bytes share the words, in bf16, without their
        factor and divided by 64."""
        unit, none = pair(2.0**133 / _EXACT_UNIT, 2.0**133 / _EXACT_UNIT), pair(-0.0, -0.0)
        picked = [
            asm(f"prmt.b32 $0, $1, 0, {pick:#x};", [Int32], [words[1]], pure=True)[0] for pick in (0x4140, 0x4342)
        ]
        low, high = (fma_pair("bf16", subnormals, unit, none) for subnormals in picked)
        return low, high

    def zero_factors(self, words: tuple[Int32, ...]) -> tuple[Float32, Float32]:
        """What multiplies products of :meth:`zero_levels` of rows g and g + 8, beside sums of :meth:`decode_exact`."""
        unit = _EXACT_UNIT / self.exact_scale
        low, high = (times(half_to_float("f16", words[3], upper), unit) for upper in (False, True))
        return low, high

    def levels(self, word: Int32, factors: Int32, field: int = 0) -> tuple[Float32, Float32]:
        """Scales of rows g and g + 8, or zero points: of whichever the two words are, beside zero points."""
        return self._product(word, factors, 0, field, 1.0), self._product(word, factors, 1, field, 1.0)

    def _product(self, word: Int32, factors: Int32, row: int, field: int, power: float) -> Float32:
        """A byte of ``word`` times a factor and a power of two."""
        factor = times(half_to_float("f16", factors, row == 1), power)
        text = f"prmt.b32 $0, $1, $2, {0x7440 + 2 * row + field:#x};"
        biased = asm(text, [Int32], [word, hidden_constant(0x4B000000)], pure=True)[0]
        return fma(to_float("f32", biased), factor, factor * Float32(-_BYTE_BIAS))

    def scale_of_row(self, words: tuple[Int32, ...], row: Int32, field: int) -> Float32:
        """The scale of row g if ``row`` is 0, of row g + 8 if it is 1; lanes may differ."""
        factor = half_to_float("f16", words[len(words) // 2] >> row * 16, False)
        byte, unsigned = 2 * row + field, self.zero == "float"
        exponent, bias = (0x4B000000, _BYTE_BIAS) if unsigned else (0x47000000, self._bias)
        picks = byte + 0x7440 if unsigned else byte * 16 + 0x7404
        operands = [words[0], hidden_constant(exponent), picks]
        biased = asm("prmt.b32 $0, $1, $2, $3;", [Int32], operands, pure=True)[0]
        return fma(to_float("f32", biased), factor, factor * Float32(-bias))


@dataclass(frozen=True)
class SmallLevelDecoder(TwoLevelDecoder):
    """The same with scales of six bits and a sign, stored as scale + 32. Times a code of up to four bits, minus the
    middle one, a scale is at most 256 and exact in bf16: one fma makes it, and the factor alone multiplies sums.
    """

    _bias: ClassVar = _SMALL_BIAS

    @property
    def factors_on_sums(self) -> bool:
        return self.kind == "bf16" and self.bits <= 4

    def prepare_levels(self, words: tuple[Int32, ...], field: int) -> tuple[tuple[Int32, Int32], ...]:
        """Once per group: factor and addend of the codes of rows g and g + 8, each in both halves of a word."""
        text = f"prmt.b32 $0, $1, $2, {0x4240 + field * 0x101:#x};"
        picked = asm(text, [Int32], [words[0], hidden_constant(0x43434343)], pure=True)[0]
        units = [_LEVEL_UNIT * unit for unit in self._units]
        factors = hidden_constant(pair_bits(*units))  # HFMA2 takes one constant
        scales = fma_pair("bf16", picked, factors, pair(*[-160 * unit for unit in units]))
        addends = self._pairwise("mul", scales, pair(*[-self.middle / unit for unit in self._units]))
        return tuple((repeat_half(scales, high), repeat_half(addends, high)) for high in (False, True))

    def decode_levels(self, words: tuple[Int32, ...], prepared: tuple[tuple[Int32, Int32], ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: numbers times their scales."""
        codes = codes_of(words, self.bits)
        return tuple(fma_pair("bf16", code, *prepared[i % 2]) for i, code in enumerate(codes))

    def factors(self, words: tuple[Int32, ...]) -> tuple[Float32, Float32]:
        """What multiplies the sums of rows g and g + 8."""
        unit = 1 / _LEVEL_UNIT / self.exact_scale
        low, high = (times(half_to_float("f16", words[1], upper), unit) for upper in (False, True))
        return low, high


@dataclass(frozen=True)
class LevelSumDecoder(SmallLevelDecoder):
    """The same for a kernel that scales the sums of a block by the factors of its rows."""

    held_word = None

    @property
    def sum_scale(self) -> float:  # type: ignore[override]
        return 1.0

    @property
    def exact_scale(self) -> float:
        return 1.0

    def prepare(self, words: tuple[Int32, ...], _register: Int32, field: int = 0) -> tuple[tuple[Int32, Int32], ...]:
        return self.prepare_levels(words, field)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[tuple[Int32, Int32], ...]) -> tuple[Int32, ...]:
        return self.decode_levels(words, prepared)

    def scales(self, words: tuple[Int32, ...], _field: int) -> tuple[Float32, Float32]:
        return self.factors(words)


@dataclass(frozen=True)
class NibbleLevelDecoder(TwoLevelDecoder):
    """The same with scales and zero points of four bits, the halves of the bytes of one word."""

    def _rows(
        self, words: tuple[Int32, ...], field: int, of_scales: tuple[float, ...], of_zeros: float
    ) -> tuple[WideRow, ...]:
        return super()._rows(self._in_bytes(words), field, of_scales, of_zeros)

    def _held_rows(self, words: tuple[Int32, ...], held: Int32, field: int) -> tuple[WideRow, ...]:
        return super()._held_rows(self._in_bytes(words), held, field)

    def zero_levels(self, words: tuple[Int32, ...]) -> tuple[Int32, Int32]:
        return super().zero_levels(self._in_bytes(words))

    def zero_factors(self, words: tuple[Int32, ...]) -> tuple[Float32, Float32]:
        return super().zero_factors(self._in_bytes(words))

    def prepare_row(
        self, levels: tuple[Int32, ...], factors: tuple[Int32, ...], units: LevelUnits, field: int
    ) -> WideRow:
        return super().prepare_row(self._in_bytes(levels), factors, units, field)

    def _in_bytes(self, words: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The words as those of bytes."""
        levels, *factors = words
        return levels & 0x0F0F0F0F, levels >> 4 & 0x0F0F0F0F, *factors
