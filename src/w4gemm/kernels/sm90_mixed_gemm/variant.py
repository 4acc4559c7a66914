"""One compiled form of the kernel: :class:`Variant`, what the device code is specialized for and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from w4gemm.config import GemmConfig
from w4gemm.kernels.device.staging import staging_bytes

SHARED_MEMORY = 232448
"""Bytes that one CTA may use on SM90."""
_BARRIERS_AND_ALIGNMENT = 1536


@dataclass(frozen=True)
class Variant:
    """Compile-time facts. Equal variants share one compiled object; nothing here depends on m, n or k.

    Args:
        config: tile, cluster, schedule, split_k, stages (0 = as many as fit, at most 8).
        kind: "f16" or "bf16", the dtype of x and d.
        scale_kind: dtype of the scales.
        zero: "none", "int" or "float".
        scale_group: elements of k that share a scale in the packed layout: 32, 64 or 128.
        bias: whether a bias is added.
        vector: whether rows of d can be stored 16 bytes at a time.
    """

    config: GemmConfig
    kind: str
    scale_kind: str
    zero: str
    scale_group: int
    bias: bool
    vector: bool

    @property
    def block_bytes(self) -> int:
        """One 64 x 128 block of the packed weight: codes, scales, zero points."""
        return 4096 + 128 // self.scale_group * 128 * (1 if self.zero == "none" else 2)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; each owns 64 rows of the weight tile."""
        return self.config.tile_n // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def blocks(self) -> int:
        """Weight blocks along k in one stage."""
        return self.config.tile_k // 128

    @property
    def weight_bytes(self) -> int:
        return self.warpgroups * self.blocks * self.block_bytes

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
    def reduction_bytes(self) -> int:
        """Accumulators that a split-k CTA parks for its cluster; they lie over the drained pipeline."""
        return self.config.tile_m * self.config.tile_n * 4 if self.config.split_k > 1 else 0

    @property
    def stages(self) -> int:
        room = SHARED_MEMORY - _BARRIERS_AND_ALIGNMENT - self.warpgroups * self.staging_bytes
        fit = min(8, room // self.stage_bytes)
        return min(self.config.stages, fit) if self.config.stages else fit

    @property
    def shared_memory(self) -> int:
        pipeline = self.stages * self.stage_bytes
        return pipeline + self.warpgroups * self.staging_bytes + _BARRIERS_AND_ALIGNMENT

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer thread asks for, 0 where the launch's own share is enough."""
        return {1: 0, 2: 240, 4: 112}[self.warpgroups]
