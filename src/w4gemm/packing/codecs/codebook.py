"""Codecs of codebook elements: a code is an index into 16 numbers that are exact in bf16 and fp16."""

from __future__ import annotations

from w4gemm.packing.codecs.base import MMA16, Bits, Codec

_NEIGHBOURS = tuple(Bits(p, 15, 4 * (2 * (p % 4) + p // 4)) for p in range(8))

IQ4_MMA16 = Codec("iq4_mma16", MMA16, "iq4", ("bf16", "fp16"), ("none",), tuple(range(16)), _NEIGHBOURS)
"""Eight nibbles: register row8 + 2 * col8 has the two neighbours at bits 8 * (row8 + 2 * col8), its first element in
the low one. The four selectors of a prmt are thus those of two registers."""

CODEBOOKS = (IQ4_MMA16,)
