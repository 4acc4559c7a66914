"""Codecs of floats of 8 and 6 bits: e4m3, e5m2, e2m3 and e3m2.

With e4m3 x codes of 8 bits lie in core matrices. They are a matrix instruction's operand as they are stored: of WGMMA
from shared memory, or from registers, into which ldmatrix brings a code word of each lane. Scales multiply sums: one
scale a row the sums of all columns, scales of groups those of 128 columns.

For 16-bit x words are decoded. A code's mantissa at the highest mantissa bits of a bf16, its exponent above it, and its
sign at bit 15, are its number times a power of two: the smallest exponents of both are subnormals. So words hold the
bits of registers such that few instructions bring them to their places (:class:`Float`). The registers of rows g of 8
bits lie in place. What is left of their words holds the others, as sums without carries (exclusive or) of bits: a
register is the sum of two words that were turned each its own way, less all but one mask, and so takes one instruction
more than the turns, which registers share. The second word of 6 bits has bits of two steps, and is turned by 8 for the
latter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.block import BLOCK_K, Block
from w4gemm.packing.codecs.base import MMA8, MMA16, Bits, Codec, Decoding, Pairs, WeightOperand
from w4gemm.packing.codecs.e2m1 import PowerCodec


class Turned(NamedTuple):
    """A code word of a step, turned."""

    word: int
    """Its index."""
    turn: int = 0
    """Bits by which it is turned to the right or, if negative, shifted to the left."""

    def origin(self, bit: int) -> tuple[int, int] | None:
        """The code word and the bit of it that come to ``bit``; None for a zero."""
        return (self.word, (bit + self.turn) % 32) if bit + self.turn >= 0 else None


class Bytes(NamedTuple):
    """Four bytes of the two code words of a step."""

    selector: int
    """prmt's: a hexadecimal digit for each byte."""

    def origin(self, bit: int) -> tuple[int, int]:
        """As of :class:`Turned`."""
        return divmod((self.selector >> bit // 8 * 4 & 7) * 8 + bit % 8, 32)


class RegisterBits(NamedTuple):
    """Bits of a fragment register."""

    words: tuple[Turned | Bytes, ...]
    """What they are the exclusive or of."""
    mask: int
    """The bits, alike in both halves of the register."""


_CodeBit = tuple[int, int]
"""Position of a code in a step, and a bit of it."""
_WordBit = tuple[int, int]
"""A word of a step, and a bit of it."""


@dataclass(frozen=True)
class Float:
    """A float of a sign, an exponent and a mantissa, and where the bits of its codes lie.

    Args:
        exponent_bits, mantissa_bits: sizes of the two.
        registers: the parts of each fragment register of a step.
        turns: the codec's.
    """

    exponent_bits: int
    mantissa_bits: int
    registers: tuple[tuple[RegisterBits, ...], ...]
    turns: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """Name of the element."""
        return f"e{self.exponent_bits}m{self.mantissa_bits}"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def lowest(self) -> int:
        """Place of a code's lowest bit in a bf16. In an fp16 it lies three bits further up."""
        return 7 - self.mantissa_bits

    @property
    def size_mask(self) -> int:
        """Places of a code's bits but the sign in a bf16."""
        return 2 ** (self.bits - 1) - 1 << self.lowest

    @property
    def power(self) -> int:
        """Bits at their places in a bf16 stand for the number times 2**-power."""
        return 128 - 2 ** (self.exponent_bits - 1)

    @property
    def half_power(self) -> int:
        """The same of an fp16."""
        return 16 - 2 ** (self.exponent_bits - 1)

    @property
    def places(self) -> tuple[Bits, ...]:
        """The codec's: bits of a lane's 32 codes, whose exclusive or are the bits of words."""
        codes, places, of_codes = self._origins()
        of_places = inverse(of_codes)
        return self._bits((codes[j], place) for i, place in enumerate(places) for j in ones(of_places[i]))

    @property
    def sums(self) -> tuple[Bits, ...]:
        """The codec's: bits of words, whose exclusive or are the bits of codes; none if each is one bit of a word."""
        codes, places, of_codes = self._origins()
        if all(row.bit_count() == 1 for row in of_codes):
            return ()
        return self._bits((code, places[j]) for i, code in enumerate(codes) for j in ones(of_codes[i]))

    def _origins(self) -> tuple[list[_CodeBit], list[_WordBit], list[int]]:
        """The bits of a step's codes, the bits of its words, and which of the latter each of the former is the
        exclusive or of, as a mask."""
        origins: dict[_CodeBit, list[_WordBit]] = {}
        for i, parts in enumerate(self.registers):
            for part in parts:
                for bit in ones(part.mask):
                    code_bit = min(bit - self.lowest, self.bits - 1)
                    for element in range(2):
                        own = (word.origin(bit + 16 * element) for word in part.words)
                        origins[4 * element + i, code_bit] = [place for place in own if place is not None]
        places = sorted({place for own in origins.values() for place in own})
        return [*origins], places, [sum(1 << places.index(place) for place in own) for own in origins.values()]

    def _bits(self, pairs: Iterable[tuple[_CodeBit, _WordBit]]) -> tuple[Bits, ...]:
        """Pairs of bits of a step's codes and words, which are the same in all steps."""
        masks = defaultdict[tuple[int, int, int], int](int)
        for (position, code_bit), (word, bit) in pairs:
            first, words = self._segments[word]
            for step in range(4):
                turned = (bit + (self.turns[word][step] if self.turns else 0)) % 32
                masks[position + 8 * step, turned - code_bit, first + step * words // 4] |= 1 << code_bit
        return tuple(Bits(position, mask, shift, word) for (position, shift, word), mask in masks.items())

    @property
    def _segments(self) -> list[tuple[int, int]]:
        """First word and number of words of each segment."""
        sizes = [segment.words for segment in Block(self.bits).segments]
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def ones(mask: int) -> list[int]:
    """The places of the bits of a mask that are set."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def inverse(rows: Sequence[int]) -> list[int]:
    """The inverse of a square matrix of bits, whose rows are masks and whose sums are exclusive ors."""
    both = [row | 1 << len(rows) + i for i, row in enumerate(rows)]
    for i in range(len(rows)):
        pivot = next(j for j in range(i, len(rows)) if both[j] >> i & 1)
        both[i], both[pivot] = both[pivot], both[i]
        both = [row ^ both[i] if j != i and row >> i & 1 else row for j, row in enumerate(both)]
    return [row >> len(rows) for row in both]


def _turned(word: int, turn: int, mask: int) -> RegisterBits:
    return RegisterBits((Turned(word, turn),), mask)


_E4M3 = Float(
    4,
    3,
    (  # two shifts and prmt for both words: no two instructions bring all bits of one to their places
        (RegisterBits((Turned(0),), 0x87F0),),
        (RegisterBits((Turned(0, -4), Bytes(0x6341)), 0x87F0),),
        (RegisterBits((Turned(1),), 0x87F0),),
        (RegisterBits((Turned(1, 4), Bytes(0x6341)), 0x87F0),),
    ),
)
_E5M2 = Float(
    5,
    2,
    tuple(
        (RegisterBits(words, 0x8FE0),)
        for word in (0, 1)
        for words in ((Turned(word),), (Turned(word, 5), Turned(word, 8)))
    ),
)
_TURNS = (0, 0, 0, 0), (0, 8, 0, 8)
_E2M3 = Float(
    2,
    3,
    (
        (_turned(0, 11, 0x00A0), _turned(1, 3, 0x8150)),
        (_turned(0, 7, 0x00F0), _turned(0, 11, 0x8100)),
        (_turned(0, 10, 0x8080), _turned(1, 0, 0x0170)),
        (_turned(0, 0, 0x81F0),),
    ),
    _TURNS,
)
_E3M2 = Float(
    3,
    2,
    (
        (_turned(0, 11, 0x83E0),),
        (_turned(0, 12, 0x8000), _turned(1, 5, 0x03E0)),
        (_turned(0, 7, 0x00E0), _turned(1, 0, 0x8300)),
        (_turned(0, 0, 0x83E0),),
    ),
    _TURNS,
)


POWERS_REFUSED = (
    "with fp8 activations an e8m0 scale for 32 columns would multiply the sums of each matrix instruction, in as many "
    "cycles as it takes, and leaves the range of 8-bit floats in codes; 16-bit ones take it in the mma16 layout"
)
"""Why no codec holds e8m0 scales of these elements for e4m3 x."""


class FloatCodec(Codec):
    """Base of the codecs of floats."""

    def refusal(self, format: WeightFormat) -> str:
        if self.fragment is MMA16:
            return ""
        return (
            f"fp8 activations take {self.element} with one float32 scale a row, or float32 scales of groups of a "
            f"multiple of {BLOCK_K} columns, which multiply sums; 16-bit activations take others too, in the mma16 "
            "layout"
        )

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.floats_decode import FloatDecoder, StoredDecoder

        if self.fragment is MMA8:
            return StoredDecoder()
        return FloatDecoder(*weight.kinds, decoding.only_fma, decoding.allow_sum_scale, number=FLOATS[self.element])

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        if weight.kind == "e4m3":
            return ()
        if few:
            return ("e2m3_few",) if self.bits == 6 else ()
        return ("e4m3_half",) if weight.kind == "f16" else ("e4m3",)


class ChannelCodec(FloatCodec):
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


class MicroscalingCodec(FloatCodec, PowerCodec):
    """For e8m0 scales, stored as PowerCodec has them."""


class GroupCodec(FloatCodec):
    """For float32 scales of groups of columns, of each row or of blocks of rows."""

    def holds(self, format: WeightFormat) -> bool:
        return super().holds(format) and (format.group_size != PER_COLUMN or format.scale_rule.block_rows > 0)


class SumScaleCodec(GroupCodec):
    """For e4m3 x, of groups that fill blocks."""

    def holds(self, format: WeightFormat) -> bool:
        return super().holds(format) and (format.group_size == PER_COLUMN or format.group_size % BLOCK_K == 0)


class WideFloatCodec(GroupCodec):
    """For 16-bit x."""

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        from w4gemm.packing.codecs.floats_decode import WideFloatDecoder

        return WideFloatDecoder(*weight.kinds, decoding.only_fma, decoding.allow_sum_scale, number=FLOATS[self.element])

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        return ("two_levels_few" if few else "two_levels",)


FLOATS = {number.name: number for number in (_E4M3, _E5M2, _E2M3, _E3M2)}
"""By the element's name."""
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


def _codecs_of_bytes(number: Float) -> tuple[Codec, ...]:
    """The codecs of an element of 8 bits, which for e4m3 x is multiplied as it is."""
    name, decoded = number.name, _decoded(number)
    wide: dict[str, Any] = {"scale_bits": 32, "in_float32": True, **decoded}
    matrices: dict[str, Any] = {"matrices": True, "decoded": "" if name == "e4m3" else name, "slow_alone": True}
    sums: dict[str, Any] = {"scale_bits": 32, "scales_on_sums": True, **matrices}
    blocks = sums | {"rows_share_scale": True}
    return (
        ChannelCodec(f"{name}_channel_mma16", MMA16, name, ("fp32",), ("none",), scale_bits=0, **decoded),
        _microscaling(number),
        WideFloatCodec(f"{name}_wide_mma16", MMA16, name, ("fp32", "b128"), ("none",), **wide),
        ChannelCodec(f"{name}_channel_mma8", MMA8, name, ("fp32",), ("none",), *_STORED, scale_bits=0, **matrices),
        SumScaleCodec(f"{name}_sums_mma8", MMA8, name, ("fp32",), ("none",), *_STORED, **sums),
        SumScaleCodec(f"{name}_blocks_mma8", MMA8, name, ("b128",), ("none",), *_STORED, **blocks),
    )


def _microscaling(number: Float) -> Codec:
    name, decoded = number.name, _decoded(number)
    return MicroscalingCodec(f"{name}_e8m0_mma16", MMA16, name, ("e8m0",), ("none",), scale_bits=8, **decoded)


def _decoded(number: Float) -> dict[str, Any]:
    """What codecs for 16-bit x share."""
    places = {"places": number.places, "sums": number.sums, "turns": number.turns}
    return {"stored": tuple(range(2**number.bits)), **places, "registers": 4, "slow_alone": True}


FLOAT_CODECS = (
    *_codecs_of_bytes(_E4M3),
    *_codecs_of_bytes(_E5M2),
    *map(_microscaling, (_E2M3, _E3M2)),
)
