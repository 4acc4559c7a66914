"""Sizes, and how the warps divide a tile: what follows from the compile-time parameters of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY, KSliceVariant, shared_memory_of_each

_E4M3 = ((8, 9), (12, 0), (12, 1))
"""Compute capabilities whose mma.sync takes e4m3. Others from 8.9 on have that instruction in PTX only."""

_ALIGNMENT = 128
_MAX_STAGES = 8


@dataclass(frozen=True)
class Sm80MixedVariant(KSliceVariant):
    shared_memory: int = HOPPER_SHARED_MEMORY
    """Bytes of shared memory that one CTA may use."""
    dependent_launch: bool = True
    """True if the device has programmatic dependent launch."""
    widened: bool = False
    """True if e4m3 numbers are multiplied as fp16, because the device has no matrix instruction for e4m3."""

    @classmethod
    def of(cls, problem: GemmProblem, config: GemmConfig) -> Any:
        device = problem.device
        pdl = device.capability >= (9, 0)
        v = super().of(problem, config)
        widened = v.kind == "e4m3" and device.capability not in _E4M3
        return replace(v, shared_memory=device.shared_memory, dependent_launch=pdl, widened=widened)

    # --- the warps of a CTA

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 1 if config.schedule == "coop" else 2

    @property
    def warps(self) -> int:
        """Warps of a CTA. With 255 registers per thread eight fill a multiprocessor."""
        return 8 // self.occupancy

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def m_warps(self) -> int:
        """Warps along the tokens: 64 tokens each, or fewer if there is one."""
        return -(-self.config.tile_m // 64)

    @property
    def k_sets(self) -> int:
        """Sets of warps that divide the k of a stage, at least a k chunk each. One under stream-k, where all threads of
        a CTA store or add partials."""
        return 1 if self.stream_k else min(self.config.tile_k // self.chunk_k, self.warps // self.m_warps)

    @property
    def n_warps(self) -> int:
        """Warps along the features."""
        return self.warps // (self.m_warps * self.k_sets)

    @property
    def m16_atoms_per_warp(self) -> int:
        """16-row atoms of the matrix instruction in a warp: 1, 2 or 4, all in one 64-row block (else not legal)."""
        return self.config.tile_n // self.n_warps // 16

    @property
    def token_blocks(self) -> int:
        """Blocks of eight tokens per warp."""
        return self.config.tile_m // self.m_warps // 8

    @property
    def k_chunks_per_warp(self) -> int:
        """k chunks, of ``chunk_k`` columns, of a stage that a warp multiplies."""
        return self.config.tile_k // self.chunk_k // self.k_sets

    @property
    def accumulators(self) -> int:
        """Accumulator registers per thread, without those of a group's sums if ``scales_on_sums``."""
        return 4 * self.m16_atoms_per_warp * self.token_blocks

    # --- shared memory

    @property
    def stage_bytes(self) -> int:
        """Bytes per stage."""
        return self.x_bytes + self.weight_bytes

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline: as many as shared memory holds, up to eight."""
        room = shared_memory_of_each(self.shared_memory, self.occupancy) - _ALIGNMENT
        room -= self.expert_map_bytes + self.decode_table_bytes
        return min(_MAX_STAGES, room // self.stage_bytes)

    @property
    def sums_row(self) -> int:
        """Floats of one token's row in the drained pipeline's memory: padded, so that a warp's stores fall into
        different banks."""
        return self.config.tile_n + 4

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums of all k sets."""
        return self.k_sets * self.config.tile_m * self.sums_row * 4

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA, alignment included."""
        return self.num_stages * self.stage_bytes + self.expert_map_bytes + self.decode_table_bytes + _ALIGNMENT
