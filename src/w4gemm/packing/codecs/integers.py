"""Codecs of int2, int3, int4, int5, int6 and int8 for 16-bit x: a code u of b bits stands for u - 2**(b - 1), or for
u - z with zero points.

Where position p = row8 + 2 * col8 + 4 * element of a step lies, by bits:

    8        byte 2 * element + col8 of a word; row g has one of the first segment, row g + 8 one of the second
    5, 6     that byte of a word of the first segment: row g has the low nibble, for its low bits, row g + 8 the high
             one, for its high bits. The other bits lie in a word of the second segment, in the place of the bits that
             each code lacks in the byte: so a code of row g + 8 is 2**(8 - b) times as high
    4        nibble p of the step's word
    3        nibble p of a word of two steps has two bits, and of the second segment's word the third
    2        nibble p of a word of two steps

Words of several steps are turned for each (:attr:`Codec.turns`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import Block
from w4gemm.packing.codecs.base import MMA16, Bits, Codec, Decoding, Pairs, WeightOperand

_TURNS: dict[int, tuple[tuple[int, ...], ...]] = {
    6: ((0, 0, 0, 0), (0, 4, 0, 4)),
    5: ((0, 0, 0, 0), (0, 2, 4, 30)),
    3: ((0, 2, 0, 2), (0, 1, 31, 30)),
    2: ((0, 2, 0, 2),),
}
"""By bits, for each segment and step."""
_POSITIONS = [(p, p % 2, p // 4 * 2 + p // 2 % 2) for p in range(8)]
"""Each position of a step, its row8 and its byte."""


def upper_factor(bits: int) -> int:
    """Return the factor of codes of rows g + 8 where they lie in a nibble's or byte's place."""
    return 16 if bits <= 4 else 2 ** (8 - bits)


def _parts(bits: int) -> Iterator[Bits]:
    """Parts of a lane's 32 codes before words are turned: at the places where a decoder takes them. Those of int4's
    steps are alike."""
    low, rest = 2 ** (bits - 4) - 1 if bits > 4 else 0, 2**bits - 16
    for step in range(1 if bits == 4 else 4):
        for p, row8, byte in _POSITIONS:
            position = 8 * step + p
            if bits == 8:
                yield Bits(position, 255, 8 * byte, 4 * row8 + step)
            elif bits > 4 and row8:
                yield Bits(position, 2**bits - 1 - low, 8 * byte + 8 - bits, step)
                yield Bits(position, low, 8 * byte + 8 - bits, 4 + step * (bits - 4) // 4)
            elif bits > 4:
                yield Bits(position, 15, 8 * byte, step)
                yield Bits(position, rest, 8 * byte, 4 + step * (bits - 4) // 4)
            else:
                yield Bits(position, 15 if bits == 4 else 3, 4 * p, step * (bits & 6) // 4)
                if bits == 3:
                    yield Bits(position, 4, 4 * p, 2)


def _places(bits: int) -> tuple[Bits, ...]:
    """Parts of a lane's 32 codes, turned to where they are stored."""
    places = []
    for position, mask, shift, word in _parts(bits):
        segment = word >= 4 or (bits == 3 and word == 2)
        turned = shift + (_TURNS[bits][segment][position // 8] if bits in _TURNS else 0)
        places.append(Bits(position, mask, turned - 32 if mask << turned >= 1 << 32 else turned, word))
    return tuple(places)


class HalfCodec(Codec):
    """For scales of 16 bits."""

    def refusal(self, format: WeightFormat) -> str:
        if format.scale == "fp32" and format.zero == "int":
            return "with float32 scales zero points are float32 too: -s * z, which is exact for scales of 20 bits"
        return ""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.integers_decode import Decoder, SinglesDecoder, SubnormalDecoder

        kinds, bits, sum_scale = weight.kinds, self.bits, decoding.allow_sum_scale
        if SubnormalDecoder.decodes(*kinds, bits) and (bits > 4 or (sum_scale and not decoding.only_fma)):
            return SubnormalDecoder(*kinds, decoding.only_fma, bits=bits, allow_sum_scale=sum_scale)
        decoder = SinglesDecoder if SinglesDecoder.decodes(*kinds, bits) else Decoder
        return decoder(*kinds, decoding.only_fma, bits=bits)

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        costs = super().costs(weight, pairs, few)
        return (*costs, "two_segments") if self.bits in (3, 5, 6) and not few else costs


class WideCodec(Codec):
    """For scales of float32."""

    def pairs(self, weight: WeightOperand, on_sums: bool) -> Pairs | None:
        return None if on_sums or self.bits != 4 else Pairs.FLOATS

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.integers_decode_wide import WideDecoder
        from w4gemm.packing.codecs.pairs_decode import WidePairDecoder

        return self._made(weight, decoding, WideDecoder, WidePairDecoder)

    def _made(self, weight: WeightOperand, decoding: Decoding, decoder: Any, of_pairs: Any = None) -> Any:
        """Return a decoder of a class, or of pairs of codes."""
        if decoding.pairs is not None:
            return of_pairs(*weight.kinds)
        return decoder(*weight.kinds, decoding.only_fma, decoding.allow_sum_scale, bits=self.bits)


class TwoLevelCodec(WideCodec):
    """For scales of two levels."""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.integers_decode_wide import TwoLevelDecoder
        from w4gemm.packing.codecs.pairs_decode import TwoLevelPairDecoder

        return self._made(weight, decoding, TwoLevelDecoder, TwoLevelPairDecoder)

    def pairs(self, weight: WeightOperand, on_sums: bool) -> Pairs | None:
        """None too in groups of 32, whose scales lanes prepare for one another: a table takes longer."""
        return None if weight.block.scale_group == 32 else super().pairs(weight, on_sums)

    def _made(self, weight: WeightOperand, decoding: Decoding, decoder: Any, of_pairs: Any = None) -> Any:
        held = functools.partial(decoder, held=decoding.held, by_dots=decoding.by_dots)
        return super()._made(weight, decoding, held, of_pairs)

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        return ("two_levels_few" if few else "two_levels",)


class SmallLevelCodec(TwoLevelCodec):
    """For scales of six bits with a sign."""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.integers_decode_wide import LevelSumDecoder, SmallLevelDecoder

        return self._made(weight, decoding, LevelSumDecoder if decoding.on_sums else SmallLevelDecoder)

    def may_scale_sums(self, weight: WeightOperand) -> bool:
        return weight.kind == "bf16"

    def pairs(self, weight: WeightOperand, on_sums: bool) -> Pairs | None:
        return None


class NibbleLevelCodec(TwoLevelCodec):
    """For scales and zero points of four bits: a byte has a scale in its low half and a zero point in its high one."""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.integers_decode_wide import NibbleLevelDecoder

        return self._made(weight, decoding, NibbleLevelDecoder)

    def pairs(self, weight: WeightOperand, on_sums: bool) -> Pairs | None:
        return None

    def block(self, format: WeightFormat) -> Block:
        return replace(super().block(format), has_zero=False)

    def stored_fields(
        self, scales: torch.Tensor, zeros: torch.Tensor | None, format: WeightFormat
    ) -> list[torch.Tensor]:
        assert zeros is not None
        return [(scales | zeros << 4).short()]

    def from_fields(
        self, fields: list[torch.Tensor], format: WeightFormat, channels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (fields[0] & 15).to(format.scale_dtype), (fields[0] >> 4 & 15).to(format.scale_dtype)


def _codecs(bits: int) -> tuple[Codec, ...]:
    """The codecs of integers of so many bits. With 16-bit scales a zero point is a number of the scales' dtype, in
    which codes are exact."""
    name, codes = f"int{bits}", (tuple(range(2**bits)), _places(bits), _TURNS.get(bits, ()))
    wide: dict[str, Any] = {"scale_bits": 32, "registers": 3, "in_float32": True}
    levels = wide | {"scale_bits": 8, "shares_levels": True}
    codecs: list[Codec] = [
        HalfCodec(f"{name}_mma16", MMA16, name, ("bf16", "fp16"), ("none", "int", "float"), *codes, registers=3),
        WideCodec(f"{name}_wide_mma16", MMA16, name, ("fp32",), ("none", "float"), *codes, **wide),
        TwoLevelCodec(
            *(f"{name}_signed_levels_mma16", MMA16, name, ("s8x256", "s8x128"), ("none",), *codes),
            **levels,
            scale_offset=128,
        ),
        NibbleLevelCodec(f"{name}_nibble_levels_mma16", MMA16, name, ("u4x256",), ("float",), *codes, **levels),
    ]
    if bits == 3:
        small = f"{name}_small_levels_mma16", MMA16, name, ("s6x256", "s6x128"), ("none",), *codes
        codecs.append(SmallLevelCodec(*small, **levels, scale_offset=32, factors_on_sums=True, by_superblock=True))
    if bits <= 5:  # of six bits there is no such format
        unsigned = "u8x256", "u8x128"
        codecs.append(TwoLevelCodec(f"{name}_two_levels_mma16", MMA16, name, unsigned, ("float",), *codes, **levels))
    return tuple(codecs)


INTEGERS = tuple(codec for bits in (4, 8, 6, 5, 3, 2) for codec in _codecs(bits))
INT4_MMA16 = INTEGERS[0]
