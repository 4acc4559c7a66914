"""Sizes, warps and threads that follow from the compile-time parameters of the decode kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.variant import (
    HOPPER_SHARED_MEMORY,
    GpuVariant,
    adds_zeros_by_block,
    shared_memory_of_each,
)
from w4gemm.packing.block import BLOCK_N, STRIP_N, Block
from w4gemm.packing.codecs import Pairs

_BARRIERS_AND_ALIGNMENT = 1536
_PAD = 4  # floats between token rows of the reduction buffer, so that a warp's stores fall into different banks
_STAGES = 2
"""Stages of each warp. More were slower, because the first x copy queues behind all weight copies before it (H200,
2026-11-21)."""


class ReductionRound(NamedTuple):
    """A step of the reduction over warps: ``before`` warps hold accumulators, ``after`` warps do when it is done."""

    before: int
    after: int


class Warps(NamedTuple):
    """Warps of a CTA, and how many of them the reduction buffer has room for."""

    per_cta: int
    in_reduction: int


class BlocksOfTile(NamedTuple):
    """How many packed blocks a tile has rows of: it depends on the row that the tile begins at."""

    fewest: int
    most: int


@dataclass(frozen=True)
class Sm90DecodeVariant(GpuVariant):
    tokens: int = 0
    """Rows of x in a tile: tile_m, or m if that is less. A TMA box that reaches past m makes a launch 2 to 6 % longer
    (H200, 2026-11-22), so boxes have this many rows. The matrix instruction still takes tile_m rows: it multiplies
    whatever shared memory holds behind them, and those products are not stored. Always tile_m if grouped, where the
    next expert's rows follow."""
    few: int = 0
    """1, 2 or 4: at least as many as there are tokens, whose bits may differ from those of the same tokens among more.
    0 for more tokens, and if they may not."""

    @classmethod
    def of(cls, problem: GemmProblem, config: GemmConfig) -> Sm90DecodeVariant:
        tokens = config.tile_m if problem.experts else min(config.tile_m, problem.m)
        # two CTAs of eight warps leave 128 registers per thread, too few for the sums of four tokens
        sizes = (1, 2) if cls.ctas_per_sm(config) == 2 else (1, 2, 4)
        few = next((few for few in sizes if tokens <= few), 0)
        if config.tile_m > 8 or problem.batch_invariant:
            few = 0
        return replace(super().of(problem, config), tokens=tokens, few=few)

    @property
    def m16_atoms(self) -> int:
        """16-row atoms of the matrix instruction in the weight tile; every warp multiplies all of them."""
        return self.config.tile_n // STRIP_N

    @property
    def whole_blocks(self) -> bool:
        """True if the weight tile is whole packed blocks; else its rows, of one block or several, are packed in shared
        memory as a block of their own."""
        return self.config.tile_n % BLOCK_N == 0

    @property
    def blocks_of_tile(self) -> BlocksOfTile:
        """Packed blocks that the rows of a weight tile lie in, if the tile is not whole blocks."""
        rows = self.config.tile_n
        counts = {-(-(tile * rows % BLOCK_N + rows) // BLOCK_N) for tile in range(BLOCK_N // STRIP_N)}
        return BlocksOfTile(min(counts), max(counts))

    @property
    def batches(self) -> int:
        """Batches of rows of the weight tile, whose codes are in registers at once."""
        return -(-self.config.tile_n // self._batch_rows)

    @property
    def _batch_rows(self) -> int:
        """Rows of a batch: 64, whose codes are 32 words of a lane if they have four bits; 32 if they have more, or
        beside two blocks of tokens and scales that lanes may prepare for one another."""
        shares = self.weight.codec.shares_levels and self.token_blocks > 1
        full = shares and (self.block.bits == 4 or adds_zeros_by_block(self.block, self.m16_atoms))
        return BLOCK_N if self.block.bits <= 4 and not full else BLOCK_N // 2

    def strips_of(self, batch: int) -> range:
        """The 16-row strips of a batch."""
        strips = self._batch_rows // STRIP_N
        return range(batch * strips, min((batch + 1) * strips, self.m16_atoms))

    @property
    def token_blocks(self) -> int:
        """Blocks of eight tokens in a tile."""
        return self.config.tile_m // 8

    @property
    def stage_block(self) -> Block:
        """The packed block that a stage holds: one of 64 rows or several or, if the tile is not whole blocks, one of
        tile_n rows."""
        return self.block.sub_block(rows=BLOCK_N if self.whole_blocks else self.config.tile_n)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights per stage: tile_n rows x 128 columns."""
        return self.config.tile_n // self.stage_block.rows * self.stage_block.bytes

    @property
    def x_bytes(self) -> int:
        """Bytes of x per stage: tile_m rows x 128 columns."""
        return self.config.tile_m * 256

    @property
    def tma_x_bytes(self) -> int:
        """Bytes of x per stage that TMA copies, and the full barrier waits for."""
        return 0 if self.gathered else self.tokens * 256

    @property
    def scales_in_registers(self) -> bool:
        """True if a stage's scales are read together with its codes, so that the stage can be refilled before it is
        multiplied. More than 256 bytes per packed block (8 tokens with 8-bit scales: 512) take too many registers."""
        return self.block.scale_bytes <= (512 if self.config.tile_m == 8 and self.block.scale_bits == 8 else 256)

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 2 if config.schedule == "pingpong" else 1

    @property
    def num_stages(self) -> int:
        """Stages of each warp's pipeline."""
        return _STAGES

    @property
    def pairs(self) -> Pairs | None:
        """The table of numbers without scales, because scales multiply sums."""
        return self.weight.codec.pairs(self.weight, on_sums=True)

    @property
    def early_stages(self) -> int:
        """Stages whose weights a warp requests before x may be read. The first x copy queues up behind them. That costs
        more than an early start gains if tile_m is 16, or if no other CTA of the SM streams meanwhile."""
        return 2 if self.config.tile_m == 8 and self.occupancy == 2 else 1

    @property
    def reduction_row(self) -> int:
        """Floats of one token's row in the reduction buffer."""
        return self.config.tile_n + _PAD

    @property
    def partials_bytes(self) -> int:
        """Bytes of one warp's partial sums in the reduction buffer."""
        return self.config.tile_m * self.reduction_row * 4

    @functools.cached_property
    def _warps(self) -> Warps:
        """The largest number of warps whose pipelines fit shared memory; none if fewer than four fit."""
        room = shared_memory_of_each(HOPPER_SHARED_MEMORY, self.occupancy) - _BARRIERS_AND_ALIGNMENT
        room -= self.expert_map_bytes + self.decode_table_bytes
        pipeline = self.num_stages * (self.weight_bytes + self.x_bytes)
        # two CTAs of eight warps leave 128 registers per thread, too few for the x fragments of 16 tokens
        for count in (4,) if self.occupancy == 2 and self.config.tile_m > 8 else (8, 4):
            for in_reduction in (8, 4, 2, 1):
                if in_reduction <= count and count * pipeline + in_reduction * self.partials_bytes <= room:
                    return Warps(count, in_reduction)
        return Warps(0, 0)

    @property
    def warps(self) -> int:
        """Warps of a CTA; each takes every ``warps``-th 128 columns of k. 0 if shared memory has no room for four."""
        return self._warps.per_cta

    @property
    def reduction_warps(self) -> int:
        """Warps whose partial sums the reduction buffer holds at once; the others hand theirs to these first."""
        return self._warps.in_reduction

    @property
    def warp_reduction_rounds(self) -> tuple[ReductionRound, ...]:
        """Rounds in which warps hand their accumulators over, until ``reduction_warps`` are left."""
        rounds, before = [], self.warps
        while before > self.reduction_warps:
            after = max(before - self.reduction_warps, self.reduction_warps)
            rounds.append(ReductionRound(before, after))
            before = after
        return tuple(rounds)

    @property
    def reduction_bytes(self) -> int:
        """Bytes of the reduction buffer."""
        return self.reduction_warps * self.partials_bytes

    @property
    def few_registers(self) -> bool:
        """True if a thread has 128 registers at most, because a multiprocessor has two CTAs of eight warps."""
        return self.occupancy * self.warps > 8

    @property
    def levels_stride(self) -> int:
        """Bytes of the reduction buffer from one warp's part to the next. A part is the warp's own until warps hand
        sums over."""
        return self.reduction_bytes // self.warps // 16 * 16 if self.warps else 0

    @property
    def shares_levels(self) -> bool:
        """True if lanes may prepare scales of two levels for one another: a warp's part of the reduction buffer has
        room for those of a batch of rows, and a thread's registers, of which two CTAs of eight warps leave 128, for
        those that it multiplies. Zero points are then multiplied by block."""
        weight, block, strips = self.weight, self.block, self.m16_atoms
        if not weight.codec.shares_levels or block.groups not in (4, 8):
            return False
        if weight.zero != "none" and not (block.has_zero and adds_zeros_by_block(block, strips)):
            return False
        rows = min(self.config.tile_n, self._batch_rows)
        in_registers = not self.few_registers or strips * block.groups <= 8
        return in_registers and 4 * rows * block.groups <= self.levels_stride

    @property
    def accumulators(self) -> int:
        """Accumulator registers per thread."""
        return 4 * self.m16_atoms * self.token_blocks

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA, alignment included."""
        pipelines = self.warps * self.num_stages * (self.weight_bytes + self.x_bytes)
        tables = self.expert_map_bytes + self.decode_table_bytes
        return pipelines + self.reduction_bytes + tables + _BARRIERS_AND_ALIGNMENT
