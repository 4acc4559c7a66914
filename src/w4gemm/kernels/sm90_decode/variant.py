"""What follows from a compiled form of the decode kernel: sizes and threads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from w4gemm.config import GemmConfig
from w4gemm.kernels import gpu
from w4gemm.packing.block import HALF_BYTES
from w4gemm.problem import GemmProblem

_BARRIERS_AND_ALIGNMENT = 1536
_RESERVED = 1024  # shared memory that the system takes for each CTA
_PAD = 4  # floats between token rows of the reduction buffer, so that a warp's stores fall into different banks
_SLOTS = 2  # deeper rings measured slower: the first x then waits behind more weights (H200, 2026-11-21)


@dataclass(frozen=True)
class Variant(gpu.Variant):
    tokens: int = 0
    """Rows of x in a tile: tile_m, or all that x has where those are fewer. A box that reaches past x makes a launch 2
    to 6 % longer (H200, 2026-11-22); the matrix instruction then takes what lies there, and what comes of it is not
    stored. Of several weights the next one's rows follow."""

    @classmethod
    def of(cls, problem: GemmProblem, config: GemmConfig) -> Variant:
        tokens = config.tile_m if problem.experts else min(config.tile_m, problem.m)
        return replace(super().of(problem, config), tokens=tokens)

    @property
    def row_blocks(self) -> int:
        """16-row blocks of the weight tile; every warp works on all of them."""
        return self.config.tile_n // 16

    @property
    def parts(self) -> int:
        """Packed blocks of 64 rows in the weight tile, 1 for a tile of fewer rows."""
        return max(1, self.config.tile_n // 64)

    @property
    def token_blocks(self) -> int:
        return self.config.tile_m // 8

    @property
    def scale_bytes(self) -> int:
        """Scales and zero points of 64 rows and 128 columns."""
        return self.block_bytes - 2 * HALF_BYTES

    @property
    def weight_bytes(self) -> int:
        """A slot's part of the weights: tile_n rows of 128 columns."""
        return self.block_bytes * self.config.tile_n // 64

    @property
    def x_bytes(self) -> int:
        return self.config.tile_m * 256

    @property
    def fetched_x_bytes(self) -> int:
        """What TMA brings of them."""
        return 0 if self.gathered else self.tokens * 256

    @property
    def scales_in_registers(self) -> bool:
        """Whether a unit's scales are read together with its codes, so that the slot can be refilled before the unit is
        multiplied; with many groups there are no registers for that."""
        return self.scale_bytes <= 256

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 2 if config.schedule == "pingpong" else 1

    @property
    def slots(self) -> int:
        """Depth of each warp's ring."""
        return self.config.stages or _SLOTS

    @property
    def early_slots(self) -> int:
        """Slots of weights that a warp requests before x may be read. The first x queues up behind them, which costs
        more than an early start gains where x is large, or no other CTA streams meanwhile."""
        return 2 if self.config.tile_m == 8 and self.occupancy == 2 else 1

    @property
    def reduction_row(self) -> int:
        """Floats of one token's row in the reduction buffer."""
        return self.config.tile_n + _PAD

    @property
    def parked_bytes(self) -> int:
        """One warp's accumulators in the reduction buffer."""
        return self.config.tile_m * self.reduction_row * 4

    @functools.cached_property
    def _warps(self) -> tuple[int, int]:
        """(warps, parked warps): as many as shared memory holds, (0, 0) if it holds no four."""
        room = (gpu.HOPPER_SHARED_MEMORY + _RESERVED) // self.occupancy - _RESERVED - _BARRIERS_AND_ALIGNMENT
        room -= self.table_bytes
        ring = self.slots * (self.weight_bytes + self.x_bytes)
        # two CTAs of eight warps leave 128 registers a thread, too few for the x fragments of 16 tokens
        for warps in (4,) if self.occupancy == 2 and self.config.tile_m > 8 else (8, 4):
            for parked in (8, 4, 2, 1):
                if parked <= warps and warps * ring + parked * self.parked_bytes <= room:
                    return warps, parked
        return 0, 0

    @property
    def warps(self) -> int:
        """Warps of a CTA; each takes every ``warps``-th 128 columns of k. 0 if shared memory does not hold them."""
        return self._warps[0]

    @property
    def parked_warps(self) -> int:
        """Warps whose accumulators the reduction buffer holds at once; the others hand theirs to these first."""
        return self._warps[1]

    @property
    def folds(self) -> tuple[tuple[int, int], ...]:
        """(warps before, warps after) of each round of handing over."""
        found, active = [], self.warps
        while active > self.parked_warps:
            left = max(active - self.parked_warps, self.parked_warps)
            found.append((active, left))
            active = left
        return tuple(found)

    @property
    def reduction_bytes(self) -> int:
        return self.parked_warps * self.parked_bytes

    @property
    def accumulators(self) -> int:
        """Accumulator registers of a thread."""
        return 4 * self.row_blocks * self.token_blocks

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stages(self) -> int:
        return self.slots

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, alignment included."""
        rings = self.warps * self.slots * (self.weight_bytes + self.x_bytes)
        return rings + self.reduction_bytes + self.table_bytes + _BARRIERS_AND_ALIGNMENT
