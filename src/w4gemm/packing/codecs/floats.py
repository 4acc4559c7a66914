"""Codecs of floats of 8 and 6 bits: e4m3, e5m2, e2m3 and e3m2.

With e4m3 x codes of 8 bits lie in core matrices. They are a matrix instruction's operand as they are stored: of WGMMA
from shared memory, or from registers, into which ldmatrix brings a code word of each lane. Scales multiply sums: one
scale a row the sums of all columns, scales of groups those of 128 columns.

For 16-bit x words are decoded. A code's mantissa at the highest mantissa bits of a bf16, its exponent above it, and its
sign at bit 15, are its number times a power of two: the smallest exponents of both are subnormals. So words hold the
bits of registers such that few rotations bring them to their places (:class:`Float`). The registers of rows g of 8 bits
lie in place. The second word of 6 bits has bits of two steps, and is turned by 8 for the latter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.block import BLOCK_K, Block
from w4gemm.packing.codecs.base import MMA8, MMA16, Bits, Codec, Decoding, Pairs, WeightOperand
from w4gemm.packing.codecs.e2m1 import PowerCodec


class TurnedBits(NamedTuple):
    """Bits of a fragment register that one rotation of a code word brings to their places."""

    word: int
    """Index of the word, of a step's."""
    turn: int
    """Bits by which it is turned to the right or, if negative, shifted to the left."""
    mask: int
    """The bits, alike in both halves of the register."""


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
    registers: tuple[tuple[TurnedBits, ...], ...]
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
        """Where the bits of a lane's 32 codes lie."""
        masks = defaultdict[tuple[int, int, int], int](int)
        for step in range(4):
            for i, parts in enumerate(self.registers):
                for word, turn, mask in parts:
                    first, words = self._segments[word]
                    stored = turn + (self.turns[word][step] if self.turns else 0)
                    for bit in range(16):
                        if mask >> bit & 1:
                            code_bit = min(bit - self.lowest, self.bits - 1)
                            for element in range(2):
                                shift = (bit + 16 * element + stored) % 32 - code_bit
                                position = 8 * step + 4 * element + i
                                masks[position, shift, first + step * words // 4] |= 1 << code_bit
        return tuple(Bits(position, mask, shift, word) for (position, shift, word), mask in masks.items())

    @property
    def _segments(self) -> list[tuple[int, int]]:
        """First word and number of words of each segment."""
        sizes = [segment.words for segment in Block(self.bits).segments]
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _both(first: tuple[TurnedBits, ...], second: tuple[TurnedBits, ...]) -> tuple[tuple[TurnedBits, ...], ...]:
    """Registers of two words alike, whose first one has both rows of col8 0, and the second one those of col8 1."""
    return (first, second, *(tuple(part._replace(word=1) for part in parts) for parts in (first, second)))


_E4M3 = Float(4, 3, _both((TurnedBits(0, 0, 0x87F0),), (TurnedBits(0, 4, 0x8780), TurnedBits(0, -4, 0x0070))))
_E5M2 = Float(5, 2, _both((TurnedBits(0, 0, 0x8FE0),), (TurnedBits(0, 5, 0x8080), TurnedBits(0, 8, 0x0F60))))
_TURNS = (0, 0, 0, 0), (0, 8, 0, 8)
_E2M3 = Float(
    2,
    3,
    (
        (TurnedBits(0, 11, 0x00A0), TurnedBits(1, 3, 0x8150)),
        (TurnedBits(0, 7, 0x00F0), TurnedBits(0, 11, 0x8100)),
        (TurnedBits(0, 10, 0x8080), TurnedBits(1, 0, 0x0170)),
        (TurnedBits(0, 0, 0x81F0),),
    ),
    _TURNS,
)
_E3M2 = Float(
    3,
    2,
    (
        (TurnedBits(0, 11, 0x83E0),),
        (TurnedBits(0, 12, 0x8000), TurnedBits(1, 5, 0x03E0)),
        (TurnedBits(0, 7, 0x00E0), TurnedBits(1, 0, 0x8300)),
        (TurnedBits(0, 0, 0x83E0),),
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
        form = weight.kind, weight.scale, weight.zero
        return FloatDecoder(*form, decoding.only_fma, decoding.allow_sum_scale, number=FLOATS[self.element])

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

        form = weight.kind, weight.scale, weight.zero
        return WideFloatDecoder(*form, decoding.only_fma, decoding.allow_sum_scale, number=FLOATS[self.element])

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
    name, codes = number.name, _codes(number)
    wide: dict[str, Any] = {"scale_bits": 32, "in_float32": True, **_DECODED}
    matrices: dict[str, Any] = {"matrices": True, "decoded": "" if name == "e4m3" else name, "slow_alone": True}
    sums: dict[str, Any] = {"scale_bits": 32, "scales_on_sums": True, **matrices}
    blocks = sums | {"rows_share_scale": True}
    return (
        ChannelCodec(f"{name}_channel_mma16", MMA16, name, ("fp32",), ("none",), *codes, scale_bits=0, **_DECODED),
        _microscaling(number),
        WideFloatCodec(f"{name}_wide_mma16", MMA16, name, ("fp32", "b128"), ("none",), *codes, **wide),
        ChannelCodec(f"{name}_channel_mma8", MMA8, name, ("fp32",), ("none",), *_STORED, scale_bits=0, **matrices),
        SumScaleCodec(f"{name}_sums_mma8", MMA8, name, ("fp32",), ("none",), *_STORED, **sums),
        SumScaleCodec(f"{name}_blocks_mma8", MMA8, name, ("b128",), ("none",), *_STORED, **blocks),
    )


def _microscaling(number: Float) -> Codec:
    name, codes = number.name, _codes(number)
    return MicroscalingCodec(f"{name}_e8m0_mma16", MMA16, name, ("e8m0",), ("none",), *codes, scale_bits=8, **_DECODED)


def _codes(number: Float) -> tuple[tuple[int, ...], tuple[Bits, ...], tuple[tuple[int, ...], ...]]:
    return tuple(range(2**number.bits)), number.places, number.turns


_DECODED: dict[str, Any] = {"registers": 4, "slow_alone": True}
FLOAT_CODECS = (
    *_codecs_of_bytes(_E4M3),
    *_codecs_of_bytes(_E5M2),
    *map(_microscaling, (_E2M3, _E3M2)),
)
