"""Decode a packed weight (n, k) to a dense matrix in x's dtype, as fast as its bytes move; cuBLAS multiplies by it.

A CTA loops over blocks of 64 rows x 128 columns. A row's columns are decoded in k chunks of 128 bytes, and a chunk in
four steps of 32 bytes, as the matrix instructions of the other kernels take them (layout mma16): a code word holds what
one lane of a quad feeds to one step, 4 bytes of each half of the step, of rows g and g + 8. Here each of the four lanes
of a quad takes one step, with the words of all four lanes, so that it has 16 contiguous bytes of every row and half:

    lane 2 i        step 2 i: first half, second half            step 2 i,     first half;  step 2 i + 1, first half
    lane 2 i + 1    step 2 i + 1: first half, second half   ->   step 2 i, second half;     step 2 i + 1, second half

Neighbouring lanes exchange the halves that the other one stores, because two lanes then fill a sector of 32 bytes.

Programmatic dependent launch: the decoder's table, if it has one, is filled before ``griddepcontrol.wait``. The dense
matrix is written after it, because the kernel before may still read that memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from w4gemm.kernels.variant import GpuVariant
from w4gemm.packing.block import BLOCK_K, BLOCK_N, HALF_K
from w4gemm.ptx.arithmetic import rotated
from w4gemm.ptx.memory import load_global, shared_address, store_global

_THREADS = 128
_CHUNK_BYTES = 128


class DequantizeKernel:
    """The kernel for a variant, of which only the formats of the weight and of x matter. ``hopper``: True for SM90 and
    later, which have arithmetic on pairs of bf16 and programmatic dependent launch."""

    def __init__(self, variant: GpuVariant, hopper: bool):
        self.variant = variant
        self.hopper = hopper
        self.decoder = variant.weight.decoder(only_fma=not hopper)
        self.k_chunks = BLOCK_K // variant.chunk_k

    @cute.jit
    def __call__(self, weight: cute.Tensor, dense: cute.Tensor, max_ctas: Int32, stream: Any):
        """Launch. weight: int32 (n blocks, k blocks, words). dense: int32 (64 * n blocks, words of 128 * k blocks)."""
        ctas = cutlass.min(weight.shape[0] * weight.shape[1], max_ctas)
        self.kernel(weight, dense).launch(grid=[ctas, 1, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=self.hopper)

    @cute.kernel
    def kernel(self, weight: cute.Tensor, dense: cute.Tensor):
        variant = self.variant
        thread = cute.arch.thread_idx()[0]
        k_blocks, stride = weight.shape[1], cute.arch.grid_dim()[0]
        table = Int32(0)
        if const_expr(variant.decode_table_bytes > 0):
            smem = cutlass.memory.SmemAllocator()
            table = shared_address(smem.allocate_array(Int32, variant.decode_table_bytes // 4, byte_alignment=16))
            self.decoder.fill_table(table, thread, _THREADS)
            cute.arch.sync_threads()
        if const_expr(self.hopper):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        block = cute.arch.block_idx()[0]
        while block < weight.shape[0] * k_blocks:
            self.dequantize(weight, dense, block, thread, table)
            block += stride

    @cute.jit
    def dequantize(self, weight: cute.Tensor, dense: cute.Tensor, block: Int32, thread: Int32, table: Int32):
        """Decode one block. A thread decodes step ``q`` of every k chunk, of rows g and g + 8 of its warp's sixteen."""
        variant, exists = self.variant, Boolean(True)
        warp, lane = thread // 32, thread % 32
        g, q = lane // 4, lane % 4
        n_block, k_block = block // weight.shape[1], block % weight.shape[1]
        start = weight.iterator.toint() + Int64(block) * variant.block.stride
        source = start + variant.block.codes_from(k_block)
        row_bytes = dense.shape[1] * 4
        row = Int64(n_block * BLOCK_N + warp * 16 + g)
        target = dense.iterator.toint() + row * row_bytes + k_block * (BLOCK_K * variant.itemsize)
        halves = variant.chunk_k // HALF_K
        words, scales = [], []
        for chunk in cutlass.range_constexpr(self.k_chunks):
            half, step = (chunk, q) if halves == 1 else (q // 2, q % 2)
            words.append(self.codes(source + half * variant.block.half_bytes, thread, step, 4 // halves))
            group = (chunk * variant.chunk_k + q * (variant.chunk_k // 4)) // variant.block.scale_group
            run = variant.block.run(group) * variant.block.pair_bytes
            at = source + variant.block.code_bytes + run + (warp * 8 + g) * variant.block.pair_bytes
            loaded = load_global(at, variant.block.words_per_scale, exists)
            if const_expr(variant.block.groups_per_word == 2):  # which of the two depends on the lane
                loaded = [word >> (group % 2 * variant.block.scale_bits) for word in loaded]
            if const_expr(variant.block.factors):
                at = start + variant.block.factors_from(k_block) + (warp * 8 + g) * variant.block.factor_pair_bytes
                loaded = [*loaded, *load_global(at, variant.block.factors, exists)]
            scales.append(loaded)
        for chunk in cutlass.range_constexpr(self.k_chunks):
            prepared = self.decoder.prepare(tuple(scales[chunk]), table)
            decoded = [self.decoder.decode(tuple(w), prepared) for w in words[chunk]]
            for row8 in cutlass.range_constexpr(2):
                halves = [[values[row8 + 2 * half] for values in decoded] for half in range(2)]
                even, odd = self.exchanged(halves, q % 2 == 1)
                at = target + row8 * 8 * row_bytes + chunk * _CHUNK_BYTES + q // 2 * 64 + q % 2 * 16
                store_global(at, even, exists)
                store_global(at + 32, odd, exists)

    def codes(self, source: Int64, thread: Int32, step: Int32, steps: int) -> list[list[Int32]]:
        """The words, turned, that each lane of the thread's quad feeds to a step, of ``steps`` of a half. source:
        address of the half."""
        block, turns, exists = self.variant.block, self.variant.weight.codec.turns, Boolean(True)
        warp, quad = thread // 32, thread % 32 // 4
        words: list[list[Int32]] = [[] for _ in range(4)]
        for i, segment in enumerate(block.segments):
            first, count = block.words_of_step(segment, step, steps)
            lane0 = warp * (block.strip_bytes // segment.lane_bytes) + quad * 4
            at = source + lane0 * segment.lane_bytes + first * 4 + segment.offset
            turn = sum(turn << 8 * j for j, turn in enumerate(turns[i])) if turns else 0
            for lane in range(4):
                own = load_global(at + lane * segment.lane_bytes, count, exists)
                words[lane] += [rotated(word, Int32(turn) >> 8 * step) for word in own] if turn else own
        return words

    def exchanged(self, halves: list[list[Int32]], is_odd: Boolean) -> tuple[list[Int32], list[Int32]]:
        """Words that this lane stores, (of the even step, of the odd step): the first half of each, in an odd lane the
        second. halves: both halves of this lane's own step."""
        own, others = _chosen(is_odd, *halves)
        got = [cute.arch.shuffle_sync_bfly(word, 1) for word in others]
        return _chosen(is_odd, own, got)


def _chosen(swap: Boolean, a: list[Int32], b: list[Int32]) -> tuple[list[Int32], list[Int32]]:
    """(a, b), or (b, a) if ``swap``."""
    pairs = list(zip(a, b, strict=True))
    swapped = [(Int32(cutlass.select_(swap, y, x)), Int32(cutlass.select_(swap, x, y))) for x, y in pairs]
    return [first for first, _ in swapped], [second for _, second in swapped]
