"""Codecs by fragment and format: how an element lies in packed blocks, and what it is decoded to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch

from w4gemm.core.formats import SCALES, WeightFormat
from w4gemm.packing.block import Block
from w4gemm.packing.codecs.base import MMA8, MMA16, Bits, Codec, Fragment
from w4gemm.packing.codecs.codebook import CODEBOOKS, CodebookCodec, codec_of_codebook
from w4gemm.packing.codecs.e2m1_mma8 import E2M1_MMA8, EXACT_BINADES
from w4gemm.packing.codecs.e2m1_mma16 import E2M1_MMA16, MXFP4_MMA16, NVFP4_MMA16
from w4gemm.packing.codecs.int4 import (
    INT4,
    INT4_MMA8,
    INT4_MMA8_FOLDED,
    INT4_MMA8_ZEROS,
    INT4_MMA16,
    INT4_TWO_LEVELS_MMA16,
    INT4_WIDE_MMA16,
)

CODECS: tuple[Codec, ...] = (*INT4, *CODEBOOKS, *E2M1_MMA16, E2M1_MMA8)

_KIND = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
_SCALE_KIND = _KIND | {torch.float8_e8m0fnu: "e8m0", torch.float32: "f32", torch.uint8: "u8"}
"""Names, by the dtype of a format's scales, that decoders know them by."""


def codec_for(format: WeightFormat, fragment: Fragment) -> Codec | None:
    """The codec that holds the format in a fragment's order; None if there is none, see :func:`refusal`."""
    found = next((codec for codec in CODECS if codec.fragment is fragment and codec.holds(format)), None)
    return codec_of_codebook(format) if found is None and fragment is MMA16 else found


def scales_on_sums(format: WeightFormat) -> bool:
    """True if, beside fp8 activations, scales multiply the sums of each group instead of its weights."""
    codec = codec_for(format, MMA8)
    return codec is not None and codec.scales_on_sums


def refusal(format: WeightFormat, fragment: Fragment) -> str:
    """Why no codec holds the format in a fragment's order, or the empty string."""
    if codec_for(format, fragment):
        return ""
    if fragment is MMA16 and format.scales_in_weights:
        return f"{format.scale} scales are rounded into weights for fp8 activations, the mma8 layout"
    if fragment is MMA16 and format.scale == "fp32" and format.zero == "int":
        return "beside float32 scales zero points are float32 too: -s * z, which is exact for scales of 20 bits"
    if fragment is MMA8 and format.zero == "float":
        return (
            "float zero points are not multiples of the scale, so e4m3 cannot hold u - z; 16-bit activations take them "
            "in the mma16 layout"
        )
    if fragment is MMA8 and format.element == "e2m1":
        return (
            f"fp8 activations take e2m1 beside e8m0 scales, whose products are exact in e5m2, and {format.scale} ones "
            "would be rounded; 16-bit activations take them in the mma16 layout"
        )
    lacking = f"there is no decoder of {format.element} with {format.scale} scales for {fragment.name}"
    if scales := _held_scales(format, fragment):
        return f"{lacking}; scales may be {', '.join(scales)}"
    elements = sorted({codec.element for codec in CODECS if codec.fragment is fragment})
    return f"{lacking}; elements may be {', '.join(elements)}"


def _held_scales(format: WeightFormat, fragment: Fragment) -> list[str]:
    """Return the scale rules with which a codec would hold the format."""
    found = []
    for scale in SCALES:
        with contextlib.suppress(ValueError):  # no format with this rule
            if codec_for(replace(format, scale=scale), fragment):
                found.append(scale)
    return found


@dataclass(frozen=True)
class WeightOperand:
    """The facts of a weight's format that a kernel is compiled for: part of its compile key.

    Args:
        codec: how codes and scales lie.
        kind: dtype of x, "f16", "bf16" or "e4m3", which is also what is decoded to, unless the codec says otherwise.
        scale: what a decoder takes the stored scales for, "f16", "bf16", "f32", "e4m3", "e8m0" or "u8".
        zero: "none", "int" or "float".
        block: sizes and offsets of one packed block.
        channels: True if a float32 factor for each output channel multiplies the sums.
    """

    codec: Codec
    kind: str
    scale: str
    zero: str
    block: Block
    channels: bool = False

    @property
    def decoded(self) -> str:
        """Kind of number that codes are decoded to."""
        return self.codec.decoded or self.kind

    @property
    def formed_in_float32(self) -> bool:
        """True if a weight is computed in float32, because scales have 32 bits or two levels."""
        return self.codec in (INT4_WIDE_MMA16, INT4_TWO_LEVELS_MMA16)

    @property
    def is_codebook(self) -> bool:
        """True if codes are indices into a table of 16 numbers."""
        return isinstance(self.codec, CodebookCodec)

    @classmethod
    def of(cls, format: WeightFormat, dtype: torch.dtype) -> WeightOperand:
        """The operand of a format beside activations of a dtype.

        Raises:
            ValueError: if there is no codec, with the reason.
        """
        fragment = MMA8 if dtype == torch.float8_e4m3fn else MMA16
        codec = codec_for(format, fragment)
        if codec is None:
            raise ValueError(f"format: {refusal(format, fragment)}")
        assert format.scale_dtype in _SCALE_KIND, f"{format.scale_dtype}: add what decoders call it to _SCALE_KIND"
        kinds = _KIND[dtype], _SCALE_KIND[format.scale_dtype]
        return cls(codec, *kinds, format.zero, codec.block(format), codec.has_channels(format))


__all__ = [
    "CODECS",
    "E2M1_MMA8",
    "EXACT_BINADES",
    "INT4_MMA8",
    "INT4_MMA8_FOLDED",
    "INT4_MMA8_ZEROS",
    "INT4_MMA16",
    "INT4_TWO_LEVELS_MMA16",
    "INT4_WIDE_MMA16",
    "MMA8",
    "MMA16",
    "MXFP4_MMA16",
    "NVFP4_MMA16",
    "Bits",
    "CodebookCodec",
    "Codec",
    "Fragment",
    "WeightOperand",
    "codec_for",
    "refusal",
    "scales_on_sums",
]
