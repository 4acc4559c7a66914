"""Loads from a packed block of the weight in shared memory: :class:`BlockReader`; and the words of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass import Int32

from w4gemm.packing.block import LANES, STRIP_N, Block
from w4gemm.ptx.memory import load_shared


@dataclass(frozen=True)
class BlockReader:
    """Loads of one lane from a block or a sub-block in shared memory (see :mod:`w4gemm.packing.block`)."""

    block: Block

    def codes(self, address: Int32, half: int = 0, strip: int = 0, lane: Int32 | int = 0) -> tuple[Int32, ...]:
        """The code words of 64 columns of a lane's rows. address: of the first code in shared memory. lane: from 32 on,
        of a strip further on."""
        at = address + half * self.block.half_bytes + strip * self.block.strip_bytes
        if len(self.block.segments) == 1:
            return load_shared(at + lane * self.block.segments[0].lane_bytes, self.block.bits)
        at, words = at + lane // LANES * self.block.strip_bytes, ()
        for segment in self.block.segments:
            words += load_shared(at + segment.offset + lane % LANES * segment.lane_bytes, segment.words)
        return words

    def scales(self, address: Int32, group: int = 0, strip: int = 0, pair: Int32 | int = 0) -> tuple[Int32, ...]:
        """The scale word, and zero word if any, of a group of columns. address: of the first scale. pair: lane // 4,
        from 8 on of a strip further on."""
        block = self.block
        at = address + (strip * (STRIP_N // 2) + pair + block.run(group)) * block.pair_bytes
        return load_shared(at, block.words_per_scale)

    def factors(self, address: Int32, strip: int = 0, pair: Int32 | int = 0) -> tuple[Int32, ...]:
        """The words of factors, of scales and of zero points, or none. address, pair: as for :meth:`scales`."""
        block = self.block
        if not block.factors:
            return ()
        at = address + block.group_bytes + (strip * (STRIP_N // 2) + pair) * block.pair_bytes
        return load_shared(at, block.words_per_scale)


def words_of_step(words: Sequence[Int32], step: int) -> tuple[Int32, ...]:
    """The words that one matrix instruction takes. words: a lane's of a k chunk, which has four steps."""
    count = len(words) // 4
    return tuple(words[step * count : (step + 1) * count])
