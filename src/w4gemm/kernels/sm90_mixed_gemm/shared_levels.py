"""Scales of two levels that the lanes of a warp prepare for one another: :class:`SharedLevels`.

A scale takes about as many instructions as four weights, and a lane has but four weights of a row's group of 16. All
lanes of a quad have the same rows. So each prepares the scales of one row and half of the groups of a packed block, and
all of them go through shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from w4gemm.kernels.sm90_mixed_gemm.variant import GROUP_LEVEL_BYTES, LEVEL_BYTES, Sm90MixedVariant
from w4gemm.ptx.arithmetic import kept
from w4gemm.ptx.memory import load_shared_byte, load_shared_f32x4, load_shared_half, store_shared_f32x2


class LevelLane(NamedTuple):
    """What a lane prepares: scales of row g in even lanes, g + 8 in odd ones. Lanes 0 and 1 of a quad have the groups
    of even runs, lanes 2 and 3 those of odd ones; of a single run each pair of lanes has one of the two groups."""

    units: Any
    """The decoder's ``LevelUnits`` of its row."""
    levels: Int32
    """Bytes from the first scale of a packed block to its own."""
    factors: Int32
    """Bytes from the first factor to its own."""
    target: Int32
    """Address of what it prepares."""
    prepared: Int32
    """Address of what its quad prepares."""
    held: cute.Tensor | None
    """The row's factors, if several packed blocks in succession share them."""


class SharedLevels:
    """Prepares and loads scales, for one variant. decoder: its ``TwoLevelDecoder``."""

    def __init__(self, variant: Sm90MixedVariant, decoder: Any):
        self.variant, self.block, self.decoder = variant, variant.stage_block, decoder

    def lane(self, held: Int32, levels: Int32) -> LevelLane:
        """Return what a thread needs, kept in registers. held: the decoder's ``held_word``. levels: address of the
        prepared scales of all warps."""
        block, variant, thread = self.block, self.variant, cute.arch.thread_idx()[0]
        pair, row, half = thread % 128 // 4, thread % 2, thread // 2 % 2
        of_warpgroup = variant.staging_bytes if variant.levels_in_staging else 4 * variant.levels_bytes
        of_warp = levels + thread // 128 * of_warpgroup + thread // 32 % 4 * variant.levels_bytes
        prepared = of_warp + pair % 8 * LEVEL_BYTES
        own, group = (half, half) if block.runs == 1 else (half * block.run_bytes, 2 * half)
        return LevelLane(
            self.decoder.level_units(held, row == 1),
            kept(pair * block.pair_bytes + 2 * row + own),
            kept(pair * block.factor_pair_bytes + 2 * row),
            kept(prepared + group * GROUP_LEVEL_BYTES + row * (LEVEL_BYTES // 2)),
            kept(prepared),
            cute.make_rmem_tensor((block.factors,), Int32) if variant.by_superblock else None,
        )

    def store(self, lane: LevelLane, address: Int32, begins: bool) -> None:
        """Prepare a lane's scales of the packed block at ``address``. The lane has decoded the block before it. When
        this returns, the scales of that block are overwritten, and those of this one are visible to the warp.
        begins: False if its factors are those of the block before."""
        block, load = self.block, load_shared_byte if self.block.runs == 1 else load_shared_half
        first, own = address + block.code_bytes + lane.levels, address + block.factors_at + lane.factors
        factors = self.factors(lane, own, begins)
        rows = []
        for run in range(0, block.runs, 2):
            levels = tuple(load(first + run * block.run_bytes + 4 * i) for i in range(block.words_per_scale))
            for field in range(min(2, block.runs)):
                rows.append((2 * run + field, self.decoder.prepare_row(levels, factors, lane.units, field)))
        cute.arch.sync_warp()  # the other lanes have decoded the block before too
        for group, row in rows:
            store_shared_f32x2(lane.target + group * GROUP_LEVEL_BYTES, row)
        cute.arch.sync_warp()

    def factors(self, lane: LevelLane, address: Int32, begins: bool) -> tuple[Int32, ...]:
        """The factors of a lane's row, in shared memory at ``address``; those held, unless they begin there."""
        count = self.block.factors
        if begins:
            loaded = tuple(load_shared_half(address + 4 * i) for i in range(count))
            if lane.held is None:
                return loaded
            for i, factor in enumerate(loaded):
                lane.held[i] = factor
        return tuple(lane.held[i] for i in range(count))

    def load(self, lane: LevelLane, group: int) -> tuple[Any, Any]:
        """Load factor and addend of row g and of row g + 8, of a group of the packed block."""
        values = load_shared_f32x4(lane.prepared + group * GROUP_LEVEL_BYTES)
        return values[:2], values[2:]
