"""Codecs of int4, int3 and int2 for e4m3 x: a code u of b bits stands for u - 2**(b - 1), int4's for u - z beside zero
points."""

from __future__ import annotations

import itertools
from typing import Any

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.codecs.base import MMA8, Bits, Codec, Decoding, WeightOperand

_CODES = tuple(range(16))
_SIGN_AND_SIZE = tuple(u & 3 | u >> 1 & 4 | (u << 1 ^ u) & 8 for u in _CODES)
_ROW_BYTES = 16  # of the decoder's table: the 16 codes of a scale or zero point


def _sign_magnitude(bits: int) -> tuple[int, ...]:
    """The stored number of each code: 2 * v for v = u - 2**(bits - 1) >= 0, else 2 * (-1 - v) + 1."""
    half = 2 ** (bits - 1)
    return tuple(2 * (u - half) if u >= half else 2 * (half - 1 - u) + 1 for u in range(2 * half))


class Fp8Codec(Codec):
    """For scales of 16 bits or e4m3."""

    def refusal(self, format: WeightFormat) -> str:
        if format.zero == "float":
            return (
                "float zero points are not multiples of the scale, so e4m3 cannot hold u - z; 16-bit activations take "
                "them in the mma16 layout"
            )
        if format.zero == "int" and self.bits < 4:
            return f"fp8 activations take zero points with int4 alone, 16-bit ones with {format.element} too"
        return ""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.integers_decode_fp8 import FoldedDecoder, Fp8Decoder, NarrowDecoder, TableDecoder

        if self.bits < 4:
            return NarrowDecoder(weight.scale, self.bits)
        if self.zero_step:
            return TableDecoder(weight.scale)
        return (Fp8Decoder if self.scales_on_sums else FoldedDecoder)(weight.scale)


INT4_MMA8 = Fp8Codec(
    "int4_mma8",
    MMA8,
    "int4",
    ("bf16", "fp16"),
    ("none",),
    _sign_magnitude(4),
    tuple(Bits(p, 15, 8 * (p % 4) + 4 * (p // 4)) for p in range(8)),
    scales_on_sums=True,
)
"""A nibble is sign and magnitude (:func:`_sign_magnitude`); col16 is the high one of byte i."""

INT4_MMA8_ZEROS = Fp8Codec(
    "int4_mma8_zeros",
    MMA8,
    "int4",
    ("bf16", "fp16"),
    ("int",),
    _CODES,
    tuple(Bits(p, 7, 4 * p) for p in range(8)) + tuple(Bits(p, 8, 8 * (p % 4) + 4 - 4 * (p // 4)) for p in range(8)),
    zero_step=_ROW_BYTES,
    table_rows=16,
    table_row_bytes=_ROW_BYTES,
    scales_on_sums=True,
)
"""A code is an index into a row of 16 bytes, one row for each zero point: its low three bits as a selector of prmt in
nibble p, its high bit at bit 7 of byte i for col16 0 and at bit 3 for col16 1."""

INT4_MMA8_FOLDED = Fp8Codec(
    "int4_mma8_folded",
    MMA8,
    "int4",
    ("e4m3",),
    ("none",),
    _SIGN_AND_SIZE,
    tuple(Bits(p, 15, 4 * p) for p in range(8)),
    scale_step=_ROW_BYTES,
    table_rows=256,
    table_row_bytes=_ROW_BYTES,
)
"""A nibble is an index into a row of 16 bytes, one row for each e4m3 scale: the low two bits of u, True if v >= 0, True
if -4 <= v < 4."""


def _narrow(bits: int) -> Codec:
    """The codec of 2 or 3 bits. The low two bits of a code of register r = row8 + 2 * col16 lie at bit 2 * r of byte i
    of the step's word, the third bits of both steps in a word of their own: at bit r of byte i for step 0, at r + 4 for
    step 1, which is turned."""
    places: list[Bits] = []
    for step, row8, col16, i in itertools.product(range(2), range(2), range(2), range(4)):
        position, register = 16 * step + 8 * row8 + 4 * col16 + i, row8 + 2 * col16
        places.append(Bits(position, 3, 8 * i + 2 * register, step))
        if bits == 3:
            places.append(Bits(position, 4, 8 * i + register + 4 * step - 2, 2))
    facts = f"int{bits}_mma8", MMA8, f"int{bits}", ("bf16", "fp16"), ("none",)
    turns = ((0, 0), (0, 4)) if bits == 3 else ()
    return Fp8Codec(*facts, _sign_magnitude(bits), tuple(places), turns, scales_on_sums=True)


INTEGERS_FP8 = (INT4_MMA8, INT4_MMA8_ZEROS, INT4_MMA8_FOLDED, _narrow(3), _narrow(2))
