"""Loads from a packed block of the weight in shared memory, and the words of a step: :class:`BlockReader`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32

from w4gemm.packing.block import LANES, MATRICES_OF_ROW, MATRIX_BYTES, STRIP_N, Block, Segment
from w4gemm.ptx.arithmetic import kept, rotated
from w4gemm.ptx.memory import load_matrix, load_shared


class LaneOffsets(NamedTuple):
    """Bytes from a block's first code, scale and factor to those of a lane, in registers."""

    codes: tuple[Int32, ...]
    """By segment."""
    scales: Int32
    factors: Int32


@dataclass(frozen=True)
class BlockReader:
    """Loads of one lane from a block or a sub-block in shared memory (see :mod:`w4gemm.packing.block`). turns: the
    codec's."""

    block: Block
    turns: tuple[tuple[int, ...], ...] = ()

    def offsets(self, lane: Int32) -> LaneOffsets:
        """What the loads of a lane need, kept: ptxas would compute it anew for each block. lane: as for
        :meth:`codes`."""
        block, pair = self.block, lane // 4
        codes = tuple(kept(self._lane_offset(segment, lane)) for segment in block.segments)
        scales = kept(pair * block.pair_bytes)
        alike = block.factor_pair_bytes == block.pair_bytes
        return LaneOffsets(codes, scales, scales if alike else kept(pair * block.factor_pair_bytes))

    def _lane_offset(self, segment: Segment, lane: Int32 | int) -> Int32 | int:
        if len(self.block.segments) == 1:
            return lane * segment.lane_bytes
        return lane // LANES * self.block.strip_bytes + lane % LANES * segment.lane_bytes

    def codes(
        self,
        address: Int32,
        half: int = 0,
        strip: int = 0,
        lane: Int32 | int = 0,
        offsets: LaneOffsets | None = None,
    ) -> tuple[Int32, ...]:
        """The code words of 64 columns of a lane's rows. address: of the first code in shared memory. lane: from 32 on,
        of a strip further on. offsets: the lane's."""
        block, words = self.block, ()
        first = address + half * block.half_bytes + strip * block.strip_bytes
        if block.matrices:  # those of rows g, of rows g + 8, and both again further along k
            row8, col16 = lane // 8 % 2, lane // 16 % 2
            own = (row8 * MATRICES_OF_ROW + col16) * MATRIX_BYTES + lane % 8 * 16
            at = first + lane // LANES * block.strip_bytes + own
            return load_matrix(at) + load_matrix(at + 2 * MATRIX_BYTES)
        for i, segment in enumerate(block.segments):
            own = self._lane_offset(segment, lane) if offsets is None else offsets.codes[i]
            words += load_shared(first + own + segment.offset, segment.words)
        return words

    def words_of_step(self, words: Sequence[Int32], step: int) -> tuple[Int32, ...]:
        """The words that one matrix instruction takes, turned. words: a lane's of a k chunk, which has four steps."""
        steps = 4 * self.block.bits // len(words)
        half, step = divmod(step, steps)
        taken, at = [], half * self.block.bits
        if self.block.matrices:  # they are the registers of operand A
            return tuple(words[at + 4 * step : at + 4 * step + 4])
        for i, segment in enumerate(self.block.segments):
            first, count = self.block.words_of_step(segment, step, steps)
            turn = self.turns[i][step] if self.turns else 0
            taken += [rotated(word, turn) if turn else word for word in words[at + first : at + first + count]]
            at += segment.words
        return tuple(taken)

    def scales(
        self,
        address: Int32,
        group: int = 0,
        strip: int = 0,
        pair: Int32 | int = 0,
        offsets: LaneOffsets | None = None,
        only: Int32 | None = None,
    ) -> tuple[Int32, ...]:
        """The scale word, and zero word if any, of a group of columns, or none. address: of the first scale. pair:
        lane // 4, from 8 on of a strip further on. offsets: the lane's, instead of ``pair``. only: number of the only
        word to load."""
        block = self.block
        if not block.words_per_scale:
            return ()
        at = address + (strip * (STRIP_N // 2) + pair + block.run(group)) * block.pair_bytes
        if only is not None:
            return load_shared(at + only * 4, 1)
        return load_shared(at if offsets is None else at + offsets.scales, block.words_per_scale)

    def factors(
        self,
        address: Int32,
        strip: int = 0,
        pair: Int32 | int = 0,
        offsets: LaneOffsets | None = None,
        only: Int32 | None = None,
    ) -> tuple[Int32, ...]:
        """The words of factors, of scales and of zero points, or none. address, pair, offsets, only: as for
        :meth:`scales`."""
        block = self.block
        if not block.factors:
            return ()
        at = address + block.group_bytes + (strip * (STRIP_N // 2) + pair) * block.factor_pair_bytes
        if only is not None:
            return load_shared(at + only * 4, 1)
        return load_shared(at if offsets is None else at + offsets.factors, block.factors)
