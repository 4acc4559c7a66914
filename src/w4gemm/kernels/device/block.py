"""Loads from a packed block of the weight in shared memory, and the words of a step: :class:`BlockReader`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass import Int32

from w4gemm.packing.block import LANES, MATRICES_OF_ROW, MATRIX_BYTES, STRIP_N, Block
from w4gemm.ptx.arithmetic import rotated
from w4gemm.ptx.memory import load_matrix, load_shared


@dataclass(frozen=True)
class BlockReader:
    """Loads of one lane from a block or a sub-block in shared memory (see :mod:`w4gemm.packing.block`). turns: the
    codec's."""

    block: Block
    turns: tuple[tuple[int, ...], ...] = ()

    def codes(self, address: Int32, half: int = 0, strip: int = 0, lane: Int32 | int = 0) -> tuple[Int32, ...]:
        """The code words of 64 columns of a lane's rows. address: of the first code in shared memory. lane: from 32 on,
        of a strip further on."""
        block, words = self.block, ()
        first = address + half * block.half_bytes + strip * block.strip_bytes
        if block.matrices:  # those of rows g, of rows g + 8, and both again further along k
            row8, col16 = lane // 8 % 2, lane // 16 % 2
            own = (row8 * MATRICES_OF_ROW + col16) * MATRIX_BYTES + lane % 8 * 16
            at = first + lane // LANES * block.strip_bytes + own
            return load_matrix(at) + load_matrix(at + 2 * MATRIX_BYTES)
        for segment in block.segments:
            own = lane * segment.lane_bytes
            if len(block.segments) > 1:
                own = lane // LANES * block.strip_bytes + lane % LANES * segment.lane_bytes
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

    def scales(self, address: Int32, group: int = 0, strip: int = 0, pair: Int32 | int = 0) -> tuple[Int32, ...]:
        """The scale word, and zero word if any, of a group of columns, or none. address: of the first scale. pair:
        lane // 4, from 8 on of a strip further on."""
        block = self.block
        if not block.words_per_scale:
            return ()
        at = address + (strip * (STRIP_N // 2) + pair + block.run(group)) * block.pair_bytes
        return load_shared(at, block.words_per_scale)

    def factors(self, address: Int32, strip: int = 0, pair: Int32 | int = 0) -> tuple[Int32, ...]:
        """The words of factors, of scales and of zero points, or none. address, pair: as for :meth:`scales`."""
        block = self.block
        if not block.factors:
            return ()
        at = address + block.group_bytes + (strip * (STRIP_N // 2) + pair) * block.factor_pair_bytes
        return load_shared(at, block.factors)
