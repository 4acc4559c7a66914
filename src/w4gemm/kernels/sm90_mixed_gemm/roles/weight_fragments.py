"""The weights of a consumer warpgroup: from a stage into registers as packed words, and decoded into operand A."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from w4gemm.kernels.device.block import BlockReader, words_of_step
from w4gemm.kernels.sm90_mixed_gemm.roles.pipeline import Pipeline
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.packing.block import HALF_K


class ConsumerCoord(NamedTuple):
    """A consumer thread."""

    warpgroup: Int32
    """Number of its warpgroup along the features of a tile."""
    k_set: Int32
    thread: Int32
    """0 .. 127 in the warpgroup."""
    cta_rank: Int32
    """Rank of the CTA in its cluster."""


class WeightFragments:
    """Loads and decodes packed blocks, for one variant.

    A packed block is the part of a weight block that a stage holds: all 128 columns, or 64. A thread holds one at a
    time: its code words, then the scale words of each run (one or two scale groups), then the factors if there are any.
    """

    def __init__(self, variant: Variant, decoder: Any):
        self.variant, self.decoder = variant, decoder
        self.block = variant.stage_block
        self.reader = BlockReader(self.block)
        self.code_words = self.block.lane_words
        """Code words of a packed block that a thread holds."""

    @property
    def packed_words(self) -> int:
        """Words of a packed block that a thread holds."""
        return self.code_words + (self.block.runs + self.block.factors) * self.block.words_per_scale

    def load(self, packed: cute.Tensor, pipeline: Pipeline, stage: Int32, number: int, consumer: ConsumerCoord) -> None:
        """Load one of this k set's packed blocks into registers. number: which of the warpgroup's packed blocks in the
        stage, counted over its 64-row blocks first, then along k."""
        variant, thread = self.variant, consumer.thread
        block, atom = divmod(number, variant.m64_atoms)
        row = (consumer.warpgroup * variant.m64_atoms + atom) * variant.blocks_k
        index = row + consumer.k_set * (variant.blocks_k // variant.k_sets) + block
        address = pipeline.weights + stage * variant.weight_bytes + index * self.block.bytes
        pair_offset = (thread // 32 * 8 + thread % 32 // 4) * self.block.pair_bytes
        words: list[Int32] = []
        for half in range(self.block.columns // HALF_K):
            words += self.reader.codes(address, half, lane=thread)
        for run in range(self.block.runs):
            first = self.block.scales_at(run * self.block.groups_per_word)
            words += self.reader.scales(address + first + pair_offset)
        words += self.reader.factors(address + self.block.code_bytes + pair_offset)
        for i, word in enumerate(words):
            packed[i] = word

    def decode(self, packed: cute.Tensor, fragment: cute.Tensor, chunk: int, buffer: int, decode_table: Int32) -> None:
        """Decode a k chunk of a packed block into one of the two buffers of ``fragment``."""
        registers = cute.recast_tensor(fragment, Int32)
        width, count = self.block.words_per_scale, self.code_words * self.variant.chunk_k // self.block.columns
        codes = [packed[i] for i in range(chunk * count, (chunk + 1) * count)]
        factors = range(self.code_words + self.block.runs * width, self.packed_words)
        prepared: Any = None
        step_k = self.variant.chunk_k // 4
        for step in range(4):
            group, column = divmod(chunk * self.variant.chunk_k + step * step_k, self.block.scale_group)
            if step == 0 or column == 0:
                run, field = divmod(group, self.block.groups_per_word)
                first = self.code_words + run * width
                scales = [packed[i] for i in (*range(first, first + width), *factors)]
                prepared = self.decoder.prepare(tuple(scales), decode_table, field)
            values = self.decoder.decode(words_of_step(codes, step), prepared)
            for r, value in enumerate(values):
                registers[(0, r % 2, r // 2), 0, buffer * 4 + step] = value

    def take_scales(self, packed: cute.Tensor, scales: cute.Tensor) -> None:
        """Copy the scales of rows g and g + 8 of each group to ``scales``, as factors of the group's sums."""
        width = self.block.words_per_scale
        for group in range(self.block.groups):
            first = self.code_words + group * width
            for row, scale in enumerate(self.decoder.scales(tuple(packed[first + i] for i in range(width)))):
                scales[2 * group + row] = scale
