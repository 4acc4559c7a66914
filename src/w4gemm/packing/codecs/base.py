"""How the codes and scales of an element lie in a packed block: :class:`Codec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, CODE_WORDS, Block

CODES_PER_WORD = 8


@dataclass(frozen=True)
class Fragment:
    """The eight elements of a block that share a code word: one lane's of one matrix instruction, or half of them.

    Args:
        name: of the layout that holds them.
        rows, columns: how a block's rows and columns are split, outermost first.
        words: the order of (n block, k block) and these parts in memory; 0 is the n block, then its rows, the k block,
            its columns.
        positions: the parts that tell a word's eight elements apart, outermost first.
        words_per_step: code words that feed one matrix instruction.
    """

    name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    words: tuple[int, ...]
    positions: tuple[int, ...]
    words_per_step: int

    def split(self, codes: torch.Tensor) -> torch.Tensor:
        """(n blocks, k blocks, 1024, 8) of codes (n, k) whose n and k are multiples of a block's."""
        n_blocks, k_blocks = codes.shape[0] // BLOCK_N, codes.shape[1] // BLOCK_K
        view = codes.view(n_blocks, *self.rows, k_blocks, *self.columns)
        return view.permute(*self.words, *self.positions).reshape(n_blocks, k_blocks, CODE_WORDS, CODES_PER_WORD)

    def join(self, words: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`split`."""
        n_blocks, k_blocks = words.shape[:2]
        sizes = (n_blocks, *self.rows, k_blocks, *self.columns)
        order = (*self.words, *self.positions)
        view = words.view([sizes[i] for i in order]).permute([order.index(i) for i in range(len(order))])
        return view.reshape(n_blocks * BLOCK_N, k_blocks * BLOCK_K)


#               rows: warp row8 g;  columns: half step col8 q element
MMA16 = Fragment("mma16", (4, 2, 8), (2, 4, 2, 4, 2), (0, 4, 5, 1, 3, 8, 6), (9, 7, 2), words_per_step=1)
"""m16n8k16 and m64nNk16: a word holds rows g and g + 8 of a warp's 16, columns 8 * col8 + 2 * q + {0, 1} of a step."""
#               rows: warp row8 g;  columns: half step col16 q i
MMA8 = Fragment("mma8", (4, 2, 8), (2, 2, 2, 4, 4), (0, 4, 5, 1, 3, 8, 6, 2), (7, 9), words_per_step=2)
"""m16n8k32 and m64nNk32: a word holds one row, columns 16 * col16 + 4 * q + {0 .. 3} of a step."""


class Bits(NamedTuple):
    """Where bits of what is stored for a code lie in its word."""

    position: int
    """Index of the code among the eight of its word."""
    mask: int
    """Bits of what is stored."""
    shift: int
    """Bits to the left, from there to the word's."""


@dataclass(frozen=True, repr=False)
class Codec:
    """How the numbers of some formats lie in packed blocks, for operand A of one kind of matrix instruction.

    The decoder is the device's half: :mod:`w4gemm.kernels.device.decoders` has one for each codec.

    Args:
        name: unique; part of a compiled kernel's key.
        fragment: which elements share a word.
        element, scales, zeros: the formats it holds: their element, and names of scale rules and zero rules.
        stored: what a word holds for each code 0..15.
        bits: where it lies.
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
    bits: tuple[Bits, ...]
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

    def code_words(self, codes: torch.Tensor) -> torch.Tensor:
        """int32 (n blocks, k blocks, 1024) of codes uint8 (n, k) whose n and k are multiples of a block's."""
        if self.stored != tuple(range(16)):
            codes = torch.tensor(self.stored, dtype=torch.uint8, device=codes.device)[codes.int()]
        split = self.fragment.split(codes)
        words = torch.zeros(split.shape[:-1], dtype=torch.int32, device=codes.device)
        for position, mask, shift in self.bits:
            words |= (split[..., position] & mask).int() << shift
        return words

    def codes_of(self, words: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`code_words`."""
        split = torch.zeros((*words.shape, CODES_PER_WORD), dtype=torch.uint8, device=words.device)
        for position, mask, shift in self.bits:
            split[..., position] |= ((words >> shift) & mask).to(torch.uint8)
        codes = self.fragment.join(split)
        if self.stored != tuple(range(16)):
            inverse = [self.stored.index(i) if i in self.stored else 0 for i in range(16)]
            codes = torch.tensor(inverse, dtype=torch.uint8, device=words.device)[codes.int()]
        return codes

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
