"""Codecs of int5, int4, int3 and int2 for e4m3 x: a code u of b bits stands for u - 2**(b - 1), of up to four bits for
u - z beside integer zero points, and for u beside floats. e4m3 holds all integers up to 16, and above every second
one."""

from __future__ import annotations

import itertools
from typing import Any

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.codecs.base import MMA8, Bits, Codec, Decoding, WeightOperand

_CODES = tuple(range(16))
_SIGN_AND_SIZE = tuple(u & 3 | u >> 1 & 4 | (u << 1 ^ u) & 8 for u in _CODES)
_SIGN_MAGNITUDE = tuple(2 * (u - 8) if u >= 8 else 2 * (7 - u) + 1 for u in _CODES)
"""The stored number of each code of int4: 2 * v for v = u - 8 >= 0, else 2 * (-1 - v) + 1."""
_HALVES_OF_BYTES = tuple(Bits(p, 15, 8 * (p % 4) + 4 * (p // 4)) for p in range(8))
"""Places of nibbles: of byte i, the low one is col16 0, the high one col16 1."""
_ROW_BYTES = 16  # of the decoder's table: the codes of a scale or zero point, at most 16


class Fp8Codec(Codec):
    """For scales of 16 bits or e4m3; beside float zero points of 32 bits too."""

    def refusal(self, format: WeightFormat) -> str:
        if format.has_zero and self.bits > 4:
            return (
                f"with zero points the numbers of {format.element} reach {2**self.bits - 1}, and e4m3 holds no odd "
                "ones above 16; 16-bit activations take them"
            )
        return ""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs import integers_decode_fp8 as decoders
        from w4gemm.packing.codecs.integers_decode_fp8 import FoldedDecoder, Fp8Decoder, TableDecoder

        if self.bits > 4:
            return decoders.FiveBitDecoder(weight.scale)
        if self.bits < 4 and self.zero_step:
            return decoders.NarrowTableDecoder(weight.scale, self.bits)
        if self.bits < 4:
            return decoders.NarrowDecoder(weight.scale, self.bits, plain=weight.zero == "float")
        if weight.zero == "float":
            return decoders.PlainDecoder(weight.scale)
        if self.zero_step:
            return TableDecoder(weight.scale)
        return (Fp8Decoder if self.scales_on_sums else FoldedDecoder)(weight.scale)


INT4_MMA8 = Fp8Codec(
    "int4_mma8",
    MMA8,
    "int4",
    ("bf16", "fp16"),
    ("none",),
    _SIGN_MAGNITUDE,
    _HALVES_OF_BYTES,
    scales_on_sums=True,
)
"""A nibble is sign and magnitude (:data:`_SIGN_MAGNITUDE`)."""


def _beside_floats(
    element: str, stored: tuple[int, ...], places: tuple[Bits, ...], turns: tuple[tuple[int, ...], ...] = ()
) -> tuple[Codec, Codec]:
    """The codecs of an element beside float zero points of 16 and of 32 bits."""
    name, facts = f"{element}_mma8_floats", (("float",), stored, places, turns)
    return (
        Fp8Codec(name, MMA8, element, ("bf16", "fp16"), *facts, scales_on_sums=True),
        Fp8Codec(f"{name}_wide", MMA8, element, ("fp32",), *facts, scale_bits=32, scales_on_sums=True),
    )


INT4_MMA8_FLOATS, INT4_MMA8_FLOATS_WIDE = _beside_floats("int4", _CODES, _HALVES_OF_BYTES)

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


def _narrow(bits: int) -> tuple[Codec, ...]:
    """The codecs of 2 or 3 bits, without and with zero points of either kind. A code is a selector of prmt in a row of
    bytes, those of its numbers. Of register r = row8 + 2 * col16 of a step, byte i, its low two bits lie in nibble
    4 * row8 + i of the step's word, from bit 2 * col16 on. The third bits of both steps share a word: bit 2 + col16 of
    such a nibble for step 0, and for step 1, which is turned, bit col16."""
    places: list[Bits] = []
    for step, row8, col16, i in itertools.product(range(2), range(2), range(2), range(4)):
        position, nibble = 16 * step + 8 * row8 + 4 * col16 + i, 16 * row8 + 4 * i
        places.append(Bits(position, 3, nibble + 2 * col16, step))
        if bits == 3:
            places.append(Bits(position, 4, nibble + col16 - 2 * step, 2))
    order = tuple(range(2**bits)), tuple(places), ((0, 0), (0, 30)) if bits == 3 else ()
    facts: dict[str, Any] = {"table_rows": 2**bits, "table_row_bytes": _ROW_BYTES, "zero_step": _ROW_BYTES}
    name, scales = f"int{bits}", ("bf16", "fp16")
    return (
        Fp8Codec(f"{name}_mma8", MMA8, name, scales, ("none",), *order, scales_on_sums=True),
        *_beside_floats(name, *order),
        Fp8Codec(f"{name}_mma8_zeros", MMA8, name, scales, ("int",), *order, scales_on_sums=True, **facts),
    )


def _five_bits() -> Codec:
    """The codec of int5: what is stored for v = u - 16 is v if v >= 0, else 16 + (-1 - v). Its low four bits are a
    nibble as int4's; the fifth, the sign of register r = row8 + 2 * col16 of a step, byte i, lies at bit r of byte i of
    a word of both steps, for step 1, which is turned, at r + 4."""
    places: list[Bits] = []
    for step, row8, col16, i in itertools.product(range(2), range(2), range(2), range(4)):
        position, register = 16 * step + 8 * row8 + 4 * col16 + i, row8 + 2 * col16
        places.append(Bits(position, 15, 8 * i + 4 * col16, 2 * step + row8))
        places.append(Bits(position, 16, 8 * i + register + 4 * step - 4, 4))
    stored = tuple(u - 16 if u >= 16 else 31 - u for u in range(32))
    facts = "int5_mma8", MMA8, "int5", ("bf16", "fp16"), ("none",), stored, tuple(places), ((0, 0), (0, 4))
    return Fp8Codec(*facts, scales_on_sums=True)


INTEGERS_FP8 = (
    *(INT4_MMA8, INT4_MMA8_FLOATS, INT4_MMA8_FLOATS_WIDE, INT4_MMA8_ZEROS, INT4_MMA8_FOLDED),
    *(*_narrow(3), *_narrow(2), _five_bits()),
)
