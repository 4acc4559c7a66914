"""Codecs of codebook elements: a code is an index into 16 numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm.core.elements import ELEMENTS, element_named
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import Block
from w4gemm.packing.codecs.base import MMA16, Bits, Codec, Decoding, Pairs, WeightOperand

_NEIGHBOURS = tuple(Bits(p, 15, 4 * (2 * (p % 4) + p // 4)) for p in range(8))


@dataclass(frozen=True, repr=False)
class CodebookCodec(Codec):
    """Eight nibbles: register row8 + 2 * col8 has the two neighbours at bits 8 * (row8 + 2 * col8), its first element
    in the low one. The four selectors of a prmt are thus those of two registers.

    A nibble is an index into the codebook's numbers in an order of their own, :attr:`values`. One prmt looks up indices
    0..7, another one 8..15. If there is such an order, each byte of number i (i < 8) exceeds that of number i + 8 by 0
    to 127. The first prmt then looks up this difference, which is 0 for indices from 8 on, and the sum of both results
    is the number.
    """

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers in the order of their indices."""
        element = element_named(self.element)
        assert element is not None
        return tuple(element.values[self.stored.index(stored)] for stored in range(16))

    def pairs(self, weight: WeightOperand, on_sums: bool) -> Pairs | None:
        return Pairs.HALVES if on_sums or not weight.mixed else Pairs.FLOATS

    def may_scale_sums(self, weight: WeightOperand) -> bool:
        return weight.mixed

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.codebook_decode import CodebookDecoder, IntegerDecoder
        from w4gemm.packing.codecs.pairs_decode import BarePairDecoder, PairDecoder

        values = self.values
        if decoding.pairs is not None:
            of_pairs = BarePairDecoder if decoding.on_sums else PairDecoder
            return of_pairs(*weight.kinds, values=values, pairs=decoding.pairs)
        if are_bytes(values):
            return IntegerDecoder(*weight.kinds, decoding.only_fma, values, decoding.allow_sum_scale)
        return CodebookDecoder(*weight.kinds, decoding.only_fma, values)

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        if pairs is not None:
            return (f"{pairs.value}_few" if few else pairs.value,)
        return () if few else ("codebook", *super().costs(weight, pairs, few))

    def block(self, format: WeightFormat) -> Block:
        return Block.of(format, 8 * format.scale_dtype.itemsize)

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.contiguous().view(torch.int32) if scales.dtype.itemsize == 4 else super().stored_scales(scales)


def bits_in(kind: str, values: tuple[float, ...]) -> list[int]:
    """Return the bits of numbers rounded to ``kind``, "bf16" or "f16"."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    numbers = torch.tensor(values, dtype=torch.float32, device="cpu").to(dtype)
    return [bits & 0xFFFF for bits in numbers.view(torch.int16).tolist()]


def are_bytes(values: tuple[float, ...]) -> bool:
    """Return whether numbers are integers of one byte, with a sign."""
    return all(value == int(value) and -128 <= value <= 127 for value in values)


def first_half_exceeds(numbers: list[bytes]) -> bool:
    """Return whether each byte of number i, i < 8, exceeds that of number i + 8 by 0 to 127."""
    return all(_exceeds(a, b) for a, b in zip(numbers[:8], numbers[8:], strict=True))


def _exceeds(a: bytes, b: bytes) -> bool:
    return all(0 <= x - y <= 127 for x, y in zip(a, b, strict=True))


def _indices(values: tuple[float, ...]) -> tuple[int, ...]:
    """Return the index of each code's number: an order of bf16 numbers for which :func:`first_half_exceeds` is true,
    or, if there is none, the order of the codes."""
    if are_bytes(values):
        numbers = [bytes([int(value) + 128]) for value in values]
    else:
        numbers = [bits.to_bytes(2, "little") for bits in bits_in("bf16", values)]

    def paired(left: list[int]) -> list[tuple[int, int]] | None:
        if not left:
            return []
        first, *others = left
        for other in others:
            for a, b in ((first, other), (other, first)):
                if _exceeds(numbers[a], numbers[b]):
                    rest = paired([i for i in others if i != other])
                    if rest is not None:
                        return [(a, b), *rest]
        return None

    pairs = paired(list(range(16)))
    if pairs is None:
        return tuple(range(16))
    order = [a for a, _ in pairs] + [b for _, b in pairs]
    return tuple(order.index(code) for code in range(16))


@functools.cache
def codebook_codecs(element: str) -> tuple[CodebookCodec, CodebookCodec]:
    """Return the codecs of a codebook element: with scales of one level, and of two."""
    rule = element_named(element)
    assert rule is not None
    codes = ("none",), _indices(rule.values), _NEIGHBOURS
    levels: dict[str, Any] = {"scale_bits": 8, "scale_offset": 128, "in_float32": True}
    return (
        CodebookCodec(f"{element}_mma16", MMA16, element, ("bf16", "fp16", "fp32"), *codes, registers=17),
        CodebookCodec(
            *(f"{element}_signed_levels_mma16", MMA16, element, ("s8x256", "s8x128"), *codes),
            registers=17,
            **levels,
        ),
    )


def codec_of_codebook(format: WeightFormat) -> Codec | None:
    """Return the codec of a format whose element is a codebook without a name of its own; None for others."""
    if not format.element.startswith("codebook"):
        return None
    return next((codec for codec in codebook_codecs(format.element) if codec.holds(format)), None)


_NAMED = (element.name for element in ELEMENTS.values() if element.bits == 4 and not element.counts)
CODEBOOKS = tuple(codec for name in _NAMED for codec in codebook_codecs(name))
"""Of the elements with names. e2m1.py has the codecs of e2m1 with 8-bit floats as scales."""
