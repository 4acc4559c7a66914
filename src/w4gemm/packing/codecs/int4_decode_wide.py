"""From packed 4-bit codes to 16-bit elements of a matrix instruction's operand A, beside scales of more than 16 bits.

A code's four bits at bits 16 to 19 of a float32 are the subnormal u * 2**-133, and at bits 20 to 23 u * 2**-129, since
the smallest exponents continue the subnormals. So one mask makes a float32 of a code, three shifts serve the eight of a
word, and one fma gives a weight, rounded to float32; a conversion rounds two of them to ``kind``. That is 23
instructions for eight weights, against 9 beside 16-bit scales.

Scales are multiplied by 2**133 * 2**-48, and zero points by 2**-48, so that both and the weights stay in the range of
float32: a decoded value is the weight times 2**-48. The epilogue multiplies the sums by ``sum_scale``, or, in fp16 and
where it does not, another multiplication follows each fma. Limit: weights below 2**-78 lose bits.

A kernel that scales sums multiplies codes as bf16: their bits in one are the subnormal u * 2**-133, or 16 times that,
and one multiplication makes u / 64 of it.

Scales of two levels are bytes, times fp16 factors. A byte below the exponent of 2**23 is 2**23 + byte, from which one
fma makes (2**23 + byte) * factor - 2**23 * factor: exact, since a product has 19 significant bits.
"""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Float32, Int32

from w4gemm.packing.codecs.int4_decode import Decoder, codes_of, fma_pair, pair
from w4gemm.ptx.arithmetic import fma, half_to_float, hidden_constant, pack_half2, to_float
from w4gemm.ptx.asm import asm

_SCALE_DOWN = 2.0**-48
"""Factor of decoded weights."""
_UNITS = 2.0**133, 2.0**129
"""Reciprocals of what the code 1 of rows g and g + 8 is."""
_BYTE_BIAS = 2.0**23
_EXACT_UNIT = 2.0**6
"""Number that a decoded 1.0 without its scale stands for, in bf16."""


class WideRow(NamedTuple):
    """Operands of a row's fma."""

    scale: Float32
    zero: Float32


@dataclass(frozen=True)
class WideDecoder(Decoder):
    """Decodes to scale * u + zero point in float32, rounded to ``kind``. Its scale words are a float32 scale of rows g
    and g + 8, then their zero points, if any."""

    allow_sum_scale: bool = False

    @property
    def sum_scale(self) -> float:  # type: ignore[override]
        return 1 / _SCALE_DOWN if self.allow_sum_scale and self.kind == "bf16" else 1.0

    @property
    def _exact_unit(self) -> float:
        return _EXACT_UNIT if self.kind == "bf16" else 1.0

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction, without their scales; in bf16 divided by 64."""
        if self.kind != "bf16":
            return super().decode_exact(words, offsets)
        addend = pair(*[-8 / _EXACT_UNIT if self.zero == "none" else -0.0] * 2)
        factors = [pair(*[unit / _EXACT_UNIT] * 2) for unit in _UNITS]
        return tuple(fma_pair("bf16", code, factors[i % 2], addend) for i, code in enumerate(codes_of(words[0])))

    def scales_and_zeros(self, words: tuple[Int32, ...], field: int = 0) -> tuple[tuple[Float32, Float32 | None], ...]:
        """For rows g and g + 8, in float32: the factor of what :meth:`decode_exact` gives, and the zero point if there
        is one."""
        rows = self._rows(words, field, (self._exact_unit, self._exact_unit), 1.0)
        return tuple((row.scale, row.zero if self.zero == "float" else None) for row in rows)

    def prepare(self, words: tuple[Int32, ...], _table: Int32, field: int = 0) -> tuple[WideRow, ...]:
        """Once per group: what :meth:`decode` needs of rows g and g + 8."""
        return self._rows(words, field, tuple(unit * _SCALE_DOWN for unit in _UNITS), _SCALE_DOWN)

    def _rows(
        self, words: tuple[Int32, ...], field: int, of_scales: tuple[float, ...], of_zeros: float
    ) -> tuple[WideRow, ...]:
        """Scales and zero points of rows g and g + 8 times powers of two; those of scales differ by row. Without zero
        points -8 scales, as int4's codes have."""
        rows = []
        for row, times in enumerate(of_scales):
            scale = to_float("f32", words[row])
            zero = to_float("f32", words[2 + row]) if self.zero == "float" else scale * Float32(-8.0)
            rows.append(WideRow(_times(scale, times), _times(zero, of_zeros)))
        return tuple(rows)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[WideRow, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale."""
        numbers = _numbers(words[0])
        weights = [fma(number, *prepared[i % 2]) for i, number in enumerate(numbers)]
        if self.sum_scale == 1.0:
            weights = [weight * Float32(1 / _SCALE_DOWN) for weight in weights]
        return tuple(pack_half2(self.kind, weights[i], weights[i + 4]) for i in range(4))


class TwoLevelDecoder(WideDecoder):
    """The same with scales of two levels: the scale word and the zero word hold bytes, of two groups, and the next two
    words the fp16 factors of scales and of zero points."""

    def _rows(
        self, words: tuple[Int32, ...], field: int, of_scales: tuple[float, ...], of_zeros: float
    ) -> tuple[WideRow, ...]:
        found = []
        for row, times in enumerate(of_scales):
            scale = self._product(words, 0, row, field, times)
            found.append(WideRow(scale, self._product(words, 1, row, field, of_zeros)))
        return tuple(found)

    def _product(self, words: tuple[Int32, ...], level: int, row: int, field: int, times: float) -> Float32:
        """A scale (level 0) or zero point (level 1) times a power of two."""
        factor = _times(half_to_float("f16", words[2 + level], row == 1), times)
        text = f"prmt.b32 $0, $1, $2, {0x7440 + 2 * row + field:#x};"
        biased = asm(text, [Int32], [words[level], hidden_constant(0x4B000000)], pure=True)[0]
        return fma(to_float("f32", biased), factor, factor * Float32(-_BYTE_BIAS))


def _times(value: Float32, factor: float) -> Float32:
    return value if factor == 1.0 else value * Float32(factor)


def _numbers(word: Int32) -> tuple[Float32, ...]:
    """The codes in nibbles 0 to 7, those of even ones times 2**-133, of odd ones times 2**-129."""
    shifts = "shl.b32 a, $8, 16; shl.b32 b, $8, 8; shr.u32 c, $8, 8; "
    sources = ("a", "a", "b", "b", "$8", "$8", "c", "c")
    picks = "".join(f"and.b32 ${i}, {s}, {0xF0000 << i % 2 * 4:#x}; " for i, s in enumerate(sources))
    bits = asm(f"{{ .reg .b32 a, b, c; {shifts}{picks}}}", [Int32] * 8, [word], pure=True, early=True)
    return tuple(to_float("f32", number) for number in bits)
