"""Codecs of e2m1 elements for operand A in 16 bits: MXFP4 (e8m0 scales) and NVFP4 (e4m3 scales).

A code's four bits, sign, exponent and mantissa, at bits 15, 8, 7 and 6 of a bf16 are its number times 2**-126, since
0.5 is a subnormal there as it is in e2m1. So a code word holds the bits of four registers such that rotations of the
word bring them to their places. No four rotations of these bits tile 16 bits, so those of the fourth register lie in
two parts.

8-bit scales are stored as what one shift makes a 16-bit number of.
"""

from __future__ import annotations

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.codecs.base import MMA16, Bits, Codec

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


class PowerCodec(Codec):
    """Stores an e8m0 scale 2**e as the exponent field of the bf16 2**(e + POWER_BIAS)."""

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        return (scales.contiguous().view(torch.uint8).short() + POWER_BIAS).clamp(max=255)  # weights beyond are refused

    def scales_from(self, fields: torch.Tensor, format: WeightFormat, channels: torch.Tensor | None) -> torch.Tensor:
        return (fields - POWER_BIAS).to(torch.uint8).view(format.scale_dtype)


class UnsignedCodec(Codec):
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


MXFP4_MMA16 = PowerCodec("mxfp4_mma16", MMA16, "e2m1", ("e8m0",), ("none",), tuple(range(16)), _BITS, scale_bits=8)
NVFP4_MMA16 = UnsignedCodec(
    "nvfp4_mma16", MMA16, "e2m1", ("e4m3_row",), ("none",), tuple(range(16)), _BITS, scale_bits=8
)

E2M1_MMA16 = (MXFP4_MMA16, NVFP4_MMA16)
