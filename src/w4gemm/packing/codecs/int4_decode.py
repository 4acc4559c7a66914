"""From packed 4-bit codes to the 16-bit elements of a matrix instruction's operand A, in registers.

The trick (Kim et al., "Who says elephants can't run", 2022): a 4-bit code OR-ed into the lowest mantissa bits of 1024.0
in fp16, or of 128.0 in bf16, *is* 1024 + u or 128 + u; subtracting 1024 + z gives u - z exactly, and one multiplication
by the scale rounds once. Folding both into one fma would round z * s too, which is an error of up to 0.27 s in bf16.
In fp16 four bits further up are 1024 + 16 * u, which one fma turns into u - z, so every second code needs no shift.

One code word (packing/codecs/int4.py) becomes four registers: rows g, g + 8, g, g + 8 of the fragment.
"""

# mypy: ignore-errors
from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Float32, Int32

from w4gemm.ptx.arithmetic import broadcast_half, half_to_float, pack_half2
from w4gemm.ptx.asm import asm

_BIAS = {"f16": 1024.0, "bf16": 128.0}
_SUBNORMAL, _SCALE_UP = 2.0**-133, 2.0**100  # the smallest bf16, and what scales are multiplied by beside it


class PreparedRow(NamedTuple):
    """Operands that turn the codes of one row and group into weights: float32, or pairs of equal 16-bit numbers."""

    offset: Int32
    """Addend that makes the exact integer u - 8 or u - z (u with a float zero point) of bias + u."""
    scale: Int32 | Float32
    zero: Int32 | Float32 | None
    """Float zero point, if there is one."""


@dataclass(frozen=True)
class Decoder:
    """Decodes to ``kind`` ("f16" or "bf16") with scales of ``scale_kind`` and zero points "none", "int" or "float".

    Where the two kinds differ the product is formed in float32 and rounded once, at about twice the instructions.
    ``only_fma``: for GPUs before SM90, which have no other arithmetic on pairs of bf16; the bits are the same.
    """

    kind: str
    scale_kind: str
    zero: str
    only_fma: bool = False

    sum_scale = 1.0
    """Factor of the sums: a decoded 1.0 stands for this weight."""
    exact_scale = 1.0
    """The same for numbers that are decoded without their scales."""
    separate_scales = True
    """True if :meth:`decode_exact` gives numbers without their scales, for a kernel that scales sums."""

    @property
    def mixed(self) -> bool:
        return self.kind != self.scale_kind

    @property
    def _biases(self) -> tuple[float, float]:
        """Numbers to subtract from the codes of rows g and g + 8, the latter in fp16 after division by 16."""
        bias = _BIAS[self.kind]
        return bias, bias / 16 if self.kind == "f16" else bias

    def offsets(self, words: tuple[Int32, ...], _table: Int32) -> tuple[Int32, ...]:
        """For rows g and g + 8: what turns bias + u into the exact integer that the scale multiplies, u - 8 or u - z
        (or u itself with a float zero point). ``words`` is the scale word, and the zero word if there is one."""
        if self.zero == "int":
            return tuple(self._integer_offset(b, words[1], h) for b, h in zip(self._biases, (False, True), strict=True))
        return tuple(_twice(self.kind, -b - (8 if self.zero == "none" else 0)) for b in self._biases)

    def _integer_offset(self, bias: float, word: Int32, high: bool) -> Int32:
        if self.mixed:
            value = Float32(-bias) - half_to_float(self.scale_kind, word, high)
            return pack_half2(self.kind, value, value)
        return self._pairwise("sub", _twice(self.kind, -bias), broadcast_half(word, high))

    def decode_exact(self, words: tuple[Int32, ...], offsets: tuple[Int32, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction as exact integers, for a kernel that scales its sums."""
        return tuple(self._exact(b, offsets[i % 2], i % 2 == 1) for i, b in enumerate(self._biased(words[0])))

    def _exact(self, biased: Int32, offset: Int32, upper: bool) -> Int32:
        if upper and self.kind == "f16":
            return fma_pair("f16", biased, _twice("f16", 1 / 16), offset)
        return self._pairwise("add", biased, offset)

    def scales_and_zeros(self, words: tuple[Int32, ...], field: int = 0) -> tuple[tuple[Float32, Float32 | None], ...]:
        """For rows g and g + 8, in float32: the scale, and the float zero point if there is one. field: which of the
        groups that share the words."""
        rows = []
        for high in (False, True):
            zero = half_to_float(self.scale_kind, words[1], high) if self.zero == "float" else None
            rows.append((half_to_float(self.scale_kind, words[0], high), zero))
        return tuple(rows)

    def prepare(self, words: tuple[Int32, ...], table: Int32, _field: int = 0) -> tuple[PreparedRow, ...]:
        """Once per group: what :meth:`decode` needs of rows g and g + 8."""
        offsets = self.offsets(words, table)
        if self.mixed:
            values = self.scales_and_zeros(words)
            return tuple(PreparedRow(offset, *value) for offset, value in zip(offsets, values, strict=True))
        rows = []
        for offset, high in zip(offsets, (False, True), strict=True):
            zero = broadcast_half(words[1], high) if self.zero == "float" else None
            rows.append(PreparedRow(offset, broadcast_half(words[0], high), zero))
        return tuple(rows)

    def decode(self, words: tuple[Int32, ...], prepared: tuple[PreparedRow, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights, rounded once to ``kind``."""
        exact = self.decode_exact(words, tuple(row.offset for row in prepared))
        return tuple(self._scaled(e, prepared[i % 2].scale, prepared[i % 2].zero) for i, e in enumerate(exact))

    def _biased(self, word: Int32) -> tuple[Int32, ...]:
        """bias + u, two codes a register; in fp16 bias + 16 * u in every second one."""
        bias = bits_of(self.kind, _BIAS[self.kind]) * 0x10001
        if self.kind == "f16":
            return codes_of(word, bias)
        shifts = "".join(f"shr.u32 t{i}, $4, {4 * i}; " for i in (1, 2, 3))
        picks = "".join(f"lop3.b32 ${i}, {f't{i}' if i else '$4'}, 0x000F000F, {bias:#x}, 0xEA; " for i in range(4))
        return asm(f"{{ .reg .b32 t1, t2, t3; {shifts}{picks}}}", [Int32] * 4, [word], pure=True, early=True)

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


class SubnormalDecoder(Decoder):
    """Decodes to bf16 in fewer instructions: beside a matrix instruction each takes twice its time (H200, 2026-11-21).

    A code's bits alone are the subnormal u * 2**-133, and four bits further up 16 * u * 2**-133, since the smallest
    exponents continue the subnormals. So every second code needs no shift, and with a scale of bf16 a weight is one fma
    of it: 8 s is exact, other than (128 + 8) s, and what is rounded is (u - 8) s alone. z s is not exact: with integer
    zero points u - z comes first. A scale of fp16 is the sum of two bf16, of 8 and 3 bits; (u - z) times the lesser is
    exact.

    Scales are multiplied by 2**100, so that scale * (u * 2**-133) stays in the range of bf16. A decoded value is thus
    the weight times 2**-33, and the epilogue multiplies the sums by ``sum_scale`` = 2**33. Limits: |scale| >= 2**28
    gives infinite weights; |scale| < 2**-93 loses bits.
    """

    sum_scale = 2.0**33

    @staticmethod
    def decodes(kind: str, scale_kind: str, zero: str) -> bool:
        return kind == "bf16" and (scale_kind == "bf16" or zero != "float")

    def prepare(self, words: tuple[Int32, ...], _table: Int32, _field: int = 0) -> tuple[SubnormalRow, ...]:
        """Once per group: what :meth:`decode` needs of rows g and g + 8."""
        if self.zero == "int":
            zeros = pack_half2("bf16", *self._floats(words[1])) if self.mixed else words[1]
            addends = self._pairwise("mul", zeros, pair(-_SUBNORMAL, -16 * _SUBNORMAL))
        elif self.zero == "float":
            addends = self._pairwise("mul", words[1], pair(1 / self.sum_scale, 1 / self.sum_scale))
        elif self.mixed:
            addends = pair(-8 * _SUBNORMAL, -128 * _SUBNORMAL)
        else:
            addends = self._pairwise("mul", words[0], pair(-8 / self.sum_scale, -8 / self.sum_scale))
        scales = self._scaled_up(words[0])
        return tuple(
            SubnormalRow([broadcast_half(both, high) for both in scales], broadcast_half(addends, high))
            for high in (False, True)
        )

    def _floats(self, word: Int32) -> list[Float32]:
        return [half_to_float(self.scale_kind, word, high) for high in (False, True)]

    def _scaled_up(self, word: Int32) -> list[Int32]:
        """One or two bf16 pairs that add up to the scales of rows g and g + 8, whose codes are one and 16 times as
        large."""
        factors = _SCALE_UP, _SCALE_UP / 16
        if not self.mixed:
            return [self._pairwise("mul", word, pair(*factors))]
        values = [value * Float32(factor) for value, factor in zip(self._floats(word), factors, strict=True)]
        nearest = pack_half2("bf16", *values)
        low_bits = [value - half_to_float("bf16", nearest, bool(h)) for h, value in enumerate(values)]
        return [nearest, pack_half2("bf16", *low_bits)]

    def decode(self, words: tuple[Int32, ...], prepared: tuple[SubnormalRow, ...]) -> tuple[Int32, ...]:
        """The four fragment registers of one instruction: weights / sum_scale, rounded once."""
        return tuple(self._weight(code, prepared[i % 2]) for i, code in enumerate(codes_of(words[0])))

    def _weight(self, code: Int32, row: SubnormalRow) -> Int32:
        if not self.mixed and self.zero != "int":
            return fma_pair("bf16", code, row.scales[0], row.addend)
        number = self._pairwise("add", code, row.addend)
        if not self.mixed:
            return self._pairwise("mul", number, row.scales[0])
        nearest, low_bits = row.scales
        return fma_pair("bf16", number, nearest, self._pairwise("mul", number, low_bits))


def codes_of(word: Int32, bias: int = 0) -> tuple[Int32, ...]:
    """Two codes a register in the bits of ``bias``, those of rows g + 8 four bits further up: one shift for all."""
    pick = f"lop3.b32 {{}}, {{}}, {{:#x}}, {bias:#x}, 0xEA; " if bias else "and.b32 {}, {}, {:#x}; "
    picks = "".join(pick.format(f"${i}", "t" if i > 1 else "$4", 0xF000F << i % 2 * 4) for i in range(4))
    return asm(f"{{ .reg .b32 t; shr.u32 t, $4, 8; {picks}}}", [Int32] * 4, [word], pure=True, early=True)


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
    bits = bits_of(kind, low) | bits_of(kind, high) << 16
    return Int32(bits - 2**32 if bits >= 2**31 else bits)


def _twice(kind: str, value: float) -> Int32:
    return pair(value, value, kind)
