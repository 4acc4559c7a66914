"""Scales of two levels for sums, which the lanes of a quad prepare for one another: :class:`QuadLevels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from w4gemm.kernels.device.block import BlockReader
from w4gemm.kernels.device.warp_product import StripLevels, Words
from w4gemm.packing.block import STRIP_N
from w4gemm.ptx.memory import load_shared_f32x4, store_shared_f32x2, store_shared_f32x4


@dataclass(frozen=True)
class QuadLevels:
    """All lanes of a quad have the same two rows of a strip. Each prepares the scales of one row and of half of the
    groups, and all of them go through shared memory: [strip][rows g, g + 8 of a lane: 8][row: 2][group], float32.

    Args:
        reader: of the packed block.
        decoder: its ``TwoLevelDecoder``.
    """

    reader: BlockReader
    decoder: Any

    @property
    def groups(self) -> int:
        return self.reader.block.groups

    def words(self, scales: Int32, strip: int, lane: Int32) -> list[Words]:
        """Load the words of a lane's groups, by run: of the former half in even lanes, of the latter in odd ones.
        scales: address of the block's first scale."""
        pair, runs = lane // 4, self.reader.block.runs // 2
        factors = self.reader.factors(scales, strip, pair)
        own = scales + lane % 2 * (runs * self.reader.block.run_bytes)
        groups_of_run = self.groups // 2 // runs
        return [self.reader.scales(own, run * groups_of_run, strip, pair) + factors for run in range(runs)]

    def exchanged(self, words: Sequence[Sequence[Words]], shared: Int32, lane: Int32) -> Callable[[int], StripLevels]:
        """Prepare scales and hand them over. Returns a function of the strip that loads those of its rows. words: by
        strip. shared: address of the warp's scales, which the lanes have loaded when they call this again."""
        row, of_row, of_pair = lane // 2 % 2, 4 * self.groups, 8 * self.groups
        of_strip = STRIP_N // 2 * of_pair
        pair = shared + lane // 4 * of_pair
        target = pair + row * of_row + lane % 2 * (of_row // 2)
        store = store_shared_f32x4 if self.groups == 8 else store_shared_f32x2
        cute.arch.sync_warp()
        for strip, runs in enumerate(words):
            scales = [self.decoder.scale_of_row(own, row, field) for own in runs for field in range(2)]
            store(target + strip * of_strip, scales)
        cute.arch.sync_warp()

        def by_group(first: Int32) -> Iterator[tuple[Float32, Float32]]:
            for at in range(0, of_row, 16):
                rows = [load_shared_f32x4(first + r * of_row + at) for r in range(2)]
                yield from zip(*rows, strict=True)

        return lambda strip: StripLevels(by_group(pair + strip * of_strip), words[strip][0])
