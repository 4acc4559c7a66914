"""Two rows of a packed block, decoded to 16 bytes at a time of a dense matrix: :class:`RowPairDecoder`.

A row's columns are decoded in k chunks of 128 bytes, and a chunk in four steps of 32 bytes, as the matrix instructions
of the products take them (layout mma16): a code word holds what one lane of a quad feeds to one step, 4 bytes of each
half of the step, of rows g and g + 8. Here each of the four lanes of a quad takes one step, with the words of all four
lanes, so that it has 16 contiguous bytes of both rows and of each half:

    lane 2 i        step 2 i: first half, second half            step 2 i,     first half;  step 2 i + 1, first half
    lane 2 i + 1    step 2 i + 1: first half, second half   ->   step 2 i, second half;     step 2 i + 1, second half

Neighbouring lanes exchange the halves that the other one stores, because two lanes then fill a sector of 32 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from w4gemm.kernels.variant import GpuVariant
from w4gemm.packing.block import BLOCK_K, HALF_K
from w4gemm.ptx.arithmetic import rotated
from w4gemm.ptx.memory import load_global, shared_address

CHUNK_BYTES = 128
"""Bytes of a dense row that a quad decodes at a time; those of a lane begin at :func:`lane_byte`."""
ODD_STEP = 32
"""Bytes from what a lane stores of an even step to what it stores of the odd one."""


class RowPair(NamedTuple):
    """A quad's rows g and g + 8 of a strip of 16, in one block, and this lane's number ``q`` in the quad."""

    block: Int64
    """Address of the block."""
    k_block: Int32
    strip: Int32
    g: Int32
    q: Int32


class PackedPair(NamedTuple):
    """The words that decode to a lane's part of two rows, by k chunk."""

    codes: list[list[list[Int32]]]
    """The turned words of each of the quad's lanes."""
    scales: list[list[Int32]]
    """With factors, if there are any."""


class StepPair(NamedTuple):
    """Four words, 16 bytes, of each of two steps."""

    even: list[Int32]
    odd: list[Int32]


class RowPairDecoder:
    """Loads and decodes two rows, for a variant of which only the formats of the weight and of x matter. only_fma: True
    without arithmetic on pairs of bf16."""

    def __init__(self, variant: GpuVariant, only_fma: bool):
        self.variant = variant
        self.decoder = variant.weight.decoder(only_fma=only_fma)
        self.k_chunks = BLOCK_K // variant.chunk_k

    def filled_table(self, thread: Int32, threads: int) -> Int32:
        """Fill the decoder's table in shared memory, if it has one. Return its address. threads: of the CTA, all of
        which call it."""
        table_bytes = self.variant.decode_table_bytes
        if not table_bytes:
            return Int32(0)
        smem = cutlass.memory.SmemAllocator()
        table = shared_address(smem.allocate_array(Int32, table_bytes // 4, byte_alignment=16))
        self.decoder.fill_table(table, thread, threads)
        cute.arch.sync_threads()
        return table

    def load(self, pair: RowPair) -> PackedPair:
        """Request all words of this lane: of step ``q`` of every k chunk."""
        variant, exists = self.variant, Boolean(True)
        source = pair.block + variant.block.codes_from(pair.k_block)
        halves = variant.chunk_k // HALF_K
        codes, scales = [], []
        for chunk in range(self.k_chunks):
            half, step = (chunk, pair.q) if halves == 1 else (pair.q // 2, pair.q % 2)
            codes.append(self._codes(source + half * variant.block.half_bytes, pair, step, 4 // halves))
            group = (chunk * variant.chunk_k + pair.q * (variant.chunk_k // 4)) // variant.block.scale_group
            run = variant.block.run(group) * variant.block.pair_bytes
            rows = pair.strip * 8 + pair.g
            at = source + variant.block.code_bytes + run + rows * variant.block.pair_bytes
            loaded = load_global(at, variant.block.words_per_scale, exists)
            if const_expr(variant.block.groups_per_word == 2):  # which of the two depends on the lane
                loaded = [word >> (group % 2 * variant.block.scale_bits) for word in loaded]
            if const_expr(variant.block.factors):
                at = pair.block + variant.block.factors_from(pair.k_block) + rows * variant.block.factor_pair_bytes
                loaded = [*loaded, *load_global(at, variant.block.factors, exists)]
            scales.append(loaded)
        return PackedPair(codes, scales)

    def _codes(self, source: Int64, pair: RowPair, step: Int32, steps: int) -> list[list[Int32]]:
        """The words, turned, that each lane of the quad feeds to a step, of ``steps`` of a half. source: address of the
        half."""
        block, turns, exists = self.variant.block, self.variant.weight.codec.turns, Boolean(True)
        words: list[list[Int32]] = [[] for _ in range(4)]
        for i, segment in enumerate(block.segments):
            first, count = block.words_of_step(segment, step, steps)
            lane0 = pair.strip * (block.strip_bytes // segment.lane_bytes) + pair.g * 4
            at = source + lane0 * segment.lane_bytes + first * 4 + segment.offset
            turn = sum(turn << 8 * j for j, turn in enumerate(turns[i])) if turns else 0
            for lane in range(4):
                own = load_global(at + lane * segment.lane_bytes, count, exists)
                words[lane] += [rotated(word, Int32(turn) >> 8 * step) for word in own] if turn else own
        return words

    def decode(self, packed: PackedPair, chunk: int, table: Int32) -> list[tuple[Int32, ...]]:
        """Decode this lane's step of a k chunk: of each lane of the quad a register of rows g, one of rows g + 8, and
        both again of the other half. table: address of the decoder's table in shared memory."""
        prepared = self.decoder.prepare(tuple(packed.scales[chunk]), table)
        return [self.decoder.decode(tuple(words), prepared) for words in packed.codes[chunk]]


def lane_byte(chunk: Int64 | Int32, q: Int32) -> Int64 | Int32:
    """Where lane ``q`` of a quad stores 16 bytes of the even step. chunk: where a row's k chunk begins."""
    return chunk + q // 2 * 64 + q % 2 * 16


def exchanged(first: list[Int32], second: list[Int32], is_odd: Boolean) -> StepPair:
    """Return what this lane stores: the first half of each step, in an odd lane the second. first, second: the halves
    of this lane's own step. All lanes of a warp call it at once."""
    own, others = _chosen(is_odd, first, second)
    got = [cute.arch.shuffle_sync_bfly(word, 1) for word in others]
    return StepPair(*_chosen(is_odd, own, got))


def _chosen(swap: Boolean, a: list[Int32], b: list[Int32]) -> tuple[list[Int32], list[Int32]]:
    """(a, b), or (b, a) if ``swap``."""
    pairs = list(zip(a, b, strict=True))
    swapped = [(Int32(cutlass.select_(swap, y, x)), Int32(cutlass.select_(swap, x, y))) for x, y in pairs]
    return [first for first, _ in swapped], [second for _, second in swapped]
