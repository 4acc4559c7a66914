"""Codecs by fragment and format: how an element lies in packed blocks, and what decodes it.

An element, or several that are alike, have a file of codecs (integers.py), and beside it files of their decoders
(integers_decode.py), which need the DSL.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import torch

from w4gemm.core.elements import element_named
from w4gemm.core.formats import SCALES, WeightFormat
from w4gemm.packing.codecs.base import MMA8, MMA16, PAIR_TABLE_BYTES, Bits, Codec, Fragment, Pairs, WeightOperand
from w4gemm.packing.codecs.codebook import CODEBOOKS, codec_of_codebook
from w4gemm.packing.codecs.e2m1 import E2M1, E2M1_MMA8, EXACT_BINADES, MXFP4_MMA16, NVFP4_MMA16
from w4gemm.packing.codecs.floats import FLOAT_CODECS, FLOATS, POWERS_REFUSED
from w4gemm.packing.codecs.integers import INT4_MMA16, INTEGERS
from w4gemm.packing.codecs.integers_fp8 import (
    INT4_MMA8,
    INT4_MMA8_FLOATS,
    INT4_MMA8_FOLDED,
    INT4_MMA8_ZEROS,
    INTEGERS_FP8,
)

CODECS: tuple[Codec, ...] = (*INTEGERS, *INTEGERS_FP8, *E2M1, *FLOAT_CODECS, *CODEBOOKS)
"""An element's own codecs go before those of its numbers as a codebook."""

KINDS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
"""Names of dtypes of x in device code."""
_SCALE_KIND = KINDS | {torch.float8_e8m0fnu: "e8m0", torch.float32: "f32", torch.uint8: "u8", torch.int8: "s8"}
"""Names, by the dtype of a format's scales, that decoders know them by."""


@functools.lru_cache(maxsize=4096)
def codec_for(format: WeightFormat, fragment: Fragment) -> Codec | None:
    """The codec that holds the format in a fragment's order; None if there is none, see :func:`refusal`."""
    listed = next((codec for codec in CODECS if codec.fragment is fragment and codec.holds(format)), None)
    return codec_of_codebook(format) if listed is None and fragment is MMA16 else listed


def scales_on_sums(format: WeightFormat) -> bool:
    """True if, with fp8 activations, scales multiply the sums of each group instead of its weights."""
    codec = codec_for(format, MMA8)
    return codec is not None and codec.scales_on_sums


@functools.lru_cache(maxsize=4096)
def refusal(format: WeightFormat, fragment: Fragment) -> str:
    """Why no codec holds the format in a fragment's order, or the empty string."""
    if codec_for(format, fragment):
        return ""
    if fragment is MMA16 and format.scales_in_weights:
        return f"{format.scale} scales are rounded into weights for fp8 activations, the mma8 layout"
    if fragment is MMA8 and format.scale == "e8m0" and format.element in FLOATS:
        return POWERS_REFUSED
    own = (codec for codec in CODECS if codec.fragment is fragment and codec.element == format.element)
    if reason := next(filter(None, (codec.refusal(format) for codec in own)), ""):
        return reason
    if fragment is MMA8 and not _exact_in_e4m3(format.element):
        return f"fp8 activations would round {format.element}: e4m3 holds not all of its numbers; 16-bit ones take it"
    lacking = f"there is no decoder of {format.element} with {format.scale} scales for {fragment.name}"
    if scales := _held_scales(format, fragment):
        return f"{lacking}; scales may be {', '.join(scales)}"
    elements = sorted({codec.element for codec in CODECS if codec.fragment is fragment})
    return f"{lacking}; elements may be {', '.join(elements)}"


def _exact_in_e4m3(element: str) -> bool:
    """True if e4m3 holds every number of an element."""
    rule = element_named(element)
    assert rule is not None
    values = torch.tensor(rule.values, device="cpu").nan_to_num()
    return torch.equal(values.to(torch.float8_e4m3fn).float(), values)


def _held_scales(format: WeightFormat, fragment: Fragment) -> list[str]:
    """Return the scale rules with which a codec would hold the format."""
    rules = []
    for scale in SCALES:
        with contextlib.suppress(ValueError):  # no format with this rule
            if codec_for(replace(format, scale=scale), fragment):
                rules.append(scale)
    return rules


def weight_operand(format: WeightFormat, dtype: torch.dtype) -> WeightOperand:
    """Return the operand of a format beside activations of a dtype.

    Raises:
        ValueError: if there is no codec, with the reason.
    """
    fragment = MMA8 if dtype == torch.float8_e4m3fn else MMA16
    codec = codec_for(format, fragment)
    if codec is None:
        raise ValueError(f"format: {refusal(format, fragment)}")
    assert format.scale_dtype in _SCALE_KIND, f"{format.scale_dtype}: add what decoders call it to _SCALE_KIND"
    kinds = KINDS[dtype], _SCALE_KIND[format.scale_dtype]
    return WeightOperand(codec, *kinds, format.zero, codec.block(format), codec.has_channels(format))


__all__ = [
    "CODECS",
    "E2M1_MMA8",
    "EXACT_BINADES",
    "INT4_MMA8",
    "INT4_MMA8_FLOATS",
    "INT4_MMA8_FOLDED",
    "INT4_MMA8_ZEROS",
    "INT4_MMA16",
    "MMA8",
    "MMA16",
    "MXFP4_MMA16",
    "NVFP4_MMA16",
    "PAIR_TABLE_BYTES",
    "Bits",
    "Codec",
    "Fragment",
    "Pairs",
    "WeightOperand",
    "codec_for",
    "refusal",
    "scales_on_sums",
    "weight_operand",
]
