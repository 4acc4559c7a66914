"""From packed e4m3 codes to the 16-bit elements of a matrix instruction's operand A, in registers.

Five instructions make four registers' worth of bf16 numbers of each code word, times 2**-120 (packing/codecs/e4m3.py).
One multiplication, by a power of two or a scale, brings a pair of them into range; what is missing then is a factor of
the sums. In fp16, where they belong three bits further up, as numbers times 2**-8, a multiplication of the bits by 8
moves them. Beside float32 scales each is multiplied in float32, which is rounded, and two are rounded to ``kind``.

    x       scales            a number is multiplied by    of the sums
    bf16    of the sums       2**100                       2**20
    bf16    e8m0              2**(e + 99 - 127)            2**21
    fp16    of the sums       -                            2**8
    fp16    e8m0              2**8, then 2**e              1
    bf16    float32           s * 2**72                    2**48
    fp16    float32           s * 2**72, then 2**48        1
"""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Float32, Int32

from w4gemm.packing.codecs.e2m1_decode import E2m1Decoder
from w4gemm.packing.codecs.integers_decode import Decoder, times
from w4gemm.ptx.arithmetic import fma, half_to_float, pack_half2, to_float
from w4gemm.ptx.asm import asm

_PLACED = "".join(
    f"and.b32 ${2 * i}, ${4 + i}, 0x87F087F0; shf.r.wrap.b32 a, ${4 + i}, ${4 + i}, 4; and.b32 a, a, 0x87808780; "
    f"shl.b32 b, ${4 + i}, 4; and.b32 b, b, 0x00700070; or.b32 ${2 * i + 1}, a, b; "
    for i in range(2)
)
_MOVED = "".join(f"and.b32 b, ${i}, 0x07F007F0; mad.lo.u32 ${i}, b, 7, ${i}; " for i in range(4))
_SUM_SCALES = {("bf16", "f32"): 2.0**20, ("bf16", "e8m0"): 2.0**21, ("f16", "f32"): 2.0**8, ("f16", "e8m0"): 1.0}
_SCALE_DOWN = 2.0**-48
"""Factor of weights beside float32 scales, without which products of subnormals would leave the range of float32."""


def numbers_of(words: tuple[Int32, ...], moved: bool) -> tuple[Int32, ...]:
    """Numbers times 2**-120 as bf16 or, if ``moved``, times 2**-8 as fp16: four registers."""
    text = _PLACED + _MOVED if moved else _PLACED
    return asm(f"{{ .reg .b32 a, b; {text}}}", [Int32] * 4, words, pure=True, early=True)


class E4m3Decoder(E2m1Decoder):
    """Decodes to number * scale, or without a scale if that multiplies the row's sums."""

    @property
    def _sum_scale(self) -> float:
        return _SUM_SCALES[self.kind, self.scale_kind]

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[Int32, ...]:
        """The factors of rows g and g + 8, each in both halves of a word; none if they are all alike."""
        return super().prepare(words, table, field) if self.scale_kind == "e8m0" else (None, None)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale, rounded once."""
        numbers = numbers_of(words, self.kind == "f16")
        return tuple(self._weights(number, prepared[i % 2]) for i, number in enumerate(numbers))

    def _weights(self, numbers: Int32, factor: Int32 | None) -> Int32:
        if factor is not None and self.kind == "f16":
            return self._pairwise("mul", self._times(numbers, 2.0**8), factor)
        if factor is not None:
            weights = self._pairwise("mul", numbers, factor)
        elif self.kind == "f16":
            weights = numbers
        else:
            weights = self._times(numbers, 2.0**100)
        return weights if self.sum_scale == self._sum_scale else self._times(weights, self._sum_scale)


@dataclass(frozen=True)
class WideE4m3Decoder(Decoder):
    """Decodes to number * scale in float32, rounded to ``kind``. Its scale words are those of rows g and g + 8."""

    allow_sum_scale: bool = False

    separate_scales = False

    @property
    def sum_scale(self) -> float:
        return 1 / _SCALE_DOWN if self.allow_sum_scale and self.kind == "bf16" else 1.0

    def prepare(self, words: tuple[Int32, ...], _table: Int32, _field: int = 0) -> tuple[Float32, ...]:
        """The factors of rows g and g + 8."""
        return tuple(to_float("f32", word) * Float32(2.0**120 * _SCALE_DOWN) for word in words)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Float32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale."""
        registers = []
        for i, numbers in enumerate(numbers_of(words, False)):
            weights = [fma(half_to_float("bf16", numbers, h), prepared[i % 2], Float32(0.0)) for h in (False, True)]
            rest = 1.0 if self.sum_scale != 1.0 else 1 / _SCALE_DOWN
            registers.append(pack_half2(self.kind, *(times(weight, rest) for weight in weights)))
        return tuple(registers)


class StoredDecoder:
    """Beside e4m3 x: registers are code words as they are stored. Scales, if there are any, multiply sums.

    They are copies, because an asynchronous MMA may still read its registers when the next code words are loaded, and
    on the way around the main loop these come into the registers of the last ones. A move would not do: ptxas drops it.
    """

    sum_scale: ClassVar = 1.0

    def prepare(self, words: tuple[Int32, ...], _table: Int32, _field: int = 0) -> tuple[Int32]:
        """A zero that ptxas does not know to be one: no GPU has 2**31 multiprocessors."""
        return asm("mov.u32 $0, %smid; shr.u32 $0, $0, 31;", [Int32], pure=True)

    def scales(self, words: tuple[Int32, ...]) -> tuple[Float32, ...]:
        """Factors for the sums of a group, of rows g and g + 8."""
        return tuple(to_float("f32", word) for word in words)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Int32]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        (zero,) = prepared
        return tuple(word ^ zero for word in words)
