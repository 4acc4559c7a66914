"""Codecs of e2m1 elements: MXFP4 (e8m0 scales) and NVFP4 (e4m3 scales).

For operand A in 16 bits, a code's four bits, sign, exponent and mantissa, at bits 15, 8, 7 and 6 of a bf16 are its
number times 2**-126, since 0.5 is a subnormal there as it is in e2m1. So a code word holds the bits of four registers
such that rotations of the word bring them to their places. No four rotations of these bits tile 16 bits, so those of
the fourth register lie in two parts.

8-bit scales are stored as what one shift makes a 16-bit number of.

With e4m3 x, weights with e8m0 scales are e5m2. An e5m2 holds v * 2**j of every e2m1 number v exactly for j from -15
to 13, its subnormals included. So a row's largest scale goes into a float32 factor of the row, in which it is 2**13 of
the decoded numbers, and the field of a group is by how many binades its scale lies below: exact up to 28, rounded to
nearest even beyond. What is stored is lossless.

Weights with e4m3 scales are e4m3 with e4m3 x: a scale is the row of a table that has its products with the eight
magnitudes, rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.codecs.base import MMA8, MMA16, Bits, Codec, Decoding, Pairs, WeightOperand
from w4gemm.packing.codecs.integers_fp8 import INT4_MMA8_ZEROS

POWER_BIAS = 99
"""Addend of an e8m0 scale's exponent when it is stored, so that the products of weights stay numbers of bf16."""
_SIGN, _SIZE, _TOP, _LOW = 8, 7, 4, 3  # of a code: its sign; its other bits, the highest of them, the lower two
_REGISTERS = (
    ((_SIZE, 6), (_SIGN, 12)),
    ((_SIZE, 0), (_SIGN, 6)),
    ((_SIZE, 12), (_SIGN, 18)),
    ((_TOP, 2), (_LOW, 10), (_SIGN, 16)),
)
"""For each fragment register (bits of a code, shift) of its first element; its second one lies 16 bits further up."""


def _wrapped(mask: int, shift: int) -> int:
    """The shift of a code's bits that go round from bit 31 to bit 0."""
    return shift - 32 if mask << shift >= 1 << 32 else shift


_BITS = tuple(
    Bits(4 * element + register, mask, _wrapped(mask, shift + 16 * element))
    for register, parts in enumerate(_REGISTERS)
    for element in range(2)
    for mask, shift in parts
)


class E2M1HalfCodec(Codec):
    """For 16-bit x."""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.e2m1_decode import E2m1Decoder

        return E2m1Decoder(*weight.kinds, decoding.only_fma, decoding.allow_sum_scale)

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        (scale,) = self.scales
        return ("e2m1_half",) if weight.kind == "f16" else (f"e2m1_{scale}{'_few' if few else ''}",)


class PowerCodec(E2M1HalfCodec):
    """Stores an e8m0 scale 2**e as the exponent field of the bf16 2**(e + POWER_BIAS)."""

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        return (scales.contiguous().view(torch.uint8).short() + POWER_BIAS).clamp(max=255)  # weights beyond are refused

    def scales_from(self, fields: torch.Tensor, format: WeightFormat, channels: torch.Tensor | None) -> torch.Tensor:
        return (fields - POWER_BIAS).to(torch.uint8).view(format.scale_dtype)


class UnsignedCodec(E2M1HalfCodec):
    """Stores an e4m3 scale's magnitude as bits 14 to 7 of the fp16 of the same value. The codes take its sign, and are
    0 where it is 0: another weight's parts, but the same numbers."""

    def codes_beside(self, codes: torch.Tensor, scales: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        own = format.spread(scales.float(), codes.shape[1])
        signed = torch.where(own < 0, codes ^ _SIGN, codes)
        return torch.where(own == 0, torch.zeros_like(codes), signed)

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.half().abs().view(torch.int16) >> 7

    def scales_from(self, fields: torch.Tensor, format: WeightFormat, channels: torch.Tensor | None) -> torch.Tensor:
        return (fields << 7).view(torch.float16).to(format.scale_dtype)


_OF_16_BITS = ("none",), tuple(range(16)), _BITS
MXFP4_MMA16 = PowerCodec(
    "mxfp4_mma16", MMA16, "e2m1", ("e8m0",), *_OF_16_BITS, scale_bits=8, registers=4, uneven_rows=True
)
NVFP4_MMA16 = UnsignedCodec(
    "nvfp4_mma16", MMA16, "e2m1", ("e4m3_row",), *_OF_16_BITS, scale_bits=8, registers=4, uneven_rows=True
)

LARGEST_EXPONENT = 13
"""Power of two that a row's largest scale is decoded to: 6 * 2**13, but not 6 * 2**14, is an e5m2."""
EXACT_BINADES = 29
"""Scales of a row, from the largest downwards, that are decoded exactly: the least e5m2 is 2**-16, 0.5 * 2**-15."""


class RowScaleCodec(Codec):
    """Stores a power of two by its distance from the largest one of the row, which goes into a scale of the row."""

    def refusal(self, format: WeightFormat) -> str:
        return (
            f"fp8 activations take e2m1 with e8m0 scales, whose products are exact in e5m2, and {format.scale} ones "
            "would be rounded; 16-bit activations take them in the mma16 layout, and fold_scales rounds nvfp4"
        )

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.e2m1_decode_fp8 import E2m1Fp8Decoder

        return E2m1Fp8Decoder()

    def has_channels(self, format: WeightFormat) -> bool:
        return True

    def stored_channels(self, scales: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor:
        return _largest(scales).view(scales.dtype).float() * 2.0**-LARGEST_EXPONENT

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        return (_largest(scales)[:, None] - scales.contiguous().view(torch.uint8)).short()

    def scales_from(self, fields: torch.Tensor, format: WeightFormat, channels: torch.Tensor | None) -> torch.Tensor:
        assert channels is not None
        largest = (channels * 2.0**LARGEST_EXPONENT).to(format.scale_dtype).view(torch.uint8)
        return (largest[:, None] - fields).to(torch.uint8).view(format.scale_dtype)


def _largest(scales: torch.Tensor) -> torch.Tensor:
    """uint8 (n): the bits of each row's largest e8m0 scale."""
    return scales.contiguous().view(torch.uint8).amax(1)


E2M1_MMA8 = RowScaleCodec(
    "e2m1_mma8",
    MMA8,
    "e2m1",
    ("e8m0",),
    ("none",),
    tuple(range(16)),
    INT4_MMA8_ZEROS.places,
    scale_bits=8,
    table_rows=256,
    table_row_bytes=8,
    decoded="e5m2",
)
"""A magnitude is an index into a row of eight bytes, one row for each distance. It lies where the low three bits of
int4's code do, and the sign where their high bit does."""


class FoldedCodec(UnsignedCodec):
    """Stores an e4m3 scale's magnitude as its seven bits."""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.e2m1_decode_fp8 import E2m1FoldedDecoder

        return E2m1FoldedDecoder(halves=weight.block.scale_group == 16)

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        return ()

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        return (scales.contiguous().view(torch.uint8) & 0x7F).short()

    def scales_from(self, fields: torch.Tensor, format: WeightFormat, channels: torch.Tensor | None) -> torch.Tensor:
        return fields.to(torch.uint8).view(format.scale_dtype)


NVFP4_MMA8 = FoldedCodec(
    "nvfp4_mma8",
    MMA8,
    "e2m1",
    ("e4m3",),
    ("none",),
    E2M1_MMA8.stored,
    E2M1_MMA8.places,
    scale_bits=8,
    table_rows=128,
    table_row_bytes=8,
    half_steps=True,
)
"""Codes as in E2M1_MMA8."""

E2M1 = (MXFP4_MMA16, NVFP4_MMA16, E2M1_MMA8, NVFP4_MMA8)
