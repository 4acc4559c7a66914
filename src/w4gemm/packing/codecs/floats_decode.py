"""From packed floats of 8 and 6 bits to the 16-bit elements of a matrix instruction's operand A, in registers.

Rotations, sums without carries and masks make bf16 numbers times 2**-power of the code words of a step
(packing/codecs/floats.py). One multiplication, by a power of two or a scale, brings a pair of them into range; what is
missing then is a factor of the sums. In fp16, where they belong three bits further up, as numbers times
2**-half_power, a multiplication of the bits by 8 moves them. Beside float32 scales each is multiplied in float32, which
is rounded, and two are rounded to ``kind``.

    x       scales            a number is multiplied by         of the sums
    bf16    of the sums       2**100                            2**(power - 100)
    bf16    e8m0              2**(e + 99 - 127)                 2**(power - 99)
    fp16    of the sums       -                                 2**half_power
    fp16    e8m0              2**(half_power - u), 2**(e + u)   1
    bf16    float32           s * 2**(power - 48)               2**48
    fp16    float32           s * 2**(power - 48), then 2**48   1

u is 8 for e5m2, whose scales may be so much smaller, else 0: fp16 holds e5m2's numbers times 2**-8 exactly.
"""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cutlass import Float32, Int32

from w4gemm.packing.codecs.e2m1_decode import E2m1Decoder
from w4gemm.packing.codecs.floats import Bytes, Float, Turned
from w4gemm.packing.codecs.integers_decode import Decoder, times
from w4gemm.ptx.arithmetic import fma, half_to_float, pack_half2, to_float
from w4gemm.ptx.asm import asm

_SUM_SCALE_POWER, _E8M0_POWER = 100, 99
"""Powers of two by which bf16 numbers are multiplied: without a scale, and beside an e8m0 one."""
_SCALE_DOWN = 2.0**-48
"""Factor of weights beside float32 scales, without which products of subnormals would leave the range of float32."""


def numbers_of(words: tuple[Int32, ...], number: Float, moved: bool) -> tuple[Int32, ...]:
    """Numbers times 2**-power as bf16 or, if ``moved``, times 2**-half_power as fp16: four registers."""
    text, names = "", dict[Turned | Bytes, str]()
    for i, parts in enumerate(number.registers):
        for j, part in enumerate(parts):
            for word in part.words:
                if word not in names:
                    names[word] = f"t{len(names)}"
                    text += _brought(word, names[word])
            target, (first, *others) = "b" if j else f"${i}", [names[word] for word in part.words]
            for other in others:
                text, first = f"{text}xor.b32 b, {first}, {other}; ", "b"
            text += f"and.b32 {target}, {first}, {part.mask * 0x10001:#x}; "
            text += f"or.b32 ${i}, ${i}, b; " if j else ""
    if moved:
        mask = number.size_mask * 0x10001
        text += "".join(f"and.b32 b, ${i}, {mask:#x}; mad.lo.u32 ${i}, b, 7, ${i}; " for i in range(4))
    registers = ", ".join(["b", *names.values()])
    return asm(f"{{ .reg .b32 {registers}; {text}}}", [Int32] * 4, words, pure=True, early=True)


def _brought(word: Turned | Bytes, to: str) -> str:
    """The instruction that brings code words to a register."""
    if isinstance(word, Bytes):
        return f"prmt.b32 {to}, $4, $5, {word.selector:#x}; "
    source = f"${4 + word.word}"
    if word.turn < 0:
        return f"shl.b32 {to}, {source}, {-word.turn}; "
    return f"shf.r.wrap.b32 {to}, {source}, {source}, {word.turn}; " if word.turn else f"mov.b32 {to}, {source}; "


@dataclass(frozen=True)
class FloatDecoder(E2m1Decoder):
    """Decodes to number * scale, or without a scale if that multiplies the row's sums."""

    number: Float = field(kw_only=True)

    @property
    def _sum_scale(self) -> float:
        if self.kind == "f16":
            return 1.0 if self.scale_kind == "e8m0" else 2.0**self.number.half_power
        return 2.0 ** (self.number.power - (_E8M0_POWER if self.scale_kind == "e8m0" else _SUM_SCALE_POWER))

    @property
    def _half_up(self) -> int:
        return max(0, 8 - self.number.half_power)

    def prepare(self, words: tuple[Int32, ...], table: Int32, field: int = 0) -> tuple[Int32, ...]:
        """The factors of rows g and g + 8, each in both halves of a word; none if they are all alike."""
        return super().prepare(words, table, field) if self.scale_kind == "e8m0" else (None, None)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale, rounded once."""
        numbers = numbers_of(words, self.number, self.kind == "f16")
        return tuple(self._weights(number, prepared[i % 2]) for i, number in enumerate(numbers))

    def _weights(self, numbers: Int32, factor: Int32 | None) -> Int32:
        if factor is not None and self.kind == "f16":
            return self._pairwise("mul", self._times(numbers, 2.0 ** (self.number.half_power - self._half_up)), factor)
        if factor is not None:
            weights = self._pairwise("mul", numbers, factor)
        elif self.kind == "f16":
            weights = numbers
        else:
            weights = self._times(numbers, 2.0**_SUM_SCALE_POWER)
        return weights if self.sum_scale == self._sum_scale else self._times(weights, self._sum_scale)


@dataclass(frozen=True)
class WideFloatDecoder(Decoder):
    """Decodes to number * scale in float32, rounded to ``kind``. Its scale words are those of rows g and g + 8."""

    allow_sum_scale: bool = False
    number: Float = field(kw_only=True)

    separate_scales = False

    @property
    def sum_scale(self) -> float:
        return 1 / _SCALE_DOWN if self.allow_sum_scale and self.kind == "bf16" else 1.0

    def prepare(self, words: tuple[Int32, ...], _table: Int32, _field: int = 0) -> tuple[Float32, ...]:
        """The factors of rows g and g + 8."""
        return tuple(to_float("f32", word) * Float32(2.0**self.number.power * _SCALE_DOWN) for word in words)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Float32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale."""
        registers = []
        for i, numbers in enumerate(numbers_of(words, self.number, False)):
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

    def scales(self, words: tuple[Int32, ...], _field: int = 0) -> tuple[Float32, ...]:
        """Factors for the sums of a group, of rows g and g + 8."""
        return tuple(to_float("f32", word) for word in words)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[Int32]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction."""
        (zero,) = prepared
        return tuple(word ^ zero for word in words)
