"""Codecs of e4m3, the 8-bit float.

With e4m3 x codes lie in core matrices. They are a matrix instruction's operand as they are stored: of WGMMA from shared
memory, or from registers, into which ldmatrix brings a code word of each lane. Scales multiply sums: one scale a row
the sums of all columns, scales of groups those of 128 columns.

For 16-bit x words are decoded. The seven lower bits of a code at bits 10 to 4 of a bf16, and its sign at bit 15, are
its number times 2**-120: the smallest exponents of both are subnormals. So rows g lie in code words at the places of a
bf16's bits. Rows g + 8 have the others: exponent bits at 14 to 11 and mantissa bits at 2 to 0 of each half, and signs
at bit 3 of the other half. A rotation by four and a shift bring them to the same places.
"""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.block import BLOCK_K
from w4gemm.packing.codecs.base import MMA8, MMA16, Bits, Codec, Decoding, Pairs, WeightOperand
from w4gemm.packing.codecs.e2m1 import PowerCodec


def _places() -> tuple[Bits, ...]:
    """A word of the first segment has both rows of col8 0, of the second one those of col8 1."""
    places = []
    for step in range(4):
        for p in range(8):
            row8, col8, element = p % 2, p // 2 % 2, p // 4
            up = 16 * element
            parts = (
                ((7, up), (0x78, up + 8), (0x80, -4 if element else 12)) if row8 else ((0x7F, up + 4), (0x80, up + 8))
            )
            places += [Bits(8 * step + p, mask, shift, 4 * col8 + step) for mask, shift in parts]
    return tuple(places)


class _E4m3Codec(Codec):
    """Base of the codecs of e4m3."""

    def refusal(self, format: WeightFormat) -> str:
        if self.fragment is MMA16:
            return ""
        if format.scale == "e8m0":
            return (
                "with fp8 activations a scale for 32 columns would multiply the sums of each matrix instruction, in as "
                "many cycles as it takes, and leaves e4m3's range in codes; 16-bit ones take it in the mma16 layout"
            )
        return (
            "fp8 activations take e4m3 with one float32 scale a row, or float32 scales of groups of a multiple of "
            f"{BLOCK_K} columns, which multiply sums; 16-bit activations take others too, in the mma16 layout"
        )

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.e4m3_decode import E4m3Decoder, StoredDecoder

        if self.fragment is MMA8:
            return StoredDecoder()
        return E4m3Decoder(weight.kind, weight.scale, weight.zero, decoding.only_fma, decoding.allow_sum_scale)

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        if few or weight.kind == "e4m3":
            return ()
        return ("e4m3_half",) if weight.kind == "f16" else ("e4m3",)


class ChannelCodec(_E4m3Codec):
    """For one float32 scale a row, which multiplies its sums: a scale of the output channel."""

    def holds(self, format: WeightFormat) -> bool:
        return super().holds(format) and format.group_size == PER_COLUMN

    def has_channels(self, format: WeightFormat) -> bool:
        return True

    def stored_channels(self, scales: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor:
        return scales[:, 0]

    def stored_fields(
        self, scales: torch.Tensor, zeros: torch.Tensor | None, format: WeightFormat
    ) -> list[torch.Tensor]:
        return []

    def from_fields(
        self, fields: list[torch.Tensor], format: WeightFormat, channels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert channels is not None
        return channels[:, None].clone(), None


class MicroscalingCodec(_E4m3Codec, PowerCodec):
    """For e8m0 scales, stored as PowerCodec has them."""


class GroupCodec(_E4m3Codec):
    """For float32 scales of groups of columns, of each row or of blocks of rows."""

    def holds(self, format: WeightFormat) -> bool:
        return super().holds(format) and (format.group_size != PER_COLUMN or format.scale_rule.block_rows > 0)


class SumScaleCodec(GroupCodec):
    """For e4m3 x, of groups that fill blocks."""

    def holds(self, format: WeightFormat) -> bool:
        return super().holds(format) and (format.group_size == PER_COLUMN or format.group_size % BLOCK_K == 0)


class WideE4m3Codec(GroupCodec):
    """For 16-bit x."""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.e4m3_decode import WideE4m3Decoder

        return WideE4m3Decoder(weight.kind, weight.scale, weight.zero, decoding.only_fma, decoding.allow_sum_scale)

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        return ("two_levels_few" if few else "two_levels",)


_CODES = tuple(range(256)), _places()
_STORED = (
    tuple(range(256)),
    tuple(
        Bits(16 * step + 8 * row8 + 4 * col16 + i, 255, 8 * i, 4 * row8 + 2 * step + col16)
        for step in range(2)
        for row8 in range(2)
        for col16 in range(2)
        for i in range(4)
    ),
)
"""For e4m3 x: a word of each core matrix, in the order of segments."""
E4M3 = (
    ChannelCodec("e4m3_channel_mma16", MMA16, "e4m3", ("fp32",), ("none",), *_CODES, scale_bits=0, registers=4),
    MicroscalingCodec("mxfp8_mma16", MMA16, "e4m3", ("e8m0",), ("none",), *_CODES, scale_bits=8, registers=4),
    WideE4m3Codec(
        *("e4m3_wide_mma16", MMA16, "e4m3", ("fp32", "b128"), ("none",), *_CODES),
        scale_bits=32,
        registers=4,
        in_float32=True,
    ),
    ChannelCodec("e4m3_channel_mma8", MMA8, "e4m3", ("fp32",), ("none",), *_STORED, scale_bits=0, matrices=True),
    SumScaleCodec(
        *("e4m3_sums_mma8", MMA8, "e4m3", ("fp32",), ("none",), *_STORED),
        scale_bits=32,
        scales_on_sums=True,
        matrices=True,
    ),
    SumScaleCodec(
        *("e4m3_blocks_mma8", MMA8, "e4m3", ("b128",), ("none",), *_STORED),
        scale_bits=32,
        scales_on_sums=True,
        rows_share_scale=True,
        matrices=True,
    ),
)
