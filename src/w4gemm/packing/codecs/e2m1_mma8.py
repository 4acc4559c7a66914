"""Codec of e2m1 elements with e8m0 scales, MXFP4, for operand A in e5m2 beside e4m3 activations.

An e5m2 holds v * 2**j of every e2m1 number v exactly for j from -15 to 13, its subnormals included. So a row's largest
scale goes into a float32 factor of the row, in which it is 2**13 of the decoded numbers, and the field of a group is by
how many binades its scale lies below: exact up to 28, rounded to nearest even beyond. What is stored is lossless.
"""

from __future__ import annotations

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.codecs.base import MMA8, Bits, Codec

LARGEST_EXPONENT = 13
"""Power of two that a row's largest scale is decoded to: 6 * 2**13, but not 6 * 2**14, is an e5m2."""
EXACT_BINADES = 29
"""Scales of a row, from the largest downwards, that are decoded exactly: the least e5m2 is 2**-16, 0.5 * 2**-15."""


class RowScaleCodec(Codec):
    """Stores a power of two by its distance from the largest one of the row, which goes into a scale of the row."""

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
    tuple(Bits(p, 7, 4 * p) for p in range(8)) + tuple(Bits(p, 8, 8 * (p % 4) + 4 - 4 * (p // 4)) for p in range(8)),
    scale_bits=8,
    table_rows=256,
    table_row_bytes=8,
    decoded="e5m2",
)
"""A magnitude is an index into a row of eight bytes, one row for each distance: the low three bits of the code as a
selector of prmt in nibble p. Its sign is at bit 7 of byte i for col16 0 and at bit 3 for col16 1."""
