"""Codecs of int4 for e4m3 x: codes 0..15 that stand for u - 8, or u - z beside zero points."""

from __future__ import annotations

from typing import Any

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.codecs.base import MMA8, Bits, Codec, Decoding, WeightOperand

_CODES = tuple(range(16))
_SIGN_MAGNITUDE = tuple(2 * (u - 8) if u >= 8 else 2 * (7 - u) + 1 for u in _CODES)
_SIGN_AND_SIZE = tuple(u & 3 | u >> 1 & 4 | (u << 1 ^ u) & 8 for u in _CODES)
_ROW_BYTES = 16  # of the decoder's table: the 16 codes of a scale or zero point


class Fp8Codec(Codec):
    """For scales of 16 bits or e4m3."""

    def refusal(self, format: WeightFormat) -> str:
        if format.zero == "float":
            return (
                "float zero points are not multiples of the scale, so e4m3 cannot hold u - z; 16-bit activations take "
                "them in the mma16 layout"
            )
        return ""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.int4_decode_fp8 import FoldedDecoder, Fp8Decoder, TableDecoder

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
    tuple(Bits(p, 15, 8 * (p % 4) + 4 * (p // 4)) for p in range(8)),
    scales_on_sums=True,
)
"""A nibble is sign and magnitude: 2 * v for v = u - 8 >= 0, else 2 * (-1 - v) + 1; col16 is the high one of byte i."""

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

INT4_FP8 = (INT4_MMA8, INT4_MMA8_ZEROS, INT4_MMA8_FOLDED)
