"""What follows from a compiled form of the kernel: how the warps divide a tile, and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from w4gemm.config import GemmConfig
from w4gemm.kernels import gpu
from w4gemm.packing.block import BLOCK_K, Block
from w4gemm.problem import GemmProblem

_E4M3 = ((8, 9), (12, 0), (12, 1))
"""Compute capabilities whose mma.sync takes e4m3. Others from 8.9 on have it in PTX alone."""

_RESERVED = 1024  # shared memory that the system takes for each CTA
_ALIGNMENT = 128
_MAX_STAGES = 8


@dataclass(frozen=True)
class Variant(gpu.Variant):
    """``shared_memory``: bytes that one CTA of the device may use. ``dependent_launch``: whether the device has
    programmatic dependent launch. ``widened``: whether e4m3 are multiplied as fp16, since it has no instruction for
    them."""

    shared_memory: int = gpu.HOPPER_SHARED_MEMORY
    dependent_launch: bool = True
    widened: bool = False

    @classmethod
    def of(cls, problem: GemmProblem, config: GemmConfig) -> Any:
        device = problem.device
        pdl = device.capability >= (9, 0)
        v = super().of(problem, config)
        widened = v.kind == "e4m3" and device.capability not in _E4M3
        return replace(v, shared_memory=device.shared_memory, dependent_launch=pdl, widened=widened)

    # --- the warps of a CTA

    @property
    def stream(self) -> bool:
        """Whether CTAs share the k range of tiles, see device/stream_k.py."""
        return self.config.schedule == "stream"

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 1 if config.schedule == "coop" else 2

    @property
    def warps(self) -> int:
        """With 255 registers a thread, eight fill a multiprocessor."""
        return 8 // self.occupancy

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def m_warps(self) -> int:
        """Warps along the tokens; 64 each, or fewer in one."""
        return -(-self.config.tile_m // 64)

    @property
    def k_sets(self) -> int:
        """Sets of warps that share the k of a slot, at least a run of columns each. One in a stream, where those who
        add up parts of tiles are all threads of a CTA."""
        return 1 if self.stream else min(self.config.tile_k // self.chunk_k, self.warps // self.m_warps)

    @property
    def n_warps(self) -> int:
        return self.warps // (self.m_warps * self.k_sets)

    @property
    def units(self) -> int:
        """Row units, 16 rows of the weight, of a warp: 1, 2 or 4, all in one block of 64 rows. Others are not legal."""
        return self.config.tile_n // self.n_warps // 16

    @property
    def token_blocks(self) -> int:
        """Blocks of eight tokens of a warp."""
        return self.config.tile_m // self.m_warps // 8

    @property
    def chunks(self) -> int:
        """Runs of ``chunk_k`` columns of a slot that a warp multiplies."""
        return self.config.tile_k // self.chunk_k // self.k_sets

    @property
    def accumulators(self) -> int:
        """Accumulator registers of a thread, without the sums of a group that are ``promoted``."""
        return 4 * self.units * self.token_blocks

    # --- shared memory

    @property
    def row_blocks(self) -> int:
        """Packed blocks along the rows of a tile."""
        return self.config.tile_n // 64

    @property
    def blocks(self) -> int:
        """Packed blocks along k in a slot."""
        return max(1, self.config.tile_k // 128)

    @property
    def halves(self) -> bool:
        """Whether a slot holds half a block along k, with the scales that it needs."""
        return self.config.tile_k == 64

    @property
    def part(self) -> Block:
        """The part of a block that a slot holds: all of it or, with ``halves``, its codes and scales of 64 columns."""
        return self.block.part(columns=min(self.config.tile_k, BLOCK_K))

    @property
    def weight_bytes(self) -> int:
        return self.row_blocks * self.blocks * self.part.bytes

    @property
    def x_bytes(self) -> int:
        return self.config.tile_m * self.config.tile_k * self.itemsize

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.weight_bytes

    @property
    def stages(self) -> int:
        room = (self.shared_memory + _RESERVED) // self.occupancy - _RESERVED - _ALIGNMENT
        room -= self.table_bytes + self.decode_table_bytes
        return min(_MAX_STAGES, room // self.stage_bytes)

    @property
    def sums_row(self) -> int:
        """Floats of a token's row of sums in the drained pipeline's memory: padded, so that a warp's stores fall into
        different banks."""
        return self.config.tile_n + 4

    @property
    def sums_bytes(self) -> int:
        """The sums of all k sets."""
        return self.k_sets * self.config.tile_m * self.sums_row * 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, alignment included."""
        return self.stages * self.stage_bytes + self.table_bytes + self.decode_table_bytes + _ALIGNMENT
