"""From packed e2m1 codes to the 16-bit elements of a matrix instruction's operand A, in registers.

Sign, exponent and mantissa of a code at bits 15, 8, 7 and 6 of a bf16 are its number times 2**-126, since 0.5 is a
subnormal there too. A word holds them such that four shifts and five masks bring those of eight codes to their places
(packing/codecs/e2m1.py). In fp16, where they belong at bits 15, 11, 10 and 9, as a number times 2**-14, a
multiplication of the bits by 8 moves them.

One multiplication by the scale, which has the missing power of two as far as the dtype has room for it, finishes a
pair of weights. What is missing then is a factor of the sums. An integer addition to the exponents instead would turn 0
into a power of two.

    x       scales    a number is multiplied by    of the sums    exact for scales of
    bf16    e8m0      2**(e + 99)                  2**27          2**-105 and more
    bf16    e4m3      s * 2**112                   2**14          any
    fp16    e8m0      2**14, then 2**e             1              2**-24 to 2**13, beyond which 6 is no fp16
    fp16    e4m3      s * 2**7                     2**7           any
"""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from w4gemm.packing.codecs.e2m1 import POWER_BIAS
from w4gemm.packing.codecs.integers_decode import Decoder, pair
from w4gemm.ptx.arithmetic import half_to_float, pack_half2, repeat_half, signed
from w4gemm.ptx.asm import asm

_BITS_IN_PLACE = (
    "shl.b32 b, $4, 6; shf.r.wrap.b32 c, $4, $4, 6; shl.b32 d, $4, 4; shf.r.wrap.b32 e, $4, $4, 4; "
    "and.b32 $0, $4, 0x81C081C0; and.b32 $1, b, 0x81C081C0; and.b32 $2, c, 0x81C081C0; "
    "and.b32 d, d, 0x01000100; lop3.b32 $3, e, 0x80C080C0, d, 0xEA; "
)
_MOVED = "".join(f"and.b32 b, ${i}, 0x01C001C0; mad.lo.u32 ${i}, b, 7, ${i}; " for i in range(4))
_SUM_SCALES = {("bf16", "e8m0"): 2.0**27, ("bf16", "e4m3"): 2.0**14, ("f16", "e8m0"): 1.0, ("f16", "e4m3"): 2.0**7}
_E4M3_EXPONENT = {"bf16": 0x70007000, "f16": 7 << 10 | 7 << 26}
"""By dtype of x: bits that make scale * 2**112 of one in a bf16, ored, and scale * 2**7 of one in an fp16, added."""


@dataclass(frozen=True)
class E2m1Decoder(Decoder):
    """Decodes to number * scale, rounded once. allow_sum_scale: see :class:`w4gemm.packing.codecs.base.Decoding`;
    without it another multiplication takes the factor of the sums."""

    allow_sum_scale: bool = False

    separate_scales = False
    _half_up = 0
    """Beside fp16 x an e8m0 scale is multiplied by 2**_half_up, and numbers are divided by it."""

    def bare(self) -> BareE2m1Decoder | None:
        """A decoder to numbers without their powers of two; None if there is none."""
        made = BareE2m1Decoder(self.kind, self.scale_kind, self.zero, allow_sum_scale=True)
        return made if (self.kind, self.scale_kind) == ("bf16", "e8m0") else None

    @property
    def sum_scale(self) -> float:  # type: ignore[override]
        return self._sum_scale if self.allow_sum_scale else 1.0

    @property
    def _sum_scale(self) -> float:
        return _SUM_SCALES[self.kind, self.scale_kind]

    def prepare(self, words: tuple[Int32, ...], _table: Int32, field: int = 0) -> tuple[Int32, ...]:
        """The factors of rows g and g + 8, each in both halves of a word."""
        factors = self._powers(words[0], field) if self.scale_kind == "e8m0" else self._scales(words[0], field)
        return tuple(repeat_half(factors, high) for high in (False, True))

    def _powers(self, word: Int32, field: int) -> Int32:
        in_place = _shifted(word, 7 - 8 * field) & signed(0x7F807F80)
        if self.kind == "bf16":
            return in_place
        floats = [
            half_to_float("bf16", in_place, high) * Float32(2.0 ** (self._half_up - POWER_BIAS))
            for high in (False, True)
        ]
        return pack_half2("f16", *floats)

    def _scales(self, word: Int32, field: int) -> Int32:
        if self.kind == "bf16":
            return _shifted(word, 4 - 8 * field) & signed(0x0FF00FF0) | signed(_E4M3_EXPONENT["bf16"])
        return (_shifted(word, 7 - 8 * field) & signed(0x7F807F80)) + signed(_E4M3_EXPONENT["f16"])

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale, rounded once."""
        return tuple(self._weights(numbers, prepared[i % 2]) for i, numbers in enumerate(self._numbers(words[0])))

    def _numbers(self, word: Int32) -> tuple[Int32, ...]:
        """Numbers times 2**-126, in fp16 times 2**-14: four registers."""
        text = _BITS_IN_PLACE if self.kind == "bf16" else _BITS_IN_PLACE + _MOVED
        return asm(f"{{ .reg .b32 b, c, d, e; {text}}}", [Int32] * 4, [word], pure=True, early=True)

    def _weights(self, numbers: Int32, factor: Int32) -> Int32:
        if (self.kind, self.scale_kind) == ("f16", "e8m0"):
            numbers = self._times(numbers, 2.0**14)
        weights = self._pairwise("mul", numbers, factor)
        return weights if self.sum_scale == self._sum_scale else self._times(weights, self._sum_scale)

    def _times(self, numbers: Int32, factor: float) -> Int32:
        return self._pairwise("mul", numbers, pair(factor, factor, self.kind))


@dataclass(frozen=True)
class BareE2m1Decoder(E2m1Decoder):
    """Decodes to numbers times 2**-126, in bf16, for a kernel that multiplies them by so much larger x that sums in
    float32 lose nothing, and scales the sums of each group."""

    separate_scales = True
    factors_on_sums = False

    @property
    def exact_scale(self) -> float:
        return self._sum_scale

    def offsets(self, words: tuple[Int32, ...], _table: Int32) -> tuple[Int32, ...]:
        """None."""
        return ()

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        return self._numbers(words[0])

    def scales_and_zeros(self, words: tuple[Int32, ...], field: int = 0) -> tuple[tuple[Float32, None], ...]:
        """For rows g and g + 8 what sums are multiplied by, without ``exact_scale``."""
        powers = self._powers(words[0], field)
        return tuple((half_to_float("bf16", powers, high), None) for high in (False, True))


def _shifted(word: Int32, by: int) -> Int32:
    """A word shifted to the left, or, if ``by`` is negative, to the right."""
    return word << by if by >= 0 else word >> -by
