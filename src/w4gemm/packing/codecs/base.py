"""How the codes and scales of an element lie in a packed block, and what decodes them: :class:`Codec`.

A codec is all that the library knows of an element in blocks. A file beside it has the device's half, a decoder, which
turns code words into the registers of operand A; it needs the DSL, so :meth:`Codec.decoder` imports it. What a kernel
calls:

    all                   ``prepare(words, register, field)`` once per scale group: the scale words, and what ``decode``
                          needs of rows g and g + 8; in ``register`` the address of the table, or ``held_word`` unless
                          that is None. ``decode(words, prepared)``: the fragment registers of one matrix
                          instruction, in the order row g, row g + 8, and both again further along k; its code words are
                          those of kernels/device/block.py's ``words_of_step``. ``sum_scale``: what a decoded 1.0 stands
                          for; the epilogue multiplies the sums by it, so without allow_sum_scale it must be 1
    sm90_decode           if ``separate_scales``, it multiplies numbers without scales: ``offsets(words, table)``,
                          ``decode_exact(words, offsets)``, ``scales_and_zeros(words, field)``, ``exact_scale``; if
                          ``factors_on_sums``, numbers times scales: ``prepare_levels(words, field)``,
                          ``decode_levels(words, prepared)``, ``factors(words)``; of scales of two levels
                          ``scale_of_row(words, row, field)``; if zero points have factors, ``zero_levels(words)``,
                          ``zero_factors(words)``, ``levels(word, factors, field)``
    scales on sums        ``scales(words, field)``: float32 factors of the sums of rows g and g + 8
    a table               ``fill_table(table, thread, threads)``, before a barrier

For 16-bit x, a subclass of ``Decoder`` (integers_decode.py) has all of this, and may override only ``decode_exact`` if
its numbers are multiplied by a scale of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, LANE_CODES, LANES, Block, Segment


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
    """Bits to the left, from there to the word's; if negative, to the right."""
    word: int = 0
    """Index of the word."""


PAIR_ROW_BYTES = 128
"""Bytes of a row of a table of pairs: one word for each lane, or two for each of sixteen."""
PAIR_TABLE_BYTES = 256 * PAIR_ROW_BYTES
"""Bytes of such a table: a row for each byte of a code word, which is two codes."""


class Pairs(Enum):
    """Form of two numbers in a table in shared memory by which two codes are decoded at a time, see pairs_decode.py."""

    HALVES = "halves"
    """Their numbers in the dtype of x, in the halves of a word."""
    FLOATS = "floats"
    """Their numbers in float32, in two words."""


class Decoding(NamedTuple):
    """The way in which a kernel decodes."""

    only_fma: bool = False
    """True for GPUs before SM90, which have no other arithmetic on pairs of bf16."""
    allow_sum_scale: bool = False
    """True if the kernel multiplies its sums by the decoder's ``sum_scale``, which may then be other than 1."""
    pairs: Pairs | None = None
    """Contents of the kernel's table in shared memory, if it decodes pairs of codes by one."""
    on_sums: bool = False
    """True if the kernel applies scales to sums though the codec does not ask for it."""
    held: bool = False
    """True if the kernel has a register for the decoder's ``held_word``, with which ``prepare`` takes fewer
    instructions; decoders of which that is not so have none."""
    by_dots: bool = False
    """True if dot products move codes, where a decoder can do so: as many instructions, but of the FMA pipe. That is
    faster where the ALU bounds decoding, and slower where matrix instructions bound the kernel."""


@dataclass(frozen=True)
class WeightOperand:
    """The facts of a weight's format that a kernel is compiled for: part of its compile key.

    Args:
        codec: how codes and scales lie.
        kind: dtype of x, "f16", "bf16" or "e4m3", which is also what is decoded to, unless the codec says otherwise.
        scale: what a decoder takes the stored scales for, "f16", "bf16", "f32", "e4m3", "e8m0", "u8" or
            "s8".
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
    def kinds(self) -> tuple[str, str, str]:
        """What a decoder of numbers for 16-bit x is made of first: dtype of x, of the scales, and zero points."""
        return self.kind, self.scale, self.zero

    @property
    def decoded(self) -> str:
        """Kind of number that codes are decoded to."""
        return self.codec.decoded or self.kind

    @property
    def mixed(self) -> bool:
        """True if scales have another dtype than x."""
        return self.kind != self.scale

    @property
    def in_float32(self) -> bool:
        """True if a weight is computed in float32: with wide scales, and a byte with scales of another dtype."""
        other = self.mixed and self.scale in ("f16", "bf16")
        return self.codec.in_float32 or (other and self.block.bits > 4 and not self.codec.scales_on_sums)

    @property
    def register_class(self) -> str:
        """Facts that decide, beside the bytes of scales, how many registers decoding takes; equal for formats of which
        a kernel's machine code keeps as much in registers."""
        facts = {
            "up to 4 bits" if self.codec.bits <= 4 else "5 to 8 bits": True,
            f"{self.codec.registers} registers": True,
            "in float32": self.in_float32,
            "in matrices": self.codec.matrices,
            "factors": self.block.factors,
            "scales on sums": self.codec.scales_on_sums,
            "rows share scales": self.codec.rows_share_scale,
            f"table rows of {self.codec.table_row_bytes} bytes": self.codec.table_bytes > 0,
        }
        return ", ".join(fact for fact, holds in facts.items() if holds)

    def decoder(self, **decoding: Any) -> Any:
        """The decoder for a kernel, of which ``decoding`` are the fields of :class:`Decoding`."""
        return self.codec.decoder(self, Decoding(**decoding))


@dataclass(frozen=True, repr=False)
class Codec:
    """How the numbers of some formats lie in packed blocks, for operand A of one kind of matrix instruction.

    Args:
        name: unique; part of a compiled kernel's key.
        fragment: the order of a lane's codes.
        element, scales, zeros: the formats it holds: their element, and names of scale rules and zero rules.
        stored: what a word holds for each code 0 .. 2**bits - 1.
        places: where it lies. What comes to the same bit of a word is added up without carries (exclusive or).
        sums: if so, the bits of words whose exclusive or are those of codes, as ``places`` are written.
        turns: by segment and matrix instruction of a half, by how many bits its words are rotated to the right before
            they are decoded; none if the codes of every instruction lie alike.
        scale_bits: bits of a stored scale; 0 if scales lie beside the blocks alone, as those of output channels.
        scale_step, zero_step: what the bits of a scale, and a zero point, are multiplied by when they are stored: the
            bytes of a row of the decoder's table. zero_step 0: a zero point is stored as a number of the scale dtype.
        scale_offset: what is added to a scale with a sign when it is stored; 0 for scales without.
        table_rows: rows of the decoder's table in shared memory; 0 without one.
        table_row_bytes: bytes of such a row.
        half_steps: True if groups may have half the columns that a matrix instruction with fp8 x takes.
        scales_on_sums: True if the decoded numbers are without their scale, which multiplies the sums of each group.
        rows_share_scale: True if rows g and g + 8 of a strip have the same scales.
        decoded: what codes are decoded to, "e5m2", if that is not the dtype of x.
        registers: registers that the instructions of a step take beside its code words and fragments.
        in_float32: True if a weight is computed in float32, because scales have 32 bits or two levels.
        matrices: True if codes lie in core matrices: what WGMMA and ldmatrix read from shared memory.
        uneven_rows: True if many uneven rows of experts were seen to take longer than their tiles say.
        shares_levels: True if lanes may prepare scales for one another.
        factors_on_sums: True if codes times their scales of two levels are numbers of x's dtype, so that a kernel that
            scales sums multiplies those of a whole block, by factors alone.
        by_superblock: True if a main loop whose iterations are superblocks was seen to be faster.
        slow_alone: True if one warpgroup along n was seen to keep tensor cores waiting.
    """

    name: str
    fragment: Fragment
    element: str
    scales: tuple[str, ...]
    zeros: tuple[str, ...]
    stored: tuple[int, ...]
    places: tuple[Bits, ...]
    turns: tuple[tuple[int, ...], ...] = ()
    scale_bits: int = 16
    scale_step: int = 1
    scale_offset: int = 0
    zero_step: int = 0
    table_rows: int = 0
    table_row_bytes: int = 0
    half_steps: bool = False
    scales_on_sums: bool = False
    rows_share_scale: bool = False
    decoded: str = ""
    registers: int = 0
    in_float32: bool = False
    matrices: bool = False
    uneven_rows: bool = False
    slow_alone: bool = False
    shares_levels: bool = False
    factors_on_sums: bool = False
    by_superblock: bool = False
    sums: tuple[Bits, ...] = ()

    def __repr__(self) -> str:
        return self.name

    def holds(self, format: WeightFormat) -> bool:
        """True if the codec can hold the format."""
        return format.element == self.element and format.scale in self.scales and format.zero in self.zeros

    def refusal(self, format: WeightFormat) -> str:
        """Why the codec cannot hold a format of its element; the empty string if its scales and zero points say all."""
        return ""

    def block(self, format: WeightFormat) -> Block:
        """The geometry of the format's blocks."""
        return Block.of(format, self.scale_bits, self.matrices)

    @property
    def table_bytes(self) -> int:
        """Bytes of the decoder's table in shared memory."""
        return self.table_row_bytes * self.table_rows

    # --- decoding

    def decoder(self, weight: WeightOperand, decoding: Decoding) -> Any:
        """The device's half. weight: an operand of this codec."""
        raise NotImplementedError(f"{self.name} has no decoder")

    def pairs(self, weight: WeightOperand, on_sums: bool) -> Pairs | None:
        """Form of the table by which the decoder takes two codes at a time; None without one. on_sums: True if scales
        multiply sums."""
        return None

    def may_scale_sums(self, weight: WeightOperand) -> bool:
        """True if for few tokens a kernel had better apply scales to sums, though the decoder can do it."""
        return False

    def costs(self, weight: WeightOperand, pairs: Pairs | None, few: bool) -> tuple[str, ...]:
        """Names of the cost model's constants whose sum is by which part decoding takes longer than that of int4 with
        scales of x's dtype, bf16. pairs: the table, if there is one. few: True for sm90_decode. The constants' line
        says which are measured and which are counted instructions."""
        if few or weight.kind == "e4m3":
            return ()
        if weight.kind == "f16":
            return ("half_other_scales" if weight.mixed else "half",)
        if weight.mixed:
            return ("other_scales",)
        return ("integer_zeros",) if weight.zero == "int" else ()

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
            part = (lanes[..., position] & mask).int()
            words[..., word] ^= part << shift if shift >= 0 else part >> -shift
        strips = words.view(*split.shape[:2], -1, LANES, self.bits)
        by_segment = [part.flatten(3) for part in strips.split([s.words for s in self._segments], -1)]
        return (by_segment[0] if len(by_segment) == 1 else torch.cat(by_segment, -1)).flatten(2)

    def codes_of(self, words: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`code_words`."""
        strips = words.reshape(*words.shape[:2], -1, LANES * self.bits)
        by_segment = strips.split([LANES * s.words for s in self._segments], -1)
        parts = [part.unflatten(-1, (LANES, -1)) for part in by_segment]
        together, count = self._alike
        lane_words = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(2, 3).unflatten(-1, (-1, count))
        lanes = torch.zeros((*lane_words.shape[:-1], together), dtype=torch.uint8, device=words.device)
        for position, mask, shift, word in self.sums or self.places:
            part = lane_words[..., word] >> shift if shift >= 0 else lane_words[..., word] << -shift
            lanes[..., position] ^= (part & mask).to(torch.uint8)
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
    def _segments(self) -> tuple[Segment, ...]:
        return Block(self.bits, matrices=self.matrices).segments

    @property
    def _alike(self) -> tuple[int, int]:
        """Codes and words that ``places`` describe."""
        return 1 + max(place.position for place in self.places), 1 + max(place.word for place in self.places)

    def codes_beside(self, codes: torch.Tensor, scales: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        """The codes (n, k) to store with these scales (n, groups): others where the scales are stored without a fact
        that codes can hold, such as their sign."""
        return codes

    # --- fields of scales and zero points, and scales of output channels

    def stored_fields(
        self, scales: torch.Tensor, zeros: torch.Tensor | None, format: WeightFormat
    ) -> list[torch.Tensor]:
        """The fields (n, groups) of a scale word and, with zero points, of a zero word; none if scale_bits is 0."""
        fields = [self.stored_scales(scales)]
        return fields if zeros is None else [*fields, self.stored_zeros(zeros, format)]

    def from_fields(
        self, fields: list[torch.Tensor], format: WeightFormat, channels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The inverse of :meth:`stored_fields`: scales, and zero points if there are any. channels: what
        :meth:`stored_channels` gave."""
        zeros = self.zeros_from(fields[1], format) if format.has_zero else None
        return self.scales_from(fields[0], format, channels), zeros

    def has_channels(self, format: WeightFormat) -> bool:
        """True if a float32 scale for each output channel lies beside the blocks."""
        return format.has_channels

    def stored_channels(self, scales: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor | None:
        """The scales of output channels that lie beside the blocks, float32 (n); None if there are none. scales,
        channels: those of the weight."""
        return channels

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """The bits of scales, as they are stored: int16, of 32 bits int32."""
        return scales.short() + self.scale_offset if self.scale_offset else _bits_of(scales) * self.scale_step

    def scales_from(self, fields: torch.Tensor, format: WeightFormat, channels: torch.Tensor | None) -> torch.Tensor:
        """The inverse of :meth:`stored_scales`. channels: what :meth:`stored_channels` gave."""
        if format.scale_dtype.itemsize > 1:
            return fields.view(format.scale_dtype)
        if self.scale_offset:
            return (fields - self.scale_offset).to(format.scale_dtype)
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
