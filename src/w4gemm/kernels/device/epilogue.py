"""From float32 accumulators of w @ x.T to rows of d in global memory.

The accumulators of an m64nNk16 WGMMA hold the transpose of what is stored: thread (warp w, g, q) has, for each block of
eight tokens, tokens 2q and 2q + 1 of features 16 w + g (values 0, 1) and 16 w + g + 8 (values 2, 3). Two ways from
there:

    halves  d is 16-bit and an element needs nothing but its own sum and bias: rounded, ``stmatrix.trans`` turns the
            accumulators of four warps into rows of 64 features, from which every thread stores 16 contiguous bytes;
            or, of tiles with many tokens, whose rows are aligned, TMA stores boxes of them
    quads   otherwise: each warp turns a block of eight tokens as float32 into rows of its 16 features, and a thread
            gets four features of a token, gates and ups together; residuals are loaded as d is stored
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from w4gemm.kernels.device.formula import Formula, scaled
from w4gemm.kernels.device.ptx import (
    fence_proxy_async,
    load_shared,
    pack_half2,
    store_matrix_transposed,
    store_shared_f32,
    to_float,
)
from w4gemm.kernels.device.staging import QUAD_ROW_BYTES, TOKEN_BYTES


@dataclass(frozen=True)
class Epilogue:
    """Stores one warpgroup's accumulators: 64 features of ``tokens`` tokens.

    ``chunk`` tokens, a part of ``tokens``, fit the staging buffer at a time as halves, or half of it if TMA stores them
    (``boxed``). As quads, a block of eight does, and the residuals of ``ahead`` blocks are on their way. ``cut`` says
    whether rows past a tile's last token are those of another expert, where TMA would overwrite them.
    """

    formula: Formula
    quads: bool
    tokens: int
    chunk: int
    ahead: int
    boxed: bool
    cut: bool

    def load(self, extras: Any, place: Any, tokens: Any) -> Any:
        """What the sums of a tile meet: alpha, biases and scales of the thread's features, scales of the warp's tokens.
        Asked for before the last sums are there. extras: see Formula. place: (first token, first feature, thread of the
        warpgroup 0..127). tokens: how many there are."""
        lane = place[2] % 32
        alpha, scales = self.formula.load_alpha(extras), self.load_token_scales(extras, place[0], lane, tokens)
        return alpha, *self.load_features(extras, place), scales

    def load_features(self, extras: Any, place: Any) -> tuple[list[Any], list[Any]]:
        """(biases, scales) of the thread's features alone, as in ``load``."""
        formula, (_, feature0, thread) = self.formula, place
        lane, first = thread % 32, feature0 + thread // 32 * 16
        if self.quads:
            features = [first + lane % 4 * 4 + i for i in range(4)]
        else:
            features = [first + lane // 4 + 8 * half for half in range(2)]
        biases = [formula.load_bias(extras, feature) for feature in features]
        return biases, [formula.load_channel(extras, feature) for feature in features]

    @cute.jit
    def store(self, acc: cute.Tensor, out: cute.Tensor, extras: Any, place: Any, loaded: Any, memory: Any):
        """acc: flat float32 accumulators. extras, place, loaded: see ``load``. memory: this warpgroup's staging buffer,
        a named barrier of its own and, if boxed, (TMA, d as it sees it, the halves of all buffers, the first that is
        this warpgroup's)."""
        staging, barrier, boxes = memory
        if const_expr(self.quads):
            self.store_quads(acc, out, extras, place, loaded, staging)
        elif const_expr(self.boxed):
            self.store_boxes(acc, out, place, loaded, staging, barrier, boxes)
        else:
            self.store_halves(acc, out, place, loaded, staging, barrier)

    @cute.jit
    def store_halves(self, acc: cute.Tensor, out: cute.Tensor, place: Any, loaded: Any, staging: Int32, barrier: Int32):
        for first in cutlass.range_constexpr(0, self.tokens, self.chunk):
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # the buffer is read out
            self.stage(acc, first, place[2], loaded, staging)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)  # the buffer is filled
            self.store_staged(out, first, place, staging)

    @cute.jit
    def store_boxes(
        self, acc: cute.Tensor, out: cute.Tensor, place: Any, loaded: Any, staging: Int32, barrier: Int32, boxes: Any
    ):
        """One barrier a box: when it is filled, the one before, of the other half of the buffer, has been read out. The
        next tile begins where this one does, since a tile has an even number of boxes."""
        tma, d, halves, half0 = boxes
        token0, feature0, thread = place
        warp = cute.arch.make_warp_uniform(thread // 32)
        d = cute.local_tile(cute.domain_offset((token0, feature0), d), (self.chunk, 64), (None, None))
        group, alone = cute.group_modes, cute.make_layout(1)
        source, target = cpasync.tma_partition(tma, 0, alone, group(halves, 0, 2), group(d, 0, 2))
        for first in cutlass.range_constexpr(0, self.tokens, self.chunk):
            box = first // self.chunk
            half = staging + box % 2 * (self.chunk * TOKEN_BYTES)
            self.stage(acc, first, thread, loaded, half)
            fence_proxy_async()
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
            needed = self.chunk if self.cut else 1
            if token0 + first + needed <= out.shape[0]:
                if warp == 0:
                    cute.copy(tma, source[(None, half0 + box % 2)], target[(None, box, 0)])
                    cute.arch.cp_async_bulk_commit_group()
            elif const_expr(self.cut):
                self.store_staged(out, first, place, half)

    def drain(self) -> None:
        """Before a CTA ends, and its memory with it: until TMA has read all that this thread asked it to store."""
        if self.boxed:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def stage(self, acc: cute.Tensor, first: int, thread: Int32, loaded: Any, staging: Int32) -> None:
        """``chunk`` tokens from ``first`` on into the staging buffer."""
        formula, lane = self.formula, thread % 32
        alpha, biases, channels, token_scales = loaded
        part = (thread // 32 * 2 + lane // 8 % 2) ^ (lane % 8)
        for row in range(0, self.chunk, 16):
            count = min(16, self.chunk - row) // 2
            sums = [acc[(first + row) // 2 + i] for i in range(count)]
            tokens = [(first + row + 8 * (i // 2), lane % 4 * 2 + i % 2) for i in range(count // 2)]
            scales = [token_scale(token_scales, *token) for token in tokens]
            sums = [scaled(sums[i], scales[i // 4 * 2 + i % 2], channels[i // 2 % 2]) for i in range(count)]
            values = [formula.feature_value(sums[i], alpha, biases[i // 2 % 2]) for i in range(count)]
            registers = [pack_half2(formula.out_kind, values[i], values[i + 1]) for i in range(0, count, 2)]
            token = row + lane % 8 + (lane // 16 * 8 if count == 8 else 0)
            store_matrix_transposed(staging + token * TOKEN_BYTES + part * 16, registers)

    @cute.jit
    def store_staged(self, out: cute.Tensor, first: int, place: Any, staging: Int32):
        """What ``stage`` left there, as far as it exists."""
        token0, feature0, thread = place
        for index in cutlass.range_constexpr(0, self.chunk * 8, 128):
            row, part = (index + thread) // 8, thread % 8
            if row < self.chunk:
                words = load_shared(staging + row * TOKEN_BYTES + (part ^ (row % 8)) * 16, 4)
                self.formula.store(words, out, token0 + first + row, feature0 + part * 8)

    def store_quads(
        self, acc: cute.Tensor, out: cute.Tensor, extras: Any, place: Any, loaded: Any, staging: Int32
    ) -> None:
        formula, blocks = self.formula, self.tokens // 8
        token0, feature0, thread = place
        lane, warp = thread % 32, thread // 32
        own = staging + warp * (8 * QUAD_ROW_BYTES)
        write = own + lane % 4 * 2 * QUAD_ROW_BYTES + lane // 4 * 4
        token, feature = token0 + lane // 4, feature0 + warp * 16 + lane % 4 * 4
        alpha, biases, channels, token_scales = loaded
        # always before d is stored over them
        residuals = [formula.load_residual(extras, token + 8 * b, feature) for b in range(min(self.ahead, blocks))]
        for b in range(blocks):
            if b + self.ahead < blocks:
                residuals.append(formula.load_residual(extras, token + 8 * (b + self.ahead), feature))
            cute.arch.sync_warp()  # the buffer is read out
            for i in range(4):
                store_shared_f32(write + i % 2 * QUAD_ROW_BYTES + i // 2 * 32, acc[4 * b + i])
            cute.arch.sync_warp()  # the buffer is filled
            words = load_shared(own + lane // 4 * QUAD_ROW_BYTES + lane % 4 * 16, 4)
            scale = token_scale(token_scales, 8 * b, lane // 4)
            sums = [scaled(to_float("f32", word), scale, channels[i]) for i, word in enumerate(words)]
            formula.store_quad(sums, (alpha, biases, residuals[b]), out, token + 8 * b, feature)

    def load_token_scales(self, extras: Any, token0: Int32, lane: Int32, rows: Any) -> list[Float32]:
        """A warp's, all requested at once: lane i has those of tokens i, 32 + i, ... None of them without."""
        if not self.formula.epilogue.token_scale:
            return []
        return [
            self.formula.load_token_scale(extras, token0 + first + lane, rows) for first in range(0, self.tokens, 32)
        ]

    def prefetch(self, extras: Any, place: Any, features: bool, residuals: bool) -> None:
        """Bring what a tile's sums meet into L2: biases and scales of ``features``, ``residuals``."""
        token0, feature0, thread = place
        if features:
            self.formula.prefetch_features(extras, feature0, 64, thread)
        if residuals:
            for first in range(0, self.tokens, 128):
                token = token0 + first + thread % min(128, self.tokens)
                self.formula.prefetch_residual(extras, token, feature0, 64)


def token_scale(scales: list[Float32], block: int, token: Int32) -> Float32 | None:
    """That of a token of the block of eight which begins at ``block``."""
    return cute.arch.shuffle_sync(scales[block // 32], block % 32 + token) if scales else None
