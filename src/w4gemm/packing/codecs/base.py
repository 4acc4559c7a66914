"""How the codes and scales of an element lie in a packed block: :class:`Codec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, LANE_CODES, LANES, Block


@dataclass(frozen=True)
class Fragment:
    """The order of a lane's 32 codes of a strip and half of a block: of two or four matrix instructions.

    Args:
        name: of the layout that holds them.
        rows, columns: how a block's rows and columns are split, outermost first.
        lanes: the parts that tell the lanes of all blocks apart, outermost first; 0 is the n block, then its rows, the
            k block, its columns.
        positions: the parts that tell a lane's codes apart, outermost first.
    """

    name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    lanes: tuple[int, ...]
    positions: tuple[int, ...]

    def split(self, codes: torch.Tensor) -> torch.Tensor:
        """(n blocks, k blocks, lanes of all halves and strips, 32) of codes (n, k) whose n and k are multiples of a
        block's."""
        n_blocks, k_blocks = codes.shape[0] // BLOCK_N, codes.shape[1] // BLOCK_K
        view = codes.view(n_blocks, *self.rows, k_blocks, *self.columns)
        return view.permute(*self.lanes, *self.positions).reshape(n_blocks, k_blocks, -1, LANE_CODES)

    def join(self, lanes: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`split`."""
        n_blocks, k_blocks = lanes.shape[:2]
        sizes = (n_blocks, *self.rows, k_blocks, *self.columns)
        order = (*self.lanes, *self.positions)
        view = lanes.view([sizes[i] for i in order]).permute([order.index(i) for i in range(len(order))])
        return view.reshape(n_blocks * BLOCK_N, k_blocks * BLOCK_K)


#               rows: strip row8 g;  columns: half step col8 q element
MMA16 = Fragment("mma16", (4, 2, 8), (2, 4, 2, 4, 2), (0, 4, 5, 1, 3, 8), (6, 9, 7, 2))
"""m16n8k16 and m64nNk16: code 8 * step + p, where p is row8 + 2 * col8 + 4 * element, is of row g + 8 * row8, column
8 * col8 + 2 * q + element of a step."""
#               rows: strip row8 g;  columns: half step col16 q i
MMA8 = Fragment("mma8", (4, 2, 8), (2, 2, 2, 4, 4), (0, 4, 5, 1, 3, 8), (6, 2, 7, 9))
"""m16n8k32 and m64nNk32: code 16 * step + 8 * row8 + p, where p is 4 * col16 + i, is of row g + 8 * row8, column
16 * col16 + 4 * q + i of a step."""


class Bits(NamedTuple):
    """Where bits of what is stored for a code lie.

    A codec's describe a lane's codes and words, or the first of them: the next ones lie in the next words alike.
    """

    position: int
    """Index of the code."""
    mask: int
    """Bits of what is stored."""
    shift: int
    """Bits to the left, from there to the word's."""
    word: int = 0
    """Index of the word."""


@dataclass(frozen=True, repr=False)
class Codec:
    """How the numbers of some formats lie in packed blocks, for operand A of one kind of matrix instruction.

    The decoder is the device's half: :mod:`w4gemm.kernels.device.decoders` has one for each codec.

    Args:
        name: unique; part of a compiled kernel's key.
        fragment: the order of a lane's codes.
        element, scales, zeros: the formats it holds: their element, and names of scale rules and zero rules.
        stored: what a word holds for each code 0 .. 2**bits - 1.
        places: where it lies.
        scale_bits: bits of a stored scale.
        scale_step, zero_step: what the bits of a scale, and a zero point, are multiplied by when they are stored: the
            bytes of a row of the decoder's table. zero_step 0: a zero point is stored as a number of the scale dtype.
        table_rows: rows of the decoder's table in shared memory; 0 without one.
        table_row_bytes: bytes of such a row.
        scales_on_sums: True if the decoded numbers are without their scale, which multiplies the sums of each group.
        decoded: what codes are decoded to, "e5m2", if that is not the dtype of x.
    """

    name: str
    fragment: Fragment
    element: str
    scales: tuple[str, ...]
    zeros: tuple[str, ...]
    stored: tuple[int, ...]
    places: tuple[Bits, ...]
    scale_bits: int = 16
    scale_step: int = 1
    zero_step: int = 0
    table_rows: int = 0
    table_row_bytes: int = 0
    scales_on_sums: bool = False
    decoded: str = ""

    def __repr__(self) -> str:
        return self.name

    def holds(self, format: WeightFormat) -> bool:
        """True if the codec can hold the format."""
        return format.element == self.element and format.scale in self.scales and format.zero in self.zeros

    def block(self, format: WeightFormat) -> Block:
        """The geometry of the format's blocks."""
        return Block.of(format, self.scale_bits)

    @property
    def table_bytes(self) -> int:
        """Bytes of the decoder's table in shared memory."""
        return self.table_row_bytes * self.table_rows

    # --- codes

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.stored) - 1).bit_length()

    def code_words(self, codes: torch.Tensor) -> torch.Tensor:
        """int32 (n blocks, k blocks, code words) of codes uint8 (n, k) whose n and k are multiples of a block's."""
        if not self._stored_alike:
            codes = torch.tensor(self.stored, dtype=torch.uint8, device=codes.device)[codes.int()]
        split = self.fragment.split(codes)
        together, count = self._alike
        lanes = split.view(*split.shape[:3], -1, together)
        words = torch.zeros((*lanes.shape[:4], count), dtype=torch.int32, device=codes.device)
        for position, mask, shift, word in self.places:
            words[..., word] |= (lanes[..., position] & mask).int() << shift
        strips = words.view(*split.shape[:2], -1, LANES, self.bits)
        by_segment = [part.flatten(3) for part in strips.split([s.words for s in Block(self.bits).segments], -1)]
        return (by_segment[0] if len(by_segment) == 1 else torch.cat(by_segment, -1)).flatten(2)

    def codes_of(self, words: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`code_words`."""
        strips = words.reshape(*words.shape[:2], -1, LANES * self.bits)
        by_segment = strips.split([LANES * s.words for s in Block(self.bits).segments], -1)
        parts = [part.unflatten(-1, (LANES, -1)) for part in by_segment]
        together, count = self._alike
        lane_words = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(2, 3).unflatten(-1, (-1, count))
        lanes = torch.zeros((*lane_words.shape[:-1], together), dtype=torch.uint8, device=words.device)
        for position, mask, shift, word in self.places:
            lanes[..., position] |= ((lane_words[..., word] >> shift) & mask).to(torch.uint8)
        codes = self.fragment.join(lanes.flatten(-2))
        if not self._stored_alike:
            inverse = [self.stored.index(i) if i in self.stored else 0 for i in range(len(self.stored))]
            codes = torch.tensor(inverse, dtype=torch.uint8, device=words.device)[codes.int()]
        return codes

    @property
    def _stored_alike(self) -> bool:
        """True if what is stored is the code."""
        return self.stored == tuple(range(len(self.stored)))

    @property
    def _alike(self) -> tuple[int, int]:
        """Codes and words that ``places`` describe."""
        return 1 + max(place.position for place in self.places), 1 + max(place.word for place in self.places)

    def codes_beside(self, codes: torch.Tensor, scales: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        """The codes (n, k) to store beside these scales (n, groups): others where the scales are stored without a fact
        that codes can hold, such as their sign."""
        return codes

    # --- fields of scales and zero points, and scales of output channels

    def has_channels(self, format: WeightFormat) -> bool:
        """True if a float32 scale for each output channel lies beside the blocks."""
        return format.has_channels

    def stored_channels(self, scales: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor | None:
        """The scales of output channels that lie beside the blocks, float32 (n); None if there are none. scales,
        channels: those of the weight."""
        return channels

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """The bits of scales, as they are stored: int16, of 32 bits int32."""
        return _bits_of(scales) * self.scale_step

    def scales_from(self, fields: torch.Tensor, format: WeightFormat, channels: torch.Tensor | None) -> torch.Tensor:
        """The inverse of :meth:`stored_scales`. channels: what :meth:`stored_channels` gave."""
        if format.scale_dtype.itemsize > 1:
            return fields.view(format.scale_dtype)
        return (fields // self.scale_step).to(torch.uint8).view(format.scale_dtype)

    def stored_zeros(self, zeros: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        """Zero points, as they are stored, in as many bits as scales."""
        if self.zero_step:
            return zeros.short() * self.zero_step
        return _bits_of(zeros.to(format.scale_dtype))

    def zeros_from(self, fields: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        """The inverse of :meth:`stored_zeros`."""
        if self.zero_step:
            return (fields // self.zero_step).to(torch.uint8)
        if format.scale_dtype.itemsize == 1:
            return fields.to(torch.uint8)
        return fields.view(format.scale_dtype).to(format.zero_dtype)


def _bits_of(numbers: torch.Tensor) -> torch.Tensor:
    """The bits of numbers as int16, of 32 bits as int32."""
    numbers = numbers.contiguous()
    if numbers.dtype.itemsize == 1:
        return numbers.view(torch.uint8).short()
    return numbers.view(torch.int16 if numbers.dtype.itemsize == 2 else torch.int32)
