"""What follows from a compiled form of the kernel: sizes, threads, registers."""

from __future__ import annotations

from dataclasses import dataclass

from w4gemm.kernels import sm90
from w4gemm.kernels.device.staging import staging_bytes

_BARRIERS_AND_ALIGNMENT = 1536
_RESERVED = 1024  # shared memory that the system takes for each CTA


@dataclass(frozen=True)
class Variant(sm90.Variant):
    @property
    def row_groups(self) -> int:
        """Consumer warpgroups along the rows of the weight tile, 64 each."""
        return self.config.tile_n // 64

    @property
    def k_sets(self) -> int:
        """Sets of consumer warpgroups that share the k blocks of a slot: as many as there are registers for, since with
        few tokens one set alone does not keep the tensor cores busy while it decodes."""
        limit = 4 if self.occupancy == 1 else 2
        return min(self.blocks, limit // self.row_groups) if self.config.tile_m <= 64 else 1

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.row_groups * self.k_sets

    @property
    def occupancy(self) -> int:
        """CTAs on one multiprocessor."""
        return 2 if self.config.schedule == "pingpong" else 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def blocks(self) -> int:
        """Weight blocks along k in one stage."""
        return self.config.tile_k // 128

    @property
    def weight_bytes(self) -> int:
        return self.row_groups * self.blocks * self.block_bytes

    @property
    def x_bytes(self) -> int:
        return self.config.tile_m * self.config.tile_k * 2

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.x_bytes

    @property
    def staging_bytes(self) -> int:
        """The epilogue's staging buffer of one warpgroup."""
        return staging_bytes(self.config.tile_m)

    @property
    def fold_bytes(self) -> int:
        """Accumulators that all k sets but the first hand to it."""
        return (self.k_sets - 1) * self.config.tile_m * self.config.tile_n * 4

    @property
    def reduction_bytes(self) -> int:
        """Accumulators that a split-k CTA parks for its cluster; they lie over the drained pipeline."""
        return self.config.tile_m * self.config.tile_n * 4 if self.config.split_k > 1 else 0

    @property
    def stages(self) -> int:
        room = (sm90.SHARED_MEMORY + _RESERVED) // self.occupancy - _RESERVED - _BARRIERS_AND_ALIGNMENT
        room -= self.row_groups * self.staging_bytes + self.fold_bytes
        fit = min(8, room // self.stage_bytes)
        return min(self.config.stages, fit) if self.config.stages else fit

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer thread asks for, 0 where the launch's own share is enough."""
        if self.occupancy == 2:
            return {1: 0, 2: 104}[self.warpgroups]
        return {1: 0, 2: 240, 4: 112}[self.warpgroups]
