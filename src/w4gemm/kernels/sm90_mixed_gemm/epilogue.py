"""From float32 accumulators of w @ x.T to rows of d in global memory.

The accumulators of an m64nNk16 WGMMA hold the transpose of d: thread (warp w, g, q) has, for each block of eight
tokens, tokens 2q and 2q + 1 of features 16 w + g (values 0, 1) and 16 w + g + 8 (values 2, 3). There are two ways:

    packed16         if d is 16-bit and an element depends on its own sum and bias only: sums are rounded,
                     ``stmatrix.trans`` turns the accumulators of four warps into rows of 64 features, and every thread
                     stores 16 contiguous bytes of them. If a tile has many tokens and rows are aligned, TMA stores
                     boxes instead
    float32 staging  otherwise: each warp turns a block of eight tokens as float32 into rows of its 16 features, and a
                     thread gets a quad, four features of a token, so gates and ups together; residuals are loaded while
                     d is stored
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from w4gemm.core.epilogue import EpilogueOperands
from w4gemm.kernels.device.epilogue_math import EpilogueMath, QuadOperands, scaled
from w4gemm.kernels.sm90_mixed_gemm.variant import FLOAT32_ROW_BYTES, TOKEN_BYTES
from w4gemm.ptx.arithmetic import pack_half2, to_float
from w4gemm.ptx.memory import fence_proxy_async, load_shared, store_matrix_transposed, store_shared_f32


class OutputCoord(NamedTuple):
    """The 64 features of a tile that a warpgroup stores, and a thread of it."""

    token: Int32
    """First token."""
    feature: Int32
    """First feature."""
    thread: Int32
    """0 .. 127."""


class FeatureOperands(NamedTuple):
    """Operands of a thread's features."""

    biases: list[Int32 | None]
    channel_scales: list[Float32 | None]


class LoadedOperands(NamedTuple):
    """Operands of a tile that are loaded before its last sums are there."""

    alpha: Float32 | None
    features: FeatureOperands
    token_scales: list[Float32]
    """Scales of a warp's tokens: lane i has those of tokens i, 32 + i, ...; empty without."""


class TmaStore(NamedTuple):
    """TMA that stores boxes of d from the staging buffers."""

    atom: cute.CopyAtom
    d: cute.Tensor
    """d as TMA sees it."""
    halves: cute.Tensor
    """The halves of all staging buffers, a box each."""


class Staging(NamedTuple):
    """The staging buffer of a warpgroup."""

    address: Int32
    barrier: Int32
    """Named barrier of the warpgroup's 128 threads."""
    store: TmaStore | None
    """None if threads store."""
    half: Int32
    """Number of the buffer's first half in ``store.halves``."""


@dataclass(frozen=True)
class EpilogueStore:
    """Stores one warpgroup's accumulators: 64 features of ``tokens`` tokens.

    Args:
        math: the arithmetic.
        float32_staging: True for the second way.
        tokens: of the accumulators, a multiple of eight.
        tokens_per_round: of a round through the staging buffer; the last one may have fewer, unless ``boxed``. A
            packed16 round fills the buffer, or half of it if ``boxed``, while TMA stores the other half. A round of
            float32 staging is eight tokens.
        residuals_ahead: rounds of float32 staging by which residual loads run ahead.
        boxed: True if TMA stores boxes of d.
        grouped: True if rows past a tile's last token belong to another expert; threads then store what a box would
            overwrite.
    """

    math: EpilogueMath
    float32_staging: bool
    tokens: int
    tokens_per_round: int
    residuals_ahead: int
    boxed: bool
    grouped: bool

    def load(self, operands: EpilogueOperands, coord: OutputCoord, rows: Int32) -> LoadedOperands:
        """Load the operands of a tile; call it before the last sums are there. rows: end of the tokens."""
        alpha = self.math.load_alpha(operands)
        token_scales = self.load_token_scales(operands, coord.token, coord.thread % 32, rows)
        return LoadedOperands(alpha, self.load_features(operands, coord), token_scales)

    def load_features(self, operands: EpilogueOperands, coord: OutputCoord) -> FeatureOperands:
        """Load biases and channel scales of the thread's features."""
        lane, first = coord.thread % 32, coord.feature + coord.thread // 32 * 16
        if self.float32_staging:
            features = [first + lane % 4 * 4 + i for i in range(4)]
        else:
            features = [first + lane // 4 + 8 * half for half in range(2)]
        biases = [self.math.load_bias(operands, feature) for feature in features]
        return FeatureOperands(biases, [self.math.load_channel_scale(operands, feature) for feature in features])

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        out: cute.Tensor,
        operands: EpilogueOperands,
        coord: OutputCoord,
        loaded: LoadedOperands,
        staging: Staging,
    ):
        """Store d for ``acc``, the flat float32 accumulators."""
        if const_expr(self.float32_staging):
            self.store_float32(acc, out, operands, coord, loaded, staging.address)
        elif const_expr(self.boxed):
            self.store_boxes(acc, out, coord, loaded, staging)
        else:
            self.store_packed16(acc, out, coord, loaded, staging)

    @cute.jit
    def store_packed16(
        self, acc: cute.Tensor, out: cute.Tensor, coord: OutputCoord, loaded: LoadedOperands, staging: Staging
    ):
        for first in cutlass.range_constexpr(0, self.tokens, self.tokens_per_round):
            cute.arch.barrier(barrier_id=staging.barrier, number_of_threads=128)  # the buffer is read out
            count = min(self.tokens_per_round, self.tokens - first)
            self.stage(acc, first, count, coord.thread, loaded, staging.address)
            cute.arch.barrier(barrier_id=staging.barrier, number_of_threads=128)  # the buffer is filled
            store_staged(self.math, out, first, count, coord, staging.address)

    @cute.jit
    def store_boxes(
        self, acc: cute.Tensor, out: cute.Tensor, coord: OutputCoord, loaded: LoadedOperands, staging: Staging
    ):
        """Every tile begins with the same half of the buffer, because a tile has an even number of boxes."""
        boxes, tokens = boxes_of_tile(staging.store, coord, self.tokens_per_round), self.tokens_per_round
        for box in cutlass.range_constexpr(self.tokens // tokens):
            first, half = box * tokens, box % 2
            address = staging.address + half * (tokens * TOKEN_BYTES)
            self.stage(acc, first, tokens, coord.thread, loaded, address)
            part = staging._replace(address=address, half=staging.half + half)
            place = coord._replace(token=coord.token + first)
            store_box(self.math, out, boxes, (box, 0), tokens, self.grouped, place, part)

    def drain(self) -> None:
        """Wait until TMA has read all that this thread asked it to store: a CTA's memory ends with it."""
        if self.boxed:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def stage(
        self, acc: cute.Tensor, first: int, tokens: int, thread: Int32, loaded: LoadedOperands, staging: Int32
    ) -> None:
        """Write ``tokens`` tokens from ``first`` on into the staging buffer."""
        lane, (biases, channel_scales) = thread % 32, loaded.features
        vector = (thread // 32 * 2 + lane // 8 % 2) ^ (lane % 8)
        for row in range(0, tokens, 16):
            count = min(16, tokens - row) // 2
            sums = [acc[(first + row) // 2 + i] for i in range(count)]
            places = [(first + row + 8 * (i // 2), lane % 4 * 2 + i % 2) for i in range(count // 2)]
            scales = [token_scale(loaded.token_scales, *place) for place in places]
            sums = [scaled(sums[i], scales[i // 4 * 2 + i % 2], channel_scales[i // 2 % 2]) for i in range(count)]
            values = [self.math.feature_value(sums[i], loaded.alpha, biases[i // 2 % 2]) for i in range(count)]
            registers = [pack_half2(self.math.out_kind, values[i], values[i + 1]) for i in range(0, count, 2)]
            token = row + lane % 8 + (lane // 16 * 8 if count == 8 else 0)
            store_matrix_transposed(staging + token * TOKEN_BYTES + vector * 16, registers)

    def store_float32(
        self,
        acc: cute.Tensor,
        out: cute.Tensor,
        operands: EpilogueOperands,
        coord: OutputCoord,
        loaded: LoadedOperands,
        staging: Int32,
    ) -> None:
        math, blocks, ahead = self.math, self.tokens // 8, self.residuals_ahead
        lane, warp = coord.thread % 32, coord.thread // 32
        own = staging + warp * (8 * FLOAT32_ROW_BYTES)
        write = own + lane % 4 * 2 * FLOAT32_ROW_BYTES + lane // 4 * 4
        token, feature = coord.token + lane // 4, coord.feature + warp * 16 + lane % 4 * 4
        biases, channel_scales = loaded.features
        # always before d is stored over them
        residuals = [math.load_residual(operands, token + 8 * b, feature) for b in range(min(ahead, blocks))]
        for b in range(blocks):
            if b + ahead < blocks:
                residuals.append(math.load_residual(operands, token + 8 * (b + ahead), feature))
            cute.arch.sync_warp()  # the buffer is read out
            for i in range(4):
                store_shared_f32(write + i % 2 * FLOAT32_ROW_BYTES + i // 2 * 32, acc[4 * b + i])
            cute.arch.sync_warp()  # the buffer is filled
            words = load_shared(own + lane // 4 * FLOAT32_ROW_BYTES + lane % 4 * 16, 4)
            scale = token_scale(loaded.token_scales, 8 * b, lane // 4)
            sums = [scaled(to_float("f32", word), scale, channel_scales[i]) for i, word in enumerate(words)]
            math.store_quad(sums, QuadOperands(loaded.alpha, biases, residuals[b]), out, token + 8 * b, feature)

    def load_token_scales(
        self, operands: EpilogueOperands, token: Int32, lane: Int32, rows: Int32
    ) -> list[Float32 | None]:
        """Load the scales of a warp's tokens, all at once; see :class:`LoadedOperands`."""
        if not self.math.epilogue.token_scale:
            return []
        firsts = range(0, self.tokens, 32)
        return [self.math.load_token_scale(operands, token + first + lane, rows) for first in firsts]

    def prefetch(self, operands: EpilogueOperands, coord: OutputCoord, features: bool, residuals: bool) -> None:
        """Bring operands of a tile into L2: biases and channel scales if ``features``, residuals if ``residuals``."""
        if features:
            self.math.prefetch_features(operands, coord.feature, 64, coord.thread)
        if residuals:
            for first in range(0, self.tokens, 128):
                token = coord.token + first + coord.thread % min(128, self.tokens)
                self.math.prefetch_residual(operands, token, coord.feature, 64)


class TileBoxes(NamedTuple):
    """TMA's view of the boxes of a tile of d."""

    atom: cute.CopyAtom
    source: cute.Tensor
    """In shared memory, by half of a staging buffer."""
    target: cute.Tensor
    """In global memory, by number along the tokens and along the features."""


def boxes_of_tile(store: TmaStore, coord: OutputCoord, tokens: int) -> TileBoxes:
    """The boxes of ``tokens`` tokens and 64 features from ``coord`` on."""
    d = cute.local_tile(cute.domain_offset((coord.token, coord.feature), store.d), (tokens, 64), (None, None))
    group, alone = cute.group_modes, cute.make_layout(1)
    source, target = cpasync.tma_partition(store.atom, 0, alone, group(store.halves, 0, 2), group(d, 0, 2))
    return TileBoxes(store.atom, source, target)


@cute.jit
def store_box(
    math: EpilogueMath,
    out: cute.Tensor,
    boxes: TileBoxes,
    place: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    grouped: cutlass.Constexpr,
    coord: OutputCoord,
    staging: Staging,
):
    """Store a box that a warpgroup has written into half of its staging buffer. One barrier: behind it this box is
    filled, and TMA has read the previous one, in the other half. place: of the box in its tile. coord: its first token
    and feature. staging: with address and number of the half."""
    warp = cute.arch.make_warp_uniform(coord.thread // 32)
    fence_proxy_async()
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=staging.barrier, number_of_threads=128)
    needed = tokens if grouped else 1
    if coord.token + needed <= out.shape[0]:
        if warp == 0:
            cute.copy(boxes.atom, boxes.source[(None, staging.half)], boxes.target[(None, *place)])
            cute.arch.cp_async_bulk_commit_group()
    elif const_expr(grouped):
        store_staged(math, out, 0, tokens, coord, staging.address)


@cute.jit
def store_staged(
    math: EpilogueMath, out: cute.Tensor, first: int, tokens: cutlass.Constexpr, coord: OutputCoord, staging: Int32
):
    """Store ``tokens`` tokens of 64 features from a staging buffer, as far as their rows and columns exist. first: the
    first one, from the tile's on."""
    for index in cutlass.range_constexpr(0, tokens * 8, 128):
        row, vector = (index + coord.thread) // 8, coord.thread % 8
        if row < tokens:
            words = load_shared(staging + row * TOKEN_BYTES + (vector ^ (row % 8)) * 16, 4)
            math.store(words, out, coord.token + first + row, coord.feature + vector * 8)


def token_scale(scales: list[Float32], block: int, token: Int32) -> Float32 | None:
    """The scale of a token of the block of eight that begins at token ``block``."""
    return cute.arch.shuffle_sync(scales[block // 32], block % 32 + token) if scales else None
